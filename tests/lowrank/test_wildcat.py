from dataclasses import replace
from functools import partial

import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape
from numattn.engines import lift
from numattn.engines.lift import LEAF, Summary
from numattn.engines.pivots import gaussian_pivots
from numattn.lowrank import wildcat
from numattn.lowrank.wildcat import WildCat, WildCatAttention, wildcat_attention, wildcat_coreset
from numattn.testing import make_qkv, reference


def numbers(rank, heads=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((heads, 4 * rank, 2), generator=generator, dtype=torch.float64)


def centred(k, scale, tau):
    return (k - k.mean(-2, keepdim=True)) * scale**0.5 / tau


def pivots(k, rank, u, scale, tau):
    """As wildcat chooses them, (B, H, r)."""
    x = centred(k, scale, tau)
    block = min(32, 2 * rank)
    return gaussian_pivots(x, rank, u, log_weight=x.square().sum(-1), block=block)


def by_definition(q, k, v, s, scale, tau):
    """One head: weights by solving with the exponential kernel itself; and which do not cancel."""
    x = centred(k, scale, tau)
    w = torch.linalg.solve((x[s] @ x[s].T).exp(), (x[s] @ x.T).exp())
    e = (scale * q @ (k - k.mean(0))[s].T).exp()
    total = (e @ w).sum(-1)
    return (e @ w @ v) / total[:, None], total > 2 * (e @ w).norm(dim=-1)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("tau", "scale"), [(1.0, 0.2), (2.0, 0.35), (1.5, 0.1)])
def test_is_the_definition(tau, scale, group):
    q, k, v = make_qkv(30, keys=41, group=group)
    u = numbers(7)
    out = wildcat_attention(
        q, k, v, rank=7, temperature=tau, uniform=u, scale=scale, enable_gqa=True
    )
    s = pivots(k, 7, u, scale, tau)
    for b in range(2):
        for h in range(3 * group):
            j = h // group
            want, sound = by_definition(q[b, h], k[b, j], v[b, j], s[b, j], scale, tau)
            assert sound.double().mean() > 0.8
            torch.testing.assert_close(out[b, h, sound], want[sound], rtol=1e-9, atol=1e-9)


def test_a_negative_scale_is_a_change_of_sign_of_the_queries():
    q, k, v = make_qkv(30)
    call = {"rank": 7, "uniform": numbers(7)}
    out = wildcat_attention(q, k, v, scale=-0.3, **call)
    torch.testing.assert_close(out, wildcat_attention(-q, k, v, scale=0.3, **call))


@pytest.mark.parametrize("tau", [0.7, 1.0, 2.0, 3.0])
def test_all_keys_kept_is_exact(tau):
    q, k, v = make_qkv(33, keys=48, group=2)
    for rank in (48, 64):
        out = wildcat_attention(q, k, v, rank=rank, temperature=tau, enable_gqa=True)
        torch.testing.assert_close(out, reference(q, k, v), rtol=1e-10, atol=1e-10)


def test_few_keys_that_exist_are_all_kept():
    q, k, v = make_qkv(40)
    k[0, :, 1] = k[0, :, 0] + 1e-9  # beyond what a solve could tell apart
    mask = padding_mask(torch.tensor([6, 40]))
    out = wildcat_attention(q, k, v, rank=6, attn_mask=mask)
    want = reference(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out[0], want[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [6, 9])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_copies_of_few_keys_are_exact(tau, rank):
    q, k, v = make_qkv(30, keys=6)
    k, v = k.repeat(1, 1, 9, 1), make_qkv(54)[2]
    out = wildcat_attention(q, k, v, rank=rank, temperature=tau)
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bins", [1, 2])
def test_equal_keys_give_the_mean(bins):
    q, k, v = make_qkv(16)
    k = k[:, :, :1].expand_as(k)
    out = wildcat_attention(q, k, v, rank=4, num_bins=bins)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(v))


