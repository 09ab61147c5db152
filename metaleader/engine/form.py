"""The form in which a meta-gradient is computed: unrolled or by the adjoint recursion, and how many tasks at a time.

The forms differ by rounding, so the choice is made once, before the first update of a learner, and saved with its
state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.compiled import curvature_error
from metaleader.engine.determinism import repeatable
from metaleader.engine.objective import Form, Objective, without_rates
from metaleader.gradient.attention import plain_attention
from metaleader.gradient.selection import split
from metaleader.gradient.unrolled import HeldBytes, unrolled_sums
from metaleader.system.machine import memory_bytes

_log = logging.getLogger("metaleader")
# On the CPU, a task's share of a chunk is at most this many bytes: larger blocks are returned to the system every time.
_CPU_BYTES = 2**28
# Rounding gives 1e-6 and less
_MAX_ERROR = 1e-4
# More operations than any program that is compiled as a whole
_MANY = 10**9


def adjoint_form(objective: Objective) -> Form:
    """The form of learners that were saved before forms were chosen."""
    return Form(unroll=False, chunk=objective.inner.tasks_at_once, operations=_MANY)


def form_of(tree: Mapping[str, Any]) -> Form:
    """Read a form from the state of a learner."""
    unroll, chunk, operations = (tree.get(name) for name in Form._fields)
    chunked = chunk is None or (type(chunk) is int and chunk >= 1)
    if type(unroll) is not bool or not chunked or type(operations) is not int:
        raise ValueError(f"the state is damaged: {dict(tree)} is not the form of a gradient")
    return Form(unroll, chunk, operations)


def choose_form(
    objective: Objective, flat: Tensor, support: Any, query: Any, noise: Tensor | None, free: int | None = None
) -> Form:
    """The fastest form whose memory fits into half of `free` bytes; None is the memory of the device that is free.

    One inner step of one task is taken, and the bytes are counted that it holds for the second derivative. All steps
    are unrolled if those of all tasks fit, or with `chunk="auto"` those of at least one task. Arguments are those of
    `Engine.gradient`.
    """
    inner, num_tasks = objective.inner, tree_leaves(query)[0].shape[1]
    if objective.task_gradient is not None:
        return adjoint_form(objective)
    params = {name: value[0] for name, value in without_rates(objective.layout.named(flat)).items()}
    moving, fixed = split(params, inner.only)
    one_task = tree_map(lambda leaf: leaf[0, :1].clone(), (support if inner.steps else query, query))
    seeds = None if noise is None else noise[0, :2, :1]
    step = inner._replace(lr=dict.fromkeys(moving, 0.0), steps=min(inner.steps, 1), every_step=False)
    held = HeldBytes()
    with repeatable(flat.device), plain_attention(), _Operations() as counter, held:
        unrolled_sums(objective.network.loss_fn, moving, fixed, step, one_task[0], one_task[1], seeds)
    with repeatable(flat.device):
        error = curvature_error(objective, objective.layout.named(flat), support, noise, by_autograd=True)
    size = sum(value.numel() * value.element_size() for value in params.values())
    unrolled = (inner.steps + 1) * held.total + 3 * size
    stride = max(1, math.isqrt(inner.steps) // 2)
    adjoint = 2 * held.total + (inner.steps // stride + stride + 3) * size
    free = (memory_bytes(flat.device, free=True) if free is None else free) // (2 * len(flat))
    if inner.chunk != "auto":
        chunk = inner.chunk
        unroll = inner.steps == 0 or min(chunk or num_tasks, num_tasks) * unrolled <= free
    else:
        unroll = inner.steps == 0 or unrolled <= free
        largest = free // (unrolled if unroll else adjoint)
        if flat.device.type == "cpu":
            largest = min(largest, _CPU_BYTES // max(1, held.total))
        parts = -(-num_tasks // min(num_tasks, max(1, largest)))  # of about the same size
        chunk = None if parts == 1 else -(-num_tasks // parts)
    if unroll and error > _MAX_ERROR:
        _log.warning("torch.autograd over vmap is wrong by %.1g for the network; using the adjoint form", error)
        unroll = False
    parts = -(-num_tasks // (chunk or num_tasks))
    return Form(unroll, chunk, counter.total * max(1, inner.steps) * parts)


class _Operations(TorchDispatchMode):
    """Count the operations of torch while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))
