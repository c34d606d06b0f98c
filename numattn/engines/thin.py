"""Thinning: choose few keys that stand for many with equal weights, by kernel halving.

A round pairs neighbours and keeps one key of each pair, so that in the feature space of a kernel
the keys that are kept differ little from those that are not. Rounds work in buckets (KH-Compress):
the last one halves all that is left at once, those before it work in smaller buckets, for halving
takes the square of the bucket's size.

Which half of a bucket is kept is the toss of a coin. So every key survives a round with probability
1/2 exactly, and sums over the keys that are kept, times 2 for every round, are unbiased.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from numattn.core.linalg import exp_, finite, masked_mean, take
from numattn.engines.tiles import spans, tile_elements

BUCKET = 64  # keys of the smallest buckets; the paper's 4^(g + 1) at g = 2

LEVELS = 32  # halvings in succession that have random numbers of their own


class Round(NamedTuple):
    """One halving of all keys.

    Attributes:
        slots: Places for keys before the round; some may be empty.
        width: Places of a bucket.
        full: The same, were there no end of keys: it does not depend on the length.
    """

    slots: int
    width: int
    full: int

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return -(-self.slots // self.width)


def halvings(length: int, num_keys: int) -> int:
    """How often `length` keys are halved until at most `num_keys` are left."""
    return ((length - 1) // num_keys).bit_length()


def plan(length: int, num_keys: int, padded: bool = False) -> list[Round]:
    """The rounds from `length` keys to at most `num_keys`; padded if some may not exist."""
    rounds = []
    slots = length
    for left in range(halvings(length, num_keys), 0, -1):
        slots += slots % 2
        full = min(max(-(-num_keys // 2 ** (left - 1)) * 2, BUCKET), num_keys << left)
        rounds.append(Round(slots, min(full, slots), full))
        slots = min(num_keys << (left - 1), length) if padded else slots // 2
    return rounds


def coins_shape(num_heads: int, num_keys: int) -> tuple[int, ...]:
    """Shape of the uniform numbers that `thin` takes: (Hk, LEVELS, 2, 1 + pairs of a bucket)."""
    return (num_heads, LEVELS, 2, 1 + max(num_keys, BUCKET // 2))


def thin_flops(length: int, num_keys: int, width: int) -> int:
    """Operations of `thin` for one head whose keys and values are `width` wide together."""
    return sum(2 * r.buckets * r.width**2 * width for r in plan(length, num_keys))


@torch.no_grad()
def thin(
    k: Tensor,
    v: Tensor,
    num_keys: int,
    uniform: Tensor,
    *,
    scale: float,
    delta: float,
    total: Tensor | None = None,
    level: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""Choose at most `num_keys` keys by halving, in the kernel of pairs (key, value).

    .. math:: \kappa((k, v), (k', v')) = e^{\mathrm{scale}\, k \cdot k'}
              (v \cdot v' + \max_j |v_j|^2),

    where k is taken from the mean of the keys that exist.

    The numbers that decide the fate of pair i in bucket c, after l halvings, are the fractions of
    :math:`a_{li} + c\, b_{li}` for uniform a, b. They are uniform, independent between rounds, and
    independent between any two buckets of a round, whatever the length.

    Args:
        k: (B, Hk, N, D).
        v: (B, Hk, N, E).
        num_keys: m, at least 2.
        uniform: Numbers a, b in [0, 1) of shape `coins_shape`, shared by the batch.
        scale: Factor of the logits.
        delta: In (0, 1); a smaller one makes choices more random.
        total: int (B or 1, 1), how many keys exist; these come first. None if all do.
        level: int (B or 1, 1), how often the keys were halved before; None if never.

    Returns:
        The keys that are kept, in order, int (B, Hk, r); whether there is a key at all, bool
        (B, Hk, r), or None if there always is; and h, the halvings, int (B or 1, 1). h is the least
        with n <= 2^h m, every key is kept with probability 2^-h, and n / 2^h are, one more or less:
        empty places are at the end.
    """
    batch, heads, length, _ = k.shape
    place = torch.arange(length, device=k.device)
    count = torch.full((1, 1), length, device=k.device) if total is None else total
    bounds = num_keys << torch.arange(halvings(length, num_keys), device=k.device)
    todo = (count[..., None] > bounds).sum(-1)
    before = torch.zeros_like(todo) if level is None else level
    every = None if total is None else (place < total[..., None]).expand(batch, heads, -1)
    index, exists = place.expand(batch, heads, -1), every
    points = _points(k, v, every, scale) if len(bounds) else k
    rounds = plan(length, num_keys, total is not None)
    for left, this in zip(range(len(rounds), 0, -1), rounds, strict=True):
        coins = _coins(uniform, (before + todo - left).clamp(min=0)[:, 0], this)
        index, exists = _halve(points, k.shape[3], index, exists, coins, this, delta)
        if every is not None and exists is not None:
            size = min(num_keys << (left - 1), length)
            early = (todo < left)[..., None]  # few keys: they are not halved yet
            index = torch.where(early, place[:size], _fit(index, size))
            exists = torch.where(early, every[..., :size], _fit(exists, size))
    return index, exists, todo


