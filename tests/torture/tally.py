"""What an attack found: the number of tries, and the tries that ended badly."""

import dataclasses
import sys
import traceback


@dataclasses.dataclass
class Tally:
    """Counts of an attack.

    Attributes:
        tries: faults injected.
        failures: tries after which something was lost or wrong, silent ones and tracebacks included.
        silent: failures that no error reported.
        tracebacks: tries that raised an error which is neither the injected one nor a ValueError or OSError.
        lines: a line for each failure.
    """

    tries: int = 0
    failures: int = 0
    silent: int = 0
    tracebacks: int = 0
    lines: list[str] = dataclasses.field(default_factory=list)

    def note(self, where: str, problem: str | None = None, silent: bool = False, error: object = None) -> None:
        """Count a try; `problem` says what is wrong after it, `error` is an error of an unsuitable type."""
        self.tries += 1
        if problem is None and error is None:
            return
        self.failures += 1
        self.silent += silent
        self.tracebacks += error is not None
        text = f"{where}: {problem or ''} {_last(error)}"
        self.lines.append(text)
        print(text, file=sys.stderr, flush=True)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))

    def __str__(self) -> str:
        return (
            f"{self.tries} tries, {self.failures} failures, {self.silent} silent failures, {self.tracebacks} tracebacks"
        )


def _last(error: object) -> str:
    if isinstance(error, BaseException):
        return "".join(traceback.format_exception_only(error)).strip()
    return "" if error is None else str(error)
