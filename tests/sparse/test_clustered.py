"""Clustered attention against its definition, its paper's proposition and perturbation bounds."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import padding_mask
from numattn.core.inputs import prepare
from numattn.engines.lift import LEAF
from numattn.sparse import clustered
from numattn.sparse.clustered import Clustered, ClusteredAttention, clustered_attention
from numattn.testing import Subject, make_qkv, reference, reference_weights
from numattn.testing.inputs import TOLERANCE

FORMS = pytest.mark.parametrize("improved", [False, True])


def hyperplanes(heads, dim, num_bits=64, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(heads, num_bits, dim + 1, generator=source, dtype=torch.float64)


def hashes_by_loop(rows, about, planes):
    """Signs of rows, hyperplanes laid about the mean of `about`."""
    mean = about.mean(0)
    spread = (about - mean).square().mean().sqrt()
    signs = []
    for row in rows:
        sides = [plane[:-1] @ (row - mean) + plane[-1] * spread for plane in planes]
        signs.append([1 if side >= 0 else -1 for side in sides])
    return signs


def nearest_by_loop(sign, centers, allowed):
    agree = [sum(a * b for a, b in zip(sign, center, strict=True)) for center in centers]
    return max(allowed, key=lambda c: (agree[c], -c))


def cluster_by_loop(signs, num_clusters, num_iterations):
    """Lloyd on lists of signs: (labels, centers of the last assignment)."""
    n, count = len(signs), min(num_clusters, len(signs))
    centers = [signs[c * n // count] for c in range(count)]
    for step in range(num_iterations):
        labels = [nearest_by_loop(sign, centers, range(count)) for sign in signs]
        if step + 1 == num_iterations:
            return labels, centers
        for c in range(count):
            votes = [sum(bits) for bits in zip(*members(signs, labels, c), strict=True)]
            votes = votes or [0] * len(centers[c])
            centers[c] = [
                (vote > 0) - (vote < 0) or old for vote, old in zip(votes, centers[c], strict=True)
            ]
    raise AssertionError


def members(rows, labels, c):
    return [row for row, label in zip(rows, labels, strict=True) if label == c]


def row_by_loop(q, mean, k, num_keys):
    """Weights of one row (Nk) and its log mass; num_keys = 0 is the plain form."""
    scale = k.shape[1] ** -0.5
    at_mean = (k @ mean * scale).tolist()
    mass = sum(math.exp(s) for s in at_mean)
    weights = [math.exp(s) / mass for s in at_mean]
    if not num_keys:
        center = sum(w * key for w, key in zip(weights, k, strict=True))
        return weights, math.log(mass) + scale * ((q - mean) @ center).item()
    top = sorted(range(len(k)), key=lambda j: -at_mean[j])[:num_keys]
    share = sum(weights[j] for j in top)
    own = {j: math.exp((q @ k[j]).item() * scale) for j in top}
    near = sum(own.values())
    for j in top:
        weights[j] = share * own[j] / near
    return weights, math.log(near / share)


def head_by_loop(q, k, planes, *, num_clusters, num_keys, num_iterations, past=None):
    """Weights (Nq, Nk) and log masses of the rows of q, clusters being those of past or of q."""
    about = q if past is None else past
    hashes = hashes_by_loop(about, about, planes)
    labels, centers = cluster_by_loop(hashes, num_clusters, num_iterations)
    means = {c: torch.stack(members(about, labels, c)).mean(0) for c in set(labels)}
    rows = []
    for i, sign in enumerate(hashes_by_loop(q, about, planes)):
        c = labels[i] if past is None else nearest_by_loop(sign, centers, sorted(means))
        rows.append(row_by_loop(q[i], means[c], k, num_keys))
    return torch.tensor([w for w, _ in rows], dtype=q.dtype), torch.tensor([m for _, m in rows])


@FORMS
@pytest.mark.parametrize("pad", [None, "left", "right"])
def test_equals_the_definition(improved, pad):
    q, k, v = make_qkv(30, heads=2, group=2, keys=30)
    planes = hyperplanes(2, 8, num_bits=6)
    options = {"num_clusters": 5, "num_keys": 4, "num_iterations": 3}
    mask = None if pad is None else padding_mask(torch.tensor([21, 30]), side=pad)
    keep = torch.ones(2, 30, dtype=torch.bool) if mask is None else mask[:, 0, 0]
    call = {**options, "improved": improved, "num_bits": 6, "projection": planes}
    out = clustered_attention(q, k, v, attn_mask=mask, enable_gqa=True, **call)
    options["num_keys"] *= improved
    for b, h in itertools.product(range(2), range(4)):
        x, y, z = q[b, h, keep[b]], k[b, h // 2, keep[b]], v[b, h // 2, keep[b]]
        weights, _ = head_by_loop(x, y, planes[h // 2], **options)
        torch.testing.assert_close(out[b, h, keep[b]], weights @ z)


@FORMS
def test_later_rows_attend_through_earlier_clusters(improved):
    """A causal call by the definition: exact among the last rows, merged with the block by mass."""
    q, k, v = make_qkv(LEAF + 9, batch=1, heads=1, group=2, head_dim=4)
    planes = hyperplanes(1, 4, num_bits=5)
    options = {"num_clusters": 7, "num_keys": 6, "num_iterations": 2}
    call = {**options, "improved": improved, "num_bits": 5, "projection": planes}
    out = clustered_attention(q, k, v, is_causal=True, enable_gqa=True, **call)
    exact = reference(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, :, :LEAF], exact[:, :, :LEAF])
    options["num_keys"] *= improved
    for h in range(2):
        x, y = q[0, h], k[0, 0]
        far, mass = head_by_loop(x[LEAF:], y[:LEAF], planes[0], past=x[:LEAF], **options)
        logits = (x[LEAF:] @ y[LEAF:].T / 2).masked_fill(
            torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf
        )
        weights = torch.cat([far * mass.exp()[:, None], logits.exp()], 1)
        want = weights / weights.sum(1, keepdim=True) @ v[0, 0]
        torch.testing.assert_close(out[0, h, LEAF:], want)


def test_mass_of_the_plain_form_is_a_tangent_from_below():
    q, k, v = make_qkv(300, batch=1, heads=2)
    call = clustered._Call(20, 0, 3, hyperplanes(2, 8))
    past = prepare(Clustered.info, q[:, :, :200], k[:, :, :200], v[:, :, :200], *[None] * 3, False)
    later = q[:, :, 200:]
    _, mass = clustered._block(call, later, past).finalize()
    true = (later @ past.k.mT * past.scale).logsumexp(-1)
    assert (mass <= true + 1e-12).all()
    mean = clustered._cluster(call, past).mean
    label = torch.arange(20).expand(1, 2, -1)
    _, mass = clustered._tangent(mean, label, mean, past)
    torch.testing.assert_close(mass, (mean @ past.k.mT * past.scale).logsumexp(-1))


@FORMS
def test_a_cluster_for_every_query_is_exact(improved):
    q, k, v = make_qkv(40, keys=55, group=2)
    for num_clusters in (40, 77):
        call = {"num_clusters": num_clusters, "num_keys": 7, "projection": hyperplanes(3, 8)}
        out = clustered_attention(q, k, v, improved=improved, enable_gqa=True, **call)
        torch.testing.assert_close(out, reference(q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_clusters", [1, 5, 40])
def test_all_keys_are_exact_whatever_the_clusters(is_causal, num_clusters):
    q, k, v = make_qkv(LEAF + 40, batch=1, heads=2)
    method = Clustered(num_clusters=num_clusters, num_keys=LEAF + 40, num_bits=3)
    out = Subject(method)(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))


def test_fewer_keys_than_asked_for():
    """Padded keys are chosen by no cluster, though their logits are the largest."""
    q, k, v = make_qkv(20, keys=12)
    k[:, :, 5:] *= 100
    mask = padding_mask(torch.tensor([5, 3]), 12)
    out = Subject(Clustered(num_clusters=3, num_keys=8))(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, reference(q, k, v, attn_mask=mask))


@FORMS
def test_clusters_of_equal_queries_are_exact(improved):
    q, k, v = make_qkv(5, keys=60)
    q = q.repeat_interleave(8, 2)
    call = {"num_clusters": 5, "num_keys": 6, "projection": hyperplanes(3, 8)}
    out = clustered_attention(q, k, v, improved=improved, **call)
    torch.testing.assert_close(out, reference(q, k, v))


def errors(q, k, **options):
    """Distance of the weights of every row from the softmax, in the 1-norm."""
    exact = reference_weights(q, k)
    return (Subject(Clustered(**options)).weights(q, k) - exact).abs().sum(-1)


def test_improved_is_never_further_from_the_softmax():
    """Proposition of the paper, row by row."""
    for seed, size in itertools.product(range(3), (0.5, 1.0, 3.0)):
        q, k, _ = make_qkv(60, keys=50, seed=seed)
        plain = errors(size * q, k, num_clusters=6, improved=False)
        for num_keys in (1, 5, 20, 49):
            better = errors(size * q, k, num_clusters=6, num_keys=num_keys)
            assert (better <= plain + 1e-12).all()


@FORMS
def test_total_variation_within_the_bound(improved):
    """TV <= tanh(r / 4), r the range of the difference of the logits of row and mean."""
    for seed in range(3):
        q, k, v = make_qkv(60, keys=50, seed=seed)
        planes = hyperplanes(3, 8, seed=seed)
        call = clustered._Call(9, 0, 5, planes)
        clusters = clustered._cluster(call, prepare(Clustered.info, q, k, v, *[None] * 3, False))
        mean = clustered.take(clusters.mean, clusters.label)
        difference = (q - mean) @ k.mT * 8**-0.5
        bound = torch.tanh((difference.amax(-1) - difference.amin(-1)) / 4)
        eye = torch.eye(50, dtype=k.dtype).expand(2, 3, -1, -1)
        options = {"num_clusters": 9, "num_keys": 6, "projection": planes}
        weights = clustered_attention(q, k, eye, improved=improved, **options)
        distance = (weights - reference_weights(q, k)).abs().sum(-1) / 2
        assert (distance <= bound + 1e-12).all()


def test_lloyd_never_loses_agreement():
    signs = torch.randn(2, 3, 200, 12, generator=torch.Generator().manual_seed(0)).sign()
    exists = torch.ones(2, 3, 200, dtype=torch.bool)
    before = torch.full((2, 3), -torch.inf)
    for num_iterations in range(1, 9):
        label, centers = clustered._lloyd(signs, exists, 16, num_iterations)
        assert ((label >= 0) & (label < 16)).all()
        agreement = (signs * clustered.take(centers, label)).sum((-1, -2))
        assert (agreement >= before).all()
        before = agreement


@FORMS
@pytest.mark.parametrize("is_causal", [False, True])
def test_equal_queries_leave_clusters_empty(improved, is_causal):
    """All go to one cluster, and the empty ones neither reach an output nor a gradient."""
    q, k, v = make_qkv(LEAF + 40, batch=1, heads=2)
    q = q[:, :, :1].expand_as(q).contiguous()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = Subject(Clustered(16, num_keys=5, improved=improved))(*inputs, is_causal=is_causal)
    torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


@FORMS
def test_every_row_has_a_cluster_with_members(improved):
    q, k, v = make_qkv(90, group=2)
    call = clustered._Call(40, 0, 5, hyperplanes(3, 8, num_bits=4))  # more clusters than hashes
    x = prepare(Clustered.info, q, k, v, None, False, None, True)
    clusters = clustered._cluster(call, x)
    counts = clustered.group_counts(clusters.label, 40, q.dtype)
    assert clusters.empty.any()
    assert torch.equal(clusters.empty, counts == 0)
    assert torch.equal(clusters.empty, clusters.empty.sort(-1).values), "empty ones come last"
    later = clustered._nearest(clusters.hash(10 * q), clusters.centers, clusters.empty)
    assert not clusters.empty.gather(2, later).any()
    again = clustered._nearest(clusters.hash(q), clusters.centers, clusters.empty)
    assert torch.equal(again, clusters.label), "a query comes to its own cluster again"


def test_nobody_joins_an_empty_cluster():
    signs = make_qkv(10, batch=1, heads=1)[0].sign()
    centers = torch.stack([-signs[0, 0, 0], signs[0, 0, 0], signs[0, 0, 1]])[None, None]
    empty = torch.tensor([False, True, False])[None, None]
    want = 2 * (signs @ centers[..., 2, :, None] > signs @ centers[..., 0, :, None])[..., 0]
    assert torch.equal(clustered._nearest(signs, centers, empty), want)


@FORMS
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sequence_of_nothing_but_padding(improved, is_causal):
    """Gives zeros beside one that is not empty, and finite gradients, through lifted blocks too."""
    inputs = [x.requires_grad_() for x in make_qkv(LEAF + 20, heads=1)]
    mask = padding_mask(torch.tensor([0, LEAF + 20]))
    method = Clustered(4, num_keys=3, improved=improved)
    out = Subject(method)(*inputs, attn_mask=mask, is_causal=is_causal)
    assert not out[0].any()
    assert out[1].isfinite().all()
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_hashes_do_not_see_a_common_shift_or_size():
    q, k, v = make_qkv(60)
    planes = hyperplanes(3, 8)
    call = clustered._Call(8, 0, 5, planes)
    labels = []
    for x in (q, 5 * q, q + 3 * q[:, :, :1]):
        x = prepare(Clustered.info, x, k, v, *[None] * 3, False)
        labels.append(clustered._cluster(call, x).label)
    assert torch.equal(labels[0], labels[1])
    assert torch.equal(labels[0], labels[2])


def test_single_precision_where_the_top_keys_hold_nearly_all():
    q, k, v = make_qkv(60, keys=200, batch=1)
    q, k = 5 * q, 2 * k  # the 32 heaviest of 200 keys hold nearly all of the mass
    top = reference_weights(q, k).topk(32, -1).values.sum(-1)
    assert (1 - top).median() < 1e-6
    options = {"num_clusters": 60, "projection": hyperplanes(3, 8)}
    want = clustered_attention(q, k, v, **options)
    out = clustered_attention(q.float(), k.float(), v.float(), **options)
    assert (out - want).abs().max() <= TOLERANCE[torch.float32] * v.abs().max()
    ones = clustered_attention(q.float(), k.float(), torch.ones_like(v).float(), **options)
    assert (ones - 1).abs().max() <= TOLERANCE[torch.float32]


@FORMS
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_do_not_show(monkeypatch, improved, is_causal):
    q, k, v = make_qkv(LEAF + 30, batch=2, heads=2, group=2)
    mask = padding_mask(torch.tensor([LEAF + 30, LEAF + 11]))
    method = Clustered(9, num_keys=11, improved=improved)
    call = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": True}
    whole = Subject(method)(q, k, v, **call)
    monkeypatch.setattr(clustered, "tile_elements", lambda device: 1)
    monkeypatch.setattr(clustered, "_LEAST_ROWS", 2)
    monkeypatch.setattr(clustered, "_HEIGHT", 5)
    torch.testing.assert_close(Subject(method)(q, k, v, **call), whole)


def test_no_tensor_of_clusters_by_keys():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            parts = out if isinstance(out, (tuple, list)) else [out]
            sizes = [x.numel() for x in parts if isinstance(x, torch.Tensor)]
            self.numel = max(self.numel, *sizes, 0)
            return out

    n, clusters = 8192, 1024
    q, k, v = make_qkv(n, batch=1, heads=1, head_dim=4, value_dim=4, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with Largest() as largest:
        method = Clustered(clusters, num_keys=8, num_iterations=1, num_bits=4)
        Subject(method)(*leaves).sum().backward()
    assert largest.numel <= clusters * n // 4


def test_modules_draw_from_their_generator():
    def module(seed):
        source = torch.Generator().manual_seed(seed)
        return ClusteredAttention(num_heads=2, head_dim=8, num_bits=5, generator=source)

    one, other = module(0), module(1)
    assert one.projection.shape == (2, 5, 9)
    assert torch.equal(one.projection, module(0).projection)
    assert not torch.equal(one.projection, other.projection)
    other.redraw(torch.Generator().manual_seed(0))
    assert torch.equal(one.projection, other.projection)


@pytest.mark.parametrize(
    "option", [{"num_keys": 0}, {"num_bits": -1}, {"num_iterations": 0}, {"improved": 1}]
)
def test_bad_options_are_refused(option):
    q, k, v = make_qkv(6)
    (name,) = option
    for call in (lambda: Clustered(**option), lambda: clustered_attention(q, k, v, **option)):
        with pytest.raises(ValueError, match=rf"clustered: {name}"):
            call()


def test_a_projection_of_another_shape_is_refused():
    q, k, v = make_qkv(6)
    for planes in (hyperplanes(3, 7), hyperplanes(2, 8), hyperplanes(3, 8, num_bits=63)):
        with pytest.raises(ValueError, match=r"clustered: projection .*\(3, 64, 9\)"):
            clustered_attention(q, k, v, projection=planes)
