"""LevAttention: attend to the keys of largest leverage, the same ones for every query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, not_negative, one_of, positive, prepare
from numattn.core.linalg import take
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.tiles import recompute, tile_elements
from numattn.kernel.polynomial import power_attention

INFO = Info(
    name="levattention",
    family="kernel",
    summary="the keys of largest leverage: all that a squared kernel can weigh heavily",
    paper="https://arxiv.org/abs/2410.05462",
    complexity="N m (d + e) + N d^2",
    budget="num_keys",
    approximates="softmax",
    causal="native",
    mask="padding",
    judged_as="sparse",
)

TILE = 64  # positions of a causal tile: keys are chosen anew at its end

DEGREE = 2  # of the polynomial kernel, the one that leverage bounds

_RIDGE = 1e-12  # of the trace of K^T K: in its place a pseudo-inverse

_SLACK = 1e-6  # relative, for the rounding of leverage

_BAND = 128  # positions of a tile with a window, when not causal


def levattention_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_keys: int = 64,
    epsilon: float | None = None,
    kernel: Literal["softmax", "polynomial"] = "softmax",
    window: int = 0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention to a universal set of keys, chosen by leverage scores.

    The leverage of key j is the most that it can weigh under the squared kernel, whatever the
    query:

    .. math:: \tau_j = k_j^T \Big( \sum_l k_l k_l^T \Big)^{+} k_j
              = \max_q \frac{(q \cdot k_j)^2}{\sum_l (q \cdot k_l)^2} .

    These sum to the rank of the keys. So no more than D / epsilon keys have
    :math:`\tau_j \ge` ``epsilon``, and among them is every key that has a weight of ``epsilon``
    or more in any row. Leverage knows no queries: all rows, and all query heads that share a key
    head, attend to the same keys, those of the ``num_keys`` largest leverages, or fewer where
    ``epsilon`` is given.

    A causal call keeps keys as they come. Leverage among the keys so far only falls as more come,
    so a key that is dropped for a leverage below ``epsilon`` can never weigh more than that in a
    later row. Rows go in tiles of 64 positions. A row attends to its own tile up to itself, and to
    the keys kept before it; at the end of a tile, leverages of the keys kept and of the tile's own
    are computed anew among all tokens so far, and the largest are kept.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_keys: Most keys that are kept, positive. The bound holds in full where it is at least
            D / ``epsilon``.
        epsilon: Least leverage of a key that is kept, in (0, 1]; None sets no such limit.
        kernel: ``"softmax"``: the rows are softmax over the keys that are kept. This is a
            heuristic: no leverage bounds a softmax weight. ``"polynomial"``: they are those of
            `polynomial_attention` of degree 2, for which the bound holds.
        window: Tokens around the query that it sees besides, not negative: the last ``window``
            ones up to itself when causal, else from i - ``window`` // 2 on. A key counts once.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5; it cancels from the polynomial kernel.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing. Without a
        window, these are all queries of a call that is not causal where no leverage reaches
        ``epsilon``.

    Cost: 2 Nk D^2 operations per key head for K^T K and as many for triangular solves, both in
    float64, and 2 Nq m (D + E) per head, m being ``num_keys``. A window adds 2 Nq (``window`` +
    127) (D + E) to it; causal adds 2 Nq (``window`` + 63) (D + E), ``window`` being at least 1.
    Decoding keeps m keys and values, the last 64 + ``window``, and K^T K: a size that does not grow
    with the length.

    Exact when: ``num_keys`` >= Nk, ``epsilon`` is None and ``kernel`` is ``"softmax"``; with
    ``"polynomial"`` it then is `polynomial_attention` of degree 2.

    Limits: keys alone decide, and a key of large leverage need not be near any query. In heads that
    were trained with softmax such keys are often outliers that most queries avoid, and it can do
    worse than as many keys drawn blindly: the paper trains models with it. While there are no more
    tokens than D, as a rule every leverage is 1 and the first keys are kept. Adding one vector to
    all keys changes leverage but not softmax: a mean that is large beside the spread hides the
    differences between keys. A causal call drops keys for good: one that is not among the
    ``num_keys`` largest at the end of a tile does not come back, though others may fall below it
    later. Ties, taken to six digits, go to the lower index. The choice is constant for autograd. In
    the place of the pseudo-inverse stands a ridge of 1e-12 times the trace, so directions in which
    all keys together are below a millionth of their whole size count for little.

    Raises:
        ValueError: An option is not in the range above.
        Unsupported: A mask other than key padding, or a window with other query than key lengths.

    References:
        R. Kannan, C. Bhattacharyya, P. Kacham and D. Woodruff, "LevAttention: Time, Space, and
        Streaming Efficient Algorithm for Heavy Attentions", 2024,
        https://arxiv.org/abs/2410.05462.

    Example:
        >>> k = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])[None, None]
        >>> v = torch.tensor([[1.0], [2.0], [3.0]])[None, None]
        >>> levattention_attention(k, k, v, num_keys=1).flatten()  # leverages 1/2, 1/2 and 1
        tensor([3., 3., 3.])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = LevAttention(num_keys, epsilon, kernel, window)
    if window and query.shape[2] != key.shape[2]:
        raise Unsupported(
            f"levattention: a window needs as many queries as keys; got {query.shape[2]} and "
            f"{key.shape[2]}. Call it with window=0."
        )
    if x.empty:
        return x.nothing()
    x, place = x.compact()
    return x.restore(_attend_tiles(x, options), place)


def leverage_scores(key: Tensor, gram: Tensor | None = None) -> Tensor:
    r"""Leverage :math:`k_j^T G^{+} k_j` of keys (..., N, D), in float64: (..., N).

    G is ``gram`` (..., D, D), by default the sum of :math:`k k^T` over these keys. A ridge of 1e-12
    times its trace stands in the place of the pseudo-inverse.

    Example:
        >>> leverage_scores(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.5]]))
        tensor([0.2000, 0.8000, 1.0000], dtype=torch.float64)
    """
    k = key.double()
    gram = k.mT @ k if gram is None else gram
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    least = _RIDGE * diagonal.sum(-1, keepdim=True) + torch.finfo(k.dtype).tiny
    factor = torch.linalg.cholesky_ex(gram + torch.diag_embed(least.expand_as(diagonal))).L
    # The transposed system has the memory order that the solver takes without a copy.
    rows = torch.linalg.solve_triangular(factor.mT, k, upper=True, left=False)
    return rows.square().sum(-1)


@dataclass(frozen=True)
class _Kept:
    """The keys that are kept, in order of position.

    Attributes:
        k: (B, Hk, m, D).
        v: (B, Hk, m, E).
        place: Their positions, int (B, Hk, m); -1 where there is no key.
        gram: Sum of k k^T over all keys so far, float64 (B, Hk, D, D).
    """

    k: Tensor
    v: Tensor
    place: Tensor
    gram: Tensor

    @staticmethod
    def none(k: Tensor, v: Tensor) -> _Kept:
        """Before the first of these keys."""
        batch, heads, _, dim = k.shape
        gram = torch.zeros(batch, heads, dim, dim, dtype=torch.float64, device=k.device)
        place = torch.zeros(batch, heads, 0, dtype=torch.int64, device=k.device)
        return _Kept(k[:, :, :0], v[:, :, :0], place, gram)

    def absorb(self, k: Tensor, v: Tensor, place: Tensor, options: LevAttention) -> _Kept:
        """Take in keys (B, Hk, n, D) at `place`, int (B or 1, 1, n), -1 where there is none."""
        place = place.expand(k.shape[:3])
        new = k.detach().double().masked_fill((place < 0)[..., None], 0.0)
        gram = self.gram + new.mT @ new
        k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        place = torch.cat([self.place, place], 2)
        # Equal keys must tie whatever the rounding, so digits beyond float32 do not count.
        score = leverage_scores(k.detach(), gram).float().masked_fill(place < 0, -torch.inf)
        if options.epsilon is not None:
            score = score.masked_fill(score < options.epsilon * (1 - _SLACK), -torch.inf)
        best = score.argsort(dim=-1, descending=True, stable=True)[..., : options.num_keys]
        best = best.sort(dim=-1).values
        place = place.gather(2, best).masked_fill(score.gather(2, best) == -torch.inf, -1)
        return _Kept(take(k, best), take(v, best), place, gram)


def _attend_tiles(x: Inputs, options: LevAttention) -> Tensor:
    """Every row of compact inputs: (B, Hk, rows, E)."""
    window, is_causal = options.window, x.is_causal
    total = x.num_keys[..., None]
    kept = _Kept.none(x.k, x.v)
    if not is_causal:
        place = torch.arange(x.k.shape[2], device=x.k.device)
        kept = kept.absorb(x.k, x.v, place.where(place < total, -1), options)
    height = _tile_height(x, options)
    left = _reach(window, is_causal)[0]
    queries = x.q.split(height * x.group, 2)
    outs = []
    for t, (q, k, v) in enumerate(zip(queries, *_runs(x, window, height), strict=True)):
        at = t * height + torch.arange(q.shape[2], device=q.device) // x.group
        place = t * height - left + torch.arange(k.shape[2], device=q.device)
        place = place.where(place < total, -1)  # (B or 1, 1, keys of the run)
        attend = partial(_attend, options, x.scale, _edges(window, is_causal, at, t * height))
        outs.append(recompute(attend, q, kept.k, kept.v, kept.place, k, v, place))
        if is_causal and t + 1 < len(queries):
            kept = kept.absorb(k[:, :, left:], v[:, :, left:], place[..., left:], options)
    return torch.cat(outs, 2)


def _tile_height(x: Inputs, options: LevAttention) -> int:
    """Positions of a tile."""
    if x.is_causal:
        return TILE
    if options.window:
        return _BAND
    wide = x.k.shape[0] * x.k.shape[1] * x.group * min(options.num_keys, x.k.shape[2])
    return max(tile_elements(x.k.device) // wide, _BAND)


def _reach(window: int, is_causal: bool) -> tuple[int, int]:
    """Keys of the window before and after the query's own position."""
    left = max(window - 1, 0) if is_causal else window // 2
    return left, max(window - 1 - left, 0)


