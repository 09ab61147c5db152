"""Presets as functions: what each experiment fixes, with each method's settings.

Schedules: "standard" makes 10 meta-updates a reveal (sinusoid 50), "paper" as many as the authors, "quick" is for a
first look within minutes on two cores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from metaleader import losses, models
from metaleader.evaluate import Parts
from metaleader.learners import FTL, FTML, TOE, Learner, Scratch
from metaleader.losses import Loss
from metaleader.streams import make_stream
from metaleader.streams.datasets.registry import Folder
from metaleader.tasks import TaskStream

Schedule = Literal["standard", "paper", "quick"]


@dataclass(frozen=True)
class Preset:
    """What a preset fixes.

    Attributes:
        summary: a line for lists.
        stream: makes the stream of a seed, given the data folder.
        model: builds the network.
        loss: what is learned.
        methods: for each method, the function that makes its learner, with its settings.
        extras: methods that are run only when named.
        tasks: the number of tasks played.
        meta_steps: updates a reveal.
        reveal: datapoints revealed at a time.
        reveals: reveals used of a task.
        gamma: the threshold of proficiency; None where the paper has none.
        panels: the sizes of D_t that the figures look at, the few first.
        error_name: what the error is called.
        steps: numbers of adaptation steps measured; the first is the record's own.
        parts: parts of the outputs whose loss is recorded by itself too.
        threads: of torch on the CPU; None leaves torch's choice.
    """

    summary: str
    stream: Callable[[int, Folder], TaskStream]
    model: Callable[[], nn.Module]
    loss: Loss
    methods: dict[str, Callable[..., Learner]]
    tasks: int
    meta_steps: int
    reveal: int
    reveals: int
    gamma: float | None
    panels: tuple[int, ...]
    error_name: str
    steps: tuple[int, ...] = (5, 1, 10)
    parts: Parts = field(default_factory=dict)
    threads: int | None = None
    extras: dict[str, Callable[..., Learner]] = field(default_factory=dict)

    @property
    def known(self) -> dict[str, Callable[..., Learner]]:
        """All methods."""
        return self.methods | self.extras


def sinusoid(schedule: Schedule) -> Preset:
    """Sinusoid regression with an MLP, 10 datapoints at a time."""
    quick = schedule == "quick"
    num_tasks, reveals, meta_steps = (20, 2, 40) if quick else (40, 3, 50)
    return Preset(
        summary="sinusoids of random amplitude and phase, an MLP; needs no data",
        stream=lambda seed, data: make_stream("sinusoid", seed, tasks=num_tasks, train=10 * reveals),
        model=lambda: models.mlp(1, 1),
        loss=losses.squared_error,
        methods={
            "ftml": functools.partial(FTML, inner_lr=0.01),
            "ftml-last": functools.partial(FTML, inner_lr=0.01, only="last"),
            "ftl": functools.partial(FTL, inner_lr=0.01),
            "toe": TOE,
            "scratch": functools.partial(Scratch, meta_lr=1e-2),
        },
        extras=_plus(num_tasks * reveals * meta_steps, inner_lr=0.01),
        tasks=num_tasks,
        meta_steps=meta_steps,
        reveal=10,
        reveals=reveals,
        gamma=0.1,
        panels=(10, 10 * reveals),
        error_name="squared error",
        steps=(5, 1, 10, 20),
        # The tensors are so small that a second thread costs more than it brings.
        threads=1,
    )


def rainbow_digits(schedule: Schedule) -> Preset:
    """Rainbow over scikit-learn's digits with a small conv net; the default, made for two cores and no data."""
    quick = schedule == "quick"
    common: dict[str, Any] = {"tasks_per_step": 8, "meta_lr": 3e-3}
    return _classification(
        summary="digits under 56 looks at 16x16, a small conv net; needs no data",
        stream=lambda seed, data: make_stream("rainbow-digits", seed),
        model=lambda: models.conv_net(10, image_size=16, filters=16, layers=3),
        common=common,
        tasks=16 if quick else 56,
        meta_steps={"standard": 10, "paper": 50, "quick": 8}[schedule],
        reveal=20,
        reveals=3,
        # After 16 tasks no method has come far beyond 0.8.
        gamma=0.7 if quick else 0.8,
        panels=(20, 60),
        # So small that a second thread brings little, and on a busy machine costs many times the work.
        threads=1,
    )


