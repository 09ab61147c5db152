"""C++ kernels built together: the same results as kernels built one by one."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor import sizevars
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache
from torch._inductor.utils import fresh_cache
from torch.utils._sympy import functions

from metaleader.engine import kernels
from metaleader.engine.kernels import Bundle, bundled, stride_by_terms

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning"),
]
stride_at_vec_range: Any = getattr(sizevars, "stride_at_vec_range", None)
X, Y = sympy.symbols("x y", integer=True)
quotient: Any = functions.FloorDiv
remainder: Any = functions.ModularIndexing
SOURCE = """
#include <cstdint>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{
    out_ptr0[0] = in_ptr0[0];
}
"""


def several_kernels(x: Tensor) -> list[Tensor]:
    """Three matrix products, so at least four kernels."""
    results = []
    for i in range(3):
        x = torch.sin(x + i) @ x
        results.append(torch.softmax(x, 0) + x.sum(1))
    return results


def test_bundled_kernels_equal_those_built_alone(inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BUNDLE", 3)
    x = torch.linspace(-1, 1, 400).view(20, 20)
    found, files = [], []
    for context in (bundled, contextlib.nullcontext):
        torch.compiler.reset()
        with fresh_cache() as _, context():
            found.append(torch.compile(several_kernels, fullgraph=True)(x))
            files.append(len(CppPythonBindingsCodeCache.cache))
            PyCodeCache.cache_clear()
    for one, alone, exact in zip(*found, several_kernels(x.double()), strict=True):
        assert torch.equal(one, alone)
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)
    assert files[0] == 0  # none was built by itself
    assert files[1] > 3
    torch.compiler.reset()


def test_kernels_that_take_numbers_are_built_alone() -> None:
    bundle = Bundle()
    assert bundle.add(["const float*", "float*"], SOURCE) == 0
    assert bundle.add(["const float*", "const int64_t"], SOURCE) is None
    assert bundle.add(["float*"], SOURCE.replace("kernel(", "other(")) is None
    assert bundle.add(["const float*", "float*"], SOURCE) == 1


def test_kernels_that_cannot_be_built_together_are_built_alone(
    inductor: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(source: str) -> None:
        raise TypeError("load_async has other arguments")

    monkeypatch.setattr(kernels, "_loader", fail)
    caplog.set_level("INFO", "metaleader")
    x = torch.eye(4)
    with fresh_cache(), bundled():
        found = torch.compile(several_kernels, dynamic=False)(x)
    assert "one by one: load_async has other arguments" in caplog.text
    for one, other in zip(found, several_kernels(x), strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()


def test_a_broken_kernel_is_an_error(inductor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    bundle = Bundle()
    bundle.add(["const float*", "float*"], SOURCE.replace("in_ptr0[0]", "missing"))
    with pytest.raises(Exception, match="missing"):
        _ = bundle.kernels


@pytest.mark.parametrize(
    "index",
    [
        32 * X + Y + 640,
        X,
        Y,
        sympy.Integer(3),
        -X + 7 * Y,
        quotient(Y, 3) + 5 * X,
        2 * X + remainder(Y, 2, 5),
        X * Y + X**2,
        3 * quotient(X, 2) + X,
        5 * quotient(X, 32) + 2 * remainder(X, 1, 32) + 7 * quotient(Y, 2),
        remainder(X + 2 * Y, 4, 8) - 9 * X,
    ],
)
@pytest.mark.parametrize("vec_length", [None, 16])
@pytest.mark.skipif(stride_at_vec_range is None, reason="this version of torch has the function elsewhere")
def test_strides_by_terms_equal_those_of_the_whole_index(index: sympy.Expr, vec_length: int | None) -> None:
    found = stride_by_terms(index, X, vec_length, stride_at_vec_range)
    assert sympy.simplify(found - stride_at_vec_range(index, X, vec_length)) == 0
