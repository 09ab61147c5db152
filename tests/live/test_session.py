"""Sessions: the learner's verbs, made durable."""

import contextlib
import errno
import logging
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sessions
import torch
from sessions import ROWS, batch, calls, differences, make, make_head, make_sizes, plain_learner, same_state

from metaleader import losses, models
from metaleader.learners import FTML, TOE, Scratch
from metaleader.live import journal
from metaleader.live.calls import Observe, Update
from metaleader.live.errors import ConflictError, UnknownPredictionError
from metaleader.live.replica import Replica
from metaleader.live.session import Session
from metaleader.live.update import PreparedUpdate
from metaleader.live.updater import Updater


@pytest.fixture(params=["background", "inline"])
def mode(request):
    return request.param


def filled(folder, mode: Any = "inline", tasks=4, calls=8, **settings):
    session = Session(folder, make, updates=mode, share=1.0, **settings)
    for i in range(calls):
        session.observe(*batch(i), task=f"customer {i % tasks}", key=f"event {i}")
    assert session.wait(60)
    return session


def test_a_closed_session_continues(tmp_path, mode):
    session = filled(tmp_path / "a", mode)
    before, step = session.learner.state_dict(), session.learner.step
    predicted = session.predict(batch(99)[0], "customer 1")
    session.close()
    with Session(tmp_path / "a", make, updates=mode) as session:
        assert session.learner.step == step >= 2
        assert same_state(session.learner, plain_learner_of(before))
        assert torch.equal(session.predict(batch(99)[0], "customer 1"), predicted)
        assert session.learner.tasks == {f"customer {i}": 2 * ROWS for i in range(4)}


def plain_learner_of(state):
    learner = make()
    learner.load_state_dict(state)
    return learner


def test_inline_updates_are_those_of_the_learner(tmp_path):
    learner = make()
    with filled(tmp_path / "a") as session:
        for i in range(8):
            learner.observe(*batch(i), task=f"customer {i % 4}")
        assert same_state(session.learner, learner)
        assert torch.equal(session.predict(batch(9)[0], "customer 2"), learner.predict(batch(9)[0], "customer 2"))


def test_a_folder_without_checkpoints_replays_its_journal(tmp_path, mode):
    with filled(tmp_path / "a", mode) as session:
        state = session.learner.state_dict()
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("checkpoint*"))
    with Session(tmp_path / "killed", make) as session:
        assert same_state(session.learner, plain_learner_of(state))
    assert same_state(plain_learner(tmp_path / "killed"), plain_learner_of(state))


def test_background_updates_do_not_exclude_calls(tmp_path):
    """They do so after a failure only."""
    filled(tmp_path / "a", "background").close()
    updates = [call for call in calls(tmp_path / "a") if isinstance(call, Update)]
    assert updates
    assert not any(update.exclusive for update in updates)


def test_updates_are_due_when_a_folder_is_opened(tmp_path, monkeypatch):
    with Session(tmp_path / "a", make, updates="thread") as session, session._updater.paused():
        session.observe(*batch(0), task="a")
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    init = Updater.__init__

    def slow(self, *arguments):  # a machine that is busy just then
        init(self, *arguments)
        time.sleep(0.3)

    monkeypatch.setattr(Updater, "__init__", slow)
    with Session(tmp_path / "killed", make, updates="thread") as session:
        assert session.wait(60)
        assert session.learner.step == 2
        session.observe(*batch(1), task="a")


@pytest.mark.parametrize("build", [make_head, make_sizes])
def test_updates_of_other_learners_are_those_of_the_journal(build, tmp_path):
    with Session(tmp_path / "a", build, share=1.0) as session:
        for i in range(8):
            session.observe(*batch(i), task=f"customer {i % 4}")
        assert session.wait(60)
        assert session.learner.step >= 2
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
        with Session(tmp_path / "killed", build) as recovered:
            assert same_state(recovered.learner, session.learner)
    assert same_state(plain_learner(tmp_path / "a", build), session.learner)


