r"""Compression of attention weights: heads are slices of a tensor, which is decomposed.

Queries, keys and values are all read off the same hidden state x. Slices of one tensor, over the
coordinates of x, all heads of the three, and the coordinates of a head, are their weights; so one
basis of what is read serves all of them, x is multiplied by it once, and what follows is small.
This holds for any number of key heads, where a mode of the three kinds beside a mode of the heads
would ask for as many key heads as query heads. The output projection reads what heads have made,
whose second moment is another one, and is a tensor of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from numattn.core.inputs import Unsupported, not_negative, one_of, positive
from numattn.core.layer import check_rotary, joined, positions
from numattn.core.linalg import draw, falling_eigh
from numattn.core.rotary import Rotary
from numattn.engines.softmax import grouped_attention
from numattn.tensor.compressed import PROJECTIONS, READS, CompressedAttention, HeadFactors

# Added to the Gram matrices of least squares, for a tensor of norm 1: they are singular where two
# components have become parallel.
_RIDGE = 1e-10


@dataclass(frozen=True)
class _Dense:
    """A layer to be compressed, in float64.

    Attributes:
        weights: Of the four projections, as `torch.nn.Linear` has them.
        biases: Of those that have one.
        num_heads, kv_heads: H, Hk.
        rotary: Rotation of queries and keys, or None.
        scale: Factor of the logits.
        like: A tensor of the type and device of the layer.
    """

    weights: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]
    num_heads: int
    kv_heads: int
    rotary: Rotary | None
    scale: float
    like: Tensor

    @staticmethod
    def of(name: str, layer: nn.Module, rotary: Rotary | Literal["layer"] | None) -> _Dense:
        """Of a layer with four projections; `name` is who asks."""
        kind = type(layer).__name__
        linear = {n: m for n, m in layer.named_children() if type(m) is nn.Linear}
        missing = [each for each in PROJECTIONS if each not in linear]
        if missing:
            raise Unsupported(
                f"{name}: {kind} has no torch.nn.Linear of the name {', '.join(missing)}; what "
                "is asked for are q_proj, k_proj, v_proj and o_proj."
            )
        others = {each.rsplit(".", 1)[0] for each, _ in layer.named_parameters()} - {*PROJECTIONS}
        if others:
            raise Unsupported(
                f"{name}: {kind} has parameters in {', '.join(sorted(others))}; what lies between "
                "its projections and the logits would be lost."
            )
        if rotary == "layer":
            if not hasattr(layer, "rotary"):
                raise ValueError(
                    f"{name}: {kind} does not say how it rotates; give rotary, None for nothing."
                )
            rotary = layer.rotary  # type: ignore[assignment]
        num_heads = _count(name, layer, "num_heads", "num_attention_heads")
        kv_heads = _count(name, layer, "kv_heads", "num_key_value_heads")
        scale = getattr(layer, "scale", getattr(layer, "scaling", None))
        if scale is None:
            raise ValueError(f"{name}: {kind} has no scale of its logits, of this name.")
        check_rotary(name, rotary, "head_dim", linear["q_proj"].out_features // num_heads)  # type: ignore[arg-type]
        return _Dense(
            {each: linear[each].weight.detach().double() for each in PROJECTIONS},
            {n: m.bias.detach().double() for n, m in linear.items() if m.bias is not None},
            num_heads,
            kv_heads,
            rotary,  # type: ignore[arg-type]
            float(scale),
            linear["o_proj"].weight,
        )

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """What layers that are compressed together must agree in."""
        return (
            (self.num_heads, self.kv_heads),
            *(tuple(self.weights[name].shape) for name in PROJECTIONS),
        )

    def blocks(self, name: str) -> Tensor:
        """Weights of a projection by heads, (X, heads, width)."""
        w = self.weights[name]
        if name == "o_proj":
            return w.unflatten(1, (self.num_heads, -1))
        count = self.num_heads if name == "q_proj" else self.kv_heads
        return w.unflatten(0, (count, -1)).movedim(-1, 0)

    def outputs(self, hidden: Tensor, is_causal: bool) -> Tensor:
        """What all heads make of hidden states (B, N, X), side by side: (B, N, H E)."""
        x = hidden.double()
        q, k, v = (
            F.linear(x, self.weights[name], self.biases.get(name))
            .unflatten(-1, (self.num_heads if name == "q_proj" else self.kv_heads, -1))
            .transpose(1, 2)
            for name in READS
        )
        if self.rotary is not None:
            position = positions(x, None, 0)[:, None]
            q, k = self.rotary(q, position), self.rotary(k, position)
        return joined(grouped_attention(q, k, v, scale=self.scale, is_causal=is_causal))

    def forward(self, hidden: Tensor, is_causal: bool) -> Tensor:
        """The layer."""
        out = self.outputs(hidden, is_causal)
        return F.linear(out, self.weights["o_proj"], self.biases.get("o_proj"))


def _count(name: str, layer: nn.Module, ours: str, theirs: str) -> int:
    """How many heads a layer of this library has, or one of transformers."""
    for owner, option in ((layer, ours), (getattr(layer, "config", None), theirs)):
        if hasattr(owner, option):
            return int(getattr(owner, option))
    raise ValueError(f"{name}: {type(layer).__name__} has neither {ours} nor config.{theirs}.")


@dataclass(frozen=True)
class Compression:
    """Compressed layers, and what they lose.

    Attributes:
        layers: The new layers, in the type and on the device of the old ones; they share factors
            where there are several.
        sources: The old layers, in float64.
        ranks: Of what queries, keys and values are read with, stack by stack, and of the output
            projection: what was asked for, as far as the tensors have it.
        cancellation: Of CP: root of the summed squares of all components over the norm of their
            sum, the largest over the stacks. 1 for orthogonal components; components that grow
            against each other make it large. 1 for the other methods.
    """

    layers: tuple[CompressedAttention, ...]
    sources: tuple[_Dense, ...]
    ranks: tuple[tuple[int, ...], ...]
    cancellation: float

    @property
    def layer(self) -> CompressedAttention:
        """The new layer, where there is one only."""
        if len(self.layers) > 1:
            raise ValueError(f"Compression: there are {len(self.layers)} layers; use layers.")
        return self.layers[0]

    @property
    def parameters_before(self) -> int:
        """Numbers in the weights of all projections."""
        return sum(w.numel() for source in self.sources for w in source.weights.values())

    @property
    def parameters(self) -> int:
        """Numbers in the factors; biases are counted in neither."""
        factors = {
            id(p): p.numel()
            for layer in self.layers
            for part in (*layer.reads, layer.write)
            for p in part.parameters()
        }
        return sum(factors.values())

    @property
    def ratio(self) -> float:
        """Parameters before, over those after."""
        return self.parameters_before / self.parameters

    @property
    def flops_before(self) -> int:
        """Operations of the projections for a token, in all layers."""
        return 2 * self.parameters_before

    @property
    def flops(self) -> int:
        """The same with the factors."""
        return 2 * sum(layer.products[0] for layer in self.layers)

    @torch.no_grad()
    def weight_error(self) -> dict[str, float]:
        """Relative error of each projection's weights in the Frobenius norm, over all layers."""
        new = self._new()
        return {
            name: _relative(
                [n.weights[name] - s.weights[name] for n, s in zip(new, self.sources, strict=True)],
                [s.weights[name] for s in self.sources],
            )
            for name in PROJECTIONS
        }

    @torch.no_grad()
    def output_error(
        self, hidden: Tensor | Sequence[Tensor], *, is_causal: bool = True
    ) -> dict[str, float]:
        """How far outputs are off, norm over norm, preferably on tokens not of the calibration.

        What is given is a text of its own: a later part of a text is judged without what came
        before it, such as its first token, on which heads may put much of their weight.

        Args:
            hidden: Hidden states that the layer sees, (B, N, embed_dim); a sequence of such, one
                for each of several layers.
            is_causal: Token i attends to tokens j <= i.

        Returns:
            By projection, biases left out, each given what it sees in the old layer; and under
            ``layer`` of the whole layer's output. Computed in float64 with the weights that the
            factors stand for.

        Cost: that of three passes through the old layers.
        """
        seen = _per_layer("output_error: hidden", hidden, len(self.sources))
        off: dict[str, list[Tensor]] = {name: [] for name in (*PROJECTIONS, "layer")}
        want: dict[str, list[Tensor]] = {name: [] for name in off}
        for new, source, each in zip(self._new(), self.sources, seen, strict=True):
            _check_hidden("output_error: hidden", each, source)
            x = each.double()
            made = source.outputs(x, is_causal)
            for name in PROJECTIONS:
                given = made if name == "o_proj" else x
                want[name].append(given @ source.weights[name].mT)
                off[name].append(given @ new.weights[name].mT - want[name][-1])
            want["layer"].append(source.forward(x, is_causal))
            off["layer"].append(new.forward(x, is_causal) - want["layer"][-1])
        return {name: _relative(off[name], want[name]) for name in off}

    def _new(self) -> list[_Dense]:
        """The new layers as dense ones."""
        return [
            replace(source, weights={n: w.double() for n, w in layer.weights().items()})
            for layer, source in zip(self.layers, self.sources, strict=True)
        ]


