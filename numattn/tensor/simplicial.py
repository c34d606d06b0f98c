r"""Third-order (2-simplicial) attention: every query weighs pairs of tokens.

The logits are a tensor of three modes, queries, keys k and second keys k', and a weight multiplies
the product of two values:

.. math:: s_{ijk} = \mathrm{scale}\, \sum_d q_{id}\, k_{jd}\, k'_{kd}, \qquad
          o_i = \sum_{jk} e^{s_{ijk} - \mathrm{lse}_i}\; v_j \odot v'_k .

For one second key this is ordinary attention of the query :math:`q_i \odot k'_k`. So the second
keys of a tile are folded into its queries, a matrix product gives the logits of all of them, and
what they find is merged by their log normalisers. Nothing else knows of the third mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import (
    Inputs,
    Unsupported,
    compute_dtype,
    fold,
    one_of,
    positive,
    prepare,
    unfold,
)
from numattn.core.layer import (
    AttentionLayer,
    LayerState,
    check_shared,
    check_sizes,
    heads,
    joined,
    layer_cost,
)
from numattn.core.linalg import finite
from numattn.core.partial import Partial
from numattn.core.registry import register_layer
from numattn.engines.softmax import key_bias
from numattn.engines.tiles import recompute, runs, spans, tile_elements

INFO = Info(
    name="simplicial",
    family="tensor",
    summary="softmax over pairs of tokens",
    paper="https://arxiv.org/abs/2507.02754",
    complexity="N w1 w2 (d + e)",
    budget=None,
    approximates="own",
    causal="native",
    mask="padding",
    decode=False,
)

_TAYLOR = replace(
    INFO,
    name="taylor_simplicial",
    summary="a Taylor series of the exponential, in which the sums over pairs separate",
    paper="https://arxiv.org/abs/2310.04064",
    complexity="N C(d + g, g) e",
)

_ROWS = 128  # rows of a tile before second keys are folded in
_CHUNKS = 8  # chunks of second keys whose weights a tile may hold at once in the backward

Form = Literal["trilinear", "determinant"]
Reach = tuple[int, int]  # positions before and after a row's own that it sees


def simplicial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key2: Tensor,
    value2: Tensor,
    *,
    window: tuple[int, int] | None = None,
    form: Form = "trilinear",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention over pairs of tokens, with products of two values.

    .. math:: s_{ijk} = \mathrm{scale}\; f(q_i, k_j, k'_k), \qquad
              o_i = \frac{\sum_{jk} e^{s_{ijk}}\, v_j \odot v'_k}{\sum_{jk} e^{s_{ijk}}} .

    The trilinear form is :math:`f(q, k, k') = \sum_d q_d k_d k'_d`. The determinant form sums, over
    consecutive chunks of three coordinates,

    .. math:: \det[q, k, k'] = q \cdot (k \times k') ,

    which does not change when the same rotation turns that chunk of q, k and k'. So rotations
    about one axis per chunk, by angles that grow with the position, give logits that depend on
    differences of positions only. Rotary embeddings do not do so in the trilinear form.

    The j of a pair lie in a window of w1 positions around i, and its k in one of w2:

    .. math:: i - w < \cdot \le i \ \text{(causal)}, \qquad
              i - \lfloor w/2 \rfloor \le \cdot < i - \lfloor w/2 \rfloor + w \ \text{(both ways)}.

    Args:
        query: q, (B, H, Nq, D).
        key: k, (B, Hk, Nk, D).
        value: v, (B, Hk, Nk, E).
        key2: k', (B, Hk, Nk, D), of the same tokens.
        value2: v', (B, Hk, Nk, E).
        window: (w1, w2), positive; None for all pairs of tokens, causally those at j, k <= i.
        form: "trilinear", or "determinant", which needs D divisible by 3.
        attn_mask: bool key padding (B, 1, 1, Nk), True = a token that exists. It speaks of both
            sets of keys. Padding is truncation: windows count the tokens that exist.
        is_causal: Position i attends to pairs of positions j, k <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: `simplicial_flops`, about 2 N w1 w2 (D + E) operations per head, 2 N^3 (D + E) without
    windows. Memory is that of a tile of rows against some second keys, and the inputs. Backward
    runs the forward again, and once more inside of a tile whose second keys are many.

    Exact when: always. With w2 = 1, k' = 1 and v' = 1 it is softmax attention in a window. It is
    softmax attention to the Nk^2 keys :math:`k_j \odot k'_k` with values :math:`v_j \odot v'_k`,
    which are never formed.

    Limits: without windows the work is cubic. Products of three numbers spread more than those of
    two, so logits of the usual scale are larger than in softmax attention. Products of half
    precision are computed in float32, where they do not overflow.

    Raises:
        TypeError: key2 or value2 is no tensor.
        ValueError: They do not have the shape, type and device of key and value; ``window`` is not
            a pair of positive integers; D is not divisible by 3 in the determinant form.
        Unsupported: ``window`` comes with different lengths of queries and keys.

    References:
        J. Clift, D. Doryn, D. Murfet and J. Wallbridge, "Logic and the 2-Simplicial Transformer",
        2019, https://arxiv.org/abs/1909.00668.

        A. Roy et al., "Fast and Simplex: 2-Simplicial Attention in Triton", 2025,
        https://arxiv.org/abs/2507.02754.

    Example:
        >>> q = k = k2 = torch.zeros(1, 1, 4, 2)
        >>> v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
        >>> simplicial_attention(q, k, v, k2, v, window=(2, 1), is_causal=True).flatten()
        tensor([ 1.0000,  3.0000,  7.5000, 14.0000])
    """
    tensors = (query, key, value, key2, value2)
    x, y = _prepare(INFO, tensors, attn_mask, is_causal, scale, enable_gqa)
    check_form(INFO.name, form, query.shape[3])
    if window is not None:
        check_window(INFO.name, window)
        if query.shape[2] != key.shape[2]:
            raise Unsupported(
                f"{INFO.name}: window needs as many queries as keys; got {query.shape[2]} and "
                f"{key.shape[2]}. Without a window, lengths may differ."
            )
    if x.empty:
        return x.nothing() + y.nothing()
    x, place = x.compact()
    y, _ = y.compact()
    out = _attend(
        _Plan(form, x.scale, x.group, _reaches(window, is_causal, x.k.shape[2])),
        x.q,
        (x.k, x.v, y.k, y.v),
        key_bias(x.padding, x.q),
    )
    return x.restore(out, place)


