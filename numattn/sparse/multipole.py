"""Multipole attention: the clusters that matter key by key, every other one as a single key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, fold, one_of, positive, prepare
from numattn.core.linalg import exp_, finite, group_means, kmeans, take
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.blocks import attend_lists, blocks_attention
from numattn.engines.scores import Groups, group_scores, group_statistics
from numattn.engines.softmax import key_bias, softmax_attention
from numattn.engines.tiles import recompute, sizes, spans, tile_elements

INFO = Info(
    name="multipole",
    family="sparse",
    summary="clusters of keys: those of most weight exactly, every other one as a single key",
    paper="https://arxiv.org/abs/2506.13059",
    complexity="N (m + N / c) (d + e)",
    budget="num_near",
    approximates="softmax",
    causal="native",
    mask="padding",
    bounded=False,
    fits_causal=True,
    state_tensors=("orders",),
)

_OWN = 128  # rows and keys of a tile of the causal part
_PILOTS = 16  # queries on which the orders are compared
_MOST = 1.0  # of the second-order term: where it is larger the expansion means nothing
_JOINED = 32  # chunks of tiles whose results are joined at a time
_OPENED = 4  # with two levels: the opened blocks hold this many times num_near keys


def multipole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_near: int = 256,
    cluster_size: int = 16,
    block_size: int = 512,
    clusters: Literal["kmeans", "contiguous"] = "kmeans",
    num_iterations: int = 4,
    order: Literal[0, 1, 2, "auto"] = 0,
    num_axes: int = 1,
    levels: Literal[1, 2] = 1,
    query_tile: int = 64,
    orders: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention to clusters of keys: near ones exactly, each far one as a single key.

    Keys are clustered within blocks of ``block_size`` consecutive tokens. For every tile of
    ``query_tile`` positions some clusters are near; their keys S enter the softmax one by one.
    Every other cluster, of n keys with mean c and mean value u, stands for all of its keys:

    .. math:: o = \frac{\sum_{j \in S} e^{s_j} v_j + \sum_C M_C\, u_C}
                       {\sum_{j \in S} e^{s_j} + \sum_C M_C}, \quad
              M_C = n\, e^{\mathrm{scale}\; q \cdot c} .

    This is the far field of order 0. Let :math:`g_r` be the directions in which a cluster is spread
    most, ``num_axes`` of them. Order 1 adds what the values gain towards the query,
    u + scale :math:`\sum_r (q \cdot g_r)\, E[(v - u)\, g_r \cdot (k - c)]`. Order 2 also multiplies
    M by :math:`e^{\sigma^2 / 2}`, where the variance of the cluster's logits is that along the axes
    and, for the directions that they leave, their mean. The factor is cut at Bennett's bound for
    the cluster's radius, and at e: where the variance is large the expansion no longer says
    anything. With one axis less than keys in a cluster nothing is left: order 1 has the whole cross
    moment, and order 2 the variance but for correlations between axes, which a few steps of power
    iteration find only nearly. By then it is more numbers than the keys themselves are.

    The near clusters are those of most votes, as many as hold at most ``num_near`` keys: a vote is
    the softmax of log n + scale q.c over the clusters that are seen, and the queries of a tile are
    averaged. Every query head chooses for itself. In a causal call the tile before chooses for a
    tile, so that nothing of the future enters; a query also attends to its own block up to itself
    key by key, and only to clusters of the blocks before. A causal row and its choice thus depend
    on no later token.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_near: Most keys of clusters that a query attends to one by one, positive. A cluster
            that is longer is never near.
        cluster_size: Mean keys of a cluster, positive. A block has ceil(block_size / cluster_size)
            clusters, a short last block as many.
        block_size: Consecutive tokens that are clustered together, counted from the first token
            that exists; a multiple of ``query_tile``.
        clusters: ``"kmeans"``, or ``"contiguous"`` for runs of ``cluster_size`` tokens.
        num_iterations: Steps of k-means (Lloyd), positive.
        order: 0, 1 or 2 for all heads, or ``"auto"``: for each key head the order of the least
            error of the output on 16 queries, which are computed exactly.
        num_axes: Directions that orders 1 and 2 keep of each cluster, positive; at most D are.
        levels: 2 looks at clusters only in the ceil(4 num_near / block_size) blocks of most
            votes. Every other block is one cluster.
        query_tile: Positions that share their near keys. With 1 every position chooses for
            itself, also in a causal call, and decoding equals a causal call.
        orders: int (Hk,) or (B, Hk), the order of each key head, for ``order="auto"`` only; found
            on this batch when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i. ``order="auto"`` then needs ``orders``.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Clusters are the key head's.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: with M = Nk / ``cluster_size`` clusters, 2 Nq (M + ``num_near``) (D + E) operations per
    head, M halved when causal, which adds Nq ``block_size`` (D + E) for the own blocks. Orders
    above 0 add 2 Nq M (D + E) for each axis, order 2 again 2 Nq M D; ``order="auto"`` always costs
    order 2. k-means takes 2 Nk (block_size / cluster_size) D a step. Memory grows with
    Nq ``num_near`` / ``query_tile`` and with the lengths. Decoding keeps keys and values, and
    D + E + 1 numbers for each cluster, D + E more for each axis at order 1, and at order 2 one more
    for each axis and two for the cluster.

    Exact when: ``num_near`` >= Nk; or the keys of each cluster are equal, as with
    ``cluster_size=1``; or causal and Nk <= ``block_size``.

    Limits: choice and clusters are constants for autograd, and so are the directions g and the
    radii; the gradient of orders 1 and 2 leaves their change out. The value that order 1 gives a
    far cluster may lie outside of the hull of its values. Queries that look for different things
    than those before them find less near in a causal call: heads with little weight outside of a
    sink lose most. Runs of tokens as clusters, and with two levels whole blocks, merge a sink with
    tokens that have nothing in common with it, which on heads of language models costs far more
    accuracy than they save time. ``order="auto"`` without ``orders`` makes the choice depend
    on the values, so the output is linear in them only for given orders.

    Raises:
        ValueError: An option is out of its range, ``block_size`` is no multiple of
            ``query_tile``, or ``orders`` do not fit.
        Unsupported: A mask other than key padding, or ``order="auto"`` in a causal call without
            ``orders``.

    References:
        C. Hooper et al., "Multipole Attention for Efficient Long Context Reasoning", 2025,
        https://arxiv.org/abs/2506.13059.
        L. Greengard, V. Rokhlin, "A Fast Algorithm for Particle Simulations", 1987,
        https://doi.org/10.1016/0021-9991(87)90140-9.

    Example:
        >>> q, k = torch.zeros(1, 1, 1, 1), torch.tensor([0.0, 0.0, 5.0, 5.0]).view(1, 1, 4, 1)
        >>> v = torch.tensor([1.0, 3.0, 4.0, 8.0]).view(1, 1, 4, 1)
        >>> multipole_attention(q, k, v, num_near=2, block_size=4, cluster_size=2, query_tile=1)
        tensor([[[[4.]]]])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Multipole(
        num_near=num_near,
        cluster_size=cluster_size,
        block_size=block_size,
        clusters=clusters,
        num_iterations=num_iterations,
        order=order,
        num_axes=num_axes,
        levels=levels,
        query_tile=query_tile,
    )
    if x.empty:
        return x.nothing()
    x, place = x.compact()
    orders = _orders(x, options, orders)
    out = _causal(x, options, orders) if is_causal else _bidirectional(x, options, orders)
    return _restore(x, out, place)


def _bidirectional(x: Inputs, options: Multipole, orders: Tensor | None) -> Tensor:
    """Every query over all blocks: (B, Hk, group, T, query_tile, E)."""
    found = _cluster(x.k, x.v, x.padding, options, orders)
    q = _tiled(x.q, x.group, options.query_tile)
    length = x.q.shape[2] // x.group
    exists = torch.arange(q.shape[3] * q.shape[4], device=q.device)[None, None] < length
    if x.query_padding is not None:
        lack = exists.shape[2] - length
        exists = F.pad(x.query_padding[..., :: x.group], (0, lack))
    exists = exists.unflatten(2, q.shape[3:5])  # (B or 1, 1, T, query_tile)
    seen = [(0, q.shape[3], found.num_blocks)]
    rule = _Rule(options, x.scale, x.k.shape[3], x.v.shape[3])
    return _attend(rule, q, exists, found, seen).out()


def _causal(x: Inputs, options: Multipole, orders: Tensor | None) -> Tensor:
    """Every query over its own block up to itself and the blocks before: as `_bidirectional`."""
    length, size = x.k.shape[2], options.block_size
    q = _tiled(x.q, x.group, options.query_tile)
    own = _own_block(x, q, size)
    past = (length - 1) // size  # blocks that some query has behind it
    if not past:
        return own.out()
    k, v = x.k[:, :, : past * size], x.v[:, :, : past * size]
    padding = None if x.padding is None else x.padding[..., : past * size]
    found = _cluster(k, v, padding, options, orders)
    per_block, tiles = size // options.query_tile, q.shape[3]
    seen = [(b * per_block, min((b + 1) * per_block, tiles), b) for b in range(1, past + 1)]
    lag = 1 if options.query_tile > 1 else 0
    rule = _Rule(options, x.scale, x.k.shape[3], x.v.shape[3], lag)
    rest = _attend(rule, q, None, found, seen)
    first = Partial.zeros((*q.shape[:3], per_block, q.shape[4]), x.v.shape[3], q)
    return own.merge(Partial.cat([first, rest], 3)).out()


def _own_block(x: Inputs, q: Tensor, size: int) -> Partial:
    """Causal attention within blocks of `size` positions."""
    shape = q.shape[2:5]  # group, T, query_tile
    place = torch.arange(shape[1] * shape[2], device=q.device).repeat(shape[0])[None, None]
    out, lse = blocks_attention(
        q.flatten(2, 4),
        x.k,
        x.v,
        height=_OWN,
        width=_OWN,
        scale=x.scale,
        bias=key_bias(x.padding, q),
        first=place // size * size,
        last=(place + 1).clamp(max=x.k.shape[2]),
    )
    return Partial.from_lse(out.unflatten(2, shape), lse.unflatten(2, shape))


def _tiled(q: Tensor, group: int, height: int) -> Tensor:
    """Rows (B, Hk, N * group, D) as tiles (B, Hk, group, T, height, D), filled up with zeros."""
    q = q.unflatten(2, (-1, group)).transpose(2, 3)
    lack = -q.shape[3] % height
    q = F.pad(q, (0, 0, 0, lack)) if lack else q
    return q.unflatten(3, (-1, height))


def _restore(x: Inputs, out: Tensor, place: Tensor | None = None) -> Tensor:
    """Tiles of outputs (B, Hk, group, T, height, E) back to (B, H, Nq, E)."""
    out = out.flatten(3, 4)[:, :, :, : x.q.shape[2] // x.group]
    return x.restore(fold(out.flatten(1, 2), x.group), place)


@dataclass(frozen=True)
class _Clusters:
    """Keys in the order of their clusters, and the moments of clusters and blocks, see `_moments`.

    Attributes:
        k, v: (B, Hk, n, D or E).
        cells: (B, Hk, M, W), those of a block after those of the block before.
        blocks: (B, Hk, blocks, W) with two levels, else None.
        num_blocks: How many blocks.
    """

    k: Tensor
    v: Tensor
    cells: Tensor
    blocks: Tensor | None
    num_blocks: int


def _cluster(
    k: Tensor, v: Tensor, exists: Tensor | None, options: Multipole, orders: Tensor | None
) -> _Clusters:
    """Cluster keys (B, Hk, n, D) block by block; exists bool (B or 1, 1, n), padding last."""
    length, per_block = k.shape[2], options.per_block
    size = min(options.block_size, length)
    if lack := -length % size:
        k, v = (F.pad(t, (0, 0, 0, lack)) for t in (k, v))
        if exists is None:
            exists = torch.ones(1, 1, length, dtype=torch.bool, device=k.device)
        exists = F.pad(exists, (0, lack))
    num_blocks = k.shape[2] // size
    label, slot = _labels(k.detach(), exists, size, options).sort(dim=-1, stable=True)
    block = torch.arange(num_blocks, device=k.device)[:, None]
    slot = (slot + size * block).flatten(2)
    k, v = take(k, slot), take(v, slot)
    none = (label == per_block).flatten(2)  # keys that do not exist
    cell = (label + per_block * block).flatten(2).masked_fill(none, num_blocks * per_block)
    cells = _moments(k, v, cell, num_blocks * per_block, options, orders)
    blocks = None
    if options.levels == 2:
        own = block.expand(-1, size).flatten().expand_as(none).masked_fill(none, num_blocks)
        blocks = _moments(k, v, own, num_blocks, options, orders)
    return _Clusters(k, v, cells, blocks, num_blocks)


@torch.no_grad()
def _labels(k: Tensor, exists: Tensor | None, size: int, options: Multipole) -> Tensor:
    """Cluster of every key in its block of `size`, int (B, Hk, blocks, size); `per_block`: none."""
    batch, heads = k.shape[:2]
    k = k.unflatten(2, (-1, size))
    padding = None if exists is None else exists.unflatten(2, (-1, size)).transpose(1, 2)
    if options.clusters == "contiguous":
        label = torch.arange(size, device=k.device) // options.cluster_size
        label = label.expand(batch, k.shape[2], heads, size)
        if padding is not None:
            label = label.masked_fill(~padding, options.per_block)
        return label.transpose(1, 2)
    if padding is not None:
        padding = padding.expand(batch, -1, -1, -1).flatten(0, 1)  # (B * blocks, 1, size)
    tokens = k.transpose(1, 2).flatten(0, 1)  # (B * blocks, Hk, size, D)
    label = kmeans(tokens, options.per_block, options.num_iterations, padding)
    return label.unflatten(0, (batch, -1)).transpose(1, 2)


def _moments(
    k: Tensor, v: Tensor, label: Tensor, num: int, options: Multipole, orders: Tensor | None
) -> Tensor:
    """What the far field knows of each group of keys, as one row of numbers (B, Hk, num, W).

    Order 0: count, mean of keys, mean of values. Order 1: principal axes g, and for each of them
    E[v g.(k - mean)]. Order 2: radius, variances along the axes, mean square distance that they
    leave.
    """
    top, num_axes = options.top_order, options.axes_of(k.shape[3])
    groups = group_statistics(k, label, num, ball=top == 2, num_axes=num_axes)
    value, _ = group_means(v, label, num)
    parts = [groups.count[..., None], groups.mean, value]
    if groups.axes is not None:
        own = label.clamp(max=num - 1)
        k, v = k - take(groups.mean, own), v - take(value, own)
        parts += [groups.axes.flatten(3)]
        for axis in groups.axes.unbind(3):
            along = (k * take(axis, own)).sum(-1, keepdim=True)
            parts += [group_means(along * v, label, num)[0]]
    if groups.radius is not None and groups.variance is not None and groups.rest is not None:
        parts += [groups.radius[..., None], groups.variance, groups.rest[..., None]]
    cells = torch.cat(parts, -1)
    return cells if orders is None else _limit(cells, orders, k.shape[3], v.shape[3], num_axes)


def _limit(cells: Tensor, orders: Tensor, dim: int, width: int, num_axes: int) -> Tensor:
    """Zero the moments above each head's order, int (Hk) or (B, Hk)."""
    number, first = torch.arange(cells.shape[3], device=cells.device), dim + width
    above = (number > first).long() + (number > (1 + num_axes) * first).long()
    return cells * (above <= orders[..., None, None])


