"""Fitting mixtures, and what pruning, splitting and reseeding do to them."""

import math

import pytest
import torch

from numattn.latent import gma_attention, mixture
from numattn.latent.mixture import (
    Mixture,
    expected_components,
    fit_mixture,
    prune,
    reseed,
    split,
    stick_breaking_log_prior,
)

KINDS = ("diagonal", "tied", "isotropic")
INITS = ("kmeans++", "even")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def fit(tokens, exists=None, *, num_components=4, init="kmeans++", seed=0, **options):
    generator = source(seed) if init == "kmeans++" else None
    return fit_mixture(
        tokens, exists, num_components=num_components, init=init, generator=generator, **options
    )


def clustered(length=150, *, batch=2, heads=3, dim=4, seed=0):
    """Tokens around a few places, each batch element and head with its own noise."""
    places = 3 * draw(7, dim, seed=8)
    return 0.5 * draw(batch, heads, length, dim, seed=seed) + places[torch.arange(length) % 7]


def some(components=5, *, heads=3, dim=4, seed=5):
    return Mixture(
        draw(heads, components, dim, seed=seed),
        0.5 * draw(heads, components, dim, seed=seed + 1),
        draw(heads, components, seed=seed + 2).log_softmax(-1),
    )


def log_density(x, means, log_var, log_prior):
    """log(prior * Gaussian) from the definition: (..., N, D) and (..., K, D) -> (..., N, K)."""
    square = (x[..., :, None, :] - means[..., None, :, :]).square() / log_var.exp()[..., None, :, :]
    normaliser = log_var.sum(-1) + x.shape[-1] * math.log(2 * math.pi)
    return log_prior[..., None, :] - (square.sum(-1) + normaliser[..., None, :]) / 2


def responsibilities(x, found, temperature=1.0):
    return (log_density(x, *found) / temperature).softmax(-1)


def objective(tokens, found):
    """Log-likelihood, and one pseudo-token with the tokens' mean and variances per component."""
    mean, var = tokens.mean(-2, keepdim=True), tokens.var(-2, correction=0, keepdim=True)
    at_mean = log_density(mean, *found)[..., 0, :]  # (B, H, K)
    pseudo = at_mean - (var / found.log_var.exp()).sum(-1) / 2
    return log_density(tokens, *found).logsumexp(-1).sum(-1) + pseudo.sum(-1)


def same(found, want, tolerance=1e-10):
    torch.testing.assert_close(found, want, rtol=0, atol=tolerance)


def attend(q, k, v, found):
    return gma_attention(q, k, v, num_components=found.means.shape[-2], **found._asdict())


# --- the fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", KINDS)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("components", [3, 12])
def test_no_step_of_em_lowers_its_objective(components, init, covariance):
    tokens = clustered()
    options = {"num_components": components, "covariance": covariance, "init": init}
    values = torch.stack(
        [objective(tokens, fit(tokens, num_iterations=n, **options)) for n in range(1, 12)]
    )
    assert (values.diff(dim=0) >= -1e-9 * values[1:].abs()).all()
    assert (values[-1] > values[0]).all()


@pytest.mark.parametrize("covariance", KINDS)
def test_a_step_of_em_from_the_definition(covariance):
    tokens, before = clustered(), some()
    after = fit_mixture(
        tokens, num_components=5, num_iterations=1, init=before, covariance=covariance
    )
    mean, var = tokens.mean(2, keepdim=True), tokens.var(2, correction=0, keepdim=True)
    r = responsibilities(tokens, before)
    count = r.sum(2) + 1
    means = (r.mT @ tokens + mean) / count[..., None]
    away = (tokens[..., None, :] - means[:, :, None]).square()
    sums = torch.einsum("bhnk,bhnkd->bhkd", r, away) + (means - mean).square() + var
    spread = {
        "diagonal": sums / count[..., None],
        "tied": (sums.sum(2, keepdim=True) / count.sum(-1)[..., None, None]).expand_as(sums),
        "isotropic": (sums / count[..., None]).mean(-1, keepdim=True).expand_as(sums),
    }[covariance]
    same(after.means, means)
    same(after.log_var.exp(), spread)
    same(after.log_prior.exp(), count / (tokens.shape[2] + 5))


