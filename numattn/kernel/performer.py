"""Performer (FAVOR+): softmax attention through positive random features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, one_of, positive, prepare
from numattn.core.linalg import draw, masked_mean, orthogonal_gaussian
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, Feature, SlotsState, linear_attention

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
    state_tensors=("projection", "center", "balance"),
)


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_features: int = 256,
    orthogonal: bool = True,
    precondition: Literal["auto", "balance", "shift", "none"] = "auto",
    projection: Tensor | None = None,
    center: Tensor | None = None,
    balance: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""FAVOR+ approximation of softmax attention.

    With :math:`x = \sqrt{\mathrm{scale}}\, q` and :math:`y = \sqrt{\mathrm{scale}}\, k`,

    .. math:: e^{x \cdot y} = \mathbb{E}_{\omega \sim N(0, I)}
              \left[ e^{\omega \cdot x - |x|^2 / 2}\; e^{\omega \cdot y - |y|^2 / 2} \right],

    so m draws of :math:`\omega` give m positive features and attention in linear time. The
    features stay logarithms until they are summed: there is no epsilon and nothing overflows.

    One feature has relative variance :math:`e^{|x + y|^2} - 1`. Attention is unchanged by
    :math:`y \to y - c` and by :math:`x \to M^T x, y \to M^{-1} y`; ``precondition`` chooses
    c = mean(x) + mean(y), and M to make the mean of :math:`|x + y|^2` least.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_features: m, positive.
        orthogonal: Draw directions orthogonal in blocks of D, which lowers the variance.
        precondition: ``"balance"`` (shift and M), ``"shift"`` (M = I) or ``"none"``. ``"auto"``
            is ``"balance"``, but ``"none"`` in a causal call without ``center`` and ``balance``:
            statistics of the batch would let the future in.
        projection: :math:`\omega`, (Hk, m, D); drawn when None.
        center: c in units of ``key``, (Hk, D) or (B, Hk, D); computed from the batch when None.
        balance: M, (Hk, D, D) or (B, Hk, D, D); computed from the batch when None.
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
    the softmax: measure before replacing it. c and M computed from the batch are constants for
    autograd.

    Raises:
        Unsupported: A mask other than key padding, or a preconditioner asked of a causal call.

    References:
        K. Choromanski et al., "Rethinking Attention with Performers", 2021,
        https://arxiv.org/abs/2009.14794.

    Example:
        >>> q = k = v = torch.zeros(1, 2, 5, 8)
        >>> performer_attention(q, k, v, num_features=16).shape
        torch.Size([1, 2, 5, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    positive(INFO.name, "num_features", num_features)
    one_of(INFO.name, "precondition", precondition, ("auto", "balance", "shift", "none"))
    if x.empty:
        return x.nothing()
    if projection is None:
        projection = _draw(x, num_features, orthogonal, generator)
    _check_tensors(x, num_features, projection, center, balance)
    if center is None and balance is None:
        if precondition == "auto":
            precondition = "none" if is_causal else "balance"
        elif is_causal and precondition != "none":
            raise Unsupported(
                f"performer: precondition={precondition!r} in a causal call would take statistics "
                "of the future; pass center and balance (PerformerAttention.calibrate finds them)."
            )
        center, balance = _preconditioner(x, precondition)
    elif precondition == "none":
        raise ValueError("performer: precondition='none' contradicts a given center or balance.")
    phi, psi = _features(x.scale, projection.to(x.q), center, balance)
    out = linear_attention(
        x.q,
        x.k,
        x.v,
        phi,
        psi,
        log=True,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=num_features,
    )
    return x.restore(out)


def _features(
    scale: float, projection: Tensor, center: Tensor | None, balance: Tensor | None
) -> tuple[Feature, Feature]:
    """Log-features of queries and of keys. Terms that are constant along a query's row cancel."""
    root = abs(scale) ** 0.5
    towards = projection if balance is None else projection @ balance.to(projection).mT
    towards = (towards * (scale / root if root else 0.0)).mT  # omega . (M^T x) = (M omega) . x
    back = None
    if balance is not None:
        back = torch.linalg.inv(balance.double()).mT.to(projection) * root
    omega = projection.mT

    def phi(q: Tensor) -> Tensor:
        return q @ towards

    def psi(k: Tensor) -> Tensor:
        y = k if center is None else k - center.to(k)[..., None, :]
        y = y * root if back is None else y @ back
        return (y @ omega).sub_((y * y).sum(-1, keepdim=True) / 2)

    return phi, psi


def _draw(x: Inputs, num_features: int, orthogonal: bool, generator: Generator | None) -> Tensor:
    heads, dim = x.k.shape[1], x.k.shape[3]
    if orthogonal:
        return orthogonal_gaussian(num_features, dim, heads, generator, x.k.device)
    return draw((heads, num_features, dim), generator, x.k.device)


