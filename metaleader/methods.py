"""The methods that experiments compare: how each learner is made, and how reports show it."""

from __future__ import annotations

import colorsys
import copy
import functools
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from metaleader.learners import FTL, FTML, TOE, BayesianHead, Learner, Scratch
from metaleader.learners.options import Model
from metaleader.losses import Loss, squared_error, unsmoothed
from metaleader.memory.rows import recency
from metaleader.system.builders import given_arguments, parameters_of, settable, takes_any, unknown

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


class Method:
    """A method of an experiment: a function or class that makes its learner, options of that call, and its appearance.

    `make` is called once for each seed, with those of these arguments that it takes: `model` and `loss`, the network
    and the loss of the experiment; `meta_steps`; `seed`, `device` and `engine`; and the options. It returns a learner,
    or any object with `begin`, `observe` and `adapt`. Such an object itself, instead of a function, is copied for each
    seed.

    Args:
        make: the function, the class, or the object.
        label: the name shown to readers; by default that of the library's method of the same name, or the name.
        colour: "#rrggbb".
        options: further arguments of `make`, among them `model`, `loss` and `meta_steps` to replace those of the
            experiment.

    >>> from metaleader.learners import FTML
    >>> Method(FTML, label="FTML, two steps", inner_steps=2).options
    {'inner_steps': 2}
    """

    def __init__(self, make: Any, *, label: str | None = None, colour: str | None = None, **options: Any) -> None:
        if isinstance(make, Method):
            label, colour = label or make.label, colour or make.colour
            make, options = make.make, make.options | options
        if isinstance(make, functools.partial):
            make, options = make.func, given_arguments(make) | options
        if not isinstance(make, type) and all(hasattr(make, name) for name in ("begin", "observe", "adapt")):
            make = Copies(make)
        if not callable(make):
            raise ValueError(
                "a method is a class or function that makes a learner, or an object with begin, observe and adapt; got"
                f" {make!r}"
            )
        for name in ("seed", "device", "engine"):
            if name in options:
                raise ValueError(f"{name} is an option of the run, not of a method; remove {name}={options[name]!r}")
        if label is not None and not (isinstance(label, str) and label.strip() and label.isprintable()):
            raise ValueError(f"a label must be a line of text, got {label!r}")
        if colour is not None:
            check_colour(colour)
        self.make, self.label, self.colour, self.options = make, label, colour, options

    def __call__(self, model: Callable[[], nn.Module], loss: Loss, **given: Any) -> Any:
        """Make a learner; `given` are `meta_steps`, `seed`, `device`, `engine`, and further options."""
        offers = {"model": model, "loss": loss} | given | self.options
        parameters = parameters_of(self.make).values()
        args = ()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            args = (offers.pop("model"), offers.pop("loss"))
        if not takes_any(self.make):
            ignored = {"model", "loss", "meta_steps", "seed", "device", "engine"} - {
                *settable(self.make),
                *self.options,
            }
            offers = {name: value for name, value in offers.items() if name not in ignored}
        return self.make(*args, **offers)

    def with_options(self, options: Mapping[str, Any]) -> Method:
        """The method with other values of some options.

        "adaptation.scale" is a field of an option that is a dataclass.
        """
        changed = {name: value for name, value in options.items() if "." not in name}
        for path, value in options.items():
            name, dot, field_name = path.partition(".")
            if dot:
                option: Any = changed.get(name, self.options.get(name))
                changed[name] = replace(option, **{field_name: value})
        return Method(self, **changed)


