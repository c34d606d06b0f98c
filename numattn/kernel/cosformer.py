"""cosFormer: linear attention with rectified features and a cosine of the distance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import compute_dtype, positive, prepare
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, SlotsState, linear_attention
from numattn.kernel.features import FeatureMap

INFO = Info(
    name="cosformer",
    family="kernel",
    summary="the kernel relu(q) . relu(k) with a cosine that falls with the distance",
    paper="https://arxiv.org/abs/2202.08791",
    complexity="2 N d e",
    budget=None,
    approximates="own",
    causal="native",
    mask="padding",
    normalised=False,
    scaled=False,
    exceptions={
        "normalised": "only rows without any weight do not sum to one, and the sample has none",
        "equal_keys_give_the_mean": "keys that are equal still differ by their distances",
    },
)


def cosformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    max_length: int = 4096,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Attention of cosFormer.

    Softmax gives way to an inner product of rectified entries, weighted by the distance,

    .. math:: o_i = \frac{\sum_j w_{ij} v_j}{\sum_j w_{ij}}, \qquad
              w_{ij} = \left(\mathrm{relu}(q_i) \cdot \mathrm{relu}(k_j)\right)
                       \cos\!\left(\frac{\pi}{2}\, \frac{i - j}{M}\right).

    The cosine of a difference splits, so the kernel is one of 2 D features,
    :math:`[\mathrm{relu}(x) \cos\theta_i,\ \mathrm{relu}(x) \sin\theta_i]` with
    :math:`\theta_i = \pi i / (2 M)`, and the sums over keys are taken once for all queries. Angles
    lie in [0, :math:`\pi / 2`), so no feature is negative and nothing cancels.

    Positions count the tokens that exist, from 0, on each side; where queries and keys are equally
    many, the padding speaks of both. Queries of another number than the keys count from 0 as
    well: with queries that continue the keys, that is not what decoding does.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        max_length: M, positive; no side may be longer, padding included. It is part of the model
            and not taken from the call: a causal row must not depend on how many tokens follow.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Must be None: the kernel has no logits to scale.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing and for
        one that no key has a positive entry in common with.

    Cost: 4 N D E operations for queries and for keys; decoding keeps 2 D (E + 2) numbers per key
    head. Causal adds 2 N CHUNK (2 D + E).

    Exact when: always; the formula is the definition, and whole, causal and step-by-step calls
    agree to rounding. It does not converge to softmax.

    Limits: no approximation of softmax, but another model, which has to be trained. The weights
    have rank 2 D at most and cannot be sharp; at distances far below M the cosine is nearly 1.
    Rows without weight occur, the more the smaller D is. Nothing is added to the denominator; the
    authors' code clamps it from below, which shrinks rows of small weights.

    Raises:
        Unsupported: A scale, or a mask other than key padding.
        ValueError: More than `max_length` queries or keys, in a call or while decoding.

    References:
        Z. Qin et al., "cosFormer: Rethinking Softmax in Attention", 2022,
        https://arxiv.org/abs/2202.08791.

    Example:
        >>> q = k = torch.ones(1, 1, 3, 2)
        >>> v = torch.tensor([0.0, 0.0, 1.0]).reshape(1, 1, 3, 1)
        >>> cosformer_attention(q, k, v, max_length=3).flatten()  # cosines 1, 0.866 and 0.5
        tensor([0.2113, 0.3170, 0.4226])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    positive(INFO.name, "max_length", max_length)
    _check_length("queries", query.shape[2], max_length)
    _check_length("keys", key.shape[2], max_length)
    if x.empty:
        return x.nothing()
    rows, keys = (
        torch.arange(n, device=x.k.device)[None, None] for n in (query.shape[2], key.shape[2])
    )
    if x.padding is not None:
        keys = (x.padding.cumsum(-1) - 1).clamp(min=0)  # (B or 1, 1, Nk)
        rows = rows if x.query_padding is None else keys
    out = linear_attention(
        _placed(x.q, rows.repeat_interleave(x.group, -1), max_length),
        _placed(x.k, keys, max_length),
        x.v,
        TURNED,
        TURNED,
        log=TURNED.log,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=TURNED.dimension(x.q.shape[3]),
    )
    return x.restore(out)


def _check_length(what: str, length: int, max_length: int) -> None:
    if length > max_length:
        raise ValueError(
            f"cosformer: {length} {what} are more than max_length={max_length}; set max_length to "
            "the longest sequence there will be, the same in every call."
        )


def _placed(x: Tensor, position: Tensor, max_length: int) -> Tensor:
    """Tokens with the cosine and the sine of their angles: (B, H, n, D) -> (B, H, n, D + 2)."""
    angle = position.double() * (math.pi / (2 * max_length))  # (B or 1, 1, n)
    turn = torch.stack([angle.cos(), angle.sin()], -1).to(x)
    return torch.cat([x, turn.expand(*x.shape[:2], -1, -1)], -1)


def _turned_relu(x: Tensor) -> Tensor:
    """Features of placed tokens: (B, H, n, D + 2) -> (B, H, n, 2 D)."""
    token, turn = x[..., :-2].relu(), x[..., -2:]
    return (turn[..., None] * token[..., None, :]).flatten(-2)


TURNED = FeatureMap("turned_relu", _turned_relu, dimension=lambda head_dim: 2 * head_dim)


@register
@dataclass(frozen=True)
class CosFormer(Method):
    """Options of `cosformer_attention`."""

    max_length: int = 4096
    info = INFO
    function = staticmethod(cosformer_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "max_length", self.max_length)

    def cost(self, shape: Shape) -> Cost:
        m, e = TURNED.dimension(shape.head_dim), shape.value_dim
        keys = shape.batch * shape.kv_heads * shape.keys
        flops = 2 * (shape.rows * m * (e + 1) + keys * m * e)
        if shape.is_causal:
            flops += 2 * shape.rows * min(CHUNK, shape.keys) * (m + e)
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
        return CosFormerState(key, value, max_length=self.max_length)


class CosFormerState(State):
    """Decoding state of `cosformer_attention`: the slots, and how many tokens they hold."""

    def __init__(self, key: Tensor, value: Tensor, *, max_length: int) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        self._max_length = max_length
        self._length = 0
        slots = TURNED.dimension(key.shape[3])
        nothing = key[:, :, :0], value[:, :, :0]
        self._slots = SlotsState(*nothing, TURNED, TURNED, log=TURNED.log, num_slots=slots)
        self.append(key, value)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        length = self._length + key.shape[2]
        _check_length("keys", length, self._max_length)
        self._slots.append(self._place(key, self._length), value)
        self._length = length

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        """Attend from the last tokens: the last of n queries stands at the last token taken in."""
        first = self._length - query.shape[2]
        if first < 0 < self._length:
            raise ValueError(
                f"cosformer: {query.shape[2]} queries cannot stand at the last of {self._length} "
                "tokens; append their keys and values first."
            )
        return self._slots.attend(self._place(query, first)).to(query.dtype)

    def _place(self, x: Tensor, first: int) -> Tensor:
        position = torch.arange(first, first + x.shape[2], device=x.device)
        return _placed(x.to(compute_dtype(x.dtype)), position[None, None], self._max_length)

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes
