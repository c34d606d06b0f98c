"""Skyformer: attention through a Nystrom completion of the Gaussian kernel of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import Inputs, fold, one_of, positive, prepare, unfold
from numattn.core.linalg import exp_, finite, masked_mean, take
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.lift import (
    PROBES,
    StreamingState,
    Summary,
    compressed,
    leaf_flops,
    lift_summaries,
    split_points,
    streaming_bytes,
)
from numattn.engines.pivots import BLOCK, gaussian_pivots, pivot_flops
from numattn.engines.softmax import key_bias, softmax_attention, softmax_partial
from numattn.engines.tiles import recompute, spans, tile_elements

INFO = Info(
    name="skyformer",
    family="lowrank",
    summary="Nystrom completion of the Gaussian kernel over queries and keys (Skyformer)",
    paper="https://arxiv.org/abs/2111.00035",
    complexity="N r (d + e + r) + r^3",
    budget="num_points",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    random=True,
    state_tensors=("uniform", "pilots"),
)

PILOTS = 32  # queries whose rows are computed exactly, to learn how far the others can be trusted

_GUARD = 0.5  # a row's weights have at most 1 / _GUARD of the norm that a distribution can have
_JITTER = 1e-6  # of the kernel of points in float32; float64 has 1e-13 for every point
_FLOOR = 1e-3  # added to mean squared norms, in units of the logits, where their ratio is taken
_KINDS = ("uniform", "pivoted")


def skyformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_points: int = 64,
    points: Literal["uniform", "pivoted"] = "uniform",
    uniform: Tensor | None = None,
    pilots: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Skyformer approximation of softmax attention.

    With c the scale, :math:`x = \sqrt{c}\, q / t`, :math:`y = \sqrt{c}\, t (k - \bar k)` and
    the Gaussian kernel :math:`\kappa(a, b) = e^{-|a - b|^2 / 2}`, whose bandwidth thus follows
    from the head size, the weights of the softmax are

    .. math:: e^{x \cdot y} = e^{|x|^2 / 2}\, \kappa(x, y)\, e^{|y|^2 / 2}.

    The kernel over queries and keys together is positive definite, so a few of these points, S,
    complete it:

    .. math:: W = \kappa(x, S)\, (\kappa(S, S) + \delta I)^{-1} \kappa(S, y)\, e^{|y|^2 / 2}.

    Subtracting the mean key and dividing by t change no softmax; t makes the mean squares of x and
    y equal. One of the points is always the origin, which is the mean key: with it W can represent
    equal weights. The others are queries and keys.

    Weights in W may be negative, and a row that is far from all points is wrong by any factor. With
    the sums :math:`d_i = \sum_j W_{ij}` the output is therefore

    .. math:: \mathrm{out}_i = \bar v + \alpha \sum_j W_{ij} (v_j - \bar v) / m_i, \qquad
              m_i = \max(d_i,\, |W_i|_2 / 2),

    which is W with its rows normalised where :math:`\alpha = 1` and :math:`m_i = d_i`, and else
    lies between that and the mean of the values. Weights that are not negative have
    :math:`|W_i|_2 \le d_i`, so :math:`m_i > d_i` marks weights that cancel, whatever the sign of
    their sum; the norm includes what rounding leaves of it. :math:`\alpha` from 0 to 1, one number
    for each batch entry and query head, brings the weights of 32 queries nearest to their softmax,
    which is computed exactly, in the sum of squares.

    Causal calls are lifted: leaves of 512 tokens are exact, and a row sees what lies before its
    leaf through summaries, which are what decoding keeps. A summary has points among its keys
    alone, since a cache keeps no queries and those to come are not known. For the same reason
    t = 1 and :math:`\alpha = 1` there, and cancellation is found by the random signs that each key
    of a summary carries (`numattn.engines.lift.Summary`).

    From the paper: the completion and its Nystrom approximation, for attention whose weights are
    :math:`\kappa` without normalising rows; the diagonals make it the softmax. The authors' code
    scales inputs by :math:`32^{-1/4}` whatever the head size and adds 0.1 to the diagonal. Pivoted
    points, the origin, t, :math:`m_i`, :math:`\alpha` and the causal form are of this library.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_points: r, positive, the origin among them; 1 gives the mean of the values.
        points: ``"uniform"``, half keys and half queries, one in each of equal stretches, as in the
            paper; where there are too few of one kind the rest is of the other. ``"pivoted"``,
            drawn one after the other in proportion to what the kernel at those before leaves
            unexplained, until that is nothing: better where few directions matter, and two to three
            times as slow. In summaries this is weighted by :math:`e^{|y|^2 / 4}`, so that sinks are
            found; the 4 has no theory behind it.
        uniform: Numbers in [0, 1) that choose the points: (Hk, r) for ``"uniform"``,
            (Hk, 2 r + 32, 2) for ``"pivoted"``; drawn when None.
        pilots: Numbers in [0, 1) that choose the 32 queries, one in each of equal stretches,
            (Hk, 32); drawn when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both, and padding enters no statistic.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Every query head has points of its own.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: per query head 2 Nq r (D + E + r) operations for the rows, 2 Nk r (2 D + E + 2 r + 32)
    for the keys, and O(r^3); pivots take (Nq + Nk) r (2 D + r) in float64. A causal call takes
    2 LEAF (D + E) per row for the exact leaves, LEAF = 512, and about half of 2 N r (D + E) for
    each of log2(N / LEAF) levels. Decoding keeps up to LEAF tokens, and r (D + E + 2) numbers for
    each binary digit 1 of the number of leaves before them.

    Exact when: all queries and keys are points, r > Nq + Nk, up to :math:`\delta`, which bounds
    the inverse: 1e-13 r in float64, 1e-6 in float32. Causal calls are exact up to 512 tokens.

    Limits: the rank is at most r + 1. In high dimensions points explain little but themselves:
    :math:`\alpha` falls, and the output nears the mean of the values. The least squares are over
    weights and not over outputs, and over 32 rows. Keys and logits of a size that float64
    cannot hold, a range of e^700, count as absent.

    Raises:
        ValueError: An option is not of the range above, or a tensor is not of its shape.
        Unsupported: A mask other than key padding.

    References:
        Y. Chen, Q. Zeng, H. Ji, Y. Yang, "Skyformer: Remodel Self-Attention with Gaussian Kernel
        and Nystrom Method", 2021, https://arxiv.org/abs/2111.00035.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> skyformer_attention(q, k, v, num_points=10).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Skyformer(num_points, points)
    if x.empty:
        return x.nothing()
    tensors = fill(options, {"uniform": uniform, "pilots": pilots}, x.k, generator)
    if is_causal:
        compress = partial(_compress, abs(x.scale), num_points, tensors["uniform"])
        return x.restore(lift_summaries(x, compress, signed=True))
    x, place = x.compact()
    return x.restore(_attend(x, num_points, tensors), place)


def _attend(x: Inputs, num_points: int, tensors: dict[str, Tensor]) -> Tensor:
    """The call without a causal mask, its padding last: (B, Hk, Nq * group, E)."""
    c = _Call.of(x)
    points, exists = c.points(_choose(x, c, num_points, tensors["uniform"]))
    pilots = take(c.q, _pilots(x, tensors["pilots"]))
    features = _Features.of(c, points, exists)
    weights = _Weights.of(c, points, exists, features, features.sums(c, pilots))
    out = weights.rows(c.q, weights.values) * weights.alpha(pilots)[..., None, None]
    return fold(out, x.group) + masked_mean(x.v, x.padding)


@dataclass(frozen=True)
class _Call:
    """Queries and keys so that logits are their products, and values about their mean.

    Attributes:
        q: The x of the docstring, (B, H, Nq, D).
        k: Its y for t = 1, (B, Hk, Nk, D).
        v: (B, Hk, Nk, E).
        t: (B, H, 1, 1).
        bias: Of keys, as `key_bias` gives it.
        num_keys: (B or 1, 1, 1, 1), at least 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    t: Tensor
    bias: Tensor | None
    num_keys: Tensor
    group: int

    @staticmethod
    def of(x: Inputs) -> _Call:
        root = abs(x.scale) ** 0.5
        q = unfold(x.q, x.group) * (x.scale / root if root else 0.0)
        k = (x.k - masked_mean(x.k, x.padding)) * root
        own = None if x.query_padding is None else x.padding
        rows = masked_mean(q.square().sum(-1, keepdim=True), own) + _FLOOR
        keys = masked_mean(k.square().sum(-1, keepdim=True), x.padding) + _FLOOR
        t = (rows / keys.repeat_interleave(x.group, 1)) ** 0.25
        v = x.v - masked_mean(x.v, x.padding)
        num_keys = x.num_keys.clamp(min=1)[..., None, None]
        return _Call(q / t, k, v, t, key_bias(x.padding, k), num_keys, x.group)

    def points(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Points (B, H, r, D) of the keys and then the queries, and which exist, see `_choose`."""
        keys, queries = self.k.shape[2], self.q.shape[2]
        place = fold(index.clamp(0, keys - 1)[..., None], self.group)[..., 0]
        of_keys = unfold(take(self.k, place), self.group) * self.t
        of_queries = take(self.q, (index - keys).clamp(0, queries - 1))
        return _with_origin(torch.where((index < keys)[..., None], of_keys, of_queries), index)

    def towards_keys(self, x: Tensor) -> Tensor:
        """Rows (B, H, n, D) as folded rows whose products with k are logits."""
        return fold(x * self.t, self.group)

    def by_head(self, x: Tensor) -> Tensor:
        """One number for each folded row, (B, Hk, n * group) -> (B, H, n, 1)."""
        return unfold(x[..., None], self.group)


def _num_queries(x: Inputs) -> Tensor:
    """How many queries of a head exist, int (B or 1, 1)."""
    if x.query_padding is not None:
        return x.num_keys
    return torch.full_like(x.num_keys, x.q.shape[2] // x.group)


@torch.no_grad()
def _pilots(x: Inputs, pilots: Tensor) -> Tensor:
    """Positions of the queries whose rows are exact, int (B or 1, H, PILOTS)."""
    slot = torch.arange(PILOTS, device=x.q.device)
    count = torch.full_like(x.num_keys, PILOTS)
    return _places(pilots, slot, count, _num_queries(x)).repeat_interleave(x.group, 1)


def _places(uniform: Tensor, slot: Tensor, count: Tensor, length: Tensor) -> Tensor:
    """Places in [0, length), one in each of `count` equal stretches.

    Args:
        uniform: (Hk, n).
        slot: Which stretch, (n,) or (B or 1, 1, n); of no meaning where there is none.
        count: int (B or 1, 1).
        length: int (B or 1, 1).

    Returns:
        int (B or 1, Hk, n).
    """
    stretch = length.double() / count.clamp(min=1)
    place = (slot + uniform.to(slot.device, torch.float64)) * stretch[..., None]
    return torch.minimum(place.long(), length[..., None] - 1).clamp(min=0)


@torch.no_grad()
def _choose(x: Inputs, c: _Call, num_points: int, uniform: Tensor) -> Tensor:
    """Which of the keys and then the queries are points, int (B or 1, H, n); -1 is none."""
    most = min(num_points - 1, c.k.shape[2] + c.q.shape[2])
    if not most:
        return torch.full((1, c.q.shape[1], 1), -1, device=c.q.device)
    if uniform.dim() == 2:
        return _halves(x, num_points - 1, uniform[:, :most]).repeat_interleave(x.group, 1)
    exists = x.padding
    if exists is not None:
        rows = exists.new_ones((exists.shape[0], 1, c.q.shape[2]))
        exists = torch.cat([exists, rows if x.query_padding is None else exists], 2)
    both = torch.cat([c.k.repeat_interleave(x.group, 1) * c.t, c.q], 2)
    return gaussian_pivots(both, most, uniform.repeat_interleave(x.group, 0), padding=exists)


def _halves(x: Inputs, wanted: int, uniform: Tensor) -> Tensor:
    """Half keys and half queries as far as there are any, int (B or 1, Hk, n)."""
    keys, queries = x.num_keys, _num_queries(x)
    total = (keys + queries).clamp(max=wanted)
    from_keys = torch.minimum(keys, torch.maximum(total - total // 2, total - queries))
    slot = torch.arange(uniform.shape[1], device=keys.device)
    rest = slot - from_keys[..., None]
    of_queries = _places(uniform, rest, total - from_keys, queries) + x.k.shape[2]
    index = torch.where(rest < 0, _places(uniform, slot, from_keys, keys), of_queries)
    return index.masked_fill(slot >= total[..., None], -1)


def _with_origin(points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Points and the origin, (B, H, r, D); which exist, bool (B or 1, H, r, 1)."""
    exists = F.pad(index >= 0, (0, 1), value=True)
    return F.pad(points, (0, 0, 0, 1)), exists[..., None]


def _inverse_factor(points: Tensor, exists: Tensor) -> Tensor:
    """The inverse of the Cholesky factor of the points' kernel, float64 (B, H, r, r)."""
    places = points.double()
    # Distances and not products: two equal points must have equal rows, however long they are.
    distance = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")
    eye = torch.eye(points.shape[2], dtype=places.dtype, device=points.device)
    kernel = torch.where(exists & exists.mT, (distance.square() / -2).exp(), eye)
    jitter = _JITTER if points.dtype == torch.float32 else 1e-13 * points.shape[2]
    factor, _ = torch.linalg.cholesky_ex(kernel + jitter * eye)
    return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)


