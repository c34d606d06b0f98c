"""The linear transformer: softmax replaced by the inner product of fixed features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import one_of, prepare
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines import linear as engine
from numattn.kernel.features import MAPS

INFO = Info(
    name="linear",
    family="kernel",
    summary="the linear transformer: the kernel phi(q) . phi(k), by default with phi = elu + 1",
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
    feature_map: Literal["elu", "relu", "squared_relu", "softmax", "identity"] = "elu",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention of the linear transformer.

    The exponential of softmax gives way to an inner product of features,

    .. math:: o_i = \frac{\sum_j \left(\phi(q_i) \cdot \phi(k_j)\right) v_j}
                         {\sum_j \phi(q_i) \cdot \phi(k_j)},

    so the sums over keys are taken once for all queries. Nothing is added to the denominator and
    nothing is clamped. `feature_map` names :math:`\phi`:

    - ``"elu"``: :math:`\mathrm{elu}(x) + 1 = e^{\min(x, 0)} + \max(x, 0)`, positive. The second
      form is computed, for the first rounds to zero where x is very negative. A row whose
      products all underflow gives zeros.
    - ``"relu"``: :math:`\max(x, 0)`. A query whose positive entries meet no positive entry of a
      key has no weight anywhere and gives zeros; so does one without positive entries.
    - ``"squared_relu"``: :math:`\max(x, 0)^2`, sharper; the same rows give zeros.
    - ``"softmax"``: :math:`e^{x_r} / \sum_s e^{x_s}`, over the features of one token, positive.
      Computed from logarithms, it neither overflows nor underflows.
    - ``"identity"``: :math:`x`, so that the weights are :math:`q_i \cdot k_j`, of both signs. The
      output is no average: where the weights nearly cancel, it grows without bound. The denominator
      may be negative; a row in which it is exactly zero is not divided.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        feature_map: What :math:`\phi` is, as above; D features each.
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
    model, which has to be trained. The weights have rank D at most and cannot be sharp. The
    authors' code adds 1e-6 to the denominator, which shrinks rows of small features; there is no
    such term here. With ``"identity"`` rounding is magnified by as much as the weights cancel.

    Raises:
        Unsupported: A scale, or a mask other than key padding.
        ValueError: A feature map that does not exist.

    References:
        A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with
        Linear Attention", 2020, https://arxiv.org/abs/2006.16236.

    Example:
        >>> import torch
        >>> q = k = torch.zeros(1, 1, 3, 2)
        >>> v = torch.tensor([1.0, 2.0, 6.0]).reshape(1, 1, 3, 1)
        >>> linear_attention(q, k, v, is_causal=True).flatten()
        tensor([1.0000, 1.5000, 3.0000])
        >>> linear_attention(q, k, v, feature_map="relu").flatten()
        tensor([0., 0., 0.])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    one_of(INFO.name, "feature_map", feature_map, tuple(MAPS))
    if x.empty:
        return x.nothing()
    phi = MAPS[feature_map]
    out = engine.linear_attention(
        x.q,
        x.k,
        x.v,
        phi,
        phi,
        log=phi.log,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=phi.dimension(x.q.shape[-1]),
    )
    return x.restore(out)


@register
@dataclass(frozen=True)
class Linear(Method):
    """Options of `linear_attention`."""

    feature_map: Literal["elu", "relu", "squared_relu", "softmax", "identity"] = "elu"
    info = INFO
    function = staticmethod(linear_attention)

    def __post_init__(self) -> None:
        one_of(INFO.name, "feature_map", self.feature_map, tuple(MAPS))

    def cost(self, shape: Shape) -> Cost:
        m, e = MAPS[self.feature_map].dimension(shape.head_dim), shape.value_dim
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * (shape.rows * m * (e + 1) + keys * m * e)
        if shape.is_causal:
            flops += 2 * shape.rows * min(engine.CHUNK, shape.keys) * (m + e)
        cache = shape.batch * shape.kv_heads * m * (e + 2) * max(shape.itemsize, 4)
        return Cost(flops, shape.io, cache, units=m)

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
        phi = MAPS[self.feature_map]
        num_slots = phi.dimension(key.shape[3])
        return engine.SlotsState(key, value, phi, phi, log=phi.log, num_slots=num_slots)
