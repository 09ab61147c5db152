"""Rewritten graphs compute the same, and have no product that MKL is slow at."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from metaleader.engine.products import rewrite_products

A, B, C = torch.randn(3, 7, 4, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64), torch.randn(3, 7, 7)


def tall(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a @ b).sin() + (a.mT.contiguous().mT @ b.mT.contiguous().mT)


def square_and_transposed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    product = torch.bmm(a, a.transpose(1, 2) + 0.5 * a.mT)
    return product.transpose(1, 2) - c @ c.mT


def used_both_ways(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    tall, square = torch.bmm(a, b), torch.bmm(a, a.transpose(-2, -1))
    return tall, tall.transpose(1, 2) * 2, square, square.transpose(2, 1) + c, tall.view(3, 7, 2).detach()


def changed_in_place(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    product = torch.bmm(a, b)
    view = product.transpose(1, 2)
    product.add_(1.0)
    return view, product


@pytest.mark.parametrize("function", [tall, square_and_transposed, used_both_ways, changed_in_place])
def test_a_rewritten_graph_computes_the_same(function: Callable[..., object]) -> None:
    inputs = A, B, C.double()
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    assert rewrite_products(graph) > 0
    torch.testing.assert_close(graph(*inputs), function(*inputs), rtol=1e-12, atol=1e-12)
    shapes = _shapes(graph, inputs)
    assert shapes
    assert all(rows <= columns for _, rows, columns in shapes)


def test_wide_products_stay() -> None:
    graph = make_fx(lambda a, b: torch.bmm(b.mT, a.mT), tracing_mode="fake")(A, B)
    before = graph.code
    assert rewrite_products(graph) == 0
    assert graph.code == before


def _shapes(graph: torch.fx.GraphModule, inputs: tuple[Tensor, ...]) -> list[tuple[int, ...]]:
    """The shapes of all batched products of a graph."""
    found: list[tuple[int, ...]] = []

    class Shapes(torch.fx.Interpreter):
        def call_function(self, target: object, args: object, kwargs: object) -> object:
            result = super().call_function(target, args, kwargs)  # pyright: ignore
            if target is torch.ops.aten.bmm.default:
                found.append(tuple(result.shape))
            return result

    Shapes(graph).run(*inputs)
    return found
