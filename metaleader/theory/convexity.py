"""Theorem 1: the loss after one gradient step is mu/8-strongly convex and 9 beta/8-smooth, if the step is small enough.

For f~(w) = f(U(w)), U(w) = w - alpha grad f^(w), the Hessian is

    (I - alpha H^(w)) H(U(w)) (I - alpha H^(w)) - alpha D3f^(w)[grad f(U(w))]

With alpha <= 1/(2 beta) the eigenvalues of the first term lie in [mu/4, beta]; with alpha <= mu/(8 rho G) the norm of
the second is at most alpha rho G <= mu/8. The paper argues with lower bounds on differences of gradients, which alone
do not prove convexity; the Hessian does.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from metaleader.gradient.inner import LossFn, adapt
from metaleader.gradient.meta import meta_gradient
from metaleader.theory.quadratics import Quadratics, check_positive_definite


class StepSizeWarning(UserWarning):
    """The inner step size is larger than Theorem 1 admits: the meta-objective may not be strongly convex."""


@dataclass(frozen=True)
class Constants:
    """The constants of assumptions 1 and 2 on a bounded domain W, and what Theorem 1 makes of them.

    Attributes:
        G: the largest norm of a gradient over W and U(W).
        beta: the largest eigenvalue of a Hessian.
        rho: the Lipschitz constant of the Hessians.
        mu: the smallest eigenvalue of a Hessian.
        radius: W is |w| <= radius. No quadratic is Lipschitz on all of R^d.
    """

    G: float
    beta: float
    rho: float
    mu: float
    radius: float

    @property
    def alpha(self) -> float:
        """The largest admissible step size, min(1/(2 beta), mu/(8 rho G))."""
        largest = 1 / (2 * self.beta)
        return min(largest, self.mu / (8 * self.rho * self.G)) if self.rho > 0 else largest

    @property
    def meta_mu(self) -> float:
        """mu/8, the strong convexity of the loss after adaptation."""
        return self.mu / 8

    @property
    def meta_beta(self) -> float:
        """9 beta/8, the smoothness of the loss after adaptation."""
        return 9 * self.beta / 8

    def joined(self, other: Constants) -> Constants:
        """The constants that hold for the functions of both, over one W."""
        if self.radius != other.radius:
            raise ValueError(f"the constants are of different domains, radius {self.radius} and {other.radius}")
        worst = (max(getattr(self, name), getattr(other, name)) for name in ("G", "beta", "rho"))
        return Constants(*worst, mu=min(self.mu, other.mu), radius=self.radius)

    def regret_bound(self, T: Tensor) -> Tensor:
        """Corollary 2, 32 G^2/mu (1 + log T): at T = 1 the regret is positive, so log T alone cannot bound it."""
        return 32 * self.G**2 / self.mu * (1 + torch.log(T))

    def check_alpha(self, alpha: float) -> None:
        """Refuse a step size that is not a positive number, and warn of one above the bound."""
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha must be a positive number, got {alpha}")
        if alpha > self.alpha * (1 + 1e-12):
            warnings.warn(
                f"alpha = {alpha:.4g} is above Theorem 1's bound min(1/(2 beta), mu/(8 rho G)) = {self.alpha:.4g};"
                " the meta-objective may lose strong convexity, and corollary 2 promises nothing",
                StepSizeWarning,
                stacklevel=2,
            )


def quadratic_constants(tasks: Quadratics, radius: float) -> Constants:
    """The constants that hold for every one of the tasks over W, |w| <= radius, and U(W); rho is 0.

    U(W) lies within radius + |b| / (2 beta), since a step of at most 1/(2 beta) is a contraction.

    Args:
        tasks: one or many; f and f^ together where they differ.
        radius: of W.

    Raises:
        ValueError: when a matrix is not positive definite.
    """
    if not radius > 0:
        raise ValueError(f"the radius of the domain must be positive, got {radius}")
    check_positive_definite(tasks.A)
    eigenvalues = torch.linalg.eigvalsh(tasks.A)
    beta, slope_at_zero = float(eigenvalues.max()), torch.linalg.vector_norm(tasks.b, dim=-1)
    reach = radius + float(slope_at_zero.max()) / (2 * beta)
    largest = float((eigenvalues[..., -1] * reach + slope_at_zero).max())
    return Constants(G=largest, beta=beta, rho=0.0, mu=float(eigenvalues.min()), radius=radius)


def meta_hessian(loss_fn: LossFn, w: Tensor, support: Any, query: Any, alpha: float | Tensor) -> Tensor:
    """The Hessian of w -> f(w - alpha grad f^(w)) at w, (d, d), by automatic differentiation of the kernel's `adapt`.

    Args:
        loss_fn: of ({"w": w}, task).
        w: (d,).
        support: the task of f^.
        query: the task of f.
        alpha: the step size.
    """

    def meta_loss(w: Tensor) -> Tensor:
        return loss_fn(adapt(loss_fn, {"w": w}, support, lr=alpha, steps=1), query)

    return jacrev(grad(meta_loss))(w)


def meta_eigenvalues(loss_fn: LossFn, points: Tensor, support: Any, query: Any, alpha: float | Tensor) -> Tensor:
    """The eigenvalues of `meta_hessian` at every point, for every task: (tasks, points, d), in ascending order.

    Args:
        loss_fn: of ({"w": w}, task).
        points: (points, d).
        support: the tasks of f^, with a leading task dimension.
        query: the tasks of f, likewise.
        alpha: the step size.
    """

    def one(w: Tensor, support: Any, query: Any) -> Tensor:
        return meta_hessian(loss_fn, w, support, query, alpha)

    return torch.linalg.eigvalsh(vmap(vmap(one, (0, None, None)), (None, 0, 0))(points, support, query))


def contraction(loss_fn: LossFn, first: Tensor, second: Tensor, tasks: Any, alpha: float) -> Tensor:
    """|U(v) - U(w)| / |v - w| for pairs of points and every task, (tasks, pairs): at most 1 - alpha mu (lemma 4)."""

    def step(w: Tensor, task: Any) -> Tensor:
        return adapt(loss_fn, {"w": w}, task, lr=alpha, steps=1)["w"]

    steps = vmap(vmap(step, (0, None)), (None, 0))
    moved = torch.linalg.vector_norm(steps(first, tasks) - steps(second, tasks), dim=-1)
    return moved / torch.linalg.vector_norm(first - second, dim=-1)


def minimise(
    loss_fn: LossFn,
    start: Tensor,
    support: Any,
    query: Any,
    constants: Constants,
    *,
    alpha: float,
    inner_steps: int = 1,
    tolerance: float = 1e-10,
    max_iterations: int = 10_000,
) -> Tensor:
    """Minimise the meta-objective by accelerated gradient descent through `meta_gradient`, to a certified distance.

    Step size and momentum are those for the strong convexity and smoothness that Theorem 1 promises; strong convexity
    also gives the certificate |w - minimiser| <= |gradient| / (mu/8).

    Args:
        loss_fn: of ({"w": w}, task).
        start: (d,).
        support: the tasks of f^, with a leading task dimension.
        query: the tasks of f, likewise.
        constants: of these tasks.
        alpha: the inner step size.
        inner_steps: 1, or 0 for joint training.
        tolerance: the distance to the minimiser at which to stop.
        max_iterations: after which to give up.

    Raises:
        ValueError: when it did not get there: the constants are not those of the tasks, or alpha is too large.
    """
    root = math.sqrt(constants.meta_beta / constants.meta_mu)
    momentum = (root - 1) / (root + 1)
    w, ahead = start, start
    for _ in range(max_iterations):
        gradient = meta_gradient(loss_fn, {"w": ahead}, support, query, alpha, inner_steps)[1]["w"]
        if float(torch.linalg.vector_norm(gradient)) <= constants.meta_mu * tolerance:
            return ahead
        before, w = w, ahead - gradient / constants.meta_beta
        ahead = w + momentum * (w - before)
    raise ValueError(
        f"no minimiser within {tolerance} after {max_iterations} iterations: the constants are not those of the tasks,"
        " or alpha is above the bound"
    )
