import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from metaleader.system import files as store
from metaleader.system.files import load_tree, save_tree, write_atomic

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


# Atomic.


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_alone(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(store.os, step, fail)
    with pytest.raises(type(error)):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_content_is_whole_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, replace, seen = tmp_path / "a", os.replace, []

    def watched(source: str, target: Path) -> None:
        seen.append(Path(source).read_bytes())
        assert Path(source).parent == Path(target).parent
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", watched)
    write_atomic(path, b"x" * 100_000)
    assert seen == [b"x" * 100_000] == [path.read_bytes()]


def test_the_file_has_ordinary_permissions(tmp_path: Path):
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    write_atomic(tmp_path / "a", b"")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


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


@given(st.data())
def test_a_changed_byte_is_an_error_or_other_content(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    """There is no checksum; but whatever a damaged file holds, it is read, or refused with a ValueError."""
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    save_tree(path, TREE, "test", 1)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        assert isinstance(load_tree(path, "test", 1), dict)


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


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path):
    (tmp_path / "shared").mkdir()
    target, link = tmp_path / "shared" / "real", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [path.name for path in target.parent.iterdir()] == ["real"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_files_are_replaced(make: Any, tmp_path: Path):
    """As root, a rename would replace a device too."""
    path = tmp_path / "there"
    make(path)
    with pytest.raises(OSError, match=r"cannot write .*there: it is (a folder|not a regular file); name a file"):
        write_atomic(path, b"")
    assert not path.is_file()


def test_a_link_to_nowhere(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "a")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        write_atomic(tmp_path / "link", b"")


def test_an_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*/a \(No space left on device\); .* free some space") as found:
        write_atomic(tmp_path / "a", b"new")
    assert found.value.errno == 28
    assert not list(tmp_path.iterdir())


def test_any_byte_that_was_changed_is_found(tmp_path: Path):
    path = tmp_path / "a"
    save_tree(path, TREE, "test", 1)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for at in range(start, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="is damaged: its checksum does not match; use an intact copy"):
            load_tree(path, "test", 1)


def test_a_file_of_an_earlier_release_has_no_digest(tmp_path: Path):
    save_tree(tmp_path / "a", {"b": torch.ones(2)}, "test", 1)
    with store.safe_open(tmp_path / "a", framework="pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "sha256"}
    (tmp_path / "a").write_bytes(save({"b": torch.ones(2)}, metadata=metadata))
    assert same(load_tree(tmp_path / "a", "test", 1), {"b": torch.ones(2)})
