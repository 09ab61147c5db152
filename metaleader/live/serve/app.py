"""The application: each call of a service at its address."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import metaleader
from metaleader.live.errors import ConflictError, UnknownPredictionError
from metaleader.live.serve.batcher import Known
from metaleader.live.serve.bodies import (
    JSON,
    SAFETENSORS,
    Body,
    check_names,
    datatype_of,
    flattened,
    json_tensors,
    safetensors_bytes,
)
from metaleader.live.serve.description import description
from metaleader.live.serve.guard import Guard, error_response
from metaleader.live.serve.page import HEADERS, PAGE
from metaleader.live.serve.requests import (
    LONGEST_NAME,
    accepted_type,
    argument,
    integer,
    name_in_path,
    read_request,
)
from metaleader.live.serve.service import RefusedError, Service
from metaleader.tasks import Tree

_LISTED, _MOST_LISTED, _SET_ASIDE = 1000, 10_000, 50


def make_app(service: Service, *, tokens: Sequence[bytes] = (), hosts: Sequence[str] = ()) -> Starlette:
    """The application of a service; its end closes the service.

    Args:
        service: the service.
        tokens: digests of bearer tokens, see `guard.read_tokens`.
        hosts: further names of this server.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await asyncio.get_running_loop().run_in_executor(None, service.close)

    guard = Middleware(
        Guard,
        tokens=tokens,
        hosts=hosts,
        requests=service.limits.requests,
        count=service.metrics.count_request,
        errors=service.errors,
    )
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, RefusedError, ValueError, OSError, Exception), _failed)
    app = Starlette(routes=ROUTES, middleware=[guard], exception_handlers=handlers, lifespan=lifespan)
    app.state.service = service
    return app


# Calls.


async def infer(request: Request) -> Response:
    """Predict for a task."""
    service, task, name = _service(request), name_in_path(request, "task"), argument(request, "name")
    accept = accepted_type(request)
    body = await read_request(request, service.limits)
    check_names(body.tensors, "x")
    outputs = body.outputs or ["y"]
    if outputs not in (["y"], ["y", "variance"]):
        raise ValueError(f"outputs are y, or y and variance; got {', '.join(outputs)}")
    if len(outputs) == 1:
        predicted = await service.infer(task, body.tensors, name)
        return _predictions(service, task, body, accept, flattened(predicted.y, "y"), predicted.known)
    if name is not None:
        raise ValueError("a prediction with a name has no variance; ask for one of the two")
    y, variance, known = await service.infer_variance(task, body.tensors)
    return _predictions(service, task, body, accept, flattened(y, "y") | flattened(variance, "variance"), known)


async def observe(request: Request) -> Response:
    """Store datapoints of a task."""
    service, task = _service(request), name_in_path(request, "task")
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= LONGEST_NAME:
        raise ValueError(f"an idempotency key has 1 to {LONGEST_NAME} characters, got {len(key)}")
    body = await read_request(request, service.limits)
    check_names(body.tensors, "x", "y")
    return JSONResponse({"task": task, "stored": await service.observe(task, body.tensors, key)})


async def label(request: Request) -> Response:
    """Give the targets of a named prediction."""
    service, name = _service(request), name_in_path(request, "name")
    body = await read_request(request, service.limits)
    check_names(body.tensors, "y")
    return JSONResponse({"prediction": name, "stored": await service.label(name, body.tensors)})


async def forget(request: Request) -> Response:
    """Delete all data of a task."""
    task = name_in_path(request, "task")
    await _service(request).forget(task)
    return JSONResponse({"task": task, "deleted": True})


async def readmit(request: Request) -> Response:
    """Draw a task again that was set aside."""
    task = name_in_path(request, "task")
    await _service(request).readmit(task)
    return JSONResponse({"task": task, "readmitted": True})


# Facts.


async def list_tasks(request: Request) -> Response:
    """List the tasks with data."""
    limit, offset = integer(request, "limit", _LISTED, _MOST_LISTED), integer(request, "offset", 0, 2**63)
    tasks = await _service(request).tasks()
    listed = dict(list(tasks.items())[offset : offset + limit])
    return JSONResponse({"total": len(tasks), "offset": offset, "tasks": listed})


async def model_metadata(request: Request) -> Response:
    """Describe the inputs and outputs of a task."""
    service, task = _service(request), name_in_path(request, "task")
    stored = service.source.learner.memory.store.data
    inputs = [] if stored is None else _described(stored.x, "x")
    outputs = [] if stored is None else _described(stored.y, "y")
    return JSONResponse(
        {
            "name": task,
            "versions": [str(service.source.learner.step)],
            "platform": "metaleader",
            "inputs": inputs,
            "outputs": outputs,
            "parameters": {"datapoints": service.known(task).datapoints},
        }
    )


