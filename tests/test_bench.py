"""The benchmark at tiny sizes: its line of JSON, its loop as an oracle, and what it says of missing peers."""

import functools
import json
import math
import subprocess
import sys
from typing import Any

import oracles
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import metaleader as ml
from metaleader import bench
from metaleader.cli.bench import bench as command
from metaleader.engine import Engine

CPU = torch.device("cpu")
TINY = bench.Work(functools.partial(ml.models.conv_net, 3, 8, 2, 4, 2), (2, 8, 8), 3, 3, 3, 2, 4)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiling: the engine's tests are elsewhere."""
    monkeypatch.setattr(bench, "fast_mode", lambda device: "eager")


def first(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf[0], tree)


def tiny_inputs(work: bench.Work = TINY) -> tuple[list[ml.Learner], Any]:
    learners = work.learners(Engine("eager"), CPU, 3)
    return learners, bench._inputs(learners, 0)


def test_the_loop_is_the_meta_gradient_in_float64() -> None:
    learners, inputs = tiny_inputs()
    params, support, query = first(bench._doubled(inputs))
    found = bench.loop_gradient(TINY, params, support, query)
    loss_fn = oracles.module_loss(TINY.model(), lambda prediction, y: TINY.loss(prediction, y).mean())
    _, expected, _ = oracles.unrolled(loss_fn, params, support, query, bench.INNER_LR, 2)
    assert bench.distance(found, expected) < 1e-12
    doubled: list[Any] = [*bench._doubled(inputs), None]
    _, fast = learners[0]._engine.gradient(learners[0]._objective, *doubled)
    assert bench.distance(first(fast), expected) < 1e-12


def test_the_learners_update_is_of_the_measured_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed as a gradient is what the first update takes."""
    learners, (params, support, query) = tiny_inputs()
    seen: list[Any] = []
    gradient = learners[0]._engine.gradient

    def watched(*inputs: Any) -> Any:
        seen.append(tree_map(torch.clone, inputs[1:4]))
        return gradient(*inputs)

    monkeypatch.setattr(learners[0]._engine, "gradient", watched)
    learners[0].update(1)
    for one, other in zip(tree_leaves(seen[0]), [*params.values(), *support, *query], strict=True):
        assert torch.equal(one, other)


def test_distance() -> None:
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    assert bench.distance(exact, exact) == 0
    assert bench.distance({"a": torch.tensor([3.0, 5.0]), "b": torch.tensor(4.0)}, exact) == pytest.approx(1)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seeds", [1, 2])
def test_an_update(seeds: int) -> None:
    found = bench.measure_update(bench.replace(TINY, seeds=seeds), CPU, loop=seeds == 1, rounds=2, draws=3)
    assert found["tasks"] == 4 * seeds
    assert found["compiled_ms"] is None
    assert found["fast_path"].startswith("eager")
    assert 0 < found["eager_ms"] < 60_000
    assert 0 < found["update_ms"] < 60_000
    assert 1e-9 < found["error_vs_float64"] <= found["error_vs_float64_max"] < 0.2
    if seeds == 1:
        assert 0 < found["loop_ms"] < 60_000
        assert found["times_faster_eager"] == pytest.approx(found["loop_ms"] / found["eager_ms"])


@pytest.mark.usefixtures("eager")
def test_plain_and_regression() -> None:
    plain = bench.measure_update(bench.replace(TINY, support=0, inner_steps=0), CPU, rounds=1, draws=1)
    assert plain["inner_steps"] == 0
    assert plain["error_vs_float64"] < 1e-3
    pose = bench.Work(ml.models.pose_net, (3, 16, 16), 4, 2, 2, 1, 2, regression=True)
    assert bench.measure_update(pose, CPU, rounds=1, draws=1)["eager_ms"] > 0


def test_buffer() -> None:
    found = bench.measure_buffer(CPU, 2, 8, 20, rounds=1)
    assert found["tasks"] == [2, 8]
    assert 1 <= found["bytes_of_data"] <= 1.26
    assert 0.1 < found["draw_ratio"] < 10
    assert 0 < found["draw_few_ms"] < found["update_few_ms"]


@pytest.mark.usefixtures("eager")
def test_stream() -> None:
    found = bench.measure_stream(TINY, CPU, tasks=2, datapoints=40, meta_steps=1)
    assert found["reveals"] == 4
    assert found["total_s"] == pytest.approx(found["updating_s"] + found["measuring_s"])
    assert 0 < found["measuring_part"] < 1


def test_what_needs_cuda_says_so() -> None:
    assert "CUDA" in bench.measure_tf32(TINY, CPU)["skipped"]
    assert "CUDA" in bench.measure_memory(TINY, CPU)["skipped"]


def test_peers_are_measured_or_named_as_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a peer is installed, its gradient must be the loop's."""

    def broken(*inputs: Any) -> Any:
        raise RuntimeError("does not run\nhere")

    monkeypatch.setitem(bench._PEERS, "json", broken)
    found = bench.measure_peers(TINY, CPU, first(tiny_inputs()[1]), ["higher", "torchopt", "no_such_peer", "json"], 1)
    assert found["no_such_peer"]["skipped"].startswith("not installed (No module named 'no_such_peer')")
    assert found["json"] == {"skipped": "RuntimeError: does not run"}
    for name in ("higher", "torchopt"):
        assert "not installed" in found[name].get("skipped", "") or found[name]["distance_to_loop"] < 1e-4


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"tasks": 25, "eager_ms": 900.0, "compiled_ms": None, "deep": {"list": [1.5, 2.0]}}
    monkeypatch.setitem(bench.MEASUREMENTS, "meta-step", lambda device, peers: numbers | {"peers": list(peers)})
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    assert command("meta-step, memory", device="cpu", peers=True) == 0
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["device"].startswith("cpu")
    assert result["torch"] == torch.__version__
    assert result["meta_step"] == numbers | {"peers": ["higher", "torchopt"]}
    assert "skipped" in result["memory"]
    assert any("deep.list" in line and "1.5 / 2" in line for line in lines[:-1])


