"""Causal lifting: make a bidirectional rectangular method causal, and decode with it.

The first tokens attend among themselves, the others among themselves and, all of them past, to the
first. Only that last block is rectangular and unmasked, so any method serves it; the parts are cut
again until they are short enough for exact causal attention. Cuts are at ``leaf`` times powers of
two of the tokens that exist, so that a row depends on no later token, not even on how many there
are, and padding is truncation.

`lift` hands every block to the method as it is. Methods that replace keys by fewer keys, whatever
the queries, are lifted by `lift_summaries`: the summary of a block is made from those of its two
halves, so that a row sees what decoding with `StreamingState` would show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from numattn.core.cost import Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, prepare
from numattn.core.linalg import finite
from numattn.core.partial import Partial
from numattn.core.state import Buffer, State
from numattn.engines.softmax import ROWS, key_bias, softmax_partial
from numattn.engines.tiles import spans

Block = Callable[[Tensor, Inputs], Partial]

LEAF = 512

PROBES = 8  # signs by which a row knows whether its weights cancel

_TOKENS = 1 << 16  # of all heads that are compressed at once


def lift(x: Inputs, block: Block, *, leaf: int = LEAF) -> Tensor:
    """Causal attention from a method without a causal form.

    Args:
        x: The call.
        block: ``block(q, past)``, the method on folded rows q (B, Hk, n * group, D) that may see
            all of the inputs ``past``. Statistics over queries must come from ``past.q``: those of
            q would let a row see queries after it. Its partial must carry the mass of the block,
            for blocks are merged.
        leaf: Longest block that is computed exactly.

    Returns:
        (B, Hk, N * group, E); exact where N <= leaf.

    Cost: the exact leaves, and a call for each block of `split_points`: on log2(N / leaf) levels
    about half the bidirectional cost of a linear method.
    """
    x, place = x.compact()
    part = _lift(x, lambda q, start, stop: block(q, _part(x, start, stop)), 0, x.k.shape[2], leaf)
    return x.move_back(part.out(), place)


def _lift(
    x: Inputs, past: Callable[[Tensor, int, int], Partial], start: int, stop: int, leaf: int
) -> Partial:
    """Rows [start, stop) over these tokens; `past` attends from rows to all of a span."""
    if stop - start <= leaf:
        x = _part(x, start, stop)
        bias = key_bias(x.padding, x.q)
        return softmax_partial(
            x.q, x.k, x.v, scale=x.scale, bias=bias, is_causal=True, group=x.group
        )
    cut = start + _cut(stop - start, leaf)
    rows = x.q[:, :, cut * x.group : stop * x.group]
    bottom = _lift(x, past, cut, stop, leaf).merge(past(rows, start, cut))
    return Partial.cat([_lift(x, past, start, cut, leaf), bottom], 2)


def _part(x: Inputs, start: int, stop: int) -> Inputs:
    """The inputs at positions [start, stop)."""
    return replace(
        x,
        q=x.q[:, :, start * x.group : stop * x.group],
        k=x.k[:, :, start:stop],
        v=x.v[:, :, start:stop],
        padding=None if x.padding is None else x.padding[..., start:stop],
    )


def _cut(length: int, leaf: int) -> int:
    """The largest leaf * 2^i below `length`."""
    return leaf << ((length - 1) // leaf).bit_length() - 1


def split_points(length: int, leaf: int = LEAF) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of the exact leaves, and (queries, keys) of the rectangular blocks, for cost counts."""
    if length <= leaf:
        return [length], []
    cut = _cut(length, leaf)
    leaves1, blocks1 = split_points(cut, leaf)
    leaves2, blocks2 = split_points(length - cut, leaf)
    return leaves1 + leaves2, [*blocks1, *blocks2, (length - cut, cut)]


def leaf_flops(leaves: list[int], width: int) -> int:
    """Operations of one head in exact leaves of these sizes, for keys and values `width` wide.

    Tiles of rows are computed whole where the diagonal crosses them.
    """
    return sum(n * (n + min(n, ROWS)) * width for n in leaves)


