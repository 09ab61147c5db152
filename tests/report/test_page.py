"""The report: its numbers, bad input, and the page in a real browser."""

import itertools
import json
import math
import re
import types

import matplotlib.image
import numpy as np
import pytest
from browser import Browser, chromium
from made_records import SHAPES, made_records, made_settings, uneven, write_run
from parsed_page import read

from metaleader.cli import main
from metaleader.methods import METHODS, label
from metaleader.report import page as report
from metaleader.report.curves import stream_panels
from metaleader.report.page import report_runs
from metaleader.report.svg import Axes, _ticks, chart, common_axes, legend

TIMES = "method,round,seconds,peak_mb\nftml,0,100,1024\nftml,1,34.5,3072.4\ntoe,0,12,\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs of full size of one preset, one of them unfinished, and one of another preset that needs no data."""
    folder = tmp_path_factory.mktemp("runs")
    full = write_run(folder / "full", made_records())
    (full / "times.csv").write_text(TIMES)
    write_run(folder / "unfinished", made_records(tasks=20, seeds=1, methods=("ftml", "toe")), schedule="paper")
    write_run(folder / "sinusoid", made_records("sinusoid", 6, methods=("ftml", "scratch")), preset="sinusoid")
    return folder


@pytest.fixture(scope="module")
def page(folder):
    with pytest.MonkeyPatch.context() as patch:
        # No data sets: what the page shows must not depend on those that this machine has.
        patch.setenv("METALEADER_DATA", str(folder))
        return report_runs([folder / "full", folder / "unfinished", folder / "sinusoid"], folder / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("chromium is missing")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_every_method_of_the_table_has_a_marker():
    text = legend(method.style for method in METHODS.values())
    assert all(method.style.label in text for method in METHODS.values())


def test_the_page_loads_nothing_and_is_well_formed(page):
    found = read(page)
    assert all(address.startswith(("data:", "#")) for address in found.addresses)
    assert "default-src 'none'" in page.read_text()
    assert all(image["alt"] for image in found.images)
    levels = [level for level, _ in found.headings]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert [text for level, text in found.headings if level == 2] == ["rainbow-mnist", "sinusoid"]


def test_the_table_of_results_is_the_mean_over_seeds_of_means_over_tasks(folder):
    table = read(report_runs([folder / "full"], folder / "one.html")).tables["Mean ± standard error over seeds"]
    assert table[0][:5] == ["method", "tasks", "solved, all tasks", "needed, first third", "needed, last third"]
    assert table[0][5:7] == ["error after 100, first third", "error after 100, last third"]
    assert len(table) == 1 + len(SHAPES)
    records = made_records()
    for method, row in zip(SHAPES, table[1:], strict=True):
        assert row[:2] == [label(method), "56"]
        own = [r for r in records if r["method"] == method]
        last = [r for r in own if r["datapoints"] == 900]
        assert row[2] == f"{np.mean([r['needed'] is not None for r in last]):.0%}"
        for column, rounds, size, value in (
            (3, range(19), 900, lambda r: r["needed"] or 900),
            (4, range(37, 56), 900, lambda r: r["needed"] or 900),
            (5, range(19), 100, lambda r: 1 - r["accuracy"]),
            (8, range(37, 56), 900, lambda r: 1 - r["accuracy"]),
        ):
            part = [r for r in own if r["datapoints"] == size and r["round"] in rounds]
            seeds = [np.mean([value(r) for r in part if r["seed"] == seed]) for seed in range(3)]
            mean, error = (float(text) for text in row[column].split(" ± "))
            digits = 10.0 ** -len(row[column].split(" ± ")[0].partition(".")[2])
            assert mean == pytest.approx(np.mean(seeds), abs=0.51 * digits)
            assert error == pytest.approx(np.std(seeds, ddof=1) / math.sqrt(3), abs=0.51 * digits)


def test_both_readings_of_batch_norm_and_all_numbers_of_steps_are_shown(page):
    table = read(page).tables["error, last third of the tasks: adaptation steps and batch-norm statistics"]
    assert table[0] == [
        "method",
        "run",
        "datapoints",
        "5 steps (the default)",
        "1 step",
        "10 steps",
        "batch norm by D_t",
    ]
    assert len(table) == 1 + 2 * (5 + 2)
    own, one, ten, by_task = (float(text.split(" ± ")[0]) for text in table[1][3:])
    assert [one / own, ten / own, by_task / own] == pytest.approx([1.2, 0.97, 1.05], rel=0.02)


def test_data_that_no_earlier_task_had_is_counted(tmp_path):
    records = made_records("cifar100", 3, reveals=5, methods=("ftml",))
    folder = write_run(
        tmp_path / "run", [{**r, "new_datapoints": r["datapoints"] // 5} for r in records], preset="cifar100"
    )
    table = read(report_runs([folder])).tables[
        "accuracy, last third of the tasks: adaptation steps and batch-norm statistics"
    ]
    assert [[row[1], row[-1]] for row in table] == [
        ["datapoints", "new datapoints"],
        ["50", "10 ± 0"],
        ["250", "50 ± 0"],
        ["2,000", "–"],
    ]


def test_runs_of_one_preset_stand_together_and_what_differs_is_marked(folder):
    page = report_runs([folder / "full", folder / "unfinished"], folder / "two.html")
    found, text = read(page), page.read_text()
    rows = [row[:3] for row in found.tables["Mean ± standard error over seeds"]]
    assert rows == [
        ["method", "run", "tasks"],
        ["FTML", "full", "56"],
        ["FTML", "unfinished", "20"],
        ["FTML, last layer", "full", "56"],
        ["FTL", "full", "56"],
        ["TOE", "full", "56"],
        ["TOE", "unfinished", "20"],
        ["from scratch", "full", "56"],
    ]
    assert '<tr class="differs"><th scope="row">schedule</th><td>standard</td><td>paper</td>' in text
    assert '<tr><th scope="row">experiment</th>' in text


def test_time_and_memory_are_read_where_there_are_any(page):
    assert read(page).tables["Total of all seeds"][1:] == [
        ["FTML", "full", "2 min 14 s", "3,072 MB"],
        ["TOE", "full", "12.0 s", "–"],
    ]


def test_the_contact_sheet_is_there_where_the_data_is(page):
    images = read(page).images
    assert [image["alt"] for image in images] == [
        "Contact sheet: 6 of the 6 tasks played of sinusoid, with some of their datapoints"
    ]
    assert images[0]["src"].startswith("data:image/png;base64,iVBOR")


def test_the_same_runs_give_the_same_page(page, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("METALEADER_DATA", str(folder))
    again = report_runs([folder / "full", folder / "unfinished", folder / "sinusoid"], tmp_path / "again.html")
    assert again.read_bytes() == page.read_bytes()


def test_the_checks_of_verify_are_shown(folder, tmp_path, monkeypatch):
    claims = [
        types.SimpleNamespace(name="later < earlier", verdict="agrees", text="by 30 ± 2 & more"),
        types.SimpleNamespace(name="second", verdict="undecided", text="too few seeds"),
    ]
    monkeypatch.setattr(report, "check_claims", lambda folder: claims)
    text = report_runs([folder / "sinusoid"], tmp_path / "a.html").read_text()
    assert '<span class="verdict agrees">agrees</span><strong>later &lt; earlier</strong>' in text
    assert "by 30 ± 2 &amp; more" in text

    def unable(folder):
        raise ValueError("a claim needs two seeds")

    monkeypatch.setattr(report, "check_claims", unable)
    assert "Not checked: a claim needs two seeds" in report_runs([folder / "sinusoid"], tmp_path / "b.html").read_text()


def test_what_comes_from_files_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>"
    method = evil.replace("/", "")  # methods are names of files
    records = [{**r, "method": method, "task": evil} for r in made_records(tasks=2, reveals=2, methods=("ftml",))]
    folder = write_run(tmp_path / "run", records, preset=evil, note={evil: evil}, versions={"torch": evil})
    (folder / "times.csv").write_text(f"method,round,seconds,peak_mb\n{method},0,1,2\n")
    text = report_runs([folder]).read_text()
    assert evil not in text
    assert method not in text
    assert text.count("<script") == 1
    assert "&lt;script&gt;" in text


def test_a_stream_of_ones_own_is_shown_as_its_configuration_says(tmp_path):
    config = {"panels": [20, 80], "settings": made_settings(None), "error_name": "mistakes"}
    folder = write_run(tmp_path / "run", made_records(tasks=3, reveals=4), preset="mine", **config)
    headings = [text for _, text in read(report_runs([folder])).headings]
    assert "accuracy after 20 datapoints" in headings
    assert "accuracy after 80 datapoints" in headings
    assert "mistakes within a task, last third" in headings


def test_the_threshold_shown_is_the_one_that_the_run_was_judged_by(tmp_path):
    folder = write_run(tmp_path / "run", made_records(tasks=3, reveals=4), settings=made_settings(0.65))
    assert "datapoints to accuracy 0.65" in [text for _, text in read(report_runs([folder])).headings]


def test_a_run_without_records_yet_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run", made_records(tasks=1, reveals=1))
    path = folder / "records.csv"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert "No records." in report_runs([folder]).read_text()


def test_a_learner_that_diverged_is_shown_as_such(tmp_path):
    records = made_records("sinusoid", 3, methods=("ftml", "toe"))
    for r in records:
        if r["method"] == "toe" and r["seed"] == 1 and r["round"] > 0:
            r["loss"] = math.inf if r["round"] == 1 else math.nan
    folder = write_run(tmp_path / "run", records, preset="sinusoid")
    table = read(report_runs([folder])).tables["Mean ± standard error over seeds"]
    assert table[2][0] == "TOE"
    assert table[2][-1] == "–"
    assert "±" in table[1][-1]


def test_runs_of_one_name_are_told_apart(tmp_path):
    records = made_records(tasks=2, reveals=1, methods=("ftml",))
    folders = [write_run(tmp_path / name / "run", records) for name in ("a", "b")]
    table = read(report_runs(folders)).tables["config.json"]
    assert table[0] == ["setting", *map(str, folders)]


@pytest.mark.parametrize(
    ("config", "message"), [("{", "is not the configuration of a run"), ("[]", "configuration"), (None, "config.json")]
)
def test_bad_folders_end_with_a_message_and_status_2(config, message, tmp_path, capsys):
    folder = write_run(tmp_path / "run", made_records(tasks=1, reveals=1))
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(folder)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_into_the_first_folder_or_where_it_is_told(folder, tmp_path, capsys):
    for arguments, expected in (
        ([], folder / "sinusoid" / "report.html"),
        (["--out", str(tmp_path / "page.html")], tmp_path / "page.html"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["report", str(folder / "sinusoid"), *arguments])
        assert stop.value.code == 0
        assert capsys.readouterr().out == f"{expected}\n"
        assert expected.is_file()
    (tmp_path / "theory").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path / "theory"), str(folder / "sinusoid")])
    assert stop.value.code == 0
    told = capsys.readouterr()
    assert told.out == f"{folder / 'sinusoid' / 'report.html'}\n"
    assert told.err == f"note: {tmp_path / 'theory'} holds no records and is left out\n"
    with pytest.raises(ValueError, match="at least one"):
        report_runs([])
    with pytest.raises(FileNotFoundError, match="no run in"):
        report_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("span", [(0.02, 0.5), (1.0, 900.0), (3.0, 3.5), (0.001, 1e6)])
def test_ticks_are_few_round_and_within_the_range(span, log):
    ticks = _ticks(span, log, 5)
    assert all(span[0] <= tick <= span[1] for tick in ticks)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 10
    assert ticks or log


def test_axes_hold_all_panels():
    panels = [stream_panels(made_records(tasks=t, reveals=5), (100,), 0.9, "error")[1] for t in (3, 9)]
    axes = common_axes(panels)
    assert isinstance(axes, Axes)
    assert axes.x == (0, 8)
    means = np.concatenate([curve.mean for panel in panels for curve in panel.curves])
    assert axes.y[0] < means.min() < means.max() < axes.y[1]
    assert common_axes([]) is None


def test_no_band_is_cut_off_at_a_logarithmic_axis():
    records = uneven(made_records("pose", tasks=6, reveals=3, methods=("ftml", "scratch")))
    (panel,) = stream_panels(records, (60,), None, "squared error")
    axes = common_axes([panel])
    assert axes is not None
    assert axes.y_log
    bands = re.findall(r'class="series band"[^>]* d="M([^"]*)Z"', chart(panel, axes))
    assert len(bands) == 2
    heights = [float(point.split()[1]) for band in bands for point in band.split("L")]
    # Inside of the frame: what is out of range would be drawn on its border.
    assert 10 < min(heights) < max(heights) < 262 - 40


def overflow(browser):
    """By how much the page is wider than the window, and what sticks out of it; boxes that scroll may hide more."""
    return browser.run(
        """(() => {
          const width = document.documentElement.clientWidth;
          const out = [...document.querySelectorAll('body *')].filter(
            (e) => !e.closest('.scroll > *') && e.getBoundingClientRect().right > width + 0.5);
          return [document.documentElement.scrollWidth - width, out.map((e) => e.tagName)];
        })()"""
    )


def colour_share(path, colour):
    pixels = np.round(matplotlib.image.imread(path)[..., :3] * 255).astype(int)
    return float((np.abs(pixels - np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])).max(-1) <= 2).mean())


