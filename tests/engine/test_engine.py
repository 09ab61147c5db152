"""The engine's modes agree with each other and with the slow loop; learners side by side with the same ones alone.

Most programs are compiled without generating code ("aot_eager"): dynamo, the batching and the derivatives are then the
same and a program takes seconds. A few tests go all the way through Inductor.
"""

import copy
import functools
import logging
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_map

import metaleader as ml
from metaleader.checks.trees import differences
from metaleader.engine import cache as cache_module
from metaleader.engine import compiled as compiled_module
from metaleader.engine import engine as engine_module
from metaleader.engine import whole as whole_module
from metaleader.engine.engine import Engine, Mode
from metaleader.engine.objective import Objective
from metaleader.gradient.meta import Inner
from metaleader.learners import update_together
from metaleader.learners.measure import measure_together
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, tensors_of

CPU = torch.device("cpu")
CLASSES, IMAGE = 3, (2, 8, 8)

# What torch's compiler itself warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning"),
]


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in pieces, without generating code."""
    compiler = functools.partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(compiled_module, "compile_whole", compiler)
    monkeypatch.setattr(whole_module, "MAX_OPERATIONS", 0)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record whole programs without generating code; returns their graphs."""
    graphs: list[Any] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(whole_module, "compile_graph", compile_graph)
    return graphs


@pytest.fixture(autouse=True)
def _forget_programs() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "metaleader")
    return caplog


def conv_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Something before it, so that the engine does not see a chain: those have tests of their own."""
    net = ml.models.conv_net(CLASSES, 8, IMAGE[0], filters=4, layers=2)
    return nn.Sequential(OrderedDict([("before", nn.Identity()), ("0", net)])).to(dtype)


def own_conv(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """A user's convolution, with bias, stride and padding unless told otherwise."""
    given: dict[str, Any] = {"kernel_size": (3, 2), "stride": (1, 2), "padding": (0, 1)}
    conv = nn.Conv2d(IMAGE[0], 4, **(given | options))
    return nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)).to(dtype)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), ml.models.mlp(128, CLASSES, (6,))).to(dtype)


def dropout_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def learner(
    engine: Engine, model: Callable[[], nn.Module] = conv_net, kind: Any = ml.FTML, seed: int = 0, **options: Any
) -> ml.Learner:
    """A learner that has seen three tasks of its own."""
    # The outer step size is one that float32 holds: torch reads it in that on a GPU.
    given: dict[str, Any] = {"tasks_per_step": 4, "query": 3, "meta_steps": 3, "meta_lr": 2**-7, "seed": seed}
    if kind is ml.FTML:
        given |= {"support": 3, "inner_steps": 2, "inner_lr": 0.2}
    device = options.pop("device", CPU)
    made = kind(model, ml.losses.cross_entropy, engine=engine, device=device, **(given | options))
    dtype = next(iter(made.params.values())).dtype
    for t in range(3):
        made.begin(f"task {t}")
        x = oracles.normal(f"engine {seed} {t}", 9, *IMAGE, dtype=dtype)
        made.observe(x, oracles.labels(f"engine {seed} {t}", CLASSES, 9), update=False)
    return made


def updated(mode: Mode, seeds: int = 1, together: bool = True, **options: Any) -> list[ml.Learner]:
    """Learners after three updates."""
    engine = Engine(mode, device=options.get("device", CPU))
    learners = [learner(engine, seed=seed, **options) for seed in range(seeds)]
    for group in [learners] if together else [[one] for one in learners]:
        update_together(group)
    assert engine.mode == mode, "the engine fell back"
    return learners


def assert_same(found: list[ml.Learner], expected: list[ml.Learner], rtol: float) -> None:
    """Parameters agree, by how far the updates moved them."""
    for one, other in zip(found, expected, strict=True):
        assert one.step == other.step > 0
        # All that is learned: step sizes too, where they are.
        torch.testing.assert_close(one.state.flat, other.state.flat, rtol=rtol, atol=rtol)


# Modes agree over a few updates.