@dataclass(frozen=True)
class _Rule:
    """What is fixed while tiles are computed, and the layout of `_moments`.

    Attributes:
        options: Of the call.
        scale: Factor of the logits.
        dim: D.
        width: E.
        lag: A tile's keys are chosen by the tile so many before it.
    """

    options: Multipole
    scale: float
    dim: int
    width: int
    lag: int = 0

    @property
    def order(self) -> int:
        return self.options.top_order

    def heads_together(self, group: int, num_blocks: int, device: torch.device) -> int:
        """Heads to compute at a time, so that a block of queries fits into a tile's budget."""
        rows = group * self.options.block_size * max(self.num_axes, 1)
        return max(tile_elements(device) // (rows * self.options.columns(num_blocks)), 1)

    def tiles_together(self, q: Tensor, num_blocks: int) -> int:
        """Tiles to compute at a time; two levels gather `columns` rows of numbers for each."""
        each = q.shape[3] if self.options.levels == 1 else max(q.shape[3], self.dim + self.width)
        each = each * max(self.num_axes, 1)
        each = q.shape[0] * q.shape[1] * each * self.options.columns(num_blocks)
        return max(tile_elements(q.device) // each, 1)

    @property
    def num_axes(self) -> int:
        return self.options.axes_of(self.dim)

    def _part(self, cells: Tensor, index: int) -> Tensor:
        dim, width, num = self.dim, self.width, self.num_axes
        lengths = (1, dim, width, num * dim, num * width, 1, num, 1)
        begin = sum(lengths[:index])
        return cells[..., begin : begin + lengths[index]]

    def groups(self, cells: Tensor) -> Groups:
        """The statistics of keys in cells (b, M, W), with a head dimension."""
        cells = cells[:, None]
        groups = Groups(self._part(cells, 0)[..., 0], self._part(cells, 1))
        if self.order < 2:
            return groups
        return replace(
            groups,
            axes=self._part(cells, 3).unflatten(-1, (self.num_axes, -1)),
            radius=self._part(cells, 5)[..., 0],
            variance=self._part(cells, 6),
            rest=self._part(cells, 7)[..., 0],
        )

    def values(self, cells: Tensor) -> Tensor:
        """Mean values."""
        return self._part(cells, 2)

    def dipoles(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Axes, and covariances of the values with the keys along them: (b, M * axes, D or E)."""
        axes, moments = (
            self._part(cells, index).unflatten(-1, (self.num_axes, -1)).flatten(1, 2)
            for index in (3, 4)
        )
        return axes, moments


def _attend(
    rule: _Rule,
    q: Tensor,
    exists: Tensor | None,
    found: _Clusters,
    seen: list[tuple[int, int, int]],
) -> Partial:
    """Near and far field of tiles of queries.

    Args:
        rule: See there.
        q: (B, Hk, group, T, height, D).
        exists: Which queries have a vote, bool (B or 1, 1, T, height); None when all have.
        found: The clusters.
        seen: (t0, t1, blocks): tiles [t0, t1) see the first so many blocks. In order, no gaps.

    Returns:
        (B, Hk, group, tiles, height), the tiles from the first t0 on.
    """
    batch, heads, group, _, height, _ = q.shape
    if exists is not None:
        exists = exists.expand(batch, heads, -1, -1).flatten(0, 1)[:, None]
    whole = (q, found.cells, found.blocks)
    rows, cells, blocks = (None if t is None else t.flatten(0, 1) for t in whole)
    step = rule.heads_together(group, seen[-1][2], q.device)
    lengths = sizes(batch * heads, step)
    pieces = zip(*(_parts(t, lengths) for t in (rows, exists, cells, blocks)), strict=True)
    fields = [_far_field(rule, found.k.shape[2], seen, *piece) for piece in pieces]
    far = Partial.cat([part for part, _ in fields], 0)
    lists = torch.cat([slots for _, slots in fields], 0)  # (B * Hk, group, tiles, L)
    out, lse = attend_lists(
        q[:, :, :, seen[0][0] :].flatten(2, 4),
        found.k,
        found.v,
        lists.flatten(1, 2).unflatten(0, (batch, heads)),
        height=height,
        width=1,
        scale=rule.scale,
    )
    shape = (group, lists.shape[2], height)
    far = Partial(*(t.unflatten(0, (batch, heads)) for t in (far.num, far.den, far.shift)))
    return Partial.from_lse(out.unflatten(2, shape), lse.unflatten(2, shape)).merge(far)


def _parts(x: Tensor | None, lengths: list[int]) -> Sequence[Tensor | None]:
    """Parts of x along its first dimension; of None, as many Nones."""
    return [None] * len(lengths) if x is None else x.split(lengths)


def _far_field(
    rule: _Rule,
    num_keys: int,
    seen: list[tuple[int, int, int]],
    q: Tensor,
    exists: Tensor | None,
    cells: Tensor,
    blocks: Tensor | None,
) -> tuple[Partial, Tensor]:
    """The far field of `_attend` and the places of its near keys, for some heads.

    Args:
        rule: See there.
        num_keys: How many keys are clustered.
        seen: As there.
        q: (b, group, T, height, D), b of the B * Hk heads.
        exists: bool (b, 1, T, height) or None.
        cells: (b, M, W).
        blocks: (b, blocks, W), or None with one level.

    Returns:
        The far field (b, group, tiles, height); places int32 (b, group, tiles, L), -1 after the
        last.
    """
    options, begin = rule.options, seen[0][0]
    chunks = [
        (t0 + a, t0 + b, n)
        for t0, t1, n in seen
        for a, b in spans(t1 - t0, rule.tiles_together(q, n))
    ]
    field = partial(
        _one_level if blocks is None else _two_levels, rule, min(num_keys, options.num_near)
    )
    pieces = q[:, :, begin:].split([t1 - t0 for t0, t1, _ in chunks], 2)

    def compute(t0: int, t1: int, n: int, piece: Tensor) -> tuple[Tensor, ...]:
        if rule.lag:
            piece = torch.cat([q[:, :, t0 - 1 : t0].detach(), piece], 2)
        return recompute(
            field,
            piece,
            None if exists is None else exists[:, :, t0:t1],
            cells[:, : n * options.per_block],
            None if blocks is None else blocks[:, :n],
        )

    # Joined now and then: many small results between large temporaries would scatter the memory.
    done = []
    for a, b in spans(len(chunks), _JOINED):
        found = [compute(*chunks[c], pieces[c]) for c in range(a, b)]
        done.append([torch.cat(parts, 2) for parts in zip(*found, strict=True)])
    num, den, shift, lists = (torch.cat(parts, 2) for parts in zip(*done, strict=True))
    return Partial(num, den, shift), lists


def _one_level(
    rule: _Rule,
    longest: int,
    q: Tensor,
    exists: Tensor | None,
    cells: Tensor,
    blocks: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some tiles q (b, group, lag + n, height, D) over all clusters; tile t chooses for t + lag."""
    return _tiles(rule, longest, q, exists, cells, _starts(cells, rule.options))


def _two_levels(
    rule: _Rule,
    longest: int,
    q: Tensor,
    exists: Tensor | None,
    cells: Tensor,
    blocks: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same over the clusters of the blocks of most votes, and the other blocks as they are."""
    options, n = rule.options, q.shape[2] - rule.lag
    plain, _, _ = _weights(rule, q, blocks)
    votes = _votes(plain[:, :, :n], exists)  # (b, group, n, blocks)
    order = votes.argsort(dim=-1, descending=True, stable=True)
    opened = order[..., : options.opened].sort(-1).values
    shape = votes.shape[:3]
    member = torch.arange(options.per_block, device=q.device)
    place = (opened[..., None] * options.per_block + member).flatten(1)
    inner = take(cells[None], place[None])[0].unflatten(1, (*shape[1:], -1))
    start = _starts(cells, options).gather(1, place).unflatten(1, (*shape[1:], -1))
    shut = torch.ones_like(votes).scatter(-1, opened, 0.0)
    outer = blocks[:, None, None] * shut[..., None]
    columns = torch.cat([inner, outer], 3).flatten(0, 2)  # every tile has its own
    pair = torch.stack([q[:, :, :n], q[:, :, rule.lag :]], 3) if rule.lag else q[:, :, :, None]
    if exists is not None:
        exists = exists.expand(*shape, -1).flatten(0, 2)[:, None, None]
    found = _tiles(rule, longest, pair.flatten(0, 2)[:, None], exists, columns, start.flatten(0, 2))
    num, den, shift, slots = (t[:, 0, 0].unflatten(0, shape) for t in found)
    return num, den, shift, slots


def _starts(cells: Tensor, options: Multipole) -> Tensor:
    """Place of the first key of every cluster, int (b, M), from the counts in `cells`."""
    count = cells[..., 0].detach().long().unflatten(1, (-1, options.per_block))
    block = torch.arange(count.shape[1], device=count.device)[:, None] * options.block_size
    return (count.cumsum(-1) - count + block).flatten(1)


def _weights(rule: _Rule, q: Tensor, cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Masses of cells (b, M, W) for q (b, group, n, height, D), over e^shift.

    Returns:
        (b, group, n, height, M): of order 0, a constant, for votes; of the order of the rule; and
        shift (b, group, n, height).
    """
    scores = group_scores(q.flatten(1, 3)[:, None], rule.groups(cells), rule.scale)
    first = scores.centroid[:, 0]
    logits = first
    if scores.cumulant is not None:
        logits = torch.minimum(scores.cumulant[:, 0], first + _MOST)
    shift = finite(logits.detach().amax(-1, keepdim=True))
    weight = exp_(logits - shift)
    plain = weight.detach() if logits is first else exp_(first.detach() - shift)
    shape = q.shape[1:4]
    return plain.unflatten(1, shape), weight.unflatten(1, shape), shift[..., 0].unflatten(1, shape)


def _tiles(
    rule: _Rule,
    longest: int,
    q: Tensor,
    exists: Tensor | None,
    cells: Tensor,
    start: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_far_field` of tiles over `cells`, of which the first start.shape[1] may be chosen."""
    plain, weight, shift = _weights(rule, q, cells)
    n, able = q.shape[2] - rule.lag, start.shape[1]
    votes = _votes(plain[:, :, :n], exists)[..., :able]
    chosen, slots = _choose(votes, cells[:, :able, 0].detach().long(), start, longest)
    far = F.pad(~chosen, (0, cells.shape[1] - able), value=True).to(weight.dtype)
    weight = weight[:, :, rule.lag :] * far[..., None, :]
    shift = shift[:, :, rule.lag :]
    den, flat = weight.sum(-1), weight.flatten(1, 3)
    num = flat @ rule.values(cells)
    if rule.order:
        axis, dipole = rule.dipoles(cells)
        along = q[:, :, rule.lag :].flatten(1, 3) @ axis.mT
        along = along.unflatten(2, (-1, rule.num_axes)) * flat[..., None]
        num = torch.baddbmm(num, along.flatten(2), dipole, alpha=rule.scale)
    return num.unflatten(1, shift.shape[1:]), den, shift, slots


@torch.no_grad()
def _votes(weight: Tensor, exists: Tensor | None) -> Tensor:
    """Sum over the queries of a tile of their softmax: (b, group, n, height, M) without height."""
    den = weight.sum(-1)
    rate = (den > 0) / den.masked_fill(den == 0, 1.0)
    if exists is not None:
        rate = rate * exists
    return (rate[..., None, :] @ weight)[..., 0, :]


@torch.no_grad()
def _choose(votes: Tensor, count: Tensor, start: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The clusters of most votes whose keys fit into a list.

    Clusters that are longer than the list do not count; of the others as many as fit are taken, in
    the order of their votes.

    Args:
        votes: (b, group, n, M).
        count: (b, M), keys of each cluster.
        start: (b, M), place of its first key.
        longest: L, length of a list.

    Returns:
        Which are chosen, bool (b, group, n, M), and the places of their keys, int32 (b, group, n,
        L), -1 after the last.
    """
    count, start = (t[:, None, None].expand(votes.shape) for t in (count, start))
    able = (count > 0) & (count <= longest)
    order = votes.masked_fill(~able, -1.0).argsort(dim=-1, descending=True, stable=True)
    size = (count * able).gather(-1, order)
    end = size.cumsum(-1)
    fits = (end <= longest) & (size > 0)
    chosen = torch.zeros_like(able).scatter(-1, order, fits)
    offset = start.gather(-1, order) + size - end  # place of a key less its place in the list
    step = torch.arange(longest, device=votes.device).expand(*votes.shape[:-1], longest)
    rank = torch.searchsorted(end.contiguous(), step.contiguous(), right=True)
    rank = rank.clamp(max=end.shape[-1] - 1)
    total = (size * fits).sum(-1, keepdim=True)
    slots = (offset.gather(-1, rank) + step).masked_fill(step >= total, -1)
    return chosen, slots.int()


def _orders(x: Inputs, options: Multipole, orders: Tensor | None) -> Tensor | None:
    """Orders by key head, (Hk) or (B, Hk), given or found; None where all have the same."""
    if options.order != "auto":
        if orders is not None:
            raise ValueError(
                f"multipole: orders are of order='auto' only; got order={options.order!r}."
            )
        return None
    if orders is None:
        if x.is_causal:
            raise Unsupported(
                "multipole: order='auto' in a causal call compares queries with the future; pass "
                "orders (Multipole(...).fit on a sample finds them) or order=0, 1 or 2."
            )
        return _pilot_errors(x, options).argmin(0)
    batch, heads = x.k.shape[:2]
    if orders.shape not in ((heads,), (batch, heads)) or orders.is_floating_point():
        raise ValueError(
            f"multipole: orders must be integers of shape {(heads,)} or {(batch, heads)}; got "
            f"{orders.dtype} of shape {tuple(orders.shape)}."
        )
    return orders


@torch.no_grad()
def _pilot_errors(x: Inputs, options: Multipole) -> Tensor:
    """Square error of the output of a few queries at each order: (3, B, Hk).

    The queries lie evenly among those that exist, see all keys and choose each for itself.

    Args:
        x: A call, made compact.
        options: With ``order="auto"``.
    """
    total = torch.full((1, 1), x.q.shape[2] // x.group, device=x.q.device)
    if x.query_padding is not None:
        total = x.query_padding.sum(-1) // x.group
    number = torch.arange(_PILOTS, device=x.q.device)
    at = (2 * number + 1) * total[..., None] // (2 * _PILOTS)
    rows = (at[..., None] * x.group + torch.arange(x.group, device=x.q.device)).flatten(2)
    q = take(x.q, rows)
    bias = key_bias(x.padding, q)
    exact, _ = softmax_attention(q, x.k, x.v, scale=x.scale, bias=bias)
    found = _cluster(x.k, x.v, x.padding, options, None)
    rule = _Rule(options, x.scale, x.k.shape[3], x.v.shape[3])
    q, exact = _tiled(q, x.group, 1), _tiled(exact, x.group, 1)
    errors = []
    for order in range(3):
        limit = partial(
            _limit,
            orders=number[order : order + 1],
            dim=rule.dim,
            width=rule.width,
            num_axes=rule.num_axes,
        )
        blocks = None if found.blocks is None else limit(found.blocks)
        trial = replace(found, cells=limit(found.cells), blocks=blocks)
        out = _attend(rule, q, None, trial, [(0, _PILOTS, found.num_blocks)]).out()
        errors.append((out - exact).square().flatten(2).sum(-1))
    return torch.stack(errors)


def _check_options(options: Multipole) -> None:
    name = INFO.name
    for option in (
        "num_near",
        "cluster_size",
        "block_size",
        "num_iterations",
        "num_axes",
        "query_tile",
    ):
        positive(name, option, getattr(options, option))
    one_of(name, "clusters", options.clusters, ("kmeans", "contiguous"))
    for option, choices in (("order", (0, 1, 2, "auto")), ("levels", (1, 2))):
        value = getattr(options, option)
        if isinstance(value, bool) or value not in choices:
            known = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"multipole: {option} must be one of {known}; got {value!r}.")
    if options.block_size % options.query_tile:
        raise ValueError(
            "multipole: block_size must be a multiple of query_tile, for the queries of a tile "
            f"see the same blocks; got {options.block_size} and {options.query_tile}."
        )


@register
@dataclass(frozen=True)
class Multipole(Method):
    """Options of `multipole_attention`."""

    num_near: int = 256
    cluster_size: int = 16
    block_size: int = 512
    clusters: Literal["kmeans", "contiguous"] = "kmeans"
    num_iterations: int = 4
    order: Literal[0, 1, 2, "auto"] = 0
    num_axes: int = 1
    levels: Literal[1, 2] = 1
    query_tile: int = 64
    info = INFO
    function = staticmethod(multipole_attention)

    def __post_init__(self) -> None:
        _check_options(self)

    @property
    def per_block(self) -> int:
        """Clusters of a block."""
        return -(-self.block_size // self.cluster_size)

    @property
    def top_order(self) -> int:
        """The highest order that is computed."""
        return 2 if self.order == "auto" else self.order

    def axes_of(self, head_dim: int) -> int:
        """Axes that are kept of a cluster."""
        return min(self.num_axes, head_dim) if self.top_order else 0

    @property
    def opened(self) -> int:
        """With two levels: blocks whose clusters a tile looks at."""
        return -(-_OPENED * self.num_near // self.block_size)

    def columns(self, num_blocks: int) -> int:
        """Clusters, and blocks, that a query is compared with where it sees so many blocks."""
        if self.levels == 1:
            return num_blocks * self.per_block
        return num_blocks + min(num_blocks, self.opened) * self.per_block

    def moments(self, head_dim: int, value_dim: int) -> int:
        """Numbers that are kept of a cluster."""
        num = self.axes_of(head_dim)
        per_order = (1 + head_dim + value_dim, num * (head_dim + value_dim), 2 + num)
        return sum(per_order[: self.top_order + 1])

    @property
    def fitted(self) -> bool:
        return self.order == "auto"

    def exact_at(self, length: int) -> Multipole:
        return replace(self, num_near=max(length, 1))

    def cost(self, shape: Shape) -> Cost:
        """What is multiplied if every list is full; `units` is the most that a row holds."""
        n, size, d, e = shape.keys, self.block_size, shape.head_dim, shape.value_dim
        closed = max(n - 1, 0) // size  # blocks that are clustered when causal or decoding
        seen = [(shape.queries, -(-n // size))]  # queries, and the blocks that they see
        if shape.is_causal:
            seen = [(min(size, n - b * size), b) for b in range(1, closed + 1)]
        far = sum(rows * self.columns(b) for rows, b in seen)
        near = sum(rows * min(self.num_near, b * size, n) for rows, b in seen)
        if shape.is_causal:
            tiles = spans(n, _OWN)
            near += sum((t1 - t0) * (-(-t1 // _OWN) * _OWN - t0 // size * size) for t0, t1 in tiles)
        per_pair = d + e + 1 + self.axes_of(d) * (d + e + (d if self.top_order == 2 else 0))
        if self.levels == 2:
            far += sum(rows * b for rows, b in seen)
        flops = 2 * shape.batch * shape.heads * (far * per_pair + near * (d + e))
        blocks = closed if shape.is_causal else -(-n // size)
        if self.clusters == "kmeans":
            tokens = shape.batch * shape.kv_heads * min(blocks * size, n)
            flops += 2 * tokens * self.per_block * d * self.num_iterations
        rows = closed * (self.per_block + (self.levels == 2)) * self.moments(d, e)
        cache = n * (d + e) * shape.itemsize + rows * max(shape.itemsize, 4)
        units = self.num_near + self.columns(blocks) + (size if shape.is_causal else 0)
        return Cost(flops, shape.io, shape.batch * shape.kv_heads * cache, units=min(units, n))

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
        if self.order != "auto":
            return {}
        if value is None:
            raise ValueError("multipole: orders are chosen by the error of the output; pass value.")
        x = prepare(INFO, query, key, value, attn_mask, False, scale, enable_gqa)
        return {"orders": _pilot_errors(x.compact()[0], self).argmin(0)}

    def module(self, *, num_heads: int, head_dim: int) -> MultipoleAttention:
        return MultipoleAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        orders = tensors.get("orders")
        return MultipoleState(key, value, self, scale=scale, enable_gqa=enable_gqa, orders=orders)


class MultipoleState(State):
    """Decoding state: keys and values by clusters, and the moments of the clusters.

    The last block is kept in its order until a token comes after it; then it is clustered, once,
    and its labels, counts and moments stay as they are. Queries of `attend` stand at the last
    token, and every query head of each chooses its near keys for itself.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        options: Multipole,
        *,
        scale: float | None,
        enable_gqa: bool,
        orders: Tensor | None,
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        x = prepare(INFO, key, key, value, None, False, scale, enable_gqa)
        self._orders = _orders(replace(x, is_causal=True), options, orders)
        self._options = options
        self._scale, self._enable_gqa = scale, enable_gqa
        self._closed = 0  # blocks that are clustered
        self._keys = Buffer(key.detach()[:, :, :0])
        self._values = Buffer(value.detach()[:, :, :0])
        width = options.moments(key.shape[3], value.shape[3])
        none = x.k.new_zeros(*key.shape[:2], 0, width)
        self._cells = Buffer(none)
        self._blocks = Buffer(none)  # stays empty with one level
        self.append(key, value)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        self._keys.append(key)
        self._values.append(value)
        size = self._options.block_size
        begin, closed = self._closed * size, (self._keys.tensor.shape[2] - 1) // size
        if closed <= self._closed:
            return
        kept = [b.tensor[:, :, begin : closed * size] for b in (self._keys, self._values)]
        dtype = self._cells.tensor.dtype
        k, v = (t.to(dtype) for t in kept)
        found = _cluster(k, v, None, self._options, self._orders)
        for old, new in zip(kept, (found.k, found.v), strict=True):
            old.copy_(new)
        self._cells.append(found.cells)
        if found.blocks is not None:
            self._blocks.append(found.blocks)
        self._closed = closed

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        kept = (self._keys.tensor, self._values.tensor)
        x = prepare(INFO, query, *kept, None, False, self._scale, self._enable_gqa)
        if x.empty:
            return x.nothing()
        begin = self._closed * self._options.block_size
        own, lse = softmax_attention(x.q, x.k[:, :, begin:], x.v[:, :, begin:], scale=x.scale)
        if not self._closed:
            return x.restore(own)
        q = _tiled(x.q, x.group, 1)
        blocks = self._blocks.tensor if self._options.levels == 2 else None
        found = _Clusters(x.k, x.v, self._cells.tensor, blocks, self._closed)
        rule = _Rule(self._options, x.scale, x.k.shape[3], x.v.shape[3])
        rest = _attend(rule, q, None, found, [(0, q.shape[3], self._closed)])
        own, lse = _tiled(own, x.group, 1), _tiled(lse[..., None], x.group, 1)[..., 0]
        return _restore(x, Partial.from_lse(own, lse).merge(rest).out())

    @property
    def nbytes(self) -> int:
        kept = (self._keys, self._values, self._cells, self._blocks)
        return sum(buffer.nbytes for buffer in kept)

    @property
    def nbytes_read(self) -> int:
        options, length = self._options, self._keys.tensor.shape[2]
        clustered = self._closed * options.block_size
        read = min(options.num_near, clustered) + length - clustered
        tokens = self._keys.nbytes + self._values.nbytes
        opened = self._closed if options.levels == 1 else min(options.opened, self._closed)
        cells = self._cells.nbytes * opened // max(self._closed, 1)
        return tokens * read // max(length, 1) + cells + self._blocks.nbytes


class MultipoleAttention(AttentionModule):
    """`multipole_attention` with orders that are saved with the model.

    Buffer: ``orders`` (Hk,), the order of the far field of each key head. With ``order="auto"``
    they are 0 until `calibrate` sets them; else they are the order of the options.
    """

    options: Multipole
    orders: Tensor

    def __init__(self, *, num_heads: int, head_dim: int, **options: Any) -> None:
        """Start with one order for all heads.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            **options: Options of `Multipole`.
        """
        super().__init__()
        self.options = Multipole(**options)
        first = 0 if self.options.order == "auto" else self.options.order
        self.register_buffer("orders", torch.full((num_heads,), first))

    @torch.no_grad()
    def calibrate(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Set the orders by the error on sample tokens; shapes as in `multipole_attention`."""
        if self.options.order != "auto":
            raise ValueError(
                f"multipole: order={self.options.order!r} is fixed; only order='auto' calibrates."
            )
        x = prepare(INFO, query, key, value, attn_mask, False, scale, enable_gqa)
        errors = _pilot_errors(x.compact()[0], self.options)
        self.orders.copy_(errors.sum(1).argmin(0))

    def tensors(self) -> dict[str, Tensor]:
        return {"orders": self.orders} if self.options.order == "auto" else {}
