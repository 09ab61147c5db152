"""Tests of the benchmark of networks: every implementation against the loop in float64, and the table."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metaleader.bench import report
from metaleader.bench.errors import distance
from metaleader.bench.networks import cell, table
from metaleader.bench.networks.cases import (
    CASES,
    Case,
    WrittenOutGRU,
    exact_gradient,
    load_inputs,
    make_inputs,
    one_task,
    save_inputs,
)
from metaleader.bench.networks.contenders import LoopPeer, Ours, TorchFunc, build
from metaleader.bench.networks.process import CellProcess, Setting, Times

CPU = torch.device("cpu")


def tiny(name: str, steps: int = 1) -> Case:
    return replace(CASES[name], tasks=2, cpu_tasks=None, support=3, query=3, inner_steps=steps)


# The networks.


def test_the_written_out_gru_is_the_gru() -> None:
    torch.manual_seed(0)
    gru = torch.nn.GRU(3, 5, batch_first=True)
    written = WrittenOutGRU(3, 5)
    written.load_state_dict(gru.state_dict())
    x = torch.randn(4, 6, 3)
    torch.testing.assert_close(written(x)[0], gru(x)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_inputs_survive_a_file(name: str, tmp_path: Path) -> None:
    case = replace(tiny(name, steps=0), support=2, query=2)
    inputs = make_inputs(case, CPU, exact_tasks=1)
    save_inputs(inputs, tmp_path / "inputs")
    read = load_inputs(tmp_path / "inputs")
    assert read.params.keys() == inputs.params.keys() == read.exact.keys()
    for one, other in zip((*inputs.support, *inputs.query), (*read.support, *read.query), strict=True):
        assert torch.equal(one, other)
    assert next(iter(read.exact.values())).dtype == torch.float64
    output = case.model()(inputs.support.x[0])
    assert output.shape == (2, case.outputs)


# The implementations.


def compare_with_jax(*pairs: str) -> dict[str, dict[str, float]]:
    pytest.importorskip("jaxlib", reason="an optional dependency")
    script = Path(__file__).with_name("jax_comparison.py")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), *pairs], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_jax(*pairs: str) -> None:
    found = compare_with_jax(*pairs)
    updates = found.pop("updates")
    assert len(found) == len(pairs)
    for values in found.values():
        assert values["distance"] < 1e-4
        assert 1e-9 < values["error"] < 1e-4
    assert updates["moved"] > 1e-3
    assert updates["distance"] < 1e-3 * updates["moved"]


@pytest.mark.torture
def test_jax_does_the_same() -> None:
    """Gradients, and parameters after updates by Adam."""
    check_jax("mlp:im2col", "gru:im2col", "digits:im2col")


@pytest.mark.torture
def test_jax_does_the_same_for_larger_networks() -> None:
    names = ("resnet", "vit", "conv")
    check_jax("digits:grouped", "transformer:im2col", *(f"{n}:{c}" for n in names for c in ("im2col", "grouped")))


# Optional dependencies
MORE = [pytest.param(name, marks=pytest.mark.torture) for name in ("higher", "torchopt")]


@pytest.mark.parametrize("name", ["ours-eager", "torch-func-eager", *MORE])
def test_the_gradient_of_each_task(name: str) -> None:
    """`measure_error` compares one task at a time with autograd through torch's layers in float64."""
    if name in ("higher", "torchopt"):
        pytest.importorskip(name, reason="an optional dependency")
    case = tiny("mlp", steps=3)
    inputs = make_inputs(case, CPU)
    contender = build(name, "mlp", case, inputs, CPU)
    assert isinstance(contender, Ours | TorchFunc | LoopPeer)
    assert 1e-9 < cell.measure_error(contender, inputs, case.tasks) < 1e-5
    together = contender.gradient(inputs.support, inputs.query)
    assert distance(together, exact_gradient(case, inputs.params, inputs.support, inputs.query)) < 1e-4
    contender.update(2)
    assert contender.device_memory() is None
    if name == "ours-eager":
        assert contender.notes() == {"ran": "eager"}


def test_a_wrong_gradient_has_an_error() -> None:
    case = tiny("mlp")
    inputs = make_inputs(case, CPU)
    wrong = inputs._replace(exact={key: 1.01 * value for key, value in inputs.exact.items()})
    contender = build("torch-func-eager", "mlp", case, inputs, CPU)
    assert cell.measure_error(contender, wrong, case.tasks) == pytest.approx(0.0099, rel=1e-2)


