"""Nystrom attention: attend through a few landmark queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from numattn.core import linalg
from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, fold, one_of, positive, prepare, unfold
from numattn.core.linalg import segment_means
from numattn.core.method import Method
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.engines.lift import lift, split_points
from numattn.engines.softmax import fused_attention, key_bias, softmax_attention, softmax_partial

INFO = Info(
    name="nystrom",
    family="lowrank",
    summary="softmax blocks over segment means, joined by a regularised inverse (Nystromformer)",
    paper="https://arxiv.org/abs/2102.03902",
    complexity="N m (d + e) + m^3",
    budget="num_landmarks",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    decode=False,
    normalised=False,
)

RIDGE = 0.02  # of pinv="ridge" when none is given
ITERATIONS = 6  # of pinv="newton" when none is given, as in the paper

_RIDGE_ORDER = 3
_TILE = 256  # rows of a tile in the exact causal blocks, computed whole across the diagonal
_KINDS = ("ridge", "exact", "newton")

Inverse = Callable[[Tensor, Tensor], Tensor]  # (A, y) -> A^+ y, (..., m, m), (..., m, E)


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_landmarks: int = 64,
    pinv: Literal["ridge", "exact", "newton"] = "ridge",
    ridge: float | None = None,
    num_iterations: int | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Nystrom approximation of softmax attention (Nystromformer).

    Queries and keys are cut into m consecutive segments, whose means :math:`\tilde q, \tilde k` are
    the landmarks. With the softmax taken along rows and scale left out,

    .. math:: F = \mathrm{softmax}(q \tilde k^T), \quad A = \mathrm{softmax}(\tilde q \tilde k^T),
              \quad B = \mathrm{softmax}(\tilde q k^T), \quad \mathrm{out} = F A^+ (B v).

    A is often nearly singular: the plain pseudo-inverse then amplifies what F and B do not share,
    and the output can be wrong by orders of magnitude. ``pinv`` chooses what stands for
    :math:`A^+`; ``"ridge"`` turns each singular value s into
    :math:`s^{-1} (1 - (\rho^2 / (s^2 + \rho^2))^3)`, with :math:`\rho` the fraction ``ridge`` of
    :math:`\sqrt{|A|_1 |A|_\infty} \ge |A|_2`. This is Tikhonov's inverse, iterated three times:
    s = 10 rho is inverted up to 1e-6.

    Causal calls are lifted: the tokens are cut at 512 times a power of two, the later ones attend
    to all of the earlier ones through the landmarks of these, and so on down to blocks of 512
    tokens, which are exact. Query landmarks of such a block are means of the earlier queries,
    for a mean of the later ones would let a row see queries after it. Blocks are merged by their
    mass, taken to be :math:`\sum_s n_s e^{q \cdot \tilde k_s}` with n_s keys in segment s; by
    Jensen's inequality it is at most the true mass, and it is equal where the keys of every
    segment coincide. The paper has no causal form: this one is of this library.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_landmarks: m, positive. Segments differ in length by one token at most; with fewer
            tokens than m each token is a landmark.
        pinv: ``"ridge"`` as above, ``"exact"`` (the Moore-Penrose inverse up to the precision of
            the type) or ``"newton"`` (the paper's fourth-order iteration from
            :math:`A^T / (|A|_1 |A|_\infty)`, each matrix with its own norms).
        ridge: Of ``"ridge"`` only: from 1e-6 to 1; None is 0.02.
        num_iterations: Of ``"newton"`` only, positive; None is 6, as in the paper. Six have not
            converged, which regularises.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both, and padding enters no landmark.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Every query head has query landmarks of its own.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: 2 (Nq + Nk) m (D + E) operations per query head and O(m^3) for the inverse. A causal call
    takes 2 LEAF (D + E) per row for the exact blocks, LEAF = 512, and about half of the former for
    each of log2(N / LEAF) levels.

    Exact when: every token is a landmark, m >= Nq = Nk, and ``pinv="exact"``; or every segment has
    equal queries and equal keys and A is inverted exactly. Causal calls are exact up to 512 tokens.

    Limits: rows do not sum to one and weights may be negative; no error bound is known. Fails on
    attention that is far from low rank. ``"exact"`` is for theory: on smooth sequences its error
    grows without limit as m does. ``"newton"`` amplifies rounding by 3.25 in each iteration where
    A is singular, so many iterations suit regular matrices only. The products of the inverse are in
    float64 for ``"ridge"``.

    Raises:
        Unsupported: A mask other than key padding.
        ValueError: ``ridge`` or ``num_iterations`` is given to another ``pinv`` than its own.

    References:
        Y. Xiong et al., "Nystromformer: A Nystrom-Based Algorithm for Approximating
        Self-Attention", 2021, https://arxiv.org/abs/2102.03902.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> nystrom_attention(q, k, v, num_landmarks=10).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(num_landmarks, pinv, ridge, num_iterations)
    if x.empty:
        return x.nothing()
    inverse = _inverse(pinv, ridge, num_iterations)
    if is_causal:
        return x.restore(lift(x, partial(_block, num_landmarks=num_landmarks, inverse=inverse)))
    kt, y, _, present = _landmarks(x, num_landmarks, inverse)
    return _softmax(unfold(x.q, x.group), kt, y, x.scale, present).to(x.dtype)


def _block(q: Tensor, x: Inputs, num_landmarks: int, inverse: Inverse) -> Partial:
    """Folded rows `q` attending to all keys of x, whose queries give the query landmarks."""
    kt, y, counts, present = _landmarks(x, num_landmarks, inverse)
    counts = counts[..., None].expand(*y.shape[:3], 1)
    columns = torch.cat([y, counts], -1)  # the sums for the output, and the one for the mass
    part = softmax_partial(unfold(q, x.group), kt, columns, scale=x.scale, bias=present)
    mass = fold(part.num[..., -1:], x.group)
    out = fold(part.out()[..., :-1], x.group)
    return Partial(out * mass, mass[..., 0], fold(part.shift[..., None], x.group)[..., 0])


def _landmarks(
    x: Inputs, num_landmarks: int, inverse: Inverse
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Landmark keys (B, H, m, D), values A^+ (B v) (B, H, m, E), counts, bias of empty ones."""
    padding = None if x.query_padding is None else x.padding  # of queries, by position
    m = min(num_landmarks, max(x.q.shape[2] // x.group, x.k.shape[2]))
    qt, nq = segment_means(unfold(x.q, x.group), m, padding)  # (B, H, m, D), (B or 1, 1, m)
    kt, nk = segment_means(x.k, m, x.padding)  # (B, Hk, m, D), (B or 1, 1, m)
    present = None if m <= x.k.shape[2] and x.padding is None else key_bias(nk > 0, kt)
    rows = fold(qt, x.group)
    b_v = _softmax(rows, x.k, x.v, x.scale, key_bias(x.padding, kt))
    eye = torch.eye(m, dtype=kt.dtype, device=kt.device).expand(*kt.shape[:2], m, m)
    a, _ = softmax_attention(rows, kt, eye, scale=x.scale, bias=present)
    a = unfold(a, x.group) * (nq > 0)[..., None]  # (B, H, m, m), zero where a landmark is empty
    y = inverse(a, unfold(b_v, x.group))
    return kt.repeat_interleave(x.group, 1), y, nk, present


def _softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Softmax attention, by torch's fused form where that serves."""
    out = None if bias is not None else fused_attention(q, k, v, is_causal=False, scale=scale)
    return softmax_attention(q, k, v, scale=scale, bias=bias)[0] if out is None else out


def _inverse(pinv: str, ridge: float | None, num_iterations: int | None) -> Inverse:
    if pinv == "exact":
        return lambda a, y: linalg.pinv(a) @ y
    if pinv == "newton":
        return partial(_newton, num_iterations=num_iterations or ITERATIONS)
    return partial(_ridge, ridge=ridge or RIDGE)


def _ridge(a: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Iterated Tikhonov: x <- x + (A^T A + rho^2 I)^-1 A^T (y - A x), from zero."""
    a, b = a.double(), y.double()
    rho2 = ridge**2 * _norms(a)
    gram = a.mT @ a + rho2 * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    factor, _ = torch.linalg.cholesky_ex(gram)
    x = torch.cholesky_solve(a.mT @ b, factor)
    for _ in range(_RIDGE_ORDER - 1):
        x = x + torch.cholesky_solve(a.mT @ (b - a @ x), factor)
    # The solver's result lies by columns, which torch's fused attention does not take.
    return x.to(y.dtype).contiguous()


def _newton(a: Tensor, y: Tensor, num_iterations: int) -> Tensor:
    """Fourth-order iteration for A^+, which converges since every |A Z_0| <= 1."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = a.mT / _norms(a)
    for _ in range(num_iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z @ y


def _norms(a: Tensor) -> Tensor:
    """|A|_1 |A|_inf >= |A|_2^2 of nonnegative matrices, (..., 1, 1); 1 where A is zero."""
    norms = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)
    return norms.masked_fill(norms == 0, 1.0)[..., None, None]


def _check_options(
    num_landmarks: int, pinv: str, ridge: float | None, num_iterations: int | None
) -> None:
    positive(INFO.name, "num_landmarks", num_landmarks)
    one_of(INFO.name, "pinv", pinv, _KINDS)
    for option, given, owner in (
        ("ridge", ridge, "ridge"),
        ("num_iterations", num_iterations, "newton"),
    ):
        if given is not None and pinv != owner:
            raise ValueError(
                f"nystrom: {option} is for pinv={owner!r}; got {option}={given!r} with "
                f"pinv={pinv!r}. Leave it None."
            )
    if ridge is not None and not 1e-6 <= ridge <= 1:
        raise ValueError(
            f"nystrom: ridge must be from 1e-6 to 1; got {ridge!r}. pinv='exact' does without."
        )
    if num_iterations is not None:
        positive(INFO.name, "num_iterations", num_iterations)


@register
@dataclass(frozen=True)
class Nystrom(Method):
    """Options of `nystrom_attention`."""

    num_landmarks: int = 64
    pinv: Literal["ridge", "exact", "newton"] = "ridge"
    ridge: float | None = None
    num_iterations: int | None = None
    info = INFO
    function = staticmethod(nystrom_attention)

    def __post_init__(self) -> None:
        _check_options(self.num_landmarks, self.pinv, self.ridge, self.num_iterations)

    def exact_at(self, length: int) -> Nystrom:
        return replace(self, num_landmarks=length, pinv="exact", ridge=None, num_iterations=None)

    def cost(self, shape: Shape) -> Cost:
        d, e = shape.head_dim, shape.value_dim
        leaves: list[int] = []
        blocks = [(shape.queries, shape.keys)]
        if shape.is_causal:
            leaves, blocks = split_points(shape.keys)
        flops = sum(n * (n + min(n, _TILE)) * (d + e) for n in leaves)
        flops += sum(self._block_flops(*block, d, e) for block in blocks)
        units = min(self.num_landmarks, shape.queries, shape.keys)
        return Cost(shape.batch * shape.heads * flops, shape.io, None, units=units)

    def _block_flops(self, rows: int, keys: int, d: int, e: int) -> int:
        """Products of one block and head; factorisations come on top."""
        m = min(self.num_landmarks, max(rows, keys))
        inverse = {
            "ridge": 2 * m**3 + (4 * _RIDGE_ORDER - 2) * m * m * e,
            "exact": 4 * m**3 + 2 * m * m * e,
            "newton": 8 * m**3 * (self.num_iterations or ITERATIONS) + 2 * m * m * e,
        }[self.pinv]
        return 2 * (rows + keys) * m * (d + e) + 2 * m * m * (d + m) + inverse
