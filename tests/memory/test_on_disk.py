"""Data on the disk: the same results as in memory, space that is used again, deletion, full disks, and memory."""

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sessions import batch, make
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import metaleader as ml
from metaleader.checks.trees import differences
from metaleader.memory.columns import OnDisk
from metaleader.memory.rows import InMemory, Rows

CPU = torch.device("cpu")
LIMITS: list[dict[str, Any]] = [{}, {"max_datapoints": 4, "reservoir": True}, {"max_tasks": 3}]


def content(rows: Rows) -> bytes:
    """The bytes of the files of a storage."""
    files = [column.file for column in tree_leaves(rows._columns)]
    return b"".join(os.pread(file, os.fstat(file).st_size, 0) for file in files)


@given(
    st.lists(st.tuples(st.sampled_from(["write", "grow"]), st.integers(0, 9), st.integers(1, 5)), max_size=20),
    st.sampled_from([torch.float32, torch.uint8, torch.bool, torch.bfloat16, torch.int64]),
    st.sampled_from([(), (3,), (2, 2), (0,)]),
)
def test_a_column_on_the_disk_is_one_in_memory(calls: list[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    like, draw = torch.zeros((1, *shape)).to(dtype), np.random.default_rng(len(calls))
    columns = [InMemory(like, CPU), OnDisk(like, CPU, Path("/tmp"))]
    capacity = 10
    for column in columns:
        column.reserve(0, capacity)
        column.write(slice(0, capacity), torch.zeros((capacity, *shape)).to(dtype))
    for kind, start, num in calls:
        new = torch.from_numpy(draw.integers(0, 200, (num, *shape))).to(dtype)
        for column in columns:
            if kind == "grow":
                column.reserve(capacity, capacity + num)
                column.write(slice(capacity, capacity + num), new)
            else:
                at = np.random.default_rng(start).permutation(capacity)[:num]
                column.write(at, new[: len(at)])
        capacity += num if kind == "grow" else 0
        index = draw.integers(0, capacity, (3, 4))
        for at in (slice(0, capacity), index, torch.from_numpy(index)):
            assert torch.equal(*(column.take(at) for column in columns))


def play(learner: ml.Learner, numbers: range) -> list[Tensor]:
    found = []
    for i in numbers:
        if i % 4 == 0:
            learner.begin(f"round {i}")
        if not learner.restarts:
            learner.observe(*batch(i, rows=1 + i % 4), task=f"customer {i % 3}")
        learner.observe(*batch(100 + i))
        found.append(learner.predict(batch(7)[0]))
    return found


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("kind", [ml.FTML, ml.FTL, ml.TOE, ml.Scratch])
def test_a_learner_has_the_same_bits(kind: Any, limits: dict[str, Any], tmp_path: Path) -> None:
    def build(**more: Any) -> ml.Learner:
        sizes: dict[str, Any] = {"meta_steps": 2, "tasks_per_step": 3, "query": 2, **limits}
        return kind(lambda: ml.models.mlp(2, 1, (6,)), ml.losses.squared_error, **sizes, **more)

    (tmp_path / "data").mkdir()
    memory, disk = build(), build(data_folder=tmp_path / "data")
    assert all(torch.equal(*pair) for pair in zip(*(play(one, range(10)) for one in (memory, disk)), strict=True))
    for one in (memory, disk):
        if not one.restarts and "customer 1" in one.tasks:
            one.forget("customer 1")
    assert not differences(memory.state_dict(), disk.state_dict())
    assert list((tmp_path / "data").iterdir()) == []  # the files have no names
    memory.save(tmp_path / "memory")
    disk.save(tmp_path / "disk")
    assert (tmp_path / "memory").read_bytes() == (tmp_path / "disk").read_bytes()
    module, loss = ml.models.mlp(2, 1, (6,)), ml.losses.squared_error
    loaded = kind.load(tmp_path / "memory", module, loss, data_folder=str(tmp_path / "data"))
    assert isinstance(tree_leaves(loaded.memory.store._columns)[0], OnDisk)
    for one in (memory, disk, loaded):
        play(one, range(12, 16))
    assert not differences(memory.state_dict(), disk.state_dict())
    assert not differences(memory.state_dict(), loaded.state_dict())
    names = [name for name in memory.tasks if name.startswith("customer")]
    if names and not memory.restarts:
        x = batch(3)[0]
        many = [one.predict_many(dict.fromkeys(names, x)) for one in (memory, loaded)]
        assert not differences(many[0], many[1])


def test_n_way_tasks_have_the_same_bits(tmp_path: Path) -> None:
    learners = [
        ml.FTML(
            lambda: nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2)),
            ml.losses.cross_entropy,
            meta_steps=2,
            tasks_per_step=2,
            support=2,
            query=2,
            max_datapoints=4,
            data_folder=folder,
        )
        for folder in (None, tmp_path)
    ]
    for one in learners:
        for t in range(5):
            one.begin(str(t), classes=[t, (t + 2) % 5])
            one.observe(batch(t, rows=6)[0], torch.arange(6) % 2, ids=[10 * t + i for i in range(6)])
    assert not differences(learners[0].state_dict(), learners[1].state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [False, True])
