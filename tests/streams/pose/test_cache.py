import contextlib
import errno
import hashlib
import json
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest

from metaleader.streams.pose import cache as pose_cache
from metaleader.streams.pose.cache import claim_view, read_view, write_view
from metaleader.system.machine import cache_folder

# The module alone, without the package around it: a process that imports torch takes seconds to start.
PRELUDE = f"""
import importlib.util, os, pathlib, signal, time
spec = importlib.util.spec_from_file_location("pose_cache", {pose_cache.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""


def pictures():
    """Five images, eight pixels wide: as the empty one, changed in a pixel, at two corners, in a box, everywhere."""
    draw = np.random.default_rng(0)
    empty = draw.integers(0, 256, (3, 8, 8), np.uint8)
    images = np.stack([empty] * 5)
    images[1, 2, 3, 5] ^= 1
    images[2, :, [0, 7], [7, 0]] ^= 1
    images[3, :, 2:5, 1:7] = draw.integers(0, 256, (3, 3, 6))
    images[4] = draw.integers(0, 256, (3, 8, 8))
    return images, empty


def store(path, key="k"):
    images, empty = pictures()
    with claim_view(path, wait=True) as file:
        assert file is not None
        write_view(file, path, key, images, empty)
    return images


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new folder" / "car-03-1.view"
    with pytest.raises(FileNotFoundError):
        read_view(path, "k", 5, 8)
    images = store(path)
    np.testing.assert_array_equal(read_view(path, "k", 5, 8), images)
    assert [file.name for file in path.parent.iterdir()] == ["car-03-1.view"]


def test_every_damage_is_noticed(tmp_path):
    path = tmp_path / "a.view"
    images = store(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]):
            path.write_bytes(content)
            try:
                found = read_view(path, "k", 5, 8)
            except ValueError as error:
                assert str(path) in str(error)  # noqa: PT017
            else:
                # A change that leaves the JSON's meaning is harmless, and none other goes unnoticed.
                np.testing.assert_array_equal(found, images)
                assert place < whole.index(b"\n")
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="checksum"):
        read_view(path, "k", 5, 8)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "a.view"
    store(path)
    for key, num, size in (("other", 5, 8), ("k", 6, 8), ("k", 5, 9)):
        with pytest.raises(ValueError, match="it holds"):
            read_view(path, key, num, size)
    path.rename(tmp_path / "b.view")
    with pytest.raises(ValueError, match="it holds"):
        read_view(tmp_path / "b.view", "k", 5, 8)


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"3", b"{}", b"null", b'{"format": "metaleader pose view 1"}', b"\xff\xfe"]
)
def test_a_damaged_header(tmp_path, line):
    path = tmp_path / "a.view"
    path.write_bytes(line + b"\nabc")
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_view(path, "k", 5, 8)


@pytest.mark.parametrize(
    "raw",
    [
        bytes(20_000_000),  # it must not fill the memory
        bytes(100),
        bytes(3 * 8 * 8 + 5 * 8) + b"x",
        bytes(3 * 8 * 8) + np.array([[0, 9, 0, 8]] * 5, "<u2").tobytes() + bytes(5 * 3 * 9 * 8),
        bytes(3 * 8 * 8) + np.array([[5, 2, 5, 2]] * 5, "<u2").tobytes() + bytes(5 * 3 * 9),
        bytes(3 * 8 * 8) + np.array([[5, 2, 0, 4]] * 5, "<u2").tobytes() + bytes(60),
    ],
)
def test_a_foreign_content_is_refused(tmp_path, raw):
    path = tmp_path / "a.view"
    content = zlib.compress(raw, 9)
    header = {"format": pose_cache.FORMAT, "key": "k", "view": "a", "images": 5, "size": 8}
    header["sha256"] = hashlib.sha256(content).hexdigest()
    path.write_bytes(json.dumps(header).encode() + b"\n" + content)
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_view(path, "k", 5, 8)


def test_one_at_a_time(tmp_path):
    path = tmp_path / "a.view"
    order = []
    with claim_view(path, wait=True) as file:
        assert file is not None
        with claim_view(path, wait=False) as second:
            assert second is None
        with claim_view(tmp_path / "b.view", wait=False) as other:
            assert other is not None

        def late():
            with claim_view(path, wait=True) as third:
                assert third is not None
                order.append("late")
                read_view(path, "k", 5, 8)  # what the first one wrote is there
                order.append("read")
                # The lock it waited for is now on the finished file; it must hold one of its own to write.
                write_view(third, path, "new", *pictures())
                order.append("written")

        thread = threading.Thread(target=late)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("first")
        write_view(file, path, "k", *pictures())
    thread.join(10)
    assert order == ["first", "late", "read", "written"]
    np.testing.assert_array_equal(read_view(path, "new", 5, 8), pictures()[0])
    assert [file.name for file in tmp_path.iterdir()] == ["a.view"]


def test_who_has_finished_leaves_the_next_alone(tmp_path):
    path = tmp_path / "a.view"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(claim_view(path, wait=False))
        assert first is not None
        write_view(first, path, "k", *pictures())
        with claim_view(path, wait=False) as second:
            assert second is not None
            stack.close()
            write_view(second, path, "new", *pictures())
    np.testing.assert_array_equal(read_view(path, "new", 5, 8), pictures()[0])


def test_many_processes_draw_each_view_once(tmp_path):
    # Each process goes over all views and counts, without a lock, those it finds absent: a view drawn twice, or a
    # count taken while another one draws, would show.
    program = f"""{PRELUDE}
folder = pathlib.Path({str(tmp_path)!r})
drawn = 0
for wait in (False, True):
    for i in range(40):
        path = folder / f"{{i}}.view"
        with module.claim_view(path, wait) as file:
            if file is not None and not path.exists():
                assert not path.with_suffix(".busy").exists()
                path.with_suffix(".busy").touch()
                time.sleep(0.002)
                path.with_suffix(".busy").unlink()
                path.touch()
                drawn += 1
assert all((folder / f"{{i}}.view").exists() for i in range(40))
print(drawn)
"""
    command = [sys.executable, "-c", program]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    drawn = [int(worker.communicate(timeout=60)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sum(drawn) == 40
    assert not list(tmp_path.glob("*.part"))


def test_a_kill_leaves_the_view_free(tmp_path):
    # The lock dies with its process; what it had written of the view is thrown away.
    path = tmp_path / "a.view"
    program = f"""{PRELUDE}
with module.claim_view(pathlib.Path({str(path)!r}), True) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -9
    assert path.with_suffix(".part").read_bytes() == b"half"
    images = store(path)
    np.testing.assert_array_equal(read_view(path, "k", 5, 8), images)
    assert [file.name for file in tmp_path.iterdir()] == ["a.view"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "a.view"
    images = store(path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pose_cache.os, step, full)
        with pytest.raises(OSError, match="No space left"):
            store(path, key="new")
    assert [file.name for file in tmp_path.iterdir()] == ["a.view"]
    np.testing.assert_array_equal(read_view(path, "k", 5, 8), images)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("METALEADER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("METALEADER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "metaleader"
