"""N-way streams, and CIFAR-100 from synthetic files in the official formats: intact, damaged, hostile."""

import collections
import contextlib
import gzip
import hashlib
import io
import itertools
import os
import pickle
import resource
import struct
import tarfile
from typing import Any

import numpy as np
import pytest
import torch

import metaleader as ml
from metaleader.streams import Labelled, NWayStream, cifar100
from metaleader.streams.datasets import registry as data
from metaleader.streams.datasets.cifar import COARSE, NAMES, SUPERCLASSES
from metaleader.streams.datasets.pickles import load_pickle


def labelled(classes=8, train=6, test=3):
    """Row i of x holds i; labels are spread."""
    labels = np.tile(np.arange(classes), train)
    test_labels = np.repeat(np.arange(classes), test)
    return Labelled(np.arange(len(labels))[:, None], labels, np.arange(len(test_labels))[:, None], test_labels)


def task_of(stream, t) -> Any:
    return stream[t]


def sha256(task):
    digest = hashlib.sha256(f"{task.name} {task.classes}".encode())
    for part in (*task.train, *task.test, task.ids):
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def test_the_newest_class_and_earlier_ones():
    source = labelled()
    stream = NWayStream(source, ways=3, per_class=4)
    assert len(stream) == 6
    assert sorted(stream.order) == list(range(8))
    positions = collections.defaultdict(set)
    for t in range(6):
        task = task_of(stream, t)
        newest = stream.order[2 + t]
        assert task.name == f"class {newest}"
        assert newest in task.classes
        assert set(task.classes) <= set(stream.order[: 3 + t])
        assert len(set(task.classes)) == 3
        positions[task.classes.index(newest)].add(t)
        for x, y in zip(task.train.x[:, 0].tolist(), task.train.y.tolist(), strict=True):
            assert source.labels[x] == task.classes[y]
        for x, y in zip(task.test.x[:, 0].tolist(), task.test.y.tolist(), strict=True):
            assert source.test_labels[x] == task.classes[y]
        assert task.ids.tolist() == task.train.x[:, 0].tolist()
        assert len(set(task.ids.tolist())) == 12
        assert task.test.x.shape == (9, 1)
        # Every reveal of three has each class once.
        assert all(sorted(row) == [0, 1, 2] for row in task.train.y.reshape(4, 3).tolist())
    assert len(positions) > 1  # labels are shuffled


def test_a_class_shows_the_same_datapoints_in_another_order():
    stream = NWayStream(labelled(classes=4), ways=3, per_class=4)
    shown = collections.defaultdict(list)
    for t in range(len(stream)):
        for i, c in enumerate(task_of(stream, t).classes):
            shown[c].append(task_of(stream, t).ids[i::3].tolist())
    twice = [lists for lists in shown.values() if len(lists) == 2]
    assert twice
    assert all(sorted(a) == sorted(b) for a, b in twice)
    assert any(a != b for a, b in twice)


def test_new_datapoints_are_counted_through_play():
    torch.manual_seed(0)
    stream = NWayStream(
        Labelled(
            np.random.default_rng(0).random((48, 2), np.float32),
            np.arange(48) % 8,
            np.zeros((8, 2), np.float32),
            np.arange(8),
        ),
        ways=3,
        per_class=4,
    )
    learner = ml.FTML(
        torch.nn.Linear(2, 3), ml.losses.cross_entropy, support=3, query=3, meta_steps=1, tasks_per_step=2
    )
    last = [r for r in ml.play(learner, stream, reveal=6) if r.datapoints == 12]
    assert [r.more["new_datapoints"] for r in last] == [12, 4, 4, 4, 4, 4]


