"""Claims tested on a run: those of the paper for each stream, by margins fixed before any run, and one's own.

Methods share seeds and streams, so a claim is tested by paired differences: one number per seed, and its 90 % t
interval over seeds (5 % error on either side). docs/verify.md gives the reason for each margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from metaleader.experiments.claims import Better
from metaleader.experiments.experiment import Experiment
from metaleader.methods import METHODS, Style
from metaleader.methods import styles as styles_of
from metaleader.presets import PRESETS
from metaleader.report.loaded import preset_of
from metaleader.report.records import of_one_protocol, over_seeds, record_error, step_suffixes, where
from metaleader.runs.folder import Config, read_config, read_records

Verdict = Literal["disagrees", "undecided", "agrees"]  # of several pairs, the earliest in this order counts
Values = dict[tuple[int, int], float]  # by seed and round

# The 95 % quantile of Student's t with 1, 2, ... 29 degrees of freedom; the last is used for more, slightly too wide.
T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
T_QUANTILES += (1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699)

FTML, FTL, TOE, SCRATCH, LAST = ("ftml",), ("ftl",), ("toe",), ("scratch",), ("ftml-last",)
OTHERS = FTL + TOE + SCRATCH
FEW, MORE, MANY = 0, 1, -1  # the paper's panels


@dataclass(frozen=True)
class Claim:
    """A tested claim.

    Attributes:
        text: the claim as a sentence, followed by the numbers behind the verdict, or the reason why there is none.
        effect: the mean over seeds, positive in the claimed direction; None without records.
        uncertainty: the 90 % interval of the effect over paired seeds; None with a single seed.
        margin: the value that the effect must exceed; if two-sided, the largest difference from 0 on either side.
        two_sided: whether the claim is that two methods are about equal.
        verdict: "agrees" if the whole interval is inside the margin, "disagrees" if none of it is.
    """

    name: str
    text: str
    effect: float | None
    uncertainty: tuple[float, float] | None
    margin: float
    two_sided: bool
    unit: str
    verdict: Verdict

    def cells(self) -> tuple[str, str, str]:
        """The effect, interval and margin as text, for tables."""
        effect = "" if self.effect is None else f"{self.effect:.3g} {self.unit}"
        interval = "" if self.uncertainty is None else "{:.3g} to {:.3g}".format(*self.uncertainty)
        return effect, interval, f"within ±{self.margin:.3g}" if self.two_sided else f"> {self.margin:.3g}"


@dataclass(frozen=True)
class Statement:
    """A claim to test: every method of `better` is better than every method of `worse`.

    If `worse` is empty, the last third of the tasks is compared with the first third of the same method; otherwise the
    last thirds are compared. The worse method counts with its best number of adaptation steps.

    Attributes:
        text: the claim as a sentence; "{}" stands for the number of datapoints.
        value: the panel of the error, or "needed": the datapoints to proficiency.
        margin: for a difference, in units of the error that the threshold of proficiency allows, or of a reveal.
        statistic: "difference" or "ratio" of means; "behind": the fraction of all tasks on which the worse method is
            behind by more than `LIKENESS`; "first": the fraction of all tasks that were solved at the first reveal.
    """

    name: str
    text: str
    better: tuple[str, ...]
    worse: tuple[str, ...]
    value: Literal[0, 1, -1, "needed"]
    margin: float = 0.1
    statistic: Literal["difference", "ratio", "behind", "first"] = "difference"
    two_sided: bool = False


LIKENESS = 0.5
FASTER = Statement("faster", "FTML learns later tasks from fewer datapoints than early ones", FTML, (), "needed", 0.25)
RAINBOW = (
    FASTER,
    Statement("efficiency", "FTML needs the fewest datapoints", FTML, OTHERS, "needed", 0.25),
    Statement("final", "FTML has the smallest error after {}", FTML, OTHERS, MANY),
    Statement("ftl-few", "FTL is better than TOE after {}", FTL, TOE, FEW),
    Statement("ftl-many", "FTL is better than TOE after {}", FTL, TOE, MANY),
    Statement("ftl-below", "FTL is worse than FTML after {}", FTML, FTL, FEW),
    Statement("scratch-few", "from scratch is worse after {} than all that transfer", FTML + FTL + TOE, SCRATCH, FEW),
    Statement("scratch-many", "from scratch is close to FTML after {}", FTML, SCRATCH, MANY, LIKENESS, two_sided=True),
)
CIFAR100 = (
    Statement("scratch-few", "FTML is better than from scratch after {}", FTML, SCRATCH, FEW),
    Statement("scratch-more", "FTML is better than from scratch after {}", FTML, SCRATCH, MORE),
    Statement("last-few", "FTML is better than last-layer FTML after {}", FTML, LAST, FEW),
    Statement("last-more", "FTML is better than last-layer FTML after {}", FTML, LAST, MORE),
    Statement("caught-up", "from scratch is level with FTML after {}", FTML, SCRATCH, MANY, LIKENESS, two_sided=True),
    Statement("capacity", "last-layer FTML falls short on many tasks after {}", FTML, LAST, MANY, 0.25, "behind"),
)
POSE = (
    FASTER,
    Statement("best-few", "FTML has the smallest error after {}", FTML, OTHERS, FEW),
    Statement("best-many", "FTML has the smallest error after {}", FTML, OTHERS, MANY),
    Statement("first-reveal", "FTML solves many tasks at the first reveal", FTML, (), "needed", 0.25, "first"),
    Statement("toe-few", "TOE is far better than from scratch after {}", TOE, SCRATCH, FEW, LIKENESS),
    Statement("toe-many", "TOE is far better than from scratch after {}", TOE, SCRATCH, MANY, LIKENESS),
    Statement("ftl-few", "FTL is about as good as TOE or worse after {}", TOE, FTL, FEW, -LIKENESS),
    Statement("ftl-many", "FTL is about as good as TOE or worse after {}", TOE, FTL, MANY, -LIKENESS),
)
SINUSOID = (
    Statement("toe", "FTML's error after {} is at most a third of TOE's", FTML, TOE, FEW, 3, "ratio"),
    Statement("ftl", "FTML's error after {} is at most a third of FTL's", FTML, FTL, FEW, 3, "ratio"),
    Statement("faster", "FTML's error after {} is at most half of its own on early tasks", FTML, (), FEW, 2, "ratio"),
)
STATEMENTS = {
    "rainbow-digits": RAINBOW,
    "rainbow-mnist": RAINBOW,
    "cifar100": CIFAR100,
    "pose": POSE,
    "sinusoid": SINUSOID,
}


def check_claims(folder: str | Path) -> list[Claim]:
    """Test the claims for the stream of a run.

    Raises:
        ValueError: if there are no claims for its preset, or a file is not that of a run.
        OSError: if the folder holds no run.
    """
    config = read_config(folder)
    name, preset = config["experiment"], preset_of(config)
    statements = STATEMENTS.get(name, ()) if preset is not None else ()
    own = [Better.from_plain(values) for values in config["claims"]]
    if not statements and not own:
        known = f"for the experiment {name!r}" if config["file"] else f"for the preset {name!r}"
        raise ValueError(
            f"{folder}: no claims are known {known}; there are {', '.join(STATEMENTS)}, and the `claims` of an"
            " experiment of your own"
        )
    records = read_records(folder)
    styles = styles_of(dict.fromkeys([*METHODS, *config["methods"]]), config["styles"])
    tested = []
    if preset is not None and statements:
        run = _preset_run(where(records, protocol="online"), preset, PRESETS[name]("standard"), config["seeds"], styles)
        tested = [_judge(statement, run) for statement in statements]
    for claim in own:
        tested.append(_judge(*_own_claim(claim, of_one_protocol(records), config, styles)))
    return tested


@dataclass(frozen=True)
class _Run:
    """The records of a run, and the numbers that statements refer to.

    Attributes:
        tasks: all tasks of the experiment; a run of fewer is not finished.
        seeds: the number of seeds.
        reveal: datapoints per reveal.
        all_data: the number of datapoints of a task.
        panels: the sizes that statements refer to.
        allowed: the unit of margins of errors.
        counted: the unit of margins of datapoints.
    """

    records: Sequence[Mapping[str, Any]]
    styles: Mapping[str, Style]
    tasks: int
    seeds: int
    reveal: int
    all_data: int
    panels: Sequence[int]
    allowed: float
    counted: float

    def phrase(self, method: str) -> str:
        """The label of a method in a sentence."""
        return self.styles[method].phrase if method in self.styles else method

    def values(self, method: str, value: int | str) -> dict[str, Values]:
        """The value of each task played, by measured number of adaptation steps ("" for the default)."""
        by_steps: dict[str, Values] = {}
        size = self.panels[value] if isinstance(value, int) else self.all_data
        suffixes = ["", *(step_suffixes(self.records) if value != "needed" else ())]
        for r in where(self.records, method=method, datapoints=size):
            for suffix in suffixes:
                number = record_error(r, suffix)
                if value == "needed":
                    number = math.inf if r["needed"] is None else r["needed"]
                by_steps.setdefault(suffix[1:], {})[r["seed"], r["round"]] = number
        return by_steps


def _preset_run(
    records: Sequence[Mapping[str, Any]],
    preset: Experiment,
    standard: Experiment,
    seeds: int,
    styles: Mapping[str, Style],
) -> _Run:
    """Sizes and margins are those of the standard schedule: a quick run may lack the sizes of the paper."""
    # The error that the threshold of proficiency allows; without a threshold 0.1, as on Rainbow MNIST.
    gamma = 0.9 if standard.gamma is None else standard.gamma
    allowed = 1 - gamma if standard.error_name == "error" else gamma
    tasks, panels = preset.tasks or 0, standard.sizes()
    return _Run(
        records, styles, tasks, seeds, preset.reveal, preset.sizes()[-1], panels, allowed, float(standard.reveal)
    )


def _own_claim(
    claim: Better, records: Sequence[Mapping[str, Any]], config: Config, styles: Mapping[str, Style]
) -> tuple[Statement, _Run]:
    """A claim of the user's own as a statement; its margin is in units of the error or of datapoints."""
    settings = config["settings"]
    all_data = settings["reveal"] * settings["reveals"]
    panels = [all_data if claim.at == "needed" else claim.at]
    tasks = settings.get("tasks", config["tasks"])
    run = _Run(records, styles, tasks, config["seeds"], settings["reveal"], all_data, panels, 1.0, 1.0)
    one, other = run.phrase(claim.better), run.phrase(claim.worse)
    needed = claim.at == "needed"
    text = f"{one} needs fewer datapoints than {other}" if needed else f"{one} is better than {other} after {{}}"
    if claim.text is not None:
        text = claim.text.replace("{", "{{").replace("}", "}}")
    name = f"{claim.better}-{claim.worse}-{claim.at}"
    value: Literal[0, "needed"] = "needed" if needed else 0
    return Statement(name, text, (claim.better,), (claim.worse,), value, claim.margin), run