def _relative(off: list[Tensor], want: list[Tensor]) -> float:
    """Norm over norm; 0 where nothing is off."""
    error, norm = (math.hypot(*(float(t.norm()) for t in ts)) for ts in (off, want))
    return error / norm if error else 0.0


@torch.no_grad()
def compress_layer(
    layer: nn.Module | Sequence[nn.Module],
    *,
    method: Literal["cp", "tucker", "tt"] = "tucker",
    rank: int | float | tuple[int, ...] | None = None,
    tolerance: float | None = None,
    calibration: Tensor | Sequence[Tensor] | None = None,
    damping: float = 0.01,
    iterations: int | None = None,
    starts: int | None = None,
    rotary: Rotary | Literal["layer"] | None = "layer",
    is_causal: bool = True,
    generator: Generator | None = None,
) -> Compression:
    r"""Compress the weights of an attention layer by a tensor decomposition.

    The heads of queries, keys and values are slices of a tensor :math:`W_{xsd}`, x over the
    coordinates of a hidden state, s over the H + 2 Hk heads, d over the coordinates of a head.
    The transposed output projection is another one, s over the H heads. Each is approximated by

    .. math:: \tilde W_{xsd} = \sum_r U_{xr} C_{sr} V_{dr}, \qquad
              \sum_{abc} G_{abc} U_{xa} C_{sb} V_{dc}, \qquad
              \sum_{ac} U_{xa} G_{asc} V_{dc}

    by CP, by Tucker, and by a tensor train. Before, the slices of queries, keys and values are
    each divided by the norm of the three's own block, so that what is minimised is the sum of
    relative squared errors; this is undone in the factor of the slices. With several layers of
    one shape there is a mode of the layers beside x, and they share the other factors.

    With a calibration the errors are those of outputs: :math:`E |x (W_s - \tilde W_s)|^2` is the
    norm of :math:`\Sigma^{1/2} (W - \tilde W)`, with the second moment :math:`\Sigma` of x, so
    the mode x is multiplied by :math:`\Sigma^{1/2}` and its factor by the inverse afterwards. The
    output projection reads heads and coordinates of heads together, with a moment that is no
    product. Its two modes are weighted with the roots of A and B, where the Kronecker product of
    A and B is the nearest to that moment in the Frobenius norm; then U and G are fitted again to
    the moment itself, by reduced-rank regression, and of CP or several layers U by least squares.

    Args:
        layer: A layer with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, each a
            `torch.nn.Linear`, and no other parameters: `numattn.latent.GroupedQueryAttention`, or
            one of transformers such as LlamaAttention. Or several of one shape.
        method: The decomposition.
        rank: An integer: of CP, components; of the others, the same for every mode or bond. A
            tuple: of Tucker, for x, (the layers,) heads, and coordinates of a head; of a tensor
            train, for the bonds between these. A float: the share of the weights' numbers that
            the factors may have, in each of the tensors. All are cut to what the tensors have.
        tolerance: In place of `rank`, a relative error in (0, 1), of each of the tensors as they
            are decomposed: balanced, and weighted where there is a calibration. Of queries, keys
            and values it bounds the root mean square of the three's relative errors.
        calibration: Hidden states that the layer sees, (B, N, embed_dim), without padding; or their
            second moment (embed_dim, embed_dim), with which the output projection is not weighted.
            A sequence of either for several layers, whose moments, each over its mean eigenvalue,
            are averaged.
        damping: Share of a moment's mean eigenvalue that is added to its diagonal, positive:
            directions that the sample never shows count that much, and the root has an inverse.
        iterations: Of Tucker, sweeps of HOOI after the truncated HOSVD, 10 when None; of CP,
            sweeps of alternating least squares, 100 when None; of a tensor train None.
        starts: Of CP alone, the best of so many starts is taken, 3 when None. The first is from
            singular vectors, the others are Gaussian.
        rotary: What turns queries and keys; ``"layer"`` takes it from the layer, which those of
            transformers do not have.
        is_causal: Token i of the calibration attends to tokens j <= i.
        generator: Of CP alone, source of the starts.

    Returns:
        The new layers, sizes and errors.

    Cost: float64 decompositions of tensors of the size of the weights. A sweep of CP of rank R
    takes about 6 R operations for every number of the weights, one of HOOI singular values of the
    unfoldings. With a float or a tolerance, singular values of all unfoldings first; CP with a
    tolerance is fitted again for every rank it tries.

    Exact when: Tucker and tensor trains with every rank as large as its mode. CP needs as many
    components as the rank of the tensor, which may exceed every mode.

    Limits: a truncated HOSVD loses at most the sum over the modes of the squared singular values
    that are cut, and at least the largest of these sums; a tensor train at most the sum over the
    bonds. Ranks for a share or a tolerance come from these sums: starting from full ranks, the one
    is lowered whose next singular value squared is the least per number saved. Real errors are
    below the sums, HOOI's above all, so a tolerance is kept and a share need not be the best use of
    its numbers. Only with a mode x that alone is cut does this minimise the error over all tensors
    of these ranks. For a share, what cutting the heads' coordinates of the output projection costs
    is taken from A and B, which may be far from the moment.

    Best CP approximations need not exist: two components may grow without limit against each
    other, which `Compression.cancellation` shows and bfloat16 does not survive. A ridge keeps
    their least squares solvable, and more starts help. Least squares converge slowly where a
    calibration's moments are of very different sizes. With a tolerance the rank grows by half
    each time, until CP has as many numbers as the weights.

    Errors of weights or of projections bound no error of the logits after the softmax, nor of the
    model. What heads share decides: trained heads differ, so that the modes of heads and of their
    coordinates have nearly full rank, and most of what can be saved is in x.

    Raises:
        ValueError: An option is not of the range above, or does not belong to the method.
        Unsupported: The layer has other parameters than the four projections; CP does not reach
            the tolerance.

    References:
        Y. Gu, W. Zhou, G. Iacovides and D. Mandic, "TensorLLM: Tensorising Multi-Head Attention
        for Enhanced Reasoning and Compression in LLMs", 2025, https://arxiv.org/abs/2501.15674.

        L. De Lathauwer, B. De Moor and J. Vandewalle, "A Multilinear Singular Value
        Decomposition", 2000, https://doi.org/10.1137/S0895479896305696 (HOSVD).

        I. V. Oseledets, "Tensor-Train Decomposition", 2011, https://doi.org/10.1137/090752286.

        J. Kossaifi, Y. Panagakis, A. Anandkumar and M. Pantic, "TensorLy: Tensor Learning in
        Python", 2019, https://jmlr.org/papers/v20/18-277.html, which computes the decompositions.

    Example:
        >>> from numattn.latent import GroupedQueryAttention
        >>> layer = GroupedQueryAttention(32, 4, kv_heads=2, head_dim=8)
        >>> found = compress_layer(layer, method="tucker", rank=0.5)
        >>> found.parameters <= 0.5 * found.parameters_before
        True
        >>> sorted(found.weight_error())
        ['k_proj', 'o_proj', 'q_proj', 'v_proj']
        >>> found.layer(torch.randn(1, 10, 32)).shape
        torch.Size([1, 10, 32])
    """
    options = _Options(method, rank, tolerance, damping, iterations, starts, generator)
    several = list(layer) if isinstance(layer, Sequence) else [layer]
    if not several:
        raise ValueError("compress_layer: layer is an empty sequence; give one layer at least.")
    sources = tuple(_Dense.of("compress_layer", each, rotary) for each in several)
    if any(source.shape != sources[0].shape for source in sources):
        raise ValueError(
            "compress_layer: layers that are compressed together must agree in heads and shapes; "
            f"got {[source.shape for source in sources]}."
        )
    options.check(3 if len(sources) == 1 else 4)
    given = None
    if calibration is not None:
        given = _per_layer("compress_layer: calibration", calibration, len(sources))
    parts = [_fit(stack, options) for stack in _stacks(sources, given, damping, is_causal)]
    return Compression(
        layers=_build(sources, [part.factors for part in parts]),
        sources=sources,
        ranks=tuple(part.ranks for part in parts),
        cancellation=max(part.cancellation for part in parts),
    )


