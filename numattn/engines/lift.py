"""Causal lifting: make a bidirectional rectangular method causal.

The first tokens attend among themselves, the others among themselves and, all of them past, to the
first. Only that last block is rectangular and unmasked, so any method serves it; the parts are cut
again until they are short enough for exact causal attention. Cuts are at ``leaf`` times powers of
two of the tokens that exist, so that a row depends on no later token, not even on how many there
are, and padding is truncation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from numattn.core.inputs import Inputs
from numattn.core.partial import Partial
from numattn.engines.softmax import key_bias, softmax_partial

Block = Callable[[Tensor, Inputs], Partial]

LEAF = 512


def lift(x: Inputs, block: Block, *, leaf: int = LEAF) -> Tensor:
    """Causal attention from a method without a causal form.

    Args:
        x: The call.
        block: ``block(q, past)``, the method on folded rows q (B, Hk, n * group, D) that may see
            all of the inputs ``past``. Statistics over queries must come from ``past.q``: those of
            q would let a row see queries after it. Its partial must carry the mass of the block,
            for blocks are merged.
        leaf: Longest block that is computed exactly.

    Returns:
        (B, Hk, N * group, E); exact where N <= leaf.

    Cost: the exact leaves, and a call for each block of `split_points`: on log2(N / leaf) levels
    about half the bidirectional cost of a linear method.
    """
    x, place = x.compact()
    return x.move_back(_lift(x, block, leaf).out(), place)


def _lift(x: Inputs, block: Block, leaf: int) -> Partial:
    length = x.k.shape[2]
    if length <= leaf:
        bias = key_bias(x.padding, x.q)
        return softmax_partial(
            x.q, x.k, x.v, scale=x.scale, bias=bias, is_causal=True, group=x.group
        )
    cut = _cut(length, leaf)
    past, rest = _part(x, 0, cut), _part(x, cut, length)
    bottom = _lift(rest, block, leaf).merge(block(rest.q, past))
    return Partial.cat([_lift(past, block, leaf), bottom], 2)


def _part(x: Inputs, start: int, stop: int) -> Inputs:
    """The inputs at positions [start, stop)."""
    return replace(
        x,
        q=x.q[:, :, start * x.group : stop * x.group],
        k=x.k[:, :, start:stop],
        v=x.v[:, :, start:stop],
        padding=None if x.padding is None else x.padding[..., start:stop],
    )


def _cut(length: int, leaf: int) -> int:
    """The largest leaf * 2^i below `length`."""
    return leaf << ((length - 1) // leaf).bit_length() - 1


def split_points(length: int, leaf: int = LEAF) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of the exact leaves, and (queries, keys) of the rectangular blocks, for cost counts."""
    if length <= leaf:
        return [length], []
    cut = _cut(length, leaf)
    leaves1, blocks1 = split_points(cut, leaf)
    leaves2, blocks2 = split_points(length - cut, leaf)
    return leaves1 + leaves2, [*blocks1, *blocks2, (length - cut, cut)]
