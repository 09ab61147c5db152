"""The files of a run folder.

    config.json      everything that determines the run, written first
    records.csv      one row per measured reveal; no wall-clock times, so that the same run gives the same bytes
    checkpoint/      METHOD.safetensors: the learners of a method after their last finished round
    times.csv        seconds and peak memory of each round
    .lock            locked by the process that runs

All files are written atomically, except for records.csv, to which the records of each round are appended.
"""

import csv
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from metaleader.methods import check_colour
from metaleader.runs.digest import committed, is_valid, newest
from metaleader.system.files import write_atomic
from metaleader.system.machine import MAX_THREADS
from metaleader.system.trees import load_tree, save_tree

_log = logging.getLogger("metaleader")

FORMAT = 2
Schedule = Literal["standard", "paper", "quick"]
COLUMNS = ("method", "seed", "protocol", "round", "task", "datapoints", "loss", "accuracy", "needed")
TIMES = ("method", "round", "seconds", "peak_mb")
_CHECKPOINT, _CHECKPOINT_VERSION = "metaleader-checkpoint", 2
# Values that may be edited, for instance to resume on another machine
_EDITABLE = {"device", "engine", "engines", "threads", "data", "tensorboard", "file", "styles"}
_EDITABLE |= {"hardware", "versions", "commit"}
_TEXT, _INTEGERS = ("method", "protocol", "task"), ("seed", "round", "datapoints", "needed", "new_datapoints")
_BOUNDED = (*_INTEGERS, "seconds", "peak_mb")
_REQUIRED = ("seed", "round", "datapoints", "loss", "seconds")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?([eE][-+]?\d+)?|nan|inf)", re.ASCII)


class Settings(TypedDict):
    """The settings of the experiment in `config.json`."""

    meta_steps: int
    reveal: int
    reveals: int
    gamma: int | float | None
    steps: list[int]
    measure_at: list[int]  # empty: every reveal
    before_at: list[int]
    loss: dict[str, Any]
    learners: dict[str, Any]


class Config(TypedDict):
    """The values of `config.json`, which `read_config` checks.

    Format 1 has `preset` instead of `experiment`; of the settings of loss and learners only those that were given; and
    none of `_NEW`, which `read_config` adds.
    """

    format: int
    experiment: str
    methods: list[str]
    seeds: int
    schedule: Schedule
    tasks: int
    device: str
    engine: str
    data: str | None
    tensorboard: bool
    set: list[str]
    first_seed: int
    regret: bool
    shards: int
    file: str | None
    sha256: str | None
    imports: dict[str, Any]
    engines: dict[str, str]
    threads: int
    settings: Settings
    styles: dict[str, Any]  # label and colour of each method
    panels: list[int]
    error_name: str
    claims: list[dict]
    statistics: str
    hardware: Any  # one value, or one per method in a run that was joined
    versions: Any
    commit: Any


# The keys that format 2 added, with their values for runs of format 1
_NEW: dict[str, Any] = {
    "set": [],
    "first_seed": 0,
    "regret": False,
    "file": None,
    "sha256": None,
    "imports": {},
    "styles": {},
    "claims": [],
}


class Cost(NamedTuple):
    """The seconds that a method took, all rounds and seeds together, and the peak memory in MB if recorded."""

    seconds: float
    peak_mb: float | None


