"""`predict_many` against one call of `predict` per task, in float64."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import metaleader as ml
from metaleader.learners import many
from metaleader.tasks import rng

SQUARED = ml.losses.squared_error


class Centred(nn.Module):
    """Each row minus the mean of all rows: no datapoint stands alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.layer(torch.cat([x["a"], x["b"].tanh()], 1))


def scalar(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean()


def relative(prediction: Tensor, target: Tensor) -> Tensor:
    """One value per datapoint, which depends on the other targets."""
    return SQUARED(prediction, target) / target.square().mean()


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), *layers, nn.Linear(6, 1))


FTML: Any = {"inner_steps": 3, "inner_lr": 0.05}
CASES: dict[str, tuple[Callable[[], nn.Module], Any, type[ml.Learner], dict[str, Any]]] = {
    "mlp": (lambda: mlp(nn.Tanh()), SQUARED, ml.FTML, FTML),
    "last layer": (lambda: mlp(nn.Tanh()), SQUARED, ml.FTML, FTML | {"only": "last"}),
    "a step size per tensor": (
        lambda: nn.Linear(3, 1), SQUARED, ml.FTML, {"inner_lr": {"weight": 0.1, "bias": 0.02}}),
    "learned step sizes": (lambda: mlp(nn.Tanh()), SQUARED, ml.FTML, FTML | {"learn_lr": True}),
    "no steps": (lambda: mlp(nn.Tanh()), SQUARED, ml.FTML, {"inner_steps": 0}),
    "unadapted": (lambda: mlp(nn.Tanh()), SQUARED, ml.TOE, {}),
    "fine-tuned": (lambda: mlp(nn.Tanh()), SQUARED, ml.FTL, FTML),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh()), SQUARED, ml.FTML, FTML),
    "dropout": (lambda: mlp(nn.Tanh(), nn.Dropout(0.4)), SQUARED, ml.FTML, FTML),
    "rows that depend on each other": (lambda: mlp(Centred()), SQUARED, ml.FTML, FTML),
    "a scalar loss": (lambda: mlp(nn.Tanh()), scalar, ml.FTML, FTML),
    "a loss across rows": (lambda: mlp(nn.Tanh()), relative, ml.FTML, FTML),
    "bayes": (lambda: mlp(nn.Tanh()), SQUARED, ml.FTML, {"adaptation": ml.BayesianHead()}),
    "labels": (lambda: mlp(nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)), ml.losses.cross_entropy, ml.FTML, FTML),
    "two inputs": (TwoInputs, SQUARED, ml.FTML, FTML),
}  # fmt: skip


def inputs(name: str, key: int, num: int) -> Any:
    x = torch.from_numpy(rng("many", key).standard_normal((num, 3)))
    return {"a": x[:, :2], "b": x[:, 2:]} if name == "two inputs" else x


