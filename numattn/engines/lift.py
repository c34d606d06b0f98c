"""Causal lifting: make a bidirectional rectangular method causal.

The first half of the tokens attends to itself, the second half to itself and, all of it past, to
the first half. Only that last block is rectangular and unmasked, so any method serves it; the
halves are cut again until they are short enough for exact causal attention.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from numattn.core.partial import Partial
from numattn.engines.softmax import key_bias, softmax_partial

Block = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Partial]

LEAF = 512


def lift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    *,
    scale: float,
    padding: Tensor | None = None,
    group: int = 1,
    leaf: int = LEAF,
) -> Tensor:
    """Causal attention from a method without a causal form.

    Args:
        q: (B, H, N * group, D); row r stands at position r // group.
        k: (B, H, N, D).
        v: (B, H, N, E).
        block: ``block(q, k, v, padding)``, the method on a block of queries that may see all of a
            block of keys. Its partial must carry the mass of the block, for blocks are merged.
        scale: Factor of the logits, for the exact leaves.
        padding: bool (B or 1, 1, N), True = exists.
        group: Rows per position.
        leaf: Longest block that is computed exactly.

    Returns:
        (B, H, N * group, E); exact where N <= leaf.

    Cost: one call on n/2 queries and n/2 keys for each block of n tokens, so log2(N / leaf) times
    half the bidirectional cost of a linear method, and the exact leaves.
    """
    return _lift(q, k, v, block, scale, padding, group, leaf).out()


def _lift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    scale: float,
    padding: Tensor | None,
    group: int,
    leaf: int,
) -> Partial:
    length = k.shape[2]
    if length <= leaf:
        bias = key_bias(padding, q)
        return softmax_partial(q, k, v, scale=scale, bias=bias, is_causal=True, group=group)
    half = length // 2
    rows = half * group
    past, now = (None, None) if padding is None else (padding[..., :half], padding[..., half:])
    k1, v1 = k[:, :, :half], v[:, :, :half]
    top = _lift(q[:, :, :rows], k1, v1, block, scale, past, group, leaf)
    bottom = _lift(
        q[:, :, rows:], k[:, :, half:], v[:, :, half:], block, scale, now, group, leaf
    ).merge(block(q[:, :, rows:], k1, v1, past))
    return Partial.cat([top, bottom], 2)


def split_points(length: int, leaf: int = LEAF) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of the exact leaves, and (queries, keys) of the rectangular blocks, for cost counts."""
    if length <= leaf:
        return [length], []
    half = length // 2
    leaves1, blocks1 = split_points(half, leaf)
    leaves2, blocks2 = split_points(length - half, leaf)
    return leaves1 + leaves2, [*blocks1, *blocks2, (length - half, half)]
