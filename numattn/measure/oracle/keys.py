"""Oracles of methods that keep few keys: the heaviest of a row, of all rows, of a tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from numattn.core.inputs import positive
from numattn.measure.errors import HeadError, Reference, weights_errors
from numattn.measure.oracle.matrices import single_heads

BLOCK = 64  # queries of a tile and keys of a block

Choose = Callable[[Tensor, int], Tensor]
"""Exact log-weights (B, H, n, N) of the rows from the second argument on -> which are kept, bool.
"""


@dataclass(frozen=True)
class Kept:
    """What an oracle does that gives some rows more keys than others.

    Attributes:
        errors: Of each query head.
        keys: Keys that a row of the head keeps, mean over its rows.
        dropped: Mass that a row of the head drops, mean over its rows; it is the mean of the total
            variation distance, where the errors have its quantiles.
    """

    errors: list[HeadError]
    keys: list[float]
    dropped: list[float]


def top_keys(k: int, ref: Reference) -> list[HeadError]:
    """Errors of exact attention to the k heaviest keys of every row."""

    def choose(log_weights: Tensor, first: int) -> Tensor:
        top = log_weights.topk(k, -1, sorted=False).indices
        return torch.zeros_like(log_weights, dtype=torch.bool).scatter_(-1, top, True)

    return _attend_to(choose, ref)


@torch.no_grad()
def top_keys_curve(ref: Reference) -> Tensor:
    """Median over rows of the mass outside the k heaviest keys, k = 0, ..., N: (B, H, N + 1)."""
    length, curves = ref.x.length, []
    for head in single_heads(ref):
        lightest = ref.lse.new_empty(length, length)  # mass of the m lightest, of each row
        for rows in head.blocks():
            lightest[rows] = head.weights(rows)[0, 0].sort(-1).values.cumsum(-1)
        # Of two rows in the middle the larger, as in `Spread`.
        middle = [part.kthvalue(length // 2 + 1, dim=0).values for part in lightest.split(256, 1)]
        curves.append(torch.cat([torch.cat(middle).flip(0), ref.lse.new_zeros(1)]))
    return torch.stack(curves).unflatten(0, ref.lse.shape[:2])


def top_p_oracle(mass: float, ref: Reference) -> Kept:
    r"""Exact attention to the fewest keys of every row that hold a share p of its mass.

    Row i keeps its :math:`k_i` heaviest keys, renormalised,

    .. math:: k_i = \min \Big\{ k : \sum_{j \in \mathrm{top}_k(i)} P_{ij} \ge p \Big\} .

    No distribution within total variation 1 - p of the row has fewer keys.

    Args:
        mass: p, above 0 and at most 1; with 1 a row keeps every key of positive weight.
        ref: The exact weights.

    Returns:
        The errors, and the mean number of keys that it takes.

    Raises:
        ValueError: p is not between 0 and 1.

    Cost: Sorting the weights.
    """
    if not 0 < mass <= 1:
        raise ValueError(f"top_p_oracle: mass must be above 0 and at most 1; got {mass!r}.")

    def choose(log_weights: Tensor, first: int) -> Tensor:
        lightest, order = log_weights.exp().sort(-1)
        needed = lightest.cumsum(-1) > 1 - mass  # without it and lighter ones, less than p is left
        needed[..., -1] = True
        return torch.zeros_like(needed).scatter_(-1, order, needed)

    return ref.keep(f"top p {mass}", lambda: _counted(choose, ref))


def threshold_oracle(units: int, ref: Reference) -> Kept:
    r"""Exact attention to the k N heaviest weights of a head, wherever they are.

    Every row keeps its heaviest key, for its weights have to sum to one, and the (k - 1) N
    heaviest of all others in the head are kept beside: those above one threshold, the same for
    every row. Each row is renormalised. Of all weights with k keys in a row *on average* these have
    the least mean total variation distance,

    .. math:: \frac1N \sum_i \mathrm{tv}_i = 1 - \frac1N \sum_{(i, j)\ \mathrm{kept}} P_{ij},

    which is at most that of the k heaviest keys of each row.

    Args:
        units: k, the mean number of keys of a row; where N k are not there, as in a causal input,
            all are kept.
        ref: The exact weights.

    Returns:
        The errors, the mean number of keys, and the mean distance.

    Cost: Two passes over the weights; memory for k N of them per head, besides a block of rows.

    Limits: a bound of the mean over rows only. Rows that spread far get few keys or many, as it
    serves the sum: a single row, and the median, may be better in another choice.
    """
    positive("threshold_oracle", "units", units)
    return ref.keep(f"threshold {units}", lambda: _above_threshold(units, ref))


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


def _attend_to(choose: Choose, ref: Reference) -> list[HeadError]:
    """Errors of exact attention to what is chosen of every row, at least one key that it sees."""

    def predict(log_weights: Tensor, first: int) -> Tensor:
        kept = choose(log_weights, first)
        return log_weights.masked_fill(~kept, -torch.inf).softmax(-1)

    return weights_errors(predict, ref)


def _counted(choose: Choose, ref: Reference) -> Kept:
    """The same, with what it keeps and drops."""
    keys, dropped = torch.zeros_like(ref.norms), torch.zeros_like(ref.norms)

    def count(log_weights: Tensor, first: int) -> Tensor:
        kept = choose(log_weights, first) & (log_weights > -torch.inf)
        keys.add_(kept.sum((-2, -1)))
        dropped.add_(log_weights.exp().masked_fill(kept, 0.0).sum((-2, -1)))
        return kept

    errors = _attend_to(count, ref)
    means = [(total / ref.x.length).flatten().tolist() for total in (keys, dropped)]
    return Kept(errors, *means)


def _above_threshold(units: int, ref: Reference) -> Kept:
    count = min((units - 1) * ref.x.length, ref.x.length * (ref.x.length - 1))
    heaviest = ref.lse.new_empty(*ref.lse.shape[:2], 0)
    for rows in ref.blocks():
        others = _others(ref.log_weights(rows)).flatten(2)
        heaviest = torch.cat([heaviest, others], -1)
        heaviest = heaviest.topk(min(count, heaviest.shape[-1]), -1, sorted=False).values
    if not count:
        return _counted(lambda log_weights, first: _heaviest(log_weights), ref)
    threshold = heaviest.amin(-1)[..., None, None]
    left = (heaviest == threshold[..., 0]).sum(-1, keepdim=True)  # as many as the threshold to keep

    def choose(log_weights: Tensor, first: int) -> Tensor:
        others = _others(log_weights)
        equal = (others == threshold).flatten(2)
        equal &= equal.cumsum(-1) <= left
        left.sub_(equal.sum(-1, keepdim=True))
        return (others > threshold) | equal.view_as(others) | _heaviest(log_weights)

    return _counted(choose, ref)


def _heaviest(log_weights: Tensor) -> Tensor:
    """Where the heaviest key of each row is, the first of equal ones: bool."""
    top = log_weights.argmax(-1, keepdim=True)
    return torch.zeros_like(log_weights, dtype=torch.bool).scatter_(-1, top, True)


def _others(log_weights: Tensor) -> Tensor:
    """Without the heaviest key of each row."""
    return log_weights.masked_fill(_heaviest(log_weights), -torch.inf)


def _top_blocks(count: int, block: int, ref: Reference) -> list[HeadError]:
    length = ref.x.length
    number = torch.arange(length, device=ref.lse.device) // block  # of each row's tile, key's block
    tiles = int(number[-1]) + 1
    mass = ref.lse.new_zeros(*ref.lse.shape[:2], tiles, tiles)
    for rows in ref.blocks():
        weights = ref.weights(rows)
        of_blocks = weights.new_zeros(*weights.shape[:3], tiles)
        of_blocks.index_add_(3, number, weights)
        mass.index_add_(2, number[rows], of_blocks)
    top = mass.topk(min(count, tiles), -1)
    kept = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, top.indices, top.values > 0)

    def choose(log_weights: Tensor, first: int) -> Tensor:
        return kept[:, :, number[first : first + log_weights.shape[2]]][..., number]

    return _attend_to(choose, ref)
