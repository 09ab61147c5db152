"""Theorem 1: after one small enough gradient step, the loss is mu/8-strongly convex and 9 beta/8-smooth.

For f~(w) = f(U(w)), U(w) = w - alpha grad f^(w), the Hessian is

    (I - alpha H^(w)) H(U(w)) (I - alpha H^(w)) - alpha D3f^(w)[grad f(U(w))]

With alpha <= 1/(2 beta) the eigenvalues of the first term lie in [mu/4, beta]; with alpha <= mu/(8 rho G) the norm of
the second is at most alpha rho G <= mu/8. The paper's proof uses lower bounds on differences of gradients, which do not
imply convexity; the bounds on the Hessian do.

With several steps, w_0 = w and w_j+1 = U(w_j), let J_j be the product of the first j factors I - alpha H^(w_i). Then

    Hessian = J_k' H(w_k) J_k - alpha sum over j < k of J_j' D3f^(w_j)[P_j grad f(w_k)] J_j

where P_j is the product of the factors after the j-th. A factor lies between 1 - alpha beta and 1 - alpha mu, which
bounds both terms. The paper has one step only; this extension is ours.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from metaleader.gradient.meta import adapt, meta_gradient
from metaleader.gradient.selection import LossFn
from metaleader.theory.quadratics import Quadratics, check_positive_definite


class StepSizeWarning(UserWarning):
    """The inner step size exceeds Theorem 1's bound: the meta-objective may not be strongly convex."""


@dataclass(frozen=True)
class Constants:
    """The constants of assumptions 1 and 2 on a bounded domain W, and the constants that Theorem 1 derives from them.

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
        """Return constants that hold for the functions of `self` and `other` over the same W."""
        if self.radius != other.radius:
            raise ValueError(f"the constants are of different domains, radius {self.radius} and {other.radius}")
        worst = (max(getattr(self, name), getattr(other, name)) for name in ("G", "beta", "rho"))
        return Constants(*worst, mu=min(self.mu, other.mu), radius=self.radius)

    def allows(self, alpha: float, steps: int) -> bool:
        """Whether `curvature` applies: alpha <= 1/beta, and the constants hold for all iterates.

        k steps move w by at most k alpha |gradient at 0| away from the origin, and the constants hold up to a distance
        of |gradient at 0| / (2 beta) from W. With rho = 0 they hold everywhere.
        """
        return alpha * self.beta <= 1 and (self.rho == 0 or steps * alpha <= 1 / (2 * self.beta))

    def curvature(self, alpha: float, steps: int) -> tuple[float, float]:
        """Bounds on the eigenvalues of the Hessian of f after several steps of f^; see `allows`.

        With one step and Theorem 1's alpha, they lie within its mu/8 and 9 beta/8.
        """
        slow, fast = 1 - alpha * self.beta, 1 - alpha * self.mu
        curved = alpha * self.rho * self.G * sum(fast ** (steps - 1 + j) for j in range(steps))
        return self.mu * slow ** (2 * steps) - curved, self.beta * fast ** (2 * steps) + curved

    def regret_bound(self, T: Tensor) -> Tensor:
        """Return corollary 2's bound as 32 G^2/mu (1 + log T): log T is 0 at T = 1, where the regret is positive."""
        return 32 * self.G**2 / self.mu * (1 + torch.log(T))

    def check_alpha(self, alpha: float) -> None:
        """Raise a ValueError if a step size is not a positive number, and warn if it is above the bound."""
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha must be a positive number, got {alpha}")
        if alpha > self.alpha * (1 + 1e-12):
            warnings.warn(
                f"alpha = {alpha:.4g} is above Theorem 1's bound min(1/(2 beta), mu/(8 rho G)) = {self.alpha:.4g};"
                " the meta-objective may not be strongly convex, and corollary 2 does not apply",
                StepSizeWarning,
                stacklevel=2,
            )


