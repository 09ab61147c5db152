"""No call that returned is lost, and none is made twice, by real kills under load and by faults of the disk."""

import shutil
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


@pytest.mark.torture
def test_faults(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: faults.c cannot be compiled")
    script = Path(__file__).parent / "attack.py"
    run = subprocess.run(
        [sys.executable, script, tmp_path / "attack", "20"], capture_output=True, text=True, timeout=3000
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].endswith(" 0 failures, 0 silent failures, 0 tracebacks")
