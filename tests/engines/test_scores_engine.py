"""Group statistics against loops, and what they say of logits against the logits themselves."""

import math

import pytest
import torch

from numattn.engines.scores import (
    Groups,
    group_scores,
    group_statistics,
    log_bennett,
    logit_variance,
)

B, H, N, D, C = 2, 3, 60, 5, 9
SCALES = [0.7, -0.4]


def make(seed=0, n=N, d=D, num=C, empty=True):
    """Keys far from the origin, and labels that leave one group empty and some keys out."""
    source = torch.Generator().manual_seed(seed)
    k = torch.randn(B, H, n, d, generator=source, dtype=torch.float64)
    k = k * torch.rand(B, H, n, 1, generator=source, dtype=torch.float64) * 2 + 3
    label = torch.randint(0, num + 1, (B, H, n), generator=source)
    if empty:
        label[label == 4] = 5
    q = torch.randn(B, H, 11, d, generator=source, dtype=torch.float64)
    return q, k, label


def members(k, label, num=C):
    """(index of the group, its keys) for every group that is not empty."""
    for b in range(B):
        for h in range(H):
            for c in range(num):
                group = k[b, h][label[b, h] == c]
                if len(group):
                    yield (b, h, c), group


def logits_of(q, k, label, scale, num=C):
    for (b, h, c), group in members(k, label, num):
        yield (b, h, slice(None), c), scale * q[b, h] @ group.T


def test_statistics_are_those_of_the_members():
    _, k, label = make()
    g = group_statistics(k, label, C, box=True, ball=True, num_axes=2)
    counts = torch.zeros(B, H, C, dtype=torch.float64)
    for at, group in members(k, label):
        counts[at] = len(group)
        centred = group - group.mean(0)
        torch.testing.assert_close(g.mean[at], group.mean(0))
        torch.testing.assert_close(g.low[at], group.min(0).values)
        torch.testing.assert_close(g.high[at], group.max(0).values)
        torch.testing.assert_close(g.radius[at], centred.norm(dim=1).max())
        torch.testing.assert_close(g.variance[at], (centred @ g.axes[at].T).square().mean(0))
        whole = g.variance[at].sum() + g.rest[at]
        torch.testing.assert_close(whole, centred.square().sum(1).mean())
    assert torch.equal(g.count, counts)
    assert (counts == 0).any()
    empty = counts == 0
    for x in (g.mean, g.low, g.high, g.radius, g.axes, g.variance, g.rest):
        assert not x[empty].any()


def test_axes_are_orthonormal():
    _, k, label = make(n=200)
    g = group_statistics(k, label, C, num_axes=3)
    large = g.count > 3
    gram = (g.axes @ g.axes.mT)[large]
    torch.testing.assert_close(gram, torch.eye(3, dtype=gram.dtype).expand_as(gram))


def test_along_an_axis_the_variance_of_a_logit_is_that_of_the_axis():
    _, k, label = make(n=200)
    g = group_statistics(k, label, C, num_axes=D)
    assert g.rest.abs().max() < 1e-12
    for c in range(C):
        found = logit_variance(0.7 * g.axes[:, :, c], g)[..., c]
        torch.testing.assert_close(found, 0.7**2 * g.variance[:, :, c])


@pytest.mark.parametrize("size", [2, 3, 7])
def test_finds_the_line_that_keys_lie_on(size):
    """Also for two keys, which lie equally far on both sides of their mean."""
    source = torch.Generator().manual_seed(size)
    line = torch.randn(4, 1, D, generator=source, dtype=torch.float64)
    line = line / line.norm(dim=-1, keepdim=True)
    k = torch.randn(4, size, 1, generator=source, dtype=torch.float64) * line + 2
    label = torch.arange(4).repeat_interleave(size)[None, None]
    g = group_statistics(k.view(1, 1, -1, D), label, 4, num_axes=1)
    alignment = (g.axes[0, 0] * line).sum(-1).abs()
    torch.testing.assert_close(alignment, torch.ones_like(alignment))
    assert g.rest.abs().max() < 1e-12


@pytest.mark.parametrize("scale", SCALES)
def test_box_and_ball_bound_the_greatest_logit(scale):
    q, k, label = make()
    s = group_scores(q, group_statistics(k, label, C, box=True, ball=True), scale)
    for at, logits in logits_of(q, k, label, scale):
        most = logits.max(1).values
        assert (s.box[at] >= most - 1e-12).all()
        assert (s.ball[at] >= most - 1e-12).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("seed", range(3))
def test_jensen_and_bennett_enclose_the_sum(scale, seed):
    q, k, label = make(seed)
    g = group_statistics(k, label, C, box=True, ball=True, num_axes=1)
    s = group_scores(q, g, scale)
    mean = s.centroid - g.count.log()[..., None, :]
    reach = torch.minimum(s.box, s.ball) - mean
    for at, logits in logits_of(q, k, label, scale):
        true = logits.logsumexp(1)
        variance = logits.var(1, correction=0)
        assert (s.centroid[at] <= true + 1e-12).all()
        assert (s.centroid[at] + log_bennett(variance, reach[at]) >= true - 1e-9).all()
        assert (s.cumulant[at] >= s.centroid[at] - 1e-12).all()


def test_the_cumulant_is_half_the_variance_where_the_bound_allows():
    q, k, label = make()
    g = group_statistics(k, label, C, ball=True, num_axes=2)
    s = group_scores(0.05 * q, g, 1.0)  # small logits: Bennett's bound is the larger
    want = s.centroid + logit_variance(0.05 * q, g) / 2
    some = g.count > 2
    close = (s.cumulant - want).abs().amax(2)[some]
    assert (close < 1e-12).any()
    assert (s.cumulant <= want + 1e-12).all()


