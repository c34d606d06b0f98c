"""Gaussian-mixture attention (GMA): tokens meet in the components of a mixture of Gaussians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, positive, prepare
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, Feature, SlotsState, linear_attention
from numattn.engines.tiles import spans, tile_elements

INFO = Info(
    name="gma",
    family="latent",
    summary="responsibilities of a Gaussian mixture that queries and keys share",
    paper="https://arxiv.org/abs/2606.18283",
    complexity="N K (2 d + e)",
    budget="num_components",
    approximates="own",
    causal="native",
    mask="padding",
    scaled=False,
    fits_causal=True,
    state_tensors=("means", "log_var", "log_prior"),
)

_FLOOR = 1e-3  # smallest variance of a component, in mean variances of the tokens
_TINY = 1e-12  # the same where all tokens are equal


def gma_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_components: int = 128,
    num_iterations: int = 10,
    means: Tensor | None = None,
    log_var: Tensor | None = None,
    log_prior: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Gaussian-mixture attention.

    Each key head has a mixture of K Gaussians with diagonal covariances, which queries and keys
    share. Tokens are compared by their responsibilities, the posterior of the component:

    .. math:: \gamma_k(x) = \mathrm{softmax}_k\, \ell_k(x), \quad
              \ell_k(x) = \log \pi_k - \tfrac12 \sum_d
              \left[ (x_d - \mu_{kd})^2 / \sigma^2_{kd} + \log \sigma^2_{kd} \right],

    .. math:: o_i = \frac{\sum_j \sum_k \gamma_k(q_i)\, \gamma_k(k_j)\, v_j}
                         {\sum_j \sum_k \gamma_k(q_i)\, \gamma_k(k_j)}.

    The implied weights are not negative, sum to one in every row and have rank at most K. It is
    computed from logarithms throughout, as :math:`o_i = \mathrm{softmax}_k(\ell_k(q_i) +
    \log Z_k) \cdot M_k` with the slots :math:`Z_k = \sum_j \gamma_k(k_j)` and
    :math:`M_k = \sum_j \gamma_k(k_j)\, v_j / Z_k`, so densities may underflow at will. Queries
    and means are shifted by the average mean, which changes nothing but the rounding.

    Without tensors the mixture is fitted to the tokens of the batch, queries and keys together,
    by expectation maximisation (EM) from evenly spaced tokens. Every component is given one
    pseudo-token with the mean and the variances of all tokens, so none dies or collapses; no
    variance falls below a thousandth of the tokens' mean variance.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_components: K, positive.
        num_iterations: Steps of EM when the mixture is fitted, positive.
        means: :math:`\mu`, (Hk, K, D) or (B, Hk, K, D); fitted when None.
        log_var: :math:`\log \sigma^2`, shaped as ``means``; fitted when None.
        log_prior: :math:`\log \pi` up to a constant, (Hk, K) or (B, Hk, K), -inf removes a
            component; fitted when None. The three are given together or not at all.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i; needs the three tensors.
        scale: Must be None, for there are no logits to scale.
        enable_gqa: Allow H to be a multiple of Hk; the mixture is the key head's.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: 2 N K (2 D + E) operations for queries and for keys; causal adds 2 N CHUNK (K + E).
    Fitting adds 8 N K D for each step of EM. Decoding keeps K (E + 2) numbers per key head,
    whatever the length.

    Exact when: it is its own target. K = 1, or components that are all equal, give the mean of
    the values.

    Limits: it does not approximate softmax attention, and a mixture fitted without training
    routes by position in space, not by :math:`q \cdot k`. Log-densities differ by about D, so in
    wide heads the responsibilities of a fitted mixture are nearly one-hot: queries and keys then
    get hardly any gradient, and `GMAAttention` starts wide for that reason. Far from every mean
    the widest component takes all. In float32 a log-density is off by about 1e-7 times
    :math:`|x - c|^2 / \sigma^2`, c being the average mean. A fitted mixture is a constant for
    autograd. There is no epsilon in the denominator (the paper's epsilon is 0 here).

    Raises:
        Unsupported: A mask other than key padding, a ``scale``, or a causal call without tensors,
            since fitting on the batch would let the future in.
        ValueError: Only some of the three tensors are given, or their shapes do not fit.

    References:
        "Gaussian Mixture Attention", 2026, https://arxiv.org/abs/2606.18283.
        C. Fraley, A. E. Raftery, "Bayesian Regularization for Normal Mixture Estimation and
        Model-Based Clustering", 2007, https://doi.org/10.1007/s00357-007-0004-5.

    Example:
        >>> q = k = v = torch.randn(1, 2, 50, 8)
        >>> gma_attention(q, k, v, num_components=4).shape
        torch.Size([1, 2, 50, 8])
        >>> tensors = GMA(num_components=4).fit(q, k)
        >>> gma_attention(q, k, v, num_components=4, is_causal=True, **tensors).shape
        torch.Size([1, 2, 50, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_options(num_components, num_iterations)
    mixture = _given(x, num_components, means, log_var, log_prior)
    if x.empty:
        return x.nothing()
    if mixture is None:
        if is_causal:
            raise Unsupported(
                "gma: fitting the mixture on a causal batch would let the future in; pass means, "
                "log_var and log_prior (GMA(...).fit on a sample finds them), or use GMAAttention."
            )
        mixture = _fit(x, num_components, num_iterations)
    phi, psi = _features(*mixture)
    out = linear_attention(
        x.q,
        x.k,
        x.v,
        phi,
        psi,
        log=True,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        num_features=num_components,
    )
    return x.restore(out)


def _features(means: Tensor, log_var: Tensor, log_prior: Tensor) -> tuple[Feature, Feature]:
    """Log-densities of queries, up to a constant of the row; log-responsibilities of keys."""
    # The expanded square cancels unless the tokens lie near the origin. A shift found from the
    # tokens would let a causal row see the future, so it comes from the means.
    center = means.mean(-2, keepdim=True)  # (..., Hk, 1, D)
    mu = means - center
    precision = (-log_var).exp()
    square, linear = (-precision / 2).mT, (precision * mu).mT  # (..., Hk, D, K)
    constant = (log_prior - (precision * mu.square() + log_var).sum(-1) / 2)[..., None, :]

    def log_density(x: Tensor) -> Tensor:
        y = (x - center).flatten(0, 1)  # (B * Hk, n, D)
        shape = (*x.shape[:2], -1, -1)
        a, b, c = (t.expand(shape).flatten(0, 1) for t in (square, linear, constant))
        # In place: with the bias copied out for each product it takes twice as long.
        return torch.baddbmm(c, y, b).baddbmm_(y * y, a).unflatten(0, x.shape[:2])

    def log_responsibility(x: Tensor) -> Tensor:
        return log_density(x).log_softmax(-1)

    return log_density, log_responsibility


@torch.no_grad()
def _fit(x: Inputs, num_components: int, num_iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Means (B, Hk, K, D), log variances (B, Hk, K, D) and log priors (B, Hk, K) by EM.

    Each step raises :math:`\sum_n \log \sum_k \pi_k N_k(x_n) + \sum_k E[\log \pi_k N_k(u)]`,
    where u has the mean and the variances of all tokens, over variances above the floor.
    """
    tokens, exists, center = _tokens(x)
    total = exists.sum(-1)[..., None]  # (B or 1, 1, 1)
    spread = tokens.square().sum(2) / total.clamp(min=1)  # (B, Hk, D)
    floor = (_FLOOR * spread.mean(-1) + _TINY)[..., None, None]
    # Centres of mass are not used as a start: those of long segments of a sequence are alike.
    means = _evenly_spaced(tokens, exists, num_components)
    var = spread[:, :, None].expand_as(means).clamp(min=floor)
    log_prior = torch.zeros_like(means[..., 0])
    for _ in range(num_iterations):
        count, first, second = _moments(tokens, exists, means, var.log(), log_prior)
        count = count + 1
        means = first / count[..., None]
        var = (second + spread[:, :, None]) / count[..., None] - means.square()
        var = var.clamp(min=floor)
        log_prior = (count / (total + num_components)).log()
    return means + center, var.log(), log_prior


