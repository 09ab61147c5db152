"""Quadratic tasks and their closed forms (appendix A of the paper).

    f(w) = 1/2 w'A w + w'b + c

A gradient step on a quadratic is an affine map, so the loss after adaptation is again a quadratic. The meta-objective,
with the paper's A-dagger and b-dagger, is `tasks.adapted(alpha).mean()`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metaleader.gradient.selection import Params


class Quadratics(NamedTuple):
    """Quadratic functions; `quadratics` makes them from arrays and checks them.

    As a tuple of tensors, they are a batch of tasks for `meta_gradient(quadratic_loss, {"w": w}, tasks, tasks,
    inner_lr=alpha, inner_steps=1)`.

    Attributes:
        A: symmetric, (..., d, d).
        b: (..., d).
        c: (...).
    """

    A: Tensor
    b: Tensor
    c: Tensor

    def value(self, w: Tensor) -> Tensor:
        """Return the value of every function at w, (..., d), which broadcasts."""
        return 0.5 * (w * _apply(self.A, w)).sum(-1) + (w * self.b).sum(-1) + self.c

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradient of every function at w, (..., d), which broadcasts."""
        return _apply(self.A, w) + self.b

    def minimiser(self) -> Tensor:
        """Return the minimiser -A^-1 b of every function.

        Raises:
            ValueError: if a matrix is not positive definite.
        """
        check_positive_definite(self.A)
        return -torch.linalg.solve(self.A, self.b)

    def adapted(self, alpha: float, steps: int = 1, support: Quadratics | None = None) -> Quadratics:
        """Return the losses after gradient steps, w -> f(U(w)), which are quadratics too.

        For one step on f^, U(w) = w - alpha (A^ w + b^) and

            A~ = (I - alpha A^) A (I - alpha A^)        b~ = (I - alpha A^) (b - alpha A b^)

        Their means over tasks are A-dagger and b-dagger. For f^ = f, b~ = (I - alpha A)^2 b as in the paper.

        Args:
            alpha: the step size.
            steps: the number of steps.
            support: f^; f if None.
        """
        support = self if support is None else support
        step = torch.eye(self.b.shape[-1], dtype=self.A.dtype) - alpha * support.A
        power, shift = torch.eye(self.b.shape[-1], dtype=self.A.dtype).expand_as(step), torch.zeros_like(support.b)
        for _ in range(steps):
            power, shift = step @ power, _apply(step, shift) - alpha * support.b
        A = power @ self.A @ power
        return Quadratics((A + A.mT) / 2, _apply(power, self.gradient(shift)), self.value(shift))

    def mean(self, dim: int = 0) -> Quadratics:
        """Return the mean of the functions along a leading dimension."""
        return Quadratics(*(values.mean(dim) for values in self))

    def cumsum(self, dim: int = 0) -> Quadratics:
        """Return the cumulative sums of the functions along a leading dimension."""
        return Quadratics(*(values.cumsum(dim) for values in self))

    @staticmethod
    def stack(functions: list[Quadratics]) -> Quadratics:
        """Stack functions of the same shape along a new leading dimension."""
        return Quadratics(*(torch.stack(values) for values in zip(*functions, strict=True)))


def quadratics(A: Tensor, b: Tensor, c: Tensor | None = None) -> Quadratics:
    """Return quadratic functions in float64 from their coefficients.

    Args:
        A: (..., d, d).
        b: (..., d).
        c: (...), zeros if None.

    Raises:
        ValueError: if shapes do not match, values are NaN or infinite, or a matrix is not symmetric and positive
            definite.

    >>> quadratics([[2.0, 0.0], [0.0, 1.0]], [-2.0, -3.0]).minimiser()
    tensor([1., 3.], dtype=torch.float64)
    """
    A, b = torch.as_tensor(A, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    c = torch.zeros(b.shape[:-1], dtype=torch.float64) if c is None else torch.as_tensor(c, dtype=torch.float64)
    if b.ndim == 0 or A.shape != (*b.shape, *b.shape[-1:]) or c.shape != b.shape[:-1]:
        raise ValueError(
            "a quadratic takes A (..., d, d), b (..., d) and c (...), got"
            f" {tuple(A.shape)}, {tuple(b.shape)} and {tuple(c.shape)}"
        )
    if not all(bool(torch.isfinite(values).all()) for values in (A, b, c)):
        raise ValueError("A, b and c must be finite; clean or drop these tasks")
    asymmetry = float((A - A.mT).abs().max())
    if asymmetry > 1e-9 * float(A.abs().max()):
        raise ValueError(f"A must be symmetric, it differs from its transpose by {asymmetry:.3g}; pass (A + A') / 2")
    check_positive_definite(A)
    return Quadratics(A, b, c)


def linear_regression(x: Tensor, y: Tensor) -> Quadratics:
    """Return least squares f(w) = 1/2 E[(w'x - y)^2] as a quadratic: A = E[x x'], b = -E[x y], c = 1/2 E[y^2].

    The paper gives b with the opposite sign, for which the minimiser would be minus the least-squares solution.

    Args:
        x: features, (..., n, d); a constant feature 1 models an offset.
        y: targets, (..., n).

    Raises:
        ValueError: if the features of a task do not span all d dimensions, so that A is not positive definite.

    >>> x, y = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]), torch.tensor([3.0, 5.0, 7.0])
    >>> linear_regression(x, y).minimiser().round(decimals=6)
    tensor([2., 1.], dtype=torch.float64)
    """
    x, y = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)
    if x.ndim < 2 or y.shape != x.shape[:-1]:
        raise ValueError(
            f"linear regression takes x (..., n, d) and y (..., n), got {tuple(x.shape)}, {tuple(y.shape)}"
        )
    num = x.shape[-2]
    return quadratics(x.mT @ x / num, -_apply(x.mT, y) / num, y.square().mean(-1) / 2)


def quadratic_loss(params: Params, task: Quadratics) -> Tensor:
    """Return the loss of one task, a `loss_fn` for `meta_gradient` with `params` = {"w": (d,)}."""
    return task.value(params["w"])


def check_positive_definite(A: Tensor) -> None:
    """Check that matrices are positive definite; assumption 2 requires mu > 0.

    Raises:
        ValueError: if one is not; the message gives the smallest eigenvalue.
    """
    eigenvalues = torch.linalg.eigvalsh(A)
    if not bool((eigenvalues[..., 0] > 1e-14 * eigenvalues[..., -1].abs()).all()):
        raise ValueError(
            f"A must be positive definite, its smallest eigenvalue is {float(eigenvalues.min()):.3g};"
            " add a multiple of the identity (ridge), or more datapoints"
        )


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
