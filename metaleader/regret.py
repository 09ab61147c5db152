"""Regret of a run: what a learner lost over the rounds against the best initialisation in hindsight (Eq. 3).

    R(T) = sum over t <= T of f_t(U_t(w_t)) - min over w of sum over t <= T of f_t(U_t(w))

The first sum is what `play(..., regret=True)` recorded. For nets the minimum can only be estimated, by a value above
it: a comparator that has not converged is too weak, and makes the regret too small. For quadratics `metaleader.theory`
has both terms exactly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.evaluate import ADAPTATION_STEPS, Record
from metaleader.gradient.inner import Params, StepSize, adapt
from metaleader.gradient.meta import meta_gradient
from metaleader.learners.options import Model, initial_module
from metaleader.losses import Loss, unsmoothed
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, Task, TaskStream, num_rows, rows, to_device

# What a comparator is optimised by, in turn: full-batch Adam of three step sizes, then L-BFGS, which alone gets stuck
# on nets with ReLU. Each runs in blocks of steps for as long as a block gains something.
_ADAM, _ADAM_STEPS, _LBFGS_STEPS = (1e-2, 1e-3, 1e-4), 100, 25


class UnconvergedWarning(UserWarning):
    """The hindsight comparator has not converged: regret against it is too small."""


@dataclass(frozen=True)
class Hindsight:
    """An estimate of the best initialisation in hindsight, and what it loses in each round.

    Attributes:
        params: the initialisation.
        losses: f_t(U_t(params)) for every round, (T,).
        datapoints: the size of D_t that was adapted on.
        data: what it was optimised on, in words.
        converged: whether the criterion of `hindsight` was met.
        last_gain: the part of the mean loss that the last pass over all optimisers took off.
        gradient_norm: of the mean loss, at `params`.
        evaluations: of the meta-gradient over all tasks.
    """

    params: Params
    losses: np.ndarray
    datapoints: int
    data: str
    converged: bool
    last_gain: float
    gradient_norm: float
    evaluations: int


def hindsight(
    model: Model,
    loss: Loss,
    stream: TaskStream | Sequence[Task],
    *,
    datapoints: int | None = None,
    inner_lr: StepSize = 0.1,
    inner_steps: int = ADAPTATION_STEPS,
    only: str | None = None,
    start: Mapping[str, Tensor] | None = None,
    rounds: int | None = None,
    tolerance: float = 0.01,
    max_evaluations: int = 20_000,
    chunk: int | None = None,
    device: str | torch.device = "cpu",
) -> Hindsight:
    """Minimise the sum of the losses that the regret protocol measures, over all rounds at once.

    Every task is adapted on the first `datapoints` of its training data and measured on its held-out data, as in the
    records; this is the one place that optimises on held-out data, because the comparator of Eq. 3 does. All tasks at
    once, dropout off. Converged: a pass over Adam with step sizes 0.01, 0.001 and 0.0001 and L-BFGS, each begun afresh
    and run for as long as it gains, lowers the mean loss by less than `tolerance` of itself.

    Args:
        model: an `nn.Module`, or a function that builds one.
        loss: the loss that is adapted with; it is measured without label smoothing.
        stream: the tasks that were played.
        datapoints: the size of D_t; all training data if None.
        inner_lr: the step size of the adaptation.
        inner_steps: the number of steps of the adaptation.
        only: which parameters move in the adaptation.
        start: where to begin; the model's own weights if None. A learner's final `params` are a good place.
        rounds: use only the first of the stream: the comparator for R(rounds).
        tolerance: of the criterion.
        max_evaluations: of the meta-gradient, after which to stop unconverged.
        chunk: how many tasks are held at a time.
        device: where to compute.

    Warns:
        UnconvergedWarning: when the criterion was not met.
    """
    num_rounds = len(stream) if rounds is None else rounds
    if not 1 <= num_rounds <= len(stream):
        raise ValueError(f"rounds (T) must lie in 1..{len(stream)}, the length of the stream, got {rounds}")
    if not tolerance > 0 or max_evaluations < 1:
        raise ValueError(
            f"tolerance must be positive and max_evaluations at least 1, got {tolerance} and {max_evaluations}"
        )
    played = [stream[t] for t in range(num_rounds)]
    support, query = _stacked(played, datapoints, device)
    size, held_out = (tree_leaves(part.y)[0].shape[1] for part in (support, query))
    network = Network(initial_module(model, 0, 0), loss)
    network.module.to(device)
    metric = unsmoothed(loss)

    def loss_fn(params: Params, part: tuple[Any, ...]) -> Tensor:
        # Adapted with the learner's loss, measured with the unsmoothed one: the flag says which.
        batch, measured, *classes = part
        prediction = network.predict(params, batch.x, None, *classes)
        return torch.where(measured, metric(prediction, batch.y).mean(), loss(prediction, batch.y).mean())

    flags = torch.ones(num_rounds, dtype=torch.bool, device=device)
    by_class = network.num_classes is not None and played[0].classes is not None
    classes = (torch.tensor([task.classes for task in played], device=device),) if by_class else ()
    tasks = ((support, ~flags, *classes), (query, flags, *classes))

    def objective(params: Params) -> tuple[Tensor, Params]:
        return meta_gradient(loss_fn, params, *tasks, inner_lr, inner_steps, chunk=chunk, only=only)

    own = network.params()
    if start is not None and start.keys() != own.keys():
        raise ValueError(f"start has {sorted(start)}, the model has {sorted(own)}; pass params of the same model")
    begin = own if start is None else to_device(dict(start), device)
    found = _minimise(objective, begin, tolerance, max_evaluations)

    def one_loss(support: Any, query: Any) -> Tensor:
        return loss_fn(adapt(loss_fn, found.params, support, inner_lr, inner_steps, only=only), query)

    with torch.no_grad():
        losses = vmap(one_loss, chunk_size=chunk)(*tasks).double().cpu().numpy()
    if not found.converged:
        warnings.warn(
            f"the hindsight comparator has not converged after {found.evaluations} meta-gradients (tolerance"
            f" {tolerance:.2%}): regret against it is too small; raise max_evaluations, or start from a learner's"
            " params",
            UnconvergedWarning,
            stacklevel=2,
        )
    return Hindsight(
        params=found.params,
        losses=losses,
        datapoints=size,
        data=f"{num_rounds} tasks, adapted on {size} datapoints, measured on {held_out} held-out ones",
        converged=found.converged,
        last_gain=found.last_gain,
        gradient_norm=found.gradient_norm,
        evaluations=found.evaluations,
    )


def cumulative_regret(records: Iterable[Record], comparator: Hindsight) -> np.ndarray:
    """The regret after each round against one comparator: an estimate, from below.

    The last value estimates R(T) of Eq. 3. The values before compare with the same initialisation, the best for all T
    rounds, not with the best for the rounds so far; for R at an earlier T, make a comparator with `rounds`.

    Args:
        records: of `play(..., regret=True)`, those with as many datapoints as the comparator adapts on are used.
        comparator: of the same stream.

    Raises:
        ValueError: for records of another protocol, or that do not cover the comparator's rounds once each.
    """
    chosen = [record for record in records if record.datapoints == comparator.datapoints]
    if any(record.protocol != "regret" for record in chosen):
        raise ValueError(
            "these records are of the online protocol, whose learner had trained on the task it was measured on;"
            " play with regret=True"
        )
    num_rounds = len(comparator.losses)
    if [record.round for record in chosen] != list(range(num_rounds)):
        raise ValueError(
            f"the comparator has rounds 0..{num_rounds - 1}, measured at {comparator.datapoints} datapoints; the"
            f" records have {len(chosen)} such measurements"
        )
    return np.cumsum([record.loss for record in chosen] - comparator.losses)


@dataclass(frozen=True)
class _Found:
    params: Params
    converged: bool
    last_gain: float
    gradient_norm: float
    evaluations: int


@torch.no_grad()
def _minimise(
    objective: Callable[[Params], tuple[Tensor, Params]], start: Params, tolerance: float, max_evaluations: int
) -> _Found:
    """Pass over the optimisers until a whole pass gains less than the tolerance."""
    params = {name: value.detach().clone() for name, value in start.items()}
    evaluations, best, best_loss = 0, params, np.inf

    def evaluate() -> Tensor:
        nonlocal evaluations, best, best_loss
        loss, gradient = objective(params)
        evaluations += 1
        if float(loss) < best_loss:
            best, best_loss = {name: value.clone() for name, value in params.items()}, float(loss)
        for name, value in params.items():
            value.grad = gradient[name]
        return loss

    if not bool(torch.isfinite(evaluate())):
        raise ValueError("the loss is not finite at the start; lower inner_lr, or start from trained params")
    converged, gain = False, np.inf
    while not converged and evaluations < max_evaluations:
        before_pass = best_loss
        for optimizer, steps in _optimizers(params):
            gained = True
            while gained and evaluations < max_evaluations:
                before_block = best_loss
                for _ in range(steps):
                    optimizer.step(evaluate)  # pyright: ignore[reportCallIssue, reportArgumentType]
                evaluate()
                gained = before_block - best_loss > tolerance * abs(before_block)
            for name, value in params.items():
                value.copy_(best[name])
        gain = (before_pass - best_loss) / abs(before_pass) if before_pass else 0.0
        converged = gain <= tolerance and evaluations < max_evaluations
    evaluate()
    gradients = [value.grad.square().sum() for value in params.values() if value.grad is not None]
    return _Found(best, converged, gain, float(torch.stack(gradients).sum().sqrt()), evaluations)


def _optimizers(params: Params) -> Iterator[tuple[torch.optim.Optimizer, int]]:
    """Each with the number of its steps in a block."""
    values = list(params.values())
    for lr in _ADAM:
        yield torch.optim.Adam(values, lr=lr), _ADAM_STEPS
    # The tolerances at 0 leave it to the caller when to stop.
    yield (
        torch.optim.LBFGS(
            values,
            max_iter=_LBFGS_STEPS,
            history_size=20,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        ),
        1,
    )


def _stacked(tasks: Sequence[Task], datapoints: int | None, device: str | torch.device) -> tuple[Batch, Batch]:
    """D_t and held-out data of every task, with a leading task dimension."""
    sizes = sorted({num_rows(task.train) for task in tasks})
    if not 1 <= (sizes[-1] if datapoints is None else datapoints) <= sizes[0]:
        raise ValueError(
            f"tasks have {sizes[0]} to {sizes[-1]} training datapoints; pass datapoints in 1..{sizes[0]}, the size of"
            f" D_t at which the records were measured, got {datapoints}"
        )
    held_out = sorted({num_rows(task.test) for task in tasks})
    if len(held_out) > 1:
        raise ValueError(f"tasks must have equally many held-out datapoints, got {held_out}")
    support = [rows(task.train, slice(0, datapoints)) for task in tasks]
    return _stack(support, device), _stack([task.test for task in tasks], device)


def _stack(batches: Sequence[Batch], device: str | torch.device) -> Batch:
    return to_device(tree_map(lambda *leaves: torch.stack(leaves), *batches), device)
