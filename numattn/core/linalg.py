"""Linear algebra that several methods need, in float32 at least."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

_LOG2E = 1 / math.log(2)

# Least second moment of the queries in a direction, in means over all directions: then their map
# is finite and serves queries in directions that the sample does not have.
_FLOOR = 1e-8


def draw(
    shape: tuple[int, ...],
    generator: Generator | None,
    device: torch.device,
    law: Literal["normal", "uniform"] = "normal",
) -> Tensor:
    """Standard normal numbers, or uniform ones in [0, 1).

    They are float64 and drawn on the generator's device, by default the CPU, so that every device
    and every type agrees.
    """
    source = generator.device if generator is not None else "cpu"
    sample = torch.randn if law == "normal" else torch.rand
    return sample(shape, dtype=torch.float64, device=source, generator=generator).to(device)


def input_generator(seed: int) -> Generator:
    """Source of made-up inputs.

    Seeds differ by 2^31 from those of methods' draws: features drawn with the seed of the tokens
    would repeat their very numbers, and be anything but independent of them.
    """
    return Generator().manual_seed(seed + 2**31)


def orthogonal_gaussian(
    rows: int, dim: int, heads: int, generator: Generator | None, device: torch.device
) -> Tensor:
    """Random directions, orthogonal in blocks, each distributed as N(0, I).

    Blocks of ``dim`` rows are Haar-orthogonal (QR of a Gaussian matrix with the signs of R's
    diagonal moved into Q); each row is then given the length of an independent Gaussian vector.

    Returns:
        float64 (heads, rows, dim).
    """
    blocks = -(-rows // dim)
    q, r = torch.linalg.qr(draw((heads, blocks, dim, dim), generator, device))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    norms = draw((heads, rows, dim), generator, device).norm(dim=-1)
    directions = q.mT.reshape(heads, blocks * dim, dim)[:, :rows]
    return directions * norms[..., None]


def pinv(a: Tensor) -> Tensor:
    """Moore-Penrose pseudo-inverse of small square matrices (..., m, m), in a's type.

    Singular values below ``m * eps(a.dtype)`` times the largest count as zero. float64 uses the
    singular value decomposition. float32 is inverted through the float64 eigenvalues of a^T a:
    squaring the condition number in float64 costs no accuracy that float32 could hold, and is
    several times faster.
    """
    rtol = a.shape[-1] * torch.finfo(a.dtype).eps
    if a.dtype == torch.float64:
        return torch.linalg.pinv(a, rtol=rtol)
    b = a.double()
    return (torch.linalg.pinv(b.mT @ b, rtol=rtol**2, hermitian=True) @ b.mT).to(a.dtype)


def falling_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, falling and not negative, and eigenvectors of semidefinite a (..., D, D)."""
    values, vectors = torch.linalg.eigh(a)
    return values.flip(-1).clamp(min=0.0), vectors.flip(-1)


