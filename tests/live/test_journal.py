"""The journal: what was written is read again, and every damage is detected and named."""

import errno
import os
import random
import resource
import shutil
import sqlite3
import threading

import pytest

from metaleader.live import journal as module
from metaleader.live.journal import NAME, Journal
from metaleader.live.mark import MARK, Mark


def contents(count, seed=0):
    draw = random.Random(seed)
    return [draw.randbytes(draw.choice([0, 1, 30, 492, 493, 1000, 5000])) for _ in range(count)]


@pytest.fixture
def made(tmp_path):
    """A folder with 40 records, ten per transaction, copied before and after its connection is closed."""
    journal, written = Journal(_folder(tmp_path / "open")), contents(40)
    written[16] = b"of one piece"
    for start in range(0, 40, 10):
        journal.append(written[start : start + 10])
    shutil.copytree(tmp_path / "open", tmp_path / "killed")
    journal.close()
    (tmp_path / "open").rename(tmp_path / "closed")
    return tmp_path, written


def _folder(path):
    path.mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize("folder", ["killed", "closed"])
def test_records_come_back_as_they_were(made, folder):
    path, written = made
    journal = Journal(path / folder)
    assert (journal.first, journal.last) == (1, 40)
    assert list(journal.read()) == list(enumerate(written, 1))
    assert list(journal.read(38)) == [(n, written[n - 1]) for n in (38, 39, 40)]
    assert journal.get(7) == written[6]
    assert journal.append([b"more"]) == 41
    assert list(journal.read(41)) == [(41, b"more")]
    journal.close()


def test_an_empty_journal(tmp_path):
    journal = Journal(tmp_path)
    assert (journal.first, journal.last, list(journal.read())) == (1, 0, [])
    assert journal.append([]) == 0
    journal.close()


def test_another_process_reads_while_this_one_writes(made):
    path, written = made
    writer = Journal(path / "killed")
    reader = Journal(path / "killed", readonly=True)
    assert list(reader.read()) == list(enumerate(written, 1))
    writer.append([b"more"])
    later = Journal(path / "killed", readonly=True)
    assert list(later.read(41)) == [(41, b"more")]
    for journal in (writer, reader, later):
        journal.close()
    with pytest.raises((ValueError, OSError), match=r"missing|no such|unable to open"):
        Journal(_folder(path / "nothing"), readonly=True)


