"""LSH attention against the definition by loops, and against what is known of its hash."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import Unsupported, padding_mask
from numattn.core.inputs import prepare
from numattn.engines.buckets import union_attention
from numattn.sparse import lsh
from numattn.sparse.lsh import LSH, LSHAttention, lsh_attention
from numattn.testing import make_qkv, reference

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def bucket(x, r):
    """The definition: argmax [x R, -x R]; without a column there is one bucket."""
    return 0 if not r.shape[1] else torch.cat([x @ r, -x @ r]).argmax().item()


def lifted(k, j, seen):
    """k' of key j, by the mean and K of the first `seen` keys, or of all when `seen` is None."""
    if seen is None:
        centred = k - k.mean(0)
        x, peak = centred[j], centred.norm(dim=1).max()
    else:
        steps = [k[n] - k[: n + 1].mean(0) for n in range(seen)]
        x, peak = steps[j], max(step.norm() for step in steps)
    if peak == 0:
        return torch.zeros(k.shape[1] + 1, dtype=F64)
    x = x / peak
    return torch.cat([x, (1 - x @ x).clamp(min=0).sqrt()[None]])


def buckets_by_loop(q, k, r, shared, is_causal):
    """Buckets of queries and of keys of one head in one round."""
    if shared:
        return [bucket(x, r) for x in q], [bucket(x, r) for x in k]
    zero = torch.zeros(1, dtype=F64)
    hq = [bucket(torch.cat([x / x.norm(), zero]), r) for x in q]
    hk = [bucket(lifted(k, j, j + 1 if is_causal else None), r) for j in range(len(k))]
    return hq, hk


