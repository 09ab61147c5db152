"""The results pages: tables, figures and numbers come from the published records."""

import csv
import importlib.util
import json
import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from tiny import tiny, tiny_nway

from metaleader.presets import PRESETS
from metaleader.report.curves import stream_panels
from metaleader.report.figures import draw_panels
from metaleader.report.page import report_runs
from metaleader.runner import RunOptions, run_experiment
from metaleader.runner import experiment as runner
from metaleader.runs.folder import read_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUNS = sorted(path.name for path in (DOCS / "results").iterdir() if (path / "config.json").is_file())


def load_tables():
    spec = importlib.util.spec_from_file_location("tables", DOCS / "results" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load_tables()


def page_of(records):
    """The name of the page that shows the records: the longest that begins their name."""
    return max((path.stem for path in (DOCS / "results").glob("*.md") if records.startswith(path.stem)), key=len)


def test_the_tables_are_those_of_the_records(capsys):
    status = tables.main(["--check"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.409 ± 0.104", "0.408 ± 0.104"), ("| agrees |", "| undecided |"), ("3 agree,", "2 agree,")],
)
def test_a_changed_cell_is_noticed_and_restored(old, new, tmp_path, monkeypatch, capsys):
    page = (DOCS / "results" / "sinusoid.md").read_text()
    copy = tmp_path / "sinusoid.md"
    copy.write_text(page.replace(old, new, 1))
    monkeypatch.setattr(tables, "PAGES", (copy,))
    assert tables.main(["--check"]) == 1
    diff = capsys.readouterr().out.splitlines()
    assert any(line.startswith("-") and new in line for line in diff)
    assert any(line.startswith("+") and old in line for line in diff)
    assert tables.main([]) == 0
    assert copy.read_text() == page


def test_a_block_without_an_end_is_an_error():
    page = (DOCS / "results" / "sinusoid.md").read_text()
    with pytest.raises(ValueError, match="needs an <!-- end -->"):
        tables.render(page.replace("<!-- end -->", "", 1))


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_no_table_of_means_is_written_by_hand(path):
    by_hand = tables.BLOCK.sub("", path.read_text())
    assert not re.search(r"^\|.*±", by_hand, re.MULTILINE)


# Numbers in the running text, each as the words of its cell.
SENTENCES = [
    ("rainbow-mnist", "an error of {ftml error 100 mean} % after 100 datapoints and {ftml error 900 mean} % after 900"),
    ("rainbow-mnist", "as few datapoints as FTML to reach 90 % ({toe needed mean} and {ftml needed mean})"),
    ("rainbow-mnist", "52 more ({toe needed all mean} and {ftml needed all mean})"),
    ("rainbow-mnist", "is {ftml error_0 20 mean} % instead of {ftml error 20 mean} %"),
    ("rainbow-mnist", "the last third are {ftml needed seeds} for FTML and {toe needed seeds} for TOE"),
    ("rainbow-mnist", "is {ftl error_0 20 mean} % without adaptation, {ftl error_1 20 mean} % after one step"),
    ("rainbow-mnist", "after one step and {ftl error_20 20 mean} % after 20 steps"),
    ("rainbow-mnist", "a single one it has {ftml-one error_1 100 mean} % after 100 datapoints"),
    ("rainbow-mnist", "100 datapoints and {ftml-one error_1 900 mean} % after 900"),
    ("rainbow-mnist", "its error of {scratch error 900 mean} % is 1.7 times FTML's {ftml error 900 mean} %"),
    ("rainbow-mnist", "with FTML ({scratch error 900 first mean} and {ftml error 900 first mean} %)"),
    ("rainbow-mnist", "({ftl error 900 first mean} %, with 20 steps {ftl error_20 900 first mean} %;"),
    ("rainbow-mnist", "the three seeds was {rainbow-mnist-three-seeds ftml error 900 mean digits=2} % and"),
    ("rainbow-mnist", "over ten seeds it is {ftml error 900 mean digits=2} %"),
    (
        "rainbow-mnist-paper",
        "FTML {ftml error 900 mean} % after 900 datapoints instead of 3.5 %, TOE {toe error 900 mean} instead",
    ),
    (
        "rainbow-mnist-paper",
        "90 % on the last third are {toe needed seeds} by seed for TOE and {ftml needed seeds} for FTML",
    ),
    (
        "rainbow-mnist-paper",
        "TOE ({toe error 900 mean} %) and FTL ({ftl error 900 mean} %, with 20 steps {ftl error_20 900 mean} %)",
    ),
    ("rainbow-mnist-three-seeds", "the three thirds is {toe error 900 mean first}, {toe error 900 mean tasks=19:37}"),
    ("rainbow-mnist-extras", "and {toe-matched error 900 mean first}, {toe-matched error 900 mean tasks=19:37} and"),
    ("rainbow-mnist-extras", "and {toe-matched error 900 mean} % with 16 times the updates"),
    (
        "rainbow-mnist-extras",
        "(by seed {scratch-long error 900 tasks=0:6 less=rainbow-mnist-three-seeds:scratch seeds} points)",
    ),
    ("pose", "FTML has the smallest error: {ftml loss 60 mean} after 60 datapoints (FTL {ftl loss 60 mean}, TOE"),
    ("pose", "TOE {toe loss 60 mean}, from scratch {scratch loss 60 mean}) and {ftml loss 400 mean} after 400"),
    ("pose", "(from scratch {scratch loss 400 mean}, TOE {toe loss 400 mean}, FTL {ftl loss 400 mean})"),
    ("pose", "{pose-paper-steps ftml loss_10 400 mean} to {ftml loss 400 mean}, from scratch's from"),
    ("pose", "from scratch's from {pose-paper-steps scratch loss_10 400 mean} to {scratch loss 400 mean}"),
    ("pose", "TOE's from {pose-paper-steps toe loss_10 400 mean} to {toe loss 400 mean} and"),
    ("pose", "FTL's from {pose-paper-steps ftl loss_10 400 mean} to {ftl loss 400 mean}."),
    ("pose", "seed 0 is a tie ({ftml loss 60 seed=0 digits=4} and {ftl loss 60 seed=0 digits=4})"),
    ("pose", "not in seed 0 ({ftml loss_5 400 median seed=0 digits=4})"),
    ("cifar100", "it has {ftml accuracy 50 mean} %, TOE {toe accuracy 50 mean} %, last-layer"),
    ("cifar100", "last-layer FTML {ftml-last accuracy 50 mean} % and from scratch {scratch accuracy 50 mean} %."),
    ("cifar100", "After 2,000 it has {ftml accuracy 2000 mean} %, from scratch {scratch accuracy 2000 mean} %."),
    ("cifar100", "is {ftml accuracy 2000 seeds} for FTML and {scratch accuracy 2000 seeds} for from scratch"),
    ("equal-compute", "their errors are {ftl-matched error 20 mean} and {toe-matched error 20 mean} %"),
    ("pose-scratch-again", "of {scratch all mean loss_position 20}, {scratch all mean loss_position 60} and"),
    ("pose-scratch-again", "and {scratch all mean loss_position 400} in position and {scratch all mean loss_angle 20}"),
    ("pose-scratch-again", "{scratch all mean loss_angle 60} and {scratch all mean loss_angle 400} in angle"),
]


@pytest.mark.parametrize(("records", "sentence"), SENTENCES)
def test_a_sentence_has_the_numbers_of_the_records(records, sentence):
    text = " ".join((DOCS / "results" / f"{page_of(records)}.md").read_text().split())
    assert re.sub(r"\{(.*?)\}", lambda match: tables.cell(f"{records} {match[1]}"), sentence) in text


@pytest.mark.parametrize("run", RUNS)
def test_every_record_of_the_configuration_is_there_once(run):
    config = read_config(DOCS / "results" / run)
    reveal, reveals = config["settings"]["reveal"], config["settings"]["reveals"]
    sizes = config["settings"]["measure_at"] or range(reveal, reveal * reveals + 1, reveal)
    groups = tables.grouped_records(run)
    assert set(groups) == {(method, size) for method in config["methods"] for size in sizes}
    played = [(seed, t) for seed in range(config["seeds"]) for t in range(config["tasks"])]
    for records in groups.values():
        assert sorted((record["seed"], record["round"]) for record in records) == played


@pytest.mark.parametrize("run", RUNS)
def test_no_path_of_a_machine_is_published(run):
    text = (DOCS / "results" / f"{page_of(run)}.md").read_text() + (DOCS / "results" / run / "config.json").read_text()
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|opt|mnt|usr)\b", text)


@pytest.mark.parametrize("run", RUNS)
def test_the_figure_is_the_one_of_the_page(run, tmp_path):
    config = read_config(DOCS / "results" / run)
    records = [record for group in tables.grouped_records(run).values() for record in group]
    panels = stream_panels(records, config["panels"], config["settings"]["gamma"], config["error_name"])
    drawn, _ = draw_panels(panels, tmp_path / "figure")
    assert f"../figures/{run}.png" in (DOCS / "results" / f"{page_of(run)}.md").read_text()
    expected, published = (matplotlib.image.imread(path) for path in (drawn, DOCS / "figures" / f"{run}.png"))
    # Fonts differ between machines; one curve moved by a point of error changes more than this.
    assert expected.shape == published.shape
    assert np.abs(expected - published).mean() < 0.003


def test_a_report_can_be_drawn_from_every_run(tmp_path, monkeypatch):
    """Of the first four tasks, which is faster."""
    monkeypatch.setenv("METALEADER_DATA", str(tmp_path))  # no data sets are needed
    folders = []
    for run in RUNS:
        folder = shutil.copytree(tables.run_folder(run), tmp_path / run)
        head, *lines = (folder / "records.csv").read_text().splitlines(keepends=True)
        (folder / "records.csv").write_text(
            "".join([head, *(line for line in lines if re.search(",online,[0-3],", line))])
        )
        folders.append(folder)
    text = report_runs(folders, tmp_path / "report.html").read_text()
    for run in RUNS:
        for method in json.loads((tmp_path / run / "config.json").read_bytes())["methods"]:
            assert tables.cell(f"{method} name") in text


def test_the_front_page_has_times_of_the_benchmark():
    front, benchmark = (
        set(re.findall(r"[\d.,]+ ms\b", (ROOT / name).read_text())) for name in ("README.md", "benchmarks/README.md")
    )
    assert front
    assert front <= benchmark


@pytest.mark.parametrize("make", [tiny, tiny_nway])
def test_fewer_tasks_are_the_first_of_more(make, tmp_path, monkeypatch):
    """The records of a run with `--tasks` are the first of the whole run, as the pages assume."""
    monkeypatch.setitem(PRESETS, "tiny", make)
    monkeypatch.setattr(runner, "_finish", lambda folder: None)  # no figures
    records = []
    for tasks in (1, 2):
        run_experiment(RunOptions("tiny", seeds=2, tasks=tasks, engine="eager"), tmp_path / str(tasks))
        lines = (tmp_path / str(tasks) / "records.csv").read_text().splitlines()
        records.append([line for line in lines if ",online,1," not in line])
    assert len(records[0]) > 2
    assert records[0] == records[1]


def test_the_table_of_regret_is_that_of_the_file():
    """R(T) is the last regret of the file; against the first method's comparator, it is by hand."""
    with (DOCS / "results" / "regret-sinusoid.csv").open() as file:
        rows = list(csv.DictReader(file))
    _, _, *lines = tables.regret("regret-sinusoid").splitlines()
    for line, method in zip(lines, ("ftml", "ftl", "toe"), strict=True):
        own = [float(row["static_regret"]) for row in rows if (row["method"], row["round"]) == (method, "19")]
        losses = sum(float(row["loss"]) for row in rows if row["method"] == method)
        common = sum(float(row["static_loss"]) for row in rows if row["method"] == "ftml")
        cells = line.split("|")
        assert cells[4].split()[0] == f"{np.mean(own):.1f}"
        assert cells[5].split()[0] == f"{(losses - common) / 3:.1f}"