@dataclass(frozen=True)
class _Features:
    r"""Whitened features of the keys, :math:`F = L^{-1} \kappa(S, y)\, e^{|y|^2 / 2}`.

    With L the Cholesky factor of the points' kernel, W = kappa(x, S) L^-T F. All sums over keys
    are taken of F, and about its mean: rounding is multiplied by L^-1 once, and not twice.

    Attributes:
        rows: Points as folded rows towards the keys.
        shift: (B, H, r, 1), the largest logit of a point.
        whiten: F without a scale of its rows is whiten e^(logits - shift), (B, H, r, r).
        total: Sums over the rows of F, in that scale, (B, H, r, 1).
        back: L^-T that takes the scale back, float64 (B, H, r, r).
    """

    rows: Tensor
    shift: Tensor
    whiten: Tensor
    total: Tensor
    back: Tensor

    @staticmethod
    def of(c: _Call, points: Tensor, exists: Tensor) -> _Features:
        rows = c.towards_keys(points)
        ones = torch.ones_like(c.k[..., :1])
        part = softmax_partial(rows, c.k, ones, scale=1.0, bias=c.bias)
        shift = c.by_head(part.shift)
        size = _log_size(shift, points, exists)
        inverse = _inverse_factor(points, exists)
        whiten = inverse * (size - finite(size.detach().amax(2, keepdim=True))).exp().mT
        scale = _divisor(whiten.detach().abs().amax(-1, keepdim=True))
        whiten = (whiten / scale).to(points.dtype)
        total = whiten @ c.by_head(part.den)
        return _Features(rows, finite(shift), whiten, total, (scale * inverse).mT)

    def sums(self, c: _Call, pilots: Tensor) -> list[Tensor]:
        """F v, F F^T and F P^T, float64, with F about its mean and P the softmax of the pilots.

        (B, H, r, E), (B, H, r, r) and (B, H, r, PILOTS).
        """
        rows = c.towards_keys(pilots)
        ones = torch.ones_like(c.k[..., :1])
        _, lse = softmax_attention(rows, c.k, ones, scale=1.0, bias=c.bias)
        lse, mean = finite(c.by_head(lse)), self.total / c.num_keys
        wide = max(tile_elements(c.k.device) // math.prod(self.whiten.shape[:3]), 64)
        sums: list[Tensor] = []
        for c0, c1 in spans(c.k.shape[2], wide):
            bias = None if c.bias is None else c.bias[..., c0:c1]
            own = (self.rows, self.shift, self.whiten, mean, rows, lse)
            tile = recompute(_tile, *own, c.k[:, :, c0:c1], c.v[:, :, c0:c1], bias)
            sums = [a + b for a, b in zip(sums, tile, strict=True)] if sums else list(tile)
        return sums


def _log_size(shift: Tensor, points: Tensor, exists: Tensor) -> Tensor:
    """Logarithm of the largest kappa(S, y) e^(|y|^2 / 2) of every point, float64 (B, H, r, 1)."""
    half = points.square().sum(-1, keepdim=True) / 2
    return (shift - half).double().masked_fill(~exists, -torch.inf)


def _tile(
    rows: Tensor,
    shift: Tensor,
    whiten: Tensor,
    mean: Tensor,
    pilots: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of `_Features.sums` over some keys."""
    group = whiten.shape[1] // k.shape[1]
    logits, exact = rows @ k.mT, pilots @ k.mT
    if bias is not None:
        logits, exact = logits + bias[..., None, :], exact + bias[..., None, :]
    f = whiten @ exp_(unfold(logits, group) - shift) - mean  # (B, H, r, n)
    if bias is not None:
        f = f.masked_fill(bias[..., None, :] == -torch.inf, 0.0)
    p = exp_(unfold(exact, group) - lse)
    of_values = unfold(fold(f, group) @ v, group)
    exact_f = f.double()  # the product must be positive up to far less than a norm that matters
    return of_values.double(), exact_f @ exact_f.mT, (f @ p.mT).double()


@dataclass(frozen=True)
class _Weights:
    r"""Weights :math:`W_{ij} = \sum_s e^{x_i \cdot S_s + \mathrm{bias}_s} E_{sj}`.

    Attributes:
        points: S, (B, H, r, D).
        bias: (B, H, r); -inf where there is no point.
        values: E v, (B, H, r, E).
        products: E P^T, P the softmax of the pilots, (B, H, r, PILOTS).
        white: Factors of E, which is white f about its mean, (B, H, r, r).
        gram: f f^T with a diagonal of ones or zeros, float64 (B, H, r, r).
        tail: Sums of the rows of E, and white R with R R^T = gram; (B, H, r, 1 + r).
        num_keys: (B or 1, 1, 1), at least 1.
    """

    points: Tensor
    bias: Tensor
    values: Tensor
    products: Tensor
    white: Tensor
    gram: Tensor
    tail: Tensor
    num_keys: Tensor

    @staticmethod
    def of(
        c: _Call, points: Tensor, exists: Tensor, features: _Features, sums: list[Tensor]
    ) -> _Weights:
        values, gram, products = sums
        size = _divisor(gram.diagonal(dim1=-2, dim2=-1)).sqrt()[..., None]
        gram = gram / size / size.mT
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        # Its rounding is far below; in the norm of a row, of which half is taken, it is nothing.
        root, _ = torch.linalg.cholesky_ex(gram + 1e-10 * eye)
        white = features.back * size.mT
        total = features.back @ features.total.double()
        tail = torch.cat([total, white @ root], -1)
        norm = tail[..., 1:].square().sum(-1, keepdim=True) + total.square() / c.num_keys
        norm = norm.detach().sqrt()  # of the rows of E: only a scale
        bias = _log_size(norm.log(), points, exists & (norm > 0))[..., 0].to(points.dtype)
        columns = (features.back @ values, features.back @ products, white, tail)
        e_v, e_p, white, tail = ((x / _divisor(norm)).to(points.dtype) for x in columns)
        return _Weights(points, bias, e_v, e_p, white, gram, tail, c.num_keys[..., 0])

    def rows(self, q: Tensor, columns: Tensor) -> Tensor:
        """Sums of W / m with `columns`, which are E times what is summed.

        Args:
            q: x, (B, H, n, D).
            columns: (B, H, r, c).

        Returns:
            (B, H, n, c); zero in rows without any weight.
        """
        width = columns.shape[3]
        columns = torch.cat([columns, self.tail], -1)
        part = softmax_partial(q, self.points, columns, scale=1.0, bias=self.bias)
        total = part.num[..., width]
        square = part.num[..., width + 1 :].square().sum(-1) + total.square() / self.num_keys
        # What rounding leaves where everything cancels; columns of values have norms up to N^(1/2).
        noise = 4 * torch.finfo(q.dtype).eps * self.num_keys.sqrt() * _divisor(part.den)
        m = torch.maximum(total, _GUARD * (square + noise.square()).sqrt())
        return part.num[..., :width] / m[..., None]

    def alpha(self, pilots: Tensor) -> Tensor:
        """The factor that brings rows, about their mean, nearest to the pilots' softmax: (B, H)."""
        sums = self.rows(pilots, torch.cat([self.products, self.white], -1)).double()
        likeness = sums[..., :PILOTS].diagonal(dim1=-2, dim2=-1).sum(-1)
        f = sums[..., PILOTS:]
        square = ((f @ self.gram) * f).sum((-2, -1))
        none = square == 0
        return ((likeness + none) / (square + none)).clamp(0.0, 1.0).to(pilots.dtype)


def _divisor(x: Tensor) -> Tensor:
    """The same, and 1 where it is zero."""
    return x + (x == 0)


def _compress(scale: float, num_points: int, uniform: Tensor, s: Summary) -> Summary:
    """A summary with points among the keys given, the last one their mean."""
    there = s.bias > -torch.inf
    center = masked_mean(s.k, there)
    y = (s.k - center) * scale**0.5
    index = _choose_keys(y, s, num_points, uniform)
    points, exists = _with_origin(take(y, index.clamp(min=0)), index)
    logits = (points @ y.mT + s.bias[..., None, :]).double()
    shift = finite(logits.detach().amax(-1, keepdim=True))
    sums = exp_(logits - shift) @ s.columns.double()
    size = _log_size(shift, points, exists)
    top = finite(size.detach().amax(2, keepdim=True))
    inverse = _inverse_factor(points, exists)
    columns = inverse.mT @ (inverse @ (sums * (size - top).exp()))
    norm = columns.detach().abs().amax(-1, keepdim=True)
    bias = _log_size(norm.log() + top, points, exists & (norm > 0))[..., 0].to(y.dtype)
    columns = (columns / _divisor(norm)).to(y.dtype)
    keys = torch.cat([take(s.k, index.clamp(min=0)), center], 2)
    return Summary(keys, columns, bias, s.width)


@torch.no_grad()
def _choose_keys(y: Tensor, s: Summary, num_points: int, uniform: Tensor) -> Tensor:
    """Which of the keys are points, int (B or 1, H, n); -1 is none."""
    most = min(num_points - 1, y.shape[2])
    if not most:
        return torch.full((1, y.shape[1], 1), -1, device=y.device)
    if uniform.dim() == 3:
        # Between the plain kernel, which misses sinks, and e^(y y'), whose longest keys take all.
        size = (y.square().sum(-1) / 4).masked_fill(s.bias == -torch.inf, -torch.inf)
        return gaussian_pivots(y, most, uniform, log_weight=size)
    slot = torch.arange(most, device=y.device)
    length = torch.full((1, 1), y.shape[2], device=y.device)
    return _places(uniform[:, :most], slot, torch.full_like(length, most), length)


@register
@dataclass(frozen=True)
class Skyformer(Method):
    """Options of `skyformer_attention`."""

    num_points: int = 64
    points: Literal["uniform", "pivoted"] = "uniform"
    info = INFO
    function = staticmethod(skyformer_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "num_points", self.num_points)
        one_of(INFO.name, "points", self.points, _KINDS)

    def exact_at(self, length: int) -> Skyformer:
        return replace(self, num_points=2 * length + 1)

    def cost(self, shape: Shape) -> Cost:
        flops = self._causal_flops(shape) if shape.is_causal else self._flops(shape)
        cache = streaming_bytes(shape, self.num_points, signed=True)
        units = min(self.num_points + 1, shape.queries, shape.keys)
        return Cost(flops, shape.io, cache, units=units)

    def _flops(self, shape: Shape) -> int:
        """Products of a call that is not causal; solutions of triangular systems come on top."""
        n, m, d, e = shape.queries, shape.keys, shape.head_dim, shape.value_dim
        r, p = min(self.num_points - 1, n + m) + 1, PILOTS
        heads = shape.batch * shape.heads
        flops = 2 * (r + p) * m * (d + 1)  # what the kernel is scaled by
        flops += 2 * m * (r * d + p * d + r * (2 * r + e + p))
        flops += 2 * r * r * (1 + e + p + 1 + r)
        flops += 2 * n * r * (d + e + 1 + r) + 2 * p * r * (d + p + 1 + 3 * r)
        pivots = 0
        if self.points == "pivoted" and r > 1:
            pivots = pivot_flops(heads, n + m, d, r - 1)
        return heads * flops + pivots

    def _causal_flops(self, shape: Shape) -> int:
        d, e, r = shape.head_dim, shape.value_dim, self.num_points
        leaves, blocks = split_points(shape.keys)
        flops = leaf_flops(leaves, d + e)
        flops += sum(2 * n * r * (d + e + 1 + PROBES) for n, _ in blocks)
        flops *= shape.batch * shape.heads
        for keys, count in compressed(shape.keys, r):
            heads = shape.batch * shape.kv_heads * count
            width = e + 1 + PROBES
            flops += heads * (2 * r * keys * (d + width) + 4 * r * r * width)
            if self.points == "pivoted" and r > 1:
                flops += pivot_flops(heads, keys, d, r - 1)
        return flops

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        r = self.num_points
        numbers = (num_heads, 2 * r + BLOCK, 2) if self.points == "pivoted" else (num_heads, r)
        return {"uniform": Draw("uniform", numbers), "pilots": Draw("uniform", (num_heads, PILOTS))}

    def module(self, *, num_heads: int, head_dim: int) -> SkyformerAttention:
        return SkyformerAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        given = {name: tensors.get(name) for name in INFO.state_tensors}
        numbers = fill(self, given, key, None)["uniform"]
        factor = key.shape[3] ** -0.5 if scale is None else abs(float(scale))
        compress = partial(_compress, factor, self.num_points, numbers)
        return StreamingState(
            INFO, compress, key, value, signed=True, scale=scale, enable_gqa=enable_gqa
        )


class SkyformerAttention(DrawnAttention):
    """`skyformer_attention` with tensors that are drawn once and saved with the model.

    Buffers: ``uniform``, (Hk, 2 r + 32, 2) or (Hk, r), and ``pilots``, (Hk, 32).
    """

    record = Skyformer
