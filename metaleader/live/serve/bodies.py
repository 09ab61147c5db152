"""Bodies of requests and responses: tensors by name, as JSON of the Open Inference Protocol or as safetensors.

A tensor named "x" is the inputs; "x.a" and "x.b" are a dict of inputs, "x.0" and "x.1" a tuple. Targets and predictions
have names with "y" in the same form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from metaleader.tasks import Tree

JSON, SAFETENSORS = "application/json", "application/x-safetensors"

# The datatypes of the protocol, with the dtype of arrays in JSON and of tensors. BF16 has no arrays.
TYPES: dict[str, tuple[Any, torch.dtype]] = {
    "BOOL": (np.bool_, torch.bool),
    "UINT8": (np.uint8, torch.uint8),
    "INT8": (np.int8, torch.int8),
    "INT16": (np.int16, torch.int16),
    "INT32": (np.int32, torch.int32),
    "INT64": (np.int64, torch.int64),
    "FP16": (np.float16, torch.float16),
    "BF16": (np.float32, torch.bfloat16),
    "FP32": (np.float32, torch.float32),
    "FP64": (np.float64, torch.float64),
}
_NAMES = {dtype: name for name, (_, dtype) in TYPES.items()}
_MOST_DIMS = 16
_FIELDS = {"id", "inputs", "outputs", "parameters"}


class Body(NamedTuple):
    """The content of a request.

    Attributes:
        tensors: by name.
        id: of the request, which the response repeats, or None.
        outputs: the names of the outputs wanted; None for the predictions alone.
    """

    tensors: dict[str, Any]
    id: str | None = None
    outputs: list[str] | None = None


def read_body(content: bytes, media_type: str) -> Body:
    """The content of a request.

    Raises:
        ValueError: if it is malformed; the message says where.
    """
    return _from_safetensors(content) if media_type == SAFETENSORS else _from_json(content)


def _from_safetensors(content: bytes) -> Body:
    try:
        tensors = safetensors.torch.load(content)
    except Exception as error:  # the library raises errors of many kinds
        raise ValueError(f"the body is not a file of safetensors: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}; send one of {', '.join(TYPES)}")
    # As arrays, float64 is converted to the dtype of the model.
    return Body({name: t.numpy() if t.dtype == torch.float64 else t for name, t in tensors.items()})


def _from_json(content: bytes) -> Body:
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("inputs"), list):
        raise ValueError('the body must be an object with a list "inputs" of tensors')
    if unknown := sorted(body.keys() - _FIELDS):
        raise ValueError(f"the body has unknown fields {', '.join(map(repr, unknown))}; there are {sorted(_FIELDS)}")
    if body.get("parameters"):
        raise ValueError(f"parameters are not supported, got {_short(body['parameters'])}")
    if not isinstance(body.get("id", ""), str):
        raise ValueError(f"id must be a string, got {_short(body['id'])}")
    tensors: dict[str, Any] = {}
    for item in body["inputs"]:
        name, tensor = _tensor(item)
        if name in tensors:
            raise ValueError(f"there are two tensors named {name!r}")
        tensors[name] = tensor
    return Body(tensors, body.get("id"), _outputs(body.get("outputs")))


def _outputs(outputs: Any) -> list[str] | None:
    if outputs is None:
        return None
    is_list = isinstance(outputs, list) and outputs
    if not is_list or any(not isinstance(item, dict) or not isinstance(item.get("name"), str) for item in outputs):
        raise ValueError('outputs must be a list of objects such as {"name": "y"}')
    return [item["name"] for item in outputs]


def _tensor(item: Any) -> tuple[str, Any]:
    """The name and the array of a tensor in JSON."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ValueError(f"a tensor must be an object with a name, got {_short(item)}")
    name = item["name"]
    where = f"tensor {_short(name)}"
    shape, datatype, data = (item.get(field) for field in ("shape", "datatype", "data"))
    if datatype not in TYPES:
        raise ValueError(f"{where}: datatype must be one of {', '.join(TYPES)}; got {_short(datatype)}")
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    are_sizes = all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**31 for size in sizes)
    if not are_sizes or len(sizes) > _MOST_DIMS:
        raise ValueError(
            f"{where}: shape must be a list of at most {_MOST_DIMS} integers from 0 on, got {_short(shape)}"
        )
    if not isinstance(data, list):
        raise ValueError(f"{where}: data must be a list of numbers, got {_short(data)}")
    if item.get("parameters"):
        raise ValueError(f"{where}: parameters are not supported, got {_short(item['parameters'])}")
    return name, _array(where, data, sizes, datatype)


