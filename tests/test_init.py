"""The public names are frozen: a new one, or one that goes, is a decision."""

import metaleader


def test_public_names():
    assert sorted(metaleader.__all__) == [
        "Batch",
        "BayesianHead",
        "Experiment",
        "FTL",
        "FTML",
        "Learner",
        "Method",
        "Record",
        "Scratch",
        "Session",
        "TOE",
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
    assert all(hasattr(metaleader, name) for name in metaleader.__all__)