def _judge(statement: Statement, run: _Run) -> Claim:
    """Test every pair of methods; the result is that of the pair that supports the claim least."""
    after = "" if statement.value == "needed" else f"{run.panels[statement.value]} datapoints"
    margin, unit = statement.margin, {"difference": "error", "ratio": "times"}.get(statement.statistic, "of tasks")
    if statement.statistic == "difference":
        margin, unit = (margin * run.allowed, unit) if after else (margin * run.counted, "datapoints")
    text = statement.text.format(after)
    blank = Claim(statement.name, text, None, None, margin, statement.two_sided, unit, "undecided")
    values = {method: run.values(method, statement.value) for method in statement.better + statement.worse}
    names = {method: run.phrase(method) for method in values}
    missing = [names[method] for method, by_steps in values.items() if not by_steps]
    if missing:
        return replace(blank, text=f"{text}: no records of {', '.join(missing)}{after and f' after {after}'}")
    pairs = []
    for better in statement.better:
        default = values[better][""]
        if not statement.worse:
            pairs.append(_judge_pair(statement, run, blank, ("late", "early"), default, default))
        for worse in statement.worse:
            for steps, rival in values[worse].items():
                pair = names[better], names[worse] + (steps and f" with {steps} step{'' if steps == '1' else 's'}")
                pairs.append(_judge_pair(statement, run, blank, pair, default, rival))
    return min(pairs, key=lambda pair: (get_args(Verdict).index(pair[0].verdict), pair[1]))[0]


