"""Layers: whole attention layers, from hidden states to hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from numattn.core.cost import Cost
from numattn.core.inputs import Unsupported, positive
from numattn.core.rotary import Rotary
from numattn.core.state import Buffer


class LayerState(ABC):
    """What a layer keeps of the tokens seen so far."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens seen."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are kept, without room held in reserve."""


class Cache(LayerState):
    """Tensors (B, G, N, width) that grow by one row for every token, by name.

    Example:
        >>> cache = Cache(latent=torch.zeros(1, 1, 0, 3))
        >>> cache.append(latent=torch.ones(1, 1, 2, 3))
        >>> cache["latent"].shape, cache.length, cache.nbytes
        (torch.Size([1, 1, 2, 3]), 2, 24)
    """

    def __init__(self, *, by_token: bool = False, **empty: Tensor) -> None:
        """Start with tensors of no token; `by_token` as for `Buffer`."""
        self._buffers = {name: Buffer(tensor, by_token) for name, tensor in empty.items()}

    def append(self, **new: Tensor) -> None:
        """Add tokens at the end of every tensor."""
        for name, tensor in new.items():
            self._buffers[name].append(tensor.detach())

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[name].tensor

    @property
    def length(self) -> int:
        return next(iter(self._buffers.values())).tensor.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


@dataclass(frozen=True)
class ModelShape:
    """Widths of the attention of a model, from which layers of every kind can be made.

    Attributes:
        embed_dim: Width of the hidden states.
        num_heads: H.
        kv_heads: Hk, a divisor of H; H where keys are not shared.
        head_dim: D, width of a query and a key.
        value_dim: E, width of a value.
        plain_dim: Width of that part of a key from a latent which is not rotated.
        rope_dim: Width of a rotated key that heads share.
        latent_dim: Width of a latent for keys and values of all heads.
        group_latent_dim: Width of each of two latents, for half of the heads each.
        query_rank: Width of a latent of the queries, or None.
    """

    embed_dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    plain_dim: int
    rope_dim: int
    latent_dim: int
    group_latent_dim: int
    query_rank: int | None = None


class AttentionLayer(nn.Module):
    """A whole attention layer, with its projections and what it caches.

    A call without a state is a forward pass over whole sequences. A call with one takes in new
    tokens after those that the state holds, and attends from them to all: prefilling and decoding.
    Both agree to rounding.

    Attributes:
        embed_dim: Width of the hidden states.
    """

    embed_dim: int

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        state: LayerState | None = None,
    ) -> Tensor:
        """Attend among hidden states.

        Args:
            hidden: (B, N, embed_dim).
            attn_mask: bool key padding (B, 1, 1, N), True = a token that exists; not with a state.
                Padding is truncation: positions are counted from the first token that exists.
            is_causal: Token i attends to tokens j <= i. Always so with a state.
            state: Of `state`; takes in the tokens of this call.

        Returns:
            (B, N, embed_dim). At padding, whatever a token that attends to the others gives.
        """

    @abstractmethod
    def state(self, batch: int = 1) -> LayerState:
        """A state without tokens, in the type and on the device of the parameters."""

    @abstractmethod
    def cost(self, batch: int, length: int, *, is_causal: bool = True) -> Cost:
        """What a call without a state costs.

        ``cache`` are the bytes that decoding keeps after so many tokens, ``units`` the numbers that
        one token leaves in it, and ``bytes`` those of parameters, input and output.
        """

    @classmethod
    def of_model(cls, shape: ModelShape) -> dict[str, AttentionLayer]:
        """Layers of this kind, by name, that a model of this shape may have.

        They are the rows of `numattn.measure.cache_table`; none, unless a layer has a cache that
        grows with every token.
        """
        return {}

    def _io(self, batch: int, length: int) -> int:
        """Bytes of parameters, input and output."""
        itemsize = next(self.parameters()).element_size()
        weights = sum(p.numel() for p in self.parameters())
        return (weights + 2 * batch * length * self.embed_dim) * itemsize

    def _check(self, hidden: Tensor, attn_mask: Tensor | None, state: LayerState | None) -> None:
        """Refuse what is malformed, and what no layer can do."""
        name = type(self).__name__
        if hidden.dim() != 3 or hidden.shape[2] != self.embed_dim:
            raise ValueError(
                f"{name}: hidden must have shape (B, N, {self.embed_dim}); "
                f"got {tuple(hidden.shape)}."
            )
        if attn_mask is None:
            return
        if state is not None:
            raise Unsupported(
                f"{name}: a state holds sequences without padding; pass no attn_mask with it, and "
                "give sequences of different lengths a state each."
            )
        want = (hidden.shape[0], 1, 1, hidden.shape[1])
        if attn_mask.dtype is not torch.bool or attn_mask.shape not in (want, (1, *want[1:])):
            raise Unsupported(
                f"{name}: attn_mask must be key padding, bool {want}; got {attn_mask.dtype} "
                f"{tuple(attn_mask.shape)}."
            )


def positions(hidden: Tensor, attn_mask: Tensor | None, start: int) -> Tensor:
    """Position of every token, int (B or 1, N): counted among those that exist, from `start`."""
    if attn_mask is None:
        return start + torch.arange(hidden.shape[1], device=hidden.device)[None]
    return (attn_mask[:, 0, 0].cumsum(-1) - 1).clamp(min=0)


def heads(x: Tensor, count: int) -> Tensor:
    """(B, N, count * width) -> (B, count, N, width)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(B, count, N, width) -> (B, N, count * width)."""
    return x.transpose(1, 2).flatten(2)


def extend(layer: AttentionLayer, state: LayerState, **new: Tensor) -> Cache:
    """Add tokens to a state of the layer, which must be its own."""
    name = type(layer).__name__
    if not isinstance(state, Cache):
        raise TypeError(f"{name}: state must be one that {name}.state made; got {state!r}.")
    for key, tensor in new.items():
        if len(state[key]) != len(tensor):
            raise ValueError(
                f"{name}: the state holds {len(state[key])} sequences, hidden has {len(tensor)}; "
                f"make it with {name}.state({len(tensor)})."
            )
    state.append(**new)
    return state


def layer_cost(layer: AttentionLayer, batch: int, length: int, products: int, units: int) -> Cost:
    """The cost of projections and of so many products a sequence beside them."""
    weights = [m.weight for m in layer.modules() if isinstance(m, nn.Linear)]
    flops = 2 * batch * (length * sum(w.numel() for w in weights) + products)
    cache = batch * length * units * weights[0].element_size()
    return Cost(flops, layer._io(batch, length), cache, units)


def check_sizes(name: str, **sizes: int) -> None:
    """Refuse sizes that are not positive."""
    for option, size in sizes.items():
        positive(name, option, size)


def check_shared(name: str, num_heads: int, option: str, count: int) -> None:
    """Refuse heads that cannot share `count` things evenly."""
    check_sizes(name, num_heads=num_heads, **{option: count})
    if num_heads % count:
        raise ValueError(f"{name}: {option} must divide num_heads, {num_heads}; got {count}.")


def check_rotary(name: str, rotary: Rotary | None, option: str, width: int) -> None:
    """Refuse a rotation of another width."""
    if rotary is not None and rotary.dim != width:
        raise ValueError(f"{name}: rotary turns {rotary.dim} coordinates, {option} is {width}.")


def logit_factor(rotary: Rotary | None) -> float:
    """What a rotation, or none, asks the logits to be multiplied by."""
    return 1.0 if rotary is None else rotary.logit_factor
