"""Landmarks of Nystrom attention: where they come from, their matrix, and what inverts it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from numattn.core.inputs import Inputs, unfold
from numattn.core.linalg import (
    finite,
    group_counts,
    group_means,
    kmeans,
    nearest,
    segment_means,
    take,
)
from numattn.engines.softmax import key_bias

PILOTS = 63  # queries that the guard looks at: no divisor of KEYS, so that distances differ
KEYS = 512  # keys that it looks at
LLOYD = 3  # iterations of k-means; more gain nothing on heads of trained models
RIDGE_STEPS = 3

Given = tuple[Tensor, Tensor]  # landmark queries (B, H, m, D) and keys (B, Hk, m, D)


class Landmarks(NamedTuple):
    """Landmark queries and keys of every query head.

    Attributes:
        q: (B, H, m, D).
        exists: bool (B or 1, H or 1, m), which of `q` there are.
        k: (B, H, m, D).
        bias: (B or 1, H or 1, m), logarithms of the keys that each of `k` stands for; a large
            negative number where there are none.
    """

    q: Tensor
    exists: Tensor
    k: Tensor
    bias: Tensor

    def matrix(self, scale: float) -> Tensor:
        """A, (B, H, m, m); zero in the rows and columns of landmarks that do not exist."""
        return weights(self.q, self.k, scale, self.bias) * self.exists[..., None]


def find(x: Inputs, num_landmarks: int, kind: str, given: Given | None) -> Landmarks:
    """Means of groups of tokens that exist, or the given landmarks with the keys nearest to them.

    Args:
        x: The call.
        num_landmarks: m; fewer are returned where there are fewer tokens, unless they are given.
        kind: ``"segments"`` or ``"kmeans"``.
        given: Landmarks to use instead.
    """
    if given is not None:
        q, k = given
        label, _ = nearest(x.k, k)
        if x.padding is not None:
            label = label.masked_fill(~x.padding, num_landmarks)
        exists = torch.ones_like(q[:1, :1, :, 0], dtype=torch.bool)
        counts = group_counts(label, num_landmarks, k.dtype)
    else:
        means = segment_means if kind == "segments" else _cluster_means
        queries = unfold(x.q, x.group)
        m = min(num_landmarks, max(queries.shape[2], x.k.shape[2]))
        q, members = means(queries, m, _query_padding(x))
        k, counts = means(x.k, m, x.padding)
        exists = members > 0
    if counts.shape[1] > 1:
        counts = counts.repeat_interleave(x.group, 1)
    return Landmarks(q, exists, k.repeat_interleave(x.group, 1), finite(counts.log()))


def _cluster_means(x: Tensor, num_clusters: int, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means (B, H, C, D) and counts (B, H, C) of clusters of the tokens that exist."""
    return group_means(x, kmeans(x, num_clusters, LLOYD, padding), num_clusters)


def _query_padding(x: Inputs) -> Tensor | None:
    """Which queries exist, by position, bool (B or 1, 1, Nq)."""
    return None if x.query_padding is None else x.padding


def check_given(
    x: Inputs,
    num_landmarks: int,
    kind: str,
    query_landmarks: Tensor | None,
    key_landmarks: Tensor | None,
) -> Given | None:
    """Given landmarks for every entry of the batch, in the type of computation.

    Raises:
        ValueError: Only one of the two is given, a shape does not fit, or `kind` asks for others.
    """
    if query_landmarks is None and key_landmarks is None:
        return None
    if query_landmarks is None or key_landmarks is None:
        raise ValueError(
            "nystrom: pass query_landmarks and key_landmarks together, or neither; "
            f"{'query' if query_landmarks is None else 'key'}_landmarks is missing."
        )
    if kind != "segments":
        raise ValueError(
            f"nystrom: landmarks={kind!r} finds landmarks in the batch, but query_landmarks and "
            "key_landmarks were given. Leave landmarks at its default, or do not give them."
        )
    batch, heads, _, dim = x.k.shape
    placed = []
    for name, tensor, count in (
        ("query_landmarks", query_landmarks, heads * x.group),
        ("key_landmarks", key_landmarks, heads),
    ):
        shape = (count, num_landmarks, dim)
        if tensor.shape not in (shape, (batch, *shape)):
            raise ValueError(
                f"nystrom: {name} must have shape {shape} or {(batch, *shape)}; "
                f"got {tuple(tensor.shape)}."
            )
        placed.append(tensor.to(x.k).expand(batch, *shape))
    return placed[0], placed[1]