def test_the_start_by_kmeans_is_the_clusters_of_the_seeds():
    tokens = clustered()
    found = fit(tokens, num_iterations=0)
    seeds = mixture._seeds(mixture._centred(tokens, None), 4, source())
    seeds = seeds + tokens.mean(2, keepdim=True)
    one_hot = torch.cdist(tokens, seeds).argmin(-1)[..., None] == torch.arange(4)
    count = one_hot.sum(2) + 1
    mean, var = tokens.mean(2, keepdim=True), tokens.var(2, correction=0, keepdim=True)
    want = (one_hot.double().mT @ tokens + mean) / count[..., None]
    second = (one_hot.double().mT @ tokens.square() + mean.square() + var) / count[..., None]
    same(found.means, want)
    same(found.log_var.exp(), second - want.square())
    same(found.log_prior.exp(), count.double() / 154)


def test_seeds_are_drawn_by_their_squared_distance():
    """Three places and one that does not exist: frequencies over many heads, within 4 sigma."""
    heads = 20_000
    places = torch.tensor([0.0, 1.0, 100.0, 3.0], dtype=torch.float64)
    exists = torch.tensor([True, True, False, True])[None, None]
    x = mixture._centred(places[None, None, :, None].expand(1, heads, 4, 1), exists)
    seeds = mixture._seeds(x, 2, source(3)) + x.center
    first, second = seeds[0, :, :, 0].round().unbind(-1)
    for i in (0.0, 1.0, 3.0):
        chance = {j: (i - j) ** 2 / sum((i - m) ** 2 for m in (0, 1, 3)) for j in (0, 1, 3)}
        for j, p in chance.items():
            p = p / 3
            frequency = ((first == i) & (second == j)).double().mean().item()
            assert abs(frequency - p) <= 4 * math.sqrt(p * (1 - p) / heads)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_seeds_exist_at_either_end_of_the_draw(monkeypatch, uniform):
    monkeypatch.setattr(
        mixture, "draw", lambda shape, *_: torch.full(shape, uniform, dtype=torch.float64)
    )
    tokens = torch.tensor([9.0, 1.0, 2.0, 4.0, 9.0]).view(1, 1, 5, 1)
    exists = torch.tensor([False, True, True, True, False]).view(1, 1, 5)
    x = mixture._centred(tokens, exists)
    seeds = (mixture._seeds(x, 3, None) + x.center).flatten().tolist()
    assert sorted(round(seed, 9) for seed in seeds) == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("covariance", KINDS)
def test_a_planted_mixture_is_found(covariance):
    """Far apart, its moments come out within 5 standard errors and what the pseudo-token adds."""
    length, dim = 3000, 3
    places = 40 * torch.eye(4, dim, dtype=torch.float64)
    log_var = {
        "diagonal": draw(4, dim, seed=1),
        "tied": draw(1, dim, seed=1).expand(4, dim),
        "isotropic": draw(4, 1, seed=1).expand(4, dim),
    }[covariance]
    share = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    label = torch.multinomial(share, length, replacement=True, generator=source(2))
    noise = draw(length, dim, seed=3) * (log_var / 2).exp()[label]
    tokens = (places[label] + noise)[None, None]
    found = fit(tokens, covariance=covariance, seed=1)
    order = torch.cdist(places, found.means[0, 0]).argmin(-1)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    means, logs, prior = (t[0, 0, order] for t in found)
    count, var, total = length * share[:, None], log_var.exp(), tokens[0, 0]
    pull = (total.mean(0) - places).abs() / (0.8 * count)
    assert ((means - places).abs() <= 5 * (var / count).sqrt() + pull).all()
    extra = (total.var(0) + (total.mean(0) - places).square()) / (0.8 * count)
    if covariance == "isotropic":
        extra = extra.mean(-1, keepdim=True)
    if covariance == "tied":
        extra, count = extra.sum(0), torch.tensor(length)
    assert ((logs.exp() - var).abs() <= 5 * var * (2 / count).sqrt() + extra).all()
    error = (share * (1 - share) / length).sqrt()
    assert ((prior.exp() - share).abs() <= 5 * error + 4 / length).all()


