"""The OpenAPI description of all calls."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from starlette.routing import Route

import metaleader
from metaleader.live.serve.bodies import JSON, SAFETENSORS, TYPES
from metaleader.live.serve.guard import OPEN

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype", "data"],
    "properties": {
        "name": {"type": "string", "description": "x or y; x.a, x.b for a dict; x.0, x.1 for a tuple"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string", "enum": list(TYPES)},
        "data": {"type": "array", "items": {}, "description": "numbers, flat in row-major order or nested"},
    },
}
_TENSORS = {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}}
_BODY = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string", "description": "repeated in the response"},
        "inputs": _TENSORS,
        "outputs": {
            "type": "array",
            "items": {"type": "object", "properties": {"name": {"type": "string", "enum": ["y", "variance"]}}},
        },
    },
    "additionalProperties": False,
}
_PREDICTIONS = {
    "type": "object",
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string", "description": "the number of updates of the parameters"},
        "id": {"type": "string"},
        "parameters": {"type": "object", "properties": {"datapoints": {"type": "integer"}}},
        "outputs": _TENSORS,
    },
}
_STORED = {
    "type": "object",
    "properties": {"stored": {"type": "boolean", "description": "false: it was stored before"}},
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}

_ERRORS = {
    "400": "the request is malformed, or the learner refuses the data",
    "401": "no valid bearer token",
    "403": "a request from another origin, or a change sent to a replica",
    "404": "no such task or prediction",
    "406": "a media type that predictions do not have",
    "408": "the body did not arrive in time",
    "409": "a key or name that was used for another call",
    "413": "too many bytes or rows",
    "415": "an unknown media type",
    "422": "the predictions are not finite, which JSON cannot express",
    "429": "too many requests at the same time, or too many tasks",
    "503": "the session has stopped",
    "507": "the disk is full",
}
_OF_CALL = {
    "infer": ("400", "406", "408", "409", "413", "415", "422", "429"),
    "observe": ("400", "403", "408", "409", "413", "415", "429", "503", "507"),
    "label": ("400", "403", "404", "408", "413", "415", "429", "503", "507"),
    "forget": ("400", "403", "404", "429", "503", "507"),
    "readmit": ("400", "403", "404", "409", "429", "503", "507"),
    "list_tasks": ("400", "429"),
    "ready": ("503",),
    "model_ready": ("503",),
}
_PARAMETERS = {
    "infer": [("query", "name", "string", "a name for the prediction, to give its targets later")],
    "observe": [("header", "Idempotency-Key", "string", "a repeated call with the same key has no effect")],
    "list_tasks": [
        ("query", "limit", "integer", "the number of tasks listed, by default 1,000"),
        ("query", "offset", "integer", "the number of tasks left out at the beginning"),
    ],
}
_MEDIA = {"metrics": "text/plain", "page": "text/html"}


def description(routes: Sequence[Route]) -> dict[str, Any]:
    """The description of the calls at some addresses, in OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = _call(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "metaleader",
            "version": metaleader.__version__,
            "description": "A learner of many tasks: predictions by the Open Inference Protocol, and observations.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                "Tensor": _TENSOR,
                "Body": _BODY,
                "Predictions": _PREDICTIONS,
                "Stored": _STORED,
                "Error": _ERROR,
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _call(route: Route) -> dict[str, Any]:
    name = route.endpoint.__name__
    parameters = [
        {"name": part, "in": "path", "required": True, "schema": {"type": "string"}} for part in route.param_convertors
    ]
    parameters += [
        {"name": part, "in": place, "schema": {"type": kind}, "description": text}
        for place, part, kind, text in _PARAMETERS.get(name, ())
    ]
    schema = {"infer": "Predictions", "observe": "Stored", "label": "Stored"}.get(name)
    content: dict[str, Any] = {_MEDIA.get(name, JSON): {"schema": _reference(schema)} if schema else {}}
    if name == "infer":
        content[SAFETENSORS] = {}
    responses: dict[str, Any] = {"200": {"description": "done", "content": content}}
    errors = [*_OF_CALL.get(name, ()), *(() if route.path in OPEN else ("401",))]
    for code in sorted(errors):
        responses[code] = {"description": _ERRORS[code], "content": {JSON: {"schema": _reference("Error")}}}
    call: dict[str, Any] = {
        "operationId": name,
        "summary": (inspect.getdoc(route.endpoint) or "").rstrip("."),
        "parameters": parameters,
        "responses": responses,
    }
    if name in ("infer", "observe", "label"):
        body = {JSON: {"schema": _reference("Body")}, SAFETENSORS: {}}
        call["requestBody"] = {"required": True, "content": body}
    if route.path not in OPEN:
        call["security"] = [{"token": []}, {}]
    return call


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
