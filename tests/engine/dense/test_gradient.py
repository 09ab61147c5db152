"""The kernels against `meta_gradient` in float64; without a GPU, as C++ on the CPU."""

import copy
import functools
import itertools
import shutil
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from host_kernels import HostKernels
from torch import nn

import metaleader as ml
from metaleader.engine import cpp_source, programs
from metaleader.engine.dense import gradient
from metaleader.engine.dense.gradient import MAX_ROWS, MAX_WIDTH, DenseGradient
from metaleader.engine.dense.trace import find_perceptron
from metaleader.engine.engine import Engine, Mode
from metaleader.engine.objective import Objective
from metaleader.gradient.meta import Inner, meta_gradient
from metaleader.learners import update_together
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, double

CPU = torch.device("cpu")
ACTIVATIONS = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "leaky": nn.LeakyReLU,
}


def make(
    widths: tuple[int, ...], activation: str, labels: bool, inner: Inner, device: torch.device, bias: bool = True
) -> Objective:
    layers: list[nn.Module] = []
    for i, pair in enumerate(itertools.pairwise(widths)):
        layers += [ACTIVATIONS[activation]()] if i else []
        layers.append(nn.Linear(*pair, bias=bias))
    loss = functools.partial(ml.losses.cross_entropy, smoothing=0.1) if labels else ml.losses.squared_error
    return Objective(Network(nn.Sequential(*layers), loss, device=device), inner)


def draw(name: str, widths: tuple[int, ...], labels: bool, *shape: int) -> Batch:
    x = oracles.normal(f"{name} x", *shape, widths[0], dtype=torch.float32)
    if labels:
        return Batch(x, oracles.labels(f"{name} y", widths[-1], *shape))
    return Batch(x, oracles.normal(f"{name} y", *shape, widths[-1], dtype=torch.float32))


def compare(
    widths: tuple[int, ...],
    activation: str,
    device: torch.device,
    labels: bool = False,
    bias: bool = True,
    shape: tuple[int, int, int, int] = (2, 3, 5, 7),
    **options: Any,
) -> None:
    """The gradients of learners side by side, of kernels in float32 and of `meta_gradient` in float64."""
    inner = Inner(**{"lr": 0.1, "steps": 2} | options)
    objective = make(widths, activation, labels, inner, device, bias)
    learners, tasks, num_support, num_query = shape
    support = Batch(*(v.to(device) for v in draw("support", widths, labels, learners, tasks, num_support)))
    query = Batch(*(v.to(device) for v in draw("query", widths, labels, learners, tasks, num_query)))
    flat = objective.layout.flat(objective.network.params())
    flat = flat + 0.1 * oracles.normal("flat", learners, len(flat), dtype=torch.float32).to(device)
    program = programs.Perceptrons().gradient(objective, flat, support, query)
    assert program is not None, (widths, activation, labels, options)
    values, gradients = program(flat, support, query, None)
    for r in range(learners):
        params = double(objective.layout.named(flat[r]))
        own_support, own_query = (double(Batch(batch.x[r], batch.y[r])) for batch in (support, query))
        loss, expected = meta_gradient(
            _loss_in_double(objective.network), params, own_support, own_query, inner.lr, inner.steps, only=inner.only,
            first_order=inner.first_order,
        )  # fmt: skip
        expected = objective.layout.flat(expected)
        error = float((gradients[r] - expected).norm() / expected.norm())
        assert error < 3e-6, (widths, activation, labels, options, error)
        assert float((values[0, r] - loss).abs()) < 1e-6 * (1 + float(loss.abs()))
        assert float(values[1, r]) == pytest.approx(float(expected.norm()), rel=1e-5)


def _loss_in_double(network: Network) -> Any:
    return lambda params, batch: network.mean_loss(network.predict(params, batch.x), batch.y)


def compare_all(device: torch.device) -> None:
    for i, activation in enumerate(ACTIVATIONS):
        compare((3, 9, 4), activation, device, labels=i % 2 == 0)
    compare((1, 20, 20, 1), "tanh", device, steps=3)
    compare((2, 9, 9, 2), "relu", device, only="last")
    compare((2, 9, 2), "silu", device, lr={"0.weight": 0.2, "0.bias": 0.05, "2.weight": 0.1, "2.bias": 0.3})
    compare((2, 9, 2), "gelu", device, first_order=True)
    compare((2, 9, 3), "silu", device, labels=True, steps=0)
    compare((4, 3), "relu", device, bias=False)
    compare((4, 40, 3), "silu", device, labels=True, shape=(1, 2, 18, 1), steps=1)


