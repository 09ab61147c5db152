"""Copies of a module: one that can be run as a pure function, and one adapted to a task and ready for use."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.gradient.selection import Params
from metaleader.models import TaskLogits
from metaleader.nets import attention, composed, norms, recurrent
from metaleader.nets.layers import BatchNorm, Conv2d, Linear, SeededDropout
from metaleader.tasks import Batch, Tree, as_array

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CHANNEL_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Subclasses that take the place of torch's layers: only the class of a layer changes
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: norms.LayerNorm,
    nn.RMSNorm: norms.RMSNorm,
    nn.GroupNorm: norms.GroupNorm,
    nn.InstanceNorm1d: norms.InstanceNorm1d,
    nn.InstanceNorm2d: norms.InstanceNorm2d,
    nn.InstanceNorm3d: norms.InstanceNorm3d,
    nn.MultiheadAttention: attention.MultiheadAttention,
    nn.TransformerEncoder: attention.TransformerEncoder,
    nn.TransformerDecoder: attention.TransformerDecoder,
    nn.RNN: recurrent.RNN,
    nn.GRU: recurrent.GRU,
    nn.LSTM: recurrent.LSTM,
    nn.RNNCell: recurrent.RNNCell,
    nn.GRUCell: recurrent.GRUCell,
    nn.LSTMCell: recurrent.LSTMCell,
    nn.Hardsigmoid: composed.Hardsigmoid,
    nn.Bilinear: composed.Bilinear,
    nn.Upsample: composed.Upsample,
    nn.Embedding: composed.Embedding,
    nn.EmbeddingBag: composed.EmbeddingBag,
    nn.MaxUnpool1d: composed.MaxUnpool1d,
    nn.MaxUnpool2d: composed.MaxUnpool2d,
    nn.MaxUnpool3d: composed.MaxUnpool3d,
}
_REFUSED: dict[type[nn.Module] | tuple[type[nn.Module], ...], str] = {
    (nn.AlphaDropout, nn.FeatureAlphaDropout): "draws masks that cannot be replayed; use nn.Dropout",
    nn.RReLU: "draws slopes that cannot be replayed; use nn.LeakyReLU",
    (
        nn.FractionalMaxPool2d,
        nn.FractionalMaxPool3d,
    ): "draws regions that cannot be replayed; use nn.MaxPool2d or nn.MaxPool3d",
    nn.CrossMapLRN2d: "cannot be differentiated by torch.func; use nn.LocalResponseNorm",
}
_ORIGINALS = {replacement: original for original, replacement in _CLASSES.items()} | {Linear: nn.Linear}


def functional_copy(module: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Copy a module and replace its layers that keep state or have no usable second derivative.

    Parameters keep their names and values. Batch norm uses the statistics of the batch, with a warning if it tracked
    running statistics; dropout takes its masks from seeds.

    Raises:
        ValueError: for a module that cannot be run as a pure function of its parameters.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model must be an nn.Module, or a function that builds one; got {type(module).__name__}")
    for name, layer in module.named_modules():
        reason = _refusal(layer)
        if reason is not None:
            raise ValueError(f"layer {name!r} ({type(layer).__name__}) {reason}")
    if not any(value.requires_grad for value in module.parameters()) and not _is_functional(module):
        only = ": all have requires_grad=False" if any(True for _ in module.parameters()) else ""
        raise ValueError(f"{type(module).__name__} has no parameters to learn{only}")
    module = copy.deepcopy(module).train()
    module.requires_grad_(False)
    tracked = []
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in list(module.named_modules()):
        if type(layer) in _CLASSES:
            _replace_class(layer)
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False  # sparse gradients cannot be batched
        if layer._forward_hooks or layer._forward_pre_hooks:
            continue
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and type(layer) in _BATCH_NORMS:
            if layer.track_running_stats:
                tracked.append(name)
            replaced[layer] = BatchNorm(layer)
        elif type(layer) is nn.Conv2d and Conv2d.replaces(layer):
            replaced[layer] = Conv2d(layer)
        elif type(layer) is nn.Linear and device is not None and torch.device(device).type == "cuda":
            layer.__class__ = Linear
        elif isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            replaced[layer] = SeededDropout(layer.p, isinstance(layer, _CHANNEL_DROPOUT))
    for parent in list(module.modules()):
        # Not named_children: it omits the second name of a layer under one parent.
        for name, child in parent._modules.items():
            if child in replaced:
                setattr(parent, name, replaced[child])
    if tracked:
        warnings.warn(
            f"batch norm layers {tracked} keep running statistics; metaleader uses the statistics of the current batch"
            " in training, and those of the task's data in the nets that adapt() returns",
            stacklevel=4,
        )
    result = replaced.get(module, module).to(device)
    result.is_functional = True  # pyright: ignore[reportArgumentType]
    return result


def _is_functional(module: nn.Module) -> bool:
    """Whether a module is a functional copy, whose frozen parameters are buffers already."""
    return getattr(module, "is_functional", False) is True


def frozen_names(module: nn.Module) -> list[str]:
    """All names of the parameters with requires_grad=False."""
    if _is_functional(module):
        return []
    return [name for name, value in module.named_parameters(remove_duplicate=False) if not value.requires_grad]


def freeze(module: nn.Module, names: Sequence[str]) -> None:
    """Make these parameters buffers under the same names, so that they are constants of the functional module."""
    buffers: dict[Tensor, Tensor] = {}
    for layer, name in _places(module, names):
        value = layer._parameters.pop(name)
        assert value is not None
        layer.register_buffer(name, buffers.setdefault(value, value.detach()))


def _unfreeze(module: nn.Module, names: Sequence[str]) -> None:
    """The inverse of `freeze`."""
    params: dict[Tensor, nn.Parameter] = {}
    for layer, name in _places(module, names):
        value = layer._buffers.pop(name)
        assert value is not None
        if value not in params:
            params[value] = nn.Parameter(value, requires_grad=False)
        setattr(layer, name, params[value])


def _places(module: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    """The layers that hold these parameters, each once, with the last part of the name."""
    seen: set[tuple[nn.Module, str]] = set()
    for name in names:
        path, _, last = name.rpartition(".")
        place = (module.get_submodule(path), last)
        if place not in seen:
            seen.add(place)
            yield place


def _refusal(layer: nn.Module) -> str | None:
    """The reason why a layer is not a function of its parameters that can be differentiated twice, if it is not one."""
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
        return "is lazy and has no shape yet; call the model on one batch first"
    if isinstance(layer, torch.jit.ScriptModule):
        return "is a compiled program; pass the module that torch.jit was given"
    for kind, reason in _REFUSED.items():
        if isinstance(layer, kind):
            return reason
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "keeps running statistics; build it with track_running_stats=False"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        return "changes its weights in its forward; build it with max_norm=None"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
        return "scales its gradient, which then has no derivative; build it with scale_grad_by_freq=False"
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0 and type(layer) not in _CLASSES:
        base = next(base for base in type(layer).__mro__ if base in _CLASSES)
        return f"is a subclass of {base.__name__} that draws its own dropout masks; build it with dropout=0"
    return None


def _replace_class(layer: nn.Module) -> None:
    """Replace the class of one of torch's layers, and give it a layer for its dropout."""
    layer.__class__ = _CLASSES[type(layer)]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(layer, attention.MultiheadAttention | nn.RNNBase):
        layer.seeded_dropout = SeededDropout(layer.dropout, False) if layer.dropout > 0 else None


