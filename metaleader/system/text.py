"""Text from files and servers, made safe for a terminal."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""One line of text in which control characters, which a terminal would obey, are escaped.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    line = " ".join(str(text).split("\n"))
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
