"""Each learner against the slow, obvious loop of its row in the table of methods, and the rest of the contract."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import metaleader as ml
from metaleader.checks.trees import differences, snapshot
from metaleader.learners.outer import Outer
from metaleader.memory.entries import Entry
from metaleader.tasks import rng

Params = dict[str, Tensor]
SEED = 5
SIZES: Any = {"tasks_per_step": 3, "query": 3, "meta_steps": 3, "seed": SEED}
INNER: Any = {"inner_lr": 0.05, "inner_steps": 2}


def tasks(num: int = 3, reveals: int = 2, size: int = 6) -> list[list[ml.Batch]]:
    """Regression tasks in float64, as lists of reveals of unequal sizes."""
    found = []
    for t in range(num):
        draw = rng("test learners", t)
        xs = [torch.from_numpy(draw.standard_normal((size - r, 2))) for r in range(reveals)]
        found.append([ml.Batch(x, torch.sin(x[:, :1] * (t + 1)) + x[:, 1:]) for x in xs])
    return found


def module() -> nn.Module:
    torch.manual_seed(0)
    return ml.models.mlp(2, 1, (5,)).double()


def builder() -> nn.Module:
    return ml.models.mlp(2, 1, (5,)).double()


# The slow loop.


class Row(NamedTuple):
    """A row of the table of methods."""

    make: Callable[..., ml.Learner]
    support: int
    which: str
    inner: bool = False  # whether an update adapts first
    only: Sequence[str] | None = None
    adapts: bool = True  # whether evaluation adapts
    first_order: bool = False
    scratch: bool = False


def make_ftml(**options: Any) -> Callable[..., ml.Learner]:
    return lambda model, loss, **more: ml.FTML(model, loss, support=4, **INNER, **options, **more)


HEAD = ("head.weight", "head.bias")
TABLE = {
    "ftml": Row(make_ftml(), 4, "all", inner=True),
    "ftml-chunked": Row(make_ftml(chunk=2), 4, "all", inner=True),
    "ftml-first-order": Row(make_ftml(first_order=True), 4, "all", inner=True, first_order=True),
    "ftml-last": Row(make_ftml(only="last"), 4, "all", inner=True, only=HEAD),
    "toe": Row(ml.TOE, 0, "all", adapts=False),
    "ftl": Row(lambda model, loss, **more: ml.FTL(model, loss, **INNER, **more), 0, "past"),
    "scratch": Row(ml.Scratch, 0, "current", adapts=False, scratch=True),
}


def mean_loss(net: nn.Module, params: Params, batch: ml.Batch) -> Tensor:
    return (functional_call(net, params, (batch.x,)) - batch.y).square().mean()


def adapted(net: nn.Module, params: Params, batch: ml.Batch, row: Row, steps: int = 2, graph: bool = True) -> Params:
    for _ in range(steps):
        moving = [name for name in params if row.only is None or name in row.only]
        gradients = torch.autograd.grad(
            mean_loss(net, params, batch), [params[name] for name in moving], create_graph=graph
        )
        if row.first_order:
            gradients = [gradient.detach() for gradient in gradients]
        params = params | {n: params[n] - INNER["inner_lr"] * g for n, g in zip(moving, gradients, strict=True)}
    return params


class Slow:
    """One task at a time, autograd through the unrolled inner loop, an optimiser of torch."""

    def __init__(self, net: nn.Module, row: Row, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.net, self.row, self.make_optimizer = net, row, optimizer
        self.buffer = ml.TaskBuffer()
        self.step = 0
        self.restart({name: value.detach() for name, value in net.named_parameters()})

    def restart(self, initial: Params) -> None:
        self.params = {name: value.clone().requires_grad_() for name, value in initial.items()}
        self.optimizer = self.make_optimizer(list(self.params.values()))

    def observe(self, batch: ml.Batch, schedule: Sequence[tuple[int, float]] = (), clip: float = math.inf) -> None:
        self.buffer.append(batch)
        for _ in range(SIZES["meta_steps"] * (2 if self.row.scratch else 1)):
            num_tasks, query = SIZES["tasks_per_step"], SIZES["query"]
            which: Any = self.row.which
            draw = self.buffer.draw(SEED, [self.step], num_tasks, self.row.support, query, which=which)
            if draw is None:
                return
            support, query_batch = self.buffer.gather(draw.at(0))
            losses = []
            for i in range(num_tasks):
                params = dict(self.params)
                if self.row.inner:
                    params = adapted(self.net, params, ml.Batch(support.x[i], support.y[i]), self.row)
                losses.append(mean_loss(self.net, params, ml.Batch(query_batch.x[i], query_batch.y[i])))
            self.optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            gradients = [value.grad for value in self.params.values() if value.grad is not None]
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
            for gradient in gradients:
                gradient *= min(1.0, clip / norm)
            for start, lr in schedule:
                if self.step >= start:
                    self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
            self.step += 1

    def evaluated(self, data: ml.Batch) -> Params:
        params = {name: value.detach().requires_grad_() for name, value in self.params.items()}
        return adapted(self.net, params, data, self.row, graph=False) if self.row.adapts else params


def compare(row: Row, slow_optimizer: Any, *, schedule: Any = (), slow_clip: float = math.inf, **options: Any) -> None:
    """Play a learner and its slow loop side by side."""
    net = module()
    learner = row.make(builder if row.scratch else net, ml.losses.squared_error, **SIZES, **options)
    slow = Slow(net, row, slow_optimizer)
    moved = False
    for t, reveals in enumerate(tasks()):
        learner.begin(f"task {t}")
        slow.buffer.begin(f"task {t}")
        if row.scratch:
            slow.restart(learner.params)
        seen: list[ml.Batch] = []
        for batch in reveals:
            before = {name: value.clone() for name, value in learner.params.items()}
            learner.observe(*batch)
            slow.observe(batch, schedule, slow_clip)
            seen.append(batch)
            data = ml.Batch(torch.cat([b.x for b in seen]), torch.cat([b.y for b in seen]))
            adapted_net = dict(learner.adapt().named_parameters())
            for name, expected in slow.params.items():
                torch.testing.assert_close(learner.params[name], expected.detach(), rtol=1e-9, atol=1e-11)
            for name, expected in slow.evaluated(data).items():
                torch.testing.assert_close(adapted_net[name].detach(), expected.detach(), rtol=1e-9, atol=1e-11)
            moved |= bool(differences(before, learner.params))
    assert moved
    assert learner.step == slow.step


@pytest.mark.parametrize("name", TABLE)
def test_equals_the_slow_loop(name: str) -> None:
    compare(TABLE[name], lambda p: torch.optim.Adam(p, lr=0.01), meta_lr=0.01)


@pytest.mark.parametrize("name", ["ftml", "toe", "ftl"])
def test_momentum_with_a_step_schedule(name: str) -> None:
    schedule = [(0, 0.01), (5, 0.001)]
    compare(
        TABLE[name],
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        schedule=schedule,
        optimizer="sgd",
        meta_lr=schedule,
    )


def test_an_optimiser_of_the_users_own() -> None:
    compare(TABLE["ftml"], lambda p: torch.optim.AdamW(p, lr=0.01), optimizer=torch.optim.AdamW, meta_lr=0.01)


def test_clipping() -> None:
    options: Any = {"optimizer": "sgd", "meta_lr": 0.1, "clip": 0.3}
    compare(TABLE["ftml"], lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), slow_clip=0.3, **options)
    with pytest.raises(AssertionError):  # the gradients are long enough to be clipped
        compare(TABLE["ftml"], lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **options)


# The rows' particular claims.


def test_ftl_never_trains_on_the_current_task() -> None:
    first, second, *_ = tasks()
    learners = [TABLE["ftl"].make(module(), ml.losses.squared_error, **SIZES) for _ in range(2)]
    initial = snapshot(learners[0])["params"]
    for learner, scale in zip(learners, (1.0, 1000.0), strict=True):
        learner.begin("a")
        learner.observe(*first[0])
        assert not differences(initial, learner.params), "in the first round there is nothing to train on"
        learner.begin("b")
        learner.observe(second[0].x, scale * second[0].y)
    assert not differences(learners[0].params, learners[1].params)
    assert differences(initial, learners[0].params), "in the second round it trains on the first task"
    learners[1].begin("c")
    learners[0].begin("c")
    for learner in learners:
        learner.observe(*first[1])
    assert differences(learners[0].params, learners[1].params), "in the third round the second task counts"


def test_scratch_remembers_nothing() -> None:
    first, *_ = tasks()

    def play(data: list[ml.Batch]) -> tuple[Any, Any]:
        learner = ml.Scratch(builder, ml.losses.squared_error, **SIZES)
        learner.begin("a")
        start = snapshot(learner)
        for batch in data:
            learner.observe(*batch)
        learner.begin("b")
        return start, snapshot(learner)

    start, one = play(first)
    _, other = play([ml.Batch(x, 10 * y) for x, y in first])
    assert not differences(one["params"], other["params"]), "the initialisation depends on seed and round alone"
    assert differences(start["params"], one["params"]), "each round has an initialisation of its own"
    assert one["optimizer"]["state"] == {}, "the optimiser starts anew"


def test_scratch_makes_twice_the_updates() -> None:
    learner = ml.Scratch(builder, ml.losses.squared_error, **SIZES)
    learner.begin("a")
    learner.observe(*tasks()[0][0])
    assert learner.step == 2 * SIZES["meta_steps"]


def test_scratch_initialises_a_given_module_anew() -> None:
    given = module()
    learner = ml.Scratch(given, ml.losses.squared_error, **SIZES)
    learner.begin("a")
    assert all(differences(value.detach(), learner.params[name]) for name, value in given.named_parameters())


class Scale(nn.Module):
    """A layer that cannot be initialised anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_scratch_needs_a_module_that_can_be_initialised() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 1), Scale())

    with pytest.raises(ValueError, match=r"'1' \(Scale\) has no reset_parameters.*function that builds"):
        ml.Scratch(build(), ml.losses.squared_error)
    ml.Scratch(build, ml.losses.squared_error).begin("a")
    ml.TOE(build(), ml.losses.squared_error).begin("a")