@pytest.mark.parametrize("side", ["left", "right"])
def test_unused_places_of_a_coreset_are_no_keys(side):
    """Copies of two keys among garbage: two pivots, and room for two more."""
    q, k, v = make_qkv(16)
    mask = padding_mask(torch.tensor([10, 10]), 16, side=side)
    keep = mask[0, 0, 0]
    k = k[:, :, :2].repeat(1, 1, 8, 1).masked_fill(~keep[:, None], 1e3)
    s = wildcat_coreset(k, v, rank=4, attn_mask=mask)
    assert torch.equal(s.bias == -torch.inf, torch.tensor([0, 0, 1, 1]).bool().expand(2, 3, 4))
    want = reference(q, k, v, attn_mask=mask)
    torch.testing.assert_close(s.attend(q, 8**-0.5).out(), want, rtol=1e-10, atol=1e-10)


def coreset_weights(k, rank, u, **options):
    """W (B, H, r, M), and the keys of the coreset."""
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    s = wildcat_coreset(k, eye, rank=rank, uniform=u, **options)
    return s.columns[..., : s.width] * s.bias.exp()[..., None], s.k, s


def test_weights_are_the_best_in_the_norm_of_the_kernel():
    k = make_qkv(40)[1]
    w, _, _ = coreset_weights(k, 9, numbers(9), scale=0.3, temperature=1.3)
    s = pivots(k, 9, numbers(9), 0.3, 1.3)
    x = centred(k, 0.3, 1.3)
    h = (x @ x.mT).exp()
    h_s = h.gather(2, s[..., None].expand(-1, -1, -1, 40))  # (B, H, r, M)
    h_ss = h_s.gather(3, s[:, :, None].expand(-1, -1, 9, -1))

    def distance(w):
        """Squared, between the functions of the keys and their stand-ins, (B, H, M)."""
        return h.diagonal(dim1=-2, dim2=-1) - 2 * (w * h_s).sum(-2) + (w * (h_ss @ w)).sum(-2)

    best = distance(w)
    generator = torch.Generator().manual_seed(3)
    for size in (1e-3, 1.0):
        step = torch.randn(w.shape, generator=generator, dtype=w.dtype)
        assert (distance(w + size * step) > best).all()


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_the_error_of_an_entry_is_within_the_bound(tau):
    q, k, _ = make_qkv(40)
    scale = 0.3
    k = k - k.mean(2, keepdim=True)
    for rank in (3, 10, 25):
        u = numbers(rank)
        w, k_s, _ = coreset_weights(k, rank, u, scale=scale, temperature=tau)
        error = ((scale * q @ k.mT).exp() - (scale * q @ k_s.mT).exp() @ w).abs()
        x = centred(k, scale, tau)
        h = (x @ x.mT).exp()
        s = pivots(k, rank, u, scale, tau)
        h_s = h.gather(2, s[..., None].expand(-1, -1, -1, 40))
        h_ss = h_s.gather(3, s[:, :, None].expand(-1, -1, rank, -1))
        left = (h_s * torch.linalg.solve(h_ss, h_s)).sum(-2)
        left = (h.diagonal(dim1=-2, dim2=-1) - left).clamp(min=0)
        phi = (scale * tau**2 * q.square().sum(-1) / 2).exp()
        assert (error <= phi[..., None] * left.sqrt()[..., None, :] * (1 + 1e-6) + 1e-9).all()


def test_rank_is_at_most_the_number_of_keys():
    q, k, _ = make_qkv(40)
    eye = torch.eye(40, dtype=q.dtype).expand(2, 3, -1, -1)
    sigma = torch.linalg.svdvals(wildcat_attention(q, k, eye, rank=6, uniform=numbers(6)))
    assert (sigma[..., 6:] <= 1e-12 * sigma[..., :1]).all()
    assert (sigma[..., 5] > 1e-9 * sigma[..., 0]).all()


def test_the_error_falls_with_rank():
    """Medians over heads and draws; the last is exact."""
    q, k, v = make_qkv(64)
    want = reference(q, k, v)
    medians = []
    for rank in (4, 16, 48, 64):
        out = [
            wildcat_attention(q, k, v, rank=rank, uniform=numbers(rank, seed=s)) for s in (1, 2, 3)
        ]
        errors = torch.stack([(o - want).norm(dim=(2, 3)) for o in out])
        medians.append(errors.median())
    assert medians == sorted(medians, reverse=True)


