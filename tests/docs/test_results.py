"""The published results: every folder can be redrawn, and the pages say what its records say."""

import csv
import gzip
import json
import math
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny, tiny_nway

from metaleader import cli, experiment
from metaleader.experiment import Experiment, run_experiment
from metaleader.presets import PRESETS
from metaleader.report.claims import check_claims
from metaleader.report.curves import STYLES
from metaleader.report.figures import draw_figures
from metaleader.report.page import write_report
from metaleader.runs.folder import read_times

DOCS = Path(__file__).parents[2] / "docs"
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

    from metaleader.runs.folder import read_config, read_records

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


def published(name):
    text = gzip.decompress((DOCS / "results" / name / "records.csv.gz").read_bytes()).decode()
    return list(csv.DictReader(text.splitlines()))


@pytest.fixture(scope="module")
def rainbow():
    return published("rainbow-mnist")


@pytest.fixture(scope="module")
def extras():
    """Rainbow's methods beside those of the figure."""
    with gzip.open(DOCS / "results" / "rainbow-mnist-extras.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def pose():
    return published("pose")


@pytest.fixture(scope="module")
def cifar():
    return published("cifar100")


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


def counts(records, method):
    """Datapoints to 90 %, early and late; the parts of late tasks solved at the first reveal, of all tasks ever."""
    full = [r for r in records if r["method"] == method and r["datapoints"] == "900"]
    early, late = ([r for r in full if chosen(int(r["round"]))] for chosen in (lambda t: t < 19, lambda t: t >= 37))
    needed = ["{:.0f} ± {:.0f}".format(*over_seeds(p, lambda r: float(r["needed"] or 900))) for p in (early, late)]
    first = sum(r["needed"] == "20" for r in late) / len(late)
    ever = sum(r["needed"] != "" for r in full) / len(full)
    return [*needed, f"{100 * first:.0f} %", f"{100 * ever:.0f} %"]


def page_of(name):
    return (DOCS / "results" / f"{name}.md").read_text()


def rainbow_page():
    return page_of("rainbow-mnist")


@pytest.mark.parametrize(("name", "status"), [("rainbow-mnist", 1), ("pose", 1), ("cifar100", 1)])
def test_the_output_of_verify_is_verbatim(name, status, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(DOCS / "results" / name, tmp_path / "run")
    (folder / "records.csv").write_bytes(gzip.decompress((folder / "records.csv.gz").read_bytes()))
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", str(folder)])
    assert caught.value.code == status
    assert capsys.readouterr().out in page_of(name)


@pytest.mark.parametrize("method", LABELS)
def test_rainbow_the_tables_are_those_of_the_records(rainbow, method):
    page, label = rainbow_page(), LABELS[method]
    own, needed = errors(rainbow, method, ""), counts(rainbow, method)
    assert f"| {label} | {' | '.join([*own, *needed])} |" in page
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


def medians(records, value):
    """Mean and standard error over three seeds of the medians over a seed's records."""
    middles = [statistics.median(value(r) for r in records if r["seed"] == seed) for seed in "012"]
    return statistics.mean(middles), statistics.stdev(middles) / math.sqrt(3)


def of(records, method, size, rounds):
    return [r for r in records if r["method"] == method and r["datapoints"] == str(size) and int(r["round"]) in rounds]


# Thirds of the tasks.
POSE_EARLY, POSE_LATE = range(30), range(60, 90)
CIFAR_EARLY, CIFAR_LATE = range(32), range(64, 96)


@pytest.mark.parametrize("method", ["ftml", "ftl", "toe", "scratch"])
def test_pose_the_tables_are_those_of_the_records(pose, method):
    page, label = page_of("pose"), LABELS[method]

    def row(column, over=over_seeds, sizes=(20, 60, 400)):
        found = [over(of(pose, method, size, POSE_LATE), lambda r: float(r[column])) for size in sizes]
        return ["{:.3f} ± {:.3f}".format(*pair) for pair in found]

    def needed(rounds):
        counts = over_seeds(of(pose, method, 400, rounds), lambda r: float(r["needed"] or 400))
        return "{:.0f} ± {:.0f}".format(*counts)

    everything = of(pose, method, 400, range(90))
    ever = sum(r["needed"] != "" for r in everything) / len(everything)
    first = sum(r["needed"] == "20" for r in everything) / len(everything)
    own = row("loss")
    assert f"| {label} | {' | '.join([*own, *row('loss', medians, (60, 400))])} |" in page
    cells = [needed(POSE_EARLY), needed(POSE_LATE), f"{first:.0%}", f"{ever:.0%}"]
    assert f"| {label} | {' | '.join(cells)} |".replace("%", " %") in page
    pairs = zip(own, row("loss_task"), strict=True)
    assert f"| {label} | {' | '.join(part for pair in pairs for part in pair)} |" in page
    for steps, column in ((1, "loss_1"), (5, "loss_5"), (10, "loss"), (20, "loss_20")):
        if method in ("toe", "scratch"):
            assert row(column) == own
        else:
            cells = [*row(column), *row(column, medians, (400,))]
            assert f"| {label} | {steps} | {' | '.join(cells)} |" in page
    parts = [column for column in ("loss_position", "loss_angle") if method != "scratch"]
    cells = [cell for column in parts for cell in row(column)]
    assert not cells or f"| {label} | {' | '.join(cells)} |" in page


@pytest.mark.parametrize("size", [60, 400])
def test_pose_the_seeds_of_the_aims(pose, size):
    """The table of means by seed, FTML and FTL with 20 steps too."""
    for label, method, column in (
        ("FTML", "ftml", "loss"),
        ("FTML, 20 steps", "ftml", "loss_20"),
        ("FTL", "ftl", "loss"),
        ("FTL, 20 steps", "ftl", "loss_20"),
        ("TOE", "toe", "loss"),
        ("from scratch", "scratch", "loss"),
    ):
        found = []
        for seed in "012":
            values = [float(r[column]) for r in of(pose, method, size, POSE_LATE) if r["seed"] == seed]
            found.append(f"{sum(values) / len(values):.3f}")
        assert f"| {size} | {label} | {' | '.join(found)} |" in page_of("pose")


def test_pose_the_medians_of_the_aims(pose):
    for column, start in (("loss", "0.036 with 10 steps (seeds "), ("loss_5", "0.041 with 5 (")):
        late = of(pose, "ftml", 400, POSE_LATE)
        found = [statistics.median(float(r[column]) for r in late if r["seed"] == seed) for seed in "012"]
        assert start + ", ".join(f"{value:.3f}" for value in found) + ")" in page_of("pose")
        assert f"{sum(found) / 3:.3f}" == start[:5]


def test_pose_at_the_papers_step_sizes():
    with gzip.open(DOCS / "results" / "pose-paper-steps.csv.gz", "rt", newline="") as file:
        records = list(csv.DictReader(file))
    for method, label in (
        ("ftml", "FTML, 10 steps"),
        ("ftl", "FTL, 10 steps"),
        ("toe", "TOE"),
        ("scratch", "from scratch"),
    ):
        value = lambda r: float(r["loss_10"])  # noqa: E731
        pairs = [over_seeds(of(records, method, size, POSE_LATE), value) for size in (20, 60, 400)]
        pairs += [medians(of(records, method, size, POSE_LATE), value) for size in (60, 400)]
        assert f"| {label} | {' | '.join('{:.3f} ± {:.3f}'.format(*pair) for pair in pairs)} |" in page_of("pose")


@pytest.mark.parametrize(
    ("name", "sizes", "digits"), [("pose", ("60", "400"), 3), ("rainbow-mnist", ("100", "900"), 1)]
)
def test_the_tuning(name, sizes, digits):
    """Every line of the tuning is a row, and the one with the preset's settings is marked."""
    lines = (DOCS / "results" / f"{name}-tuning.jsonl").read_text().splitlines()
    preset, page = PRESETS[name]("standard"), page_of(name)
    for found in map(json.loads, lines):
        adapts = found["method"] in ("ftml", "ftl")
        errors = [found["errors"][steps][size] for steps in ("5", "10") for size in sizes]
        cells = [f"{error * (1 if digits == 3 else 100):.{digits}f}" for error in errors]
        cells[2:] = cells[2:] if adapts else ["", ""]
        inner = str(found.get("inner_lr", 0.1)) if adapts else ""
        usual = {"meta_lr": 1e-3, "inner_lr": 0.1, "clip": None}
        own = usual | getattr(preset.methods[found["method"]], "keywords", {})
        ran = usual | {setting: found[setting] for setting in usual if setting in found} == own
        start = [LABELS[found["method"]], f"{found['meta_lr']:.0e}".replace("e-0", "e-"), inner]
        if name == "pose":
            start.insert(1, ", ".join(map(str, found.get("seeds", [found.get("seed")]))))
            start.append(str(found.get("clip", "")))
        assert f"| {' | '.join([*start, *cells, 'run' if ran else ''])} |" in page
    assert len(lines) == page.split("## Tuning and budgets")[1].split("\n\n| method")[1].split("\n\n")[0].count("\n| ")
    assert page.count(" | run |") == 4


@pytest.mark.parametrize("method", ["toe", "scratch"])
def test_rainbow_at_the_papers_step_size(method):
    with gzip.open(DOCS / "results" / "rainbow-mnist-paper-steps.csv.gz", "rt", newline="") as file:
        records = list(csv.DictReader(file))
    assert (
        f"| {LABELS[method]} | {' | '.join([*errors(records, method, ''), *counts(records, method)])} |"
        in rainbow_page()
    )


@pytest.mark.parametrize("method", ["ftml-first", "ftl-matched", "toe-matched"])
def test_rainbow_the_extra_methods(extras, method):
    cells = [*errors(extras, method, ""), *errors(extras, method, "_10", (20, 900)), *counts(extras, method)]
    assert f"| {STYLES[method][0]} | {' | '.join(cells)} |" in rainbow_page()


def test_rainbow_from_scratch_with_more_updates(rainbow, extras):
    first = [r for r in rainbow + extras if int(r["round"]) < 6]
    for method in ("scratch", "scratch-long"):
        cells = errors(first, method, "", (20, 100, 300, 900), 0)
        assert f"| {STYLES[method][0]} | {' | '.join(cells)} |" in rainbow_page()


@pytest.mark.parametrize("method", ["ftml-first", "ftl", "ftl-matched", "toe", "toe-matched"])
def test_rainbow_against_ftml_by_seed(rainbow, extras, method):
    records = rainbow + extras

    def seeds(name, size):
        late = of(records, name, size, range(37, 56))
        return [100 - 100 * statistics.mean(float(r["accuracy"]) for r in late if r["seed"] == s) for s in "012"]

    cells = [
        ", ".join(f"{one - own:+.1f}" for one, own in zip(seeds(method, size), seeds("ftml", size), strict=True))
        for size in SIZES
    ]
    assert f"| {STYLES[method][0]} | {' | '.join(cells)} |" in rainbow_page()


@pytest.mark.parametrize("method", ["ftml", "ftml-last", "toe", "scratch"])
def test_cifar_the_tables_are_those_of_the_records(cifar, method):
    page, label = page_of("cifar100"), LABELS[method]

    def row(column, rounds=CIFAR_LATE):
        found = [
            over_seeds(of(cifar, method, size, rounds), lambda r: 100 * float(r[column])) for size in (50, 250, 2000)
        ]
        return ["{:.1f} ± {:.1f}".format(*pair) for pair in found]

    own = row("accuracy")
    assert f"| {label} | {' | '.join([*own, *row('accuracy', CIFAR_EARLY)])} |" in page
    pairs = zip(own, row("accuracy_task"), strict=True)
    assert f"| {label} | {' | '.join(part for pair in pairs for part in pair)} |" in page
    for steps, column in ((1, "accuracy_1"), (5, "accuracy"), (10, "accuracy_10")):
        if method in ("toe", "scratch"):
            assert row(column) == own
        else:
            assert f"| {label} | {steps} | {' | '.join(row(column))} |" in page
    # Of each reveal of a task after the first, a fifth of the datapoints are of the class that is new.
    for r in cifar:
        if r["method"] == method:
            new = int(r["datapoints"]) // (5 if r["round"] != "0" else 1)
            assert int(r["new_datapoints"]) == new
    assert "| datapoints, genuinely new (tasks after the first) | 10 | 50 | 400 |" in page


@pytest.mark.parametrize("method", ["ftml", "ftml-last", "toe", "scratch"])
def test_cifar_later_against_early(cifar, method):
    def gains(name, size):
        means = []
        for seed in "012":
            late, early = (
                [100 * float(r["accuracy"]) for r in of(cifar, name, size, rounds) if r["seed"] == seed]
                for rounds in (CIFAR_LATE, CIFAR_EARLY)
            )
            means.append(sum(late) / 32 - sum(early) / 32)
        return np.array(means)

    own = [gains(method, size) for size in (50, 250, 2000)]
    net = [gain - gains("scratch", size) for gain, size in zip(own, (50, 250, 2000), strict=True)]
    cells = [f"{gain.mean():+.1f} ± {gain.std(ddof=1) / math.sqrt(3):.1f}" for gain in (*own, *net)]
    if method == "scratch":
        cells[3:] = [""] * 3
    else:
        assert all((gain > 0).all() for gain in net)  # the page: in every seed
    assert f"| {LABELS[method]} | {' | '.join(cells)} |" in page_of("cifar100")


def test_equal_compute_the_tables_are_those_of_the_records():
    folder, page = DOCS / "results" / "equal-compute", page_of("equal-compute")
    with gzip.open(folder / "records.csv.gz", "rt", newline="") as file:
        records = list(csv.DictReader(file))
    times = read_times(folder)
    methods = json.loads((folder / "config.json").read_bytes())["methods"]
    assert len(methods) == 8

    def seeds(method, size, column):
        late = of(records, method, size, range(37, 56))
        return [100 * (1 - statistics.mean(float(r[column]) for r in late if r["seed"] == s)) for s in "012"]

    def cell(method, size, column="accuracy"):
        errors = seeds(method, size, column)
        return f"{statistics.mean(errors):.1f} ± {statistics.stdev(errors) / math.sqrt(3):.1f}"

    for method in methods:
        cells = [cell(method, size) for size in (20, 40, 60)] + [cell(method, s, "accuracy_10") for s in (20, 60)]
        seconds = sum(row["seconds"] for row in times if row["method"] == method)
        assert f"| {STYLES[method][0]} | {' | '.join(cells)} | {seconds:.0f} |" in page
        behind = [
            ", ".join(
                f"{one - own:+.1f}"
                for one, own in zip(seeds(method, s, "accuracy"), seeds("ftml", s, "accuracy"), strict=True)
            )
            for s in (20, 60)
        ]
        assert method == "ftml" or f"| {STYLES[method][0]} | {' | '.join(behind)} |" in page


def test_the_front_page_has_the_headlines(pose, cifar):
    readme = (DOCS.parent / "README.md").read_text()
    for records, size, rounds, form, value in (
        (cifar, 50, CIFAR_LATE, "{:.1f} ± {:.1f}", lambda r: 100 * float(r["accuracy"])),
        (cifar, 2000, CIFAR_LATE, "{:.1f} ± {:.1f}", lambda r: 100 * float(r["accuracy"])),
        (pose, 60, POSE_LATE, "{:.3f} ± {:.3f}", lambda r: float(r["loss"])),
        (pose, 400, POSE_LATE, "{:.3f} ± {:.3f}", lambda r: float(r["loss"])),
    ):
        found = [of(records, method, size, rounds) for method in ("ftml", "ftl", "toe", "scratch")]
        cells = [form.format(*over_seeds(own, value)) if own else "" for own in found]
        assert f"after {size:,}" in readme
        assert f" | {' | '.join(cells)} |".replace("|  |", "| |") in readme


def test_the_front_page_has_the_times_of_the_benchmark():
    front, table = ((DOCS.parent / name).read_text() for name in ("README.md", "benchmarks/README.md"))
    for time, row in (
        ("2.11 ms", "25 tasks: gradient"),
        ("4.21 ms", "3 seeds side by side"),
        ("1,432 ms", "one task at a time"),
        ("1,378 ms", "torchopt"),
        ("1,513 ms", "higher"),
    ):
        assert time in front
        assert any(time in line and row in line for line in table.splitlines()), row


@pytest.mark.parametrize("make", [tiny, tiny_nway])
def test_fewer_tasks_are_the_first_of_more(make, tmp_path, monkeypatch):
    """So that the records of an interim result are those of a run with `--tasks`."""
    monkeypatch.setitem(PRESETS, "tiny", make)
    monkeypatch.setattr(experiment, "_finish", lambda folder: None)  # no figures
    found = []
    for tasks in (1, 2):
        run_experiment(Experiment("tiny", seeds=2, tasks=tasks, engine="eager"), tmp_path / str(tasks))
        lines = (tmp_path / str(tasks) / "records.csv").read_text().splitlines()
        found.append([line for line in lines if ",online,1," not in line])
    assert len(found[0]) > 2
    assert found[0] == found[1]


ADDITIONS = {
    "FTML": "ftml",
    "learned step sizes": "ftml-rates",
    "loss after every step": "ftml-every",
    "annealed outer step": "ftml-anneal",
    "all three": "ftml-plus",
}


MEMORIES = {
    "all {}": ("memory-8", "ftml"),
    "the newest 16": ("memory-16", "ftml-bounded"),
    "the newest 8": ("memory-8", "ftml-newest"),
    "any 8": ("memory-8", "ftml-bounded"),
}


def late_records(file, name):
    """Of the last third of the tasks."""
    with gzip.open(DOCS / "results" / f"{file}-{name}.csv.gz", "rt") as opened:
        return [r for r in csv.DictReader(opened) if int(r["round"]) >= {"sinusoid": 26, "rainbow-digits": 37}[name]]


def compared(name, sizes, own, plain):
    """Cells of a table: mean and error, and the difference from plain FTML in each seed."""
    value = lambda r: float(r["loss"]) if name == "sinusoid" else 100 - 100 * float(r["accuracy"])  # noqa: E731
    digits = 3 if name == "sinusoid" else 2
    for size in sizes:
        of, base = ([r for r in records if r["datapoints"] == str(size)] for records in (own, plain))
        mean, error = over_seeds(of, value)
        yield f"{mean:.{digits}f} ± {error:.{digits}f}"
        means = [[np.mean([value(r) for r in some if r["seed"] == seed]) for seed in "012"] for some in (of, base)]
        apart = [one - other for one, other in zip(*means, strict=True)]
        yield "" if own is plain else ", ".join(f"{gap:+.{digits}f}" for gap in apart)


@pytest.mark.parametrize(("name", "tasks", "sizes"), [("sinusoid", 40, (10, 30)), ("rainbow-digits", 56, (20, 60))])
def test_the_tables_of_the_additions(name, tasks, sizes):
    rows = {label: ("additions", method) for label, method in ADDITIONS.items()}
    rows |= {label.format(tasks): row for label, row in MEMORIES.items()}
    records = {row: [r for r in late_records(row[0], name) if r["method"] == row[1]] for row in rows.values()}
    lines = page_of("additions").splitlines()
    for label, (file, method) in rows.items():
        plain = records["additions" if file == "additions" else "memory-8", "ftml"]
        cells = compared(name, sizes, records[file, method], plain)
        assert f"| {label} | {' | '.join(cells)} |" in lines
