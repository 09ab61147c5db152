"""The geometry of a pose scene: the table, a view of an object, and the camera that keeps both in its frame.

The unit of length is half the table's side. The table top is the square [-1, 1] x [-1, 1] at z = 0; z points up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metaleader.tasks import rng

# The object's centre is uniform in [-REACH, REACH] x [-REACH, REACH]. At the largest scale, objects stay on the table.
REACH = 0.42
SCALES = (0.42, 0.58)
ELEVATIONS = (np.radians(30.0), np.radians(60.0))
TABLE_THICKNESS = 0.08
# The tangent of half the field of view (40 degrees), and the fraction of the frame that is free on each side.
HALF_FRAME = float(np.tan(np.radians(20.0)))
MARGIN = 0.03


@dataclass(frozen=True)
class View:
    """One object seen by one camera: a task of the pose stream.

    Attributes:
        name: the object, such as "car 03".
        number: the index of the view among the views of the object.
        scale: the factor from the mesh to the object on the table.
        azimuth: the direction of the camera from the table's centre, in radians.
        elevation: the camera's angle above the table, in radians.
    """

    name: str
    number: int
    scale: float
    azimuth: float
    elevation: float

    def __str__(self) -> str:
        return f"{self.name}, camera {self.number + 1}"


@dataclass(frozen=True)
class Camera:
    """A pinhole camera with a square frame.

    Attributes:
        position: (3,).
        axes: the right, up and backward directions, as the rows of (3, 3).
    """

    position: np.ndarray
    axes: np.ndarray

    def project(self, points: np.ndarray) -> np.ndarray:
        """Return the image coordinates (..., 2) of points (..., 3), from (0, 0), top left, to (1, 1), bottom right."""
        right, up, backward = np.moveaxis((points - self.position) @ self.axes.T, -1, 0)
        return np.stack([right, -up], -1) / (-backward * HALF_FRAME)[..., None] / 2 + 0.5

    def arrows(self, labels: np.ndarray) -> np.ndarray:
        """Return poses (num, 4), true or predicted, as arrows on the table: tails and tips (num, 2, 2) in the image.

        An arrow starts at the object's centre and points to the object's front.
        """
        tails = REACH * labels[:, :2]
        fronts = labels[:, [2, 3]] * [1.0, -1.0]
        fronts = fronts / np.maximum(np.linalg.norm(fronts, axis=1, keepdims=True), 1e-9)
        ends = np.stack([tails, tails + SCALES[1] * fronts], 1)
        return self.project(np.concatenate([ends, np.zeros((*ends.shape[:2], 1))], -1))


def draw_view(seed: int, name: str, index: int, number: int) -> View:
    """Draw the scale and the camera of a view at random; the result depends only on the arguments."""
    draw = rng("pose view", seed, index, number)
    return View(name, number, draw.uniform(*SCALES), draw.uniform(0.0, 2 * np.pi), draw.uniform(*ELEVATIONS))


def draw_labels(seed: int, index: int, number: int, num: int) -> np.ndarray:
    """Draw the poses of a view, (num, 4): x and y, uniform in [-1, 1], and sine and cosine of a uniform azimuth."""
    draw = rng("pose labels", seed, index, number).uniform(size=(num, 3))
    azimuth = 2 * np.pi * draw[:, 2]
    return np.column_stack([2 * draw[:, :2] - 1, np.sin(azimuth), np.cos(azimuth)]).astype(np.float32)


def fit_camera(view: View, radius: float, height: float) -> Camera:
    """Return the nearest camera in a view's direction that sees the table, and the object in every pose.

    A point with coordinate u along the frame and b backward is visible if |u - c_u| <= k (c_b - b), where c is the
    camera. For a fixed direction these bounds are linear in c, so the nearest camera has a closed form.

    Args:
        view: determines the direction of the camera.
        radius: the extent of the scaled object from its axis.
        height: the extent of the scaled object above the table.
    """
    (sin_a, sin_e), (cos_a, cos_e) = np.sin([view.azimuth, view.elevation]), np.cos([view.azimuth, view.elevation])
    axes = np.array(
        [[-sin_a, cos_a, 0.0], [-sin_e * cos_a, -sin_e * sin_a, cos_e], [cos_e * cos_a, cos_e * sin_a, sin_e]]
    )
    right, up, backward = axes @ _extent(radius, height).T
    k = HALF_FRAME * (1 - 2 * MARGIN)
    sides = [((u + k * backward).max(), (-u + k * backward).max()) for u in (right, up)]
    distance = max((high + low) / (2 * k) for high, low in sides)
    centre = [(high - low) / 2 for high, low in sides]
    return Camera(np.array([*centre, distance]) @ axes, axes)


def _extent(radius: float, height: float) -> np.ndarray:
    """Return points (num, 3) whose convex hull contains the table, and the object in every pose."""
    signs = np.array([[x, y] for x in (-1.0, 1.0) for y in (-1.0, 1.0)])
    angles = np.arange(16) * (2 * np.pi / 16)
    circle = radius / np.cos(np.pi / 16) * np.column_stack([np.cos(angles), np.sin(angles)])
    reach = (REACH * signs[:, None] + circle).reshape(-1, 2)
    return np.concatenate([_at(signs, 0.0), _at(signs, -TABLE_THICKNESS), _at(reach, 0.0), _at(reach, height)])


def _at(points: np.ndarray, z: float) -> np.ndarray:
    return np.column_stack([points, np.full(len(points), z)])
