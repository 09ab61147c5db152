"""Joining runs: the same as one run of all methods, and what is refused."""

import json
import os
import shutil

import pytest
import tiny
from made_records import made_settings

from metaleader import cli
from metaleader.presets import PRESETS
from metaleader.runner import RunOptions, join_experiments, run_experiment
from metaleader.runner import experiment as runner
from metaleader.runs.digest import Digest
from metaleader.runs.folder import read_checkpoint, read_config, read_times, write_checkpoint
from metaleader.runs.run import Run

ALL = ("ftml", "toe", "scratch")


@pytest.fixture(autouse=True)
def _no_figure(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny-nway", tiny.tiny_nway)
    monkeypatch.setattr(runner, "_finish", lambda folder: None)


def play(folder, *methods, **more):
    run_experiment(RunOptions("tiny-nway", methods, seeds=2, tasks=2, engine="eager", **more), folder)
    return folder


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """FTML and from scratch as one run, TOE as another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny-nway", tiny.tiny_nway)
        patch.setattr(runner, "_finish", lambda folder: None)
        folder = tmp_path_factory.mktemp("played")
        return play(folder / "two", "scratch", "ftml"), play(folder / "one", "toe")


@pytest.fixture
def runs(played, tmp_path):
    """Copies, to be damaged."""
    return [shutil.copytree(folder, tmp_path / folder.name) for folder in played]


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | fields))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("order", [1, -1])
def test_joined_runs_are_the_run_of_all_methods_at_once(runs, tmp_path, order):
    before = [contents(folder) for folder in runs]
    join_experiments(runs[::order], tmp_path / "joined")
    at_once = play(tmp_path / "at once", *ALL)
    assert tiny.results(tmp_path / "joined") == tiny.results(at_once)
    assert json.dumps(read_config(tmp_path / "joined")) == json.dumps(read_config(at_once))
    assert [contents(folder) for folder in runs] == before
    times = {row["method"]: [r for r in read_times(folder) if r["method"] == row["method"]]
             for folder in runs for row in read_times(folder)}  # fmt: skip
    assert read_times(tmp_path / "joined") == [row for method in ALL for row in times[method]]


def test_where_the_runs_ran_is_kept_by_method_where_it_differs(runs, tmp_path):
    change(runs[1], hardware="another machine", data="elsewhere")
    join_experiments(runs, tmp_path / "joined")
    config, first = (json.loads((folder / "config.json").read_bytes()) for folder in (tmp_path / "joined", runs[0]))
    here = first["hardware"]
    assert config["hardware"] == {"ftml": here, "toe": "another machine", "scratch": here}
    assert config["versions"] == first["versions"]


def test_a_run_whose_last_checkpoints_are_gone_is_resumed(runs, tmp_path):
    join_experiments(runs, tmp_path / "joined")
    whole = tiny.results(tmp_path / "joined")
    for written in (2, 1):
        for method in ALL[written:]:
            (tmp_path / "joined" / "checkpoint" / f"{method}.safetensors").unlink()
        runner.resume_experiment(tmp_path / "joined")
        assert tiny.results(tmp_path / "joined") == whole


class Stopped(BaseException):
    """A kill, for code in the same process."""


def stopped_at(number, patch):
    """Stop at a call that changes the file system; returns the number of calls so far."""
    calls = []

    def stopping(call):
        def wrapped(*arguments, **options):
            calls.append(call)
            if len(calls) >= number:  # a dead process writes nothing any more
                raise Stopped
            return call(*arguments, **options)

        return wrapped

    for name in ("fsync", "replace", "chmod", "mkdir", "unlink"):
        patch.setattr(os, name, stopping(getattr(os, name)))
    return calls


def test_a_join_that_was_stopped_anywhere_is_joined_again(runs, tmp_path):
    join_experiments(runs, tmp_path / "joined")
    whole = tiny.results(tmp_path / "joined")
    number, resumed = 0, 0
    while True:
        folder, number = tmp_path / f"{number}", number + 1
        with pytest.MonkeyPatch.context() as patch:
            calls = stopped_at(number, patch)
            try:
                join_experiments(runs, folder)
            except Stopped:
                pass
            else:
                break
        if (folder / "records.csv").exists():
            runner.resume_experiment(folder)  # says that it is finished
            resumed += 1
            assert tiny.results(folder) == whole
            continue
        if any(folder.glob("checkpoint/[!.]*")):
            with pytest.raises(ValueError, match=r"records.csv is missing.*If `metaleader join` was stopped, run it"):
                runner.resume_experiment(folder)
        join_experiments(runs, folder)
        assert tiny.results(folder) == whole
        assert not list(folder.rglob("*.part"))
    assert len(calls) >= 20
    assert resumed >= 1


def test_the_command(runs, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(runner, "_finish", shown.append)
    with pytest.raises(SystemExit) as caught:
        cli.main(["join", *map(str, runs), "--out", str(tmp_path / "joined")])
    assert caught.value.code == 0
    assert shown == [tmp_path / "joined"]
    with Run(tmp_path / "joined") as run:
        assert run.finished()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experiment": "sinusoid"}, "one does not match .*two: its experiment is 'sinusoid', not 'tiny-nway'"),
        ({"seeds": 5}, "its seeds is 5, not 2"),
        ({"schedule": "paper"}, "its schedule is 'paper', not 'standard'"),
        ({"tasks": 3}, "its tasks is 3, not 2"),
        ({"device": "cuda"}, "its device is 'cuda', not 'cpu'"),
        ({"settings": made_settings(0.5)}, "its settings is {'meta_steps': 10"),
        ({"settings": None}, "config.json is damaged: its settings is None"),
        ({"engines": {}}, r"a config.json in .* is damaged \(KeyError\('toe'\)\)"),
        ({"methods": ["ftml"]}, "one has the method 'ftml', as a run before it does"),
        ({"methods": ["../toe"]}, r"a config.json in .* is damaged \(KeyError\('../toe'\)\)"),
        ({"format": 3}, "has format 3, this release reads up to 2"),
    ],
)
def test_runs_that_do_not_fit(runs, tmp_path, fields, message):
    change(runs[1], **fields)
    refused(runs, tmp_path, message)


def refused(folders, tmp_path, message, error: type[Exception] = ValueError):
    with pytest.raises(error, match=message):
        join_experiments(folders, tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_a_run_alone_or_twice_or_none(runs, tmp_path):
    refused([], tmp_path, "at least two run folders to join, got 0")
    refused(runs[:1], tmp_path, "at least two run folders to join, got 1")
    refused([runs[0], runs[0]], tmp_path, "two has the method 'scratch', as a run before it does")
    refused([runs[0], tmp_path / "nowhere"], tmp_path, "no run in .*nowhere", FileNotFoundError)


def test_an_unfinished_run(runs, tmp_path):
    (runs[0] / "checkpoint" / "ftml.safetensors").unlink()
    refused(runs, tmp_path, "two is not finished: continue ftml with `metaleader resume .*two`")


def test_a_run_that_stopped_between_rounds(runs, tmp_path, monkeypatch):
    def stopped_in_the_second(*arguments, **options):
        if options["start"]:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = runner.play_together
    with monkeypatch.context() as patch:
        patch.setattr(runner, "play_together", stopped_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            play(tmp_path / "stopped", "toe")
    refused([runs[0], tmp_path / "stopped"], tmp_path, "stopped is not finished: continue toe")
    runner.resume_experiment(tmp_path / "stopped")
    join_experiments([runs[0], tmp_path / "stopped"], tmp_path / "joined")


def test_records_that_are_not_whole(runs, tmp_path):
    text = (runs[1] / "records.csv").read_bytes()
    for cut in (text[: text.rindex(b"\n", 0, -1) + 1], text[: text.index(b"\n") + 1]):
        (runs[1] / "records.csv").write_bytes(cut)
        refused(runs, tmp_path, "one/records.csv was truncated")
    os.unlink(runs[1] / "records.csv")
    refused(runs, tmp_path, "one/records.csv is missing")


def test_records_of_another_release(runs, tmp_path):
    path = runs[1] / "records.csv"
    path.write_bytes(path.read_bytes().replace(b"loss_1", b"loss_2", 1))
    refused(runs, tmp_path, "one/records.csv was changed: it differs between lines 1 and")
    tree = read_checkpoint(runs[1], "toe")
    assert tree is not None
    write_checkpoint(runs[1], "toe", tree | Digest(path.read_bytes()).tree())
    refused(runs, tmp_path, "one has the columns .*'loss_2'.*join runs of one release")


def test_a_folder_that_holds_a_run(runs, tmp_path):
    with pytest.raises(ValueError, match="already holds a run"):
        join_experiments(runs, runs[0])
