"""Softmax over a key set with a per-key bias: the workhorse. Exact attention is this.

Computed in tiles with a running maximum, so memory grows with the lengths and not with their
product; backward runs the tiles again.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from numattn.core.inputs import compute_dtype, fold, unfold
from numattn.core.masks import visible
from numattn.core.partial import Partial
from numattn.engines.tiles import recompute, spans, tile_elements

ROWS = 256  # query rows of a tile: enough for a matrix product to run at full speed


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    group: int = 1,
) -> tuple[Tensor, Tensor]:
    r"""Softmax attention with its log normaliser, both differentiable.

    .. math:: s_{ij} = \mathrm{scale}\; q_i \cdot k_j + b_j + m_{ij}, \quad
              \mathrm{lse}_i = \log \sum_j e^{s_{ij}}, \quad
              o_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} v_j

    Args:
        q: (B, H, Nq, D), float32 or float64.
        k: (B, H, Nk, D).
        v: (B, H, Nk, E).
        scale: Factor of the logits.
        bias: Per-key bias (B or 1, H or 1, Nk): log counts, log weights; -inf removes a key.
        mask: bool (True = attend) or float to be added, broadcastable to (B, H, Nq, Nk); ``group``
            rows are repeated for every position.
        is_causal: Row r attends to keys j <= r // group.
        group: Rows per position, as `Inputs` folds grouped heads.

    Returns:
        out (B, H, Nq, E) and lse (B, H, Nq). A row that may attend to nothing gives zeros and
        -inf.

    Cost: 2 Nq Nk (D + E) operations per head, half of it when causal.
    """
    return softmax_partial(
        q, k, v, scale=scale, bias=bias, mask=mask, is_causal=is_causal, group=group
    ).finalize()


def softmax_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    group: int = 1,
    first: int = 0,
) -> Partial:
    """`softmax_attention` before the division, of the same arguments.

    ``first`` is the position of row 0 counted from key 0, when causal.
    """
    batch, heads, rows, _ = q.shape
    tall = min(max(rows, 1), ROWS * group)
    wide = max(tile_elements(q.device) // (max(batch * heads, 1) * tall), 64)
    parts = []
    for r0, r1 in spans(rows, tall):
        last = min(k.shape[2], first + (r1 - 1) // group + 1) if is_causal else k.shape[2]
        strip = partial(_strip, scale, first + r0 // group if is_causal else None, group, wide)
        seen = None if mask is None else crop(mask, rows, r0, r1, 0, last)
        keys = (k[:, :, :last], v[:, :, :last], None if bias is None else bias[..., :last])
        parts.append(Partial(*recompute(strip, q[:, :, r0:r1], *keys, seen)))
    return Partial.cat(parts, 2)


def _strip(
    scale: float,
    start: int | None,
    group: int,
    wide: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's rows over all keys, `wide` at a time; run again backward, as a whole."""
    part: Partial | None = None
    for c0, c1 in spans(k.shape[2], wide):
        here = None if start is None else start - c0
        own = None if bias is None else bias[..., c0:c1]
        seen = mask if mask is None or mask.shape[3] == 1 else mask[..., c0:c1]
        tile = _tile(q, k[:, :, c0:c1], v[:, :, c0:c1], own, seen, scale, here, group)
        part = tile if part is None else part.merge(tile)
    if part is None:
        part = Partial.zeros(q.shape[:3], v.shape[3], q)
    return part.num, part.den, part.shift


def _tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    start: int | None,
    group: int,
) -> Partial:
    """One tile; `start` is the position of its first row counted from its first key, or None."""
    logits = (q * scale) @ k.mT
    if bias is not None:
        logits = logits.add_(bias[..., None, :])
    if mask is not None:
        logits = (
            logits.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
        )
    if start is not None and start < k.shape[2] - 1:
        seen = visible(q.shape[2], k.shape[2], start, group, q.device)
        # Adding is several times faster than filling by a mask that must be broadcast.
        hidden = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
        logits = logits.add_(hidden)
    return Partial.from_logits(logits, v)


def crop(mask: Tensor, rows: int, r0: int, r1: int, c0: int, c1: int) -> Tensor:
    """The part of a mask that belongs to a tile; its rows are all, one, or one group to repeat."""
    if mask.shape[2] == rows:
        mask = mask[:, :, r0:r1]
    elif mask.shape[2] > 1:
        mask = mask.repeat(1, 1, (r1 - r0) // mask.shape[2], 1)
    return mask if mask.shape[3] == 1 else mask[..., c0:c1]


def key_bias(padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Key padding, bool (B or 1, 1, Nk), as a bias that removes the keys that do not exist."""
    if padding is None:
        return None
    return torch.zeros_like(padding, dtype=like.dtype).masked_fill(~padding, -torch.inf)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> Tensor | None:
    """Torch's own fused attention without a mask, or None where it would form an N x N tensor.

    It is fused only if query and value have the same width; masks are not left to it, for it does
    not promise zeros to a row that may attend to nothing.
    """
    if query.shape[3] != value.shape[3]:
        return None
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Softmax attention of grouped heads, whose queries are the last of the tokens.

    Args:
        q: (B, H, n, D), n positive.
        k: (B, Hk, M, D); H / Hk consecutive query heads share a key head.
        v: (B, Hk, M, E).
        scale: Factor of the logits.
        bias: Per-key bias (B or 1, 1, M); -inf removes a key.
        is_causal: Query i attends to keys j <= M - n + i.

    Returns:
        (B, H, n, E), in the type of q; zeros for a row that may attend to nothing.

    Cost: 2 H P (D + E) operations for P pairs of tokens. Torch's fused kernel serves calls without
    bias where D = E, unless they are causal with more than one query after earlier tokens.
    """
    group, first = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    is_causal = is_causal and q.shape[2] > 1
    rows = fold(q, group)
    if bias is None and is_causal and first == 0:
        out = fused_attention(q, k, v, is_causal=True, scale=scale)
        if out is not None:
            return out
    elif bias is None and not is_causal:
        out = fused_attention(rows, k, v, is_causal=False, scale=scale)
        if out is not None:
            return unfold(out, group)
    rows, k, v = (t.to(compute_dtype(q.dtype)) for t in (rows, k, v))
    part = softmax_partial(
        rows, k, v, scale=scale, bias=bias, is_causal=is_causal, group=group, first=first
    )
    return unfold(part.out(), group).to(q.dtype)


def computed_pairs(length: int, is_causal: bool, fused: bool) -> int:
    """Pairs that are computed among so many tokens, by torch's fused kernel or by the engines.

    Engines compute whole tiles where the diagonal crosses them.
    """
    if not is_causal:
        return length * length
    if fused:
        return length * (length + 1) // 2
    return sum((r1 - r0) * r1 for r0, r1 in spans(length, ROWS))
