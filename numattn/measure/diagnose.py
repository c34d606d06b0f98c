r"""What an attention head looks like, and what that means for the methods.

Fast approximation of any attention whatever is tied to small logits (J. Alman and Z. Song, "Fast
attention requires bounded entries", 2023, https://arxiv.org/abs/2302.13214): above a range of the
order of log N only structure helps. `diagnose` looks for the structures that the families of
methods use, in the exact weights of a sample of queries on all keys.

A verdict is the first of these that holds, the cheapest structure first:

- ``"local + sink"``: `WINDOW_MASS` of the mass lies within N / `WINDOW` positions of the query or
  on the first `SINKS` keys. It is sparse without any search for keys, so it comes before the
  others; and a sink makes every other number look better than it is: one column that holds the
  mass is a matrix of rank 1, and the rest of the head is hidden behind it.
- ``"sparse"``: the typical row has 90 % of its mass on a share `SPARSE` of its keys.
- ``"low rank"``: the weights are within 10 % of a matrix whose rank is `LOW_RANK` of its rows. Of a
  causal head that is asked of its far block, the later half of the queries on the earlier half of
  the keys: the mask gives the whole a high rank at the diagonal, where methods compute exactly.
- ``"diffuse"``: the typical row's logits range over at most `DIFFUSE` log N. No key dominates.
- ``"hard"``: none of these. Exact attention is the one to beat.

It is a diagnostic, and no proof: a verdict says what to try first, and `numattn.measure.sweep`
says whether it works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from numattn.core.inputs import compute_dtype, positive
from numattn.core.linalg import group_means, kmeans, take
from numattn.kernel.performer import Performer, expected_error
from numattn.measure.errors import exact_logits
from numattn.measure.inputs import QKV
from numattn.measure.report import Table, number, plain

WINDOW = 16
"""Keys within N / 16 positions are near: N / 8 at most, an eighth of exact attention's products."""

WINDOW_MASS = 0.75
"""What lies outside is the total variation error of a window with sinks: a quarter at most, in the
mean over rows."""

SPARSE = 1 / 32
"""Of the visible keys. A method that gathers keys also has to find them, and gathered products are
slower than those of whole matrices, so it takes a smaller share than a window to gain as much."""

LOW_RANK = 1 / 8
"""Of the rows. Two factors of rank r take 2 r / N of the products of N by N weights: a quarter."""

DIFFUSE = 1.5
r"""Range of a row's logits over log N. Logits within R / 2 of their mean give no key more than
:math:`e^{R/2} / N` of the mass, which then is :math:`N^{-1/4}`. Independent normal logits of
variance 1 range over less than that from 8 keys on."""

SINKS = 4
"""First keys that count as sinks. Windows keep some of them exactly."""

DISTANCES = (1, 4, 16, 64, 256)
"""Of the locality profile, in positions."""

CLUSTER = 16
"""Keys in a cluster, on average."""

TRY_FIRST = {
    "local + sink": "sparse",
    "sparse": "sparse",
    "low rank": "lowrank",
    "diffuse": "kernel",
    "hard": "exact",
}
"""Verdict -> family of methods."""

COLUMNS = {
    "head": "query head",
    "verdict": "what the head is, and so what to try first: "
    + ", ".join(f"{verdict} -> {family}" for verdict, family in TRY_FIRST.items()),
    "near": f"mass within N/{WINDOW} positions or on the first {SINKS} keys, mean over rows",
    "sink": f"mass on the first {SINKS} keys, mean over the rows after them",
    "k90": "keys that hold 90 % of a row's mass, median over rows; k99 likewise",
    "%k90": "the same in per cent of the keys that the row may see",
    "exp H": "effective support: exponential of a row's mean entropy",
    "r10": "rank at which the weights of the sampled rows are within 10 %; r1 within 1 %",
    "%r": "r10 in per cent of rows; if causal, of the later half of queries on the earlier keys",
    "range": "of a row's logits, over log N; median over rows",
    "inner": f"variance of logits within clusters of {CLUSTER} keys over all of it; 0 compresses",
    "log m": "decimal logarithm of the random features that half of the weights need",
}
"""Of `diagnosis_table`, and what they mean."""

