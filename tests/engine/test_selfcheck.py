"""Networks that tracing misreads: the engine's gradient must still be that of the network."""

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metaleader as ml
from metaleader.engine import engine as engine_module
from metaleader.engine.conv.trace import find_chain
from metaleader.engine.engine import Engine
from metaleader.engine.objective import Objective
from metaleader.engine.selfcheck import check_compiled
from metaleader.gradient.meta import Inner
from metaleader.learners import predict_together
from metaleader.nets.functional import Network
from metaleader.tasks import Batch


class Net(nn.Module):
    """One block and a dense layer, with an optional function applied to the features between them."""

    def __init__(self, features: Callable[["Net", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3, track_running_stats=False)
        self.fc, self.spare = nn.Linear(3, 3), nn.Linear(2, 2)
        self.features = features or (lambda net, x: x)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(self, torch.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Reversed(torch.autograd.Function):
    """An identity with a custom backward that negates the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return -slopes[0]


def in_place(net: Net, x: Tensor) -> Tensor:
    x = x - 0.3
    x.relu_()
    return x


def without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * x


def by_type(net: Net, x: Tensor) -> Tensor:
    return 3 * x if torch.is_tensor(x) else x


def own_forward() -> nn.Module:
    net = Net()
    net.forward = lambda x: net.fc(F.relu(net.norm(net.conv(x))).amax((2, 3)))  # pyright: ignore
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "a parameter without use": Net,
    "a call for what it changes in place": lambda: Net(in_place),
    "the head reads a convolution's weight": lambda: Net(lambda net, x: x * net.conv.weight.mean()),
    "the head reads a convolution's bias": lambda: Net(lambda net, x: x * net.conv.bias.sum()),  # pyright: ignore
    "no gradient there": lambda: Net(without_gradient),
    "a backward of its own": lambda: Net(lambda net, x: Reversed.apply(x)),  # pyright: ignore
    "a branch by type": lambda: Net(by_type),
    "parameters past torch": lambda: Net(
        lambda net, x: x * sum(p.sum() for p in net.fc._parameters.values() if p is not None)
    ),
    "a forward of the instance's": own_forward,
}


@pytest.mark.parametrize("build", NETS.values(), ids=NETS.keys())
@pytest.mark.parametrize("learn_lr", [False, True])
def test_the_gradient_is_the_networks(build: Callable[[], nn.Module], learn_lr: bool) -> None:
    network = Network(build().double(), ml.losses.cross_entropy)
    objective = Objective(network, Inner(0.3, 2), learn_lr)
    x, y = oracles.normal("x", 2, 3, 4, 2, 5, 6), oracles.labels("y", 3, 2, 3, 4)
    params = {
        name: torch.stack([value, value + 0.1 * torch.cos(value + 1)]) for name, value in objective.params().items()
    }
    flipped = Batch(x.flip(1), y.flip(1))
    losses, found = oracles.engine_gradient(Engine("eager"), objective, params, Batch(x, y), flipped)
    for r in range(2):
        own = {name: value[r] for name, value in params.items()}
        batches = Batch(x[r], y[r]), Batch(x.flip(1)[r], y.flip(1)[r])
        loss, expected = oracles.objective_gradient(objective, own, *batches)
        torch.testing.assert_close(losses[r], loss, rtol=1e-9, atol=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(found[name][r], value, rtol=1e-8, atol=1e-11, msg=name)


def test_what_is_not_misread_is_a_chain() -> None:
    """A network like those above, but without the misread operation, is a chain."""
    assert find_chain(Network(Net(lambda net, x: 2 * x), ml.losses.cross_entropy)) is not None


def test_predictions_do_not_trust_it_either() -> None:
    """FTL predicts before its first update, so the chain must be checked at the prediction."""
    learner = ml.FTL(lambda: Net(by_type).double(), ml.losses.cross_entropy, inner_lr=0.3)
    learner.begin("first")
    x = oracles.normal("x", 6, 2, 5, 6)
    learner.observe(x, oracles.labels("y", 3, 6))
    found = predict_together([learner], [x], (2,))
    assert found is not None
    torch.testing.assert_close(found["2"][0], learner.adapt(2, "batch")(x).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["hook", "subclass"])
def test_layers_that_are_not_torchs_own_stay(kind: str) -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    conv = nn.Conv2d(2, 3, 3)
    norm = (Doubled if kind == "subclass" else nn.BatchNorm2d)(3, track_running_stats=False)
    if kind == "hook":
        conv.register_forward_hook(lambda module, args, out: torch.square(out))  # pyright: ignore
        norm.register_forward_hook(lambda module, args, out: -out)
    net = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 4, 2)).double()
    network, x = Network(net, ml.losses.cross_entropy), oracles.normal("x", 4, 2, 5, 6)
    torch.testing.assert_close(network.predict(network.params(), x), net(x).detach(), rtol=1e-9, atol=1e-12)


# Compiled gradients.


def test_a_compiled_gradient_must_agree_on_one_of_the_first_tasks() -> None:
    """A compiler's error changes all tasks; a ReLU whose sign rounding decides changes single ones."""
    flat, batch = torch.ones(1, 3), Batch(torch.arange(1.0, 5.0).view(1, 4, 1), torch.zeros(1, 4, 1))

    def gradient(flat: Tensor, support: Any, query: Any, noise: None) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 1), flat * query.x.mean(1)

    def wrong(flat: Tensor, support: Any, query: Any, noise: None) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 1), 1.4 * gradient(flat, support, query, noise)[1]

    def wrong_for_two(flat: Tensor, support: Any, query: Any, noise: None) -> tuple[Tensor, Tensor]:
        return (wrong if float(query.x.min()) <= 2 else gradient)(flat, support, query, noise)

    check_compiled(gradient, gradient, flat, batch, batch)
    check_compiled(wrong_for_two, gradient, flat, batch, batch)
    with pytest.raises(RuntimeError, match=r"differs from the eager one by 0\.4 of its length"):
        check_compiled(wrong, gradient, flat, batch, batch)


def test_a_wrong_compiled_gradient_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A network that is no perceptron, whose compiled gradient has the wrong sign."""

    def negated(objective: Objective, *given: Any) -> Any:
        gradient = engine_module.eager_gradient(objective)

        def compiled(*inputs: Any) -> Any:
            losses, gradients = gradient(*inputs)
            return losses, {name: -value for name, value in gradients.items()}

        return compiled

    monkeypatch.setattr(engine_module, "compiled_gradient", negated)
    monkeypatch.setattr(engine_module, "is_whole", lambda *given: False)
    learners = []
    for mode in ("eager", "compiled"):
        engine = Engine(mode)
        learner = ml.FTML(
            lambda: nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)),
            ml.losses.squared_error, engine=engine, tasks_per_step=3, support=3, query=3, inner_steps=2, meta_steps=2,
        )  # fmt: skip
        learner.observe(oracles.normal("x", 20, 2, dtype=torch.float32), torch.ones(20, 1), task="a")
        learners.append(learner)
        assert engine.mode == "eager"
    assert torch.equal(learners[0].state.flat, learners[1].state.flat)
    assert "'compiled' fails, continuing with 'eager': the compiled gradient differs" in caplog.text
