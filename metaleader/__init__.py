"""Online meta-learning in PyTorch: follow the meta leader, its baselines, streams, evaluation and theory.

A learner keeps an initialisation from which every new task of a stream is learned from less data than the one before.
"""

# First: the other imports take seconds.
from metaleader.system import interrupts as _interrupts  # noqa: F401, I001

from metaleader import losses, models, streams
from metaleader.evaluate import Record, play
from metaleader.experiments.claims import better
from metaleader.experiments.experiment import Experiment
from metaleader.gradient.meta import adapt, meta_gradient
from metaleader.learners import FTL, FTML, TOE, BayesianHead, Learner, Scratch
from metaleader.live.session import Session
from metaleader.memory.by_task import TaskBuffer
from metaleader.memory.rows import recency
from metaleader.methods import Method
from metaleader.report.own import write_report
from metaleader.tasks import Batch, Task, TaskStream

__version__ = "0.2.0"

__all__ = [
    "FTL",
    "FTML",
    "TOE",
    "Batch",
    "BayesianHead",
    "Experiment",
    "Learner",
    "Method",
    "Record",
    "Scratch",
    "Session",
    "Task",
    "TaskBuffer",
    "TaskStream",
    "adapt",
    "better",
    "losses",
    "meta_gradient",
    "models",
    "play",
    "recency",
    "streams",
    "write_report",
]
