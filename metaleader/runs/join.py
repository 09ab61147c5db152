"""Joining finished runs of one experiment, each of different methods, into a run of all these methods."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metaleader.methods import styles
from metaleader.runs.digest import Digest
from metaleader.runs.folder import (
    csv_lines,
    is_finished,
    read_checkpoint,
    read_config,
    read_records,
    read_times,
    write_checkpoint,
    write_times,
)
from metaleader.runs.run import Run
from metaleader.system.files import write_atomic

# Keys of the configuration in which joined runs may differ: where they ran, values that do not affect the records, and
# values of single methods.
_PLACE = ("hardware", "versions", "commit")
_MAY_DIFFER = {"methods", "engines", "styles", "set", "data", "tensorboard", "file", *_PLACE}


def join_runs(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Join finished runs of one experiment, each of different methods, into a new folder.

    The new folder equals that of one run of all methods. The folders are not changed. If hardware, versions or commit
    differ, the new configuration has one value per method.

    Args:
        folders: the run folders.
        out: the new run folder.

    Raises:
        ValueError: if the runs do not match or are not finished, or if `out` holds a run.
        OSError: if a file cannot be read or written.
    """
    config = _joined_config(folders)
    header: list[str] = []
    trees: dict[str, dict[str, Any]] = {}
    lines, times = {}, []
    for folder in map(Path, folders):
        methods = read_config(folder)["methods"]
        for method in methods:
            tree = read_checkpoint(folder, method)
            if tree is None or not is_finished(tree):
                raise ValueError(f"{folder} is not finished: continue {method} with `metaleader resume {folder}`")
            trees[method] = tree
        records = read_records(folder)
        if not records:
            raise ValueError(f"{folder}/records.csv has no rows; use an intact copy")
        if header and list(records[0]) != header:
            raise ValueError(f"{folder} has the columns {list(records[0])}, not {header}; join runs of one release")
        header = list(records[0])
        for method in methods:
            lines[method] = csv_lines(row.values() for row in records if row["method"] == method)
        times += read_times(folder)
    with Run(out, config) as run:
        # Records last: a folder without records may be written again, so after a kill `join` is run again.
        digest = Digest(csv_lines([header]))
        write_times(run.folder, [row for m in config["methods"] for row in times if row["method"] == m])
        for method in config["methods"]:
            digest = digest.extended(lines[method])
            write_checkpoint(run.folder, method, trees[method] | run.seal(digest))
        write_atomic(run.records_path, csv_lines([header]) + b"".join(lines[method] for method in config["methods"]))


def _joined_config(folders: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    if len(folders) < 2:
        raise ValueError(f"name at least two run folders to join, got {len(folders)}")
    configs: list[dict[str, Any]] = [dict(read_config(folder)) for folder in folders]
    first, by_method = configs[0], {}
    for folder, config in zip(folders, configs, strict=True):
        for name in (first | config).keys() - _MAY_DIFFER:
            value, expected = config.get(name), first.get(name)
            if name == "settings":
                value, expected = (one["settings"] | {"learners": None} for one in (config, first))
            if value != expected:
                raise ValueError(f"{folder} does not match {folders[0]}: its {name} is {value!r}, not {expected!r}")
        if _shared(config) != _shared(first):
            raise ValueError(
                f"{folder} does not match {folders[0]}: its --set was {_shared(config)}, not {_shared(first)}, which"
                " concerns all methods"
            )
        for method in config["methods"]:
            if method in by_method:
                raise ValueError(f"{folder} has the method {method!r}, as a run before it does; leave one out")
            by_method[method] = config
    by_method = {method: by_method[method] for method in styles(by_method)}
    try:
        learners = {method: config["settings"]["learners"][method] for method, config in by_method.items()}
        joined = first | {
            "methods": list(by_method),
            "engines": {method: config["engines"][method] for method, config in by_method.items()},
            "settings": first["settings"] | {"learners": learners},
            "styles": {method: config["styles"][method] for method, config in by_method.items() if config["styles"]},
            "set": list(dict.fromkeys(text for config in configs for text in config["set"])),
        }
    except KeyError as error:
        raise ValueError(f"a config.json in {', '.join(map(str, folders))} is damaged ({error!r})") from error
    for name in _PLACE:
        if any(config.get(name) != first.get(name) for config in configs):
            joined[name] = {method: config.get(name) for method, config in by_method.items()}
    return joined


def _shared(config: dict[str, Any]) -> list[str]:
    """The settings of `--set` that do not concern a single method."""
    return [text for text in config["set"] if text.partition("=")[0].strip().partition(".")[0] not in config["methods"]]
