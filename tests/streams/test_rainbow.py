"""Rainbow streams: against the definition, pixel by pixel, on synthetic MNIST files and on the bundled digits."""

import gzip
import hashlib
import itertools
import os
import struct

import numpy as np
import pytest
import torch

from metaleader.checks import check_stream
from metaleader.streams import Labelled, RainbowStream, make_stream, rainbow, rainbow_digits, rainbow_mnist
from metaleader.streams.datasets import registry as data
from metaleader.streams.datasets.mnist import read_idx
from metaleader.streams.rainbow import COLOURS, LOOKS, Look, bundled_digits, paint


def sha256(task):
    digest = hashlib.sha256(task.name.encode())
    for part in (*task.train, *task.test):
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def grey(num, size=28, seed=0):
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (num, size, size), dtype=np.uint8), draw.integers(0, 10, num, dtype=np.uint8)


@pytest.fixture(scope="module")
def digits():
    return Labelled(*grey(300), *grey(80, seed=1))


def idx(values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return gzip.compress(header + values.tobytes(), mtime=0)


@pytest.fixture
def mnist(tmp_path, monkeypatch, digits):
    """A tiny data set in MNIST's files, published as such."""
    (tmp_path / "mnist").mkdir()
    files = []
    for file, values in zip(data.DATA_SETS["mnist"].files, digits, strict=True):
        content = idx(values)
        (tmp_path / "mnist" / file.name).write_bytes(content)
        files.append(data.DataFile(file.name, len(content), hashlib.sha256(content).hexdigest(), ()))
    monkeypatch.setitem(data.DATA_SETS, "mnist", data.DataSet(tuple(files), None, "rainbow-digits"))
    return tmp_path


@pytest.mark.parametrize("look", [LOOKS[0], LOOKS[-1], Look("yellow", True, 1), Look("green", False, 3)])
def test_an_image_is_the_digit_blended_over_the_colour(look):
    images = grey(2, size=8)[0]
    painted = paint(images, look)
    assert painted.shape == (2, 3, 8, 8)
    for n, i, j in itertools.product(range(2), range(8), range(8)):
        canvas = np.zeros((8, 8))
        if look.half:
            for a, b in itertools.product(range(4), range(4)):
                block = images[n, 2 * a : 2 * a + 2, 2 * b : 2 * b + 2]
                canvas[2 + a, 2 + b] = np.floor(block.mean() + 0.5)
        else:
            canvas[:] = images[n]
        for _ in range(look.turns):  # a quarter turn to the left takes column j to row 7 - j
            canvas = np.array([[canvas[c, 7 - r] for c in range(8)] for r in range(8)])
        alpha = canvas[i, j] / 255
        for channel in range(3):
            exact = alpha * 255 + (1 - alpha) * COLOURS[look.colour][channel]
            assert abs(painted[n, channel, i, j] - exact) <= 0.5 + 1e-9


def test_56_tasks_cover_every_look_once_with_disjoint_images(digits):
    stream = RainbowStream(digits, train=5, test=7)
    tasks = [stream[t] for t in range(len(stream))]
    assert len({task.name for task in tasks}) == 56
    assert all(task.train.x.dtype == torch.uint8 and task.train.y.dtype == torch.int64 for task in tasks)
    originals = []
    for look, task in zip(stream.looks, tasks, strict=True):
        assert task.train.x.shape == (5, 3, 28, 28)
        assert task.test.x.shape == (7, 3, 28, 28)
        for part, images, labels in ((task.train, *digits[:2]), (task.test, *digits[2:])):
            painted = paint(images, look).reshape(len(images), -1)
            found = [int(np.flatnonzero((painted == x.reshape(-1)).all(1))[0]) for x in part.x.numpy()]
            assert labels[found].tolist() == part.y.tolist()
            assert len(set(found)) == len(found)
            if part is task.train:
                originals += found
    assert len(set(originals)) == 56 * 5


def test_images_are_used_again_only_when_all_are_used():
    images, labels = np.arange(10, dtype=np.uint8)[:, None, None] * np.ones((2, 2), np.uint8), np.arange(10)
    digits = Labelled(np.ascontiguousarray(images), labels, np.ascontiguousarray(images), labels)
    stream = RainbowStream(digits, train=5, test=10)
    for t in range(0, 56, 2):
        assert sorted([*stream[t].train.y.tolist(), *stream[t + 1].train.y.tolist()]) == list(range(10))
    assert stream[0].train.y.tolist() != stream[2].train.y.tolist()


def test_orders(digits):
    def keys(order, seed=0):
        return [
            (look.colour, look.half, look.turns)
            for look in RainbowStream(digits, order=order, train=5, test=5, seed=seed).looks
        ]

    for position, (order, values) in enumerate(
        [("colour", list(COLOURS)), ("scale", [False, True]), ("rotation", [0, 1, 2, 3])]
    ):
        column = [key[position] for key in keys(order)]
        assert [value for value, _ in itertools.groupby(column)] == values
        assert sorted(keys(order)) == sorted(keys("random"))
        assert keys(order, 1) != keys(order, 0)
    assert len(list(itertools.groupby(key[0] for key in keys("random")))) > 14
    assert len(RainbowStream(digits, tasks=3, train=5, test=5)) == 3


def test_a_task_depends_on_seed_and_round_alone(digits):
    forwards = RainbowStream(digits, train=5, test=5, seed=2)
    expected = [sha256(forwards[t]) for t in range(4)]
    backwards = RainbowStream(digits, train=5, test=5, seed=2)
    assert [sha256(backwards[t]) for t in (3, 2, 1, 0)] == expected[::-1]
    assert sha256(RainbowStream(digits, train=5, test=5, seed=3)[0]) != expected[0]
    with pytest.raises(IndexError):
        forwards[56]


def test_rainbow_digits():
    stream = rainbow_digits()
    assert len(stream) == 56
    task = stream[0]
    assert task.train.x.shape == (60, 3, 16, 16)
    assert task.test.x.shape == (300, 3, 16, 16)
    assert set(task.test.y.tolist()) == set(range(10))
    # The same bytes on every machine.
    assert [sha256(stream[t])[:16] for t in (0, 17, 55)] == HASHES
    assert sha256(make_stream("rainbow-digits", seed=0)[17])[:16] == HASHES[1]


HASHES = ["026e0908e3b6f9c6", "2fe259a17f555a77", "4c9c7b03ec99ba3d"]


def test_bundled_digits_are_scikit_learns_enlarged():
    from sklearn.datasets import load_digits

    digits = bundled_digits()
    small = np.asarray(load_digits(return_X_y=True)[0]).reshape(-1, 8, 8)
    assert len(digits.x) == 1497
    assert len(digits.test_x) == 300
    # Linear interpolation keeps the mean of every 2x2 block near the pixel it comes from, and the set of images whole.
    rows = np.linspace(-0.25, 7.25, 16).clip(0, 7)
    low = np.minimum(rows.astype(int), 6)
    weight = rows - low
    across = small[:, low] * (1 - weight)[None, :, None] + small[:, low + 1] * weight[None, :, None]
    large = across[:, :, low] * (1 - weight) + across[:, :, low + 1] * weight
    expected = np.sort(np.abs(large * 255 / 16).sum((1, 2)))
    found = np.concatenate([digits.x, digits.test_x]).astype(float)
    assert np.abs(np.sort(found.sum((1, 2))) - expected).max() < 0.5 * 256
    first = np.abs(found[:, None] - (large * 255 / 16)[None, :5]).max((2, 3)).min(0)
    assert first.max() <= 0.5 + 1e-9


def test_rainbow_mnist_from_files(mnist, digits):
    stream = rainbow_mnist(mnist, train=5, test=50)
    assert [sha256(stream[t]) for t in (0, 55)] == [sha256(RainbowStream(digits, train=5, test=50)[t]) for t in (0, 55)]


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"])
def test_missing_or_changed_mnist(mnist, name):
    path = mnist / "mnist" / name
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(
        ValueError, match=rf"{name} has {len(content) - 9} bytes, the published file has {len(content)}"
    ):
        rainbow_mnist(mnist)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="is not the published file"):
        rainbow_mnist(mnist)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"`metaleader data fetch mnist`.*rainbow-digits"):
        rainbow_mnist(mnist)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: gzip.compress(raw)[:-20], "truncated or not gzip"),
        (lambda raw: raw, "truncated or not gzip"),
        (lambda raw: gzip.compress(raw[:-1]), "does not hold the"),
        (lambda raw: gzip.compress(raw + b"\0"), "does not hold the"),
        (lambda raw: gzip.compress(raw[:9]), "truncated in its header"),
        (lambda raw: gzip.compress(b"\0\0\x0d\3" + raw[4:]), "is not an idx file of 3 dimensions"),
        (lambda raw: gzip.compress(b"\0\0\x08\1" + raw[4:]), "is not an idx file of 3 dimensions"),
        (lambda raw: gzip.compress(raw[:4] + b"\xff" * 12 + raw[16:]), "does not hold the"),
        (lambda raw: gzip.compress(raw[:4] + b"\0" * 12), "does not hold the"),
        (lambda raw: b"", "is not an idx file"),
    ],
)
def test_damaged_idx_files(tmp_path, change, message):
    path = tmp_path / "file.gz"
    path.write_bytes(change(gzip.decompress(idx(grey(3, size=4)[0]))))
    with pytest.raises(ValueError, match=message):
        read_idx(path, 3)


