"""The state of a folder without its learner."""

import json

import pytest
from sessions import ROWS, batch, make

from metaleader import cli
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
        assert (found["learner"], found["observations"], found["predictions"]) == ("FTML", 5, 1)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["status", str(folder), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["in_use"] is False
    assert shown["checkpoint"] == shown["last"]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["status", str(folder)])
    assert "datapoints    15" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["status", str(tmp_path)])
    assert "no session in" in capsys.readouterr().err
