"""The process that makes updates: its messages, its life, and the sessions that use it."""

import functools
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from sessions import batch, make, make_head, make_sizes, plain_learner, same_state

from metaleader import losses
from metaleader.learners import FTML
from metaleader.learners.together import FailedUpdate
from metaleader.live import runner, worker
from metaleader.live.process import EndedError, RefusedError
from metaleader.live.runner import Runner
from metaleader.live.session import Session
from metaleader.live.update import PreparedUpdate


class TwoInputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x["a"]) + x["b"]


def make_pairs():
    return FTML(TwoInputs, losses.squared_error, inner_lr=0.01, inner_steps=1, meta_steps=2, support=2, query=2)


def make_adamw():
    return make(optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.1))


class Frozen(torch.nn.Module):
    """Random features, which differ from one module to the next."""

    def __init__(self):
        super().__init__()
        self.features = torch.nn.Linear(2, 4).requires_grad_(False)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(torch.tanh(self.features(x)))


def make_frozen():
    torch.seed()
    return FTML(Frozen(), losses.squared_error, inner_lr=0.01, inner_steps=1, meta_steps=2, support=2, query=2)


def fill(learner, i=0):
    for j in range(i, i + 6):
        x, y = batch(j)
        x = {"a": x, "b": x[:, :1]} if isinstance(learner.network.module, TwoInputs) else x
        learner.observe(x, y, task=f"customer {j % 3}", update=False)


