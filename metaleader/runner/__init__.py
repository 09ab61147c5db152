"""Runs, resumes and joins experiments, from the command line or from Python."""

from metaleader.runner.experiment import join_experiments, resume_experiment, run_experiment
from metaleader.runner.plan import RunOptions

__all__ = ["RunOptions", "join_experiments", "resume_experiment", "run_experiment"]
