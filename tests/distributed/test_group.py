"""Groups of processes: what they exchange, what they agree on, and how they fail."""

import importlib
import os
import signal
import time
from typing import Any

import pytest
import torch
from processes import run_in_processes
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from metaleader.distributed.agreement import agree, digest_of
from metaleader.distributed.group import ALONE, current_group, launched_group, placement
from metaleader.distributed.shards import Sharding
from metaleader.tasks import Batch


def exchanges() -> list[Any]:
    group = current_group()
    values = group.exchange({"rank": group.rank, "text": "ä" * group.rank}, "test")
    blob = group.first(b"from rank 0" if group.rank == 0 else None, "test")
    nothing, empty = group.first(None, "test"), group.first(b"", "test")
    sent = torch.full((2, 3), float(group.rank), dtype=torch.float64)
    received = group.broadcast(sent, 1, "test")
    return [values, (blob or b"").decode(), nothing, (empty or b"").decode(), received.tolist()]


def test_values_and_bytes_are_exchanged() -> None:
    values = [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä"}, {"rank": 2, "text": "ää"}]
    expected = [values, "from rank 0", None, "", [[1.0] * 3] * 2]
    assert run_in_processes(3, exchanges) == [expected] * 3


def test_a_program_that_runs_alone_is_a_group_of_one() -> None:
    assert current_group() is ALONE
    assert ALONE.exchange(3, "test") == [3]
    assert ALONE.first(b"x", "test") == b"x"
    assert ALONE.gather(torch.ones(2), "test").shape == (1, 2)
    agree(ALONE, {"seed": 1}, "test")


def disagreements() -> list[Any]:
    group, errors = current_group(), []
    batches = [torch.zeros(5, 2), torch.zeros(5, 2)]
    batches[1][3, 1] = float(group.rank == 2)
    cases: list[dict[str, Any]] = [
        {"options": {"seed": 0, "weights": len}, "same": object()},
        {"options": {"seed": int(group.rank == 1), "lr": 0.1}},
        {"versions": {"torch": "2.13.0" if group.rank < 2 else "2.11.0"}},
        {"only": 1} if group.rank == 0 else {"other": 1},
        {"data": digest_of(Batch(batches[0], batches[1]))},
    ]
    for facts in cases:
        try:
            agree(group, facts, "the settings")
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_a_difference_is_named_on_all_processes() -> None:
    results = run_in_processes(3, disagreements)
    assert results[1] == results[0]
    assert results[2] == results[0]
    same, seed, versions, missing, data = results[0]
    assert same is None
    assert "options.seed (the settings): it is 0 on rank 0 and 1 on rank 1" in seed
    assert "versions.torch" in versions
    assert "'2.11.0' on rank 2" in versions
    assert "only" in missing
    assert "data" in data
    assert "on rank 2" in data


def stopped(number: int) -> Any:
    group = current_group()
    group.exchange(0, "the start")
    if group.rank == 1:
        os.kill(os.getpid(), number)
        time.sleep(30)
    start = time.monotonic()
    try:
        group.exchange(0, "update 7")
    except OSError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return None


def test_a_hanging_process_ends_in_an_error_after_the_timeout_that_names_it() -> None:
    results = run_in_processes(3, hung, timeout=2.0)
    assert results[1] == "late"
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert f"rank {rank} of 3" in text
        assert "update 7" in text
        assert {"TimeoutError": "rank 1 hangs or is slow", "ConnectionError": "rank 1 has stopped"}[name] in text
        assert 1 < seconds < 20
    assert "TimeoutError" in {results[0][0], results[2][0]}


def hung() -> Any:
    group = current_group()
    group.exchange(0, "the start")
    if group.rank == 1:
        time.sleep(9)
        return "late"
    start = time.monotonic()
    try:
        group.exchange(0, "update 7")
    except OSError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return None


def test_a_killed_process_ends_in_an_error_at_once() -> None:
    waiting, killed = run_in_processes(2, stopped, int(signal.SIGKILL), timeout=60.0)
    assert killed is None
    assert waiting[0] == "ConnectionError"
    assert "update 7" in waiting[1]
    assert "rank 1 has stopped" in waiting[1]
    assert waiting[2] < 10


def test_a_process_has_a_backend_and_a_gpu() -> None:
    assert placement(3, 4, 0) == ("gloo", None)
    assert [placement(rank, 4, 4) for rank in range(4)] == [("cpu:gloo,cuda:nccl", rank) for rank in range(4)]
    assert [placement(rank, 2, 8)[1] for rank in range(2)] == [0, 1]
    # NCCL refuses two processes on one GPU.
    assert [placement(rank, 4, 2) for rank in range(4)] == [("gloo", 0), ("gloo", 1), ("gloo", 0), ("gloo", 1)]


class FakeDistributed:
    """The calls of torch.distributed that connect the processes of torchrun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
        self.device: int | None = None
        self.backend = ""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self, "device", device))
        rendezvous = importlib.import_module("torch.distributed.rendezvous")
        monkeypatch.setattr(rendezvous, "rendezvous", lambda *_, **__: iter([(HashStore(), 1, 4)]))
        monkeypatch.setattr(
            "torch.distributed.init_process_group", lambda backend, **_: setattr(self, "backend", backend)
        )
        monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)


@pytest.mark.parametrize(
    ("devices", "backend", "device"), [(0, "gloo", None), (4, "cpu:gloo,cuda:nccl", 1), (2, "gloo", 1), (1, "gloo", 0)]
)
def test_torchrun_connects_processes_by_their_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: int, backend: str, device: int | None
) -> None:
    values = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    values["GLOO_SOCKET_IFNAME"] = "lo"
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    fake = FakeDistributed(monkeypatch, devices)
    with launched_group():
        assert (fake.backend, fake.device) == (backend, device)


def test_the_number_of_processes_divides_that_of_shards() -> None:
    assert run_in_processes(2, shards_of, 3)[0].startswith("ValueError: the number of processes must divide")
    assert run_in_processes(2, shards_of, 4) == [[[0, 1], [7, 6, 6, 6], 0], [[2, 3], [7, 6, 6, 6], 0]]


def shards_of(count: int) -> Any:
    shards = Sharding(count)
    return [[shard.number for shard in shards.own], shards.shares(25), shards.rank_of(5)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool, torch.bfloat16])
def test_the_digest_sees_shape_dtype_and_content(dtype: torch.dtype) -> None:
    zeros = torch.zeros(6, 2, dtype=dtype)
    other = zeros.clone()
    other[-1, -1] = 1
    digests = [digest_of({"a": tensor}) for tensor in (zeros, zeros.clone(), other, zeros.view(4, 3))]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    large = torch.zeros(2**16, 16)
    changed = large.clone()
    changed[-1, -1] = 1
    assert digest_of(large) != digest_of(changed)
