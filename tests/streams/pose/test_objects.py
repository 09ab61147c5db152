import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from metaleader.streams.pose.objects import (
    PASCAL3D,
    builtin_objects,
    make_mesh,
    pascal3d_objects,
    read_off,
)
from metaleader.streams.pose.shapes import FAMILIES, build_shape

NAMES = [f"{kind} {i:02d}" for kind, numbers in PASCAL3D.items() for i in numbers]
# A wedge: five corners on the ground and above, one face a square.
WEDGE = """OFF  # a comment
5 5 0

0 0 0
4 0 0
4 2 0  # another
0 2 0
0 1 3
4 3 2 1 0
3 0 1 4 255 0 0
3 1 2 4
3 2 3 4
3 3 0 4
"""


def shapes():
    """Fifty meshes under the names of PASCAL3D+."""
    return dict(zip(NAMES, (build_shape(name) for name in builtin_objects().names), strict=True))


def write_npz(path, meshes):
    arrays = {}
    for name, (vertices, faces) in meshes.items():
        arrays[f"{name.replace(' ', '/')}/vertices"] = vertices.astype(np.float32)
        arrays[f"{name.replace(' ', '/')}/faces"] = faces.astype(np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def write_off(folder, meshes):
    for name, (vertices, faces) in meshes.items():
        path = folder / f"{name.replace(' ', '/')}.off"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        text.write(f"OFF\n{len(vertices)} {len(faces)} 0\n")
        np.savetxt(text, vertices.astype(np.float32), fmt="%.9g")
        np.savetxt(text, np.column_stack([np.full(len(faces), 3), faces]), fmt="%d")
        path.write_text(text.getvalue())


def test_fifty_objects_of_nine_classes_both_ways():
    assert len(NAMES) == 50
    assert [len(numbers) for numbers in PASCAL3D.values()] == [8, 6, 5, 3, 5, 10, 4, 6, 3]
    builtin = builtin_objects()
    assert len(set(builtin.names)) == 50
    assert len(FAMILIES) == 9


def test_archive_and_folder_give_the_same_meshes(tmp_path):
    meshes = shapes()
    meshes["bottle 01"] = meshes["car 01"]  # what is not asked for is left alone
    write_npz(tmp_path / "a" / "pascal3d" / "pascal3d_cad.npz", meshes)
    write_off(tmp_path / "b" / "pascal3d" / "CAD", meshes)
    write_off(tmp_path / "c" / "pascal3d", meshes)
    archive, folder, bare = (pascal3d_objects(tmp_path / place) for place in "abc")
    assert archive.names == folder.names == bare.names == tuple(NAMES)
    assert folder.digest == bare.digest != archive.digest
    for name in NAMES[::7]:
        one, two = archive.load(name), folder.load(name)
        np.testing.assert_array_equal(one.faces, two.faces)
        np.testing.assert_allclose(one.vertices, two.vertices, atol=1e-6)
    # The digest follows the content.
    (tmp_path / "c" / "pascal3d" / "sofa" / "06.off").write_text(WEDGE)
    assert pascal3d_objects(tmp_path / "c").digest != folder.digest


@pytest.mark.parametrize("text", [WEDGE, WEDGE.replace("OFF  # a comment\n5 5 0", "OFF 5 5 0")])
def test_off(tmp_path, text):
    path = tmp_path / "wedge.off"
    path.write_text(text)
    mesh = read_off(path)
    # Centred at (2, 1), on the ground; the radius sqrt(5) exceeds half the height.
    expected = (np.array([[0, 0, 0], [4, 0, 0], [4, 2, 0], [0, 2, 0], [0, 1, 3]]) - [2, 1, 0]) / np.sqrt(5)
    np.testing.assert_allclose(mesh.vertices, expected, atol=1e-6)
    assert mesh.faces.tolist() == [[3, 2, 1], [3, 1, 0], [0, 1, 4], [1, 2, 4], [2, 3, 4], [3, 0, 4]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "does not begin with OFF"),
        (lambda text: text.replace("OFF", "PLY"), "does not begin with OFF"),
        (lambda text: "OFF", "truncated or damaged"),
        (lambda text: text[: len(text) // 2], "truncated or damaged"),
        (lambda text: text[:-12], "truncated or damaged"),
        (lambda text: text.replace("5 5 0", "5 -5 0"), "truncated or damaged"),
        (lambda text: text.replace("5 5 0", "99999999999 5 0"), "truncated or damaged"),
        (lambda text: text.replace("4 0 0", "4 0"), "truncated or damaged"),
        (lambda text: text.replace("4 0 0", "4 zero 0"), "truncated or damaged"),
        (lambda text: text.replace("3 1 2 4", "3 1 2"), "truncated or damaged"),
        (lambda text: text.replace("3 1 2 4", "2 1 2"), "truncated or damaged"),
        (lambda text: text.replace("4 0 0", "nan 0 0"), "NaN"),
        (lambda text: text.replace("4 0 0", "inf 0 0"), "infinite"),
        (lambda text: text.replace("3 1 2 4", "3 1 2 5"), "faces use vertices"),
        (lambda text: text.replace("3 1 2 4", "3 1 2 -1"), "faces use vertices"),
        (lambda text: text.replace("0 1 3\n", "0 1 0\n"), "flat"),
    ],
)
def test_damaged_off(tmp_path, damage, message):
    path = tmp_path / "broken.off"
    path.write_text(damage(WEDGE))
    with pytest.raises(ValueError, match=message) as error:
        read_off(path)
    assert "broken.off" in str(error.value)


@pytest.mark.parametrize(
    ("vertices", "faces", "message"),
    [
        (np.zeros((4, 2)), np.zeros((1, 3), int), "vertices must be"),
        (np.zeros((4, 3)), np.zeros((0, 3), int), "vertices must be"),
        (np.zeros((4, 3), int), np.zeros((1, 3), int), "vertices must be floats"),
        (np.zeros((4, 3)), np.zeros((1, 3)), "faces integers"),
        (np.zeros((4, 3)), np.zeros((1, 3), int), "flat"),
        (np.diag([1e30, 1e30, 1e30]), np.array([[0, 1, 2]]), "size"),
    ],
)
def test_what_is_no_mesh(vertices, faces, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(vertices, faces, "here")


def test_missing_data_names_the_alternative(tmp_path):
    with pytest.raises(FileNotFoundError, match="objects='builtin'"):
        pascal3d_objects(tmp_path)
    meshes = shapes()
    del meshes["boat 02"], meshes["sofa 01"]
    write_npz(tmp_path / "a" / "pascal3d" / "pascal3d_cad.npz", meshes)
    write_off(tmp_path / "b" / "pascal3d", meshes)
    for place in "ab":
        with pytest.raises(ValueError, match=r"lacks 2 of 50 objects: boat 02, sofa 01"):
            pascal3d_objects(tmp_path / place)


def test_damaged_archive(tmp_path):
    path = tmp_path / "pascal3d" / "pascal3d_cad.npz"
    write_npz(path, shapes())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or not a npz file"):
        pascal3d_objects(tmp_path)
    # One flipped byte in the middle of a member's data.
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        start = archive.getinfo("car/03/vertices.npy").header_offset
    path.write_bytes(whole[: start + 200] + bytes([whole[start + 200] ^ 0xFF]) + whole[start + 201 :])
    with pytest.raises(ValueError, match="car 03 is damaged"):
        pascal3d_objects(tmp_path).load("car 03")


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def test_a_hostile_archive_runs_nothing(tmp_path):
    meshes, marker = shapes(), tmp_path / "executed"
    path = tmp_path / "pascal3d" / "pascal3d_cad.npz"
    write_npz(path, meshes)
    hostile = np.empty(1, object)
    hostile[0] = Hostile(marker)
    content = io.BytesIO()
    np.save(content, hostile, allow_pickle=True)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["car/03/vertices.npy"] = content.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match="car 03 is damaged"):
        pascal3d_objects(tmp_path).load("car 03")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Hostile(marker)))  # the charge is live: only the reader kept it from going off
    assert marker.exists()


