"""Hedgehog: feature maps that learn to imitate softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, prepare
from numattn.core.linalg import exp_matmul
from numattn.core.masks import visible
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, Feature, SlotsState, linear_attention
from numattn.engines.tiles import recompute, spans, tile_elements

INFO = Info(
    name="hedgehog",
    family="kernel",
    summary="learned positive features, distilled from softmax attention (Hedgehog)",
    paper="https://arxiv.org/abs/2402.04347",
    complexity="N d (d + e)",
    budget=None,
    approximates="own",
    causal="native",
    mask="padding",
    needs="training",
    scaled=False,
    state_tensors=("query_weight", "query_bias", "key_weight", "key_bias"),
)


def hedgehog_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_weight: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_weight: Tensor | None = None,
    key_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention through learned feature maps (Hedgehog).

    .. math:: o_i = \frac{\sum_j \left(\phi(q_i) \cdot \psi(k_j)\right) v_j}
                         {\sum_j \phi(q_i) \cdot \psi(k_j)}, \qquad
              \phi(q) = [\mathrm{softmax}(W q + b),\; \mathrm{softmax}(-W q - b)],

    and :math:`\psi` likewise with weights of its own; softmax is over the D features of a token.
    Features are positive, and as sharp as W is large. They are meant to be learned, so that the
    weights imitate those of softmax: `HedgehogAttention.distillation_loss`. Where none are given
    W is the identity and b is zero, which is where learning starts.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        query_weight: W of the queries, (Hk, D, D), rows are features; the identity when None.
        query_bias: b of the queries, (Hk, D); zero when None.
        key_weight: W of the keys, (Hk, D, D).
        key_bias: b of the keys, (Hk, D).
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Must be None: the features have no logits to scale; W learns a scale.
        enable_gqa: Allow H to be a multiple of Hk. The heads of a group share the map of queries.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: for queries and for keys each, 2 N D^2 operations for the map and 4 N D E to use the 2 D
    features; causal adds 2 N CHUNK (2 D + E). Decoding keeps 2 D (E + 2) numbers per key head.

    Exact when: always; the formula is the definition, and whole, causal and step-by-step calls
    agree to rounding. It does not converge to softmax.

    Limits: without learned maps it is no approximation of anything. What is learned holds for
    inputs like those it was learned on. The weights have rank 2 D at most, so no map makes them
    sharp at every position of a long text.

    Raises:
        Unsupported: A scale, or a mask other than key padding.
        ValueError: A tensor is not of its shape.

    References:
        M. Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax
        Mimicry", 2024, https://arxiv.org/abs/2402.04347.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> hedgehog_attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    phi, psi = _maps(x.k, query_weight, query_bias, key_weight, key_bias)
    if x.empty:
        return x.nothing()
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
        num_features=2 * x.q.shape[-1],
    )
    return x.restore(out)


def _maps(
    k: Tensor,
    query_weight: Tensor | None,
    query_bias: Tensor | None,
    key_weight: Tensor | None,
    key_bias: Tensor | None,
) -> tuple[Feature, Feature]:
    """Log-features of queries and of keys, for keys k (B, Hk, Nk, D)."""
    heads, dim = k.shape[1], k.shape[3]
    for name, tensor, shape in (
        ("query_weight", query_weight, (heads, dim, dim)),
        ("query_bias", query_bias, (heads, dim)),
        ("key_weight", key_weight, (heads, dim, dim)),
        ("key_bias", key_bias, (heads, dim)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"hedgehog: {name} must have shape {shape}; got {tuple(tensor.shape)}."
            )
    return partial(_log_features, query_weight, query_bias), partial(
        _log_features, key_weight, key_bias
    )


def _log_features(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    """Logarithms of the features of a tile: (B, Hk, n, D) -> (B, Hk, n, 2 D)."""
    if weight is not None:
        x = x @ weight.to(x).mT
    if bias is not None:
        x = x + bias.to(x)[:, None]
    return torch.cat([x.log_softmax(-1), (-x).log_softmax(-1)], -1)


@register
@dataclass(frozen=True)
class Hedgehog(Method):
    """Options of `hedgehog_attention`: none."""

    info = INFO
    function = staticmethod(hedgehog_attention)

    def cost(self, shape: Shape) -> Cost:
        """Of identity maps; learned ones take 2 N D^2 for queries and for keys on top."""
        d, e = shape.head_dim, shape.value_dim
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * (shape.rows + keys) * 2 * d * e
        if shape.is_causal:
            flops += 2 * shape.rows * min(CHUNK, shape.keys) * (2 * d + e)
        cache = shape.batch * shape.kv_heads * 2 * d * (e + 2) * max(shape.itemsize, 4)
        return Cost(flops, shape.io, cache, units=2 * d)

    def module(self, *, num_heads: int, head_dim: int) -> HedgehogAttention:
        return HedgehogAttention(num_heads=num_heads, head_dim=head_dim)

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
        given = {name: tensors.get(name) for name in INFO.state_tensors}
        phi, psi = _maps(key, **given)
        return SlotsState(key, value, phi, psi, log=True, num_slots=2 * key.shape[3])


class HedgehogAttention(AttentionModule):
    """`hedgehog_attention` with maps that are learned.

    Parameters: ``query_weight`` and ``key_weight`` (Hk, D, D), the identity at first, and
    ``query_bias`` and ``key_bias`` (Hk, D), zero at first.
    """

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        """Start with the identity.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
        """
        super().__init__()
        self.options = Hedgehog()
        eye = torch.eye(head_dim).repeat(num_heads, 1, 1)
        self.query_weight, self.key_weight = nn.Parameter(eye), nn.Parameter(eye.clone())
        zero = torch.zeros(num_heads, head_dim)
        self.query_bias, self.key_bias = nn.Parameter(zero), nn.Parameter(zero.clone())

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in INFO.state_tensors}

    def distillation_loss(
        self,
        query: Tensor,
        key: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        r"""Cross-entropy between the weights of softmax attention and those of the maps.

        .. math:: - \frac{1}{n} \sum_i \sum_j P_{ij} \log \hat P_{ij},

        over the n rows that exist and may attend to something. It is least, the entropy of P,
        where both are equal. Minimising it fits the maps to a trained layer; its other weights
        need not be known.

        Args:
            query: (B, H, N, D), as the softmax layer has it.
            key: (B, Hk, N, D).
            attn_mask: bool key padding, as in a call.
            is_causal: As in a call.
            scale: Factor of the logits of the softmax that is imitated, default D ** -0.5.
            enable_gqa: As in a call.

        Returns:
            A number, differentiable in the parameters.

        Cost: quadratic, as the weights of softmax are computed; memory is that of a tile of rows.
        Weights below the smallest normal number, relative to the largest of a row, count as that.
        """
        # The scale is the teacher's: the maps have none.
        x = prepare(INFO, query, key, key, attn_mask, is_causal, None, enable_gqa)
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        tall = max(tile_elements(x.k.device) // max(x.k.shape[:3].numel(), 1), 1) * x.group
        total, count = x.q.new_zeros(()), x.q.new_zeros(())
        for r0, r1 in spans(x.q.shape[2], tall):
            step = partial(self._loss, x, factor, r0)
            loss, rows = recompute(step, x.q[:, :, r0:r1], x.k, *self.parameters())
            total, count = total + loss, count + rows
        return total / count.clamp(min=1)

    def _loss(
        self, x: Inputs, factor: float, start: int, q: Tensor, k: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum over some rows, the first of which is `start`, and how many of them count."""
        phi, psi = _maps(k, **self.tensors())
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if x.is_causal:
            seen = visible(q.shape[2], k.shape[2], start // x.group, x.group, q.device)
        weights, _ = exp_matmul(phi(q), psi(k), seen, torch.full_like(q[..., 0], -torch.inf))
        mine = weights.clamp(min=torch.finfo(q.dtype).tiny).log()
        exact = (q * factor) @ k.mT
        hidden = ~seen
        if x.padding is not None:
            hidden = hidden | ~x.padding[..., None, :]
        counts = ~hidden.all(-1, keepdim=True)
        if x.query_padding is not None:
            counts = counts & x.query_padding[..., start : start + q.shape[2], None]
        counts = counts.expand(*q.shape[:3], 1)
        hidden = hidden & counts  # rows that do not count are finite, and zero in the end
        p, logs = exact.masked_fill(hidden, -torch.inf), mine.masked_fill(hidden, -torch.inf)
        logs = logs.log_softmax(-1).masked_fill(hidden, 0.0)
        return -(p.softmax(-1) * logs * counts).sum(), counts.sum().to(q)
