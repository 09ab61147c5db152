"""The table of methods: styles that can be told apart, and defaults for methods that are not in it."""

import pytest

from metaleader.methods import METHODS, PAPER, known_method, label, styles
from metaleader.presets import PRESETS


def test_styles_can_be_told_apart_with_and_without_colour():
    for field in ("label", "colour", "marker", "dashes"):
        assert len({getattr(method.style, field) for method in METHODS.values()}) == len(METHODS)


def test_every_method_of_the_presets_is_in_the_table():
    assert {name for make in PRESETS.values() for name in make("standard").all_methods} == set(METHODS)
    assert list(METHODS)[:5] == list(PAPER)


def test_other_methods_have_their_name_as_label_and_a_colour_to_themselves():
    names = [f"mine {number}" for number in range(8)]
    chosen = styles([*names, "toe", "ftml"])
    assert list(chosen) == ["ftml", "toe", *names]
    assert [chosen[name].label for name in names] == names
    everyone = [*(chosen[name] for name in names), *(method.style for method in METHODS.values())]
    assert len({style.colour for style in everyone}) == len({style.dashes for style in everyone}) == len(everyone)
    assert styles(["mine 3", "toe"])["mine 3"] == styles(["mine 3"])["mine 3"]
    assert label("mine 3") == "mine 3"
    assert len(styles(f"{number}" for number in range(20))) == 20


def test_labels_in_sentences_have_no_comma():
    assert METHODS["ftml"].style.phrase == "FTML"
    assert METHODS["ftml-last"].style.phrase == "last-layer FTML"


def test_known_methods_have_their_options_and_those_given():
    assert known_method("ftml-last", {"inner_lr": 0.5}).options == {"only": "last", "inner_lr": 0.5}
    with pytest.raises(ValueError, match="unknown method 'ftml-lost'; did you mean 'ftml-last'"):
        known_method("ftml-lost", {})
