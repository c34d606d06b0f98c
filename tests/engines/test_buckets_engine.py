"""Rounds of buckets against loops over pairs: unions, intervals, decoding."""

import pytest
import torch

from numattn import Info
from numattn.core.inputs import Inputs
from numattn.engines.blocks import blocks_attention
from numattn.engines.buckets import (
    BucketState,
    Round,
    bucket_attention,
    bucket_reach,
    bucket_rounds,
    inverse,
    recent_rounds,
    union_attention,
    unit,
)
from numattn.testing import make_qkv

F64 = torch.float64
SCALE = 0.4

INFO = Info(
    name="stub",
    family="sparse",
    summary="",
    paper="",
    complexity="",
    budget=None,
    approximates="softmax",
    causal="native",
    mask="padding",
)


def integers(low, high, *shape, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def folded(length=40, group=2, seed=0, num_keys=None, dtype=F64):
    """A causal call of which the first `num_keys` tokens of the first sequence exist."""
    q, k, v = make_qkv(length, group=group, seed=seed, dtype=dtype)
    padding = None
    if num_keys is not None:
        padding = torch.arange(length) < torch.tensor([[[num_keys]], [[length]]])
    rows = q.unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3)
    return Inputs(rows, k, v, SCALE, True, padding, None, group, (*q.shape[:3], 5), dtype)


def dense(q, k, v, seen):
    logits = (SCALE * q @ k.mT).masked_fill(~seen, -torch.inf)
    nothing = ~seen.any(-1)
    logits = logits.masked_fill(nothing[..., None], 0.0)
    lse = logits.logsumexp(-1).masked_fill(nothing, -torch.inf)
    return logits.softmax(-1).masked_fill(nothing[..., None], 0.0) @ v, lse


def pairs_by_loop(x, row_labels, key_labels, size, window, sinks=0):
    """Every pair of the definition, by looking at the keys of a row from the latest back."""
    batch, heads, rounds, rows = row_labels.shape
    seen = torch.zeros(batch, heads, rows, x.k.shape[2], dtype=torch.bool)
    mine, theirs = row_labels.tolist(), key_labels.tolist()
    for b in range(batch):
        exist = x.k.shape[2] if x.padding is None else int(x.padding[b].sum())
        for h in range(heads):
            for r in range(rows):
                i = r // x.group
                if i >= exist:
                    continue
                seen[b, h, r, max(i + 1 - window, 0) : i + 1] = True
                seen[b, h, r, : min(sinks, i + 1)] = True
                for t in range(rounds):
                    alike = [j for j in range(i + 1) if theirs[b][h][t][j] == mine[b][h][t][r]]
                    seen[b, h, r, alike[-size:]] = True
    return seen


def exists(x):
    """Rows that exist, (B, 1, rows)."""
    rows = torch.ones(2, 1, x.q.shape[2], dtype=torch.bool)
    return rows if x.query_padding is None else x.query_padding


def random_rounds(rows, keys, count):
    found = recent_rounds(rows, 1, 5, 0, torch.full((1, 1), keys))
    for t in range(count):
        order = torch.rand(2, 3, keys, generator=torch.Generator().manual_seed(t)).argsort(-1)
        first = integers(0, keys, 2, 3, rows, seed=10 + t)
        last = first + integers(0, 12, 2, 3, rows, seed=20 + t)  # some are empty
        found.append(Round(order, first.argsort(-1), first, last.clamp(max=keys), 12))
    return found


def union_by_loop(rounds, rows, keys):
    seen = torch.zeros(2, 3, rows, keys, dtype=torch.bool)
    for this in rounds:
        for b in range(2):
            for h in range(3):
                order = torch.arange(keys) if this.keys is None else this.keys[b, h]
                for r in range(rows):
                    first, last = (x.expand(2, 3, -1)[b, h, r] for x in (this.first, this.last))
                    seen[b, h, r, order[first.clamp(min=0) : last]] = True
    return seen