def test_adding_to_all_keys_changes_nothing():
    q, k, v = make_qkv(40)
    call = {"rank": 8, "uniform": numbers(8)}
    moved = wildcat_attention(q, k + 5.0, v, **call)
    torch.testing.assert_close(moved, wildcat_attention(q, k, v, **call), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [24, 25, 27])
def test_bins_share_one_scale(length):
    """Each of three bins holds copies of two keys: exact, unless their weights have own scales."""
    q, k, v = make_qkv(length)
    for b, (start, size) in enumerate(((0, 1.0), (1, 6.0), (2, 0.1))):
        part = slice(start * length // 3, (start + 1) * length // 3)
        two = size * make_qkv(2, seed=b)[1]
        k[:, :, part] = two.repeat(1, 1, 9, 1)[:, :, : part.stop - part.start]
    out = wildcat_attention(q, k, v, rank=6, num_bins=3)
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-9, atol=1e-9)


def test_bins_are_compressed_by_themselves():
    q, k, v = make_qkv(40)
    u = numbers(8)
    out = wildcat_attention(q, k, v, rank=8, num_bins=2, uniform=u)
    halves = [
        wildcat_coreset(k[:, :, part], v[:, :, part], rank=4, uniform=u[:, first : first + 16])
        for first, part in ((0, slice(0, 20)), (16, slice(20, 40)))
    ]
    want = Summary.cat(halves, 2).attend(q, 8**-0.5).out()
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_no_bin(side):
    q, k, v = make_qkv(40)
    mask = padding_mask(torch.tensor([23, 40]), side=side)
    keep = mask[0, 0, 0]
    call = {"rank": 9, "num_bins": 3, "uniform": numbers(9)}
    out = wildcat_attention(q, k, v, attn_mask=mask, **call)
    alone = wildcat_attention(*(x[:1, :, keep] for x in (q, k, v)), **call)
    torch.testing.assert_close(out[:1, :, keep], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 4])
def test_huge_keys_do_not_overflow(dtype, bins):
    q, k, v = make_qkv(600, batch=1, dtype=dtype)
    k = 30 * k * torch.linspace(0, 1, 600)[:, None].to(dtype)
    for causal in (False, True):
        out = wildcat_attention(q, k, v, rank=8, num_bins=bins, is_causal=causal)
        assert out.isfinite().all()


def test_weighted_keys_are_compressed_as_their_copies():
    """Summaries of summaries: three distinct keys, with weights of both signs."""
    q, k, v = make_qkv(12)
    k = k[:, :, :3].repeat(1, 1, 4, 1)
    weight = torch.tensor([1.0, 2.0, 1.0, -1.0, 3.0, 1.0] * 2, dtype=q.dtype).expand(2, 3, -1)
    bias = torch.linspace(-2, 1, 12, dtype=q.dtype).expand(2, 3, -1)
    columns = torch.cat([v, weight[..., None]], -1)
    s = Summary(k, columns, bias, 5)
    short = wildcat._compress(WildCat(rank=3), 0.3, numbers(3), s)
    assert short.k.shape[2] == 3
    a, b = s.attend(q, 0.3), short.attend(q, 0.3)
    for x, y in ((a.num, b.num), (a.den[..., None], b.den[..., None])):
        left, right = (t * p.shift.exp()[..., None] for t, p in ((x, a), (y, b)))
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_heavy_keys_are_chosen_first():
    """A summary's key that stands for many is as likely as all of them, squared."""
    k = make_qkv(20)[1]
    bias = torch.zeros(2, 3, 20).double()
    bias[..., 13] = 40.0
    s = replace(Summary.of(k, k), bias=bias)
    chosen = wildcat._compress(WildCat(rank=2), 0.3, numbers(2), s)
    assert (chosen.k == k[:, :, 13:14]).all(-1).any(-1).all()


def test_a_coreset_is_the_attention():
    q, k, v = make_qkv(40)
    call = {"rank": 8, "uniform": numbers(8), "attn_mask": padding_mask(torch.tensor([30, 40]))}
    part = wildcat_coreset(k, v, **call).attend(q, 8**-0.5)
    torch.testing.assert_close(part.out(), wildcat_attention(q, k, v, **call))


