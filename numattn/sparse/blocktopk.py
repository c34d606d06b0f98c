"""Block top-k attention: every tile of queries reads the few blocks of keys estimated heaviest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, fold, one_of, positive, prepare, unfold
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.engines.blocks import attend_lists
from numattn.engines.softmax import key_bias
from numattn.engines.tiles import spans, tile_elements

INFO = Info(
    name="blocktopk",
    family="sparse",
    summary="the heaviest blocks of keys for every tile of queries, estimated cheaply",
    paper="https://arxiv.org/abs/2503.16428",
    complexity="N k (d + e) + N^2 d / block",
    budget="num_keys",
    approximates="softmax",
    causal="native",
    mask="padding",
    decode=False,
)

_BLOCK = 64
_STRIDE = 8  # of the antidiagonal rule, as in its paper
_RULES = ("centroid", "antidiagonal", "oracle")
_STRIPS = 16  # of a causal estimate at least: one strip computes its whole rectangle


def blocktopk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_keys: int = 512,
    block_size: int | None = None,
    rule: Literal["centroid", "antidiagonal", "oracle"] = "centroid",
    tau: float | None = None,
    stride: int | None = None,
    keep_first: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention over the blocks of keys that a tile of queries weighs most.

    Queries and keys are cut into blocks of ``block_size`` positions. The queries of a block share
    one list of key blocks: those with the largest estimate of the softmax mass that falls into
    them, on average over the rows that vote. With :math:`s_{ij}` the logits and
    :math:`\bar k_b` the mean of the :math:`n_b` keys of block b, a row estimates the masses as

    .. math:: \hat p_{ib} = \frac{n_b\, e^{\mathrm{scale}\, q_i \cdot \bar k_b}}
                                 {\sum_c n_c\, e^{\mathrm{scale}\, q_i \cdot \bar k_c}},
              \qquad p_{ib} = \frac{\sum_{j \in b} e^{s_{ij}}}{\sum_j e^{s_{ij}}}

    by rule ``"centroid"``, and p itself is rule ``"oracle"``. Rule ``"antidiagonal"`` cuts both
    sides into cells of S tokens, takes the mean of the logits on the antidiagonal of a pair of
    cells as the logit of the pair, and sums its softmax over the cells of a block.

    In a causal call a tile keeps its own block, masked at the diagonal, and never one past it.
    Its other blocks are chosen by the queries of the tile before: if a tile's own queries voted,
    later rows would take part in what an earlier row of the tile may see. Neighbouring queries
    look at much the same blocks, so little is lost. The first tile sees its own block only. In a
    call that is not causal, a tile's own queries vote.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_keys: Most keys that a row reads, positive: ``num_keys // block_size`` blocks, at
            least one, the blocks that are always kept among them; all keys where no more than
            ``num_keys`` exist.
        block_size: Positions of a block, positive. None is 64, or a quarter of ``num_keys`` where
            that is less, at least 1.
        rule: ``"centroid"``, ``"antidiagonal"`` or ``"oracle"``. The oracle votes with the tile's
            own rows and the true masses, in a causal call too: it shows what block lists can do,
            takes quadratic time, and lets later rows of a tile into the choice for earlier ones.
        tau: A mass in (0, 1]. A tile then keeps the fewest heaviest blocks, after those that are
            always kept, whose share of the estimated mass reaches ``tau``, and still at most
            ``num_keys``: both limits hold. In a causal call the share is of the blocks before the
            tile, by the oracle also of its own. None, like 1, sets no limit by mass.
        stride: S, of rule ``"antidiagonal"`` only, a divisor of the block; None is 8.
        keep_first: Always keep the first block, which holds the attention sinks. A causal tile
            whose budget is one block keeps its own instead.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Blocks are counted from the
            first token that exists. Where queries and keys are equally many it speaks of both,
            and padding has no vote.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Every query head chooses for itself.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 Nq num_keys (D + E) operations per head for the blocks listed, and for the choice
    2 Nq Nk D / block_size (centroid), / S (antidiagonal) or / 1 (oracle), half of it when causal.
    Memory is that of the lists, Nq num_keys / block_size^2 numbers per head, and of one tile.

    Exact when: ``num_keys`` >= Nk and ``tau`` is None or 1.

    Limits: a row errs in total variation by exactly the softmax mass of the blocks that it does
    not read, and no rule but the oracle knows that mass. Means hide a single heavy key among
    light ones (Jensen), so spiky blocks are underestimated; the antidiagonal does too, unless
    S = 1, which gives the true masses. A tile's rows share one list, which suits rows that agree.
    The choice is constant for autograd. There is no decoding state.

    Raises:
        ValueError: An option is not of the kind above; ``stride`` is given to another rule or does
            not divide the block.
        Unsupported: A mask other than key padding.

    References:
        R. Xu et al., "XAttention: Block Sparse Attention with Antidiagonal Scoring", 2025,
        https://arxiv.org/abs/2503.16428.
        H. Jiang et al., "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via
        Dynamic Sparse Attention", 2024, https://arxiv.org/abs/2407.02490, for blocks chosen by
        means.

    Example:
        >>> q = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])[None, None]
        >>> v = torch.tensor([[1.0], [1.0], [2.0], [2.0]])[None, None]
        >>> blocktopk_attention(q, q, v, num_keys=2, block_size=2, keep_first=False).flatten()
        tensor([1., 1., 2., 2.])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(num_keys, block_size, rule, tau, stride, keep_first)
    if x.empty:
        return x.nothing()
    x, place = x.compact()
    block = _block(num_keys, block_size)
    q, positions = unfold(x.q, x.group), x.q.shape[2] // x.group
    q = _whole(q, block)  # (B, H, T * block, D)
    with torch.no_grad():
        votes = _ballot(x, q.detach(), block, rule, stride or _STRIDE)
        lists = _choose(x, votes, block, num_keys, tau, keep_first)  # (B, H, T, L)
    first = last = None
    if is_causal:
        last = torch.arange(1, q.shape[2] + 1, device=q.device).repeat(x.group)[None, None]
        first = torch.zeros_like(last)
    out, _ = attend_lists(
        _by_member(q, x.group),
        x.k,
        x.v,
        _by_member(lists, x.group),
        height=block,
        width=block,
        scale=x.scale,
        bias=key_bias(x.padding, x.q),
        first=first,
        last=last,
    )
    out = out.unflatten(2, (x.group, -1)).flatten(1, 2)[:, :, :positions]
    return x.restore(fold(out, x.group), place)


def _whole(x: Tensor, width: int) -> Tensor:
    """Tokens (B, H, N, D) with zeros up to a multiple of `width`."""
    short = -x.shape[2] % width
    return F.pad(x, (0, 0, 0, short)) if short else x


def _by_member(x: Tensor, group: int) -> Tensor:
    """(B, Hk * group, n, D) -> (B, Hk, group * n, D): each query head's tiles lie together."""
    return x.unflatten(1, (-1, group)).flatten(2, 3)


