"""The records are those that the run wrote, or are refused with the place where they differ."""

import json
import shutil
import zlib

import pytest
import torch
from made_records import made_config

from metaleader.evaluate import Record
from metaleader.report.claims import check_claims
from metaleader.report.loaded import load_runs
from metaleader.runner import experiment as runner
from metaleader.runner import join_experiments, resume_experiment
from metaleader.runs.digest import Digest, committed
from metaleader.runs.folder import read_checkpoint, read_records, write_checkpoint
from metaleader.runs.run import Run

CONFIG = made_config(preset="sinusoid", methods=["ftml", "toe"], seeds=1)


def run_of(folder, rounds=4, finished=("ftml", "toe")):
    """A run of some finished methods, with records of more than one block."""
    with Run(folder, CONFIG) as run:
        run.rewind(rounds)
        for method in finished:
            for t in range(rounds):
                reveals = [[Record("online", t, f"tâsk {t}", n, 1 / n, None, None, {})] for n in (7, 14, 21)]
                run.save(method, t + 1, reveals, {"weights": [t]}, 1.0, 1.0)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("made") / "run", 6)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def without_digest(folder):
    """Make the checkpoints those of an earlier release."""
    for method in CONFIG["methods"]:
        tree = read_checkpoint(folder, method)
        if tree is not None:
            kept = ("rounds_played", "rounds", "records_bytes", "state")
            write_checkpoint(folder, method, {name: tree[name] for name in kept})


def readers(folder, tmp_path):
    """The commands that read a run."""
    return (
        lambda: load_runs([folder]),
        lambda: check_claims(folder),
        lambda: resume_experiment(folder),
        lambda: join_experiments([folder, folder], tmp_path / "joined"),
    )


def test_a_digest_that_is_extended_is_that_of_the_whole():
    content = bytes(i * i % 251 for i in range(5000))
    for sizes in ([5000], [1] * 5000, [1023, 1, 1024, 1025, 1927], [0, 4096, 0, 904]):
        digest, start = Digest(), 0
        for size in sizes:
            digest, start = digest.extended(content[start : start + size]), start + size
        tree = digest.tree()
        assert tree["records_crcs"].tolist() == [zlib.crc32(content[i : i + 1024]) for i in range(0, 5000, 1024)]
        assert {name: tree[name] for name in ("records_bytes", "records_sha256")} == {
            name: Digest(content).tree()[name] for name in ("records_bytes", "records_sha256")
        }


def test_a_flipped_bit_is_found_with_its_line_and_column(run):
    path = run / "records.csv"
    content = path.read_bytes()
    assert 1500 < len(content) < 2000
    checkpoints = {method: read_checkpoint(run, method) or {} for method in CONFIG["methods"]}
    message = ""
    for at in [*range(0, 8 * len(content), 61), 8 * len(content) - 1]:
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"was changed") as caught:
            committed(path, checkpoints, True)
        before = content[: at // 8]
        line, column = before.count(b"\n") + 1, len(before.rpartition(b"\n")[2].decode(errors="replace")) + 1
        message = str(caught.value)
        assert f"was changed: column {column} of line {line} is " in message
    assert message.endswith("is byte 0x8a, it was '\\n'; restore it from a copy, or start a new run in another folder")


def test_no_reader_accepts_a_flipped_bit(run, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_check_unchanged", lambda *_: None)
    path = run / "records.csv"
    content = path.read_bytes()
    flipped = content.replace(b"0.14285714285714285", b"0.14285714285714295", 1)
    path.write_bytes(flipped)
    column = len("ftml,0,online,0,tâsk 0,7,0.142857142857142") + 1
    for read in readers(run, tmp_path)[:3]:
        with pytest.raises(ValueError, match=f"column {column} of line 2 is '9', it was '8'|between lines 1 and"):
            read()
        assert path.read_bytes() == flipped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b"toe,0,online,5,", b"top,1,online,5,"), "it differs between lines 21 and 37"),
        (lambda text: text.replace(b"ftml,0,online,0,", b"ftml,9,online,9,"), "it differs between lines 1 and 21"),
        (lambda text: text.replace(b"online", b"on_line", 1), "it differs from line 1 on"),
        (lambda text: text[:1500] + b"more" + text[1500:], r"it differs between lines 21 and 37"),
        (lambda text: text + text[-20:], "20 bytes more than the run wrote: remove line 38 on"),
        (lambda text: text[:-1], "was truncated: it has"),
        (lambda text: b"", "was truncated: it has 0 bytes"),
    ],
)
def test_other_changes(run, change, message):
    content = (run / "records.csv").read_bytes()
    (run / "records.csv").write_bytes(change(content))
    with pytest.raises(ValueError, match=message) as caught:
        read_records(run)
    assert "metaleader resume" not in str(caught.value)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("tail", [b"", b"toe,0,online,0,t,7,0.", b"toe,0,online,0,t,7,0.5,,\n"])
