import importlib
import importlib.util
import subprocess
import sys

import pytest

from metaleader.streams.pose import opengl as pose_gl
from metaleader.streams.pose.opengl import BACKENDS, choose_backend, load_mujoco


def have(monkeypatch, *libraries):
    monkeypatch.setattr(pose_gl, "_loads", lambda library: library in libraries)


@pytest.fixture
def no_mujoco_yet(monkeypatch):
    """As in a process that has not imported MuJoCo; an import gives back the value of MUJOCO_GL at that moment."""
    monkeypatch.delitem(sys.modules, "mujoco", raising=False)
    # Set before it is deleted, so that monkeypatch restores the variable even if it was unset.
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(pose_gl, "_load_triton", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setattr(importlib, "import_module", lambda name: pose_gl.os.environ.get("MUJOCO_GL"))


def test_egl_before_osmesa(monkeypatch):
    have(monkeypatch, "libEGL.so.1", "libGL.so.1", "libOSMesa.so.8")
    assert choose_backend() == "egl"
    have(monkeypatch, "libEGL.so.1", "libOSMesa.so.8")
    assert choose_backend() == "osmesa"


def test_without_either_the_packages_are_named(monkeypatch):
    have(monkeypatch, "libEGL.so.1")
    with pytest.raises(OSError, match=r"install libegl1 and libgl1, or libosmesa6"):
        choose_backend()


def test_libraries_are_really_looked_for():
    assert pose_gl._loads("libc.so.6")
    assert not pose_gl._loads("libThereIsNone.so.1")
    assert list(BACKENDS) == ["egl", "osmesa"]


@pytest.mark.usefixtures("no_mujoco_yet")
def test_the_backend_is_chosen_where_the_user_did_not(monkeypatch):
    have(monkeypatch, "libOSMesa.so.8")
    assert load_mujoco() == "osmesa"


@pytest.mark.usefixtures("no_mujoco_yet")
def test_the_users_choice_stands(monkeypatch):
    have(monkeypatch, "libOSMesa.so.8")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert load_mujoco() == "glfw"


@pytest.mark.usefixtures("no_mujoco_yet")
def test_a_choice_that_is_not_installed(monkeypatch):
    # What PyOpenGL does inside "import mujoco" when the library is missing.
    def broken(name):
        raise AttributeError("'NoneType' object has no attribute 'glGetError'")

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(OSError, match=r"MUJOCO_GL='osmesa'.*unset MUJOCO_GL.*libosmesa6"):
        load_mujoco()


@pytest.mark.usefixtures("no_mujoco_yet")
def test_without_mujoco_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'metaleader\[pose\]'"):
        load_mujoco()


def test_triton_can_be_imported_after_images_were_drawn():
    """Both contain LLVM; torch imports Triton when it compiles. The process crashed."""
    code = """
from metaleader.streams.pose.opengl import load_mujoco
mujoco = load_mujoco()
model = mujoco.MjModel.from_xml_string('<mujoco><worldbody><geom size=".1"/></worldbody></mujoco>')
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(mujoco.MjData(model))
renderer.render()
import triton._C.libtriton
print("imported")
"""
    for name in ("mujoco", "triton"):  # not imported here: MuJoCo would read MUJOCO_GL
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", (done.returncode, done.stderr[-500:])
