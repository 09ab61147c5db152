"""MuJoCo with an OpenGL that draws without a display.

MuJoCo takes its OpenGL from MUJOCO_GL at import, and fails there with an AttributeError when that library is missing;
so the libraries are looked for before.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from typing import Any

# In the order they are tried: the shared libraries that a backend needs, and the Debian packages that bring them.
BACKENDS = {
    "egl": (("libEGL.so.1", "libGL.so.1"), "libegl1 and libgl1"),
    "osmesa": (("libOSMesa.so.8",), "libosmesa6"),
}


def choose_backend() -> str:
    """The first backend whose libraries are there.

    Raises:
        OSError: when there is none; the message names the packages to install.
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
    """Import MuJoCo, with the OpenGL that MUJOCO_GL names or, where it is unset, the first that works.

    MUJOCO_GL is then set for the rest of the process.

    Raises:
        ImportError: when MuJoCo is not installed.
        OSError: when no OpenGL is found, or not the one that MUJOCO_GL names.
    """
    if "mujoco" in sys.modules:
        return sys.modules["mujoco"]
    if importlib.util.find_spec("mujoco") is None:
        raise ImportError("drawing pose images needs MuJoCo; install it with: pip install 'metaleader[pose]'")
    if sys.platform == "linux" and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = choose_backend()
    name = os.environ.get("MUJOCO_GL", "")
    try:
        return importlib.import_module("mujoco")
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        _, packages = BACKENDS.get(name.lower(), ((), "libegl1 and libgl1"))
        raise OSError(
            f"MuJoCo cannot be used with MUJOCO_GL={name!r} ({error});"
            f" unset MUJOCO_GL to have it chosen, or install {packages} on Debian"
        ) from error


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
