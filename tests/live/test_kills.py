"""No call that returned is lost, and none is made twice, by real kills under load."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("thread", 3),
        ("process", 2),
        pytest.param("process", 100, marks=pytest.mark.torture),
        pytest.param("thread", 50, marks=pytest.mark.torture),
        pytest.param("inline", 50, marks=pytest.mark.torture),
    ],
)
def test_kills(mode, kills, tmp_path):
    script = Path(__file__).parent / "kills.py"
    run = subprocess.run(
        [sys.executable, script, tmp_path / "session", str(kills), mode], capture_output=True, text=True, timeout=3000
    )
    assert run.returncode == 0, run.stderr
    assert f"{kills} kills: " in run.stdout
    assert "state equal" in run.stdout
