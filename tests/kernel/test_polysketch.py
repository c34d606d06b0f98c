"""Sketched polynomial attention: its definition, and the statistics of its sketches.

Monte Carlo means are held to four standard errors, with fixed seeds.
"""

import pytest
import torch

from numattn.kernel import polysketch
from numattn.kernel.polynomial import polynomial_attention
from numattn.kernel.polysketch import PolySketch, polysketch_attention
from numattn.testing import check, make_qkv

F64 = torch.float64
KINDS = ("gaussian", "srht", "tensorsketch")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(options, heads=3, dim=8, seed=0):
    leaves, nodes = options.draw(heads, dim, generator(seed), torch.device("cpu"))
    return {"leaves": leaves, "nodes": nodes}


def half(x, leaves, nodes, kind):
    """Sketch of half of the degree by the definition, x (n, D), one head."""
    parts, r = [x @ leaf for leaf in leaves], leaves.shape[-1]
    if kind == "tensorsketch":
        out = parts[0]
        for part in parts[1:]:  # circular convolution, term by term
            out = sum(torch.roll(part, s, -1) * out[:, s : s + 1] for s in range(r))
        return out
    if len(parts) == 4:
        parts = [parts[0] * parts[1] / r**0.5 @ nodes[0], parts[2] * parts[3] / r**0.5 @ nodes[1]]
    return parts[0] * parts[1] / r**0.5


