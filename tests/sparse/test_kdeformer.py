from dataclasses import replace

import pytest
import torch
from test_hyper import (
    COUNT,
    F64,
    by_loops,
    causal_sums,
    draws,
    every_head,
    exact_sums,
    many,
    stretched,
    sums_of,
    unbiased,
)

from numattn import padding_mask
from numattn.core.inputs import prepare
from numattn.engines.lift import LEAF
from numattn.sparse import kdeformer
from numattn.sparse.hyper import Sorted
from numattn.sparse.kdeformer import FLOOR, KDEformer, kdeformer_attention
from numattn.testing import make_qkv, reference


def arrange(record, q, k, v, tensors, mask=None):
    x = prepare(record.info, q, k, v, mask, False, None, True)
    return x, Sorted.of(x.q, x, tensors["projection"], record.block_size)


def shares(q, k, v, pilots):
    """Proposals of one head by the definition, in the order of k."""
    total = len(k)
    rows = [int(z * len(q)) for z in ((t + float(u)) / len(pilots) for t, u in enumerate(pilots))]
    weights = torch.softmax(q[rows] @ k.T * k.shape[1] ** -0.5, -1)
    columns = weights.square().mean(0)
    values = v.square().sum(-1)
    return 0.45 * values / values.sum() + 0.45 * columns / columns.sum() + 0.1 / total


def weighted_samples(u, pilots):
    """KDEformer's choice: places among the sorted keys, and their weights."""

    def sample(q, k, v, order):
        total, m = len(order), len(u)
        if m >= total:
            return [(t, 1.0) for t in range(total)]
        p = shares(q, k, v, pilots)[order].tolist()
        chosen = []
        for point in stretched(u, m, total):
            place, reach = 0, p[0]
            while reach <= point:
                place += 1
                reach += p[place]
            chosen.append((place, 1 / (m * p[place])))
        return chosen

    return sample


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("queries", "keys", "b", "m"),
    [
        (37, 37, 8, 5),
        (37, 37, 5, 11),
        (23, 41, 7, 4),
        (41, 23, 6, 30),
        (5, 41, 41, 3),
        (1, 9, 4, 4),
    ],
)
def test_is_the_definition(queries, keys, b, m, group):
    q, k, v = make_qkv(queries, keys=keys, group=group)
    record = KDEformer(block_size=b, num_samples=m, num_projections=3, num_pilots=9)
    tensors = draws(record, 3)

    def one_head(q, k, v, kv):
        sample = weighted_samples(tensors["uniform"][kv], tensors["pilots"][kv])
        return by_loops(q, k, v, b, tensors["projection"][kv], sample)

    want = every_head(q, k, v, [keys] * 2, [0, 0], one_head)
    out = record(q, k, v, enable_gqa=True, **tensors)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_pilot_and_is_never_drawn(side):
    lengths = [21, 3]
    q, k, v = make_qkv(30, group=2)
    record = KDEformer(block_size=6, num_samples=5, num_projections=3, num_pilots=7)
    tensors = draws(record, 3)
    mask = padding_mask(torch.tensor(lengths), 30, side=side)
    first = [0, 0] if side == "right" else [30 - n for n in lengths]

    def one_head(q, k, v, kv):
        sample = weighted_samples(tensors["uniform"][kv], tensors["pilots"][kv])
        return by_loops(q, k, v, 6, tensors["projection"][kv], sample)

    want = every_head(q, k, v, lengths, first, one_head)
    out = record(q, k, v, attn_mask=mask, enable_gqa=True, **tensors)
    for n, length in enumerate(lengths):
        rows = slice(first[n], first[n] + length)
        torch.testing.assert_close(out[n, :, rows], want[n, :, rows], rtol=1e-10, atol=1e-11)


def test_pilots_of_a_later_row_are_earlier_queries():
    q, k, v = make_qkv(LEAF + 60, batch=1, heads=2)
    record = KDEformer(block_size=48, num_samples=20, num_projections=4, num_pilots=10)
    tensors = draws(record, 2)
    out = record(q, k, v, is_causal=True, **tensors)
    for h in range(2):
        sample = weighted_samples(tensors["uniform"][h], tensors["pilots"][h])
        one = (*(x[0, h] for x in (q, k, v)), 48, tensors["projection"][h])
        for i in range(LEAF, LEAF + 60, 13):
            want = causal_sums(*one, LEAF, i, sample)
            torch.testing.assert_close(out[0, h, i], want, rtol=1e-10, atol=1e-11)


