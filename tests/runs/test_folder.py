"""The run folder: what is written, in which order, and what is refused."""

import json
import os

import pytest
import torch
from made_records import made_config

from metaleader.evaluate import Record
from metaleader.runs import folder as runs
from metaleader.runs.folder import read_config, read_records, read_times
from metaleader.runs.run import Run

CONFIG = made_config(preset="mine", methods=["ftml", "toe"], seeds=2)


def record(t, datapoints, loss=0.5, **more):
    return Record("online", t, 'a, "b"', datapoints, loss, None, None, {"loss_1": 0.1, **more})


def save(run, method, played, loss=0.5):
    reveals = [[record(played - 1, size, loss + seed) for seed in range(2)] for size in (10, 20)]
    run.save(method, played, reveals, {"weights": torch.tensor([float(played)])}, 1.23456, 100.0)


def begun(folder, rounds=2):
    run = Run(folder, CONFIG)
    run.rewind(rounds, ["loss_1"])
    return run


def test_records_come_back_as_they_were(tmp_path):
    with begun(tmp_path / "run") as run:
        run.save("ftml", 1, [[Record("online", 0, "ü\n", 20, 1 / 3, 0.75, 20, {"loss_1": 1e-30})]], {}, 1.0, 1.0)
        save(run, "ftml", 2)
    first, *others = read_records(tmp_path / "run")
    assert first == {
        "method": "ftml", "seed": 0, "protocol": "online", "round": 0, "task": "ü\n", "datapoints": 20,
        "loss": 1 / 3, "accuracy": 0.75, "needed": 20, "loss_1": 1e-30,
    }  # fmt: skip
    assert [(r["seed"], r["datapoints"], r["loss"]) for r in others] == [
        (0, 10, 0.5),
        (1, 10, 1.5),
        (0, 20, 0.5),
        (1, 20, 1.5),
    ]
    assert others[0]["task"] == 'a, "b"'
    assert others[0]["accuracy"] is None
    assert read_times(tmp_path / "run") == [
        {"method": "ftml", "round": 0, "seconds": 1.0, "peak_mb": 1.0},
        {"method": "ftml", "round": 1, "seconds": 1.235, "peak_mb": 100.0},
    ]


def test_records_are_on_disk_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    steps = []
    synced, replaced = os.fsync, os.replace
    inode = lambda handle: os.fstat(handle).st_ino  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append(inode(handle)), synced(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(b.name), replaced(a, b))[1])
    with begun(tmp_path) as run:
        steps.clear()
        save(run, "ftml", 1)
        records = run.records_path.stat().st_ino
        assert steps.index(records) < steps.index("ftml.safetensors")
        # The rename itself is made durable.
        assert steps[-2:] == ["ftml.safetensors", (tmp_path / "checkpoint").stat().st_ino]
        found = run.checkpoint("ftml")
        assert found is not None
        assert found["records_bytes"] == run.records_path.stat().st_size
        assert found["state"]["weights"].tolist() == [1.0]
        assert run.checkpoint("toe") is None


def test_a_full_disk_says_how_to_go_on(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    with begun(tmp_path) as run:
        save(run, "ftml", 1)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            OSError, match=rf"records.csv \(No space .*free disk space, .*`metaleader resume {tmp_path}`"
        ):
            save(run, "ftml", 2)
        monkeypatch.undo()
        found = run.checkpoint("ftml")
        assert found is not None
        run.rewind(2)
        assert run.records_path.stat().st_size == found["records_bytes"]


def test_the_configuration_is_there_before_anything_is_played(tmp_path):
    with Run(tmp_path / "a" / "b", CONFIG):
        assert read_config(tmp_path / "a" / "b") == {**CONFIG}
        assert not (tmp_path / "a" / "b" / "records.csv").exists()


def test_finished_when_every_method_is(tmp_path):
    with begun(tmp_path, rounds=1) as run:
        assert not run.finished()
        save(run, "ftml", 1)
        assert not run.finished()
        save(run, "toe", 1)
        assert run.finished()


def test_a_second_process_is_refused_and_a_dead_one_forgotten(tmp_path):
    with begun(tmp_path), pytest.raises(ValueError, match="in use by another process"):
        Run(tmp_path)
    child = os.fork()
    if child == 0:
        Run(tmp_path)
        os._exit(0)  # with the lock held
    assert os.waitpid(child, 0)[1] == 0
    with Run(tmp_path):
        pass


def test_a_refused_folder_is_not_left_locked(tmp_path):
    with begun(tmp_path):
        pass
    with pytest.raises(ValueError, match="already holds a run: continue it with `metaleader resume"):
        Run(tmp_path, CONFIG)
    with Run(tmp_path):
        pass


