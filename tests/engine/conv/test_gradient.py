"""Compare the gradient of a chain with autograd through every inner step."""

import functools
import pickle
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metaleader as ml
from metaleader.engine.compiled import compile_whole
from metaleader.engine.conv import gradient as gradient_module
from metaleader.engine.conv import torch_ops as passes_module
from metaleader.engine.conv.gradient import ChainGradient
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.torch_ops import TorchPasses
from metaleader.engine.conv.trace import find_chain
from metaleader.engine.engine import Engine, Mode
from metaleader.engine.objective import LOG_LR, Objective
from metaleader.engine.programs import Updates
from metaleader.gradient.meta import Inner, adapt
from metaleader.gradient.selection import moving_names
from metaleader.learners import predict_together, update_together
from metaleader.nets.functional import Network
from metaleader.tasks import Batch

TASKS, IMAGES, SIZE = 3, 4, (9, 7)


def conv_net() -> nn.Module:
    """Three different convolutions, two with a bias that batch norm cancels, and a head with batch norm."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, stride=2, padding=1),
        nn.BatchNorm2d(5, track_running_stats=False),
        nn.ReLU(),
        nn.Conv2d(5, 4, 5, padding=2, bias=False),
        nn.BatchNorm2d(4, track_running_stats=False, eps=1e-3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, stride=3, padding=1),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


def pose_net() -> nn.Module:
    return ml.models.pose_net(3, 2, 4, (2, 1), (5,)).double()


def small_net() -> nn.Module:
    blocks = [
        [nn.Conv2d(n, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()]
        for n in (2, 4)
    ]
    return nn.Sequential(*blocks[0], *blocks[1], nn.Flatten(), nn.Linear(24, 3)).double()


def work(
    model: nn.Module, compiled: bool = False, **options: Any
) -> tuple[ChainGradient, Objective, Any, Batch, Batch]:
    """The gradient program of a chain and its arguments, for two learners with different parameters."""
    network = Network(model, ml.losses.cross_entropy)
    chain = find_chain(network)
    assert chain is not None
    learn_lr = options.pop("learn_lr", False)
    objective = Objective(network, Inner(**({"lr": 0.3, "steps": 3} | options)), learn_lr)
    params = {
        name: torch.stack([value + 0.1 * oracles.normal(f"{name} {r}", *value.shape) for r in range(2)])
        for name, value in network.params().items()
    }
    x, y = (2, TASKS, IMAGES, 2, *SIZE), (2, TASKS, IMAGES)
    support, query = (Batch(oracles.normal(name, *x), oracles.labels(name, 3, *y)) for name in ("support", "query"))
    program = ChainGradient(chain, objective, TorchPasses(Plan(chain.layers, SIZE), compiled), compiled)
    return program, objective, params, support, query


RATES = {name: 0.1 + 0.02 * i for i, (name, _) in enumerate(conv_net().named_parameters())}
VARIANTS: dict[str, dict[str, Any]] = {
    "all layers": {},
    "last layer": {"only": "last"},
    "last layer in chunks": {"only": "last", "chunk": 2},
    "the whole head": {"only": "1*"},
    "a bias without effect": {"only": "0.bias"},
    "convolutions alone": {"only": "3.*"},
    "a step size a tensor": {"lr": RATES},
    "no inner steps": {"steps": 0},
    "chunks of two": {"chunk": 2},
    "more steps than are kept": {"steps": 7, "lr": 0.1},
    "soft-argmax": {"model": pose_net},
    "every step counts": {"every_step": True},
    "every step counts, recomputed": {"every_step": True, "steps": 7, "lr": 0.1},
    "every step counts, last layer": {"every_step": True, "only": "last"},
    "every step counts, there is none": {"every_step": True, "steps": 0},
}
LEARNED: dict[str, dict[str, Any]] = {
    "all layers": {},
    "last layer": {"only": "last"},
    "convolutions alone": {"only": "3.*"},
    "every step counts": {"every_step": True},
    "every step counts, last layer, chunks": {"every_step": True, "only": "last", "chunk": 2},
    "more steps than are kept": {"steps": 7},
    "compiled": {"compiled": True},
}


@pytest.fixture(autouse=True)
def _quick_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without code generation; GPU tests use the real compiler."""
    if request.node.get_closest_marker("gpu") is not None:
        return
    quick = functools.partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager")
    for module in (gradient_module, passes_module):
        monkeypatch.setattr(module, "compile_whole", quick)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradient_equals_autograd_through_every_step(options: dict[str, Any]) -> None:
    compare_with_autograd(**options)


