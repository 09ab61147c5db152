"""Lists of values of settings."""

import pytest
import tiny

from metaleader.experiments.axes import combinations, split_settings
from metaleader.experiments.settings import with_settings

METHODS = ("ftml", "toe")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("ftml.inner_lr=0.01,0.1", ["0.01", "0.1"]),
        ("inner_lr = 0.01 , 0.1", ["0.01", "0.1"]),
        ("ftml.inner_lr=0.01", None),
        ("order=random,similar", ["random", "similar"]),
        ("steps=5,1", None),
        ("steps=[5,1],[10,1]", ["[5,1]", "[10,1]"]),
        ("steps=(5,1),(10,1)", ["(5,1)", "(10,1)"]),
        ("ftml.support=[1,2],4", ["[1,2]", "4"]),
        ("ftml.meta_lr=[[0,0.1],[9,0.01]]", None),
        ("error_name='a,b',c", ["'a,b'", "c"]),
    ],
)
def test_lists_are_split_where_the_setting_is_no_list(text, values):
    fixed, axes = split_settings(tiny.tiny(), [text], METHODS)
    assert (fixed, list(axes.values())) == (([text], []) if values is None else ([], [values]))


def test_every_combination_is_a_cell_that_the_experiment_takes():
    texts = ["ftml.inner_lr=0.01,0.1", "meta_steps=3", "steps=[5,1],[10,1]"]
    fixed, axes = split_settings(tiny.tiny(), texts, METHODS)
    cells = combinations(axes)
    found = set()
    for settings in cells.values():
        changed = with_settings(tiny.tiny(), [*fixed, *settings], METHODS)
        found.add((changed.methods["ftml"].options["inner_lr"], changed.steps, changed.meta_steps))
    assert found == {(lr, steps, 3) for lr in (0.01, 0.1) for steps in ((5, 1), (10, 1))}
    assert next(iter(cells)) == "ftml.inner_lr=0.01,steps=_5,1_"


def test_names_are_those_of_folders():
    assert list(combinations({})) == ["all"]
    assert list(combinations({"a": ["../x", "y/z"]})) == ["a=.._x", "a=y_z"]
    assert list(combinations({"a": ["(1", "[1"]})) == ["cell-1", "cell-2"]
    assert list(combinations({"a": ["x" * 200, *map(str, range(9))]}))[:2] == ["cell-01", "cell-02"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ftml.inner_lr=0.1,"], "a value is empty; remove a comma"),
        (["ftml.inner_lr=0.1,0.1"], "0.1 is there twice"),
        (["ftml.inner_lr=1,2", "ftml.inner_lr=3,4"], "write all of its values in one list"),
        (["ftml.iner_lr=1,2"], "did you mean 'inner_lr'?"),
        (["iner_lr=1,2"], "did you mean 'inner_lr'?"),
        (["ftml.inner_lr"], "write NAME=VALUE"),
    ],
)
def test_bad_lists(texts, message):
    with pytest.raises(ValueError, match=r"^--set") as caught:
        split_settings(tiny.tiny(), texts, METHODS)
    assert message in str(caught.value)
