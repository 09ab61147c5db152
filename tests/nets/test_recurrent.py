"""Recurrent layers against torch's own."""

import copy
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from oracles import assert_close, normal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from metaleader import losses
from metaleader.gradient.meta import adapt, meta_gradient
from metaleader.nets.functional import Network
from metaleader.nets.layers import SeededDropout
from metaleader.tasks import Batch

STEPS, WIDTH = 4, 3


class Reads(nn.Module):
    """A net that reads rows (positions, width) and uses the outputs and the last states."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layer, self.call = layer, call or (lambda layer, x: layer(x))
        with torch.no_grad():
            features = self.features(torch.zeros(3, STEPS, WIDTH)).shape[1]
        self.head = nn.Linear(features, 2)

    def features(self, x: Tensor) -> Tensor:
        output, states = self.call(self.layer, x)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([output.flatten(1), *(state.transpose(0, 1).flatten(1) for state in states)], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Cell(nn.Module):
    """A net that calls a cell for each position, from no state or from ones."""

    def __init__(self, cell: nn.Module, from_ones: bool = False) -> None:
        super().__init__()
        self.cell, self.from_ones, self.head = cell, from_ones, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        if self.from_ones:
            state = x.new_ones(len(x), 2)
            state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        for position in range(STEPS):
            state = self.cell(x[:, position], state)
        return self.head(sum(state) if isinstance(state, tuple) else state)


def swapped(layer: Any, x: Tensor) -> Any:
    output, states = layer(x.transpose(0, 1))
    return output.transpose(0, 1), states


def one_by_one(layer: Any, x: Tensor) -> Any:
    outputs, states = zip(*[layer(row) for row in x], strict=True)
    states = [state if isinstance(state, tuple) else (state,) for state in states]
    return torch.stack(outputs), tuple(torch.stack(values, 1) for values in zip(*states, strict=True))


def from_state(layer: Any, x: Tensor) -> Any:
    directions = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    states = [normal("state", directions, 3, size)[:, : len(x)].to(x.dtype) for size in sizes]
    return layer(x, tuple(states) if isinstance(layer, nn.LSTM) else states[0])


KINDS: dict[str, Callable[..., Any]] = {
    "RNN": nn.RNN,
    "RNN, relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
    "LSTM, projection": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options),
}
CALLS: dict[str, Callable[[Callable[..., Any]], nn.Module]] = {
    "one layer": lambda kind: Reads(kind(WIDTH, 3, batch_first=True)),
    "layers, both directions": lambda kind: Reads(kind(WIDTH, 3, 2, batch_first=True, bidirectional=True)),
    "positions first, no bias": lambda kind: Reads(kind(WIDTH, 3, bias=False), swapped),
    "one row at a time": lambda kind: Reads(kind(WIDTH, 3, bidirectional=True), one_by_one),
    "from a state": lambda kind: Reads(kind(WIDTH, 3, 2, batch_first=True, bidirectional=True), from_state),
}
CASES = {f"{kind}: {call}": lambda k=KINDS[kind], c=CALLS[call]: c(k) for kind in KINDS for call in CALLS} | {
    f"{cell.__name__}{', from ones' if ones else ''}": lambda cell=cell, ones=ones: Cell(cell(WIDTH, 2), ones)
    for cell in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    for ones in (False, True)
} | {
    "RNNCell, relu": lambda: Cell(nn.RNNCell(WIDTH, 2, nonlinearity="relu")),
    "GRUCell, no bias": lambda: Cell(nn.GRUCell(WIDTH, 2, bias=False)),
}  # fmt: skip


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def data() -> list[Batch]:
    return [Batch(normal(f"x{i}", 2, 3, STEPS, WIDTH), oracles.labels(f"y{i}", 2, 2, 3)) for i in range(2)]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_value_and_the_meta_gradient_are_those_of_torch(make: Callable[[], nn.Module]):
    module = build(make)
    network = Network(module, losses.cross_entropy)
    support, query = data()
    network.check(network.params(), Batch(*(part[0] for part in support)), "observe")
    assert_close(network.predict(network.params(), query.x[0]), module(query.x[0]).detach(), 1e-12)
    loss_fn = oracles.module_loss(module, F.cross_entropy)
    expected = oracles.unrolled(loss_fn, network.params(), support, query, 0.3, 2)[:2]
    assert_close(meta_gradient(network.loss_fn, network.params(), support, query, 0.3, 2), expected)


def replaying_loss(module: Reads) -> Callable[..., Tensor]:
    """The loss of a layer's copy in pieces of one layer each, torch's own, with the learner's masks between them."""
    mask, kind = SeededDropout(0.4, False), type(module.layer)

    def loss_fn(params: dict[str, Tensor], batch: Batch, noise: Tensor) -> Tensor:
        mask.num_calls, mask.seed = 0, noise
        x, states = batch.x, []
        for layer in range(3):
            x = mask(x.transpose(0, 1)).transpose(0, 1) if layer else x
            own = {
                name.removeprefix("layer.").replace(f"_l{layer}", "_l0"): value
                for name, value in params.items()
                if f"_l{layer}" in name
            }
            piece = kind(x.shape[-1], 3, batch_first=True, bidirectional=True).double()
            x, state = torch.func.functional_call(piece, own, (x,))
            states.append(state if isinstance(state, tuple) else (state,))
        ends = [torch.cat(values).transpose(0, 1).flatten(1) for values in zip(*states, strict=True)]
        output = torch.cat([x.flatten(1), *ends], 1)
        return F.cross_entropy(F.linear(output, params["head.weight"], params["head.bias"]), batch.y)

    return loss_fn


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_dropout_between_layers_is_replayed(kind: Any):
    module: Any = build(lambda: Reads(kind(WIDTH, 3, 3, batch_first=True, bidirectional=True, dropout=0.4)))
    network = Network(module, losses.cross_entropy)
    assert network.has_dropout
    support, query = data()
    noise = torch.arange(100, 106).view(3, 2)
    expected = oracles.unrolled(replaying_loss(module), network.params(), support, query, 0.3, 2, noise=noise)[:2]
    assert_close(meta_gradient(network.loss_fn, network.params(), support, query, 0.3, 2, noise=noise), expected)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_adapted_nets_have_torchs_own_layers_and_the_same_state_dict(kind: Any):
    module = build(lambda: Reads(kind(WIDTH, 3, 2, batch_first=True, dropout=0.4)))
    before = copy.deepcopy(module)
    network = Network(module, losses.cross_entropy)
    batch = Batch(*(part[0] for part in data()[0]))
    params = adapt(network.loss_fn, network.params(), batch, 0.5, 2, noise=torch.arange(2))
    net = network.adapted(params, batch)
    assert type(net.layer) is kind
    assert list(net.state_dict()) == list(before.state_dict())
    before.load_state_dict(net.state_dict(), strict=True)
    assert_close(net(batch.x).detach(), before.eval()(batch.x).detach(), 1e-12)
    assert_close(net(batch.x).detach(), network.predict(params, batch.x).detach(), 1e-12)
    assert_close(net(batch.x[1]).detach(), net(batch.x)[1].detach(), 1e-12)


def test_a_layer_without_parameters_of_its_own_code_stays_torchs():
    assert not Network(nn.Sequential(nn.GRUCell(2, 2)), losses.cross_entropy).own_code


def packed(layer: Any, x: Tensor) -> Any:
    return layer(x) if len(x) == 3 else layer(pack_sequence(list(x)))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: Reads(nn.GRU(WIDTH, 3, batch_first=True), packed),
            "GRU takes no packed sequences here; pass padded rows",
        ),
        (
            lambda: Reads(
                nn.LSTM(WIDTH, 3, batch_first=True), lambda layer, x: layer(x if len(x) == 3 else x[..., :2])
            ),
            "have 3 features",
        ),
        (lambda: Cell(nn.GRUCell(WIDTH + 1, 2)), "GRUCell: the input must have 4 features"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(module: Callable[[], nn.Module], message: str):
    network = Network(build(module), losses.cross_entropy)
    with pytest.raises(ValueError, match=f"observe: the model fails .*{message}"):
        network.check(network.params(), Batch(*(part[0] for part in data()[0])), "observe")
