"""Kronecker attention: one small attention matrix for each mode of a tensor of tokens (HOT).

The best that any sum of Kronecker products can do, `nearest_kronecker`, is the oracle of such
methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.inputs import compute_dtype, fold, one_of, positive, unfold
from numattn.core.kronecker import KroneckerSum as KroneckerSum
from numattn.core.kronecker import nearest_kronecker as nearest_kronecker
from numattn.core.linalg import finite
from numattn.engines.softmax import computed_pairs, key_bias, softmax_attention

Masks = Sequence[Tensor | None]


@dataclass(frozen=True)
class Modes:
    """Checked arguments on a tensor of tokens, in the precision that methods compute in.

    Attributes:
        q: (B, H, n_1, ..., n_k, D).
        k: (B, Hk, n_1, ..., n_k, D).
        v: (B, Hk, n_1, ..., n_k, E); zeros where a token does not exist.
        scale: Factor of the logits.
        masks: For each mode, which of its positions exist: bool (B or 1, n_m), or None for all.
        dtype: Type of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    masks: tuple[Tensor | None, ...]
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """n_1, ..., n_k."""
        return tuple(self.q.shape[2:-1])

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in self.q.shape or 0 in self.k.shape or 0 in self.v.shape

    def nothing(self) -> Tensor:
        """The output when there is nothing to compute: zeros that keep the graph connected."""
        zero = self.q[..., :0].sum() + self.k[..., :0].sum() + self.v[..., :0].sum()
        return zero.to(self.dtype).expand(*self.q.shape[:-1], self.v.shape[-1]).clone()


def prepare_modes(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mode_masks: Masks | None,
    scale: float | None,
    enable_gqa: bool,
) -> Modes:
    """Check the arguments of the function called `name`.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Shapes, types or devices do not fit together.
    """
    _check(name, query, key, value, enable_gqa)
    if scale is not None and (isinstance(scale, Tensor) or not isinstance(scale, (int, float))):
        raise TypeError(f"{name}: scale must be a number or None; got {type(scale).__name__}.")
    masks = _check_masks(name, mode_masks, query)
    dtype = compute_dtype(query.dtype)
    v = value.to(dtype)
    exists = existing_tokens(masks)
    if exists is not None:
        v = v.masked_fill(~exists[:, None, ..., None], 0.0)
    return Modes(
        q=query.to(dtype),
        k=key.to(dtype),
        v=v,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        masks=masks,
        dtype=query.dtype,
    )


def existing_tokens(masks: Masks, but: int | None = None) -> Tensor | None:
    """Which tokens exist: in every mode, or in every mode but one.

    Returns:
        bool, broadcastable to (B or 1, n_1, ..., n_k); None when all exist.
    """
    exists = None
    for mode, mask in enumerate(masks):
        if mask is None or mode == but:
            continue
        shape = [len(mask)] + [1] * len(masks)
        shape[1 + mode] = mask.shape[1]
        own = mask.reshape(shape)
        exists = own if exists is None else exists & own
    return exists


