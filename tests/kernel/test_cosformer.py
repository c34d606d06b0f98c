"""cosFormer against its definition, written out densely in float64."""

import math

import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.engines.linear import CHUNK
from numattn.kernel.cosformer import CosFormer, cosformer_attention
from numattn.kernel.linear import linear_attention
from numattn.testing import make_qkv
from numattn.testing.inputs import TOLERANCE

F64 = torch.float64


def kernel(q, k, max_length, *, rows=None, keys=None, keep=None, is_causal=False):
    """relu(q) . relu(k) cos(pi/2 (i - j) / M), heads expanded; (B, H, Nq, Nk)."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    rows = torch.arange(q.shape[2]) if rows is None else rows
    keys = torch.arange(k.shape[2]) if keys is None else keys
    distance = (rows[..., :, None] - keys[..., None, :]).double()
    cosine = (math.pi / 2 * distance / max_length).cos()
    weight = q.double().clamp(min=0) @ k.clamp(min=0).mT * cosine
    if keep is not None:
        weight = weight * keep
    return weight.tril() if is_causal else weight


def by_definition(q, k, v, max_length, **places):
    weight = kernel(q, k, max_length, **places)
    total = weight.sum(-1, keepdim=True)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return weight @ v / total.where(total > 0, 1.0)


def close(out, want, tolerance=1e-12):
    torch.testing.assert_close(out, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 5, CHUNK, 2 * CHUNK + 37])
def test_whole_and_causal_forms_are_the_definition(length, is_causal):
    q, k, v = make_qkv(length, group=2)
    for max_length in (length, 3 * length, 4096):
        out = cosformer_attention(
            q, k, v, max_length=max_length, is_causal=is_causal, enable_gqa=True
        )
        close(out, by_definition(q, k, v, max_length, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_definition(is_causal):
    q, k, v = make_qkv(CHUNK + 9, group=2)
    weight = torch.randn(v.repeat(1, 2, 1, 1).shape, dtype=v.dtype)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = cosformer_attention(*ours, max_length=200, is_causal=is_causal, enable_gqa=True)
    (out * weight).sum().backward()
    (by_definition(*theirs, 200, is_causal=is_causal) * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_anywhere_is_leaving_the_tokens_out(is_causal):
    """Left, right and in the middle: positions count the tokens that exist."""
    length = CHUNK + 20
    q, k, v = make_qkv(length, group=2)
    exists = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < 0.6
    exists[0, :30] = exists[1, -30:] = False
    call = {"max_length": length, "is_causal": is_causal, "enable_gqa": True}
    out = cosformer_attention(q, k, v, attn_mask=exists[:, None, None], **call)
    for row, kept in enumerate(exists):
        short = [x[row : row + 1, :, kept] for x in (q, k, v)]
        close(out[row : row + 1, :, kept], by_definition(*short, length, is_causal=is_causal))
    if is_causal:
        assert not out[0, :, : exists[0].nonzero()[0]].any()


@pytest.mark.parametrize("lengths", [(17, 40), (40, 17)])
def test_both_sides_count_from_zero_where_their_lengths_differ(lengths):
    queries, keys = lengths
    q, k, v = make_qkv(queries, keys=keys, group=2)
    out = cosformer_attention(q, k, v, max_length=50, enable_gqa=True)
    close(out, by_definition(q, k, v, 50))
    mask = padding_mask(torch.tensor([9, keys]), keys, side="left")
    out = cosformer_attention(q, k, v, max_length=50, attn_mask=mask, enable_gqa=True)
    close(out[:1], by_definition(q[:1], k[:1, :, -9:], v[:1, :, -9:], 50))


def test_a_causal_row_does_not_know_how_many_tokens_follow():
    q, k, v = make_qkv(300)
    whole = cosformer_attention(q, k, v, is_causal=True)
    for n in (1, 64, 200):
        part = cosformer_attention(*(x[:, :, :n] for x in (q, k, v)), is_causal=True)
        close(part, whole[:, :, :n])


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_two_thousand_steps_are_the_causal_form(dtype):
    length, method = 2000, CosFormer(max_length=2000)
    q, k, v = make_qkv(length, batch=1, heads=1, group=2, dtype=dtype)
    want = method(q, k, v, is_causal=True, enable_gqa=True)
    state = method.state(k[:, :, :3], v[:, :, :3], enable_gqa=True)
    kept = state.nbytes
    for t in range(3, length):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t % 100 == 99:
            out = state.attend(q[:, :, t : t + 1])
            close(out, want[:, :, t : t + 1], TOLERANCE[dtype] * v.abs().max().item())
    assert state.nbytes == kept == 16 * (5 + 2) * dtype.itemsize


def test_queries_of_a_state_stand_at_its_last_tokens():
    q, k, v = make_qkv(30, group=2)
    state = CosFormer(max_length=40).state(k, v, enable_gqa=True)
    close(state.attend(q[:, :, -4:]), by_definition(q, k, v, 40)[:, :, -4:])
    short = CosFormer(max_length=40).state(k[:, :, :2], v[:, :, :2], enable_gqa=True)
    with pytest.raises(ValueError, match=r"cosformer: 4 queries .* 2 tokens"):
        short.attend(q[:, :, -4:])
    empty = CosFormer().state(k[:, :, :0], v[:, :, :0], enable_gqa=True)
    assert not empty.attend(q[:, :, :4]).any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_weight_are_zeros(is_causal):
    q, k, v = make_qkv(20)
    q, k = q.abs(), k.abs()
    q[:, :, 7] *= -1  # has no positive entry
    q[:, :, 9] *= -1
    q[:, :, 9, 2] *= -1
    k[..., 2] *= -1  # none in common with row 9
    out = cosformer_attention(q, k, v, is_causal=is_causal)
    zero = ~out.any(-1)
    assert zero[..., [7, 9]].all()
    assert zero.sum() == zero[..., [7, 9]].numel()


def test_weights_are_positive_to_the_last_distance_and_of_rank_two_per_feature():
    q, k, _ = make_qkv(40, head_dim=4)
    eye = torch.eye(40, dtype=F64).expand(2, 3, -1, -1)
    weights = cosformer_attention(q.abs(), k.abs(), eye, max_length=40)
    assert (weights > 0).all()
    assert (torch.linalg.matrix_rank(weights) <= 8).all()


def test_far_keys_keep_their_digits_in_float32():
    """At distances M - 1 and M - 2 the cosine is all but zero, and their ratio is a half."""
    length = 4096
    q = torch.ones(1, 1, length, 1)
    k = -torch.ones(1, 1, length, 1)
    k[:, :, :2] = 1
    v = torch.zeros(1, 1, length, 1)
    v[:, :, 0] = 1
    for is_causal in (False, True):
        out = cosformer_attention(q, k, v, max_length=length, is_causal=is_causal)
        near = [math.cos(math.pi / 2 * (length - n) / length) for n in (1, 2)]
        close(out[0, 0, -1, 0].double(), torch.tensor(near[0] / sum(near), dtype=F64), 1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_a_cosine_it_is_the_linear_transformer(is_causal):
    """cos(x) >= 1 - x^2 / 2, and x < 3e-7 here."""
    q, k, v = make_qkv(150)
    out = cosformer_attention(q, k, v, max_length=10**9, is_causal=is_causal)
    close(out, linear_attention(q, k, v, feature_map="relu", is_causal=is_causal))


def test_longer_sequences_than_it_is_made_for_are_refused():
    q, k, v = make_qkv(9)
    few = [x[:, :, :8] for x in (q, k, v)]
    method = CosFormer(max_length=8)
    assert method(*few).isfinite().all()
    for inputs, what in (((few[0], k, v), "9 keys"), ((q, *few[1:]), "9 queries")):
        with pytest.raises(ValueError, match=rf"cosformer: {what} .*max_length=8"):
            method(*inputs)
    with pytest.raises(ValueError, match="cosformer: 9 keys"):
        method.state(k, v)
    state = method.state(*few[1:])
    with pytest.raises(ValueError, match="cosformer: 9 keys"):
        state.append(k[:, :, 8:], v[:, :, 8:])
    close(state.attend(few[0]), by_definition(*few, 8))  # a refused token leaves no trace


def test_bad_options():
    q, k, v = make_qkv(4)
    for call in (lambda: CosFormer(0), lambda: cosformer_attention(q, k, v, max_length=0)):
        with pytest.raises(ValueError, match="cosformer: max_length must be a positive integer"):
            call()
    with pytest.raises(Unsupported, match="scale=None"):
        CosFormer().state(k, v, scale=0.5)
    with pytest.raises(TypeError, match="cosformer takes no tensor named projection"):
        CosFormer().state(k, v, projection=q)
    assert CosFormer().exact_at(1000) is None
