"""Linear algebra that several methods need, in float32 at least."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.utils.flop_counter import register_flop_formula


def draw(shape: tuple[int, ...], generator: Generator | None, device: torch.device) -> Tensor:
    """Standard normal float64 numbers, drawn on the CPU so that every device agrees."""
    source = generator.device if generator is not None else "cpu"
    return torch.randn(shape, dtype=torch.float64, device=source, generator=generator).to(device)


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


def masked_mean(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over the tokens that exist: (B, H, N, D), bool (B or 1, 1, N) -> (B, H, 1, D)."""
    if padding is None:
        return x.mean(2, keepdim=True)
    weight = padding[..., None].to(x.dtype)
    return (x * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1)


@torch.library.custom_op("numattn::log_matmul_exp", mutates_args=())
def _log_matmul_exp(a: Tensor, b: Tensor, needed: Tensor) -> Tensor:
    a_max, b_max = _peak(a), _peak(b)
    product = (a - a_max).exp_() @ (b - b_max).exp_().mT
    # Terms below the smallest normal number are lost; where they could matter, add up in logs.
    info = torch.finfo(a.dtype)
    threshold = a.shape[-1] * info.tiny / info.eps
    lost = product < threshold if bool(product.amin() < threshold) else None
    out = product.log_().add_(a_max).add_(b_max.mT)
    if lost is not None:
        _add_up_in_logs(a, b, lost & needed, out)
    return out


def _add_up_in_logs(a: Tensor, b: Tensor, where: Tensor, out: Tensor) -> None:
    """Set the entries of `out` that `where` marks to logsumexp(a_i + b_j), some at a time."""
    *batch, i, j = where.nonzero(as_tuple=True)
    for at in torch.arange(i.numel(), device=a.device).split(1 << 14):
        row = (*(x[at] for x in batch), i[at])
        col = (*row[:-1], j[at])
        out.index_put_((*row, j[at]), (a[row] + b[col]).logsumexp(-1))


@_log_matmul_exp.register_fake
def _(a: Tensor, b: Tensor, needed: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]))


def _log_matmul_exp_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, output)


def _log_matmul_exp_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    a, b, needed, out = ctx.saved_tensors
    a_max, b_max = _peak(a), _peak(b)
    peak = a_max + b_max.mT
    weight = torch.where(needed & (out > -torch.inf), grad * (peak - out).exp(), 0.0)
    ea, eb = (a - a_max).exp(), (b - b_max).exp()
    return (weight @ eb) * ea, (weight.mT @ ea) * eb, None


_log_matmul_exp.register_autograd(_log_matmul_exp_backward, setup_context=_log_matmul_exp_setup)


@register_flop_formula(torch.ops.numattn.log_matmul_exp)
def _log_matmul_exp_flops(a_shape, b_shape, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
    batch = 1
    for n in a_shape[:-2]:
        batch *= n
    return 2 * batch * a_shape[-2] * b_shape[-2] * a_shape[-1]


def log_matmul_exp(a: Tensor, b: Tensor, needed: Tensor) -> Tensor:
    r"""The matrix product in log space: :math:`\log \sum_r e^{a_{ir} + b_{jr}}`.

    Computed as one matrix product of exponentials, shifted by each row's own maximum, so that an
    entry depends on its own rows only; entries that underflow there are added up in log space.

    Args:
        a: (..., n, m).
        b: (..., c, m), the same leading dimensions.
        needed: bool (n, c); other entries need not be resolved and take no gradient.

    Returns:
        (..., n, c).
    """
    return _log_matmul_exp(a, b, needed)


def _peak(x: Tensor) -> Tensor:
    peak = x.amax(-1, keepdim=True)
    return torch.where(peak == -torch.inf, 0.0, peak)
