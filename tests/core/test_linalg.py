"""Linear algebra against torch's own, loops and moments."""

import math
from itertools import pairwise

import pytest
import torch

from numattn.core import linalg
from numattn.core.linalg import (
    draw,
    exp_,
    exp_columns,
    exp_matmul,
    input_generator,
    masked_mean,
    orthogonal_gaussian,
    pinv,
    segment_means,
)

F64 = torch.float64
CPU = torch.device("cpu")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed), dtype=F64)


# --- draws ----------------------------------------------------------------------------------


def test_draw_is_float64_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    a, b = draw((3, 4), seeded(), CPU), draw((3, 4), seeded(), CPU)
    assert a.dtype == F64
    assert torch.equal(a, b)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("rows", [3, 8, 19])
def test_directions_are_orthogonal_in_blocks(rows):
    x = orthogonal_gaussian(rows, 8, 2, seeded(), CPU)
    assert x.shape == (2, rows, 8)
    assert x.dtype == F64
    for start in range(0, rows, 8):
        block = x[:, start : start + 8]
        unit = block / block.norm(dim=-1, keepdim=True)
        eye = torch.eye(block.shape[1], dtype=F64).expand(2, -1, -1)
        torch.testing.assert_close(unit @ unit.mT, eye, rtol=0, atol=1e-12)


def test_every_row_has_the_moments_of_a_gaussian():
    """Entries of mean 0, square 1 and fourth power 3; a length of sqrt(d) would give 3 d/(d+2)."""
    dim, trials = 4, 40_000
    x = orthogonal_gaussian(dim, dim, trials, seeded(), CPU)
    error = 4 / math.sqrt(trials)
    assert (x.mean(0).abs() < error).all()
    assert ((x.square().mean(0) - 1).abs() < error * math.sqrt(2)).all()  # var x^2 = 2
    assert ((x.pow(4).mean(0) - 3).abs() < error * math.sqrt(96)).all()  # var x^4 = 105 - 9


def test_lengths_are_those_of_gaussian_vectors_and_independent():
    dim, trials = 4, 40_000
    square = orthogonal_gaussian(dim, dim, trials, seeded(1), CPU).square().sum(-1)
    error = 4 / math.sqrt(trials)
    assert ((square.mean(0) - dim).abs() < error * math.sqrt(2 * dim)).all()
    # fourth central moment of chi-squared: 12 d^2 + 48 d; its variance squared: 4 d^2
    spread = math.sqrt(8 * dim**2 + 48 * dim)
    assert ((square.var(0) - 2 * dim).abs() < error * spread).all()
    correlation = torch.corrcoef(square.mT) - torch.eye(dim, dtype=F64)
    assert (correlation.abs() < error).all()


def test_directions_are_haar():
    """E tr(Q) = 0 and E tr(Q)^2 = 1 for Haar Q; LAPACK's own signs bias the diagonal."""
    dim, trials = 4, 40_000
    x = orthogonal_gaussian(dim, dim, trials, seeded(2), CPU)
    q = x / x.norm(dim=-1, keepdim=True)
    error = 4 / math.sqrt(trials)
    trace = q.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert trace.mean().abs() < error
    assert (trace.square().mean() - 1).abs() < error * math.sqrt(2)  # E tr^4 = 3 for d >= 4
    assert (q.mean(0).abs() < error / math.sqrt(dim)).all()
    assert torch.linalg.det(q).mean().abs() < error  # both orientations alike


# --- pinv -----------------------------------------------------------------------------------


def of_rank(rank, size=9, batch=3, seed=0):
    return normal(batch, size, rank, seed=seed) @ normal(batch, rank, size, seed=seed + 1)


@pytest.mark.parametrize("rank", [9, 8, 3, 1])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_pinv_is_torchs(dtype, rank):
    a = of_rank(rank).to(dtype)
    ours = pinv(a)
    assert ours.dtype == dtype
    # Rounded to float32, a matrix of low rank keeps it to m eps only: invert what was given.
    rtol = 9 * torch.finfo(dtype).eps
    want = torch.linalg.pinv(a.double(), rtol=rtol)
    kept = torch.linalg.svdvals(a.double())
    assert ((kept > rtol * kept[:, :1]).sum(-1) == rank).all()
    condition = kept[:, 0] / kept[:, rank - 1]
    error = (ours.double() - want).norm(dim=(-2, -1)) / want.norm(dim=(-2, -1))
    assert (error < 9 * torch.finfo(dtype).eps * condition.clamp(min=10)).all()


