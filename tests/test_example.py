"""The examples run and show what they say."""

import runpy
from pathlib import Path

import numpy as np


def test_own_stream(capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_stream.py"))
    errors = example["main"]()
    assert len(errors) == 20
    assert "sensor 19: squared error" in capsys.readouterr().out
    assert np.mean(errors[10:]) < np.mean(errors[:5]) / 4
