"""Tensors that a method draws: in a call when none is given, or once by a module that owns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from numattn.core.linalg import draw
from numattn.core.module import AttentionModule

if TYPE_CHECKING:
    from numattn.core.method import Method


class Draw(NamedTuple):
    """Independent numbers of one law: standard normal, or uniform in [0, 1)."""

    law: Literal["normal", "uniform"]
    shape: tuple[int, ...]


def draw_all(
    draws: Mapping[str, Draw], generator: Generator | None, device: torch.device
) -> dict[str, Tensor]:
    """Draw tensors, in order."""
    return {name: draw(shape, generator, device, law) for name, (law, shape) in draws.items()}


def fill(
    method: Method,
    given: Mapping[str, Tensor | None],
    key: Tensor,
    generator: Generator | None,
) -> dict[str, Tensor]:
    """The tensors given to a call on keys (B, Hk, Nk, D), checked, and draws of the others.

    Raises:
        ValueError: A tensor has not the shape that `Method.draws` says.
    """
    draws = method.draws(key.shape[1], key.shape[3])
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != draws[name].shape:
            raise ValueError(
                f"{method.info.name}: {name} must have shape {draws[name].shape}; "
                f"got {tuple(tensor.shape)}."
            )
    missing = {name: law for name, law in draws.items() if given[name] is None}
    return {n: t for n, t in given.items() if t is not None} | draw_all(
        missing, generator, key.device
    )


class DrawnAttention(AttentionModule):
    """A method whose tensors are drawn once and saved with the model, as buffers."""

    record: ClassVar[type[Method]]

    def __init__(
        self, *, num_heads: int, head_dim: int, generator: Generator | None = None, **options: Any
    ) -> None:
        """Draw the tensors.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            generator: Source of the draw.
            **options: Options of the record.
        """
        super().__init__()
        self.options = self.record(**options)
        self._draws = self.options.draws(num_heads, head_dim)
        for name, (_, shape) in self._draws.items():
            self.register_buffer(name, torch.empty(shape))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: Generator | None = None) -> None:
        """Draw new tensors."""
        for name, fresh in draw_all(self._draws, generator, torch.device("cpu")).items():
            self.get_buffer(name).copy_(fresh)

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in self._draws}
