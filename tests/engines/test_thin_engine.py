import math

import pytest
import torch

from numattn.core.linalg import draw
from numattn.engines import thin as engine
from numattn.engines.thin import BUCKET, coins_shape, halve, halvings, plan, thin
from numattn.testing import make_qkv

F64 = torch.float64
DRAWS = 1500  # heads with the same keys and values, each with numbers of its own


def coins(heads, num_keys, seed=0):
    source = torch.Generator().manual_seed(seed)
    return draw(coins_shape(heads, num_keys), source, torch.device("cpu"), "uniform")


def many(n, num_keys, seed=0, width=3):
    """One sequence for every draw: k, v (1, DRAWS, n, width) and the numbers."""
    _, k, v = make_qkv(n, batch=1, heads=1, head_dim=width, value_dim=width, seed=seed)
    k, v = (x.expand(-1, DRAWS, -1, -1) for x in (k, v))
    return k, v, coins(DRAWS, num_keys, seed)


def kept(index, exists, n):
    """Whether each of n keys is kept, (draws, n)."""
    there = torch.ones_like(index, dtype=F64) if exists is None else exists.to(F64)
    index = index.masked_fill(there == 0, 0)
    return torch.zeros(*index.shape[:2], n, dtype=F64).scatter_add_(2, index, there)[0]


def within(sample, mean, sigma=4.0):
    """Whether the mean over the first dimension is `mean`, given the spread of the sample.

    Sigma is raised so that among all entries one in ten thousand is further away by chance.
    """
    count = sample[0].numel()
    sigma = math.sqrt(sigma**2 + 2 * math.log(count))
    error = sample.std(0) / len(sample) ** 0.5
    return bool(((sample.mean(0) - mean).abs() <= sigma * error + 1e-12).all())


def kernel(x, y):
    """Products of the feature vectors of points, by the definition."""
    return (x @ x.mT).exp() * (y @ y.mT + 1)


def by_loop(x, y, exists, u, spread):
    """Kernel halving of one bucket with explicit signs."""
    gram = kernel(x, y) * exists[:, None] * exists
    pairs = len(x) // 2
    weights = torch.zeros(len(x), dtype=x.dtype)  # psi
    longest, second = 0.0, []
    for i in range(pairs):
        f = torch.zeros_like(weights)
        f[2 * i], f[2 * i + 1] = 1.0, -1.0
        norm = (f @ gram @ f).clamp(min=0).sqrt().item()
        longest = max(longest, norm)
        bound = (2 * u[1 + i].item() - 1) * spread * norm * longest
        turned = bound <= (weights @ gram @ f).item()
        weights += -f if turned else f
        second.append(int(turned) ^ int(u[0].item() < 0.5))
    return torch.tensor(second)


@pytest.mark.parametrize("spread", [7.0, 0.3, 0.0])
def test_halve_is_the_plain_loop(spread):
    source = torch.Generator().manual_seed(1)
    x, y = (0.8 * torch.randn(12, 24, 3, generator=source, dtype=F64) for _ in range(2))
    exists = torch.ones(12, 24, dtype=torch.bool)
    exists[4:8, 17:] = False  # one pair of a key and nothing
    exists[8:] = torch.rand(4, 24, generator=source) < 0.6
    for g, j in ((1, 0), (1, 2), (2, 8)):  # pairs of equal keys
        x[g, j + 1], y[g, j + 1] = x[g, j], y[g, j]
    x, y = x * exists[..., None], y * exists[..., None]
    u = torch.rand(12, 13, generator=source, dtype=F64)
    out = halve(x, y, exists, u, spread)
    for g in range(12):
        want = by_loop(x[g], y[g], exists[g], u[g], spread)
        real = exists[g].view(12, 2).any(1)  # what is chosen of nothing does not matter
        assert torch.equal(out[g][real], want[real])
    assert torch.equal(halve(x[:4], y[:4], None, u[:4], spread), out[:4])


