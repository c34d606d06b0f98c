"""Multipole attention against loops, its exact limits, and the order of its error."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import Unsupported, padding_mask, testing
from numattn.core.cost import Shape
from numattn.core.linalg import kmeans
from numattn.engines.scores import group_statistics, log_bennett
from numattn.sparse import multipole
from numattn.sparse.multipole import Multipole, MultipoleState, multipole_attention
from numattn.testing import make_qkv, reference

SMALL = {"num_near": 24, "cluster_size": 4, "block_size": 16, "query_tile": 4}
N = 42


class Cluster:
    """A set of keys and its far field, from the definition."""

    def __init__(self, k, v, index, block, num_axes=1):
        self.index, self.block = index, block
        self.n, self.c, self.u = len(index), k[index].mean(0), v[index].mean(0)
        dk, dv = k[index] - self.c, v[index] - self.u
        label = torch.zeros(1, 1, self.n, dtype=torch.long)
        found = group_statistics(k[index][None, None], label, 1, num_axes=num_axes)
        self.axes = found.axes[0, 0, 0].unbind(0)
        self.moments = [(dv * (dk @ g)[:, None]).mean(0) for g in self.axes]
        self.along = [(dk @ g).square().mean() for g in self.axes]
        self.left = dk.square().sum(1).mean() - sum(self.along)
        self.radius = dk.norm(dim=1).max()

    def score(self, q, scale):
        return math.log(self.n) + scale * self.c @ q

    def log_mass(self, q, scale, order):
        a = self.score(q, scale)
        if order < 2:
            return a
        along = [(q @ g).square() for g in self.axes]
        rest = (q @ q - sum(along)) * self.left / max(len(q) - len(along), 1)
        variance = sum(a * b for a, b in zip(self.along, along, strict=True))
        variance = scale**2 * (variance + rest)
        bound = log_bennett(variance, abs(scale) * q.norm() * self.radius)
        return a + min(variance / 2, bound, torch.tensor(1.0))

    def mean_value(self, q, scale, order):
        if not order:
            return self.u
        gains = [(q @ g) * moment for g, moment in zip(self.axes, self.moments, strict=True)]
        return self.u + scale * sum(gains)


def clusters_of(k, v, block, options):
    """Clusters of one block of one head."""
    size = options.block_size
    index = torch.arange(block * size, min((block + 1) * size, len(k)))
    if options.clusters == "contiguous":
        label = (index - block * size) // options.cluster_size
    else:
        label = kmeans(k[index][None, None], options.per_block, options.num_iterations)[0, 0]
    parts = [index[label == c] for c in range(options.per_block)]
    return [Cluster(k, v, part, block, options.num_axes) for part in parts if len(part)]


def mean_votes(groups, queries, scale):
    counts = torch.tensor([g.n for g in groups], dtype=torch.float64)
    scores = counts.log() + scale * queries @ torch.stack([g.c for g in groups]).T
    return scores.softmax(-1).mean(0)


def near_and_far(cells, whole, queries, options, scale):
    """Numbers of the near keys, and the far clusters, as `queries` choose them."""
    others = []
    if options.levels == 2:
        votes = mean_votes(whole, queries, scale)
        opened = votes.argsort(descending=True, stable=True)[: options.opened].tolist()
        others = [block for b, block in enumerate(whole) if b not in opened]
        cells = [cell for cell in cells if cell.block in opened]
    votes = mean_votes(cells + others, queries, scale)[: len(cells)]
    near, far, room = [torch.empty(0, dtype=torch.long)], list(others), options.num_near
    for c in votes.argsort(descending=True, stable=True).tolist():
        cell = cells[c]
        if cell.n <= room:
            near.append(cell.index)
            room -= cell.n
        else:
            far.append(cell)
            if cell.n <= options.num_near:
                room = 0
    return torch.cat(near), far


def definition(q, k, v, options, is_causal, scale=None):
    """The output, head by head, tile by tile, row by row."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group, height, size = q.shape[1] // k.shape[1], options.query_tile, options.block_size
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)

    @cache
    def block_of(b, h, block):
        index = torch.arange(block * size, min((block + 1) * size, k.shape[2]))
        whole = Cluster(k[b, h], v[b, h], index, block, options.num_axes)
        return clusters_of(k[b, h], v[b, h], block, options), whole

    for b, h in torch.cartesian_prod(*map(torch.arange, q.shape[:2])).tolist():
        qh, kh, vh = q[b, h], k[b, h // group], v[b, h // group]
        for i in range(len(qh)):
            t0 = i // height * height
            blocks = t0 // size if is_causal else -(-len(kh) // size)
            keys, far = torch.empty(0, dtype=torch.long), []
            if blocks:
                known = [block_of(b, h // group, block) for block in range(blocks)]
                cells = [cell for cells, _ in known for cell in cells]
                first = t0 - height if is_causal and height > 1 else t0
                queries = qh[first : first + height]
                keys, far = near_and_far(cells, [w for _, w in known], queries, options, scale)
            if is_causal:
                keys = torch.cat([keys, torch.arange(i // size * size, i + 1)])
            logs = [scale * kh[keys] @ qh[i]]
            logs += [cell.log_mass(qh[i], scale, options.order)[None] for cell in far]
            values = [vh[keys]]
            values += [cell.mean_value(qh[i], scale, options.order)[None] for cell in far]
            out[b, h, i] = torch.cat(logs).softmax(0) @ torch.cat(values)
    return out


CASES = [
    {},
    {"clusters": "contiguous"},
    {"query_tile": 1},
    {"query_tile": 16},
    {"num_near": 3},
    {"order": 1},
    {"order": 2},
    {"order": 1, "num_axes": 3},
    {"order": 2, "num_axes": 3},
    {"levels": 2, "num_near": 7, "order": 2, "num_axes": 2},
    {"levels": 2, "num_near": 7},
    {"levels": 2, "num_near": 7, "order": 2, "query_tile": 1},
    {"cluster_size": 5, "num_iterations": 1},
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_is_its_definition(case, is_causal):
    q, k, v = make_qkv(N, batch=1, heads=2)
    options = Multipole(**{**SMALL, **case})
    want = definition(q, k, v, options, is_causal, scale=0.6)
    torch.testing.assert_close(options(q, k, v, is_causal=is_causal, scale=0.6), want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_query_head_of_a_group_chooses_for_itself(is_causal):
    q, k, v = make_qkv(N, batch=2, heads=1, group=3)
    options = Multipole(**SMALL)
    out = options(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out, definition(q, k, v, options, is_causal))


def test_keys_of_their_own_length_and_a_negative_scale():
    q, k, v = make_qkv(13, keys=N, batch=1, heads=2)
    options = Multipole(**SMALL, order=2)
    out = options(q, k, v, scale=-0.4)
    torch.testing.assert_close(out, definition(q, k, v, options, False, scale=-0.4))


@pytest.mark.parametrize("is_causal", [False, True])
def test_small_tiles_change_nothing(monkeypatch, is_causal):
    """Heads and tiles are computed some at a time."""
    q, k, v = make_qkv(N, group=2)
    for levels in (1, 2):
        options = Multipole(**{**SMALL, "num_near": 7}, levels=levels)
        want = options(q, k, v, is_causal=is_causal, enable_gqa=True)
        for elements in (1, 700):
            monkeypatch.setattr(multipole, "tile_elements", lambda device, n=elements: n)
            found = options(q, k, v, is_causal=is_causal, enable_gqa=True)
            torch.testing.assert_close(found, want)
        monkeypatch.undo()


# --- exact limits ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("clusters", ["kmeans", "contiguous"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_clusters_of_one_key_are_exact(order, clusters, is_causal):
    q, k, v = make_qkv(N)
    options = {**SMALL, "cluster_size": 1, "num_near": 1, "clusters": clusters, "order": order}
    out = multipole_attention(q, k, v, **options, is_causal=is_causal)
    torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_everything_near_is_exact(levels, is_causal):
    q, k, v = make_qkv(N)
    options = {**SMALL, "num_near": N, "levels": levels}
    out = multipole_attention(q, k, v, **options, is_causal=is_causal)
    torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("clusters", ["kmeans", "contiguous"])
def test_clusters_of_equal_keys_are_exact(order, clusters):
    """Whatever their values; k-means meets fewer different keys than clusters."""
    q, k, v = make_qkv(N)
    k = k[:, :, ::4].repeat_interleave(4, 2)[:, :, :N]
    options = {**SMALL, "num_near": 1, "cluster_size": 2, "clusters": clusters, "order": order}
    for is_causal in (False, True):
        out = multipole_attention(q, k, v, **options, is_causal=is_causal)
        torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))


def test_two_levels_with_every_block_opened_are_one():
    q, k, v = make_qkv(N)
    options = Multipole(**SMALL, levels=2, order=2)
    assert options.opened >= math.ceil(N / 16)
    for is_causal in (False, True):
        one = replace(options, levels=1)(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(options(q, k, v, is_causal=is_causal), one)
    assert replace(options, num_near=7).opened < math.ceil(N / 16)


def test_empty_clusters_weigh_nothing():
    """Fewer keys than clusters."""
    q, k, v = make_qkv(9, keys=5)
    out = multipole_attention(q, k, v, num_near=1, block_size=64, cluster_size=4)
    torch.testing.assert_close(out, reference(q, k, v))


# --- the order of the error -----------------------------------------------------------------


def slopes(order, values):
    """How the error falls when the clusters shrink: d log error / d log eps, from halvings."""
    source = torch.Generator().manual_seed(3)

    def randn(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    q, c, g = randn(1, 1, 20, 6), randn(16, 1, 6), randn(16, 1, 6)
    along = randn(16, 4, 1)
    own, free, push = randn(16, 1, 3), randn(16, 4, 3), randn(6, 3)
    errors = []
    for eps in (2.0**-p for p in range(4, 9)):
        k = c + eps * along * g / g.norm(dim=-1, keepdim=True)
        v = {"own": own.expand(16, 4, 3), "free": free, "smooth": k @ push}[values]
        k, v = (x.reshape(1, 1, 64, -1) for x in (k, v))
        out = multipole_attention(
            q, k, v, num_near=1, block_size=64, cluster_size=4, clusters="contiguous", order=order
        )
        errors.append((out - reference(q, k, v)).norm().item())
    return [math.log2(a / b) for a, b in pairwise(errors)]


@pytest.mark.parametrize(
    ("order", "values", "slope"),
    [
        # sum e^x v = n (u + E[x v] + E[x^2 v] / 2 + ...), with x = O(eps): order 0 leaves out
        # E[x v], which is O(eps) for values of their own and O(eps^2) for smooth ones,
        (0, "free", 1),
        (0, "smooth", 2),
        # order 1 leaves out E[x^2] / 2, in the mass alone if a cluster has one value;
        (1, "free", 2),
        (0, "own", 2),
        (1, "own", 2),
        # order 2 leaves out E[x^3] / 6 of the mass, and Cov(x^2, v) / 2.
        (2, "own", 3),
        (2, "smooth", 3),
        (2, "free", 2),
    ],
)
def test_order_of_the_error_on_clusters_that_shrink(order, values, slope):
    assert all(abs(s - slope) < 0.3 for s in slopes(order, values)[-2:])


@pytest.mark.parametrize("num_axes", [1, 3, 20])
def test_moments_are_those_of_the_members(num_axes):
    _, k, v = make_qkv(40, heads=2)
    options = Multipole(block_size=40, cluster_size=8, query_tile=4, order=2, num_axes=num_axes)
    num_axes = min(num_axes, 8)
    label = torch.arange(40).div(8, rounding_mode="floor").expand(2, 2, 40)
    cells = multipole._moments(k, v, label, 5, options, None)
    for b in range(2):
        for h in range(2):
            for c in range(5):
                cell = Cluster(k[b, h], v[b, h], torch.arange(8 * c, 8 * c + 8), 0, num_axes)
                own = (cell.radius, *cell.along, cell.left)
                want = [torch.tensor([8.0]), cell.c, cell.u, *cell.axes, *cell.moments]
                want = torch.cat([*want, torch.stack(own)]).double()
                torch.testing.assert_close(cells[b, h, c], want)


def test_enough_axes_are_the_whole_second_moment():
    """Eight keys span seven directions: nothing is left, and order 1 has the whole cross moment."""
    q, k, v = make_qkv(8, batch=1, heads=1)
    cell = Cluster(k[0, 0], v[0, 0], torch.arange(8), 0, num_axes=7)
    dk, dv = k[0, 0] - cell.c, v[0, 0] - cell.u
    assert cell.left < 1e-12
    for query in q[0, 0]:
        want = cell.u + 0.3 * (dv * (dk @ query)[:, None]).mean(0)
        torch.testing.assert_close(cell.mean_value(query, 0.3, 1), want)


# --- orders by head -------------------------------------------------------------------------


@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_key_head_has_the_order_that_is_given(is_causal, num_axes):
    q, k, v = make_qkv(N)
    auto = Multipole(**{**SMALL, "num_near": 8}, order="auto", num_axes=num_axes)
    out = auto(q, k, v, is_causal=is_causal, orders=torch.tensor([0, 1, 2]))
    for h in range(3):
        alone = replace(auto, order=h)(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(out[:, h], alone[:, h])
    mixed = torch.tensor([[0, 1, 2], [2, 0, 1]])
    out = auto(q, k, v, is_causal=is_causal, orders=mixed)
    alone = replace(auto, order=2)(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(out[1, 0], alone[1, 0])


def test_found_orders_are_of_least_error_on_the_pilots():
    """With as many queries as pilots, each by itself, every query is a pilot."""
    q, k, v = make_qkv(16, keys=N, heads=3, group=2)
    auto = Multipole(**{**SMALL, "num_near": 8, "query_tile": 1}, order="auto")
    orders = auto.fit(q, k, v, enable_gqa=True)["orders"]
    want = reference(q, k, v)
    errors = []
    for order in range(3):
        out = replace(auto, order=order)(q, k, v, enable_gqa=True)
        errors.append((out - want).square().unflatten(1, (3, 2)).sum((2, 3, 4)))
    assert torch.equal(orders, torch.stack(errors).argmin(0))
    found = auto(q, k, v, enable_gqa=True)
    torch.testing.assert_close(found, auto(q, k, v, enable_gqa=True, orders=orders))


def test_orders_are_refused_where_they_mean_nothing():
    q, k, v = make_qkv(N)
    with pytest.raises(ValueError, match="order='auto' only"):
        multipole_attention(q, k, v, order=1, orders=torch.zeros(3, dtype=torch.long))
    with pytest.raises(Unsupported, match="orders"):
        multipole_attention(q, k, v, order="auto", is_causal=True)
    with pytest.raises(Unsupported, match="orders"):
        Multipole(order="auto").state(k, v)
    for wrong in (torch.zeros(2, dtype=torch.long), torch.zeros(3)):
        with pytest.raises(ValueError, match="orders must be integers"):
            multipole_attention(q, k, v, order="auto", orders=wrong)
    with pytest.raises(ValueError, match="pass value"):
        Multipole(order="auto").fit(q, k)
    assert Multipole(order=2).fit(q, k) == {}


def test_module_keeps_calibrated_orders():
    q, k, v = make_qkv(N)
    auto = Multipole(**{**SMALL, "num_near": 8}, order="auto")
    module = auto.module(num_heads=3, head_dim=8)
    plain = replace(auto, order=0)(q, k, v, is_causal=True)
    torch.testing.assert_close(module(q, k, v, is_causal=True), plain)
    module.orders.copy_(torch.tensor([2, 1, 0]))
    other = auto.module(num_heads=3, head_dim=8)
    other.load_state_dict(module.state_dict())
    want = auto(q, k, v, is_causal=True, orders=torch.tensor([2, 1, 0]))
    torch.testing.assert_close(other(q, k, v, is_causal=True), want)
    module.calibrate(q[:1], k[:1], v[:1])
    assert torch.equal(module.orders, auto.fit(q[:1], k[:1], v[:1])["orders"][0])
    with pytest.raises(ValueError, match="calibrates"):
        Multipole().module(num_heads=3, head_dim=8).calibrate(q, k, v)


# --- causal calls and decoding --------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [{}, {"query_tile": 1}, {"levels": 2, "num_near": 7}, {"order": 2}]
)
def test_what_comes_later_changes_nothing(case):
    """Also not the number of tokens: a causal call begins like that on its first tokens."""
    q, k, v = make_qkv(N, batch=1, group=2)
    options = Multipole(**{**SMALL, **case})
    whole = options(q, k, v, is_causal=True, enable_gqa=True)
    for n in (1, 16, 17, 33, 40):
        q2, k2, v2 = (x.clone() for x in (q, k, v))
        for x in (q2, k2, v2):
            x[:, :, n:] *= -30
        after = options(q2, k2, v2, is_causal=True, enable_gqa=True)
        short = options(*(x[:, :, :n] for x in (q, k, v)), is_causal=True, enable_gqa=True)
        torch.testing.assert_close(after[:, :, :n], whole[:, :, :n])
        torch.testing.assert_close(short, whole[:, :, :n])


@pytest.mark.parametrize("case", [{}, {"order": 2}, {"levels": 2, "num_near": 40}])
def test_decoding_equals_a_causal_call(case):
    options = Multipole(
        **{"num_near": 30, "block_size": 32, "cluster_size": 4, **case}, query_tile=1
    )
    q, k, v = make_qkv(150, batch=2, heads=2, group=2)
    want = options(q, k, v, is_causal=True, enable_gqa=True)
    for prefix in (0, 64, 101):
        state = options.state(k[:, :, :prefix], v[:, :, :prefix], enable_gqa=True)
        for t in range(prefix, 150):
            state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
            if t % 5 == 0 or t % 32 < 2:
                out = state.attend(q[:, :, t : t + 1])
                torch.testing.assert_close(out, want[:, :, t : t + 1])


def test_queries_of_one_step_choose_each_for_itself():
    q, k, v = make_qkv(100, heads=2, group=2)
    options = Multipole(**SMALL, order=1)
    state = options.state(k, v, enable_gqa=True)
    together = state.attend(q[:, :, :5])
    alone = [state.attend(q[:, :, i : i + 1]) for i in range(5)]
    torch.testing.assert_close(together, torch.cat(alone, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_counts_and_means_are_those_of_the_keys_after_appends(dtype):
    """Counts of the labels of an earlier step, or in half precision, would be off."""
    _, k, v = make_qkv(90, heads=2, dtype=dtype)
    options = Multipole(**SMALL, num_iterations=2)
    state = options.state(k[:, :, :5], v[:, :, :5])
    assert isinstance(state, MultipoleState)
    for t0, t1 in ((5, 16), (16, 17), (17, 70), (70, 90)):
        state.append(k[:, :, t0:t1], v[:, :, t0:t1])
    kept, cells = state._keys.tensor.double(), state._cells.tensor.double()
    assert cells.shape[2] == 5 * options.per_block
    for b in range(2):
        for h in range(2):
            for block in range(5):
                tokens = k[b, h, 16 * block : 16 * block + 16]
                tokens = tokens.to(state._cells.tensor.dtype)[None, None]
                label = kmeans(tokens, 4, 2)[0, 0]
                here = cells[b, h, 4 * block : 4 * block + 4]
                assert torch.equal(here[:, 0], label.bincount(minlength=4).double())
                at = 16 * block
                for c in range(4):
                    n = int(here[c, 0])
                    mean = kept[b, h, at : at + n].mean(0)
                    torch.testing.assert_close(here[c, 1:9], mean, rtol=1e-5, atol=1e-5)
                    at += n


@pytest.mark.parametrize("length", [0, 16, 17, 90])
@pytest.mark.parametrize("case", [{}, {"order": 1}, {"order": 2, "levels": 2}])
def test_cost_knows_what_decoding_keeps(length, case):
    _, k, v = make_qkv(length, dtype=torch.bfloat16)
    options = Multipole(**SMALL, **case)
    shape = Shape(2, 3, 3, length, length, 8, 5, itemsize=2)
    assert options.state(k, v).nbytes == options.cost(shape).cache


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_half_precision_computes_in_single(dtype, is_causal):
    """Keys whose squares overflow, clusters whose counts a half cannot hold."""
    q, k, v = make_qkv(700, batch=1, heads=1, dtype=dtype)
    k = k * 150
    options = Multipole(num_near=8, block_size=640, cluster_size=320, query_tile=64)
    low = options(q, k, v, is_causal=is_causal, scale=1e-3)
    high = options(q.float(), k.float(), v.float(), is_causal=is_causal, scale=1e-3)
    assert torch.equal(low, high.to(dtype))


@pytest.mark.parametrize("clusters", ["kmeans", "contiguous"])
def test_no_sum_of_logits_overflows(clusters):
    q, k, v = make_qkv(N, dtype=torch.float32)
    for order in (0, 1, 2):
        options = Multipole(**SMALL, clusters=clusters, order=order)
        for is_causal in (False, True):
            leaves = [x.clone().requires_grad_() for x in (100 * q, k, v)]
            out = options(*leaves, is_causal=is_causal)
            out.sum().backward()
            assert out.isfinite().all()
            assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
def test_gradient_of_order_zero(is_causal, levels):
    """Away from where the choice jumps it is the derivative, of all of it."""
    inputs = make_qkv(18, batch=1, heads=1, group=2, head_dim=3, value_dim=2)
    options = Multipole(num_near=4, block_size=6, cluster_size=2, query_tile=3, levels=levels)

    def call(q, k, v):
        return options(q, k, v, is_causal=is_causal, enable_gqa=True)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("order", [1, 2])
def test_gradient_of_higher_orders_in_queries_and_values(order):
    q, k, v = make_qkv(18, batch=1, heads=1, head_dim=3, value_dim=2)
    options = Multipole(num_near=4, block_size=6, cluster_size=3, query_tile=3, order=order)
    leaves = (q.requires_grad_(), v.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda q, v: options(q, k, v, is_causal=True), leaves, fast_mode=True
    )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", [{}, {"clusters": "contiguous"}, {"levels": 2, "num_near": 7}])
def test_padding_is_truncation(side, is_causal, case):
    q, k, v = make_qkv(N, group=2)
    options = Multipole(**{**SMALL, **case})
    mask = padding_mask(torch.tensor([35, N]), side=side)
    keep = slice(0, 35) if side == "right" else slice(N - 35, N)
    out = options(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    short = [x[:1, :, keep] for x in (q, k, v)]
    want = options(*short, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out[:1, :, keep], want)


BLOCKS = Multipole(num_near=9, block_size=8, cluster_size=3, query_tile=4)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "batch_and_head_independence",
        "grouped_heads",
        "lengths",
        "padding_is_ignored",
        "padding_is_truncation",
        "nothing_to_attend",
        "no_causal_leak",
        "scale_is_used",
        "linear_in_value",
        "extremes",
        "half_precision",
        "inputs_untouched",
    ],
)
def test_contract_with_many_small_blocks(name, levels):
    """At the lengths of the contract, blocks of the usual size leave nothing to be far."""
    testing.checks.run(name, replace(BLOCKS, levels=levels))


@pytest.mark.parametrize("levels", [1, 2])
def test_one_graph_where_there_is_a_far_field(levels):
    q, k, v = make_qkv(N, batch=1, heads=2)
    options = Multipole(**{**SMALL, "num_near": 7, "query_tile": 8}, levels=levels, order=2)
    torch._dynamo.reset()

    def call(q, k, v):
        return options(q, k, v, is_causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize("order", [0, 2])
def test_contract_of_decoding_with_many_small_blocks(order):
    testing.checks.run("decode_is_prefill", replace(BLOCKS, query_tile=1, order=order))


class Largest(TorchDispatchMode):
    """The most elements of any tensor made while active."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
def test_no_tensor_grows_faster_than_the_length(monkeypatch, is_causal, levels):
    monkeypatch.setattr(multipole, "tile_elements", lambda device: 1 << 12)
    options = Multipole(num_near=16, block_size=64, query_tile=16, levels=levels)
    largest = []
    for length in (1024, 2048):
        q, k, v = (x.requires_grad_() for x in make_qkv(length, batch=1, heads=1))
        with Largest() as seen:
            options(q, k, v, is_causal=is_causal).sum().backward()
        largest.append(seen.elements)
    assert largest[1] <= 2 * largest[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster_size": 0}, "cluster_size"),
        ({"block_size": 1.5}, "block_size"),
        ({"num_iterations": 0}, "num_iterations"),
        ({"query_tile": 0}, "query_tile"),
        ({"query_tile": 96}, "multiple of query_tile"),
        ({"clusters": "random"}, "clusters"),
        ({"order": 3}, "order"),
        ({"order": True}, "order"),
        ({"levels": 3}, "levels"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Multipole(**options)
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match=message):
        multipole_attention(q, k, v, **options)
