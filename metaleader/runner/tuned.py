"""Experiments with settings that `metaleader tune` has chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from metaleader.experiments.experiment import Experiment
from metaleader.experiments.settings import with_settings
from metaleader.runner.experiment import check_code
from metaleader.runner.plan import find_experiment


def tuned_experiment(
    name: str,
    settings: Sequence[str],
    methods: Sequence[str],
    schedule: Any = "standard",
    sha256: str | None = None,
    imports: Mapping[str, str] | None = None,
) -> Experiment:
    """An experiment with settings changed; the files that `metaleader tune` writes call it.

    Args:
        name: a preset, or the path of an experiment file.
        settings: settings as "path=value".
        methods: the methods of the new experiment; the others of the experiment become its extras.
        schedule: the schedule of the experiment.
        sha256: the hash of the experiment file.
        imports: the hashes of the modules beside it.

    Raises:
        ValueError: if the experiment file has changed since its settings were chosen.
    """
    source = find_experiment(name, schedule)
    check_code(name, {"sha256": sha256, "imports": imports or {}}, source)
    experiment = with_settings(source.experiment, settings, methods)
    every = experiment.all_methods
    chosen = {method: every[method] for method in methods}
    extras = {method: value for method, value in every.items() if method not in chosen}
    return dataclasses.replace(experiment, methods=chosen, extras=extras)