def test_seeding_finds_clusters_that_even_spacing_misses():
    """A tenth of the tokens, at the end of the sequence, lies far away."""
    tokens = draw(1, 1, 100, 2)
    tokens[:, :, 95:] += 100
    found = fit(tokens, num_components=2, num_iterations=1)
    assert found.means[..., 0].max() > 50
    even = fit(tokens, num_components=2, num_iterations=1, init="even")
    assert even.means[..., 0].max() < 50


@pytest.mark.parametrize("init", INITS)
def test_one_component_is_the_mean_and_the_variances(init):
    tokens = clustered()
    found = fit(tokens, num_components=1, num_iterations=1, init=init)
    same(found.means, tokens.mean(2, keepdim=True))
    same(found.log_var.exp(), tokens.var(2, correction=0, keepdim=True))
    same(found.log_prior, torch.zeros(2, 3, 1, dtype=torch.float64))


@pytest.mark.parametrize("covariance", KINDS)
def test_covariances_are_of_their_kind(covariance):
    log_var = fit(clustered(), covariance=covariance).log_var
    over_components = log_var.amax(2) - log_var.amin(2)
    over_axes = log_var.amax(3) - log_var.amin(3)
    assert bool((over_components == 0).all()) is (covariance == "tied")
    assert bool((over_axes == 0).all()) is (covariance == "isotropic")


@pytest.mark.parametrize("covariance", ["diagonal", "tied"])
def test_variances_stop_at_the_floor(covariance):
    """One entry never varies: its variance is a thousandth of the tokens' mean variance."""
    tokens = clustered()
    tokens[..., 1] = 5.0
    found = fit(tokens, covariance=covariance)
    floor = 1e-3 * tokens.var(2, correction=0).mean(-1)[..., None].expand(2, 3, 4)
    torch.testing.assert_close(found.log_var[..., 1].exp(), floor, rtol=1e-6, atol=0)
    assert (found.log_var.exp() >= 0.999999 * floor[..., None]).all()


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("value", [0.0, 1e-3, 1e4])
def test_tokens_that_are_all_equal(value, init):
    tokens = torch.full((2, 3, 20, 8), value)
    found = fit(tokens, num_components=7, init=init)
    assert all(t.isfinite().all() for t in found)
    same(found.means, torch.full_like(found.means, value), 1e-6 * value)
    same(found.log_prior.exp().sum(-1), torch.ones(2, 3), 1e-6)


