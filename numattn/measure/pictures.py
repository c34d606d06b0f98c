r"""Pictures of matrices of weights: mean weights of a grid of tiles, as text that fits into a row.

A picture has 32 x 32 tiles of rows and keys. Tile t holds the tokens from :math:`\lfloor tN/32
\rfloor` up to the next tile, and at least one: of fewer than 32 tokens, some are in several tiles.
Of each tile it holds the mean weight relative to a uniform one, :math:`N \bar P`, in 254 equal
steps of its logarithm from :math:`10^{-4}` to :math:`10^4`, so to within 4 %; what lies beyond is
clipped. Step 0 stands for a mean of zero or less: nothing is there. The steps are bytes, row by
row, packed by zlib and written in base64.
"""

from __future__ import annotations

import base64
import binascii
import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SIDE = 32
DECADES = 4  # of N times a weight, up and down
STEPS = 254  # of the logarithm, numbered from 1


def tiles(length: int) -> Tensor:
    """The tokens of each tile as weights that average them, (32, N), float64."""
    first = torch.arange(SIDE)[:, None] * length // SIDE
    last = torch.maximum(torch.arange(1, SIDE + 1)[:, None] * length // SIDE, first + 1)
    position = torch.arange(length)
    held = ((position >= first) & (position < last)).double()
    return held / held.sum(-1, keepdim=True)


def picture(means: Tensor, length: int) -> str:
    """The text of a picture.

    Args:
        means: Mean weights of the tiles, (32, 32).
        length: Tokens, N.

    Example:
        >>> text = picture(torch.full((32, 32), 1 / 64), 64)
        >>> bool(abs(matrix(text) - 1).max() < 0.04)
        True
    """
    if means.shape != (SIDE, SIDE):
        raise ValueError(f"picture: means must be {SIDE} x {SIDE}; got {tuple(means.shape)}.")
    relative = means.double().cpu() * length
    level = relative.log10().clamp(-DECADES, DECADES)
    step = ((level + DECADES) / (2 * DECADES) * (STEPS - 1)).round() + 1
    bytes_ = torch.where(relative > 0, step, 0.0).to(torch.uint8).numpy().tobytes()
    return base64.b64encode(zlib.compress(bytes_, 9)).decode("ascii")


def steps(text: str) -> npt.NDArray[np.uint8]:
    """The steps of a picture, (32, 32): 0 where nothing is, else 1 to 254."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
        return np.frombuffer(data, np.uint8).reshape(SIDE, SIDE)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"this is not a picture of {SIDE} x {SIDE} tiles ({error}).") from error


def matrix(text: str) -> npt.NDArray[np.float64]:
    """Mean weights of the tiles relative to a uniform weight, 1/N, (32, 32); 0 where nothing is."""
    step = steps(text).astype(np.float64)
    level = (step - 1) / (STEPS - 1) * (2 * DECADES) - DECADES
    return np.where(step > 0, 10**level, 0.0)