def _array(where: str, data: list[Any], shape: Sequence[int], datatype: str) -> Any:
    dtype, tensor_dtype = TYPES[datatype]
    try:
        found = np.array(data) if data else np.zeros(0, dtype)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: data must be a list of numbers, flat or nested like the shape") from error
    kinds = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}[np.dtype(dtype).kind]
    if found.dtype.kind not in kinds:
        raise ValueError(f"{where}: data must be numbers of {datatype}, got {_short(data)}")
    if found.size != math.prod(shape) or (found.ndim > 1 and list(found.shape) != list(shape)):
        raise ValueError(f"{where}: data has shape {list(found.shape)}, which is not {list(shape)}")
    with np.errstate(over="ignore"):
        cast = found.astype(dtype)
    fits = np.isfinite(cast).all() if np.dtype(dtype).kind == "f" else (cast == found).all()
    if not fits:
        raise ValueError(f"{where}: data has values that {datatype} cannot express")
    cast = cast.reshape(tuple(shape))
    return torch.from_numpy(cast).to(tensor_dtype) if datatype == "BF16" else cast


def tree_of(tensors: Mapping[str, Any], prefix: str) -> Tree:
    """The tensors whose names have a prefix, as a tensor, a dict or a tuple.

    Raises:
        ValueError: if there is none, or the names fit none of these.
    """
    if prefix in tensors:
        if extra := [name for name in tensors if name.startswith(f"{prefix}.")]:
            raise ValueError(f"there are tensors {prefix!r} and {extra[0]!r}; send one or the other")
        return tensors[prefix]
    parts = {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
    if not parts:
        raise ValueError(f"there is no tensor {prefix!r}; got {', '.join(map(repr, tensors)) or 'none'}")
    if all(name.isdecimal() for name in parts):
        if sorted(parts, key=int) != [str(i) for i in range(len(parts))]:
            raise ValueError(f"the tensors of a tuple must be {prefix}.0, {prefix}.1, ...; got {', '.join(parts)}")
        return tuple(parts[str(i)] for i in range(len(parts)))
    return parts


def check_names(tensors: Mapping[str, Any], *prefixes: str) -> None:
    """Reject tensors with other names."""
    for name in tensors:
        if name.partition(".")[0] not in prefixes:
            raise ValueError(f"tensor {_short(name)} has no meaning here; send {' and '.join(prefixes)}")


def rows_of(tensors: Mapping[str, Any]) -> int:
    """The number of rows of the largest tensor."""
    return max((len(tensor) for tensor in tensors.values() if tensor.ndim), default=0)


def flattened(tree: Tree, prefix: str) -> dict[str, Tensor]:
    """The inverse of `tree_of`."""
    if isinstance(tree, Tensor):
        return {prefix: tree.detach().cpu().contiguous()}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {name: value for key, item in items for name, value in flattened(item, f"{prefix}.{key}").items()}


def datatype_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype in the protocol."""
    return _NAMES.get(tensor.dtype, str(tensor.dtype))


def json_tensors(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Tensors as JSON.

    Raises:
        ValueError: for values that JSON cannot express.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} has values that are not finite, which JSON cannot express; accept {SAFETENSORS}")
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": datatype_of(tensor),
            "data": tensor.reshape(-1).tolist(),
        }
        for name, tensor in tensors.items()
    ]


def safetensors_bytes(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Tensors as a file of safetensors; `facts` are its metadata."""
    return safetensors.torch.save(dict(tensors), dict(facts))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
