import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "learners.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run(number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], str(PAGE), "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 8 - 4 * number


def test_links_are_there():
    links = re.findall(r"\]\(((?!https:).*?)\)", PAGE.read_text())
    assert links
    assert all((PAGE.parent / link).is_file() for link in links)
