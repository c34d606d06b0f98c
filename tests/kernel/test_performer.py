"""What theory says of FAVOR+: unbiased, of known variance, indifferent to its preconditioner.

Monte Carlo estimates are held to four standard errors, which theory gives.
"""

import math
from dataclasses import dataclass, replace
from statistics import median

import pytest
import torch

from numattn import Unsupported, padding_mask, testing
from numattn.core.linalg import draw, orthogonal_gaussian
from numattn.kernel import Performer, performer_attention
from numattn.kernel.performer import _features, expected_error
from numattn.kernel.random_features import DRAWS, Statistics, directions
from numattn.testing import make_qkv, reference
from numattn.testing.inputs import TOLERANCE

CPU = torch.device("cpu")
KINDS = ("positive", "hyperbolic", "favor++", "anisotropic")
DAMPED = ("favor++", "anisotropic")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def pair(dim, square):
    """One query and one key, (1, 1, 1, dim), with |q + k|^2 = square."""
    q, k = torch.randn(2, 1, 1, 1, dim, generator=seeded(3), dtype=torch.float64)
    factor = (square / (q + k).square().sum()).sqrt()
    return q * factor, k * factor


def estimates(q, k, projection, kind="positive", damping=None):
    """exp(q . k) by each projection of (T, rows, dim), relative to the truth: (T,)."""
    phi, psi = _features(1.0, kind, projection, Statistics(damping=damping), q.dtype)
    terms = (phi(q) - q.square().sum(-1, keepdim=True) / 2 + psi(k)).exp()
    return terms.mean(-1).flatten() / (q * k).sum().exp()


def damping_for(kind, dim):
    """Some A of the kind, (1, dim, dim), None where it has none."""
    if kind == "favor++":
        return -0.1 * torch.eye(dim, dtype=torch.float64)[None]
    if kind == "anisotropic":
        turn = torch.linalg.qr(torch.randn(dim, dim, generator=seeded(8), dtype=torch.float64))[0]
        return (turn * torch.linspace(-0.3, 0.03, dim, dtype=torch.float64) @ turn.mT)[None]
    return None


def fourth_moment(x):
    return (x - x.mean()).pow(4).mean()


def moments(square, num_features):
    """Variance, and fourth central moment, of the mean of m independent relative features.

    One feature is log-normal, and its n-th raw moment exp(n (n - 1) / 2 |q + k|^2).
    """
    second = math.exp(square) - 1
    fourth = math.exp(6 * square) - 4 * math.exp(3 * square) + 6 * math.exp(square) - 3
    m = num_features
    return second / m, (fourth + 3 * (m - 1) * second**2) / m**3


def dense(q, k, v, projection, *, scale, is_causal=False):
    """Positive features written out, in float64, as a log-sum over features for every pair."""
    root = scale**0.5
    x, y, omega = root * q.double(), root * k.double(), projection.double()
    log_q = x @ omega.mT - x.square().sum(-1, keepdim=True) / 2
    log_k = y @ omega.mT - y.square().sum(-1, keepdim=True) / 2
    logits = (log_q[..., :, None, :] + log_k[..., None, :, :]).logsumexp(-1)
    if is_causal:
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1) @ v.double()


def anisotropic(seed, length=64, dim=8):
    """Queries and keys off the origin, of very different size along different directions."""
    q, k, v = make_qkv(length, batch=1, heads=1, head_dim=dim, seed=seed)
    size = torch.logspace(-0.5, 0.5, dim, dtype=q.dtype)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=seeded(9), dtype=q.dtype))[0]
    return (q * size) @ turn + 0.5, (k / size) @ turn * 0.7 + 0.8, v


