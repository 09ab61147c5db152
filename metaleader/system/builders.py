"""Functions whose keyword arguments are settings: they build networks, streams, losses and learners."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# Modules of experiment files are named after the file, with this prefix.
FILE_MODULE = "experiment file "


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or class by name; of a functools.partial those of the function inside.

    A function of C, whose signature is unknown, counts as one that takes any keyword argument.
    """
    try:
        return inspect.signature(_inner(function)).parameters
    except (ValueError, TypeError):
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether a function takes keyword arguments that its signature does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(function).values())


def settable(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that can be passed by keyword."""
    return [name for name, p in parameters_of(function).items() if p.kind in _NAMED]


def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that have a value, by name: those of a functools.partial, and defaults."""
    parameters = parameters_of(function)
    values = {name: p.default for name, p in parameters.items() if p.default is not p.empty and p.kind in _NAMED}
    given = given_arguments(function)
    return {name: given.get(name, values.get(name)) for name in [*parameters, *given] if name in values | given}


def given_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a functools.partial by name; empty for other functions."""
    if not isinstance(function, functools.partial):
        return {}
    positional = [name for name, p in parameters_of(function).items() if p.kind in _POSITIONAL]
    return dict(zip(positional, function.args, strict=False)) | function.keywords


def with_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with other values of some arguments."""
    if not values:
        return function
    if not isinstance(function, functools.partial):
        return functools.partial(function, **values)
    kinds = [(name, p.kind) for name, p in parameters_of(function).items() if p.kind in _POSITIONAL]
    args, keywords = function.args, dict(function.keywords)
    if len(args) <= len(kinds) and all(kind in _NAMED for _, kind in kinds[: len(args)]):
        # Positional arguments become keywords, so that they can be replaced.
        keywords = {name: value for (name, _), value in zip(kinds, args, strict=False)} | keywords
        args = ()
    return functools.partial(function.func, *args, **keywords | dict(values))


def call_with(function: Callable[..., Any], **offers: Any) -> Any:
    """Call a function with those of the offered keyword arguments that it takes."""
    any_name, names = takes_any(function), settable(function)
    return function(**{name: value for name, value in offers.items() if any_name or name in names})


def name_of(function: Any) -> str:
    """The qualified name of a function or class; of a functools.partial that of the function inside."""
    function = _inner(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = "" if named.__module__.startswith(FILE_MODULE) else f"{named.__module__}."  # a file may be renamed
    return f"{module}{named.__qualname__}"


def described(function: Callable[..., Any], *leave_out: str) -> dict[str, Any]:
    """A function and the values of its arguments, as JSON."""
    values = {name: value for name, value in arguments_of(function).items() if name not in leave_out}
    return {"function": name_of(function), "options": plain(values)}


def plain(value: Any) -> Any:
    """A value as JSON: functions and other objects by name, arrays by shape and hash."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8 if value.ndim else value.dtype).numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return {"array": list(value.shape), "dtype": str(value.dtype), "sha256": digest}
    if isinstance(value, functools.partial):
        return described(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {"class": name_of(value), **{name: plain(getattr(value, name)) for name in names}}
    return name_of(value)


def unknown(kind: str, name: str, valid: Collection[str], cutoff: float = 0.6) -> str:
    """The message for a name that does not exist: it suggests the nearest one and lists all."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=cutoff)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {name!r}{hint} There are {', '.join(valid)}"


def _inner(function: Any) -> Any:
    return function.func if isinstance(function, functools.partial) else function


@contextlib.contextmanager
def explained(attempt: str) -> Iterator[None]:
    """Turn an error of a user's function into a ValueError of one line, which names the line of the experiment file.

    An OSError and an ImportError from elsewhere stay as they are: data or an extra is missing, and they say how to get
    it.
    """
    try:
        yield
    except Exception as error:
        place = place_of(error)
        if not place and isinstance(error, OSError | ImportError):
            raise
        raise ValueError(f"{attempt}: {place}{one_line(error)}") from error


@contextlib.contextmanager
def located(attempt: str) -> Iterator[None]:
    """As `explained`, for errors in an experiment file alone: others stay as they are."""
    try:
        yield
    except Exception as error:
        if not (place := place_of(error)):
            raise
        raise ValueError(f"{attempt}: {place}{one_line(error)}") from error


def place_of(error: BaseException) -> str:
    """The file and line of the last call in an experiment file, as a prefix; empty if there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith(FILE_MODULE):
            place = f"{frame.f_code.co_filename}:{line}: "
    return place


def one_line(error: BaseException) -> str:
    """The message of an error on one line, with its type unless it is a ValueError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
