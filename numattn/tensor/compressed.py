"""A layer of attention whose weights are products of factors that heads share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numattn.core.cost import Cost
from numattn.core.layer import (
    AttentionLayer,
    Cache,
    LayerState,
    check_rotary,
    check_shared,
    extend,
    logit_factor,
    positions,
)
from numattn.core.registry import register_layer
from numattn.core.rotary import Rotary
from numattn.engines.softmax import computed_pairs, grouped_attention, key_bias

READS = ("q_proj", "k_proj", "v_proj")

PROJECTIONS = (*READS, "o_proj")


class HeadFactors(nn.Module):
    r"""A tensor of weights (X, S, D), of S heads of width D, as a product of factors.

    With a core, which is Tucker's decomposition, and that of a tensor train where C is left out,

    .. math:: W_{xsd} = \sum_{abc} U_{xa}\, G_{abc}\, C_{sb}\, V_{dc},

    and without one, which is CP, the sum is over a = b = c. A factor that is left out is the
    identity. For several layers there is one more factor: a row of it for each layer, contracted
    with the second mode of the core (CP: multiplied with the components), or a matrix for each
    layer between U and the core (tensor train).

    Attributes:
        basis: U, (X, a).
        core: G, (a, b, c); (a, l, b, c) beside a row for each layer; None for CP.
        slices: C, (S, b), or None.
        width: V, (D, c), or None.
        layers: (L, l), or (a, L, l) of a tensor train; None for one layer.
        layer: Which of the layers this is.
    """

    def __init__(
        self,
        basis: Tensor,
        core: Tensor | None,
        slices: Tensor | None,
        width: Tensor | None,
        layers: Tensor | None = None,
        layer: int = 0,
    ) -> None:
        """Take over factors; those that are parameters already are shared."""
        super().__init__()
        given = {"basis": basis, "core": core, "slices": slices, "width": width, "layers": layers}
        for name, factor in given.items():
            if factor is not None and not isinstance(factor, nn.Parameter):
                factor = nn.Parameter(factor)
            self.register_parameter(name, factor)
        self.layer = layer

    basis: Tensor
    core: Tensor | None
    slices: Tensor | None
    width: Tensor | None
    layers: Tensor | None

    def read(self, x: Tensor) -> Tensor:
        """What all heads read: (..., X) -> (..., S, D)."""
        z = self._between(x @ self.basis)
        core = self._inner()  # (a, b, c)
        y = (z @ core.flatten(1)).unflatten(-1, core.shape[1:])
        if self.core is None:
            return y
        if self.width is not None:
            y = y @ self.width.mT
        # Torch's fused attention takes no heads whose coordinates lie apart.
        return y if self.slices is None else F.linear(y.mT, self.slices).mT.contiguous()

    def write(self, y: Tensor) -> Tensor:
        """The transposed map: (..., S, D) -> (..., X)."""
        if self.core is not None:
            if self.slices is not None:
                y = F.linear(y.mT, self.slices.mT).mT
            if self.width is not None:
                y = y @ self.width
        z = y.flatten(-2) @ self._inner().flatten(1).mT
        return self._between(z, back=True) @ self.basis.mT

    def dense(self) -> Tensor:
        """The tensor itself, (X, S, D)."""
        identity = torch.eye(len(self.basis), dtype=self.basis.dtype, device=self.basis.device)
        return self.read(identity)

    def _between(self, z: Tensor, back: bool = False) -> Tensor:
        """What this layer does between the basis and the core."""
        if self.layers is None or (self.core is not None and self.layers.dim() == 2):
            return z
        if self.core is None:
            return z * self.layers[self.layer]
        own = self.layers[:, self.layer]
        return z @ (own.mT if back else own)

    def _inner(self) -> Tensor:
        """The core of this layer (a, b, c); of CP the products of its slices and widths."""
        if self.core is None:
            assert self.slices is not None
            assert self.width is not None
            return self.slices.mT[:, :, None] * self.width.mT[:, None]
        if self.core.dim() == 3:
            return self.core
        assert self.layers is not None
        return torch.tensordot(self.core, self.layers[self.layer], dims=([1], [0]))

    @property
    def products(self) -> tuple[int, int]:
        """Multiplications of a token, and those of a call besides."""
        x, a = self.basis.shape
        if self.core is None:
            assert self.slices is not None
            assert self.width is not None
            return a * (x + len(self.slices) * len(self.width)), 0
        b, c = self.core.shape[-2:]
        token = x * a + self.core.shape[0] * b * c
        if self.layers is not None and self.layers.dim() == 3:
            token += a * self.layers.shape[2]
        d = c
        if self.width is not None:
            d = len(self.width)
            token += b * c * d
        if self.slices is not None:
            token += b * d * len(self.slices)
        return token, self.core.numel() if self.core.dim() == 4 else 0


@register_layer
class CompressedAttention(AttentionLayer):
    r"""Grouped-query attention whose projections are products of factors that heads share.

    .. math:: [q, k, v]_s = \sum_{bc} C_{sb} \Big( \sum_a (x U)_a\, G_{abc} \Big) V_c, \qquad
              y = \sum_h o_h W^O_h,

    with s over all heads of the three, and :math:`W^O` of the same form as `HeadFactors`
    describes, used backwards. Rotation, attention, and what is kept of a token are those of the
    layer that it stands for: `weights` gives the matrices with which an ordinary layer does the
    same. `compress_layer` makes it.

    Cost: the products with the factors, and 2 H P (D + E) operations for P pairs of tokens.
    Decoding keeps Hk (D + E) numbers per token.

    Exact when: always; it is an ordinary layer with `weights`.

    Limits: the cache is as large as it was. Tokens that a state holds have no gradient.

    Example:
        >>> factors = [torch.randn(32, 6), torch.randn(6, 8, 5), None, torch.randn(8, 5)]
        >>> output = [torch.randn(32, 6), torch.randn(6, 4, 5), None, torch.randn(8, 5)]
        >>> layer = CompressedAttention(
        ...     4, kv_heads=2, reads=[HeadFactors(*factors)], write=HeadFactors(*output)
        ... )
        >>> layer(torch.randn(1, 10, 32)).shape, layer.weights()["k_proj"].shape
        (torch.Size([1, 10, 32]), torch.Size([16, 32]))
    """

    def __init__(
        self,
        num_heads: int,
        *,
        kv_heads: int,
        reads: Sequence[HeadFactors],
        write: HeadFactors,
        rotary: Rotary | Literal["default"] | None = "default",
        biases: Mapping[str, Tensor] | None = None,
        scale: float | None = None,
    ) -> None:
        """Take over factors.

        Args:
            num_heads: H.
            kv_heads: Hk, a divisor of H.
            reads: Factors of queries, keys and values, H + 2 Hk heads of width D in this order;
                or of queries and keys, and of values, where these have another width E.
            write: Factors of the transposed output projection, (embed_dim, H, E).
            rotary: Rotation of D coordinates, by default ``Rotary(D)``; None for no positions.
            biases: Vectors by the name of the projection, ``q_proj`` and so on; None for none.
            scale: Factor of the logits; by default D ** -0.5 times what ``rotary`` asks for.
        """
        super().__init__()
        name = type(self).__name__
        check_shared(name, num_heads, "kv_heads", kv_heads)
        self.num_heads, self.kv_heads = num_heads, kv_heads
        self.embed_dim = len(write.basis)
        shapes = [tuple(factors.dense().shape) for factors in (*reads, write)]
        self.head_dim, self.value_dim = shapes[0][2], shapes[-1][2]
        counts = [num_heads + kv_heads, kv_heads]
        want = [(self.embed_dim, sum(counts), self.head_dim)]
        if len(reads) == 2:
            widths = (self.head_dim, self.value_dim)
            want = [(self.embed_dim, n, d) for n, d in zip(counts, widths, strict=True)]
        want.append((self.embed_dim, num_heads, self.value_dim))
        if shapes != want or (len(reads) == 1 and self.head_dim != self.value_dim):
            raise ValueError(f"{name}: factors of reads and write must be of {want}; got {shapes}.")
        self.rotary = Rotary(self.head_dim) if rotary == "default" else rotary
        check_rotary(name, self.rotary, "head_dim", self.head_dim)
        self.scale = self.head_dim**-0.5 * logit_factor(self.rotary) if scale is None else scale
        self.reads, self.write = nn.ModuleList(reads), write
        self.biases = nn.ParameterDict({k: nn.Parameter(b) for k, b in (biases or {}).items()})

    def forward(
        self,
        hidden: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        state: LayerState | None = None,
    ) -> Tensor:
        self._check(hidden, attn_mask, state)
        if hidden.shape[1] == 0:
            return hidden
        q, k, v = self._heads(hidden)
        if self.rotary is not None:
            start = 0 if state is None else state.length
            position = positions(hidden, attn_mask, start)[:, None]
            q, k = self.rotary(q, position), self.rotary(k, position)
        if state is not None:
            cache = extend(self, state, key=k, value=v)
            k, v, is_causal = cache["key"], cache["value"], True
        bias = key_bias(None if attn_mask is None else attn_mask[:, 0], hidden)
        out = grouped_attention(q, k, v, scale=self.scale, bias=bias, is_causal=is_causal)
        y = self.write.write(out.transpose(1, 2))
        return y + self.biases["o_proj"] if "o_proj" in self.biases else y

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, n, D), keys (B, Hk, n, D) and values (B, Hk, n, E)."""
        found = self._split([factors.read(hidden).transpose(1, 2) for factors in self._reading], 1)
        q, k, v = (
            y + self.biases[name].unflatten(0, (y.shape[1], 1, -1)) if name in self.biases else y
            for name, y in zip(READS, found, strict=True)
        )
        return q, k, v

    @property
    def _reading(self) -> list[HeadFactors]:
        return cast(list[HeadFactors], list(self.reads))

    def _split(self, stacks: list[Tensor], dim: int) -> list[Tensor]:
        """The parts of queries, keys and values."""
        counts = [self.num_heads, self.kv_heads]
        if len(stacks) == 1:
            return list(stacks[0].split([*counts, self.kv_heads], dim))
        return [*stacks[0].split(counts, dim), stacks[1]]

    def weights(self) -> dict[str, Tensor]:
        """The dense matrices that the layer stands for, as those of `torch.nn.Linear`."""
        dense = self._split([factors.dense().movedim(0, -1) for factors in self._reading], 0)
        found = {name: w.flatten(0, 1) for name, w in zip(READS, dense, strict=True)}
        return found | {"o_proj": self.write.dense().flatten(1)}

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens: ``key`` (B, Hk, 0, D) and ``value`` (B, Hk, 0, E)."""
        empty = self.write.basis.new_empty((batch, self.kv_heads, 0, self.head_dim))
        return Cache(key=empty, value=empty.new_empty((*empty.shape[:3], self.value_dim)))

    def cost(self, batch: int, length: int, *, is_causal: bool = True) -> Cost:
        width = self.head_dim + self.value_dim
        pairs = computed_pairs(length, is_causal, self.head_dim == self.value_dim)
        token, call = self.products
        flops = 2 * batch * (length * token + self.num_heads * pairs * width) + 2 * call
        units = self.kv_heads * width
        cache = batch * length * units * self.write.basis.element_size()
        return Cost(flops, self._io(batch, length), cache, units)

    @property
    def products(self) -> tuple[int, int]:
        """Multiplications of the projections for a token, and those of a call besides."""
        token, call = zip(*(f.products for f in (*self._reading, self.write)), strict=True)
        return sum(token), sum(call)
