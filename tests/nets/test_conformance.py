"""Each layer of torch.nn works or is refused with a reason, as docs/layers.md says."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

_SPEC = importlib.util.spec_from_file_location("conformance", Path(__file__).with_name("conformance.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
conformance: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(conformance)


@pytest.mark.parametrize("name", conformance.CASES)
def test_a_layer_works_or_is_refused_as_published(name: str):
    assert conformance.outcome(conformance.CASES[name], "eager") == conformance.published()[name]["eager"]


@pytest.mark.parametrize("name", conformance.VARIANTS)
def test_other_settings_of_a_layer_work(name: str):
    assert conformance.outcome(conformance.VARIANTS[name], "eager") == conformance.WORKS


def test_every_name_of_torch_is_a_layer_of_the_table_or_a_container_or_a_loss():
    names, others = set(nn.modules.__all__), conformance.others()
    assert names - set(conformance.CASES) <= others
    assert not set(conformance.CASES) & others
    assert set(conformance.CASES) <= names


def test_the_page_is_generated_from_the_published_outcomes():
    assert conformance.PAGE.read_text() == conformance.page()
    rows = conformance.published()
    assert sorted(rows) == sorted(conformance.CASES)
    works = [row["eager"] == conformance.WORKS for row in rows.values()]
    assert sum(works) >= 0.95 * len(works)


def test_a_lazy_layer_is_refused_until_it_has_a_shape():
    with pytest.raises(ValueError, match=r"layer '' \(LazyLinear\) is lazy and has no shape yet"):
        conformance.Network(nn.LazyLinear(2), conformance.losses.cross_entropy)


@pytest.mark.torture
@pytest.mark.parametrize("mode", ["traced", "compiled"])
def test_layers_are_compiled_as_published(mode: str, monkeypatch: pytest.MonkeyPatch):
    if mode == "traced":
        monkeypatch.setattr(conformance.compiled, "compile_whole", conformance.traced_only)
    published = conformance.published()
    names = [name for name, row in published.items() if row[mode]]
    assert conformance.run_all(mode, names, None, "cpu") == {name: published[name][mode] for name in names}


@pytest.mark.gpu
def test_layers_are_captured(tmp_path: Path):
    """Write the outcomes to METALEADER_LAYERS, or to layers.csv in the folder OUT."""
    out = os.environ.get("METALEADER_LAYERS") or Path(os.environ.get("OUT", tmp_path)) / "layers.csv"
    assert torch.cuda.is_available()
    outcomes = conformance.run_all("captured", conformance.CASES, Path(out), "cuda")
    assert not [name for name, outcome in outcomes.items() if outcome.startswith("FAILS")]
