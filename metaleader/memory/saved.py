"""The tasks in memory as plain values for a state, and back.

A state may come from a file that no learner has written, so that all values are checked.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from metaleader.memory.entries import Entries, starts_of
from metaleader.memory.entry import Entry
from metaleader.memory.fields import flags, integer, integers, mapping, text_or_none, texts


def entries_tree(entries: Entries) -> dict[str, Any]:
    """The tasks kept, for a state whose rows lie one task after the other."""
    kept = entries.all()
    numbers = [entry.number for entry in kept]
    tree = {"names": [entry.name for entry in kept], "starts": starts_of(kept)[:-1], "open": entries.open}
    if entries.seen > len(kept) or numbers != list(range(len(kept))):
        tree |= {"numbers": numbers, "seen": entries.seen}
    if any(entry.observed != entry.count for entry in kept):
        tree["observed"] = [entry.observed for entry in kept]
    if entries.aside or entries.removed or any(entry.merged for entry in kept):
        tree["by_name"] = {
            "round": entries.round is not None,
            "merged": torch.tensor([entry.merged for entry in kept], dtype=torch.bool),
            # Ranks: a state of rounds alone, which has none, restores these too.
            "touched": torch.tensor([entry.touched for entry in kept], dtype=torch.int64).argsort().argsort(),
            "aside": [list(pair) for pair in entries.aside.items()],
            "removed": entries.removed,
        }
    return tree


def entries_from_tree(state: Mapping[str, Any], present: Entries) -> Entries:
    """The tasks of a state; if it has no data, the rows are those of the tasks present."""
    names, starts, length = texts(state, "names"), integers(state, "starts"), integer(state, "length")
    counts = np.diff(np.array([*starts, length], dtype=np.int64)).tolist()
    # A state lists them only if tasks were dropped or come in another order.
    seen = integer(state, "seen") if "seen" in state else len(names)
    numbers = integers(state, "numbers", high=seen - 1) if "numbers" in state else list(range(len(names)))
    more = mapping(state, "by_name") if "by_name" in state else {}
    merged = flags(more, "merged") if more else [False] * len(names)
    observed = integers(state, "observed") if "observed" in state else counts
    touched = integers(more, "touched") if more else list(range(len(names)))
    is_open, aside = text_or_none(state, "open"), more.get("aside", [])
    if more and type(more["round"]) is not bool:
        raise ValueError(f"the state is damaged: its round must be true or false, not {more['round']!r}")
    if any(type(pair) is not list or list(map(type, pair)) != [str, str] for pair in aside):
        raise ValueError("the state is damaged: its aside must be pairs of strings")
    if len(set(numbers)) < len(numbers) or seen < len(names):
        raise ValueError(f"the state is damaged: {len(names)} tasks are not numbered apart among {seen} seen")
    fields = (names, starts, numbers, merged, touched, counts, observed)
    if len({len(values) for values in fields}) > 1 or any(c < 1 for c in counts) or starts[:1] not in ([], [0]):
        raise ValueError(f"the state lists {len(names)} tasks whose rows do not fit its {length} datapoints")
    if "data" in state:
        kept = [Entry(*values) for values in zip(names, numbers, merged, starts, counts, strict=True)]
    else:
        by_number = _present(present, dict(zip(numbers, counts, strict=True)), length)
        kept = [by_number[n].copy(name, is_merged) for n, name, is_merged in zip(numbers, names, merged, strict=True)]
    if any(num < count for num, count in zip(observed, counts, strict=True)):
        raise ValueError("the state is damaged: a task has more datapoints than were observed")
    for entry, last, num in zip(kept, touched, observed, strict=True):
        entry.touched, entry.observed = last, num
    has_round = bool(kept) and (more["round"] if more else is_open is None)
    entries = Entries(kept, has_round, dict(aside))
    entries.seen, entries.open = seen, is_open
    entries.removed = integer(more, "removed", high=seen) if more else 0
    entries.freed = [] if "data" in state else list(present.freed)
    return entries


def _present(entries: Entries, counts: Mapping[int, int], length: int) -> dict[int, Entry]:
    """The entries present, by number, if they have these numbers and sizes."""
    present = {entry.number: entry for entry in entries.all()}
    num_datapoints = sum(entry.count for entry in present.values())
    if length != num_datapoints:
        raise ValueError(
            f"the state was saved without its data of {length} datapoints, but {num_datapoints} are present;"
            " observe the same data (update=False) before loading"
        )
    if counts != {number: entry.count for number, entry in present.items()}:
        raise ValueError(
            f"the state was saved without its data, of tasks {reprlib.repr(sorted(counts))}, but tasks"
            f" {reprlib.repr(sorted(present))} are present, or their sizes differ; observe the same data"
            " (update=False) before loading"
        )
    return present