def weights(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Softmax weights as a matrix, for small sets: (B, H, n, D), (B, H, m, D) -> (B, H, n, m)."""
    logits = (q * scale) @ k.mT
    return (logits if bias is None else logits + finite(bias)[..., None, :]).softmax(-1)


def shrinkage(x: Inputs, landmarks: Landmarks, inverse: Tensor) -> Tensor:
    """The factor of the guard, (B, H, 1, 1): how far F A^+ B - mean is to be trusted.

    Args:
        x: The call.
        landmarks: Of the call.
        inverse: What stands for A^+, (B, H, m, m).
    """
    rows, row_exists = _spread(_query_padding(x), x.q.shape[2] // x.group, PILOTS, x.q)
    keys, key_exists = _spread(x.padding, x.k.shape[2], KEYS, x.k)
    pilots = take(unfold(x.q, x.group), rows)  # (B, H, p, D)
    kept = take(x.k, keys).repeat_interleave(x.group, 1)  # (B, H, c, D)
    coefficients = weights(pilots, landmarks.k, x.scale, landmarks.bias) @ inverse  # (B, H, p, m)
    both = torch.cat([landmarks.q, pilots], 2)
    both = weights(both, kept, x.scale, key_bias(key_exists, kept))  # (B, H, m + p, c)
    num_keys = key_exists.sum(-1, keepdim=True).clamp(min=1)
    both = both - (key_exists / num_keys)[..., None, :]
    b, exact = both.split([landmarks.q.shape[2], pilots.shape[2]], 2)
    row_exists = row_exists[..., None]
    exact, predicted = exact * row_exists, (coefficients @ b) * row_exists  # (B, H, p, c)
    # Relative to the weights themselves, which would be 1 / c each if they were equal.
    small = torch.finfo(kept.dtype).eps * row_exists.sum(-2).clamp(min=1) / num_keys
    fit = (predicted * exact).sum((-2, -1)) + small[..., 0]
    size = predicted.square().sum((-2, -1)) + small[..., 0]
    whole = exact.square().sum((-2, -1)) + small[..., 0]
    cosine = fit.clamp(min=0) / (size * whole).sqrt()
    return (cosine.square() * (whole / size).sqrt()).clamp(max=1)[..., None, None]


def _spread(exists: Tensor | None, length: int, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Places of at most `number` evenly spaced tokens that exist, and which of the places count.

    Both are (B or 1, 1, n), whatever exists; `exists` is bool (B or 1, 1, length).
    """
    if exists is None:
        exists = like.new_ones((1, 1, length), dtype=torch.bool)
    total = exists.sum(-1, keepdim=True)
    count = total.clamp(max=number)
    t = torch.arange(min(number, length), device=like.device)
    place = (t * total // count.clamp(min=1)).clamp(max=length - 1)
    order = (~exists).to(torch.uint8).argsort(dim=-1, stable=True)  # those that exist first
    return order.gather(-1, place), t < count


def ridge_inverse(a: Tensor, ridge: float) -> Tensor:
    """Iterated Tikhonov for A^+: x <- (A^T A + rho^2 I)^-1 (A^T + rho^2 x), from zero."""
    b = a.double()
    rho2 = ridge**2 * _norms(b)
    gram = b.mT @ b + rho2 * torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
    # The explicit inverse is faster than m right-hand sides, three times.
    factor = torch.cholesky_inverse(torch.linalg.cholesky_ex(gram).L)
    x = factor @ b.mT
    for _ in range(RIDGE_STEPS - 1):
        x = factor @ (b.mT + rho2 * x)
    return x.to(a.dtype)


def newton_inverse(a: Tensor, num_iterations: int, order: int) -> Tensor:
    """Iteration for A^+; it converges, since the eigenvalues of A Z lie in [0, 1] at the start."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = a.mT / _norms(a)
    for _ in range(num_iterations):
        az = a @ z
        if order == 3:
            z = z @ (3 * eye - az @ (3 * eye - az))
        else:
            z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z


def _norms(a: Tensor) -> Tensor:
    """|A|_1 |A|_inf >= |A|_2^2 of nonnegative matrices, (..., 1, 1); 1 where A is zero."""
    norms = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)
    return norms.masked_fill(norms == 0, 1.0)[..., None, None]
