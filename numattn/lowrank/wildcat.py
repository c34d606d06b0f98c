"""WildCat: a weighted coreset of the keys, chosen by randomly pivoted Cholesky."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import Inputs, positive, prepare
from numattn.core.linalg import exp_, finite, masked_mean, take
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.lift import (
    PROBES,
    Compress,
    StreamingState,
    Summary,
    compressed,
    leaf_flops,
    lift_summaries,
    split_points,
    streaming_bytes,
)
from numattn.engines.pivots import BLOCK, gaussian_pivots, pivot_flops
from numattn.engines.softmax import softmax_partial

INFO = Info(
    name="wildcat",
    family="lowrank",
    summary="a weighted coreset of keys by randomly pivoted Cholesky (WildCat)",
    paper="https://arxiv.org/abs/2602.10056",
    complexity="N r (d + e) + N r^2",
    budget="rank",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    random=True,
    state_tensors=("uniform",),
)

DRAWS = 4  # numbers drawn for each pivot, which is always enough


def wildcat_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 64,
    num_bins: int = 1,
    temperature: float = 2.0,
    clip: bool = False,
    uniform: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""WildCat: attend to r keys, weighted so that they stand for all of them.

    Keys enter attention through :math:`h(q, k) = e^{\mathrm{scale}\, q \cdot k}`, a positive
    definite kernel. If S are r of the M keys, the function :math:`\sum_l v_l h(\cdot, k_l)` has the
    best approximation, in the norm of the kernel, among combinations of those at S with weights

    .. math:: W = h_\tau(S, S)^{-1} h_\tau(S, k) \quad (r, M), \qquad
              \mathrm{out} = \frac{h(q, S)\, (W v)}{h(q, S)\, (W 1)}, \qquad
              h_\tau(k, k') = e^{\mathrm{scale}\, k \cdot k' / \tau^2}.

    :math:`\tau` is ``temperature``: as :math:`h(q, k) = h_\tau(\tau^2 q, k)`, weights for
    :math:`h_\tau` serve queries at any :math:`\tau`. A large one makes keys easier to stand in for
    and moves queries away from them. The mean key is subtracted first, which changes no attention.

    S is chosen by randomly pivoted Cholesky of :math:`h_\tau`: each key in proportion to its
    residual, the squared distance of its function from those chosen before. In terms of
    :math:`x = \sqrt{\mathrm{scale}}\, k / \tau` and the Gaussian kernel
    :math:`\kappa(x, x') = e^{-|x - x'|^2 / 2}`, whose Cholesky factor serves for both, the residual
    is :math:`d_l e^{|x_l|^2}` and :math:`W = \kappa(S, S)^{-1} \kappa(S, x) \odot
    e^{(|x_l|^2 - |x_s|^2) / 2}`, the last factor kept in logs. With d the final residuals of
    :math:`\kappa`, every entry obeys

    .. math:: |h(q, k_l) - h(q, S) W_{\cdot l}|
              \le e^{\mathrm{scale}\, \tau^2 |q|^2 / 2} \sqrt{d_l\, e^{|x_l|^2}} .

    From the paper: kernel, weights, pivots, bins, and the clamp of the output (``clip``).
    Different here: the authors' code sets :math:`\tau^2 = 3.95 \max |k| / \max |q|` where it knows
    the queries, and 3.95 where it does not; this never looks at queries. Pivots are proposed in
    blocks, the weights of all bins have one scale, and nothing is added to a denominator.

    Causal calls and decoding compress the first 512 tokens, the next 512, and so on, and pairs of
    these coresets again, as in `numattn.engines.lift.lift_summaries`. A key that stands for others
    is then drawn in proportion to its residual times the square of its weight. That form is of this
    library.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: r, keys of a coreset, positive; fewer are used where they span all others to rounding.
        num_bins: Consecutive parts of the keys that are compressed by themselves, to
            ``rank / num_bins`` keys each; must divide ``rank``. Pivots then cost a fraction.
        temperature: tau, positive. The best one differs by head, most often between 1.4 and 3;
            1 chooses large keys only.
        clip: Clamp the output, channel by channel, to the values between the least and the greatest
            of those that the query may attend to, as exact attention lies there. The output is then
            not linear in value.
        uniform: Numbers in [0, 1) for proposing pivots and accepting them, (Hk, 4 rank, 2); drawn
            when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. A group shares its coreset.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: Nk (r / num_bins) (4 D + E + r / num_bins) operations per key head, in float64, and
    2 Nq r (D + E) per query head. A causal call takes 2 LEAF (D + E) per row for the exact blocks,
    LEAF = 512, and half of the latter for each of log2(N / LEAF) levels. Decoding keeps up to LEAF
    tokens and log2(N / LEAF) coresets.

    Exact when: r >= Nk; or the keys take no more than ``rank / num_bins`` different values in
    each bin. Causal calls are exact up to 512 tokens.

    Limits: weights may be negative, and far from the keys they may cancel. A row's sum of weights
    therefore counts for no less than the root of their sum of squares, estimated from eight random
    signs that each key carries; what it lacks is put on the mean of the values (see
    `numattn.engines.lift.Summary`). Rows without cancellation are left as they are. The output may
    leave the range of the values, except with ``clip``. Fails on attention that is far from low
    rank. Keys whose
    :math:`|x_l|^2` is 70 or more below the greatest are lost in the rounding of the greatest.
    The choice of keys is constant for autograd; their weights are not.

    Raises:
        ValueError: An option is not of the range above, or ``uniform`` is not of its shape.
        Unsupported: A mask other than key padding.

    References:
        T. Schröder and L. Mackey, "WildCat: Near-Linear Attention in Theory and Practice", 2026,
        https://arxiv.org/abs/2602.10056.
        Y. Chen, E. Epperly, J. Tropp and R. Webber, "Randomly pivoted Cholesky: Practical
        approximation of a kernel matrix with few entry evaluations", 2022,
        https://arxiv.org/abs/2207.06503.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> wildcat_attention(q, k, v, rank=10).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = WildCat(rank, num_bins, temperature, clip)
    if x.empty:
        return x.nothing()
    numbers = fill(options, {"uniform": uniform}, x.k, generator)["uniform"]
    compress = partial(_compress, options, x.scale, numbers)
    if is_causal:
        out = lift_summaries(x, compress, signed=True)
    else:
        out = compress(Summary.of(x.k, x.v, x.padding, signed=True)).attend(x.q, x.scale).out()
    return x.restore(_clip(out, x) if clip else out)


def wildcat_coreset(
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 64,
    num_bins: int = 1,
    temperature: float = 2.0,
    uniform: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    generator: Generator | None = None,
) -> Summary:
    """The coreset of `wildcat_attention`: a short cache of weighted keys.

    Args:
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: As in `wildcat_attention`, and so on.
        num_bins: Bins of keys.
        temperature: tau.
        uniform: Numbers in [0, 1), (Hk, 4 rank, 2); drawn when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        scale: Factor of the logits, default D ** -0.5.
        generator: Source of the draw; torch's global one when None.

    Returns:
        Keys (B, Hk, r, D) with their weights and weighted values. ``attend(q, scale).out()`` is the
        output for any queries.

    Example:
        >>> k, v = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 4)
        >>> wildcat_coreset(k, v, rank=50).attend(torch.randn(1, 2, 7, 8), 8**-0.5).out().shape
        torch.Size([1, 2, 7, 4])
    """
    x = prepare(INFO, key, key, value, attn_mask, False, scale, False)
    options = WildCat(rank, num_bins, temperature)
    numbers = fill(options, {"uniform": uniform}, x.k, generator)["uniform"]
    whole = Summary.of(x.k, x.v, x.padding, signed=True)
    return _compress(options, x.scale, numbers, whole)


def _compress(options: WildCat, scale: float, uniform: Tensor, s: Summary) -> Summary:
    """At most ``rank`` keys that stand for those of s, weighted."""
    if s.k.shape[2] <= options.rank:
        return s
    bins, heads = options.num_bins, s.k.shape[1]
    if bins > 1:
        s = _to_bins(s, bins)
        uniform = uniform.unflatten(1, (bins, -1)).flatten(0, 1)
    s = _coreset(s, options.rank // bins, options.temperature, scale, uniform)
    return _each(s, lambda t: t.unflatten(1, (heads, bins)).flatten(2, 3))


def _each(s: Summary, change: Callable[[Tensor], Tensor]) -> Summary:
    """A summary whose tensors are changed in the same way."""
    return replace(s, k=change(s.k), columns=change(s.columns), bias=change(s.bias))


def _select(s: Summary, index: Tensor) -> Summary:
    """Keys at index, int (B, H, n); index M is no key."""
    none = index == s.k.shape[2]
    index = index.masked_fill(none, 0)
    bias = s.bias.gather(2, index).masked_fill(none, -torch.inf)
    return replace(s, k=take(s.k, index), columns=take(s.columns, index), bias=bias)


def _to_bins(s: Summary, bins: int) -> Summary:
    """Keys that exist, cut into consecutive bins that stand side by side as heads."""
    length = s.k.shape[2]
    exists = s.bias > -torch.inf
    order = (~exists).to(torch.uint8).argsort(dim=-1, stable=True)
    total = exists.sum(-1, keepdim=True)
    edge = torch.arange(bins + 1, device=total.device) * total // bins  # (B, H, bins + 1)
    place = edge[..., :-1, None] + torch.arange(-(-length // bins), device=total.device)
    beyond = place >= edge[..., 1:, None]
    index = order.gather(2, place.clamp(max=length - 1).flatten(2)).view_as(place)
    binned = _select(s, index.masked_fill(beyond, length).flatten(2))
    return _each(binned, lambda t: t.unflatten(2, (bins, -1)).flatten(1, 2))


def _coreset(s: Summary, r: int, tau: float, scale: float, uniform: Tensor) -> Summary:
    """Weighted keys, r of the M > r of s; those that exist if there are no more than r."""
    exists = s.bias > -torch.inf
    x = (s.k.double() - masked_mean(s.k, exists)).mul_(abs(scale) ** 0.5 / tau)
    mass = s.bias + s.columns[..., s.width].abs().log()
    heavy = x.detach().norm(dim=-1).square() + 2 * mass.detach().double()
    block = min(BLOCK, 2 * r)  # so that the numbers drawn are enough
    pivots = gaussian_pivots(x, r, uniform, log_weight=heavy, padding=exists, block=block)
    chosen = _weigh(s, x, pivots)
    length, number = s.k.shape[2], exists.cumsum(-1)
    place = (number - 1).masked_fill(~exists, r).clamp(max=r)
    first = torch.full((*pivots.shape[:2], r + 1), length, device=x.device)
    first = first.scatter(2, place, torch.arange(length, device=x.device).expand_as(place))
    kept, few = _select(s, first[..., :r]), number[..., -1:] <= r
    return Summary(
        torch.where(few[..., None], kept.k, chosen.k),
        torch.where(few[..., None], kept.columns, chosen.columns),
        torch.where(few, kept.bias, chosen.bias),
        s.width,
    )


def _weigh(s: Summary, x: Tensor, pivots: Tensor) -> Summary:
    """The keys at pivots, weighted to stand for all; x (B, H, M, D) as in the docstring above."""
    present = pivots >= 0
    index = pivots.clamp(min=0)
    x_s = take(x, index)  # (B, H, r, D)
    # Any scale would do for the rows of h(S, .): it is a constant.
    half = x_s.detach().square().sum(-1) / 2
    part = softmax_partial(x_s, x, s.columns.double(), scale=1.0, bias=s.bias.double())
    # h(S, k) (v, w) over e^(|x_s|^2 / 2), so that the Gaussian kernel of S is left to solve with.
    logs = (part.shift - half).masked_fill(~present, -torch.inf)
    top = finite(logs.detach().amax(-1, keepdim=True))
    rows = part.num * (logs - top).exp()[..., None]
    rows = torch.cholesky_solve(rows, _factor(x_s, half, present))
    size = rows.detach().abs().amax(-1)
    size = size.masked_fill(size == 0, 1.0)
    rows = (rows / size[..., None]).to(s.k.dtype)
    bias = (top - half + size.log()).masked_fill(~present, -torch.inf)
    return Summary(take(s.k, index), rows, bias.to(s.k.dtype), s.width)


def _factor(x: Tensor, half: Tensor, present: Tensor) -> Tensor:
    """Cholesky factor of the Gaussian kernel of the pivots, the identity where there is none."""
    logs = (x @ x.mT).sub_(half[..., None]).sub_(half[..., None, :])
    both = present[..., None] & present[..., None, :]
    eye = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    kernel = torch.where(both, exp_(logs), eye)
    # Rounding may take as much from a diagonal that the pivots keep above it.
    noise = torch.finfo(x.dtype).eps * x.shape[2] * (1 + 2 * (half * present).amax(-1))
    return torch.linalg.cholesky_ex(kernel + noise[..., None, None] * eye)[0]


def _clip(out: Tensor, x: Inputs) -> Tensor:
    """Output rows (B, Hk, rows, E) clamped to the values that they may attend to."""
    low, high = x.v, x.v
    if x.padding is not None:
        absent = ~x.padding[..., None]
        low, high = low.masked_fill(absent, torch.inf), high.masked_fill(absent, -torch.inf)
    if x.is_causal:
        low, high = low.cummin(2).values, high.cummax(2).values
        low, high = (t.repeat_interleave(x.group, 2) for t in (low, high))
    else:
        low, high = low.amin(2, keepdim=True), high.amax(2, keepdim=True)
    return _clamp(out, low, high)


def _clamp(out: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """As torch's clamp, but as it is where nothing has been seen yet: low > high."""
    return torch.where(low <= high, out.clamp(low, high), out)


