"""A run as the report shows it: its records, its configuration and what its preset says about both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from metaleader.presets import PRESETS, Preset, Schedule
from metaleader.report.curves import Records, of_one_protocol
from metaleader.runs.folder import read_records


@dataclass(frozen=True)
class Exhibit:
    """A run, with what its preset fixes, or what the records say where the preset is not one of ours.

    Attributes:
        name: the folder's, as short as it can be told apart.
        folder: of the run.
        config: as in `config.json`.
        records: all of them.
        preset: None where it is unknown.
        sizes: the sizes of D_t to look at.
        gamma: the threshold of proficiency.
        error_name: what the error is called.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    records: Records
    preset: Preset | None
    sizes: tuple[int, ...]
    gamma: float | None
    error_name: str

    @property
    def stream(self) -> str:
        """The name of the preset."""
        return str(self.config.get("preset", "unknown preset"))

    @property
    def measured(self) -> Records:
        """The records that the tables are made of."""
        return of_one_protocol(self.records)

    @property
    def has_accuracy(self) -> bool:
        """Whether this is classification."""
        return any(r["accuracy"] is not None for r in self.records)

    @property
    def measure(self) -> str:
        """What `value` gives: an error, or the accuracy where the paper has no threshold."""
        return "accuracy" if self.gamma is None and self.has_accuracy else self.error_name

    def value(self, record: Mapping[str, Any], suffix: str = "") -> float | None:
        """The measure of a record; the suffix chooses another number of steps, or other batch-norm statistics."""
        accuracy = record.get(f"accuracy{suffix}")
        if accuracy is None:
            return record.get(f"loss{suffix}")
        return accuracy if self.measure == "accuracy" else 1 - accuracy


def read_exhibits(folders: Sequence[str | os.PathLike[str]]) -> list[Exhibit]:
    """Read run folders.

    Raises:
        ValueError: for no folder, or files that are not those of a run.
        OSError: when a file cannot be read.
    """
    if not folders:
        raise ValueError("name at least one run folder")
    paths = [Path(folder) for folder in folders]
    names = [path.resolve().name for path in paths]
    return [_read(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)]


def _read(folder: Path, name: str) -> Exhibit:
    records = read_records(folder)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not hold the configuration of a run")
    preset, schedule = str(config.get("preset")), config.get("schedule", "standard")
    if preset in PRESETS and schedule in get_args(Schedule):
        made = PRESETS[preset](schedule)
        gamma = _gamma(config, made.gamma)
        return Exhibit(name, folder, config, records, made, made.panels, gamma, made.error_name)
    sizes = sorted({r["datapoints"] for r in records})
    return Exhibit(
        name,
        folder,
        config,
        records,
        preset=None,
        sizes=tuple(dict.fromkeys(sizes[:1] + sizes[-1:])),
        gamma=_gamma(config, None),
        error_name="error" if any(r["accuracy"] is not None for r in records) else "loss",
    )


def _gamma(config: Mapping[str, Any], otherwise: float | None) -> float | None:
    """The threshold that the run was judged by: the preset's own may have changed since."""
    settings = config.get("settings")
    gamma = settings.get("gamma", otherwise) if isinstance(settings, dict) else otherwise
    return gamma if isinstance(gamma, int | float) else None
