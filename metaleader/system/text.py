"""Text from files, servers and exceptions, made safe for a terminal or a log."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""One line of text in which control characters, which a terminal would obey, are escaped.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    line = " ".join(str(text).split("\n"))
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def short_text(error: Exception) -> str:
    """The message of an error in one line of at most 300 characters, for the log."""
    return " ".join(str(error).split())[:300] or type(error).__name__