def _edges(
    window: int, is_causal: bool, at: Tensor | int, start: int
) -> tuple[Tensor | int, Tensor | int]:
    """First and past-the-last position that a query sees at all events.

    It stands at position `at`, in a tile that begins at `start`.
    """
    if is_causal:
        first = at + 1 - window
        return (min(first, start) if isinstance(first, int) else first.clamp(max=start)), at + 1
    return at - window // 2, at - window // 2 + window


def _runs(x: Inputs, window: int, height: int) -> list[Sequence[Tensor]]:
    """Keys and values of each tile and around it, (B, Hk, left + height + right, D or E) each.

    The gradient of one unfolding is linear in the length, where that of a slice for each tile would
    be quadratic.
    """
    count = -(-x.q.shape[2] // (height * x.group))
    if not (window or x.is_causal):
        return [[t[:, :, :0]] * count for t in (x.k, x.v)]
    left, right = _reach(window, x.is_causal)
    pad = (0, 0, left, count * height - x.k.shape[2] + right)
    wide = left + height + right
    return [F.pad(t, pad).unfold(2, wide, height).mT.unbind(2) for t in (x.k, x.v)]


def _attend(
    options: LevAttention,
    scale: float,
    edges: tuple[Tensor | int, Tensor | int],
    q: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    kept_place: Tensor,
    k: Tensor,
    v: Tensor,
    place: Tensor,
) -> Tensor:
    """A tile of rows over the keys kept and a run of keys, at `place` (B or 1, 1, keys).

    A row sees the run between its `edges`, and the keys kept that lie elsewhere.
    """
    low, high = (e[:, None] if isinstance(e, Tensor) else e for e in edges)
    far, near = kept_place[..., None, :], place[..., None, :]
    seen_near = (near >= 0) & (near >= low) & (near < high)
    seen_far = far >= 0
    if options.window:
        seen_far = seen_far & ((far < low) | (far >= high))
    nothing = 0.0 if options.kernel == "polynomial" else -torch.inf
    q = q * scale
    far, near = q @ kept_k.mT, q @ k.mT
    logits = torch.cat(
        [far.masked_fill_(~seen_far, nothing), near.masked_fill_(~seen_near, nothing)], -1
    )
    v = torch.cat([kept_v, v], 2)
    if options.kernel == "polynomial":
        return power_attention(logits, v, DEGREE)
    return Partial.from_logits(logits, v).out()


def _check_options(num_keys: int, epsilon: float | None, kernel: str, window: int) -> None:
    positive(INFO.name, "num_keys", num_keys)
    not_negative(INFO.name, "window", window)
    one_of(INFO.name, "kernel", kernel, ("softmax", "polynomial"))
    if epsilon is None:
        return
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 < epsilon <= 1:
        raise ValueError(
            f"levattention: epsilon must be None or a number in (0, 1]; got {epsilon!r}."
        )


@register
@dataclass(frozen=True)
class LevAttention(Method):
    """Options of `levattention_attention`."""

    num_keys: int = 64
    epsilon: float | None = None
    kernel: Literal["softmax", "polynomial"] = "softmax"
    window: int = 0
    info = INFO
    function = staticmethod(levattention_attention)

    def __post_init__(self) -> None:
        _check_options(self.num_keys, self.epsilon, self.kernel, self.window)

    def exact_at(self, length: int) -> LevAttention:
        return replace(self, num_keys=max(length, 1), epsilon=None, kernel="softmax")

    def cost(self, shape: Shape) -> Cost:
        """As if `epsilon` dropped nothing; triangular solves are no matrix products."""
        d, e = shape.head_dim, shape.value_dim
        heads, group = shape.batch * shape.kv_heads, shape.heads // shape.kv_heads
        pairs, units, absorbed = shape.queries * min(self.num_keys, shape.keys), self.window, 0
        if shape.is_causal:
            starts = range(0, shape.keys, TILE)
            near = TILE + sum(_reach(self.window, True))
            rows = [min(TILE, shape.keys - start) for start in starts]
            seen = [min(self.num_keys, start) + near for start in starts]
            pairs = sum(r * s for r, s in zip(rows, seen, strict=True))
            units, absorbed = max(self.window, TILE), max(len(starts) - 1, 0) * TILE
        else:
            absorbed = shape.keys
            if self.window:
                pairs += shape.queries * (_BAND + self.window - 1)
        flops = 2 * heads * (group * pairs * (d + e) + absorbed * d * d)
        units = min(shape.keys, self.num_keys + units)
        return Cost(flops, shape.io, self._cache(shape), units=units)

    def _cache(self, shape: Shape) -> int:
        """Bytes of a `LevState`."""
        width = (shape.head_dim + shape.value_dim) * shape.itemsize
        full = max(shape.keys - 1, 0) // TILE * TILE
        kept = min(self.num_keys, full)
        recent = shape.keys - full + min(_reach(self.window, True)[0], full)
        per_head = (kept + recent) * width + 8 * kept + 8 * shape.head_dim**2
        return shape.batch * shape.kv_heads * per_head

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
        return LevState(key, value, self, scale=scale, enable_gqa=enable_gqa)


class LevState(State):
    """Decoding state: the keys kept, the last ones, and the sum of k k^T.

    The last ones are those of the tile that is not full yet, and the window before it.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        options: LevAttention,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        prepare(INFO, key, key, value, None, False, scale, enable_gqa)
        key, value = key.detach(), value.detach()
        self._options, self._scale, self._enable_gqa = options, scale, enable_gqa
        self._left = _reach(options.window, True)[0]
        self._seen = self._start = 0  # tokens, and where the tile begins that is not full
        self._kept = _Kept.none(key, value)
        self._keys, self._values = Buffer(key[:, :, :0]), Buffer(value[:, :, :0])
        self.append(key, value)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        while key.shape[2]:
            if self._seen == self._start + TILE:
                self._flush()
            room = self._start + TILE - self._seen
            self._keys.append(key[:, :, :room])
            self._values.append(value[:, :, :room])
            self._seen += min(room, key.shape[2])
            key, value = key[:, :, room:], value[:, :, room:]

    def _flush(self) -> None:
        """The tile is full: choose anew, and begin the next."""
        place = torch.arange(self._start, self._seen, device=self._kept.place.device)[None, None]
        k, v = self._keys.tensor, self._values.tensor
        self._kept = self._kept.absorb(k[:, :, -TILE:], v[:, :, -TILE:], place, self._options)
        self._start = self._seen
        before = max(k.shape[2] - self._left, 0)
        self._keys, self._values = (Buffer(t[:, :, before:].clone()) for t in (k, v))

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        recent = (self._keys.tensor, self._values.tensor)
        x = prepare(INFO, query, *recent, None, False, self._scale, self._enable_gqa)
        if x.empty:
            return x.nothing()
        place = torch.arange(self._seen - x.k.shape[2], self._seen, device=x.k.device)
        edges = _edges(self._options.window, True, self._seen - 1, self._start)
        kept = self._kept
        out = _attend(
            self._options,
            x.scale,
            edges,
            *(x.q, kept.k.to(x.k), kept.v.to(x.v), kept.place),
            *(x.k, x.v, place[None, None]),
        )
        return x.restore(out)

    @property
    def nbytes(self) -> int:
        kept = (self._kept.k, self._kept.v, self._kept.place, self._kept.gram)
        small = sum(t.numel() * t.element_size() for t in kept)
        return small + self._keys.nbytes + self._values.nbytes