async def model_ready(request: Request) -> Response:
    """State whether a task can be predicted for: any, if the server is ready."""
    return await _readiness(request, {"name": name_in_path(request, "task")})


async def server_metadata(request: Request) -> Response:
    """Name the server."""
    return JSONResponse({"name": "metaleader", "version": metaleader.__version__, "extensions": []})


async def live(request: Request) -> Response:
    """State that the process answers."""
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """State whether calls can be made."""
    return await _readiness(request, {})


async def status(request: Request) -> Response:
    """The state of the service, as the status page shows it."""
    service = _service(request)
    state = dict(await service.status())
    aside = state.pop("set_aside")
    recent = [
        {"task": task, "datapoints": service.known(task).datapoints, **facts}
        for task, facts in service.history.recent()
    ]
    return JSONResponse(
        {
            "version": metaleader.__version__,
            "learner": type(service.source.learner).__name__,
            "loss": getattr(service.source.learner.loss, "__name__", "loss"),
            "role": "replica" if service.is_replica else "writer",
            "time": time.time(),
            **state,
            "set_aside": {"total": len(aside), "tasks": dict(list(aside.items())[:_SET_ASIDE])},
            "curves": service.history.curves(),
            "recent": recent,
            "errors": list(reversed(service.errors)),
        }
    )


async def metrics(request: Request) -> Response:
    """The metrics for Prometheus."""
    service = _service(request)
    text = await asyncio.get_running_loop().run_in_executor(None, service.metrics.text)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def openapi(request: Request) -> Response:
    """The description of all calls."""
    return JSONResponse(description(ROUTES))


async def page(request: Request) -> Response:
    """The status page."""
    return Response(PAGE, media_type="text/html", headers=HEADERS)


# A name may hold a slash, so a longer address precedes its beginning. The kinds of names are those of `requests`.
ROUTES = [
    Route("/v2/models/{task:model}/infer", infer, methods=["POST"]),
    Route("/tasks/{task:name}/observe", observe, methods=["POST"]),
    Route("/predictions/{name:name}/label", label, methods=["POST"]),
    Route("/tasks/{task:name}/readmit", readmit, methods=["POST"]),
    Route("/tasks/{task:name}", forget, methods=["DELETE"]),
    Route("/tasks", list_tasks),
    Route("/v2", server_metadata),
    Route("/v2/health/live", live),
    Route("/v2/health/ready", ready),
    Route("/v2/models/{task:model}/ready", model_ready),
    Route("/v2/models/{task:model}", model_metadata),
    Route("/status", status),
    Route("/metrics", metrics),
    Route("/openapi.json", openapi),
    Route("/", page),
]


# Parts of requests and responses.


def _service(request: Request) -> Service:
    return request.app.state.service


def _predictions(
    service: Service, task: str, body: Body, accept: str, tensors: Mapping[str, Any], known: Known
) -> Response:
    step = str(service.source.learner.step)
    if accept == SAFETENSORS:
        facts = {"model_name": task, "model_version": step, "datapoints": str(known.datapoints)}
        return Response(safetensors_bytes(tensors, facts), media_type=SAFETENSORS)
    answer: dict[str, Any] = {"model_name": task, "model_version": step}
    if body.id is not None:
        answer["id"] = body.id
    try:
        outputs = json_tensors(tensors)
    except ValueError as error:
        raise RefusedError(422, str(error)) from error
    answer |= {"parameters": {"datapoints": known.datapoints}, "outputs": outputs}
    return Response(json.dumps(answer), media_type=JSON)


def _described(tree: Tree, prefix: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": datatype_of(tensor), "shape": [-1, *tensor.shape[1:]]}
        for name, tensor in flattened(tree, prefix).items()
    ]


async def _readiness(request: Request, facts: dict[str, Any]) -> Response:
    reason = await _service(request).not_ready()
    if reason is None:
        return JSONResponse({**facts, "ready": True})
    return JSONResponse({**facts, "ready": False, "error": reason}, 503)


async def _failed(request: Request, error: Exception) -> Response:
    """The response to a call that failed, which has changed nothing."""
    code, message, headers = _explained(error)
    if code >= 400 and code != 404:
        guard_errors = _service(request).errors
        place = f"{request.method} {request.url.path}"[:200]
        guard_errors.append({"time": time.time(), "status": code, "request": place, "message": message[:500]})
    return error_response(code, message, headers)


def _explained(error: Exception) -> tuple[int, str, dict[str, str] | None]:
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, dict(error.headers or {})
    if isinstance(error, RefusedError):
        return error.status, error.message, None
    if isinstance(error, ConflictError):
        return 409, str(error), None
    if isinstance(error, UnknownPredictionError):
        return 404, str(error), None
    if isinstance(error, ValueError):
        return 400, str(error), None
    if isinstance(error, OSError):
        return (507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 503), str(error), None
    return 500, "an error of the server; its log has more", None
