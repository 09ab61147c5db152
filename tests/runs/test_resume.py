"""Exact resume: after a stop at any write step, by real kills, and by hand."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from metaleader import cli
from metaleader.engine.engine import Engine
from metaleader.presets import PRESETS
from metaleader.runner import RunOptions, resume_experiment, run_experiment
from metaleader.runner import experiment as runner
from metaleader.runs.folder import read_records, read_times
from metaleader.system.trees import load_tree

RUN = ("run", "sinusoid", "--schedule", "quick", "--tasks", "6", "--seeds", "1", "--methods", "toe,scratch", "--out")
KILLS = 100


@pytest.fixture
def presets(monkeypatch):
    """Tiny presets, and an end of the run without its figure."""
    monkeypatch.setitem(PRESETS, "tiny", tiny.tiny)
    monkeypatch.setitem(PRESETS, "tiny-nway", tiny.tiny_nway)
    monkeypatch.setattr(runner, "_finish", lambda folder: None)
    monkeypatch.setattr(runner.machine, "commit", lambda: None)


class Snapshots:
    """Copies of a folder around every call that changes it or makes a change durable: what a kill there would leave."""

    CALLS = ("fsync", "replace", "chmod", "truncate", "mkdir", "open", "unlink")

    def __init__(self, folder, into, monkeypatch):
        self.folder, self.into, self.calls, self.taken = folder, into, [], {}
        self.busy = False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.around(name, getattr(os, name)))

    def around(self, name, call):
        def wrapped(*arguments, **options):
            self.take(f"before {name}")
            result = call(*arguments, **options)
            self.take(f"after {name}")
            return result

        return wrapped

    def take(self, moment):
        if self.busy or not self.folder.is_dir():
            return
        self.busy = True
        files = {path.relative_to(self.folder): path for path in sorted(self.folder.rglob("*")) if path.is_file()}
        # Temporary files have random names, and times differ: states that are otherwise alike are one.
        state = tuple(
            (re.sub(r"\.[^.]+\.part$", ".part", str(name)), "times" not in str(name) and path.read_bytes())
            for name, path in files.items()
        )
        self.calls.append(moment)
        if state not in self.taken:
            copy = self.into / f"{len(self.taken)}"
            shutil.copytree(self.folder, copy)
            self.taken[state] = copy
        self.busy = False


@pytest.mark.parametrize(
    ("preset", "methods", "seeds"), [("tiny", ("ftl", "toe"), 2), ("tiny-nway", ("ftml", "scratch", "toe"), 1)]
)
def test_after_a_stop_at_any_write_step_the_result_is_the_same(preset, methods, seeds, presets, tmp_path):
    folder = tmp_path / "whole"
    with pytest.MonkeyPatch.context() as patch:
        snapshots = Snapshots(folder, tmp_path / "stopped", patch)
        run_experiment(RunOptions(preset, methods, seeds, tasks=2), folder)
    whole = tiny.results(folder)
    rounds = 2 * len(json.loads((folder / "config.json").read_bytes())["methods"])
    assert {f"{when} {call}" for when in ("before", "after") for call in ("fsync", "replace")} <= set(snapshots.calls)
    # Of each round at least: records written, times' temporary file, its rename, the checkpoint's, its rename.
    assert len(snapshots.taken) >= 4 * rounds + 4
    begun = 0
    for copy in snapshots.taken.values():
        if not (copy / "config.json").exists():
            with pytest.raises(FileNotFoundError, match="no run in"):
                resume_experiment(copy)
            continue
        begun += 1
        lines = (copy / "records.csv").read_bytes().splitlines(True) if (copy / "records.csv").exists() else []
        if len(lines) > 1 and begun % 2:
            # The last append, torn.
            saved = [load_tree(path, "metaleader-checkpoint", 2) for path in (copy / "checkpoint").glob("[!.]*")]
            length = max((tree["records_bytes"] for tree in saved), default=0)
            here = (copy / "records.csv").stat().st_size
            os.truncate(copy / "records.csv", (length + here) // 2)
        resume_experiment(copy)
        assert tiny.results(copy) == whole, copy
        assert not list(copy.rglob("*.part"))
        times = [(row["method"], row["round"]) for row in read_times(copy)]
        assert len(times) == len(set(times)) == rounds
    assert begun >= 4 * rounds
    # The comparison sees a difference where there is one.
    run_experiment(RunOptions(preset, methods, seeds + 1, tasks=2), tmp_path / "other")
    assert tiny.results(tmp_path / "other") != whole


@pytest.mark.parametrize(
    ("preset", "names", "limits"),
    [
        ("tiny", ("ftml", "ftml-last", "ftl", "toe", "scratch"), ()),
        ("tiny", ("ftml", "ftl", "toe"), ("max_datapoints=3", "reservoir=true")),
        ("tiny", ("ftml", "toe"), ("max_bytes=96",)),
        ("tiny-nway", ("ftml", "toe"), ("max_datapoints=4", "reservoir=true")),
    ],
)
def test_every_method_goes_on_from_the_middle(preset, names, limits, presets, tmp_path, monkeypatch):
    settings = tuple(f"{name}.{limit}" for name in names for limit in limits)
    run = RunOptions(preset, names, seeds=2, set=settings)
    run_experiment(run, tmp_path / "whole")
    original, starts = runner.play_together, []

    def stopping(*arguments, **options):
        starts.append(options["start"])
        if starts[-2:] == [0, 1]:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    monkeypatch.setattr(runner, "play_together", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(run, tmp_path / "run")
    for _ in names[1:]:
        with pytest.raises(KeyboardInterrupt):
            resume_experiment(tmp_path / "run")
    resume_experiment(tmp_path / "run")
    assert starts == [0, 1, *range(1, 3 if preset == "tiny" else 5)] * len(names)
    assert tiny.results(tmp_path / "run") == tiny.results(tmp_path / "whole")


def test_a_stopped_run_does_not_play_its_finished_rounds_again(presets, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    played = []
    original = runner.play_together

    def counting(learners, streams, *arguments, **options):
        if len(played) == 4:
            raise KeyboardInterrupt
        played.append((type(learners[0]).__name__, options["start"]))
        return original(learners, streams, *arguments, **options)

    monkeypatch.setattr(runner, "play_together", counting)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(RunOptions("tiny", ("toe", "scratch"), seeds=1), folder)
    played += [("", 0)]
    resume_experiment(folder)
    assert played == [("TOE", 0), ("TOE", 1), ("TOE", 2), ("Scratch", 0), ("", 0), ("Scratch", 1), ("Scratch", 2)]


def test_a_finished_run_says_so(presets, tmp_path, capsys, monkeypatch):
    run_experiment(RunOptions("tiny", ("toe",), seeds=1), tmp_path / "run")
    before = tiny.results(tmp_path / "run")
    monkeypatch.setattr(runner, "play_together", None)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["resume", str(tmp_path / "run")])
    assert "run is finished: there is nothing to resume" in capsys.readouterr().out
    assert tiny.results(tmp_path / "run") == before


def test_records_without_a_checkpoint_are_left_alone(presets, tmp_path):
    folder = tmp_path / "run"
    run_experiment(RunOptions("tiny", ("toe",), seeds=1), folder)
    shutil.rmtree(folder / "checkpoint")
    before = (folder / "records.csv").read_bytes()
    with pytest.raises(ValueError, match="has records but no checkpoint"):
        resume_experiment(folder)
    assert (folder / "records.csv").read_bytes() == before


def test_the_mode_the_threads_and_the_device_are_those_of_the_run(presets, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    made = []

    class Falling(Engine):
        def __init__(self, mode: Any = "auto", planned_updates=0, device="cpu"):
            super().__init__("eager" if planned_updates else mode, planned_updates, device)
            made.append((mode, planned_updates, self.mode))

    monkeypatch.setattr(runner, "Engine", Falling)
    threads = torch.get_num_threads()
    monkeypatch.setattr(runner, "play_together", lambda *a, **o: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(RunOptions("tiny", ("toe",), seeds=1, engine="auto"), folder)
    monkeypatch.undo()
    monkeypatch.setitem(PRESETS, "tiny", tiny.tiny)
    monkeypatch.setattr(runner, "_finish", lambda folder: None)
    config = json.loads((folder / "config.json").read_bytes())
    assert config["engines"] == {"toe": "eager"}
    assert config["threads"] == 1
    # A run whose mode was another, on more threads.
    config["threads"], config["engines"] = 2, {"toe": "compiled"}
    (folder / "config.json").write_text(json.dumps(config))
    modes = []

    class Watched(Engine):
        def __init__(self, mode: Any = "auto", planned_updates=0, device="cpu"):
            super().__init__(mode, planned_updates, device)
            if not planned_updates:
                modes.append((self.mode, torch.get_num_threads()))
                self.mode = "eager"  # as after a fall back

    monkeypatch.setattr(runner, "Engine", Watched)
    original, rounds = runner.play_together, []

    def one_round(*arguments, **options):
        if rounds:
            raise KeyboardInterrupt
        rounds.append(0)
        return original(*arguments, **options)

    try:
        monkeypatch.setattr(runner, "play_together", one_round)
        with pytest.raises(KeyboardInterrupt):
            resume_experiment(folder)
        monkeypatch.setattr(runner, "play_together", original)
        resume_experiment(folder)
    finally:
        torch.set_num_threads(threads)
    # The mode of the configuration first; after a checkpoint, the one that was then in use.
    assert modes == [("compiled", 2), ("eager", 2)]


def test_a_preset_that_has_changed_is_refused(presets, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "play_together", lambda *a, **o: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(RunOptions("tiny", ("toe",), seeds=1), tmp_path / "run")
    changed = runner.dataclasses.replace(tiny.tiny(), meta_steps=7)
    monkeypatch.setitem(PRESETS, "tiny", lambda schedule: changed)
    with pytest.raises(ValueError, match=r"'tiny' has changed since .*: meta_steps was 2, now 7.*start a new run"):
        resume_experiment(tmp_path / "run")


def test_networks_that_another_version_of_torch_prints_otherwise_are_the_same(presets, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run_experiment(RunOptions("tiny", ("toe",), seeds=1), folder)
    monkeypatch.setattr(torch.nn.Linear, "extra_repr", lambda self: "printed otherwise")
    with pytest.raises(ValueError, match=r"network\.sha256 was"):
        resume_experiment(folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["versions"]["torch"] = "2.11.0"
    (folder / "config.json").write_text(json.dumps(config))
    resume_experiment(folder)


def test_another_machine_is_named(presets, tmp_path, capsys):
    folder = tmp_path / "run"
    run_experiment(RunOptions("tiny", ("toe",), seeds=1), folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"hardware": "abacus"}))
    capsys.readouterr()
    resume_experiment(folder)
    assert "note: hardware was abacus, now" in capsys.readouterr().out


# Real processes.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of `RUN`, never stopped, in this process."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_finish", lambda folder: None)
        with pytest.raises(SystemExit, match="0"):
            cli.main([*RUN, str(folder)])
    return tiny.results(folder)


def start(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "metaleader", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A test run in the background of a shell ignores interrupts, and hands that on.
    return subprocess.Popen(
        command, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes
    )


def wait_for(process, condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def size(path):
    return path.stat().st_size if path.exists() else 0


def test_killed_three_times_the_result_is_the_same(whole, tmp_path, presets):
    folder = tmp_path / "run"
    moments = (
        lambda: (folder / "config.json").exists(),
        lambda: (folder / "checkpoint" / "toe.safetensors").exists(),
        lambda: (folder / "checkpoint" / "scratch.safetensors").exists(),
    )
    for number, moment in enumerate(moments):
        process = start(*RUN, folder) if number == 0 else start("resume", folder)
        wait_for(process, moment)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert len(read_records(folder)) < whole["records.csv"].count(b"\n") - 1
    resume_experiment(folder)
    assert tiny.results(folder) == whole


def test_an_interrupt_says_how_to_resume(whole, tmp_path, presets):
    folder = tmp_path / "run"
    process = start(*RUN, folder)
    wait_for(process, lambda: (folder / "checkpoint" / "toe.safetensors").exists())
    # Held still, or it may be done before it is interrupted.
    process.send_signal(signal.SIGSTOP)
    saved = size(folder / "records.csv")
    # Somebody else wants the folder meanwhile.
    with pytest.raises(ValueError, match="in use by another process"):
        resume_experiment(folder)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert f"Continue with: metaleader resume {folder}" in out
    assert error == "metaleader: interrupted\n"
    assert size(folder / "records.csv") >= saved > 0
    resume_experiment(folder)
    assert tiny.results(folder) == whole


def _child(ready, arguments):
    runner._finish = lambda folder: None
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        ready.set()
        cli.main(arguments)


@pytest.mark.torture
def test_killed_a_hundred_times_the_result_is_the_same(whole, tmp_path):
    # Forked from a process that has imported everything, so that a hundred kills do not cost a hundred imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metaleader.experiments.experiment", "metaleader.cli", "hypothesis", "pytest"])

    def begin(folder):
        arguments = ["resume", str(folder)] if (folder / "records.csv").exists() else [*RUN, str(folder)]
        ready = context.Event()
        process = context.Process(target=_child, args=(ready, arguments))
        process.start()
        assert ready.wait(120)
        return process

    process = begin(tmp_path / "never killed")
    started = time.monotonic()
    process.join()
    seconds = time.monotonic() - started
    assert tiny.results(tmp_path / "never killed") == whole
    draw = np.random.default_rng(0)
    kills, finished = 0, 0
    while kills < KILLS:
        folder = tmp_path / f"{finished}"
        process = begin(folder)
        process.join(float(draw.exponential(seconds / 2)))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            assert tiny.results(folder) == whole
            finished += 1
        else:
            kills += 1
    assert finished >= KILLS // 20


@pytest.mark.torture
def test_a_compiled_run_resumes_exactly(tmp_path):
    arguments = [*RUN[:-5], "--seeds", "1", "--methods", "ftml", "--engine", "compiled", "--out"]
    process = start(*arguments, tmp_path / "whole")
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    process = start(*arguments, tmp_path / "run")
    wait_for(process, lambda: (tmp_path / "run" / "checkpoint" / "ftml.safetensors").exists(), 600)
    process.kill()
    process.communicate()
    process = start("resume", tmp_path / "run")
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert tiny.results(tmp_path / "run") == tiny.results(tmp_path / "whole")
    tree = load_tree(Path(tmp_path / "run" / "checkpoint" / "ftml.safetensors"), "metaleader-checkpoint", 2)
    assert tree["state"]["engine"] == "compiled"
