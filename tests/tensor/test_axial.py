"""Axial attention against loops over tokens and lines."""

import itertools
import math

import pytest
import torch

from numattn import exact_attention
from numattn.core.cost import count_flops
from numattn.engines.softmax import ROWS
from numattn.tensor.axial import axial_attention, axial_cost
from numattn.testing.inputs import TOLERANCE

FORMS = ("criss-cross", "sequential")
GRIDS = ((7,), (1, 5), (3, 5), (5, 1, 3), (3, 2, 4))


def normal(*shape, seed=0):
    source = torch.Generator().manual_seed(2000 + seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def make_grid(sizes, *, batch=2, heads=2, group=1, dtype=torch.float64):
    q = normal(batch, heads * group, *sizes, 8)
    k, v = normal(batch, heads, *sizes, 8, seed=1), normal(batch, heads, *sizes, 5, seed=2)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def lengths_mask(lengths, size):
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def differs(i, j):
    """The axes in which two tokens differ."""
    return [m for m, (a, b) in enumerate(zip(i, j, strict=True)) if a != b]


def allowed(i, j, axes, causal):
    """Whether token i may attend to token j, which is on a line through it along one of `axes`."""
    if len(differs(i, j)) > 1 or not set(differs(i, j)) <= set(axes):
        return False
    if causal == "raster":
        return j <= i  # tuples are in the order of rows
    return causal is None or j[causal] <= i[causal]


def softmax_rows(q, k, scale, seen):
    """One head: softmax over the pairs of tokens that `seen` allows, (N, N); tokens are tuples."""
    tokens = list(itertools.product(*(range(n) for n in q.shape[:-1])))
    rows = []
    for i in tokens:
        logits = [scale * q[i] @ k[j] if seen(i, j) else q.new_tensor(-torch.inf) for j in tokens]
        logits = torch.stack(logits)
        rows.append(logits.softmax(0) if logits.isfinite().any() else torch.zeros_like(logits))
    return torch.stack(rows)


def head_weights(q, k, form, axes, causal, exists, scale):
    axes = range(q.dim() - 1) if axes is None else axes
    if form == "criss-cross":
        return softmax_rows(q, k, scale, lambda i, j: exists[j] and allowed(i, j, axes, causal))
    out = torch.eye(math.prod(q.shape[:-1]), dtype=q.dtype)
    for axis in axes:
        own = softmax_rows(
            q, k, scale, lambda i, j, m=axis: exists[j] and allowed(i, j, [m], causal)
        )
        out = own @ out
    return out


def by_definition(q, k, v, *, form="criss-cross", axes=None, causal_axis=None, exists=None):
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    if exists is None:
        exists = torch.ones(len(q), *q.shape[2:-1], dtype=torch.bool)
    rows = [
        head_weights(q[b, h], k[b, h // group], form, axes, causal_axis, exists[b], scale)
        @ v[b, h // group].flatten(0, -2)
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[1]))
    ]
    return torch.stack(rows).reshape(*q.shape[:-1], v.shape[-1])


# --- the definition -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal_axis", [None, 0, "raster"])
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_it_is_the_loop_over_tokens_with_its_gradients(sizes, causal_axis, form):
    ours, theirs = (
        [x.clone().requires_grad_() for x in make_grid(sizes, batch=1, group=2)] for _ in range(2)
    )
    call = {"form": form, "causal_axis": causal_axis}
    out = axial_attention(*ours, enable_gqa=True, **call)
    want = by_definition(*theirs, **call)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    weight = normal(*out.shape, seed=3)
    (out * weight).sum().backward()
    (want * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axes", [(0,), (2, 0), (1, 2)])
def test_axes_are_those_that_are_asked_for_in_their_order(axes, form):
    q, k, v = make_grid((3, 2, 4), batch=1, heads=1)
    out = axial_attention(q, k, v, axes=axes, form=form, causal_axis=1)
    want = by_definition(q, k, v, axes=axes, form=form, causal_axis=1)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    if form == "sequential" and len(axes) > 1:
        other = axial_attention(q, k, v, axes=axes[::-1], form=form)
        assert not torch.allclose(other, axial_attention(q, k, v, axes=axes, form=form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(ROWS + 9,), (1, 19), (19, 1), (1, 19, 1)], ids=str)
def test_one_axis_with_more_than_one_position_is_softmax_attention(sizes, form):
    q, k, v = make_grid(sizes, group=2)
    flat = [x.flatten(2, -2) for x in (q, k, v)]
    for causal in (False, True):
        out = axial_attention(
            q, k, v, form=form, causal_axis="raster" if causal else None, enable_gqa=True
        )
        want = exact_attention(*flat, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(out.flatten(2, -2), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_axes_of_size_one_change_nothing(form):
    q, k, v = make_grid((3, 5))
    want = axial_attention(q, k, v, form=form)
    for at in (2, 3, 4):
        out = axial_attention(*(x.unsqueeze(at) for x in (q, k, v)), form=form)
        torch.testing.assert_close(out.squeeze(at), want, rtol=0, atol=1e-13)


def test_criss_cross_has_the_weights_of_softmax_on_the_lines_alone():
    """Its distance from softmax in total variation is the mass of softmax off the lines."""
    q, k, _ = make_grid((4, 5), batch=1, heads=1)
    eye = torch.eye(20, dtype=q.dtype)
    ours = axial_attention(q, k, eye.reshape(1, 1, 4, 5, 20)).reshape(20, 20)
    full = exact_attention(q.flatten(2, 3), k.flatten(2, 3), eye[None, None])[0, 0]
    tv = (ours - full).abs().sum(1) / 2
    tokens = list(itertools.product(range(4), range(5)))
    off = torch.tensor([[len(differs(i, j)) > 1 for j in tokens] for i in tokens])
    torch.testing.assert_close(tv, (full * off).sum(1), rtol=0, atol=1e-13)
    assert (ours[off] == 0).all()


def test_sequential_is_softmax_attention_where_logits_are_a_sum_of_a_term_of_each_axis():
    rows, columns = normal(2, 1, 2, 5, 1, 4), normal(2, 1, 2, 1, 7, 4, seed=1)
    q, k = (torch.cat([a.expand(-1, -1, -1, 7, -1), b.expand(-1, -1, 5, -1, -1)], -1)
            for a, b in zip(rows, columns, strict=True))  # fmt: skip
    v = normal(1, 2, 5, 7, 3, seed=2)
    want = exact_attention(*(x.flatten(2, 3) for x in (q, k, v))).unflatten(2, (5, 7))
    out = axial_attention(q, k, v, form="sequential")
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal_axis", [None, 1, "raster"])
def test_rows_of_weights_sum_to_one(causal_axis, form):
    q, k, v = make_grid((3, 4, 5))
    out = axial_attention(q, k, torch.ones_like(v), form=form, causal_axis=causal_axis)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-13)


# --- time and padding -----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal_axis", [0, 1, 2, "raster"])
def test_nothing_of_the_future_leaks(causal_axis, form):
    inputs = make_grid((3, 4, 5))
    call = {"form": form, "causal_axis": causal_axis}
    before = axial_attention(*inputs, **call)
    at = (1, 2, 3)
    tokens = list(itertools.product(range(3), range(4), range(5)))
    if causal_axis == "raster":
        earlier = torch.tensor([i < at for i in tokens])
    else:
        earlier = torch.tensor([i[causal_axis] < at[causal_axis] for i in tokens])
    for which in range(3):
        changed = [x.clone() for x in inputs]
        changed[which][:, :, 1, 2, 3] *= 100
        after = axial_attention(*changed, **call)
        a, b = (x.flatten(2, 4) for x in (before, after))
        assert torch.equal(a[:, :, earlier], b[:, :, earlier])
        assert not torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal_axis", [None, 1, "raster"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_of_a_mode_is_truncation(left, causal_axis, form):
    q, k, v = make_grid((5, 7, 3), group=2)
    kept = [(3, 7, 1), (5, 4, 3)]
    masks = [lengths_mask([n[m] for n in kept], q.shape[2 + m]) for m in range(3)]
    masks = [m.flip(1) if left else m for m in masks]
    call = {"form": form, "causal_axis": causal_axis, "enable_gqa": True}
    out = axial_attention(q, k, v, mode_masks=masks, **call)
    assert out.isfinite().all()
    for b, sizes in enumerate(kept):
        grid = (slice(-n, None) if left else slice(n) for n in sizes)
        cut = (slice(b, b + 1), slice(None), *grid)
        want = axial_attention(q[cut], k[cut], v[cut], **call)
        torch.testing.assert_close(out[cut], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_holes_are_never_attended_to_by_whoever_asks(form):
    """Tokens that do not exist themselves attend to what exists on their lines, or to nothing."""
    inputs = [x.requires_grad_() for x in make_grid((3, 4), batch=2, heads=1)]
    masks = [torch.tensor([[True, False, True], [False] * 3]), lengths_mask([3], 4).flip(1)]
    exists = masks[0][:, :, None] & masks[1][:, None, :]
    out = axial_attention(*inputs, form=form, mode_masks=masks)
    want = by_definition(*inputs, form=form, exists=exists)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    assert (out[1] == 0).all()
    for x in torch.autograd.grad(out.sum(), inputs):
        assert x.isfinite().all()


# --- types, cost, arguments -----------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, form):
    q, k, v = make_grid((9, 7), dtype=dtype)
    out = axial_attention(q, k, v, form=form)
    assert out.dtype is dtype
    want = axial_attention(q.double(), k.double(), v.double(), form=form)
    assert (out.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_compute_gives_nothing(form):
    q, k, v = make_grid((3, 0))
    assert axial_attention(q, k, v, form=form).shape == (2, 2, 3, 0, 5)
    q, k, v = make_grid((1, 1))
    torch.testing.assert_close(axial_attention(q, k, v, form=form), v, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(ROWS + 3, 2), (3, 1, 5), (7,), (1,)], ids=str)
@pytest.mark.parametrize("causal_axis", [None, 0, "raster"])
def test_cost_counts_the_operations(causal_axis, sizes, form):
    q, k, v = make_grid(sizes, group=2)
    call = {"form": form, "causal_axis": causal_axis}
    counted = count_flops(lambda: axial_attention(q, k, v, enable_gqa=True, **call))
    said = axial_cost(sizes, heads=4, kv_heads=2, head_dim=8, value_dim=5, batch=2, **call)
    assert counted == said.flops


@pytest.mark.parametrize("form", FORMS)
def test_axes_of_size_one_cost_nothing(form):
    long = axial_cost((1, 500, 1), heads=2, head_dim=8, value_dim=5, form=form)
    assert long.flops == 2 * 2 * 500**2 * (8 + 5)
    grid = axial_cost((3, 1, 5), heads=2, head_dim=8, value_dim=5, form=form)
    assert grid.flops == 2 * 2 * 15 * (3 + 5) * (8 + 5)


@pytest.mark.parametrize("form", FORMS)
def test_units_are_the_keys_that_a_query_reaches(form):
    q, k, _ = make_grid((3, 1, 4), batch=1, heads=1)
    eye = torch.eye(12, dtype=q.dtype).reshape(1, 1, 3, 1, 4, 12)
    reached = (axial_attention(q, k, eye, form=form) > 0).sum(-1)
    assert (reached == axial_cost((3, 1, 4), heads=1, head_dim=8, form=form).units).all()


def test_what_does_not_fit_is_refused():
    q, k, v = make_grid((3, 5))
    for options, message in (
        ({"form": "sum"}, "form must be one of 'criss-cross', 'sequential'; got 'sum'"),
        ({"axes": (2,)}, "axes must be the number of one of the 2 modes, from 0; got 2"),
        ({"axes": (0, 0)}, r"axes must be different axes, at least one; got \[0, 0\]"),
        ({"axes": ()}, r"axes must be different axes, at least one; got \[\]"),
        ({"causal_axis": "time"}, "causal_axis must be the number of one of the 2 modes"),
        ({"causal_axis": -1}, "causal_axis must be the number of one of the 2 modes"),
        ({"mode_masks": torch.ones(2, 3).bool()}, "mode_masks must be a sequence"),
    ):
        with pytest.raises(ValueError, match="axial_attention: " + message):
            axial_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="axial_attention: query has 2 heads and key has 1"):
        axial_attention(q, k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="axial_cost: heads must be a positive integer"):
        axial_cost((3, 4), heads=0, head_dim=8)
