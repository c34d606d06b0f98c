"""Exact top-k attention: keep the heaviest keys of every row, the best that sparsity can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from numattn.core.cost import Cost, Shape, visible_pairs
from numattn.core.info import Info
from numattn.core.inputs import Inputs, positive, prepare
from numattn.core.masks import visible
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.core.state import KeysState, State
from numattn.engines.softmax import crop, key_bias
from numattn.engines.tiles import recompute, spans, tile_elements

INFO = Info(
    name="topk",
    family="sparse",
    summary="the k heaviest keys of every row, found by computing every logit; the sparse oracle",
    paper="https://arxiv.org/abs/2106.06899",
    complexity="N^2 (d + e)",
    budget="num_keys",
    approximates="softmax",
    causal="native",
    mask="full",
    oracle=True,
)

_LEAST_ROWS = 32  # of a tile: fewer would read the keys too often


def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_keys: int = 64,
    top_p: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention over the heaviest keys of every row.

    With logits :math:`s_{ij}` and :math:`T_i` the ``num_keys`` keys of the largest,

    .. math:: o_i = \sum_{j \in T_i} \frac{e^{s_{ij}}}{\sum_{l \in T_i} e^{s_{il}}} v_j .

    Leaving out softmax mass :math:`\delta` and renormalising moves the weights of a row by
    exactly :math:`\delta` in total variation, so no other choice of as many keys is nearer to
    the softmax: this is the bound that cheaper choices are measured against.

    A row keeps min(``num_keys``, keys it may see) keys, never more: among equal logits the lower
    index wins, and a logit of -inf is never kept.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_keys: Most keys that a row keeps, positive.
        top_p: A mass in (0, 1]. A row then keeps the fewest heaviest keys whose share of its
            whole softmax reaches ``top_p``, and still at most ``num_keys``: both limits hold. For
            the mass alone, give ``num_keys`` = Nk. None, like 1, sets no limit by mass.
        attn_mask: bool (True = attend) or float to add to the logits, broadcastable to
            (B, H, Nq, Nk); may be combined with ``is_causal``. Keys are chosen after it.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Every query head chooses for itself.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: as exact attention, 2 Nq Nk (D + E) operations per head, half of it when causal, and
    the selection, which on a CPU takes longer than either product. The product with the values is
    dense, its weights mostly zero: it costs the same whatever ``num_keys``, and its gradient is a
    product too, where gathered values would have to be scattered back. Memory is that of one tile
    of rows by Nk. Decoding keeps every key and value.

    Exact when: ``num_keys`` >= Nk and ``top_p`` is None or 1.

    Limits: it computes every logit, so it is an oracle and saves nothing. The choice is constant
    for autograd: gradients flow through the kept logits only, and jump where the choice changes.
    In half precision logits are computed in float32 and ties are those of float32.

    Raises:
        ValueError: ``num_keys`` is not a positive integer, or ``top_p`` is not in (0, 1].

    References:
        A. Gupta et al., "Memory-efficient Transformers via Top-k Attention", 2021,
        https://arxiv.org/abs/2106.06899.
        C. Lin et al., "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning",
        2025, https://arxiv.org/abs/2502.02770.

    Example:
        >>> q = k = torch.eye(3)[None, None]
        >>> v = torch.tensor([[1.0], [2.0], [3.0]])[None, None]
        >>> topk_attention(q, k, v, num_keys=1).flatten()
        tensor([1., 2., 3.])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(num_keys, top_p)
    if x.empty:
        return x.nothing()
    rows, keys = x.q.shape[2], x.k.shape[2]
    bias = key_bias(x.padding, x.q)
    outs = []
    for r0, r1 in spans(rows, _tile_rows(x)):
        last = (r1 - 1) // x.group + 1 if is_causal else keys
        start = r0 // x.group if is_causal else None
        mask = None if x.mask is None else crop(x.mask, rows, r0, r1, 0, last)
        attend = partial(_attend, num_keys, top_p, x.scale, start, x.group)
        tokens = (x.k[:, :, :last], x.v[:, :, :last], None if bias is None else bias[..., :last])
        outs.append(recompute(attend, x.q[:, :, r0:r1], *tokens, mask))
    return x.restore(torch.cat(outs, 2))


def _attend(
    num_keys: int,
    top_p: float | None,
    scale: float,
    start: int | None,
    group: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """A tile of rows against every key; `start` is the position of its first row when causal."""
    logits = (q * scale) @ k.mT  # (B, H, rows, Nk)
    if bias is not None:
        logits = logits.add_(bias[..., None, :])
    if mask is not None and mask.dtype is torch.bool:
        logits = logits.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    if start is not None:
        seen = visible(q.shape[2], k.shape[2], start, group, q.device)
        logits = logits.add_(torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf))
    if num_keys < k.shape[2] or top_p is not None:
        kept = _heaviest(logits.detach(), min(num_keys, k.shape[2]), top_p)
        logits = logits.masked_fill(~kept, -torch.inf)
    return Partial.from_logits(logits, v).out()


def _heaviest(logits: Tensor, num_keys: int, top_p: float | None) -> Tensor:
    """Which keys each row keeps, bool like `logits`."""
    best = logits.topk(num_keys).values  # (B, H, rows, num_keys), falling
    if top_p is None or top_p == 1:
        count = torch.full_like(best[..., :1], num_keys, dtype=torch.int32)
    else:
        peak = best[..., :1].clamp(min=torch.finfo(best.dtype).min)
        weight = (best - peak).exp()
        before = weight.cumsum(-1) - weight  # mass of the keys that are heavier
        whole = (logits - peak).exp_().sum(-1, keepdim=True)
        count = (before < top_p * whole).sum(-1, keepdim=True)
    least = best.gather(-1, (count.long() - 1).clamp(min=0))
    above = logits > least
    tied = logits == least  # where that is -inf, keeping more of them adds no weight
    # Indices that topk returns are in no order among equal logits; this counts from the left.
    room = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))


def _tile_rows(x: Inputs) -> int:
    """Rows of a tile, a multiple of the group."""
    batch, heads, keys, _ = x.k.shape
    rows = max(tile_elements(x.k.device) // (batch * heads * keys), _LEAST_ROWS)
    return max(rows // x.group, 1) * x.group


def _check_options(num_keys: int, top_p: float | None) -> None:
    positive(INFO.name, "num_keys", num_keys)
    if top_p is None:
        return
    if isinstance(top_p, bool) or not isinstance(top_p, (int, float)) or not 0 < top_p <= 1:
        raise ValueError(f"topk: top_p must be None or a number in (0, 1]; got {top_p!r}.")


@register
@dataclass(frozen=True)
class TopK(Method):
    """Options of `topk_attention`."""

    num_keys: int = 64
    top_p: float | None = None
    info = INFO
    function = staticmethod(topk_attention)

    def __post_init__(self) -> None:
        _check_options(self.num_keys, self.top_p)

    def exact_at(self, length: int) -> TopK:
        return replace(self, num_keys=max(length, 1), top_p=None)

    def cost(self, shape: Shape) -> Cost:
        flops = 2 * visible_pairs(shape) * (shape.head_dim + shape.value_dim)
        per_token = shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.itemsize
        cache = shape.batch * shape.keys * per_token
        return Cost(flops, shape.io, cache, units=min(self.num_keys, shape.keys))

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
