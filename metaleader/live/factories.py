"""Functions that another process finds by name, and the code that they depend on.

No object is pickled: a function is named by its module, and the other process imports it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import operator
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from metaleader.learners.learner import Learner

_MAIN, _COPY = "__main__", "__copy_of_main__"
# Modules that do not change while a process runs.
_FIXED = {"metaleader", "torch", *sys.stdlib_module_names}


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as JSON: its module or script, its name, and the arguments of a functools.partial.

    Raises:
        ValueError: if another process cannot import it, with the reason.
    """
    if isinstance(function, functools.partial):
        arguments = {"args": list(function.args), "keywords": function.keywords}
        if json.loads(_json(arguments)) != arguments:
            raise ValueError("the arguments of its functools.partial are not plain values")
        return {"function": described(function.func), **arguments}
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError(f"it is an object of {type(function).__name__}, not a function of a module")
    if "<" in name:
        raise ValueError(f"{name} is not a function at the top level of a module")
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        found = None
    if found is not function:
        raise ValueError(f"{module}.{name} is another function, or not there")
    return {**_place(module), "name": name}


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return "null"


def _place(module: str) -> dict[str, str]:
    """Where another process finds a module."""
    spec, script = getattr(sys.modules[module], "__spec__", None), Path(getattr(sys.modules[module], "__file__", ""))
    if module == _MAIN and not script.is_file():
        raise ValueError("it was not defined in a file")
    if module == _MAIN and not _has_guard(script):
        raise ValueError(
            f"{script} would run as a whole when it is imported; put its calls under `if __name__ == '__main__':`"
        )
    if spec is not None:
        return {"module": spec.name}
    if module != _MAIN:
        raise ValueError(f"the module {module!r} cannot be imported")
    return {"script": str(script.resolve())}


def _has_guard(script: Path) -> bool:
    """Whether a script has a part that runs only when it is the main program."""
    try:
        tree = ast.parse(script.read_bytes())
    except SyntaxError:
        return False
    tests = [node.test for node in tree.body if isinstance(node, ast.If)]
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test))


def restored(description: dict[str, Any]) -> Callable[..., Any]:
    """The function of a description."""
    if "function" in description:
        return functools.partial(restored(description["function"]), *description["args"], **description["keywords"])
    if "script" in description:
        module: Any = sys.modules.get(_COPY) or _script(description["script"])
    else:
        module = importlib.import_module(description["module"])
    return operator.attrgetter(description["name"])(module)


def _script(path: str) -> Any:
    """A script as a module, without the part that runs only when it is the main program."""
    module = type(sys)(_COPY)
    sys.modules[_COPY] = sys.modules[_MAIN] = module
    vars(module).update(runpy.run_path(path, run_name=_COPY))
    return module


def code_of(learner: Learner) -> dict[str, str]:
    """Hashes of the files that define a learner, its loss, its layers and the functions among its settings."""
    values = [learner.loss, *type(learner).__mro__, *(type(layer) for layer in learner.network.module.modules())]
    values += [value for value in learner.options.plain().values() if callable(value)]
    files = sorted({file for value in values for file in _files(value)})
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def _files(value: Any) -> Iterator[Path]:
    while isinstance(value, functools.partial):
        value = value.func
    module = getattr(value if hasattr(value, "__module__") else type(value), "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None and module.partition(".")[0] not in _FIXED:
        yield Path(file).resolve()
