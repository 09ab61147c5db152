"""What a run plays: the experiment with its settings, methods, seeds, streams and learners."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from metaleader.engine.determinism import seeded
from metaleader.engine.engine import Engine, Mode
from metaleader.evaluate import can_try
from metaleader.experiments.description import described_experiment, measured_as
from metaleader.experiments.experiment import Experiment
from metaleader.experiments.files import Source, load_experiment
from metaleader.experiments.settings import with_settings
from metaleader.learners import Learner
from metaleader.learners.options import check_integer
from metaleader.presets import PRESETS
from metaleader.report.tensorboard import summary_writer
from metaleader.runs.folder import Schedule
from metaleader.streams import reorder
from metaleader.streams.datasets.registry import data_folder
from metaleader.system import machine
from metaleader.system.builders import call_with, explained, settable, takes_any, unknown
from metaleader.tasks import Task, TaskStream, num_rows, rng

# On the command line, names of methods are separated by commas.
METHOD_NAMES = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="METHOD,...",
    instance_from_str=lambda texts: tuple(name.strip() for name in texts[0].split(",") if name.strip()),
    is_instance=lambda value: value is None or isinstance(value, tuple),
    str_from_instance=lambda names: [",".join(names or ())],
)


def _no_default(metavar: str) -> Any:
    """An argument whose help text does not mention the default None."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class RunOptions:
    """The arguments of `metaleader run`, which are also the first keys of `config.json`."""

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[EXPERIMENT]")] = "rainbow-digits"
    """A Python file that defines an experiment (`metaleader new DIR` writes one), or a preset: rainbow-digits,
    rainbow-mnist, cifar100, pose or sinusoid."""
    methods: Annotated[tuple[str, ...] | None, METHOD_NAMES, _no_default("METHOD,...")] = None
    """Names of methods; the default methods of the experiment if not given. `metaleader list` shows all methods."""
    seeds: int = 3
    """Number of seeds, batched; each has its own initialisation, stream and draws."""
    schedule: Schedule = "standard"
    """Meta-updates per reveal: standard makes 10 (sinusoid: 50), paper as many as the authors, quick only a few."""
    tasks: Annotated[int | None, _no_default("INT")] = None
    """Stop after this many tasks."""
    device: str = "auto"
    """cpu, cuda, or auto for the GPU if there is one."""
    engine: Mode = "auto"
    """How updates run; auto compiles if the number of updates is worth it."""
    data: Annotated[str | None, _no_default("DIR")] = None
    """The folder with data sets, if the experiment needs one."""
    tensorboard: bool = False
    """Also write event files for TensorBoard into the run folder; needs the extra tensorboard."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, _no_default("NAME=VALUE")] = ()
    """Change a setting, such as reveal=5, ftml.inner_lr=0.02, all.meta_lr=1e-3 (every method that has it),
    network.filters=64, stream.noise=0.1 or order=colour; repeat it for several. `metaleader list EXPERIMENT` shows all
    settings."""
    first_seed: int = 0
    """The first seed; the others follow it."""
    regret: bool = False
    """Follow the regret protocol: measure each round before the learner trains on its data."""
    shards: int = 1
    """Divide the tasks of an update into this many parts, which the processes of torchrun share out among them."""


@dataclass(frozen=True)
class Plan:
    """What a run plays.

    Attributes:
        options: the options, with all defaults filled in.
        source: the experiment as it was found.
        experiment: the experiment with the settings of `--set`.
        description: the effective settings, as JSON.
        samples: a learner of each method, to read its settings from.
    """

    options: RunOptions
    source: Source
    experiment: Experiment
    description: dict[str, Any]
    samples: dict[str, Any]

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are run."""
        return self.options.methods or ()

    @property
    def tasks(self) -> int:
        """The number of tasks played: all of the experiment, or fewer."""
        assert self.options.tasks is not None
        return self.options.tasks

    def updates(self, method: str) -> int:
        """The number of updates by which the engine of a method chooses its mode."""
        experiment = dataclasses.replace(self.experiment, tasks=self.tasks)
        return planned_updates(experiment, method, self.samples[method])

    def mode(self, method: str) -> Mode:
        """The mode of the engine of a method."""
        engine, sample = Engine(self.options.engine, self.updates(method), self.options.device), self.samples[method]
        if isinstance(sample, Learner):
            engine.settle(*sample.definition.work(sample.options.query))
        return engine.mode

    def stream(self, seed: int) -> TaskStream:
        """The stream of a seed."""
        return make_stream(self.experiment, seed, self.options.data)

    def learner(self, method: str, seed: int, **given: Any) -> Any:
        """The learner of a method and a seed."""
        return make_learner(self.experiment, method, seed=seed, shards=self.options.shards, **given)


def find_experiment(name: str, schedule: Any = "standard") -> Source:
    """The experiment of a preset or a file.

    Args:
        name: the name of a preset, or the path of a Python file.
        schedule: the argument of presets and of experiments that are functions of a schedule.

    Raises:
        ValueError: if there is no such preset, or the file does not define an experiment; the message names the line.
        OSError: if the file cannot be read.
    """
    if name in PRESETS:
        return Source(name, PRESETS[name](schedule))
    path = Path(name).expanduser()
    if path.suffix != ".py":
        if path.is_file() or len(path.parts) > 1:
            raise ValueError(f"{name} is not a Python file; an experiment is a preset or a file such as experiment.py")
        raise ValueError(f"{unknown('preset', name, PRESETS)}, and files such as experiment.py (`metaleader new DIR`)")
    return load_experiment(path, schedule)