def test_updates_in_shards(tmp_path):
    with Session(tmp_path / "a", lambda: make(shards=2)) as session:
        for i in range(6):
            session.observe(*batch(i), task=f"customer {i % 3}")
        assert session.wait(60)
        state, step = session.learner.state_dict(), session.learner.step
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert step >= 2
    with Session(tmp_path / "killed", lambda: make(shards=2)) as session:
        restored = session.learner.state_dict()
        assert session.learner.step == step
        for name, value in state["params"].items():
            assert torch.equal(restored["params"][name], value)


def test_updates_after_a_checkpoint_are_made_again(tmp_path, mode):
    filled(tmp_path / "a", mode).close()
    with Session(tmp_path / "a", make, updates=mode) as session:
        assert session.status()["checkpoint"] == session.status()["record"]
        for i in range(10, 12):
            session.observe(*batch(i), task=f"customer {i % 5}")
        session.wait()
        state = session.learner.state_dict()
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert len(list((tmp_path / "killed").glob("checkpoint*"))) == 1
    with Session(tmp_path / "killed", make) as session:
        assert same_state(session.learner, plain_learner_of(state))


def test_a_key_makes_a_call_once(tmp_path, mode):
    with Session(tmp_path / "a", make, updates=mode) as session:
        assert session.observe(*batch(1), task="a", key="event 1") is True
        assert session.observe(*batch(1), task="a", key="event 1") is False
        with pytest.raises(ValueError, match="used before, for other data"):
            session.observe(*batch(2), task="a", key="event 1")
        with pytest.raises(ValueError, match="used before, for other data"):
            session.observe(*batch(1), task="b", key="event 1")
        assert session.observe(*batch(1), task="a") is True
        assert session.learner.tasks == {"a": 2 * ROWS}
    with Session(tmp_path / "a", make) as session:
        assert session.observe(*batch(1), task="a", key="event 1") is False


def test_the_latest_keys_are_remembered(tmp_path):
    with Session(tmp_path / "a", make, keys=2) as session:
        for i in range(3):
            session.observe(*batch(i), task="a", key=f"event {i}")
        assert session.observe(*batch(2), task="a", key="event 2") is False
        assert session.observe(*batch(0), task="a", key="event 0") is True


def test_a_key_that_arrives_twice_at_once(tmp_path):
    with Session(tmp_path / "a", make) as session:
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(session.observe(*batch(1), task="a", key="event 1")))
            for _ in range(8)
        ]
        _run(threads)
        assert sorted(results) == [False] * 7 + [True]
        assert session.learner.tasks == {"a": ROWS}


