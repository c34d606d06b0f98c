r"""Errors at lengths where the weights do not fit: sampled rows, and norms by random probes.

Sampled rows. The exact rows of a sample are computed by the definition, and the method's by one
call on everything, so that a mean over all rows is estimated by one over the sample. Its interval
is an empirical Bernstein bound. For n draws of numbers in [0, 1] with the mean m, the variance V
(divided by n) and :math:`L = \ln(3 / \delta)`, the true mean is no further from m than

.. math:: e = \frac{b + c \sqrt{b^2 + (1 - c^2) V}}{1 - c^2}, \qquad
          c^2 = \frac{2 L}{n}, \quad b = c^2 + \frac{L}{3 n},

except with probability :math:`\delta`; without the factor :math:`1 - c^2` and to first order this
is :math:`\sqrt{2 V L / n} + 7 L / (3 n)`, the bound of Maurer and Pontil. Theirs is for independent
draws. This form holds for rows drawn without replacement in each of several strata. Bernstein's
inequality gives :math:`e \le c \sqrt T + L / (3n)` on each side, T being the mean squared distance
of a draw from the true mean, which is no less than the mean variance within the strata; a lower
tail bound for sums of squares in [0, 1] gives :math:`\sqrt T \le \sqrt{V + e^2} + c`; solved for e,
both give the formula. Both bound moment generating functions of sums over independent strata, and
by Hoeffding's Theorem 4 drawing without replacement makes these no larger than drawing with it.

Shares of rows. How many of n sampled rows exceed a threshold is distributed, without replacement
too (Vatutin and Mikhailov), as a sum of independent indicators of unequal probabilities. By
Hoeffding (1956) its lower tail is then below that of the binomial distribution with the same mean,
so the bound of Clopper and Pearson holds, for confidences of 3/4 or more and fewer than n - 1 rows
in excess; else the bound is 1. No sample bounds the largest error of all rows.

Every statement holds by itself at its confidence, and for the weights that the method has drawn:
rows and probes come from a generator of their own, numpy's, so that the method's seed does not
matter.

References:
    A. Maurer and M. Pontil, "Empirical Bernstein Bounds and Sample Variance Penalization", 2009,
    https://arxiv.org/abs/0907.3740.
    W. Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables", 1963,
    https://doi.org/10.1080/01621459.1963.10500830.
    W. Hoeffding, "On the Distribution of the Number of Successes in Independent Trials", 1956,
    https://doi.org/10.1214/aoms/1177728178.
    V. A. Vatutin and V. G. Mikhailov, "Limit Theorems for the Number of Empty Cells in an
    Equiprobable Scheme for Group Allocation of Particles", 1982, https://doi.org/10.1137/1127084.
    C. J. Clopper and E. S. Pearson, "The Use of Confidence or Fiducial Limits Illustrated in the
    Case of the Binomial", 1934, https://doi.org/10.1093/biomet/26.4.404.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from numattn.core.inputs import not_negative, positive
from numattn.engines.tiles import spans
from numattn.measure.errors import Attend, exact_logits, weigh_values
from numattn.measure.inputs import QKV
from numattn.measure.matvec import WIDTH, implied_rows

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

STRATA = 10
LEAST = 0.75  # confidence from which on the bound of a share is proved

CAP_TV = 1.0  # of two distributions
CAP_HULL = 2.0  # of two points in the hull of the values
CAP_ROWS = 2.0  # of two rows of one norm

_BLOCK = 1 << 24  # elements of the exact weights of all heads that exist at a time


@dataclass(frozen=True)
class Interval:
    """An estimate, and the bounds between which the true number lies, at the stated confidence.

    Attributes:
        value: The estimate.
        low, high: The bounds. Equal where everything was counted and nothing estimated.
        error: Standard error of the estimate, itself estimated: what is usual, not a bound. None
            where there is none.
    """

    value: float
    low: float
    high: float
    error: float | None = None

    @property
    def exact(self) -> bool:
        """Whether there is nothing to be uncertain of."""
        return self.low == self.high

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True, eq=False)
class RowSample:
    """Rows drawn without replacement, in strata of consecutive positions.

    Attributes:
        length: Rows that there are, N.
        rows: int (n,), rising.
        counts: Rows drawn in each stratum.
        sizes: Rows that each stratum has.
    """

    length: int
    rows: Tensor
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether all rows were taken."""
        return self.rows.numel() == self.length

    @property
    def weights(self) -> Tensor:
        """The share of all rows that each drawn one stands for, float64 (n,)."""
        shares = [s / c / self.length for s, c in zip(self.sizes, self.counts, strict=True)]
        return torch.tensor(shares, dtype=torch.float64).repeat_interleave(
            torch.tensor(self.counts)
        )

    @property
    def imbalance(self) -> float:
        """The largest of n times the weights: 1 where every row stands for as many."""
        return self.rows.numel() * self.weights.max().item()

    def mean(self, x: Tensor) -> float:
        """Estimate of the mean over all rows of x, float64 (n,)."""
        return (self.weights * x).sum().item()

    def standard_error(self, x: Tensor) -> float:
        """Of `mean`, from the variances within the strata; inf from a single row."""
        if self.complete:
            return 0.0
        if min(self.counts) < 2:
            return math.inf
        variance = 0.0
        for part, size in zip(x.split(self.counts), self.sizes, strict=True):
            left = 1 / part.numel() - 1 / size
            variance += (size / self.length) ** 2 * left * part.var().item()
        return math.sqrt(variance)


