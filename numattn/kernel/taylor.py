"""Taylor features: the exponential of softmax replaced by its Taylor polynomial (Based)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, positive, prepare
from numattn.core.linalg import best_logits, draw, existing
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, Feature, SlotsState, linear_attention

INFO = Info(
    name="taylor",
    family="kernel",
    summary="Taylor polynomial of the exponential, as monomials of projected tokens (Based)",
    paper="https://arxiv.org/abs/2402.18668",
    complexity="N d d' + N m e, m = C(d' + g, g)",
    budget="feature_dim",
    approximates="own",
    causal="native",
    mask="padding",
    fits_causal=True,
    state_tensors=("query_projection", "key_projection", "key_mean"),
)


def taylor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    degree: Literal[1, 2, 3] = 2,
    feature_dim: int | None = None,
    center: bool = False,
    query_projection: Tensor | None = None,
    key_projection: Tensor | None = None,
    key_mean: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention whose weights are a Taylor polynomial of the logits.

    With projections :math:`A, B` (D x d') of a key head, and :math:`\bar k` subtracted from its
    keys, the weights are

    .. math:: w_{ij} = T_g(u_{ij}) = \sum_{t=0}^{g} \frac{u_{ij}^t}{t!}, \qquad
              u_{ij} = \mathrm{scale}\; (q_i A) \cdot ((k_j - \bar k) B),

    divided by their sum over j. The polynomial is an inner product of monomials,

    .. math:: T_g(x \cdot y) = \sum_{|\alpha| \le g} \frac{1}{\alpha!}\, x^\alpha y^\alpha,

    of which there are m = C(d' + g, g) when each is kept once (153 for d' = 16 and g = 2), so
    attention takes linear time and decoding keeps m slots.

    There are two uses. As a layer of a model that is trained with it, A and B are learned and d'
    is about 16 (Based; `TaylorAttention` owns them). In the place of softmax, on logits that are
    small, no training is needed: with d' = D nothing but the remainder of the series is lost,

    .. math:: |e^u - T_g(u)| \le \frac{|u|^{g+1}}{(g+1)!}\, e^{\max(u, 0)},

    and ``center`` takes out of the logits what softmax does not see.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        degree: g, 1, 2 or 3. At 2 every weight is at least 1/2 before it is divided; at 1 and 3
            weights may be negative.
        feature_dim: d', positive; more than D is the same as D. None means D, and then nothing is
            projected unless projections are given.
        center: Subtract the mean of the keys that exist; in a causal call needs ``key_mean``.
            False, as in Based, contradicts a given ``key_mean``.
        query_projection: A, (Hk, D, d') or (B, Hk, D, d'), given together with
            ``key_projection``. Where none is given and d' < D, they are fitted to the batch:
            the best approximation of rank d' of the logits of each sequence and key head.
        key_projection: B, of the same shape.
        key_mean: :math:`\bar k`, (Hk, D) or (B, Hk, D); found in the batch when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are
            equally many, it speaks of both for the fit.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5: that of the full width, at any d'.
        enable_gqa: Allow H to be a multiple of Hk. The heads of a group share the projections.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 N m (E + 1) operations for queries, 2 N m E for keys, and 2 N D d' for both to project;
    causal adds 2 N CHUNK (m + E), fitting 2 N D^2 for both. Decoding keeps m (E + 2) numbers per
    key head. At d' = D = 64, m is 65, 2145 and 47905 for degrees 1, 2 and 3.

    Exact when: always; the formula is the definition, and whole, causal and step-by-step calls
    agree to rounding. It is softmax only in the limit of small logits.

    Limits: a polynomial is not sharp. On logits above 2 or so degree 2 has lost the softmax (at
    u = 5 it gives 18.5 for 148), and it rises again below u = -1: keys that softmax ignores get
    more weight the more they are opposed. Relative to :math:`e^u` the remainder is below 1 above
    zero and unbounded below, so ``center`` does not help where it moves positive logits to both
    sides of zero. Where no weight is negative, a row's total variation distance from softmax is at
    most the mean of :math:`|1 - e^{-u} T_g(u)|` under the softmax. Degrees 1 and 3 may have a sum
    of weights near or below zero; it is divided by as it is, and the row is then meaningless.
    Monomials cancel where :math:`s = \mathrm{scale}\, |q A|\, |(k - \bar k) B|` is far above the
    logits: weights are off by about eps :math:`s^g`.

    The best rank d' for all logits is not the best for the large ones. Projections and means that
    are fitted are constants for autograd.

    Raises:
        ValueError: An option is not of the range above, or tensors do not fit or belong together.
        Unsupported: A mask other than key padding, or a causal call that would have to fit.

    References:
        S. Arora et al., "Simple linear attention language models balance the recall-throughput
        tradeoff", 2024, https://arxiv.org/abs/2402.18668.
        J. Alman, Z. Song, "Fast Attention Requires Bounded Entries", 2023,
        https://arxiv.org/abs/2302.13214.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> taylor_attention(q, k, v, feature_dim=4, center=True).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Taylor(degree, feature_dim, center)
    projections = {"query_projection": query_projection, "key_projection": key_projection}
    tensors = _given(options, x, {**projections, "key_mean": key_mean})
    missing = _missing(options, x.k.shape[3], tensors)
    if is_causal:
        _refuse_missing(missing, "a causal call")
    if x.empty:
        return x.nothing()
    if missing:
        fitted = _fit(options, x, tensors)
        tensors |= {name: fitted[name].to(x.k) for name in missing}
    phi, psi = _features(x.scale, degree, tensors, x.k)
    out = linear_attention(
        x.q,
        x.k,
        x.v,
        phi,
        psi,
        log=False,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=2 * options.num_features(x.k.shape[3]),  # products, and those joined
    )
    return x.restore(out)


def _features(
    scale: float, degree: int, tensors: dict[str, Tensor], like: Tensor
) -> tuple[Feature, Feature]:
    """Monomials of queries and, over the factorials of their exponents, of keys like `like`."""
    a, b, mean = (tensors.get(name) for name in INFO.state_tensors)
    towards = None if a is None else (scale * a).mT
    width = like.shape[3] if b is None else b.shape[-1]
    weight = _inverse_factorials(width, degree, like.device).to(like)[:, None]

    def phi(q: Tensor) -> Tensor:
        return _monomials(scale * q.mT if towards is None else towards @ q.mT, degree).mT

    def psi(k: Tensor) -> Tensor:
        y = k.mT if mean is None else (k - mean[..., None, :]).mT
        return _monomials(y if b is None else b.mT @ y, degree).mul_(weight).mT

    return phi, psi


def _monomials(x: Tensor, degree: int) -> Tensor:
    """Monomials of degree 0 to g, each once: (..., d, n) -> (..., C(d + g, g), n).

    Those of one degree are in the order of their first variable, so that variable i times all that
    begin with i or a later one is a product with the end of a block. Tokens come last: every
    product runs along contiguous memory.
    """
    x = x.contiguous()
    width = x.shape[-2]
    products = [x]
    blocks = [torch.ones_like(x[..., :1, :]), x]
    for t in range(1, degree):
        last = torch.cat(products, -2)
        ends = [math.comb(width - i + t - 1, t) for i in range(width)]
        products = [x[..., i : i + 1, :] * last[..., -end:, :] for i, end in enumerate(ends)]
        blocks += products
    return torch.cat(blocks, -2)


def _inverse_factorials(width: int, degree: int, device: torch.device) -> Tensor:
    """1 / alpha! of the monomials x^alpha, in the order of `_monomials`: float64 (m,)."""
    # At the point where variable i is 2 and the others are 1, a monomial is 2 ** alpha_i.
    points = 1 + torch.eye(width, dtype=torch.float64, device=device)
    exponents = _monomials(points, degree).log2()  # (m, width)
    return (-torch.lgamma(exponents + 1)).sum(-1).exp()


def _given(options: Taylor, x: Inputs, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors that were given, checked, in the type of computation."""
    given = {name: tensor.to(x.k) for name, tensor in tensors.items() if tensor is not None}
    if ("query_projection" in given) != ("key_projection" in given):
        raise ValueError("taylor: pass query_projection and key_projection together, or neither.")
    if "key_mean" in given and not options.center:
        raise ValueError("taylor: a given key_mean needs center=True.")
    batch, heads, _, dim = x.k.shape
    for name, tensor in given.items():
        want = (heads, dim) if name == "key_mean" else (heads, dim, options.width(dim))
        if tensor.shape not in (want, (batch, *want)):
            raise ValueError(
                f"taylor: {name} must have shape {want} or {(batch, *want)}; "
                f"got {tuple(tensor.shape)}."
            )
    return given