TENSORS = {"1.linear0.weight": 0.1, "1.linear0.bias": 0.3, "1.head.weight": 0.2, "1.head.bias": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "last layer": {"only": "last"},
    "first order": {"model": mlp, "first_order": True},
    "a step size a tensor": {"model": mlp, "inner_lr": TENSORS},
    "chunk": {"model": mlp, "chunk": 3},
    "dropout": {"model": dropout_net},
    "adapts nothing": {"model": mlp, "inner_steps": 0},
    "toe": {"kind": ml.TOE},
    "every step counts": {"model": mlp, "every_step": True, "inner_steps": 3},
    "every step counts in first order": {"model": mlp, "every_step": True, "first_order": True},
    "learned step sizes": {"model": mlp, "learn_lr": True},
    "learned step sizes of the last layer": {"learn_lr": True, "only": "last", "every_step": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_compiled_equals_eager(options: dict[str, Any], quick_compiler: None) -> None:
    assert_same(updated("compiled", **options), updated("eager", **options), 1e-10)


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_recorded_as_a_whole_equals_eager(options: dict[str, Any], seeds: int, traced: list[Any]) -> None:
    if "chunk" in options:
        options = options | {"chunk": 2}
    found = updated("compiled", seeds, **options)
    assert len(traced) == 1
    assert_same(found, updated("eager", seeds, together=False, **options), 1e-10)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolution": own_conv,
    "layer norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(128, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)
    ).double(),
    "buffer": lambda: nn.Sequential(nn.Flatten(), Scaled(128), nn.Linear(128, CLASSES)).double(),
}


class Scaled(nn.Module):
    """Multiplies by a buffer and by a tensor that is not one."""

    factor: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("factor", oracles.normal("factor", size))
        self.other = oracles.normal("other", size)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.other


@pytest.mark.parametrize("model", NETWORKS.values(), ids=NETWORKS.keys())
def test_networks_recorded_as_a_whole(model: Callable[[], nn.Module], traced: list[Any]) -> None:
    assert_same(updated("compiled", model=model), updated("eager", model=model), 1e-10)
    assert len(traced) == 1


def test_one_recording_for_any_number_of_updates(traced: list[Any]) -> None:
    engine = Engine("compiled")
    one = learner(engine, mlp)
    for number in (1, 3, 10, 13):
        one.update(number)
    assert len(traced) == 1


def test_large_programs_are_compiled_in_pieces(
    traced: list[Any], quick_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_module, "MAX_OPERATIONS", 100)
    assert_same(updated("compiled", model=mlp), updated("eager", model=mlp), 1e-10)
    assert not traced


@pytest.mark.torture
@pytest.mark.parametrize("model", NETWORKS.values(), ids=NETWORKS.keys())
def test_inductor_whole(model: Callable[[], nn.Module], inductor: None) -> None:
    assert_same(updated("compiled", model=model), updated("eager", model=model), 1e-10)


def test_inductor_side_by_side_equals_eager_alone(inductor: None) -> None:
    options: dict[str, Any] = {"model": mlp}
    assert_same(updated("compiled", 2, **options), updated("eager", 2, together=False, **options), 1e-10)


@pytest.mark.torture
def test_inductor_toe(inductor: None) -> None:
    options: dict[str, Any] = {"model": functools.partial(conv_net, torch.float32), "kind": ml.TOE}
    assert_same(updated("compiled", **options), updated("eager", **options), 1e-4)


# Learners side by side.


@pytest.mark.parametrize("kind", [ml.FTML, ml.TOE, ml.FTL, ml.Scratch])
def test_side_by_side_equals_alone(kind: Any) -> None:
    assert_same(updated("eager", 3, kind=kind), updated("eager", 3, together=False, kind=kind), 1e-10)


OUTER: dict[str, dict[str, Any]] = {
    "momentum, clipped, with a schedule": {"optimizer": "sgd", "clip": 0.05, "meta_lr": [(0, 0.1), (2, 0.01)]},
    "an optimiser of the user's": {"optimizer": torch.optim.RMSprop},
}


@pytest.mark.parametrize("options", OUTER.values(), ids=OUTER.keys())
def test_outer_steps_side_by_side_equal_those_alone(options: dict[str, Any]) -> None:
    found, alone = updated("eager", 2, model=mlp, **options), updated("eager", 2, together=False, model=mlp, **options)
    for learners in (found, alone):
        update_together(learners[:1])
        update_together(learners[1:])
    assert_same(found, alone, 1e-10)


