"""Layers that replace torch's."""

import pytest
from oracles import assert_close, normal
from torch import nn

from metaleader import losses, meta_gradient
from metaleader.nets import layers
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
