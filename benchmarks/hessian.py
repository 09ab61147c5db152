"""Time Hessian-vector products: `python benchmarks/hessian.py conv transformer`, each as one CUDA graph on a GPU.

Three forms for the networks of the benchmark, 25 tasks of 10 datapoints: reverse over reverse and forward over reverse
(`jvp` of `grad`) under vmap, and `torch.autograd` over vmap. A line of JSON per network.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from metaleader.bench.networks.cases import CASES, make_inputs
from metaleader.bench.timing import median_ms
from metaleader.engine.cuda_graph import Captured
from metaleader.engine.determinism import repeatable, tf32
from metaleader.gradient.attention import plain_attention
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, to_device

Params = dict[str, Tensor]


def products(network: Network) -> dict[str, Callable[[Params, Params, Batch], Params]]:
    """The forms, as functions of (parameters, directions, batches); every tensor has a task dimension."""
    loss_fn = network.loss_fn

    def reverse(params: Params, direction: Params, batch: Batch) -> Params:
        def slope(params: Params) -> Tensor:
            gradient = grad(loss_fn)(params, batch)
            return torch.stack([(gradient[name] * direction[name]).sum() for name in params]).sum()

        return grad(slope)(params)

    def forward(params: Params, direction: Params, batch: Batch) -> Params:
        return jvp(lambda params: grad(loss_fn)(params, batch), (params,), (direction,))[1]

    def autograd(params: Params, direction: Params, batch: Batch) -> Params:
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            total = vmap(loss_fn)(leaves, batch).sum()
            gradients = torch.autograd.grad(total, list(leaves.values()), create_graph=True)
            found = torch.autograd.grad(gradients, list(leaves.values()), list(direction.values()))
        return dict(zip(leaves, found, strict=True))

    return {"reverse": vmap(reverse), "forward over reverse": vmap(forward), "autograd over vmap": autograd}


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """The median time of each form in ms, and its distance from the first."""
    case = CASES[name].on(device)
    inputs = make_inputs(case, device, 1)
    network = Network(case.model(), case.loss, device=device)
    draw = torch.Generator().manual_seed(0)
    own, batch = to_device((inputs.params, inputs.support), device)
    theta = {name: value.expand(case.tasks, *value.shape).clone() for name, value in own.items()}
    direction = {name: torch.randn(value.shape, generator=draw).to(device) for name, value in theta.items()}
    given: Any = theta, direction, batch
    functions: dict[str, Callable[[], Any]] = {}
    with plain_attention(), repeatable(device), tf32(False), torch.no_grad():
        for form, function in products(network).items():
            program = Captured(function, given, None, compiled=False) if device.type == "cuda" else function
            functions[form] = functools.partial(program, *given)
        found = {form: function() for form, function in functions.items()}
        exact = found["reverse"]
        distances = {form: max(_distance(values[n], exact[n]) for n in exact) for form, values in found.items()}
        return {"network": name, "ms": median_ms(functions, device), "distance": distances}


def _distance(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm().clamp_min(1e-30))


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            print(json.dumps(measure(chosen, where)), flush=True)
        except Exception as error:
            print(json.dumps({"network": chosen, "failed": f"{type(error).__name__}: {str(error)[:200]}"}), flush=True)
