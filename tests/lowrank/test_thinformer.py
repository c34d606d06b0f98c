import math
from dataclasses import replace

import pytest
import torch

from numattn import padding_mask
from numattn.core.cost import Shape
from numattn.core.linalg import take
from numattn.engines.lift import LEAF, Summary
from numattn.engines.thin import coins_shape, thin
from numattn.lowrank.thinformer import Thinformer, _compress, thinformer_attention
from numattn.testing import make_qkv, reference

F64 = torch.float64


def coins(heads, num_keys, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.rand(coins_shape(heads, num_keys), generator=source, dtype=F64)


def smooth(length, heads):
    """Keys on a curve, with values that change slowly along it; the same in all heads."""
    t = torch.linspace(0, 1, length, dtype=F64)[:, None]
    phase = 2 * math.pi * t * torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=F64)
    k = torch.cat([phase.sin(), phase.cos()], -1)
    v = torch.cat([(phase / 2).cos(), t], -1)
    q = make_qkv(40, batch=1, heads=1)[0]
    return tuple(x.expand(1, heads, -1, -1) for x in (q, k[None, None], v[None, None]))


def largest_errors(out, want):
    return (out - want).abs().amax((2, 3))[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_keys", [4, 30, 64])
def test_rows_attend_to_the_coreset_of_the_tokens_that_exist(num_keys, side):
    lengths = torch.tensor([3, 100, 57])
    q, k, v = make_qkv(100, batch=3, group=2)
    mask = padding_mask(lengths, 100, side=side)
    uniform = coins(3, num_keys)
    record = Thinformer(num_keys)
    out = record(q, k, v, attn_mask=mask, enable_gqa=True, uniform=uniform)
    for b, n in enumerate(lengths.tolist()):
        keep = slice(0, n) if side == "right" else slice(100 - n, 100)
        short = [x[b : b + 1, :, keep] for x in (q, k, v)]
        index, exists, _ = thin(*short[1:], num_keys, uniform, scale=8**-0.5, delta=0.5)
        chosen = torch.zeros(1, 3, n, dtype=torch.bool)
        there = torch.ones_like(index, dtype=torch.bool) if exists is None else exists
        for head in range(3):
            chosen[0, head, index[0, head][there[0, head]]] = True
        seen = chosen.repeat_interleave(2, 1)[:, :, None]
        want = reference(*short, attn_mask=seen)
        torch.testing.assert_close(out[b : b + 1, :, keep], want, rtol=1e-10, atol=1e-11)
        if n > num_keys:
            assert not torch.allclose(want, reference(*short))


@pytest.mark.parametrize("num_keys", [50, 51, 1000])
def test_few_keys_are_all_kept(num_keys):
    q, k, v = make_qkv(30, keys=50)
    out = thinformer_attention(q, k, v, num_keys=num_keys)
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-10, atol=1e-11)
    mask = padding_mask(torch.tensor([50, 20]), 90)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 40)) for x in (k, v))
    out = thinformer_attention(q, k, v, num_keys=num_keys, attn_mask=mask)
    torch.testing.assert_close(out, reference(q, k, v, attn_mask=mask), rtol=1e-10, atol=1e-11)


def test_two_sizes_of_entries_fill_the_budget_each():
    """With 65 keys there are 33 places after halving; an entry of 64 keys needs 64 of them."""
    q, k, v = make_qkv(65)
    mask = padding_mask(torch.tensor([65, 64]))
    out = thinformer_attention(q, k, v, num_keys=64, attn_mask=mask)
    want = reference(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out[1], want[1], rtol=1e-10, atol=1e-11)
    assert not torch.allclose(out[0], want[0])


def test_beats_random_keys_on_smooth_data():
    q, k, v = smooth(1000, 21)
    want = reference(q, k, v)
    source = torch.Generator().manual_seed(0)
    for m in (32, 128):
        out = thinformer_attention(q, k, v, num_keys=m, generator=source)
        subset = torch.rand(1, 21, 1000, generator=source).topk(m, -1).indices
        random = reference(q, take(k, subset), take(v, subset))
        ours, theirs = (largest_errors(x, want).median() for x in (out, random))
        assert ours < theirs / 2