def _run(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_names_that_are_no_text_are_refused(tmp_path):
    x, y = batch(1)
    session: Any
    with Session(tmp_path, make) as session:
        for name in (None, float("nan"), 1.0):
            for call in (
                lambda name=name: session.observe(x, y, task=name),
                lambda name=name: session.remember(x, task=name, name="order 1"),
                lambda name=name: session.predict(x, name),
            ):
                with pytest.raises(ValueError, match=r"the name of a task must be a string or an integer"):
                    call()
        with pytest.raises(ValueError, match="a key must be a string or an integer, got"):
            session.observe(x, y, task="a", key=["event"])
        assert session.observe(x, y, task=3, key=1) is True
        assert session.observe(x, y, task="3", key="1") is False
        assert session.learner.tasks == {"3": ROWS}


def test_labels_come_later(tmp_path, mode):
    folder = tmp_path / "a"
    with filled(folder, mode) as session:
        x, y = batch(20)
        assert torch.equal(session.predict(x, "customer 1", name="order 55"), session.predict(x, "customer 1"))
        session.predict(x, "customer 1", name="order 55")  # repeated: the same prediction
        with pytest.raises(ValueError, match="name 'order 55' was used for another prediction"):
            session.predict(x + 1, "customer 1", name="order 55")
        shutil.copytree(folder, tmp_path / "killed")
    with Session(tmp_path / "killed", make, updates=mode) as session:
        assert session.status()["predictions"] == 1
        with pytest.raises(ValueError, match=r"no prediction 'order 56' waits .*the latest 100000"):
            session.label("order 56", y)
        with pytest.raises(ValueError, match="rows"):
            session.label("order 55", y[:2])
        assert session.label("order 55", y) is True
        assert session.label("order 55", y) is False
        assert session.learner.tasks["customer 1"] == 3 * ROWS
        assert session.status()["predictions"] == 0
        session.predict(x, "customer 1", name="order 55")
        assert session.status()["predictions"] == 0
    (*_, last) = [call for call in calls(tmp_path / "killed") if isinstance(call, Observe)]
    assert torch.equal(last.x, x)
    assert torch.equal(last.y, y)


def test_inputs_of_a_task_without_data_are_remembered(tmp_path):
    x, y = batch(1)
    with Session(tmp_path, make) as session:
        session.remember(x, task="new", name="order 1")
        session.remember(x, task="new", name="order 1")
        with pytest.raises(ConflictError, match="name 'order 1' was used for another prediction"):
            session.remember(x, task="other", name="order 1")
        with pytest.raises(UnknownPredictionError):
            session.label("order 2", y)
        assert session.label("order 1", y) is True
        assert session.label("order 1", y) is False
    for rewrites in (False, True):  # the name is known after a restart, and after the journal was written anew
        with Session(tmp_path, make) as session:
            session.remember(x, task="new", name="order 1")
            assert session.status()["predictions"] == 0
            assert session.learner.tasks == {"new": ROWS}
            with pytest.raises(ConflictError, match="name 'order 1' was used for another prediction"):
                session.predict(x + 1, "new", name="order 1")
            if not rewrites:
                session.compact()


def test_predictions_of_many_tasks(tmp_path):
    with filled(tmp_path / "a") as session:
        xs = {f"customer {i}": batch(i)[0] for i in range(3)}
        for name, y in session.predict_many(xs).items():
            assert torch.allclose(y, session.predict(xs[name], name), atol=1e-5)


def test_a_forgotten_task_is_nowhere(tmp_path, mode):
    folder = tmp_path / "a"
    secret = torch.full((3, 2), 12345.678), torch.full((3, 1), 0.5)
    with filled(folder, mode) as session:
        session.observe(*secret, task="secret name", update=False, key="secret key")
        session.predict(secret[0] * 0, "secret name", name="secret prediction")
        session.predict(batch(0)[0], "customer 1", name="kept prediction")
        session._updater.write_checkpoint()
        assert _holds(folder, b"secret name", secret[0])
        params = session.learner.params
        session.forget("secret name")
        assert not _holds(folder, b"secret name", secret[0])
        assert "secret name" not in session.learner.tasks
        with pytest.raises(ValueError, match="no data of task 'secret name'"):
            session.forget("secret name")
        with pytest.raises(ValueError, match="no prediction 'secret prediction'"):
            session.label("secret prediction", secret[1])
        session.observe(*batch(50), task="customer 1")
        session.wait()
        state = session.learner.state_dict()
        shutil.copytree(folder, tmp_path / "killed")
    assert params.keys() == state["params"].keys()
    with Session(tmp_path / "killed", make, updates=mode) as session:
        assert same_state(session.learner, plain_learner_of(state))
        assert session.observe(*batch(3), task="customer 3", key="event 3") is False
        assert session.label("kept prediction", batch(0)[1]) is True
    assert not _holds(tmp_path / "killed", b"secret name", secret[0])


def test_inputs_without_targets_are_forgotten(tmp_path):
    secret = torch.full((3, 2), 12345.678)
    with Session(tmp_path, make) as session:
        session.remember(secret, task="secret name", name="order 1")
        assert _holds(tmp_path, b"secret name", secret)
        session.forget("secret name")
        assert not _holds(tmp_path, b"secret name", secret)
        with pytest.raises(UnknownPredictionError):
            session.label("order 1", torch.zeros(3, 1))


def test_data_that_limits_have_dropped_is_forgotten(tmp_path):
    secret = torch.full((3, 2), 12345.678), torch.full((3, 1), 0.5)
    with Session(tmp_path, lambda: make(max_tasks=2), updates="inline") as session:
        session.observe(*secret, task="secret name", update=False)
        for i in range(2):
            session.observe(*batch(i), task=f"customer {i}")
        state = session.learner.state_dict()
        assert "secret name" not in session.learner.tasks
        session.forget("secret name")
        assert not _holds(tmp_path, b"secret name", secret[0])
        assert same_state(session.learner, plain_learner_of(state))
        with pytest.raises(ValueError, match="no data of task 'secret name'"):
            session.forget("secret name")


def _holds(folder, name, x):
    data = b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
    return name in data or x[0, :1].numpy().tobytes() * 2 in data


def test_forgetting_needs_room(tmp_path, monkeypatch):
    with filled(tmp_path / "a") as session:
        before = session.learner.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: _Usage())
            with pytest.raises(OSError, match=r"forget needs .* bytes .*, 7 are free"):
                session.forget("customer 1")
        assert same_state(session.learner, plain_learner_of(before))
        session.forget("customer 1")


