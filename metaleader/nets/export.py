"""Adapted nets as files for other programs: ONNX, and the programs of `torch.export`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from metaleader.system.files import check_target, write_atomic
from metaleader.tasks import Tree, as_tensors, rows

# Numbers of rows that are compared, all with one exported file.
_ROWS = (1, 2, 5)
_TOLERANCE = 1e-4


@torch.no_grad()
def export(net: nn.Module, x: Tree, *paths: str | os.PathLike[str]) -> float:
    """Write an adapted net to files, and compare what these compute with the net.

    The files take any number of rows, with a batch dimension. They include the preprocessing of the inputs. The inputs
    of an ONNX file are named "x", or "x.NAME" for a dict and "x.0", "x.1", ... for a tuple; its output is "y".

    Args:
        net: a net that `adapt` returned, or any module in evaluation mode.
        x: inputs, one row or more, which show shapes and dtypes.
        paths: where to write. A name that ends in ".onnx" gives an ONNX file, and needs the extra `export`; ".pt2"
            gives a program for `torch.export.load`.

    Returns:
        The largest absolute difference of an output from the net's, for 1, 2 and 5 rows.

    Raises:
        ImportError: if the extra `export` is missing.
        ValueError: if the net cannot be exported with any number of rows, or a file does not compute the same.
    """
    makers: dict[str, Callable[[ExportedProgram, Tree], tuple[bytes, _Run]]] = {".onnx": _onnx, ".pt2": _program}
    for path in paths:
        if Path(path).suffix not in makers:
            raise ValueError(f"the name of a file must end in .onnx or .pt2, got {path}")
        check_target(path)
    if not paths:
        raise ValueError('name at least one file, as in export(net, x, "net.onnx")')
    if any(Path(path).suffix == ".onnx" for path in paths):
        _check_extra()
    device = next((value.device for value in net.parameters()), torch.device("cpu"))
    x = tree_map(lambda leaf: leaf.to(device), as_tensors(x, "x", next(net.parameters()).dtype))
    inputs = {count: rows(x, torch.arange(count, device=device) % len(tree_leaves(x)[0])) for count in _ROWS}
    expected = {count: net(value) for count, value in inputs.items()}
    if any(not isinstance(y, Tensor) or y.shape[:1] != (count,) for count, y in expected.items()):
        raise ValueError("the net must return one tensor with one row per row of x, which needs a batch dimension")
    program = _exported(net, inputs[2])
    files, difference = [], 0.0
    for path in paths:
        content, run = makers[Path(path).suffix](program, x)
        for count, value in inputs.items():
            error = float((_checked(run, value, path, count) - expected[count].cpu()).abs().max())
            if not error <= _TOLERANCE * (1.0 + float(expected[count].abs().max())):
                raise ValueError(
                    f"{path} computes other outputs than the net, by {error:.2g} for {count} rows; it is not written"
                )
            difference = max(difference, error)
        files.append((path, content))
    for path, content in files:
        write_atomic(path, content)
    return difference


_Run = Callable[[Tree], Tensor]


def _checked(run: _Run, x: Tree, path: str | os.PathLike[str], count: int) -> Tensor:
    try:
        return run(x)
    except Exception as error:
        raise ValueError(f"{path} fails for {count} rows, and is not written: {_first_line(error)}") from error


def _exported(net: nn.Module, x: Tree) -> ExportedProgram:
    shapes = tree_map(lambda leaf: {0: Dim("rows")}, x)
    with _quiet():
        try:
            return torch.export.export(net, (x,), dynamic_shapes=(shapes,), strict=False)
        except Exception as error:
            raise ValueError(f"{type(net).__name__} cannot be exported: {_first_line(error)}") from error


def _program(program: ExportedProgram, x: Tree) -> tuple[bytes, _Run]:
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(program, buffer)
        module = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    return buffer.getvalue(), lambda value: module(value).cpu()


def _onnx(program: ExportedProgram, x: Tree) -> tuple[bytes, _Run]:
    import onnxruntime

    names = _names(x)
    with _quiet():
        try:
            converted = torch.onnx.export(program, input_names=names, output_names=["y"], dynamo=True, verbose=False)
        except Exception as error:
            raise ValueError(f"the net cannot be converted to ONNX: {_first_line(error)}") from error
    assert converted is not None
    content = converted.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(value: Tree) -> Tensor:
        feed = dict(zip(names, (leaf.cpu().numpy() for leaf in tree_leaves(value)), strict=True))
        return torch.from_numpy(session.run(["y"], feed)[0])

    return content, run


def _names(x: Tree) -> list[str]:
    """The names of the tensors of x, in the order of its leaves."""
    if isinstance(x, Tensor):
        return ["x"]
    leaves, _ = tree_flatten(x)
    keys = list(x) if isinstance(x, dict) else list(range(len(leaves)))
    if len(keys) != len(leaves):
        raise ValueError("x must be a tensor, or a dict or tuple of tensors; nested ones cannot be exported to ONNX")
    return [f"x.{key}" for key in keys]


def _check_extra() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f'{error.name} is not installed: pip install "metaleader[export]"') from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In this context, the exporters do not warn of deprecated functions that they use, or of a missing torchvision."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    cause: Any = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0].rstrip(".")
