r"""Feature-map attention: whole, causal in chunks, and one step at a time.

.. math:: o_i = \frac{\sum_j \left(\sum_r \phi_r(q_i)\, \psi_r(k_j)\right) v_j}
                     {\sum_j \sum_r \phi_r(q_i)\, \psi_r(k_j)}

Three operations make every form. `write` sums keys and values into slots, one per feature; `read`
attends from queries to the slots; `within` is what a causal chunk adds among its own tokens.
Slots are a `Partial` whose rows are features, so they merge, and decoding keeps nothing else.

Features come as functions of a tile of tokens, so an N x m tensor need not exist. With ``log=True``
they return log-features: then nothing overflows, underflows or needs an epsilon, whatever the
scale of the features, and a causal row depends on no later token, not even through a stabiliser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from numattn.core.inputs import compute_dtype, fold, unfold
from numattn.core.linalg import affine, exp_, exp_columns, exp_matmul, finite
from numattn.core.masks import visible
from numattn.core.partial import Partial
from numattn.core.state import State
from numattn.engines.tiles import join, recompute, sizes, split, tile_elements

Feature = Callable[[Tensor], Tensor]  # (B, H, n, D) -> (B, H, n, m)

CHUNK = 128  # positions of a causal chunk


@dataclass(frozen=True)
class LogLinear:
    """Log-features x @ weight + offset, a `Feature` that others can be added to at no cost.

    Attributes:
        weight: (B or 1, H or 1, D, m).
        offset: (B or 1, H or 1, 1, m), or None for none.
    """

    weight: Tensor
    offset: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Log-features of a tile."""
        return x @ self.weight if self.offset is None else affine(x, self.weight, self.offset)

    def plus(self, offset: Tensor) -> LogLinear:
        """The sum with numbers that all rows share."""
        return LogLinear(self.weight, offset if self.offset is None else self.offset + offset)


def write(
    psi: Tensor,
    v: Tensor,
    padding: Tensor | None,
    log: bool,
    before: Partial | None = None,
    owned: bool = False,
) -> Partial:
    """Sum tokens into slots: features (B, H, n, m), values (B, H, n, E) -> rows are features.

    padding: bool (B or 1, 1, n), True = exists. `before`: slots that the tokens are added to.
    `owned`: log-features that no one else holds are used up.
    """
    psi = _masked(psi, padding, log)
    if before is None:
        return _into_slots(*_weigh(psi, log), v)
    if not log:
        return _add(before, _into_slots(*_weigh(psi, log), v), log)
    shift = torch.maximum(before.shift, psi.detach().amax(-2))
    minus = psi.sub_ if owned and not psi.requires_grad else psi.sub
    weight, old = exp_(minus(finite(shift)[..., None, :])), (before.shift - finite(shift)).exp()
    new = (v.mT @ weight).mT  # faster than weight.mT @ v
    num = torch.addcmul(new, before.num, old[..., None])
    return Partial(num, torch.addcmul(weight.sum(-2), before.den, old), shift)


def _masked(psi: Tensor, padding: Tensor | None, log: bool) -> Tensor:
    """Features without those of padding."""
    if padding is None:
        return psi
    return psi.masked_fill(~padding[..., None], -torch.inf if log else 0.0)


def _weigh(psi: Tensor, log: bool) -> tuple[Tensor, Tensor]:
    """Features on a scale that cannot overflow, and that scale, for each feature."""
    return exp_columns(psi) if log else (psi, torch.zeros_like(psi[..., 0, :]))


def _into_slots(weight: Tensor, shift: Tensor, v: Tensor) -> Partial:
    return Partial(weight.mT @ v, weight.sum(-2), shift)


def read(phi: Tensor, slots: Partial, log: bool) -> Partial:
    """Attend from queries with features (B, H, n, m) to slots."""
    if not log:
        den = (phi @ slots.den[..., None])[..., 0]
        return Partial(phi @ slots.num, den, torch.zeros_like(den))
    mean, mass = slots.finalize()
    return Partial.from_logits(phi + mass[..., None, :], mean)