def test_labels_must_fit(mnist, monkeypatch, digits):
    def publish(**changes):
        files = []
        for file, values in zip(data.DATA_SETS["mnist"].files, digits._replace(**changes), strict=True):
            content = idx(values)
            (mnist / "mnist" / file.name).write_bytes(content)
            files.append(data.DataFile(file.name, len(content), hashlib.sha256(content).hexdigest(), ()))
        monkeypatch.setitem(data.DATA_SETS, "mnist", data.DataSet(tuple(files), None, "rainbow-digits"))

    publish(labels=digits.labels[:-1])
    with pytest.raises(ValueError, match="299 labels for 300 images"):
        rainbow_mnist(mnist)
    publish(labels=digits.labels + np.uint8(1))
    with pytest.raises(ValueError, match="has label 10; digits are 0 to 9"):
        rainbow_mnist(mnist)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 57}, r"tasks must lie in 1..56, got 57"),
        ({"train": 301}, r"train must lie in 1..300"),
        ({"test": 81}, r"test must lie in 1..80"),
        ({"test": 5, "order": "color"}, "order must be one of random, colour"),
        ({"test": 5, "seed": -1}, "seed"),
    ],
)
def test_wrong_options(digits, options, message):
    with pytest.raises(ValueError, match=message):
        RainbowStream(digits, **{"train": 5} | options)


