r"""Conversion of ordinary attention layers to multi-head latent attention, by linear algebra.

A layer with Hk key heads has a latent already: all keys and values of a token, of which every
query head reads its part. Two things stand in the way of a small one. The rotary embedding lies
between the latent and the queries, and the latent is as wide as the cache was.

So the pairs of coordinates that the rotary embedding turns are first mixed across heads, as far as
that commutes with turning (TransMLA), or left as they are (MHA2MLA). Some of the pairs keep the
rotary embedding, and together are the rotated key that all heads share. The others lose it; they
and the values are projected on as many dimensions as the latent is to have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from numattn.core.inputs import Unsupported, not_negative, one_of, positive
from numattn.core.layer import heads, positions
from numattn.core.linalg import falling_eigh
from numattn.core.rotary import Rotary
from numattn.latent.grouped import GroupedQueryAttention
from numattn.latent.mla import MultiheadLatentAttention

Select = Literal["first", "high", "low", "uniform", "2-norm", "turned"]

_SELECTS = ("first", "high", "low", "uniform", "2-norm", "turned")

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Conversion:
    """A converted layer, and what the calibration tokens lost by it.

    Norms are root mean squares over the calibration tokens.

    Attributes:
        layer: The new layer, in the type and on the device of the old one.
        rope_energy: Share of the squared keys that keeps the rotary embedding.
        latent_energy: Share of what the latent stands for, squared: values, and keys that are not
            rotated over their balance.
        key_error: Norm of what the latent loses of the keys, over the norm of all keys.
        value_error: Norm of what it loses of the values, over theirs.
        query_error: Norm of what a latent of the queries loses, over theirs; 0 without one.
    """

    layer: MultiheadLatentAttention
    rope_energy: float
    latent_energy: float
    key_error: float
    value_error: float
    query_error: float


@torch.no_grad()
def to_mla(
    layer: GroupedQueryAttention,
    *,
    rank: int,
    rope_rank: int,
    calibration: Tensor,
    method: Literal["transmla", "mha2mla"] = "transmla",
    fold: int = 1,
    select: Select | None = None,
    joint: bool = True,
    balance: float | None = 1.0,
    damping: float = 0.01,
    query_rank: int | None = None,
) -> Conversion:
    r"""Convert a layer of grouped queries to multi-head latent attention.

    Write key head g as complex numbers :math:`k_{gl}`, one for each pair l that the rotary
    embedding turns by :math:`\theta_l`. For each frequency an orthogonal :math:`U_l` (Hk x Hk) acts
    on the heads,

    .. math:: k'_{cl} = \sum_g U_{l,cg}\, k_{gl}, \qquad q'_{h,cl} = U_{l,c\,g(h)}\, q_{hl},

    on real and imaginary parts alike. It commutes with turning and leaves every logit as it was:
    :math:`\sum_c \mathrm{Re}\, \bar q'_{h,cl} e^{i \theta_l (s - t)} k'_{cl}` is the product of
    :math:`q_{hl}` with its own key head. In TransMLA the rows of :math:`U_l` are principal axes of
    the keys, so that a few components hold most; in MHA2MLA :math:`U_l` is the identity. Then

    - ``rope_rank / 2`` components c, l keep their rotation. They are the rotated key of the new
      layer, which all heads share, and head h meets them with its :math:`q'_{h,cl}`;
    - the rotation of the others is left out: :math:`\theta_l = 0`;
    - these, divided by :math:`\rho`, and the values of all heads make a vector y of a token. With
      orthonormal B (of ``rank`` columns) the latent is :math:`c = B^T y`, and y is read as
      :math:`B c`. B are principal axes of y. What :math:`U_l` did is undone in the up-projection,
      so the queries stay what they were.

    The new layer has the logits' scale of the old one, no norm of its latents, and a `Rotary` of
    the frequencies that are kept.

    Args:
        layer: The layer; `source_layer` makes one from a model's.
        rank: Width of the latent, positive; more than there is to be kept is the same as all.
        rope_rank: Width of the shared rotated key, even, at most Hk D.
        calibration: Hidden states that the layer sees, (B, N, embed_dim), without padding. Only
            their second moment is used, and N by ``select="turned"``.
        method: ``"transmla"`` mixes pairs across heads, ``"mha2mla"`` does not.
        fold: f, a divisor of D / 2, for ``"transmla"`` (FreqFold): f neighbouring frequencies count
            as equal, their geometric mean, and their f Hk pairs are mixed together.
        select: Which components keep their rotation:

            - ``"first"``, the default of ``"transmla"`` and for it alone: the first principal
              component of every frequency or fold, then the second of all, and so on; those of the
              most energy where not all of a kind can be kept;
            - ``"high"``, the default of ``"mha2mla"``: those of the highest frequencies;
            - ``"low"``: those of the lowest;
            - ``"uniform"``: at even distances in each head, from the highest;
            - ``"2-norm"``: those with the largest product of the norms of queries and keys;
            - ``"turned"``: those with the largest mean square of that product times
              :math:`|e^{i \theta (s - t)} - 1|`, which is what the logits lose, over all pairs
              s <= t < N of tokens, with queries, keys and distances as if independent.

        joint: One basis for keys and values together, or one each, which share ``rank`` so that
            least is lost.
        balance: :math:`\rho` is the mean norm of the keys' coordinates over ``balance`` times
            that of the values'; None takes 1, as MHA2MLA does. A larger one favours the keys.
        damping: Share of the mean squared entry of the hidden states x that is added to the
            diagonal of their second moment :math:`\Sigma`, where axes are found. They are the
            singular vectors of :math:`W (\Sigma + \delta I)^{1/2}`, so that directions that the
            sample never shows count a little. ``math.inf`` leaves I: the SVD of the weights.
        query_rank: Width of a latent of the queries, by their principal axes; None for none.

    Returns:
        The new layer and what it loses.

    Cost: some eigendecompositions of Hk (D + E) dimensions in float64 and one of H 2 D with
    `query_rank`. The new layer keeps rank + rope_rank numbers per token instead of Hk (D + E).

    Exact when: rope_rank = Hk D, fold = 1 and rank >= Hk E, with any calibration. Without
    ``query_rank``, or where that is at least the rank of W_Q.

    Limits: B loses :math:`\sum_{c > rank} \lambda_c`, the least there is, of the mean square of
    [keys / rho, values] that the damped moment gives. That is not the loss of the logits, which
    also depends on the queries, nor that of the layer. What the rotation of a component was worth
    is in no such bound: of a high frequency it is all of its energy, of one whose period is much
    longer than the text next to nothing; only ``"turned"`` minds this. Folding is an error of its
    own that no rank removes. TransMLA and MHA2MLA train the model after the conversion.

    TransMLA adds its damping to the Gram matrix of y, which moves no eigenvector; here it is added
    to the moment of x, where it does. A bias of the queries becomes one of ``q_proj``, which
    `MultiheadLatentAttention` has none of by itself.

    Raises:
        ValueError: An option is not of the range above, or does not belong to the method.

    References:
        F. Meng et al., "TransMLA: Multi-Head Latent Attention Is All You Need", 2025,
        https://arxiv.org/abs/2502.07864.

        T. Ji et al., "Towards Economical Inference: Enabling DeepSeek's Multi-Head Latent
        Attention in Any Transformer-based LLMs", 2025, https://arxiv.org/abs/2502.14837 (MHA2MLA).

    Example:
        >>> layer = GroupedQueryAttention(32, 4, kv_heads=2, head_dim=8)
        >>> hidden = torch.randn(2, 50, 32)
        >>> found = to_mla(layer, rank=16, rope_rank=16, calibration=hidden)
        >>> found.layer.kv_rank, found.layer.rope_dim, found.rope_energy  # all keep their rotation
        (16, 16, 1.0)
        >>> torch.allclose(found.layer(hidden), layer(hidden), atol=1e-5)
        True
    """
    options = _Options(rank, rope_rank, method, fold, select, joint, balance, damping, query_rank)
    if calibration.dim() != 3 or calibration.shape[2] != layer.embed_dim or not calibration.numel():
        raise ValueError(
            f"to_mla: calibration must be hidden states (B, N, {layer.embed_dim}), at least one; "
            f"got {tuple(calibration.shape)}."
        )
    return _convert(layer, _moment(calibration), calibration.shape[1], options)


@dataclass(frozen=True)
class _Options:
    """Options of `to_mla`, in its order."""

    rank: int
    rope_rank: int
    method: Literal["transmla", "mha2mla"] = "transmla"
    fold: int = 1
    select: Select | None = None
    joint: bool = True
    balance: float | None = 1.0
    damping: float = 0.01
    query_rank: int | None = None

    def __post_init__(self) -> None:
        one_of("to_mla", "method", self.method, ("transmla", "mha2mla"))
        positive("to_mla", "rank", self.rank)
        positive("to_mla", "fold", self.fold)
        not_negative("to_mla", "rope_rank", self.rope_rank)
        if self.query_rank is not None:
            positive("to_mla", "query_rank", self.query_rank)
        if self.select is not None:
            one_of("to_mla", "select", self.select, _SELECTS)
        if self.balance is not None and not 0 < self.balance < math.inf:
            raise ValueError(f"to_mla: balance must be positive, or None; got {self.balance!r}.")
        if not self.damping >= 0:
            raise ValueError(f"to_mla: damping must not be negative; got {self.damping!r}.")
        if self.method == "mha2mla" and (self.fold != 1 or self.select == "first"):
            raise ValueError(
                "to_mla: fold and select='first' are about pairs that are mixed across heads, "
                "which method='mha2mla' does not do; leave fold at 1 and select another."
            )

    def check(self, layer: GroupedQueryAttention) -> None:
        """Refuse what does not fit the layer."""
        most = 0 if layer.rotary is None else layer.kv_heads * layer.head_dim
        if self.rope_rank % 2 or self.rope_rank > most:
            raise ValueError(
                f"to_mla: rope_rank must be even and at most {most}, what the layer rotates; "
                f"got {self.rope_rank}."
            )
        pairs = layer.head_dim // 2
        if self.fold > 1 and (layer.rotary is None or pairs % self.fold):
            raise ValueError(
                f"to_mla: fold must divide the {pairs} frequencies of a layer with a rotary "
                f"embedding; got {self.fold}."
            )


@dataclass(frozen=True)
class _Weights:
    """Projections in float64, by the pairs of coordinates that the rotary embedding turns.

    The last dimension, X, is that of [x, 1]: weights and bias. Without a rotary embedding "pairs"
    are single coordinates, s = 1 instead of 2.

    Attributes:
        q: (Hk, group, P, s, X).
        k: (Hk, P, s, X).
        v: (Hk, E, X).
        radians: Frequencies, (P,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    radians: Tensor

    @staticmethod
    def of(layer: GroupedQueryAttention) -> _Weights:
        rotary = layer.rotary

        def pairs(rows: Tensor) -> Tensor:  # (..., D, X) -> (..., P, s, X)
            if rotary is None:
                return rows[..., None, :]
            if rotary.interleaved:
                return rows.unflatten(-2, (-1, 2))
            return rows.unflatten(-2, (2, -1)).transpose(-2, -3)

        q, k, v = (_with_bias(p) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        k = pairs(k.unflatten(0, (layer.kv_heads, -1)))
        return _Weights(
            pairs(q.unflatten(0, (layer.kv_heads, -1, layer.head_dim))),
            k,
            v.unflatten(0, (layer.kv_heads, -1)),
            k.new_zeros(k.shape[1]) if rotary is None else rotary.frequencies(k.device),
        )


@dataclass(frozen=True)
class _Components:
    r"""Orthonormal combinations of the pairs of all key heads, each of one frequency.

    Attributes:
        lift: A, orthogonal, (C, Hk, P), C = Hk P. Component c of the keys is
            :math:`\sum_{gp} A_{cgp} k_{gp}`, and that of a query of group g
            :math:`\sum_p A_{cgp} q_p`.
        radians: Its frequency, (C,).
        level: The components of its head or fold that are like it, counted from 0, (C,).
    """

    lift: Tensor
    radians: Tensor
    level: Tensor


@dataclass(frozen=True)
class _Latent:
    """The latent of keys that are not rotated, m components of them, and of the values.

    Attributes:
        down: (r, X).
        key_up: (m, s, r).
        value_up: (Hk, E, r).
        kept: Share of all squares that it holds.
        key_loss: Sum of the squares that it loses of the keys.
        value_error: Relative error of the values.
    """

    down: Tensor
    key_up: Tensor
    value_up: Tensor
    kept: float
    key_loss: Tensor
    value_error: float


def _convert(
    layer: GroupedQueryAttention, moment: Tensor, length: int, options: _Options
) -> Conversion:
    """`to_mla` from the second moment of [x, 1], a sum over sequences of a length."""
    options.check(layer)
    weights = _Weights.of(layer)
    damped = _damped(moment, options.damping)
    found = _plain(weights)
    if options.method == "transmla":
        found = _mixed(weights, damped, options.fold)
    keys = torch.einsum("cgp,gpsx->csx", found.lift, weights.k)
    energy = _squares(keys, moment).sum(-1)  # (C,)
    kept = _kept(weights, found, energy, moment, length, options)
    latent = _latent(keys[~kept], weights.v, moment, damped, options)
    q, key_up = _heads(weights, found.lift, kept, latent.key_up)
    queries = q.flatten(0, 2)  # (H (d_n + R), X)
    factors, query_error = [queries], 0.0
    if options.query_rank is not None:
        basis = falling_eigh(queries @ damped @ queries.mT)[1][:, : options.query_rank]
        factors = [basis.mT @ queries, basis]
        lost = _squares(queries - basis @ factors[0], moment).sum()
        query_error = float((lost / _squares(queries, moment).sum()).sqrt())
    rope = keys[kept].transpose(0, 1).flatten(0, 1)  # first halves, then second ones: (R, X)
    up = torch.cat([key_up, latent.value_up], 1).repeat_interleave(q.shape[1], 0)
    new = _build(
        layer,
        factors,
        torch.cat([latent.down, rope]),
        up.flatten(0, 1),
        key_up.shape[1],
        tuple(found.radians[kept].tolist()),
    )
    return Conversion(
        layer=new,
        rope_energy=float(energy[kept].sum() / energy.sum()),
        latent_energy=latent.kept,
        key_error=float((latent.key_loss / energy.sum()).sqrt()),
        value_error=latent.value_error,
        query_error=query_error,
    )


def _with_bias(linear: nn.Linear) -> Tensor:
    """[W, b] in float64; zeros for a bias that is not there."""
    weight, bias = linear.weight, linear.bias
    column = weight.new_zeros(len(weight)) if bias is None else bias
    return torch.cat([weight, column[:, None]], 1).double()


def _moment(hidden: Tensor) -> Tensor:
    """Sum of the squares of [x, 1] over all tokens (..., embed_dim), float64 (X, X)."""
    x = hidden.flatten(0, -2).double()
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    return x.mT @ x


def _damped(moment: Tensor, damping: float) -> Tensor:
    """The moment with a share of the mean square of x on its diagonal; of inf, that alone."""
    identity = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    identity[-1, -1] = 0  # the 1 of [x, 1] is no entry of x
    if math.isinf(damping):
        return identity
    return moment + damping * moment.diagonal()[:-1].mean() * identity


def _squares(rows: Tensor, moment: Tensor) -> Tensor:
    """Sum of the squares of what each of the rows (..., X) gives."""
    return ((rows @ moment) * rows).sum(-1).clamp(min=0)


def _plain(weights: _Weights) -> _Components:
    """The pairs as they are, by head."""
    kv_heads, size = weights.k.shape[:2]
    identity = torch.eye(kv_heads * size, dtype=torch.float64, device=weights.k.device)
    return _Components(
        identity.unflatten(1, (kv_heads, size)),
        weights.radians.repeat(kv_heads),
        torch.arange(kv_heads, device=identity.device).repeat_interleave(size),
    )


def _mixed(weights: _Weights, moment: Tensor, fold: int) -> _Components:
    """Principal components across the heads, for every fold of neighbouring frequencies."""
    kv_heads, size = weights.k.shape[:2]
    folds, width = size // fold, kv_heads * fold
    rows = weights.k.unflatten(1, (folds, fold)).transpose(0, 1).flatten(1, 2)  # (F, Hk f, s, X)
    # Both halves of a pair are samples of one matrix, and so are turned into each other as before.
    gram = torch.einsum("fasx,fbsx->fab", rows @ moment, rows)
    vectors = falling_eigh(gram)[1].mT.unflatten(2, (kv_heads, fold))  # (F, Hk f, Hk, f)
    lift = rows.new_zeros(folds, width, kv_heads, folds, fold)
    each = torch.arange(folds, device=rows.device)
    lift[each, :, :, each] = vectors
    radians = weights.radians.unflatten(0, (folds, fold))
    # A mean of logarithms is off by rounding, and there is nothing to average where fold is 1.
    radians = radians[:, 0] if fold == 1 else radians.log().mean(1).exp()
    return _Components(
        lift.flatten(3).flatten(0, 1),
        radians.repeat_interleave(width),
        torch.arange(width, device=rows.device).repeat(folds),
    )


def _kept(
    weights: _Weights,
    found: _Components,
    energy: Tensor,
    moment: Tensor,
    length: int,
    options: _Options,
) -> Tensor:
    """Which components keep their rotation, bool (C,)."""
    select = options.select or ("first" if options.method == "transmla" else "high")
    level, radians = found.level.tolist(), found.radians.tolist()
    components, count = range(len(level)), options.rope_rank // 2
    if select == "uniform":
        order = sorted(components, key=lambda c: (level[c], -radians[c]))
        chosen = [order[i * len(order) // count] for i in range(count)]
    else:
        worth = _worth(select, weights, found, energy, moment, length).tolist()
        below = level if select == "first" else [0] * len(level)
        chosen = sorted(components, key=lambda c: (below[c], -worth[c], level[c]))[:count]
    kept = torch.zeros_like(found.level, dtype=torch.bool)
    kept[chosen] = True
    return kept


def _worth(
    select: str,
    weights: _Weights,
    found: _Components,
    energy: Tensor,
    moment: Tensor,
    length: int,
) -> Tensor:
    """By what components are sorted, the largest first, (C,)."""
    if select == "first":
        return energy
    if select in ("high", "low"):
        return found.radians if select == "high" else -found.radians
    gram = torch.einsum("gtpsx,gtlsx->gpl", weights.q @ moment, weights.q)
    queries = torch.einsum("cgp,gpl,cgl->c", found.lift, gram, found.lift)
    if select == "2-norm":
        return queries * energy
    distance = torch.arange(length, dtype=torch.float64, device=energy.device)
    share = (length - distance) / (length * (length + 1) / 2)  # of the causal pairs
    turned = 2 - 2 * torch.cos(found.radians[:, None] * distance) @ share
    return queries * energy * turned


def _latent(
    keys: Tensor, values: Tensor, moment: Tensor, damped: Tensor, options: _Options
) -> _Latent:
    """Project keys (m, s, X) and values (Hk, E, X) on their principal axes."""
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    number = len(k)
    rho = _ratio(k, v, moment, options.balance)
    rows = torch.cat([k / rho, v])
    gram = rows @ damped @ rows.mT
    if not options.joint:
        gram = torch.block_diag(gram[:number, :number], gram[number:, number:])
    basis = falling_eigh(gram)[1][:, : options.rank]
    down = basis.mT @ rows
    lost, all_ = _squares(rows - basis @ down, moment), _squares(rows, moment)
    return _Latent(
        down=down,
        key_up=rho * basis[:number].unflatten(0, keys.shape[:2]),
        value_up=basis[number:].unflatten(0, values.shape[:2]),
        kept=float(1 - lost.sum() / all_.sum()),
        key_loss=rho**2 * lost[:number].sum(),
        value_error=float((lost[number:].sum() / all_[number:].sum()).sqrt()),
    )


def _ratio(k: Tensor, v: Tensor, moment: Tensor, balance: float | None) -> float:
    """rho, what keys are divided by; 1 where one of both is nothing."""
    if balance is None or len(k) == 0:
        return 1.0
    keys, values = (_squares(rows, moment).sqrt().mean() for rows in (k, v))
    return float(keys / (balance * values)) if keys > 0 and values > 0 else 1.0


def _heads(weights: _Weights, lift: Tensor, kept: Tensor, key_up: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (Hk, group, d_n + R, X), and the keys they meet in the latent, (Hk, d_n, r).

    Of the queries that meet the latent only those pairs are there of which a part is in it.
    """
    q, up = weights.q, torch.einsum("cgp,csr->gpsr", lift[~kept], key_up)
    live = (lift[~kept] != 0).any(0)  # (Hk, P)
    number = max(int(live.sum(1).max()), 1)  # a head has to have some width
    pick = (~live).byte().argsort(dim=1, stable=True)[:, :number]
    head = torch.arange(len(pick), device=pick.device)[:, None]
    plain = q.transpose(1, 2)[head, pick].transpose(1, 2)  # (Hk, group, number, s, X)
    turned = torch.einsum("cgp,gtpsx->gtscx", lift[kept], q)
    both = torch.cat([plain.flatten(2, 3), turned.flatten(2, 3)], 2)
    return both, up[head, pick].flatten(1, 2)


def _build(
    layer: GroupedQueryAttention,
    queries: list[Tensor],
    down: Tensor,
    up: Tensor,
    head_dim: int,
    radians: tuple[float, ...],
) -> MultiheadLatentAttention:
    """The new layer, in the type and on the device of the old one."""
    like, rotary = layer.o_proj.weight, layer.rotary
    amplitude = 1.0 if rotary is None or rotary.yarn is None else rotary.yarn.amplitude
    with torch.device("meta"):  # draws nothing
        new = MultiheadLatentAttention(
            layer.embed_dim,
            layer.num_heads,
            kv_rank=len(down) - 2 * len(radians),
            head_dim=head_dim,
            rope_dim=2 * len(radians),
            value_dim=layer.value_dim,
            query_rank=None if len(queries) == 1 else len(queries[0]),
            rotary=Rotary(2 * len(radians), radians=radians),
            latent_norm=False,
            bias=any(getattr(layer, name).bias is not None for name in _PROJECTIONS),
            scale=layer.scale * amplitude**2,
        )
        if len(queries) == 1 and layer.q_proj.bias is not None:
            new.q_proj = nn.Linear(layer.embed_dim, len(queries[0]))
    new = new.to_empty(device=like.device).to(like.dtype)
    if len(queries) == 2:
        new.register_module("q_a_layernorm", nn.Identity())
        _fill(new.q_a_proj, queries[0])
        new.q_b_proj.weight.copy_(queries[1])
    else:
        _fill(new.q_proj, queries[0])
    _fill(new.kv_a_proj_with_mqa, down)
    new.kv_b_proj.weight.copy_(up)
    _fill(new.o_proj, _with_bias(layer.o_proj))
    return new


def _fill(linear: nn.Linear, rows: Tensor) -> None:
    """Take over [W, b]."""
    linear.weight.copy_(rows[:, :-1])
    if linear.bias is not None:
        linear.bias.copy_(rows[:, -1])


@dataclass(frozen=True)
class ConversionError:
    """How far a converted layer is from the old one.

    Attributes:
        output: Of the layer's outputs: norm of the difference over the norm.
        logits: Root mean square over pairs of the difference of logits, less its mean over the
            keys of each query, which the softmax does not see.
        total_variation: Half the sum of the absolute differences of a query's weights, in [0, 1];
            its mean over queries.
    """

    output: float
    logits: float
    total_variation: float


@torch.no_grad()
def conversion_error(
    layer: GroupedQueryAttention,
    converted: MultiheadLatentAttention,
    hidden: Tensor,
    *,
    is_causal: bool = True,
) -> ConversionError:
    """Compare a converted layer with the old one, on hidden states.

    Args:
        layer: The old one.
        converted: The new one.
        hidden: (B, N, embed_dim), preferably not of the calibration.
        is_causal: Token i attends to tokens j <= i.

    Returns:
        Errors over all sequences and heads, in the type of the layers.

    Cost: that of both layers, and the whole N x N logits of one head at a time.
    """
    want = layer(hidden, is_causal=is_causal)
    off = converted(hidden, is_causal=is_causal) - want
    length = hidden.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=hidden.device)
    seen = seen.tril() if is_causal else seen
    squares = variation = pairs = rows = 0.0
    for ours, theirs in zip(_logits(converted, hidden), _logits(layer, hidden), strict=True):
        off_mean = ((ours - theirs) * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        squares += float((ours - theirs - off_mean)[seen].square().sum())
        p, q = (x.masked_fill(~seen, -torch.inf).softmax(1) for x in (ours, theirs))
        variation += float((p - q).abs().sum() / 2)
        pairs, rows = pairs + int(seen.sum()), rows + length
    return ConversionError(
        float(off.norm() / want.norm()), math.sqrt(squares / pairs), variation / rows
    )


def _logits(
    layer: GroupedQueryAttention | MultiheadLatentAttention, hidden: Tensor
) -> Iterator[Tensor]:
    """Logits (N, N) of every sequence and head, masked nowhere."""
    position = positions(hidden, None, 0)[:, None]
    if isinstance(layer, MultiheadLatentAttention):
        q = torch.cat(layer._queries(hidden, position[:, 0]), 3)
        entry = layer._entry(hidden, position[:, 0])
        latent, rope = entry.split([layer.kv_rank, layer.rope_dim], 3)
        k = heads(layer.kv_b_proj(latent[:, 0]), layer.num_heads)[..., : layer.head_dim]
        k = torch.cat([k, rope.expand(-1, layer.num_heads, -1, -1)], 3)
    else:
        q = heads(layer.q_proj(hidden), layer.num_heads)
        k = heads(layer.k_proj(hidden), layer.kv_heads)
        if layer.rotary is not None:
            q, k = layer.rotary(q, position), layer.rotary(k, position)
        k = k.repeat_interleave(layer.num_heads // layer.kv_heads, 1)
    for x, y in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True):
        yield layer.scale * x @ y.mT


def source_layer(
    module: nn.Module,
    *,
    num_heads: int,
    kv_heads: int,
    rotary: Rotary | None,
    scale: float | None = None,
) -> GroupedQueryAttention:
    """The attention of a Llama-type model as a layer of this library, which shares its weights.

    Args:
        module: Has ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, each a `torch.nn.Linear`, and
            no other parameters.
        num_heads: H.
        kv_heads: Hk.
        rotary: What turns queries and keys, of all their coordinates; None for nothing.
        scale: Factor of the logits, as `GroupedQueryAttention` takes it.

    Raises:
        Unsupported: Other parameters or projections, such as norms of queries and keys: they lie
            between the weights and the logits.

    Example:
        >>> module = GroupedQueryAttention(32, 4, kv_heads=2, head_dim=8)
        >>> layer = source_layer(module, num_heads=4, kv_heads=2, rotary=Rotary(8))
        >>> layer.q_proj is module.q_proj
        True
    """
    linear = {n: m for n, m in module.named_children() if type(m) is nn.Linear}
    missing = [name for name in _PROJECTIONS if name not in linear]
    if missing:
        raise Unsupported(
            f"source_layer: {type(module).__name__} has no torch.nn.Linear of the name "
            f"{', '.join(missing)}; what is converted are q_proj, k_proj, v_proj and o_proj."
        )
    others = {name.rsplit(".", 1)[0] for name, _ in module.named_parameters()} - {*_PROJECTIONS}
    if others:
        raise Unsupported(
            f"source_layer: {type(module).__name__} has parameters in {', '.join(sorted(others))}; "
            "what lies between its projections and the logits would be lost."
        )
    with torch.device("meta"):
        layer = GroupedQueryAttention(
            linear["q_proj"].in_features,
            num_heads,
            kv_heads=kv_heads,
            head_dim=linear["q_proj"].out_features // num_heads,
            value_dim=linear["v_proj"].out_features // kv_heads,
            rotary=rotary,
            scale=scale,
        )
    for name in _PROJECTIONS:
        came, want = linear[name].weight.shape, getattr(layer, name).weight.shape
        if came != want:
            raise ValueError(
                f"source_layer: the weight of {name} is {tuple(came)}; num_heads={num_heads} and "
                f"kv_heads={kv_heads} ask for {tuple(want)}."
            )
        layer.register_module(name, linear[name])
    return layer


class LatentSelfAttention(nn.Module):
    """A converted layer in the place of the attention of a Llama-type model.

    It is causal, counts positions from 0, and serves calls without a cache and without a mask.

    Attributes:
        layer: The layer itself, whose `state` decodes.
        conversion: What the conversion lost.
    """

    def __init__(self, conversion: Conversion) -> None:
        super().__init__()
        self.layer = conversion.layer
        self.conversion = conversion

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: object = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            hidden_states: (B, N, embed_dim).
            position_embeddings: Of the model; the layer has its own.
            attention_mask: None.
            **others: What the model passes besides; of these a cache has to be None, and
                ``output_attentions`` off.

        Returns:
            (B, N, embed_dim), and None in place of the weights.
        """
        for name in ("cache", "past_key_values", "past_key_value"):
            if others.get(name) is not None:
                raise Unsupported(
                    f"LatentSelfAttention: {name} is a cache of keys and values, and there are "
                    "none; call the model with use_cache=False."
                )
        if others.get("output_attentions"):
            raise Unsupported("LatentSelfAttention: no weights are formed; output_attentions=True.")
        if attention_mask is not None:
            raise Unsupported(
                "LatentSelfAttention: a model passes no mask with attn_implementation='sdpa' and "
                f"sequences without padding; got attention_mask {tuple(attention_mask.shape)}."
            )
        return self.layer(hidden_states), None


@torch.no_grad()
def to_mla_model(
    model: nn.Module, calibration: Tensor, *, rank: int, rope_rank: int, **options: Any
) -> nn.Module:
    """Convert every attention layer of a Llama-type model in place.

    The model is one of transformers, or built alike: ``model.model.layers[i].self_attn`` are what
    `source_layer` takes, ``model.model.rotary_emb`` has ``inv_freq`` and ``attention_scaling``, and
    ``model.config`` says how many heads there are. It runs once over the calibration tokens, and
    each layer is converted to what it sees of them in the model as it was.

    Args:
        model: The model; with ``attn_implementation="sdpa"``, see Limits.
        calibration: Token ids (B, N) without padding. They are run one sequence at a time, and only
            second moments are kept.
        rank: As in `to_mla`, the same for all layers.
        rope_rank: As in `to_mla`.
        **options: Others of `to_mla`.

    Returns:
        The model. Its attention layers are `LatentSelfAttention`.

    Limits: calls without a cache (``use_cache=False``), and sequences without padding. The layers
    are causal and take no mask, which a model passes always with some implementations of
    attention, and not where it need not with "sdpa".

    Raises:
        Unsupported: Layers that `source_layer` refuses, sliding windows, a rotary embedding of a
            part of the coordinates, or one whose frequencies change with the length.
    """
    chosen = _Options(rank, rope_rank, **options)
    layers = _attentions(model)
    rotary, amplitude = _rotary_of(model)
    config: Any = model.config
    sources = [
        source_layer(
            module,
            num_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            rotary=rotary,
            scale=module.scaling * amplitude**2,
        )
        for module in layers
    ]
    for source in sources:  # before the model runs
        chosen.check(source)
    moments = _moments_seen(model, layers, calibration)
    decoder: Any = model.model
    for block, source, moment in zip(decoder.layers, sources, moments, strict=True):
        block.self_attn = LatentSelfAttention(
            _convert(source, moment, calibration.shape[1], chosen)
        )
    return model


def _attentions(model: Any) -> list[Any]:
    """The attention modules of a model, in order."""
    found = [layer.self_attn for layer in model.model.layers]
    for module in found:
        window = getattr(module, "sliding_window", getattr(model.config, "sliding_window", None))
        if window is not None:
            raise Unsupported(
                f"to_mla_model: {type(module).__name__} attends to a sliding window of {window} "
                "tokens, the converted layer to all."
            )
    return found


def _rotary_of(model: Any) -> tuple[Rotary, float]:
    """The rotary embedding of a model, and the factor of its cosine and sine."""
    rotary, config = model.model.rotary_emb, model.config
    if rotary.rope_type in ("dynamic", "longrope"):
        raise Unsupported(
            f"to_mla_model: the frequencies of rope_type={rotary.rope_type!r} change with the "
            "length of the sequence; those of a converted layer do not."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    radians = tuple(rotary.inv_freq.tolist())
    if 2 * len(radians) != head_dim:
        raise Unsupported(
            f"to_mla_model: the model rotates {2 * len(radians)} of {head_dim} coordinates of a "
            "head; a layer of which all are rotated can be converted."
        )
    return Rotary(head_dim, radians=radians), float(rotary.attention_scaling)


def _moments_seen(model: nn.Module, layers: Sequence[nn.Module], ids: Tensor) -> list[Tensor]:
    """Second moments of [x, 1] for the hidden states x that each layer sees."""
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(
            f"to_mla_model: calibration must be token ids (B, N), at least one; "
            f"got {tuple(ids.shape)}."
        )
    sums: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> None:
        hidden = args[0] if args else call["hidden_states"]
        sums[module] = sums.get(module, 0.0) + _moment(hidden)

    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in layers]
    was_training = model.training
    model.eval()
    try:
        for sequence in ids.split(1):
            model(sequence, use_cache=False)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return [sums[module] for module in layers]