# Warnings raised inside torch's compiler.
compiling = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:.*lru_cache.*:UserWarning")


@compiling
@pytest.mark.torture
def test_inductor_gradient_equals_autograd(inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile only the passes, with odd sizes, a stride and padding; the head runs eagerly to save time."""
    monkeypatch.setattr(gradient_module, "compile_whole", lambda function: function)
    monkeypatch.setattr(passes_module, "compile_whole", compile_whole)
    compare_with_autograd(small_net, compiled=True, steps=2)
    torch.compiler.reset()


@compiling
@pytest.mark.parametrize(("tasks", "sizes"), [(6, {3}), (5, {3, 2}), (2, {2})])
def test_compiled_tasks_go_in_even_chunks(tasks: int, sizes: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of three tasks, six tasks make two equal chunks, and five make chunks of three and two."""
    monkeypatch.setattr(gradient_module, "compile_whole", lambda function: function)
    monkeypatch.setattr(passes_module, "compile_whole", lambda function: function)
    program, _, params, support, query = work(conv_net(), compiled=True)
    monkeypatch.setattr(gradient_module, "_CPU_NUMBERS", 3 * 2 * IMAGES * program.plan.largest)
    more = lambda batch: Batch(*(torch.cat([leaf, leaf], 1)[:, :tasks] for leaf in batch))  # noqa: E731
    seen: set[int] = set()
    forward = program.passes.forward

    def watched(flat: Tensor, patches: Tensor) -> Any:
        seen.add(len(flat) // 2)
        return forward(flat, patches)

    monkeypatch.setattr(program.passes, "forward", watched)
    _, found = program(params, more(support), more(query))
    assert seen == sizes
    _, expected = work(conv_net())[0](params, more(support), more(query))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


@compiling
def test_without_a_compiler_a_chain_goes_on_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(function: Any) -> Any:
        def fail(*inputs: Any) -> Any:
            raise RuntimeError("no C++ compiler")

        return fail

    monkeypatch.setattr(passes_module, "compile_whole", no_compiler)
    monkeypatch.setattr(gradient_module, "compile_whole", lambda function: function)
    _, objective, params, support, query = work(conv_net())
    engine = Engine("compiled")
    _, found = oracles.engine_gradient(engine, objective, params, support, query)
    assert engine.mode == "eager"
    assert "engine mode 'compiled' fails, continuing with 'eager': no C++ compiler" in caplog.text
    _, expected = oracles.engine_gradient(Engine("eager"), objective, params, support, query)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def compare_with_autograd(model: Callable[[], nn.Module] = conv_net, compiled: bool = False, **options: Any) -> None:
    program, objective, params, support, query = work(model(), compiled, **options)
    losses, found = program(params, support, query)
    moving = moving_names(program.chain.names, objective.inner.only)
    for r in range(2):
        own = {name: value[r] for name, value in params.items()}
        loss, expected, _ = oracles.unrolled(
            objective.network.loss_fn,
            own,
            Batch(support.x[r], support.y[r]),
            Batch(query.x[r], query.y[r]),
            options.get("lr", 0.3),
            objective.inner.steps,
            moving,
            every_step=objective.inner.every_step and objective.inner.steps > 0,
        )
        torch.testing.assert_close(losses[r], loss, rtol=1e-10, atol=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(found[name][r], value, rtol=1e-8, atol=1e-11, msg=name)
            assert found[name].is_contiguous(), "a fused optimiser needs contiguous gradients"


@pytest.mark.parametrize("options", LEARNED.values(), ids=LEARNED.keys())
def test_learned_step_sizes_have_their_gradient(options: dict[str, Any]) -> None:
    """The gradient with respect to the logarithms of the step sizes, which differ between the learners."""
    program, objective, params, support, query = work(conv_net(), learn_lr=True, **options)
    moving = sorted(moving_names(program.chain.names, objective.inner.only))
    sizes = [{name: 0.05 + 0.01 * i + 0.1 * r for i, name in enumerate(moving)} for r in range(2)]
    logs = {LOG_LR + name: torch.tensor([one[name] for one in sizes], dtype=torch.float64).log() for name in moving}
    _, found = program(params | logs, support, query)
    for r in range(2):
        own = {name: value[r] for name, value in params.items()}
        first = Batch(support.x[r], support.y[r]), Batch(query.x[r], query.y[r])
        steps, every = objective.inner.steps, objective.inner.every_step
        _, gradient, by_size = oracles.unrolled(
            objective.network.loss_fn, own, *first, sizes[r], steps, moving, every_step=every
        )
        for name, value in gradient.items():
            torch.testing.assert_close(found[name][r], value, rtol=1e-8, atol=1e-11, msg=name)
        for name in moving:
            expected = by_size[name] * sizes[r][name]
            torch.testing.assert_close(found[LOG_LR + name][r], expected, rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize("only", [None, "last"])
@pytest.mark.parametrize("every_step", [False, True])
def test_first_order_is_the_query_gradient_at_the_adapted_parameters(only: str | None, every_step: bool) -> None:
    program, objective, params, support, query = work(conv_net(), first_order=True, only=only, every_step=every_step)
    _, found = program(params, support, query)
    batches = Batch(support.x[1], support.y[1]), Batch(query.x[1], query.y[1])
    _, expected = oracles.objective_gradient(objective, {n: v[1] for n, v in params.items()}, *batches)
    for name, value in expected.items():
        torch.testing.assert_close(found[name][1], value, rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize("only", ["1*", "6*"])
def test_adapted_parameters_are_those_of_adapt(only: str) -> None:
    """With only some layers of the head adapted, and with only the last convolution."""
    program, objective, params, support, _ = work(conv_net(), only=only)
    data = Batch(support.x[:, 0], support.y[:, 0])
    found = program.adapted(params, data, (0, 2, 3))
    for steps in (0, 2, 3):
        for r in range(2):
            own, batch = {name: value[r] for name, value in params.items()}, Batch(data.x[r], data.y[r])
            expected = adapt(objective.network.loss_fn, own, batch, 0.3, steps, only=only)
            for name, value in expected.items():
                torch.testing.assert_close(found[steps][name][r], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("model", ["chain", "no chain"])
def test_predictions_are_those_of_the_adapted_nets(model: str, learned: bool) -> None:
    """Batched predictions equal those of each learner's adapted nets, with both kinds of batch norm statistics."""
    build = conv_net if model == "chain" else lambda: nn.Sequential(nn.Identity(), conv_net())
    rates = {("" if model == "chain" else "1.") + name: rate for name, rate in RATES.items()}
    engine, learners = Engine("eager"), []
    for seed in range(2):
        options: dict[str, Any] = {"support": 2, "query": 2, "seed": seed, "engine": engine}
        learners.append(ml.FTML(build, ml.losses.cross_entropy, inner_lr=rates, learn_lr=learned, **options))
        learners[-1].begin("a")
        x = oracles.normal(f"seen {seed}", 7, 2, *SIZE)
        learners[-1].observe(x, oracles.labels(f"seen {seed}", 3, 7), update=False)
    xs = [oracles.normal(f"new {seed}", 5, 2, *SIZE) for seed in range(2)]
    if learned:
        for learner in learners:
            learner.update(2)
    found = predict_together(learners, xs, (2, 0, 3))
    assert found is not None
    assert list(found) == ["2", "0", "3", "task"]
    for r, (learner, x) in enumerate(zip(learners, xs, strict=True)):
        for steps, net in zip((2, 0, 3), learner.adapt(steps=[2, 0, 3], statistics="batch"), strict=True):
            torch.testing.assert_close(found[str(steps)][r], net(x).detach(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found["task"][r], learner.adapt(2, "task")(x).detach(), rtol=1e-8, atol=1e-10)


def seen(learner: ml.Learner, x: Any) -> ml.Learner:
    learner.begin("a")
    learner.observe(x, oracles.labels("y", 3, 6), update=False)
    return learner


PREPARED: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "turned": (lambda x: x.transpose(2, 3), oracles.normal("turned", 6, 2, 7, 9)),
    "channels last": (lambda x: x.permute(0, 3, 1, 2), oracles.normal("last", 6, 9, 7, 2)),
    "cropped": (lambda x: x[:, :, 1:-1, 2:], oracles.normal("cropped", 6, 2, 11, 9)),
    "of a dict": (lambda x: x["image"], {"image": oracles.normal("dict", 6, 2, 9, 7)}),
    "flat": (lambda x: x.view(-1, 2, 9, 7), oracles.normal("flat", 6, 126)),
}


@pytest.mark.parametrize(("preprocess", "x"), PREPARED.values(), ids=PREPARED.keys())
def test_images_are_those_that_the_network_sees(preprocess: Callable[[Any], Any], x: Any) -> None:
    options: dict[str, Any] = {"support": 3, "query": 3, "inner_steps": 1, "optimizer": "sgd", "meta_lr": 0.1}
    chain = seen(ml.FTML(conv_net, ml.losses.cross_entropy, preprocess=preprocess, **options), x)
    plain = seen(
        ml.FTML(lambda: nn.Sequential(conv_net()), ml.losses.cross_entropy, preprocess=preprocess, **options), x
    )
    for learner in (chain, plain):
        learner.update(1)
    for name, value in chain.params.items():
        torch.testing.assert_close(plain.params[f"0.{name}"], value, rtol=1e-8, atol=1e-10, msg=name)
    found = predict_together([chain], [x], (3,))
    assert found is not None
    torch.testing.assert_close(found["3"][0], chain.adapt(3, "batch")(x).detach(), rtol=1e-8, atol=1e-10)


def attention_net() -> nn.Module:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(2).mT
            return nn.functional.scaled_dot_product_attention(rows, rows, rows).mean(1)

    parts = list(conv_net().children())
    return nn.Sequential(*parts[:9], Attend(), nn.Linear(6, 3)).double()


def test_attention_in_the_head() -> None:
    program, objective, params, support, query = work(attention_net())
    _, found = program(params, support, query)
    own = {name: value[0] for name, value in params.items()}
    first = Batch(support.x[0], support.y[0]), Batch(query.x[0], query.y[0])
    for name, value in oracles.objective_gradient(objective, own, *first)[1].items():
        torch.testing.assert_close(found[name][0], value, rtol=1e-8, atol=1e-11, msg=name)


def hooked(which: str) -> nn.Module:
    net = conv_net()
    part = net if which == "whole" else list(net.children())[2]

    def negate(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return -out

    part.register_forward_hook(negate)
    return net


@pytest.mark.parametrize("which", ["whole", "a ReLU"])
def test_hooks_are_kept(which: str) -> None:
    chain = find_chain(Network(hooked(which), ml.losses.cross_entropy))
    assert chain is None


def test_step_sizes_that_are_tensors() -> None:
    """Step sizes of shape (1,) and (), changed in place between two calls."""
    for rate in (torch.tensor([0.3], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)):
        program, _, params, support, query = work(conv_net(), lr=rate)
        program(params, support, query)
        rate.fill_(0.2)
        _, found = program(params, support, query)
        _, expected = work(conv_net(), lr=0.2)[0](params, support, query)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_learners_that_differ_are_asked_one_by_one() -> None:
    x = oracles.normal("turned", 6, 2, *SIZE)
    first, second = (seen(ml.FTL(conv_net, ml.losses.cross_entropy, inner_lr=lr), x) for lr in (0.01, 0.5))
    assert predict_together([first], [x], (1,)) is not None
    assert predict_together([first, second], [x, x], (1,)) is None, "their step sizes differ"
    assert predict_together([first, first], [x, x[:4]], (1,)) is None, "their rows differ"
    assert predict_together([first, ml.FTL(conv_net, ml.losses.cross_entropy)], [x, x], (1,)) is None, "one has no data"
    with pytest.raises(ValueError, match="steps must be integers of at least 0"):
        predict_together([first], [x], (-1,))


def test_a_failed_prediction_leaves_the_mode_as_it_is() -> None:
    engine = Engine("compiled")
    x = oracles.normal("turned", 6, 2, *SIZE)
    learner = seen(ml.FTML(conv_net, ml.losses.cross_entropy, engine=engine), x)
    with pytest.raises(RuntimeError):
        predict_together([learner], [x[:, :1]], (1,))
    assert engine.mode == "compiled"


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam])
def test_a_pickled_learner_goes_on(optimizer: Any) -> None:
    x = oracles.normal("turned", 6, 2, *SIZE)
    options: dict[str, Any] = {"support": 2, "query": 2, "tasks_per_step": 2, "optimizer": optimizer}
    first = seen(ml.FTML(conv_net(), ml.losses.cross_entropy, **options), x)
    first.update(1)
    again = pickle.loads(pickle.dumps(first))
    for learner in (first, again):
        learner.update(2)
    for name, value in first.params.items():
        assert torch.equal(again.params[name], value), name


def test_a_users_optimiser_may_replace_the_data_of_a_parameter() -> None:
    class Replacing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for value in group["params"]:
                    value.data = value.data - group["lr"] * value.grad

    x = oracles.normal("turned", 6, 2, *SIZE)
    ways = [Replacing, torch.optim.SGD]
    learners = [seen(ml.TOE(conv_net, ml.losses.cross_entropy, query=5, optimizer=way), x) for way in ways]
    for learner in learners:
        learner.update(4)
    for name, value in learners[1].params.items():
        torch.testing.assert_close(learners[0].params[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_the_state_of_another_optimiser_is_refused() -> None:
    x = oracles.normal("turned", 6, 2, *SIZE)
    adam, other = (
        seen(ml.TOE(conv_net, ml.losses.cross_entropy, query=3, optimizer=way), x) for way in ("adam", torch.optim.Adam)
    )
    adam.update(1)
    with pytest.raises(ValueError, match="belongs to another optimiser"):
        other.load_state_dict(adam.state_dict())


class Written(nn.Module):
    """A typical user-defined network: blocks in a list, functional activations, a view."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.features = nn.ModuleList([nn.Sequential(*block()[:2]), InnerBlock()])
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.classifier = nn.Linear(4 * 7 * 5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "choice" and x.sum() > 1e9:
            return x
        out = self.features[0](x)
        if self.kind == "skip":
            out = out + x.mean()
        out = self.features[1](F.relu(out))
        return self.classifier(self.scale * out.view(x.size(0) if self.kind else out.size(0), -1))


class InnerBlock(nn.Module):
    """The second block, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def deep() -> nn.Module:
    """Nested `nn.Sequential` blocks."""
    blocks = [nn.Sequential(*block()), nn.Sequential(nn.Conv2d(4, 4, 1), *block()[1:])]
    return nn.Sequential(nn.Sequential(*blocks), nn.Sequential(nn.Flatten(), nn.Linear(4 * 7 * 5, 3))).double()


WRITTEN: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a class": (lambda: Written().eval(), ["features.0.0.weight"]),
    "sequences within sequences": (deep, ["0.0.0.weight", "0.1.0.weight"]),
}


@pytest.mark.parametrize(("name", "compiled"), [(name, False) for name in WRITTEN] + [("a class", True)])
def test_a_users_own_network_is_a_chain_too(name: str, compiled: bool) -> None:
    """The leading blocks form the chain; the remaining operations are the head, which compiles."""
    build, weights = WRITTEN[name]
    program, objective, params, support, query = work(build(), compiled=compiled)
    assert [layer.weight for layer in program.chain.layers] == weights
    _, found = program(params, support, query)
    for r in range(2):
        own = {key: value[r] for key, value in params.items()}
        first = Batch(support.x[r], support.y[r]), Batch(query.x[r], query.y[r])
        for key, value in oracles.objective_gradient(objective, own, *first)[1].items():
            torch.testing.assert_close(found[key][r], value, rtol=1e-8, atol=1e-11, msg=key)


def block(groups: int = 1, stride: int | tuple[int, int] = 1) -> list[nn.Module]:
    return [nn.Conv2d(2, 4, 3, stride, groups=groups), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()]


def tied() -> nn.Module:
    conv, norm, relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()
    return nn.Sequential(*block(), conv, norm, relu, conv, norm, relu, nn.Flatten(), nn.LazyLinear(3))


NO_CHAIN: dict[str, Callable[[], nn.Module]] = {
    "no convolution": lambda: nn.Sequential(nn.Flatten(), nn.Linear(126, 3)),
    "something else first": lambda: nn.Sequential(nn.Identity(), *block(), nn.Flatten(), nn.LazyLinear(3)),
    "a branch at once": lambda: Written("skip").float(),
    "a choice by value": lambda: Written("choice").float(),
    "dropout": lambda: nn.Sequential(*block(), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(3)),
    "groups": lambda: nn.Sequential(*block(groups=2), nn.Flatten(), nn.LazyLinear(3)),
    "unequal strides": lambda: nn.Sequential(*block(stride=(1, 2)), nn.Flatten(), nn.LazyLinear(3)),
    "a layer used twice": tied,
    "no scale": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(3),
    ),
    "no batch norm": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
}  # fmt: skip


@pytest.mark.parametrize("model", NO_CHAIN.values(), ids=NO_CHAIN.keys())
def test_other_networks_are_no_chains(model: Callable[[], nn.Module]) -> None:
    module = model()
    module(torch.zeros(2, 2, *SIZE))
    assert find_chain(Network(module, ml.losses.cross_entropy)) is None


def test_a_users_blocks_are_found_and_the_rest_is_the_head() -> None:
    chain = find_chain(Network(conv_net(), ml.losses.cross_entropy))
    assert chain is not None
    assert [layer.weight for layer in chain.layers] == ["0.weight", "3.weight", "6.weight"]
    assert chain.silent == ("0.bias", "6.bias")
    assert chain.head_names[:2] == ["7.weight", "7.bias"]


def test_flat_parameters_come_back() -> None:
    program, _, params, _, _ = work(conv_net())
    plan = program.plan
    for name, value in plan.unflatten(plan.flatten(params)).items():
        assert torch.equal(value, params[name]), name


def learners(engine: Engine, device: torch.device, seeds: int, kind: Any = ml.FTML, **options: Any) -> list[ml.Learner]:
    found = []
    options |= {"query": 5, "tasks_per_step": 6} | ({"support": 5} if kind is ml.FTML else {})
    for seed in range(seeds):
        model = functools.partial(ml.models.conv_net, 3, 12, 3, filters=16, layers=3)
        loss = functools.partial(ml.losses.cross_entropy, smoothing=0.1)
        one = kind(model, loss, seed=seed, device=device, engine=engine, **options)
        for t in range(4):
            one.begin(f"task {t}")
            x = (oracles.normal(f"chain {seed} {t}", 12, 3, 12, 12, dtype=torch.float32) * 255).byte()
            one.observe(x, oracles.labels(f"chain {seed} {t}", 3, 12), update=False)
        found.append(one)
    return found


GPU: dict[str, dict[str, Any]] = {
    "two learners": {"seeds": 2},
    "one learner": {"seeds": 1},
    "last layer": {"seeds": 2, "only": "last"},
    "learned step sizes": {"seeds": 2, "learn_lr": True, "every_step": True},
    "toe": {"seeds": 1, "kind": ml.TOE},
    "from scratch": {
        "seeds": 2,
        "kind": ml.Scratch,
        "optimizer": "sgd",
        "clip": 0.05,
        "meta_lr": [(0, 0.01), (14, 0.003)],
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU.values(), ids=GPU.keys())
def test_gpu_runs_repeat_bit_for_bit_and_agree_with_the_cpu(options: dict[str, Any], cuda: torch.device) -> None:
    runs = []
    modes: list[tuple[Mode, torch.device]] = [("captured", cuda), ("captured", cuda), ("eager", cuda)]
    for mode, device in [*modes, ("eager", torch.device("cpu"))]:
        engine = Engine(mode, device=device)
        run = learners(engine, device, **options)
        plain = "kind" in options
        update_together(run, 13 if plain else 4)
        assert engine.mode == mode, "the engine fell back"
        if plain and mode == "captured":
            entries = engine._programs._programs.values()
            assert any(isinstance(getattr(entry.run, "_program", None), Updates) for entry in entries)
        runs.append(run)
    for first, again, eager, slow in zip(*runs, strict=True):
        value = first.state.flat
        torch.testing.assert_close(again.state.flat, value, rtol=0, atol=0)  # reports the difference on failure
        torch.testing.assert_close(eager.state.flat, value, rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(slow.state.flat, value.cpu(), rtol=1e-3, atol=2e-4)
