"""JAX: `jit(grad(vmap))` with Adam, as one compiled function. Imports jax, an optional dependency."""

from __future__ import annotations

import functools
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from jax import lax  # pyright: ignore[reportMissingImports]

from metaleader.bench.networks.cases import Case, Inputs
from metaleader.bench.networks.contenders import META_LR
from metaleader.bench.networks.jax_nets import CONVOLUTIONS, network
from metaleader.tasks import Batch

# The defaults of torch.optim.Adam
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


class JaxPeer:
    """Updates by JAX.

    Args:
        name: of the case.
        case: the work.
        inputs: of an update.
        device: where the work runs.
        convolution: "im2col" or "grouped".
        scan: whether the inner steps are a `lax.scan`, which compiles once, instead of a loop in Python.
    """

    first_updates = 1
    fixed_tasks = True

    def __init__(
        self, name: str, case: Case, inputs: Inputs, device: torch.device, convolution: str, scan: bool
    ) -> None:
        if device.type == "cuda" and jax.default_backend() != "gpu":
            raise ValueError(f"jax {jax.__version__} finds no GPU")
        # As everywhere in this project: float32 without TF32.
        jax.config.update("jax_default_matmul_precision", "highest")
        loss = network(name, CONVOLUTIONS[convolution], case.regression)
        self.initial = {name: value.numpy() for name, value in inputs.params.items()}
        self.batches = self._batches(inputs.support, inputs.query)
        self._update = jax.jit(_update(loss, case, scan), donate_argnums=0)
        self.state = self._start()

    def update(self, updates: int) -> None:
        """Take updates, and wait for the device."""
        for _ in range(updates):
            self.state = self._update(self.state, *self.batches)
        jax.block_until_ready(self.state)

    def gradient(self, support: Batch, query: Batch) -> dict[str, Any]:
        """The gradient from the same program: Adam's first moment after one step from zero."""
        moments = self._update(self._start(), *self._batches(support, query))[1]
        return {name: torch.from_numpy(np.array(value) / (1 - _BETA1)) for name, value in moments.items()}

    def notes(self) -> dict[str, Any]:
        """Nothing to note."""
        return {}

    def device_memory(self) -> int | None:
        """The peak of JAX's allocator."""
        stats = jax.local_devices()[0].memory_stats()
        return stats.get("peak_bytes_in_use") if stats and jax.default_backend() == "gpu" else None

    def _start(self) -> Any:
        params = {name: jnp.array(value) for name, value in self.initial.items()}
        zeros = lambda: {name: jnp.zeros_like(value) for name, value in params.items()}  # noqa: E731
        return params, zeros(), zeros(), jnp.zeros((), jnp.float32)

    @staticmethod
    def _batches(support: Batch, query: Batch) -> list[Any]:
        leaves = [leaf.cpu().numpy() for leaf in (*support, *query)]
        return [jnp.asarray(leaf.astype("int32") if leaf.dtype.kind == "i" else leaf) for leaf in leaves]


def _update(loss: Any, case: Case, scan: bool) -> Any:
    """The update as a function of (params, moments, squares, step) and the batches."""

    def adapted_loss(params: Any, support_x: Any, support_y: Any, query_x: Any, query_y: Any) -> Any:
        def inner(params: Any, _: Any) -> Any:
            gradient = jax.grad(loss)(params, support_x, support_y)
            return jax.tree.map(lambda value, g: value - case.inner_lr * g, params, gradient), None

        if scan:
            params, _ = lax.scan(inner, params, None, length=case.inner_steps)
        else:
            for _ in range(case.inner_steps):
                params, _ = inner(params, None)
        return loss(params, query_x, query_y)

    def meta_loss(params: Any, *batches: Any) -> Any:
        return jax.vmap(functools.partial(adapted_loss, params))(*batches).mean()

    def update(state: Any, *batches: Any) -> Any:
        params, moments, squares, step = state
        gradient = jax.grad(meta_loss)(params, *batches)
        step = step + 1
        moments = jax.tree.map(lambda m, g: _BETA1 * m + (1 - _BETA1) * g, moments, gradient)
        squares = jax.tree.map(lambda v, g: _BETA2 * v + (1 - _BETA2) * g * g, squares, gradient)
        scale = META_LR / (1 - _BETA1**step)
        root = lambda v: jnp.sqrt(v / (1 - _BETA2**step)) + _EPS  # noqa: E731
        params = jax.tree.map(lambda p, m, v: p - scale * m / root(v), params, moments, squares)
        return params, moments, squares, step

    return update
