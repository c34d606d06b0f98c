r"""Attention to what is kept of tokens in place of their keys and values, which are never formed.

`latent_attention` attends to a latent that is key and value at once, the absorbed decoding of
latent attention; `factored_attention` to keys and values that are sums of products of factors.

What a token leaves in the cache is one vector c of a group of heads, and a rotated vector r that
all heads share. The first entries of c are the key, all of it is the value:

.. math:: s_{ij} = \mathrm{scale}\; (q_i \cdot c_j + q^R_i \cdot r_j), \qquad
          o_i = \sum_j e^{s_{ij} - \mathrm{lse}_i}\, c_j .

Projections of heads that the model has between c and its keys and values stand on the side of the
query and of the output, so nothing is expanded to the width of the heads.

Of factors (see `Factors`) a query and a key of head h have the product

.. math:: s_{ij} = \mathrm{scale} \sum_{r, s} a^Q_{irh}\, a^K_{jsh}\; b^Q_{ir} \cdot b^K_{js},

whose inner products are the same for all heads. It is contracted pair by pair, in the order of the
fewest operations for the shape of a tile, which opt_einsum finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from numattn.core.linalg import exp_, finite
from numattn.core.masks import visible
from numattn.core.partial import Partial
from numattn.engines.softmax import ROWS
from numattn.engines.tiles import recompute, spans, tile_elements


def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = False,
    first: int = 0,
    group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over a shared latent, with its log normaliser.

    Args:
        q: (B, G, n * group, C'), float32 or float64, against the first C' entries of the latent.
        q_rope: (B, G, n * group, R), queries against the shared rotated keys.
        latent: c, (B, G, M, C), C >= C'; of any type and strides, brought to q's tile by tile.
        rope: r, (B, G or 1, M, R).
        scale: Factor of the logits.
        bias: Per-key bias (B or 1, G or 1, M); -inf removes a key.
        is_causal: Row r attends to keys j <= first + r // group.
        first: Position of row 0 counted from key 0, when causal.
        group: Rows per position, the heads that share a latent.

    Returns:
        out (B, G, n * group, C) and lse (B, G, n * group). A row that may attend to nothing gives
        zeros and -inf.

    Cost: 2 n group M (C' + R + C) operations for each of the G groups. The cache is read once for
    every 256 positions of queries, in tiles that are merged.
    """
    batch, groups, rows, _ = q.shape
    tall = min(max(rows, 1), ROWS * group)
    wide = max(tile_elements(q.device) // (max(batch * groups, 1) * tall), 64)
    parts = []
    for r0, r1 in spans(rows, tall):
        last = min(latent.shape[2], first + (r1 - 1) // group + 1) if is_causal else latent.shape[2]
        start = first + r0 // group if is_causal else None
        strip = partial(_strip, scale, start, group, wide)
        keys = (latent[:, :, :last], rope[:, :, :last], None if bias is None else bias[..., :last])
        parts.append(Partial(*recompute(strip, q[:, :, r0:r1], q_rope[:, :, r0:r1], *keys)))
    return Partial.cat(parts, 2).finalize()


def _strip(
    scale: float,
    start: int | None,
    group: int,
    wide: int,
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's rows over all of the cache, `wide` tokens at a time."""
    part = Partial.zeros(q.shape[:3], latent.shape[3], q)
    for c0, c1 in spans(latent.shape[2], wide):
        c, r = (t[:, :, c0:c1].to(q.dtype) for t in (latent, rope))
        logits = (q * scale) @ c[..., : q.shape[3]].mT + (q_rope * scale) @ r.mT
        if bias is not None:
            logits = logits + bias[..., None, c0:c1]
        if start is not None and start - c0 < c1 - c0 - 1:
            seen = visible(q.shape[2], c1 - c0, start - c0, group, q.device)
            logits = logits.masked_fill(~seen, -torch.inf)
        part = part.merge(Partial.from_logits(logits, c))
    return part.num, part.den, part.shift


class Factors(NamedTuple):
    r"""A vector for every head of every token, :math:`x_h = \sum_r a_{rh}\, b_r`.

    Attributes:
        a: Factors of the heads, (B, R, N, H), or (R, H) where all tokens share them. None where
            x_h is b_h itself.
        b: Factors of the features, (B, R, N, D), or (R, D) where all tokens share them, which
            then have factors of the heads of their own.
    """

    a: Tensor | None
    b: Tensor

    @property
    def num_heads(self) -> int:
        """H."""
        return self.b.shape[1] if self.a is None else self.a.shape[-1]

    @property
    def batch(self) -> int:
        """B."""
        return max(len(t) for t in self if t is not None and t.dim() == 4)

    @property
    def length(self) -> int:
        """N."""
        return max(t.shape[2] for t in self if t is not None and t.dim() == 4)

    @property
    def rank(self) -> int:
        """R."""
        return self.b.shape[-3 if self.b.dim() == 4 else 0]

    def expand(self) -> Tensor:
        """The vectors, (B, H, N, D)."""
        return contract("bhnd", *self.named("rnd"))

    def named(self, letters: str) -> list[tuple[Tensor, str]]:
        """Its tensors with the letters of their dimensions; `letters` are those of R, N and D."""
        if self.a is None:
            return [(self.b, "bh" + letters[1:])]
        heads = letters[:2] + "h"
        return [
            (t, name[::2] if t.dim() == 2 else "b" + name)
            for t, name in ((self.a, heads), (self.b, letters))
        ]

    def to(self, dtype: torch.dtype) -> Factors:
        """In a type of computation."""
        return Factors(None if self.a is None else self.a.to(dtype), self.b.to(dtype))

    def cut(self, first: int, last: int) -> Factors:
        """Of tokens [first, last)."""

        def part(t: Tensor) -> Tensor:
            return t if t.dim() == 2 else t[:, :, first:last]

        return Factors(None if self.a is None else part(self.a), part(self.b))


def factored_attention(
    q: Factors,
    k: Factors,
    v: Factors,
    *,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = False,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Softmax attention among factored queries, keys and values, with its log normaliser.

    Args:
        q: Of Nq queries, float32 or float64, H heads of D features.
        k: Of M keys, H heads of D features; of any type, brought to q's tile by tile.
        v: Of M values, H heads of E features.
        scale: Factor of the logits.
        bias: Per-key bias (B or 1, 1, M); -inf removes a key.
        is_causal: Query i attends to keys j <= first + i.
        first: Position of query 0 counted from key 0, when causal.

    Returns:
        out (B, H, Nq, E) and lse (B, H, Nq). A row that may attend to nothing gives zeros and
        -inf.

    Cost: `factored_flops`. What is kept is read once for every 256 queries, in tiles that are
    merged.
    """
    parts = []
    length = k.length
    for r0, r1 in spans(q.length, ROWS):
        last = min(length, first + r1) if is_causal else length
        start = first + r0 if is_causal else None
        strip = partial(_factored_strip, scale, start)
        rows, keys, values = q.cut(r0, r1), k.cut(0, last), v.cut(0, last)
        own = None if bias is None else bias[..., :last]
        parts.append(Partial(*recompute(strip, *rows, *keys, *values, own)))
    return Partial.cat(parts, 2).finalize()


def _factored_strip(
    scale: float,
    start: int | None,
    a_q: Tensor | None,
    b_q: Tensor,
    a_k: Tensor | None,
    b_k: Tensor,
    a_v: Tensor | None,
    b_v: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's rows over all that is kept, some tokens at a time."""
    q, k, v = Factors(a_q, b_q * scale), Factors(a_k, b_k), Factors(a_v, b_v)
    shape = (q.batch, q.num_heads, q.length)
    part = Partial.zeros(shape, b_v.shape[-1], b_q)
    for c0, c1 in spans(k.length, _wide(q, k, v)):
        keys, values = (f.cut(c0, c1).to(b_q.dtype) for f in (k, v))
        logits = contract("bnmh", *q.named("rnd"), *keys.named("smd"))  # heads last, as in factors
        if bias is not None:
            logits = logits + bias[..., c0:c1, None]
        if start is not None and start - c0 < c1 - c0 - 1:
            seen = visible(q.length, c1 - c0, start - c0, 1, logits.device)
            logits = logits.masked_fill(~seen[..., None], -torch.inf)
        shift = logits.detach().amax(2)
        weight = exp_(logits - finite(shift)[:, :, None])
        num = contract("bhne", (weight, "bnmh"), *values.named("tme"))
        part = part.merge(Partial(num, weight.sum(2).mT, shift.mT))
    return part.num, part.den, part.shift


def _wide(q: Factors, k: Factors, v: Factors) -> int:
    """Tokens of a tile, whose logits for every rank are the largest tensor; tiles are alike."""
    elements = q.batch * q.num_heads * q.length * max(k.rank, v.rank)
    most = max(tile_elements(q.b.device) // max(2 * elements, 1), 64)
    tiles = max(-(-k.length // most), 1)
    return max(-(-k.length // tiles), 1)


_LAYOUT = "bnmrsthde"  # sequences, tokens, ranks, heads, features
_Step = tuple[tuple[int, ...], str]  # which operands, and their contraction


def contract(output: str, *operands: tuple[Tensor, str]) -> Tensor:
    """Sum of products of tensors with named dimensions, pair by pair in the cheapest order.

    Args:
        output: Letters of the result, of `_LAYOUT` like all others.
        operands: Tensors with the letters of their dimensions.
    """
    tensors = [tensor for tensor, _ in operands]
    for picked, pair in _steps(output, operands):
        some = [tensors.pop(i) for i in picked]
        tensors.append(_pair(pair, *some) if len(some) == 2 else torch.einsum(pair, *some))
    return tensors[0]


def _steps(output: str, operands: Sequence[tuple[Tensor, str]]) -> tuple[_Step, ...]:
    """The `_order` for tokens rounded up to powers of two: decoding does not search every step."""
    equation = ",".join(letters for _, letters in operands) + "->" + output

    def rounded(tensor: Tensor, letters: str) -> tuple[int, ...]:
        pairs = zip(tensor.shape, letters, strict=True)
        return tuple(1 << (n - 1).bit_length() if c in "nm" else n for n, c in pairs)

    return _order(equation, *(rounded(*operand) for operand in operands))


@lru_cache(maxsize=1024)
def _order(equation: str, *shapes: tuple[int, ...]) -> tuple[_Step, ...]:
    """Which operands to contract, and how, step after step.

    What is left of a step is stored token by token, so that tokens and ranks merge without a copy.
    """
    from opt_einsum import contract_path

    path, _ = contract_path(equation, *shapes, shapes=True, optimize="optimal")
    given, output = equation.split("->")
    letters, steps = given.split(","), []
    for picked in (tuple(sorted(step, reverse=True)) for step in path):
        some = [letters.pop(i) for i in picked]
        wanted = set("".join(some)) & set(output + "".join(letters))
        left = "".join(sorted(wanted, key=_LAYOUT.index)) if letters else output
        steps.append((picked, f"{','.join(some)}->{left}"))
        letters.append(left)
    return tuple(steps)


def _pair(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """Two tensors contracted: by a matrix product, or where one side is a vector, elementwise.

    Many products of a small matrix and a vector would not run at the speed of a product.
    """
    if _is_product(equation):
        return torch.einsum(equation, x, y)
    left, right, output = equation.replace("->", ",").split(",")
    summed = sorted(set(left) & set(right) - set(output))
    order = [*output, *summed]
    x, y = (_aligned(t, letters, order) for t, letters in ((x, left), (y, right)))
    if not summed:
        return x * y
    xs, ys = (t.flatten(len(output)).unbind(-1) for t in (x, y))
    total = xs[0] * ys[0]
    for some in zip(xs[1:], ys[1:], strict=True):
        total = torch.addcmul(total, *some)
    return total.contiguous()


def _is_product(equation: str) -> bool:
    """Whether a contraction is a product of matrices: both sides have rows of their own."""
    left, right, output = (set(part) for part in equation.replace("->", ",").split(","))
    return bool(left - right and right - left and left & right - output)


def _aligned(x: Tensor, letters: str, order: list[str]) -> Tensor:
    """Dimensions brought into an order, of size 1 where x has them not."""
    x = x.permute([letters.index(c) for c in order if c in letters])
    return x[tuple(slice(None) if c in letters else None for c in order)]


def factored_flops(
    q: Factors, k: Factors, v: Factors, *, is_causal: bool = False, first: int = 0
) -> int:
    """Operations of the matrix products of `factored_attention`, from shapes alone.

    Args:
        q: As in `factored_attention`, like all others; tensors may be on the device "meta".
        k: Of keys.
        v: Of values.
        is_causal: Whether it is causal.
        first: Position of query 0 counted from key 0.
    """
    total = 0
    for r0, r1 in spans(q.length, ROWS):
        rows, last = q.cut(r0, r1), min(k.length, first + r1) if is_causal else k.length
        for c0, c1 in spans(last, _wide(rows, k, v)):
            keys, values = k.cut(c0, c1), v.cut(c0, c1)
            weight = torch.empty((q.batch, r1 - r0, c1 - c0, q.num_heads), device="meta")
            total += _flops("bnmh", *rows.named("rnd"), *keys.named("smd"))
            total += _flops("bhne", (weight, "bnmh"), *values.named("tme"))
    return total


def _flops(output: str, *operands: tuple[Tensor, str]) -> int:
    """Operations of the matrix products of `contract`."""
    sizes = {c: n for t, letters in operands for c, n in zip(letters, t.shape, strict=True)}
    steps = [pair for _, pair in _steps(output, operands)]
    letters = [set(pair) - set(",->") for pair in steps if _is_product(pair)]
    return sum(2 * math.prod(sizes[c] for c in found) for found in letters)
