import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from oracles import assert_close, normal
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from metaleader.gradient.meta import adapt
from metaleader.gradient.selection import moving_names

NET = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
PARAMS = {name: value.detach().clone() for name, value in NET.named_parameters()}
BATCH = (normal("x", 6, 3), normal("y", 6, 2))


def loss_fn(params: Mapping[str, Tensor], batch: Any) -> Tensor:
    return F.mse_loss(functional_call(NET, dict(params), (batch[0],)), batch[1])


def by_sgd(steps: int, rates: Mapping[str, float]) -> dict[str, Tensor]:
    """The same steps by torch.optim."""
    params = {name: value.clone().requires_grad_(name in rates) for name, value in PARAMS.items()}
    optimizer = torch.optim.SGD([{"params": [params[name]], "lr": rate} for name, rate in rates.items()], lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(params, BATCH).backward()
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("only", [None, "last", "*.bias"])
def test_adapt_is_gradient_descent(only: str | None, steps: int):
    moving = {None: list(PARAMS), "last": ["2.weight", "2.bias"], "*.bias": ["0.bias", "2.bias"]}[only]
    adapted = adapt(loss_fn, PARAMS, BATCH, lr=0.3, steps=steps, only=only)
    assert_close(adapted, by_sgd(steps, dict.fromkeys(moving, 0.3)), 1e-13)
    frozen = PARAMS.keys() - set(moving)
    assert all(torch.equal(adapted[name], PARAMS[name]) for name in frozen)
    assert all(torch.equal(adapted[name], PARAMS[name]) == (steps == 0) for name in moving)


def test_a_step_size_for_each_tensor():
    rates = {"0.weight": 0.1, "0.bias": 0.2, "2.weight": 0.3, "2.bias": 0.4}
    assert_close(adapt(loss_fn, PARAMS, BATCH, rates, 4), by_sgd(4, rates), 1e-13)
    tensors = {name: torch.tensor(rate, dtype=torch.float64) for name, rate in rates.items()}
    assert_close(adapt(loss_fn, PARAMS, BATCH, tensors, 4), by_sgd(4, rates), 1e-13)


def test_adapt_leaves_its_arguments_and_can_be_differentiated():
    before = {name: value.clone() for name, value in PARAMS.items()}
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    adapted = adapt(loss_fn, PARAMS, BATCH, rate, 3)
    (slope,) = torch.autograd.grad(loss_fn(adapted, BATCH), rate)
    ahead, behind = (loss_fn(adapt(loss_fn, PARAMS, BATCH, r, 3), BATCH) for r in (0.1 + 1e-6, 0.1 - 1e-6))
    assert_close(slope, (ahead - behind) / 2e-6, 1e-6)
    assert all(torch.equal(PARAMS[name], value) for name, value in before.items())


def test_attention_can_be_differentiated_through_and_mapped():
    """The fused kernels have no second derivative, and warn under vmap."""
    net = nn.MultiheadAttention(4, 2, batch_first=True).double()
    params = dict(net.named_parameters())
    x = normal("tokens", 3, 2, 5, 4)

    def loss_fn(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, dict(params), (x, x, x), {"need_weights": False})[0].square().mean()

    adapted = adapt(loss_fn, params, x[0], 0.1, 2)
    gradients = torch.autograd.grad(loss_fn(adapted, x[0]), list(params.values()))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    together = vmap(lambda x: adapt(loss_fn, params, x, 0.1, 2))(x)
    assert_close(together["in_proj_weight"][0].detach(), adapted["in_proj_weight"].detach(), 1e-12)


def test_many_tasks_at_once():
    many = (normal("xs", 4, 6, 3), normal("ys", 4, 6, 2))
    together = vmap(functools.partial(adapt, loss_fn, PARAMS, steps=3))(many)
    for i in range(4):
        alone = adapt(loss_fn, PARAMS, (many[0][i], many[1][i]), steps=3)
        assert_close({name: value[i] for name, value in together.items()}, alone, 1e-12)


def test_each_step_sees_its_own_noise():
    seen = adapt(lambda params, _, noise: params["w"] * noise, {"w": torch.tensor(0.0)}, None, 1.0, 3,
                 noise=torch.tensor([1, 10, 100]))  # fmt: skip
    assert seen["w"] == -111


@pytest.mark.parametrize(
    ("names", "only", "chosen"),
    [
        (["a.weight", "head.weight", "head.bias"], "last", {"head.weight", "head.bias"}),
        (["a.b.w", "a.c.w"], "last", {"a.c.w"}),
        (["weight", "bias"], "last", {"weight", "bias"}),
        (["w"], "last", {"w"}),
        (["a.weight", "a.bias", "b.bias"], "?.bias", {"a.bias", "b.bias"}),
        (["a", "b"], None, {"a", "b"}),
    ],
)
def test_which_parameters_move(names: list[str], only: str | None, chosen: set[str]):
    assert moving_names(names, only) == chosen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "0 or more, got -1"),
        ({"params": {}}, "params is empty"),
        ({"only": "tail.*"}, r"only='tail.\*' matches no parameter; the parameters are \['0.weight'"),
        ({"lr": {"0.weight": 0.1}}, r"missing \['0.bias', '2.bias', '2.weight'\], unknown \[\]"),
        ({"lr": {"2.weight": 0.1, "2.bias": 0.1, "0.bias": 0.1}, "only": "last"}, r"unknown \['0.bias'\]"),
        ({"loss_fn": lambda params, batch: params["0.bias"]}, r"scalar tensor, got shape \(5,\)"),
        ({"loss_fn": lambda params, batch: 1.0}, "got float"),
        ({"noise": torch.zeros(4)}, r"5 rows, one per evaluation of the loss, got \(4,\)"),
        ({"noise": torch.zeros(())}, "5 rows"),
    ],
)
def test_what_adapt_refuses(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        adapt(**({"loss_fn": loss_fn, "params": PARAMS, "batch": BATCH, "steps": 5} | change))


def test_last_needs_a_layer():
    with pytest.raises(ValueError, match=r"\['u', 'v'\] belong to no layer"):
        moving_names(["u", "v"], "last")
