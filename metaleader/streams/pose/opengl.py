"""MuJoCo with an OpenGL backend that draws without a display.

MuJoCo reads the backend from MUJOCO_GL when it is imported, and raises an AttributeError if the library is missing.
Therefore this module looks for the libraries first.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
from typing import Any

# Backends in order of preference: the shared libraries they need, and the Debian packages with these libraries.
BACKENDS = {
    "egl": (("libEGL.so.1", "libGL.so.1"), "libegl1 and libgl1"),
    "osmesa": (("libOSMesa.so.8",), "libosmesa6"),
}


def choose_backend() -> str:
    """Return the first backend whose libraries are installed.

    Raises:
        OSError: if there is none; the message names the packages to install.
    """
    for name, (libraries, _) in BACKENDS.items():
        if all(_loads(library) for library in libraries):
            return name
    packages = ", or ".join(packages for _, packages in BACKENDS.values())
    raise OSError(
        "drawing pose images needs OpenGL without a display, and neither EGL nor OSMesa is installed;"
        f" on Debian install {packages} (apt-get install ...)"
    )


def load_mujoco() -> Any:
    """Import MuJoCo with the backend in MUJOCO_GL; if MUJOCO_GL is unset, set it to the first available backend.

    Raises:
        ImportError: if MuJoCo is not installed.
        OSError: if the backend is not installed.
    """
    if "mujoco" in sys.modules:
        return sys.modules["mujoco"]
    if importlib.util.find_spec("mujoco") is None:
        raise ImportError("drawing pose images needs MuJoCo; install it with: pip install 'metaleader[pose]'")
    if sys.platform == "linux" and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = choose_backend()
    name = os.environ.get("MUJOCO_GL", "")
    _load_triton()
    try:
        return importlib.import_module("mujoco")
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        _, packages = BACKENDS.get(name.lower(), ((), "libegl1 and libgl1"))
        raise OSError(
            f"MuJoCo cannot be used with MUJOCO_GL={name!r} ({error});"
            f" unset MUJOCO_GL to select it automatically, or install {packages} on Debian"
        ) from error


def _load_triton() -> None:
    """Load Triton, which torch imports to compile, before Mesa.

    Mesa draws without a GPU. Both contain LLVM, and the process crashes if Mesa's is loaded first.
    """
    with contextlib.suppress(ImportError):
        import triton._C.libtriton  # noqa: F401  # pyright: ignore[reportMissingImports]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
