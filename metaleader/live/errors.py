"""Errors of a session that callers tell apart from other invalid calls."""

from __future__ import annotations


class ConflictError(ValueError):
    """A key or a name was used before, for another call."""


class UnknownPredictionError(ValueError):
    """No prediction of this name waits for its targets."""


class UnknownTaskError(ValueError):
    """Neither the learner nor the files have data of this task."""
