"""LSH attention (Reformer): attend to the keys that fall into the same hash bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, not_negative, positive, prepare
from numattn.core.linalg import group_counts, masked_mean
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.buckets import (
    HEIGHT,
    LABEL_BYTES,
    BucketState,
    Round,
    bucket_attention,
    bucket_pairs,
    bucket_reach,
    inverse,
    own_if_alone,
    union_attention,
    unit,
)
from numattn.engines.tiles import tile_elements

INFO = Info(
    name="lsh",
    family="sparse",
    summary="keys of the same cross-polytope hash bucket, over several rounds (Reformer)",
    paper="https://arxiv.org/abs/2001.04451",
    complexity="N r (m (d + e) + b d + log N)",
    budget="bucket_size",
    approximates="softmax",
    causal="native",
    mask="padding",
    random=True,
    state_tensors=("projection",),
)


def lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bucket_size: int = 64,
    num_rounds: int = 4,
    num_buckets: int = 64,
    shared_qk: bool = False,
    window: int = 64,
    num_sinks: int = 4,
    projection: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Softmax attention over keys that hash like the query (Reformer).

    A Gaussian matrix R of b / 2 columns gives a token x the bucket
    :math:`h(x) = \arg\max [x R, -x R]`: the nearest of b random directions. Two tokens share it the
    more likely, the smaller the angle between them. A query wants the largest products, not the
    smallest angles, so keys are centred, which softmax does not notice, and lifted to a sphere:

    .. math:: k' = [k / K, \sqrt{1 - |k|^2 / K^2}], \quad q' = [q / |q|, 0], \quad
              q' \cdot k' = q \cdot k / (|q| K),

    with K the largest norm of a centred key. Each of ``num_rounds`` rounds has an R of its own. A
    query attends to the union of what its rounds hold, every key counted once.

    Not causal: keys are sorted by (bucket, position) and cut into chunks of ``bucket_size``. The
    query of rank t among the n queries of its bucket and head stands at the place
    :math:`\lfloor (t + 1/2)\, n_k / n \rfloor` of the bucket's :math:`n_k` keys (where they would
    start, if there are none), and attends to the chunk of that place and to the chunk before it.
    Causal: it attends to the latest ``bucket_size`` keys of its own bucket, and whatever their
    bucket to the last ``window`` keys and to the first ``num_sinks``: a hash does not find the
    attention sink of a trained head for every query, and a row without its sink is far off. A key
    is then centred by the mean of the keys up to it, and K is the largest norm so far of a key
    centred in this way, so that nothing depends on later tokens.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        bucket_size: m, keys of a chunk, or of a bucket that a causal query sees; positive.
        num_rounds: r, rounds of hashing, positive.
        num_buckets: b of a round, even; or 1 for no hashing at all: runs of positions are left,
            the same in every round.
        shared_qk: The paper's own form, for a model that has no keys: pass ``key=query``. Of a key
            only the direction k / \|k\| is used, in the logits too, while queries keep their norm.
            Both are hashed as they are, without centring or lifting. A token does not see itself,
            unless it sees nothing else.
        window: Latest keys that a causal query sees, positive; unused where not causal.
        num_sinks: First keys that a causal query sees, not negative; unused where not causal.
        projection: R of every round, (Hk, num_rounds, D', num_buckets / 2), with D' = D + 1, or D
            if ``shared_qk``; drawn when None. Its last width is 0 for one bucket.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. The heads of a group share R and the order of
            the keys; every query head has buckets of its own.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: per round, (Nq + Nk) b D operations to hash, two sorts, and 2 (D + E) per query and key
    of its tile: 64 queries that follow one another read the 2 m keys of one of them and as many
    more as their slots spread over, about 64 Nk / Nq. Memory is linear, with r orders of queries
    and of keys. Decoding keeps every key and value, r labels of 4 bytes per key, and the mean.

    Exact when: m >= Nk, and in causal calls also ``num_buckets`` = 1; or ``window`` >= Nk where
    causal. With ``shared_qk`` that is softmax attention under the rule of that option.

    Limits: there is no error bound: a heavy key is lost if it hashes elsewhere in every round, or
    lies further than m in its bucket. On the sphere q' and k' are rarely close, so that collisions
    say less about products than about angles. Within a bucket keys are in the order of positions:
    the result is not equivariant under permutations unless a chunk holds everything. Causal buckets
    of N / b keys hold less than m in short texts; then more rounds or fewer buckets find more, not
    a larger m. Diffuse heads, whose output is a mean over hundreds of keys, may be served worse
    than by as many keys drawn blindly, for a bucket is no fair sample of all. Buckets are constants
    for autograd. A negative ``scale`` turns queries round before they are hashed.

    Raises:
        ValueError: An option is not of the range above, or ``projection`` of another shape.
        Unsupported: A mask other than key padding, or ``shared_qk`` with lengths that differ.

    References:
        N. Kitaev et al., "Reformer: The Efficient Transformer", 2020,
        https://arxiv.org/abs/2001.04451.
        A. Andoni et al., "Practical and Optimal LSH for Angular Distance", 2015,
        https://arxiv.org/abs/1509.02897.
        B. Neyshabur and N. Srebro, "On Symmetric and Asymmetric LSHs for Inner Product Search",
        2015, https://arxiv.org/abs/1410.5518.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> lsh_attention(q, k, v, bucket_size=16).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = LSH(bucket_size, num_rounds, num_buckets, shared_qk, window, num_sinks)
    if shared_qk and query.shape[2] != key.shape[2]:
        raise Unsupported(
            f"lsh: shared_qk=True needs a key for every query; got {query.shape[2]} queries and "
            f"{key.shape[2]} keys. Use shared_qk=False."
        )
    if x.empty:
        return x.nothing()
    projection = fill(options, {"projection": projection}, x.k, generator)["projection"]
    x, place = x.compact()
    if shared_qk:
        x = replace(x, k=unit(x.k))
    row_labels, key_labels = _labels(x, projection, num_buckets, shared_qk)
    if is_causal:
        out = bucket_attention(
            *(x, row_labels, key_labels),
            size=bucket_size,
            window=window,
            num_sinks=num_sinks,
            hide_own=shared_qk,
        )
        return x.restore(out, place)
    rounds = _chunk_rounds(x, row_labels, key_labels, bucket_size, num_buckets)
    pair = union_attention(
        x.q, x.k, x.v, rounds, scale=x.scale, hide_own=x.group if shared_qk else 0
    )
    return x.restore(own_if_alone(x, *pair) if shared_qk else pair[0], place)


@torch.no_grad()
def _labels(
    x: Inputs, projection: Tensor, num_buckets: int, shared_qk: bool
) -> tuple[Tensor, Tensor]:
    """Buckets of rows and of keys, int (B, Hk, R, n); `num_buckets` for what does not exist."""
    hashes = Hashes(projection, x.k, x.scale, shared_qk)
    rows = hashes.queries(x.q)
    keys = hashes.keys(x.k) if x.is_causal or shared_qk else hashes.all_keys(x.k, x.padding)
    if x.padding is not None:
        keys = keys.masked_fill(~x.padding[:, :, None], num_buckets)
    if x.query_padding is not None:
        rows = rows.masked_fill(~x.query_padding[:, :, None], num_buckets)
    return rows, keys


class Hashes:
    """Buckets of queries, and of keys as they come.

    Scaling a vector by a positive number moves it to no other bucket, so that norms need not be
    divided by: (q, 0) is hashed for q', and for k' (k, sqrt(K^2 - |k|^2)).
    """

    def __init__(self, projection: Tensor, key: Tensor, scale: float, shared_qk: bool) -> None:
        """Before the first key.

        Args:
            projection: (Hk, R, D', b / 2).
            key: (B, Hk, n, D), for its shape and type only.
            scale: Factor of the logits, for its sign.
            shared_qk: Whether vectors are hashed as they are.
        """
        self._projection = projection.to(key)
        self._sign, self._shared = math.copysign(1.0, scale), shared_qk
        batch, heads, _, dim = key.shape
        self._count = 0
        self._sum = key.new_zeros((batch, heads, 1, dim), dtype=torch.float64)
        self._peak = key.new_zeros((batch, heads, 1))  # K^2

    def queries(self, q: Tensor) -> Tensor:
        """Buckets (B, Hk, R, n) of queries (B, Hk, n, D)."""
        return _hash(self._sign * q, self._projection[:, :, : q.shape[3]])

    def keys(self, k: Tensor) -> Tensor:
        """Buckets of the next keys, each by the mean and K of the keys up to itself."""
        if self._shared:
            return _hash(k, self._projection)
        total = k.cumsum(2, dtype=torch.float64) + self._sum
        count = torch.arange(1, k.shape[2] + 1, device=k.device) + self._count
        centred = k - (total / count[:, None]).to(k)
        norms = centred.square().sum(-1)
        peak = norms.cummax(-1).values.maximum(self._peak)
        self._count += k.shape[2]
        if k.shape[2]:
            self._sum, self._peak = total[:, :, -1:], peak[:, :, -1:]
        return _hash(_on_sphere(centred, norms, peak), self._projection)

    def all_keys(self, k: Tensor, padding: Tensor | None) -> Tensor:
        """Buckets of keys by the mean and K of all that exist."""
        centred = k - masked_mean(k, padding)
        norms = centred.square().sum(-1)
        known = norms if padding is None else norms.masked_fill(~padding, 0.0)
        peak = known.amax(-1, keepdim=True)
        return _hash(_on_sphere(centred, norms, peak), self._projection)

    @property
    def nbytes(self) -> int:
        """Bytes of the running mean and K."""
        return 0 if self._shared else self._sum.nbytes + self._peak.nbytes


def _on_sphere(x: Tensor, norms: Tensor, peak: Tensor) -> Tensor:
    """(x, sqrt(peak - |x|^2)), all of norm sqrt(peak), from the squares of the norms of x."""
    rest = (peak - norms).clamp(min=0).sqrt()
    return torch.cat([x, rest[..., None]], -1)


def _hash(x: Tensor, projection: Tensor) -> Tensor:
    """Buckets (B, Hk, R, n) of tokens (B, Hk, n, D'): argmax [x R, -x R] in every round.

    The projection is (Hk, R, D', b / 2).
    """
    heads, rounds, dim, half = projection.shape
    if not half:
        return x.new_zeros((*x.shape[:2], 1, x.shape[2]), dtype=torch.int64)
    towards = projection.transpose(1, 2).reshape(heads, dim, rounds * half)
    some = max(tile_elements(x.device) // (x.shape[0] * heads * rounds * half), 1)
    labels = []
    for part in x.split(some, 2):
        y = (part @ towards).unflatten(-1, (rounds, half))
        best = y.abs().max(-1, keepdim=True).indices
        labels.append(torch.where(y.gather(-1, best) < 0, best + half, best)[..., 0])
    return torch.cat(labels, 2).transpose(2, 3).contiguous()


def _chunk_rounds(
    x: Inputs, row_labels: Tensor, key_labels: Tensor, size: int, num_buckets: int
) -> list[Round]:
    """Rounds of the form that is not causal: the chunk of a row's slot, and the one before."""
    labels = row_labels.unflatten(-1, (-1, x.group)).transpose(-1, -2)  # (B, Hk, R, group, Nq)
    counts = _counts(key_labels, num_buckets)[..., None, :]
    queries = _counts(labels, num_buckets)
    order = labels.argsort(dim=-1, stable=True)
    rank = inverse(order) - _look_up(queries.cumsum(-1) - queries, labels)
    # (2 rank + 1) / (2 queries), as a fraction of the keys of the bucket.
    slot = (2 * rank + 1) * _look_up(counts, labels) // (2 * _look_up(queries, labels))
    slot = slot + _look_up(counts.cumsum(-1) - counts, labels)
    slot = slot.transpose(-1, -2).flatten(3)  # (B, Hk, R, rows)
    num_keys = x.num_keys[..., None, None]
    chunk = torch.minimum(slot, num_keys - 1) // size
    first = (chunk - 1) * size
    last = torch.minimum((chunk + 1) * size, num_keys)
    # With one query head, the order by bucket is that by slot.
    rows = order[:, :, :, 0] if x.group == 1 else slot.argsort(dim=-1, stable=True)
    keys = key_labels.argsort(dim=-1, stable=True)
    return [
        Round(keys[:, :, r], rows[:, :, r], first[:, :, r], last[:, :, r], size)
        for r in range(keys.shape[2])
    ]


def _counts(labels: Tensor, num_buckets: int) -> Tensor:
    """Tokens of every bucket, and last of those that do not exist: (..., n) -> (..., b + 1)."""
    flat = labels.flatten(0, -2)[None]
    return group_counts(flat, num_buckets + 1, torch.int64)[0].unflatten(0, labels.shape[:-1])


def _look_up(table: Tensor, labels: Tensor) -> Tensor:
    """Entries of tables (..., b + 1) at labels (..., n)."""
    return table.expand(*labels.shape[:-1], -1).gather(-1, labels)


def _chunk_pairs(shape: Shape, size: int) -> int:
    """Pairs of a key head that a round computes: of a tile's chunks, and of the one before."""
    rows, keys = shape.queries * shape.heads // shape.kv_heads, shape.keys
    width = min(size, HEIGHT)
    if not rows or size >= keys:
        return rows * -(-keys // width) * width
    seen = HEIGHT * keys / rows + 2 * size - size * size / keys  # the first chunk has none before
    return round(rows * min(seen + width - math.gcd(size, width), keys))


def _check_options(
    bucket_size: int,
    num_rounds: int,
    num_buckets: int,
    shared_qk: bool,
    window: int,
    num_sinks: int,
) -> None:
    positive(INFO.name, "bucket_size", bucket_size)
    positive(INFO.name, "num_rounds", num_rounds)
    positive(INFO.name, "num_buckets", num_buckets)
    positive(INFO.name, "window", window)
    not_negative(INFO.name, "num_sinks", num_sinks)
    if num_buckets > 1 and num_buckets % 2:
        raise ValueError(f"lsh: num_buckets must be even, or 1; got {num_buckets}.")
    if not isinstance(shared_qk, bool):
        raise ValueError(f"lsh: shared_qk must be True or False; got {shared_qk!r}.")


@register
@dataclass(frozen=True)
class LSH(Method):
    """Options of `lsh_attention`."""

    bucket_size: int = 64
    num_rounds: int = 4
    num_buckets: int = 64
    shared_qk: bool = False
    window: int = 64
    num_sinks: int = 4
    info = INFO
    function = staticmethod(lsh_attention)

    def __post_init__(self) -> None:
        _check_options(**self.options())

    def exact_at(self, length: int) -> LSH | None:
        if self.shared_qk:
            return None
        return replace(self, bucket_size=max(length, 1), num_buckets=1)

    def cost(self, shape: Shape) -> Cost:
        """What the tiles multiply where queries and keys are spread evenly over the buckets.

        So are the `units` of a causal call, which are the mean over its rows.
        """
        d, e, size = shape.head_dim, shape.value_dim, self.bucket_size
        heads = shape.batch * shape.kv_heads
        hashed = shape.rows * d + heads * shape.keys * self._width(d)
        flops = 2 * hashed * self._rounds * (self.num_buckets // 2)
        if shape.is_causal:
            reach = bucket_reach(shape.keys, self.num_buckets, size)
            units = math.ceil(self._rounds * reach) + self.window + self.num_sinks
            pairs = bucket_pairs(
                shape,
                size=size,
                window=self.window,
                num_sinks=self.num_sinks,
                num_rounds=self._rounds,
                num_labels=self.num_buckets,
            )
        else:
            units = 2 * self._rounds * size
            pairs = self._rounds * _chunk_pairs(shape, size)
        flops += 2 * heads * pairs * (d + e)
        return Cost(flops, shape.io, self._cache(shape), units=min(units, shape.keys))

    @property
    def _rounds(self) -> int:
        """Rounds that differ."""
        return self.num_rounds if self.num_buckets > 1 else 1

    def _cache(self, shape: Shape) -> int:
        heads = shape.batch * shape.kv_heads
        per_key = (shape.head_dim + shape.value_dim) * shape.itemsize + LABEL_BYTES * self._rounds
        mean = 0 if self.shared_qk else 8 * shape.head_dim + max(shape.itemsize, 4)
        return heads * (shape.keys * per_key + mean)

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        shape = (num_heads, self.num_rounds, self._width(head_dim), self.num_buckets // 2)
        return {"projection": Draw("normal", shape)}

    def _width(self, head_dim: int) -> int:
        """D', the width of what is hashed."""
        return head_dim if self.shared_qk else head_dim + 1

    def module(self, *, num_heads: int, head_dim: int) -> LSHAttention:
        return LSHAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        x = prepare(INFO, key, key, value, None, False, scale, False)
        projection = fill(self, {"projection": None, **tensors}, key, None)["projection"]
        return BucketState(
            INFO,
            key,
            value,
            Hashes(projection.detach(), x.k, x.scale, self.shared_qk),
            size=self.bucket_size,
            window=self.window,
            num_sinks=self.num_sinks,
            scale=scale,
            enable_gqa=enable_gqa,
            hide_own=self.shared_qk,
        )


class LSHAttention(DrawnAttention):
    """`lsh_attention` with hashes that are drawn once and saved with the model.

    Buffer: ``projection`` (Hk, num_rounds, D', num_buckets / 2).
    """

    record = LSH
