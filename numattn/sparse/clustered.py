"""Clustered attention: queries in groups, each attending through the mean of its group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import Inputs, fold, positive, prepare, unfold
from numattn.core.linalg import (
    finite,
    group_counts,
    group_means,
    group_sums,
    masked_mean,
    take,
)
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.engines.blocks import blocks_attention
from numattn.engines.lift import leaf_flops, lift, split_points
from numattn.engines.softmax import key_bias, softmax_attention
from numattn.engines.tiles import tile_elements

INFO = Info(
    name="clustered",
    family="sparse",
    summary="queries clustered by hashes attend through their means, and exactly to the top keys",
    paper="https://arxiv.org/abs/2007.04825",
    complexity="C M (d + e) + N (k (d + e) + C b)",
    budget="num_clusters",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    decode=False,
    random=True,
    bounded=False,
    state_tensors=("projection",),
)

_HEIGHT = 64  # rows of a tile of the exact part
_LEAST_ROWS = 16  # of a tile in the search for top keys: fewer would read the keys too often


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_clusters: int = 128,
    num_keys: int = 32,
    improved: bool = True,
    num_bits: int = 64,
    num_iterations: int = 5,
    projection: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Softmax attention through the means of clusters of queries.

    Queries of a head that hash alike form a cluster c. Its mean :math:`\bar q_c` attends to every
    key, with logits :math:`\bar s_{cj}` and weights :math:`A^c_j`, their softmax. The plain form
    gives all queries of the cluster that answer. The improved form attends anew from each query,
    with its own logits :math:`s_{ij}`, to the ``num_keys`` keys :math:`T_c` that are heaviest for
    the mean, and takes only their total mass from it:

    .. math:: o_i = m_c \sum_{j \in T_c} \frac{e^{s_{ij}}}{\sum_{l \in T_c} e^{s_{il}}} v_j
              + \sum_{j \notin T_c} A^c_j v_j, \qquad m_c = \sum_{j \in T_c} A^c_j .

    The hash of a query is the signs of its distances from random hyperplanes, and Lloyd's iteration
    clusters hashes: each goes to the center with which it agrees in most bits (the first of several
    such), and each bit of a center becomes that of the majority (as before in a tie). It starts
    from queries that lie evenly in the sequence. A cluster that loses its queries keeps its center,
    and may stay empty. Unlike in the paper, hyperplanes are laid about the mean of the queries
    rather than the origin, and their offset is in units of the root mean square of a centred
    coordinate: queries of trained models have large means, which leave most signs alike.

    Causal calls are lifted: the tokens are cut at 512 times a power of two, the later ones attend
    to all of the earlier ones, and so on down to blocks of 512 tokens, which are exact. A block
    clusters the earlier queries, for a mean of the later ones would let a row see queries after it;
    each later query goes to the cluster, of those with members, whose center is nearest to its
    hash. Blocks are merged by mass. In the improved form the logarithm of a row's mass is taken as
    :math:`\log \sum_{j \in T_c} e^{s_{ij}} - \log m_c`; in the plain form it is
    :math:`\log \sum_j e^{\bar s_{cj}} + (q_i - \bar q_c) \cdot \sum_j A^c_j k_j`, with the scale
    in the product: the tangent at the mean, never above the true value, which is convex in the
    query. The paper has no causal form: this one is of this library.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_clusters: C, positive. With fewer queries than C, each starts a cluster.
        num_keys: k, keys of each cluster that its queries attend to exactly; positive, all keys
            where there are fewer. The plain form does not read it.
        improved: Attend exactly to the heaviest keys of the cluster.
        num_bits: b, hyperplanes of the hash, positive. More of them tell queries better apart.
        num_iterations: Assignments of queries to clusters, positive; one is to the first centers.
        projection: Hyperplanes (Hk, num_bits, D + 1): a normal, and in the last column the offset;
            drawn when None. Query heads that share a key head share them.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both, and padding enters no cluster.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. The queries of every head are clustered for
            themselves.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: per query head, 2 C Nk (2 D + E) operations for the means (less 2 C Nk D in the plain
    form), 2 Nq b (D + num_iterations C) to cluster and 2 (Nq + 64 C) k (D + E) for the exact part,
    whose tiles of 64 queries read the keys of every cluster that they touch. The C by Nk logits are
    formed some rows at a time; memory grows with the lengths, and with C k (D + E) for the top
    keys. A causal call takes 2 LEAF (D + E) per row for the exact blocks, LEAF = 512, and about
    half of the former for each of log2(N / LEAF) levels.

    Exact when: num_keys >= Nk in the improved form; or, in a call that is not causal, the queries
    of every cluster are equal, as they are where num_clusters >= Nq and all hashes differ. Causal
    calls up to 512 tokens are exact.

    Limits: a row of the plain form errs in total variation by at most tanh(r / 4), r the range over
    j of :math:`s_{ij} - \bar s_{cj}`, and one of the improved form by no more than that. The
    improved form moves mass only among the keys of :math:`T_c`: a key that is heavy for one query
    but not for the mean of its cluster stays light. Sharp attention needs clusters of nearly equal
    queries. Rows hold every key, so the bound for few keys does not apply. Which of several keys
    of equal logits is chosen last is not defined. Clusters, choice of keys and hashes are constants
    for autograd; gradients flow through the means and all else. There is no decoding: one query has
    none to share with.

    Raises:
        Unsupported: A mask other than key padding.
        ValueError: An option is out of range, or ``projection`` has another shape.

    References:
        A. Vyas, A. Katharopoulos, F. Fleuret, "Fast Transformers with Clustered Attention", 2020,
        https://arxiv.org/abs/2007.04825.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> clustered_attention(q, k, v, num_clusters=10, num_keys=16).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Clustered(num_clusters, num_keys, improved, num_bits, num_iterations)
    if x.empty:
        return x.nothing()
    projection = fill(options, {"projection": projection}, x.k, generator)["projection"]
    call = _Call(num_clusters, num_keys if improved else 0, num_iterations, projection.to(x.q))
    if is_causal:
        return x.restore(lift(x, partial(_block, call)))
    x, place = x.compact()
    return x.restore(_whole(call, x), place)


@dataclass(frozen=True)
class _Call:
    """The options of a call; num_keys is 0 in the plain form."""

    num_clusters: int
    num_keys: int
    num_iterations: int
    projection: Tensor  # (Hk, bits, D + 1)


@dataclass(frozen=True)
class _Hash:
    """Signs of queries: on which side of each hyperplane they lie."""

    mean: Tensor  # (B, H, 1, D)
    normal: Tensor  # (H, D, bits)
    offset: Tensor  # (B, H, 1, bits)

    def __call__(self, q: Tensor) -> Tensor:
        """(B, H, N, D) -> -1 or 1, (B, H, N, bits)."""
        side = (q - self.mean) @ self.normal + self.offset >= 0
        return side.to(q.dtype).mul_(2).sub_(1)


@dataclass(frozen=True)
class _Clusters:
    """Clusters of the queries of a call, those without members last."""

    label: Tensor  # (B, H, N)
    mean: Tensor  # (B, H, C, D), of the queries that exist; zero where there are none
    centers: Tensor  # (B, H, C, bits)
    empty: Tensor  # (B, H, C)
    hash: _Hash


def _block(call: _Call, q: Tensor, past: Inputs) -> Partial:
    """Later folded rows q against all keys of past, through the clusters of its queries."""
    clusters = _cluster(call, past)
    q = unfold(q, past.group)
    with torch.no_grad():
        label = _nearest(clusters.hash(q), clusters.centers, clusters.empty)
    if call.num_keys:
        out, lse = _improved(q, label, clusters.mean, past, call.num_keys)
    else:
        out, lse = _tangent(q, label, clusters.mean, past)
    return Partial.from_lse(fold(out, past.group), fold(lse[..., None], past.group)[..., 0])


def _whole(call: _Call, x: Inputs) -> Tensor:
    """Every row against every key, (B, Hk, rows, E)."""
    clusters = _cluster(call, x)
    if call.num_keys:
        q = unfold(x.q, x.group)
        out, _ = _improved(q, clusters.label, clusters.mean, x, call.num_keys)
    else:
        out, _ = _through_means(clusters.mean, x, x.v)
        out = take(out, clusters.label)
    return fold(out, x.group)


def _cluster(call: _Call, x: Inputs) -> _Clusters:
    """Cluster the queries of x, each head for itself."""
    q = unfold(x.q, x.group)  # (B, H, N, D)
    padding = None if x.query_padding is None else x.padding  # of queries, by position
    exists = q.new_ones((1, 1, 1), dtype=torch.bool) if padding is None else padding
    exists = exists.expand(*q.shape[:3])
    count = min(call.num_clusters, q.shape[2])
    with torch.no_grad():
        sides = _hyperplanes(q, padding, call.projection.repeat_interleave(x.group, 0))
        label, centers = _lloyd(sides(q), exists, count, call.num_iterations)
        empty = group_counts(label.masked_fill(~exists, count), count, q.dtype) == 0
        # The exact part reads the keys of a run of clusters: the empty ones must not lie in it.
        order = empty.to(torch.uint8).argsort(dim=-1, stable=True)
        label = order.argsort(-1).gather(2, label)
    mean, counts = group_means(q, label.masked_fill(~exists, count), count)
    return _Clusters(label, mean, take(centers, order), counts == 0, sides)


def _hyperplanes(q: Tensor, padding: Tensor | None, projection: Tensor) -> _Hash:
    """Hyperplanes about the mean of q, offset in units of a coordinate's root mean square."""
    mean = masked_mean(q, padding)
    spread = masked_mean((q - mean).square().mean(-1, keepdim=True), padding).sqrt()
    return _Hash(mean, projection[..., :-1].mT, projection[:, None, :, -1] * spread)


