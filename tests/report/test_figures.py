"""The figures for print: what the files show, and that the same records give the same bytes."""

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from made_records import made_records, uneven
from matplotlib.figure import Figure

from metaleader.methods import METHODS
from metaleader.presets import PRESETS
from metaleader.report.curves import stream_panels
from metaleader.report.figures import _draw_panel, draw_figures

NAMES = [f"{name}.{suffix}" for name in ("figure", "learning", "cumulative") for suffix in ("png", "svg")]


def has_colour(path, colour):
    pixels = np.round(matplotlib.image.imread(path)[..., :3] * 255)
    return bool((pixels == np.round(np.array(matplotlib.colors.to_rgb(colour)) * 255)).all(-1).sum() > 30)


def test_every_method_is_drawn_in_every_figure_and_no_other(tmp_path):
    shown = ("ftml", "toe", "scratch")
    paths = draw_figures(made_records(tasks=5, reveals=5, methods=shown), (100,), tmp_path, gamma=0.9)
    assert [path.name for path in paths] == NAMES
    for path in paths[::2]:
        assert {name for name, method in METHODS.items() if has_colour(path, method.style.colour)} == set(shown)
    for path in paths[1::2]:
        # Matplotlib writes each text as a comment above its outlines.
        text = path.read_text()
        assert all(f"<!-- {METHODS[name].style.label} -->" in text for name in shown)
        assert "<!-- standard error over seeds -->" in text


@pytest.mark.parametrize("preset", ["rainbow-mnist", "cifar100", "pose"])
def test_full_size_has_the_panels_of_the_paper(preset, tmp_path):
    fixed = PRESETS[preset]("standard")
    records = made_records(preset, fixed.tasks or 0, seeds=2, methods=("ftml", "scratch"))
    draw_figures(records, fixed.sizes(), tmp_path, fixed.error_name, fixed.gamma)
    text = (tmp_path / "figure.svg").read_text()
    kind = "accuracy" if fixed.gamma is None else fixed.error_name
    assert all(f"<!-- {kind} after {size:,} datapoints -->" in text for size in fixed.sizes())
    assert "<!-- task (running mean of 5 tasks) -->" in text
    if fixed.gamma is not None:
        reached = "squared error 0.05" if preset == "pose" else "accuracy 0.9"
        assert f"<!-- datapoints to {reached} -->" in text
        solved = [r["needed"] is not None for r in records if r["datapoints"] == fixed.sizes()[-1]]
        assert f"solved: FTML {np.mean(solved[: len(solved) // 2]):.0%}" in text
        assert f"unsolved tasks count as {fixed.sizes()[-1]} (hollow markers)" in text


def test_the_same_records_give_the_same_bytes(tmp_path):
    records = made_records(tasks=4, reveals=5)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw_figures(records, (100,), tmp_path / name, gamma=0.9)
    for name in NAMES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert "dc:date" not in (tmp_path / "a" / "figure.svg").read_text()


@pytest.mark.parametrize(("tasks", "seeds", "reveals"), [(1, 1, 1), (2, 1, 2), (3, 2, 1)])
def test_small_runs_and_panels_without_records_can_be_drawn(tasks, seeds, reveals, tmp_path):
    records = made_records(tasks=tasks, seeds=seeds, reveals=reveals, methods=("ftml",))
    draw_figures(records, (20, 900), tmp_path, gamma=0.9)
    text = (tmp_path / "figure.svg").read_text()
    assert text.count("<!-- no records -->") == 1
    assert ("<!-- standard error over seeds -->" in text) == (seeds > 1)


def test_no_band_leaves_a_logarithmic_axis():
    records = uneven(made_records("pose", tasks=6, reveals=3, methods=("ftml", "scratch")))
    (panel,) = stream_panels(records, (60,), None, "squared error")
    assert panel.y_log
    axes = Figure().subplots()
    _draw_panel(axes, panel)
    low, high = axes.get_ylim()
    edges = np.concatenate([np.asarray(path.vertices)[:, 1] for band in axes.collections for path in band.get_paths()])
    assert 0 < low < edges.min() < edges.max() < high
    assert edges.max() / edges.min() < 1e5


def test_no_records_at_all_can_be_drawn(tmp_path):
    assert all(path.is_file() for path in draw_figures([], (20, 60), tmp_path, gamma=0.9))


@pytest.mark.parametrize(("preset", "extras"), [("rainbow-mnist", False), ("rainbow-mnist", True), ("cifar100", False)])
def test_nothing_is_cut_at_the_edge(preset, extras, tmp_path):
    fixed = PRESETS[preset]("standard")
    records = made_records(preset, tasks=4, reveals=5, methods=tuple(fixed.methods))
    if extras:
        records += [r | {"method": method} for method in fixed.extras for r in records if r["method"] == "ftml"]
    # Three panels, as published, and without a size for every one.
    for panels in ((100,), (20, 100)):
        for path in draw_figures(records, panels, tmp_path, gamma=0.9)[::2]:
            pixels = matplotlib.image.imread(path)
            edges = (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])
            assert all((edge == 1).all() for edge in edges), path.name