def test_the_engine_that_falls_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny("mlp")
    contender = Ours("compiled", case, make_inputs(case, CPU), CPU)

    def fails(*inputs: Any) -> Any:
        raise RuntimeError("cannot compile this")

    monkeypatch.setattr(contender.engine._programs, "_started", fails)
    contender.update(1)
    notes = contender.notes()
    assert notes["ran"] == "eager"
    assert notes["fell_back"]
    assert "cannot compile this" in notes["log"][0]


def test_one_task_repeated() -> None:
    batches = one_task((torch.arange(6).view(3, 2),), 1, 4)
    assert batches[0].tolist() == [[2, 3]] * 4


# The table.


def test_a_table_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Real processes: one that answers, one whose package is missing."""
    (tmp_path / "higher.py").write_text("raise ImportError('no higher here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "results"
    settings = {"networks": "mlp", "modes": "eager", "peers": ("higher",), "out": str(out), "jobs": 2}
    result = report.run_bench(["networks"], "cpu", **settings)
    entry = result["networks"]["mlp"]
    assert (entry["tasks"], entry["support"], entry["parameters"]) == (25, 10, 1761)
    ours = entry["cells"]["ours-eager"]
    assert ours["ran"] == "eager"
    assert ours["quartiles_ms"][0] <= ours["update_ms"] <= ours["quartiles_ms"][1]
    assert ours["cpu_ms"] > 0
    assert 0 < ours["first_update_warm_s"] < ours["from_start_warm_s"]
    assert 0 < ours["first_update_warm_cpu_s"] < 60
    assert 1e-9 < ours["error_vs_float64"] < 1e-5
    assert ours["peak_mib"] < 1000
    assert "not installed" in entry["cells"]["higher"]["failed"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line.get("cell") for line in lines} == {"ours-eager", "higher", None}
    assert lines[0]["torch"] == torch.__version__
    printed = capsys.readouterr().out.strip().splitlines()
    assert json.loads(printed[-1])["networks"] == result["networks"]
    assert any("not installed" in line for line in printed[:-1])
    assert not CellProcess.alive


def test_a_cell_over_its_limit_is_killed(tmp_path: Path) -> None:
    save_inputs(make_inputs(CASES["mlp"], CPU, exact_tasks=1), tmp_path / "mlp.safetensors")
    late = CellProcess(Setting("cpu", 1, tmp_path, limit=0.0, jobs=1), "mlp", "ours-eager", "warm")
    try:
        assert not late.start()
        assert late.result["failed"] == "first update: more than 0 s"
        with pytest.raises(ProcessLookupError):
            os.kill(late._process.pid, 0)
    finally:
        late.close()


def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    dying = CellProcess(Setting("cpu", 1, tmp_path, limit=5.0, jobs=1), "mlp", "ours-eager", "cold")
    os.kill(dying._process.pid, signal.SIGKILL)
    started = time.monotonic()
    assert not dying.start()
    assert time.monotonic() - started < 30
    assert "the process ended (-9)" in dying.result["failed"]


def test_a_cell_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent leaves a cell that waits for commands, with a pipe that stays open, and dies."""
    save_inputs(make_inputs(CASES["mlp"], CPU, exact_tasks=1), tmp_path / "mlp.safetensors")
    code = f"""
import os, pathlib, subprocess, sys
from metaleader.bench.networks import process
popen = subprocess.Popen
hold = os.open(r"{tmp_path}/fifo", os.O_RDWR)
process.subprocess.Popen = lambda *args, **options: popen(*args, **options | dict(stdin=hold))
cell = process.CellProcess(process.Setting("cpu", 1, pathlib.Path(r"{tmp_path}"), 60, 1), "mlp", "ours-eager", "warm")
assert cell.start()
print(cell._process.pid, flush=True)
os._exit(0)
"""
    os.mkfifo(tmp_path / "fifo")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and Path(f"/proc/{pid}/cmdline").is_file():
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            break  # ended, and not yet waited for
        time.sleep(0.2)
    else:
        assert not Path(f"/proc/{pid}/cmdline").is_file()


