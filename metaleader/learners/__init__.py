"""Learners: FTML and the baselines it is compared with, one contract."""

from metaleader.learners.base import Learner, update_together
from metaleader.learners.baselines import FTL, TOE, Scratch
from metaleader.learners.ftml import FTML

__all__ = ["FTL", "FTML", "TOE", "Learner", "Scratch", "update_together"]
