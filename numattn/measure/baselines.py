"""What costs nothing: answers that any method has to beat before its error means something.

An error of the output has no scale of its own. On queries and keys without structure attention is
nearly the mean of the values, so that doing nothing looks good; on a head with an attention sink
the output is small, and doing nothing looks terrible. Read a method's error beside these.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor

from numattn.core.inputs import positive
from numattn.engines.tiles import spans
from numattn.measure.errors import HeadError, Reference, head_errors, weights_errors
from numattn.measure.inputs import QKV

_BLOCK = 1 << 21  # elements of the logits of all heads that exist at a time


def mean_of_values(ref: Reference) -> list[HeadError]:
    """Errors of the mean of the values that a query may see: attention without logits."""

    def predict(log_weights: Tensor, first: int) -> Tensor:
        seen = (log_weights > -torch.inf).double()
        return seen / seen.sum(-1, keepdim=True)

    return ref.keep("mean_of_values", lambda: weights_errors(predict, ref))


def uniform_keys(
    ref: Reference, units: int, seed: int = 0, *, with_weights: bool = True
) -> list[HeadError]:
    """Errors of exact attention to `units` keys drawn uniformly, without replacement.

    Each key head has its own draw, the same for all its queries. In a causal input a query sees
    those drawn keys that it may see, and itself where there is none.

    Args:
        ref: The exact weights.
        units: Keys to draw; all, where there are not as many.
        seed: Of the draw.
        with_weights: Whether to measure the weights. Without them nothing of N x N is computed.
    """
    positive("uniform_keys", "units", units)
    length = ref.x.length
    order = torch.rand(*ref.x.k.shape[:3], generator=Generator().manual_seed(seed)).argsort(-1)
    drawn = (order < units).to(ref.lse.device)  # (B, Hk, N)
    position = torch.arange(length, device=drawn.device)

    def predict(log_weights: Tensor, first: int) -> Tensor:
        rows = position[first : first + log_weights.shape[2], None]
        mine = drawn.repeat_interleave(ref.x.group, dim=1)[:, :, None]
        allowed = mine & (log_weights > -torch.inf)
        allowed |= ~allowed.any(-1, keepdim=True) & (position == rows)
        return log_weights.masked_fill(~allowed, -torch.inf).softmax(-1)

    if with_weights:
        return weights_errors(predict, ref)
    keys = drawn.nonzero()[:, 2].view(*drawn.shape[:2], min(units, length))
    attend = partial(_attend_to, keys, ref.x)
    return head_errors(attend, ref, dtype=torch.float64, with_weights=False)


def _attend_to(drawn: Tensor, x: QKV, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the keys at these positions, (B, Hk, units), or to oneself."""
    keys, values = (
        t.gather(2, drawn[..., None].expand(-1, -1, -1, t.shape[3])).repeat_interleave(x.group, 1)
        for t in (k, v)
    )
    own = v.repeat_interleave(x.group, 1)
    drawn = drawn.repeat_interleave(x.group, 1)[:, :, None]  # (B, H, 1, units)
    position = torch.arange(x.length, device=k.device)[:, None]
    outs = []
    for first, last in spans(x.length, max(_BLOCK // drawn.numel(), 1)):
        logits = x.scale * q[:, :, first:last] @ keys.mT
        if x.is_causal:
            logits = logits.masked_fill(drawn > position[first:last], -torch.inf)
        out = logits.softmax(-1) @ values
        alone = logits.isneginf().all(-1, keepdim=True)  # no drawn key is in sight
        outs.append(torch.where(alone, own[:, :, first:last], out))
    return torch.cat(outs, 2)
