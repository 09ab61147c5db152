"""Finished runs of one experiment, each of other methods, joined into the run of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metaleader.runs.folder import (
    Run,
    csv_lines,
    is_finished,
    read_checkpoint,
    read_config,
    read_records,
    read_times,
    write_checkpoint,
    write_times,
)
from metaleader.system.files import write_atomic

# In what joined runs may differ: where they ran, and what has no part in their numbers or is of a method alone.
_PLACE = ("hardware", "versions", "commit")
_MAY_DIFFER = {"methods", "engines", "data", "tensorboard", *_PLACE}


def join_runs(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], order: Sequence[str]) -> None:
    """Join finished runs of one experiment, each of other methods, into a new folder: as one run of all leaves it.

    The folders stay as they are. Where hardware, versions or commit differ, the new configuration has them by method.

    Args:
        folders: of the runs.
        out: the new run folder.
        order: all methods there are, in the order that they get.

    Raises:
        ValueError: for runs that do not fit together or are not finished, or when `out` holds a run.
        OSError: when a file cannot be read or written.
    """
    config = _joined_config(folders, order)
    head: list[str] = []
    trees: dict[str, dict[str, Any]] = {}
    lines, times = {}, []
    for folder in map(Path, folders):
        methods = read_config(folder)["methods"]
        for method in methods:
            tree = read_checkpoint(folder, method)
            if tree is None or not is_finished(tree):
                raise ValueError(f"{folder} is not finished: {method} goes on with `metaleader resume {folder}`")
            trees[method] = tree
        records = read_records(folder)
        if (folder / "records.csv").stat().st_size != max(trees[method]["records_bytes"] for method in methods):
            raise ValueError(f"{folder}/records.csv is not as long as its checkpoint says; use an intact copy")
        if head and list(records[0]) != head:
            raise ValueError(f"{folder} has the columns {list(records[0])}, not {head}; join runs of one release")
        head = list(records[0])
        for method in methods:
            lines[method] = csv_lines(row.values() for row in records if row["method"] == method)
        times += read_times(folder)
    with Run(out, config) as run:
        # Records before checkpoints, as in a round: after a kill, `resume` goes on with what is there.
        content = csv_lines([head])
        for method in config["methods"]:
            content += lines[method]
            trees[method]["records_bytes"] = len(content)
        write_atomic(run.records_path, content)
        write_times(run.folder, [row for m in config["methods"] for row in times if row["method"] == m])
        for method in config["methods"]:
            write_checkpoint(run.folder, method, trees[method])


def _joined_config(folders: Sequence[str | os.PathLike[str]], order: Sequence[str]) -> dict[str, Any]:
    if len(folders) < 2:
        raise ValueError(f"name at least two run folders to join, got {len(folders)}")
    configs = [read_config(folder) for folder in folders]
    first, of_method = configs[0], {}
    for folder, config in zip(folders, configs, strict=True):
        for name in (first | config).keys() - _MAY_DIFFER:
            one, other = config.get(name), first.get(name)
            if name == "settings" and isinstance(one, dict) and isinstance(other, dict):
                one, other = ({**settings, "learners": None} for settings in (one, other))
            if one != other:
                raise ValueError(f"{folder} does not fit {folders[0]}: its {name} is {one!r}, not {other!r}")
        for method in config["methods"]:
            if method in of_method:
                raise ValueError(f"{folder} has the method {method!r}, and so has a run before it; leave one out")
            if method not in order:
                raise ValueError(f"{folder} has the unknown method {method!r}; there are {', '.join(order)}")
            of_method[method] = config
    of_method = {method: of_method[method] for method in order if method in of_method}
    try:
        learners = {method: config["settings"]["learners"][method] for method, config in of_method.items()}
        joined = first | {
            "methods": list(of_method),
            "engines": {method: config["engines"][method] for method, config in of_method.items()},
            "settings": first["settings"] | {"learners": learners},
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"a config.json in {', '.join(map(str, folders))} is damaged ({error!r})") from error
    for name in _PLACE:
        if any(config.get(name) != first.get(name) for config in configs):
            joined[name] = {method: config.get(name) for method, config in of_method.items()}
    return joined
