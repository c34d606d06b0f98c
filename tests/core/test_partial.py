"""The algebra of partials: what merging, scaling and dividing mean."""

import math

import pytest
import torch

from numattn.core.partial import Partial

F64 = torch.float64


def logits_and_values(rows=5, keys=24, width=3, seed=0, size=3.0):
    source = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(rows, keys, generator=source, dtype=F64)
    return logits, torch.randn(keys, width, generator=source, dtype=F64)


def of(logits, value):
    return Partial.from_logits(logits.clone(), value)


def dense(logits, value):
    return logits.softmax(-1) @ value, logits.logsumexp(-1)


def same(a, b, tolerance=1e-12):
    torch.testing.assert_close(a.finalize(), b.finalize(), rtol=tolerance, atol=tolerance)


def signed(weight, value):
    """Weights of either sign, with the mass that tells of cancellation."""
    zero = torch.zeros(weight.shape[:-1], dtype=F64)
    return Partial(weight @ value, weight.sum(-1), zero, weight.abs().sum(-1))


@pytest.mark.parametrize("size", [1.0, 300.0, 1e5])
def test_from_logits_is_softmax(size):
    logits, value = logits_and_values(size=size)
    torch.testing.assert_close(
        of(logits, value).finalize(), dense(logits, value), rtol=1e-12, atol=1e-12
    )


def test_from_lse_inverts_finalize():
    logits, value = logits_and_values()
    logits[2] = -torch.inf
    out, lse = of(logits, value).finalize()
    assert not out[2].any()
    assert lse[2] == -torch.inf
    same(Partial.from_lse(out, lse), of(logits, value))


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_any_partition_of_the_keys_gives_the_whole(size):
    logits, value = logits_and_values(size=size)
    for cuts in ((0, 24), (0, 1, 24), (0, 5, 5, 11, 24), range(25)):
        parts = [
            of(logits[:, a:b], value[a:b]) if a < b else Partial.zeros((5,), 3, value)
            for a, b in zip(cuts, list(cuts)[1:], strict=False)
        ]
        merged = parts[0]
        for part in parts[1:]:
            merged = merged.merge(part)
        torch.testing.assert_close(merged.finalize(), dense(logits, value), rtol=1e-12, atol=1e-12)


def test_merge_is_commutative_and_associative():
    logits, value = logits_and_values(size=30.0)
    a, b, c = (of(logits[:, i : i + 8], value[i : i + 8]) for i in (0, 8, 16))
    for mine, other in ((a.merge(b), b.merge(a)), (a.merge(b).merge(c), a.merge(b.merge(c)))):
        same(mine, other)
        torch.testing.assert_close(mine.shift, other.shift)


def test_zeros_is_the_identity_of_merge():
    logits, value = logits_and_values()
    part, none = of(logits, value), Partial.zeros((5,), 3, value)
    for merged in (part.merge(none), none.merge(part)):
        for name in ("num", "den", "shift"):
            assert torch.equal(getattr(merged, name), getattr(part, name))
    out, lse = none.merge(none).finalize()
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_rows_without_weight_stay_so_through_merge_and_gradients():
    logits, value = logits_and_values()
    logits[1], logits[2, :12], logits[3, 12:] = -torch.inf, -torch.inf, -torch.inf
    leaf = value.clone().requires_grad_()
    merged = of(logits[:, :12], leaf[:12]).merge(of(logits[:, 12:], leaf[12:]))
    out, lse = merged.finalize()
    rest = [0, 2, 3, 4]
    want = dense(logits[rest], value)
    torch.testing.assert_close((out[rest], lse[rest]), want, rtol=1e-12, atol=1e-12)
    assert not out[1].any()
    assert lse[1] == -torch.inf
    out.sum().backward()
    assert leaf.grad.isfinite().all()


def test_scaling_by_a_count_repeats_the_keys():
    logits, value = logits_and_values()
    for count in (1, 2, 7):
        repeated = of(logits.repeat(1, count), value.repeat(count, 1))
        same(of(logits, value).scale(math.log(count)), repeated)
    other = of(*logits_and_values(seed=1))
    three = of(logits, value).scale(torch.full((5,), math.log(3), dtype=F64))
    same(three.merge(other), of(logits.repeat(1, 3), value.repeat(3, 1)).merge(other))


def test_scaling_moves_lse_and_not_out():
    logits, value = logits_and_values()
    weight = torch.linspace(-400, 400, 5, dtype=F64)
    out, lse = of(logits, value).scale(weight).finalize()
    torch.testing.assert_close((out, lse - weight), dense(logits, value), rtol=1e-12, atol=1e-12)


def test_scaling_by_zero_leaves_no_weight():
    """The log of an empty cluster's count."""
    logits, value = logits_and_values()
    other = of(*logits_and_values(seed=1))
    weight = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf, 0.0], dtype=F64)
    part = of(logits, value).scale(weight)
    out, lse = part.finalize()
    assert not out[[1, 3]].any()
    assert (lse[[1, 3]] == -torch.inf).all()
    merged, alone = part.merge(other).finalize(), other.finalize()
    for ours, theirs in zip(merged, alone, strict=True):
        torch.testing.assert_close(ours[[1, 3]], theirs[[1, 3]])


