"""Loki: the heaviest keys of every row, found by the few coordinates in which keys vary most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape, visible_pairs
from numattn.core.info import Info
from numattn.core.inputs import (
    Inputs,
    Unsupported,
    check,
    compute_dtype,
    fold,
    one_of,
    positive,
    prepare,
    unfold,
)
from numattn.core.linalg import finite, masked_mean, take
from numattn.core.masks import visible
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.blocks import attend_lists, blocks_attention
from numattn.engines.softmax import crop, key_bias
from numattn.engines.tiles import recompute, spans, tile_elements

INFO = Info(
    name="loki",
    family="lowrank",
    summary="the heaviest keys of every row, by logits in the principal axes of the keys (Loki)",
    paper="https://arxiv.org/abs/2406.02542",
    complexity="N^2 r + N k (d + e)",
    budget="num_keys",
    approximates="softmax",
    causal="native",
    mask="full",
    judged_as="sparse",  # it keeps keys: its weights may have any rank
    fits_causal=True,
    state_tensors=("basis",),
)

_LEAST_ROWS = 32  # of a tile: fewer would read the keys too often
_ORIGINS = ("mean", "first")
VOTERS = 16  # rows of a tile that choose its keys
_STRIPS = 16  # of a causal choice at least: one strip computes its whole rectangle


def loki_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_keys: int = 64,
    rank: int | None = None,
    query_tile: int = 1,
    origin: Literal["mean", "first"] = "mean",
    basis: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention over the keys whose logits in a few coordinates are largest (Loki).

    Keys of trained heads vary in few directions. With an orthogonal matrix :math:`\Omega`, rotated
    queries and keys :math:`\hat q = \Omega^T q, \hat k = \Omega^T k` have the logits of before, and
    their first r coordinates say most of it:

    .. math:: q_i \cdot k_j = \hat q_i \cdot \hat k_j
              \approx \sum_{c \le r} \hat q_{ic}\, \hat k_{jc} .

    A row keeps the ``num_keys`` keys of the largest approximate logits, and attends to these by
    exact logits, of all D coordinates. Rows that may see fewer keys keep them all; of equal logits
    that of the lower index wins.

    The columns of :math:`\Omega` are the principal axes of the keys about their mean, by falling
    variance. A shift of all keys adds the same number to all logits of a row, so the mean says
    nothing about which key is heavy, and none is subtracted from the keys in a call. But keys of
    trained heads share a large mean; axes about zero would spend the first on it. With ``origin`` =
    ``"first"``, not in the paper, they are the axes of the keys about the first one instead: where
    that is an attention sink, apart from all others, the way to it becomes one of the first axes.
    About the mean it is not, since the sink is but one key in N.

    With ``query_tile`` t > 1, not in the paper, each t consecutive positions of a query head share
    one list of ``num_keys`` keys: those that come nearest to the largest approximate logit of a
    row, in the row where they come nearest, of up to 16 evenly spaced rows of the tile. Scores and
    lists then are much cheaper to work with. In a causal call the rows of the tile before choose
    for a tile, among all keys before it, so that nothing of the future enters; a row also attends
    to the keys of its own tile up to itself, over and above ``num_keys``.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_keys: Keys that a row keeps, positive. A causal row with ``query_tile`` t > 1 attends
            to as many before its tile, and at most t more in it.
        rank: r, coordinates of the approximate logits, from 1 to D; None is D // 4, at least 1.
            `explained_variance` helps to choose it.
        origin: ``"mean"`` or ``"first"``; read where a basis is found.
        query_tile: t, positions that share their keys, counted from the first token that exists.
        basis: :math:`\Omega`, (Hk, D, D) or (B or 1, Hk, D, D), orthogonal. When None, the
            principal axes of the keys of each sequence; causal calls need it given.
        attn_mask: bool (True = attend) or float to add to the logits, broadcastable to
            (B, H, Nq, Nk); may be combined with ``is_causal``. Keys are chosen after it. With
            ``query_tile`` > 1 only bool key padding (B, 1, 1, Nk). Padding enters no basis; other
            masks say which pairs meet, and leave the basis as it is.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. The basis is the key head's; every query head
            chooses for itself.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 Nq Nk r operations per query head for the choice, half of it when causal, and
    2 (Nq + Nk) D r to rotate. With ``query_tile`` = 1 exact logits and values are dense products,
    2 Nq Nk (D + E) more, since gathering keys for every row would be slower for all but the
    smallest ``num_keys``; most of the time goes into the selection. With t > 1 they take
    2 Nq num_keys (D + E), the choice 16 / t of its operations where t > 16, and the selection a
    t-th of its time; causal calls add 2 Nq t (D + E).
    Memory is that of one tile, and of the lists, Nq num_keys / t numbers. A decoding step
    reads r numbers of every key, and the others and the value only of those it keeps.

    Exact when: ``num_keys`` >= Nk. With ``query_tile`` = 1 it is exact top-k where r = D, whatever
    the orthogonal basis, and where the keys differ from each other in the first r axes only.

    Limits: a row errs in total variation by exactly the softmax mass of the keys that it drops, and
    no bound of it is computed. Axes of large variance need not be those in which queries look. An
    attention sink is the worst case: few axes about the mean may miss it, and its rows are then
    wrong altogether; a larger ``rank`` or ``origin="first"`` helps. A basis found on a sample suits
    calls that are like it. Rows that share a list and look for different keys find fewer of them.
    The choice is constant for autograd, and so is the basis; gradients jump where the choice
    changes. Decoding rounds rotated keys to the type of the keys, so in half precision it may
    choose other keys than a call.

    Raises:
        ValueError: An option is out of its range, ``rank`` exceeds D, or ``basis`` is of another
            shape.
        Unsupported: A causal call without ``basis``; with ``query_tile`` > 1, a mask other than key
            padding.

    References:
        P. Singhania et al., "Loki: Low-rank Keys for Efficient Sparse Attention", 2024,
        https://arxiv.org/abs/2406.02542.

    Example:
        >>> q = k = torch.tensor([[9.0, 0.1], [-9.0, 0.1]])[None, None]
        >>> v = torch.tensor([[1.0], [2.0]])[None, None]
        >>> loki_attention(q, k, v, num_keys=1, rank=1).flatten()
        tensor([1., 2.])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(num_keys, rank, query_tile, origin)
    axes = _rank(rank, x.k.shape[3])
    if query_tile > 1 and x.mask is not None:
        raise Unsupported(
            "loki: with query_tile > 1 attn_mask must be bool key padding of shape (B, 1, 1, Nk); "
            "query_tile=1 takes any mask."
        )
    if basis is None and is_causal:
        raise Unsupported(
            "loki: a basis found on the keys of a causal call would let the future in; pass basis "
            "(Loki.fit on a sample finds one), or use LokiAttention."
        )
    if x.empty:
        return x.nothing()
    found = _axes(_moment(x.k, x.padding, origin)) if basis is None else basis
    omega = _given(x.k, found)
    if query_tile == 1:
        return x.restore(_by_row(x, omega[..., :axes], num_keys))
    x, place = x.compact()
    return x.restore(fold(_by_tile(x, omega[..., :axes], num_keys, query_tile), x.group), place)


def explained_variance(
    key: Tensor, *, origin: Literal["mean", "first"] = "mean", attn_mask: Tensor | None = None
) -> Tensor:
    """The share of the variance of keys that their first r principal axes hold, for every r.

    Args:
        key: (B, Hk, N, D), a sample.
        origin: As in `loki_attention`.
        attn_mask: bool key padding (B, 1, 1, N); padding does not count.

    Returns:
        float64 (Hk, D), rising to 1; entry r - 1 is the share of r axes.

    Example:
        >>> key = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, -1.0], [-3.0, -1.0]])[None, None]
        >>> explained_variance(key)
        tensor([[0.9000, 1.0000]], dtype=torch.float64)
    """
    one_of(INFO.name, "origin", origin, _ORIGINS)
    variance = torch.linalg.eigvalsh(_pooled(key, attn_mask, origin))[0].flip(-1)
    total = variance.clamp(min=0).cumsum(-1)
    return torch.where(total[:, -1:] > 0, total / total[:, -1:], 1.0)


def _by_row(x: Inputs, axes: Tensor, num_keys: int) -> Tensor:
    """Every row with keys of its own: (B, Hk, rows, E); axes (B or 1, Hk, D, r)."""
    rows, keys = x.q.shape[2], x.k.shape[2]
    low_q, low_k = _project(x, axes)
    bias = key_bias(x.padding, x.q)
    outs = []
    for r0, r1 in spans(rows, _tile_rows(x)):
        last = (r1 - 1) // x.group + 1 if x.is_causal else keys
        start = r0 // x.group if x.is_causal else None
        mask = None if x.mask is None else crop(x.mask, rows, r0, r1, 0, last)
        attend = partial(_attend, num_keys, x.scale, start, x.group)
        sides = (x.q[:, :, r0:r1], low_q[:, :, r0:r1], x.k[:, :, :last], low_k[:, :, :last])
        own = None if bias is None else bias[..., :last]
        outs.append(recompute(attend, *sides, x.v[:, :, :last], own, mask))
    return torch.cat(outs, 2)


@torch.no_grad()
def _project(x: Inputs, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates of the queries, times the scale, and of the keys: (B, Hk, n, r)."""
    return x.q @ (axes * x.scale), x.k @ axes


