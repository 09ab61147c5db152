"""The methods that experiments compare: how each learner is made, and how reports show it."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from metaleader.learners import FTL, FTML, TOE, Learner, Scratch
from metaleader.losses import Loss

# Called with the model, the loss and the options of the learner.
Factory = Callable[..., Learner]


@dataclass(frozen=True)
class Style:
    """The appearance of a method in figures and tables.

    Attributes:
        label: the name shown to readers.
        colour: "#rrggbb".
        marker: one of matplotlib's markers.
        dashes: lengths of dashes and gaps in points; empty for a solid line.
    """

    label: str
    colour: str
    marker: str
    dashes: tuple[float, ...]

    @property
    def phrase(self) -> str:
        """The label without a comma, for use in a sentence: "last-layer FTML"."""
        name, comma, detail = self.label.partition(", ")
        return f"{detail.replace(' ', '-')} {name}" if comma else name


@dataclass(frozen=True)
class Method:
    """A method: its appearance, the class or function that makes its learner, and the options of that call."""

    style: Style
    make: Factory
    options: Mapping[str, Any] = field(default_factory=dict)


def _long(kind: type[Learner]) -> Factory:
    """A factory of learners that make `factor` times as many updates per reveal."""

    def make(model: Callable[[], nn.Module], loss: Loss, *, meta_steps: int, factor: int, **options: Any) -> Learner:
        return kind(model, loss, meta_steps=factor * meta_steps, **options)

    return make


# A meta-update with five inner steps takes six gradients and five Hessian-vector products of two gradients each: a
# method without an inner loop makes 16 updates with the same compute.
_MATCHED = {"factor": 16}

# In the order of tables and legends, the paper's methods first. The colours of these five are Okabe and Ito's, which
# colour-blind readers can tell apart; markers and dashes serve print without colour. The presets give ftml-anneal and
# ftml-plus their outer step sizes, which depend on the number of updates.
METHODS: dict[str, Method] = {
    "ftml": Method(Style("FTML", "#0072B2", "o", ()), FTML),
    "ftml-last": Method(Style("FTML, last layer", "#56B4E9", "s", (5, 1.5)), FTML, {"only": "last"}),
    "ftl": Method(Style("FTL", "#E69F00", "^", (7, 1.5, 1.5, 1.5)), FTL),
    "toe": Method(Style("TOE", "#009E73", "D", (1.5, 1.5)), TOE),
    "scratch": Method(Style("from scratch", "#CC79A7", "v", (3, 2)), Scratch),
    "ftml-first": Method(Style("FTML, first order", "#003E63", "h", (9, 2)), FTML, {"first_order": True}),
    "ftl-matched": Method(Style("FTL, matched compute", "#8C5A00", "<", (7, 1, 1, 1)), _long(FTL), _MATCHED),
    "toe-matched": Method(Style("TOE, matched compute", "#00543D", "d", (1, 1)), _long(TOE), _MATCHED),
    "scratch-long": Method(Style("from scratch, long", "#7A3E62", ">", (3, 1)), _long(Scratch), {"factor": 5}),
    "ftml-rates": Method(Style("FTML, learned step sizes", "#A50026", "8", (10, 1.5)), FTML, {"learn_lr": True}),
    "ftml-every": Method(Style("FTML, loss after every step", "#A6761D", "H", (2, 3)), FTML, {"every_step": True}),
    "ftml-anneal": Method(Style("FTML, annealed outer step", "#7B3294", "x", (5, 3, 1, 3)), FTML),
    "ftml-plus": Method(Style("FTML plus", "#E7298A", "*", (4, 1)), FTML, {"learn_lr": True, "every_step": True}),
    "ftml-bounded": Method(Style("FTML, 16 tasks kept", "#1B7837", "p", (6, 1.5, 1, 1.5)), FTML, {"max_tasks": 16}),
}
PAPER = ("ftml", "ftml-last", "ftl", "toe", "scratch")

# Colours, markers and dashes of methods that are not in METHODS.
_SPARE: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("#D55E00", "P", (9, 1)),
    ("#666666", "X", (1, 2.5)),
    ("#8C8C00", "p", (6, 2, 2, 2)),
    ("#4B4BD6", "*", (2, 1)),
    ("#00A3A3", "8", (8, 3)),
    ("#7FBF3F", "H", (4, 2, 1, 2)),
    ("#F4777F", "h", (3, 3)),
    ("#3B2314", "d", (12, 2)),
)


def factories(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Factory]:
    """Factories of methods in `METHODS`, each with further options of its learner."""
    return {
        name: functools.partial(METHODS[name].make, **METHODS[name].options, **given) for name, given in options.items()
    }


def styles(names: Iterable[str]) -> dict[str, Style]:
    """The styles of methods: first those in `METHODS`, in its order, then others in the order given.

    A method that is not in `METHODS` is labelled with its name. Its colour depends on its name, and no two methods
    share a colour unless there are more than eight such methods.
    """
    given = dict.fromkeys(names)
    chosen = {name: method.style for name, method in METHODS.items() if name in given}
    spare: list[tuple[str, str, tuple[float, ...]]] = []
    for name in given:
        if name not in chosen:
            spare = spare or list(_SPARE)
            chosen[name] = Style(name, *spare.pop(zlib.crc32(name.encode()) % len(spare)))
    return chosen


def label(name: str) -> str:
    """The label of a method."""
    return styles([name])[name].label
