"""Partial: attention over a part of the keys, before it is divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from numattn.core.linalg import exp_, finite


@dataclass(frozen=True)
class Partial:
    r"""Unnormalised attention, on a scale that cannot overflow.

    It stands for :math:`\sum_j w_j v_j = \mathrm{num}\, e^{\mathrm{shift}}` and
    :math:`\sum_j w_j = \mathrm{den}\, e^{\mathrm{shift}}`. Partials over disjoint key sets merge
    exactly. Weights may be negative; then ``mass`` carries :math:`\sum_j |w_j|` on the same scale,
    and `cancelled` tells which rows cannot be trusted.

    Attributes:
        num: (..., N, E).
        den: (..., N).
        shift: (..., N); -inf where there is no weight at all.
        mass: (..., N), or None when the weights are not negative.
    """

    num: Tensor
    den: Tensor
    shift: Tensor
    mass: Tensor | None = None

    @staticmethod
    def from_logits(logits: Tensor, value: Tensor) -> Partial:
        """Softmax weights: logits (..., N, M), used up, -inf where forbidden; value (..., M, E)."""
        shift = logits.detach().amax(-1)
        weight = exp_(logits.sub_(finite(shift)[..., None]))
        return Partial(weight @ value, weight.sum(-1), shift)

    @staticmethod
    def from_lse(out: Tensor, lse: Tensor) -> Partial:
        """The normalised pair (out, lse), as a partial. lse = -inf means no weight."""
        den = torch.where(lse == -torch.inf, 0.0, torch.ones_like(lse))
        # The differentiable part of lse lives in den: shift is only a scale.
        shift = lse.detach()
        den = den * (lse - finite(shift)).exp()
        return Partial(out * den[..., None], den, shift)

    @staticmethod
    def zeros(shape: tuple[int, ...], width: int, like: Tensor) -> Partial:
        """The identity of `merge`: rows of this shape with no weight."""
        den = like.new_zeros(shape)
        return Partial(like.new_zeros((*shape, width)), den, torch.full_like(den, -torch.inf))

    @staticmethod
    def cat(parts: list[Partial], dim: int) -> Partial:
        """Partials of different rows, one after the other; `dim` counts from the left."""
        return Partial._join(torch.cat, parts, dim)

    @staticmethod
    def stack(parts: list[Partial], dim: int) -> Partial:
        """Partials of different rows, along a new dimension; `dim` counts from the left."""
        return Partial._join(torch.stack, parts, dim)

    @staticmethod
    def _join(
        how: Callable[[list[Tensor], int], Tensor], parts: list[Partial], dim: int
    ) -> Partial:
        mass = None
        if any(p.mass is not None for p in parts):
            mass = how([p.den if p.mass is None else p.mass for p in parts], dim)
        return Partial(
            how([p.num for p in parts], dim),
            how([p.den for p in parts], dim),
            how([p.shift for p in parts], dim),
            mass,
        )

    def merge(self, other: Partial) -> Partial:
        """The partial over the union of two disjoint key sets."""
        shift = torch.maximum(self.shift, other.shift)
        a = (self.shift - finite(shift)).exp()
        b = (other.shift - finite(shift)).exp()
        mass = None
        if self.mass is not None or other.mass is not None:
            mine = self.den if self.mass is None else self.mass
            theirs = other.den if other.mass is None else other.mass
            mass = mine * a + theirs * b
        num = torch.addcmul(self.num * a[..., None], other.num, b[..., None])
        return Partial(num, torch.addcmul(self.den * a, other.den, b), shift, mass)

    def scale(self, log_weight: Tensor | float) -> Partial:
        """Multiply every weight by exp(log_weight), given per row: counts, importance weights."""
        a = torch.as_tensor(log_weight, dtype=self.shift.dtype, device=self.shift.device)
        shift = a.detach()
        # 1, and carries the gradient of log_weight; 0 where the weight is.
        rest = (a - finite(shift)).exp()
        mass = None if self.mass is None else self.mass * rest
        return Partial(self.num * rest[..., None], self.den * rest, self.shift + shift, mass)

    def finalize(self) -> tuple[Tensor, Tensor]:
        """Divide: (out, lse). Rows without weight give zeros and -inf.

        Denominators are divided by as they are; a negative one gives lse = NaN. `cancelled` finds
        rows whose weights cancel.
        """
        none = self.den == 0
        lse = finite(self.shift) + (self.den + none).log()
        return self.out(), lse.masked_fill(none, -torch.inf)

    def out(self) -> Tensor:
        """The output alone, (..., N, E)."""
        return _Quotient.apply(self.num, self.den + (self.den == 0))

    def cancelled(self, tolerance: float | None = None) -> Tensor:
        """Rows whose weights cancel, so that their quotient is rounding noise: bool (..., N).

        A row cancels when den <= tolerance * mass.

        Args:
            tolerance: By default 1e-6 in float32 and 1e-13 in float64.
        """
        if self.mass is None:
            return torch.zeros_like(self.den, dtype=torch.bool)
        if tolerance is None:
            tolerance = 1e-13 if self.den.dtype == torch.float64 else 1e-6
        return (self.den <= tolerance * self.mass) & (self.mass > 0)


class _Quotient(torch.autograd.Function):
    """Rows num (..., N, E) over den (..., N), with half the passes of torch's own gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(num: Tensor, den: Tensor) -> Tensor:
        return num / den[..., None]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        den, out = ctx.saved_tensors
        grad_num = grad / den[..., None]
        return grad_num, (grad_num * out).sum(-1).neg()