def _attend(
    num_keys: int,
    scale: float,
    start: int | None,
    group: int,
    q: Tensor,
    low_q: Tensor,
    k: Tensor,
    low_k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """A tile of rows against every key; `start` is the position of its first row when causal."""
    score = low_q @ low_k.mT  # (B, H, rows, Nk)
    logits = (q * scale) @ k.mT
    if bias is not None:
        score = score.add_(bias[..., None, :])
    if mask is not None and mask.dtype is torch.bool:
        score = score.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        score = score + mask.detach()
        logits = logits + mask
    if start is not None:
        seen = visible(q.shape[2], k.shape[2], start, group, q.device)
        score = score.add_(torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf))
    logits = torch.where(_kept(score, num_keys), logits, -torch.inf)
    return Partial.from_logits(logits, v).out()


def _kept(score: Tensor, num_keys: int) -> Tensor:
    """The `num_keys` largest of each row, the first of equal ones; never one of -inf: bool."""
    if num_keys >= score.shape[-1]:
        return score > -torch.inf
    least = score.topk(num_keys, sorted=False).values.amin(-1, keepdim=True)
    above = score > least
    tied = score == least.masked_fill(least == -torch.inf, torch.nan)
    room = num_keys - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))


def _lists(score: Tensor, num_keys: int) -> Tensor:
    """The keys that `_kept` keeps, in their order: int32 (..., num_keys), -1 after the last."""
    kept = _kept(score, num_keys)
    place = kept.cumsum(-1, dtype=torch.int32).mul_(kept).long()  # from 1 on; 0 is thrown away
    number = torch.arange(score.shape[-1], dtype=torch.int32, device=score.device)
    lists = number.new_full((*score.shape[:-1], num_keys + 1), -1)
    return lists.scatter_(-1, place, number.expand_as(place))[..., 1:]


