"""Softmax over listed tiles of keys: block-sparse attention, and attention in sorted order.

Queries come in tiles of ``height`` rows, keys in tiles of ``width``, and each query tile reads the
key tiles on its list. Products are batched over many query tiles at a time, so there is no loop
over rows, and memory stays within a tile budget; backward computes the weights again.

The lists are read inside of custom operators: a compiled graph holds one node whose shapes do not
depend on them, and lists of unequal length cost what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from numattn.core.linalg import finite
from numattn.engines.tiles import tile_elements

_LOG2E = 1 / math.log(2)  # weights are powers of two, for torch's exp crawls where it underflows

Skip = tuple[Tensor, Tensor, Tensor]


def blocks_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor | None = None,
    *,
    height: int,
    width: int,
    scale: float,
    bias: Tensor | None = None,
    first: Tensor | None = None,
    last: Tensor | None = None,
    skip: Skip | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Softmax attention over listed tiles of keys, with its log normaliser.

    Row i sees key j if j lies in a tile that is listed for the tile of i, and no rule below hides
    it. With :math:`s_{ij} = \mathrm{scale}\; q_i \cdot k_j + b_j` over the keys seen,

    .. math:: \mathrm{lse}_i = \log \sum_j e^{s_{ij}}, \quad
              o_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} v_j .

    Args:
        q: (B, H, rows, D), float32 or float64; rows ``[t * height, (t + 1) * height)`` are tile t,
            the last one may be short.
        k: (B, Hk, Nk, D); keys ``[u * width, (u + 1) * width)`` are tile u, the last may be short.
            Head h of q reads head h // (H / Hk), so that query heads can have lists of their own;
            those that share their lists are folded into rows instead, as `Inputs` does.
        v: (B, Hk, Nk, E).
        tiles: int (B or 1, H or 1, T, L), numbers of key tiles for each of the T query tiles; -1
            lists nothing, a tile that is listed twice counts once. None lists, for each query
            tile, every key tile between the least of its ``first`` and the greatest of its
            ``last``.
        height: Rows of a query tile.
        width: Keys of a key tile.
        scale: Factor of the logits.
        bias: Per-key bias (B or 1, Hk or 1, Nk): log counts, log weights; -inf removes a key.
        first: int (B or 1, H or 1, rows); row i sees only keys from first_i on,
        last: and before last_i, of the same shape. Give both or neither.
        skip: (first, last, code), int (B or 1, H or 1, rows, C) twice and (B or 1, Hk or 1, Nk, C).
            Row i does not see key j if first_ic <= code_jc < last_ic for any c: pairs that are
            counted elsewhere.
        mask: bool (B or 1, H or 1, T, height, L * width), True = sees; of ``tiles`` only.

    Returns:
        out (B, H, rows, E) and lse (B, H, rows); zeros and -inf for a row that sees nothing. Both
        are differentiable in q, k, v and bias.

    Cost: 2 height width (D + E) operations for every tile listed.
    """
    if tiles is not None:
        tiles = once(tiles)
    return attend_lists(
        q,
        k,
        v,
        tiles,
        height=height,
        width=width,
        scale=scale,
        bias=bias,
        first=first,
        last=last,
        skip=skip,
        mask=mask,
    )


def once(tiles: Tensor) -> Tensor:
    """The lists with every repetition replaced by -1."""
    values, place = tiles.sort(dim=-1, stable=True)
    again = F.pad(values[..., 1:] == values[..., :-1], (1, 0))
    return tiles.masked_fill(torch.zeros_like(again).scatter(-1, place, again), -1)


