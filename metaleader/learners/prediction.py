"""Adaptation and predictions of a learner, which several threads may ask for while another one changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from metaleader.engine.determinism import repeatable
from metaleader.engine.objective import Adaptation, GradientSteps
from metaleader.gradient.selection import Params
from metaleader.learners.inputs import inputs_of
from metaleader.learners.options import check_integer
from metaleader.nets.functional import Statistics
from metaleader.tasks import Batch, ClassBatch, Tree, num_rows, rng

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


class Snapshot(NamedTuple):
    """What the adaptation to a task depends on, as it was at one moment.

    Attributes:
        params: of the learner, by name.
        data: of the task; None before its first datapoint.
        example: datapoints of any task.
        classes: of the open round, if the network chooses its outputs by them.
        round: t.
    """

    params: Params
    data: Batch | None
    example: Batch | None
    classes: Tensor | None
    round: int


def snapshot(learner: Learner, task: str | None) -> Snapshot:
    """Parameters and data of a task, copied; None is the open round."""
    if task is not None and learner.definition.restarts:
        raise ValueError(f"{type(learner).__name__} trains on the current task alone; leave task=None")
    with learner.locks.reading:
        memory = learner.memory
        data = memory.named(str(task)) if task is not None else memory.current() if learner.task is not None else None
        data = tree_map(torch.clone, data) if data is not None else None
        params = learner.layout.named(learner.state.flat)
        return Snapshot(params, data, memory.store.data, learner.chosen_classes(), max(learner.round, 0))


def adapt(
    learner: Learner, steps: int | Sequence[int] | None, statistics: Statistics, task: str | None
) -> nn.Module | list[nn.Module]:
    """The body of `Learner.adapt`."""
    adaptation = learner.definition.adaptation
    numbers = steps if isinstance(steps, Sequence) else [steps]
    default = adaptation.steps if isinstance(adaptation, GradientSteps) else int(adaptation is not None)
    counts = [default if n is None else n for n in numbers]
    for count in counts:
        check_integer("steps", count, 0)
    at = snapshot(learner, task)
    params, done, nets = at.params, 0, {}
    for count in sorted(set(counts)):
        if adaptation is not None and at.data is not None and count > done:
            params, done = _adapted(learner, adaptation, at, params, range(done, count)), count
            check_finite(learner, params, task)
        nets[count] = learner.network.adapted(params, at.data, statistics, example=at.example, classes=at.classes)
    return [nets[count] for count in counts] if isinstance(steps, Sequence) else nets[counts[0]]


def predict(learner: Learner, x: Tree, task: str | None, variance: bool) -> Any:
    """The body of `Learner.predict`."""
    adaptation = learner.definition.adaptation
    if variance and not isinstance(adaptation, Adaptation):
        raise ValueError("variance=True needs a learner with adaptation=metaleader.BayesianHead()")
    x = inputs_of(learner, x, "predict")
    prediction = learner.adapt(task=task)(x)
    if not variance:
        return prediction
    assert isinstance(adaptation, Adaptation)
    at = snapshot(learner, task)
    return prediction, adaptation.variance(learner.network, at.params, at.data, x)


def predict_many(learner: Learner, xs: Mapping[str, Tree]) -> dict[str, Any]:
    """The body of `Learner.predict_many`."""
    return {name: learner.predict(x, task=name) for name, x in xs.items()}


def check_finite(learner: Learner, params: Params, task: str | None) -> None:
    """Reject adapted parameters that are not finite."""
    if not all(bool(torch.isfinite(value).all()) for value in params.values()):
        name = learner.task if task is None else task
        raise ValueError(
            f"the net adapted to task {name!r} is not finite: check the scale of its data, or lower inner_lr"
        )


def _adapted(
    learner: Learner, adaptation: GradientSteps | Adaptation, at: Snapshot, params: Params, steps: range
) -> Params:
    """The parameters after some adaptation steps; a procedure without steps is complete after the first."""
    data: Any = at.data
    if at.classes is not None:
        data = ClassBatch(data.x, data.y, at.classes)
    with repeatable(learner.device):
        if isinstance(adaptation, GradientSteps):
            noise = dropout_seeds(learner, [at.round, num_rows(data.y)], steps.stop)
            return adaptation.run(learner.network.loss_fn, params, data, steps, noise)
        return params | adaptation(learner.network, params, data) if steps.start == 0 else params


def dropout_seeds(learner: Learner, key: Sequence[int], steps: int) -> Tensor | None:
    """The seeds of the dropout masks of an adaptation, (steps,)."""
    if not learner.network.has_dropout:
        return None
    seeds = rng("adapt dropout", learner.options.seed, *key).integers(2**31, size=steps)
    return torch.from_numpy(seeds).to(learner.device)