def _by_tile(x: Inputs, axes: Tensor, num_keys: int, height: int) -> Tensor:
    """Tiles of `height` positions with shared keys, of compact inputs: (B, H, Nq, E)."""
    lists = _choose(x, axes, min(num_keys, x.k.shape[2]), height)
    q = unfold(x.q, x.group)
    chosen = attend_lists(q, x.k, x.v, lists, height=height, width=1, scale=x.scale)
    if not x.is_causal:
        return chosen[0]
    place = torch.arange(q.shape[2], device=q.device)[None, None]
    own = blocks_attention(
        q,
        x.k,
        x.v,
        height=height,
        width=height,
        scale=x.scale,
        bias=key_bias(x.padding, q),
        first=place // height * height,
        last=place + 1,
    )
    return Partial.from_lse(*own).merge(Partial.from_lse(*chosen)).out()


@torch.no_grad()
def _choose(x: Inputs, axes: Tensor, num_keys: int, height: int) -> Tensor:
    """The keys of every tile, int32 (B, H, T, num_keys), -1 after the last."""
    batch, heads, keys, _ = x.k.shape
    low_q, low_k = _project(x, axes)
    rows, low_k = _voters(x, low_q, height).flatten(0, 1), low_k.flatten(0, 1)
    held = x.num_keys.expand(batch, heads).flatten()[:, None]  # (B * Hk, 1)
    tiles, late = rows.shape[2], int(x.is_causal)
    together, step = _steps(batch * heads, x.group, height, tiles, keys, late, x.k.device)
    lists = []
    for b0, b1 in spans(batch * heads, together):
        strips = [held.new_full((b1 - b0, x.group, late, num_keys), -1, dtype=torch.int32)]
        for t0, t1 in spans(tiles - late, step):
            last, seen = keys, held[b0:b1]
            if x.is_causal:
                last = t1 * height
                seen = seen.clamp(max=height * torch.arange(t0 + 1, t1 + 1, device=seen.device))
            whole = x.padding is None and (not late or t1 - t0 == 1)
            score = _votes(rows[b0:b1, :, t0:t1], low_k[b0:b1, :last], None if whole else seen)
            strips.append(_lists(score, num_keys))
        lists.append(torch.cat(strips, 2))
    return torch.cat(lists).unflatten(0, (batch, heads)).flatten(1, 2)


