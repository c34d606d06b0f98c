"""Time of a decoding step of tensor product attention against the bytes it reads, in three forms.

    python benchmarks/decode_tensor.py [--smoke] [--rank R ...] [--length N ...] [FORM ...]

One layer of tensor product attention, of 32 heads of 128, a token after N others, in float32:

dense     keys and values of all heads are kept, H (D + E) numbers a token
factored  factors are kept, R (2 H + D + E) numbers a token, and heads attend to them
formed    factors are kept, and keys and values are formed from all of them in every step

The forms give the same output, which is checked before they are timed. Each runs in turn with the
dense one (A B A B ...); medians of wall times and of their ratios, that of the dense form against
itself being the noise, beside the ratio of the bytes that are kept. The last lines say by how much
the time grows with a token in the cache, from the shortest to the longest. What is kept is drawn at
random, not made by a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from decode_latent import race
from torch import Tensor

from numattn.core.layer import Cache, joined, positions
from numattn.engines.latent import Factors
from numattn.engines.softmax import grouped_attention
from numattn.tensor.tpa import TensorProductAttention

FORMS = ("dense", "factored", "formed")


class Dense(TensorProductAttention):
    """The same layer, that keeps keys and values of all heads."""

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens: ``key`` (B, H, 0, D) and ``value`` (B, H, 0, E)."""
        key = torch.empty(batch, self.num_heads, 0, self.head_dim)
        return Cache(key=key, value=torch.empty(*key.shape[:3], self.value_dim))

    def forward(self, hidden: Tensor, *, state: Cache) -> Tensor:  # type: ignore[override]
        """Attend from the tokens to those of the state and to themselves."""
        position = positions(hidden, None, state.length)[:, None]
        k = self._turned(self.k_proj(hidden), position)
        state.append(key=k.expand(), value=self.v_proj(hidden).expand())
        query = self._queries(hidden, position).expand()
        out = grouped_attention(query, state["key"], state["value"], scale=self.scale)
        return self.o_proj(joined(out))


def steps(rank: int, length: int) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """A decoding step of every form, and the bytes that the form keeps before it."""
    shape: dict[str, Any] = {"head_dim": 128, "key_rank": rank, "value_rank": rank}
    layer, dense = TensorProductAttention(512, 32, **shape), Dense(512, 32, **shape)
    dense.load_state_dict(layer.state_dict())
    a_k, b_k, a_v, b_v = (torch.randn(1, rank, length, width) for width in (32, 128, 32, 128))
    names = ("key_heads", "key_features", "value_heads", "value_features")
    x = torch.randn(1, 1, 512)
    states = {"dense": dense.state(), "factored": layer.state(), "formed": layer.state()}
    states["dense"].append(key=Factors(a_k, b_k).expand(), value=Factors(a_v, b_v).expand())
    for form in ("factored", "formed"):
        states[form].append(**dict(zip(names, (a_k, b_k, a_v, b_v), strict=True)))
    calls = {
        "dense": lambda: dense(x, state=states["dense"]),
        "factored": lambda: layer(x, state=states["factored"], factored=True),
        "formed": lambda: layer(x, state=states["formed"], factored=False),
    }
    return {form: (calls[form], states[form].nbytes) for form in FORMS}


if __name__ == "__main__":
    race(__doc__, steps, FORMS, "R", [1, 2])
