"""The exact attention matrix of one head as a linear operator, which is never stored."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from numattn.core.masks import visible
from numattn.engines.tiles import spans, tile_elements


class WeightsOperator:
    """Products with exact attention weights A (n, M), computed from q and k, tile by tile.

    Each product computes the weights anew: 2 n M (D + b) operations for b columns. No gradient.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        mask: Tensor | None = None,
        is_causal: bool = False,
        exists: Tensor | None = None,
    ) -> None:
        """Describe the matrix.

        Args:
            q: (n, D).
            k: (M, D).
            scale: Factor of the logits.
            mask: bool (True = attend) or float to be added to the logits, (n or 1, M or 1).
            is_causal: Row i attends to keys j <= i.
            exists: bool (n,): which rows are not zero.
        """
        self._q, self._k = q.detach() * scale, k.detach()
        self._mask, self._is_causal, self._exists = mask, is_causal, exists
        self.shape = (q.shape[0], k.shape[0])
        self.dtype, self.device = q.dtype, q.device

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, row after the last, weights (rows, m)) with m <= M: the others are zero."""
        rows, keys = self.shape
        for r0, r1 in spans(rows, max(4 * tile_elements(self._k.device) // max(keys, 1), 16)):
            yield r0, r1, self._weights(r0, r1)

    def matmul(self, g: Tensor) -> Tensor:
        """A g for g (M, b)."""
        return torch.cat([p @ g[: p.shape[1]] for _, _, p in self.tiles()])

    def transposed(self, y: Tensor) -> Tensor:
        """A^T y for y (n, b)."""
        out = y.new_zeros(self.shape[1], y.shape[1])
        for r0, r1, p in self.tiles():
            out[: p.shape[1]].addmm_(p.mT, y[r0:r1])
        return out

    def norm(self) -> Tensor:
        """The Frobenius norm."""
        return torch.stack([p.square().sum() for _, _, p in self.tiles()]).sum().sqrt()

    def empty_rows(self) -> Tensor:
        """Rows without any weight, bool (n,)."""
        if self._mask is None and self._exists is None:
            return torch.zeros(self.shape[0], dtype=torch.bool, device=self.device)
        return torch.cat([p.sum(-1) == 0 for _, _, p in self.tiles()])

    def dense(self) -> Tensor:
        """The matrix itself, (n, M)."""
        out = self._q.new_zeros(self.shape)
        for r0, r1, p in self.tiles():
            out[r0:r1, : p.shape[1]] = p
        return out

    def _weights(self, r0: int, r1: int) -> Tensor:
        last = r1 if self._is_causal else self.shape[1]
        logits = self._q[r0:r1] @ self._k[:last].mT
        if self._mask is not None:
            own = self._mask if self._mask.shape[0] == 1 else self._mask[r0:r1]
            own = own if own.shape[1] == 1 else own[:, :last]
            logits = (
                logits.masked_fill_(~own, -torch.inf)
                if own.dtype is torch.bool
                else logits.add_(own)
            )
        if self._is_causal:
            seen = visible(r1 - r0, last, r0, 1, logits.device)
            logits = logits.masked_fill_(~seen, -torch.inf)
        nothing = logits.amax(-1, keepdim=True) == -torch.inf
        if self._exists is not None:
            nothing = nothing | ~self._exists[r0:r1, None]
        return logits.masked_fill_(nothing, 0.0).softmax(-1).masked_fill_(nothing, 0.0)
