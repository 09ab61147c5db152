"""Regret of a run: a learner's excess loss over the best initialisation in hindsight (Eq. 3).

    R(T) = sum over t <= T of f_t(U_t(w_t)) - min over w of sum over t <= T of f_t(U_t(w))

The dynamic regret compares with the best initialisation of every round: the minimum is inside the sum.

`play(..., regret=True)` records the first sum. For nets, the minimum is estimated by optimisation, which gives an upper
bound on it and therefore a lower bound on the regret. For quadratics, `metaleader.theory` computes both terms exactly.
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

from metaleader.evaluate import Record
from metaleader.gradient.meta import adapt, meta_gradient
from metaleader.gradient.selection import Params, StepSize
from metaleader.learners.measure import ADAPTATION_STEPS
from metaleader.learners.options import Model, initial_module
from metaleader.losses import Loss, unsmoothed
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, Task, TaskStream, num_rows, rows, to_device

# The optimisers of a pass: full-batch Adam with three step sizes, then L-BFGS, which alone gets stuck on ReLU nets.
# Each runs in blocks of steps until a block brings too little improvement.
_ADAM, _ADAM_STEPS, _LBFGS_STEPS = (1e-2, 1e-3, 1e-4), 100, 25


class UnconvergedWarning(UserWarning):
    """The hindsight comparator has not converged, so the regret is underestimated."""


@dataclass(frozen=True)
class Hindsight:
    """An estimate of the best initialisation in hindsight, and its loss in each round.

    Attributes:
        params: the initialisation.
        losses: f_t(U_t(params)) for every round, (T,).
        datapoints: the size of D_t, on which the initialisation is adapted.
        data: a description of the data that was optimised on.
        converged: whether the criterion of `hindsight` was met.
        last_gain: the relative decrease of the mean loss in the last pass over the optimisers.
        gradient_norm: the norm of the gradient of the mean loss at `params`.
        evaluations: the number of evaluations of the meta-gradient.
        static: for a dynamic comparator the static one, from which it started; otherwise None. In a dynamic comparator
            the tensors of `params` have a first dimension of rounds, `last_gain` and `gradient_norm` are the largest
            of all rounds, and `losses` are nowhere above those of the static one.
        unconverged: the rounds whose comparators have not converged; all rounds for a static comparator.
    """

    params: Params
    losses: np.ndarray
    datapoints: int
    data: str
    converged: bool
    last_gain: float
    gradient_norm: float
    evaluations: int
    static: Hindsight | None = None
    unconverged: tuple[int, ...] = ()


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
    dynamic: bool = False,
    tolerance: float = 0.01,
    max_evaluations: int = 20_000,
    chunk: int | None = None,
    device: str | torch.device = "cpu",
) -> Hindsight:
    """Minimise the sum over all rounds of the losses that the regret protocol measures.

    Each task is adapted on the first `datapoints` of its training data and measured on its held-out data, as in the
    records. No other function optimises on held-out data; the comparator of Eq. 3 requires it. Dropout is off.

    The optimisation makes passes over Adam with step sizes 0.01, 0.001 and 0.0001 and L-BFGS, each restarted and run
    while it improves the mean loss. It has converged when a pass lowers the mean loss by a fraction of at most
    `tolerance`. The comparators of the rounds have converged when a pass lowers the loss of their round by at most that
    fraction of the static comparator's mean loss.

    Args:
        model: an `nn.Module`, or a function that builds one.
        loss: the loss for the adaptation; the measurement omits label smoothing.
        stream: the tasks that were played.
        datapoints: the size of D_t; all training data if None.
        inner_lr: the step size of the adaptation.
        inner_steps: the number of steps of the adaptation.
        only: the parameters to adapt: None for all, "last" for the last layer, or a name pattern such as "head.*".
        start: the initial parameters, such as a learner's final `params`; the model's weights if None.
        rounds: the number of rounds T in R(T); the whole stream if None.
        dynamic: return the comparator of dynamic regret, one initialisation per round. The optimisation of each round
            starts from the static comparator, so that the dynamic regret is at least the static one.
        tolerance: the tolerance of the convergence criterion.
        max_evaluations: the number of meta-gradients, per optimisation, after which to stop without convergence.
        chunk: the number of tasks in memory at a time.
        device: the device to compute on.

    Warns:
        UnconvergedWarning: if the criterion is not met.
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
    size, held_out = (tree_leaves(batch.y)[0].shape[1] for batch in (support, query))
    network = Network(initial_module(model, 0, 0), loss)
    network.module.to(device)
    metric = unsmoothed(loss)

    def loss_fn(params: Params, task: tuple[Any, ...]) -> Tensor:
        # The flag `measured` selects between the unsmoothed loss and the loss of the adaptation.
        batch, measured, *classes = task
        prediction = network.predict(params, batch.x, None, *classes)
        return torch.where(measured, metric(prediction, batch.y).mean(), loss(prediction, batch.y).mean())

    flags = torch.ones(num_rounds, dtype=torch.bool, device=device)
    by_class = network.num_classes is not None and played[0].classes is not None
    classes = (torch.tensor([task.classes for task in played], device=device),) if by_class else ()
    tasks = ((support, ~flags, *classes), (query, flags, *classes))

    def minimise(chosen: slice, start: Params, scale: float | None = None) -> _Minimum:
        """The minimum of the mean loss of some rounds."""
        support, query = rows(tasks, chosen)

        def objective(params: Params) -> tuple[Tensor, Params]:
            return meta_gradient(loss_fn, params, support, query, inner_lr, inner_steps, chunk=chunk, only=only)

        return _minimise(objective, start, tolerance, max_evaluations, scale)

    @torch.no_grad()
    def losses(params: Params, by_round: bool) -> np.ndarray:
        """The loss of each round; `by_round` if the parameters have a first dimension of rounds."""

        def adapted_loss(params: Params, support: Any, query: Any) -> Tensor:
            return loss_fn(adapt(loss_fn, params, support, inner_lr, inner_steps, only=only), query)

        in_dims = (0 if by_round else None, 0, 0)
        return vmap(adapted_loss, in_dims=in_dims, chunk_size=chunk)(params, *tasks).double().cpu().numpy()

    initial = network.params()
    if start is not None:
        if start.keys() != initial.keys():
            raise ValueError(
                f"start has {sorted(start)}, the model has {sorted(initial)}; pass params of the same model"
            )
        initial = to_device(dict(start), device)
    data = f"{num_rounds} tasks, adapted on {size} datapoints, measured on {held_out} held-out ones"
    minimum = minimise(slice(None), initial)
    unconverged = () if minimum.converged else tuple(range(num_rounds))
    found = Hindsight(**vars(minimum), losses=losses(minimum.params, False), datapoints=size, data=data,
                      unconverged=unconverged)  # fmt: skip
    _warn_unconverged(found, tolerance)
    if dynamic:
        scale = float(found.losses.mean())
        found = _dynamic(found, [minimise(slice(t, t + 1), found.params, scale) for t in range(num_rounds)], losses)
        _warn_unconverged(found, tolerance)
    return found


