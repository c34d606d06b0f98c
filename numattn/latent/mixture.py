"""Mixtures of Gaussians per head: fitting them to tokens, and choosing how many components."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from numattn.core.inputs import compute_dtype, not_negative, one_of, positive
from numattn.core.linalg import draw, group_counts, group_sums, masked_mean, nearest, take
from numattn.engines.tiles import spans, tile_elements
from numattn.latent.routing import dead_components

Covariance = Literal["diagonal", "tied", "isotropic"]

_FLOOR = 1e-3  # smallest variance of a component, in mean variances of the tokens
_TINY = 1e-12  # the same where all tokens are equal


class Mixture(NamedTuple):
    r"""A mixture of K Gaussians with diagonal covariances for every head.

    Attributes:
        means: :math:`\mu`, (Hk, K, D) or (B, Hk, K, D).
        log_var: :math:`\log \sigma^2`, of the same shape.
        log_prior: :math:`\log \pi`, (Hk, K) or (B, Hk, K), -inf for a component that is removed.
    """

    means: Tensor
    log_var: Tensor
    log_prior: Tensor


@torch.no_grad()
def fit_mixture(
    tokens: Tensor,
    exists: Tensor | None = None,
    *,
    num_components: int,
    num_iterations: int = 10,
    init: Literal["kmeans++", "even"] | Mixture = "kmeans++",
    covariance: Covariance = "diagonal",
    generator: Generator | None = None,
) -> Mixture:
    r"""Fit a mixture of Gaussians to the tokens of every head, by expectation maximisation (EM).

    Each step raises the logarithm of the likelihood and of one pseudo-token per component,

    .. math:: \sum_n \log \sum_k \pi_k N(x_n; \mu_k, \sigma_k^2)
              + \sum_k \mathbb{E}_u \log \left[ \pi_k N(u; \mu_k, \sigma_k^2) \right],

    where u has the mean and the variances of all tokens. So no component dies or collapses: one
    that no token needs ends at that mean and those variances. No variance falls below a thousandth
    of the tokens' mean variance.

    The start of EM, ``init``:

    - ``"kmeans++"``: K tokens, each drawn with probability proportional to the squared distance
      from those drawn before, then the means, variances and shares of the tokens nearest to each.
      Where there are fewer different tokens than K, the components left over start at the
      pseudo-token.
    - ``"even"``: K tokens at even distances in the sequence, the variances of all tokens, equal
      shares. It draws nothing.
    - a `Mixture`, which is gone on from; its components of prior zero stay removed.

    Args:
        tokens: x, (B, Hk, T, D). Every batch element and head gets a mixture of its own.
        exists: bool (B or 1, 1, T), True = a token that exists; all do when None.
        num_components: K, positive.
        num_iterations: Steps of EM, 0 for the start alone.
        init: The start, see above.
        covariance: ``"diagonal"``; ``"tied"``, one diagonal that all components share;
            ``"isotropic"``, one variance per component.
        generator: Source of the draw of ``"kmeans++"``; torch's global one when None. All batch
            elements use the same numbers, so what is found for one does not depend on the others.

    Returns:
        `Mixture` with means (B, Hk, K, D) and priors that sum to one, in the tokens' type, float32
        at least. It is a constant for autograd.

    Cost: 8 T K D operations for each step of EM, 7 T K D for the start by ``"kmeans++"``. All is
    float64. Memory is linear in T, at 8 bytes for each entry of the tokens.

    Exact when: K = 1 gives the mean and the variances of the tokens after one step.

    Limits: EM finds a local optimum, which depends on the start. ``"kmeans++"`` pays where tokens
    lie in clusters; on heads of trained models ``"even"`` mostly does as well. With variances that
    differ, a token far from every mean belongs to the widest component; ``"tied"`` avoids that.

    Raises:
        TypeError: ``tokens`` are not floating point, or ``exists`` is not bool.
        ValueError: An unknown or contradictory option, or shapes that do not fit.

    References:
        D. Arthur, S. Vassilvitskii, "k-means++: The Advantages of Careful Seeding", 2007,
        https://dl.acm.org/doi/10.5555/1283383.1283494.

        C. Fraley, A. E. Raftery, "Bayesian Regularization for Normal Mixture Estimation and
        Model-Based Clustering", 2007, https://doi.org/10.1007/s00357-007-0004-5.

    Example:
        >>> x = torch.tensor([-1.0, 1.0, 9.0, 11.0]).double().repeat(25).view(1, 1, 100, 1)
        >>> mixture = fit_mixture(x, num_components=2)
        >>> mixture.means.flatten().sort().values.round(decimals=1).tolist()
        [0.1, 9.9]
    """
    _check(tokens, exists, num_components, num_iterations, init, covariance, generator)
    x = _centred(tokens, exists)
    if isinstance(init, Mixture):
        mixture = _continued(x, init)
    elif init == "even":
        mixture = _even(x, num_components)
    else:
        mixture = _plus_plus(x, num_components, covariance, generator)
    for _ in range(num_iterations):
        mixture = _maximise(x, _moments(x, mixture), mixture, covariance)
    dtype = compute_dtype(tokens.dtype)
    means = (mixture.means + x.center).to(dtype)
    return Mixture(means, mixture.log_var.to(dtype), mixture.log_prior.to(dtype))


class _Tokens(NamedTuple):
    """Tokens in float64 and what EM needs to know of them.

    A last token that does not exist is added, so that there is always one to point at.
    """

    x: Tensor  # (B, Hk, T + 1, D), about their mean; zeros where there is none
    exists: Tensor  # (B or 1, 1, T + 1)
    center: Tensor  # (B, Hk, 1, D), the mean
    total: Tensor  # (B or 1, 1, 1), how many exist
    spread: Tensor  # (B, Hk, 1, D), the variances
    floor: Tensor  # (B, Hk, 1, 1)


def _centred(tokens: Tensor, exists: Tensor | None) -> _Tokens:
    if exists is None:
        exists = tokens.new_ones((1, 1, tokens.shape[2]), dtype=torch.bool)
    exists = F.pad(exists, (0, 1), value=False)
    missing = ~exists[..., None]
    x = F.pad(tokens.double(), (0, 0, 0, 1)).masked_fill_(missing, 0.0)
    center = masked_mean(x, exists)
    x = x.sub_(center).masked_fill_(missing, 0.0)
    total = exists.sum(-1, keepdim=True)
    spread = x.square().sum(2, keepdim=True) / total.clamp(min=1)[..., None]
    floor = _FLOOR * spread.mean(-1, keepdim=True) + _TINY
    return _Tokens(x, exists, center, total, spread, floor)


def _continued(x: _Tokens, mixture: Mixture) -> Mixture:
    """A given mixture about the mean of the tokens, one for each batch element."""
    means, log_var, log_prior = (tensor.to(x.x) for tensor in mixture)
    shape = (*x.x.shape[:2], *means.shape[-2:])
    return Mixture(means - x.center, log_var.expand(shape), log_prior.expand(shape[:-1]))


def _even(x: _Tokens, number: int) -> Mixture:
    """Tokens at even distances among those that exist, variances of all tokens, equal priors."""
    # Centres of mass are not used as a start: those of long segments of a sequence are alike.
    order = x.exists.cumsum(-1)
    middle = 2 * torch.arange(number, device=order.device) + 1
    target = order[..., -1:] * middle // (2 * number) + 1  # (B or 1, 1, number)
    means = take(x.x, torch.searchsorted(order, target).clamp(max=order.shape[-1] - 1))
    log_var = torch.maximum(x.spread, x.floor).log().expand_as(means)
    return Mixture(means, log_var, torch.full_like(means[..., 0], -math.log(number)))


def _plus_plus(
    x: _Tokens, number: int, covariance: Covariance, generator: Generator | None
) -> Mixture:
    """The mixture of the clusters around tokens drawn by k-means++."""
    label, _ = nearest(x.x, _seeds(x, number, generator))
    label = label.masked_fill(~x.exists, number)
    moments = (
        group_counts(label, number, x.x.dtype),
        group_sums(x.x, label, number),
        group_sums(x.x.square(), label, number),
    )
    means = x.spread.new_zeros(()).expand_as(moments[1])
    nothing = Mixture(means, means, means[..., 0])
    return _maximise(x, moments, nothing, covariance)


def _seeds(x: _Tokens, number: int, generator: Generator | None) -> Tensor:
    """Tokens drawn far from one another, (B, Hk, number, D); the mean when all are drawn."""
    uniform = draw((x.x.shape[1], number, 1), generator, x.x.device, "uniform")
    weight = x.exists.to(x.x.dtype).expand(x.x.shape[:3])
    distance = torch.full_like(weight, torch.inf)
    seeds = []
    for step in range(number):
        mass = weight.cumsum(-1)
        target = uniform[:, step] * mass[..., -1:]  # (B, Hk, 1)
        index = torch.searchsorted(mass, target, right=True)
        seeds.append(take(x.x, index.clamp(max=mass.shape[-1] - 1)))
        # From differences: equal tokens are at no distance, and no copy of all tokens is made.
        away = torch.cdist(x.x, seeds[-1], compute_mode="donot_use_mm_for_euclid_dist")[..., 0]
        distance = torch.minimum(distance, away.square())
        weight = distance.masked_fill(~x.exists, 0.0)
    return torch.cat(seeds, 2)


def _log_density(x: Tensor, mixture: Mixture) -> Tensor:
    """Logarithms of prior times density, (..., n, K), but for a constant of the width."""
    means, log_var, log_prior = mixture
    precision = (-log_var).exp()
    constant = log_prior - (precision * means.square() + log_var).sum(-1) / 2
    logs = x @ (precision * means).mT
    return logs.sub_(x.square() @ (precision / 2).mT).add_(constant[..., None, :])


def _moments(x: _Tokens, mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of responsibilities, of tokens and of their squares, weighted by responsibility."""
    first = torch.zeros_like(mixture.means)
    count, second = torch.zeros_like(mixture.log_prior), torch.zeros_like(first)
    width = max(tile_elements(first.device) // max(count.numel(), 1), 64)
    for s0, s1 in spans(x.x.shape[2], width):
        tile = x.x[:, :, s0:s1]
        weight = _log_density(tile, mixture).softmax(-1)
        weight = weight.masked_fill_(~x.exists[..., s0:s1, None], 0.0)
        count += weight.sum(2)
        first += weight.mT @ tile
        second += weight.mT @ tile.square()
    return count, first, second


def _maximise(
    x: _Tokens,
    moments: tuple[Tensor, Tensor, Tensor],
    before: Mixture,
    covariance: Covariance,
) -> Mixture:
    """The mixture of given moments and one pseudo-token per component that is not removed."""
    alive = before.log_prior > -torch.inf  # (B, Hk, K)
    count = moments[0] + alive
    number = count.masked_fill(~alive, 1.0)[..., None]
    means = moments[1] / number
    var = (moments[2] + x.spread) / number - means.square()
    if covariance == "tied":
        share = (count / count.sum(-1, keepdim=True))[..., None]
        var = (share * var).sum(-2, keepdim=True).expand_as(var)
    elif covariance == "isotropic":
        var = var.mean(-1, keepdim=True).expand_as(var)
    log_var = torch.maximum(var, x.floor).log()
    log_prior = (count / count.sum(-1, keepdim=True)).log()
    return Mixture(
        torch.where(alive[..., None], means, before.means),
        torch.where(alive[..., None], log_var, before.log_var),
        log_prior,
    )


def stick_breaking_log_prior(logits: Tensor) -> Tensor:
    r"""Log priors from the shares that are broken off a stick, one after the other.

    Component k takes the share :math:`\beta_k = \mathrm{sigmoid}(b_k)` of what is left, and the
    last one the rest: :math:`\log \pi_k = \log \beta_k + \sum_{l < k} \log (1 - \beta_l)`. It is
    computed from logarithms, so priors may be as small as they like. A penalty that draws the
    shares towards 1 leaves nothing to the last components.

    Args:
        logits: b, (..., K - 1).

    Returns:
        (..., K); its exponentials sum to one.

    Cost: K operations.

    Example:
        >>> stick_breaking_log_prior(torch.zeros(2)).exp().tolist()
        [0.5, 0.25, 0.25]
    """
    taken = F.pad(F.logsigmoid(logits), (0, 1))
    left = F.pad(F.logsigmoid(-logits).cumsum(-1), (1, 0))
    return taken + left


def expected_components(concentration: float, num_tokens: int) -> float:
    r"""Expected number of components that N tokens use, a priori, with sticks of Beta(1, alpha).

    The shares :math:`\beta_k \sim \mathrm{Beta}(1, \alpha)` of `stick_breaking_log_prior` make a
    Dirichlet process as K grows, of which N tokens use
    :math:`\sum_{n=0}^{N-1} \alpha / (\alpha + n)`, about :math:`\alpha \log(1 + N / \alpha)`. A
    truncation to K components should lie well above.

    Args:
        concentration: :math:`\alpha`, positive.
        num_tokens: N, 0 or more.

    Returns:
        The expectation, at most N.

    Raises:
        ValueError: The concentration is not positive, or N is negative.

    References:
        C. E. Antoniak, "Mixtures of Dirichlet Processes with Applications to Bayesian
        Nonparametric Problems", 1974, https://doi.org/10.1214/aos/1176342871.

    Example:
        >>> round(expected_components(1.0, 4), 6)  # 1 + 1/2 + 1/3 + 1/4
        2.083333
    """
    not_negative("expected_components", "num_tokens", num_tokens)
    if not 0 < concentration < math.inf:
        raise ValueError(
            f"expected_components: concentration must be positive; got {concentration!r}."
        )
    alpha = torch.tensor(concentration, dtype=torch.float64)
    return (alpha * (torch.digamma(alpha + num_tokens) - torch.digamma(alpha))).item()


def prune(mixture: Mixture, usage: Tensor, threshold: float | None = None) -> Mixture:
    r"""Remove the components that serve hardly any token, by a prior of zero.

    A token whose responsibilities for the removed components sum to m gets the others divided by
    1 - m, so that its responsibilities change by 2 m in the l1 norm, exactly. The heaviest
    component stays whatever the threshold.

    Args:
        mixture: Of K components.
        usage: (..., K), as `numattn.latent.routing.component_usage` returns it; of the shape of
            ``log_prior``.
        threshold: Usage below which a component goes; 1 / (20 K) when None.

    Returns:
        The mixture with ``log_prior`` -inf for what was removed. Shapes stay, so a module can keep
        its parameters; the priors that remain are not normalised, which nothing needs.

    Cost: K operations; removed components still cost what they did.

    Limits: m is small on the mean over the tokens that usage was taken from. A few of them, or
    other tokens, may be served by what is removed.

    Raises:
        ValueError: ``usage`` is not of the shape of ``log_prior``.

    Example:
        >>> mixture = Mixture(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), torch.zeros(1, 3))
        >>> prune(mixture, torch.tensor([[0.6, 0.39, 0.01]])).log_prior.tolist()
        [[0.0, 0.0, -inf]]
    """
    _same_shape("prune: usage", usage, mixture.log_prior)
    dead = _but_one(dead_components(usage, threshold), usage)
    return mixture._replace(log_prior=mixture.log_prior.masked_fill(dead, -torch.inf))


def split(
    mixture: Mixture,
    component: Tensor | int | None = None,
    *,
    delta: float = 0.5,
    share: float = 0.5,
    temperature: Tensor | float = 1.0,
    into: Tensor | int | None = None,
) -> Mixture:
    r"""Split a component of every head in two, along the axis of its largest variance.

    The new part takes the share p of the prior and the component keeps 1 - p. Their means lie
    :math:`2 \delta \sigma` apart about the mean of both, and the variance of the axis shrinks by
    :math:`1 - 4 p (1 - p) \delta^2`: mean and variances of the mixture stay as they were. With
    p = 1/2 the means are :math:`\mu \pm \delta \sigma`, and the log priors
    :math:`\log \pi - \log 2`.

    With :math:`\delta = 0` the responsibilities of the parts add up to that of the component, and
    the density is unchanged. The output of `gma_attention` is not: two tokens now meet in the
    component only if they fall into the same part of it, which has the probability
    :math:`f = p^2 + (1 - p)^2`. Where a share s of a row's weight ran through the component, the
    row moves by at most :math:`s (1 - s)(1 - f) / (1 - s (1 - f))` in total variation, and by as
    much where no other component serves the same keys. That is at most
    :math:`3 - 2 \sqrt 2 \approx 0.17` for p = 1/2, and at most p (1 - p) for any p, so a small
    share grows a trained model without a jump.

    Args:
        mixture: Of K components.
        component: Which one, of each head: int (...) or a number; the one of the largest prior when
            None.
        delta: :math:`\delta`, half the distance of the two means in standard deviations, from 0 to
            below 1. With 0 and p = 1/2 the parts are equal, and training never tells them apart.
        share: p, between 0 and 1.
        temperature: :math:`\tau`, a number or (...), positive, where responsibilities are the
            softmax of log densities over :math:`\tau`: shares of the prior are then taken to its
            power, so that responsibilities are divided as said.
        into: Which component the new part replaces, of each head, int (...) or a number: a dead
            one, for instance. When None it becomes a further component, the last.

    Returns:
        The mixture of K + 1 components, or of K with ``into``.

    Cost: K D operations.

    Limits: covariances are diagonal, so a component is only ever split along an axis.

    Raises:
        ValueError: ``delta`` or ``share`` is out of range, an index has another shape than the
            heads, or a number is not that of a component.

    Example:
        >>> one = Mixture(torch.zeros(1, 1, 2), torch.tensor([[[0.0, 2.0]]]), torch.zeros(1, 1))
        >>> split(one, delta=0.0).log_prior.exp().tolist()
        [[0.5, 0.5]]
    """
    if not 0 <= delta < 1 or not 0 < share < 1:
        raise ValueError(
            "split: delta must lie in [0, 1) and share in (0, 1); "
            f"got delta={delta!r} and share={share!r}."
        )
    tau = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    heaviest = mixture.log_prior.argmax(-1)
    at = heaviest if component is None else _index("component", component, heaviest, mixture)
    mean, log_var, log_prior = _component(mixture, at)
    largest = log_var.argmax(-1, keepdim=True)
    step = torch.zeros_like(mean).scatter(-1, largest, (log_var / 2).exp().amax(-1, keepdim=True))
    shrink = torch.zeros_like(mean).scatter(
        -1, largest, math.log1p(-4 * share * (1 - share) * delta**2)
    )
    kept, new = (
        Mixture(mean + by * delta * step, log_var + shrink, log_prior + tau * math.log(part))
        for by, part in ((-2 * share, 1 - share), (2 * (1 - share), share))
    )
    rest = _with(mixture, at, kept)
    if into is not None:
        return _with(rest, _index("into", into, heaviest, mixture), new)
    means, log_vars = (torch.cat(pair, -2) for pair in zip(rest[:2], new[:2], strict=True))
    return Mixture(means, log_vars, torch.cat([rest.log_prior, new.log_prior], -1))


@torch.no_grad()
def reseed(mixture: Mixture, tokens: Tensor, dead: Tensor, exists: Tensor | None = None) -> Mixture:
    r"""Move dead components to the tokens that the others explain worst.

    One after the other, each goes to the token of the largest residual
    :math:`-\max_k \log \pi_k N(x_n; \mu_k, \sigma_k^2)` over the components that live or have
    moved. It gets the prior 1 / K and the variances of the others on the mean over their priors;
    the others keep the proportions of theirs. The heaviest component counts as alive.

    Args:
        mixture: Of K components. Without a batch dimension, the tokens of the whole batch are one
            sample.
        tokens: x, (B, Hk, T, D).
        dead: bool, of the shape of ``log_prior``, as `numattn.latent.routing.dead_components`
            returns it.
        exists: bool (B or 1, 1, T), True = a token that exists; all do when None.

    Returns:
        The mixture in its own type, priors normalised. It is a constant for autograd. Where no
        token exists, a dead component stays where it is.

    Cost: 6 T K D operations in float64, memory linear in T.

    Limits: an outlier has the largest residual, and steps of `fit_mixture` from here must show
    whether it stands for anything.

    Raises:
        TypeError: ``tokens`` are not floating point, or ``exists`` is not bool.
        ValueError: Shapes that do not fit.

    Example:
        >>> mixture = Mixture(torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), torch.zeros(1, 2))
        >>> x = torch.tensor([0.1, -0.2, 7.0]).view(1, 1, 3, 1)
        >>> reseed(mixture, x, torch.tensor([[False, True]])).means.flatten().tolist()
        [0.0, 7.0]
    """
    _check_tokens("reseed", tokens, exists)
    _check_mixture("reseed", mixture, tokens, dead.shape[-1])
    _same_shape("reseed: dead", dead, mixture.log_prior)
    if mixture.means.dim() == 3:
        tokens, exists = _one_sample(tokens, exists)
        found = reseed(Mixture(*(t[None] for t in mixture)), tokens, dead[None], exists)
        return Mixture(*(t[0] for t in found))
    x = _centred(tokens, exists)
    dead = _but_one(dead, mixture.log_prior) & (x.total > 0)
    means, log_var, log_prior = _spared(_continued(x, mixture), dead)
    live = Mixture(means, log_var, log_prior.masked_fill(dead, -torch.inf))
    best = _best(x, live)
    for k in range(dead.shape[-1]):
        worst = take(x.x, best.argmin(-1, keepdim=True))
        means[:, :, k] = torch.where(dead[..., k, None], worst[:, :, 0], means[:, :, k])
        one = Mixture(*(t.narrow(2, k, 1) for t in (means, log_var, log_prior)))
        best = torch.maximum(best, _best(x, one))
    shapes = mixture.means
    return Mixture((means + x.center).to(shapes), log_var.to(shapes), log_prior.to(shapes))


def _spared(mixture: Mixture, dead: Tensor) -> Mixture:
    """The mixture with the variances and priors that reseeded components get."""
    means, log_var, log_prior = mixture
    alive = (~dead).to(log_prior).mean(-1, keepdim=True)
    weight = log_prior.masked_fill(dead, -torch.inf).softmax(-1)
    within = (weight[..., None] * log_var.exp()).sum(-2, keepdim=True).log()
    equal = torch.full_like(log_prior, -math.log(dead.shape[-1]))
    return Mixture(
        means,
        torch.where(dead[..., None], within, log_var),
        torch.where(dead, equal, (weight * alive).log()),
    )


def _best(x: _Tokens, mixture: Mixture) -> Tensor:
    """The largest log density of each token over the components, (B, Hk, T), inf where none is."""
    width = max(tile_elements(x.x.device) // max(mixture.log_prior.numel(), 1), 64)
    best = [_log_density(tile, mixture).amax(-1) for tile in x.x.split(width, 2)]
    return torch.cat(best, 2).masked_fill(~x.exists, torch.inf)


def _one_sample(tokens: Tensor, exists: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tokens of the batch in one row, (1, Hk, B T, D)."""
    if exists is not None:
        exists = exists.expand(len(tokens), 1, -1).transpose(0, 1).flatten(1)[None]
    return tokens.transpose(0, 1).flatten(1, 2)[None], exists


def _component(mixture: Mixture, at: Tensor) -> Mixture:
    """One component of each head, at int (...): (..., 1, D) and (..., 1)."""
    at = at[..., None]
    wide = at[..., None].expand(*at.shape, mixture.means.shape[-1])
    return Mixture(
        mixture.means.gather(-2, wide),
        mixture.log_var.gather(-2, wide),
        mixture.log_prior.gather(-1, at),
    )


def _with(mixture: Mixture, at: Tensor, component: Mixture) -> Mixture:
    """The mixture with one component of each head replaced."""
    at = at[..., None]
    wide = at[..., None].expand_as(component.means)
    return Mixture(
        mixture.means.scatter(-2, wide, component.means),
        mixture.log_var.scatter(-2, wide, component.log_var),
        mixture.log_prior.scatter(-1, at, component.log_prior),
    )


def _but_one(dead: Tensor, weight: Tensor) -> Tensor:
    """The dead ones without the heaviest, so that one is always left."""
    return dead.scatter(-1, weight.argmax(-1, keepdim=True), False)


def _index(name: str, value: Tensor | int, like: Tensor, mixture: Mixture) -> Tensor:
    """A component of each head as a tensor."""
    if isinstance(value, Tensor):
        _same_shape(f"split: {name}", value, like)
        return value
    number = mixture.log_prior.shape[-1]
    if not 0 <= value < number:
        raise ValueError(f"split: {name} must be 0 to {number - 1}; got {value!r}.")
    return torch.full_like(like, value)


def _same_shape(what: str, x: Tensor, like: Tensor) -> None:
    if x.shape != like.shape:
        raise ValueError(f"{what} must have shape {tuple(like.shape)}; got {tuple(x.shape)}.")


def _check_tokens(name: str, tokens: Tensor, exists: Tensor | None) -> None:
    if tokens.dim() != 4:
        raise ValueError(
            f"{name}: tokens must have shape (batch, heads, length, width); "
            f"got {tuple(tokens.shape)}."
        )
    if not tokens.is_floating_point():
        raise TypeError(f"{name}: tokens must be floating point; got {tokens.dtype}.")
    batch, _, length, _ = tokens.shape
    if exists is None:
        return
    if exists.dtype is not torch.bool:
        raise TypeError(f"{name}: exists must be bool; got {exists.dtype}.")
    if exists.shape not in ((batch, 1, length), (1, 1, length)):
        raise ValueError(
            f"{name}: exists must have shape {(batch, 1, length)} or {(1, 1, length)}; "
            f"got {tuple(exists.shape)}."
        )


def _check(
    tokens: Tensor,
    exists: Tensor | None,
    num_components: int,
    num_iterations: int,
    init: str | Mixture,
    covariance: str,
    generator: Generator | None,
) -> None:
    name = "fit_mixture"
    _check_tokens(name, tokens, exists)
    positive(name, "num_components", num_components)
    not_negative(name, "num_iterations", num_iterations)
    one_of(name, "covariance", covariance, ("diagonal", "tied", "isotropic"))
    if generator is not None and init != "kmeans++":
        raise ValueError(f"{name}: only init='kmeans++' draws; leave generator out.")
    if isinstance(init, Mixture):
        _check_mixture(name, init, tokens, num_components)
    else:
        one_of(name, "init", init, ("kmeans++", "even"))


def _check_mixture(name: str, mixture: Mixture, tokens: Tensor, number: int) -> None:
    batch, heads, _, dim = tokens.shape
    for field, tensor, tail in (
        ("means", mixture.means, (number, dim)),
        ("log_var", mixture.log_var, (number, dim)),
        ("log_prior", mixture.log_prior, (number,)),
    ):
        if tensor.shape not in ((heads, *tail), (batch, heads, *tail)):
            raise ValueError(
                f"{name}: {field} of the mixture must have shape {(heads, *tail)} or "
                f"{(batch, heads, *tail)}; got {tuple(tensor.shape)}."
            )
