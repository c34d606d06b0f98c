import inspect

import pytest
import torch

from numattn import padding_mask
from numattn.core.inputs import prepare
from numattn.engines.lift import LEAF, lift, split_points
from numattn.engines.softmax import key_bias, softmax_partial
from numattn.exact import INFO
from numattn.testing import make_qkv, reference


def exact_block(q, past):
    return softmax_partial(q, past.k, past.v, scale=past.scale, bias=key_bias(past.padding, q))


def lifted(q, k, v, block=exact_block, attn_mask=None, **options):
    x = prepare(INFO, q, k, v, attn_mask, True, None, True)
    return x.restore(lift(x, block, **options))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 37])
@pytest.mark.parametrize("leaf", [1, 3, 8])
def test_an_exact_block_gives_exact_causal_attention(length, leaf, group):
    q, k, v = make_qkv(length, group=group)
    want = reference(q, k, v, is_causal=True)
    torch.testing.assert_close(lifted(q, k, v, leaf=leaf), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    q, k, v = make_qkv(37, batch=3, group=2)
    mask = padding_mask(torch.tensor([0, 20, 37]), side=side)
    out = lifted(q, k, v, attn_mask=mask, leaf=4)
    want = reference(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    assert not out[0].any()


def test_an_inexact_block_sees_nothing_of_the_future():
    """The block may do anything with the keys it is given."""

    def mean_block(q, past):
        n = past.k.shape[2]
        mean = [x.mean(2, keepdim=True) for x in (past.k, past.v)]
        part = softmax_partial(q + past.q.mean(2, keepdim=True), *mean, scale=past.scale)
        return part.scale(torch.tensor(float(n), dtype=q.dtype).log())

    q, k, v = make_qkv(37)
    before = lifted(q, k, v, mean_block, leaf=4)
    assert not torch.allclose(before, reference(q, k, v, is_causal=True))
    for at in (1, 9, 18, 19, 30, 36):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, at] = -7 * x[:, :, at]
        after = lifted(*changed, mean_block, leaf=4)
        torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(after[:, :, at:], before[:, :, at:])
        short = lifted(*(x[:, :, :at] for x in (q, k, v)), mean_block, leaf=4)
        torch.testing.assert_close(short, before[:, :, :at], rtol=1e-12, atol=1e-12)


def test_gradients():
    q, k, v = make_qkv(7, batch=1, heads=1, group=2, head_dim=8, value_dim=2)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v: lifted(q, k, v, leaf=2), inputs)


@pytest.mark.parametrize("length", [1, 5, 16, 37, 100])
@pytest.mark.parametrize("leaf", [1, 5, 16])
def test_split_points_cover_every_pair_once(length, leaf):
    leaves, blocks = split_points(length, leaf)
    assert sum(leaves) == length
    assert all(1 <= n <= leaf for n in leaves)
    pairs = sum(n * (n + 1) // 2 for n in leaves) + sum(a * b for a, b in blocks)
    assert pairs == length * (length + 1) // 2


@pytest.mark.parametrize("length", [16, 37])
def test_split_points_are_those_of_lift(length):
    called = []

    def block(q, past):
        called.append((q.shape[2], past.k.shape[2]))
        return exact_block(q, past)

    q, k, v = make_qkv(length)
    lifted(q, k, v, block, leaf=5)
    assert sorted(called) == sorted(split_points(length, 5)[1])


def test_nothing_is_cut_up_to_the_default_leaf():
    def block(q, past):
        raise AssertionError("called")

    q, k, v = make_qkv(LEAF, batch=1, heads=1)
    lifted(q, k, v, block)
    assert split_points(LEAF) == ([LEAF], [])
    assert inspect.signature(lift).parameters["leaf"].default == LEAF