def test_orders():
    superclasses = [0, 1, 0, 1, 2, 2, 0, 1]
    by_group = NWayStream(labelled(), 3, 4, order="superclass", superclasses=superclasses).order
    groups = [superclasses[c] for c in by_group]
    assert len(list(itertools.groupby(groups))) == 3
    assert NWayStream(labelled(), 3, 4, order="given").order == list(range(8))
    recurring = NWayStream(labelled(), 3, 4, order="recurring", superclasses=superclasses)
    assert len(list(itertools.groupby(superclasses[c] for c in recurring.order))) == 6
    assert recurring.attributes["superclass"] == [str(superclasses[c]) for c in recurring.order[2:]]
    assert NWayStream(labelled(), 3, 4, order=[5, 1, 3]).order == [5, 1, 3]
    assert len({tuple(NWayStream(labelled(), 3, 4, seed=seed).order) for seed in range(5)}) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "superclasses"}, "order must be one of random, given, a list of classes; got 'superclasses'"),
        ({"order": "superclass"}, "needs the superclass"),
        ({"order": "drifting"}, "the stream has no attributes"),
        ({"order": "superclas", "superclasses": [0] * 8}, "did you mean 'superclass'"),
        ({"superclasses": [0] * 7}, "7 superclasses for class 7"),
        ({"order": [1, 1]}, "distinct classes"),
        ({"order": [1, 99]}, "distinct classes"),
        ({"ways": 9}, r"ways must lie in 2..8"),
        ({"ways": 1}, r"ways must lie in 2..8"),
        ({"per_class": 7}, "cannot take 7 training datapoints per class: class 0 has 6"),
        ({"test_per_class": 4}, "cannot take 4 test datapoints"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        NWayStream(labelled(), **{"ways": 3, "per_class": 4} | options)


def test_wrong_data():
    good = labelled()
    with pytest.raises(ValueError, match="as many integer labels"):
        NWayStream(good._replace(labels=good.labels[:-1]), 3, 4)
    with pytest.raises(ValueError, match="as many integer labels"):
        NWayStream(good._replace(labels=good.labels.astype(float)), 3, 4)
    with pytest.raises(ValueError, match="must not be negative"):
        NWayStream(good._replace(labels=good.labels - 1), 3, 4)
    with pytest.raises(ValueError, match="class 7 has 0"):
        NWayStream(good._replace(test_labels=np.minimum(good.test_labels, 6)), 3, 4)


def test_a_task_depends_on_seed_and_round_alone():
    hashes = [sha256(NWayStream(labelled(), 3, 4, seed=1)[t]) for t in range(6)]
    again = NWayStream(labelled(), 3, 4, seed=1)
    assert [sha256(again[t]) for t in reversed(range(6))] == hashes[::-1]
    with pytest.raises(IndexError):
        again[6]


def test_superclasses_are_the_official_ones():
    assert len(set(NAMES)) == 100
    assert all(len(group) == 5 for group in SUPERCLASSES.values())
    # From the published table: class 0 is an apple, 4 a beaver, 69 a rocket, 99 a worm.
    assert [NAMES[i] for i in (0, 4, 69, 99)] == ["apple", "beaver", "rocket", "worm"]
    assert [list(SUPERCLASSES)[COARSE[i]] for i in (0, 4, 69, 99)] == [
        "fruit and vegetables", "aquatic mammals", "vehicles 2", "non-insect invertebrates",
    ]  # fmt: skip


# CIFAR-100's files.


def python2_pickle(images, labels):
    """What Python 2's cPickle wrote: protocol 2, text as byte strings, numpy's old module names."""

    def text(content):
        return b"T" + struct.pack("<I", len(content)) + content

    def number(value):
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR"
    array += b"(" + number(1) + b"(" + number(len(images)) + number(images.shape[1]) + b"t" + dtype
    array += b"\x89" + text(images.tobytes()) + b"tb"
    fine = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"fine_labels") + fine + text(b"data") + array + b"u."


