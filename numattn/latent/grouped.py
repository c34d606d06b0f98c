"""Layers whose query heads share what the cache keeps: keys and values, one tensor, or latents."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numattn.core.cost import Cost
from numattn.core.inputs import compute_dtype, fold, unfold
from numattn.core.layer import (
    AttentionLayer,
    Cache,
    LayerState,
    ModelShape,
    check_rotary,
    check_shared,
    check_sizes,
    extend,
    heads,
    joined,
    layer_cost,
    logit_factor,
    positions,
)
from numattn.core.registry import register_layer
from numattn.core.rotary import Rotary
from numattn.engines.latent import latent_attention
from numattn.engines.softmax import computed_pairs, grouped_attention, key_bias
from numattn.latent.mla import MultiheadLatentAttention


@register_layer
class GroupedQueryAttention(AttentionLayer):
    r"""Grouped-query attention (GQA), the ordinary layer: H query heads share Hk keys and values.

    .. math:: o_h = \mathrm{softmax}(\mathrm{scale}\; q_h k_g^T)\, v_g, \qquad
              g = \lfloor h\, H_k / H \rfloor .

    Hk = H is multi-head attention, Hk = 1 multi-query attention.

    Parameters have the names of transformers' ``LlamaAttention``, whose state dict loads as it
    is: ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.

    Cost: the projections, and 2 H P (D + E) operations for P pairs of tokens. Decoding keeps
    Hk (D + E) numbers per token.

    Exact when: always.

    Limits: the cache grows with Hk, and each token that is decoded reads all of it. Tokens that a
    state holds have no gradient.

    References:
        N. Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019,
        https://arxiv.org/abs/1911.02150 (Hk = 1).

        J. Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from
        Multi-Head Checkpoints", 2023, https://arxiv.org/abs/2305.13245.

    Example:
        >>> layer = GroupedQueryAttention(32, 4, kv_heads=2, head_dim=8)
        >>> state = layer.state()
        >>> layer(torch.randn(1, 10, 32), state=state).shape, state["key"].shape
        (torch.Size([1, 10, 32]), torch.Size([1, 2, 10, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        rotary: Rotary | Literal["default"] | None = "default",
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        """Make the projections, drawn as `torch.nn.Linear` draws.

        Args:
            embed_dim: Width of the hidden states.
            num_heads: H.
            kv_heads: Hk, a divisor of H.
            head_dim: D, width of a query and a key.
            value_dim: E, width of a value; D when None.
            rotary: Rotation of D coordinates, by default ``Rotary(D)``; None for no positions.
            bias: Of all projections.
            scale: Factor of the logits; by default D ** -0.5 times what ``rotary`` asks for.
        """
        super().__init__()
        name = type(self).__name__
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes(name, embed_dim=embed_dim, head_dim=head_dim, value_dim=value_dim)
        check_shared(name, num_heads, "kv_heads", kv_heads)
        self.rotary = Rotary(head_dim) if rotary == "default" else rotary
        check_rotary(name, self.rotary, "head_dim", head_dim)
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.scale = head_dim**-0.5 * logit_factor(self.rotary) if scale is None else scale
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, kv_heads * value_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        state: LayerState | None = None,
    ) -> Tensor:
        self._check(hidden, attn_mask, state)
        if hidden.shape[1] == 0:
            return hidden
        q = heads(self.q_proj(hidden), self.num_heads)  # (B, H, n, D)
        k = heads(self.k_proj(hidden), self.kv_heads)  # (B, Hk, n, D)
        v = heads(self.v_proj(hidden), self.kv_heads)  # (B, Hk, n, E)
        if self.rotary is not None:
            start = 0 if state is None else state.length
            position = positions(hidden, attn_mask, start)[:, None]
            q, k = self.rotary(q, position), self.rotary(k, position)
        if state is not None:
            cache = extend(self, state, key=k, value=v)
            k, v, is_causal = cache["key"], cache["value"], True
        bias = key_bias(None if attn_mask is None else attn_mask[:, 0], hidden)
        out = grouped_attention(q, k, v, scale=self.scale, bias=bias, is_causal=is_causal)
        return self.o_proj(joined(out))

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens: ``key`` (B, Hk, 0, D) and ``value`` (B, Hk, 0, E)."""
        empty = self.o_proj.weight.new_empty((batch, self.kv_heads, 0, self.head_dim))
        return Cache(key=empty, value=empty.new_empty((*empty.shape[:3], self.value_dim)))

    @classmethod
    def of_model(cls, shape: ModelShape) -> dict[str, AttentionLayer]:
        counts = {"MHA": shape.num_heads, "GQA": shape.kv_heads, "MQA": 1}
        return {
            name: cls(
                shape.embed_dim,
                shape.num_heads,
                kv_heads=count,
                head_dim=shape.head_dim,
                value_dim=shape.value_dim,
            )
            for name, count in counts.items()
            if name != "GQA" or count < shape.num_heads
        }

    def cost(self, batch: int, length: int, *, is_causal: bool = True) -> Cost:
        width = self.head_dim + self.value_dim
        fused = self.head_dim == self.value_dim
        pairs = computed_pairs(length, is_causal, fused)
        return layer_cost(
            self, batch, length, self.num_heads * pairs * width, self.kv_heads * width
        )


@register_layer
class GroupedTiedAttention(AttentionLayer):
    r"""Grouped-tied attention (GTA): one tensor per head is value, and key but for its last part.

    A token leaves a vector c of D numbers for every key head, and one rotated key r of d_r numbers
    for all of them, which stands in the key where c has its last d_r entries:

    .. math:: v = c, \qquad k = [c_1, \dots, c_{D - d_r}, r], \qquad
              r = \mathrm{RoPE}(W^R x), \qquad s_{ij} = \mathrm{scale}\; q_i \cdot k_j .

    The last d_r entries of every query are rotated too. What is kept is half of what GQA keeps,
    and d_r numbers more. Two forms give the same answer: the expanded one forms keys, the absorbed
    one reads c as key and as value (see `numattn.engines.latent`).

    Parameters: ``q_proj`` (H D, embed_dim), ``kv_proj`` (Hk D, embed_dim), ``k_rope_proj``
    (d_r, embed_dim), ``o_proj`` (embed_dim, H D).

    Cost: the projections, and 4 H P D operations for P pairs of tokens, in either form. ``forward``
    takes the expanded form where there are no earlier tokens, because torch's fused kernel serves
    it, and else the absorbed one, which copies nothing that is kept. Decoding keeps Hk D + d_r
    numbers per token.

    Exact when: always; it is GQA with key and value tied as above.

    Limits: a layer with keys and values of their own cannot be brought to this form without loss;
    it has to be trained so. Tokens that a state holds have no gradient.

    References:
        T. Zadouri, H. Strauss and T. Dao, "Hardware-Efficient Attention for Fast Decoding", 2025,
        https://arxiv.org/abs/2505.21487.

    Example:
        >>> layer = GroupedTiedAttention(32, 4, kv_heads=2, head_dim=8)
        >>> state = layer.state()
        >>> layer(torch.randn(1, 10, 32), state=state).shape
        torch.Size([1, 10, 32])
        >>> state["latent"].shape, state["rope"].shape
        (torch.Size([1, 2, 10, 8]), torch.Size([1, 1, 10, 4]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int,
        head_dim: int,
        rope_dim: int | None = None,
        rotary: Rotary | None = None,
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        """Make the projections, drawn as `torch.nn.Linear` draws.

        Args:
            embed_dim: Width of the hidden states.
            num_heads: H.
            kv_heads: Hk, a divisor of H.
            head_dim: D, width of a query, a key and a value.
            rope_dim: d_r, even, at most D; half of D when None.
            rotary: Rotation of `rope_dim` coordinates, by default ``Rotary(rope_dim)``.
            bias: Of all projections.
            scale: Factor of the logits; by default D ** -0.5 times what ``rotary`` asks for.
        """
        super().__init__()
        name = type(self).__name__
        rope_dim = head_dim // 2 if rope_dim is None else rope_dim
        check_sizes(name, embed_dim=embed_dim, head_dim=head_dim, rope_dim=rope_dim)
        check_shared(name, num_heads, "kv_heads", kv_heads)
        if rope_dim > head_dim:
            raise ValueError(f"{name}: rope_dim is {rope_dim}, above head_dim, {head_dim}.")
        self.rotary = Rotary(rope_dim) if rotary is None else rotary
        check_rotary(name, self.rotary, "rope_dim", rope_dim)
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.rope_dim = head_dim, rope_dim
        self.scale = head_dim**-0.5 * self.rotary.logit_factor if scale is None else scale
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.kv_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias)
        self.k_rope_proj = nn.Linear(embed_dim, rope_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias)

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
            absorbed: The absorbed form, or the expanded one; None takes the absorbed one where
                there are earlier tokens.

        Returns:
            (B, N, embed_dim).
        """
        self._check(hidden, attn_mask, state)
        if hidden.shape[1] == 0:
            return hidden
        position = positions(hidden, attn_mask, 0 if state is None else state.length)[:, None]
        plain = self.head_dim - self.rope_dim
        q = heads(self.q_proj(hidden), self.num_heads)  # (B, H, n, D)
        q, q_rope = q[..., :plain], self.rotary(q[..., plain:], position)
        latent = heads(self.kv_proj(hidden), self.kv_heads)  # (B, Hk, n, D)
        rope = self.rotary(self.k_rope_proj(hidden)[:, None], position)  # (B, 1, n, d_r)
        if state is not None:
            cache = extend(self, state, latent=latent, rope=rope)
            latent, rope, is_causal = cache["latent"], cache["rope"], True
        if absorbed is None:
            absorbed = latent.shape[2] > hidden.shape[1]
        attend = _tied_absorbed if absorbed else _tied_expanded
        bias = key_bias(None if attn_mask is None else attn_mask[:, 0], hidden)
        out = attend(q, q_rope, latent, rope, self.scale, bias, is_causal)
        return self.o_proj(joined(out))

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens: ``latent`` (B, Hk, 0, D) and ``rope`` (B, 1, 0, d_r)."""
        latent = self.o_proj.weight.new_empty((batch, self.kv_heads, 0, self.head_dim))
        return Cache(latent=latent, rope=latent.new_empty((batch, 1, 0, self.rope_dim)))

    @classmethod
    def of_model(cls, shape: ModelShape) -> dict[str, AttentionLayer]:
        if shape.kv_heads == shape.num_heads or shape.value_dim != shape.head_dim:
            return {}  # nothing to tie: keys have another width than values, or are not shared
        layer = cls(
            shape.embed_dim,
            shape.num_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rope_dim=shape.rope_dim,
        )
        return {"GTA": layer}

    def cost(
        self, batch: int, length: int, *, is_causal: bool = True, absorbed: bool | None = None
    ) -> Cost:
        """What a call without a state costs, as `AttentionLayer.cost`, in either form."""
        pairs = computed_pairs(length, is_causal, fused=not absorbed)
        units = self.kv_heads * self.head_dim + self.rope_dim
        return layer_cost(self, batch, length, self.num_heads * pairs * 2 * self.head_dim, units)


@register_layer
class GroupedLatentAttention(MultiheadLatentAttention):
    r"""Grouped latent attention (GLA): G latents beside one another, each for H / G heads.

    A token leaves G latents and one rotated key for all heads,

    .. math:: [\tilde c_1, \dots, \tilde c_G, \tilde r] = W^{DKV} x, \quad
              c_g = \mathrm{RMSNorm}_g(\tilde c_g), \quad r = \mathrm{RoPE}(\tilde r), \quad
              [k_h, v_h] = [U^K_h; U^V_h]\, c_{\lfloor h\, G / H \rfloor},

    and the rest is as in `MultiheadLatentAttention`, which is G = 1 with the same parameters. A
    head attends to one latent only, so machines that share the heads among them need not each
    keep all that a token leaves; and in the absorbed form a pair costs 2 d_c + d_r of the narrower
    latent.

    Parameters have the names of `MultiheadLatentAttention`. ``kv_a_proj_with_mqa`` is
    (G d_c + d_r, embed_dim), ``kv_a_layernorm`` (G d_c,), and ``kv_b_proj`` (H (d_n + d_v), d_c),
    of whose rows every head applies its own to its latent.

    Cost: as `MultiheadLatentAttention` with the d_c of one latent; in the forms, too. Decoding
    keeps G d_c + d_r numbers per token.

    Exact when: as `MultiheadLatentAttention`, with H / G heads to a latent.

    Limits: those of `MultiheadLatentAttention`. At the same size of the cache, keys and values of a
    head come from a latent of 1 / G of the width.

    References:
        T. Zadouri, H. Strauss and T. Dao, "Hardware-Efficient Attention for Fast Decoding", 2025,
        https://arxiv.org/abs/2505.21487.

    Example:
        >>> layer = GroupedLatentAttention(32, 4, kv_rank=16, head_dim=8, rope_dim=4, value_dim=8)
        >>> state = layer.state()
        >>> layer(torch.randn(1, 10, 32), state=state).shape, state["latent"].shape
        (torch.Size([1, 10, 32]), torch.Size([1, 1, 10, 36]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_latents: int = 2,
        kv_rank: int = 256,
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
            num_latents: G, a divisor of H.
            kv_rank: d_c, width of each latent.
            head_dim: d_n, as in `MultiheadLatentAttention`, like all that follow.
            rope_dim: d_r.
            value_dim: d_v.
            query_rank: Width of a latent of the queries, or None.
            rotary: Rotation of `rope_dim` coordinates.
            latent_norm: Normalise each latent of keys and values, before it is kept.
            norm_eps: Added to mean squares that latents are normalised by, which may be zero.
            bias: Of ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj``.
            scale: Factor of the logits.
        """
        super().__init__(
            embed_dim,
            num_heads,
            kv_rank=kv_rank,
            head_dim=head_dim,
            rope_dim=rope_dim,
            value_dim=value_dim,
            query_rank=query_rank,
            rotary=rotary,
            latent_norm=False,
            norm_eps=norm_eps,
            bias=bias,
            scale=scale,
        )
        check_shared(type(self).__name__, num_heads, "num_latents", num_latents)
        self.num_latents = num_latents
        width = num_latents * kv_rank
        self.kv_a_proj_with_mqa = nn.Linear(embed_dim, width + rope_dim, bias=bias)
        self.kv_a_layernorm = _LatentNorm(num_latents, kv_rank, norm_eps) if latent_norm else None

    @classmethod
    def of_model(cls, shape: ModelShape) -> dict[str, AttentionLayer]:
        layer = cls(
            shape.embed_dim,
            shape.num_heads,
            num_latents=2,
            kv_rank=shape.group_latent_dim,
            head_dim=shape.plain_dim,
            rope_dim=shape.rope_dim,
            value_dim=shape.value_dim,
            query_rank=shape.query_rank,
        )
        return {"GLA-2": layer}


class _LatentNorm(nn.RMSNorm):
    """Normalisation of each of several vectors that stand side by side, (..., count * width)."""

    def __init__(self, count: int, width: int, eps: float) -> None:
        super().__init__(count * width, eps=eps)
        self.split = (count, width)

    def forward(self, x: Tensor) -> Tensor:
        each = F.rms_norm(x.unflatten(-1, self.split), self.split[1:], eps=self.eps)
        return each.flatten(-2) * self.weight


def _tied_absorbed(
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    scale: float,
    bias: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Attention of (B, H, n, ...) to (B, Hk, M, D), whose first entries are the key."""
    dtype, group = compute_dtype(q.dtype), q.shape[1] // latent.shape[1]
    out, _ = latent_attention(
        fold(q, group).to(dtype),
        fold(q_rope, group).to(dtype),
        latent,
        rope,
        scale=scale,
        bias=bias,
        is_causal=is_causal,
        first=latent.shape[2] - q.shape[2],
        group=group,
    )
    return unfold(out, group).to(q.dtype)


def _tied_expanded(
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    scale: float,
    bias: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """What `_tied_absorbed` gives, with keys put together."""
    query = torch.cat([q, q_rope], 3)
    shared = rope.expand(-1, latent.shape[1], -1, -1)
    key = torch.cat([latent[..., : q.shape[3]], shared], 3)
    return grouped_attention(query, key, latent, scale=scale, bias=bias, is_causal=is_causal)
