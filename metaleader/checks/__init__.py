"""What every learner and every stream must satisfy, for ours and for yours.

Each check is a function whose first line says what is required; it raises an AssertionError that says what was found.
`check_learner` and `check_stream` run them all; a test suite parametrises over `LEARNER_CHECKS` and `STREAM_CHECKS`.
All comparisons are bit for bit.
"""

from metaleader.checks.learners import (
    LEARNER_CHECKS,
    MakeLearner,
    adapt_before_data_is_the_initialisation,
    adapt_leaves_the_learner,
    asking_changes_nothing,
    check_learner,
    held_out_data_is_untouched,
    observe_without_update_only_keeps,
    refused_data_changes_nothing,
    same_seed_same_results,
    save_continues,
    state_dict_continues,
)
from metaleader.checks.streams import (
    STREAM_CHECKS,
    Stream,
    check_stream,
    length_is_known,
    tasks_are_valid,
    tasks_stay_the_same,
    train_and_test_are_disjoint,
)

__all__ = [
    "LEARNER_CHECKS",
    "STREAM_CHECKS",
    "MakeLearner",
    "Stream",
    "adapt_before_data_is_the_initialisation",
    "adapt_leaves_the_learner",
    "asking_changes_nothing",
    "check_learner",
    "check_stream",
    "held_out_data_is_untouched",
    "length_is_known",
    "observe_without_update_only_keeps",
    "refused_data_changes_nothing",
    "same_seed_same_results",
    "save_continues",
    "state_dict_continues",
    "tasks_are_valid",
    "tasks_stay_the_same",
    "train_and_test_are_disjoint",
]
