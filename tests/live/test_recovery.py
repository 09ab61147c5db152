"""Damage of a folder is detected and named, and everything intact can be recovered."""

import logging
import shutil
import sqlite3

import pytest
import torch
from sessions import ROWS, batch, make, same_state

from metaleader.live.journal import NAME
from metaleader.live.mark import MARK
from metaleader.live.session import Session


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints, after 4 and 8 of 10 observations, as a kill leaves them."""
    with Session(tmp_path / "open", make, updates="inline") as session:
        for i in range(10):
            session.observe(*batch(i), task=f"customer {i % 3}", key=f"event {i}")
            if i in (3, 7):
                session._updater.write_checkpoint()
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    return tmp_path / "killed"


@pytest.fixture
def expected():
    learner = make()
    for i in range(10):
        learner.observe(*batch(i), task=f"customer {i % 3}")
    return learner


def flip(path, at=0.6):
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 16
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_made_again_from_the_journal(folder, expected, caplog):
    newest = sorted(folder.glob("checkpoint-*"))[-1]
    flip(newest)
    with pytest.raises(ValueError, match=rf"{newest.name} is .*; nothing is lost: with repair=True"):
        Session(folder, make)
    with caplog.at_level(logging.WARNING), Session(folder, make, repair=True) as session:
        assert same_state(session.learner, expected)
    assert newest.name in caplog.text
    with Session(folder, make) as session:
        assert same_state(session.learner, expected)


def test_without_any_checkpoint_the_journal_is_enough(folder, expected):
    for path in folder.glob("checkpoint-*"):
        flip(path)
    with Session(folder, make, repair=True) as session:
        assert same_state(session.learner, expected)


def test_a_damaged_mark_costs_nothing(folder, expected):
    flip(folder / MARK)
    with pytest.raises(ValueError, match=r"journal.mark is damaged"):
        Session(folder, make)
    with Session(folder, make, repair=True) as session:
        assert same_state(session.learner, expected)
    with Session(folder, make) as session:
        assert same_state(session.learner, expected)


def test_records_beside_a_damaged_one_are_kept(folder, expected, caplog):
    connection = sqlite3.connect(folder / NAME)
    rows = connection.execute("SELECT id, bytes FROM journal WHERE instr(bytes, ?)", (b"customer 1",)).fetchall()
    number, data = rows[1]
    connection.execute("UPDATE journal SET bytes = ? WHERE id = ?", (data[:-1] + bytes([data[-1] ^ 1]), number))
    connection.commit()
    connection.close()
    with pytest.raises(ValueError, match=rf"journal.sqlite is damaged: record {number >> 24} of 13 is not intact"):
        Session(folder, make)
    with caplog.at_level(logging.WARNING), Session(folder, make, repair=True) as session:
        sizes = session.learner.tasks
        assert {**sizes, "customer 1": sizes["customer 1"] + ROWS} == expected.tasks
        # From the last checkpoint, after 8 observations, with new updates.
        assert session.wait(60)
        assert session.learner.step == 18
        assert session.observe(*batch(9), task="customer 0", key="event 9") is False
        assert session.observe(*batch(4), task="customer 1", key="event 4") is True  # the lost one, sent again
        assert session.wait(60)
        state = session.learner.state_dict()
    assert f"1 of 13 records were damaged and are lost: {number >> 24}; the damaged files are in" in caplog.text
    assert (folder / "damaged-1" / NAME).exists()
    with Session(folder, make) as session:
        assert all(torch.equal(value, session.learner.params[name]) for name, value in state["params"].items())
        assert session.learner.tasks == expected.tasks


def test_a_journal_that_lost_its_end(folder, caplog):
    connection = sqlite3.connect(folder / NAME)
    ((last,),) = connection.execute("SELECT max(id) >> 24 FROM journal")
    connection.execute("DELETE FROM journal WHERE id >> 24 >= ?", (last - 1,))
    connection.commit()
    connection.close()
    with pytest.raises(ValueError, match=rf"it ends at record {last - 2}, but record {last} was written"):
        Session(folder, make)
    with caplog.at_level(logging.WARNING), Session(folder, make, repair=True) as session:
        assert sum(session.learner.tasks.values()) == 8 * ROWS
        assert session.wait(60)
        assert session.learner.step == 18
    assert f"2 of {last} records were damaged and are lost: {last - 1}, {last}" in caplog.text
    Session(folder, make).close()


def test_a_folder_without_its_journal_is_refused(folder):
    for path in folder.glob(f"{NAME}*"):
        path.unlink()
    with pytest.raises(ValueError, match="it ends at record 0, but record 13 was written"):
        Session(folder, make)
    (folder / MARK).unlink()
    with pytest.raises(ValueError, match=r"journal\.(sqlite|mark)"):
        Session(folder, make)
