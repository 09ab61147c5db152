"""`metaleader verify`: the paper's claims, judged by a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from metaleader.report.claims import check_claims

STYLES = {"agrees": "green", "disagrees": "bold red", "undecided": "yellow"}


def verify(folder: Path, /) -> int:
    """Test the paper's claims on a run: each agrees, disagrees or is undecided, by margins fixed beforehand.

    Args:
        folder: a run folder.

    Returns:
        The exit status: 1 when a claim disagrees.
    """
    claims = check_claims(folder)
    table = Table(title="claims, with the 90 % interval over paired seeds", show_lines=True)
    table.add_column("claim", ratio=1)
    for header in ("effect", "interval", "claimed", "verdict"):
        table.add_column(header)
    for claim in claims:
        table.add_row(claim.text, *claim.cells(), f"[{STYLES[claim.verdict]}]{claim.verdict}[/]")
    Console().print(table)
    count = Counter(claim.verdict for claim in claims)
    print(f"{count['agrees']} agree, {count['disagrees']} disagree, {count['undecided']} undecided")
    return 1 if count["disagrees"] else 0
