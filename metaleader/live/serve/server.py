"""The server process: a socket, an application, and the end at SIGTERM or Ctrl-C."""

from __future__ import annotations

import ipaddress
import signal
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

_KEEP_ALIVE, _GRACE = 65, 30


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 is any free one.

    Raises:
        OSError: if the address is in use or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(error.errno, f"cannot use the address {host}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot bind {host}:{port} ({error.strerror}); choose another --port") from error
    return bound


def configured(app: Starlette) -> uvicorn.Server:
    """The server of an application."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_GRACE,
        backlog=1024,
    )
    return uvicorn.Server(config)


def run(app: Starlette, bound: socket.socket) -> None:
    """Serve an application until SIGTERM or SIGINT; calls under way are finished first."""
    server = configured(app)

    # uvicorn raises a signal again when it has ended. It also may come before uvicorn listens for it.
    def end(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
