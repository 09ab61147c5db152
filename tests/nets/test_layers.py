"""Layers that replace torch's."""

from typing import Any

import pytest
import torch
from oracles import assert_close, normal
from torch import nn
from torch.nn import functional as F

from metaleader import losses, meta_gradient
from metaleader.nets import composed, layers
from metaleader.nets.functional import Network
from metaleader.tasks import Batch


@pytest.mark.parametrize("unroll", [False, True])
def test_convolution_as_a_product_on_a_gpu(unroll: bool, monkeypatch: pytest.MonkeyPatch):
    """The form for graphs of eager operations on a GPU, here on the CPU."""
    net = nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(0, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)
    )
    network = Network(net.double(), losses.squared_error)
    batch = Batch(normal("product", 3, 4, 2, 5, 5), normal("product y", 3, 4, 2))
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(layers, "_is_batched_on_gpu", lambda x, on_gpu=on_gpu: on_gpu)
        found.append(meta_gradient(network.loss_fn, network.params(), batch, batch, 0.2, 3, unroll=unroll))
    assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((7,), {"size": 12}),
        ((7, 5), {"size": (3, 11)}),
        ((7, 5), {"scale_factor": 1.7}),
        ((4, 3, 5), {"scale_factor": (2.0, 0.6, 1.3), "recompute_scale_factor": True}),
        ((6, 6), {"scale_factor": 0.4, "recompute_scale_factor": False}),
    ],
)
def test_nearest_exact_interpolation_is_torchs(shape: tuple[int, ...], options: dict[str, Any]):
    x = normal("interpolated", 2, 3, *shape)
    expected = F.interpolate(x, mode="nearest-exact", **options)
    assert torch.equal(composed.interpolate(x, mode="nearest-exact", **options), expected)
    batched = torch.func.vmap(lambda x: composed.interpolate(x, mode="nearest-exact", **options))(x[None])
    assert torch.equal(batched[0], expected)


def test_other_interpolations_are_torchs():
    x = normal("interpolated", 2, 3, 5, 4)
    assert torch.equal(composed.interpolate(x, 7), F.interpolate(x, 7))
    options: dict[str, Any] = {"scale_factor": 2.5, "mode": "bilinear", "align_corners": True}
    assert torch.equal(composed.interpolate(x, **options), F.interpolate(x, **options))
    with pytest.raises(ValueError, match="align_corners"):
        composed.interpolate(x, 7, mode="nearest-exact", align_corners=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch, for the whole module
def test_a_compiled_program_is_refused() -> None:
    traced: Any = torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"is a compiled program; pass the module that torch.jit was given"):
        Network(traced, losses.squared_error)
