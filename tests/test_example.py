"""The examples run and show what they say."""

import json
import runpy
from pathlib import Path

import numpy as np


def test_own_stream(capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_stream.py"))
    errors = example["main"]()
    assert len(errors) == 20
    assert "sensor 19: squared error" in capsys.readouterr().out
    assert np.mean(errors[10:]) < np.mean(errors[:5]) / 4


def test_tune(capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "tune.py"))
    settings = [example["setting"](text) for text in ("inner_lr=0.01", "inner_lr=0.02,meta_lr=0.01,inner_steps=2")]
    found = example["tune"]("sinusoid", "ftl", settings, tasks=2, device="cpu", schedule="quick")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == json.loads(json.dumps(found))
    first, second = found
    assert (first["inner_lr"], second["meta_lr"], first["seed"], first["tasks"]) == (0.01, 0.01, 100, 2)
    assert first["errors"]["5"][20] != second["errors"]["5"][20]
    assert second["inner_steps"] == 2
    assert list(first["errors"]) == ["5", "1", "10", "20"]
