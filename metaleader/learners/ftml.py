"""FTML, follow the meta leader: minimise the loss after adaptation over all tasks seen (Eq. 4, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from metaleader.engine.objective import Adaptation, GradientSteps, Objective
from metaleader.gradient.meta import Inner
from metaleader.gradient.selection import StepSize, split, step_sizes
from metaleader.learners.bayes import adaptation_from_plain, adaptation_to_plain
from metaleader.learners.definition import Definition
from metaleader.learners.learner import Learner
from metaleader.learners.options import Options, check_integer, check_sizes, check_step_size


@dataclass(frozen=True, kw_only=True)
class FTMLOptions(Options):
    """Hyperparameters of FTML."""

    inner_lr: StepSize = 0.1
    """The step size of the inner loop and of `adapt`: one, or one for each tensor that moves, by name."""
    inner_steps: int = 5
    """Gradient steps in the inner loop and in `adapt`."""
    support: int | Sequence[int] = 10
    """Datapoints of each task that an update adapts on, disjoint from its `query`. Of several numbers such as
    `(1, 2, 5, 10)`, each of which divides the largest, every task of an update draws one."""
    only: str | None = None
    """Which parameters move in the inner loop: None for all, "last" for the last layer, or a name pattern."""
    first_order: bool = False
    """Omit the second derivatives of the meta-gradient."""
    every_step: bool = False
    """Minimise the mean of the losses after each inner step, instead of the loss after the last."""
    learn_lr: bool = False
    """Learn the inner step sizes too, one for each tensor that moves, starting at `inner_lr`."""
    chunk: int | Literal["auto"] | None = "auto"
    """The number of tasks computed at a time; bounds the memory. None computes all at once. "auto" chooses a number
    before the first update, by the memory that is free; it is saved with the learner."""
    adaptation: Adaptation | Mapping[str, Any] | None = None
    """A procedure such as `BayesianHead()` that adapts instead of gradient steps; None takes gradient steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "support", check_sizes("support", self.support))
        if isinstance(self.adaptation, Mapping):  # from a file
            object.__setattr__(self, "adaptation", adaptation_from_plain(self.adaptation))
        if self.adaptation is None:
            return
        if not isinstance(self.adaptation, Adaptation):
            raise ValueError(f"adaptation must be an object such as metaleader.BayesianHead(), got {self.adaptation!r}")
        defaults = {field.name: field.default for field in fields(self)}
        given = [name for name in STEP_OPTIONS if getattr(self, name) != defaults[name]]
        if given:
            raise ValueError(
                f"{', '.join(given)} would have no effect with adaptation=, which takes no gradient steps; omit them"
            )

    def plain(self) -> dict[str, Any]:
        """The options by name, as values that a file can hold."""
        support = self.support if isinstance(self.support, int) else list(self.support)
        return super().plain() | {"support": support, "adaptation": adaptation_to_plain(self.adaptation)}


# The options of gradient steps
STEP_OPTIONS = ("inner_lr", "inner_steps", "only", "first_order", "every_step", "learn_lr")


class FTML(Learner):
    """Follow the meta leader.

    Args:
        model: an `nn.Module`, or a function that builds one.
        loss: of (prediction, target).
        settings: `inner_lr`, `inner_steps`, `support`, `only`, `first_order`, `every_step`, `learn_lr`, `chunk`,
            `adaptation` (see `FTMLOptions`), and those of every learner (see `Learner`).
    """

    Options = FTMLOptions
    options: FTMLOptions

    def define(self) -> Definition:
        """FTML adapts on support data of all tasks and minimises the loss on their query data."""
        o = self.options
        support = o.support if isinstance(o.support, int) else tuple(o.support)
        if o.chunk is not None and o.chunk != "auto":
            check_integer("chunk", o.chunk, 1)
        if o.adaptation is not None:
            assert isinstance(o.adaptation, Adaptation)
            o.adaptation.check(self.network)
            inner = Inner(steps=0, chunk=o.chunk)
            return Definition(Objective(self.network, inner, adaptation=o.adaptation), o.adaptation, support)
        if o.only is not None and not isinstance(o.only, str):
            raise ValueError(f"only must be 'last', a pattern of names of parameters, or None; got {o.only!r}")
        lr = check_step_size(o.inner_lr, self.network.params(), o.only)
        smallest = min(lr.values()) if isinstance(lr, dict) else lr
        if o.learn_lr and (o.first_order or o.inner_steps == 0 or smallest == 0):
            raise ValueError("learn_lr needs inner steps of a size above 0, and their second derivatives")
        inner = Inner(lr, o.inner_steps, o.first_order, o.chunk, o.only, o.every_step)
        adaptation = GradientSteps.of(None if o.learn_lr else lr, o.inner_steps, o.only)
        return Definition(Objective(self.network, inner, o.learn_lr), adaptation, support)

    @property
    def step_sizes(self) -> dict[str, float]:
        """The inner step size of each tensor that moves: as given, or as learned so far."""
        adaptation = self.definition.adaptation
        if not isinstance(adaptation, GradientSteps):
            raise ValueError(f"{type(adaptation).__name__} adapts without step sizes")
        rates = adaptation.rates(self.layout.named(self.state.flat))
        return {name: float(rate) for name, rate in step_sizes(rates, split(self.params, self.options.only)[0]).items()}
