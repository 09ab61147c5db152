"""Settings of torch and of the process that a call changes and restores, also if an interrupt ends its clean-up early.

Python may raise KeyboardInterrupt between any two calls, and so also at the begin of an `__exit__`, whose work is then
not done.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch

_C: Any = torch._C

_CONTEXT_EXIT = contextlib._GeneratorContextManager.__exit__.__code__

F = TypeVar("F", bound=Callable[..., Any])


class _Thread(NamedTuple):
    """The settings of torch that each thread has for itself."""

    gradients: bool
    forward_gradients: bool
    threads_of_backward: bool
    saved_tensors: str | None
    overrides: Any
    function_modes: int
    transforms: int

    @classmethod
    def now(cls) -> _Thread:
        """The settings of this thread."""
        return cls(
            _C.is_grad_enabled(),
            _C._is_fwd_grad_enabled(),
            _C._is_multithreading_enabled(),
            _C._autograd._saved_tensors_hooks_get_disabled_error_message(),
            _C._get_torch_function_state(),
            _C._len_torch_function_stack(),
            _C._functorch.get_dynamic_layer_stack_depth(),
        )

    def restore(self) -> None:
        """Make them those of this thread again, and leave `torch.func` transforms that were entered since."""
        if _C._functorch.get_dynamic_layer_stack_depth() > self.transforms:
            _C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self.transforms)
        while _C._len_torch_function_stack() > self.function_modes:
            _C._pop_torch_function_stack()
        _C._set_torch_function_state(self.overrides)
        _C._set_grad_enabled(self.gradients)
        _C._set_fwd_grad_enabled(self.forward_gradients)
        _C._set_multithreading_enabled(self.threads_of_backward)
        if self.saved_tensors is None:
            _C._autograd._saved_tensors_hooks_enable()
        else:
            _C._autograd._saved_tensors_hooks_disable(self.saved_tensors)


def keeps_settings(function: F) -> F:
    """Decorate a function so that torch's settings of the thread are as before the call if it raises anything."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # traced, not run
            return function(*arguments, **options)
        before, outer = _Thread.now(), sys.exc_info()[1]
        try:
            return function(*arguments, **options)
        except BaseException as error:
            if not isinstance(error, Exception):
                _close_contexts(error)
            before.restore()
            interrupt = _interrupt_behind(error, outer)
            if interrupt is not None:
                raise interrupt from error
            raise

    return cast(F, call)


def _close_contexts(error: BaseException) -> None:
    """End the contexts whose end was interrupted; Python would end them when the traceback is freed, at any moment."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if frame.f_code is _CONTEXT_EXIT:
            with contextlib.suppress(Exception):
                frame.f_locals["self"].gen.close()


def _interrupt_behind(error: BaseException, outer: BaseException | None) -> KeyboardInterrupt | None:
    """A new KeyboardInterrupt if one made torch's clean-up, or the handler of another error, raise this error."""
    cause: BaseException | None = error
    while cause is not None and cause is not outer:
        if isinstance(cause, KeyboardInterrupt):
            return KeyboardInterrupt() if cause is not error else None
        cause = cause.__context__
    return None


@contextlib.contextmanager
def restoring(restore: Callable[[], object]) -> Iterator[None]:
    """Call a function at the end of the context, twice, since an interrupt may end the first call early."""
    try:
        try:
            yield
        finally:
            restore()
    finally:
        restore()
