"""The objects of the pose stream: 50 meshes of nine classes, from PASCAL3D+ or built in.

An object with a rotational symmetry has no unique azimuth. Therefore PASCAL3D+'s bottles, trains and dining tables,
three buses, a boat and a monitor are excluded.
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
from metaleader.system.download import file_sha256
from metaleader.system.files import open_regular, read_regular
from metaleader.system.npz import npz_arrays

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
# In bytes. The largest array of PASCAL3D+'s objects has 0.8 MB.
_ARRAY_LIMIT = 1 << 27


@dataclass(frozen=True)
class Mesh:
    """A triangle mesh with z up and its front at -y.

    The object stands on z = 0, centred at the z axis. The larger of its radius about the axis and half its height is 1.

    Attributes:
        vertices: (V, 3), float32.
        faces: indices of vertices, (F, 3), int32, with either winding.
    """

    vertices: np.ndarray
    faces: np.ndarray


@dataclass(frozen=True)
class Objects:
    """A collection of named meshes.

    Attributes:
        names: classes and numbers, such as "car 03", in a fixed order.
        digest: a string that changes if any mesh changes.
        load: returns the mesh of a name; raises ValueError or OSError if the file is damaged.
    """

    names: tuple[str, ...]
    digest: str
    load: Callable[[str], Mesh]


def builtin_objects() -> Objects:
    """Return 50 objects of nine families, composed of primitives; they need no data."""
    names = tuple(f"{family} {i + 1:02d}" for family, (_, num) in FAMILIES.items() for i in range(num))
    return Objects(names, f"builtin {SHAPES_VERSION}", lambda name: make_mesh(*build_shape(name), name))


def pascal3d_objects(data: Folder = None) -> Objects:
    """Return the objects of PASCAL3D+ in a data folder.

    Args:
        data: a folder with `pascal3d/pascal3d_cad.npz`, or with the official files as `pascal3d/CAD/<class>/<NN>.off`
            or `pascal3d/<class>/<NN>.off`.

    Raises:
        FileNotFoundError: if there are no such files; the message says how to get them.
        ValueError: if objects are missing.
    """
    names = tuple(f"{kind} {i:02d}" for kind, numbers in PASCAL3D.items() for i in numbers)
    paths = find("pascal3d", data)
    if paths[0].suffix == ".npz":
        archive = paths[0]
        _check_complete(names, _names_in(archive), archive)
        return Objects(names, file_sha256(archive), lambda name: _from_npz(archive, name))
    files = {f"{path.parent.name} {path.stem}": path for path in paths}
    _check_complete(names, set(files), data_folder(data) / "pascal3d")
    digest = hashlib.sha256()
    for name in names:
        digest.update(hashlib.sha256(read_regular(files[name])).digest())
    return Objects(names, digest.hexdigest(), lambda name: read_off(files[name]))


def read_off(path: Path) -> Mesh:
    """Read a mesh in the textual Object File Format; polygons are divided into triangles.

    Raises:
        ValueError: if the file is damaged.
    """
    lines = (line.split("#")[0].split() for line in read_regular(path).decode("ascii", errors="replace").splitlines())
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
    """Check a mesh, centre it and scale it to unit size.

    Raises:
        ValueError: if the mesh is invalid; the message begins with `where`.
    """
    if vertices.ndim != 2 or vertices.shape[1:] != (3,) or faces.ndim != 2 or faces.shape[1:] != (3,) or not len(faces):
        raise ValueError(f"{where}: vertices must be (V, 3) and faces (F, 3), got {vertices.shape} and {faces.shape}")
    if vertices.dtype.kind != "f" or faces.dtype.kind not in "iu":
        raise ValueError(f"{where}: vertices must be floats and faces integers, got {vertices.dtype} and {faces.dtype}")
    if not np.isfinite(vertices).all():
        raise ValueError(f"{where}: {int((~np.isfinite(vertices)).sum())} coordinates are NaN or infinite")
    if faces.min() < 0 or faces.max() >= len(vertices):
        raise ValueError(f"{where}: faces use vertices {faces.min()} to {faces.max()}, there are {len(vertices)}")
    used = vertices[np.unique(faces)].astype(np.float64)
    low, high = used.min(0), used.max(0)
    centre = [(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]]
    size = max(np.linalg.norm((used - centre)[:, :2], axis=1).max(), (high[2] - low[2]) / 2)
    if not 0 < size < 1e6 or (high - low).min() < 1e-6 * size:
        raise ValueError(f"{where}: the object is flat or has an implausible size; it extends over {high - low}")
    return Mesh(((vertices - centre) / size).astype(np.float32), faces.astype(np.int32))


def _names_in(archive: Path) -> set[str]:
    try:
        with open_regular(archive) as file, zipfile.ZipFile(file) as members:
            entries = set(members.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ValueError(f"{archive} is truncated or not a npz file ({error}); use an intact copy") from error
    prefixes = {entry.removesuffix("/vertices.npy") for entry in entries if entry.endswith("/vertices.npy")}
    return {prefix.replace("/", " ") for prefix in prefixes if f"{prefix}/faces.npy" in entries}


def _from_npz(archive: Path, name: str) -> Mesh:
    names = [f"{name.replace(' ', '/')}/{part}" for part in ("vertices", "faces")]
    try:
        vertices, faces = npz_arrays(archive, names, _ARRAY_LIMIT).values()
    except ValueError as error:
        raise ValueError(f"{archive}: {name} is damaged ({error}); use an intact copy") from error
    return make_mesh(vertices, faces, f"{archive}, {name}")


def _check_complete(names: tuple[str, ...], present: set[str], where: Path) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(f"{where} lacks {len(missing)} of {len(names)} objects: {', '.join(missing)}")
