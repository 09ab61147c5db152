import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import assert_close, labels, normal
from torch import Tensor, nn
from torch.nn import functional as F

from metaleader import losses, models
from metaleader.gradient.meta import adapt, meta_gradient
from metaleader.nets.functional import Network
from metaleader.nets.layers import Linear, SeededDropout, _hash
from metaleader.tasks import Batch

X, Y = normal("x", 6, 3), labels("y", 2, 6)


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2)).double()


def quiet(module: nn.Module, loss: Any = losses.cross_entropy, **options: Any) -> Network:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Network(module, loss, **options)


# Functional form.


@pytest.mark.parametrize("module", [dense(), dense(nn.BatchNorm1d(4)), models.conv_net(2, 8, 1, 3, 2).double()])
def test_predicts_as_the_module_in_training_and_leaves_it_alone(module: nn.Module):
    before = copy.deepcopy(module.state_dict())
    x = normal("images", 6, 1, 8, 8) if isinstance(module[0], nn.Conv2d) else X  # pyright: ignore[reportIndexIssue]
    network = quiet(module)
    prediction, loss = network.predict(network.params(), x), network.loss_fn(network.params(), Batch(x, Y))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    expected = module.train()(x)
    assert_close(prediction, expected.detach(), 1e-12)
    assert_close(loss, F.cross_entropy(expected, Y).detach(), 1e-12)


def test_running_statistics_are_converted_with_a_warning():
    with pytest.warns(UserWarning, match=r"batch norm layers \['1'\] keep running statistics.*current batch"):
        network = Network(dense(nn.BatchNorm1d(4)), losses.cross_entropy)
    assert network.has_batch_norm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Network(dense(nn.BatchNorm1d(4, track_running_stats=False)), losses.cross_entropy).has_batch_norm
        assert not Network(dense(), losses.cross_entropy).has_batch_norm


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (5, 4, 2, 2), (2, 4, 2, 2, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_torchs(shape: tuple[int, ...], affine: bool):
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    layer = kind(4, affine=affine, track_running_stats=False, eps=0.1).double()
    if affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    network = Network(nn.Sequential(layer, nn.Flatten(), nn.Linear(layer(normal("b", *shape))[0].numel(), 1).double()),
                      losses.squared_error)  # fmt: skip
    assert_close(network.module[0](normal("b", *shape)), layer(normal("b", *shape)), 1e-12)  # pyright: ignore


def fuse_linear_layers(network: Network) -> None:
    """Replace the linear layers, as for a network on a GPU."""
    for layer in network.module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_linear_layer_is_torchs_with_its_second_derivative(bias: bool, monkeypatch: pytest.MonkeyPatch):
    """What is compiled for a GPU, for many tasks at once, each with a weight of its own."""
    layer = nn.Linear(3, 2, bias=bias)
    network = Network(nn.Sequential(layer, nn.Tanh(), nn.Linear(2, 1)).double(), losses.squared_error)
    fuse_linear_layers(network)
    batch = Batch(normal("x", 4, 5, 3), normal("y", 4, 5, 1))
    gradient = lambda: meta_gradient(network.loss_fn, network.params(), batch, batch, 0.1, 2)  # noqa: E731
    loss, expected = gradient()
    monkeypatch.setattr(Linear, "fuses", lambda self, input: True)
    found_loss, found = gradient()
    assert_close(found_loss, loss, 1e-13)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-12)


@pytest.mark.parametrize(
    ("rows", "on_gpu", "compiled", "fused"),
    [(2048, True, True, True), (2049, True, True, False), (2048, False, True, False), (2048, True, False, False)],
)
def test_linear_layers_are_fused_where_they_are_small_and_compiled_for_a_gpu(
    rows: int, on_gpu: bool, compiled: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    stand_in: Any = SimpleNamespace(ndim=2, shape=(rows, 8), is_cuda=on_gpu)
    assert Linear(8, 4).fuses(stand_in) is fused


def test_a_layer_used_twice_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.twice = nn.Sequential(self.first, self.norm, self.first, self.norm)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.twice(x))

    module = Tied().double()
    network = quiet(module)
    params = {name: 2 * value for name, value in network.params().items()}
    before = dict(network.module.named_parameters())
    network.check(params, Batch(X, Y), "observe")
    with torch.no_grad():
        for value in module.parameters():
            value.mul_(2)
    assert_close(network.predict(params, X), module.train()(X).detach(), 1e-12)
    assert all(value is before[name] for name, value in network.module.named_parameters())
    module.load_state_dict(network.adapted(params, Batch(X, Y)).state_dict(), strict=True)


