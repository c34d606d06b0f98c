r"""Attention to a latent that is key and value at once: absorbed decoding of latent attention.

What a token leaves in the cache is one vector c of a group of heads, and a rotated vector r that
all heads share. The first entries of c are the key, all of it is the value:

.. math:: s_{ij} = \mathrm{scale}\; (q_i \cdot c_j + q^R_i \cdot r_j), \qquad
          o_i = \sum_j e^{s_{ij} - \mathrm{lse}_i}\, c_j .

Projections of heads that the model has between c and its keys and values stand on the side of the
query and of the output, so nothing is expanded to the width of the heads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from numattn.core.masks import visible
from numattn.core.partial import Partial
from numattn.engines.softmax import ROWS
from numattn.engines.tiles import recompute, spans, tile_elements


def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = False,
    first: int = 0,
    group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over a shared latent, with its log normaliser.

    Args:
        q: (B, G, n * group, C'), float32 or float64, against the first C' entries of the latent.
        q_rope: (B, G, n * group, R), queries against the shared rotated keys.
        latent: c, (B, G, M, C), C >= C'; of any type and strides, brought to q's tile by tile.
        rope: r, (B, G or 1, M, R).
        scale: Factor of the logits.
        bias: Per-key bias (B or 1, G or 1, M); -inf removes a key.
        is_causal: Row r attends to keys j <= first + r // group.
        first: Position of row 0 counted from key 0, when causal.
        group: Rows per position, the heads that share a latent.

    Returns:
        out (B, G, n * group, C) and lse (B, G, n * group). A row that may attend to nothing gives
        zeros and -inf.

    Cost: 2 n group M (C' + R + C) operations for each of the G groups. The cache is read once for
    every 256 positions of queries, in tiles that are merged.
    """
    batch, groups, rows, _ = q.shape
    tall = min(max(rows, 1), ROWS * group)
    wide = max(tile_elements(q.device) // (max(batch * groups, 1) * tall), 64)
    parts = []
    for r0, r1 in spans(rows, tall):
        last = min(latent.shape[2], first + (r1 - 1) // group + 1) if is_causal else latent.shape[2]
        start = first + r0 // group if is_causal else None
        strip = partial(_strip, scale, start, group, wide)
        keys = (latent[:, :, :last], rope[:, :, :last], None if bias is None else bias[..., :last])
        parts.append(Partial(*recompute(strip, q[:, :, r0:r1], q_rope[:, :, r0:r1], *keys)))
    return Partial.cat(parts, 2).finalize()


def _strip(
    scale: float,
    start: int | None,
    group: int,
    wide: int,
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's rows over all of the cache, `wide` tokens at a time."""
    part = Partial.zeros(q.shape[:3], latent.shape[3], q)
    for c0, c1 in spans(latent.shape[2], wide):
        c, r = (t[:, :, c0:c1].to(q.dtype) for t in (latent, rope))
        logits = (q * scale) @ c[..., : q.shape[3]].mT + (q_rope * scale) @ r.mT
        if bias is not None:
            logits = logits + bias[..., None, c0:c1]
        if start is not None and start - c0 < c1 - c0 - 1:
            seen = visible(q.shape[2], c1 - c0, start - c0, group, q.device)
            logits = logits.masked_fill(~seen, -torch.inf)
        part = part.merge(Partial.from_logits(logits, c))
    return part.num, part.den, part.shift
