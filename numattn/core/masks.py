"""Masks: True means attend."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def padding_mask(
    lengths: Tensor, max_length: int | None = None, *, side: Literal["right", "left"] = "right"
) -> Tensor:
    """The key-padding mask of sequences of these lengths.

    Args:
        lengths: int (B,), the number of real tokens of each sequence.
        max_length: Length of the padded sequences; by default the longest of ``lengths``
            (reading it synchronises a GPU).
        side: Where the padding stands.

    Returns:
        bool (B, 1, 1, max_length), True at real tokens.

    Example:
        >>> padding_mask(torch.tensor([1, 3]))[:, 0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    if lengths.dim() != 1:
        raise ValueError(f"padding_mask: lengths must have one dimension; got {lengths.dim()}.")
    if side not in ("right", "left"):
        raise ValueError(f"padding_mask: side must be 'right' or 'left'; got {side!r}.")
    if max_length is None:
        max_length = int(lengths.max()) if lengths.numel() else 0
    position = torch.arange(max_length, device=lengths.device)
    if side == "left":
        position = max_length - 1 - position
    return (position < lengths[:, None])[:, None, None]


def visible(rows: int, cols: int, first: int, group: int, device: torch.device) -> Tensor:
    """Causal visibility of a tile: bool (rows, cols).

    Row r stands at position ``first + r // group`` counted from the tile's first key.
    """
    position = first + torch.arange(rows, device=device) // group
    return torch.arange(cols, device=device) <= position[:, None]
