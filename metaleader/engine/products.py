"""Recorded graphs, rewritten for fast batched products on the CPU.

Differentiating a linear layer twice gives products with more rows than columns, of matrices that are both transposed.
MKL takes two to five times as long for them as for the transposed product, A B = (B^T A^T)^T. A product that is only
used transposed is replaced likewise, so that it is written in the order in which it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
# Operations that return their first argument if the shape stays the same
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.detach.default}


def rewrite_products(graph: GraphModule) -> int:
    """Rewrite the batched products of a recorded graph in place; returns the number of those transposed."""
    for node in graph.graph.nodes:
        if node.target in _VIEWS and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    found = [node for node in graph.graph.nodes if node.target is _aten.bmm.default and _is_transposed(node)]
    for node in found:
        left, right = node.args
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(
                _aten.bmm.default, (_transposed(graph, right), _transposed(graph, left))
            )
            result = _transposed(graph, product)
        for user in list(node.users):
            if _is_transposition(user):
                user.replace_all_uses_with(product)
        node.replace_all_uses_with(result)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return len(found)


def _is_transposed(product: Node) -> bool:
    """Whether the transposed product is faster."""
    shape = _shape(product)
    assert shape is not None
    if shape[-2] != shape[-1]:
        return shape[-2] > shape[-1]
    return bool(product.users) and all(_is_transposition(user) for user in product.users)


def _is_transposition(node: Node) -> bool:
    return node.target is _aten.transpose.int and set(node.args[1:]) in ({1, 2}, {-2, -1})


def _transposed(graph: GraphModule, node: object) -> Node:
    assert isinstance(node, Node)
    if _is_transposition(node):
        return node.args[0]  # pyright: ignore[reportReturnType]
    return graph.graph.call_function(_aten.transpose.int, (node, 1, 2))


def _shape(node: object) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None
