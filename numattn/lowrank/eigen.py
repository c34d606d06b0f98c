"""Eigen attention: keys and values of low rank, in bases found by SVD of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape, visible_pairs
from numattn.core.info import Info
from numattn.core.inputs import (
    Inputs,
    Unsupported,
    fold,
    one_of,
    positive,
    prepare,
    unfold,
)
from numattn.core.linalg import best_logits, existing, falling_eigh
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.softmax import fused_attention, key_bias, softmax_attention

INFO = Info(
    name="eigen",
    family="lowrank",
    summary="keys and values of low rank, in bases found by SVD of samples (Eigen Attention)",
    paper="https://arxiv.org/abs/2408.05646",
    complexity="N^2 (r + r_V) + N (d r + e r_V)",
    budget="rank",
    approximates="softmax",
    causal="native",
    mask="full",
    linear_in_value=False,
    bounded=False,
    fits_causal=True,
    state_tensors=("query_basis", "key_basis", "value_basis", "value_mean"),
)

Weighting = Literal["joint", "query", "none"]

_WEIGHTINGS = ("joint", "query", "none")

_WIDEST = 1 << 16  # no head is wider, so it stands for D


def eigen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 32,
    value_rank: int | None = None,
    weighting: Weighting = "joint",
    center: bool = False,
    query_basis: Tensor | None = None,
    key_basis: Tensor | None = None,
    value_basis: Tensor | None = None,
    value_mean: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Softmax attention on keys and values of low rank (Eigen Attention).

    With matrices :math:`A, B` (D x r) of a key head, and C (E x r_V) with orthonormal columns,
    queries meet keys in r dimensions and values are summed up in r_V:

    .. math:: s_{ij} = \mathrm{scale}\; (q_i A) \cdot (k_j B), \qquad
              o_i = \Big( \sum_j \mathrm{softmax}_j(s_{ij})\, v_j C \Big) C^T ,

    so that decoding keeps r + r_V numbers of a token instead of D + E. They come from a sample: C
    are the leading right singular vectors of its values, and ``weighting`` says of which error A
    and B make the least:

    - ``"joint"``: of queries and keys projected on one space. A = B = U, the leading right singular
      vectors of [Q; K], as in the paper;
    - ``"query"``: of the logits, :math:`\sum_{ij} (q_i \cdot k_j - q_i A \cdot k_j B)^2`. With
      :math:`Q^T Q = W W^T`, B = W U and :math:`A = W^{-T} U`, where U are the leading right
      singular vectors of K W. On the sample itself this is the truncated SVD of :math:`Q K^T`, the
      best there is (KQ-SVD);
    - ``"none"``: of the keys projected. A = B = U, the leading right singular vectors of K.

    The softmax does not see a vector that is added to every key, and weights that sum to one let
    the mean value :math:`\bar v` pass. ``center`` takes the means out of the sample before the SVD
    and adds :math:`\bar v - \bar v C C^T` to every output, so that no component is spent on them.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: r, positive; more than D is the same as D.
        value_rank: r_V, positive; more than E is the same as E. None means ``rank``.
        weighting: ``"joint"``, ``"query"`` or ``"none"``; read where bases are fitted.
        center: Fit to keys and values less their means; read where bases are fitted. The paper
            does not. False contradicts a given ``value_mean``.
        query_basis: A, (Hk, D, r) or (B, Hk, D, r), given together with ``key_basis``. Where none
            of the four is given, all are fitted on the batch, to each sequence and key head.
        key_basis: B, of the same shape.
        value_basis: C, (Hk, E, r_V) or (B, Hk, E, r_V). None beside given bases of queries and
            keys keeps values whole, whatever ``value_rank`` says.
        value_mean: :math:`\bar v`, (Hk, 1, E) or (B, Hk, 1, E); None beside given bases is zero.
        attn_mask: bool (True = attend) or float to add to the logits, broadcastable to
            (B, H, Nq, Nk); may be combined with ``is_causal``. Of the masks only key padding,
            (B, 1, 1, Nk) bool, keeps tokens out of the fit; where queries and keys are equally
            many it speaks of both.
        is_causal: Position i attends to positions j <= i; needs given bases.
        scale: Factor of the logits, default D ** -0.5: that of the full width, at any rank.
        enable_gqa: Allow H to be a multiple of Hk. The heads of a group share the bases, which are
            fitted to the queries of all of them.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 Nq Nk (r + r_V) operations per query head, half of it when causal, and
    2 (Nq + Nk) (D r + E r_V) to project; fitting takes 2 (Nq + Nk) D^2 + 2 Nk E^2 more, in float64.
    Torch's fused kernel serves calls without a mask whose ranks are equal. Decoding keeps r + r_V
    numbers per token and key head.

    Exact when: r >= D and r_V >= E; or bases are fitted to keys that lie in r dimensions (for
    ``"joint"`` together with the queries) and to values that lie in r_V, with ``center`` both less
    their means.

    Limits: where the logits of a row are off by u_j, its total variation distance is at most
    tanh((max u - min u) / 4), and the values add at most the largest :math:`|v_j - v_j C C^T|`. The
    fit minds all pairs and tokens alike, the softmax does not. A sink draws most of the weight and
    has a value near zero: zero stays zero in any C, but ``center`` moves it to what C leaves out of
    :math:`\bar v`, and may multiply the error. ``"joint"`` depends on how large queries are beside
    keys, which the logits do not; ``"none"`` minds directions that no query looks at. Values of
    trained models are less compressible than keys, so that r_V costs most.

    A, B and C can be multiplied into the weights of a model where nothing lies between; keys that
    were rotated (RoPE) are compressed as they come. The weights have full rank at any r, which is
    the rank of the logits: the truncated SVD of the weights is no bound. Bases that are fitted are
    constants for autograd.

    Raises:
        ValueError: An option is not of the range above, or tensors do not fit or belong together.
        Unsupported: A causal call without bases.

    References:
        U. Saxena, G. Saha, S. Choudhary, K. Roy, "Eigen Attention: Attention in Low-Rank Space for
        KV Cache Compression", 2024, https://arxiv.org/abs/2408.05646.
        D. Lesens, B. T. Rakhshan, G. Rabusseau, "KQ-SVD: Compressing the KV Cache with Provable
        Guarantees on Attention Fidelity", 2025, https://arxiv.org/abs/2512.05916.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> eigen_attention(q, k, v, rank=4, weighting="query").shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Eigen(rank, value_rank, weighting, center)
    bases = _given(options, x.k, x.v, query_basis, key_basis, value_basis, value_mean)
    if bases is None and is_causal:
        raise Unsupported(
            "eigen: bases fitted on the batch of a causal call would let the future in; pass "
            "query_basis, key_basis, value_basis and value_mean (Eigen.fit on a sample finds "
            "them), or use EigenAttention."
        )
    if x.empty:
        return x.nothing()
    if bases is None:
        bases = _fit(options, x).to(x.k)
    k, v = bases.tokens(x.k, x.v)
    return x.restore(_attend(bases, replace(x, k=k, v=v)))


def eigen_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    energy: float,
    *,
    weighting: Weighting = "joint",
    center: bool = False,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
) -> tuple[int, int]:
    r"""The least ranks that keep a share of the energy of a sample, in every head.

    The energy is the sum of the squares of the singular values: of [Q; K], of the logits or of the
    keys, as ``weighting`` says, and of the values. What a rank leaves out of it is the squared
    error of the fit, so at ``energy`` = 0.99 the relative error is 0.1 or less.

    Args:
        query: (B, H, Nq, D); the whole batch is one sample.
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        energy: In (0, 1].
        weighting: As in `eigen_attention`.
        center: As in `eigen_attention`.
        attn_mask: Key padding, as in `eigen_attention`.
        enable_gqa: As in `eigen_attention`.

    Returns:
        ``rank`` and ``value_rank`` for `eigen_attention`: the largest over the heads, so that all
        have one shape.

    Example:
        >>> k = torch.randn(1, 2, 100, 3) @ torch.randn(3, 8)
        >>> v = torch.randn(1, 2, 100, 2) @ torch.randn(2, 8)
        >>> eigen_ranks(k, k, v, 1.0)
        (3, 2)
    """
    if isinstance(energy, bool) or not isinstance(energy, (int, float)) or not 0 < energy <= 1:
        raise ValueError(f"eigen: energy must be a number in (0, 1]; got {energy!r}.")
    x = prepare(INFO, query, key, value, attn_mask, False, None, enable_gqa).joined()
    options = Eigen(weighting=weighting, center=center)
    keys, values = _key_spectrum(options, x)[0], _value_spectrum(options, x)[0]
    return _least_rank(keys, energy), _least_rank(values, energy)


def _least_rank(energies: Tensor, share: float) -> int:
    """Of falling energies (..., D), how many sum up to a share of all, in every row."""
    kept = energies.cumsum(-1)
    missing = kept < share * (1 - 1e-12) * kept[..., -1:]  # the sum of all may be rounded up
    return int(missing.sum(-1).max()) + 1


@dataclass(frozen=True)
class _Bases:
    """The state tensors; their leading dimensions are (Hk,) or (B, Hk).

    Attributes:
        query_basis: (..., D, r).
        key_basis: (..., D, r).
        value_basis: (..., E, r_V); None keeps values whole.
        value_mean: (..., 1, E); None is zero.
    """

    query_basis: Tensor
    key_basis: Tensor
    value_basis: Tensor | None
    value_mean: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by keyword."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def to(self, like: Tensor) -> _Bases:
        """In the type and on the device of `like`."""
        return replace(self, **{name: tensor.to(like) for name, tensor in self.tensors().items()})

    def tokens(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed keys (B, Hk, N, r) and values (B, Hk, N, r_V or E)."""
        return k @ self.key_basis, v if self.value_basis is None else v @ self.value_basis


