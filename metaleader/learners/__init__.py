"""Learners: FTML and the baselines it is compared with, one contract."""

from metaleader.learners.baselines import FTL, TOE, Scratch
from metaleader.learners.bayes import BayesianHead
from metaleader.learners.data import store
from metaleader.learners.ftml import FTML
from metaleader.learners.learner import Learner
from metaleader.learners.trial import trial
from metaleader.learners.update import predict_together, update_together

__all__ = [
    "FTL",
    "FTML",
    "TOE",
    "BayesianHead",
    "Learner",
    "Scratch",
    "predict_together",
    "store",
    "trial",
    "update_together",
]