# --- the estimator --------------------------------------------------------------------------


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_estimate_is_unbiased(kind, draw):
    trials, m, dim, square = 1500 if draw == "qmc" else 20_000, 6, 4, 0.7
    q, k = pair(dim, square)
    rows = Performer(m, kind).num_directions
    projection = directions(draw, rows, dim, trials, seeded(0), CPU)
    found = estimates(q, k, projection, kind, damping_for(kind, dim))
    assert (found.mean() - 1).abs() < 4 * found.std() / math.sqrt(trials)


@pytest.mark.parametrize("kind", KINDS)
def test_variance_of_independent_features_is_the_predicted_one_over_m(kind):
    """Within four standard errors for m = 2, 8, 32, so that the slope is -1."""
    trials, dim, square = 40_000, 4, 0.5
    q, k = pair(dim, square)
    damping = damping_for(kind, dim)
    for m in (2, 8, 32):
        rows = Performer(m, kind).num_directions
        projection = draw((trials, rows, dim), seeded(1), CPU)
        found = estimates(q, k, projection, kind, damping)
        said = expected_error(
            q, k, num_features=m, kind=kind, precondition="none", damping=damping, scale=1.0
        )
        variance = 10 ** (2 * said.log10.item())
        noise = ((fourth_moment(found) - found.var() ** 2) / trials).sqrt()
        assert (found.var() - variance).abs() < 4 * noise


@pytest.mark.parametrize("m", [1, 5])
def test_variance_of_independent_features(m):
    trials, dim, square = 100_000, 4, 0.5
    q, k = pair(dim, square)
    variance, fourth = moments(square, m)
    sample = estimates(q, k, draw((trials, m, dim), seeded(1), CPU)).var()
    assert (sample - variance).abs() < 4 * math.sqrt((fourth - variance**2) / trials)


@pytest.mark.parametrize("kind", ["orthogonal", "simplex"])
def test_orthogonal_directions_lower_the_variance(kind):
    """By (1 - 1/m) 2 / (d + 2) (1 - exp(-|q + k|^2 / 2))^2 of the kernel squared, at the least.

    Two corners of a simplex add up to something shorter than two orthogonal vectors do.
    """
    trials, m, dim, square = 100_000, 4, 4, 0.5
    q, k = pair(dim, square)
    variance, fourth = moments(square, m)
    gain = (1 - 1 / m) * 2 / (dim + 2) * (1 - math.exp(-square / 2)) ** 2
    noise = 4 * math.sqrt((fourth - variance**2) / trials)
    assert gain > noise, "too few trials to tell"
    sample = estimates(q, k, directions(kind, m, dim, trials, seeded(2), CPU)).var()
    assert sample < variance - gain + noise


def test_pairs_of_both_signs_have_less_variance_than_as_many_features():
    """By the factor 1 - exp(-|q + k|^2): there is nothing to gain at large norms."""
    for square in (0.1, 3.0):
        q, k = pair(6, square)
        plain, pairs = (
            expected_error(q, k, kind=kind, precondition="none", scale=1.0).log10.item()
            for kind in ("positive", "hyperbolic")
        )
        assert math.isclose(10 ** (2 * (pairs - plain)), 1 - math.exp(-square), rel_tol=1e-9)


def test_error_falls_as_the_root_of_the_number_of_features():
    q, k, v = make_qkv(24, batch=1, heads=1)
    q, k = q / 2, k / 2
    want = reference(q, k, v)
    ratios = []
    for seed in range(40):
        few, many = (
            performer_attention(q, k, v, num_features=m, generator=seeded(seed)) - want
            for m in (64, 1024)
        )
        ratios.append((few.norm() / many.norm()).log())
    ratio = torch.stack(ratios)
    assert (ratio.mean() - math.log(4)).abs() < 4 * ratio.std() / math.sqrt(len(ratios))