# Model, device, number of updates.


def test_a_module_is_the_initialisation_and_stays_as_it_is() -> None:
    given = module()
    before = copy.deepcopy(given.state_dict())
    learner = make_ftml()(given, ml.losses.squared_error, **SIZES)
    assert not differences(dict(before), learner.params)
    learner.begin("a")
    learner.observe(*tasks()[0][0])
    assert not differences(dict(before), dict(given.state_dict()))
    assert given.training
    assert all(value.requires_grad for value in given.parameters())
    given.load_state_dict(learner.adapt().state_dict())


def test_a_builder_is_called_under_the_seed() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, same = (ml.TOE(builder, ml.losses.squared_error, seed=1) for _ in range(2))
    other = ml.TOE(builder, ml.losses.squared_error, seed=2)
    assert torch.equal(torch.rand(1), expected), "the global generator is left alone"
    assert not differences(one.params, same.params)
    assert differences(one.params, other.params)


def test_the_device_may_be_text_or_a_device() -> None:
    states = []
    for device in ("cpu", torch.device("cpu"), torch.device("cpu:0")):
        learner = make_ftml()(module(), ml.losses.squared_error, device=device, **SIZES)
        learner.begin("a")
        learner.observe(*tasks()[0][0])
        states.append(snapshot(learner))
    assert not differences(states[0], states[1])
    assert not differences(states[0], states[2])


