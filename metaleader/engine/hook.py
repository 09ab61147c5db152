"""The gradient of learners with a `task_gradient`: that of a user, or of an `Adaptation`."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.compiled import compile_whole, compiling
from metaleader.engine.objective import Objective, over_learners
from metaleader.gradient.attention import plain_attention
from metaleader.gradient.meta import sum_over_chunks
from metaleader.gradient.selection import Params
from metaleader.system.settings import keeps_settings

_log = logging.getLogger("metaleader")

# Attributes that learners side by side have in common and that never change
_COMMON = ("network", "loss", "device", "definition")
# Attributes that every learner has of its own
_STATE = ("options", "model", "memory", "engine", "rule", "state", "round", "task", *_COMMON)


class StateReadError(Exception):
    """A `task_gradient` used an attribute that may differ between learners side by side, or change later."""


class HookError(ValueError):
    """A `task_gradient` failed, or returned something else than a loss and gradients."""


class OwnGradient:
    """A learner's own `task_gradient`, for one learner or for learners side by side.

    One call serves all learners side by side, and a compiled or captured program repeats the values that it was built
    with. Therefore the method is called on a stand-in for the learner, whose only attributes are the settings and other
    plain values that do not change. If the method uses another attribute, it is called on its own learner from then on:
    eagerly and one learner at a time.

    Args:
        learner: has the method.

    Attributes:
        name: for messages.
        shared: whether the method is called on a stand-in.
    """

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self._first: dict[str, str] = {}  # the first value of each attribute
        self.name = f"{type(learner).__name__}.task_gradient"
        self.shared = True

    def values(self) -> tuple[Any, ...]:
        """The attributes of the stand-in, for comparison with those of other learners."""
        if not self.shared:
            return ()
        constants = self._constants()
        return tuple((name, repr(value)) for name, value in constants.items()), self._hidden(constants)

    def method(self) -> Callable[..., Any]:
        """The method of the stand-in, or of the learner."""
        if not self.shared:
            return self._learner.task_gradient
        constants = self._constants()
        stand_in = object.__new__(_stand_in(type(self._learner), self._hidden(constants)))
        vars(stand_in).update({name: getattr(self._learner, name) for name in _COMMON}, **constants)
        network = copy.copy(self._learner.network)
        network.params = _initial_params  # they differ between learners
        vars(stand_in)["network"] = network
        return stand_in.task_gradient

    def read_state(self, error: StateReadError, warn: bool) -> None:
        """Call the method on its own learner from now on."""
        self.shared = False
        if warn:
            _log.warning(
                "%s uses self.%s, which may differ between learners or change: it runs eagerly, one learner at a time",
                *(self.name, error),
            )

    def _constants(self) -> dict[str, Any]:
        """The settings, and the attributes of a subclass, that are plain and have not changed."""
        options, own = vars(self._learner.options), vars(self._learner)
        values = {name: value for name, value in options.items() if name != "seed" and not callable(value)}
        values |= {name: value for name, value in own.items() if name not in _STATE and _is_plain(value)}
        reprs = {name: repr(values[name]) for name in sorted(values)}
        return {name: values[name] for name, text in reprs.items() if self._first.setdefault(name, text) == text}

    def _hidden(self, constants: Mapping[str, Any]) -> frozenset[str]:
        """The attributes that the stand-in lacks."""
        return frozenset(vars(self._learner).keys() - constants.keys() - set(_COMMON)) | {"seed"}


def _initial_params() -> Params:
    raise StateReadError("network.params")


@functools.lru_cache(maxsize=256)
def _stand_in(kind: type, hidden: frozenset[str]) -> type:
    """A subclass of a kind of learner, without state; reading or writing it raises `StateReadError`."""

    class StandIn(kind):
        def __getattr__(self, name: str) -> Any:
            raise StateReadError(name)

        def __setattr__(self, name: str, value: Any) -> None:
            raise StateReadError(name)

    for name in hidden:  # the class may have a default of the same name
        setattr(StandIn, name, property(lambda self, name=name: StandIn.__getattr__(self, name)))
    return StandIn


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


class HookGradient:
    """The mean of `objective.task_gradient` over tasks, for learners side by side.

    The function is batched over tasks and learners by vmap. If vmap does not support it, it is called once per task, in
    a loop, and a warning says so.

    Args:
        objective: has a `task_gradient`.
        compiled: whether to compile the batched function.
        params: of the first call, which decides between vmap and the loop; every tensor has a learner dimension.
        support: of the first call, (learners, tasks, ...).
        query: of the first call, (learners, tasks, ...).
    """

    def __init__(self, objective: Objective, compiled: bool, params: Params, support: Any, query: Any) -> None:
        own, hook = objective.own_gradient, objective.task_gradient
        assert hook is not None
        self._hook = own.method() if isinstance(own, OwnGradient) else hook
        self._name = own.name if isinstance(own, OwnGradient) else hook.__qualname__
        self._where = _where(self._name, self._hook)
        self._chunk = objective.inner.tasks_at_once
        self._loops, self._compiled = False, None
        one_task = tree_map(lambda leaf: leaf[:, :1], (support, query))
        try:
            with plain_attention():
                self._batched(params, *one_task)
        except (StateReadError, HookError):
            raise
        except Exception as error:
            self._loops = True
            self(params, *one_task)  # raises the errors of the function itself
            _log.warning(
                "%s runs as a loop over tasks, which is slow: torch.func.vmap does not support it (%s); write it with"
                " torch.func.grad, and without requires_grad_() or .item()",
                *(self._name, _first_line(error)[:120]),
            )
        if compiled and not self._loops:
            self._compiled = compile_whole(self._batched)

    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None = None) -> tuple[Tensor, Params]:
        """Losses, (learners,), and gradients by name with a learner dimension."""
        try:
            if self._compiled is not None:
                with compiling():
                    return self._compiled(params, support, query)
            with plain_attention():
                return (self._loop if self._loops else self._batched)(params, support, query)
        except (StateReadError, HookError):
            raise
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            raise HookError(f"{self._where}: {_first_line(error)}; standardise the inputs and targets") from error
        except Exception as error:
            if self._compiled is not None:  # the caller continues eagerly
                raise
            text = _first_line(error)
            if "does not require grad" in text:
                text += "; compute gradients with torch.func.grad, from a loss that depends on params"
            raise HookError(f"{self._where} fails: {text}") from error

    @keeps_settings
    def _batched(self, params: Params, support: Any, query: Any) -> tuple[Tensor, Params]:
        def one_learner(params: Params, support: Any, query: Any, noise: None) -> Any:
            num_tasks = tree_leaves(query)[0].shape[0]
            tasks = vmap(lambda s, q: self._checked(params, self._hook(dict(params), s, q)))

            def sums(support: Any, query: Any) -> Any:
                return tree_map(lambda value: value.sum(0), tasks(support, query))

            totals = sum_over_chunks(sums, self._chunk or num_tasks, support, query, None)
            return tree_map(lambda total: total / num_tasks, totals)

        return over_learners(one_learner, params, support, query, None)

    @keeps_settings
    def _loop(self, params: Params, support: Any, query: Any) -> tuple[Tensor, Params]:
        num_learners, num_tasks = tree_leaves(query)[0].shape[:2]
        learners = []
        for r in range(num_learners):
            total = None
            for i in range(num_tasks):
                own = {name: value[r].detach().clone() for name, value in params.items()}
                batches = tree_map(lambda leaf: leaf[r, i], (support, query))  # noqa: B023
                with torch.enable_grad():
                    result = self._checked(own, self._hook(dict(own), *batches))
                result = tree_map(torch.Tensor.detach, result)
                total = result if total is None else tree_map(torch.add, total, result)
            learners.append(tree_map(lambda value: value / num_tasks, total))
        return tree_map(lambda *values: torch.stack(values), *learners)

    def _checked(self, params: Params, result: Any) -> tuple[Tensor, Params]:
        """The result of the function; rejects one that is not a scalar loss and a gradient for each parameter."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise HookError(f"{self._where} must return (loss, gradients by parameter name), got {type(result)}")
        loss, gradients = result
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise HookError(f"{self._where} must return a scalar loss of one task, got {got}")
        missing, unknown = sorted(params.keys() - gradients.keys()), sorted(gradients.keys() - params.keys())
        if missing or unknown:
            raise HookError(
                f"{self._where} must return one gradient per parameter: missing {missing}, unknown {unknown}"
            )
        for name, value in params.items():
            gradient = gradients[name]
            if not isinstance(gradient, Tensor) or gradient.shape != value.shape:
                got = f"shape {tuple(gradient.shape)}" if isinstance(gradient, Tensor) else type(gradient).__name__
                raise HookError(
                    f"{self._where}: the gradient of {name} must be of shape {tuple(value.shape)}, got {got}"
                )
            if gradient.dtype != value.dtype:
                raise HookError(f"{self._where}: the gradient of {name} must be {value.dtype}, got {gradient.dtype}")
        return loss, {name: gradients[name] for name in params}


def _where(name: str, function: Callable[..., Any]) -> str:
    """The name of a function with its file and line, if it is written in Python."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
