"""A run as reports show it: its configuration, its records, and for a preset its experiment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from metaleader.experiments.experiment import Experiment
from metaleader.experiments.settings import with_settings
from metaleader.methods import Style
from metaleader.methods import styles as styles_of
from metaleader.presets import PRESETS
from metaleader.report.curves import Given
from metaleader.report.records import Records, of_one_protocol, record_error
from metaleader.runs.folder import Config, read_config, read_records


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Records, and how tables and figures show them.

    Attributes:
        name: the name of the run.
        records: all records.
        given: labels and colours of methods, as `{"mine": {"label": "my method", "colour": "#D55E00"}}`.
        sizes: the sizes of D_t to show, ascending.
        gamma: the threshold of proficiency.
        error_name: the name of the error.
        steps: the number of adaptation steps behind the columns `loss` and `accuracy`; None if unknown.
    """

    name: str
    records: Records
    given: Given
    sizes: Sequence[int]
    gamma: float | None
    error_name: str
    steps: int | None

    @cached_property
    def styles(self) -> dict[str, Style]:
        """The labels, colours, markers and dashes of the methods that have records."""
        return styles_of((r["method"] for r in self.records), self.given)

    def label(self, method: str) -> str:
        """The label of a method."""
        return styles_of([method], self.given)[method].label

    @property
    def measured(self) -> Records:
        """The records that tables are made of."""
        return of_one_protocol(self.records)

    @property
    def has_accuracy(self) -> bool:
        """Whether the tasks are classification."""
        return any(r["accuracy"] is not None for r in self.records)

    @property
    def measure(self) -> str:
        """The name of `value`: the error, or the accuracy if the paper has no threshold."""
        return "accuracy" if self.gamma is None and self.has_accuracy else self.error_name

    def value(self, record: Mapping[str, Any], suffix: str = "") -> float | None:
        """The measure of a record; the suffix is that of `record_error`."""
        error = record_error(record, suffix)
        return 1 - error if self.measure == "accuracy" and error is not None else error


@dataclass(frozen=True, kw_only=True)
class LoadedRun(Shown):
    """A run read from its folder. All that is shown is that of its configuration: a preset may have changed since.

    Attributes:
        folder: the run folder.
        config: the content of `config.json`.
    """

    folder: Path
    config: Config

    @classmethod
    def of(cls, name: str, folder: Path, config: Config, records: Records) -> LoadedRun:
        """The run with the content of the files of its folder."""
        return cls(
            name=name,
            folder=folder,
            config=config,
            records=records,
            given=config["styles"],
            sizes=config["panels"],
            gamma=config["settings"]["gamma"],
            error_name=config["error_name"],
            steps=config["settings"]["steps"][0],
        )

    @cached_property
    def preset(self) -> Experiment | None:
        """The preset of the run; None for an experiment file, which is not executed."""
        try:
            return preset_of(self.config)
        except ValueError:  # a setting that the preset no longer has
            return None


def preset_of(config: Config) -> Experiment | None:
    """The preset of a run, with the settings of the run; None for an experiment file."""
    make = PRESETS.get(config["experiment"])
    if make is None or config["file"] is not None:
        return None
    return with_settings(make(config["schedule"]), config["set"], config["methods"])


def load_runs(folders: Sequence[str | os.PathLike[str]]) -> list[LoadedRun]:
    """Read run folders.

    Raises:
        ValueError: without a folder, or if a file is not that of a run.
        OSError: if a file cannot be read.
    """
    if not folders:
        raise ValueError("name at least one run folder")
    paths = [Path(folder) for folder in folders]
    names = [path.resolve().name for path in paths]
    return [
        LoadedRun.of(name if names.count(name) == 1 else str(path), path, read_config(path), read_records(path))
        for path, name in zip(paths, names, strict=True)
    ]
