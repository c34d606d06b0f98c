"""Sliding-window attention with sinks and global tokens: a pattern fixed before any logit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, not_negative, positive, prepare
from numattn.core.linalg import take
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.softmax import crop, key_bias, softmax_partial
from numattn.engines.tiles import recompute, runs, spans

INFO = Info(
    name="window",
    family="sparse",
    summary="a sliding window, the first tokens as sinks, and global tokens",
    paper="https://arxiv.org/abs/2004.05150",
    complexity="N (w + s) (d + e)",
    budget="window",
    approximates="softmax",
    causal="native",
    mask="full",
    cross=False,
)

_STEP = replace(INFO, cross=True)  # decoding: the queries of a step against the keys kept

_ROWS = 128  # positions of a tile: longer ones compute more outside the window

Tile = tuple[int, int, int, int]  # queries [t0, t1) and keys [s0, s1)


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int = 256,
    num_sinks: int = 4,
    num_global: int = 0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention over the keys near the query and the first tokens.

    Position i attends to j where

    .. math:: i - w < j \le i \ \text{(causal)}, \qquad
              i - \lfloor w/2 \rfloor \le j < i - \lfloor w/2 \rfloor + w \ \text{(both ways)},

    which are w keys with i among them, and to the first ``max(num_sinks, num_global)`` tokens,
    causally only those at j <= i. Sinks and global tokens are both counted from the start and
    overlap. They differ in what they see themselves: in a call that is not causal a global token
    attends to every key, a sink to its window like any other token.

    Args:
        query: (B, H, N, D).
        key: (B, Hk, N, D).
        value: (B, Hk, N, E).
        window: w, keys that a query sees around itself, positive.
        num_sinks: First tokens that every query sees, not negative.
        num_global: First tokens that every query sees and, in a call that is not causal, that
            see every key; not negative.
        attn_mask: bool (True = attend) or float to add to the logits, broadcastable to
            (B, H, N, N); may be combined with ``is_causal``. A key is seen where the pattern and
            the mask both allow it. Under bool key padding (B, 1, 1, N) the first tokens are the
            first that exist; under any other mask they are at positions 0, 1, ...
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, N, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: with m = max(num_sinks, num_global), about 2 N (w + m + 128) (D + E) operations per
    head: queries go in tiles of 128 positions, each against one run of keys. Global tokens add
    2 num_global N (D + E) when not causal. Memory is that of one tile. Decoding keeps the first
    m tokens and the last w, whatever the length.

    Exact when: w >= N causally, w >= 2 N - 1 both ways; or m >= N.

    Limits: everything outside the pattern is lost, and a row errs in total variation by exactly
    the softmax mass that lies there. The window counts stored positions: padding on either side
    changes nothing, but a gap of padding between tokens takes up places in it. Keys are used as
    they come: no rotary position is counted anew, as streaming models do in their cache, and
    global tokens have no projections of their own, as in Longformer.

    Raises:
        ValueError: An option is not an integer of the range above.
        Unsupported: Query and key lengths differ.

    References:
        I. Beltagy et al., "Longformer: The Long-Document Transformer", 2020,
        https://arxiv.org/abs/2004.05150.
        G. Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024,
        https://arxiv.org/abs/2309.17453.

    Example:
        >>> q = k = torch.zeros(1, 1, 4, 2)
        >>> v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
        >>> window_attention(q, k, v, window=2, num_sinks=0, is_causal=True).flatten()
        tensor([1.0000, 1.5000, 2.5000, 3.5000])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(window, num_sinks, num_global)
    if x.empty:
        return x.nothing()
    if x.padding is not None:  # (B, 1, 1) where one value speaks of a whole sequence
        x = replace(x, padding=x.padding.expand(-1, -1, x.k.shape[2]))
    first = _first_tokens(x, max(num_sinks, num_global))
    out = _attend_tiles(x, first, _reach(window, is_causal))
    if num_global and not is_causal:
        out = _attend_from_global(x, first[:, :num_global], out)
    return x.restore(out)


def _reach(window: int, is_causal: bool) -> tuple[int, int]:
    """Keys of the window before and after the query's own position."""
    left = window - 1 if is_causal else window // 2
    return left, window - 1 - left


