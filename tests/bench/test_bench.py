"""Tests of the benchmark at tiny sizes: its loop and errors against oracles, its times and its output."""

import functools
import json
import math
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import engine_gradient
from torch.utils._pytree import tree_map

import metaleader as ml
from metaleader import evaluate
from metaleader.bench import measures, peers, report, update
from metaleader.bench.errors import distance, doubled, exact_gradient, measure_errors, one_task_each
from metaleader.bench.timing import median_ms, seconds
from metaleader.bench.work import INNER_LR, RAINBOW, Work
from metaleader.cli.bench import bench as command
from metaleader.engine.conv import gradient
from metaleader.engine.conv import torch_ops as passes
from metaleader.engine.engine import Engine
from metaleader.engine.objective import Objective
from metaleader.gradient.meta import Inner
from metaleader.nets.functional import Network

CPU = torch.device("cpu")
TINY = Work(functools.partial(ml.models.conv_net, 3, 8, 2, 4, 2), (2, 8, 8), 3, 3, 3, 2, 4)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run compiled functions eagerly: compiling a chain takes half a minute, and no test here depends on it."""
    for module in (gradient, passes):
        monkeypatch.setattr(module, "compile_whole", lambda function: function)


def first(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf[0], tree)


def objective_of(work: Work) -> Objective:
    return Objective(Network(work.model(), work.loss), Inner(INNER_LR, work.inner_steps))


def unrolled(work: Work, params: Any, support: Any, query: Any) -> Any:
    loss_fn = oracles.module_loss(work.model(), lambda prediction, y: work.loss(prediction, y).mean())
    return oracles.unrolled(loss_fn, params, support, query, INNER_LR, work.inner_steps)[1]


# Gradients and their errors.


def test_the_loop_is_the_meta_gradient_in_float64() -> None:
    inputs = doubled(TINY.inputs(CPU))
    expected = unrolled(TINY, *first(inputs))
    assert distance(peers.loop_gradient(TINY, *first(inputs)), expected) < 1e-12
    assert distance(first(exact_gradient(objective_of(TINY), inputs)), expected) < 1e-12
    fast = engine_gradient(Engine("eager"), objective_of(TINY), *inputs)[1]
    assert distance(first(fast), expected) < 1e-12


def test_the_gradient_of_each_task_alone() -> None:
    """One call of the engine, with two learners, gives the gradient of each task, in order."""
    work = replace(TINY, seeds=2)
    inputs = doubled(work.inputs(CPU))
    found = engine_gradient(Engine("eager"), objective_of(work), *one_task_each(inputs))[1]
    for r in range(2):
        params, support, query = tree_map(lambda leaf: leaf[r], inputs)  # noqa: B023
        for i in range(4):
            own = tree_map(lambda leaf: leaf[i : i + 1], (support, query))  # noqa: B023
            expected = unrolled(work, params, *own)
            assert distance({name: value[4 * r + i] for name, value in found.items()}, expected) < 1e-12


class Wrong(Engine):
    """An engine whose gradient of the first learner is too large by one per cent."""

    def gradient(self, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        losses_and_norms, found = super().gradient(*inputs)
        found[0] *= 1.01
        return losses_and_norms, found


def test_errors_are_of_single_tasks_and_of_their_mean() -> None:
    """One wrong task of four gives the largest error and does not change the median; the mean gradient is wrong."""
    good = measure_errors(TINY, Engine("eager"), objective_of(TINY), CPU, draws=3)
    assert 1e-9 < good["error_vs_float64"] <= good["error_vs_float64_max"] < 1e-5
    assert 1e-9 < good["error_vs_float64_mean_gradient"] <= good["error_vs_float64_mean_gradient_max"] < 1e-5
    assert good["error_above_1e-4"] == 0
    bad = measure_errors(TINY, Wrong("eager"), objective_of(TINY), CPU, draws=3)
    assert 1e-9 < bad["error_vs_float64"] < 1e-5
    assert bad["error_vs_float64_max"] == pytest.approx(0.01, rel=1e-3)
    assert bad["error_vs_float64_mean_gradient"] == pytest.approx(0.01, rel=1e-3)
    assert bad["error_above_1e-4"] == 0.25


def test_distance() -> None:
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    assert distance(exact, exact) == 0
    assert distance({"a": torch.tensor([3.0, 5.0]), "b": torch.tensor(4.0)}, exact) == pytest.approx(1)


def test_draws_differ() -> None:
    one, other = TINY.inputs(CPU, 0), TINY.inputs(CPU, 1)
    assert not torch.equal(one[1].x, other[1].x)
    assert distance(one[0], other[0]) > 0.1
    assert one[1].x.shape == (1, 4, 3, 2, 8, 8)
    assert one[2].y.shape == (1, 4, 3)


# Times.


def test_everything_takes_turns() -> None:
    calls = []
    found = median_ms({name: functools.partial(calls.append, name) for name in "ab"}, CPU, rounds=1)
    assert set(found) == {"a", "b"}
    turns = "".join(calls)
    assert turns.startswith("aba")
    assert turns.lstrip("a").lstrip("b").strip("a").strip("b") == ""


def test_a_chain_eager_and_compiled() -> None:
    found = update.measure_update(TINY, CPU, compare=True, rounds=2, draws=1)
    assert found["programs"] == {"eager": "eager chain", "compiled": "compiled chain"}
    assert found["eager_ms"] == found["eager_chain_ms"]
    assert found["compiled_ms"] == found["compiled_chain_ms"]
    for name in ("eager_chain", "compiled_chain", "generic_eager", "update"):
        faster = found["loop_ms"] / found[f"{name}_ms"]
        assert found["times_faster"][name] == pytest.approx(faster)
        assert 0 < faster < 1000
    assert found["tasks"] == 4
    assert 1e-9 < found["error_vs_float64"] < 1e-5


def test_a_network_that_is_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Compiler(Engine):
        """An engine whose first gradient falls back to eager mode, as if the network did not compile."""

        def gradient(self, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            asked.append(self.mode)
            self.mode = "eager"
            return super().gradient(*inputs)

    monkeypatch.setattr(update, "Engine", Compiler)
    found = update.measure_update(TINY.no_chain(), CPU, rounds=1, draws=0)
    assert asked[0] == "compiled"
    assert found["programs"] == {"eager": "generic eager", "compiled": "none: it does not compile"}
    assert found["eager_ms"] == found["generic_eager_ms"] > 0
    assert found["compiled_ms"] is None
    assert "error_vs_float64" not in found


def test_programs() -> None:
    chain, other = (Network(work.model(), work.loss) for work in (RAINBOW, RAINBOW.no_chain()))
    assert update.program(chain, "captured") == "captured chain"
    assert update.program(other, "captured") == "generic captured"
    assert update.program(other, "compiled") == "generic compiled"
    assert update.fast_mode(torch.device("cuda")) == "captured"
    assert update.fast_mode(CPU) == "compiled"


def test_plain_seeds_and_regression() -> None:
    plain = update.measure_update(replace(TINY, support=0, inner_steps=0), CPU, rounds=1, draws=1)
    assert plain["inner_steps"] == 0
    assert plain["error_vs_float64"] < 1e-5
    assert 0 < plain["update_ms"] < 60_000
    # With two or three rows, batch norm of the dense layers leaves little of the gradient but rounding errors.
    pose = Work(ml.models.pose_net, (3, 16, 16), 4, 6, 6, 1, 2, 2, regression=True)
    found = update.measure_update(pose, CPU, rounds=1, draws=1)
    assert found["tasks"] == 4
    assert found["eager_chain_ms"] > 0
    assert found["error_vs_float64"] < 1e-3


def test_a_chain_is_faster_than_the_loop() -> None:
    """On 25 small tasks the chain takes about an eighth of the loop's time; a third would be a regression."""
    work = replace(TINY, inner_steps=5, tasks=25)
    objective = objective_of(work)
    assert update.program(objective.network, "eager") == "eager chain"
    inputs = work.inputs(CPU)
    chain = functools.partial(engine_gradient, Engine("eager"), objective, *inputs)
    loop = functools.partial(peers.loop_gradient, work, *first(inputs))
    chain()
    ratios = [seconds(loop, CPU) / seconds(chain, CPU) for _ in range(7)]
    assert statistics.median(ratios) > 3, ratios