def test_beats_a_random_key_of_each_pair_where_the_kernel_is_of_low_rank():
    """Keys without order: all that helps is the choice itself."""
    source = torch.Generator().manual_seed(1)
    k = 0.3 * torch.randn(1, 1, 1024, 2, generator=source, dtype=F64)
    v = torch.cat([k.square(), k[..., :1] + 1], -1)
    q = 0.3 * torch.randn(1, 1, 40, 2, generator=source, dtype=F64)
    q, k, v = (x.expand(1, 41, -1, -1) for x in (q, k, v))
    want = reference(q, k, v)
    out = thinformer_attention(q, k, v, num_keys=512, generator=source)
    subset = 2 * torch.arange(512) + (torch.rand(1, 41, 512, generator=source) < 0.5)
    random = reference(q, take(k, subset), take(v, subset))
    assert largest_errors(out, want).median() < largest_errors(random, want).median() / 2


def test_error_falls_faster_than_that_of_random_keys():
    """As 1 / m up to logarithms on smooth data: 16 times the keys, more than 4 times better."""
    q, k, v = smooth(2048, 21)
    want = reference(q, k, v)
    errors = []
    for m in (16, 64, 256):
        source = torch.Generator().manual_seed(2)
        out = thinformer_attention(q, k, v, num_keys=m, generator=source)
        errors.append(largest_errors(out, want).median())
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] / errors[2] > 2 * 16**0.5


