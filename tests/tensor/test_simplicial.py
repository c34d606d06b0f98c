"""Third-order attention against sums over triples written from the definition."""

import math
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.engines.softmax import softmax_attention
from numattn.tensor import simplicial
from numattn.tensor.simplicial import (
    SimplicialAttention,
    simplicial_attention,
    simplicial_flops,
    taylor_simplicial_attention,
)
from numattn.testing.layers import check_layer

F64 = torch.float64
BOTH = ["trilinear", "determinant"]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def draw(tokens, heads=2, kv_heads=None, width=6, value_width=5, batch=2, queries=None):
    """q, k, v, k', v'."""
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = [
        (heads, tokens if queries is None else queries, width),
        (kv_heads, tokens, width),
        (kv_heads, tokens, value_width),
        (kv_heads, tokens, width),
        (kv_heads, tokens, value_width),
    ]
    return [randn(batch, *shape, seed=s) for s, shape in enumerate(shapes)]


def same(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def seen(i, tokens, w, is_causal):
    """Positions in the window of position i."""
    if w is None:
        return range(i + 1) if is_causal else range(tokens)
    first = i - w + 1 if is_causal else i - w // 2
    last = i if is_causal else first + w - 1
    return [j for j in range(tokens) if first <= j <= last]


def logit(form, q, k, k2):
    if form == "trilinear":
        return (q * k * k2).sum(-1)
    chunks = [torch.stack([x[..., c : c + 3] for x in (q, k, k2)], -1) for c in range(0, 6, 3)]
    return sum(torch.linalg.det(chunk) for chunk in chunks)


def loops(q, k, v, k2, v2, *, window=None, form="trilinear", is_causal=False, scale=None):
    """The definition, one triple of tokens after the other."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group, tokens = q.shape[1] // k.shape[1], k.shape[2]
    k, v, k2, v2 = (x.repeat_interleave(group, 1) for x in (k, v, k2, v2))
    w1, w2 = (None, None) if window is None else window
    rows = []
    for i in range(q.shape[2]):
        logits, values = [], []
        for j in seen(i, tokens, w1, is_causal):
            for n in seen(i, tokens, w2, is_causal):
                logits.append(scale * logit(form, q[:, :, i], k[:, :, j], k2[:, :, n]))
                values.append(v[:, :, j] * v2[:, :, n])
        weights = torch.stack(logits).softmax(0)
        rows.append((weights[..., None] * torch.stack(values)).sum(0))
    return torch.stack(rows, 2)


def agree(tensors, ours, theirs, tolerance=1e-12):
    """Outputs, and the gradients of every tensor."""
    found = []
    for attend in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = attend(*leaves)
        found.append((out, *torch.autograd.grad((out * randn(*out.shape, seed=9)).sum(), leaves)))
    for a, b in zip(*found, strict=True):
        same(a, b, tolerance)


# --- the definition -------------------------------------------------------------------------


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("tokens", "window"),
    [(1, None), (9, None), (37, (5, 3)), (37, (2, 6)), (19, (1, 1)), (7, (30, 40)), (17, (40, 2))],
)
def test_it_is_the_sum_over_triples(form, is_causal, tokens, window):
    """Tiles have 16 positions at least, so the longer calls are of several."""
    call = {"window": window, "form": form, "is_causal": is_causal}
    agree(
        draw(tokens),
        lambda *x: simplicial_attention(*x, **call),
        lambda *x: loops(*x, **call),
    )


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("window", [None, (4, 3)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_heads_that_share_keys(form, window, is_causal):
    call = {"window": window, "form": form, "is_causal": is_causal, "scale": 0.7}
    agree(
        draw(18 if window else 7, heads=6, kv_heads=2),
        lambda *x: simplicial_attention(*x, enable_gqa=True, **call),
        lambda *x: loops(*x, **call),
    )


@pytest.mark.parametrize(("queries", "tokens"), [(3, 10), (12, 5)])
def test_lengths_may_differ_without_a_window(queries, tokens):
    agree(draw(tokens, queries=queries), simplicial_attention, loops)


@pytest.mark.parametrize("window", [None, (9, 7)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_tiles_of_keys_and_chunks_of_second_keys_merge(window, is_causal, monkeypatch):
    """Against the call in which nothing is cut; one second key at a time, and 64 keys."""
    tensors = draw(66, batch=1, heads=1)
    call = {"window": window, "is_causal": is_causal}
    found = []
    for rows, elements in ((1000, 1 << 30), (16, 1)):
        monkeypatch.setattr(simplicial, "_ROWS", rows)
        monkeypatch.setattr(simplicial, "tile_elements", lambda device, n=elements: n)
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = simplicial_attention(*leaves, **call)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        same(a, b, 1e-11)


def test_gradients_are_those_of_finite_differences():
    tensors = [x.requires_grad_() for x in draw(5, heads=1, width=3, value_width=2, batch=1)]
    for form in BOTH:
        assert torch.autograd.gradcheck(
            lambda *x, f=form: simplicial_attention(*x, window=(3, 2), form=f, is_causal=True),
            tensors,
        )


# --- identities -----------------------------------------------------------------------------


def test_it_is_attention_to_all_products_of_two_keys():
    q, k, v, k2, v2 = draw(9)
    keys, values = ((a[:, :, :, None] * b[:, :, None]).flatten(2, 3) for a, b in ((k, k2), (v, v2)))
    want, _ = softmax_attention(q, keys, values, scale=6**-0.5)
    same(simplicial_attention(q, k, v, k2, v2), want)


@pytest.mark.parametrize("window", [None, (6, 6)])
def test_both_sets_of_keys_may_change_places(window):
    q, k, v, k2, v2 = draw(25)
    call = {"window": window, "is_causal": True}
    same(
        simplicial_attention(q, k, v, k2, v2, **call), simplicial_attention(q, k2, v2, k, v, **call)
    )


def test_changing_their_places_changes_the_sign_of_determinants():
    q, k, v, k2, v2 = draw(12)
    swapped = simplicial_attention(-q, k2, v2, k, v, form="determinant")
    same(simplicial_attention(q, k, v, k2, v2, form="determinant"), swapped)


@pytest.mark.parametrize("is_causal", [True, False])
def test_with_one_second_key_of_ones_it_is_attention_in_a_window(is_causal):
    q, k, v, k2, v2 = draw(40)
    out = simplicial_attention(
        q, k, v, torch.ones_like(k2), torch.ones_like(v2), window=(7, 1), is_causal=is_causal
    )
    mask = torch.zeros(40, 40, dtype=torch.bool)
    for i in range(40):
        mask[i, list(seen(i, 40, 7, is_causal))] = True
    want, _ = softmax_attention(q, k, v, scale=6**-0.5, mask=mask[None, None])
    same(out, want)


def rotations(count, seed=0):
    """(count, 3, 3), of determinant 1."""
    q, _ = torch.linalg.qr(randn(count, 3, 3, seed=seed))
    return q * torch.linalg.det(q)[:, None, None]


def turn(x, r):
    return torch.einsum("cij,bhncj->bhnci", r, x.unflatten(-1, (-1, 3))).flatten(-2)


def test_the_same_rotation_of_every_chunk_leaves_determinants_alone():
    q, k, v, k2, v2 = draw(17)
    r = rotations(2)
    for form, invariant in (("determinant", True), ("trilinear", False)):
        call = {"window": (8, 4), "is_causal": True, "form": form}
        want = simplicial_attention(q, k, v, k2, v2, **call)
        out = simplicial_attention(turn(q, r), turn(k, r), v, turn(k2, r), v2, **call)
        assert torch.allclose(out, want, rtol=1e-11, atol=1e-11) == invariant


def test_rotations_about_one_axis_give_determinants_relative_positions():
    """Turning every token by its position, or by its position plus 5, is the same."""
    q, k, v, k2, v2 = draw(9)
    axes, speed = rotations(2, seed=3), torch.tensor([0.9, 0.2], dtype=F64)

    def placed(x, start):
        angle = (start + torch.arange(9, dtype=F64))[:, None] * speed  # (N, chunks)
        zero, one = torch.zeros_like(angle), torch.ones_like(angle)
        rows = [angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero, zero, zero, one]
        about = axes @ torch.stack(rows, -1).unflatten(-1, (3, 3)) @ axes.mT
        return torch.einsum("ncij,bhncj->bhnci", about, x.unflatten(-1, (-1, 3))).flatten(-2)

    one, two = (
        simplicial_attention(
            *(placed(x, s) for x in (q, k)), v, placed(k2, s), v2, form="determinant"
        )
        for s in (0, 5)
    )
    same(one, two)
    still = simplicial_attention(q, k, v, k2, v2, form="determinant")
    assert not torch.allclose(one, still)


def test_equal_logits_give_the_product_of_two_means():
    q, k, v, k2, v2 = draw(13)
    out = simplicial_attention(torch.zeros_like(q), k, v, k2, v2)
    want = v.mean(2, keepdim=True) * v2.mean(2, keepdim=True)
    same(out, want.expand_as(out))


# --- padding and rows without pairs ---------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [None, (5, 3)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_is_truncation(side, window, is_causal):
    lengths = [14, 9, 20]
    tensors = draw(20, heads=4, kv_heads=2, batch=3)
    mask = padding_mask(torch.tensor(lengths), 20, side=side)
    call = {"window": window, "is_causal": is_causal, "enable_gqa": True}
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = simplicial_attention(*leaves, attn_mask=mask, **call)
    total = 0
    for b, n in enumerate(lengths):
        place = slice(20 - n, 20) if side == "left" else slice(0, n)
        alone = simplicial_attention(*(x[b : b + 1, :, place] for x in leaves), **call)
        same(out[b : b + 1, :, place], alone)
        total = total + alone.square().sum()
    exists = mask[:, 0, 0][:, None, :, None]
    ours = torch.autograd.grad((out * exists).square().sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad(total, leaves), strict=True):
        same(a, b, 1e-11)


def test_windows_count_tokens_that_exist():
    tensors = draw(24, batch=1)
    keep = torch.ones(24, dtype=torch.bool)
    keep[[0, 5, 6, 7, 15, 23]] = False
    call = {"window": (4, 3), "is_causal": True}
    out = simplicial_attention(*tensors, attn_mask=keep[None, None, None], **call)
    same(out[:, :, keep], simplicial_attention(*(x[:, :, keep] for x in tensors), **call))


@pytest.mark.parametrize("window", [None, (3, 2)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_no_token_gives_zeros_and_no_gradient_that_is_not_finite(window, is_causal):
    tensors = [x.requires_grad_() for x in draw(19)]
    mask = padding_mask(torch.tensor([0, 6]), 19, side="left")
    out = simplicial_attention(*tensors, window=window, is_causal=is_causal, attn_mask=mask)
    assert not out[0].any()
    for grad in torch.autograd.grad(out.square().sum(), tensors):
        assert grad.isfinite().all()
        assert not grad[0].any()


@pytest.mark.parametrize(("queries", "tokens"), [(0, 4), (4, 0)])
def test_no_query_or_no_key_gives_zeros(queries, tokens):
    tensors = [x.requires_grad_() for x in draw(tokens, queries=queries)]
    out = simplicial_attention(*tensors)
    assert out.shape == (2, 2, queries, 5)
    assert not out.any()
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), tensors))


def test_later_tokens_change_nothing():
    tensors = draw(40)
    moved = [x.clone() for x in tensors]
    for x in moved:
        x[:, :, 21] = 100 * x[:, :, 21].flip(-1)
    for window in (None, (30, 5)):
        want, out = (
            simplicial_attention(*x, window=window, is_causal=True) for x in (tensors, moved)
        )
        assert torch.equal(out[:, :, :21], want[:, :, :21])
        assert not torch.allclose(out[:, :, 21:], want[:, :, 21:])


# --- numerics -------------------------------------------------------------------------------


def test_it_is_finite_at_logits_of_ten_thousand():
    tensors = draw(20)
    tensors[0] = tensors[0] * 1e4
    leaves = [x.requires_grad_() for x in tensors]
    for form in BOTH:
        call = {"window": (6, 4), "is_causal": True, "form": form}
        out = simplicial_attention(*leaves, **call)
        same(out, loops(*tensors, **call), 1e-9)
        for grad in torch.autograd.grad(out.sum(), leaves):
            assert grad.isfinite().all()


def test_products_of_half_precision_do_not_overflow():
    """k * k' is 250,000 and v * v' is 90,000, above 65,504; a query of 1e-6 weighs them."""
    q, k, v, k2, v2 = (torch.ones(1, 1, 8, 4, dtype=torch.float16) for _ in range(5))
    q, k, k2 = q * 1e-6, k * 500, k2 * 500
    v, v2 = v * 300, v2 * torch.linspace(-1, 1, 8)[:, None].half()
    v2[..., -1, :] = 300
    out = simplicial_attention(q, k, v, k2, v2, window=(3, 1), is_causal=True)
    assert out.dtype is torch.float16
    assert out[:, :, :-1].isfinite().all()
    same(out[:, :, :-1].double(), (v * v2)[:, :, :-1].double(), 2e-3)
    mean = simplicial_attention(q, k, v, k2, v2, is_causal=False).double()
    want = (300 * v2.double().mean(2, keepdim=True)).expand_as(mean)  # logits are all equal
    same(mean, want, 2e-3)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_types_are_near_what_float64_gives_of_the_same_numbers(form, dtype):
    tensors = [x.to(dtype) for x in draw(30)]
    call = {"window": (9, 4), "is_causal": True, "form": form}
    out = simplicial_attention(*tensors, **call)
    want = simplicial_attention(*(x.double() for x in tensors), **call)
    assert out.dtype is dtype
    # Inside of the call all is float32: only the output is rounded to the type.
    eps = torch.finfo(dtype).eps + 100 * torch.finfo(torch.float32).eps
    assert ((out.double() - want).abs() <= eps * (1 + want.abs())).all()


# --- cost and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, (40, 3), (2, 9), (200, 200)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_operations_are_counted_exactly(window, is_causal, kv_heads, monkeypatch):
    monkeypatch.setattr(simplicial, "tile_elements", lambda device: 1 << 16)
    tensors = draw(45, heads=4, kv_heads=kv_heads, width=3, value_width=5)
    shape = Shape(2, 4, kv_heads, 45, 45, 3, 5, is_causal)
    call = {"window": window, "is_causal": is_causal, "enable_gqa": True}
    counted = count_flops(lambda: simplicial_attention(*tensors, **call))
    assert simplicial_flops(shape, window=window) == counted
    pairs = 0
    for i in range(45):
        w1, w2 = (None, None) if window is None else window
        pairs += len(seen(i, 45, w1, is_causal)) * len(seen(i, 45, w2, is_causal))
    assert counted >= 2 * 2 * 4 * pairs * (3 + 5)


def test_operations_of_different_lengths():
    tensors = draw(30, queries=7)
    counted = count_flops(lambda: simplicial_attention(*tensors))
    assert counted == simplicial_flops(Shape(2, 2, 2, 7, 30, 6, 5)) == 2 * 4 * 7 * 30**2 * 11


def test_operations_grow_with_the_length_and_the_windows():
    def flops(n, window):
        return simplicial_flops(Shape(1, 1, 1, n, n, 64, 64, True), window=window)

    assert flops(8192, (512, 32)) < 2.1 * flops(4096, (512, 32))
    # Tiles compute an eighth more than the window of keys, and the diagonal's corners.
    least = 2 * 128 * sum(min(i + 1, 512) * min(i + 1, 32) for i in range(4096))
    assert least <= flops(4096, (512, 32)) <= 1.2 * least


class Watch(TorchDispatchMode):
    """The number of elements of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        new = (t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t._base is None)
        self.made.extend(t.numel() for t in new)
        return out


def test_nothing_is_as_large_as_rows_times_a_window(monkeypatch):
    """Forward and backward, with N = 4096 and windows of 64 and 8."""
    room = 1 << 15
    monkeypatch.setattr(simplicial, "tile_elements", lambda device: room)
    n, width = 4096, 4
    tensors = [x.float().requires_grad_() for x in draw(n, 1, width=width, value_width=4, batch=1)]
    with Watch() as watch:
        out = simplicial_attention(*tensors, window=(64, 8), is_causal=True)
        out.sum().backward()
    assert max(watch.made) <= max(room, n * width)
    assert max(watch.made) < n * 64 / 4


def test_what_the_backward_keeps_is_linear_in_the_length():
    """Tensors saved for it are inputs, and a partial for every row."""

    def kept(n):
        tensors = [x.requires_grad_() for x in draw(n, 1, width=3, value_width=2, batch=1)]
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = simplicial_attention(*tensors, window=(16, 4), is_causal=True)
        return sum(sizes.values()), out

    small, large = (kept(n)[0] for n in (512, 1024))
    assert large <= 2.2 * small
    assert large < 1024 * 16 * 4 * 8


# --- a polynomial in place of the exponential -----------------------------------------------


def taylor_loops(q, k, v, k2, v2, degree, is_causal, scale):
    logits = scale * torch.einsum("bhid,bhjd,bhkd->bhijk", q, k, k2)
    weights = sum(logits**t / math.factorial(t) for t in range(degree + 1))
    if is_causal:
        place = torch.arange(k.shape[2])
        before = place <= place[:, None]
        weights = weights * (before[:, :, None] & before[:, None])
    num = torch.einsum("bhijk,bhje,bhke->bhie", weights, v, v2)
    return num / weights.sum((-1, -2))[..., None]


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("room", [1, 1 << 20])
def test_the_separated_sums_are_the_taylor_polynomial(degree, is_causal, room, monkeypatch):
    monkeypatch.setattr(simplicial, "tile_elements", lambda device: room)
    q, *sides = draw(21, width=3)
    tensors = [0.5 * q, *sides]  # denominators of odd degree stay away from zero
    agree(
        tensors,
        lambda *x: taylor_simplicial_attention(*x, degree=degree, is_causal=is_causal, scale=0.1),
        lambda *x: taylor_loops(*x, degree, is_causal, 0.1),
        1e-10,
    )


def test_its_error_obeys_the_remainder_and_falls_with_the_degree():
    q, k, v, k2, v2 = draw(15, width=2)
    q = 0.3 * q
    want = simplicial_attention(q, k, v, k2, v2)
    s = torch.einsum("bhid,bhjd,bhkd->bhijk", q, k, k2).abs().max() / 2**0.5
    errors = []
    for degree in (2, 4, 6, 8):
        out = taylor_simplicial_attention(q, k, v, k2, v2, degree=degree)
        errors.append((out - want).abs().max())
        # Weights err relatively by r at most; so do sums of them, and quotients by 2 r / (1 - r).
        r = (2 * s).exp() * s ** (degree + 1) / math.factorial(degree + 1)
        if r < 1:
            assert errors[-1] <= 2 * r / (1 - r) * v.abs().max() * v2.abs().max()
    assert all(b < a for a, b in pairwise(errors))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_the_polynomial_is_truncation(is_causal, side):
    tensors = draw(12, heads=4, kv_heads=2, width=2)
    mask = padding_mask(torch.tensor([7, 0]), 12, side=side)
    call = {"is_causal": is_causal, "enable_gqa": True}
    out = taylor_simplicial_attention(*tensors, attn_mask=mask, **call)
    place = slice(5, 12) if side == "left" else slice(0, 7)
    short = [x[:1, :, place] for x in tensors]
    same(out[:1, :, place], taylor_simplicial_attention(*short, **call))
    assert not out[1].any()


def test_operations_of_the_polynomial_are_linear():
    tensors = draw(50, queries=20, width=3, value_width=4)
    counted = count_flops(lambda: taylor_simplicial_attention(*tensors, degree=2))
    monomials = math.comb(3 + 2, 2)
    assert counted == 2 * 4 * monomials * 5 * (20 + 2 * 50)


# --- refusals -------------------------------------------------------------------------------


def test_what_is_malformed_is_named():
    q, k, v, k2, v2 = draw(6, width=4)
    for error, message, call in (
        (
            TypeError,
            "simplicial: key2 must be a tensor",
            lambda: simplicial_attention(q, k, v, 1, v2),
        ),
        (
            ValueError,
            "simplicial: key2 must have the shape of key, ",
            lambda: simplicial_attention(q, k, v, k2[:, :, 1:], v2),
        ),
        (
            ValueError,
            "simplicial: value2 must have the shape of value, ",
            lambda: simplicial_attention(q, k, v, k2, k2),
        ),
        (
            ValueError,
            "value2 is torch.float32",
            lambda: simplicial_attention(q, k, v, k2, v2.float()),
        ),
        (
            ValueError,
            "window must be a pair",
            lambda: simplicial_attention(q, k, v, k2, v2, window=3),
        ),
        (
            ValueError,
            "simplicial: window must be a positive integer; got 0",
            lambda: simplicial_attention(q, k, v, k2, v2, window=(3, 0)),
        ),
        (
            ValueError,
            "needs a head size divisible by 3; got 4",
            lambda: simplicial_attention(q, k, v, k2, v2, form="determinant"),
        ),
        (
            ValueError,
            "simplicial: form must be one of",
            lambda: simplicial_attention(q, k, v, k2, v2, form="sum"),
        ),
        (
            Unsupported,
            "window needs as many queries as keys; got 2 and 6",
            lambda: simplicial_attention(q[:, :, :2], k, v, k2, v2, window=(3, 3)),
        ),
        (
            Unsupported,
            "simplicial takes key-padding masks",
            lambda: simplicial_attention(q, k, v, k2, v2, attn_mask=torch.ones(6, 6).bool()),
        ),
        (
            ValueError,
            "taylor_simplicial: degree must be a positive integer; got 0",
            lambda: taylor_simplicial_attention(q, k, v, k2, v2, degree=0),
        ),
    ):
        with pytest.raises(error, match=message):
            call()


# --- the layer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        SimplicialAttention(24, 4, kv_heads=4, head_dim=6, window=(5, 3)),
        SimplicialAttention(24, 4, kv_heads=2, head_dim=6, window=(4, 9), form="determinant"),
        SimplicialAttention(20, 6, kv_heads=1, head_dim=4, value_dim=3, window=(40, 2), bias=True),
    ],
    ids=["windows", "determinant", "wider than the length"],
)
def test_it_keeps_the_promises_of_a_layer(layer):
    check_layer(layer)