@dataclass(frozen=True)
class Summary:
    r"""Keys that stand for many: rows attend as :math:`\sum_s e^{q \cdot k_s + b_s} (v_s, w_s)`.

    Values, their weights and probes are columns of one tensor, for compression is linear in them.

    Weights that may be negative can cancel, and a quotient of sums that cancel is noise of any
    size. Then each key also carries some fixed random signs, its probes: the sums of these over the
    keys of a row have the mean square :math:`|w|_2^2` of all the weights that went into it. A row's
    sum of weights counts for no less than this norm. What it falls short of it is put on the mean
    of the values, as a row of equal logits would find it. Of weights that are not negative no sum
    with signs exceeds the plain sum, so rows without cancellation are left exactly as they are.

    Attributes:
        k: (B, H, r, D).
        columns: (B, H, r, E + 1 + probes): values times their weights, the weights, probes.
        bias: (B, H, r), added to the logits: the scale of `columns`; -inf where there is no key.
        width: E.
    """

    k: Tensor
    columns: Tensor
    bias: Tensor
    width: int

    @staticmethod
    def of(k: Tensor, v: Tensor, padding: Tensor | None = None, *, signed: bool = False) -> Summary:
        """Every key (B, H, N, D) with its value (B, H, N, E) for itself; padding as in `Inputs`.

        `signed` gives it probes, for a compression whose weights may be negative.
        """
        columns = [v, torch.ones_like(k[..., :1])]
        bias = torch.zeros_like(k[..., 0])
        place = torch.arange(k.shape[2], device=k.device)[None, None]
        if padding is not None:
            bias = bias.masked_fill(~padding, -torch.inf)
            place = padding.cumsum(-1) - 1
        if signed:
            columns.append(_signs(place).to(k).expand(*k.shape[:3], PROBES))
        return Summary(k, torch.cat(columns, -1), bias, v.shape[3])

    def attend(self, q: Tensor, scale: float) -> Partial:
        """From rows (B, H, n, D), folded or not."""
        part = softmax_partial(q, self.k, self.columns, scale=scale, bias=self.bias)
        num, den = part.num[..., : self.width], part.num[..., self.width]
        if self.columns.shape[3] > self.width + 1:
            mean, least = self._mean(), _least(part.num[..., self.width + 1 :])
            short = (least - den).clamp(min=0)
            num, den = num + short[..., None] * mean, den + short
        return Partial(num, den, part.shift)

    def _mean(self) -> Tensor:
        """Mean of the values, as the weights have it: (B, H, 1, E)."""
        share = (self.bias - finite(self.bias.amax(-1, keepdim=True))).exp()
        total = share[..., None, :] @ self.columns
        den = torch.maximum(total[..., self.width], _least(total[..., self.width + 1 :]))
        return total[..., : self.width] / (den + (den == 0))[..., None]

    @staticmethod
    def cat(parts: list[Summary], dim: int) -> Summary:
        """The keys of all along dimension 2, or entries of a batch along dimension 0."""
        k, columns, bias = (
            torch.cat([getattr(part, name) for part in parts], dim)
            for name in ("k", "columns", "bias")
        )
        return Summary(k, columns, bias, parts[0].width)

    def entries(self, index: slice) -> Summary:
        """Some entries of the batch."""
        return Summary(self.k[index], self.columns[index], self.bias[index], self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.numel() * t.element_size() for t in (self.k, self.columns, self.bias))


def _signs(place: Tensor) -> Tensor:
    """Fixed signs that look random, int (..., PROBES), of places (...), equal on every device."""
    x = place[..., None] * PROBES + torch.arange(1, PROBES + 1, device=place.device)
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return 1 - 2 * (x & 1)


def _least(probes: Tensor) -> Tensor:
    """The least that a sum of weights counts for, from the sums of probes (..., PROBES): (...)."""
    square = probes.square().mean(-1)
    return square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()


Compress = Callable[[Summary], Summary]


