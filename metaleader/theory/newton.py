"""FTML where there is no closed form: the leader of every round by Newton's method on the meta-objective (Eq. 4).

Theorem 1 makes the sum of the losses after adaptation strongly convex, so that Newton's method, begun at the leader of
the round before, finds its minimiser to rounding in a few steps. The Hessians are exact, through the kernel's `adapt`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from metaleader.gradient.inner import LossFn, adapt
from metaleader.tasks import num_rows, rows
from metaleader.theory.convexity import Constants


class NewtonRun(NamedTuple):
    """FTML's play on one stream.

    Attributes:
        leaders: what was played, w_t, and last the best in hindsight, (T + 1, d).
        regret: R(T) of Eq. 3, (T,).
        gradient_bound: sum over t <= T of |grad f~_t(w_t)|^2 / (2 t mu/8), (T,).
    """

    leaders: Tensor
    regret: Tensor
    gradient_bound: Tensor


def play_ftml(
    loss_fn: LossFn, dimension: int, support: Any, query: Any, constants: Constants, alpha: float | None = None
) -> NewtonRun:
    """Play exact FTML from w = 0.

    Args:
        loss_fn: of ({"w": w}, task).
        dimension: of w.
        support: the tasks of f^, (T, ...).
        query: the tasks of f, (T, ...).
        constants: of these tasks.
        alpha: the inner step size; the largest that Theorem 1 admits if None.

    Raises:
        ValueError: when the meta-objective is not mu/8-strongly convex where Newton's method passes.
    """
    alpha = constants.alpha if alpha is None else alpha
    constants.check_alpha(alpha)

    def meta_loss(w: Tensor, support: Any, query: Any) -> Tensor:
        return loss_fn(adapt(loss_fn, {"w": w}, support, lr=alpha, steps=1), query)

    def curvature(w: Tensor, support: Any, query: Any) -> tuple[Tensor, Tensor]:
        def gradient(w: Tensor) -> tuple[Tensor, Tensor]:
            found = grad(meta_loss)(w, support, query)
            return found, found

        return jacrev(gradient, has_aux=True)(w)

    over_tasks = (None, 0, 0)
    w = torch.zeros(dimension, dtype=torch.float64)
    leaders, costs, slopes, best = [w], [], [], []
    for t in range(1, num_rows(query) + 1):
        seen = rows(support, slice(0, t)), rows(query, slice(0, t))
        now = rows(support, t - 1), rows(query, t - 1)  # pyright: ignore[reportArgumentType]
        slope, cost = grad_and_value(meta_loss)(w, *now)
        for _ in range(50):
            hessian, gradient = (part.sum(0) for part in vmap(curvature, over_tasks)(w, *seen))
            least = float(torch.linalg.eigvalsh(hessian)[0]) / t
            if not least >= constants.meta_mu:
                raise ValueError(
                    f"round {t}: the curvature of the meta-objective is {least:.3g}, below mu/8 ="
                    f" {constants.meta_mu:.3g}; alpha is {alpha:.4g}, and Theorem 1 admits {constants.alpha:.4g}"
                )
            w = w - torch.linalg.solve(hessian, gradient)
            # Newton's error is about the square of its step, which strong convexity bounds.
            if float(torch.linalg.vector_norm(gradient)) <= 1e-6 * t * constants.meta_mu:
                break
        else:
            raise ValueError(
                f"no leader after 50 Newton steps in round {t}; begin nearer, or lower alpha ({alpha:.4g})"
            )
        leaders.append(w)
        costs.append(cost)
        slopes.append(slope.square().sum() / (2 * t * constants.meta_mu))
        best.append(vmap(meta_loss, over_tasks)(w, *seen).sum())
    regret = torch.stack(costs).cumsum(0) - torch.stack(best)
    return NewtonRun(torch.stack(leaders), regret, torch.stack(slopes).cumsum(0))