def test_the_layer_is_its_projections_and_the_function():
    layer = SimplicialAttention(16, 2, kv_heads=2, head_dim=6, value_dim=5, window=(4, 3)).double()
    x = randn(2, 11, 16)
    q, k, v, k2, v2 = (
        (x @ p.weight.mT).unflatten(-1, (2, -1)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.k2_proj, layer.v2_proj)
    )
    out = loops(q, k, v, k2, v2, window=(4, 3), is_causal=True)
    same(layer(x), out.transpose(1, 2).flatten(2) @ layer.o_proj.weight.mT)


def test_the_cache_stops_growing_at_the_windows():
    layer = SimplicialAttention(16, 4, kv_heads=2, head_dim=4, value_dim=3, window=(7, 2))
    state, sizes = layer.state(3), []
    with torch.no_grad():
        for x in randn(3, 40, 16).float().split(1, 1):
            layer(x, state=state)
            sizes.append(state.nbytes)
    assert sizes == [3 * 2 * 7 * 4 * (min(n, 7) + min(n, 2)) for n in range(1, 41)]
    stored = sum(state[n].untyped_storage().nbytes() for n in ("key", "value", "key2", "value2"))
    assert stored == sizes[-1]
    assert state.length == 40
    assert layer.cost(3, 40).cache == layer.cost(3, 10**6).cache == sizes[-1]