def test_rewinding_cuts_what_came_after_the_last_checkpoint(tmp_path):
    with begun(tmp_path) as run:
        save(run, "ftml", 1)
        kept = run.records_path.read_bytes()
    with open(tmp_path / "records.csv", "ab") as file:
        file.write(b"ftml,0,online,1,task,10,0.")
    (tmp_path / "checkpoint" / ".toe.safetensors.abc.part").write_bytes(b"half")
    with open(tmp_path / "times.csv", "a") as file:
        file.write("ftml,1,9.0,9.0\n")
    assert len(read_records(tmp_path)) == 4  # those of the finished round
    with Run(tmp_path) as run:
        run.rewind(2, ["loss_1"])
        assert run.records_path.read_bytes() == kept
        save(run, "ftml", 2)
    assert [row["round"] for row in read_times(tmp_path)] == [0, 1]
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["ftml.safetensors"]


def test_records_shorter_than_the_checkpoint_says_are_refused(tmp_path):
    with begun(tmp_path) as run:
        save(run, "ftml", 1)
    length = os.path.getsize(tmp_path / "records.csv")
    os.truncate(tmp_path / "records.csv", length - 5)
    with (
        Run(tmp_path) as run,
        pytest.raises(ValueError, match=f"was truncated: it has {length - 5} bytes, but had {length} "),
    ):
        run.rewind(2)
    (tmp_path / "records.csv").unlink()
    with Run(tmp_path) as run, pytest.raises(ValueError, match=r"is missing, but had \d+ bytes .* restore it"):
        run.rewind(2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"ftml,0,online,0,t\n", "row 2 of .* is damaged"),
        (b"ftml,zero,online,0,t,1,1,,,\n", "row 2 of .* is damaged .*'zero'"),
        (b"\xff\xfe\n", "is not a table"),
        (b"ftml,0,online,0,t,1,1,,,", "ends in the middle of a line"),
    ],
)
def test_damaged_records_are_refused(tmp_path, line, message):
    with begun(tmp_path):
        pass
    with open(tmp_path / "records.csv", "ab") as file:
        file.write(line)
    with pytest.raises(ValueError, match=message):
        read_records(tmp_path)


def test_other_tables_are_refused(tmp_path):
    for text in ("", "a,b\n1,2\n"):
        (tmp_path / "records.csv").write_text(text)
        with pytest.raises(ValueError, match="is not a table with the columns method, seed"):
            read_records(tmp_path)
    with pytest.raises(FileNotFoundError, match="no records in"):
        read_records(tmp_path / "nowhere")
    assert read_times(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format": 3, "methods": []}), "has format 3, this release reads up to 2; upgrade"),
        (json.dumps({"format": "new", "methods": []}), "has format 'new'"),
        ('{"format": 1, "meth', "is not the configuration of a run"),
        ("[]", "is not the configuration of a run"),
        (json.dumps({"name": "my own"}), "is not the configuration of a run"),
        (json.dumps({"format": 1, "methods": []}), "is damaged: it has no experiment"),
        (json.dumps({**CONFIG, "methods": "ftml"}), "is damaged: its methods is 'ftml'"),
        (json.dumps({**CONFIG, "methods": [1]}), r"is damaged: its methods is \[1\]"),
        (json.dumps({**CONFIG, "schedule": "slow"}), "is damaged: its schedule is 'slow'"),
        (json.dumps({**CONFIG, "settings": None}), "is damaged: its settings is None"),
        (json.dumps({**CONFIG, "settings": {}}), "is damaged: it has no meta_steps"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused_and_left_alone(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Run(tmp_path)
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == text


def test_a_run_that_never_recorded_anything_may_be_replaced(tmp_path):
    with Run(tmp_path, CONFIG):
        pass
    with Run(tmp_path, CONFIG | {"seeds": 5}) as run:
        assert run.config["seeds"] == 5


def test_folders_that_are_not_there_or_cannot_be_made(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run in"):
        Run(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write the run folder .*file.run: Not a directory; choose another"):
        Run(tmp_path / "file" / "run", CONFIG)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    with begun(tmp_path) as run:
        runs.save_tree(tmp_path / "checkpoint" / "ftml.safetensors", {"a": 1}, "metaleader-checkpoint", 2)
        with pytest.raises(ValueError, match="is not the checkpoint of a run"):
            run.checkpoint("ftml")
        (tmp_path / "checkpoint" / "ftml.safetensors").write_bytes(b"\0" * 100)
        with pytest.raises(ValueError, match="truncated or not a safetensors file"):
            run.finished()
