"""Routing attention (Routing Transformer): attend inside of k-means clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, not_negative, positive, prepare, unfold
from numattn.core.linalg import (
    draw,
    finite,
    group_means,
    group_sums,
    kmeans,
    nearest,
    take,
)
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.blocks import blocks_attention
from numattn.engines.buckets import (
    HEIGHT,
    LABEL_BYTES,
    BucketState,
    Round,
    bucket_attention,
    bucket_pairs,
    bucket_reach,
    recent_rounds,
    union_attention,
    unit,
)
from numattn.engines.tiles import recompute, tile_elements

INFO = Info(
    name="routing",
    family="sparse",
    summary="attention inside of k-means clusters of queries and keys (Routing Transformer)",
    paper="https://arxiv.org/abs/2003.05997",
    complexity="N (c d + w (d + e))",
    budget="cluster_size",
    approximates="softmax",
    causal="native",
    mask="padding",
    bounded=False,
    fits_causal=True,
    state_tensors=("centroids",),
)

DECAY = 0.999  # of the moving average of centroids, as in the paper

_ITERATIONS = 10  # of k-means

_WORD = 62  # clusters whose membership is kept in the bits of one integer


def routing_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_clusters: int = 16,
    cluster_size: int = 64,
    strict_causal: bool = True,
    window: int = 64,
    num_sinks: int = 4,
    centroids: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention inside of clusters of tokens (Routing Transformer).

    Tokens are compared by direction with c centroids :math:`\mu` that queries and keys share. In
    the logits queries and keys are as they come. The form that is not causal is balanced: cluster
    :math:`\kappa` holds

    .. math:: Q_\kappa = \text{the } w \text{ queries of largest } \mu_\kappa \cdot q / |q|, \quad
              K_\kappa = \text{the } w \text{ keys of largest } \mu_\kappa \cdot k / |k| ,

    and query i attends to the union of :math:`K_\kappa` over the clusters with
    :math:`i \in Q_\kappa`, every key counted once. A query in no cluster attends to
    :math:`K_\kappa` of its nearest centroid.

    Which tokens are the w nearest is not known before all have come. So a causal query attends to
    the latest w keys whose nearest centroid is its own, to the last ``window`` keys, and to the
    first ``num_sinks``, which no clustering finds for every query.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_clusters: c, positive.
        cluster_size: w, positive.
        strict_causal: False takes the balanced clusters in causal calls too, with a mask by
            position, the window and the sinks: then **later tokens change earlier rows**, since
            they push others out of clusters, as in the paper. For training only; it cannot decode.
        window: Latest keys that a causal query sees, positive; unused where not causal.
        num_sinks: First keys that a causal query sees, not negative; unused where not causal.
        centroids: :math:`\mu`, (Hk, c, D) or (B, Hk, c, D), of any norm. When None, spherical
            k-means of the queries and keys of each sequence; causal calls need them given.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. The heads of a group share the centroids; every
            query head fills the clusters with w queries of its own.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 (Nq + Nk) c D operations to compare with the centroids, ten times that to fit them, and
    2 c w^2 (D + E) inside of clusters, with c w of about N the paper's N^1.5; queries in no cluster
    add 2 w (D + E) each. Memory grows with N c. Decoding keeps every key and value and a label of 4
    bytes per key.

    Exact when: w >= Nk, and in strict causal calls also c = 1; or ``window`` >= Nk where causal.

    Limits: there is no error bound. A query may be in several clusters and see up to c w keys: the
    unit of `cost` is the mean. Good clusters need queries and keys of alike directions, as a model
    trained with them has. In heads of other models queries and keys mostly point elsewhere, so that
    clusters of queries hold few keys, a larger w adds none, and heavy keys far away are missed. The
    choice is constant for autograd.

    Raises:
        ValueError: An option is not of the range above, or ``centroids`` of another shape.
        Unsupported: A mask other than key padding, or a causal call without ``centroids``.

    References:
        A. Roy et al., "Efficient Content-Based Sparse Attention with Routing Transformers", 2021,
        https://arxiv.org/abs/2003.05997.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> routing_attention(q, k, v, num_clusters=4, cluster_size=25).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(num_clusters, cluster_size, strict_causal, window, num_sinks)
    if centroids is None and is_causal:
        raise Unsupported(
            "routing: centroids fitted on the batch of a causal call would let the future in; pass "
            "centroids (Routing.fit on a sample finds them), or use RoutingAttention."
        )
    if x.empty:
        return x.nothing()
    x, place = x.compact()
    centers = _fit(x, num_clusters) if centroids is None else _given(x, num_clusters, centroids)
    if is_causal and strict_causal:
        labels = Clusters(centers, x.scale)
        rows, keys = labels.queries(x.q), labels.keys(x.k)
        if x.padding is not None:
            keys = keys.masked_fill(~x.padding[:, :, None], num_clusters)
        out = bucket_attention(x, rows, keys, size=cluster_size, window=window, num_sinks=num_sinks)
        return x.restore(out, place)
    members = _members(x, centers, cluster_size)
    if is_causal:
        recent = recent_rounds(x.q.shape[2], x.group, window, num_sinks, x.num_keys)
        near = union_attention(x.q, x.k, x.v, recent, scale=x.scale)
    else:
        near = _outside(x, centers, members)
    part = _inside(x, members, (num_sinks, window) if is_causal else None)
    return x.restore(part.merge(Partial.from_lse(*near)).out(), place)


class Clusters:
    """The nearest centroid of queries and keys, by direction."""

    nbytes = 0

    def __init__(self, centers: Tensor, scale: float) -> None:
        """From unit centroids (B or 1, Hk, c, D); a negative scale turns queries round."""
        self._centers, self._sign = centers, math.copysign(1.0, scale)

    def queries(self, q: Tensor) -> Tensor:
        """Labels (B, Hk, 1, n) of queries (B, Hk, n, D)."""
        return self.keys(self._sign * q)

    def keys(self, k: Tensor) -> Tensor:
        """Labels (B, Hk, 1, n) of keys (B, Hk, n, D)."""
        # Of unit vectors the nearest is that of the largest product, whatever the norm of k.
        return nearest(k.detach(), self._centers)[0][:, :, None]


@dataclass(frozen=True)
class _Members:
    """Balanced clusters, as tables of those who are in them; C clusters, the nearest first.

    Attributes:
        rows: int (B, Hk, C, group * wq), rows of q.
        keys: int (B, Hk, C, wk), numbers of keys.
        real_keys: bool like `keys`; False where fewer exist. Rows that do not exist are not marked:
            nobody reads what they see.
        row_bits: int (B, Hk, rows, W); bit c % 62 of word c // 62 says whether cluster c has it.
        key_bits: int (B, Hk, Nk, W).
    """

    rows: Tensor
    keys: Tensor
    real_keys: Tensor
    row_bits: Tensor
    key_bits: Tensor


@torch.no_grad()
def _members(x: Inputs, centers: Tensor, size: int) -> _Members:
    """The `size` queries of every head, and the `size` keys, that are nearest to each centroid."""
    queries = unfold(unit(x.q), x.group).unflatten(1, (-1, x.group)) * math.copysign(1.0, x.scale)
    exists = None if x.query_padding is None else x.padding
    rows, _ = _nearest_tokens(queries, centers[:, :, None], exists, size)
    member = torch.arange(x.group, device=rows.device)[:, None, None]
    # (B, Hk, group, C, wq) -> (B, Hk, C, group * wq)
    rows = (rows * x.group + member).transpose(2, 3).flatten(3)
    keys, real_keys = _nearest_tokens(unit(x.k), centers, x.padding, size)
    bits = (_bits(rows, x.q.shape[2]), _bits(keys, x.k.shape[2]))
    return _Members(rows, keys, real_keys, *bits)


def _nearest_tokens(
    x: Tensor, centers: Tensor, padding: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Tokens (..., N, D) of largest product with each center (..., C, D), and which are real."""
    score = centers @ x.mT  # (..., C, N)
    if padding is not None:
        score = score.masked_fill(~padding.view(-1, *[1] * (x.dim() - 2), x.shape[-2]), -torch.inf)
    best = score.topk(min(size, x.shape[-2]), -1)
    return best.indices, best.values > -torch.inf