def test_halve_in_parts_is_halve(monkeypatch):
    x, y = torch.randn(9, 16, 3, dtype=F64), torch.randn(9, 16, 2, dtype=F64)
    u = torch.rand(9, 9, dtype=F64)
    whole = halve(x, y, None, u, 5.0)
    monkeypatch.setattr(engine, "tile_elements", lambda device: 2 * 16 * 16)
    assert torch.equal(halve(x, y, None, u, 5.0), whole)


def test_operator_is_sound():
    x, y = torch.randn(3, 8, 3), torch.randn(3, 8, 2)
    exists = torch.rand(3, 8) < 0.7
    torch.library.opcheck(engine._halve_op, (x, y, exists, torch.rand(3, 5), 4.0))


def test_choices_do_not_vanish_beside_a_key_of_large_norm():
    """With one shift for all, e^(-300) would be zero in float32, and so would all products."""
    source = torch.Generator().manual_seed(2)
    x = torch.randn(200, 32, 4, generator=source, dtype=F64)
    x[:, -1] = 0.0
    x[:, -1, 0] = 25.0  # norm e^(312) in feature space, in the last pair
    y = torch.rand(200, 32, 2, generator=source, dtype=F64) / 2
    u = torch.rand(200, 17, generator=source, dtype=F64)
    high = halve(x, y, None, u, 1.0)
    assert torch.equal(halve(x.float(), y.float(), None, u.float(), 1.0), high)
    alone = halve(x[:, :30], y[:, :30], None, u[:, :16], 1.0)
    assert torch.equal(high[:, :15], alone)


def test_points_of_norm_hundreds_overflow_nowhere():
    x = 100 * torch.randn(5, 16, 3)
    x[:, 8:] = x[:, :8]
    x[0] = x[0, :1]
    second = halve(x, torch.zeros(5, 16, 1), None, torch.rand(5, 9), 5.0)
    assert second.shape == (5, 8)
    assert ((second == 0) | (second == 1)).all()


def test_halves_are_more_alike_than_random_ones():
    """Of rank two with equal norms |f|^2 = c, psi stays O(spread c); of random signs it is p c."""
    source = torch.Generator().manual_seed(3)
    angle = 2 * math.pi * torch.rand(60, 512, generator=source, dtype=F64)
    x = torch.zeros(60, 512, 1, dtype=F64)
    y = torch.stack([angle.cos(), angle.sin()], -1)
    u = torch.rand(60, 257, generator=source, dtype=F64)
    spread = 0.5 + math.log(2 * 512 / 0.5)
    second = halve(x, y, None, u, spread)

    def psi(second):
        f = y[:, 0::2] - y[:, 1::2]
        return (f * (1 - 2 * second)[..., None]).sum(1).norm(dim=-1).square()

    random = (torch.rand(60, 256, generator=source) < 0.5).long()
    assert psi(second).median() < psi(random).median() / 4


@pytest.mark.parametrize("delta", [0.5, 0.01])
def test_thin_is_the_plain_loop_in_buckets(delta):
    """128 keys, in two buckets of 64; the 64 that are left, in one."""
    _, k, v = make_qkv(128, batch=2, heads=6, head_dim=2, value_dim=2)
    u = coins(6, 32)
    index, exists, _ = thin(k, v, 32, u, scale=0.3, delta=delta, level=torch.tensor([[0], [5]]))
    assert exists is None
    spread = 0.5 + math.log(2 * 64 / delta)
    there = torch.ones(64, dtype=torch.bool)
    for b, h in ((b, h) for b in range(2) for h in range(6)):
        x = (k[b, h] - k[b, h].mean(0)) * 0.3**0.5
        y = v[b, h] / v[b, h].norm(dim=-1).max()
        left = torch.arange(128)
        for level in ((0, 5)[b], (0, 5)[b] + 1):
            found = []
            for c, some in enumerate(left.split(64)):
                a, step = u[h, level, :, :33]
                second = by_loop(x[some], y[some], there, (a + c * step) % 1, spread)
                found.append(some[torch.arange(0, 64, 2) + second])
            left = torch.cat(found)
        assert torch.equal(index[b, h], left)