def lift_summaries(
    x: Inputs, compress: Compress, *, leaf: int = LEAF, signed: bool = False
) -> Tensor:
    """Causal attention from a way to replace keys by fewer keys.

    The summary of ``leaf`` tokens is made from them, that of two neighbours from both of theirs
    (merge and reduce): a row attends exactly within its leaf, and to one summary for each binary
    digit 1 of the number of leaves before it.

    Args:
        x: The call.
        compress: Summary -> Summary of bounded size, that depends on nothing else: every entry of
            the batch by itself, for blocks stand in the batch. All keys that it is given exist.
        leaf: Tokens that are attended to exactly.
        signed: Whether weights may be negative, see `Summary`.

    Returns:
        (B, Hk, N * group, E); exact where N <= leaf.

    Cost: the exact leaves; r (D + E) products for every row and level, r being the size of a
    summary; compression of every leaf, and of as many pairs of summaries.
    """
    x, place = x.compact()
    nodes = _tree(x, compress, leaf, signed)

    def past(q: Tensor, start: int, stop: int) -> Partial:
        level = ((stop - start) // leaf).bit_length() - 1
        return nodes[level][start // (stop - start)].attend(q, x.scale)

    return x.move_back(_lift(x, past, 0, x.k.shape[2], leaf).out(), place)


def _tree(x: Inputs, compress: Compress, leaf: int, signed: bool) -> list[list[Summary]]:
    """Summaries of whole blocks of leaf * 2^i tokens that have tokens after them, for each i."""
    count = (x.k.shape[2] - 1) // leaf
    batch, heads = x.k.shape[:2]
    whole = [t[:, :, : count * leaf].split(leaf, 2) for t in (x.k, x.v)]
    leaves = [Summary.of(k, v, signed=signed) for k, v in zip(*whole, strict=True)] if count else []
    levels = []
    while leaves:
        at_once = max(_TOKENS // (batch * heads * leaves[0].k.shape[2]), 1)
        level = []
        for start, stop in spans(len(leaves), at_once):
            level += _compress_all(leaves[start:stop], compress)
        levels.append(level)
        leaves = [Summary.cat([a, b], 2) for a, b in zip(level[0::2], level[1::2], strict=False)]
    return levels


def _compress_all(blocks: list[Summary], compress: Compress) -> list[Summary]:
    """Several blocks in one call, as entries of a batch."""
    batch = blocks[0].k.shape[0]
    both = compress(Summary.cat(blocks, 0))
    return [both.entries(slice(i * batch, (i + 1) * batch)) for i in range(len(blocks))]


class StreamingState(State):
    """Decoding from summaries: the last tokens exactly, those before in a forest of summaries.

    What `lift_summaries` shows to a row: up to ``leaf`` tokens as they are, and for every binary
    digit 1 of the number of full leaves before them one summary. When two summaries cover equally
    many tokens they are joined and compressed again.
    """

    def __init__(
        self,
        info: Info,
        compress: Compress,
        key: Tensor,
        value: Tensor,
        *,
        leaf: int = LEAF,
        signed: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Take in a prefix.

        Args:
            info: Of the method, for messages.
            compress: As in `lift_summaries`.
            key: (B, Hk, N, D).
            value: (B, Hk, N, E).
            leaf: As in `lift_summaries`.
            signed: As in `lift_summaries`.
            scale: As in a call.
            enable_gqa: As in a call.
        """
        # A step has one query and many keys, whatever the method takes in a call.
        self._info, self._compress, self._leaf = replace(info, cross=True), compress, leaf
        self._signed, self._scale, self._enable_gqa = signed, scale, enable_gqa
        self._keys, self._values = Buffer(key[:, :, :0].detach()), Buffer(value[:, :, :0].detach())
        self._forest: list[tuple[int, Summary]] = []  # (level, summary), levels falling
        self.append(key, value)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        while key.shape[2]:
            if self._keys.tensor.shape[2] == self._leaf:
                self._flush()
            room = self._leaf - self._keys.tensor.shape[2]
            self._keys.append(key[:, :, :room])
            self._values.append(value[:, :, :room])
            key, value = key[:, :, room:], value[:, :, room:]

    def _flush(self) -> None:
        """The full leaf becomes a summary."""
        k, v = self._keys.tensor, self._values.tensor
        x = prepare(self._info, k, k, v, None, False, self._scale, False)
        level, summary = 0, self._compress(Summary.of(x.k, x.v, signed=self._signed))
        while self._forest and self._forest[-1][0] == level:
            summary = self._compress(Summary.cat([self._forest.pop()[1], summary], 2))
            level += 1
        self._forest.append((level, summary))
        self._keys, self._values = Buffer(k[:, :, :0].clone()), Buffer(v[:, :, :0].clone())

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        x = prepare(
            self._info,
            query,
            self._keys.tensor,
            self._values.tensor,
            None,
            False,
            self._scale,
            self._enable_gqa,
        )
        if x.empty:
            return x.nothing()
        part = softmax_partial(x.q, x.k, x.v, scale=x.scale)
        for _, summary in self._forest:
            part = part.merge(summary.attend(x.q, x.scale))
        return x.restore(part.out())

    @property
    def nbytes(self) -> int:
        kept = sum(summary.nbytes for _, summary in self._forest)
        return self._keys.nbytes + self._values.nbytes + kept


def streaming_bytes(shape: Shape, size: int, leaf: int = LEAF, *, signed: bool = False) -> int:
    """Bytes of a `StreamingState` whose summaries have up to `size` keys, for `Method.cost`."""
    full = max(shape.keys - 1, 0) // leaf
    width = shape.head_dim + shape.value_dim
    kept = (shape.keys - full * leaf) * width * shape.itemsize
    sizes = [min(leaf << i, size) for i in range(full.bit_length()) if full >> i & 1]
    kept += sum(sizes) * (width + 2 + PROBES * signed) * max(shape.itemsize, 4)
    return shape.batch * shape.kv_heads * kept


def compressed(length: int, size: int, leaf: int = LEAF) -> list[tuple[int, int]]:
    """(Keys given, how often) of the compressions of a causal call, for cost counts."""
    count = max(length - 1, 0) // leaf
    calls, keys = [], leaf
    while count:
        calls.append((keys, count))
        keys, count = 2 * min(keys, size), count // 2
    return calls
