"""Losses: each takes (prediction, target) and returns one value a datapoint. A learner averages them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

# (prediction, target) -> one value a datapoint, or a scalar
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(prediction: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of integer labels, in nats, with label smoothing.

    Args:
        prediction: logits, (N, classes).
        target: labels, (N,), of any integer dtype.
        smoothing: the probability spread evenly over all classes; the paper uses 0.1 in training.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor([1.3863, 1.3863])
    """
    if prediction.ndim != 2 or target.shape != prediction.shape[:1]:
        raise ValueError(
            "cross_entropy takes logits (N, classes) and labels (N,), got"
            f" {tuple(prediction.shape)} and {tuple(target.shape)}"
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"cross_entropy takes integer labels, got {target.dtype}; convert with y.long()")
    logs = torch.log_softmax(prediction, -1)
    if torch.compiler.is_compiling():
        # The derivative of a gather is a scatter, which no compiler fuses with what is around it. A gather fails for a
        # label out of range; here its loss is not a number.
        labels = target.long()
        own = labels[:, None] == torch.arange(logs.shape[1], device=logs.device)
        known = (labels >= 0) & (labels < logs.shape[1])
        picked = torch.where(known, torch.where(own, logs, 0.0).sum(1), torch.nan)
    else:
        picked = logs.gather(1, target.long()[:, None]).squeeze(1)
    return -(1 - smoothing) * picked - smoothing * logs.mean(-1) if smoothing else -picked


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared error, averaged over the outputs of a datapoint.

    >>> squared_error(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]))
    tensor([5.])
    """
    if prediction.shape != target.shape:
        raise ValueError(
            f"squared_error takes equal shapes, got prediction {tuple(prediction.shape)} and target"
            f" {tuple(target.shape)}; reshape the target, or the last layer"
        )
    return (prediction - target).square().flatten(1).mean(1) if prediction.ndim > 1 else (prediction - target).square()


def unsmoothed(loss: Loss) -> Loss:
    """The loss to report: cross-entropy without its label smoothing, any other loss as it is."""
    return cross_entropy if takes_labels(loss) else loss


def takes_labels(loss: Loss) -> bool:
    """Whether a loss is `cross_entropy`, also through `functools.partial`."""
    return (loss.func if isinstance(loss, functools.partial) else loss) is cross_entropy
