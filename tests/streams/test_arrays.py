"""Streams of one's own arrays."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import metaleader as ml
from metaleader.checks import check_stream
from metaleader.streams import ArrayStream, from_dataset


def arrays(num=10, start=0):
    x = np.arange(start, start + num * 2, dtype=np.float32).reshape(num, 2)
    return {"x": x, "y": x[:, 0].astype(np.int64)}


def with_test(start=0):
    held = arrays(4, start=start + 100)
    return arrays(start=start) | {"test_x": held["x"], "test_y": held["y"]}


def test_tasks_in_memory_keep_their_order_and_test_data():
    stream = ArrayStream({"b": with_test(), "a": with_test(50)})
    assert [stream[t].name for t in range(len(stream))] == ["b", "a"]
    task = stream[1]
    assert torch.equal(task.train.x, torch.from_numpy(with_test(50)["x"]))
    assert torch.equal(task.test.y, torch.from_numpy(with_test(50)["test_y"]))


@pytest.mark.parametrize(("num", "fraction", "size"), [(10, 0.2, 2), (2, 0.9, 1), (3, 0.01, 1), (10, 0.25, 2)])
def test_a_fraction_is_held_out(num, fraction, size):
    task = ArrayStream({"a": arrays(num)}, held_out=fraction)[0]
    assert len(task.test.x) == size
    assert sorted([*task.train.y.tolist(), *task.test.y.tolist()]) == arrays(num)["y"].tolist()
    assert task.train.y.tolist() == sorted(task.train.y.tolist())
    assert task.train.x[:, 0].long().tolist() == task.train.y.tolist()


def test_what_is_held_out_depends_on_seed_and_task_alone():
    source = {str(i): arrays(20) for i in range(4)}
    held_out = [[ArrayStream(source, seed=seed)[t].test.y.tolist() for t in range(4)] for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]
    assert held_out[0][0] != held_out[0][1]
    shuffled = ArrayStream(source, order="random", seed=0)
    by_name = {shuffled[t].name: shuffled[t].test.y.tolist() for t in range(4)}
    assert by_name == {str(i): held_out[0][i] for i in range(4)}
    orders = {
        tuple(s[t].name for t in range(4)) for s in (ArrayStream(source, order="random", seed=i) for i in range(8))
    }
    assert len(orders) > 2


def test_trees_of_tensors():
    parts = {"x": {"a": torch.zeros(6, 2), "b": torch.ones(6)}, "y": torch.arange(6)}
    task = ArrayStream({"one": parts}, held_out=0.5)[0]
    assert task.train.x["a"].shape == (3, 2)
    assert task.test.x["b"].shape == (3,)


@pytest.fixture
def folder(tmp_path):
    for i in (10, 2, 1):
        np.savez(tmp_path / f"task_{i}.npz", **with_test(i))
    np.savez_compressed(tmp_path / "task_3.npz", **arrays(start=3))
    (tmp_path / "notes.txt").write_text("not a task")
    return tmp_path


def test_a_folder_is_read_in_natural_order(folder):
    stream = ArrayStream(folder)
    assert [stream[t].name for t in range(4)] == ["task_1", "task_2", "task_3", "task_10"]
    for t, i in enumerate((1, 2, 3, 10)):
        memory = ArrayStream({"x": with_test(i)})[0] if i != 3 else None
        if memory is not None:
            for part, expected in zip((*stream[t].train, *stream[t].test), (*memory.train, *memory.test), strict=True):
                assert torch.equal(part, expected)
    assert len(stream[2].test.x) == 2
    with pytest.raises(IndexError):
        stream[4]


def test_other_byte_orders(tmp_path):
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in with_test().items()}
    np.savez(tmp_path / "big.npz", **swapped)
    np.savez(tmp_path / "little.npz", **with_test())
    big, little = ArrayStream(tmp_path)
    for part, expected in zip((*big.train, *big.test), (*little.train, *little.test), strict=True):
        assert torch.equal(part, expected)
        assert part.dtype == expected.dtype


def test_float64_arrays_get_the_dtype_of_models(tmp_path):
    arrays = {"x": np.linspace(0, 1, 20).reshape(10, 2), "y": np.linspace(0, 1, 10)}
    np.savez(tmp_path / "task.npz", **arrays)
    for stream in (ArrayStream({"task": arrays}), ArrayStream(tmp_path)):
        assert {part.dtype for part in (*stream[0].train, *stream[0].test)} == {torch.float32}
        learner = ml.FTML(torch.nn.Linear(2, 1), ml.losses.squared_error, meta_steps=1)
        assert len(list(ml.play(learner, stream, reveal=4))) == 2
    doubles = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert ArrayStream({"task": doubles})[0].train.x.dtype == torch.float64


def test_a_folder_plays(folder):
    learner = ml.FTML(torch.nn.Linear(2, 1), lambda p, y: (p[:, 0] - y).square() * 1e-4, meta_steps=1, inner_lr=1e-3)
    assert len(list(ml.play(learner, ArrayStream(folder), reveal=5))) == 8


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, r"has \['test_x', 'test_y', 'y'\]; a task has x and y"),
        ({"test_y": None}, "only one of test_x and test_y"),
        ({"x": np.zeros((10, 3), np.float32)}, r"rows of float32\[3\], but earlier datapoints have float32\[2\]"),
        ({"x": np.zeros((10, 2), np.float16)}, r"rows of float16\[2\]"),
        ({"x_test": np.zeros((4, 2), np.float32)}, r"has \['x_test'\], which no task has"),
        ({"test_x": np.zeros((4, 1), np.float32)}, "task 'task_2', test_x and test_y: x has rows"),
        ({"y": np.zeros(9, np.int64)}, "unequal numbers of rows"),
        ({"y": np.int64(3)}, "single value"),
        ({"y": np.array([Hostile()] * 10)}, "dtype object, which is not numeric"),
        ({"y": np.array(["a"] * 10)}, "which is not numeric"),
    ],
)
def test_wrong_tasks_are_found_at_once(folder, change, message, capsys):
    parts = with_test(2) | change
    np.savez(folder / "task_2.npz", **{name: array for name, array in parts.items() if array is not None})
    with pytest.raises(ValueError, match=message):
        ArrayStream(folder)
    assert capsys.readouterr().out == ""


def test_nan_is_found_when_the_task_is_read(folder):
    parts: dict[str, Any] = with_test(2) | {"x": np.full((10, 2), np.nan, np.float32)}
    np.savez(folder / "task_2.npz", **parts)
    stream = ArrayStream(folder)
    with pytest.raises(ValueError, match="'task_2', train: x holds 20 NaN"):
        stream[1]


def test_damaged_files(folder):
    path = folder / "task_2.npz"
    whole = path.read_bytes()
    for content in (b"", whole[:-30], whole[:100], b"PK\3\4" + b"\0" * 50):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"task_2.npz cannot be read as a task"):
            ArrayStream(folder)
    path.write_bytes(whole)
    stream = ArrayStream(folder)
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 255]) + whole[201:])
    with pytest.raises(ValueError, match=r"task_2.npz cannot be read as a task"):
        stream[1]


def test_wrong_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ArrayStream(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no npz files"):
        ArrayStream(tmp_path)
    with pytest.raises(ValueError, match="no tasks"):
        ArrayStream({})
    with pytest.raises(ValueError, match="has 1 rows"):
        ArrayStream({"a": arrays(1)})
    with pytest.raises(ValueError, match="task 'b': x and y must have one row"):
        ArrayStream({"a": arrays(), "b": arrays() | {"y": np.zeros(3)}})
    with pytest.raises(ValueError, match="held_out"):
        ArrayStream({"a": arrays()}, held_out=1.0)
    with pytest.raises(ValueError, match="order"):
        ArrayStream({"a": arrays()}, order="sorted")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed"):
        ArrayStream({"a": arrays()}, seed=-1)


def test_a_dataset_by_a_task_function():
    x, y = torch.rand(12, 3), torch.arange(12) % 3
    data = torch.utils.data.TensorDataset(x, y)
    stream = from_dataset(data, lambda i, x, y: None if i == 5 else f"label {y}", held_out=0.25)
    check_stream(stream)
    assert [task.name for task in stream] == ["label 0", "label 1", "label 2"]
    assert torch.equal(torch.cat([stream[1].train.x, stream[1].test.x]).sort(0).values, x[[1, 4, 7, 10]].sort(0).values)
    assert len(stream[2].train.x) + len(stream[2].test.x) == 3
    held_out = from_dataset(data, lambda i, x, y: f"label {y}", test=list(zip(x + 1, y, strict=True)), order="random")
    assert {task.name: task.test.x.tolist() for task in held_out}["label 2"] == (x[y == 2] + 1).tolist()
    trees = [({"a": np.zeros(2, np.float32), "b": 1.5}, np.int64(i)) for i in range(4)]
    task = from_dataset(trees, lambda i, x, y: "all", held_out=0.5)[0]
    assert task.train.x["a"].shape == (2, 2)
    assert task.train.x["b"].dtype == torch.float32
    assert task.train.y.dtype == torch.int64


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 0, 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Endless(), "dataset is a Endless without a length"),
        ([(1.0, 2, 3)] * 4, r"dataset\[0\] is a tuple, not a pair"),
        ([{"image": 1.0}] * 4, r"dataset\[0\] is a dict, not a pair"),
        ([(Image.new("RGB", (2, 2)), 1)] * 4, r"dataset\[0\]: x is a Image; .*PILToTensor"),
        (
            [(np.zeros(2), 1)] * 3 + [(np.zeros(3), 1)],
            r"dataset\[3\] is .*float64\[3\].*, earlier items are .*float64\[2\]",
        ),
        ([], "no items that belong to a task"),
        ([(1.0, 1)], "has 1 rows"),
    ],
)
def test_wrong_datasets(dataset, message):
    with pytest.raises(ValueError, match=message):
        from_dataset(dataset, lambda i, x, y: "all")
    with pytest.raises(ValueError, match="'a' has items only in dataset"):
        from_dataset([(1.0, 1), (2.0, 1)], lambda i, x, y: "ab"[int(y > 1)], test=[(1.0, 2)])
