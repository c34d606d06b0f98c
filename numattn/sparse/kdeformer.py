"""KDEformer: blocks of queries and keys that hash alike, and columns sampled by their weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, DrawnAttention, fill
from numattn.core.info import Info
from numattn.core.inputs import Inputs, positive, prepare, unfold
from numattn.core.linalg import exp_, finite, take
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.engines.lift import lift, split_points
from numattn.engines.tiles import tile_elements
from numattn.sparse.hyper import Sorted, check_options, count_sorted, once_each, stretches

INFO = Info(
    name="kdeformer",
    family="sparse",
    summary="blocks in the order of a hash, and columns sampled by weight and value (KDEformer)",
    paper="https://arxiv.org/abs/2302.02451",
    complexity="N (b + m + r) (d + e)",
    budget="block_size",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    decode=False,
    random=True,
    linear_in_value=False,
    state_tensors=("projection", "uniform", "pilots"),
)

FLOOR = 0.1  # of the proposals is uniform, so that no weight exceeds M / (FLOOR m)


def kdeformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 256,
    num_samples: int | None = None,
    num_projections: int = 7,
    num_pilots: int = 64,
    projection: Tensor | None = None,
    uniform: Tensor | None = None,
    pilots: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""KDEformer: block-diagonal attention in hash order, plus columns sampled by importance.

    The blocks are those of `numattn.sparse.hyper_attention`. Keys outside of a row's block are
    sampled in proportion to

    .. math:: p_j = 0.45\, \frac{|v_j|^2}{\sum_l |v_l|^2}
                  + 0.45\, \frac{c_j}{\sum_l c_l} + \frac{0.1}{M}, \qquad
              c_j = \frac{1}{R} \sum_{i \in \mathrm{pilots}} P_{ij}^2,

    where P is the softmax and the R pilots are queries whose rows are computed exactly. A sample
    counts :math:`1 / (m p_j)` times, so that numerator and denominator are each unbiased; a sample
    in the row's own block is hidden from it. All rows of a query head share the samples, which
    stand at m points of the distribution function, one in each of m equal stretches. A term of p
    without any weight is uniform instead.

    From the paper: sampling columns by a mixture of squared value norms and squared column norms
    of P, which makes the error small in the operator norm. Different here: the paper estimates row
    sums by fast kernel density estimation, where this computes R rows exactly; the authors' code
    takes :math:`|v_j| / \sigma_{\max}(V)^2 + 1 / M` for p, and exponentials without a shift. The
    uniform tenth is added to bound the weights. Causal calls are lifted as in
    `numattn.sparse.hyper_attention`, with pilots among the earlier queries; the paper has no causal
    form.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        block_size: b, keys of a block, positive.
        num_samples: m, sampled keys, positive; None takes ``block_size`` of them. With m >= M each
            key is taken once, with weight 1.
        num_projections: Signs of a hash, from 1 to 32.
        num_pilots: R, queries whose rows are computed to learn where the weight is, positive.
        projection: Normals of the hash's planes, (Hk, D, num_projections); drawn when None.
        uniform: Numbers in [0, 1) that place the samples in their stretches, (Hk, m); drawn when
            None.
        pilots: Numbers in [0, 1) that place the pilots, one in each of R equal stretches of the
            queries, (Hk, R); drawn when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both.
        is_causal: Position i attends to positions j <= i; needs Nq = Nk.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Keys are sorted once for a group; every query
            head has samples of its own.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a query that may attend to nothing.

    Cost: that of `numattn.sparse.hyper_attention`, 2 (b + m) (D + E) operations per row and the
    sorts, and 2 R D per key and query head for the pilots, which are computed a tile at a time.

    Exact when: b >= Nk or m >= Nk, and causally also up to 512 tokens.

    Limits: one set of samples serves all rows of a head, so it helps with columns that many rows
    attend to, such as sinks; a key that is heavy for one row alone is lost unless it lies in the
    block. Weights reach 10 M / m. The output is not linear in value, since the draw looks at the
    values. The limits of the blocks are those of `numattn.sparse.hyper_attention`. The choice of
    keys and their weights are constant for autograd.

    Raises:
        ValueError: An option is not of the range above, or a tensor is not of its shape.
        Unsupported: A mask other than key padding.

    References:
        A. Zandieh et al., "KDEformer: Accelerating Transformers via Kernel Density Estimation",
        2023, https://arxiv.org/abs/2302.02451.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> kdeformer_attention(q, k, v, block_size=10).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = KDEformer(block_size, num_samples, num_projections, num_pilots)
    if x.empty:
        return x.nothing()
    given = {"projection": projection, "uniform": uniform, "pilots": pilots}
    tensors = fill(options, given, x.k, generator)
    block = partial(_block, tensors, block_size)
    if is_causal:
        return x.restore(lift(x, block))
    x, place = x.compact()
    return x.restore(block(x.q, x).out(), place)


def _block(tensors: dict[str, Tensor], block_size: int, q: Tensor, x: Inputs) -> Partial:
    """Folded rows `q` attending to all keys of x, whose queries give the pilots."""
    s = Sorted.of(q, x, tensors["projection"], block_size)
    part = s.near()
    if block_size < x.k.shape[2]:
        p = _proposals(s, _columns(s, tensors["pilots"]))
        part = part.merge(s.far(*_sample(s, p, tensors["uniform"])))
    return s.restore(part)


@torch.no_grad()
def _columns(s: Sorted, pilots: Tensor) -> Tensor:
    """Sums of squared weights that the pilots give each of the sorted keys, (B, H, Nk)."""
    x, count = s.x, pilots.shape[1]
    queries = s.total
    if x.query_padding is None:
        queries = torch.full_like(queries, x.q.shape[2] // x.group)
    start = torch.arange(count, device=x.q.device)
    pilot = (
        (start + pilots.to(start.device, torch.float64)) / count * queries
    ).long()  # (B or 1, Hk, R)
    pilot = torch.minimum(pilot, queries - 1).clamp(min=0)
    member = torch.arange(x.group, device=x.q.device)
    rows = take(x.q, (pilot[..., None] * x.group + member).flatten(2)) * x.scale
    batch, heads, keys, _ = s.k.shape
    step = max(tile_elements(x.q.device) // (batch * heads * x.group * keys), 1) * x.group
    sums = x.q.new_zeros(batch, heads * x.group, keys)
    for part in rows.split(step, 2):
        logits = part @ s.k.mT
        if x.padding is not None:
            logits = logits.masked_fill(~s.exists[:, :, None], -torch.inf)
        lse = finite(logits.logsumexp(-1, keepdim=True))
        sums += unfold(exp_((logits - lse).mul_(2)), x.group).sum(2)
    return sums


@torch.no_grad()
def _proposals(s: Sorted, columns: Tensor) -> Tensor:
    """Probability of drawing each of the sorted keys, float64 (B, H, Nk)."""
    values = s.v.norm(dim=-1).double().square().repeat_interleave(s.x.group, 1)
    flat = s.exists.double() / s.total.clamp(min=1)
    p = FLOOR * flat
    for weight in (values, columns.double()):
        weight = weight * s.exists
        total = weight.sum(-1, keepdim=True)
        share = torch.where(total > 0, weight / total.masked_fill(total == 0, 1.0), flat)
        p = p + (1 - FLOOR) / 2 * share
    return p


@torch.no_grad()
def _sample(s: Sorted, p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Places among the sorted keys, int (B, H, m), and log-weights -log(m p), (B, H, m)."""
    points = stretches(s, uniform).repeat_interleave(s.x.group, 1)
    reach = p.cumsum(-1)  # the distribution function
    slots = torch.searchsorted(reach, points * reach[..., -1:], right=True)
    slots = torch.minimum(slots, s.total - 1).clamp(min=0)
    draws = s.total.clamp(1, points.shape[-1]) * p.gather(-1, slots)
    return once_each(s, slots, -draws.log().to(s.k.dtype))