def attend_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor | None,
    *,
    height: int,
    width: int,
    scale: float,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    first: Tensor | None = None,
    last: Tensor | None = None,
    skip: Skip | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`blocks_attention` without removing repetitions, with log-weights (.., T, L * width)."""
    batch, heads, rows, _ = q.shape
    if 0 in (batch, heads, rows, k.shape[2]):
        zero = q[..., :0].sum(-1) + k[..., :0].sum() + v[..., :0].sum()
        return zero[..., None].expand(*q.shape[:3], v.shape[3]), zero - torch.inf
    short, few = -rows % height, -k.shape[2] % width  # what the last tiles lack

    def flat(x: Tensor | None, pad: int = 0, heads: int = heads) -> Any:
        """(B or 1, heads or 1, n, ...) -> (B * heads, n + pad, ...), integers in 32 bits."""
        if x is None:
            return None
        if not x.is_floating_point() and x.dtype is not torch.bool:
            x = x.to(torch.int32)
        x = x.expand(batch, heads, *x.shape[2:]).flatten(0, 1)
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)) if pad else x

    def keyed(x: Tensor | None) -> Any:
        return flat(x, few, k.shape[1])

    low, high, code = skip if skip is not None else (None, None, None)
    out, lse = _blocks(
        *(flat(q, short), keyed(k), keyed(v), flat(tiles), flat(log_weight)),
        *(keyed(bias), flat(first, short), flat(last, short)),
        *(flat(low, short), flat(high, short), keyed(code), flat(mask)),
        *(height, width, k.shape[2], scale),
    )
    out, lse = (x.unflatten(0, (batch, heads)) for x in (out, lse))
    return out[:, :, :rows], lse[:, :, :rows]


@dataclass(frozen=True)
class _Work:
    """The arguments of the operator, cut into tiles; n = B * H * T query tiles, G = B * Hk."""

    q: Tensor  # (n, height, D)
    k: Tensor  # (G * U, width * D), or (G, U, D) where the width is 1 and it has gaps
    v: Tensor  # (G * U, width * E), likewise
    tiles: Tensor | None  # (n, L)
    log_weight: Tensor | None  # (n, L * width)
    bias: Tensor | None  # (G * U, width)
    first: Tensor | None  # (n, height)
    last: Tensor | None  # (n, height)
    low: Tensor | None  # (n, height, C)
    high: Tensor | None  # (n, height, C)
    code: Tensor | None  # (G * U, width * C)
    mask: Tensor | None  # (n, height, L * width)
    height: int
    width: int
    keys: int
    scale: float
    per_head: int  # query tiles that read the same key head, T * H / Hk
    key_tiles: int  # U

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> _Work:
        """From the arguments of the operator, (G, n, ...)."""
        tiles, log_weight, bias, first, last, low, high, code, mask, height, width, *_ = rest
        key_tiles = k.shape[1] // width
        per_head = q.shape[0] * q.shape[1] // (height * k.shape[0])

        def rows(x: Tensor | None) -> Any:
            return None if x is None else x.unflatten(1, (-1, height)).flatten(0, 1)

        def lists(x: Tensor | None) -> Any:
            return None if x is None else x.flatten(0, 1)

        def keyed(x: Tensor | None) -> Any:
            if x is None or (width == 1 and x.dim() == 3 and not x.is_contiguous()):
                return x  # part of a larger cache: not to be copied for the sake of a few keys
            return x.reshape(x.shape[0] * key_tiles, -1)

        return _Work(
            *(rows(q), keyed(k), keyed(v), lists(tiles), lists(log_weight), keyed(bias)),
            *(rows(first), rows(last), rows(low), rows(high), keyed(code), lists(mask)),
            *(*rest[-4:], per_head, key_tiles),
        )

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Query tiles to compute together, int (m,), and their lists (m, L) of key tiles.

        Tiles with lists of like length go together, so that little is computed for nothing; those
        with nothing on their list do not come.
        """
        start, count = self._extent()
        order = count.argsort(descending=True, stable=True)
        lengths = count[order].tolist()
        wide = max(self.height * self.width, self.k.shape[-1] + self.v.shape[-1])
        budget = 2 * tile_elements(self.q.device)
        at = 0
        while at < len(lengths) and lengths[at]:
            length = lengths[at]
            ids = order[at : at + max(budget // (wide * length), 1)]
            ids = ids[: sum(n > 0 for n in lengths[at : at + len(ids)])]
            if self.tiles is None:
                place = torch.arange(length, device=ids.device)
                index = start[ids, None] + place
                index = index.masked_fill(place >= count[ids, None], -1)
            else:
                index = self.tiles[ids, :length].long()
            yield ids, index
            at += len(ids)

    def _extent(self) -> tuple[Tensor, Tensor]:
        """First key tile and length of each list."""
        if self.tiles is not None:
            place = torch.arange(1, self.tiles.shape[1] + 1, device=self.tiles.device)
            count = ((self.tiles >= 0) * place).amax(-1)
            return torch.zeros_like(count), count
        some = self.first < self.last  # type: ignore[operator]
        first = self.first.clamp(min=0).masked_fill(~some, self.keys)  # type: ignore[union-attr]
        last = self.last.clamp(max=self.keys).masked_fill(~some, 0)  # type: ignore[union-attr]
        start, stop = first.amin(-1) // self.width, -(-last.amax(-1) // self.width)
        return start.long(), (stop - start).clamp(min=0).long()

    def listed(self) -> int:
        """Entries of all lists."""
        if self.tiles is not None:
            return int((self.tiles >= 0).sum())
        return int(self._extent()[1].sum())

    def logits(self, ids: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits in base 2 (m, height, L * width), keys, values and their place in k and v."""
        index, wholes = self._wholes_first(ids, index)
        slots = index.shape[1] * self.width
        place = (index.clamp(min=0) + (ids // self.per_head * self.key_tiles)[:, None]).flatten()
        kt, vt = (self._select(x, place).view(len(ids), slots, -1) for x in (self.k, self.v))
        slot = index[..., None] * self.width + torch.arange(self.width, device=ids.device)
        slot = slot.flatten(1).int()  # (m, L * width)
        offset = self._offset(ids, index, slot, place)
        q = self.q.index_select(0, ids)
        if offset is None:
            logits = torch.bmm(q * (self.scale * _LOG2E), kt.mT)
        else:
            logits = torch.baddbmm(offset[:, None], q, kt.mT, alpha=self.scale * _LOG2E)
        hidden = self._hidden(ids, slot, place, wholes * self.width)
        if hidden is not None:
            part = logits[..., wholes * self.width :]
            part.masked_fill_(hidden, -torch.inf)
        return logits, kt, vt, place

    def _select(self, x: Tensor, place: Tensor) -> Tensor:
        """Tiles of keys or values at `place`."""
        if x.dim() == 3:
            return x[place // self.key_tiles, place % self.key_tiles]
        return x.index_select(0, place)

    def _offset(self, ids: Tensor, index: Tensor, slot: Tensor, place: Tensor) -> Tensor | None:
        """What is added to the logits of a key, (m, L * width)."""
        absent = (slot >= self.keys) | (index < 0).repeat_interleave(self.width, 1)
        if self.bias is None and self.log_weight is None and not bool(absent.any()):
            return None
        offset = torch.zeros_like(absent, dtype=self.q.dtype)
        if self.bias is not None:
            offset += self.bias.index_select(0, place).view_as(offset)
        if self.log_weight is not None:
            offset += self.log_weight[ids, : offset.shape[1]]
        return offset.mul_(_LOG2E).masked_fill_(absent, -torch.inf)

    def _wholes_first(self, ids: Tensor, index: Tensor) -> tuple[Tensor, int]:
        """Lists with those tiles first that every row sees whole, and how many columns they fill.

        Rules are then applied to the other columns only.
        """
        if self.first is None and self.low is None and self.mask is None:
            return index, index.shape[1]
        if self.mask is not None or self.log_weight is not None:
            return index, 0
        whole = torch.ones_like(index, dtype=torch.bool)
        if self.first is not None and self.last is not None:
            begin = index * self.width
            whole &= begin >= self.first[ids].amax(-1, keepdim=True)
            whole &= begin + self.width <= self.last[ids].amin(-1, keepdim=True)
        if self.low is not None and self.high is not None and self.code is not None:
            place = index.clamp(min=0) + (ids // self.per_head * self.key_tiles)[:, None]
            code = self.code.view(len(self.k), self.width, -1)[place]  # (m, L, width, C)
            low, high = self.low[ids].amin(1)[:, None], self.high[ids].amax(1)[:, None]
            whole &= ((code.amax(2) < low) | (code.amin(2) >= high)).all(-1)
        whole |= index < 0
        order = whole.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return index.gather(-1, order), int(whole.sum(-1).min())

    def _hidden(self, ids: Tensor, slot: Tensor, place: Tensor, begin: int) -> Tensor | None:
        """Pairs that a rule hides, from column `begin` on: bool (m, height, L * width - begin)."""
        slot = slot[:, None, begin:]
        if not slot.shape[2]:
            return None
        hidden: Tensor | None = None
        if self.first is not None and self.last is not None:
            hidden = slot < self.first[ids, :, None]
            hidden |= slot >= self.last[ids, :, None]
        if self.low is not None and self.high is not None and self.code is not None:
            code = self.code.index_select(0, place).view(len(ids), -1, self.low.shape[-1])
            for c in range(self.low.shape[-1]):
                here = code[:, None, begin:, c]
                hit = here >= self.low[ids, :, None, c]
                hit &= here < self.high[ids, :, None, c]
                hidden = hit if hidden is None else hidden.logical_or_(hit)
        if self.mask is not None:
            unseen = ~self.mask[ids, :, begin : begin + slot.shape[2]]
            hidden = unseen if hidden is None else hidden.logical_or_(unseen)
        return hidden


_OPTIONAL = "Tensor? tiles, Tensor? log_weight, Tensor? bias, Tensor? first, Tensor? last, "
_OPTIONAL += "Tensor? low, Tensor? high, Tensor? code, Tensor? mask, "
_REST = "int height, int width, int keys, float scale"


@torch.library.custom_op(
    "numattn::blocks",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONAL}{_REST}) -> (Tensor, Tensor)",
)
def _blocks(q, k, v, *rest):  # type: ignore[no-untyped-def]
    work = _Work.of(q, k, v, *rest)
    out = v.new_zeros((*work.q.shape[:2], v.shape[2]))
    lse = q.new_full(work.q.shape[:2], -torch.inf)
    for ids, index in work.chunks():
        weight, _, value, _ = work.logits(ids, index)
        shift = weight.amax(-1, keepdim=True)
        weight.sub_(finite(shift)).exp2_()
        den = weight.sum(-1, keepdim=True)
        out.index_copy_(0, ids, torch.bmm(weight, value).div_(den.masked_fill(den == 0, 1.0)))
        lse.index_copy_(0, ids, (shift + den.log2()).mul_(1 / _LOG2E)[..., 0])
    return out.view(*q.shape[:2], -1), lse.view(q.shape[:2])


@_blocks.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2])


@torch.library.custom_op(
    "numattn::blocks_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor grad_lse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"{_OPTIONAL}{_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _blocks_gradient(grad, grad_lse, out, lse, q, k, v, *rest):  # type: ignore[no-untyped-def]
    work = _Work.of(q, k.contiguous(), v.contiguous(), *rest)
    n, height, _ = work.q.shape
    grad, lse = grad.reshape(n, height, -1), lse.reshape(n, height, 1) * _LOG2E
    # d out and d lse reach the logits through P * (g v - delta), delta = g out - d lse.
    delta = (grad * out.reshape(grad.shape)).sum(-1, keepdim=True) - grad_lse.reshape(lse.shape)
    dq, dk, dv = (torch.zeros_like(x) for x in (work.q, work.k, work.v))
    dweight, dbias = (
        q.new_zeros(0) if x is None else torch.zeros_like(x) for x in (work.log_weight, work.bias)
    )
    for ids, index in work.chunks():
        weight, key, value, place = work.logits(ids, index)
        weight.sub_(finite(lse[ids])).exp2_()
        g = grad[ids]
        dv.index_add_(0, place, torch.bmm(weight.mT, g).view(len(place), -1))
        ds = torch.bmm(g, value.mT).sub_(delta[ids]).mul_(weight)
        if work.bias is not None:
            dbias.index_add_(0, place, ds.sum(1).view(len(place), -1))
        if work.log_weight is not None:
            dweight[ids, : ds.shape[2]] = ds.sum(1)
        dq.index_copy_(0, ids, torch.bmm(ds, key).mul_(work.scale))
        q_here = work.q.index_select(0, ids)
        dk.index_add_(0, place, torch.bmm(ds.mT, q_here).mul_(work.scale).view(len(place), -1))
    dweight = dweight if rest[1] is None else dweight.view_as(rest[1])
    dbias = dbias if rest[2] is None else dbias.view_as(rest[2])
    return dq.view_as(q), dk.view_as(k), dv.view_as(v), dweight, dbias


@_blocks_gradient.register_fake
def _(grad, grad_lse, out, lse, q, k, v, tiles, log_weight, bias, *rest):  # type: ignore[no-untyped-def]
    return (
        *(torch.empty_like(x) for x in (q, k, v)),
        *(q.new_empty(0 if x is None else x.shape) for x in (log_weight, bias)),
    )


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:12], *output)
    ctx.rest = inputs[12:]


def _backward(ctx, grad, grad_lse):  # type: ignore[no-untyped-def]
    *inputs, out, lse = ctx.saved_tensors
    *most, dweight, dbias = _blocks_gradient(grad, grad_lse, out, lse, *inputs, *ctx.rest)
    dweight = dweight if inputs[4] is not None else None
    dbias = dbias if inputs[5] is not None else None
    return (*most, None, dweight, dbias, *[None] * 10)


_blocks.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.numattn.blocks, get_raw=True)
def _blocks_flops(q, k, v, *rest, **kwargs) -> int:  # type: ignore[no-untyped-def]
    height, width = rest[9:11]
    pairs = _Work.of(q, k, v, *rest).listed() * height * width
    return 2 * pairs * (q.shape[2] + v.shape[2])


@register_flop_formula(torch.ops.numattn.blocks_backward, get_raw=True)
def _blocks_gradient_flops(grad, grad_lse, out, lse, q, k, v, *rest, **kwargs) -> int:  # type: ignore[no-untyped-def]
    height, width = rest[9:11]
    pairs = _Work.of(q, k, v, *rest).listed() * height * width
    return 2 * pairs * (3 * q.shape[2] + 2 * v.shape[2])
