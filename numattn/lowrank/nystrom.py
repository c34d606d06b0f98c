"""Nystrom attention: attend through a few landmark queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numattn.core import linalg
from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, fold, one_of, positive, prepare, unfold
from numattn.core.linalg import finite
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.partial import Partial
from numattn.core.registry import register
from numattn.engines.lift import leaf_flops, lift, split_points
from numattn.engines.softmax import key_bias, softmax_attention, softmax_partial
from numattn.lowrank.landmarks import (
    KEYS,
    LLOYD,
    PILOTS,
    RIDGE_STEPS,
    Given,
    Landmarks,
    check_given,
    find,
    newton_inverse,
    ridge_inverse,
    shrinkage,
)

INFO = Info(
    name="nystrom",
    family="lowrank",
    summary="softmax blocks over landmarks, joined by a regularised inverse (Nystromformer)",
    paper="https://arxiv.org/abs/2102.03902",
    complexity="N m (d + e) + m^3",
    budget="num_landmarks",
    approximates="softmax",
    causal="lifted",
    mask="padding",
    decode=False,
    state_tensors=("query_landmarks", "key_landmarks", "conv"),
)

RIDGE = 0.02  # of pinv="ridge" when none is given
ITERATIONS = 6  # of pinv="newton" when none is given, as in the paper
ORDER = 4  # the same

_NONE = -1e30  # the bias of what does not exist


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_landmarks: int = 64,
    landmarks: Literal["segments", "kmeans"] = "segments",
    pinv: Literal["ridge", "exact", "newton"] = "ridge",
    ridge: float | None = None,
    num_iterations: int | None = None,
    order: Literal[3, 4] | None = None,
    guard: bool = True,
    query_landmarks: Tensor | None = None,
    key_landmarks: Tensor | None = None,
    conv: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Nystrom approximation of softmax attention (Nystromformer).

    Queries and keys are cut into m groups, whose means :math:`\tilde q, \tilde k` are the
    landmarks; :math:`n_s` keys are in group s. With the softmax taken along rows, scale left out
    and :math:`\bar v` the mean of the values,

    .. math:: F = \mathrm{softmax}(q \tilde k^T + \log n), \quad
              A = \mathrm{softmax}(\tilde q \tilde k^T + \log n), \quad
              B = \mathrm{softmax}(\tilde q k^T),

    .. math:: \mathrm{out} = \bar v + \alpha\, F A^+ B\, (v - \bar v).

    The paper has :math:`F A^+ B v`, and groups of one size, where log n is a constant and changes
    nothing. Attention commutes with a shift of the values, and so does the formula where A is
    inverted exactly; subtracting :math:`\bar v` makes rows sum to one for every inverse.

    A is often nearly singular: the plain pseudo-inverse then amplifies what F and B do not share,
    and the output can be wrong by orders of magnitude. ``pinv`` chooses what stands for
    :math:`A^+`; ``"ridge"`` turns each singular value s into
    :math:`s^{-1} (1 - (\rho^2 / (s^2 + \rho^2))^3)`, with :math:`\rho` the fraction ``ridge`` of
    :math:`\sqrt{|A|_1 |A|_\infty} \ge |A|_2`. This is Tikhonov's inverse, iterated three times:
    s = 10 rho is inverted up to 1e-6. `nystrom_condition` tells how singular A is.

    No inverse is enough by itself. :math:`F A^+` is a regression on the softmax rows of the
    landmark queries, and where logits are large these are flatter than the rows of single queries:
    the regression is used outside of what it has seen. The ``guard`` therefore compares the
    weights :math:`\hat P` of up to 63 queries with their exact ones P, over up to 512 keys alone,
    both evenly spaced, and scales what differs from the mean by

    .. math:: \alpha = \min(1, c^2\, |P'| / |\hat P'|), \qquad
              c = \max(0, \langle \hat P', P' \rangle / (|\hat P'|\, |P'|)),

    primes standing for the difference from equal weights. The factor that fits best has c in place
    of :math:`c^2`; the other c is for caution, since it is the values that count and the fit does
    not see them. With up to 63 queries and 512 keys, the weights of a call that is not causal are
    thus no further from the exact ones than equal weights are, in the Frobenius norm; with more it
    is an estimate. Exact limits stay exact, with c = 1. All three squares are raised by the
    precision of the type times that of equal weights, so that :math:`\alpha` is 1, and not 0 / 0,
    where both vanish.

    Causal calls are lifted: the tokens are cut at 512 times a power of two, the later ones attend
    to all of the earlier ones through the landmarks of these, and so on down to blocks of 512
    tokens, which are exact. Query landmarks and the guard's queries come from the earlier tokens,
    for the later ones would let a row see queries after it. Blocks are merged by their mass, taken
    to be :math:`\sum_s n_s e^{q \cdot \tilde k_s}`, the denominator of F; by Jensen's inequality
    it is at most the true mass if every landmark is the mean of its keys, and it is equal where
    these coincide. The paper has no causal form: this one is of this library.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_landmarks: m, positive. With fewer tokens than m each token is a landmark.
        landmarks: What the groups are: ``"segments"``, consecutive tokens, whose lengths differ by
            one at most, or ``"kmeans"``, clusters of the queries and clusters of the keys, by three
            iterations from evenly spaced tokens. Groups without a token count for nothing.
        pinv: ``"ridge"`` as above, ``"exact"`` (Moore-Penrose: singular values below m eps times
            the largest, eps being the precision of the type, count as zero) or ``"newton"`` (the
            paper's iteration from :math:`A^T / (|A|_1 |A|_\infty)`, each matrix with its own
            norms).
        ridge: Of ``"ridge"`` only: from 1e-6 to 1; None is 0.02.
        num_iterations: Of ``"newton"`` only, positive; None is 6, as in the paper. Six have not
            converged, which regularises.
        order: Of ``"newton"`` only, products of matrices in an iteration: 4 is
            :math:`Z (13 - AZ (15 - AZ (7 - AZ))) / 4`, as in the paper, and 3 is
            :math:`Z (3 - AZ (3 - AZ))`. Both converge cubically: :math:`R = I - AZ` becomes
            :math:`R^3 (3 + R) / 4` or :math:`R^3`. None is 4.
        guard: Whether to shrink towards the mean as above; False leaves :math:`\alpha` at 1.
        query_landmarks: :math:`\tilde q`, (H, m, D) or (B, H, m, D); found in the batch when None.
        key_landmarks: :math:`\tilde k`, (Hk, m, D) or (B, Hk, m, D). The two are given together or
            not at all; :math:`n_s` is then the number of keys that are nearest to landmark s, of
            the earlier ones in a causal block, and a landmark that is nearest to none is left out.
        conv: The paper's skip connection, (H, taps) with an odd number of taps: each query head
            adds the convolution of its key head's values along the tokens by its own kernel,
            centred on the row; in a causal call the last tap is on the row and the others on
            tokens before it. None adds nothing.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend. Where queries and keys are equally
            many it speaks of both, and padding enters no landmark.
        is_causal: Position i attends to positions j <= i.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk. Every query head has query landmarks of its own.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: 2 (Nq + Nk) m (D + E) operations per query head and O(m^3) for the inverse; 2 (m + 63) 512
    (D + 63) for the guard. k-means adds 6 m D per query and per key, given landmarks 2 m D per
    key, ``conv`` 2 taps E per query. A causal call takes 2 LEAF (D + E) per row for the exact
    blocks, LEAF = 512, and about half of the former for each of log2(N / LEAF) levels.

    Exact when: every token is a landmark, m >= Nq = Nk, and ``pinv="exact"``; or every group has
    equal queries and equal keys and A is inverted exactly. Causal calls are exact up to 512 tokens.
    With ``conv``, up to what it adds.

    Limits: weights may be negative; no error bound is known. Fails on attention that is far from
    low rank: then the guard leaves little but the mean. :math:`\alpha` is one number for each head,
    found without the values, and an estimate beyond 63 queries or 512 keys. Without the guard
    ``"exact"`` is for theory: on smooth sequences its error grows without limit as m does.
    ``"newton"`` amplifies rounding by 3.25 (order 3: by 3) in each iteration where A is singular,
    so many iterations suit regular matrices only. The products of the inverse are in float64 for
    ``"ridge"``. Clusters and counts are constants for autograd. With ``conv`` rows do not sum to
    one.

    Raises:
        Unsupported: A mask other than key padding, or ``conv`` with Nq other than Nk.
        ValueError: ``ridge``, ``num_iterations`` or ``order`` is given to another ``pinv`` than its
            own, ``landmarks="kmeans"`` comes with given landmarks, only one of the two is given,
            or the shape of a tensor does not fit.

    References:
        Y. Xiong et al., "Nystromformer: A Nystrom-Based Algorithm for Approximating
        Self-Attention", 2021, https://arxiv.org/abs/2102.03902.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> nystrom_attention(q, k, v, num_landmarks=10).shape
        torch.Size([1, 2, 100, 8])
        >>> kernel = torch.zeros(2, 33)
        >>> nystrom_attention(q, k, v, num_landmarks=10, conv=kernel, is_causal=True).shape
        torch.Size([1, 2, 100, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = Nystrom(num_landmarks, landmarks, pinv, ridge, num_iterations, order, guard)
    given = check_given(x, num_landmarks, landmarks, query_landmarks, key_landmarks)
    _check_conv(x, conv)
    if x.empty:
        return x.nothing()
    out = lift(x, partial(_block, options, given)) if is_causal else _whole(options, given, x)
    return x.restore(out if conv is None else out + _convolution(x, conv))


@torch.no_grad()
def nystrom_condition(
    query: Tensor,
    key: Tensor,
    *,
    num_landmarks: int = 64,
    landmarks: Literal["segments", "kmeans"] = "segments",
    query_landmarks: Tensor | None = None,
    key_landmarks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Condition numbers of the landmark matrices A that `nystrom_attention` inverts.

    The largest singular value over the smallest, of the rows and columns whose landmarks exist, in
    float64. Rounding and all that :math:`F A^+ B` does not share with attention may be amplified
    by it. ``pinv="exact"`` counts singular values below m eps times the largest as zero, eps being
    1.2e-7 for half precision and float32: condition numbers above 1 / (m eps) mean that it drops
    directions, and it amplifies by up to 1 / (m eps). The default, ``pinv="ridge"``, keeps the norm
    of what stands for :math:`A^+` below 1.01 / rho, whatever the condition number: it amplifies by
    at most 1.01 / ``ridge``, 51 as it is set.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        num_landmarks: As in `nystrom_attention`, and so are the others.
        landmarks: ``"segments"`` or ``"kmeans"``.
        query_landmarks: (H, m, D) or (B, H, m, D).
        key_landmarks: (Hk, m, D) or (B, Hk, m, D).
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        scale: Factor of the logits, default D ** -0.5.
        enable_gqa: Allow H to be a multiple of Hk.

    Returns:
        (B, H), float64, from 1 to infinity; 0 where no landmark exists. Not differentiable.

    Cost: O(m^3) beside the landmarks.

    Raises:
        Unsupported: A mask other than key padding.
        ValueError: As in `nystrom_attention`.

    Example:
        >>> q = k = torch.eye(8)[None, None]
        >>> print(f"{nystrom_condition(q, k, num_landmarks=8, scale=20.0).item():.4f}")
        1.0000
    """
    x = prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa)
    options = Nystrom(num_landmarks, landmarks)
    given = check_given(x, num_landmarks, landmarks, query_landmarks, key_landmarks)
    if x.empty:
        return torch.zeros(query.shape[:2], dtype=torch.float64, device=query.device)
    x = replace(x, q=x.q.double(), k=x.k.double())
    found = options.find(x, given)
    sigma = torch.linalg.svdvals(found.matrix(x.scale))
    rows, columns = found.exists.sum(-1), (found.bias > _NONE).sum(-1)
    count = torch.minimum(rows, columns).expand(sigma.shape[:2])[..., None]
    least = sigma.gather(-1, (count - 1).clamp(min=0))
    return torch.where(count > 0, sigma[..., :1] / least, 0.0)[..., 0]