def quadratic_constants(tasks: Quadratics, radius: float) -> Constants:
    """Return the constants that hold for all tasks over W, |w| <= radius, and U(W); rho is 0.

    U(W) lies within radius + |b| / (2 beta), since a step of at most 1/(2 beta) is a contraction.

    Args:
        tasks: one or more tasks; f and f^ together if they differ.
        radius: the radius of W.

    Raises:
        ValueError: if a matrix is not positive definite.
    """
    if not radius > 0:
        raise ValueError(f"the radius of the domain must be positive, got {radius}")
    check_positive_definite(tasks.A)
    eigenvalues = torch.linalg.eigvalsh(tasks.A)
    beta, slope_at_zero = float(eigenvalues.max()), torch.linalg.vector_norm(tasks.b, dim=-1)
    reach = radius + float(slope_at_zero.max()) / (2 * beta)
    largest = float((eigenvalues[..., -1] * reach + slope_at_zero).max())
    return Constants(G=largest, beta=beta, rho=0.0, mu=float(eigenvalues.min()), radius=radius)


def meta_hessian(loss_fn: LossFn, w: Tensor, support: Any, query: Any, alpha: float | Tensor, steps: int = 1) -> Tensor:
    """Return the Hessian of w -> f(w - alpha grad f^(w)) at w, (d, d), by automatic differentiation of `adapt`.

    Args:
        loss_fn: a function of ({"w": w}, task).
        w: (d,).
        support: the task of f^.
        query: the task of f.
        alpha: the step size.
        steps: the number of steps.
    """

    def meta_loss(w: Tensor) -> Tensor:
        return loss_fn(adapt(loss_fn, {"w": w}, support, lr=alpha, steps=steps), query)

    return jacrev(grad(meta_loss))(w)


def meta_eigenvalues(
    loss_fn: LossFn,
    points: Tensor,
    support: Any,
    query: Any,
    alpha: float | Tensor,
    steps: int = 1,
    mean: bool = False,
) -> Tensor:
    """Return the eigenvalues of `meta_hessian` at every point, for every task: (tasks, points, d), ascending.

    Args:
        loss_fn: a function of ({"w": w}, task).
        points: (points, d).
        support: the tasks of f^, with a leading task dimension.
        query: the tasks of f, with a leading task dimension.
        alpha: the step size.
        steps: the number of steps.
        mean: whether to return the eigenvalues of the mean over tasks, the objective of MAML, (points, d).
    """

    def hessian(w: Tensor, support: Any, query: Any) -> Tensor:
        return meta_hessian(loss_fn, w, support, query, alpha, steps)

    hessians = vmap(vmap(hessian, (0, None, None)), (None, 0, 0))(points, support, query)
    return torch.linalg.eigvalsh(hessians.mean(0) if mean else hessians)


def contraction(loss_fn: LossFn, first: Tensor, second: Tensor, tasks: Any, alpha: float) -> Tensor:
    """Return |U(v) - U(w)| / |v - w| for pairs of points, (tasks, pairs); lemma 4 bounds it by 1 - alpha mu."""

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
    """Minimise the meta-objective by accelerated gradient descent on `meta_gradient`, to a certified distance.

    Theorem 1's strong convexity and smoothness determine the step size and the momentum. Strong convexity also gives
    the certificate |w - minimiser| <= |gradient| / (mu/8).

    Args:
        loss_fn: a function of ({"w": w}, task).
        start: the initial w, (d,).
        support: the tasks of f^, with a leading task dimension.
        query: the tasks of f, with a leading task dimension.
        constants: the constants of these tasks.
        alpha: the inner step size.
        inner_steps: 1, or 0 for joint training.
        tolerance: the distance to the minimiser at which to stop.
        max_iterations: the largest number of iterations.

    Raises:
        ValueError: if it does not converge, because the constants are not those of the tasks or alpha is too large.
    """
    root = math.sqrt(constants.meta_beta / constants.meta_mu)
    momentum = (root - 1) / (root + 1)
    w, extrapolated = start, start
    for _ in range(max_iterations):
        gradient = meta_gradient(loss_fn, {"w": extrapolated}, support, query, alpha, inner_steps)[1]["w"]
        if float(torch.linalg.vector_norm(gradient)) <= constants.meta_mu * tolerance:
            return extrapolated
        previous, w = w, extrapolated - gradient / constants.meta_beta
        extrapolated = w + momentum * (w - previous)
    raise ValueError(
        f"no minimiser within {tolerance} after {max_iterations} iterations: the constants are not those of the tasks,"
        " or alpha is above the bound"
    )