SEVERAL: dict[str, dict[str, Any]] = {
    "toe": {"kind": ml.TOE},
    "ftl, a schedule": {"kind": ml.FTL, "meta_lr": [(0, 0.01), (4, 0.003), (11, 0.001)]},
    "from scratch, momentum, clipped": {"kind": ml.Scratch, "optimizer": "sgd", "clip": 0.05},
    "ftml": {},
    "ftml, dropout, clipped": {"model": dropout_net, "clip": 0.05},
    "ftml, learned step sizes, a schedule": {"learn_lr": True, "meta_lr": [(0, 0.01), (4, 0.003), (11, 0.001)]},
    "ftml, unlike sizes of support": {"support": (1, 3)},
}


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the modes of a GPU run on the CPU, where a graph is its program with inputs of its own; returns the graphs.

    A graph sees the values of its inputs only, and reads all else that it was captured with.
    """
    made: list[Any] = []

    class Graph:
        def __init__(self, program: Callable[..., Any], inputs: tuple[Any, ...], pool: Any, compiled: bool) -> None:
            self.program, self.inputs, self.compiled, self.calls = program, tree_map(clone, inputs), compiled, 0
            made.append(self)

        def __call__(self, *inputs: Any) -> Any:
            for own, given in zip(tensors_of(self.inputs), tensors_of(inputs), strict=True):
                assert own.shape == given.shape
                own.copy_(given)
            self.calls += 1
            return tree_map(clone, self.program(*self.inputs))

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    monkeypatch.setattr(cache_module, "Captured", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return made


# Tracing a dropout net takes a minute, and in mode "graphed" nothing is traced.
SEVERAL_BY_MODE = [
    pytest.param(mode, options, id=f"{mode}-{name}", marks=[pytest.mark.torture] if slow else [])
    for mode in ("compiled", "graphed", "captured")
    for name, options in SEVERAL.items()
    if (slow := mode != "graphed" and "ftml" in name) or mode != "captured"
]


@pytest.mark.parametrize(("mode", "options"), SEVERAL_BY_MODE)
def test_several_updates_as_one_program_are_the_same(
    mode: Mode,
    quick_compiler: None,
    graphs_on_the_cpu: list[Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also across tasks, and with a number of updates that is no multiple of those gathered at once."""
    monkeypatch.setattr(whole_module, "has_few_operations", lambda objective: True)
    monkeypatch.setattr(engine_module, "has_few_operations", lambda objective: True)
    runs: list[list[ml.Learner]] = []
    given: dict[str, Any] = {"model": mlp} | options
    for sizes in ([13, 13], [1, 10, 2, 13], None):
        made: list[Any] = []
        engine = Engine("compiled")
        engine.mode = mode
        with monkeypatch.context() as patch:
            if sizes is None:
                patch.setattr(Engine, "runs_updates_together", lambda self, objective: False)
            patch.setattr(engine_module, "Updates", spied(engine_module.Updates, made))
            both = [learner(engine, seed=seed, **given) for seed in range(2)]
            done = 0
            for size in sizes or [13, 13]:
                update_together(both, size)
                done += size
                for one in both if done % 13 == 0 else ():
                    one.begin("another")
                    one.observe(
                        oracles.normal("another", 5, *IMAGE), oracles.labels("another", CLASSES, 5), update=False
                    )
        assert engine.mode == mode
        assert bool(made) == (sizes is not None)
        assert bool(graphs_on_the_cpu) == (mode != "compiled")
        runs.append(both)
    for others in runs[1:]:
        for one, other in zip(runs[0], others, strict=True):
            assert not differences(one.state_dict(), other.state_dict())


def test_large_gradients_are_captured_one_by_one(
    quick_compiler: None, graphs_on_the_cpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_module, "MAX_OPERATIONS", 100)
    engine = Engine("compiled")
    engine.mode = "graphed"
    learner(engine, mlp).update(10)
    assert [graph.calls for graph in graphs_on_the_cpu] == [10]


def test_a_prediction_that_recurs_is_captured_when_graphed(graphs_on_the_cpu: list[Any]) -> None:
    engine = Engine("eager")
    engine.mode = "graphed"
    one = learner(engine, mlp)
    results = []
    for call in range(5):
        tests = [Batch(oracles.normal(f"x {call % 2}", 3, *IMAGE), oracles.labels("y", CLASSES, 3))]
        results.append(measure_together([one], tests, ml.losses.cross_entropy)[0]["loss"])
        assert len(graphs_on_the_cpu) == (call >= 2)
    assert [graph.calls for graph in graphs_on_the_cpu] == [3]
    assert results[0] == results[2] == results[4] != results[1] == results[3]


