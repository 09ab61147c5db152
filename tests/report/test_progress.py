"""The output of a run: progress and the table at its end."""

import io
from typing import Any

import numpy as np
import pytest
from made_records import made_config
from rich.console import Console

from metaleader.evaluate import Record
from metaleader.report.loaded import LoadedRun
from metaleader.report.progress import Display, result_table
from metaleader.report.text import with_error


def reveal(t, datapoints, errors, accuracy: Any = None):
    return [Record("online", t, "a [bold]task[/]", datapoints, error, accuracy, None) for error in errors]


def shown(terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    with Display(console, "squared error", 4, {"ftml": "FTML"}) as lines:
        lines.begin("ftml", 1, "80 updates, engine eager")
        for t in (1, 2):
            lines.reveal(reveal(t, 10, [1.0, 2.0]), 0.5)
            lines.reveal(reveal(t, 20, [0.25, 0.5]), 1.0)
            lines.round_saved(100.0)
    return text.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    assert shown(False).splitlines() == [
        "FTML: 80 updates, engine eager",
        "FTML: round 2/4, a [bold]task[/], 20 datapoints, squared error 0.375, 3 min 20 s left",
        "FTML: round 3/4, a [bold]task[/], 20 datapoints, squared error 0.375, 1 min 40 s left",
    ]


def test_bars_on_a_terminal():
    text = shown(True)
    assert "\x1b[" in text
    assert "round 3/4, a [bold]task[/], 20 datapoints, squared error 0.375" in text
    assert "left" not in text


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_the_table(rounds, tmp_path):
    draw = np.random.default_rng(0)
    error = draw.random((2, rounds, 2))
    records = [
        {"method": "toe", "seed": s, "round": t, "datapoints": (10, 20)[i], "loss": 9.0, "accuracy": 1 - error[s, t, i]}
        | {"needed": 10 if s == 0 else None}
        for s in range(2)
        for t in range(rounds)
        for i in range(2)
    ]
    config: Any = made_config(records, panels=[10, 20])
    (tmp_path / "times.csv").write_text("method,round,seconds,peak_mb\ntoe,0,31.7,1\ntoe,1,30,2\n")
    table = result_table(LoadedRun.of("run", tmp_path, config, records))
    cells = [next(iter(column.cells)) for column in table.columns]
    third = -(-rounds // 3)

    def cell(part, i):
        means = error[:, part, i].mean(1)
        return with_error(means.mean(), abs(means[0] - means[1]) / 2)

    late, early = slice(rounds - third, rounds), slice(0, third)
    assert cells == ["TOE", cell(late, 0), cell(late, 1), cell(early, 0), "50%", "62"]
