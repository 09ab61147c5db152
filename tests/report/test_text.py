"""Numbers as text."""

import math

import pytest

from metaleader.report.text import duration, with_error


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (0.06123, 0.00412, "0.0612 ± 0.0041"),
        (545.61, 7.12, "546 ± 7"),
        (20.0, 0.0, "20 ± 0"),
        (0.71333, 0.0, "0.713 ± 0"),
        (0.5, math.nan, "0.500"),
        (56.667, math.nan, "56.7"),
        (0.0, math.nan, "0"),
        (1234.5, math.nan, "1234"),
        (0.0, 0.03, "0.000 ± 0.030"),
        (math.nan, math.nan, "–"),
        (math.inf, math.nan, "inf"),
    ],
)
def test_numbers_have_the_digits_that_their_error_leaves(mean, error, text):
    assert with_error(mean, error) == text


def test_durations():
    texts = [duration(seconds) for seconds in (0.44, 59.94, 59.96, 134.5, 3599.6, 90061)]
    assert texts == ["0.4 s", "59.9 s", "1 min 0 s", "2 min 14 s", "1 h 0 min", "25 h 1 min"]