@pytest.mark.gpu
@pytest.mark.parametrize("name", TABLE)
def test_the_same_updates_on_the_gpu(name: str) -> None:
    # Eager, since torch's optimisers read step sizes in float32 inside a CUDA graph.
    learners = [
        TABLE[name].make(builder, ml.losses.squared_error, device=device, engine="eager", **SIZES)
        for device in ("cpu", "cuda")
    ]
    for learner in learners:
        for t, reveals in enumerate(tasks()):
            learner.begin(f"{t}")
            for batch in reveals:
                learner.observe(*batch)
    for param, value in learners[0].params.items():
        assert learners[1].params[param].is_cuda
        torch.testing.assert_close(learners[1].params[param].cpu(), value, rtol=1e-8, atol=1e-10)


def test_update_takes_a_number_of_steps() -> None:
    one, other = (make_ftml()(module(), ml.losses.squared_error, **SIZES) for _ in range(2))
    for learner in (one, other):
        learner.begin("a")
        learner.observe(*tasks()[0][0], update=False)
    one.update()
    for _ in range(SIZES["meta_steps"]):
        other.update(1)
    assert not differences(one.state_dict(), other.state_dict())
    before = snapshot(one)
    one.update(0)
    assert not differences(before, one.state_dict())


def test_update_without_data_does_nothing() -> None:
    for name, row in TABLE.items():
        learner = row.make(builder, ml.losses.squared_error, **SIZES)
        before = snapshot(learner)
        learner.update()
        assert not differences(before, learner.state_dict()), name


def test_no_meta_steps_learns_nothing() -> None:
    learner = make_ftml()(module(), ml.losses.squared_error, **SIZES | {"meta_steps": 0})
    learner.begin("a")
    before = snapshot(learner)["params"]
    learner.observe(*tasks()[0][0])
    assert not differences(before, learner.params)
    assert learner.num_datapoints == 6


def test_several_numbers_of_steps_at_once() -> None:
    net = nn.Sequential(nn.Linear(2, 5), nn.Dropout(0.5), nn.Linear(5, 1)).double()
    learner = make_ftml()(net, ml.losses.squared_error, **SIZES)
    learner.begin("a")
    learner.observe(*tasks()[0][0])
    for number, found in zip([5, 0, 1], learner.adapt(steps=[5, 0, 1]), strict=True):
        assert not differences(dict(learner.adapt(steps=number).state_dict()), dict(found.state_dict()))
    assert not differences(learner.params, dict(learner.adapt(steps=0).named_parameters()))
    assert not differences(dict(learner.adapt(2).state_dict()), dict(learner.adapt().state_dict()))


