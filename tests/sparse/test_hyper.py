from dataclasses import replace
from functools import partial

import pytest
import torch

from numattn import padding_mask
from numattn.core.inputs import prepare
from numattn.engines.lift import LEAF, lift
from numattn.sparse import hyper, kdeformer
from numattn.sparse.hyper import Hyper, Sorted, gray_rank, hyper_attention
from numattn.sparse.kdeformer import KDEformer
from numattn.testing import make_qkv, reference

F64 = torch.float64


def draws(record, heads, seed=0, head_dim=8):
    q = torch.zeros(1, heads, 1, head_dim, dtype=F64)
    return record.fit(q, q, q, generator=torch.Generator().manual_seed(seed))


def gray_place(signs):
    """The step at which the reflected Gray sequence shows these signs."""
    pattern = sum(1 << n for n, sign in enumerate(signs) if sign)
    return next(i for i in range(1 << len(signs)) if i ^ (i >> 1) == pattern)


def hashes(x, projection, center):
    return [gray_place(row) for row in ((x - center) @ projection > 0).tolist()]


def stretched(u, m, total):
    """Point t of m stretches of [0, 1)."""
    used = min(m, total)
    return [(t + float(u[t])) / used for t in range(used)]


def uniform_samples(u):
    """HyperAttention's choice: places among the sorted keys, and their weights."""

    def sample(q, k, v, order):
        total = len(order)
        if len(u) >= total:
            return [(t, 1.0) for t in range(total)]
        return [(int(z * total), total / len(u)) for z in stretched(u, len(u), total)]

    return sample


def row_sums(q, k, v, block, order, samples):
    """Numerator and denominator of one row, term by term."""
    num, den = torch.zeros(v.shape[1], dtype=F64), 0.0
    places = [(place, 1.0) for place in block]
    places += [(place, weight) for place, weight in samples if place not in block]
    for place, weight in places:
        j = order[place]
        w = weight * torch.exp(q @ k[j] * k.shape[1] ** -0.5)
        num, den = num + w * v[j], den + w
    return num, den


def by_loops(q, k, v, b, projection, sample):
    """One head, not causal; `sample(q, k, v, order)` gives places and weights."""
    rows, total = len(q), len(k)
    key_hash = hashes(k, projection, k.mean(0))
    order = sorted(range(total), key=lambda j: (key_hash[j], j))
    query_hash = hashes(q, projection, q.mean(0))
    walk = sorted(range(rows), key=lambda i: (query_hash[i], i))
    samples = sample(q, k, v, order)
    out = torch.zeros(rows, v.shape[1], dtype=F64)
    for number, i in enumerate(walk):
        start = number * total // rows // b * b
        num, den = row_sums(q[i], k, v, range(start, min(start + b, total)), order, samples)
        out[i] = num / den
    return out


