"""Performer (FAVOR+): softmax attention through positive random features, and its variants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, one_of, positive, prepare
from numattn.core.linalg import affine
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, Feature, LogLinear, SlotsState, linear_attention
from numattn.kernel.random_features import (
    DRAWS,
    Draw,
    Kind,
    Precondition,
    Statistics,
    damp,
    damping_of,
    directions,
    preconditioner,
    predict,
)

INFO = Info(
    name="performer",
    family="kernel",
    summary="positive orthogonal random features of the exponential kernel (FAVOR+)",
    paper="https://arxiv.org/abs/2009.14794",
    complexity="N m (d + e)",
    budget="num_features",
    approximates="softmax",
    causal="native",
    mask="padding",
    random=True,
    state_tensors=("projection", "center", "balance", "damping"),
)

DAMPED = ("favor++", "anisotropic")  # kinds with a damping A, which is a statistic


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_features: int = 256,
    kind: Literal["positive", "hyperbolic", "favor++", "anisotropic"] = "positive",
    draw: Literal["orthogonal", "independent", "simplex", "qmc"] = "orthogonal",
    precondition: Literal["auto", "balance", "shift", "none"] = "auto",
    projection: Tensor | None = None,
    center: Tensor | None = None,
    balance: Tensor | None = None,
    damping: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""FAVOR+ approximation of softmax attention, and three kinds of features of less variance.

    With :math:`x = \sqrt{\mathrm{scale}}\, q` and :math:`y = \sqrt{\mathrm{scale}}\, k`,

    .. math:: e^{x \cdot y} = \mathbb{E}_{\omega \sim N(0, I)}
              \left[ e^{\omega \cdot x - |x|^2 / 2}\; e^{\omega \cdot y - |y|^2 / 2} \right],

    so m draws of :math:`\omega` give m positive features and attention in linear time. The
    features stay logarithms until they are summed: there is no epsilon and nothing overflows.

    One feature has relative variance :math:`e^{|x + y|^2} - 1`. Attention is unchanged by
    :math:`y \to y - c` and by :math:`x \to M^T x, y \to M^{-1} y`; ``precondition`` chooses
    c = mean(x) + mean(y), and M to make the mean of :math:`|x + y|^2` least. ``kind`` chooses
    among features that are all positive and unbiased:

    - ``"positive"``: those above.
    - ``"hyperbolic"``: m / 2 directions, each with both signs: the variance above times
      :math:`1 - e^{-|x + y|^2}`, and half the work for the features.
    - ``"favor++"``: :math:`e^{A |\omega|^2 + \sqrt{1 - 4A}\, \omega \cdot x - |x|^2 / 2}`, where
      :math:`A \le 0` minimises the mean logarithm of the second moment.
    - ``"anisotropic"``: the same with a number A for each axis of the eigenbasis of the mean of
      :math:`(x + y)(x + y)^T`. It plays the part of the dense-exponential features of FAVOR#, but
      is not their published closed form.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_features: m, positive; even for ``"hyperbolic"``.
        kind: The features, see above.
        draw: How the directions are drawn; each is N(0, I) whatever is chosen. ``"orthogonal"`` in
            blocks of D, which lowers the variance; ``"independent"``; ``"simplex"``, in blocks of
            D the corners of a regular simplex (D >= 2); ``"qmc"``, normal quantiles of randomised
            Sobol points.
        precondition: ``"balance"`` (shift and M), ``"shift"`` (M = I) or ``"none"``. ``"auto"``
            is ``"balance"``, but ``"none"`` in a causal call without ``center`` and ``balance``:
            statistics of the batch would let the future in.
        projection: :math:`\omega`, (Hk, m, D), or (Hk, m / 2, D) for ``"hyperbolic"``; drawn when
            None.
        center: c in units of ``key``, (Hk, D) or (B, Hk, D); computed from the batch when None.
        balance: M, (Hk, D, D) or (B, Hk, D, D); computed from the batch when None.
        damping: A of ``"favor++"`` and ``"anisotropic"`` as a symmetric matrix with eigenvalues
            below 1/8, (Hk, D, D) or (B, Hk, D, D), for vectors after preconditioning; computed
            from the batch when None, but not in a causal call.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: 2 N m (D + E) operations for queries and for keys; decoding keeps m (E + 2) numbers per
    key head. Causal adds 2 N CHUNK (m + E).

    Exact when: never at finite m; numerator and denominator are unbiased. The error falls as
    m ** -0.5.

    Limits: to reach relative accuracy eps takes about :math:`e^{|x + y|^2} / eps^2` features.
    On heads of trained models :math:`|x + y|^2` is often above 20, and then no affordable m gives
    the softmax: `expected_error` and `numattn.measure.diagnose` say so beforehand. A key unlike
    all others, such as an attention sink, is moved far out by a shift towards the others, and its
    weight is then lost: ``precondition="none"`` is better there. A makes a mean logarithm over all
    pairs least, not the error of the output, which need not gain. c, M and A computed from the
    batch are constants for autograd. With ``scale < 0`` the features are those of -q.

    Raises:
        Unsupported: A mask other than key padding, or a preconditioner or a damping asked of a
            causal call that does not give it.
        ValueError: An odd number of hyperbolic features; tensors that contradict the options.

    References:
        K. Choromanski et al., "Rethinking Attention with Performers", 2021,
        https://arxiv.org/abs/2009.14794.

        V. Likhosherstov et al., "Chefs' Random Tables: Non-Trigonometric Random Features", 2022,
        https://arxiv.org/abs/2205.15317 (FAVOR++).

        V. Likhosherstov et al., "FAVOR#: Sharp Attention Kernel Approximations via New Classes of
        Positive Random Features", 2023, https://arxiv.org/abs/2302.00787.

        I. Reid et al., "Simplex Random Features", 2023, https://arxiv.org/abs/2301.13856.

    Example:
        >>> q = k = v = torch.zeros(1, 2, 5, 8)
        >>> performer_attention(q, k, v, num_features=16).shape
        torch.Size([1, 2, 5, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Performer(num_features, kind, draw, precondition)
    if x.empty:
        return x.nothing()
    if projection is None:
        projection = options.directions(x.k.shape[1], x.k.shape[3], generator, x.k.device)
    tensors = Statistics(center, balance, damping)
    _check_tensors(x, options, projection, tensors)
    tensors = _settle(x, options, tensors)
    phi, psi = _features(x.scale, kind, projection, tensors, x.q.dtype)
    out = linear_attention(
        x.q,
        x.k,
        x.v,
        phi,
        psi,
        log=True,
        owned=True,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=num_features,
    )
    return x.restore(out)


class ExpectedError(NamedTuple):
    """What `expected_error` returns, each (B, H), float64.

    Attributes:
        log10: Decimal logarithm of the relative standard deviation; -inf where it is 0.
        mean: Mean of :math:`|x + y|^2` over the pairs.
        median: Its median.
        q95: Its 95 % quantile.
    """

    log10: Tensor
    mean: Tensor
    median: Tensor
    q95: Tensor


@torch.no_grad()
def expected_error(
    query: Tensor,
    key: Tensor,
    *,
    num_features: int = 256,
    kind: Literal["positive", "hyperbolic", "favor++", "anisotropic"] = "positive",
    precondition: Literal["auto", "balance", "shift", "none"] = "auto",
    center: Tensor | None = None,
    balance: Tensor | None = None,
    damping: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    max_tokens: int = 1024,
) -> ExpectedError:
    r"""How far one unnormalised weight of `performer_attention` lies from :math:`e^{x \cdot y}`.

    It is the root of the mean, over pairs of a query and a key, of the relative variance of the
    estimate of one weight: :math:`(e^{|x + y|^2} - 1) / m` for positive features, after
    preconditioning. That is exact for ``draw="independent"``; the other draws are mostly a little
    better. The worst pairs dominate it. Errors of the weights average out in part in the output, so
    an output may still be of use where this is above 1 (``log10`` above 0); but not where a few
    weights carry a row, which then are what is lost.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        num_features: m.
        kind: As in `performer_attention`, like all that follow but the last.
        precondition: Which c and M, where none is given.
        center: c, (Hk, D) or (B, Hk, D).
        balance: M, (Hk, D, D) or (B, Hk, D, D).
        damping: A, (Hk, D, D) or (B, Hk, D, D).
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Only pairs with j <= i, and no statistics of the batch.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.
        max_tokens: Of more queries or keys than that, as many are taken at even distances.

    Returns:
        `ExpectedError`, one number of each sort per query head; NaN where there is no pair.

    Cost: 2 n^2 D operations per head for n = min(N, max_tokens), in float64.

    Raises:
        Unsupported: As in `performer_attention`.
        ValueError: As in `performer_attention`.

    Example:
        >>> q = k = torch.zeros(1, 1, 4, 8).index_fill_(3, torch.tensor(0), 3.0)
        >>> error = expected_error(q, k, num_features=100, precondition="none", scale=1.0)
        >>> round(error.mean.item()), round(error.log10.item(), 3)  # (36 / ln 10 - 2) / 2
        (36, 6.817)
    """
    positive(INFO.name, "max_tokens", max_tokens)
    x = prepare(INFO, query, key, key, attn_mask, is_causal, scale, enable_gqa)
    options = Performer(num_features, kind, "independent", precondition)
    tensors = Statistics(center, balance, damping)
    _check_tensors(x, options, None, tensors)
    if x.empty:
        nothing = query.new_full((*query.shape[:2], 4), torch.nan, dtype=torch.float64)
        return ExpectedError(*nothing.unbind(-1))
    found = predict(x, num_features, kind == "hyperbolic", _settle(x, options, tensors), max_tokens)
    return ExpectedError(*found.unbind(-1))


def _settle(x: Inputs, options: Performer, given: Statistics) -> Statistics:
    """Complete the state tensors from the batch, unless that would let the future in."""
    if x.empty:
        return given
    precondition, (center, balance, damping) = options.precondition, given
    if center is None and balance is None:
        if precondition == "auto":
            precondition = "none" if x.is_causal else "balance"
        elif x.is_causal and precondition != "none":
            raise Unsupported(
                f"performer: precondition={precondition!r} in a causal call would take statistics "
                "of the future; pass center and balance (PerformerAttention.calibrate finds them)."
            )
        center, balance = preconditioner(x, precondition)
    if options.kind in DAMPED and damping is None:
        if x.is_causal:
            raise Unsupported(
                f"performer: the damping of kind={options.kind!r} in a causal call would take "
                "statistics of the future; pass it (PerformerAttention.calibrate finds it)."
            )
        damping = damping_of(x, options.kind, Statistics(center, balance))
    return Statistics(center, balance, damping)


def _features(
    scale: float, kind: Kind, projection: Tensor, tensors: Statistics, dtype: torch.dtype
) -> tuple[Feature, Feature]:
    """Log-features of queries and of keys. Terms that are constant along a query's row cancel."""
    center, balance, damping = tensors
    root = abs(scale) ** 0.5
    offset = None
    if damping is not None:
        projection, offset = damp(projection, damping)
        offset = offset.to(dtype)[..., None, :]
    projection = projection.to(dtype)
    towards = projection if balance is None else projection @ balance.to(dtype).mT
    towards = (towards * math.copysign(root, scale)).mT  # omega . (M^T x) = (M omega) . x
    # Without M, y is k - c: the root goes into omega, and its square into |y|^2 / 2.
    back, omega, half = None, projection.mT * root, root * root / 2
    signs = kind == "hyperbolic"
    if balance is not None:
        back = torch.linalg.inv(balance.double()).mT.to(dtype) * root
        omega, half = projection.mT, 0.5

    def both_signs(logs: Tensor) -> Tensor:
        return torch.cat((logs, -logs), -1)

    def psi(k: Tensor) -> Tensor:
        y = k if center is None else k - center.to(k)[..., None, :]
        if back is not None:
            y = y @ back
        norms = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square() * -half
        logs = both_signs(y @ omega).add_(norms) if signs else affine(y, omega, norms)
        return logs if offset is None else logs.add_(offset)

    if signs:
        return lambda q: both_signs(q @ towards), psi
    return LogLinear(towards), psi


