"""Polynomial attention: an even power of the logits in the place of the exponential."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from numattn.core.cost import Cost, Shape, visible_pairs
from numattn.core.info import Info
from numattn.core.inputs import Inputs, prepare
from numattn.core.masks import visible
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import KeysState, State
from numattn.engines.tiles import recompute, spans, tile_elements

INFO = Info(
    name="polynomial",
    family="kernel",
    summary="exact attention with weights (q.k)^p of even degree p, computed row by row",
    paper="https://arxiv.org/abs/2310.01655",
    complexity="N^2 (d + e)",
    budget=None,
    approximates="own",
    causal="native",
    mask="padding",
)

_LEAST_ROWS = 32  # of a tile: fewer would read the keys too often
_MOST_POSITIONS = 256  # of a tile: more would compute too much beyond the diagonal


def polynomial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    degree: int = 4,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention whose weights are an even power of the logits.

    With :math:`u_{ij} = \mathrm{scale}\; q_i \cdot k_j` and even p,

    .. math:: o_i = \frac{\sum_j u_{ij}^p\, v_j}{\sum_j u_{ij}^p} .

    Powers are taken of :math:`u_{ij} / \max_l |u_{il}|`, which changes no weight. So nothing
    overflows at any size of the logits and of p, terms that underflow are negligible in their row,
    and the gradient is that of a polynomial, also where a logit is zero. No 1 is added to the
    denominator, as PolySketchFormer does to be safe from small sums.

    The weights are an inner product of the :math:`\binom{d + p - 1}{p}` monomials of degree p in
    the entries of q and of k, so the matrix of weights has no higher rank, and a key and its
    negative weigh the same.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        degree: p, even and positive.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5. It cancels, unless it is 0, which leaves no
            weights.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing, and for
        one that is orthogonal to every key it sees: all its weights are zero.

    Cost: as exact attention, 2 Nq Nk (D + E) operations per head, half of it when causal. Memory
    is that of one tile of rows by Nk. Decoding keeps every key and value.

    Exact when: always; the formula is the definition. It does not converge to softmax.

    Limits: quadratic time, so it is the target of polynomial sketches, not a saving. In the place
    of a trained softmax layer it is another model, which has to be trained, usually with queries
    and keys that are normalised. The power makes small relative errors p times larger: rounding
    of a logit too. Near a query that is orthogonal to all keys the output jumps.

    Raises:
        ValueError: ``degree`` is not an even positive integer.
        Unsupported: A mask other than key padding.

    References:
        P. Kacham, V. Mirrokni and P. Zhong, "PolySketchFormer: Fast Transformers via Sketching
        Polynomial Kernels", 2024, https://arxiv.org/abs/2310.01655.

    Example:
        >>> q = torch.tensor([[[[1.0, 1.0]]]])
        >>> k = torch.tensor([[[[1.0, 0.0], [-1.0, -1.0]]]])
        >>> v = torch.tensor([[[[0.0], [1.0]]]])
        >>> polynomial_attention(q, k, v, degree=2)  # weights 1 and 4
        tensor([[[[0.8000]]]])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(degree)
    if x.empty:
        return x.nothing()
    outs = []
    for r0, r1 in spans(x.q.shape[2], _tile_rows(x)):
        last = (r1 - 1) // x.group + 1 if is_causal else x.k.shape[2]
        tile = partial(_tile, degree, x.scale, r0 // x.group if is_causal else None, x.group)
        exists = None if x.padding is None else x.padding[..., :last]
        outs.append(recompute(tile, x.q[:, :, r0:r1], x.k[:, :, :last], x.v[:, :, :last], exists))
    return x.restore(torch.cat(outs, 2))


def _tile(
    degree: int,
    scale: float,
    start: int | None,
    group: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exists: Tensor | None,
) -> Tensor:
    """A tile of rows over all keys; `start` is the position of its first row when causal."""
    products = (q * scale) @ k.mT  # (B, H, rows, M)
    if exists is not None:
        products = products.masked_fill_(~exists[..., None, :], 0.0)
    if start is not None:
        seen = visible(q.shape[2], k.shape[2], start, group, q.device)
        products = products.masked_fill_(~seen, 0.0)
    return power_attention(products, v, degree)


def power_attention(products: Tensor, v: Tensor, degree: int) -> Tensor:
    """Rows of weights that are powers of products (B, H, rows, M), zero where a key is not seen.

    `v` is (B, H, M, E). Returns (B, H, rows, E), zeros for a row of zeros.
    """
    peak = products.detach().abs().amax(-1, keepdim=True)
    weight = _power(products / peak.masked_fill(peak == 0, 1.0), degree)
    total = weight.sum(-1, keepdim=True)  # at least 1, or 0
    return weight @ v / total.masked_fill(total == 0, 1.0)


def _power(x: Tensor, degree: int) -> Tensor:
    """Even powers by repeated squaring: torch's pow takes several times as long."""
    square = power = x.square()
    for bit in bin(degree // 2)[3:]:
        power = power.square()
        if bit == "1":
            power = power * square
    return power


def _tile_rows(x: Inputs) -> int:
    """Rows of a tile, a multiple of the group."""
    batch, heads, keys, _ = x.k.shape
    positions = max(tile_elements(x.k.device) // (batch * heads * keys), _LEAST_ROWS) // x.group
    return min(max(positions, 1), _MOST_POSITIONS) * x.group


def _check_options(degree: int) -> None:
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 2 or degree % 2:
        raise ValueError(
            f"polynomial: degree must be an even positive integer, for odd powers have negative "
            f"weights; got {degree!r}."
        )


@register
@dataclass(frozen=True)
class Polynomial(Method):
    """Options of `polynomial_attention`."""

    degree: int = 4
    info = INFO
    function = staticmethod(polynomial_attention)

    def __post_init__(self) -> None:
        _check_options(self.degree)

    def cost(self, shape: Shape) -> Cost:
        d, e = shape.head_dim, shape.value_dim
        flops = 2 * visible_pairs(shape) * (d + e)
        cache = shape.batch * shape.kv_heads * shape.keys * (d + e) * shape.itemsize
        return Cost(flops, shape.io, cache, units=shape.keys)

    def state(
        self,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **tensors: Tensor,
    ) -> State:
        self.refuse(tensors)
        return KeysState(self, key, value, scale=scale, enable_gqa=enable_gqa)
