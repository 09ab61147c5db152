"""Recurrent layers as elementary operations: torch's own fail under vmap, or have no second derivative on a GPU.

The layers take the place of torch's and use their parameters. A layer multiplies the inputs of all positions by the
input weights at once; a position then costs one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from metaleader.nets.layers import SeededDropout

# The state of a layer: (h,), or (h, c) for an LSTM
State = tuple[Tensor, ...]


class RNNCell(nn.RNNCell):
    """`nn.RNNCell` as elementary operations."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state, (N, hidden) or (hidden)."""
        step = _tanh if self.nonlinearity == "tanh" else _relu
        return _cell(self, step, input, None if hx is None else (hx,))[0]


class GRUCell(nn.GRUCell):
    """`nn.GRUCell` as elementary operations."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state, (N, hidden) or (hidden)."""
        return _cell(self, _gru, input, None if hx is None else (hx,))[0]


class LSTMCell(nn.LSTMCell):
    """`nn.LSTMCell` as elementary operations."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The next state and cell state, (N, hidden) or (hidden)."""
        h, c = _cell(self, _lstm, input, hx)
        return h, c


class _Recurrent(nn.RNNBase):
    """A recurrent layer; `seeded_dropout` is its dropout between layers."""

    seeded_dropout: SeededDropout | None

    def run(
        self, step: Callable[[Tensor, Tensor, State], State], input: Any, states: State | None, num_states: int = 1
    ) -> tuple[Tensor, State]:
        """The outputs, and the last states, (layers x directions, N, features) each."""
        if isinstance(input, PackedSequence):
            raise ValueError(f"{type(self).__name__} takes no packed sequences here; pass padded rows, a tensor")
        if input.ndim not in (2, 3) or input.shape[-1] != self.input_size:
            raise ValueError(
                f"{type(self).__name__}: the input must have {self.input_size} features and 2 or 3 dimensions, got"
                f" {tuple(input.shape)}"
            )
        single = input.ndim == 2
        rows_first = self.batch_first and not single
        x = input.transpose(0, 1) if rows_first else input[:, None] if single else input
        num_directions = 2 if self.bidirectional else 1
        sizes = [self.proj_size or self.hidden_size, self.hidden_size][:num_states]
        if states is None:
            shape = (self.num_layers * num_directions, x.shape[1])
            states = tuple(x.new_zeros(*shape, size) for size in sizes)
        elif single:
            states = tuple(state[:, None] for state in states)
        last: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0 and self.seeded_dropout is not None:
                x = self.seeded_dropout(x)
            outputs = []
            for direction in range(num_directions):
                state = tuple(value[len(last)] for value in states)
                output, state = self._direction(step, x, state, layer, direction)
                outputs.append(output)
                last.append(state)
            x = outputs[0] if num_directions == 1 else torch.cat(outputs, -1)
        ends = tuple(torch.stack(values) for values in zip(*last, strict=True))
        if single:
            return x[:, 0], tuple(end[:, 0] for end in ends)
        return x.transpose(0, 1) if rows_first else x, ends

    def _direction(
        self, step: Callable[[Tensor, Tensor, State], State], x: Tensor, state: State, layer: int, direction: int
    ) -> tuple[Tensor, State]:
        suffix = f"l{layer}" + ("_reverse" if direction else "")
        weight = getattr(self, f"weight_hh_{suffix}")
        biases = [getattr(self, f"bias_{kind}_{suffix}") if self.bias else None for kind in ("ih", "hh")]
        projection = getattr(self, f"weight_hr_{suffix}") if self.proj_size else None
        gates = F.linear(x, getattr(self, f"weight_ih_{suffix}"), biases[0])
        outputs: list[Tensor] = []
        for one in reversed(gates.unbind(0)) if direction else gates.unbind(0):
            state = step(one, F.linear(state[0], weight, biases[1]), state)
            if projection is not None:
                state = F.linear(state[0], projection), *state[1:]
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if direction else outputs), state


class RNN(_Recurrent, nn.RNN):
    """`nn.RNN` as elementary operations."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Outputs (positions, N, features), and the last states; (N, positions, features) with `batch_first`."""
        step = _tanh if self.nonlinearity == "tanh" else _relu
        outputs, (h,) = self.run(step, input, None if hx is None else (hx,))
        return outputs, h


class GRU(_Recurrent, nn.GRU):
    """`nn.GRU` as elementary operations."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Outputs (positions, N, features), and the last states; (N, positions, features) with `batch_first`."""
        outputs, (h,) = self.run(_gru, input, None if hx is None else (hx,))
        return outputs, h


class LSTM(_Recurrent, nn.LSTM):
    """`nn.LSTM` as elementary operations."""

    def forward(self, input: Tensor, hx: State | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Outputs (positions, N, features), and the last states; (N, positions, features) with `batch_first`."""
        outputs, (h, c) = self.run(_lstm, input, hx, 2)
        return outputs, (h, c)


# Steps: of the input's gates, the state's gates and the state.


def _tanh(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.tanh(x + h),)


def _relu(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.relu(x + h),)


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    size = 2 * (x.shape[-1] // 3)
    reset, update = torch.sigmoid(x[..., :size] + h[..., :size]).chunk(2, -1)
    new = torch.tanh(x[..., size:] + reset * h[..., size:])
    return (new + update * (state[0] - new),)


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _cell(
    cell: nn.RNNCellBase, step: Callable[[Tensor, Tensor, State], State], input: Tensor, states: State | None
) -> State:
    if input.ndim not in (1, 2) or input.shape[-1] != cell.input_size:
        raise ValueError(
            f"{type(cell).__name__}: the input must have {cell.input_size} features and 1 or 2 dimensions, got"
            f" {tuple(input.shape)}"
        )
    if states is None:
        zero = input.new_zeros(*input.shape[:-1], cell.hidden_size)
        states = (zero, zero)
    gates = F.linear(input, cell.weight_ih, cell.bias_ih)
    return step(gates, F.linear(states[0], cell.weight_hh, cell.bias_hh), states)
