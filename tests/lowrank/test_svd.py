import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.lowrank import svd_attention
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
