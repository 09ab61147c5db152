"""Arrays from npz files that are damaged or hostile: an error in bounded memory."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest

from metaleader.system.npz import Header, npz_arrays, npz_headers


def header(shape, dtype="<f4", order="False"):
    text = f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n"


def written(path, content, compression=zipfile.ZIP_STORED, change=lambda content: content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("x.npy", content)
    path.write_bytes(change(file.getvalue()))
    return path


def encrypted(content):
    """The flag of encryption, in the header of the member and in the directory."""
    at = content.index(b"PK\x01\x02")
    return content[:6] + b"\x01" + content[7 : at + 8] + b"\x01" + content[at + 9 :]


def announcing(size):
    def change(content):
        at = content.index(b"PK\x01\x02")
        return content[: at + 24] + struct.pack("<I", size) + content[at + 28 :]

    return change


HOSTILE = {
    "huge shape": (header((10**9, 10**6)), zipfile.ZIP_STORED, None, r"announces \(1000000000, 1000000\)"),
    "huge compressed shape": (header((10**15,)), zipfile.ZIP_DEFLATED, None, "announces"),
    "overflowing shape": (header((2**62, 2**62, 0)), zipfile.ZIP_STORED, None, r"x: "),
    "negative shape": (header((-1, 4)), zipfile.ZIP_STORED, None, "announces"),
    "encrypted": (header((1,)) + bytes(4), zipfile.ZIP_STORED, encrypted, "it is encrypted"),
    "bzip2": (header((1,)) + bytes(4), zipfile.ZIP_BZIP2, None, "compression, number 12"),
    "lzma": (header((1,)) + bytes(4), zipfile.ZIP_LZMA, None, "compression, number 14"),
    "bomb": (header((1,)) + bytes(4), zipfile.ZIP_STORED, announcing(2**31), "compressed ones|announces"),
    "unclosed header": (b"\x93NUMPY\x01\x00\x08\x00{'descr'", zipfile.ZIP_STORED, None, "x: "),
    "nested header": (b"\x93NUMPY\x01\x00\x00\x20" + b"(" * 0x2000, zipfile.ZIP_STORED, None, "x: "),
    "no magic": (b"", zipfile.ZIP_STORED, None, "x: "),
    "version 9": (b"\x93NUMPY\x09\x00\x00\x00", zipfile.ZIP_STORED, None, "version"),
    "objects": (header((1,), "|O") + bytes(8), zipfile.ZIP_STORED, None, "not numeric"),
    "no dtype": (header((1,), "nothing"), zipfile.ZIP_STORED, None, "x: "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name, tmp_path):
    content, compression, change, message = HOSTILE[name]
    path = written(tmp_path / "file.npz", content, compression, change or (lambda content: content))
    for read in (npz_headers, lambda path: npz_arrays(path, ["x"])):
        with pytest.raises(ValueError, match=message) as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_files_that_never_end(tmp_path):
    os.mkfifo(tmp_path / "fifo.npz")
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    (tmp_path / "folder.npz").mkdir()
    for path in tmp_path.iterdir():
        with pytest.raises(OSError, match=r"not a regular file|is a folder"):
            npz_headers(path)


def test_bit_flips_raise_value_errors_alone(tmp_path):
    np.savez_compressed(tmp_path / "file.npz", x=np.arange(12.0).reshape(3, 4))
    whole, refused = (tmp_path / "file.npz").read_bytes(), 0
    for bit in range(0, 8 * len(whole), 5):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "file.npz").write_bytes(bytes(changed))
        try:
            npz_arrays(tmp_path / "file.npz", ["x"])
        except ValueError:
            refused += 1
    assert refused > 100


def test_arrays_and_headers(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.int16).reshape(2, 3), "a/b": np.ones((0, 2)), "one": np.float64(3.0)}
    np.savez_compressed(tmp_path / "file.npz", **arrays)
    headers = npz_headers(tmp_path / "file.npz")
    assert headers == {name: Header(np.shape(value), np.asarray(value).dtype) for name, value in arrays.items()}
    for name, value in npz_arrays(tmp_path / "file.npz", list(arrays)).items():
        np.testing.assert_array_equal(value, arrays[name])
    with pytest.raises(ValueError, match="it has no y"):
        npz_arrays(tmp_path / "file.npz", ["y"])
    with pytest.raises(ValueError, match="it announces 12 bytes, more than 11"):
        npz_arrays(tmp_path / "file.npz", ["x"], limit=11)
