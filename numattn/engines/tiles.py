"""Tiles: how a long computation is cut so that no quadratic tensor exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def tile_elements(device: torch.device) -> int:
    """Elements of the largest temporary: about what a CPU's caches hold, more on a GPU."""
    return 1 << 20 if device.type == "cpu" else 1 << 26


def spans(length: int, step: int) -> list[tuple[int, int]]:
    """[0, length) in consecutive spans of at most `step`."""
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def sizes(length: int, step: int) -> list[int]:
    """Lengths of the `spans`."""
    return [b - a for a, b in spans(length, step)]


def split(x: Tensor | None, lengths: list[int]) -> Sequence[Tensor | None]:
    """Parts of (B, H, N, D) or (B, 1, N) along N; of None, as many Nones.

    The gradient of a slice is as long as x, so that of all slices is quadratic; the gradients of
    one split are joined once.
    """
    return [None] * len(lengths) if x is None else x.split(lengths, 2)


def runs(x: Tensor, cuts: Sequence[tuple[int, int]]) -> list[Sequence[Tensor]]:
    """The run [a, b) of (B, H, N, D) for every cut, as pieces to be joined.

    Cuts may overlap. As in `split`, the gradients of all pieces are joined once, where those of N /
    tile slices would take quadratic time.
    """
    edges = sorted({0, x.shape[2], *(edge for cut in cuts for edge in cut)})
    place = {edge: n for n, edge in enumerate(edges)}
    pieces = x.split([b - a for a, b in pairwise(edges)], 2)
    return [pieces[place[a] : place[b]] for a, b in cuts]


def join(tiles: Iterable[Tensor], length: int) -> Tensor:
    """Tiles (B, H, n, E), one after the other along N.

    Where no gradient is kept, each is copied to its place as soon as it is there: while it is in
    the cache, and so that tiles and output are never in memory both.
    """
    if torch.is_grad_enabled():
        return torch.cat(list(tiles), 2)
    out, start = None, 0
    for tile in tiles:
        if out is None:
            out = tile.new_empty((*tile.shape[:2], length, tile.shape[3]))
        out[:, :, start : start + tile.shape[2]] = tile
        start += tile.shape[2]
    assert out is not None  # callers return early on empty inputs
    return out


def recompute(function: Callable[..., T], *tensors: Tensor | None) -> T:
    """Call `function`; for gradients, keep only its inputs and run it again in the backward."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return function(*tensors)
