"""The presets: the stream, network, methods and sizes of each experiment, as functions of a schedule.

The schedule "standard" makes 10 meta-updates per reveal (sinusoid: 50), "paper" as many as the authors, and "quick"
finishes within minutes on two cores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from metaleader import losses, models
from metaleader.evaluate import Parts
from metaleader.learners import TOE
from metaleader.losses import Loss
from metaleader.methods import PAPER, Factory, factories
from metaleader.runs.folder import Schedule
from metaleader.streams import make_stream
from metaleader.streams.datasets.registry import Folder
from metaleader.tasks import Task, TaskStream


@dataclass(frozen=True)
class Preset:
    """The settings of an experiment.

    Attributes:
        summary: one line for lists.
        stream: makes the stream of a seed, given the data folder.
        model: builds the network.
        loss: the loss that the methods minimise.
        methods: the factory of each method's learner, with its options.
        tasks: number of tasks played.
        meta_steps: meta-updates per reveal.
        reveal: datapoints per reveal.
        reveals: reveals per task.
        gamma: the threshold of proficiency; None if the paper has none.
        panels: the sizes of D_t shown in figures, ascending.
        error_name: the name of the error in figures and tables.
        steps: numbers of adaptation steps measured; the first gives the columns `loss` and `accuracy`.
        parts: slices of the outputs whose loss is also recorded separately, by name.
        threads: number of CPU threads; None keeps torch's default.
        extras: methods that run only if they are named.
    """

    summary: str
    stream: Callable[[int, Folder], TaskStream]
    model: Callable[[], nn.Module]
    loss: Loss
    methods: dict[str, Factory]
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
    extras: dict[str, Factory] = field(default_factory=dict)

    @property
    def all_methods(self) -> dict[str, Factory]:
        """The default methods and the extras."""
        return self.methods | self.extras


class First:
    """The first tasks of a stream.

    >>> from metaleader.streams import SinusoidStream
    >>> stream = First(SinusoidStream(tasks=9), 3)
    >>> len(stream), len(list(stream))
    (3, 3)
    """

    def __init__(self, stream: TaskStream, num: int) -> None:
        self._stream, self._num = stream, min(num, len(stream))
        self.names = getattr(stream, "names", {})

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, t: int) -> Task:
        if not 0 <= t < self._num:
            raise IndexError(f"round {t} of a stream of {self._num} tasks")
        return self._stream[t]


def sinusoid(schedule: Schedule) -> Preset:
    """Sinusoid regression with an MLP, 10 datapoints per reveal."""
    num_tasks, reveals, meta_steps = (20, 2, 40) if schedule == "quick" else (40, 3, 50)
    inner = {"inner_lr": 0.01}
    return Preset(
        summary="sinusoids of random amplitude and phase, an MLP; needs no data",
        stream=lambda seed, data: make_stream("sinusoid", seed, tasks=num_tasks, train=10 * reveals),
        model=lambda: models.mlp(1, 1),
        loss=losses.squared_error,
        methods=factories({"ftml": inner, "ftml-last": inner, "ftl": inner, "toe": {}, "scratch": {"meta_lr": 1e-2}}),
        extras=_additions(num_tasks * reveals * meta_steps, **inner),
        tasks=num_tasks,
        meta_steps=meta_steps,
        reveal=10,
        reveals=reveals,
        gamma=0.1,
        panels=(10, 10 * reveals),
        error_name="squared error",
        steps=(5, 1, 10, 20),
        # The tensors are so small that a second thread makes updates slower.
        threads=1,
    )


def rainbow_digits(schedule: Schedule) -> Preset:
    """Rainbow over scikit-learn's digits with a small conv net: the default preset; needs no data, suits two cores."""
    quick = schedule == "quick"
    return _classification(
        summary="digits under 56 looks at 16x16, a small conv net; needs no data",
        stream=lambda seed, data: make_stream("rainbow-digits", seed),
        model=lambda: models.conv_net(10, image_size=16, filters=16, layers=3),
        common={"tasks_per_step": 8, "meta_lr": 3e-3},
        tasks=16 if quick else 56,
        meta_steps={"standard": 10, "paper": 50, "quick": 8}[schedule],
        reveal=20,
        reveals=3,
        # After 16 tasks no method is far above 0.8.
        gamma=0.7 if quick else 0.8,
        panels=(20, 60),
        # A second thread gains little, and on a busy machine it makes updates many times slower.
        threads=1,
    )


