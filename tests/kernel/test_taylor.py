"""Taylor features against the polynomial they stand for, and the polynomial against softmax."""

import math

import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.engines.linear import CHUNK
from numattn.kernel.taylor import Taylor, TaylorAttention, _features, taylor_attention
from numattn.testing import checks_for, make_qkv, reference_weights, run
from numattn.testing.inputs import TOLERANCE

DEGREES = (1, 2, 3)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def polynomial(u, degree):
    return sum(u**t / math.factorial(t) for t in range(degree + 1))


def remainder(u, degree):
    """What the Taylor polynomial of e^u is off by, at the most."""
    return u.abs() ** (degree + 1) * u.clamp(min=0).exp() / math.factorial(degree + 1)


def dense_logits(q, k, *, a=None, b=None, mean=None, scale=None):
    """u, heads expanded; a, b and mean have leading dimensions (Hk,) or (B, Hk)."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = q.double(), k.double()
    if mean is not None:
        k = k - mean.double()[..., None, :]
    if a is not None:
        q, k = q @ a.double().repeat_interleave(group, dim=-3), k @ b.double()
    return scale * torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(group, dim=1))


def by_definition(q, k, v, degree, *, is_causal=False, keep=None, **logits):
    weight = polynomial(dense_logits(q, k, **logits), degree)
    if keep is not None:
        weight = weight * keep
    if is_causal:
        weight = weight.tril()
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    total = weight.sum(-1, keepdim=True)
    return weight @ v / total.where(total != 0, 1.0)


def projections(dim=8, width=3, heads=3):
    return {
        "query_projection": normal(heads, dim, width, seed=1) / dim**0.5,
        "key_projection": normal(heads, dim, width, seed=2) / dim**0.5,
    }


# --- features -------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dim", [1, 2, 7, 16])
def test_inner_product_of_features_is_the_polynomial(dim, degree):
    q, k = normal(1, 1, 30, dim), normal(1, 1, 20, dim, seed=1)
    phi, psi = _features(0.3, degree, {}, k)
    u = 0.3 * q @ k.mT
    size = polynomial(0.3 * q.abs() @ k.abs().mT, degree)  # the terms that are summed up
    assert ((phi(q) @ psi(k).mT - polynomial(u, degree)).abs() <= 1e-14 * size).all()


@pytest.mark.parametrize("degree", DEGREES)
def test_every_monomial_is_kept_once(degree):
    """The full features, tensor powers over the root of t!, have the same inner product."""
    dim = 5
    q, k = normal(1, 1, 30, dim), normal(1, 1, 20, dim, seed=1)
    phi, psi = _features(1.0, degree, {}, k)
    points = 1 + torch.eye(dim, dtype=q.dtype)[None, None]
    exponents = phi(points)[0, 0].log2().T  # at point i, a monomial is 2 ** alpha_i
    assert len(exponents) == math.comb(dim + degree, degree)
    assert len(exponents.unique(dim=0)) == len(exponents)
    assert exponents.sum(-1).max() == degree

    def full(x):
        powers, last = [], torch.ones_like(x[..., :1])
        for t in range(degree + 1):
            powers.append(last / math.factorial(t) ** 0.5)
            last = (last[..., None] * x[..., None, :]).flatten(-2)
        return torch.cat(powers, -1)

    want = full(q) @ full(k).mT
    torch.testing.assert_close(phi(q) @ psi(k).mT, want, rtol=1e-12, atol=1e-12)


def test_number_of_features():
    assert Taylor(feature_dim=16).num_features(64) == 153
    assert [Taylor(degree=g).num_features(64) for g in DEGREES] == [65, 2145, 47905]
    assert Taylor(feature_dim=100).num_features(8) == Taylor().num_features(8) == 45


# --- the definition -------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("length", [1, 5, CHUNK, 2 * CHUNK + 37])
def test_whole_and_causal_forms_are_the_definition(length, degree, is_causal):
    q, k, v = make_qkv(length, group=2)
    q = q / 8  # odd degrees have positive weights on small logits only
    call = {"is_causal": is_causal}
    out = taylor_attention(q, k, v, degree=degree, enable_gqa=True, **call)
    want = by_definition(q, k, v, degree, **call)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    given = projections()
    out = taylor_attention(q, k, v, degree=degree, feature_dim=3, enable_gqa=True, **given, **call)
    a, b = given.values()
    want = by_definition(q, k, v, degree, a=a, b=b, **call)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_means_and_projections_of_every_batch_entry(side, is_causal):
    q, k, v = make_qkv(CHUNK + 20, group=2)
    keep = padding_mask(torch.tensor([11, CHUNK + 20]), side=side)
    mean = normal(2, 3, 8, seed=5)
    a, b = (torch.stack([t, 2 * t.flip(0)]) for t in projections().values())
    out = taylor_attention(
        q,
        k,
        v,
        feature_dim=3,
        center=True,
        query_projection=a,
        key_projection=b,
        key_mean=mean,
        attn_mask=keep,
        is_causal=is_causal,
        scale=-0.4,
        enable_gqa=True,
    )
    want = by_definition(
        q, k, v, 2, keep=keep, is_causal=is_causal, a=a, b=b, mean=mean, scale=-0.4
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_half_precision_does_not_overflow_where_its_own_squares_would():
    q, k, v = make_qkv(40, dtype=torch.float16)
    q, k = 20 * q, 20 * k
    assert polynomial(dense_logits(q, k), 2).max() > torch.finfo(torch.float16).max
    out = taylor_attention(q, k, v)
    assert out.dtype == torch.float16
    want = by_definition(q, k, v, 2)
    assert (out - want).abs().max() <= TOLERANCE[torch.float16] * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_thousand_steps_are_one_causal_call(dtype):
    q, k, v = make_qkv(2000, batch=1, heads=2, group=2, dtype=dtype)
    given = projections(heads=2)
    a, b = given.values()
    want = by_definition(q, k, v, 2, is_causal=True, a=a, b=b)
    state = Taylor(feature_dim=3).state(k[:, :, :0], v[:, :, :0], enable_gqa=True, **given)
    bound = TOLERANCE[dtype] * want.abs().max()
    for t in range(2000):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t % 100 == 99:
            out = state.attend(q[:, :, t : t + 1])
            assert (out - want[:, :, t : t + 1]).abs().max() <= bound, f"step {t}"


# --- the polynomial and softmax -------------------------------------------------------------


@pytest.mark.parametrize("degree", DEGREES)
def test_weights_are_off_by_no_more_than_the_remainder(degree):
    u = torch.linspace(-8, 8, 161, dtype=torch.float64)
    k = torch.ones(1, 1, 1, 1, dtype=u.dtype)
    phi, psi = _features(1.0, degree, {}, k)
    weight = (phi(u[None, None, :, None]) @ psi(k).mT).flatten()
    assert ((weight - u.exp()).abs() <= remainder(u, degree) * (1 + 1e-12) + 1e-14).all()


@pytest.mark.parametrize("size", [1e-3, 0.1, 0.9])
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_distance_from_softmax_is_within_the_bound(is_causal, degree, size):
    """With w = e^u + R >= 0, TV <= (sum |R| + |sum R|) / (2 sum e^u) <= sum |R| / sum e^u."""
    q, k, _ = make_qkv(40)
    q = q * (size / dense_logits(q, k).abs().max())  # |u| < 1: no weight is negative
    eye = torch.eye(40, dtype=q.dtype).expand(2, 3, -1, -1)
    weights = taylor_attention(q, k, eye, degree=degree, is_causal=is_causal)
    exact = reference_weights(q, k, is_causal=is_causal)
    u = dense_logits(q, k)
    bound = (exact * remainder(u, degree) * (-u).exp()).sum(-1)
    distance = (weights - exact).abs().sum(-1) / 2
    assert (distance <= bound * (1 + 1e-9) + 1e-14).all()


def test_weights_of_even_degree_are_positive_and_those_of_odd_degree_are_not():
    q, k, _ = make_qkv(60)
    q = 3 * q
    for degree in DEGREES:
        phi, psi = _features(8**-0.5, degree, {}, k)
        least = (phi(q) @ psi(k).mT).min()
        assert least >= 0.5 - 1e-12 if degree == 2 else least < 0


def test_centering_leaves_softmax_and_takes_a_common_vector_out():
    q, k, v = make_qkv(40)
    common = 3 * normal(1, 3, 1, 8, seed=4)
    out = taylor_attention(q, k + common, v, center=True)
    torch.testing.assert_close(out, taylor_attention(q, k, v, center=True), rtol=0, atol=1e-12)
    want = by_definition(q, k, v, 2, mean=k.mean(2))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


# --- fitted tensors -------------------------------------------------------------------------


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("queries", [50, 5])
def test_fitted_projections_give_the_best_logits_of_their_rank(queries, center):
    """Eckart and Young: no logits of rank r are nearer, also where queries do not span."""
    q, k, v = make_qkv(queries, keys=40, batch=1, group=2)
    q, k = q * torch.linspace(0.2, 3, 8), k + 1
    tensors = Taylor(feature_dim=3, center=center).fit(q, k, enable_gqa=True)
    assert set(tensors) == {"query_projection", "key_projection"} | (
        {"key_mean"} if center else set()
    )
    a, b, mean = tensors["query_projection"], tensors["key_projection"], tensors.get("key_mean")
    for head in range(3):
        keys = k[0, head] - (k[0, head].mean(0) if center else 0)
        logits = torch.cat([q[0, 2 * head], q[0, 2 * head + 1]]) @ keys.T
        u, s, vt = torch.linalg.svd(logits, full_matrices=False)
        best = (u[:, :3] * s[:3]) @ vt[:3]
        ours = torch.cat([q[0, 2 * head], q[0, 2 * head + 1]]) @ a[0, head] @ b[0, head].T @ keys.T
        torch.testing.assert_close(ours, best, rtol=0, atol=1e-8 * s[0].item())
    out = taylor_attention(q, k, v, feature_dim=3, center=center, enable_gqa=True)
    want = by_definition(q, k, v, 2, a=a, b=b, mean=mean)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)


def test_nothing_is_lost_where_keys_lie_in_as_many_dimensions():
    q, k, v = make_qkv(40)
    k = k[..., :3] @ normal(3, 8, seed=6)
    out = taylor_attention(q, k, v, feature_dim=3)
    torch.testing.assert_close(out, taylor_attention(q, k, v), rtol=0, atol=1e-10)


def test_a_mean_is_fitted_to_keys_that_exist_and_beside_given_projections():
    q, k, v = make_qkv(40)
    keep = padding_mask(torch.tensor([25, 40]))
    given = projections()
    out = taylor_attention(q, k, v, feature_dim=3, center=True, attn_mask=keep, **given)
    mean = torch.stack([k[0, :, :25].mean(1), k[1].mean(1)])
    a, b = given.values()
    want = by_definition(q, k, v, 2, keep=keep, a=a, b=b, mean=mean)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_a_causal_call_fits_nothing_and_no_later_key_leaks():
    q, k, v = make_qkv(200)
    for options, names in (
        ({"feature_dim": 4}, "query_projection, key_projection"),
        ({"center": True}, "key_mean"),
    ):
        with pytest.raises(Unsupported, match=f"a causal call needs {names}, "):
            taylor_attention(q, k, v, is_causal=True, **options)
        with pytest.raises(Unsupported, match=f"decoding needs {names}, "):
            Taylor(**options).state(k, v)
    method = Taylor(feature_dim=4, center=True)
    tensors = method.fit(q, k)
    before = method(q, k, v, is_causal=True, **tensors)
    k2 = k.clone()
    k2[:, :, 150] *= 100
    after = method(q, k2, v, is_causal=True, **tensors)
    assert torch.equal(after[:, :, :150], before[:, :, :150])
    assert not torch.equal(after[:, :, 150:], before[:, :, 150:])


@pytest.mark.parametrize("name", checks_for(Taylor(feature_dim=4, center=True)))
def test_contract_holds_with_fitted_tensors(name):
    run(name, Taylor(feature_dim=4, center=True))


# --- the layer ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("degree", DEGREES)
def test_gradients_reach_projections_and_are_those_of_the_definition(degree, is_causal):
    q, k, v = make_qkv(CHUNK + 9, group=2)
    q = q / 8
    weight = normal(2, 6, CHUNK + 9, 5, seed=7)
    mean = normal(3, 8, seed=8) / 4
    ours, theirs = (
        [x.clone().requires_grad_() for x in (q, k, v, *projections().values())] for _ in range(2)
    )
    out = taylor_attention(
        *ours[:3],
        degree=degree,
        feature_dim=3,
        center=True,
        query_projection=ours[3],
        key_projection=ours[4],
        key_mean=mean,
        is_causal=is_causal,
        enable_gqa=True,
    )
    want = by_definition(
        *theirs[:3], degree, is_causal=is_causal, a=theirs[3], b=theirs[4], mean=mean
    )
    (out * weight).sum().backward()
    (want * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11)


def test_the_layer_starts_at_one_orthogonal_matrix_with_the_scale_of_the_paper():
    module = TaylorAttention(num_heads=3, head_dim=8, feature_dim=2, generator=seeded(0)).double()
    names = {n for n, _ in module.named_parameters()}
    assert names == {"query_projection", "key_projection"}
    a, b = module.query_projection, module.key_projection
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    eye = torch.eye(2, dtype=a.dtype).expand(3, -1, -1)
    torch.testing.assert_close(a.mT @ a, eye * 2, rtol=0, atol=1e-6)  # (D / d') ** (1/2) = 2
    assert not torch.equal(a[0], a[1])
    again = TaylorAttention(num_heads=3, head_dim=8, feature_dim=2, generator=seeded(0))
    assert torch.equal(again.query_projection.double(), a)


def test_the_layer_learns():
    """A few steps of gradient descent on a teacher of the same form lower its loss."""
    q, k, v = make_qkv(60, batch=1)
    target = taylor_attention(q, k, v, feature_dim=2, **projections(width=2))
    module = TaylorAttention(num_heads=3, head_dim=8, feature_dim=2, generator=seeded(0)).double()
    descent = torch.optim.SGD(module.parameters(), lr=1.0)
    losses = []
    for _ in range(10):
        loss = (module(q, k, v) - target).square().mean()
        descent.zero_grad()
        loss.backward()
        descent.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_calibrate_sets_what_the_function_fits():
    q, k, v = make_qkv(40, batch=1, group=2)
    for options in ({"feature_dim": 3, "center": True}, {"feature_dim": 3}, {"center": True}, {}):
        module = TaylorAttention(num_heads=3, head_dim=8, **options).double()
        module.calibrate(q, k, enable_gqa=True)
        out = module(q, k, v, enable_gqa=True)
        want = taylor_attention(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-9)
        fresh = TaylorAttention(num_heads=3, head_dim=8, **options).double()
        fresh.load_state_dict(module.state_dict())
        assert torch.equal(fresh(q, k, v, enable_gqa=True), out)


def test_calibrate_takes_the_batch_as_one_sample_without_its_padding():
    q, k, _ = make_qkv(40)
    keep = padding_mask(torch.tensor([25, 40]))
    module = TaylorAttention(num_heads=3, head_dim=8, center=True, feature_dim=3).double()
    module.calibrate(q, k, attn_mask=keep)
    joined = torch.cat([k[0, :, :25], k[1]], 1)
    torch.testing.assert_close(module.key_mean, joined.mean(1), rtol=0, atol=1e-12)
    noisy = k.clone()
    noisy[0, :, 25:] = 1e6
    before = module.query_projection @ module.key_projection.mT
    module.calibrate(q, noisy, attn_mask=keep)
    after = module.query_projection @ module.key_projection.mT
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)


# --- the rest -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{"degree": 1}, {"degree": 3, "feature_dim": 4}, {}])
def test_cost_counts_the_operations(options, is_causal):
    method = Taylor(**options)
    q, k, v = make_qkv(512, batch=1, heads=1, group=2, dtype=torch.float32)
    given = {} if method.feature_dim is None else projections(8, 4, 1)
    counted = count_flops(lambda: method(q, k, v, is_causal=is_causal, enable_gqa=True, **given))
    said = method.cost(Shape(1, 2, 1, 512, 512, 8, 5, is_causal=is_causal)).flops
    if given and not is_causal:
        said -= 2 * 3 * 512 * 8 * 8  # projections were given: nothing is fitted
    # Causal chunks read the slots before the first of them too, and add up their denominators.
    assert abs(counted - said) <= (0.02 if is_causal else 0.0) * said


def test_what_does_not_fit_is_refused():
    q, k, v = make_qkv(10)
    given = projections()
    for degree in (0, 4, True, 2.0):
        with pytest.raises(ValueError, match="taylor: degree must be 1, 2 or 3"):
            taylor_attention(q, k, v, degree=degree)
    with pytest.raises(ValueError, match="taylor: center must be True or False"):
        Taylor(center=1)
    with pytest.raises(ValueError, match="pass query_projection and key_projection together"):
        taylor_attention(q, k, v, feature_dim=3, query_projection=given["query_projection"])
    with pytest.raises(ValueError, match="a given key_mean needs center=True"):
        taylor_attention(q, k, v, key_mean=k.mean(2))
    with pytest.raises(ValueError, match=r"key_mean must have shape \(3, 8\)"):
        taylor_attention(q, k, v, center=True, key_mean=k.mean(2, keepdim=True))
    with pytest.raises(ValueError, match=r"query_projection must have shape \(3, 8, 4\)"):
        taylor_attention(q, k, v, feature_dim=4, **given)
    with pytest.raises(ValueError, match=r"query_projection must have shape \(3, 8, 8\)"):
        Taylor().state(k, v, **given)
    with pytest.raises(TypeError, match="taylor takes no tensor named omega"):
        Taylor().state(k, v, omega=q)
    assert Taylor().exact_at(1000) is None
    assert [m.fitted for m in (Taylor(), Taylor(center=True), Taylor(feature_dim=4))] == [0, 1, 1]
