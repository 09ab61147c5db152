import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore::metaleader.regret.UnconvergedWarning")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run(number):
    # The neural example, made shorter.
    short = BLOCKS[number].replace("tasks=20", "tasks=3").replace("tolerance=0.05", "max_evaluations=20")
    exec(compile(short, str(PAGE), "exec"), {})


def test_figures_are_there_and_small():
    figures = re.findall(r"\]\((figures/.*?)\)", PAGE.read_text())
    assert len(figures) == 3
    assert all(0 < (PAGE.parent / figure).stat().st_size < 200_000 for figure in figures)
