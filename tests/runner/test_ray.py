"""Grids on Ray: cells give the bytes of local runs, also when a node dies while they run."""

import contextlib
import time

import pytest
import tiny

from metaleader.runner import RunOptions, run_experiment
from metaleader.runner import workers as module
from metaleader.runner.cell import Cell
from metaleader.runner.grid import Workers, run_grid

FILE = """
import time
import torch
import metaleader as ml

class Slow(ml.TOE):
    def begin(self, *arguments, **options):
        time.sleep(0.2)
        super().begin(*arguments, **options)

experiment = ml.Experiment(
    stream=lambda seed: ml.streams.SinusoidStream(tasks=12, train=8, test=5, seed=seed),
    network=lambda: ml.models.mlp(1, 1, [8]), loss=ml.losses.squared_error, methods={"slow": Slow},
    reveal=4, reveals=2, meta_steps=2, steps=(2, 1), threads=1,
)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def cluster():
    """Three nodes with one CPU each; starting them takes most of a minute."""
    ray = pytest.importorskip("ray.cluster_utils")
    small = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = ray.Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    nodes = [cluster.add_node(**small) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster, nodes
    cluster.shutdown()


@pytest.mark.torture
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_cells_survive_the_death_of_a_node(cluster, file, tmp_path, monkeypatch):
    cluster, nodes = cluster
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    folder, killed = tmp_path / "grid", []
    original = module.play_on_ray

    def killing(*arguments):
        with contextlib.closing(original(*arguments)) as events:
            for event in events:
                if not killed and len(list(folder.glob("*/checkpoint/slow.safetensors"))) == 3:
                    killed.append(time.monotonic())
                    cluster.remove_node(nodes[0], allow_graceful=False)
                yield event

    monkeypatch.setattr("metaleader.runner.grid.play_on_ray", killing)
    options = RunOptions(str(file), seeds=2, set=("slow.meta_lr=0.01,0.02,0.03",))
    assert run_grid(options, Workers(on="ray"), folder) == 0
    assert killed
    logs = [path.read_text() for path in sorted((folder / "logs").iterdir())]
    assert sum("from round" in log for log in logs) == 1  # the cell of the node that died was continued
    for lr in ("0.01", "0.02", "0.03"):
        run_experiment(RunOptions(str(file), seeds=2, set=(f"slow.meta_lr={lr}",)), tmp_path / lr)
        assert tiny.results(folder / f"slow.meta_lr={lr}") == tiny.results(tmp_path / lr)


@pytest.mark.torture
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_what_no_node_has_is_refused(cluster, file, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster[0].address)
    options = RunOptions(str(file), seeds=1)
    with pytest.raises(ValueError, match=r"no node of the Ray cluster has 1 CPUs and 1 GPUs for all"):
        run_grid(options, Workers(on="ray", gpus=1), tmp_path / "grid")


def test_the_resources_of_a_cell(tmp_path):
    node = {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}}
    dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}

    def resources(device, gpus, nodes=(node, dead), threads=4):
        return module._resources(Cell("all", tmp_path, RunOptions(device=device), threads, 1), gpus, nodes)

    assert resources("cuda", None) == resources("auto", None) == {"num_cpus": 4, "num_gpus": 1}
    assert resources("cpu", None) == {"num_cpus": 4, "num_gpus": 0}
    assert resources("auto", 0.25) == {"num_cpus": 4, "num_gpus": 0.25}
    assert resources("auto", None, [{"Alive": True, "Resources": {"CPU": 4.0}}]) == {"num_cpus": 4, "num_gpus": 0}
    with pytest.raises(ValueError, match="they have 4 CPUs, 2 GPUs; change --set threads=1"):
        resources("cpu", None, threads=8)
