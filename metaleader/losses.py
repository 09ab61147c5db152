"""Losses: functions of (prediction, target) that return one value per datapoint, which a learner averages."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from metaleader.system.tracing import is_traced

# (prediction, target) -> one value per datapoint, or a scalar
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(prediction: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of integer labels, in nats, with label smoothing.

    Args:
        prediction: logits, (N, classes).
        target: labels, (N,), of any integer dtype.
        smoothing: the probability that is spread evenly over all classes; the paper trains with 0.1.

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
    log_probabilities = torch.log_softmax(prediction, -1)
    if is_traced():
        # The derivative of a gather is a scatter, which the compiler does not fuse with other operations. A gather
        # raises an error for a label out of range; here the loss is NaN.
        labels, classes = target.long(), log_probabilities.shape[1]
        is_label = labels[:, None] == torch.arange(classes, device=prediction.device)
        in_range = (labels >= 0) & (labels < classes)
        selected = torch.where(in_range, torch.where(is_label, log_probabilities, 0.0).sum(1), torch.nan)
    else:
        selected = log_probabilities.gather(1, target.long()[:, None]).squeeze(1)
    return -(1 - smoothing) * selected - smoothing * log_probabilities.mean(-1) if smoothing else -selected


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the squared error, averaged over the outputs of each datapoint.

    With one output, (N, 1), targets may be (N,).

    >>> squared_error(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]))
    tensor([5.])
    """
    if prediction.shape == (*target.shape, 1) and target.ndim == 1:
        target = target[:, None]
    if prediction.shape != target.shape:
        raise ValueError(
            f"squared_error takes equal shapes, got prediction {tuple(prediction.shape)} and target"
            f" {tuple(target.shape)}; reshape the target, or the last layer"
        )
    return (prediction - target).square().flatten(1).mean(1) if prediction.ndim > 1 else (prediction - target).square()


def unsmoothed(loss: Loss) -> Loss:
    """Return the loss to report: cross-entropy without label smoothing, or any other loss unchanged."""
    return cross_entropy if takes_labels(loss) else loss


def takes_labels(loss: Loss) -> bool:
    """Return whether a loss is `cross_entropy`, possibly in a `functools.partial`."""
    return (loss.func if isinstance(loss, functools.partial) else loss) is cross_entropy


def check_loss(loss: Loss) -> None:
    """Reject a loss that cannot be called."""
    if not callable(loss):
        raise ValueError(
            f"loss must be a function of (prediction, target), as metaleader.losses.squared_error; got {loss!r}"
        )