def test_operations_of_the_layer_are_counted_exactly():
    layer = SimplicialAttention(16, 4, kv_heads=2, head_dim=6, window=(20, 5))
    x = randn(2, 90, 16).float()
    for is_causal in (True, False):
        counted = count_flops(lambda c=is_causal: layer(x, is_causal=c))
        assert layer.cost(2, 90, is_causal=is_causal).flops == counted


def test_with_a_state_it_is_always_causal():
    layer, x = SimplicialAttention(16, 2, kv_heads=1, head_dim=4, window=(4, 3)), randn(2, 9, 16)
    x = x.float()
    same(layer(x, state=layer.state(2), is_causal=False), layer(x), 1e-5)


def test_decoding_in_half_precision_sums_in_float32():
    """Thirty values of 200 times 200 are 1.2 million before they are divided."""
    layer = SimplicialAttention(8, 1, kv_heads=1, head_dim=8, window=(30, 2), bias=True)
    for proj in (layer.v_proj, layer.v2_proj):
        proj.weight.data.zero_()
        proj.bias.data.fill_(200.0)
    layer.o_proj.weight.data.copy_(0.01 * torch.eye(8))
    layer.o_proj.bias.data.zero_()
    with torch.no_grad():
        x = randn(1, 40, 8).half()
        out = layer.half()(x, state=layer.state())
    same(out.double(), torch.full_like(out, 400.0).double(), 2e-3)


def test_a_state_that_does_not_fit_is_refused():
    layer = SimplicialAttention(16, 2, kv_heads=1, head_dim=4, window=(4, 3))
    x = randn(3, 3, 16).float()
    with pytest.raises(TypeError, match=r"SimplicialAttention\.state"):
        layer(x, state=object())
    with pytest.raises(ValueError, match="the state holds 2 sequences, hidden has 3"):
        layer(x, state=layer.state(2))


def test_no_tokens_leave_nothing():
    layer = SimplicialAttention(16, 2, kv_heads=1, head_dim=4, window=(4, 3))
    state = layer.state()
    assert layer(torch.zeros(1, 0, 16), state=state).shape == (1, 0, 16)
    assert (state.length, state.nbytes) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "kv_heads must divide"),
        ({"window": (0, 3)}, "window must be a positive"),
        ({"window": 5}, "window must be a pair"),
        ({"form": "determinant"}, "divisible by 3; got 4"),
        ({"head_dim": 0}, "head_dim must be a positive"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    call = {"kv_heads": 1, "head_dim": 4, "window": (4, 3), **options}
    with pytest.raises(ValueError, match=message) as refusal:
        SimplicialAttention(16, 4, **call)
    assert str(refusal.value).startswith("SimplicialAttention")
