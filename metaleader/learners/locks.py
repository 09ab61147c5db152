"""The locks of a learner that several threads use."""

from __future__ import annotations

import threading


class Locks:
    """Two locks; a thread that needs both takes `changing` first. Copies and pickles have locks of their own.

    Attributes:
        changing: held during a call that changes the learner, updates included.
        reading: held while memory and state are read together, or memory is changed; never during an update.
    """

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self.reading = threading.RLock()

    def __reduce__(self) -> tuple[type[Locks], tuple[()]]:
        return Locks, ()
