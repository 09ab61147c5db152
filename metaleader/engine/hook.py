"""The gradient of learners with a `task_gradient`: that of a user, or of an `Adaptation`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from metaleader.engine.objective import Objective
from metaleader.gradient.meta import sum_over_chunks
from metaleader.gradient.selection import Params

_log = logging.getLogger("metaleader")


def over_learners(function: Callable[..., Any], params: Params, support: Any, query: Any, noise: Tensor | None) -> Any:
    """Call a function of (params, support, query, noise) of one learner for learners side by side."""
    if len(next(iter(params.values()))) > 1:
        in_dims = (0, 0, 0, None if noise is None else 0)
        return vmap(function, in_dims=in_dims)(params, support, query, noise)
    # Without vmap, one learner runs fewer and larger operations.
    first = tree_map(lambda leaf: leaf if leaf is None else leaf[0], (params, support, query, noise))
    return tree_map(lambda value: value[None], function(*first))


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
        hook = objective.task_gradient
        assert hook is not None
        self._hook, self._name = hook, getattr(hook, "__qualname__", "task_gradient")
        self._chunk = objective.inner.chunk
        few = tree_map(lambda leaf: leaf[:, :2], (support, query))
        self._gradient: Callable[..., tuple[Tensor, Params]] = self._batched
        try:
            self._batched(params, *few)
        except _WrongResultError as error:
            raise ValueError(str(error)) from None
        except Exception as error:
            self._gradient = self._loop
            try:
                self._loop(params, *few)
            except _WrongResultError as wrong:
                raise ValueError(str(wrong)) from None
            except Exception as failure:
                raise ValueError(f"{self._name} fails: {_first_line(failure)}") from failure
            _log.warning(
                "%s runs as a loop over tasks, which is slow: torch.func.vmap does not support it (%s); write it with"
                " torch.func.grad, and without requires_grad_() or .item()",
                *(self._name, _first_line(error)[:120]),
            )
            return
        if compiled:
            self._gradient = torch.compile(self._batched, dynamic=False)

    def __call__(self, params: Params, support: Any, query: Any, noise: Tensor | None = None) -> tuple[Tensor, Params]:
        """Losses, (learners,), and gradients by name with a learner dimension."""
        try:
            return self._gradient(params, support, query)
        except _WrongResultError as error:
            raise ValueError(str(error)) from None
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            raise ValueError(f"{self._name}: {_first_line(error)}; standardise the inputs and targets") from error

    def _batched(self, params: Params, support: Any, query: Any) -> tuple[Tensor, Params]:
        def one_learner(params: Params, support: Any, query: Any, noise: None) -> Any:
            num_tasks = tree_leaves(query)[0].shape[0]
            tasks = vmap(lambda s, q: self._checked(params, self._hook(params, s, q)))

            def sums(support: Any, query: Any) -> Any:
                return tree_map(lambda value: value.sum(0), tasks(support, query))

            totals = sum_over_chunks(sums, self._chunk or num_tasks, support, query, None)
            return tree_map(lambda total: total / num_tasks, totals)

        return over_learners(one_learner, params, support, query, None)

    def _loop(self, params: Params, support: Any, query: Any) -> tuple[Tensor, Params]:
        num_learners, num_tasks = tree_leaves(query)[0].shape[:2]
        learners = []
        for r in range(num_learners):
            own = {name: value[r].detach().clone() for name, value in params.items()}
            total = None
            for i in range(num_tasks):
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
            raise _WrongResultError(f"{self._name} must return (loss, gradients by parameter name), got {type(result)}")
        loss, gradients = result
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise _WrongResultError(f"{self._name} must return a scalar loss of one task, got {got}")
        missing, unknown = sorted(params.keys() - gradients.keys()), sorted(gradients.keys() - params.keys())
        if missing or unknown:
            raise _WrongResultError(
                f"{self._name} must return one gradient per parameter: missing {missing}, unknown {unknown}"
            )
        for name, value in params.items():
            gradient = gradients[name]
            if not isinstance(gradient, Tensor) or gradient.shape != value.shape:
                got = f"shape {tuple(gradient.shape)}" if isinstance(gradient, Tensor) else type(gradient).__name__
                raise _WrongResultError(
                    f"{self._name}: the gradient of {name} must be of shape {tuple(value.shape)}, got {got}"
                )
        return loss, {name: gradients[name] for name in params}


class OwnGradient:
    """A learner's own `task_gradient`, and the attributes of the learner that it reads.

    Learners side by side share one call, and a captured program does not see attributes that change later. Both are
    correct only if the attributes read have equal plain values.

    Args:
        learner: has the method.
        static: names of attributes that are the same for all learners side by side and never change.
    """

    def __init__(self, learner: Any, static: frozenset[str]) -> None:
        self._learner, self._static = learner, static
        self._reads: set[str] | None = None
        self.__qualname__ = f"{type(learner).__name__}.task_gradient"

    def __call__(self, params: Params, support: Any, query: Any) -> tuple[Tensor, Params]:
        """The loss and the gradient of one task."""
        return self._learner.task_gradient(params, support, query)

    def trial(self, params: Params, support: Any, query: Any) -> None:
        """Record the attributes that a call for one task reads; errors of the call are left to the first update."""
        if self._reads is not None:
            return
        reads: set[str] = set()
        kind = type(self._learner)

        class Tracked(kind):  # pyright: ignore[reportGeneralTypeIssues]
            def __getattribute__(self, name: str) -> Any:
                reads.add(name)
                return object.__getattribute__(self, name)

        tracked = object.__new__(Tracked)
        object.__setattr__(tracked, "__dict__", vars(self._learner))
        with contextlib.suppress(Exception), torch.enable_grad():
            Tracked.task_gradient(tracked, dict(params), support, query)
        own = vars(self._learner).keys() | {"params", "step", "num_datapoints", "num_new"}
        self._reads = (reads & own) - self._static

    def state(self) -> tuple[Any, ...] | None:
        """The values of the attributes read, if all are plain; None if one is not, or before `trial`."""
        values = [(name, getattr(self._learner, name)) for name in sorted(self._reads or ())]
        plain = self._reads is not None and all(_is_plain(value) for _, value in values)
        return tuple((name, repr(value)) for name, value in values) if plain else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


class _WrongResultError(Exception):
    """A result of the wrong form, which a loop over tasks would not change."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