def test_no_row_depends_on_a_later_one():
    q, k, v = make_qkv(1100, batch=1, heads=1, group=2)
    record = KDEformer(block_size=32)
    call = {"is_causal": True, "enable_gqa": True, **draws(record, 1)}
    before = record(q, k, v, **call)
    for at in (520, 1023, 1024, 1060):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, at:] = -9 * x[:, :, at:].flip(2)
        after = record(*changed, **call)
        torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("b", "m"), [(700, 1), (50, 700), (64, 900)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_or_a_sample_of_all_keys_is_exact(b, m, causal):
    q, k, v = make_qkv(700, batch=2, heads=1, group=2)
    mask = padding_mask(torch.tensor([700, 650]))
    record = KDEformer(block_size=b, num_samples=m)
    out = record(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True, **draws(record, 1))
    want = reference(q, k, v, attn_mask=mask, is_causal=causal)
    torch.testing.assert_close(out[0], want[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(out[1, :, :650], want[1, :, :650], rtol=1e-9, atol=1e-10)


def test_proposals_are_probabilities_above_the_floor():
    q, k, v = make_qkv(40, group=2)
    v[0, 0, 3:] = 0.0  # all the norm on three keys
    record = KDEformer(block_size=8)
    tensors = draws(record, 3)
    lengths = torch.tensor([40, 23])
    _, s = arrange(record, q, k, v, tensors, padding_mask(lengths))
    p = kdeformer._proposals(s, kdeformer._columns(s, tensors["pilots"]))
    assert p.shape == (2, 6, 40)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 6, dtype=F64), rtol=1e-12, atol=1e-12)
    for n, length in enumerate(lengths.tolist()):
        assert (p[n, :, :length] >= FLOOR / length).all()
        assert not p[n, :, length:].any()


def test_values_without_any_weight_are_drawn_as_if_all_were_equal():
    q, k, v = make_qkv(40)
    record = KDEformer(block_size=8)
    tensors = draws(record, 3)
    _, s = arrange(record, q, k, torch.zeros_like(v), tensors)
    _, t = arrange(record, q, k, torch.ones_like(v), tensors)
    columns = kdeformer._columns(s, tensors["pilots"])
    assert torch.equal(kdeformer._proposals(s, columns), kdeformer._proposals(t, columns))
    assert not record(q, k, torch.zeros_like(v), **tensors).any()


def test_columns_of_every_query_are_those_of_the_matrix(monkeypatch):
    q, k, v = make_qkv(30, keys=40, group=2)
    record = KDEformer(block_size=8, num_pilots=30)
    tensors = draws(record, 3)
    tensors["pilots"].fill_(0.5)
    x, s = arrange(record, q, k, v, tensors)
    order = torch.cdist(s.k, x.k).argmin(-1).repeat_interleave(2, 1)  # (B, H, Nk)
    p = torch.softmax(q @ k.repeat_interleave(2, 1).mT * 8**-0.5, -1)
    want = p.square().sum(2).gather(-1, order)
    whole = kdeformer._columns(s, tensors["pilots"])
    monkeypatch.setattr(kdeformer, "tile_elements", lambda device: 3 * whole.numel())
    tiled = kdeformer._columns(s, tensors["pilots"])
    torch.testing.assert_close(whole, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tiled, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [None, [38]])
def test_numerator_and_denominator_are_unbiased(lengths):
    record = KDEformer(block_size=8, num_samples=7, num_projections=3, num_pilots=4)
    x, tensors = many(record, lengths)
    tensors["pilots"] = tensors["pilots"][:1].expand(COUNT, -1)
    num, den = sums_of(kdeformer._block(tensors, 8, x.q, x))
    want_num, want_den = exact_sums(x)
    assert unbiased(num, want_num)
    assert unbiased(den, want_den)


def test_unhidden_samples_would_count_the_block_twice():
    record = KDEformer(block_size=8, num_samples=7, num_projections=3, num_pilots=4)
    x, tensors = many(record)
    s = Sorted.of(x.q, x, tensors["projection"], 8)
    p = kdeformer._proposals(s, kdeformer._columns(s, tensors["pilots"]))
    blind = replace(s, first=torch.zeros_like(s.first), last=torch.zeros_like(s.last))
    far = blind.far(*kdeformer._sample(s, p, tensors["uniform"]))
    _, near = sums_of(s.restore(s.near()))
    _, den = sums_of(s.restore(s.near().merge(far)))
    _, want = exact_sums(x)
    assert unbiased(den, want + near[0])
    assert not unbiased(den, want)


def variance(s, p, uniform):
    """Mean squared error of the sampled P V, all columns sampled, over the heads as draws."""
    blind = replace(s, first=torch.zeros_like(s.first), last=torch.zeros_like(s.last))
    num, _ = sums_of(s.restore(blind.far(*kdeformer._sample(s, p, uniform))))
    want, den = exact_sums(s.x)
    return ((num - want) / den[:, None]).square().sum((1, 2)).mean()


def test_importance_lowers_the_variance_on_a_spiky_matrix():
    """The variance is sum_j |P_j|^2 |v_j|^2 / p_j less a constant: least for p ~ |P_j| |v_j|."""
    record = KDEformer(block_size=8, num_samples=5, num_projections=3, num_pilots=18)
    x, tensors = many(record)
    k, v = x.k.clone(), x.v.clone()
    direction = torch.nn.functional.normalize(x.q[:, :1].mean(2), dim=-1)
    for j, size in ((4, 14.0), (17, 12.0), (31, 13.0)):
        k[:, :, j] = size * direction
        v[:, :, j] *= 3
    x = replace(x, k=k, v=v)
    tensors["pilots"] = torch.full((COUNT, 18), 0.5, dtype=F64)  # every query
    s = Sorted.of(x.q, x, tensors["projection"], 8)
    columns = kdeformer._columns(s, tensors["pilots"])
    best = columns.sqrt() * s.v.norm(dim=-1)
    best = best / best.sum(-1, keepdim=True)
    flat = torch.full_like(best, 1 / 45)
    ours = kdeformer._proposals(s, columns)
    found = [variance(s, p, tensors["uniform"]) for p in (best, ours, flat)]
    assert found[0] < found[2]
    assert found[1] < found[2]


def test_all_rows_of_a_head_share_the_samples():
    q, k, _ = make_qkv(48, batch=1, heads=2)
    v = torch.eye(48, dtype=F64).expand(1, 2, -1, -1)
    record = KDEformer(block_size=6, num_samples=5)
    weights = record(q, k, v, **draws(record, 2))
    for h in range(2):
        seen = weights[0, h] > 0  # a key outside of the samples is seen by the rows of one block
        shared = seen.sum(0) > 6
        assert shared.sum() <= 5
        assert ((seen & ~shared).sum(-1) <= 6).all()
        assert (seen.sum(-1) <= 11).all()


@pytest.mark.parametrize("causal", [False, True])
def test_logits_of_ten_thousand_overflow_nowhere(causal):
    q, k, v = make_qkv(600, batch=1, heads=2, dtype=torch.float32)
    q, k = 10**2 * q, 10**2 * k
    assert (q @ k.mT).abs().amax() * 8**-0.5 > 1e4
    record = KDEformer(block_size=16)
    tensors = draws(record, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = record(*leaves, is_causal=causal, **tensors)
    assert out.isfinite().all()
    assert (out.amax(2) <= v.amax(2) + 1e-5).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    _, s = arrange(record, q.detach(), k.detach(), v.detach(), tensors)
    columns = kdeformer._columns(s, tensors["pilots"])
    assert columns.isfinite().all()
    # Rows of squared weights sum to one at most, and to 1 / Nk at least.
    assert ((columns.sum(-1) <= 64 + 1e-3) & (columns.sum(-1) >= 64 / 600)).all()


def test_the_draw_looks_at_the_values():
    q, k, v = make_qkv(60)
    w = make_qkv(60, seed=1)[2]
    record = KDEformer(block_size=4)
    tensors = draws(record, 3)
    both = record(q, k, v + w, **tensors)
    apart = record(q, k, v, **tensors) + record(q, k, w, **tensors)
    assert not torch.allclose(both, apart, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        record(q, k, -2 * v, **tensors), -2 * record(q, k, v, **tensors), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_samples": -3}, "num_samples"),
        ({"num_projections": 40}, "num_projections"),
        ({"num_pilots": 0}, "num_pilots"),
    ],
)
def test_bad_options(options, mention):
    q, k, v = make_qkv(5)
    with pytest.raises(ValueError, match=mention):
        KDEformer(**options)
    with pytest.raises(ValueError, match=mention):
        kdeformer_attention(q, k, v, **options)


def test_tensors_of_another_shape_are_refused():
    q, k, v = make_qkv(20)
    with pytest.raises(ValueError, match="pilots"):
        kdeformer_attention(q, k, v, pilots=torch.zeros(3, 5))
