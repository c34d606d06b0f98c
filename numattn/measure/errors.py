r"""How wrong a method is: errors of its output and of its weights, per head and row.

Exact attention in float64 is the reference. With its weights :math:`P`, its output :math:`O = PV`,
a method's output :math:`\hat O`, and, where a method is linear in value, its implied weights
:math:`\hat P` (the output for value = identity), every row i has the errors

.. math:: \frac{\|\hat o_i - o_i\|}{\|o_i\|}, \qquad \frac{\|\hat o_i - o_i\|}{R_V}, \qquad
          \mathrm{tv}_i = \tfrac12 \sum_j |\hat P_{ij} - P_{ij}|.

:math:`R_V`, the largest distance of a value from the mean of the values, cannot vanish as
:math:`o_i` can, and binds them: where both rows of weights sum to one,
:math:`\|\hat o_i - o_i\| \le 2 R_V \mathrm{tv}_i`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from numattn.core.inputs import compute_dtype, positive
from numattn.core.method import Method
from numattn.engines.tiles import spans
from numattn.exact import Exact
from numattn.measure.inputs import QKV
from numattn.measure.pictures import picture, tiles
from numattn.measure.weights import identity_columns

T = TypeVar("T")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q, k, v) -> out``, everything else bound."""

Predict = Callable[[Tensor, int], Tensor]
"""Exact log-weights (B, H, n, N) of the rows from the second argument on -> weights in their place.
"""

_KEEP = 1 << 24  # elements of the weights of all heads up to which they are kept
_BLOCK = 1 << 21  # elements of a block of rows when they are not


@dataclass(frozen=True)
class Spread:
    """Of a number that each row has: quantiles (of two rows as near, the larger) and maximum."""

    median: float
    p95: float
    max: float


@dataclass(frozen=True)
class HeadError:
    """The errors of one query head.

    A ratio 0/0 counts as 0. A method that overflows has infinite or NaN errors, not none.

    Attributes:
        head: b * H + h.
        output: Frobenius norm of the error of the output, relative to the output's.
        rows: Norm of a row's error relative to the row's norm.
        hull: Norm of a row's error relative to the radius of the values about their mean.
        tv: Half the sum of the absolute errors of a row of weights: total variation distance,
            where the weights are a distribution. None where weights were not measured, or the
            method is not linear in value and has none.
        weights: Frobenius norm of the error of the weights, relative to theirs.
        negative: Sum of the negative weights of a row, as a positive number; mean over rows.
        projected: The error that leaves the layer, the same for all of its heads: Frobenius norm of
            the error after the output projection, which adds up the heads, relative to what is
            projected. None where the projection is not known.
        picture: Of the weights, where one was asked for; see `numattn.measure.pictures`.
    """

    head: int
    output: float
    rows: Spread
    hull: Spread
    tv: Spread | None
    weights: float | None
    negative: float | None
    projected: float | None = None
    picture: str = ""


