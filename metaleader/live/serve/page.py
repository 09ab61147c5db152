"""The status page: one file without external resources, which reads `/status`."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources

_STYLE, _SCRIPT, _BODY = (
    importlib.resources.files("metaleader.live.serve").joinpath(name).read_text()
    for name in ("page.css", "page.js", "page.html")
)


def _source(text: str) -> str:
    """A text as a source of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE = _BODY.replace("{style}", _STYLE).replace("{script}", _SCRIPT)
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; connect-src 'self';"
        " img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
