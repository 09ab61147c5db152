"""A few tries of each kind of the attack of `make torture`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torture.flips import attack_flips
from torture.tally import Tally


def test_faults_at_system_calls(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: faults.c cannot be compiled")
    from torture.faults import compiled

    code = "import sys; from torture.faults import main; print(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(tmp_path / "faults"), "run,join,save,session", "3"]
    paths = os.pathsep.join((str(Path(__file__).parents[1]), str(Path(__file__).parents[2])))
    loaded = os.environ | {"LD_PRELOAD": str(compiled(tmp_path)), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=loaded, capture_output=True, text=True, check=False)
    found = answer.stdout.splitlines()[-1:]
    assert found, answer.stderr
    assert found[0].endswith(" 0 failures, 0 silent failures, 0 tracebacks"), answer.stderr
    assert int(found[0].split()[0]) >= 40


def test_flipped_bits(tmp_path: Path) -> None:
    tally = attack_flips(tmp_path, 3)
    assert (tally.tries > 20, tally.lines) == (True, [])


def test_a_failure_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    tally.note("well")
    tally.note("lost", "a round is gone", silent=True)
    tally.note("raised", error=RuntimeError("odd"))
    assert str(tally) == "3 tries, 2 failures, 1 silent failures, 1 tracebacks"
    assert capsys.readouterr().err == "lost: a round is gone \nraised:  RuntimeError: odd\n"