# --- the computation ------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_log_form_is_the_plain_form(is_causal):
    """The textbook's: features exponentiated one by one, then two matrix products."""
    q, k, v = make_qkv(150)
    projection = orthogonal_gaussian(20, 8, 3, seeded(0), CPU)
    out = performer_attention(
        q, k, v, num_features=20, precondition="none", projection=projection, is_causal=is_causal
    )
    x, y = q / 8**0.25, k / 8**0.25
    fq, fk = (
        torch.exp(z @ projection.mT - z.square().sum(-1, keepdim=True) / 2) / 20**0.5
        for z in (x, y)
    )
    weight = fq @ fk.mT
    weight = weight.tril() if is_causal else weight
    want = weight @ v / weight.sum(-1, keepdim=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["early keys are large", "logits times 30"])
def test_features_of_any_size_in_float32(kind, is_causal):
    """A stabiliser shared by all keys underflows where one of them is much larger."""
    q, k, v = make_qkv(200, batch=1, heads=1, head_dim=16, dtype=torch.float32)
    if kind == "early keys are large":
        q, k = 1.5 * q, 1.5 * k
        k[:, :, :50] *= 6
        scale = 1.0
    else:
        scale = 30 * 16**-0.5
    projection = draw((1, 64, 16), seeded(0), CPU)
    out = performer_attention(
        q,
        k,
        v,
        num_features=64,
        precondition="none",
        projection=projection,
        scale=scale,
        is_causal=is_causal,
    )
    want = dense(q, k, v, projection, scale=scale, is_causal=is_causal)
    # Log-weights off by delta move the output by at most 2 delta max|v|. They are sums of d = 16
    # products and two such sums: eps * size each, rounding accumulating.
    size = (
        scale * k.square().sum(-1).max() / 2
        + scale**0.5 * (q.norm(dim=-1).max() + k.norm(dim=-1).max()) * projection.norm(dim=-1).max()
    )
    bound = 2 * 4 * torch.finfo(torch.float32).eps * size * v.abs().max()
    assert (out - want).abs().max() < bound


# --- the preconditioner ---------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.6, -0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_preconditioning_leaves_the_expectation(kind, scale):
    """Four standard errors, from the variance law of the vectors that the features then see."""
    q, k, v = anisotropic(0, length=12, dim=4)
    tensors = Performer(2, kind, precondition="balance").fit(q, k, v, scale=scale)
    del tensors["projection"]
    center, balance = tensors["center"], tensors["balance"]
    trials, m, root = 40_000, 2, abs(scale) ** 0.5
    projection = draw((trials, Performer(m, kind).num_directions, 4), seeded(4), CPU)
    phi, psi = _features(scale, kind, projection, Statistics(**tensors), q.dtype)
    for i, j in ((0, 3), (5, 5), (7, 1)):
        at, key = q[:, :, i : i + 1], k[:, :, j : j + 1]
        x = math.copysign(root, scale) * at @ balance
        terms = (phi(at) + psi(key) - x.square().sum() / 2).exp().mean(-1).flatten()
        shifted = scale * (at * center[:, :, None]).sum()  # the row's constant that cancels
        kernel = (scale * (at * key).sum() - shifted).exp()
        said = expected_error(at, key, num_features=m, kind=kind, scale=scale, **tensors)
        bound = 4 * 10 ** said.log10.item() / math.sqrt(trials)
        assert (terms.mean() / kernel - 1).abs() < bound


def test_balance_reaches_the_least_value_there_is():
    q, k, v = anisotropic(1)
    tensors = Performer(precondition="balance").fit(q, k, v)
    q, y = q[0, 0], k[0, 0] - tensors["center"][0, 0]
    sq, sk, balance = q.mT @ q / 64, y.mT @ y / 64, tensors["balance"][0, 0]

    def value(matrix):
        back = torch.linalg.inv(matrix)
        return (matrix.mT @ sq @ matrix).trace() + (back @ sk @ back.mT).trace()

    values, vectors = torch.linalg.eigh(sq)
    half = vectors * values.sqrt() @ vectors.mT
    least = 2 * torch.linalg.eigvalsh(half @ sk @ half).sqrt().sum()
    # The moments are raised by a millionth of their mean, and the value by no more.
    assert (value(balance) / least - 1).abs() < 1e-5
    for seed in range(5):
        other = balance @ torch.linalg.matrix_exp(
            0.1 * torch.randn(8, 8, generator=seeded(seed), dtype=q.dtype)
        )
        assert value(other) > value(balance) * (1 - 1e-6)