@dataclass(frozen=True)
class _Ballot:
    """Who estimates the masses of the blocks, and from what.

    Attributes:
        rows: (B, H, T, V, W), the V votes of each query tile.
        weight: (B or 1, 1, T, V), the part of a vote, summing to 1 where a tile has tokens.
        keys: (B, Hk, U * C, W), scaled; C of them stand for each key block.
        bias: (B or 1, 1, U * C), logarithm of how many keys one stands for.
        limit: int (T, V or 1); a vote sees so many of `keys`. None when not causal.
        group: Query heads per key head.
        late: 1 where the votes of a tile choose for the next tile, else 0.
    """

    rows: Tensor
    weight: Tensor
    keys: Tensor
    bias: Tensor
    limit: Tensor | None
    group: int
    late: int

    def masses(self, t0: int, t1: int, blocks: int, per_block: int) -> Tensor:
        """Masses of the first `blocks` blocks by the votes of tiles [t0, t1): (B, H, t, blocks)."""
        width = blocks * per_block
        rows = self.rows[:, :, t0:t1]
        lead = (rows.shape[1], *rows.shape[2:4])
        logits = rows.unflatten(1, (-1, self.group)).flatten(2, 4) @ self.keys[:, :, :width].mT
        offset = self.bias[:, :, None, None, :width]
        if self.limit is not None:
            unseen = torch.arange(width, device=rows.device) >= self.limit[t0:t1, :, None]
            offset = offset.masked_fill(unseen, -torch.inf)
        share = logits.view(-1, *lead, width).add_(offset).softmax(-1)
        mass = (self.weight[:, :, t0:t1, None] @ share)[:, :, :, 0]
        return mass.unflatten(-1, (blocks, per_block)).sum(-1)


