"""The trials of a search for settings: a file of JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Trials:
    """The finished trials, one JSON line each; a line that a kill cut off is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        try:
            self.lines = [json.loads(line) for line in complete.splitlines()]
            for line in self.lines:
                if not {"method", "trial", "settings", "state", "error", "errors"} <= line.keys():
                    raise ValueError("a line is not a trial")
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} was changed ({error}); restore it, or search again in another folder") from error
        if complete != content:
            os.truncate(path, len(complete))

    def of(self, method: str) -> list[dict[str, Any]]:
        """The trials of a method."""
        return [line for line in self.lines if line["method"] == method]

    def append(self, trial: dict[str, Any]) -> None:
        """Save a trial; after this returns, a kill cannot lose it."""
        with open(self.path, "ab") as file:
            file.write(json.dumps(trial).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(trial)


def print_trial(trial: dict[str, Any], trials: int, best: float | None) -> None:
    """Print the result of a trial, and the best error of its method so far."""
    settings = ", ".join(f"{name}={value}" for name, value in trial["settings"].items())
    if trial["state"] == "finished":
        result = f"error {trial['error']:.4g}, best {best:.4g}"
    elif trial["state"] == "pruned":
        result = f"pruned after {len(trial['errors'])} tasks, error {trial['errors'][-1]:.4g}"
    else:
        result = f"failed: {trial['reason']}"
    print(f"{trial['method']} {trial['trial'] + 1}/{trials}: {settings}: {result}", flush=True)
