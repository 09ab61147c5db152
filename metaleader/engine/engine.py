"""The engine: runs gradients and predictions eagerly, compiled, or as a CUDA graph.

The gradient is that of `meta_gradient` in every mode. A network that begins with convolutions, batch norm and ReLU runs
as a chain (`engine.conv`), on a GPU by kernels written for it. Other networks run eagerly, or by functions compiled
with torch.compile (`engine.compiled`). On a GPU, either is replayed as one CUDA graph (`engine.cuda_graph`).

Learners of one shape run side by side: every tensor has a leading learner dimension.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from metaleader.engine.cache import Mode, ProgramCache, shapes_of
from metaleader.engine.cpp_source import has_compiler
from metaleader.engine.hook import HookGradient, OwnGradient
from metaleader.engine.objective import Adaptation, GradientSteps, Objective, learned_rates, over_learners
from metaleader.engine.programs import (
    Chains,
    FlatGradient,
    Gradient,
    OuterStep,
    Perceptrons,
    Updates,
    compiled_gradient,
)
from metaleader.engine.selfcheck import check_compiled
from metaleader.engine.whole import WholeProgram, has_few_operations, is_whole
from metaleader.gradient.meta import descend
from metaleader.gradient.selection import Params
from metaleader.gradient.unrolled import TooLargeError
from metaleader.nets.functional import Network
from metaleader.system.text import short_text
from metaleader.tasks import Batch, ClassBatch, tensors_of

_log = logging.getLogger("metaleader")
# Below these numbers of planned updates, compiling takes longer than it saves. On the CPU, a network as small as an MLP
# takes 16 s to compile and saves 7 ms per update; larger networks pay earlier, a GRU from 1,000 and a ViT from 50
# updates. On a GPU, compiling saves 6 ms per update of a transformer already replayed as a CUDA graph and takes 68 s;
# 16 ms of a GRU, and 136 s.
_WORTH_COMPILING = {"cpu": 2000, "cuda": 10_000}
# On the CPU, the kernel of a multilayer perceptron takes a second to compile and saves 7 ms per update.
_WORTH_KERNELS = 200
# The number of calls of `observe` by which a learner in a user's own loop estimates its number of updates
_ASSUMED_OBSERVES = 50
# The number of gradients kept for programs of several updates
_MAX_GRADIENTS = 256


class Engine:
    """Runs the gradients and predictions of learners of one shape.

    Args:
        mode: "eager"; "graphed", eager operations replayed as a CUDA graph; "compiled" with torch.compile; "captured",
            compiled and replayed as a CUDA graph; or "auto": the fastest mode that pays off for the planned number of
            updates.
        planned_updates: the number of updates that "auto" decides by.
        device: where the learners are.

    Attributes:
        mode: the mode in use; a network that does not compile falls back to "graphed" or "eager", with a message.
    """

    def __init__(self, mode: Mode = "auto", planned_updates: int = 0, device: torch.device | str = "cpu") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"engine must be one of {', '.join(get_args(Mode))}; got {mode!r}")
        kind = torch.device(device).type
        # The number of planned updates while "auto" may change from eager to compiled, else 0; see `settle`
        self._planned = 0
        if mode in ("graphed", "captured") and kind != "cuda":
            raise ValueError(f"engine {mode!r} needs a CUDA device, got {device}; use 'compiled'")
        if mode == "auto":
            pays = planned_updates >= _WORTH_COMPILING.get(kind, 10**9)
            on_gpu = kind == "cuda"
            mode = ("captured" if on_gpu else "compiled") if pays else ("graphed" if on_gpu else "eager")
            threshold = _WORTH_COMPILING.get(kind)
            reason = f"compiling pays from {threshold}" if threshold else f"compiling on {kind} was never measured"
            _log.info("engine mode %s: about %d updates on %s, %s", mode, planned_updates, kind, reason)
            self._planned = planned_updates if kind == "cpu" and mode == "eager" else 0
        self._device, self._programs = torch.device(device), ProgramCache(mode)
        self._gradients: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {}
        self._chains, self._perceptrons = Chains(), Perceptrons()

    @property
    def mode(self) -> Mode:
        """The mode in use."""
        return self._programs.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._programs.mode = mode

    def __reduce__(self) -> tuple[type[Engine], tuple[Any, ...]]:
        # Copies and pickles build their programs anew: CUDA graphs and compiled code cannot be copied.
        return Engine, ("auto" if self._planned else self.mode, self._planned, self._device)

    def settle(self, objective: Objective, rows: int) -> None:
        """With mode "auto" on the CPU, choose "compiled" if the network has a kernel, which compiles in a second.

        Args:
            objective: the loss that will be minimised.
            rows: the largest number of datapoints of a support or query set.
        """
        planned, self._planned = self._planned, 0
        if planned >= _WORTH_KERNELS and self._perceptrons.has_kernel(objective, rows) and has_compiler():
            self.mode = "compiled"
            _log.info(
                "engine mode compiled: the kernel of a multilayer perceptron pays from %d updates", _WORTH_KERNELS
            )

    @torch.no_grad()
    def gradient(
        self, objective: Objective, flat: Tensor, support: Any, query: Any, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Losses and gradient norms, (2, learners), and flat gradients, (learners, number of parameters).

        Args:
            objective: the loss to differentiate.
            flat: the parameters, (learners, number of parameters).
            support: (learners, tasks, ...).
            query: (learners, tasks, ...).
            noise: dropout seeds, (learners, inner steps + 1, tasks), or None.
        """
        inputs = (flat, support, query, noise)
        own = objective.own_gradient
        what = (objective, own.shared, own.values()) if isinstance(own, OwnGradient) else objective
        make = functools.partial(self._gradient_program, objective, *inputs)
        return self._programs.run(what, inputs, make, eager=_is_eager(objective))

    def runs_updates_together(self, objective: Objective) -> bool:
        """Whether `updates` applies: not in eager mode, nor for gradients written by a user.

        As CUDA graphs, only updates of few operations, or without inner steps, whose calls take as long as their
        arithmetic: a graph of several large ones takes long to capture.
        """
        if self.mode == "eager" or objective.task_gradient is not None:
            return False
        return self.mode == "compiled" or objective.inner.steps == 0 or has_few_operations(objective)

    @torch.no_grad()
    def updates(
        self,
        objective: Objective,
        outer: Callable[[dict[str, Tensor]], OuterStep],
        tensors: dict[str, Tensor],
        lrs: Tensor,
        support: Any,
        query: Any,
        noise: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Several updates of all learners as one program, the optimiser's steps included.

        The bits do not depend on the number of updates of a call.

        Args:
            objective: the loss to minimise.
            outer: builds the optimiser, which changes tensors in place; the same object for the same kind.
            tensors: the initial tensors of the optimiser; left unchanged.
            lrs: the outer step sizes, (updates,).
            support: (updates, learners, tasks, ...).
            query: (updates, learners, tasks, ...).
            noise: dropout seeds, (updates, learners, inner steps + 1, tasks), or None.

        Returns:
            The tensors after the updates; losses and gradient norms, (updates, 2, learners).
        """

        def make() -> Updates:
            batches = tree_map(lambda leaf: leaf if leaf is None else leaf[0], (support, query, noise))
            return Updates(self._shared_gradient(objective, tensors["flat"], *batches), outer)

        return self._programs.run((objective, outer), (tensors, lrs, support, query, noise), make)

    @torch.no_grad()
    def predictions(
        self,
        network: Network,
        adaptation: Adaptation | GradientSteps | None,
        steps: Sequence[int],
        params: Params,
        data: Batch | ClassBatch | None,
        x: Any,
        classes: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The predictions of adapted learners for x, by number of adaptation steps; for networks without dropout.

        With batch norm, "task" is the prediction after the first number of steps with the statistics of the data. Every
        tensor has a leading learner dimension.
        """
        inputs, steps = (params, data, x, classes), tuple(steps)

        def make() -> Callable[..., dict[str, Tensor]]:
            adapted = None
            if isinstance(adaptation, Adaptation) and data is not None:
                adapted = functools.partial(_adapted_otherwise, network, adaptation)
            elif isinstance(adaptation, GradientSteps) and data is not None:
                objective = adaptation.objective(network, max(steps))
                chain = self._chains.gradient(objective, next(iter(params.values())), data, False)
                rates = None if adaptation.lr is None else adaptation.rates(params)
                adapted = functools.partial(_adapted, network, rates) if chain is None else chain.adapted
            return functools.partial(_predictions, network, adapted, steps)

        return self._programs.run((network, adaptation, steps), inputs, make, predicts=True)

    def _shared_gradient(self, objective: Objective, *inputs: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """The gradient of one update, built once for all numbers of updates."""
        key = (objective, self.mode, shapes_of(tensors_of(inputs)), torch.backends.cuda.matmul.allow_tf32)
        if key not in self._gradients:
            if len(self._gradients) >= _MAX_GRADIENTS:
                del self._gradients[next(iter(self._gradients))]
            self._gradients[key] = self._gradient_program(objective, *inputs)
        return self._gradients[key]

    def _gradient_program(
        self, objective: Objective, flat: Tensor, support: Any, query: Any, noise: Tensor | None
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        compiled = self.mode in ("compiled", "captured") and not _is_eager(objective)
        if objective.task_gradient is not None:
            params = objective.layout.named(flat)
            return functools.partial(
                _flat_gradient, objective, HookGradient(objective, compiled, params, support, query)
            )
        if noise is None and (flat.is_cuda or self.mode == "compiled"):
            dense = self._perceptrons.gradient(objective, flat, support, query)
            if dense is not None:
                return dense
        eager = functools.partial(_flat_gradient, objective, eager_gradient(objective))

        def checked(program: FlatGradient) -> FlatGradient:
            if noise is None and not torch.backends.cuda.matmul.allow_tf32:
                check_compiled(program, eager, flat, support, query)
            return program

        program: Gradient | None = None
        if noise is None:
            program = self._chains.gradient(objective, flat, tree_map(lambda leaf: leaf[0], query), compiled)
        if program is None and compiled and is_whole(objective, flat.device):
            try:
                return checked(WholeProgram(eager, (flat, support, query, noise)))
            except Exception as error:  # torch 2.13 cannot record the second derivative of l1_loss, for one
                _log.info("the gradient does not compile as one program; compiling it in pieces: %s", short_text(error))
        if program is None and compiled:
            in_pieces = compiled_gradient(objective, flat, support, noise)
            return checked(functools.partial(_flat_gradient, objective, in_pieces))
        return eager if program is None else functools.partial(_flat_gradient, objective, program)


def engine_of(engine: Mode | Engine, meta_steps: int, device: torch.device, objective: Objective, rows: int) -> Engine:
    """An engine in a mode, for a learner that makes `meta_steps` updates at each `observe`; engines are returned."""
    engine = engine if isinstance(engine, Engine) else Engine(engine, _ASSUMED_OBSERVES * meta_steps, device)
    engine.settle(objective, rows)
    return engine


def _is_eager(objective: Objective) -> bool:
    """Whether the gradient reads the state of its learner, which a compiled program would not see change."""
    return isinstance(objective.own_gradient, OwnGradient) and not objective.own_gradient.shared


def _flat_gradient(
    objective: Objective, gradient: Gradient, flat: Tensor, support: Any, query: Any, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    losses, gradients = gradient(objective.layout.named(flat), support, query, noise)
    flat_gradients = objective.layout.flat(gradients)
    return torch.stack([losses, torch.linalg.vector_norm(flat_gradients, dim=1)]), flat_gradients


def eager_gradient(objective: Objective) -> Gradient:
    """The gradient in plain operations, batched over tasks and learners."""

    def all_learners(params: Params, support: Any, query: Any, noise: Tensor | None) -> tuple[Tensor, Params]:
        if len(next(iter(params.values()))) > 1 and objective.inner.unroll is not False:
            with contextlib.suppress(TooLargeError):
                return objective.mean_over_tasks(params, support, query, noise, side_by_side=True)
        return over_learners(objective.mean_over_tasks, params, support, query, noise)

    return all_learners


def _adapted(
    network: Network,
    rates: dict[str, float | Tensor] | None,
    params: Params,
    data: Batch | ClassBatch,
    steps: Sequence[int],
) -> dict[int, Params]:
    """The parameters after each of these numbers of adaptation steps; rates are None where they are learned."""

    def run(params: Params, data: Batch | ClassBatch, numbers: range) -> Params:
        return descend(network.loss_fn, params, learned_rates(params) if rates is None else rates, data, numbers)

    result, done = {}, 0
    for number in sorted(set(steps)):
        params, done = vmap(functools.partial(run, numbers=range(done, number)))(params, data), number
        result[number] = params
    return result


def _adapted_otherwise(
    network: Network, adaptation: Adaptation, params: Params, data: Batch | ClassBatch, steps: Sequence[int]
) -> dict[int, Params]:
    """The parameters before and after an adaptation that has no steps: any number of steps above 0 is the whole."""
    after = params | vmap(lambda params, data: adaptation(network, params, data))(params, data)
    return {number: after if number else params for number in steps}


def _predictions(
    network: Network,
    adapted: Callable[..., dict[int, Params]] | None,
    steps: Sequence[int],
    params: Params,
    data: Batch | ClassBatch | None,
    x: Any,
    classes: Tensor | None,
) -> dict[str, Tensor]:
    """Adapt each learner to its data and predict."""
    by_steps = dict.fromkeys(steps, params) if adapted is None else adapted(params, data, steps)
    learners = range(len(next(iter(params.values()))))
    at = lambda tree, r: tree_map(lambda leaf: leaf if leaf is None else leaf[r], tree)  # noqa: E731
    result = {
        str(n): torch.stack([network.predict(at(by_steps[n], r), at(x, r), None, at(classes, r)) for r in learners])
        for n in steps
    }
    if network.has_batch_norm and data is not None:
        first = by_steps[steps[0]]
        predict = network.predict_with_statistics_of
        result["task"] = torch.stack([predict(at(data.x, r), at(first, r), at(x, r), at(classes, r)) for r in learners])
    return result
