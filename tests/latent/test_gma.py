"""What is true of Gaussian-mixture attention alone."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from numattn import Unsupported, padding_mask
from numattn.core.inputs import fold
from numattn.latent import GMA, GMAAttention, gma_attention
from numattn.latent.gma import responsibilities, responsibility_lipschitz
from numattn.latent.mixture import Mixture, fit_mixture
from numattn.testing import make_qkv


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture(components=6, heads=3, dim=8, seed=5):
    """Means, log variances and log priors (unnormalised) as keywords."""
    return {
        "means": draw(heads, components, dim, seed=seed),
        "log_var": 0.5 * draw(heads, components, dim, seed=seed + 1) + 1,
        "log_prior": draw(heads, components, seed=seed + 2),
    }


def log_density(x, means, log_var, log_prior):
    """log(prior * Gaussian) from the definition: (..., N, D) and (..., K, D) -> (..., N, K)."""
    square = (x[..., :, None, :] - means[..., None, :, :]).square() / log_var.exp()[..., None, :, :]
    normaliser = log_var.sum(-1) + x.shape[-1] * math.log(2 * math.pi)
    return log_prior[..., None, :] - (square.sum(-1) + normaliser[..., None, :]) / 2


def implied(query, key, tensors, allowed=None):
    """The weights (B, H, Nq, Nk) as the paper writes them: a ratio of sums of products."""
    group = query.shape[1] // key.shape[1]
    wide = {n: t.repeat_interleave(group, dim=0) for n, t in tensors.items()}
    gamma_q = log_density(query, **wide).softmax(-1)
    gamma_k = log_density(key, **tensors).softmax(-1).repeat_interleave(group, dim=1)
    a = torch.einsum("bhik,bhjk->bhij", gamma_q, gamma_k)
    if allowed is not None:
        a = a * allowed
    return a / a.sum(-1, keepdim=True)


def attend(q, k, v, tensors, **call):
    return gma_attention(q, k, v, num_components=tensors["means"].shape[-2], **tensors, **call)


def same(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def tril(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_ratio_of_the_definition(group, causal, padded):
    q, k, v = make_qkv(150, group=group)
    mask = padding_mask(torch.tensor([90, 150])) if padded else None
    allowed = torch.ones(2, 1, 150, 150, dtype=torch.bool)
    allowed = allowed & (tril(150) if causal else True) & (mask if padded else True)
    tensors = mixture()
    out = attend(q, k, v, tensors, attn_mask=mask, is_causal=causal, enable_gqa=True)
    want = implied(q, k, tensors, allowed) @ v.repeat_interleave(group, dim=1)
    same(out, want)


def test_queries_and_keys_of_different_number():
    q, k, v = make_qkv(17, keys=60)
    same(attend(q, k, v, mixture()), implied(q, k, mixture()) @ v)


def test_mixtures_may_differ_over_the_batch():
    q, k, v = make_qkv(30)
    one, two = mixture(seed=5), mixture(seed=50)
    both = {n: torch.stack([one[n], two[n]]) for n in one}
    out = attend(q, k, v, both)
    for i, tensors in enumerate((one, two)):
        same(out[i : i + 1], attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], tensors))


def test_weights_are_a_stochastic_matrix_of_rank_at_most_k():
    q, k, _ = make_qkv(40)
    eye = torch.eye(40, dtype=q.dtype).expand(2, 3, 40, 40)
    weights = attend(q, k, eye, mixture(components=5))
    assert (weights >= 0).all()
    same(weights.sum(-1), torch.ones_like(weights[..., 0]))
    singular = torch.linalg.svdvals(weights)
    assert (singular[..., 5:] < 1e-12 * singular[..., :1]).all()
    assert (singular[..., 4] > 1e-9 * singular[..., 0]).all()


# --- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one component", "equal components"])
def test_one_kind_of_component_gives_the_mean(kind):
    q, k, v = make_qkv(200)
    tensors = mixture(components=1 if kind == "one component" else 4)
    tensors["means"] = tensors["means"][:, :1].expand_as(tensors["means"])
    tensors["log_var"] = tensors["log_var"][:, :1].expand_as(tensors["log_var"])
    same(attend(q, k, v, tensors), v.mean(2, keepdim=True).expand_as(v))
    running = v.cumsum(2) / torch.arange(1, 201)[:, None]
    same(attend(q, k, v, tensors, is_causal=True), running)


def test_equal_isotropic_variances_route_by_an_affine_softmax():
    q, k, v = make_qkv(40)
    tensors = mixture()
    var = 0.7
    tensors["log_var"] = torch.full_like(tensors["log_var"], math.log(var))
    mu, prior = tensors["means"], tensors["log_prior"]

    def route(x):
        return (x @ mu.mT / var + (prior - mu.square().sum(-1) / (2 * var))[:, None]).softmax(-1)

    a = route(q) @ route(k).mT
    same(attend(q, k, v, tensors), a @ v / a.sum(-1, keepdim=True))


def test_narrow_components_on_the_keys_give_the_identity():
    _, k, v = make_qkv(40, batch=1)
    means = k[0]
    tensors = {
        "means": means,
        "log_var": torch.full_like(means, math.log(1e-4)),
        "log_prior": torch.zeros_like(means[..., 0]),
    }
    same(attend(k, k, v, tensors), v)
    same(attend(k, k, v, tensors, is_causal=True), v)


def test_narrow_components_route_to_the_nearest_mean():
    """In the limit, each row gets the mean of the values whose keys share its nearest mean."""
    q, k, v = make_qkv(40, batch=1)
    means = mixture(components=4)["means"]
    tensors = {
        "means": means,
        "log_var": torch.full_like(means, math.log(1e-6)),
        "log_prior": torch.zeros_like(means[..., 0]),
    }
    cell_q, cell_k = (F.one_hot(torch.cdist(x, means).argmin(-1), 4).double() for x in (q, k))
    pairs = cell_q @ cell_k.mT
    met = pairs.sum(-1, keepdim=True) > 0
    want = (pairs @ v / pairs.sum(-1, keepdim=True).clamp(min=1))[met.expand_as(v)]
    same(attend(q, k, v, tensors)[met.expand_as(v)], want)
    assert met.double().mean() > 0.9


@pytest.mark.parametrize("causal", [False, True])
def test_a_component_of_prior_zero_does_not_exist(causal):
    q, k, v = make_qkv(40)
    tensors = {n: t.requires_grad_() for n, t in mixture(components=6).items()}
    removed = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor([2]), True)
    prior = tensors["log_prior"].masked_fill(removed, -torch.inf)
    fewer = {n: t[:, ~removed] for n, t in tensors.items()}
    out = attend(q, k, v, {**tensors, "log_prior": prior}, is_causal=causal)
    without = attend(q, k, v, fewer, is_causal=causal)
    same(out, without)
    leaves = list(tensors.values())
    found = torch.autograd.grad(out.square().sum(), leaves)
    for grad, want in zip(found, torch.autograd.grad(without.square().sum(), leaves), strict=True):
        same(grad, want)


# --- invariances ----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("change", ["order", "shift", "scale", "prior"])
def test_changes_that_change_nothing(change, causal):
    q, k, v = make_qkv(40)
    tensors = mixture()
    before = attend(q, k, v, tensors, is_causal=causal)
    if change == "order":
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        tensors = {n: t[:, order] for n, t in tensors.items()}
    elif change == "shift":
        by = draw(3, 1, 8, seed=9)
        q, k, tensors["means"] = q + by, k + by, tensors["means"] + by
    elif change == "scale":
        by = 1 + draw(3, 1, 8, seed=9).square()
        q, k, tensors["means"] = q * by, k * by, tensors["means"] * by
        tensors["log_var"] = tensors["log_var"] + 2 * by.log()
    else:
        tensors["log_prior"] = tensors["log_prior"] + draw(3, 1, seed=9)
    same(attend(q, k, v, tensors, is_causal=causal), before)


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_far_from_the_origin_lose_no_accuracy(causal):
    """Without the common shift the expanded square would cancel in float32."""
    q, k, v = (x.float() for x in make_qkv(40))
    tensors = {n: t.float() for n, t in mixture().items()}
    q, k, tensors["means"] = q + 300, k + 300, tensors["means"] + 300
    double = {n: t.double() for n, t in tensors.items()}
    out = attend(q, k, v, tensors, is_causal=causal)
    want = attend(*(x.double() for x in (q, k, v)), double, is_causal=causal)
    same(out.double(), want, 1e-5)


# --- options --------------------------------------------------------------------------------


def test_separate_mixtures_at_a_temperature_and_with_epsilon():
    q, k, v = make_qkv(150, group=2)
    keys, queries = mixture(), mixture(seed=20)
    own = {f"query_{name}": tensor for name, tensor in queries.items()}
    log_temperature = draw(3, seed=30)
    epsilon, tau = 0.4, 2.5 * log_temperature.exp()[:, None, None]

    def wide(t):
        return t.repeat_interleave(2, dim=0)

    gamma_q = (log_density(q, **{n: wide(t) for n, t in queries.items()}) / wide(tau)).softmax(-1)
    gamma_k = (log_density(k, **keys) / tau).softmax(-1).repeat_interleave(2, dim=1)
    pairs = torch.einsum("bhik,bhjk->bhij", gamma_q, gamma_k)
    call = {"temperature": 2.5, "epsilon": epsilon, "log_temperature": log_temperature, **own}
    for causal in (False, True):
        weights = pairs * tril(150) if causal else pairs
        total = weights.sum(-1, keepdim=True)
        want = weights @ v.repeat_interleave(2, dim=1)
        out = attend(q, k, v, keys, is_causal=causal, enable_gqa=True, **call)
        same(out, want / (total + epsilon))
        shrunk = want / total * (total / (total + epsilon))
        same(out, shrunk)


def test_the_temperature_of_the_root_of_the_width():
    q, k, v = make_qkv(20)
    out = attend(q, k, v, mixture(), temperature="sqrt")
    same(out, attend(q, k, v, mixture(), temperature=8**0.5), 0)
    factor = torch.full((3,), 8**0.5, dtype=torch.float64).log()
    same(out, attend(q, k, v, mixture(), log_temperature=factor))


@pytest.mark.parametrize("per_batch", [False, True])
def test_a_temperature_scales_the_densities(per_batch):
    """Over tau: variances times tau, log priors less what the normalisers lose, over tau."""
    q, k, v = make_qkv(30)
    tensors, tau = mixture(), torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64)
    shift = tensors["log_var"].sum(-1) / 2 * (1 - 1 / tau[:, None])
    warm = {
        "means": tensors["means"],
        "log_var": tensors["log_var"] + tau.log()[:, None, None],
        "log_prior": tensors["log_prior"] / tau[:, None] + shift,
    }
    log_temperature = tau.log().expand(2, -1) if per_batch else tau.log()
    out = attend(q, k, v, tensors, log_temperature=log_temperature)
    same(out, attend(q, k, v, warm))


def test_decoding_with_every_option_is_the_causal_call():
    q, k, v = make_qkv(20, group=2)
    method = GMA(6, temperature=1.7, epsilon=0.3)
    tensors = {
        **mixture(),
        **{f"query_{name}": tensor for name, tensor in mixture(seed=20).items()},
        "log_temperature": draw(3, seed=30),
    }
    want = method(q, k, v, is_causal=True, enable_gqa=True, **tensors)
    state = method.state(k[:, :, :7], v[:, :, :7], enable_gqa=True, **tensors)
    for t in range(7, 20):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        same(state.attend(q[:, :, t : t + 1]), want[:, :, t : t + 1])


# --- responsibilities -----------------------------------------------------------------------


def test_responsibilities_are_the_posterior():
    _, k, _ = make_qkv(30)
    tensors, tau = mixture(), torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64)
    logs = log_density(k, **tensors)
    same(responsibilities(k, **tensors), logs.softmax(-1))
    same(responsibilities(k, **tensors, temperature="sqrt"), (logs / 8**0.5).softmax(-1))
    want = (logs / tau[:, None, None]).softmax(-1)
    same(responsibilities(k, **tensors, temperature=tau), want)
    same(responsibilities(k, **tensors, temperature=tau.expand(2, -1)), want)


def test_responsibilities_far_from_the_origin_in_float32():
    """Tokens and means at 300 standard deviations; and tokens at 300 from every mean."""
    x = draw(1, 3, 200, 8, seed=3)
    tensors = mixture()
    tensors["log_var"] = 0.3 * draw(3, 6, 8, seed=6)
    moved = {**tensors, "means": tensors["means"] + 300}
    for tokens, given in ((x + 300, moved), (x + 300, tensors)):
        single = {n: t.float() for n, t in given.items()}
        found = responsibilities(tokens.float(), **single)
        double = {n: t.double() for n, t in single.items()}
        assert found.isfinite().all()
        same(found.double(), log_density(tokens.float().double(), **double).softmax(-1), 1e-4)


def test_no_finite_step_exceeds_the_lipschitz_bound():
    """A thousand random mixtures and pairs of tokens in a ball, near and far from each other."""
    source = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    trials, k, d, radius = 1000, 5, 4, 3.0
    means, log_var, log_prior = 2 * rand(trials, k, d), rand(trials, k, d), rand(trials, k)
    x = rand(trials, d)
    y = x + rand(trials, d) * 10 ** (-4 * torch.rand(trials, 1, generator=source).double())
    x, y = (t * (radius / t.norm(dim=-1, keepdim=True)).clamp(max=1) for t in (x, y))
    for tau in (1.0, 3.0):
        gamma = (
            responsibilities(t[None, :, None], means, log_var, log_prior, tau)[0, :, 0]
            for t in (x, y)
        )
        moved = torch.sub(*gamma).abs().sum(-1)
        bound = responsibility_lipschitz(means, log_var, radius, tau) * (x - y).norm(dim=-1)
        assert (moved <= bound * (1 + 1e-9)).all()
        assert (moved > 0.1 * bound).any()  # not a bound of anything


def test_the_lipschitz_bound_of_equal_variances_is_attained_and_holds_everywhere():
    means = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64)
    log_var = torch.tensor([0.3, -0.2], dtype=torch.float64).expand(2, 2)
    slope = (means[0] - means[1]) / log_var[0].exp()
    bound = responsibility_lipschitz(means, log_var, 0.0)
    same(bound, slope.norm() / 2)
    same(responsibility_lipschitz(means, log_var, 1e6), bound)
    same(responsibility_lipschitz(means, log_var, 1e6, temperature=4.0), bound / 4)
    middle, step = means.mean(0), 1e-5 * slope / slope.norm()  # both components alike
    x = torch.stack([middle - step, middle + step])[None, None]
    gamma = responsibilities(x, means[None], log_var[None], torch.zeros(1, 2).double())[0, 0]
    torch.testing.assert_close(gamma.diff(dim=0).abs().sum() / 2e-5, bound, rtol=1e-6, atol=0)


@pytest.mark.parametrize("radius", [-1.0, math.inf, math.nan])
def test_the_radius_is_checked(radius):
    with pytest.raises(ValueError, match="radius"):
        responsibility_lipschitz(torch.zeros(2, 1), torch.zeros(2, 1), radius)


# --- stability ------------------------------------------------------------------------------


def test_outputs_move_no_faster_than_the_lipschitz_bound():
    """|o(x) - o(y)| <= max |M_k - o| * |x - y| * max |G_k - G_l| / 2 over the segment, in l1."""
    _, k, v = make_qkv(40, batch=1, heads=1)
    tensors = mixture(components=5, heads=1)
    var, mu = tensors["log_var"].exp()[0], tensors["means"][0]
    gamma = log_density(k, **tensors).softmax(-1)[0, 0]
    slots = gamma.T @ v[0, 0] / gamma.sum(0)[:, None]
    x, step = draw(400, 8, seed=1), 0.7 * draw(400, 8, seed=2)
    o, moved = (attend(y[None, None], k, v, tensors)[0, 0] for y in (x, x + step))

    def widest(y):
        slope = -(y[:, None] - mu) / var
        return torch.cdist(slope, slope).amax((1, 2))

    # Slopes are affine along the segment, so their distance is largest at one of its ends.
    steepest = torch.maximum(widest(x), widest(x + step)) / 2
    reach = (slots - o[:, None]).norm(dim=-1).amax(-1)
    bound = reach * steepest * step.norm(dim=-1)
    assert ((moved - o).norm(dim=-1) <= bound).all()


def test_the_jacobian_of_the_responsibilities_obeys_its_bound():
    """The norm of J from l2 to l1, by enumeration of signs, is at most max |G_k - G_l| / 2."""
    tensors = mixture(components=5, heads=1)
    var, mu = tensors["log_var"].exp()[0], tensors["means"][0]
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=5)), dtype=torch.float64)
    for x in draw(20, 8, seed=4):
        jacobian = torch.autograd.functional.jacobian(
            lambda y: responsibilities(y[None, None, None], **tensors)[0, 0, 0], x
        )
        slope = -(x - mu) / var
        assert (signs @ jacobian).norm(dim=-1).max() <= torch.cdist(slope, slope).max() / 2


# --- the fit --------------------------------------------------------------------------------


def clustered(length=150, dim=4, group=1):
    """Tokens around a few places, queries and keys not the same."""
    q, k, v = make_qkv(length, group=group, head_dim=dim)
    places = 3 * draw(7, dim, seed=8)
    at = torch.arange(length) % 7
    return 0.5 * q + places[at], 0.5 * k + places[at] + 0.3, v


@pytest.mark.parametrize("group", [1, 2])
def test_the_fit_is_of_queries_and_keys_together(group):
    q, k, _ = clustered(group=group)
    tensors = GMA(num_components=6, num_iterations=3).fit(q, k, enable_gqa=True)
    tokens = torch.cat([fold(q, group), k], 2)
    want = fit_mixture(tokens, num_components=6, num_iterations=3, init="even")
    for name, tensor in want._asdict().items():
        same(tensors[name], tensor, 0)


@pytest.mark.parametrize("components", [1, 7, 64])
@pytest.mark.parametrize("value", [0.0, 1e-3, 1e4])
def test_tokens_that_are_all_equal_give_the_mean(components, value):
    v = make_qkv(20)[2].float()
    x = torch.full((2, 3, 20, 8), value)
    out = gma_attention(x, x, v, num_components=components)
    same(out, v.mean(2, keepdim=True).expand_as(v), 1e-5)


def test_more_components_than_tokens():
    q, k, v = make_qkv(3)
    tensors = GMA(num_components=50).fit(q, k)
    same(tensors["log_prior"].exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))
    assert all(t.isfinite().all() for t in tensors.values())
    want = implied(q[:1], k[:1], {n: t[0] for n, t in tensors.items()}) @ v[:1]
    same(gma_attention(q, k, v, num_components=50)[:1], want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_fit_ignores_padding(side):
    q, k, _ = clustered(40, group=2)
    keep = slice(0, 23) if side == "right" else slice(17, 40)
    drop = slice(23, 40) if side == "right" else slice(0, 17)
    q[0, :, drop], k[0, :, drop] = torch.inf, torch.nan
    mask = padding_mask(torch.tensor([23, 40]), side=side)
    method = GMA(num_components=6)
    padded = method.fit(q, k, attn_mask=mask, enable_gqa=True)
    short = method.fit(q[:1, :, keep], k[:1, :, keep], enable_gqa=True)
    for name, tensor in short.items():
        same(padded[name][:1], tensor)


def test_a_call_without_tensors_is_a_call_with_the_fitted_ones():
    q, k, v = clustered()
    q.requires_grad_()
    method = GMA(num_components=6, num_iterations=3)
    tensors = method.fit(q, k)
    assert not any(t.requires_grad for t in tensors.values())
    same(method(q, k, v), method(q, k, v, **tensors), 0)


# --- arguments ------------------------------------------------------------------------------


def test_a_causal_call_does_not_fit():
    q, k, v = make_qkv(10)
    with pytest.raises(Unsupported, match=r"future.*GMA\(\.\.\.\)\.fit"):
        gma_attention(q, k, v, is_causal=True)
    with pytest.raises(Unsupported, match="decoding"):
        GMA().state(k, v)


@pytest.mark.parametrize("absent", ["means", "log_var", "log_prior"])
def test_the_tensors_come_together(absent):
    q, k, v = make_qkv(10)
    tensors = {n: t for n, t in mixture().items() if n != absent}
    with pytest.raises(ValueError, match=f"together.*missing {absent}"):
        gma_attention(q, k, v, num_components=6, **tensors)


@pytest.mark.parametrize("absent", ["means", "log_var", "log_prior"])
def test_tensors_of_queries_come_together_and_with_those_of_keys(absent):
    q, k, v = make_qkv(10)
    own = {f"query_{n}": t for n, t in mixture().items()}
    with pytest.raises(ValueError, match="need means, log_var and log_prior"):
        gma_attention(q, k, v, num_components=6, **own)
    del own[f"query_{absent}"]
    with pytest.raises(ValueError, match=f"together.*missing query_{absent}"):
        attend(q, k, v, mixture(), **own)


@pytest.mark.parametrize("wrong", ["means", "log_var", "log_prior"])
def test_shapes_of_tensors_are_checked(wrong):
    q, k, v = make_qkv(10)
    tensors = mixture()
    tensors[wrong] = tensors[wrong][:2]
    with pytest.raises(ValueError, match=f"gma: {wrong} must have shape"):
        attend(q, k, v, tensors)
    with pytest.raises(ValueError, match="gma: means must have shape"):
        gma_attention(q, k, v, num_components=5, **mixture())


def test_shapes_of_other_tensors_are_checked():
    q, k, v = make_qkv(10)
    own = {f"query_{n}": t for n, t in mixture(components=5).items()}
    with pytest.raises(ValueError, match="query_means must have shape"):
        attend(q, k, v, mixture(), **own)
    with pytest.raises(ValueError, match="log_temperature must have shape"):
        attend(q, k, v, mixture(), log_temperature=torch.zeros(2))
    with pytest.raises(ValueError, match="means must have shape"):
        responsibilities(k, **{n: t[:2] for n, t in mixture().items()})


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", 0.0), ("temperature", "root"), ("temperature", math.inf), ("epsilon", -1.0)],
)
def test_options_are_in_range(option, value):
    q, k, v = make_qkv(10)
    with pytest.raises(ValueError, match=option):
        GMA(**{option: value})
    with pytest.raises(ValueError, match=option):
        gma_attention(q, k, v, **{option: value})


@pytest.mark.parametrize("option", ["num_components", "num_iterations"])
def test_options_are_positive(option):
    q, k, v = make_qkv(10)
    with pytest.raises(ValueError, match=option):
        GMA(**{option: 0})
    with pytest.raises(ValueError, match=option):
        gma_attention(q, k, v, **{option: 0})


# --- the module -----------------------------------------------------------------------------


def learner(**options):
    source = torch.Generator().manual_seed(0)
    return GMAAttention(num_heads=3, head_dim=8, generator=source, **options)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_a_step_of_training_lowers_the_loss_and_keeps_a_mixture(causal, shared):
    q, k, v = (x.float() for x in make_qkv(30))
    module = learner(num_components=5, shared=shared, temperature="sqrt")
    goal = v.flip(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = F.mse_loss(module(q, k, v, is_causal=causal), goal)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in module.parameters()]
        assert len(grads) == (4 if shared else 7)
        assert all(g.abs().amax((0, 2) if g.dim() == 3 else 0).min() > 0 for g in grads)
        optimizer.step()
    assert losses[1] < losses[0]
    tensors = module.tensors()
    assert (tensors["log_var"].exp() > module.floor * 0.999).all()
    same(tensors["log_prior"].exp().sum(-1), torch.ones(3), 1e-6)


def test_variances_stay_above_the_floor_whatever_the_parameter():
    module = learner(num_components=5)
    with torch.no_grad():
        module.raw_var.fill_(-1e4)
    var = module.tensors()["log_var"].exp()
    torch.testing.assert_close(var, module.floor.expand_as(var))
    assert (module.floor > 0).all()


@pytest.mark.parametrize("dim", [8, 128])
@pytest.mark.parametrize("temperature", [1.0, "sqrt"])
def test_a_new_module_routes_to_many_components(dim, temperature):
    """Responsibilities are neither one-hot nor equal, in any width."""
    source = torch.Generator().manual_seed(0)
    module = GMAAttention(num_heads=2, head_dim=dim, generator=source, temperature=temperature)
    x = draw(1, 2, 200, dim, seed=1).float()
    tensors = {n: t.detach() for n, t in module.tensors().items() if n != "log_temperature"}
    gamma = responsibilities(x, **tensors, temperature=temperature)
    entropy = -(gamma * gamma.log()).sum(-1).mean() / math.log(128)
    assert 0.5 < entropy < 0.99


def test_calibration_is_the_fit_on_all_samples():
    q, k, v = (x.float() for x in clustered(60, dim=8, group=2))
    module = learner(num_components=6)
    module.calibrate(q, k, enable_gqa=True)
    flat = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k)]
    tensors = GMA(num_components=6).fit(*flat, enable_gqa=True)
    found = module.tensors()
    for name, tensor in tensors.items():
        same(found[name].detach(), tensor[0], 1e-5)
    want = attend(q, k, v, {n: t[0] for n, t in tensors.items()}, enable_gqa=True)
    same(module(q, k, v, enable_gqa=True).detach(), want, 1e-4)


def test_calibration_of_separate_mixtures_pairs_their_components():
    """Queries are fitted, and the keys from there, at the temperature of the option."""
    q, k, v = (x.float() for x in clustered(60, dim=8))
    module = learner(num_components=6, shared=False)
    with torch.no_grad():
        module.log_temperature.fill_(1.0)
    module.calibrate(q, k)
    flat = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k)]
    queries = fit_mixture(flat[0], num_components=6, init="even")
    keys = fit_mixture(flat[1], num_components=6, init=queries)
    given = {n: t[0] for n, t in keys._asdict().items()}
    own = {f"query_{n}": t[0] for n, t in queries._asdict().items()}
    same(module(q, k, v).detach(), attend(q, k, v, given, **own), 1e-4)


def test_calibration_on_equal_tokens_is_finite():
    module = learner(num_components=6)
    module.calibrate(torch.ones(1, 3, 5, 8), torch.ones(1, 3, 5, 8))
    q, k, v = (x.float() for x in make_qkv(10))
    assert all(t.isfinite().all() for t in module.tensors().values())
    assert module(q, k, v).isfinite().all()


@pytest.mark.parametrize("shared", [True, False])
def test_the_modules_state_decodes(shared):
    q, k, v = (x.float() for x in make_qkv(12, group=2))
    module = learner(num_components=5, shared=shared, epsilon=0.1)
    with torch.no_grad():
        module.log_temperature.copy_(torch.tensor([0.3, -0.5, 1.0]))
    want = module(q, k, v, is_causal=True, enable_gqa=True).detach()
    state = module.state(k[:, :, :4], v[:, :, :4], enable_gqa=True)
    for t in range(4, 12):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        same(state.attend(q[:, :, t : t + 1]), want[:, :, t : t + 1], 1e-5)


@pytest.mark.parametrize("of_queries", [False, True])
def test_a_mixture_can_be_given_to_a_module(of_queries):
    q, k, v = make_qkv(30, heads=3, value_dim=8)
    mixture = fit_mixture(q, num_components=4)
    one = Mixture(*(t[0] for t in mixture))
    module = GMAAttention(num_heads=3, head_dim=8, num_components=4, shared=not of_queries).double()
    module.set_mixture(one, of_queries=of_queries)
    prefix = "query_" if of_queries else ""
    for name, tensor in one._asdict().items():
        torch.testing.assert_close(module.tensors()[prefix + name], tensor, rtol=1e-10, atol=1e-10)
    removed = Mixture(
        one.means, one.log_var, one.log_prior.index_fill(1, torch.tensor(2), -torch.inf)
    )
    module.set_mixture(removed, of_queries=of_queries)
    assert (module.tensors()[prefix + "log_prior"][:, 2] == -torch.inf).all()
    assert module(q, k, v).isfinite().all()


def test_a_mixture_that_does_not_fit_is_refused():
    module = GMAAttention(num_heads=3, head_dim=8, num_components=4)
    q, _, _ = make_qkv(30, heads=3)
    with pytest.raises(ValueError, match="set_mixture: means must have shape"):
        module.set_mixture(fit_mixture(q[:1], num_components=5))
    with pytest.raises(ValueError, match="shared=False"):
        module.set_mixture(fit_mixture(q[:1], num_components=4), of_queries=True)
