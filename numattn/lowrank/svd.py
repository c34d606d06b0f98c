"""Truncated SVD: the best attention matrix of a given rank, as an oracle for the family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, one_of, positive, prepare, unfold
from numattn.core.linalg import draw
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.engines.operator import WeightsOperator

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

_DENSE_UP_TO = 2048
_OVERSAMPLING = 10
_POWER_STEPS = 2


def svd_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 64,
    algorithm: Literal["auto", "dense", "randomised"] = "auto",
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

    Long matrices are not formed: a range of r + 10 dimensions is found from products with A and
    its transpose (a randomised range finder with two power steps), and A is truncated within it.
    `attention_spectrum` gives the singular values and the error of every rank up to r.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: r, positive; more than min(Nq, Nk) is the same as that.
        algorithm: ``"dense"`` factors the matrix, ``"randomised"`` works through products with it,
            ``"auto"`` is dense where min(Nq, Nk) is at most 2048 or 3 (r + 10).
        attn_mask: bool (True = attend) or float to add to the logits, broadcastable to
            (B, H, Nq, Nk); may be combined with ``is_causal``. Key padding is taken to speak of
            the queries too when there are as many: their rows are left out of the matrix, and
            their outputs are zeros.
        is_causal: Truncate the matrix of causal attention; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Each query head has a matrix of its own.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: Dense: 2 Nq Nk (D + Nq + r) + 2 r E (Nq + Nk) operations per query head for the products,
    and an eigendecomposition of an Nq x Nq matrix on top, in float64 and the memory of a few
    matrices, one head at a time. Randomised: six products with A of r + 10 columns, 2 Nq Nk (D + r
    + 10) each, and memory that grows with (Nq + Nk) r.

    Exact when: r >= min(Nq, Nk), or A has rank r.

    Limits: an oracle. It computes every weight on purpose. The truncation of a causal matrix is
    not causal: it has weights above the diagonal. Rows do not sum to one, weights may be negative,
    and the least error of the weights is not the least error of the output for a given value. The
    error of the randomised form is above the best by 0 to 2.2 % on heads of trained models (512
    tokens, ranks 16 and 64), most where singular values hardly fall; its start is a fixed draw, so
    that it repeats itself. No gradient: that of a singular subspace is undefined where singular
    values repeat.

    Raises:
        Unsupported: A gradient is wanted.

    References:
        C. Eckart, G. Young, "The approximation of one matrix by another of lower rank", 1936,
        https://doi.org/10.1007/BF02288367.
        N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", 2011,
        https://arxiv.org/abs/0909.4061.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
        >>> svd_attention(q, k, v, rank=3).shape
        torch.Size([1, 2, 6, 4])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(rank, algorithm)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise Unsupported(
            "svd has no gradient; call it under torch.no_grad() or on detached tensors."
        )
    if x.empty:
        return x.nothing()
    outs = []
    for b, h, a in _matrices(x, attn_mask):
        left, right = _factors(a, rank, algorithm)
        out = left @ (right @ x.v[b, h // x.group].to(right))
        # Rows of zeros stay zeros, without rounding.
        outs.append(out.masked_fill(a.empty_rows()[:, None], 0.0))
    return torch.stack(outs).unflatten(0, x.shape[:2]).to(x.dtype)


@dataclass(frozen=True)
class Spectrum:
    """Singular values of exact attention matrices.

    Attributes:
        sigma: (B, H, r), the largest singular values, falling.
        norm: (B, H), Frobenius norm of the matrix.
    """

    sigma: Tensor
    norm: Tensor

    @property
    def tail(self) -> Tensor:
        """Least Frobenius error of ranks 0, 1, ..., r: (B, H, r + 1)."""
        kept = torch.cat([torch.zeros_like(self.norm)[..., None], self.sigma.square()], -1)
        return (self.norm[..., None].square() - kept.cumsum(-1)).clamp(min=0).sqrt()


@torch.no_grad()
def attention_spectrum(
    query: Tensor,
    key: Tensor,
    *,
    rank: int,
    algorithm: Literal["auto", "dense", "randomised"] = "auto",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Spectrum:
    """The largest singular values of exact attention, and the error of the best truncations.

    By Eckart and Young the squared error of the best rank-r matrix is what the r largest squared
    singular values leave of the squared Frobenius norm, so no other singular value is needed. The
    difference is accurate to about 1e-8 of the norm: smaller tails are rounding. A randomised
    singular value is never above the true one, so its tail is never below the true one.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        rank: r, how many singular values.
        algorithm: As in `svd_attention`.
        attn_mask: As in `svd_attention`.
        is_causal: As in `svd_attention`.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        The spectrum, in float64 whatever the type of the inputs.
    """
    query, key = query.double(), key.double()
    x = prepare(INFO, query, key, key, attn_mask, is_causal, scale, enable_gqa)
    _check_options(rank, algorithm)
    sigmas, norms = [], []
    for _, _, a in _matrices(x, attn_mask):
        sigmas.append(_factors(a, rank, algorithm)[1].norm(dim=-1))
        norms.append(a.norm())
    sigma, norm = (torch.stack(parts).unflatten(0, x.shape[:2]) for parts in (sigmas, norms))
    return Spectrum(sigma, norm)


def _matrices(x: Inputs, attn_mask: Tensor | None) -> Iterator[tuple[int, int, WeightsOperator]]:
    """The attention matrix of every batch entry and query head."""
    batch, heads, queries, _ = x.shape
    q = unfold(x.q, x.group)
    exists = None if x.query_padding is None else x.padding
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, queries, x.k.shape[2])
    for b in range(batch):
        for h in range(heads):
            yield (
                b,
                h,
                WeightsOperator(
                    q[b, h],
                    x.k[b, h // x.group],
                    scale=x.scale,
                    mask=None if mask is None else mask[b, h],
                    is_causal=x.is_causal,
                    exists=None if exists is None else exists.expand(batch, -1, -1)[b, 0],
                ),
            )


def _factors(a: WeightsOperator, rank: int, algorithm: str) -> tuple[Tensor, Tensor]:
    """U (Nq, r) and U^T A = Sigma V^T (r, Nk) of the best rank-r approximation of a."""
    width = rank + _OVERSAMPLING
    if algorithm == "dense" or (algorithm == "auto" and _is_dense(a.shape, width)):
        matrix = a.dense().double()
        left = _leading(matrix, rank)
        return left, left.mT @ matrix
    basis = _range(a, width)
    within = a.transposed(basis).mT.double()  # Q^T A
    small = _leading(within, rank)
    return basis.double() @ small, small.mT @ within


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """Leading left singular vectors of a float64 matrix (n, M): (n, r).

    They are eigenvectors of its Gram matrix: squaring costs accuracy only among singular values
    below 1e-8 of the largest.
    """
    return torch.linalg.eigh(matrix @ matrix.mT).eigenvectors.flip(-1)[:, :rank]


def _is_dense(shape: tuple[int, int], width: int) -> bool:
    """Whether "auto" factors the matrix itself."""
    return min(shape) <= max(_DENSE_UP_TO, 3 * width)


def _range(a: WeightsOperator, width: int) -> Tensor:
    """Orthonormal columns that nearly span what A maps most strongly onto."""
    width = min(width, *a.shape)
    start = draw((a.shape[1], width), Generator().manual_seed(0), a.device)
    basis = torch.linalg.qr(a.matmul(start.to(a.dtype))).Q
    for _ in range(_POWER_STEPS):
        basis = torch.linalg.qr(a.transposed(basis)).Q
        basis = torch.linalg.qr(a.matmul(basis)).Q
    return basis


def _check_options(rank: int, algorithm: str) -> None:
    positive(INFO.name, "rank", rank)
    one_of(INFO.name, "algorithm", algorithm, ("auto", "dense", "randomised"))


@register
@dataclass(frozen=True)
class SVD(Method):
    """Options of `svd_attention`."""

    rank: int = 64
    algorithm: Literal["auto", "dense", "randomised"] = "auto"
    info = INFO
    function = staticmethod(svd_attention)

    def __post_init__(self) -> None:
        _check_options(self.rank, self.algorithm)

    def exact_at(self, length: int) -> SVD:
        return replace(self, rank=length)

    def cost(self, shape: Shape) -> Cost:
        r = min(self.rank, shape.queries, shape.keys)
        keys = shape.batch * shape.heads * shape.keys
        pairs, width = 2 * shape.rows * shape.keys, self.rank + _OVERSAMPLING
        flops = 2 * r * shape.value_dim * (shape.rows + keys)
        weights = shape.rows * shape.keys * max(shape.itemsize, 4)
        size = (shape.queries, shape.keys)
        if self.algorithm == "dense" or (self.algorithm == "auto" and _is_dense(size, width)):
            flops += pairs * (shape.head_dim + shape.queries + r)
            return Cost(flops, shape.io + 2 * weights, None, units=r)
        width = min(width, *size)
        flops += (2 + 2 * _POWER_STEPS) * pairs * (shape.head_dim + width)
        flops += 2 * shape.rows * width * width
        return Cost(flops, shape.io, None, units=r)
