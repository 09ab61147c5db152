"""The meta-gradient of multilayer perceptrons by the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from metaleader.engine.cpp_source import cpp_library
from metaleader.engine.cuda_source import CudaProgram, max_shared_memory
from metaleader.engine.dense.plan import THREADS, Plan
from metaleader.engine.dense.trace import Perceptron
from metaleader.engine.objective import Objective
from metaleader.gradient.selection import split, step_sizes
from metaleader.tasks import Batch

# The largest width of a layer, and the largest number of rows of a batch
MAX_WIDTH, MAX_ROWS = 256, 256
# The largest number of products of weights and rows in a pass over a batch, by device. On an H200 and 25 tasks, 200,000
# take 0.3 ms, the general path 1.2 ms; 760,000 take 1.5 ms, and 1.8 ms.
_MAX_PRODUCTS = {"cuda": 600_000}
# The largest memory of a task, in floats: the parameters and activations of all inner steps, 64 MiB
_MAX_MEMORY = 2**24


class Kernels(Protocol):
    """The two kernels of a plan; see `kernel.cu` for the arguments."""

    def __call__(self, learners: int, tasks: int, arguments: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        """Compute the gradients and losses of all tasks, the last two arguments, and their means."""
        ...


class CudaKernels:
    """The kernels on a GPU."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._bytes = plan.arena() if plan.arena() <= max_shared_memory(device) else 0
        self._program = CudaProgram(plan.cuda_source(shared=self._bytes > 0), device)
        self._scratch = 0 if self._bytes else plan.arena() // 4
        self._blocks = -(-plan.total // THREADS)

    def __call__(self, learners: int, tasks: int, arguments: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        """Compute the gradients and losses of all tasks, the last two arguments, and their means."""
        *inputs, gradients, losses = arguments
        scratch = gradients.new_empty(learners * tasks, self._scratch)
        given = [*inputs, scratch, gradients, losses, tasks]
        self._program.launch("task_gradient", (learners * tasks, 1), THREADS, given, self._bytes)
        self._program.launch("mean_over_tasks", (self._blocks, learners), THREADS, [gradients, losses, *means, tasks])


class CpuKernels:
    """The kernel on a CPU, on as many threads as torch has."""

    def __init__(self, plan: Plan) -> None:
        self._library = cpp_library(plan.cpp_source())

    def __call__(self, learners: int, tasks: int, arguments: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        """Compute the gradients and losses of all tasks, the last two arguments, and their means."""
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*arguments, *means)]
        threads = min(torch.get_num_threads(), learners * tasks)
        if self._library.task_gradients(learners, tasks, threads, *pointers):
            raise MemoryError("there is no memory for the meta-gradient of a task")


class DenseGradient:
    """The gradient of an objective whose network is a multilayer perceptron, in float32.

    Args:
        perceptron: the layers of the network.
        objective: gradient steps, without learned step sizes and without losses after every step.
        device: the device of the parameters.
    """

    def __init__(self, perceptron: Perceptron, objective: Objective, device: torch.device) -> None:
        self._perceptron, self._inner, self._device = perceptron, objective.inner, device
        self._preprocess = objective.network.preprocess
        params, layout = objective.params(), objective.layout
        total = sum(value.numel() for value in params.values())
        begin = {name: int(value.flatten()[0]) for name, value in layout.named(torch.arange(total)).items()}
        rates = step_sizes(self._inner.lr, split(params, self._inner.only)[0])
        names = [(layer.weight, layer.bias) for layer in perceptron.layers]
        self._offsets = tuple((begin[weight], -1 if bias is None else begin[bias]) for weight, bias in names)
        values = [0.0 if name is None else float(rates.get(name, 0.0)) for pair in names for name in pair]
        self._rates = torch.tensor(values, dtype=torch.float32, device=device)
        self._kernels: dict[Plan, Kernels] = {}

    @staticmethod
    def suits(perceptron: Perceptron, objective: Objective, rows: int, device: torch.device) -> bool:
        """Whether the kernels support these layers and gradient steps, for batches of up to this number of rows."""
        plain = not objective.learn_lr and objective.adaptation is None and not objective.inner.every_step
        products = rows * sum(layer.inputs * layer.outputs for layer in perceptron.layers)
        small = perceptron.width <= MAX_WIDTH and rows <= MAX_ROWS
        # At most six arrays of activations and their derivatives
        per_step = sum(layer.outputs * (layer.inputs + 6 * rows) for layer in perceptron.layers)
        fits = per_step * (objective.inner.steps + 2) <= _MAX_MEMORY
        return plain and small and fits and products <= _MAX_PRODUCTS.get(device.type, products)

    @staticmethod
    def takes(perceptron: Perceptron, objective: Objective, support: Any, query: Any) -> bool:
        """Whether the kernels support these layers, gradient steps and batches, (learners, tasks, rows, ...)."""
        batches = [support, query] if objective.inner.steps else [query]
        if not all(_fits(perceptron, batch) for batch in batches):
            return False
        rows = max(batch.y.shape[2] for batch in batches)
        return DenseGradient.suits(perceptron, objective, rows, query.y.device)

    def __call__(self, flat: Tensor, support: Any, query: Any, noise: None) -> tuple[Tensor, Tensor]:
        """Losses and gradient norms, (2, learners), and flat gradients; batches are (learners, tasks, rows, ...)."""
        support = support if self._inner.steps else query
        xs = [self._preprocess(batch.x).contiguous() for batch in (support, query)]
        ys = [batch.y.contiguous() for batch in (support, query)]
        learners, tasks = query.y.shape[:2]
        plan = Plan(
            self._perceptron, self._offsets, self._inner.steps, not self._inner.first_order and self._inner.steps > 0,
            support.y.shape[2], query.y.shape[2], (ys[0].dtype, ys[1].dtype),
        )  # fmt: skip
        if plan not in self._kernels:
            self._kernels[plan] = make_kernels(plan, self._device)
        inputs = [flat.contiguous(), self._rates, xs[0], ys[0], xs[1], ys[1]]
        results = [flat.new_empty(learners * tasks, flat.shape[1]), flat.new_empty(learners * tasks)]
        mean_gradients, mean_losses = flat.new_empty(flat.shape), flat.new_empty(learners)
        self._kernels[plan](learners, tasks, [*inputs, *results], [mean_gradients, mean_losses])
        return torch.stack([mean_losses, torch.linalg.vector_norm(mean_gradients, dim=1)]), mean_gradients


def make_kernels(plan: Plan, device: torch.device) -> Kernels:
    """The kernels of a plan on a device."""
    return CpuKernels(plan) if device.type == "cpu" else CudaKernels(plan, device)


def _fits(perceptron: Perceptron, batch: Any) -> bool:
    """Whether the rows of a batch are those of the network and the loss, and few enough."""
    if not isinstance(batch, Batch) or not isinstance(batch.x, Tensor) or not isinstance(batch.y, Tensor):
        return False
    x, y = batch
    features, outputs = x.shape[3:], perceptron.layers[-1].outputs
    right = features.numel() == perceptron.layers[0].inputs and (perceptron.flatten or len(features) == 1)
    if perceptron.labels:
        right = right and y.ndim == 3 and not y.is_floating_point() and Plan.takes_targets(y.dtype)
    else:
        shapes = [(outputs,), ()] if outputs == 1 else [(outputs,)]
        right = right and y.shape[3:] in shapes and y.dtype == torch.float32
    return right and x.dtype in (torch.float32, torch.uint8) and x.shape[2] >= 1