@pytest.mark.parametrize("scale", [None, -0.3])
def test_each_step_of_preconditioning_lowers_the_mean_square(scale):
    """The mean of |x + y|^2 over all pairs, of which the variance is the exponential."""
    q, k, v = anisotropic(2)
    sign = -1.0 if scale is not None else 1.0
    means = []
    for kind in ("none", "shift", "balance"):
        tensors = Performer(precondition=kind).fit(q, k, v, scale=scale, generator=seeded(0))
        x, y = sign * q, k
        if "center" in tensors:
            y = y - tensors["center"][:, :, None]
        if "balance" in tensors:
            x, y = x @ tensors["balance"], y @ torch.linalg.inv(tensors["balance"]).mT
        means.append((x[..., :, None, :] + y[..., None, :, :]).square().sum(-1).mean())
    assert means[0] > means[1] > means[2]


def test_preconditioning_lowers_the_error():
    errors = {"none": [], "shift": [], "balance": []}
    for seed in range(15):
        q, k, v = anisotropic(seed)
        want = reference(q, k, v)
        for kind, found in errors.items():
            out = performer_attention(
                q, k, v, num_features=64, precondition=kind, generator=seeded(seed)
            )
            found.append((out - want).norm().item())
    assert median(errors["balance"]) < median(errors["shift"]) < median(errors["none"])


def test_padded_keys_enter_no_statistic_when_lengths_differ():
    q, k, v = make_qkv(17, keys=40)
    projection = draw((3, 32, 8), seeded(0), CPU)
    options = {"num_features": 32, "precondition": "balance", "projection": projection}
    out = performer_attention(q, k, v, attn_mask=padding_mask(torch.tensor([25, 40])), **options)
    short = performer_attention(q[:1], k[:1, :, :25], v[:1, :, :25], **options)
    torch.testing.assert_close(out[:1], short, rtol=0, atol=1e-9)


def test_a_causal_call_takes_no_statistics_of_the_future():
    q, k, v = make_qkv(10)
    for kind in ("balance", "shift"):
        with pytest.raises(Unsupported, match=r"performer: precondition=.* future.*calibrate"):
            performer_attention(q, k, v, precondition=kind, is_causal=True)
    auto, none = (
        performer_attention(q, k, v, precondition=kind, is_causal=True, generator=seeded(0))
        for kind in ("auto", "none")
    )
    assert torch.equal(auto, none)
    tensors = Performer(precondition="balance").fit(q, k, v, generator=seeded(0))
    given = performer_attention(q, k, v, precondition="balance", is_causal=True, **tensors)
    assert not torch.allclose(given, none)


def test_contradictions_and_wrong_shapes_are_refused():
    q, k, v = make_qkv(10)
    center = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="contradicts a given center"):
        performer_attention(q, k, v, precondition="none", center=center)
    with pytest.raises(ValueError, match=r"projection must have shape \(3, 256, 8\)"):
        performer_attention(q, k, v, projection=torch.zeros(3, 16, 8))
    with pytest.raises(ValueError, match=r"balance must have shape \(3, 8, 8\)"):
        performer_attention(q, k, v, center=center, balance=center)
    with pytest.raises(ValueError, match="precondition must be one of"):
        Performer(precondition="whiten")
    with pytest.raises(ValueError, match="kind must be one of"):
        Performer(kind="cosine")
    with pytest.raises(ValueError, match="draw must be one of"):
        performer_attention(q, k, v, draw="halton")
    with pytest.raises(ValueError, match=r"even for kind='hyperbolic'.* got 7"):
        Performer(7, "hyperbolic")
    with pytest.raises(ValueError, match=r"projection must have shape \(3, 8, 8\)"):
        performer_attention(
            q, k, v, num_features=16, kind="hyperbolic", projection=torch.zeros(3, 16, 8)
        )
    with pytest.raises(ValueError, match="'positive' takes no damping"):
        performer_attention(q, k, v, damping=torch.zeros(3, 8, 8))
    with pytest.raises(ValueError, match="max_tokens must be a positive integer"):
        expected_error(q, k, max_tokens=0)