def test_compacting_drops_from_the_files_what_the_learner_has_dropped(tmp_path, monkeypatch):
    def build():
        return make(max_datapoints=4, max_tasks=3, reservoir=True)

    with Session(tmp_path / "a", build, updates="inline") as session:
        for i in range(200):
            session.observe(*batch(i, rows=200), task=f"customer {i % 5}", key=f"event {i}", update=i % 20 == 0)
        session.predict(batch(0)[0], "customer 4", name="waiting")
        session.remember(batch(1)[0], task="nobody", name="of a new task")
        before = session.learner.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: _Usage())
            with pytest.raises(OSError, match=r"compact needs .* bytes .*, 7 are free"):
                session.compact()
        session.compact()
        assert not differences(session.learner.state_dict(), before, "")
        assert session._journal.last - session._journal.first < 10
        assert session._journal.bytes < 200 * 200 * 12 / 5
        assert not session.observe(*batch(7, rows=200), task="customer 2", key="event 7")
    with Session(tmp_path / "a", build, updates="inline") as session:
        assert not differences(session.learner.state_dict(), before, "")
        assert not session.observe(*batch(7, rows=200), task="customer 2", key="event 7")
        assert session.label("waiting", batch(0)[1])
        assert session.label("of a new task", batch(1)[1])
        session.observe(*batch(300), task="customer 4")
        state = session.learner.state_dict()
    with Session(tmp_path / "a", build, updates="inline") as session:
        assert not differences(session.learner.state_dict(), state, "")


class _Usage:
    free = 7


def test_what_the_learner_refuses_changes_nothing(tmp_path, mode):
    with filled(tmp_path / "a", mode) as session:
        session._updater.write_checkpoint()
        state, record = session.learner.state_dict(), session.status()["record"]
        x, y = batch(0)
        for bad in ((x * torch.nan, y), (x[:, :1], y), (x[:2], y), (x[:0], y[:0]), ("text", y)):
            with pytest.raises(ValueError):  # noqa: PT011 - the messages are the learner's
                session.observe(*bad, task="customer 1", key="bad")
        with pytest.raises(ValueError, match="no data of task 'nobody'"):
            session.predict(x, "nobody")
        assert session.status()["record"] == record
        assert same_state(session.learner, plain_learner_of(state))
        assert session.observe(x, y, task="customer 1", key="bad") is True


def test_a_call_that_is_refused_after_it_was_written(tmp_path):
    """Two first observations of different shapes, which are checked before either is stored."""
    folder = tmp_path / "a"

    with Session(folder, make) as session:
        x, y = batch(0)
        session._writer.submit(Observe("a", x, y, None, "later"))
        with pytest.raises(ValueError, match="earlier datapoints have"):
            session._writer.submit(Observe("b", x.double(), y, None, "later"))
        session.observe(x, y, task="c")
        session.wait()
        state = session.learner.state_dict()
        shutil.copytree(folder, tmp_path / "killed")
    for path in (folder, tmp_path / "killed"):
        with Session(path, make) as session:
            assert same_state(session.learner, plain_learner_of(state))
            assert set(session.learner.tasks) == {"a", "c"}


