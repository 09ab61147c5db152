"""The checks of a run: every claim can agree, disagree and stay undecided."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import made_config

from metaleader.cli import main
from metaleader.presets import PRESETS
from metaleader.report.claims import T_QUANTILES, Claim, check_claims
from metaleader.report.statements import STATEMENTS
from metaleader.tasks import rng

METHODS = ("ftml", "ftml-last", "ftl", "toe", "scratch", "ftml-one", "ftml-adam")
TASKS = 9
GOOD = made_config(preset="sinusoid", methods=METHODS, seeds=3)
COLUMNS = ["method", "seed", "protocol", "round", "task", "datapoints", "loss", "accuracy", "needed"]
Error = Callable[[str, int, int, int], float]
Needed = Callable[[str, int, int], int | None]


@pytest.fixture(autouse=True)
def _short_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in list(PRESETS.items()):
        monkeypatch.setitem(PRESETS, name, lambda schedule, make=make: replace(make(schedule), tasks=TASKS))


def write(
    folder: Path,
    preset: str,
    error: Error,
    needed: Needed = lambda method, seed, t: None,
    *,
    seeds: int = 3,
    skip: Callable[[str, int, int], bool] = lambda method, seed, t: False,
    extra: dict[str, Callable[[str, float], float]] | None = None,
    schedule: str = "standard",
) -> list[Claim]:
    """Write a run of nine tasks from a function of method, seed, round and size, and check its claims."""
    made = PRESETS[preset](schedule)  # type: ignore[arg-type]
    extra = extra or {}
    folder.mkdir(exist_ok=True)
    config = GOOD | {"experiment": preset, "schedule": schedule, "seeds": seeds, "tasks": TASKS}
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "records.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *extra])
        for method in METHODS:
            for seed in range(seeds):
                for t in (t for t in range(TASKS) if not skip(method, seed, t)):
                    for size in sorted({*made.sizes(), *made.between()}):
                        value = error(method, seed, t, size)
                        scores = [1.0, 1 - value] if made.error_name == "error" else [value, ""]
                        more = [function(method, value) for function in extra.values()]
                        count = needed(method, seed, t)
                        row = [method, seed, "online", t, f"task {t}", size, *scores, "" if count is None else count]
                        writer.writerow([*row, *more])
    return check_claims(folder)


def verdicts(claims: list[Claim]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims}


def constant(**errors: float | dict[int, float]) -> Error:
    """An error a method, or one for each size; a little noise that all methods of a seed share."""

    def error(method: str, seed: int, t: int, size: int) -> float:
        own = errors.get(method.replace("-", "_"), 0.9)
        return (own[size] if isinstance(own, dict) else own) + 1e-4 * seed

    return error


def counts(ftml: tuple[int | None, int | None], others: tuple[int | None, int | None] = (60, 60)) -> Needed:
    """Datapoints to proficiency on early and on late tasks."""
    return lambda method, seed, t: (ftml if method == "ftml" else others)[t >= TASKS // 2]


def changing(early: float, late: float, **errors: float | dict[int, float]) -> Error:
    """The error of FTML on early and on late tasks, and those of the others."""
    one, other = constant(ftml=early, **errors), constant(ftml=late, **errors)
    return lambda method, seed, t, size: (other if t >= TASKS // 2 else one)(method, seed, t, size)


POSE = {"ftml_last": 0.1, "ftl": 0.11, "toe": 0.1, "scratch": 0.3, "ftml_one": 0.2}
CIFAR = {"ftml": {50: 0.4, 250: 0.3, 2000: 0.2}, "scratch": {50: 0.7, 250: 0.5, 2000: 0.22}}

# For each preset: errors and counts by which every claim agrees, and by which every claim disagrees.
AGREE: dict[str, tuple[Error, Needed]] = {
    "rainbow-digits": (
        constant(ftml=0.1, ftml_last=0.1, ftl=0.21, toe=0.26, scratch={20: 0.4, 60: 0.18}),
        counts((30, 20), (60, 50)),
    ),
    "rainbow-mnist": (
        constant(ftml=0.05, ftml_last=0.1, ftl=0.12, toe=0.15, scratch={100: 0.4, 900: 0.09}),
        counts((400, 20), (900, 500)),
    ),
    "cifar100": (constant(**CIFAR, ftml_last=0.75, ftl=0.8, toe=0.8), counts((None, None))),
    "pose": (changing(0.05, 0.02, **POSE), counts((60, 10), (None, None))),
    "sinusoid": (
        lambda method, seed, t, size: (0.1 if t > 5 else 1.0) + 0.001 * seed if method == "ftml" else 1.0,
        counts((None, None)),
    ),
}
WORST = {"ftml_last": 0.6, "ftl": 0.4, "toe": 0.3, "ftml_one": 0.3}
DISAGREE: dict[str, tuple[Error, Needed]] = {
    # FTML is worst and grows slower; TOE beats FTL; from scratch is best with few datapoints and worst with many.
    "rainbow-digits": (constant(ftml=0.6, scratch={20: 0.1, 60: 0.9}, **WORST), counts((20, 60), (30, 40))),
    "rainbow-mnist": (constant(ftml=0.6, scratch={100: 0.1, 900: 0.9}, **WORST), counts((20, 900), (100, 200))),
    "cifar100": (
        constant(ftml=0.6, ftml_last=0.5, ftl=0.4, toe=0.3, scratch=0.1, ftml_one=0.5, ftml_adam=0.5),
        counts((None, None)),
    ),
    "pose": (
        changing(0.5, 0.6, ftml_last=0.6, ftl=0.2, toe=0.4, scratch=0.1, ftml_one=0.3),
        counts((40, 400), (60, 60)),
    ),
    "sinusoid": (
        lambda method, seed, t, size: (2.0 if t > 5 else 1.0) + 0.001 * seed if method == "ftml" else 0.5,
        counts((None, None)),
    ),
}


@pytest.mark.parametrize("preset", STATEMENTS)
def test_every_claim_can_agree_and_disagree(preset: str, tmp_path: Path) -> None:
    names = [statement.name for statement in STATEMENTS[preset]]
    assert len(set(names)) == len(names)
    assert verdicts(write(tmp_path / "a", preset, *AGREE[preset])) == dict.fromkeys(names, "agrees")
    assert verdicts(write(tmp_path / "b", preset, *DISAGREE[preset])) == dict.fromkeys(names, "disagrees")


@pytest.mark.parametrize("preset", STATEMENTS)
def test_an_effect_can_be_shown_to_be_below_the_margin(preset: str, tmp_path: Path) -> None:
    """All methods are alike: claims of a difference are below their margin, those of similarity agree."""
    claims = write(
        tmp_path, preset, lambda method, seed, t, size: 0.1 + 1e-4 * seed, lambda method, seed, t: 20, seeds=10
    )
    for statement, claim in zip(STATEMENTS[preset], claims, strict=True):
        if statement.statistic in ("behind", "first"):
            assert claim.verdict == ("agrees" if statement.name == "first-reveal" else "disagrees")
        else:
            assert claim.verdict == ("agrees" if statement.two_sided or statement.margin < 0 else "below margin")


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.012, 0.013, 0.014), "agrees"),
        ((0.002, 0.003, 0.004), "below margin"),  # better, by less than the margin
        ((-0.001, 0.0, 0.001), "below margin"),
        ((-0.004, -0.003, -0.002), "disagrees"),  # worse, if only by little
        ((-0.03, -0.02, -0.01), "disagrees"),
        ((0.005, 0.01, 0.015), "undecided"),
        ((-0.02, 0.0, 0.02), "undecided"),
    ],
)
def test_the_interval_decides(differences: tuple[float, ...], verdict: str, tmp_path: Path) -> None:
    claims = write(
        tmp_path, "rainbow-mnist", lambda method, seed, t, size: 0.1 + (differences[seed] if method != "ftml" else 0)
    )
    assert verdicts(claims)["ftl-below"] == verdict


@pytest.mark.parametrize("preset", STATEMENTS)
def test_every_claim_can_be_undecided(preset: str, tmp_path: Path) -> None:
    """Seeds that contradict each other, once in favour of a claim and twice against it."""

    def error(method: str, seed: int, t: int, size: int) -> float:
        return (AGREE if seed else DISAGREE)[preset][0](method, seed, t, size)

    def needed(method: str, seed: int, t: int) -> int | None:
        return (AGREE if seed else DISAGREE)[preset][1](method, seed, t)

    claims = write(tmp_path, preset, error, needed)
    assert set(verdicts(claims).values()) == {"undecided"}
    for claim in claims:
        assert claim.effect is not None
        assert claim.uncertainty is not None
        assert claim.uncertainty[0] < claim.effect < claim.uncertainty[1]


def test_paired_differences_decide_where_unpaired_means_would_not(tmp_path: Path) -> None:
    """Seeds differ by far more than the methods do, but every seed shows the same difference."""
    level, step = [0.1, 0.3, 0.5], {"ftml": 0.0, "ftl": 0.03, "toe": 0.06, "scratch": 0.09}
    error: Error = lambda method, seed, t, size: level[seed] + step.get(method, 0.0) + seed * 1e-3  # noqa: E731
    claims = write(tmp_path, "rainbow-mnist", error)
    claim = next(claim for claim in claims if claim.name == "final")
    assert claim.verdict == "agrees"
    assert claim.effect == pytest.approx(0.03)
    unpaired = T_QUANTILES[3] * math.sqrt(2 * np.var(level, ddof=1) / 3)
    assert 0.03 - unpaired < 0 < claim.margin


def test_the_interval_is_students(tmp_path: Path) -> None:
    """By hand: paired differences 0.02, 0.05 and 0.08, so that the standard error is 0.03 / sqrt(3)."""
    differences = [0.02, 0.05, 0.08]
    claims = write(
        tmp_path, "rainbow-mnist", lambda method, seed, t, size: 0.1 + (differences[seed] if method != "ftml" else 0)
    )
    claim = next(claim for claim in claims if claim.name == "ftl-below")
    half = 2.920 * 0.03 / math.sqrt(3)
    assert claim.effect == pytest.approx(0.05)
    assert claim.uncertainty == pytest.approx((0.05 - half, 0.05 + half))
    assert claim.margin == pytest.approx(0.01)
    assert claim.verdict == "undecided"


@pytest.mark.parametrize("freedom", range(1, 30))
def test_the_quantiles_are_students(freedom: int) -> None:
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    for rounding, below in ((-0.0005, True), (0.0005, False)):
        x = np.linspace(0, T_QUANTILES[freedom - 1] + rounding, 20_001)
        density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert (0.5 + np.trapezoid(density, x) < 0.95) == below


def test_intervals_cover_as_often_as_they_say() -> None:
    """Of 90 % intervals of three normal numbers, nine in ten hold the mean."""
    draws = rng("test coverage").standard_normal((20_000, 3))
    half = T_QUANTILES[1] * draws.std(1, ddof=1) / math.sqrt(3)
    assert np.mean(np.abs(draws.mean(1)) < half) == pytest.approx(0.9, abs=0.01)


def test_the_rival_counts_with_its_best_number_of_steps(tmp_path: Path) -> None:
    """FTL is ten times worse than FTML with five steps, but as good with twenty."""
    error, needed = AGREE["sinusoid"]
    steps = {"loss_1": lambda method, value: value, "loss_20": lambda method, value: value / 10}
    steps["loss_task"] = lambda method, value: 0.0  # not a number of steps
    claims = {claim.name: claim for claim in write(tmp_path, "sinusoid", error, needed, extra=steps)}
    assert claims["ftl"].verdict == "below margin"
    assert "FTL with 20 steps (0 and 10 steps not measured) 0.1;" in claims["ftl"].text
    assert claims["ftl"].effect == pytest.approx(1, rel=0.02)
    assert claims["faster"].verdict == "agrees"


def test_the_rivals_datapoints_count_with_its_best_number_of_steps(tmp_path: Path) -> None:
    """With five steps FTL never reaches the threshold; unadapted it does on every task, from the first panel on."""
    error, needed = AGREE["rainbow-mnist"]
    unadapted = {
        "loss_0": lambda method, value: 1.0,
        "accuracy_0": lambda method, value: 0.95 if method == "ftl" else 0.5,
    }
    found = {claim.name: claim for claim in write(tmp_path, "rainbow-mnist", error, needed, extra=unadapted)}
    assert "FTML 20 (100% solved), FTL with 0 steps (1, 10 and 20 steps not measured) 100 (100% solved)" in (
        found["efficiency"].text
    )
    assert found["efficiency"].effect == 80
    assert found["efficiency-all"].effect == pytest.approx(100 - (4 * 400 + 5 * 20) / 9)
    assert (found["efficiency"].verdict, found["efficiency-all"].verdict) == ("agrees", "disagrees")


def test_all_tasks_or_the_last_third(tmp_path: Path) -> None:
    """FTML is faster on early tasks only."""
    needed = lambda method, seed, t: 20 if method == "ftml" and t < 6 else 100  # noqa: E731
    found = {claim.name: claim for claim in write(tmp_path, "rainbow-mnist", AGREE["rainbow-mnist"][0], needed)}
    assert (found["efficiency"].effect, found["efficiency"].verdict) == (0, "below margin")
    assert (found["efficiency-all"].effect, found["efficiency-all"].verdict) == (pytest.approx(80 * 6 / 9), "agrees")
    assert found["efficiency-far"].verdict == "agrees"


def test_ten_datapoints_are_judged_if_they_were_measured(tmp_path: Path) -> None:
    (ten,) = (claim for claim in write(tmp_path, "pose", *AGREE["pose"]) if claim.name == "ten")
    assert (ten.verdict, ten.effect) == ("agrees", pytest.approx(5 / 9))
    lines = (tmp_path / "records.csv").read_text().splitlines(keepends=True)
    (tmp_path / "records.csv").write_text("".join(line for line in lines if line.split(",")[5] != "10"))
    (ten,) = (claim for claim in check_claims(tmp_path) if claim.name == "ten")
    assert (ten.verdict, ten.effect) == ("undecided", None)
    assert ten.text == "FTML solves many tasks with 10 datapoints: 10 datapoints were not measured"


def test_a_fraction_of_tasks_behind_by_a_tenth_is_negative_transfer(tmp_path: Path) -> None:
    """Behind from scratch by more than a tenth of the allowed error, on one task in three."""

    def error(method: str, seed: int, t: int, size: int) -> float:
        return 0.1 + (0.02 if method in ("ftl", "toe") and t % 3 == 0 else 0.009 if method == "toe" else 0.0)

    (found,) = (claim for claim in write(tmp_path, "rainbow-mnist", error) if claim.name == "negative")
    assert (found.verdict, found.effect) == ("agrees", pytest.approx(1 / 3))


def test_a_task_at_the_limit_is_not_behind(tmp_path: Path) -> None:
    """A difference of exactly a tenth of the allowed error is not more than it, with or without errors of rounding."""
    for rounding in (0.0, 1e-7, -1e-7):
        claims = write(tmp_path, "rainbow-mnist", constant(ftl=0.11 + rounding, toe=0.11 + rounding, scratch=0.1))
        (found,) = (claim for claim in claims if claim.name == "negative")
        assert found.effect == 0


def test_censored_counts(tmp_path: Path) -> None:
    """A task that is never solved counts with all its data, and nothing is concluded from those alone."""
    error, _ = AGREE["pose"]
    faster, *_ = write(tmp_path, "pose", error, counts((None, 40), (None, None)))
    assert faster.verdict == "agrees"
    assert faster.effect == 360
    assert "late 40 (100% solved), early 400 (0% solved)" in faster.text
    faster, *_ = write(tmp_path, "pose", error, counts((None, None), (None, None)))
    assert (faster.verdict, faster.effect) == ("undecided", 0)
    assert faster.text.endswith("too few solved to tell")
    # Solved with the very last datapoint is solved: counts are equal, and the claim does not hold.
    faster, *_ = write(tmp_path, "pose", error, counts((400, 400)))
    assert (faster.verdict, faster.effect) == ("below margin", 0)
    # One late task in three is solved: fewer datapoints on average, but the usual late task is censored too.
    some: Needed = lambda method, seed, t: 20 if t == TASKS - 1 else None  # noqa: E731
    faster, *_ = write(tmp_path, "pose", error, some)
    assert (faster.verdict, faster.effect) == ("undecided", pytest.approx(380 / 3))


def test_the_hardest_rival_gives_the_numbers(tmp_path: Path) -> None:
    error = constant(ftml=0.1, ftml_last=0.1, ftl=0.4, toe=0.2, scratch=0.3)
    claim = next(claim for claim in write(tmp_path, "rainbow-mnist", error) if claim.name == "final")
    assert claim.text.startswith("FTML has the smallest error after 900 datapoints: FTML 0.1, TOE 0.2;")
    assert claim.effect == pytest.approx(0.1)


def test_records_of_the_regret_protocol_are_left_out(tmp_path: Path) -> None:
    before = write(tmp_path, "sinusoid", *AGREE["sinusoid"])
    with open(tmp_path / "records.csv", "a") as file:
        file.writelines(f"ftml,{seed},regret,{t},task {t},10,9.0,,\n" for seed in range(3) for t in range(TASKS))
    assert check_claims(tmp_path) == before


def test_one_seed_is_undecided(tmp_path: Path) -> None:
    for claim in write(tmp_path, "rainbow-digits", *AGREE["rainbow-digits"], seeds=1):
        assert claim.verdict == "undecided"
        assert claim.effect is not None
        assert claim.uncertainty is None
        assert claim.text.endswith("1 of 1 seeds; one seed gives no uncertainty")


def test_one_seed_shows_the_hardest_rival(tmp_path: Path) -> None:
    errors = constant(ftml=0.2, ftml_last=0.5, ftl=0.4, toe=0.5, scratch=0.1)
    found = {claim.name: claim for claim in write(tmp_path, "rainbow-digits", errors, seeds=1)}
    assert "FTML 0.2, from scratch 0.1;" in found["final"].text
    assert found["final"].effect == pytest.approx(-0.1)


def test_a_third_is_rounded_up(tmp_path: Path) -> None:
    """Of eight tasks played by all, the last three."""
    at = lambda method, seed, t, size: 0.3 if method != "ftml" else 0.2 if t >= 6 else 0.1 if t == 5 else 0.0  # noqa: E731
    skip = lambda method, seed, t: t == TASKS - 1  # noqa: E731
    found = {claim.name: claim for claim in write(tmp_path, "rainbow-digits", at, skip=skip)}
    assert found["final"].effect == pytest.approx(0.3 - (0.2 + 0.2 + 0.1) / 3)


def test_missing_methods_and_sizes(tmp_path: Path) -> None:
    claims = write(tmp_path, "rainbow-digits", *AGREE["rainbow-digits"], skip=lambda method, seed, t: method == "toe")
    found = {claim.name: claim for claim in claims}
    assert found["ftl-few"].text == "FTL is better than TOE after 20 datapoints: no records of TOE after 20 datapoints"
    assert found["ftl-few"].effect is None
    undecided = {name for name, claim in found.items() if claim.verdict == "undecided"}
    with_toe = {s.name for s in STATEMENTS["rainbow-digits"] if "toe" in s.better + s.worse}
    assert undecided == with_toe > {"efficiency", "final", "ftl-few", "negative"}
    # The quick schedule of CIFAR-100 ends before the paper's 2,000 datapoints. It plays six tasks.
    claims = write(tmp_path, "cifar100", *AGREE["cifar100"], schedule="quick")
    assert verdicts(claims)["scratch-few"] == "agrees"
    (claim,) = (claim for claim in claims if claim.name == "caught-up")
    assert claim.verdict == "undecided"
    assert claim.text.endswith("no records of FTML, from scratch after 2000 datapoints")


def test_an_unfinished_run_is_not_judged(tmp_path: Path) -> None:
    for skip, played in (
        (lambda method, seed, t: method == "ftl" and t > 5, "6 of 9 tasks, 3 of 3 seeds; not finished"),
        (lambda method, seed, t: method == "ftl" and seed == 2, "9 of 9 tasks, 2 of 3 seeds; not finished"),
    ):
        claims = {c.name: c for c in write(tmp_path, "rainbow-digits", *DISAGREE["rainbow-digits"], skip=skip)}
        assert claims["ftl-few"].verdict == "undecided"
        assert claims["ftl-few"].text.endswith(played)
        assert claims["ftl-few"].effect == pytest.approx(-0.1)
        assert claims["faster"].verdict == "disagrees"  # FTML itself has finished


def test_the_first_tasks_alone_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for fewer tasks than the preset has (`--tasks`) gets a short run, not the paper's."""
    made = PRESETS["rainbow-digits"]
    monkeypatch.setitem(PRESETS, "rainbow-digits", lambda schedule: replace(made(schedule), tasks=TASKS + 1))
    for claim in write(tmp_path, "rainbow-digits", *DISAGREE["rainbow-digits"]):
        assert claim.verdict == "undecided"
        assert "9 of 10 tasks" in claim.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_method_that_diverged_is_not_judged(value: float, tmp_path: Path) -> None:
    def error(method: str, seed: int, t: int, size: int) -> float:
        return value if (method, seed, t) == ("ftml-last", 1, 7) else AGREE["cifar100"][0](method, seed, t, size)

    found = {claim.name: claim for claim in write(tmp_path, "cifar100", error)}
    for name in ("last-few", "last-more", "capacity"):
        assert found[name].verdict == "undecided"
        assert found[name].text.endswith("not finite")
    assert found["scratch-few"].verdict == "agrees"


