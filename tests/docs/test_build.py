"""The script that assembles the documentation site."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = runpy.run_path(str(ROOT / "docs" / "build.py"))


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("docs/results/pose.md", "results/pose.md"),
        ("LOG.md", "log.md"),
        ("examples/tune.py", "examples.md#tune"),
        ("benchmarks/README.md", "benchmarks.md"),
    ],
)
def test_places_on_the_site(file, place):
    assert BUILD["on_site"](ROOT / file) == place


def test_a_file_that_is_not_on_the_site():
    with pytest.raises(ValueError, match=r"pyproject.toml is not on the site"):
        BUILD["on_site"](ROOT / "pyproject.toml")


def test_links_are_rewritten_outside_code(tmp_path):
    BUILD["assemble"](tmp_path)
    results = (tmp_path / "results" / "pose.md").read_text()
    assert "(../log.md)" in results
    assert "LOG.md)" not in results
    assert "(results/additions.md#a-bounded-memory)" in (tmp_path / "log.md").read_text()
    examples = (tmp_path / "examples.md").read_text()
    assert (ROOT / "examples" / "tune.py").read_text() in examples


@pytest.mark.parametrize(
    ("html", "remote"),
    [
        ('<script src="https://example.org/a.js">', True),
        ('<link rel="stylesheet" href="//example.org/a.css">', True),
        ('<img alt="x" src="../a.png">', False),
        ('<a href="https://example.org">', False),
    ],
)
def test_resources_from_the_network_are_found(html, remote):
    assert bool(BUILD["LOADED"].search(html)) is remote
