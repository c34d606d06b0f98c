"""Attention inside of buckets: the union of several rounds, each with an order of its own.

A round sorts the keys so that those a row sees are an interval; rows are sorted too, so that the
rows of a tile read the same keys. A pair that several rounds see counts once, in the first of them.
Causally a row sees the latest keys of its own bucket in every round and the latest keys of all;
both are known when the row is, so nothing leaks, and decoding gives the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from numattn.core.cost import Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, prepare
from numattn.core.linalg import take
from numattn.core.partial import Partial
from numattn.core.state import Buffer, State
from numattn.engines.blocks import blocks_attention
from numattn.engines.tiles import recompute, spans, tile_elements

HEIGHT = 64  # rows of a tile

LABEL_BYTES = 4  # of the label of one key in one round, in a decoding state


@dataclass(frozen=True)
class Round:
    """An order of the keys, and the interval of it that each row sees.

    Attributes:
        keys: int (B or 1, Hk or 1, Nk), the order; None for the natural one.
        rows: int (B or 1, Hk or 1, rows), the order in which rows are computed, best one in which
            neighbours see like intervals; None for the natural one.
        first: int (B or 1, Hk or 1, rows); row r sees the keys at places first_r <= place of
        last: the order and before last_r; first_r may be negative. Rows are in natural order here.
        size: Keys of the longest interval, as far as is known; it sets the width of tiles.
    """

    keys: Tensor | None
    rows: Tensor | None
    first: Tensor
    last: Tensor
    size: int


def unit(x: Tensor) -> Tensor:
    """Vectors of length one along the last dimension; zero stays zero."""
    norm = x.norm(dim=-1, keepdim=True)
    return x / (norm + (norm == 0))


def inverse(order: Tensor) -> Tensor:
    """The inverse of permutations along the last dimension."""
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def union_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rounds: Sequence[Round],
    *,
    scale: float,
    hide_own: int = 0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the keys that a row sees in any of the rounds, each counted once.

    Args:
        q: (B, Hk, rows, D), float32 or float64.
        k: (B, Hk, Nk, D).
        v: (B, Hk, Nk, E).
        rounds: One or more.
        scale: Factor of the logits.
        hide_own: If positive, row r does not see key ``r // hide_own``.

    Returns:
        out (B, Hk, rows, E) and lse (B, Hk, rows); zeros and -inf for a row that sees nothing.
        Both are differentiable in q, k and v.

    Cost: the tiles between the least ``first`` and the greatest ``last`` of 64 neighbouring rows.
    A pair of round t is compared with the intervals of the t rounds before.
    """
    batch, heads, rows, _ = q.shape
    here = torch.arange(k.shape[2], device=q.device)
    low, high, code = [], [], []  # columns of what is counted already
    if hide_own:
        position = torch.arange(rows, device=q.device) // hide_own
        low, high, code = [position], [position + 1], [here]
    part: Partial | None = None
    for this in rounds:
        skip = [_columns(x, batch, heads) for x in (low, high, code)]
        attend = partial(_attend, scale, min(max(this.size, 1), HEIGHT))
        pair = recompute(attend, q, k, v, this.keys, this.rows, this.first, this.last, *skip)
        if len(rounds) == 1:
            return pair
        found = Partial.from_lse(*pair)
        part = found if part is None else part.merge(found)
        low, high = [*low, this.first], [*high, this.last]
        code = [*code, here if this.keys is None else inverse(this.keys)]
    if part is None:
        raise ValueError("union_attention needs a round.")
    return part.finalize()


def _columns(parts: list[Tensor], batch: int, heads: int) -> Tensor | None:
    """Integers of shapes that broadcast to (B, Hk, n), side by side: (B, Hk, n, C)."""
    if not parts:
        return None
    return torch.stack([x.to(torch.int32).expand(batch, heads, -1) for x in parts], -1)