def _check_tensors(
    x: Inputs, options: Performer, projection: Tensor | None, tensors: Statistics
) -> None:
    """Refuse tensors of a wrong shape, and those that the options leave no use for."""
    batch, heads, _, dim = x.k.shape
    for name, tensor, tail in (
        ("projection", projection, (options.num_directions, dim)),
        ("center", tensors.center, (dim,)),
        ("balance", tensors.balance, (dim, dim)),
        ("damping", tensors.damping, (dim, dim)),
    ):
        if tensor is not None and tensor.shape not in ((heads, *tail), (batch, heads, *tail)):
            raise ValueError(
                f"performer: {name} must have shape {(heads, *tail)}; got {tuple(tensor.shape)}."
            )
    shifted = tensors.center is not None or tensors.balance is not None
    if options.precondition == "none" and shifted:
        raise ValueError("performer: precondition='none' contradicts a given center or balance.")
    if options.kind not in DAMPED and tensors.damping is not None:
        raise ValueError(
            f"performer: kind={options.kind!r} takes no damping; 'favor++' and 'anisotropic' do."
        )


@register
@dataclass(frozen=True)
class Performer(Method):
    """Options of `performer_attention`."""

    num_features: int = 256
    kind: Kind = "positive"
    draw: Draw = "orthogonal"
    precondition: Precondition = "auto"
    info = INFO
    function = staticmethod(performer_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "num_features", self.num_features)
        one_of(INFO.name, "kind", self.kind, ("positive", "hyperbolic", *DAMPED))
        one_of(INFO.name, "draw", self.draw, DRAWS)
        one_of(INFO.name, "precondition", self.precondition, ("auto", "balance", "shift", "none"))
        if self.kind == "hyperbolic" and self.num_features % 2:
            raise ValueError(
                "performer: num_features must be even for kind='hyperbolic', whose features come "
                f"in pairs; got {self.num_features}."
            )

    @property
    def num_directions(self) -> int:
        """Rows of the projection of one head."""
        return self.num_features // 2 if self.kind == "hyperbolic" else self.num_features

    @property
    def fitted(self) -> bool:
        """Whether a causal call needs tensors fitted beforehand."""
        return self.kind in DAMPED

    def directions(
        self, num_heads: int, head_dim: int, generator: Generator | None, device: torch.device
    ) -> Tensor:
        """A projection, float64 (Hk, directions, D)."""
        return directions(self.draw, self.num_directions, head_dim, num_heads, generator, device)

    def cost(self, shape: Shape) -> Cost:
        m, d, e = self.num_features, shape.head_dim, shape.value_dim
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * (shape.rows + keys) * (self.num_directions * d + m * e)
        balanced = self.precondition in ("auto", "balance")
        if shape.is_causal:
            flops += 2 * shape.rows * min(CHUNK, shape.keys) * (m + e)
        elif balanced:
            flops += 2 * (shape.rows + 2 * keys) * d * d
        if not shape.is_causal and self.kind in DAMPED:
            flops += 2 * (shape.rows + keys) * (1 + balanced) * d * d
        cache = shape.batch * shape.kv_heads * m * (e + 2) * 4
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
        x = prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa)
        projection = self.directions(x.k.shape[1], x.k.shape[3], generator, x.k.device)
        found = _settle(x, self, Statistics())._asdict()
        return {"projection": projection} | {n: t for n, t in found.items() if t is not None}

    def module(self, *, num_heads: int, head_dim: int) -> PerformerAttention:
        return PerformerAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        x = prepare(INFO, key, key, value, None, False, scale, enable_gqa)
        projection = tensors.pop("projection", None)
        if projection is None:
            projection = self.directions(x.k.shape[1], x.k.shape[3], None, x.k.device)
        given = Statistics(**tensors)
        _check_tensors(x, self, projection, given)
        if self.kind in DAMPED and given.damping is None:
            raise Unsupported(
                f"performer: decoding with kind={self.kind!r} needs its damping; pass it "
                "(PerformerAttention.calibrate finds it)."
            )
        phi, psi = _features(x.scale, self.kind, projection, given, x.k.dtype)
        return SlotsState(key, value, phi, psi, log=True, num_slots=self.num_features)


