"""The engine room: how the gradient of an update is run: eagerly, compiled, or captured in a CUDA graph.

Whatever the mode, the gradient is that of `meta_gradient`. A network that begins with convolutions, batch norm and ReLU
is run as a chain (`chain`), on a GPU by kernels of its own; any other by `meta_gradient` itself, or by pieces of it
that went through torch.compile (`compiled`). Around a gradient are the programs of `programs`, and for a CUDA graph
`captured`.

Learners of one shape run side by side: every tensor then has a leading replica dimension.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.engine.compiled import CompiledGradient, check_curvature
from metaleader.engine.conv.gradient import ChainGradient
from metaleader.engine.conv.layout import Plan
from metaleader.engine.conv.selfcheck import agrees
from metaleader.engine.conv.torch_ops import TorchPasses
from metaleader.engine.conv.trace import Chain, find_chain
from metaleader.engine.cuda_graph import Captured, tensors_of
from metaleader.engine.determinism import repeatable
from metaleader.engine.objective import Adaptation, Objective
from metaleader.engine.programs import EagerGradient, FlatGradient, OuterSteps, Predictions, SeveralUpdates
from metaleader.gradient.inner import Params
from metaleader.nets.functional import Network
from metaleader.tasks import Batch, ClassBatch

Mode = Literal["auto", "eager", "compiled", "captured"]

_log = logging.getLogger("metaleader")
# Below these numbers of planned updates, compiling takes longer than it saves. On the CPU, Rainbow's program takes 40 s
# to compile and saves that in a few hundred updates; smaller networks save less, and other shapes compile again.
_WORTH_COMPILING = {"cpu": 3000, "cuda": 300}
# Programs that are held; each size of D_t has one of its own.
_PROGRAMS = 256
# Inner steps whose passes a chain keeps; with more of them it computes all anew, to bound the memory.
_KEPT_STEPS = 5


class Engine:
    """Runs the gradients of one or more learners of one shape, and their predictions.

    Args:
        mode: "eager"; "compiled" with torch.compile; "captured", compiled and replayed as a CUDA graph; or "auto": the
            fastest that pays for the planned number of updates.
        planned_updates: what "auto" decides by.
        keep_linearisations: False computes each inner step's activations anew for its adjoint step: slower, but memory
            no longer grows with them.

    Attributes:
        mode: the mode in use; a network that does not compile falls back to "eager", with a message.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        planned_updates: int = 0,
        device: torch.device | str = "cpu",
        keep_linearisations: bool = True,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"engine must be one of {', '.join(get_args(Mode))}; got {mode!r}")
        kind = torch.device(device).type
        if mode == "captured" and kind != "cuda":
            raise ValueError(f"engine 'captured' needs a CUDA device, got {device}; use 'compiled'")
        if mode == "auto":
            pays = planned_updates >= _WORTH_COMPILING.get(kind, 10**9)
            mode = ("captured" if kind == "cuda" else "compiled") if pays else "eager"
        self.mode: Mode = mode
        self.keep_linearisations = keep_linearisations
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._chains: dict[Network, Chain | None] = {}
        self._pool: Any = None

    @torch.no_grad()
    def gradient(
        self, objective: Objective, params: Params, support: Any, query: Any, noise: Tensor | None
    ) -> tuple[Tensor, Params]:
        """Losses (replicas,) and gradients of all learners; every tensor has a leading replica dimension.

        Noise is (replicas, inner_steps + 1, tasks).
        """
        form = objective.form
        watched, gradients = self.flat_gradient(objective, form.flat(params), support, query, noise)
        return watched[0], form.named(gradients)

    @torch.no_grad()
    def flat_gradient(
        self, objective: Objective, flat: Tensor, support: Any, query: Any, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same with parameters and gradients flat, (replicas, number of parameters).

        Before the gradients come losses and norms of the gradients, (2, replicas), for whoever watches over them.
        """
        inputs = (flat, support, query, noise)
        return self._run(objective, inputs, lambda: self._gradient_program(objective, *inputs))

    def takes_several(self, objective: Objective) -> bool:
        """Whether `updates` is the way: where nothing is adapted, one update is so short that its calls are longest.

        Dropout's masks are drawn update by update.
        """
        return self.mode != "eager" and objective.inner_steps == 0 and not objective.network.has_dropout

    @torch.no_grad()
    def updates(
        self,
        objective: Objective,
        steps: Callable[[dict[str, Tensor]], OuterSteps],
        tensors: dict[str, Tensor],
        rates: Tensor,
        support: Any,
        query: Any,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Several updates of all learners, outer steps included, as one program.

        Args:
            objective: what they minimise.
            steps: makes the outer steps, which change tensors in place; one object for one kind of them.
            tensors: that they begin with; they stay as they are.
            rates: the outer step sizes, (updates,).
            support: (updates, replicas, tasks, ...).
            query: likewise.

        Returns:
            The tensors after the updates; losses and norms of the gradients, (updates, 2, replicas).
        """

        def make() -> SeveralUpdates:
            first, asked = tree_map(lambda leaf: leaf[0], (support, query))
            return SeveralUpdates(self._gradient_program(objective, tensors["flat"], first, asked, None), steps)

        return self._run((objective, steps), (tensors, rates, support, query), make)

    @torch.no_grad()
    def predictions(
        self,
        network: Network,
        adaptation: Adaptation | None,
        steps: Sequence[int],
        params: Params,
        data: Batch | ClassBatch | None,
        x: Any,
        classes: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """What the adapted learners predict for x, by numbers of adaptation steps; of networks without dropout.

        With batch norm, "task" is the prediction after the first number of steps by the statistics of the data. Every
        tensor has a leading replica dimension.
        """
        steps = tuple(steps)
        inputs = (params, data, x, classes)
        return self._run(
            (network, adaptation and adaptation.key(), steps),
            inputs,
            lambda: self._prediction_program(network, adaptation, steps, params, data),
            decides=False,
        )

    def _run(
        self, what: Any, inputs: tuple[Any, ...], make: Callable[[], Callable[..., Any]], decides: bool = True
    ) -> Any:
        """Run the program for inputs of such shapes, made at the first call; one that decides and fails is the last."""
        leaves = tensors_of(inputs)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (what, shapes, torch.backends.cuda.matmul.allow_tf32)
        on_device = torch.cuda.device(leaves[0].device) if leaves[0].is_cuda else contextlib.nullcontext()
        with repeatable(), on_device:
            program = self._programs.pop(key, None)
            result = None
            if program is None and self.mode == "eager":
                program = make()
            elif program is None:
                try:
                    program, result = self._started(make(), inputs)
                except Exception as error:
                    reason = " ".join(str(error).split())[:300] or type(error).__name__
                    _log.warning("the network does not compile, going on eagerly: %s", reason)
                    self.mode = "eager" if decides else self.mode
                    program = make()
            # The one used last goes last: the first is the one to forget.
            self._programs[key] = program
            if len(self._programs) > _PROGRAMS:
                del self._programs[next(iter(self._programs))]
            return program(*inputs) if result is None else result

    def _started(self, program: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Callable[..., Any], Any]:
        """A program that has run once, as a graph where that is the mode, and what it gave."""
        if self.mode != "captured":
            return program, program(*inputs)
        # One pool for all graphs: they run one at a time, and what they return is copied.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = Captured(program, inputs, self._pool)
        return graph, graph(*inputs)

    def _gradient_program(
        self, objective: Objective, flat: Tensor, support: Any, query: Any, noise: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        size = _image_size(objective.network, tree_map(lambda leaf: leaf[0, 0], query.x))
        own = tree_map(lambda leaf: leaf[0], query)
        chain = self._chain(objective.network, own, size) if noise is None else None
        if chain is not None and size is not None:
            return FlatGradient(self._chain_gradient(chain, objective, flat, size), objective)
        if self.mode == "eager":
            return FlatGradient(EagerGradient(objective), objective)
        check_curvature(objective, objective.form.named(flat), support, noise)
        return FlatGradient(CompiledGradient(objective, self.keep_linearisations), objective)

    def _prediction_program(
        self,
        network: Network,
        adaptation: Adaptation | None,
        steps: Sequence[int],
        params: Params,
        data: Batch | ClassBatch | None,
    ) -> Callable[..., dict[str, Tensor]]:
        if adaptation is None or data is None:
            return Predictions(network, adaptation, steps, None)
        size = _image_size(network, tree_map(lambda leaf: leaf[0], data.x))
        chain = self._chain(network, data, size)
        if chain is None or size is None:
            return Predictions(network, adaptation, steps, None)
        objective = adaptation.objective(network, max(steps))
        weight = next(iter(params.values()))
        return Predictions(network, adaptation, steps, self._chain_gradient(chain, objective, weight, size, False))

    def _chain(self, network: Network, batch: Batch | ClassBatch, size: tuple[int, int] | None) -> Chain | None:
        """The network as a chain, if it is one; a batch of it, (tasks, rows, ...), has shown so."""
        if network not in self._chains:
            chain = find_chain(network) if size is not None else None
            trusted = chain is not None and size is not None and agrees(chain, batch, size)
            self._chains[network] = chain if trusted else None
        return self._chains[network]

    def _chain_gradient(
        self, chain: Chain, objective: Objective, weight: Tensor, size: tuple[int, int], compiled: bool = True
    ) -> ChainGradient:
        compiled = compiled and self.mode != "eager"
        passes = TorchPasses(Plan(chain.layers, size), compiled and not weight.is_cuda)
        if weight.is_cuda and weight.dtype == torch.float32:
            with contextlib.suppress(ImportError):  # Triton comes with torch on Linux only
                from metaleader.engine.conv.triton import TritonPasses

                passes = TritonPasses(Plan(chain.layers, size, 16)) if TritonPasses.takes(chain.layers) else passes
        return ChainGradient(chain, objective, passes, compiled, _KEPT_STEPS if self.keep_linearisations else 0)


def _image_size(network: Network, x: Any) -> tuple[int, int] | None:
    """The height and width of one task's images as the network sees them; None where they are no images."""
    seen = network.preprocess(x)
    return (seen.shape[2], seen.shape[3]) if isinstance(seen, Tensor) and seen.ndim == 4 else None
