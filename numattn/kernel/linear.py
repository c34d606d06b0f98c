"""The linear transformer: softmax replaced by the inner product of elu(x) + 1 features."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import prepare
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines import linear as engine

INFO = Info(
    name="linear",
    family="kernel",
    summary="the linear transformer: the kernel phi(q) . phi(k) with phi(x) = elu(x) + 1",
    paper="https://arxiv.org/abs/2006.16236",
    complexity="N d e",
    budget=None,
    approximates="own",
    causal="native",
    mask="padding",
    scaled=False,
)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention of the linear transformer.

    The exponential of softmax gives way to an inner product of positive features,

    .. math:: o_i = \frac{\sum_j \left(\phi(q_i) \cdot \phi(k_j)\right) v_j}
                         {\sum_j \phi(q_i) \cdot \phi(k_j)}, \qquad
              \phi(x) = \mathrm{elu}(x) + 1 = e^{\min(x, 0)} + \max(x, 0),

    so the sums over keys are taken once for all queries. The second form of :math:`\phi` is the
    one computed: :math:`\mathrm{elu}(x) + 1` rounds to zero where x is very negative. Nothing is
    added to the denominator; the authors' code adds 1e-6, which shrinks rows of small features.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Must be None: the kernel has no logits to scale.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: 2 N D E operations for queries and for keys; decoding keeps D (E + 2) numbers per key
    head. Causal adds 2 N CHUNK (D + E).

    Exact when: always; the formula is the definition, and whole, causal and step-by-step calls
    agree to rounding. It does not converge to softmax.

    Limits: no approximation of softmax: in the place of a trained softmax layer it is another
    model, which has to be trained. The weights have rank D at most and cannot be sharp. A row
    all of whose products underflow has no weights and gives zeros.

    Raises:
        Unsupported: A scale, or a mask other than key padding.

    References:
        A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with
        Linear Attention", 2020, https://arxiv.org/abs/2006.16236.

    Example:
        >>> import torch
        >>> q = k = torch.zeros(1, 1, 3, 2)
        >>> v = torch.tensor([1.0, 2.0, 6.0]).reshape(1, 1, 3, 1)
        >>> linear_attention(q, k, v, is_causal=True).flatten()
        tensor([1.0000, 1.5000, 3.0000])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if x.empty:
        return x.nothing()
    out = engine.linear_attention(
        x.q,
        x.k,
        x.v,
        _features,
        _features,
        log=False,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=x.q.shape[-1],
    )
    return x.restore(out)


def _features(x: Tensor) -> Tensor:
    """elu(x) + 1, to full relative accuracy and with slope 1 at zero; (..., D) -> (..., D)."""
    return x.clamp(max=0).exp() + x.relu()


@register
@dataclass(frozen=True)
class Linear(Method):
    """Options of `linear_attention`: none."""

    info = INFO
    function = staticmethod(linear_attention)

    def cost(self, shape: Shape) -> Cost:
        d, e = shape.head_dim, shape.value_dim
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * (shape.rows * d * (e + 1) + keys * d * e)
        if shape.is_causal:
            flops += 2 * shape.rows * min(engine.CHUNK, shape.keys) * (d + e)
        cache = shape.batch * shape.kv_heads * d * (e + 2) * max(shape.itemsize, 4)
        return Cost(flops, shape.io, cache, units=d)

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
        return engine.SlotsState(
            key, value, _features, _features, log=False, num_slots=key.shape[3]
        )
