"""The snippets of the README run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


@pytest.mark.parametrize("number", range(1, len(SNIPPETS)))
def test_snippets_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), {})


def test_the_first_stream_is_learned_from_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[0], "README snippet 0", "exec"), {})
    errors = [float(error) for error in re.findall(r"error ([\d.]+)", capsys.readouterr().out)]
    assert len(errors) == 30
    assert sum(errors[20:]) < sum(errors[:10]) / 3  # the page says 0.4 after 2.4


def test_every_file_of_the_tree_is_there() -> None:
    table = (ROOT / "README.md").read_text().split("## The files")[1]
    for name in re.findall(r"`([a-z_]+(?:\.py|/))`", table):
        assert (ROOT / "metaleader" / name).exists(), name


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
