"""Requirements that every learner and every stream must satisfy, as checks for the library's and your own.

Each check is a function whose docstring states the requirement. It raises an AssertionError that describes the
violation. `check_learner` and `check_stream` run all checks; a test suite can parametrise over `LEARNER_CHECKS` and
`STREAM_CHECKS`. All comparisons are bit for bit.
"""

from metaleader.checks.learners import LEARNER_CHECKS, MakeLearner, check_learner
from metaleader.checks.streams import STREAM_CHECKS, Stream, check_stream

__all__ = ["LEARNER_CHECKS", "STREAM_CHECKS", "MakeLearner", "Stream", "check_learner", "check_stream"]
