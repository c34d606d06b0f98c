"""What a call costs: floating-point operations, bytes, and the family's own unit of budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Shape:
    """The shape of one attention call.

    Attributes:
        batch, heads, kv_heads: B, H, Hk.
        queries, keys: Nq, Nk.
        head_dim, value_dim: D, E.
        is_causal: Whether the call is causal.
        itemsize: Bytes per element of q, k and v.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    is_causal: bool = False
    itemsize: int = 4

    @property
    def rows(self) -> int:
        """Query rows of the whole call, B * H * Nq."""
        return self.batch * self.heads * self.queries

    @property
    def io(self) -> int:
        """Bytes that any method must move once: q, k, v in and the output out."""
        q = self.batch * self.heads * self.queries * (self.head_dim + self.value_dim)
        kv = self.batch * self.kv_heads * self.keys * (self.head_dim + self.value_dim)
        return (q + kv) * self.itemsize


@dataclass(frozen=True)
class Cost:
    """What one call costs.

    Attributes:
        flops: Operations of the matrix products, two per multiply-add, as
            `torch.utils.flop_counter` counts them; elementwise work is not in it.
        bytes: Bytes that must move to and from main memory, at the least.
        cache: Bytes that decoding keeps after `Shape.keys` tokens; None where it cannot decode.
        units: The budget in the family's own unit, which its oracle is given in a comparison:
            keys per query against the sparse oracle, rank of the weights against the others.
    """

    flops: int
    bytes: int
    cache: int | None
    units: int


def visible_pairs(shape: Shape) -> int:
    """Query-key pairs that exact attention computes, over all heads and the batch."""
    pairs = shape.queries * shape.keys
    if shape.is_causal:
        pairs = shape.queries * (shape.queries + 1) // 2
    return shape.batch * shape.heads * pairs


def count_flops(call: Callable[[], object]) -> int:
    """Run `call` without gradients and count the operations of its matrix products."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # What torch itself does not count.
    mapping: dict[Any, Any] = {
        flash: _flash_flops,
        torch.ops.aten.baddbmm_: _added_flops,
        torch.ops.aten.addmm_: _added_flops,
    }
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        call()
    return int(counter.get_total_flops())


def _added_flops(self_shape, a_shape, b_shape, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
    """A product that is added to what is there."""
    return 2 * math.prod(a_shape) * b_shape[-1]


def _flash_flops(  # type: ignore[no-untyped-def]
    q_shape, k_shape, v_shape, dropout_p=0.0, is_causal=False, *args, **kwargs
) -> int:
    """Torch's fused attention on a CPU."""
    batch, heads, queries, dim = q_shape
    shape = Shape(batch, heads, k_shape[1], queries, k_shape[2], dim, v_shape[3], is_causal)
    return 2 * visible_pairs(shape) * (dim + v_shape[3])