def test_pinv_in_float32_keeps_what_float32_resolves():
    """Singular values down to 1e-5 of the largest; squaring in float32 would lose those."""
    left, right = (torch.linalg.qr(normal(6, 6, seed=i))[0] for i in (0, 1))
    a = ((left * torch.logspace(0, -5, 6, dtype=F64)) @ right).float()
    want = torch.linalg.inv(a.double())
    assert (pinv(a).double() - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_pinv_of_zero_is_zero(dtype):
    assert not pinv(torch.zeros(2, 4, 4, dtype=dtype)).any()


@pytest.mark.parametrize("rank", [5, 2])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_pinv_satisfies_the_penrose_equations(dtype, rank):
    a = of_rank(rank, size=5).to(dtype)
    x = pinv(a)
    loose = 1e-10 if dtype == F64 else 1e-3
    for left, right in (
        (a @ x @ a, a),
        (x @ a @ x, x),
        ((a @ x).mT, a @ x),
        ((x @ a).mT, x @ a),
    ):
        assert (left - right).norm() <= loose * max(1.0, right.norm().item())


def test_gradients_of_pinv():
    full = of_rank(5, size=5, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(pinv, full)
    # float32: against float64 on the same numbers, where singular values are well apart
    eye = torch.eye(5) + 0.1 * normal(5, 5).float()
    low, high = eye.clone().requires_grad_(), eye.double().requires_grad_()
    weight = normal(5, 5, seed=4)
    (pinv(low) * weight.float()).sum().backward()
    (torch.linalg.inv(high) * weight).sum().backward()
    torch.testing.assert_close(low.grad.double(), high.grad, rtol=1e-4, atol=1e-4)


# --- segment means --------------------------------------------------------------------------


def by_loop(x, num_segments, padding):
    batch, heads, length, dim = x.shape
    means = torch.zeros(batch, heads, num_segments, dim, dtype=x.dtype)
    counts = torch.zeros(batch, num_segments, dtype=x.dtype)
    for b in range(batch):
        real = [t for t in range(length) if padding is None or padding[b, 0, t]]
        for s in range(num_segments):
            own = [t for i, t in enumerate(real) if i * num_segments // len(real) == s]
            counts[b, s] = len(own)
            if own:
                means[b, :, s] = torch.stack([x[b, :, t] for t in own]).mean(0)
    return means, counts


@pytest.mark.parametrize("num_segments", [1, 4, 7, 11, 30])
@pytest.mark.parametrize("kind", ["none", "right", "left", "holes"])
def test_segment_means_are_those_of_a_loop(kind, num_segments):
    x = normal(2, 3, 11, 4)
    position = torch.arange(11)
    padding = {
        "none": None,
        "right": torch.stack([position < 11, position < 6]),
        "left": torch.stack([position >= 0, position >= 7]),
        "holes": torch.stack([position % 3 > 0, position % 2 > 0]),
    }[kind]
    padding = None if padding is None else padding[:, None]
    means, counts = segment_means(x, num_segments, padding)
    want, number = by_loop(x, num_segments, padding)
    torch.testing.assert_close(means, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(counts[:, 0].expand(2, -1), number)
    full = number[number > 0]
    assert full.max() - number.min() <= 1 or num_segments > 11 or kind != "none"


def test_segments_are_equal_in_size_and_padding_changes_nothing():
    x = normal(1, 2, 10, 4)
    _, counts = segment_means(x, 4, None)
    assert counts.max() - counts.min() == 1
    assert counts.sum() == 10
    padded = torch.cat([1e3 + normal(1, 2, 5, 4), x], 2)
    padding = (torch.arange(15) >= 5)[None, None]
    torch.testing.assert_close(
        segment_means(padded, 4, padding), segment_means(x, 4, None), rtol=0, atol=1e-12
    )


def test_segments_of_nothing_are_zero():
    means, counts = segment_means(normal(1, 2, 5, 4), 3, torch.zeros(1, 1, 5, dtype=torch.bool))
    assert not means.any()
    assert not counts.any()


def test_gradient_of_segment_means():
    padding = torch.tensor([[[True, False, True, True, True]]])
    x = normal(1, 1, 5, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: segment_means(x, 3, padding)[0], x)


def test_masked_mean_is_the_mean_of_what_exists():
    x = normal(2, 3, 6, 4)
    padding = torch.tensor([[[1, 1, 0, 1, 0, 0]], [[0] * 6]], dtype=torch.bool)
    mean = masked_mean(x, padding)
    torch.testing.assert_close(mean[0, :, 0], x[0, :, [0, 1, 3]].mean(1))
    assert not mean[1].any()
    torch.testing.assert_close(masked_mean(x, None), x.mean(2, keepdim=True))


# --- products in log space ------------------------------------------------------------------


def dense(a, b):
    terms = a[..., :, None, :] + b[..., None, :, :]
    nothing = (terms == -torch.inf).all(-1)  # of which logsumexp has no gradient
    return terms.masked_fill(nothing[..., None], 0.0).logsumexp(-1).masked_fill(nothing, -torch.inf)


def operands(kind, dtype=F64):
    a, b = normal(2, 3, 7, 5), normal(2, 3, 6, 5, seed=1)
    if kind == "wide":
        a, b = 1000 * a, 1000 * b
    elif kind == "far apart":  # the largest term of a row and of a column lie elsewhere
        a[..., 0] += 1e4
        b[..., 1] += 1e4
    elif kind == "large":
        a, b = a + 1e5, b - 3e4
    elif kind == "some zero":
        a[0, 0, 2] = b[1, 2, 3] = -torch.inf
        a[1, :, :, 1] = -torch.inf
        a[0, 1, 1, :3] = b[0, 1, 1, 3:] = -torch.inf  # every product of the two is zero
        b[0, 1, 1, 3:] = -torch.inf
        a[0, 1, 1, 3:], b[0, 1, 1, :3] = 0.5, 0.5
    return a.to(dtype), b.to(dtype)


KINDS = ("plain", "wide", "far apart", "large", "some zero")
NEEDED = torch.ones(7, 6, dtype=torch.bool).tril(1)
NO_FLOOR = torch.full((2, 3, 7), -torch.inf, dtype=F64)


def relative(a, b):
    """The definition, e^(sum in logs), relative to the largest needed entry of each row."""
    logs = dense(a, b).masked_fill(~NEEDED, -torch.inf)
    top = logs.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    return (logs - top).exp(), top


def ours(a, b, top, needed=NEEDED):
    weights, shift = exp_matmul(a, b, needed, NO_FLOOR.to(a.dtype))
    return weights * (shift[..., None] - top).exp()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_exp_matmul_is_exact_relative_to_each_row(dtype, kind):
    a, b = operands(kind, dtype)
    want, top = relative(a.double(), b.double())
    out = ours(a, b, top)
    # Logarithms of this size are rounded a few times each before they are exponents.
    size = max(x[x > -torch.inf].abs().max().item() for x in (a, b))
    bound = torch.finfo(dtype).eps * (10 + 8 * size)
    assert (out - want).abs().max() < bound


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_exp_matmul(kind):
    a, b = operands(kind)
    weight = normal(2, 3, 7, 6, seed=2)
    top = relative(a, b)[1]
    found = []
    for form in (lambda a, b: ours(a, b, top), lambda a, b: relative(a, b)[0]):
        leaves = [x.clone().requires_grad_() for x in (a, b)]
        found.append(torch.autograd.grad((form(*leaves) * weight).sum(), leaves))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs.nan_to_num(0.0), rtol=1e-9, atol=1e-9)


def test_gradcheck_of_exp_matmul():
    needed = torch.ones(4, 3, dtype=torch.bool).tril()
    floor = torch.full((2, 4), -torch.inf, dtype=F64)
    a, b = normal(2, 4, 5).requires_grad_(), normal(2, 3, 5, seed=1).requires_grad_()
    shift = exp_matmul(a, b, needed, floor)[1]

    def call(a, b):
        weights, moved = exp_matmul(a, b, needed, floor)
        return weights * (moved - shift).exp()[..., None]

    # The shift is a constant to autograd but moves with a and b: hold it still in the difference.
    analytic = torch.autograd.grad(call(a, b).sum(), (a, b))
    held = torch.autograd.functional.jacobian(
        lambda a, b: (dense(a, b) - shift[..., None]).exp()[..., needed].sum(), (a, b)
    )
    torch.testing.assert_close(analytic, held)


def test_entries_not_needed_are_zero_and_take_no_gradient():
    a, b = (x.requires_grad_() for x in operands("plain"))
    weights, shift = exp_matmul(a, b, NEEDED, NO_FLOOR)
    assert not weights[..., ~NEEDED].any()
    assert not shift.requires_grad
    weights.sum().backward()
    mine = a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    (dense(a, b) - shift[..., None]).exp()[..., NEEDED].sum().backward()
    torch.testing.assert_close(mine, (a.grad, b.grad), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_row_does_not_depend_on_what_it_does_not_need(dtype):
    """However large that is: what a later token may hold cannot leak through a shared shift."""
    a, b = operands("plain", dtype)
    want, top = relative(a.double(), b.double())
    for factor in (1.0, 500.0, 1e4):
        b2 = b.clone()
        b2[..., 5, :] += factor  # needed by rows 4, 5 and 6 only
        out = ours(a, b2, top)[..., :4, :]
        bound = torch.finfo(dtype).eps * (100 + 8 * factor)  # the rounding of logs of this size
        assert (out - want[..., :4, :]).abs().max() < bound


def test_what_lies_below_the_floor_may_be_dropped_and_nothing_else():
    a, b = operands("far apart", torch.float32)
    exact = dense(a.double(), b.double())
    floor = exact.amax(-1) + 30
    weights, shift = exp_matmul(a, b, NEEDED, floor.float())
    error = weights * (shift[..., None] - floor[..., None]).exp()
    error = error - (exact - floor[..., None]).exp().masked_fill(~NEEDED, 0.0)
    assert weights.isfinite().all()
    assert (error.abs() <= torch.finfo(torch.float32).eps * (10 + 8e4) * 1e-13).all()


@pytest.mark.parametrize("kind", ["plain", "far apart"])
def test_opcheck_of_exp_matmul(kind):
    a, b = (x[0].detach().requires_grad_() for x in operands(kind))
    given = (a, b, *exp_columns(b.detach()), NEEDED, NO_FLOOR[0])
    torch.library.opcheck(torch.ops.numattn.exp_matmul.default, given)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_inputs_share_no_number_with_draws_of_the_same_seed(seed):
    inputs = torch.randn(4096, generator=input_generator(seed), dtype=F64)
    drawn = draw((4096,), torch.Generator().manual_seed(seed), CPU)
    assert not torch.isin(inputs, drawn).any()
    assert torch.equal(inputs, torch.randn(4096, generator=input_generator(seed), dtype=F64))


def test_exp_in_place():
    x = torch.tensor([0.0, 1.0, -3.5, -200.0, -torch.inf], dtype=F64)
    want = x.exp()
    torch.testing.assert_close(exp_(x), want, rtol=1e-13, atol=0)
    assert torch.equal(x[::4], torch.tensor([1.0, 0.0], dtype=F64))


def tokens(n, batch=2, heads=3, dim=4, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, n, dim, generator=source, dtype=torch.float64)


def test_take_and_group_means_by_loops():
    x = tokens(9)
    index = torch.randint(0, 9, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    label = torch.randint(0, 5, (2, 3, 9), generator=torch.Generator().manual_seed(2))
    taken, (means, counts) = linalg.take(x, index), linalg.group_means(x, label, 4)
    for b in range(2):
        for h in range(3):
            assert torch.equal(taken[b, h], x[b, h, index[b, h]])
            for c in range(4):  # label 4 is left out
                member = x[b, h, label[b, h] == c]
                assert counts[b, h, c] == len(member)
                want = member.mean(0) if len(member) else torch.zeros(4, dtype=x.dtype)
                torch.testing.assert_close(means[b, h, c], want)
    shared = index[:1, :1]
    assert torch.equal(linalg.take(x, shared)[1, 2], x[1, 2, shared[0, 0]])


def test_nearest_is_the_nearest():
    x, centers = tokens(50), tokens(7, seed=1)
    label, distance = linalg.nearest(x, centers)
    every = torch.cdist(x, centers).square()
    assert torch.equal(label, every.argmin(-1))
    torch.testing.assert_close(distance, every.amin(-1))


def test_kmeans_lowers_its_objective_and_ends_in_a_partition():
    x = tokens(200)

    def objective(label):
        means, _ = linalg.group_means(x, label, 8)
        return (x - linalg.take(means, label)).square().sum()

    values = [objective(linalg.kmeans(x, 8, n)) for n in (1, 2, 4, 8, 16)]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(values))
    label = linalg.kmeans(x, 8, 50)
    means, counts = linalg.group_means(x, label, 8)
    assert (counts > 0).all()
    assert torch.equal(label, linalg.nearest(x, means)[0])  # a fixed point


def test_kmeans_finds_separated_clusters():
    centers = 100 * tokens(5, seed=3)
    member = torch.arange(60) % 5
    x = centers[:, :, member] + tokens(60, seed=4)
    label = linalg.kmeans(x, 5, 20)
    assert torch.equal(label[:, :, :5].sort(-1).values, torch.arange(5).expand(2, 3, 5))
    assert torch.equal(label, label[:, :, :5].repeat(1, 1, 12))


@pytest.mark.parametrize(("offset", "spread"), [(0.0, 500.0), (1e4, 3.0)])
def test_kmeans_in_single_precision(offset, spread):
    """Squared distances that float16 cannot hold, and a common part that float32 cannot square."""
    centers = spread * tokens(5, seed=3)
    x = offset + centers[:, :, torch.arange(60) % 5] + spread / 50 * tokens(60, seed=4)
    label = linalg.kmeans(x.float(), 5, 20)
    assert torch.equal(label, label[:, :, :5].repeat(1, 1, 12))
    assert torch.equal(label[:, :, :5].sort(-1).values, torch.arange(5).expand(2, 3, 5))


@pytest.mark.parametrize("side", ["left", "right"])
def test_kmeans_takes_padding_for_truncation(side):
    x = tokens(30)
    keep = slice(11, 30) if side == "left" else slice(0, 19)
    padding = torch.zeros(2, 1, 30, dtype=torch.bool)
    padding[:, :, keep] = True
    label = linalg.kmeans(torch.where(padding[..., None], x, 1e6), 4, 5, padding)
    assert torch.equal(label[:, :, keep], linalg.kmeans(x[:, :, keep], 4, 5))
    assert (label.masked_fill(padding, 4) == 4).all()


def test_kmeans_with_fewer_tokens_than_clusters():
    x = tokens(3)
    label = linalg.kmeans(x, 8, 3)
    assert all(len(set(row.tolist())) == 3 for row in label.flatten(0, 1))
    same = linalg.kmeans(x[:, :, :1].expand(-1, -1, 10, -1), 4, 3)
    assert (same == same[..., :1]).all()
    none = torch.zeros(1, 1, 3, dtype=torch.bool)
    assert (linalg.kmeans(x, 2, 3, none) == 2).all()


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_best_logits_are_the_truncated_svd(rank):
    source = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 8, generator=source, dtype=F64) for n in (30, 40))
    energies, a, b = linalg.best_logits(q.mT @ q, k.mT @ k)
    u, s, vt = torch.linalg.svd(q @ k.mT)
    want = (u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :]
    got = (q @ a[..., :rank]) @ (k @ b[..., :rank]).mT
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    ratio = energies / s[..., :8].square()
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio), rtol=1e-8, atol=0.0)


def test_tokens_that_do_not_exist_are_zero():
    x = torch.ones(2, 1, 3, 2)
    padding = torch.tensor([[[True, False, True]]])
    out = linalg.existing(x, padding)
    assert out.dtype == F64
    assert torch.equal(out[..., 0], padding.expand(2, 1, 3).double())