# Dropout.


def test_dropout_masks_differ_by_task_step_layer_and_call_and_come_again():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.scale = nn.Dropout(0.5), nn.Parameter(torch.ones(()))
            self.again = nn.Sequential(self.drop, nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            masks = [self.drop(torch.ones(200)), self.again[0](torch.ones(200)), self.again[1](torch.ones(200))]
            return self.scale * torch.stack(masks).flatten()[None] + 0 * x.sum()

    network = Network(Twice(), lambda prediction, target: prediction.mean())
    drawn = {
        (seed, layer): tuple(part.tolist())
        for seed in range(8)
        for layer, part in enumerate(network.predict(network.params(), X, torch.tensor(seed))[0].view(3, 200))
    }
    # Layer i of seed s is layer 0 of seed s + i; seeds of a learner are spread over 31 bits.
    first_layers = {masks for (_, layer), masks in drawn.items() if layer < 2}
    assert len(first_layers) == 16
    again = network.predict(network.params(), X, torch.tensor(3))[0].view(3, 200)
    assert [tuple(part.tolist()) for part in again] == [drawn[3, layer] for layer in range(3)]
    assert len({tuple(part.tolist()) for part in again}) == 3


def test_dropout_draws_differ_between_tasks_and_inner_steps():
    """Each evaluation of the loss sees its own entry of the noise: the loss is the number of ones that are left."""
    network = Network(nn.Sequential(nn.Dropout(0.5), nn.Linear(100, 1)).double(), lambda p, y: p.squeeze(1))
    params = {"1.weight": torch.ones(1, 100, dtype=torch.float64), "1.bias": torch.zeros(1, dtype=torch.float64)}
    batch = Batch(torch.ones(4, 1, 100, dtype=torch.float64), torch.zeros(4, 1))
    noise = torch.arange(1000, 1012).view(3, 4)
    gradients = [
        meta_gradient(network.loss_fn, params, Batch(*(p[i, None] for p in batch)), Batch(*(p[i, None] for p in batch)),
                      0.0, 2, noise=noise[:, i, None])[1]["1.weight"]
        for i in range(4)
    ]  # fmt: skip
    assert len({tuple(gradient[0].tolist()) for gradient in gradients}) == 4
    steps = [network.predict(params, batch.x[0], noise[s, 0]).item() for s in range(3)]
    moved = adapt(network.loss_fn, params, Batch(batch.x[0], batch.y[0]), 1.0, 3, noise=noise[:, 0])
    assert_close(moved["1.weight"].sum(), torch.tensor(100 - sum(steps), dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("channels", [False, True])
def test_dropout_has_the_right_rate_and_scale(p: float, channels: bool):
    layer = SeededDropout(p, channels)
    shape = (20, 50, 3, 3) if channels else (20, 50, 10)
    zeros = []
    for seed in range(200):
        layer.seed = torch.tensor(seed)
        layer.num_calls = 0
        out = layer(torch.ones(shape))
        torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / (1 - p)]))
        per_unit = (out == 0).flatten(2)
        assert not channels or bool((per_unit.all(-1) == per_unit.any(-1)).all())
        zeros.append(per_unit[..., 0].double() if channels else per_unit.double())
    drawn = torch.stack(zeros)
    deviation = (p * (1 - p)) ** 0.5
    # Five standard errors: over all, over the seeds for each position, over the positions for each seed.
    assert abs(drawn.mean() - p) < 5 * deviation / drawn.numel() ** 0.5
    assert (drawn.mean(0) - p).abs().max() < 5.5 * deviation / len(drawn) ** 0.5
    assert (drawn.flatten(1).mean(1) - p).abs().max() < 5 * deviation / drawn[0].numel() ** 0.5
    # Neighbours, in position and in seed, are uncorrelated.
    flat = (drawn - p).flatten(1) / deviation
    for product in (flat[:, 1:] * flat[:, :-1], flat[1:] * flat[:-1]):
        assert abs(product.mean()) < 5 / product.numel() ** 0.5


