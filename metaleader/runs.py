"""The books: a run folder with its configuration, records and checkpoints, and how a run goes on after any kill.

    config.json      everything that determines the run, written first
    records.csv      a row for each measured reveal; no wall-clock times, so that the same run gives the same bytes
    checkpoint/      METHOD.safetensors: the learners of a method after their last finished round
    times.csv        seconds and peak memory of each round
    .lock            locked by the process that runs

A round's records are appended and synced first; then the checkpoint that holds their byte length is renamed into place.
Whatever a kill leaves, the records are cut back to the length in the last checkpoint, and the run goes on from there.
Observed data is not in a checkpoint: the stream gives it again.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from metaleader.evaluate import Record
from metaleader.store import load_tree, save_tree, write_atomic

FORMAT = 1
COLUMNS = ("method", "seed", "protocol", "round", "task", "datapoints", "loss", "accuracy", "needed")
_TIMES = ("method", "round", "seconds", "peak_mb")
_CHECKPOINT = "metaleader-checkpoint"
_TEXT, _INTEGERS = ("method", "protocol", "task"), ("seed", "round", "datapoints", "needed", "new_datapoints")

# In what joined runs may differ: where they ran, and what has no part in their numbers or is of a method alone.
_PLACE = ("hardware", "versions", "commit")
_MAY_DIFFER = {"methods", "engines", "data", "tensorboard", *_PLACE}


class Run:
    """A run folder, locked by this process from here to the end of the `with` block.

    Args:
        folder: of the run.
        config: plain values, `methods` among them, for a new run: the folder is made, and refused where it already
            holds records. None opens the run that is there.
    """

    def __init__(self, folder: str | os.PathLike[str], config: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.records_path = self.folder / "records.csv"
        self._checkpoints = self.folder / "checkpoint"
        if config is None:
            read_config(self.folder)
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "a")  # noqa: SIM115
        except OSError as error:
            raise OSError(f"cannot write the run folder {self.folder}: {error.strerror}; choose another") from error
        try:
            self._acquire()
            if config is not None:
                self._create(config)
            self.config = read_config(self.folder)
            for stray in (*self.folder.glob(".*.part"), *self._checkpoints.glob(".*.part")):
                stray.unlink()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.folder} is in use by another process; wait for it, or stop it first") from error

    def _create(self, config: dict[str, Any]) -> None:
        if self.records_path.exists():
            raise ValueError(
                f"{self.folder} already holds a run: go on with `metaleader resume {self.folder}`, or choose another"
                " folder with --out"
            )
        if (self.folder / "config.json").exists():
            # A run that stopped before its first record may be replaced, a file of the user's own may not.
            read_config(self.folder)
        write_atomic(self.folder / "config.json", json.dumps({"format": FORMAT, **config}, indent=2).encode() + b"\n")

    def checkpoint(self, method: str) -> dict[str, Any] | None:
        """The last checkpoint of a method, None before its first: `rounds_played` and `state`, as `save` got them."""
        return _read_checkpoint(self.folder, method)

    def finished(self) -> bool:
        """Whether every method has played all its rounds."""
        return all(_is_finished(self.checkpoint(method)) for method in self.config["methods"])

    def rewind(self, rounds: int, more: Iterable[str] = ()) -> None:
        """Make the records those of the last checkpoint; for a run without one, the head of the table alone.

        Args:
            rounds: how many each method plays.
            more: columns of the records beyond those of every run.
        """
        self._rounds, self._columns = rounds, (*COLUMNS, *more)
        found = [self.checkpoint(method) for method in self.config["methods"]]
        length = max((tree["records_bytes"] for tree in found if tree is not None), default=0)
        if length == 0:
            # A run that was killed in its first round may have records of that round.
            if self.records_path.exists() and self._has_later_rounds():
                raise ValueError(
                    f"{self.folder} has records but no checkpoint, so it cannot be resumed and is left as it is;"
                    " `metaleader report` and `verify` read it, a new run needs another folder"
                )
            write_atomic(self.records_path, _csv([self._columns]))
        else:
            here = self.records_path.stat().st_size if self.records_path.exists() else 0
            if here < length:
                raise ValueError(
                    f"{self.records_path} was cut: it has {here} bytes, and {length} when its checkpoint was written;"
                    " restore it, or start the run anew in another folder"
                )
            os.truncate(self.records_path, length)
        played = {m: tree["rounds_played"] for m, tree in zip(self.config["methods"], found, strict=True) if tree}
        self._times = [row for row in read_times(self.folder) if row["round"] < played.get(row["method"], 0)]

    def _has_later_rounds(self) -> bool:
        whole = self.records_path.read_bytes().rpartition(b"\n")[0].decode()
        return any(row["round"] != "0" for row in csv.DictReader(whole.splitlines()))

    def save(
        self,
        method: str,
        played: int,
        records: Iterable[Sequence[Record]],
        state: dict[str, Any],
        seconds: float,
        peak_mb: float,
    ) -> None:
        """Keep a finished round; once this returns, no kill can lose it.

        Args:
            method: whose round it is.
            played: rounds of the method, with this one.
            records: of the round's reveals, one for each seed.
            state: what the method needs to go on: a tree as `save_tree` takes it.
            seconds: that the round took.
            peak_mb: the largest memory so far.
        """
        lines = []
        for reveal in records:
            for seed, record in enumerate(reveal):
                row = {"method": method, "seed": seed, **vars(record), **record.more}
                lines.append(_line(row, self._columns))
        with open(self.records_path, "ab") as file:
            file.write(_csv(lines))
            file.flush()
            os.fsync(file.fileno())
            length = file.tell()
        row = (method, played - 1, round(seconds, 3), round(peak_mb, 1))
        self._times.append(dict(zip(_TIMES, row, strict=True)))
        _write_times(self.folder, self._times)
        tree = {"rounds_played": played, "rounds": self._rounds, "records_bytes": length, "state": state}
        save_tree(_checkpoint_path(self.folder, method), tree, _CHECKPOINT, FORMAT)


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
            tree = _read_checkpoint(folder, method)
            if tree is None or not _is_finished(tree):
                raise ValueError(f"{folder} is not finished: {method} goes on with `metaleader resume {folder}`")
            trees[method] = tree
        records = read_records(folder)
        if (folder / "records.csv").stat().st_size != max(trees[method]["records_bytes"] for method in methods):
            raise ValueError(f"{folder}/records.csv is not as long as its checkpoint says; use an intact copy")
        if head and list(records[0]) != head:
            raise ValueError(f"{folder} has the columns {list(records[0])}, not {head}; join runs of one release")
        head = list(records[0])
        for method in methods:
            lines[method] = _csv(_line(row, head) for row in records if row["method"] == method)
        times += read_times(folder)
    with Run(out, config) as run:
        # Records before checkpoints, as in a round: after a kill, `resume` goes on with what is there.
        content = _csv([head])
        for method in config["methods"]:
            content += lines[method]
            trees[method]["records_bytes"] = len(content)
        write_atomic(run.records_path, content)
        _write_times(run.folder, [row for m in config["methods"] for row in times if row["method"] == m])
        for method in config["methods"]:
            save_tree(_checkpoint_path(run.folder, method), trees[method], _CHECKPOINT, FORMAT)


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


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration of a run folder.

    Raises:
        FileNotFoundError: when the folder holds no run.
        ValueError: for a file that is not a run's configuration, or of a newer release.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: {path} is missing")
    try:
        config = json.loads(path.read_bytes())
        found, methods = config["format"], config["methods"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error!r}); use an intact copy") from error
    if not isinstance(found, int) or found > FORMAT:
        raise ValueError(f"{path} has format {found!r}, this release reads up to {FORMAT}; upgrade metaleader")
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise ValueError(f"{path} is not the configuration of a run: its methods are {methods!r}")
    return config


def read_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run folder, numbers as numbers and None where a value is missing.

    Raises:
        FileNotFoundError: when the folder holds no records.
        ValueError: for a file that is not one of records, or is cut in the middle of a line.
    """
    path = Path(folder) / "records.csv"
    if not path.is_file():
        raise FileNotFoundError(f"no records in {folder}: {path} is missing")
    return _read_csv(path, COLUMNS, f"`metaleader resume {folder}` mends a run that was killed")


