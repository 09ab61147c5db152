"""FTML without a closed form: Newton's method on the meta-objective (Eq. 4) finds the leader of every round.

By Theorem 1 the sum of the losses after adaptation is strongly convex. Newton's method, started at the previous leader,
finds its minimiser up to rounding in a few steps. The Hessians are exact: they differentiate `adapt`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from metaleader.gradient.meta import adapt
from metaleader.gradient.selection import LossFn
from metaleader.tasks import num_rows, rows
from metaleader.theory.convexity import Constants


class NewtonRun(NamedTuple):
    """The result of FTML on one stream.

    Attributes:
        leaders: w_t of every round, followed by the best parameters in hindsight, (T + 1, d).
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
        loss_fn: a function of ({"w": w}, task).
        dimension: the dimension of w.
        support: the tasks of f^, (T, ...).
        query: the tasks of f, (T, ...).
        constants: the constants of these tasks.
        alpha: the inner step size; Theorem 1's bound if None.

    Raises:
        ValueError: if the meta-objective is not mu/8-strongly convex at an iterate of Newton's method.
    """
    alpha = constants.alpha if alpha is None else alpha
    constants.check_alpha(alpha)

    def meta_loss(w: Tensor, support: Any, query: Any) -> Tensor:
        return loss_fn(adapt(loss_fn, {"w": w}, support, lr=alpha, steps=1), query)

    def hessian_and_gradient(w: Tensor, support: Any, query: Any) -> tuple[Tensor, Tensor]:
        def gradient_twice(w: Tensor) -> tuple[Tensor, Tensor]:
            gradient = grad(meta_loss)(w, support, query)
            return gradient, gradient

        return jacrev(gradient_twice, has_aux=True)(w)

    over_tasks = (None, 0, 0)
    w = torch.zeros(dimension, dtype=torch.float64)
    leaders, losses, bounds, hindsight = [w], [], [], []
    for t in range(1, num_rows(query) + 1):
        seen = rows(support, slice(0, t)), rows(query, slice(0, t))
        current = rows(support, t - 1), rows(query, t - 1)  # pyright: ignore[reportArgumentType]
        slope, loss = grad_and_value(meta_loss)(w, *current)
        for _ in range(50):
            hessian, gradient = (per_task.sum(0) for per_task in vmap(hessian_and_gradient, over_tasks)(w, *seen))
            least = float(torch.linalg.eigvalsh(hessian)[0]) / t
            if not least >= constants.meta_mu:
                raise ValueError(
                    f"round {t}: the curvature of the meta-objective is {least:.3g}, below mu/8 ="
                    f" {constants.meta_mu:.3g}; alpha is {alpha:.4g}, Theorem 1's bound is {constants.alpha:.4g}"
                )
            w = w - torch.linalg.solve(hessian, gradient)
            # The error after a step is about the square of its length, which strong convexity bounds.
            if float(torch.linalg.vector_norm(gradient)) <= 1e-6 * t * constants.meta_mu:
                break
        else:
            raise ValueError(
                f"Newton's method has not converged after 50 steps in round {t}; lower alpha ({alpha:.4g})"
            )
        leaders.append(w)
        losses.append(loss)
        bounds.append(slope.square().sum() / (2 * t * constants.meta_mu))
        hindsight.append(vmap(meta_loss, over_tasks)(w, *seen).sum())
    regret = torch.stack(losses).cumsum(0) - torch.stack(hindsight)
    return NewtonRun(torch.stack(leaders), regret, torch.stack(bounds).cumsum(0))
