"""What an attention head looks like, and what that means for the methods."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numattn.core.inputs import positive
from numattn.kernel.performer import Performer, expected_error
from numattn.measure.inputs import QKV

ROWS = 32  # whose logits exist at a time


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
    """

    batch: int
    head: int
    log_keys: float
    logit_range: float
    square_raw: float
    square: float
    num_features: int
    log10_error: float

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

    def __str__(self) -> str:
        verdict = "hopeless" if self.random_features_hopeless else "enough for most weights"
        needed = f"10^{self.log10_features_needed:.1f}"
        return (
            f"head {self.head}: logits range over {self.logit_range:.1f} (log N = "
            f"{self.log_keys:.1f}); |x + y|^2 = {self.square:.1f} ({self.square_raw:.1f} without "
            f"preconditioning), so random features need m = {needed}; {self.num_features} are "
            f"{verdict}"
        )


@torch.no_grad()
def diagnose(x: QKV, *, num_features: int = 256, max_tokens: int = 1024) -> list[HeadDiagnosis]:
    r"""Look at the logits of every head, before a method is chosen.

    It warns of nothing and raises nothing: it says what random features can do with these queries
    and keys. Theory (J. Alman and Z. Song, 2023) ties fast approximation to logits of a range below
    log N; above it only structure helps, such as few heavy keys, clusters, or decay.

    Args:
        x: The input.
        num_features: m, of the random features that are judged.
        max_tokens: Of more tokens than that, as many queries and keys are taken at even distances.

    Returns:
        One `HeadDiagnosis` for each query head, sequence by sequence.

    Cost: 4 n^2 D operations per head for n = min(N, max_tokens), in float64.

    Example:
        >>> from numattn import measure
        >>> [head.random_features_hopeless for head in measure.diagnose(measure.load("minilm"))]
        [True, False, False, True, True, True]
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
    ranges = _logit_ranges(x, max_tokens)
    return [
        HeadDiagnosis(
            batch=b,
            head=h,
            log_keys=math.log(x.length),
            logit_range=ranges[b, h].item(),
            square_raw=raw.median[b, h].item(),
            square=best.median[b, h].item(),
            num_features=num_features,
            log10_error=best.log10[b, h].item(),
        )
        for b in range(x.q.shape[0])
        for h in range(x.q.shape[1])
    ]


def _logit_ranges(x: QKV, max_rows: int) -> Tensor:
    """Median over rows of the largest visible logit less the smallest, float64 (B, H)."""
    count = min(x.q.shape[2], max_rows)
    at = torch.arange(count, device=x.q.device) * x.q.shape[2] // count
    keys = torch.arange(x.length, device=x.q.device)
    k = x.k.double().repeat_interleave(x.group, 1).mT
    found = []
    for rows in at.split(ROWS):
        logits = (x.q[:, :, rows].double() @ k) * x.scale
        if x.is_causal:
            later = keys > rows[:, None]
            logits = torch.where(later, logits[..., :1], logits)  # the first key is always visible
        found.append(logits.amax(-1) - logits.amin(-1))
    return torch.cat(found, -1).median(-1).values