# Other measurements.


def test_buffer() -> None:
    found = measures.measure_buffer(CPU, 2, 8, 20, rounds=1)
    assert found["tasks"] == [2, 8]
    assert 1 <= found["bytes_of_data"] <= 1.26
    assert 0.1 < found["draw_ratio"] < 10
    assert 0 < found["draw_few_ms"] < found["update_few_ms"]


def test_stream() -> None:
    """One additional first task, in which programs are compiled, is not among the timed tasks."""
    found = measures.measure_stream(TINY, CPU, tasks=2, datapoints=60, meta_steps=1)
    assert found["tasks"] == 2
    assert found["reveals"] == 6
    assert found["program"] == "compiled chain"
    assert 0 < found["first_reveal_s"] < found["first_task_s"]
    assert found["updating_s"] + found["measuring_s"] <= found["total_s"]
    assert found["updating_s"] + found["measuring_s"] > 0.8 * found["total_s"]
    assert found["measuring_part"] == pytest.approx(found["measuring_s"] / found["total_s"])


def test_the_stream_knows_measuring_from_updating(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances only during measuring, all time is attributed to measuring."""
    now = [0.0]
    monkeypatch.setattr(measures.time, "perf_counter", lambda: now[0])
    original = evaluate.measure_together

    def slow(*inputs: Any) -> Any:
        now[0] += 2.0
        return original(*inputs)

    monkeypatch.setattr(evaluate, "measure_together", slow)
    found = measures.measure_stream(TINY, CPU, tasks=2, datapoints=40, meta_steps=1)
    assert found["first_reveal_s"] == 0
    assert found["first_task_s"] == 4
    assert found["total_s"] == found["measuring_s"] == 8
    assert found["measuring_part"] == 1


def test_what_needs_cuda_says_so() -> None:
    assert "CUDA" in measures.measure_tf32(TINY, CPU)["skipped"]
    assert "CUDA" in measures.measure_memory(TINY, CPU)["skipped"]


def test_peers_are_measured_or_named_as_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an installed peer must equal the loop's; the loop itself serves as one peer."""

    def broken(*inputs: Any) -> Any:
        raise RuntimeError("does not run\nhere")

    monkeypatch.setitem(peers.PEERS, "json", broken)
    monkeypatch.setitem(peers.PEERS, "no_such_peer", broken)
    monkeypatch.setitem(peers.PEERS, "torch", peers.loop_gradient)
    found = update.measure_update(TINY, CPU, peers=list(peers.PEERS), rounds=1, draws=0)["peers"]
    assert found["no_such_peer"]["skipped"].startswith("not installed (No module named 'no_such_peer')")
    assert found["json"] == {"skipped": "RuntimeError: does not run"}
    assert found["torch"]["distance_to_loop"] == 0
    assert 0 < found["torch"]["ms"] < 60_000
    for name in ("higher", "torchopt"):
        assert ("ms" in found[name]) != ("skipped" in found[name])
        assert "not installed" in found[name].get("skipped", "") or found[name]["distance_to_loop"] < 1e-4


def test_first_update_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes use the same cache, empty at first; if a process fails, the reason is reported."""
    asked = []

    def run(arguments: list[str], **options: Any) -> Any:
        cache = options["env"]["TORCHINDUCTOR_CACHE_DIR"]
        asked.append((arguments, cache, options["env"]["TRITON_CACHE_DIR"], len(list(Path(cache).iterdir()))))
        return subprocess.CompletedProcess(arguments, 0, f"captured chain {math.inf}\n", "")

    monkeypatch.setattr(measures.subprocess, "run", run)
    found = measures.measure_start(CPU)
    assert found == {"cold_s": math.inf, "warm_s": math.inf, "program": "captured chain"}
    assert asked[0] == asked[1], "the warm process must use the cache of the cold one"
    assert asked[0][0][0] == sys.executable
    assert asked[0][3] == 0
    failed = subprocess.CompletedProcess([], 1, "", "x\nno luck\n")
    monkeypatch.setattr(measures.subprocess, "run", lambda arguments, **options: failed)
    assert measures.measure_start(CPU) == {"skipped": "the process failed: no luck"}


def test_first_update(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measures, "RAINBOW", TINY)
    measures.first_update("cpu")
    *ran, finished = capsys.readouterr().out.split()
    assert ran == ["compiled", "chain"]
    assert float(finished) > 1e9


# The report.


def test_the_last_line_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    numbers = {"tasks": 25, "chain_ms": 640.0, "eager_ms": 640.0, "compiled_ms": None, "deep": {"list": [1.5, 2.0]}}
    monkeypatch.setitem(report.MEASUREMENTS, "meta-step", lambda device, settings: numbers | {"peers": settings.peers})
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    command("meta-step, memory", device="cpu", peers=("higher",), out=str(tmp_path / "results"))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    captured = capsys.readouterr()
    lines = captured.out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["device"].startswith("cpu")
    assert result["torch"] == torch.__version__
    assert result["meta_step"] == numbers | {"peers": ["higher"]}
    assert "skipped" in result["memory"]
    assert any("deep.list" in line and "1.5 / 2" in line for line in lines[:-1])
    assert any("chain_ms" in line and "640" in line for line in lines[:-1])
    assert not any("eager_ms" in line for line in lines[:-1]), "the table must show each program once"
    each = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert each[0]["meta_step"] == result["meta_step"]
    assert each[1]["memory"] == result["memory"]
    assert each[1]["device"] == result["device"]
    assert json.dumps({"memory": result["memory"]}) in captured.err


def test_what_was_measured_before_a_failure_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(device: torch.device, settings: report.Settings) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(report.MEASUREMENTS, "pose", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        report.run_bench(["memory", "pose"], "cpu", out=str(tmp_path / "results"))
    assert "skipped" in json.loads((tmp_path / "results").read_text())["memory"]
    assert "skipped" in capsys.readouterr().err


def test_unknown_measurement() -> None:
    with pytest.raises(ValueError, match="cannot measure speed; there are meta-step, networks, seeds"):
        command("speed")
    with pytest.raises(ValueError, match="cannot measure nothing"):
        command(" , ")


def test_peers_by_name() -> None:
    """A peer that no chosen measurement compares with is rejected; no names are all of them."""
    assert report.choose_peers(None, ["networks"]) == ()
    assert report.choose_peers([], ["meta-step"]) == ("higher", "torchopt")
    assert report.choose_peers(["jax, higher"], ["meta-step", "networks"]) == ("jax", "higher")
    with pytest.raises(ValueError, match="no peers jax of meta-step; there are higher, torchopt"):
        command(peers=("jax",))
    with pytest.raises(ValueError, match="only meta-step and networks have peers"):
        command("memory", peers=())


def test_settings_of_networks_are_used_or_rejected() -> None:
    with pytest.raises(ValueError, match="networks, limit concern the measurement networks"):
        command("memory", networks="mlp", limit=5)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"networks": "lstm"}, "unknown networks lstm; there are mlp, "),
        ({"modes": "fast"}, "unknown modes fast; there are eager, "),
        ({"modes": "captured"}, "need a CUDA device"),
        ({"limit": 0.0}, "limit must be a positive number of seconds, got 0.0"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            command("networks", device="cpu", **settings)


def test_a_place_for_results_that_cannot_be_written_is_known_before(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(report.MEASUREMENTS, "memory", None)
    for out in (tmp_path, tmp_path / "nowhere" / "results"):
        with pytest.raises(OSError, match=str(out)):
            report.run_bench(["memory"], "cpu", out=str(out))


def test_without_tyro() -> None:
    """`python -m metaleader.bench` runs without tyro."""
    code = (
        "import sys; sys.modules['tyro'] = None; import runpy; sys.argv = ['bench', '--help'];"
        "runpy.run_module('metaleader.bench', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--what" in done.stdout


def test_the_command_line_without_tyro(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from metaleader.bench.__main__ import main

    assert main(["--what", "tf32,memory", "--device", "cpu"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) >= {"tf32", "memory"}