class Copies:
    """A function that returns copies of an object."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self) -> Any:
        """Return a new copy."""
        return copy.deepcopy(self.original)


def check_colour(colour: Any) -> None:
    """Reject a colour that is not "#rrggbb"."""
    if not isinstance(colour, str) or not re.fullmatch("#[0-9a-fA-F]{6}", colour):
        raise ValueError(f"a colour must be six hexadecimal digits such as '#0072B2', got {colour!r}")


@dataclass(frozen=True)
class KnownMethod:
    """A method of the library: its appearance, the class or function that makes its learner, and its options."""

    style: Style
    make: Factory
    options: Mapping[str, Any] = field(default_factory=dict)


def _long(kind: type[Learner]) -> Factory:
    """A factory of learners that make `factor` times as many updates per reveal."""

    def make(model: Callable[[], nn.Module], loss: Loss, *, meta_steps: int, factor: int, **options: Any) -> Learner:
        return kind(model, loss, meta_steps=factor * meta_steps, **options)

    return make


def _mixed(model: Model, loss: Loss, **options: Any) -> FTML:
    """FTML with a model that is linear in the inputs, with the numbers of inputs and outputs of the network."""
    _check_regression("mixed", loss)
    return FTML(functools.partial(_linear_model, model), loss, **options)


def _joint_offset(model: Model, loss: Loss, **options: Any) -> FTML:
    """FTML that adapts one offset per output."""
    _check_regression("joint-offset", loss)
    return FTML(model, loss, **options)


def _check_regression(name: str, loss: Loss) -> None:
    if unsmoothed(loss) is not squared_error:
        raise ValueError(
            f"{name} is for metaleader.losses.squared_error, under which random effects have a closed form; with"
            " cross_entropy, compare with toe and scratch, or with ftml and adaptation=metaleader.BayesianHead()"
        )


def _linear_model(model: Model) -> nn.Module:
    module = model if isinstance(model, nn.Module) else model()
    layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    first, last = layers[0], layers[-1]
    if not isinstance(first, nn.Linear) or not isinstance(last, nn.Linear):
        raise ValueError(
            "mixed is linear in the inputs, whose number it takes from the first layer of the network; this one begins"
            f" with {type(first).__name__} and ends with {type(last).__name__}: set the option"
            " model=lambda: torch.nn.Linear(inputs, outputs), or leave mixed out for inputs that are not rows of"
            " features"
        )
    return nn.Linear(first.in_features, last.out_features, dtype=last.weight.dtype)


# A meta-update with five inner steps takes six gradients and five Hessian-vector products of two gradients each: a
# method without an inner loop makes 16 updates with the same compute.
_MATCHED = {"factor": 16}

# In the order of tables and legends, the paper's methods first. The colours of these five are Okabe and Ito's, which
# colour-blind readers can tell apart; markers and dashes serve print without colour. The presets give ftml-anneal and
# ftml-plus their outer step sizes, which depend on the number of updates.
METHODS: dict[str, KnownMethod] = {
    "ftml": KnownMethod(Style("FTML", "#0072B2", "o", ()), FTML),
    "ftml-last": KnownMethod(Style("FTML, last layer", "#56B4E9", "s", (5, 1.5)), FTML, {"only": "last"}),
    "ftl": KnownMethod(Style("FTL", "#E69F00", "^", (7, 1.5, 1.5, 1.5)), FTL),
    "toe": KnownMethod(Style("TOE", "#009E73", "D", (1.5, 1.5)), TOE),
    "scratch": KnownMethod(Style("from scratch", "#CC79A7", "v", (3, 2)), Scratch),
    "ftml-first": KnownMethod(Style("FTML, first order", "#003E63", "h", (9, 2)), FTML, {"first_order": True}),
    "ftml-one": KnownMethod(Style("FTML, one inner step", "#5D8AA8", "1", (8, 2, 2, 2)), FTML, {"inner_steps": 1}),
    "ftml-adam": KnownMethod(Style("FTML, Adam", "#C04000", "2", (2, 1, 4, 1)), FTML, {"optimizer": "adam"}),
    "ftml-recent": KnownMethod(
        Style("FTML, recent tasks more often", "#8A2BE2", "+", (3, 1, 1, 1)), FTML, {"weights": recency(8)}
    ),
    "ftl-matched": KnownMethod(Style("FTL, matched compute", "#8C5A00", "<", (7, 1, 1, 1)), _long(FTL), _MATCHED),
    "toe-matched": KnownMethod(Style("TOE, matched compute", "#00543D", "d", (1, 1)), _long(TOE), _MATCHED),
    "scratch-long": KnownMethod(Style("from scratch, long", "#7A3E62", ">", (3, 1)), _long(Scratch), {"factor": 5}),
    "ftml-rates": KnownMethod(Style("FTML, learned step sizes", "#A50026", "8", (10, 1.5)), FTML, {"learn_lr": True}),
    "ftml-every": KnownMethod(Style("FTML, loss after every step", "#A6761D", "H", (2, 3)), FTML, {"every_step": True}),
    "ftml-anneal": KnownMethod(Style("FTML, annealed outer step", "#7B3294", "x", (5, 3, 1, 3)), FTML),
    "ftml-plus": KnownMethod(Style("FTML plus", "#E7298A", "*", (4, 1)), FTML, {"learn_lr": True, "every_step": True}),
    "ftml-bounded": KnownMethod(
        Style("FTML, 16 tasks kept", "#1B7837", "p", (6, 1.5, 1, 1.5)), FTML, {"max_tasks": 16}
    ),
    # Baselines of regression in closed form: shrinkage without a network, and without adapting the network
    "mixed": KnownMethod(
        Style("mixed effects", "#525252", "P", (4, 2)), _mixed, {"adaptation": BayesianHead(rank=0), "meta_lr": 3e-2}
    ),
    "joint-offset": KnownMethod(
        Style("TOE, offset per task", "#B15928", "X", (8, 1.5, 4, 1.5)),
        _joint_offset,
        {"adaptation": BayesianHead(scale=0.3, rank=0, only="bias")},
    ),
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


def known_method(name: str, options: Mapping[str, Any]) -> Method:
    """A method in `METHODS`, with further options of its learner."""
    if name not in METHODS:
        raise ValueError(
            f"{unknown('method', name, METHODS)}; give another method as a class, or as a Method with options"
        )
    return Method(METHODS[name].make, **{**METHODS[name].options, **options})


def matched(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Further baselines, with the options of given ones: first-order FTML, and baselines with more updates."""
    baselines = {"ftml-first": "ftml", "ftl-matched": "ftl", "toe-matched": "toe", "scratch-long": "scratch"}
    return {name: methods[baseline] for name, baseline in baselines.items()}


