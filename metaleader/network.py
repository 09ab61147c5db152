"""A module as a pure function of its parameters: what turns an `nn.Module` and a loss into the kernel's `loss_fn`.

Batch norm takes the statistics of the batch at hand, dropout masks come from integers that are passed in, and
everything else of the module stays as it is: same parameters, same names.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.inner import Params
from metaleader.losses import Loss, takes_labels
from metaleader.tasks import Batch, Tree, num_rows, row_signature, rows

# What batch norm divides by in an adapted net: D_t's statistics, or those of the rows it is called on.
Statistics = Literal["task", "batch"]


def scale_uint8(x: Tree) -> Tree:
    """Scale uint8 tensors to [0, 1] and leave all others as they are.

    >>> scale_uint8(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    return tree_map(lambda leaf: leaf.to(torch.get_default_dtype()) / 255 if leaf.dtype == torch.uint8 else leaf, x)


class Network:
    """A module with a loss, as pure functions of the parameters.

    Args:
        module: left as it is; the network works on a copy.
        loss: of (prediction, target), one value a datapoint or a scalar.
        preprocess: applied to x before the module, in training and in every adapted net.
    """

    def __init__(self, module: nn.Module, loss: Loss, preprocess: Callable[[Tree], Tree] | None = scale_uint8) -> None:
        self.loss = loss
        self.preprocess = preprocess or (lambda x: x)
        self.module = _functional_copy(module)
        self._dropouts = [name for name, part in self.module.named_modules() if isinstance(part, SeededDropout)]
        self.has_dropout = bool(self._dropouts)
        self._tied = _tied_names(self.module)
        self.has_batch_norm = any(isinstance(part, BatchNorm) for part in self.module.modules())
        self.outputs: int | None = None

    def params(self) -> Params:
        """A copy of the module's own parameters, by name."""
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def predict(self, params: Params, x: Tree, noise: Tensor | None = None) -> Tensor:
        """The prediction for a batch of inputs of one task; dropout is active when noise is given."""
        state = {name: params[first] for name, first in self._tied.items()}
        for i, name in enumerate(self._dropouts):
            layer = cast(SeededDropout, self.module.get_submodule(name))
            layer.train(noise is not None)
            layer.num_calls = 0
            if noise is not None:
                state[f"{name}.seed"] = noise + i
        # Not tie_weights: with a layer that is used twice, torch 2.13 leaves these tensors in the module.
        return functional_call(self.module, state, (self.preprocess(x),), tie_weights=False)

    def loss_fn(self, params: Params, batch: Batch, noise: Tensor | None = None) -> Tensor:
        """The kernel's loss: the mean over the datapoints of a batch."""
        return _mean(self.loss(self.predict(params, batch.x, noise), batch.y), num_rows(batch.y))

    @torch.no_grad()
    def adapted(self, params: Params, data: Batch | None, statistics: Statistics = "task") -> nn.Module:
        """A module with these parameters, ready for use: dropout off, inputs preprocessed, one row or many.

        Args:
            params: copied into the module; its `state_dict` loads into the module the network was made from.
            data: the task's datapoints, whose statistics batch norm takes with `statistics="task"`.
            statistics: "task", or "batch" for the statistics of the rows that the net is called on, as in the paper.
        """
        if statistics not in ("task", "batch"):
            raise ValueError(f"statistics must be 'task' or 'batch', got {statistics!r}")
        net = copy.deepcopy(self.module)
        for name, value in net.named_parameters():
            value.requires_grad_(True).copy_(params[name])
        net.eval()
        norms = [part for part in net.modules() if isinstance(part, BatchNorm)]
        if norms and statistics == "task" and data is not None:
            for norm in norms:
                norm.keep_next = True
            net(self.preprocess(data.x))
        if data is not None:
            door = _Door(self.preprocess, [leaf.ndim - 1 for leaf in tree_leaves(data.x)])
            net.register_forward_pre_hook(door.enter)
            net.register_forward_hook(door.leave)
        return net

    @torch.no_grad()
    def check(self, params: Params, batch: Batch, where: str) -> None:
        """Refuse datapoints that the module or the loss cannot take, before anything is kept.

        The first call also tries the second-order computation on two rows, which finds modules that cannot be made
        functional.
        """
        for leaf in tree_leaves(batch.x):
            dtype = next(iter(params.values())).dtype
            if leaf.is_floating_point() and leaf.dtype != dtype:
                raise ValueError(
                    f"{where}: x is {leaf.dtype}, the model's parameters are {dtype}; convert with x.to({dtype})"
                )
        if self.outputs is None:
            # On a copy: a module that changes itself must not leave a trace.
            module, self.module = self.module, copy.deepcopy(self.module)
            try:
                self._try(params, rows(batch, slice(0, 2)), where)
            finally:
                self.module = module
        if takes_labels(self.loss):
            low, high = int(batch.y.min()), int(batch.y.max())
            assert self.outputs is not None
            if low < 0 or high >= self.outputs:
                raise ValueError(
                    f"{where}: labels must lie in 0..{self.outputs - 1}, the model has {self.outputs} outputs; got"
                    f" {low}..{high}"
                )

    def _try(self, params: Params, batch: Batch, where: str) -> None:
        try:
            prediction = self.predict(params, batch.x)
        except Exception as error:
            raise ValueError(f"{where}: the model fails on x with rows of {row_signature(batch.x)}: {error}") from error
        if not isinstance(prediction, Tensor) or prediction.shape[:1] != (num_rows(batch.y),):
            got = tuple(prediction.shape) if isinstance(prediction, Tensor) else type(prediction).__name__
            raise ValueError(f"{where}: the model must return a tensor with one row a datapoint, got {got}")
        try:
            _mean(self.loss(prediction, _safe_labels(batch.y, self.loss)), num_rows(batch.y))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        except Exception as error:
            raise ValueError(
                f"{where}: the loss fails on prediction {tuple(prediction.shape)} {prediction.dtype} and target"
                f" {row_signature(batch.y)}: {error}"
            ) from error
        self._try_functional(params, Batch(batch.x, _safe_labels(batch.y, self.loss)))
        self.outputs = prediction.shape[-1] if prediction.ndim > 1 else 1

    def _try_functional(self, params: Params, batch: Batch) -> None:
        noise = (torch.zeros(2, dtype=torch.int64, device=num_device(batch)),) if self._dropouts else ()
        buffers = {name: (buffer, buffer._version) for name, buffer in self.module.named_buffers()}

        def curvature(params: Params, batch: Batch, *noise: Tensor) -> Params:
            def squared(params: Params) -> Tensor:
                gradient = grad(lambda p: self.loss_fn(p, batch, *noise))(params)
                return torch.stack([value.square().sum() for value in gradient.values()]).sum()

            return grad(squared)(params)

        two_tasks = tree_map(lambda leaf: torch.stack([leaf, leaf]), (params, batch))
        try:
            with sdpa_kernel(SDPBackend.MATH):
                vmap(curvature)(*two_tasks, *noise)
            for name, buffer in self.module.named_buffers():
                if buffer is not buffers[name][0] or buffer._version != buffers[name][1]:
                    raise ValueError(f"its forward changes the buffer {name!r}")
        except Exception as error:
            raise ValueError(
                f"{type(self.module).__name__} cannot be run as a pure function of its parameters, for several tasks"
                f" at once and twice differentiated: {_first_line(error)}. Layers must not draw random numbers of their"
                " own (nn.Dropout is handled), change buffers, or branch on values; recurrent layers work as cells"
            ) from error


class BatchNorm(nn.Module):
    """Batch norm by the statistics of the batch at hand, with the parameters and buffers of the layer it replaces.

    After one call with `keep_next`, it uses the statistics of that call, for good. Statistics are biased, as in
    `torch.nn.BatchNorm2d` in training; a batch of one value a channel gives the shift.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name), persistent=getattr(layer, name) is not None)
        self.kept = False
        self.keep_next = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel (dimension 1)."""
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        if self.kept:
            assert self.running_mean is not None
            assert self.running_var is not None
            centred, variance = x - self.running_mean.view(shape), self.running_var.view(shape)
        else:
            mean = x.mean(dims, keepdim=True)
            centred = x - mean
            variance = (centred * centred).mean(dims, keepdim=True)
            if self.keep_next:
                self.running_mean, self.running_var = mean.flatten(), variance.flatten()
                self.kept, self.keep_next = True, False
        scaled = centred * torch.rsqrt(variance + self.eps)
        if self.weight is None or self.bias is None:
            return scaled
        return scaled * self.weight.view(shape) + self.bias.view(shape)


class SeededDropout(nn.Module):
    """Dropout whose mask is a function of a seed and the position alone: the same on every device, replayed at will.

    A layer that a module calls several times gives a mask of its own to each call (counted in `num_calls`).

    Args:
        p: the probability of a zero.
        channels: whether whole channels are zeroed (`nn.Dropout2d` and its kin).
    """

    seed: Tensor

    def __init__(self, p: float, channels: bool) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.num_calls = 0
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements, or channels, and scale the rest."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return torch.zeros_like(x)
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.channels else x.shape
        position = torch.arange(shape.numel(), device=x.device).view(shape)
        # The position is mixed before the seed is added, or the masks of two seeds would be shifted copies.
        bits = _hash(_hash(position) + _hash(self.seed + 0x9E3779B9 * self.num_calls))
        self.num_calls += 1
        return x * (bits >= int(self.p * 2**32)) / (1 - self.p)


def _hash(x: Tensor) -> Tensor:
    """Mix integers into 32 uniform bits (an xor-multiply finaliser); products stay inside int64."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


class _Door:
    """Hooks around an adapted net: preprocess the inputs, and let a single row in and out."""

    def __init__(self, preprocess: Callable[[Tree], Tree], row_dims: list[int]) -> None:
        self.preprocess = preprocess
        self.row_dims = row_dims
        self.single = False

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        self.single = [leaf.ndim for leaf in tree_leaves(x)] == self.row_dims
        if self.single:
            x = tree_map(lambda leaf: leaf[None], x)
        return (self.preprocess(x), *rest)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output[0] if self.single else output


_CHANNEL_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _functional_copy(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model must be an nn.Module, or a function that builds one; got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.lazy.LazyModuleMixin) and part.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"layer {name!r} is lazy and has no shape yet; call the model on one batch first")
        if isinstance(part, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise ValueError(f"layer {name!r} is {type(part).__name__}, which cannot be replayed; use nn.Dropout")
        if isinstance(part, nn.MultiheadAttention) and part.dropout > 0:
            raise ValueError(f"layer {name!r}: set dropout=0 in MultiheadAttention and use nn.Dropout after it")
    if not any(True for _ in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameters to learn")
    module = copy.deepcopy(module).train()
    module.requires_grad_(False)
    tracked = []
    replaced: dict[nn.Module, nn.Module] = {}
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            if part.track_running_stats:
                tracked.append(name)
            replaced[part] = BatchNorm(part)
        elif isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            replaced[part] = SeededDropout(part.p, isinstance(part, _CHANNEL_DROPOUT))
    for parent in list(module.modules()):
        # Not named_children: it leaves out a layer's second name under one parent.
        for name, child in parent._modules.items():
            if child in replaced:
                setattr(parent, name, replaced[child])
    if tracked:
        warnings.warn(
            f"batch norm layers {tracked} keep running statistics; metaleader uses the statistics of the current batch"
            " in training, and those of the task's data in the nets that adapt() returns",
            stacklevel=4,
        )
    return replaced.get(module, module)


def _tied_names(module: nn.Module) -> dict[str, str]:
    """The names under which the layers of a module hold parameters, each with the first name of the same parameter."""
    first: dict[Tensor, str] = {}
    return {
        name: first.setdefault(value, name)
        for prefix, part in module.named_modules()
        for name, value in part.named_parameters(prefix, recurse=False)
    }


def _mean(loss: Any, num: int) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape not in ((), (num,)):
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must return one value a datapoint, ({num},), or a scalar; got {got}")
    return loss.mean()


def _safe_labels(y: Tree, loss: Loss) -> Tree:
    """Labels for a trial run, where the range is not checked yet."""
    return torch.zeros_like(y) if takes_labels(loss) and isinstance(y, Tensor) and not y.is_floating_point() else y


def num_device(tree: Tree) -> torch.device:
    """The device of a tree of tensors."""
    return tree_leaves(tree)[0].device


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