THRESHOLDS = (
    f"local + sink: near >= {WINDOW_MASS:.2f}. sparse: %k90 <= {100 * SPARSE:.1f}. low rank: "
    f"%r <= {100 * LOW_RANK:.1f}. diffuse: range <= {DIFFUSE}. hard: none of these. The first "
    "that holds is the verdict."
)

_HEADER = (
    *("head", "verdict", "near", "sink", "k90", "%k90", "k99", "exp H"),
    *("r10", "r1", "%r", "range", "inner", "log m"),
)
_SHARES = (0.90, 0.95, 0.99)  # of a row's mass
_LLOYD = 3  # iterations of k-means
_BLOCK = 1 << 20  # elements of a block of rows


@dataclass(frozen=True)
class HeadDiagnosis:
    r"""What `diagnose` finds in one head. ``str()`` of it says so in one line.

    Attributes:
        batch: Index of the sequence.
        head: Index of the query head.
        log_keys: log N.
        logit_range: Largest logit of a row less its smallest one; median over rows.
        square_raw: Median of :math:`|x + y|^2` over the pairs that attend, x and y being query and
            key times the root of the scale. The weight that FAVOR+ finds for such a pair has the
            relative variance :math:`(e^{|x + y|^2} - 1) / m`.
        square: The same after the preconditioner of `performer`, fitted on this head.
        num_features: m.
        log10_error: Decimal logarithm of the relative standard deviation of weights at m random
            features after preconditioning, root mean square over the pairs; see
            `numattn.kernel.performer.expected_error`.
        num_keys: N.
        num_rows: Queries whose weights were looked at.
        keys_90: Keys that hold 90 % of a row's mass, the heaviest first; median over rows.
        keys_95: The same for 95 %.
        keys_99: The same for 99 %.
        share_90: Those keys as a share of the keys that the row may see; median over rows.
        share_95: The same for 95 %.
        share_99: The same for 99 %.
        entropy: Of a row, in nats; mean over rows.
        sink_mass: Mass on the first 4 keys; mean over the rows after them.
        heaviest_key: The key with the largest column sum of the weights.
        heaviest_mass: Its share of all mass.
        locality: Mass within 1, 4, 16, 64 and 256 positions of the query; mean over rows.
        window_mass: Mass within N / 16 positions of the query or on the first 4 keys; mean over
            rows.
        rank_1: Effective rank at 1 %: the least r for which the singular values of the looked-at
            rows after the first r have a root sum of squares of at most 1 % of that of all. No
            matrix of rank r is nearer to these rows in the Frobenius norm.
        rank_10: The same at 10 %.
        far_rank_10: The same at 10 % of the far block, the later half of the rows on the earlier
            half of the keys, relative to that block. A causal mask takes nothing from it.
        rank_share: `far_rank_10` over the rows of the far block if causal, else `rank_10` over all
            rows.
        cluster_variance: Variance of the logits of a query within clusters of 16 keys on average;
            mean over queries, all pairs counted, visible or not. Methods that replace a cluster by
            its mean key misjudge its mass by about a factor :math:`e^{\sigma^2 / 2}`.
        cluster_share: The same relative to the variance over all keys: 0 where the clusters hold
            all that a query can tell, 1 where they hold nothing.
    """

    batch: int
    head: int
    log_keys: float
    logit_range: float
    square_raw: float
    square: float
    num_features: int
    log10_error: float
    num_keys: int
    num_rows: int
    keys_90: int
    keys_95: int
    keys_99: int
    share_90: float
    share_95: float
    share_99: float
    entropy: float
    sink_mass: float
    heaviest_key: int
    heaviest_mass: float
    locality: tuple[float, ...]
    window_mass: float
    rank_1: int
    rank_10: int
    far_rank_10: int
    rank_share: float
    cluster_variance: float
    cluster_share: float

    @property
    def log10_features_needed(self) -> float:
        """Decimal logarithm of the m at which half of the weights are off by less than 100 %."""
        return (self.square + math.log(-math.expm1(-self.square))) / math.log(10)

    @property
    def random_features_hopeless(self) -> bool:
        """Whether most weights have a standard error above themselves at m features.

        Errors of single weights average out where a row spreads evenly over many keys; the output
        of such a head may still be nearer to exact attention than the mean of values is.
        """
        return self.log10_features_needed > math.log10(self.num_features)

    @property
    def effective_support(self) -> float:
        """Exponential of the entropy: a row that is uniform on so many keys has as much."""
        return math.exp(self.entropy)

    @property
    def verdict(self) -> str:
        """What the head is: a key of `TRY_FIRST`, by the thresholds of this module, in order."""
        if self.window_mass >= WINDOW_MASS:
            return "local + sink"
        if self.share_90 <= SPARSE:
            return "sparse"
        if self.rank_share <= LOW_RANK:
            return "low rank"
        return "diffuse" if self.logit_range <= DIFFUSE * self.log_keys else "hard"

    @property
    def try_first(self) -> str:
        """The family of methods to try first, as in `numattn.core.info.Info.family`."""
        return TRY_FIRST[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Every number, what follows from them, and the verdict, for ``json.dumps``."""
        return {
            **asdict(self),
            "locality": list(self.locality),
            "effective_support": self.effective_support,
            "log10_features_needed": self.log10_features_needed,
            "random_features_hopeless": self.random_features_hopeless,
            "verdict": self.verdict,
            "try_first": self.try_first,
        }

    def __str__(self) -> str:
        features = "hopeless" if self.random_features_hopeless else "enough for most weights"
        return (
            f"head {self.head}: {self.verdict}, try {self.try_first}: {self._reason()}; "
            f"{self.num_features} random features {features} (10^{self.log10_features_needed:.1f})"
        )

    def _reason(self) -> str:
        """The figures that decided."""
        return {
            "local + sink": f"{self.window_mass:.0%} of mass in the window, {self.sink_mass:.0%} "
            f"on {SINKS} sinks",
            "sparse": f"k = {self.keys_90} ({self.share_90:.1%} of the keys) holds 90% of a row",
            "low rank": f"rank {self.rank_share:.1%} leaves 10%",
            "diffuse": f"logits range {self.logit_range:.1f}, log N {self.log_keys:.1f}",
            "hard": f"k = {self.keys_90} holds 90%, rank {self.rank_share:.0%} leaves 10%, logits "
            f"range {self.logit_range:.0f}",
        }[self.verdict]


@torch.no_grad()
def diagnose(x: QKV, *, num_features: int = 256, max_tokens: int = 1024) -> list[HeadDiagnosis]:
    r"""Look at every head before a method is chosen.

    It warns of nothing and raises nothing: it says which structure these queries and keys have, and
    what random features can do with them. What is found holds for the weights. The output may be
    made of less: where a sink has a small value, of the mass that the sink leaves.

    Args:
        x: The input.
        num_features: m, of the random features that are judged.
        max_tokens: Of more queries than that, as many are taken at even distances; keys are all
            taken, except for the squares :math:`|x + y|^2`, which are of a sample of both.

    Returns:
        One `HeadDiagnosis` for each query head, sequence by sequence.

    Cost: For n = min(N, max_tokens), 2 n N (D + n) operations, an eigendecomposition of n^3 and a
    sort of n N weights per query head, and 3 N^2 D / 8 of k-means per key head; the weights
    in float64, 8 n N bytes.

    Limits: The ranks are those of the n rows, so with N > n they say how the rank compares with n,
    and not what the rank of all rows is. Where one column holds the mass, every rank is 1 whatever
    is behind it. The clusters are Euclidean, of the keys alone.

    Example:
        >>> from numattn import measure
        >>> heads = measure.diagnose(measure.load("minilm"))
        >>> [head.random_features_hopeless for head in heads]
        [True, False, False, True, True, True]
        >>> heads[4].verdict, heads[4].try_first
        ('low rank', 'lowrank')
    """
    positive("diagnose", "num_features", num_features)
    positive("diagnose", "max_tokens", max_tokens)
    gqa = x.group > 1
    fitted = Performer(num_features).fit(x.q, x.k, scale=x.scale, enable_gqa=gqa)
    raw, best = (
        expected_error(
            x.q,
            x.k,
            num_features=num_features,
            precondition="balance" if fit else "none",
            center=fitted["center"] if fit else None,
            balance=fitted["balance"] if fit else None,
            is_causal=x.is_causal,
            scale=x.scale,
            enable_gqa=gqa,
            max_tokens=max_tokens,
        )
        for fit in (False, True)
    )
    within, total = _cluster_variances(x)
    return [
        HeadDiagnosis(
            batch=b,
            head=h,
            log_keys=math.log(x.length),
            square_raw=raw.median[b, h].item(),
            square=best.median[b, h].item(),
            num_features=num_features,
            log10_error=best.log10[b, h].item(),
            num_keys=x.length,
            cluster_variance=within[b, h].item(),
            cluster_share=(within[b, h] / total[b, h]).item() if within[b, h] else 0.0,
            **_weights_of(x, b, h, max_tokens),
        )
        for b in range(x.q.shape[0])
        for h in range(x.q.shape[1])
    ]


def diagnosis_table(heads: Sequence[HeadDiagnosis], title: str = "") -> str:
    """A line for each head, for a terminal of 100 columns; `COLUMNS` says what they mean.

    Args:
        heads: From `diagnose`, at least one.
        title: Of the table.
    """
    several = len({d.batch for d in heads}) > 1
    body: list[tuple[str, ...]] = [
        (
            f"{d.batch}:{d.head}" if several else str(d.head),
            d.verdict,
            f"{d.window_mass:.2f}",
            f"{d.sink_mass:.2f}",
            str(d.keys_90),
            _percent(d.share_90),
            str(d.keys_99),
            number(d.effective_support),
            str(d.rank_10),
            str(d.rank_1),
            _percent(d.rank_share),
            f"{d.logit_range / d.log_keys:.2f}" if d.log_keys else "",
            f"{d.cluster_share:.2f}",
            f"{d.log10_features_needed:.1f}",
        )
        for d in heads
    ]
    return plain(Table(title, _HEADER, body))


def _percent(share: float) -> str:
    """In at most four characters."""
    return f"{100 * share:.{1 if share < 0.0995 else 0}f}"


def sampled_rows(x: QKV, max_tokens: int) -> Tensor:
    """Queries at even distances, all of them if there are no more than `max_tokens`: int (n,)."""
    length = x.q.shape[2]
    count = min(length, max_tokens)
    return torch.arange(count, device=x.q.device) * length // count


def rows_of_head(
    x: QKV, batch: int, head: int, rows: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows of one head by the definition, in float64 and in blocks.

    Yields:
        Positions (n,), logits (n, N), -inf where a query may not attend, and weights (n, N).
    """
    one = x.single(batch, head).to(torch.float64)
    for block in rows.split(max(_BLOCK // x.length, 1)):
        logits = exact_logits(one, block)[0, 0]
        yield block, logits, logits.softmax(-1)


def keys_holding(weights: Tensor, shares: Tensor) -> Tensor:
    """How many keys, the heaviest first, hold a share of the mass: (n, N), (s,) -> int (n, s)."""
    mass = weights.sort(-1, descending=True).values.cumsum(-1)
    few = (1 - 1e-12) * shares.expand(len(mass), -1).contiguous()  # a sum's rounding is no key
    return torch.searchsorted(mass, few).add(1).clamp(max=mass.shape[1])


def singular_values(weights: Tensor) -> Tensor:
    """Of rows of weights, (n, N), in falling order, to an accuracy of 1e-8 of the largest."""
    return torch.linalg.eigvalsh(weights @ weights.mT).clamp(min=0).sqrt().flip(0)


def effective_rank(sigma: Tensor, tolerance: float) -> int:
    """Least r for which the falling singular values after r are at most a share of all."""
    tail = sigma.square().flip(0).cumsum(0)
    return len(sigma) - int((tail <= tolerance**2 * tail[-1:]).sum())


def _weights_of(x: QKV, batch: int, head: int, max_tokens: int) -> dict[str, Any]:
    """What the exact weights of the sampled rows of one head say."""
    rows = sampled_rows(x, max_tokens)
    parts = [
        (weights, _of_rows(x, block, logits, weights))
        for block, logits, weights in rows_of_head(x, batch, head, rows)
    ]
    weights = torch.cat([part for part, _ in parts])  # (n, N)
    of_rows = {name: torch.cat([part[name] for _, part in parts]) for name in parts[0][1]}
    mean = {name: of_rows[name].mean(0) for name in ("entropy", "locality", "window")}
    middle = {name: of_rows[name].median(0).values for name in ("range", "keys", "share")}
    column = weights.mean(0)
    sinks = weights[rows >= SINKS, :SINKS]
    sigma = singular_values(weights)
    far = weights[rows >= x.length // 2, : x.length // 2]
    rank, far_rank = effective_rank(sigma, 0.1), effective_rank(singular_values(far), 0.1)
    numbers = [round(100 * share) for share in _SHARES]
    return {
        "num_rows": len(rows),
        "logit_range": middle["range"].item(),
        **{f"keys_{p}": int(n) for p, n in zip(numbers, middle["keys"], strict=True)},
        **{f"share_{p}": s.item() for p, s in zip(numbers, middle["share"], strict=True)},
        "entropy": mean["entropy"].item(),
        "sink_mass": sinks.sum(1).mean().item() if len(sinks) else 1.0,
        "heaviest_key": int(column.argmax()),
        "heaviest_mass": column.max().item(),
        "locality": tuple(mean["locality"].tolist()),
        "window_mass": mean["window"].item(),
        "rank_1": effective_rank(sigma, 0.01),
        "rank_10": rank,
        "far_rank_10": far_rank,
        "rank_share": far_rank / len(far) if x.is_causal else rank / len(rows),
    }


def _of_rows(x: QKV, rows: Tensor, logits: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Numbers that each row has, (n,) or (n, several)."""
    keys = torch.arange(x.length, device=rows.device)
    distance = (rows[:, None] - keys).abs()
    near = (distance <= x.length // WINDOW) | (keys < SINKS)
    lowest = logits.masked_fill(logits == -torch.inf, torch.inf).amin(-1)
    count = keys_holding(weights, weights.new_tensor(_SHARES))
    visible = rows[:, None] + 1 if x.is_causal else x.length
    within = [torch.where(distance <= d, weights, 0.0).sum(-1) for d in DISTANCES]
    return {
        "range": logits.amax(-1) - lowest,
        "keys": count,
        "share": count.double() / visible,
        "entropy": torch.special.entr(weights).sum(-1),
        "locality": torch.stack(within, -1),
        "window": torch.where(near, weights, 0.0).sum(-1),
    }


def _cluster_variances(x: QKV) -> tuple[Tensor, Tensor]:
    r"""Variance of a query's logits within clusters of keys and over all keys, each (B, H).

    With M the mean of :math:`q q^\top` over queries and C the covariance of the keys, about the
    centers of their clusters or about their mean, the mean over queries is the squared scale times
    the inner product of M and C.
    """
    count = max(x.length // CLUSTER, 1)
    label = kmeans(x.k.to(compute_dtype(x.k.dtype)), count, _LLOYD)
    q = x.q.double().unflatten(1, (-1, x.group)) * x.scale  # (B, Hk, group, N, D)
    k = x.k.double() - x.k.double().mean(2, keepdim=True)  # (B, Hk, N, D)
    centers, _ = group_means(k, label, count)
    second = q.mT @ q / q.shape[3]
    within, total = (
        (second * (y.mT @ y / x.length)[:, :, None]).sum((-2, -1)).clamp(min=0).flatten(1)
        for y in (k - take(centers, label), k)
    )
    return within, total
