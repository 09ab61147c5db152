"""Python files that define experiments."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaleader.experiments.experiment import Experiment
from metaleader.system.builders import FILE_MODULE, one_line, place_of, settable, unknown


@dataclass(frozen=True)
class Source:
    """An experiment and where it was found.

    Attributes:
        name: the name of the preset, or of the file without ".py".
        experiment: the experiment.
        file: the absolute path of the file; None for a preset.
        sha256: the hash of the file; None for a preset.
        imports: the hashes of the modules beside the file that it imports, by their names.
    """

    name: str
    experiment: Experiment
    file: Path | None = None
    sha256: str | None = None
    imports: dict[str, str] = field(default_factory=dict)


def load_experiment(path: Path, schedule: Any = "standard") -> Source:
    """Run an experiment file, and return the experiment that it defines."""
    path, content = _read(path)
    experiment = _run_file(path, content, lambda module: _experiment_of(module, path, schedule))
    digest = hashlib.sha256(content).hexdigest()
    return Source(path.stem, experiment, path, digest, _hashes_of_imports(content, path))


def load_definition(path: Path, name: str) -> Any:
    """Run a file, and return what it defines under a name; without that name, the experiment that it defines."""
    path, content = _read(path)

    def find(module: types.ModuleType) -> Any:
        values = module.__dict__
        if name in values:
            return values[name]
        if "experiment" not in values and not any(isinstance(value, Experiment) for value in values.values()):
            raise ValueError(f"{path.name} defines neither a function `{name}` nor an experiment; write one of them")
        return _experiment_of(module, path, "standard")

    return _run_file(path, content, find)


def _read(path: Path) -> tuple[Path, bytes]:
    """The absolute path and the content of a file."""
    try:
        path = path.resolve(strict=True)
        return path, path.read_bytes()
    except OSError as error:
        raise type(error)(f"cannot read the experiment {path}: {error.strerror}") from error


def _run_file(path: Path, content: bytes, find: Callable[[types.ModuleType], Any]) -> Any:
    """Run a file as a module, and find something in it; an error becomes a ValueError that names the line."""
    module = types.ModuleType(FILE_MODULE + path.stem)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # for dataclasses
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules beside the file
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
        return find(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        place = place_of(error) or f"{path}: "
        if isinstance(error, SyntaxError) and error.filename == str(path):
            place, error = f"{path}:{error.lineno}: ", SyntaxError(error.msg)
        raise ValueError(f"{place}{_advice(error)}") from error


def _experiment_of(module: types.ModuleType, path: Path, schedule: Any) -> Experiment:
    """The value named `experiment`, or the only Experiment of the module."""
    found: Any = module.__dict__.get("experiment")
    if found is None:
        values = [value for value in module.__dict__.values() if isinstance(value, Experiment)]
        if len(values) != 1:
            raise ValueError(
                f"{path.name} defines {len(values) or 'no'} experiments; write `experiment = ml.Experiment(...)`, or a"
                " function `experiment(schedule)` that returns one"
            )
        (found,) = values
    if isinstance(found, Experiment):
        if schedule != "standard":
            raise ValueError(f"the experiment has no schedules: leave out --schedule {schedule}, or make it a function")
        return found
    return _called(found, schedule)


def _called(function: Callable[..., Any], schedule: Any) -> Experiment:
    if not callable(function):
        raise ValueError(f"`experiment` must be an ml.Experiment or a function that returns one, got {function!r}")
    if "schedule" in settable(function):
        experiment = function(schedule=schedule)
    elif schedule != "standard":
        raise ValueError(f"the experiment has no schedules: leave out --schedule {schedule}, or take it as an argument")
    else:
        experiment = function()
    if not isinstance(experiment, Experiment):
        raise ValueError(f"experiment() must return an ml.Experiment, got {type(experiment).__name__}")
    return experiment


def _advice(error: BaseException) -> str:
    """The message of an error; for a wrong field of an experiment with the names of the fields."""
    text = one_line(error)
    names = list(inspect.signature(Experiment).parameters)
    if match := re.search(r"Experiment\.__init__\(\) got an unexpected keyword argument '(\w+)'", text):
        return unknown("field of Experiment", match[1], names)
    if match := re.search(r"Experiment\.__init__\(\) missing \d+ required keyword-only arguments?: (.*)", text):
        return f"the experiment lacks {match[1]}"
    if isinstance(error, SystemExit):
        return "the file ends the process; remove the call of sys.exit, or put it under `if __name__ == '__main__'`"
    return text


def _hashes_of_imports(content: bytes, path: Path) -> dict[str, str]:
    """The hashes of all modules in the folder of a file that it imports, directly or through one another."""
    hashes: dict[str, str] = {}
    pending = [content]
    while pending:
        try:
            tree = ast.parse(pending.pop())
        except SyntaxError:
            continue  # a file that was not imported
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - {"metaleader"}:
                files = [path.parent / f"{top}.py", *sorted((path.parent / top).glob("**/*.py"))]
                for file in (file for file in files if file.is_file() and file != path):
                    key = file.relative_to(path.parent).as_posix()
                    # Modules beside the file have the last place in the search path: an installed one comes first.
                    module_file = getattr(sys.modules.get(top), "__file__", None)
                    if key in hashes or (module_file and path.parent not in Path(module_file).resolve().parents):
                        continue
                    text = file.read_bytes()
                    hashes[key] = hashlib.sha256(text).hexdigest()
                    pending.append(text)
    return dict(sorted(hashes.items()))
