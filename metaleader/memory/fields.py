"""The fields of a state, read with checks: a state may come from a file that no learner has written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_HIGHEST = 2**53


def integer(state: Mapping[str, Any], name: str, low: int = 0, high: int = _HIGHEST) -> int:
    """An integer of at least `low` and at most `high`."""
    value = state[name]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"the state is damaged: its {name} must be an integer in {low}..{high}, it is {_short(value)}")
    return value


def integers(state: Mapping[str, Any], name: str, low: int = 0, high: int = _HIGHEST) -> list[int]:
    """A list of such integers, or a tensor of them with one dimension."""
    value = state[name]
    if isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 1:
        value = value.tolist()
    if type(value) is not list or not all(type(item) is int and low <= item <= high for item in value):
        raise ValueError(f"the state is damaged: its {name} must be integers in {low}..{high}, not {_short(value)}")
    return value


def flags(state: Mapping[str, Any], name: str) -> list[bool]:
    """A tensor of booleans with one dimension, as a list."""
    value = state[name]
    if not (isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim == 1):
        raise ValueError(f"the state is damaged: its {name} must be booleans, not {_short(value)}")
    return value.tolist()


def texts(state: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings."""
    value = state[name]
    if type(value) is not list or not all(type(item) is str for item in value):
        raise ValueError(f"the state is damaged: its {name} must be strings, not {_short(value)}")
    return value


def text_or_none(state: Mapping[str, Any], name: str) -> str | None:
    """A string, or None."""
    value = state[name]
    if value is not None and type(value) is not str:
        raise ValueError(f"the state is damaged: its {name} must be a string or None, it is {_short(value)}")
    return value


def mapping(state: Any, name: str) -> Mapping[str, Any]:
    """A mapping."""
    if not isinstance(state, Mapping) or not isinstance(state[name], Mapping):
        raise ValueError(f"the state is damaged: its {name} must be a dict")
    return state[name]


def _short(value: Any) -> str:
    text = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