def test_eight_threads_call_everything(tmp_path, mode):
    """The final state is that of the calls made one after the other, in the order of the journal."""
    folder, errors = tmp_path / "a", []
    session = filled(folder, mode, calls=5)

    def work(t):
        try:
            for i in range(2):
                number = 1000 * t + i
                session.observe(*batch(number), task=f"customer {number % 4}", key=f"event {number}")
                x = batch(number)[0]
                assert session.predict(x, f"customer {number % 4}").isfinite().all()
                session.predict_many({"customer 0": x, "customer 1": x})
                session.predict(x, "customer 1", name=f"prediction {number}")
                session.label(f"prediction {number}", batch(number)[1])
                session.status()
                if t == 1 and i == 1:
                    session.observe(*batch(1), task="gone")
                    session.forget("gone")
        except BaseException as error:
            errors.append(error)

    _run([threading.Thread(target=work, args=(t,)) for t in range(1, 9)])
    assert errors == []
    session.wait()
    state = session.learner.state_dict()
    assert sum(session.learner.tasks.values()) == (5 + 8 * 2 * 2) * ROWS
    session.close()
    assert same_state(plain_learner(folder), plain_learner_of(state))
    with Session(folder, make) as session:
        assert same_state(session.learner, plain_learner_of(state))


def test_predictions_are_answered_during_an_update(tmp_path, monkeypatch):
    """From the parameters before it, and with data that arrives meanwhile."""
    running, go_on = threading.Event(), threading.Event()
    original = PreparedUpdate.run
    with Session(tmp_path / "a", make, share=1.0) as session:
        session.observe(*batch(0), task="a")
        session.wait()
        before, step = session.predict(batch(5)[0], "a"), session.learner.step

        def slow(self):
            running.set()
            assert go_on.wait(60)
            return original(self)

        monkeypatch.setattr(PreparedUpdate, "run", slow)
        session.observe(*batch(1), task="b")
        assert running.wait(60)
        assert torch.equal(session.predict(batch(5)[0], "a"), before)
        session.observe(*batch(2), task="a")
        assert not torch.equal(session.predict(batch(5)[0], "a"), before)
        assert session.status()["behind"] == 1
        assert session.learner.step == step
        go_on.set()
        assert session.wait(60)
        assert session.learner.step > step
        state = session.learner.state_dict()
    monkeypatch.undo()
    assert same_state(plain_learner(tmp_path / "a"), plain_learner_of(state))


def test_other_settings_are_refused(tmp_path):
    filled(tmp_path / "a").close()
    others = {
        r"inner_lr is 0.01 in the folder and 0.02 here": lambda: make(inner_lr=0.02),
        r"weights is None in the folder and \[.* here": lambda: make(weights=lambda n: [1.0] * n),
        r"learner is 'FTML' in the folder and 'TOE' here": lambda: with_model(models.mlp(2, 1, (6,)), kind=TOE),
        r"loss is 'squared_error' in the folder and 'absolute' here": lambda: with_model(
            models.mlp(2, 1, (6,)), loss=absolute
        ),
        r"layer linear1 is None in the folder and Linear here.*parameter .* is \['torch.float32', 6.* 7": lambda: (
            with_model(models.mlp(2, 1, (7, 3)))
        ),
    }
    for message, factory in others.items():
        with pytest.raises(ValueError, match=message):
            Session(tmp_path / "a", factory)
    Session(tmp_path / "a", make).close()


def absolute(prediction, target):
    return (prediction - target).abs().mean(-1)


def with_model(model, loss=losses.squared_error, kind: Any = FTML):
    settings = make().options.plain()
    return kind(model, loss, **{name: settings[name] for name in kind.Options.__dataclass_fields__})


def test_a_learner_with_data_is_taken_over(tmp_path):
    learner = make()
    for i in range(4):
        learner.observe(*batch(i), task=f"customer {i % 2}")
    learner.save(tmp_path / "leader.safetensors")
    load = lambda: FTML.load(tmp_path / "leader.safetensors", models.mlp(2, 1, (6,)), losses.squared_error)  # noqa: E731
    with Session(tmp_path / "a", load, updates="inline") as session:
        assert same_state(session.learner, learner)
        session.observe(*batch(9), task="customer 1")
    learner.observe(*batch(9), task="customer 1")
    (tmp_path / "leader.safetensors").unlink()
    with Session(tmp_path / "a", make) as session:
        assert same_state(session.learner, learner)


