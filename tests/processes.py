"""Runs a function in several processes that are connected by gloo on the loopback interface."""

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


@functools.cache
def _context() -> ForkServerContext:
    """Children are forked from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "metaleader"])
    return context


def run_in_processes(size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call a function of a test module in each of `size` processes; returns their results, which JSON can hold.

    A result of a process that raised an error is the text of the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = sys.modules[function.__module__].__file__
        start = functools.partial(_child, module, function.__name__, args, size, folder, timeout)
        children = [_context().Process(target=start, args=(rank,)) for rank in range(size)]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
            if child.is_alive():
                child.kill()
        files = [Path(folder) / f"{rank}.json" for rank in range(size)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _child(module: str | None, name: str, args: Any, size: int, folder: str, timeout: float, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if size > 1:
        store = dist.FileStore(f"{folder}/store", size)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    assert module is not None
    spec = importlib.util.spec_from_file_location("functions", module)
    assert spec is not None
    assert spec.loader is not None
    functions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functions)
    try:
        result = getattr(functions, name)(*args)
    except Exception as error:
        if not isinstance(error, ValueError | OSError):
            traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(result))
    part.rename(Path(folder) / f"{rank}.json")
    if size > 1:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