def test_unknown_measurement() -> None:
    with pytest.raises(ValueError, match="cannot measure speed; there are meta-step, seeds"):
        command("speed")
    with pytest.raises(ValueError, match="cannot measure nothing"):
        command(" , ")


def test_first_update_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of `measure_start` runs; with a failing process the reason is given."""
    asked = []

    def run(arguments: list[str], **options: Any) -> Any:
        asked.append((arguments, options["env"]["TORCHINDUCTOR_CACHE_DIR"]))
        return subprocess.CompletedProcess(arguments, 0, f"compiled {math.inf}\n", "")

    monkeypatch.setattr(bench.subprocess, "run", run)
    found = bench.measure_start(CPU)
    assert found == {"cold_s": math.inf, "warm_s": math.inf, "fast_path": "compiled"}
    assert asked[0] == asked[1], "warm must use the cache that cold has filled"
    assert asked[0][0][0] == sys.executable
    monkeypatch.setattr(bench.subprocess, "run", lambda a, **o: subprocess.CompletedProcess(a, 1, "", "x\nno luck\n"))
    assert bench.measure_start(CPU) == {"skipped": "the process failed: no luck"}


def test_first_update(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], eager: None) -> None:
    monkeypatch.setattr(bench, "RAINBOW", TINY)
    bench.first_update("cpu")
    mode, finished = capsys.readouterr().out.split()
    assert mode == "eager"
    assert float(finished) > 1e9


def test_without_tyro() -> None:
    """`python -m metaleader.bench` is for machines that have torch and little else."""
    code = (
        "import sys; sys.modules['tyro'] = None; import runpy; sys.argv = ['bench', '--help'];"
        "runpy.run_module('metaleader.bench', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--what" in done.stdout
