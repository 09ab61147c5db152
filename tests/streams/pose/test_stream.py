import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import tyro

from metaleader.checks import check_stream
from metaleader.cli import main
from metaleader.cli.show import show
from metaleader.streams import PoseStream, make_stream
from metaleader.streams.pose import opengl as pose_gl
from metaleader.streams.pose import scene as pose_scene
from metaleader.streams.pose.camera import REACH, View, draw_labels, draw_view
from metaleader.streams.pose.objects import PASCAL3D, builtin_objects, make_mesh
from metaleader.streams.pose.scene import DOT_PLACE, MIN_VISIBLE, Scene, check_visible, colour_of, shrink, view_camera
from metaleader.streams.pose.shapes import FAMILIES
from metaleader.tasks import TaskStream

SMALL: dict[str, Any] = {"tasks": 3, "images": 6, "train": 4, "size": 16}
BACKENDS = [name for name, (libraries, _) in pose_gl.BACKENDS.items() if all(map(pose_gl._loads, libraries))]


def small(cache=None, **options):
    return PoseStream(**{**SMALL, **options}, cache=cache)


@pytest.fixture(scope="session")
def gl():
    """Skip where nothing can be drawn; a failure where that is not allowed."""
    try:
        pose_gl.load_mujoco()
    except (ImportError, OSError) as error:
        if os.environ.get("METALEADER_NO_SKIPS") == "1":
            pytest.fail(f"{error}")
        pytest.skip(f"{error}")


@pytest.fixture(scope="session")
def cache(gl, tmp_path_factory):
    """A cache that holds the stream of SMALL."""
    folder = tmp_path_factory.mktemp("cache")
    small(folder).prepare()
    return folder


@pytest.fixture
def no_drawing(monkeypatch):
    """As on a machine without MuJoCo."""

    def missing():
        raise ImportError("drawing pose images needs MuJoCo")

    monkeypatch.setattr(pose_scene, "load_mujoco", missing)


def draw(name, labels, size=32, seed=0):
    builtin = builtin_objects()
    view = draw_view(seed, name, builtin.names.index(name), 0)
    return view, Scene(view, builtin.load(name), colour_of(name, builtin.names), size), np.array(labels, np.float32)


@pytest.mark.usefixtures("no_drawing")
def test_tasks(cache):
    stream = small(cache)
    assert isinstance(stream, TaskStream)
    assert len(stream) == 3
    for t in range(3):
        task = stream[t]
        assert (task.train.x.shape, task.train.x.dtype) == ((4, 3, 16, 16), torch.uint8)
        assert (task.test.y.shape, task.test.y.dtype) == ((2, 4), torch.float32)
        assert task.name == f"{stream.views[t].name}, camera {stream.views[t].number + 1}"
        assert len({image.numpy().tobytes() for image in task.train.x}) == 4
    assert stream[-1].name == stream[2].name
    for t in (-4, 3):
        with pytest.raises(IndexError, match="of a stream of 3 tasks"):
            stream[t]


@pytest.mark.usefixtures("no_drawing")
def test_a_stream_holds_its_images_once(cache):
    stream = small(cache)
    task, again = stream[0], stream[0]
    storage = task.train.x.untyped_storage()
    assert storage.nbytes() == 6 * 3 * 16 * 16
    assert task.test.x.untyped_storage().data_ptr() == again.train.x.untyped_storage().data_ptr() == storage.data_ptr()


@pytest.mark.usefixtures("no_drawing")
def test_how_much_is_revealed_changes_nothing_else(cache):
    one, two = small(cache)[1], small(cache, train=1)[1]
    assert len(two.train.x) == 1
    for field in ("x", "y"):
        both = [torch.cat([getattr(task.train, field), getattr(task.test, field)]) for task in (one, two)]
        assert torch.equal(*both)


def test_the_same_images_drawn_anew(cache, tmp_path):
    old, new = small(cache), small(tmp_path)
    assert old.folder.name == new.folder.name
    # Drawn in another order, one task at a time.
    for t in (2, 0):
        assert torch.equal(old[t].train.x, new[t].train.x)
        assert torch.equal(old[t].test.y, new[t].test.y)
    assert len(list(new.folder.iterdir())) == 2


