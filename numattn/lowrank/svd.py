"""Truncated SVD: the best attention matrix of a given rank, as an oracle for the family."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Unsupported, positive, prepare, unfold
from numattn.core.masks import visible
from numattn.core.method import Method
from numattn.core.registry import register

INFO = Info(
    name="svd",
    family="lowrank",
    summary="best rank-r approximation of the exact attention matrix (oracle)",
    paper="https://doi.org/10.1007/BF02288367",
    complexity="N^3",
    budget="rank",
    approximates="softmax",
    causal="native",
    mask="full",
    decode=False,
    differentiable=False,
    normalised=False,
    oracle=True,
    exceptions={
        "no_causal_leak": "the truncated SVD of a causal matrix is dense above its diagonal, and "
        "its singular vectors depend on every token"
    },
)


def svd_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 64,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""The best rank-r approximation of softmax attention.

    With the exact attention matrix of a head, :math:`A = U \Sigma V^T`, the output is
    :math:`A_r\, \mathrm{value}`, where :math:`A_r = U_r \Sigma_r V_r^T` keeps the r largest
    singular values. By Eckart and Young (and Mirsky) no matrix of rank r is nearer to A in any
    unitarily invariant norm, so no low-rank method whose weights have rank r can have a smaller
    error of the weights. It tells what a rank can buy; it saves nothing.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: r, positive; more than min(Nq, Nk) is the same as that.
        attn_mask: bool (True = attend) or float to add to the logits, broadcastable to
            (B, H, Nq, Nk); may be combined with ``is_causal``. Key padding is taken to speak of
            the queries too when there are as many: their rows are left out of the matrix, and
            their outputs are zeros.
        is_causal: Truncate the matrix of causal attention; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Each query head has a matrix of its own.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: 2 Nq Nk D + 2 r E (Nq + Nk) operations per query head for the products, and the
    factorisation on top, about 20 N^3. Memory is that of a few Nq x Nk matrices, one head at a
    time.

    Exact when: r >= min(Nq, Nk), or A has rank r.

    Limits: an oracle. It forms the attention matrix on purpose and takes cubic time. The truncation
    of a causal matrix is not causal: it has weights above the diagonal. Rows do not sum to one,
    weights may be negative, and the least error of the weights is not the least error of the
    output for a given value. No gradient: that of a singular subspace is undefined where singular
    values repeat.

    Raises:
        Unsupported: A gradient is wanted.

    References:
        C. Eckart, G. Young, "The approximation of one matrix by another of lower rank", 1936,
        https://doi.org/10.1007/BF02288367.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
        >>> svd_attention(q, k, v, rank=3).shape
        torch.Size([1, 2, 6, 4])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    positive(INFO.name, "rank", rank)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise Unsupported(
            "svd has no gradient; call it under torch.no_grad() or on detached tensors."
        )
    if x.empty:
        return x.nothing()
    batch, heads, queries, _ = x.shape
    q = unfold(x.q, x.group)
    rows = None if x.query_padding is None else x.padding
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, queries, x.k.shape[2])
    outs = []
    for b in range(batch):
        for h in range(heads):
            m = None if mask is None else mask[b, h]
            a = _weights(q[b, h] * x.scale, x.k[b, h // x.group], m, is_causal)
            if rows is not None:
                a = a * rows.expand(batch, -1, -1)[b, 0, :, None]
            outs.append(_truncated(a, rank, x.v[b, h // x.group]))
    return torch.stack(outs).unflatten(0, (batch, heads)).to(x.dtype)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Exact attention matrix of one head, (Nq, Nk); rows that may attend to nothing are zero."""
    logits = q @ k.mT
    if mask is not None and mask.dtype is torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    if is_causal:
        logits = logits.masked_fill(~visible(q.shape[0], k.shape[0], 0, 1, q.device), -torch.inf)
    nothing = logits.amax(-1, keepdim=True) == -torch.inf
    return torch.softmax(logits.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)


def _truncated(a: Tensor, rank: int, v: Tensor) -> Tensor:
    """A_r v for a (Nq, Nk), v (Nk, E); rows of zeros stay zeros, without rounding."""
    left, sigma, right = torch.linalg.svd(a, full_matrices=False)
    out = (left[:, :rank] * sigma[:rank]) @ (right[:rank] @ v)
    return out.masked_fill(a.sum(-1, keepdim=True) == 0, 0.0)


@register
@dataclass(frozen=True)
class SVD(Method):
    """Options of `svd_attention`."""

    rank: int = 64
    info = INFO
    function = staticmethod(svd_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "rank", self.rank)

    def exact_at(self, length: int) -> SVD:
        return replace(self, rank=length)

    def cost(self, shape: Shape) -> Cost:
        r = min(self.rank, shape.queries, shape.keys)
        keys = shape.batch * shape.heads * shape.keys
        flops = 2 * shape.rows * shape.keys * shape.head_dim
        flops += 2 * r * shape.value_dim * (shape.rows + keys)
        weights = shape.rows * shape.keys * max(shape.itemsize, 4)
        return Cost(flops, shape.io + 2 * weights, None, units=r)
