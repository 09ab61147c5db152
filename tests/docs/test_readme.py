"""The README and the file tree of the contributing page: the example runs as it stands, the tree is true."""

import re
from pathlib import Path

import pytest

from metaleader.presets import PRESETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(SNIPPETS) == 1


def test_the_first_stream_is_learned_from_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[0], "README snippet 0", "exec"), {})
    errors = [float(error) for error in re.findall(r"error ([\d.]+)", capsys.readouterr().out)]
    assert len(errors) == 30
    assert sum(errors[20:]) < sum(errors[:10]) / 3  # the page says 0.4 after 2.4


def test_the_file_tree_is_that_of_the_package() -> None:
    """It has every entry of the top level, and no other."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"```\nmetaleader/\n(.*?)```", page, re.DOTALL)
    assert tree
    listed = re.findall(r"^  ([\w.]+)/? +\S", tree[1], re.MULTILINE)
    assert len(listed) == len(tree[1].splitlines())
    package = ROOT / "metaleader"
    assert sorted(listed) == sorted(path.name for path in package.iterdir() if path.name != "__pycache__")
    folders = re.findall(r"^  (\w+)/ ", tree[1], re.MULTILINE)
    assert sorted(folders) == sorted(name for name in listed if (package / name).is_dir())


def test_the_command_line_page_has_the_methods_of_the_presets() -> None:
    page = (ROOT / "docs" / "cli.md").read_text().split("## Methods of the presets")[1].split("\n- ")[0]
    header, _, *rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*", page, re.M)
    ]
    made = {name: make("standard") for name, make in PRESETS.items()}
    kinds = {name: {"standard": preset.methods, "extra": preset.extras} for name, preset in made.items()}
    listed = {name: {row[0]: row[i] for row in rows if row[i] != "no"} for i, name in enumerate(header) if i}
    for name, by_kind in kinds.items():
        assert listed[name] == {method: kind for kind, methods in by_kind.items() for method in methods}


def test_every_link_leads_somewhere() -> None:
    pages = ("README.md", "LOG.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
    for page in [*(ROOT / name for name in pages), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
