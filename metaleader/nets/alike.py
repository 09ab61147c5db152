"""Comparison of functions: whether two do the same."""

from __future__ import annotations

import functools
import types
from typing import Any


def same_function(one: Any, other: Any) -> bool:
    """Whether two functions are the same code with the same settings."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, functools.partial):
        return same_function(one.func, other.func) and (one.args, one.keywords) == (other.args, other.keywords)
    if isinstance(one, types.FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        settings = [(f.__code__, f.__defaults__, f.__kwdefaults__) for f in (one, other)]
        return settings[0] == settings[1] and all(same_function(*pair) for pair in zip(*cells, strict=True))
    return isinstance(one, bool | int | float | str | tuple | types.MethodType) and one == other
