"""Trial runs of a network on a user's rows, which find what the module or the loss cannot take."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.gradient.selection import Params
from metaleader.losses import Loss, takes_labels
from metaleader.tasks import Batch, Tree, num_rows, row_signature, rows

if TYPE_CHECKING:
    from metaleader.nets.functional import Network


def try_rows(network: Network, params: Params, batch: Batch, where: str) -> int:
    """Try rows of a new shape on a network that may change itself; returns the number of outputs.

    They are tried two at a time, since a single number would pass as a row; a single row is tried twice and alone, and
    two rows are tried as three too. The second derivative is tried too, which finds modules that cannot be made
    functional.
    """
    for leaf in tree_leaves(batch.x):
        dtype = next(iter(params.values())).dtype
        if leaf.is_floating_point() and leaf.dtype != dtype:
            raise ValueError(
                f"{where}: x is {leaf.dtype}, the model's parameters are {dtype}; convert with x.to({dtype})"
            )
    batch = Batch(batch.x, _safe_labels(batch.y, network.loss))
    two_rows, three_rows = (rows(batch, torch.arange(num, device=_device(batch)) % num_rows(batch)) for num in (2, 3))
    prediction = try_loss(network, params, two_rows, where)
    _try_functional(network, params, two_rows)
    if num_rows(batch) == 1:
        try_loss(network, params, batch, where)
    if num_rows(batch) == 2:  # two values of a loss may be those of two outputs
        try_loss(network, params, three_rows, where)
    return prediction.shape[-1] if prediction.ndim > 1 else 1


def try_loss(network: Network, params: Params, batch: Batch, where: str) -> Tensor:
    """The prediction for a batch whose loss can be computed."""
    try:
        prediction = network.predict(params, batch.x)
    except Exception as error:
        raise ValueError(
            f"{where}: the model fails on x with rows of {row_signature(batch.x)}: {_first_line(error)}; pass x of"
            " the shape and dtype that the model takes"
        ) from error
    if not isinstance(prediction, Tensor) or prediction.shape[:1] != (num_rows(batch.y),):
        got = tuple(prediction.shape) if isinstance(prediction, Tensor) else type(prediction).__name__
        raise ValueError(f"{where}: the model must return a tensor with one row per datapoint, got {got}")
    _check_broadcast(network.loss, prediction, batch.y, where)
    try:
        _check_values(network.loss(prediction, batch.y), len(prediction))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{where}: the loss fails on prediction {tuple(prediction.shape)} {prediction.dtype} and target"
            f" {row_signature(batch.y)}: {_first_line(error)}; pass y as the loss takes it"
        ) from error
    return prediction


def _check_broadcast(loss: Loss, prediction: Tensor, y: Tree, where: str) -> None:
    """Reject targets (N,) for predictions (N, 1) if the loss compares every prediction with every target."""
    if not isinstance(y, Tensor) or y.ndim != 1 or not y.is_floating_point() or prediction.shape[1:] != (1,):
        return
    column, row = prediction.new_tensor([[0.2], [0.6]]), y.new_tensor([0.3, 0.9])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            short, full = loss(column, row).mean(), loss(column.expand(2, 2), row.expand(2, 2)).mean()
    except Exception:  # the loss does not take any two matrices: it reshapes its arguments itself
        return
    if torch.allclose(short, full):
        raise ValueError(
            f"{where}: the model returns (N, 1) and y has the shape (N,), which the loss broadcasts to (N, N): it would"
            " compare every prediction with every target; pass y of shape (N, 1)"
        )


def _check_values(loss: object, num: int) -> None:
    """Reject the result of a loss that is neither one value per datapoint nor a scalar."""
    if not isinstance(loss, Tensor) or loss.shape not in ((), (num,)):
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must return one value per datapoint, ({num},), or a scalar; got {got}")


def _try_functional(network: Network, params: Params, batch: Batch) -> None:
    """Differentiate the loss of two tasks twice."""
    noise = (torch.zeros(2, dtype=torch.int64, device=_device(batch)),) if network.has_dropout else ()
    buffers = {name: (buffer, buffer._version) for name, buffer in network.module.named_buffers()}

    def curvature(params: Params, batch: Batch, *noise: Tensor) -> Params:
        def squared(params: Params) -> Tensor:
            gradient = grad(lambda p: network.loss_fn(p, batch, *noise))(params)
            return torch.stack([value.square().sum() for value in gradient.values()]).sum()

        return grad(squared)(params)

    two_params, two_batches = (tree_map(lambda leaf: torch.stack([leaf, leaf]), tree) for tree in (params, batch))
    try:
        # The first inner step starts from parameters that all tasks share.
        for own_params, in_dim in ((two_params, 0), (params, None)):
            vmap(curvature, in_dims=(in_dim, 0) + (0,) * len(noise))(own_params, two_batches, *noise)
            for name, buffer in network.module.named_buffers():
                if buffer is not buffers[name][0] or buffer._version != buffers[name][1]:
                    raise ValueError(f"its forward changes the buffer {name!r}")
    except Exception as error:
        raise ValueError(
            f"{type(network.module).__name__} cannot be run as a pure function of its parameters, batched over tasks"
            f" and differentiated twice: {_first_line(error)}. Layers must not draw random numbers of their"
            " own (nn.Dropout is handled), change buffers, or branch on values"
        ) from error


def _safe_labels(y: Tree, loss: Loss) -> Tree:
    """Valid labels for a trial run, before their range is checked."""
    return torch.zeros_like(y) if takes_labels(loss) and isinstance(y, Tensor) and not y.is_floating_point() else y


def _device(tree: Tree) -> torch.device:
    """The device of a tree of tensors."""
    return tree_leaves(tree)[0].device


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