def _attend(
    scale: float,
    width: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor | None,
    rows: Tensor | None,
    first: Tensor,
    last: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    code: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One round, without the pairs that are counted already."""
    if keys is not None:
        k, v = take(k, keys), take(v, keys)
        code = None if code is None else take(code, keys)
    if rows is not None:
        q = take(q, rows)
        order = rows.expand(*q.shape[:3])
        first, last = (x.expand_as(order).gather(-1, order) for x in (first, last))
        low, high = (None if x is None else take(x, rows) for x in (low, high))
    skip = None
    if low is not None and high is not None and code is not None:
        skip = (low, high, code)
    out, lse = blocks_attention(
        *(q, k, v), height=HEIGHT, width=width, scale=scale, first=first, last=last, skip=skip
    )
    if rows is None:
        return out, lse
    back = inverse(order)
    return take(out, back), lse.gather(-1, back)


def recent_rounds(
    rows: int, group: int, window: int, num_sinks: int, num_keys: Tensor
) -> list[Round]:
    """The last `window` positions up to a row's own, and before them the first `num_sinks`.

    Only the first `num_keys` (B or 1, 1) keys exist.
    """
    after = torch.arange(rows, device=num_keys.device) // group + 1
    after = torch.minimum(after, num_keys[..., None])
    rounds = [Round(None, None, after - window, after, window)]
    if num_sinks:
        far = (after - window).clamp(max=num_sinks)
        rounds.append(Round(None, None, torch.zeros_like(far), far, num_sinks))
    return rounds


def bucket_rounds(
    row_labels: Tensor, key_labels: Tensor, *, size: int, group: int, num_keys: Tensor
) -> list[Round]:
    """Causal rounds: a row sees the latest `size` keys of its own label, up to its position.

    Args:
        row_labels: int (B, Hk, R, Nk * group); row r stands at position ``r // group``.
        key_labels: int (B, Hk, R, Nk), of R rounds.
        size: Most keys that a row sees in a round.
        group: Rows per position.
        num_keys: int (B or 1, 1), how many keys exist; they come first, and the labels of the
            others must be greater than theirs.
    """
    length = key_labels.shape[-1]
    label, keys = key_labels.sort(dim=-1, stable=True)
    code = label.long() * length + keys  # in 64 bits: labels times length may not fit 32
    start = row_labels.long() * length
    position = torch.arange(row_labels.shape[-1], device=code.device) // group
    last = torch.searchsorted(code, start + position, right=True)
    first = torch.maximum(torch.searchsorted(code, start), last - size)
    last = torch.minimum(last, num_keys[..., None, None])
    rows = row_labels.argsort(dim=-1, stable=True)
    return [
        Round(keys[:, :, r], rows[:, :, r], first[:, :, r], last[:, :, r], size)
        for r in range(keys.shape[2])
    ]


def bucket_attention(
    x: Inputs,
    row_labels: Tensor,
    key_labels: Tensor,
    *,
    size: int,
    window: int,
    num_sinks: int = 0,
    hide_own: bool = False,
) -> Tensor:
    """Causal attention to the latest keys of a row's own buckets, the latest of all and the first.

    Row i sees key j <= i if i - j < `window`, if j < `num_sinks`, or if in any round j is among the
    latest `size` keys up to i that have the label of i.

    Args:
        x: The call, with its padding last as `Inputs.compact` puts it.
        row_labels: int (B, Hk, R, rows), as in `bucket_rounds`.
        key_labels: int (B, Hk, R, Nk).
        size: Most keys of a bucket that a row sees in a round.
        window: Latest keys that every row sees, positive.
        num_sinks: First keys that every row sees.
        hide_own: A row does not see its own key, unless it sees no other.

    Returns:
        (B, Hk, rows, E).
    """
    rounds = recent_rounds(x.q.shape[2], x.group, window, num_sinks, x.num_keys)
    rounds += bucket_rounds(row_labels, key_labels, size=size, group=x.group, num_keys=x.num_keys)
    pair = union_attention(
        x.q, x.k, x.v, rounds, scale=x.scale, hide_own=x.group if hide_own else 0
    )
    return own_if_alone(x, *pair) if hide_own else pair[0]


def own_if_alone(x: Inputs, out: Tensor, lse: Tensor) -> Tensor:
    """The rows that see nothing replaced by their own values, where those exist."""
    own = torch.arange(x.q.shape[2], device=lse.device) // x.group
    alone = (lse == -torch.inf) & (own < x.num_keys[..., None])
    return torch.where(alone[..., None], take(x.v, own.expand(1, 1, -1)), out)


def bucket_reach(keys: int, num_labels: int, size: int) -> float:
    """Keys of its own bucket that a causal row sees in the mean, labels being spread evenly."""
    bucket = keys / num_labels  # the row at place t of its bucket sees min(t, size) keys
    return bucket / 2 if bucket <= size else size - size * size / (2 * bucket)


def bucket_pairs(
    shape: Shape, *, size: int, window: int, num_sinks: int, num_rounds: int, num_labels: int
) -> int:
    """Pairs of a key head that `bucket_attention` computes, where labels are spread evenly."""
    group, keys = shape.heads // shape.kv_heads, shape.keys
    rows, width = shape.queries * group, min(window, HEIGHT)
    near = 0
    for r0, r1 in spans(rows, HEIGHT):
        first, last = max(r0 // group + 1 - window, 0), (r1 - 1) // group + 1
        near += HEIGHT * width * (-(-last // width) - first // width)
        near += HEIGHT * min(num_sinks, last) if last > window else 0
    width = min(size, HEIGHT)
    # A tile sees the keys of its first row and as many more as it has positions, in tiles of keys
    # that begin anywhere.
    seen = min(bucket_reach(keys, num_labels, size) + HEIGHT / group + width - 1, keys)
    return near + round(num_rounds * rows * seen)


class Labels(Protocol):
    """What gives tokens their labels, one of each of R rounds, as they come."""

    def queries(self, q: Tensor) -> Tensor:
        """Of queries (B, Hk, n, D): int (B, Hk, R, n)."""

    def keys(self, k: Tensor) -> Tensor:
        """Of the next keys (B, Hk, n, D): int (B, Hk, R, n)."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept from one call to the next."""


class BucketState(State):
    """Decoding state of `bucket_attention`: every key and value, and the labels of the keys.

    Queries of `attend` stand at the last token.
    """

    def __init__(
        self,
        info: Info,
        key: Tensor,
        value: Tensor,
        labels: Labels,
        *,
        size: int,
        window: int,
        num_sinks: int = 0,
        scale: float | None,
        enable_gqa: bool,
        hide_own: bool = False,
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0.

        Args:
            info: Of the method.
            key: The prefix.
            value: The prefix.
            labels: It must not have seen a key.
            size: As in `bucket_attention`.
            window: As in `bucket_attention`.
            num_sinks: As in `bucket_attention`.
            scale: As in a call.
            enable_gqa: As in a call.
            hide_own: As in `bucket_attention`; keys are then taken by direction.
        """
        self._info, self._labels = info, labels
        self._size, self._window, self._hide_own = size, window, hide_own
        self._num_sinks = num_sinks
        self._scale, self._enable_gqa = scale, enable_gqa
        self._keys = Buffer(key.detach()[:, :, :0])
        self._values = Buffer(value.detach()[:, :, :0])
        self._key_labels = Buffer(self._label(key))
        self._keys.append(key.detach())
        self._values.append(value.detach())

    def _label(self, key: Tensor) -> Tensor:
        """Labels of new keys, (B, Hk, n, R)."""
        x = prepare(self._info, key, key, key, None, False, self._scale, False)
        return self._labels.keys(x.k).to(torch.int32).transpose(2, 3)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        self._key_labels.append(self._label(key))
        self._keys.append(key)
        self._values.append(value)

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        kept = (self._keys.tensor, self._values.tensor)
        x = prepare(self._info, query, *kept, None, False, self._scale, self._enable_gqa)
        if x.empty:
            return x.nothing()
        k = unit(x.k) if self._hide_own else x.k
        some = tile_elements(x.k.device) // self._key_labels.tensor.numel()
        outs = [self._attend(q, k, x.v, x.scale) for q in x.q.split(max(some, 1), 2)]
        return x.restore(torch.cat(outs, 2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        lists = self._lists(self._labels.queries(q))
        out, lse = blocks_attention(q, k, v, lists, height=1, width=1, scale=scale)
        return torch.where((lse == -torch.inf)[..., None], v[:, :, -1:], out)

    def _lists(self, labels: Tensor) -> Tensor:
        """The keys that rows with these labels (B, Hk, R, n) see, (B, Hk, n, L); -1 for none."""
        theirs = self._key_labels.tensor.mT[:, :, :, None]  # (B, Hk, R, 1, N)
        length = theirs.shape[-1]
        place = torch.arange(length, device=labels.device)
        mine = torch.where(labels[..., None] == theirs, place, -1)
        latest = mine.topk(min(self._size, length), -1).values  # (B, Hk, R, n, size)
        always = torch.cat([place[: self._num_sinks], place[-self._window :]])
        always = always.expand(*labels.shape[:2], labels.shape[3], -1)
        lists = torch.cat([latest.transpose(2, 3).flatten(3), always], -1)
        return lists.masked_fill(lists == length - 1, -1) if self._hide_own else lists

    @property
    def nbytes(self) -> int:
        kept = self._keys.nbytes + self._values.nbytes + self._key_labels.nbytes
        return kept + self._labels.nbytes

    @property
    def nbytes_read(self) -> int:
        *_, length, rounds = self._key_labels.tensor.shape
        listed = min(rounds * self._size + self._window + self._num_sinks, length)
        kept = self._keys.nbytes + self._values.nbytes
        return kept * listed // max(length, 1) + self._key_labels.nbytes