# --- the damping ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", DAMPED)
def test_without_damping_it_is_favor_plus(kind, is_causal):
    q, k, v = make_qkv(30)
    projection = directions("orthogonal", 16, 8, 3, seeded(0), CPU)
    call = {"num_features": 16, "projection": projection, "is_causal": is_causal}
    out = performer_attention(q, k, v, kind=kind, damping=torch.zeros(3, 8, 8), **call)
    torch.testing.assert_close(out, performer_attention(q, k, v, **call), rtol=0, atol=1e-12)


def log_second_moment(damping, z):
    """Mean over rows of z of log E X^2 / K^2, from its definition."""
    eye = torch.eye(z.shape[-1], dtype=z.dtype)
    left, right = eye - 4 * damping, eye - 8 * damping
    # E exp(4 w'Aw + 2 w'(I - 4A)^(1/2) z) = det(I - 8A)^(-1/2) exp(2 z'(I-4A)(I-8A)^-1 z)
    power = 2 * (z @ left @ torch.linalg.inv(right) * z).sum(-1) - z.square().sum(-1)
    return left.logdet() - right.logdet() / 2 + power.mean()


def all_pairs(q, k, scale, tensors):
    balance = tensors["balance"][0, 0]
    root = abs(scale) ** 0.5
    x = math.copysign(root, scale) * q[0, 0] @ balance
    y = root * (k[0, 0] - tensors["center"][0]) @ torch.linalg.inv(balance).mT
    return (x[:, None] + y).flatten(0, 1)


@pytest.mark.parametrize("scale", [0.4, -0.4])
def test_damping_makes_the_mean_log_second_moment_least(scale):
    q, k, v = anisotropic(3, length=40)
    q, k = q + 0.3 * k.roll(1, 2), k  # queries and keys that are correlated
    least = {}
    for kind in DAMPED:
        tensors = Performer(kind=kind).fit(q, k, v, scale=scale)
        z, damping = all_pairs(q, k, scale, tensors), tensors["damping"][0, 0]
        least[kind] = log_second_moment(damping, z)
        for seed in range(8):
            noise = 0.02 * torch.randn(8, 8, generator=seeded(seed), dtype=q.dtype)
            step = noise + noise.mT if kind == "anisotropic" else noise[0, 0] * torch.eye(8)
            assert log_second_moment(damping + step, z) > least[kind]
    assert least["anisotropic"] < least["favor++"] < log_second_moment(torch.zeros(8, 8).to(z), z)


def test_features_damped_equally_are_those_of_one_number():
    """Tokens along all axes and both ways: the mean of z z^T is a multiple of the identity."""
    axes = torch.eye(8, dtype=torch.float64)
    q = 3 * torch.cat((axes, -axes))[None, None]
    v = torch.randn(1, 1, 16, 5, generator=seeded(0), dtype=torch.float64)
    one, many = (Performer(64, kind).fit(q, 2 * q, v)["damping"] for kind in DAMPED)
    torch.testing.assert_close(one, many, rtol=0, atol=1e-9)
    a, b = (
        performer_attention(q, 2 * q, v, num_features=64, kind=kind, generator=seeded(0))
        for kind in DAMPED
    )
    torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", DAMPED)
