"""Random feature attention: its definition, and the statistics that theory gives.

Monte Carlo means are held to four standard errors, with fixed seeds.
"""

import pytest
import torch

from numattn.kernel.rfa import RFA, _Fourier, rfa_attention
from numattn.testing import make_qkv

F64 = torch.float64


def directions(count, heads=3, dim=8, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(heads, count, dim, generator=source, dtype=F64)


def dense(q, k, v, omega, sigma, is_causal=False):
    """Weights as means of cosines, pair by pair of unit vectors."""
    group = q.shape[1] // k.shape[1]
    k, v, omega = (x.repeat_interleave(group, -3) for x in (k, v, omega))
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    apart = (unit[0][..., :, None, :] - unit[1][..., None, :, :]) / sigma
    w = torch.einsum("bhijd,hrd->bhijr", apart, omega).cos().mean(-1)
    w = w.tril() if is_causal else w
    return w @ v / w.sum(-1, keepdim=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_is_the_definition(group, is_causal):
    q, k, v = make_qkv(140, group=group)
    omega = directions(40)
    call = {"num_features": 80, "sigma": 1.3, "projection": omega, "enable_gqa": True}
    out = rfa_attention(q, k, v, is_causal=is_causal, **call)
    want = dense(q, k, v, omega, 1.3, is_causal)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


def estimates(sigma, draws=4000, features=16):
    """Estimated kernels of fixed pairs of unit vectors over draws, and the kernels themselves."""
    q, k, _ = make_qkv(6, batch=1, heads=1)
    omega = directions(draws * features // 2, heads=1).reshape(draws, features // 2, 8)
    phi, psi = (torch.cat([_Fourier(w[None], sigma)(x) for w in omega]) for x in (q, k))
    mine = (phi[:, 0] @ psi[:, 0].mT).flatten(1)  # (draws, pairs)
    unit = [x[0, 0] / x[0, 0].norm(dim=-1, keepdim=True) for x in (q, k)]
    kernel = (-(torch.cdist(*unit) ** 2) / (2 * sigma**2)).exp().flatten()
    return mine, kernel, features


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_weights_are_unbiased(sigma):
    mine, kernel, _ = estimates(sigma)
    error = mine.std(0) / len(mine) ** 0.5
    assert ((mine.mean(0) - kernel).abs() <= 4 * error).all()


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_variance_of_a_weight(sigma):
    """(1 - kappa^2)^2 / m: m / 2 independent cosines, each of half of that times m."""
    mine, kernel, m = estimates(sigma)
    square = (mine - kernel).square()
    error = square.std(0) / len(mine) ** 0.5
    want = (1 - kernel**2) ** 2 / m
    assert ((square.mean(0) - want).abs() <= 4 * error).all()


def test_equal_directions_have_their_weight_exactly():
    q = make_qkv(5)[0]
    phi = _Fourier(directions(7), 0.3)
    torch.testing.assert_close((phi(q) * phi(3 * q)).sum(-1), torch.ones(2, 3, 5, dtype=F64))


def test_more_features_are_nearer_to_attention_by_cosines():
    """The error falls as m ** -0.5: over a factor of 64, by more than 4."""
    q, k, v = make_qkv(40, batch=1)
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    want = (unit[0] @ unit[1].mT).softmax(-1) @ v
    errors = []
    for m in (64, 4096):
        source = (torch.Generator().manual_seed(s) for s in range(5))
        outs = [rfa_attention(q, k, v, num_features=m, generator=g) for g in source]
        errors.append(sorted((out - want).norm().item() for out in outs)[2])
    assert errors[1] < errors[0] / 4


def test_norms_do_not_matter():
    q, k, v = make_qkv(20)
    call = {"num_features": 16, "projection": directions(8)}
    out = rfa_attention(1e3 * q, 1e-3 * k, v, **call)
    torch.testing.assert_close(out, rfa_attention(q, k, v, **call))


def test_a_future_key_changes_nothing_before_it():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        q, k, v = make_qkv(300, batch=1, dtype=dtype)
        call = {"projection": directions(128), "is_causal": True}
        before = rfa_attention(q, k, v, **call)
        k = k.clone()
        k[:, :, 200] *= 100
        v = v.clone()
        v[:, :, 200] *= 100
        after = rfa_attention(q, k, v, **call)
        assert (after - before)[:, :, :200].abs().max() <= tolerance
        assert (after - before)[:, :, 200:].abs().max() > tolerance


def test_decoding_is_prefill_after_many_steps():
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        q, k, v = make_qkv(2000, batch=1, heads=1, group=2, dtype=dtype)
        omega = directions(64, heads=1)
        call = {"projection": omega, "enable_gqa": True}
        want = rfa_attention(q, k, v, num_features=128, is_causal=True, **call)
        state = RFA(128).state(k[:, :, :1], v[:, :, :1], **call)
        for t in range(1, 2000):
            state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, -1:])
        torch.testing.assert_close(out, want[:, :, -1:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("inf"), "wide"])
def test_sigma_is_a_width(sigma):
    with pytest.raises(ValueError, match=r"rfa: sigma"):
        RFA(sigma=sigma)
