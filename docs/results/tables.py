"""Compute the tables in the results pages from the records in this folder.

    python docs/results/tables.py            rewrite the tables in place
    python docs/results/tables.py --check    print the differences and exit with status 1 if there are any

A generated block begins with one of four comments and ends with `<!-- end -->`:

    <!-- claims: RUN -->     the verdicts of `metaleader verify`
    <!-- tuning: RUN -->     the settings in RUN-tuning.jsonl, one per row
    <!-- regret: FILE -->    the regret in FILE.csv, which `metaleader regret` wrote
    <!-- table: WORDS
    rows: WORDS; ...
    columns: WORDS; ... -->  one cell per row and column

A cell of a `table` is described by the words of its table, row and column together; later words override earlier ones:

    records            a run folder or a .csv.gz file in this folder, such as rainbow-mnist-extras
    method             such as ftml; method=NAME for a method that is no longer in the library
    measure            a column of the records; error is 100 - 100 x accuracy (suffixes as in the records: error_10),
                       needed is the datapoints to proficiency (all data if never proficient), solved is the percentage
                       of tasks proficient after the given number of datapoints
    20                 the number of datapoints; without one, all
    first last all     the third of the tasks (default: last); tasks=40:56 is a range
    change             the last third minus the first
    median             over tasks, instead of the mean
    less=METHOD        subtract another method, seed by seed; less=RECORDS:METHOD takes it from other records, of which
                       only the seeds of this method count
    mean seeds seed=0  the mean over seeds, the values by seed or one seed, instead of mean ± standard error over seeds
    digits=2           after the decimal point
    name               the label of the method
    seconds first-round median-round memory    from times.csv
    text               keep the cell of the page; as a row, keep all cells

The header of a `table` is written by hand. The cell of a method without records is empty.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import difflib
import gzip
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from metaleader.methods import METHODS, label
from metaleader.report.claims import check_claims, counted
from metaleader.report.records import Records, over_seeds, third
from metaleader.runs.folder import read_records, read_times

RESULTS = Path(__file__).resolve().parent
PAGES = (*sorted(RESULTS.glob("*.md")), RESULTS.parent.parent / "README.md")
BLOCK = re.compile(r"(<!-- (table|claims|tuning|regret):(?: |(?=\n))([^>]*?)\s*-->\n)(.*?)(<!-- end -->)", re.DOTALL)
TIMES = {
    "seconds": lambda rows: f"{sum(row['seconds'] for row in rows):,.0f}",
    "first-round": lambda rows: f"{rows[0]['seconds']:.0f}",
    "median-round": lambda rows: f"{statistics.median(row['seconds'] for row in rows):.1f}",
    "memory": lambda rows: f"{max(row['peak_mb'] for row in rows) / 1000:.1f} GB",
}
WORKSPACE = tempfile.TemporaryDirectory()
atexit.register(WORKSPACE.cleanup)


@cache
def run_folder(name: str) -> Path:
    """An unpacked copy of a run folder, or of a single records file with its times."""
    source, folder = RESULTS / name, Path(WORKSPACE.name) / name
    folder.mkdir()
    records = source / "records.csv.gz" if source.is_dir() else RESULTS / f"{name}.csv.gz"
    (folder / "records.csv").write_bytes(gzip.decompress(records.read_bytes()))
    for path in (source / "config.json", source / "times.csv", RESULTS / f"{name}-times.csv"):
        if path.is_file():
            shutil.copy(path, folder / path.name.removeprefix(f"{name}-"))
    return folder


@cache
def grouped_records(name: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Records by method and number of datapoints."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in read_records(run_folder(name)):
        groups.setdefault((record["method"], record["datapoints"]), []).append(record)
    return groups


def parse(words: str) -> dict[str, str]:
    """The settings of a cell."""
    settings = {"tasks": "last", "over": "mean", "show": "error"}
    for word in words.split():
        key, equals, value = word.partition("=")
        if equals:
            settings[key] = value
        elif word in METHODS:
            settings["method"] = word
        elif word.isdigit():
            settings["size"] = word
        elif word in ("first", "last", "all", "change"):
            settings["tasks"] = word
        elif word == "median":
            settings["over"] = word
        elif word in ("mean", "seeds"):
            settings["show"] = word
        elif (RESULTS / word).is_dir() or (RESULTS / f"{word}.csv.gz").is_file():
            settings["records"] = word
        else:
            settings["measure"] = word
    return settings


def per_seed(settings: Mapping[str, str]) -> list[float]:
    """One value per seed; none if the method has no records."""
    if settings["tasks"] == "change":
        late, early = (per_seed({**settings, "tasks": tasks}) for tasks in ("last", "first"))
        return [after - before for after, before in zip(late, early, strict=True)]
    groups, method, measure = grouped_records(settings["records"]), settings["method"], settings["measure"]
    full = max((size for name, size in groups if name == method), default=0)
    if not full:
        return []
    size = int(settings.get("size", full))
    records: Records = groups[method, full if measure in ("needed", "solved") else size]
    if settings["tasks"] in ("first", "last"):
        records = third(records, "first" if settings["tasks"] == "first" else "last")
    elif settings["tasks"] != "all":
        start, stop = map(int, settings["tasks"].split(":"))
        records = [record for record in records if start <= record["round"] < stop]
    values: dict[int, list[float]] = {}
    for record in records:
        if measure in ("needed", "solved"):
            needed = record["needed"] or math.inf
            value = min(needed, full) if measure == "needed" else 100.0 * (needed <= size)
        elif measure.startswith("error"):
            value = 100 - 100 * record[measure.replace("error", "accuracy")]
        else:
            value = record[measure] * (100 if measure.startswith("accuracy") else 1)
        values.setdefault(record["seed"], []).append(value)
    over = statistics.median if settings["over"] == "median" else statistics.fmean
    return [over(values[seed]) for seed in sorted(values)]


def cell(words: str) -> str:
    """The text of a cell."""
    settings = parse(words)
    method, measure = settings["method"], settings["measure"]
    if measure == "name":
        return label(method)
    if measure in TIMES:
        return TIMES[measure]([row for row in read_times(run_folder(settings["records"])) if row["method"] == method])
    values, sign, unit = per_seed(settings), "+" if settings["tasks"] == "change" else "", ""
    if "less" in settings:
        records, _, reference = settings["less"].rpartition(":")
        other = {**settings, "method": reference, "records": records or settings["records"]}
        subtracted = per_seed(other)[: len(values)]
        values = [] if other == settings else [a - b for a, b in zip(values, subtracted, strict=True)]
        sign = "+"
    if not values:
        return ""
    digits = settings.get("digits", "3" if measure.startswith("loss") else "1")
    if measure in ("needed", "solved"):
        digits, unit = "0", " %" if measure == "solved" else ""
    chosen = [values[int(settings["seed"])]] if "seed" in settings else values
    if "seed" in settings or settings["show"] == "seeds":
        return ", ".join(f"{value:{sign}.{digits}f}{unit}" for value in chosen)
    mean, error = over_seeds(np.array(values))
    text = f"{mean:{sign}.{digits}f}{unit}"
    return text if unit or settings["show"] == "mean" else f"{text} ± {error:.{digits}f}"


def table(specification: str, page_table: str) -> str:
    """A table of cells; its header and the cells described as text are those of the page."""
    common, *lines = specification.split("\n")
    words = {key: value.split(";") for key, _, value in (line.partition(":") for line in lines)}
    header, _, *page_rows = ([text.strip() for text in line[1:-1].split("|")] for line in page_table.splitlines())
    page_rows += [[""] * len(header)] * len(words["rows"])
    rows = []
    for row, kept in zip(words["rows"], page_rows, strict=False):
        cells = [f"{common} {row} {column}" for column in words["columns"]]
        rows.append([kept[i] if "text" in one.split() else cell(one) for i, one in enumerate(cells)])
    return markdown(header, rows)


def claims(run: str) -> str:
    """The verdicts on a run."""
    judged = check_claims(run_folder(run))
    rows = [[claim.text, *claim.cells(), claim.verdict] for claim in judged]
    return f"{markdown(['claim', 'effect', 'interval', 'claimed', 'verdict'], rows)}\n{counted(judged)}.\n"


def tuning(run: str) -> str:
    """The settings tried for a run, one per row; "run" marks those of the published run."""
    config = json.loads((RESULTS / run / "config.json").read_bytes())
    digits, scale = (1, 100) if config["error_name"] == "error" else (3, 1)
    usual, methods = {"meta_lr": 1e-3, "inner_lr": 0.1, "clip": None}, list(METHODS)
    learners = {name: given.get("options", given) for name, given in config["settings"]["learners"].items()}  # format 2
    trials = [json.loads(line) for line in (RESULTS / f"{run}-tuning.jsonl").read_text().splitlines()]
    rows = []
    for trial in sorted(trials, key=lambda t: (methods.index(t["method"]), t["seeds"], t["meta_lr"])):
        settings = {key: trial.get(key, usual[key]) for key in usual}
        adapts = trial["method"] in ("ftml", "ftl")
        row = {"method": label(trial["method"]), "seeds": ", ".join(map(str, trial["seeds"]))}
        row["outer step"] = f"{settings['meta_lr']:.0e}".replace("e-0", "e-")
        row["inner step"] = str(settings["inner_lr"]) if adapts else ""
        row["clip"] = str(settings["clip"] or "")
        for steps in ("5", "10"):
            for size, error in trial["errors"][steps].items():
                shown = adapts or steps == "5"  # the other methods do not adapt
                row[f"{steps} steps, after {size}"] = f"{scale * error:.{digits}f}" if shown else ""
        played = {key: value for key, value in learners[trial["method"]].items() if key in usual}
        row[""] = "run" if settings == usual | played else ""
        rows.append(row)
    header = [name for name in rows[0] if any(row[name] for row in rows)]
    return markdown(header, [[row[name] for name in header] for row in rows])


def regret(name: str) -> str:
    """The regret after the last round, against the comparator of each method and against that of the first."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = rows[0]["method"], max(int(row["round"]) for row in rows)
    sums: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        for column in ("loss", "static_loss", "static_converged"):
            sums.setdefault((row["method"], column, row["seed"]), []).append(float(row[column]))
    has_dynamic = all(row["dynamic_regret"] for row in rows)
    table_rows = []
    for method in dict.fromkeys(row["method"] for row in rows):
        seeds = [seed for one, column, seed in sums if (one, column) == (method, "loss")]
        total, own, common = (
            np.array([sum(sums[key, column, seed]) for seed in seeds])
            for key, column in ((method, "loss"), (method, "static_loss"), (first, "static_loss"))
        )
        values = [total / (last + 1), own / (last + 1), total - own, total - common]
        estimates = zip(map(over_seeds, values), (3, 3, 1, 1), strict=True)
        cells = [f"{mean:.{digits}f} ± {error:.{digits}f}" for (mean, error), digits in estimates]
        if has_dynamic:
            final = [float(r["dynamic_regret"]) for r in rows if (r["method"], int(r["round"])) == (method, last)]
            mean, error = over_seeds(np.array(final))
            cells.append(f"{mean:.1f} ± {error:.1f}")
        flags = [flag for seed in seeds for flag in sums[method, "static_converged", seed][:1]]
        table_rows.append([label(method), *cells, f"{sum(flags):.0f} of {len(flags)}"])
    header = [
        "method",
        "mean loss",
        "mean loss of its comparator",
        f"R({last + 1})",
        f"against {label(first)}'s comparator",
    ]
    return markdown([*header, *(["dynamic regret"] if has_dynamic else []), "converged"], table_rows)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, *rows)).replace(
        "\n", f"\n|{'---|' * len(header)}\n", 1
    )


def render(page: str) -> str:
    """A page with its generated blocks computed anew; ValueError for a block without an end."""
    if len(re.findall("<!-- (?:table|claims|tuning|regret):", page)) != len(BLOCK.findall(page)):
        raise ValueError("every generated block needs an <!-- end -->")

    def block(match: re.Match[str]) -> str:
        start, kind, specification, body, end = match.groups()
        if kind == "table":
            return f"{start}{table(specification, body)}{end}"
        return f"{start}{({'claims': claims, 'tuning': tuning, 'regret': regret}[kind])(specification)}{end}"

    return BLOCK.sub(block, page)


def main(arguments: list[str] | None = None) -> int:
    """Rewrite all pages, or compare them; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check, differences = parser.parse_args(arguments).check, []
    for path in PAGES:
        page = path.read_text()
        rendered = render(page)
        if not check:
            path.write_text(rendered)
            continue
        old, new = page.splitlines(keepends=True), rendered.splitlines(keepends=True)
        differences += difflib.unified_diff(old, new, path.name, f"{path.name}, from the records", n=0)
    sys.stdout.writelines(differences)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