def test_a_causal_call_fits_no_damping(kind):
    q, k, v = make_qkv(10)
    with pytest.raises(Unsupported, match=r"performer: the damping of kind=.* future.*calibrate"):
        performer_attention(q, k, v, kind=kind, is_causal=True)
    with pytest.raises(Unsupported, match=r"decoding with kind=.* needs its damping"):
        Performer(kind=kind).state(k, v)
    assert Performer(kind=kind).fitted
    assert not Performer().fitted


# --- what to expect -------------------------------------------------------------------------


def squares(q, k, scale):
    """|x + y|^2 of every pair of one head, by a loop."""
    x, y = scale**0.5 * q, scale**0.5 * k
    return torch.stack([torch.stack([(a + b).square().sum() for b in y]) for a in x])


@pytest.mark.parametrize("kind", KINDS)
def test_expected_error_is_the_error_of_single_weights(kind):
    """Mean over pairs of the squared relative error, within four standard errors over draws."""
    q, k, v = make_qkv(4, batch=1, heads=1, head_dim=4)
    q, k, m, trials = q / 3, k / 3, 6, 20_000
    tensors = Performer(m, kind).fit(q, k, v)
    del tensors["projection"]
    projection = draw((trials, Performer(m, kind).num_directions, 4), seeded(6), CPU)
    phi, psi = _features(0.5, kind, projection, Statistics(**tensors), q.dtype)
    x = 0.5**0.5 * q @ tensors["balance"]
    shifted = k - tensors["center"][:, :, None]
    left = (phi(q) - x.square().sum(-1, keepdim=True) / 2).exp()
    weight = left @ psi(k).exp().mT
    weight = weight / m
    error = (weight / (0.5 * q @ shifted.mT).exp() - 1).square().mean((-1, -2)).flatten()
    said = expected_error(q, k, num_features=m, kind=kind, **tensors)
    assert torch.equal(said.log10, expected_error(q, k, num_features=m, kind=kind).log10)
    noise = error.std() / math.sqrt(trials)
    assert (error.mean() - 10 ** (2 * said.log10.item())).abs() < 4 * noise


def test_expected_error_by_a_loop_over_the_pairs():
    q, k, _ = make_qkv(9, group=2)
    for causal in (False, True):
        said = expected_error(
            q, k, num_features=32, precondition="none", is_causal=causal, enable_gqa=True
        )
        assert said.mean.shape == (2, 6)
        s = squares(q[1, 5], k[1, 2], 8**-0.5)
        s = s[torch.ones(9, 9).tril().bool()] if causal else s.flatten()
        want = ((s.exp() - 1).mean() / 32).sqrt().log10()
        torch.testing.assert_close(said.log10[1, 5], want, rtol=1e-9, atol=0)
        torch.testing.assert_close(said.mean[1, 5], s.mean())
        ordered = s.sort().values
        assert torch.isclose(said.median[1, 5], ordered[math.ceil(len(s) / 2) - 1])
        assert torch.isclose(said.q95[1, 5], ordered[math.ceil(0.95 * len(s)) - 1])


def test_expected_error_of_any_norm_padding_and_length():
    q, k, _ = make_qkv(40)
    huge = expected_error(1e3 * q.float(), 1e3 * k.float(), kind="hyperbolic")
    assert all(x.isfinite().all() for x in huge)
    assert (huge.log10 > 1e4).all()
    zero = expected_error(0 * q, 0 * k)
    assert (zero.log10 == -torch.inf).all()
    padded = expected_error(q, k, attn_mask=padding_mask(torch.tensor([25, 40])))
    short = expected_error(q[:1, :, :25], k[:1, :, :25])
    for a, b in zip(padded, short, strict=True):
        torch.testing.assert_close(a[:1], b)
    none = expected_error(q, k, attn_mask=padding_mask(torch.tensor([0, 40])))
    assert none.mean[0].isnan().all()
    assert none.mean[1].isfinite().all()
    assert expected_error(q, k[:, :, :0]).log10.isnan().all()
    few = expected_error(q, k, precondition="none", max_tokens=10)
    every = expected_error(q[:, :, ::4], k[:, :, ::4], precondition="none")
    assert all(torch.equal(a, b) for a, b in zip(few, every, strict=True))
    low = expected_error(q.half(), k.half())
    assert low.log10.dtype == torch.float64


