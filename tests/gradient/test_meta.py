"""The meta-gradient against plain autograd through the unrolled inner loop, one task at a time, in float64."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from oracles import PeakMemory, assert_close, labels, module_loss, normal, unrolled
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from metaleader import losses, meta_gradient, models
from metaleader.gradient.meta import adapt
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, rng

TASKS, STEPS, RATE = 3, 4, 0.2


class Attention(nn.Module):
    """One attention block over tokens, with a residual, dropout, and a linear head on the mean token."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(4, 12)
        self.own = nn.MultiheadAttention(4, 2, batch_first=True) if kind == "multihead" else None
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.own is not None:
            mixed = self.own(q, k, v, need_weights=False)[0]
        elif self.kind == "fused":
            mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        else:
            mixed = torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1) @ v
        return self.head(self.norm(x + self.drop(mixed)).mean(1))


def mlp(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def small_conv(dropout: float) -> nn.Module:
    net = models.conv_net(3, image_size=8, channels=2, filters=4, layers=2)
    return nn.Sequential(*list(net)[:3], nn.Dropout2d(dropout), *list(net)[3:])  # pyright: ignore[reportArgumentType]


class Case(NamedTuple):
    make: Callable[[float], nn.Module]
    row: tuple[int, ...]


CASES = {
    "mlp": Case(mlp, (3,)),
    "conv": Case(small_conv, (2, 8, 8)),
    "attention by hand": Case(functools.partial(Attention, "plain"), (5, 4)),
    "fused attention": Case(functools.partial(Attention, "fused"), (5, 4)),
    "multihead attention": Case(functools.partial(Attention, "multihead"), (5, 4)),
}


class Setting(NamedTuple):
    """A case made ready: the kernel's loss, the oracle's loss, parameters and data."""

    loss_fn: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    params: dict[str, Tensor]
    support: Batch
    query: Batch


def setting(name: str, dropout: float = 0.0) -> Setting:
    case = CASES[name]
    net = case.make(dropout).double()
    support, query = (
        Batch(normal(part, TASKS, num, *case.row), labels(part, 3, TASKS, num)) for part, num in (("s", 6), ("q", 4))
    )
    network = Network(net, losses.cross_entropy)
    return Setting(network.loss_fn, module_loss(net, F.cross_entropy), network.params(), support, query)


def different_rates(names: list[str]) -> dict[str, float]:
    return {name: 0.05 + 0.3 * i / len(names) for i, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("only", [None, "last"])
@pytest.mark.parametrize("unroll", [False, True])
def test_equal_to_unrolled_autograd(name: str, dropout: float, per_tensor: bool, only: str | None, unroll: bool):
    loss_fn, oracle, params, support, query = setting(name, dropout)
    last = list(params)[-1].rpartition(".")[0]
    moving = [key for key in params if only is None or key.startswith(f"{last}.")]
    assert len(moving) == (2 if only else len(params))
    rate = different_rates(moving) if per_tensor else RATE
    noise = torch.from_numpy(rng("noise").integers(2**31, size=(STEPS + 1, TASKS))) if dropout else None
    options = {"only": only, "noise": noise, "lr_gradient": True, "unroll": unroll}
    found = meta_gradient(loss_fn, params, support, query, rate, STEPS, **options)
    expected = unrolled(oracle, params, support, query, rate, STEPS, moving, noise)
    for part, part_expected in zip(found, expected, strict=True):
        assert_close(part, part_expected)
    if dropout:
        still = meta_gradient(loss_fn, params, support, query, rate, STEPS, only=only)
        assert abs(still[0] - found[0]) > 1e-6


def test_equal_to_unrolled_autograd_on_the_papers_net():
    net = models.conv_net(10).double()
    support, query = (Batch(normal(part, 2, 4, 3, 28, 28), labels(part, 10, 2, 4)) for part in "sq")
    network = Network(net, losses.cross_entropy)
    found = meta_gradient(network.loss_fn, network.params(), support, query, 0.1, 5, lr_gradient=True)
    expected = unrolled(module_loss(net, F.cross_entropy), network.params(), support, query, 0.1, 5)
    for part, part_expected in zip(found, expected, strict=True):
        assert_close(part, part_expected)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("steps", [1, 15, 16, 23, 40])
def test_long_paths_are_exact_too(steps: int, unroll: bool):
    """From 16 steps on the path is not kept whole."""
    loss_fn, oracle, params, support, query = setting("mlp", 0.4)
    noise = torch.from_numpy(rng("noise").integers(2**31, size=(steps + 1, TASKS)))
    found = meta_gradient(loss_fn, params, support, query, RATE, steps, noise=noise, lr_gradient=True, unroll=unroll)
    expected = unrolled(oracle, params, support, query, RATE, steps, noise=noise)
    for part, part_expected in zip(found, expected, strict=True):
        assert_close(part, part_expected)


@pytest.mark.parametrize("steps", [1, 4, 23])
@pytest.mark.parametrize("only", [None, "last"])
@pytest.mark.parametrize("unroll", [False, True])
def test_a_loss_after_every_step_is_exact_too(steps: int, only: str | None, unroll: bool):
    loss_fn, oracle, params, support, query = setting("mlp", 0.4)
    moving = [name for name in params if only is None or name.startswith("5.")]
    noise = torch.from_numpy(rng("noise").integers(2**31, size=(steps + 1, TASKS)))
    options: dict[str, Any] = {"noise": noise, "every_step": True}
    rates, given = different_rates(moving), {"only": only, "lr_gradient": True, "unroll": unroll, **options}
    found = meta_gradient(loss_fn, params, support, query, rates, steps, **given)
    expected = unrolled(oracle, params, support, query, different_rates(moving), steps, moving, **options)
    for part, part_expected in zip(found, expected, strict=True):
        assert_close(part, part_expected)


def test_a_first_order_loss_after_every_step_is_the_mean_of_the_query_gradients():
    loss_fn, _, params, support, query = setting("mlp", 0.0)
    options: dict[str, Any] = {"first_order": True}
    each = [meta_gradient(loss_fn, params, support, query, RATE, s, **options) for s in (1, 2, 3)]
    loss, gradient = meta_gradient(loss_fn, params, support, query, RATE, 3, **options, every_step=True)
    assert_close(loss, torch.stack([one[0] for one in each]).mean())
    assert_close(gradient, {name: torch.stack([one[1][name] for one in each]).mean(0) for name in gradient})


def test_quadratics_have_a_closed_form():
    """Losses (w - c)'A(w - c)/2: lambda_0 = (I - alpha A)^K A (w_K - c)."""
    roots, centres = normal("roots", TASKS, 4, 4), normal("centres", TASKS, 4)
    matrices = roots @ roots.mT / 4
    start = normal("start", 4)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        away = params["w"] - batch[1]
        return 0.5 * away @ batch[0] @ away

    _, gradient = meta_gradient(loss_fn, {"w": start}, (matrices, centres), (matrices, centres), 0.1, 6)
    shrink = torch.linalg.matrix_power(torch.eye(4, dtype=torch.float64) - 0.1 * matrices, 6)
    away = shrink @ (start - centres)[..., None]
    assert_close(gradient["w"], (shrink @ matrices @ away).squeeze(-1).mean(0), 1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv", "fused attention"])
def test_equal_to_central_differences(name: str):
    loss_fn, _, params, support, query = setting(name)
    rates = different_rates(list(params))
    _, gradient, rate_gradient = meta_gradient(loss_fn, params, support, query, rates, STEPS, lr_gradient=True)
    assert isinstance(rate_gradient, dict)

    def loss(shift: float, direction: dict[str, Tensor], rate_direction: dict[str, float]) -> Tensor:
        moved = {key: params[key] + shift * direction[key] for key in params}
        moved_rates = {key: rates[key] + shift * rate_direction[key] for key in rates}
        return sum_of_losses(loss_fn, moved, support, query, moved_rates) / TASKS

    for i in range(3):
        direction = {key: normal(f"direction {i} {key}", *value.shape) for key, value in params.items()}
        rate_direction = {key: float(normal(f"rate {i} {key}", 1)) for key in rates}
        slope = (loss(1e-6, direction, rate_direction) - loss(-1e-6, direction, rate_direction)) / 2e-6
        expected = sum((gradient[key] * direction[key]).sum() for key in params)
        expected += sum(rate_gradient[key] * rate_direction[key] for key in rates)
        assert_close(slope, expected, 1e-5)


def sum_of_losses(loss_fn: Callable[..., Tensor], params: Any, support: Batch, query: Batch, rates: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i in range(TASKS):
        adapted = adapt(loss_fn, params, Batch(*(part[i] for part in support)), rates, STEPS)
        total += loss_fn(adapted, Batch(*(part[i] for part in query)))
    return total


@pytest.mark.parametrize("only", [None, "last"])
def test_first_order_is_the_query_gradient_at_the_adapted_parameters(only: str | None):
    loss_fn, oracle, params, support, query = setting("conv")
    total = dict.fromkeys(params, torch.zeros(()))
    for i in range(TASKS):
        adapted = adapt(oracle, params, Batch(support.x[i], support.y[i]), RATE, STEPS, only=only)
        leaves = {key: value.detach().clone().requires_grad_() for key, value in adapted.items()}
        found = torch.autograd.grad(oracle(leaves, Batch(query.x[i], query.y[i])), list(leaves.values()))
        total = {key: total[key] + part / TASKS for key, part in zip(params, found, strict=True)}
    loss, gradient = meta_gradient(loss_fn, params, support, query, RATE, STEPS, first_order=True, only=only)
    assert_close(gradient, total)
    exact, second = meta_gradient(loss_fn, params, support, query, RATE, STEPS, only=only)
    assert loss == exact
    assert not torch.allclose(gradient["0.weight"], second["0.weight"])


@pytest.mark.parametrize(
    ("unroll", "first_order", "lr_gradient", "expected"),
    [
        (False, False, False, 2 * STEPS + 1),
        (False, True, False, STEPS + 1),
        (False, True, True, 2 * STEPS + 1),
        (True, False, True, STEPS + 1),
    ],
)
def test_number_of_evaluations(unroll: bool, first_order: bool, lr_gradient: Any, expected: int):
    loss_fn, _, params, support, query = setting("mlp")
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return loss_fn(*args)

    meta_gradient(counted, params, support, query, RATE, STEPS, first_order, lr_gradient=lr_gradient, unroll=unroll)
    assert len(calls) == expected


def test_first_order_gradient_of_the_step_size():
    """With one step the second derivatives do not enter it."""
    loss_fn, _, params, support, query = setting("mlp")
    first, exact = (
        meta_gradient(loss_fn, params, support, query, RATE, 1, first_order, lr_gradient=True)[2]
        for first_order in (True, False)
    )
    assert_close(first, exact)


@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_chunked_equals_whole(chunk: int):
    loss_fn, _, params, support, query = setting("conv", 0.4)
    noise = torch.arange((STEPS + 1) * TASKS).view(STEPS + 1, TASKS)
    whole, parts = (
        meta_gradient(loss_fn, params, support, query, RATE, STEPS, chunk=c, noise=noise, lr_gradient=True)
        for c in (None, chunk)
    )
    for part, part_expected in zip(parts, whole, strict=True):
        assert_close(part, part_expected, 1e-12)


def test_chunks_bound_the_memory():
    loss_fn, _, params, support, query = setting("conv")
    with PeakMemory() as whole:
        meta_gradient(loss_fn, params, support, query, RATE, STEPS)
    with PeakMemory() as parts:
        meta_gradient(loss_fn, params, support, query, RATE, STEPS, chunk=1)
    assert parts.peak < 0.6 * whole.peak


@pytest.fixture
def one_thread():
    """Threads wait for each other on a busy machine, many times longer than they work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", ["mlp", "conv", "multihead attention"])
def test_replicas_side_by_side_equal_separate_calls(name: str):
    replicas = [setting(name, 0.4) for _ in range(3)]
    loss_fn = replicas[0].loss_fn
    params = {key: torch.stack([one.params[key] for one in replicas]) for key in replicas[0].params}
    support, query = (
        Batch(torch.stack([part.x * (i + 1) for i in range(3)]), torch.stack([part.y] * 3)) for part in replicas[0][3:]
    )
    noise = torch.arange(3 * (STEPS + 1) * TASKS).view(3, STEPS + 1, TASKS)
    rate = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)

    def one(params: Any, support: Any, query: Any, rate: Tensor, noise: Tensor) -> Any:
        return meta_gradient(loss_fn, params, support, query, rate, STEPS, noise=noise, lr_gradient=True)

    together = vmap(one)(params, support, query, rate, noise)
    for i, replica in enumerate(replicas):
        alone = one(replica.params, Batch(*(p[i] for p in support)), Batch(*(p[i] for p in query)), rate[i], noise[i])
        assert_close(together[0][i], alone[0], 1e-12)
        assert_close({key: value[i] for key, value in together[1].items()}, alone[1], 1e-12)
        assert_close(together[2][i], alone[2], 1e-12)


@pytest.mark.usefixtures("one_thread")
def test_memory_hardly_grows_with_the_number_of_inner_steps():
    network = Network(models.conv_net(10), losses.cross_entropy)
    batch = Batch(normal("x", 5, 10, 3, 28, 28, dtype=torch.float32), labels("y", 10, 5, 10))
    peaks = []
    for steps in (2, 20):
        with PeakMemory() as memory:
            meta_gradient(network.loss_fn, network.params(), batch, batch, 0.1, steps, unroll=False)
        peaks.append(memory.peak)
    # One inner step holds over 10 MB of activations for 5 tasks, which the measurement must see.
    assert peaks[0] > 10e6
    assert peaks[1] <= 1.5 * peaks[0]


@pytest.mark.parametrize(("budget", "unroll"), [(1, False), (10**12, True)])
def test_the_inner_loop_is_unrolled_where_its_activations_fit(
    budget: int, unroll: bool, monkeypatch: pytest.MonkeyPatch
):
    """By the memory of the device; the number of evaluations of the loss shows the form."""
    loss_fn, _, params, support, query = setting("mlp")
    monkeypatch.setattr("metaleader.gradient.meta.default_budget", lambda device: budget)
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return loss_fn(*args)

    found = meta_gradient(counted, params, support, query, RATE, STEPS)
    assert len(calls) == (STEPS + 1 if unroll else 1 + 2 * STEPS + 1)
    expected = meta_gradient(loss_fn, params, support, query, RATE, STEPS, unroll=unroll)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], expected[1][name]) for name in params)


def test_a_tensor_that_the_loss_does_not_use_has_a_zero_gradient():
    for unroll in (False, True):
        params = {"used": torch.ones(2), "unused": torch.ones(3)}
        batch = torch.ones(2, 2)
        loss_fn = lambda params, batch: (params["used"] * batch).sum()  # noqa: E731
        _, gradient = meta_gradient(loss_fn, params, batch, batch, 0.1, 2, unroll=unroll)
        assert gradient["unused"].tolist() == [0.0] * 3
        _, gradient = meta_gradient(lambda params, batch: batch.sum(), params, batch, batch, 0.1, 2, unroll=unroll)
        assert gradient["used"].tolist() == [0.0] * 2


def test_no_inner_steps_give_the_plain_mean_loss():
    loss_fn, oracle, params, support, query = setting("conv")
    empty = Batch(support.x[:, :0], support.y[:, :0])
    loss, gradient, rate_gradient = meta_gradient(loss_fn, params, empty, query, RATE, 0, lr_gradient=True)
    expected = unrolled(oracle, params, support, query, RATE, 0)
    assert_close(loss, expected[0])
    assert_close(gradient, expected[1])
    assert rate_gradient == 0


def test_trees_of_inputs_and_an_untouched_initialisation():
    params = {"a": normal("a", 2), "b": normal("b", 2)}
    before = {key: value.clone() for key, value in params.items()}

    def loss_fn(params: dict[str, Tensor], batch: Any) -> Tensor:
        x, y = batch
        return (x["u"] @ params["a"] + (x["v"][0] @ params["b"]).sin() - y).square().mean()

    batch = ({"u": normal("u", TASKS, 5, 2), "v": (normal("v", TASKS, 5, 2),)}, normal("y", TASKS, 5))
    found = meta_gradient(loss_fn, params, batch, batch, RATE, STEPS)
    assert_close(found[1], unrolled(loss_fn, params, batch, batch, RATE, STEPS)[1])
    assert all(torch.equal(params[key], value) for key, value in before.items())
    assert not any(value.requires_grad for value in found[1].values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"support": Batch(torch.ones(2, 6, 3), torch.ones(2, 6))}, r"share a leading dimension .*\(2, 6, 3\)"),
        ({"query": Batch(torch.ones(0, 4, 3), torch.ones(0, 4))}, "one or more tasks"),
        ({"inner_steps": -1}, "0 or more, got -1"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"noise": torch.zeros(STEPS, TASKS, dtype=torch.int64)}, f"{STEPS + 1} rows"),
        ({"noise": torch.zeros(STEPS + 1, 7, dtype=torch.int64)}, "one column per task"),
        ({"inner_lr": {"nobody": 0.1}}, r"unknown \['nobody'\]"),
        ({"only": "nobody"}, "matches no parameter"),
        ({"loss_fn": lambda params, batch: batch.y.double()}, r"scalar tensor, got shape \(6,\)"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str):
    loss_fn, _, params, support, query = setting("mlp")
    given = {"loss_fn": loss_fn, "params": params, "support": support, "query": query, "inner_steps": STEPS}
    with pytest.raises(ValueError, match=message):
        meta_gradient(**(given | change))
