"""The state of a folder without its learner."""

import json
import re

import pytest
from sessions import ROWS, batch, make

from metaleader import cli
from metaleader.live.serve.history import History
from metaleader.live.session import Session
from metaleader.live.status import read_status


def test_status_of_a_folder(tmp_path, capsys):
    folder = tmp_path / "a"
    with Session(folder, make, share=1.0) as session:
        for i in range(4):
            session.observe(*batch(i), task=f"customer {i % 3}")
        session.wait()
        session.predict(batch(0)[0], "customer 1", name="order 1")
        session.observe(*batch(5), task="customer 1", update=False)
        found, own = read_status(folder), session.status()
        assert found["in_use"] is True
        assert {name: found[name] for name in ("tasks", "datapoints")} == {"tasks": 3, "datapoints": 5 * ROWS}
        assert found["updates"] == own["step"]
        assert found["last"] == own["record"]
        assert (found["learner"], found["predictions"]) == ("FTML", 1)
        assert found["behind"] == own["behind"] == 0
        session.label("order 1", batch(0)[1])
        assert read_status(folder)["predictions"] == 0
        assert session.wait(60)
        step = session.learner.step
    with pytest.raises(SystemExit, match="0"):
        cli.main(["status", str(folder), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["in_use"] is False
    assert shown["checkpoint"] == shown["last"]
    assert shown["step"] == shown["updates"] == step
    assert shown["set_aside"] == {}
    assert "loss" not in shown
    with pytest.raises(SystemExit, match="0"):
        cli.main(["status", str(folder)])
    assert re.search(r"^datapoints +18$", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["status", str(tmp_path)])
    assert "no session in" in capsys.readouterr().err


def test_tasks_set_aside(tmp_path, capsys):
    x, y = batch(1)
    with Session(tmp_path, make, updates="inline") as session:
        for i in range(4):
            session.observe(*batch(i), task="ab"[i % 2])
        session.observe(x * 1e6, y * 1e6, task="bad", update=False)
        for i in range(4):
            session.observe(*batch(i), task="a")
        assert list(session.learner.set_aside) == ["bad"]
        expected = session.learner.set_aside
    assert read_status(tmp_path)["set_aside"] == expected
    with pytest.raises(SystemExit, match="0"):
        cli.main(["status", str(tmp_path)])
    shown = capsys.readouterr().out
    assert re.search(r"^set aside +1$", shown, re.MULTILINE)
    assert f"set aside: bad: {expected['bad']}" in shown
    with Session(tmp_path, make, updates="inline") as session:
        session.readmit("bad")
        assert read_status(tmp_path)["set_aside"] == {}
        # A journal that was written anew begins with the state.
        session.learner.memory.set_aside("bad", "a reason")
        session.forget("b")
        assert read_status(tmp_path)["set_aside"] == {"bad": "a reason"}
        assert read_status(tmp_path)["step"] == session.learner.step


def test_the_error_of_a_folder_that_was_served(tmp_path, capsys):
    with Session(tmp_path, make) as session:
        session.observe(*batch(1), task="a")
    history = History(tmp_path)
    history.add("a", 3, 0.25, 0.75, 0, 0)
    history.save()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["status", str(tmp_path), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (shown["loss"], shown["loss_unadapted"]) == (0.25, 0.75)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["status", str(tmp_path)])
    assert re.search(r"^loss unadapted +0.75$", capsys.readouterr().out, re.MULTILINE)
