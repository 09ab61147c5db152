"""Where a run runs: the device, the hardware, the versions, the commit of the package, its memory, the cache."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import subprocess
from pathlib import Path

import torch


def cache_folder() -> Path:
    """What the project keeps between runs: METALEADER_CACHE, or metaleader's folder in the user's cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("METALEADER_CACHE") or base / "metaleader")


def find_device(name: str) -> torch.device:
    """The device of a name: cpu, cuda, cuda:1, or auto for the GPU where there is one."""
    device = known_device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"runs need device cpu, cuda or auto, got {name!r}")
    return device


def known_device(name: str | torch.device) -> torch.device:
    """The same for any device of torch's; a GPU that is not there is refused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; use cpu, cuda or auto") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r} is not there: torch finds {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def hardware(device: str) -> str:
    """The name of the GPU or the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def versions() -> dict[str, str]:
    """The versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("metaleader", "torch", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """The commit of the package where it runs from a git checkout, with "-dirty" where files were changed."""
    here = Path(__file__)
    answer = None
    try:
        # The first fails where the package lies in a repository of somebody else, such as in a virtual environment.
        for command in ("ls-files --error-unmatch " + here.name, "describe --always --dirty --abbrev=40"):
            git = ["git", "-C", str(here.parent), *command.split()]
            answer = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer


def keep_memory() -> None:
    """Let this process keep what it frees instead of giving it back to the system, where the C library is glibc.

    An update takes the same blocks as the one before; as new pages they cost a tenth of its time on the CPU, and more.
    """
    with contextlib.suppress(OSError, AttributeError):
        choose = ctypes.CDLL(None).mallopt
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            choose(threshold, 2**31 - 1)


# The numbers of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def peak_mb(device: str) -> float:
    """The largest memory that this process has used on a device so far, in MB."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB
