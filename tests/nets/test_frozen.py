"""Parameters with requires_grad=False stay as they are."""

import copy
import warnings
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import assert_close, normal
from torch import Tensor, nn
from torch.nn import functional as F

import metaleader as ml
from metaleader import losses
from metaleader.gradient.meta import meta_gradient
from metaleader.nets.functional import Network
from metaleader.tasks import Batch

OPTIONS: dict[str, Any] = {"inner_lr": 0.1, "inner_steps": 2, "meta_steps": 2, "tasks_per_step": 3, "support": 2,
                           "query": 2}  # fmt: skip


class Backbone(nn.Module):
    """A frozen convolution, norm and recurrent layer below a head; one frozen tensor has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.rnn = nn.GRU(2, 2, batch_first=True)
        self.again, self.embedding = nn.Linear(2, 2), nn.Linear(2, 2)
        self.again.weight = self.embedding.weight
        for part in (self.conv, self.norm, self.rnn, self.embedding):
            part.requires_grad_(False)
        self.norm.bias.requires_grad_(True)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.conv(x[:, None]))).flatten(2).mT
        return self.head(self.embedding(torch.tanh(self.again(self.rnn(x)[0][:, -1]))))


def backbone(seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    return Backbone()


def quiet(make: Any, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="batch norm layers")
        return make(*args, **options)


def learner(module: nn.Module, kind: Any = ml.FTML, **options: Any) -> Any:
    return quiet(kind, module, losses.cross_entropy, **OPTIONS | options)


def feed(learner: Any, tasks: range) -> None:
    for i in tasks:
        x = normal(f"x{i}", 4, 3, 3, dtype=torch.float32)
        learner.observe(x, oracles.labels(f"y{i}", 2, 4), task=f"task {i}")


LEARNED = {"norm.bias", "again.bias", "head.weight", "head.bias"}


def test_the_meta_gradient_is_that_of_the_other_parameters():
    module = backbone().double()
    network = quiet(Network, module, losses.cross_entropy)
    params = network.params()
    assert set(params) == LEARNED
    support, query = (Batch(normal(f"x{i}", 2, 4, 3, 3), oracles.labels(f"y{i}", 2, 2, 4)) for i in range(2))
    network.check(params, Batch(support.x[0], support.y[0]), "observe")
    expected = oracles.unrolled(oracles.module_loss(module, F.cross_entropy), params, support, query, 0.3, 2)[:2]
    assert_close(meta_gradient(network.loss_fn, params, support, query, 0.3, 2), expected)


def test_frozen_parameters_stay_and_the_others_are_learned():
    module = backbone()
    before = copy.deepcopy(dict(module.named_parameters()))
    one = learner(module)
    feed(one, range(3))
    assert set(one.params) == LEARNED
    assert one.state.flat.numel() == sum(before[name].numel() for name in LEARNED)
    net = one.adapt(task="task 0")
    assert {name: value.requires_grad for name, value in net.named_parameters()} == {
        name: name in LEARNED for name in before
    }
    same = {name for name, value in net.named_parameters() if torch.equal(value, before[name])}
    assert same == set(before) - LEARNED
    assert net.again.weight is net.embedding.weight
    backbone(1).load_state_dict(net.state_dict(), strict=True)
    x = normal("x", 4, 3, 3, dtype=torch.float32)
    assert_close(one.predict(x, task="task 0"), net(x).detach(), 1e-5)


def test_frozen_parameters_are_stored_once():
    one = learner(backbone())
    feed(one, range(2))
    with one.network._copies.borrow() as module:
        pairs = zip(module.named_buffers(), one.network.module.named_buffers(), strict=True)
        assert all(copied is buffer for (_, copied), (_, buffer) in pairs)


def test_a_file_holds_the_frozen_parameters(tmp_path: Path):
    one = learner(backbone())
    feed(one, range(2))
    one.save(tmp_path / "learner.safetensors")
    loaded = quiet(ml.FTML.load, tmp_path / "learner.safetensors", backbone(1), losses.cross_entropy)
    assert one.network.is_like(loaded.network)
    for each in (one, loaded):
        feed(each, range(2, 3))
    assert torch.equal(one.state.flat, loaded.state.flat)
    x = normal("x", 4, 3, 3, dtype=torch.float32)
    assert torch.equal(one.predict(x, task="task 1"), loaded.predict(x, task="task 1"))


def test_features_are_those_of_the_frozen_parameters_of_a_state():
    def predicting(scale: float) -> ml.Learner:
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        for i, value in enumerate(net.parameters()):
            nn.init.constant_(value, scale / (i + 2))
        net[0].requires_grad_(False)
        one = ml.FTML(net, losses.squared_error, adaptation=ml.BayesianHead(), support=3, query=3)
        x = normal("x", 8, 2, dtype=torch.float32)
        one.observe(x, x.sum(1, keepdim=True), task="task", update=False)
        return one

    one, other = predicting(1.0), predicting(3.0)
    x = normal("new x", 4, 2, dtype=torch.float32)
    before = one.predict(x, task="task")
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.predict(x, task="task"), other.predict(x, task="task"))
    assert not torch.equal(one.predict(x, task="task"), before)


def test_a_state_with_other_frozen_parameters_is_refused():
    one, other = learner(backbone()), backbone()
    other.rnn.requires_grad_(True)
    with pytest.raises(ValueError, match=r"the state belongs to another model: only in the model: rnn.weight_ih_l0"):
        learner(other).load_state_dict(one.state_dict())
    state, before = one.state_dict(), one.network.frozen_params()
    wide = {**state["frozen"], "conv.weight": torch.zeros(3)}
    for frozen in ({}, {"conv.weight": torch.zeros(2, 1, 2, 2)}, wide):
        with pytest.raises(ValueError, match=r"the state has the frozen parameters \[.*names, shapes and dtypes"):
            one.load_state_dict({**state, "frozen": frozen})
    assert all(torch.equal(value, before[name]) for name, value in one.network.frozen_params().items())


def test_networks_with_other_frozen_values_are_not_alike():
    one, same, other = (learner(backbone(seed)).network for seed in (0, 0, 1))
    assert one.is_like(same)
    assert not one.is_like(other)


def test_from_scratch_keeps_frozen_parameters():
    one = quiet(ml.Scratch, backbone, losses.cross_entropy, meta_steps=2, query=2)
    before = one.network.frozen_params()
    for i in range(2):
        one.begin(f"task {i}")
        one.observe(normal(f"x{i}", 4, 3, 3, dtype=torch.float32), oracles.labels(f"y{i}", 2, 4))
    assert all(torch.equal(value, before[name]) for name, value in one.network.frozen_params().items())


def test_a_model_without_anything_to_learn_is_refused():
    with pytest.raises(ValueError, match="Linear has no parameters to learn: all have requires_grad=False"):
        Network(nn.Linear(2, 2).requires_grad_(False), losses.cross_entropy)


def test_a_frozen_convolution_is_no_chain():
    from metaleader.engine.conv.trace import find_chain

    net = ml.models.conv_net(2, 8, 1, 3, 2)
    assert find_chain(quiet(Network, net, losses.cross_entropy)) is not None
    next(net.parameters()).requires_grad_(False)
    assert find_chain(quiet(Network, net, losses.cross_entropy)) is None