def test_components_beyond_the_tokens_start_at_the_pseudo_token():
    tokens = draw(2, 3, 4, 5)
    tokens[:, :, 3] = tokens[:, :, 0]  # three different ones
    found = fit(tokens, num_components=9, num_iterations=0)
    spare = found.log_prior.argsort(-1)[..., :6]
    mean, var = tokens.mean(2, keepdim=True), tokens.var(2, correction=0, keepdim=True)
    index = spare[..., None].expand(2, 3, 6, 5)
    same(found.means.gather(2, index), mean.expand(2, 3, 6, 5))
    same(found.log_var.gather(2, index).exp(), var.expand(2, 3, 6, 5))
    counts = (13 * found.log_prior.exp()).sort(-1).values
    same(counts, torch.tensor([1.0] * 6 + [2, 2, 3]).double().expand(2, 3, 9))


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("init", INITS)
def test_more_components_than_tokens(init, length):
    found = fit(draw(2, 3, length, 5), num_components=50, init=init)
    assert found.means.shape == (2, 3, 50, 5)
    assert all(t.isfinite().all() for t in found)
    same(found.log_prior.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_truncation(side, init):
    tokens = clustered(40)
    keep = slice(0, 23) if side == "right" else slice(17, 40)
    drop = slice(23, 40) if side == "right" else slice(0, 17)
    exists = torch.ones(2, 1, 40, dtype=torch.bool)
    exists[0, :, drop] = False
    tokens[0, :, drop, :2], tokens[0, :, drop, 2:] = torch.inf, torch.nan
    padded = fit(tokens, exists, init=init)
    short = fit(tokens[:1, :, keep], init=init)
    whole = fit(tokens[:1], exists[:1], init=init)
    for a, b, c in zip(padded, short, whole, strict=True):
        same(a[:1], b)
        same(c, b)


@pytest.mark.parametrize("init", INITS)
def test_nothing_that_exists(init):
    found = fit(torch.full((1, 2, 5, 3), torch.nan), torch.zeros(1, 1, 5).bool(), init=init)
    assert all(t.isfinite().all() for t in found)


def test_the_generator_alone_decides():
    tokens = clustered()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, again, other = (fit(tokens, seed=s, num_iterations=0) for s in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one.means, again.means)
    assert not torch.equal(one.means, other.means)
    drawn = fit_mixture(tokens, num_components=4)
    torch.manual_seed(0)
    same(drawn.means, fit_mixture(tokens, num_components=4).means, 0)


def test_batch_elements_are_fitted_apart():
    tokens = clustered(batch=3)
    for together, alone in zip(fit(tokens), fit(tokens[2:]), strict=True):
        same(together[2:], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fit_is_made_in_float64(dtype):
    """Far from the origin float32 sums would lose what float64 ones keep."""
    tokens = (clustered() + 1000).to(dtype)
    found, want = fit(tokens), fit(tokens.double())
    for a, b in zip(found, want, strict=True):
        assert a.dtype is torch.float32
        assert torch.equal(a, b.float())


def test_blocks_of_tokens_change_nothing(monkeypatch):
    tokens = clustered(300)
    whole = fit(tokens)
    cut = []

    def narrow(device):
        cut.append(device)
        return 64 * 2 * 3 * 4  # 64 tokens

    monkeypatch.setattr(mixture, "tile_elements", narrow)
    for a, b in zip(fit(tokens), whole, strict=True):
        same(a, b)
    assert cut


@pytest.mark.parametrize("init", INITS)
def test_a_fit_goes_on_from_a_mixture(init):
    tokens = clustered()
    half = fit(tokens, num_iterations=3, init=init)
    rest = fit_mixture(tokens, num_components=4, num_iterations=4, init=half)
    for a, b in zip(rest, fit(tokens, num_iterations=7, init=init), strict=True):
        same(a, b)


@pytest.mark.parametrize("covariance", KINDS)
def test_removed_components_stay_removed(covariance):
    tokens, start = clustered(), some()
    removed = torch.tensor([False, True, False, False, True])
    options = {"num_iterations": 3, "covariance": covariance}
    masked = start._replace(log_prior=start.log_prior.masked_fill(removed, -torch.inf))
    found = fit_mixture(tokens, num_components=5, init=masked, **options)
    fewer = Mixture(*(t[:, ~removed] for t in start))
    want = fit_mixture(tokens, num_components=3, init=fewer, **options)
    assert (found.log_prior[..., removed] == -torch.inf).all()
    assert all(t.isfinite().all() for t in found[:2])
    for a, b in zip(found, want, strict=True):
        same(a[:, :, ~removed], b)


def test_the_fit_is_a_constant():
    tokens = clustered().requires_grad_()
    assert not any(t.requires_grad for t in fit(tokens))


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "num_components", {"num_components": 0}),
        (ValueError, "num_iterations", {"num_iterations": -1}),
        (ValueError, "init must be one of", {"init": "random"}),
        (ValueError, "covariance must be one of", {"covariance": "full"}),
        (ValueError, "leave generator out", {"init": "even", "generator": source()}),
        (ValueError, "means of the mixture must have shape", {"init": some()}),
        (ValueError, "exists must have shape", {"exists": torch.ones(2, 3, 150).bool()}),
        (TypeError, "exists must be bool", {"exists": torch.ones(2, 1, 150)}),
        (ValueError, "tokens must have shape", {"tokens": torch.zeros(3, 4)}),
        (TypeError, "floating", {"tokens": torch.zeros(1, 1, 3, 4).long()}),
    ],
)
def test_arguments_are_checked(error, match, options):
    with pytest.raises(error, match=match):
        fit_mixture(**{"tokens": clustered(), "num_components": 4, **options})


