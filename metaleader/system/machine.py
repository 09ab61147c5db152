"""Facts about the machine and the installation: device, hardware, versions, commit, memory and cache folder."""

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

# More could end the process: torch does not handle a thread that cannot be started.
MAX_THREADS = 1024
# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def cache_folder() -> Path:
    """Return the folder for files kept between runs: METALEADER_CACHE, or `metaleader` in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("METALEADER_CACHE") or base / "metaleader")


def find_device(name: str) -> torch.device:
    """Return the device of a name: cpu, cuda, cuda:1, or auto for the GPU if there is one, else the CPU."""
    device = known_device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"runs need device cpu, cuda or auto, got {name!r}")
    return device


def known_device(name: str | torch.device) -> torch.device:
    """Return the device of a name, of any type that torch supports; a GPU must exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {name!r}; use cpu, cuda or auto") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r} does not exist: torch finds {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def set_threads(number: int) -> None:
    """Set the number of CPU threads of torch, which ends the process if the system refuses that many."""
    if not 1 <= number <= MAX_THREADS:
        raise ValueError(f"threads must lie in 1..{MAX_THREADS}, got {number}; the cores of the machine are enough")
    torch.set_num_threads(number)


def hardware(device: str) -> str:
    """Return the name of the GPU or the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    numbers = {"python": platform.python_version()}
    for name in ("metaleader", "torch", "numpy"):
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            numbers[name] = "not installed"
    return numbers


def commit() -> str | None:
    """Return the commit of a git checkout, with "-dirty" if files have changed; None if the package is installed."""
    path = Path(__file__)
    output = None
    try:
        # The first command fails if the package lies in another repository, such as in a virtual environment.
        for command in ("ls-files --error-unmatch " + path.name, "describe --always --dirty --abbrev=40"):
            git = ["git", "-C", str(path.parent), *command.split()]
            output = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return output


def keep_memory() -> None:
    """Let glibc keep freed memory in the process instead of returning it to the system.

    Successive updates allocate the same blocks. Mapping them anew takes a tenth or more of an update's time on the CPU.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(threshold, 2**31 - 1)


def peak_mb(device: str) -> float:
    """Return the peak memory of this process on a device, in MB."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # in KiB on Linux


def memory_bytes(device: torch.device, free: bool = False) -> int:
    """Return the memory of a device, or the part of it that is free, in bytes; for the CPU within the control group."""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        # Blocks that torch keeps for itself are free to torch.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return available + cached if free else total
    pages = "SC_AVPHYS_PAGES" if free else "SC_PHYS_PAGES"
    amount = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    info, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        if free:  # counts the cache of files as free
            line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
            amount = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # without a limit, the file has the text "max"
        limit = int((group / "memory.max").read_text())
        amount = min(amount, limit - int((group / "memory.current").read_text()) if free else limit)
    return max(amount, 0)
