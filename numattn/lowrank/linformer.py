"""Linformer: softmax attention over r fixed mixtures of the keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, one_of, positive, prepare
from numattn.core.linalg import draw, segment_means
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.engines.softmax import fused_attention, softmax_attention

INFO = Info(
    name="linformer",
    family="lowrank",
    summary="softmax over r fixed mixtures of the keys, drawn or learned (Linformer)",
    paper="https://arxiv.org/abs/2006.04768",
    complexity="N r (d + e)",
    budget="rank",
    approximates="own",
    causal="no",
    why_not_causal="every mixture of keys holds tokens of all positions",
    mask="padding",
    decode=False,
    needs="training",
    random=True,
    normalised=False,
    state_tensors=("key_projection", "value_projection"),
    exceptions={
        "equal_keys_give_the_mean": "Rows of a drawn or learned E and F do not sum to one: equal "
        "keys become unequal mixtures, and the mixed values are no means."
    },
)

_CHUNK = 512  # positions drawn at a time: always the same number, so that longer draws go on
_KINDS = ("gaussian", "segments")
_SHARING = ("none", "heads", "key_value")


def linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int = 64,
    projection: Literal["gaussian", "segments"] = "gaussian",
    key_projection: Tensor | None = None,
    value_projection: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    r"""Attention over r mixtures of the keys (Linformer).

    Matrices E and F of r rows, with a column for each position, mix the keys and the values:

    .. math:: \mathrm{out} = \mathrm{softmax}(\mathrm{scale}\; q (E k)^T)\, (F v).

    E and F are meant to be learned with the model, see `LinformerAttention`. Without them
    ``"gaussian"`` draws what learning starts from: independent entries N(0, 1/r), so that
    :math:`|E x|^2` has the mean :math:`|x|^2` (Johnson and Lindenstrauss).

    ``"segments"`` is a form for models trained with softmax: E = F takes the means of r consecutive
    segments of tokens, and the logits get log n_s, with n_s tokens in segment s. It weighs a
    segment by :math:`n_s e^{\mathrm{scale}\, q \cdot \bar k_s}`, by Jensen's inequality at most
    its true weight. The paper has no such form: this one is of this library.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        rank: r, positive.
        projection: ``"gaussian"`` or ``"segments"``, as above. The tensors below are of
            ``"gaussian"`` only, and so is the draw.
        key_projection: E, (Hk, r, L), or (1, r, L) for all heads, with L >= Nk. Column t is of
            token t, counted among the tokens that exist; columns that are left over are not used.
            Drawn when None, token t getting the same column whatever the length.
        value_projection: F, of the like shape. It is given together with E, and may be E.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Refused: a mixture holds tokens of all positions.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. A group shares the mixtures of its key head.
        generator: Source of the draw; torch's global one when None.

    Returns:
        (B, H, Nq, E), in the query's type; zeros where there is no key.

    Cost: 2 Nk r (D + E) operations per key head to mix, for segments none, and 2 Nq r (D + E) per
    query head. E and F are 2 r Nk numbers per key head, more than keys and values if 2 r > D + E.

    Exact when: ``"segments"`` with r >= Nk, or with equal keys in every segment; or given E = F
    that hold a permutation.

    Limits: this is an attention of its own, not an approximation of softmax: what drawn E and F
    give has nothing to do with it, and the weights of a row do not sum to one. Drawn logits grow as
    (Nk / r) ** 0.5, for mixtures of more keys are longer. What is learned belongs to positions, up
    to the length that was learned for. No causal form and no decoding: every token enters all r
    mixtures. ``"segments"`` has rows that sum to one, but averages away a key that is unlike its
    neighbours.

    Raises:
        Unsupported: A causal call, or a mask other than key padding.
        ValueError: An option is not of the range above; only one of E and F is given, or either
            with ``"segments"``; or their shape does not fit, as with more keys than columns.

    References:
        S. Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020,
        https://arxiv.org/abs/2006.04768.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> linformer_attention(q, k, v, rank=10).shape
        torch.Size([1, 2, 100, 8])
        >>> tensors = Linformer(rank=10).fit(q, k, v)
        >>> linformer_attention(q, k, v, rank=10, **tensors).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(rank, projection)
    given = _given(x, rank, projection, key_projection, value_projection)
    if x.empty:
        return x.nothing()
    if projection == "segments":
        return x.restore(_attend(x, *_segments(x, rank)))
    e, f = given or _draw(x.k.shape[1], rank, x.k.shape[2], generator, x.k)
    past, _ = x.compact()  # the rows of x stay where they are: no query's position matters
    return x.restore(_attend(x, _mix(e, past.k, past.padding), _mix(f, past.v, past.padding)))


