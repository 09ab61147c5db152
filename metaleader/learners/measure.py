"""Measurements of learners on held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.determinism import repeatable
from metaleader.learners.learner import Learner
from metaleader.learners.update import stack
from metaleader.losses import Loss, takes_labels
from metaleader.system.settings import keeps_settings
from metaleader.tasks import Batch, ClassBatch, Tree, to_device

ADAPTATION_STEPS = 5

# Groups of output columns by name, as slices
Parts = Mapping[str, slice]
NO_PARTS: Parts = MappingProxyType({})


@torch.no_grad()
def measure_together(
    learners: Sequence[Any],
    tests: Sequence[Batch],
    metric: Loss,
    steps: Sequence[int] = (ADAPTATION_STEPS,),
    parts: Parts = NO_PARTS,
) -> list[dict[str, float]]:
    """Results of `measure` for learners of the same shape, as one batched program if none overrides `adapt`."""
    batched = not any(overrides(learner, "adapt") for learner in learners)
    predictions = predict_together(learners, [test.x for test in tests], steps) if batched else None
    if predictions is None:
        return [measure(learner, test, metric, steps, parts) for learner, test in zip(learners, tests, strict=True)]
    scores = []
    for r, test in enumerate(tests):
        values: dict[str, Tensor] = {}
        for name, prediction in predictions.items():
            values |= _scores(prediction[r], test, metric, parts, "" if name == str(steps[0]) else f"_{name}")
        scores.append(values)
    numbers = torch.stack([torch.stack([value.double() for value in values.values()]) for values in scores]).tolist()
    return [dict(zip(values, row, strict=True)) for values, row in zip(scores, numbers, strict=True)]


@torch.no_grad()
def measure(
    learner: Any,
    test: Batch,
    metric: Loss,
    steps: Sequence[int] = (ADAPTATION_STEPS,),
    parts: Parts = NO_PARTS,
    task: str | None = None,
) -> dict[str, float]:
    """Adapt, then compute loss and accuracy on held-out data for each number of steps; one transfer to the host.

    With `task`, the learner adapts to all data of that name instead of D_t.
    """
    named = {} if task is None else {"task": task}
    test = to_device(test, getattr(learner, "device", "cpu"))
    nets = dict(zip(map(str, steps), learner.adapt(steps=list(steps), statistics="batch", **named), strict=True))
    if getattr(learner, "has_batch_norm", False):
        nets["task"] = learner.adapt(steps=steps[0], statistics="task", **named)
    values: dict[str, Tensor] = {}
    with repeatable(tree_leaves(test.x)[0].device):
        for name, net in nets.items():
            values |= _scores(net(test.x), test, metric, parts, "" if name == str(steps[0]) else f"_{name}")
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def _scores(prediction: Tensor, test: Batch, metric: Loss, parts: Parts, suffix: str) -> dict[str, Tensor]:
    scores = {f"loss{suffix}": metric(prediction, test.y).mean()}
    if takes_labels(metric) or (has_labels(test) and prediction.ndim == 2 and prediction.shape[1] > 1):
        scores[f"accuracy{suffix}"] = (prediction.argmax(1) == test.y).float().mean()
    for name, columns in () if suffix else parts.items():  # for the first number of steps only
        if prediction.ndim != 2 or not prediction[:, columns].numel():
            raise ValueError(
                f"there is no part {name!r} ({columns}) of outputs {tuple(prediction.shape)}: check `parts`"
            )
        scores[f"loss_{name}"] = metric(prediction[:, columns], test.y[:, columns]).mean()
    return scores


def has_labels(batch: Batch) -> bool:
    """Whether the targets are integers, one per datapoint: of predictions with columns, the accuracy is measured."""
    y = batch.y
    return isinstance(y, Tensor) and not y.is_floating_point() and y.ndim == 1


def overrides(learner: Any, *names: str) -> bool:
    """Whether an object has methods of its own in place of those of `Learner`."""
    return not isinstance(learner, Learner) or any(
        getattr(type(learner), name) is not getattr(Learner, name) or name in vars(learner) for name in names
    )


@keeps_settings
@torch.no_grad()
def predict_together(learners: Sequence[Learner], xs: Sequence[Tree], steps: Sequence[int]) -> dict[str, Tensor] | None:
    """Predictions of learners of one shape adapted to D_t, (learners, rows, ...), by number of steps and "task".

    None where the learners must be asked one by one: with dropout, whose masks differ, without data, and where
    learners, data or rows differ in kind or shape.
    """
    lead = learners[0]
    if any(number < 0 for number in steps):
        raise ValueError(f"steps must be integers of at least 0, got {list(steps)}")
    data = [learner.memory.current() if learner.task is not None else None for learner in learners]
    if lead.network.has_dropout or any(batch is None for batch in data):
        return None
    if len(learners) > 1 and not _are_alike(learners, data, xs):
        return None
    params = lead.definition.objective.layout.named(torch.stack([learner.state.flat for learner in learners]))
    batch, x = stack(list(zip(data, xs, strict=True)))
    classes = None
    if lead.network.num_classes is not None:
        classes = stack([learner.memory.current_classes() for learner in learners])
        batch = ClassBatch(batch.x, batch.y, classes)
    return lead.engine.predictions(lead.network, lead.definition.adaptation, steps, params, batch, x, classes)


def _are_alike(learners: Sequence[Learner], data: Sequence[Batch | None], xs: Sequence[Tree]) -> bool:
    """Whether one program adapts all learners to their data and predicts these rows."""
    lead = learners[0]
    if len({(type(learner), learner.definition.adaptation) for learner in learners}) > 1:
        return False
    ways = [learner.memory.current_classes() for learner in learners]
    groups = zip(data, xs, (() if classes is None else classes for classes in ways), strict=True)
    if len({str(tree_map(lambda leaf: leaf.shape, group)) for group in groups}) > 1:
        return False
    return all(lead.network.is_like(learner.network) for learner in learners[1:])
