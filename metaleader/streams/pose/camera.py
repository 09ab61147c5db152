"""The geometry of a pose scene: the table, one view of one object, and the camera that holds all of it in its frame.

Lengths are in units of half the table's side; the table top is the square [-1, 1] x [-1, 1] at z = 0, z points up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metaleader.tasks import rng

# The object's centre is uniform in [-REACH, REACH] x [-REACH, REACH]. With the largest scale below, no part of an
# object leaves the table.
REACH = 0.42
SCALES = (0.42, 0.58)
ELEVATIONS = (np.radians(30.0), np.radians(60.0))
TABLE_THICKNESS = 0.08
# The tangent of half the field of view (40 degrees), and the part of the frame that stays free on each side.
HALF_FRAME = float(np.tan(np.radians(20.0)))
MARGIN = 0.03


@dataclass(frozen=True)
class View:
    """One object seen by one camera: what makes a task of the pose stream.

    Attributes:
        name: the object, such as "car 03".
        number: tells the views of one object apart.
        scale: the size of the object on the table, in units of its own.
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
        position: where it stands, (3,).
        axes: its right, its up and its backward direction, the rows of (3, 3).
    """

    position: np.ndarray
    axes: np.ndarray

    def project(self, points: np.ndarray) -> np.ndarray:
        """Where points (..., 3) fall in the image: (..., 2), from (0, 0), top left, to (1, 1), bottom right."""
        right, up, backward = np.moveaxis((points - self.position) @ self.axes.T, -1, 0)
        return np.stack([right, -up], -1) / (-backward * HALF_FRAME)[..., None] / 2 + 0.5

    def arrows(self, labels: np.ndarray) -> np.ndarray:
        """Poses (num, 4), true or predicted, as arrows on the table: (num, 2, 2), tail and tip as `project` gives them.

        An arrow begins at the object's centre and points where its front does.
        """
        tails = REACH * labels[:, :2]
        fronts = labels[:, [2, 3]] * [1.0, -1.0]
        fronts = fronts / np.maximum(np.linalg.norm(fronts, axis=1, keepdims=True), 1e-9)
        ends = np.stack([tails, tails + SCALES[1] * fronts], 1)
        return self.project(np.concatenate([ends, np.zeros((*ends.shape[:2], 1))], -1))


def draw_view(seed: int, name: str, index: int, number: int) -> View:
    """The view of an object, its scale and camera random, dependent on the arguments alone."""
    draw = rng("pose view", seed, index, number)
    return View(name, number, draw.uniform(*SCALES), draw.uniform(0.0, 2 * np.pi), draw.uniform(*ELEVATIONS))


def draw_labels(seed: int, index: int, number: int, num: int) -> np.ndarray:
    """The poses of a view's images, (num, 4): x and y in [-1, 1], uniform, and the sine and cosine of the azimuth."""
    draw = rng("pose labels", seed, index, number).uniform(size=(num, 3))
    azimuth = 2 * np.pi * draw[:, 2]
    return np.column_stack([2 * draw[:, :2] - 1, np.sin(azimuth), np.cos(azimuth)]).astype(np.float32)


def fit_camera(view: View, radius: float, height: float) -> Camera:
    """The nearest camera in the view's direction that sees the table and the object at every position and azimuth.

    For a fixed direction each side of the frame bounds the camera's position linearly, so the answer is closed form:
    with u a point's coordinate along the frame, b backwards, c the camera's, it is seen when |u - c_u| <= k (c_b - b).

    Args:
        view: gives the camera's direction.
        radius: how far the scaled object extends from its axis.
        height: how far it extends above the table.
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
    """Points (num, 3) whose convex hull holds the table and all that the object can reach."""
    signs = np.array([[x, y] for x in (-1.0, 1.0) for y in (-1.0, 1.0)])
    angles = np.arange(16) * (2 * np.pi / 16)
    circle = radius / np.cos(np.pi / 16) * np.column_stack([np.cos(angles), np.sin(angles)])
    reach = (REACH * signs[:, None] + circle).reshape(-1, 2)
    return np.concatenate([_at(signs, 0.0), _at(signs, -TABLE_THICKNESS), _at(reach, 0.0), _at(reach, height)])


def _at(points: np.ndarray, z: float) -> np.ndarray:
    return np.column_stack([points, np.full(len(points), z)])
