"""How exact a gradient is: its distance to `meta_gradient` in float64, task by task.

An activation within rounding of zero can get another sign in float32, and ReLU's derivative is then that of the other
side: the gradient of that task is off by up to some per cent, in any mode, and with it the mean over tasks. So the
error is taken of each task alone, and its median says how exact the computation is.
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

# Rounding alone stays below this, also for pose; a changed sign seldom does.
_LARGE = 1e-4


def measure_errors(
    work: Work, engine: Engine, objective: Objective, device: torch.device, draws: int = 5
) -> dict[str, Any]:
    """Errors of an engine's gradient in float32, relative, over all parameters.

    Returns:
        `error_vs_float64`, the median over the tasks of all draws, each task's gradient taken alone; the largest; the
        part of the tasks whose error is above 1e-4; and `error_vs_float64_mean_gradient`, of the mean over tasks as an
        update takes it, the median over draws and the largest.
    """
    alone: list[float] = []
    mean: list[float] = []
    for draw in range(draws):
        inputs = work.inputs(device, draw)
        separate = one_task_each(inputs)
        exact = exact_gradient(objective, doubled(separate))
        found = gradient(engine, objective, *separate)
        alone += [distance(_at(found, i), _at(exact, i)) for i in range(work.seeds * work.tasks)]
        exact_mean = {name: value.unflatten(0, (work.seeds, -1)).mean(1) for name, value in exact.items()}
        mean.append(distance(gradient(engine, objective, *inputs), exact_mean))
    return {
        "error_vs_float64": statistics.median(alone),
        "error_vs_float64_max": max(alone),
        "error_above_1e-4": sum(error > _LARGE for error in alone) / len(alone),
        "error_vs_float64_mean_gradient": statistics.median(mean),
        "error_vs_float64_mean_gradient_max": max(mean),
        "error_draws": draws,
    }


def distance(found: Params, exact: Params) -> float:
    """The relative distance of two gradients, over all parameters."""
    apart = torch.stack([(found[name].double() - exact[name].double()).norm() for name in exact]).norm()
    return float(apart / torch.stack([value.double().norm() for value in exact.values()]).norm())


def one_task_each(inputs: Inputs) -> Inputs:
    """Each task as the only one of a learner of its own: one call of the engine then gives every task's gradient."""
    params, support, query = inputs
    num_tasks = query.y.shape[1]
    repeated = {name: value.repeat_interleave(num_tasks, 0) for name, value in params.items()}
    support, query = tree_map(lambda leaf: leaf.flatten(0, 1)[:, None], (support, query))
    return repeated, support, query


def gradient(engine: Engine, objective: Objective, params: Params, support: Batch, query: Batch) -> Params:
    """The gradients that an engine gives, by name; every tensor has a leading learner dimension."""
    layout = objective.layout
    return layout.named(engine.gradient(objective, layout.flat(params), support, query, None)[1])


@torch.no_grad()
def exact_gradient(objective: Objective, inputs: Inputs) -> Params:
    """The gradients of learners by `meta_gradient` itself."""
    inner = objective.inner
    exact = functools.partial(meta_gradient, objective.network.loss_fn, inner_lr=inner.lr, inner_steps=inner.steps)
    return vmap(lambda params, support, query: exact(params, support, query)[1])(*inputs)


def doubled(inputs: Inputs) -> Inputs:
    """The same numbers in float64."""
    params, support, query = inputs
    scaled = [batch._replace(x=scale_uint8(batch.x)) for batch in (support, query)]
    return double(params), double(scaled[0]), double(scaled[1])


def _at(gradients: Params, i: int) -> Params:
    return {name: value[i] for name, value in gradients.items()}
