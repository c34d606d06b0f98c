"""State: what decoding keeps, and attention from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from numattn.core.cost import Shape

if TYPE_CHECKING:
    from numattn.core.method import Method


class State(ABC):
    """What one method keeps of the tokens seen so far.

    One decoding step is ``append(k, v)`` followed by ``attend(q)``.
    """

    @abstractmethod
    def append(self, key: Tensor, value: Tensor) -> None:
        """Take in tokens: key (B, Hk, n, D), value (B, Hk, n, E)."""

    @abstractmethod
    def attend(self, query: Tensor) -> Tensor:
        """Attend from (B, H, n, D) to every token taken in; returns (B, H, n, E)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are kept, without room held in reserve."""

    @property
    def nbytes_read(self) -> int:
        """Bytes of what is kept that one decoding step has to read, at the most."""
        return self.nbytes


class Buffer:
    """A growing (B, H, N, D) tensor; appending costs amortised O(n).

    `by_token` stores the H rows of a token side by side, for those who read many tokens of all H.
    """

    def __init__(self, first: Tensor, by_token: bool = False) -> None:
        self._data = first
        self._length = first.shape[2]
        self._by_token = by_token

    def append(self, x: Tensor) -> None:
        """Add tokens at the end."""
        need = self._length + x.shape[2]
        if need > self._data.shape[2]:
            room = self._room(x, max(2 * self._data.shape[2], need))
            room[:, :, : self._length] = self.tensor
            self._data = room
        self._data[:, :, self._length : need] = x
        self._length = need

    def _room(self, x: Tensor, length: int) -> Tensor:
        batch, rows, _, width = x.shape
        if self._by_token:
            return x.new_empty((batch, length, rows, width)).transpose(1, 2)
        return x.new_empty((batch, rows, length, width))

    @property
    def tensor(self) -> Tensor:
        """Everything appended so far."""
        return self._data[:, :, : self._length]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens kept."""
        return self.tensor.numel() * self._data.element_size()


class KeysState(State):
    """Keeps every key and value; attends by calling the method on them."""

    def __init__(
        self, method: Method, key: Tensor, value: Tensor, *, scale: float | None, enable_gqa: bool
    ) -> None:
        self._method = method
        self._call: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        self._keys = Buffer(key.detach())
        self._values = Buffer(value.detach())

    def append(self, key: Tensor, value: Tensor) -> None:
        self._keys.append(key)
        self._values.append(value)

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        return self._method(query, self._keys.tensor, self._values.tensor, **self._call)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def nbytes_read(self) -> int:
        batch, heads, length, dim = self._keys.tensor.shape
        width = self._values.tensor.shape[3]
        units = self._method.cost(Shape(batch, heads, heads, 1, length, dim, width)).units
        return self._keys.nbytes + self._values.nbytes * units // max(length, 1)
