import inspect
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from numattn import padding_mask
from numattn.core.cost import Shape
from numattn.core.inputs import prepare
from numattn.core.linalg import group_sums, kmeans
from numattn.engines.lift import (
    LEAF,
    PROBES,
    StreamingState,
    Summary,
    compressed,
    lift,
    lift_summaries,
    split_points,
    streaming_bytes,
)
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


def segment_means(size):
    """Landmarks: means of consecutive keys, weighted by how many they stand for."""

    def compress(s):
        n = s.k.shape[2]
        columns = s.columns * s.bias.exp()[..., None]
        starts = [i * n // size for i in range(size + 1)]
        spans = [slice(a, b) for a, b in pairwise(starts) if a < b]
        keys, columns = (
            torch.stack([x[..., span, :].sum(-2) for span in spans], -2)
            for x in (s.k * columns[..., s.width :][..., :1], columns)
        )
        w = columns[..., s.width :][..., :1]
        return Summary(keys / w, columns / w, w[..., 0].log(), s.width)

    return compress


def clusters(size):
    """Centres of k-means over the keys of a summary, whose masses it adds."""

    def compress(s):
        label = kmeans(s.k, size, 3)
        columns = s.columns * s.bias.exp()[..., None]
        keys, columns = (
            group_sums(x, label, size) for x in (s.k * columns[..., s.width :][..., :1], columns)
        )
        mass = columns[..., s.width :][..., :1]
        keys, columns = (x / mass.clamp(min=1e-300) for x in (keys, columns))
        return Summary(keys, columns, mass[..., 0].log(), s.width)

    return compress


def every_other(size):
    """A coreset: halves of it, each key for two."""

    def compress(s):
        step = -(-s.k.shape[2] // size)
        k, columns, bias = (x[:, :, ::step] for x in (s.k, s.columns, s.bias))
        return Summary(k, columns, bias + math.log(step), s.width)

    return compress


COMPRESSIONS = {"landmarks": segment_means, "clusters": clusters, "coreset": every_other}


def summarised(q, k, v, compress, attn_mask=None, **options):
    x = prepare(INFO, q, k, v, attn_mask, True, None, True)
    return x.restore(lift_summaries(x, compress, **options))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("leaf", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 37, 64])
def test_summaries_that_leave_nothing_out_are_exact(length, leaf, group):
    q, k, v = make_qkv(length, group=group)
    want = reference(q, k, v, is_causal=True)
    out = summarised(q, k, v, lambda s: s, leaf=leaf)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def by_tree(q, k, v, compress, leaf, at):
    """Row `at` of one head by the definition: exact in its leaf, one summary per binary digit."""
    start, parts = at // leaf * leaf, []
    done, digits = 0, at // leaf
    for level in reversed(range(digits.bit_length())):
        if digits >> level & 1:

            def node(a, level):
                if level == 0:
                    return compress(Summary.of(k[:, :, a : a + leaf], v[:, :, a : a + leaf]))
                half = leaf << level - 1
                return compress(Summary.cat([node(a, level - 1), node(a + half, level - 1)], 2))

            parts.append(node(done, level))
            done += leaf << level
    parts.append(Summary.of(k[:, :, start : at + 1], v[:, :, start : at + 1]))
    scale = q.shape[-1] ** -0.5
    weights = [(scale * q[:, :, at : at + 1] @ s.k.mT + s.bias[..., None, :]).exp() for s in parts]
    sums = sum(w @ s.columns for w, s in zip(weights, parts, strict=True))
    return sums[..., :-1] / sums[..., -1:]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_row_sees_a_summary_per_binary_digit(name):
    q, k, v = make_qkv(53)
    compress = COMPRESSIONS[name](3)
    out = summarised(q, k, v, compress, leaf=4)
    for at in (0, 3, 4, 15, 16, 27, 52):
        want = by_tree(q, k, v, compress, 4, at)
        torch.testing.assert_close(out[:, :, at : at + 1], want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("prefix", [0, 13])
def test_streaming_shows_what_the_causal_call_shows(name, prefix):
    q, k, v = make_qkv(53, group=2)
    compress = COMPRESSIONS[name](3)
    want = summarised(q, k, v, compress, leaf=4)
    start = (k[:, :, :prefix], v[:, :, :prefix])
    state = StreamingState(INFO, compress, *start, leaf=4, enable_gqa=True)
    for t in range(prefix, 53):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=1e-11, atol=1e-11)
        if name != "clusters":  # whose leaf may hold fewer keys than a summary
            shape = Shape(2, 6, 3, t + 1, t + 1, 8, 5, itemsize=8)
            size = 2 if name == "coreset" else 3
            assert state.nbytes == streaming_bytes(shape, size, 4)


def test_an_empty_stream_attends_to_nothing():
    q, k, v = make_qkv(1)
    state = StreamingState(INFO, every_other(3), k[:, :, :0], v[:, :, :0], leaf=4)
    assert not state.attend(q).any()


def test_streaming_keeps_half_precision_in_its_buffer():
    q, k, v = (x.to(torch.bfloat16) for x in make_qkv(21))
    state = StreamingState(INFO, every_other(3), k, v, leaf=4)
    assert state.attend(q[:, :, :1]).dtype == torch.bfloat16
    assert state.nbytes == streaming_bytes(Shape(2, 3, 3, 21, 21, 8, 5, itemsize=2), 2, 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_summaries(side):
    q, k, v = make_qkv(37, batch=3, group=2)
    mask = padding_mask(torch.tensor([0, 20, 37]), side=side)
    out = summarised(q, k, v, segment_means(2), attn_mask=mask, leaf=4)
    keep = slice(0, 20) if side == "right" else slice(17, 37)
    short = (x[1:2, :, keep] for x in (q, k, v))
    alone = summarised(*short, segment_means(2), leaf=4)
    torch.testing.assert_close(out[1:2, :, keep], alone, rtol=1e-12, atol=1e-12)
    assert not out[0].any()


def test_summaries_see_nothing_of_the_future():
    q, k, v = make_qkv(37)
    before = summarised(q, k, v, segment_means(2), leaf=4)
    for at in (1, 9, 18, 19, 30, 36):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, at] = -7 * x[:, :, at]
        after = summarised(*changed, segment_means(2), leaf=4)
        torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(after[:, :, at:], before[:, :, at:])


def test_gradients_of_summaries():
    inputs = tuple(x.requires_grad_() for x in make_qkv(13, batch=1, heads=1, group=2, value_dim=2))
    assert torch.autograd.gradcheck(
        lambda q, k, v: summarised(q, k, v, segment_means(2), leaf=2), inputs
    )


def mixed(s, weights):
    """Keys of s replaced by combinations of them, (B, H, r, N); the first r keys stay."""
    return replace(
        s,
        k=s.k[:, :, : weights.shape[2]],
        columns=weights @ s.columns,
        bias=s.bias[..., : weights.shape[2]],
    )


def total(part):
    """Sums of values and of weights, on one scale."""
    scale = part.shift.exp()[..., None]
    return part.num * scale, part.den[..., None] * scale


def test_weights_that_are_not_negative_are_left_alone():
    q, k, v = make_qkv(40)
    weights = torch.rand(2, 3, 7, 40, generator=torch.Generator().manual_seed(0)).to(v)
    weights = weights * (torch.rand_like(weights) < 0.2)
    signed, plain = (mixed(Summary.of(k, v, signed=s), weights) for s in (True, False))
    for a, b in zip(total(signed.attend(q, 0.3)), total(plain.attend(q, 0.3)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_weights_that_cancel_are_completed_with_the_mean():
    """By the definition: what the sum of weights lacks is put on the mean of the values."""
    q, k, v = make_qkv(40)
    weights = torch.randn(2, 3, 7, 40, generator=torch.Generator().manual_seed(0)).to(v)
    s = mixed(Summary.of(k, v, signed=True), weights)
    probes = s.columns[..., 6:]
    rows = (0.3 * q @ s.k.mT).exp()
    num, den = rows @ weights @ v, (rows @ weights).sum(-1, keepdim=True)
    least = (rows @ probes).square().mean(-1, keepdim=True).sqrt()
    assert (den < least).any()
    assert (den > least).any()
    ones = weights.sum(-2, keepdim=True)
    at_zero = torch.maximum(
        ones.sum(-1, keepdim=True),
        probes.sum(-2, keepdim=True).square().mean(-1, keepdim=True).sqrt(),
    )
    want = num + (least - den).clamp(min=0) * (ones @ v) / at_zero
    got_num, got_den = total(s.attend(q, 0.3))
    torch.testing.assert_close(got_num, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_den, torch.maximum(den, least), rtol=1e-10, atol=1e-10)


def test_probes_have_the_mean_square_of_the_norm():
    """As random signs have: over many rows, within four standard errors."""
    _, k, v = make_qkv(400)
    probes = Summary.of(k, v, signed=True).columns[0, 0, :, 6:]
    assert torch.equal(probes.abs(), torch.ones_like(probes))
    weights = torch.randn(2000, 400, generator=torch.Generator().manual_seed(0)).to(v)
    square = (weights @ probes).square().mean(-1) / weights.square().sum(-1)
    assert (square.mean() - 1).abs() <= 4 * square.std() / 2000**0.5
    assert square.std() == pytest.approx((2 / PROBES) ** 0.5, rel=0.1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_probes_of_its_own(side):
    _, k, v = make_qkv(20)
    mask = padding_mask(torch.tensor([13, 20]), side=side)
    keep = mask[0, 0, 0]
    padded = Summary.of(k, v, mask[:, 0], signed=True).columns[:1, :, keep]
    alone = Summary.of(k[:1, :, keep], v[:1, :, keep], signed=True).columns
    assert torch.equal(padded, alone)


@pytest.mark.parametrize("length", [1, 4, 5, 16, 17, 37, 64])
def test_compressed_counts_the_calls(length):
    calls = {}

    def compress(s):
        size, entries = s.k.shape[2], s.k.shape[0] // 2
        calls[size] = calls.get(size, 0) + entries
        return every_other(3)(s)

    q, k, v = make_qkv(length)
    summarised(q, k, v, compress, leaf=4)
    counted = {}
    for keys, count in compressed(length, 2, 4):
        counted[keys] = counted.get(keys, 0) + count
    assert calls == counted
