"""Pivots of a Gaussian kernel: points that span the others, by randomly pivoted Cholesky.

Points are drawn one after the other, each in proportion to what those before it leave unexplained.
Here several are proposed at a time from the same residuals, and each is accepted with the
probability that its residual has kept since: accepted points follow the sequential law, and the
work is in products of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from numattn.core.linalg import exp_, finite, take
from numattn.engines.tiles import spans, tile_elements

BLOCK = 32  # most proposals at a time

Place = tuple[Tensor, Tensor]


def gaussian_pivots(
    x: Tensor,
    num_pivots: int,
    uniform: Tensor,
    *,
    log_weight: Tensor | None = None,
    padding: Tensor | None = None,
    block: int = BLOCK,
) -> Tensor:
    r"""Choose points by randomly pivoted Cholesky on a Gaussian kernel.

    With :math:`\kappa(x, y) = e^{-|x - y|^2 / 2}` and pivots S chosen so far, the residual of a
    point is :math:`d_i = 1 - \kappa(x_i, S) \kappa(S, S)^{-1} \kappa(S, x_i)`; the next pivot is i
    with probability proportional to :math:`d_i e^{g_i}`, g being ``log_weight``. This is randomly
    pivoted Cholesky of the matrix :math:`e^{g_i / 2} \kappa(x_i, x_j) e^{g_j / 2}`. Residuals up to
    unit roundoff times :math:`M (1 + \max_i |x_i|^2)` are rounding noise and count as zero.

    Points are proposed in blocks, and accepted with the probability that the residual has kept
    since the proposal, which leaves the law as it is. The next block has up to twice as many
    proposals as were accepted, so that no more than ``block + 2 r`` numbers are used.

    Args:
        x: (B, H, M, D), any floating type; computed in float64. Subtract a mean from points that
            lie far from 0, for rounding grows with their norms.
        num_pivots: r, positive.
        uniform: Numbers in [0, 1), (H, n, 2), for a proposal and for its acceptance; shared by the
            batch, every (b, h) uses them in order as it needs. When they are used up, the point
            with the largest weighted residual is next.
        log_weight: g, (B, H, M); zero when None. -inf removes a point.
        padding: bool (B or 1, H or 1, M), True = exists; others are never chosen.
        block: Most proposals at a time, positive.

    Returns:
        int64 (B, H, r), without repetitions; -1 at the end, once all residuals count as zero.
        Constant for autograd; each (b, h) depends on its own points only.

    Cost: M r (2 D + r) operations, in float64, and M r numbers for each (b, h).

    References:
        Y. Chen, E. Epperly, J. Tropp and R. Webber, "Randomly pivoted Cholesky: Practical
        approximation of a kernel matrix with few entry evaluations", 2022,
        https://arxiv.org/abs/2207.06503.
        E. Epperly, J. Tropp and R. Webber, "Embrace rejection: Kernel matrix approximation by
        accelerated randomly pivoted Cholesky", 2024, https://arxiv.org/abs/2410.03969.
    """
    with torch.no_grad():
        exists = torch.ones_like(x[..., 0], dtype=torch.bool) if padding is None else padding
        exists = exists.expand(x.shape[:3])
        g = torch.zeros_like(x[..., 0], dtype=torch.float64)
        if log_weight is not None:
            g = log_weight.to(torch.float64)
            exists = exists & (g > -torch.inf)
        numbers = uniform.to(x.device, torch.float64).expand(x.shape[0], *uniform.shape)
        flat = (t.flatten(0, 1) for t in (x.to(torch.float64), exists, g, numbers))
        return _pivots(*flat, num_pivots, block).unflatten(0, x.shape[:2])


@torch.library.custom_op("numattn::gaussian_pivots", mutates_args=())
def _pivots(
    x: Tensor, exists: Tensor, g: Tensor, uniform: Tensor, num_pivots: int, block: int
) -> Tensor:
    factor = _Factor(x, exists, g, num_pivots)
    used = torch.zeros_like(factor.count)
    size = torch.full_like(used, block)
    while bool(factor.open().any()):
        points, chance = factor.propose(uniform, used, size)
        taken = factor.extend(points, chance)
        used = used + size
        size = (2 * taken).clamp(1, block)
    return factor.pivots


@_pivots.register_fake
def _(x: Tensor, exists: Tensor, g: Tensor, uniform: Tensor, num_pivots: int, block: int) -> Tensor:
    return x.new_empty((x.shape[0], num_pivots), dtype=torch.int64)


@register_flop_formula(torch.ops.numattn.gaussian_pivots)
def _pivots_flops(x_shape, exists, g, uniform, num_pivots, *args, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return pivot_flops(x_shape[0], x_shape[1], x_shape[2], num_pivots)


def pivot_flops(matrices: int, length: int, dim: int, num_pivots: int) -> int:
    """Operations of `gaussian_pivots` on so many sets of points, for `Method.cost`."""
    r = min(num_pivots, length)
    return matrices * length * r * (2 * dim + r)


class _Factor:
    """Partial Cholesky factors of n kernel matrices, which grow at their own pace.

    Attributes:
        pivots: int (n, r), -1 where there is none yet.
        count: int (n,), how many there are.
    """

    def __init__(self, x: Tensor, exists: Tensor, g: Tensor, num_pivots: int) -> None:
        n, length, _ = x.shape
        self.x, self.g = x, g
        self.half = x.norm(dim=-1).square() / 2
        self.residual = exists.to(x.dtype)  # d, (n, M)
        self.rows = x.new_zeros(n, num_pivots, length)  # L^T
        self.pivots = torch.full((n, num_pivots), -1, device=x.device)
        self.count = torch.zeros(n, dtype=torch.int64, device=x.device)
        spread = 1 + 2 * (self.half * self.residual).amax(-1)
        self.noise = torch.finfo(x.dtype).eps * self.residual.sum(-1) * spread  # (n,)

    def open(self) -> Tensor:
        """Which of them can be given another pivot, bool (n,)."""
        return (self.count < self.pivots.shape[1]) & (self.residual > 0).any(-1)

    def propose(self, uniform: Tensor, used: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Up to `size` points, drawn by their weighted residuals, and numbers for their acceptance.

        The latter are infinite where there is no proposal. When all of `uniform` are `used`, the
        heaviest point is proposed.
        """
        g = self.g.masked_fill(self.residual == 0, -torch.inf)
        weight = self.residual * exp_(g - finite(g.amax(-1, keepdim=True)))
        reach = weight.cumsum(-1)  # the distribution function, unnormalised
        total = reach[:, -1:]
        slot = torch.arange(int(size.max()), device=used.device)
        place = used[:, None] + slot
        left = (place < uniform.shape[1]) & (slot < size[:, None])
        place = place.clamp(max=uniform.shape[1])[..., None].expand(-1, -1, 2)
        numbers = F.pad(uniform, (0, 0, 0, 1)).gather(1, place)
        below = torch.nextafter(total, torch.zeros_like(total))  # never beyond the last weight
        points = torch.searchsorted(
            reach, torch.minimum(numbers[..., 0] * total, below), right=True
        )
        points = points.clamp(max=weight.shape[1] - 1)
        spent = (used >= uniform.shape[1])[:, None]
        points = torch.where(spent, weight.argmax(-1, keepdim=True), points)
        chance = numbers[..., 1].masked_fill(~left & ~(spent & (slot == 0)), torch.inf)
        return points, chance

    def extend(self, points: Tensor, chance: Tensor) -> Tensor:
        """Accept some of these points as pivots; returns how many, int (n,)."""
        done = int(self.count.max())
        known = self.rows[:, :done].gather(2, points[:, None].expand(-1, done, -1))
        near = torch.baddbmm(self._kernel(points, points), known.mT, known, alpha=-1)
        accepted, local = self._accept(points, chance, near)
        taken = accepted.sum(-1)
        order = (~accepted).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(taken.max())]
        points, fresh = points.gather(1, order), accepted.gather(1, order)
        matrix, slot = fresh.nonzero(as_tuple=True)
        place = (matrix, self.count[matrix] + slot)
        self.pivots[place] = pivots = points[matrix, slot]
        self.count = self.count + taken
        self.residual[matrix, pivots] = 0.0
        if bool(self.open().any()):
            both = order[:, :, None] * len(accepted[0]) + order[:, None]  # rows and columns
            local = local.flatten(1).gather(1, both.flatten(1)).view(both.shape)
            local.diagonal(dim1=1, dim2=2).masked_fill_(~fresh, 1.0)
            known = known.gather(2, order[:, None].expand(-1, done, -1))
            self._explain(points, known, local, place, slot)
        return taken

    def _explain(
        self, points: Tensor, known: Tensor, local: Tensor, place: Place, slot: Tensor
    ) -> None:
        """Write the rows of new pivots, and take what they explain from the residuals.

        Args:
            points: int (n, a), the pivots; some matrices have fewer.
            known: (n, count, a), their columns of the rows there are.
            local: (n, a, a), their Cholesky factor.
            place: Matrix and row of each pivot.
            slot: Where it stands in its matrix's `points`.
        """
        n, a = points.shape
        rows = known.shape[1]
        for c0, c1 in spans(self.x.shape[1], max(tile_elements(self.x.device) // (4 * n * a), 64)):
            new = self._kernel(points, slice(c0, c1))
            new = new.baddbmm_(known.mT, self.rows[:, :rows, c0:c1], alpha=-1)
            # The transposed system has the memory order that the solver takes without a copy.
            new = torch.linalg.solve_triangular(local.mT, new.mT, upper=True, left=False).mT
            new = new[place[0], slot]
            self.rows[place[0], place[1], c0:c1] = new
            self.residual[:, c0:c1].index_add_(0, place[0], new.square_(), alpha=-1)
        self.residual.masked_fill_(self.residual <= self.noise[:, None], 0.0)

    def _accept(self, points: Tensor, chance: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Go through proposals one after the other, each against what those before it left of it.

        Args:
            points: int (n, b).
            chance: (n, b).
            near: (n, b, b), residual kernel between the points.

        Returns:
            bool (n, b), and their Cholesky factor (n, b, b), with zero columns for the others.
        """
        before = self.residual.gather(1, points)
        near.diagonal(dim1=1, dim2=2).copy_(before)  # without the rounding of another sum
        accepted = torch.zeros_like(points, dtype=torch.bool)
        local = torch.zeros_like(near)
        room = self.pivots.shape[1] - self.count
        for t in range(points.shape[1]):
            left = near[:, t, t]
            fits = (left > self.noise) & (room > 0)
            accepted[:, t] = taken = (chance[:, t] * before[:, t] < left) & fits
            column = near[:, :, t] * left.masked_fill(~taken, torch.inf).rsqrt()[:, None]
            near = torch.baddbmm(near, column[:, :, None], column[:, None], alpha=-1)
            same = taken[:, None] & (points == points[:, t, None])
            near.diagonal(dim1=1, dim2=2).masked_fill_(same, 0.0)
            local[:, :, t] = column
            room = room - taken.long()
        return accepted, local

    def _kernel(self, points: Tensor, others: Tensor | slice) -> Tensor:
        """The kernel between points (n, a) and others, (n, b) or some of all: (n, a, b)."""
        near, half = self._at(points)
        x, other = self._at(others)
        logs = torch.bmm(near, x.mT).sub_(half[..., None]).sub_(other[:, None])
        return exp_(logs.clamp_(max=0.0))

    def _at(self, points: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Points and half their squared norms."""
        if isinstance(points, slice):
            return self.x[:, points], self.half[:, points]
        return take(self.x[:, None], points[:, None])[:, 0], self.half.gather(1, points)