def test_builtin_shapes_are_closed_and_wound_outwards():
    for name in builtin_objects().names:
        vertices, faces = build_shape(name)
        a, b, c = (vertices[faces[:, i]] for i in range(3))
        normals = np.cross(b - a, c - a)
        # In a closed surface the normals, weighted by area, cancel; wound outwards, the volume is positive.
        np.testing.assert_allclose(normals.sum(0), 0, atol=1e-9)
        assert (a * normals).sum() / 6 > 0.05, name


def height_map(mesh, turn=0.0):
    """The object's height over a grid, from points sampled evenly on its faces."""
    a, b, c = (mesh.vertices[mesh.faces[:, i]].astype(float) for i in range(3))
    draw = np.random.default_rng(0)
    area = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    pick = draw.choice(len(a), 6_000, p=area / area.sum())
    u, v = draw.random((2, 6_000, 1))
    u, v = np.where(u + v > 1, 1 - u, u), np.where(u + v > 1, 1 - v, v)
    points = a[pick] + u * (b - a)[pick] + v * (c - a)[pick]
    cos, sin = np.cos(turn), np.sin(turn)
    x, y = cos * points[:, 0] - sin * points[:, 1], sin * points[:, 0] + cos * points[:, 1]
    grid = np.zeros((12, 12))
    np.maximum.at(
        grid, (np.clip((x + 1.2) * 5, 0, 11).astype(int), np.clip((y + 1.2) * 5, 0, 11).astype(int)), points[:, 2]
    )
    return grid


def asymmetry(mesh):
    """How much the height map changes, at least, in turns of 30 to 330 degrees, relative to its sum."""
    still = height_map(mesh)
    return min(np.abs(height_map(mesh, np.radians(turn)) - still).sum() for turn in range(30, 331, 30)) / still.sum()


def test_no_builtin_shape_looks_the_same_after_a_turn():
    # The measure works: a long box turned by 180 degrees is itself.
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-3, 3) for z in (0, 2)], float)
    sides = [
        [0, 1, 3],
        [0, 3, 2],
        [4, 5, 7],
        [4, 7, 6],
        [0, 1, 5],
        [0, 5, 4],
        [2, 3, 7],
        [2, 7, 6],
        [1, 3, 7],
        [1, 7, 5],
    ]
    assert asymmetry(make_mesh(corners, np.array(sides), "box")) < 0.1
    builtin = builtin_objects()
    found = {name: asymmetry(builtin.load(name)) for name in builtin.names}
    assert min(found.values()) > 0.2, sorted(found.items(), key=lambda item: item[1])[:5]