@dataclass(frozen=True)
class _Options:
    """Options of `compress_layer`."""

    method: str
    rank: int | float | tuple[int, ...] | None
    tolerance: float | None
    damping: float
    iterations: int | None
    starts: int | None
    generator: Generator | None

    def __post_init__(self) -> None:
        one_of("compress_layer", "method", self.method, ("cp", "tucker", "tt"))
        if (self.rank is None) == (self.tolerance is None):
            raise ValueError(
                "compress_layer: give either rank or tolerance; "
                f"got rank={self.rank!r} and tolerance={self.tolerance!r}."
            )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(
                f"compress_layer: tolerance must be in (0, 1); got {self.tolerance!r}."
            )
        if isinstance(self.rank, float):
            if not 0 < self.rank <= 1:
                raise ValueError(
                    f"compress_layer: rank as a share must be in (0, 1]; got {self.rank}."
                )
        elif isinstance(self.rank, tuple):
            for each in self.rank:
                positive("compress_layer", "rank", each)
        elif self.rank is not None:
            positive("compress_layer", "rank", self.rank)
        if not 0 < self.damping < math.inf:
            raise ValueError(
                f"compress_layer: damping must be positive and finite; got {self.damping!r}."
            )
        self._check_method()

    def _check_method(self) -> None:
        if self.iterations is not None:
            if self.method == "tt":
                raise ValueError(
                    "compress_layer: a tensor train takes no iterations; leave it None."
                )
            not_negative("compress_layer", "iterations", self.iterations)
        if self.starts is not None:
            positive("compress_layer", "starts", self.starts)
        if self.method != "cp" and (self.starts is not None or self.generator is not None):
            raise ValueError(
                f"compress_layer: method={self.method!r} draws nothing; starts and generator are "
                "for method='cp'."
            )
        if self.method == "cp" and self.iterations == 0:
            raise ValueError("compress_layer: iterations of method='cp' must be positive; got 0.")

    def check(self, modes: int) -> None:
        """Refuse a tuple that does not fit tensors of so many modes."""
        if not isinstance(self.rank, tuple):
            return
        want = {"cp": 0, "tucker": modes, "tt": modes - 1}[self.method]
        if len(self.rank) != want:
            raise ValueError(
                f"compress_layer: rank of method={self.method!r} must be an integer, a share"
                + (f", or a tuple of {want}" if want else "")
                + f"; got {self.rank}."
            )