def _bits(table: Tensor, length: int) -> Tensor:
    """Clusters of every token as bits, from the table (B, Hk, C, w) of their members."""
    words = []
    for part in table.split(_WORD, 2):
        bit = 1 << torch.arange(part.shape[2], device=table.device)
        bit = bit[:, None].expand_as(part).flatten(2)
        word = bit.new_zeros((*part.shape[:2], length))
        words.append(word.scatter_add(2, part.flatten(2), bit))
    return torch.stack(words, -1)


def _inside(x: Inputs, members: _Members, apart: tuple[int, int] | None) -> Partial:
    """Attention inside of the clusters.

    Causal where `apart` says how many first and how many latest keys are counted elsewhere.
    """
    batch, heads, num_clusters, tall = members.rows.shape
    wide = members.keys.shape[3]
    flat_rows, flat_keys = members.rows.flatten(2), members.keys.flatten(2)
    pairs = 2 * tile_elements(x.q.device) // (batch * heads)
    together = max(pairs // (tall * wide), 1)
    height = max(min(pairs // wide, tall), 1)

    def cut(y: Tensor, index: Tensor, width: int) -> list[Tensor]:
        """Tokens of a table (B, Hk, C * width), some clusters at a time."""
        return list(take(y, index).unflatten(2, (num_clusters, width)).split(together, 2))

    queries = cut(x.q, flat_rows, tall), cut(members.row_bits, flat_rows, tall)
    tokens = cut(x.k, flat_keys, wide), cut(x.v, flat_keys, wide)
    key_bits = cut(members.key_bits, flat_keys, wide)
    outs, norms = [], []
    for c, (q, bits, k, v, theirs) in enumerate(zip(*queries, *tokens, key_bits, strict=True)):
        chosen = slice(c * together, (c + 1) * together)
        keys, real = members.keys[:, :, chosen], members.real_keys[:, :, chosen]
        attend = partial(_attend, x.scale, x.group, apart, c * together)
        strips = [
            recompute(attend, *strip, k, v, theirs, keys, real)
            for strip in zip(
                q.split(height, 3),
                bits.split(height, 3),
                members.rows[:, :, chosen].split(height, 3),
                strict=True,
            )
        ]
        outs.append(torch.cat([out for out, _ in strips], 3))
        norms.append(torch.cat([lse for _, lse in strips], 3))
    out, lse = torch.cat(outs, 2).flatten(2, 3), torch.cat(norms, 2).flatten(2)
    return _gather_rows(out, lse, flat_rows, x.q.shape[2])


def _attend(
    scale: float,
    group: int,
    apart: tuple[int, int] | None,
    start: int,
    q: Tensor,
    bits: Tensor,
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    key_bits: Tensor,
    keys: Tensor,
    real: Tensor,
) -> tuple[Tensor, Tensor]:
    """Some clusters from number `start` on: q (B, Hk, c, tall, D) over k (B, Hk, c, wide, D)."""
    _, _, num_clusters, tall, _ = q.shape
    number = start + torch.arange(num_clusters, device=q.device)
    seen = real[..., None, :]
    for w in range(bits.shape[-1]):
        # A pair is counted in the first cluster that has both.
        before = (1 << (number - w * _WORD).clamp(0, _WORD)) - 1
        mine = bits[..., w] & before[:, None]
        seen = seen & ((mine[..., None] & key_bits[..., None, :, w]) == 0)
    if apart is not None:
        num_sinks, window = apart
        seen = seen & (keys >= num_sinks)[..., None, :]
        seen = seen & (keys[..., None, :] <= rows[..., None] // group - window)
    tiles = torch.arange(num_clusters, device=q.device)[None, None, :, None]
    out, lse = blocks_attention(
        q.flatten(2, 3),
        k.flatten(2, 3),
        v.flatten(2, 3),
        tiles,
        height=tall,
        width=k.shape[3],
        scale=scale,
        mask=seen,
    )
    return out.unflatten(2, (-1, tall)), lse.unflatten(2, (-1, tall))


def _gather_rows(out: Tensor, lse: Tensor, row: Tensor, num_rows: int) -> Partial:
    """Join softmax over disjoint keys (B, Hk, n), by the row that each belongs to."""
    part = Partial.from_lse(out, lse)
    shift = part.shift.new_full((*lse.shape[:2], num_rows), -torch.inf)
    shift = shift.scatter_reduce(2, row, part.shift, "amax")
    factor = (part.shift - finite(shift.gather(2, row))).exp()
    num = group_sums(part.num * factor[..., None], row, num_rows)
    den = group_sums((part.den * factor)[..., None], row, num_rows)[..., 0]
    return Partial(num, den, shift)


def _outside(x: Inputs, centers: Tensor, members: _Members) -> tuple[Tensor, Tensor]:
    """The queries in no cluster over the members of their nearest centroid."""
    wide = members.keys.shape[3]
    label = Clusters(centers, x.scale).queries(x.q)[:, :, 0]
    alone = (members.row_bits == 0).all(-1)
    first = torch.where(alone, label * wide, 0)
    last = torch.where(alone, first + x.num_keys.clamp(max=wide)[..., None], 0)
    order = label.masked_fill(~alone, centers.shape[2]).argsort(dim=-1, stable=True)
    index = members.keys.flatten(2)
    this = Round(None, order, first, last, wide)
    return union_attention(x.q, take(x.k, index), take(x.v, index), [this], scale=x.scale)


@torch.no_grad()
def _fit(x: Inputs, num_clusters: int) -> Tensor:
    """Spherical k-means of the queries and keys of each sequence: unit (B, Hk, c, D)."""
    tokens, padding = _directions(x)
    if not tokens.shape[2]:
        return tokens.new_zeros((*tokens.shape[:2], num_clusters, tokens.shape[3]))
    return _means(tokens, kmeans(tokens, num_clusters, _ITERATIONS, padding), num_clusters)


def _directions(x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Unit queries and keys (B, Hk, rows + Nk, D), and which exist, bool (B or 1, 1, rows + Nk)."""
    tokens = torch.cat([unit(x.q) * math.copysign(1.0, x.scale), unit(x.k)], 2)
    if x.padding is None:
        return tokens, None
    rows = x.query_padding
    if rows is None:
        rows = x.padding.new_ones((x.padding.shape[0], 1, x.q.shape[2]))
    return tokens, torch.cat([rows, x.padding], 2)


def _means(tokens: Tensor, label: Tensor, num_clusters: int) -> Tensor:
    """Directions of the means of clusters; an empty one repeats the largest.

    Clusters are empty where there are fewer directions than clusters.
    """
    means, counts = group_means(tokens, label, num_clusters)
    largest = take(means, counts.argmax(-1, keepdim=True))
    return unit(torch.where(counts[..., None] == 0, largest, means))


def _given(x: Inputs, num_clusters: int, centroids: Tensor) -> Tensor:
    """Centroids that were given, as unit vectors (B or 1, Hk, c, D)."""
    batch, heads, _, dim = x.k.shape
    want = (heads, num_clusters, dim)
    if centroids.shape not in (want, (batch, *want)):
        raise ValueError(
            f"routing: centroids must have shape {want}, that is (Hk, num_clusters, D); got "
            f"{tuple(centroids.shape)}."
        )
    centers = centroids if centroids.dim() == 4 else centroids[None]
    return unit(centers.detach().to(x.k))


def _check_options(
    num_clusters: int, cluster_size: int, strict_causal: bool, window: int, num_sinks: int
) -> None:
    positive(INFO.name, "num_clusters", num_clusters)
    positive(INFO.name, "cluster_size", cluster_size)
    positive(INFO.name, "window", window)
    not_negative(INFO.name, "num_sinks", num_sinks)
    if not isinstance(strict_causal, bool):
        raise ValueError(f"routing: strict_causal must be True or False; got {strict_causal!r}.")


@register
@dataclass(frozen=True)
class Routing(Method):
    """Options of `routing_attention`."""

    num_clusters: int = 16
    cluster_size: int = 64
    strict_causal: bool = True
    window: int = 64
    num_sinks: int = 4
    info = INFO
    function = staticmethod(routing_attention)

    def __post_init__(self) -> None:
        _check_options(**self.options())

    def exact_at(self, length: int) -> Routing:
        return replace(self, num_clusters=1, cluster_size=max(length, 1))

    def cost(self, shape: Shape) -> Cost:
        """Fitting the centroids is counted where the call is not causal.

        `units` is the mean over the queries, as it were if membership were drawn at random.
        """
        d, e, c = shape.head_dim, shape.value_dim, self.num_clusters
        heads = shape.batch * shape.kv_heads
        seen, pairs = self._seen(shape)
        tokens = shape.rows + heads * shape.keys
        compared = tokens if shape.is_causal else (1 + _ITERATIONS) * tokens + shape.rows
        flops = 2 * compared * c * d + 2 * heads * pairs * (d + e)
        per_key = (d + e) * shape.itemsize + LABEL_BYTES
        cache = heads * shape.keys * per_key if self.strict_causal else None
        return Cost(flops, shape.io, cache, units=min(math.ceil(seen), shape.keys))

    def _seen(self, shape: Shape) -> tuple[float, int]:
        """Keys of a row in the mean, and pairs of a key head that tiles compute."""
        c, w, group = self.num_clusters, self.cluster_size, shape.heads // shape.kv_heads
        recent = partial(
            bucket_pairs,
            shape,
            size=w,
            window=self.window,
            num_sinks=self.num_sinks,
            num_labels=c,
        )
        if shape.is_causal and self.strict_causal:
            reach = bucket_reach(shape.keys, c, w)
            return reach + self.window + self.num_sinks, recent(num_rounds=1)
        queries, keys = min(w, shape.queries), min(w, shape.keys)
        share = queries / max(shape.queries, 1)
        inside = c * group * queries * keys
        if shape.is_causal:
            return c * share * keys + self.window + self.num_sinks, inside + recent(num_rounds=0)
        alone = (1 - share) ** c  # of the queries, in no cluster
        tiles = -(-round(alone * shape.queries * group) // HEIGHT)
        # Where the nearest centroid changes within a tile, it reads two clusters.
        outside = HEIGHT * keys * (tiles + c - 1) if tiles else 0
        return (c * share + alone) * keys, inside + outside

    def fit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        generator: Generator | None = None,
    ) -> dict[str, Tensor]:
        x = prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa)
        return {"centroids": _fit(x, self.num_clusters)}

    def module(self, *, num_heads: int, head_dim: int) -> RoutingAttention:
        return RoutingAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        if not self.strict_causal:
            raise Unsupported(
                "routing: with strict_causal=False membership depends on tokens that have not come "
                "yet; decode with strict_causal=True."
            )
        if "centroids" not in tensors:
            raise Unsupported(
                "routing: decoding needs centroids that no later token changes; pass centroids "
                "(Routing.fit on a sample finds them), or use RoutingAttention.state."
            )
        x = prepare(INFO, key, key, value, None, False, scale, False)
        centers = _given(x, self.num_clusters, tensors["centroids"])
        return BucketState(
            INFO,
            key,
            value,
            Clusters(centers, x.scale),
            size=self.cluster_size,
            window=self.window,
            num_sinks=self.num_sinks,
            scale=scale,
            enable_gqa=enable_gqa,
        )


class RoutingAttention(AttentionModule):
    """`routing_attention` with centroids that follow the tokens of training.

    Buffer: ``centroids`` (Hk, c, D), random directions until `calibrate` or `update` moves them.
    `forward` leaves them as they are: call `update` once in each step of training.
    """

    options: Routing
    centroids: Tensor

    def __init__(
        self, *, num_heads: int, head_dim: int, generator: Generator | None = None, **options: Any
    ) -> None:
        """Draw centroids.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            generator: Source of the draw.
            **options: Options of `Routing`.
        """
        super().__init__()
        self.options = Routing(**options)
        shape = (num_heads, self.options.num_clusters, head_dim)
        self.register_buffer("centroids", torch.empty(shape))
        self.centroids.copy_(unit(draw(shape, generator, self.centroids.device)))

    @torch.no_grad()
    def calibrate(
        self,
        query: Tensor,
        key: Tensor,
        *,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Set the centroids by k-means of sample tokens, (B, H, N, D) and (B, Hk, N, D)."""
        tokens, padding = self._tokens(query, key, attn_mask, enable_gqa)
        label = kmeans(tokens, self.options.num_clusters, _ITERATIONS, padding)
        self.centroids.copy_(_means(tokens, label, self.options.num_clusters)[0])

    @torch.no_grad()
    def update(
        self,
        query: Tensor,
        key: Tensor,
        *,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
        decay: float = DECAY,
    ) -> None:
        r"""Move the centroids towards the tokens that are nearest to them.

        With the directions of the queries and keys of the whole batch,

        .. math:: \mu_\kappa \leftarrow \mathrm{unit}\left( \lambda \mu_\kappa
                  + \frac{1 - \lambda}{2} \Big( \sum_{q \in \kappa} q
                  + \sum_{k \in \kappa} k \Big) \right) .

        Args:
            query: (B, H, N, D).
            key: (B, Hk, N, D).
            attn_mask: As in a call; padding moves nothing.
            enable_gqa: As in a call.
            decay: lambda.
        """
        tokens, padding = self._tokens(query, key, attn_mask, enable_gqa)
        count = self.options.num_clusters
        label = nearest(tokens, unit(self.centroids.to(tokens))[None])[0]
        if padding is not None:
            label = label.masked_fill(~padding, count)
        sums = group_sums(tokens, label, count)[0]
        self.centroids.copy_(unit(decay * self.centroids.to(sums) + (1 - decay) / 2 * sums))

    def _tokens(
        self, query: Tensor, key: Tensor, attn_mask: Tensor | None, enable_gqa: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`_directions` of the whole batch as one sequence."""
        x = prepare(INFO, query, key, key, attn_mask, False, None, enable_gqa)
        return _directions(x.joined())

    def tensors(self) -> dict[str, Tensor]:
        return {"centroids": self.centroids}
