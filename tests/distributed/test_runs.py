"""Runs on several processes: the same bytes, also after kills, restarts, and on another number of processes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from processes import run_in_processes

from metaleader.distributed.group import current_group
from metaleader.runner import RunOptions, resume_experiment, run_experiment

# A stream that kills the last process at its second round, once for every line of the file KILLS.
EXPERIMENT = """
import os, signal
from pathlib import Path

import metaleader as ml
from torch import nn


class Stream:
    def __init__(self, seed):
        self.stream = ml.streams.SinusoidStream(tasks=3, train=8, test=4, seed=seed)

    def __len__(self):
        return 3

    def __getitem__(self, t):
        kills = Path(os.environ.get("KILLS", "/nowhere"))
        last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        if t == 1 and last and kills.exists() and kills.read_text():
            kills.write_text(kills.read_text()[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        return self.stream[t] if isinstance(t, int) else [self.stream[i] for i in range(3)[t]]


def net():
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))


experiment = ml.Experiment(
    stream=lambda seed: Stream(seed),
    network=net,
    loss=ml.losses.squared_error,
    methods={
        "ftml": ml.Method(ml.FTML, inner_steps=2, support=2, query=2, tasks_per_step=5),
        "toe": ml.Method(ml.TOE, query=2, tasks_per_step=5),
    },
    reveal=4,
    meta_steps=2,
)
"""


def options(folder: Path, **given: Any) -> RunOptions:
    file = folder / "experiment.py"
    file.write_text(EXPERIMENT)
    return RunOptions(str(file), seeds=2, shards=4, engine="eager", device="cpu", data=str(folder), **given)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the experiment, and the results of a run of one process."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_in_processes(1, run, str(folder), "alone", 10**9) == ["finished"]
    return folder, tiny.results(folder / "alone")


def run(folder: str, name: str, stop_at: int) -> str:
    """Run the experiment; stop after a number of records as Ctrl-C would on all processes."""
    records: list[Any] = []

    def stop(*record: Any) -> None:
        records.append(record)
        if len(records) == stop_at:
            raise KeyboardInterrupt

    try:
        run_experiment(options(Path(folder)), Path(folder) / name, stop)
    except KeyboardInterrupt:
        return "stopped"
    return "finished"


def resume(folder: str, name: str) -> str:
    resume_experiment(Path(folder) / name)
    return "finished"


def test_runs_continue_on_another_number_of_processes(reference: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = reference
    for sizes in ((1, 2), (4, 1)):
        name = f"elastic-{sizes[0]}"
        assert run_in_processes(sizes[0], run, str(folder), name, 7) == ["stopped"] * sizes[0]
        assert tiny.results(folder / name) != expected
        assert run_in_processes(sizes[1], resume, str(folder), name) == ["finished"] * sizes[1]
        assert tiny.results(folder / name) == expected
        assert (folder / name / "config.json").read_bytes() == (folder / "alone" / "config.json").read_bytes()


def test_a_folder_in_use_is_refused_on_all_processes(reference: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = reference
    first, second = run_in_processes(2, run, str(folder), "alone", 10**9)
    assert first.startswith("ValueError")
    assert "already holds a run" in first
    assert second.startswith("ValueError: rank 0 has failed:")
    assert "already holds a run" in second
    assert tiny.results(folder / "alone") == expected


def other_settings(folder: str) -> str:
    rank = current_group().rank
    run_experiment(options(Path(folder), set=(f"reveal={2 + 2 * rank}",)), Path(folder) / "other")
    return "finished"


def test_processes_with_other_settings_do_not_start(reference: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = reference
    first, second = run_in_processes(2, other_settings, str(folder))
    assert first == second
    assert "the processes differ in set" in first
    assert "reveal=2" in first
    assert not (folder / "other").exists()


def torchrun(
    folder: Path, size: int, *arguments: str, kills: int = 0, **environment: str
) -> subprocess.CompletedProcess:
    """`torchrun -m metaleader` on this machine alone."""
    (folder / "kills").write_text("x" * kills)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(size), "--max-restarts", str(kills + 2), "-m", "metaleader", *arguments]
    given = clean | {"KILLS": str(folder / "kills"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=240, check=False)


def arguments(folder: Path, name: str) -> list[str]:
    given = options(folder)
    flags = ["--seeds", "2", "--shards", "4", "--engine", "eager", "--device", "cpu", "--data", str(folder)]
    return ["run", given.experiment, *flags, "--out", str(folder / name)]


def check_kills(folder: Path, expected: dict[str, Any], size: int, kills: int) -> None:
    done = torchrun(folder, size, *arguments(folder, f"killed-{size}"), kills=kills)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "kills").read_text() == ""
    assert tiny.results(folder / f"killed-{size}") == expected
    assert len(re.findall("report.html", done.stdout)) == 1  # only the first process prints


def test_a_killed_process_is_restarted_and_the_run_goes_on(reference: tuple[Path, dict[str, Any]]) -> None:
    check_kills(*reference, size=2, kills=1)


@pytest.mark.torture
def test_ten_kills(reference: tuple[Path, dict[str, Any]]) -> None:
    check_kills(*reference, size=4, kills=10)


@pytest.mark.torture
def test_two_agents_are_two_nodes(reference: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = reference
    (folder / "kills").write_text("")
    agents = []
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        command += ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "29517"]
        command += ["--local-addr", "127.0.0.1", "-m", "metaleader", *arguments(folder, "nodes")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        agents.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    outputs = [agent.communicate(timeout=400)[0].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert tiny.results(folder / "nodes") == expected
    shutil.rmtree(folder / "nodes")
