"""Softmax over listed keys with log-weights: every position has a list of its own.

The rows of a position, the query heads that share a key head, read the same keys. This is the form
of decoding over pages and runs of a cache, and of attention to sampled keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from numattn.engines.blocks import attend_lists


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    *,
    scale: float,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    page: int = 1,
) -> tuple[Tensor, Tensor]:
    r"""Softmax attention over listed keys, with its log normaliser.

    With the list :math:`j_1, \dots, j_L` of the row's position and log-weights :math:`w_l`,

    .. math:: s_{il} = \mathrm{scale}\; q_i \cdot k_{j_l} + b_{j_l} + w_l, \quad
              \mathrm{lse}_i = \log \sum_l e^{s_{il}}, \quad
              o_i = \sum_l e^{s_{il} - \mathrm{lse}_i} v_{j_l} .

    Args:
        q: (B, H, n * group, D), float32 or float64, as `Inputs` folds it: row r belongs to position
            ``r // group``, where group = rows / n.
        k: (B, H, Nk, D).
        v: (B, H, Nk, E).
        index: int (B or 1, H or 1, n, L), the list of each position: numbers of keys, or of pages
            of ``page`` consecutive keys. -1 lists nothing. A key that is listed twice counts
            twice, as a sample drawn twice must.
        scale: Factor of the logits.
        log_weight: (B or 1, H or 1, n, L), added to the logits of an entry: minus the logarithm of
            the expected number of draws.
        bias: Per-key bias (B or 1, H or 1, Nk); -inf removes a key.
        page: Consecutive keys of an entry.

    Returns:
        out (B, H, n * group, E) and lse (B, H, n * group); zeros and -inf where a list is empty.
        Both are differentiable in q, k, v, log_weight and bias.

    Cost: 2 L page (D + E) operations per row; the keys and values of the lists are read once for
    all rows of a position.
    """
    height = q.shape[2] // max(index.shape[2], 1)
    if page > 1:
        index = _keys_of_pages(index, page, k.shape[2])
        log_weight = None if log_weight is None else log_weight.repeat_interleave(page, -1)
    return attend_lists(
        q, k, v, index, log_weight=log_weight, height=height, width=1, scale=scale, bias=bias
    )


def _keys_of_pages(index: Tensor, page: int, keys: int) -> Tensor:
    """The keys of listed pages, int (..., L * page); -1 where there is none."""
    key = index[..., None] * page + torch.arange(page, device=index.device)
    return key.masked_fill((index < 0)[..., None] | (key >= keys), -1).flatten(-2)


def runs(start: Tensor, count: Tensor, longest: int) -> Tensor:
    """Lists of consecutive keys: int (..., n) twice -> (..., n, longest), -1 after the end."""
    step = torch.arange(longest, device=start.device)
    return (start[..., None] + step).masked_fill(step >= count[..., None], -1)
