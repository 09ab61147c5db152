"""The objects of the pose stream: 50 meshes of nine classes, from PASCAL3D+ or built in.

Objects that look the same from several sides have no azimuth, so of PASCAL3D+ bottles, trains, dining tables, three
buses, a boat and a monitor are left out.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from metaleader.streams.datasets.registry import Folder, data_folder, find
from metaleader.streams.pose.shapes import FAMILIES, SHAPES_VERSION, build_shape

PASCAL3D = {
    "aeroplane": (1, 2, 3, 4, 5, 6, 7, 8),
    "bicycle": (1, 2, 3, 4, 5, 6),
    "boat": (1, 2, 3, 4, 6),
    "bus": (1, 3, 6),
    "car": (1, 3, 4, 6, 8),
    "chair": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    "motorbike": (1, 2, 3, 5),
    "sofa": (1, 2, 3, 4, 5, 6),
    "tvmonitor": (2, 3, 4),
}


@dataclass(frozen=True)
class Mesh:
    """Triangles in space: z up, the front at -y.

    The object stands on z = 0 with the z axis through its middle; the larger of its radius about that axis and half its
    height is 1.

    Attributes:
        vertices: (V, 3), float32.
        faces: (F, 3), int32: indices of vertices; the winding may be either.
    """

    vertices: np.ndarray
    faces: np.ndarray


@dataclass(frozen=True)
class Objects:
    """A collection of named meshes.

    Attributes:
        names: class and number, such as "car 03", in a fixed order.
        digest: changes when any mesh does.
        load: gives the mesh of a name; raises ValueError or OSError for a damaged file.
    """

    names: tuple[str, ...]
    digest: str
    load: Callable[[str], Mesh]


def builtin_objects() -> Objects:
    """Fifty objects of nine families composed of boxes, cylinders, cones and roofs: they need no data."""
    names = tuple(f"{family} {i + 1:02d}" for family, (_, num) in FAMILIES.items() for i in range(num))
    return Objects(names, f"builtin {SHAPES_VERSION}", lambda name: make_mesh(*build_shape(name), name))


def pascal3d_objects(data: Folder = None) -> Objects:
    """The objects of PASCAL3D+ in a data folder.

    Args:
        data: holds `pascal3d/pascal3d_cad.npz` or the official files as `pascal3d/CAD/<class>/<NN>.off`, with or
            without the folder CAD.

    Raises:
        FileNotFoundError: when there is neither; says how to get them, and what works without.
        ValueError: when objects are missing.
    """
    names = tuple(f"{kind} {i:02d}" for kind, numbers in PASCAL3D.items() for i in numbers)
    found = find("pascal3d", data)
    if found[0].suffix == ".npz":
        archive = found[0]
        _refuse_missing(names, _names_in(archive), archive)
        return Objects(names, hashlib.sha256(archive.read_bytes()).hexdigest(), lambda name: _from_npz(archive, name))
    files = {f"{path.parent.name} {path.stem}": path for path in found}
    _refuse_missing(names, set(files), data_folder(data) / "pascal3d")
    digest = hashlib.sha256()
    for name in names:
        digest.update(hashlib.sha256(files[name].read_bytes()).digest())
    return Objects(names, digest.hexdigest(), lambda name: read_off(files[name]))


def read_off(path: Path) -> Mesh:
    """Read a mesh in the Object File Format (text); faces of more than three corners are cut into triangles.

    Raises:
        ValueError: for a damaged file.
    """
    lines = (line.split("#")[0].split() for line in path.read_text("ascii", errors="replace").splitlines())
    rows = [row for row in lines if row]
    if not rows or rows[0][0] != "OFF":
        raise ValueError(f"{path} is not an OFF file: it does not begin with OFF")
    rows[0] = rows[0][1:]
    rows = rows if rows[0] else rows[1:]
    try:
        num_vertices, num_faces = int(rows[0][0]), int(rows[0][1])
        if min(num_vertices, num_faces) < 1 or len(rows) < 1 + num_vertices + num_faces:
            raise ValueError(f"{num_vertices} vertices and {num_faces} faces announced in {len(rows)} lines")
        vertices = np.array([row[:3] for row in rows[1 : 1 + num_vertices]], dtype=np.float64)
        faces = []
        for row in rows[1 + num_vertices : 1 + num_vertices + num_faces]:
            corners = [int(item) for item in row[1 : 1 + int(row[0])]]
            if len(corners) != int(row[0]) or len(corners) < 3:
                raise ValueError(f"face {' '.join(row)!r}")
            faces.extend((corners[0], *pair) for pair in pairwise(corners[1:]))
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); use an intact copy") from error
    return make_mesh(vertices, np.array(faces), str(path))


def make_mesh(vertices: np.ndarray, faces: np.ndarray, where: str) -> Mesh:
    """Check a mesh and bring it to the middle and to unit size.

    Raises:
        ValueError: when it is none; the message names `where` it comes from.
    """
    if vertices.ndim != 2 or vertices.shape[1:] != (3,) or faces.ndim != 2 or faces.shape[1:] != (3,) or not len(faces):
        raise ValueError(f"{where}: vertices must be (V, 3) and faces (F, 3), got {vertices.shape} and {faces.shape}")
    if vertices.dtype.kind != "f" or faces.dtype.kind not in "iu":
        raise ValueError(f"{where}: vertices must be floats and faces integers, got {vertices.dtype} and {faces.dtype}")
    if not np.isfinite(vertices).all():
        raise ValueError(f"{where}: {int((~np.isfinite(vertices)).sum())} coordinates are NaN or infinite")
    if faces.min() < 0 or faces.max() >= len(vertices):
        raise ValueError(f"{where}: faces name vertices {faces.min()} to {faces.max()}, there are {len(vertices)}")
    used = vertices[np.unique(faces)].astype(np.float64)
    low, high = used.min(0), used.max(0)
    centre = [(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]]
    size = max(np.linalg.norm((used - centre)[:, :2], axis=1).max(), (high[2] - low[2]) / 2)
    if not 0 < size < 1e6 or (high - low).min() < 1e-6 * size:
        raise ValueError(f"{where}: the object is flat or of no plausible size; it extends over {high - low}")
    return Mesh(((vertices - centre) / size).astype(np.float32), faces.astype(np.int32))


def _names_in(archive: Path) -> set[str]:
    try:
        with zipfile.ZipFile(archive) as members:
            entries = set(members.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{archive} is truncated or not a npz file ({error}); use an intact copy") from error
    wanted = {entry.removesuffix("/vertices.npy") for entry in entries if entry.endswith("/vertices.npy")}
    return {entry.replace("/", " ") for entry in wanted if f"{entry}/faces.npy" in entries}


def _from_npz(archive: Path, name: str) -> Mesh:
    entry = name.replace(" ", "/")
    try:
        with np.load(archive, allow_pickle=False) as arrays:
            vertices, faces = arrays[f"{entry}/vertices"], arrays[f"{entry}/faces"]
    except Exception as error:  # numpy raises what zlib, zipfile, tokenize and ast do
        raise ValueError(f"{archive}: {name} is damaged ({error}); use an intact copy") from error
    return make_mesh(vertices, faces, f"{archive}, {name}")


def _refuse_missing(names: tuple[str, ...], present: set[str], where: Path) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(f"{where} lacks {len(missing)} of {len(names)} objects: {', '.join(missing)}")