def test_one_row_or_many_at_any_time() -> None:
    learner = ml.FTML(ml.models.mlp(4, 2, (3,)), ml.losses.cross_entropy, support=2, **SIZES)
    x, y = torch.randint(256, (6, 4), dtype=torch.uint8), torch.tensor([0, 1, 0, 1, 0, 1])
    assert learner.adapt()(x).shape == (6, 2)
    learner.begin("a")
    learner.observe(x, y)
    for _ in range(2):
        net = learner.adapt()
        torch.testing.assert_close(net(x[0]), net(x)[0])
        torch.testing.assert_close(net(x), net(x / 255))
        learner.begin("b")


def test_a_loss_may_return_its_mean() -> None:
    draw = rng("test labels", 0)
    x, y = torch.from_numpy(draw.standard_normal((8, 2))), torch.from_numpy(draw.integers(3, size=8))
    learners = [
        make_ftml()(ml.models.mlp(2, 3, ()).double(), loss, **SIZES)
        for loss in (ml.losses.cross_entropy, nn.functional.cross_entropy)
    ]
    learners[1].load_state_dict(learners[0].state_dict())
    for learner in learners:
        learner.begin("a")
        learner.observe(x, y)
    for name, value in learners[0].params.items():
        torch.testing.assert_close(learners[1].params[name], value)


# Trouble.


@pytest.mark.parametrize("name", ["ftml", "toe", "scratch"])
@pytest.mark.parametrize("kept", [0, 1])
def test_what_is_not_finite_stops(name: str, kept: int) -> None:
    batches = tasks()[0]
    learner = TABLE[name].make(builder, ml.losses.squared_error, optimizer="sgd", meta_lr=[(0, 1e200)], **SIZES)
    learner.begin("a")
    for batch in batches[:kept]:
        learner.observe(*batch, update=False)
    before = snapshot(learner)
    with pytest.raises(
        ValueError, match=r"not finite at update [23] of \d, round 0 \(task 'a'.*lower meta_lr \(1e\+200"
    ):
        learner.observe(*batches[1])
    assert not differences(before, learner.state_dict())
    assert learner.num_datapoints == (6 if kept else 0)


def test_a_diverging_inner_loop_stops() -> None:
    learner = ml.FTML(module(), ml.losses.squared_error, support=4, inner_lr=1e200, **SIZES)
    learner.begin("a")
    before = snapshot(learner)
    with pytest.raises(ValueError, match=r"update 1 of 3.*inner_lr \(1e\+200\)"):
        learner.observe(*tasks()[0][0])
    assert not differences(before, learner.state_dict())


def test_after_an_update_that_stopped_the_learner_goes_on_as_if_nothing_had_been() -> None:
    first, second, _ = tasks()
    learner, straight = (make_ftml()(module(), ml.losses.squared_error, **SIZES) for _ in range(2))
    for one in (learner, straight):
        one.begin("a")
        one.observe(*first[0])
    with pytest.raises(ValueError, match="not finite"):
        learner.observe(first[1].x, first[1].y * 1e200)
    for one in (learner, straight):
        one.begin("b")
        one.observe(*second[0])
    assert not differences(straight.state_dict(), learner.state_dict())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_of_an_observe_leaves_the_learner(error: type[BaseException]) -> None:
    calls = 0

    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise error("out of order")
        return (prediction - target).square().mean()

    stop = -1
    learner = make_ftml()(module(), loss, **SIZES)
    learner.begin("a")
    first, second = tasks()[0]
    learner.observe(*first)
    before, used = snapshot(learner), calls
    calls = 0
    learner.observe(*second)
    learner.load_state_dict(before)
    calls, stop = 0, calls - 1
    assert used > 3
    with pytest.raises(error):
        learner.observe(*second)
    assert not differences(before, learner.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"meta_lr": -1.0}, "meta_lr"),
        ({"meta_lr": math.nan}, "meta_lr"),
        ({"meta_lr": [(3, 0.1)]}, "begin at 0"),
        ({"meta_lr": [(0, 0.1), (0, 0.2)]}, "begin at 0"),
        ({"meta_lr": []}, "begin at 0"),
        ({"meta_steps": -1}, "meta_steps"),
        ({"meta_steps": 2.5}, "meta_steps"),
        ({"tasks_per_step": 0}, "tasks_per_step"),
        ({"query": 0}, "query"),
        ({"support": 0}, "support"),
        ({"seed": -1}, "seed"),
        ({"optimizer": "adagrad"}, "'adam', 'sgd'"),
        ({"clip": 0.0}, "clip"),
        ({"inner_lr": -0.1}, "inner_lr"),
        ({"inner_lr": math.inf}, "inner_lr"),
        ({"inner_lr": {"head.bias": 0.1}}, "missing"),
        ({"inner_steps": -1}, "inner_steps"),
        ({"only": "tail.*"}, "matches no parameter"),
        ({"chunk": 0}, "chunk"),
        ({"max_tasks": 0}, "max_tasks must be an integer of at least 1"),
        ({"max_tasks": True}, "max_tasks"),
        ({"max_tasks": 2.0}, "max_tasks"),
    ],
)
def test_hyperparameters_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ml.FTML(module(), ml.losses.squared_error, **options)


