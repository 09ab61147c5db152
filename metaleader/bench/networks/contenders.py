"""The implementations to compare: the learner in each mode of the engine, torch.func, torchopt, higher.

All do the same work: exact second-order meta-gradient and a step of Adam. The others get their datapoints gathered;
the learner also draws and gathers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable
from typing import Any, Protocol, get_args

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from metaleader.bench.networks.cases import Case, Inputs
from metaleader.bench.peers import higher_gradient, torchopt_gradient
from metaleader.bench.timing import wait
from metaleader.engine.engine import Engine, Mode
from metaleader.gradient.selection import Params
from metaleader.learners import FTML
from metaleader.learners.together import state_after
from metaleader.learners.update import Gathered, gather_updates
from metaleader.tasks import Batch, to_device

META_LR = 1e-3
# What `--peers` selects by name: the implementations of each. The name of one of these selects that alone.
PEERS = {
    "jax": ("jax-loop", "jax-scan", "jax-grouped"),
    "torch-func": ("torch-func-eager", "torch-func-compiled"),
    "torchopt": ("torchopt",),
    "higher": ("higher",),
}
PACKAGES = {"jax": "jax", "torchopt": "torchopt", "higher": "higher"}


class Contender(Protocol):
    """One implementation of updates of one network.

    Attributes:
        first_updates: the number of updates of the first call; later calls have as many, or ten if an update is short.
        fixed_tasks: whether `gradient` needs as many tasks as an update.
    """

    first_updates: int
    fixed_tasks: bool

    def update(self, updates: int) -> None:
        """Take updates, and wait for the device."""
        ...

    def gradient(self, support: Batch, query: Batch) -> dict[str, Any]:
        """The mean gradient over tasks at the initial parameters, by name."""
        ...

    def notes(self) -> dict[str, Any]:
        """Facts about what ran, known after the first update."""
        ...

    def device_memory(self) -> int | None:
        """Bytes that the implementation held at most on the GPU; None on the CPU."""
        ...


def modes() -> list[str]:
    """The engine's modes, without the one that chooses."""
    return [mode for mode in get_args(Mode) if mode != "auto"]


def build(cell: str, name: str, case: Case, inputs: Inputs, device: torch.device) -> Contender:
    """Build an implementation by the name of its cell.

    Raises:
        ImportError: if a package is not installed.
    """
    package = PACKAGES.get(cell.partition("-")[0])
    if package is not None:
        importlib.import_module(package)
    if package == "jax":
        from metaleader.bench.networks.jax_peer import JaxPeer

        convolution = "grouped" if cell == "jax-grouped" else "im2col"
        return JaxPeer(name, case, inputs, device, convolution, scan=cell == "jax-scan")
    if cell.startswith("ours-"):
        return Ours(cell.removeprefix("ours-"), case, inputs, device)
    if cell.startswith("torch-func"):
        return TorchFunc(case, inputs, device, cell.endswith("compiled"))
    return LoopPeer({"torchopt": torchopt_gradient, "higher": higher_gradient}[cell], case, inputs, device)


def version(cell: str) -> str | None:
    """The version of the package behind a cell, if it is not torch or this one."""
    package = PACKAGES.get(cell.partition("-")[0])
    return importlib.metadata.version(package) if package else None