def kronecker_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    form: Literal["product", "sum"] = "product",
    pool: Literal["mean", "sum"] = "mean",
    normalize: bool = False,
    mode_masks: Masks | None = None,
    causal_mode: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention on a tensor of tokens, with one attention matrix for each mode.

    Tokens stand on a grid of k modes: rows and columns of an image, time and sensors. Queries and
    keys of a mode are those of the tokens, pooled over all other modes, and attend to each other:

    .. math:: S_m = \mathrm{softmax}(\mathrm{scale}\; q^{(m)} {k^{(m)}}^T)
              \in \mathbb{R}^{n_m \times n_m}.

    The weights of all tokens, a matrix of N = n_1 ... n_k rows that is never formed, are

    .. math:: P = S_1 \otimes \dots \otimes S_k \qquad \text{or} \qquad
              P = \frac1k \sum_m I \otimes \dots \otimes S_m \otimes \dots \otimes I

    in the form ``"product"``, where every token attends to every other, or ``"sum"``, where it
    attends along its own lines. They are applied one mode after the other. The paper's sum has no
    factor 1/k, so its rows sum to k.

    With ``causal_mode``, the mode c of time, :math:`S_c` is lower triangular. That alone is not
    causal: what is pooled for another mode would see the whole of time. So the queries and keys of
    another mode are pooled over the times up to t, for every t, and row t of the weights has
    matrices of its own,

    .. math:: P_{t\cdot} = (S_c)_{t\cdot} \otimes \bigotimes_{m \ne c} S_m^{(t)}

    (c written first). It is the last row of the call without ``causal_mode`` on the times up to t.

    Args:
        query: (B, H, n_1, ..., n_k, D), k at least 1.
        key: (B, Hk, n_1, ..., n_k, D).
        value: (B, Hk, n_1, ..., n_k, E).
        form: ``"product"`` or ``"sum"``.
        pool: ``"mean"``, or ``"sum"`` as in the paper, which grows with the other modes and needs
            ``normalize``.
        normalize: Normalise pooled queries and keys over their D entries to mean 0 and variance 1,
            as the paper does (layer normalisation without factors; 1e-5 is added to the variance,
            which may be 0: of equal entries, or where nothing is pooled).
        mode_masks: For each mode, which of its positions exist: bool (B or 1, n_m), or None for
            all. A token exists where its positions do; the others are neither pooled nor attended
            to.
        causal_mode: The mode, counted from 0, along which position t attends to positions <= t
            only, and sees nothing of later ones. None for none.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, n_1, ..., n_k, E), in the query's type; zeros for a token that may attend to nothing.

    Cost: 2 H (D sum n_m^2 + E N sum n_m) operations; `kronecker_cost` says it to the last one. With
    ``causal_mode`` the matrices of other modes are made n_c times. Memory is that of the inputs
    and of tiles.

    Exact when: k = 1 without ``normalize``, which is softmax attention. In more modes, the product
    with means is softmax attention where logits are a sum of terms of one mode each, as of tokens
    :math:`q_{ij} = [a_i; b_j]`, :math:`k_{ij} = [c_i; d_j]`: what other modes add is the same for
    all keys of a row. A mode of size 1 changes nothing in the product.

    Limits: pooling takes means over rows and columns first and exponentials afterwards, so a query
    cannot look for one place by what is there, only by its row and its column apart. Heads may be
    added up to a sum of Kronecker products, which can be any matrix; one head is one product. In
    the sum a mode of size 1 is not left out: it attends to the token itself. No sum of R Kronecker
    products is nearer to given weights than `nearest_kronecker`.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An option is none of the above, or shapes do not fit.

    References:
        S. Omranpour, G. Rabusseau, R. Rabbany, "Higher Order Transformers: Efficient Attention
        Mechanism for Tensor Structured Data", 2024, https://arxiv.org/abs/2412.02919.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 12, 9, 8) for _ in range(3))  # 12 x 9 tokens
        >>> kronecker_attention(q, k, v).shape
        torch.Size([1, 2, 12, 9, 8])
    """
    name = "kronecker_attention"
    one_of(name, "form", form, ("product", "sum"))
    x = prepare_modes(name, query, key, value, mode_masks, scale, enable_gqa)
    _check_options(name, pool, normalize, causal_mode, len(x.sizes))
    if x.empty:
        return x.nothing()
    modes = list(range(len(x.sizes)))
    if causal_mode is not None:  # first, for row t of another mode is for what row t has gathered
        modes.insert(0, modes.pop(causal_mode))
    pooled = {m: _pooled_pair(x, m, pool, normalize, causal_mode) for m in modes}
    if form == "product":
        out = x.v
        for mode in modes:
            out = _along(x, *pooled[mode], out, mode, causal_mode)
    else:
        terms = [_along(x, *pooled[mode], x.v, mode, causal_mode) for mode in modes]
        out = torch.stack(terms).mean(0)
    return out.to(x.dtype)


def kronecker_weights(
    query: Tensor,
    key: Tensor,
    *,
    pool: Literal["mean", "sum"] = "mean",
    normalize: bool = False,
    mode_masks: Masks | None = None,
    causal_mode: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> list[Tensor]:
    """The attention matrix of each mode, as `kronecker_attention` uses them.

    Args:
        query: (B, H, n_1, ..., n_k, D).
        key: (B, Hk, n_1, ..., n_k, D).
        pool: As there, like all that follow.
        normalize: Of pooled queries and keys.
        mode_masks: Which positions of each mode exist.
        causal_mode: The mode of time.
        scale: Factor of the logits.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        S_1, ..., S_k, float32 at least, S_m of shape (B, H, n_m, n_m). With ``causal_mode``, those
        of the other modes are one for each time: (B, H, n_c, n_m, n_m).

    Cost: 2 H D sum n_m^2 operations and as many numbers as the matrices have; the other modes'
    times n_c with ``causal_mode``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An option is none of those, or shapes do not fit.

    Example:
        >>> q, k = (torch.randn(1, 2, 12, 9, 8) for _ in range(2))
        >>> [tuple(s.shape) for s in kronecker_weights(q, k)]
        [(1, 2, 12, 12), (1, 2, 9, 9)]
    """
    name = "kronecker_weights"
    x = prepare_modes(name, query, key, key, mode_masks, scale, enable_gqa)
    _check_options(name, pool, normalize, causal_mode, len(x.sizes))
    weights = []
    for mode, mask in enumerate(x.masks):
        q, k = _pooled_pair(x, mode, pool, normalize, causal_mode)
        logits = x.scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        if mask is not None:
            seen = mask[:, None, None] if logits.dim() == 4 else mask[:, None, None, None]
            logits = logits.masked_fill(~seen, -torch.inf)
        if mode == causal_mode:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(later, -torch.inf)
        weights.append((logits - finite(logits.logsumexp(-1, keepdim=True))).exp())
    return weights


def kronecker_cost(
    modes: Sequence[int],
    *,
    heads: int,
    head_dim: int,
    value_dim: int | None = None,
    kv_heads: int | None = None,
    batch: int = 1,
    form: Literal["product", "sum"] = "product",
    causal_mode: int | None = None,
    itemsize: int = 4,
) -> Cost:
    """What a call of `kronecker_attention` costs.

    Args:
        modes: n_1, ..., n_k.
        heads: H.
        head_dim: D.
        value_dim: E; None is D.
        kv_heads: Hk; None is H.
        batch: B.
        form: Both forms need the same operations.
        causal_mode: As there.
        itemsize: Bytes per element of the inputs.

    Returns:
        Its ``units`` are the number of Kronecker products in the weights: 1 for the product, k for
        the sum, and n_c times as many with ``causal_mode`` where there is another mode.

    Raises:
        ValueError: A size is not positive, or an option is none of the above.

    Example:
        >>> exact = 2 * (37 * 37) ** 2 * (64 + 64)
        >>> round(exact / kronecker_cost([37, 37], heads=1, head_dim=64).flops)
        36
    """
    name = "kronecker_cost"
    one_of(name, "form", form, ("product", "sum"))
    value_dim = head_dim if value_dim is None else value_dim
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim, "kv_heads": kv_heads}
    for what, size in {**sizes, "batch": batch, "itemsize": itemsize}.items():
        positive(name, what, size)
    for n in modes:
        positive(name, "modes", n)
    _check_options(name, "mean", False, causal_mode, len(modes))
    tokens, products = math.prod(modes), 0
    for mode, n in enumerate(modes):
        pairs = computed_pairs(n, mode == causal_mode, fused=False)
        times = 1 if causal_mode in (None, mode) else modes[causal_mode]
        products += pairs * (times * head_dim + tokens // n * value_dim)
    shape = Shape(batch, heads, kv_heads, tokens, tokens, head_dim, value_dim, itemsize=itemsize)
    units = 1 if form == "product" else len(modes)
    if causal_mode is not None and len(modes) > 1:
        units *= modes[causal_mode]
    return Cost(2 * batch * heads * products, shape.io, cache=None, units=units)


def _pooled_pair(
    x: Modes, mode: int, pool: str, normalize: bool, causal_mode: int | None
) -> tuple[Tensor, Tensor]:
    """Queries and keys of a mode, (B, H or Hk, n, D); for each time (B, H or Hk, n_c, n, D)."""
    time = None if causal_mode == mode else causal_mode
    q, k = (_pooled(t, x.masks, mode, pool, time) for t in (x.q, x.k))
    if normalize:
        q, k = (F.layer_norm(t, t.shape[-1:]) for t in (q, k))
    return q, k


def _pooled(x: Tensor, masks: Masks, mode: int, pool: str, time: int | None) -> Tensor:
    """Sum or mean over the existing tokens of each position of a mode, up to each time if given."""
    exists = existing_tokens(masks, but=mode)
    if exists is not None:
        x = x.masked_fill(~exists[:, None, ..., None], 0.0)
    others = [m for m in range(len(masks)) if m not in (mode, time)]
    sizes = x.shape[2:-1]
    if others:
        x = x.sum([2 + m for m in others])
    if time is not None:
        x = x if time < mode else x.transpose(2, 3)  # (B, H, n_c, n, D)
        x = x.cumsum(2)
    if pool == "sum":
        return x
    count = torch.ones(1, dtype=torch.long, device=x.device)
    for m in others:
        own = masks[m]
        count = count * (sizes[m] if own is None else own.sum(-1))  # (B or 1,)
    if time is None:
        return x / count.clamp(min=1)[:, None, None, None]
    own = masks[time]
    passed = torch.ones(1, sizes[time], dtype=torch.long, device=x.device) if own is None else own
    count = count[:, None] * passed.cumsum(-1)  # (B or 1, n_c)
    return x / count.clamp(min=1)[:, None, :, None, None]


def _along(x: Modes, q: Tensor, k: Tensor, v: Tensor, mode: int, causal_mode: int | None) -> Tensor:
    """Attention of the pooled q, k along one mode of the values (B, Hk or H, n_1, ..., n_k, E)."""
    mask = x.masks[mode]
    if causal_mode in (None, mode):
        return attend_along(q, k, v, mode, x.scale, mask, is_causal=mode == causal_mode)
    # Every time has its own matrix: times join the batch.
    times = x.sizes[causal_mode]
    q, k, v = q.movedim(2, 1), k.movedim(2, 1), v.movedim(2 + causal_mode, 1)
    if mask is not None:
        mask = mask.repeat_interleave(times, 0) if len(mask) > 1 else mask
    own = mode if mode < causal_mode else mode - 1
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = attend_along(q, k, v, own, x.scale, mask)
    return out.unflatten(0, (-1, times)).movedim(1, 2 + causal_mode)


def attend_along(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mode: int,
    scale: float,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention along one mode, whose weights all lines of the values share.

    Args:
        q: (B, H, n, D).
        k: (B, Hk, n, D).
        v: (B, Hk or H, n_1, ..., n_k, E), where n_mode = n.
        mode: Counted from 0.
        scale: Factor of the logits.
        mask: bool (B or 1, n), which keys exist; None for all.
        is_causal: Position t attends to positions <= t.

    Returns:
        (B, H, n_1, ..., n_k, E).
    """
    group = q.shape[1] // v.shape[1]
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    lines = v.movedim(2 + mode, 2)  # (B, Hk or H, n, ..., E)
    out, _ = softmax_attention(
        fold(q, group),
        k,
        lines.flatten(3),
        scale=scale,
        bias=key_bias(None if mask is None else mask[:, None], v),
        is_causal=is_causal,
        group=group,
    )
    return unfold(out, group).unflatten(3, lines.shape[3:]).movedim(2, 2 + mode)


