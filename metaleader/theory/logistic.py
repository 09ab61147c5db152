"""Logistic regression with an L2 penalty: a strongly convex task whose Hessian is not constant (rho > 0).

f(w) = mean over datapoints of log(1 + exp(-y x'w)) + l2/2 |w|^2        y = -1 or 1
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from metaleader.gradient.selection import Params
from metaleader.theory.convexity import Constants

# The largest |s''| of the sigmoid s.
_LARGEST_SECOND_DERIVATIVE = 1 / (6 * math.sqrt(3))


class Logistic(NamedTuple):
    """Logistic-regression tasks; `logistic` makes them from arrays and checks them.

    Attributes:
        x: features, (..., n, d).
        y: labels, -1 or 1, (..., n).
        l2: the weight of the penalty, (...).
    """

    x: Tensor
    y: Tensor
    l2: Tensor


def logistic(x: Tensor, y: Tensor, l2: float) -> Logistic:
    """Return logistic-regression tasks in float64.

    Raises:
        ValueError: if shapes do not match, labels are not -1 or 1, or the penalty is not positive.
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
    """Return the loss of one task, a `loss_fn` for `meta_gradient` with `params` = {"w": (d,)}."""
    w = params["w"]
    return F.softplus(-task.y * (task.x @ w)).mean() + task.l2 / 2 * (w * w).sum()


def logistic_constants(tasks: Logistic, radius: float) -> Constants:
    """Return the constants of assumptions 1 and 2 that hold for all tasks over W, |w| <= radius, and U(W).

    U(W) lies within radius + |gradient at 0| / (2 beta), since a step of at most 1/(2 beta) is a contraction. For w in
    this ball:

        G = E|x| + l2 |w|                            beta = l2 + 1/4 largest eigenvalue of E[x x']
        rho = largest eigenvalue of E[|x| x x'] / (6 sqrt 3)
        mu = l2 + smallest eigenvalue of E[s'(|x| |w|) x x'], s the sigmoid

    Args:
        tasks: one or more tasks; f and f^ together if they differ.
        radius: the radius of W.
    """
    if not radius > 0:
        raise ValueError(f"the radius of the domain must be positive, got {radius}")
    x, y, l2 = (
        values.flatten(0, values.ndim - core - 1) if values.ndim > core else values[None]
        for values, core in zip(tasks, (2, 1, 0), strict=True)
    )
    norm = torch.linalg.vector_norm(x, dim=-1)
    beta = float((l2 + _eigenvalues(x, torch.full_like(norm, 0.25))[:, -1]).max())
    slope_at_zero = torch.linalg.vector_norm((y[..., None] * x).mean(-2) / 2, dim=-1)
    reach = radius + float(slope_at_zero.max()) / (2 * beta)
    slope = torch.sigmoid(norm * reach) * torch.sigmoid(-norm * reach)
    return Constants(
        G=float((norm.mean(-1) + l2 * reach).max()),
        beta=beta,
        rho=float(_eigenvalues(x, norm)[:, -1].max()) * _LARGEST_SECOND_DERIVATIVE,
        mu=float((l2 + _eigenvalues(x, slope)[:, 0]).min()),
        radius=radius,
    )


def _eigenvalues(x: Tensor, weight: Tensor) -> Tensor:
    """Return the eigenvalues of E[weight x x'], ascending; negative ones, due to rounding, become 0."""
    return torch.linalg.eigvalsh(x.mT @ (weight[..., None] * x) / x.shape[-2]).clamp(min=0)
