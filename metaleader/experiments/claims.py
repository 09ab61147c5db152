"""Claims that an experiment makes about its methods: data, which `metaleader verify` tests on a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

# The number of datapoints after which the errors are compared, or "needed": the datapoints to proficiency.
At = int | Literal["needed"]


@dataclass(frozen=True)
class Better:
    """The claim that one method is better than another, by more than a margin; see `better`."""

    better: str
    worse: str
    at: At
    margin: float = 0.0
    text: str | None = None

    def __post_init__(self) -> None:
        for name in ("better", "worse"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"a claim compares two methods by name, got {getattr(self, name)!r}")
        if self.better == self.worse:
            raise ValueError(f"a claim compares two methods, got {self.better!r} twice")
        if self.at != "needed" and (isinstance(self.at, bool) or not isinstance(self.at, int) or self.at < 1):
            raise ValueError(f"`at` must be a number of datapoints, or 'needed', got {self.at!r}")
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float) or not math.isfinite(self.margin):
            raise ValueError(f"the margin of a claim must be a number, got {self.margin!r}")
        if self.text is not None and not isinstance(self.text, str):
            raise ValueError(f"the text of a claim must be a string, got {self.text!r}")

    def plain(self) -> dict[str, Any]:
        """The claim as JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Better:
        """The claim of a file; raises ValueError if it is damaged."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"not a claim: {dict(values)}") from error


def better(better: str, worse: str, *, at: At, margin: float = 0.0, text: str | None = None) -> Better:
    """Return the claim that one method is better than another over the last third of the tasks.

    Args:
        better: the name of the better method.
        worse: the name of the other method.
        at: the number of datapoints after which the errors are compared, one that is measured; or "needed", to compare
            the numbers of datapoints to the threshold `gamma`.
        margin: the difference that must be exceeded, in units of the error, or of datapoints for "needed".
        text: the claim as a sentence; made from the names if None.

    >>> better("ftml", "toe", at=20, margin=0.02).margin
    0.02
    """
    return Better(better, worse, at, margin, text)