def draw_rows(length: int, rows: int, seed: int = 0) -> RowSample:
    """Draw rows for an estimate, as many in each tenth of the positions as in the others.

    Where `rows` is no multiple of 10 the strata are as unequal as the numbers drawn in them, so
    that every row stands for as many. Fewer than 20 rows are drawn in fewer strata, two in each.

    Args:
        length: Rows that there are, N.
        rows: Rows to draw; all, where there are not more.
        seed: Of the draw; equal arguments give equal rows.

    Example:
        >>> draw_rows(1000, 25).counts
        (3, 3, 3, 3, 3, 2, 2, 2, 2, 2)
    """
    positive("draw_rows", "length", length)
    positive("draw_rows", "rows", rows)
    not_negative("draw_rows", "seed", seed)
    rows = min(rows, length)
    strata = max(min(STRATA, rows // 2), 1)
    counts = [rows // strata + (s < rows % strata) for s in range(strata)]
    edges = [length * int(drawn) // rows for drawn in np.cumsum([0, *counts])]
    source = np.random.default_rng(seed)
    drawn = [
        start + np.sort(source.choice(stop - start, count, replace=False))
        for (start, stop), count in zip(pairwise(edges), counts, strict=True)
    ]
    sizes = tuple(stop - start for start, stop in pairwise(edges))
    return RowSample(length, torch.from_numpy(np.concatenate(drawn)), tuple(counts), sizes)


@dataclass(frozen=True, eq=False)
class RowErrors:
    """A number that each row has, known for the sampled rows.

    Attributes:
        values: Of the sampled rows, float64 (n,).
        sample: Which rows these are.
        cap: Larger numbers count as this one in the mean.
        confidence: Of each statement by itself.
    """

    values: Tensor
    sample: RowSample
    cap: float
    confidence: float

    @property
    def capped(self) -> int:
        """How many sampled rows exceed the cap by more than rounding."""
        return int((self.values > self.cap * (1 + 1e-6)).sum())

    @property
    def mean(self) -> Interval:
        """Mean over all rows of the number or the cap, whichever is less."""
        return mean_interval(
            self.values.clamp(max=self.cap), self.sample, self.cap, self.confidence
        )

    def share_above(self, threshold: float) -> Interval:
        """Share of all rows that exceed a threshold, and an upper bound; the lower bound is 0.

        The threshold must not be chosen by a look at these rows; `exceeded_by` may look.
        """
        above = self.values > threshold
        value = self.sample.mean(above.double())
        if self.sample.complete:
            return Interval(value, value, value, 0.0)
        bound = _share_bounds(self.sample, self.confidence)[int(above.sum())].item()
        return Interval(value, 0.0, bound, self.sample.standard_error(above.double()))

    def exceeded_by(self, share: float) -> float:
        """A number that at most this share of all rows exceeds, with the stated confidence.

        It is the largest sampled one, or the k-th largest where there are rows enough: at 95 % the
        largest of 299 rows serves for 1 %, the second largest of 473.

        Returns:
            The number; inf where there are too few rows to say anything.
        """
        if not 0 < share < 1:
            raise ValueError(f"exceeded_by: share must be between 0 and 1; got {share}.")
        falling = self.values.sort(descending=True).values
        if self.sample.complete:
            return falling[math.floor(share * falling.numel())].item()
        allowed = int((_share_bounds(self.sample, self.confidence) <= share).sum())
        return falling[allowed - 1].item() if allowed else math.inf


@dataclass(frozen=True)
class HeadEstimate:
    """Estimated errors of one query head, named as in `HeadError`.

    Attributes:
        head: b * H + h.
        output: Frobenius norm of the error of the output, relative to the output's.
        rows: Norm of a row's error relative to the row's norm; capped at 2 in the mean.
        hull: Norm of a row's error relative to the radius of the values about their mean; capped
            at 2, which a method that stays in the hull of the values does not exceed.
        tv: Half the sum of the absolute errors of a row of weights; capped at 1, which
            distributions do not exceed. None where weights were not measured.
    """

    head: int
    output: Interval
    rows: RowErrors
    hull: RowErrors
    tv: RowErrors | None


def estimate_errors(
    fn: Attend,
    x: QKV,
    *,
    rows: int = 512,
    confidence: float = 0.95,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    linear_in_value: bool = True,
    with_weights: bool = True,
) -> list[HeadEstimate]:
    r"""Estimate the errors of a method from a sample of the rows, at any length.

    The means have intervals, and shares of rows upper bounds, as the module's text says. The
    sampled rows of the method's weights come from the transpose: the gradient of
    :math:`\hat o_{ic}` with respect to column c of the value is row i of :math:`\hat P`.

    The relative error of the output is :math:`d / |O|`, with d and O over all rows. Rows of exact
    attention lie within :math:`R_V` of the mean :math:`\bar v` of the values, so a row's error is
    at most :math:`R_V + \max_i |\hat o_i - \bar v|`, and its norm at most that of the largest
    value: each mean square has its interval, at half the :math:`\delta` each. Besides
    :math:`|\,|\hat O| - |O|\,| \le d`, and all of :math:`\hat O` is known. These bounds are safe
    for every method and wide; the standard error of the ratio is beside them.

    Args:
        fn: The method, as `numattn.measure.attend` binds it. Calls on the same queries and keys
            must use the same weights.
        x: The input, in the type in which it is stored: rounding it to `dtype` is part of the
            method.
        rows: Rows to draw, the same in every head; all of them make the estimate exact.
        confidence: Of each statement by itself, at least 0.75.
        seed: Of the draw of the rows.
        dtype: Type in which the method runs.
        linear_in_value: Whether it has weights.
        with_weights: Whether to measure them. The method must pass gradients on to value.

    Returns:
        An estimate for each query head, in order.

    Raises:
        ValueError: An argument is out of its range, or there is no gradient to take weights from.

    Cost: 2 n N (D + E) operations in float64 per head for n rows, and one call of the method. The
    weights take calls forward and backward of value width up to 256, with a column for each sampled
    row and query head of a group; no more than 2^24 exact weights exist at a time.

    Limits: the largest error cannot be bounded by a sample. At 95 % an interval of a mean reaches
    at least 9.5 / n of its cap to either side, however equal the rows are.

    Example:
        >>> from numattn.measure import attend, synthetic
        >>> from numattn.sparse import Window
        >>> x = synthetic("local", 1024, heads=1)
        >>> found = estimate_errors(attend(Window(64), x), x, rows=300)[0]
        >>> found.tv.mean.low < found.tv.mean.value < found.tv.mean.high
        True
        >>> found.tv.exceeded_by(0.01) == found.tv.values.max().item()
        True
    """
    positive("estimate_errors", "rows", rows)
    if not LEAST <= confidence < 1:
        raise ValueError(
            f"estimate_errors: confidence must be from {LEAST} to less than 1; got {confidence}."
        )
    sample = draw_rows(x.length, rows, seed)
    y, exact = x.to(dtype), x.to(torch.float64)
    with torch.no_grad():
        out = fn(y.q, y.k, y.v)
    weighted = fn if linear_in_value and with_weights else None
    distance, norm, tv = _row_errors(weighted, out, y, exact, sample)
    radius, reach, total, largest = (t.flatten(0, 1) for t in _ranges(exact, out))

    def errors(of: Tensor, cap: float) -> RowErrors:
        return RowErrors(of.nan_to_num(nan=math.inf), sample, cap, confidence)

    return [
        HeadEstimate(
            head,
            ratio_interval(
                distance[head].square(),
                norm[head].square(),
                sample,
                tops=(reach[head].item() ** 2, largest[head].item() ** 2),
                total=total[head].item(),
                confidence=confidence,
            ),
            errors(_ratio(distance[head], norm[head]), CAP_ROWS),
            errors(_ratio(distance[head], radius[head]), CAP_HULL),
            None if tv is None else errors(tv[head], CAP_TV),
        )
        for head in range(distance.shape[0])
    ]


def mean_interval(x: Tensor, sample: RowSample, top: float, confidence: float) -> Interval:
    """The mean over all rows of a number between 0 and `top`, float64 (n,) at the sampled ones."""
    value = sample.mean(x)
    if sample.complete:
        return Interval(value, value, value, 0.0)
    error = sample.standard_error(x)
    n, top = x.numel(), top * sample.imbalance
    c2 = 2 * math.log(3 / (1 - confidence)) / n
    if c2 >= 1 or not math.isfinite(top):
        return Interval(value, 0.0, top, error)
    scaled = x * sample.weights * n / top if top else x  # in [0, 1], of mean value / top
    b = c2 + c2 / 6
    variance = scaled.var(correction=0).item()
    e = top * (b + math.sqrt(c2 * (b**2 + (1 - c2) * variance))) / (1 - c2)
    return Interval(value, max(value - e, 0.0), min(value + e, top / sample.imbalance), error)


def ratio_interval(
    squares: Tensor,
    norms: Tensor,
    sample: RowSample,
    *,
    tops: tuple[float, float],
    total: float,
    confidence: float,
) -> Interval:
    """The relative error of an output, from what the sampled rows say.

    Args:
        squares: Squared norms of the errors of the sampled rows, float64 (n,).
        norms: Squared norms of the exact rows, float64 (n,).
        sample: Which rows these are.
        tops: What no row of either exceeds.
        total: Mean over all rows of the squared norm of the method's row.
        confidence: Of the interval.
    """
    inner = 1 - (1 - confidence) / 2
    a, b = (
        mean_interval(t, sample, top, inner) for t, top in zip((squares, norms), tops, strict=True)
    )
    if not math.isfinite(a.value) or not math.isfinite(total):
        return Interval(math.inf, 0.0, math.inf)
    if not b.value:
        value = math.inf if a.value else 0.0
        return Interval(value, value if sample.complete else 0.0, value if a.exact else math.inf)
    value = math.sqrt(a.value / b.value)
    if sample.complete:
        return Interval(value, value, value, 0.0)
    linear = sample.standard_error(squares - value**2 * norms)
    error = linear / (2 * value * b.value) if value else 0.0
    near, far, known = math.sqrt(a.low), math.sqrt(a.high), math.sqrt(total)
    least = max(math.sqrt(b.low), known - far)  # of the root mean square of the exact rows
    most = min(math.sqrt(b.high), known + near)
    low, high = near / most if near else 0.0, far / least if least else math.inf
    return Interval(min(max(value, low), high), low, high, error)


def frobenius_norm(
    operator: LinearOperator, *, probes: int = 64, confidence: float = 0.95, seed: int = 0
) -> Interval:
    r"""The Frobenius norm of an operator E, by Hutchinson's probes.

    For a vector z of independent signs the mean of :math:`|E z|^2` is :math:`\|E\|_F^2`. Over b
    probes their mean T has the relative standard deviation :math:`\sqrt{2 / b}\, \|E^T E\|_F /
    \|E\|_F^2` at most, so it is the larger the fewer singular values dominate. `Interval.error` is
    estimated from the spread of the probes and is what to expect; the bounds hold for every E. With
    :math:`L = \ln(2 / \delta)` they are

    .. math:: \frac{T}{x} \le \|E\|_F^2 \le \frac{T}{1 - \sqrt{6 L / b}}, \qquad
              x - 1 - \ln x = \frac{2 L}{b}, \quad x > 1.

    The first is the Chernoff bound of the chi-squared distribution with b degrees of freedom: the
    moment generating function of :math:`|E z|^2` is largest, at a given norm, where E has rank one,
    and for signs no larger than for Gaussian probes. The second is the lower tail of positive
    numbers whose second moment is at most three times the square of their mean. For b up to 6 L
    there is no upper bound.

    Args:
        operator: A `scipy.sparse.linalg.LinearOperator`, such as an `error_operator`.
        probes: b.
        confidence: Of the interval.
        seed: Of the probes.

    Cost: one product with b columns.

    References:
        M. F. Hutchinson, "A Stochastic Estimator of the Trace of the Influence Matrix for Laplacian
        Smoothing Splines", 1990, https://doi.org/10.1080/03610919008812866.

    Example:
        >>> from scipy.sparse.linalg import aslinearoperator
        >>> identity = aslinearoperator(torch.eye(100).double().numpy())
        >>> frobenius_norm(identity).value  # no spread at all
        10.0
    """
    from scipy.special import lambertw

    positive("frobenius_norm", "probes", probes)
    _check_confidence("frobenius_norm", confidence)
    signs = np.random.default_rng(seed).integers(0, 2, (operator.shape[1], probes)) * 2.0 - 1.0
    squares = np.square(operator.matmat(signs)).sum(0)
    mean, spread = float(squares.mean()), float(squares.std(ddof=1)) if probes > 1 else math.inf
    value, rate = math.sqrt(mean), math.log(2 / (1 - confidence)) / probes
    x = -lambertw(-math.exp(-1 - 2 * rate), -1).real
    kept = 1 - math.sqrt(6 * rate)
    high = math.sqrt(mean / kept) if kept > 0 else math.inf
    error = spread / math.sqrt(probes) / (2 * value) if value else 0.0
    return Interval(value, math.sqrt(mean / x), high, error)


def spectral_norm(
    operator: LinearOperator,
    *,
    probes: int = 8,
    power: int = 2,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    r"""The spectral norm of an operator E, between a Ritz value and a random upper bound.

    The lower bound is :math:`|E u|` for the unit vector u that Lanczos' method finds for
    :math:`E^T E`, run to a tolerance of 1e-3; it holds without any probability. For b Gaussian
    vectors g and q power steps,

    .. math:: \|E\|_2 \le \Bigl(\max_g |(E E^T)^q E g| / t\Bigr)^{1 / (2 q + 1)}

    except with probability :math:`P(|\xi| < t)^b`, :math:`\xi` being standard normal: the component
    of :math:`g` along the leading singular vector is one. t makes that :math:`\delta`. The usual
    form, with :math:`10 \sqrt{2 / \pi}` in place of 1 / t and failing with probability at most
    :math:`10^{-b}`, follows from :math:`P(|\xi| < t) \le t \sqrt{2 / \pi}`.

    Args:
        operator: A `scipy.sparse.linalg.LinearOperator`, such as an `error_operator`.
        probes: b.
        power: q, not negative.
        confidence: Of the upper bound.
        seed: Of the probes and of Lanczos' first vector.

    Returns:
        The Ritz value as estimate and lower bound, and the upper bound.

    Cost: 2 q + 1 products with b columns, and some tens of products with one column for Lanczos.

    References:
        N. Halko, P.-G. Martinsson and J. A. Tropp, "Finding Structure with Randomness", 2011,
        Lemma 4.1, https://arxiv.org/abs/0909.4061.

    Example:
        >>> from scipy.sparse.linalg import aslinearoperator
        >>> found = spectral_norm(aslinearoperator(torch.arange(1.0, 9.0).diag().numpy()))
        >>> round(found.value, 6), found.high > 8
        (8.0, True)
    """
    from scipy.sparse.linalg import svds
    from scipy.stats import halfnorm

    positive("spectral_norm", "probes", probes)
    not_negative("spectral_norm", "power", power)
    _check_confidence("spectral_norm", confidence)
    source = np.random.default_rng(seed)
    columns = operator.matmat(source.standard_normal((operator.shape[1], probes)))
    if not columns.any():
        return Interval(0.0, 0.0, 0.0)
    for _ in range(power):
        columns = operator.matmat(operator.rmatmat(columns))
    t = halfnorm.ppf((1 - confidence) ** (1 / probes))
    high = float((np.linalg.norm(columns, axis=0).max() / t) ** (1 / (2 * power + 1)))
    if min(operator.shape) < 3:  # too small for Lanczos
        value = float(np.linalg.norm(operator.matmat(np.eye(operator.shape[1])), 2))
    else:
        first = source.standard_normal(min(operator.shape))
        value = float(svds(operator, 1, v0=first, tol=1e-3, return_singular_vectors=False)[0])
    return Interval(value, value, max(high, value))


@torch.no_grad()
def _row_errors(
    weighted: Attend | None, out: Tensor, y: QKV, exact: QKV, sample: RowSample
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Error norm, exact norm and total variation of the sampled rows, float64 (B H, n)."""
    distance, norm, tv = [], [], []
    for rows in _blocks(exact, sample.rows.to(exact.q.device)):
        weights, o = exact_rows(exact, rows)
        distance.append((out[:, :, rows] - o).norm(dim=-1))
        norm.append(o.norm(dim=-1))
        if weighted is not None:
            difference = weights.sub_(implied_rows(weighted, y, rows))
            tv.append(torch.linalg.vector_norm(difference, 1, -1) / 2)
    return _joined(distance), _joined(norm), _joined(tv) if tv else None


def _joined(parts: list[Tensor]) -> Tensor:
    """Blocks of rows (B, H, n) -> (B H, n)."""
    return torch.cat(parts, 2).flatten(0, 1).cpu()


def _blocks(x: QKV, rows: Tensor) -> Iterator[Tensor]:
    """Rows in blocks whose weights, over all heads, are of moderate size."""
    batch, heads, length, _ = x.q.shape
    step = min(_BLOCK // (batch * heads * length), WIDTH // x.group)
    for start, stop in spans(rows.numel(), max(step, 1)):
        yield rows[start:stop]


def exact_rows(x: QKV, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of the exact weights, (B, H, n, N), and of the output, (B, H, n, E)."""
    weights = exact_logits(x, rows).softmax(-1)
    return weights, weigh_values(weights, x)


def _ranges(exact: QKV, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What binds the errors of all rows of a head, float64 (B, H).

    The radius of the values about their mean, the largest possible error of a row, the mean square
    of the method's rows, and the largest norm of a value.
    """
    v = exact.v
    center = v.mean(2, keepdim=True)

    def of_heads(t: Tensor) -> Tensor:
        return t.repeat_interleave(exact.group, dim=1)

    radius = of_heads((v - center).norm(dim=-1).amax(-1))
    out = out.double()
    reach = radius + (out - of_heads(center)).norm(dim=-1).amax(-1)
    total = out.square().sum(-1).mean(-1)
    return radius, reach, total, of_heads(v.norm(dim=-1).amax(-1))


def _share_bounds(sample: RowSample, confidence: float) -> Tensor:
    """Upper bounds of a share of which 0, 1, ..., n sampled rows are, float64 (n + 1,)."""
    return (_clopper_pearson(sample.rows.numel(), confidence) * sample.imbalance).clamp(max=1.0)


@cache
def _clopper_pearson(n: int, confidence: float) -> Tensor:
    """Upper bounds of a probability after 0, 1, ..., n events in n trials, float64 (n + 1,)."""
    from scipy.stats import beta

    k = np.arange(n - 1)
    bounds = torch.ones(n + 1, dtype=torch.float64)
    bounds[: n - 1] = torch.from_numpy(beta.ppf(confidence, k + 1, n - k))
    return bounds


def _check_confidence(name: str, confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"{name}: confidence must be between 0 and 1; got {confidence}.")


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == 0, 0.0, a / b)