def archive(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for member, content in members:
            if isinstance(member, str):
                member = tarfile.TarInfo(member)
                member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def cifar():
    """Two training images and one test image of each class, in no order."""
    draw = np.random.default_rng(0)
    labels, test_labels = draw.permutation(np.arange(200) % 100), draw.permutation(100)
    return (
        draw.integers(0, 256, (200, 3072), np.uint8),
        labels,
        draw.integers(0, 256, (100, 3072), np.uint8),
        test_labels,
    )


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Put an archive into a data folder as the published file."""

    def put(content):
        (tmp_path / "cifar100").mkdir(exist_ok=True)
        (tmp_path / "cifar100" / "cifar-100-python.tar.gz").write_bytes(content)
        file = data.DataFile("cifar-100-python.tar.gz", len(content), hashlib.sha256(content).hexdigest(), ())
        monkeypatch.setitem(data.DATA_SETS, "cifar100", data.DataSet((file,), "cifar100.npz", "rainbow-digits"))
        return tmp_path

    return put


def official(cifar, dump=python2_pickle):
    images, labels, test_images, test_labels = cifar
    folder = tarfile.TarInfo("cifar-100-python")
    folder.type = tarfile.DIRTYPE
    return [
        (folder, b""),
        ("cifar-100-python/file.txt~", b""),
        ("cifar-100-python/train", dump(images, labels)),
        ("cifar-100-python/test", dump(test_images, test_labels)),
    ]


def write_npz(folder, cifar, **changes):
    images, labels, test_images, test_labels = cifar
    arrays = {
        "train_images": images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1),
        "train_labels": labels.astype(np.uint8),
        "test_images": test_images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1),
        "test_labels": test_labels.astype(np.uint8),
    } | changes
    (folder / "cifar100").mkdir(exist_ok=True)
    np.savez(
        folder / "cifar100" / "cifar100.npz", **{name: array for name, array in arrays.items() if array is not None}
    )
    return folder


def test_archive_and_npz_give_the_same_stream(cifar, publish, tmp_path):
    images, labels, test_images, test_labels = cifar
    path = tmp_path / "npz"
    path.mkdir()
    from_npz = cifar100(write_npz(path, cifar), per_class=2)
    from_archive = cifar100(publish(archive(official(cifar))), per_class=2)
    protocol4 = lambda x, y: pickle.dumps({b"data": x, b"fine_labels": y.tolist()}, protocol=4)  # noqa: E731
    from_python3 = cifar100(publish(archive(official(cifar, protocol4))), per_class=2)
    assert len(from_npz) == 96
    for t in (0, 50, 95):
        task = task_of(from_npz, t)
        assert sha256(task) == sha256(from_archive[t]) == sha256(from_python3[t])
        assert task.train.x.is_contiguous()
        assert task.train.x.shape == (10, 3, 32, 32)
        assert task.name == NAMES[from_npz.order[4 + t]]
        for x, y, i in zip(task.train.x, task.train.y, task.ids, strict=True):
            assert torch.equal(x.flatten(), torch.from_numpy(images[i]))
            assert labels[i] == task.classes[y]
        for x, y in zip(task.test.x, task.test.y, strict=True):
            (i,) = np.flatnonzero(test_labels == task.classes[y])
            assert torch.equal(x.flatten(), torch.from_numpy(test_images[i]))
    by_group = cifar100(path, per_class=2, order="superclass").order
    assert len(list(itertools.groupby(COARSE[c] for c in by_group))) == 20


class Hostile:
    """A pickle of this calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile_pickles(target):
    return {
        "system": pickle.dumps(Hostile(os.system, f"touch {target}"), 2),
        "eval": pickle.dumps({b"data": Hostile(eval, f"open({str(target)!r}, 'w')")}, 2),
        "numpy load": pickle.dumps(Hostile(np.load, str(target)), 2),
        "numpy runstring": b"cnumpy.testing._private.utils\nrunstring\n(S'open(\""
        + str(target).encode()
        + b'","w")\'\n}tR.',
        "dotted": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.__class__\x93.",
        "builtins": b"c__builtin__\ngetattr\n.",
        "persistent": b"Phello\n.",
        "object array": pickle.dumps({b"data": np.array([None, {}], dtype=object), b"fine_labels": [1]}, 4),
        "float array": pickle.dumps({b"data": np.zeros((2, 3072)), b"fine_labels": [1, 2]}, 4),
        "attribute of a stand-in": b"cnumpy\ndtype\n}(S'x'\nI1\nub.",
        "attributes of a class": b"\x80\x02cnumpy\ndtype\nN}(U\x04codeK\x01u\x86b.",
    }


@pytest.mark.parametrize("name", hostile_pickles(""))
def test_a_hostile_pickle_runs_nothing(name, cifar, publish, tmp_path):
    target = tmp_path / "executed"
    members = official(cifar)
    members[2] = ("cifar-100-python/train", hostile_pickles(target)[name])
    with pytest.raises(ValueError, match=r"cifar-100-python/train (is hostile|is damaged)"):
        cifar100(publish(archive(members)))
    assert not target.exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cifar-100-python.tar.gz", "cifar100"]


def test_every_truncation_and_random_damage_of_a_pickle_is_a_clear_error():
    whole = python2_pickle(np.zeros((2, 6), np.uint8), [1, 2])
    assert load_pickle(io.BytesIO(whole), len(whole), "it")[b"data"].array.shape == (2, 6)
    for end in range(len(whole) - 1):
        with pytest.raises(ValueError, match=r"it is .*damaged"):
            load_pickle(io.BytesIO(whole[:end]), end, "it")
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(2000):
        changed = bytearray(whole)
        for position in draw.integers(0, len(whole), draw.integers(1, 4)):
            changed[position] = draw.integers(256)
        try:
            load_pickle(io.BytesIO(changed), len(changed), "it")
        except ValueError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    "bomb", [b"]r\xff\xff\xff\x7f.", b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b".", b"T\xff\xff\xff\x7fx."]
)
def test_a_pickle_cannot_ask_for_memory(bomb):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(ValueError):
        load_pickle(io.BytesIO(bomb), len(bomb), "it")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def link(kind, name="cifar-100-python/train"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member, b""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: [*m[:2], link(tarfile.SYMTYPE), m[3]], "hostile"),
        (lambda m: [*m[:2], link(tarfile.LNKTYPE), m[3]], "hostile"),
        (lambda m: [*m, link(tarfile.SYMTYPE, "elsewhere")], "hostile"),
        (lambda m: [*m, link(tarfile.FIFOTYPE, "pipe")], "hostile"),
        (lambda m: [*m, ("../outside", b"x")], "leads out of the archive"),
        (lambda m: [*m, ("/outside", b"x")], "leads out of the archive"),
        (lambda m: [*m, m[2]], "is duplicated"),
        (lambda m: m[:3], "has no cifar-100-python/test"),
        (lambda m: [], "has no cifar-100-python/train"),
    ],
)
def test_hostile_or_wrong_archives(change, message, cifar, publish, tmp_path):
    with pytest.raises(ValueError, match=message):
        cifar100(publish(archive(change(official(cifar)))))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cifar-100-python.tar.gz", "cifar100"]