def test_a_prediction_that_cannot_be_captured_stays_eager(
    graphs_on_the_cpu: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cache_module, "Captured", fail)
    engine = Engine("eager")
    engine.mode = "graphed"
    one = learner(engine, mlp)
    tests = [Batch(oracles.normal("x", 3, *IMAGE), oracles.labels("y", CLASSES, 3))]
    losses = {measure_together([one], tests, ml.losses.cross_entropy)[0]["loss"] for _ in range(5)}
    assert len(losses) == 1
    assert engine.mode == "graphed"
    assert caplog.text.count("not permitted") == 1


def spied(kind: Any, made: list[Any]) -> Any:
    def make(*given: Any) -> Any:
        made.append(kind(*given))
        return made[-1]

    return make


@pytest.mark.parametrize(("model", "seeds"), [(mlp, 1), (mlp, 2), (dropout_net, 1)])
def test_nothing_is_compiled_again_for_another_number_of_updates(model: Any, seeds: int, quick_compiler: None) -> None:
    engine = Engine("compiled")
    learners = [learner(engine, model, seed=seed) for seed in range(seeds)]
    update_together(learners, 1)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    for number in (3, 10, 13):
        update_together(learners, number)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_one_program_whatever_the_step_sizes(quick_compiler: None) -> None:
    engine = Engine("compiled")
    one = learner(engine, mlp, ml.TOE, meta_lr=[(3 * i, 0.01 / (i + 1)) for i in range(20)])
    for _ in range(20):
        one.update(2)
    assert len(engine._programs) == 1


def test_a_copied_learner_runs_beside_the_original(quick_compiler: None) -> None:
    one = learner(Engine("compiled"), mlp, ml.TOE)
    other = copy.deepcopy(one)
    update_together([one, other], 2)
    assert torch.equal(one.state.flat, other.state.flat)


def test_an_update_of_several_that_fails_leaves_the_learner(quick_compiler: None) -> None:
    made = [learner(Engine("compiled"), model=mlp, kind=ml.TOE) for _ in range(2)]
    for one in made:
        one.update(3)
        x = torch.full((2, *IMAGE), 1e308, dtype=torch.float64)
        one.observe(x, oracles.labels("large", CLASSES, 2), update=False)
    with pytest.raises(ValueError, match="is not finite at update"):
        made[0].update(13)
    assert not differences(made[0].state_dict(), made[1].state_dict())


@pytest.mark.parametrize("kind", [ml.TOE, ml.FTL, ml.Scratch])
def test_a_learner_whose_network_does_not_compile_goes_on_eagerly(quick_compiler: None, kind: Any) -> None:
    engine = Engine("compiled")
    model = lambda: Unruly().double()  # noqa: E731
    found, expected = learner(engine, model, kind), learner(Engine("eager"), model, kind)
    found.update(13)
    expected.update(13)
    assert engine.mode == "eager"
    assert not differences(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("options", [{"inner_lr": 0.1}, {"inner_steps": 1}, {"only": "last"}, {"first_order": True}])
def test_learners_that_differ_in_their_inner_loop_are_refused(options: dict[str, Any]) -> None:
    engine = Engine("eager")
    with pytest.raises(ValueError, match="must have the same inner loop"):
        update_together([learner(engine, mlp), learner(engine, mlp, **options)], 1)


@pytest.mark.parametrize("options", [{"meta_lr": 0.03}, {"optimizer": "sgd"}, {"clip": 1.0}])
def test_learners_that_differ_in_their_outer_step_are_refused(options: dict[str, Any]) -> None:
    engine = Engine("eager")
    both = [learner(engine, mlp), learner(engine, mlp, **options)]
    before = [one.state_dict() for one in both]
    with pytest.raises(ValueError, match="must have the same optimizer, meta_lr and clip"):
        update_together(both, 1)
    assert not differences(before, [one.state_dict() for one in both])


def test_side_by_side_in_float32_and_with_dropout() -> None:
    options: dict[str, Any] = {"model": functools.partial(dropout_net, torch.float32)}
    assert_same(updated("eager", 3, **options), updated("eager", 3, together=False, **options), 1e-4)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("inner_steps", [2, 16], ids=["kept", "recomputed"])
def test_side_by_side_compiled_with_kept_and_recomputed_steps(inner_steps: int) -> None:
    """With 16 inner steps every second one is computed again for its adjoint step."""
    options: dict[str, Any] = {"model": mlp, "inner_steps": inner_steps, "inner_lr": 0.05}
    together = updated("compiled", 2, **options)
    assert_same(together, updated("eager", 2, together=False, **options), 1e-10)
    assert not torch.equal(together[0].state.flat, together[1].state.flat), "the seeds must differ"


# The choice of a mode.


def test_auto_chooses_by_the_planned_updates() -> None:
    few, many = Engine("auto", 1), Engine("auto", 10**6)
    assert (few.mode, many.mode) == ("eager", "compiled")
    assert (Engine("auto", 1, "cuda").mode, Engine("auto", 10**6, "cuda").mode) == ("graphed", "captured")
    assert Engine("auto", 10**6, "meta").mode == "eager", "what is not known to pay is not compiled"


def test_learners_choose_by_their_updates_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "metaleader")
    model = lambda: nn.Linear(2, 1)  # noqa: E731
    assert ml.FTML(model, ml.losses.squared_error).engine.mode == "eager"
    assert "engine mode eager: about 500 updates on cpu, compiling pays from 2000" in caplog.text
    assert ml.FTML(model, ml.losses.squared_error, meta_steps=100).engine.mode == "compiled"
    assert "engine mode compiled: about 5000 updates on cpu, compiling pays from 2000" in caplog.text
    caplog.clear()
    assert ml.FTML(model, ml.losses.squared_error, engine="eager", meta_steps=100).engine.mode == "eager"
    assert not caplog.text


