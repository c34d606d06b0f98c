"""HyperAttention: blocks of queries and keys that hash alike, and sampled keys for the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import Inputs, positive, prepare, unfold
from numattn.core.linalg import masked_mean, take
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.engines.blocks import blocks_attention
from numattn.engines.lift import leaf_flops, lift, split_points

INFO = Info(
    name="hyper",
    family="sparse",
    summary="blocks in the order of a hash, and sampled keys for the rest (HyperAttention)",
    paper="https://arxiv.org/abs/2310.05869",
    complexity="N (b + m) (d + e)",
    budget="block_size",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    decode=False,
    random=True,
    state_tensors=("projection", "uniform"),
)

_TILE = 256  # rows, or keys of a block, that are computed together
_SAMPLES = 64  # sampled keys of a tile: most of these tiles hold none of the row's own block
_GOLDEN = (5**0.5 - 1) / 2  # its multiples fill [0, 1) evenly


def hyper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 256,
    num_samples: int | None = None,
    num_projections: int = 7,
    projection: Tensor | None = None,
    uniform: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""HyperAttention: block-diagonal attention in hash order, plus a uniform sample.

    Keys, less their mean, are hashed to the signs of r random projections and sorted by the place
    of their hash on a Gray walk, along which one sign changes at a time; so are queries, less
    theirs. With :math:`\beta(i)` the block of b sorted keys that lies where query i lies among the
    queries, and :math:`j_1, \dots, j_m` sampled keys out of M,

    .. math:: o_i = \frac{\sum_{j \in \beta(i)} e^{s_{ij}} v_j
                        + \frac{M}{m} \sum_{t:\, j_t \notin \beta(i)} e^{s_{ij_t}} v_{j_t}}
                       {\sum_{j \in \beta(i)} e^{s_{ij}}
                        + \frac{M}{m} \sum_{t:\, j_t \notin \beta(i)} e^{s_{ij_t}}} .

    Samples that lie in the row's own block are hidden from it, for they are counted there: so,
    given the blocks, numerator and denominator are each unbiased. All rows share the samples, one
    in each of m equal stretches of the sorted keys.

    Causal calls are lifted, as in the paper: the tokens are cut at 512 times a power of two, the
    later ones attend to all of the earlier ones by this method, and so on down to blocks of 512
    tokens, which are exact. A later query takes its place among the earlier queries, never among
    those after it.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        block_size: b, keys of a block, positive.
        num_samples: m, sampled keys, positive; None takes ``block_size`` of them. With m >= M each
            key is taken once, with weight 1.
        num_projections: r, signs of a hash, from 1 to 32.
        projection: Normals of the hash's planes, (Hk, D, r); drawn when None.
        uniform: Numbers in [0, 1) that place the samples in their stretches, (Hk, m); drawn when
            None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Keys are sorted and sampled once for a group;
            every query head is sorted by itself.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 (b + m) (D + E) operations per row, 2 r D per row and key for the hash, and the sorts.
    Rows that are not as many as the keys lie across the borders of blocks, which adds a quarter of
    a block. A causal call takes 2 LEAF (D + E) per row for the exact blocks, LEAF = 512, and about
    half of the former for each of log2(N / LEAF) levels. Beyond sorted copies of query, key and
    value, memory is that of a tile.

    Exact when: b >= Nk or m >= Nk, and causally also up to 512 tokens.

    Limits: the sample serves a far field that is nearly flat; a heavy key that is neither in the
    block nor sampled, such as the sink of a language model, is lost. Queries and keys are paired by
    place, not by hash value, so blocks hold the heavy keys only as far as both are distributed
    alike: on heads of language models they hold less mass than as many neighbours in the text, and
    less yet where the mean of the queries is left in. Errors of different rows are correlated,
    since they share the samples. The choice of keys is constant for autograd.

    Raises:
        ValueError: An option is not of the range above, or a tensor is not of its shape.
        Unsupported: A mask other than key padding.

    References:
        I. Han et al., "HyperAttention: Long-context Attention in Near-Linear Time", 2023,
        https://arxiv.org/abs/2310.05869.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> hyper_attention(q, k, v, block_size=10).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Hyper(block_size, num_samples, num_projections)
    if x.empty:
        return x.nothing()
    tensors = fill(options, {"projection": projection, "uniform": uniform}, x.k, generator)
    block = partial(_block, tensors, block_size)
    if is_causal:
        return x.restore(lift(x, block))
    x, place = x.compact()
    return x.restore(block(x.q, x).out(), place)


def _block(tensors: dict[str, Tensor], block_size: int, q: Tensor, x: Inputs) -> Partial:
    """Folded rows `q` attending to all keys of x."""
    s = Sorted.of(q, x, tensors["projection"], block_size)
    part = s.near()
    if block_size < x.k.shape[2]:
        part = part.merge(s.far(*_sample(s, tensors["uniform"])))
    return s.restore(part)


@torch.no_grad()
def _sample(s: Sorted, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Places among the sorted keys, int (B or 1, Hk, m), and log-weights (B or 1, 1, m)."""
    points = stretches(s, uniform)
    weight = (s.total.double() / s.total.clamp(1, points.shape[-1])).log().to(s.k.dtype)
    return once_each(s, (points * s.total).long(), weight)