class _OnTorch:
    """What implementations on torch share."""

    first_updates = 1
    fixed_tasks = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.zeros(1, device=device)  # creates the context

    def notes(self) -> dict[str, Any]:
        """Nothing to note."""
        return {}

    def device_memory(self) -> int | None:
        """The peak of torch's allocator."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


class Ours(_OnTorch):
    """The learner of this project, through its public methods."""

    def __init__(self, mode: Any, case: Case, inputs: Inputs, device: torch.device) -> None:
        super().__init__(device)
        self.mode = mode
        # As many updates as the default of a reveal: several may be one program.
        self.first_updates = 1 if mode == "eager" else 10
        self.initial = to_device(inputs.params, device)
        self.gathered: Gathered | None = None
        self.log = _Messages()
        logging.getLogger("metaleader").addHandler(self.log)
        self.engine = Engine(mode, planned_updates=10**6, device=device)
        self.learner = FTML(
            case.model,
            case.loss,
            inner_lr=case.inner_lr,
            inner_steps=case.inner_steps,
            meta_lr=META_LR,
            tasks_per_step=case.tasks,
            support=case.support,
            query=case.query,
            device=device,
            engine=self.engine,  # pyright: ignore[reportArgumentType]
        )
        for t in range(case.tasks + 5):
            self.learner.begin(f"task {t}")
            self.learner.observe(*case.datapoints(2 * (case.support + case.query), 1, t), update=False)

    def update(self, updates: int) -> None:
        """Draw, gather, take gradient steps of the initialisation."""
        self.learner.update(updates)
        wait(self.device)

    def update_gathered(self, updates: int) -> None:
        """Updates from datapoints that were gathered before, as those of the other implementations."""
        learner = self.learner
        if self.gathered is None:
            self.gathered = gather_updates(learner, updates)
            assert self.gathered is not None
        learner.state = state_after(learner, learner.state, updates, self.gathered)
        wait(self.device)

    def gradient(self, support: Batch, query: Batch) -> dict[str, Any]:
        """The gradient by the engine, for one learner."""
        objective, form = self.learner.definition.objective, self.learner.state.form
        objective = objective if form is None else objective.in_form(form)
        one_learner = {name: self.initial[name][None] for name in self.learner.params}
        batches = [Batch(batch.x[None], batch.y[None]) for batch in (support, query)]
        flat = objective.layout.flat(one_learner)
        gradients = objective.layout.named(self.engine.gradient(objective, flat, batches[0], batches[1], None)[1])
        return {name: value[0] for name, value in gradients.items()}

    def notes(self) -> dict[str, Any]:
        """The mode in use, and the messages of the engine."""
        fallback = {"fell_back": True} if self.engine.mode != self.mode else {}
        return {"ran": self.engine.mode, **fallback, **({"log": self.log.lines} if self.log.lines else {})}


class _Messages(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:300])


class _Peer(_OnTorch):
    """An implementation on torch with fused Adam; the gradient is a function of (support, query)."""

    def __init__(self, leaves: Params, inputs: Inputs, device: torch.device) -> None:
        super().__init__(device)
        self.leaves = leaves
        self.initial = to_device(inputs.params, device)
        self.batches = to_device((inputs.support, inputs.query), device)
        self.optimizer = torch.optim.Adam(leaves.values(), lr=META_LR, fused=True)

    def compute(self, support: Batch, query: Batch) -> Params:
        """The gradient at the current parameters."""
        raise NotImplementedError

    def update(self, updates: int) -> None:
        for _ in range(updates):
            for name, value in self.compute(*self.batches).items():
                self.leaves[name].grad = value
            self.optimizer.step()
        wait(self.device)

    def gradient(self, support: Batch, query: Batch) -> dict[str, Any]:
        with torch.no_grad():
            for name, value in self.leaves.items():
                value.copy_(self.initial[name])
        return dict(self.compute(support, query))


class TorchFunc(_Peer):
    """The obvious lines of torch.func, optionally in one torch.compile."""

    def __init__(self, case: Case, inputs: Inputs, device: torch.device, compiled: bool) -> None:
        leaves = {name: value.to(device).clone() for name, value in inputs.params.items()}
        super().__init__(leaves, inputs, device)
        module = case.elementary.model().to(device)

        def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
            return case.loss(functional_call(module, params, (x,)), y).mean()

        def adapted_loss(params: Params, *batch: Tensor) -> Tensor:
            for _ in range(case.inner_steps):
                gradient = grad(loss)(params, *batch[:2])
                params = {name: value - case.inner_lr * gradient[name] for name, value in params.items()}
            return loss(params, *batch[2:])

        def meta_loss(params: Params, *batches: Tensor) -> Tensor:
            return vmap(adapted_loss, (None, 0, 0, 0, 0))(params, *batches).mean()

        self.compiled = compiled
        self._gradient: Callable[..., Params] = torch.compile(grad(meta_loss)) if compiled else grad(meta_loss)

    def notes(self) -> dict[str, Any]:
        """The number of graph breaks: after one, a part runs eagerly."""
        if not self.compiled:
            return {}
        import torch._dynamo.utils

        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        return {"graph_breaks": breaks} if breaks else {}

    def compute(self, support: Batch, query: Batch) -> Params:
        """The gradient of the mean loss; fused attention has no second derivative."""
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._gradient(self.leaves, *support, *query)


class LoopPeer(_Peer):
    """A library that takes one task at a time: its gradient function of (case, module, support, query)."""

    fixed_tasks = False

    def __init__(self, function: Callable[..., Params], case: Case, inputs: Inputs, device: torch.device) -> None:
        self.case = case.elementary
        self.module = self.case.model()
        self.module.load_state_dict(inputs.params)
        self.module.to(device)
        super().__init__(dict(self.module.named_parameters()), inputs, device)
        self.function = function

    def compute(self, support: Batch, query: Batch) -> Params:
        """The sum over tasks of their gradients."""
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.function(self.case, self.module, support, query)