def _votes(q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    """How near each key comes to the largest score of a row, in its nearest row of the tile.

    Args:
        q: (b, group, n, voters, r), b of the B * Hk heads.
        k: (b, m, r).
        seen: How many of the keys a tile scores, int (b, n or 1); None for all.

    Returns:
        (b, group, n, m), at most 0; -inf for a key that is not scored.
    """
    score = (q.flatten(1, 3) @ k.mT).unflatten(1, q.shape[1:4])  # (b, group, n, voters, m)
    if seen is not None:
        unseen = torch.arange(k.shape[1], device=k.device) >= seen[..., None]
        bias = score.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
        score = score.add_(bias[:, None, :, None])
    return score.sub_(finite(score.amax(-1, keepdim=True))).amax(3)


def _voters(x: Inputs, q: Tensor, height: int) -> Tensor:
    """Rows that vote, evenly spaced among those of their tile that exist and the last of them.

    Args:
        x: The call, its padding last.
        q: (B, Hk, Nq * group, r).
        height: Positions of a tile.

    Returns:
        (B, Hk, group, T, min(VOTERS, height), r).
    """
    length, number = q.shape[2] // x.group, min(VOTERS, height)
    count = torch.full_like(x.num_keys, length) if x.query_padding is None else x.num_keys
    start = height * torch.arange(-(-length // height), device=q.device)[:, None]  # (T, 1)
    there = (count[..., None, None] - start).clamp(0, height)  # (B or 1, 1, T, 1)
    place = torch.arange(1, number + 1, device=q.device) * there
    place = (start + (place + number - 1) // number - 1).clamp(0, length - 1)
    member = torch.arange(x.group, device=q.device)[:, None, None]
    rows = place[:, :, None] * x.group + member  # (B or 1, 1, group, T, number)
    return take(q, rows.flatten(2)).unflatten(2, rows.shape[2:])


def _tile_rows(x: Inputs) -> int:
    """Rows that are computed together where each has its own keys, a multiple of the group."""
    batch, heads, keys, _ = x.k.shape
    rows = max(tile_elements(x.k.device) // (batch * heads * keys), _LEAST_ROWS)
    return max(rows // x.group, 1) * x.group


def _steps(
    heads: int, group: int, height: int, tiles: int, keys: int, late: int, device: torch.device
) -> tuple[int, int]:
    """Key heads, and tiles of `height` positions, to score together."""
    rows = group * min(VOTERS, height)
    together = min(max(tile_elements(device) // (rows * keys), 1), heads)
    step = max(tile_elements(device) // (together * rows * keys), 1)
    return together, min(step, -(-tiles // _STRIPS)) if late else step


@torch.no_grad()
def _moment(k: Tensor, padding: Tensor | None, origin: str) -> Tensor:
    """Sums of products of the keys that exist, about their origin, float64 (B, Hk, D, D)."""
    k = _from_origin(k.double(), padding, origin)
    return k.mT @ k


def _from_origin(k: Tensor, padding: Tensor | None, origin: str) -> Tensor:
    """Keys (B, Hk, N, D) less the mean, or the first, of those that exist; the others are zero."""
    if not k.shape[2]:
        return k
    if origin == "mean":
        start = masked_mean(k, padding)
    elif padding is None:
        start = k[:, :, :1]
    else:
        start = take(k, padding.to(torch.uint8).argmax(-1, keepdim=True))
    return k - start if padding is None else (k - start).masked_fill(~padding[..., None], 0.0)


def _pooled(key: Tensor, attn_mask: Tensor | None, origin: str) -> Tensor:
    """`_moment` of a whole batch, (1, Hk, D, D): about its mean, or each sequence's first key."""
    x = prepare(INFO, key, key, key, attn_mask, False, None, False)
    if x.mask is not None:
        raise Unsupported(
            "loki: a sample takes bool key padding of shape (B, 1, 1, N) for attn_mask; other "
            "masks do not say which keys exist."
        )
    if origin == "first":
        return _moment(x.k, x.padding, origin).sum(0, keepdim=True)
    x = x.joined()
    return _moment(x.k, x.padding, origin)


def _axes(moment: Tensor) -> Tensor:
    """Principal axes, by falling variance, as columns (..., D, D)."""
    return torch.linalg.eigh(moment).eigenvectors.flip(-1)


def _given(k: Tensor, basis: Tensor) -> Tensor:
    """A basis that was given, (B or 1, Hk, D, D), in the type of the keys (B, Hk, N, D)."""
    batch, heads, _, dim = k.shape
    want = (heads, dim, dim)
    if basis.shape not in (want, (1, *want), (batch, *want)):
        raise ValueError(
            f"loki: basis must have shape {want}, that is (Hk, D, D); got {tuple(basis.shape)}."
        )
    return (basis if basis.dim() == 4 else basis[None]).detach().to(k)


def _rank(rank: int | None, head_dim: int) -> int:
    """How many coordinates approximate the logits."""
    if rank is None:
        return max(head_dim // 4, 1)
    if rank > head_dim:
        raise ValueError(f"loki: rank must be at most the head size; got {rank} > {head_dim}.")
    return rank


def _check_options(num_keys: int, rank: int | None, query_tile: int, origin: str) -> None:
    positive(INFO.name, "num_keys", num_keys)
    positive(INFO.name, "query_tile", query_tile)
    one_of(INFO.name, "origin", origin, _ORIGINS)
    if rank is not None:
        positive(INFO.name, "rank", rank)


@register
@dataclass(frozen=True)
class Loki(Method):
    """Options of `loki_attention`."""

    num_keys: int = 64
    rank: int | None = None
    query_tile: int = 1
    origin: Literal["mean", "first"] = "mean"
    info = INFO
    function = staticmethod(loki_attention)

    def __post_init__(self) -> None:
        _check_options(**self.options())

    def exact_at(self, length: int) -> Loki:
        return replace(self, num_keys=max(length, 1))

    def cost(self, shape: Shape) -> Cost:
        """Finding the axes is counted where the call is not causal.

        `units` is the number of keys of a row: its weights are sparse, and no rank bounds them.
        """
        d, e, r = shape.head_dim, shape.value_dim, _rank(self.rank, shape.head_dim)
        tokens = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * (shape.rows + tokens) * d * r
        if not shape.is_causal:
            flops += 2 * tokens * d * d
        scored = visible_pairs(shape)
        read = scored if self.query_tile == 1 else self._listed(shape)
        if self.query_tile > 1:
            scored = self._scored(shape)
        flops += 2 * scored * r + 2 * read * (d + e)
        units = self.num_keys
        if shape.is_causal and self.query_tile > 1:
            units += self.query_tile
        cache = tokens * (d + e) * shape.itemsize
        return Cost(flops, shape.io, cache, units=min(units, shape.keys))

    def _listed(self, shape: Shape) -> int:
        """Pairs that tiles with lists attend to."""
        t = self.query_tile
        tiles = -(-shape.queries // t)
        each = tiles * min(self.num_keys, shape.keys)
        if shape.is_causal:
            each = sum(min(self.num_keys, n * t) + t for n in range(tiles))
        return shape.batch * shape.heads * each * t

    def _scored(self, shape: Shape) -> int:
        """Pairs that tiles with lists score."""
        t, heads = self.query_tile, shape.batch * shape.kv_heads
        if not shape.keys or not heads:
            return 0
        tiles, group = -(-shape.queries // t), shape.heads // shape.kv_heads
        late, device = int(shape.is_causal), torch.device("cpu")
        _, step = _steps(heads, group, t, tiles, shape.keys, late, device)
        each = tiles * shape.keys
        if shape.is_causal:
            each = sum((t1 - t0) * t1 * t for t0, t1 in spans(tiles - late, step))
        return heads * group * min(VOTERS, t) * each

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
        return {"basis": _axes(_moment(x.k, x.padding, self.origin)).to(x.k)}

    def module(self, *, num_heads: int, head_dim: int) -> LokiAttention:
        return LokiAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        if "basis" not in tensors:
            raise Unsupported(
                "loki: decoding needs a basis that no later token changes; pass basis (Loki.fit on "
                "a sample finds one), or use LokiAttention.state."
            )
        basis = tensors["basis"]
        return LokiState(key, value, self, basis, scale=scale, enable_gqa=enable_gqa)


class LokiState(State):
    """Decoding state: rotated keys, the first coordinates apart from the others, and values.

    Queries of `attend` stand at the last token, and every query head of each chooses its keys for
    itself, whatever ``query_tile`` is.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        options: Loki,
        basis: Tensor,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        x = prepare(INFO, key, key, value, None, False, scale, enable_gqa)
        self._num_keys, self._rank = options.num_keys, _rank(options.rank, key.shape[3])
        self._basis = _given(x.k, basis)
        self._scale, self._enable_gqa = scale, enable_gqa
        first, others = self._rotated(key)
        self._first, self._others = Buffer(first), Buffer(others)
        self._values = Buffer(value.detach())

    def _rotated(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The first coordinates of keys, and the others, in the type of the keys."""
        r = self._rank
        rotated = (key.detach().to(self._basis.dtype) @ self._basis).to(key.dtype)
        return rotated[..., :r].contiguous(), rotated[..., r:].contiguous()

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        first, others = self._rotated(key)
        self._first.append(first)
        self._others.append(others)
        self._values.append(value)

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        kept = (self._first.tensor, self._others.tensor, self._values.tensor)
        like = kept[0][..., :1].expand(-1, -1, -1, self._basis.shape[-1])  # of the shape of keys
        group = check(INFO, query, like, kept[2], None, False, self._scale, self._enable_gqa)
        if 0 in query.shape or 0 in kept[2].shape:
            return query.new_zeros((*query.shape[:3], kept[2].shape[3]))
        dtype = compute_dtype(query.dtype)
        first, others, values = (t.to(dtype) for t in kept)
        scale = query.shape[3] ** -0.5 if self._scale is None else float(self._scale)
        q = fold(query, group).to(dtype) @ self._basis
        score = unfold((q[..., : self._rank] * scale) @ first.mT, group)  # (B, H, n, N)
        lists = _lists(score, min(self._num_keys, score.shape[-1]))
        out, _ = attend_lists(
            unfold(q[..., self._rank :], group),
            others,
            values,
            lists,
            log_weight=score.gather(-1, lists.clamp(min=0).long()),
            height=1,
            width=1,
            scale=scale,
        )
        return out.to(query.dtype)

    @property
    def nbytes(self) -> int:
        return self._first.nbytes + self._others.nbytes + self._values.nbytes

    @property
    def nbytes_read(self) -> int:
        """First coordinates of all keys; the others, and the value, of those one head keeps."""
        length = self._first.tensor.shape[2]
        kept = min(self._num_keys, length)
        rest = self._others.nbytes + self._values.nbytes
        return self._first.nbytes + rest * kept // max(length, 1)


class LokiAttention(AttentionModule):
    """`loki_attention` with a basis that is found once and saved with the model.

    Buffer: ``basis`` (Hk, D, D), the identity until `calibrate` sets it.
    """

    options: Loki
    basis: Tensor

    def __init__(self, *, num_heads: int, head_dim: int, **options: Any) -> None:
        """Start with the coordinates as they are.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            **options: Options of `Loki`.
        """
        super().__init__()
        self.options = Loki(**options)
        self.register_buffer("basis", torch.eye(head_dim).repeat(num_heads, 1, 1))

    @torch.no_grad()
    def calibrate(self, key: Tensor, *, attn_mask: Tensor | None = None) -> None:
        """Set the basis to the principal axes of sample keys, of the whole batch.

        Any orthogonal basis leaves the logits as they are. So the sample may be keys as they enter
        a call, after rotary embedding, or keys before it; a call takes the former in any case.

        Args:
            key: (B, Hk, N, D).
            attn_mask: bool key padding (B, 1, 1, N); padding enters nothing.
        """
        self.basis.copy_(_axes(_pooled(key, attn_mask, self.options.origin))[0])

    def tensors(self) -> dict[str, Tensor]:
        return {"basis": self.basis}