def _attend(x: Inputs, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax over r keys (B, Hk, r, D), by torch's fused form where that serves."""
    out = None if bias is not None else fused_attention(x.q, k, v, is_causal=False, scale=x.scale)
    return softmax_attention(x.q, k, v, scale=x.scale, bias=bias)[0] if out is None else out


def _mix(e: Tensor, y: Tensor, padding: Tensor | None) -> Tensor:
    """E y: (Hk or 1, r, L), (B, Hk, Nk, D) -> (B, Hk, r, D); what does not exist counts as zero."""
    if padding is not None:
        y = y.masked_fill(~padding[..., None], 0.0)
    # A product of matrices would copy E for every entry of the batch.
    return torch.einsum("hrn,bhnd->bhrd", e[..., : y.shape[2]].to(y), y)


def _segments(x: Inputs, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean keys and values of segments, (B, Hk, r, D) and (B, Hk, r, E), and log counts."""
    r = min(rank, x.k.shape[2])
    kt, counts = segment_means(x.k, r, x.padding)
    vt, _ = segment_means(x.v, r, x.padding)
    equal = x.padding is None and x.k.shape[2] % r == 0
    return kt, vt, None if equal else counts.log()


@torch.no_grad()
def _draw(
    heads: int, rank: int, length: int, generator: Generator | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """E and F, (heads, r, L) each, with L the least multiple of `_CHUNK` >= length."""
    chunks = [
        (draw((2, heads, rank, _CHUNK), generator, like.device) * rank**-0.5).to(like)
        for _ in range(0, max(length, 1), _CHUNK)
    ]
    e, f = (torch.cat(parts, 2) for parts in zip(*chunks, strict=True))
    return e, f


def _given(
    x: Inputs, rank: int, projection: str, e: Tensor | None, f: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """The tensors that were given, checked; None when none was."""
    if e is None and f is None:
        return None
    if projection == "segments":
        raise ValueError(
            "linformer: projection='segments' takes no key_projection and no value_projection. "
            "Leave them None, or pass projection='gaussian' to use them."
        )
    if e is None or f is None:
        missing = "key_projection" if e is None else "value_projection"
        raise ValueError(
            "linformer: pass key_projection and value_projection together, or none of them to "
            f"draw both; missing {missing}. One tensor may be passed as both."
        )
    heads, length = x.k.shape[1:3]
    for name, tensor in (("key_projection", e), ("value_projection", f)):
        if tensor.dim() != 3 or tensor.shape[0] not in (1, heads) or tensor.shape[1] != rank:
            raise ValueError(
                f"linformer: {name} must have shape ({heads}, {rank}, L) or (1, {rank}, L), "
                f"with L >= {length}; got {tuple(tensor.shape)}."
            )
        if tensor.shape[2] < length:
            raise ValueError(
                f"linformer: {name} has {tensor.shape[2]} columns and there are {length} keys, "
                "padding counted. Pass one with a column for each of them (LinformerAttention "
                "makes max_length of them), or fewer keys."
            )
    return e, f


def _check_options(rank: int, projection: str) -> None:
    positive(INFO.name, "rank", rank)
    one_of(INFO.name, "projection", projection, _KINDS)


@register
@dataclass(frozen=True)
class Linformer(Method):
    """Options of `linformer_attention`."""

    rank: int = 64
    projection: Literal["gaussian", "segments"] = "gaussian"
    info = INFO
    function = staticmethod(linformer_attention)

    def __post_init__(self) -> None:
        _check_options(self.rank, self.projection)

    def exact_at(self, length: int) -> Linformer:
        return replace(self, rank=length, projection="segments")

    def cost(self, shape: Shape) -> Cost:
        r, units = self.rank, min(self.rank, shape.keys)
        width, keys = shape.head_dim + shape.value_dim, shape.kv_heads * shape.keys
        if self.projection == "segments":
            return Cost(2 * shape.rows * units * width, shape.io, None, units=units)
        flops = 2 * (shape.rows + shape.batch * keys) * r * width
        weights = 2 * keys * r * max(shape.itemsize, 4)  # E and F
        return Cost(flops, shape.io + weights, None, units=units)

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
        """E and F as the function would draw them, (Hk, r, L), in the type it computes in.

        They come in whole chunks of 512 columns, so there are some for padding and a few tokens
        more. There are none of ``"segments"``.
        """
        x = prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa)
        if self.projection == "segments":
            return {}
        drawn = _draw(x.k.shape[1], self.rank, x.k.shape[2], generator, x.k)
        return dict(zip(INFO.state_tensors, drawn, strict=True))

    def module(self, *, num_heads: int, head_dim: int) -> LinformerAttention:
        return LinformerAttention(num_heads=num_heads, head_dim=head_dim, **self.options())


class LinformerAttention(AttentionModule):
    """`linformer_attention` with E and F that are learned.

    Parameters: ``key_projection`` and ``value_projection``, (Hk, r, L) or, shared by the heads,
    (1, r, L), with L = ``max_length``; ``value_projection`` is None where E = F. They start with
    entries N(0, 1/r), as in the paper.
    """

    key_projection: nn.Parameter
    value_projection: nn.Parameter | None

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        max_length: int = 512,
        sharing: Literal["none", "heads", "key_value"] = "none",
        share_with: LinformerAttention | None = None,
        generator: Generator | None = None,
        **options: Any,
    ) -> None:
        """Draw E and F, or take those of another layer.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D. E and F have the same shape for every width.
            max_length: L, the most keys that can be attended to, padding counted.
            sharing: ``"none"`` (E and F for every head), ``"heads"`` (one E and one F for all
                heads) or ``"key_value"`` (one E = F for all heads).
            share_with: Another layer, whose parameters this one uses, the same objects. With
                ``sharing="key_value"`` in both this is the layerwise sharing of the paper.
            generator: Source of the draw; torch's global one when None.
            **options: Options of `Linformer`.

        Raises:
            ValueError: An argument is not of the range above, ``projection="segments"``, which
                has no tensors, or ``share_with`` has parameters of another shape or sharing.
        """
        super().__init__()
        self.options = Linformer(**options)
        positive(INFO.name, "num_heads", num_heads)
        positive(INFO.name, "head_dim", head_dim)
        positive(INFO.name, "max_length", max_length)
        one_of(INFO.name, "sharing", sharing, _SHARING)
        if self.options.projection == "segments":
            raise ValueError(
                "linformer: projection='segments' has no tensors to learn; call the record or "
                "linformer_attention, or make the module with projection='gaussian'."
            )
        self.sharing = sharing
        shape = (num_heads if sharing == "none" else 1, self.options.rank, max_length)
        if share_with is not None:
            self._share(share_with, shape, generator)
            return
        self.key_projection = nn.Parameter(torch.empty(shape))
        both = sharing != "key_value"
        self.value_projection = nn.Parameter(torch.empty(shape)) if both else None
        self.redraw(generator)

    def _share(
        self, other: LinformerAttention, shape: tuple[int, ...], generator: Generator | None
    ) -> None:
        theirs = tuple(other.key_projection.shape)
        if other.sharing != self.sharing or theirs != shape:
            raise ValueError(
                f"linformer: share_with has parameters of shape {theirs} and "
                f"sharing={other.sharing!r}; this layer needs {shape} and {self.sharing!r}. Make "
                "both with the same num_heads, rank, max_length and sharing."
            )
        if generator is not None:
            raise ValueError("linformer: with share_with nothing is drawn; leave generator None.")
        self.key_projection = other.key_projection
        self.value_projection = other.value_projection

    @torch.no_grad()
    def redraw(self, generator: Generator | None = None) -> None:
        """Start again from new random entries, also in layers that share them."""
        heads, rank, length = self.key_projection.shape
        e, f = _draw(heads, rank, length, generator, self.key_projection)
        self.key_projection.copy_(e[..., :length])
        if self.value_projection is not None:
            self.value_projection.copy_(f[..., :length])

    def tensors(self) -> dict[str, Tensor]:
        f = self.key_projection if self.value_projection is None else self.value_projection
        return {"key_projection": self.key_projection, "value_projection": f}
