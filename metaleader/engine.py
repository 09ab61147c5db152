"""The engine room: how the gradient of an update is run: eagerly, compiled, or captured in a CUDA graph.

Whatever the mode, the gradient is that of `meta_gradient`. A network that begins with convolutions, batch norm and ReLU
is run as a chain (`chain`), on a GPU by kernels of its own; any other by `meta_gradient` itself, or by pieces of it
that went through torch.compile (`compiled`).

Learners of one shape run side by side: every tensor then has a leading replica dimension.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from metaleader.chain import Chain, ChainGradient, Plan, find_chain
from metaleader.compiled import CompiledGradient, check_curvature, compiling
from metaleader.inner import Params
from metaleader.network import Network
from metaleader.objective import Adaptation, Objective
from metaleader.passes import TorchPasses
from metaleader.precision import exact_convolutions
from metaleader.proof import agrees
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
        """Whether `updates` is the way: where nothing is adapted, one update is so short that its calls are longest."""
        return self.mode != "eager" and objective.inner_steps == 0

    @torch.no_grad()
    def updates(
        self,
        objective: Objective,
        steps: Callable[[dict[str, Tensor]], OuterSteps],
        tensors: dict[str, Tensor],
        lr: float,
        support: Any,
        query: Any,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Several updates of all learners, outer steps included, as one program.

        Args:
            objective: what they minimise.
            steps: makes the outer steps, which change tensors in place; one object for one kind of them.
            tensors: that they begin with; they stay as they are.
            lr: the outer step size.
            support: (replicas, updates, tasks, ...).
            query: likewise.

        Returns:
            The tensors after the updates; losses and norms of the gradients, (updates, 2, replicas).
        """

        def make() -> _Several:
            first, asked = tree_map(lambda leaf: leaf[:, 0], (support, query))
            return _Several(self._gradient_program(objective, tensors["flat"], first, asked, None), steps, lr)

        return self._run((objective, steps, lr), (tensors, support, query), make)

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
        leaves = _tensors(inputs)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (what, shapes, torch.backends.cuda.matmul.allow_tf32)
        on_device = torch.cuda.device(leaves[0].device) if leaves[0].is_cuda else contextlib.nullcontext()
        with exact_convolutions(), on_device:
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
        graph = _Captured(program, inputs, self._pool)
        return graph, graph(*inputs)

    def _gradient_program(
        self, objective: Objective, flat: Tensor, support: Any, query: Any, noise: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        size = _image_size(objective.network, tree_map(lambda leaf: leaf[0, 0], query.x))
        own = tree_map(lambda leaf: leaf[0], query)
        chain = self._chain(objective.network, own, size) if noise is None else None
        if chain is not None and size is not None:
            return _Flat(self._chain_gradient(chain, objective, flat, size), objective)
        if self.mode == "eager":
            return _Flat(_Eager(objective), objective)
        check_curvature(objective, objective.form.named(flat), support, noise)
        return _Flat(CompiledGradient(objective, self.keep_linearisations), objective)

    def _prediction_program(
        self,
        network: Network,
        adaptation: Adaptation | None,
        steps: Sequence[int],
        params: Params,
        data: Batch | ClassBatch | None,
    ) -> Callable[..., dict[str, Tensor]]:
        if adaptation is None or data is None:
            return _Predictions(network, adaptation, steps, None)
        size = _image_size(network, tree_map(lambda leaf: leaf[0], data.x))
        chain = self._chain(network, data, size)
        if chain is None or size is None:
            return _Predictions(network, adaptation, steps, None)
        objective = adaptation.objective(network, max(steps))
        weight = next(iter(params.values()))
        return _Predictions(network, adaptation, steps, self._chain_gradient(chain, objective, weight, size, False))

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
                from metaleader.kernels import TritonPasses

                passes = TritonPasses(Plan(chain.layers, size, 16)) if TritonPasses.takes(chain.layers) else passes
        return ChainGradient(chain, objective, passes, compiled, _KEPT_STEPS if self.keep_linearisations else 0)


class _Flat:
    """A program for gradients by name, as one for flat ones."""

    def __init__(self, program: Callable[..., tuple[Tensor, Params]], objective: Objective) -> None:
        self._program, self._form = program, objective.form

    def __call__(self, flat: Tensor, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        losses, gradients = self._program(self._form.named(flat), support, query, noise)
        found = self._form.flat(gradients)
        return torch.stack([losses, torch.linalg.vector_norm(found, dim=1)]), found


class OuterSteps(Protocol):
    """Outer steps that change tensors in place, the flat parameters among them."""

    flat: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that a step changes."""
        ...

    def descend(self, gradients: Tensor, norms: Tensor, lr: float) -> None:
        """Take one step down gradients of known norms."""
        ...


class _Several:
    """Several updates, one after the other."""

    def __init__(
        self,
        gradient: Callable[..., tuple[Tensor, Tensor]],
        steps: Callable[[dict[str, Tensor]], OuterSteps],
        lr: float,
    ) -> None:
        self._gradient, self._steps, self._lr = gradient, steps, lr

    def __call__(self, tensors: dict[str, Tensor], support: Any, query: Any) -> tuple[dict[str, Tensor], Tensor]:
        outer = self._steps({name: value.clone() for name, value in tensors.items()})
        watched = []
        for i in range(tree_leaves(query)[0].shape[1]):
            of_one = tree_map(lambda leaf: leaf[:, i], (support, query))  # noqa: B023
            found, gradients = self._gradient(outer.flat, *of_one, None)
            outer.descend(gradients, found[1], self._lr)
            watched.append(found)
        return outer.tensors, torch.stack(watched)


class _Eager:
    """The gradient by `meta_gradient`."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        if len(next(iter(params.values()))) == 1:
            first = lambda tree: tree_map(lambda leaf: leaf[0], tree)  # noqa: E731
            loss, gradient = self._objective.gradient(
                first(params), first(support), first(query), None if noise is None else noise[0]
            )
            return loss[None], {name: value[None] for name, value in gradient.items()}
        in_dims = (0, 0, 0, None if noise is None else 0)
        return vmap(self._objective.gradient, in_dims=in_dims)(params, support, query, noise)


class _Predictions:
    """Adapt each replica to its data and predict."""

    def __init__(
        self,
        network: Network,
        adaptation: Adaptation | None,
        steps: Sequence[int],
        chain: ChainGradient | None,
    ) -> None:
        self._network, self._adaptation, self._steps, self._chain = network, adaptation, steps, chain

    def __call__(
        self, params: Params, data: Batch | ClassBatch | None, x: Any, classes: Tensor | None
    ) -> dict[str, Tensor]:
        adapted = self._adapted(params, data)
        replicas = range(len(next(iter(params.values()))))
        at = lambda tree, r: tree_map(lambda leaf: leaf if leaf is None else leaf[r], tree)  # noqa: E731
        net = self._network
        found = {
            str(n): torch.stack([net.predict(at(adapted[n], r), at(x, r), None, at(classes, r)) for r in replicas])
            for n in self._steps
        }
        if net.has_batch_norm and data is not None:
            own = adapted[self._steps[0]]
            found["task"] = torch.stack(
                [net.predict_by(at(data.x, r), at(own, r), at(x, r), at(classes, r)) for r in replicas]
            )
        return found

    def _adapted(self, params: Params, data: Batch | ClassBatch | None) -> dict[int, Params]:
        if self._adaptation is None or data is None:
            return dict.fromkeys(self._steps, params)
        if self._chain is not None:
            return self._chain.adapted(params, data, self._steps)
        how, found, done = self._adaptation, {}, 0
        for number in sorted(set(self._steps)):
            walk = lambda p, d: how.walk(self._network.loss_fn, p, d, number - done)  # noqa: B023, E731
            params, done = vmap(walk)(params, data), number
            found[number] = params
        return found


class _Captured:
    """A program as one CUDA graph: inputs are copied in, outputs copied out."""

    def __init__(self, program: Callable[..., Any], inputs: tuple[Any, ...], pool: Any) -> None:
        given = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        static = _tensors(given)
        # Of one dtype at a time, or torch copies them one by one.
        dtypes = dict.fromkeys(leaf.dtype for leaf in static)
        self._groups = [[i for i, leaf in enumerate(static) if leaf.dtype == dtype] for dtype in dtypes]
        self._inputs = [[static[i] for i in group] for group in self._groups]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), compiling():
            for _ in range(2):
                program(*given)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool), compiling():
            outputs, self._out_form = tree_flatten(program(*given))
        self._outputs = outputs
        self._program = program

    def __call__(self, *inputs: Any) -> Any:
        leaves = _tensors(inputs)
        for held, group in zip(self._inputs, self._groups, strict=True):
            torch._foreach_copy_(held, [leaves[i] for i in group])  # pyright: ignore[reportPrivateImportUsage]
        self._graph.replay()
        copies = torch._foreach_mul(self._outputs, 1)  # pyright: ignore[reportPrivateImportUsage]
        return tree_unflatten(list(copies), self._out_form)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested dicts, by name, and tuples; written out, since torch's own takes as long as an update."""
    if isinstance(tree, Tensor):
        return [tree]
    by_name = (tree[name] for name in sorted(tree)) if isinstance(tree, dict) else ()
    parts = tree if isinstance(tree, tuple | list) else by_name
    if not isinstance(tree, dict | tuple | list):
        return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    return [leaf for part in parts for leaf in _tensors(part)]


def _image_size(network: Network, x: Any) -> tuple[int, int] | None:
    """The height and width of one task's images as the network sees them; None where they are no images."""
    seen = network.preprocess(x)
    return (seen.shape[2], seen.shape[3]) if isinstance(seen, Tensor) and seen.ndim == 4 else None