# --- priors ---------------------------------------------------------------------------------


def test_sticks_are_broken_as_defined():
    share = torch.tensor([[0.5, 0.2, 0.9]], dtype=torch.float64)
    prior = stick_breaking_log_prior(share.logit()).exp()
    same(prior, torch.tensor([[0.5, 0.1, 0.36, 0.04]], dtype=torch.float64))
    same(stick_breaking_log_prior(torch.zeros(2, 0)), torch.zeros(2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_sticks_sum_to_one_whatever_the_logits(size, dtype):
    logits = (size * draw(50, 63)).to(dtype).requires_grad_()
    log_prior = stick_breaking_log_prior(logits)
    eps = torch.finfo(dtype).eps
    # A log of size L is known to L eps; those that count are no larger than size * 63.
    same(log_prior.logsumexp(-1), torch.zeros(50, dtype=dtype), 64 * eps * max(size, 1.0))
    assert log_prior.isfinite().all()
    log_prior.logsumexp(-1).sum().backward()
    assert logits.grad.isfinite().all()


def test_expected_components_of_a_dirichlet_process():
    for alpha in (0.3, 1.0, 7.5):
        for number in (0, 1, 2, 50):
            want = sum(alpha / (alpha + n) for n in range(number))
            assert math.isclose(expected_components(alpha, number), want, rel_tol=1e-11, abs_tol=0)
    with pytest.raises(ValueError, match="concentration"):
        expected_components(0.0, 5)
    with pytest.raises(ValueError, match="num_tokens"):
        expected_components(1.0, -1)


def test_sticks_of_a_beta_law_use_the_expected_number_of_components():
    """Means of 1 - (1 - prior)^N over draws of Beta(1, alpha), within 4 sigma."""
    alpha, number, trials = 2.0, 30, 4000
    uniform = torch.rand(trials, 199, dtype=torch.float64, generator=source())
    logits = torch.special.logit(1 - uniform ** (1 / alpha))
    prior = stick_breaking_log_prior(logits).exp()
    used = (1 - (1 - prior) ** number).sum(-1)
    error = used.std() / math.sqrt(trials)
    assert abs(used.mean() - expected_components(alpha, number)) <= 4 * error


# --- pruning --------------------------------------------------------------------------------


def test_pruning_moves_responsibilities_by_twice_what_is_removed():
    x, found = draw(3, 200, 4, seed=1), some(components=8)
    before = responsibilities(x, found)
    usage = before.mean(-2)
    pruned = prune(found, usage, threshold=0.1)
    dead = usage < 0.1
    assert dead.any()
    assert not dead.all(-1).any()
    after = responsibilities(x, pruned)
    mass = (before * dead[:, None]).sum(-1)
    moved = (after - before).abs().sum(-1)
    same(moved, 2 * mass)
    assert (moved <= 2 * mass.max() + 1e-12).all()
    assert (after[dead[:, None].expand_as(after)] == 0).all()


def test_pruning_is_the_mixture_without_the_component():
    q, k, v = (draw(1, 3, 30, 4, seed=s) for s in (1, 2, 3))
    found = some()
    usage = torch.full((3, 5), 0.249, dtype=torch.float64)
    usage[:, 2] = 0.004
    pruned = prune(found, usage)
    keep = torch.arange(5) != 2
    assert torch.equal(pruned.log_prior > -torch.inf, keep.expand(3, 5))
    same(attend(q, k, v, pruned), attend(q, k, v, Mixture(*(t[:, keep] for t in found))))


def test_the_heaviest_component_is_never_pruned():
    usage = torch.tensor([[0.2, 0.5, 0.3]])
    pruned = prune(some(3, heads=1), usage, threshold=0.9)
    assert (pruned.log_prior > -torch.inf).tolist() == [[False, True, False]]


def test_the_threshold_is_a_twentieth_of_an_equal_share():
    usage = torch.tensor([[0.0124, 0.0126, 0.5, 0.475]])
    pruned = prune(some(4, heads=1), usage)
    assert (pruned.log_prior > -torch.inf).tolist() == [[False, True, True, True]]


def test_pruning_needs_the_usage_of_every_head():
    with pytest.raises(ValueError, match="usage must have shape"):
        prune(some(), torch.ones(5))


# --- splitting ------------------------------------------------------------------------------


def moments(found):
    weight = found.log_prior.exp()[..., None]
    mean = (weight * found.means).sum(-2)
    return mean, (weight * (found.means.square() + found.log_var.exp())).sum(-2)


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("delta", [0.0, 0.7])
def test_a_split_keeps_mean_and_variances_of_the_mixture(delta, share):
    found = some()
    parts = split(found, delta=delta, share=share)
    for a, b in zip(moments(parts), moments(found), strict=True):
        same(a, b)
    same(parts.log_prior.exp().sum(-1), torch.ones(3, dtype=torch.float64))


def test_a_split_by_hand():
    found = Mixture(
        torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]),
        torch.tensor([[[0.0, math.log(4.0)], [9.0, 9.0]]]),
        torch.tensor([[0.6, 0.4]]).log(),
    )
    parts = split(found, delta=0.5)
    same(parts.means, torch.tensor([[[1.0, 1.0], [0.0, 0.0], [1.0, 3.0]]]), 1e-6)
    var = torch.tensor([[[1.0, 3.0], [0.0, 0.0], [1.0, 3.0]]])
    same(parts.log_var[:, ::2].exp(), var[:, ::2], 1e-6)
    same(parts.log_prior.exp(), torch.tensor([[0.3, 0.4, 0.3]]), 1e-6)
    same(parts.log_var[:, 1], found.log_var[:, 1], 0)


