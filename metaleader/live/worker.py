"""The process that makes the updates of a session: it computes, and has neither the data nor a file.

It builds the learner by the function that the session was opened with. Each message to it holds meta-batches and, where
its own is older, the state of the learner; the answer holds the state after the updates. The process ends with the
connection, or with the process that started it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from typing import Any

import torch
from torch.utils._pytree import tree_map

from metaleader.learners.learner import Learner
from metaleader.learners.optimizer import State, state_from_tree, state_tree
from metaleader.learners.together import FailedUpdate, state_after
from metaleader.learners.update import Gathered
from metaleader.live import factories
from metaleader.live.opening import warm_up
from metaleader.live.settings import settings_of
from metaleader.system.trees import tree_from_bytes, tree_to_bytes
from metaleader.tasks import Batch, ClassBatch, WeightedBatch

_KIND, _VERSION = "metaleader-updates", 1
_BATCHES = {kind.__name__: kind for kind in (Batch, ClassBatch, WeightedBatch)}
# Calls of the session come first, and this process ends first if memory is short.
_NICE, _OOM_SCORE = 10, 500
_LOOK_SECONDS = 1.0
is_worker = False


def main(number: int, parent: int) -> None:
    """Make updates until the connection ends.

    Args:
        number: of the file descriptor of the connection.
        parent: the number of the process at its other end.
    """
    global is_worker
    is_worker = True
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(_NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE))
    with socket.socket(fileno=number) as channel, contextlib.suppress(EOFError, ConnectionError):
        try:
            learner = _built(receive(channel))
            warm_up(learner)
        except Exception as error:
            send(channel, {"error": f"{type(error).__name__}: {error}"})
            return
        send(channel, facts_of(learner))
        while True:
            send(channel, answer(learner, receive(channel)))


def _end_with(parent: int) -> None:
    """End this process when another one has ended, also during an update."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(0)


def _built(request: dict[str, Any]) -> Learner:
    torch.set_num_threads(request["threads"])
    return factories.restored(request["factory"])()


def facts_of(learner: Learner) -> dict[str, Any]:
    """Everything in which the learners of both processes must agree."""
    network = learner.network
    buffers = {name: value for name, value in network.module.named_buffers() if name not in network.frozen}
    digest = hashlib.sha256(tree_to_bytes(buffers, _KIND, _VERSION)).hexdigest()
    return {"settings": settings_of(learner), "code": factories.code_of(learner), "buffers": digest}


def answer(learner: Learner, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for updates."""
    if request["state"] is not None:
        learner.state = state_of_tree(learner, request["state"])
        learner.network.set_frozen(request["frozen"])
    try:
        learner.state = state_after(learner, learner.state, request["steps"], _batches_of_tree(request["batches"]))
    except FailedUpdate:
        return {"failed": True}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"state": tree_of_state(learner, learner.state)}


# Messages.


def request_of(learner: Learner, state: State | None, steps: int, batches: Gathered) -> dict[str, Any]:
    """The message that asks for updates; without a state, they continue from those made last."""
    return {
        "state": None if state is None else tree_of_state(learner, state),
        "frozen": {} if state is None else learner.network.frozen_params(),
        "steps": steps,
        "batches": [{"kind": type(batch).__name__, "values": tuple(batch)} for batch in batches],
    }


def tree_of_state(learner: Learner, state: State) -> dict[str, Any]:
    """A state as in a checkpoint."""
    return state_tree(state, learner.layout, learner.rule.elementwise)


def state_of_tree(learner: Learner, tree: dict[str, Any]) -> State:
    """The inverse of `tree_of_state`."""
    return state_from_tree(tree, learner.definition.objective, learner.state, learner.rule)


def _batches_of_tree(tree: list[dict[str, Any]]) -> Gathered:
    # Copied, since the results of matrix products can depend on the alignment of memory.
    support, query = (_BATCHES[batch["kind"]](*tree_map(torch.clone, batch["values"])) for batch in tree)
    return Gathered(support, query)


def send(channel: socket.socket, tree: dict[str, Any]) -> None:
    """Send a message: tensors and plain values."""
    content = tree_to_bytes(tree, _KIND, _VERSION)
    channel.sendall(len(content).to_bytes(8, "little"))
    channel.sendall(content)


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        EOFError: if the connection has ended.
    """
    length = int.from_bytes(_read(channel, 8), "little")
    return tree_from_bytes(bytes(_read(channel, length)), "a message", _KIND, _VERSION)


def _read(channel: socket.socket, length: int) -> bytearray:
    content, at = bytearray(length), 0
    view = memoryview(content)
    while at < length:
        size = channel.recv_into(view[at:])
        if size == 0:
            raise EOFError("the connection has ended")
        at += size
    return content
