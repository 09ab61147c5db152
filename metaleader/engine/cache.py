"""The programs of an engine: built at their first call for inputs of some shapes, and run in the engine's mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from metaleader.engine.cuda_graph import Captured
from metaleader.engine.determinism import repeatable
from metaleader.engine.hook import HookError, StateReadError
from metaleader.system.settings import keeps_settings
from metaleader.system.text import short_text
from metaleader.tasks import tensors_of

Mode = Literal["auto", "eager", "graphed", "compiled", "captured"]

_log = logging.getLogger("metaleader")
# The mode in which a program runs next if it fails in a mode
_FALLBACK: dict[Mode, Mode] = {"captured": "graphed", "graphed": "eager", "compiled": "eager"}
# The number of programs kept; each size of D_t has its own.
_MAX_PROGRAMS = 256
# In mode "graphed", predictions are captured at this call: capturing takes as long as several calls.
_CAPTURED_CALL = 3


@dataclass
class _Program:
    run: Callable[..., Any]
    calls: int = 0


class ProgramCache:
    """The programs built so far, by function and shapes of inputs.

    Args:
        mode: "eager", "graphed", "compiled" or "captured"; see `Engine`.

    Attributes:
        mode: the mode in use; after a failure its fallback.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self._programs: dict[Any, _Program] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._programs)

    def run(
        self,
        what: Any,
        inputs: tuple[Any, ...],
        make: Callable[[], Callable[..., Any]],
        predicts: bool = False,
        eager: bool = False,
    ) -> Any:
        """Run the program for inputs of these shapes, built at the first call.

        Args:
            what: the key of the function.
            inputs: trees of tensors.
            make: builds the program.
            predicts: whether the program makes predictions. If one fails in a mode, it runs eagerly from then on; if
                another program fails, all later programs run in the fallback of the mode. In mode "graphed", a
                prediction is captured at its third call.
            eager: whether the program is never captured.
        """
        leaves = tensors_of(inputs)
        key = (what, shapes_of(leaves), torch.backends.cuda.matmul.allow_tf32)
        on_cpu = leaves[0].device.type == "cpu"
        # On the CPU the one setting that matters; see `repeatable`.
        with torch.autograd.set_multithreading_enabled(False) if on_cpu else repeatable(leaves[0].device):
            entry = self._programs.pop(key, None)
            late = predicts and not eager and self.mode == "graphed"
            if entry is None:
                entry, result = self._built(make, inputs, predicts, eager or late)
            elif late and entry.calls + 1 == _CAPTURED_CALL:
                calls = entry.calls
                entry, result = self._built(make, inputs, predicts, eager=False)
                entry.calls = calls
            else:
                result = entry.run(*inputs)
            entry.calls += 1
            # Ordered by last use: the first program is the one to drop.
            self._programs[key] = entry
            if len(self._programs) > _MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            return result

    def _built(
        self, make: Callable[[], Callable[..., Any]], inputs: tuple[Any, ...], predicts: bool, eager: bool
    ) -> tuple[_Program, Any]:
        """A new program in the engine's mode or the first fallback that works, and its result."""
        while not (eager or self.mode == "eager"):
            try:
                program, result = self._started(make(), inputs)
                return _Program(program), result
            except (StateReadError, HookError):
                raise
            except Exception as error:
                mode = "eager" if predicts else _FALLBACK[self.mode]
                _log.warning("engine mode %r fails, continuing with %r: %s", self.mode, mode, short_text(error))
                self._pool = None  # a failed capture may have left it unusable
                self.mode, eager = (self.mode, True) if predicts else (mode, False)
        program = make()
        return _Program(program), program(*inputs)

    @keeps_settings
    def _started(self, program: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Callable[..., Any], Any]:
        """A program that has run once, captured if that is the mode, and its result."""
        if self.mode not in ("graphed", "captured"):
            return program, program(*inputs)
        # All graphs share one memory pool: they run one at a time, and their outputs are copied.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = Captured(program, inputs, self._pool, compiled=self.mode == "captured")
        return graph, graph(*inputs)


def shapes_of(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """The shapes and dtypes of tensors, as a key."""
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves)
