"""What costs nothing: answers that any method has to beat before its error means something.

An error of the output has no scale of its own. On queries and keys without structure attention is
nearly the mean of the values, so that doing nothing looks good; on a head with an attention sink
the output is small, and doing nothing looks terrible. Read a method's error beside these.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from numattn.core.inputs import positive
from numattn.measure.errors import HeadError, Reference, weights_errors


def mean_of_values(ref: Reference) -> list[HeadError]:
    """Errors of the mean of the values that a query may see: attention without logits."""

    def predict(log_weights: Tensor, first: int) -> Tensor:
        seen = (log_weights > -torch.inf).double()
        return seen / seen.sum(-1, keepdim=True)

    return ref.keep("mean_of_values", lambda: weights_errors(predict, ref))


def uniform_keys(ref: Reference, units: int, seed: int = 0) -> list[HeadError]:
    """Errors of exact attention to `units` keys drawn uniformly, without replacement.

    Each key head has its own draw, the same for all its queries. In a causal input a query sees
    those drawn keys that it may see, and itself where there is none.

    Args:
        ref: The exact weights.
        units: Keys to draw; all, where there are not as many.
        seed: Of the draw.
    """
    positive("uniform_keys", "units", units)
    batch, kv_heads, length, _ = ref.x.k.shape
    source = Generator().manual_seed(seed)
    order = torch.rand(batch, kv_heads, length, generator=source).argsort(-1)
    drawn = (order < units).repeat_interleave(ref.x.group, dim=1).to(ref.lse.device)
    position = torch.arange(length, device=ref.lse.device)

    def predict(log_weights: Tensor, first: int) -> Tensor:
        rows = position[first : first + log_weights.shape[2], None]
        allowed = drawn[:, :, None] & (log_weights > -torch.inf)
        allowed |= ~allowed.any(-1, keepdim=True) & (position == rows)
        return log_weights.masked_fill(~allowed, -torch.inf).softmax(-1)

    return weights_errors(predict, ref)