@pytest.mark.parametrize("hide_own", [0, 1, 2])
@pytest.mark.parametrize(("rows", "keys"), [(70, 70), (33, 90)])
def test_a_union_counts_every_pair_once(rows, keys, hide_own):
    q, k, v = make_qkv(rows, keys=keys)
    rounds = random_rounds(rows, keys, 3)
    seen = union_by_loop(rounds, rows, keys)
    if hide_own:
        seen &= (torch.arange(rows) // hide_own)[:, None] != torch.arange(keys)
    found = []
    for call in (
        lambda q, k, v: union_attention(q, k, v, rounds, scale=SCALE, hide_own=hide_own),
        lambda q, k, v: dense(q, k, v, seen),
    ):
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = call(*own)
        value = out.square().sum() + lse[lse > -torch.inf].sin().sum()
        found.append((out, lse, *torch.autograd.grad(value, own)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_one_round_twice_is_that_round():
    q, k, v = make_qkv(50)
    _, this = random_rounds(50, 50, 1)
    once = union_attention(q, k, v, [this], scale=SCALE)
    twice = union_attention(q, k, v, [this, this], scale=SCALE)
    assert (once[1] == -torch.inf).any()
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_union_needs_a_round():
    q, k, v = make_qkv(5)
    with pytest.raises(ValueError, match="round"):
        union_attention(q, k, v, [], scale=SCALE)


@pytest.mark.parametrize("num_keys", [None, 0, 1, 29])
@pytest.mark.parametrize(("size", "window"), [(1, 1), (4, 3), (100, 1), (2, 100)])
@pytest.mark.parametrize("sinks", [0, 3, 50])
@pytest.mark.parametrize("group", [1, 2])
def test_bucket_attention_is_its_definition(size, window, group, sinks, num_keys):
    x = folded(group=group, num_keys=num_keys)
    rows, keys = integers(0, 4, 2, 3, 2, 40 * group), integers(0, 4, 2, 3, 2, 40, seed=2)
    if x.padding is not None:
        keys = keys.masked_fill(~x.padding[:, :, None], 4)
    out = bucket_attention(x, rows, keys, size=size, window=window, num_sinks=sinks)
    want, _ = dense(x.q, x.k, x.v, pairs_by_loop(x, rows, keys, size, window, sinks))
    torch.testing.assert_close(out * exists(x)[..., None], want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("num_keys", [None, 0, 1, 29])
def test_a_row_that_hides_itself_takes_its_own_value_only_where_alone(num_keys):
    x = folded(num_keys=num_keys)
    rows, keys = integers(0, 8, 2, 3, 1, 80), integers(0, 8, 2, 3, 1, 40, seed=2)
    if x.padding is not None:
        keys = keys.masked_fill(~x.padding[:, :, None], 8)
    out = bucket_attention(x, rows, keys, size=3, window=1, hide_own=True)
    seen = pairs_by_loop(x, rows, keys, 3, 1)
    own = (torch.arange(80) // 2)[:, None] == torch.arange(40)
    others = seen & ~own
    alone = ~others.any(-1, keepdim=True)
    assert alone[1].any()
    assert not alone[1].all()
    want, _ = dense(x.q, x.k, x.v, torch.where(alone, seen & own, others))
    torch.testing.assert_close(out * exists(x)[..., None], want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("hide_own", [False, True])
def test_a_sequence_of_padding_gives_zeros(hide_own):
    """Its rows and keys share the label of what does not exist, and see nothing all the same."""
    x = folded(num_keys=0)
    rows, keys = integers(0, 4, 2, 3, 1, 80), integers(0, 4, 2, 3, 1, 40, seed=2)
    rows[0], keys[0] = 4, 4
    out = bucket_attention(x, rows, keys, size=3, window=2, hide_own=hide_own)
    assert not out[0].any()
    assert out[1].all()


def test_labels_times_length_may_exceed_32_bits():
    x = folded(length=48, group=1)
    rows, keys = integers(0, 3, 2, 3, 1, 48), integers(0, 3, 2, 3, 1, 48, seed=2)
    spread = 60_000_000  # 2 * spread * 48 > 2^32; it also wraps the order of the buckets
    assert 2 * spread * 48 > 2**32
    far = [(labels * spread).int() for labels in (rows, keys)]
    near = bucket_attention(x, rows, keys, size=4, window=2)
    torch.testing.assert_close(bucket_attention(x, *far, size=4, window=2), near, rtol=0, atol=0)


def test_intervals_hold_the_past_of_the_own_bucket_only():
    rows, keys = integers(0, 3, 1, 1, 1, 60), integers(0, 3, 1, 1, 1, 60, seed=2)
    (this,) = bucket_rounds(rows, keys, size=5, group=1, num_keys=torch.tensor([[60]]))
    before, after = this.first[0, 0], this.last[0, 0]
    for i in range(60):
        held = this.keys[0, 0, before[i] : after[i]].tolist()
        assert held == [j for j in range(i + 1) if keys[0, 0, 0, j] == rows[0, 0, 0, i]][-5:]
    # Rows of one tile read like keys: their intervals never go back.
    order = this.rows[0, 0]
    assert (after[order].diff() >= 0).all()


def test_inverse_and_unit():
    order = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(0)).argsort(-1)
    assert torch.equal(order.gather(-1, inverse(order)), torch.arange(9).expand(2, 3, -1))
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    torch.testing.assert_close(unit(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    unit(x).sum().backward()
    assert x.grad.isfinite().all()


class Given:
    """Labels that were written down beforehand: (B, Hk, R, N) of keys and of rows."""

    nbytes = 24

    def __init__(self, rows, keys, group):
        self._rows, self._keys, self._group, self._at = rows, keys, group, 0

    def keys(self, k):
        self._at += k.shape[2]
        return self._keys[..., self._at - k.shape[2] : self._at]

    def queries(self, q):
        count = q.shape[2] // self._group
        start = (self._at - count) * self._group
        return self._rows[..., start : start + q.shape[2]]


@pytest.mark.parametrize("hide_own", [False, True])
@pytest.mark.parametrize(
    ("size", "window", "sinks"), [(3, 1, 2), (3, 4, 0), (50, 1, 1), (1, 50, 60)]
)
def test_decoding_is_prefill(size, window, sinks, hide_own):
    x = folded()
    rows, keys = integers(0, 3, 2, 3, 2, 80), integers(0, 3, 2, 3, 2, 40, seed=2)
    taken = Inputs(**{**vars(x), "k": unit(x.k)}) if hide_own else x
    call = {"size": size, "window": window, "num_sinks": sinks, "hide_own": hide_own}
    want = bucket_attention(taken, rows, keys, **call)
    q = x.q.unflatten(2, (-1, 2)).transpose(2, 3).flatten(1, 2)
    for prefix in (0, 23):
        state = BucketState(
            INFO,
            x.k[:, :, :prefix],
            x.v[:, :, :prefix],
            Given(rows, keys, 2),
            scale=SCALE,
            enable_gqa=True,
            **call,
        )
        for t in range(prefix, 40):
            state.append(x.k[:, :, t : t + 1], x.v[:, :, t : t + 1])
            out = state.attend(q[:, :, t : t + 1])
            ours = want[:, :, 2 * t : 2 * t + 2]
            torch.testing.assert_close(out.flatten(2), ours.reshape(2, 6, 5), rtol=0, atol=1e-11)
        # Keys and values of 8 + 5 numbers in 8 bytes, two labels of 4 bytes, and what labels keep.
        assert state.nbytes == 2 * 3 * 40 * (13 * 8 + 2 * 4) + 24


def test_an_empty_state_gives_zeros():
    x = folded(length=0)
    labels = Given(*[torch.zeros(2, 3, 1, 0, dtype=torch.int64)] * 2, 2)
    state = BucketState(*(INFO, x.k, x.v, labels), size=2, window=2, scale=None, enable_gqa=True)
    out = state.attend(torch.ones(2, 6, 1, 8, dtype=F64))
    assert out.shape == (2, 6, 1, 5)
    assert not out.any()


def test_the_one_round_of_a_single_bucket_is_plain_causal_attention():
    x = folded(group=1)
    labels = torch.zeros(2, 3, 1, 40, dtype=torch.int64)
    out = bucket_attention(x, labels, labels, size=40, window=1)
    last = torch.arange(1, 41)[None, None]
    want, _ = blocks_attention(
        *(x.q, x.k, x.v), height=8, width=8, scale=SCALE, first=0 * last, last=last
    )
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("size", [3, 8, 20, 100])
def test_reach_is_the_mean_over_the_places_of_a_bucket(size):
    """Forty labels in turn: every bucket has 25 of 1000 keys."""
    places = range(1, 26)
    want = sum(min(t, size) for t in places) / 25
    assert abs(bucket_reach(1000, 40, size) - want) <= 0.5  # of sums for integrals
