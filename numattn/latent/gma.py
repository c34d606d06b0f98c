"""Gaussian-mixture attention (GMA): tokens meet in the components of a mixture of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from numattn.core.cost import Cost, Shape
from numattn.core.info import Info
from numattn.core.inputs import Inputs, Unsupported, compute_dtype, positive, prepare
from numattn.core.method import Method
from numattn.core.module import AttentionModule
from numattn.core.registry import register
from numattn.core.state import State
from numattn.engines.linear import CHUNK, SlotsState
from numattn.engines.slots import Quadratic, regularised, slots_attention
from numattn.latent.mixture import Mixture, fit_mixture

INFO = Info(
    name="gma",
    family="latent",
    summary="responsibilities of Gaussian mixtures, shared by queries and keys or not",
    paper="https://arxiv.org/abs/2606.18283",
    complexity="N K (2 d + e)",
    budget="num_components",
    approximates="own",
    causal="native",
    mask="padding",
    scaled=False,
    fits_causal=True,
    state_tensors=(
        *("means", "log_var", "log_prior"),
        *("query_means", "query_log_var", "query_log_prior", "log_temperature"),
    ),
)

_FLOOR = 1e-3  # smallest variance of a component in a module that was not calibrated

Temperature = float | Literal["sqrt"]


def gma_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_components: int = 128,
    num_iterations: int = 10,
    temperature: float | Literal["sqrt"] = 1.0,
    epsilon: float = 0.0,
    means: Tensor | None = None,
    log_var: Tensor | None = None,
    log_prior: Tensor | None = None,
    query_means: Tensor | None = None,
    query_log_var: Tensor | None = None,
    query_log_prior: Tensor | None = None,
    log_temperature: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Gaussian-mixture attention.

    Each key head has a mixture of K Gaussians with diagonal covariances, which queries and keys
    share unless the queries are given their own. Tokens are compared by their responsibilities,
    the posterior of the component at a temperature:

    .. math:: \gamma_k(x) = \mathrm{softmax}_k\, \ell_k(x) / \tau, \quad
              \ell_k(x) = \log \pi_k - \tfrac12 \sum_d
              \left[ (x_d - \mu_{kd})^2 / \sigma^2_{kd} + \log \sigma^2_{kd} \right],

    .. math:: o_i = \frac{\sum_j \sum_k \gamma_k(q_i)\, \gamma_k(k_j)\, v_j}
                         {\sum_j \sum_k \gamma_k(q_i)\, \gamma_k(k_j) + \epsilon}.

    The implied weights are not negative, sum to one in every row (without :math:`\epsilon`) and
    have rank at most K. It is computed from logarithms throughout, as :math:`o_i =
    \mathrm{softmax}_k(\ell_k(q_i) / \tau + \log Z_k) \cdot M_k` with the slots
    :math:`Z_k = \sum_j \gamma_k(k_j)` and :math:`M_k = \sum_j \gamma_k(k_j)\, v_j / Z_k`, so
    densities may underflow at will. Tokens and means are shifted by the average mean, which changes
    nothing but the rounding. Gradients have a closed form in the slots; backward computes the
    responsibilities again, tile by tile.

    Without tensors one mixture is fitted to the tokens of the batch, queries and keys together, by
    `fit_mixture` from evenly spaced tokens.

    Args:
        query: (B, H, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, E).
        num_components: K, positive.
        num_iterations: Steps of EM when the mixture is fitted, positive.
        temperature: :math:`\tau`, positive, or ``"sqrt"`` for the root of D: log-densities of
            different components then differ by about one at random parameters, whatever D. It
            plays no part in the fit.
        epsilon: :math:`\epsilon`, 0 or more. It shrinks the output by D / (D + epsilon), D being
            the denominator without it; of use only where another implementation has one.
        means: :math:`\mu`, (Hk, K, D) or (B, Hk, K, D); fitted when None.
        log_var: :math:`\log \sigma^2`, shaped as ``means``; fitted when None.
        log_prior: :math:`\log \pi` up to a constant, (Hk, K) or (B, Hk, K), -inf removes a
            component; fitted when None. The three are given together or not at all.
        query_means: The same of a mixture of the queries alone, whose component k meets component
            k of the other, then the keys'. It needs the three above; shared when None.
        query_log_var: Shaped as ``query_means``.
        query_log_prior: Shaped as ``log_prior``. The three are given together or not at all.
        log_temperature: Logarithm of a factor of ``temperature``, (Hk,) or (B, Hk); 0 when None.
        attn_mask: bool key padding (B, 1, 1, Nk), True = attend.
        is_causal: Position i attends to positions j <= i; needs the three tensors.
        scale: Must be None, for there are no logits to scale.
        enable_gqa: Allow H to be a multiple of Hk; the mixture is the key head's.

    Returns:
        (B, H, Nq, E), in the query's type.

    Cost: 2 N K (2 D + E) operations for queries and for keys; causal adds 2 N CHUNK (K + E).
    Fitting adds 8 N K D for each step of EM. Memory is linear in N, backward too. Decoding keeps
    K (E + 2) numbers per key head, whatever the length.

    Exact when: it is its own target. K = 1, or components that are all equal, give the mean of
    the values. Equal isotropic variances route by a softmax of affine functions of the token.
    Variances that go to 0 route by the nearest mean; with the keys themselves as means, different
    ones, and queries equal to keys, the output is the values.

    Limits: it does not approximate softmax attention, and a mixture fitted without training
    routes by position in space, not by :math:`q \cdot k`. Log-densities differ by about D, so in
    wide heads the responsibilities of a fitted mixture are nearly one-hot at temperature 1: queries
    and keys then get hardly any gradient, and `GMAAttention` starts wide for that reason. Far from
    every mean the widest component takes all. In float32 a log-density is off by about 1e-7 times
    :math:`|x - c|^2 / \sigma^2`, c being the average mean. A fitted mixture is a constant for
    autograd. There are no second derivatives.

    Raises:
        Unsupported: A mask other than key padding, a ``scale``, or a causal call without tensors,
            since fitting on the batch would let the future in.
        ValueError: Only some of three tensors are given, shapes do not fit, or an option is out of
            range.

    References:
        "Gaussian Mixture Attention", 2026, https://arxiv.org/abs/2606.18283.

    Example:
        >>> q = k = v = torch.randn(1, 2, 50, 8)
        >>> gma_attention(q, k, v, num_components=4).shape
        torch.Size([1, 2, 50, 8])
        >>> tensors = GMA(num_components=4).fit(q, k)
        >>> gma_attention(q, k, v, num_components=4, is_causal=True, **tensors).shape
        torch.Size([1, 2, 50, 8])
    """
    x = prepare(INFO, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    options = GMA(num_components, num_iterations, temperature, epsilon)
    given = (means, log_var, log_prior, query_means, query_log_var, query_log_prior)
    forms = _forms(x.k, options, given, log_temperature)
    if x.empty:
        return x.nothing()
    if forms is None:
        if is_causal:
            raise Unsupported(
                "gma: fitting the mixture on a causal batch would let the future in; pass means, "
                "log_var and log_prior (GMA(...).fit on a sample finds them), or use GMAAttention."
            )
        fitted = (*_fit(x, options), None, None, None)
        forms = _forms(x.k, options, fitted, log_temperature)
        assert forms is not None
    out = slots_attention(
        x.q,
        x.k,
        x.v,
        *forms,
        is_causal=is_causal,
        padding=x.padding,
        group=x.group,
        epsilon=epsilon,
    )
    return x.restore(out)


def responsibilities(
    x: Tensor,
    means: Tensor,
    log_var: Tensor,
    log_prior: Tensor,
    temperature: float | Literal["sqrt"] | Tensor = 1.0,
) -> Tensor:
    r"""Posterior probabilities of the components, :math:`\gamma` of `gma_attention`.

    Args:
        x: Tokens, (B, Hk, N, D).
        means: :math:`\mu`, (Hk, K, D) or (B, Hk, K, D).
        log_var: :math:`\log \sigma^2`, shaped as ``means``.
        log_prior: :math:`\log \pi` up to a constant, (Hk, K) or (B, Hk, K).
        temperature: :math:`\tau`, a number, ``"sqrt"`` for the root of D, or a tensor (Hk,) or
            (B, Hk).

    Returns:
        (B, Hk, N, K), rows sum to one; float32 at least.

    Cost: 4 N K D operations per head; all N K numbers exist.

    Limits: as those of `gma_attention`, for far tokens and for float32.

    Raises:
        ValueError: Shapes do not fit.

    Example:
        >>> x = torch.tensor([[-5.0], [0.0]])[None, None]
        >>> means, zero = torch.tensor([[[-1.0], [1.0]]]), torch.zeros(1, 2)
        >>> responsibilities(x, means, zero[..., None], zero)[0, 0].round(decimals=4)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    if x.dim() != 4:
        raise ValueError(f"responsibilities: x must be (B, Hk, N, D); got {tuple(x.shape)}.")
    x = x.to(compute_dtype(x.dtype))
    mixture = Mixture(means, log_var, log_prior)
    _check_shapes("responsibilities", x, mixture, means.shape[-2], "")
    tau: float | Tensor
    if isinstance(temperature, Tensor):
        tau = temperature.to(x)
    else:
        _check_temperature(temperature)
        tau = _temperature(temperature, x.shape[-1])
    return _quadratic(x, mixture, tau)(x).softmax(-1)


def responsibility_lipschitz(
    means: Tensor, log_var: Tensor, radius: float, temperature: float = 1.0
) -> Tensor:
    r"""A bound of how fast responsibilities move, in the l1 norm, with tokens in a ball.

    With :math:`G_k(x) = (\mu_k - x) / \sigma_k^2`, the Jacobian has the norm
    :math:`\|\partial \gamma / \partial x\|_{2 \to 1} \le \max_{k,l} |G_k(x) - G_l(x)| / (2 \tau)`,
    and over :math:`|x| \le R`

    .. math:: |G_k - G_l| \le R \max_d |\sigma_{kd}^{-2} - \sigma_{ld}^{-2}|
              + |\mu_k / \sigma_k^2 - \mu_l / \sigma_l^2| .

    Hence :math:`|\gamma(x) - \gamma(y)|_1` is at most the bound times :math:`|x - y|`, and the
    total variation half of that. Where all components have the same variances R plays no part, and
    the bound holds everywhere. Priors are not in it. The output of `gma_attention` moves by no more
    than its greatest distance to the mean of a slot times as much.

    Args:
        means: :math:`\mu`, (..., K, D).
        log_var: :math:`\log \sigma^2`, of the same shape.
        radius: R, of the ball about the origin that tokens lie in, 0 or more and finite.
        temperature: :math:`\tau`, positive.

    Returns:
        (...), one bound for every head.

    Cost: K^2 D operations and numbers per head.

    Limits: a bound over all pairs, whatever their priors: often several times what is seen.

    Raises:
        ValueError: The radius or the temperature is out of range.

    Example:
        >>> means, log_var = torch.tensor([[-1.0], [1.0]]), torch.zeros(2, 1)
        >>> responsibility_lipschitz(means, log_var, radius=3.0)  # attained at 0
        tensor(1.)
    """
    if not 0 <= radius < math.inf or not 0 < temperature < math.inf:
        raise ValueError(
            "responsibility_lipschitz: radius must be 0 or more, temperature positive, both "
            f"finite; got {radius!r} and {temperature!r}."
        )
    precision = (-log_var).exp()
    slope = precision * means
    curve = (precision[..., :, None, :] - precision[..., None, :, :]).abs().amax(-1)
    apart = (slope[..., :, None, :] - slope[..., None, :, :]).norm(dim=-1)
    return (radius * curve + apart).amax((-2, -1)) / (2 * temperature)


def _temperature(temperature: Temperature, dim: int) -> float:
    return dim**0.5 if temperature == "sqrt" else float(temperature)


def _quadratic(x: Tensor, mixture: Mixture, tau: float | Tensor) -> Quadratic:
    """Log-densities over tau, (Hk,) or (B, Hk), up to a constant of the row; in the type of x."""
    means, log_var, log_prior = (t.to(x) for t in mixture)
    # The expanded square cancels unless the tokens lie near the origin. A shift found from the
    # tokens would let a causal row see the future, so it comes from the means.
    center = means.detach().mean(-2, keepdim=True)  # (..., Hk, 1, D)
    mu = means - center
    cold = 1 / tau[..., None, None] if isinstance(tau, Tensor) else 1 / tau
    precision = (-log_var).exp() * cold
    form = torch.cat([precision / -2, precision * mu], -1).mT  # (..., Hk, 2 D, K)
    square = (precision * mu.square() + log_var * cold).sum(-1, keepdim=True)
    removed = log_prior[..., None] == -torch.inf  # kept out of the gradient of tau
    prior = log_prior[..., None].masked_fill(removed, 0.0) * cold
    constant = (prior - square / 2).masked_fill(removed, -torch.inf).mT  # (..., Hk, 1, K)
    return Quadratic(*(t if t.dim() == 4 else t[None] for t in (form, constant, center)))


Given = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


def _forms(
    k: Tensor, options: GMA, given: Given, log_temperature: Tensor | None
) -> tuple[Quadratic, Quadratic] | None:
    """Log-densities of queries and of keys like k; None when no mixture was given."""
    shared = _given(k, options.num_components, given[:3], "")
    own = _given(k, options.num_components, given[3:], "query_")
    if own is not None and shared is None:
        raise ValueError(
            "gma: query_means, query_log_var and query_log_prior need means, log_var and log_prior "
            "of the keys; pass them too."
        )
    tau: float | Tensor = _temperature(options.temperature, k.shape[-1])
    if log_temperature is not None:
        heads = tuple(k.shape[:2])
        if log_temperature.shape not in (heads[1:], heads):
            raise ValueError(
                f"gma: log_temperature must have shape {heads[1:]} or {heads}; "
                f"got {tuple(log_temperature.shape)}."
            )
        tau = tau * log_temperature.to(k).exp()
    if shared is None:
        return None
    keys = _quadratic(k, shared, tau)
    return (keys if own is None else _quadratic(k, own, tau)), keys


def _given(
    like: Tensor,
    num_components: int,
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None],
    prefix: str,
) -> Mixture | None:
    """A mixture for keys like these; None when none was given."""
    names = [prefix + name for name in Mixture._fields]
    missing = [name for name, tensor in zip(names, tensors, strict=True) if tensor is None]
    if len(missing) == 3:
        return None
    means, log_var, log_prior = tensors
    if means is None or log_var is None or log_prior is None:
        raise ValueError(
            f"gma: pass {names[0]}, {names[1]} and {names[2]} together, or none of them; "
            f"missing {', '.join(missing)}."
        )
    mixture = Mixture(means, log_var, log_prior)
    _check_shapes(INFO.name, like, mixture, num_components, prefix)
    return mixture


def _check_shapes(
    caller: str, like: Tensor, mixture: Mixture, num_components: int, prefix: str
) -> None:
    """Refuse tensors that do not fit tokens (B, Hk, N, D)."""
    batch, heads, _, dim = like.shape
    tails = ((num_components, dim), (num_components, dim), (num_components,))
    for name, tensor, tail in zip(Mixture._fields, mixture, tails, strict=True):
        if tensor.shape not in ((heads, *tail), (batch, heads, *tail)):
            raise ValueError(
                f"{caller}: {prefix}{name} must have shape {(heads, *tail)} or "
                f"{(batch, heads, *tail)}; got {tuple(tensor.shape)}."
            )


def _fit(x: Inputs, options: GMA) -> Mixture:
    """The mixture of queries and keys together, of each batch element."""
    tokens, exists = torch.cat([x.q, x.k], 2), None
    if x.padding is not None:
        rows = x.query_padding
        if rows is None:
            rows = x.padding.new_ones((len(x.padding), 1, x.q.shape[2]))
        exists = torch.cat([rows, x.padding], 2)
    return fit_mixture(
        tokens,
        exists,
        num_components=options.num_components,
        num_iterations=options.num_iterations,
        init="even",
    )


def _check_temperature(temperature: object) -> None:
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if temperature == "sqrt" or (number and 0 < temperature < math.inf):  # type: ignore[operator]
        return
    raise ValueError(f"gma: temperature must be positive or 'sqrt'; got {temperature!r}.")


@register
@dataclass(frozen=True)
class GMA(Method):
    """Options of `gma_attention`."""

    num_components: int = 128
    num_iterations: int = 10
    temperature: float | Literal["sqrt"] = 1.0
    epsilon: float = 0.0
    info = INFO
    function = staticmethod(gma_attention)

    def __post_init__(self) -> None:
        positive(INFO.name, "num_components", self.num_components)
        positive(INFO.name, "num_iterations", self.num_iterations)
        _check_temperature(self.temperature)
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"gma: epsilon must be 0 or more; got {self.epsilon!r}.")

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
        return _fit(x, self)._asdict()

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
        forms = self.densities(x.k, tensors)
        if forms is None:
            raise Unsupported(
                "gma: decoding needs a mixture that no later token changes; pass means, log_var "
                "and log_prior (GMA(...).fit on a sample finds them), or use GMAAttention.state."
            )
        queries, keys = (Quadratic(*(t.detach() for t in form)) for form in forms)
        return GMAState(key, value, queries, keys, self.epsilon)

    def densities(
        self, key: Tensor, tensors: Mapping[str, Tensor]
    ) -> tuple[Quadratic, Quadratic] | None:
        """Log-densities of queries and of keys, for `numattn.engines.slots`.

        Args:
            key: (B, Hk, N, D), in the type of computation; only its shape and type count.
            tensors: The state tensors, by keyword.

        Returns:
            Both, or None where there is no mixture among the tensors.
        """
        *given, log_temperature = (tensors.get(name) for name in INFO.state_tensors)
        return _forms(key, self, tuple(given), log_temperature)  # type: ignore[arg-type]


class GMAState(SlotsState):
    """Decoding state of `gma_attention`: the slots, whatever the number of tokens."""

    def __init__(
        self, key: Tensor, value: Tensor, queries: Quadratic, keys: Quadratic, epsilon: float
    ) -> None:
        """Start with a prefix, key (B, Hk, N, D) and value (B, Hk, N, E), N >= 0."""
        super().__init__(
            key,
            value,
            lambda x: queries(x),
            lambda x: keys(x).log_softmax(-1),
            log=True,
            num_slots=keys.form.shape[-1],
        )
        self._slots = regularised(self._slots, epsilon)


class GMAAttention(AttentionModule):
    """`gma_attention` with mixtures and a temperature that are learned.

    Parameters: ``means`` (Hk, K, D); ``raw_var`` (Hk, K, D), the variance being
    ``softplus(raw_var) + floor``; ``prior`` (Hk, K), the logits of the prior; ``log_temperature``
    (Hk,), which comes on top of the option. Buffer: ``floor`` (Hk, 1, 1). With ``shared=False``
    the same of queries, with the prefix ``query_``.

    A mixture starts wide: means drawn from N(0, I), and variances whose product with the
    temperature is D ** 0.5. On tokens with entries of unit size the log-densities of components
    then differ by about one in any D, so every component gets a gradient. `calibrate` fits
    mixtures to data instead.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        shared: bool = True,
        generator: Generator | None = None,
        **options: Any,
    ) -> None:
        """Draw the means.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
            shared: Whether queries and keys have the same mixture.
            generator: Source of the draw; torch's global one when None.
            **options: Options of `GMA`.
        """
        super().__init__()
        self.options = GMA(**options)
        self.shared = shared
        shape = (num_heads, self.options.num_components, head_dim)
        var = head_dim**0.5 / _temperature(self.options.temperature, head_dim)
        for prefix in self._prefixes():
            self.register_parameter(
                f"{prefix}means", nn.Parameter(torch.randn(shape, generator=generator))
            )
            self.register_parameter(f"{prefix}raw_var", nn.Parameter(torch.empty(shape)))
            self.register_parameter(f"{prefix}prior", nn.Parameter(torch.zeros(shape[:2])))
            self.register_buffer(f"{prefix}floor", torch.full((num_heads, 1, 1), _FLOOR))
            self._set_var(prefix, torch.full(shape, var))
        self.log_temperature = nn.Parameter(torch.zeros(num_heads))

    def _prefixes(self) -> tuple[str, ...]:
        return ("",) if self.shared else ("", "query_")

    def tensors(self) -> dict[str, Any]:
        """The mixtures as keywords of `gma_attention`; gradients reach the parameters."""
        found: dict[str, Any] = {"log_temperature": self.log_temperature}
        for prefix in self._prefixes():
            var = F.softplus(self.get_parameter(f"{prefix}raw_var"))
            found |= {
                f"{prefix}means": self.get_parameter(f"{prefix}means"),
                f"{prefix}log_var": (var + self.get_buffer(f"{prefix}floor")).log(),
                f"{prefix}log_prior": self.get_parameter(f"{prefix}prior").log_softmax(-1),
            }
        return found

    @torch.no_grad()
    def calibrate(self, query: Tensor, key: Tensor, *, enable_gqa: bool = False) -> None:
        """Fit the mixtures to sample tokens, (B, H, N, D) and (B, Hk, N, D).

        Separate mixtures are fitted to queries and to keys: the queries' first, and the keys' from
        there, so that components of the same number are near each other. The floor of a head's
        variances becomes half of the smallest that was found, and the temperature that of the
        option.
        """
        x = prepare(INFO, query, key, key, None, False, None, enable_gqa).joined()
        options = self.options
        assert isinstance(options, GMA)
        self.log_temperature.zero_()
        if self.shared:
            self.set_mixture(_fit(x, options))
            return
        number, steps = options.num_components, options.num_iterations
        queries = fit_mixture(x.q, num_components=number, num_iterations=steps, init="even")
        self.set_mixture(queries, of_queries=True)
        keys = fit_mixture(x.k, num_components=number, num_iterations=steps, init=queries)
        self.set_mixture(keys)

    @torch.no_grad()
    def set_mixture(self, mixture: Mixture, *, of_queries: bool = False) -> None:
        """Take a mixture, such as `fit_mixture`, `split`, `prune` or `reseed` returns.

        The floor of a head's variances becomes half of the smallest.

        Args:
            mixture: With means (Hk, K, D), or (1, Hk, K, D).
            of_queries: Whether it is that of the queries, where queries have one of their own.

        Raises:
            ValueError: The shapes are not those, or queries have none of their own.
        """
        if of_queries and self.shared:
            raise ValueError("gma: of_queries=True needs a module made with shared=False.")
        prefix = "query_" if of_queries else ""
        means = self.get_parameter(f"{prefix}means")
        like = means.new_empty((1, len(means), 0, means.shape[2]))
        _check_shapes("set_mixture", like, mixture, means.shape[1], "")
        means.copy_(mixture.means.view_as(means))
        self.get_parameter(f"{prefix}prior").copy_(mixture.log_prior.view(means.shape[:2]))
        var = mixture.log_var.view_as(means).double().exp()
        self.get_buffer(f"{prefix}floor").copy_(var.amin((1, 2), keepdim=True) / 2)
        self._set_var(prefix, var)

    @torch.no_grad()
    def _set_var(self, prefix: str, var: Tensor) -> None:
        rest = var.double() - self.get_buffer(f"{prefix}floor")
        # The inverse of softplus.
        self.get_parameter(f"{prefix}raw_var").copy_(rest + (-torch.expm1(-rest)).log())
