"""The pose scene in MuJoCo: an object on a table with a red dot at one corner."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

from metaleader.streams.pose.camera import HALF_FRAME, REACH, TABLE_THICKNESS, Camera, View, fit_camera
from metaleader.streams.pose.objects import Mesh
from metaleader.streams.pose.opengl import load_mujoco

# Increment if the same view gives other images, for example after a change to colours, lights or geometry.
SCENE_VERSION = 1

BACKGROUND = (0.90, 0.92, 0.94)
TABLE = (0.80, 0.70, 0.56, 1.0)
DOT = (0.86, 0.10, 0.10, 1.0)
DOT_PLACE, DOT_RADIUS = 0.86, 0.1
# One colour per class: light enough to show the shading, and unlike the table and the dot.
COLOURS = (
    (0.33, 0.53, 0.80),
    (0.22, 0.62, 0.60),
    (0.45, 0.45, 0.75),
    (0.35, 0.65, 0.38),
    (0.60, 0.43, 0.72),
    (0.25, 0.58, 0.80),
    (0.50, 0.56, 0.64),
    (0.42, 0.70, 0.66),
    (0.40, 0.48, 0.60),
)
# Images are drawn larger by this factor and averaged.
OVERSAMPLE = 2
# The smallest fraction of an image that an object covers.
MIN_VISIBLE = 0.002


class Scene:
    """A renderer for one view. As a context manager, it frees its OpenGL context at the end.

    Args:
        view: the object's scale and the camera's direction.
        mesh: the object.
        colour: the object's colour, red, green and blue in [0, 1].
        size: the width and height of the images in pixels.

    Raises:
        ImportError: if MuJoCo is not installed.
        OSError: if no OpenGL backend can draw.
    """

    def __init__(self, view: View, mesh: Mesh, colour: tuple[float, float, float], size: int) -> None:
        self.size = size
        self._mujoco = load_mujoco()
        self._model = _model(self._mujoco, view, mesh, colour, size * OVERSAMPLE)
        self._data = self._mujoco.MjData(self._model)
        try:
            self._renderer = self._mujoco.Renderer(self._model, size * OVERSAMPLE, size * OVERSAMPLE, max_geom=16)
        except Exception as error:
            raise OSError(
                f"OpenGL cannot draw ({error}); set MUJOCO_GL=osmesa to draw in software (Debian: libosmesa6)"
            ) from error
        self._renderer.scene.flags[self._mujoco.mjtRndFlag.mjRND_SHADOW] = False
        self._renderer.scene.flags[self._mujoco.mjtRndFlag.mjRND_REFLECTION] = False

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._renderer.close()

    def draw(self, label: np.ndarray) -> np.ndarray:
        """Return the image (3, size, size), uint8, of the object in a pose (4,)."""
        self._place(label)
        return shrink(self._renderer.render())

    def draw_empty(self) -> np.ndarray:
        """Return the image of the table without the object."""
        self._place(None)
        return shrink(self._renderer.render())

    def segment(self, label: np.ndarray) -> np.ndarray:
        """Return a boolean mask of the visible object, at the resolution before averaging."""
        self._place(label)
        self._renderer.enable_segmentation_rendering()
        ids = self._renderer.render()[..., 0]
        self._renderer.disable_segmentation_rendering()
        return ids == self._model.geom("object").id

    def _place(self, label: np.ndarray | None) -> None:
        if label is None:
            self._data.mocap_pos[0] = (0.0, 0.0, -100.0)
        else:
            x, y, sin, cos = label.astype(float)
            half = np.arctan2(sin, cos) / 2
            self._data.mocap_pos[0] = (REACH * x, REACH * y, 0.0)
            self._data.mocap_quat[0] = (np.cos(half), 0.0, 0.0, np.sin(half))
        self._mujoco.mj_kinematics(self._model, self._data)
        self._mujoco.mj_camlight(self._model, self._data)
        self._renderer.update_scene(self._data, camera="camera")


def check_visible(images: np.ndarray, empty: np.ndarray, where: str) -> None:
    """Check that the object is visible in all images (num, 3, size, size) and touches no border.

    Raises:
        OSError: if it is not; the camera keeps the object in its frame, so the cause is OpenGL.
    """
    changed = (images != empty).any(1)
    enough = changed.mean((1, 2)) > MIN_VISIBLE
    inside = ~(changed[:, [0, -1]].any((1, 2)) | changed[:, :, [0, -1]].any((1, 2)))
    bad = np.flatnonzero(~(enough & inside))
    if len(bad):
        raise OSError(
            f"{where}: OpenGL drew {len(bad)} images without the whole object, the first at index {bad[0]};"
            " set MUJOCO_GL=osmesa to draw in software (Debian: libosmesa6)"
        )


def view_camera(view: View, mesh: Mesh) -> Camera:
    """Return the camera of a view."""
    radius = np.linalg.norm(mesh.vertices[:, :2], axis=1).max()
    return fit_camera(view, view.scale * float(radius), view.scale * float(mesh.vertices[:, 2].max()))


def colour_of(name: str, names: tuple[str, ...]) -> tuple[float, float, float]:
    """Return the colour of an object's class; classes are numbered by first occurrence in `names`."""
    classes = list(dict.fromkeys(other.split()[0] for other in names))
    return COLOURS[classes.index(name.split()[0]) % len(COLOURS)]


