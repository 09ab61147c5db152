"""Downloads over HTTP from servers that may be slow, broken or hostile: time and memory are bounded."""

from __future__ import annotations

import http
import http.client
import io
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from metaleader.system.text import printable

_CHUNK = 1 << 18
# Seconds without any byte, seconds until the body begins, and the seconds in each of which so many bytes must come
_TIMEOUT, _HEADER_TIME = 30.0, 30.0
_WINDOW, _WINDOW_BYTES = 30.0, 30 * 1024
_HEADER_BYTES, _INTERIM_RESPONSES = 1 << 20, 10


class NetworkError(Exception):
    """The server or the connection failed."""


class RangeError(NetworkError):
    """The server has no bytes at the offset."""


class BrokenTransferError(Exception):
    """A failure after which another attempt may succeed."""


class _TooSlowError(Exception):
    """A server that another attempt would not make faster."""


def chunks(url: str, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of a file with their offsets, starting at `offset`, or at 0 if the server cannot resume.

    Args:
        url: the address, of http or https.
        offset: the first byte wanted.
        size: the size of the file; a transfer that is much longer is stopped.

    Raises:
        NetworkError: if the server refuses or is too slow.
        BrokenTransferError: if the connection fails.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "metaleader", "Range": f"bytes={offset}-"})
    try:
        with _opener(size).open(request, timeout=_TIMEOUT) as response:
            position = offset if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0
            while chunk := response.read1(_CHUNK):
                yield position, chunk
                position += len(chunk)
    except urllib.error.HTTPError as error:
        error.close()
        out_of_range = error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        raise (RangeError if out_of_range else NetworkError)(printable(error)) from error
    except _TooSlowError as error:
        raise NetworkError(str(error)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BrokenTransferError(f"the connection failed ({printable(error)})") from error


def _opener(size: int) -> urllib.request.OpenerDirector:
    """An opener of http and https alone, also in redirections."""
    opener = urllib.request.OpenerDirector()
    handlers = (
        urllib.request.ProxyHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    )
    for handler in handlers:
        opener.add_handler(handler())
    opener.add_handler(_Handler(size))
    opener.add_handler(_SecureHandler(size))
    return opener


class _Handler(urllib.request.HTTPHandler):
    """Opens http addresses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def http_open(self, req: urllib.request.Request) -> Any:
        """Open an address."""
        return self.do_open(_connection(http.client.HTTPConnection, self._size), req)  # pyright: ignore[reportArgumentType]


class _SecureHandler(urllib.request.HTTPSHandler):
    """Opens https addresses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def https_open(self, req: urllib.request.Request) -> Any:
        """Open an address."""
        return self.do_open(_connection(http.client.HTTPSConnection, self._size), req)  # pyright: ignore[reportArgumentType]


def _connection(kind: type[http.client.HTTPConnection], size: int) -> Any:
    def make(*arguments: Any, **options: Any) -> http.client.HTTPConnection:
        connection = kind(*arguments, **options)
        connection.response_class = lambda sock, *rest, **more: _Response(size, sock, *rest, **more)  # pyright: ignore[reportAttributeAccessIssue]
        return connection

    return make


class _Response(http.client.HTTPResponse):
    """A response whose header must end soon, and whose body must be neither too slow nor too long."""

    def __init__(self, size: int, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self._raw = _Timed(sock)
        self._limit = 2 * size + _HEADER_BYTES
        self._statuses = 0
        self.fp.close()
        self.fp = io.BufferedReader(self._raw)

    def begin(self) -> None:
        """Read the header."""
        super().begin()
        self._raw.in_header(False, self._limit)

    def _read_status(self) -> tuple[str, int, str]:
        self._statuses += 1
        if self._statuses > _INTERIM_RESPONSES:
            raise http.client.HTTPException(f"the server sent {_INTERIM_RESPONSES} interim responses and no answer")
        return super()._read_status()  # pyright: ignore[reportAttributeAccessIssue]


class _Timed(io.RawIOBase):
    """The bytes of a socket; raises `_TooSlowError` if they come too slowly."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock.makefile("rb", buffering=0)
        self._total = 0
        self.in_header(True, _HEADER_BYTES)

    def in_header(self, is_header: bool, limit: int) -> None:
        """Begin to measure time, in the header or in the body, with a limit of bytes."""
        self._is_header, self._limit = is_header, limit
        self._start, self._window_bytes = time.monotonic(), 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what has come."""
        num = self._socket.readinto(buffer)  # pyright: ignore[reportAttributeAccessIssue]
        self._total += num or 0
        self._window_bytes += num or 0
        if self._total > self._limit:
            raise _TooSlowError(f"the server sent more than {self._limit} bytes")
        seconds = time.monotonic() - self._start
        if self._is_header and seconds > _HEADER_TIME:
            raise _TooSlowError(f"the server did not answer within {_HEADER_TIME:.0f} seconds")
        if not self._is_header and seconds > _WINDOW:
            if num and self._window_bytes < _WINDOW_BYTES:
                raise _TooSlowError(f"the server sent {self._window_bytes} bytes in {seconds:.0f} seconds")
            self._start, self._window_bytes = time.monotonic(), 0
        return num

    def close(self) -> None:
        """Close the file of the socket."""
        self._socket.close()
        super().close()
