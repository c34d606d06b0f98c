"""PolySketchFormer: polynomial attention through sketches of tensor powers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, one_of, positive, prepare
from numattn.core.linalg import draw
from numattn.core.masks import visible
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import Buffer, State
from numattn.engines.linear import linear_attention
from numattn.engines.tiles import recompute

INFO = Info(
    name="polysketch",
    family="kernel",
    summary="sketched polynomial attention, exact within local blocks (PolySketchFormer)",
    paper="https://arxiv.org/abs/2310.01655",
    complexity="N (r d + r^2 e)",
    budget="sketch_size",
    approximates="own",
    causal="native",
    mask="padding",
    random=True,
    state_tensors=("leaves", "nodes"),
)

Kind = Literal["gaussian", "srht", "tensorsketch"]

_KINDS = ("gaussian", "srht", "tensorsketch")
_DEGREES = (4, 8)


def polysketch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sketch_size: int = 32,
    degree: Literal[4, 8] = 4,
    kind: Literal["gaussian", "srht", "tensorsketch"] = "gaussian",
    block_size: int = 256,
    leaves: Tensor | None = None,
    nodes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Sketched polynomial attention (PolySketchFormer).

    Polynomial attention has weights :math:`(q \cdot k)^p` for even p, inner products of tensor
    powers. Half of the degree is sketched, to r numbers a token,

    .. math:: \mathrm{sk}(x) = r^{-1/2}\, (x G_1) \circ (x G_2), \qquad
              \mathbb{E}\; \mathrm{sk}(q) \cdot \mathrm{sk}(k) = (q \cdot k)^2,

    for p = 4, and the same once more on two such sketches for p = 8; the other half is a square,

    .. math:: w_{ij} = \left( \mathrm{sk}(q_i) \cdot \mathrm{sk}(k_j) \right)^2 \ge 0,

    an inner product of r (r + 1) / 2 features. So weights are never negative, and attention takes
    linear time. In a causal call the pairs within a block of ``block_size`` tokens have their exact
    weights :math:`(q_i \cdot k_j)^p`, and earlier blocks are sketched.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        sketch_size: r, positive.
        degree: p, 4 or 8.
        kind: What G is. ``"gaussian"``: independent N(0, 1). ``"srht"``: random signs times columns
            of a Hadamard matrix. ``"tensorsketch"``: every entry of x is added, with a random sign,
            to one random place (a CountSketch), and sketches are convolved, not multiplied entry
            by entry, without the factor :math:`r^{-1/2}`.
        block_size: Of causal calls, positive.
        leaves: The matrices that meet tokens, (Hk, p / 2, D, r); drawn when None.
        nodes: Those that meet sketches, (Hk, n, r, r), where n is 2 for p = 8 and else 0; 0 for
            ``"tensorsketch"``. Given together with ``leaves``.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i.
        scale: Cancels from the weights, which are homogeneous; 0 makes them all zero.
        enable_gqa: Allow H to be a multiple of Hk.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type; zeros for a row without any weight.

    Cost: 2 N D r operations for each leaf, 2 N r^2 for each node, and 2 N r^2 E in all to use the
    features of queries and of keys. A causal call adds 2 N ``block_size`` (D + E). Decoding keeps
    r (r + 1) / 2 (E + 1) numbers per key head, and up to ``block_size`` tokens.

    Exact when: never at finite r, but for causal calls of up to ``block_size`` tokens, which are
    `polynomial_attention`.

    Limits: its target is polynomial attention and not softmax: in the place of a trained softmax
    layer it is another model. The sketch of half of the degree is unbiased; its square is not: it
    is too large by the variance, about :math:`|q|^p |k|^p / r` times a constant, so far keys with
    small products weigh too much. ``"srht"`` has no more than the next power of two above D
    different columns. Powers of large norms overflow float32 for p = 8 where those of
    :math:`k / \sqrt{D}` pass some thousands.

    Raises:
        Unsupported: A mask other than key padding.
        ValueError: An option is not of the range above, or a tensor is not of its shape.

    References:
        P. Kacham, V. Mirrokni, P. Zhong, "PolySketchFormer: Fast Transformers via Sketching
        Polynomial Kernels", 2023, https://arxiv.org/abs/2310.01655.
        N. Pham, R. Pagh, "Fast and Scalable Polynomial Kernels via Explicit Feature Maps", 2013
        (TensorSketch).

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> polysketch_attention(q, k, v, sketch_size=16).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = PolySketch(sketch_size, degree, kind, block_size)
    sketch = _given(options, x, leaves, nodes)
    if x.empty:
        return x.nothing()
    if sketch is None:
        heads, dim = x.k.shape[1], x.k.shape[3]
        sketch = _Sketch(*options.draw(heads, dim, generator, x.k.device))
    phi = partial(_features, options, _Sketch(*(t.to(x.k) for t in sketch)))
    x, place = x.compact()
    q, k = _scaled(x.q * x.scale, x.k)
    if is_causal:
        return x.restore(_causal(options, phi, x, q, k), place)
    out = linear_attention(
        q, k, x.v, phi, phi, log=False, padding=x.padding, num_features=options.num_features
    )
    return x.restore(out, place)


class _Sketch(NamedTuple):
    """Matrices of a sketch, as the function takes them."""

    leaves: Tensor
    nodes: Tensor


def _scaled(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of norm 1, and keys of about that: factors that cancel, so that powers stay small."""
    tiny = torch.finfo(q.dtype).tiny
    return F.normalize(q, dim=-1, eps=tiny), k * k.shape[-1] ** -0.5


