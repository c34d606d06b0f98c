"""BigBird attention: a window of blocks, global blocks and random blocks, fixed beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import check, not_negative, positive, prepare
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.blocks import attend_lists, once
from numattn.engines.softmax import key_bias, softmax_partial

INFO = Info(
    name="bigbird",
    family="sparse",
    summary="blocks in a window, the first blocks, and random blocks that one draw fixes",
    paper="https://arxiv.org/abs/2007.14062",
    complexity="N b (w + g + r) (d + e)",
    budget="block_size",
    approximates="softmax",
    causal="native",
    mask="padding",
    cross=False,
    random=True,
    bounded=False,  # the rows of global blocks see every key
    state_tensors=("uniform",),
)

_STEP = replace(INFO, cross=True)  # decoding: the queries of a step against the keys kept

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread most evenly modulo 1


def bigbird_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 64,
    num_window: int = 3,
    num_global: int = 2,
    num_random: int = 3,
    uniform: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Softmax attention over a sparse pattern of blocks that is fixed before any logit.

    Positions are cut into blocks of ``block_size``. With w, g and r the numbers of window, global
    and random blocks, the queries of block t read the key blocks

    .. math:: \{t - \lfloor w/2 \rfloor, \dots, t - \lfloor w/2 \rfloor + w - 1\}, \quad
              \{0, \dots, g - 1\}, \quad
              \{\lfloor \mathrm{frac}(u_l + t \varphi)\, T \rfloor : l = 1, \dots, r\}

    of T, :math:`\varphi` the golden ratio. A causal window is t - w + 1, ..., t, and the T blocks
    that random ones are chosen from are those between the global ones and the window. A block
    that is meant more than once counts once. The global blocks see every key in a call that is
    not causal. The graph of window, hub and random edges joins any two tokens in few layers.

    Args:
        query: (B, H, N, D).
        key: (B, Hk, N, D).
        value: (B, Hk, N, E).
        block_size: Positions of a block, positive; all parts of the pattern grow with it.
        num_window: w, window blocks with the query's own among them, positive.
        num_global: g, first blocks that every query sees and that see every key when not causal,
            not negative. The paper has 2 too, but its code takes the first and the last block; a
            causal call cannot see the last, so here they are the first two.
        num_random: r, random blocks of a query block, not negative.
        uniform: u, (Hk, r) in [0, 1), which fixes the random blocks whatever the length; drawn
            when None. The query heads of a group share their pattern.
        attn_mask: bool key padding (B, 1, 1, N), True = attend. Blocks are counted from the first
            token that exists.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, N, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 N block_size (w + g + r) (D + E) operations per head, and 2 g block_size N (D + E) for
    the global rows when not causal. Memory grows as N. Decoding keeps every key and value, for a
    random block may be anywhere, and reads those of one list.

    Exact when: ``block_size`` >= N; or w, or g, is at least the number of blocks (2 T - 1 for w
    when not causal); so sequences shorter than the pattern are attended to densely.

    Limits: a row errs in total variation by exactly the softmax mass outside of its pattern, which
    is blind to the data. Random blocks serve models that are trained with them; elsewhere they hold
    what arbitrary keys hold. Over a random u each block is equally likely, but different query
    blocks do not draw independently.

    Raises:
        ValueError: An option is not an integer of the range above, or ``uniform`` has another
            shape.
        Unsupported: Query and key lengths differ, or a mask other than key padding.

    References:
        M. Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020,
        https://arxiv.org/abs/2007.14062.

    Example:
        >>> q = k = torch.zeros(1, 1, 4, 2)
        >>> v = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 4, 1)
        >>> options = {"block_size": 1, "num_window": 2, "num_global": 1, "num_random": 0}
        >>> bigbird_attention(q, k, v, **options, is_causal=True).flatten()
        tensor([1.0000, 1.5000, 2.0000, 3.3333])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = BigBird(block_size, num_window, num_global, num_random)
    pattern = options.pattern()
    if x.empty:
        return x.nothing()
    uniform = fill(options, {"uniform": uniform}, x.k, generator)["uniform"]
    x, place = x.compact()
    block, rows = min(block_size, x.k.shape[2]), x.q.shape[2]
    t = torch.arange(-(-x.k.shape[2] // block), device=x.k.device)
    lists = pattern.lists(uniform, t, -(-x.num_keys // block), is_causal)
    special = 0 if is_causal else min(num_global * block * x.group, rows)
    if special:  # these rows are computed apart
        lists = lists.masked_fill((t < num_global)[:, None], -1)
    last = torch.arange(rows, device=x.k.device)[None, None] // x.group + 1 if is_causal else None
    first = None if last is None else torch.zeros_like(last)
    bias = key_bias(x.padding, x.q)
    out, _ = attend_lists(
        x.q,
        x.k,
        x.v,
        lists,
        height=block * x.group,
        width=block,
        scale=x.scale,
        bias=bias,
        first=first,
        last=last,
    )
    if special:
        part = softmax_partial(x.q[:, :, :special], x.k, x.v, scale=x.scale, bias=bias)
        out = torch.cat([part.out(), out[:, :, special:]], 2)
    return x.restore(out, place)


@dataclass(frozen=True)
class _Pattern:
    """Which key blocks a query block reads; the options are those of the function."""

    block_size: int
    num_window: int
    num_global: int
    num_random: int

    def __post_init__(self) -> None:
        positive(INFO.name, "block_size", self.block_size)
        positive(INFO.name, "num_window", self.num_window)
        not_negative(INFO.name, "num_global", self.num_global)
        not_negative(INFO.name, "num_random", self.num_random)

    def before(self, is_causal: bool) -> int:
        """Window blocks before the query's own."""
        return self.num_window - 1 if is_causal else self.num_window // 2

    def lists(self, uniform: Tensor, t: Tensor, total: Tensor, is_causal: bool) -> Tensor:
        """Key blocks of query blocks, each once, -1 after the last.

        Args:
            uniform: (Hk, r).
            t: int (n,), numbers of the query blocks.
            total: int (B or 1, 1), how many blocks exist.
            is_causal: As in the call.

        Returns:
            int (B or 1, Hk, n, w + g + r).
        """
        t, total = t[:, None], total[..., None, None]  # (n, 1), (B or 1, 1, 1, 1)
        left = self.before(is_causal)
        near = t - left + torch.arange(self.num_window, device=t.device)
        hubs = torch.arange(self.num_global, device=t.device)
        skipped = self.num_global if is_causal else 0
        choices = (t - left - skipped).clamp(min=0) if is_causal else total
        point = (uniform.to(t.device, torch.float64)[:, None] + t.double() * _GOLDEN) % 1.0
        # (.., Hk, n, r); in the window, or past it, where there is nothing to choose from.
        drawn = (point * choices).long() + skipped
        bound = torch.minimum(total, t + 1) if is_causal else total  # blocks that may be seen
        lead = (total.shape[0], uniform.shape[0], t.shape[0], -1)
        tiles = torch.cat([part.expand(lead) for part in (near, hubs, drawn)], -1)
        tiles = once(tiles.masked_fill((tiles < 0) | (tiles >= bound), -1))
        return tiles.sort(dim=-1, descending=True).values


