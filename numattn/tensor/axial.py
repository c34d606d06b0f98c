"""Axial attention: a token of a grid attends along the lines through it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.inputs import fold, one_of, positive, unfold
from numattn.core.partial import Partial
from numattn.engines.softmax import computed_pairs, key_bias, softmax_partial
from numattn.tensor.kronecker import Masks, Modes, check_mode, existing_tokens, prepare_modes


def axial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    axes: Sequence[int] | None = None,
    form: Literal["criss-cross", "sequential"] = "criss-cross",
    mode_masks: Masks | None = None,
    causal_axis: int | Literal["raster"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention on a tensor of tokens along one axis at a time.

    The line of token i along axis m is the set of the tokens that differ from it in coordinate m
    only, with i itself. There are two forms.

    ``"criss-cross"`` is one softmax over the union of the lines through i, where i counts once, as
    in CCNet:

    .. math:: o_i = \sum_{j \in L(i)} \frac{e^{s_{ij}}}{\sum_{l \in L(i)} e^{s_{il}}}\, v_j,
              \qquad L(i) = \bigcup_m L_m(i), \quad s_{ij} = \mathrm{scale}\; q_i \cdot k_j .

    These are the weights of full attention on :math:`1 + \sum_m (n_m - 1)` keys, and nothing on
    the others: a sparse approximation of it.

    ``"sequential"`` attends along one axis after the other. The values of each are the outputs of
    the one before; queries and keys stay. With the softmax :math:`P_m` along axis m alone,

    .. math:: O = P_{m_k} \cdots P_{m_2} P_{m_1} V ,

    a product of stochastic matrices, with which a token reaches all that share its coordinates
    outside of ``axes``.

    Args:
        query: (B, H, n_1, ..., n_k, D), k at least 1.
        key: (B, Hk, n_1, ..., n_k, D).
        value: (B, Hk, n_1, ..., n_k, E).
        axes: Which axes, counted from 0, each once; None is all, in order. The order matters in
            the form ``"sequential"`` only: the first is applied to the values.
        form: ``"criss-cross"`` or ``"sequential"``.
        mode_masks: For each mode, whether in ``axes`` or not, which of its positions exist: bool
            (B or 1, n_m), or None for all. A token exists where all of its positions do; the
            others are not attended to.
        causal_axis: An axis, along which position t attends to positions <= t only, whichever
            ``axes`` are used. ``"raster"``: token i attends to tokens that come no later in the
            order of rows, one after the other. On a line that is the order of the line, so
            all axes are causal; sequential attention then reaches tokens that come no later in any
            axis. None for none.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, n_1, ..., n_k, E), in the query's type; zeros for a token that may attend to nothing.

    Cost: 2 H N (D + E) sum n_m operations, where full attention needs 2 H N^2 (D + E);
    `axial_cost` says it to the last one. Memory is below N max n_m numbers a head.

    Exact when: one axis alone has more than one position; that is softmax attention. Criss-cross:
    all mass of the full softmax is on the lines; a row's distance from it in total variation is
    the mass elsewhere. Sequential: logits are a sum of terms of one axis each.

    Limits: a token off the lines is not seen at all in the criss-cross form, and in the
    sequential one only through the token at the corner, by what that one looks for. The sequential
    form is no approximation of softmax: queries of the second axis do not know what the first has
    gathered. In models both are layers among others, stacked.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An option is none of the above, or shapes do not fit.

    References:
        J. Ho, N. Kalchbrenner, D. Weissenborn, T. Salimans, "Axial Attention in Multidimensional
        Transformers", 2019, https://arxiv.org/abs/1912.12180.
        Z. Huang et al., "CCNet: Criss-Cross Attention for Semantic Segmentation", 2019,
        https://arxiv.org/abs/1811.11721.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 12, 9, 8) for _ in range(3))  # 12 x 9 tokens
        >>> axial_attention(q, k, v).shape
        torch.Size([1, 2, 12, 9, 8])
    """
    name = "axial_attention"
    one_of(name, "form", form, ("criss-cross", "sequential"))
    x = prepare_modes(name, query, key, value, mode_masks, scale, enable_gqa)
    chosen = _check_axes(name, axes, causal_axis, len(x.sizes))
    if x.empty:
        return x.nothing()
    exists = existing_tokens(x.masks)
    lines = _needed(chosen, x.sizes)
    if form == "sequential":
        out = x.v
        for axis in lines:
            part = _along(x, out, axis, exists, causal=causal_axis in (axis, "raster"))
            out = _back(part, x, axis).out()
        return out.to(x.dtype)
    union: Partial | None = None
    for axis in lines:
        causal = causal_axis in (axis, "raster")
        part = _along(x, x.v, axis, exists, causal=causal, itself=union is None)
        union = _back(part, x, axis) if union is None else union.merge(_back(part, x, axis))
    assert union is not None  # there is an axis
    return union.out().to(x.dtype)