def _lloyd(
    signs: Tensor, exists: Tensor, num_clusters: int, num_iterations: int
) -> tuple[Tensor, Tensor]:
    """Labels (B, H, N) of the last assignment, and the centers that they were assigned by."""
    total = exists.sum(-1, keepdim=True)
    even = (torch.arange(num_clusters, device=signs.device) * total) // num_clusters
    centers = take(signs, even)
    while True:
        label = _nearest(signs, centers)
        num_iterations -= 1
        if not num_iterations:
            return label, centers
        votes = group_sums(signs, label.masked_fill(~exists, num_clusters), num_clusters)
        centers = torch.where(votes == 0, centers, votes.sign())


def _nearest(signs: Tensor, centers: Tensor, empty: Tensor | None = None) -> Tensor:
    """Index of the center that agrees in most bits, the lowest of equally near ones."""
    batch, heads, count, _ = centers.shape
    rows = max(tile_elements(signs.device) // (batch * heads * count), 1)
    labels = []
    for part in signs.split(rows, 2):
        agree = part @ centers.mT  # (B, H, rows, C)
        if empty is not None:
            agree = agree.masked_fill_(empty[:, :, None], -torch.inf)
        labels.append(agree.max(-1).indices)
    return torch.cat(labels, 2)


def _improved(
    q: Tensor, label: Tensor, mean: Tensor, x: Inputs, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, rows, E) and log masses (B, H, rows) of q (B, H, rows, D)."""
    kt, vt, bias = _gather_top(mean, x, num_keys)
    share, far = _far(mean, kt, vt, bias, x)
    width = kt.shape[2] // mean.shape[2]
    order = label.argsort(dim=-1, stable=True)
    at = label.gather(2, order)
    near, lse = blocks_attention(
        take(q, order),
        kt,
        vt,
        height=_HEIGHT,
        width=width,
        scale=x.scale,
        bias=bias,
        first=at * width,
        last=(at + 1) * width,
    )
    m = share.gather(2, at)
    out = torch.addcmul(take(far, at), m[..., None], near)
    lse = lse - m.masked_fill(m == 0, 1.0).log()  # m = 0: no key exists, lse is -inf already
    back = order.argsort(-1)
    return take(out, back), lse.gather(2, back)


def _gather_top(mean: Tensor, x: Inputs, num_keys: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and bias of the top keys of every cluster, (B, H, C * k, ...)."""
    bias = key_bias(x.padding, x.k)
    with torch.no_grad():
        top = _top_keys(_by_key_head(mean, x), x.k, bias, x.scale, min(num_keys, x.k.shape[2]))
    batch, heads = mean.shape[:2]
    top = top.flatten(2)  # (B, Hk, group * C * k)
    kt, vt = (take(y, top).view(batch, heads, -1, y.shape[3]) for y in (x.k, x.v))
    if bias is not None:
        bias = bias.expand(*x.k.shape[:3]).gather(2, top).view(batch, heads, -1)
    return kt, vt, bias


def _by_key_head(mean: Tensor, x: Inputs) -> Tensor:
    """(B, H, C, D) -> (B, Hk, group * C, D)."""
    return mean.unflatten(1, (-1, x.group)).flatten(2, 3)


def _through_means(mean: Tensor, x: Inputs, value: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of the means, (B, H, C, E), and its log normalisers (B, H, C)."""
    rows, bias = _by_key_head(mean, x), key_bias(x.padding, x.k)
    out, lse = softmax_attention(rows, x.k, value, scale=x.scale, bias=bias)
    return out.reshape(*mean.shape[:3], -1), lse.reshape(mean.shape[:3])


def _far(
    mean: Tensor, kt: Tensor, vt: Tensor, bt: Tensor | None, x: Inputs
) -> tuple[Tensor, Tensor]:
    """Share of each mean's softmax that its top keys hold, and what the other keys give it."""
    out, lse = _through_means(mean, x, x.v)
    count = mean.shape[2]
    logits = (mean * x.scale)[..., None, :] @ kt.unflatten(2, (count, -1)).mT  # (B, H, C, 1, k)
    if bt is not None:
        logits = logits + bt.unflatten(2, (count, 1, -1))
    top, top_lse = Partial.from_logits(logits, vt.unflatten(2, (count, -1))).finalize()
    share = (top_lse[..., 0] - finite(lse)).exp()  # (B, H, C)
    # Where the share is near 1 the difference cancels, to a rounding error of the output's size.
    return share, out - share[..., None] * top[..., 0, :]


def _tangent(q: Tensor, label: Tensor, mean: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs of the rows' clusters, and log masses to first order about the means."""
    both, lse = _through_means(mean, x, torch.cat([x.v, x.k], -1))
    out, kbar = both.split([x.v.shape[3], x.k.shape[3]], -1)
    slope = kbar * x.scale  # the gradient of the log mass
    level = lse - (mean * slope).sum(-1)
    rise = (q * take(slope, label)).sum(-1)
    return take(out, label), level.gather(2, label) + rise


def _top_keys(rows: Tensor, k: Tensor, bias: Tensor | None, scale: float, num_keys: int) -> Tensor:
    """The num_keys <= Nk keys of the largest logits of each row, (B, H, rows, num_keys)."""
    batch, heads, length, _ = k.shape
    tall = max(tile_elements(k.device) // (batch * heads * length), _LEAST_ROWS)
    found = []
    for part in (rows * scale).split(tall, 2):
        logits = part @ k.mT
        if bias is not None:
            logits = logits.add_(bias[..., None, :])
        found.append(logits.topk(num_keys, -1, sorted=False).indices)
    return torch.cat(found, 2)


def _check_options(
    num_clusters: int, num_keys: int, improved: bool, num_bits: int, num_iterations: int
) -> None:
    positive(INFO.name, "num_clusters", num_clusters)
    positive(INFO.name, "num_keys", num_keys)
    positive(INFO.name, "num_bits", num_bits)
    positive(INFO.name, "num_iterations", num_iterations)
    if not isinstance(improved, bool):
        raise ValueError(f"clustered: improved must be True or False; got {improved!r}.")


@register
@dataclass(frozen=True)
class Clustered(Method):
    """Options of `clustered_attention`."""

    num_clusters: int = 128
    num_keys: int = 32
    improved: bool = True
    num_bits: int = 64
    num_iterations: int = 5
    info = INFO
    function = staticmethod(clustered_attention)

    def __post_init__(self) -> None:
        _check_options(*self.options().values())

    def exact_at(self, length: int) -> Clustered:
        # One cluster, for every cluster would gather all of the keys.
        return replace(self, num_clusters=1, num_keys=max(length, 1), improved=True)

    def cost(self, shape: Shape) -> Cost:
        d, e = shape.head_dim, shape.value_dim
        leaves: list[int] = []
        blocks = [(shape.queries, shape.keys)]
        if shape.is_causal:
            leaves, blocks = split_points(shape.keys)
        flops = leaf_flops(leaves, d + e)
        flops += sum(self._block_flops(*block, shape.is_causal, d, e) for block in blocks)
        clusters = min(self.num_clusters, shape.queries)
        near = min(self.num_keys, shape.keys) if self.improved else 0
        units = near + -(-clusters * shape.keys // max(shape.queries, 1))
        return Cost(shape.batch * shape.heads * flops, shape.io, None, min(units, shape.keys))

    def _block_flops(self, rows: int, keys: int, lifted: bool, d: int, e: int) -> int:
        """Products of one block and head; the queries of a lifted one are clustered by its keys."""
        members = keys if lifted else rows
        clusters = min(self.num_clusters, members)
        flops = 2 * members * self.num_bits * (d + self.num_iterations * clusters)
        if lifted:
            flops += 2 * rows * self.num_bits * (d + clusters)
        flops += 2 * clusters * keys * (d + e)
        if self.improved:
            near = min(self.num_keys, keys)
            tiles = -(-rows // _HEIGHT) + clusters - 1  # of rows and keys, where clusters meet
            flops += 2 * clusters * keys * d + 2 * clusters * near * (d + e)
            flops += 2 * tiles * _HEIGHT * near * (d + e)
        elif lifted:
            flops += 2 * clusters * keys * d
        return flops

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        return {"projection": Draw("normal", (num_heads, self.num_bits, head_dim + 1))}

    def module(self, *, num_heads: int, head_dim: int) -> ClusteredAttention:
        return ClusteredAttention(num_heads=num_heads, head_dim=head_dim, **self.options())


class ClusteredAttention(DrawnAttention):
    """`clustered_attention` with hyperplanes that are drawn once and saved with the model.

    Buffer: ``projection`` (Hk, num_bits, D + 1).
    """

    record = Clustered
