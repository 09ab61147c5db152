"""Curves against the slow obvious loops: means, standard errors, running means, censoring."""

import math

import numpy as np
import pytest
from made_records import made_records

from metaleader.methods import METHODS
from metaleader.report.curves import Curve, band, cumulative_panels, learning_panel, marked, stream_panels
from metaleader.report.records import estimate, methods_of, over_seeds, record_error, third


def curve_of(panel, method):
    (curve,) = [curve for curve in panel.curves if curve.method == method]
    return curve


def mean_and_error(values):
    values = np.array(values)
    return values.mean(), values.std(ddof=1) / math.sqrt(len(values))


def record(method="ftml", seed=0, t=0, datapoints=20, loss=1.0, accuracy: float | None = 0.5, needed=None, **more):
    return {
        "method": method,
        "seed": seed,
        "protocol": "online",
        "round": t,
        "task": "a",
        "datapoints": datapoints,
        "loss": loss,
        "accuracy": accuracy,
        "needed": needed,
        **more,
    }


def test_panels_are_means_and_standard_errors_over_seeds():
    records = made_records(tasks=7, reveals=6)
    needed, few, many = stream_panels(records, (100, 120), 0.9, "error")
    assert [panel.y_label for panel in (few, many)] == ["error after 100 datapoints", "error after 120 datapoints"]
    assert needed.x_label == "task"
    for method in ("ftml", "ftml-last", "ftl", "toe", "scratch"):
        for size, panel in ((100, few), (120, many)):
            curve = curve_of(panel, method)
            assert curve.x.tolist() == list(range(7))
            for t in range(7):
                own = [
                    record_error(r) for r in records if (r["method"], r["round"], r["datapoints"]) == (method, t, size)
                ]
                assert (curve.mean[t], curve.error[t]) == pytest.approx(mean_and_error(own))


@pytest.mark.parametrize("tasks", [15, 31])
def test_many_tasks_get_a_running_mean_that_is_labelled(tasks):
    records = made_records(tasks=tasks, reveals=2, methods=("toe",))
    (panel,) = stream_panels(records, (40,), None, "error")
    assert panel.x_label == "task (running mean of 5 tasks)"
    assert panel.y_label == "accuracy after 40 datapoints"
    curve = curve_of(panel, "toe")
    assert curve.x.tolist() == list(range(4, tasks))
    value = {(r["seed"], r["round"]): r["accuracy"] for r in records if r["datapoints"] == 40}
    for i, t in enumerate(curve.x.tolist()):
        smooth = [np.mean([value[seed, k] for k in range(t - 4, t + 1)]) for seed in range(3)]
        assert (curve.mean[i], curve.error[i]) == pytest.approx(mean_and_error(smooth))


def test_unsolved_tasks_count_with_all_their_data_and_are_marked():
    records = [
        record(seed=0, t=0, datapoints=20),
        record(seed=0, t=0, datapoints=40),
        record(seed=1, t=0, datapoints=20),
        record(seed=1, t=0, datapoints=40, needed=40),
        record(seed=0, t=1, datapoints=20, needed=20),
        record(seed=0, t=1, datapoints=40, needed=20),
        record(seed=1, t=1, datapoints=20, needed=20),
        record(seed=1, t=1, datapoints=40, needed=20),
        # This round was cut short: whether it is solved is not known.
        record(seed=0, t=2, datapoints=20),
    ]
    panel = stream_panels(records, (20,), 0.9, "error")[0]
    curve = curve_of(panel, "ftml")
    assert panel.limit == 40
    assert curve.x.tolist() == [0, 1]
    assert curve.mean.tolist() == [40, 20]
    assert curve.censored.tolist() == [0.5, 0]
    assert curve.solved == 0.75


def test_learning_is_over_the_last_third_of_the_tasks():
    records = made_records(tasks=8, reveals=4, methods=("ftl",))
    assert {r["round"] for r in third(records, "last")} == {5, 6, 7}
    assert {r["round"] for r in third(records, "first")} == {0, 1, 2}
    curve = curve_of(learning_panel(records, "error"), "ftl")
    assert curve.x.tolist() == [20, 40, 60, 80]
    for i, size in enumerate(curve.x.tolist()):
        late = [r for r in records if r["datapoints"] == size and r["round"] >= 5]
        seeds = [np.mean([record_error(r) for r in late if r["seed"] == seed]) for seed in range(3)]
        assert (curve.mean[i], curve.error[i]) == pytest.approx(mean_and_error(seeds))


def test_one_task_is_its_own_first_and_last_third():
    records = [record()]
    assert third(records, "first") == third(records, "last") == records


def test_the_cumulative_loss_sums_the_means_over_reveals():
    records = [
        record(t=0, datapoints=20, loss=3.0),
        record(t=0, datapoints=40, loss=1.0),
        record(t=1, datapoints=20, loss=0.5),
        record(t=1, datapoints=40, loss=0.25),
    ]
    (panel,) = cumulative_panels(records)
    assert panel.y_label == "cumulative loss"
    assert curve_of(panel, "ftml").mean.tolist() == [2.0, 2.375]


def test_records_of_the_regret_protocol_are_labelled_and_kept_apart():
    online = made_records(tasks=2, reveals=2, methods=("ftml",))
    regret = [{**r, "protocol": "regret", "accuracy": 0.0} for r in online]
    assert [p.y_label for p in cumulative_panels(online + regret)] == [
        "cumulative loss",
        "cumulative loss, regret protocol",
    ]
    mixed, alone = (learning_panel(records, "error") for records in (online + regret, online))
    assert curve_of(mixed, "ftml").mean.tolist() == curve_of(alone, "ftml").mean.tolist()
    labels = [panel.y_label for panel in (*stream_panels(regret, (20,), 0.9, "error"), learning_panel(regret, "error"))]
    assert all(label.endswith(", regret protocol") for label in labels)


