"""Feature maps: what stands in for the exponential when attention is a product of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from numattn.engines.linear import Feature


def _same(head_dim: int) -> int:
    return head_dim


@dataclass(frozen=True)
class FeatureMap:
    """A map of tokens to features, as `numattn.engines.linear` takes it for queries or for keys.

    A map that needs tensors, drawn or learned, has them in its `function`.

    Attributes:
        name: What it is called, as an option of a method.
        function: A tile of tokens (B, H, n, D) to features (B, H, n, m); it must not depend on
            the other tokens of the tile.
        dimension: m, from D.
        positive: Whether no feature is negative, so that the output is an average of values.
        log: Whether `function` returns the logarithms of (positive) features.

    Example:
        >>> import torch
        >>> cubes = FeatureMap("cubes", lambda x: x**3, positive=False)
        >>> cubes.dimension(4), cubes(torch.full((1, 1, 1, 4), 2.0)).flatten()
        (4, tensor([8., 8., 8., 8.]))
    """

    name: str
    function: Feature
    dimension: Callable[[int], int] = _same
    positive: bool = True
    log: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Features of a tile, or their logarithms."""
        return self.function(x)


class _Elu1(torch.autograd.Function):
    """The map elu(x) + 1, to full relative accuracy; its slope is itself, but at most 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        over = x.relu()
        return (x - over).exp_().add_(over)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (output,) = ctx.saved_tensors
        return output.clamp(max=1).mul(grad)


def _elu1(x: Tensor) -> Tensor:
    return _Elu1.apply(x)


def _squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


def _log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def _identity(x: Tensor) -> Tensor:
    return x


ELU = FeatureMap("elu", _elu1)
RELU = FeatureMap("relu", Tensor.relu)
SQUARED_RELU = FeatureMap("squared_relu", _squared_relu)
SOFTMAX = FeatureMap("softmax", _log_softmax, log=True)
IDENTITY = FeatureMap("identity", _identity, positive=False)

MAPS = {map.name: map for map in (ELU, RELU, SQUARED_RELU, SOFTMAX, IDENTITY)}