def test_masks_of_two_seeds_are_not_shifted_copies():
    """Also not for seeds that are mixed into neighbouring numbers."""
    mixed, seeds = _hash(torch.arange(100_000)).sort()
    closest = int(mixed.diff().argmin())
    shift = int(mixed[closest + 1] - mixed[closest])
    assert 0 < shift < 100
    layer = SeededDropout(0.5, False)
    masks = []
    for seed in seeds[closest : closest + 2]:
        layer.seed, layer.num_calls = seed, 0
        masks.append(layer(torch.ones(2000)) == 0)
    for one, other in (masks, masks[::-1]):
        assert abs((one[shift:] == other[:-shift]).double().mean() - 0.5) < 0.06


@pytest.mark.parametrize(("p", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_all(p: float, expected: float):
    assert bool((SeededDropout(p, False)(torch.ones(50)) == expected).all())


# Adapted nets.


def adapted_net(module: nn.Module, data: Batch, statistics: Any = "task", only: str | None = None) -> nn.Module:
    network = quiet(module)
    noise = torch.arange(3) if network.has_dropout else None
    params = adapt(network.loss_fn, network.params(), data, 0.5, 3, only=only, noise=noise)
    return network.adapted(params, data, statistics)


MODULES = {
    "plain": dense(),
    "dropout": dense(nn.Dropout(0.5)),
    "batch norm": dense(nn.BatchNorm1d(4, track_running_stats=False)),
    "running": dense(nn.BatchNorm1d(4), nn.Dropout(0.5)),
    "no affine": dense(nn.BatchNorm1d(4, affine=False)),
}


@pytest.mark.parametrize("name", MODULES)
def test_state_dict_loads_strictly_into_the_original(name: str):
    module = copy.deepcopy(MODULES[name])
    net = adapted_net(module, Batch(X, Y))
    module.load_state_dict(net.state_dict(), strict=True)
    assert not torch.equal(module[0].weight, MODULES[name][0].weight)  # pyright: ignore[reportIndexIssue]
    if name != "batch norm":  # which has no place for statistics
        other = normal("others", 5, 3)
        assert_close(module.eval()(other).detach(), net(other).detach(), 1e-12)


@pytest.mark.parametrize("name", ["running", "batch norm", "no affine"])
def test_statistics_of_the_task_or_of_the_batch(name: str):
    module = MODULES[name]
    by_task, by_batch = (adapted_net(module, Batch(X, Y), statistics) for statistics in ("task", "batch"))
    rows = torch.cat([X[:1], normal("others", 5, 3)])
    assert_close(by_task(rows)[0], by_task(X)[0], 1e-12)
    assert not torch.allclose(by_batch(rows)[0], by_batch(X)[0])
    assert_close(by_task(X), by_batch(X), 1e-12)  # the batch is the task
    assert_close(by_task(X[0]), by_task(X)[0], 1e-12)
    with pytest.raises(ValueError, match="'task' or 'batch', got 'running'"):
        adapted_net(module, Batch(X, Y), "running")


@pytest.mark.parametrize("name", MODULES)
def test_one_row_or_many_and_no_dropout(name: str):
    net = adapted_net(MODULES[name], Batch(X, Y))
    many = net(X)
    assert many.shape == (6, 2)
    assert torch.equal(net(X), many)
    for i in range(6):
        assert net(X[i]).shape == (2,)
        assert_close(net(X[i]), many[i], 1e-12)
        assert_close(net(X[i : i + 1]), many[i : i + 1], 1e-12)


def test_frozen_parameters_stay_bit_identical():
    net = adapted_net(MODULES["running"], Batch(X, Y), only="last")
    before = dict(MODULES["running"].named_parameters())
    same = {name: torch.equal(value, before[name]) for name, value in net.named_parameters()}
    assert same == {name: not name.startswith("3.") for name in before}


def test_linear_layers_of_an_adapted_net_are_torchs_own():
    """Whoever traces, exports or quantizes a net looks for them."""
    network = Network(models.mlp(2, 1), losses.squared_error)
    fuse_linear_layers(network)
    net = network.adapted(network.params(), None)
    assert {type(part) for part in net.modules() if isinstance(part, nn.Linear)} == {nn.Linear}
    assert any(type(part) is Linear for part in network.module.modules())


def test_linear_layers_stay_torchs_own_on_the_cpu():
    network = Network(models.mlp(2, 1), losses.squared_error)
    assert not any(type(part) is Linear for part in network.module.modules())


def test_an_adapted_net_is_a_copy_that_can_be_trained_on():
    network = Network(MODULES["plain"], losses.cross_entropy)
    params = network.params()
    net = network.adapted(params, Batch(X, Y))
    F.cross_entropy(net(X), Y).backward()
    with torch.no_grad():
        for value in net.parameters():
            assert value.grad is not None
            value.zero_()
    assert all(bool(value.any()) for value in (*params.values(), *network.params().values()))


def test_uint8_is_scaled_in_training_and_in_the_adapted_net():
    images = torch.arange(6 * 3, dtype=torch.uint8).view(6, 3)
    network = Network(nn.Linear(3, 2), losses.cross_entropy)
    net = network.adapted(network.params(), Batch(images, Y))
    expected = F.linear(images / 255, network.params()["weight"], network.params()["bias"])
    torch.testing.assert_close(network.predict(network.params(), images), expected)
    torch.testing.assert_close(net(images), expected)
    torch.testing.assert_close(net(images[2]), expected[2])
    doubled = Network(nn.Linear(3, 2), losses.cross_entropy, preprocess=lambda x: 2.0 * x)
    before = doubled.adapted(doubled.params(), Batch(images, Y))(images)
    torch.testing.assert_close(before, F.linear(2.0 * images, doubled.params()["weight"], doubled.params()["bias"]))
    plain = Network(nn.Linear(3, 2), losses.cross_entropy, preprocess=None)
    assert torch.equal(plain.preprocess(images), images)


class TwoInputs(nn.Module):
    """Takes a dict or a tuple of two inputs."""

    def __init__(self, keys: tuple[Any, Any]) -> None:
        super().__init__()
        self.keys = keys
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Tensor:
        return self.a(x[self.keys[0]]) + self.b(x[self.keys[1]])


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_dicts_and_tuples_of_inputs(kind: str):
    parts = (X, torch.arange(12, dtype=torch.uint8).view(6, 2))
    keys = ("u", "v") if kind == "dict" else (0, 1)
    wrap: Callable[[Any], Any] = (lambda pair: dict(zip(keys, pair, strict=True))) if kind == "dict" else tuple
    network = Network(TwoInputs(keys).double(), losses.cross_entropy,
                      preprocess=lambda x: wrap([x[keys[0]], x[keys[1]].double() / 255]))  # fmt: skip
    batch = Batch(wrap(parts), Y)
    network.check(network.params(), batch, "observe")
    net = network.adapted(network.params(), batch)
    many = net(batch.x)
    assert_close(net(wrap([part[3] for part in parts])), many[3], 1e-12)
    stacked = Batch(wrap([part.view(2, 3, -1) for part in parts]), Y.view(2, 3))
    loss, _ = meta_gradient(network.loss_fn, network.params(), stacked, stacked, inner_steps=2)
    assert torch.isfinite(loss)


# What is refused.


class Odd(nn.Module):
    """A linear layer whose forward does something that is no function of the parameters."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.what == "in place":
            self.seen += x.mean(0).detach()
        elif self.what == "assigned":
            self.seen = self.seen + x.mean(0).detach()
        elif self.what == "branch on x":
            return out if x.sum().item() > 0 else -out
        elif self.what == "branch on params":
            return out if out.sum() > 0 else -out
        elif self.what == "random":
            return out + torch.randn_like(out)
        elif self.what == "functional dropout":
            return F.dropout(out, 0.5, self.training)
        return out


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("in place", "in-place operation|changes the buffer 'seen'"),
        ("assigned", "changes the buffer 'seen'"),
        ("branch on x", "item"),
        ("branch on params", "item|control flow"),
        ("random", "random"),
        ("functional dropout", "random"),
    ],
)
def test_a_module_that_is_no_pure_function_is_refused(what: str, why: str):
    network = Network(Odd(what), losses.cross_entropy)
    with pytest.raises(ValueError, match=rf"(?s)Odd cannot be run as a pure function .*({why}).*Layers must not"):
        network.check(network.params(), Batch(X.float(), Y), "observe")
    assert not network.module.seen.any()  # pyright: ignore[reportCallIssue]


def test_a_pure_module_is_not_refused():
    network = Network(Odd("nothing"), losses.cross_entropy)
    network.check(network.params(), Batch(X.float(), Y), "observe")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)),
            r"layer '1' \(LazyLinear\) is lazy .* call the model on one batch",
        ),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.AlphaDropout()), r"layer '1' \(AlphaDropout\) .*use nn.Dropout"),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.FeatureAlphaDropout()), "FeatureAlphaDropout"),
        (
            lambda: nn.Sequential(nn.Linear(3, 2), nn.RReLU()),
            "RReLU.* draws slopes that cannot be replayed; use nn.Leaky",
        ),
        (lambda: nn.EmbeddingBag(3, 2, max_norm=1.0), "EmbeddingBag.* changes its weights .*max_norm=None"),
        (lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "Embedding.* build it with scale_grad_by_freq=False"),
        (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), "Sequential has no parameters to learn"),
        (lambda: "a net", "must be an nn.Module, .* got str"),
    ],
)
def test_modules_refused_at_once(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        Network(make(), losses.cross_entropy)


@pytest.mark.parametrize(
    ("loss", "x", "y", "message"),
    [
        (losses.cross_entropy, X, Y, r"x is torch.float64, the model's parameters are torch.float32; convert with"),
        (losses.cross_entropy, X.float()[:, :2], Y, r"observe: the model fails on x with rows of float32\[2\]"),
        (losses.cross_entropy, X.float(), Y + 1, r"labels must lie in 0..1, .* 2 outputs; got 1..2"),
        (losses.cross_entropy, X.float(), Y - 1, r"got -1..0"),
        (losses.cross_entropy, X.float(), Y.float(), r"observe: cross_entropy takes integer labels"),
        (losses.squared_error, X.float(), torch.ones(6), r"observe: squared_error takes equal shapes"),
        (lambda p, y: p, X.float(), Y, r"observe: the loss must return one value per datapoint, .* got \(2, 2\)"),
        (lambda p, y: 1.0, X.float(), Y, "got float"),
        (F.nll_loss, X.float(), torch.ones(6), "observe: the loss fails on prediction"),
    ],
)
def test_bad_data_or_loss(loss: Any, x: Tensor, y: Tensor, message: str):
    network = Network(nn.Linear(3, 2), loss)
    with pytest.raises(ValueError, match=message):
        network.check(network.params(), Batch(x, y), "observe")


def test_a_loss_with_one_value_per_output():
    """For two outputs and two datapoints it has the shape of one value per datapoint."""
    network = Network(nn.Linear(3, 2), lambda prediction, y: (prediction - y).square().mean(0))
    with pytest.raises(
        ValueError, match=r"observe: the loss must return one value per datapoint, \(3,\), .* got \(2,\)"
    ):
        network.check(network.params(), Batch(X.float()[:2], torch.zeros(2, 2)), "observe")


def test_one_number_is_no_row():
    """Alone it would pass for the one feature of one datapoint."""
    network = Network(nn.Linear(1, 1), losses.squared_error)
    with pytest.raises(ValueError, match=r"the model fails on x with rows of float32\[\]"):
        network.check(network.params(), Batch(torch.zeros(1), torch.zeros(1)), "observe")
    network.check(network.params(), Batch(torch.zeros(1, 1), torch.zeros(1, 1)), "observe")


@pytest.mark.parametrize(("output", "got"), [(lambda x: (x,), "tuple"), (lambda x: x.sum(0), r"\(3,\)")])
def test_a_model_must_return_one_row_a_datapoint(output: Callable[[Tensor], Any], got: str):
    class Strange(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return output(input)

    network = Network(Strange(3, 2), losses.cross_entropy)
    with pytest.raises(ValueError, match=f"one row per datapoint, got {got}"):
        network.check(network.params(), Batch(X.float(), Y), "observe")


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, lambda p, y: (p - y).square().mean(1)])
def test_targets_without_a_column_that_a_loss_would_broadcast(loss: Any):
    network = Network(nn.Linear(3, 1), loss)
    with pytest.raises(
        ValueError, match=r"observe: the model returns \(N, 1\) and y has the shape \(N,\), .*pass y of"
    ):
        network.check(network.params(), Batch(X.float(), torch.rand(6)), "observe")
    network.check(network.params(), Batch(X.float(), torch.rand(6, 1)), "observe")


@pytest.mark.parametrize(
    "loss",
    [
        losses.squared_error,
        lambda p, y: (p.squeeze(1) - y).square().mean(),
        lambda p, y: F.binary_cross_entropy_with_logits(p[:, 0], y),
    ],
)
def test_losses_that_take_targets_without_a_column(loss: Any):
    network = Network(nn.Linear(3, 1), loss)
    network.check(network.params(), Batch(X.float(), torch.rand(6)), "observe")
