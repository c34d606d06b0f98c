import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.lowrank import SVD, attention_spectrum, svd_attention
from numattn.testing import make_qkv, reference, reference_weights


def weights(q, k, **options):
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return svd_attention(q, k, eye, enable_gqa=True, **options)


@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_the_tail_of_the_singular_values(rank, causal):
    q, k, _ = make_qkv(33, group=2)
    exact = reference_weights(q, k, is_causal=causal)
    error = exact - weights(q, k, rank=rank, is_causal=causal)
    sigma = torch.linalg.svdvals(exact)
    torch.testing.assert_close(
        torch.linalg.matrix_norm(error), sigma[..., rank:].square().sum(-1).sqrt()
    )
    torch.testing.assert_close(torch.linalg.matrix_norm(error, 2), sigma[..., rank])


def test_rank_is_the_rank():
    q, k, _ = make_qkv(33, keys=21)
    sigma = torch.linalg.svdvals(weights(q, k, rank=4))
    assert (sigma[..., 4:] <= 1e-13).all()
    assert (sigma[..., 3] > 1e-6).all()


def test_no_matrix_of_the_rank_is_nearer():
    q, k, _ = make_qkv(20, batch=1, heads=1)
    exact = reference_weights(q, k)
    best = torch.linalg.matrix_norm(exact - weights(q, k, rank=3))
    source = torch.Generator().manual_seed(0)
    for _ in range(20):
        basis, _ = torch.linalg.qr(torch.randn(20, 3, generator=source, dtype=exact.dtype))
        other = torch.linalg.matrix_norm(exact - basis @ (basis.T @ exact))
        assert (best <= other).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_queries_are_not_in_the_matrix(side):
    q, k, _ = make_qkv(20, group=2)
    mask = padding_mask(torch.tensor([13, 20]), side=side)
    keep = slice(0, 13) if side == "right" else slice(7, 20)
    out = weights(q, k, rank=3, attn_mask=mask)
    alone = weights(q[:1, :, keep], k[:1, :, keep], rank=3)
    torch.testing.assert_close(out[:1, :, keep, keep], alone)
    rest = out[0].clone()
    rest[:, keep, keep] = 0
    assert not rest.any()


def test_biases_and_masks_enter_the_matrix():
    q, k, _ = make_qkv(18, group=2)
    bias = torch.randn(6, 18, 18, dtype=q.dtype)
    bias[:, :, 3] = -torch.inf
    exact = reference_weights(q, k, attn_mask=bias)
    error = torch.linalg.matrix_norm(exact - weights(q, k, rank=4, attn_mask=bias), 2)
    torch.testing.assert_close(error, torch.linalg.svdvals(exact)[..., 4])


def test_a_gradient_is_refused():
    q, k, v = make_qkv(6)
    with pytest.raises(Unsupported, match=r"svd.*no_grad"):
        svd_attention(q, k.requires_grad_(), v)
    with torch.no_grad():
        svd_attention(q, k, v)


def test_at_full_rank_every_head_has_its_own_mask_and_value():
    q, k, v = make_qkv(12, group=2)
    mask = torch.rand(2, 6, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, :, 4] = False
    out = svd_attention(q, k, v, rank=12, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, reference(q, k, v, attn_mask=mask))
    assert not out[:, :, 4].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [1, 8, 30, 60])
def test_the_randomised_form_is_nearly_the_best(rank, causal):
    """Never nearer than the best, and hardly farther: Halko et al., theorem 10.6 and after."""
    q, k, _ = make_qkv(60, group=2)
    exact = reference_weights(q, k, is_causal=causal)
    best = torch.linalg.svdvals(exact)[..., rank:].square().sum(-1).sqrt()
    options = {"rank": rank, "is_causal": causal, "algorithm": "randomised"}
    error = torch.linalg.matrix_norm(exact - weights(q, k, **options))
    assert (error >= best - 1e-12).all()
    assert (error <= 1.1 * best + 1e-12).all()


def test_the_randomised_form_finds_a_low_rank_exactly():
    q, k, _ = make_qkv(200, batch=1)
    q = q[:, :, :6].repeat_interleave(50, 2)[:, :, :200]  # four different rows
    out = weights(q, k, rank=4, algorithm="randomised")
    torch.testing.assert_close(out, reference_weights(q, k), rtol=1e-10, atol=1e-12)


def test_the_randomised_form_with_masks_and_padding():
    q, k, _ = make_qkv(60, group=2)
    bias = torch.randn(2, 6, 60, 60, dtype=q.dtype)
    bias[:, :, 3] = -torch.inf
    mask = padding_mask(torch.tensor([41, 60]))
    for attn_mask in (bias, bias > 0, mask):
        call = {"rank": 60, "attn_mask": attn_mask}
        dense = weights(q, k, algorithm="dense", **call)
        randomised = weights(q, k, algorithm="randomised", **call)
        torch.testing.assert_close(randomised, dense, rtol=1e-10, atol=1e-11)
        assert torch.equal(randomised.abs().sum(-1) == 0, dense.abs().sum(-1) == 0)


@pytest.mark.parametrize("algorithm", ["dense", "randomised"])
def test_the_spectrum_and_its_tail(algorithm):
    q, k, _ = make_qkv(80, keys=50, group=2)
    exact = reference_weights(q, k)
    sigma = torch.linalg.svdvals(exact)
    got = attention_spectrum(q, k, rank=50, algorithm=algorithm, enable_gqa=True)
    torch.testing.assert_close(got.sigma, sigma)
    torch.testing.assert_close(got.norm, torch.linalg.matrix_norm(exact))
    tails = torch.stack([sigma[..., r:].square().sum(-1).sqrt() for r in range(51)], -1)
    torch.testing.assert_close(got.tail, tails, rtol=1e-6, atol=1e-7)


def test_the_tail_of_the_randomised_form_is_never_below_the_true_one():
    q, k, _ = make_qkv(120)
    best = attention_spectrum(q, k, rank=20, algorithm="dense").tail
    assert (attention_spectrum(q, k, rank=20, algorithm="randomised").tail >= best - 1e-9).all()


def test_long_matrices_are_not_formed():
    """With more rows and keys than a dense factorisation is allowed, in tiles."""
    q, k, _ = make_qkv(2300, batch=1, heads=1)
    v = torch.randn(1, 1, 2300, 8, dtype=q.dtype)
    method = SVD(rank=8)
    flops = count_flops(lambda: method(q, k, v))
    said = method.cost(Shape(1, 1, 1, 2300, 2300, 8, 8)).flops
    assert abs(flops - said) <= 0.1 * said
    dense = svd_attention(q, k, v, rank=8, algorithm="dense")
    # Two truncations differ by no more than the errors of both together.
    tail = attention_spectrum(q, k, rank=8).tail[..., -1]
    assert ((method(q, k, v) - dense).norm() <= 2.1 * tail * torch.linalg.matrix_norm(v, 2)).all()


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match=r"svd.*algorithm"):
        SVD(algorithm="lanczos")
