"""The best a family could do at the same budget, and how near to it a method comes.

- Sparse: no distribution on k keys per query is nearer in total variation than the exact weights
  on the k largest, renormalised; the distance is the mass of the rest. Methods that keep whole
  blocks, the same for all queries of a tile, cannot do better than the heaviest blocks of each
  tile, which is a second bound, `block_oracle`.
- The families whose weights are a matrix of low rank (low-rank, feature maps, latent, tensor): no
  matrix of rank r is nearer in the Frobenius norm than the truncated singular value decomposition.

All need the exact weights. They bound errors of *weights*; the error of an output may be smaller
by luck, for errors of weights can cancel in the values. And the last is a bound for matrices of
rank r only: the causal mask of a feature map, or the exact leaves of a lifted method, have a
higher rank, so such a method may come nearer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numattn.core.info import FAMILIES
from numattn.core.inputs import positive
from numattn.measure.errors import HeadError, Reference, weights_errors

BLOCK = 64  # queries of a tile and keys of a block

_LONGEST = 2048  # a matrix of weights is factored up to this length


def oracle(family: str, units: int, ref: Reference) -> list[HeadError] | None:
    """Errors of the best possible answer of a family.

    Args:
        family: As in `Info.family`.
        units: Keys per query in the sparse family, rank of the weights in the others, as
            `Cost.units` gives them. With N or more it is exact.
        ref: The exact weights.

    Returns:
        The errors of each query head. None for the exact family, and where the weights would have
        to be factored and are longer than 2048.

    Cost: Sorting the weights, or one eigendecomposition per head, N^3, that is kept for the next
    rank.
    """
    if family not in FAMILIES:
        raise ValueError(f"oracle: family must be one of {', '.join(FAMILIES)}; got {family!r}.")
    positive("oracle", "units", units)
    if family == "exact":
        return None
    units = min(units, ref.x.length)
    if family == "sparse":
        return ref.keep(f"topk {units}", lambda: _top_k(units, ref))
    if ref.x.length > _LONGEST:
        return None
    return ref.keep(f"svd {units}", lambda: _svd(units, ref))


def block_oracle(units: int, ref: Reference) -> list[HeadError]:
    """Errors of exact attention to the heaviest blocks of keys of every tile of queries.

    Tiles of queries and blocks of keys are 64 long, or a quarter of `units` where that is less, as
    in the method ``blocktopk``; the blocks of a tile are those of the largest mass over its rows.

    Args:
        units: Keys per query; a tile keeps units // 64 blocks of 64.
        ref: The exact weights.
    """
    positive("block_oracle", "units", units)
    block = min(BLOCK, max(units // 4, 1))
    return ref.keep(f"blocks {units}", lambda: _top_blocks(units // block, block, ref))


def efficiency(
    method_error: HeadError,
    oracle_error: HeadError,
    family: str,
    floor: HeadError | None = None,
) -> float | None:
    """Error of the oracle over error of the method: 1 is the best possible, 0 the worst.

    It is taken in the norm in which the oracle is optimal: the median over rows of the total
    variation distance for the sparse family, the Frobenius norm of the error of the weights for
    the others. It exceeds 1 where a method is not bound by its oracle: some methods' causal
    weights have a higher rank than their budget.

    Args:
        method_error: Of one head.
        oracle_error: Of the same head, from `oracle`.
        family: The method's.
        floor: Of the same head, from `noise_floor`: smaller errors count as equal to it, for they
            are rounding.

    Returns:
        The ratio; 1 where both errors are 0, None where the weights were not measured.
    """
    errors = []
    for error in (method_error, oracle_error, floor):
        if error is None:
            errors.append(0.0)
        elif error.tv is None or error.weights is None:
            return None
        else:
            errors.append(error.tv.median if family == "sparse" else error.weights)
    method, best = max(errors[0], errors[2]), max(errors[1], errors[2])
    if method == best:
        return 1.0
    return best / method if method else math.inf


def _top_k(k: int, ref: Reference) -> list[HeadError]:
    def predict(log_weights: Tensor, first: int) -> Tensor:
        top = log_weights.topk(k, -1, sorted=False)
        kept = torch.full_like(log_weights, -torch.inf).scatter_(-1, top.indices, top.values)
        return kept.softmax(-1)

    return weights_errors(predict, ref)


def _top_blocks(count: int, block: int, ref: Reference) -> list[HeadError]:
    length = ref.x.length
    number = torch.arange(length, device=ref.lse.device) // block  # of each row's tile, key's block
    tiles = int(number[-1]) + 1
    mass = ref.lse.new_zeros(*ref.lse.shape[:2], tiles, tiles)
    for rows in ref.blocks():
        of_blocks = ref.weights(rows).new_zeros(*ref.lse.shape[:2], rows.stop - rows.start, tiles)
        of_blocks.index_add_(3, number, ref.weights(rows))
        mass.index_add_(2, number[rows], of_blocks)
    top = mass.topk(min(count, tiles), -1)
    kept = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, top.indices, top.values > 0)

    def predict(log_weights: Tensor, first: int) -> Tensor:
        seen = kept[:, :, number[first : first + log_weights.shape[2]]][..., number]
        return log_weights.masked_fill(~seen, -torch.inf).softmax(-1)

    return weights_errors(predict, ref)


def _svd(rank: int, ref: Reference) -> list[HeadError]:
    """Truncated SVD as the projection U U^T P on the leading left singular vectors.

    They are eigenvectors of P P^T: squaring costs accuracy only among singular values below 1e-8
    of the largest.
    """

    @torch.no_grad()
    def vectors() -> Tensor:
        weights = ref.weights()
        return torch.linalg.eigh(weights @ weights.mT).eigenvectors

    u = ref.keep("singular vectors", vectors)[..., -rank:]  # (B, H, N, r)
    projected = u.mT @ ref.weights()  # (B, H, r, N)

    def predict(log_weights: Tensor, first: int) -> Tensor:
        return u[:, :, first : first + log_weights.shape[2]] @ projected

    return weights_errors(predict, ref)
