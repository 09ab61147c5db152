"""The guard in front of all calls: tokens, origins, the number of requests, and errors as JSON."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("metaleader")
# Open to all: what load balancers, browsers and tools read before they have a token.
OPEN = ("/", "/openapi.json", "/v2/health/live", "/v2/health/ready")
_LEAST = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_tokens(path: str | os.PathLike[str]) -> list[bytes]:
    """The digests of the tokens in a file, one token per line; lines that begin with # are comments.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has no token, or one that is too short.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text; write one token per line") from error
    tokens = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not tokens:
        raise ValueError(f"{path} has no token; write one per line, such as the output of `openssl rand -hex 32`")
    for token in tokens:
        if len(token) < _LEAST or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"{path} has a token that is too easy to guess, or not one word: at least {_LEAST} ASCII characters"
            )
    return [_digest(token) for token in tokens]


class Guard:
    """Middleware around an application.

    Args:
        app: the application.
        tokens: the digests of bearer tokens; none lets everybody in, for a loopback address.
        hosts: names of this server in addition to those of the loopback interface. Without tokens, other names are
            refused, so that a page of another site cannot reach the server under a name of its own.
        requests: the number of requests at the same time.
        count: called with the name of the call, the status and the seconds of each request.
        errors: takes the latest errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Sequence[bytes],
        hosts: Sequence[str],
        requests: int,
        count: Callable[[str, int, float], object],
        errors: deque[dict[str, Any]],
    ) -> None:
        self._app, self._tokens, self._hosts = app, tokens, {*_LOOPBACK, *hosts}
        self._requests, self._count, self._errors = requests, count, errors
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, noted)
        finally:
            endpoint = scope.get("endpoint")
            self._count(getattr(endpoint, "__name__", "none"), status, time.perf_counter() - start)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, is_open = Headers(scope=scope), scope["path"] in OPEN
        refused = self._refused(headers, is_open)
        if refused is not None:
            self.note(scope, refused.status_code, bytes(refused.body).decode())
            await refused(scope, receive, send)
            return
        if is_open or scope["path"] == "/metrics":
            await self._app(scope, receive, send)
            return
        if self._running >= self._requests:
            refused = error_response(
                429, f"{self._requests} requests are running, the limit; try again", {"Retry-After": "1"}
            )
            self.note(scope, 429, bytes(refused.body).decode())
            await refused(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def note(self, scope: Scope, status: int, message: str) -> None:
        """Keep an error for the status page."""
        request = f"{scope['method']} {scope['path']}"
        self._errors.append({"time": time.time(), "status": status, "request": request[:200], "message": message[:500]})

    def _refused(self, headers: Headers, is_open: bool) -> JSONResponse | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return error_response(403, f"requests from pages of another origin are refused, this one is of {origin}")
        if not self._tokens:
            name = urlsplit(f"//{host}").hostname
            if name not in self._hosts:
                return error_response(403, f"the host {host!r} is not a name of this server; use a loopback address")
            return None
        if is_open:
            return None
        kind, _, token = headers.get("authorization", "").partition(" ")
        # All are compared, each in constant time.
        found = [hmac.compare_digest(_digest(token.strip()), known) for known in self._tokens]
        if kind.lower() == "bearer" and any(found):
            return None
        return error_response(401, "a valid bearer token is missing", {"WWW-Authenticate": "Bearer"})


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as a JSON object."""
    return JSONResponse({"error": message}, status, headers)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
