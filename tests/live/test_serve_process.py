"""`metaleader serve` as a process: its start, its refusals, its end, and replicas beside a writer that is killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from sessions import batch, make

from metaleader.cli import main
from metaleader.cli.serve import learner_factory
from metaleader.learners import FTL, FTML, Learner
from metaleader.live.session import Session
from metaleader.live.status import read_status

# The server is another process, which does not have the path of the tests.
SERVICE = f"""
import sys

sys.path.append({str(Path(__file__).parents[1])!r})

import sessions

learner = sessions.make
"""
EXPERIMENT = """
import torch
import metaleader as ml

def stream(seed):
    return [ml.Task("a", ml.Batch(torch.rand(4, 2), torch.rand(4, 1)), ml.Batch(torch.rand(4, 2), torch.rand(4, 1)))]

def network(hidden=6):
    return ml.models.mlp(2, 1, (hidden,))

experiment = ml.Experiment(
    stream=stream, network=network, loss=ml.losses.squared_error, meta_steps=3,
    methods={"ftl": {}, "ftml": {"inner_lr": 0.02, "support": 2, "query": 2}, "scratch": {}},
)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "service.py"
    path.write_text(SERVICE)
    return path


def test_a_server_process(file, tmp_path):
    folder = tmp_path / "customers"
    options = ("--experiment", file, "--port", "0", "--updates", "process")
    server = subprocess.Popen(
        [*(sys.executable, "-m", "metaleader", "serve", folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith(f"serving {folder} at http://127.0.0.1:")
        address = line.split()[-1]
        x, y = batch(1)
        inputs = [
            {"name": n, "shape": list(v.shape), "datatype": "FP32", "data": v.tolist()} for n, v in (("x", x), ("y", y))
        ]
        content = json.dumps({"inputs": inputs}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{address}/tasks/customer%203/observe", content, headers)
        assert json.load(urllib.request.urlopen(request)) == {"task": "customer 3", "stored": True}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/nothing")
        with pytest.raises(ValueError, match="is in use by another session"):
            Session(folder, make)
        state = read_status(folder)
        assert (state["in_use"], state["tasks"]) == (True, 1)
        process = json.load(urllib.request.urlopen(f"{address}/status"))["update_process"]
        assert Path(f"/proc/{process}").exists()
    finally:
        server.send_signal(signal.SIGTERM)
        _, error = server.communicate(timeout=60)
    assert (server.returncode, error) == (0, "")
    assert not Path(f"/proc/{process}").exists()
    state = read_status(folder)
    assert not state["in_use"]
    assert state["checkpoint"] == state["last"]
    assert (folder / "service.json").is_file()


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["serve", *map(str, arguments)])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_servers_that_are_refused(file, tmp_path, capsys):
    folder = tmp_path / "customers"
    options = ("--experiment", file, "--port", "0")
    with Session(folder, make) as session:
        session.observe(*batch(1), task="a")
        assert "is in use by another session" in refused(capsys, folder, *options)
    error = refused(capsys, folder, *options, "--host", "0.0.0.0")
    assert "0.0.0.0 can be reached from other machines: name a file with bearer tokens by --tokens" in error
    (tmp_path / "tokens").write_text("# none\n")
    assert "has no token" in refused(capsys, folder, *options, "--tokens", tmp_path / "tokens")
    assert "No such file" in refused(capsys, folder, *options, "--tokens", tmp_path / "nothing")
    assert "start the writer first" in refused(capsys, tmp_path / "new", *options, "--replica")
    assert "a replica neither repairs nor updates" in refused(capsys, folder, *options, "--replica", "--repair")
    for name, value in (("threads", 0), ("window-ms", -1), ("port", 70000), ("share", 2), ("max-rows", 0)):
        assert str(value) in refused(capsys, folder, "--experiment", file, f"--{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = refused(capsys, folder, "--experiment", file, "--port", port)
        assert f"cannot bind 127.0.0.1:{port} (Address already in use); choose another --port" in error
    assert "cannot use the address no.such.host" in refused(
        capsys, folder, *options, "--host", "no.such.host", "--tokens", _tokens(tmp_path)
    )
    file.write_text(SERVICE.replace("sessions.make", "lambda: sessions.make(inner_lr=0.5)"))
    assert "inner_lr is 0.01 in the folder and 0.5 here" in refused(capsys, folder, *options)


def _tokens(folder):
    path = folder / "good tokens"
    path.write_text("0123456789abcdef\n")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"service.py defines neither a function `learner` nor an experiment"),
        ("learner = 3", r"learner must be a function that returns a learner, got int"),
        ("import sessions\nlearner = sessions.make()", r"learner must be a function .*, got FTML"),
        ("def learner(:", r"service.py:1: SyntaxError"),
        ("1 / 0", r"service.py:1: ZeroDivisionError"),
        (EXPERIMENT.replace("ftml", "other"), "unknown method 'ftml'|method 'other'"),
    ],
)
def test_files_that_are_refused(text, message, file):
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        learner_factory(file, None, 0)


def test_a_learner_that_cannot_be_built(file, tmp_path):
    file.write_text("def learner(size):\n    return size\n")
    with pytest.raises(ValueError, match=r"learner\(\) of .* fails: TypeError: .* missing 1 required"):
        Session(tmp_path / "a", learner_factory(file, None, 0))
    file.write_text("def learner():\n    return 3\n")
    with pytest.raises(ValueError, match="pass a function that builds a learner"):
        Session(tmp_path / "a", learner_factory(file, None, 0))
    file.write_text(SERVICE)
    for method, seed in (("ftml", 0), (None, 1)):
        with pytest.raises(ValueError, match="--method and --seed belong to experiments"):
            learner_factory(file, method, seed)
    with pytest.raises(OSError, match="cannot read the experiment"):
        learner_factory(tmp_path / "nothing.py", None, 0)


def test_the_method_of_an_experiment(file):
    file.write_text(EXPERIMENT)
    learner = learner_factory(file, None, 0)()
    assert (type(learner), learner.inner_lr, learner.meta_steps) == (FTML, 0.02, 3)
    again, other = learner_factory(file, "ftml", 0)(), learner_factory(file, "ftml", 1)()
    assert torch.equal(learner.state.flat, again.state.flat)
    assert not torch.equal(learner.state.flat, other.state.flat)
    assert type(learner_factory(file, "ftl", 0)()) is FTL
    assert isinstance(learner_factory(file, "scratch", 0)(), Learner)
    with pytest.raises(ValueError, match="unknown method 'ftmll'; did you mean 'ftml'"):
        learner_factory(file, "ftmll", 0)


def test_the_file_of_the_documentation(file):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "serve.md").read_text()
    (text,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    file.write_text(text)
    assert learner_factory(file, None, 0)().meta_steps == 2


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.torture)])
def test_replicas_beside_a_writer_that_is_killed(kills, tmp_path):
    script = Path(__file__).parent / "replicas.py"
    run = subprocess.run(
        [sys.executable, script, tmp_path / "served", str(kills)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{kills} kills: " in run.stdout
    assert "none lost" in run.stdout
    assert "none failed" in run.stdout