def _warn_unconverged(comparator: Hindsight, tolerance: float) -> None:
    if not comparator.converged:
        num, total = len(comparator.unconverged), len(comparator.losses)
        kind = "comparator has" if comparator.static is None else f"comparators of {num} of {total} rounds have"
        warnings.warn(
            f"the hindsight {kind} not converged after {comparator.evaluations} meta-gradients (tolerance"
            f" {tolerance:.2%}), so the regret is underestimated; raise max_evaluations, or start from a learner's"
            " params",
            UnconvergedWarning,
            stacklevel=3,
        )


def _dynamic(static: Hindsight, minima: Sequence[_Minimum], losses: Callable[[Params, bool], np.ndarray]) -> Hindsight:
    """The comparator of dynamic regret: in each round its own minimum, or the static one if that is lower."""
    params = {name: torch.stack([minimum.params[name] for minimum in minima]) for name in static.params}
    found = losses(params, True)
    # Evaluated alone and in a batch, equal parameters differ in rounding.
    worse = ~(found < static.losses)
    for name, value in params.items():
        value[torch.from_numpy(worse).to(value.device)] = static.params[name]
    unconverged = tuple(t for t, minimum in enumerate(minima) if not minimum.converged)
    return Hindsight(
        params=params,
        losses=np.where(worse, static.losses, found),
        datapoints=static.datapoints,
        data=static.data,
        converged=not unconverged,
        last_gain=max(minimum.last_gain for minimum in minima),
        gradient_norm=max(minimum.gradient_norm for minimum in minima),
        evaluations=static.evaluations + sum(minimum.evaluations for minimum in minima),
        static=static,
        unconverged=unconverged,
    )