def best_logits(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maps of queries and keys whose r leading columns give the best logits of rank r, for every r.

    With Q^T Q = W W^T, and U the eigenvectors of W^T K^T K W by falling eigenvalues, the maps are
    A = W^-T U and B = W U: Q A_r (K B_r)^T is the truncated SVD of Q K^T.

    Args:
        queries: Q^T Q, float64 (..., D, D).
        keys: K^T K, float64 (..., D, D).

    Returns:
        The squared singular values of Q K^T, to a factor, falling (..., D); A and B (..., D, D).
    """
    size = queries.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    moments, axes = falling_eigh(queries / torch.where(size > 0, size, 1.0))
    root = moments.clamp(min=_FLOOR).sqrt()[..., None, :]
    half = axes * root  # W, to a factor
    energies, leading = falling_eigh(half.mT @ keys @ half)
    return energies, (axes / root) @ leading, half @ leading


def segment_means(x: Tensor, num_segments: int, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means of consecutive segments of the tokens that exist, as equal in size as can be.

    With n tokens, token number t (counted among those that exist) belongs to segment
    ``t * num_segments // n``, so padding anywhere changes nothing. Segments may be empty when
    there are fewer tokens than segments.

    Args:
        x: (B, H, N, D).
        num_segments: m.
        padding: bool (B or 1, 1, N), True = exists; None when all do.

    Returns:
        means (B, H, m, D), zero where empty, and counts (B or 1, 1, m).
    """
    length = x.shape[2]
    if padding is None and length and length % num_segments == 0:
        size = length // num_segments
        return x.unflatten(2, (num_segments, size)).mean(3), x.new_full((1, 1, num_segments), size)
    if padding is None:
        padding = x.new_ones((1, 1, length), dtype=torch.bool)
    number = padding.cumsum(-1) - 1
    total = padding.sum(-1, keepdim=True).clamp(min=1)
    segment = (number * num_segments // total).masked_fill(~padding, num_segments)
    counts = x.new_zeros((*segment.shape[:2], num_segments + 1))
    counts = counts.scatter_add(2, segment, torch.ones_like(segment, dtype=x.dtype))
    index = segment[..., None].expand(*x.shape[:3], x.shape[3])
    sums = x.new_zeros((*x.shape[:2], num_segments + 1, x.shape[3])).scatter_add(2, index, x)
    counts = counts[..., :num_segments]
    return sums[:, :, :num_segments] / counts.clamp(min=1)[..., None], counts


def take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of x (B, H, N, D) at index, int (B or 1, H or 1, n): (B, H, n, D)."""
    batch, heads, length, _ = x.shape
    start = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * length
    # One flat selection takes half the time of a gather with an index spread over the width.
    return (
        x.flatten(0, 2).index_select(0, (start + index).flatten()).unflatten(0, (batch, heads, -1))
    )


def group_sums(x: Tensor, label: Tensor, num_groups: int) -> Tensor:
    """Sums over groups of tokens: x (B, H, N, D), label (B, H, N) -> (B, H, num_groups, D).

    Tokens whose label is ``num_groups`` are left out.
    """
    batch, heads, _, dim = x.shape
    start = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * (num_groups + 1)
    sums = x.new_zeros(batch * heads * (num_groups + 1), dim)
    sums = sums.index_add(0, (start + label).flatten(), x.flatten(0, 2))
    return sums.unflatten(0, (batch, heads, num_groups + 1))[:, :, :num_groups]


def group_counts(label: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """How many tokens have each label: (B, H, N) -> (B, H, num_groups)."""
    counts = torch.zeros(*label.shape[:2], num_groups + 1, dtype=dtype, device=label.device)
    counts = counts.scatter_add(2, label, torch.ones_like(label, dtype=dtype))
    return counts[..., :num_groups]


def group_means(x: Tensor, label: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Means (B, H, num_groups, D), zero where empty, and counts (B, H, num_groups)."""
    counts = group_counts(label, num_groups, x.dtype)
    return group_sums(x, label, num_groups) / counts.clamp(min=1)[..., None], counts


@torch.no_grad()
def nearest(x: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest center of every token, in the Euclidean distance.

    Args:
        x: (B, H, N, D).
        centers: (B or 1, H or 1, C, D); a center of NaN is nobody's.

    Returns:
        int (B, H, N), the lower of equally near ones, and the squared distance.
    """
    batch, heads = x.shape[:2]
    centers = centers.expand(batch, heads, -1, -1)
    offset = torch.nan_to_num(centers.square().sum(-1) / -2, nan=-torch.inf)[:, :, None]
    centers = torch.nan_to_num(centers)
    rows = max((1 << 20) // (batch * heads * centers.shape[2]), 1)
    labels, scores = [], []
    for part in x.split(rows, 2):
        score, label = (part @ centers.mT).add_(offset).max(-1)
        labels.append(label)
        scores.append(score)
    distance = (x.square().sum(-1) - 2 * torch.cat(scores, 2)).clamp(min=0)
    return torch.cat(labels, 2), distance


@torch.no_grad()
def kmeans(
    x: Tensor, num_clusters: int, num_iterations: int, padding: Tensor | None = None
) -> Tensor:
    """Clusters of the tokens, by Lloyd's iteration from tokens that lie evenly in the sequence.

    A cluster that loses all its tokens restarts at one of the tokens that lie farthest from their
    centers. Tokens are centred first, so that float32 distances do not cancel.

    Args:
        x: (B, H, N, D).
        num_clusters: C; some clusters stay empty where there are fewer different tokens.
        num_iterations: Of Lloyd, positive.
        padding: bool (B or 1, 1, N), True = exists.

    Returns:
        int (B, H, N), labels of the last assignment, C for a token that does not exist. Statistics
        of the clusters must be taken over these labels: centers are those of the step before.
    """
    batch, heads, length, _ = x.shape
    x = x - masked_mean(x, padding)
    exists = x.new_ones((1, 1, length), dtype=torch.bool) if padding is None else padding
    exists = exists.expand(batch, heads, -1)
    order = (~exists).to(torch.uint8).argsort(dim=-1, stable=True)  # those that exist first
    total = exists.sum(-1, keepdim=True)
    even = (torch.arange(num_clusters, device=x.device) * total) // num_clusters
    centers = take(x, order.gather(2, even))
    again = F.pad(even[..., 1:] == even[..., :-1], (1, 0))  # fewer tokens than clusters
    centers = centers.masked_fill(again[..., None], torch.nan)
    while True:
        label, distance = nearest(x, centers)
        label = label.masked_fill(~exists, num_clusters)
        num_iterations -= 1
        if not num_iterations:
            return label
        distance = distance.masked_fill(~exists, -1.0)
        centers = _restart(x, *group_means(x, label, num_clusters), distance)


def _restart(x: Tensor, means: Tensor, counts: Tensor, distance: Tensor) -> Tensor:
    """Centers, the empty ones moved to the tokens that lie farthest from theirs."""
    empty = counts == 0
    far = distance.topk(min(means.shape[2], x.shape[2]), -1)
    rank = (empty.cumsum(-1) - 1).clamp(0, far.indices.shape[-1] - 1)
    spare = take(x, far.indices.gather(2, rank))
    useful = far.values.gather(2, rank) > 0
    spare = spare.masked_fill(~useful[..., None], torch.nan)
    return torch.where(empty[..., None], spare, means)


def existing(x: Tensor, padding: Tensor | None) -> Tensor:
    """Tokens (B, H, N, D) in float64, zeros where bool padding (B or 1, 1, N) is False."""
    x = x.double()
    return x if padding is None else x.masked_fill(~padding[..., None], 0.0)


def masked_mean(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over the tokens that exist: (B, H, N, D), bool (B or 1, 1, N) -> (B, H, 1, D)."""
    if padding is None:
        return x.mean(2, keepdim=True)
    weight = padding[..., None].to(x.dtype)
    return (x * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1)


def affine(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """The sum x @ weight + offset: the product starts from the offset, and no pass adds it.

    Args:
        x: (B, H, n, D).
        weight: (B or 1, H or 1, D, m).
        offset: (B or 1, H or 1, n or 1, m or 1).
    """
    lead = torch.broadcast_shapes(x.shape[:-2], weight.shape[:-2])
    x, weight, offset = (t.expand(*lead, -1, -1).flatten(0, 1) for t in (x, weight, offset))
    offset = offset.expand(-1, x.shape[1], weight.shape[2])
    return torch.baddbmm(offset, x, weight).unflatten(0, lead)


def exp_(x: Tensor) -> Tensor:
    """e^x in place, as a power of two: torch's exp crawls on a CPU where results underflow."""
    return x.mul_(_LOG2E).exp2_()


def exp_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """e^(x - s), and s (..., m), the largest entry of each column of x (..., n, m), a constant."""
    shift = x.detach().amax(-2)
    return exp_(x - finite(shift)[..., None, :]), shift


@torch.library.custom_op("numattn::exp_matmul", mutates_args=())
def _exp_matmul(
    a: Tensor, b: Tensor, right: Tensor, peak: Tensor, needed: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    left, shift = _left(a, peak)
    weights = (left @ right.mT).mul_(needed)
    # A sum that is so small has lost terms below the smallest normal number that could matter.
    info = torch.finfo(a.dtype)
    least = a.shape[-1] * info.tiny / info.eps
    lost = (weights.amax(-1) < least) & (shift + math.log(least) > floor)
    if bool(lost.any()):
        lost = lost & (needed & (b.amax(-1) > -torch.inf)[..., None, :]).any(-1)
        for row, head in _rows(lost, b):
            logs = (a[row][:, None] + b[head]).logsumexp(-1)
            logs = logs.masked_fill_(~needed[row[-1]], -torch.inf)
            top = finite(logs.amax(-1))
            weights.index_put_(row, exp_(logs - top[:, None]))
            shift.index_put_(row, top)
    return weights, shift


def _left(a: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """The factor with left_ir e^(b_jr - peak_r) = exp(a_ir + b_jr - shift_i), none above 1."""
    raised = a + finite(peak)[..., None, :]
    shift = finite(raised.amax(-1, keepdim=True))
    return exp_(raised.sub_(shift)), shift[..., 0]


def _rows(marked: Tensor, b: Tensor) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Indices of marked rows (..., n), and of the matrices they lie in, some rows at a time."""
    *batch, row = marked.nonzero(as_tuple=True)
    some = max((1 << 20) // (b.shape[-2] * b.shape[-1]), 1)
    for at in torch.arange(row.numel(), device=b.device).split(some):
        head = tuple(x[at] for x in batch)
        yield (*head, row[at]), head


@_exp_matmul.register_fake
def _(
    a: Tensor, b: Tensor, right: Tensor, peak: Tensor, needed: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    return a.new_empty((*a.shape[:-1], b.shape[-2])), a.new_empty(a.shape[:-1])


@torch.library.custom_op("numattn::exp_matmul_backward", mutates_args=())
def _exp_matmul_gradient(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    right: Tensor,
    peak: Tensor,
    needed: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    left, usual = _left(a, peak)
    grad = grad * needed
    lost = shift != usual
    rest = grad.masked_fill(lost[..., None], 0.0)
    grad_a, grad_b = (rest @ right).mul_(left), (rest.mT @ left).mul_(right)
    if bool(lost.any()):
        for row, head in _rows(lost, b):
            terms = a[row][:, None] + b[head]  # (rows, c, m)
            terms = terms.masked_fill_(~needed[row[-1]][..., None], -torch.inf)
            terms = exp_(terms.sub_(shift[row][:, None, None]))
            terms = terms.mul_(grad[row][..., None])
            grad_a.index_put_(row, terms.sum(1))
            grad_b.index_put_(head, terms, accumulate=True)
    return grad_a, grad_b


@_exp_matmul_gradient.register_fake
def _(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    right: Tensor,
    peak: Tensor,
    needed: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(b)


def _exp_matmul_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:5], output[1])


def _exp_matmul_backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
    return (*_exp_matmul_gradient(grad, *ctx.saved_tensors), None, None, None, None)


_exp_matmul.register_autograd(_exp_matmul_backward, setup_context=_exp_matmul_setup)


@register_flop_formula(torch.ops.numattn.exp_matmul)
def _exp_matmul_flops(a_shape, b_shape, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return 2 * math.prod(a_shape) * b_shape[-2]


@register_flop_formula(torch.ops.numattn.exp_matmul_backward)
def _exp_matmul_gradient_flops(grad_shape, a_shape, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return 4 * math.prod(a_shape) * grad_shape[-1]


def exp_matmul(
    a: Tensor,
    b: Tensor,
    needed: Tensor,
    floor: Tensor,
    columns: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Matrix product of exponentials: :math:`w_{ij} e^{s_i} = \sum_r e^{a_{ir} + b_{jr}}`.

    One product of matrices, each shifted so that none of its entries exceeds 1. Where all that a
    row needs is lost to underflow, its sums are taken in log space instead. So each row is exact
    relative to its largest entry, or to `floor` if that is larger, whatever the other rows and the
    entries that are not needed hold.

    Args:
        a: (..., n, m).
        b: (..., c, m), the same leading dimensions.
        needed: bool (n, c); the other entries are zero.
        floor: (..., n), logarithm of a sum that is negligible in that row.
        columns: What `exp_columns` makes of b, where it is known.

    Returns:
        w (..., n, c), differentiable, and s (..., n), a constant.
    """
    right, peak = exp_columns(b.detach()) if columns is None else columns
    weights, shift = _exp_matmul(a, b, right.detach(), peak, needed, floor)
    return weights, shift.detach()


def finite(shift: Tensor) -> Tensor:
    """A shift that may be subtracted: -inf (nothing there) becomes a large negative number."""
    return shift.clamp(min=-1e30)
