"""Slots against their definition, in logarithms and dense."""

import itertools
import math

import pytest
import torch

from numattn.core.partial import Partial
from numattn.engines import slots as engine
from numattn.engines.slots import Quadratic, regularised, slots_attention, slots_partial


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quadratic(slots=6, dim=4, heads=3, batch=1, size=1.0, seed=0):
    return Quadratic(
        size * draw(batch, heads, 2 * dim, slots, seed=seed),
        draw(batch, heads, 1, slots, seed=seed + 1),
        draw(1, heads, 1, dim, seed=seed + 2),
    )


def tokens(length, keys=None, group=1, batch=2, heads=3, dim=4, width=5):
    keys = length if keys is None else keys
    return (
        draw(batch, heads, length * group, dim, seed=10),
        draw(batch, heads, keys, dim, seed=11),
        draw(batch, heads, keys, width, seed=12),
    )


def values(f, x):
    """A quadratic function from its definition."""
    y = (x - f.center)[..., None]
    square, linear = f.form[:, :, None].chunk(2, -2)
    return (square * y * y + linear * y).sum(-2) + f.constant


def dense(q, k, v, a, b, is_causal=False, padding=None, group=1, epsilon=0.0):
    """All pairs in logarithms, epsilon as a token of value 0."""
    la, lb = values(a, q).log_softmax(-1), values(b, k).log_softmax(-1)
    weight = (la[:, :, :, None] + lb[:, :, None]).logsumexp(-1)
    rows, keys = q.shape[2], k.shape[2]
    hidden = torch.zeros(1, 1, rows, keys, dtype=torch.bool)
    if is_causal:
        hidden = hidden | (torch.arange(keys) > torch.arange(rows)[:, None] // group)
    if padding is not None:
        hidden = hidden | ~padding[:, :, None]
    weight = weight.masked_fill(hidden, -torch.inf)
    if epsilon:
        extra = torch.full_like(weight[..., :1], math.log(epsilon))
        weight, v = torch.cat([weight, extra], -1), torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    lse = weight.logsumexp(-1)
    none = lse == -torch.inf
    shares = (weight - lse.masked_fill(none, 0.0)[..., None]).exp()
    return shares @ v, lse


def near(ours, theirs, tolerance=1e-11):
    bound = tolerance * max(1.0, theirs[theirs.isfinite()].abs().max().item())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def masks(length):
    right = torch.ones(2, 1, length, dtype=torch.bool)
    right[0, :, length - length // 3 :] = False
    return {"none": None, "right": right, "left": right.flip(-1)}


@pytest.mark.parametrize("least", ["rounding", "always"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])  # soft to one-hot
@pytest.mark.parametrize("padded", ["none", "right", "left"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_values_and_gradients_are_those_of_the_definition(
    is_causal, padded, scale, least, monkeypatch
):
    if least == "always":  # rows of a chunk are computed in logarithms without need
        monkeypatch.setattr(engine._Tile, "least", 0.7)
    length = 150  # a whole chunk and a short one
    for group, epsilon, shared in itertools.product((1, 2), (0.0, 0.3), (False, True)):
        q, k, v = tokens(length, group=group)
        a = quadratic(size=scale)
        b = a if shared else quadratic(size=scale, batch=2, seed=5)
        leaves = [q, k, v, a.form, a.constant] + ([] if shared else [b.form, b.constant])
        for leaf in leaves:
            leaf.requires_grad_()
        padding = masks(length)[padded]
        call = {"is_causal": is_causal, "padding": padding, "group": group, "epsilon": epsilon}
        out, lse = slots_partial(q, k, v, a, b, **call)
        want, want_lse = dense(q, k, v, a, b, **call)
        # Log-densities as large as |a| are known to |a| eps, and so are weights, relatively.
        tolerance = 1e-12 + 1e-14 * values(a, q).abs().max().item()
        near(out, want, tolerance)
        near(lse, want_lse, tolerance)
        g, h = draw(*out.shape, seed=20), draw(*lse.shape, seed=21)
        some = want_lse > -torch.inf
        ours = torch.autograd.grad((out * g).sum() + (lse * h)[some].sum(), leaves)
        theirs = torch.autograd.grad((want * g).sum() + (want_lse * h)[some].sum(), leaves)
        for found, expected in zip(ours, theirs, strict=True):
            size = expected.abs().max()
            near(found / size, expected / size, tolerance)


def test_rows_whose_keys_are_lost_beside_later_ones():
    """In float32: queries in slot 1, keys in slot 0 at first and then in 1, exp(-400) apart."""
    form = torch.tensor([[0.0, 0.0], [0.0, 800.0]])[None, None]  # slot 1: -400 + 800 x
    a = Quadratic(form, torch.tensor([0.0, -400.0]).view(1, 1, 1, 2), torch.zeros(1, 1, 1, 1))
    k = (torch.arange(50.0) >= 10).float().view(1, 1, 50, 1)
    q, v = torch.ones(1, 1, 50, 1), draw(1, 1, 50, 3).float()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = slots_partial(q, k, v, a, a, is_causal=True)
    first, rest = v[:, :, :10].cumsum(2), v[:, :, 10:].cumsum(2)
    count = torch.arange(1.0, 41.0)[:, None]
    near(out, torch.cat([first / count[:10], rest / count], 2), 1e-6)
    near(lse[0, 0], torch.cat([(2 * count[:10]).log() - 400, count.log()])[:, 0], 1e-6)
    g, h = draw(*out.shape, seed=1).float(), draw(*lse.shape, seed=2).float()
    found = torch.autograd.grad((out * g).sum() + (lse * h).sum(), leaves)
    double = [t.detach().double().requires_grad_() for t in leaves]
    wide = Quadratic(*(t.double() for t in a))
    want, want_lse = dense(*double, wide, wide, is_causal=True)
    expected = torch.autograd.grad((want * g).sum() + (want_lse * h).sum(), double)
    for ours, theirs in zip(found, expected, strict=True):
        near(ours.double(), theirs, 1e-4)  # float32 knows 400 to 3e-5


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_log_denominators_it_is_the_same(is_causal):
    q, k, v = tokens(150)
    a, b = quadratic(), quadratic(seed=5)
    out, _ = slots_partial(q, k, v, a, b, is_causal=is_causal)
    near(slots_attention(q, k, v, a, b, is_causal=is_causal), out)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_lengths_around_a_chunk(length):
    q, k, v = tokens(length, group=2)
    a, b = quadratic(), quadratic(seed=5)
    out, lse = slots_partial(q, k, v, a, b, is_causal=True, group=2)
    want, want_lse = dense(q, k, v, a, b, is_causal=True, group=2)
    near(out, want)
    near(lse, want_lse)


def test_gradients_over_several_chunks_of_a_tile():
    """Tokens that grow, so that slots are given ever larger responsibilities."""
    q, k, v = tokens(450, batch=1, heads=1)
    k = k * torch.linspace(0.1, 2.0, 450)[:, None]
    a = quadratic(heads=1, size=0.3)
    leaves = [t.requires_grad_() for t in (q, k, v, a.form, a.constant)]
    results = []
    for attend in (slots_partial, dense):
        out, lse = attend(q, k, v, a, a, is_causal=True)
        loss = (out * draw(*out.shape, seed=3)).sum() + lse.sin().sum()
        results.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(*results, strict=True):
        near(ours, theirs)


def test_tiles_do_not_matter(monkeypatch):
    """Smallest tiles, whose slots are computed again for backward, or several chunks in a tile."""
    q, k, v = tokens(700, batch=1, heads=2)
    a = quadratic(heads=2, slots=600)
    leaves = [t.requires_grad_() for t in (q, k, v, a.form, a.constant)]
    for is_causal in (False, True):
        found = []
        for elements, stride in ((1, 2), (1 << 22, 1)):
            monkeypatch.setattr(engine, "tile_elements", lambda device, n=elements: n)
            assert engine._Work.of(q, k, v, *a, *a, None, 1, 0.0, True, True).stride == stride
            out, lse = slots_partial(q, k, v, a, a, is_causal=is_causal)
            loss = (out * draw(*out.shape, seed=3)).sum() + lse.sin().sum()
            found.append((out, lse, *torch.autograd.grad(loss, leaves)))
        for small, large in zip(*found, strict=True):
            near(small, large)


@pytest.mark.parametrize("is_causal", [False, True])
def test_slots_that_keys_reach_by_underflow_alone(is_causal):
    """Queries and keys in slots of their own, exp(-400) apart in float32: still the right mean."""
    far = torch.tensor([0.0, -400.0, -900.0])
    a = Quadratic(torch.zeros(1, 1, 2, 3), far.view(1, 1, 1, 3), torch.zeros(1, 1, 1, 1))
    b = a._replace(constant=a.constant.flip(-1))
    q = k = torch.zeros(1, 1, 200, 1)
    v = draw(1, 1, 200, 2).float()
    out, lse = slots_partial(q, k, v, a, b, is_causal=is_causal)
    count = torch.arange(1.0, 201.0)[:, None] if is_causal else torch.tensor([[200.0]])
    mean = v.cumsum(2) / count if is_causal else v.mean(2, keepdim=True).expand_as(v)
    near(out, mean, 1e-6)
    near(lse, (count.log() - 800).flatten().expand(1, 1, 200), 1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_slot_that_is_removed_takes_nothing(is_causal):
    q, k, v = tokens(150)
    a = quadratic()
    constant = a.constant.clone()
    constant[..., 2] = -torch.inf
    rest = [0, 1, 3, 4, 5]
    fewer = Quadratic(a.form[..., rest], a.constant[..., rest], a.center)
    removed = a._replace(constant=constant.requires_grad_())
    out = slots_attention(q, k, v, removed, removed, is_causal=is_causal)
    near(out, slots_attention(q, k, v, fewer, fewer, is_causal=is_causal))
    out.square().sum().backward()
    assert constant.grad.isfinite().all()
    assert not constant.grad[..., 2].any()


def test_what_later_keys_are_leaves_earlier_rows_alone():
    q, k, v = tokens(300)
    a = quadratic()
    before = slots_attention(q, k, v, a, a, is_causal=True)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 200:], v2[:, :, 200:] = 50 * k[:, :, 200:], -3.0
    after = slots_attention(q, k2, v2, a, a, is_causal=True)
    near(after[:, :, :200], before[:, :, :200], 1e-14)


def test_epsilon_is_mass_without_value():
    slots = Partial(draw(1, 1, 3, 2), draw(1, 1, 3).exp(), draw(1, 1, 3, seed=1))
    more = regularised(slots, 0.25)
    total, whole = (s.den * s.shift.exp() for s in (slots, more))
    near(whole, total + 0.25, 1e-14)
    sums, same = (s.num * s.shift.exp()[..., None] for s in (slots, more))
    near(same, sums, 1e-14)
    assert regularised(slots, 0.0) is slots


def test_operators_pass_torchs_own_check():
    q, k, v = tokens(20, batch=1, heads=2)
    a, b = quadratic(heads=2), quadratic(heads=2, seed=5)
    for is_causal in (False, True):
        arguments = (*(t.requires_grad_() for t in (q, k, v)), *a, *b, None, 1, 0.1)
        torch.library.opcheck(
            torch.ops.numattn.slots.default,
            (*arguments, is_causal, True),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
