"""Tasks whose data makes updates fail: which task it is, and its quarantine.

An update fails if a loss, a gradient or a parameter is not finite. If that is the fault of one task among others, the
task is set aside: its data is kept and no longer drawn.
"""

from __future__ import annotations

import contextlib
import logging
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.distributed.shards import Shard
from metaleader.engine.engine import Engine
from metaleader.engine.objective import GradientSteps
from metaleader.learners.outer import Outer
from metaleader.learners.sharded import ShardedDraw, merge_norms
from metaleader.learners.update import draw_numbers, gather, num_tasks
from metaleader.memory.rows import Draw
from metaleader.tasks import num_rows

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner

_log = logging.getLogger("metaleader")

# A task whose gradient is longer than that of the median task by this factor is suspected.
_SUSPICIOUS = 1e3
# If so many tasks raise an error one after the other, the fault is not that of one task.
_FEW = 8
# Numbers of the gradients that are computed at once
_CHUNK = 2**22


class Failure(NamedTuple):
    """Updates that failed.

    Attributes:
        drawn: the names of the tasks that they drew; None is the open round.
        bad: those whose own loss or gradient is not finite.
        culprits: those that can be set aside, with the reason; empty if the fault is not that of one task among others.
    """

    drawn: list[str | None]
    bad: list[str | None]
    culprits: dict[str, str]


def culprits(
    learner: Learner,
    draw: Draw | ShardedDraw,
    numbers: range,
    update: int,
    aside: Mapping[str, str],
    outer: Outer,
    error: ValueError | None,
) -> dict[str, str]:
    """The tasks to leave out after a failed update, with reasons; raises an error if they cannot be singled out."""
    draw, examined = draw.at(slice(0, update + 1)), draw_numbers(learner, numbers[: update + 1])
    if isinstance(draw, ShardedDraw):
        norms: dict[str | None, float] | None = {}
        for shard, drawn in draw.by_shard.items():
            some = longest_gradients(learner, examined, gather(learner, drawn), aside, shard)
            norms = None if norms is None or some is None else _largest(norms, some)
        norms = merge_norms(learner.sharding, norms)
    else:
        norms = longest_gradients(learner, examined, gather(learner, draw), aside)
    failure = judge(norms)
    num = len(learner.memory.sizes()) - len(learner.set_aside)
    if failure.culprits and 2 * len(failure.culprits.keys() | aside.keys()) <= num:
        return failure.culprits
    if None not in failure.bad and num > 1 and (error is None or len(failure.bad) < len(failure.drawn)):
        learner.skipped += len(numbers)
    raise error or _not_finite(learner, failure, update, len(numbers), outer.lrs(numbers)[update])


def _largest(norms: dict[str | None, float], others: dict[str | None, float]) -> dict[str | None, float]:
    return norms | {name: max(norm, norms.get(name, 0.0)) for name, norm in others.items()}


def longest_gradients(
    learner: Learner,
    numbers: Sequence[int],
    batches: tuple[Any, Any],
    aside: Collection[str],
    shard: Shard | None = None,
) -> dict[str | None, float] | None:
    """The largest gradient norm of each task drawn, alone, at the parameters before the updates.

    NaN counts as infinite. None if the tasks drawn have no names.

    Args:
        learner: the learner that failed.
        numbers: of the updates, up to the one that failed.
        batches: support and query of the draw of these updates.
        aside: the names that were left out of the draw.
        shard: that the draw belongs to.
    """
    options, definition = learner.options, learner.definition
    support = definition.support if isinstance(definition.support, int) else max(definition.support)
    width = support + options.query
    in_shard = {} if shard is None else {"shard": shard}
    tasks = num_tasks(learner, shard)
    names = learner.memory.names_drawn(options.seed, numbers, tasks, width, definition.which, aside, **in_shard)
    if len(names) != len(numbers) * tasks:
        return None  # by class
    norms = _norms(learner, *tree_map(lambda leaf: leaf.flatten(0, 1)[:, None], batches))
    longest: dict[str | None, float] = {}
    for name, norm in zip(names, norms.tolist(), strict=True):
        longest[name] = max(longest.get(name, 0.0), norm if np.isfinite(norm) else np.inf)
    return longest