def read_config(folder: str | os.PathLike[str]) -> Config:
    """Read the configuration of a run folder.

    Raises:
        FileNotFoundError: if the folder holds no run.
        ValueError: if the file is not the configuration of a run, is damaged, or was written by a newer release.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: {path} is missing; name a folder that `metaleader run` wrote")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error}); use an intact copy") from error
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{path} is not the configuration of a run: it has no format")
    if not isinstance(config["format"], int) or config["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {config['format']!r}, this release reads up to {FORMAT}; upgrade metaleader"
        )
    if config["format"] == 1 and "preset" in config:
        config = {("experiment" if name == "preset" else name): value for name, value in config.items()}
        config = _NEW | config
    config.setdefault("shards", 1)
    if isinstance(config.get("settings"), dict):  # sizes that earlier releases did not measure
        for name in ("measure_at", "before_at"):
            config["settings"].setdefault(name, [])
    _check_types(path, config, Config)
    if not 1 <= config["threads"] <= MAX_THREADS:
        raise ValueError(f"{path}: threads must lie in 1..{MAX_THREADS}, got {config['threads']!r}; change it")
    for method, style in config["styles"].items():
        _check_style(path, method, style)
    return config  # pyright: ignore[reportReturnType]


def _check_types(path: Path, values: dict[str, Any], schema: Any) -> None:
    for name, hint in get_type_hints(schema).items():
        if name not in values:
            raise ValueError(f"{path} is damaged: it has no {name}; use an intact copy")
        value, kind, arguments = values[name], get_origin(hint), get_args(hint)
        if kind is Literal:
            is_valid = value in arguments
        elif kind is list:
            is_valid = isinstance(value, list) and all(isinstance(item, arguments[0]) for item in value)
        else:
            is_valid = hint is Any or isinstance(value, dict if kind is dict or is_typeddict(hint) else hint)
            is_valid = is_valid and not (hint is int and isinstance(value, bool))
        if not is_valid:
            raise ValueError(f"{path} is damaged: its {name} is {value!r}; use an intact copy")
        if is_typeddict(hint):
            _check_types(path, values[name], hint)


def _check_style(path: Path, method: str, style: Any) -> None:
    # The colour becomes part of a page.
    try:
        if set(style) != {"label", "colour"} or not isinstance(style["label"], str):
            raise ValueError("a style has a label and a colour")
        check_colour(style["colour"])
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: the style of {method} is {style!r} ({error}); use an intact copy"
        ) from error


def read_records(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a run folder, numbers as numbers and missing values as None.

    If there are checkpoints, the records are those of finished rounds, and they are compared with the digest.

    Raises:
        FileNotFoundError: if the folder holds no records.
        ValueError: if the file was changed, is not a table of records, or ends in the middle of a line.
    """
    folder = Path(folder)
    path = folder / "records.csv"
    config = read_config(folder) if (folder / "config.json").is_file() else None
    checkpoints = {} if config is None else read_checkpoints(folder, config["methods"])
    if config is None or not checkpoints:
        if not path.is_file():
            raise FileNotFoundError(f"no records in {folder}: {path} is missing")
        hint = (
            f"if the run was killed in its first round, `metaleader resume {folder}` repairs it, else remove that line"
        )
        return _checked_rounds(path, _parsed(path, path.read_bytes(), COLUMNS, hint), config)
    check_config(folder, checkpoints)
    finished = all(is_finished(checkpoints.get(method)) for method in config["methods"])
    advice = "restore it from a copy, or start a new run in another folder"
    return _parsed(path, committed(path, checkpoints, finished), COLUMNS, advice)