class FakeProcess:
    """A process whose update takes ten milliseconds times the number of its letters."""

    order: list[str] = []  # noqa: RUF012

    def __init__(self, setting: Setting, network: str, cell: str, phase: str) -> None:
        self.cell, self.phase, self.result = cell, phase, {}

    def start(self) -> bool:
        self.order.append(f"{self.phase} {self.cell}")
        if self.cell == "jax-grouped":
            self.result["failed"] = "first update: more than 40 s"
            return False
        self.result[f"first_update_{self.phase}_s"] = 1.0
        return True

    def times(self, seconds: float) -> Times | None:
        self.order.append(self.cell)
        if self.cell == "higher":
            return Times([2000.0], 1.0, [])
        if self.cell == "torchopt":
            self.result["failed"] = "timing: it ended"
            return None
        return Times([10.0 * len(self.cell)] * 3, 1.0, [1.0] if self.cell.startswith("ours") else [])

    def finish(self) -> None:
        self.result["peak_mib"] = 3.0

    def close(self) -> None:
        pass


def test_cells_take_turns_and_are_compared_with_the_fastest_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CellProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "order", [])
    cells = ["ours-eager", "ours-compiled", *table.PEERS["jax"], "torchopt"]
    reported: list[tuple[str, str]] = []
    found = table.measure_networks(
        {"digits": tiny("digits")}, cells, CPU, 40, rounds=2, report=lambda n, c, values: reported.append((n, c))
    )
    by_cell = found["digits"]["cells"]
    compiled = ["ours-compiled", "jax-loop", "jax-scan", "jax-grouped"]
    assert FakeProcess.order[:4] == [f"cold {name}" for name in compiled]
    assert FakeProcess.order[4:9] == [f"warm {c}" for c in cells if c != "jax-grouped"]
    turn = ["ours-eager", "ours-compiled", "jax-loop", "jax-scan"]
    assert FakeProcess.order[9:] == [*turn, "torchopt", *turn]
    assert by_cell["ours-compiled"]["ratio_to_jax"] == pytest.approx(len("ours-compiled") / len("jax-loop"))
    assert by_cell["ours-eager"]["update_ms"] == 100
    assert by_cell["torchopt"]["failed"] == "timing: it ended"
    assert "update_ms" not in by_cell["jax-grouped"]
    assert reported[:4] == [("digits", name) for name in compiled]
    assert len(reported) == 4 + len(cells)


def test_slow_cells_take_part_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CellProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "order", [])
    table.measure_networks({"mlp": tiny("mlp")}, ["ours-eager", "higher"], CPU, 40, rounds=5)
    assert FakeProcess.order.count("ours-eager") == 5
    assert FakeProcess.order.count("higher") == 3


def test_networks_without_convolutions_have_no_grouped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CellProcess", FakeProcess)
    found = table.measure_networks({"mlp": tiny("mlp")}, ["jax-loop", "jax-grouped"], CPU, 40, rounds=1)
    assert list(found["mlp"]["cells"]) == ["jax-loop"]


def test_an_error_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    running = type("Running", (), {"close": lambda self: closed.append(self)})()
    monkeypatch.setattr(CellProcess, "alive", {running})

    def fails(value: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table._in_parallel(1, fails, [(1,), (2,)])
    assert closed == [running]


def test_networks_of_a_device() -> None:
    assert "conv" not in table.choose_networks(None, CPU)
    assert "conv" in table.choose_networks(None, torch.device("cuda"))
    assert list(table.choose_networks("gru, conv", CPU)) == ["gru", "conv"]
    assert CASES["digits"].on(CPU).tasks == 8
    assert CASES["digits"].on(torch.device("cuda")).tasks == 25
    assert table.choose_cells("eager", ["torch-func"], CPU) == ["ours-eager", "torch-func-eager", "torch-func-compiled"]
    assert table.choose_cells("eager", ["jax-scan", "higher"], CPU) == ["ours-eager", "jax-scan", "higher"]
    assert "ours-captured" not in table.choose_cells(None, [], CPU)


def test_numbers() -> None:
    assert [table._number(value) for value in (None, 1234.5, 12.345, 0.012345)] == ["", "1,234", "12.3", "0.0123"]
    assert math.isclose(float(table._number(9.0)), 9)
