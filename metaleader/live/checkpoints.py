"""The checkpoints of a folder: the state of a session without data, which the journal has.

The two newest are kept, each a file named by the number of the last record that it includes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metaleader.system.trees import load_tree, save_tree, tree_from_bytes, tree_to_bytes

_KIND, _VERSION = "metaleader-session", 1
_KEPT = 2


def paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted(folder.glob("checkpoint-*.safetensors"), reverse=True)


def write(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically, and delete those that are no longer kept."""
    save_tree(folder / f"checkpoint-{state['number']:012d}.safetensors", state, _KIND, _VERSION)
    for path in paths(folder)[_KEPT:]:
        path.unlink()


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        ValueError: if it is damaged.
    """
    return _checked(load_tree(path, _KIND, _VERSION), str(path))


def encode(state: dict[str, Any]) -> bytes:
    """A state as the content of a record."""
    return tree_to_bytes(state, _KIND, _VERSION)


def decode(content: bytes, where: str) -> dict[str, Any]:
    """The state in the content of a record.

    Raises:
        ValueError: if it is damaged.
    """
    return _checked(tree_from_bytes(content, where, _KIND, _VERSION), where)


def _checked(state: dict[str, Any], where: str) -> dict[str, Any]:
    missing = {"number", "due", "behind", "exclusive", "refused", "learner", "schemas"} - state.keys()
    if missing:
        raise ValueError(f"{where} is not the state of a session: it has no {', '.join(sorted(missing))}")
    return state