def read_times(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read method, round, seconds and peak_mb of each round; empty if the run has no `times.csv`."""
    path = Path(folder) / "times.csv"
    return _parsed(path, path.read_bytes(), TIMES, "delete it: only times are lost") if path.is_file() else []


def read_costs(folder: str | os.PathLike[str]) -> dict[str, Cost]:
    """Read the total time and the peak memory of each method."""
    costs: dict[str, Cost] = {}
    for row in read_times(folder):
        seconds, peak = costs.get(row["method"], Cost(0.0, None))
        peaks = [value for value in (peak, row["peak_mb"]) if value is not None]
        costs[row["method"]] = Cost(seconds + row["seconds"], max(peaks, default=None))
    return costs


def read_checkpoint(folder: Path, method: str) -> dict[str, Any] | None:
    """Read the last checkpoint of a method; None before the first.

    Raises:
        ValueError: if the file is not a checkpoint.
    """
    path = _checkpoint_path(folder, method)
    if not path.exists():
        return None
    tree = load_tree(path, _CHECKPOINT, _CHECKPOINT_VERSION)
    counts = [tree.get(name) for name in ("rounds_played", "rounds", "records_bytes")]
    try:
        is_config = isinstance(json.loads(tree.get("config", "{}")), dict)
    except (TypeError, ValueError, RecursionError):
        is_config = False
    are_counts = all(type(count) is int and count >= 0 for count in counts)
    if not (are_counts and is_config and "state" in tree and is_valid(tree)):
        raise ValueError(f"{path} is not the checkpoint of a run; use an intact copy")
    return tree


def read_checkpoints(folder: Path, methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read the last checkpoint of each method that has one."""
    trees = {method: read_checkpoint(folder, method) for method in methods}
    return {method: tree for method, tree in trees.items() if tree is not None}


def check_config(folder: Path, checkpoints: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare `config.json` with the copy in the newest checkpoint.

    Raises:
        ValueError: if a value differs that determines the records; a difference in others is logged.
    """
    tree = newest(checkpoints)
    if tree is None or "config" not in tree:  # a run of an earlier release
        return
    path = folder / "config.json"
    then, now = json.loads(tree["config"]), json.loads(path.read_bytes())
    for name in [name for name in then | now if then.get(name) != now.get(name)]:
        change = f"its {name} was {then.get(name)!r}, now it is {now.get(name)!r}"
        if name not in _EDITABLE:
            raise ValueError(f"{path} was changed during the run: {change}; change it back, or start a new run")
        _log.warning("%s was changed during the run: %s", path, change)


def write_checkpoint(folder: Path, method: str, tree: dict[str, Any]) -> None:
    """Write a checkpoint for `read_checkpoint`, atomically."""
    save_tree(_checkpoint_path(folder, method), tree, _CHECKPOINT, _CHECKPOINT_VERSION)


def is_finished(checkpoint: dict[str, Any] | None) -> bool:
    """Whether a method with this checkpoint has played all its rounds."""
    return checkpoint is not None and checkpoint["rounds_played"] == checkpoint["rounds"]


def write_times(folder: Path, times: Iterable[dict[str, Any]]) -> None:
    """Write times for `read_times`, atomically."""
    write_atomic(folder / "times.csv", csv_lines([TIMES, *(row.values() for row in times)]))


def _checkpoint_path(folder: Path, method: str) -> Path:
    if Path(method).name != method:
        raise ValueError(f"{folder} has a method named {method!r}; a name of a method is also a file name")
    return folder / "checkpoint" / f"{method}.safetensors"


def _parsed(path: Path, content: bytes, columns: Sequence[str], hint: str) -> list[dict[str, Any]]:
    try:
        text = content.decode()
        names, *lines = csv.reader(io.StringIO(text, newline="")) if text else ([],)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a table ({error})") from error
    if not set(columns) <= set(names):
        raise ValueError(f"{path} is not a table with the columns {', '.join(columns)}: its columns are {names}")
    if not text.endswith("\n"):
        raise ValueError(f"{path} ends in the middle of a line; {hint}")
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
    if text == "" and name not in _REQUIRED:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"its {name} is {text[:40]!r}, not a number")
    value = int(text) if name in _INTEGERS else float(text)
    if name in _BOUNDED and not 0 <= value < 2**63:
        raise ValueError(f"its {name} is {text[:40]}, which is out of range")
    return value


def _checked_rounds(path: Path, rows: list[dict[str, Any]], config: Config | None) -> list[dict[str, Any]]:
    """The rows, if their rounds are those of the run."""
    for number, row in enumerate(rows, 2):
        if config is not None and row["round"] >= config["tasks"]:
            raise ValueError(
                f"row {number} of {path} is damaged: its round is {row['round']}, but the run has {config['tasks']}"
                " tasks; use an intact copy"
            )
    return rows


def csv_lines(lines: Iterable[Iterable[Any]]) -> bytes:
    """Encode the lines of a table; None becomes an empty field."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
