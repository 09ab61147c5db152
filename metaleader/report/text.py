"""Numbers as text: means with their errors, and durations."""

from __future__ import annotations

import math


def with_error(mean: float, error: float) -> str:
    """A mean and its standard error, if there is one, to two digits of the error and at most three of the mean."""
    if math.isnan(mean):
        return "–"
    if not (math.isfinite(mean) and math.isfinite(error)):
        return _plain(mean)
    if error == 0:
        return f"{_plain(mean)} ± 0"
    digits = 1 - math.floor(math.log10(error))
    if mean != 0:
        digits = min(digits, 2 - math.floor(math.log10(abs(mean))))
    return f"{mean:.{max(0, digits)}f} ± {error:.{max(0, digits)}f}"


def _plain(number: float) -> str:
    if number and abs(number) < 1:
        return f"{number:#.3g}"  # keeps the last zero of 0.280
    return f"{number:.3g}" if abs(number) < 100 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """A duration as text: "12.0 s", "3 min 20 s" or "1 h 5 min"."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
