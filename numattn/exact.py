"""Exact softmax attention: the baseline, and the target that the others approximate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from numattn.core.cost import Cost, Shape, visible_pairs
from numattn.core.info import Info
from numattn.core.inputs import check, prepare
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import KeysState, State
from numattn.engines.softmax import fused_attention, key_bias, softmax_partial

INFO = Info(
    name="exact",
    family="exact",
    summary="softmax attention itself, in tiles, with masks, biases and causal padded batches",
    paper="https://arxiv.org/abs/1706.03762",
    complexity="N^2 (d + e)",
    budget=None,
    approximates="softmax",
    causal="native",
    mask="full",
    oracle=True,
)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Exact softmax attention, :math:`o = \mathrm{softmax}(\mathrm{scale}\, q k^T + m)\, v`.

    Torch's own `scaled_dot_product_attention` serves calls without a mask whose query and value
    have the same width; the others, which torch would serve by forming an N x N tensor or not
    at all, run through `numattn.engines.softmax`.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        attn_mask: bool (True = attend) or float to add to the logits, broadcastable to
            (B, H, Nq, Nk); may be combined with ``is_causal``.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 Nq Nk (D + E) operations per head, half of it when causal, in memory that grows with
    Nq + Nk. Decoding keeps every key and value.

    Exact when: always; it is the target.

    Limits: quadratic time.

    References:
        A. Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
        >>> exact_attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 5, 4])
    """
    check(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if attn_mask is None and 0 not in (*query.shape, *key.shape, *value.shape):
        out = fused_attention(query, key, value, is_causal=is_causal, scale=scale)
        if out is not None:
            return out
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if x.empty:
        return x.nothing()
    part = softmax_partial(
        x.q,
        x.k,
        x.v,
        scale=x.scale,
        bias=key_bias(x.padding, x.q),
        mask=x.mask,
        is_causal=is_causal,
        group=x.group,
    )
    return x.restore(part.out())


@register
@dataclass(frozen=True)
class Exact(Method):
    """Options of `exact_attention`: none."""

    info = INFO
    function = staticmethod(exact_attention)

    def exact_at(self, length: int) -> Exact:
        return self

    def cost(self, shape: Shape) -> Cost:
        flops = 2 * visible_pairs(shape) * (shape.head_dim + shape.value_dim)
        per_token = shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.itemsize
        cache = shape.batch * shape.keys * per_token
        return Cost(flops, shape.io, cache, units=shape.keys)

    def state(
        self,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **tensors: Tensor,
    ) -> State:
        self.refuse(tensors)
        return KeysState(self, key, value, scale=scale, enable_gqa=enable_gqa)
