"""The claims of the paper for each stream, with margins fixed before any run; docs/verify.md gives their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Margins of errors, in units of the error that the threshold of proficiency allows
VISIBLE, SUBSTANTIAL, LIKENESS = 0.1, 0.25, 0.5
# Margins of datapoints, in units of a reveal
FEWER, FAR_FEWER = 0.25, 1.0
# The fraction of the tasks from which on they are "many"
MANY_TASKS = 0.25

FTML, FTL, TOE, SCRATCH, LAST = ("ftml",), ("ftl",), ("toe",), ("scratch",), ("ftml-last",)
ONE, ADAM = ("ftml-one",), ("ftml-adam",)
OTHERS = FTL + TOE + SCRATCH
FEW, MORE, MANY = 0, 1, -1  # the paper's panels


@dataclass(frozen=True)
class Statement:
    """A claim to test: every method of `better` is better than every method of `worse`.

    If `worse` is empty, the last third of the tasks is compared with the first third of the same method; otherwise the
    same tasks are compared. The worse method counts with its best number of adaptation steps.

    Attributes:
        text: the claim as a sentence; "{}" stands for the number of datapoints.
        value: the panel of the error, or "needed": the datapoints to proficiency.
        margin: for a difference, in units of the error that the threshold of proficiency allows, or of a reveal.
        statistic: "difference" or "ratio" of means; "behind": the fraction of all tasks on which the worse method is
            behind by more than `behind`; "first": the fraction of all tasks that were solved with `at` datapoints.
        two_sided: whether the claim is that two methods are about equal.
        tasks: of a difference of two methods: the last third of the tasks, or all.
        behind: in units of the error that the threshold of proficiency allows.
        at: a number of datapoints; None is that of one reveal.
    """

    name: str
    text: str
    better: tuple[str, ...]
    worse: tuple[str, ...]
    value: Literal[0, 1, -1, "needed"]
    margin: float = VISIBLE
    statistic: Literal["difference", "ratio", "behind", "first"] = "difference"
    two_sided: bool = False
    tasks: Literal["last", "all"] = "last"
    behind: float = LIKENESS
    at: int | None = None


FASTER = Statement("faster", "FTML learns later tasks from fewer datapoints than early ones", FTML, (), "needed", FEWER)
EFFICIENCY = (
    Statement("efficiency", "FTML needs the fewest datapoints", FTML, OTHERS, "needed", FEWER),
    Statement(
        "efficiency-all", "FTML needs the fewest datapoints over all tasks", FTML, OTHERS, "needed", FEWER, tasks="all"
    ),
)
STEPS = (
    Statement("steps-few", "FTML is better with several inner steps than with one after {}", FTML, ONE, FEW),
    Statement("steps-many", "FTML is better with several inner steps than with one after {}", FTML, ONE, MANY),
)
RAINBOW = (
    FASTER,
    Statement(
        "faster-others", "FTL and TOE learn later tasks from fewer datapoints too", FTL + TOE, (), "needed", FEWER
    ),
    *EFFICIENCY,
    Statement(
        "efficiency-far",
        "FTML needs substantially fewer datapoints over all tasks",
        FTML,
        OTHERS,
        "needed",
        FAR_FEWER,
        tasks="all",
    ),
    Statement("best-few", "FTML has the smallest error after {}", FTML, OTHERS, FEW),
    Statement("final", "FTML has the smallest error after {}", FTML, OTHERS, MANY),
    Statement("final-far", "FTML has a substantially smaller error after {}", FTML, OTHERS, MANY, SUBSTANTIAL),
    Statement("ftl-few", "FTL is better than TOE after {}", FTL, TOE, FEW),
    Statement("ftl-many", "FTL is better than TOE after {}", FTL, TOE, MANY),
    Statement("ftl-below", "FTL is worse than FTML after {}", FTML, FTL, FEW),
    Statement(
        "negative",
        "FTL and TOE have negative transfer: on many tasks they are worse after {} than from scratch",
        SCRATCH,
        FTL + TOE,
        MANY,
        MANY_TASKS,
        "behind",
        behind=VISIBLE,
    ),
    Statement("scratch-few", "from scratch is worse after {} than all that transfer", FTML + FTL + TOE, SCRATCH, FEW),
    Statement("scratch-many", "from scratch is close to FTML after {}", FTML, SCRATCH, MANY, LIKENESS, two_sided=True),
    *STEPS,
)
CIFAR100 = (
    Statement("scratch-few", "FTML is better than from scratch after {}", FTML, SCRATCH, FEW),
    Statement("scratch-more", "FTML is better than from scratch after {}", FTML, SCRATCH, MORE),
    Statement("last-few", "FTML is better than last-layer FTML after {}", FTML, LAST, FEW),
    Statement("last-more", "FTML is better than last-layer FTML after {}", FTML, LAST, MORE),
    Statement("caught-up", "from scratch is level with FTML after {}", FTML, SCRATCH, MANY, LIKENESS, two_sided=True),
    Statement("capacity", "last-layer FTML falls short on many tasks after {}", FTML, LAST, MANY, MANY_TASKS, "behind"),
    Statement("adam", "FTML is better with SGD and momentum than with Adam after {}", FTML, ADAM, FEW),
    *STEPS,
)
POSE = (
    FASTER,
    Statement("improves-few", "FTML's error after {} is smaller on later tasks than on early ones", FTML, (), FEW),
    Statement("improves-many", "FTML's error after {} is smaller on later tasks than on early ones", FTML, (), MANY),
    *EFFICIENCY,
    Statement("best-few", "FTML has the smallest error after {}", FTML, OTHERS, FEW),
    Statement("best-many", "FTML has the smallest error after {}", FTML, OTHERS, MANY),
    Statement("ten", "FTML solves many tasks with 10 datapoints", FTML, (), "needed", MANY_TASKS, "first", at=10),
    Statement("first-reveal", "FTML solves many tasks at the first reveal", FTML, (), "needed", MANY_TASKS, "first"),
    Statement("toe-few", "TOE is substantially better than from scratch after {}", TOE, SCRATCH, FEW, SUBSTANTIAL),
    Statement("toe-many", "TOE is substantially better than from scratch after {}", TOE, SCRATCH, MANY, SUBSTANTIAL),
    Statement("ftl-few", "FTL is about as good as TOE or worse after {}", TOE, FTL, FEW, -LIKENESS),
    Statement("ftl-many", "FTL is about as good as TOE or worse after {}", TOE, FTL, MANY, -LIKENESS),
    *STEPS,
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
