"""Inputs and reference answers for the checks: written from the definition, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from numattn.core.linalg import input_generator
from numattn.core.method import Method

# Largest acceptable difference by type, relative to the largest magnitude of the reference; the
# same everywhere.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def make_qkv(
    length: int = 48,
    *,
    keys: int | None = None,
    batch: int = 2,
    heads: int = 3,
    group: int = 1,
    head_dim: int = 8,
    value_dim: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (batch, heads * group, length, D), k and v (batch, heads, keys, D or E)."""
    source = input_generator(seed)
    keys = length if keys is None else keys
    q = torch.randn(batch, heads * group, length, head_dim, generator=source, dtype=torch.float64)
    k = torch.randn(batch, heads, keys, head_dim, generator=source, dtype=torch.float64)
    v = torch.randn(batch, heads, keys, value_dim, generator=source, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def reference_weights(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Softmax weights by the definition, dense, float64: (B, H, Nq, Nk). Heads are expanded."""
    q, k = query.double(), key.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        logits = logits.where(attn_mask, -torch.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask.double()
    if is_causal:
        i, j = torch.meshgrid(torch.arange(q.shape[2]), torch.arange(k.shape[2]), indexing="ij")
        logits = logits.where((j <= i).to(logits.device), -torch.inf)
    return torch.nan_to_num(torch.softmax(logits, -1), nan=0.0)


def reference(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    """Exact attention by the definition, dense, float64."""
    weights = reference_weights(query, key, **call)
    v = value.double().repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return torch.einsum("bhij,bhje->bhie", weights, v)


class Subject:
    """A method whose random draw is fixed, so that two calls can be compared."""

    def __init__(self, method: Method, seed: int = 0) -> None:
        self.method = method
        self.info = method.info
        self.seed = seed

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
        """Call with a fresh generator of the same seed, unless state tensors are given."""
        if self.info.fits_causal and call.get("is_causal") and not self._given(call):
            call = {**call, **self.fit(query, key, value, call)}
        if self.info.random and not self._given(call):
            call = {**call, "generator": Generator().manual_seed(self.seed)}
        return self.method(query, key, value, **call)

    def fit(
        self, query: Tensor, key: Tensor, value: Tensor, call: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """State tensors of these inputs, {} where the method has none."""
        call = call or {}
        known: dict[str, Any] = {
            n: call[n] for n in ("attn_mask", "scale", "enable_gqa") if n in call
        }
        if self.info.random:
            known["generator"] = Generator().manual_seed(self.seed)
        return self.method.fit(query, key, value, **known)

    def weights(self, query: Tensor, key: Tensor, **call: Any) -> Tensor:
        """Implied weights (B, H, Nq, Nk): the output for value = identity."""
        eye = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
        return self(query, key, eye.expand(*key.shape[:2], -1, -1), **call)

    def _given(self, call: dict[str, Any]) -> bool:
        return any(name in call for name in self.info.state_tensors)