def rainbow_mnist(schedule: Schedule) -> Preset:
    """The paper's Rainbow MNIST (section 5.1): 56 tasks of 900 datapoints, 20 at a time."""
    quick = schedule == "quick"
    return _classification(
        summary="the paper's Rainbow MNIST: 56 looks, 900 images each; needs mnist",
        stream=lambda seed, data: make_stream("rainbow-mnist", seed, data),
        model=lambda: models.conv_net(10),
        common={},
        tuned={"toe": {"meta_lr": 1e-2}, "scratch": {"meta_lr": 1e-2}},
        tasks=8 if quick else 56,
        meta_steps={"standard": 10, "paper": 50, "quick": 2}[schedule],
        reveal=20,
        reveals=5 if quick else 45,
        gamma=0.9,
        panels=(100,) if quick else (100, 900),
    )


def cifar100(schedule: Schedule) -> Preset:
    """The paper's 5-way CIFAR-100 (section 5.2): the newest class and four earlier ones, 50 datapoints at a time."""
    quick = schedule == "quick"
    common: dict[str, Any] = {"query": 25}
    meta = {"optimizer": "sgd", "meta_lr": [(0, 0.01), (5000, 0.001)], "support": 25}
    ce = functools.partial(losses.cross_entropy, smoothing=0.1)
    return Preset(
        summary="the paper's 5-way CIFAR-100: 96 tasks, one new class each; needs cifar100",
        stream=lambda seed, data: make_stream("cifar100", seed, data),
        model=lambda: models.conv_net(5, image_size=32),
        loss=ce,
        # One 5-way head over shuffled labels leaves TOE and FTL at chance, so the paper has neither here; TOE with an
        # output for each class is ours.
        methods={
            "ftml": functools.partial(FTML, **common, **meta),
            "ftml-last": functools.partial(FTML, **common, **meta, only="last"),
            "toe": functools.partial(_toe_over_classes, **common),
            "scratch": functools.partial(Scratch, **common),
        },
        tasks=6 if quick else 96,
        meta_steps={"standard": 10, "paper": 25, "quick": 2}[schedule],
        reveal=50,
        reveals=5 if quick else 40,
        gamma=None,
        panels=(50, 250) if quick else (50, 250, 2000),
        error_name="error",
    )


def _toe_over_classes(model: Callable[[], nn.Module], loss: Loss, **common: Any) -> TOE:
    """TOE with an output for each of CIFAR-100's classes; a task's logits are those of its five."""
    return TOE(_net_over_classes, loss, **common)


def _net_over_classes() -> nn.Module:
    net = models.conv_net(100, image_size=32)
    net.add_module("logits", models.TaskLogits(100))
    return net


def pose(schedule: Schedule) -> Preset:
    """The paper's object pose prediction (section 5.3): 90 views of 50 objects, 20 datapoints at a time."""
    quick = schedule == "quick"
    num_tasks, reveals = (4, 3) if quick else (90, 20)
    meta_steps = {"standard": 10, "paper": 50, "quick": 2}[schedule]
    steps: dict[str, Any] = {"meta_lr": 3e-3, "inner_lr": 0.03, "clip": 1.0}  # without clip, a loss came out infinite
    return Preset(
        summary="the paper's object pose in MuJoCo: 90 views, 64x64; draws its images once",
        stream=lambda seed, data: make_stream("pose", seed, data),
        # With batch norm on the dense layers, as in the paper, angles are hardly learned (LOG.md).
        model=functools.partial(models.pose_net, dense_norm=False),
        loss=losses.squared_error,
        methods={
            "ftml": functools.partial(FTML, **steps),
            "ftl": functools.partial(FTL, inner_lr=0.03),
            "toe": functools.partial(TOE, meta_lr=1e-2),
            "scratch": functools.partial(Scratch, meta_lr=3e-3),
        },
        extras=_plus(num_tasks * reveals * meta_steps, **steps),
        tasks=num_tasks,
        meta_steps=meta_steps,
        reveal=20,
        reveals=reveals,
        gamma=0.05,
        panels=(60,) if quick else (60, 400),
        error_name="squared error",
        # With 10 steps FTML and FTL are better than with 5 on a stream of another seed (docs/results/pose.md).
        steps=(10, 1, 5, 20),
        parts={"position": slice(0, 2), "angle": slice(2, 4)},
    )