def axial_cost(
    modes: Sequence[int],
    *,
    heads: int,
    head_dim: int,
    value_dim: int | None = None,
    kv_heads: int | None = None,
    batch: int = 1,
    axes: Sequence[int] | None = None,
    form: Literal["criss-cross", "sequential"] = "criss-cross",
    causal_axis: int | Literal["raster"] | None = None,
    itemsize: int = 4,
) -> Cost:
    """What a call of `axial_attention` costs.

    Args:
        modes: n_1, ..., n_k.
        heads: H.
        head_dim: D.
        value_dim: E; None is D.
        kv_heads: Hk; None is H.
        batch: B.
        axes: As there.
        form: Both forms need the same operations.
        causal_axis: As there.
        itemsize: Bytes per element of the inputs.

    Returns:
        Its ``units`` are the keys that a query can reach.

    Raises:
        ValueError: A size is not positive, or an option is none of the above.

    Example:
        >>> axial_cost([37, 37], heads=1, head_dim=64).units
        73
    """
    name = "axial_cost"
    one_of(name, "form", form, ("criss-cross", "sequential"))
    value_dim = head_dim if value_dim is None else value_dim
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim, "kv_heads": kv_heads}
    for what, size in {**sizes, "batch": batch, "itemsize": itemsize}.items():
        positive(name, what, size)
    for n in modes:
        positive(name, "modes", n)
    lines = _needed(_check_axes(name, axes, causal_axis, len(modes)), tuple(modes))
    tokens = math.prod(modes)
    pairs = sum(
        tokens // modes[m] * computed_pairs(modes[m], causal_axis in (m, "raster"), fused=False)
        for m in lines
    )
    shape = Shape(batch, heads, kv_heads, tokens, tokens, head_dim, value_dim, itemsize=itemsize)
    lengths = [modes[m] for m in lines]
    units = math.prod(lengths) if form == "sequential" else 1 + sum(n - 1 for n in lengths)
    return Cost(2 * batch * heads * pairs * (head_dim + value_dim), shape.io, None, units)


def _along(
    x: Modes,
    v: Tensor,
    axis: int,
    exists: Tensor | None,
    *,
    causal: bool,
    itself: bool = True,
) -> Partial:
    """Attention of every token to its line, with or without itself; lines stand in the batch."""
    group, n = x.q.shape[1] // v.shape[1], x.sizes[axis]
    k = x.k.repeat_interleave(v.shape[1] // x.k.shape[1], 1)
    others = None if itself else ~torch.eye(n, dtype=torch.bool, device=v.device)
    if others is not None:
        others = others.repeat_interleave(group, 0)[None, None]  # (1, 1, n * group, n)
    padding = None
    if exists is not None:
        whole = exists.expand(len(exists), *x.sizes)[:, None, ..., None]
        padding = _lines(whole.expand(len(v), *whole.shape[1:]), axis)[..., 0]  # (lines, 1, n)
    return softmax_partial(
        fold(_lines(x.q, axis), group),
        _lines(k, axis),
        _lines(v, axis),
        scale=x.scale,
        bias=key_bias(padding, v),
        mask=others,
        is_causal=causal,
        group=group,
    )


def _lines(x: Tensor, axis: int) -> Tensor:
    """(B, H, n_1, ..., n_k, D) -> (B * lines, H, n_axis, D)."""
    x = x.movedim(1, -2).movedim(1 + axis, -2)  # (B, ..., H, n_axis, D)
    return x.flatten(0, -4)


def _back(part: Partial, x: Modes, axis: int) -> Partial:
    """The partial of `_along`, its rows in the places of their tokens, (B, H, n_1, ..., n_k)."""
    rest = [n for m, n in enumerate(x.sizes) if m != axis]
    group = x.q.shape[1] // part.den.shape[1]

    def place(rows: Tensor) -> Tensor:
        rows = unfold(rows, group).unflatten(0, (len(x.q), *rest))  # (B, ..., H, n_axis, E)
        return rows.movedim(-2, 1 + axis).movedim(-2, 1)

    den, shift = (place(t[..., None])[..., 0] for t in (part.den, part.shift))
    return Partial(place(part.num), den, shift)


def _needed(axes: Sequence[int], sizes: tuple[int, ...]) -> list[int]:
    """The axes with more than one position, for the line along another is the token itself."""
    return [m for m in axes if sizes[m] > 1] or list(axes[:1])


def _check_axes(
    name: str, axes: Sequence[int] | None, causal_axis: int | str | None, count: int
) -> list[int]:
    chosen = list(range(count)) if axes is None else list(axes)
    for axis in chosen:
        check_mode(name, "axes", axis, count)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"{name}: axes must be different axes, at least one; got {chosen}.")
    if causal_axis is not None and causal_axis != "raster":
        check_mode(name, "causal_axis", causal_axis, count)
    return chosen