def _through(options: Nystrom, given: Given | None, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Landmark keys (B, H, m, D), what F weighs (B, H, m, E), and the bias of the keys."""
    landmarks = options.find(x, given)
    rows = fold(landmarks.q, x.group)
    b_v = unfold(_softmax(rows, x.k, x.v, x.scale, key_bias(x.padding, x.k)), x.group)
    mean = linalg.masked_mean(x.v, x.padding).repeat_interleave(x.group, 1)
    inverse = options.inverse(landmarks.matrix(x.scale))
    y = inverse @ (b_v - mean)
    if options.guard:
        y = shrinkage(x, landmarks, inverse) * y
    return landmarks.k, y + mean, landmarks.bias


def _block(options: Nystrom, given: Given | None, q: Tensor, x: Inputs) -> Partial:
    """Folded rows `q` attending to all keys of x, whose queries give the query landmarks."""
    kt, y, bias = _through(options, given, x)
    part = softmax_partial(unfold(q, x.group), kt, y, scale=x.scale, bias=bias)
    den, shift = (fold(t[..., None], x.group)[..., 0] for t in (part.den, part.shift))
    return Partial(fold(part.num, x.group), den, shift)


def _whole(options: Nystrom, given: Given | None, x: Inputs) -> Tensor:
    """Every row against every key, (B, Hk, rows, E)."""
    kt, y, bias = _through(options, given, x)
    segments = given is None and options.landmarks == "segments"
    equal = segments and x.padding is None and x.k.shape[2] % kt.shape[2] == 0
    return fold(_softmax(unfold(x.q, x.group), kt, y, x.scale, None if equal else bias), x.group)


def _softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Softmax attention, by torch's fused form where the widths allow."""
    if q.shape[3] != v.shape[3]:
        return softmax_attention(q, k, v, scale=scale, bias=bias)[0]
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    # Torch does not promise zeros to rows that may attend to nothing.
    mask = finite(bias)
    v = v * (mask.amax(-1) > _NONE)[..., None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[..., None, :], scale=scale)


def _convolution(x: Inputs, conv: Tensor) -> Tensor:
    """Values convolved along the tokens that exist, (B, Hk, rows, E)."""
    taps = conv.shape[1]
    before = taps - 1 if x.is_causal else taps // 2
    compact, place = x.compact()
    v = compact.v
    if compact.padding is not None:
        v = v.masked_fill(~compact.padding[..., None], 0.0)
    v = F.pad(v, (0, 0, before, taps - 1 - before))
    out = F.conv2d(v, conv.to(v)[:, None, :, None], groups=v.shape[1])
    return x.move_back(fold(out, x.group), place)


def _check_conv(x: Inputs, conv: Tensor | None) -> None:
    if conv is None:
        return
    heads = x.shape[1]
    if conv.dim() != 2 or conv.shape[0] != heads or conv.shape[1] % 2 == 0:
        raise ValueError(
            f"nystrom: conv must have shape ({heads}, taps), one kernel for each query head with "
            f"an odd number of taps; got {tuple(conv.shape)}."
        )
    if x.shape[2] != x.k.shape[2]:
        raise Unsupported(
            "nystrom: conv runs along the tokens and needs as many queries as keys; got "
            f"{x.shape[2]} and {x.k.shape[2]}. Call without conv."
        )


@register
@dataclass(frozen=True)
class Nystrom(Method):
    """Options of `nystrom_attention`."""

    num_landmarks: int = 64
    landmarks: Literal["segments", "kmeans"] = "segments"
    pinv: Literal["ridge", "exact", "newton"] = "ridge"
    ridge: float | None = None
    num_iterations: int | None = None
    order: Literal[3, 4] | None = None
    guard: bool = True
    info = INFO
    function = staticmethod(nystrom_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "num_landmarks", self.num_landmarks)
        one_of(INFO.name, "landmarks", self.landmarks, ("segments", "kmeans"))
        one_of(INFO.name, "pinv", self.pinv, ("ridge", "exact", "newton"))
        for option, owner in (
            ("ridge", "ridge"),
            ("num_iterations", "newton"),
            ("order", "newton"),
        ):
            given = getattr(self, option)
            if given is not None and self.pinv != owner:
                raise ValueError(
                    f"nystrom: {option} is for pinv={owner!r}; got {option}={given!r} with "
                    f"pinv={self.pinv!r}. Leave it None."
                )
        if self.ridge is not None and not 1e-6 <= self.ridge <= 1:
            raise ValueError(
                f"nystrom: ridge must be from 1e-6 to 1; got {self.ridge!r}. pinv='exact' does "
                "without."
            )
        if self.num_iterations is not None:
            positive(INFO.name, "num_iterations", self.num_iterations)
        if self.order not in (None, 3, 4):
            raise ValueError(f"nystrom: order must be 3 or 4; got {self.order!r}.")
        if not isinstance(self.guard, bool):
            raise ValueError(f"nystrom: guard must be True or False; got {self.guard!r}.")

    def find(self, x: Inputs, given: Given | None) -> Landmarks:
        """Landmarks of a call."""
        return find(x, self.num_landmarks, self.landmarks, given)

    def inverse(self, a: Tensor) -> Tensor:
        """What stands for A^+: (..., m, m), of landmark matrices of that shape."""
        if self.pinv == "exact":
            return linalg.pinv(a)
        if self.pinv == "newton":
            return newton_inverse(a, self.num_iterations or ITERATIONS, self.order or ORDER)
        return ridge_inverse(a, self.ridge or RIDGE)

    def exact_at(self, length: int) -> Nystrom:
        return Nystrom(length, self.landmarks, pinv="exact", guard=self.guard)

    def cost(self, shape: Shape) -> Cost:
        d, e = shape.head_dim, shape.value_dim
        leaves: list[int] = []
        blocks = [(shape.queries, shape.keys)]
        if shape.is_causal:
            leaves, blocks = split_points(shape.keys)
        flops = leaf_flops(leaves, d + e)
        flops *= shape.batch * shape.heads
        flops += sum(self._block_flops(shape, *block) for block in blocks)
        units = min(self.num_landmarks, shape.queries, shape.keys)
        return Cost(flops, shape.io, None, units=units)

    def _block_flops(self, shape: Shape, rows: int, keys: int) -> int:
        """Products of one block; factorisations come on top."""
        d, e = shape.head_dim, shape.value_dim
        m, samples = min(self.num_landmarks, max(rows, keys)), keys if shape.is_causal else rows
        newton = 2 * (self.order or ORDER) * (self.num_iterations or ITERATIONS)
        flops = {"ridge": 2 + 2 * RIDGE_STEPS, "exact": 4, "newton": newton}[self.pinv] * m**3
        flops += 2 * (rows + keys) * m * (d + e) + 2 * m * m * (d + e)
        if self.guard:
            p, c = min(PILOTS, samples), min(KEYS, keys)
            flops += 2 * p * m * (d + m + c) + 2 * (m + p) * c * d
        flops *= shape.heads
        if self.landmarks == "kmeans":
            tokens = shape.heads * samples + shape.kv_heads * keys
            flops += 2 * LLOYD * tokens * m * d
        return shape.batch * flops

    def module(self, *, num_heads: int, head_dim: int) -> NystromAttention:
        return NystromAttention(num_heads=num_heads, head_dim=head_dim, **self.options())


class NystromAttention(AttentionModule):
    """`nystrom_attention` with the paper's convolution of the values, which is learned.

    Parameter: ``conv`` (H, conv_size), None where conv_size is. It starts at zero, so that the
    module starts as `nystrom_attention`.
    """

    conv: nn.Parameter | None

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_query_heads: int | None = None,
        conv_size: int | None = 33,
        **options: Any,
    ) -> None:
        """Make the kernels.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D; the kernels are the same for every width.
            num_query_heads: H, a multiple of Hk; None is Hk.
            conv_size: Taps of a kernel, odd; None is no convolution.
            **options: Options of `Nystrom`.
        """
        super().__init__()
        self.options = Nystrom(**options)
        positive(INFO.name, "num_heads", num_heads)
        positive(INFO.name, "head_dim", head_dim)
        heads = num_heads if num_query_heads is None else num_query_heads
        positive(INFO.name, "num_query_heads", heads)
        if heads % num_heads:
            raise ValueError(
                f"nystrom: num_query_heads must be a multiple of num_heads, {num_heads}; "
                f"got {heads}."
            )
        if conv_size is not None:
            positive(INFO.name, "conv_size", conv_size)
            if conv_size % 2 == 0:
                raise ValueError(f"nystrom: conv_size must be odd; got {conv_size}.")
        self.conv = None if conv_size is None else nn.Parameter(torch.zeros(heads, conv_size))

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.conv is None else {"conv": self.conv}
