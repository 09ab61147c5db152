"""The adjoint recursion for the meta-gradient after inner steps theta_{s+1} = theta_s - D g(theta_s).

    lambda_K = gradient of the query loss at theta_K
    lambda_s = lambda_{s+1} - H(theta_s) (D lambda_{s+1})        H: Hessian of the support loss
    meta-gradient = mean over tasks of lambda_0
    gradient of a step size = - sum over s of <g(theta_s), lambda_{s+1}> over the tensors that it moves

With a loss after every inner step, the query gradient at theta_s is added to each lambda_s, s > 0. The activations of
one inner step are alive at a time. The eager, compiled and convolutional gradients differ only in the functions that
they pass to `adjoint`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def adjoint(
    theta: Any,
    steps: int,
    step: Callable[[int, Any], tuple[Any, Any]],
    query: Callable[[Any], tuple[Tensor, Any]],
    pullback: Callable[[int, Any, Any, Any, Any], Any] | None,
    every_step: bool = False,
) -> tuple[Tensor, Any]:
    """The adjoint recursion: the loss after the inner steps, and lambda_0.

    Parameters are kept at every stride-th step and recomputed in between, so memory grows with the square root of the
    number of steps. Up to 15 steps the stride is 1, and nothing is computed twice.

    Args:
        theta: the initialisation, any tree.
        steps: the number of inner steps.
        step: of (s, theta_s), returns theta_{s+1} and the intermediate results that `pullback` can use, or None.
        query: of theta, returns the query loss and lambda, any tree; leaves that only `pullback` adds to are None.
        pullback: of (s, theta_s, intermediate results or None, theta_{s+1}, lambda_{s+1}), returns lambda_s. None
            leaves lambda as it is (first order).
        every_step: return the mean of the losses after each inner step, and its lambda_0.
    """
    stride = max(1, math.isqrt(steps) // 2)
    kept: list[tuple[Any, Any]] = []
    for s in range(steps):
        after, saved = step(s, theta)
        if s % stride == 0:
            kept.append((theta, saved))
        theta = after
    loss, lam = query(theta)
    segment: list[tuple[Any, Any]] = []
    for s in reversed(range(steps if pullback or every_step else 0)):
        if not segment:
            segment = [kept.pop()]
            for i in range(s - s % stride, s):
                segment.append((step(i, segment[-1][0])[0], None))
        after, (theta, saved) = theta, segment.pop()
        lam = lam if pullback is None else pullback(s, theta, saved, after, lam)
        if every_step and s > 0:
            step_loss, step_lam = query(theta)
            loss, lam = loss + step_loss, tree_map(add, lam, step_lam)
    share = 1 / steps if every_step and steps else 1.0
    return (loss, lam) if share == 1.0 else tree_map(lambda v: v if v is None else v * share, (loss, lam))


def add(total: Tensor | None, value: Tensor | None) -> Tensor | None:
    """The sum; None is zero."""
    return total if value is None else value if total is None else total + value