def test_the_browser_notices_what_must_not_be(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<p style='width:3000px'>wide</p><script>console.error('x'); undefinedName()</script>")
    browser.open(bad, 390, 844)
    browser.run("1")
    assert len(browser.messages) >= 2
    assert overflow(browser)[0] > 1000
    browser.messages.clear()
    browser.requests.clear()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True), (320, False)])
def test_the_page_in_a_browser(browser, page, width, dark, tmp_path):
    browser.messages.clear()
    browser.requests.clear()
    browser.open(page, width, 844, dark)
    assert overflow(browser) == [0, []]
    charts = browser.run(
        """[...document.querySelectorAll('.plot svg')].map((svg) => {
          const box = svg.getBoundingClientRect();
          const lines = [...svg.querySelectorAll('.line')].map((e) => e.getBBox());
          return [box.width, box.height, lines.length, Math.max(...lines.map((b) => b.width))];
        })"""
    )
    # Three panels, learning and cumulative loss, for each of three runs.
    assert [lines for _, _, lines, _ in charts] == [5] * 5 + [2] * 10
    assert all(280 < w <= width and h > 150 and span > 50 for w, h, _, span in charts)
    # Captions and values can be read without scrolling, however wide the tables are and however long the names.
    edges = "(name, side) => [...document.querySelectorAll(name)].map((e) => e.getBoundingClientRect()[side])"
    assert max(browser.run(f"({edges})('caption span', 'right')")) <= width
    assert max(browser.run(f"({edges})('.words td:nth-child(2)', 'left')")) < 0.6 * width
    browser.run("document.querySelector('.plot').scrollIntoView({block: 'start'})")
    shot = browser.screenshot(tmp_path / "shot.png")
    background = "#14171c" if dark else "#ffffff"
    assert 0.4 < colour_share(shot, background) < 0.99
    if not dark:
        assert all(
            colour_share(shot, look.colour) > 1e-4
            for look in (METHODS[name].style for name in ("ftml", "ftl", "toe", "scratch", "ftml-last"))
        )
    assert browser.messages == []
    assert browser.requests == [page.as_uri()]


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_the_page(browser, page, dark):
    browser.open(page, dark=dark)
    ratios = browser.run(
        """['body', 'p', 'figcaption', 'td', 'th'].map((name) => {
          const light = (text) => {
            const [r, g, b] = text.match(/[0-9.]+/g).map((v) => v / 255).map(
              (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const back = light(getComputedStyle(document.body).backgroundColor);
          const front = light(getComputedStyle(document.querySelector(name)).color);
          return (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
        })"""
    )
    assert min(ratios) >= 4.5