@pytest.mark.parametrize("model", [None, "mlp", dict, nn.ReLU()])
def test_models_that_cannot_be(model: Any) -> None:
    with pytest.raises(ValueError, match=r"model|parameters"):
        ml.FTML(model, ml.losses.squared_error)


# Files.


def learned(**options: Any) -> ml.FTML:
    learner = ml.FTML(module(), ml.losses.squared_error, support=4, **INNER, **SIZES, **options)
    for reveals in tasks()[:2]:
        learner.begin("a task")
        learner.observe(*reveals[0])
    return learner


def test_the_hyperparameters_are_in_the_file(tmp_path: Path) -> None:
    rates = {"head.weight": 0.1, "head.bias": 0.2}
    learner = ml.FTML(
        module(),
        ml.losses.squared_error,
        inner_lr=rates,
        inner_steps=3,
        support=4,
        only="head.*",
        first_order=True,
        chunk=2,
        clip=0.5,
        optimizer="sgd",
        preprocess=None,
        **SIZES | {"meta_lr": [(0, 0.01), (4, 0.001)]},
    )
    learner.begin("a")
    learner.observe(*tasks()[0][0])
    learner.save(tmp_path / "leader.safetensors")
    loaded = ml.FTML.load(tmp_path / "leader.safetensors", builder, ml.losses.squared_error)
    for name in ("inner_lr", "inner_steps", "support", "query", "only", "first_order", "chunk", "clip", "seed"):
        assert getattr(loaded, name) == getattr(learner, name), name
    for one in (learner, loaded):
        one.observe(*tasks()[0][1])
    assert not differences(learner.state_dict(), loaded.state_dict())


def test_a_task_in_turns() -> None:
    """Of "one" there are two rounds: `adapt` sees the last, `adapt(task=)` both, as if they had come as one."""
    (first, second), (other, _), _ = tasks()
    turns, at_once = (ml.FTML(module(), ml.losses.squared_error, **SIZES, **INNER) for _ in range(2))
    for name, batch in (("one", first), ("two", other), ("one", second)):
        turns.begin(name)
        turns.observe(*batch, update=False)
    at_once.begin("one")
    at_once.observe(torch.cat([first.x, second.x]), torch.cat([first.y, second.y]), update=False)
    for found, expected in (
        (turns.adapt(task="one"), at_once.adapt()),
        (turns.adapt(3, task="one"), at_once.adapt(3)),
        (turns.adapt([0, 2], task="one")[1], at_once.adapt(2)),
        (turns.adapt(), turns.adapt(task=None)),
    ):
        for name, value in expected.named_parameters():
            torch.testing.assert_close(dict(found.named_parameters())[name], value, rtol=1e-12, atol=0)
    assert differences(dict(turns.adapt().named_parameters()), dict(turns.adapt(task="one").named_parameters()))
    turns.begin("three")
    start = dict(turns.adapt(task="three").named_parameters())
    assert not differences({name: value.detach() for name, value in start.items()}, dict(turns.params))
    with pytest.raises(ValueError, match="no data of task 'four'; tasks with data: one, two"):
        turns.adapt(task="four")
    turns.begin(5)  # pyright: ignore[reportArgumentType]
    turns.observe(*other, update=False)
    found = dict(turns.adapt(task=5).named_parameters())  # pyright: ignore[reportArgumentType]
    for name, value in turns.adapt().named_parameters():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    unadapted = ml.TOE(module(), ml.losses.squared_error, **SIZES)
    with pytest.raises(ValueError, match="no data of task 'one'; tasks with data: none yet"):
        unadapted.adapt(task="one")
    unadapted.begin("one")
    unadapted.observe(*first)
    named = {name: value.detach() for name, value in unadapted.adapt(task="one").named_parameters()}
    assert not differences(named, dict(unadapted.params))
    with pytest.raises(ValueError, match="Scratch trains on the current task alone"):
        ml.Scratch(module, ml.losses.squared_error, **SIZES).adapt(task="one")


class Own(ml.FTML):
    """A class of a user's, with settings of all kinds."""

    def __init__(self, model: Any, loss: Any, *, keep: Any = 3, step: int = 1, weights: Any = None, **settings: Any):
        super().__init__(model, loss, weights=weights, **settings)
        self.keep, self.settings, self._step_of_its_own = keep, settings, step


