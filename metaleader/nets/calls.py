"""Calls of `torch.nn.functional` in a user's forward, replaced by functions with a right second derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from metaleader.nets import attention, composed, norms


def _instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *settings: Any,
) -> Tensor:
    """`torch.instance_norm`, whose arguments are in another order."""
    return norms.instance_norm(input, running_mean, running_var, weight, bias, *settings[:3])


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *settings: Any,
) -> Tensor:
    """`torch.batch_norm`, whose arguments are in another order."""
    return norms.batch_norm(input, running_mean, running_var, weight, bias, *settings[:3])


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.layer_norm: norms.layer_norm,
    torch.layer_norm: norms.layer_norm,
    F.rms_norm: norms.rms_norm,
    torch.rms_norm: norms.rms_norm,
    F.group_norm: norms.group_norm,
    torch.group_norm: norms.group_norm,
    F.instance_norm: norms.instance_norm,
    torch.instance_norm: _instance_norm,
    F.batch_norm: norms.batch_norm,
    torch.batch_norm: _batch_norm,
    F.hardsigmoid: composed.hardsigmoid,
    F.bilinear: composed.bilinear,
    F.interpolate: composed.interpolate,
    F.embedding: composed.embedding,
    F.embedding_bag: composed.embedding_bag,
    F.max_unpool1d: functools.partial(composed.max_unpool, num_dims=1),
    F.max_unpool2d: functools.partial(composed.max_unpool, num_dims=2),
    F.max_unpool3d: functools.partial(composed.max_unpool, num_dims=3),
    F.scaled_dot_product_attention: attention.scaled_dot_product_attention,
    F.multi_head_attention_forward: attention.multi_head_attention_forward,
}


class ReplacedCalls(TorchFunctionMode):
    """A context in which functions of torch are replaced, in the current thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of a function, or the function."""
        if func is Tensor.unflatten:  # dynamo traces the function, but not the method
            func = torch.unflatten
        return (_REPLACED.get(func) or func)(*args, **(kwargs or {}))


def call(module: nn.Module, state: Mapping[str, Tensor], x: Any, own_code: bool) -> Any:
    """Call a functional module with these parameters and buffers.

    Args:
        module: changed during the call, unless it is traced.
        state: parameters and buffers by all their names.
        x: the input.
        own_code: the result of `has_own_code`; if True, calls are replaced, which costs a microsecond for each.
    """
    if own_code:
        return call_replaced(module, state, x)
    # Not tie_weights: with a layer that is used twice, torch 2.13 leaves these tensors in the module.
    return functional_call(module, dict(state), (x,), tie_weights=False)


def call_replaced(module: nn.Module, state: Mapping[str, Tensor], x: Any) -> Any:
    """Call a functional module whose calls of `torch.nn.functional` are replaced."""
    with ReplacedCalls():
        return functional_call(module, dict(state), (x,), tie_weights=False)


def has_own_code(module: nn.Module) -> bool:
    """Whether code that is not torch's layers nor metaleader's runs when a functional module is called."""
    return any(
        not type(layer).__module__.startswith(("torch.nn.modules.", "metaleader."))
        or "forward" in vars(layer)
        or layer._forward_hooks
        or layer._forward_pre_hooks
        for layer in module.modules()
    )