@torch.no_grad()
def _preconditioner(x: Inputs, kind: str) -> tuple[Tensor | None, Tensor | None]:
    """Center c (B, Hk, D), and M (B, Hk, D, D) that minimises tr(M^T Sq M) + tr(M^-1 Sk M^-T).

    With Sq = L L^T and the eigenvalues U Z U^T of L^T Sk L, the minimiser is M = L^-T U Z^(1/4).
    """
    if kind == "none":
        return None, None
    q, k = x.q.double(), x.k.double()
    sign = -1.0 if x.scale < 0 else 1.0  # x = sign * root * q, y = root * k
    center = sign * masked_mean(q, x.query_padding) + masked_mean(k, x.padding)
    if kind == "shift":
        return center[:, :, 0], None
    factor = torch.linalg.cholesky(_second_moment(q, x.query_padding))
    moment = factor.mT @ _second_moment(k - center, x.padding) @ factor
    values, vectors = torch.linalg.eigh(moment)
    right = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)
    return center[:, :, 0], right * values.clamp(min=values[..., -1:] * 1e-12)[..., None, :] ** 0.25


def _second_moment(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean of x x^T over the tokens that exist, made definite by a millionth of its mean."""
    if padding is None:
        moment = x.mT @ x / x.shape[2]
    else:
        x = x * padding[..., None]
        moment = x.mT @ x / padding.sum(-1).clamp(min=1)[..., None, None]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(x.shape[3], dtype=x.dtype, device=x.device)
    return moment + (1e-6 * mean + 1e-30) * eye


def _check_tensors(
    x: Inputs, num_features: int, projection: Tensor, center: Tensor | None, balance: Tensor | None
) -> None:
    batch, heads, _, dim = x.k.shape
    for name, tensor, tail in (
        ("projection", projection, (num_features, dim)),
        ("center", center, (dim,)),
        ("balance", balance, (dim, dim)),
    ):
        if tensor is not None and tensor.shape not in ((heads, *tail), (batch, heads, *tail)):
            raise ValueError(
                f"performer: {name} must have shape {(heads, *tail)}; got {tuple(tensor.shape)}."
            )


@register
@dataclass(frozen=True)
class Performer(Method):
    """Options of `performer_attention`."""

    num_features: int = 256
    orthogonal: bool = True
    precondition: Literal["auto", "balance", "shift", "none"] = "auto"
    info = INFO
    function = staticmethod(performer_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "num_features", self.num_features)
        one_of(INFO.name, "precondition", self.precondition, ("auto", "balance", "shift", "none"))

    def cost(self, shape: Shape) -> Cost:
        m, d, e = self.num_features, shape.head_dim, shape.value_dim
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * (shape.rows + keys) * m * (d + e)
        if shape.is_causal:
            flops += 2 * shape.rows * min(CHUNK, shape.keys) * (m + e)
        elif self.precondition in ("auto", "balance"):
            flops += 2 * (shape.rows + 2 * keys) * d * d
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
        tensors = {"projection": _draw(x, self.num_features, self.orthogonal, generator)}
        kind = "balance" if self.precondition == "auto" else self.precondition
        center, balance = _preconditioner(x, kind)
        tensors |= {} if center is None else {"center": center}
        return tensors | ({} if balance is None else {"balance": balance})

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
        projection = tensors.get("projection")
        if projection is None:
            projection = _draw(x, self.num_features, self.orthogonal, None)
        center, balance = tensors.get("center"), tensors.get("balance")
        _check_tensors(x, self.num_features, projection, center, balance)
        phi, psi = _features(x.scale, projection.to(x.k), center, balance)
        return SlotsState(key, value, phi, psi, log=True, num_slots=self.num_features)


class PerformerAttention(AttentionModule):
    """`performer_attention` with a projection that is drawn once and saved with the model.

    Buffers: ``projection`` (Hk, m, D); ``center`` (Hk, D) and ``balance`` (Hk, D, D), which are
    the identity until `calibrate` sets them.
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
            "projection", torch.empty(num_heads, self.options.num_features, head_dim)
        )
        self.register_buffer("center", torch.zeros(num_heads, head_dim))
        self.register_buffer("balance", eye.repeat(num_heads, 1, 1))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: Generator | None = None) -> None:
        """Draw a new projection."""
        heads, rows, dim = self.projection.shape
        if self.options.orthogonal:
            fresh = orthogonal_gaussian(rows, dim, heads, generator, self.projection.device)
        else:
            fresh = draw((heads, rows, dim), generator, self.projection.device)
        self.projection.copy_(fresh)

    @torch.no_grad()
    def calibrate(self, query: Tensor, key: Tensor, *, enable_gqa: bool = False) -> None:
        """Set the preconditioner from sample tokens, (B, H, N, D) and (B, Hk, N, D)."""

        def merge(x: Tensor) -> Tensor:
            return x.transpose(0, 1).flatten(1, 2)[None]

        q, k = merge(query), merge(key)
        x = prepare(INFO, q, k, k, None, False, None, enable_gqa)
        kind = self.options.precondition
        center, balance = _preconditioner(x, "balance" if kind == "auto" else kind)
        if center is not None:
            self.center.copy_(center[0])
        if balance is not None:
            self.balance.copy_(balance[0])

    def tensors(self) -> dict[str, Tensor]:
        if self.options.precondition == "none":
            return {"projection": self.projection}
        return {"projection": self.projection, "center": self.center, "balance": self.balance}