def test_a_learner_with_programs_can_be_copied_and_pickled(traced: list[Any]) -> None:
    one = learner(Engine("compiled"), mlp)
    one.update(2)
    other = copy.deepcopy(one)
    engine = pickle.loads(pickle.dumps(one.engine))
    assert engine.mode == other.engine.mode == "compiled"
    assert engine is not one.engine
    one.update(2)
    other.update(2)
    assert not differences(one.state_dict(), other.state_dict())


def test_a_given_mode_is_kept() -> None:
    assert Engine("compiled", 1).mode == "compiled"
    assert Engine("eager", 10**6).mode == "eager"


@pytest.mark.parametrize("mode", ["graphed", "captured"])
def test_graphs_need_cuda(mode: Mode) -> None:
    with pytest.raises(ValueError, match=f"'{mode}' needs a CUDA device, got cpu; use 'compiled'"):
        Engine(mode, device="cpu")


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="engine must be one of auto, eager, graphed, compiled, captured; got 'fast'"):
        Engine("fast")  # pyright: ignore[reportArgumentType]


# Networks.


def gradients(
    model: nn.Module, mode: Mode = "eager", seed: str = "networks", image: tuple[int, ...] = IMAGE
) -> tuple[Engine, dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of two replicas in a mode, and by the slow loop."""
    model = model.double()
    network = Network(model, ml.losses.cross_entropy)
    params = {
        name: torch.stack([value + 0.1 * oracles.normal(f"{seed} {name} {r}", *value.shape) for r in range(2)])
        for name, value in network.params().items()
    }
    support, query = (
        Batch(oracles.normal(f"{seed} {part}", 2, 3, 4, *image), oracles.labels(f"{seed} {part}", CLASSES, 2, 3, 4))
        for part in ("support", "query")
    )
    engine = Engine(mode)
    _, found = oracles.engine_gradient(engine, Objective(network, Inner(0.3, 2)), params, support, query)
    loss_fn = oracles.module_loss(model, F.cross_entropy)
    slow = []
    for r in range(2):
        own, own_support, own_query = tree_map(lambda leaf, r=r: leaf[r], (params, support, query))
        slow.append(oracles.unrolled(loss_fn, own, own_support, own_query, 0.3, 2)[1])
    return engine, found, tree_map(lambda *values: torch.stack(values), *slow)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    for name, value in expected.items():
        assert (found[name] - value).norm() <= tolerance * value.norm() + 1e-13, name


class Attention(nn.Module):
    """Self-attention over the rows of an image."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        return self.head(self.attention(x, x, x, need_weights=self.need_weights)[0].mean(1))


class Embedded(nn.Module):
    """Pixels rounded to words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.flatten(1).abs() * 4).long().clamp(max=4)
        return self.head(torch.tanh(self.embedding(words).mean(1)))


def after_conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: after_conv(nn.GroupNorm(2, 4)),
    "batch norm": lambda: after_conv(nn.BatchNorm2d(4, track_running_stats=False)),
    "attention": lambda: Attention(need_weights=False),
    "attention with weights": lambda: Attention(need_weights=True),
    "embedding": Embedded,
    "conv": own_conv,
    "conv in groups": lambda: own_conv(groups=2),
    "conv, dilated": lambda: own_conv(dilation=2),
    "conv, circular": lambda: own_conv(padding_mode="circular"),
    "conv, same": lambda: own_conv(kernel_size=3, stride=1, padding="same", bias=False),
}


@pytest.mark.parametrize("model", RIGHT.values(), ids=RIGHT.keys())
def test_compiled_layers_equal_the_slow_loop(model: Callable[[], nn.Module], quick_compiler: None) -> None:
    engine, found, expected = gradients(model(), "compiled")
    assert engine.mode == "compiled"
    assert_close(found, expected)


class FunctionalNorm(nn.Module):
    """A norm called as a function, which no replacement of layers sees."""

    def __init__(self, norm: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4 * 36, CLASSES)
        self.scale, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x), self.scale, self.shift)).flatten(1))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(128, CLASSES))


def functional_batch_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, scale, shift, training=True)


def functional_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, (6, 6), scale, shift)


def unreplaced_layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.native_layer_norm(x, (6, 6), scale, shift, 1e-5)[0]


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: after_conv(nn.LayerNorm([4, 6, 6])),
    "instance norm": lambda: after_conv(nn.InstanceNorm2d(4, affine=True)),
    "transformer": encoder,
    "F.batch_norm": lambda: FunctionalNorm(functional_batch_norm, 4),
    "F.layer_norm": lambda: FunctionalNorm(functional_layer_norm, 6, 6),
}


@pytest.mark.parametrize("model", NORMS.values(), ids=NORMS.keys())
def test_norms_that_torch_gets_wrong_are_compiled(model: Callable[[], nn.Module], quick_compiler: None) -> None:
    """Under a gradient over vmap torch 2.13 holds the statistics of its own norms constant."""
    engine, found, expected = gradients(model(), "compiled")
    assert engine.mode == "compiled"
    assert_close(found, expected)


def test_a_wrong_second_derivative_is_noticed_before_compiling(messages: pytest.LogCaptureFixture) -> None:
    engine, found, expected = gradients(FunctionalNorm(unreplaced_layer_norm, 6, 6), "compiled")
    assert engine.mode == "eager"
    assert "continuing with 'eager': torch's second derivative of the network is wrong by" in messages.text
    assert_close(found, expected)


def test_flawed_norm_compiles_where_it_is_not_differentiated_twice(quick_compiler: None) -> None:
    network = Network(FunctionalNorm(unreplaced_layer_norm, 6, 6).double(), ml.losses.cross_entropy)
    params = {name: value[None] for name, value in network.params().items()}
    batch = Batch(oracles.normal("once", 1, 2, 4, *IMAGE), oracles.labels("once", CLASSES, 1, 2, 4))
    objective = Objective(network, Inner(0.3, 2, only="last"))
    compiled = Engine("compiled")
    _, found = oracles.engine_gradient(compiled, objective, params, batch, batch)
    assert compiled.mode == "compiled"
    assert_close(found, oracles.engine_gradient(Engine("eager"), objective, params, batch, batch)[1])


outside: Any = torch.compiler.disable(torch.tanh)


class Unruly(nn.Module):
    """Runs eagerly, but not as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(outside(x.flatten(1)))


def test_what_does_not_compile_goes_on_eagerly_and_says_so(
    quick_compiler: None, messages: pytest.LogCaptureFixture
) -> None:
    engine, found, expected = gradients(Unruly(), "compiled")
    assert engine.mode == "eager"
    assert "engine mode 'compiled' fails, continuing with 'eager': " in messages.text
    assert_close(found, expected)


@pytest.mark.parametrize("chosen", [None, "torch's own", "the user's"])
def test_compiled_code_is_kept_in_the_projects_cache(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own folder is a temporary one; a folder that the user chose is respected."""
    folders = {None: None, "torch's own": default_cache_dir(), "the user's": str(tmp_path / "mine")}
    monkeypatch.setenv("METALEADER_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if folders[chosen] is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folders[chosen])
    compiled_module.compile_whole(torch.sin)
    assert cache_dir() == str(tmp_path / ("mine" if chosen == "the user's" else "compiled"))


def test_a_new_shape_is_a_new_program(quick_compiler: None) -> None:
    engine = Engine("compiled")
    network = Network(mlp(), ml.losses.cross_entropy)
    params = {name: value[None] for name, value in network.params().items()}
    objective = Objective(network, Inner(0.3, 1))
    for num in (2, 5):
        batch = Batch(oracles.normal("shape", 1, 2, num, *IMAGE), oracles.labels("shape", CLASSES, 1, 2, num))
        _, found = oracles.engine_gradient(engine, objective, params, batch, batch)
        assert_close(found, oracles.engine_gradient(Engine("eager"), objective, params, batch, batch)[1])
    assert engine.mode == "compiled"


# On the GPU.


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda")


GPU: dict[str, dict[str, Any]] = {
    "all layers": {},
    "last layer": {"only": "last"},
    "first order": {"first_order": True},
    "chunk": {"chunk": 3},
    "dropout": {"model": dropout_net},
    "toe": {"kind": ml.TOE, "meta_steps": 13},
    "learned step sizes, every step counts": {"learn_lr": True, "every_step": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU.values(), ids=GPU.keys())
def test_captured_equals_eager(options: dict[str, Any], cuda: torch.device) -> None:
    expected = updated("eager", 2, together=False, device=cuda, **options)
    assert_same(updated("captured", 2, device=cuda, **options), expected, 1e-9)


GRAPHED: dict[str, dict[str, Any]] = {
    **GPU,
    "norms and pooling": {"model": functools.partial(own_conv, torch.float64)},
    "layer norm": {"model": lambda: after_conv(nn.LayerNorm([4, 6, 6])).double()},
    "transformer": {"model": lambda: encoder().double()},
    "chunks": {"model": mlp, "chunk": 3},
    "chain": {"model": lambda: ml.models.conv_net(CLASSES, 8, IMAGE[0], filters=4, layers=2).double()},
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", GRAPHED.values(), ids=GRAPHED.keys())
def test_graphed_equals_eager_and_the_cpu(options: dict[str, Any], cuda: torch.device) -> None:
    expected = updated("eager", 2, together=False, device=cuda, **options)
    assert_same(updated("graphed", 2, device=cuda, **options), expected, 1e-9)
    on_cpu = updated("eager", 2, **options)
    for one, other in zip(on_cpu, expected, strict=True):
        torch.testing.assert_close(other.state.flat.cpu(), one.state.flat, rtol=1e-7, atol=1e-7)


class CopiesFromTheHost(nn.Module):
    """Runs on a GPU, but not in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) * torch.tensor([2.0] * CLASSES, device=x.device, dtype=x.dtype)


@pytest.mark.gpu
def test_a_network_that_cannot_be_captured_runs_eagerly(cuda: torch.device, messages: pytest.LogCaptureFixture) -> None:
    model = lambda: CopiesFromTheHost().double()  # noqa: E731
    engine = Engine("graphed", device=cuda)
    found, expected = (learner(e, model, device=cuda) for e in (engine, Engine("eager", device=cuda)))
    found.update(3)
    expected.update(3)
    assert engine.mode == "eager"
    assert "engine mode 'graphed' fails, continuing with 'eager': " in messages.text
    assert_same([found], [expected], 1e-9)
    again = learner(Engine("graphed", device=cuda), mlp, device=cuda)  # captures still work
    again.update(2)
    assert again.engine.mode == "graphed"


@pytest.mark.gpu
@pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL.keys())
@pytest.mark.parametrize("mode", ["graphed", "captured"])
def test_bits_do_not_depend_on_the_number_of_updates_of_a_graph(
    mode: Mode, options: dict[str, Any], cuda: torch.device
) -> None:
    runs: list[ml.Learner] = []
    given: dict[str, Any] = {"model": functools.partial(mlp, torch.float32), "device": cuda} | options
    for sizes in ([10, 3], [1] * 13, [2, 4, 7]):
        engine = Engine(mode, device=cuda)
        one = learner(engine, **given)
        for size in sizes:
            one.update(size)
        assert engine.mode == mode
        runs.append(one)
    for one in runs[1:]:
        assert not differences(one.state_dict(), runs[0].state_dict())