def test_what_determines_the_images_names_the_folder(monkeypatch):
    base = small()
    same = [{"tasks": 50}, {"train": 2}, {"order": "class"}]
    other = [{"seed": 1}, {"images": 7}, {"size": 17}]
    assert all(small(**change).folder == base.folder for change in same)
    folders = {small(**change).folder for change in other}
    assert len(folders | {base.folder}) == 4
    monkeypatch.setattr("metaleader.streams.pose.stream.SCENE_VERSION", -1)
    assert small().folder != base.folder


def test_ninety_views_of_fifty_objects():
    stream = PoseStream(seed=3)
    views = stream.views
    assert (len(stream), len(set(views))) == (90, 90)
    first = [view.name for view in views if view.number == 0]
    second = [view.name for view in views if view.number == 1]
    assert sorted(first) == sorted(builtin_objects().names)
    assert len(set(second)) == len(second) == 40
    # Random order: not sorted by class, and the second cameras are spread over the stream.
    assert 20 < np.mean([t for t, view in enumerate(views) if view.number == 1]) < 70
    assert PoseStream(seed=3).views == views != PoseStream(seed=4).views
    # The first tasks do not depend on how many follow; later ones are new views.
    assert PoseStream(seed=3, tasks=20).views == views[:20]
    longer = PoseStream(seed=3, tasks=200).views
    assert longer[:90] == views
    assert len(set(longer)) == 200
    one, two = (next(view for view in views if view.name == second[0] and view.number == n) for n in (0, 1))
    assert one.azimuth != two.azimuth


def test_orders():
    shuffled = PoseStream(seed=3).views
    classes = [view.name.split()[0] for view in PoseStream(seed=3, order="class").views]
    assert sum(a != b for a, b in pairwise(classes)) == 8
    scales = PoseStream(seed=3, order="scale").views
    assert [view.scale for view in scales] == sorted(view.scale for view in shuffled)
    assert set(scales) == set(shuffled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, "tasks must be at least 1"),
        ({"seed": -1}, "seed"),
        ({"train": 1000}, "train must be from 1 to below images = 1000, got 1000"),
        ({"train": 0}, "train"),
        ({"size": 4}, "size must be from 16 to 1024, got 4"),
        ({"objects": "pascal"}, "objects must be one of builtin, pascal3d, got 'pascal'"),
        ({"order": "colour"}, "order must be one of random, class, scale"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        PoseStream(**options)


def test_missing_data(monkeypatch, tmp_path):
    monkeypatch.delenv("METALEADER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    for options, folder in (({}, "own/metaleader/data"), ({"data": tmp_path / "given"}, "given")):
        with pytest.raises(FileNotFoundError, match=rf"{tmp_path / folder}/pascal3d .*objects='builtin'"):
            PoseStream(objects="pascal3d", **options)
    monkeypatch.setenv("METALEADER_DATA", str(tmp_path / "named"))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "named")):
        PoseStream(objects="pascal3d")


def test_by_name_the_data_folder_asks_for_pascal3d(monkeypatch, tmp_path):
    monkeypatch.setenv("METALEADER_DATA", str(tmp_path))  # what the environment holds does not choose the objects
    for options in ({}, {"data": tmp_path, "objects": "builtin"}):
        stream = make_stream("pose", seed=3, order="class", size=32, **options)
        assert isinstance(stream, PoseStream)
        assert (stream.objects, stream.seed, stream.order, stream.size) == ("builtin", 3, "class", 32)
        assert stream.views == PoseStream(seed=3, order="class").views
    with pytest.raises(FileNotFoundError, match="pascal3d is not in"):
        make_stream("pose", data=tmp_path)
    builtin = builtin_objects()
    for name in (f"{kind} {i:02d}" for kind, numbers in PASCAL3D.items() for i in numbers):
        mesh = builtin.load("chair 01")
        path = tmp_path / "pascal3d" / f"{name.replace(' ', '/')}.off"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{x} {y} {z}" for x, y, z in mesh.vertices] + [f"3 {a} {b} {c}" for a, b, c in mesh.faces]
        path.write_text("\n".join(["OFF", f"{len(mesh.vertices)} {len(mesh.faces)} 0", *lines]))
    stream = make_stream("pose", data=tmp_path)
    assert isinstance(stream, PoseStream)
    assert stream.objects == "pascal3d"
    assert {view.name.split()[0] for view in stream.views} == set(PASCAL3D)