def test_weights_that_cancel_do_no_harm():
    """Far from the keys, weights of either sign take over: plain quotients are then of any size."""
    q, k, v = make_qkv(200, keys=60, head_dim=1)
    q = 10 * q
    coreset = wildcat_coreset(k, v, rank=4, uniform=numbers(4), scale=1.0)
    sums = (q @ coreset.k.mT + coreset.bias[..., None, :]).softmax(-1) @ coreset.columns
    plain = sums[..., :5] / sums[..., 5:6]
    assert (sums[..., 5] < 0).any()
    size = torch.linalg.matrix_norm(v, 2)[..., None]
    # |W v| <= |W|_2 |v|_2, and m >= |W|_2 up to the error of eight signs.
    bound = 3 * size + v.mean(2).norm(dim=-1, keepdim=True)
    assert (coreset.attend(q, 1.0).out().norm(dim=-1) <= bound).all()
    assert (plain.norm(dim=-1) > bound).any()


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"rank": 4}, None),
        ({"rank": 4, "num_bins": 2}, None),
        ({"rank": 4, "clip": True}, None),
        ({"rank": 4}, [3, 8]),
        ({"rank": 4, "num_bins": 2, "temperature": 1.2}, [7, 8]),
    ],
)
def test_gradients(options, mask):
    q, k, v = make_qkv(2, keys=8, batch=2, heads=1, group=2, head_dim=2, value_dim=1)
    mask = None if mask is None else padding_mask(torch.tensor(mask))

    def call(q, k, v):
        return wildcat_attention(
            q, k, v, uniform=numbers(4, 1), attn_mask=mask, enable_gqa=True, **options
        )

    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(call, inputs, atol=1e-6, rtol=1e-4)


@pytest.fixture
def short_leaves(monkeypatch):
    monkeypatch.setattr(wildcat, "lift_summaries", partial(lift.lift_summaries, leaf=4))