def test_the_cumulant_is_exact_for_gaussian_groups():
    """log E e^x = variance / 2; the sample of n keys is off by a few standard errors."""
    n, source = 40_000, torch.Generator().manual_seed(0)
    spread = torch.tensor([1.5, 0.2, 0.2, 0.2], dtype=torch.float64)  # one axis, the rest alike
    k = torch.randn(1, 1, n, 4, generator=source, dtype=torch.float64) * spread + 1
    q = torch.randn(1, 1, 20, 4, generator=source, dtype=torch.float64) * 0.5
    g = group_statistics(k, torch.zeros(1, 1, n, dtype=torch.long), 1, ball=True, num_axes=1)
    s = group_scores(q, g, 1.0)
    true = (q @ k.mT).logsumexp(-1, keepdim=True)
    variance = (q * spread).square().sum(-1, keepdim=True)
    error = 4 * ((variance.expm1() / n).sqrt() + variance / (2 * n) ** 0.5)
    error = error + variance * 4 * (2 / n) ** 0.5  # axis and variances are of the sample, too
    assert ((s.cumulant - true).abs() <= error).all()
    assert ((true - s.centroid) > error).any(), "the variance matters in this test"


@pytest.mark.parametrize("scale", SCALES)
def test_groups_of_one_key_give_its_logit(scale):
    q, k, _ = make()
    label = torch.arange(N).expand(B, H, N)
    g = group_statistics(k, label, N, box=True, ball=True, num_axes=1)
    s = group_scores(q, g, scale)
    for found in (s.centroid, s.box, s.ball, s.cumulant):
        torch.testing.assert_close(found, scale * q @ k.mT)


def test_empty_groups_have_no_score():
    q, k, label = make()
    g = group_statistics(k, label, C, box=True, ball=True, num_axes=1)
    s = group_scores(q, g, 1.0)
    for found in (s.centroid, s.box, s.ball, s.cumulant):
        assert (found[..., 4] == -torch.inf).all()


def test_only_what_was_asked_for():
    q, k, label = make()
    g = group_statistics(k, label, C)
    assert g == Groups(g.count, g.mean)
    s = group_scores(q, g, 1.0)
    assert s.box is None
    assert s.ball is None
    assert s.cumulant is None
    with pytest.raises(ValueError, match="axes"):
        logit_variance(q, g)


def test_bennett_is_attained_by_two_values():
    """x = b with probability v / (v + b^2), else -v / b: mean zero, variance v."""
    v, b = torch.meshgrid(
        torch.tensor([1e-4, 0.1, 1.0, 9.0]), torch.tensor([1e-3, 0.5, 3.0, 40.0]), indexing="ij"
    )
    v, b = v.double(), b.double()
    p = v / (v + b**2)
    want = torch.logaddexp(p.log() + b, (1 - p).log() - v / b)
    torch.testing.assert_close(log_bennett(v, b), want)


def test_bennett_at_its_ends():
    zero = torch.zeros(2, dtype=torch.float32)
    far = torch.tensor([1.0, 500.0])
    assert torch.equal(log_bennett(zero, zero), zero)
    assert log_bennett(zero, far)[0].abs() < 1e-6
    assert log_bennett(zero, far).isfinite().all()


def test_statistics_do_not_cancel_in_single_precision():
    """The spread of keys that lie a thousand times farther from the origin."""
    source = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 64, 4, generator=source, dtype=torch.float64)
    label = (torch.arange(64) // 16)[None, None]
    near = group_statistics(k, label, 4, ball=True, num_axes=1)
    moved = group_statistics((k + 1000).float(), label, 4, ball=True, num_axes=1)
    exact = group_statistics((k + 1000).float().double(), label, 4, ball=True, num_axes=1)
    for name in ("radius", "variance", "rest"):
        a, b = getattr(moved, name).double(), getattr(exact, name)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(b, getattr(near, name), rtol=1e-3, atol=1e-3)


def test_gradients_are_finite_where_nothing_is_spread():
    _, k, _ = make()
    k = torch.cat([k, k[:, :, :1].expand(-1, -1, 4, -1)], 2).requires_grad_()
    label = torch.cat([torch.arange(N), torch.full((4,), N)]).expand(B, H, N + 4)
    q = torch.randn(B, H, 3, D, dtype=torch.float64, requires_grad=True)
    g = group_statistics(k, label, N + 1, ball=True, num_axes=1)
    group_scores(q, g, 1.0).cumulant.sum().backward()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


def test_variances_have_the_gradient_of_a_fixed_axis():
    k = torch.randn(1, 1, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    label = torch.tensor([0, 0, 0, 1, 1, 1])[None, None]
    k.requires_grad_()
    g = group_statistics(k, label, 2, num_axes=1)
    (grad,) = torch.autograd.grad(g.variance.sum(), k)
    centred = k - g.mean.repeat_interleave(3, 2)
    axis = g.axes[:, :, :, 0].repeat_interleave(3, 2)
    want = 2 / 3 * (centred * axis).sum(-1, keepdim=True) * axis
    torch.testing.assert_close(grad, want.detach())
    assert math.isfinite(g.rest.sum().item())


def test_counts_are_exact_beyond_the_integers_of_half_precision():
    """301 is no bfloat16 number, and a mass is off by as much as its count."""
    k = torch.randn(1, 1, 400, 3, generator=torch.Generator().manual_seed(0))
    label = (torch.arange(400) >= 301).long()[None, None]
    assert group_statistics(k, label, 2).count.tolist() == [[[301.0, 99.0]]]