def made(name: str, sizes: list[int]) -> ml.Learner:
    model, loss, kind, settings = CASES[name]
    if name == "labels":
        model = lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))  # noqa: E731
    learner = kind(lambda: model().double(), loss, **settings)
    for i, size in enumerate(sizes):
        x = inputs(name, i, size)
        first = x["a"][:, :1] if isinstance(x, dict) else x[:, :1]
        y = (first[:, 0] > 0).long() + i % 2 if name == "labels" else torch.sin(first + i)
        for row in range(0, size, 3):  # not contiguous in memory
            piece = slice(row, row + 3)
            part = {key: value[piece] for key, value in x.items()} if isinstance(x, dict) else x[piece]
            learner.observe(part, y[piece], task=f"task {i}", update=False)
    return learner


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("limits", [(2**20, 2**15), (300, 0)], ids=["one program", "small programs"])
def test_equals_one_by_one(name: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_CHUNK", {"cpu": limits[0]})
    monkeypatch.setattr(many, "_FREE_PADDING", limits[1])
    sizes = [1, 7, 2, 4, 4, 5, 11, 3, 7]
    learner = made(name, sizes)
    xs = {f"task {i}": inputs(name, 100 + i, num) for i, num in enumerate([2, 1, 5, 3, 3, 4, 1, 2, 6])}
    found = learner.predict_many(xs)
    assert list(found) == list(xs)
    spread = []
    for task, x in xs.items():
        expected = learner.predict(x, task=task)
        torch.testing.assert_close(found[task], expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(expected, learner.adapt(task=task)(x).detach(), rtol=1e-9, atol=1e-11)
        spread.append(expected[0])
    assert float(torch.stack(spread).std()) > 1e-3


def test_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding joins sizes where a datapoint stands alone; elsewhere each size has its own program."""
    calls: list[int] = []
    padded = many._Many.padded
    monkeypatch.setattr(many._Many, "padded", lambda self, *args: calls.append(args[-1]) or padded(self, *args))
    for name, expected in (("mlp", [11]), ("batch norm", [11, 7, 5]), ("bayes", [11, 7, 5]), ("a scalar loss", 3)):
        learner = made(name, [5, 7, 11, 7, 5])
        calls.clear()
        learner.predict_many({f"task {i}": inputs(name, i, 2) for i in range(5)})
        assert calls == expected or len(calls) == expected, name


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.booleans(), st.integers(1, 3000))
def test_groups_hold_every_task_once(sizes: list[int], padded: bool, numel: int) -> None:
    array = np.array(sizes)
    groups = list(many._groups(array, padded, numel))
    assert sorted(i for _, members in groups for i in members.tolist()) == list(range(len(sizes)))
    for size, members in groups:
        assert size == array[members].max()
        similar = array[members].min() >= 0.75 * size
        free = len(members) * size * numel <= 2**15
        assert (similar or free) if padded else (array[members] == size).all()


def test_float32_agrees_within_1e_5() -> None:
    torch.manual_seed(0)
    learner = ml.FTML(lambda: ml.models.mlp(8, 1, (32,)), SQUARED)
    generator = torch.Generator().manual_seed(0)
    for i in range(60):
        x = torch.randn(1 + i % 13, 8, generator=generator)
        learner.observe(x, x[:, :1].sin(), task=f"{i}", update=False)
    xs = {f"{i}": torch.randn(1 + i % 4, 8, generator=generator) for i in range(60)}
    found = learner.predict_many(xs)
    for task, x in xs.items():
        torch.testing.assert_close(found[task], learner.predict(x, task=task), rtol=0, atol=1e-5)


def test_inputs_of_other_kinds() -> None:
    learner = made("mlp", [4, 5])
    learner.begin("open")
    x = inputs("mlp", 1, 3)
    found = learner.predict_many({"task 0": x, "task 1": x[0], "open": x})
    assert found["task 1"].shape == (1,)
    torch.testing.assert_close(found["task 1"], learner.predict(x[:1], task="task 1")[0])
    assert torch.equal(found["open"], learner.predict(x))
    assert learner.predict_many({"task 0": x[:0], "task 1": x})["task 0"].shape == (0, 1)
    mixed = learner.predict_many({"task 0": x.numpy(), "task 1": x})
    assert torch.equal(mixed["task 0"], learner.predict_many({"task 0": x, "task 1": x})["task 0"])
    for bad, message in (
        (
            {"task 0": x, "task 1": x[:, :2]},
            r"task 'task 1' has rows of float64\[2\], and task 'task 0' of ",
        ),
        ({"task 0": x, "task 1": x.float()}, r"task 'task 1' has rows of float32\[3\], and task 'task 0' of float64"),
        ({"task 0": x * np.nan, "task 1": x}, "x holds 9 NaN or infinite values"),
        ({"task 0": x[:, :2]}, r"the model fails on x with rows of float64\[2\]"),
        ({"task 0": "text"}, "x is not numeric: got str"),
        ({"task 0": x, "nobody": x}, "no data of task 'nobody'; tasks with data: task 0, task 1"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.predict_many(bad)
    with pytest.raises(ValueError, match=r"predict: the model fails on x with rows of float64\[2\]"):
        learner.predict(x[:, :2], task="task 0")


def test_a_class_with_its_own_adapt_is_asked_one_by_one() -> None:
    class Halved(ml.FTML):
        def adapt(self, *args: Any, **options: Any) -> Any:
            net = super().adapt(*args, **options)
            return lambda x: net(x) / 2

    learner, halved = (kind(lambda: nn.Linear(3, 1), SQUARED, seed=1) for kind in (ml.FTML, Halved))
    x = torch.ones(2, 3)
    for one in (learner, halved):
        one.observe(x, x[:, :1], task="a", update=False)
    assert torch.equal(halved.predict_many({"a": x})["a"], learner.predict(x, task="a") / 2)
    assert torch.equal(halved.predict(x, task="a"), learner.predict(x, task="a") / 2)


def test_n_way_tasks_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = ml.FTML(lambda: nn.Linear(3, 2), ml.losses.cross_entropy, support=2, query=2, meta_steps=1)
    learner.begin("a", classes=[0, 1])
    learner.observe(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
    for call in (lambda: learner.predict_many({"a": torch.rand(2, 3)}), lambda: learner.predict(torch.rand(2, 3), "a")):
        with pytest.raises(ValueError, match="task 'a': n-way tasks store their data by class"):
            call()
    assert learner.tasks == {"a": 4}