@register
@dataclass(frozen=True)
class KDEformer(Method):
    """Options of `kdeformer_attention`."""

    block_size: int = 256
    num_samples: int | None = None
    num_projections: int = 7
    num_pilots: int = 64
    info = INFO
    function = staticmethod(kdeformer_attention)

    def __post_init__(self) -> None:
        check_options(INFO.name, self.block_size, self.num_samples, self.num_projections)
        positive(INFO.name, "num_pilots", self.num_pilots)

    def exact_at(self, length: int) -> KDEformer:
        return replace(self, block_size=max(length, 1))

    def cost(self, shape: Shape) -> Cost:
        m = self.num_samples or self.block_size
        flops = count_sorted(shape, self.block_size, m, self.num_projections)
        blocks = split_points(shape.keys)[1] if shape.is_causal else [(shape.queries, shape.keys)]
        keys = sum(keys for _, keys in blocks if keys > self.block_size)
        flops += 2 * shape.batch * shape.heads * self.num_pilots * keys * shape.head_dim
        return Cost(flops, shape.io, None, units=min(self.block_size + m, shape.keys))

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        return {
            "projection": Draw("normal", (num_heads, head_dim, self.num_projections)),
            "uniform": Draw("uniform", (num_heads, self.num_samples or self.block_size)),
            "pilots": Draw("uniform", (num_heads, self.num_pilots)),
        }

    def module(self, *, num_heads: int, head_dim: int) -> KDEformerAttention:
        return KDEformerAttention(num_heads=num_heads, head_dim=head_dim, **self.options())


class KDEformerAttention(DrawnAttention):
    """`kdeformer_attention` with tensors that are drawn once and saved with the model.

    Buffers: ``projection`` (Hk, D, num_projections), ``uniform`` (Hk, m) and ``pilots`` (Hk, R).
    """

    record = KDEformer
