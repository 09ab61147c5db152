"""CUDA C++ compiled at run time by NVRTC, the compiler that comes with torch, and launched by the CUDA driver.

A CUDA toolkit is not needed. Launches go to the current stream of torch, so that a CUDA graph records them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Of the driver's interface
_MAX_DYNAMIC_SHARED_MEMORY = 8
# Shared memory that a kernel may use without asking for it, in bytes
_DEFAULT_SHARED_MEMORY = 48 * 1024


class CudaProgram:
    """The kernels of a source file, compiled for a device.

    Args:
        source: CUDA C++; kernels are `extern "C"`.
        device: the CUDA device.

    Raises:
        OSError: if NVRTC or the CUDA driver is not found.
        RuntimeError: if the source does not compile, with the compiler's messages.
    """

    def __init__(self, source: str, device: torch.device) -> None:
        self._device, self._driver = device, _driver()
        binary = _compiled(source, *torch.cuda.get_device_capability(device))
        self._module = ctypes.c_void_p()
        self._kernels: dict[str, ctypes.c_void_p] = {}
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the context of the device current
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), binary))

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, arguments: Sequence[Tensor | int], shared: int = 0
    ) -> None:
        """Launch a kernel on the current stream.

        Args:
            name: the name of the kernel.
            grid: the number of blocks in x and y.
            threads: the number of threads of a block.
            arguments: contiguous tensors on the device for pointers, and ints for `int` parameters.
            shared: the bytes of dynamic shared memory of a block.
        """
        values = [ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            kernel = self._kernel(name, shared)
            self._check(self._driver.cuLaunchKernel(kernel, *grid, 1, threads, 1, 1, shared, stream, pointers, None))

    def _kernel(self, name: str, shared: int) -> ctypes.c_void_p:
        if name not in self._kernels:
            kernel = ctypes.c_void_p()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()))
            if shared > _DEFAULT_SHARED_MEMORY:
                self._check(self._driver.cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED_MEMORY, shared))
            self._kernels[name] = kernel
        return self._kernels[name]

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver: {(text.value or b'error %d' % status).decode()}")


def max_shared_memory(device: torch.device) -> int:
    """The largest number of bytes of shared memory that a block can use."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _DEFAULT_SHARED_MEMORY))


@functools.cache
def _compiled(source: str, major: int, minor: int) -> bytes:
    """The machine code of a source for a compute capability."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC: {ctypes.string_at(nvrtc.nvrtcGetErrorString(status)).decode()}")

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"metaleader.cu", 0, None, None))
    try:
        options = [b"--std=c++17", f"--gpu-architecture=sm_{major}{minor}".encode()]
        if status := nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: error {status}: {log.value.decode(errors='replace')}")
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of torch's version of CUDA: of the system, or of the packages beside torch."""
    version = torch.version.cuda
    if version is None:
        raise OSError("this build of torch has no CUDA")
    name, beside = f"libnvrtc.so.{version.partition('.')[0]}", Path(torch.__file__).parent
    found: list[Any] = [name, *sorted(beside.parent.glob(f"nvidia/*/lib/{name}")), *sorted(beside.glob(f"lib/{name}"))]
    for path in found:
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_void_p
        return library
    raise OSError(f"{name} was not found beside torch")
