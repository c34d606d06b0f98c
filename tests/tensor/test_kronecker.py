"""Kronecker attention against the dense Kronecker product, and the nearest one against theory."""

import itertools
import math
from functools import reduce

import pytest
import torch

from numattn import Unsupported, exact_attention
from numattn.core import kronecker as nearest
from numattn.core.cost import count_flops
from numattn.engines.softmax import ROWS
from numattn.measure import load
from numattn.tensor import kronecker
from numattn.tensor.kronecker import (
    kronecker_attention,
    kronecker_cost,
    kronecker_weights,
    nearest_kronecker,
)
from numattn.testing.inputs import TOLERANCE

GRIDS = ((7,), (1, 5), (3, 5), (5, 1, 3), (3, 2, 5))
OPTIONS = ({}, {"form": "sum"}, {"normalize": True, "pool": "sum"}, {"scale": 0.7})


def normal(*shape, seed=0):
    source = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def make_grid(sizes, *, batch=2, heads=2, group=1, dtype=torch.float64):
    q = normal(batch, heads * group, *sizes, 8)
    k, v = normal(batch, heads, *sizes, 8, seed=1), normal(batch, heads, *sizes, 5, seed=2)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def lengths_mask(lengths, size):
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def normalised(x):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def dense_weights(q, k, *, form="product", pool="mean", normalize=False, scale=None):
    """The matrix of all tokens of one head, q and k (n_1, ..., n_k, D), by torch.kron."""
    sizes = q.shape[:-1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    own = []
    for mode in range(len(sizes)):
        pooled = []
        for x in (q, k):
            rows = []
            for t in range(sizes[mode]):
                tokens = x.select(mode, t).reshape(-1, x.shape[-1])
                rows.append(tokens.mean(0) if pool == "mean" else tokens.sum(0))
            pooled.append(normalised(torch.stack(rows)) if normalize else torch.stack(rows))
        own.append((scale * pooled[0] @ pooled[1].T).softmax(-1))
    if form == "product":
        return reduce(torch.kron, own)
    eyes = [torch.eye(n, dtype=q.dtype) for n in sizes]
    terms = [reduce(torch.kron, [*eyes[:m], s, *eyes[m + 1 :]]) for m, s in enumerate(own)]
    return sum(terms) / len(terms)


def by_definition(q, k, v, **options):
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    heads = itertools.product(range(q.shape[0]), range(q.shape[1]))
    rows = [
        dense_weights(q[b, h], k[b, h // group], **options)
        @ v[b, h // group].reshape(-1, v.shape[-1])
        for b, h in heads
    ]
    return torch.stack(rows).reshape(out.shape)


# --- the definition -------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_it_is_the_dense_kronecker_product_with_its_gradients(sizes, options):
    ours, theirs = (
        [x.clone().requires_grad_() for x in make_grid(sizes, group=2)] for _ in range(2)
    )
    out = kronecker_attention(*ours, enable_gqa=True, **options)
    want = by_definition(*theirs, **options)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    weight = normal(*out.shape, seed=3)
    (out * weight).sum().backward()
    (want * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


def test_one_mode_is_softmax_attention():
    q, k, v = make_grid((ROWS + 9,), group=2)
    for form in ("product", "sum"):
        out = kronecker_attention(q, k, v, form=form, enable_gqa=True)
        want = exact_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
        out = kronecker_attention(q, k, v, form=form, causal_mode=0, enable_gqa=True)
        want = exact_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_a_mode_of_size_one_changes_nothing_in_the_product():
    q, k, v = make_grid((3, 5))
    want = kronecker_attention(q, k, v)
    for at in (2, 3, 4):
        out = kronecker_attention(*(x.unsqueeze(at) for x in (q, k, v)))
        torch.testing.assert_close(out.squeeze(at), want, rtol=0, atol=1e-13)


def test_it_is_softmax_attention_where_logits_are_a_sum_of_a_term_of_each_mode():
    rows, columns = normal(2, 1, 2, 5, 1, 4), normal(2, 1, 2, 1, 7, 4, seed=1)
    q, k = (torch.cat([a.expand(-1, -1, -1, 7, -1), b.expand(-1, -1, 5, -1, -1)], -1)
            for a, b in zip(rows, columns, strict=True))  # fmt: skip
    v = normal(1, 2, 5, 7, 3, seed=2)
    want = exact_attention(*(x.flatten(2, 3) for x in (q, k, v))).unflatten(2, (5, 7))
    torch.testing.assert_close(kronecker_attention(q, k, v), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", ["product", "sum"])
@pytest.mark.parametrize("causal_mode", [None, 0, 1, 2])
def test_rows_of_weights_sum_to_one(form, causal_mode):
    q, k, v = make_grid((3, 4, 5))
    masks = [lengths_mask([2, 3], 3), None, lengths_mask([5], 5)]
    call = {"form": form, "causal_mode": causal_mode, "mode_masks": masks}
    out = kronecker_attention(q, k, torch.ones_like(v), **call)[:, :, :2]
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-13)


def test_weights_are_those_that_attention_uses():
    q, k, v = make_grid((3, 4, 5), group=2)
    masks = [None, lengths_mask([3, 2], 4), lengths_mask([4], 5)]
    call = {"mode_masks": masks, "normalize": True, "enable_gqa": True}
    a, b, c = kronecker_weights(q, k, **call)
    v2 = v.repeat_interleave(2, 1)
    want = torch.einsum("bhai,bhcj,bhdk,bhijke->bhacde", a, b, c, v2)
    out = kronecker_attention(q, k, v, **call)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    a, b, c = kronecker_weights(q, k, causal_mode=1, **call)
    want = torch.einsum("bhcai,bhcj,bhcdk,bhijke->bhacde", a, b, c, v2)
    out = kronecker_attention(q, k, v, causal_mode=1, **call)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


# --- time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("causal_mode", [0, 1, 2])
def test_a_causal_row_is_the_last_row_of_the_call_on_what_came_before(causal_mode, options):
    q, k, v = make_grid((3, 5, 4), group=2)
    masks = [lengths_mask([2, 3], 3), lengths_mask([5, 3], 5), lengths_mask([4], 4)]
    out = kronecker_attention(
        q, k, v, causal_mode=causal_mode, mode_masks=masks, enable_gqa=True, **options
    )
    for t in range(q.shape[2 + causal_mode]):
        past = [x.narrow(2 + causal_mode, 0, t + 1) for x in (q, k, v)]
        own = [m[:, : t + 1] if i == causal_mode else m for i, m in enumerate(masks)]
        want = kronecker_attention(*past, mode_masks=own, enable_gqa=True, **options)
        got = out.select(2 + causal_mode, t)
        want = want.select(2 + causal_mode, t)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["product", "sum"])
@pytest.mark.parametrize("causal_mode", [0, 1, 2])
def test_nothing_of_the_future_leaks(causal_mode, form):
    inputs = make_grid((4, 5, 6))
    call = {"form": form, "causal_mode": causal_mode}
    before = kronecker_attention(*inputs, **call)
    for which in range(3):
        changed = [x.clone() for x in inputs]
        changed[which].select(2 + causal_mode, 2)[..., 1, 3, :] *= 100
        after = kronecker_attention(*changed, **call)
        same = [x.narrow(2 + causal_mode, 0, 2) for x in (before, after)]
        assert torch.equal(*same)
        assert not torch.equal(*(x.select(2 + causal_mode, 3) for x in (before, after)))


def test_gradients_do_not_come_from_the_future():
    q, k, v = (x.requires_grad_() for x in make_grid((4, 5)))
    out = kronecker_attention(q, k, v, causal_mode=0)
    for x in torch.autograd.grad(out[:, :, :2].square().sum(), (q, k, v)):
        assert (x[:, :, 2:] == 0).all()
        assert (x[:, :, :2] != 0).any()


def test_causal_gradients_are_those_of_numerical_differences():
    q, k, v = (x.requires_grad_() for x in make_grid((3, 2), batch=1, heads=1))
    mask = [None, torch.tensor([[True, False]])]

    def fn(q, k, v):
        return kronecker_attention(q, k, v, causal_mode=0, normalize=True, mode_masks=mask)

    assert torch.autograd.gradcheck(fn, (q, k, v))


# --- padding --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("causal_mode", [None, 0, 1])
@pytest.mark.parametrize("left", [False, True])
def test_padding_of_a_mode_is_truncation(left, causal_mode, options):
    q, k, v = make_grid((5, 7, 3))
    kept = [(3, 7, 2), (5, 4, 3)]
    masks = [lengths_mask([n[m] for n in kept], q.shape[2 + m]) for m in range(3)]
    masks = [m.flip(1) if left else m for m in masks]
    exists = kronecker.existing_tokens(masks)
    for x in (q, k, v):
        x.masked_fill_(~exists[:, None, ..., None], 1e3)
    call = {"causal_mode": causal_mode, **options}
    out = kronecker_attention(q, k, v, mode_masks=masks, **call)
    assert out.isfinite().all()
    for b, sizes in enumerate(kept):
        grid = (slice(-n, None) if left else slice(n) for n in sizes)
        cut = (slice(b, b + 1), slice(None), *grid)
        want = kronecker_attention(q[cut], k[cut], v[cut], **call)
        torch.testing.assert_close(out[cut], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["product", "sum"])
@pytest.mark.parametrize("causal_mode", [None, 0, 1])
def test_tokens_that_may_attend_to_nothing_get_zeros(form, causal_mode):
    inputs = [x.requires_grad_() for x in make_grid((3, 4))]
    masks = [torch.tensor([[False] * 3, [True] * 3]), None]
    call = {"form": form, "causal_mode": causal_mode, "mode_masks": masks}
    out = kronecker_attention(*inputs, **call)
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()
    for x in torch.autograd.grad(out.sum(), inputs):
        assert x.isfinite().all()
    del call["form"]
    for s in kronecker_weights(*inputs[:2], **call):
        assert s.isfinite().all()


# --- types, cost, arguments -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = make_grid((9, 7), dtype=dtype)
    for call in ({}, {"causal_mode": 1, "normalize": True}):
        out = kronecker_attention(q, k, v, **call)
        assert out.dtype is dtype
        want = kronecker_attention(q.double(), k.double(), v.double(), **call)
        bound = TOLERANCE[dtype] * want.abs().max()
        assert (out.double() - want).abs().max() <= bound
        assert all(s.dtype is torch.float32 for s in kronecker_weights(q, k, **call))


def test_nothing_to_compute_gives_nothing():
    q, k, v = make_grid((3, 0))
    assert kronecker_attention(q, k, v).shape == (2, 2, 3, 0, 5)
    q, k, v = make_grid((3, 2), batch=0)
    assert kronecker_attention(q, k, v, causal_mode=0).shape == (0, 2, 3, 2, 5)


@pytest.mark.parametrize("form", ["product", "sum"])
@pytest.mark.parametrize(("sizes", "causal_mode"), [((ROWS + 3, 2), 0), ((3, 5, 4), 1), ((7,), 0)])
def test_cost_counts_the_operations(sizes, causal_mode, form):
    q, k, v = make_grid(sizes, group=2)
    for mode in (None, causal_mode):
        call = {"form": form, "causal_mode": mode}
        counted = count_flops(lambda c=call: kronecker_attention(q, k, v, enable_gqa=True, **c))
        said = kronecker_cost(sizes, heads=4, kv_heads=2, head_dim=8, value_dim=5, batch=2, **call)
        assert counted == said.flops


def test_cost_is_that_of_the_formula():
    said = kronecker_cost((3, 4), heads=2, head_dim=8, value_dim=5, batch=7)
    assert said.flops == 7 * 2 * 2 * (8 * (9 + 16) + 5 * 12 * (3 + 4))
    exact = kronecker_cost((12,), heads=2, head_dim=8, value_dim=5, batch=7)
    assert exact.flops == 7 * 2 * 2 * 12 * 12 * (8 + 5)


def test_units_are_the_kronecker_products_in_the_weights():
    """A matrix of a sum of R products has rank R, or less, when it is rearranged."""
    q, k, _ = make_grid((3, 4), batch=1, heads=1)
    eye = torch.eye(12, dtype=q.dtype).reshape(1, 1, 3, 4, 12)
    for call in itertools.product(("product", "sum"), (None, 0, 1)):
        call = dict(zip(("form", "causal_mode"), call, strict=True))
        dense = kronecker_attention(q, k, eye, **call).reshape(12, 12)
        units = kronecker_cost((3, 4), heads=1, head_dim=8, **call).units
        assert nearest_kronecker(dense, (3, 4), (3, 4), rank=units).error < 1e-12
        if units > 1 and call["form"] == "product":
            assert nearest_kronecker(dense, (3, 4), (3, 4), rank=1).error > 1e-6


def test_what_does_not_fit_is_refused():
    q, k, v = make_grid((3, 5))
    name = "kronecker_attention: "
    for options, message in (
        ({"form": "kron"}, "form must be one of 'product', 'sum'"),
        ({"pool": "max"}, "pool must be one of 'mean', 'sum'"),
        ({"normalize": 1}, "normalize must be True or False; got 1"),
        ({"causal_mode": 2}, "causal_mode must be the number of one of the 2 modes, from 0; got 2"),
        ({"causal_mode": True}, "causal_mode must be the number"),
        ({"mode_masks": [None]}, "for each of the 2 modes; got 1"),
        ({"mode_masks": [None, torch.ones(2, 4).bool()]}, r"mode_masks\[1\] must have shape"),
    ):
        with pytest.raises(ValueError, match=name + ".*" + message):
            kronecker_attention(q, k, v, **options)
    with pytest.raises(TypeError, match=name + r"mode_masks\[0\] must be a bool tensor"):
        kronecker_attention(q, k, v, mode_masks=[torch.ones(1, 3), None])
    with pytest.raises(TypeError, match=name + "scale must be a number"):
        kronecker_attention(q, k, v, scale=torch.ones(()))
    with pytest.raises(TypeError, match=name + "value must be a tensor; got NoneType"):
        kronecker_attention(q, k, None)
    with pytest.raises(TypeError, match=name + "query must be floating point"):
        kronecker_attention(q.long(), k, v)
    with pytest.raises(ValueError, match=name + "query must have four dimensions or more"):
        kronecker_attention(q[0, 0], k, v)
    with pytest.raises(ValueError, match=name + "query, key and value must share type"):
        kronecker_attention(q, k.float(), v)
    with pytest.raises(ValueError, match=name + "query, key and value must agree in batch"):
        kronecker_attention(q, k[:, :, :2], v[:, :, :2])
    with pytest.raises(ValueError, match=name + "query and key must have the same head size"):
        kronecker_attention(q[..., :4], k, v)
    with pytest.raises(ValueError, match="Pass enable_gqa=True"):
        kronecker_attention(q, k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="3 query heads must be a multiple of the 2 key heads"):
        kronecker_attention(q[:, [0, 1, 1]], k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="kronecker_cost: head_dim must be a positive integer"):
        kronecker_cost((3, 4), heads=1, head_dim=0)
    with pytest.raises(ValueError, match="kronecker_cost: modes must be a positive integer"):
        kronecker_cost((3, 0), heads=1, head_dim=8)


# --- the nearest sum of Kronecker products --------------------------------------------------


def planted(rank, rows=(3, 5), columns=(4, 2)):
    left = normal(rank, rows[0], columns[0], seed=4)
    right = normal(rank, rows[1], columns[1], seed=5)
    return sum(torch.kron(b, c) for b, c in zip(left, right, strict=True))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_planted_sum_is_recovered(rank):
    a = planted(rank)
    best = nearest_kronecker(a, (3, 5), (4, 2), rank=rank)
    torch.testing.assert_close(best.dense(), a, rtol=0, atol=1e-12)
    assert best.error < 1e-14
    assert (best.singular_values[rank:] < 1e-12 * best.singular_values[0]).all()
    if rank > 1:
        assert nearest_kronecker(a, (3, 5), (4, 2), rank=rank - 1).error > 1e-3


def test_the_error_is_the_tail_of_singular_values_and_falls_to_zero():
    a = normal(15, 8, seed=6)
    errors = []
    for rank in range(1, 11):
        best = nearest_kronecker(a, (3, 5), (4, 2), rank=rank)
        residual = (a - best.dense()).norm() / a.norm()
        assert math.isclose(best.error, residual, rel_tol=1e-9, abs_tol=1e-14)
        tail = best.singular_values[rank:].norm() / best.singular_values.norm()
        assert math.isclose(best.error, tail, rel_tol=1e-9, abs_tol=1e-14)
        whole = nearest_kronecker(a, (3, 5), (4, 2), rank=10).keep(rank)
        assert math.isclose(best.error, whole.error, rel_tol=1e-9, abs_tol=1e-14)
        torch.testing.assert_close(best.dense(), whole.dense(), rtol=0, atol=1e-13)
        errors.append(best.error)
    assert errors == sorted(errors, reverse=True)
    assert best.rank == nearest_kronecker(a, (3, 5), (4, 2), rank=99).rank == 10
    assert best.error == 0.0


def test_no_other_sum_is_nearer():
    """Alternating least squares from random starts ends no lower."""
    a = normal(15, 8, seed=7)
    best = nearest_kronecker(a, (3, 5), (4, 2), rank=2).error
    rearranged = a.reshape(3, 5, 4, 2).transpose(1, 2).reshape(12, 10)
    for seed in range(3):
        left = normal(12, 2, seed=10 + seed)
        for _ in range(50):
            right = torch.linalg.lstsq(left, rearranged).solution
            left = torch.linalg.lstsq(right.T, rearranged.T).solution.T
        other = sum(torch.kron(left[:, i].reshape(3, 4), right[i].reshape(5, 2)) for i in range(2))
        assert (a - other).norm() / a.norm() >= best * (1 - 1e-12)


def test_apply_is_the_product_with_the_dense_sum():
    best = nearest_kronecker(planted(3), (3, 5), (4, 2), rank=2)
    v = normal(2, 3, 8, 7, seed=8)
    torch.testing.assert_close(best.apply(v), best.dense() @ v, rtol=0, atol=1e-12)
    assert best.apply(v.float()).dtype is torch.float32


def test_iteration_finds_what_the_whole_decomposition_does(monkeypatch):
    a = normal(6 * 7, 6 * 7, seed=11)
    want = nearest_kronecker(a, (6, 7), (6, 7), rank=3)
    monkeypatch.setattr(nearest, "_WIDEST", 4)
    monkeypatch.setattr(torch.linalg, "svd", None)  # not to be called
    got = nearest_kronecker(a, (6, 7), (6, 7), rank=3)
    torch.testing.assert_close(got.singular_values, want.singular_values[:3], rtol=1e-9, atol=0)
    torch.testing.assert_close(got.dense(), want.dense(), rtol=0, atol=1e-9)
    assert math.isclose(got.error, want.error, rel_tol=1e-9)
    assert math.isclose(got.keep(2).error, (a - want.keep(2).dense()).norm() / a.norm())


def test_positive_weights_have_a_positive_first_product():
    best = nearest_kronecker(normal(15, 8, seed=12).exp(), (3, 5), (4, 2))
    assert (best.left > 0).all()
    assert (best.right > 0).all()


def test_a_product_of_softmax_matrices_has_error_zero():
    q, k, _ = make_grid((5, 7), batch=1, heads=1)
    a, b = kronecker_weights(q, k)
    assert nearest_kronecker(torch.kron(a[0, 0], b[0, 0]), (5, 7), (5, 7)).error < 1e-13


def test_no_sum_of_heads_is_nearer_to_weights_of_a_model_than_the_nearest():
    x = load("dino").to(torch.float64)
    q, k = (t[:, :, 1:].unflatten(2, (37, 37))[:, :, :9, :9] for t in (x.q, x.k))
    flat = [t.flatten(2, 3) for t in (q, k)]
    eye = torch.eye(81, dtype=q.dtype).expand(1, 5, 81, 81)
    weights = exact_attention(*flat, eye, scale=x.scale)[0]
    for options in ({}, {"normalize": True}, {"pool": "sum"}, {"form": "sum"}):
        ours = kronecker_attention(
            q, k, eye.unflatten(2, (9, 9)), scale=x.scale, **options
        ).flatten(2, 3)[0]
        units = kronecker_cost((9, 9), heads=1, head_dim=64, form=options.get("form", "product"))
        for rank in (1, 2, 5):
            target, mean = weights[:rank].mean(0), ours[:rank].mean(0)
            best = nearest_kronecker(target, (9, 9), (9, 9), rank=rank * units.units)
            assert best.error <= (mean - target).norm() / target.norm()


def test_zeros_have_error_zero():
    best = nearest_kronecker(torch.zeros(6, 6), (2, 3), (2, 3))
    assert best.error == 0.0
    assert (best.dense() == 0).all()


def test_what_is_no_sum_of_two_factors_is_refused():
    a = normal(12, 12)
    with pytest.raises(Unsupported, match="two factors; got 3 sizes of rows and 3 of columns"):
        nearest_kronecker(a, (2, 2, 3), (2, 2, 3))
    with pytest.raises(ValueError, match=r"a must have shape \(12, 10\).*got \(12, 12\)"):
        nearest_kronecker(a, (3, 4), (2, 5))
    with pytest.raises(ValueError, match="nearest_kronecker: rank must be a positive integer"):
        nearest_kronecker(a, (3, 4), (3, 4), rank=0)
    with pytest.raises(ValueError, match="nearest_kronecker: sizes_rows must be a positive"):
        nearest_kronecker(a, (-3, -4), (3, 4))
    with pytest.raises(TypeError, match="nearest_kronecker: a must be a floating-point tensor"):
        nearest_kronecker(a.long(), (3, 4), (3, 4))