def shrink(image: np.ndarray) -> np.ndarray:
    """Average an image (k size, k size, 3) over blocks of k x k pixels, k = OVERSAMPLE, to (3, size, size)."""
    size, k = len(image) // OVERSAMPLE, OVERSAMPLE
    sums = image.reshape(size, k, size, k, 3).sum((1, 3), dtype=np.uint16)
    return ((sums + k * k // 2) // (k * k)).astype(np.uint8).transpose(2, 0, 1)


def _model(mujoco: Any, view: View, mesh: Mesh, colour: tuple[float, float, float], pixels: int) -> Any:
    spec = mujoco.MjSpec()
    spec.visual.global_.offwidth = spec.visual.global_.offheight = pixels
    spec.visual.quality.offsamples = 0
    spec.visual.headlight.ambient = [0.42] * 3
    spec.visual.headlight.diffuse = [0.25] * 3
    spec.visual.headlight.specular = [0.0] * 3
    spec.stat.extent = 3.0
    spec.visual.map.znear, spec.visual.map.zfar = 0.1, 10.0
    _sky(mujoco, spec)
    world = spec.worldbody
    world.add_light(
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        dir=[-0.45, 0.3, -1.0],
        pos=[0, 0, 4],
        diffuse=[0.42] * 3,
        ambient=[0.0] * 3,
        specular=[0.15] * 3,
        castshadow=False,
    )
    shape = mujoco.mjtGeom
    world.add_geom(
        type=shape.mjGEOM_BOX,
        size=[1, 1, TABLE_THICKNESS / 2],
        pos=[0, 0, -TABLE_THICKNESS / 2],
        rgba=TABLE,
    )
    world.add_geom(type=shape.mjGEOM_CYLINDER, size=[DOT_RADIUS, 0.004, 0], pos=[DOT_PLACE, DOT_PLACE, 0.004], rgba=DOT)
    camera = view_camera(view, mesh)
    right, up, _ = camera.axes
    world.add_camera(
        name="camera",
        pos=camera.position,
        xyaxes=[*right, *up],
        fovy=float(2 * np.degrees(np.arctan(HALF_FRAME))),
    )
    _add_object(mujoco, spec, view, mesh, colour)
    return spec.compile()


def _sky(mujoco: Any, spec: Any) -> None:
    spec.add_texture(
        name="sky",
        type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_FLAT,
        rgb1=BACKGROUND,
        rgb2=BACKGROUND,
        width=8,
        height=48,
    )


def _add_object(mujoco: Any, spec: Any, view: View, mesh: Mesh, colour: tuple[float, float, float]) -> None:
    # MuJoCo draws only the front of a face, and the winding of CAD faces is inconsistent. Therefore each face is added
    # with both windings. The copies use separate vertices, because a vertex has a single normal.
    vertices, faces = mesh.vertices * view.scale, mesh.faces
    spec.add_mesh(
        name="object",
        uservert=np.concatenate([vertices, vertices]).astype(np.float32).ravel(),
        userface=np.concatenate([faces, faces[:, ::-1] + len(vertices)]).ravel(),
        inertia=mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL,
    )
    body = spec.worldbody.add_body(name="object", mocap=True)
    body.add_geom(
        name="object",
        type=mujoco.mjtGeom.mjGEOM_MESH,
        meshname="object",
        contype=0,
        conaffinity=0,
        rgba=[*colour, 1.0],
    )
