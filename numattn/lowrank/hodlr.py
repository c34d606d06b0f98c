"""Hierarchical attention: near tokens one by one, far ones by means over a tree of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, not_negative, positive, prepare
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.blocks import blocks_attention
from numattn.engines.lift import StreamingState, Summary, streaming_bytes
from numattn.engines.softmax import key_bias, softmax_partial

INFO = Info(
    name="hodlr",
    family="lowrank",
    summary="exact diagonal blocks, off-diagonal ones through means over a tree (H-Transformer-1D)",
    paper="https://arxiv.org/abs/2107.11906",
    complexity="N m log(N / m) (d + e)",
    budget="block_size",
    approximates="softmax",
    causal="native",
    mask="padding",
    cross=False,
    bounded=False,
)


def hodlr_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    num_sinks: int = 4,
    coarse_queries: bool = False,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention with off-diagonal blocks of low rank, hierarchically.

    Tokens go in blocks of m = ``block_size``, two neighbouring blocks in one of 2 m, and so on
    (a binary tree). A query sees the m keys of its own block one by one, and of every larger block
    around it the other half, which is the sibling of the half that the query is in: at level l as m
    keys, each the mean of :math:`2^l` consecutive ones. With the set C of a mean and the number
    n of tokens that it holds, all in one softmax,

    .. math:: \mathrm{out}_i = \frac{\sum_C n_C\, e^{q_i \cdot \bar k_C}\, \bar v_C}
              {\sum_C n_C\, e^{q_i \cdot \bar k_C}} ,

    where the sets of a query are disjoint and together all tokens that it may see. Causally only
    the later one of two siblings sees the earlier one. This is the HODLR form of a matrix: exact
    blocks on the diagonal, and blocks of rank at most m off it.

    The first ``num_sinks`` tokens stand outside of the tree: every query sees them, and they see
    every key, exactly. Heads of causal language models put much of their weight on the first
    tokens, and a mean over a sink and its neighbours is like none of them.

    Args:
        query: (B, H, N, D).
        key: (B, Hk, N, D).
        value: (B, Hk, N, E).
        block_size: m, tokens of a block that is exact, and means by which a sibling is seen;
            positive.
        num_sinks: First tokens that are kept exactly, not negative; 0 in the paper.
        coarse_queries: Also take means of queries, as the paper does: at level l the means of
            :math:`2^l` consecutive queries attend, and each of these gets what its mean found.
        attn_mask: bool key padding (B, 1, 1, N), True = attend. It speaks of queries and keys, and
            padding is in no mean; positions in the tree are counted over the tokens that exist.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, N, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 N m (L + 1) (D + E) operations per head with L = log2(N / m) rounded up, of the L levels
    about half when causal; 6 N m (D + E) with ``coarse_queries``. A sink adds 4 N (D + E), half of
    it when causal. Memory is linear in N. Decoding keeps the sinks, up to m tokens, and m means for
    each binary digit 1 of the number of whole blocks before these.

    Exact when: N - num_sinks <= 2 m, for siblings at level 0 are seen token by token; or keys are
    equal within every mean that is used, whatever the values. With ``coarse_queries`` queries must
    be equal within the means, too.

    Limits: a mean stands for its keys only where they are near each other on the scale of the
    logits. By Jensen's inequality it never overstates their weight; with logits of standard
    deviation s among them it understates it by a factor of about exp(s^2 / 2), so that a single
    strong key far away is lost. Tokens on the two sides of a border between large blocks see each
    other by large means, however near they are; the paper's form avoids this, at about twice the
    cost, by letting both neighbours of a block be seen at every level. The rank of the whole matrix
    is not bounded: its exact diagonal alone can have full rank.

    Raises:
        Unsupported: Query and key lengths differ, for then the two trees have no common diagonal;
            or ``coarse_queries`` is given for a causal call, in which the mean over a set of
            queries would carry the later ones into the rows of the earlier ones.
        ValueError: An option is not an integer of the range above.

    References:
        Z. Zhu, R. Soricut, "H-Transformer-1D: Fast One-Dimensional Hierarchical Attention for
        Sequences", 2021, https://arxiv.org/abs/2107.11906.
        S. Ambikasaran, E. Darve, "An O(N log N) Fast Direct Solver for Partial Hierarchically
        Semi-Separable Matrices", 2013, https://doi.org/10.1007/s10915-013-9714-z.

    Example:
        >>> q = k = torch.zeros(1, 1, 4, 2)
        >>> v = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 4, 1)
        >>> hodlr_attention(q, k, v, block_size=1, num_sinks=0, is_causal=True).flatten()
        tensor([1.0000, 1.5000, 2.0000, 3.0000])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(block_size, num_sinks, coarse_queries)
    if coarse_queries and is_causal:
        raise Unsupported(_LEAK)
    if x.empty:
        return x.nothing()
    x, place = x.compact()
    sinks = min(num_sinks, x.k.shape[2])
    outs = []
    if sinks:
        outs.append(_from_sinks(x, sinks))
    if sinks < x.k.shape[2]:
        outs.append(_from_others(x, sinks, block_size, coarse_queries))
    return x.restore(torch.cat(outs, 2), place)


_LEAK = (
    "hodlr: coarse_queries has no causal form: the mean over a set of queries would carry the "
    "later ones into the rows of the earlier ones. Use coarse_queries=False."
)


def _from_sinks(x: Inputs, sinks: int) -> Tensor:
    """Rows of the first tokens, which see everything that they may: (B, Hk, sinks * group, E)."""
    last = sinks if x.is_causal else x.k.shape[2]
    return _exact(x, x.q[:, :, : sinks * x.group], last, x.is_causal).out()


def _from_others(x: Inputs, sinks: int, block_size: int, coarse_queries: bool) -> Tensor:
    """Rows of the other tokens, over the tree and the first tokens."""
    later = replace(
        x,
        q=x.q[:, :, sinks * x.group :],
        k=x.k[:, :, sinks:],
        v=x.v[:, :, sinks:],
        padding=None if x.padding is None else x.padding[..., sinks:],
    )
    part = _attend_tree(later, block_size, coarse_queries)
    if sinks:
        part = part.merge(_exact(x, later.q, sinks, False))
    return part.out()


def _exact(x: Inputs, q: Tensor, last: int, is_causal: bool) -> Partial:
    """Rows q over the first `last` keys."""
    bias = None if x.padding is None else key_bias(x.padding[..., :last], q)
    keys, values = x.k[:, :, :last], x.v[:, :, :last]
    return softmax_partial(
        q, keys, values, scale=x.scale, bias=bias, is_causal=is_causal, group=x.group
    )


def _attend_tree(x: Inputs, block_size: int, coarse_queries: bool) -> Partial:
    """Every row over its own block and the siblings of the blocks around it."""
    counts = _counts(x, block_size)
    keys, values = (_means(t, counts, block_size) for t in (x.k, x.v))
    if not coarse_queries:
        return _attend_levels(x, x.q, keys, values, counts, block_size)
    queries = _means(x.q.unflatten(2, (-1, x.group)).flatten(3), counts, block_size)
    part: Partial | None = None
    for level in reversed(range(1, len(counts))):
        q = queries[level].unflatten(3, (x.group, -1)).flatten(2, 3)
        here = _attend_siblings(x, q, keys[level], values[level], counts[level], block_size)
        part = _join(here, part, x.group)
    fine = _attend_levels(x, x.q, keys[:1], values[:1], counts[:1], block_size)
    return _join(fine, part, x.group)


def _counts(x: Inputs, block_size: int) -> list[Tensor]:
    """Tokens that exist in every mean, level by level up to two blocks: (B or 1, 1, n, 1)."""
    exists = x.padding
    if exists is None:
        exists = x.k.new_ones((1, 1, x.k.shape[2]), dtype=torch.bool)
    counts = [_pad(exists[..., None].to(x.k.dtype), block_size)]
    while counts[-1].shape[2] > 2 * block_size:
        counts.append(_pairs(counts[-1], block_size).sum(3))
    return counts


def _means(x: Tensor, counts: list[Tensor], block_size: int) -> list[Tensor]:
    """Means over the tokens that exist, for every level: (B, H, n, D)."""
    means = [_pad(x, block_size)]
    for fine, coarse in pairwise(counts):
        share = _pairs(fine, block_size)[..., 1, :] / coarse.clamp(min=1)
        a, b = _pairs(means[-1], block_size).unbind(3)
        means.append(torch.lerp(a, b, share))
    return means


def _pad(x: Tensor, size: int) -> Tensor:
    """Zeros after the tokens of (B, H, n, D) up to a multiple of `size`."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size))


