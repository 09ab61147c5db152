"""State trees: what is saved comes back, and a damaged file is refused."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from metaleader.system import trees as store
from metaleader.system.trees import load_tree, save_tree

TREE = {
    "params": {"head.weight": torch.arange(6.0).view(2, 3), "head/bias": torch.tensor([float("nan"), -0.0])},
    "steps": [1, 2.5, None, True, "text with / and ü"],
    "pair": (torch.tensor(7, dtype=torch.uint8), {}),
    "empty": [torch.zeros(0, 3)],
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def raw(tensor: Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def test_round_trip(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_tree(path, TREE, "test", 3)
    assert same(load_tree(path, "test", 3), TREE)
    assert same(load_tree(path, "test", 4), TREE)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool],
)
def test_dtypes_bit_for_bit(dtype: torch.dtype, tmp_path: Path):
    tree = {"a": (torch.rand(3, 4) * 200).to(dtype)}
    save_tree(tmp_path / "a", tree, "test", 1)
    assert same(load_tree(tmp_path / "a", "test", 1), tree)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.lists(st.floats(width=32), max_size=4).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), TREES, max_size=3))
def test_any_tree(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    save_tree(path, tree, "test", 1)
    assert same(load_tree(path, "test", 1), tree)


def test_shared_strided_and_tracked_tensors(tmp_path: Path):
    whole = torch.rand(4, 4, requires_grad=True)
    tree = {"whole": whole, "part": whole[1:], "turned": whole.T, "again": whole}
    save_tree(tmp_path / "a", tree, "test", 1)
    loaded = load_tree(tmp_path / "a", "test", 1)
    assert all(torch.equal(loaded[key], tree[key]) and not loaded[key].requires_grad for key in tree)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": object()}}, "cannot save object at 'a/b'"),
        ({"a": [1, {2}]}, "cannot save set at 'a/1'"),
        ({"a": {1: 2}}, r"keys must be strings at 'a', got \[1\]"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tree: Any, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        save_tree(tmp_path / "a", tree, "test", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        save_tree(tmp_path / "nowhere" / "a", TREE, "test", 1)


# Damaged.


@given(st.data())
def test_truncated_at_any_length(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    save_tree(path, TREE, "test", 1)
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1) | st.sampled_from([0, 1, 7, 8, 9, len(content) - 1]))
    path.write_bytes(content[:length])
    with pytest.raises(ValueError, match=r"truncated or not a safetensors file .*use an intact copy"):
        load_tree(path, "test", 1)


def header(**metadata: str) -> bytes:
    return save({"a": torch.zeros(1)}, metadata=metadata)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a pickle, perhaps" * 10, "truncated or not a safetensors file"),
        (save({"a": torch.zeros(1)}), "is not a test file: its format is None"),
        (header(format="other", version="1", tree="{}"), "is not a test file: its format is 'other'"),
        (header(format="test", version="2", tree='{"dict": {}}'), "version 2 of the test format, .* up to 1; upgrade"),
        (header(format="test", version="one", tree='{"dict": {}}'), "damaged header"),
        (header(format="test", version="1"), "damaged header"),
        (header(format="test", version="1", tree="{"), "damaged header"),
        (header(format="test", version="1", tree='{"dict": {"a": {"tensor": "b"}}}'), "damaged header"),
        (header(format="test", version="1", tree='{"set": []}'), "damaged header .unknown node 'set'"),
        (header(format="test", version="1", tree="[]"), "damaged header"),
        (header(format="test", version="1", tree='{"dict": 3}'), "damaged header"),
        (header(format="test", version="1", tree='{"value": 3}'), "damaged header"),
        (header(format="test", version="1", tree='{"dict": {"a": {"tensor": ["a"]}}}'), "damaged header"),
        (header(format="test", version="1", tree='{"list": [' * 100_000), "damaged header"),
    ],
)
def test_foreign_and_damaged_files(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tree(path, "test", 1)
    assert str(path) in str(caught.value)


def test_a_newer_version_may_have_another_tree(tmp_path: Path):
    (tmp_path / "a").write_bytes(header(format="test", version="2", tree=json.dumps("another form")))
    with pytest.raises(ValueError, match="upgrade"):
        load_tree(tmp_path / "a", "test", 1)


def test_no_such_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=f"no such file: {tmp_path}/a"):
        load_tree(tmp_path / "a", "test", 1)
    with pytest.raises(FileNotFoundError):
        load_tree(tmp_path, "test", 1)


# Of the whole file, header and padding included.


def test_every_bit_of_a_file_is_covered_by_the_digest(tmp_path: Path):
    path = tmp_path / "a"
    save_tree(path, {"text": "ü", "list": list(range(100)), "tensor": torch.arange(3.0)}, "test", 1)
    content = path.read_bytes()
    for at in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with pytest.raises(ValueError, match=r"damaged|truncated or not|is not a test file|upgrade"):
                load_tree(path, "test", 1)


def test_the_digest_cannot_be_switched_off(tmp_path: Path):
    path = tmp_path / "a"
    save_tree(path, {"a": torch.ones(2)}, "test", 1)
    content = path.read_bytes()
    for change in (
        (b'"sha256":', b'"sha257":'),
        (b'"layout":"2"', b'"layouT":"2"'),
        (b'"layout":"2"', b'"layout":"1"'),
        (b'"layout":"2"', b'"layout":"0"'),
        (b'"version":"1"', b'"version":"0"'),
        (b'"version":"1"', b'"version":"x"'),
    ):
        assert change[0] in content
        path.write_bytes(content.replace(*change))
        with pytest.raises(ValueError, match="damaged"):
            load_tree(path, "test", 1)
    without = content.replace(b'"sha256":', b'"sha257":').replace(b'"layout":"2"', b'"layouT":"2"')
    path.write_bytes(without)
    with pytest.raises(ValueError, match="damaged"):
        load_tree(path, "test", 1)


def old_file(tensors: dict[str, Tensor], text: str, **metadata: str) -> bytes:
    """A file as earlier releases wrote it."""
    return save(tensors, metadata={"format": "test", "version": "1", "tree": text, **metadata})


def test_files_of_earlier_releases(tmp_path: Path):
    path, tensors, text = tmp_path / "a", {"b": torch.ones(2)}, '{"dict": {"b": {"tensor": "b"}}}'
    digest = hashlib.sha256(text.encode() + b"b torch.float32 (2,)" + torch.ones(2).numpy().tobytes()).hexdigest()
    for metadata in ({}, {"sha256": digest}):
        path.write_bytes(old_file(tensors, text, **metadata))
        assert same(load_tree(path, "test", 2), {"b": torch.ones(2)})
    for metadata in ({"sha256": digest[::-1]}, {"sha255": digest}, {"shA256": digest}):
        path.write_bytes(old_file(tensors, text, **metadata))
        with pytest.raises(ValueError, match="is damaged: its"):
            load_tree(path, "test", 2)


def test_equal_trees_give_equal_files(tmp_path: Path):
    tree = TREE | {"more": {str(i): torch.zeros(i, dtype=[torch.int64, torch.uint8][i % 2]) for i in range(9)}}
    files = set()
    for _ in range(22):
        save_tree(tmp_path / "a", tree, "test", 1)
        files.add((tmp_path / "a").read_bytes())
    assert len(files) == 1


# Limits.


@pytest.mark.parametrize(
    "items",
    [
        [f"customer {i} ü \ud800" for i in range(100)],
        list(range(-(2**70), 2**70, 2**64)),
        [0.1, float("inf"), None, True, "", 1] * 20,
        [[f"name {i}", [i, {"a": None}]] for i in range(100)],
        {f"name {i}": i for i in range(100)},
        [1] * 99,
    ],
)
def test_long_lists_and_dicts_are_tensors(items: Any, tmp_path: Path):
    save_tree(tmp_path / "a", {"names": items, "again": [items, items]}, "test", 1)
    assert same(load_tree(tmp_path / "a", "test", 1), {"names": items, "again": [items, items]})
    with store.safe_open(tmp_path / "a", framework="pt") as file:
        assert len(list(file.keys())) == (3 if len(items) >= 100 else 0)
        assert len(file.metadata()["tree"]) < 10_000


@pytest.mark.parametrize("item", [(1, 2), {1: 2}, object(), torch.float32])
def test_long_lists_of_other_values(item: Any, tmp_path: Path):
    if isinstance(item, tuple):
        save_tree(tmp_path / "a", {"a": [item] * 100}, "test", 1)
        assert same(load_tree(tmp_path / "a", "test", 1), {"a": [item] * 100})
    else:
        with pytest.raises(ValueError, match=r"cannot save|keys must be strings"):
            save_tree(tmp_path / "a", {"a": [item] * 100}, "test", 1)


def test_names_beyond_the_header_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a"
    save_tree(path, {"a": 1}, "test", 1)
    monkeypatch.setattr(store, "_HEADER_LIMIT", 1000)
    save_tree(path, {"a": ["a name"] * 1000}, "test", 1)
    with pytest.raises(ValueError, match=r"cannot save .*a: the names and plain values take 2\d\d\d bytes"):
        save_tree(path, {"a": ["a name"] * 90}, "test", 1)
    assert load_tree(path, "test", 1) == {"a": ["a name"] * 1000}


def test_a_file_that_cannot_be_read_back_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a"
    save_tree(path, {"a": torch.ones(1)}, "test", 1)
    original = os.fsync

    def damaging(position: int):
        def fsync(handle: int) -> None:
            os.pwrite(handle, b"\xff", position)
            original(handle)

        return fsync

    for position in (0, 9, 200, path.stat().st_size - 1):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", damaging(position))
            with pytest.raises(OSError, match=r"cannot write .*a \(the file that was written cannot be read back"):
                save_tree(path, {"a": torch.zeros(1)}, "test", 1)
        assert same(load_tree(path, "test", 1), {"a": torch.ones(1)})
        assert list(tmp_path.iterdir()) == [path]


def test_paths_that_are_spelt_alike(tmp_path: Path):
    one, two, three = (torch.full((1,), float(i)) for i in range(3))
    for tree in (
        {"a/b": one, "a": {"b": two}},
        {"": {"": one}, "/": two},
        {"__metadata__": one, "__metadata__'": three},
    ):
        save_tree(tmp_path / "a", tree, "test", 1)
        assert same(load_tree(tmp_path / "a", "test", 1), tree)