def _tiles(length: int, reach: tuple[int, int]) -> list[Tile]:
    left, right = reach
    return [(t0, t1, max(0, t0 - left), min(length, t1 + right)) for t0, t1 in spans(length, _ROWS)]


def _first_tokens(x: Inputs, count: int) -> Tensor:
    """Positions of the first tokens, int (B or 1, count), padding last where they are fewer."""
    if x.padding is None:
        return torch.arange(min(count, x.k.shape[2]), device=x.k.device)[None]
    missing = (~x.padding[:, 0]).to(torch.uint8)
    return missing.argsort(dim=-1, stable=True)[:, :count]


def _attend_tiles(x: Inputs, first: Tensor, reach: tuple[int, int]) -> Tensor:
    """Every row over its window and the first tokens: (B, Hk, rows, E)."""
    num_first, rows, keys = first.shape[1], x.q.shape[2], x.k.shape[2]
    tiles = _tiles(keys, reach)
    k0, v0 = take(x.k, first[:, None]), take(x.v, first[:, None])
    exists0 = None if x.padding is None else x.padding[:, 0].gather(1, first)[:, None]
    mask = None if x.mask is None else x.mask.expand(*x.mask.shape[:3], keys)
    queries, cuts = x.q.split(_ROWS * x.group, 2), [tile[2:] for tile in tiles]
    outs = []
    for tile, q, k, v in zip(tiles, queries, runs(x.k, cuts), runs(x.v, cuts), strict=True):
        t0, t1, s0, s1 = tile
        r0, r1 = t0 * x.group, t1 * x.group
        exists = mask0 = mask1 = None
        if x.padding is not None and exists0 is not None:
            exists = torch.cat([exists0, x.padding[..., s0:s1]], -1)
        if mask is not None:
            mask0 = crop(mask, rows, r0, r1, 0, num_first)
            mask1 = crop(mask, rows, r0, r1, s0, s1)
        attend = partial(_attend, tile, reach, x.is_causal, x.group, x.scale)
        outs.append(recompute(attend, q, first, exists, mask0, mask1, k0, *k, v0, *v))
    return torch.cat(outs, 2)


def _attend(
    tile: Tile,
    reach: tuple[int, int],
    is_causal: bool,
    group: int,
    scale: float,
    q: Tensor,
    first: Tensor,
    exists: Tensor | None,
    mask0: Tensor | None,
    mask1: Tensor | None,
    *pieces: Tensor,
) -> Tensor:
    """The rows of one tile over the first tokens and its run of keys, which come in pieces."""
    half = len(pieces) // 2
    k, v = torch.cat(pieces[:half], 2), torch.cat(pieces[half:], 2)
    seen = _seen(tile, reach, is_causal, group, first)  # (B or 1, rows, keys)
    if exists is not None:
        seen = seen & exists
    logits = (q * scale) @ k.mT
    # Adding -inf takes an eighth of the time that filling by a broadcast mask does.
    logits = logits.add_(
        torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)[:, None]
    )
    if mask0 is not None and mask1 is not None:
        mask = torch.cat([mask0, mask1], -1)
        logits = (
            logits.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
        )
    return Partial.from_logits(logits, v).out()


def _seen(tile: Tile, reach: tuple[int, int], is_causal: bool, group: int, first: Tensor) -> Tensor:
    """The pattern: the first tokens where the window does not hold them, then the run of keys."""
    t0, t1, s0, s1 = tile
    left, right = reach
    i = torch.arange(t0 * group, t1 * group, device=first.device)[:, None] // group
    p = first[:, None]  # (B or 1, 1, first)
    far = p < i - left
    if not is_causal:
        far = far | (p > i + right)
    j = torch.arange(s0, s1, device=first.device)
    near = (j >= i - left) & (j <= i + right)
    return torch.cat([far, near.expand(far.shape[0], -1, -1)], -1)