def _tokens(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, centred: (B, Hk, T, D), which of them exist (B or 1, 1, T), the centre.

    A last token that does not exist is added, so that there is always one to point at.
    """
    tokens = torch.cat([x.q, x.k, torch.zeros_like(x.k[:, :, :0].sum(2, keepdim=True))], 2)
    rows = x.padding if x.padding is not None else x.k.new_ones(1, 1, 1, dtype=torch.bool)
    exists = rows.new_ones((*rows.shape[:2], tokens.shape[2]))
    exists[..., -1] = False
    if x.padding is not None:
        exists[..., x.q.shape[2] : -1] = x.padding
    if x.query_padding is not None:
        exists[..., : x.q.shape[2]] = x.query_padding
    missing = ~exists[..., None]
    tokens = tokens.masked_fill(missing, 0.0)
    center = tokens.sum(2, keepdim=True) / exists.sum(-1).clamp(min=1)[..., None, None]
    return (tokens - center).masked_fill(missing, 0.0), exists, center


def _evenly_spaced(tokens: Tensor, exists: Tensor, number: int) -> Tensor:
    """Tokens at even distances among those that exist, (B, H, number, D)."""
    order = exists.cumsum(-1)
    middle = 2 * torch.arange(number, device=tokens.device) + 1
    target = order[..., -1:] * middle // (2 * number) + 1  # (B or 1, 1, number)
    index = torch.searchsorted(order, target).clamp(max=tokens.shape[2] - 1)
    return tokens.gather(2, index[..., None].expand(*tokens.shape[:2], -1, tokens.shape[3]))


def _moments(
    tokens: Tensor, exists: Tensor, means: Tensor, log_var: Tensor, log_prior: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of responsibilities, of tokens and of their squares, weighted by responsibility."""
    log_density, _ = _features(means, log_var, log_prior)
    count, first, second = torch.zeros_like(log_prior), torch.zeros_like(means), 0 * means
    width = tile_elements(tokens.device) // max(log_prior.numel(), 1)
    for s0, s1 in spans(tokens.shape[2], max(width, 64)):
        tile = tokens[:, :, s0:s1]
        weight = log_density(tile).softmax(-1).masked_fill_(~exists[..., s0:s1, None], 0.0)
        count += weight.sum(2)
        first += weight.mT @ tile
        second += weight.mT @ tile.square()
    return count, first, second


def _given(
    x: Inputs,
    num_components: int,
    means: Tensor | None,
    log_var: Tensor | None,
    log_prior: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The mixture that was given, in the type of computation; None when none was."""
    given = {"means": means, "log_var": log_var, "log_prior": log_prior}
    missing = [name for name, tensor in given.items() if tensor is None]
    if len(missing) == 3:
        return None
    if means is None or log_var is None or log_prior is None:
        raise ValueError(
            "gma: pass means, log_var and log_prior together, or none of them to fit them; "
            f"missing {', '.join(missing)}."
        )
    batch, heads, _, dim = x.k.shape
    for name, tensor, tail in (
        ("means", means, (num_components, dim)),
        ("log_var", log_var, (num_components, dim)),
        ("log_prior", log_prior, (num_components,)),
    ):
        if tensor.shape not in ((heads, *tail), (batch, heads, *tail)):
            raise ValueError(
                f"gma: {name} must have shape {(heads, *tail)} or {(batch, heads, *tail)}; "
                f"got {tuple(tensor.shape)}."
            )
    return means.to(x.k), log_var.to(x.k), log_prior.to(x.k)


def _check_options(num_components: int, num_iterations: int) -> None:
    positive(INFO.name, "num_components", num_components)
    positive(INFO.name, "num_iterations", num_iterations)


@register
@dataclass(frozen=True)
class GMA(Method):
    """Options of `gma_attention`."""

    num_components: int = 128
    num_iterations: int = 10
    info = INFO
    function = staticmethod(gma_attention)

    def __post_init__(self) -> None:
        _check_options(self.num_components, self.num_iterations)

    def cost(self, shape: Shape) -> Cost:
        m, d, e = self.num_components, shape.head_dim, shape.value_dim
        tokens = shape.rows + shape.batch * shape.kv_heads * shape.keys
        flops = 2 * tokens * m * (2 * d + e)
        if shape.is_causal:
            flops += 2 * shape.rows * min(CHUNK, shape.keys) * (m + e)
        else:
            flops += 8 * self.num_iterations * tokens * m * d
        cache = shape.batch * shape.kv_heads * m * (e + 2) * 4
        return Cost(flops, shape.io, cache, units=m)

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
        x = prepare(INFO, query, key, key, attn_mask, False, scale, enable_gqa)
        mixture = _fit(x, self.num_components, self.num_iterations)
        return dict(zip(INFO.state_tensors, mixture, strict=True))

    def module(self, *, num_heads: int, head_dim: int) -> GMAAttention:
        return GMAAttention(num_heads=num_heads, head_dim=head_dim, **self.options())

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
        x = prepare(INFO, key, key, value, None, False, scale, enable_gqa)
        mixture = _given(x, self.num_components, *(tensors.get(n) for n in INFO.state_tensors))
        if mixture is None:
            raise Unsupported(
                "gma: decoding needs a mixture that no later token changes; pass means, log_var "
                "and log_prior (GMA(...).fit on a sample finds them), or use GMAAttention.state."
            )
        phi, psi = _features(*(tensor.detach() for tensor in mixture))
        return SlotsState(key, value, phi, psi, log=True, num_slots=self.num_components)


class GMAAttention(AttentionModule):
    """`gma_attention` with a mixture that is learned.

    Parameters: ``means`` (Hk, K, D); ``raw_var`` (Hk, K, D), the variance being
    ``softplus(raw_var) + floor``; ``prior`` (Hk, K), the logits of the prior. Buffer: ``floor``
    (Hk, 1, 1).

    The mixture starts wide: means drawn from N(0, I) and variances D ** 0.5. On tokens with
    entries of unit size the log-densities of components then differ by about one in any D, so
    every component gets a gradient. `calibrate` fits it to data instead.
    """

    floor: Tensor

    def __init__(
        self, *, num_heads: int, head_dim: int, generator: Generator | None = None, **options: Any
    ) -> None:
        """Draw the means.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            generator: Source of the draw; torch's global one when None.
            **options: Options of `GMA`.
        """
        super().__init__()
        self.options = GMA(**options)
        shape = (num_heads, self.options.num_components, head_dim)
        self.means = nn.Parameter(torch.randn(shape, generator=generator))
        self.raw_var = nn.Parameter(torch.empty(shape))
        self.prior = nn.Parameter(torch.zeros(shape[:2]))
        self.register_buffer("floor", torch.full((num_heads, 1, 1), _FLOOR))
        self._set_var(torch.full(shape, head_dim**0.5))

    def tensors(self) -> dict[str, Any]:
        """The mixture as keywords of `gma_attention`; gradients reach the parameters."""
        return {
            "means": self.means,
            "log_var": (F.softplus(self.raw_var) + self.floor).log(),
            "log_prior": self.prior.log_softmax(-1),
        }

    @torch.no_grad()
    def calibrate(self, query: Tensor, key: Tensor, *, enable_gqa: bool = False) -> None:
        """Fit the mixture to sample tokens, (B, H, N, D) and (B, Hk, N, D).

        The floor of a head's variances becomes half of the smallest that was found.
        """

        def merge(x: Tensor) -> Tensor:
            return x.transpose(0, 1).flatten(1, 2)[None]

        tensors = self.options.fit(merge(query), merge(key), enable_gqa=enable_gqa)
        self.means.copy_(tensors["means"][0])
        self.prior.copy_(tensors["log_prior"][0])
        var = tensors["log_var"][0].double().exp()
        self.floor.copy_(var.amin((1, 2), keepdim=True) / 2)
        self._set_var(var)

    @torch.no_grad()
    def _set_var(self, var: Tensor) -> None:
        rest = var.double() - self.floor
        self.raw_var.copy_(rest + (-torch.expm1(-rest)).log())  # the inverse of softplus