def test_likeness_has_two_sides(tmp_path: Path) -> None:
    for scratch, verdict in ((0.2 - 0.08, "disagrees"), (0.2 + 0.08, "disagrees"), (0.2 - 0.04, "agrees")):
        claims = write(tmp_path, "cifar100", constant(ftml=0.2, ftml_last=0.2, ftl=0.2, toe=0.2, scratch=scratch))
        assert verdicts(claims)["caught-up"] == verdict


@pytest.mark.parametrize("preset", STATEMENTS)
def test_margins_and_sizes_are_those_of_the_standard_schedule(preset: str, tmp_path: Path) -> None:
    standard, quick = (write(tmp_path, preset, *AGREE[preset], schedule=schedule) for schedule in ("standard", "quick"))
    assert [claim.margin for claim in standard] == [claim.margin for claim in quick]
    if preset == "rainbow-digits":  # a tenth, a quarter and half of the error 0.2; tasks; datapoints
        assert sorted({claim.margin for claim in quick}) == pytest.approx([0.02, 0.05, 0.1, 0.25, 5, 20])


def test_all_data_of_a_task_is_the_last_panel() -> None:
    """What censoring and the paper's last panel stand on."""
    for make in PRESETS.values():
        for schedule in ("standard", "paper", "quick"):
            preset = make(schedule)
            assert preset.sizes()[-1] == preset.measured()[-1] == preset.reveal * (preset.reveals or 0)
    assert set(STATEMENTS) == set(PRESETS)
    for preset, statements in STATEMENTS.items():
        used = {method for statement in statements for method in statement.better + statement.worse}
        assert used <= set(PRESETS[preset]("standard").all_methods)