def read_times(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Seconds and peak memory (MB) of each round of each method: method, round, seconds, peak_mb."""
    path = Path(folder) / "times.csv"
    return _read_csv(path, _TIMES, "remove it: only times are lost") if path.is_file() else []


def _checkpoint_path(folder: Path, method: str) -> Path:
    return folder / "checkpoint" / f"{method}.safetensors"


def _read_checkpoint(folder: Path, method: str) -> dict[str, Any] | None:
    path = _checkpoint_path(folder, method)
    if not path.exists():
        return None
    tree = load_tree(path, _CHECKPOINT, FORMAT)
    if not {"rounds_played", "rounds", "records_bytes", "state"} <= tree.keys():
        raise ValueError(f"{path} is not the checkpoint of a run; use an intact copy")
    return tree


def _is_finished(tree: dict[str, Any] | None) -> bool:
    return tree is not None and tree["rounds_played"] == tree["rounds"]


def _write_times(folder: Path, times: Iterable[dict[str, Any]]) -> None:
    write_atomic(folder / "times.csv", _csv([_TIMES, *(row.values() for row in times)]))


def _read_csv(path: Path, columns: Sequence[str], hint: str) -> list[dict[str, Any]]:
    try:
        text = path.read_bytes().decode()
        names, *lines = csv.reader(io.StringIO(text, newline="")) if text else ([],)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a table ({error})") from error
    if not set(columns) <= set(names):
        raise ValueError(f"{path} is not a table with the columns {', '.join(columns)}: its columns are {names}")
    if not text.endswith("\n"):
        raise ValueError(f"{path} is cut in the middle of its last line; {hint}")
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            rows.append({name: _value(name, field) for name, field in zip(names, line, strict=True)})
        except ValueError as error:
            raise ValueError(f"row {number} of {path} is damaged ({error}); {hint}") from error
    return rows


def _value(name: str, text: str) -> Any:
    if name in _TEXT:
        return text
    if text == "":
        return None
    return int(text) if name in _INTEGERS else float(text)


def _line(row: dict[str, Any], columns: Iterable[str]) -> list[Any]:
    return ["" if row.get(name) is None else row[name] for name in columns]


def _csv(lines: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