def _attend_from_global(x: Inputs, index: Tensor, out: Tensor) -> Tensor:
    """Replace the rows of the tokens at `index` (B or 1, G) by attention to every key."""
    members = torch.arange(x.group, device=index.device)
    rows = (index[..., None] * x.group + members).flatten(1)  # (B or 1, G * group)
    # A full mask comes without padding, and then the first tokens are the first rows.
    mask = x.mask
    if mask is not None:
        mask = crop(mask, x.q.shape[2], 0, rows.shape[1], 0, x.k.shape[2])
    part = softmax_partial(
        take(x.q, rows[:, None]),
        x.k,
        x.v,
        scale=x.scale,
        bias=key_bias(x.padding, x.q),
        mask=mask,
        group=x.group,
    )
    return out.scatter(2, rows[:, None, :, None].expand_as(part.num), part.out())


def _check_options(window: int, num_sinks: int, num_global: int) -> None:
    positive(INFO.name, "window", window)
    not_negative(INFO.name, "num_sinks", num_sinks)
    not_negative(INFO.name, "num_global", num_global)


@register
@dataclass(frozen=True)
class Window(Method):
    """Options of `window_attention`."""

    window: int = 256
    num_sinks: int = 4
    num_global: int = 0
    info = INFO
    function = staticmethod(window_attention)

    def __post_init__(self) -> None:
        _check_options(self.window, self.num_sinks, self.num_global)

    @property
    def num_first(self) -> int:
        """First tokens that every query sees."""
        return max(self.num_sinks, self.num_global)

    def exact_at(self, length: int) -> Window:
        return replace(self, window=max(2 * length, 1))

    def cost(self, shape: Shape) -> Cost:
        """What the tiles multiply; `units` does not speak of the rows of global tokens."""
        n, width = shape.keys, shape.head_dim + shape.value_dim
        first = min(self.num_first, n)
        tiles = _tiles(n, _reach(self.window, shape.is_causal))
        pairs = sum((t1 - t0) * (first + s1 - s0) for t0, t1, s0, s1 in tiles)
        if not shape.is_causal:
            pairs += min(self.num_global, n) * n
        seen = min(n, self.window + self.num_first)
        cache = shape.batch * shape.kv_heads * seen * width * shape.itemsize
        return Cost(2 * shape.batch * shape.heads * pairs * width, shape.io, cache, units=seen)

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
        return WindowState(key, value, self, scale=scale, enable_gqa=enable_gqa)


class WindowState(State):
    """Decoding state: the first tokens, and the last ones in a ring of ``window`` places.

    Queries of `attend` stand at the last token, which sees everything that is kept.
    """

    def __init__(
        self, key: Tensor, value: Tensor, options: Window, *, scale: float | None, enable_gqa: bool
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        prepare(_STEP, key, key, value, None, False, scale, enable_gqa)
        self._first, self._window = options.num_first, options.window
        self._scale, self._enable_gqa = scale, enable_gqa
        self._seen = 0
        self._keys = Buffer(key.detach()[:, :, :0])
        self._values = Buffer(value.detach()[:, :, :0])
        self.append(key, value)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        room = max(self._first + self._window - self._seen, 0)
        self._seen += key.shape[2]
        late = key.shape[2] - room  # tokens that take the place of older ones
        count = min(max(late, 0), self._window)
        newest = torch.arange(self._seen - count, self._seen, device=key.device)
        places = self._first + (newest - self._first) % self._window
        for kept, new in ((self._keys, key), (self._values, value)):
            kept.append(new[:, :, :room])
            if count:
                kept.tensor[:, :, places] = new[:, :, -count:]

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        kept = (self._keys.tensor, self._values.tensor)
        x = prepare(_STEP, query, *kept, None, False, self._scale, self._enable_gqa)
        if x.empty:
            return x.nothing()
        return x.restore(softmax_partial(x.q, x.k, x.v, scale=x.scale, group=x.group).out())

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes
