"""The meta-gradient of multilayer perceptrons by the kernels."""
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from metaleader.engine.dense.kernel import mean_kernel, task_kernel
from metaleader.engine.dense.trace import Perceptron
from metaleader.engine.objective import Objective
from metaleader.gradient.selection import split, step_sizes
from metaleader.tasks import Batch

# The largest width of a layer, and the largest number of rows of a batch. Twice as wide, the kernel takes 3.6 times as
# long (on an H200).
MAX_WIDTH, MAX_ROWS = 64, 64
_BLOCK, _WARPS = 256, 8


class DenseGradient:
    """The gradient of an objective whose network is a multilayer perceptron, in float32.

    Args:
        perceptron: the layers of the network.
        objective: gradient steps, without learned step sizes and without losses after every step.
    """

    def __init__(self, perceptron: Perceptron, objective: Objective, device: torch.device) -> None:
        self._perceptron, self._inner = perceptron, objective.inner
        self._preprocess = objective.network.preprocess
        params, layout = objective.params(), objective.layout
        total = sum(value.numel() for value in params.values())
        begin = {name: int(value.flatten()[0]) for name, value in layout.named(torch.arange(total)).items()}
        rows = [
            (begin[layer.weight], -1 if layer.bias is None else begin[layer.bias], layer.inputs, layer.outputs)
            for layer in perceptron.layers
        ]
        self._meta = torch.tensor(rows, dtype=torch.int32, device=device)
        rates = step_sizes(self._inner.lr, split(params, self._inner.only)[0])
        filled = {name: torch.full_like(value, rates.get(name, 0.0)) for name, value in params.items()}
        self._rates = layout.flat(filled).to(device)

    @staticmethod
    def takes(perceptron: Perceptron, objective: Objective, support: Any, query: Any) -> bool:
        """Whether the kernels support these layers, gradient steps and batches, (learners, tasks, rows, ...)."""
        inner = objective.inner
        plain = not objective.learn_lr and objective.adaptation is None and not inner.every_step
        batches = [support, query] if inner.steps else [query]
        return plain and perceptron.width <= MAX_WIDTH and all(_fits(perceptron, batch) for batch in batches)

    def __call__(self, flat: Tensor, support: Any, query: Any, noise: None) -> tuple[Tensor, Tensor]:
        """Losses and gradient norms, (2, learners), and flat gradients; batches are (learners, tasks, rows, ...)."""
        perceptron, steps = self._perceptron, self._inner.steps
        learners, tasks = query.y.shape[:2]
        total, layers = flat.shape[1], len(perceptron.layers)
        support_x, query_x = (self._preprocess(batch.x).contiguous() for batch in (support if steps else query, query))
        support_y, query_y = (batch.y.contiguous() for batch in (support if steps else query, query))
        num_support, num_query = support_y.shape[2], query_y.shape[2]
        rows = max(16, triton.next_power_of_2(max(num_support if steps else 0, num_query)))
        width = max(16, triton.next_power_of_2(perceptron.width))
        shapes = [
            (steps + 1, total), (2, total), *[(steps + 1, layers, rows, width)] * 3, (layers, rows, width), ()
        ]  # fmt: skip
        theta, lam, z, slopes, below, z_dot, losses = (flat.new_empty(learners * tasks, *shape) for shape in shapes)
        second = not self._inner.first_order
        task_kernel[(learners * tasks,)](
            flat.contiguous(), self._rates, support_x, support_y, query_x, query_y, self._meta, theta, lam, z, slopes,
            below, z_dot, losses, tasks, total, num_support, num_query, perceptron.layers[0].inputs,
            perceptron.layers[-1].outputs, steps, layers, perceptron.smoothing,
            N=rows, W=width, LABELS=perceptron.labels, SECOND=second, ACT=perceptron.activation, PREC=_precision(),
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        gradients, mean = flat.new_empty(learners, total), flat.new_empty(learners)
        offset = total if second and steps % 2 else 0
        mean_kernel[(triton.cdiv(total, _BLOCK), learners)](
            lam, losses, gradients, mean, tasks, total, 2 * total, offset, BLOCK=_BLOCK
        )
        return torch.stack([mean, torch.linalg.vector_norm(gradients, dim=1)]), gradients


def _fits(perceptron: Perceptron, batch: Any) -> bool:
    """Whether the rows of a batch are those of the network and the loss, and few enough."""
    if not isinstance(batch, Batch) or not isinstance(batch.x, Tensor) or not isinstance(batch.y, Tensor):
        return False
    x, y = batch
    features, outputs = x.shape[3:], perceptron.layers[-1].outputs
    right = features.numel() == perceptron.layers[0].inputs and (perceptron.flatten or len(features) == 1)
    if perceptron.labels:
        right = right and y.ndim == 3 and not y.is_floating_point() and y.dtype != torch.bool
    else:
        right = right and y.shape[3:] == (outputs,) and y.dtype == torch.float32
    return right and x.dtype in (torch.float32, torch.uint8) and 1 <= x.shape[2] <= MAX_ROWS


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
