"""The linear transformer against its definition, written out densely in float64."""

import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.engines.linear import CHUNK
from numattn.kernel import Linear, linear_attention
from numattn.testing import make_qkv


def phi(x):
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def by_definition(q, k, v, *, keep=None, is_causal=False):
    """Dense kernel matrix, heads expanded, rows divided by their sums."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weight = torch.einsum("bhid,bhjd->bhij", phi(q.double()), phi(k.double()))
    if keep is not None:
        weight = weight * keep
    if is_causal:
        weight = weight.tril()
    total = weight.sum(-1, keepdim=True)
    return weight @ v.double() / total.where(total > 0, 1.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 5, CHUNK, 2 * CHUNK + 37])
def test_whole_and_causal_forms_are_the_definition(length, is_causal):
    q, k, v = make_qkv(length, group=2)
    out = linear_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out, by_definition(q, k, v, is_causal=is_causal), rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_a_weight_of_zero(is_causal, side):
    q, k, v = make_qkv(CHUNK + 20, group=2)
    keep = padding_mask(torch.tensor([11, CHUNK + 20]), side=side)
    out = linear_attention(q, k, v, attn_mask=keep, is_causal=is_causal, enable_gqa=True)
    want = by_definition(q, k, v, keep=keep, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_one_step_at_a_time_is_the_causal_form():
    q, k, v = make_qkv(CHUNK + 9, group=2)
    want = by_definition(q, k, v, is_causal=True)
    state = Linear().state(k[:, :, :3], v[:, :, :3], enable_gqa=True)
    for t in range(3, CHUNK + 9):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_definition(is_causal):
    q, k, v = make_qkv(CHUNK + 9, group=2)
    weight = torch.randn(v.repeat(1, 2, 1, 1).shape, dtype=v.dtype)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    (linear_attention(*ours, is_causal=is_causal, enable_gqa=True) * weight).sum().backward()
    (by_definition(*theirs, is_causal=is_causal) * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_slope_of_the_feature_map_is_one_at_zero():
    """At x = 0 both branches meet; torch's own elu gives the slope."""
    q, k, v = make_qkv(6, batch=1, heads=1)
    grads = []
    for feature in (None, torch.nn.functional.elu):
        zero = torch.zeros_like(q).requires_grad_()
        if feature is None:
            out = linear_attention(zero, k, v)
        else:
            weight = (feature(zero) + 1) @ (feature(k) + 1).mT
            out = weight @ v / weight.sum(-1, keepdim=True)
        grads.append(torch.autograd.grad(out.square().sum(), zero)[0])
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_very_negative_inputs_keep_their_digits_in_float32(is_causal):
    """elu(x) + 1 is zero below x = -17 in float32; the features themselves are not."""
    q, k, v = make_qkv(20, dtype=torch.float32)
    q, k = q - 30, k - 30
    out = linear_attention(q, k, v, is_causal=is_causal)
    assert not (torch.nn.functional.elu(q) + 1).any()
    # exp carries the rounding of its argument, about 40 * 2**-24 here
    torch.testing.assert_close(
        out.double(), by_definition(q, k, v, is_causal=is_causal), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_denominator_has_no_epsilon(is_causal):
    q, k, v = make_qkv(20)
    ones = linear_attention(q - 40, k - 40, torch.ones_like(v), is_causal=is_causal)
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_whose_products_all_underflow_is_zero(is_causal):
    q, k, v = make_qkv(20)
    q = q.clone()
    q[:, :, 7] = -1e4
    out = linear_attention(q, k, v, is_causal=is_causal)
    assert not out[:, :, 7].any()
    assert (out[:, :, 8:] != 0).all()


def test_rank_is_at_most_the_head_size_and_weights_are_positive():
    q, k, _ = make_qkv(40)
    eye = torch.eye(40, dtype=q.dtype).expand(2, 3, -1, -1)
    weights = linear_attention(q, k, eye)
    assert (weights > 0).all()
    assert (torch.linalg.matrix_rank(weights) <= 8).all()


def test_order_of_the_keys_does_not_matter():
    q, k, v = make_qkv(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = linear_attention(q, k[:, :, order], v[:, :, order])
    torch.testing.assert_close(shuffled, linear_attention(q, k, v), rtol=0, atol=1e-12)


def test_it_is_its_own_target_and_has_nothing_to_scale():
    q, k, v = make_qkv(4)
    assert Linear().exact_at(1000) is None
    with pytest.raises(Unsupported, match="scale=None"):
        Linear().state(k, v, scale=0.5)
    with pytest.raises(TypeError, match="linear takes no tensor named projection"):
        Linear().state(k, v, projection=q)