def _missing(options: Taylor, dim: int, given: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that the options ask for and that were not given."""
    missing = []
    if options.width(dim) < dim and "key_projection" not in given:
        missing += ["query_projection", "key_projection"]
    if options.center and "key_mean" not in given:
        missing += ["key_mean"]
    return missing


@torch.no_grad()
def _fit(options: Taylor, x: Inputs, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is given, and what is missing of each sequence and key head in float64."""
    missing = _missing(options, x.k.shape[3], given)
    tensors = {name: tensor.double() for name, tensor in given.items()}
    q, k = existing(x.q, x.query_padding), existing(x.k, x.padding)
    if "key_mean" in missing:
        tensors["key_mean"] = k.sum(2) / x.num_keys.clamp(min=1)[..., None]
    if "key_projection" in missing:
        mean = tensors.get("key_mean")
        k = k if mean is None else existing(k - mean[..., None, :], x.padding)
        _, a, b = best_logits(q.mT @ q, k.mT @ k)
        width = options.width(k.shape[3])
        tensors |= {"query_projection": a[..., :width], "key_projection": b[..., :width]}
    return tensors


@register
@dataclass(frozen=True)
class Taylor(Method):
    """Options of `taylor_attention`."""

    degree: Literal[1, 2, 3] = 2
    feature_dim: int | None = None
    center: bool = False
    info = INFO
    function = staticmethod(taylor_attention)

    def __post_init__(self) -> None:
        if type(self.degree) is not int or self.degree not in (1, 2, 3):
            raise ValueError(f"taylor: degree must be 1, 2 or 3; got {self.degree!r}.")
        if self.feature_dim is not None:
            positive(INFO.name, "feature_dim", self.feature_dim)
        if not isinstance(self.center, bool):
            raise ValueError(f"taylor: center must be True or False; got {self.center!r}.")

    def width(self, head_dim: int) -> int:
        """The width d' that comes of a head's."""
        return head_dim if self.feature_dim is None else min(self.feature_dim, head_dim)

    def num_features(self, head_dim: int) -> int:
        """How many monomials there are, m."""
        return math.comb(self.width(head_dim) + self.degree, self.degree)

    @property
    def fitted(self) -> bool:
        """At the full width and without a mean there is nothing to fit."""
        return self.center or self.feature_dim is not None

    def cost(self, shape: Shape) -> Cost:
        """Projecting is counted where d' < D, fitting where the call is not causal either."""
        d, e = shape.head_dim, shape.value_dim
        width, m = self.width(d), self.num_features(d)
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * m * (shape.rows * (e + 1) + keys * e)
        if width < d:
            flops += 2 * (shape.rows + keys) * d * (width if shape.is_causal else width + d)
        if shape.is_causal:
            flops += 2 * shape.rows * min(CHUNK, shape.keys) * (m + e)
        cache = shape.batch * shape.kv_heads * m * (e + 2) * max(shape.itemsize, 4)
        return Cost(flops, shape.io, cache, units=m)

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
        return _fit(self, prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa), {})

    def module(self, *, num_heads: int, head_dim: int) -> TaylorAttention:
        return TaylorAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        given = _given(self, x, {**tensors})
        _refuse_missing(_missing(self, key.shape[3], given), "decoding")
        kept = {name: tensor.detach().clone() for name, tensor in given.items()}
        phi, psi = _features(x.scale, self.degree, kept, x.k)
        slots = self.num_features(key.shape[3])
        return SlotsState(key, value, phi, psi, log=False, num_slots=slots)