def test_each_head_splits_its_own_component():
    found = some()
    heaviest = found.log_prior.argmax(-1)
    for a, b in zip(split(found), split(found, heaviest), strict=True):
        same(a, b, 0)
    chosen = torch.tensor([4, 0, 2])
    parts = split(found, chosen, into=torch.tensor([1, 1, 3]))
    alone = split(found, chosen)
    assert parts.means.shape == found.means.shape
    for head, (at, to) in enumerate([(4, 1), (0, 1), (2, 3)]):
        for a, b, old in zip(parts, alone, found, strict=True):
            same(a[head, at], b[head, at], 0)
            same(a[head, to], b[head, 5], 0)
            rest = [k for k in range(5) if k not in (at, to)]
            same(a[head, rest], old[head, rest], 0)


def test_a_split_without_distance_divides_the_responsibilities():
    x, found = draw(3, 50, 4, seed=1), some()
    for tau in (1.0, torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)):
        parts = split(found, 1, delta=0.0, share=0.3, temperature=tau)
        at = tau[:, None, None] if isinstance(tau, torch.Tensor) else tau
        before, after = responsibilities(x, found, at), responsibilities(x, parts, at)
        same(after[..., 1], 0.7 * before[..., 1])
        same(after[..., 5], 0.3 * before[..., 1])
        same(after[..., [0, 2, 3, 4]], before[..., [0, 2, 3, 4]])


@pytest.mark.parametrize("share", [0.5, 0.1, 1e-3])
def test_what_a_split_does_to_attention(share):
    """Tokens of the component meet less often: row weights move by a known amount, and no more."""
    q, k = (draw(1, 3, 40, 4, seed=s) for s in (1, 2))
    eye = torch.eye(40, dtype=q.dtype).expand(1, 3, 40, 40)
    found = some()
    before = attend(q, k, eye, found)
    after = attend(q, k, eye, split(found, 1, delta=0.0, share=share))
    gamma_q, gamma_k = responsibilities(q, found), responsibilities(k, found)
    z = gamma_k.sum(-2)
    through = gamma_q[..., 1] * z[..., None, 1] / (gamma_q @ z[..., None])[..., 0]
    lost = 2 * share * (1 - share)
    column = (gamma_k / z[..., None, :])[..., 1]
    s = through[..., None]
    same(after, (before - lost * s * column[..., None, :]) / (1 - lost * s))
    moved = (after - before).abs().sum(-1) / 2
    most = (2 - lost - 2 * math.sqrt(1 - lost)) / lost
    assert (moved <= through * (1 - through) * lost / (1 - lost * through) + 1e-12).all()
    assert moved.max() <= most <= share * (1 - share)
    if share == 0.5:
        assert math.isclose(most, 3 - 2 * math.sqrt(2))
    assert moved.max() > most / 100