def _ballot(x: Inputs, q: Tensor, block: int, rule: str, stride: int) -> _Ballot:
    """The votes of a rule, q (B, H, T * block, D)."""
    queries = x.q.shape[2] // x.group
    count = x.num_keys if x.query_padding is not None else x.num_keys.new_full((1, 1), queries)
    tall, wide = _cell_sizes(rule, block, stride)
    k = _whole(x.k.detach(), block)
    held_q, held_k = _held(q, tall, count), _held(k, wide, x.num_keys)
    keys = _means(k, wide, held_k) if rule == "centroid" else _cells(k, wide, held_k).flatten(3)
    rows = _cells(q, tall, held_q)
    rows = (rows.flip(3) if tall > 1 else rows).flatten(3).unflatten(2, (-1, block // tall))
    weight = held_q.unflatten(2, (-1, block // tall)).to(q.dtype)
    limit = None
    if x.is_causal:
        limit = torch.arange(1, rows.shape[2] + 1, device=q.device)[:, None] * (block // wide)
        if rule == "oracle":
            limit = limit - block + torch.arange(1, block + 1, device=q.device)
    return _Ballot(
        rows=rows,
        weight=weight / weight.sum(-1, keepdim=True).clamp(min=1),
        keys=keys * (x.scale / tall),
        bias=held_k.to(q.dtype).log(),
        limit=limit,
        group=x.group,
        late=_late(rule, x.is_causal),
    )


def _cell_sizes(rule: str, block: int, stride: int) -> tuple[int, int]:
    """Queries of a vote, and keys of what it is about."""
    if rule == "antidiagonal":
        return stride, stride
    return 1, block if rule == "centroid" else 1


def _late(rule: str, is_causal: bool) -> int:
    """How many tiles after its own a tile chooses for."""
    return int(is_causal and rule != "oracle")


def _held(x: Tensor, width: int, count: Tensor) -> Tensor:
    """Tokens that exist in each cell of `width`, the first `count` existing: (B or 1, 1, n)."""
    start = torch.arange(0, x.shape[2], width, device=x.device)
    return (count[..., None] - start).clamp(0, width)


def _means(x: Tensor, width: int, held: Tensor) -> Tensor:
    """Means of the tokens of each cell that exist, (B, H, n, D); zero in an empty cell."""
    x = x.unflatten(2, (-1, width))
    weight = torch.arange(width, device=x.device) < held[..., None]  # (B or 1, 1, n, width)
    total = (weight.to(x)[..., None, :] @ x)[..., 0, :]
    return total / held.clamp(min=1)[..., None]


def _cells(x: Tensor, width: int, held: Tensor) -> Tensor:
    """(B, H, n * width, D) -> (B, H, n, width, D).

    A token that does not exist becomes the mean of those of its cell that do.
    """
    cells = x.unflatten(2, (-1, width))
    if width == 1:
        return cells
    absent = torch.arange(width, device=x.device) >= held[..., None]
    return torch.where(absent[..., None], _means(x, width, held)[:, :, :, None], cells)


def _choose(
    x: Inputs, votes: _Ballot, block: int, num_keys: int, tau: float | None, keep_first: bool
) -> Tensor:
    """Lists of key blocks for every query tile, int (B, H, T, L), -1 at the end."""
    batch, heads, tiles, voters, _ = votes.rows.shape
    keys = x.k.shape[2]
    total = -(-keys // block)
    per_block = votes.keys.shape[2] // total
    length = min(total, max(-(-num_keys // block), 1))
    allowance = torch.where(x.num_keys <= num_keys, length, max(num_keys // block, 1))
    exists = (
        torch.arange(total, device=x.k.device) * block < x.num_keys[..., None]
    )  # (B or 1, 1, U)
    parts = []
    if votes.late:
        own = torch.zeros((batch, heads, 1, 1), dtype=torch.int64, device=x.k.device)
        parts.append(F.pad(own, (0, length - 1), value=-1))
    size = batch * heads * voters * total * per_block
    for t0, t1 in _strips(tiles - votes.late, size, x.is_causal, x.k.device):
        blocks = t1 if x.is_causal else total
        mass = F.pad(votes.masses(t0, t1, blocks, per_block), (0, votes.late))
        u = torch.arange(blocks + votes.late, device=mass.device)
        allowed = exists[:, :, None, : len(u)]
        kept = 2.0 * (keep_first & (u == 0))  # above any mass
        if x.is_causal:
            t = torch.arange(t0, t1, device=mass.device)[:, None] + votes.late
            allowed = allowed & (u <= t)
            kept = kept + 4.0 * (u == t)
        parts.append(_heaviest(mass, kept.to(mass), allowed, allowance, tau, length))
    return torch.cat(parts, 2)


def _strips(tiles: int, size: int, is_causal: bool, device: torch.device) -> list[tuple[int, int]]:
    """Query tiles to score together; `size` is the number of logits of one."""
    step = max(tile_elements(device) // size, 1)
    return spans(tiles, min(step, -(-tiles // _STRIPS) or 1) if is_causal else step)


def _heaviest(
    mass: Tensor,
    kept: Tensor,
    allowed: Tensor,
    allowance: Tensor,
    tau: float | None,
    length: int,
) -> Tensor:
    """The blocks that each tile reads, -1 after the last: int (B, H, t, length).

    Args:
        mass: (B, H, t, U), summing to 1; zero where nothing is known.
        kept: (t or 1, U), 2 or more for a block that comes before all others, whatever its mass.
        allowed: bool (B or 1, 1, t or 1, U).
        allowance: int (B or 1, 1), most blocks.
        tau: As in the call.
        length: Of the lists.
    """
    rank = (mass + kept).masked_fill(~allowed, -1.0)
    rank, order = rank.sort(dim=-1, descending=True, stable=True)  # the lower of equal blocks first
    rank, order = rank[..., :length], order[..., :length]
    keep = (rank >= 0) & (
        torch.arange(rank.shape[-1], device=mass.device) < allowance[..., None, None]
    )
    if tau is not None and tau < 1:
        reached = mass.gather(-1, order).cumsum(-1)
        before = F.pad(reached[..., :-1], (1, 0))
        keep &= (before < tau) | (rank >= 2)
    lists = order.masked_fill(~keep, -1)
    return F.pad(lists, (0, length - lists.shape[-1]), value=-1)


def _block(num_keys: int, block_size: int | None) -> int:
    """Positions of a block."""
    return min(_BLOCK, max(num_keys // 4, 1)) if block_size is None else block_size


def _check_options(
    num_keys: int,
    block_size: int | None,
    rule: str,
    tau: float | None,
    stride: int | None,
    keep_first: bool,
) -> None:
    name = INFO.name
    positive(name, "num_keys", num_keys)
    one_of(name, "rule", rule, _RULES)
    for option, value in (("block_size", block_size), ("stride", stride)):
        if value is not None:
            positive(name, option, value)
    if tau is not None and (
        isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 < tau <= 1
    ):
        raise ValueError(f"{name}: tau must be None or a number in (0, 1]; got {tau!r}.")
    if not isinstance(keep_first, bool):
        raise ValueError(f"{name}: keep_first must be True or False; got {keep_first!r}.")
    if stride is not None and rule != "antidiagonal":
        raise ValueError(
            f"{name}: stride is for rule='antidiagonal'; got stride={stride!r} with "
            f"rule={rule!r}. Leave it None."
        )
    block, step = _block(num_keys, block_size), stride or _STRIDE
    if rule == "antidiagonal" and block % step:
        raise ValueError(
            f"{name}: block_size must be a multiple of stride; got blocks of {block} and "
            f"stride={step}. Pass both so that they fit."
        )


@register
@dataclass(frozen=True)
class BlockTopK(Method):
    """Options of `blocktopk_attention`."""

    num_keys: int = 512
    block_size: int | None = None
    rule: Literal["centroid", "antidiagonal", "oracle"] = "centroid"
    tau: float | None = None
    stride: int | None = None
    keep_first: bool = True
    info = INFO
    function = staticmethod(blocktopk_attention)

    def __post_init__(self) -> None:
        _check_options(**self.options())

    def exact_at(self, length: int) -> BlockTopK:
        block = _block(self.num_keys, self.block_size)
        return replace(self, num_keys=max(length, 1), block_size=block, tau=None)

    def cost(self, shape: Shape) -> Cost:
        """The most that a call takes: with `tau` the lists may be shorter."""
        block, d = _block(self.num_keys, self.block_size), shape.head_dim
        tiles, blocks = -(-shape.queries // block), -(-shape.keys // block)
        most = blocks if shape.keys <= self.num_keys else max(self.num_keys // block, 1)
        entries = tiles * min(most, blocks)
        if shape.is_causal:
            entries = sum(min(most, t + 1) for t in range(tiles))
        heads = shape.batch * shape.heads
        flops = 2 * entries * block**2 * (d + shape.value_dim) + self._scoring(shape, block)
        units = min(shape.keys, most * block)
        return Cost(heads * flops, shape.io, None, units=units)

    def _scoring(self, shape: Shape, block: int) -> int:
        """Products of the choice, of one head."""
        stride = self.stride or _STRIDE
        tall, wide = _cell_sizes(self.rule, block, stride)
        tiles, blocks = -(-shape.queries // block), -(-shape.keys // block)
        late = _late(self.rule, shape.is_causal)
        size = shape.batch * shape.heads * (block // tall) * blocks * (block // wide)
        pairs = sum(
            (t1 - t0) * (t1 if shape.is_causal else blocks)
            for t0, t1 in _strips(tiles - late, max(size, 1), shape.is_causal, torch.device("cpu"))
        )
        each = (block // tall) * (block // wide)  # votes by what stands for the keys of a block
        return 2 * pairs * each * (tall * shape.head_dim + 1)
