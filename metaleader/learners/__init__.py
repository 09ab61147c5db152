"""Learners: FTML and the baselines it is compared with, one contract."""

from metaleader.learners.baselines import FTL, TOE, Scratch
from metaleader.learners.bayes import BayesianHead
from metaleader.learners.data import store
from metaleader.learners.ftml import FTML
from metaleader.learners.learner import Learner
from metaleader.learners.measure import predict_together
from metaleader.learners.together import update_together
from metaleader.learners.trial import trial

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