def _attend(bases: _Bases, x: Inputs) -> Tensor:
    """Attend from whole queries to compressed keys and values: (B, Hk, Nq * group, E)."""
    q = x.q @ bases.query_basis
    out = lse = None
    if x.padding is None and x.mask is None and not x.empty:
        heads = unfold(q, x.group)
        out = fused_attention(heads, x.k, x.v, is_causal=x.is_causal, scale=x.scale)
    if out is not None:
        out = fold(out, x.group)
    else:
        out, lse = softmax_attention(
            q,
            x.k,
            x.v,
            scale=x.scale,
            bias=key_bias(x.padding, q),
            mask=x.mask,
            is_causal=x.is_causal,
            group=x.group,
        )
    if bases.value_basis is None:
        return out
    out = out @ bases.value_basis.mT
    if bases.value_mean is None:
        return out
    # The weights of a row sum to one: what the basis leaves out of the mean is the same in every
    # row that has a key.
    outside = bases.value_mean - bases.value_mean @ bases.value_basis @ bases.value_basis.mT
    if lse is None:
        return out + outside
    return torch.where((lse == -torch.inf)[..., None], out, out + outside)


@torch.no_grad()
def _fit(options: Eigen, x: Inputs) -> _Bases:
    """Bases of each sequence and key head, float64, leading dimensions (B, Hk)."""
    r, r_v = options.ranks(x.k.shape[3], x.v.shape[3])
    _, query_basis, key_basis = _key_spectrum(options, x)
    _, value_basis, mean = _value_spectrum(options, x)
    return _Bases(
        query_basis[..., :r].contiguous(),
        key_basis[..., :r].contiguous(),
        value_basis[..., :r_v].contiguous(),
        mean,
    )


