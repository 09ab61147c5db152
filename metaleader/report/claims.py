"""Claims tested on a run: those of the paper for each stream, by margins fixed before any run, and one's own.

Methods share seeds and streams, so a claim is tested by paired differences: one number per seed, and its 90 % t
interval over seeds (5 % error on either side). docs/verify.md gives the reason for each margin.
"""

from __future__ import annotations

import math
from collections import Counter
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
from metaleader.report.statements import STATEMENTS, Statement
from metaleader.runs.folder import Config, read_config, read_records

# Of several pairs, the earliest in this order counts.
Verdict = Literal["disagrees", "below margin", "undecided", "agrees"]
Values = dict[tuple[int, int], float]  # by seed and round

# The 95 % quantile of Student's t with 1, 2, ... 29 degrees of freedom; the last is used for more, slightly too wide.
T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
T_QUANTILES += (1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699)

# Methods that do not adapt: other numbers of steps have the same results.
_UNADAPTED = ("toe", "scratch")


@dataclass(frozen=True)
class Claim:
    """A tested claim.

    Attributes:
        text: the claim as a sentence, followed by the numbers behind the verdict, or the reason why there is none.
        effect: the mean over seeds, positive in the claimed direction; None without records.
        uncertainty: the 90 % interval of the effect over paired seeds; None with a single seed.
        margin: the value that the effect must exceed; if two-sided, the largest difference from 0 on either side.
        two_sided: whether the claim is that two methods are about equal.
        verdict: "agrees" if the whole interval is inside the margin; "disagrees" if it is on the other side of no
            effect, or of the margin where the claim is not a difference of two methods by a margin; "below margin" if
            the effect is shown to be smaller than the margin.
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
        run = _preset_run(where(records, protocol="online"), preset, PRESETS[name]("standard"), config, styles)
        tested = [_judge(statement, run) for statement in statements]
    for claim in own:
        tested.append(_judge(*_own_claim(claim, of_one_protocol(records), config, styles)))
    return tested


def counted(claims: Sequence[Claim]) -> str:
    """The number of claims with each verdict, as text."""
    count = Counter(claim.verdict for claim in claims)
    below = f"{count['below margin']} below their margin"
    return f"{count['agrees']} agree, {count['disagrees']} disagree, {below}, {count['undecided']} undecided"


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
        gamma: the threshold of proficiency.
        unmeasured: the numbers of adaptation steps that the experiment measures and the run did not.
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
    gamma: float | None
    unmeasured: Sequence[int] = ()

    def phrase(self, method: str) -> str:
        """The label of a method in a sentence."""
        return self.styles[method].phrase if method in self.styles else method

    def values(self, method: str, value: int | str) -> dict[str, Values]:
        """The value of each task played, by measured number of adaptation steps ("" for the default)."""
        if value == "needed":
            return self._needed(where(self.records, method=method))
        assert isinstance(value, int)
        by_steps: dict[str, Values] = {}
        for r in where(self.records, method=method, datapoints=self.panels[value]):
            for suffix in ["", *step_suffixes(self.records)]:
                if (number := record_error(r, suffix)) is not None:
                    by_steps.setdefault(suffix[1:], {})[r["seed"], r["round"]] = number
        return by_steps

    def _needed(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
        """The datapoints to proficiency of the tasks that were played to the end; infinite if not reached."""
        done = where(records, datapoints=self.all_data)
        if not done:
            return {}
        needed = {(r["seed"], r["round"]): math.inf if r["needed"] is None else r["needed"] for r in done}
        by_steps: dict[str, Values] = {"": needed}
        for suffix in step_suffixes(self.records) if self.gamma is not None else ():
            counts = dict.fromkeys(needed, math.inf)
            for r in records:
                key, error = (r["seed"], r["round"]), record_error(r, suffix)
                if key in counts and error is not None and self._meets(r, error):
                    counts[key] = min(counts[key], r["datapoints"])
            by_steps[suffix[1:]] = counts
        return by_steps

    def _meets(self, record: Mapping[str, Any], error: float) -> bool:
        assert self.gamma is not None
        # As `play` compares: 1 - (1 - accuracy) may differ from the accuracy in the last bit.
        return error <= self.gamma if record["accuracy"] is None else round(1 - error, 12) >= self.gamma

    def measures(self, datapoints: int) -> bool:
        """Whether there are records of this size."""
        return any(r["datapoints"] == datapoints for r in self.records)


def _preset_run(
    records: Sequence[Mapping[str, Any]],
    preset: Experiment,
    standard: Experiment,
    config: Config,
    styles: Mapping[str, Style],
) -> _Run:
    """Sizes and margins are those of the standard schedule: a quick run may lack the sizes of the paper."""
    # The error that the threshold of proficiency allows; without a threshold 0.1, as on Rainbow MNIST.
    gamma = 0.9 if standard.gamma is None else standard.gamma
    allowed = 1 - gamma if standard.error_name == "error" else gamma
    steps = {config["settings"]["steps"][0], *(int(suffix[1:]) for suffix in step_suffixes(records))}
    return _Run(
        records,
        styles,
        preset.tasks or 0,
        config["seeds"],
        preset.reveal,
        preset.measured()[-1],
        standard.sizes(),
        allowed,
        float(standard.reveal),
        config["settings"]["gamma"],
        sorted({*standard.steps} - steps),
    )


def _own_claim(
    claim: Better, records: Sequence[Mapping[str, Any]], config: Config, styles: Mapping[str, Style]
) -> tuple[Statement, _Run]:
    """A claim of the user's own as a statement; its margin is in units of the error or of datapoints."""
    settings = config["settings"]
    all_data = min(settings["reveal"] * settings["reveals"], max((r["datapoints"] for r in records), default=0))
    panels = [all_data if claim.at == "needed" else claim.at]
    tasks = settings.get("tasks", config["tasks"])
    gamma = settings["gamma"]
    run = _Run(records, styles, tasks, config["seeds"], settings["reveal"], all_data, panels, 1.0, 1.0, gamma)
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
    if statement.at is not None and not run.measures(statement.at):
        return replace(blank, text=f"{text}: {statement.at} datapoints were not measured")
    pairs = []
    for better in statement.better:
        default = values[better][""]
        if not statement.worse:
            prefix = f"{names[better]} " if len(statement.better) > 1 else ""
            pairs.append(_judge_pair(statement, run, blank, (f"{prefix}late", "early"), default, default))
        for worse in statement.worse:
            others = run.unmeasured if worse not in _UNADAPTED else ()
            note = f" ({_listed(others)} steps not measured)" if others else ""
            for steps, rival in values[worse].items():
                other = names[worse] + (steps and f" with {steps} step{'' if steps == '1' else 's'}") + note
                pairs.append(_judge_pair(statement, run, blank, (names[better], other), default, rival))
    return min(pairs, key=lambda pair: (get_args(Verdict).index(pair[0].verdict), pair[1]))[0]


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


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
    if statement.statistic in ("difference", "ratio") and (statement.tasks == "last" or not statement.worse):
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
    verdict = _verdict(statement, claim, low, high)
    if len(rounds) < run.tasks or len(seeds) < run.seeds:
        played = {(r["method"], r["seed"], r["round"]) for r in run.records}
        methods = {*statement.better, *statement.worse}
        is_finished = sum(method in methods for method, _, _ in played) == len(methods) * run.tasks * run.seeds
        reason = "the other tasks have no records of this size" if is_finished else "not finished"
        return replace(claim, text=f"{text}; {reason}"), inside
    if claim.unit == "datapoints" and verdict != "undecided" and solved[verdict != "agrees"] < 0.5:
        return replace(claim, text=f"{text}; too few solved to tell"), inside
    return replace(claim, verdict=verdict), inside