def _classification(
    model: Callable[[], nn.Module],
    common: dict[str, Any],
    tuned: dict[str, dict[str, Any]] | None = None,
    **fields: Any,
) -> Preset:
    """Presets of one network with all methods; `tuned` has what a method has for itself."""
    ftl, toe, scratch = (common | (tuned or {}).get(name, {}) for name in ("ftl", "toe", "scratch"))
    return Preset(
        model=model,
        loss=functools.partial(losses.cross_entropy, smoothing=0.1),
        methods={
            "ftml": functools.partial(FTML, **common),
            "ftml-last": functools.partial(FTML, **common, only="last"),
            "ftl": functools.partial(FTL, **ftl),
            "toe": functools.partial(TOE, **toe),
            "scratch": functools.partial(Scratch, **scratch),
        },
        extras={
            "ftml-first": functools.partial(FTML, **common, first_order=True),
            # A meta-update with five inner steps takes six gradients and five Hessian-vector products of two each.
            "ftl-matched": functools.partial(_with_more_updates(FTL), **ftl, factor=16),
            "toe-matched": functools.partial(_with_more_updates(TOE), **toe, factor=16),
            "scratch-long": functools.partial(_with_more_updates(Scratch), **scratch, factor=5),
            **_plus(fields["tasks"] * fields["reveals"] * fields["meta_steps"], **common),
        },
        error_name="error",
        **fields,
    )


def _plus(updates: int, meta_lr: float = 1e-3, **options: Any) -> dict[str, Callable[..., Learner]]:
    """FTML with additions that the paper does not have: each alone, all together, and with a memory of 16 tasks.

    Annealed, the outer step size falls along half a cosine, in 50 pieces, to a tenth of what it is at first.
    """
    falls = [(updates * i // 50, meta_lr * (0.55 + 0.45 * math.cos(math.pi * i / 50))) for i in range(50)]
    additions: dict[str, dict[str, Any]] = {
        "ftml-rates": {"learn_lr": True},
        "ftml-every": {"every_step": True},
        "ftml-anneal": {"meta_lr": sorted(dict(falls).items())},
    }
    additions["ftml-plus"] = {name: value for one in additions.values() for name, value in one.items()}
    additions["ftml-bounded"] = {"max_tasks": 16}
    common = options | {"meta_lr": meta_lr}
    return {name: functools.partial(FTML, **(common | given)) for name, given in additions.items()}


def _with_more_updates(kind: type[Learner]) -> Callable[..., Learner]:
    """A method that makes `factor` times as many updates a reveal."""

    def make(model: Callable[[], nn.Module], loss: Loss, *, meta_steps: int, factor: int, **options: Any) -> Learner:
        return kind(model, loss, meta_steps=factor * meta_steps, **options)

    return make


PRESETS: dict[str, Callable[[Schedule], Preset]] = {
    "rainbow-digits": rainbow_digits,
    "rainbow-mnist": rainbow_mnist,
    "cifar100": cifar100,
    "pose": pose,
    "sinusoid": sinusoid,
}

# How long a run of all methods of a preset took, by preset and schedule; one that is missing was not measured. Add a
# figure only with its command's seeds and its machine, which is one of MACHINES.
TIMES: dict[tuple[str, Schedule], str] = {
    ("rainbow-digits", "quick"): "92 s, 1 seed, CPU",
    ("rainbow-mnist", "standard"): "6 min 36 s, 3 seeds, H200",
    ("sinusoid", "standard"): "4 min 47 s, 3 seeds, CPU",
    ("sinusoid", "paper"): "as standard",
    ("sinusoid", "quick"): "2 min 11 s, 3 seeds, CPU",
}
MACHINES = {
    "CPU": "2 cores of an AMD EPYC (shared virtual machine), torch 2.13.0, 2026-11-16",
    "H200": "one NVIDIA H200, methods as four processes at once (CUDA MPS), before tuning, torch 2.11.0, 2026-11-16",
}
