r"""Slot attention: queries and keys meet in K slots, and a token is spread over slots by a softmax.

With log-densities :math:`a_{ik}` of queries and :math:`b_{jk}` of keys, and
:math:`\gamma = \mathrm{softmax}_k`, the numerator and the denominator of a row are

.. math:: \sum_j w_{ij} v_j \quad\text{and}\quad D_i = \sum_j w_{ij}, \qquad
          w_{ij} = \sum_k \gamma_k(a_i)\, \gamma_k(b_j) .

It is a case of feature-map attention with log-features, of which three things are special, so that
it has operators of its own: features are quadratic functions of tokens, gradients have a closed
form that needs only the slots, and log :math:`D_i` is wanted where the result is merged.

Forward and backward go over tiles of tokens and keep no N x K tensor, whatever needs a gradient.
Everything is relative to the largest responsibility that a slot was given so far, so nothing
underflows that matters. Where all that a causal row sees is smaller than what later tokens of its
chunk give, the row is computed in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from numattn.core.linalg import exp_, finite
from numattn.core.masks import visible
from numattn.core.partial import Partial
from numattn.engines.linear import CHUNK, collect
from numattn.engines.tiles import spans, tile_elements


class Quadratic(NamedTuple):
    r"""K quadratic functions, :math:`\sum_d a_{dk} y_d^2 + b_{dk} y_d + c_k` with y = x - center.

    Attributes:
        form: a above b, (B or 1, H, 2 D, K).
        constant: c, (B or 1, H, 1, K); -inf removes a slot.
        center: (B or 1, H, 1, D), a constant for autograd, near the tokens for accuracy.
    """

    form: Tensor
    constant: Tensor
    center: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Values at tokens: (B, H, n, D) -> (B, H, n, K)."""
        y = (x - self.center).flatten(0, 1)  # (B * H, n, D)
        lead = (*x.shape[:2], -1, -1)
        a, b, c = (t.expand(lead).flatten(0, 1) for t in (*self.form.chunk(2, -2), self.constant))
        # Two products, the second in place, are faster than one of [y^2, y], which must be joined.
        return torch.baddbmm(c, y, b).baddbmm_(y * y, a).unflatten(0, x.shape[:2])

    def gradient(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """That of x, and those of form and constant, (B, H, ...), from that of the values."""
        y = x - self.center
        square, linear = (grad @ self.form.mT).chunk(2, -1)
        form = torch.cat([y * y, y], -1).mT @ grad
        return linear.addcmul(square, y, value=2), form, grad.sum(-2, keepdim=True)


def slots_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Quadratic,
    b: Quadratic,
    *,
    is_causal: bool = False,
    padding: Tensor | None = None,
    group: int = 1,
    epsilon: float = 0.0,
) -> Tensor:
    """Attention through K slots, as defined above; arguments as in `slots_partial`.

    Returns:
        (B, H, Nq * group, E); zeros where there is nothing to attend to.
    """
    return _call(q, k, v, a, b, padding, group, epsilon, is_causal, False)[0]


