"""Adaptation and predictions of a learner, which several threads may ask for while another one changes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.determinism import repeatable
from metaleader.engine.objective import Adaptation, GradientSteps
from metaleader.gradient.selection import Params
from metaleader.learners.data import inputs_of
from metaleader.learners.options import check_integer
from metaleader.nets.functional import Statistics
from metaleader.tasks import Batch, ClassBatch, Tree, as_name, num_rows, rng, row_signature, rows

if TYPE_CHECKING:
    from metaleader.learners.learner import Learner


class Snapshot(NamedTuple):
    """What the adaptation to a task depends on, as it was at one moment.

    Attributes:
        params: of the learner, by name.
        task: the name of the task.
        data: of the task; None before its first datapoint.
        example: a datapoint of any task.
        classes: of the open round, if the network chooses its outputs by them.
        round: t.
    """

    params: Params
    task: str
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
        data = (
            memory.named(as_name(task)) if task is not None else memory.current() if learner.task is not None else None
        )
        data = tree_map(torch.clone, data) if data is not None else None
        params = learner.layout.named(learner.state.flat)
        name = str(learner.task if task is None else task)
        stored = memory.store.data
        example = None if stored is None else rows(stored, slice(0, 1))
        return Snapshot(params, name, data, example, learner.chosen_classes(), max(learner.round, 0))


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
            check_finite(params, at.task)
        nets[count] = learner.network.adapted(params, at.data, statistics, example=at.example, classes=at.classes)
    return [nets[count] for count in counts] if isinstance(steps, Sequence) else nets[counts[0]]


def predict(learner: Learner, x: Tree, task: str | None, variance: bool, own_adapt: bool) -> Any:
    """The body of `Learner.predict`; `own_adapt` says that a user's class has its own `adapt`."""
    network, adaptation = learner.network, learner.definition.adaptation
    if variance and not isinstance(adaptation, Adaptation):
        raise ValueError("variance=True needs a learner with adaptation=metaleader.BayesianHead()")
    x = inputs_of(learner, x, "predict")
    if own_adapt and not variance:
        return run_model(learner.adapt(task=task), "predict", x, x=x)
    at = snapshot(learner, task)
    single = at.example is not None and _dims(x) == [dim - 1 for dim in _dims(at.example.x)]
    x = tree_map(lambda leaf: leaf[None], x) if single else x
    if adaptation is None or at.data is None:
        params = at.params
    else:
        steps = adaptation.steps if isinstance(adaptation, GradientSteps) else 1
        params = _adapted(learner, adaptation, at, at.params, range(steps))
        check_finite(params, at.task)
    with repeatable(learner.device):
        if network.has_batch_norm and at.data is not None:
            call = network.predict_with_statistics_of
            found = run_model(call, "predict", at.data.x, params, x, at.classes, x=x)
        else:
            found = run_model(network.predict, "predict", params, x, None, at.classes, x=x)
        found = found[0] if single else found
        if not variance:
            return found
        assert isinstance(adaptation, Adaptation)
        spread = adaptation.variance(network, at.params, at.data, x)
    return found, spread[0] if single else spread


def run_model(call: Callable[..., Any], where: str, *arguments: Any, x: Tree) -> Any:
    """Call the model on a user's inputs; an error says what they are."""
    try:
        return call(*arguments)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{where}: the model fails on x with rows of {row_signature(x)}: {first}; pass x of the shape and dtype"
            " that the model takes"
        ) from error


def check_finite(params: Params, task: str) -> None:
    """Reject adapted parameters that are not finite."""
    if not all(bool(torch.isfinite(value).all()) for value in params.values()):
        raise not_finite([task])


def not_finite(names: Sequence[str]) -> ValueError:
    """The error for nets whose parameters are not finite after adaptation."""
    listed = ", ".join(repr(name) for name in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return ValueError(f"the net adapted to task {listed} is not finite: check the scale of its data, or lower inner_lr")


def _dims(tree: Tree) -> list[int]:
    return [leaf.ndim for leaf in tree_leaves(tree)]


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
        if steps.start > 0:
            return params
        try:
            return params | adaptation(learner.network, params, data)
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            raise not_finite([at.task]) from error


def dropout_seeds(learner: Learner, key: Sequence[int], steps: int) -> Tensor | None:
    """The seeds of the dropout masks of an adaptation, (steps,)."""
    if not learner.network.has_dropout:
        return None
    seeds = rng("adapt dropout", learner.options.seed, *key).integers(2**31, size=steps)
    return torch.from_numpy(seeds).to(learner.device)