def test_a_learner_on_a_gpu_reads_from_the_disk(classes: bool, tmp_path: Path) -> None:
    """The draws are on the host, and the rows that they name are moved to the GPU."""
    found = []
    for folder in (None, tmp_path):
        loss = ml.losses.cross_entropy if classes else ml.losses.squared_error
        one = ml.FTML(
            lambda: ml.models.mlp(2, 2 if classes else 1, (6,)), loss, device="cuda", engine="eager",
            meta_steps=3, tasks_per_step=3, support=(2, 4), query=4, max_datapoints=6, data_folder=folder,
        )  # fmt: skip
        for i in range(6):
            x, y = batch(i, rows=4)
            one.begin(str(i), classes=[i % 4, 4]) if classes else one.begin(str(i))
            one.observe(x, (y[:, 0] > 0).long() if classes else y)
            if not classes:
                one.observe(x, y, task="customer")
        found.append((one.state.flat.cpu(), one.predict(batch(9)[0]).cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_session_with_data_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()

    def build() -> ml.FTML:
        return make(data_folder=tmp_path / "data", max_datapoints=5)

    states = []
    for name, factory in (("memory", lambda: make(max_datapoints=5)), ("disk", build)):
        with ml.Session(tmp_path / name, factory, updates="inline") as session:
            for i in range(9):
                session.observe(*batch(i), task=f"customer {i % 3}")
        with ml.Session(tmp_path / name, factory, updates="inline") as session:
            session.forget("customer 2")
        # The data folder is no setting: the same folder goes on with data in memory.
        with ml.Session(tmp_path / name, build, updates="inline") as session:
            session.observe(*batch(99), task="customer 0")
            states.append(session.learner.state_dict())
    assert not differences(*states)


def test_forgotten_rows_are_overwritten(tmp_path: Path) -> None:
    learner = make(data_folder=tmp_path, max_datapoints=4)
    for i in range(6):
        learner.observe(*batch(i), task=f"customer {i % 2}")
    secret = batch(1)[0][:1] * 0 + 12345.678
    learner.observe(secret, torch.full((1, 1), 87654.321), task="customer 1", update=False)
    x, y = (torch.tensor([value]).numpy().tobytes() for value in (12345.678, 87654.321))
    rows = learner.memory.store.own
    assert x in content(rows)
    for i in range(3):  # the first one is no longer kept, and its row may be used again or not
        learner.observe(*batch(i), task="customer 1", update=False)
    learner.forget("customer 1")
    assert x not in content(rows)
    assert y not in content(rows)
    assert batch(0)[0][:1].numpy().tobytes() not in content(rows) or "customer 0" in learner.tasks
    learner.forget("customer 0")
    assert not np.frombuffer(content(learner.memory.store.own) if learner.memory.store.data else b"", np.uint8).any()


def test_the_disk_space_is_used_again(tmp_path: Path) -> None:
    learner = make(data_folder=tmp_path, max_tasks=3, meta_steps=0)
    sizes = []
    for i in range(60):
        learner.observe(*batch(i), task=str(i))
        sizes.append(len(content(learner.memory.store.own)))
    assert sizes[-1] == sizes[10]
    del learner
    gc.collect()


def test_a_full_disk_leaves_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(data_folder=tmp_path)
    learner.observe(*batch(0), task="a")
    before = learner.state_dict()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    for name in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(
                OSError, match=r"cannot store.* data in .* \(No space left on device\); free some space"
            ):
                learner.observe(*batch(1), task="b")
        assert not differences(before, learner.state_dict())
    learner.observe(*batch(1), task="b")
    assert learner.tasks == {"a": 3, "b": 3}


def test_bad_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, message in (("missing", "is missing; make it first"), ("file", "is not a folder; make it first")):
        with pytest.raises(FileNotFoundError, match=message):
            make(data_folder=tmp_path / name)
    learner = make(data_folder=tmp_path)
    with pytest.raises(ValueError, match="data_folder is set when a learner is built"):
        learner.data_folder = None
    learner.observe(*batch(0), task="a")
    import copy

    with pytest.raises(TypeError, match=r"belongs to one process.*save the learner"):
        copy.deepcopy(learner)


CHILD = """
import json, os, resource, sys, threading, time
import torch
import metaleader as ml

torch.set_num_threads(1)
where, folder, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
MB = 2**20
ROWS, WIDTH = 64, 4096  # a task is 1 MiB


def build():
    return ml.FTML(
        lambda: torch.nn.Linear(WIDTH, 1), ml.losses.squared_error, inner_lr=1e-5, inner_steps=1, meta_steps=1,
        tasks_per_step=2, support=4, query=4, engine="eager", data_folder=folder if where == "disk" else None,
    )


def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)
warm = build()
warm.observe(x, y, task="0")
warm.predict_many({"0": x[:1]})
warm.save(folder + "/warm")
ml.FTML.load(folder + "/warm", torch.nn.Linear(WIDTH, 1), ml.losses.squared_error)
del warm
base, most, done = status("RssAnon"), 0, False


def watch():
    global most
    while not done:
        most = max(most, status("RssAnon"))
        time.sleep(0.002)


watcher = threading.Thread(target=watch)
watcher.start()
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit * MB, hard))
learner = build()
try:
    for i in range(4 * limit):
        learner.observe(x + i, y, task=str(i % (2 * limit)), update=i % 16 == 0)
    learner.predict(x[:1], task="3")
    # safetensors maps files privately, which counts towards the limit of the system, although it takes no memory.
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    learner.save(folder + "/saved")
    total = learner.memory.num_bytes
    again = ml.FTML.load(
        folder + "/saved", torch.nn.Linear(WIDTH, 1), ml.losses.squared_error, data_folder=folder, engine="eager"
    )
    learner.observe(x, y, task="1")
    again.observe(x, y, task="1")
    assert torch.equal(again.state.flat, learner.state.flat)
    learner.forget("5")
    print(json.dumps({"bytes": total, "tasks": len(learner.tasks), "used": most - base}))
except (RuntimeError, MemoryError) as error:
    print(json.dumps({"error": str(error)[:200]}))
done = True
watcher.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of memory and /proc of Linux")
def test_data_is_larger_than_the_memory(tmp_path: Path) -> None:
    """With a limit of private memory of 32 MiB, 128 MiB are observed, drawn, saved and loaded; in memory they fail."""
    limit = 32

    def run(where: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, where, str(tmp_path), str(limit)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    found = run("disk")
    assert found["bytes"] > 4 * limit * 2**20, found
    assert found["tasks"] == 2 * limit - 1
    assert found["used"] < found["bytes"] / 2, found
    assert "alloc" in run("memory")["error"]