@dataclass(frozen=True)
class _Stack:
    """A tensor to be decomposed, (X, S, D) or (X, L, S, D), and what undoes its weighting.

    Attributes:
        tensor: Balanced and weighted.
        inverse: What factors of x are multiplied by, (X, X), or None.
        slices: The same of heads, (S, S).
        width: The same of their coordinates, (D, D), or None.
        target: Where the weighting is a stand-in, the tensor without it, (X, L, S D).
        moment: What the weighting stands for, damped, (S D, S D).
    """

    tensor: Tensor
    inverse: Tensor | None
    slices: Tensor
    width: Tensor | None
    target: Tensor | None = None
    moment: Tensor | None = None

    def first(self) -> Tensor:
        """The unfolding of x in the true weighting, to a rotation from the right, of norm 1."""
        if self.target is None or self.moment is None:
            return self.tensor.flatten(1)
        half = torch.linalg.cholesky(self.moment)
        rows = (self.target @ half).flatten(1)
        norm = rows.norm()
        return rows / torch.where(norm > 0, norm, 1.0)

    def error(self, factors: HeadFactors) -> float:
        """Relative error in the moment that the weighting stands for."""
        assert self.target is not None
        assert self.moment is not None
        off = self.target - torch.stack([each.flatten(1) for each in _each(factors)], 1)
        lost, all_ = (float(((t @ self.moment) * t).sum()) for t in (off, self.target))
        return math.sqrt(max(lost, 0.0) / all_) if lost > 0 else 0.0


@dataclass(frozen=True)
class _Found:
    """Factors of a tensor of norm 1, by the names of `HeadFactors`, and what `Compression` says."""

    basis: Tensor
    core: Tensor | None
    slices: Tensor | None
    width: Tensor
    layers: Tensor | None
    ranks: tuple[int, ...]
    cancellation: float = 1.0