def judge(longest: dict[str | None, float] | None) -> Failure:
    """Find the tasks whose fault a failure is, from the largest gradient norm of each task drawn."""
    if longest is None:
        return Failure([None], [None], {})
    bad = [name for name, norm in longest.items() if not np.isfinite(norm)]
    reasons: dict[str | None, str] = {}
    if bad and 2 * len(bad) <= len(longest):
        reasons = dict.fromkeys(bad, "its loss or gradient is not finite")
    elif not bad and len(longest) > 2:
        ordered = sorted(longest.values())
        ratio = ordered[-1] / max(ordered[len(ordered) // 2], 1e-300)
        if ratio > _SUSPICIOUS:
            name = max(longest, key=longest.__getitem__)
            reasons = {name: f"its gradient is {ratio:.0e} times as long as that of other tasks"}
    culprits = {name: reason for name, reason in reasons.items() if name is not None}
    return Failure(list(longest), bad, culprits if len(culprits) == len(reasons) else {})


def quarantine(learner: Learner, reasons: Mapping[str, str]) -> None:
    """Set tasks aside, with a warning that names them."""
    for name, reason in reasons.items():
        with learner.locks.reading:
            learner.memory.set_aside(name, reason)
        _log.warning(
            "task %s is set aside: %s. Its %d datapoints are kept but not drawn; readmit(name) draws them again,"
            " forget(name) deletes them",
            *(reprlib.repr(name), reason, learner.memory.sizes()[name]),
        )


def names_text(names: Sequence[str | None], current: str | None) -> str:
    """Names for a message."""
    shown = [reprlib.repr(current if name is None else name) for name in names[:5]]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _norms(learner: Learner, support: Any, query: Any) -> Tensor:
    """The norm of the gradient of each task, (tasks,); NaN where the loss or the gradient cannot be computed."""
    flat, objective = learner.state.flat, learner.definition.objective
    engine = Engine("eager", device=learner.device)

    def of_rows(first: int, num: int) -> Tensor:
        batches = tree_map(lambda leaf: leaf[first : first + num], (support, query))
        some_support, some_query = batches
        values, _ = engine.gradient(objective, flat.expand(num_rows(some_query), -1), some_support, some_query, None)
        return torch.where(torch.isfinite(values[0]), values[1], torch.nan).double().cpu()

    total, step = num_rows(query), max(1, min(64, _CHUNK // flat.numel()))
    try:
        return torch.cat([of_rows(first, step) for first in range(0, total, step)])
    except ValueError:
        return _one_by_one(of_rows, total)


def _one_by_one(of_rows: Callable[[int, int], Tensor], total: int) -> Tensor:
    """The same for a gradient that raises an error for some tasks; if it does for the first few, then for all."""
    norms = torch.full((total,), torch.nan, dtype=torch.float64)
    for i in range(total):
        with contextlib.suppress(ValueError):
            norms[i] = of_rows(i, 1)[0]
        if i == _FEW and not bool(torch.isfinite(norms).any()):
            break
    return norms


def _not_finite(learner: Learner, failure: Failure, update: int, num_updates: int, lr: float) -> ValueError:
    adaptation = learner.definition.adaptation
    inner = f" or inner_lr ({adaptation.lr or 'learned'})" if isinstance(adaptation, GradientSteps) else ""
    drawn = names_text(failure.drawn, learner.task)
    bad = f"; not finite alone: {names_text(failure.bad, learner.task)}" if failure.bad else ""
    return ValueError(
        f"the loss, its gradient or a parameter is not finite at update {update + 1} of {num_updates}, round"
        f" {learner.round} (task {learner.task!r}, {learner.num_datapoints} datapoints; drawn: {drawn}{bad}): lower"
        f" meta_lr ({lr}){inner}, set clip, or check the scale of the data; the learner is as before the call"
    )
