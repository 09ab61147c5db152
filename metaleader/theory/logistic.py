"""Logistic regression with an L2 penalty: the strongly convex task whose Hessian is not constant (rho > 0).

f(w) = mean over datapoints of log(1 + exp(-y x'w)) + l2/2 |w|^2        y = -1 or 1
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from metaleader.gradient.inner import Params
from metaleader.theory.convexity import Constants

# The largest |s''| of the sigmoid s: its third-order bound, 1 / (6 sqrt 3).
_LARGEST_SECOND_DERIVATIVE = 1 / (6 * math.sqrt(3))


class Logistic(NamedTuple):
    """Logistic-regression tasks; `logistic` makes them from arrays, and checks.

    Attributes:
        x: features, (..., n, d).
        y: labels, -1 or 1, (..., n).
        l2: the weight of the penalty, (...).
    """

    x: Tensor
    y: Tensor
    l2: Tensor


def logistic(x: Tensor, y: Tensor, l2: float) -> Logistic:
    """Logistic-regression tasks in float64.

    Raises:
        ValueError: for shapes that do not fit, labels other than -1 and 1, or a penalty that is not positive.
    """
    x, y = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)
    if x.ndim < 2 or y.shape != x.shape[:-1]:
        raise ValueError(
            f"logistic regression takes x (..., n, d) and y (..., n), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if not bool((y.abs() == 1).all()):
        raise ValueError(f"labels must be -1 or 1, got {sorted(set(y.flatten().tolist()))[:5]}")
    if not (math.isfinite(l2) and l2 > 0):
        raise ValueError(f"l2 must be positive, got {l2}: without a penalty the loss is not strongly convex")
    return Logistic(x, y, torch.full(y.shape[:-1], l2, dtype=torch.float64))


def logistic_loss(params: Params, task: Logistic) -> Tensor:
    """The kernel's `loss_fn` for one logistic-regression task, `params` being {"w": (d,)}."""
    w = params["w"]
    return F.softplus(-task.y * (task.x @ w)).mean() + task.l2 / 2 * (w * w).sum()


def logistic_constants(tasks: Logistic, radius: float) -> Constants:
    """The constants of assumptions 1 and 2 that hold for every one of the tasks over W, |w| <= radius, and U(W).

    U(W) lies within radius + |gradient at 0| / (2 beta), since a step of at most 1/(2 beta) is a contraction. There

        G = E|x| + l2 |w|                            beta = l2 + 1/4 largest eigenvalue of E[x x']
        rho = largest eigenvalue of E[|x| x x'] / (6 sqrt 3)
        mu = l2 + smallest eigenvalue of E[s'(|x| |w|) x x'], s the sigmoid

    Args:
        tasks: one or many; f and f^ together where they differ.
        radius: of W.
    """
    if not radius > 0:
        raise ValueError(f"the radius of the domain must be positive, got {radius}")
    x, y, l2 = (
        part.flatten(0, part.ndim - core - 1) if part.ndim > core else part[None]
        for part, core in zip(tasks, (2, 1, 0), strict=True)
    )
    size = torch.linalg.vector_norm(x, dim=-1)
    beta = float((l2 + _moment(x, torch.full_like(size, 0.25))[:, -1]).max())
    slope_at_zero = torch.linalg.vector_norm((y[..., None] * x).mean(-2) / 2, dim=-1)
    reach = radius + float(slope_at_zero.max()) / (2 * beta)
    steepness = torch.sigmoid(size * reach) * torch.sigmoid(-size * reach)
    return Constants(
        G=float((size.mean(-1) + l2 * reach).max()),
        beta=beta,
        rho=float(_moment(x, size)[:, -1].max()) * _LARGEST_SECOND_DERIVATIVE,
        mu=float((l2 + _moment(x, steepness)[:, 0]).min()),
        radius=radius,
    )


def _moment(x: Tensor, weight: Tensor) -> Tensor:
    """The eigenvalues of E[weight x x'], in ascending order; rounding must not make them negative."""
    return torch.linalg.eigvalsh(x.mT @ (weight[..., None] * x) / x.shape[-2]).clamp(min=0)
