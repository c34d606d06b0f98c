from itertools import permutations

import pytest
import torch

from numattn.core.cost import count_flops
from numattn.engines.pivots import gaussian_pivots, pivot_flops


def points(length=40, dim=3, batch=2, heads=3, spread=0.8):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, length, dim)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def numbers(n, heads=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((heads, n, 2), generator=generator, dtype=torch.float64)


def kernel(x):
    return torch.exp(-torch.cdist(x, x).square() / 2)


def residual(k, pivots):
    """Of a kernel matrix (M, M), given pivots."""
    s = [p for p in pivots if p >= 0]
    if not s:
        return k.diagonal()
    d = k.diagonal() - (k[:, s] * torch.linalg.solve(k[s][:, s], k[s]).T).sum(1)
    d[s] = 0.0
    return d.clamp(min=0)


def probability(k, weight, order):
    """Of drawing these pivots in this order, one after the other."""
    p, chosen = 1.0, []
    for i in order:
        w = residual(k, chosen) * weight
        p *= (w[i] / w.sum()).item()
        chosen.append(i)
    return p


@pytest.mark.parametrize("block", [1, 2, 6])
def test_the_law_is_the_sequential_one(block):
    """Pearson's statistic over all ordered triples of five points; each head is a trial."""
    trials = 20000
    x = points(5, 2, 1, 1, spread=0.6)
    log_weight = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    drawn = gaussian_pivots(
        x.expand(-1, trials, -1, -1),
        3,
        numbers(12, trials),
        log_weight=log_weight.expand(1, trials, -1),
        block=block,
    )[0]
    code = (drawn * torch.tensor([25, 5, 1])).sum(-1)
    statistic, orders = 0.0, list(permutations(range(5), 3))
    for order in orders:
        expected = trials * probability(kernel(x[0, 0]), log_weight.exp(), order)
        seen = (code == 25 * order[0] + 5 * order[1] + order[2]).sum().item()
        statistic += (seen - expected) ** 2 / expected
    freedom = len(orders) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("greedy", [False, True])
def test_one_at_a_time_is_the_definition(greedy):
    x, u = points(), numbers(0 if greedy else 10)
    log_weight = points(dim=1)[..., 0]
    out = gaussian_pivots(x, 10, u, log_weight=log_weight, block=1)
    for b in range(2):
        for h in range(3):
            k, chosen = kernel(x[b, h]), []
            for t in range(10):
                w = residual(k, chosen) * log_weight[b, h].exp()
                reach = w.cumsum(0) / w.sum()
                at = w.argmax() if greedy else torch.searchsorted(reach, u[h, t, 0], right=True)
                chosen.append(at.item())
            assert out[b, h].tolist() == chosen


def test_the_heaviest_points_follow_when_numbers_are_used_up():
    x = points()
    out = gaussian_pivots(x, 10, numbers(5), block=1)
    assert torch.equal(out[..., :5], gaussian_pivots(x, 5, numbers(5), block=1))
    for t in range(5, 10):
        d = residual(kernel(x[1, 2]), out[1, 2, :t].tolist())
        assert out[1, 2, t] == d.argmax()


def test_the_residual_is_that_of_the_sequential_choice():
    """Means over 400 heads, within four standard errors."""
    x = points(60, 3, 1, 1).expand(-1, 400, -1, -1)
    k = kernel(x[0, 0])
    traces = []
    for block in (1, 16):
        drawn = gaussian_pivots(x, 12, numbers(48, 400, seed=block), block=block)[0]
        traces.append(torch.stack([residual(k, p).sum() for p in drawn.tolist()]))
    one, many = traces
    error = (one.var() / 400 + many.var() / 400).sqrt()
    assert (one.mean() - many.mean()).abs() < 4 * error


def test_no_more_numbers_are_used_than_documented():
    x = points(200, 2, spread=0.3)  # smooth: most proposals of a block are rejected
    u = numbers(100)
    other = u.clone()
    other[:, 16 + 2 * 20 :] = 0.5
    first, second = (gaussian_pivots(x, 20, t, block=16) for t in (u, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("n", [0, 64])
def test_duplicates_give_as_many_pivots_as_there_are_points(n):
    x = 30 * points(5).repeat(1, 1, 4, 1) / 7
    out = gaussian_pivots(x, 16, numbers(n))
    assert (out[..., :5] >= 0).all()
    assert (out[..., 5:] == -1).all()
    assert torch.equal((out[..., :5] % 5).sort(-1).values, torch.arange(5).expand(2, 3, 5))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_rounding_is_never_accepted(length):
    """Acceptance numbers of zero take everything that has a residual at all."""
    u = numbers(64)
    u[..., 1] = 0.0
    out = gaussian_pivots(points(length).repeat(1, 1, 4, 1), 16, u)
    assert (out[..., :length] >= 0).all()
    assert (out[..., length:] == -1).all()


def test_stops_at_the_numerical_rank():
    """The trace left over is at least the next eigenvalue."""
    x = torch.linspace(0, 2, 64, dtype=torch.float64)[None, None, :, None]
    out = gaussian_pivots(x, 40, numbers(160, 1))[0, 0]
    count = int((out >= 0).sum())
    assert count < 40
    assert (out[:count] >= 0).all()
    assert (out[count:] == -1).all()
    assert out[:count].unique().numel() == count
    left = 64 * 64 * torch.finfo(torch.float64).eps * (1 + 4)
    values = torch.linalg.eigvalsh(kernel(x[0, 0])).flip(0)
    assert values[count] <= left


def test_equal_points_give_one_pivot():
    out = gaussian_pivots(points(1).expand(-1, -1, 16, -1), 4, numbers(16))
    assert (out[..., 0] >= 0).all()
    assert (out[..., 1:] == -1).all()


def test_fewer_points_than_pivots():
    out = gaussian_pivots(points(5), 8, numbers(32))
    assert torch.equal(out.sort(-1).values[..., 3:], torch.arange(5).expand(2, 3, 5))
    assert (out[..., 5:] == -1).all()


@pytest.mark.parametrize("side", ["padding", "log_weight"])
def test_points_that_do_not_exist_are_never_chosen(side):
    x = points(40)
    exists = torch.ones(2, 1, 40, dtype=torch.bool)
    exists[0, 0, ::3] = False
    exists[1] = False
    garbage = torch.where(exists[..., None], x, 1e4)
    options = {"padding": exists}
    if side == "log_weight":
        removed = torch.zeros(2, 3, 40).masked_fill(~exists, -torch.inf)
        options = {"log_weight": removed}
    out = gaussian_pivots(garbage, 30, numbers(120), **options)
    kept = exists[0, 0].nonzero()[:, 0]
    short = gaussian_pivots(x[:1, :, kept], 30, numbers(120))[0]
    assert torch.equal(out[0], torch.where(short < 0, -1, kept[short.clamp(min=0)]))
    assert (out[1] == -1).all()


def test_entries_do_not_depend_on_each_other():
    x = points()
    x[1] *= 0.05  # reaches its numerical rank early
    x[:, 2] *= 100
    u = numbers(60)
    both = gaussian_pivots(x, 15, u)
    for b in range(2):
        for h in range(3):
            alone = gaussian_pivots(x[b : b + 1, h : h + 1], 15, u[h : h + 1])
            assert torch.equal(both[b, h], alone[0, 0])


def test_weights_of_any_size():
    """Points whose weights underflow next to the largest come after it."""
    x = points(10, spread=5.0)
    log_weight = -2000.0 * torch.arange(10).double().expand(2, 3, -1)
    out = gaussian_pivots(x, 10, numbers(40), log_weight=log_weight)
    assert torch.equal(out, torch.arange(10).expand(2, 3, -1))


def test_half_precision_points_are_computed_in_double():
    x = points().to(torch.bfloat16)
    u = numbers(40)
    assert torch.equal(gaussian_pivots(x, 10, u), gaussian_pivots(x.double(), 10, u))


def test_tiles_are_joined(monkeypatch):
    x, u = points(500), numbers(80)
    want = gaussian_pivots(x, 20, u)
    monkeypatch.setattr("numattn.engines.pivots.tile_elements", lambda device: 1)
    assert torch.equal(gaussian_pivots(x, 20, u), want)


def test_counted_operations():
    counted = count_flops(lambda: gaussian_pivots(points(), 10, numbers(40)))
    assert counted == pivot_flops(6, 40, 3, 10) == 6 * 40 * 10 * (2 * 3 + 10)


def test_the_operator_is_registered_in_full():
    x = points().flatten(0, 1)
    exists = torch.ones(6, 40, dtype=torch.bool)
    arguments = (x, exists, torch.zeros(6, 40).double(), numbers(40, 6), 10, 8)
    torch.library.opcheck(torch.ops.numattn.gaussian_pivots.default, arguments)