def _features(options: PolySketch, sketch: _Sketch, x: Tensor) -> Tensor:
    """(B, Hk, n, D) -> (B, Hk, n, r (r + 1) / 2), whose inner products are squares of sketches'.

    Feature (d, a) is s_a times s_(a + d mod r), for 0 <= d <= r / 2: every pair once, and one
    product of two views. Squares count 1 and the others 2, so the sketch takes a factor 2^(1/4).
    """
    s = _half_sketch(options.kind, sketch, x).mT * 2**0.25  # tokens last: products run along them
    r, shifts = s.shape[-2], options.sketch_size // 2 + 1
    s = s.contiguous()
    wrapped = torch.cat([s, s[..., : shifts - 1, :]], -2)
    pairs = (s[..., None, :, :] * wrapped.unfold(-2, r, 1).mT).flatten(-3, -2)
    pairs[..., :r, :] *= 0.5**0.5
    return pairs[..., : options.num_features, :].mT


def _half_sketch(kind: str, sketch: _Sketch, x: Tensor) -> Tensor:
    """Sketch of half of the degree, (B, Hk, n, D) -> (B, Hk, n, r)."""
    parts = [x @ leaf for leaf in sketch.leaves.unbind(1)]
    r = sketch.leaves.shape[-1]
    if kind == "tensorsketch":
        spectra = [torch.fft.rfft(part, dim=-1) for part in parts]
        return torch.fft.irfft(math.prod(spectra[1:], start=spectra[0]), n=r, dim=-1)
    nodes = iter(sketch.nodes.unbind(1))
    while len(parts) > 1:
        pairs = zip(parts[0::2], parts[1::2], strict=True)
        parts = [a * b * r**-0.5 for a, b in pairs]
        if len(parts) > 1:
            parts = [part @ next(nodes) for part in parts]
    return parts[0]


def _causal(
    options: PolySketch, phi: Callable[[Tensor], Tensor], x: Inputs, q: Tensor, k: Tensor
) -> Tensor:
    """Blocks exactly, and all blocks before through their slots: (B, Hk, rows, E)."""
    size, group = options.block_size, x.group
    slots = k.new_zeros(*k.shape[:2], options.num_features, x.v.shape[3] + 1)
    blocks = [t.split(size, 2) for t in (k, _with_ones(x.v, x.padding))]
    outs = []
    for rows, keys, values in zip(q.split(size * group, 2), *blocks, strict=True):
        step = partial(_step, options.degree, phi, group)
        out, slots = recompute(step, rows, keys, values, slots)
        outs.append(out)
    return torch.cat(outs, 2)


def _with_ones(v: Tensor, padding: Tensor | None) -> Tensor:
    """Values and a column of ones, (B, Hk, n, E + 1); zeros where there is no token."""
    v = F.pad(v, (0, 1), value=1.0)
    return v if padding is None else v.masked_fill(~padding[..., None], 0.0)