def _refuse_missing(missing: list[str], what: str) -> None:
    """Raise where tensors that the options ask for were not given to a call that must not fit."""
    if missing:
        raise Unsupported(
            f"taylor: {what} needs {', '.join(missing)}, which found in the batch would let the "
            "future in; pass them (Taylor.fit on a sample finds them), or use TaylorAttention."
        )


class TaylorAttention(AttentionModule):
    """`taylor_attention` with projections that are learned (Based).

    Parameters: ``query_projection`` and ``key_projection`` (Hk, D, d'). Both start at one random
    matrix with orthogonal columns of length (D / d') ** (1/4), so that at the default scale the
    logits are :math:`d'^{-1/2}` times the product of the projected tokens, as in the paper.
    Buffer, with ``center``: ``key_mean`` (Hk, D), zero until `calibrate` sets it.
    """

    options: Taylor
    key_mean: Tensor | None

    def __init__(
        self, *, num_heads: int, head_dim: int, generator: Generator | None = None, **options: Any
    ) -> None:
        """Draw the projections.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            generator: Source of the draw.
            **options: Options of `Taylor`.
        """
        super().__init__()
        self.options = Taylor(**options)
        shape = (num_heads, head_dim, self.options.width(head_dim))
        self.query_projection = nn.Parameter(torch.empty(shape))
        self.key_projection = nn.Parameter(torch.empty(shape))
        mean = torch.zeros(num_heads, head_dim) if self.options.center else None
        self.register_buffer("key_mean", mean)
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: Generator | None = None) -> None:
        """Start again from a new random matrix."""
        shape = self.query_projection.shape
        columns = torch.linalg.qr(draw(tuple(shape), generator, self.query_projection.device)).Q
        columns = columns * (shape[1] / shape[2]) ** 0.25
        self.query_projection.copy_(columns)
        self.key_projection.copy_(columns)

    @torch.no_grad()
    def calibrate(
        self,
        query: Tensor,
        key: Tensor,
        *,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Set projections and mean from sample tokens, (B, H, N, D) and (B, Hk, N, D).

        The projections become those that `taylor_attention` fits, with the whole batch as one
        sample; at d' = D they are the identity.
        """
        x = prepare(INFO, query, key, key, attn_mask, False, None, enable_gqa).joined()
        eye = torch.eye(key.shape[3])
        tensors = {"query_projection": eye, "key_projection": eye}
        tensors |= {name: tensor[0] for name, tensor in _fit(self.options, x, {}).items()}
        for name, tensor in tensors.items():
            getattr(self, name).copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        return {n: t for n in INFO.state_tensors if (t := getattr(self, n)) is not None}