def every_head(q, k, v, lengths, first, one_head):
    """`one_head(q, k, v, h)` over batch and query heads; entry n has tokens first .. + length."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64)
    group = q.shape[1] // k.shape[1]
    for n in range(q.shape[0]):
        keys = slice(first[n], first[n] + lengths[n])
        rows = keys if q.shape[2] == k.shape[2] else slice(None)
        for h in range(q.shape[1]):
            kv = h // group
            out[n, h, rows] = one_head(q[n, h, rows], k[n, kv, keys], v[n, kv, keys], kv)
    return out


@pytest.mark.parametrize("bits", [1, 2, 3, 7])
def test_ranks_are_places_on_a_walk_that_changes_one_sign_at_a_time(bits):
    patterns = torch.tensor([[i >> n & 1 for n in range(bits)] for i in range(1 << bits)])
    rank = gray_rank(patterns.bool())
    assert sorted(rank.tolist()) == list(range(1 << bits))
    walk = patterns[rank.argsort()]
    assert (walk.diff(dim=0).abs().sum(-1) == 1).all()


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
    record = Hyper(block_size=b, num_samples=m, num_projections=3)
    tensors = draws(record, 3)

    def one_head(q, k, v, kv):
        sample = uniform_samples(tensors["uniform"][kv])
        return by_loops(q, k, v, b, tensors["projection"][kv], sample)

    want = every_head(q, k, v, [keys] * 2, [0, 0], one_head)
    out = record(q, k, v, enable_gqa=True, **tensors)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_neither_hashed_nor_paired_nor_sampled(side):
    lengths = [21, 3]
    q, k, v = make_qkv(30, group=2)
    k[0, :, 10 if side == "left" else 25] = 0.0
    record = Hyper(block_size=6, num_samples=5, num_projections=3)
    tensors = draws(record, 3)
    mask = padding_mask(torch.tensor(lengths), 30, side=side)
    first = [0, 0] if side == "right" else [30 - n for n in lengths]

    def one_head(q, k, v, kv):
        sample = uniform_samples(tensors["uniform"][kv])
        return by_loops(q, k, v, 6, tensors["projection"][kv], sample)

    want = every_head(q, k, v, lengths, first, one_head)
    out = record(q, k, v, attn_mask=mask, enable_gqa=True, **tensors)
    for n, length in enumerate(lengths):
        rows = slice(first[n], first[n] + length)
        torch.testing.assert_close(out[n, :, rows], want[n, :, rows], rtol=1e-10, atol=1e-11)


def causal_sums(q, k, v, b, projection, cut, i, sample):
    """Row i >= cut of one head: keys from the cut on exactly, those before it by the method."""
    key_hash = hashes(k[:cut], projection, k[:cut].mean(0))
    order = sorted(range(cut), key=lambda j: (key_hash[j], j))
    past = hashes(q[:cut], projection, q[:cut].mean(0))
    own = hashes(q[i : i + 1], projection, q[:cut].mean(0))[0]
    less, equal = sum(h < own for h in past), sum(h == own for h in past)
    share = (i - cut) * (5**0.5 - 1) / 2 % 1
    start = min(int(less + share * equal), cut - 1) // b * b
    block = range(start, min(start + b, cut))
    samples = sample(q[:cut], k[:cut], v[:cut], order)
    num, den = row_sums(q[i], k, v, block, order, samples)
    seen = slice(cut, i + 1)
    w = torch.exp(k[seen] @ q[i] * k.shape[1] ** -0.5)
    return (num + w @ v[seen]) / (den + w.sum())


def test_a_later_row_takes_its_place_among_the_earlier_queries():
    q, k, v = make_qkv(LEAF + 60, batch=1, heads=2)
    record = Hyper(block_size=48, num_samples=20, num_projections=4)
    tensors = draws(record, 2)
    out = record(q, k, v, is_causal=True, **tensors)
    for h in range(2):
        sample = uniform_samples(tensors["uniform"][h])
        one = (*(x[0, h] for x in (q, k, v)), 48, tensors["projection"][h])
        for i in range(LEAF, LEAF + 60, 7):
            want = causal_sums(*one, LEAF, i, sample)
            torch.testing.assert_close(out[0, h, i], want, rtol=1e-10, atol=1e-11)


def test_no_row_depends_on_a_later_one():
    q, k, v = make_qkv(1100, batch=1, heads=1, group=2)
    record = Hyper(block_size=32)
    call = {"is_causal": True, "enable_gqa": True, **draws(record, 1)}
    before = record(q, k, v, **call)
    for at in (520, 1023, 1024, 1060):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, at:] = -9 * x[:, :, at:].flip(2)
        after = record(*changed, **call)
        torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=1e-11, atol=1e-11)
        short = record(*(x[:, :, :at] for x in (q, k, v)), **call)
        torch.testing.assert_close(short, before[:, :, :at], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("record", [Hyper(block_size=32), KDEformer(block_size=32)])
def test_causal_padding_before_the_tokens_is_truncation(record):
    q, k, v = make_qkv(650, batch=1, heads=2)
    call = {"is_causal": True, **draws(record, 2)}
    out = record(q, k, v, attn_mask=padding_mask(torch.tensor([600]), 650, side="left"), **call)
    short = record(*(x[:, :, 50:] for x in (q, k, v)), **call)
    torch.testing.assert_close(out[:, :, 50:], short, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("module", "record"),
    [
        (hyper, Hyper(block_size=3, num_samples=2)),
        (kdeformer, KDEformer(block_size=3, num_samples=2, num_pilots=4)),
    ],
)
def test_gradients(module, record, causal, monkeypatch):
    monkeypatch.setattr(module, "lift", partial(lift, leaf=4))
    if module is kdeformer:  # whose choice moves with v, and is a constant for autograd
        p = kdeformer._proposals

        def of_ones(s, columns):
            return p(replace(s, v=torch.ones_like(s.v)), torch.ones_like(columns))

        monkeypatch.setattr(kdeformer, "_proposals", of_ones)
    q, k, v = make_qkv(11, batch=2, heads=1, group=2, head_dim=3, value_dim=2)
    call = {"is_causal": causal, "enable_gqa": True, **draws(record, 1, head_dim=3)}
    call["attn_mask"] = padding_mask(torch.tensor([11, 7]))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    attend = partial(record, **call)
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize(("b", "m"), [(700, 1), (1000, 8), (50, 700), (64, 900)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_or_a_sample_of_all_keys_is_exact(b, m, causal):
    q, k, v = make_qkv(700, batch=2, heads=1, group=2)
    mask = padding_mask(torch.tensor([700, 650]))
    record = Hyper(block_size=b, num_samples=m)
    out = record(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True, **draws(record, 1))
    want = reference(q, k, v, attn_mask=mask, is_causal=causal)
    torch.testing.assert_close(out[0], want[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(out[1, :, :650], want[1, :, :650], rtol=1e-9, atol=1e-10)


def repeated(count, keys=45, rows=18, seed=3):
    """One input as `count` heads, which differ in the draw of the samples only."""
    q, k, v = make_qkv(rows, keys=keys, batch=1, heads=1, seed=seed)
    return [x.expand(-1, count, -1, -1) for x in (q, k, v)]


def sums_of(part):
    """Numerator (heads, rows, E) and denominator (heads, rows)."""
    weight = part.shift.exp()
    return (part.num * weight[..., None])[0], (part.den * weight)[0]


def exact_sums(x):
    w = (x.scale * x.q[0, 0] @ x.k[0, 0].T).exp()
    if x.padding is not None:
        w = w * x.padding[0]
    return w @ x.v[0, 0], w.sum(-1)


def unbiased(samples, expected):
    """Whether the mean over draws (the first dimension) is within 4 sigma, entry by entry."""
    error = samples.std(0) / samples.shape[0] ** 0.5
    return bool(((samples.mean(0) - expected).abs() <= 4 * error + 1e-12).all())


COUNT = 4000


def many(record, lengths=None):
    q, k, v = repeated(COUNT)
    mask = None if lengths is None else padding_mask(torch.tensor(lengths), 45)
    x = prepare(record.info, q, k, v, mask, False, None, False)
    tensors = draws(record, COUNT)
    tensors["projection"] = tensors["projection"][:1].expand(COUNT, -1, -1)
    return x, tensors


@pytest.mark.parametrize("lengths", [None, [38]])
def test_numerator_and_denominator_are_unbiased(lengths):
    record = Hyper(block_size=8, num_samples=7, num_projections=3)
    x, tensors = many(record, lengths)
    num, den = sums_of(hyper._block(tensors, 8, x.q, x))
    want_num, want_den = exact_sums(x)
    assert unbiased(num, want_num)
    assert unbiased(den, want_den)


def test_unhidden_samples_would_count_the_block_twice():
    record = Hyper(block_size=8, num_samples=7, num_projections=3)
    x, tensors = many(record)
    s = Sorted.of(x.q, x, tensors["projection"], 8)
    blind = replace(s, first=torch.zeros_like(s.first), last=torch.zeros_like(s.last))
    far = blind.far(*hyper._sample(s, tensors["uniform"]))
    _, near = sums_of(s.restore(s.near()))
    _, den = sums_of(s.restore(s.near().merge(far)))
    _, want = exact_sums(x)
    assert unbiased(den, want + near[0])
    assert not unbiased(den, want)


def test_a_row_whose_samples_are_all_hidden_has_its_block_alone():
    q, k, v = make_qkv(24, batch=1, heads=1)
    record = Hyper(block_size=12, num_samples=1)
    tensors = draws(record, 1)
    tensors["uniform"].fill_(0.1)  # of 24 keys, in the first block
    x = prepare(record.info, q, k, v, None, False, None, False)
    s = Sorted.of(x.q, x, tensors["projection"], 12)
    far = s.restore(s.far(*hyper._sample(s, tensors["uniform"])))
    hidden = far.den == 0
    assert hidden.sum() == 12
    near = s.restore(s.near()).out()
    out = record(q, k, v, **tensors)
    torch.testing.assert_close(out[hidden], near[hidden], rtol=1e-12, atol=1e-12)


def test_samples_default_to_as_many_as_the_block():
    q, k, v = make_qkv(40)
    one, both = Hyper(block_size=6), Hyper(block_size=6, num_samples=6)
    tensors = draws(one, 3)
    assert tensors["uniform"].shape == (3, 6)
    assert torch.equal(one(q, k, v, **tensors), both(q, k, v, **tensors))


def test_a_negative_scale_is_a_negated_query():
    q, k, v = make_qkv(40)
    record = Hyper(block_size=6)
    tensors = draws(record, 3)
    out = record(q, k, v, scale=-0.3, **tensors)
    want = record(-q, k, v, scale=0.3, **tensors)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_hashes_ignore_what_all_queries_and_all_keys_share():
    q, k, v = make_qkv(40)
    record = Hyper(block_size=6)
    tensors = draws(record, 3)
    out = record(q, k + 5.0, v, **tensors)
    torch.testing.assert_close(out, record(q, k, v, **tensors), rtol=1e-9, atol=1e-9)
    x, y = (prepare(record.info, p, k, v, None, False, None, False) for p in (q, q - 7.0))
    one, two = (Sorted.of(p.q, p, tensors["projection"], 6) for p in (x, y))
    assert torch.equal(one.place, two.place)


def test_pairs_that_hash_alike_share_a_block():
    """Clusters as large as a block: what lies outside of the own cluster has next to no mass."""
    source = torch.Generator().manual_seed(0)
    centers = 6 * torch.eye(8, dtype=F64)
    member = torch.randperm(64, generator=source) % 8
    noise = 0.01 * torch.randn(2, 64, 8, generator=source, dtype=F64)
    q, k = (centers[member] + noise)[:, None, None]
    v = torch.nn.functional.one_hot(member, 8).to(F64)[None, None]
    record = Hyper(block_size=8, num_samples=1, num_projections=12)
    out = record(q, k, v, **draws(record, 1))
    logits = (q @ k.mT)[0, 0] * 8**-0.5
    same = member[:, None] == member
    gap = logits[same].min() - logits[~same].max()
    assert ((out - v).abs() <= 64 / 8 * (-gap).exp()).all()


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"block_size": -1}, "block_size"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_projections": 33}, "num_projections"),
        ({"num_projections": 0}, "num_projections"),
    ],
)
def test_bad_options(options, mention):
    q, k, v = make_qkv(5)
    with pytest.raises(ValueError, match=mention):
        Hyper(**options)
    with pytest.raises(ValueError, match=mention):
        hyper_attention(q, k, v, **options)


def test_tensors_of_another_shape_are_refused():
    q, k, v = make_qkv(20)
    with pytest.raises(ValueError, match="projection"):
        hyper_attention(q, k, v, projection=torch.zeros(3, 7, 8))
    with pytest.raises(ValueError, match="uniform"):
        hyper_attention(q, k, v, block_size=4, uniform=torch.zeros(3, 5))