class PerformerAttention(AttentionModule):
    """`performer_attention` with a projection that is drawn once and saved with the model.

    Buffers: ``projection`` (Hk, directions, D); ``center`` (Hk, D) and ``balance`` (Hk, D, D),
    which are the identity until `calibrate` sets them; and for the kinds that have it ``damping``
    (Hk, D, D), which is 0 until then (the features are FAVOR+'s).
    """

    options: Performer
    projection: Tensor
    center: Tensor
    balance: Tensor

    def __init__(
        self, *, num_heads: int, head_dim: int, generator: Generator | None = None, **options: Any
    ) -> None:
        """Draw a projection.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            generator: Source of the draw.
            **options: Options of `Performer`.
        """
        super().__init__()
        self.options = Performer(**options)
        eye = torch.eye(head_dim)
        self.register_buffer(
            "projection", torch.empty(num_heads, self.options.num_directions, head_dim)
        )
        self.register_buffer("center", torch.zeros(num_heads, head_dim))
        self.register_buffer("balance", eye.repeat(num_heads, 1, 1))
        if self.options.kind in DAMPED:
            self.register_buffer("damping", torch.zeros(num_heads, head_dim, head_dim))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: Generator | None = None) -> None:
        """Draw a new projection."""
        heads, _, dim = self.projection.shape
        device = self.projection.device
        self.projection.copy_(self.options.directions(heads, dim, generator, device))

    @torch.no_grad()
    def calibrate(
        self,
        query: Tensor,
        key: Tensor,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Set preconditioner and damping from sample tokens, (B, H, N, D) and (B, Hk, N, D)."""
        x = prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa).joined()
        if x.empty:
            raise ValueError("performer: calibrate needs at least one query and one key.")
        for name, tensor in _settle(x, self.options, Statistics())._asdict().items():
            if tensor is not None:
                self.get_buffer(name).copy_(tensor[0])

    def tensors(self) -> dict[str, Tensor]:
        found = dict(self.named_buffers())
        if self.options.precondition == "none":
            del found["center"], found["balance"]
        return found
