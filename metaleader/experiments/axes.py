"""Lists of values of settings: the axes of a grid."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from metaleader.experiments.experiment import Experiment
from metaleader.experiments.settings import find_setting, parse_setting

_OPENING, _CLOSING = "([{", ")]}"
_LONGEST = 120


def split_settings(
    experiment: Experiment, texts: Iterable[str], methods: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate settings with one value from those with a list of values.

    Commas outside brackets and quotes separate values. If the setting is a list, its values are lists in brackets, and
    without brackets the commas are those of one list: `steps=5,1` is one value, `steps=[5,1],[10,1]` are two.

    Args:
        experiment: the experiment.
        texts: settings as "path=value" or "path=value,value".
        methods: the methods that are run.

    Returns:
        The settings with one value, and the values of the others by path, as text.

    Raises:
        ValueError: for an unknown path, or an empty or repeated value.
    """
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    for text in texts:
        parse_setting(text)
        path, _, value = (part.strip() for part in text.partition("="))
        *_, old = find_setting(experiment, path, methods, f"--set {text}")
        values = split_commas(value)
        is_list = isinstance(old, list | tuple) and not any(part[:1] in _OPENING for part in values if part)
        if len(values) == 1 or is_list:
            fixed.append(text)
            continue
        if "" in values:
            raise ValueError(f"--set {text}: a value is empty; remove a comma, or write '' for an empty text")
        if repeated := [part for part in values if values.count(part) > 1]:
            raise ValueError(f"--set {text}: {repeated[0]} is there twice; remove one")
        if path in axes:
            raise ValueError(f"--set {text}: {path} is set twice; write all of its values in one list")
        axes[path] = values
    return fixed, axes


def split_commas(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes.

    >>> split_commas("0.1, [5, 1], 'a,b'")
    ['0.1', '[5, 1]', "'a,b'"]
    """
    parts, start, depth, quote = [], 0, 0, ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def combinations(axes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """All combinations of the values of axes, each as settings, by names that can be those of folders.

    >>> list(combinations({"ftml.inner_lr": ["0.1", "0.3"], "order": ["random"]}))
    ['ftml.inner_lr=0.1,order=random', 'ftml.inner_lr=0.3,order=random']
    """
    settings = [
        [f"{path}={value}" for path, value in zip(axes, values, strict=True)]
        for values in itertools.product(*axes.values())
    ]
    names = [re.sub(r"[^\w.=,+-]", "_", ",".join(texts)).strip(".") or "all" for texts in settings]
    if len(set(names)) < len(names) or any(len(name) > _LONGEST for name in names):
        names = [f"cell-{number:0{len(str(len(names)))}}" for number in range(1, len(names) + 1)]
    return dict(zip(names, settings, strict=True))