def _verdict(statement: Statement, claim: Claim, low: float, high: float) -> Verdict:
    """The verdict of an interval."""
    margin = claim.margin
    if claim.two_sided:
        beyond = high < -margin or low > margin
        return "agrees" if -margin < low and high < margin else "disagrees" if beyond else "undecided"
    if low > margin:
        return "agrees"
    # Without an effect, a difference is 0 and a ratio 1; a fraction of tasks is itself the claim.
    none = {"difference": 0.0, "ratio": 1.0}.get(statement.statistic, margin)
    return "disagrees" if high < min(none, margin) else "below margin" if high < margin else "undecided"


def _effects(
    statement: Statement, run: _Run, names: tuple[str, str], a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, str, tuple[float, float]]:
    """The effect of each seed from values (seeds, tasks), the means as text, and the fractions of tasks solved."""
    solved = float(np.isfinite(a).mean()), float(np.isfinite(b).mean())
    if statement.statistic == "first":
        return (a <= (statement.at or run.reveal)).mean(1), f"{solved[0]:.0%} in the end", solved
    shares = ["", ""]
    if statement.value == "needed":
        # A task that was never solved counts with all its data.
        a, b = (np.minimum(side, run.all_data) for side in (a, b))
        shares = [f" ({share:.0%} solved)" for share in solved]
    numbers = f"{names[0]} {a.mean():.3g}{shares[0]}, {names[1]} {b.mean():.3g}{shares[1]}"
    with np.errstate(all="ignore"):
        if statement.statistic == "behind":
            # Rounded, so that a difference equal to the limit is not "more": accuracies are multiples of 1 / test size.
            behind = np.round(b - a - statement.behind * run.allowed, 6) > 0
            effects = np.where(np.isfinite(a + b), behind, math.nan).mean(1)
        elif statement.statistic == "ratio":
            effects = np.log(b.mean(1)) - np.log(a.mean(1))
        else:
            effects = b.mean(1) - a.mean(1)
    return effects, numbers, solved
