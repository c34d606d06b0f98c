"""Thinformer: attention to a few keys that kernel thinning chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import Inputs, positive, prepare
from numattn.core.linalg import take
from numattn.core.method import Method
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.lift import (
    StreamingState,
    Summary,
    compressed,
    leaf_flops,
    lift_summaries,
    split_points,
    streaming_bytes,
)
from numattn.engines.softmax import fused_attention, key_bias, softmax_attention
from numattn.engines.thin import coins_shape, thin, thin_flops

INFO = Info(
    name="thinformer",
    family="lowrank",
    summary="softmax over a few keys chosen by kernel halving of keys and values (Thinformer)",
    paper="https://arxiv.org/abs/2502.12063",
    complexity="(N + m log(N / m)) m (d + e)",
    budget="num_keys",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    random=True,
    linear_in_value=False,
    state_tensors=("uniform",),
)


def thinformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_keys: int = 64,
    delta: float = 0.5,
    uniform: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Thinformer: softmax attention to a coreset of the keys, found by kernel halving.

    The keys are halved h times, h being the least number for which at most m are left, and rows
    attend to those as they would to all:

    .. math:: \mathrm{out}_i = \sum_{j \in S} e^{q_i \cdot k_j} v_j \Big/
              \sum_{j \in S} e^{q_i \cdot k_j} .

    A halving goes through pairs of neighbours and sends one of each to either half, at random but
    with a bias that keeps the halves alike in the feature space of

    .. math:: \kappa((k, v), (k', v')) = e^{\mathrm{scale}\, k \cdot k'}
              (v \cdot v' + \max_j |v_j|^2),

    in which numerator and denominator of every output are linear functionals. It works in buckets
    of 64 keys at first and of 2 m in the end (KH-Compress), and a coin decides which half is kept.
    So both sums, times :math:`2^h`, are unbiased.

    From the paper: halving, kernel, buckets. Different here: the mean of the keys is subtracted in
    the kernel, which changes no exact output and makes the kernel less uneven; any number of keys
    is halved, where the authors' code first leaves out all but a power of four, up to three
    quarters of them; m is free, where there it is a power of two times the root of that number. A
    causal call summarises blocks of 512 tokens, and neighbouring summaries together, by at most m
    keys; this form is of this library.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_keys: m, at least 2. Between m / 2 and m keys are left: Nk / 2^h.
        delta: Probability of failure in the paper's bound, in (0, 1): a smaller one makes choices
            more random.
        uniform: Numbers in [0, 1) that decide between the keys, (Hk, 32, 2, 1 + max(m, 32)); drawn
            when None. Shared by the batch.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. The heads of a group share the coreset.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: 2 Nq m (D + E) operations per query head to attend. Per key head, halving takes
    8 m^2 (D + E) for every round, and 128 (D + E) per key for each of the first rounds, whose
    buckets have 64 keys; a round takes as many steps in succession as a bucket has pairs. Decoding
    keeps up to 512 tokens, and m keys and values for every binary digit of N / 512.

    Exact when: m >= Nk, and causally also up to 512 tokens.

    Limits: a key that few rows attend to, or that all do, such as a sink, is lost with probability
    1 - 2^-h, and else counts 2^h times. The error falls as 1 / m, up to logarithms, where a bucket
    has many more pairs than the kernel matrix has large eigenvalues; elsewhere as m ** -0.5, and
    the coreset is then no better than a random sample. A key weighs
    :math:`e^{\mathrm{scale} |k|^2 / 2}` in the kernel: after one of large norm, the choices
    between smaller ones are coin tosses. A budget that is not Nk over a power of two is not used in
    full. All blocks of equal length in a causal call use the same random numbers, so that their
    errors are not independent. The output is not linear in value. The choice of keys is constant
    for autograd; keys and values outside of the coreset get no gradient.

    Raises:
        ValueError: An option is not of the range above, or ``uniform`` is not of its shape.
        Unsupported: A mask other than key padding.

    References:
        A. M. Carrell, A. Gong, A. Shetty, R. Dwivedi, L. Mackey, "Low-Rank Thinning", 2025,
        https://arxiv.org/abs/2502.12063.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> thinformer_attention(q, k, v, num_keys=16).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Thinformer(num_keys, delta)
    if x.empty:
        return x.nothing()
    coins = fill(options, {"uniform": uniform}, x.k, generator)["uniform"]
    if is_causal:
        return x.restore(lift_summaries(x, partial(_compress, options, coins, x.scale)))
    x, place = x.compact()
    return x.restore(_attend(options, coins, x), place)


def _attend(options: Thinformer, coins: Tensor, x: Inputs) -> Tensor:
    """Rows of x to the coreset of its keys, which have the padding last."""
    k, v, bias = x.k, x.v, key_bias(x.padding, x.q)
    if k.shape[2] > options.num_keys:
        total = None if x.padding is None else x.num_keys
        index, exists, _ = thin(
            k, v, options.num_keys, coins, scale=x.scale, delta=options.delta, total=total
        )
        k, v, bias = take(k, index), take(v, index), key_bias(exists, x.q)
    out = None if bias is not None else fused_attention(x.q, k, v, is_causal=False, scale=x.scale)
    return softmax_attention(x.q, k, v, scale=x.scale, bias=bias)[0] if out is None else out


def _compress(options: Thinformer, coins: Tensor, scale: float, s: Summary) -> Summary:
    """A summary of at most m keys. All keys of one have the weight 2^h after h halvings."""
    level = (s.bias[:, :1, 0] / math.log(2)).round().long()
    index, _, _ = thin(
        s.k,
        s.columns[..., : s.width],
        options.num_keys,
        coins,
        scale=scale,
        delta=options.delta,
        level=level,
    )
    gained = math.log(s.k.shape[2] // index.shape[2])
    return Summary(
        take(s.k, index), take(s.columns, index), s.bias.gather(2, index) + gained, s.width
    )


def _check_options(num_keys: int, delta: float) -> None:
    positive(INFO.name, "num_keys", num_keys)
    if num_keys < 2:
        raise ValueError(f"thinformer: num_keys must be at least 2; got {num_keys}.")
    if not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ValueError(f"thinformer: delta must be a number between 0 and 1; got {delta!r}.")


@register
@dataclass(frozen=True)
class Thinformer(Method):
    """Options of `thinformer_attention`."""

    num_keys: int = 64
    delta: float = 0.5
    info = INFO
    function = staticmethod(thinformer_attention)

    def __post_init__(self) -> None:
        _check_options(self.num_keys, self.delta)

    def exact_at(self, length: int) -> Thinformer:
        return replace(self, num_keys=max(length, 2))

    @property
    def _size(self) -> int:
        """Keys of a causal summary: blocks of 512 * 2^i keys, halved until they are few enough."""
        return 1 << (self.num_keys.bit_length() - 1)

    def cost(self, shape: Shape) -> Cost:
        m, width = self.num_keys, shape.head_dim + shape.value_dim
        if shape.is_causal:
            leaves, blocks = split_points(shape.keys)
            pairs = leaf_flops(leaves, width) // 2
            pairs += sum(rows * min(keys, self._size) for rows, keys in blocks) * (width + 1)
            thinning = sum(
                count * thin_flops(keys, m, width)
                for keys, count in compressed(shape.keys, self._size)
            )
        else:
            kept = shape.keys
            while kept > m:
                kept = -(-kept // 2)
            pairs = shape.queries * kept * width
            thinning = thin_flops(shape.keys, m, width)
        flops = 2 * shape.batch * shape.heads * pairs + shape.batch * shape.kv_heads * thinning
        cache = streaming_bytes(shape, self._size)
        return Cost(flops, shape.io, cache, units=min(m, shape.keys))

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        return {"uniform": Draw("uniform", coins_shape(num_heads, self.num_keys))}

    def module(self, *, num_heads: int, head_dim: int) -> ThinformerAttention:
        return ThinformerAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        coins = fill(self, {"uniform": tensors.get("uniform")}, key, None)["uniform"]
        factor = key.shape[3] ** -0.5 if scale is None else float(scale)
        return StreamingState(
            INFO,
            partial(_compress, self, coins, factor),
            key,
            value,
            scale=scale,
            enable_gqa=enable_gqa,
        )


class ThinformerAttention(DrawnAttention):
    """`thinformer_attention` with numbers that are drawn once and saved with the model.

    Buffer: ``uniform`` (Hk, 32, 2, 1 + max(m, 32)).
    """

    record = Thinformer