def pairs_by_loop(q, k, projection, size, window, sinks, shared, is_causal):
    """Which keys every query of one head sees: bool (Nq, Nk)."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for r in projection:
        hq, hk = buckets_by_loop(q, k, r, shared, is_causal)
        order = sorted(range(len(k)), key=lambda j: (hk[j], j))
        for h in sorted(set(hq)):
            members = [i for i in range(len(q)) if hq[i] == h]
            start, count = sum(b < h for b in hk), hk.count(h)
            for t, i in enumerate(members):
                if is_causal:
                    alike = [j for j in range(i + 1) if hk[j] == h]
                    seen[i, alike[-size:]] = True
                    seen[i, max(i + 1 - window, 0) : i + 1] = True
                    seen[i, : min(sinks, i + 1)] = True
                    continue
                slot = start + math.floor(Fraction(2 * t + 1, 2 * len(members)) * count)
                chunk = min(slot, len(k) - 1) // size
                seen[i, order[max(chunk - 1, 0) * size : (chunk + 1) * size]] = True
    return seen


def by_loop(q, k, v, projection, *, size, window=64, sinks=4, shared=False, is_causal=False):
    """The whole method, one query head at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            key = k[b, h // group]
            key = key / key.norm(dim=1, keepdim=True) if shared else key
            seen = pairs_by_loop(
                q[b, h], key, projection[h // group], size, window, sinks, shared, is_causal
            )
            if shared:
                others = seen & ~torch.eye(len(key), dtype=torch.bool)
                seen = torch.where(others.any(-1, keepdim=True), others, seen)
            logits = (q[b, h] @ key.T * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
            out[b, h] = logits.softmax(-1) @ v[b, h // group]
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("length", "size", "rounds", "num_buckets", "window", "sinks"),
    [
        (37, 4, 3, 4, 3, 2),
        (30, 7, 2, 16, 1, 0),
        (41, 5, 2, 1, 2, 1),
        (9, 1, 1, 2, 1, 4),
        (20, 40, 2, 4, 5, 50),
    ],
)
def test_equals_the_definition(length, size, rounds, num_buckets, window, sinks, shared, is_causal):
    q, k, v = make_qkv(length, heads=2, group=2, head_dim=3, seed=length)
    projection = draw(2, rounds, 3 if shared else 4, num_buckets // 2)
    out = lsh_attention(
        *(q, k, v),
        bucket_size=size,
        num_rounds=rounds,
        num_buckets=num_buckets,
        shared_qk=shared,
        window=window,
        num_sinks=sinks,
        projection=projection,
        is_causal=is_causal,
        enable_gqa=True,
    )
    want = by_loop(
        *(q, k, v, projection),
        size=size,
        window=window,
        sinks=sinks,
        shared=shared,
        is_causal=is_causal,
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("queries", "keys"), [(50, 20), (20, 50), (1, 30), (30, 1)])
def test_other_lengths_equal_the_definition(queries, keys):
    q, k, v = make_qkv(queries, keys=keys, group=2)
    method = LSH(bucket_size=4, num_rounds=2, num_buckets=8)
    (projection,) = method.fit(q, k, enable_gqa=True).values()
    out = method(q, k, v, projection=projection, enable_gqa=True)
    want = by_loop(q, k, v, projection, size=4)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_enters_no_hash(side, shared, is_causal):
    q, k, v = make_qkv(30, heads=2, group=2)
    mask = padding_mask(torch.tensor([19, 30]), side=side)
    gone = ~mask[:, 0, 0, :, None].expand(-1, -1, 8)
    q, k = (torch.where(gone[:, None], 1e3, x) for x in (q, k))
    keep = slice(11, 30) if side == "left" else slice(0, 19)
    method = LSH(bucket_size=3, num_rounds=2, num_buckets=6, window=2, shared_qk=shared)
    (projection,) = method.fit(q, k, enable_gqa=True).values()
    call = {"projection": projection, "is_causal": is_causal, "enable_gqa": True}
    out = method(q, k, v, attn_mask=mask, **call)
    want = method(*(x[:1, :, keep] for x in (q, k, v)), **call)
    torch.testing.assert_close(out[:1, :, keep], want, rtol=0, atol=1e-11)
    if not is_causal and not shared:
        mixed = method(q[:, :, :7], k, v, attn_mask=mask, **call)
        want = method(q[:1, :, :7], k[:1, :, keep], v[:1, :, keep], **call)
        torch.testing.assert_close(mixed[:1], want, rtol=0, atol=1e-11)


def test_rounds_are_joined_by_their_mass_and_not_averaged():
    """Two rounds hold unequal mass: the mean of their outputs is another answer."""
    q, k, v = make_qkv(64, batch=1, heads=1)
    both = draw(1, 2, 9, 8)
    options = {"bucket_size": 4, "num_buckets": 16}
    joined = lsh_attention(q, k, v, num_rounds=2, projection=both, **options)
    alone = [
        lsh_attention(q, k, v, num_rounds=1, projection=both[:, r : r + 1], **options)
        for r in range(2)
    ]
    torch.testing.assert_close(joined, by_loop(q, k, v, both, size=4), rtol=0, atol=1e-10)
    assert (joined - sum(alone) / 2).abs().max() > 0.1
    same = both[:, :1].expand(-1, 2, -1, -1)
    again = lsh_attention(q, k, v, num_rounds=2, projection=same, **options)
    torch.testing.assert_close(again, alone[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [5, 64, 65])
def test_the_mass_of_one_chunk_is_counted_once(length):
    """No look-back where there is nothing before: else the normaliser is off by log 2."""
    q, k, v = make_qkv(length, heads=2)
    x = prepare(lsh.INFO, q, k, v, None, False, None, False)
    rows, keys = lsh._labels(x, draw(2, 3, 9, 4), 8, False)
    rounds = lsh._chunk_rounds(x, rows, keys, 65, 8)
    _, lse = union_attention(x.q, x.k, x.v, rounds, scale=x.scale)
    want = (q @ k.mT * x.scale).logsumexp(-1)
    torch.testing.assert_close(lse, want, rtol=0, atol=1e-11)


def collisions(angle, half, draws, seed):
    """Share of draws in which two vectors at this angle fall into one bucket."""
    pair = torch.zeros(2, 6, dtype=F64)
    pair[0, 0] = 1
    pair[1, 0], pair[1, 1] = math.cos(angle), math.sin(angle)
    labels = lsh._hash(pair[None, None], draw(1, draws, 6, half, seed=seed))
    return (labels[..., 0] == labels[..., 1]).double().mean().item()


def test_two_buckets_collide_as_random_hyperplanes_do():
    """With one column the hash is a sign: it agrees with probability 1 - angle / pi."""
    draws = 20_000
    for n, angle in enumerate((0.0, 0.4, 1.2, 2.0, 3.0, math.pi)):
        p = 1 - angle / math.pi
        sigma = math.sqrt(p * (1 - p) / draws)
        assert abs(collisions(angle, 1, draws, seed=n) - p) <= 4 * sigma + 1e-12


def test_collisions_fall_with_the_angle():
    draws = 20_000
    shares = [collisions(a, 8, draws, seed=3) for a in (0.0, 0.3, 0.6, 1.0, 1.5, 2.2, math.pi)]
    assert shares[0] == 1
    assert shares[-1] == 0  # opposite vectors never share a bucket
    assert all(a > b for a, b in pairwise(shares))
    # At a right angle the products with R are independent, and so are the 16 buckets.
    right = collisions(math.pi / 2, 8, draws, seed=4)
    assert abs(right - 1 / 16) <= 4 * math.sqrt(15 / 256 / draws)


def test_more_buckets_collide_less():
    assert collisions(0.7, 2, 5000, 0) > collisions(0.7, 8, 5000, 0) > collisions(0.7, 32, 5000, 0)


def test_a_key_of_large_product_is_met_more_often():
    """The lifted hash is one for products: of keys alike in angle, the longer one wins."""
    hits = torch.zeros(2)
    for seed in range(40):
        q = torch.nn.functional.normalize(draw(1, 1, 1, 8, seed=seed), dim=-1)
        k = draw(1, 1, 200, 8, seed=1000 + seed) / 3
        k[:, :, 0], k[:, :, 1] = 2.5 * q[:, :, 0], 0.3 * q[:, :, 0]
        x = prepare(lsh.INFO, q, k, k, None, False, None, False)
        rows, keys = lsh._labels(x, draw(1, 50, 9, 4, seed=seed), 8, False)
        hits += (rows == keys[..., :2]).float().mean((0, 1, 2))
    assert hits[0] > hits[1]


def test_a_chunk_that_holds_everything_is_equivariant():
    """Elsewhere the order of positions decides ties within a bucket, and where chunks end."""
    q, k, v = make_qkv(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for shared in (False, True):
        method = LSH(bucket_size=40, shared_qk=shared)
        (projection,) = method.fit(q, k).values()
        out = method(q, k, v, projection=projection)
        moved = method(*(x[:, :, order] for x in (q, k, v)), projection=projection)
        torch.testing.assert_close(moved, out[:, :, order], rtol=0, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_shared_keys_at_full_budget(is_causal):
    """Dense attention to directions, oneself only where there is nothing else."""
    q, _, v = make_qkv(24)
    method = LSH(bucket_size=24, num_buckets=1, shared_qk=True)
    out = method(q, q, v, is_causal=is_causal)
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT * 8**-0.5
    # The paper's large finite penalty on itself, far enough above the mask of the future.
    logits = logits - 5e4 * torch.eye(24, dtype=F64)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(out, logits.softmax(-1) @ v, rtol=0, atol=1e-11)


def test_a_token_without_company_takes_its_own_value():
    q, _, v = make_qkv(30)
    out = lsh_attention(q, q, v, shared_qk=True, window=1, is_causal=True)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    one = lsh_attention(q[:, :, :1], q[:, :, :1], v[:, :, :1], shared_qk=True)
    torch.testing.assert_close(one, v[:, :, :1])


def test_a_later_key_changes_no_earlier_bucket():
    _, k, _ = make_qkv(50)
    projection = draw(3, 2, 9, 8)
    whole = lsh.Hashes(projection, k, 1.0, False).keys(k)
    longer = torch.cat([k, 1e4 * k], 2)
    assert torch.equal(lsh.Hashes(projection, k, 1.0, False).keys(longer)[..., :50], whole)
    pieces = lsh.Hashes(projection, k, 1.0, False)
    parts = [pieces.keys(part) for part in k.split([1, 0, 20, 29], 2)]
    assert torch.equal(torch.cat(parts, -1), whole)


@pytest.mark.parametrize("shared", [False, True])
def test_decoding_is_prefill_where_buckets_overflow(shared):
    length = 300
    q, k, v = make_qkv(length, batch=1, heads=2, group=1 if shared else 2, head_dim=4)
    k = q if shared else k
    method = LSH(bucket_size=5, num_buckets=4, num_rounds=3, window=3, shared_qk=shared)
    (projection,) = method.fit(q, k, enable_gqa=True).values()
    call = {"enable_gqa": True, "projection": projection}
    want = method(q, k, v, is_causal=True, **call)
    state = method.state(k[:, :, :40], v[:, :, :40], **call)
    for t in range(40, length):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=0, atol=1e-10)


def test_a_negative_scale_turns_queries_round():
    q, k, v = make_qkv(60)
    method = LSH(bucket_size=4, num_buckets=8)
    (projection,) = method.fit(q, k).values()
    for is_causal in (False, True):
        call = {"projection": projection, "is_causal": is_causal}
        torch.testing.assert_close(
            method(q, k, v, scale=-0.3, **call), method(-q, k, v, scale=0.3, **call)
        )


def test_gradients_flow_through_the_pairs_that_are_seen():
    q, k, v = make_qkv(9, batch=1, heads=1, head_dim=2, value_dim=1)
    for shared in (False, True):
        method = LSH(bucket_size=2, num_buckets=4, num_rounds=2, window=2, shared_qk=shared)
        (projection,) = method.fit(q, k).values()
        for is_causal in (False, True):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            assert torch.autograd.gradcheck(
                lambda *x, m=method, p=projection, c=is_causal: m(*x, projection=p, is_causal=c),
                inputs,
            )


@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_is_linear(is_causal, monkeypatch):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            found = [x.numel() for x in (out if isinstance(out, (tuple, list)) else [out])]
            self.numel = max(self.numel, *found)
            return out

    monkeypatch.setattr(lsh, "tile_elements", lambda device: 1 << 10)
    length = 1000
    q, k, v = (x.requires_grad_() for x in make_qkv(length, batch=1, heads=1, head_dim=4))
    with Largest() as largest:
        lsh_attention(q, k, v, bucket_size=8, num_rounds=2, is_causal=is_causal).sum().backward()
    assert largest.numel <= 20 * length  # far below 64 buckets, or keys, per token


def test_the_module_draws_once_and_can_draw_again():
    q, k, v = make_qkv(30)
    module = LSHAttention(
        num_heads=3, head_dim=8, bucket_size=4, generator=torch.Generator().manual_seed(1)
    ).double()
    assert module.projection.shape == (3, 4, 9, 32)
    before = module(q, k, v)
    assert torch.equal(before, module(q, k, v))
    direct = lsh_attention(q, k, v, bucket_size=4, projection=module.projection)
    assert torch.equal(before, direct)
    module.redraw()
    assert not torch.equal(before, module(q, k, v))
    shared = LSH(shared_qk=True, num_buckets=2).module(num_heads=3, head_dim=8)
    assert shared.projection.shape == (3, 4, 8, 1)


def test_shared_keys_have_no_exact_options():
    assert LSH(shared_qk=True).exact_at(10) is None
    assert LSH().exact_at(10) == LSH(bucket_size=10, num_buckets=1)
    q, k, v = make_qkv(33)
    out = LSH(num_buckets=16, window=33)(q, k, v, is_causal=True)
    torch.testing.assert_close(out, reference(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_size": 0}, "bucket_size must be a positive integer"),
        ({"num_rounds": 1.5}, "num_rounds must be a positive integer"),
        ({"num_buckets": 7}, "num_buckets must be even, or 1; got 7"),
        ({"num_buckets": 0}, "num_buckets must be a positive integer"),
        ({"window": 0}, "window must be a positive integer"),
        ({"shared_qk": 1}, "shared_qk must be True or False; got 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    q, k, v = make_qkv(4)
    for call in (lambda: LSH(**options), lambda: lsh_attention(q, k, v, **options)):
        with pytest.raises(ValueError, match=f"lsh: {message}"):
            call()


def test_what_does_not_fit_is_refused():
    q, k, v = make_qkv(6, keys=9)
    with pytest.raises(Unsupported, match="shared_qk=True needs a key for every query"):
        lsh_attention(q, k, v, shared_qk=True)
    for call in (lsh_attention, lambda *x, **t: LSH().state(*x[1:], **t)):
        with pytest.raises(ValueError, match=r"projection must have shape \(3, 4, 9, 32\)"):
            call(q, k, v, projection=torch.zeros(3, 4, 8, 32))
    with pytest.raises(TypeError, match="centroids"):
        LSH().state(k, v, centroids=k)
