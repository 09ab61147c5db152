import re
from pathlib import Path

import pytest

from metaleader.streams import STREAMS
from metaleader.streams.datasets.registry import DATA_SETS

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run(number, capsys):
    exec(compile(BLOCKS[number], str(PAGE), "exec"), {})
    assert capsys.readouterr().out


def test_every_stream_and_data_set_is_there():
    assert re.findall(r"^\| `([\w-]+)` \| .* \| \d+ \|", TEXT, re.MULTILINE) == list(STREAMS)
    assert re.findall(r"^\| `(\w+)/` \|", TEXT, re.MULTILINE) == list(DATA_SETS)


def test_figures_and_links_are_there():
    links = re.findall(r"\]\(((?!https:).*?)\)", TEXT)
    assert len(links) == 7
    assert all((PAGE.parent / link).is_file() for link in links)
    assert all((PAGE.parent / link).stat().st_size < 150_000 for link in links)
