"""The API reference has every public name, and no other."""

import importlib
import inspect
import re
import types
from pathlib import Path

import metaleader

API = Path(__file__).parents[2] / "docs" / "api"
DIRECTIVES = [name for page in API.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
# Modules whose public names are part of the reference; those of `evaluate` are named one by one.
MODULES = (
    "losses",
    "models",
    "nets.export",
    "streams",
    "checks",
    "regret",
    "report.pairs",
    "report.transfer",
    "sklearn",
    "theory",
)
EVALUATE = ("play_together", "preload")
# The functions by which a program runs an experiment, and writes records of its own.
RUNNER = ("runner.run_experiment", "runner.resume_experiment", "runner.RunOptions", "report.own.write_records")
RUNNER += ("runner.grid.run_grid", "runner.grid.Workers", "runner.tune.run_tune", "runner.tune.TuneOptions")
RUNNER += ("runner.regret.regret_of_run",)
# The options of the learners are their settings.
OPTIONS = ("learners.options.Options", "learners.ftml.FTMLOptions", "learners.baselines.FTLOptions")


def public(module: types.ModuleType) -> list[str]:
    """What `__all__` lists; without one, the functions and classes that the module defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    members = inspect.getmembers(module, lambda value: inspect.isfunction(value) or inspect.isclass(value))
    return [name for name, value in members if value.__module__ == module.__name__ and not name.startswith("_")]


def test_every_public_name_is_documented_once():
    names = [name for name in metaleader.__all__ if not inspect.ismodule(getattr(metaleader, name))]
    expected = [f"metaleader.{name}" for name in names]
    for module in MODULES:
        expected += [f"metaleader.{module}.{name}" for name in public(importlib.import_module(f"metaleader.{module}"))]
    expected += [f"metaleader.evaluate.{name}" for name in EVALUATE]
    expected += [f"metaleader.{name}" for name in (*OPTIONS, *RUNNER)]
    assert sorted(DIRECTIVES) == sorted(expected)


def test_every_documented_name_exists():
    for directive in DIRECTIVES:
        module, _, name = directive.rpartition(".")
        assert hasattr(importlib.import_module(module), name), directive