def with_stride(k, v, m, uniform):
    """As the authors' code does: every so many keys, a power of four in all, are thinned."""
    n = k.shape[2]
    size = 4 ** int(math.log(n, 4))
    first = torch.arange(n)[:: n // size][:size]
    index, _, _ = thin(k[:, :, first], v[:, :, first], m, uniform, scale=8**-0.5, delta=0.5)
    return first[index]


def test_no_key_is_out_of_reach():
    """Of 255 keys a stride to a power of four leaves out 191: all of their mass is lost."""
    _, k, v = make_qkv(255, batch=1, heads=1)
    k, v = (x.expand(1, 300, -1, -1) for x in (k, v))
    uniform = coins(300, 32)
    index, exists, _ = thin(k, v, 32, uniform, scale=8**-0.5, delta=0.5)
    ours = torch.where(exists, index, 255).flatten().bincount(minlength=256)[:255]
    strided = with_stride(k, v, 32, uniform).flatten().bincount(minlength=255)
    assert (ours > 0).all()
    assert (strided == 0).sum() == 255 - 64


def test_heads_of_a_group_share_the_coreset():
    q, k, _ = make_qkv(60, batch=1, heads=2, group=3)
    v = torch.eye(60, dtype=F64).expand(1, 2, -1, -1)
    weights = thinformer_attention(q, k, v, num_keys=8, enable_gqa=True)
    seen = (weights > 0).any(2)[0]
    assert (seen.sum(-1) <= 8).all()
    for head in range(6):
        assert torch.equal(seen[head], seen[head // 3 * 3])
        assert ((weights[0, head] > 0) == seen[head]).all()


@pytest.mark.parametrize("num_keys", [2, 16, 100, 300, 512])
def test_summaries_have_the_mass_of_their_block(num_keys):
    """Equal logits: the share of the first 512 tokens in a row is 512 / n, whatever is chosen."""
    n = 3 * LEAF + 40
    q, k, v = make_qkv(n, batch=1, heads=2)
    k, v = torch.zeros_like(k), torch.zeros_like(v)
    v[:, :, :LEAF, 0], v[:, :, LEAF : 2 * LEAF, 1] = 1.0, 2.0
    record = Thinformer(num_keys)
    out = record(q, k, v, is_causal=True, uniform=coins(2, num_keys))
    one = LEAF / torch.arange(1, n + 1, dtype=F64)
    torch.testing.assert_close(out[0, 0, LEAF : 2 * LEAF, 0], one[LEAF : 2 * LEAF])
    # The summary of two leaves may hold more keys of one than of the other.
    both = out[0, 0, 2 * LEAF :, 0] + out[0, 0, 2 * LEAF :, 1] / 2
    torch.testing.assert_close(both, 2 * one[2 * LEAF :])


def by_hand(record, uniform, q, k, v, i):
    """Row i of a causal call of one head, from the summaries that it sees."""
    parts, start, digits = [], 0, i // LEAF
    for level in reversed(range(digits.bit_length())):
        if digits >> level & 1:
            stop = start + (LEAF << level)
            parts.append(summary(record, uniform, k, v, start, stop))
            start = stop
    parts.append((k[start : i + 1], v[start : i + 1], torch.zeros(i + 1 - start, dtype=F64)))
    keys, values, bias = (torch.cat(x) for x in zip(*parts, strict=True))
    return ((q[i] @ keys.T) * k.shape[1] ** -0.5 + bias).softmax(-1) @ values


def summary(record, uniform, k, v, start, stop):
    """(Keys, values, log-weights) of a block, from those of its halves."""
    if stop - start == LEAF:
        k, v, done = k[start:stop], v[start:stop], 0
    else:
        middle = (start + stop) // 2
        a = summary(record, uniform, k, v, start, middle)
        b = summary(record, uniform, k, v, middle, stop)
        k, v, bias = (torch.cat(x) for x in zip(a, b, strict=True))
        done = round(bias[0].item() / math.log(2))
    level = torch.tensor([[done]])
    index, _, h = thin(
        k[None, None], v[None, None], record.num_keys, uniform, scale=8**-0.5, delta=0.5,
        level=level,
    )  # fmt: skip
    bias = torch.full(index.shape[-1:], (done + h.item()) * math.log(2), dtype=F64)
    return k[index[0, 0]], v[index[0, 0]], bias


@pytest.mark.parametrize("num_keys", [10, 128])
def test_causal_rows_see_summaries_of_the_past(num_keys):
    n = 4 * LEAF + 9
    q, k, v = make_qkv(n, batch=1, heads=1)
    record, uniform = Thinformer(num_keys), coins(1, num_keys)
    out = record(q, k, v, is_causal=True, uniform=uniform)
    for i in (0, LEAF - 1, LEAF, 2 * LEAF - 1, 2 * LEAF, 3 * LEAF + 7, n - 1):
        want = by_hand(record, uniform, q[0, 0], k[0, 0], v[0, 0], i)
        torch.testing.assert_close(out[0, 0, i], want, rtol=1e-9, atol=1e-10)
    exact = reference(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, :, :LEAF], exact[:, :, :LEAF], rtol=1e-10, atol=1e-11)
    assert not torch.allclose(out[:, :, LEAF:], exact[:, :, LEAF:])


def test_sums_over_a_summary_of_summaries_are_unbiased():
    draws = 600
    record, uniform = Thinformer(16), coins(600, 16)
    _, k, v = make_qkv(64, batch=1, heads=1, head_dim=3)
    k, v = (x.expand(1, draws, -1, -1) for x in (k, v))
    a, b = (
        _compress(record, uniform, 0.5, Summary.of(k[:, :, part], v[:, :, part]))
        for part in (slice(0, 32), slice(32, 64))
    )
    both = _compress(record, uniform, 0.5, Summary.cat([a, b], 2))
    assert both.k.shape[2] == 16
    q = make_qkv(5, batch=1, heads=1, head_dim=3)[0].expand(1, draws, -1, -1)
    part = both.attend(q, 0.5)
    scale = part.shift.exp()
    found = torch.cat([part.num * scale[..., None], (part.den * scale)[..., None]], -1)[0]
    weights = (0.5 * q[0, 0] @ k[0, 0].T).exp()
    want = torch.cat([weights @ v[0, 0], weights.sum(-1, keepdim=True)], -1)
    error = found.std(0) / draws**0.5
    assert ((found.mean(0) - want).abs() < 5 * error).all()


@pytest.mark.parametrize("prefix", [0, 700, 2 * LEAF])
def test_decoding_is_the_causal_call(prefix):
    n = 3 * LEAF + 5
    q, k, v = make_qkv(n, batch=2, heads=2, group=2)
    record, uniform = Thinformer(24), coins(2, 24)
    want = record(q, k, v, is_causal=True, enable_gqa=True, uniform=uniform)
    state = record.state(k[:, :, :prefix], v[:, :, :prefix], enable_gqa=True, uniform=uniform)
    at = prefix
    for step in (1, 300, 213, 1, 400, 121, n):
        stop = min(at + step, n)
        if stop == at:
            break
        state.append(k[:, :, at:stop], v[:, :, at:stop])
        at = stop
        out = state.attend(q[:, :, at - 1 : at])
        torch.testing.assert_close(out, want[:, :, at - 1 : at], rtol=1e-9, atol=1e-10)
        shape = Shape(2, 4, 2, at, at, 8, 5, itemsize=8)
        assert state.nbytes == 2 * record.cost(replace(shape, itemsize=4)).cache


def test_causal_padding_is_truncation_beyond_the_leaf():
    q, k, v = make_qkv(1200, batch=2, heads=1)
    record, uniform = Thinformer(32), coins(1, 32)
    mask = padding_mask(torch.tensor([1100, 1200]), side="left")
    out = record(q, k, v, attn_mask=mask, is_causal=True, uniform=uniform)
    short = (x[:1, :, 100:] for x in (q, k, v))
    want = record(*short, is_causal=True, uniform=uniform)
    torch.testing.assert_close(out[:1, :, 100:], want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_reach_what_is_kept(causal):
    n = LEAF + 3 if causal else 30
    q, k, v = make_qkv(n, batch=1, heads=1, head_dim=2, value_dim=2)
    record, uniform = Thinformer(4), coins(1, 4)
    rows = slice(n - 3, n)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    record(*leaves, is_causal=causal, uniform=uniform)[:, :, rows].sum().backward()
    reached = leaves[2].grad[0, 0].abs().sum(-1) > 0
    assert reached.sum() <= 4 + 3 * causal
    direction = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x) for x in leaves
    ]
    step = 1e-6

    def value(sign):
        moved = (x.detach() + sign * step * d for x, d in zip(leaves, direction, strict=True))
        return record(*moved, is_causal=causal, uniform=uniform)[:, :, rows].sum()

    slope = (value(1) - value(-1)) / (2 * step)
    want = sum((x.grad * d).sum() for x, d in zip(leaves, direction, strict=True))
    torch.testing.assert_close(slope, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("causal", [False, True])
def test_logits_of_ten_thousand_overflow_nowhere(causal):
    q, k, v = make_qkv(600, batch=1, heads=2, dtype=torch.float32)
    inputs = [(100 * q).requires_grad_(), (100 * k).requires_grad_(), v.requires_grad_()]
    out = thinformer_attention(*inputs, num_keys=16, is_causal=causal)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_options_and_tensors_are_checked():
    q, k, v = make_qkv(8)
    for options, word in (
        ({"num_keys": 1}, "num_keys"),
        ({"num_keys": 2.0}, "num_keys"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": "half"}, "delta"),
    ):
        with pytest.raises(ValueError, match=f"thinformer: {word}"):
            Thinformer(**options)
        with pytest.raises(ValueError, match=f"thinformer: {word}"):
            thinformer_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="uniform must have shape"):
        thinformer_attention(q, k, v, uniform=torch.rand(3, 5))
    with pytest.raises(TypeError, match="no tensor named basis"):
        Thinformer().state(k, v, basis=k)
