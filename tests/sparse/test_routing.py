"""Routing attention against the definition by loops, and against what its clusters must be."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import Unsupported, padding_mask
from numattn.sparse import routing
from numattn.sparse.routing import Routing, RoutingAttention, routing_attention
from numattn.testing import make_qkv, reference

F64 = torch.float64


def directions(x):
    return x / x.norm(dim=-1, keepdim=True)


def centroids(*shape, seed=0):
    return directions(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64))


def nearest_tokens(mu, x, size):
    """The tokens of largest product with one centroid."""
    score = (directions(x) @ mu).tolist()
    return set(sorted(range(len(x)), key=lambda n: -score[n])[:size])


def balanced(q, k, mu, size, window, sinks):
    """Pairs of one head; with a window, the causal form that is not strict."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    clusters = [(nearest_tokens(m, q, size), nearest_tokens(m, k, size)) for m in mu]
    nearest = (directions(q) @ mu.T).argmax(-1).tolist()
    for i in range(len(q)):
        mine = [keys for rows, keys in clusters if i in rows]
        if not mine and window is None:
            mine = [clusters[nearest[i]][1]]
        for j in set().union(*mine):
            seen[i, j] = window is None or j <= i
        if window is not None:
            seen[i, max(i + 1 - window, 0) : i + 1] = True
            seen[i, : min(sinks, i + 1)] = True
    return seen


def strict(q, k, mu, size, window, sinks):
    """Pairs of one head: the latest keys of the query's cluster, and the latest of all."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    mine, theirs = ((directions(x) @ mu.T).argmax(-1).tolist() for x in (q, k))
    for i in range(len(q)):
        alike = [j for j in range(i + 1) if theirs[j] == mine[i]]
        seen[i, alike[-size:]] = True
        seen[i, max(i + 1 - window, 0) : i + 1] = True
        seen[i, : min(sinks, i + 1)] = True
    return seen


def by_loop(q, k, v, mu, pairs, size, window=None, sinks=4):
    """The whole method, one query head at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = pairs(q[b, h], k[b, h // group], mu[h // group], size, window, sinks)
            logits = q[b, h] @ k[b, h // group].T * q.shape[3] ** -0.5
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            out[b, h] = weights @ v[b, h // group]
    return out


SIZES = [(4, 5), (6, 9), (1, 7), (3, 40), (70, 2), (9, 1)]  # (clusters, size)


@pytest.mark.parametrize(("count", "size"), SIZES)
@pytest.mark.parametrize(("queries", "keys"), [(30, 30), (30, 13), (13, 30), (1, 20), (20, 1)])
def test_balanced_clusters_equal_the_definition(count, size, queries, keys):
    """Among them: queries in no cluster, pairs in several, more than 62 clusters."""
    q, k, v = make_qkv(queries, keys=keys, heads=2, group=2, head_dim=3)
    mu = centroids(2, count, 3)
    out = routing_attention(
        *(q, k, v), num_clusters=count, cluster_size=size, centroids=mu, enable_gqa=True
    )
    want = by_loop(q, k, v, mu, balanced, size)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("strict_causal", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 3), (1, 40), (50, 4)])
@pytest.mark.parametrize(("count", "size"), SIZES)
def test_causal_forms_equal_the_definition(count, size, window, sinks, strict_causal):
    q, k, v = make_qkv(30, heads=2, group=2, head_dim=3)
    mu = centroids(2, count, 3)
    out = routing_attention(
        *(q, k, v),
        num_clusters=count,
        cluster_size=size,
        strict_causal=strict_causal,
        window=window,
        num_sinks=sinks,
        centroids=mu,
        is_causal=True,
        enable_gqa=True,
    )
    want = by_loop(q, k, v, mu, strict if strict_causal else balanced, size, window, sinks)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("strict_causal", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [4, 19])
def test_padding_is_in_no_cluster(length, side, is_causal, strict_causal):
    """Also where fewer tokens exist than a cluster holds."""
    q, k, v = make_qkv(30, heads=2, group=2)
    mask = padding_mask(torch.tensor([length, 30]), side=side)
    gone = ~mask[:, 0, 0, :, None].expand(-1, -1, 8)
    mu = centroids(2, 4, 8)
    # Padding that would be the very center of a cluster.
    q, k = (torch.where(gone[:, None], 1e2 * mu[:1, :1], x) for x in (q, k))
    keep = slice(30 - length, 30) if side == "left" else slice(0, length)
    method = Routing(num_clusters=4, cluster_size=6, strict_causal=strict_causal, window=2)
    given = [{"centroids": mu}] if is_causal else [{"centroids": mu}, {}]
    for tensors in given:
        call = {**tensors, "is_causal": is_causal, "enable_gqa": True}
        out = method(q, k, v, attn_mask=mask, **call)
        want = method(*(x[:1, :, keep] for x in (q, k, v)), **call)
        torch.testing.assert_close(out[:1, :, keep], want, rtol=0, atol=1e-11)
        if not is_causal:
            mixed = method(q[:, :, :7], k, v, attn_mask=mask, **call)
            want = method(q[:1, :, :7], k[:1, :, keep], v[:1, :, keep], **call)
            torch.testing.assert_close(mixed[:1], want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("strict_causal", [False, True])
def test_one_cluster_of_everything_is_dense(is_causal, strict_causal):
    q, k, v = make_qkv(33)
    method = Routing(num_clusters=1, cluster_size=33, strict_causal=strict_causal, window=1)
    (mu,) = method.fit(q, k).values()
    out = method(q, k, v, is_causal=is_causal, centroids=mu)
    torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))


def test_a_cluster_given_twice_counts_once():
    q, k, v = make_qkv(40)
    mu = centroids(3, 4, 8)
    once = routing_attention(q, k, v, num_clusters=4, cluster_size=9, centroids=mu)
    twice = routing_attention(
        q, k, v, num_clusters=8, cluster_size=9, centroids=torch.cat([mu, mu], 1)
    )
    torch.testing.assert_close(once, twice, rtol=0, atol=1e-11)


def test_a_query_in_no_cluster_sees_the_keys_of_its_nearest_centroid():
    """Two centroids, one place each: the third query is left over."""
    mu = torch.eye(2, dtype=F64)[None]
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]], dtype=F64)[None, None]
    k = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]], dtype=F64)[None, None]
    v = torch.tensor([[1.0], [2.0], [3.0]], dtype=F64)[None, None]
    out = routing_attention(q, k, v, num_clusters=2, cluster_size=1, centroids=mu)
    assert out.flatten().tolist() == [2.0, 1.0, 2.0]


