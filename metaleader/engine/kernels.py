"""The C++ kernels of a compiled graph, built together.

Inductor starts a C++ compiler for every kernel of a graph on the CPU. Most of that time goes into reading torch's
headers and instantiating the same templates: twenty kernels of a GRU in one file take an eighth of the time of twenty
files. Within `bundled`, the kernels of a graph are built in files of `BUNDLE` kernels, which run in parallel. The code
of each kernel is that of Inductor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from metaleader.system.text import short_text

_log = logging.getLogger("metaleader")
# The number of kernels of a file: a file costs half a second, a kernel a tenth. Fixed, so that files can be kept.
BUNDLE = 24
_INCLUDE = re.compile(r"^#include.*$", re.MULTILINE)
_ENTRY = re.compile(r'^extern "C"(?=[^\n{;]*\bkernel\()', re.MULTILINE)
_active = threading.local()

_MODULE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <exception>
static void* (*data_of)(PyObject*);
{functions}
static PyMethodDef methods[] = {{
{table}
{{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "kernel", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_kernel(void) {{
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (!address) {{
        PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR must be set");
        return NULL;
    }}
    data_of = reinterpret_cast<void* (*)(PyObject*)>(std::strtoull(address, NULL, 10));
    return PyModule_Create(&definition);
}}
"""
_FUNCTION = """
static PyObject* call_{index}(PyObject*, PyObject* const* args, Py_ssize_t count) {{
    if (count != {count}) {{
        PyErr_SetString(PyExc_RuntimeError, "the kernel takes {count} tensors");
        return NULL;
    }}
    try {{
        kernel_{index}::kernel({arguments});
        Py_RETURN_NONE;
    }} catch (std::exception const& error) {{
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return NULL;
    }}
}}
"""


@contextlib.contextmanager
def bundled() -> Iterator[None]:
    """Build the C++ kernels of graphs that are compiled or loaded by this thread in bundles."""
    _install()
    before = getattr(_active, "on", False)
    _active.on = True
    try:
        yield
    finally:
        _active.on = before