def test_show_draws_few_images_and_says_of_what(gl, monkeypatch, tmp_path, capsys):
    drawn = []
    monkeypatch.setattr(
        pose_scene.Scene, "draw", lambda *args, draw=pose_scene.Scene.draw: drawn.append(0) or draw(*args)
    )
    monkeypatch.setenv("METALEADER_CACHE", str(tmp_path / "cache"))
    args = ["pose", "--tasks", "2", "--examples", "3", "--order", "class", "--out", str(tmp_path / "pose.png")]
    tyro.cli(show, args=args)
    assert capsys.readouterr().err == "pose, 90 tasks, by class, built-in objects\n"
    assert len(drawn) == 2 * (3 + 2)
    assert [path.name for path in tmp_path.iterdir()] == ["pose.png"]  # nothing stays in the cache
    with pytest.raises(ValueError, match="a sheet needs a task and an example"):
        tyro.cli(show, args=[*args, "--examples", "0"])
    with pytest.raises(FileNotFoundError, match=r"CAD of the PASCAL3D\+ release.*built-in objects \(no --data"):
        tyro.cli(show, args=[*args, "--data", str(tmp_path)])


@pytest.mark.usefixtures("no_drawing")
def test_show_without_mujoco_says_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["show", "pose", "--out", str(tmp_path / "pose.png")])
    assert "metaleader: drawing pose images needs MuJoCo\n" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("gl")
def test_a_sheet_shows_the_first_images_of_the_stream(tmp_path):
    # What `show` draws is a shorter stream: the same objects, cameras and first images.
    short, long = small(tmp_path, images=4, train=2), small(tmp_path)
    assert short.views == long.views
    assert torch.equal(short[1].train.x, long[1].train.x[:2])
    assert torch.equal(short[1].train.y, long[1].train.y[:2])


@pytest.mark.usefixtures("no_drawing")
def test_an_empty_cache_without_mujoco(tmp_path):
    stream = small(tmp_path)
    with pytest.raises(ImportError, match="needs MuJoCo"):
        stream[0]
    assert not list(stream.folder.iterdir())


def test_a_damaged_file_is_drawn_again(gl, tmp_path):
    stream = small(tmp_path)
    images = stream[0].train.x
    (path,) = stream.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.warns(RuntimeWarning, match=r"truncated or damaged.*drawn again"):
        again = small(tmp_path)[0].train.x
    assert torch.equal(again, images)
    assert path.read_bytes() == whole


def test_prepare_fills_the_gaps_only(cache, tmp_path):
    source = small(cache)
    stream = small(tmp_path)
    stream.folder.mkdir()
    kept, *_ = sorted(source.folder.glob("*.view"))
    (stream.folder / kept.name).write_bytes(kept.read_bytes())
    before = (stream.folder / kept.name).stat()
    stream.prepare()
    files = sorted(stream.folder.iterdir())
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in sorted(source.folder.glob("*.view"))]
    assert (stream.folder / kept.name).stat().st_ino == before.st_ino


def test_killed_and_resumed_by_two_at_once(gl, cache, tmp_path):
    # A real kill in the middle of drawing; then another process and this one finish what is missing.
    program = f"""
from pathlib import Path
from metaleader.streams import PoseStream
PoseStream(tasks=3, images=6, train=4, size=16, cache=Path({str(tmp_path)!r})).prepare()
"""
    slow = "import metaleader.streams.pose.stream as p, time\nold = p.check_visible\n"
    slow += "p.check_visible = lambda *a: (old(*a), time.sleep(0 if a[2].startswith(FIRST) else 60))\n"
    source = small(cache)
    folder = tmp_path / source.folder.name
    first = subprocess.Popen([sys.executable, "-c", f"FIRST = {source.views[0].name!r}\n" + slow + program])
    deadline = time.monotonic() + 60
    while not (list(folder.glob("*.view")) and list(folder.glob("*.part"))):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    assert first.wait(10) == -signal.SIGKILL
    assert len(list(folder.glob("*.view"))) == 1

    second = subprocess.Popen([sys.executable, "-c", program])
    small(tmp_path).prepare()
    assert second.wait(60) == 0
    assert [file.read_bytes() for file in sorted(folder.iterdir())] == [
        file.read_bytes() for file in sorted(source.folder.iterdir())
    ]


