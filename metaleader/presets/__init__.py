"""The presets: experiments written as a user would write them, one file each.

Each file defines `experiment`, a function of the schedule: "standard" makes 10 meta-updates per reveal (sinusoid: 50),
"paper" as many as the authors, and "quick" finishes within minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable

from metaleader.experiments.experiment import Experiment
from metaleader.presets import cifar100, pose, rainbow_digits, rainbow_mnist, sinusoid
from metaleader.runs.folder import Schedule

PRESETS: dict[str, Callable[[Schedule], Experiment]] = {
    "rainbow-digits": rainbow_digits.experiment,
    "rainbow-mnist": rainbow_mnist.experiment,
    "cifar100": cifar100.experiment,
    "pose": pose.experiment,
    "sinusoid": sinusoid.experiment,
}

# The measured time of a run of all default methods, by preset and schedule, with the seeds and one of MACHINES.
TIMES: dict[tuple[str, Schedule], str] = {
    ("rainbow-digits", "quick"): "92 s, 1 seed, CPU",
    ("rainbow-mnist", "standard"): "6 min 36 s, 3 seeds, H200",
    ("sinusoid", "standard"): "4 min 47 s, 3 seeds, CPU",
    ("sinusoid", "paper"): "as standard",
    ("sinusoid", "quick"): "2 min 11 s, 3 seeds, CPU",
}
MACHINES = {
    "CPU": "2 cores of an AMD EPYC (shared virtual machine), torch 2.13.0, 2026-11-16",
    "H200": "one NVIDIA H200, methods as four processes at once (CUDA MPS), before tuning, torch 2.11.0, 2026-11-16",
}