def test_one_seed_has_no_standard_error():
    panel = stream_panels(made_records(tasks=3, reveals=2, seeds=1), (40,), 0.9, "error")[1]
    assert all(np.isnan(curve.error).all() for curve in panel.curves)
    assert math.isnan(estimate([record()], record_error)[1])


def test_seeds_that_are_missing_are_left_out():
    records = [record(seed=0, accuracy=0.5), record(seed=1, accuracy=0.7), record(seed=0, t=1, accuracy=0.1)]
    curve = curve_of(stream_panels(records, (20,), None, "error")[0], "ftml")
    assert curve.mean.tolist() == pytest.approx([0.6, 0.1])
    assert math.isnan(curve.error[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_leave_a_gap(bad):
    records = [record(t=t, accuracy=None, loss=loss) for t, loss in enumerate((1.0, bad, 3.0))]
    curve = curve_of(stream_panels(records, (20,), None, "loss")[0], "ftml")
    assert curve.x.tolist() == [0, 2]
    assert curve.mean.tolist() == [1, 3]
    assert stream_panels([record(accuracy=None, loss=bad)], (20,), None, "loss")[0].curves == ()


def test_an_estimate_is_over_seeds_not_over_tasks():
    records = [record(seed=0, t=t, accuracy=a) for t, a in enumerate((0.0, 0.2, 0.4))] + [record(seed=1, accuracy=1.0)]
    assert estimate(records, lambda r: r["accuracy"]) == pytest.approx(mean_and_error([0.2, 1.0]))
    assert all(math.isnan(number) for number in estimate(records, lambda r: None))
    mean, error = estimate(records, lambda r: math.inf if r["seed"] else 1.0)
    assert mean == math.inf
    assert math.isnan(error)


def test_values_that_are_not_valid_are_left_out_of_the_mean_over_seeds():
    values = np.array([[1.0, 5.0, 9.0], [2.0, 7.0, math.nan], [6.0, math.nan, math.nan]])
    mean, error = over_seeds(values, ~np.isnan(values))
    assert list(zip(mean, error, strict=True))[:2] == [pytest.approx(mean_and_error(v)) for v in ([1, 2, 6], [5, 7])]
    assert mean[2] == 9
    assert math.isnan(error[2])
    assert math.isnan(over_seeds(values)[0][2])


def test_no_records_give_no_curves():
    assert [panel.curves for panel in stream_panels([], (20,), 0.9, "error")] == [(), ()]
    assert learning_panel([], "error").curves == ()
    assert cumulative_panels([]) == []


def curve_with(mean, error):
    there = np.arange(len(mean))
    return Curve("ftml", METHODS["ftml"].style, there, np.array(mean), np.array(error), np.zeros(len(mean)))


def test_the_band_is_the_standard_error_to_either_side():
    low, high = band(curve_with([1.0, 2.0], [0.5, math.nan]), y_log=False)
    assert (low.tolist(), high.tolist()) == ([0.5, 2.0], [1.5, 2.0])


def test_the_band_on_a_logarithmic_axis_is_as_wide_up_as_down_and_hardly_other_where_it_is_narrow():
    low, high = band(curve_with([2.0, 2.0, 2.0], [0.002, 2.0, math.nan]), y_log=True)
    assert (low[0], high[0]) == pytest.approx((1.998, 2.002), abs=2e-6)
    assert high / 2 == pytest.approx(2 / low)
    assert (low[1], low[2]) == (pytest.approx(2 / math.e), 2.0)


def test_the_widest_band_of_all_is_a_factor_of_e():
    # One seed failed and the others did not: the largest standard error that positive numbers have.
    records = [record(seed=seed, loss=loss, accuracy=None) for seed, loss in enumerate((1e9, 1e-9, 1e-9, 1e-9))]
    curve = curve_of(stream_panels(records, (20,), 0.1, "error")[1], "ftml")
    low, high = band(curve, y_log=True)
    assert curve.mean - curve.error == pytest.approx(0, abs=1)
    assert (high / low).item() == pytest.approx(math.e**2)


def test_methods_outside_the_table_keep_their_colour_in_every_panel():
    records = [record("mine", datapoints=20), record("other", datapoints=20), record("other", datapoints=40)]
    records += [record("other", datapoints=20) | {"protocol": "regret"}, record("toe")]
    assert list(methods_of(records)) == ["toe", "mine", "other"]
    panels = [*stream_panels(records, (20, 40), 0.9, "error"), learning_panel(records, "error")]
    curves = [curve for panel in (*panels, *cumulative_panels(records)) for curve in panel.curves]
    assert {curve.method for curve in curves} == {"toe", "mine", "other"}
    assert len({(curve.method, curve.style) for curve in curves}) == len({curve.style.colour for curve in curves}) == 3


@pytest.mark.parametrize("x_log", [False, True])
def test_markers_are_spread_over_a_long_curve_and_cover_a_short_one(x_log):
    for num in (1, 2, 12):
        curve = curve_of(learning_panel([record(datapoints=20 * (i + 1)) for i in range(num)], "error"), "ftml")
        assert marked(curve, 3, x_log).all()
    curve = curve_of(learning_panel([record(datapoints=20 * (i + 1)) for i in range(100)], "error"), "ftml")
    places = np.flatnonzero(marked(curve, 0, x_log))
    assert 5 <= len(places) <= 9
    assert not np.array_equal(places, np.flatnonzero(marked(curve, 1, x_log)))