@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_other_line_ends_are_read_and_resume_restores_them(old, tail, prefix, tmp_path, caplog):
    folder = run_of(tmp_path / "run", finished=("ftml",))
    if old:
        without_digest(folder)
    path = folder / "records.csv"
    content = path.read_bytes()
    changed = prefix + (content + tail).replace(b"\n", b"\r\n")
    path.write_bytes(changed)
    assert len(read_records(folder)) == 12
    assert path.read_bytes() == changed
    with Run(folder) as run:
        run.rewind(4)
        assert path.read_bytes() == content
        assert "had other line ends; they are restored" in caplog.text
        assert [copy.read_bytes() for copy in folder.glob("records-before-resume-*.csv")] == [changed]
        run.save("toe", 1, [[Record("online", 0, "t", 7, 0.5, None, None, {})]], {}, 1.0, 1.0)
    assert path.read_bytes() == content + b"toe,0,online,0,t,7,0.5,,\n"
    # A second copy does not replace the first.
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with Run(folder) as run:
        run.rewind(4)
    assert len(list(folder.glob("records-before-resume-*.csv"))) == 2


def test_line_ends_that_were_changed_in_part_are_refused(run):
    content = (run / "records.csv").read_bytes()
    (run / "records.csv").write_bytes(content.replace(b"\n", b"\r\n", 3).replace(b"0.14", b"0.15"))
    with pytest.raises(ValueError, match="was changed: it differs"):
        read_records(run)


def test_runs_of_an_earlier_release_resume_and_get_a_digest(tmp_path):
    folder = run_of(tmp_path / "run", finished=("ftml",))
    without_digest(folder)
    path = folder / "records.csv"
    content = path.read_bytes()
    for wrong in (content.replace(b",1,t", b",4,t"), content[:-1] + b"0\n", b"x" * len(content), b"\xff" + content):
        path.write_bytes(wrong)
        with Run(folder) as run, pytest.raises(ValueError, match=r"was changed: its rows are not those of the rounds"):
            run.rewind(4)
        assert path.read_bytes() == wrong
    path.write_bytes(content + b"toe,0,onl")
    with Run(folder) as run:
        run.rewind(4)
        assert path.read_bytes() == content
        run.save("toe", 1, [[Record("online", 0, "t", 7, 0.5, None, None, {})]], {}, 1.0, 1.0)
    tree = read_checkpoint(folder, "toe")
    assert tree is not None
    assert tree["records_sha256"] == Digest(path.read_bytes()).tree()["records_sha256"]


def test_a_round_that_could_not_be_saved_may_be_saved_again(tmp_path, monkeypatch):
    record = [[Record("online", 0, "t", 7, 0.5, None, None, {})]]

    def full(*_):
        raise OSError(28, "No space left on device")

    with Run(tmp_path, CONFIG) as run:
        run.rewind(4)
        for name in ("write_times", "write_checkpoint"):
            monkeypatch.setattr(f"metaleader.runs.run.{name}", full)
            with pytest.raises(OSError, match="No space"):
                run.save("ftml", 1, record, {}, 1.0, 1.0)
            monkeypatch.undo()
        run.save("ftml", 1, record, {}, 1.0, 1.0)
    assert len(read_records(tmp_path)) == 1
    with Run(tmp_path) as run:
        run.rewind(4)
        (tmp_path / "records.csv").write_bytes(b"")
        with pytest.raises(ValueError, match="was truncated during the run"):
            run.save("ftml", 2, record, {}, 1.0, 1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"records_sha256": 3},
        {"records_crcs": None},
        {"records_crcs": torch.zeros(1, dtype=torch.int64)},
        {"records_crcs": torch.zeros(2)},
        {"config": "{"},
        {"config": "[]"},
        {"rounds": -1},
        {"records_bytes": True},
    ],
)
def test_a_crafted_checkpoint_is_refused(run, fields):
    write_checkpoint(run, "toe", (read_checkpoint(run, "toe") or {}) | fields)
    with pytest.raises(ValueError, match=r"toe.safetensors is not the checkpoint of a run; use an intact copy"):
        read_records(run)


def test_a_digest_that_contradicts_itself(run):
    write_checkpoint(run, "toe", (read_checkpoint(run, "toe") or {}) | {"records_sha256": "0"})
    with pytest.raises(ValueError, match="was changed: it differs;"):
        read_records(run)


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    "fields", [{"seeds": 2}, {"settings": CONFIG["settings"] | {"reveal": 3}}, {"error_name": "angle"}, {"more": 1}]
)
def test_a_configuration_that_was_edited_is_refused(run, fields):
    change(run, **fields)
    (name,) = fields
    with pytest.raises(ValueError, match=rf"config.json was changed during the run: its {name} was .*; change it back"):
        load_runs([run])
    with Run(run) as opened, pytest.raises(ValueError, match=r"config.json was changed"):
        opened.rewind(4)


def test_a_place_that_was_edited_is_logged(run, caplog):
    change(run, data="/elsewhere", threads=3)
    load_runs([run])
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "its data was None, now it is '/elsewhere'", "its threads was 1, now it is 3",
    ]  # fmt: skip