@pytest.mark.gpu
def test_captured_equals_eager_in_float32(cuda: torch.device) -> None:
    options: dict[str, Any] = {"model": functools.partial(conv_net, torch.float32), "device": cuda}
    assert_same(updated("captured", 3, **options), updated("eager", 3, together=False, **options), 1e-4)


@pytest.mark.gpu
def test_devices_agree(cuda: torch.device) -> None:
    on_cpu = updated("eager")
    for name, value in updated("captured", device=cuda)[0].params.items():
        torch.testing.assert_close(value.cpu(), on_cpu[0].params[name], rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [ml.FTML, ml.TOE])
@pytest.mark.parametrize("mode", ["eager", "graphed", "captured"])
def test_repeat_and_resume_are_bit_identical(mode: Mode, kind: Any, cuda: torch.device) -> None:
    options: dict[str, Any] = {"model": functools.partial(conv_net, torch.float32), "device": cuda, "kind": kind}
    first, again, resumed = (learner(Engine(mode, device=cuda), **options) for _ in range(3))
    first.update(6)
    again.update(6)
    half = learner(Engine(mode, device=cuda), **options)
    half.update(3)
    resumed.load_state_dict(half.state_dict())
    resumed.update(3)
    for name, value in first.params.items():
        torch.testing.assert_close(again.params[name], value, rtol=0, atol=0)  # says by how much
        torch.testing.assert_close(resumed.params[name], value, rtol=0, atol=0)