def sent(tree):
    """A message at the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=worker.send, args=(ours, tree))
        thread.start()
        found = worker.receive(theirs)
        thread.join()
    return found


@pytest.mark.parametrize("build", [make, make_head, make_sizes, make_pairs, make_adamw, make_frozen])
def test_messages_give_the_same_bits(build):
    learner, other = build(), build()
    state = learner.state
    for i in range(3):
        fill(learner, 6 * i)
        prepared = PreparedUpdate(learner, 2)
        assert prepared.batches is not None
        # The first message has the state; later ones continue from that of the other end.
        request = worker.request_of(learner, None if i else state, 2, prepared.batches)
        answer = sent(worker.answer(other, sent(request)))
        learner.state = prepared.run()
        found = worker.tree_of_state(learner, worker.state_of_tree(learner, answer["state"]))
        expected = worker.tree_of_state(learner, learner.state)
        assert str(found) == str(expected)
        flat = worker.state_of_tree(learner, answer["state"]).flat
        assert torch.equal(flat, learner.state.flat)


def test_updates_that_fail():
    learner, other = make(), make()
    learner.observe(1e30 * batch(0)[0], batch(0)[1], task="a", update=False)
    prepared = PreparedUpdate(learner, 2)
    assert prepared.batches is not None
    with pytest.raises(FailedUpdate):
        prepared.run()
    before = other.state
    assert worker.answer(other, worker.request_of(learner, learner.state, 2, prepared.batches)) == {"failed": True}
    assert torch.equal(other.state.flat, before.flat)


def test_the_end_of_a_connection():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall((100).to_bytes(8, "little") + b"part")
        ours.close()
        with pytest.raises(EOFError):
            worker.receive(theirs)


class Buffered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(1))
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.scale * self.layer(x)


def test_buffers_must_be_the_same():
    def facts(module):
        return worker.facts_of(FTML(module, losses.squared_error, inner_lr=0.01, inner_steps=1, support=2))

    module = Buffered()
    assert facts(module) == facts(module)
    differing = [name for name, value in facts(module).items() if value != facts(Buffered())[name]]
    assert differing == ["buffers"]
    assert facts(Frozen())["buffers"] == facts(Frozen())["buffers"]  # messages hold frozen parameters


# The choice between a thread and a process, with a process that is made up.


class Fake:
    """Computes in this process; ends as often as it is told."""

    started = 0
    deaths = 0
    greeting = None
    error = None

    def __init__(self, request):
        type(self).started += 1
        self.pid, self.closed, self._learner = 1000 + self.started, False, make()

    def has_answer(self):
        return True

    def answer(self, timeout=None):
        if self.error is not None:
            raise self.error
        return self.greeting or worker.facts_of(self._learner)

    def run(self, learner, prepared):
        assert not self.closed
        if type(self).deaths:
            type(self).deaths -= 1
            raise EndedError("was ended by SIGKILL")
        return prepared.run()

    def close(self):
        self.closed = True


@pytest.fixture
def fake(monkeypatch):
    kind = type("Fake", (Fake,), {})
    monkeypatch.setattr(runner, "UpdateProcess", kind)
    monkeypatch.setattr(runner, "_SECONDS", 0.0)
    return kind


def run(learner, runner):
    fill(learner)
    prepared = PreparedUpdate(learner, 2)
    expected = prepared.run()
    learner.state = runner.run(prepared)
    assert torch.equal(learner.state.flat, expected.flat)


def test_updates_move_to_a_process_when_they_have_taken_a_second(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "_SECONDS", 1.0)
    learner = make()
    chosen = Runner(tmp_path, learner, make, "background")
    run(learner, chosen)
    assert (chosen.pid, fake.started) == (None, 0)
    chosen._seconds = 1.0
    run(learner, chosen)
    assert (chosen.pid, fake.started) == (1001, 1)
    chosen.close()
    assert chosen.pid is None


def test_a_process_that_ends_is_started_again(fake, tmp_path, caplog):
    learner = make()
    chosen = Runner(tmp_path, learner, make, "process")
    fake.deaths = 2
    run(learner, chosen)
    assert (chosen.pid, fake.started, chosen.reason) == (1003, 3, None)
    assert caplog.text.count("was ended by SIGKILL; it is started again") == 2
    fake.deaths = 3
    run(learner, chosen)
    assert chosen.pid is None
    assert chosen.reason == "the process ended 3 times during the same updates"
    assert "from now on updates run in a thread: the process ended 3 times" in caplog.text
    started = fake.started
    run(learner, chosen)
    assert fake.started == started


@pytest.mark.parametrize(
    ("greeting", "error", "reason", "starts"),
    [
        ({"settings": {}, "code": {}}, None, "the process has another learner; these differ: settings, buffers", 1),
        (None, RefusedError("failed: ImportError: x"), "the process failed: ImportError: x", 1),
        (None, EndedError("ended with status 1"), "the process ended with status 1", 3),
    ],
)
def test_a_process_that_cannot_be_used(greeting, error, reason, starts, fake, tmp_path, caplog):
    fake.greeting, fake.error = greeting, error
    learner = make()
    chosen = Runner(tmp_path, learner, make, "background")
    run(learner, chosen)
    run(learner, chosen)
    assert (chosen.pid, chosen.reason, fake.started) == (None, reason, starts)
    assert f"from now on updates run in a thread: {reason}" in caplog.text
    with pytest.raises(ValueError, match=re.escape(f'updates="process" is not possible: {reason}')):
        Runner(tmp_path, make(), make, "process")


class Own(FTML):
    def update(self, steps=None):
        super().update(steps)


def make_own():
    return Own(lambda: torch.nn.Linear(2, 1), losses.squared_error, inner_lr=0.1, inner_steps=1, support=2)


def make_shards():
    return make(shards=2)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: make(), "cannot be called by another process: <lambda> is not a function"),
        (make_own, "Own overrides update"),
        (make_shards, "has shards"),
    ],
)
def test_learners_that_stay_in_a_thread(build, reason, fake, tmp_path, caplog):
    learner = build()
    chosen = Runner(tmp_path, learner, build, "background")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            fill(learner)
            chosen.run(PreparedUpdate(learner, 2))
    assert caplog.text.count("updates run in a thread, since") == 1
    assert reason in str(chosen.reason)
    assert fake.started == 0
    with pytest.raises(ValueError, match=r'is not possible: .*; use updates="background"'):
        Runner(tmp_path, learner, build, "process")


def test_a_thread_if_asked_for(fake, tmp_path):
    learner = make()
    chosen = Runner(tmp_path, learner, make, "thread")
    run(learner, chosen)
    assert (chosen.pid, chosen.reason, fake.started) == (None, 'updates="thread"', 0)


# Sessions with a process.


def exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, seconds=20.0):
    end = time.monotonic() + seconds
    while exists(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not exists(pid)


def test_updates_of_a_process_are_those_of_the_journal(tmp_path, caplog):
    """With the process killed again and again, a task at fault, and all calls."""
    with Session(tmp_path / "a", make, updates="process", share=1.0) as session:
        pids = [session.status()["update_process"]]
        assert os.getpgid(pids[0]) == pids[0]  # Ctrl-C does not reach it
        for i in range(30):
            session.observe(*batch(i), task=f"customer {i % 4}")
            if i in (5, 20):
                os.kill(pids[-1], signal.SIGKILL)
                assert session.wait(180)
                pids.append(session.status()["update_process"])
            if i == 15:
                session.observe(1e30 * batch(1)[0], batch(1)[1], task="bad")
        assert session.wait(60)
        assert len(set(pids)) == 3
        assert list(session.learner.set_aside) == ["bad"]
        status = session.status()
        assert (status["behind"], status["staleness"], status["stopped"]) == (0, 0.0, None)
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert all(gone(pid, 0) for pid in pids)
    assert "was ended by SIGKILL; it is started again" in caplog.text
    plain = plain_learner(tmp_path / "a")
    assert same_state(plain, session.learner)
    with Session(tmp_path / "killed", make, updates="thread") as recovered:
        assert same_state(plain, recovered.learner)


SCRIPT = """
import os, sys, time
import torch
from metaleader.live.session import Session
from sessions import batch, make

def build():
    return make(meta_steps=100)

if __name__ == "__main__":
    session = Session("folder", build, updates="process")
    session.observe(*batch(0), task="a")
    print(session.status()["update_process"], flush=True)
    time.sleep(600)
"""


def test_the_process_ends_with_the_one_that_started_it(tmp_path):
    (tmp_path / "main.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, sys.path))  # that of pytest has the folder of the tests
    command, environment = [sys.executable, "main.py"], os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert exists(pid)
        parent.kill()
    assert gone(pid)