# Mean grey levels of image 0 of three views, 64 pixels wide, over a grid of 4 x 4 squares. Stored numbers, since no
# other renderer is at hand; the tests below check the geometry on its own. A square averages out what another OpenGL
# does at edges, while any change of light, colour or place shows.
REFERENCE = {
    "truck 01": [
        234.0,
        213.0,
        220.6,
        234.0,
        213.2,
        140.5,
        172.1,
        199.4,
        210.4,
        172.1,
        178.4,
        220.0,
        234.0,
        229.2,
        210.5,
        234.0,
    ],
    "lamp 02": [
        234.0,
        215.8,
        233.3,
        234.0,
        227.8,
        165.4,
        160.9,
        200.3,
        193.0,
        169.4,
        171.4,
        197.2,
        234.0,
        220.0,
        197.3,
        216.5,
    ],
    "chair 03": [
        234.0,
        233.6,
        233.9,
        234.0,
        226.4,
        164.1,
        174.5,
        223.3,
        207.1,
        151.9,
        151.1,
        207.4,
        234.0,
        210.1,
        205.4,
        234.0,
    ],
}


def grey_levels():
    levels = {}
    for name in ("truck 01", "lamp 02", "chair 03"):
        index = builtin_objects().names.index(name)
        _, scene, labels = draw(name, draw_labels(0, index, 0, 1), 64)
        with scene:
            image = scene.draw(labels[0])
        levels[name] = image.mean(0).reshape(4, 16, 4, 16).mean((1, 3)).ravel().tolist()
    return levels


def test_images_are_the_same_on_every_machine(gl):
    levels = grey_levels()
    for name, expected in REFERENCE.items():
        np.testing.assert_allclose(levels[name], expected, atol=1.0, err_msg=name)


def test_images_are_the_same_with_another_opengl(gl):
    # A process can use one only. Softpipe is Mesa's other rasteriser; where both backends are there, through the other.
    program = "import json, test_stream; print(json.dumps(test_stream.grey_levels()))"
    path = f"{os.path.dirname(__file__)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    changes = {"MUJOCO_GL": BACKENDS[-1], "PYOPENGL_PLATFORM": "", "GALLIUM_DRIVER": "softpipe", "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    levels = json.loads(done.stdout)
    for name, expected in REFERENCE.items():
        np.testing.assert_allclose(levels[name], expected, atol=1.0, err_msg=name)


