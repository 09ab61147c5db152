"""Replicas: the writer's data a moment later, its parameters from its checkpoints, and no change of its folder."""

import os
import shutil
import time

import pytest
import torch
from sessions import ROWS, batch, make

from metaleader.live.replica import Replica
from metaleader.live.session import Session


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the replica does not follow"
        time.sleep(0.01)


def observe(session, numbers, tasks=4, **options):
    for i in numbers:
        session.observe(*batch(i), task=f"customer {i % tasks}", **options)
    assert session.wait(60)


def test_a_replica_follows_data_and_checkpoints(tmp_path):
    x = batch(99)[0]
    with Session(tmp_path, make, share=1.0) as session:
        observe(session, range(6))
        with Replica(tmp_path, make, poll=0.01) as replica:
            assert replica.learner.tasks == session.learner.tasks
            assert (replica.status()["step"], replica.status()["behind"]) == (0, 6)
            session._updater.write_checkpoint()
            until(lambda: replica.status()["checkpoint"] == session.status()["checkpoint"])
            assert (replica.status()["step"], replica.status()["behind"]) == (session.learner.step, 0)
            for name in session.learner.tasks:
                assert torch.equal(replica.predict(x, name), session.predict(x, name))
            # Data of which no checkpoint knows counts in the adaptation.
            observe(session, [6, 7], tasks=5, update=False)
            until(lambda: replica.status()["record"] == session.status()["record"])
            assert replica.learner.tasks == session.learner.tasks
            assert replica.status()["behind"] == 0
            many = dict.fromkeys(session.learner.tasks, x)
            for name, predicted in replica.predict_many(many).items():
                assert torch.allclose(predicted, session.predict(x, name), atol=1e-5)
            observe(session, [8])
            until(lambda: replica.status()["behind"] == 1)
            assert replica.status()["step"] < session.learner.step
    with Session(tmp_path, make) as session, Replica(tmp_path, make) as replica:
        assert torch.equal(replica.predict(x, "customer 1"), session.predict(x, "customer 1"))
        assert replica.status()["step"] == session.learner.step


def test_a_replica_forgets(tmp_path):
    with Session(tmp_path, make) as session, Replica(tmp_path, make, poll=0.01) as replica:
        observe(session, range(6))
        until(lambda: len(replica.learner.tasks) == 4)
        session.forget("customer 1")
        until(lambda: "customer 1" not in replica.learner.tasks)
        observe(session, [9, 10])
        until(lambda: replica.learner.tasks == session.learner.tasks)
        assert replica.status()["error"] is None


def test_a_replica_outlives_its_writer(tmp_path):
    """The folder of a killed writer: its log is not merged, and its lock is gone."""
    with Session(tmp_path / "live", make) as session:
        observe(session, range(4))
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    with Replica(tmp_path / "killed", make, poll=0.01) as replica:
        assert sum(replica.learner.tasks.values()) == 4 * ROWS
        with Session(tmp_path / "killed", make) as session:
            observe(session, range(4, 9))
            until(lambda: replica.learner.tasks == session.learner.tasks)
        until(lambda: replica.status()["step"] == session.learner.step)
        assert torch.equal(
            replica.predict(batch(9)[0], "customer 2"), session.learner.predict(batch(9)[0], "customer 2")
        )


def test_a_replica_of_a_repaired_folder(tmp_path):
    with Session(tmp_path, make) as session:
        observe(session, range(6))
    with Replica(tmp_path, make, poll=0.01) as replica:
        _damage(tmp_path / "journal.sqlite", batch(3)[0])
        with Session(tmp_path, make, repair=True) as session:
            observe(session, [20])
            until(lambda: replica.learner.tasks == session.learner.tasks)


def _damage(path, x):
    content = bytearray(path.read_bytes())
    content[content.index(x.numpy().tobytes())] ^= 1
    path.write_bytes(content)


def test_a_replica_of_inline_updates(tmp_path):
    with Session(tmp_path, make, updates="inline") as session, Replica(tmp_path, make, poll=0.01) as replica:
        observe(session, range(3))
        until(lambda: replica.status()["behind"] == 3)
        session._updater.write_checkpoint()
        until(lambda: replica.status()["behind"] == 0)
        assert torch.equal(replica.predict(batch(9)[0], "customer 2"), session.predict(batch(9)[0], "customer 2"))


def test_tasks_that_the_writer_drops(tmp_path):
    def bounded():
        return make(max_tasks=3)

    with Session(tmp_path, bounded) as session, Replica(tmp_path, bounded, poll=0.01) as replica:
        observe(session, range(9), tasks=5)
        until(lambda: replica.learner.tasks == session.learner.tasks)
        assert len(replica.learner.tasks) == 3


def test_a_replica_changes_no_file(tmp_path):
    with Session(tmp_path, make) as session:
        observe(session, range(4))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    mode = tmp_path.stat().st_mode
    os.chmod(tmp_path, 0o555)
    try:
        with Replica(tmp_path, make, poll=0.01) as replica:
            time.sleep(0.1)
            assert replica.status()["error"] is None
    finally:
        os.chmod(tmp_path, mode)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before


def test_folders_that_a_replica_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no session in .*start the writer first"):
        Replica(tmp_path, make)
    with Session(tmp_path, make) as session:
        observe(session, range(2))
    with pytest.raises(ValueError, match=r"inner_lr is 0.01 in the folder and 0.02 here"):
        Replica(tmp_path, lambda: make(inner_lr=0.02))
    with pytest.raises(ValueError, match="poll must be above 0"):
        Replica(tmp_path, make, poll=0)
    _damage(tmp_path / "journal.sqlite", batch(1)[0])
    with pytest.raises(ValueError, match="damaged: record"):
        Replica(tmp_path, make)


def test_a_replica_says_that_it_cannot_follow(tmp_path, caplog):
    with Session(tmp_path / "a", make) as session:
        observe(session, range(2))
        with Replica(tmp_path / "a", make, poll=0.01) as replica:
            mark = (tmp_path / "a" / "journal.mark").read_bytes()
            (tmp_path / "a" / "journal.mark").write_bytes(b"damaged")
            until(lambda: replica.status()["error"] is not None)
            assert "cannot follow" in caplog.text
            age = replica.status()["age"]
            assert replica.predict(batch(1)[0], "customer 1").isfinite().all()
            (tmp_path / "a" / "journal.mark").write_bytes(mark)
            until(lambda: replica.status()["error"] is None)
            assert replica.status()["age"] < age + 1
