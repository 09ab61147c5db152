"""Quadratic tasks and their closed forms (appendix A of the paper).

    f(w) = 1/2 w'A w + w'b + c

A gradient step on a quadratic is an affine map, so that the loss after adaptation is again a quadratic: everything that
is asked of the meta-objective (A-dagger, b-dagger, its minimiser, its value) is asked of `tasks.adapted(alpha)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from metaleader.gradient.inner import Params


class Quadratics(NamedTuple):
    """Quadratic functions; `quadratics` makes them from arrays, and checks.

    A tuple of tensors, so that the kernel takes it as a batch of tasks: `meta_gradient(quadratic_loss, {"w": w}, tasks,
    tasks, inner_lr=alpha, inner_steps=1)`.

    Attributes:
        A: symmetric, (..., d, d).
        b: (..., d).
        c: (...).
    """

    A: Tensor
    b: Tensor
    c: Tensor

    def value(self, w: Tensor) -> Tensor:
        """The value of every function at w, (..., d), which broadcasts."""
        return 0.5 * (w * self._times(w)).sum(-1) + (w * self.b).sum(-1) + self.c

    def gradient(self, w: Tensor) -> Tensor:
        """The gradient of every function at w, (..., d), which broadcasts."""
        return self._times(w) + self.b

    def minimiser(self) -> Tensor:
        """The minimiser -A^-1 b of every function.

        Raises:
            ValueError: when a matrix is not positive definite.
        """
        check_positive_definite(self.A)
        return -torch.linalg.solve(self.A, self.b)

    def adapted(self, alpha: float, steps: int = 1, support: Quadratics | None = None) -> Quadratics:
        """The losses after gradient steps, w -> f(U(w)), which are quadratics too.

        With one step U(w) = w - alpha (A^ w + b^), where f^ is the function that is stepped on:

            A~ = (I - alpha A^) A (I - alpha A^)        b~ = (I - alpha A^) (b - alpha A b^)

        Their means over tasks are A-dagger and b-dagger; for f^ = f, b~ = (I - alpha A)^2 b as in the paper.

        Args:
            alpha: the step size.
            steps: how many.
            support: f^, if it is not f itself.
        """
        support = self if support is None else support
        step = torch.eye(self.b.shape[-1], dtype=self.A.dtype) - alpha * support.A
        power, shift = torch.eye(self.b.shape[-1], dtype=self.A.dtype).expand_as(step), torch.zeros_like(support.b)
        for _ in range(steps):
            power, shift = step @ power, _apply(step, shift) - alpha * support.b
        A = power @ self.A @ power
        return Quadratics((A + A.mT) / 2, _apply(power, self.gradient(shift)), self.value(shift))

    def mean(self, dim: int = 0) -> Quadratics:
        """The mean of the functions along a leading dimension."""
        return Quadratics(*(part.mean(dim) for part in self))

    def cumsum(self, dim: int = 0) -> Quadratics:
        """The sums of the first, the first two, ... functions along a leading dimension."""
        return Quadratics(*(part.cumsum(dim) for part in self))

    def _times(self, w: Tensor) -> Tensor:
        return _apply(self.A, w)

    @staticmethod
    def stack(parts: list[Quadratics]) -> Quadratics:
        """Several of one shape, under a new leading dimension."""
        return Quadratics(*(torch.stack(part) for part in zip(*parts, strict=True)))


def quadratics(A: Tensor, b: Tensor, c: Tensor | None = None) -> Quadratics:
    """Quadratic functions in float64 from their parts.

    Args:
        A: (..., d, d).
        b: (..., d).
        c: (...), zeros if None.

    Raises:
        ValueError: for shapes that do not fit, NaN or infinite values, or a matrix that is not symmetric and positive
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
    if not all(bool(torch.isfinite(part).all()) for part in (A, b, c)):
        raise ValueError("A, b and c must be finite; clean or drop these tasks")
    asymmetry = float((A - A.mT).abs().max())
    if asymmetry > 1e-9 * float(A.abs().max()):
        raise ValueError(f"A must be symmetric, it differs from its transpose by {asymmetry:.3g}; pass (A + A') / 2")
    check_positive_definite(A)
    return Quadratics(A, b, c)


def linear_regression(x: Tensor, y: Tensor) -> Quadratics:
    """Least squares f(w) = 1/2 E[(w'x - y)^2] as a quadratic: A = E[x x'], b = -E[x y], c = 1/2 E[y^2].

    The paper prints b with the other sign, which would put the minimiser at minus the least-squares solution.

    Args:
        x: features, (..., n, d), a constant 1 among them for an offset.
        y: targets, (..., n).

    Raises:
        ValueError: when the features of a task do not span all d dimensions, so that A is not positive definite.

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
    """The kernel's `loss_fn` for one quadratic task, `params` being {"w": (d,)}."""
    return task.value(params["w"])


def check_positive_definite(A: Tensor) -> None:
    """Refuse matrices that are not positive definite: assumption 2 needs mu > 0.

    Raises:
        ValueError: which names the smallest eigenvalue.
    """
    eigenvalues = torch.linalg.eigvalsh(A)
    if not bool((eigenvalues[..., 0] > 1e-14 * eigenvalues[..., -1].abs()).all()):
        raise ValueError(
            f"A must be positive definite, its smallest eigenvalue is {float(eigenvalues.min()):.3g};"
            " add a multiple of the identity (ridge), or more datapoints"
        )


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]