def test_an_opengl_that_fails_is_reported(gl, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no device display")

    monkeypatch.setattr(pose_gl.load_mujoco(), "Renderer", broken)
    with pytest.raises(OSError, match=r"no device display.*MUJOCO_GL=osmesa.*libosmesa6"):
        draw("lamp 02", [])


def corner_poses():
    turns = np.arange(8) * (np.pi / 4)
    return [[x, y, np.sin(a), np.cos(a)] for x in (-1, 1) for y in (-1, 1) for a in turns]


@pytest.mark.parametrize("name", [f"{family} 01" for family in FAMILIES])
def test_no_pose_is_cut_off(gl, name):
    # At the corners of the reach, in every direction: segmentation says where MuJoCo sees the object.
    for seed in range(2):
        _, scene, labels = draw(name, corner_poses(), 32, seed)
        with scene:
            empty = scene.draw_empty()
            images = np.stack([scene.draw(label) for label in labels])
            masks = np.stack([scene.segment(label) for label in labels])
        border = np.concatenate([masks[:, [0, -1]].ravel(), masks[:, :, [0, -1]].ravel()])
        assert not border.any()
        assert masks.mean((1, 2)).min() > MIN_VISIBLE
        # What the cache checks on every image, the change against the empty table, is the same object.
        check_visible(images, empty, name)
        blocks = masks.reshape(len(masks), 32, 2, 32, 2)
        changed = (images != empty).any(1)
        assert not (changed & ~blocks.any((2, 4))).any()
        assert (blocks.all((2, 4)) & ~changed).sum() <= 0.01 * changed.sum()


def test_an_object_that_is_cut_off_or_lost_is_noticed():
    empty = np.full((3, 16, 16), 200, np.uint8)
    images = np.stack([empty] * 4)
    images[:, :, 6:9, 6:9] = 50
    check_visible(images, empty, "here")
    for place in ((2, slice(None), 0, 5), (2, slice(None), 5, 15)):
        broken = images.copy()
        broken[place] = 50
        with pytest.raises(OSError, match="here: OpenGL drew 1 images without the whole object, the first at index 2"):
            check_visible(broken, empty, "here")
    broken = images.copy()
    broken[3] = empty
    with pytest.raises(OSError, match="the first at index 3"):
        check_visible(broken, empty, "here")


def plank():
    """A long flat box: its vertices and faces."""
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (0, 1)], float)
    quads = [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    faces = np.array([[q[0], *pair] for q in quads for pair in ((q[1], q[2]), (q[2], q[3]))])
    return corners * [1.0, 0.2, 0.1], faces


def test_winding_does_not_matter(gl):
    # CAD models are wound inconsistently: outwards, inwards or half of each, the same image.
    vertices, faces = plank()
    vertices = vertices[faces.ravel()]  # corners of their own for each face, so that it has a normal of its own
    faces = np.arange(36).reshape(12, 3)
    label, view = np.array([0.2, -0.3, 0.6, 0.8], np.float32), View("plank 01", 0, 0.4, 0.7, 1.0)
    images = []
    for wound in (faces, faces[:, ::-1], np.concatenate([faces[:6], faces[6:, ::-1]])):
        with Scene(view, make_mesh(vertices, wound, "plank"), (0.3, 0.5, 0.8), 32) as scene:
            images.append(scene.draw(label).astype(int))
    assert np.abs(images[1] - images[0]).max() <= 1
    assert np.abs(images[2] - images[0]).max() <= 1


def test_the_object_is_where_the_label_says(gl):
    mesh = make_mesh(*plank(), "plank")
    view = View("plank 01", 0, 0.4, 0.7, 1.0)
    camera = view_camera(view, mesh)
    with Scene(view, mesh, (0.3, 0.5, 0.8), 64) as scene:
        for x, y, turn in ((0.0, 0.0, 0.0), (1.0, -0.5, 0.6), (-0.8, 0.9, 2.5), (0.3, 1.0, -1.2)):
            rows, columns = np.nonzero(scene.segment(np.array([x, y, np.sin(turn), np.cos(turn)], np.float32)))
            seen = (np.column_stack([columns, rows]) + 0.5) / 128
            # All corners of the plank, turned and moved by hand, and their projection.
            cos, sin = np.cos(turn), np.sin(turn)
            local = view.scale * mesh.vertices.astype(float)
            placed = local @ np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]]) + [REACH * x, REACH * y, 0]
            outline = camera.project(placed)
            np.testing.assert_allclose(seen.min(0), outline.min(0), atol=1.5 / 128)
            np.testing.assert_allclose(seen.max(0), outline.max(0), atol=1.5 / 128)
            # Its long axis lies along the label's direction: the far ends are the outline's.
            ends = camera.project(
                np.array([[REACH * x + s * 0.38 * cos, REACH * y + s * 0.38 * sin, 0.02] for s in (-1, 1)])
            )
            for end in ends:
                assert np.linalg.norm(seen - end, axis=1).min() < 1.5 / 128


def test_the_red_dot_marks_one_corner(gl):
    for seed in range(4):
        view, scene, _ = draw("house 01", [], 64, seed)
        with scene:
            red, green, blue = scene.draw_empty().astype(int)
        rows, columns = np.nonzero((red > 150) & (green < 80) & (blue < 80))
        assert len(rows) >= 4
        centre = view_camera(view, builtin_objects().load("house 01")).project(np.array([DOT_PLACE, DOT_PLACE, 0.0]))
        assert np.abs(np.array([columns.mean(), rows.mean()]) + 0.5 - 64 * centre).max() < 1.0


def test_shrink_is_the_rounded_mean():
    image = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    small = shrink(image)
    assert small.shape == (3, 6, 6)
    for c, i, j in np.ndindex(3, 6, 6):
        assert small[c, i, j] == int(image[2 * i : 2 * i + 2, 2 * j : 2 * j + 2, c].mean() + 0.5)


def test_it_is_a_stream(gl, tmp_path):
    check_stream(small(tmp_path))