def test_values_are_shown_under_the_pointer_and_by_the_arrow_keys(browser, page):
    browser.open(page, 390, 844)
    values = json.loads(browser.run("document.querySelector('.plot').dataset.values"))
    x, y, w, h = browser.run(
        """(() => {
          const svg = document.querySelector('.plot svg');
          svg.scrollIntoView({block: 'center'});
          const box = svg.getBoundingClientRect();
          return [box.x, box.y, box.width, box.height];
        })()"""
    )
    tip = "(() => { const t = document.querySelector('.tip'); return t.hidden ? null : t.innerText.split('\\n'); })()"
    assert browser.run(tip) is None

    def shown(i):
        return [values["label"][i], *(f"{s['name']} {s['text'][i]}" for s in values["series"])]

    for i in (0, 17, -1):
        browser.move(x + w * values["x"][i] / 400, y + h / 2)
        assert browser.run(tip) == shown(i)
        assert overflow(browser) == [0, []]
    browser.move(1, 1)
    assert browser.run(tip) is None
    browser.run("document.querySelector('.plot svg').focus()")
    browser.press("Home")
    assert browser.run(tip) == shown(0)
    browser.press("ArrowRight")
    assert browser.run(tip) == shown(1)
    browser.press("Escape")
    assert browser.run(tip) is None
    assert browser.messages == []