def within(
    phi: Tensor,
    psi: Tensor,
    v: Tensor,
    before: Partial,
    group: int,
    log: bool,
    columns: tuple[Tensor, Tensor] | None = None,
) -> Partial:
    """Attend causally inside one chunk, and merge with what came `before` it.

    Row r stands at position r // group. Features of padding are zero. `columns` are the
    exponentials of log-features, as for `exp_matmul`.
    """
    seen = visible(phi.shape[-2], psi.shape[-2], 0, group, phi.device)
    if log:
        lse = (before.shift + before.den.log()).detach()
        floor = lse + math.log(torch.finfo(lse.dtype).eps)
        weight, shift = exp_matmul(phi, psi, seen, floor, columns)
        den = weight.sum(-1)
        shift = shift.masked_fill(den == 0, -torch.inf)
    else:
        weight = (phi @ psi.mT).mul_(seen.to(phi))
        den, shift = weight.sum(-1), before.shift
    return _add(before, Partial(weight @ v, den, shift), log)


def _add(a: Partial, b: Partial, log: bool) -> Partial:
    """Both together; without logarithms there is no scale to bring them to."""
    return a.merge(b) if log else Partial(a.num + b.num, a.den + b.den, b.shift)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Feature,
    psi: Feature,
    *,
    log: bool,
    is_causal: bool = False,
    padding: Tensor | None = None,
    group: int = 1,
    num_features: int = 256,
    owned: bool = False,
) -> Tensor:
    """Feature-map attention.

    Args:
        q: (B, H, Nq * group, D), any rows that `phi` takes.
        k: (B, H, Nk, D), any rows that `psi` takes.
        v: (B, H, Nk, E).
        phi: Features of queries, (B, H, n, D) -> (B, H, n, m).
        psi: Features of keys, of the same m.
        log: Whether `phi` and `psi` return logarithms of features.
        is_causal: Row r attends to keys j <= r // group.
        padding: bool (B or 1, 1, Nk), True = exists.
        group: Rows per position.
        num_features: m, by which tiles are sized.
        owned: `psi` returns tensors that nothing else holds, so that they may be overwritten.

    Returns:
        (B, H, Nq * group, E); zeros where there is nothing to attend to.

    Cost: 4 N m E operations per head and the features; causal, 2 N CHUNK (m + E) more. Working
    memory is that of one tile of tokens; backward keeps the slots before each tile.
    """
    if is_causal:
        return _causal(q, k, v, phi, psi, log, padding, group, num_features)
    slots = collect(k, v, psi, log=log, padding=padding, num_features=num_features, owned=owned)
    return attend(q, slots, phi, log=log)