def test_threads_append_in_one_order(tmp_path):
    journal = Journal(tmp_path)
    threads = [
        threading.Thread(target=lambda t=t: [journal.append([b"%d %d" % (t, i)]) for i in range(5)]) for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [content for _, content in journal.read()]
    assert sorted(found) == sorted(b"%d %d" % (t, i) for t in range(4) for i in range(5))
    journal.close()


def test_a_record_costs_its_bytes_and_a_few_more(tmp_path):
    for size, most in ((64, 40), (380, 30), (600, 80), (1024, 90), (6000, 600)):
        folder = _folder(tmp_path / str(size))
        Journal(folder).close()
        empty = (folder / NAME).stat().st_size
        journal = Journal(folder)
        journal.append(os.urandom(size) for _ in range(2000))
        journal.close()
        assert ((folder / NAME).stat().st_size - empty) / 2000 - size < most, size


def test_bytes_of_replaced_records_are_gone(tmp_path):
    journal = Journal(tmp_path)
    journal.append([b"public %d " % i * 300 + b"secret" for i in range(100)])
    size = journal.bytes
    journal.append([b"secret again"])
    assert any(b"secret" in file.read_bytes() for file in tmp_path.iterdir())
    assert journal.replace([b"kept", b"more"]) == 103
    assert not any(b"secret" in file.read_bytes() or b"public" in file.read_bytes() for file in tmp_path.iterdir())
    assert journal.bytes < size / 5
    journal.append([b"next"])
    journal.close()
    journal = Journal(tmp_path)
    assert list(journal.read()) == [(102, b"kept"), (103, b"more"), (104, b"next")]
    journal.close()


@pytest.mark.parametrize("flips", [30, pytest.param(500, marks=pytest.mark.torture)])
def test_every_flipped_bit_is_detected_and_the_rest_can_be_read(made, flips):
    """In the file and in its log: either SQLite does not use the byte, or the damage is named."""
    path, written = made
    draw = random.Random(1)
    detected, named = {"closed": 0, "killed": 0}, []
    for folder, name in (("closed", NAME), ("killed", f"{NAME}-wal")):
        data = (path / folder / name).read_bytes()
        for _ in range(flips):
            shutil.rmtree(path / "copy", ignore_errors=True)
            shutil.copytree(path / folder, path / "copy")
            at = draw.randrange(len(data))
            damaged = bytearray(data)
            damaged[at] ^= 1 << draw.randrange(8)
            (path / "copy" / name).write_bytes(damaged)
            (path / "copy" / f"{NAME}-shm").unlink(missing_ok=True)
            try:
                journal = Journal(path / "copy")
                assert list(journal.read()) == list(enumerate(written, 1))
                journal.close()
            except (ValueError, OSError) as error:
                named.append(str(error))
                detected[folder] += 1
                _check_salvage(path / "copy", written)
    assert all(NAME in message for message in named)
    assert detected["closed"] > flips / 3
    assert detected["killed"] > flips / 4


def _check_salvage(folder, written):
    journal = Journal(folder, repair=True)
    found = list(journal.salvage())
    assert all(content in (None, *written[number - 1 : number]) for number, content in found)
    assert [number for number, _ in found] == list(range(journal.first, journal.last + 1))
    assert journal.last >= 40
    journal.close()


def test_salvage_reads_everything_beside_the_damaged_record(made):
    path, _ = made
    connection = sqlite3.connect(path / "closed" / NAME)
    ((data,),) = connection.execute("SELECT bytes FROM journal WHERE id = ?", (17 << 24,))
    connection.execute("UPDATE journal SET bytes = ? WHERE id = ?", (data[:-1] + bytes([data[-1] ^ 1]), 17 << 24))
    connection.execute("UPDATE journal SET bytes = 'text' WHERE id = ?", (20 << 24,))
    connection.execute("DELETE FROM journal WHERE id = ?", (30 << 24,))
    connection.commit()
    connection.close()
    journal = Journal(path / "closed")
    with pytest.raises(ValueError, match=r"journal.sqlite is damaged: record 17 of 40 is not intact; .*repair=True"):
        list(journal.read())
    lost = [number for number, content in journal.salvage() if content is None]
    # The checksum of the record after a missing one covers the checksum of the missing one.
    assert lost == [17, 20, 21, 30, 31]
    journal.close()


def test_a_lost_end_is_detected(made):
    path, _ = made
    (path / "killed" / f"{NAME}-wal").unlink()
    with pytest.raises(ValueError, match="damaged: it ends at record 0, but record 40 was written"):
        Journal(path / "killed")
    journal = Journal(path / "killed", repair=True)
    assert journal.last == 40
    assert {content for _, content in journal.salvage()} == {None}
    journal.close()
    # An older journal that went on differently.
    (path / "closed" / MARK).replace(path / "mark")
    journal = Journal(_folder(path / "other"))
    journal.append([b"other"] * 41)
    journal.close()
    (path / "mark").replace(path / "other" / MARK)
    with pytest.raises(ValueError, match="record 40 is not the one that was written"):
        Journal(path / "other")


@pytest.mark.parametrize("content", [None, b"", b"x" * 24])
def test_a_damaged_mark_is_named(made, content):
    path, written = made
    (path / "closed" / MARK).unlink()
    if content is not None:
        (path / "closed" / MARK).write_bytes(content)
    with pytest.raises(ValueError, match=r"journal.mark is (damaged|missing), so that a loss"):
        Journal(path / "closed")
    journal = Journal(path / "closed", repair=True)
    assert list(journal.read()) == list(enumerate(written, 1))
    journal.close()


def test_other_files_are_refused(tmp_path):
    (tmp_path / NAME).write_bytes(b"x" * 5000)
    Mark(tmp_path).create()
    with pytest.raises(ValueError, match="damaged"):
        Journal(tmp_path)
    (tmp_path / NAME).unlink()
    connection = sqlite3.connect(tmp_path / NAME)
    connection.execute("CREATE TABLE journal (id INTEGER PRIMARY KEY, bytes BLOB)")
    with pytest.raises(ValueError, match="not a journal of metaleader"):
        Journal(tmp_path)
    connection.execute("PRAGMA user_version = 2")
    with pytest.raises(ValueError, match="has format 2, this release reads up to 1; upgrade"):
        Journal(tmp_path)
    connection.close()


def test_a_full_disk_leaves_the_journal_as_it_was(made):
    path, written = made
    journal = Journal(path / "killed")
    journal._connection.execute("PRAGMA max_page_count = 1").fetchall()
    with pytest.raises(OSError, match=r"cannot write .*journal.sqlite .*full.*free some space") as caught:
        journal.append([b"x" * 100_000])
    assert caught.value.errno == errno.ENOSPC
    assert list(journal.read()) == list(enumerate(written, 1))
    journal._connection.execute("PRAGMA max_page_count = 1000000").fetchall()
    assert journal.append([b"more"]) == 41
    journal.close()


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("at", ["check_format", "read"])
@pytest.mark.parametrize(
    ("code", "number", "remedy"),
    [
        (sqlite3.SQLITE_FULL, errno.ENOSPC, "free some space, then open it again"),
        (sqlite3.SQLITE_IOERR_SHMSIZE, errno.EIO, "check its disk"),
        (sqlite3.SQLITE_CANTOPEN, errno.EIO, "check its disk"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, errno.EROFS, "check its disk"),
    ],
)
def test_an_error_of_the_disk_is_not_damage(made, monkeypatch, code, number, remedy, at, repair):
    """A full disk, when the journal is opened or read: no mark is written, and the journal can be opened later."""
    path, written = made
    mark = (path / "closed" / MARK).read_bytes()

    def fail(*_):
        error = sqlite3.OperationalError("the text of SQLite")
        error.sqlite_errorcode = code
        raise error

    def opened_and_read():
        journal = Journal(path / "closed", repair=repair)
        try:
            with monkeypatch.context() as later:
                later.setattr(journal, "_query", fail)
                list(journal.salvage() if repair else journal.read())
        finally:
            journal.close()

    with monkeypatch.context() as patch:
        if at == "check_format":
            patch.setattr(module, "check_format", fail)
        with pytest.raises(OSError, match=f"the text of SQLite.*not damage.*{remedy}.*without repair=True") as caught:
            opened_and_read()
    assert caught.value.errno == number
    assert (path / "closed" / MARK).read_bytes() == mark
    journal = Journal(path / "closed")
    assert list(journal.read()) == list(enumerate(written, 1))
    journal.close()


def test_a_repair_while_the_file_cannot_grow(made):
    """SQLite needs room for the index of its log even to open the file."""
    path, written = made
    (path / "killed" / f"{NAME}-shm").unlink(missing_ok=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        for repair in (False, True):
            with pytest.raises(OSError, match=r"not damage.*without repair=True"):
                Journal(path / "killed", repair=repair)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal = Journal(path / "killed")
    assert list(journal.read()) == list(enumerate(written, 1))
    journal.close()


def test_a_failed_write_stops_the_journal_until_it_is_opened_again(made):
    """The operating system refuses to extend any file."""
    path, written = made
    journal = Journal(path / "killed")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match="cannot write"):
            journal.append([b"x" * 100_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(OSError, match=r"could not be written before .*open it again"):
        journal.append([b"more"])
    journal.close()
    journal = Journal(path / "killed")
    assert list(journal.read()) == list(enumerate(written, 1))
    assert journal.append([b"more"]) == 41
    journal.close()


def test_a_backup_is_made_while_the_journal_is_written(made):
    path, written = made
    journal, stop = Journal(path / "killed"), threading.Event()

    def write():
        while not stop.is_set():
            journal.append([b"more" * 300])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = journal.backup(_folder(path / "backup"))
    finally:
        stop.set()
        thread.join()
    journal.append([b"later"])
    journal.close()
    copy = Journal(path / "backup")
    assert copy.last == last >= 40
    assert [content for _, content in copy.read()][:40] == written
    copy.close()


def test_reading_computes_one_checksum_per_record(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append([b"record"] * 50)
    computed, original = [], module.checksum_of
    monkeypatch.setattr(module, "checksum_of", lambda *arguments: (computed.append(1), original(*arguments))[1])
    assert len(list(journal.read())) == 50
    assert len(computed) == 50
    journal.close()
