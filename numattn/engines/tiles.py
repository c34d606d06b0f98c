"""Tiles: how a long computation is cut so that no quadratic tensor exists."""

from __future__ import annotations

from collections.abc import Callable
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


def recompute(function: Callable[..., T], *tensors: Tensor | None) -> T:
    """Call `function`; for gradients, keep only its inputs and run it again in the backward."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return function(*tensors)