def _judge_pair(
    statement: Statement, run: _Run, blank: Claim, names: tuple[str, str], better: Values, worse: Values
) -> tuple[Claim, float]:
    """The claim, and the distance of its interval, or with one seed its effect, from the margin."""
    both = better.keys() & worse.keys()
    seeds = sorted({seed for seed, _ in both})
    rounds = [t for t in range(run.tasks) if seeds and all((seed, t) in both for seed in seeds)]
    if not rounds:
        return replace(blank, text=f"{blank.text}: no task was played by all methods yet"), 0.0
    a, b = (np.array([[side[seed, t] for t in rounds] for seed in seeds]) for side in (better, worse))
    if statement.statistic in ("difference", "ratio"):
        third = -(-len(rounds) // 3)  # rounded up, as in tables and figures
        a, b = a[:, -third:], b[:, -third:] if statement.worse else a[:, :third]
    effects, numbers, solved = _effects(statement, run, names, a, b)
    text = f"{blank.text}: {numbers}; {len(rounds)} of {run.tasks} tasks, {len(seeds)} of {run.seeds} seeds"
    if not np.isfinite(effects).all():
        return replace(blank, text=f"{text}; a value is zero or not finite"), 0.0
    to_unit = math.exp if statement.statistic == "ratio" else float
    mean, error = over_seeds(effects)
    effect = to_unit(mean)
    claim = replace(blank, text=text, effect=effect)
    least, most = (-claim.margin, claim.margin) if claim.two_sided else (claim.margin, math.inf)
    if len(seeds) == 1:
        return replace(claim, text=f"{text}; one seed gives no uncertainty"), min(effect - least, most - effect)
    half = T_QUANTILES[min(len(seeds), 30) - 2] * error
    low, high = to_unit(mean - half), to_unit(mean + half)
    claim = replace(claim, uncertainty=(low, high))
    inside = min(low - least, most - high)
    verdict = "agrees" if inside > 0 else "disagrees" if high < least or low > most else "undecided"
    if len(rounds) < run.tasks or len(seeds) < run.seeds:
        return replace(claim, text=f"{text}; not finished"), inside
    if claim.unit == "datapoints" and verdict != "undecided" and solved[verdict == "disagrees"] < 0.5:
        return replace(claim, text=f"{text}; too few solved to tell"), inside
    return replace(claim, verdict=verdict), inside


def _effects(
    statement: Statement, run: _Run, names: tuple[str, str], a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, str, tuple[float, float]]:
    """The effect of each seed from values (seeds, tasks), the means as text, and the fractions of tasks solved."""
    solved = float(np.isfinite(a).mean()), float(np.isfinite(b).mean())
    if statement.statistic == "first":
        return (a <= run.reveal).mean(1), f"{solved[0]:.0%} in the end", solved
    shares = ["", ""]
    if statement.value == "needed":
        # A task that was never solved counts with all its data.
        a, b = (np.minimum(side, run.all_data) for side in (a, b))
        shares = [f" ({share:.0%} solved)" for share in solved]
    numbers = f"{names[0]} {a.mean():.3g}{shares[0]}, {names[1]} {b.mean():.3g}{shares[1]}"
    with np.errstate(all="ignore"):
        if statement.statistic == "behind":
            effects = np.where(np.isfinite(a + b), b - a > LIKENESS * run.allowed, math.nan).mean(1)
        elif statement.statistic == "ratio":
            effects = np.log(b.mean(1)) - np.log(a.mean(1))
        else:
            effects = b.mean(1) - a.mean(1)
    return effects, numbers, solved
