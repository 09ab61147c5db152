"""Event files for TensorBoard, written record by record."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np

from metaleader.evaluate import Record
from metaleader.report.records import over_seeds, record_error


class TensorBoard:
    """Writes the mean error over seeds by the number of datapoints; called with method, seed and record.

    Args:
        folder: the folder of the event files, one subfolder per method; None writes nothing.
        error_name: the name of the error.
        seeds: the number of seeds.
    """

    def __init__(self, folder: Path | None, error_name: str, seeds: int) -> None:
        self._folder, self._error_name, self._seeds = folder, error_name, seeds
        self._method: str | None = None
        self._errors: list[float] = []
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def __call__(self, method: str, seed: int, record: Record) -> None:
        """Write the mean error when the record of the last seed arrives."""
        if self._folder is None:
            return
        if method != self._method:
            self.__exit__()
            self._method = method
            # Values of rounds that a stopped run did not save are replaced.
            self._writer = summary_writer()(str(self._folder / method), purge_step=record.round)
        self._errors.append(record_error(vars(record)))
        if len(self._errors) == self._seeds:
            error = float(over_seeds(np.array(self._errors))[0])
            self._errors = []
            self._writer.add_scalar(f"{self._error_name} after {record.datapoints} datapoints", error, record.round)
            self._writer.flush()


def summary_writer() -> Any:
    """The writer class of TensorBoard; raises ValueError if this optional dependency is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs the package tensorboard ({error}); install metaleader[tensorboard], or leave it out"
        ) from error
    return SummaryWriter
