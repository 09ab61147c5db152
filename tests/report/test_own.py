"""Reports and tables of records of a user's own loop."""

import csv
import dataclasses

import pytest
from made_records import made_records
from parsed_page import read

import metaleader as ml
from metaleader.report.own import record_rows, write_records
from metaleader.runs.folder import COLUMNS


def played(seed, tasks=2):
    learner = ml.TOE(lambda: ml.models.mlp(1, 1, (4,)), ml.losses.squared_error, meta_steps=1, query=2, seed=seed)
    return list(ml.play(learner, ml.streams.SinusoidStream(tasks=tasks, train=8, seed=seed), 4, steps=[1, 2]))


def test_records_of_play_become_the_table_and_the_charts_of_a_run(tmp_path):
    records = {"toe": [played(0), played(1)], "mine": played(2)}
    path = ml.write_report(records, tmp_path / "page.html", title="<mine>", styles={"mine": {"label": "my method"}})
    page = read(path)
    assert [text for level, text in page.headings if level == 1] == ["<mine>"]
    header, *rows = page.tables["Mean ± standard error over seeds"]
    assert header[:3] == ["method", "tasks", "loss after 4, first third"]
    assert [row[:2] for row in rows] == [["TOE", "2"], ["my method", "2"]]
    last = [r.loss for r in records["mine"] if (r.round, r.datapoints) == (1, 8)]
    assert float(rows[1][-1]) == pytest.approx(last[0], rel=0.01)
    assert "default" in page.tables["loss, last third of the tasks: adaptation steps and batch-norm statistics"][0]
    assert all(address.startswith(("data:", "#")) for address in page.addresses)


def test_records_of_a_run_give_the_numbers_of_its_report(tmp_path):
    rows = made_records("sinusoid", 6, methods=("ftml", "scratch"))
    page = read(ml.write_report(rows, tmp_path / "a.html", gamma=0.1, error_name="squared error", sizes=[10, 20]))
    header, ftml, _ = page.tables["Mean ± standard error over seeds"]
    assert "squared error after 20, last third" in header
    assert ftml[0] == "FTML"


def test_rows_and_a_csv_file(tmp_path):
    records = played(0)
    lines = list(csv.DictReader(write_records(records, tmp_path / "records.csv").read_text().splitlines()))
    assert list(lines[0]) == [*COLUMNS, "loss_2"]
    assert [float(line["loss"]) for line in lines] == [record.loss for record in records]
    assert record_rows(ml.play(*args())) == record_rows([dataclasses.asdict(r) for r in ml.play(*args())])
    assert [row["seed"] for row in record_rows({"a": [records, records]})] == [0] * 4 + [1] * 4


def args():
    learner = ml.TOE(lambda: ml.models.mlp(1, 1, (4,)), ml.losses.squared_error, meta_steps=1, query=2)
    return learner, ml.streams.SinusoidStream(tasks=1, train=8), 4


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([], {}, "there are no records"),
        ("text", {}, "a record is an ml.Record or a row of records.csv, got 't'"),
        ([{"loss": 1.0}], {}, "a record lacks round, task, datapoints"),
        (None, {}, "got None"),
        (played(0) * 2, {}, "two records are of learner, seed 0, round 0 after 4 datapoints; pass the records of each"),
        (played(0), {"sizes": [5]}, "no record has 5 datapoints; there are 4, 8"),
        (played(0), {"styles": {"learner": {"color": "#000000"}}}, "a style has a label, a colour or both"),
        ([{**vars(played(0)[0]), "round": 0.5}], {}, "round of a record must be an integer, got 0.5"),
    ],
)
def test_bad_records(records, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ml.write_report(records, tmp_path / "page.html", **options)
    assert not (tmp_path / "page.html").exists()
