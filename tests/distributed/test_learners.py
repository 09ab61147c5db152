"""One learner on 1, 2 and 4 processes: the same bits of parameters, records, predictions and files."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_in_processes
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import metaleader as ml
from metaleader.distributed.group import current_group
from metaleader.evaluate import play_together

SIZES = (1, 2, 4)
KINDS: dict[str, Any] = {"ftml": ml.FTML, "ftl": ml.FTL, "toe": ml.TOE, "scratch": ml.Scratch}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1))


def learner(kind: Any = ml.FTML, seed: int = 0, **settings: Any) -> Any:
    settings = {"tasks_per_step": 6, "query": 3, "meta_steps": 2, "shards": 4} | settings
    settings = ({"support": (1, 3)} if kind is ml.FTML else {}) | settings
    settings = ({"inner_steps": 2} if kind in (ml.FTML, ml.FTL) else {}) | settings
    return kind(net, ml.losses.squared_error, seed=seed, **settings)


def digest(value: Any) -> str:
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        found.update(leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return found.hexdigest()[:16]


def results_of_all_kinds() -> dict[str, str]:
    """Two seeds side by side and one alone, of every kind: records, parameters and all other state."""
    found, streams = {}, [ml.streams.SinusoidStream(tasks=5, train=8, test=4, seed=seed) for seed in (0, 1)]
    for name, kind in KINDS.items():
        weights = ml.recency(3.0) if name == "toe" else None
        learners = [learner(kind, seed, weights=weights) for seed in (0, 1)]
        records = list(play_together(learners, streams, 4, steps=(2, 1)))
        found[name] = digest([repr(records), *(one.state_dict() for one in learners)])
    found["alone"] = digest([repr(record) for record in ml.play(learner(), streams[0], 4)])
    return found


def results_by_class() -> dict[str, str]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    made = ml.FTML(module, ml.losses.cross_entropy, support=3, query=3, tasks_per_step=6, meta_steps=2, shards=4)
    images = torch.randn(4, 9, 4, generator=torch.Generator().manual_seed(0))
    for t, x in enumerate(images):
        made.begin(str(t), classes=[t, t + 1, t + 2])
        made.observe(x, torch.arange(9) % 3)
    return {"by class": digest([made.state_dict(), made.predict(images[0])])}


def task_data(name: str, num: int = 5) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(len(name)).uniform(-2, 2, (num, 1))
    return x, np.sin(x + len(name))


def results_by_name(folder: str) -> dict[str, str]:
    """Named tasks among rounds, a bound, a deletion, a failure, predictions, and a file."""
    made = learner(max_tasks=7)
    for i in range(9):
        made.observe(*task_data("a" * i), task=f"customer {i}")
        if i % 3 == 0:
            made.begin(f"round {i}")
            made.observe(*task_data("b" * i), update=i > 3)
        made.observe(*task_data("c" * i, 2), task=f"customer {i // 2}")
    made.forget("customer 6")
    names = list(made.tasks)
    x = np.linspace(-1, 1, 4, dtype=np.float32)[:, None]
    predictions = [made.predict(x, task=names[0]), made.predict_many(dict.fromkeys(names, x)), made.predict(x)]
    found = {"by name": digest([made.state_dict(), *predictions])}
    before = made.state_dict()
    try:
        made.observe(np.full((2, 1), 1e30), np.full((2, 1), 1e30), task="bad")
    except ValueError as error:
        found["error"] = str(error)
    found["after the error"] = digest([made.state_dict(), before, made.set_aside])
    path = Path(folder) / "learner.safetensors"
    made.save(path)
    loaded = ml.FTML.load(path, net, ml.losses.squared_error)
    for one in (made, loaded):
        one.begin("last")
        one.observe(*task_data("last"))
    found["loaded"] = digest(loaded.state_dict())
    assert found["loaded"] == digest(made.state_dict())
    found["file"] = hashlib.sha256(path.read_bytes()).hexdigest() if current_group().rank == 0 else ""
    return found


def results_with_limits(folder: str) -> dict[str, str]:
    """Limits of datapoints and bytes, and rows on the disk of every process, which a file collects."""
    found = {}
    for name, folder_of_data in (("limits", None), ("limits on disk", folder)):
        made = learner(max_datapoints=4, max_bytes=8 * 20, reservoir=True, data_folder=folder_of_data)
        for i in range(12):
            if i % 4 == 0:
                made.begin(f"round {i}")
                made.observe(*task_data("b" * i, 3))
            made.observe(*task_data("a" * i, 3), task=f"customer {i % 5}", update=i % 3 == 0)
        made.forget("customer 1")
        path = Path(folder) / "limits.safetensors"
        made.save(path)
        loaded = ml.FTML.load(path, net, ml.losses.squared_error, data_folder=folder_of_data)
        for one in (made, loaded):
            one.observe(*task_data("last"), task="customer 2")
        assert digest(made.state_dict()) == digest(loaded.state_dict())
        assert made.memory.num_bytes <= 8 * 20
        found[name] = digest([made.state_dict(), made.predict(np.zeros((2, 1), dtype=np.float32), task="customer 2")])
        if current_group().rank == 0:
            found[f"file, {name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["limits"] == found["limits on disk"]
    return found


def all_results(folder: str) -> dict[str, str]:
    found = results_of_all_kinds() | results_by_class() | results_by_name(folder) | results_with_limits(folder)
    return {name: value for name, value in found.items() if name != "file" or value}


@pytest.fixture(scope="module")
def by_size() -> dict[int, list[Any]]:
    found = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            found[size] = run_in_processes(size, all_results, folder)
    return found


def test_results_do_not_depend_on_the_number_of_processes(by_size: dict[int, list[Any]]) -> None:
    expected = by_size[1][0]
    assert isinstance(expected, dict)
    assert len(expected) == 14
    for size in SIZES:
        for rank, found in enumerate(by_size[size]):
            wanted = expected if rank == 0 else {name: v for name, v in expected.items() if "file" not in name}
            assert found == wanted, (size, rank)


def memory_of_many_tasks() -> dict[str, Any]:
    made = learner(meta_steps=1)
    kept = []
    for t in range(64):
        made.begin(str(t))
        made.observe(*task_data("x", 10), update=t % 8 == 0)
        store = made.memory.store
        kept.append(store.length if current_group().size == 1 else store.own.length)
    data = made.memory.store.data if current_group().size == 1 else made.memory.store.own.data
    x = made.predict(np.zeros((1, 1), dtype=np.float32), task="5")
    return {
        "kept": kept[-1],
        "most": max(kept),
        "capacity": len(data.x),
        "x": x.tolist(),
        "flat": digest(made.state.flat),
    }


def test_the_memory_of_a_process_falls_with_their_number() -> None:
    found = {size: run_in_processes(size, memory_of_many_tasks) for size in SIZES}
    assert len({(str(one["x"]), one["flat"]) for results in found.values() for one in results}) == 1
    for size, results in found.items():
        for one in results:
            # 64 tasks of 10 datapoints, and the open round on every process
            assert one["kept"] <= 640 / size + 10
            assert one["capacity"] <= 1.3 * (640 / size + 10)


def refusals() -> list[str]:
    rank, errors = current_group().rank, []

    def attempt(function: Any) -> None:
        try:
            function()
            errors.append("no error")
        except ValueError as error:
            errors.append(str(error))

    attempt(lambda: learner(seed=int(rank == 1)))
    attempt(lambda: learner(shards=3))
    made = learner()
    x, y = task_data("abc")
    attempt(lambda: made.observe(x + (rank == 1), y, task="a"))
    attempt(lambda: made.observe(x, y, task=f"task {rank}"))
    attempt(lambda: made.observe(x if rank == 0 else x[:, 0, None, None], y, task="a"))
    attempt(lambda: made.observe(x[:, :, None, None], y, task="a"))
    made.observe(x, y, task="a")
    errors.append(digest(made.state_dict()))
    alone = learner(shards=1, seed=rank)  # learners with one shard have nothing in common
    alone.observe(x + rank, y, task="b")
    return errors


def test_processes_that_differ_are_refused_and_go_on() -> None:
    first, second = run_in_processes(2, refusals)
    assert first[0] == second[0]
    assert "the processes differ in settings.seed" in first[0]
    assert "must divide" in first[1]
    assert "the processes differ in data (observe)" in first[2]
    assert "the processes differ in task (observe): it is 'task 0' on rank 0 and 'task 1' on rank 1" in first[3]
    assert "differ in" in first[4]
    assert "differ in" in second[4]
    assert "observe" in first[5]
    assert first[5] == second[5]
    assert first[6] == second[6]


class Failing(ml.FTML):
    """A gradient that raises an error on the last process."""

    def task_gradient(self, params: Any, support: Any, query: Any) -> Any:
        if current_group().rank == 1:
            raise ValueError("this process fails")
        return super().task_gradient(params, support, query)


def failure() -> list[Any]:
    settings: dict[str, Any] = {"tasks_per_step": 7, "query": 3, "support": 3, "meta_steps": 2, "shards": 2}
    made = Failing(nn.Linear(1, 1), ml.losses.squared_error, **settings)
    made.begin("a")
    made.observe(*task_data("a"), update=False)
    made.begin("b")
    made.observe(*task_data("a"), update=False)
    try:
        made.update()
    except ValueError as error:
        return [str(error), made.step]
    return ["no error", made.step]


def test_an_error_on_one_process_is_raised_on_all() -> None:
    first, second = run_in_processes(2, failure)
    assert first == second
    assert first[0].startswith("Failing.task_gradient")
    assert first[0].endswith("fails: this process fails")
    assert first[1] == 0