def rainbow_mnist(schedule: Schedule) -> Preset:
    """The paper's Rainbow MNIST (section 6.1): 56 tasks of 900 datapoints, 20 per reveal."""
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
    """The paper's 5-way CIFAR-100 (section 6.2): the newest class and four earlier ones, 50 datapoints per reveal."""
    quick = schedule == "quick"
    common: dict[str, Any] = {"query": 25}
    meta = common | {"optimizer": "sgd", "meta_lr": [(0, 0.01), (5000, 0.001)], "support": 25}
    return Preset(
        summary="the paper's 5-way CIFAR-100: 96 tasks, one new class each; needs cifar100",
        stream=lambda seed, data: make_stream("cifar100", seed, data),
        model=lambda: models.conv_net(5, image_size=32),
        loss=functools.partial(losses.cross_entropy, smoothing=0.1),
        # With one 5-way head over shuffled labels, TOE and FTL stay at chance, so the paper has neither here. TOE with
        # one output per class is an addition.
        methods=factories({"ftml": meta, "ftml-last": meta, "toe": {}, "scratch": common})
        | {"toe": functools.partial(_toe_over_classes, **common)},
        tasks=6 if quick else 96,
        meta_steps={"standard": 10, "paper": 25, "quick": 2}[schedule],
        reveal=50,
        reveals=5 if quick else 40,
        gamma=None,
        panels=(50, 250) if quick else (50, 250, 2000),
        error_name="error",
    )


def _toe_over_classes(model: Callable[[], nn.Module], loss: Loss, **options: Any) -> TOE:
    """TOE with one output per class of CIFAR-100; the logits of a task are those of its five classes."""
    return TOE(_net_over_classes, loss, **options)


def _net_over_classes() -> nn.Module:
    net = models.conv_net(100, image_size=32)
    net.add_module("logits", models.TaskLogits(100))
    return net


def pose(schedule: Schedule) -> Preset:
    """The paper's object pose prediction (section 6.3): 90 views of 50 objects, 20 datapoints per reveal."""
    quick = schedule == "quick"
    num_tasks, reveals = (4, 3) if quick else (90, 20)
    meta_steps = {"standard": 10, "paper": 50, "quick": 2}[schedule]
    # Without clipping, a loss became infinite.
    meta: dict[str, Any] = {"meta_lr": 3e-3, "inner_lr": 0.03, "clip": 1.0}
    baselines = {"ftl": {"inner_lr": 0.03}, "toe": {"meta_lr": 1e-2}, "scratch": {"meta_lr": 3e-3}}
    return Preset(
        summary="the paper's object pose in MuJoCo: 90 views, 64x64; draws its images once",
        stream=lambda seed, data: make_stream("pose", seed, data),
        # With batch norm in the dense layers, as in the paper, angles are hardly learned (LOG.md).
        model=functools.partial(models.pose_net, dense_norm=False),
        loss=losses.squared_error,
        methods=factories({"ftml": meta} | baselines),
        extras=_additions(num_tasks * reveals * meta_steps, **meta),
        tasks=num_tasks,
        meta_steps=meta_steps,
        reveal=20,
        reveals=reveals,
        gamma=0.05,
        panels=(60,) if quick else (60, 400),
        error_name="squared error",
        # On a stream of another seed, FTML and FTL are better with 10 steps than with 5 (docs/results/pose.md).
        steps=(10, 1, 5, 20),
        parts={"position": slice(0, 2), "angle": slice(2, 4)},
    )


def _classification(common: dict[str, Any], tuned: dict[str, dict[str, Any]] | None = None, **fields: Any) -> Preset:
    """A preset with all methods; `tuned` has options of single methods of the paper."""
    options = {name: common | (tuned or {}).get(name, {}) for name in PAPER}
    baselines = {"ftl-matched": "ftl", "toe-matched": "toe", "scratch-long": "scratch"}
    more = {"ftml-first": common} | {name: options[baseline] for name, baseline in baselines.items()}
    return Preset(
        loss=functools.partial(losses.cross_entropy, smoothing=0.1),
        methods=factories(options),
        extras=factories(more) | _additions(fields["tasks"] * fields["reveals"] * fields["meta_steps"], **common),
        error_name="error",
        **fields,
    )


def _additions(updates: int, meta_lr: float = 1e-3, **options: Any) -> dict[str, Factory]:
    """FTML with additions that the paper does not have.

    The annealed outer step size falls along half a cosine, in 50 steps, to a tenth of its initial value.
    """
    falls = [(updates * i // 50, meta_lr * (0.55 + 0.45 * math.cos(math.pi * i / 50))) for i in range(50)]
    common = options | {"meta_lr": meta_lr}
    annealed = options | {"meta_lr": sorted(dict(falls).items())}
    return factories(
        {
            "ftml-rates": common,
            "ftml-every": common,
            "ftml-anneal": annealed,
            "ftml-plus": annealed,
            "ftml-bounded": common,
        }
    )


PRESETS: dict[str, Callable[[Schedule], Preset]] = {
    "rainbow-digits": rainbow_digits,
    "rainbow-mnist": rainbow_mnist,
    "cifar100": cifar100,
    "pose": pose,
    "sinusoid": sinusoid,
}

# The measured time of a run of all default methods, by preset and schedule, with the seeds and one of MACHINES.
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