def test_cat_and_stack_join_rows():
    a, b = of(*logits_and_values(rows=2)), of(*logits_and_values(rows=2, seed=1))
    marked = signed(torch.tensor([[1.0, -2.0]], dtype=F64), torch.ones(2, 3, dtype=F64))
    joined = Partial.cat([a, b, marked], 0)
    for part, rows in ((a, slice(0, 2)), (b, slice(2, 4)), (marked, slice(4, 5))):
        for name in ("num", "den", "shift"):
            assert torch.equal(getattr(joined, name)[rows], getattr(part, name))
    assert torch.equal(joined.mass, torch.cat([a.den, b.den, marked.mass]))
    stacked = Partial.stack([a, b], 0)
    assert stacked.num.shape == (2, 2, 3)
    assert stacked.mass is None
    assert torch.equal(stacked.shift[1], b.shift)


# --- gradients ------------------------------------------------------------------------------


def test_gradients_of_merge_scale_and_from_lse():
    """Through the pair (out, lse), scaled by a learned weight and merged, down to the logits."""
    logits, value = logits_and_values(rows=3, keys=6)
    weight = torch.tensor([0.3, -1.0, 2.0], dtype=F64)

    def ours(logits, value, weight):
        first = Partial.from_lse(*dense(logits[:, :2], value[:2])).scale(weight)
        rest = Partial.from_logits(logits[:, 2:].clone(), value[2:])
        return first.merge(rest).finalize()

    def theirs(logits, value, weight):
        raised = torch.cat([logits[:, :2] + weight[:, None], logits[:, 2:]], -1)
        return dense(raised, value)

    leaves = [x.requires_grad_() for x in (logits, value, weight)]
    assert torch.autograd.gradcheck(ours, leaves)
    for a, b in zip(ours(*leaves), theirs(*leaves), strict=True):
        mine, other = (
            torch.autograd.grad(
                x.square().sum(),
                leaves,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for x in (a, b)
        )
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_gradient_of_lse_survives_a_row_without_weight():
    lse = torch.tensor([0.5, -torch.inf], dtype=F64, requires_grad=True)
    out = torch.ones(2, 3, dtype=F64, requires_grad=True)
    other = of(*logits_and_values(rows=2))
    merged, _ = Partial.from_lse(out, lse).merge(other).finalize()
    merged.sum().backward()
    assert lse.grad.isfinite().all()
    assert lse.grad[1] == 0
    assert not out.grad[1].any()


# --- weights of either sign -----------------------------------------------------------------


def test_signed_weights_divide_as_they_are():
    """No clamp: a negative denominator gives the quotient, and has no logarithm."""
    weight = torch.tensor([[1.0, -3.0], [2.0, -1.0]], dtype=F64)
    value = torch.tensor([[1.0], [5.0]], dtype=F64)
    out, lse = signed(weight, value).finalize()
    assert out.flatten().tolist() == [7.0, -3.0]
    assert lse[0].isnan()
    assert lse[1] == 0.0
    assert torch.equal(signed(weight, value).out(), out)


def test_cancelled_reports_rows_that_are_rounding_noise():
    rows = ([1.0, -1.0], [1.0, 1e-15 - 1], [1.0, 1e-9 - 1], [1.0, -0.9], [-1.0, 0.5], [0.0, 0.0])
    weight, value = torch.tensor(rows, dtype=F64), torch.ones(2, 3, dtype=F64)
    part = signed(weight, value)
    assert part.cancelled().tolist() == [True, True, False, False, True, False]
    assert part.cancelled(0.1).tolist() == [True, True, True, True, True, False]
    single = Partial(*(x.float() for x in (part.num, part.den, part.shift, part.mass)))
    assert single.cancelled().tolist() == [True, True, True, False, True, False]
    assert not of(*logits_and_values()).cancelled().any()


def test_mass_is_carried_through_merge_and_scale():
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 10, generator=source, dtype=F64)
    value = torch.randn(10, 3, generator=source, dtype=F64)
    whole = signed(weight, value)
    merged = signed(weight[:, :4], value[:4]).merge(signed(weight[:, 4:], value[4:]))
    torch.testing.assert_close(merged.mass, whole.mass)
    torch.testing.assert_close(merged.out(), whole.out())
    logits = torch.randn(5, 2, generator=source, dtype=F64)
    positive = of(logits, value[:2])
    for both in (whole.merge(positive), positive.merge(whole)):
        torch.testing.assert_close(
            both.mass * both.shift.exp(), weight.abs().sum(-1) + logits.exp().sum(-1)
        )
    scaled = whole.scale(2.0)
    torch.testing.assert_close(scaled.mass * scaled.shift.exp(), math.exp(2) * whole.mass)