def test_a_second_session_is_refused(tmp_path):
    with filled(tmp_path / "a"), pytest.raises(ValueError, match="in use by another session"):
        Session(tmp_path / "a", make)
    session = Session(tmp_path / "a", make)
    child = os.fork()
    if child == 0:
        codes = []
        for call in (lambda: session.observe(*batch(0), task="a"), session.status):
            try:
                call()
            except ValueError as error:
                codes.append(0 if "belongs to process" in str(error) else 1)
        session.close()  # has no effect
        os._exit(0 if codes == [0, 0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert session.observe(*batch(0), task="a") is True
    session.close()


UNCLOSED = """
import resource
import sys

import sessions
from metaleader.live.session import Session

session = Session(sys.argv[1], sessions.make, updates="inline")
session.observe(*sessions.batch(0), task="a")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


def test_a_session_that_cannot_write_at_the_end_of_its_process_logs_one_line(tmp_path):
    paths = os.pathsep.join([str(Path(sessions.__file__).parent), *sys.path])
    process = subprocess.run(
        [sys.executable, "-c", UNCLOSED, tmp_path / "a"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = process.stderr.splitlines()
    assert "a was closed without a checkpoint; its journal has all calls: [Errno 27] cannot write" in line
    with Session(tmp_path / "a", make) as session:
        assert session.learner.tasks == {"a": ROWS}


def test_a_closed_session_refuses_calls(tmp_path):
    session = filled(tmp_path / "a")
    session.close()
    session.close()
    for call in (
        lambda: session.observe(*batch(0), task="a"),
        lambda: session.predict(batch(0)[0], "customer 1"),
        lambda: session.forget("customer 1"),
        session.status,
    ):
        with pytest.raises(ValueError, match="is closed; open the folder again"):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"updates": "sometimes"}, "updates must be one of background, process, thread, inline"),
        ({"share": 0}, "share must be above 0 and at most 1, got 0"),
        ({"share": 1.5}, "share must be"),
        ({"keys": -1}, "keys must be an integer of at least 0, got -1"),
        ({"predictions": 0.5}, "predictions must be an integer"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Session(tmp_path / "a", make, **arguments)
    assert not (tmp_path / "a").exists()


def test_a_backup_can_be_opened(tmp_path, mode):
    with filled(tmp_path / "a", mode) as session:
        session._updater.write_checkpoint()
        session.observe(*batch(30), task="customer 1")
        session.wait()
        session.backup(tmp_path / "backup")
        state = session.learner.state_dict()
        session.observe(*batch(31), task="customer 1")
        with pytest.raises(ValueError, match="backup exists; name a new folder"):
            session.backup(tmp_path / "backup")
    with Session(tmp_path / "backup", make) as session:
        assert same_state(session.learner, plain_learner_of(state))


class _FullDisk:
    """A connection to a journal whose copy does not fit the disk."""

    def backup(self, target):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    def close(self):
        pass


def test_a_backup_on_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    with filled(tmp_path / "a") as session:
        with monkeypatch.context() as patch:
            patch.setattr(journal, "connect", lambda path, readonly: _FullDisk())
            with pytest.raises(OSError, match=r"cannot write the backup .*full") as caught:
                session.backup(tmp_path / "b")
            assert caught.value.errno == errno.ENOSPC
        assert not (tmp_path / "b").exists()
        session.backup(tmp_path / "b")
        state = session.learner.state_dict()
    with Session(tmp_path / "b", make) as session:
        assert same_state(session.learner, plain_learner_of(state))


def test_a_task_at_fault_is_set_aside(tmp_path, mode, caplog):
    """Its data is kept, the updates go on without it, and a replay does the same."""
    folder = tmp_path / "a"
    with filled(folder, mode) as session, caplog.at_level(logging.WARNING):
        x, y = batch(1)
        for i in range(8, 14):
            step = session.learner.step
            session.observe(x * 1e18, y * 1e30, task="bad", update=False)
            session.observe(*batch(i), task=f"customer {i % 4}")
            session.wait()
            assert session.learner.step > step
        assert set(session.status()["set_aside"]) == {"bad"}
        assert session.learner.tasks["bad"] == 6 * ROWS
        assert "task 'bad' is set aside" in caplog.text
        assert session.status()["update_error"] is None
        session._updater.write_checkpoint()
        session.readmit("bad")
        with pytest.raises(ValueError, match="'bad' is not set aside"):
            session.readmit("bad")
        session.observe(*batch(14), task="customer 2")
        session.wait()
        state = session.learner.state_dict()
        shutil.copytree(folder, tmp_path / "killed")
    assert same_state(plain_learner(folder), plain_learner_of(state))
    with Session(tmp_path / "killed", make, updates=mode) as session:
        assert same_state(session.learner, plain_learner_of(state))


def test_updates_that_fail_otherwise_are_not_made(tmp_path, caplog):
    """The data is kept, and predictions go on from the parameters before."""
    folder = tmp_path / "a"
    with Session(folder, make, share=1.0) as session, caplog.at_level(logging.WARNING):
        session.observe(*batch(0), task="a")
        session.wait()
        before = session.learner.params
        x, y = batch(1)
        session.observe(x * 1e18, y * 1e30, task="a")
        session.wait()
        assert "not finite" in session.status()["update_error"]
        assert "failed and were not made" in caplog.text
        assert all(torch.equal(value, before[name]) for name, value in session.learner.params.items())
        state = session.learner.state_dict()
        shutil.copytree(folder, tmp_path / "killed")
    with Session(tmp_path / "killed", make) as session:
        assert same_state(session.learner, plain_learner_of(state))


def _loaded(learner, state):
    learner.load_state_dict(state)
    return learner


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: Scratch(lambda: models.mlp(2, 1, (6,)), losses.squared_error), "Scratch trains on one task at a time"),
        (lambda: None, "pass a function that builds a learner, .*; this one returned NoneType"),
        (make(), "pass a function that builds a learner, .*; got FTML"),
        (None, "pass a function that builds a learner, .*; got NoneType"),
    ],
)
def test_factories_that_build_no_learner_of_a_session(factory, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Session(tmp_path / "a", factory)
    assert not (tmp_path / "a").exists()
    Session(tmp_path / "a", make).close()
    with pytest.raises(ValueError, match=message):
        Session(tmp_path / "a", factory)
    with pytest.raises(ValueError, match=message):
        Replica(tmp_path / "a", factory)
    Session(tmp_path / "a", make).close()


def test_methods_of_a_users_own_are_called(tmp_path):
    class Mine(FTML):
        def update(self, steps=None):
            super().update(2 * (self.options.meta_steps if steps is None else steps))

        def observe(self, x, y, *, task=None, ids=None, update=True):
            super().observe(2 * x, y, task=task, ids=ids, update=update)

    def make_mine():
        return Mine(lambda: models.mlp(2, 1, (6,)), losses.squared_error, inner_lr=0.01, inner_steps=2, meta_steps=2)

    with Session(tmp_path / "a", make_mine) as session:
        session.observe(*batch(0), task="a")
        session.wait()
        assert session.learner.step == 4
        data = session.learner.memory.named("a")
        assert data is not None
        assert torch.equal(data.x, 2 * batch(0)[0])
        state = session.learner.state_dict()
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    with Session(tmp_path / "killed", make_mine) as session:
        assert same_state(session.learner, _loaded(make_mine(), state))


def test_a_folder_that_was_deleted_stores_nothing(tmp_path, mode):
    folder = tmp_path / "a"
    session = Session(folder, make, updates=mode)
    assert session.observe(*batch(1), task="a") is True
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=r"journal.mark was deleted while it was in use"):
        session.observe(*batch(2), task="a")
    assert session.learner.tasks == {"a": ROWS}
    with contextlib.suppress(OSError):
        session.close()
