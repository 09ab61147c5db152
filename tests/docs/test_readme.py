"""The README: its example runs as it stands, its tables and its file tree are true."""

import re
from pathlib import Path

import pytest

from metaleader.presets import PRESETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 160
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
    """It has every entry of the top level, and no other, and the README ends with it."""
    tree = re.search(r"```\nmetaleader/\n(.*?)```\n\Z", README, re.DOTALL)
    assert tree
    listed = re.findall(r"^  ([\w.]+)/? +\S", tree[1], re.MULTILINE)
    assert len(listed) == len(tree[1].splitlines())
    package = ROOT / "metaleader"
    assert sorted(listed) == sorted(path.name for path in package.iterdir() if path.name != "__pycache__")
    folders = re.findall(r"^  (\w+)/ ", tree[1], re.MULTILINE)
    assert sorted(folders) == sorted(name for name in listed if (package / name).is_dir())


def test_the_presets_have_the_extra_methods() -> None:
    table = README.split("| extra methods | presets |")[1].split("\n\n")[0].splitlines()[2:]
    listed: dict[str, set[str]] = {}
    for row in table:
        methods, presets = (re.findall(r"`([\w-]+)`", cell) for cell in row.strip("|").split("|"))
        names = PRESETS.keys() - set(presets) if "all except" in row else set(presets)
        listed |= dict.fromkeys(methods, names)
    made = {name: make("standard") for name, make in PRESETS.items()}
    extras = {method for preset in made.values() for method in preset.extras}
    assert listed == {method: {name for name in made if method in made[name].extras} for method in extras}
    lacking = {(name, method) for name in made for method in made["sinusoid"].methods.keys() - made[name].methods}
    assert lacking == {("cifar100", "ftl"), ("pose", "ftml-last")}
    assert "`cifar100` has no `ftl`, and `pose` has no `ftml-last`." in README


def test_every_link_leads_somewhere() -> None:
    pages = ("README.md", "LOG.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
    for page in [*(ROOT / name for name in pages), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
