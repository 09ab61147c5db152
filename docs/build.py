"""Builds the documentation site: assembles the pages in build/docs/, runs Zensical, checks the result.

Run it from the repository root with `python docs/build.py`. The site consists of the pages in docs/ and of files of the
repository root such as LOG.md. Links between them are written for the repository and are rewritten for the site here.
The build fails on any warning, on a broken internal link, and on a page that would load a file from the network.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "site"

# Files outside docs/ that are pages of the site, or have a page that stands for them.
MOVED = {
    "README.md": "index.md",
    "LOG.md": "log.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples": "examples.md",
}
COPIED = ("LOG.md", "CHANGELOG.md", "benchmarks/README.md")

_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
# Tags that load a file from another host.
LOADED = re.compile(r"""<(?:script|img|iframe)\b[^>]*\bsrc="(https?:)?//|<link\b[^>]*\bhref="(https?:)?//""")


def main() -> None:
    """Assemble, build, check."""
    shutil.rmtree(PAGES, ignore_errors=True)
    assemble(PAGES)
    shutil.rmtree(SITE, ignore_errors=True)
    command = [Path(sys.executable).parent / "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if built.returncode:
        # Zensical colours every letter, whatever the terminal.
        sys.exit(re.sub(r"\x1b\[[\d;]*m", "", built.stdout) + "docs/build.py: the site was not built")
    remote = [page.relative_to(SITE) for page in sorted(SITE.rglob("*.html")) if LOADED.search(page.read_text())]
    if remote:
        sys.exit(f"docs/build.py: these pages load files from the network: {', '.join(map(str, remote))}")
    print(SITE / "index.html")


def assemble(folder: Path) -> None:
    """Write all pages of the site, and the files they link to, into a folder."""
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            place(path, folder / path.relative_to(ROOT / "docs"))
    for name in COPIED:
        place(ROOT / name, folder / MOVED[name])
    (folder / MOVED["examples"]).write_text(examples())


def place(source: Path, target: Path) -> None:
    """Copy a file into the site; links of a page are rewritten."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".md":
        text = source.read_text()
        pieces = _CODE.split(text)  # code blocks are at the odd positions
        pieces[::2] = [_LINK.sub(lambda link: _rewritten(link, source), piece) for piece in pieces[::2]]
        # A number stays on one line with its error.
        pieces[::2] = [piece.replace(" ± ", "\u00a0±\u00a0") for piece in pieces[::2]]
        target.write_text("".join(pieces))
    else:
        shutil.copyfile(source, target)


def on_site(path: Path) -> str:
    """The place of a repository file on the site, relative to its root."""
    name = path.relative_to(ROOT).as_posix()
    if name in MOVED:
        return MOVED[name]
    if name.startswith("examples/"):
        return f"{MOVED['examples']}#{path.stem}"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    raise ValueError(f"{name} is not on the site")


def _rewritten(link: re.Match[str], source: Path) -> str:
    target = (source.parent / link[2]).resolve()
    if not target.exists():
        sys.exit(f"docs/build.py: {source.relative_to(ROOT)} links to {link[2]}, which does not exist")
    try:
        place, own = on_site(target), on_site(source)
    except ValueError as error:
        sys.exit(f"docs/build.py: {source.relative_to(ROOT)}: {error}")
    return f"{link[1]}{os.path.relpath(place, os.path.dirname(own) or '.')}{link[3] or ''})"


def examples() -> str:
    """The page with the source code of all examples."""
    sections = ["# Examples\n\nThe programs of the folder `examples/`. The tests run each of them.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text()
        summary = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
        sections.append(f"## `{path.name}` {{ #{path.stem} }}\n\n{summary}\n\n```python\n{source}```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    main()
