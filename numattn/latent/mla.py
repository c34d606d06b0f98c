"""Multi-head latent attention: the keys and values of all heads come from one latent of a token.

`MultiheadLatentAttention` is the layer, `mla_attention` compresses given keys and values to such
latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from numattn.core.cost import Cost, Shape, visible_pairs
from numattn.core.info import Info
from numattn.core.inputs import (
    Inputs,
    Unsupported,
    compute_dtype,
    fold,
    not_negative,
    positive,
    prepare,
    unfold,
)
from numattn.core.layer import (
    AttentionLayer,
    Cache,
    LayerState,
    ModelShape,
    check_rotary,
    check_sizes,
    extend,
    heads,
    joined,
    layer_cost,
    positions,
)
from numattn.core.linalg import existing, falling_eigh
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register, register_layer
from numattn.core.rotary import Rotary
from numattn.core.state import Buffer, State
from numattn.engines.latent import latent_attention
from numattn.engines.softmax import (
    computed_pairs,
    fused_attention,
    key_bias,
    softmax_partial,
)

INFO = Info(
    name="mla",
    family="latent",
    summary="keys and values of all heads in one latent of a token, by balanced PCA (MLA)",
    paper="https://arxiv.org/abs/2405.04434",
    complexity="H N^2 r + N r Hk (d + e)",
    budget="rank",
    approximates="softmax",
    causal="native",
    mask="padding",
    linear_in_value=False,
    joint=True,
    bounded=False,
    fits_causal=True,
    state_tensors=("basis", "balance", "mean"),
)

_WIDEST = 1 << 22  # no token has more numbers, so it stands for Hk (D + E)


def absorbed_attention(
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    up: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    r"""Attention of heads to latents, without forming their keys and values.

    With the key projection :math:`U^K_h` and the value projection :math:`U^V_h` of head h,

    .. math:: q_h \cdot U^K_h c = ({U^K_h}^T q_h) \cdot c, \qquad
              \sum_j p_{ij}\, U^V_h c_j = U^V_h \sum_j p_{ij}\, c_j ,

    so the projections stand at the queries and at the outputs, and heads attend to c itself.

    Args:
        q: (B, H, n, d_n), the part of the queries that is not rotated.
        q_rope: (B, H, n, d_r), the rotated part.
        latent: c, (B, G, M, d_c); H / G consecutive heads share each of the G latents of a token.
        rope: Rotated keys, (B, G or 1, M, d_r).
        up: [U^K; U^V] of every head, (H, d_n + d_v, d_c).
        scale: Factor of the logits.
        bias: Per-key bias (B or 1, 1, M); -inf removes a key.
        is_causal: The queries are the last n of the M tokens, and attend to none after them.

    Returns:
        (B, H, n, d_v), in the type of q; zeros for a row that may attend to nothing.

    Cost: 2 H (n d_c (d_n + d_v) + P (2 d_c + d_r)) operations for P pairs of tokens.
    """
    keys, values = up.split([q.shape[3], up.shape[1] - q.shape[3]], 1)
    dtype, group = compute_dtype(q.dtype), q.shape[1] // latent.shape[1]
    out, _ = latent_attention(
        fold(q @ keys, group).to(dtype),  # (B, G, n * group, d_c)
        fold(q_rope, group).to(dtype),
        latent,
        rope,
        scale=scale,
        bias=bias,
        is_causal=is_causal,
        first=latent.shape[2] - q.shape[2],
        group=group,
    )
    return unfold(out, group).to(q.dtype) @ values.mT


def expanded_attention(
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    up: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """What `absorbed_attention` gives, of the same arguments, from the keys and values of heads.

    Cost: 2 H (M d_c (d_n + d_v) + P (d_n + d_r + d_v)) operations for P pairs of tokens. Torch's
    fused kernel serves calls without bias where d_n + d_r = d_v and there are no earlier tokens.
    """
    groups, length = latent.shape[1:3]
    first = length - q.shape[2]
    is_causal = is_causal and q.shape[2] > 1  # the last token sees all
    weight = up.unflatten(0, (groups, -1)).flatten(1, 2)  # (G, H / G * (d_n + d_v), d_c)
    expanded = (latent @ weight.mT).unflatten(3, (-1, up.shape[1])).transpose(2, 3).flatten(1, 2)
    key, value = expanded.split([q.shape[3], up.shape[1] - q.shape[3]], 3)  # (B, H, M, d_n or d_v)
    shared = rope.repeat_interleave(groups // rope.shape[1], 1)
    shared = shared.repeat_interleave(q.shape[1] // groups, 1)
    query, key = torch.cat([q, q_rope], 3), torch.cat([key, shared], 3)
    if bias is None and not (is_causal and first):
        out = fused_attention(query, key, value, is_causal=is_causal, scale=scale)
        if out is not None:
            return out
    query, key, value = (t.to(compute_dtype(q.dtype)) for t in (query, key, value))
    part = softmax_partial(
        query, key, value, scale=scale, bias=bias, is_causal=is_causal, first=first
    )
    return part.out().to(q.dtype)


@register_layer
class MultiheadLatentAttention(AttentionLayer):
    r"""Multi-head latent attention (MLA), the attention layer of DeepSeek-V2 and -V3.

    A token leaves one latent c and one rotated key r for all heads together,

    .. math:: [\tilde c, \tilde r] = W^{DKV} x, \quad c = \mathrm{RMSNorm}(\tilde c), \quad
              r = \mathrm{RoPE}(\tilde r), \quad [k_h, v_h] = [U^K_h; U^V_h]\, c,

    and a query has a part for each: :math:`s_{ij} = \mathrm{scale}\,
    (q_i \cdot k_j + q^R_i \cdot r_j)`. Only c, normalised, and r are kept. Two forms give the same
    answer: the expanded one forms keys and values of all heads, the absorbed one (see
    `absorbed_attention`) attends to c itself. A rotation of :math:`k_h` would stand between its
    projection and that of the query and differ for every distance, so nothing could be absorbed:
    hence the separate rotated part.

    Parameters have the names of transformers' ``DeepseekV3Attention``, whose state dict loads as
    it is: ``q_proj``, or ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj`` with ``query_rank``;
    ``kv_a_proj_with_mqa``, ``kv_a_layernorm``, ``kv_b_proj`` and ``o_proj``.

    Cost: ``forward`` on n tokens after M - n others takes the absorbed form where it needs no more
    operations: where P (2 d_c - d_n - d_v) <= (M - n) d_c (d_n + d_v) for P pairs of tokens. One
    token after many is absorbed, and a whole sequence is expanded unless d_c is small. Decoding
    keeps d_c + d_r numbers per token, whatever the number of heads.

    Exact when: `kv_rank` >= H (d_n + d_v), ``latent_norm`` is off and the down-projection loses
    nothing: it is then multi-head attention with a part of every head rotated.

    Limits: the forms differ by rounding, in half precision by that of one projection more. With
    many heads the absorbed form needs several times the operations per pair of the expanded one,
    2 d_c + d_r against d_n + d_r + d_v, and saves the reading of keys and values instead. The
    expanded form after M tokens holds keys and values of all heads while it runs. Tokens that a
    state holds have no gradient.

    References:
        DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
        Model", 2024, https://arxiv.org/abs/2405.04434.

    Example:
        >>> layer = MultiheadLatentAttention(32, 4, kv_rank=16, head_dim=8, rope_dim=4, value_dim=8)
        >>> layer(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
        >>> state = layer.state(2)
        >>> layer(torch.randn(2, 10, 32), state=state).shape, state["latent"].shape
        (torch.Size([2, 10, 32]), torch.Size([2, 1, 10, 20]))
    """

    num_latents = 1

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_rank: int = 512,
        head_dim: int = 128,
        rope_dim: int = 64,
        value_dim: int = 128,
        query_rank: int | None = None,
        rotary: Rotary | None = None,
        latent_norm: bool = True,
        norm_eps: float = 1e-6,
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        """Make the projections, drawn as `torch.nn.Linear` draws.

        Args:
            embed_dim: Width of the hidden states.
            num_heads: H.
            kv_rank: d_c, width of the latent.
            head_dim: d_n, width of the part of a head's key that is not rotated.
            rope_dim: d_r, width of the rotated key, even; 0 for none.
            value_dim: d_v, width of a head's value.
            query_rank: Width of a latent of the queries, normalised too; None projects at once.
            rotary: Rotation of `rope_dim` coordinates; by default of interleaved pairs.
            latent_norm: Normalise the latent of keys and values, before it is kept.
            norm_eps: Added to mean squares that latents are normalised by, which may be zero.
            bias: Of ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj``; the others have none.
            scale: Factor of the logits; by default (d_n + d_r) ** -0.5 times what ``rotary`` asks
                for.
        """
        super().__init__()
        name = type(self).__name__
        check_sizes(name, embed_dim=embed_dim, num_heads=num_heads, kv_rank=kv_rank)
        check_sizes(name, head_dim=head_dim, value_dim=value_dim)
        not_negative(name, "rope_dim", rope_dim)
        self.rotary = Rotary(rope_dim, interleaved=True) if rotary is None else rotary
        check_rotary(name, self.rotary, "rope_dim", rope_dim)
        self.embed_dim, self.num_heads, self.kv_rank = embed_dim, num_heads, kv_rank
        self.head_dim, self.rope_dim, self.value_dim = head_dim, rope_dim, value_dim
        self.query_rank = query_rank
        width = head_dim + rope_dim
        self.scale = width**-0.5 * self.rotary.logit_factor if scale is None else scale
        if query_rank is None:
            self.q_proj = nn.Linear(embed_dim, num_heads * width, bias=False)
        else:
            positive(name, "query_rank", query_rank)
            self.q_a_proj = nn.Linear(embed_dim, query_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(query_rank, eps=norm_eps)
            self.q_b_proj = nn.Linear(query_rank, num_heads * width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(embed_dim, kv_rank + rope_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=norm_eps) if latent_norm else None
        self.kv_b_proj = nn.Linear(kv_rank, num_heads * (head_dim + value_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        state: LayerState | None = None,
        absorbed: bool | None = None,
    ) -> Tensor:
        """Attend among hidden states, as `AttentionLayer.forward`.

        Args:
            hidden: (B, N, embed_dim).
            attn_mask: bool key padding (B, 1, 1, N); not with a state.
            is_causal: Token i attends to tokens j <= i. Always so with a state.
            state: Of `state`; takes in the tokens of this call.
            absorbed: The absorbed form, or the expanded one; None takes that of fewer operations.

        Returns:
            (B, N, embed_dim).
        """
        self._check(hidden, attn_mask, state)
        start = 0 if state is None else state.length
        position = positions(hidden, attn_mask, start)
        entry = self._entry(hidden, position)
        if state is not None:
            entry, is_causal = extend(self, state, latent=entry)["latent"], True
        if hidden.shape[1] == 0:
            return hidden
        if absorbed is None:
            absorbed = self.absorbs(hidden.shape[1], entry.shape[2], is_causal=is_causal)
        q, q_rope = self._queries(hidden, position)
        latent, rope = entry.split([self._width - self.rope_dim, self.rope_dim], 3)
        attend = absorbed_attention if absorbed else expanded_attention
        out = attend(
            q,
            q_rope,
            heads(latent[:, 0], self.num_latents),
            rope,
            self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)),
            scale=self.scale,
            bias=key_bias(None if attn_mask is None else attn_mask[:, 0], hidden),
            is_causal=is_causal,
        )
        return self.o_proj(joined(out))

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens: ``latent`` (B, 1, 0, d_c + d_r) holds [c, r]."""
        weight = self.kv_a_proj_with_mqa.weight
        return Cache(latent=weight.new_empty((batch, 1, 0, self._width)))

    def absorbs(self, queries: int, keys: int, *, is_causal: bool = True) -> bool:
        """Whether the absorbed form needs no more operations, for the last `queries` of `keys`."""
        pairs = queries * (2 * keys - queries + 1) // 2 if is_causal else queries * keys
        both = self.head_dim + self.value_dim
        return pairs * (2 * self.kv_rank - both) <= (keys - queries) * self.kv_rank * both

    def cost(
        self, batch: int, length: int, *, is_causal: bool = True, absorbed: bool | None = None
    ) -> Cost:
        """What a call without a state costs, as `AttentionLayer.cost`, in either form."""
        if absorbed is None:
            absorbed = self.absorbs(length, length, is_causal=is_causal)
        both, width = self.head_dim + self.value_dim, self.head_dim + self.rope_dim
        pairs = computed_pairs(length, is_causal, fused=not absorbed and width == self.value_dim)
        pair = 2 * self.kv_rank + self.rope_dim if absorbed else both + self.rope_dim
        return layer_cost(self, batch, length, self.num_heads * pairs * pair, self._width)

    @classmethod
    def of_model(cls, shape: ModelShape) -> dict[str, AttentionLayer]:
        layer = cls(
            shape.embed_dim,
            shape.num_heads,
            kv_rank=shape.latent_dim,
            head_dim=shape.plain_dim,
            rope_dim=shape.rope_dim,
            value_dim=shape.value_dim,
            query_rank=shape.query_rank,
        )
        return {"MLA": layer}

    @property
    def _width(self) -> int:
        """Numbers that a token leaves."""
        return self.kv_a_proj_with_mqa.out_features

    def _queries(self, hidden: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, H, N, d_n), and those that are rotated, (B, H, N, d_r)."""
        if self.query_rank is None:
            flat = self.q_proj(hidden)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q, q_rope = heads(flat, self.num_heads).split([self.head_dim, self.rope_dim], 3)
        return q, self.rotary(q_rope, position[:, None])

    def _entry(self, hidden: Tensor, position: Tensor) -> Tensor:
        """What every token leaves, [c, r]: (B, 1, N, d_c + d_r)."""
        down = self.kv_a_proj_with_mqa(hidden)[:, None]
        latent, rope = down.split([self._width - self.rope_dim, self.rope_dim], 3)
        if self.kv_a_layernorm is not None:
            latent = self.kv_a_layernorm(latent)
        return torch.cat([latent, self.rotary(rope, position[:, None])], 3)


def mla_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 128,
    center: bool = True,
    basis: Tensor | None = None,
    balance: Tensor | None = None,
    mean: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention on latents, to which keys and values of all heads are compressed together.

    The keys, over their balance :math:`\rho`, and the values of all key heads of a token make one
    vector :math:`x_j`, of which a latent of r numbers is kept, that a basis W stands for:

    .. math:: x_j = [k_{1j} / \rho,\, v_{1j},\, \dots] \approx \bar x + W c_j, \qquad
              c_j = W^+ (x_j - \bar x),

    by least squares. Attention runs absorbed, on the latents themselves: with the rows
    :math:`W^K_h` and :math:`W^V_h` of W that belong to a head,

    .. math:: s_{ij} = \mathrm{scale}\, \rho\, ({W^K_h}^T q_i) \cdot c_j, \qquad
              o_i = \bar v_h + W^V_h \sum_j \mathrm{softmax}_j(s_{ij})\, c_j .

    W are the r leading principal directions of a sample, :math:`\bar x` is its mean, and
    :math:`\rho` the mean norm of its columns of keys over that of its columns of values, as the
    conversion of trained models to latent attention balances them (TransMLA). The mean costs no
    component: the softmax does not see a vector that is added to every key, and weights that sum
    to one let the mean value pass.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: r, numbers that are kept of a token; more than Hk (D + E) is the same as that.
        center: Take the mean out of keys and values. False contradicts a given ``mean``.
        basis: W, (Hk, D + E, r) or (B, Hk, D + E, r), of ``rank`` columns or fewer, that need not
            be orthogonal; given together with ``balance``. Where neither is given, all three are
            fitted on the batch, to each sequence.
        balance: :math:`\rho` of every key head, positive, (Hk,) or (B, Hk); fitted, it is the same
            in all.
        mean: Of [k, v], in their own units, (Hk, 1, D + E) or (B, Hk, 1, D + E); None beside a
            given basis is zero.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i; needs a given basis.
        scale: Factor of the logits, default D ** -0.5: that of the full width, at any rank.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 4 Nq Nk r operations per query head, half of it when causal, 2 Nk Hk (D + E) r to
    compress, 2 Nq r (D + E) per query head to project, and 4 Hk (D + E) r^2 to invert W; fitting
    takes 2 Nk (Hk (D + E))^2 more, in float64. Torch's fused kernel serves calls without a mask.
    Decoding keeps r numbers per token, whatever the number of heads.

    Exact when: r >= Hk (D + E); or the basis is fitted to tokens whose [k, v] lie in r
    dimensions, less their mean where there is ``center``.

    Limits: at a rank above D, the operations per pair are more than those of exact attention,
    and only the cache shrinks. Heads are compressed together, so a change in one moves the others.
    Where the logits of a row are off by u_j, its total variation distance is at most
    tanh((max u - min u) / 4). Principal directions mind all tokens alike and no query, the softmax
    minds large logits: a sink is one token among many and comes out wrong first. ``center`` helps
    elsewhere and makes that worse, since it moves a value of zero away from it.

    Keys are taken as they come, rotated (RoPE) or not. The separate rotated part that the layer
    has stands there for what cannot be absorbed; here nothing is left to separate, so there is
    none. TransMLA adds a multiple of the identity to the Gram matrix, which changes none of its
    eigenvectors; it is left out. Bases that are fitted are constants for autograd.

    Raises:
        ValueError: An option is not of the range above, or tensors do not fit or belong together.
        Unsupported: A mask other than key padding, or a causal call without a basis.

    References:
        DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
        Model", 2024, https://arxiv.org/abs/2405.04434.
        F. Meng et al., "TransMLA: Multi-Head Latent Attention Is All You Need", 2025,
        https://arxiv.org/abs/2502.07864.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> mla_attention(q, k, v, rank=16).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = MLA(rank, center)
    latents = _given(options, x.k, x.v, basis, balance, mean)
    if latents is None and is_causal:
        raise Unsupported(
            "mla: a basis fitted on the batch of a causal call would let the future in; pass "
            "basis, balance and mean (MLA.fit on a sample finds them), or use MLAAttention."
        )
    if x.empty:
        return x.nothing()
    if latents is None:
        latents = _fit(options, x).to(x.k)
    return x.restore(_attend(latents, x, latents.of(x.k, x.v, latents.down())))


@dataclass(frozen=True)
class _Latents:
    """The state tensors: how tokens and latents belong together.

    Attributes:
        basis: W, (..., Hk, D + E, r).
        balance: (..., Hk).
        mean: (..., Hk, 1, D + E); None is zero.
    """

    basis: Tensor
    balance: Tensor
    mean: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by keyword."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def to(self, like: Tensor) -> _Latents:
        """In the type and on the device of `like`."""
        return replace(self, **{name: tensor.to(like) for name, tensor in self.tensors().items()})

    def down(self) -> Tensor:
        """The pseudo-inverse of W, transposed: (..., Hk * (D + E), r)."""
        w = self.basis.flatten(-3, -2).double()
        return (w @ torch.linalg.pinv(w.mT @ w, hermitian=True)).to(self.basis)

    def of(self, k: Tensor, v: Tensor, down: Tensor) -> Tensor:
        """The latents (B, 1, N, r) of tokens."""
        return (_balanced(k, v, self.balance, self.mean) @ down)[:, None]

    def maps(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """What takes latents to keys and to values: (..., Hk, D, r) and (..., Hk, E, r)."""
        width = self.basis.shape[-2] - head_dim
        keys, values = self.basis.split([head_dim, width], -2)
        return keys * self.balance[..., None, None], values


def _balanced(k: Tensor, v: Tensor, balance: Tensor, mean: Tensor | None) -> Tensor:
    """The tokens x less their mean, (B, N, Hk * (D + E)); a mean is in units of k and v."""
    tokens = torch.cat([k, v], 3)
    tokens = tokens if mean is None else tokens - mean
    k, v = tokens.split([k.shape[3], v.shape[3]], 3)
    return torch.cat([k / balance[..., None, None], v], 3).transpose(1, 2).flatten(2)


def _attend(latents: _Latents, x: Inputs, c: Tensor) -> Tensor:
    """Attend from whole queries to latents c (B, 1, M, r): (B, Hk, Nq * group, E)."""
    dim = x.q.shape[3]
    keys, values = latents.maps(dim)
    q = unfold(x.q @ keys, x.group)  # (B, H, Nq, r)
    heads, out, lse = q.shape[1], None, None
    if x.padding is None and c.shape[2]:
        out = fused_attention(q, c, c, is_causal=x.is_causal, scale=x.scale)
    if out is None:
        rows = fold(q, heads)  # (B, 1, Nq * H, r)
        out, lse = latent_attention(
            rows,
            rows[..., :0],
            c,
            c[..., :0],
            scale=x.scale,
            bias=key_bias(x.padding, q),
            is_causal=x.is_causal,
            group=heads,
        )
        out = unfold(out, heads)
    out = fold(out, x.group) @ values.mT
    if latents.mean is None:
        return out
    moved = out + latents.mean[..., dim:]
    if lse is None:
        return moved
    nothing = fold(unfold(lse[..., None], heads) == -torch.inf, x.group)
    return torch.where(nothing, out, moved)


@torch.no_grad()
def _fit(options: MLA, x: Inputs) -> _Latents:
    """The latents of each sequence, float64, leading dimension B."""
    k, v = existing(x.k, x.padding), existing(x.v, x.padding)
    mean = None
    if options.center:
        count = x.num_keys.clamp(min=1)[..., None, None]
        mean_k, mean_v = (t.sum(2, keepdim=True) / count for t in (k, v))
        mean = torch.cat([mean_k, mean_v], 3)
        k, v = existing(k - mean_k, x.padding), existing(v - mean_v, x.padding)
    size_k, size_v = (t.square().sum(2).sqrt().mean((1, 2)) for t in (k, v))
    known = (size_k > 0) & (size_v > 0)
    balance = torch.where(known, size_k / torch.where(known, size_v, 1.0), 1.0)
    balance = balance[:, None].expand(k.shape[:2]).contiguous()
    tokens = _balanced(k, v, balance, None)
    _, directions = falling_eigh(tokens.mT @ tokens)
    basis = directions[..., : options.rank].unflatten(1, (k.shape[1], -1)).contiguous()
    return _Latents(basis, balance, mean)


def _given(
    options: MLA,
    k: Tensor,
    v: Tensor,
    basis: Tensor | None = None,
    balance: Tensor | None = None,
    mean: Tensor | None = None,
) -> _Latents | None:
    """The tensors that were given, in the type of computation; None when none was."""
    if basis is None or balance is None:
        if basis is None and balance is None and mean is None:
            return None
        raise ValueError(
            "mla: pass basis and balance together, with or without mean, or none of the three to "
            "fit them."
        )
    if mean is not None and not options.center:
        raise ValueError("mla: mean is for center=True.")
    batch, count, width = k.shape[0], k.shape[1], k.shape[3] + v.shape[3]
    columns = basis.shape[-1] if basis.dim() else 0
    if not 0 < columns <= options.rank:
        raise ValueError(f"mla: basis must have 1 to {options.rank} columns; got {columns}.")
    latents = _Latents(basis, balance, mean)
    tails = {"basis": (width, columns), "balance": (), "mean": (1, width)}
    for name, tensor in latents.tensors().items():
        want = (count, *tails[name])
        if tensor.shape not in (want, (batch, *want)):
            raise ValueError(
                f"mla: {name} must have shape {want} or {(batch, *want)}; "
                f"got {tuple(tensor.shape)}."
            )
    return latents.to(k)


@register
@dataclass(frozen=True)
class MLA(Method):
    """Options of `mla_attention`."""

    rank: int = 128
    center: bool = True
    info = INFO
    function = staticmethod(mla_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "rank", self.rank)
        if not isinstance(self.center, bool):
            raise ValueError(f"mla: center must be True or False; got {self.center!r}.")

    def exact_at(self, length: int) -> MLA:
        return replace(self, rank=_WIDEST)

    def cost(self, shape: Shape) -> Cost:
        """Fitting the basis is counted where the call is not causal."""
        width = shape.kv_heads * (shape.head_dim + shape.value_dim)
        r, tokens = min(self.rank, width), shape.batch * shape.keys
        flops = 4 * visible_pairs(shape) * r + 2 * tokens * width * r
        flops += 2 * shape.rows * (shape.head_dim + shape.value_dim) * r
        flops += 4 * width * r * r * (1 if shape.is_causal else shape.batch)
        if not shape.is_causal:
            flops += 2 * tokens * width * width
        cache = tokens * r * shape.itemsize
        return Cost(flops, shape.io, cache, units=min(r, shape.head_dim))

    def fit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        generator: Generator | None = None,
    ) -> dict[str, Tensor]:
        if value is None:
            raise ValueError("mla: fit needs value, which is compressed together with key.")
        x = prepare(INFO, query, key, value, attn_mask, False, scale, enable_gqa)
        return _fit(self, x).tensors()

    def module(self, *, num_heads: int, head_dim: int) -> MLAAttention:
        return MLAAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

    def state(
        self,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **tensors: Tensor,
    ) -> State:
        self.refuse(tensors)
        x = prepare(INFO, key, key, value, None, False, scale, False)
        latents = _given(self, x.k, x.v, **tensors)
        if latents is None:
            raise Unsupported(
                "mla: decoding needs a basis that no later token changes; pass basis, balance and "
                "mean (MLA.fit on a sample finds them), or use MLAAttention.state."
            )
        return _MLAState(latents, key, value, x.scale, enable_gqa)


class _MLAState(State):
    """The latents, in the type of the tokens."""

    def __init__(
        self, latents: _Latents, key: Tensor, value: Tensor, scale: float, enable_gqa: bool
    ) -> None:
        self._latents, self._scale, self._enable_gqa = latents, scale, enable_gqa
        self._down = latents.down()
        self._key, self._value = (t[:, :, :0].detach() for t in (key, value))
        self._tokens = Buffer(self._compressed(key, value))

    @torch.no_grad()
    def _compressed(self, key: Tensor, value: Tensor) -> Tensor:
        x = prepare(INFO, key, key, value, None, False, None, False)
        return self._latents.of(x.k, x.v, self._down).to(key.dtype)

    def append(self, key: Tensor, value: Tensor) -> None:
        self._tokens.append(self._compressed(key, value))

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        call = (None, False, self._scale, self._enable_gqa)
        x = prepare(INFO, query, self._key, self._value, *call)
        return x.restore(_attend(self._latents, x, self._tokens.tensor.to(x.q)))

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes


class MLAAttention(AttentionModule):
    """`mla_attention` with a basis that is fitted to a sample and saved with the model.

    Buffers: ``basis`` (Hk, D + E, r), ``balance`` (Hk,) and, with ``center``, ``mean``
    (Hk, 1, D + E). Until `calibrate` sets them, ``balance`` is one, the others are None, and a
    latent is the leading r coordinates of a token: the first of the keys of all heads, then the
    second, and the values after the keys.
    """

    options: MLA
    basis: Tensor | None
    balance: Tensor
    mean: Tensor | None

    def __init__(self, *, num_heads: int, head_dim: int, **options: Any) -> None:
        """Keep the leading coordinates.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            **options: Options of `MLA`.
        """
        super().__init__()
        self.options = MLA(**options)
        self._head_dim = head_dim
        self.register_buffer("balance", torch.ones(num_heads))
        self.register_buffer("basis", None)
        self.register_buffer("mean", None)

    def calibrate(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Fit the basis to sample tokens, (B, H, N, D), (B, Hk, N, D) and (B, Hk, N, E).

        The whole batch is one sample; of the queries nothing is read. ``attn_mask`` as in a call.
        """
        x = prepare(INFO, query, key, value, attn_mask, False, None, enable_gqa).joined()
        for name, tensor in _fit(self.options, x).tensors().items():
            setattr(self, name, tensor[0].to(self.balance))

    def tensors(self) -> dict[str, Tensor]:
        return {n: t for n in INFO.state_tensors if (t := getattr(self, n)) is not None}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
        """Attend; shapes and keywords as in `mla_attention`."""
        return self.options(query, key, value, **call, **self._for(value))

    def state(self, key: Tensor, value: Tensor, **call: Any) -> State:
        """A decoding state with these tensors as they are now, see `Method.state`."""
        return self.options.state(key, value, **call, **self._for(value))

    def _for(self, value: Tensor) -> dict[str, Any]:
        """The tensors; before `calibrate`, those that fit the width of the values."""
        if self.basis is not None:
            return self.tensors()
        heads, width = len(self.balance), self._head_dim + value.shape[3]
        rank = min(self.options.rank, heads * width)
        leading = torch.eye(heads * width, rank, dtype=value.dtype, device=value.device)
        basis = leading.unflatten(0, (width, heads)).transpose(0, 1)
        return {"basis": basis, "balance": self.balance}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # The width of values is known where they were calibrated.
        for name in ("basis", "mean"):
            saved = state_dict.get(prefix + name)
            setattr(self, name, None if saved is None else self.balance.new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
