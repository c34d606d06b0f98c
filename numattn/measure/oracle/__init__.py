r"""The best a family could do at the same budget, and how near to it a method comes.

All oracles need the exact weights P of a head. Each is the best of a class of weights in one norm.

.. list-table::
   :header-rows: 1

   * - Oracle
     - Class
     - Nearest in
   * - `oracle`, sparse
     - k keys in each row
     - total variation of every row, so also its mean, median and maximum
   * - `threshold_oracle`
     - k N keys among N rows, any number in a row
     - mean total variation over the rows
   * - `top_p_oracle`
     - rows within total variation 1 - p
     - fewest keys in every row: it fixes the error, and the budget is the result
   * - `block_oracle`
     - the same blocks of keys for all queries of a tile
     - mean total variation over each tile
   * - `oracle`, the other families
     - matrices of rank r
     - Frobenius norm (and every unitarily invariant norm)
   * - `kronecker_oracle`
     - sums of R Kronecker products on a grid of tokens
     - Frobenius norm

Where one is no bound:

- In another norm than its own, and in the error of an *output*, which may be smaller by luck, for
  errors of weights can cancel in the values.
- On weights outside of its class. A causal mask gives the weights of a feature map a higher rank
  than the map has features, and so do the exact leaves of a lifted method; `Info.bounded` says
  which methods stay in the class in a call that is not causal. Methods whose
  `Cost.units` are a mean over the rows are held to `threshold_oracle`.
- Beyond 4096 tokens the truncated singular value decomposition is found by a randomised method,
  whose error is the best one or a little more: a method may come nearer by that little.

`efficiency` and `budget_overhead` put a method beside its oracle, by error at the same budget and
by budget at the same error.
"""

from __future__ import annotations

from numattn.core.info import FAMILIES
from numattn.core.inputs import positive
from numattn.measure.errors import HeadError, Reference
from numattn.measure.oracle.keys import Kept as Kept
from numattn.measure.oracle.keys import block_oracle as block_oracle
from numattn.measure.oracle.keys import threshold_oracle as threshold_oracle
from numattn.measure.oracle.keys import top_keys
from numattn.measure.oracle.keys import top_p_oracle as top_p_oracle
from numattn.measure.oracle.matrices import kronecker_oracle as kronecker_oracle
from numattn.measure.oracle.matrices import truncated
from numattn.measure.oracle.scores import budget_overhead as budget_overhead
from numattn.measure.oracle.scores import efficiency as efficiency
from numattn.measure.oracle.scores import error_curve as error_curve


def oracle(family: str, units: int, ref: Reference) -> list[HeadError] | None:
    r"""Errors of the best possible answer of a family.

    - Sparse: the exact weights on the k largest of each row, renormalised. No distribution on k
      keys is nearer in total variation; the distance is the mass of the rest.
    - The families whose weights are a matrix of low rank (low-rank, feature maps, latent, tensor):
      the truncated singular value decomposition. No matrix of rank r is nearer in the Frobenius
      norm; the distance is the root of the sum of the squares of the other singular values.

    Args:
        family: As in `Info.family`.
        units: Keys per query in the sparse family, rank of the weights in the others, as
            `Cost.units` gives them. With N or more it is exact.
        ref: The exact weights.

    Returns:
        The errors of each query head; beyond 2048 tokens those of the truncated decomposition have
        no total variation and no negative mass. None for the exact family, where a rank above 1024
        is asked of more than 4096 tokens, and any rank of more than 8192.

    Cost: Sorting the weights. Or, up to 4096 tokens, products of N x N matrices and an
    eigendecomposition for each head, some 10 N^3 operations, kept for the next rank with N^2
    numbers per head. Beyond, 12 N^2 w operations, kept for all ranks with the same w: one and a
    half times the least power of two that is not below r, and at least 10 more than it.

    Limits: beyond 4096 tokens the truncated decomposition is found within a range of w dimensions
    by a random start and two power steps. Its error is never below the least one. With w - r = p,
    the mean of its square over the start exceeds the least square by at most the share

    .. math:: \frac{1}{p - 1} \sum_{i \le r} (\sigma_{r + 1} / \sigma_i)^8 .

    References:
        C. Eckart, G. Young, "The approximation of one matrix by another of lower rank", 1936,
        https://doi.org/10.1007/BF02288367.
        N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", 2011,
        https://arxiv.org/abs/0909.4061; the share follows from the proof of its theorem 10.5.
    """
    if family not in FAMILIES:
        raise ValueError(f"oracle: family must be one of {', '.join(FAMILIES)}; got {family!r}.")
    positive("oracle", "units", units)
    if family == "exact":
        return None
    units = min(units, ref.x.length)
    if family == "sparse":
        return ref.keep(f"topk {units}", lambda: top_keys(units, ref))
    return ref.keep(f"svd {units}", lambda: truncated(units, ref))