def _key_spectrum(options: Eigen, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Energies (B, Hk, D), falling, and bases of queries and keys (B, Hk, D, D) in their order."""
    k, _ = _sample(options, x, x.k)
    keys = k.mT @ k
    if options.weighting == "none":
        energies, basis = falling_eigh(keys)
        return energies, basis, basis
    q = existing(x.q, x.query_padding)
    queries = q.mT @ q
    if options.weighting == "joint":
        energies, basis = falling_eigh(queries + keys)
        return energies, basis, basis
    return best_logits(queries, keys)


def _value_spectrum(options: Eigen, x: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Energies (B, Hk, E), falling, their basis (B, Hk, E, E), and the mean (B, Hk, 1, E)."""
    v, mean = _sample(options, x, x.v)
    return *falling_eigh(v.mT @ v), mean


def _sample(options: Eigen, x: Inputs, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys or values of x to fit to, and the mean (B, Hk, 1, D) if it was taken out of them."""
    tokens = existing(tokens, x.padding)
    if not options.center:
        return tokens, None
    mean = tokens.sum(2, keepdim=True) / x.num_keys.clamp(min=1)[..., None, None]
    return existing(tokens - mean, x.padding), mean


def _given(
    options: Eigen,
    k: Tensor,
    v: Tensor,
    query_basis: Tensor | None = None,
    key_basis: Tensor | None = None,
    value_basis: Tensor | None = None,
    value_mean: Tensor | None = None,
) -> _Bases | None:
    """The tensors that were given, in the type of computation; None when none was."""
    if query_basis is None or key_basis is None:
        if all(t is None for t in (query_basis, key_basis, value_basis, value_mean)):
            return None
        raise ValueError(
            "eigen: pass query_basis and key_basis together, with or without value_basis and "
            "value_mean, or none of the four to fit them."
        )
    if value_mean is not None and (value_basis is None or not options.center):
        raise ValueError("eigen: value_mean is for a given value_basis and center=True.")
    bases = _Bases(query_basis, key_basis, value_basis, value_mean)
    batch, heads, _, dim = k.shape
    width = v.shape[3]
    r, r_v = options.ranks(dim, width)
    tails = {"query_basis": (dim, r), "key_basis": (dim, r), "value_basis": (width, r_v)}
    tails["value_mean"] = (1, width)
    for name, tensor in bases.tensors().items():
        want = (heads, *tails[name])
        if tensor.shape not in (want, (batch, *want)):
            raise ValueError(
                f"eigen: {name} must have shape {want} or {(batch, *want)}; "
                f"got {tuple(tensor.shape)}."
            )
    return bases.to(k)


@register
@dataclass(frozen=True)
class Eigen(Method):
    """Options of `eigen_attention`."""

    rank: int = 32
    value_rank: int | None = None
    weighting: Weighting = "joint"
    center: bool = False
    info = INFO
    function = staticmethod(eigen_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "rank", self.rank)
        if self.value_rank is not None:
            positive(INFO.name, "value_rank", self.value_rank)
        one_of(INFO.name, "weighting", self.weighting, _WEIGHTINGS)
        if not isinstance(self.center, bool):
            raise ValueError(f"eigen: center must be True or False; got {self.center!r}.")

    def ranks(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """The ranks r and r_V that come of these widths."""
        value_rank = self.rank if self.value_rank is None else self.value_rank
        return min(self.rank, head_dim), min(value_rank, value_dim)

    def exact_at(self, length: int) -> Eigen:
        return replace(self, rank=max(length, _WIDEST), value_rank=None)

    def cost(self, shape: Shape) -> Cost:
        """Fitting the bases is counted where the call is not causal."""
        d, e = shape.head_dim, shape.value_dim
        r, r_v = self.ranks(d, e)
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * visible_pairs(shape) * (r + r_v)
        flops += 2 * (shape.rows + keys) * (d * r + e * r_v)
        if not shape.is_causal:
            flops += 2 * keys * (d * d + e * e)
            flops += 0 if self.weighting == "none" else 2 * shape.rows * d * d
        return Cost(flops, shape.io, keys * (r + r_v) * shape.itemsize, units=r)

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
            raise ValueError("eigen: fit needs value, whose basis it finds.")
        x = prepare(INFO, query, key, value, attn_mask, False, scale, enable_gqa)
        return _fit(self, x).tensors()

    def module(self, *, num_heads: int, head_dim: int) -> EigenAttention:
        return EigenAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        bases = _given(self, x.k, x.v, **tensors)
        if bases is None:
            raise Unsupported(
                "eigen: decoding needs bases that no later token changes; pass query_basis, "
                "key_basis, value_basis and value_mean (Eigen.fit on a sample finds them), or use "
                "EigenAttention.state."
            )
        return _EigenState(bases, key, value, x.scale, enable_gqa)


class _EigenState(State):
    """Compressed keys and values, in the type of the tokens."""

    def __init__(
        self, bases: _Bases, key: Tensor, value: Tensor, scale: float, enable_gqa: bool
    ) -> None:
        self._bases, self._scale, self._enable_gqa = bases, scale, enable_gqa
        self._widths = key.shape[3], value.shape[3]
        self._keys, self._values = (Buffer(t) for t in self._compressed(key, value))

    @torch.no_grad()
    def _compressed(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        x = prepare(INFO, key, key, value, None, False, None, False)
        k, v = self._bases.tokens(x.k, x.v)
        return k.to(key.dtype), v.detach().to(key.dtype)

    def append(self, key: Tensor, value: Tensor) -> None:
        k, v = self._compressed(key, value)
        self._keys.append(k)
        self._values.append(v)

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        kept = self._keys.tensor, self._values.tensor
        key, value = (
            t.new_empty((*t.shape[:2], 0, n)) for t, n in zip(kept, self._widths, strict=True)
        )
        x = prepare(INFO, query, key, value, None, False, self._scale, self._enable_gqa)
        x = replace(x, k=kept[0].to(x.q), v=kept[1].to(x.q))
        return x.restore(_attend(self._bases, x))

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes


class EigenAttention(AttentionModule):
    """`eigen_attention` with bases that are fitted to a sample and saved with the model.

    Buffers: ``query_basis`` and ``key_basis`` (Hk, D, r), ``value_basis`` (Hk, E, r_V) and, with
    ``center``, ``value_mean`` (Hk, 1, E). Until `calibrate` sets them, the first two keep the
    leading r coordinates, and the others are None: values are kept whole.
    """

    options: Eigen
    query_basis: Tensor
    key_basis: Tensor
    value_basis: Tensor | None
    value_mean: Tensor | None

    def __init__(self, *, num_heads: int, head_dim: int, **options: Any) -> None:
        """Keep the leading coordinates.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            **options: Options of `Eigen`.
        """
        super().__init__()
        self.options = Eigen(**options)
        leading = torch.eye(head_dim, min(self.options.rank, head_dim))
        self.register_buffer("query_basis", leading.repeat(num_heads, 1, 1))
        self.register_buffer("key_basis", leading.repeat(num_heads, 1, 1))
        self.register_buffer("value_basis", None)
        self.register_buffer("value_mean", None)

    def calibrate(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Fit the bases to sample tokens, (B, H, N, D), (B, Hk, N, D) and (B, Hk, N, E).

        The whole batch is one sample. ``attn_mask`` as in a call; padding moves nothing.
        """
        x = prepare(INFO, query, key, value, attn_mask, False, None, enable_gqa).joined()
        for name, tensor in _fit(self.options, x).tensors().items():
            setattr(self, name, tensor[0].to(self.key_basis))

    def tensors(self) -> dict[str, Tensor]:
        return {n: t for n in INFO.state_tensors if (t := getattr(self, n)) is not None}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # The width of values is known where they were calibrated.
        for name in ("value_basis", "value_mean"):
            saved = state_dict.get(prefix + name)
            room = None if saved is None else self.key_basis.new_empty(saved.shape)
            setattr(self, name, room)
        super()._load_from_state_dict(state_dict, prefix, *args)