def _step(
    degree: int,
    phi: Callable[[Tensor], Tensor],
    group: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """One block: its rows, and the slots with its keys in them."""
    seen = visible(q.shape[2], k.shape[2], 0, group, q.device)
    sums = _within(degree, q, k, v, seen) + phi(q) @ slots
    return _divide(sums), slots + phi(k).mT @ v


def _within(degree: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Exact sums of a block, (B, Hk, rows, E + 1)."""
    weight = q @ k.mT
    for _ in range(degree.bit_length() - 1):
        weight = weight.square()
    return (weight if seen is None else weight * seen) @ v


def _divide(sums: Tensor) -> Tensor:
    """Values over weights; zeros where there is no weight."""
    den = sums[..., -1:]
    return sums[..., :-1] / (den + (den == 0))


def _given(
    options: PolySketch, x: Inputs, leaves: Tensor | None, nodes: Tensor | None
) -> _Sketch | None:
    """The matrices that were given, checked; None when none was."""
    if leaves is None and nodes is None:
        return None
    if leaves is None or nodes is None:
        missing = "leaves" if leaves is None else "nodes"
        raise ValueError(
            f"polysketch: pass leaves and nodes together, or neither; {missing} missing."
        )
    for name, tensor, shape in zip(
        _Sketch._fields, (leaves, nodes), options.shapes(x.k.shape[1], x.k.shape[3]), strict=True
    ):
        if tensor.shape != shape:
            raise ValueError(
                f"polysketch: {name} must have shape {shape}; got {tuple(tensor.shape)}."
            )
    return _Sketch(leaves, nodes)


def _matrices(
    kind: str, shape: tuple[int, ...], generator: Generator | None, device: torch.device
) -> Tensor:
    """Random matrices (..., D, r), float64, whose columns c have the mean of c c^T = I."""
    cpu = torch.device("cpu")
    if kind == "gaussian":
        return draw(shape, generator, device)
    *batch, dim, r = shape
    signs = draw((*batch, dim, 1), generator, cpu, "uniform").sub(0.5).sign()
    if kind == "tensorsketch":
        place = (draw((*batch, dim, 1), generator, cpu, "uniform") * r).long()
        return torch.zeros(shape, dtype=torch.float64).scatter_(-1, place, signs).to(device)
    wide = 1 << max(dim - 1, 0).bit_length()
    # Columns in random order, again and again where there are more than the matrix has.
    rounds = -(-r // wide)
    order = draw((*batch, rounds, wide), generator, cpu, "uniform").argsort(-1).flatten(-2)[..., :r]
    bits = torch.arange(dim)[:, None] & torch.arange(wide)  # (D, wide)
    parity = torch.zeros_like(bits)
    for shift in range(wide.bit_length()):
        parity ^= bits >> shift & 1
    hadamard = (1.0 - 2.0 * parity).double().mT  # (wide, D)
    return (hadamard[order].mT * signs).to(device)


@register
@dataclass(frozen=True)
class PolySketch(Method):
    """Options of `polysketch_attention`."""

    sketch_size: int = 32
    degree: Literal[4, 8] = 4
    kind: Kind = "gaussian"
    block_size: int = 256
    info = INFO
    function = staticmethod(polysketch_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "sketch_size", self.sketch_size)
        positive(INFO.name, "block_size", self.block_size)
        one_of(INFO.name, "kind", self.kind, _KINDS)
        if type(self.degree) is not int or self.degree not in _DEGREES:
            raise ValueError(f"polysketch: degree must be 4 or 8; got {self.degree!r}.")

    @property
    def num_features(self) -> int:
        """Features of a token, r (r + 1) / 2."""
        return self.sketch_size * (self.sketch_size + 1) // 2

    def shapes(self, num_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the leaves and the nodes."""
        r, half = self.sketch_size, self.degree // 2
        inner = 0 if self.kind == "tensorsketch" else half - 2
        return (num_heads, half, head_dim, r), (num_heads, inner, r, r)

    def draw(
        self, num_heads: int, head_dim: int, generator: Generator | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Leaves and nodes, float64."""
        leaves, nodes = self.shapes(num_heads, head_dim)
        return (
            _matrices(self.kind, leaves, generator, device),
            _matrices(self.kind, nodes, generator, device),
        )

    def cost(self, shape: Shape) -> Cost:
        """Transforms of ``"tensorsketch"`` are no matrix products."""
        d, e, r, m = shape.head_dim, shape.value_dim, self.sketch_size, self.num_features
        keys = shape.batch * shape.kv_heads * shape.keys
        leaves, nodes = self.shapes(1, d)
        flops = 2 * (shape.rows + keys) * r * (leaves[1] * d + nodes[1] * r)
        wide = e + 1 if shape.is_causal else e
        flops += 2 * m * (shape.rows * (e + 1) + keys * wide)
        if shape.is_causal:
            flops += 2 * shape.rows * min(self.block_size, shape.keys) * (d + e + 1)
        return Cost(flops, shape.io, self._cache(shape), units=m)

    def _cache(self, shape: Shape) -> int:
        full = max(shape.keys - 1, 0) // self.block_size * self.block_size
        recent = (shape.keys - full) * (shape.head_dim + shape.value_dim) * shape.itemsize
        slots = self.num_features * (shape.value_dim + 1) * max(shape.itemsize, 4)
        return shape.batch * shape.kv_heads * (recent + slots)

    def fit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        generator: Generator | None = None,
    ) -> dict[str, Tensor]:
        """Leaves and nodes as the function would draw them."""
        x = prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa)
        drawn = self.draw(x.k.shape[1], x.k.shape[3], generator, x.k.device)
        return dict(zip(INFO.state_tensors, drawn, strict=True))

    def module(self, *, num_heads: int, head_dim: int) -> PolySketchAttention:
        return PolySketchAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

    def state(
        self,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **tensors: Tensor,
    ) -> State:
        self.refuse(tensors)
        x = prepare(INFO, key, key, value, None, False, scale, False)
        sketch = _given(self, x, tensors.get("leaves"), tensors.get("nodes"))
        if sketch is None:
            sketch = _Sketch(*self.draw(key.shape[1], key.shape[3], None, key.device))
        kept = _Sketch(*(t.detach().clone().to(x.k) for t in sketch))
        return PolySketchState(key, value, self, kept, scale=scale, enable_gqa=enable_gqa)


class PolySketchState(State):
    """Decoding state: the slots of whole blocks, and the tokens of the last one as they are."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        options: PolySketch,
        sketch: _Sketch,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        self._options, self._phi = options, partial(_features, options, sketch)
        self._scale, self._enable_gqa = scale, enable_gqa
        key, value = key.detach(), value.detach()
        self._keys, self._values = Buffer(key[:, :, :0]), Buffer(value[:, :, :0])
        width = value.shape[3] + 1
        self._slots = sketch.leaves.new_zeros(*key.shape[:2], options.num_features, width)
        self.append(key, value)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        size = self._options.block_size
        while key.shape[2]:
            if self._keys.tensor.shape[2] == size:
                self._flush()
            room = size - self._keys.tensor.shape[2]
            self._keys.append(key[:, :, :room])
            self._values.append(value[:, :, :room])
            key, value = key[:, :, room:], value[:, :, room:]

    def _flush(self) -> None:
        """The full block goes into the slots."""
        k, v = self._keys.tensor, self._values.tensor
        x = prepare(INFO, k, k, v, None, False, self._scale, False)
        _, scaled = _scaled(x.q, x.k)
        self._slots = self._slots + self._phi(scaled).mT @ _with_ones(x.v, None)
        self._keys, self._values = (Buffer(t[:, :, :0].clone()) for t in (k, v))

    @torch.no_grad()
    def attend(self, query: Tensor) -> Tensor:
        recent = (self._keys.tensor, self._values.tensor)
        x = prepare(INFO, query, *recent, None, False, self._scale, self._enable_gqa)
        if x.empty:
            return x.nothing()
        q, k = _scaled(x.q * x.scale, x.k)
        sums = _within(self._options.degree, q, k, _with_ones(x.v, None), None)
        return x.restore(_divide(sums + self._phi(q) @ self._slots))

    @property
    def nbytes(self) -> int:
        slots = self._slots.numel() * self._slots.element_size()
        return slots + self._keys.nbytes + self._values.nbytes


class PolySketchAttention(AttentionModule):
    """`polysketch_attention` with matrices that are drawn once and saved with the model.

    Buffers: ``leaves`` (Hk, p / 2, D, r) and ``nodes`` (Hk, n, r, r).
    """

    options: PolySketch

    def __init__(
        self, *, num_heads: int, head_dim: int, generator: Generator | None = None, **options: Any
    ) -> None:
        """Draw the matrices.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            generator: Source of the draw.
            **options: Options of `PolySketch`.
        """
        super().__init__()
        self.options = PolySketch(**options)
        self._sizes = num_heads, head_dim
        for name, shape in zip(_Sketch._fields, self.options.shapes(*self._sizes), strict=True):
            self.register_buffer(name, torch.empty(shape))
        self.redraw(generator)

    @torch.no_grad()
    def redraw(self, generator: Generator | None = None) -> None:
        """Draw new matrices."""
        fresh = self.options.draw(*self._sizes, generator, torch.device("cpu"))
        for name, tensor in zip(_Sketch._fields, fresh, strict=True):
            self.get_buffer(name).copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in _Sketch._fields}
