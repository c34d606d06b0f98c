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
from numattn.core.partial import Partial
from numattn.core.state import Buffer, State
from numattn.engines.softmax import key_bias, softmax_partial
from numattn.engines.tiles import spans

Block = Callable[[Tensor, Inputs], Partial]

LEAF = 512

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


@dataclass(frozen=True)
class Summary:
    r"""Keys that stand for many: q attends to them as :math:`\sum_s e^{q k_s + b_s} (v_s, w_s)`.

    Attributes:
        k: (B, H, r, D).
        v: (B, H, r, E), values times their weights.
        weight: (B, H, r).
        bias: (B, H, r), added to the logits: the scale of `v` and `weight`; -inf where there is no
            key.
        signed: Whether weights may be negative.
    """

    k: Tensor
    v: Tensor
    weight: Tensor
    bias: Tensor
    signed: bool = False

    @staticmethod
    def of(k: Tensor, v: Tensor, padding: Tensor | None = None) -> Summary:
        """Every key (B, H, N, D) with its value (B, H, N, E) for itself; padding as in `Inputs`."""
        bias = torch.zeros_like(k[..., 0])
        if padding is not None:
            bias = bias.masked_fill(~padding, -torch.inf)
        return Summary(k, v, torch.ones_like(bias), bias)

    def attend(self, q: Tensor, scale: float) -> Partial:
        """From rows (B, H, n, D), folded or not."""
        width = self.v.shape[3]
        weights = [self.weight, self.weight.abs()] if self.signed else [self.weight]
        columns = torch.cat([self.v, torch.stack(weights, -1)], -1)
        part = softmax_partial(q, self.k, columns, scale=scale, bias=self.bias)
        mass = part.num[..., width + 1] if self.signed else None
        return Partial(part.num[..., :width], part.num[..., width], part.shift, mass)

    @staticmethod
    def cat(parts: list[Summary], dim: int) -> Summary:
        """The keys of all along dimension 2, or entries of a batch along dimension 0."""
        k, v, weight, bias = (
            torch.cat([getattr(part, name) for part in parts], dim)
            for name in ("k", "v", "weight", "bias")
        )
        return Summary(k, v, weight, bias, parts[0].signed)

    def entries(self, index: slice) -> Summary:
        """Some entries of the batch."""
        k, v, weight, bias = (t[index] for t in (self.k, self.v, self.weight, self.bias))
        return Summary(k, v, weight, bias, self.signed)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.numel() * t.element_size() for t in (self.k, self.v, self.weight, self.bias))


Compress = Callable[[Summary], Summary]


def lift_summaries(x: Inputs, compress: Compress, *, leaf: int = LEAF) -> Tensor:
    """Causal attention from a way to replace keys by fewer keys.

    The summary of ``leaf`` tokens is made from them, that of two neighbours from both of theirs
    (merge and reduce): a row attends exactly within its leaf, and to one summary for each binary
    digit 1 of the number of leaves before it.

    Args:
        x: The call.
        compress: Summary -> Summary of bounded size, that depends on nothing else: every entry of
            the batch by itself, for blocks stand in the batch. All keys that it is given exist.
        leaf: Tokens that are attended to exactly.

    Returns:
        (B, Hk, N * group, E); exact where N <= leaf.

    Cost: the exact leaves; r (D + E) products for every row and level, r being the size of a
    summary; compression of every leaf, and of as many pairs of summaries.
    """
    x, place = x.compact()
    nodes = _tree(x, compress, leaf)

    def past(q: Tensor, start: int, stop: int) -> Partial:
        level = ((stop - start) // leaf).bit_length() - 1
        return nodes[level][start // (stop - start)].attend(q, x.scale)

    return x.move_back(_lift(x, past, 0, x.k.shape[2], leaf).out(), place)


def _tree(x: Inputs, compress: Compress, leaf: int) -> list[list[Summary]]:
    """Summaries of whole blocks of leaf * 2^i tokens that have tokens after them, for each i."""
    count = (x.k.shape[2] - 1) // leaf
    batch, heads = x.k.shape[:2]
    leaves = [
        Summary.of(x.k[:, :, i * leaf : (i + 1) * leaf], x.v[:, :, i * leaf : (i + 1) * leaf])
        for i in range(count)
    ]
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
            scale: As in a call.
            enable_gqa: As in a call.
        """
        # A step has one query and many keys, whatever the method takes in a call.
        self._info, self._compress, self._leaf = replace(info, cross=True), compress, leaf
        self._scale, self._enable_gqa = scale, enable_gqa
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
        level, summary = 0, self._compress(Summary.of(x.k, x.v))
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


def streaming_bytes(shape: Shape, size: int, leaf: int = LEAF) -> int:
    """Bytes of a `StreamingState` whose summaries have up to `size` keys, for `Method.cost`."""
    full = max(shape.keys - 1, 0) // leaf
    width = shape.head_dim + shape.value_dim
    kept = (shape.keys - full * leaf) * width * shape.itemsize
    sizes = [min(leaf << i, size) for i in range(full.bit_length()) if full >> i & 1]
    kept += sum(sizes) * (width + 2) * max(shape.itemsize, 4)
    return shape.batch * shape.kv_heads * kept


def compressed(length: int, size: int, leaf: int = LEAF) -> list[tuple[int, int]]:
    """(Keys given, how often) of the compressions of a causal call, for cost counts."""
    count = max(length - 1, 0) // leaf
    calls, keys = [], leaf
    while count:
        calls.append((keys, count))
        keys, count = 2 * min(keys, size), count // 2
    return calls
