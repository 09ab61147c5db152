"""The error of a gradient: its distance to `meta_gradient` in float64, task by task.

The sign of an activation within rounding of zero can differ in float32, which changes the derivative of ReLU there. The
gradient of that task, and so the mean over tasks, is then wrong by up to a few per cent in any mode. The error is
therefore computed per task, and its median measures the accuracy of the computation.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
from torch.func import vmap
from torch.utils._pytree import tree_map

from metaleader.bench.work import Inputs, Work
from metaleader.engine.engine import Engine
from metaleader.engine.objective import Objective
from metaleader.gradient.meta import meta_gradient
from metaleader.gradient.selection import Params
from metaleader.nets.functional import scale_uint8
from metaleader.tasks import Batch, double

# Rounding errors are smaller, also for pose; the error of a changed sign is mostly larger.
_LARGE = 1e-4


def measure_errors(
    work: Work, engine: Engine, objective: Objective, device: torch.device, draws: int = 5
) -> dict[str, Any]:
    """Relative errors of an engine's gradient in float32, over all parameters.

    Returns:
        For the gradient of each task, over the tasks of all draws: `error_vs_float64`, the median error; the largest
        error; and the fraction of tasks whose error is above 1e-4. For the mean gradient over tasks, as in an update,
        over draws: `error_vs_float64_mean_gradient`, the median error; and the largest error.
    """
    task_errors: list[float] = []
    mean_errors: list[float] = []
    for draw in range(draws):
        inputs = work.inputs(device, draw)
        separate = one_task_each(inputs)
        exact = exact_gradient(objective, doubled(separate))
        computed = gradient(engine, objective, *separate)
        task_errors += [distance(_at(computed, i), _at(exact, i)) for i in range(work.seeds * work.tasks)]
        exact_mean = {name: value.unflatten(0, (work.seeds, -1)).mean(1) for name, value in exact.items()}
        mean_errors.append(distance(gradient(engine, objective, *inputs), exact_mean))
    return {
        "error_vs_float64": statistics.median(task_errors),
        "error_vs_float64_max": max(task_errors),
        "error_above_1e-4": sum(error > _LARGE for error in task_errors) / len(task_errors),
        "error_vs_float64_mean_gradient": statistics.median(mean_errors),
        "error_vs_float64_mean_gradient_max": max(mean_errors),
        "error_draws": draws,
    }


def distance(computed: Params, exact: Params) -> float:
    """The distance of a gradient to the exact one, relative to its norm, over all parameters."""
    difference = torch.stack([(computed[name].double() - exact[name].double()).norm() for name in exact]).norm()
    return float(difference / torch.stack([value.double().norm() for value in exact.values()]).norm())


def one_task_each(inputs: Inputs) -> Inputs:
    """Give each task its own learner, so that one call of the engine returns the gradient of every task."""
    params, support, query = inputs
    num_tasks = query.y.shape[1]
    repeated = {name: value.repeat_interleave(num_tasks, 0) for name, value in params.items()}
    support, query = tree_map(lambda leaf: leaf.flatten(0, 1)[:, None], (support, query))
    return repeated, support, query


def gradient(engine: Engine, objective: Objective, params: Params, support: Batch, query: Batch) -> Params:
    """The gradients computed by an engine, by name; every tensor has a leading learner dimension."""
    layout = objective.layout
    return layout.named(engine.gradient(objective, layout.flat(params), support, query, None)[1])


@torch.no_grad()
def exact_gradient(objective: Objective, inputs: Inputs) -> Params:
    """The gradients computed by `meta_gradient`, batched over learners."""
    inner = objective.inner
    exact = functools.partial(meta_gradient, objective.network.loss_fn, inner_lr=inner.lr, inner_steps=inner.steps)
    return vmap(lambda params, support, query: exact(params, support, query)[1])(*inputs)


def doubled(inputs: Inputs) -> Inputs:
    """The inputs converted to float64."""
    params, support, query = inputs
    scaled = [batch._replace(x=scale_uint8(batch.x)) for batch in (support, query)]
    return double(params), double(scaled[0]), double(scaled[1])


def _at(gradients: Params, i: int) -> Params:
    return {name: value[i] for name, value in gradients.items()}