@register
@dataclass(frozen=True)
class BigBird(Method):
    """Options of `bigbird_attention`."""

    block_size: int = 64
    num_window: int = 3
    num_global: int = 2
    num_random: int = 3
    info = INFO
    function = staticmethod(bigbird_attention)

    def __post_init__(self) -> None:
        self.pattern()

    def pattern(self) -> _Pattern:
        """The options, as what computes the lists."""
        return _Pattern(**self.options())

    def exact_at(self, length: int) -> BigBird:
        return replace(self, block_size=max(length, 1))

    def cost(self, shape: Shape) -> Cost:
        """Random blocks as expected; `units` does not speak of the rows of global blocks."""
        n, width = shape.keys, shape.head_dim + shape.value_dim
        block = max(min(self.block_size, n), 1)
        total = -(-n // block)
        pairs = sum(self._listed(t, total, shape.is_causal) for t in range(total)) * block**2
        if not shape.is_causal:
            pairs += min(self.num_global * block, n) * n
        seen = min(n, (self.num_window + self.num_global + self.num_random) * block)
        cache = shape.batch * shape.kv_heads * n * width * shape.itemsize
        flops = 2 * shape.batch * shape.heads * round(pairs) * width
        return Cost(flops, shape.io, cache, units=seen)

    def _listed(self, t: int, total: int, is_causal: bool) -> float:
        """Expected number of blocks on the list of query block t."""
        if not is_causal and t < self.num_global:
            return 0.0
        first = t - self.pattern().before(is_causal)
        bound = t + 1 if is_causal else total
        window = min(first + self.num_window, bound) - max(first, 0)
        seen = window + min(self.num_global, max(first, 0))
        choices = max(first - self.num_global, 0) if is_causal else total
        if not choices:
            return seen
        unseen = choices if is_causal else total - seen
        return seen + unseen * (1 - (1 - 1 / choices) ** self.num_random)

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        return {"uniform": Draw("uniform", (num_heads, self.num_random))}

    def module(self, *, num_heads: int, head_dim: int) -> BigBirdAttention:
        return BigBirdAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        check(_STEP, key, key, value, None, False, scale, enable_gqa)
        uniform = fill(self, {"uniform": None, **tensors}, key, None)["uniform"]
        return BigBirdState(key, value, self, uniform, scale=scale, enable_gqa=enable_gqa)


class BigBirdState(State):
    """Decoding state: every key and value, of which a step reads the blocks of one list.

    Queries of `attend` stand at the last token.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        options: BigBird,
        uniform: Tensor,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        self._pattern, self._uniform = options.pattern(), uniform
        self._scale, self._enable_gqa = scale, enable_gqa
        self._keys = Buffer(key.detach())
        self._values = Buffer(value.detach())

    def append(self, key: Tensor, value: Tensor) -> None:
        self._keys.append(key)
        self._values.append(value)

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        keys, values = self._keys.tensor, self._values.tensor
        index = self._index(keys.shape[2], keys.device)  # (Hk, n)
        head = torch.arange(len(index), device=index.device)[:, None]
        # Only what is listed is copied, so a step costs the same however much is kept.
        place = index.clamp(min=0)
        near = (keys[:, head, place], values[:, head, place])
        x = prepare(_STEP, query, *near, None, False, self._scale, self._enable_gqa)
        if x.empty:
            return x.nothing()
        bias = key_bias((index >= 0)[None], x.q)
        return x.restore(softmax_partial(x.q, x.k, x.v, scale=x.scale, bias=bias).out())

    def _index(self, length: int, device: torch.device) -> Tensor:
        """Tokens of the list of the last position, int (Hk, n); -1 is none."""
        if not length:
            return torch.zeros((len(self._uniform), 0), dtype=torch.int64, device=device)
        block = self._pattern.block_size
        t = torch.tensor([(length - 1) // block], device=device)
        pages = self._pattern.lists(self._uniform, t, t[:, None] + 1, True)[0]  # (Hk, 1, L)
        index = (pages[:, 0, :, None] * block + torch.arange(block, device=device)).flatten(1)
        return index.masked_fill((index < 0) | (index >= length), -1)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def nbytes_read(self) -> int:
        length = self._keys.tensor.shape[2]
        listed = self._index(length, torch.device("cpu")) >= 0
        return int(self.nbytes * int(listed.sum()) / max(listed.shape[0] * length, 1))


class BigBirdAttention(DrawnAttention):
    """`bigbird_attention` with random blocks that are drawn once and saved with the model.

    Buffer: ``uniform`` (Hk, num_random).
    """

    record = BigBird