def slots_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Quadratic,
    b: Quadratic,
    *,
    is_causal: bool = False,
    padding: Tensor | None = None,
    group: int = 1,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`slots_attention` with the logarithm of its denominator, both differentiable.

    Args:
        q: (B, H, Nq * group, D).
        k: (B, H, Nk, D), at least one.
        v: (B, H, Nk, E).
        a: Log-densities of queries, up to a constant of the row.
        b: Log-densities of keys, likewise.
        is_causal: Row r attends to keys j <= r // group.
        padding: bool (B or 1, 1, Nk), True = exists.
        group: Rows per position.
        epsilon: Added to every denominator; 0 or more.

    Returns:
        out (B, H, Nq * group, E) and log(D + epsilon) (B, H, Nq * group). A row that may attend to
        nothing gives zeros and -inf, or log(epsilon).

    Cost: 2 N K (2 D + E) operations per head for queries and for keys; causal, 2 N CHUNK (K + E)
    more. Backward takes about two and a half times as much. It keeps q, k, v, the output and the
    slots; causal, those before each tile.
    """
    return _call(q, k, v, a, b, padding, group, epsilon, is_causal, True)[:2]


def regularised(slots: Partial, epsilon: float) -> Partial:
    """Slots with `epsilon` more mass of value 0 in each: what adds epsilon to the denominators.

    For the responsibilities of a query sum to one.
    """
    if not epsilon:
        return slots
    virtual = Partial.zeros(slots.den.shape, slots.num.shape[-1], slots.den)
    shift = torch.full_like(slots.den, math.log(epsilon))
    return slots.merge(Partial(virtual.num, torch.ones_like(shift), shift))


def _call(q: Tensor, k: Tensor, v: Tensor, a: Quadratic, b: Quadratic, *rest):  # type: ignore[no-untyped-def]
    return _slots(q, k, v, *a, *b, *rest)


@dataclass(frozen=True)
class _Work:
    """The arguments of the operators."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Quadratic
    b: Quadratic
    padding: Tensor | None
    group: int
    epsilon: float
    is_causal: bool
    want_lse: bool

    @staticmethod
    def of(q, k, v, *rest) -> _Work:  # type: ignore[no-untyped-def]
        return _Work(q, k, v, Quadratic(*rest[:3]), Quadratic(*rest[3:6]), *rest[6:])

    @property
    def tile(self) -> int:
        """Rows whose K numbers, and what is made of them, fit in the cache."""
        heads = max(self.q.shape[0] * self.q.shape[1], 1)
        return max(tile_elements(self.q.device) // (2 * self.b.form.shape[-1] * heads), 64)

    def log_responsibility(self, k: Tensor, first: int) -> Tensor:
        """Of keys from `first` on, -inf where there is none."""
        return self.exist(self.b(k).log_softmax(-1), first, -torch.inf)

    def exist(self, x: Tensor, first: int, nothing: float) -> Tensor:
        """What belongs to keys from `first` on, in place, `nothing` where there is no key."""
        if self.padding is None:
            return x
        exists = self.padding[..., first : first + x.shape[2]]
        return x.masked_fill_(~exists[..., None], nothing)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """(first, last, chunk size) of tiles: whole chunks, and what is left as a short one."""
        length = self.k.shape[2]
        whole = length - length % CHUNK
        at_once = max(self.tile // (CHUNK * self.group), 1)
        for first, last in spans(whole, CHUNK * at_once):
            yield first, last, CHUNK
        if whole < length:
            yield whole, length, length - whole

    @property
    def stride(self) -> int:
        """Tiles from one that keeps its slots for backward to the next.

        So many that slots take no more memory than tokens; those between are computed again.
        """
        slots = self.b.form.shape[-1] * (self.v.shape[3] + 2)
        width = self.group * (self.q.shape[3] + self.v.shape[3]) + self.k.shape[3] + self.v.shape[3]
        return -(-slots // (max(self.tile // self.group, CHUNK) * width))

    def rows(self, x: Tensor, size: int) -> Tensor:
        """Rows (B, H, n * size * group, ...) by chunk of so many positions."""
        return x.unflatten(2, (-1, size * self.group))

    def some(self, first: int, last: int, size: int) -> Tensor | None:
        """Which rows of these positions, by chunk, see a key; None where all do."""
        if self.padding is None or self.epsilon:
            return None
        seen = self.padding.cumsum(-1)[..., first:last] > 0
        return self.rows(seen.repeat_interleave(self.group, 2), size)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Room for the output and for the log denominators, if wanted."""
        rows = self.q.shape[:3]
        out = self.q.new_empty((*rows, self.v.shape[3]))
        return out, self.q.new_empty(rows if self.want_lse else 0)

    def empty_slots(self) -> Partial:
        """Slots before the first token, (B, H, K, E)."""
        shape = (*self.k.shape[:2], self.b.form.shape[-1])
        return regularised(Partial.zeros(shape, self.v.shape[-1], self.v), self.epsilon)


# --- to all keys ----------------------------------------------------------------------------


def _whole(w: _Work) -> tuple[Tensor, Tensor, Partial]:
    """Output, log denominators (empty unless wanted), and the slots."""
    slots = _sums(w)
    slots = regularised(_log_sums(w) if slots is None else slots, w.epsilon)
    mean, mass = slots.finalize()
    add = finite(mass)[..., None, :]
    heavy = w.a._replace(constant=w.a.constant + add)
    out, lse = w.outputs()
    for r0, r1 in spans(w.q.shape[2], w.tile):
        rows = w.q[:, :, r0:r1]
        if w.want_lse:
            logits = w.a(rows)
            own = logits.logsumexp(-1)
            logits = logits.add_(add)
            lse[:, :, r0:r1] = logits.logsumexp(-1) - own
        else:
            logits = heavy(rows)
        part = Partial.from_logits(logits, mean)
        torch.div(part.num, part.den[..., None], out=out[:, :, r0:r1])
    if w.want_lse:
        lse.masked_fill_((mass == -torch.inf).all(-1, keepdim=True), -torch.inf)
    return out, lse, slots


def _sums(w: _Work) -> Partial | None:
    """The slots by plain sums of responsibilities, or None where a sum may have lost terms."""
    num = w.v.new_zeros((*w.v.shape[:2], w.v.shape[3], w.b.form.shape[-1]))
    den = torch.zeros_like(num[:, :, 0])
    for first, last in spans(w.k.shape[2], w.tile):
        gamma = w.exist(w.b(w.k[:, :, first:last]).softmax(-1), first, 0.0)
        num += w.v[:, :, first:last].mT @ gamma  # faster than gamma.mT @ v
        den += gamma.sum(-2)
    info = torch.finfo(den.dtype)
    if bool((den < w.k.shape[2] * info.tiny / info.eps).any()):
        return None
    return Partial(num.mT.contiguous(), den, torch.zeros_like(den))


def _log_sums(w: _Work) -> Partial:
    """The slots, relative to the largest responsibility of each."""
    return collect(
        w.k,
        w.v,
        lambda k: w.b(k).log_softmax(-1),
        log=True,
        num_features=2 * w.b.form.shape[-1],
        padding=w.padding,
    )


def _whole_gradient(
    w: _Work, grad: Tensor, grad_lse: Tensor, out: Tensor, slots: Partial
) -> _Gradients:
    r"""Gradients through the means M and log masses of the slots.

    With P the weights of the slots, and :math:`\delta = g \cdot o` less the gradient of the log
    denominator, the slots hand :math:`P^T g` and :math:`P^T \delta` on to the keys.
    """
    mean, mass = slots.finalize()
    mass = finite(mass)
    found = _Gradients.zeros(w)
    handed, less = torch.zeros_like(mean), torch.zeros_like(mass)
    for r0, r1 in spans(w.q.shape[2], w.tile):
        g, logits = grad[:, :, r0:r1], w.a(w.q[:, :, r0:r1])
        delta = (g * out[:, :, r0:r1]).sum(-1, keepdim=True)
        da = torch.zeros_like(logits)
        if w.want_lse:
            weight = grad_lse[:, :, r0:r1, None]
            delta -= weight
            da -= logits.softmax(-1) * weight
        p = logits.add_(mass[..., None, :]).softmax(-1)
        handed += p.mT @ g
        less += (p.mT @ delta)[..., 0]
        found.queries(w, r0, r1, da.addcmul_((g @ mean.mT).sub_(delta), p))
    for first, last in spans(w.k.shape[2], w.tile):
        logs = w.log_responsibility(w.k[:, :, first:last], first)
        weight = exp_(logs.sub_(mass[..., None, :]))
        dlogs = (w.v[:, :, first:last] @ handed.mT).sub_(less[..., None, :]).mul_(weight)
        found.dv[:, :, first:last] = weight @ handed
        found.keys(w, first, last, _through_softmax(dlogs, weight, mass))
    return found


def _through_softmax(dlogs: Tensor, weight: Tensor, mass: Tensor) -> Tensor:
    """Gradient of log-densities from that of log-responsibilities.

    Responsibilities are weight (..., n, K) times e^mass (..., K).
    """
    total = dlogs.sum(-1, keepdim=True)
    return dlogs.addcmul_(weight, mass.exp()[..., None, :] * total, value=-1)


@dataclass(frozen=True)
class _Gradients:
    """Gradients of what the operator was given, filled tile by tile."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    form_a: Tensor
    constant_a: Tensor
    form_b: Tensor
    constant_b: Tensor

    @staticmethod
    def zeros(w: _Work) -> _Gradients:
        lead = w.q.shape[:2]
        return _Gradients(
            *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (w.q, w.k, w.v)),
            *(
                t.new_zeros((*lead, *t.shape[2:]))
                for t in (w.a.form, w.a.constant, w.b.form, w.b.constant)
            ),
        )

    def queries(self, w: _Work, first: int, last: int, grad: Tensor) -> None:
        """Take in the gradient of log-densities of rows [first, last)."""
        dq, form, constant = w.a.gradient(w.q[:, :, first:last], grad)
        self.dq[:, :, first:last] = dq
        self.form_a.add_(form)
        self.constant_a.add_(constant)

    def keys(self, w: _Work, first: int, last: int, grad: Tensor) -> None:
        """Take in the gradient of log-densities of keys [first, last)."""
        dk, form, constant = w.b.gradient(w.k[:, :, first:last], grad)
        self.dk[:, :, first:last] = dk
        self.form_b.add_(form)
        self.constant_b.add_(constant)

    def tensors(self, w: _Work) -> tuple[Tensor, ...]:
        """In the shapes of the arguments: batches that share a mixture are summed."""
        shared = (w.a.form, w.a.constant, w.b.form, w.b.constant)
        own = (self.form_a, self.constant_a, self.form_b, self.constant_b)
        return (
            *(self.dq, self.dk, self.dv),
            *(g.sum_to_size(t.shape) for g, t in zip(own, shared, strict=True)),
        )


# --- causal ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """Some chunks of a causal call: n of them, of C positions.

    Weights of a chunk's keys are relative to its `shift`, the largest log-responsibility that each
    slot was given up to its end; `num` and `den`, the slots before it, are relative to `last`, the
    shift before it. `decay` is e^(last - shift).
    """

    logits: Tensor  # (B, H, n, C * group, K), log-densities of queries
    logs: Tensor  # (B, H, n, C, K), log-responsibilities of keys
    weight: Tensor  # the same, e^(logs - shift)
    values: Tensor  # (B, H, n, C, E)
    num: Tensor  # (B, H, n, K, E)
    den: Tensor  # (B, H, n, K)
    last: Tensor  # (B, H, n, K)
    shift: Tensor  # (B, H, n, K)
    decay: Tensor  # (B, H, n, K)
    seen: Tensor  # 1 and 0, (C * group, C)

    @staticmethod
    def of(w: _Work, first: int, last: int, size: int, slots: Partial) -> tuple[_Tile, Partial]:
        """The tile of positions [first, last) after these slots, and the slots after it."""
        logs = w.log_responsibility(w.k[:, :, first:last], first).unflatten(2, (-1, size))
        values = w.v[:, :, first:last].unflatten(2, (-1, size))
        logits = w.rows(w.a(w.q[:, :, first * w.group : last * w.group]), size)
        peak = torch.cat([slots.shift[:, :, None], logs.amax(-2)], 2).cummax(2).values
        before, shift = finite(peak[:, :, :-1]), finite(peak[:, :, 1:])
        weight, decay = exp_(logs - shift[..., None, :]), (before - shift).exp()
        new_num, new_den = weight.mT @ values, weight.sum(-2)
        num, den = [slots.num], [slots.den]
        for c in range(logs.shape[2]):
            num.append(torch.addcmul(new_num[:, :, c], num[-1], decay[:, :, c, :, None]))
            den.append(torch.addcmul(new_den[:, :, c], den[-1], decay[:, :, c]))
        after = Partial(num.pop(), den.pop(), peak[:, :, -1])
        seen = visible(size * w.group, size, 0, w.group, w.q.device).to(logs.dtype)
        num_before, den_before = torch.stack(num, 2), torch.stack(den, 2)
        return _Tile(
            logits, logs, weight, values, num_before, den_before, before, shift, decay, seen
        ), after

    @property
    def before(self) -> tuple[Tensor, Tensor]:
        """The slots before each chunk, relative to its shift."""
        return self.num * self.decay[..., None], self.den * self.decay

    @property
    def least(self) -> float:
        """A sum below this one may have lost terms, of its K (C + 1), that matter."""
        info = torch.finfo(self.logs.dtype)
        return self.logs.shape[-1] * (self.logs.shape[-2] + 1) * info.tiny / info.eps

    def rows(self, marked: Tensor) -> Iterator[_Rows]:
        """Rows marked by bool (B, H, n, C * group), a few at a time."""
        if not bool(marked.any()):
            return
        *chunk, row = marked.nonzero(as_tuple=True)
        few = max((1 << 20) // (self.weight[0, 0, 0].numel() + self.num[0, 0, 0].numel()), 1)
        for at in torch.arange(row.numel(), device=row.device).split(few):
            yield _Rows.of(self, tuple(x[at] for x in chunk), row[at])


class _Rows(NamedTuple):
    """Some rows of a tile, R of them, in logarithms."""

    chunk: tuple[Tensor, ...]  # indices of their chunks
    row: tuple[Tensor, ...]  # indices of the rows
    pairs: Tensor  # (R, C, K), a row's log-density plus a key's, -inf where not seen
    slots: Tensor  # (R, K), plus the log mass of a slot before
    last: Tensor  # (R, K), plus what the slots before are relative to
    values: Tensor  # (R, C, E)
    means: Tensor  # (R, K, E)

    @staticmethod
    def of(tile: _Tile, chunk: tuple[Tensor, ...], row: Tensor) -> _Rows:
        at = (*chunk, row)
        a = tile.logits[at]
        pairs = a[:, None] + tile.logs[chunk]
        pairs.masked_fill_(tile.seen[row].eq(0)[..., None], -torch.inf)
        last, den = a + tile.last[chunk], tile.den[chunk]
        means = tile.num[chunk] / den.masked_fill(den == 0, 1.0)[..., None]
        slots = last + den.log()
        return _Rows(chunk, at, pairs, slots, last, tile.values[chunk], means)

    def gradient(
        self,
        g: Tensor,
        delta: Tensor,
        norm: Tensor,
        da: Tensor,
        dv: Tensor,
        dlogs: Tensor,
        own: Tensor,
        own_less: Tensor,
    ) -> None:
        """Add what these rows contribute; the slots' part is relative to `last`."""
        g, d, n = g[self.row], delta[self.row][:, None], norm[self.row][:, None]
        weight = exp_(self.pairs - n[..., None])  # (R, C, K)
        through = (self.values @ g[..., None])[..., 0] - d  # (R, C)
        inner = (self.means @ g[..., None])[..., 0] - d  # (R, K)
        da[self.row] = (through[:, None] @ weight)[:, 0] + exp_(self.slots - n) * inner
        share = exp_(self.last - n)
        for sums, part in (
            (dv, weight.sum(-1)[..., None] * g[:, None]),
            (dlogs, weight * through[..., None]),
            (own, share[..., None] * g[:, None]),
            (own_less, share * d),
        ):
            sums.index_put_(self.chunk, part, accumulate=True)


def _causal(w: _Work) -> tuple[Tensor, Tensor, Tensor, Partial]:
    """Output, log denominators (empty unless wanted), log sums, and slots before some tiles."""
    slots, kept = w.empty_slots(), []
    out, lse = w.outputs()
    norm = w.q.new_empty(w.q.shape[:3])
    for t, (first, last, size) in enumerate(w.chunks()):
        if t % w.stride == 0:
            kept.append(slots)
        tile, slots = _Tile.of(w, first, last, size, slots)
        rows, sums = _read(tile, w.some(first, last, size))
        r0, r1 = first * w.group, last * w.group
        out[:, :, r0:r1], norm[:, :, r0:r1] = rows.flatten(2, 3), sums.flatten(2)
        if w.want_lse:
            lse[:, :, r0:r1] = (sums - tile.logits.logsumexp(-1)).flatten(2)
    return out, lse, norm, Partial.stack(kept, 0)


def _read(tile: _Tile, some: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log sums of the rows (B, H, n, C * group) of a tile; which of them see a key."""
    logits = tile.logits + tile.shift[..., None, :]
    top = finite(logits.amax(-1, keepdim=True))
    e = exp_(logits.sub_(top))
    pairs = (e @ tile.weight.mT).mul_(tile.seen)
    num, den = tile.before
    total = (e @ den[..., None])[..., 0].add_(pairs.sum(-1))
    out = (e @ num).add_(pairs @ tile.values).div_((total + (total == 0))[..., None])
    norm = total.log().add_(top[..., 0])
    lost = total < tile.least
    for rows in tile.rows(lost if some is None else lost & some):
        terms = torch.cat([rows.pairs.logsumexp(-1), rows.slots], -1)
        norm[rows.row] = terms.logsumexp(-1)
        weight = terms.softmax(-1)[:, None]
        out[rows.row] = (weight @ torch.cat([rows.values, rows.means], 1))[:, 0]
    return out, norm


def _causal_gradient(
    w: _Work, grad: Tensor, grad_lse: Tensor, out: Tensor, norm: Tensor, kept: Partial
) -> _Gradients:
    """From the last tile to the first; what later rows hand on to keys is kept by slots."""
    found = _Gradients.zeros(w)
    delta = (grad * out).sum(-1)
    if w.want_lse:
        delta -= grad_lse
    later = torch.zeros_like(kept.num[0]), torch.zeros_like(kept.den[0])
    for (first, last, size), slots in _backwards(w, kept):
        tile, _ = _Tile.of(w, first, last, size, slots)
        r0, r1 = first * w.group, last * w.group
        g, d, n = (w.rows(x[:, :, r0:r1], size) for x in (grad, delta, norm))
        da, dlogs, dv, later = _tile_gradient(tile, g, d, n, *later)
        if w.want_lse:
            da -= tile.logits.softmax(-1) * w.rows(grad_lse[:, :, r0:r1], size)[..., None]
        found.queries(w, r0, r1, da.flatten(2, 3))
        found.keys(w, first, last, dlogs.flatten(2, 3))
        found.dv[:, :, first:last] = dv.flatten(2, 3)
    return found


def _backwards(w: _Work, kept: Partial) -> Iterator[tuple[tuple[int, int, int], Partial]]:
    """The tiles from the last to the first, each with the slots before it."""
    tiles = list(w.chunks())
    for t in reversed(range(0, len(tiles), w.stride)):
        some, at = tiles[t : t + w.stride], t // w.stride
        before = [Partial(kept.num[at], kept.den[at], kept.shift[at])]
        for tile in some[:-1]:
            before.append(_Tile.of(w, *tile, before[-1])[1])
        yield from reversed(list(zip(some, before, strict=True)))


def _tile_gradient(
    tile: _Tile, g: Tensor, delta: Tensor, norm: Tensor, later: Tensor, less: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    r"""Gradients of log-densities of queries and keys, of values, and what earlier keys are handed.

    Slot k hands :math:`\sum_i e^{a_{ik} - n_i} g_i` and the same of :math:`\delta_i` from the
    rows i after it, with n their log sums, relative to the shift that it had there.
    """
    logits = tile.logits + tile.shift[..., None, :]
    none = norm == -torch.inf
    lost = (logits.amax(-1) - norm > -math.log(tile.least)) & ~none
    e = exp_(logits.sub_(norm.masked_fill(lost | none, torch.inf)[..., None]))
    num, den = tile.before
    minus = -delta[..., None]
    through = (g @ tile.values.mT).add_(minus).mul_(tile.seen)  # by the logarithm of a pair
    da = (g @ num.mT).addcmul_(minus, den[..., None, :]).add_(through @ tile.weight).mul_(e)
    dv = (e @ tile.weight.mT).mul_(tile.seen).mT @ g
    own = (e.mT @ g).mul_(tile.decay[..., None])
    own_less = (e.mT @ delta[..., None])[..., 0].mul_(tile.decay)
    extra = torch.zeros_like(tile.logs)
    for rows in tile.rows(lost):
        rows.gradient(g, delta, norm, da, dv, extra, own, own_less)
    given, given_less = [], []
    for c in reversed(range(own.shape[2])):
        given.append(later)
        given_less.append(less)
        later = torch.addcmul(own[:, :, c], later, tile.decay[:, :, c, :, None])
        less = torch.addcmul(own_less[:, :, c], less, tile.decay[:, :, c])
    handed = torch.stack(given[::-1], 2)
    inner = (tile.values @ handed.mT).add_(through.mT @ e)
    inner.sub_(torch.stack(given_less[::-1], 2)[..., None, :])
    dlogs = _through_softmax(inner.mul_(tile.weight).add_(extra), tile.weight, tile.shift)
    return da, dlogs, dv.add_(tile.weight @ handed), (later, less)


# --- operators ------------------------------------------------------------------------------

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor a_form, Tensor a_constant, Tensor a_center, "
_TENSORS += "Tensor b_form, Tensor b_constant, Tensor b_center, Tensor? padding, "
_REST = "int group, float epsilon, bool is_causal, bool want_lse"


@torch.library.custom_op(
    "numattn::slots",
    mutates_args=(),
    schema=f"({_TENSORS}{_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _slots(q, k, v, *rest):  # type: ignore[no-untyped-def]
    w = _Work.of(q, k, v, *rest)
    if w.is_causal:
        out, lse, norm, slots = _causal(w)
    else:
        out, lse, slots = _whole(w)
        norm = q.new_empty(0)
    return out, lse, norm, slots.num, slots.den, slots.shift


@_slots.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    w = _Work.of(q, k, v, *rest)
    rows = q.shape[:3]
    slots = (*k.shape[:2], w.b.form.shape[-1])
    if w.is_causal:
        slots = (-(-len(list(w.chunks())) // w.stride), *slots)
    return (
        q.new_empty((*rows, v.shape[3])),
        q.new_empty(rows if w.want_lse else 0),
        q.new_empty(rows if w.is_causal else 0),
        *(q.new_empty((*slots, *tail)) for tail in ((v.shape[3],), (), ())),
    )


@torch.library.custom_op(
    "numattn::slots_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor grad_lse, Tensor out, Tensor norm, Tensor num, Tensor den, "
    f"Tensor shift, {_TENSORS}{_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _slots_gradient(grad, grad_lse, out, norm, num, den, shift, *inputs):  # type: ignore[no-untyped-def]
    w, slots = _Work.of(*inputs), Partial(num, den, shift)
    if w.is_causal:
        return _causal_gradient(w, grad, grad_lse, out, norm, slots).tensors(w)
    return _whole_gradient(w, grad, grad_lse, out, slots).tensors(w)


@_slots_gradient.register_fake
def _(grad, grad_lse, out, norm, num, den, shift, *inputs):  # type: ignore[no-untyped-def]
    w = _Work.of(*inputs)
    given = (w.q, w.k, w.v, w.a.form, w.a.constant, w.b.form, w.b.constant)
    return tuple(x.new_empty(x.shape) for x in given)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    out, _, *kept = output
    ctx.save_for_backward(*inputs[:10], out, *kept)
    ctx.rest = inputs[10:]


def _backward(ctx, grad, grad_lse, *_):  # type: ignore[no-untyped-def]
    *inputs, out, norm, num, den, shift = ctx.saved_tensors
    slots = (out, norm, num, den, shift)
    dq, dk, dv, fa, ca, fb, cb = _slots_gradient(grad, grad_lse, *slots, *inputs, *ctx.rest)
    return dq, dk, dv, fa, ca, None, fb, cb, *[None] * 6


_slots.register_autograd(_backward, setup_context=_setup)


def _operations(inputs, width: int, pair: int) -> int:  # type: ignore[no-untyped-def]
    """2 `width` for each token and slot; `pair` for each pair of a chunk."""
    w = _Work.of(*inputs)
    heads, slots = w.q.shape[0] * w.q.shape[1], w.b.form.shape[-1]
    rows, keys = w.q.shape[2], w.k.shape[2]
    flops = 2 * heads * (rows + keys) * slots * width
    return flops + (2 * heads * rows * min(CHUNK, keys) * pair if w.is_causal else 0)


@register_flop_formula(torch.ops.numattn.slots, get_raw=True)
def _slots_flops(q, k, v, *rest, **kwargs) -> int:  # type: ignore[no-untyped-def]
    slots = rest[0].shape[-1]
    return _operations((q, k, v, *rest), 2 * q.shape[3] + v.shape[3], slots + v.shape[3])


@register_flop_formula(torch.ops.numattn.slots_backward, get_raw=True)
def _slots_gradient_flops(grad, grad_lse, out, norm, num, den, shift, *inputs, **kwargs) -> int:  # type: ignore[no-untyped-def]
    q, _, v, form = inputs[:4]
    slots = form.shape[-1]
    return _operations(inputs, 6 * q.shape[3] + 2 * v.shape[3], 3 * slots + 2 * v.shape[3])
