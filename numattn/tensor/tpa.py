"""Tensor product attention: the vectors of all heads of a token are sums of products of two.

`TensorProductAttention` is the layer, `tpa_attention` factors given keys and values in this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from numattn.core.cost import Cost, Shape, visible_pairs
from numattn.core.info import Info
from numattn.core.inputs import compute_dtype, positive, prepare, unfold
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
    logit_factor,
    positions,
)
from numattn.core.linalg import falling_eigh
from numattn.core.method import Method
from numattn.core.registry import register, register_layer
from numattn.core.rotary import Rotary
from numattn.core.state import Buffer, State
from numattn.engines.latent import Factors, factored_attention, factored_flops
from numattn.engines.softmax import computed_pairs, grouped_attention, key_bias

INFO = Info(
    name="tpa",
    family="tensor",
    summary="keys and values of a token as sums of r products of heads and features (TPA)",
    paper="https://arxiv.org/abs/2501.06425",
    complexity="H N^2 (d + e) + N Hk (d + e) (min(Hk, d) + r)",
    budget="rank",
    approximates="softmax",
    causal="native",
    mask="padding",
    linear_in_value=False,
    joint=True,
    bounded=False,
)

_WIDEST = 1 << 22  # no token has more heads, so it stands for the full rank


class GroupedLayer(Protocol):
    """What `TensorProductAttention.from_grouped` reads of a layer of grouped queries."""

    embed_dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotary: Rotary | None
    scale: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


@register_layer
class TensorProductAttention(AttentionLayer):
    r"""Tensor product attention (TPA): head factors times feature factors in place of vectors.

    The queries of all heads of a token, and so its keys and its values, are a sum of R products of
    a factor over the heads and a factor over the features, both linear in the hidden state,

    .. math:: q_h = \frac{1}{R_Q} \sum_r a^Q_{rh}\, b^Q_r, \quad
              k_h = \frac{1}{R_K} \sum_s a^K_{sh}\, b^K_s, \quad
              v_h = \frac{1}{R_V} \sum_t a^V_{th}\, b^V_t, \quad
              a = W^A x, \quad b = W^B x .

    A rotation by position acts on the features only, the same in all heads, so that to rotate
    :math:`b` is to rotate every :math:`k_h`: factors are rotated before they are kept. Attention
    is the ordinary one, in two forms that give the same answer: the expanded one forms q, k and v
    of all heads, the factored one (`numattn.engines.latent`) contracts factors and forms none.

    With ``shared_heads`` the factors a are parameters, the same for all tokens, and a token leaves
    its b only; with ``shared_features`` it is the other way about. Queries with a rank of their own
    share likewise; those of ``query_rank=None`` are one projection, as in any attention layer.

    Parameters: ``q_proj``, ``k_proj`` and ``v_proj`` have two parts each, ``heads``, (R H,
    embed_dim), and ``features``, (R D, embed_dim), or (R, H) and (R, D) where they are shared;
    ``q_proj`` of a dense query is one matrix; ``o_proj`` is (embed_dim, H E).

    Cost: 2 H P (D + E) operations for P pairs of tokens, and 2 N H (R_Q D + R_K D + R_V E) to form
    q, k and v. One token that is decoded factored after M others takes about 2 M (R_Q R_K D +
    H R_K (R_Q + 1) + H R_V E). ``forward`` takes the factored form where there are earlier
    tokens. Decoding keeps (R_K + R_V) H + R_K D + R_V E numbers per token, without R H or R D for
    what is shared.

    Exact when: heads are shared and each rank is the number of key heads, see `from_grouped`.
    Multi-head, multi-query and grouped-query attention are tensor product attention of that kind.

    Limits: a trained layer with more key heads than ranks cannot be brought to this form without
    loss; `tpa_attention` tells of how much. The forms differ by rounding. Shared features are the
    same at every position, so there can be no rotation. Tokens that a state holds have no gradient.

    References:
        Y. Zhang et al., "Tensor Product Attention Is All You Need", 2025,
        https://arxiv.org/abs/2501.06425.

    Example:
        >>> layer = TensorProductAttention(32, 4, head_dim=8)
        >>> state = layer.state()
        >>> layer(torch.randn(1, 10, 32), state=state).shape
        torch.Size([1, 10, 32])
        >>> state["key_heads"].shape, state["key_features"].shape
        (torch.Size([1, 2, 10, 4]), torch.Size([1, 2, 10, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int,
        value_dim: int | None = None,
        query_rank: int | None = 6,
        key_rank: int = 2,
        value_rank: int = 2,
        shared_heads: bool = False,
        shared_features: bool = False,
        rotary: Rotary | Literal["default"] | None = "default",
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        r"""Make the projections.

        They are drawn as `torch.nn.Linear` draws, and those of factors are then scaled so that
        every factor has variance :math:`\sqrt{R / 3}` for hidden states of variance 1. The mean of
        R products has variance 1/3, that of an ordinary projection, at any rank and any number of
        heads. (Xavier's rule on the weights as tensors of three dimensions, which the authors use,
        makes logits smaller the more heads there are.) Shared factors are normal, of that variance.

        Args:
            embed_dim: Width of the hidden states.
            num_heads: H.
            head_dim: D, width of a query and a key.
            value_dim: E, width of a value; D when None.
            query_rank: R_Q, products in a query; None for queries that are not factored.
            key_rank: R_K, products in a key.
            value_rank: R_V, products in a value.
            shared_heads: The factors over heads are parameters.
            shared_features: The factors over features are; not both.
            rotary: Rotation of D coordinates, by default ``Rotary(D)``; None for no positions,
                which ``shared_features`` needs.
            bias: Of all projections.
            scale: Factor of the logits; by default D ** -0.5 times what ``rotary`` asks for.
        """
        super().__init__()
        name = type(self).__name__
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes(name, embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim)
        check_sizes(name, value_dim=value_dim, key_rank=key_rank, value_rank=value_rank)
        if shared_heads and shared_features:
            raise ValueError(
                f"{name}: with shared_heads and shared_features all tokens would be alike; choose "
                "one."
            )
        if shared_features and rotary is not None:
            raise ValueError(
                f"{name}: shared_features are the same at every position, rotary would turn them "
                "apart; pass rotary=None."
            )
        self.rotary = Rotary(head_dim) if rotary == "default" else rotary
        check_rotary(name, self.rotary, "head_dim", head_dim)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.query_rank, self.key_rank, self.value_rank = query_rank, key_rank, value_rank
        self.shared_heads, self.shared_features = shared_heads, shared_features
        self.scale = head_dim**-0.5 * logit_factor(self.rotary) if scale is None else scale

        def factored(rank: int, width: int) -> _FactorProjection:
            shared = (shared_heads, shared_features)
            return _FactorProjection(embed_dim, (num_heads, width), rank, shared, bias)

        self.q_proj: nn.Linear | _FactorProjection
        if query_rank is None:
            self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        else:
            check_sizes(name, query_rank=query_rank)
            self.q_proj = factored(query_rank, head_dim)
        self.k_proj = factored(key_rank, head_dim)
        self.v_proj = factored(value_rank, value_dim)
        self.o_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        state: LayerState | None = None,
        factored: bool | None = None,
    ) -> Tensor:
        """Attend among hidden states, as `AttentionLayer.forward`.

        Args:
            hidden: (B, N, embed_dim).
            attn_mask: bool key padding (B, 1, 1, N); not with a state.
            is_causal: Token i attends to tokens j <= i. Always so with a state.
            state: Of `state`; takes in the tokens of this call.
            factored: The factored form, or the expanded one; None takes the factored one where
                there are earlier tokens.

        Returns:
            (B, N, embed_dim).
        """
        self._check(hidden, attn_mask, state)
        if hidden.shape[1] == 0:
            return hidden
        position = positions(hidden, attn_mask, 0 if state is None else state.length)[:, None]
        q = self._queries(hidden, position)
        k, v = self._turned(self.k_proj(hidden), position), self.v_proj(hidden)
        if state is not None:
            k, v = self._extended(state, k, v)
            is_causal = True
        if factored is None:
            factored = k.length > hidden.shape[1]
        attend = _factored if factored else _expanded
        bias = key_bias(None if attn_mask is None else attn_mask[:, 0], hidden)
        return self.o_proj(joined(attend(q, k, v, self.scale, bias, is_causal)))

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens, of the factors that are not shared.

        ``key_heads`` (B, R_K, 0, H) and ``value_heads`` (B, R_V, 0, H), over R_K and R_V;
        ``key_features`` (B, R_K, 0, D), rotated, and ``value_features`` (B, R_V, 0, E).
        """
        empty = self.o_proj.weight.new_empty
        kept = self._kept().items()
        blank = {name: empty((batch, rank, 0, width)) for name, (rank, width) in kept}
        return Cache(by_token=True, **blank)

    def cost(
        self, batch: int, length: int, *, is_causal: bool = True, factored: bool | None = None
    ) -> Cost:
        """What a call without a state costs, as `AttentionLayer.cost`, in either form."""
        units = sum(rank * width for rank, width in self._kept().values())
        if factored:
            cost = layer_cost(self, batch, length, 0, units)
            products = factored_flops(*self._blank(batch, length), is_causal=is_causal)
            return replace(cost, flops=cost.flops + products)
        pairs = computed_pairs(length, is_causal, fused=self.head_dim == self.value_dim)
        products = self.num_heads * pairs * (self.head_dim + self.value_dim)
        for rank, width in self._ranks():
            if rank > 1:  # one product is no matrix product
                products += length * rank * self.num_heads * width
        return layer_cost(self, batch, length, products, units)

    @classmethod
    def of_model(cls, shape: ModelShape) -> dict[str, AttentionLayer]:
        def layer(shared_heads: bool) -> AttentionLayer:
            return cls(
                shape.embed_dim,
                shape.num_heads,
                head_dim=shape.head_dim,
                value_dim=shape.value_dim,
                shared_heads=shared_heads,
            )

        return {"TPA": layer(False), "TPA, shared heads": layer(True)}

    @classmethod
    def from_grouped(cls, layer: GroupedLayer) -> TensorProductAttention:
        r"""The same function as a layer of grouped queries, with shared heads and dense queries.

        R = Hk products, one for each key head r: its key is :math:`b_r`, and :math:`a_{rh}` is R
        where query head h reads key head r, else 0. So Hk = H is multi-head attention, Hk = 1
        multi-query attention. What a token leaves is the same too, Hk (D + E) numbers.

        Args:
            layer: With the attributes of `GroupedLayer`, such as a `GroupedQueryAttention`; H / Hk
                consecutive query heads share a key head.

        Returns:
            A layer with copies of the weights, of their type and on their device.
        """
        linear = {
            "q_proj": layer.q_proj,
            "k_proj.features": layer.k_proj,
            "v_proj.features": layer.v_proj,
            "o_proj": layer.o_proj,
        }
        bias = any(theirs.bias is not None for theirs in linear.values())
        new = cls(
            layer.embed_dim,
            layer.num_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            query_rank=None,
            key_rank=layer.kv_heads,
            value_rank=layer.kv_heads,
            shared_heads=True,
            rotary=layer.rotary,
            bias=bias,
            scale=layer.scale,
        ).to(layer.q_proj.weight)
        group = layer.num_heads // layer.kv_heads
        reads = layer.kv_heads * torch.eye(layer.kv_heads).repeat_interleave(group, 1)
        weights = {"k_proj.heads": reads, "v_proj.heads": reads}
        for place, theirs in linear.items():
            weights[f"{place}.weight"] = theirs.weight
            if bias:
                none = theirs.weight.new_zeros(theirs.out_features)
                weights[f"{place}.bias"] = none if theirs.bias is None else theirs.bias
        new.load_state_dict(weights)
        return new

    def _queries(self, hidden: Tensor, position: Tensor) -> Factors:
        """Queries, rotated."""
        if isinstance(self.q_proj, nn.Linear):
            return self._turned(Factors(None, heads(self.q_proj(hidden), self.num_heads)), position)
        return self._turned(self.q_proj(hidden), position)

    def _turned(self, x: Factors, position: Tensor) -> Factors:
        """Vectors of tokens at their positions, (B or 1, 1, N)."""
        return x if self.rotary is None else Factors(x.a, self.rotary(x.b, position))

    def _extended(self, state: LayerState, k: Factors, v: Factors) -> tuple[Factors, Factors]:
        """The factors of all tokens, after those of a call are taken in."""
        given = {n: t for n, t in zip(_NAMES, (*k, *v), strict=True) if t is not None}
        cache = extend(self, state, **{name: given[name] for name in self._kept()})
        a_k, b_k, a_v, b_v = (cache[n] if n in self._kept() else given[n] for n in _NAMES)
        return Factors(a_k, b_k), Factors(a_v, b_v)

    def _kept(self) -> dict[str, tuple[int, int]]:
        """What a token leaves, by name: the rank and the width of factors that are not shared."""
        ranks = (self.key_rank, self.key_rank, self.value_rank, self.value_rank)
        widths = (self.num_heads, self.head_dim, self.num_heads, self.value_dim)
        shared = 2 * (self.shared_heads, self.shared_features)
        rows = zip(_NAMES, ranks, widths, shared, strict=True)
        return {name: (rank, width) for name, rank, width, same in rows if not same}

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Rank and width of whatever is factored: queries, keys and values."""
        if self.query_rank is not None:
            yield self.query_rank, self.head_dim
        yield self.key_rank, self.head_dim
        yield self.value_rank, self.value_dim

    def _blank(self, batch: int, length: int) -> list[Factors]:
        """Factors of queries, keys and values of these shapes, without memory."""
        one = self.o_proj.weight.new_empty(())

        def blank(rank: int, width: int, shared: bool) -> Tensor:
            return one.expand((rank, width) if shared else (batch, rank, length, width))

        made = [
            Factors(
                blank(rank, self.num_heads, self.shared_heads),
                blank(rank, width, self.shared_features),
            )
            for rank, width in self._ranks()
        ]
        if self.query_rank is None:
            made.insert(0, Factors(None, blank(self.num_heads, self.head_dim, False)))
        return made


_NAMES = ("key_heads", "key_features", "value_heads", "value_features")


class _FactorProjection(nn.Module):
    """Factors of the vectors of a token, one for each head, from its hidden state.

    ``heads`` and ``features`` are projections, or parameters where all tokens share the factors.
    """

    heads: nn.Linear | nn.Parameter
    features: nn.Linear | nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        sizes: tuple[int, int],
        rank: int,
        shared: tuple[bool, bool],
        bias: bool,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.heads, self.features = (
            nn.Parameter(torch.empty(rank, size))
            if same
            else nn.Linear(embed_dim, rank * size, bias=bias)
            for size, same in zip(sizes, shared, strict=True)
        )
        with torch.no_grad():
            for factor in (self.heads, self.features):
                if isinstance(factor, nn.Linear):
                    factor.weight.mul_((3 * rank) ** 0.25)
                else:
                    factor.normal_(std=(rank / 3) ** 0.25)

    def forward(self, hidden: Tensor) -> Factors:
        """Factors whose sum of products is the mean of the R products."""
        a, b = (
            heads(factor(hidden), self.rank) if isinstance(factor, nn.Linear) else factor
            for factor in (self.heads, self.features)
        )
        return Factors(a / self.rank, b)


def _factored(
    q: Factors, k: Factors, v: Factors, scale: float, bias: Tensor | None, is_causal: bool
) -> Tensor:
    """Attention of the last tokens to all, (B, H, n, E), without forming keys or values."""
    out, _ = factored_attention(
        q.to(compute_dtype(q.b.dtype)),
        k,
        v,
        scale=scale,
        bias=bias,
        is_causal=is_causal,
        first=k.length - q.length,
    )
    return out.to(q.b.dtype)


def _expanded(
    q: Factors, k: Factors, v: Factors, scale: float, bias: Tensor | None, is_causal: bool
) -> Tensor:
    """What `_factored` gives, from the queries, keys and values of all heads."""
    formed = (x.expand().contiguous() for x in (q, k, v))  # of other strides, torch fuses nothing
    return grouped_attention(*formed, scale=scale, bias=bias, is_causal=is_causal)


def tpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 2,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention with the keys and the values of every token of low rank over the heads.

    The keys of a token, one for each key head, are a matrix :math:`K_j` of Hk rows and D columns.
    It is replaced by the nearest one of rank r in the Frobenius norm, its truncated singular value
    decomposition, and so is the Hk x E matrix of its values:

    .. math:: K_j \approx \sum_{s=1}^{r} a_s\, b_s^T, \qquad a_s = u_s, \quad b_s = K_j^T u_s,

    with :math:`u_s` the r leading left singular vectors. So a token is kept as in tensor product
    attention, where a layer computes such factors from its hidden states; here they are found for
    given tokens, which says how far a trained layer is from one.

    Whether keys come rotated (RoPE) or not makes no difference: a rotation turns the rows of
    :math:`K_j` alike, and the truncation with them.

    Args:
        query: (B, H, Nq, D); queries are not factored.
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: r, positive, of keys and of values; more than the smaller side of a matrix is the same
            as that.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. The Hk heads that there are are factored.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 Nq Nk (D + E) operations per query head, half of it when causal; with m = min(Hk, D) and
    M = max(Hk, D), 2 Nk m M (m + 2 r) and Nk eigendecompositions of m x m matrices in float64 for
    keys, and likewise for values. Torch's fused kernel serves calls without a mask where D = E.
    Decoding keeps r (Hk + D) numbers per token for the keys and r (Hk + E) for the values, and
    forms neither; at full rank it keeps them as they are.

    Exact when: r >= min(Hk, D) and r >= min(Hk, E); or the keys and values of every token have
    rank r.

    Limits: a whole call saves nothing, decoding saves where r (Hk + D) < Hk D. Heads are
    factored together, so a change in one moves the others, and the output is not linear in value.
    Where the logits of a row are off by u_j, its total variation distance is at most
    tanh((max u - min u) / 4), and u_j is at most scale \|q_i\| times the first singular value that
    is left out. Singular values below 1e-8 of the largest are not told apart. Nothing makes heads
    alike that were not trained to be: in a layer of SmolLM2-135M with three key heads, ranks 1 and
    2 lose 0.76 and 0.51 of the norm of the keys, of random numbers as much, and the output is off
    by about its own norm. `mla_attention`, whose basis knows more than one token, loses less there.

    The gradient is the true one, of the truncation too. It has no terms among the singular vectors
    that are kept, or among those that are left out, so equal singular values do no harm there.
    Where the last that is kept equals the first that is left out, the nearest matrix is not unique
    and has no gradient; the terms of the pair are then taken as zero, and near it they are large.
    Second derivatives are not those of the truncation.

    Raises:
        ValueError: ``rank`` is not positive, or tensors do not fit together.
        Unsupported: A mask other than key padding.

    References:
        Y. Zhang et al., "Tensor Product Attention Is All You Need", 2025,
        https://arxiv.org/abs/2501.06425.

        C. Eckart, G. Young, "The approximation of one matrix by another of lower rank", 1936,
        https://doi.org/10.1007/BF02288367.

    Example:
        >>> q, k, v = (torch.randn(1, 6, 100, 8) for _ in range(3))
        >>> tpa_attention(q, k, v, rank=2).shape
        torch.Size([1, 6, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = TPA(rank)
    if x.empty:
        return x.nothing()
    k, v = (_truncated(t, options.rank) for t in (x.k, x.v))
    bias = key_bias(x.padding, x.q)
    q = unfold(x.q, x.group)
    return grouped_attention(q, k, v, scale=x.scale, bias=bias, is_causal=x.is_causal).to(x.dtype)


def _is_whole(heads: int, width: int, rank: int) -> bool:
    """Whether a matrix of a token has no higher rank."""
    return rank >= min(heads, width)


def _truncated(x: Tensor, rank: int) -> Tensor:
    """Vectors (B, Hk, N, W), the matrix of every token replaced by the nearest of a rank."""
    if _is_whole(x.shape[1], x.shape[3], rank):
        return x
    a, b = _token_factors(x, rank)
    return (a @ b).transpose(1, 2).to(x)


def _token_factors(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Head factors (B, N, Hk, r) and feature factors (B, N, r, W), float64, of (B, Hk, N, W)."""
    matrix = x.transpose(1, 2).double()  # (B, N, Hk, W)
    if x.shape[1] <= x.shape[3]:
        a = _leading(matrix, rank)
        return a, a.mT @ matrix
    b = _leading(matrix.mT, rank)
    return matrix @ b, b.mT


def _leading(matrix: Tensor, rank: int) -> Tensor:
    r"""Leading left singular vectors of float64 matrices (..., m, M), (..., m, r).

    They are eigenvectors of the Gram matrix G. Their change within their own span changes no
    product of factors; across it, :math:`du_i = \sum_j w_j\, (w_j^T dG\, u_i) / (\lambda_i -
    \lambda_j)` over the eigenvectors :math:`w_j` that are left out. That is the gradient here.
    """
    constant = matrix.detach()
    values, axes = falling_eigh(constant @ constant.mT)
    kept, left_out = axes[..., :rank], axes[..., rank:]
    if not (torch.is_grad_enabled() and matrix.requires_grad):
        return kept
    gap = values[..., None, :rank] - values[..., rank:, None]  # (..., m - r, r)
    least = matrix.shape[-2] * torch.finfo(gap.dtype).eps * values[..., :1, None]
    weight = torch.where(gap > least, 1 / gap.clamp(min=torch.finfo(gap.dtype).tiny), 0.0)
    moved = left_out.mT @ (matrix @ (matrix.mT @ kept)) * weight  # zeros, but for rounding
    return kept + left_out @ (moved - moved.detach())


@register
@dataclass(frozen=True)
class TPA(Method):
    """Options of `tpa_attention`."""

    rank: int = 2
    info = INFO
    function = staticmethod(tpa_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "rank", self.rank)

    def exact_at(self, length: int) -> TPA:
        return replace(self, rank=_WIDEST)

    def cost(self, shape: Shape) -> Cost:
        """``units`` is the rank of a head's logits, which factors over heads do not lower."""
        heads, tokens = shape.kv_heads, shape.batch * shape.keys
        flops = 2 * visible_pairs(shape) * (shape.head_dim + shape.value_dim)
        kept = 0
        for width in (shape.head_dim, shape.value_dim):
            if _is_whole(heads, width, self.rank):
                kept += heads * width
                continue
            flops += 2 * tokens * heads * width * (min(heads, width) + 2 * self.rank)
            kept += self.rank * (heads + width)
        cache = tokens * kept * shape.itemsize
        return Cost(flops, shape.io, cache, units=shape.head_dim)

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
        return _TPAState(self.rank, key, value, scale, enable_gqa)


class _TPAState(State):
    """The factors, in the type of the tokens; whole keys or values at full rank."""

    def __init__(
        self, rank: int, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool
    ) -> None:
        self._rank, self._scale, self._enable_gqa = rank, scale, enable_gqa
        self._key, self._value = (t[:, :, :0].detach() for t in (key, value))
        self._kept = [Buffer(t) for t in self._compressed(key, value)]
        self._whole = [_is_whole(t.shape[1], t.shape[3], rank) for t in (key, value)]

    @torch.no_grad()
    def _compressed(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """What is kept of tokens, tensors (B, R, n, .): one or two of keys, then of values."""
        x = prepare(INFO, key, key, value, None, False, self._scale, False)
        kept: list[Tensor] = []
        for t in (x.k, x.v):
            if _is_whole(t.shape[1], t.shape[3], self._rank):
                kept.append(t)
            else:
                a, b = _token_factors(t, self._rank)
                kept += [a.permute(0, 3, 1, 2), b.transpose(1, 2)]
        return [t.to(key.dtype).detach() for t in kept]

    def append(self, key: Tensor, value: Tensor) -> None:
        for buffer, new in zip(self._kept, self._compressed(key, value), strict=True):
            buffer.append(new)

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        call = (None, False, self._scale, self._enable_gqa)
        x = prepare(INFO, query, self._key, self._value, *call)
        kept = (buffer.tensor for buffer in self._kept)
        k, v = (
            Factors(None, next(kept)) if whole else Factors(next(kept), next(kept))
            for whole in self._whole
        )
        out, _ = factored_attention(Factors(None, x.q), k, v, scale=x.scale)
        return x.restore(out)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._kept)
