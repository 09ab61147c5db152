"""The cost of shards on one GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


@pytest.mark.gpu
def test_four_shards_take_less_than_twice_the_time() -> None:
    """Of an update of 100 tasks; the model of docs/scale.md says 1.6 times, four gradients one after the other."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), "cost", "--device", "cuda"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"] == {"1": "captured", "4": "captured"}
    assert found["ratio"] < 2.0, found
