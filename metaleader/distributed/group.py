"""The processes that train one learner together: those of torchrun, or a process group that the program initialised.

torch.distributed is imported only where the program runs under it. Values are exchanged as JSON and as bytes of
tensors, never as pickles.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
# Seconds that a process waits for the others, unless METALEADER_TIMEOUT names another number.
_TIMEOUT = 600.0
# Seconds in which the other processes can say that they wait too, and between two looks
_ANSWER_AFTER_TIMEOUT, _ANSWER_AFTER_LOSS, _POLL = 5.0, 2.0, 0.05


class Group:
    """The processes of a program; a program that runs alone is a group of one.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def gather(self, tensor: Tensor, what: str) -> Tensor:
        """The tensors of all processes, (processes, ...), in the order of ranks; `what` is for error messages."""
        if self.size == 1:
            return tensor[None]
        import torch.distributed as dist

        sent = tensor.contiguous().to(self._device(tensor))
        received = sent.new_empty((self.size, *sent.shape))
        with self._waiting(what):
            dist.all_gather(list(received.unbind()), sent)
        return received.to(tensor.device)

    def transpose(self, tensor: Tensor, what: str) -> Tensor:
        """Send part r of (processes, ...) to rank r; returns the parts received, in the order of ranks."""
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        sent = tensor.contiguous().to(self._device(tensor))
        received = torch.empty_like(sent)
        with self._waiting(what):
            dist.all_to_all_single(received, sent)
        return received.to(tensor.device)

    def broadcast(self, tensor: Tensor, root: int, what: str) -> Tensor:
        """The tensor of one process; the others pass one of the same shape and dtype."""
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        sent = tensor.contiguous().to(self._device(tensor))
        flat = sent.reshape(-1).view(torch.uint8)  # of any dtype
        with self._waiting(what):
            dist.broadcast(flat, root)
        return sent.to(tensor.device)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """The values of all processes, in the order of ranks; JSON holds them."""
        if self.size == 1:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([len(content)]), what)[:, 0].tolist()
        padded = content.new_zeros(max(sizes))
        padded[: len(content)] = content
        rows = self.gather(padded, what)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def first(self, content: bytes | None, what: str) -> bytes | None:
        """The bytes that rank 0 passes, or None."""
        if self.size == 1:
            return content
        size = self.exchange(None if content is None else len(content), what)[0]
        if not size:
            return None if size is None else b""
        buffer = bytearray(content) if self.rank == 0 and content is not None else bytearray(size)
        return self.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), 0, what).numpy().tobytes()

    def on_first(self, call: Callable[[], R], what: str) -> R | None:
        """The result of a function on rank 0, where alone it is called; an error there is raised on all processes."""
        result, error = None, None
        if self.rank == 0:
            try:
                result = call()
            except (ValueError, OSError) as raised:
                error = raised
        text = self.exchange(None if error is None else str(error), what)[0]
        if error is not None:
            raise error
        if text is not None:
            raise ValueError(f"rank 0 has failed: {text}")
        return result

    def _device(self, tensor: Tensor) -> torch.device:
        """Where a tensor must be to be sent."""
        import torch.distributed as dist

        backend = dist.get_backend()
        if backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu") if backend == "gloo" else tensor.device

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Explain errors of a collective operation."""
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if "imed out" in text or "imeout" in text:
                silent = silent_ranks(self.rank, self.size, _ANSWER_AFTER_TIMEOUT)
                raise TimeoutError(
                    f"rank {self.rank} of {self.size} waited too long for the other processes ({what}):"
                    f" {_listed(silent)} hangs or is slow, or was stopped; look at its output, and set"
                    " METALEADER_TIMEOUT to more seconds if it is only slow"
                ) from error
            silent = silent_ranks(self.rank, self.size, _ANSWER_AFTER_LOSS)
            raise ConnectionError(
                f"rank {self.rank} of {self.size} has lost the other processes ({what}): {_listed(silent)} has stopped;"
                f" its output says why ({text[:200]})"
            ) from error


def silent_ranks(rank: int, size: int, seconds: float) -> list[int]:
    """The processes that do not say within some seconds that a collective operation has failed for them too.

    Every process that waited for others says so in the store of the process group. Those that hang, or have ended, do
    not. None are known if the store itself does not answer.
    """
    silent = set(range(size)) - {rank}

    def ask() -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        store.set(f"metaleader/failed/{rank}", "1")
        end = time.monotonic() + seconds
        while silent and time.monotonic() < end:
            answered = {other for other in silent if store.check([f"metaleader/failed/{other}"])}
            silent.difference_update(answered)
            time.sleep(_POLL)

    # In a thread: a store in a process that hangs never answers.
    with contextlib.suppress(RuntimeError):
        thread = threading.Thread(target=_quietly, args=(ask,), daemon=True)
        thread.start()
        thread.join(seconds + _ANSWER_AFTER_LOSS)
    return sorted(silent) if len(silent) < size - 1 or size == 2 else []


def _quietly(call: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # of the store
        call()


def _listed(ranks: list[int]) -> str:
    return "one of them" if not ranks else " or ".join(f"rank {rank}" for rank in ranks)


ALONE = Group()


def current_group() -> Group:
    """The process group that the program has initialised; a group of one if there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return ALONE
    return _group(dist.get_rank(), dist.get_world_size())


@functools.lru_cache(maxsize=8)
def _group(rank: int, size: int) -> Group:
    return Group(rank, size)


def is_launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def restarts() -> int:
    """The number of times that torchrun has restarted the processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def launched_group() -> Iterator[Group]:
    """The processes of torchrun, connected for the duration of the block: by NCCL for GPUs and by gloo for the rest.

    The first error leaves the block at once; torchrun then stops the other processes.
    """
    if not is_launched():
        yield ALONE
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
    timeout = datetime.timedelta(seconds=_timeout())
    local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend, device = placement(*local, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device is not None:
        torch.cuda.set_device(device)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        # The store outlives a restart, and holds addresses of the processes before it.
        store = PrefixStore(f"metaleader/restart {restarts()}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise ConnectionError(
            f"the processes of torchrun cannot be connected ({' '.join(str(error).split())[:300]}); check"
            " MASTER_ADDR, MASTER_PORT and the network between the machines"
        ) from error
    try:
        yield current_group()
    finally:
        dist.destroy_process_group()


def placement(local_rank: int, local_size: int, num_devices: int) -> tuple[str, int | None]:
    """The backend of a process of torchrun, and its GPU, if there is one.

    Args:
        local_rank: the number of the process on its machine.
        local_size: the number of processes on the machine.
        num_devices: the number of its GPUs.
    """
    if num_devices == 0:
        return "gloo", None
    # NCCL refuses two processes on one GPU; gloo copies through the memory of the host.
    return "cpu:gloo,cuda:nccl" if local_size <= num_devices else "gloo", local_rank % num_devices


def _timeout() -> float:
    text = os.environ.get("METALEADER_TIMEOUT", str(_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise ValueError(f"METALEADER_TIMEOUT must be a number of seconds above 0, got {text!r}")
    return seconds