@dataclass(frozen=True)
class Sorted:
    """Keys in the order of their hash, cut into blocks, and rows in the order of their blocks.

    Every query head is sorted by itself, and its rows are filled up to a number of whole tiles with
    rows that belong to no block.

    Attributes:
        x: The inputs that are attended to.
        q: (B, Hk, group * n, D), the n sorted rows of a query head after those of another.
        k, v: (B, Hk, Nk, D) and (B, Hk, Nk, E), padding last.
        total: int (B or 1, 1, 1), keys that exist, M.
        first, last: int (B, Hk, group * n), the row's block of places.
        place: int (B, Hk, rows), where each row went.
        tile: Rows and keys of a tile of blocks, rows of a tile of samples.
    """

    x: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    total: Tensor
    first: Tensor
    last: Tensor
    place: Tensor
    tile: tuple[int, int, int]

    @staticmethod
    def of(q: Tensor, x: Inputs, projection: Tensor, block_size: int) -> Sorted:
        """Hash and sort folded rows `q` and the keys of x; the hashes are constants."""
        block_size = min(block_size, x.k.shape[2])
        rows = q.shape[2] // x.group
        tile = tiling(rows, x.k.shape[2], block_size, not x.is_causal)
        with torch.no_grad():
            order, slot = _hash_order(q, x, projection.to(q))
            first = slot // block_size * block_size  # (B, H, rows)
            index = first.argsort(dim=-1, stable=True)
            total = x.num_keys[..., None]
            count = -(-rows // tile[2]) * tile[2]
            spare = (0, count - rows)
            first = first.gather(-1, index)
            last = torch.minimum(first + block_size, total)
            first, last = (
                F.pad(t, spare).unflatten(1, (-1, x.group)).flatten(2) for t in (first, last)
            )
            heads = index.unflatten(1, (-1, x.group))  # (B, Hk, group, rows)
            member = torch.arange(x.group, device=q.device)[:, None]
            source = F.pad(heads * x.group + member, spare).flatten(2)
            place = heads.argsort(dim=-1) + member * count
            place = place.transpose(2, 3).flatten(2)
        return Sorted(
            x,
            take(q, source),
            take(x.k, order),
            take(x.v, order),
            total,
            first,
            last,
            place,
            tile,
        )

    @property
    def exists(self) -> Tensor:
        """Which of the sorted keys exist, bool (B or 1, 1, Nk)."""
        return torch.arange(self.k.shape[2], device=self.k.device) < self.total

    def near(self) -> Partial:
        """The row's own block."""
        height, width, _ = self.tile
        out, lse = blocks_attention(
            self.q,
            self.k,
            self.v,
            height=height,
            width=width,
            scale=self.x.scale,
            first=self.first,
            last=self.last,
        )
        return Partial.from_lse(out, lse)

    def far(self, slots: Tensor, log_weight: Tensor) -> Partial:
        """Sampled keys that lie outside of the row's own block.

        Args:
            slots: int (B or 1, G, m), places among the sorted keys, rising; G is Hk, or H where
                every query head has samples of its own.
            log_weight: (B or 1, G or 1, m).
        """
        share = slots.shape[1] // self.k.shape[1]

        def split(t: Tensor) -> Tensor:
            """(B, Hk, share * n, ...) -> (B, G, n, ...)."""
            return t.unflatten(2, (share, -1)).flatten(1, 2)

        def join(t: Tensor) -> Tensor:
            """(B, G, n, ...) -> (B, Hk, share * n, ...)."""
            return t.unflatten(1, (-1, share)).flatten(2, 3)

        q, first, last = (split(t) for t in (self.q, self.first, self.last))
        index = join(slots)
        width = even(slots.shape[-1], _SAMPLES)
        tiles = torch.arange(-(-slots.shape[-1] // width), device=q.device)
        out, lse = blocks_attention(
            q,
            split(take(self.k, index)),
            split(take(self.v, index)),
            tiles.expand(1, 1, q.shape[2] // self.tile[2], -1),
            height=self.tile[2],
            width=width,
            scale=self.x.scale,
            bias=log_weight,
            skip=(first[..., None], last[..., None], slots[..., None]),
        )
        return Partial.from_lse(join(out), join(lse))

    def restore(self, part: Partial) -> Partial:
        """Rows back to the order of `q` as it was given."""
        den, shift = (t.gather(-1, self.place) for t in (part.den, part.shift))
        return Partial(take(part.num, self.place), den, shift)


def _hash_order(q: Tensor, x: Inputs, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Keys by the rank of their hash, int (B, Hk, Nk), and a place among them for each row.

    The place of a row among the places of the keys, int (B, H, rows), is that of its hash among
    the hashes of x.q: the rows themselves, or in a causal call the queries before them.
    """
    sign = -1.0 if x.scale < 0 else 1.0
    last = 1 << projection.shape[2]  # the rank of what does not exist
    hashed = x.k @ projection
    rank = gray_rank(hashed > masked_mean(hashed, x.padding))
    if x.padding is not None:
        rank = rank.masked_fill(~x.padding, last)
    order = rank.argsort(dim=-1, stable=True)
    seen = None if x.query_padding is None else x.padding  # by position
    hashed = unfold(x.q @ (sign * projection), x.group)  # (B, H, N, r)
    center = masked_mean(hashed, seen)
    rank = gray_rank(hashed > center)
    if seen is not None:
        rank = rank.masked_fill(~seen, last)
    keys = x.num_keys[..., None]
    queries = torch.full_like(keys, rank.shape[2]) if seen is None else keys
    queries = queries.clamp(min=1)
    if not x.is_causal:
        number = rank.argsort(dim=-1, stable=True).argsort(dim=-1)
        slot = number * keys // queries
    else:
        rows = gray_rank(unfold(q @ (sign * projection), x.group) > center)
        slot = (_later(rows, rank) * keys / queries).long()
    return order, torch.minimum(slot, keys - 1).clamp(min=0)


def _later(rank: Tensor, past: Tensor) -> Tensor:
    """How many of the past's queries come before a row, float64 (B, H, rows).

    Those of equal rank count as a share that depends on the row's position alone, for an order
    among the rows would let a row see those after it.
    """
    past = past.sort(dim=-1).values
    less, upto = (torch.searchsorted(past, rank, right=right) for right in (False, True))
    share = torch.arange(rank.shape[2], device=rank.device, dtype=torch.float64) * _GOLDEN % 1
    return less + (upto - less) * share


def gray_rank(bits: Tensor) -> Tensor:
    """Places of sign patterns, bool (..., r), on a walk that changes one sign at a time.

    Step i of the walk is the Gray code i ^ (i >> 1); the place of a pattern is the inverse of it.
    """
    weight = 1 << torch.arange(bits.shape[-1], device=bits.device)
    rank = (bits * weight).sum(-1)
    shift = 1
    while shift < bits.shape[-1]:
        rank = rank ^ (rank >> shift)
        shift *= 2
    return rank


def stretches(s: Sorted, uniform: Tensor) -> Tensor:
    """A point of [0, 1) in each of min(m, M) equal stretches, float64 (B or 1, Hk, m)."""
    uniform = uniform[:, : s.k.shape[2]].to(s.k.device, torch.float64)
    start = torch.arange(uniform.shape[-1], device=s.k.device)
    return (start + uniform) / s.total.clamp(1, uniform.shape[-1])


def once_each(s: Sorted, slots: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The samples, or, where there are no more keys than samples, each key with weight 1."""
    start = torch.arange(slots.shape[-1], device=slots.device)
    every = s.total <= slots.shape[-1]
    slots = torch.where(every, start, slots)
    log_weight = log_weight.masked_fill(every, 0.0).masked_fill(start >= s.total, -torch.inf)
    return torch.minimum(slots, s.total - 1).clamp(min=0), log_weight


def even(length: int, most: int) -> int:
    """The size of equal pieces of at most `most`."""
    return -(-length // -(-length // most))


def tiling(rows: int, keys: int, block_size: int, own: bool) -> tuple[int, int, int]:
    """Rows and keys of a tile of blocks, and rows of a tile of samples, a multiple of the former.

    Where rows and keys are equally many, a tile of rows has one block. Else it may lie across
    borders, and few rows make that rare.
    """
    width = even(block_size, _TILE)
    height = width
    if rows != keys or not own:
        height = min(max(width * rows // (4 * keys), 8), width)
    height = min(height, rows)
    return height, width, height * min(max(_TILE // height, 1), -(-rows // height))


def check_options(
    name: str, block_size: int, num_samples: int | None, num_projections: int
) -> None:
    """Refuse options outside of their ranges."""
    positive(name, "block_size", block_size)
    positive(name, "num_projections", num_projections)
    if num_samples is not None:
        positive(name, "num_samples", num_samples)
    if num_projections > 32:
        raise ValueError(f"{name}: num_projections must be at most 32; got {num_projections}.")


def count_sorted(shape: Shape, block_size: int, num_samples: int, num_projections: int) -> int:
    """Operations of hashes, blocks and samples, and of the exact leaves of a causal call."""
    d, e, heads = shape.head_dim, shape.value_dim, shape.batch * shape.heads
    leaves: list[int] = []
    blocks = [(shape.queries, shape.keys)] if shape.queries and shape.keys else []
    if shape.is_causal:
        leaves, blocks = split_points(shape.keys)
    flops = heads * leaf_flops(leaves, d + e)
    for rows, keys in blocks:
        b, m = min(block_size, keys), min(num_samples, keys)
        hashed = heads * rows + shape.batch * shape.kv_heads * keys
        near = b
        if shape.is_causal or rows != keys:
            hashed += heads * keys if shape.is_causal else 0
            height = tiling(rows, keys, b, not shape.is_causal)[0]
            near += (height - 1) * keys // rows
        pairs = min(near, keys) + (m if block_size < keys else 0)
        flops += 2 * hashed * num_projections * d + 2 * heads * rows * pairs * (d + e)
    return flops


@register
@dataclass(frozen=True)
class Hyper(Method):
    """Options of `hyper_attention`."""

    block_size: int = 256
    num_samples: int | None = None
    num_projections: int = 7
    info = INFO
    function = staticmethod(hyper_attention)

    def __post_init__(self) -> None:
        check_options(INFO.name, self.block_size, self.num_samples, self.num_projections)

    def exact_at(self, length: int) -> Hyper:
        return replace(self, block_size=max(length, 1))

    def cost(self, shape: Shape) -> Cost:
        m = self.num_samples or self.block_size
        flops = count_sorted(shape, self.block_size, m, self.num_projections)
        return Cost(flops, shape.io, None, units=min(self.block_size + m, shape.keys))

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        return {
            "projection": Draw("normal", (num_heads, head_dim, self.num_projections)),
            "uniform": Draw("uniform", (num_heads, self.num_samples or self.block_size)),
        }

    def module(self, *, num_heads: int, head_dim: int) -> HyperAttention:
        return HyperAttention(num_heads=num_heads, head_dim=head_dim, **self.options())


class HyperAttention(DrawnAttention):
    """`hyper_attention` with tensors that are drawn once and saved with the model.

    Buffers: ``projection`` (Hk, D, r) and ``uniform`` (Hk, m).
    """

    record = Hyper