def additions(updates: int, meta_lr: float = 1e-3, **options: Any) -> dict[str, Mapping[str, Any]]:
    """The options of FTML with additions that the paper does not have, for a run of so many updates.

    The annealed outer step size falls along half a cosine, in 50 steps, to a tenth of its initial value.
    """
    falls = [(updates * i // 50, meta_lr * (0.55 + 0.45 * math.cos(math.pi * i / 50))) for i in range(50)]
    common = options | {"meta_lr": meta_lr}
    annealed = options | {"meta_lr": sorted(dict(falls).items())}
    return {
        "ftml-rates": common,
        "ftml-every": common,
        "ftml-anneal": annealed,
        "ftml-plus": annealed,
        "ftml-bounded": common,
    }


def styles(names: Iterable[str], given: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Style]:
    """The styles of methods: first those in `METHODS`, in its order, then others in the order of the names.

    A method that is not in `METHODS` is labelled with its name. Its colour depends on its name, and no two methods
    share a colour, a marker with the same dashes, or both.

    Args:
        names: the names of the methods.
        given: labels and colours by method, as `{"mine": {"label": "my method", "colour": "#D55E00"}}`.
    """
    ordered, given = dict.fromkeys(names), given or {}
    chosen = {name: method.style for name, method in METHODS.items() if name in ordered}
    others = [name for name in ordered if name not in chosen]
    spare = _spare(len(others), {str(values.get("colour")).upper() for values in given.values()})
    for name in others:
        chosen[name] = Style(name, *spare.pop(zlib.crc32(name.encode()) % len(spare)))
    return {name: replace(style, **given.get(name, {})) for name, style in chosen.items()}


def _spare(num: int, taken: Collection[str]) -> list[tuple[str, str, tuple[float, ...]]]:
    """At least `num` colours, markers and dashes, no two of which are equal, without colours that are taken."""
    spare = [style for style in _SPARE if style[0] not in taken]
    used = {*taken, *(method.style.colour for method in METHODS.values()), *(colour for colour, _, _ in _SPARE)}
    number = 0
    while len(spare) < num:
        # Hues a golden angle apart, in three rows of lightness.
        red, green, blue = colorsys.hls_to_rgb(number * 0.618034 % 1, (0.35, 0.5, 0.62)[number % 3], 0.7)
        colour = "#" + "".join(f"{round(255 * part):02X}" for part in (red, green, blue))
        if colour not in used:
            used.add(colour)
            spare.append((colour, _SPARE[number % 8][1], (13 + number // 8, 2, 1 + number % 8, 2)))
        number += 1
    return spare


def label(name: str) -> str:
    """The label of a method, where none is given."""
    return styles([name])[name].label
