"""The digest of a run's records, which every checkpoint holds, and the comparison of the file with it.

The SHA-256 tells whether the bytes are those that the run wrote. The CRC-32 of each block tells where they differ.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import itertools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_BLOCK = 1024
_POLYNOMIAL = 0xEDB88320  # of CRC-32, with reflected bits


class Digest:
    """The digest of some bytes, which can be extended.

    Attributes:
        length: the number of bytes.
    """

    def __init__(self, content: bytes = b"") -> None:
        self.length = 0
        self._sha256 = hashlib.sha256()
        self._crcs: list[int] = []  # of the blocks; the last block may be incomplete
        self._append(content)

    def extended(self, content: bytes) -> Digest:
        """The digest of these bytes followed by others."""
        digest = Digest()
        digest.length, digest._sha256, digest._crcs = self.length, self._sha256.copy(), list(self._crcs)
        digest._append(content)
        return digest

    def tree(self) -> dict[str, Any]:
        """The digest as part of a checkpoint."""
        return {
            "records_bytes": self.length,
            "records_sha256": self._sha256.hexdigest(),
            "records_crcs": torch.tensor(self._crcs, dtype=torch.int64),
        }

    def _append(self, content: bytes) -> None:
        self._sha256.update(content)
        for start, end in _blocks(self.length, self.length + len(content)):
            piece = content[start - self.length : end - self.length]
            if start % _BLOCK:
                self._crcs[-1] = zlib.crc32(piece, self._crcs[-1])
            else:
                self._crcs.append(zlib.crc32(piece))
        self.length += len(content)


def is_valid(tree: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has no digest, as those of earlier releases, or a complete one."""
    if "records_sha256" not in tree and "records_crcs" not in tree:
        return True
    crcs, shape = tree.get("records_crcs"), (-(-tree["records_bytes"] // _BLOCK),)
    is_table = isinstance(crcs, torch.Tensor) and crcs.dtype == torch.int64 and crcs.shape == shape
    return is_table and isinstance(tree.get("records_sha256"), str)


def newest(checkpoints: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The checkpoint with the most records; None without any."""
    return max(checkpoints.values(), key=lambda tree: tree["records_bytes"], default=None)


def committed(path: Path, checkpoints: Mapping[str, Mapping[str, Any]], finished: bool) -> bytes:
    """The records up to the last checkpoint, as the run wrote them.

    Line ends that an editor or git has changed are changed back. Nothing is written.

    Args:
        path: the file of the records.
        checkpoints: by method, at least one.
        finished: whether the run has no more rounds to play; the file then ends with the last checkpoint.

    Raises:
        ValueError: if the file is shorter or longer than that, or differs; the message says where.
    """
    tree = newest(checkpoints)
    assert tree is not None
    length = tree["records_bytes"]
    advice = "restore it from a copy, or start a new run in another folder"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, but had {length} bytes when its checkpoint was written; {advice}. If `metaleader join`"
            " was stopped, run it again"
        )
    content = path.read_bytes()
    restored = content.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")
    candidate = next((c for c in (content, restored) if _is_intact(c[:length], tree, checkpoints)), None)
    if candidate is not None:
        if finished and len(candidate) > length:
            line = candidate.count(b"\n", 0, length) + 1
            raise ValueError(
                f"{path} has {len(candidate) - length} bytes more than the run wrote: remove line {line} on"
            )
        return candidate[:length]
    if len(content) < length:
        raise ValueError(
            f"{path} was truncated: it has {len(content)} bytes, but had {length} when its checkpoint was written;"
            f" {advice}"
        )
    if "records_sha256" not in tree:
        raise ValueError(f"{path} was changed: its rows are not those of the rounds in the checkpoints; {advice}")
    where = _difference(restored if content.split(b"\n", 1)[0].endswith(b"\r") else content, tree)
    raise ValueError(f"{path} was changed: {where}; {advice}")


def _is_intact(content: bytes, tree: Mapping[str, Any], checkpoints: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the bytes are those of a checkpoint; without a digest in it, whether they are the rows of its rounds."""
    if len(content) != tree["records_bytes"]:
        return False
    if "records_sha256" in tree:
        return hashlib.sha256(content).hexdigest() == tree["records_sha256"]
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    except (UnicodeDecodeError, csv.Error):
        return False
    rounds = {method: set(map(str, range(other["rounds_played"]))) for method, other in checkpoints.items()}
    found = {method: {row.get("round") for row in rows if row.get("method") == method} for method in rounds}
    return content.endswith(b"\n") and b"\r\n" not in content.split(b"\n", 1)[0] + b"\n" and found == rounds


def _difference(content: bytes, tree: Mapping[str, Any]) -> str:
    """Describe where bytes differ from those of a checkpoint: the lines, or the column of a single bit."""
    blocks, crcs = _blocks(0, tree["records_bytes"]), tree["records_crcs"].tolist()
    pairs = zip(blocks, crcs, strict=True)
    differing = [(start, end, crc) for (start, end), crc in pairs if zlib.crc32(content[start:end]) != crc]
    if not differing:
        return "it differs"
    (start, end, crc), last = differing[0], differing[-1][1]
    bit = _flipped_bit(end - start, zlib.crc32(content[start:end]) ^ crc) if len(differing) == 1 else None
    if bit is not None:
        at = start + bit // 8
        was = bytes([content[at] ^ 1 << bit % 8])
        original = content[:at] + was + content[at + 1 :]
        line_start = original.rfind(b"\n", 0, at) + 1
        line, column = original.count(b"\n", 0, at) + 1, len(original[line_start:at].decode(errors="replace")) + 1
        return f"column {column} of line {line} is {_text(content[at : at + 1])}, it was {_text(was)}"
    first = content.count(b"\n", 0, start) + 1
    if len(differing) > 1 and last == tree["records_bytes"]:
        return f"it differs from line {first} on"
    last_line = content.count(b"\n", 0, last - 1) + 1
    return f"it differs between lines {first} and {last_line}"


def _blocks(start: int, end: int) -> list[tuple[int, int]]:
    """The parts of a range that lie in one block each."""
    edges = [start, *range(start - start % _BLOCK + _BLOCK, end, _BLOCK), end]
    return [pair for pair in itertools.pairwise(edges) if pair[0] < pair[1]]


def _flipped_bit(num_bytes: int, syndrome: int) -> int | None:
    """The position of the only bit by which a block differs, given the XOR of both CRC-32; None if there are several.

    Positions count from the lowest bit of the first byte.
    """
    value = _POLYNOMIAL
    for position in reversed(range(8 * num_bytes)):
        if value == syndrome:
            return position
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return None


def _text(piece: bytes) -> str:
    return repr(piece.decode()) if piece.isascii() else f"byte {piece[0]:#04x}"