def cumulative_regret(records: Iterable[Record], comparator: Hindsight) -> np.ndarray:
    """Return the regret after each round against a comparator, a lower bound.

    The last value estimates R(T) of Eq. 3. The earlier values use the same comparator, which is optimised for all T
    rounds. To estimate R at an earlier T, make a comparator with `rounds`. With a dynamic comparator, all values are
    dynamic regrets.

    Args:
        records: the records of `play(..., regret=True)`; those at the comparator's number of datapoints are used.
        comparator: a comparator for the same stream.

    Raises:
        ValueError: if the records are of another protocol, or do not cover the comparator's rounds once each.
    """
    selected = [record for record in records if record.datapoints == comparator.datapoints]
    if any(record.protocol != "regret" for record in selected):
        raise ValueError(
            "these records are of the online protocol, which measures a learner on a task that it has trained on;"
            " play with regret=True"
        )
    num_rounds = len(comparator.losses)
    if [record.round for record in selected] != list(range(num_rounds)):
        raise ValueError(
            f"the comparator has rounds 0..{num_rounds - 1}, measured at {comparator.datapoints} datapoints; the"
            f" records have {len(selected)} such measurements"
        )
    return np.cumsum([record.loss for record in selected] - comparator.losses)


@dataclass(frozen=True)
class _Minimum:
    params: Params
    converged: bool
    last_gain: float
    gradient_norm: float
    evaluations: int


@torch.no_grad()
def _minimise(
    objective: Callable[[Params], tuple[Tensor, Params]],
    start: Params,
    tolerance: float,
    max_evaluations: int,
    scale: float | None = None,
) -> _Minimum:
    """Make passes over the optimisers until a pass lowers the loss by a fraction of at most `tolerance`.

    The fraction is one of the loss before the pass, or of `scale`.
    """
    params = {name: value.detach().clone() for name, value in start.items()}
    evaluations, best, best_loss = 0, params, np.inf

    def evaluate() -> Tensor:
        nonlocal evaluations, best, best_loss
        loss, gradient = objective(params)
        evaluations += 1
        if float(loss) < best_loss:
            best, best_loss = {name: value.clone() for name, value in params.items()}, float(loss)
        for name, value in params.items():
            value.grad = gradient[name].contiguous()  # L-BFGS needs it
        return loss

    if not bool(torch.isfinite(evaluate())):
        raise ValueError("the loss is not finite at the start; lower inner_lr, or start from trained params")
    converged, gain = False, np.inf
    while not converged and evaluations < max_evaluations:
        before_pass = best_loss
        for optimizer, steps in _optimizers(params):
            improving = True
            while improving and evaluations < max_evaluations:
                before_block = best_loss
                for _ in range(steps):
                    optimizer.step(evaluate)  # pyright: ignore[reportCallIssue, reportArgumentType]
                evaluate()
                improving = before_block - best_loss > tolerance * (scale or abs(before_block))
            for name, value in params.items():
                value.copy_(best[name])
        gain = (before_pass - best_loss) / (scale or abs(before_pass)) if before_pass else 0.0
        converged = gain <= tolerance and evaluations < max_evaluations
    evaluate()
    gradients = [value.grad.square().sum() for value in params.values() if value.grad is not None]
    return _Minimum(best, converged, gain, float(torch.stack(gradients).sum().sqrt()), evaluations)


def _optimizers(params: Params) -> Iterator[tuple[torch.optim.Optimizer, int]]:
    """Yield the optimisers of a pass, each with its number of steps per block."""
    values = list(params.values())
    for lr in _ADAM:
        yield torch.optim.Adam(values, lr=lr), _ADAM_STEPS
    # With tolerances of 0, the caller decides when to stop.
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
    """Return D_t and the held-out data of every task, with a leading task dimension."""
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
