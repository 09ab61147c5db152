"""Which networks are multilayer perceptrons, and which only look like one."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metaleader as ml
from metaleader.engine.dense.trace import Layer, Perceptron, find_perceptron
from metaleader.nets.functional import Network


class Net(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, between: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(3, 5), nn.Linear(5, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self, self.first(x)))


def found(module: nn.Module, loss: ml.losses.Loss = ml.losses.squared_error) -> Perceptron | None:
    return find_perceptron(Network(module, loss))


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (ml.models.mlp(3, 2, (5,)), "relu"),
        (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), "tanh"),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 5)), nn.GELU(), nn.Sequential(nn.Linear(5, 2))), "gelu"),
        (Net(lambda net, x: torch.relu(x)), "relu"),
        (Net(lambda net, x: F.silu(x)), "silu"),
        (Net(lambda net, x: x.sigmoid()), "sigmoid"),
        (nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.2), nn.Linear(5, 2)), "relu"),
        (Net(lambda net, x: F.leaky_relu(x)), "relu"),
        (Net(lambda net, x: F.leaky_relu(x, negative_slope=0.3)), "relu"),
    ],
)
def test_perceptrons_are_found_and_predict_as_the_module(module: nn.Module, activation: str) -> None:
    perceptron = found(module)
    assert perceptron is not None
    assert perceptron.activation == activation
    assert [layer[2:] for layer in perceptron.layers] == [(3, 5), (5, 2)]
    x = torch.randn(4, 3)
    torch.testing.assert_close(perceptron.predict(dict(module.named_parameters()), x), module(x))


def test_losses() -> None:
    net = ml.models.mlp(3, 2, (5,))
    for loss in (ml.losses.squared_error, F.mse_loss, nn.MSELoss(), nn.MSELoss(reduction="none")):
        perceptron = found(net, loss)
        assert perceptron is not None
        assert not perceptron.labels
    for loss in (nn.MSELoss(reduction="sum"), F.l1_loss, functools.partial(F.mse_loss, reduction="sum")):
        assert found(net, loss) is None


def test_one_layer_images_biases_and_smoothing() -> None:
    loss = functools.partial(ml.losses.cross_entropy, smoothing=0.1)
    perceptron = found(nn.Sequential(nn.Flatten(), nn.Linear(12, 3, bias=False)), loss)
    assert perceptron is not None
    assert perceptron.layers == (Layer("1.weight", None, 12, 3),)
    assert (perceptron.flatten, perceptron.labels, perceptron.smoothing) == (True, True, 0.1)


def shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def frozen() -> nn.Module:
    net = ml.models.mlp(3, 2, (5,))
    next(net.parameters()).requires_grad_(False)
    return net


def hooked() -> nn.Module:
    net = ml.models.mlp(3, 2, (5,))
    net[0].register_forward_hook(lambda module, inputs, output: 2 * output)  # pyright: ignore[reportIndexIssue]
    return net


@pytest.mark.parametrize(
    "module",
    [
        Net(lambda net, x: x),  # no activation
        Net(lambda net, x: x + torch.relu(x)),
        nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(-0.2), nn.Linear(5, 2)),
        nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.2), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)),
        Net(lambda net, x: F.gelu(x, approximate="tanh")),
        Net(lambda net, x: F.relu(torch.tanh(x))),
        Net(lambda net, x: F.dropout(torch.relu(x), 0.5)),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),  # two activations
        nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
        nn.Sequential(nn.Flatten(2), nn.Linear(3, 4)),
        shared(),
        frozen(),
        hooked(),
        ml.models.conv_net(3, 9),
    ],
)
def test_other_networks_are_none(module: nn.Module) -> None:
    assert found(module) is None


def test_other_losses_and_preprocessing_are_none() -> None:
    net = ml.models.mlp(3, 2, (5,))
    assert found(net, lambda prediction, target: (prediction - target).square().mean(1)) is None
    assert find_perceptron(Network(net, ml.losses.squared_error, lambda x: 2 * x)) is None
