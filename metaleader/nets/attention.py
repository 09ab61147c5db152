"""Attention as elementary operations: torch's fused kernels have no second derivative and draw their own masks.

The functions take the arguments of `torch.nn.functional`, and the layers take the place of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metaleader.nets.layers import SeededDropout


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, without dropout."""
    _reject_dropout(dropout_p, "scaled_dot_product_attention")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if is_causal:
        if attn_mask is not None:
            raise ValueError("scaled_dot_product_attention takes is_causal=True or attn_mask, not both")
        size = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(~attn_mask, query)
    return _attend(query, key, value, attn_mask, None, scale)[0]


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`torch.nn.functional.multi_head_attention_forward`, with a layer for the dropout of the attention weights."""
    if dropout is None and training:
        _reject_dropout(dropout_p, "multi_head_attention_forward")
    if is_causal and attn_mask is None:
        raise ValueError("multi-head attention with is_causal=True needs attn_mask, the causal mask")
    if query.shape[-1] != embed_dim_to_check:
        raise ValueError(f"multi-head attention: the query must have {embed_dim_to_check} features, got {query.shape}")
    batched = query.ndim == 3
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    # From here on (rows, positions, features)
    swap: Callable[[Tensor], Tensor] = (lambda x: x.transpose(0, 1)) if batched else (lambda x: x[None])
    q, k, v = (swap(x) for x in _project(query, key, value, weights, in_proj_bias))
    rows = q.shape[0]
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([x, bias.expand(rows, 1, -1)], 1) for x, bias in ((k, bias_k), (v, bias_v)))

    def heads(x: Tensor) -> Tensor:
        return x.reshape(rows, -1, num_heads, x.shape[-1] // num_heads).transpose(1, 2)

    q, k, v = heads(q), heads(k), heads(v)
    if static_k is not None:
        k = static_k.view(rows, num_heads, *static_k.shape[1:])
    if static_v is not None:
        v = static_v.view(rows, num_heads, *static_v.shape[1:])
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    mask = _merged_mask(attn_mask, key_padding_mask, q, k)
    out, attention = _attend(q, k, v, mask, dropout, None)
    out = F.linear(out.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    out = out.transpose(0, 1) if batched else out[0]
    if not need_weights:
        return out, None
    attention = attention.mean(1) if average_attn_weights else attention
    return out, attention if batched else attention[0]


class MultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` by `multi_head_attention_forward`; `seeded_dropout` is its dropout."""

    seeded_dropout: SeededDropout | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from (positions, rows, features), or (rows, positions, features) with `batch_first`."""
        inputs = query, key, value
        swaps = self.batch_first and query.ndim == 3
        if swaps:
            # Equal inputs stay identical: self-attention has one projection.
            query_first = query.transpose(0, 1)
            key_first = query_first if key is query else key.transpose(0, 1)
            inputs = query_first, key_first, key_first if value is key else value.transpose(0, 1)
        out, weights = multi_head_attention_forward(
            *inputs,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            0.0,
            self.out_proj.weight,
            self.out_proj.bias,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not self._qkv_same_embed_dim,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            dropout=self.seeded_dropout,
        )
        return out.transpose(0, 1) if swaps else out, weights


class TransformerEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` without a branch on the values of the mask, which cannot be compiled."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Pass the input through the layers in turn."""
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal))
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(nn.TransformerDecoder):
    """`nn.TransformerDecoder` without a branch on the values of the mask, which cannot be compiled."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Pass the input through the layers in turn."""
        padding = tgt_key_padding_mask, memory_key_padding_mask
        for layer in self.layers:
            tgt = layer(tgt, memory, tgt_mask, memory_mask, *padding, bool(tgt_is_causal), memory_is_causal)
        return tgt if self.norm is None else self.norm(tgt)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: Callable[[Tensor], Tensor] | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The output and the attention weights; the mask is added to the scores."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if mask is None:
        weights = scores.softmax(-1)
    else:
        scores = scores + mask
        # A position that may attend to none has weights of zero, as in torch. Its scores must not reach the softmax,
        # whose derivative would be NaN.
        none = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.where(none, 0.0, torch.where(none, 0.0, scores).softmax(-1))
    weights = weights if dropout is None else dropout(weights)
    return weights @ value, weights


def _project(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> tuple[Tensor, ...]:
    if isinstance(weights, Tensor) and query is key is value:
        return F.linear(query, weights, bias).chunk(3, -1)
    parts = weights.chunk(3) if isinstance(weights, Tensor) else weights
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), parts, biases, strict=True))


def _merged_mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The sum of the masks, which broadcasts to (rows, heads, queries, keys); True is a key that is left out."""
    merged = None
    if mask is not None:
        mask = _additive(mask, query)
        merged = mask if mask.ndim == 2 else mask.view(*query.shape[:2], *mask.shape[1:])
        # Keys that were appended are not masked.
        merged = F.pad(merged, (0, key.shape[-2] - merged.shape[-1]))
    if padding is not None:
        padding = _additive(padding, query).view(-1, 1, 1, padding.shape[-1])
        padding = F.pad(padding, (0, key.shape[-2] - padding.shape[-1]))
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: -inf for True."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _reject_dropout(p: float, function: str) -> None:
    if p > 0:
        raise ValueError(
            f"{function} with dropout draws random numbers of its own; use nn.MultiheadAttention, or dropout 0"
        )
