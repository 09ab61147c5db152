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
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
# Seconds that a process waits for the others, unless METALEADER_TIMEOUT names another number.
_TIMEOUT = 600.0


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
                raise TimeoutError(
                    f"rank {self.rank} of {self.size} waited too long for the other processes ({what}): one of them"
                    " hangs or is slow, or was stopped; look at its output, and set METALEADER_TIMEOUT to more seconds"
                    " if it is only slow"
                ) from error
            raise ConnectionError(
                f"rank {self.rank} of {self.size} has lost the other processes ({what}): one of them has stopped; its"
                f" output says why ({text[:200]})"
            ) from error


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
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        # The store outlives a restart, and holds addresses of the processes before it.
        store = PrefixStore(f"metaleader/restart {restarts()}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
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


def _timeout() -> float:
    text = os.environ.get("METALEADER_TIMEOUT", str(_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise ValueError(f"METALEADER_TIMEOUT must be a number of seconds above 0, got {text!r}")
    return seconds
