"""Random feature attention: softmax of cosine similarities through random Fourier features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import positive, prepare
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, SlotsState, linear_attention

INFO = Info(
    name="rfa",
    family="kernel",
    summary="random Fourier features of a Gaussian kernel between unit vectors (RFA)",
    paper="https://arxiv.org/abs/2103.02143",
    complexity="N m (d + e)",
    budget="num_features",
    approximates="own",
    causal="native",
    mask="padding",
    random=True,
    scaled=False,
    state_tensors=("projection",),
)


def rfa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_features: int = 256,
    sigma: float = 1.0,
    projection: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Random feature attention (RFA).

    Queries and keys are divided by their norms. Between unit vectors the weights of softmax are
    those of a Gaussian kernel, up to a constant of the row,

    .. math:: e^{\hat q \cdot \hat k / \sigma^2} = e^{1 / \sigma^2}\,
              e^{-|\hat q - \hat k|^2 / (2 \sigma^2)}, \qquad
              e^{-|x|^2 / 2} = \mathbb{E}_{\omega \sim N(0, I)} \cos(\omega \cdot x) ,

    and :math:`\cos(a - b) = \cos a \cos b + \sin a \sin b` makes the mean over draws of
    :math:`\omega` an inner product of features :math:`[\cos(\omega \cdot \hat q / \sigma),
    \sin(\omega \cdot \hat q / \sigma)]`. With m features there are m / 2 draws.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_features: m, positive; odd numbers are raised to the next even one.
        sigma: Width of the kernel, positive. The paper learns it.
        projection: :math:`\omega`, (Hk, m / 2, D); drawn when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Must be None: logits are cosines over sigma squared.
        enable_gqa: Allow H to be a multiple of Hk.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: N m (D + 2 E) operations for queries and for keys; causal adds 2 N CHUNK (m + E). Decoding
    keeps m (E + 2) numbers per key head.

    Exact when: never at finite m; numerator and denominator are unbiased for the kernel between
    unit vectors. A pair of equal directions has its weight exactly, whatever the draw.

    Limits: the target is attention by cosines, not the softmax of a trained layer, which looks at
    norms: in its place it is another model, to be trained. The variance of one weight is
    :math:`(1 - \kappa^2)^2 / m` with the kernel :math:`\kappa`: the largest for far pairs, whose
    weights are the smallest. Features are signed, so estimated weights of far keys are of either
    sign; where :math:`\kappa` is small nearly everywhere, as for small sigma, the denominator may
    be small or negative. It is divided by as it is. A vector of zeros stays zero. The gate of the
    paper, which
    forgets, is not included.

    Raises:
        Unsupported: A scale, or a mask other than key padding.
        ValueError: An option is not of the range above, or ``projection`` is not of its shape.

    References:
        H. Peng et al., "Random Feature Attention", 2021, https://arxiv.org/abs/2103.02143.
        A. Rahimi, B. Recht, "Random Features for Large-Scale Kernel Machines", 2007.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> rfa_attention(q, k, v, num_features=64).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = RFA(num_features, sigma)
    if x.empty:
        return x.nothing()
    phi = _Fourier(fill(options, {"projection": projection}, x.k, generator)["projection"], sigma)
    out = linear_attention(
        x.q,
        x.k,
        x.v,
        phi,
        phi,
        log=False,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=options.width,
    )
    return x.restore(out)


@dataclass(frozen=True)
class _Fourier:
    """Features of a tile of tokens: (B, Hk, n, D) -> (B, Hk, n, m)."""

    projection: Tensor
    sigma: float

    def __call__(self, x: Tensor) -> Tensor:
        towards = self.projection.to(x).mT / self.sigma
        angles = F.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny) @ towards
        # Of equal norm for every token: the mean over the draws is their inner product.
        return torch.cat([angles.cos(), angles.sin()], -1) * self.projection.shape[-2] ** -0.5


@register
@dataclass(frozen=True)
class RFA(Method):
    """Options of `rfa_attention`."""

    num_features: int = 256
    sigma: float = 1.0
    info = INFO
    function = staticmethod(rfa_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "num_features", self.num_features)
        if not isinstance(self.sigma, (int, float)) or not 0 < self.sigma < math.inf:
            raise ValueError(f"rfa: sigma must be positive and finite; got {self.sigma!r}.")

    @property
    def width(self) -> int:
        """Features that there are, an even number."""
        return self.num_features + self.num_features % 2

    def cost(self, shape: Shape) -> Cost:
        m, d, e = self.width, shape.head_dim, shape.value_dim
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = (shape.rows + keys) * m * (d + 2 * e) + 2 * shape.rows * m
        if shape.is_causal:
            flops += 2 * shape.rows * min(CHUNK, shape.keys) * (m + e)
        cache = shape.batch * shape.kv_heads * m * (e + 2) * max(shape.itemsize, 4)
        return Cost(flops, shape.io, cache, units=m)

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        return {"projection": Draw("normal", (num_heads, self.width // 2, head_dim))}

    def module(self, *, num_heads: int, head_dim: int) -> RFAAttention:
        return RFAAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        prepare(INFO, key, key, value, None, False, scale, enable_gqa)
        projection = fill(self, {"projection": tensors.get("projection")}, key, None)["projection"]
        phi = _Fourier(projection, self.sigma)
        return SlotsState(key, value, phi, phi, log=False, num_slots=self.width)


class RFAAttention(DrawnAttention):
    """`rfa_attention` with directions that are drawn once and saved with the model.

    Buffer: ``projection`` (Hk, m / 2, D).
    """

    record = RFA