@pytest.mark.parametrize("keep", [4, np.int64(4), [1, 2.5], (None, "a"), {"a": True}, torch.tensor([1.0, 2.0])])
def test_settings_of_a_users_class_are_saved(keep: Any, tmp_path: Path) -> None:
    Own(module(), ml.losses.squared_error, keep=keep, step=7, **SIZES).save(tmp_path / "own")
    found = Own.load(tmp_path / "own", module(), ml.losses.squared_error)
    assert not differences({"keep": found.keep}, {"keep": keep.item() if isinstance(keep, np.generic) else keep})
    assert found._step_of_its_own == 1  # not kept under its name; `step`, the updates made, is something else


def test_settings_that_no_file_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Own(module(), ml.losses.squared_error, keep=[print], weights=ml.recency(1)).save(tmp_path / "own")
    assert "keep=[<built-in function print>] is not saved with the learner" in caplog.text
    with pytest.raises(ValueError, match=r"was saved with functions, which no file holds; pass weights=\.\.\."):
        Own.load(tmp_path / "own", module(), ml.losses.squared_error)
    found = Own.load(tmp_path / "own", module(), ml.losses.squared_error, weights=ml.recency(1))
    assert found.keep == 3


def test_functions_must_be_passed_again(tmp_path: Path) -> None:
    def halve(x: Any) -> Any:
        return x / 2

    path = tmp_path / "leader.safetensors"
    options: Any = {"optimizer": torch.optim.AdamW, "weights": ml.recency(2), "preprocess": halve}
    learner = learned(**options)
    learner.save(path)
    with pytest.raises(ValueError, match=r"optimizer=\.\.\., weights=\.\.\., preprocess=\.\.\."):
        ml.FTML.load(path, module(), ml.losses.squared_error)
    with pytest.raises(ValueError, match=r"pass preprocess=\.\.\."):
        ml.FTML.load(path, module(), ml.losses.squared_error, optimizer=torch.optim.AdamW, weights=ml.recency(2))
    with pytest.raises(ValueError, match="meta_steps"):
        ml.FTML.load(path, module(), ml.losses.squared_error, meta_steps=3, **options)
    loaded = ml.FTML.load(path, module(), ml.losses.squared_error, device="cpu", **options)
    for one in (learner, loaded):
        one.observe(*tasks()[1][1])
    assert not differences(learner.state_dict(), loaded.state_dict())


def test_files_that_are_not_this_learner(tmp_path: Path) -> None:
    path = tmp_path / "leader.safetensors"
    learner = learned()
    learner.save(path)
    loss = ml.losses.squared_error
    with pytest.raises(ValueError, match=r"holds a FTML, not a TOE; load it with FTML\.load"):
        ml.TOE.load(path, module(), loss)
    with pytest.raises(ValueError, match=r"another model.*saved \(5, 2\), here \(7, 2\)"):
        ml.FTML.load(path, ml.models.mlp(2, 1, (7,)).double(), loss)
    with pytest.raises(ValueError, match=r"another model.*linear1"):
        ml.FTML.load(path, ml.models.mlp(2, 1, (5, 5)).double(), loss)
    with pytest.raises(ValueError, match="dtype"):
        ml.FTML.load(path, ml.models.mlp(2, 1, (5,)), loss)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ml.FTML.load(tmp_path / "nowhere.safetensors", module(), loss)
    with pytest.raises(OSError, match="nowhere"):
        learner.save(tmp_path / "nowhere" / "leader.safetensors")


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "leader.safetensors"
    learned().save(path)
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, *np.linspace(10, len(whole) - 1, 20, dtype=int)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated"):
            ml.FTML.load(path, module(), ml.losses.squared_error)


def test_a_state_that_is_not_whole_is_refused_before_anything_changes() -> None:
    learner, other = learned(), learned()
    other.observe(*tasks()[1][1])
    state = other.state_dict()
    before = snapshot(learner)
    for key in ("params", "optimizer", "buffer", "step", "round", "task"):
        with pytest.raises(ValueError, match="state"):
            learner.load_state_dict({name: value for name, value in state.items() if name != key})
        assert not differences(before, learner.state_dict()), key
    for key in ("state", "groups"):
        broken = {**state, "optimizer": {name: value for name, value in state["optimizer"].items() if name != key}}
        with pytest.raises(ValueError, match="state"):
            learner.load_state_dict(broken)
        assert not differences(before, learner.state_dict()), key
    learner.load_state_dict(state)
    assert not differences(state, learner.state_dict())