@dataclass(frozen=True, eq=False)
class Reference:
    """Exact attention in float64 on one input.

    The weights are computed when asked for, and kept where all heads together have less than
    2^24 of them.

    Attributes:
        x: The input, float64.
        out: (B, H, N, E).
        lse: Log of the normaliser, (B, H, N).
    """

    x: QKV
    out: Tensor
    lse: Tensor
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def log_weights(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Logarithms of the weights, (B, H, rows, columns); -inf where a query may not attend."""
        batch, heads, length = self.lse.shape
        if batch * heads * length**2 > _KEEP:
            return exact_logits(self.x, rows, columns) - self.lse[:, :, rows, None]
        whole = self.keep("log_weights", lambda: exact_logits(self.x) - self.lse[..., None])
        return whole[:, :, rows, columns]

    def weights(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """The weights P, (B, H, rows, columns)."""
        return self.log_weights(rows, columns).exp()

    def blocks(self) -> list[slice]:
        """The rows in blocks whose weights, over all heads, are of moderate size."""
        batch, heads, length = self.lse.shape
        step = max(_BLOCK // (batch * heads * length), 1)
        return [slice(*span) for span in spans(length, step)]

    @property
    def norms(self) -> Tensor:
        """Frobenius norm of the weights of each head, (B, H)."""

        def norms() -> Tensor:
            blocks = [self.weights(rows).square().sum((-2, -1)) for rows in self.blocks()]
            return torch.stack(blocks).sum(0).sqrt()

        return self.keep("norms", norms)

    @property
    def radius(self) -> Tensor:
        """Largest distance of a value from their mean, (B, H)."""
        v = self.x.v
        radius = (v - v.mean(2, keepdim=True)).norm(dim=-1).amax(-1)
        return radius.repeat_interleave(self.x.group, dim=1)

    def keep(self, name: str, compute: Callable[[], T]) -> T:
        """What `compute` returns, computed once."""
        if name not in self._kept:
            self._kept[name] = compute()
        return self._kept[name]


@torch.no_grad()
def reference(x: QKV) -> Reference:
    """Exact attention in float64, by the definition: the rounding of `x` as stored is no error.

    Cost: 2 N^2 (D + E) operations per head, causal or not, in blocks of rows.
    """
    x = x.to(torch.float64)
    batch, heads, length, _ = x.q.shape
    step = max(_BLOCK // (batch * heads * length), 1)
    outs, lses = [], []
    for start, stop in spans(length, step):
        logits = exact_logits(x, slice(start, stop))
        lses.append(logits.logsumexp(-1))
        outs.append(weigh_values(logits.softmax(-1), x))
    return Reference(x, torch.cat(outs, 2), torch.cat(lses, 2))


def attend(
    method: Method, x: QKV, *, seed: int = 0, tensors: dict[str, Tensor] | None = None
) -> Attend:
    """Bind a method to the settings of an input.

    Every call draws from a fresh generator of the same seed, so two calls on the same queries and
    keys attend with the same weights.

    A method with `Info.fits_causal`, on a causal input, is given state tensors that are fitted on
    this very input, future included. That is an optimistic calibration: in use the tensors come
    from other text.

    Args:
        method: Its options.
        x: Whose ``is_causal``, ``scale`` (for methods that have logits) and grouping are used.
        seed: Of the draws, where the method draws.
        tensors: State tensors to use instead of drawn or fitted ones.
    """
    info, call = method.info, x.call(method)

    def source() -> Generator | None:
        return Generator().manual_seed(seed) if info.random else None

    if tensors is None and info.fits_causal and x.is_causal:
        y = x.to(compute_dtype(x.q.dtype))
        known = {"scale": call["scale"], "enable_gqa": call["enable_gqa"]}
        tensors = method.fit(y.q, y.k, y.v, **known, generator=source())
    given: dict[str, Any] = tensors or {}

    def fn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return method(query, key, value, **call, **given, generator=source())

    return fn


@torch.no_grad()
def head_errors(
    fn: Attend,
    ref: Reference,
    *,
    dtype: torch.dtype = torch.float32,
    linear_in_value: bool = True,
    with_weights: bool = True,
    max_columns: int = 512,
    with_pictures: bool = False,
) -> list[HeadError]:
    """Measure a method against the reference.

    Args:
        fn: The method, as `attend` binds it. Calls on the same queries and keys must use the same
            weights.
        ref: What it should have computed.
        dtype: Type in which it runs.
        linear_in_value: Whether it has weights.
        with_weights: Whether to measure them, by attending with the identity as value: the method
            runs N / max_columns more times, on values of that width.
        max_columns: Width of a block of the identity.
        with_pictures: Whether to make pictures of the weights, where those are measured.

    Returns:
        The errors of each query head, in order.

    Example:
        >>> from numattn.kernel import Performer
        >>> from numattn.measure import synthetic
        >>> x = synthetic("gaussian", 64, heads=2)
        >>> [e.head for e in head_errors(attend(Performer(), x), reference(x))]
        [0, 1]
    """
    positive("head_errors", "max_columns", max_columns)
    y = ref.x.to(dtype)
    out = fn(y.q, y.k, y.v)
    if not (linear_in_value and with_weights):
        return _collect(ref, out, None)
    sums = _Sums(ref)
    means = tiles(y.length).to(ref.lse) if with_pictures else None
    for start, stop in spans(y.length, max_columns):
        predicted = fn(y.q, y.k, identity_columns(y, start, stop))
        sums.add(slice(None), predicted, ref.weights(columns=slice(start, stop)))
        if means is not None:
            sums.add_tiles(predicted, means, means[:, start:stop])
    return _collect(ref, out, sums)


@torch.no_grad()
def weights_errors(predict: Predict, ref: Reference) -> list[HeadError]:
    """Measure weights that are made from the exact ones, block of rows by block of rows.

    For what is defined by its weights: oracles and baselines.

    Args:
        predict: Given the exact log-weights of some rows, (B, H, n, N), and the number of the
            first, returns float64 weights of the same shape.
        ref: The exact weights.
    """
    sums, outs = _Sums(ref), []
    for rows in ref.blocks():
        log_weights = ref.log_weights(rows)
        predicted = predict(log_weights, rows.start)
        sums.add(rows, predicted, log_weights.exp())
        outs.append(weigh_values(predicted, ref.x))
    return _collect(ref, torch.cat(outs, 2), sums)


def noise_floor(ref: Reference, dtype: torch.dtype) -> list[HeadError]:
    """Errors of exact attention itself in `dtype`, the rounding of q, k, v to it included.

    A method's error below this is not told apart from rounding.
    """
    return head_errors(attend(Exact(), ref.x), ref, dtype=dtype)


class _Sums:
    """Sums over the columns of each row of weights, (B, H, N)."""

    def __init__(self, ref: Reference) -> None:
        self.distance = torch.zeros_like(ref.lse)
        self.squared = torch.zeros_like(ref.lse)
        self.negative = torch.zeros_like(ref.lse)
        self.tiles: Tensor | None = None  # mean weights, (B, H, 32, 32)

    def add(self, rows: slice, predicted: Tensor, exact: Tensor) -> None:
        """Take in some columns of some rows, (B, H, n, c)."""
        difference = predicted - exact
        self.distance[:, :, rows] += torch.linalg.vector_norm(difference, 1, -1) / 2
        self.squared[:, :, rows] += torch.linalg.vector_norm(difference, 2, -1).square()
        self.negative[:, :, rows] -= predicted.clamp(max=0).sum(-1, dtype=torch.float64)

    def add_tiles(self, predicted: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Take in some columns, (B, H, N, c), averaged by (32, N) from the left, (32, c) right."""
        x = predicted.to(compute_dtype(predicted.dtype))
        part = (rows.to(x) @ x).double() @ columns.mT
        self.tiles = part if self.tiles is None else self.tiles + part


def _collect(ref: Reference, out: Tensor, sums: _Sums | None) -> list[HeadError]:
    difference = (out - ref.out).norm(dim=-1)  # (B, H, N)
    norm = ref.out.norm(dim=-1)
    output = _ratio(difference.norm(dim=-1), norm.norm(dim=-1)).flatten().tolist()
    rows = _spreads(_ratio(difference, norm))
    hull = _spreads(_ratio(difference, ref.radius[..., None]))
    none = [None] * len(output)
    tv: list[Spread] | list[None] = none
    weights = negative = none
    if sums is not None:
        tv = _spreads(sums.distance)
        weights = _ratio(sums.squared.sum(-1).sqrt(), ref.norms).flatten().tolist()
        negative = sums.negative.mean(-1).flatten().tolist()
    pictures = [""] * len(output)
    if sums is not None and sums.tiles is not None:
        pictures = [picture(means, ref.x.length) for means in sums.tiles.flatten(0, 1)]
    columns = zip(
        output, rows, hull, tv, weights, negative, _projected(ref, out), pictures, strict=True
    )
    return [HeadError(head, *values) for head, values in enumerate(columns)]


def _projected(ref: Reference, out: Tensor) -> list[float] | list[None]:
    """Error after the output projection, the same for every head of a sequence."""
    batch, heads, _ = ref.lse.shape
    wo = ref.x.wo
    if wo is None:
        return [None] * (batch * heads)

    def norms(x: Tensor) -> Tensor:
        joined = x.double().transpose(1, 2).flatten(2)  # (B, N, H E)
        return (joined @ wo.mT).flatten(1).norm(dim=1)

    error = _ratio(norms(out - ref.out), norms(ref.out))
    return error.repeat_interleave(heads).tolist()


def _spreads(x: Tensor) -> list[Spread]:
    """Over the rows of each head: (B, H, N) -> one of each head."""
    x = x.flatten(0, 1)
    q = torch.tensor([0.5, 0.95], dtype=x.dtype, device=x.device)
    quantiles = x.quantile(q, dim=-1, interpolation="higher")
    table = torch.cat([quantiles, x.amax(-1)[None]]).mT.tolist()
    return [Spread(*row) for row in table]


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == 0, 0.0, a / b)


def exact_logits(
    x: QKV, rows: slice | Tensor = slice(None), columns: slice = slice(None)
) -> Tensor:
    """Logits by the definition, (B, H, rows, columns); -inf where a query may not attend.

    Rows are a slice of the positions, or int (n,).
    """
    q = x.q[:, :, rows].unflatten(1, (-1, x.group)) * x.scale  # (B, Hk, group, rows, D)
    logits = (q @ x.k[:, :, None, columns].mT).flatten(1, 2)
    if x.is_causal:
        position = torch.arange(x.length, device=q.device)
        logits.masked_fill_(position[columns] > position[rows, None], -torch.inf)
    return logits


def weigh_values(weights: Tensor, x: QKV) -> Tensor:
    """Weights (B, H, n, N) times the values of their heads, (B, H, n, E)."""
    return (weights.unflatten(1, (-1, x.group)) @ x.v[:, :, None]).flatten(1, 2)