# --- stability ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_future_key_moves_no_stabiliser(kind, dtype):
    """Neither in the chunk of a row nor in a later one."""
    q, k, v = make_qkv(300, batch=1, heads=2, dtype=dtype)
    method = Performer(32, kind)
    tensors = method.fit(q, k, v, generator=seeded(0))
    before = method(q, k, v, is_causal=True, **tensors)
    for at in (60, 299):
        later = k.clone()
        later[:, :, at] *= 100
        after = method(q, later, v, is_causal=True, **tensors)
        moved = (after[:, :, :at] - before[:, :, :at]).abs().max()
        assert moved < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_with_logits_of_ten_thousand(kind, is_causal):
    q, k, v = (3 * x for x in make_qkv(200, head_dim=64, dtype=torch.float16))
    scale = 1e4 / (q.double() @ k.double().mT).abs().max().item()
    method = Performer(32, kind)
    tensors = method.fit(q, k, v, scale=scale, generator=seeded(0))
    out = method(q, k, v, scale=scale, is_causal=is_causal, **tensors)
    assert out.isfinite().all()
    assert (out.float().norm(dim=-1) > 0).all()


@pytest.mark.parametrize("kind", ["positive", "anisotropic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_thousand_steps_of_decoding(kind, dtype):
    """Logits of order 1 in float32, and up to 10,000 in half precision."""
    q, k, v = make_qkv(2000, batch=1, heads=1, dtype=dtype)
    scale = 8**-0.5
    if dtype == torch.float16:
        q, k, v = 3 * q, 3 * k, 3 * v
        scale = 1e4 / (q.double() @ k.double().mT).abs().max().item()
    method = Performer(16, kind)
    tensors = method.fit(q, k, v, scale=scale, generator=seeded(0))
    want = method(q, k, v, is_causal=True, scale=scale, **tensors)
    state = method.state(k[:, :, :0], v[:, :, :0], scale=scale, **tensors)
    for t in range(2000):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t % 100 == 99:
            out = state.attend(q[:, :, t : t + 1])
            bound = TOLERANCE[dtype] * want.abs().max()
            assert (out - want[:, :, t : t + 1]).abs().max() < bound


@dataclass(frozen=True)
class Fitted(Performer):
    """Performer, of which a causal call is checked with fitted tensors."""

    info = replace(Performer.info, fits_causal=True)


@pytest.mark.parametrize("kind", ["hyperbolic", *DAMPED])
@pytest.mark.parametrize(
    "check", ["grouped_heads", "padding_is_truncation", "decode_is_prefill", "counted_flops"]
)
def test_contract_of_the_other_kinds(check, kind):
    testing.run(check, Fitted(8, kind))


def test_other_kinds_compile():
    testing.run("compiles", Fitted(8, "anisotropic"))


# --- the module -----------------------------------------------------------------------------


@pytest.fixture
def module():
    return Performer(num_features=24).module(num_heads=3, head_dim=8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_module_calls_the_function_with_its_tensors(module, is_causal):
    q, k, v = make_qkv(30, dtype=torch.float32)
    module.calibrate(q, k)
    tensors = dict(module.named_buffers())
    assert set(tensors) == {"projection", "center", "balance"}
    out = module(q, k, v, is_causal=is_causal)
    want = performer_attention(q, k, v, num_features=24, is_causal=is_causal, **tensors)
    assert torch.equal(out, want)


def test_redraw_changes_the_projection_only(module):
    q, k, _ = make_qkv(30, dtype=torch.float32)
    module.calibrate(q, k)
    before = {name: x.clone() for name, x in module.named_buffers()}
    module.redraw(seeded(7))
    assert not torch.equal(before["projection"], module.projection)
    assert torch.equal(before["center"], module.center)
    assert torch.equal(before["balance"], module.balance)
    again = Performer(num_features=24).module(num_heads=3, head_dim=8)
    again.redraw(seeded(7))
    assert torch.equal(again.projection, module.projection)


def test_calibrate_pools_the_batch_and_sets_the_preconditioner_only(module):
    q, k, _ = make_qkv(30, group=2, dtype=torch.float32)
    kept, state = module.projection.clone(), torch.random.get_rng_state()
    module.calibrate(q, k, enable_gqa=True)
    assert torch.equal(kept, module.projection)
    assert torch.equal(state, torch.random.get_rng_state()), "calibrate draws"
    mean_q = q.unflatten(1, (3, 2)).mean((0, 2, 3))
    torch.testing.assert_close(module.center, mean_q + k.mean((0, 2)))
    x, y = (z.transpose(0, 1).flatten(1, 2)[None] for z in (q, k))
    want = Performer().fit(x, y, y, enable_gqa=True)["balance"][0].float()
    torch.testing.assert_close(module.balance, want)


def test_uncalibrated_module_preconditions_nothing(module):
    q, k, v = make_qkv(30, dtype=torch.float32)
    want = performer_attention(
        q, k, v, num_features=24, precondition="none", projection=module.projection
    )
    torch.testing.assert_close(module(q, k, v), want)


def test_module_in_half_precision(module):
    """Inputs in half precision, and the buffers too: answers within the type's rounding."""
    q, k, v = make_qkv(30, dtype=torch.float32)
    want = module(q, k, v)
    for dtype in (torch.bfloat16, torch.float16):
        out = module(q.to(dtype), k.to(dtype), v.to(dtype))
        assert out.dtype == dtype
        low = module.to(dtype)(q.to(dtype), k.to(dtype), v.to(dtype))
        # Rounded inputs move |omega . x| <~ 10 by 10 eps, and the output by twice that times |v|.
        bound = 2 * 3 * 10 * torch.finfo(dtype).eps * v.abs().max()
        assert (out - want).abs().max() < bound
        assert (low - want).abs().max() < bound
        module.float()


def test_decoding_with_the_module_is_its_causal_call(module):
    q, k, v = make_qkv(20, dtype=torch.float32)
    module.calibrate(q, k)
    want = module(q, k, v, is_causal=True)
    state = module.state(k[:, :, :0], v[:, :, :0])
    for t in range(20):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", DAMPED)
def test_the_module_calibrates_its_damping(kind):
    q, k, v = make_qkv(30, group=2, dtype=torch.float32)
    module = Performer(24, kind).module(num_heads=3, head_dim=8)
    call = {"num_features": 24, "projection": module.projection, "enable_gqa": True}
    plain = performer_attention(q, k, v, precondition="none", **call)
    torch.testing.assert_close(module(q, k, v, enable_gqa=True), plain)
    mask = padding_mask(torch.tensor([20, 30]))
    module.calibrate(q, k, attn_mask=mask, scale=0.7, enable_gqa=True)
    x, y = (
        torch.cat((z[0][:, :20], z[1]), 1)[None].double() for z in (q, k)
    )  # the tokens that exist, as one sequence
    want = Performer(24, kind).fit(x, y, y, scale=0.7, enable_gqa=True)
    for name in ("center", "balance", "damping"):
        torch.testing.assert_close(module.get_buffer(name), want[name][0].float())
    out = module(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(
        out,
        performer_attention(
            q,
            k,
            v,
            kind=kind,
            is_causal=True,
            **module.tensors(),
            **{n: x for n, x in call.items() if n != "projection"},
        ),
    )


def test_calibrate_needs_tokens(module):
    q, k, _ = make_qkv(0, dtype=torch.float32)
    with pytest.raises(ValueError, match="calibrate needs at least one"):
        module.calibrate(q, k)
