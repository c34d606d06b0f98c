"""What theory says of FAVOR+: unbiased, of known variance, indifferent to its preconditioner.

Monte Carlo estimates are held to four standard errors, which theory gives.
"""

import math
from statistics import median

import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.core.linalg import draw, orthogonal_gaussian
from numattn.kernel import Performer, performer_attention
from numattn.kernel.performer import _features
from numattn.testing import make_qkv, reference

CPU = torch.device("cpu")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def pair(dim, square):
    """One query and one key, (1, 1, 1, dim), with |q + k|^2 = square."""
    q, k = torch.randn(2, 1, 1, 1, dim, generator=seeded(3), dtype=torch.float64)
    factor = (square / (q + k).square().sum()).sqrt()
    return q * factor, k * factor


def estimates(q, k, projection):
    """exp(q . k) by each projection of (T, m, dim), relative to the truth: (T,)."""
    phi, psi = _features(1.0, projection, None, None)
    terms = (phi(q) - q.square().sum(-1, keepdim=True) / 2 + psi(k)).exp()
    return terms.mean(-1).flatten() / (q * k).sum().exp()


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


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_kernel_estimate_is_unbiased(orthogonal):
    trials, m, dim, square = 20_000, 6, 4, 0.7
    q, k = pair(dim, square)
    projection = (
        orthogonal_gaussian(m, dim, trials, seeded(0), CPU)
        if orthogonal
        else draw((trials, m, dim), seeded(0), CPU)
    )
    error = (estimates(q, k, projection).mean() - 1).abs()
    assert error < 4 * math.sqrt(moments(square, m)[0] / trials)


@pytest.mark.parametrize("m", [1, 5])
def test_variance_of_independent_features(m):
    trials, dim, square = 100_000, 4, 0.5
    q, k = pair(dim, square)
    variance, fourth = moments(square, m)
    sample = estimates(q, k, draw((trials, m, dim), seeded(1), CPU)).var()
    assert (sample - variance).abs() < 4 * math.sqrt((fourth - variance**2) / trials)


def test_orthogonal_directions_lower_the_variance():
    """By (1 - 1/m) 2 / (d + 2) (1 - exp(-|q + k|^2 / 2))^2 of the kernel squared, at the least."""
    trials, m, dim, square = 100_000, 4, 4, 0.5
    q, k = pair(dim, square)
    variance, fourth = moments(square, m)
    gain = (1 - 1 / m) * 2 / (dim + 2) * (1 - math.exp(-square / 2)) ** 2
    noise = 4 * math.sqrt((fourth - variance**2) / trials)
    assert gain > noise, "too few trials to tell"
    sample = estimates(q, k, orthogonal_gaussian(m, dim, trials, seeded(2), CPU)).var()
    assert sample < variance - gain + noise


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
def test_preconditioning_leaves_the_expectation(scale):
    """Four standard errors, from the variance law of the vectors that the features then see."""
    q, k, v = anisotropic(0, length=12, dim=4)
    tensors = Performer(precondition="balance").fit(q, k, v, scale=scale)
    center, balance = tensors["center"], tensors["balance"]
    trials, m, root = 40_000, 2, abs(scale) ** 0.5
    phi, psi = _features(scale, draw((trials, m, 4), seeded(4), CPU), center, balance)
    inverse = torch.linalg.inv(balance)
    for i, j in ((0, 3), (5, 5), (7, 1)):
        at, key = q[:, :, i : i + 1], k[:, :, j : j + 1]
        x = math.copysign(root, scale) * at @ balance
        y = root * (key - center[:, :, None]) @ inverse.mT
        terms = (phi(at) + psi(key) - x.square().sum() / 2).exp().mean(-1).flatten()
        shifted = scale * (at * center[:, :, None]).sum()  # the row's constant that cancels
        kernel = (scale * (at * key).sum() - shifted).exp()
        variance = ((x + y).square().sum().exp() - 1) / m
        assert (terms.mean() / kernel - 1).abs() < 4 * (variance / trials).sqrt()


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
