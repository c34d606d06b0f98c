"""Oracles of methods whose weights are a matrix of low rank, or a sum of Kronecker products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from numattn.core.inputs import positive
from numattn.core.kronecker import nearest_kronecker
from numattn.core.linalg import draw
from numattn.measure.errors import HeadError, Reference, head_errors, weights_errors

_WEIGHTS = 2048  # tokens up to which the errors of every truncation's weights are summed
_WHOLE = 4096  # tokens up to which the whole decomposition is computed
_LONGEST = 8192  # tokens up to which some of it is,
_HIGHEST = 1024  # up to this rank

_OVERSAMPLING = 10
_POWER_STEPS = 2


@dataclass(frozen=True, eq=False)
class Factors:
    """Left singular vectors of the weights P, or nearly so.

    Attributes:
        vectors: U, (B, H, N, r), orthonormal, by falling singular value.
        squares: Squared norms of the rows of U^T P, (B, H, r).
        rest: Squared Frobenius norm of P - U U^T P, (B, H).
    """

    vectors: Tensor
    squares: Tensor
    rest: Tensor

    @property
    def tails(self) -> Tensor:
        """Frobenius error of projecting P on the first k vectors, k = 0, ..., r: (B, H, r + 1).

        Relative to the norm of P.
        """
        parts = torch.cat([self.squares, self.rest[..., None]], -1)
        sums = parts.flip(-1).cumsum(-1).flip(-1)
        return (sums / sums[..., :1]).sqrt()


def factors(rank: int, ref: Reference) -> Factors | None:
    """Left singular vectors, `rank` of them or more; None where that takes too long."""
    length = ref.x.length
    if length <= _WHOLE:
        return ref.keep("factors", lambda: _stack(ref, length))
    if length > _LONGEST or rank > _HIGHEST:
        return None
    # A few widths serve all ranks, and what is found does not depend on which was asked first.
    power = 1 << (rank - 1).bit_length()
    width = power + max(power // 2, _OVERSAMPLING)
    return ref.keep(f"factors {width}", lambda: _stack(ref, width))


def truncated(rank: int, ref: Reference) -> list[HeadError] | None:
    """Errors of the truncated singular value decomposition of the weights, as U U^T P."""
    found = factors(rank, ref)
    if found is None:
        return None
    u = found.vectors[..., :rank]
    if ref.x.length <= _WEIGHTS:
        projected = u.mT @ ref.weights()  # (B, H, r, N)

        def predict(log_weights: Tensor, first: int) -> Tensor:
            return u[:, :, first : first + log_weights.shape[2]] @ projected

        return weights_errors(predict, ref)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return u @ (u.mT @ ref.out)

    errors = head_errors(attend, ref, dtype=torch.float64, with_weights=False)
    tails = found.tails[..., rank].flatten().tolist()
    return [replace(e, weights=tail) for e, tail in zip(errors, tails, strict=True)]


def truncated_curve(ref: Reference, rank: int) -> Tensor | None:
    """Relative Frobenius error of the truncations of ranks 0, ..., `rank`: (B, H, rank + 1)."""
    found = factors(rank, ref)
    return None if found is None else found.tails[..., : rank + 1]


def kronecker_oracle(terms: int, sizes: Sequence[int], ref: Reference) -> list[HeadError]:
    r"""Errors of the nearest sum of Kronecker products, on tokens that form a grid.

    With token :math:`(i, j)` in row :math:`i n_2 + j` of the weights P of a head, they are replaced
    by

    .. math:: \arg\min \Big\| P - \sum_{t=1}^{R} B_t \otimes C_t \Big\|_F, \qquad
              B_t \in \mathbb{R}^{n_1 \times n_1},\ C_t \in \mathbb{R}^{n_2 \times n_2},

    which `numattn.tensor.nearest_kronecker` finds. No `numattn.tensor.kronecker_attention`, whose
    weights are such a sum of as many terms as its cost has ``units``, is nearer to them in the
    Frobenius norm.

    Args:
        terms: R, positive; more than min(n_1, n_2)^2 is the same as that, and exact.
        sizes: (n_1, n_2), n_1 n_2 = N.
        ref: The exact weights, of tokens of the grid only.

    Returns:
        The errors of each query head.

    Raises:
        ValueError: The sizes do not multiply to N, or are not positive.
        Unsupported: More or fewer than two sizes.

    Cost: One singular value decomposition of an n_1^2 x n_2^2 matrix per head.

    Limits: weights of a grid of three modes or more, and a token without a place, such as a class
    token: leave it out of q, k and v.

    References:
        C. Van Loan, N. Pitsianis, "Approximation with Kronecker Products", 1993,
        https://doi.org/10.1007/978-94-015-8196-7_17.
    """
    positive("kronecker_oracle", "terms", terms)
    if math.prod(sizes) != ref.x.length:
        raise ValueError(
            f"kronecker_oracle: sizes must multiply to the {ref.x.length} tokens of "
            f"{ref.x.name}; got {tuple(sizes)}. Leave out tokens that have no place on the grid."
        )
    return ref.keep(f"kronecker {terms} {tuple(sizes)}", lambda: _kronecker(terms, sizes, ref))


def single_heads(ref: Reference) -> Iterator[Reference]:
    """The reference of every query head on its own: what is N x N exists for one at a time."""
    for b in range(ref.x.q.shape[0]):
        for h in range(ref.x.q.shape[1]):
            out, lse = (t[b : b + 1, h : h + 1] for t in (ref.out, ref.lse))
            yield Reference(ref.x.single(b, h), out, lse)


def _kronecker(terms: int, sizes: Sequence[int], ref: Reference) -> list[HeadError]:
    sums = []
    for head in single_heads(ref):
        sums.append(nearest_kronecker(head.weights()[0, 0], sizes, sizes, rank=terms).dense())
    nearest = torch.stack(sums).unflatten(0, ref.lse.shape[:2])

    def predict(log_weights: Tensor, first: int) -> Tensor:
        return nearest[:, :, first : first + log_weights.shape[2]]

    return weights_errors(predict, ref)


@torch.no_grad()
def _stack(ref: Reference, width: int) -> Factors:
    """Of every head, within a range of `width` dimensions; N is everything."""
    whole = width >= ref.x.length
    found = [_decompose(h) if whole else _sketch(h, width) for h in single_heads(ref)]
    parts = (torch.stack(part).unflatten(0, ref.lse.shape[:2]) for part in zip(*found, strict=True))
    return Factors(*parts)


def _decompose(head: Reference) -> tuple[Tensor, Tensor, Tensor]:
    """Of one head: U, |u^T P|^2 and 0.

    The vectors are eigenvectors of P P^T: squaring costs accuracy only among singular values below
    1e-8 of the largest, and the error of a projection is what it is with any basis.
    """
    weights = head.weights()[0, 0]
    u = torch.linalg.eigh(weights @ weights.mT).eigenvectors.flip(-1)
    squares = (u.mT @ weights).square().sum(-1)
    return u, squares, squares.new_zeros(())


def _sketch(head: Reference, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of one head: U, |u^T P|^2 and the rest, from products with P and its transpose."""
    start = draw((head.x.length, width), Generator().manual_seed(0), head.lse.device)
    basis = torch.linalg.qr(_times(head, start)).Q
    for _ in range(_POWER_STEPS):
        basis = torch.linalg.qr(_transposed(head, basis)).Q
        basis = torch.linalg.qr(_times(head, basis)).Q
    within = _transposed(head, basis)  # P^T Q
    rotation = torch.linalg.eigh(within.mT @ within).eigenvectors.flip(-1)
    squares = (within @ rotation).square().sum(0)
    rest = head.norms[0, 0].square() - squares.sum()
    return basis @ rotation, squares, rest.clamp(min=0.0)


def _times(head: Reference, g: Tensor) -> Tensor:
    """P g for g (N, w)."""
    return torch.cat([weights @ g[: weights.shape[1]] for _, weights in _rows(head)])


def _transposed(head: Reference, y: Tensor) -> Tensor:
    """P^T y for y (N, w)."""
    out = torch.zeros_like(y)
    for rows, weights in _rows(head):
        out[: weights.shape[1]].addmm_(weights.mT, y[rows])
    return out


def _rows(head: Reference) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, and their weights up to the last that is not zero in a causal input."""
    for rows in head.blocks():
        seen = slice(rows.stop if head.x.is_causal else None)
        yield rows, head.weights(rows, seen)[0, 0]
