"""The sum of Kronecker products that is nearest to a matrix: Van Loan and Pitsianis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from numattn.core.inputs import Unsupported, positive

_WIDEST = 2048  # a rearranged matrix with more rows and columns is factored by iteration


@dataclass(frozen=True, eq=False)
class KroneckerSum:
    r"""A sum of Kronecker products, :math:`\sum_i B_i \otimes C_i`, near a given matrix.

    Attributes:
        left: B, float64 (R, r_1, c_1).
        right: C, float64 (R, r_2, c_2).
        singular_values: Of the rearranged matrix, falling; all of them, or the first R where they
            were found by iteration.
        norm: Frobenius norm of the given matrix.
        distance: Frobenius norm of its difference from the sum.
    """

    left: Tensor
    right: Tensor
    singular_values: Tensor
    norm: float
    distance: float

    @property
    def rank(self) -> int:
        """Products in the sum, R."""
        return len(self.left)

    @property
    def error(self) -> float:
        """Frobenius norm of the difference relative to the matrix's; 0 for a matrix of zeros."""
        return self.distance / self.norm if self.norm else 0.0

    def keep(self, rank: int) -> KroneckerSum:
        """The sum of the first products only: the nearest of that rank."""
        positive("KroneckerSum", "rank", rank)
        rest = self.singular_values[rank : self.rank].norm().item()
        distance = math.hypot(self.distance, rest)
        return replace(self, left=self.left[:rank], right=self.right[:rank], distance=distance)

    def dense(self) -> Tensor:
        """The sum as a matrix, (r_1 r_2, c_1 c_2)."""
        blocks = torch.einsum("iab,icd->acbd", self.left, self.right)
        return blocks.flatten(2, 3).flatten(0, 1)

    def apply(self, v: Tensor) -> Tensor:
        """The sum times v, without forming it.

        Args:
            v: (..., c_1 c_2, E).

        Returns:
            (..., r_1 r_2, E), in the type of v.

        Cost: 2 R c_1 r_2 (c_2 + r_1) E operations.
        """
        left, right = self.left.to(v), self.right.to(v)
        grid = v.unflatten(-2, (left.shape[2], right.shape[2]))  # (..., c_1, c_2, E)
        inner = torch.einsum("icd,...bde->...ibce", right, grid)  # (..., R, c_1, r_2, E)
        return torch.einsum("iab,...ibce->...ace", left, inner).flatten(-3, -2)


@torch.no_grad()
def nearest_kronecker(
    a: Tensor, sizes_rows: Sequence[int], sizes_columns: Sequence[int], *, rank: int = 1
) -> KroneckerSum:
    r"""The sum of R Kronecker products that is nearest to a matrix in the Frobenius norm.

    With A cut into blocks of the size of the second factor, and each block made a row,

    .. math:: \mathcal{R}(B \otimes C) = \mathrm{vec}(B)\, \mathrm{vec}(C)^T,

    a Kronecker product is a matrix of rank 1. Rearranging keeps the Frobenius norm, so the
    truncated singular value decomposition of :math:`\mathcal{R}(A)` is the nearest sum, and

    .. math:: \min \Big\| A - \sum_{i=1}^{R} B_i \otimes C_i \Big\|_F^2 = \sum_{i > R} \sigma_i^2 .

    Of weights of attention it is the oracle: no `kronecker_attention`, nor a sum of R heads of it,
    is nearer to them.

    Args:
        a: A, (r_1 r_2, c_1 c_2).
        sizes_rows: (r_1, r_2).
        sizes_columns: (c_1, c_2).
        rank: R, positive; more than min(r_1 c_1, r_2 c_2) is the same as that.

    Returns:
        The sum, its singular values and its error; constants for autograd.

    Cost: The singular value decomposition of a matrix of r_1 c_1 x r_2 c_2, in float64. Where both
    exceed 2048 and R is below a tenth of them, the first R singular triples by iteration (ARPACK).

    Exact when: R = min(r_1 c_1, r_2 c_2), or A is such a sum.

    Limits: two factors. For three, the nearest sum is a nearest tensor of given rank, which need
    not exist; take two groups of modes, and split the second factors in their turn. The nearest
    sum has rows that need not sum to one and entries that may be negative; the first product of a
    matrix without negative entries has none.

    Raises:
        TypeError: ``a`` is not a floating-point tensor.
        ValueError: Sizes do not multiply to the shape of ``a``, or the rank is not positive.
        Unsupported: More or fewer than two factors.

    References:
        C. Van Loan, N. Pitsianis, "Approximation with Kronecker Products", 1993,
        https://doi.org/10.1007/978-94-015-8196-7_17.

    Example:
        >>> b, c = torch.rand(3, 3), torch.rand(4, 4)
        >>> nearest_kronecker(torch.kron(b, c), (3, 4), (3, 4)).error < 1e-6
        True
    """
    _check_sizes(a, sizes_rows, sizes_columns)
    positive("nearest_kronecker", "rank", rank)
    (r1, r2), (c1, c2) = sizes_rows, sizes_columns
    rearranged = a.double().reshape(r1, r2, c1, c2).transpose(1, 2).reshape(r1 * c1, r2 * c2)
    rank = min(rank, *rearranged.shape)
    if min(rearranged.shape) > _WIDEST and 10 * rank < min(rearranged.shape):
        u, s, vt = _leading(rearranged, rank)
        distance = (rearranged - (u * s) @ vt).norm()
    else:
        u, s, vt = torch.linalg.svd(rearranged, full_matrices=False)
        distance = s[rank:].norm()
    if u[:, 0].sum() < 0:  # the sign that makes the first product of positive entries positive
        u, vt = -u, -vt
    root = s[:rank].sqrt()
    return KroneckerSum(
        left=(u[:, :rank] * root).mT.unflatten(1, (r1, c1)),
        right=(root[:, None] * vt[:rank]).unflatten(1, (r2, c2)),
        singular_values=s,
        norm=rearranged.norm().item(),
        distance=distance.item(),
    )


def _leading(a: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values, falling, and their vectors; the start is always the same."""
    import numpy as np
    from scipy.sparse.linalg import svds

    start = np.random.default_rng(0).standard_normal(min(a.shape))
    u, s, vt = (torch.from_numpy(x.copy()).to(a) for x in svds(a.cpu().numpy(), k=rank, v0=start))
    order = s.argsort(descending=True)
    return u[:, order], s[order], vt[order]


def _check_sizes(a: Tensor, rows: Sequence[int], columns: Sequence[int]) -> None:
    name = "nearest_kronecker"
    if not isinstance(a, Tensor) or not a.is_floating_point():
        got = str(a.dtype) if isinstance(a, Tensor) else type(a).__name__
        raise TypeError(f"{name}: a must be a floating-point tensor; got {got}.")
    if len(rows) != 2 or len(columns) != 2:
        raise Unsupported(
            f"{name} finds sums of products of two factors; got {len(rows)} sizes of rows and "
            f"{len(columns)} of columns. The nearest sum of more factors need not exist: join "
            "modes into two groups, and split the second factors in their turn."
        )
    for argument, sizes in (("sizes_rows", rows), ("sizes_columns", columns)):
        for n in sizes:
            positive(name, argument, n)
    if a.shape != (math.prod(rows), math.prod(columns)):
        raise ValueError(
            f"{name}: a must have shape {(math.prod(rows), math.prod(columns))}, the products of "
            f"sizes_rows and sizes_columns; got {tuple(a.shape)}."
        )