@dataclass(frozen=True)
class _Fit:
    """Factors of a stack."""

    factors: HeadFactors
    ranks: tuple[int, ...]
    cancellation: float


def _per_layer(what: str, given: Tensor | Sequence[Tensor], count: int) -> list[Tensor]:
    """One tensor for each layer."""
    several = [given] if isinstance(given, Tensor) else list(given)
    if len(several) != count:
        raise ValueError(f"{what} must be a tensor for each of {count} layers; got {len(several)}.")
    return several


def _check_hidden(what: str, hidden: Tensor, source: _Dense) -> None:
    embed_dim = len(source.weights["o_proj"])
    if hidden.dim() != 3 or hidden.shape[2] != embed_dim or not hidden.numel():
        raise ValueError(
            f"{what} must be hidden states (B, N, {embed_dim}), at least one; "
            f"got {tuple(hidden.shape)}."
        )


def _moments(
    source: _Dense, given: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor | None]:  # (X, X), (H E, H E)
    """Second moments of what the layer and its output projection read."""
    embed_dim = len(source.weights["o_proj"])
    if given.dim() == 2:
        moment = given.double()
        if moment.shape != (embed_dim, embed_dim) or not torch.allclose(moment, moment.mT):
            raise ValueError(
                f"compress_layer: calibration of two dimensions must be a second moment, symmetric "
                f"({embed_dim}, {embed_dim}); got {tuple(given.shape)}."
            )
        return _unit(moment), None
    _check_hidden("compress_layer: calibration", given, source)
    seen = (given.double(), source.outputs(given, is_causal))
    x, made = (_unit(t.flatten(0, -2).mT @ t.flatten(0, -2)) for t in seen)
    return x, made


def _unit(moment: Tensor) -> Tensor:
    """A moment over its mean eigenvalue."""
    mean = moment.diagonal().mean()
    return moment / torch.where(mean > 0, mean, 1.0)