@pytest.mark.parametrize("name", TABLE)
def test_a_state_without_its_data_continues_where_the_data_was_observed_again(name: str) -> None:
    *before, last = [(t, batch) for t, reveals in enumerate(tasks(2)) for batch in reveals]

    def observe(learner: ml.Learner, update: bool) -> None:
        for t, batch in before:
            if learner.round < t:
                learner.begin(f"{t}")
            learner.observe(*batch, update=update)

    learner, other = (TABLE[name].make(builder, ml.losses.squared_error, **SIZES) for _ in range(2))
    observe(learner, update=True)
    state = learner.state_dict(data=False)
    assert "data" not in state["buffer"]
    untouched = snapshot(other)
    with pytest.raises(ValueError, match=r"17 datapoints, but 0 are present; observe the same data"):
        other.load_state_dict(state)
    assert not differences(untouched, other.state_dict())
    observe(other, update=False)
    other.load_state_dict(state)
    for one in (learner, other):
        one.observe(*last[1])
    assert not differences(learner.state_dict(), other.state_dict())


# The contract, as the documentation shows it.


class Counting(torch.optim.SGD):
    """An optimiser of a user's own, with a list in its state."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("norms", []).append(float(p.grad.norm()))
        super().step(closure)


def test_a_state_does_not_change_with_its_learner() -> None:
    learner = ml.TOE(lambda: ml.models.mlp(2, 1, (3,)), ml.losses.squared_error, optimizer=Counting)
    learner.begin("a")
    learner.observe(torch.ones(4, 2), torch.ones(4, 1), update=False)
    learner.update(1)
    state = learner.state_dict()
    learner.update(2)
    assert [len(values["norms"]) for values in state["optimizer"]["state"].values()] == [1] * 4


def test_a_users_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = ml.models.mlp(4, 3, (8,))
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    xt, yt = torch.randn(30, 4), torch.randint(3, (30,))

    learner = ml.FTML(
        model,
        ml.losses.cross_entropy,
        inner_lr=0.1,
        inner_steps=5,
        meta_lr=1e-3,
        meta_steps=10,
        tasks_per_step=25,
        support=10,
        query=10,
        seed=0,
    )
    learner.begin("customer 17")
    learner.observe(x, y)
    net = learner.adapt()
    assert isinstance(net, nn.Module)
    assert net(x[0]).shape == (3,)
    assert net(x).shape == (20, 3)
    learner.save("leader.safetensors")
    learner = ml.FTML.load("leader.safetensors", model, ml.losses.cross_entropy)

    stream = [ml.Task("a", train=ml.Batch(x, y), test=ml.Batch(xt, yt)), ml.Task("b", ml.Batch(xt, yt), ml.Batch(x, y))]
    records = list(ml.play(learner, stream, reveal=20))
    assert [(record.task, record.datapoints) for record in records] == [("a", 20), ("b", 20), ("b", 30)]


@pytest.mark.parametrize("update", [True, False], ids=["after updates", "at the first"])
def test_an_interrupt_while_results_are_written_leaves_the_learner(
    update: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> ml.FTML:
        learner = ml.FTML(module(), ml.losses.squared_error, support=4, **INNER, **SIZES)
        learner.begin("a task")
        learner.observe(*tasks()[0][0], update=update)
        return learner

    learner, undisturbed = made(), made()
    states = Outer.states

    def interrupted(self: Outer, step: int) -> Any:
        yield states(self, step)[0]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Outer, "states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learner.update(1)
    assert not differences(learner.state_dict(), undisturbed.state_dict())
    learner.update(1)
    undisturbed.update(1)
    assert not differences(learner.state_dict(), undisturbed.state_dict())


def test_an_optimiser_may_keep_states_of_any_shape() -> None:
    """A state of row and column factors is restored, and the update after it is that of a learner that did not stop."""
    learner, other = (learned(optimizer=torch.optim.Adafactor) for _ in range(2))
    learner.update(2)
    other.load_state_dict(learner.state_dict())
    slots = learner.state_dict()["optimizer"]["state"]["0"]
    assert slots["row_var"].shape != learner.params[next(iter(learner.params))].shape
    before = learner.state.flat
    for one in (learner, other):
        one.update(1)
    assert not torch.equal(learner.state.flat, before)
    assert not differences(learner.state_dict(), other.state_dict())


# A bounded memory.


@pytest.mark.parametrize("name", [name for name in TABLE if name != "scratch"])
def test_a_bounded_memory_is_that_of_its_tasks(name: str) -> None:
    """Where none is forgotten nothing changes; where some are, a learner that never forgets draws others."""
    row, found = TABLE[name], []
    for most in (None, 4, 2):
        learner = row.make(module(), ml.losses.squared_error, max_tasks=most, **SIZES)
        for t, reveals in enumerate(tasks(4)):
            learner.begin(f"task {t}")
            for batch in reveals:
                learner.observe(*batch)
        found.append(learner)
    every, enough, few = (learner.state.flat for learner in found)
    assert torch.equal(every, enough)
    assert not torch.equal(every, few)
    assert len(found[2].memory) == 2


def test_a_bounded_memory_goes_on_from_its_file(tmp_path: Path) -> None:
    def play(learner: ml.Learner, some: Sequence[int]) -> None:
        for t in some:
            learner.begin(f"task {t}")
            for batch in tasks(8)[t]:
                learner.observe(*batch)

    learner = make_ftml(max_tasks=3)(module(), ml.losses.squared_error, **SIZES)
    play(learner, range(5))
    learner.save(tmp_path / "few.safetensors")
    again = ml.FTML.load(tmp_path / "few.safetensors", module(), ml.losses.squared_error)
    for one in (learner, again):
        play(one, range(5, 8))
    assert learner.memory.state_dict().keys() >= {"numbers", "seen"}
    assert not differences(snapshot(learner), snapshot(again))


def test_what_a_bounded_memory_says() -> None:
    learner = make_ftml(max_tasks=2)(module(), ml.losses.squared_error, **SIZES)
    for t, (batch, _) in enumerate(tasks(4)):
        learner.begin(f"task {t}")
        learner.observe(*batch, update=False)
    kept = learner.memory.state_dict()["names"]
    gone = next(f"task {t}" for t in range(4) if f"task {t}" not in kept)
    with pytest.raises(ValueError, match=f"task '{gone}'; tasks with data: .*; 2 tasks were dropped by max_tasks=2"):
        learner.adapt(task=gone)
    with pytest.raises(
        ValueError, match=r"images by class.*leave max_tasks at None, and limit the images with max_datapoints"
    ):
        make_ftml(max_tasks=2)(module(), ml.losses.squared_error, **SIZES).begin("a", classes=[0, 1])


def test_a_state_with_classes_and_a_bounded_memory() -> None:
    """It is refused, and the bound stays."""
    nway = make_ftml()(module(), ml.losses.squared_error, **SIZES)
    nway.begin("a", classes=[0, 1])
    learner = make_ftml(max_tasks=2)(module(), ml.losses.squared_error, **SIZES)
    with pytest.raises(ValueError, match="leave max_tasks at None"):
        learner.load_state_dict(nway.state_dict())
    for t, (batch, _) in enumerate(tasks(4)):
        learner.begin(f"task {t}")
        learner.observe(*batch, update=False)
    assert len(learner.memory.state_dict()["names"]) == 2


@pytest.mark.parametrize("task", [None, "a", "new"])
def test_an_interrupt_while_data_is_kept_leaves_the_learner(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_ftml()(module(), ml.losses.squared_error, **SIZES)
    learner.begin("a")
    learner.observe(*tasks()[0][0])
    learner.begin("b")
    before = snapshot(learner)
    monkeypatch.setattr(Entry, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learner.observe(*tasks()[1][0], task=task)
    assert not differences(before, snapshot(learner))


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


def test_step_sizes_of_groups_are_kept() -> None:
    """The step sizes that a user's optimiser gives to its groups; a schedule scales them."""

    def in_groups(params: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": params[:2], "lr": lr / 10}, {"params": params[2:]}], lr=lr)

    def moved(**options: Any) -> list[torch.Tensor]:
        learner = ml.TOE(lambda: ml.models.mlp(2, 1, (3,)), ml.losses.squared_error, meta_steps=2, query=4, **options)
        learner.begin("a")
        before = [value.clone() for value in learner.params.values()]
        learner.observe(torch.ones(8, 2), torch.arange(8.0), update=False)
        learner.update(1)
        return [after - old for after, old in zip(learner.params.values(), before, strict=True)]

    plain, grouped = moved(optimizer=torch.optim.SGD, meta_lr=1e-3), moved(optimizer=in_groups, meta_lr=1e-3)
    for i, (one, other) in enumerate(zip(plain, grouped, strict=True)):
        torch.testing.assert_close(other, one / 10 if i < 2 else one)
    own = moved(optimizer=lambda params, lr: torch.optim.SGD(params, lr=2e-3), meta_lr=[(0, 1e-3), (5, 1e-4)])
    for one, other in zip(plain, own, strict=True):
        torch.testing.assert_close(other, 2 * one)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss several times in a step; use another optimizer"),
        (lambda params, lr: params, "optimizer must build a torch.optim.Optimizer, got list"),
    ],
)
def test_optimizers_that_cannot_be_used(optimizer: Any, message: str) -> None:
    learner = ml.TOE(lambda: ml.models.mlp(2, 1, (3,)), ml.losses.squared_error, optimizer=optimizer, query=4)
    learner.begin("a")
    with pytest.raises(ValueError, match=message):
        learner.observe(torch.ones(8, 2), torch.ones(8, 1))
    assert learner.num_datapoints == 0
