"""Compare the Triton kernels with the same passes in torch; without a GPU, Triton's interpreter runs them."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor, nn

import metaleader as ml
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.torch_ops import TorchPasses, input_patches
from metaleader.engine.conv.trace import find_chain
from metaleader.nets.functional import Network

KERNELS = """
import sys, torch
from tests.engine.conv.triton import test_launch
from metaleader.engine.conv.triton import TritonPasses, launch
for model, size in test_launch.SHAPES[-1 :: -int(sys.argv[2])]:
    test_launch.compare_passes(model(), size, TritonPasses, torch.device(sys.argv[1]), images=2)
model, size = test_launch.SHAPES[-1]
# The tiles used with many cells; this shape has strides of one, two and three.
launch._input_tile = lambda cells, layer: (16, layer.stride**2, 2, 1)
test_launch.compare_passes(model(), size, TritonPasses, torch.device(sys.argv[1]), images=1)
test_launch.find_what_is_no_number(TritonPasses, torch.device(sys.argv[1]))
print("all agree")
"""


def wide_net() -> nn.Module:
    """Up to 64 channels, kernel sizes of three and four, and a stride that is not a power of two."""
    layers: list[nn.Module] = []
    for inputs, filters, kernel, stride, padding in [(2, 64, 3, 1, 1), (64, 16, 3, 2, 0), (16, 32, 4, 3, 2)]:
        layers += [
            nn.Conv2d(inputs, filters, kernel, stride, padding),
            nn.BatchNorm2d(filters, track_running_stats=False),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))


SHAPES: list[tuple[Callable[[], nn.Module], tuple[int, int]]] = [
    (functools.partial(ml.models.conv_net, 3, 9, 3, filters=32, layers=3), (9, 9)),
    (functools.partial(ml.models.pose_net, filters=16, strides=(2, 2, 1)), (13, 11)),
    (wide_net, (11, 8)),
]


def compare_passes(model: nn.Module, size: tuple[int, int], make: Any, device: torch.device, images: int = 3) -> None:
    """Compare every pass of the kernels in float32 with torch operations in float64."""
    chain = find_chain(Network(model, ml.losses.squared_error))
    assert chain is not None
    plan = Plan(chain.layers, size, 16)
    slow, fast = TorchPasses(plan), make(plan)
    assert fast.takes(chain.layers)
    spread = lambda name, *shape: oracles.normal(name, *shape, dtype=torch.float32).to(device)  # noqa: E731
    names = {name: value[None].to(device) for name, value in chain.network.params().items()}
    flat = plan.flatten(names) + 0.1 * spread("flat", 2, plan.total)
    v, x = 0.1 * spread("v", 2, plan.total), spread("x", 2, images, chain.layers[0].channels, *size)

    def run(passes: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        theta, direction, patches = flat.to(dtype), v.to(dtype), input_patches(plan, x.to(dtype))
        y, saved = passes.forward(theta, patches)
        slope, slope_dot = (spread(name, *y.shape).to(dtype) for name in ("slope", "slope_dot"))
        parts = passes.backward(theta, saved, slope)
        y_dot, moved = passes.forward_tangent(theta, saved, direction)
        product = passes.backward_tangent(theta, saved, direction, moved, slope_dot)
        down = passes.descend(theta, parts, direction[:1])
        down_each = passes.descend(theta, parts, direction)
        found = {"y": y, "gradient": passes.whole(parts), "y_dot": y_dot, "product": passes.whole(product)}
        return found | {"descend": down, "descend, step sizes of each task": down_each}

    found, expected = run(fast, torch.float32), run(slow, torch.float64)
    for name, value in expected.items():
        error = float((found[name].double() - value).norm() / value.norm())
        assert error < 5e-6, f"{name} is off by {error:.1e}"


def find_what_is_no_number(make: Any, device: torch.device) -> None:
    """A NaN in the slope, with the bit pattern that a GPU produces, gives NaN in the gradient of its task only."""
    chain = find_chain(Network(ml.models.conv_net(3, 9, 3, filters=16, layers=3), ml.losses.squared_error))
    assert chain is not None
    passes = make(Plan(chain.layers, (9, 9), 16))
    params = {name: value[None].to(device) for name, value in chain.network.params().items()}
    flat = passes.plan.flatten(params).expand(2, -1).contiguous()
    y, saved = passes.forward(flat, input_patches(passes.plan, torch.ones(2, 3, 3, 9, 9, device=device)))
    slope = torch.ones_like(y)
    slope[0, 0, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    gradient = passes.whole(passes.backward(flat, saved, slope))
    assert gradient[0].isnan().any()
    assert not gradient[1].isnan().any()


@pytest.mark.parametrize("every", [len(SHAPES), pytest.param(1, marks=pytest.mark.torture)])
def test_kernels_in_the_interpreter(every: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KERNELS, "cpu", str(every)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "all agree\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("images", [3, 40, 180])
def test_kernels_on_the_gpu(images: int, cuda: torch.device) -> None:
    from metaleader.engine.conv.triton import TritonPasses

    for model, size in [*SHAPES, (functools.partial(ml.models.conv_net, 10), (28, 28)), (ml.models.pose_net, (64, 64))]:
        compare_passes(model().to(cuda), size, TritonPasses, cuda, images)
    find_what_is_no_number(TritonPasses, cuda)
