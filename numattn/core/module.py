"""Modules: methods that own their tensors, as buffers or parameters."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from numattn.core.method import Method
    from numattn.core.state import State


class AttentionModule(nn.Module):
    """A method with tensors of its own.

    Attributes:
        options: The record that is called.
    """

    options: Method

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, as keywords of the function."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend; shapes as in the function of the method."""
        tensors: dict[str, Any] = {**self.tensors()}
        return self.options(
            query,
            key,
            value,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            **tensors,
        )

    def state(
        self,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> State:
        """A decoding state with these tensors as they are now, see `Method.state`."""
        return self.options.state(key, value, scale=scale, enable_gqa=enable_gqa, **self.tensors())