def differentiate(times: int, device: torch.device) -> None:
    """Something else: autograd counts what each thread makes, here by thousands."""
    x = torch.ones((), device=device, requires_grad=True)
    for _ in range(times):
        y = x
        for _ in range(1000):
            y = y * y
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graphed", "captured"])
def test_bits_do_not_depend_on_what_was_differentiated_before(mode: Mode, cuda: torch.device) -> None:
    options: dict[str, Any] = {"model": functools.partial(conv_net, torch.float32), "device": cuda}
    runs = []
    # Of a GPU's graph two thirds of the nodes come from autograd's own thread, of a CPU's all from this one.
    for times, device in [(0, cuda), (10, cuda), (60, CPU)]:
        differentiate(times, device)
        one = learner(Engine(mode, device=cuda), **options)
        one.update(6)
        runs.append(one)
    for one in runs[1:]:
        for name, value in runs[0].params.items():
            torch.testing.assert_close(one.params[name], value, rtol=0, atol=0)


def test_no_sum_is_chosen_by_its_time(inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In none of several functions that are compiled one after the other: torch sets the setting back in between."""
    seen: list[bool] = []
    begin = GraphLowering.__init__

    def watched(self: GraphLowering, *args: Any, **options: Any) -> None:
        seen.append(bool(inductor_config.deterministic))
        begin(self, *args, **options)

    monkeypatch.setattr(GraphLowering, "__init__", watched)
    with fresh_cache(), compiled_module.compiling():
        for factor in (2, 3, 4):
            compiled = compiled_module.compile_whole(lambda x: (x * factor).sum(0))  # noqa: B023
            assert compiled(torch.ones(3, 2)).tolist() == [3 * factor] * 2
    assert seen == [True] * 3


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_gradients_are_taken_in_the_calling_thread(mode: Mode, quick_compiler: None) -> None:
    """On a GPU; here the setting that does so is looked at."""
    seen: list[bool] = []

    def loss(prediction: Tensor, target: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            seen.append(torch._C._is_multithreading_enabled())
        return F.cross_entropy(prediction, target, reduction="none")

    one = ml.FTML(mlp, loss, engine=Engine(mode), support=3, query=3, inner_steps=1, tasks_per_step=2)
    one.begin("task")
    one.observe(oracles.normal("thread", 9, *IMAGE), oracles.labels("thread", CLASSES, 9), update=False)
    del seen[:]
    one.update(1)
    one.adapt()
    assert seen
    assert not any(seen)
    assert torch._C._is_multithreading_enabled()


@pytest.mark.gpu
def test_memory_hardly_grows_with_the_inner_steps(cuda: torch.device) -> None:
    """Many images a task: activations, not the path of parameters, are what there is to hold."""
    from metaleader.bench.measures import measure_memory
    from metaleader.bench.work import Work

    work = Work(functools.partial(ml.models.conv_net, CLASSES, 32, 3, 16, 3), (3, 32, 32), CLASSES, 40, 40)
    found = measure_memory(work, cuda)
    assert found["eager"]["ratio"] <= 1.5
    assert found["compiled"]["ratio"] <= 1.5, "beyond five inner steps, a chain keeps nothing but parameters"