@pytest.mark.usefixtures("short_leaves")
def test_gradients_of_causal_calls():
    q, k, v = make_qkv(11, batch=1, heads=1, head_dim=2, value_dim=1)

    def call(q, k, v):
        return wildcat_attention(q, k, v, rank=2, uniform=numbers(2, 1), is_causal=True)

    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(call, inputs, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("short_leaves")
@pytest.mark.parametrize("bins", [1, 2])
def test_causal_calls_see_summaries_of_summaries(bins):
    """Row 18 after leaves of 4: the first 16 tokens in one, the rest as they are."""
    q, k, v = make_qkv(19)
    u, options = numbers(2), WildCat(rank=2, num_bins=bins)
    out = wildcat_attention(q, k, v, rank=2, num_bins=bins, uniform=u, is_causal=True)
    compress = partial(wildcat._compress, options, 8**-0.5, u)
    blocks = [compress(Summary.of(k[:, :, a : a + 4], v[:, :, a : a + 4])) for a in range(0, 16, 4)]
    pairs = [compress(Summary.cat(blocks[i : i + 2], 2)) for i in (0, 2)]
    past = compress(Summary.cat(pairs, 2)).attend(q[:, :, 18:], 8**-0.5)
    own = Summary.of(k[:, :, 16:], v[:, :, 16:]).attend(q[:, :, 18:], 8**-0.5)
    torch.testing.assert_close(out[:, :, 18:], past.merge(own).out(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clip", [False, True])
def test_decoding_is_the_causal_call_past_a_leaf(clip):
    length = 2 * LEAF + 4
    q, k, v = make_qkv(length, batch=1, heads=1, group=2)
    u, options = numbers(8, 1), WildCat(rank=8, clip=clip)
    call = {"uniform": u, "enable_gqa": True}
    want = options(3 * q, k, v, is_causal=True, **call)
    state = options.state(k[:, :, : length - 5], v[:, :, : length - 5], **call)
    for t in range(length - 5, length):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(3 * q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=1e-9, atol=1e-9)
    shape = Shape(1, 2, 1, length, length, 8, 5, itemsize=8)
    assert state.nbytes == options.cost(shape).cache


def test_the_cache_of_a_rank_beyond_a_leaf():
    length = 3 * LEAF + 7
    _, k, v = make_qkv(length, batch=1, heads=1)
    options = WildCat(rank=700)
    shape = Shape(1, 1, 1, length, length, 8, 5, itemsize=8)
    assert options.state(k, v).nbytes == options.cost(shape).cache


def beyond(length):
    """Queries far from the keys, where weights of either sign take over."""
    q, k, v = make_qkv(length, group=2, head_dim=1)
    return 10 * q, k, v, {"rank": 3, "uniform": numbers(3), "scale": 1.0, "enable_gqa": True}


def test_clip_keeps_the_output_within_the_values():
    q, k, v, call = beyond(50)
    call["attn_mask"] = padding_mask(torch.tensor([31, 50]))
    wild = wildcat_attention(q, k, v, **call)
    out = wildcat_attention(q, k, v, clip=True, **call)
    for b, n in ((0, 31), (1, 50)):
        low, high = (t.repeat_interleave(2, 0) for t in torch.aminmax(v[b, :, :n], dim=1))
        torch.testing.assert_close(out[b], wild[b].clamp(low[:, None], high[:, None]))
    assert not torch.allclose(out, wild)


@pytest.mark.usefixtures("short_leaves")
def test_clip_of_causal_calls_looks_at_the_past():
    q, k, v, call = beyond(50)
    call |= {"is_causal": True}
    wild = wildcat_attention(q, k, v, **call)
    out = wildcat_attention(q, k, v, clip=True, **call)
    low, high = (t.values.repeat_interleave(2, 1) for t in (v.cummin(2), v.cummax(2)))
    torch.testing.assert_close(out, wild.clamp(low, high))
    assert not torch.allclose(out, wild)


@pytest.mark.usefixtures("short_leaves")
def test_clip_of_causal_calls_passes_over_padding():
    q, k, v, call = beyond(50)
    call |= {"is_causal": True, "clip": True}
    mask = padding_mask(torch.tensor([0, 30]), 50, side="left")
    padded = wildcat_attention(q, k, v, attn_mask=mask, **call)
    alone = wildcat_attention(*(x[1:, :, 20:] for x in (q, k, v)), **call)
    torch.testing.assert_close(padded[1:, :, 20:], alone, rtol=1e-9, atol=1e-9)
    assert not padded[0].any()
    assert not padded[1, :, :20].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_beyond_a_leaf(dtype):
    q, k, v = make_qkv(LEAF + 40, batch=1, heads=1, dtype=dtype)
    u = numbers(16, 1)
    low = wildcat_attention(q, k, v, rank=16, uniform=u, is_causal=True)
    high = wildcat_attention(
        *(x.double() for x in (q, k, v)), rank=16, uniform=u, is_causal=True
    ).to(dtype)
    torch.testing.assert_close(low, high, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"rank": 0}, "rank"),
        ({"num_bins": 0}, "num_bins"),
        ({"rank": 10, "num_bins": 4}, "num_bins"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_bad_options_are_refused(options, mention):
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match=mention):
        WildCat(**options)
    with pytest.raises(ValueError, match=mention):
        wildcat_attention(q, k, v, **options)
    with pytest.raises(ValueError, match=mention):
        wildcat_coreset(k, v, **options)


def test_exact_options_keep_the_bins():
    exact = WildCat(rank=8, num_bins=4).exact_at(43)
    assert exact.rank >= 43
    assert exact.num_bins == 4


def test_tensors_of_another_shape_are_refused():
    q, k, v = make_qkv(20)
    with pytest.raises(ValueError, match="uniform"):
        wildcat_attention(q, k, v, rank=8, uniform=numbers(4))
    with pytest.raises(TypeError, match="projection"):
        WildCat().state(k, v, projection=k)
    with pytest.raises(Unsupported, match="padding"):
        wildcat_coreset(k, v, attn_mask=torch.ones(20, 20, dtype=torch.bool))


def test_the_module_keeps_its_draw():
    q, k, v = make_qkv(40, dtype=torch.float32)
    module = WildCatAttention(num_heads=3, head_dim=8, rank=8)
    first = module(q, k, v)
    assert torch.equal(module(q, k, v), first)
    module.redraw(torch.Generator().manual_seed(5))
    assert not torch.equal(module(q, k, v), first)
