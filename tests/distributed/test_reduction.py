"""Sums over shards: one result for every number of processes, and for both ways of sending."""

import hashlib
from typing import Any

import pytest
import torch
from processes import run_in_processes

from metaleader.distributed.group import ALONE, current_group
from metaleader.distributed.reduction import sum_over_shards, tree_sum
from metaleader.distributed.shards import Sharding

NUMEL = 1003  # not a multiple of the number of processes


def parts_of(count: int) -> list[torch.Tensor]:
    """One tensor per shard, of numbers of very different size, so that another order of adding rounds differently."""
    generator = torch.Generator().manual_seed(count)
    scales = 10.0 ** torch.randint(-3, 4, (count, NUMEL), generator=generator)
    return list(torch.randn(count, NUMEL, generator=generator) * scales)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def sums(counts: list[int]) -> list[Any]:
    group, found = current_group(), []
    for count in counts:
        shards = Sharding(count)
        own = [parts_of(count)[shard.number] for shard in shards.own]
        for slices_from in (2**40, 0):  # gather, slices
            found.append(digest(sum_over_shards(group, own, "test", slices_from)))
        plain = torch.stack(own).sum(0)
        if group.size > 1:
            torch.distributed.all_reduce(plain)
        found.append(digest(plain))
    return found


@pytest.mark.parametrize(("size", "counts"), [(2, [2, 4, 6]), (3, [3, 6, 12]), (4, [4, 8, 12])])
def test_the_sum_is_that_of_one_process(size: int, counts: list[int]) -> None:
    results = run_in_processes(size, sums, counts)
    assert all(result == results[0] for result in results)
    gathered, sliced, _ = (results[0][i::3] for i in range(3))
    expected = [digest(tree_sum(parts_of(count))) for count in counts]
    assert gathered == expected
    assert sliced == expected


def test_a_plain_sum_differs() -> None:
    """The property is not trivial: `all_reduce` of the same numbers gives others for every number of processes."""
    by_size = [run_in_processes(size, sums, [12])[0] for size in (2, 3, 4)]
    assert len({gathered for gathered, _, _ in by_size}) == 1
    assert len({plain for _, _, plain in by_size}) == 3


def test_the_tree_adds_all_parts() -> None:
    for count in range(1, 14):
        parts = [torch.tensor(float(2**i)) for i in range(count)]
        assert float(tree_sum(parts)) == 2**count - 1
        assert float(sum_over_shards(ALONE, parts, "test")) == 2**count - 1