def test_empty_clusters_are_harmless():
    """Fewer directions than clusters: k-means repeats a centroid; a far one holds what it may."""
    q, k, v = make_qkv(12)
    same = [x[:, :, :1].expand_as(x) for x in (q, k)]
    assert routing_attention(*same, v, num_clusters=5, cluster_size=4).isfinite().all()
    (mu,) = Routing(num_clusters=40).fit(q[:, :, :3], k[:, :, :3]).values()
    torch.testing.assert_close(mu.norm(dim=-1), torch.ones(2, 3, 40, dtype=F64))
    labels = routing.Clusters(mu, 1.0).keys(k)
    assert labels.max() < 40
    # In the strict form nothing goes to a centroid that is nobody's nearest.
    near = centroids(3, 3, 8)
    far = torch.cat([near, near[:, :1].expand(-1, 2, -1)], 1)
    want = Routing(num_clusters=3, cluster_size=3)(q, k, v, centroids=near, is_causal=True)
    out = Routing(num_clusters=5, cluster_size=3)(q, k, v, centroids=far, is_causal=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


def test_only_the_strict_form_keeps_the_future_out():
    """One more key, nearer to the centroid, pushes another out of the balanced cluster."""
    q, k, v = make_qkv(30, batch=1, heads=1)
    mu = centroids(1, 1, 8)
    later = k.clone()
    later[:, :, -1] = mu
    moved = {}
    for strict_causal in (True, False):
        method = Routing(num_clusters=1, cluster_size=3, strict_causal=strict_causal, window=1)
        before, after = (
            method(q, x, v, is_causal=True, centroids=mu)[:, :, :-1] for x in (k, later)
        )
        moved[strict_causal] = (after - before).abs().max().item()
    assert moved[True] <= 1e-12
    assert moved[False] > 1e-3


def test_a_causal_call_or_a_state_without_centroids_is_refused():
    q, k, v = make_qkv(8)
    for strict_causal in (False, True):
        with pytest.raises(Unsupported, match="would let the future in; pass centroids"):
            Routing(strict_causal=strict_causal)(q, k, v, is_causal=True)
    with pytest.raises(Unsupported, match="decoding needs centroids"):
        Routing().state(k, v)
    with pytest.raises(Unsupported, match="decode with strict_causal=True"):
        Routing(strict_causal=False).state(k, v, centroids=centroids(3, 16, 8))
    assert Routing(strict_causal=False).module(num_heads=3, head_dim=8)(q, k, v).shape == v.shape


def test_fitted_centroids_are_where_k_means_stops():
    """Each is the direction of the mean of the tokens that k-means gave it."""
    source = torch.Generator().manual_seed(2)
    truth = torch.eye(8, dtype=F64)[:4]  # far apart, in turn, so that even seeds meet each
    noise = 0.05 * torch.randn(2, 3, 40, 8, generator=source, dtype=F64)
    k = truth.repeat(10, 1) + noise
    q = truth.repeat(10, 1) - noise
    (mu,) = Routing(num_clusters=4).fit(q, 3 * k).values()
    every = directions(torch.cat([q, k], 2))
    for c, true in enumerate(truth):
        mean = directions(every[:, :, c::4].mean(2))
        assert ((mu - mean[:, :, None]).norm(dim=-1).amin(-1) <= 1e-12).all()
        assert (mean @ true > 0.99).all()
    assert torch.equal(
        Routing(num_clusters=4).fit(7 * q, k)["centroids"],
        Routing(num_clusters=4).fit(7 * q, k)["centroids"],
    )


def test_only_directions_choose_and_norms_weigh():
    q, k, v = make_qkv(30)
    mu = centroids(3, 4, 8)
    method = Routing(num_clusters=4, cluster_size=5, window=1)
    length = 1 + torch.rand(2, 3, 30, 1, generator=torch.Generator().manual_seed(1), dtype=F64)
    norms = torch.tensor([1.0, 7.0, 0.2, 3.0], dtype=F64)[:, None]
    out = method(q, length * k, v, centroids=norms * mu)
    want = by_loop(q, length * k, v, mu, balanced, 5)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-11)
    out = method(q, length * k, v, centroids=norms * mu, is_causal=True)
    want = by_loop(q, length * k, v, mu, strict, 5, 1)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        method(q, k, v, scale=-0.3, centroids=mu), method(-q, k, v, scale=0.3, centroids=mu)
    )


