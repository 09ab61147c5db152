"""Storage of datapoints that grows with what is revealed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from metaleader.tasks import Batch, check_alike, num_rows, rows, to_device


class Rows:
    """Growing storage: one tensor a leaf, rows appended in the order of arrival."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.length = 0
        self.data: Batch | None = None

    def append(self, batch: Batch) -> None:
        """Keep rows after those already here."""
        batch = to_device(batch, self.device)
        num = num_rows(batch)
        if self.data is None:
            self.data = tree_map(torch.clone, batch)
        else:
            check_alike(batch, self.data, "observe")
            if self.length + num > num_rows(self.data):
                # A quarter more than needed: appending stays cheap, and the memory close to the bytes of the data.
                capacity = (self.length + num) * 5 // 4
                self.data = tree_map(lambda leaf: _grown(leaf, self.length, capacity), self.data)
            tree_map(lambda leaf, new: leaf[self.length : self.length + num].copy_(new), self.data, batch)
        self.length += num

    def cut(self, length: int) -> None:
        """Forget the rows after the first few."""
        self.length = length
        if length == 0:  # the next rows may have any shape
            self.data = None

    def only(self, parts: list[slice]) -> Rows:
        """Some of the rows, copied: what was taken from here before stays as it is."""
        found = Rows(self.device)
        if self.data is not None:
            found.data = tree_map(lambda leaf: torch.cat([leaf[part] for part in parts]), self.data)
            found.length = num_rows(found.data)
        return found

    def take(self, index: slice | Tensor) -> Batch:
        """The rows at an index; there must be some."""
        assert self.data is not None
        return rows(self.data, index)

    def gather(self, index: Tensor, y: Tensor | None) -> Batch:
        """The rows at an index, with targets of their own where given."""
        assert self.data is not None
        x = rows(self.data.x, index)
        return Batch(x, rows(self.data.y, index) if y is None else y)

    def state_dict(self, data: bool) -> dict[str, Any]:
        """The rows, or with `data=False` their number only."""
        state: dict[str, Any] = {"length": self.length}
        if data:
            kept = None if self.data is None else rows(self.data, slice(0, self.length))
            state["data"] = None if kept is None else {"x": kept.x, "y": kept.y}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; without data in it, as many rows must be here already."""
        if "data" in state:
            data = None if state["data"] is None else Batch(state["data"]["x"], state["data"]["y"])
            self.data = None if data is None else tree_map(lambda leaf: leaf.to(self.device, copy=True), data)
        elif state["length"] != self.length:
            raise ValueError(
                f"the state was saved without its data, of {state['length']} datapoints, and {self.length} are here;"
                " observe the same data (update=False) before loading"
            )
        self.length = state["length"]


def _grown(leaf: Tensor, length: int, capacity: int) -> Tensor:
    larger = torch.empty((capacity, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    larger[:length].copy_(leaf[:length])
    return larger