def collect(
    k: Tensor,
    v: Tensor,
    psi: Feature,
    *,
    log: bool,
    num_features: int,
    padding: Tensor | None = None,
    owned: bool = False,
) -> Partial:
    """Write all keys into slots, tile by tile; arguments as in `linear_attention`."""

    def step(
        k: Tensor, v: Tensor, padding: Tensor | None, *before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        slots = write(psi(k), v, padding, log, Partial(*before) if before else None, owned)
        return slots.num, slots.den, slots.shift

    slots: tuple[Tensor, ...] = ()
    tiles = sizes(k.shape[2], _tile_rows(k, num_features))
    for tokens in zip(*(split(x, tiles) for x in (k, v, padding)), strict=True):
        slots = recompute(step, *tokens, *slots)
    num, *rest = slots
    return Partial(num.contiguous(), *rest)


def attend(q: Tensor, slots: Partial, phi: Feature, *, log: bool) -> Tensor:
    """Read the slots from all queries, tile by tile."""
    num, den = slots.num, slots.den
    if log:  # mean values and log masses; an empty slot has mean 0
        num, lse = slots.finalize()
        den = finite(lse)[..., None, :]

    def step(q: Tensor, num: Tensor, den: Tensor) -> Tensor:
        if not log:
            return read(phi(q), Partial(num, den, den), log).out()
        logits = phi.plus(den)(q) if isinstance(phi, LogLinear) else phi(q) + den
        if logits.requires_grad:
            return torch.softmax(logits, -1) @ num
        part = Partial.from_logits(logits, num)  # fewer passes, but more for a gradient
        return part.num.div_(part.den[..., None])

    tiles = split(q, sizes(q.shape[2], _tile_rows(q, slots.den.shape[-1])))
    return join((recompute(step, tile, num, den) for tile in tiles), q.shape[2])


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Feature,
    psi: Feature,
    log: bool,
    padding: Tensor | None,
    group: int,
    num_features: int,
) -> Tensor:
    """Chunks are computed several at a time; the slots before each come from a running merge."""

    def step(
        size: int, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *state: Tensor | None
    ) -> tuple[Tensor, ...]:
        fq = phi(q).unflatten(2, (-1, size * group))  # (B, H, chunks, rows, m)
        fk = psi(k).unflatten(2, (-1, size))
        values = v.unflatten(2, (-1, size)).contiguous()
        mask = None if padding is None else padding.unflatten(2, (-1, size))
        fk = _masked(fk, mask, log)
        columns = _weigh(fk, log)
        before, after = _running(_into_slots(*columns, values), log, *state)
        part = within(fq, fk, values, read(fq, before, log), group, log, columns)
        return part.out().flatten(2, 3), after.num, after.den, after.shift

    # The pairs of chunks fill a tile, and their features two at most.
    rows = min(_tile_rows(k, CHUNK), 2 * _tile_rows(k, num_features))
    chunks = _chunk_spans(k.shape[2], max(rows // CHUNK, 1))
    lengths = [length for length, _ in chunks]
    queries = split(q, [length * group for length in lengths])
    tokens = zip(*(split(x, lengths) for x in (k, v, padding)), strict=True)

    def outs() -> Iterator[Tensor]:
        state: Sequence[Tensor | None] = (None, None, None)
        for (_, size), own, others in zip(chunks, queries, tokens, strict=True):
            out, *state = recompute(partial(step, size), own, *others, *state)
            yield out

    return join(outs(), q.shape[2])


def _chunk_spans(length: int, at_once: int) -> list[tuple[int, int]]:
    """(length, chunk size) of spans: some whole chunks each, and what is left as a short chunk."""
    whole, rest = divmod(length, CHUNK)
    spans = [(CHUNK * n, CHUNK) for n in sizes(whole, at_once)]
    return [*spans, (rest, rest)] if rest else spans


def _running(
    chunks: Partial, log: bool, num: Tensor | None, den: Tensor | None, shift: Tensor | None
) -> tuple[Partial, Partial]:
    """Slots before each chunk, (B, H, chunks, m, E), and after the last, from those of chunks."""
    if num is None or den is None or shift is None:
        first = chunks.den[:, :, 0]
        slots = Partial.zeros(first.shape, chunks.num.shape[-1], first)
    else:
        slots = Partial(num, den, shift)
    before = []
    for c in range(chunks.den.shape[2]):
        before.append(slots)
        new = Partial(chunks.num[:, :, c], chunks.den[:, :, c], chunks.shift[:, :, c])
        slots = _add(slots, new, log)
    return Partial.stack(before, 2), slots


def _tile_rows(x: Tensor, num_features: int) -> int:
    """Tokens of a tile whose features fit in the cache."""
    elements = num_features * max(x.shape[0] * x.shape[1], 1)
    return max(tile_elements(x.device) // elements, 64)


class SlotsState(State):
    """Decoding state of feature-map attention: the slots, whatever the number of tokens."""

    def __init__(
        self, key: Tensor, value: Tensor, phi: Feature, psi: Feature, *, log: bool, num_slots: int
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        self._phi, self._psi, self._log = phi, psi, log
        like = value.detach().to(compute_dtype(value.dtype))
        self._slots = Partial.zeros((*key.shape[:2], num_slots), value.shape[3], like)
        self.append(key, value)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        if key.shape[2]:
            dtype = self._slots.num.dtype
            new = collect(
                key.to(dtype),
                value.to(dtype),
                self._psi,
                log=self._log,
                num_features=self._slots.den.shape[-1],
            )
            self._slots = self._slots.merge(new)

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        group = query.shape[1] // self._slots.num.shape[1]
        rows = fold(query, group).to(self._slots.num.dtype)
        out = attend(rows, self._slots, self._phi, log=self._log)
        return unfold(out, group).to(query.dtype)

    @property
    def nbytes(self) -> int:
        parts = (self._slots.num, self._slots.den, self._slots.shift)
        return sum(p.numel() * p.element_size() for p in parts)