@pytest.mark.parametrize(
    ("digits", "message"),
    [
        (Labelled(*grey(5, size=7), *grey(5, size=7)), "the same even size"),
        (Labelled(*grey(5, size=8), *grey(5, size=6)), "the same even size"),
        (Labelled(grey(5)[0].astype(np.float32), grey(5)[1], *grey(5)), "uint8.*by 255"),
        (Labelled(grey(5)[0], grey(4)[1], *grey(5)), "one per image"),
        (Labelled(grey(5)[0], grey(5)[1].astype(float), *grey(5)), "labels must be integers"),
        (Labelled(grey(5)[0], grey(5)[1].astype(int) - 9, *grey(5)), "labels must be integers from 0"),
    ],
)
def test_wrong_images(digits, message):
    with pytest.raises(ValueError, match=message):
        RainbowStream(digits, train=2, test=2)


def test_rainbow_over_any_grey_images(digits):
    given = rainbow(*digits, train=5, test=7, seed=3)
    expected = RainbowStream(digits, train=5, test=7, seed=3)
    assert [sha256(given[t]) for t in (0, 55)] == [sha256(expected[t]) for t in (0, 55)]
    images, labels = torch.from_numpy(digits.x.copy()), torch.from_numpy(digits.labels.copy())
    for seed in (0, 1):
        stream = rainbow(images, labels, held_out=0.2, tasks=4, order="colour", seed=seed)
        assert (stream.train, stream.test) == (4, 60)
        assert len(stream.digits.x) == 240
        both = np.concatenate([stream.digits.x, stream.digits.test_x])
        assert sorted(image.tobytes() for image in both) == sorted(image.tobytes() for image in digits.x)
        check_stream(stream)
        if seed:
            assert np.array_equal(stream.digits.test_x, rainbow(images, labels).digits.test_x)
    with pytest.raises(ValueError, match="both test_images and test_labels"):
        rainbow(images, labels, images)
    with pytest.raises(ValueError, match="held_out"):
        rainbow(images, labels, held_out=1.0)
    with pytest.raises(ValueError, match="299 labels for 300 images"):
        rainbow(images, labels[1:])


def test_another_data_set_in_the_format_of_mnist(mnist, digits):
    for file, values in zip(data.DATA_SETS["mnist"].files, digits, strict=True):
        path = mnist / "mnist" / file.name
        assert np.array_equal(read_idx(path), values)
        path.write_bytes(idx(values[:-1]))
    with pytest.raises(ValueError, match=r"For another data set .* metaleader\.streams\.rainbow"):
        rainbow_mnist(mnist)


@pytest.mark.data
@pytest.mark.skipif(
    data.status("mnist").state != "verified", reason="MNIST is not in METALEADER_DATA: metaleader data fetch mnist"
)
def test_rainbow_mnist_of_the_real_files():
    stream = rainbow_mnist(os.environ.get("METALEADER_DATA"))
    task = stream[0]
    assert task.train.x.shape == (900, 3, 28, 28)
    assert task.test.x.shape == (500, 3, 28, 28)
    assert [sha256(stream[t])[:16] for t in (0, 17, 55)] == MNIST_HASHES


MNIST_HASHES = ["2f77538fbae00061", "3317dcb8b0912615", "434e2a61111e984f"]