def test_a_split_of_all_components_or_of_the_only_one_changes_nothing():
    q, k, v = (draw(1, 3, 40, 4, seed=s) for s in (1, 2, 3))
    one = some(components=1)
    same(attend(q, k, v, split(one)), attend(q, k, v, one), 1)
    same(attend(q, k, v, split(one, delta=0.0)), attend(q, k, v, one))
    found = parts = some(components=3)
    for component in range(3):
        parts = split(parts, component, delta=0.0)
    same(attend(q, k, v, parts), attend(q, k, v, found))


def test_a_split_and_steps_of_em_find_what_one_component_covered():
    tokens = draw(1, 1, 600, 2, seed=1)
    tokens[:, :, ::3, 0] += 20
    tokens[:, :, 1::3, 1] += 20
    found = fit(tokens, num_components=1)
    values = [objective(tokens, found).item()]
    for number in (2, 3):
        found = fit_mixture(tokens, num_components=number, num_iterations=30, init=split(found))
        values.append(objective(tokens, found).item())
    assert values[0] < values[1] < values[2]
    centers = torch.tensor([[20.0, 0.0], [0.0, 20.0], [0.0, 0.0]], dtype=torch.float64)
    # The mean of 200 tokens, and a pseudo-token at most 20 away.
    assert (torch.cdist(centers, found.means[0, 0]).amin(-1) < 5 / math.sqrt(200) + 20 / 200).all()


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("delta must lie", {"delta": 1.0}),
        ("delta must lie", {"delta": -0.1}),
        ("share in", {"share": 0.0}),
        ("share in", {"share": 1.0}),
        ("component must be 0 to 4", {"component": 5}),
        ("component must be 0 to 4", {"component": -1}),
        ("into must be 0 to 4", {"into": 5}),
        ("component must have shape", {"component": torch.zeros(2).long()}),
        ("into must have shape", {"into": torch.zeros(3, 5).long()}),
    ],
)
def test_arguments_of_a_split_are_checked(match, options):
    with pytest.raises(ValueError, match=match):
        split(some(), **options)


# --- reseeding ------------------------------------------------------------------------------


def reseeded(found, tokens, dead):
    """One head's dead components moved one after the other, from the definition."""
    means, log_var, log_prior = (t.clone() for t in found)
    number = len(dead)
    alive = [k for k in range(number) if not dead[k]]
    weight = log_prior[alive].softmax(-1)
    log_prior[alive] = (weight * len(alive) / number).log()
    within = (weight[:, None] * log_var[alive].exp()).sum(0).log()
    for k in range(number):
        if dead[k]:
            known = Mixture(means[alive], log_var[alive], log_prior[alive])
            residual = -log_density(tokens, *known).amax(-1)
            means[k], log_var[k] = tokens[residual.argmax()], within
            log_prior[k] = -math.log(number)
            alive.append(k)
    return Mixture(means, log_var, log_prior)


def test_reseeding_from_the_definition():
    tokens, found = clustered(batch=1), some()
    dead = torch.zeros(3, 5, dtype=torch.bool)
    dead[0, 1] = dead[1, 0] = dead[1, 3] = True
    moved = reseed(found, tokens, dead)
    for head in range(3):
        one = Mixture(*(t[head] for t in found))
        want = reseeded(one, tokens[0, head], dead[head].tolist())
        for a, b in zip(moved, want, strict=True):
            same(a[head], b)
    same(moved.log_prior.exp().sum(-1), torch.ones(3, dtype=torch.float64))


def test_reseeding_nothing_only_normalises():
    found = some()
    loose = found._replace(log_prior=found.log_prior + 3)
    for a, b in zip(reseed(loose, clustered(), torch.zeros(3, 5).bool()), found, strict=True):
        same(a, b)


