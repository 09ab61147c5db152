"""The published results: every folder can be redrawn, and the pages say what its records say."""

import csv
import gzip
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from metaleader import cli
from metaleader.curves import STYLES
from metaleader.plots import draw_figures
from metaleader.report import write_report
from metaleader.verify import check_claims

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = sorted(path for path in (DOCS / "results").iterdir() if path.is_dir())
LABELS = {"ftml": "FTML", "ftml-last": "FTML, last layer", "ftl": "FTL", "toe": "TOE", "scratch": "from scratch"}
SIZES = (20, 100, 900)


@pytest.fixture(scope="module", params=RESULTS, ids=lambda path: path.name)
def folder(request, tmp_path_factory):
    """A published folder, unpacked as its page says."""
    folder = tmp_path_factory.mktemp("results") / request.param.name
    shutil.copytree(request.param, folder)
    (folder / "records.csv").write_bytes(gzip.decompress((folder / "records.csv.gz").read_bytes()))
    (folder / "records.csv.gz").unlink()
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return (DOCS / "results" / f"{folder.name}.md").read_text()


def rows(folder):
    with open(folder / "records.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_record_of_the_configuration_is_there_once(folder):
    config = json.loads((folder / "config.json").read_bytes())
    sizes = [config["settings"]["reveal"] * (i + 1) for i in range(config["settings"]["reveals"])]
    expected = {
        (method, str(seed), str(t), str(size))
        for method in config["methods"]
        for seed in range(config["seeds"])
        for t in range(config["tasks"])
        for size in sizes
    }
    found = [(r["method"], r["seed"], r["round"], r["datapoints"]) for r in rows(folder)]
    assert len(found) == len(expected)
    assert set(found) == expected


def test_no_path_of_a_machine_is_published(folder, page):
    text = page + (folder / "config.json").read_text()
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|opt|mnt|usr)\b", text)


def test_the_report_is_drawn_from_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("METALEADER_DATA", str(tmp_path))  # no data sets are needed
    text = write_report([folder], tmp_path / "report.html").read_text()
    for method in json.loads((folder / "config.json").read_bytes())["methods"]:
        assert STYLES[method][0] in text


def test_the_figure_is_the_one_of_the_page(folder, page, tmp_path):
    import matplotlib.image

    from metaleader.runs import read_config, read_records

    config = read_config(folder)
    drawn = draw_figures(
        read_records(folder), config["panels"], tmp_path, config["error_name"], config["settings"]["gamma"]
    )[0]
    published = DOCS / "figures" / f"{folder.name}.png"
    assert f"../figures/{folder.name}.png" in page
    one, other = (matplotlib.image.imread(path) for path in (drawn, published))
    # Letters may be drawn otherwise elsewhere; one curve moved by a point of error is more than this.
    assert one.shape == other.shape
    assert np.abs(one - other).mean() < 0.003


def test_the_page_has_the_verdicts(folder, page):
    for claim in check_claims(folder):
        assert claim.uncertainty is not None
        effect, interval, _ = claim.cells()
        assert interval in page, claim.name
        assert effect.split()[0] in page, claim.name
        assert claim.verdict in page


@pytest.fixture(scope="module")
def rainbow(tmp_path_factory):
    text = gzip.decompress((DOCS / "results" / "rainbow-mnist" / "records.csv.gz").read_bytes()).decode()
    return list(csv.DictReader(text.splitlines()))


def over_seeds(records, value):
    """Mean and standard error over three seeds of the means over a seed's records: the plain loops."""
    means = []
    for seed in "012":
        values = [value(r) for r in records if r["seed"] == seed]
        means.append(sum(values) / len(values))
    mean = sum(means) / 3
    return mean, math.sqrt(sum((m - mean) ** 2 for m in means) / 2 / 3)


def errors(records, method, suffix, sizes=SIZES, least=37):
    """Per cent, over the last 19 of the 56 tasks."""
    late = [r for r in records if r["method"] == method and int(r["round"]) >= least]
    found = [
        over_seeds(
            [r for r in late if r["datapoints"] == str(size)], lambda r: 100 - 100 * float(r[f"accuracy{suffix}"])
        )
        for size in sizes
    ]
    return ["{:.2f} ± {:.2f}".format(*pair) for pair in found]


def rainbow_page():
    return (DOCS / "results" / "rainbow-mnist.md").read_text()


def test_rainbow_the_output_of_verify_is_verbatim(tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(DOCS / "results" / "rainbow-mnist", tmp_path / "run")
    (folder / "records.csv").write_bytes(gzip.decompress((folder / "records.csv.gz").read_bytes()))
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", str(folder)])
    assert caught.value.code == 0
    assert capsys.readouterr().out in rainbow_page()


@pytest.mark.parametrize("method", LABELS)
def test_rainbow_the_tables_are_those_of_the_records(rainbow, method):
    page, label = rainbow_page(), LABELS[method]
    full = [r for r in rainbow if r["method"] == method and r["datapoints"] == "900"]
    early, late = ([r for r in full if chosen(int(r["round"]))] for chosen in (lambda t: t < 19, lambda t: t >= 37))
    needed = ["{:.0f} ± {:.0f}".format(*over_seeds(p, lambda r: float(r["needed"] or 900))) for p in (early, late)]
    first = sum(r["needed"] == "20" for r in late) / len(late)
    ever = sum(r["needed"] != "" for r in full) / len(full)
    own = errors(rainbow, method, "")
    assert f"| {label} | {' | '.join([*own, *needed, f'{first:.0%}', f'{ever:.0%}'])} |".replace("%", " %") in page
    task = errors(rainbow, method, "_task")
    assert f"| {label} | {' | '.join(part for pair in zip(own, task, strict=True) for part in pair)} |" in page
    for steps, suffix in ((1, "_1"), (5, ""), (10, "_10")):
        if method in ("toe", "scratch"):
            assert errors(rainbow, method, suffix) == own
        else:
            assert f"| {label} | {steps} | {' | '.join(errors(rainbow, method, suffix))} |" in page
    # The front page has some of it.
    readme = (DOCS.parent / "README.md").read_text()
    assert f"| {label} | {' | '.join(own)} | {needed[0]} | {needed[1]} |" in readme


@pytest.mark.parametrize("method", ["ftml", "ftl", "toe", "scratch"])
def test_rainbow_accuracies_beside_the_prototype(rainbow, method):
    found = []
    for size in (20, 40, 100, 200, 400, 900):
        late = [r for r in rainbow if r["method"] == method and int(r["round"]) >= 40 and r["datapoints"] == str(size)]
        found.append("{:.3f} ± {:.3f}".format(*over_seeds(late, lambda r: float(r["accuracy"]))).replace("0.", "."))
    assert f"| {LABELS[method]}, ours | {' | '.join(found)} |" in rainbow_page()