def _check(name: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor; got {type(x).__name__}.")
        if x.dim() < 4:
            raise ValueError(
                f"{name}: {argument} must have four dimensions or more (batch, heads, modes, "
                f"width); got shape {tuple(x.shape)}."
            )
        if not x.is_floating_point():
            raise TypeError(f"{name}: {argument} must be floating point; got {x.dtype}.")
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(
                f"{name}: query, key and value must share type and device; query is {query.dtype} "
                f"on {query.device}, {argument} is {x.dtype} on {x.device}."
            )
    modes = {x.shape[2:-1] for x in (query, key, value)}
    batches = {x.shape[0] for x in (query, key, value)}
    if len(modes) > 1 or len(batches) > 1 or key.shape[1] != value.shape[1]:
        raise ValueError(
            f"{name}: query, key and value must agree in batch and modes, and key and value in "
            f"heads; got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{name}: query and key must have the same head size; got {query.shape[-1]} and "
            f"{key.shape[-1]}."
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"{name}: query has {heads} heads and key has {kv_heads}. "
            "Pass enable_gqa=True for grouped-query attention."
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{name}: the {heads} query heads must be a multiple of the {kv_heads} key heads."
        )


def _check_masks(name: str, masks: Masks | None, query: Tensor) -> tuple[Tensor | None, ...]:
    sizes = query.shape[2:-1]
    if masks is None:
        return (None,) * len(sizes)
    if isinstance(masks, Tensor) or not isinstance(masks, Sequence) or len(masks) != len(sizes):
        got = f"{len(masks)}" if isinstance(masks, Sequence) else type(masks).__name__
        raise ValueError(
            f"{name}: mode_masks must be a sequence of one mask, or None, for each of the "
            f"{len(sizes)} modes; got {got}."
        )
    for mode, (mask, n) in enumerate(zip(masks, sizes, strict=True)):
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            got = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"{name}: mode_masks[{mode}] must be a bool tensor; got {got}.")
        if mask.device != query.device:
            raise ValueError(
                f"{name}: mode_masks[{mode}] is on {mask.device}, the query on {query.device}."
            )
        if mask.shape not in ((1, n), (len(query), n)):
            raise ValueError(
                f"{name}: mode_masks[{mode}] must have shape {(len(query), n)} or {(1, n)}; "
                f"got {tuple(mask.shape)}."
            )
    return tuple(masks)


def check_mode(name: str, argument: str, mode: object, count: int) -> None:
    """Refuse what is not the number of one of `count` modes."""
    if not isinstance(mode, int) or isinstance(mode, bool) or not 0 <= mode < count:
        raise ValueError(
            f"{name}: {argument} must be the number of one of the {count} modes, from 0; "
            f"got {mode!r}."
        )


def _check_options(
    name: str, pool: str, normalize: bool, causal_mode: int | None, count: int
) -> None:
    one_of(name, "pool", pool, ("mean", "sum"))
    if not isinstance(normalize, bool):
        raise ValueError(f"{name}: normalize must be True or False; got {normalize!r}.")
    if causal_mode is not None:
        check_mode(name, "causal_mode", causal_mode, count)
