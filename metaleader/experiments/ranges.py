"""Ranges of settings, in which a search looks for the best value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from metaleader.experiments.axes import split_commas
from metaleader.experiments.experiment import ALL, Experiment
from metaleader.experiments.settings import find_setting, method_settings, parse_setting

_DIGITS = 4


@dataclass(frozen=True)
class Range:
    """The values that a setting may take: numbers between two bounds, or a list.

    Attributes:
        low: the lower bound.
        high: the upper bound.
        log: whether the logarithm is drawn uniformly.
        integer: whether the values are integers.
        choices: the values as text, instead of bounds.
    """

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False
    choices: tuple[str, ...] = ()

    def nearest(self, value: float) -> float:
        """A value with four significant digits within the bounds."""
        if self.integer:
            return int(value)
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

    def examples(self) -> tuple[object, ...]:
        """The choices as text, or the bounds and a number between them."""
        return self.choices or tuple(map(self.nearest, (self.low, (self.low + self.high) / 2, self.high)))

    def has(self, value: object) -> bool:
        """Whether a value of the setting lies in the range."""
        if self.choices:
            return any(parse_setting(f"x={text}")[1] == value for text in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.low <= value <= self.high and (not self.integer or isinstance(value, int))

    def text_of(self, value: object) -> str:
        """The text of a value that the range has."""
        same = [text for text in self.choices if parse_setting(f"x={text}")[1] == value]
        return same[0] if same else str(value)


def search_space(
    experiment: Experiment, texts: Iterable[str], methods: Sequence[str]
) -> dict[str, dict[str, tuple[Range, object]]]:
    """The ranges of each method by the names of its settings, each with the present value.

    Args:
        experiment: the experiment.
        texts: ranges as "ftml.inner_lr=log:0.001..0.3", "all.inner_steps=1..10" or "ftml.optimizer=adam,sgd".
        methods: the methods that are tuned; each needs a range.

    Raises:
        ValueError: for an unknown path, a setting that is not one of methods, or a range that is not valid.
    """
    space: dict[str, dict[str, tuple[Range, object]]] = {method: {} for method in methods}
    single: set[tuple[str, str]] = set()
    for text in texts:
        where = f"--search {text}"
        path, equals, value = (part.strip() for part in text.partition("="))
        if not path or not equals or not value:
            raise ValueError(f"{where}: write NAME=RANGE, such as --search ftml.inner_lr=log:0.001..0.3")
        group, name, _ = find_setting(experiment, path, methods, where)
        if group != ALL and group not in methods:
            raise ValueError(
                f"{where}: only settings of methods are tuned, and {path} concerns all alike; compare its values with"
                " `metaleader grid`"
            )
        for method in methods if group == ALL else [group]:
            present = method_settings(experiment, method)
            if name not in present or (group == ALL and (method, name) in single):
                continue
            if name in space[method] and (group == ALL or (method, name) in single):
                raise ValueError(f"{where}: {path} is given twice; leave one out")
            space[method][name] = parse_range(value, present[name], where), present[name]
            if group != ALL:
                single.add((method, name))
    for method, ranges in space.items():
        if not ranges:
            raise ValueError(
                f"there is no range for {method}: add --search {method}.NAME=LOW..HIGH, or leave it out of --methods"
            )
    return space


def parse_range(text: str, present: object, where: str = "") -> Range:
    """Read "LOW..HIGH", "log:LOW..HIGH" or "VALUE,VALUE,...".

    Bounds that are integers give integers, unless the present value is a number with a decimal point.

    >>> parse_range("log:1e-3..0.3", 0.1)
    Range(low=0.001, high=0.3, log=True, integer=False, choices=())
    """
    log = text.startswith("log:")
    found = re.fullmatch(r"([-+.\w]*?[^.])\.\.([^.].*|\.\d.*)", text.removeprefix("log:").strip())
    if found is None:
        choices = tuple(split_commas(text))
        if log or len(choices) < 2 or "" in choices or len(set(choices)) < len(choices):
            raise ValueError(f"{where}: write LOW..HIGH, log:LOW..HIGH, or two or more values separated by commas")
        return Range(choices=choices)
    try:
        low, high = float(found[1]), float(found[2])
    except ValueError as error:
        raise ValueError(f"{where}: the bounds of {text} are not numbers") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{where}: the lower bound must be less than the upper one, got {found[1]} and {found[2]}")
    if log and low <= 0:
        raise ValueError(f"{where}: the bounds of a logarithmic range must be positive, got {found[1]}")
    integer = not isinstance(present, float) and all(re.fullmatch(r"[-+]?\d+", bound) for bound in found.groups())
    return Range(low, high, log, integer)
