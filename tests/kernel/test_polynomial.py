"""Polynomial attention against its definition, written out densely in float64."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import padding_mask
from numattn.kernel import polynomial
from numattn.kernel.polynomial import Polynomial, polynomial_attention
from numattn.testing import make_qkv


def by_definition(q, k, v, degree, *, keep=None, is_causal=False, scale=1.0):
    """Powers of the dense product, heads expanded, rows divided by their sums."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weight = (scale * torch.einsum("bhid,bhjd->bhij", q.double(), k.double())) ** degree
    if keep is not None:
        weight = weight * keep
    if is_causal:
        weight = weight.tril()
    total = weight.sum(-1, keepdim=True)
    return weight @ v.double() / total.where(total > 0, 1.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("degree", [2, 4, 6, 8, 10, 12, 14, 22])
def test_is_the_definition(degree, is_causal):
    q, k, v = make_qkv(41, group=2)
    out = polynomial_attention(q, k, v, degree=degree, is_causal=is_causal, enable_gqa=True)
    want = by_definition(q, k, v, degree, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_a_weight_of_zero(is_causal, side):
    q, k, v = make_qkv(50, group=2)
    keep = padding_mask(torch.tensor([11, 50]), side=side)
    k = torch.where(keep.mT, k, 1e6 * k)
    out = polynomial_attention(q, k, v, attn_mask=keep, is_causal=is_causal, enable_gqa=True)
    want = by_definition(q, k, v, 4, keep=keep, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_do_not_show(monkeypatch, is_causal):
    q, k, v = make_qkv(70, group=3, batch=1, heads=2)
    monkeypatch.setattr(polynomial, "tile_elements", lambda device: 1)
    monkeypatch.setattr(polynomial, "_LEAST_ROWS", 16)  # 5 positions of 3 rows
    out = polynomial_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    want = by_definition(q, k, v, 4, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_grows_with_the_square_of_the_length(monkeypatch, is_causal):
    monkeypatch.setattr(polynomial, "tile_elements", lambda device: 1)
    largest = []
    for n in (512, 1024):
        x = [t.requires_grad_() for t in make_qkv(n, batch=1, heads=1, dtype=torch.float32)]
        with Largest() as mode:
            polynomial_attention(*x, is_causal=is_causal).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 2 * largest[0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("degree", [2, 6])
def test_gradients_are_those_of_the_definition(degree, is_causal):
    """Also at logits of zero: half of the keys are orthogonal to half of the queries."""
    q, k, v = make_qkv(30, group=2)
    q[:, :, ::2, :4] = 0
    k[:, :, ::2, 4:] = 0
    weight = torch.randn(v.repeat(1, 2, 1, 1).shape, dtype=v.dtype)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = polynomial_attention(*ours, degree=degree, is_causal=is_causal, enable_gqa=True)
    (out * weight).sum().backward()
    (by_definition(*theirs, degree, is_causal=is_causal) * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("degree", [2, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_logits_do_not_overflow(dtype, degree, is_causal):
    """Logits to 1e4 and beyond: their powers have no place in float32."""
    q, k, v = make_qkv(40, dtype=dtype)
    q, k = (60 * x for x in (q, k))
    product = torch.einsum("bhid,bhjd->bhij", q.double(), k.double())
    assert product.abs().max() > 1e4
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = polynomial_attention(*leaves, degree=degree, is_causal=is_causal)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    want = by_definition(q, k, v, degree, is_causal=is_causal).to(dtype)
    # a relative error of 8 roundings in the logit, times the degree
    rounding = 8 * degree * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    torch.testing.assert_close(out, want, rtol=0, atol=4 * rounding * v.abs().max().item())


def test_terms_that_underflow_are_negligible():
    """One logit is 1e-20 of the other in its row; its fourth power is below float32."""
    q = torch.tensor([[[[1.0, 1e-20], [0.0, 1e-20]]]])
    k = torch.eye(2)[None, None]
    v = torch.tensor([[[[1.0], [2.0]]]])
    out = polynomial_attention(q, k, v)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 2.0]), rtol=0, atol=0)


def test_a_row_orthogonal_to_all_its_keys_is_zero():
    q, k, v = make_qkv(20)
    q[..., 4:] = 0
    k[:, :, :11, :4] = 0
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = polynomial_attention(*leaves, is_causal=True)
    assert not out[:, :, :11].any()
    assert (out[:, :, 11:] != 0).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_the_scale_cancels_and_signs_do_not_matter():
    q, k, v = make_qkv(20)
    want = polynomial_attention(q, k, v)
    for scale in (1e-3, 7.0, -0.4):
        torch.testing.assert_close(
            polynomial_attention(q, k, v, scale=scale), want, rtol=0, atol=1e-12
        )
    flipped = k * torch.where(torch.arange(20)[:, None] % 3 == 0, -1.0, 1.0)
    torch.testing.assert_close(polynomial_attention(q, flipped, v), want, rtol=0, atol=1e-12)
    assert not polynomial_attention(q, k, v, scale=0.0).any()


@pytest.mark.parametrize("degree", [2, 4])
def test_the_rank_is_at_most_the_number_of_monomials(degree):
    q, k, _ = make_qkv(40, head_dim=3)
    eye = torch.eye(40, dtype=q.dtype).expand(2, 3, -1, -1)
    rank = torch.linalg.matrix_rank(polynomial_attention(q, k, eye, degree=degree))
    assert (rank == math.comb(3 + degree - 1, degree)).all()  # Gaussian tokens: no less either


def test_one_step_at_a_time_is_the_causal_form():
    q, k, v = make_qkv(30, group=2)
    want = by_definition(q, k, v, 6, is_causal=True)
    state = Polynomial(degree=6).state(k[:, :, :3], v[:, :, :3], enable_gqa=True)
    for t in range(3, 30):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=0, atol=1e-12)
    assert state.nbytes_read == state.nbytes


@pytest.mark.parametrize("degree", [0, -2, 1, 3, 2.0, True, None])
def test_degrees_that_are_refused(degree):
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match="polynomial: degree must be an even positive integer"):
        Polynomial(degree=degree)
    with pytest.raises(ValueError, match="polynomial: degree must be an even positive integer"):
        polynomial_attention(q, k, v, degree=degree)


def test_it_is_its_own_target():
    assert Polynomial().exact_at(1000) is None
    with pytest.raises(TypeError, match="polynomial takes no tensor named projection"):
        Polynomial().state(*make_qkv(4)[1:], projection=torch.ones(1))