def _fit(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of the last dimension, to this size."""
    return F.pad(x, (0, size - x.shape[-1]))


def _points(k: Tensor, v: Tensor, exists: Tensor | None, scale: float) -> Tensor:
    """Keys and values side by side, as the kernel takes them: exp(x x') (1 + y y'), |y| <= 1."""
    mask = None if exists is None else exists[:, :1]
    x = (k - masked_mean(k, mask)) * abs(scale) ** 0.5
    norm = v.norm(dim=-1, keepdim=True)
    if exists is not None:
        norm = norm.masked_fill(~exists[..., None], 0.0)
    norm = norm.amax(2, keepdim=True)
    points = torch.cat([x, v / norm.masked_fill(norm == 0, 1.0)], -1)
    return points if exists is None else points.masked_fill(~exists[..., None], 0.0)


def _coins(uniform: Tensor, level: Tensor, this: Round) -> Tensor:
    """Uniform numbers, (B or 1, Hk, buckets, 1 + pairs), of the entries of a batch."""
    chosen = uniform[..., : 1 + this.width // 2].index_select(1, level).double()
    start, step = chosen.transpose(0, 1).unbind(2)  # (B or 1, Hk, 1 + pairs)
    bucket = torch.arange(this.buckets, device=uniform.device)[:, None]
    return (start[:, :, None] + bucket * step[:, :, None]).frac()


def _halve(
    points: Tensor,
    dim: int,
    index: Tensor,
    exists: Tensor | None,
    coins: Tensor,
    this: Round,
    delta: float,
) -> tuple[Tensor, Tensor | None]:
    """One round: the index of every place, (B, Hk, slots), becomes half as long."""
    batch, heads, places = index.shape
    size = this.buckets * this.width
    no_gap = exists is None and places == this.slots  # then there is none afterwards
    if exists is None and size > places:
        exists = torch.ones_like(index, dtype=torch.bool)
    index = _fit(index, size)
    exists = None if exists is None else _fit(exists, size)
    bucket = take(points, index).view(-1, this.width, points.shape[3])
    there = None if exists is None else exists.reshape(-1, this.width)
    coins = coins.expand(batch, -1, -1, -1).flatten(0, 2).to(points.dtype)
    spread = 0.5 + math.log(2 * this.full / delta)
    second = halve(bucket[..., :dim], bucket[..., dim:], there, coins, spread)
    chosen = torch.arange(0, size, 2, device=index.device) + second.view(batch, heads, -1)
    chosen = chosen[..., : this.slots // 2]
    exists = None if exists is None or no_gap else exists.gather(2, chosen)
    return index.gather(2, chosen), exists


def halve(x: Tensor, y: Tensor, exists: Tensor | None, coins: Tensor, spread: float) -> Tensor:
    r"""Kernel halving: of each pair of neighbours, the one to keep.

    With :math:`f_i` the difference of pair i in the feature space of
    :math:`e^{x \cdot x'} (1 + y \cdot y')` and :math:`\psi_i = \sum_{t < i} \pm f_t` that of the
    halves so far, a pair is turned round when

    .. math:: (2 u_i - 1)\, \mathrm{spread}\, |f_i| \max_{t \le i} |f_t|
              \le \langle \psi_i, f_i \rangle,

    more often than not if that makes the difference smaller. In the end a coin says which half is
    kept. Each pair is measured in units of its longer feature vector, so that neither keys of large
    norm overflow nor those of small norm vanish.

    Args:
        x: (G, w, D), w even.
        y: (G, w, E).
        exists: bool (G, w); a key that does not exist has no feature vector. None if all do.
        coins: Uniform numbers (G, 1 + w / 2); the first one chooses the half.
        spread: Of the noise; 1/2 + log(2 w / delta) makes psi sub-Gaussian.

    Returns:
        int (G, w / 2), 0 where the first of a pair is kept, 1 where the second is.

    Cost: 2 G w^2 (D + E) operations, and w / 2 steps in succession.
    """
    return _halve_op(x, y, exists, coins, spread)


@torch.library.custom_op("numattn::halve", mutates_args=())
def _halve_op(x: Tensor, y: Tensor, exists: Tensor | None, coins: Tensor, spread: float) -> Tensor:
    keep = torch.empty_like(coins[:, 1:], dtype=torch.int64)
    for part in spans(len(x), max(tile_elements(x.device) // x.shape[1] ** 2, 1)):
        some = slice(*part)
        gram, norm = _gram(x[some], y[some], None if exists is None else exists[some])
        bound = (2 * coins[some, 1:] - 1) * norm * spread
        turned = _signed_sum(gram, bound) ^ (coins[some, :1] < 0.5)
        keep[some] = turned
    return keep


@_halve_op.register_fake
def _(x: Tensor, y: Tensor, exists: Tensor | None, coins: Tensor, spread: float) -> Tensor:
    return torch.empty_like(coins[:, 1:], dtype=torch.int64)


@register_flop_formula(torch.ops.numattn.halve)
def _halve_op_flops(x_shape, y_shape, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return 2 * math.prod(x_shape) * x_shape[1] + 2 * math.prod(y_shape) * y_shape[1]


def _gram(x: Tensor, y: Tensor, exists: Tensor | None) -> tuple[Tensor, Tensor]:
    """Products of pairs <f_t, f_i> / max_{s <= i} |f_s| for t < i, and |f_i|.

    f_i is in units e^peak of its pair: both sides of the comparison have it.
    """
    peak = (x.square().sum(-1) / 2).unflatten(1, (-1, 2)).amax(-1)  # (G, p)
    shift = -peak.repeat_interleave(2, 1)
    if exists is not None:
        shift = shift.masked_fill(~exists, -torch.inf)
    kernel = exp_((x @ x.mT).add_(shift[:, None]).add_(shift[..., None]))
    kernel.mul_((y @ y.mT).add_(1.0))
    rows = kernel[:, 0::2] - kernel[:, 1::2]
    gram = rows[..., 0::2] - rows[..., 1::2]  # (G, p, p)
    norm = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    reach = (peak + norm.log()).cummax(-1).values  # log of the longest f so far
    weight = peak.masked_fill(norm == 0, -torch.inf)[..., None] - finite(reach)[:, None]
    later = torch.ones_like(gram[0], dtype=torch.bool).triu_(1)
    return gram.mul_(exp_(weight.masked_fill_(~later, -torch.inf))), norm


def _signed_sum(gram: Tensor, bound: Tensor) -> Tensor:
    """Whether each pair is turned round, bool (G, p), given what is known of those before it."""
    total = torch.zeros_like(bound)
    turned = torch.zeros_like(bound, dtype=torch.bool)
    for i in range(bound.shape[1]):
        turned[:, i] = bound[:, i] <= total[:, i]
        sign = 1 - 2 * turned[:, i, None].to(bound.dtype)
        total.addcmul_(sign, gram[:, i])
    return turned
