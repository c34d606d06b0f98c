"""Groups of keys: what a few numbers of a page or cluster say about the logits of its members.

With the mean c of n keys and x_j = scale q.(k_j - c), the logits of the group are a + x_j with
a = scale q.c, and the x_j have mean zero. So n e^a is the least that the sum of their exponentials
can be, and the largest deviation and the variance bound how much more it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numattn.core.linalg import group_means, group_sums, take

_STEPS = 4  # of the power iteration, which starts from a good guess


@dataclass(frozen=True)
class Groups:
    """Statistics of groups of keys; those that were not asked for are None.

    Attributes:
        count: (B, H, C), in the type of the keys; 0 for an empty group, whose statistics are 0.
        mean: (B, H, C, D).
        low: (B, H, C, D), least coordinates,
        high: and greatest: the box.
        radius: (B, H, C), distance of the farthest key from the mean: the ball.
        axes: (B, H, C, R, D), principal axes: orthonormal, or zero where nothing is spread.
        variance: (B, H, C, R), mean square along each axis.
        rest: (B, H, C), mean square distance from the mean that the axes leave, over all the
            other directions together.
    """

    count: Tensor
    mean: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    radius: Tensor | None = None
    axes: Tensor | None = None
    variance: Tensor | None = None
    rest: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """What the statistics say of every query and group, each (B, H, rows, C), -inf where empty.

    Attributes:
        centroid: log n + a, a lower bound of the logarithm of the group's sum (Jensen).
        box: Upper bound of the group's greatest logit from the box; None without one.
        ball: The same from the ball; None without one.
        cumulant: log n + a + min(variance of the logits / 2, Bennett's bound): an estimate of the
            logarithm of the sum, to second order; None without axes and a box or a ball.
    """

    centroid: Tensor
    box: Tensor | None = None
    ball: Tensor | None = None
    cumulant: Tensor | None = None


def group_statistics(
    k: Tensor,
    label: Tensor,
    num_groups: int,
    *,
    box: bool = False,
    ball: bool = False,
    num_axes: int = 0,
) -> Groups:
    """Statistics of the keys of each label, all of them from the same labels.

    Mean, variances and the remaining variance are differentiable in k. Box, ball and the axes
    themselves are constants for autograd.

    Args:
        k: (B, H, N, D), float32 or float64.
        label: int (B, H, N), 0 to ``num_groups``; keys labelled ``num_groups`` are left out.
        num_groups: C.
        box: Whether to find ``low`` and ``high``.
        ball: Whether to find ``radius``.
        num_axes: R, principal axes to find, at most D. They come from a few power iterations, so
            they are near the best where one variance is far above the next. What they are not is
            not lost: their variances and the rest always sum to the whole.

    Returns:
        The statistics.
    """
    mean, count = group_means(k, label, num_groups)
    low = high = radius = axes = variance = rest = None
    if box:
        low, high = (_extreme(k.detach(), label, num_groups, how) for how in ("amin", "amax"))
    if ball or num_axes:
        centred = k - take(mean, label.clamp(max=num_groups - 1))
        length = centred.detach().square().sum(-1)
        farthest = _extreme(length[..., None], label, num_groups, "amax")[..., 0]
        radius = farthest.sqrt() if ball else None
        if num_axes:
            axes, variance, rest = _principal(centred, label, num_groups, num_axes)
    return Groups(count, mean, low, high, radius, axes, variance, rest)


def _extreme(x: Tensor, label: Tensor, num_groups: int, how: str) -> Tensor:
    """Least or greatest ("amin", "amax") of x (B, H, N, D) in each group, 0 where it is empty."""
    found = x.new_zeros(*x.shape[:2], num_groups + 1, x.shape[3])
    index = label[..., None].expand_as(x)
    return found.scatter_reduce(2, index, x, how, include_self=False)[:, :, :num_groups]


def _principal(
    x: Tensor, label: Tensor, num_groups: int, num_axes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Axes, variances along them, and what is left, of keys x given from their group's mean."""
    own = label.clamp(max=num_groups - 1)
    axes: list[Tensor] = []
    variances = []
    for _ in range(num_axes):
        axis = _axis(x.detach(), label, num_groups)
        for other in (*axes, *axes):  # once more, where nothing but rounding was left
            axis = _unit(axis - (axis * other).sum(-1, keepdim=True) * other)
        along = (x * take(axis, own)).sum(-1, keepdim=True)  # (B, H, N, 1)
        axes.append(axis)
        variances.append(group_means(along.square(), label, num_groups)[0][..., 0])
        x = x - along * take(axis, own)
    rest = group_means(x.square().sum(-1, keepdim=True), label, num_groups)[0][..., 0]
    return torch.stack(axes, 3), torch.stack(variances, 3), rest


@torch.no_grad()
def _axis(x: Tensor, label: Tensor, num_groups: int) -> Tensor:
    """Unit vector along which each group of x is spread most, (B, H, C, D), or zero.

    Power iteration from the first of the keys that lie farthest from the mean.
    """
    own = label.clamp(max=num_groups - 1)
    length = x.square().sum(-1, keepdim=True)
    farthest = length == take(_extreme(length, label, num_groups, "amax"), own)
    number = torch.arange(x.shape[2], device=x.device)[:, None].where(farthest, x.shape[2])
    first = _extreme(number, label, num_groups, "amin")[..., 0]
    axis = _unit(take(x, first))
    for _ in range(_STEPS):
        along = (x * take(axis, own)).sum(-1, keepdim=True)
        axis = _unit(group_sums(x * along, label, num_groups))
    return axis


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one; zero stays zero."""
    length = x.norm(dim=-1, keepdim=True)
    return x / length.masked_fill(length == 0, 1.0)


def group_scores(q: Tensor, groups: Groups, scale: float) -> Scores:
    """Bounds and estimates of the logits of every group, for every query.

    Args:
        q: (B, H, rows, D).
        groups: Of keys of the same heads.
        scale: Factor of the logits; may be negative.

    Returns:
        What the statistics that are there allow.

    Cost: 2 C D operations per row for the centroids, 4 C D for the box and 2 C D for every axis.
    """
    empty = groups.count == 0  # (B, H, C)
    q = q * scale
    mean = q @ groups.mean.mT
    centroid = mean + groups.count.log()[..., None, :]  # log 0 = -inf
    box = ball = reach = None
    if groups.low is not None and groups.high is not None:
        box = q.clamp(min=0) @ groups.high.mT + q.clamp(max=0) @ groups.low.mT
        reach = box
    if groups.radius is not None:
        ball = mean + q.norm(dim=-1, keepdim=True) * groups.radius[..., None, :]
        reach = ball if reach is None else torch.minimum(reach, ball)
    cumulant = None
    if reach is not None and groups.axes is not None:
        variance = logit_variance(q, groups)
        cumulant = centroid + torch.minimum(variance / 2, log_bennett(variance, reach - mean))
    if box is not None:
        box = box.masked_fill(empty[..., None, :], -torch.inf)
    if ball is not None:
        ball = ball.masked_fill(empty[..., None, :], -torch.inf)
    return Scores(centroid, box, ball, cumulant)


def logit_variance(q: Tensor, groups: Groups) -> Tensor:
    """Variance of the logits of every group, (B, H, rows, C), for q that is scaled already.

    Exact for q along an axis. Axes are taken to be uncorrelated, and what they leave to be spread
    alike over all other directions.
    """
    axes, variance, rest = groups.axes, groups.variance, groups.rest
    if axes is None or variance is None or rest is None:
        raise ValueError("logit_variance needs groups with axes.")
    along = (q @ axes.flatten(2, 3).mT).unflatten(3, axes.shape[2:4]).square()
    other = (q.square().sum(-1)[..., None] - along.sum(-1)).clamp(min=0)
    share = rest / max(q.shape[3] - axes.shape[3], 1)
    return (along * variance[:, :, None]).sum(-1) + other * share[..., None, :]


def log_bennett(variance: Tensor, reach: Tensor) -> Tensor:
    r"""Upper bound of log E e^x for x of mean zero that does not exceed `reach`, elementwise.

    Bennett's: of all such x with variance v, E e^x is greatest where x takes two values only,
    b = reach and -v / b,

    .. math:: E\, e^x \le \frac{v\, e^b + b^2 e^{-v/b}}{v + b^2} .

    Where b is so small that it would be divided by zero, the bound is its limit v / 2.
    """
    small = reach < 1e-6
    b = reach.masked_fill(small, 1.0)
    v = variance.masked_fill(small, 0.0)
    least = torch.finfo(v.dtype).tiny
    high = (v / (v + b * b)).clamp(min=least).log() + b
    low = (b * b / (v + b * b)).clamp(min=least).log() - v / b
    return torch.where(small, variance / 2, torch.logaddexp(high, low))
