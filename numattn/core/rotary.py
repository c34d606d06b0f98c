"""Rotary position embedding (RoPE), and its stretching to longer sequences (YaRN)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    r"""Stretching of rotary frequencies to sequences longer than those of the training.

    Wavelengths that fit `beta_fast` times or more into the original length stay as they are, those
    that fit `beta_slow` times or less are stretched by `factor`, and between them it is blended.
    With :math:`a(t) = 0.1\, t \log(\mathrm{factor}) + 1`, cosine and sine are multiplied by
    `amplitude`, and the logits by `logit_factor`, :math:`a(\mathrm{mscale\_all\_dim})^2`.

    Attributes:
        factor: Length over the original length, above 1.
        original_length: Tokens of the longest sequence of the training.
        beta_fast: As above.
        beta_slow: As above.
        mscale: t of the amplitude's numerator; None takes 1 and no denominator.
        mscale_all_dim: t of its denominator and of `logit_factor`; 0 for no such factor.

    References:
        B. Peng, J. Quesnelle, H. Fan and E. Shippole, "YaRN: Efficient Context Window Extension of
        Large Language Models", 2023, https://arxiv.org/abs/2309.00071.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ValueError(f"Yarn: factor must be above 1; got {self.factor!r}.")
        if self.original_length < 1:
            raise ValueError(f"Yarn: original_length must be positive; got {self.original_length}.")

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def logit_factor(self) -> float:
        """Factor of all logits, rotated or not."""
        return self._growth(self.mscale_all_dim) ** 2

    def stretch(self, frequency: Tensor, base: float) -> Tensor:
        """The stretched frequencies of (D / 2,) frequencies."""
        pairs = len(frequency)

        def pair(turns: float) -> float:  # whose wavelength fits so often into the original length
            return pairs * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), 2 * pairs - 1)
        index = torch.arange(pairs, dtype=frequency.dtype, device=frequency.device)
        ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequency * (1 - ramp) + frequency / self.factor * ramp


@dataclass(frozen=True)
class Rotary:
    r"""Rotary position embedding: pair l of the coordinates turns by position times a frequency.

    .. math:: \theta_l = \mathrm{base}^{-2 l / D}, \qquad l = 0, \dots, D / 2 - 1,

    so that the product of a turned query and a turned key depends on their distance only.

    Attributes:
        dim: D, even.
        base: As above.
        interleaved: Whether pair l is coordinates 2 l and 2 l + 1, else l and l + D / 2. The
            turned vector has its pairs in the second order either way, which no product shows.
        yarn: Stretching of the frequencies, or None.
        radians: The frequencies of all pairs, in their order, in place of those of base and yarn,
            which must then be left at their defaults; None computes them.

    References:
        J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
        https://arxiv.org/abs/2104.09864.

    Example:
        >>> rotary = Rotary(2)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> rotary(x, torch.tensor([0, 1]))  # cos 1 and sin 1
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False
    yarn: Yarn | None = None
    radians: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.dim < 0 or self.dim % 2:
            raise ValueError(f"Rotary: dim must be even and not negative; got {self.dim}.")
        if self.radians is None:
            return
        if len(self.radians) != self.dim // 2:
            raise ValueError(
                f"Rotary: radians must be {self.dim // 2} frequencies, one for each pair of "
                f"{self.dim} coordinates; got {len(self.radians)}."
            )
        if self.base != Rotary.base or self.yarn is not None:
            raise ValueError("Rotary: give the frequencies by radians, or by base and yarn.")

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position of each pair, float64 (D / 2,)."""
        if self.radians is not None:
            return torch.tensor(self.radians, dtype=torch.float64, device=device)
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim
        found = self.base**-exponent
        return found if self.yarn is None else self.yarn.stretch(found, self.base)

    def __call__(self, x: Tensor, position: Tensor) -> Tensor:
        """Turn x (..., N, D) at int positions, broadcastable to (..., N)."""
        angle = position[..., None].double() * self.frequencies(x.device)
        amplitude = 1.0 if self.yarn is None else self.yarn.amplitude
        cos, sin = ((amplitude * t).to(x) for t in (angle.cos(), angle.sin()))
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    @property
    def logit_factor(self) -> float:
        """What the logits are to be multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.logit_factor