def by_definition(q, k, v, options, tensors, is_causal=False):
    group, out = q.shape[1] // k.shape[1], torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // group
            sketch = [tensors[n][g] for n in ("leaves", "nodes")]
            a, c = (half(x, *sketch, options.kind) for x in (q[b, h], k[b, g]))
            w = (a @ c.T).square()
            if is_causal:
                block = torch.arange(q.shape[2]) // options.block_size
                same = block[:, None] == block
                w = torch.where(same, (q[b, h] @ k[b, g].T) ** options.degree, w).tril()
            out[b, h] = w @ v[b, g] / w.sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("degree", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_definition(kind, degree, is_causal):
    q, k, v = make_qkv(37, group=2)
    options = PolySketch(6, degree, kind, block_size=8)
    tensors = drawn(options)
    call = {**options.options(), **tensors, "is_causal": is_causal, "enable_gqa": True}
    out = polysketch_attention(q, k, v, **call)
    want = by_definition(q, k, v, options, tensors, is_causal)
    torch.testing.assert_close(out, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("degree", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_degree_is_unbiased(kind, degree):
    q, k, _ = make_qkv(4, batch=1, heads=1)
    q, k = (
        q[0, 0] / q[0, 0].norm(dim=-1, keepdim=True),
        k[0, 0] / k[0, 0].norm(dim=-1, keepdim=True),
    )
    options = PolySketch(16, degree, kind)
    tensors = drawn(options, heads=4000)
    mine = torch.stack(
        [
            half(q, leaf, node, kind) @ half(k, leaf, node, kind).T
            for leaf, node in zip(tensors["leaves"], tensors["nodes"], strict=True)
        ]
    )
    error = mine.std(0) / len(mine) ** 0.5
    assert ((mine.mean(0) - (q @ k.T) ** (degree // 2)).abs() <= 4 * error).all()


@pytest.mark.parametrize("kind", KINDS)
def test_features_multiply_to_squares_of_sketches(kind):
    q, k, _ = make_qkv(9)
    options = PolySketch(7, 4, kind)
    sketch = polysketch._Sketch(*drawn(options).values())
    phi, psi = (polysketch._features(options, sketch, x) for x in (q, k))
    assert phi.shape[-1] == options.num_features == 28
    a, b = (polysketch._half_sketch(kind, sketch, x) for x in (q, k))
    torch.testing.assert_close(phi @ psi.mT, (a @ b.mT).square(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degree", [4, 8])
def test_one_block_is_polynomial_attention(degree):
    q, k, v = make_qkv(50, group=2)
    call = {"degree": degree, "is_causal": True, "enable_gqa": True}
    out = polysketch_attention(q, k, v, sketch_size=3, block_size=50, **call)
    torch.testing.assert_close(out, polynomial_attention(q, k, v, **call), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gaussian", "srht", "tensorsketch"])
def test_larger_sketches_are_nearer_to_polynomial_attention(kind):
    """The relative error of a sketch falls as r ** -0.5: by more than 2 over a factor of 16."""
    q, k, v = make_qkv(40, batch=1, head_dim=3)
    want = polynomial_attention(q, k, v, degree=4)
    medians = []
    for r in (8, 128):
        outs = [
            polysketch_attention(q, k, v, sketch_size=r, kind=kind, generator=generator(s))
            for s in range(9)
        ]
        medians.append(sorted((out - want).norm().item() for out in outs)[4])
    assert medians[1] < medians[0] / 2


def test_columns_of_a_hadamard_matrix():
    """Different ones are orthogonal where D is a power of two, and all are used before a repeat."""
    leaves = polysketch._matrices("srht", (2, 8, 12), generator(), torch.device("cpu"))
    gram = leaves.mT @ leaves
    assert torch.equal(leaves.abs(), torch.ones_like(leaves))
    torch.testing.assert_close(gram[:, :8, :8], 8 * torch.eye(8, dtype=F64).expand(2, 8, 8))


def test_a_count_sketch_puts_every_entry_in_one_place():
    leaves = polysketch._matrices("tensorsketch", (3, 20, 5), generator(), torch.device("cpu"))
    assert ((leaves != 0).sum(-1) == 1).all()
    assert torch.equal(leaves.abs().sum(-1), torch.ones(3, 20, dtype=F64))


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_prefill_after_many_steps(kind):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        q, k, v = make_qkv(2000, batch=1, heads=1, group=2, dtype=dtype)
        options = PolySketch(6, kind=kind, block_size=64)
        tensors = drawn(options, heads=1)
        want = options(q, k, v, is_causal=True, enable_gqa=True, **tensors)
        state = options.state(k[:, :, :1], v[:, :, :1], enable_gqa=True, **tensors)
        for t in range(1, 2000):
            state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, -1:])
        torch.testing.assert_close(out, want[:, :, -1:], rtol=tolerance, atol=tolerance)


def test_a_future_key_changes_nothing_before_it():
    q, k, v = make_qkv(300, batch=1)
    options = PolySketch(6, block_size=64)
    call = {"is_causal": True, **drawn(options)}
    before = options(q, k, v, **call)
    k = k.clone()
    k[:, :, 200] *= 100
    after = options(q, k, v, **call)
    assert (after - before)[:, :, :200].abs().max() <= 1e-12
    assert (after - before)[:, :, 200:].abs().max() > 1e-6


def test_scale_cancels():
    q, k, v = make_qkv(20)
    tensors = drawn(PolySketch(6))
    call = {"sketch_size": 6, **tensors}
    out = polysketch_attention(q, k, v, scale=1e4, **call)
    torch.testing.assert_close(out, polysketch_attention(q, k, v, scale=-1e-4, **call))
    assert not polysketch_attention(q, k, v, scale=0.0, **call).any()


@pytest.mark.parametrize(
    "method",
    [
        PolySketch(8, kind="srht"),
        PolySketch(8, kind="tensorsketch"),
        PolySketch(8, degree=8),
        PolySketch(8, block_size=16),
    ],
    ids=str,
)
def test_other_options_keep_the_contract(method):
    check(method)


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"degree": 6}, "degree"),
        ({"kind": "fourier"}, "kind"),
        ({"block_size": 0}, "block_size"),
        ({"sketch_size": 0}, "sketch_size"),
    ],
)
def test_bad_options_are_refused(options, mention):
    with pytest.raises(ValueError, match=rf"polysketch: {mention}"):
        PolySketch(**options)


def test_tensors_that_do_not_fit_are_refused():
    q, k, v = make_qkv(5)
    tensors = drawn(PolySketch(6))
    with pytest.raises(ValueError, match=r"polysketch: leaves must have shape"):
        polysketch_attention(q, k, v, sketch_size=7, **tensors)
    with pytest.raises(ValueError, match=r"polysketch.*nodes missing"):
        polysketch_attention(q, k, v, sketch_size=6, leaves=tensors["leaves"])
