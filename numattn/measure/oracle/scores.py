"""How near a method comes to its oracle: by error at one budget, by budget at one error."""

from __future__ import annotations

import math

from torch import Tensor

from numattn.core.info import FAMILIES
from numattn.core.inputs import positive
from numattn.measure.errors import HeadError, Reference
from numattn.measure.oracle.keys import top_keys_curve
from numattn.measure.oracle.matrices import truncated_curve

_ROUNDING = 1e-9  # by which errors of float64 may differ that are the same


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

    Limits: beyond 4096 tokens the error of the low-rank oracle is the least one or a little more,
    see `oracle`, and the ratio too high by as much.
    """
    method, best = _judged(method_error, family), _judged(oracle_error, family)
    least = 0.0 if floor is None else _judged(floor, family)
    if method is None or best is None or least is None:
        return None
    method, best = max(method, least), max(best, least)
    if method == best:
        return 1.0
    return best / method if method else math.inf


def error_curve(family: str, ref: Reference, units: int | None = None) -> Tensor | None:
    r"""Error of a family's oracle at every budget, in the norm of `efficiency`.

    With :math:`P_{i(1)} \ge P_{i(2)} \ge \dots` the sorted weights of a row and
    :math:`\sigma_1 \ge \sigma_2 \ge \dots` the singular values of the weights,

    .. math:: \epsilon_{\mathrm{sparse}}(k) = \mathrm{median}_i \sum_{j > k} P_{i(j)}, \qquad
              \epsilon_{\mathrm{rank}}(r)
              = \Big( \sum_{j > r} \sigma_j^2 \Big/ \sum_j \sigma_j^2 \Big)^{1/2} .

    Args:
        family: As in `Info.family`.
        ref: The exact weights.
        units: The last budget; None is N.

    Returns:
        float64 (B, H, units + 1), not rising, for budgets 0, 1, ..., units. None where `oracle` has
        none at the last.

    Raises:
        ValueError: No such family, or a budget that is not between 1 and N.

    Cost: Once per input: sorting the weights, one head at a time, with N^2 numbers in memory;
    or the decomposition that `oracle` keeps.

    Example:
        >>> from numattn.measure import reference, synthetic
        >>> error_curve("sparse", reference(synthetic("gaussian", 64)), 8).shape
        torch.Size([1, 4, 9])
    """
    if family not in FAMILIES:
        raise ValueError(
            f"error_curve: family must be one of {', '.join(FAMILIES)}; got {family!r}."
        )
    length = ref.x.length
    units = length if units is None else units
    positive("error_curve", "units", units)
    if units > length:
        raise ValueError(f"error_curve: units must be at most N = {length}; got {units}.")
    if family == "exact":
        return None
    if family == "sparse":
        return ref.keep("top_keys_curve", lambda: top_keys_curve(ref))[..., : units + 1]
    return truncated_curve(ref, units)


def budget_overhead(
    error: HeadError,
    family: str,
    units: int,
    ref: Reference,
    floor: HeadError | None = None,
) -> float | None:
    r"""Budget of a method over the least budget at which its oracle is as good: 1 is the best.

    .. math:: \omega = \frac{b}{\min \{ b' \ge 1 : \epsilon(b') \le e \}}

    with the method's budget b and error e in the norm of `efficiency`, and the oracle's errors
    :math:`\epsilon` of `error_curve`. It is at least 1 for a method that its oracle bounds. An
    efficiency looks poor where errors of the oracle fall fast, this one where they fall slowly.

    Args:
        error: Of one head.
        family: The method's, by whose oracle it is judged (`Info.judge`).
        units: b, as `Cost.units` gives it.
        ref: The exact weights.
        floor: Of the same head, from `noise_floor`: the oracle need not be nearer to the method's
            error than this, which is rounding.

    Returns:
        The ratio, at most b. None where the weights were not measured, where `oracle` has no
        errors, and for the exact family.

    Raises:
        ValueError: No such family, or a budget that is not positive.

    Cost: That of `error_curve`, once per input.

    Limits: beyond 4096 tokens the errors of the low-rank oracle are the least ones or a little
    more, so the ratio is too low by a little; and it is None where a method beats its oracle.

    Example:
        >>> from numattn.measure import oracle, reference, synthetic
        >>> ref = reference(synthetic("clustered", 64))
        >>> budget_overhead(oracle("sparse", 8, ref)[0], "sparse", 8, ref)
        1.0
    """
    positive("budget_overhead", "units", units)
    length = ref.x.length
    curve = error_curve(family, ref)
    if curve is None:
        curve = error_curve(family, ref, min(units, length))
    value = _judged(error, family)
    least = 0.0 if floor is None else _judged(floor, family)
    if curve is None or value is None or least is None:
        return None
    own = curve.flatten(0, 1)[error.head, 1:]
    as_good = (own <= (value + least) * (1 + _ROUNDING)).nonzero()
    return units / (int(as_good[0]) + 1) if len(as_good) else None


def _judged(error: HeadError, family: str) -> float | None:
    """The error in the norm in which the family's oracle is the best."""
    if family == "sparse":
        return None if error.tv is None else error.tv.median
    return error.weights