def test_the_page_names_every_claim() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text().split("## The claims")[1]
    sections = re.split(r"^\| (?=rainbow|cifar100|pose|sinusoid)", page, flags=re.MULTILINE)[1:]
    for preset, section in zip(("rainbow-mnist", "cifar100", "pose", "sinusoid"), sections, strict=True):
        named = re.findall(r"`([a-z-]+)`(?=[:,])", section)
        assert sorted(named) == sorted(statement.name for statement in STATEMENTS[preset])


def run(*arguments: Any) -> Any:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "sinusoid", *AGREE["sinusoid"])
    assert run("verify", tmp_path) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("3 agree, 0 disagree, 0 below their margin, 0 undecided\n")
    assert "> 3" in printed
    write(tmp_path, "sinusoid", *AGREE["sinusoid"], seeds=1)
    assert run("verify", tmp_path) == 0
    assert capsys.readouterr().out.endswith("0 agree, 0 disagree, 0 below their margin, 3 undecided\n")
    write(tmp_path, "sinusoid", *DISAGREE["sinusoid"])
    assert run("verify", tmp_path) == 1
    assert capsys.readouterr().out.endswith("0 agree, 3 disagree, 0 below their margin, 0 undecided\n")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json is missing"),
        ("{", "not the configuration of a run"),
        ("[1]", "not the configuration of a run"),
        (json.dumps({"preset": "sinusoid"}), "not the configuration of a run: it has no format"),
        (json.dumps({"format": 1, "preset": "sinusoid"}), "is damaged: it has no methods"),
        (json.dumps({**GOOD, "experiment": "sinusiod"}), "the preset 'sinusiod'; there are rainbow-digits, "),
        (json.dumps({**GOOD, "experiment": ["sinusoid"]}), "is damaged: its experiment is ['sinusoid']"),
        (json.dumps({**GOOD, "schedule": "slow"}), "is damaged: its schedule is 'slow'"),
        (json.dumps(GOOD), "no records in"),
    ],
)
def test_bad_input(config: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert run("verify", tmp_path) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
