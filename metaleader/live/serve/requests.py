"""What a request holds: names in its address, arguments of its query, tensors in its body."""

from __future__ import annotations

import asyncio

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request

from metaleader.live.serve.bodies import JSON, SAFETENSORS, Body, read_body
from metaleader.live.serve.service import Limits, RefusedError

LONGEST_NAME = 500
_LARGE = 2**16


class _Name(StringConvertor):
    """A name in an address; it may hold a slash, which servers decode from %2F."""

    regex = r"[\s\S]+"


class _Model(StringConvertor):
    """A name in an address of the Open Inference Protocol, which ends in /versions/VERSION for a version of a model."""

    regex = r"(?![\s\S]*/versions/[^/]*(?:/infer|/ready)?/?$)[\s\S]+"


register_url_convertor("name", _Name())
register_url_convertor("model", _Model())


def name_in_path(request: Request, kind: str) -> str:
    """The name of a task or a prediction in the address."""
    name = request.path_params[kind]
    if not _is_name(name):
        raise ValueError(f"the name of a {kind} has at most {LONGEST_NAME} printable characters; got {name[:60]!r}")
    return name


def _is_name(text: str) -> bool:
    """Whether a text may be a name; bytes that are not UTF-8 have become U+FFFD."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable() and "\ufffd" not in text


def argument(request: Request, name: str) -> str | None:
    """The one argument that a query may have."""
    unknown = sorted(request.query_params.keys() - {name})
    if unknown or len(request.query_params.getlist(name)) > 1:
        raise ValueError(f"the query may have one argument, {name!r}; got {request.url.query[:60]!r}")
    value = request.query_params.get(name)
    if value is not None and not _is_name(value):
        raise ValueError(f"{name!r} must have 1 to {LONGEST_NAME} printable characters, got {value[:60]!r}")
    return value


def integer(request: Request, name: str, default: int, largest: int) -> int:
    """An integer of the query."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > largest:
        raise ValueError(f"{name} must be an integer from 0 to {largest}, got {text[:60]!r}")
    return int(text)


async def read_request(request: Request, limits: Limits) -> Body:
    """The body of a request, within the limits."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (JSON, SAFETENSORS):
        raise RefusedError(415, f"the content type must be {JSON} or {SAFETENSORS}, got {kind[:60]!r}")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RefusedError(415, "the body must not be compressed")
    too_large = RefusedError(413, f"the body has more than {limits.body} bytes, the limit; send it in parts")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limits.body:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > limits.body:
                    raise too_large
    except TimeoutError as error:
        raise RefusedError(408, f"the body did not arrive within {limits.seconds:g} seconds") from error
    content = b"".join(chunks)
    if size <= _LARGE:
        return read_body(content, kind)
    # In a thread, so that other requests do not wait.
    return await asyncio.get_running_loop().run_in_executor(None, read_body, content, kind)


def accepted_type(request: Request) -> str:
    """The media type of the response: the first that is accepted, else that of the request."""
    accepted = request.headers.get("accept", "").lower()
    kinds = [kind.partition(";")[0].strip() for kind in accepted.split(",")]
    found = next((kind for kind in kinds if kind in (JSON, SAFETENSORS)), None)
    if found is None and not {"", "*/*", "application/*"} & {*kinds}:
        raise RefusedError(406, f"predictions are {JSON} or {SAFETENSORS}, not {accepted[:60]}")
    own = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return found or (SAFETENSORS if own == SAFETENSORS else JSON)
