"""Paired differences against scipy's test and by hand."""

import numpy as np
import pytest
from made_records import made_records, write_run
from scipy import stats

from metaleader.report.loaded import load_runs
from metaleader.report.pairs import paired_differences
from metaleader.report.tables import differences_table


def rows(method, values, seeds=None, accuracy=False):
    """Values (seeds, rounds) as records of 5 datapoints."""
    return [
        {"method": method, "seed": seed, "round": t, "datapoints": 5, "loss": value,
         "accuracy": 1 - value if accuracy else None}
        for seed, line in zip(seeds or range(len(values)), values, strict=True) for t, value in enumerate(line)
    ]  # fmt: skip


@pytest.mark.parametrize("accuracy", [False, True])
def test_differences_are_those_of_a_paired_t_test(accuracy):
    draw = np.random.default_rng(0)
    a, b = draw.random((6, 9)), draw.random((6, 9)) + 0.2
    (found,) = paired_differences(rows("a", a, accuracy=accuracy) + rows("b", b, accuracy=accuracy), level=0.9)
    expected = stats.ttest_rel(b[:, 6:].mean(1), a[:, 6:].mean(1))
    interval = expected.confidence_interval(0.9)
    assert (found.first, found.second, found.datapoints, found.seeds) == ("a", "b", 5, 6)
    assert found.mean == pytest.approx((b[:, 6:] - a[:, 6:]).mean())
    assert found.interval == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)
    (whole,) = paired_differences(rows("a", a) + rows("b", b), rounds="all")
    assert whole.mean == pytest.approx((b - a).mean())


def test_only_seeds_of_both_methods_count():
    records = rows("a", [[1.0], [2.0], [9.0]], seeds=[0, 1, 2]) + rows("b", [[5.0], [3.0]], seeds=[1, 0])
    (found,) = paired_differences(records, pairs=[("b", "a")])
    assert (found.seeds, found.mean) == (2, -2.5)
    (single,) = paired_differences(rows("a", [[1.0]]) + rows("b", [[2.0]]))
    assert (single.mean, single.interval, single.p) == (1.0, None, None)


def test_refusals():
    records = rows("a", [[1.0, 2.0]]) + rows("b", [[1.0]])
    with pytest.raises(ValueError, match="'a' and 'b' were measured on different rounds of seed 0"):
        paired_differences(records, rounds="all")
    with pytest.raises(ValueError, match="method 'c' has no records at 5 datapoints"):
        paired_differences(records, pairs=[("a", "c")])
    with pytest.raises(ValueError, match="no seed in common"):
        paired_differences(rows("a", [[1.0]], [0]) + rows("b", [[1.0]], [1]))
    with pytest.raises(ValueError, match="level"):
        paired_differences(records, level=95)


def test_the_table_of_a_report(tmp_path):
    records = made_records(tasks=6, reveals=5)
    (run,) = load_runs([write_run(tmp_path / "run", records, panels=[20, 100])])
    table = differences_table([run])
    assert table.count("<tr>") == 1 + 2 * 10  # a heading, and all pairs of five methods at two sizes
    assert "from scratch − FTML" in table
    found = paired_differences(records, 100, pairs=[("ftml", "scratch")])[0]
    assert f"{found.mean:.3g}" in table
    single = made_records(tasks=6, reveals=5, seeds=1)
    (run,) = load_runs([write_run(tmp_path / "single", single, panels=[20, 100])])
    assert differences_table([run]) == ""
    stopped = [r for r in records if r["method"] != "ftl" or r["round"] < 5]
    (run,) = load_runs([write_run(tmp_path / "stopped", stopped, panels=[20])])
    assert differences_table([run]) == ""