def _pairs(x: Tensor, block_size: int) -> Tensor:
    """Neighbouring tokens of an even number of blocks, (B, H, n / 2, 2, D)."""
    return _pad(x, 2 * block_size).unflatten(2, (-1, 2))


def _attend_levels(
    x: Inputs,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    counts: list[Tensor],
    block_size: int,
) -> Partial:
    """Rows q over their own block and one sibling of each level, in one softmax.

    Coarse keys come first and the tokens themselves last, so that those that a causal row may see
    end at its own place.
    """
    k, v, n = (torch.cat([*levels[1:], levels[0]], 2) for levels in (keys, values, counts))
    blocks = [t.shape[2] // block_size for t in counts]
    first = last = None
    if x.is_causal:
        first = torch.zeros(q.shape[2], dtype=torch.int, device=q.device)[None, None]
        before = sum(blocks[1:]) * block_size
        last = torch.arange(q.shape[2], device=q.device)[None, None] // x.group + before + 1
    return Partial.from_lse(
        *blocks_attention(
            q,
            k,
            v,
            _lists(blocks, x.is_causal, q.device)[None, None],
            height=block_size * x.group,
            width=block_size,
            scale=x.scale,
            bias=n[..., 0].log(),
            first=first,
            last=last,
        )
    )


def _lists(blocks: list[int], is_causal: bool, device: torch.device | None = None) -> Tensor:
    """Blocks of keys that each block of queries sees, int (blocks, levels + 1), -1 for none.

    Args:
        blocks: How many blocks there are on each level; they are numbered level by level, the
            finest last.
        is_causal: Whether only earlier siblings are seen.
        device: Of the result.
    """
    own = torch.arange(blocks[0], device=device)
    start = sum(blocks[1:])
    lists = [start + own]
    for level, count in enumerate(blocks):
        at = own >> level
        sibling = at ^ 1
        absent = sibling > at if is_causal else sibling >= count
        begin = start if level == 0 else sum(blocks[1:level])
        lists.append((begin + sibling).masked_fill(absent, -1))
    return torch.stack(lists, -1)


def _attend_siblings(
    x: Inputs, q: Tensor, k: Tensor, v: Tensor, count: Tensor, block_size: int
) -> Partial:
    """Means of queries over the sibling of their block."""
    blocks = count.shape[2] // block_size
    return Partial.from_lse(
        *blocks_attention(
            q,
            k,
            v,
            _lists([blocks], False, q.device)[None, None, :, 1:],
            height=block_size * x.group,
            width=block_size,
            scale=x.scale,
            bias=count[..., 0].log(),
        )
    )


def _join(fine: Partial, coarse: Partial | None, group: int) -> Partial:
    """Merge with the level above, each row of which stands for two."""
    if coarse is None:
        return fine

    def twice(x: Tensor) -> Tensor:
        x = x.unflatten(2, (-1, group)).repeat_interleave(2, 2).flatten(2, 3)
        return x[:, :, : fine.den.shape[2]]

    return fine.merge(Partial(twice(coarse.num), twice(coarse.den), twice(coarse.shift)))


def _check_options(block_size: int, num_sinks: int, coarse_queries: bool) -> None:
    positive(INFO.name, "block_size", block_size)
    not_negative(INFO.name, "num_sinks", num_sinks)
    if not isinstance(coarse_queries, bool):
        raise ValueError(f"hodlr: coarse_queries must be a bool; got {coarse_queries!r}.")


@register
@dataclass(frozen=True)
class HODLR(Method):
    """Options of `hodlr_attention`."""

    block_size: int = 64
    num_sinks: int = 4
    coarse_queries: bool = False
    info = INFO
    function = staticmethod(hodlr_attention)

    def __post_init__(self) -> None:
        _check_options(self.block_size, self.num_sinks, self.coarse_queries)

    def exact_at(self, length: int) -> HODLR:
        return replace(self, block_size=max(length, 1))

    def cost(self, shape: Shape) -> Cost:
        """`units` are the keys and means that a row sees, at the most."""
        n, m, width = shape.keys, self.block_size, shape.head_dim + shape.value_dim
        sinks = min(self.num_sinks, n)
        blocks = [-(-(n - sinks) // m)]
        while blocks[-1] > 2:
            blocks.append(-(-blocks[-1] // 2))
        lists = _lists(blocks, shape.is_causal)
        seen = int((lists[:, : 2 if self.coarse_queries else None] >= 0).sum())
        if self.coarse_queries:
            seen += sum(count - count % 2 for count in blocks[1:])
        pairs = seen * m * m + (n - sinks) * sinks + sinks * (sinks if shape.is_causal else n)
        flops = 2 * shape.batch * shape.heads * pairs * width
        units = min(n, sinks + lists.shape[1] * m)
        return Cost(flops, shape.io, self._cache(shape, sinks), units=units)

    def _cache(self, shape: Shape, sinks: int) -> int | None:
        if self.coarse_queries:
            return None
        width = shape.head_dim + shape.value_dim
        kept = shape.batch * shape.kv_heads * sinks * width * shape.itemsize
        tree = replace(shape, keys=shape.keys - sinks)
        return kept + streaming_bytes(tree, self.block_size, self.block_size)

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
        if self.coarse_queries:
            raise Unsupported(_LEAK)
        return HODLRState(key, value, self, scale=scale, enable_gqa=enable_gqa)


class HODLRState(StreamingState):
    """Decoding state: the first tokens and those of the last block as they are, and older blocks.

    An older block is kept as ``block_size`` means, one for each binary digit 1 of the number of
    whole blocks: these are the earlier siblings of the blocks around the next token.
    """

    def __init__(
        self, key: Tensor, value: Tensor, options: HODLR, *, scale: float | None, enable_gqa: bool
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        self._sinks = options.num_sinks
        super().__init__(
            options.info,
            partial(_halve, block_size=options.block_size),
            key,
            value,
            leaf=options.num_sinks + options.block_size,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    def _flush(self) -> None:
        """The tokens after the sinks become a summary, and the sinks stay."""
        k, v = self._keys.tensor, self._values.tensor
        self._keys, self._values = (Buffer(t[:, :, self._sinks :].clone()) for t in (k, v))
        super()._flush()
        self._keys, self._values = (Buffer(t[:, :, : self._sinks].clone()) for t in (k, v))


def _halve(x: Summary, block_size: int) -> Summary:
    """A block as it is, and two of a level by the means of pairs."""
    if x.k.shape[2] <= block_size:
        return x

    def pairs(t: Tensor) -> Tensor:
        return t.unflatten(2, (-1, 2))

    return Summary(pairs(x.k).mean(3), pairs(x.columns).sum(3), x.bias[..., ::2], x.width)
