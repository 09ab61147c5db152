"""The experiment: what is played, by which methods, and what is shown; the value that an experiment file defines."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from metaleader.experiments.claims import Better
from metaleader.learners.measure import Parts
from metaleader.losses import Loss, takes_labels
from metaleader.methods import Method, known_method, styles
from metaleader.tasks import Task, TaskStream, num_rows

# The names before the dot of settings, beside the methods.
GROUPS = ("network", "stream", "loss")
ALL = "all"


class _Claims(tuple[Better, ...]):
    """Claims that were checked when they were given, with the sizes then; settings may change the sizes later."""

    sizes: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: a Python file that defines one is played by `metaleader run FILE`.

    The keyword arguments of `network`, `stream` and `loss` (functions, classes or functools.partial) are settings, as
    are the options of the methods and the sizes: `--set network.filters=64`, `--set reveal=5`.

    Attributes:
        stream: makes the stream of a seed; called with `seed`, and with `data`, the folder with data sets, if it takes
            it.
        network: builds the network, which the methods share as their initial model.
        loss: the loss that the methods minimise, a function of (prediction, target).
        methods: for each name a class or function that makes a learner, or a `Method`; for the library's methods, such
            as "ftml", the options of its learner suffice.
        tasks: the number of tasks played; None plays all of the stream.
        order: an order of the tasks, as of `streams.reorder`; None keeps that of the stream.
        reveal: datapoints per reveal.
        reveals: reveals per task; None reveals all datapoints of the first task.
        meta_steps: meta-updates per reveal.
        gamma: the threshold of proficiency: an accuracy to reach, or for regression a loss; None for no threshold.
        panels: the sizes of D_t shown in figures and tables, ascending; by default one reveal and all data.
        steps: numbers of adaptation steps measured; the first gives the columns `loss` and `accuracy`.
        measure_at: the sizes of D_t measured, ascending, the last being all data; by default every reveal. A size
            between two reveals is measured after the updates of a shorter reveal, from which the learner then returns.
        before_at: the sizes of D_t at which w_t is also measured before the learner trains on the task, as the regret
            requires (columns `loss_before` and `accuracy_before`); by default those of `panels`.
        error_name: the name of the error in figures and tables.
        claims: claims that `metaleader verify` tests, such as `better("ftml", "toe", at=20, margin=0.02)`.
        extras: methods that run only if they are named.
        parts: slices of the outputs whose loss is also recorded separately, by name.
        threads: number of CPU threads; None keeps torch's default.
        summary: one line for lists.
    """

    stream: Callable[..., TaskStream]
    network: Callable[..., nn.Module]
    loss: Loss
    methods: Mapping[str, Any]
    tasks: int | None = None
    order: str | Sequence[int] | None = None
    reveal: int = 20
    reveals: int | None = None
    meta_steps: int = 10
    gamma: float | None = None
    panels: Sequence[int] = ()
    steps: Sequence[int] = (5, 0, 1, 10, 20)
    measure_at: Sequence[int] = ()
    before_at: Sequence[int] | None = None
    error_name: str = ""
    claims: Sequence[Better] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    threads: int | None = None
    summary: str = ""

    def __post_init__(self) -> None:
        for name in ("stream", "network", "loss"):
            value = getattr(self, name)
            if not callable(value) or (name == "network" and isinstance(value, nn.Module)):
                raise ValueError(f"{name} must be a function or class, got {_short(value)}")
        for name, low in (("tasks", 1), ("reveal", 1), ("reveals", 1), ("meta_steps", 0), ("threads", 1)):
            self._set(name, _integer(name, getattr(self, name), low, optional=name in ("tasks", "reveals", "threads")))
        if self.gamma is not None and not (_is_number(self.gamma) and math.isfinite(self.gamma)):
            raise ValueError(f"gamma must be a number or None, got {_short(self.gamma)}")
        if self.order is not None and not isinstance(self.order, str):
            self._set("order", _integers("order", self.order, 0))
        for name, low in (("panels", 1), ("steps", 0), ("measure_at", 1), ("before_at", 1)):
            if getattr(self, name) is not None:
                self._set(name, _integers(name, getattr(self, name), low))
        if not self.steps or len(set(self.steps)) < len(self.steps):
            raise ValueError(f"steps must be one or more different numbers, got {self.steps}")
        for name in ("panels", "measure_at", "before_at"):
            values = getattr(self, name) or ()
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must be ascending, got {values}")
        for name in ("error_name", "summary"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {_short(getattr(self, name))}")
        self._set("error_name", self.error_name or ("error" if takes_labels(self.loss) else "loss"))
        self._set("methods", _methods("methods", self.methods))
        self._set("extras", _methods("extras", self.extras))
        if not self.methods:
            raise ValueError("methods must hold at least one method")
        self._check_names()
        self._check_claims()
        self._check_panels()

    @property
    def all_methods(self) -> dict[str, Method]:
        """The default methods and the extras."""
        return {**self.methods, **self.extras}

    def styles(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """The labels and colours of methods."""
        given = {}
        for name in names:
            method = self.all_methods[name]
            values = {"label": method.label, "colour": method.colour}
            given[name] = {key: value for key, value in values.items() if value is not None}
        chosen = styles(names, given)
        return {name: {"label": chosen[name].label, "colour": chosen[name].colour} for name in names}

    def sized(self, stream: TaskStream | Sequence[Task]) -> Experiment:
        """The experiment with the numbers of tasks and reveals of a stream where they are not given."""
        if not len(stream):
            raise ValueError("it has no tasks")
        tasks = len(stream) if self.tasks is None else self.tasks
        rows = num_rows(stream[0].train)
        reveals = -(-rows // self.reveal) if self.reveals is None else self.reveals
        rows = min(rows, self.reveal * reveals)
        self._check_all_data(rows)
        # The last reveal may be a part of one. Its size is then that of all data.
        is_partial = rows < self.reveal * reveals and not self.measure_at
        panels = tuple(sorted({min(self.reveal, rows), rows})) if is_partial and not self.panels else self.panels
        return replace(self, tasks=tasks, reveals=reveals, panels=panels)

    def sizes(self) -> tuple[int, ...]:
        """The sizes of D_t shown in figures and tables."""
        measured = self.measured()
        return tuple(self.panels) or tuple(sorted({measured[0], measured[-1]}))

    def measured(self) -> tuple[int, ...]:
        """The sizes of D_t that are measured."""
        return tuple(self.measure_at) or tuple(range(self.reveal, self.reveal * (self.reveals or 1) + 1, self.reveal))

    def _measures(self, size: int) -> bool:
        """Whether a size of D_t may be measured: the last reveal may be a part of one, which only the stream tells."""
        if self.measure_at or self.reveals is None:
            return not self.measure_at or size in self.measure_at
        last = self.reveal * self.reveals
        return size in self.measured() or last - self.reveal < size <= last

    def _check_all_data(self, rows: int) -> None:
        """Reject sizes between two reveals, unless it is that of all data."""
        given = {name: getattr(self, name) or () for name in ("panels", "before_at")}
        if isinstance(self.claims, _Claims) and self.claims.sizes == (self.reveal, self.reveals, self.measure_at):
            given["a claim"] = [claim.at for claim in self.claims if claim.at != "needed"]
        for name, sizes in given.items():
            for size in sizes:
                if size % self.reveal and size != rows and not self.measure_at:
                    raise ValueError(
                        f"{name} has the size {size}, but a reveal has {self.reveal} datapoints and all data {rows};"
                        " change it, or add the size to measure_at"
                    )

    def between(self) -> tuple[int, ...]:
        """The sizes of D_t that are measured between two reveals."""
        ends = range(self.reveal, self.reveal * (self.reveals or 1) + 1, self.reveal)
        return tuple(size for size in self.measure_at if size not in ends)

    def sizes_before(self) -> tuple[int, ...]:
        """The sizes of D_t at which w_t is measured before the learner trains on the task."""
        return self.sizes() if self.before_at is None else tuple(self.before_at)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_names(self) -> None:
        twice = [name for name in self.methods if name in self.extras]
        if twice:
            raise ValueError(f"{', '.join(twice)} cannot be in methods and in extras")
        labels: dict[str, str] = {}
        for name, style in self.styles(list(self.all_methods)).items():
            other = labels.setdefault(style["label"], name)
            if other != name:
                raise ValueError(f"the methods {other!r} and {name!r} have the same label {style['label']!r}")

    def _check_claims(self) -> None:
        if isinstance(self.claims, _Claims):
            return
        self._set("claims", _Claims(self.claims if isinstance(self.claims, Sequence) else (self.claims,)))
        assert isinstance(self.claims, _Claims)
        self.claims.sizes = self.reveal, self.reveals, self.measure_at
        for claim in self.claims:
            if not isinstance(claim, Better):
                raise ValueError(f"claims must be made by better(...), got {_short(claim)}")
            for name in (claim.better, claim.worse):
                if name not in self.all_methods:
                    raise ValueError(f"a claim names the method {name!r}; there are {', '.join(self.all_methods)}")
            if claim.at == "needed" and self.gamma is None:
                raise ValueError("a claim at='needed' needs a threshold gamma")
            if claim.at != "needed" and not self._measures(claim.at):
                sizes = f"reveal={self.reveal}, reveals={self.reveals}, measure_at={list(self.measure_at)}"
                raise ValueError(
                    f"a claim is made at={claim.at} datapoints, which are not measured with {sizes}; change the claim"
                    " or the sizes"
                )

    def _check_panels(self) -> None:
        if self.reveals is None:
            return
        largest, measured = self.reveal * self.reveals, self.measured()
        if not largest - self.reveal < measured[-1] <= largest:
            raise ValueError(
                f"the last size of measure_at must be all data, because it tells whether a task was solved:"
                f" reveal={self.reveal} and reveals={self.reveals} reveal {largest} datapoints, got"
                f" {_some(self.measure_at)}"
            )
        where = f"reveal={self.reveal} and reveals={self.reveals} measure" if not self.measure_at else "measure_at has"
        for name in ("panels", "before_at"):
            for size in getattr(self, name) or ():
                if not self._measures(size):
                    raise ValueError(
                        f"{name} has {size}, but {where} {_some(measured)} datapoints; change {name}, or leave it out"
                    )


def _methods(kind: str, given: Any) -> dict[str, Method]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{kind} must be a dictionary of methods by name, got {_short(given)}")
    methods = {}
    for name, value in given.items():
        # A name is part of file names, of --methods a,b and of --set name.option=value.
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
            raise ValueError(
                f"the name of a method has letters, digits, - and _, and begins with a letter; got {name!r}"
            )
        if name in (*GROUPS, ALL):
            raise ValueError(f"a method cannot be named {name!r}: --set {name}.NAME=VALUE has another meaning")
        try:
            methods[name] = known_method(name, value) if isinstance(value, Mapping) else Method(value)
        except ValueError as error:
            raise ValueError(f"method {name!r}: {error}") from error
    return methods


def _integers(name: str, values: Any, low: int) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        values = (values,)
    return tuple(_integer(name, value, low) for value in values)


def _integer(name: str, value: Any, low: int, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}{' or None' * optional}, got {_short(value)}")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _some(sizes: Sequence[int]) -> str:
    shown = [*sizes[:3], "...", sizes[-1]] if len(sizes) > 5 else sizes
    return ", ".join(map(str, shown))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
