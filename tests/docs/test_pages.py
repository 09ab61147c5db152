"""The pages of docs/: every Python block runs as it stands, and tables that repeat the code agree with it."""

import gzip
import re
from pathlib import Path

import pytest

from metaleader import losses, models
from metaleader.learners import FTML
from metaleader.live.session import Session
from metaleader.presets import PRESETS
from metaleader.streams import STREAMS
from metaleader.streams.datasets.registry import DATA_SETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("howto/*.md"))]
BLOCKS = [
    pytest.param(page, block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def test_the_page_of_sessions_has_every_key_of_their_status(tmp_path):
    net = models.mlp(2, 1, (4,))
    with Session(tmp_path / "a", lambda: FTML(net, losses.squared_error, inner_lr=0.01)) as session:
        keys = set(session.status())
    (table,) = re.findall(r"\| key \| value \|\n(.*?)\n\n", (DOCS / "howto" / "live.md").read_text(), re.DOTALL)
    assert {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])} == keys


@pytest.mark.filterwarnings("ignore::metaleader.regret.UnconvergedWarning")  # the page on theory says that it warns
@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_blocks_run(page, block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("pandas", "polars"):
        if f"import {name}" in block:
            pytest.importorskip(name)
    if page.name == "records.md":
        # The blocks read the records of a run: those of a published run of the same preset.
        folder = tmp_path / "runs" / "rainbow-digits"
        folder.mkdir(parents=True)
        records = gzip.decompress((DOCS / "results" / "equal-compute" / "records.csv.gz").read_bytes())
        (folder / "records.csv").write_bytes(records)
    exec(compile(block, str(page), "exec"), {})
    assert capsys.readouterr().out or "assert" in block


def test_every_how_to_page_has_a_block():
    assert {param.values[0] for param in BLOCKS} >= set(DOCS.glob("howto/*.md"))


def test_every_stream_and_data_set_is_listed():
    text = (DOCS / "streams.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \| .* \| \d+ \|", text, re.MULTILINE) == list(STREAMS)
    assert re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE) == list(DATA_SETS)


def test_the_methods_of_the_presets():
    text = (DOCS / "cli.md").read_text().split("## Methods of the presets")[1]
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    presets = {name: make("standard") for name, make in PRESETS.items()}
    methods = [row[0].strip("`") for row in rows if len(row) == len(head)]
    assert head[1:] == list(presets)
    assert set(methods) == {method for preset in presets.values() for method in preset.all_methods}
    for row in rows[: len(methods)]:
        method = row[0].strip("`")
        for name, cell in zip(presets, row[1:], strict=True):
            kind = "standard" if method in presets[name].methods else "extra"
            assert cell == (kind if method in presets[name].all_methods else "no"), f"{method} of {name}"


def test_figures_are_small():
    figures = {
        (page.parent / name).resolve() for page in PAGES for name in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text())
    }
    assert len(figures) >= 7
    assert all(0 < figure.stat().st_size < 500_000 for figure in figures)