def test_a_member_that_claims_to_be_huge(cifar, publish):
    member = tarfile.TarInfo("cifar-100-python/train")
    member.size = 1 << 40
    with pytest.raises(ValueError, match="too large"):
        cifar100(publish(gzip.compress(member.tobuf() + b"\0" * 1024)))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_claims_to_be_huge(kind, publish):
    member = tarfile.TarInfo("header")
    member.type, member.size = kind, 1 << 40
    with pytest.raises(ValueError, match=r"announces \d+ bytes"):
        cifar100(publish(gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)))


def test_labels_that_are_no_list(cifar, publish):
    nested = [0, 1]
    for _ in range(60):
        nested = [nested, nested]
    members = official(cifar, lambda x, y: pickle.dumps({b"data": x, b"fine_labels": nested}, 4))
    with pytest.raises(ValueError, match="fine_labels must be a list of integers"):
        cifar100(publish(archive(members)))


@pytest.mark.parametrize("keep", [0, 10, 0.3, 0.9])
def test_truncated_archives(keep, cifar, publish):
    content = archive(official(cifar))
    with pytest.raises(ValueError, match=r"truncated or not a gzipped archive|is damaged|has no cifar"):
        cifar100(publish(content[: keep if isinstance(keep, int) else int(keep * len(content))]))


def test_wrong_contents(cifar, publish):
    images, labels, *test = cifar
    for changed, message in (
        ((images[:, :-1], labels), "data must be uint8"),
        ((images, labels[:-1]), "200 images need as many integer labels"),
        ((images, np.minimum(labels, 98)), r"the file lacks \[99\]"),
        ((images, labels + 1), r"the file lacks \[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cifar100(publish(archive(official((*changed, *test)))))
    with pytest.raises(ValueError, match="has no data and fine_labels"):
        cifar100(publish(archive(official(cifar, lambda x, y: pickle.dumps([1, 2])))))


def test_wrong_npz(cifar, tmp_path):
    images = np.zeros((200, 32, 32, 3), np.uint8)
    for changes, message in (
        ({"test_labels": None}, "has no test_labels"),
        ({"train_images": images.transpose(0, 3, 1, 2)}, "images must be uint8"),
        ({"train_images": images.astype(float)}, "images must be uint8"),
        ({"train_labels": np.zeros(200, np.uint8)}, "the file lacks"),
        ({"train_labels": np.zeros(200)}, "integer labels"),
        ({"train_labels": np.array([None] * 200)}, "cannot be read as CIFAR-100"),
    ):
        with pytest.raises(ValueError, match=message):
            cifar100(write_npz(tmp_path, cifar, **changes))
    path = write_npz(tmp_path, cifar) / "cifar100" / "cifar100.npz"
    whole = path.read_bytes()
    for content in (whole[:-100], whole[: len(whole) // 2], b"", b"PK", whole[:5000] + b"\xff" * 50 + whole[5050:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as CIFAR-100"):
            cifar100(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"`metaleader data fetch cifar100`.*rainbow-digits"):
        cifar100(tmp_path)


@pytest.mark.data
@pytest.mark.skipif(
    data.status("cifar100").state not in ("verified", "present"),
    reason="CIFAR-100 is not in METALEADER_DATA: metaleader data fetch cifar100",
)
def test_cifar100_of_the_real_files():
    stream = cifar100()
    task = stream[0]
    assert len(stream) == 96
    assert task.train.x.shape == (2000, 3, 32, 32)
    assert task.test.x.shape == (500, 3, 32, 32)
    assert [sha256(stream[t])[:16] for t in (0, 50, 95)] == HASHES


HASHES = ["4bac91a85beb8cc6", "b70b8cedf87917bd", "a59abd8f47396890"]
