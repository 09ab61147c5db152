"""Experiment files by the command line: they run, resume, and bad ones are refused in one line that names the place."""

import json

import pytest
import tiny

from metaleader import cli
from metaleader.report.claims import check_claims
from metaleader.report.page import report_runs
from metaleader.runner import experiment as runner
from metaleader.runs.folder import read_records

FILE = """
import torch
import metaleader as ml

def stream(seed, tasks=2, noise=0.0):
    return ml.streams.SinusoidStream(tasks=tasks, train=8, test=5, noise=noise, seed=seed)

def network(hidden=8):
    return ml.models.mlp(1, 1, [hidden])

class Mean:
    def begin(self, name):
        self.y = torch.zeros(0, 1)
    def observe(self, x, y, update=True):
        self.y = torch.cat([self.y, y + 0.01 * torch.randn(len(y), 1)])
    def update(self):
        pass
    def adapt(self, steps, statistics):
        return [lambda x: self.y.mean().expand(len(x), 1)] * len(steps)

experiment = ml.Experiment(
    stream=stream, network=network, loss=ml.losses.squared_error,
    methods={
        "ftml": {"inner_lr": 0.01, "support": 3, "query": 3},
        "toe": {"query": 3},
        "mean": ml.Method(Mean, label="the $mean$ [red]<b>", colour="#123456"),
    },
    reveal=4, reveals=2, meta_steps=2, steps=(2, 1), claims=[ml.better("ftml", "mean", at=4, margin=0.5)], threads=1,
)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def status(capsys, monkeypatch):
    monkeypatch.setattr(runner, "_finish", lambda folder: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        return caught.value.code, *capsys.readouterr()

    return run


def test_a_file_runs_and_its_folder_needs_no_code(file, tmp_path, capsys):
    folder = tmp_path / "run"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", str(file), "--out", str(folder), "--seeds", "2", "--first-seed", "100"])
    assert {r["seed"] for r in read_records(folder)} == {100, 101}
    config = json.loads((folder / "config.json").read_bytes())
    assert config["file"] == str(file)
    assert len(config["sha256"]) == 64
    assert config["settings"]["network"]["options"] == {"hidden": 8}
    assert config["settings"]["learners"]["ftml"]["options"]["meta_lr"] == 1e-3
    assert config["styles"]["mean"] == {"label": "the $mean$ [red]<b>", "colour": "#123456"}
    file.unlink()
    (claim,) = check_claims(folder)
    assert claim.margin == 0.5
    assert "the $mean$ [red]&lt;b&gt;" in report_runs([folder]).read_text()


@pytest.mark.parametrize("regret", [[], ["--regret"]])
def test_a_stopped_run_of_a_file_gives_the_same_bytes(file, status, tmp_path, monkeypatch, regret):
    assert status("run", file, "--seeds", 2, "--out", tmp_path / "whole", *regret)[0] == 0
    original = runner.play_together

    def stopping(*arguments, **options):
        if options["start"]:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(runner, "play_together", stopping)
    assert status("run", file, "--seeds", 2, "--methods", "mean,ftml", "--out", tmp_path / "run", *regret)[0] == 130
    monkeypatch.setattr(runner, "play_together", original)
    assert status("resume", tmp_path / "run")[0] == 0
    whole, resumed = (read_records(tmp_path / name) for name in ("whole", "run"))
    for method in ("mean", "ftml"):
        assert [r for r in whole if r["method"] == method] == [r for r in resumed if r["method"] == method]
    assert {r["protocol"] for r in resumed} == {"regret" if regret else "online"}


def test_a_changed_file_is_refused_with_what_changed(file, status, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved.py"
    assert status("run", file, "--seeds", 1, "--methods", "toe", "--out", folder)[0] == 0
    before = tiny.results(folder)
    file.rename(moved)
    assert status("resume", folder, "--experiment", moved)[0] == 0
    moved.write_text(FILE.replace('"toe": {"query": 3}', '"toe": {"query": 4}'))
    code, _, error = status("resume", folder, "--experiment", moved)
    assert code == 2
    assert "toe.query was 3, now 4" in error
    moved.write_text(FILE + "# changed\n")
    code, _, error = status("resume", folder, "--experiment", moved)
    assert code == 2
    assert "no setting differs, but the code of moved.py does" in error
    assert tiny.results(folder) == before


def test_a_file_in_the_run_folder_is_not_executed(file, status, tmp_path):
    folder = tmp_path / "run"
    assert status("run", file, "--seeds", 1, "--methods", "toe", "--out", folder)[0] == 0
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"file": str(folder / "evil.py")}))
    code, _, error = status("resume", folder)
    assert code == 2
    assert "from which nothing is executed unless it is named" in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reveal=4", "reveal='4'", "reveal must be an integer of at least 1, got '4'"),
        ("reveal=4", "revael=4", "unknown field of Experiment 'revael'; did you mean 'reveal'?"),
        ("loss=ml.losses.squared_error,", "", "the experiment lacks 'loss'"),
        ("import torch\n", "import no_such_module\n", "mine.py:2: ModuleNotFoundError: No module named"),
        ("def stream(", "def stream((", "mine.py:5: SyntaxError"),
        ("experiment = ml.Experiment(", "x = dict(", "defines no experiments"),
        ('better("ftml", "mean"', 'better("ftml", "man"', "a claim names the method 'man'"),
        ("#123456", "red", "a colour must be six hexadecimal digits"),
        ("return ml.models", "return 1 / 0, ml.models", "mine.py:9: ZeroDivisionError"),
        ('"toe": {"query": 3}', '"toe": {"qery": 3}', "TOE has no setting 'qery'; did you mean query?"),
    ],
)
def test_bad_files(file, status, tmp_path, old, new, message):
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    code, _, error = status("run", file, "--out", tmp_path / "run")
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ftml.iner_lr=1", "unknown setting of ftml 'iner_lr'; did you mean 'inner_lr'?"),
        ("fmtl.inner_lr=1", "did you mean 'ftml'?"),
        ("revael=5", "did you mean 'reveal'?"),
        ("network.hiden=5", "did you mean 'hidden'?"),
        ("reveal=many", 'reveal is a number, now 4; got "many"'),
        ("ftml.inner_lr=-1", "inner_lr must be a finite number of at least 0"),
        ("ftml.seed=1", "seed is an option of the run; use --first-seed and --seeds"),
        ("reveals=5", "its first task has 8 datapoints, but 5 reveals of 4 need 20"),
        ("stream.noise=-1", "noise and seed must not be negative"),
        ("order=colour", "order must be one of"),
        ("reveal", "write NAME=VALUE"),
    ],
)
def test_bad_settings(file, status, tmp_path, setting, message):
    code, _, error = status("run", file, "--set", setting, "--out", tmp_path / "run")
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
    assert not (tmp_path / "run").exists()


def test_settings_reach_everything(file, status, tmp_path):
    sets = ["reveal=2", "stream.tasks=1", "network.hidden=4", "ftml.inner_steps=1", "all.meta_lr=0.5", "noise=0.1"]
    arguments = [part for text in sets for part in ("--set", text)]
    assert status("run", file, "--seeds", 1, "--out", tmp_path / "run", *arguments)[0] == 0
    config = json.loads((tmp_path / "run" / "config.json").read_bytes())
    settings = config["settings"]
    assert (settings["reveal"], settings["tasks"], config["panels"], config["set"]) == (2, 1, [2, 4], sets)
    assert settings["stream"]["options"] == {"tasks": 1, "noise": 0.1}
    assert settings["network"]["options"] == {"hidden": 4}
    assert settings["learners"]["ftml"]["options"]["inner_steps"] == 1
    assert [settings["learners"][name]["options"].get("meta_lr") for name in ("ftml", "toe", "mean")] == [
        0.5,
        0.5,
        None,
    ]


def test_new_writes_an_experiment_that_is_not_overwritten(status, tmp_path):
    code, out, _ = status("new", tmp_path / "plant")
    assert code == 0
    path = out.splitlines()[-1]
    assert status("new", tmp_path / "plant")[0] == 2
    assert status("list", path)[0] == 0
    small = ("--tasks", 1, "--seeds", 1, "--set", "meta_steps=1", "--out", tmp_path / "run")
    assert status("run", path, *small)[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.y = torch.zeros(0, 1)", "raise KeyError('no such key')", "mine.py:13: KeyError: 'no such key'"),
        ("return [lambda x:", "return [lambda x: x @ x +", "mine.py:19: RuntimeError"),
        ("return ml.streams.Sinus", "return lambda: ml.streams.Sinus", "a stream is a sequence of tasks"),
    ],
)
def test_errors_of_a_file_during_a_run_name_the_line_and_lose_nothing(file, status, tmp_path, old, new, message):
    arguments = ("--methods", "toe,mean", "--seeds", 1, "--out", tmp_path / "run")
    file.write_text(FILE.replace(old, new))
    code, _, error = status("run", file, *arguments)
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
    if "method" in error:
        assert "method 'mean' fails in round 0" in error
        assert {r["method"] for r in read_records(tmp_path / "run")} == {"toe"}


def test_a_hook_that_is_wrong_is_named_with_its_line(file, status, tmp_path):
    hook = (
        "class Wrong(ml.FTML):\n    def task_gradient(self, params, support, query):\n"
        "        loss = self.loss_fn(params, query).detach()\n"
        "        return loss, dict(zip(params, torch.autograd.grad(loss, list(params.values()))))\n\nexperiment ="
    )
    file.write_text(FILE.replace("experiment =", hook).replace('"mean": ml', '"wrong": Wrong, "mean": ml'))
    code, _, error = status("run", file, "--methods", "wrong", "--seeds", 1, "--out", tmp_path / "run")
    assert (code, error.count("\n")) == (2, 1)
    assert "Wrong.task_gradient (" in error
    assert "mine.py:22) fails: element 0 of tensors does not require grad" in error
    assert "compute gradients with torch.func.grad" in error