def test_equal_tokens_are_not_taken_twice():
    tokens = torch.tensor([0.0, 0.0, 50.0, 50.0, 30.0]).view(1, 1, 5, 1).double()
    start = Mixture(*(torch.zeros(1, 3, 1).double() for _ in range(2)), torch.zeros(1, 3).double())
    moved = reseed(start, tokens, torch.tensor([[False, True, True]]))
    same(moved.means.flatten(), torch.tensor([0.0, 50.0, 30.0]).double())


@pytest.mark.parametrize("side", ["left", "right"])
def test_reseeding_ignores_padding(side):
    tokens, found = clustered(40, batch=1), some()
    keep = slice(0, 23) if side == "right" else slice(17, 40)
    exists = torch.zeros(1, 1, 40, dtype=torch.bool)
    exists[..., keep] = True
    padded = tokens.masked_fill(~exists[..., None], torch.nan)
    dead = torch.zeros(3, 5, dtype=torch.bool).index_fill(1, torch.tensor([1, 2]), True)
    want = reseed(found, tokens[:, :, keep], dead)
    for a, b in zip(reseed(found, padded, dead, exists), want, strict=True):
        same(a, b)
    nothing = reseed(found, padded, dead, torch.zeros_like(exists))
    same(nothing.means, found.means)
    assert all(t.isfinite().all() for t in nothing)


def test_a_shared_mixture_sees_the_whole_batch():
    tokens, found = clustered(), some()
    exists = torch.ones(2, 1, 150, dtype=torch.bool)
    exists[1, :, 100:] = False
    dead = torch.zeros(3, 5, dtype=torch.bool)
    dead[:, 2] = True
    joined = torch.cat([tokens[:1], tokens[1:, :, :100]], 2)
    for a, b in zip(reseed(found, tokens, dead, exists), reseed(found, joined, dead), strict=True):
        same(a, b)
    both = Mixture(*(t.expand(2, *t.shape) for t in found))
    apart = reseed(both, tokens, dead.expand(2, 3, 5), exists)
    want = reseed(found, tokens[:1], dead)
    for a, b in zip(apart, want, strict=True):
        same(a[0], b)


def test_the_heaviest_component_counts_as_alive():
    found = some()
    moved = reseed(found, clustered(), torch.ones(3, 5).bool())
    at = found.log_prior.argmax(-1)
    heads = torch.arange(3)
    same(moved.means[heads, at], found.means[heads, at])
    same(moved.log_prior.exp(), torch.full((3, 5), 0.2, dtype=torch.float64))


def test_reseeding_and_em_find_what_was_missed():
    """Two of three components on one cluster: the dead one goes to the cluster without any."""
    tokens = draw(1, 1, 600, 2, seed=1)
    tokens[:, :, ::3, 0] += 40
    tokens[:, :, 1::3, 1] += 40
    means = torch.tensor([[[40.0, 0.0], [0.0, 40.0], [0.0, 40.0]]]).double()
    start = Mixture(means, torch.zeros_like(means), torch.tensor([[0.0, 0.0, -9.0]]).double())
    moved = reseed(start, tokens, torch.tensor([[False, False, True]]))
    assert moved.means[0, 2].norm() < 10
    found = fit_mixture(tokens, num_components=3, init=moved)
    assert found.means[0, 0, 2].norm() < 5 / math.sqrt(200) + 40 / 200


def test_reseeding_keeps_the_type_and_takes_no_gradient():
    tokens, found = clustered().float(), Mixture(*(t.float().requires_grad_() for t in some()))
    dead = torch.zeros(3, 5, dtype=torch.bool)
    dead[:, 0] = True
    moved = reseed(found, tokens, dead)
    assert all(t.dtype is torch.float32 and not t.requires_grad for t in moved)


def test_arguments_of_reseeding_are_checked():
    tokens, found, dead = clustered(), some(), torch.zeros(3, 5).bool()
    with pytest.raises(ValueError, match="dead must have shape"):
        reseed(found, tokens, dead[0])
    with pytest.raises(ValueError, match="means of the mixture must have shape"):
        reseed(found, tokens[..., :2], dead)
    with pytest.raises(TypeError, match="exists must be bool"):
        reseed(found, tokens, dead, torch.ones(2, 1, 150))