def simplicial_flops(shape: Shape, *, window: tuple[int, int] | None = None) -> int:
    """Operations of the matrix products of `simplicial_attention`, as torch's counter counts them.

    Folding second keys into queries, and products of values, are elementwise and not in it.

    Args:
        shape: Of the query, of both keys and of both values.
        window: As in `simplicial_attention`.

    Example:
        >>> shape = Shape(1, 1, 1, queries=10, keys=20, head_dim=3, value_dim=5)
        >>> simplicial_flops(shape) == 2 * 10 * 20**2 * (3 + 5)
        True
    """
    reach = _reaches(window, shape.is_causal, shape.keys)
    group = shape.heads // shape.kv_heads
    tiles = _tiles(shape.queries, (shape.keys, shape.keys), (0, 0), reach, group)
    triples = sum((t.t1 - t.t0) * (t.j1 - t.j0) * t.seconds for t in tiles)
    return 2 * shape.batch * shape.heads * triples * (shape.head_dim + shape.value_dim)


def _prepare(
    info: Info,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Inputs, Inputs]:
    """The checked call with key and value, and the same with key2 and value2."""
    query, key, value, key2, value2 = tensors
    x = prepare(info, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    for argument, second, first in (("key2", key2, key), ("value2", value2, value)):
        if not isinstance(second, Tensor):
            raise TypeError(
                f"{info.name}: {argument} must be a tensor; got {type(second).__name__}."
            )
        if second.shape != first.shape:
            raise ValueError(
                f"{info.name}: {argument} must have the shape of {argument[:-1]}, "
                f"{tuple(first.shape)}; got {tuple(second.shape)}."
            )
        if second.dtype != first.dtype or second.device != first.device:
            raise ValueError(
                f"{info.name}: query, keys and values must share type and device; {argument[:-1]} "
                f"is {first.dtype} on {first.device}, {argument} is {second.dtype} on "
                f"{second.device}."
            )
    return x, replace(x, k=key2.to(x.k.dtype), v=value2.to(x.v.dtype))


def check_form(name: str, form: str, head_dim: int) -> None:
    """Refuse a form of the logits that is not known, or not of this width."""
    one_of(name, "form", form, ("trilinear", "determinant"))
    if form == "determinant" and head_dim % 3:
        raise ValueError(
            f"{name}: form='determinant' needs a head size divisible by 3; got {head_dim}."
        )


def check_window(name: str, window: tuple[int, int]) -> None:
    """Refuse what is not a pair of positive integers."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{name}: window must be a pair (w1, w2); got {window!r}.")
    for w in window:
        positive(name, "window", w)


def _reaches(
    window: tuple[int, int] | None, is_causal: bool, length: int
) -> tuple[Reach, Reach] | None:
    """What a row sees of keys and of second keys; None for all."""
    if window is None:
        return ((length, 0), (length, 0)) if is_causal else None
    return _reach(window[0], is_causal), _reach(window[1], is_causal)


def _reach(w: int, is_causal: bool) -> Reach:
    left = w - 1 if is_causal else w // 2
    return left, w - 1 - left


@dataclass(frozen=True)
class _Plan:
    """What all tiles of a call have in common."""

    form: Form
    scale: float
    group: int
    reach: tuple[Reach, Reach] | None

    def fold(self, q: Tensor, k2: Tensor) -> Tensor:
        """The query whose product with a key is the form; both broadcast, (..., D)."""
        if self.form == "trilinear":
            return q * k2
        # det[q, k, k'] = k . (k' x q)
        k2, q = (x.unflatten(-1, (-1, 3)) for x in (k2, q))
        return torch.linalg.cross(k2, q).flatten(-2)


class _Tile(NamedTuple):
    """Rows at positions [t0, t1), their keys [j0, j1) and second keys [k0, k1).

    Row t of the tile stands at ``start + t`` counted from key j0. Its ``seconds`` second keys are
    those from ``start2 + t`` on, counted from k0; where it sees all, from 0 on.
    """

    t0: int
    t1: int
    j0: int
    j1: int
    k0: int
    k1: int
    start: int
    start2: int
    seconds: int


def _tiles(
    positions: int,
    kept: tuple[int, int],
    first: tuple[int, int],
    reach: tuple[Reach, Reach] | None,
    group: int,
) -> list[_Tile]:
    """Tiles of so many positions, the first of which are at ``first`` among what is kept."""
    (m1, m2), (f1, f2) = kept, first
    if reach is None:
        tall = max(_ROWS // group, 16)
        return [_Tile(t0, t1, 0, m1, 0, m2, 0, 0, m2) for t0, t1 in spans(positions, tall)]
    (l1, r1), (l2, r2) = reach
    # Lower tiles compute less outside of the windows.
    tall = max(min(_ROWS // group, (l1 + r1 + 1) // 8), 16)
    tiles = []
    for t0, t1 in spans(positions, tall):
        j0, j1 = max(0, f1 + t0 - l1), min(m1, f1 + t1 + r1)
        # Differences of positions at which some row of the tile finds a second key.
        least, most = max(-l2, -(f2 + t1 - 1)), min(r2, m2 - 1 - f2 - t0)
        k0, k1 = max(0, f2 + t0 + least), min(m2, f2 + t1 + most)
        start2 = f2 + t0 + least - k0
        tiles.append(_Tile(t0, t1, j0, j1, k0, k1, f1 + t0 - j0, start2, most - least + 1))
    return tiles


def _attend(
    plan: _Plan,
    q: Tensor,
    sides: tuple[Tensor, Tensor, Tensor, Tensor],
    bias: Tensor | None = None,
    first: tuple[int, int] = (0, 0),
) -> Tensor:
    """Rows (B, Hk, n * group, D) over k, v, k', v': (B, Hk, n * group, E).

    Args:
        plan: Form, windows, group.
        q: Queries, positions first.
        sides: k, v, k', v'.
        bias: -inf where a token does not exist, else 0, (B or 1, 1, Nk); for both sets of keys.
        first: Position of row 0 counted from the first key, and from the first second key.
    """
    kept = (sides[0].shape[2], sides[2].shape[2])
    tiles = _tiles(q.shape[2] // plan.group, kept, first, plan.reach, plan.group)
    near, far = [(t.j0, t.j1) for t in tiles], [(t.k0, t.k1) for t in tiles]
    kinds = [runs(x, cuts) for x, cuts in zip(sides, (near, near, far, far), strict=True)]
    rows = q.split([(t.t1 - t.t0) * plan.group for t in tiles], 2)
    parts = []
    for tile, own, *some in zip(tiles, rows, *kinds, strict=True):
        strip = partial(_strip, plan, tile, bias, len(some[0]), len(some[2]))
        pieces = [piece for run in some for piece in run]
        parts.append(Partial(*recompute(strip, own, *pieces)))
    return Partial.cat(parts, 2).out()


def _strip(
    plan: _Plan, tile: _Tile, bias: Tensor | None, n1: int, n2: int, q: Tensor, *pieces: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's rows over all of its pairs, some second keys at a time."""
    k, v = torch.cat(pieces[:n1], 2), torch.cat(pieces[n1 : 2 * n1], 2)
    k2, v2 = torch.cat(pieces[2 * n1 : -n2], 2), torch.cat(pieces[-n2:], 2)
    log2 = q.new_zeros((1, 1, k2.shape[2])) if bias is None else bias[..., tile.k0 : tile.k1]
    height = None
    if plan.reach is not None:
        height = tile.t1 - tile.t0
        room = (-tile.start2, height + tile.seconds - 1 + tile.start2 - k2.shape[2])
        k2, v2 = (F.pad(x, (0, 0, *room)) for x in (k2, v2))
        log2 = F.pad(log2, room, value=-torch.inf)
    hidden = None if bias is None else bias[..., None, tile.j0 : tile.j1]
    many, wide = _sizes(q, k, v)
    chunk = partial(_chunk, plan, tile, hidden, wide)
    chunks = spans(tile.seconds, many)
    call: Callable[..., tuple[Tensor, Tensor, Tensor]]
    call = partial(recompute, chunk) if len(chunks) > _CHUNKS else chunk
    part = Partial.zeros(q.shape[:3], v.shape[3], q)
    q = q * plan.scale
    for c0, c1 in chunks:
        own = (_partners(x, c0, c1, height) for x in (k2, v2, log2[..., None]))
        part = part.merge(Partial(*call(q, k, v, *own)))
    return part.num, part.den, part.shift


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Second keys that are folded in at a time, and keys of a product, for one tile's memory."""
    room = tile_elements(q.device) // max(q.shape[0] * q.shape[1] * q.shape[2], 1)
    many = max(room // max(min(k.shape[2], 512), k.shape[3], v.shape[3]), 1)
    return many, max(room // many, 64)


def _partners(x: Tensor, c0: int, c1: int, height: int | None) -> Tensor:
    """Second keys [c0, c1) of every position, (B, Hk, positions or 1, 1, c1 - c0, width).

    Those of a position begin one later than those of the position before it; with ``height`` None
    all see the same.
    """
    if height is None:
        return x[:, :, None, None, c0:c1]
    return x[:, :, c0 : c1 + height - 1].unfold(2, c1 - c0, 1).mT[:, :, :, None]


def _chunk(
    plan: _Plan,
    tile: _Tile,
    hidden: Tensor | None,
    wide: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2: Tensor,
    v2: Tensor,
    log2: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's rows over pairs of its keys and some second keys, which become rows themselves."""
    rows = q.unflatten(2, (-1, plan.group))[:, :, :, :, None]  # (B, Hk, T, g, 1, D)
    folded = plan.fold(rows, k2)  # (B, Hk, T, g, C, D)
    shape, folded = folded.shape[2:5], folded.flatten(2, 4)
    part: Partial | None = None
    for c0, c1 in spans(k.shape[2], wide):
        logits = folded @ k[:, :, c0:c1].mT
        if hidden is not None:
            logits = logits.add_(hidden[..., c0:c1])
        band = _band(plan, tile, c0, c1, q)
        if band is not None:
            logits = logits.add_(band.repeat_interleave(shape[1] * shape[2], 0))
        some = Partial.from_logits(logits, v[:, :, c0:c1])
        part = some if part is None else part.merge(some)
    assert part is not None  # callers return early on empty inputs
    num, den, shift = (x.unflatten(2, shape) for x in (part.num, part.den, part.shift))
    shift = shift + log2[..., 0]
    top = shift.amax(-1)  # (B, Hk, T, g)
    weight = (shift - finite(top)[..., None]).exp()
    num, den = (num * weight[..., None] * v2).sum(-2), (den * weight).sum(-1)
    return num.flatten(2, 3), den.flatten(2, 3), top.flatten(2, 3)


def _band(plan: _Plan, tile: _Tile, c0: int, c1: int, like: Tensor) -> Tensor | None:
    """-inf outside of a position's window, (T, c1 - c0), for keys [c0, c1) of the tile's run."""
    if plan.reach is None:
        return None
    (left, right), height = plan.reach[0], tile.t1 - tile.t0
    if tile.start + height - 1 - left <= c0 and c1 - 1 <= tile.start + right:
        return None
    i = tile.start + torch.arange(height, device=like.device)[:, None]
    j = torch.arange(c0, c1, device=like.device)
    seen = (j >= i - left) & (j <= i + right)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, -torch.inf)


def taylor_simplicial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key2: Tensor,
    value2: Tensor,
    *,
    degree: int = 2,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Third-order attention in linear time, with a polynomial in place of the exponential.

    The Taylor polynomial of the trilinear form is a sum over the monomials of degree at most g, and
    in each of them the sums over j and over k separate:

    .. math:: \sum_{t \le g} \frac{s_{ijk}^t}{t!}
              = \sum_{|\alpha| \le g} c_\alpha\, q_i^\alpha\, k_j^\alpha\, k_k'^\alpha, \qquad
              c_\alpha = \frac{\mathrm{scale}^{|\alpha|}}{\alpha!},

    .. math:: \mathrm{num}_i = \sum_\alpha c_\alpha\, q_i^\alpha
              \Big(\sum_j k_j^\alpha v_j\Big) \odot \Big(\sum_k k_k'^\alpha v'_k\Big) .

    The denominator is the same with values of one. Causal sums run over j <= i and k <= i.

    Args:
        query: q, (B, H, Nq, D).
        key: k, (B, Hk, Nk, D).
        value: v, (B, Hk, Nk, E).
        key2: k', (B, Hk, Nk, D), of the same tokens.
        value2: v', (B, Hk, Nk, E).
        degree: g, positive.
        attn_mask: bool key padding (B, 1, 1, Nk), True = a token that exists, for both sets.
        is_causal: Position i attends to pairs of positions j, k <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: F = C(D + g, g) monomials. 2 F (E + 1) (Nq + 2 Nk) operations per head when not causal;
    causally the running sums, of F (E + 1) numbers per position, are elementwise and in tiles.

    Exact when: never for the exponential, always for its Taylor polynomial. The error of a weight
    is at most :math:`e^{|s|} |s|^{g+1} / (g+1)!`, so that small logits converge in g.

    Limits: logits must be small: with entries of q, k and k' below :math:`o((\log N)^{1/3})` a
    polynomial does in almost linear time what above that bound needs cubic time, if the strong
    exponential time hypothesis holds. The number of monomials grows like D^g. Weights are positive
    where g is even; where it is odd they may cancel, and denominators are divided by as they are.

    Raises:
        TypeError: key2 or value2 is no tensor.
        ValueError: They do not have the shape, type and device of key and value; ``degree`` is not
            a positive integer.

    References:
        J. Alman and Z. Song, "How to Capture Higher-order Correlations? Generalizing Matrix Softmax
        Attention to Kronecker Computation", 2023, https://arxiv.org/abs/2310.04064.

    Example:
        >>> q, k, k2 = (0.1 * torch.ones(1, 1, 4, 2) for _ in range(3))
        >>> v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
        >>> taylor_simplicial_attention(q, k, v, k2, v, is_causal=True).flatten()
        tensor([1.0000, 2.2500, 4.0000, 6.2500])
    """
    tensors = (query, key, value, key2, value2)
    x, y = _prepare(_TAYLOR, tensors, attn_mask, is_causal, scale, enable_gqa)
    positive(_TAYLOR.name, "degree", degree)
    if x.empty:
        return x.nothing() + y.nothing()
    phi = _Monomials.of(query.shape[3], degree, x.scale, x.q)
    sides = (x.k, _with_one(x.v, x.padding), y.k, _with_one(y.v, x.padding))
    out = _taylor_causal(phi, x.group, x.q, *sides) if is_causal else _taylor(phi, x.q, *sides)
    num, den = out[..., :-1], out[..., -1]
    return x.restore(Partial(num, den, torch.zeros_like(den)).out())


def _with_one(v: Tensor, padding: Tensor | None) -> Tensor:
    """Values with a column of ones for the denominator; zero where a token does not exist."""
    v = F.pad(v, (0, 1), value=1.0)
    return v if padding is None else v.masked_fill(~padding[..., None], 0.0)


@dataclass(frozen=True)
class _Monomials:
    """All monomials of degree at most g in D variables: those of degree g in these and 1.

    Attributes:
        index: Factors of every monomial among (1, x), int (F, g).
        factor: c, (F,).
    """

    index: Tensor
    factor: Tensor

    @classmethod
    def of(cls, width: int, degree: int, scale: float, like: Tensor) -> _Monomials:
        index = list(combinations_with_replacement(range(width + 1), degree))
        factor = [
            prod(scale ** m.count(d) / factorial(m.count(d)) for d in set(m) - {0}) for m in index
        ]
        return cls(torch.tensor(index, device=like.device), like.new_tensor(factor))

    def __call__(self, x: Tensor) -> Tensor:
        """Of tokens (..., D): (..., F)."""
        x = F.pad(x, (1, 0), value=1.0)
        out = x[..., self.index[:, 0]]
        for column in self.index.T[1:]:
            out = out * x[..., column]
        return out


def _taylor(phi: _Monomials, q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor) -> Tensor:
    """Numerators and denominators of all rows, when not causal."""
    step = _taylor_tile(phi, q, 1)
    total = _moments(phi, step, k, v) * _moments(phi, step, k2, v2)  # (B, Hk, F, E + 1)

    def read(rows: Tensor, total: Tensor) -> Tensor:
        return (phi(rows) * phi.factor) @ total

    return torch.cat([recompute(read, rows, total) for rows in q.split(step, 2)], 2)


def _moments(phi: _Monomials, step: int, k: Tensor, v: Tensor) -> Tensor:
    """Sums of monomials times values, (B, Hk, F, E + 1)."""

    def add(keys: Tensor, values: Tensor) -> Tensor:
        return phi(keys).mT @ values

    total = k.new_zeros((*k.shape[:2], len(phi.factor), v.shape[3]))
    for keys, values in zip(k.split(step, 2), v.split(step, 2), strict=True):
        total = total + recompute(add, keys, values)
    return total


def _taylor_causal(
    phi: _Monomials, group: int, q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor
) -> Tensor:
    """Numerators and denominators of all rows, from running sums over the tokens before them."""
    step = _taylor_tile(phi, q, v.shape[3])

    def run(
        rows: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor, one: Tensor, two: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = one + (phi(k)[..., None] * v[..., None, :]).cumsum(2)  # (B, Hk, T, F, E + 1)
        second = two + (phi(k2)[..., None] * v2[..., None, :]).cumsum(2)
        left = (phi(rows) * phi.factor).unflatten(2, (-1, group))  # (B, Hk, T, g, F)
        out = left @ (first * second)
        return out.flatten(2, 3), first[:, :, -1:], second[:, :, -1:]

    one = two = k.new_zeros((*k.shape[:2], 1, len(phi.factor), v.shape[3]))
    outs = []
    tokens = [x.split(step, 2) for x in (k, v, k2, v2)]
    for rows, *some in zip(q.split(step * group, 2), *tokens, strict=True):
        out, one, two = recompute(run, rows, *some, one, two)
        outs.append(out)
    return torch.cat(outs, 2)


def _taylor_tile(phi: _Monomials, q: Tensor, width: int) -> int:
    """Tokens of a tile with so many numbers per monomial."""
    elements = q.shape[0] * q.shape[1] * len(phi.factor) * width
    return max(tile_elements(q.device) // max(elements, 1), 16)


class SimplicialState(LayerState):
    """The last w1 keys and values, and the last w2 second keys and values.

    Example:
        >>> empty = torch.zeros(1, 1, 0, 4)
        >>> state = SimplicialState((3, 2), key=empty, value=empty, key2=empty, value2=empty)
        >>> new = torch.ones(1, 1, 5, 4)
        >>> seen = state.append(key=new, value=new, key2=new, value2=new)
        >>> state.length, state["key"].shape[2], state["key2"].shape[2]
        (5, 3, 2)
    """

    def __init__(
        self, window: tuple[int, int], *, key: Tensor, value: Tensor, key2: Tensor, value2: Tensor
    ) -> None:
        """Start with tensors (B, Hk, 0, width)."""
        self._kept = {"key": key, "value": value, "key2": key2, "value2": value2}
        self._places = dict(zip(self._kept, (window[0], window[0], *window[1:] * 2), strict=True))
        self._length = 0

    def append(
        self, *, key: Tensor, value: Tensor, key2: Tensor, value2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take in tokens (B, Hk, n, width); return what was kept with them after it."""
        news = {"key": key, "value": value, "key2": key2, "value2": value2}
        seen = {n: torch.cat([self._kept[n], x.detach()], 2) for n, x in news.items()}
        for name, x in seen.items():
            late = x.shape[2] > self._places[name]
            self._kept[name] = x[:, :, -self._places[name] :].clone() if late else x
        self._length += key.shape[2]
        return seen["key"], seen["value"], seen["key2"], seen["value2"]

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name]

    @property
    def length(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self._kept.values())


@register_layer
class SimplicialAttention(AttentionLayer):
    r"""Third-order attention in two windows, with keys and values of two kinds per token.

    .. math:: o_i = \sum_{jk} A_{ijk}\, v_j \odot v'_k, \qquad
              A_i = \mathrm{softmax}_{jk}\; \mathrm{scale}\, f(q_i, k_j, k'_k),
              \qquad i - w_1 < j \le i, \quad i - w_2 < k \le i .

    The forms f, and the windows of a call that is not causal, are those of `simplicial_attention`.

    Parameters: ``q_proj`` (H D, embed_dim), ``k_proj`` and ``k2_proj`` (Hk D, embed_dim),
    ``v_proj`` and ``v2_proj`` (Hk E, embed_dim), ``o_proj`` (embed_dim, H E).

    Cost: the projections, and `simplicial_flops`. Decoding keeps Hk (D + E) numbers for each of the
    last w1 tokens and each of the last w2, whatever the length.

    Exact when: always.

    Limits: there is no rotation, and positions come from elsewhere, such as layers of ordinary
    attention in between: rotary embeddings do not make the trilinear form a function of differences
    of positions. Nothing outside of the windows is seen. Tokens that a state holds have no
    gradient.

    References:
        J. Clift, D. Doryn, D. Murfet and J. Wallbridge, "Logic and the 2-Simplicial Transformer",
        2019, https://arxiv.org/abs/1909.00668.

        A. Roy et al., "Fast and Simplex: 2-Simplicial Attention in Triton", 2025,
        https://arxiv.org/abs/2507.02754.

    Example:
        >>> layer = SimplicialAttention(32, 4, kv_heads=1, head_dim=8, window=(6, 3))
        >>> state = layer.state()
        >>> layer(torch.randn(1, 10, 32), state=state).shape
        torch.Size([1, 10, 32])
        >>> state["key"].shape, state["key2"].shape
        (torch.Size([1, 1, 6, 8]), torch.Size([1, 1, 3, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        window: tuple[int, int] = (512, 32),
        form: Form = "trilinear",
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        """Make the projections, drawn as `torch.nn.Linear` draws.

        Args:
            embed_dim: Width of the hidden states.
            num_heads: H.
            kv_heads: Hk, a divisor of H.
            head_dim: D, width of a query and of both keys.
            value_dim: E, width of both values; D when None.
            window: (w1, w2), the windows of keys and of second keys.
            form: "trilinear", or "determinant", which needs D divisible by 3.
            bias: Of all projections.
            scale: Factor of the logits; by default D ** -0.5.
        """
        super().__init__()
        name = type(self).__name__
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes(name, embed_dim=embed_dim, head_dim=head_dim, value_dim=value_dim)
        check_shared(name, num_heads, "kv_heads", kv_heads)
        check_window(name, window)
        check_form(name, form, head_dim)
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.window, self.form = (window[0], window[1]), form
        self.scale = head_dim**-0.5 if scale is None else scale
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, kv_heads * value_dim, bias=bias)
        self.k2_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias)
        self.v2_proj = nn.Linear(embed_dim, kv_heads * value_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        state: LayerState | None = None,
    ) -> Tensor:
        self._check(hidden, attn_mask, state)
        if hidden.shape[1] == 0:
            return hidden
        q = heads(self.q_proj(hidden), self.num_heads)  # (B, H, n, D)
        k, v, k2, v2 = (
            heads(proj(hidden), self.kv_heads)  # (B, Hk, n, D or E)
            for proj in (self.k_proj, self.v_proj, self.k2_proj, self.v2_proj)
        )
        if state is not None:
            own = self._own(state, len(hidden))
            sides = own.append(key=k, value=v, key2=k2, value2=v2)
            return self.o_proj(joined(self._after(q, sides)))
        out = simplicial_attention(
            q,
            k,
            v,
            k2,
            v2,
            window=self.window,
            form=self.form,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=True,
        )
        return self.o_proj(joined(out))

    def _after(self, q: Tensor, sides: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Queries of the last tokens over what is kept of all: (B, H, n, E)."""
        dtype, group = compute_dtype(q.dtype), self.num_heads // self.kv_heads
        k, v, k2, v2 = (x.to(dtype) for x in sides)
        reach = _reaches(self.window, True, k.shape[2])
        plan = _Plan(self.form, self.scale, group, reach)
        first = (k.shape[2] - q.shape[2], k2.shape[2] - q.shape[2])
        out = _attend(plan, fold(q, group).to(dtype), (k, v, k2, v2), first=first)
        return unfold(out, group).to(q.dtype)

    def _own(self, state: LayerState, batch: int) -> SimplicialState:
        """Refuse a state that is not of this layer."""
        name = type(self).__name__
        if not isinstance(state, SimplicialState):
            raise TypeError(f"{name}: state must be one that {name}.state made; got {state!r}.")
        if len(state["key"]) != batch:
            raise ValueError(
                f"{name}: the state holds {len(state['key'])} sequences, hidden has {batch}; "
                f"make it with {name}.state({batch})."
            )
        return state

    def state(self, batch: int = 1) -> SimplicialState:
        """A state without tokens: two keys (B, Hk, 0, D) and two values (B, Hk, 0, E)."""
        key = self.o_proj.weight.new_empty((batch, self.kv_heads, 0, self.head_dim))
        value = key.new_empty((batch, self.kv_heads, 0, self.value_dim))
        return SimplicialState(self.window, key=key, value=value, key2=key, value2=value)

    def cost(self, batch: int, length: int, *, is_causal: bool = True) -> Cost:
        """What a call without a state costs, as `AttentionLayer.cost`.

        The cache does not grow beyond the windows.
        """
        shape = Shape(
            1,
            self.num_heads,
            self.kv_heads,
            length,
            length,
            self.head_dim,
            self.value_dim,
            is_causal,
        )
        products = simplicial_flops(shape, window=self.window) // 2
        width = self.kv_heads * (self.head_dim + self.value_dim)
        kept = sum(min(w, length) for w in self.window)
        cache = batch * width * kept * self.o_proj.weight.element_size()
        return replace(layer_cost(self, batch, length, products, 2 * width), cache=cache)
