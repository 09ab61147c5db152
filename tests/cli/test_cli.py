"""The command line: what it lists, and that bad input ends with a message and status 2."""

import json
import os
import re
import sys
from typing import get_args

import pytest
import tiny
import torch
from made_records import made_settings

import metaleader
from metaleader import cli
from metaleader.methods import METHODS
from metaleader.presets import MACHINES, PRESETS, TIMES
from metaleader.runner import experiment as runner
from metaleader.runs.folder import Schedule


@pytest.fixture
def status(capsys, monkeypatch):
    """Runs a command; its exit status, output and error output."""
    monkeypatch.setitem(PRESETS, "tiny", tiny.tiny)
    monkeypatch.setattr(runner, "_finish", lambda folder: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        return caught.value.code, *capsys.readouterr()

    return run


RUN = ("run", "tiny", "--methods", "toe", "--seeds", "1", "--out")


def refused(answer, *parts):
    code, _, error = answer
    assert code == 2
    assert error.startswith("metaleader: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    for part in parts:
        assert part in error


def test_run_then_resume(status, tmp_path):
    assert status(*RUN, tmp_path / "run")[0] == 0
    code, out, _ = status("resume", tmp_path / "run")
    assert code == 0
    assert "is finished: there is nothing to resume" in out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["sinusiod"], ["unknown preset 'sinusiod'; did you mean 'sinusoid'?", "rainbow-digits"]),
        (["tiny", "--methods", "ftml,sratch"], ["unknown method 'sratch'; did you mean 'scratch'?"]),
        (["tiny", "--methods", ","], ["name at least one method"]),
        (["tiny", "--device", "cuda:77"], ["device 'cuda:77' does not exist"]),
        (["tiny", "--device", "tpu7"], ["unknown device 'tpu7'; use cpu, cuda or auto"]),
        (["tiny", "--seeds", "0"], ["must be at least 1, got 0"]),
        (["tiny", "--engine", "captured", "--device", "cpu"], ["needs a CUDA device"]),
    ],
)
def test_bad_arguments(status, tmp_path, arguments, parts):
    refused(status("run", *arguments, "--out", tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written(status, tmp_path):
    (tmp_path / "file").write_text("")
    refused(status(*RUN, tmp_path / "file" / "run"), "cannot write the run folder", "file/run", "choose another")


def test_a_folder_that_holds_a_run(status, tmp_path):
    assert status(*RUN, tmp_path)[0] == 0
    refused(status(*RUN, tmp_path), f"metaleader resume {tmp_path}")


def test_resuming_what_is_not_there(status, tmp_path):
    refused(status("resume", tmp_path / "nothing"), "no run in", "nothing")


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"format": 3}, ["has format 3, this release reads up to 2; upgrade"]),
        ({"experiment": "tinny"}, ["unknown preset 'tinny'"]),
        ({"methods": ["../../toe"]}, ["unknown method '../../toe'"]),
        ({"seeds": "many"}, ["config.json is damaged"]),
        ({"threads": None}, ["config.json is damaged"]),
        ({"settings": made_settings(0.5)}, ["has changed since the run began", "start a new run"]),
        ({"settings": {}}, ["config.json is damaged: it has no meta_steps"]),
    ],
)
def test_configurations_that_cannot_be_resumed(status, tmp_path, fields, parts):
    assert status(*RUN, tmp_path)[0] == 0
    change(tmp_path, **fields)
    refused(status("resume", tmp_path), *parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_of_a_gpu_where_there_is_none(status, tmp_path):
    assert status(*RUN, tmp_path)[0] == 0
    change(tmp_path, device="cuda")
    refused(status("resume", tmp_path), "device 'cuda' does not exist")


def test_records_that_were_cut(status, tmp_path, monkeypatch):
    def stopped_in_the_second(*arguments, **options):
        if options["start"]:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = runner.play_together
    monkeypatch.setattr(runner, "play_together", stopped_in_the_second)
    code, out, error = status(*RUN, tmp_path)
    assert (code, error) == (130, "metaleader: interrupted\n")
    assert f"Continue with: metaleader resume {tmp_path}\n" in out
    text = (tmp_path / "records.csv").read_bytes()
    (tmp_path / "records.csv").write_bytes(text[:-7])
    refused(status("resume", tmp_path), "records.csv was truncated", "restore it")


def test_records_of_a_finished_run_that_were_cut(status, tmp_path):
    assert status(*RUN, tmp_path)[0] == 0
    *lines, _ = (tmp_path / "records.csv").read_bytes().splitlines(keepends=True)
    (tmp_path / "records.csv").write_bytes(b"".join(lines))
    refused(status("resume", tmp_path), "records.csv was truncated", "restore it")


def test_the_list_has_every_preset_with_its_sizes(status):
    code, out, _ = status("list")
    assert code == 0
    for name in PRESETS:
        assert f"{name}: {PRESETS[name]('standard').summary}" in out
        # Not cut off at the 80 columns of a pipe.
        assert f"│ {name} " in out
    # 56 tasks of 45 reveals of 20 datapoints, 50 updates each.
    assert any(all(part in line for part in ("paper", " 56 ", " 900 ", "126,000")) for line in out.splitlines())


def test_the_list_says_how_long_a_run_took_and_where(status, monkeypatch):
    # Wide, so that no cell is broken into lines.
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = status("list")
    lines = [line for line in out.splitlines() if line.startswith("│")][: 3 * len(PRESETS)]
    rows = [(name, schedule) for name in PRESETS for schedule in get_args(Schedule)]
    for (name, schedule), line in zip(rows, lines, strict=True):
        assert f" {schedule} " in line
        assert TIMES.get((name, schedule), "not measured") in line
    for machine, words in MACHINES.items():
        assert f"{machine}: {words}\n" in out


def test_the_list_says_which_methods_each_preset_has(status, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = status("list")
    rows = {line.split()[1]: line.split()[3::2] for line in out.splitlines() if line.startswith("│")}
    for method in METHODS:
        made = [make("standard") for make in PRESETS.values()]
        expected = ["default" if method in p.methods else "extra" if method in p.extras else "–" for p in made]
        assert rows[method] == expected
    assert rows["ftl-matched"][:5] == ["extra", "extra", "–", "–", "–"]


def test_every_time_has_its_preset_its_seeds_and_its_machine():
    for (name, schedule), text in TIMES.items():
        if text == "as standard":
            assert same_size(PRESETS[name](schedule), PRESETS[name]("standard"))
            assert (name, "standard") in TIMES
        else:
            time, seeds, machine = text.split(", ")
            assert re.fullmatch(r"(\d+ h )?(\d+ min )?\d+ (s|min)", time)
            assert re.fullmatch(r"1 seed|\d+ seeds", seeds)
            assert machine in MACHINES


def same_size(one, other):
    return all(getattr(one, f) == getattr(other, f) for f in ("tasks", "meta_steps", "reveal", "reveals", "steps"))


@pytest.mark.parametrize("arguments", [["list"], ["data"], ["--help"], ["show", "--help"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_bad_input(arguments, capsys, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", nobody)
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        # Python does so when it ends, and would say that it cannot.
        nobody.flush()
    assert caught.value.code == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "arguments", [("run", "tiny", "--out", ""), ("run", "tiny", "--out="), ("resume", ""), ("run", "")]
)
def test_empty_arguments_are_refused(status, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    refused(status(*arguments), "is empty")
    assert not list(tmp_path.iterdir())


def test_the_version(status):
    code, out, error = status("--version")
    assert (code, error) == (0, "")
    assert re.fullmatch(rf"metaleader {metaleader.__version__}, torch \d+\.\d+\S*, Python 3\.\d+\.\d+\n", out)
