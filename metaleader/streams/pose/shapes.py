"""50 built-in objects of nine families, composed of primitives, without rotational symmetry.

Each family is a function that adds primitives with random proportions to a `Builder`. Lengths are arbitrary; in these
functions y points to the front.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from metaleader.tasks import rng

# Increment if any built-in object changes.
SHAPES_VERSION = 1

Triple = tuple[float, float, float]


class Builder:
    """Collects primitives into one mesh. Faces are wound outwards, and share no vertices so that edges are sharp."""

    def __init__(self) -> None:
        self.corners: list[np.ndarray] = []

    def solid(self, bottom: np.ndarray, top: np.ndarray) -> None:
        """Add the hull of two convex polygons (num, 3), both anticlockwise when seen from the top."""
        num = len(bottom)
        for i in range(1, num - 1):
            self.corners.append(np.array([bottom[0], bottom[i + 1], bottom[i]]))
            self.corners.append(np.array([top[0], top[i], top[i + 1]]))
        for i in range(num):
            j = (i + 1) % num
            self.corners.append(np.array([bottom[i], bottom[j], top[j]]))
            self.corners.append(np.array([bottom[i], top[j], top[i]]))

    def box(self, low: Triple, high: Triple, taper: float = 1.0) -> None:
        """Add a box between two corners; its top is scaled along y by `taper`."""
        (x0, y0, z0), (x1, y1, z1) = low, high
        middle, half = (y0 + y1) / 2, (y1 - y0) / 2 * taper
        self.solid(
            np.array([[x0, y0, z0], [x1, y0, z0], [x1, y1, z0], [x0, y1, z0]]),
            np.array([[x, middle + s * half, z1] for x, s in ((x0, -1), (x1, -1), (x1, 1), (x0, 1))]),
        )

    def rod(self, start: Triple, end: Triple, radius: float, end_radius: float | None = None, sides: int = 16) -> None:
        """Add a cylinder between two points, or a truncated cone if the radii differ."""
        a, b = np.array(start, float), np.array(end, float)
        axis = (b - a) / np.linalg.norm(b - a)
        side = np.cross(axis, [0.0, 0.0, 1.0] if abs(axis[2]) < 0.9 else [0.0, 1.0, 0.0])
        side /= np.linalg.norm(side)
        angles = np.arange(sides) * (2 * np.pi / sides)
        ring = np.cos(angles)[:, None] * side + np.sin(angles)[:, None] * np.cross(axis, side)
        self.solid(a + radius * ring, b + (radius if end_radius is None else end_radius) * ring)

    def roof(self, low: Triple, high: Triple) -> None:
        """Add a gable roof whose ridge runs along y."""
        (x0, y0, z0), (x1, y1, z1) = low, high
        self.solid(
            np.array([[x0, y0, z0], [x1, y0, z0], [(x0 + x1) / 2, y0, z1]]),
            np.array([[x0, y1, z0], [x1, y1, z0], [(x0 + x1) / 2, y1, z1]]),
        )

    def wheels(self, x: float, y: float, radius: float, width: float) -> None:
        """Add a pair of wheels on the ground, at -x and x."""
        for side in (-x, x):
            self.rod((side - width / 2, y, radius), (side + width / 2, y, radius), radius)


def _truck(b: Builder, draw: np.random.Generator) -> None:
    length, height, cab, hood = draw.uniform((0.7, 0.6, 0.25, 0.35), (1.1, 0.9, 0.35, 0.5))
    b.box((-0.36, -length, 0.25), (0.36, 0.0, 0.25 + height))
    b.box((-0.32, 0.1, 0.15), (0.32, 0.1 + cab, 0.25 + 0.75 * height), 0.8)
    b.box((-0.26, 0.1 + cab, 0.15), (0.26, 0.1 + cab + hood, 0.25 + 0.25 * height))
    b.box((-0.25, -length, 0.12), (0.25, 0.1, 0.25))
    for y in (-length + 0.2, -length + 0.55, cab + hood - 0.1):
        b.wheels(0.3, y, 0.17, 0.14)


def _plane(b: Builder, draw: np.random.Generator) -> None:
    radius, span, chord, sweep, tail = draw.uniform((0.11, 0.75, 0.22, 0.0, 0.25), (0.17, 1.1, 0.34, 0.35, 0.4))
    z, thickness = 0.35, np.array([0.0, 0.0, 0.025])
    b.rod((0, -0.8, z), (0, 0.7, z), 0.6 * radius, radius)
    b.rod((0, 0.7, z), (0, 1.0, z), radius, 0.03)
    b.rod((0, 0.45, 0.0), (0, 0.45, z), 0.05)
    for side in (-1, 1):
        wing = np.array(
            [[0, 0.05, z], [side * span, 0.05 - sweep, z], [side * span, 0.2 - sweep, z], [0, 0.05 + chord, z]]
        )
        fin = np.array([[0, -0.8, z], [side * tail, -0.85, z], [side * tail, -0.72, z], [0, -0.55, z]])
        for sheet in (wing, fin):
            ring = sheet if side == 1 else sheet[::-1]
            b.solid(ring - thickness, ring + thickness)
    b.wheels(0.2, -0.05, 0.09, 0.06)
    b.box((-0.025, -0.85, z), (0.025, -0.5, z + 0.45), 0.6)


def _chair(b: Builder, draw: np.random.Generator) -> None:
    width, seat, back, thick = draw.uniform((0.36, 0.45, 0.55, 0.05), (0.5, 0.65, 0.9, 0.1))
    for x in (-width, width - 0.09):
        for y in (-0.42, 0.33):
            b.box((x, y, 0.0), (x + 0.09, y + 0.09, seat))
    b.box((-width, -0.42, seat), (width, 0.42, seat + thick))
    b.box((-width, -0.42, seat + thick), (width, -0.42 + thick, seat + back))
    if draw.random() < 0.5:
        b.box((width - 0.08, -0.42, seat + 0.25), (width, 0.3, seat + 0.32))
        b.box((width - 0.08, 0.22, seat), (width, 0.3, seat + 0.25))


def _boat(b: Builder, draw: np.random.Generator) -> None:
    width, length, cabin, mast, place = draw.uniform((0.25, 0.7, 0.25, 0.6, -0.2), (0.4, 1.0, 0.45, 1.1, 0.2))
    deck = np.array([[-1, -1], [1, -1], [1, 0.3], [0.45, 0.8], [0, 1.0], [-0.45, 0.8], [-1, 0.3]]) * [width, length]
    b.solid(np.column_stack([0.7 * deck, np.zeros(7)]), np.column_stack([deck, np.full(7, 0.3)]))
    b.box((-0.6 * width, -0.85 * length, 0.3), (0.6 * width, -0.15 * length, 0.3 + cabin), 0.8)
    b.rod((0, place, 0.3), (0, place, 0.3 + mast), 0.035)
    b.rod((0.1, -0.6 * length, 0.3 + cabin), (0.1, -0.6 * length, 0.5 + cabin), 0.09)


def _crane(b: Builder, draw: np.random.Generator) -> None:
    height, jib, counter, hook = draw.uniform((0.9, 0.95, 0.3, 0.3), (1.2, 1.25, 0.4, 0.6))
    b.box((-0.4, -0.4, 0.0), (0.4, 0.4, 0.14))
    b.box((-0.1, -0.1, 0.14), (0.1, 0.1, height))
    b.box((0.08, -0.02, height - 0.3), (0.32, 0.24, height))
    b.box((-0.08, -counter, height), (0.08, jib, height + 0.12))
    b.box((-0.18, -counter - 0.18, height - 0.2), (0.18, -counter + 0.1, height + 0.12))
    b.rod((0, jib - 0.12, height), (0, jib - 0.12, height - hook), 0.03)
    b.box((-0.1, jib - 0.22, height - hook - 0.15), (0.1, jib - 0.02, height - hook))


def _house(b: Builder, draw: np.random.Generator) -> None:
    width, length, wall, gable, annex = draw.uniform((0.4, 0.5, 0.4, 0.3, 0.3), (0.55, 0.8, 0.65, 0.5, 0.5))
    b.box((-width, -length, 0.0), (width, length, wall))
    b.roof((-width - 0.06, -length - 0.06, wall), (width + 0.06, length + 0.06, wall + gable))
    b.box((0.4 * width, 0.45 * length, wall), (0.4 * width + 0.16, 0.45 * length + 0.16, wall + gable + 0.2))
    b.box((width, -length, 0.0), (width + annex, -0.1 * length, 0.6 * wall))


def _kettle(b: Builder, draw: np.random.Generator) -> None:
    radius, top, height, spout = draw.uniform((0.42, 0.22, 0.6, 0.5), (0.52, 0.32, 0.9, 0.7))
    b.rod((0, 0, 0), (0, 0, height), radius, top, 24)
    b.rod((0, 0, height), (0, 0, height + 0.12), 0.09)
    b.rod((0, 0.7 * radius, 0.3 * height), (0, radius + spout, 1.1 * height), 0.15, 0.07)
    out = -radius - 0.25
    b.rod((0, -0.6 * radius, 0.85 * height), (0, out, 0.85 * height), 0.06)
    b.rod((0, out, 0.88 * height), (0, out, 0.25 * height), 0.06)


def _tractor(b: Builder, draw: np.random.Generator) -> None:
    rear, front, hood, cab, pipe = draw.uniform((0.36, 0.16, 0.6, 0.35, 0.3), (0.46, 0.24, 0.9, 0.55, 0.5))
    b.wheels(0.4, -0.35, rear, 0.2)
    b.wheels(0.34, hood - 0.15, front, 0.14)
    b.box((-0.2, -0.3, 0.22), (0.2, hood, 0.62))
    b.box((-0.28, -0.6, 0.4), (0.28, 0.1, 0.62 + cab), 0.8)
    b.rod((0.12, 0.6 * hood, 0.62), (0.12, 0.6 * hood, 0.62 + pipe), 0.05)


def _lamp(b: Builder, draw: np.random.Generator) -> None:
    base, post, arm, head = draw.uniform((0.28, 0.7, 0.55, 0.22), (0.38, 1.0, 0.8, 0.32))
    b.rod((0, 0, 0), (0, 0, 0.1), base, 0.8 * base, 24)
    b.rod((0, 0, 0.1), (0, -0.15, post), 0.05)
    b.rod((0, -0.2, post - 0.04), (0, arm, post + 0.25), 0.045)
    b.rod((0, arm, post + 0.3), (0, arm + 0.2, post - 0.05), 0.08, head, 24)
    b.box((0.1, -0.12, 0.1), (0.2, 0.02, 0.18))


# The function of each family, and its number of objects.
FAMILIES: dict[str, tuple[Callable[[Builder, np.random.Generator], None], int]] = {
    "truck": (_truck, 6),
    "plane": (_plane, 6),
    "chair": (_chair, 6),
    "boat": (_boat, 6),
    "crane": (_crane, 6),
    "house": (_house, 5),
    "kettle": (_kettle, 5),
    "tractor": (_tractor, 5),
    "lamp": (_lamp, 5),
}


def build_shape(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices (V, 3) and faces (F, 3) of a built-in object such as "truck 01"."""
    family, number = name.split()
    builder = Builder()
    FAMILIES[family][0](builder, rng("pose shape", list(FAMILIES).index(family), int(number)))
    # Half a turn puts the front at -y, as in PASCAL3D+.
    vertices = np.concatenate(builder.corners) * [-1.0, -1.0, 1.0]
    return vertices, np.arange(len(vertices)).reshape(-1, 3)