def test_centroids_move_by_the_average_of_the_paper():
    q, k, _ = make_qkv(20, heads=2, group=2)
    module = RoutingAttention(num_heads=2, head_dim=8, num_clusters=3).double()
    mask = padding_mask(torch.tensor([11, 20]))
    before = module.centroids.clone()
    module.update(q, k, attn_mask=mask, enable_gqa=True, decay=0.9)
    for h in range(2):
        total = torch.zeros(3, 8, dtype=F64)
        for b, exist in enumerate((11, 20)):
            for x in (q[b, 2 * h], q[b, 2 * h + 1], k[b, h]):
                for token in directions(x[:exist]):
                    total[(before[h] @ token).argmax()] += token
        want = directions(0.9 * before[h] + 0.1 / 2 * total)
        torch.testing.assert_close(module.centroids[h], want, rtol=0, atol=1e-12)
    # By default lambda is the paper's, so that one step hardly moves anything.
    module.update(q, k, enable_gqa=True)
    assert (module.centroids.norm(dim=-1) - 1).abs().max() <= 1e-12


def test_tokens_that_share_a_cluster_all_count():
    """Added, not written over one another: twice the tokens move a centroid twice as far."""
    x = torch.zeros(1, 1, 6, 2, dtype=F64)
    x[..., 1] = 1
    module = RoutingAttention(num_heads=1, head_dim=2, num_clusters=1).double()
    module.centroids.copy_(torch.tensor([[[1.0, 0.0]]]))
    module.update(x, x, decay=0.5)
    want = directions(torch.tensor([[[0.5, 0.25 * 12]]], dtype=F64))
    torch.testing.assert_close(module.centroids, want)


