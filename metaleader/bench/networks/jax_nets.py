"""The networks of the cases in jax.numpy, of the parameters of the torch modules by their torch names.

Imports jax, an optional dependency.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax import lax  # pyright: ignore[reportMissingImports]

Array = Any
Params = dict[str, Any]
# (x, weight, stride, padding) -> result, in the layouts of torch
Convolution = Callable[[Array, Array, int, int], Array]


def by_columns(x: Array, weight: Array, stride: int, padding: int) -> Array:
    """A convolution as one matrix product (im2col): a batched product under vmap."""
    fan_out, fan_in, height, width = weight.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    rows, columns = (x.shape[2] - height) // stride + 1, (x.shape[3] - width) // stride + 1
    slices = [
        x[:, :, i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (columns - 1) + 1 : stride]
        for i, j in itertools.product(range(height), range(width))
    ]
    patches = jnp.stack(slices, 2).reshape(len(x), fan_in * height * width, rows * columns)
    product = jnp.einsum("of,nfp->nop", weight.reshape(fan_out, -1), patches)
    return product.reshape(len(x), fan_out, rows, columns)


def by_groups(x: Array, weight: Array, stride: int, padding: int) -> Array:
    """JAX's convolution: a grouped convolution under vmap."""
    edges = [(padding, padding)] * 2
    return lax.conv_general_dilated(x, weight, (stride, stride), edges, dimension_numbers=("NCHW", "OIHW", "NCHW"))


CONVOLUTIONS: dict[str, Convolution] = {"im2col": by_columns, "grouped": by_groups}


def network(name: str, convolution: Convolution, regression: bool) -> Callable[[Params, Array, Array], Array]:
    """The mean loss of a case's network as a function of (params, x, y)."""
    forwards: dict[str, Callable[[Params, Array], Array]] = {
        "mlp": _mlp,
        "digits": functools.partial(_conv_net, convolution),
        "conv": functools.partial(_conv_net, convolution),
        "transformer": _encoder,
        "resnet": functools.partial(_resnet, convolution),
        "vit": functools.partial(_vision, convolution),
        "gru": _gru,
    }
    forward = forwards[name]

    def loss(params: Params, x: Array, y: Array) -> Array:
        prediction = forward(params, x)
        if regression:
            return jnp.square(prediction - y).mean()
        return -jnp.take_along_axis(jax.nn.log_softmax(prediction), y[:, None], 1).mean()

    return loss


def _linear(params: Params, name: str, x: Array) -> Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _mlp(params: Params, x: Array) -> Array:
    for i in itertools.count():
        if f"linear{i}.weight" not in params:
            return _linear(params, "head", x)
        x = jax.nn.relu(_linear(params, f"linear{i}", x))
    raise AssertionError


def _conv_net(convolution: Convolution, params: Params, x: Array) -> Array:
    for i in itertools.count():
        if f"conv{i}.weight" not in params:
            return _linear(params, "head", x.reshape(len(x), -1))
        weight = params[f"conv{i}.weight"]
        x = convolution(x, weight, 2, weight.shape[-1] // 2)
        mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        x = jax.nn.relu(_scaled(params, f"norm{i}", (x - mean) * lax.rsqrt(variance + 1e-5)))
    raise AssertionError


def _scaled(params: Params, name: str, x: Array) -> Array:
    """Scale and shift of channels, (N, channels, height, width)."""
    return x * params[f"{name}.weight"][:, None, None] + params[f"{name}.bias"][:, None, None]


def _group_norm(params: Params, name: str, x: Array, groups: int = 4) -> Array:
    grouped = x.reshape(len(x), groups, -1)
    mean, variance = grouped.mean(2, keepdims=True), grouped.var(2, keepdims=True)
    return _scaled(params, name, ((grouped - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape))


def _resnet(convolution: Convolution, params: Params, x: Array) -> Array:
    x = jax.nn.relu(_group_norm(params, "stem_norm", convolution(x, params["stem.weight"], 2, 1)))
    for i, stride in enumerate((1, 2, 2)):
        name = f"blocks.{i}"
        y = convolution(x, params[f"{name}.conv1.weight"], stride, 1)
        y = jax.nn.relu(_group_norm(params, f"{name}.norm1", y))
        y = _group_norm(params, f"{name}.norm2", convolution(y, params[f"{name}.conv2.weight"], 1, 1))
        shortcut = params.get(f"{name}.shortcut.weight")
        x = jax.nn.relu(y + (x if shortcut is None else convolution(x, shortcut, stride, 0)))
    return _linear(params, "head", x.mean((2, 3)))


def _layer_norm(params: Params, name: str, x: Array) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]


def _attention(params: Params, name: str, x: Array, heads: int = 4) -> Array:
    rows, tokens, width = x.shape
    joint = x @ params[f"{name}.in_proj_weight"].T + params[f"{name}.in_proj_bias"]
    query, key, value = (part.reshape(rows, tokens, heads, -1) for part in jnp.split(joint, 3, -1))
    scores = jnp.einsum("nshd,nthd->nhst", query, key) / math.sqrt(width // heads)
    mixed = jnp.einsum("nhst,nthd->nshd", jax.nn.softmax(scores), value).reshape(rows, tokens, width)
    return _linear(params, f"{name}.out_proj", mixed)


def _encoder(params: Params, x: Array) -> Array:
    for i in itertools.count():
        name = f"layers.{i}"
        if f"{name}.norm1.weight" not in params:
            return _linear(params, "head", x.mean(1))
        x = _layer_norm(params, f"{name}.norm1", x + _attention(params, f"{name}.self_attn", x))
        hidden = jax.nn.relu(_linear(params, f"{name}.linear1", x))
        x = _layer_norm(params, f"{name}.norm2", x + _linear(params, f"{name}.linear2", hidden))
    raise AssertionError


def _vision(convolution: Convolution, params: Params, x: Array) -> Array:
    weight = params["patches.weight"]
    x = convolution(x, weight, weight.shape[-1], 0) + params["patches.bias"][:, None, None]
    x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2) + params["positions"]
    for i in itertools.count():
        name = f"layers.{i}"
        if f"{name}.norm1.weight" not in params:
            return _linear(params, "head", _layer_norm(params, "last_norm", x).mean(1))
        x = x + _attention(params, f"{name}.self_attn", _layer_norm(params, f"{name}.norm1", x))
        hidden = _linear(params, f"{name}.linear1", _layer_norm(params, f"{name}.norm2", x))
        x = x + _linear(params, f"{name}.linear2", jax.nn.gelu(hidden, approximate=False))
    raise AssertionError


def _gru(params: Params, x: Array) -> Array:
    inputs = x @ params["gru.weight_ih_l0"].T + params["gru.bias_ih_l0"]

    def step(state: Array, inputs: Array) -> tuple[Array, None]:
        reset_x, update_x, new_x = jnp.split(inputs, 3, -1)
        hidden = state @ params["gru.weight_hh_l0"].T + params["gru.bias_hh_l0"]
        reset_h, update_h, new_h = jnp.split(hidden, 3, -1)
        new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
        update = jax.nn.sigmoid(update_x + update_h)
        return (1 - update) * new + update * state, None

    width = params["gru.weight_hh_l0"].shape[1]
    state, _ = lax.scan(step, jnp.zeros((len(x), width), x.dtype), inputs.swapaxes(0, 1))
    return _linear(params, "head", state)