def planned(options: RunOptions, recorded: Mapping[str, Any] | None = None) -> Plan:
    """Find the experiment, change its settings, and fill in all defaults; raises ValueError for invalid ones.

    Args:
        options: the options.
        recorded: the settings of a run that exists: what it has measured is measured again.
    """
    source = find_experiment(options.experiment, options.schedule)
    experiment = source.experiment
    methods = tuple(experiment.methods) if options.methods is None else tuple(dict.fromkeys(options.methods))
    _check_names("method", methods, experiment.all_methods)
    if options.seeds < 1 or (options.tasks is not None and options.tasks < 1):
        raise ValueError(f"seeds and tasks must be at least 1, got {options.seeds} and {options.tasks}")
    if options.first_seed < 0:
        raise ValueError(f"the first seed must be at least 0, got {options.first_seed}")
    if options.tensorboard:
        summary_writer()
    device, data = str(machine.find_device(options.device)), str(data_folder(options.data).absolute())
    experiment = with_settings(experiment, options.set, methods)
    if source.file is not None or options.set or None in (experiment.tasks, experiment.reveals):
        # The streams of the presets are built when the run folder exists, because some draw images for minutes.
        stream = make_stream(experiment, options.first_seed, data)
        with explained("the stream cannot be read"):
            experiment = experiment.sized(stream)
            _check_stream(stream, experiment)
    if recorded is not None:
        experiment = measured_as(experiment, recorded)
    elif options.regret:
        experiment = dataclasses.replace(experiment, before_at=())  # all losses are those before training
    assert experiment.tasks is not None
    check_integer("shards", options.shards, 1)
    samples = {name: make_learner(experiment, name, seed=options.first_seed, shards=options.shards) for name in methods}
    for name, learner in samples.items():
        if options.regret and not hasattr(learner, "update"):
            raise ValueError(f"--regret needs learners with update(); {name} has none: leave it out with --methods")
        if experiment.between() and not can_try(learner):
            raise ValueError(
                f"{name} has its own observe or update, so it can be measured after reveals only: leave it out with"
                f" --methods, or {', '.join(map(str, experiment.between()))} out of measure_at"
            )
    with explained("the network cannot be built"):
        description = described_experiment(experiment, samples)
    options = dataclasses.replace(
        options,
        methods=methods,
        tasks=min(experiment.tasks, options.tasks or experiment.tasks),
        device=device,
        data=data,
    )
    return Plan(options, source, experiment, description, samples)


def make_stream(experiment: Experiment, seed: int, data: str | None) -> TaskStream:
    """The stream of a seed."""
    with explained(f"the stream of seed {seed} cannot be made"):
        stream = call_with(experiment.stream, seed=seed, data=data)
        if not hasattr(stream, "__len__") or not hasattr(stream, "__getitem__"):
            raise ValueError(f"a stream is a sequence of tasks, got {type(stream).__name__}")
        return stream if experiment.order is None else reorder(stream, experiment.order, seed)


def make_learner(experiment: Experiment, method: str, *, seed: int, shards: int = 1, **given: Any) -> Any:
    """The learner of a method and a seed; `given` are `device` and `engine`."""
    start = int(rng(f"experiment {method}", seed).integers(2**62))
    with explained(f"method {method!r} cannot be made"), seeded(start):
        make = experiment.all_methods[method]
        if shards > 1:
            if not takes_any(make.make) and "shards" not in settable(make.make):
                raise ValueError("it takes no shards; leave it out with --methods, or run without --shards")
            given["shards"] = shards
        learner = make(experiment.network, experiment.loss, meta_steps=experiment.meta_steps, seed=seed, **given)
        for name in ("begin", "observe", "adapt"):
            if not callable(getattr(learner, name, None)):
                raise ValueError(f"a learner needs begin, observe and adapt; {type(learner).__name__} has no {name}")
    return learner


def planned_updates(experiment: Experiment, method: str, learner: Any = None) -> int:
    """The number of updates by which an engine chooses its mode; ten updates without an inner loop count as one.

    Args:
        experiment: the experiment, with its numbers of tasks and reveals.
        method: the name of the method.
        learner: a learner of the method, if there is one.
    """
    learner = make_learner(experiment, method, seed=0) if learner is None else learner
    if not isinstance(learner, Learner):
        return 0
    assert experiment.tasks is not None
    assert experiment.reveals is not None
    objective = learner.definition.objective
    meta_steps = experiment.all_methods[method].options.get("meta_steps", experiment.meta_steps)
    updates = experiment.tasks * experiment.reveals * meta_steps
    is_plain = objective.inner.steps == 0 and objective.task_gradient is None
    return updates // 10 if is_plain else updates


def _check_stream(stream: TaskStream, experiment: Experiment) -> None:
    assert experiment.tasks is not None
    assert experiment.reveals is not None
    if len(stream) < experiment.tasks:
        raise ValueError(f"it has {len(stream)} tasks, the experiment {experiment.tasks}; reduce tasks")
    task = stream[0]
    if not isinstance(task, Task):
        raise ValueError(f"stream[0] is a {type(task).__name__}, not a Task(name, train, test)")
    num, reveal = num_rows(task.train), experiment.reveal
    if reveal * (experiment.reveals - 1) >= num:
        raise ValueError(
            f"its first task has {num} datapoints, but {experiment.reveals} reveals of {reveal} need"
            f" {reveal * experiment.reveals}; reduce reveal or reveals, or draw more datapoints"
        )


def _check_names(kind: str, names: Sequence[str], valid: Collection[str]) -> None:
    for name in names:
        if name not in valid:
            raise ValueError(unknown(kind, name, valid))
    if not names:
        raise ValueError(f"name at least one {kind} of {', '.join(valid)}")