def _roots(moment: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The root of a damped moment, and its inverse."""
    values, vectors = falling_eigh(_unit(moment))
    root = (values + damping).sqrt()
    return vectors * root @ vectors.mT, vectors / root @ vectors.mT


def _kronecker(moment: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """The nearest Kronecker product to a moment (H E, H E): (H, H) and (E, E)."""
    split = moment.unflatten(1, (num_heads, -1)).unflatten(0, (num_heads, -1))
    rows = split.transpose(1, 2).flatten(0, 1).flatten(1)  # (H H, E E)
    a = falling_eigh(rows @ rows.mT)[1][:, 0]
    a, b = a.unflatten(0, (num_heads, -1)), (a @ rows).unflatten(0, (split.shape[1], -1))
    sign = 1.0 if a.diagonal().sum() >= 0 else -1.0
    return sign * (a + a.mT) / 2, sign * (b + b.mT) / 2


def _stacks(
    sources: tuple[_Dense, ...], given: list[Tensor] | None, damping: float, is_causal: bool
) -> Iterator[_Stack]:
    """The tensors of queries, keys and values, and of the output projection."""
    moment = made = None
    if given is not None:
        pairs = [_moments(s, g, is_causal) for s, g in zip(sources, given, strict=True)]
        moment = torch.stack([x for x, _ in pairs]).mean(0)
        outputs = [o for _, o in pairs if o is not None]
        made = torch.stack(outputs).mean(0) if len(outputs) == len(pairs) else None
    first = sources[0]
    widths = [first.blocks(name).shape[2] for name in READS]
    for names in (READS,) if widths[0] == widths[2] else (READS[:2], READS[2:]):
        yield _reading(sources, names, moment, damping)
    yield _writing(sources, made, damping)


def _reading(
    sources: tuple[_Dense, ...], names: tuple[str, ...], moment: Tensor | None, damping: float
) -> _Stack:
    root = inverse = None
    if moment is not None:
        root, inverse = _roots(moment, damping)
    blocks, norms = [], []
    for name in names:
        block = torch.stack([source.blocks(name) for source in sources], 1)  # (X, L, heads, D)
        if root is not None:
            block = (root @ block.flatten(1)).view_as(block)
        norm = block.norm()
        norm = torch.where(norm > 0, norm, 1.0)
        blocks.append(block / norm)
        norms.append(norm.expand(block.shape[2]))
    return _Stack(_modes(torch.cat(blocks, 2)), inverse, torch.cat(norms).diag(), None)


def _writing(sources: tuple[_Dense, ...], moment: Tensor | None, damping: float) -> _Stack:
    tensor = torch.stack([source.blocks("o_proj") for source in sources], 1)  # (X, L, H, E)
    if moment is None:
        return _Stack(_modes(tensor), None, torch.eye(tensor.shape[2]).to(tensor), None)
    of_heads, of_width = _kronecker(moment, tensor.shape[2])
    slices, undo_slices = _roots(of_heads, damping)
    width, undo_width = _roots(of_width, damping)
    weighted = _modes(slices @ tensor @ width)
    damped = _unit(moment) + damping * torch.eye(len(moment)).to(moment)
    return _Stack(weighted, None, undo_slices, undo_width, tensor.flatten(2), damped)


def _modes(tensor: Tensor) -> Tensor:
    """Without a mode of layers where there is one only."""
    return tensor.squeeze(1) if tensor.shape[1] == 1 else tensor


@contextmanager
def _tensorly() -> Iterator[None]:
    """Tensorly computes with torch in this thread, and then as it did."""
    import tensorly

    before = tensorly.get_backend()
    tensorly.set_backend("pytorch", local_threadsafe=True)
    try:
        yield
    finally:
        tensorly.set_backend(before, local_threadsafe=True)


def _fit(stack: _Stack, options: _Options) -> _Fit:
    """Decompose a stack and undo its weighting."""
    found = _decomposed(stack, options)
    if stack.moment is None:
        return found
    aim = options.tolerance
    while True:
        found = replace(found, factors=_refitted(stack, found.factors))
        if aim is None or options.tolerance is None or stack.error(found.factors) <= aim:
            return found
        options = replace(options, tolerance=0.8 * options.tolerance)
        found = _decomposed(stack, options)


def _decomposed(stack: _Stack, options: _Options) -> _Fit:
    norm = stack.tensor.norm()
    norm = torch.where(norm > 0, norm, 1.0)
    stack = replace(stack, tensor=stack.tensor / norm)
    with _tensorly():
        found = {"cp": _cp, "tucker": _tucker, "tt": _train}[options.method](stack, options)
    core, slices, width = found.core, found.slices, found.width
    basis = norm * found.basis
    if stack.inverse is not None:
        basis = stack.inverse @ basis
    if slices is not None:
        slices = stack.slices @ slices
    elif core is not None:
        core = stack.slices @ core
    if stack.width is not None:
        width = stack.width @ width
    left: Tensor | None = width
    if core is not None:
        core, slices, left = _absorbed(core, slices, width)
    factors = HeadFactors(basis, core, slices, left, found.layers)
    return _Fit(factors, found.ranks, found.cancellation)


def _each(factors: HeadFactors) -> list[Tensor]:
    """The tensors (X, S, D) of all layers."""
    f = factors
    count = 1 if f.layers is None else f.layers.shape[-2]
    return [
        HeadFactors(f.basis, f.core, f.slices, f.width, f.layers, layer).dense()
        for layer in range(count)
    ]


def _refitted(stack: _Stack, factors: HeadFactors) -> HeadFactors:
    r"""The best factors for the moment itself, given those of heads and of their coordinates.

    With a core and one layer, basis and core are a matrix of rank a, which minimises
    :math:`|(W - Z K^T) \Sigma^{1/2}|` by a truncated SVD (reduced-rank regression), K being the
    Kronecker product of the two factors. Else the basis alone is fitted, by least squares.
    """
    f, moment = factors, stack.moment
    assert stack.target is not None
    assert moment is not None
    rank = f.basis.shape[1]
    if f.core is None or f.layers is not None:
        one = torch.eye(rank).to(moment)
        maps = [m.flatten(1) for m in _each(HeadFactors(one, f.core, f.slices, f.width, f.layers))]
        pulled = torch.stack(maps) @ moment  # (L, a, S D)
        gram = (pulled @ torch.stack(maps).mT).sum(0)
        right = torch.einsum("xlm,lam->xa", stack.target, pulled)
        basis = right @ torch.linalg.pinv(gram, hermitian=True)
        return HeadFactors(basis, f.core, f.slices, f.width, f.layers)
    shape = f.core.shape[1:]
    heads, width = (
        torch.eye(n).to(moment) if factor is None else factor.detach()
        for n, factor in zip(shape, (f.slices, f.width), strict=True)
    )
    both = torch.kron(heads, width)  # (S D, b c)
    half = torch.linalg.cholesky(both.mT @ moment @ both)
    rows = torch.linalg.solve_triangular(half, (stack.target[:, 0] @ moment @ both).mT, upper=False)
    u, s, v = torch.linalg.svd(rows.mT, full_matrices=False)
    core = torch.linalg.solve_triangular(half, s[:rank, None] * v[:rank], upper=False, left=False)
    return HeadFactors(u[:, :rank], core.unflatten(1, shape), f.slices, f.width)


def _absorbed(
    core: Tensor, slices: Tensor | None, width: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Square factors are a part of the core."""
    left: Tensor | None = width
    if width.shape[0] == width.shape[1]:
        core, left = core @ width.mT, None
    if slices is not None and slices.shape[0] == slices.shape[1]:
        core, slices = slices @ core, None
    return core, slices, left


def _cp(stack: _Stack, options: _Options) -> _Found:
    """CP of a tensor of norm 1."""
    tensor = stack.tensor
    total = sum(tensor.shape)
    most = max(tensor.numel() // total, 1)
    if isinstance(options.rank, float):
        rank = int(options.rank * tensor.numel() / total)
        if rank < 1:
            raise ValueError(
                f"compress_layer: rank={options.rank} leaves no component of {total} numbers to a "
                f"tensor of {tensor.numel()}; give a larger share."
            )
        factors, _ = _best(tensor, rank, options)
    elif options.tolerance is None:
        assert isinstance(options.rank, int)
        factors, _ = _best(tensor, options.rank, options)
    else:
        rank = 1
        factors, error = _best(tensor, rank, options)
        while error > options.tolerance:
            if rank == most:
                raise Unsupported(
                    f"compress_layer: with {rank} components, as many numbers as the weights, CP "
                    f"is off by {error:.3g}, tolerance={options.tolerance}; take another method, "
                    "or more iterations or starts."
                )
            rank = min(rank + max(rank // 2, 1), most)
            factors, error = _best(tensor, rank, options)
    sizes = torch.stack([f.norm(dim=0) for f in factors])  # (modes, R)
    components = sizes.prod(0)
    # Equal norms in all modes: no type overflows in one of them.
    even = components ** (1 / len(factors)) / torch.where(sizes > 0, sizes, 1.0)
    factors = [f * e for f, e in zip(factors, even, strict=True)]
    norm = _full(factors).norm()
    cancellation = float(components.norm() / norm) if norm > 0 else 1.0
    *layers, slices, width = factors[1:]
    between = layers[0] if layers else None
    return _Found(factors[0], None, slices, width, between, (len(components),), cancellation)


def _best(tensor: Tensor, rank: int, options: _Options) -> tuple[list[Tensor], float]:
    """Factors (mode, R) of the best of several starts, and their error."""
    from tensorly.decomposition import parafac

    iterations = 100 if options.iterations is None else options.iterations
    best: tuple[list[Tensor], float] | None = None
    for start in range(3 if options.starts is None else options.starts):
        _, factors = parafac(
            tensor,
            rank,
            n_iter_max=iterations,
            init=(tensor.new_ones(rank), _start(tensor, rank, start == 0, options.generator)),
            l2_reg=_RIDGE,
        )
        error = float((_full(factors) - tensor).norm())
        if best is None or error < best[1]:
            best = list(factors), error
    assert best is not None
    return best


def _start(tensor: Tensor, rank: int, singular: bool, generator: Generator | None) -> list[Tensor]:
    """Factors to start from: singular vectors as far as there are any, else Gaussian ones."""
    found = []
    for mode, size in enumerate(tensor.shape):
        factor = draw((size, rank), generator, tensor.device) / size**0.5
        if singular:
            rows = tensor.movedim(mode, 0).flatten(1)
            leading = falling_eigh(rows @ rows.mT)[1][:, :rank]
            factor = torch.cat([leading, factor[:, leading.shape[1] :]], 1)
        found.append(factor)
    return found


def _full(factors: Sequence[Tensor]) -> Tensor:
    """The sum of the components."""
    rows = factors[0]
    for factor in factors[1:]:
        rows = (rows[..., None, :] * factor) if factor is not factors[-1] else rows @ factor.mT
    return rows


def _tucker(stack: _Stack, options: _Options) -> _Found:
    """HOOI of a tensor, from its truncated HOSVD."""
    from tensorly.decomposition import tucker

    tensor = stack.tensor
    sizes = tuple(tensor.shape)

    def count(ranks: tuple[int, ...]) -> int:
        return math.prod(ranks) + sum(n * r for n, r in zip(sizes, ranks, strict=True))

    def kept(ranks: tuple[int, ...]) -> int:  # square factors of heads and width are absorbed
        return count(ranks) - sum(
            n * r for n, r in zip(sizes[-2:], ranks[-2:], strict=True) if n == r
        )

    unfoldings = [tensor.movedim(mode, 0).flatten(1) for mode in range(len(sizes))]
    unfoldings[0] = stack.first()
    ranks = _chosen(unfoldings, options, count, kept, tensor.numel())
    for _ in ranks:  # no rank exceeds the product of the others
        ranks = tuple(min(r, math.prod(ranks) // r) for r in ranks)
    sweeps = 10 if options.iterations is None else options.iterations
    core, factors = tucker(tensor, ranks, n_iter_max=sweeps, tol=1e-8)
    *layers, slices, width = factors[1:]
    return _Found(factors[0], core, slices, width, layers[0] if layers else None, ranks)


def _train(stack: _Stack, options: _Options) -> _Found:
    """The tensor train of a tensor."""
    from tensorly.decomposition import tensor_train

    tensor = stack.tensor
    sizes = tuple(tensor.shape)

    def count(bonds: tuple[int, ...]) -> int:
        ends = (1, *bonds, 1)
        return sum(a * n * b for a, n, b in zip(ends[:-1], sizes, ends[1:], strict=True))

    def kept(bonds: tuple[int, ...]) -> int:  # a square factor of the width is absorbed
        return count(bonds) - (bonds[-1] ** 2 if bonds[-1] == sizes[-1] else 0)

    unfoldings = [tensor.flatten(0, i).flatten(1) for i in range(len(sizes) - 1)]
    unfoldings[0] = stack.first()
    bonds = _chosen(unfoldings, options, count, kept, tensor.numel())
    cores = list(tensor_train(tensor, [1, *bonds, 1]))
    layers = cores[1] if len(cores) == 4 else None
    ranks = tuple(core.shape[2] for core in cores[:-1])
    return _Found(cores[0][0], cores[-2], None, cores[-1][..., 0].mT, layers, ranks)


def _chosen(
    unfoldings: list[Tensor],
    options: _Options,
    count: Callable[[tuple[int, ...]], int],
    kept: Callable[[tuple[int, ...]], int],
    numel: int,
) -> tuple[int, ...]:
    """Ranks of unfoldings: those that are asked for, or those that a share or a tolerance gives.

    `count` are the numbers that ranks need, and `kept` those left of them after absorption.
    """
    full = tuple(min(unfolding.shape) for unfolding in unfoldings)
    if isinstance(options.rank, (int, tuple)):
        asked = options.rank if isinstance(options.rank, tuple) else (options.rank,) * len(full)
        return tuple(min(a, f) for a, f in zip(asked, full, strict=True))
    energies = [torch.linalg.svdvals(u).square().tolist() for u in unfoldings]
    most = math.inf if options.tolerance is None else options.tolerance**2
    budget = 0.0 if options.rank is None else options.rank * numel
    ranks, lost = full, 0.0
    while kept(ranks) > budget:
        steps = []
        for mode, rank in enumerate(ranks):
            less = (*ranks[:mode], rank - 1, *ranks[mode + 1 :])
            loss = energies[mode][rank - 1]
            if rank > 1 and lost + loss <= most:
                steps.append((loss / (count(ranks) - count(less)), loss, less))
        if not steps and options.rank is not None:
            raise ValueError(
                f"compress_layer: rank={options.rank} are {int(budget)} numbers, and ranks of 1 "
                f"already take {kept(ranks)}; give a larger share."
            )
        if not steps:
            break
        _, loss, ranks = min(steps)
        lost += loss
    return ranks


def _build(
    sources: tuple[_Dense, ...], parts: list[HeadFactors]
) -> tuple[CompressedAttention, ...]:
    """The new layers, in the type and on the device of the old ones."""
    like = sources[0].like
    shared = [part.to(dtype=like.dtype, device=like.device) for part in parts]
    found = []
    for number, source in enumerate(sources):
        *reads, write = (
            HeadFactors(p.basis, p.core, p.slices, p.width, p.layers, number) for p in shared
        )
        found.append(
            CompressedAttention(
                source.num_heads,
                kv_heads=source.kv_heads,
                reads=reads,
                write=write,
                rotary=source.rotary,
                biases={name: bias.to(like) for name, bias in source.biases.items()},
                scale=source.scale,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class RankProfile:
    """Singular values of the unfoldings of a layer's two bilinear tensors, by mode.

    Attributes:
        logits: Of :math:`W^Q_h W^K_h{}^T`: ``heads`` (H,), ``queries`` and ``keys`` (at most X,).
        outputs: Of :math:`W^V_h W^O_h`: ``heads``, ``values`` and ``outputs``.
    """

    logits: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def ranks(self, tolerance: float) -> dict[str, dict[str, int]]:
        """Least ranks with which cutting one mode alone loses this share of the norm at most."""
        return {
            name: {mode: _rank(values, tolerance) for mode, values in tensor.items()}
            for name, tensor in (("logits", self.logits), ("outputs", self.outputs))
        }


def _rank(values: Tensor, tolerance: float) -> int:
    """How many of falling singular values leave a tail of this share of the norm at most."""
    tail = values.square().flip(0).cumsum(0).flip(0)
    return int((tail > tolerance**2 * tail[0]).sum())


@torch.no_grad()
def multilinear_rank_profile(layer: nn.Module) -> RankProfile:
    r"""How much the heads of a layer share, as multilinear singular values.

    Logits without positions are :math:`x\, W^{QK}_h y^T` with a tensor (H, X, X) of slices
    :math:`W^Q_h W^K_{g(h)}{}^T`, outputs are sums of :math:`y\, W^{VO}_h` with slices
    :math:`W^V_{g(h)} W^O_h`. A Tucker decomposition of the first with ranks (r_H, r_q, r_k)
    would let a token keep r_k numbers for all heads. How fast the singular values of the
    unfoldings fall says which ranks would do, and bounds what is lost from below.

    Args:
        layer: As of `compress_layer`.

    Returns:
        Singular values in float64, falling.

    Cost: O(X (H D)^2), by QR of one factor of each slice, whose orthogonal part changes no
    singular value; no tensor of X x X x H is formed.

    Exact when: always. Singular values of the heads' mode come from Gram matrices: those below
    1e-8 of the largest are not resolved.

    Limits: a rotary embedding lies between queries and keys, and the tensor is that of distance 0;
    of other distances it has other spaces. Biases are left out.

    References:
        L. De Lathauwer, B. De Moor and J. Vandewalle, "A Multilinear Singular Value
        Decomposition", 2000, https://doi.org/10.1137/S0895479896305696.

    Example:
        >>> from numattn.latent import GroupedQueryAttention
        >>> layer = GroupedQueryAttention(32, 4, kv_heads=1, head_dim=8)
        >>> multilinear_rank_profile(layer).ranks(1e-6)["logits"]  # one key head, of 8 coordinates
        {'heads': 4, 'queries': 32, 'keys': 8}
    """
    source = _Dense.of("multilinear_rank_profile", layer, None)
    group = source.num_heads // source.kv_heads
    q, k, v, o = (source.blocks(name).transpose(0, 1) for name in PROJECTIONS)  # (heads, X, D)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return RankProfile(
        dict(zip(("heads", "queries", "keys"), _unfolded(q, k), strict=True)),
        dict(zip(("heads", "values", "outputs"), _unfolded(v, o), strict=True)),
    )


def _unfolded(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """Singular values of the unfoldings of slices a b^T, a and b (H, X, D)."""
    yield falling_eigh(_slice_gram(a, b))[0].sqrt()
    for left, right in ((a, b), (b, a)):
        triangle = torch.linalg.qr(right, mode="r")[1]  # (H, D, D)
        yield torch.linalg.svdvals((left @ triangle.mT).transpose(0, 1).flatten(1))


def _slice_gram(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of all slices a b^T, (H, H)."""
    left = torch.einsum("hxd,gxe->hgde", a, a)
    right = torch.einsum("hxd,gxe->hgde", b, b)
    return (left * right).sum((-2, -1))
