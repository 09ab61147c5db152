import pytest
import torch
from torch.nn import functional as F

from metaleader import losses, meta_gradient, models
from metaleader.nets.functional import Network
from metaleader.tasks import Batch

# Parameters by hand. Conv block: in * out * k * k weights, then scale and shift; dense: in * out + out.
COUNTS = {
    "mlp": (models.mlp(1, 1), (1 * 40 + 40) + (40 * 40 + 40) + (40 * 1 + 1)),
    "linear": (models.mlp(3, 2, hidden=()), 3 * 2 + 2),
    "conv": (models.conv_net(10), (3 * 32 * 9 + 64) + 4 * (32 * 32 * 9 + 64) + (32 * 10 + 10)),
    # 16 -> 8 -> 4 -> 2 leaves 2x2 maps of 5 filters
    "small conv": (models.conv_net(3, 16, 1, 5, 3), (1 * 5 * 9 + 10) + 2 * (5 * 5 * 9 + 10) + (5 * 4 * 3 + 3)),
    "pose": (
        models.pose_net(),
        (3 * 16 * 25 + 32) + 3 * (16 * 16 * 25 + 32) + (32 * 200 + 400) + (200 * 200 + 400) + (200 * 4 + 4),
    ),
    # A bias in the place of scale and shift.
    "pose, dense layers without norm": (
        models.pose_net(dense_norm=False),
        (3 * 16 * 25 + 32) + 3 * (16 * 16 * 25 + 32) + (32 * 200 + 200) + (200 * 200 + 200) + (200 * 4 + 4),
    ),
}
SHAPES = {"mlp": (1,), "linear": (3,), "conv": (3, 28, 28), "small conv": (1, 16, 16), "pose": (3, 64, 64)}
SHAPES["pose, dense layers without norm"] = SHAPES["pose"]
OUTPUTS = {"mlp": 1, "linear": 2, "conv": 10, "small conv": 3, "pose": 4, "pose, dense layers without norm": 4}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_and_outputs(name: str):
    net, count = COUNTS[name]
    assert sum(value.numel() for value in net.parameters()) == count
    assert net(torch.rand(4, *SHAPES[name])).shape == (4, OUTPUTS[name])
    assert list(net.state_dict())[-2:] == ["head.weight", "head.bias"]
    assert not list(net.buffers())


@pytest.mark.parametrize("name", COUNTS)
def test_goes_through_the_kernel_unchanged(name: str):
    net = COUNTS[name][0]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    network = Network(net, losses.squared_error)
    batch = Batch(torch.rand(2, 3, *SHAPES[name]), torch.rand(2, 3, OUTPUTS[name]))
    params = network.params()
    loss, gradient = meta_gradient(network.loss_fn, params, batch, batch, inner_steps=0)
    expected = torch.stack([F.mse_loss(net(x), y) for x, y in zip(*batch, strict=True)]).mean()
    torch.testing.assert_close(loss, expected.detach())
    assert {key: value.shape for key, value in gradient.items()} == {k: v.shape for k, v in before.items()}
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("size", [28, 32, 17, 1])
def test_conv_net_of_any_image_size(size: int):
    assert models.conv_net(5, image_size=size, filters=2)(torch.rand(2, 3, size, size)).shape == (2, 5)


def test_soft_argmax_finds_a_peak_and_the_middle():
    maps = torch.zeros(1, 3, 5, 9)
    maps[0, 0, 4, 2] = maps[0, 1, 0, 8] = 50.0
    x, y = models.SoftArgmax()(maps)[0].view(2, 3)
    torch.testing.assert_close(x, torch.tensor([-0.5, 1.0, 0.0]))
    torch.testing.assert_close(y, torch.tensor([1.0, -1.0, 0.0]))
