"""Shards in one process: how the tasks of an update are divided, weighted and added."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metaleader as ml
from metaleader.distributed.shards import Shard
from metaleader.learners import update_together
from metaleader.learners.sharded import draw_shards

KINDS: dict[str, Any] = {"ftml": ml.FTML, "ftl": ml.FTL, "toe": ml.TOE, "scratch": ml.Scratch}


def learner(kind: Any = ml.FTML, seed: int = 0, **settings: Any) -> Any:
    support = {"support": 3} if kind is ml.FTML else {}
    settings = {"tasks_per_step": 6, "query": 3, "meta_steps": 2, "shards": 4} | support | settings
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return kind(net, ml.losses.squared_error, seed=seed, **settings)


def data(name: str, num: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(int(name) + 1)
    x = torch.randn(num, 2, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) * (1 + int(name)) / 3


def fill(made: Any, tasks: int, update: bool = False) -> Any:
    for t in range(tasks):
        made.begin(str(t))
        made.observe(*data(str(t)), update=update)
    return made


def expected_weights(made: Any, steps: int) -> np.ndarray:
    """The mean weight of each task over many draws."""
    names, which = made.memory.names, made.definition.which
    sums: Counter[str | None] = Counter()
    for step in range(steps):
        drawn = draw_shards(made, [step], ())
        assert drawn is not None
        for shard, draw in drawn.by_shard.items():
            num = draw.query.shape[1]
            width = draw.support.shape[-1] + draw.query.shape[-1]
            for name in made.memory.names_drawn(made.seed, [step], num, width, which, (), shard):
                sums[made.task if name is None else name] += drawn.weights[shard.number] / num
    return np.array([sums[name] for name in names]) / steps


@pytest.mark.parametrize(
    ("kind", "tasks", "weights"),
    [("ftml", 7, None), ("ftml", 7, ml.recency(3.0)), ("ftl", 6, ml.recency(3.0)), ("toe", 2, None)],
)
def test_the_draws_are_unbiased_when_shards_hold_unequal_numbers_of_tasks(kind: str, tasks: int, weights: Any) -> None:
    made = fill(learner(KINDS[kind], weights=weights), tasks)
    num = tasks - int(kind == "ftl")
    nu = np.ones(num) if weights is None else weights(num)
    nu = np.append(nu, 0.0) if kind == "ftl" else nu
    steps = 1500
    # The largest standard deviation of a task's weight in one update is below 1/2, that of one draw of a half.
    assert np.abs(expected_weights(made, steps) - nu / nu.sum()).max() < 4 * 0.5 / steps**0.5


def test_the_weight_of_a_shard_is_its_part_of_the_tasks() -> None:
    made = fill(learner(), 7)
    drawn = draw_shards(made, [0], ())
    assert drawn is not None
    assert drawn.weights.tolist() == [2 / 7, 2 / 7, 2 / 7, 1 / 7]
    assert [draw.query.shape[1] for draw in drawn.by_shard.values()] == [2, 2, 1, 1]


def test_shards_without_tasks_are_left_out() -> None:
    made = fill(learner(), 2)
    drawn = draw_shards(made, [0], ())
    assert drawn is not None
    assert list(drawn.by_shard) == [Shard(0, 4), Shard(1, 4)]
    assert drawn.weights.tolist() == [0.5, 0.5, 0, 0]
    assert draw_shards(learner(), [0], ()) is None
    assert draw_shards(fill(learner(ml.FTL), 1), [0], ()) is None


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("tasks", [1, 3, 6])
def test_an_update_is_the_weighted_sum_over_the_tasks_drawn(kind: str, tasks: int) -> None:
    """The oracle: the gradient of each task alone, times the weight of its shard over the draws of that shard."""
    made: Any = fill(learner(KINDS[kind], optimizer="sgd", meta_lr=0.1, meta_steps=1), tasks)
    before, definition = made.state, made.definition
    params = made.layout.named(before.flat)
    support = definition.support if isinstance(definition.support, int) else max(definition.support)
    drawn = draw_shards(made, [0], ())
    if drawn is None:
        assert (kind, tasks) == ("ftl", 1)
        made.update()
        assert made.state.step == 0
        return
    total = torch.zeros_like(before.flat)
    masses = made.memory.shard_masses(4, definition.which, ())
    weights = [2 / 6, 2 / 6, 1 / 6, 1 / 6] if masses is None else masses / masses.sum()
    for number in range(4):
        shard, share = Shard(number, 4), (2, 2, 1, 1)[number]
        draw = made.memory.draw(made.seed, [0], share, support, 3, definition.which, shard=shard)
        if draw is None:
            assert weights[number] == 0
            continue
        batches = made.memory.gather(draw)
        for i in range(share):
            one = (type(batch)(batch.x[0, i], batch.y[0, i]) for batch in batches)
            _, gradient = made.task_gradient(params, *one)
            total += float(weights[number]) / share * made.layout.flat(gradient)
    made.update(1)
    updates = definition.updates_per_step
    if updates == 1:
        torch.testing.assert_close(made.state.flat, before.flat - 0.1 * total, rtol=1e-10, atol=1e-12)
    assert made.state.step == updates


@pytest.mark.parametrize("kind", list(KINDS))
def test_seeds_side_by_side_are_as_alone(kind: str) -> None:
    together = [fill(learner(KINDS[kind], seed=seed), 5) for seed in range(3)]
    alone = [fill(learner(KINDS[kind], seed=seed), 5) for seed in range(3)]
    update_together(together)
    for one, other in zip(together, alone, strict=True):
        other.update()
        torch.testing.assert_close(one.state.flat, other.state.flat, rtol=1e-10, atol=1e-12)
        assert one.state.step == other.state.step > 0


def test_more_shards_draw_otherwise_and_one_as_before() -> None:
    flats = [fill(learner(shards=shards, tasks_per_step=8), 9, update=True).state.flat for shards in (1, 1, 2, 4)]
    assert torch.equal(flats[0], flats[1])
    assert not torch.equal(flats[0], flats[2])
    assert not torch.equal(flats[2], flats[3])
    plain = fill(learner(shards=1), 6)
    width = (plain.tasks_per_step, 3, 3)
    drawn = plain.memory.draw(0, [4], *width)
    assert all(
        torch.equal(a, b) for a, b in zip(drawn[:2], plain.memory.draw(0, [4], *width, "all", ())[:2], strict=True)
    )


def test_n_way_tasks_share_out_the_draws() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        settings: dict[str, Any] = {"support": 3, "query": 3, "tasks_per_step": 6, "meta_steps": 2, "shards": 4}
        return ml.FTML(net, ml.losses.cross_entropy, **settings)

    made = build()
    for t in range(3):
        made.begin(str(t), classes=[t, t + 1, t + 2])
        x = torch.randn(9, 4, generator=torch.Generator().manual_seed(t))
        made.observe(x, torch.arange(9) % 3)
    drawn = draw_shards(made, [0], ())
    assert drawn is not None
    assert drawn.weights.tolist() == [2 / 6, 2 / 6, 1 / 6, 1 / 6]
    picked = [draw.support.tolist() for draw in drawn.by_shard.values()]
    assert picked[0] != picked[1]
    assert made.step == 6


def test_a_task_that_fails_is_set_aside() -> None:
    made = fill(learner(meta_steps=4), 7)
    made.memory.store.data.y[3 * 7 : 4 * 7] = 1e200  # the square is infinite
    made.update()
    assert list(made.set_aside) == ["3"]
    assert bool(torch.isfinite(made.state.flat).all())


def test_learners_whose_shards_differ_are_updated_one_by_one() -> None:
    made = [fill(learner(seed=seed), 4) for seed in range(2)]
    made[0].memory.set_aside("1", "for the test")
    update_together(made)
    assert [one.step for one in made] == [2, 2]
    alone = fill(learner(seed=1), 4)
    alone.update()
    assert torch.equal(alone.state.flat, made[1].state.flat)


def test_shards_are_saved(tmp_path: Any) -> None:
    made = fill(learner(), 5, update=True)
    made.save(tmp_path / "learner.safetensors")
    loaded = ml.FTML.load(tmp_path / "learner.safetensors", made.model, ml.losses.squared_error)
    assert loaded.shards == 4
    for one in (made, loaded):
        one.begin("9")
        one.observe(*data("9"))
    assert torch.equal(made.state.flat, loaded.state.flat)


@pytest.mark.parametrize("shards", [0, 1.5, True, 7])
def test_a_wrong_number_of_shards_is_refused(shards: Any) -> None:
    with pytest.raises(ValueError, match="shards must be"):
        learner(shards=shards)
