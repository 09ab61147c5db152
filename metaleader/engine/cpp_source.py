"""C++ compiled at run time by g++, for the processor of this machine, and loaded as a library."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from metaleader.system.machine import cache_folder

_OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wall", "-Wno-psabi")


@functools.cache
def cpp_library(source: str) -> ctypes.CDLL:
    """The library of a source file; libraries are kept in the cache folder.

    The compiler is that of the environment variable CXX, by default g++.

    Raises:
        OSError: if there is no compiler.
        RuntimeError: if the source does not compile, with the compiler's messages.
    """
    command = [*_compiler(), *_OPTIONS]
    key = hashlib.sha256("\n".join([*command, _processor(), source]).encode()).hexdigest()
    path = _folder() / f"{key}.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # missing, or damaged
        _compile(command, source, path)
        return ctypes.CDLL(str(path))


def has_compiler() -> bool:
    """Whether the compiler is installed."""
    return shutil.which(_compiler()[0]) is not None


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


def _compile(command: list[str], source: str, path: Path) -> None:
    # Renamed when complete: other processes may compile the same source.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, library = Path(folder, "source.cpp"), Path(folder, "library.so")
        code.write_text(source, encoding="utf-8")
        done = subprocess.run([*command, str(code), "-o", str(library)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
        library.replace(path)


def _folder() -> Path:
    """A folder for libraries: in the cache folder, or a temporary one where that cannot be written."""
    folder = cache_folder() / "cpp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary_folder()
    return folder if os.access(folder, os.W_OK) else _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="metaleader-"))


@functools.cache
def _processor() -> str:
    """The instructions that the processor has: code for one processor may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    known = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(known)])
