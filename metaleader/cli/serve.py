"""`metaleader serve`: a folder of `ml.Session` over HTTP."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from metaleader.experiments.experiment import Experiment
from metaleader.experiments.files import load_definition
from metaleader.learners import Learner
from metaleader.live.opening import warm_up
from metaleader.live.replica import Replica
from metaleader.live.session import Mode, Session
from metaleader.runner.plan import make_learner
from metaleader.system.builders import explained, unknown

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


def serve(
    folder: Folder,
    *,
    experiment: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    method: Annotated[str | None, tyro.conf.arg(help_behavior_hint="")] = None,
    seed: int = 0,
    host: str = "127.0.0.1",
    port: int = 8000,
    tokens: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    replica: bool = False,
    updates: Mode = "background",
    share: float = 0.5,
    prequential: bool = True,
    window_ms: float = 2.0,
    max_body: int = 16 * 2**20,
    max_rows: int = 10_000,
    max_tasks: int = 1_000_000,
    max_requests: int = 256,
    repair: bool = False,
    threads: int = 1,
) -> None:
    """Serve a folder of ml.Session over HTTP until SIGTERM or Ctrl-C; it is created if there is none.

    Args:
        folder: the folder of the session.
        experiment: a Python file that defines a function `learner()`, which returns the learner, or an experiment.
        method: the method of the experiment; by default its only one, or ftml.
        seed: of the experiment's learner.
        host: the address to listen on; any other than a loopback address needs --tokens.
        port: the port; 0 chooses a free one.
        tokens: a file with one bearer token per line, one of which each request must have.
        replica: only predict, and follow the folder of another server, which writes.
        updates: background: the updates follow an observation, in a thread, and in a process once they have taken a
            second; process or thread: in one of these from the start; inline: each observation waits for its updates.
        share: the part of the time in which background updates run.
        prequential: predict each observation before it is stored, to measure the error.
        window_ms: the time that a prediction waits for others, which are computed with it.
        max_body: bytes of a body; larger ones get status 413.
        max_rows: rows of a tensor; more get 413.
        max_tasks: tasks with data; observations of further ones get 429.
        max_requests: requests at the same time; further ones get 429.
        repair: if the folder is damaged, continue from everything that is intact.
        threads: CPU threads of torch; more than one helps large networks only.
    """
    try:
        from metaleader.live.serve.app import make_app
        from metaleader.live.serve.guard import read_tokens
        from metaleader.live.serve.server import bound_socket, is_loopback, run
        from metaleader.live.serve.service import Limits, Service
    except ModuleNotFoundError as error:
        if str(error.name).startswith("metaleader"):
            raise
        raise ImportError(f'{error.name} is not installed: pip install "metaleader[serve]"') from error
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if not 0 <= window_ms <= 1000:
        raise ValueError(f"window_ms must be from 0 to 1000, got {window_ms}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    if replica and (repair or updates != "background"):
        raise ValueError("a replica neither repairs nor updates: leave out --repair and --updates")
    limits = Limits(body=max_body, rows=max_rows, tasks=max_tasks, requests=max_requests)
    known = read_tokens(tokens) if tokens is not None else []
    if not known and not is_loopback(host):
        raise ValueError(f"{host} can be reached from other machines: name a file with bearer tokens by --tokens")
    torch.set_num_threads(threads)
    path = str(experiment.resolve())
    _factory.cache_clear()
    _factory(path, method, seed)
    factory = functools.partial(served_learner, path, method, seed)
    bound = bound_socket(host, port)
    try:
        source = Replica(folder, factory) if replica else _session(folder, factory, updates, share, repair)
        warm_up(source.learner)
        service = Service(source, limits, window=window_ms / 1000, measure=prequential)
        # The modules of torch are 300,000 objects. To look through them takes Python's collector a fifth of a second,
        # in which no request is answered.
        gc.collect()
        gc.freeze()
        bound.listen(1024)  # connections wait from here on
        name = f"[{host}]" if ":" in host else host
        print(f"serving {folder} at http://{name}:{bound.getsockname()[1]}", flush=True)
        run(make_app(service, tokens=known, hosts=[host]), bound)
    finally:
        bound.close()


def _session(folder: Path, factory: Callable[[], Learner], updates: Any, share: float, repair: bool) -> Session:
    return Session(folder, factory, updates=updates, share=share, repair=repair)


def served_learner(path: str, method: str | None, seed: int) -> Learner:
    """The learner of a file; the process that makes the updates calls this function by its name."""
    return _factory(path, method, seed)()


@functools.cache
def _factory(path: str, method: str | None, seed: int) -> Callable[[], Learner]:
    """The function of a file as it was when the server started."""
    return learner_factory(Path(path), method, seed)


def learner_factory(path: Path, method: str | None, seed: int) -> Callable[[], Learner]:
    """The function that builds the learner of a file: its `learner`, or one for a method of its experiment.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it defines neither, or not a learner.
    """
    found = load_definition(path, "learner")
    if isinstance(found, Experiment):
        name = method or (next(iter(found.methods)) if len(found.methods) == 1 else "ftml")
        if name not in found.all_methods:
            raise ValueError(unknown("method", name, found.all_methods))
        return lambda: make_learner(found, name, seed=seed)
    if method is not None or seed != 0:
        raise ValueError(f"{path} defines learner(): --method and --seed belong to experiments; leave them out")
    if not callable(found) or isinstance(found, Learner):
        raise ValueError(f"{path}: learner must be a function that returns a learner, got {type(found).__name__}")

    def build() -> Any:
        with explained(f"learner() of {path} fails"):
            return found()

    return build