def _restore_class(layer: nn.Module) -> None:
    """The inverse of `_replace_class`."""
    layer.__class__ = _ORIGINALS[type(layer)]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        del layer.seeded_dropout


@torch.no_grad()
def adapted_copy(
    module: nn.Module,
    params: Params,
    preprocess: Callable[[Tree], Tree],
    data: Batch | None,
    statistics: str,
    example: Batch | None,
    classes: Tensor | None,
    frozen: Sequence[str] = (),
) -> nn.Module:
    """Copy a functional module with these parameters, ready for use: dropout off, inputs preprocessed, one row or many.

    Args:
        module: a result of `functional_copy`.
        params: copied into the new module; its `state_dict` loads into the module that was converted.
        preprocess: applied to every input.
        data: the task's datapoints, whose statistics batch norm uses with `statistics="task"`.
        statistics: "task", or "batch" for the statistics of the rows that the net is called on, as in the paper.
        example: datapoints of an earlier task, which show the shape of a row while there is no `data`.
        classes: of the task, for `TaskLogits`.
        frozen: the names given to `freeze`.
    """
    if statistics not in ("task", "batch"):
        raise ValueError(f"statistics must be 'task' or 'batch', got {statistics!r}")
    net = copy.deepcopy(module)
    for layer in list(net.modules()):
        if type(layer) in _ORIGINALS:
            _restore_class(layer)
        elif isinstance(layer, TaskLogits) and classes is not None:
            layer.classes = classes
    for name, value in net.named_parameters():
        value.requires_grad_(True).copy_(params[name])
    _unfreeze(net, frozen)
    for layer in net.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # as cuDNN wants them
    net.eval()
    batch_norms = [layer for layer in net.modules() if isinstance(layer, BatchNorm)]
    if batch_norms and statistics == "task" and data is not None:
        for norm in batch_norms:
            norm.keep_next = True
        net(preprocess(data.x))
    shown = data or example
    like = next(net.parameters())
    rows = _RowHooks(preprocess, [leaf.ndim - 1 for leaf in tree_leaves(shown.x)] if shown else None, like)
    net.register_forward_pre_hook(rows.before)
    net.register_forward_hook(rows.after)
    return net


class _RowHooks:
    """Hooks of an adapted net: preprocess the inputs, and accept arrays, and a single row without batch dimension."""

    def __init__(self, preprocess: Callable[[Tree], Tree], row_dims: list[int] | None, like: Tensor) -> None:
        self.preprocess = preprocess
        self.row_dims = row_dims
        self.like = like.dtype, like.device
        self.single = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        x = tree_map(self.tensor, x)
        self.single = [leaf.ndim for leaf in tree_leaves(x)] == self.row_dims
        if self.single:
            x = tree_map(lambda leaf: leaf[None], x)
        return (self.preprocess(x), *rest)

    def tensor(self, leaf: Any) -> Any:
        """A leaf as it is, or an array as a tensor where the parameters are; float64 gets their dtype."""
        leaf = as_array(leaf)
        if not isinstance(leaf, np.ndarray):
            return leaf
        dtype, device = self.like
        return torch.from_numpy(leaf).to(device, dtype if leaf.dtype == np.float64 else None)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output[0] if self.single else output


def tied_names(module: nn.Module) -> dict[str, str]:
    """Each name under which a layer holds a parameter, with the first name of the same parameter."""
    first: dict[Tensor, str] = {}
    return {
        name: first.setdefault(value, name)
        for prefix, layer in module.named_modules()
        for name, value in layer.named_parameters(prefix, recurse=False)
    }
