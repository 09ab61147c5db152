"""Streams over folders of images."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from metaleader.checks import check_stream
from metaleader.streams import ArrayStream, NWayStream, from_folder


def write(path: Path, number: int, size=(6, 4), mode="RGB") -> np.ndarray:
    """An image whose pixels tell its number; size is width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    image.save(path)
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


@pytest.fixture
def classes(tmp_path):
    """Seven class folders of five images each; returns the folder and the image of each file."""
    images = {}
    for c in range(7):
        for i in range(5):
            images[f"class {c + 5}", i] = write(tmp_path / f"class {c + 5}" / f"{i}.png", 10 * c + i)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "class 5" / "notes.txt").write_text("no image")
    (tmp_path / "class 5" / "._0.png").write_text("no image")
    return tmp_path, images


def test_class_folders_as_n_way_tasks(classes):
    folder, images = classes
    stream = from_folder(folder, ways=3)
    assert isinstance(stream, NWayStream)
    check_stream(stream)
    assert len(stream) == 5
    assert sorted(stream.names.items()) == [(c, f"class {c + 5}") for c in range(7)]  # 9 before 10
    of_class = {name: {image.tobytes() for (c, _), image in images.items() if c == name} for name, _ in images}
    seen: dict[int, set[bytes]] = collections.defaultdict(set)
    for t in range(len(stream)):
        task: Any = stream[t]
        assert task.train.x.shape == (12, 3, 4, 6)
        assert task.test.x.shape == (3, 3, 4, 6)
        for x, y in zip((*task.train.x, *task.test.x), (*task.train.y, *task.test.y), strict=True):
            name = stream.names[task.classes[y]]
            assert x.numpy().tobytes() in of_class[name]
            seen[task.classes[y]].add(x.numpy().tobytes())
    assert all(len(found) == 5 for found in seen.values())


def test_streams_of_several_seeds_hold_out_the_same_images_and_share_memory(classes):
    folder, _ = classes
    one, other = (from_folder(folder, ways=3, seed=seed) for seed in (0, 1))
    assert isinstance(one, NWayStream)
    assert isinstance(other, NWayStream)
    assert one.order != other.order
    assert np.array_equal(one.data.test_x, other.data.test_x)
    assert one.data.x.base is other.data.x.base
    write(folder / "class 7" / "0.png", 999, size=(6, 4))
    third: Any = from_folder(folder, ways=3)
    assert third.data.x.base is not one.data.x.base


def test_one_task_per_folder(tmp_path):
    for d, domain in enumerate(("art", "photo")):
        for c, name in enumerate(("cat", "dog", "owl")[d:]):
            for i in range(6):
                write(tmp_path / domain / name / f"{i}.jpg", 100 * d + 10 * c + i, mode="L")
    stream = from_folder(tmp_path, "folders", channels=1, order="given")
    assert isinstance(stream, ArrayStream)
    check_stream(stream)
    assert [task.name for task in stream] == ["art", "photo"]
    assert stream.names == {0: "cat", 1: "dog", 2: "owl"}
    assert stream[0].train.x.shape == (14, 1, 4, 6)
    assert stream[0].train.x.dtype == torch.uint8
    assert collections.Counter([*stream[1].train.y.tolist(), *stream[1].test.y.tolist()]) == {1: 6, 2: 6}
    assert len(set(stream[0].train.y[:6].tolist())) > 1  # no blocks of one class
    owl = np.asarray(Image.open(tmp_path / "photo" / "owl" / "0.jpg"))
    labels = [int(y) for x, y in zip((*stream[1].train.x, *stream[1].test.x), (*stream[1].train.y, *stream[1].test.y),
                                     strict=True) if np.array_equal(x[0], owl)]  # fmt: skip
    assert labels == [2]


def test_sizes(classes):
    folder, _ = classes
    write(folder / "class 6" / "3.png", 3, size=(5, 4))
    with pytest.raises(ValueError, match=r"class 6/3.png is 5x4 pixels, .* is 6x4; pass size="):
        from_folder(folder)
    assert from_folder(folder, size=8)[0].train.x.shape == (20, 3, 8, 8)
    assert from_folder(folder, size=8, channels=1, per_class=2)[0].train.x.shape == (10, 1, 8, 8)


def test_unreadable_images(classes):
    folder, _ = classes
    path = folder / "class 8" / "2.png"
    whole = path.read_bytes()
    for content in (b"", b"GIF89a", whole[: len(whole) // 2], whole[:40] + b"\xff" * 30 + whole[70:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"class 8/2.png cannot be read as an image: .*; replace or remove it"):
            from_folder(folder)
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(path)
    with pytest.raises(ValueError, match=r"class 8/2.png .* more than 8 bits per channel"):
        from_folder(folder)


def test_empty_folders_and_wrong_layouts(tmp_path, classes):
    folder, _ = classes
    with pytest.raises(FileNotFoundError, match=r"no such folder: .*nowhere"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"class 5 has no folders"):
        from_folder(folder / "class 5")
    with pytest.raises(ValueError, match=r"class 5 has no folders; put the images of each class"):
        from_folder(folder, "folders")
    (folder / "class 99").mkdir()
    with pytest.raises(ValueError, match=r"class 99 has no images, files that end in \.bmp.*png"):
        from_folder(folder)
    write(folder / "class 99" / "0.png", 0)
    with pytest.raises(ValueError, match="class 99 has 1 image; a class needs"):
        from_folder(folder)
    (folder / "class 99" / "0.png").rename(folder / "0.png")
    write(folder / "class 99" / "deeper" / "0.png", 0)
    with pytest.raises(ValueError, match=r"class 99 has no images.*tasks='folders' takes TASK/CLASS/IMAGE"):
        from_folder(folder)
    nested = folder / "class 99"
    with pytest.raises(ValueError, match="has 1 class folders, deeper; tasks of 5 ways need 5"):
        from_folder(nested)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "classes"}, "tasks must be 'n-way' or 'folders'"),
        ({"tasks": "folders", "ways": 3}, "ways and per_class belong to"),
        ({"channels": 4}, "channels must be 1 or 3"),
        ({"held_out": 0.0}, "held_out"),
        ({"per_class": 9}, "cannot take 9 training datapoints per class"),
        ({"ways": 8}, "has 7 class folders"),
    ],
)
def test_wrong_options(classes, options, message):
    with pytest.raises(ValueError, match=message):
        from_folder(classes[0], **options)
