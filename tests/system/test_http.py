"""Servers that are slow, endless or hostile: every transfer ends soon, with a reason in one printable line."""

import contextlib
import itertools
import socket
import threading
import time

import pytest

from metaleader.system import http
from metaleader.system.http import BrokenTransferError, NetworkError, chunks

SIZE = 200_000
HEADER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE


def whole():
    yield HEADER + bytes(SIZE)


def trickled_header():
    for byte in itertools.cycle(b"HTTP/1.1 200 OK\r\nX: "):
        yield bytes([byte])


def trickled_body():
    yield HEADER
    yield from itertools.repeat(b"x")


def silence():
    yield HEADER
    time.sleep(60)
    yield b""


def endless_continue():
    yield from itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 50)


def endless_header():
    yield b"HTTP/1.1 200 OK\r\n"
    for number in itertools.count():
        yield b"X-%d: %s\r\n" % (number, b"x" * 60_000)


def endless_interim_header():
    yield b"HTTP/1.1 100 Continue\r\n"
    yield from itertools.repeat(b"X: y\r\n" * 100)


def endless_trailer():
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    yield from itertools.repeat(b"X: y\r\n" * 1000)


def endless_body():
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    yield from itertools.repeat(bytes(100_000))


def escapes():
    yield b"HTTP/1.1 404 \x1b[2J\x1b]0;title\x07\r\nContent-Length: 0\r\n\r\n"


def no_status():
    yield b"\x1b[2Jnonsense\r\n\r\n"


def to_a_file():
    yield b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def serve(monkeypatch):
    """Starts a server that sends what a generator yields, piece by piece; returns its address."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, seconds in {"_TIMEOUT": 0.5, "_HEADER_TIME": 0.3, "_WINDOW": 0.3}.items():
        monkeypatch.setattr(http, name, seconds)
    listening = []

    def start(behaviour):
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)

        def run():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.recv(10_000)
                    for piece in behaviour():
                        connection.sendall(piece)
                        if len(piece) == 1:
                            time.sleep(0.02)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}/file"

    yield start
    for server in listening:
        server.close()


def test_a_whole_file(serve):
    assert sum(len(chunk) for _, chunk in chunks(serve(whole), 0, SIZE)) == SIZE


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (trickled_header, "the server did not answer within"),
        (trickled_body, r"the server sent \d+ bytes in"),
        (silence, "timed out"),
        (endless_continue, "interim responses"),
        (endless_header, r"got more than|sent more than"),
        (endless_interim_header, r"got more than|sent more than"),
        (endless_trailer, r"sent more than|got more than"),
        (endless_body, "sent more than"),
        (escapes, r"HTTP Error 404: \\x1b\[2J\\x1b\]0;title\\x07"),
        (no_status, r"\\x1b\[2Jnonsense"),
        (to_a_file, r"Redirection to url 'file:///etc/passwd' is not allowed"),
    ],
)
def test_a_bad_server(behaviour, message, serve):
    start = time.monotonic()
    with pytest.raises((NetworkError, BrokenTransferError), match=message) as caught:
        for _ in chunks(serve(behaviour), 0, SIZE):
            pass
    assert time.monotonic() - start < 5
    assert str(caught.value).isprintable()