@pytest.mark.parametrize("num_keys", [2, 7, 16, 33])
@pytest.mark.parametrize("length", [1, 2, 31, 63, 64, 65, 150, 257])
def test_count_and_order_of_what_is_kept(length, num_keys):
    _, k, v = make_qkv(length)
    index, exists, h = thin(k, v, num_keys, coins(3, num_keys), scale=0.3, delta=0.5)
    n = halvings(length, num_keys)
    assert n == math.ceil(max(math.log2(length / num_keys), 0))
    assert h.item() == n
    assert index.shape[-1] == math.ceil(length / 2**n) <= num_keys
    for row, there in zip(
        index.flatten(0, 1),
        [None] * 6 if exists is None else exists.flatten(0, 1),
        strict=True,
    ):
        found = row if there is None else row[there]
        assert len(found) in (length // 2**n, length // 2**n + 1)
        assert (found.diff() > 0).all()
        assert found[-1] < length
    if length <= num_keys:
        assert torch.equal(index[0, 0], torch.arange(length))


@pytest.mark.parametrize("length", [5, 64, 100, 1000, 5000])
@pytest.mark.parametrize("num_keys", [2, 10, 64, 300])
def test_buckets_double_and_depend_on_no_length(length, num_keys):
    rounds = plan(length, num_keys)
    for left, this in zip(range(len(rounds), 0, -1), rounds, strict=True):
        assert this.full % 2 == 0
        assert this.full >= min(BUCKET, num_keys << left)
        assert this.buckets * this.width >= this.slots
    if rounds:
        assert rounds[-1].buckets == 1
        assert rounds[-1].full == max(2 * num_keys, min(BUCKET, 2 * num_keys))
    longer = plan(8 * length, num_keys)
    same = [a.full == b.full for a, b in zip(rounds[::-1], longer[::-1], strict=False)]
    assert all(same)
    at_most = 8 * num_keys**2 + 2 * BUCKET * length
    for this in rounds:
        assert this.buckets * this.width**2 <= at_most


@pytest.mark.parametrize(("length", "num_keys"), [(150, 16), (77, 10), (200, 2), (257, 64)])
def test_every_key_is_kept_with_probability_two_to_minus_h(length, num_keys):
    k, v, u = many(length, num_keys)
    index, exists, h = thin(k, v, num_keys, u, scale=0.5, delta=0.5)
    chosen = kept(index, exists, length)
    assert chosen.max() == 1
    p = 0.5 ** h.item()
    error = (p * (1 - p) / DRAWS) ** 0.5
    bound = math.sqrt(16 + 2 * math.log(length)) * error
    assert ((chosen.mean(0) - p).abs() < bound).all()


def test_a_stride_to_a_power_of_four_would_leave_keys_out():
    """The authors' code keeps every third of 150 keys, the first 64, before it thins."""
    k, v, u = many(150, 16)
    first = torch.arange(150)[:: 150 // 64][:64]
    index, exists, _ = thin(k[:, :, first], v[:, :, first], 16, u, scale=0.5, delta=0.5)
    assert (kept(first[index], exists, 150).mean(0) == 0).sum() == 150 - 64


@pytest.mark.parametrize("total", [None, 90])
@pytest.mark.parametrize("spread", [None, 0.0])
def test_sums_over_what_is_kept_are_unbiased(total, spread, monkeypatch):
    """Of numerator and denominator, whatever the noise of the choices is."""
    if spread is not None:
        monkeypatch.setattr(engine, "halve", lambda x, y, e, c, _: halve(x, y, e, c, spread))
    n = total or 150
    k, v, u = many(150, 16, seed=1)
    count = None if total is None else torch.tensor([[total]])
    index, exists, h = thin(k, v, 16, u, scale=0.5, delta=0.5, total=count)
    chosen = kept(index, exists, 150)
    assert not chosen[:, n:].any()
    q = make_qkv(6, batch=1, heads=1, head_dim=3)[0][0, 0]
    weights = (0.5 * q @ k[0, 0].T).exp()[:, :n]
    for f in (weights, *(weights * v[0, 0, :n, e] for e in range(3))):
        estimate = chosen[:, :n] @ f.T * 2 ** h.item()
        assert within(estimate, f.sum(1))


def test_errors_of_different_buckets_are_independent():
    """Shared numbers would keep the same places of all buckets."""
    k, v, u = many(256, 16)
    chosen = engine._halve(
        engine._points(k, v, None, 0.5),
        3,
        torch.arange(256).expand(1, DRAWS, -1),
        None,
        engine._coins(u, torch.tensor([0]), plan(256, 16)[0]),
        plan(256, 16)[0],
        0.5,
    )[0]
    there = kept(chosen, None, 256).view(DRAWS, 4, 64)
    for a, b in ((0, 1), (0, 2), (1, 2), (2, 3)):
        assert within(there[:, a] * there[:, b], 0.25)


@pytest.mark.parametrize("level", [0, 3])
def test_halvings_in_succession_are_independent(level):
    """Halving again what was halved, as summaries do: a quarter of the draws keeps each key."""
    k, v, u = many(32, 16)
    first, _, _ = thin(k, v, 16, u, scale=0.5, delta=0.5, level=torch.tensor([[level]]))
    k2, v2 = (x.gather(2, first[..., None].expand(-1, -1, -1, 3)) for x in (k, v))
    k2, v2 = (torch.cat([x, x[:, :, :16]], 2) for x in (k2, v2))
    for later, fair in ((level + 1, True), (level, False)):
        again, _, _ = thin(k2, v2, 16, u, scale=0.5, delta=0.5, level=torch.tensor([[later]]))
        both = kept(first.gather(2, again.clamp(max=15)), again < 16, 32)
        assert within(both, 0.25) == fair


@pytest.mark.parametrize("num_keys", [2, 5, 16, 40])
def test_padding_is_truncation(num_keys):
    lengths = [0, 1, 2, 5, 16, 17, 33, 64, 65, 100, 129, 150]
    _, k, v = make_qkv(150, batch=len(lengths), heads=60, head_dim=2, value_dim=2)
    options = {"scale": 0.2, "delta": 0.5}
    u, total = coins(60, num_keys), torch.tensor(lengths)[:, None]
    index, exists, h = thin(k, v, num_keys, u, total=total, **options)
    assert index.shape[-1] <= num_keys
    for b, n in enumerate(lengths):
        if n == 0:
            assert not exists[b].any()
            continue
        short = (x[b : b + 1, :, :n] for x in (k, v))
        want, there, rounds = thin(*short, num_keys, u, **options)
        assert h[b, 0] == rounds[0, 0]
        assert torch.equal(kept(index[b : b + 1], exists[b : b + 1], n), kept(want, there, n))


def test_a_bucket_in_part_leaves_no_gaps():
    _, k, v = make_qkv(340)
    index, exists, _ = thin(k, v, 90, coins(3, 90), scale=0.3, delta=0.5)
    assert plan(340, 90)[0].buckets * plan(340, 90)[0].width > 340
    assert index.shape[-1] == 85
    assert exists is None
    index, exists, _ = thin(k[:, :, :339], v[:, :, :339], 90, coins(3, 90), scale=0.3, delta=0.5)
    assert index.shape[-1] == 85
    assert exists[..., :84].all()


def test_padding_enters_neither_the_mean_nor_the_largest_value():
    _, k, v = make_qkv(100, batch=1)
    total = torch.tensor([[60]])
    u = coins(3, 8)
    before = thin(k, v, 8, u, scale=0.3, delta=0.5, total=total)
    k[:, :, 60:], v[:, :, 60:] = 1e4, -1e4
    after = thin(k, v, 8, u, scale=0.3, delta=0.5, total=total)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_choices_know_no_shift_of_keys_and_no_unit_of_values():
    k, v = (x[:, :300] for x in many(100, 16)[:2])
    u = coins(300, 16)

    def choices(k, v, scale=0.3, delta=0.5):
        return thin(k, v, 16, u, scale=scale, delta=delta)[0]

    want = choices(k, v)
    assert torch.equal(choices(k + 2.5, 8 * v), want)
    assert torch.equal(choices(2 * k, v, 0.3 / 4), want)
    assert torch.equal(choices(k, v, -0.3), want)
    assert not torch.equal(choices(k, v.flip(2)), want)
    assert not torch.equal(choices(2 * k, v), want)
    assert not torch.equal(choices(k, v, delta=0.01), want)