def compare_learners(device: torch.device, plain: Mode, kernels: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner with and without the kernels, and three learners side by side beside one."""

    def learner(seed: int, mode: Mode) -> ml.FTML:
        settings: dict[str, Any] = {"meta_steps": 2, "tasks_per_step": 4, "support": 3, "query": 3, "inner_lr": 0.05}
        built = ml.FTML(
            lambda: ml.models.mlp(1, 1, (8,)), ml.losses.squared_error, **settings, seed=seed, device=device,
            engine=Engine(mode, device=device),
        )  # fmt: skip
        for name in ("a", "b", "c"):
            x = oracles.normal(f"x {name}", 10, 1, dtype=torch.float32)
            built.observe(x, torch.sin(x + len(name)), task=name, update=False)
        return built

    first, second = learner(0, plain), learner(0, kernels)
    with monkeypatch.context() as patch:
        patch.setattr(programs.Perceptrons, "gradient", lambda *given: None)
        first.update()
    second.update()
    assert second.engine.mode == kernels
    assert any(second.engine._perceptrons._perceptrons.values())
    assert not torch.equal(first.state.flat, learner(0, plain).state.flat)
    torch.testing.assert_close(first.state.flat, second.state.flat, rtol=1e-4, atol=1e-6)
    three = [learner(seed, kernels) for seed in (1, 0, 2)]
    update_together(three)
    assert torch.equal(three[1].state.flat, second.state.flat)


def find_labels_out_of_range(device: torch.device) -> None:
    """A label out of range gives a loss of NaN to its learner, and leaves the others as they are."""
    objective = make((2, 4, 3), "relu", True, Inner(0.1, 1), device)
    batch = Batch(*(v.to(device) for v in draw("bad", (2, 4, 3), True, 2, 2, 4)))
    flat = objective.layout.flat(objective.network.params()).expand(2, -1).contiguous()
    program = programs.Perceptrons().gradient(objective, flat, batch, batch)
    assert program is not None
    batch.y[0, 1, 2] = 3
    values, gradients = program(flat, batch, batch, None)
    assert values[:, 0].isnan().all()
    assert gradients[0].isnan().any()
    assert torch.isfinite(values[:, 1]).all()
    assert torch.isfinite(gradients[1]).all()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing: the kernels cannot run on the CPU")
    # A quarter of the compile time; `test_learners_on_the_cpu` has the options of users.
    monkeypatch.setattr(cpp_source, "_OPTIONS", ("-O0", *cpp_source._OPTIONS[1:]))


@pytest.fixture
def gpu_kernels_on_the_cpu(compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gradient, "make_kernels", lambda plan, device: HostKernels(plan, tmp_path))


def test_kernels_of_a_gpu(gpu_kernels_on_the_cpu: None) -> None:
    compare_all(CPU)
    find_labels_out_of_range(CPU)


def test_kernels_of_the_cpu(compiler: None) -> None:
    compare_all(CPU)
    compare((5, 33, 17, 6), "tanh", CPU, labels=True, shape=(2, 3, 20, 40))
    find_labels_out_of_range(CPU)


def test_learners_on_the_cpu(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    compare_learners(CPU, "eager", "compiled", monkeypatch)


def test_the_number_of_threads_does_not_change_the_bits(compiler: None) -> None:
    objective = make((3, 9, 4), "silu", False, Inner(0.1, 2), CPU)
    flat = objective.layout.flat(objective.network.params())[None]
    batch = draw("threads", (3, 9, 4), False, 1, 5, 7)
    program = programs.Perceptrons().gradient(objective, flat, batch, batch)
    assert program is not None
    one = program(flat, batch, batch, None)
    torch.set_num_threads(2)
    try:
        two = program(flat, batch, batch, None)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_large_and_special_values_stay_apart(compiler: None) -> None:
    """Activations saturate as those of torch, and a NaN of one task stays in the gradients of its learner."""
    for activation in ACTIVATIONS:
        objective = make((1, 4, 1), activation, False, Inner(0.0, 1), CPU)
        flat = objective.layout.flat(objective.network.params())[None].repeat(2, 1)
        x = torch.tensor([-1e4, -30.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 30.0, 1e4])[None, None, :, None].repeat(2, 1, 1, 1)
        batch = Batch(x, torch.zeros_like(x))
        program = programs.Perceptrons().gradient(objective, flat, batch, batch)
        assert program is not None
        values, gradients = program(flat, batch, batch, None)
        params = double(objective.layout.named(flat[0]))
        own = double(Batch(x[0], batch.y[0]))
        loss, expected = meta_gradient(_loss_in_double(objective.network), params, own, own, 0.0, 1)
        torch.testing.assert_close(gradients[0], objective.layout.flat(expected).float(), rtol=1e-5, atol=1e-3)
        assert float(values[0, 0]) == pytest.approx(float(loss), rel=1e-5)
        x[1, 0, 3] = torch.nan
        again, spoiled = program(flat, batch, batch, None)
        assert torch.equal(gradients[0], spoiled[0])
        assert again[:, 1].isnan().all()


def test_the_kernels_refuse_other_problems() -> None:
    device = CPU
    objective = make((2, 9, 3), "relu", False, Inner(), device)
    perceptron = find_perceptron(objective.network)
    assert perceptron is not None
    batch = draw("rows", (2, 9, 3), False, 1, 2, 4)
    assert DenseGradient.takes(perceptron, objective, batch, batch)
    long = draw("rows", (2, 9, 3), False, 1, 2, MAX_ROWS + 1)
    other = [Batch(batch.x.double(), batch.y), Batch(batch.x[..., None], batch.y), Batch(batch.x, batch.y[..., :1])]
    for query in (long, *other):
        assert not DenseGradient.takes(perceptron, objective, batch, query)
    every = Objective(objective.network, Inner(every_step=True))
    assert not DenseGradient.takes(perceptron, every, batch, batch)
    assert not DenseGradient.takes(perceptron, Objective(objective.network, Inner(), learn_lr=True), batch, batch)
    wide = find_perceptron(make((2, MAX_WIDTH + 1, 3), "relu", False, Inner(), device).network)
    assert wide is not None
    assert not DenseGradient.takes(wide, objective, batch, batch)


@pytest.mark.parametrize(
    ("model", "settings", "mode"),
    [
        (lambda: ml.models.mlp(1, 1), {}, "compiled"),
        (lambda: ml.models.mlp(1, 1), {"meta_steps": 3}, "eager"),  # 150 planned updates
        (lambda: ml.models.mlp(1, 1).double(), {}, "eager"),
        (lambda: ml.models.mlp(1, 1), {"learn_lr": True}, "eager"),
        (lambda: ml.models.mlp(1, 1), {"engine": "eager"}, "eager"),
        (lambda: ml.models.mlp(1, 1), {"query": MAX_ROWS + 1}, "eager"),
        (lambda: ml.models.mlp(1, 1), {"inner_steps": 4000}, "eager"),  # too much memory
        (lambda: nn.Sequential(nn.Linear(1, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)), {}, "eager"),
    ],
)
def test_auto_chooses_the_kernel_for_a_few_hundred_updates(
    compiler: None, model: Any, settings: dict[str, Any], mode: Mode
) -> None:
    given: dict[str, Any] = {"meta_steps": 10} | settings
    learner = ml.FTML(model, ml.losses.squared_error, **given)
    assert learner.engine.mode == mode
    assert copy.deepcopy(learner).engine.mode == mode


def test_auto_without_a_compiler_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert ml.FTML(lambda: ml.models.mlp(1, 1), ml.losses.squared_error).engine.mode == "eager"


def test_a_failing_compiler_leaves_the_general_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("METALEADER_CACHE", str(tmp_path))
    objective = make((2, 7, 3), "relu", False, Inner(), CPU)
    flat = objective.layout.flat(objective.network.params())[None]
    batch = draw("rows", (2, 7, 3), False, 1, 2, 4)
    assert programs.Perceptrons().gradient(objective, flat, batch, batch) is None
    assert "no-such-compiler" in caplog.text


@pytest.mark.gpu
def test_kernels_on_the_gpu(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_all(cuda)
    compare((8, 64, 64, 1), "relu", cuda, shape=(2, 5, 60, 64), steps=5)
    compare((16, 128, 40, 4), "gelu", cuda, shape=(2, 5, 10, 20), steps=5)
    find_labels_out_of_range(cuda)
    compare_learners(cuda, "eager", "eager", monkeypatch)
    compare_learners(cuda, "eager", "graphed", monkeypatch)
