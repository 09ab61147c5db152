import csv
import re

import pytest

from metaleader.cli.theory import theory
from metaleader.theory import checks, simulate
from metaleader.theory.families import draw


def test_checks_figures_and_numbers(tmp_path, capsys):
    out = tmp_path / "made" / "here"
    assert theory(out, rounds=1000, seeds=3) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\b(\d{2}) of \1 checks passed", printed)
    assert "FAIL" not in printed
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{kind}" for name in ("regret", "minimisers", "convexity") for kind in ("png", "svg")
    } | {"regret.csv"}
    with (out / "regret.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 3 * 1000
    (last,) = (row for row in rows if (row["family"], row["seed"], row["T"]) == ("drifting", "1", "1000"))
    played = simulate(draw("drifting", 1000, 3))
    for name, regret in played.regret.items():
        assert float(last[name]) == pytest.approx(float(regret[1, -1]), rel=1e-6)
    assert float(last["bound"]) == pytest.approx(float(played.bound[-1]), rel=1e-6)
    assert all(path.stat().st_size > 10_000 for path in out.glob("*.png"))


def test_a_failed_check_is_exit_status_1(tmp_path, capsys, monkeypatch):
    # Twice the bound makes a matrix singular; the rest is left out for its time.
    monkeypatch.setattr("metaleader.cli.theory.newton_checks", lambda *_: [])
    monkeypatch.setattr("metaleader.cli.theory.quadratic_checks", lambda *_: [])
    monkeypatch.setattr("metaleader.cli.theory.logistic_scan", lambda: checks.logistic_scan(3))
    assert theory(tmp_path, rounds=64, seeds=1, alpha_factor=2.0) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert "warning: alpha = 0.5 is above Theorem 1's bound" in printed


def test_the_folder_is_looked_at_first(tmp_path, monkeypatch):
    monkeypatch.setattr("metaleader.cli.theory.os.access", lambda *_: False)  # root may write everywhere
    monkeypatch.setattr("metaleader.cli.theory._play", None)
    with pytest.raises(PermissionError, match=r"cannot write into .*; choose another folder with --out"):
        theory(tmp_path)


def test_bad_arguments(tmp_path):
    for rounds in (0, 31):
        with pytest.raises(ValueError, match=rf"rounds \(T\) must be at least 32 .* got {rounds}"):
            theory(tmp_path, rounds=rounds)
    with pytest.raises(ValueError, match="seeds"):
        theory(tmp_path, seeds=0)
    for factor in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="alpha_factor must be a positive number"):
            theory(tmp_path, alpha_factor=factor)