def test_forward_leaves_the_centroids_and_calibrate_sets_them():
    q, k, v = make_qkv(40)
    module = RoutingAttention(
        num_heads=3, head_dim=8, num_clusters=4, generator=torch.Generator().manual_seed(1)
    ).double()
    before = module.centroids.clone()
    module.train()
    module(q, k, v, is_causal=True)
    assert torch.equal(module.centroids, before)
    module.calibrate(q[:1], k[:1])
    torch.testing.assert_close(
        module.centroids, Routing(num_clusters=4).fit(q[:1], k[:1])["centroids"][0]
    )
    module.calibrate(q, k, attn_mask=padding_mask(torch.tensor([25, 0]), 40))
    (alone,) = Routing(num_clusters=4).fit(q[:1, :, :25], k[:1, :, :25]).values()
    assert module.centroids.shape == (3, 4, 8)
    assert (module.centroids.norm(dim=-1) - 1).abs().max() <= 1e-12
    assert alone.shape == (1, 3, 4, 8)


def test_decoding_is_prefill_where_clusters_overflow():
    q, k, v = make_qkv(300, batch=1, heads=2, group=2, head_dim=4)
    method = Routing(num_clusters=4, cluster_size=5, window=3)
    call = {"enable_gqa": True, "centroids": centroids(2, 4, 4)}
    want = method(q, k, v, is_causal=True, **call)
    state = method.state(k[:, :, :40], v[:, :, :40], **call)
    for t in range(40, 300):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out = state.attend(q[:, :, t : t + 1])
        torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("elements", [1, 300, 1 << 20])
def test_the_answer_does_not_depend_on_the_tile_budget(elements, monkeypatch):
    q, k, v = (x.requires_grad_() for x in make_qkv(30, group=2))
    method = Routing(num_clusters=4, cluster_size=11)
    mu = centroids(3, 4, 8)
    found = []
    for budget in (1 << 20, elements):
        monkeypatch.setattr(routing, "tile_elements", lambda device, n=budget: n)
        out = method(q, k, v, centroids=mu, enable_gqa=True)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_gradients_flow_through_the_pairs_that_are_seen():
    q, k, v = make_qkv(9, batch=1, heads=1, head_dim=2, value_dim=1)
    mu = centroids(1, 3, 2)
    for strict_causal, is_causal in ((True, False), (True, True), (False, True)):
        method = Routing(num_clusters=3, cluster_size=4, strict_causal=strict_causal, window=2)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        assert torch.autograd.gradcheck(
            lambda *x, m=method, c=is_causal: m(*x, centroids=mu, is_causal=c), inputs
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("strict_causal", [False, True])
def test_memory_is_linear(is_causal, strict_causal, monkeypatch):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            found = [x.numel() for x in (out if isinstance(out, (tuple, list)) else [out])]
            self.numel = max(self.numel, *found)
            return out

    monkeypatch.setattr(routing, "tile_elements", lambda device: 1 << 10)
    length, count = 1000, 4
    q, k, v = (x.requires_grad_() for x in make_qkv(length, batch=1, heads=1, head_dim=4))
    method = Routing(num_clusters=count, cluster_size=250, strict_causal=strict_causal)
    with Largest() as largest:
        out = method(q, k, v, is_causal=is_causal, centroids=centroids(1, count, 4))
        out.sum().backward()
    assert largest.numel <= 20 * length  # far below the 250 keys of a cluster per token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 0}, "num_clusters must be a positive integer"),
        ({"cluster_size": -1}, "cluster_size must be a positive integer"),
        ({"window": 0}, "window must be a positive integer"),
        ({"strict_causal": None}, "strict_causal must be True or False; got None"),
    ],
)
def test_bad_options_are_refused(options, message):
    q, k, v = make_qkv(4)
    for call in (lambda: Routing(**options), lambda: routing_attention(q, k, v, **options)):
        with pytest.raises(ValueError, match=f"routing: {message}"):
            call()


def test_centroids_of_another_shape_are_refused():
    q, k, v = make_qkv(6)
    for shape in ((3, 15, 8), (16, 8), (1, 3, 16, 8), (3, 16, 7)):
        with pytest.raises(ValueError, match=r"centroids must have shape \(3, 16, 8\)"):
            routing_attention(q, k, v, centroids=torch.zeros(shape))
