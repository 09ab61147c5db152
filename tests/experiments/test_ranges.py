"""Ranges of settings."""

import pytest
import tiny

from metaleader.experiments.ranges import Range, parse_range, search_space


@pytest.mark.parametrize(
    ("text", "present", "expected"),
    [
        ("log:0.001..0.3", 0.1, Range(0.001, 0.3, log=True)),
        ("log:1e-4..1e-2", 0.1, Range(1e-4, 1e-2, log=True)),
        ("1..5", 3, Range(1, 5, integer=True)),
        ("1..5", 3.0, Range(1, 5)),
        ("log:1..64", None, Range(1, 64, log=True, integer=True)),
        ("-1.5..2", 0.0, Range(-1.5, 2)),
        ("1...5", 0.0, None),
        ("0..0.5", 0.0, Range(0, 0.5)),
        (".1...5", 0.0, Range(0.1, 0.5)),
        ("adam,sgd", "adam", Range(choices=("adam", "sgd"))),
        ("[1,2],4", 4, Range(choices=("[1,2]", "4"))),
        ("2..1", 1, None),
        ("log:0..1", 0.5, None),
        ("log:a,b", "a", None),
        ("0.1", 0.1, None),
        ("a..b", "a", None),
        ("1..inf", 1.0, None),
        ("a,a", "a", None),
    ],
)
def test_texts(text, present, expected):
    if expected is None:
        with pytest.raises(ValueError, match=r"^here: "):
            parse_range(text, present, "here")
    else:
        assert parse_range(text, present, "here") == expected


def test_values_have_four_digits_and_stay_within_the_bounds():
    assert Range(0.001, 0.3).nearest(0.123456) == 0.1235
    assert Range(0.00100004, 0.3).nearest(0.00100004) == 0.00100004
    assert Range(1, 9, integer=True).nearest(3) == 3


def test_a_range_of_one_method_overrides_that_of_all():
    texts = ["all.meta_lr=log:0.001..0.1", "ftml.meta_lr=0.1..0.2", "ftml.inner_steps=1..3"]
    for order in (texts, texts[::-1]):
        space = search_space(tiny.tiny(), order, ["ftml", "toe"])
        assert space["toe"] == {"meta_lr": (Range(0.001, 0.1, log=True), 1e-3)}
        assert space["ftml"] == {"meta_lr": (Range(0.1, 0.2), 1e-3), "inner_steps": (Range(1, 3, integer=True), 5)}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ftml.iner_lr=1..2"], "did you mean 'inner_lr'?"),
        (["reveal=1..2"], "only settings of methods are tuned, and reveal concerns all alike"),
        (["ftml.meta_lr=0.1..0.2"], "there is no range for toe"),
        (["all.meta_lr=0.1..1", "meta_lr=0.2..1"], "given twice"),
        (["toe.meta_lr=0.1..1", "toe.meta_lr=0.2..1"], "given twice"),
        (["meta_lr"], "write NAME=RANGE"),
        (["meta_lr=0.1"], "write LOW..HIGH"),
    ],
)
def test_bad_ranges(texts, message):
    with pytest.raises(ValueError, match=r".") as caught:
        search_space(tiny.tiny(), texts, ["ftml", "toe"])
    assert message in str(caught.value)
