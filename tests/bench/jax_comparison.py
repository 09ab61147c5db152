"""Compares JAX with this project at small sizes, and prints one line of JSON.

A process of its own: once JAX has run, a fork warns, and other tests fork.
"""

import json
import sys
from dataclasses import replace

import torch

import metaleader as ml
from metaleader.bench.errors import distance
from metaleader.bench.networks.cases import CASES, make_inputs
from metaleader.bench.networks.cell import measure_error
from metaleader.bench.networks.contenders import build
from metaleader.bench.networks.jax_peer import JaxPeer
from metaleader.nets.functional import Network

CPU = torch.device("cpu")


def gradients(name: str, convolution: str) -> dict[str, float]:
    """The distance of JAX's gradient to the project's in float32, and its error per task."""
    case = replace(CASES[name], tasks=2, cpu_tasks=None, support=3, query=3, inner_steps=1)
    inputs = make_inputs(case, CPU)
    peer = JaxPeer(name, case, inputs, CPU, convolution, scan=name == "gru")
    loss_fn = Network(case.elementary.model(), case.loss).loss_fn
    _, ours = ml.meta_gradient(loss_fn, *inputs[:3], inner_lr=case.inner_lr, inner_steps=1)
    return {
        "distance": distance(peer.gradient(inputs.support, inputs.query), ours),
        "error": measure_error(peer, inputs, case.tasks),
    }


def updates() -> dict[str, float]:
    """Three updates with the inner steps as a scan, against torch.func with torch's Adam."""
    case = replace(CASES["mlp"], tasks=2, support=3, query=3, inner_steps=3)
    inputs = make_inputs(case, CPU)
    jax_peer, torch_peer = (build(name, "mlp", case, inputs, CPU) for name in ("jax-scan", "torch-func-eager"))
    for peer in (jax_peer, torch_peer):
        peer.update(3)
    found = {name: torch.tensor(value.tolist()) for name, value in jax_peer.state[0].items()}  # pyright: ignore
    leaves = {name: value.detach() for name, value in torch_peer.leaves.items()}  # pyright: ignore
    return {"moved": distance(leaves, inputs.params), "distance": distance(found, leaves)}


if __name__ == "__main__":
    results = {" ".join(pair): gradients(*pair) for pair in (entry.split(":") for entry in sys.argv[1:])}
    print(json.dumps(results | {"updates": updates()}))