@register
@dataclass(frozen=True)
class WildCat(Method):
    """Options of `wildcat_attention`."""

    rank: int = 64
    num_bins: int = 1
    temperature: float = 2.0
    clip: bool = False
    info = INFO
    function = staticmethod(wildcat_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "rank", self.rank)
        positive(INFO.name, "num_bins", self.num_bins)
        if self.rank % self.num_bins:
            raise ValueError(
                f"wildcat: num_bins must divide rank; got {self.num_bins} bins for rank "
                f"{self.rank}."
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"wildcat: temperature must be positive and finite; got {self.temperature!r}."
            )

    def exact_at(self, length: int) -> WildCat:
        return replace(self, rank=max(-(-length // self.num_bins), 1) * self.num_bins)

    def cost(self, shape: Shape) -> Cost:
        d, e, r = shape.head_dim, shape.value_dim, self.rank
        leaves: list[int] = []
        blocks, calls = [(shape.queries, shape.keys)], [(shape.keys, 1)]
        if shape.is_causal:
            leaves, blocks = split_points(shape.keys)
            calls = compressed(shape.keys, r)
        rows = leaf_flops(leaves, d + e)
        rows += sum(2 * rows * min(keys, r) * (d + e + 1 + PROBES) for rows, keys in blocks)
        build = sum(count * self._build_flops(keys, d, e) for keys, count in calls)
        flops = shape.batch * (shape.heads * rows + shape.kv_heads * build)
        return Cost(flops, shape.io, self._cache(shape), units=min(r, shape.keys))

    def _build_flops(self, keys: int, d: int, e: int) -> int:
        """Products of one compression of one head; factorisations come on top."""
        if keys <= self.rank:
            return 0
        r, width = self.rank // self.num_bins, -(-keys // self.num_bins)
        pivots = pivot_flops(self.num_bins, width, d, r)
        return pivots + self.num_bins * (2 * r * width * (d + e + 1 + PROBES) + 2 * r * r * d)

    def _cache(self, shape: Shape) -> int:
        """Bytes that decoding keeps: coresets of short pasts hold all of their tokens."""
        kept = streaming_bytes(shape, self.rank, signed=True)
        if self.clip:
            kept += 2 * shape.batch * shape.kv_heads * shape.value_dim * shape.itemsize
        return kept

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        return {"uniform": Draw("uniform", (num_heads, DRAWS * self.rank, 2))}

    def module(self, *, num_heads: int, head_dim: int) -> WildCatAttention:
        return WildCatAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        x = prepare(INFO, key, key, value, None, False, scale, enable_gqa)
        numbers = fill(self, {"uniform": tensors.get("uniform")}, x.k, None)["uniform"]
        kind = _ClippedState if self.clip else StreamingState
        compress = partial(_compress, self, x.scale, numbers)
        return kind(INFO, compress, key, value, signed=True, scale=scale, enable_gqa=enable_gqa)


class _ClippedState(StreamingState):
    """Decoding whose output is clamped to the values taken in."""

    def __init__(
        self, info: Info, compress: Compress, key: Tensor, value: Tensor, **call: Any
    ) -> None:
        shape = (*value.shape[:2], 1, value.shape[3])
        self._low, self._high = value.new_full(shape, torch.inf), value.new_full(shape, -torch.inf)
        super().__init__(info, compress, key, value, **call)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        self._low = torch.cat([self._low, value], 2).amin(2, keepdim=True)
        self._high = torch.cat([self._high, value], 2).amax(2, keepdim=True)
        super().append(key, value)

    def attend(self, query: Tensor) -> Tensor:
        group = query.shape[1] // self._low.shape[1]
        low, high = (t.repeat_interleave(group, 1) for t in (self._low, self._high))
        return _clamp(super().attend(query), low, high)

    @property
    def nbytes(self) -> int:
        return super().nbytes + 2 * self._low.numel() * self._low.element_size()


class WildCatAttention(DrawnAttention):
    """`wildcat_attention` with numbers that are drawn once and saved with the model.

    Buffer: ``uniform`` (Hk, 4 rank, 2).
    """

    record = WildCat