class Bundle:
    """The kernels of one graph, in the order in which Inductor writes them."""

    def __init__(self) -> None:
        self._sources: list[str] = []
        self._types: list[tuple[str, ...]] = []

    def add(self, types: Sequence[str], source: str) -> int | None:
        """The index of a kernel; None if it must be built alone."""
        if len(_ENTRY.findall(source)) != 1 or not all(kind.endswith("*") for kind in types):
            return None
        self._types.append(tuple(types))
        self._sources.append(source)
        return len(self._sources) - 1

    def source(self, index: int) -> tuple[list[str], str]:
        """The types of the arguments of a kernel, and its code."""
        return list(self._types[index]), self._sources[index]

    @functools.cached_property
    def kernels(self) -> list[Callable[..., None]]:
        """All kernels, built or read from the cache."""
        starts = range(0, len(self._sources), BUNDLE)
        files = [_file(self._types[i : i + BUNDLE], self._sources[i : i + BUNDLE]) for i in starts]
        loads = [_loader(file) for file in files]
        if len(loads) > 1:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                list(threads.map(lambda load: load(), loads))
        return [getattr(loads[i // BUNDLE](), f"kernel_{i % BUNDLE}") for i in range(len(self._sources))]


class _Pending:
    """A kernel that is not built yet."""

    def __init__(self, bundle: Bundle, index: int) -> None:
        self.bundle, self.index = bundle, index


def _file(types: Sequence[Sequence[str]], sources: Sequence[str]) -> str:
    """A C++ extension module with the functions kernel_0, kernel_1, ..."""
    includes = dict.fromkeys(line for source in sources for line in _INCLUDE.findall(source))
    parts, functions, table = list(includes), [], []
    for index, (kinds, source) in enumerate(zip(types, sources, strict=True)):
        body = _ENTRY.sub("static", _INCLUDE.sub("", source))
        parts.append(f"namespace kernel_{index} {{\n{body}\n}}")
        arguments = ", ".join(f"static_cast<{kind}>(data_of(args[{n}]))" for n, kind in enumerate(kinds))
        functions.append(_FUNCTION.format(index=index, count=len(kinds), arguments=arguments))
        table.append(
            f'{{"kernel_{index}", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_{index})),'
            f' METH_FASTCALL, ""}},'
        )
    return "\n".join(parts) + _MODULE.format(functions="".join(functions), table="\n".join(table))


def _loader(source: str) -> Callable[[], Any]:
    """A function that builds an extension module if it is not in the cache, and loads it."""
    from torch._inductor import config

    # Precompiling the headers takes as long as four files; debugging information a sixth of a kernel's time.
    unused = ("cpp_cache_precompile_headers", "aot_inductor.enable_line_tables", "aot_inductor.enable_frame_pointer")
    known = config.get_config_copy()  # older versions of torch have fewer settings
    with config.patch({name: False for name in unused if name in known}):
        return _cache().load_async(source)


@functools.cache
def _cache() -> Any:
    """Torch's cache of extension modules."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    class Cache(CppPythonBindingsCodeCache):
        cache = {}  # noqa: RUF012

    return Cache


def stride_by_terms(index: Any, var: Any, vec_length: int | None, stride_of: Callable[..., Any]) -> Any:
    """The stride of an index in a variable, from those of the factors that depend on it; `stride_of` is remembered."""
    import sympy

    total = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        if term.has(var):
            number, factor = term.as_coeff_Mul()
            total += number if factor == var else number * stride_of(factor, var, vec_length)
    return total


@functools.cache
def _install() -> None:
    """Change two functions of Inductor.

    Its loader of generated code, which passes on one kernel after the other, collects them. The strides of indices are
    computed term by term: `sympy.simplify` of whole indices takes a tenth of the time without the C++ compiler for a
    GRU, two fifths for a ResNet, whose indices have quotients and remainders. Neither is part of torch's interface:
    nothing is changed in a version that has other functions.
    """
    try:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codegen import cpp
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        add, wait, stride = AsyncCompile.cpp_pybinding, AsyncCompile.wait, cpp.stride_at_vec_range  # pyright: ignore
    except (ImportError, AttributeError) as error:
        _log.info("C++ kernels are built one by one: %s", short_text(error))
        return

    def test_instructions() -> None:
        with contextlib.suppress(Exception):  # the same call in the calling thread says so
            pick_vec_isa()

    if not torch.cuda.is_available():
        # It compiles programs that test the processor, which takes seconds; the recording goes on meanwhile.
        threading.Thread(target=test_instructions, daemon=True).start()
    stride_of = functools.lru_cache(2**16)(stride)

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if not getattr(_active, "on", False):
            return add(self, argtypes, source_code)
        bundle = vars(self).setdefault("metaleader_bundle", Bundle())
        index = bundle.add(argtypes, source_code)
        return add(self, argtypes, source_code) if index is None else _Pending(bundle, index)

    def wait_for_bundle(self: Any, scope: dict[str, Any]) -> None:
        pending = {name: value for name, value in scope.items() if isinstance(value, _Pending)}
        try:
            scope |= {name: value.bundle.kernels[value.index] for name, value in pending.items()}
        except Exception as error:  # another version of torch may load kernels otherwise
            _log.info("the C++ kernels of a graph are built one by one: %s", short_text(error))
            scope |= {name: add(self, *value.bundle.source(value.index)) for name, value in pending.items()}
        wait(self, scope)

    def stride_at_vec_range(index: Any, var: Any, vec_length: int | None = None) -> Any:
        return stride_by_terms(index, var, vec_length, stride_of)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = cpp_pybinding, wait_for_bundle  # pyright: ignore
    cpp.stride_at_vec_range = stride_at_vec_range  # pyright: ignore[reportPrivateImportUsage]
