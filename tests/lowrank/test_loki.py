"""Loki against the definition by loops, and against what principal axes must be."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import Unsupported, padding_mask
from numattn.lowrank import loki
from numattn.lowrank.loki import VOTERS, Loki, LokiAttention, explained_variance, loki_attention
from numattn.sparse import topk_attention
from numattn.testing import Subject, make_qkv, reference, reference_weights

F64 = torch.float64


def orthogonal(heads, dim=8, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(heads, dim, dim, generator=source, dtype=F64))[0]


def flat_keys(batch, heads, length, width, dim=8, mean=50.0, seed=0):
    """Keys that vary in `width` directions of their head, about a mean that is far from zero."""
    source = torch.Generator().manual_seed(seed)
    low = torch.randn(batch, heads, length, width, generator=source, dtype=F64)
    frame = orthogonal(heads, dim, seed=77)
    return low @ frame[:, :, :width].mT + mean * frame[:, None, :, width]


def heaviest(score, allowed, num_keys):
    """Indices by falling score and rising index."""
    return sorted(allowed, key=lambda j: (-score[j], j))[:num_keys]


def softmax_over(logits, kept, values):
    peak = max(logits[j] for j in kept)
    weight = torch.tensor([math.exp(logits[j] - peak) for j in kept], dtype=F64)
    return (weight / weight.sum()) @ values[list(kept)]


def by_loop(q, k, v, basis, num_keys, rank, mask=None, is_causal=False, scale=None):
    """Every row for itself: approximate logits, the best of them, exact softmax over these."""
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5 if scale is None else scale
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        g = h // group
        low_q, low_k = (q[b, h, i] @ basis[g])[:rank], (k[b, g] @ basis[g])[:, :rank]
        add = torch.zeros(k.shape[2], dtype=F64)
        if mask is not None:
            row = mask.expand(*q.shape[:3], k.shape[2])[b, h, i]
            add = row if row.dtype is F64 else add.masked_fill(~row, -torch.inf)
        if is_causal:
            add = add.masked_fill(torch.arange(k.shape[2]) > i, -torch.inf)
        seen = (add > -torch.inf).nonzero().flatten().tolist()
        kept = heaviest((low_k @ low_q * scale + add).tolist(), seen, num_keys)
        if kept:
            out[b, h, i] = softmax_over(
                (k[b, g] @ q[b, h, i] * scale + add).tolist(), kept, v[b, g]
            )
    return out


def tiles_by_loop(q, k, v, basis, num_keys, rank, height, is_causal):
    """Tiles of one sequence that share lists: keys by their least distance to a row's maximum."""
    group, scale, length = q.shape[1] // k.shape[1], q.shape[3] ** -0.5, k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, h, t in itertools.product(*map(range, q.shape[:2]), range(-(-q.shape[2] // height))):
        g = h // group
        score = (q[b, h] @ basis[g])[:, :rank] @ (k[b, g] @ basis[g])[:, :rank].T * scale
        exact = q[b, h] @ k[b, g].T * scale
        begin, end = t * height, min((t + 1) * height, q.shape[2])
        seen = range(begin if is_causal else length)
        first, past = (begin - height, begin) if is_causal else (begin, end)
        number = min(VOTERS, height)
        voters = {first + math.ceil(n * (past - first) / number) - 1 for n in range(1, number + 1)}
        kept = []
        if seen:
            vote = [max(float(score[i, j] - score[i, seen].max()) for i in voters) for j in seen]
            kept = heaviest(vote, seen, num_keys)
        for i in range(begin, end):
            own = list(range(begin, i + 1)) if is_causal else []
            out[b, h, i] = softmax_over(exact[i].tolist(), [*kept, *own], v[b, g])
    return out


def masks(n, heads):
    source = torch.Generator().manual_seed(5)
    bias = 2 * torch.randn(1, heads, n, n, generator=source, dtype=F64)
    keep = torch.rand(2, 1, n, n, generator=source) < 0.5
    keep[0, 0, 2] = False
    return {
        "none": None,
        "right": padding_mask(torch.tensor([n - 4, n])),
        "left": padding_mask(torch.tensor([n - 4, n]), side="left"),
        "bool": keep,
        "bias": bias,
        "bias with -inf": torch.where(keep, bias, -torch.inf),
    }


@pytest.mark.parametrize("kind", list(masks(12, 4)))
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_the_definition(kind, is_causal):
    q, k, v = make_qkv(12, heads=2, group=2)
    basis, mask = orthogonal(2), masks(12, 4)[kind]
    call = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": True}
    for num_keys, rank, scale in ((1, 3, None), (4, 1, -0.6), (12, 2, None)):
        out = loki_attention(
            q, k, v, num_keys=num_keys, rank=rank, basis=basis, scale=scale, **call
        )
        want = by_loop(q, k, v, basis, num_keys, rank, mask, is_causal, scale)
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize("height", [2, 5, 16, 40])
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_equal_the_definition(height, is_causal):
    q, k, v = make_qkv(33, batch=1, heads=2, group=2)
    basis = orthogonal(2)
    for num_keys in (1, 6, 20):
        options = {"num_keys": num_keys, "rank": 3, "query_tile": height, "basis": basis}
        out = loki_attention(q, k, v, **options, is_causal=is_causal, enable_gqa=True)
        want = tiles_by_loop(q, k, v, basis, num_keys, 3, height, is_causal)
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize(("queries", "keys"), [(7, 20), (20, 7)])
def test_tiles_of_other_lengths(queries, keys):
    q, k, v = make_qkv(queries, keys=keys, batch=1, heads=1, group=2)
    basis = orthogonal(1)
    options = {"num_keys": 5, "rank": 2, "query_tile": 3}
    out = loki_attention(q, k, v, **options, basis=basis, enable_gqa=True)
    torch.testing.assert_close(out, tiles_by_loop(q, k, v, basis, 5, 2, 3, False))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_has_no_vote_and_moves_no_tile(side, is_causal):
    q, k, v = make_qkv(30, group=2, heads=2)
    mask = padding_mask(torch.tensor([19, 30]), side=side)
    for x in (q, k, v):
        x[~mask[:, 0, 0, None].expand(x.shape[:3])] *= 40
    method, basis = Loki(5, 2, 4), orthogonal(2)
    call = {"basis": basis, "is_causal": is_causal, "enable_gqa": True}
    out = method(q, k, v, attn_mask=mask, **call)
    short = [x[:1, :, mask[0, 0, 0]] for x in (q, k, v)]
    torch.testing.assert_close(out[:1, :, mask[0, 0, 0]], method(*short, **call))
    torch.testing.assert_close(out[1:], method(q[1:], k[1:], v[1:], **call))


def test_without_rank_it_takes_a_quarter():
    q, k, v = make_qkv(20)
    basis = orthogonal(3)
    assert torch.equal(Loki(4)(q, k, v, basis=basis), Loki(4, rank=2)(q, k, v, basis=basis))
    low = [x[..., :3] for x in (q, k)]
    basis = orthogonal(3, dim=3)
    assert torch.equal(Loki(4)(*low, v, basis=basis), Loki(4, rank=1)(*low, v, basis=basis))


@pytest.mark.parametrize("kind", ["none", "left", "bias"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_all_coordinates_give_exact_top_k(kind, is_causal):
    """Of any orthogonal basis: it leaves the logits as they are."""
    q, k, v = make_qkv(30, heads=2, group=2)
    call = {"attn_mask": masks(30, 4)[kind], "is_causal": is_causal, "enable_gqa": True}
    want = topk_attention(q, k, v, num_keys=7, **call)
    for seed in (1, 2):
        out = loki_attention(q, k, v, num_keys=7, rank=8, basis=orthogonal(2, seed=seed), **call)
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize("query_tile", [1, 7])
@pytest.mark.parametrize("is_causal", [False, True])
def test_all_keys_give_exact_attention(query_tile, is_causal):
    q, k, v = make_qkv(30)
    for num_keys, rank in ((30, 1), (100, 5)):
        method = Loki(num_keys, rank, query_tile)
        out = method(q, k, v, basis=orthogonal(3), is_causal=is_causal)
        torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))


def test_no_row_keeps_more_than_its_keys():
    q, k, _ = make_qkv(40)
    basis = orthogonal(3)
    for num_keys in (1, 5, 39):
        kept = Subject(Loki(num_keys)).weights(q, k, basis=basis) > 0
        assert (kept.sum(-1) == num_keys).all()
        kept = Subject(Loki(num_keys)).weights(q, k, basis=basis, is_causal=True) > 0
        assert torch.equal(kept.sum(-1)[0, 0], torch.arange(1, 41).clamp(max=num_keys))


def test_error_is_the_mass_of_the_dropped_keys():
    q, k, _ = make_qkv(40)
    exact = reference_weights(q, k)
    for query_tile in (1, 8):
        weights = Subject(Loki(6, 2, query_tile)).weights(q, k)
        dropped = 1 - (exact * (weights > 0)).sum(-1)
        torch.testing.assert_close((weights - exact).abs().sum(-1) / 2, dropped)


def test_rows_of_a_tile_share_their_keys():
    q, k, _ = make_qkv(41)
    kept = Subject(Loki(6, 2, 8)).weights(q, k) > 0
    assert (kept.sum(-1) == 6).all()
    for part in kept.split(8, 2):
        assert torch.equal(part, part[:, :, :1].expand_as(part))


def test_a_heavy_key_of_one_row_is_kept_for_its_tile():
    """Also beside a row of much larger logits, whose scores do not set the scale."""
    k = torch.eye(8, dtype=F64)[None, None]
    q = torch.zeros(1, 1, 2, 8, dtype=F64)
    q[0, 0, 0, :3] = torch.tensor([100.0, 90.0, 80.0])
    q[0, 0, 1, 5] = 1.0
    weights = Subject(Loki(2, 8, 2)).weights(q, k, basis=torch.eye(8)[None])
    assert (weights[0, 0, 0] > 0).nonzero().flatten().tolist()[0] == 0
    assert weights[0, 0, 1, 5] > 0


@pytest.mark.parametrize("query_tile", [1, 4])
def test_ties_go_to_the_lower_index(query_tile):
    q, _, v = make_qkv(12)
    k = torch.ones(2, 3, 12, 8, dtype=F64)
    method = Loki(5, 2, query_tile)
    weights = Subject(method).weights(q, k, basis=orthogonal(3))
    torch.testing.assert_close(weights[..., :5], torch.full_like(weights[..., :5], 0.2))
    state = method.state(k, v, basis=orthogonal(3))
    torch.testing.assert_close(state.attend(q), v[:, :, :5].mean(2, keepdim=True).expand_as(v))


def test_later_tokens_change_nothing():
    """Whichever of a tile they are, and whether queries, keys or values."""
    q, k, v = make_qkv(23, batch=1, heads=2)
    method, basis = Loki(3, 3, 4), orthogonal(2)
    before = method(q, k, v, basis=basis, is_causal=True)
    for at in range(23):
        for which in range(3):
            changed = [x.clone() for x in (q, k, v)]
            changed[which][:, :, at:] *= -7
            after = method(*changed, basis=basis, is_causal=True)
            torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [Loki(5, 2), Loki(5, 2, 4)], ids=["rows", "tiles"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_strips_do_not_show(monkeypatch, method, is_causal):
    q, k, v = make_qkv(70, group=2, heads=2)
    mask = padding_mask(torch.tensor([61, 70]))
    call = {"basis": orthogonal(2), "is_causal": is_causal, "enable_gqa": True, "attn_mask": mask}
    whole = method(q, k, v, **call)
    for elements in (1, 1 << 12, 1 << 16):
        monkeypatch.setattr(loki, "tile_elements", lambda device, n=elements: n)
        torch.testing.assert_close(method(q, k, v, **call), whole)


@pytest.mark.parametrize("method", [Loki(8), Loki(8, query_tile=16)], ids=["rows", "tiles"])
def test_memory_is_that_of_a_tile(monkeypatch, method):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in (out if isinstance(out, (tuple, list)) else [out])]
            self.numel = max(self.numel, *sizes)
            return out

    monkeypatch.setattr(loki, "tile_elements", lambda device: 1)
    q, k, v = (x.requires_grad_() for x in make_qkv(512, batch=1, heads=1, head_dim=4))
    basis = orthogonal(1, 4)
    with Largest() as largest:
        method(q, k, v, basis=basis, is_causal=True).sum().backward()
    assert largest.numel <= 32 * 512


@pytest.mark.parametrize("query_tile", [1, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradient_through_the_kept_keys(query_tile, is_causal):
    q, k, v = make_qkv(9, batch=1, heads=1, group=2, head_dim=4, value_dim=2)
    basis = orthogonal(1, 4).requires_grad_()
    method = Loki(3, 2, query_tile)

    def call(*x):
        return method(*x, basis=basis, is_causal=is_causal, enable_gqa=True)

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(call, inputs)
    call(*inputs).sum().backward()
    assert basis.grad is None


def test_gradient_of_a_bias():
    q, k, v = make_qkv(9, batch=1, heads=1)
    bias = torch.randn(1, 1, 9, 9, generator=torch.Generator().manual_seed(0), dtype=F64)
    basis = orthogonal(1)
    assert torch.autograd.gradcheck(
        lambda m: loki_attention(q, k, v, num_keys=4, basis=basis, attn_mask=m),
        bias.requires_grad_(),
    )


def projectors(axes):
    """Onto the first r columns, for every r."""
    return torch.stack([axes[..., :r] @ axes[..., :r].mT for r in range(1, axes.shape[-1] + 1)])


def test_axes_are_the_principal_ones():
    """Against the singular vectors of the centred keys, for keys with a large mean."""
    _, k, _ = make_qkv(200, heads=2)
    spread = torch.linspace(1, 8, 8, dtype=F64)
    k = k * spread @ orthogonal(1)[0] + 30
    basis = Loki().fit(k, k)["basis"]
    assert basis.shape == (2, 2, 8, 8)
    for b, h in itertools.product(range(2), range(2)):
        centred = k[b, h] - k[b, h].mean(0)
        right = torch.from_numpy(np.linalg.svd(centred.numpy())[2]).T
        torch.testing.assert_close(projectors(basis[b, h]), projectors(right))
        torch.testing.assert_close(basis[b, h].T @ basis[b, h], torch.eye(8, dtype=F64))


@pytest.mark.parametrize("origin", ["mean", "first"])
@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_a_common_mean_costs_no_axis(mean, origin):
    """Keys that differ in two directions only: two coordinates rank them as all do."""
    q, _, v = make_qkv(60)
    k = flat_keys(2, 3, 60, 2, mean=mean)
    want = topk_attention(q, k, v, num_keys=5)
    out = loki_attention(q, k, v, num_keys=5, rank=2, origin=origin)
    torch.testing.assert_close(out, want)
    basis = Loki(origin=origin).fit(q, k)["basis"]
    out = loki_attention(q, k, v, num_keys=5, rank=2, basis=basis, is_causal=True)
    torch.testing.assert_close(out, topk_attention(q, k, v, num_keys=5, is_causal=True))


def test_axes_about_the_first_key_hold_a_sink():
    """A key far from all others: first of the axes about it, last of those about the mean."""
    q, k, v = make_qkv(400, batch=1, heads=1)
    k = k * torch.linspace(3, 1, 8, dtype=F64)
    k[:, :, 0] = 0
    k[:, :, 0, 7] = 6
    q[..., 7] = 12  # every query looks for it
    exact = reference(q, k, v)
    near = loki_attention(q, k, v, num_keys=8, rank=1, origin="first")
    assert (near - exact).norm() < 0.5 * exact.norm()
    far = loki_attention(q, k, v, num_keys=8, rank=1)
    assert (far - exact).norm() > exact.norm()
    pooled = LokiAttention(num_heads=1, head_dim=8, rank=1, origin="first").double()
    pooled.calibrate(torch.cat([k, k + 3]))  # each sequence about its own first key
    basis = Loki(origin="first").fit(q, k)["basis"][0]
    torch.testing.assert_close(projectors(pooled.basis), projectors(basis))
    assert explained_variance(k, origin="first")[0, 0] > explained_variance(k)[0, 0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("origin", ["mean", "first"])
def test_padding_moves_no_basis(side, origin):
    _, k, _ = make_qkv(30)
    mask = padding_mask(torch.tensor([17, 30]), side=side)
    spoiled = k.clone()
    spoiled[0, :, ~mask[0, 0, 0], :2] = 1e4
    basis = Loki(origin=origin).fit(spoiled, spoiled, attn_mask=mask)["basis"]
    short = k[:1, :, mask[0, 0, 0]]
    alone = Loki(origin=origin).fit(short, short)["basis"]
    torch.testing.assert_close(projectors(basis[:1]), projectors(alone))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_enters_no_axis(side):
    _, k, _ = make_qkv(30)
    mask = padding_mask(torch.tensor([17, 30]), side=side)
    spoiled = k.clone()
    spoiled[0, :, ~mask[0, 0, 0], :2] = 1e4
    basis = Loki().fit(spoiled, spoiled, attn_mask=mask)["basis"]
    short = k[:1, :, mask[0, 0, 0]]
    torch.testing.assert_close(projectors(basis[:1]), projectors(Loki().fit(short, short)["basis"]))

    module, whole = (LokiAttention(num_heads=3, head_dim=8).double() for _ in range(2))
    module.calibrate(spoiled, attn_mask=mask)
    whole.calibrate(torch.cat([k[0][:, mask[0, 0, 0]], k[1]], 1)[None])
    torch.testing.assert_close(projectors(module.basis), projectors(whole.basis))
    for x, m in ((spoiled, mask), (k.roll(1, 2), mask.roll(1, 3))):
        share = explained_variance(x, attn_mask=m)
        assert share.shape == (3, 8)
    want = explained_variance(torch.cat([k[0][:, mask[0, 0, 0]], k[1]], 1)[None])
    torch.testing.assert_close(explained_variance(spoiled, attn_mask=mask), want)


def test_calibrated_on_one_sample_used_on_another():
    """Keys of a head lie in one plane, and each sequence of the sample in a line of it."""
    q, _, v = make_qkv(40)
    sample, k = flat_keys(2, 3, 25, 2, seed=1), flat_keys(2, 3, 40, 2, seed=2)
    frame = orthogonal(3, seed=77)
    for b in range(2):
        sample[b] -= sample[b] @ frame[:, :, b : b + 1] @ frame[:, :, b : b + 1].mT
    module = LokiAttention(num_heads=3, head_dim=8, num_keys=6, rank=2).double()
    want = topk_attention(q, k, v, num_keys=6, is_causal=True)
    assert not torch.allclose(module(q, k, v, is_causal=True), want)
    torch.testing.assert_close(module.basis, torch.eye(8, dtype=F64).expand(3, -1, -1))
    module.calibrate(sample)
    torch.testing.assert_close(module(q, k, v, is_causal=True), want)


def test_calibrated_before_rotary_embedding():
    """The basis of other keys than those of the call changes the choice, never the logits."""
    q, k, v = make_qkv(30)
    module = LokiAttention(num_heads=3, head_dim=8, num_keys=30, rank=1).double()
    module.calibrate(k)
    angle = torch.arange(30, dtype=F64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=F64)

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    q, k = rotate(q), rotate(k)
    torch.testing.assert_close(module(q, k, v, is_causal=True), reference(q, k, v, is_causal=True))
    state = module.state(k, v)
    torch.testing.assert_close(state.attend(q[:, :, -1:]), reference(q[:, :, -1:], k, v))


def test_explained_variance_is_that_of_the_singular_values():
    _, k, _ = make_qkv(50)
    k = k * torch.linspace(1, 3, 8, dtype=F64) + 20
    for h in range(3):
        x = k[:, h].flatten(0, 1)
        s = np.linalg.svd((x - x.mean(0)).numpy(), compute_uv=False) ** 2
        want = torch.from_numpy(s.cumsum() / s.sum())
        torch.testing.assert_close(explained_variance(k)[h], want)
    share = explained_variance(flat_keys(2, 3, 40, 2))
    assert (share[:, 0] < 0.999).all()
    torch.testing.assert_close(share[:, 1:], torch.ones(3, 7, dtype=F64))
    assert (share.diff() >= 0).all()
    assert torch.equal(explained_variance(k[:, :, :1][:1]), torch.ones(3, 8, dtype=F64))


def test_a_basis_may_differ_by_sequence():
    q, k, v = make_qkv(20)
    method, basis = Loki(4, 2), torch.stack([orthogonal(3, seed=s) for s in (1, 2)])
    out = method(q, k, v, basis=basis)
    for b in range(2):
        alone = [x[b : b + 1] for x in (q, k, v)]
        for shape in (basis[b], basis[b : b + 1]):
            torch.testing.assert_close(out[b : b + 1], method(*alone, basis=shape))
    torch.testing.assert_close(method(q, k, v, basis=basis[:1]), method(q, k, v, basis=basis[0]))
    fitted = method.fit(q, k)
    torch.testing.assert_close(method(q, k, v), method(q, k, v, **fitted))


@pytest.mark.parametrize("options", [Loki(5, 3), Loki(5, 8), Loki(5, 3, 4)], ids=str)
def test_decoding_is_a_row_of_a_call(options):
    """Some tokens at a time, several queries at once, whatever the tile."""
    q, k, v = make_qkv(30, heads=2, group=2)
    basis = orthogonal(2)
    state = options.state(k[:, :, :11], v[:, :, :11], basis=basis, scale=0.9, enable_gqa=True)
    for a, b in ((11, 12), (12, 30)):
        state.append(k[:, :, a:b], v[:, :, a:b])
    want = by_loop(q, k, v, basis, 5, options.rank, scale=0.9)
    torch.testing.assert_close(state.attend(q), want)


def test_decoding_keeps_no_graph():
    q, k, v = (x.requires_grad_() for x in make_qkv(9))
    state = Loki(4).state(k, v, basis=orthogonal(3).requires_grad_())
    state.append(k, v)
    assert not state.attend(q).requires_grad


def test_decoding_from_nothing():
    q, k, v = make_qkv(1)
    state = Loki().state(k[:, :, :0], v[:, :, :0], basis=orthogonal(3))
    assert not state.attend(q).any()
    assert state.attend(q[:, :, :0]).shape == (2, 3, 0, 5)
    state.append(k, v)
    torch.testing.assert_close(state.attend(q), v)
    with pytest.raises(ValueError, match="enable_gqa"):
        state.attend(make_qkv(1, group=2)[0])
    with pytest.raises(ValueError, match="head size"):
        state.attend(q[..., :5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decoding_in_half_precision(dtype):
    """The cache stays in its type; with all keys only its rounding is left."""
    q, k, v = make_qkv(30, dtype=dtype)
    state = Loki(30, 2).state(k, v, basis=orthogonal(3))
    assert state.nbytes == 2 * 3 * 30 * (8 + 5) * 2
    out = state.attend(q[:, :, -1:])
    assert out.dtype == dtype
    want = reference(q[:, :, -1:], k, v)
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", [0, 3, 300])
def test_bytes_by_hand(length):
    """All keep D + E numbers of a token; a step reads r of each key and the rest of a few."""
    _, k, v = make_qkv(length)
    state = Loki(num_keys=20, rank=3).state(k, v, basis=orthogonal(3))
    assert state.nbytes == 6 * length * (8 + 5) * 8
    kept = min(20, length)
    assert state.nbytes_read == 6 * (length * 3 + kept * (5 + 5)) * 8
    _, k, v = make_qkv(1)
    state.append(k, v)
    kept = min(20, length + 1)
    assert state.nbytes_read == 6 * ((length + 1) * 3 + kept * (5 + 5)) * 8


def test_a_step_reads_the_rest_of_the_chosen_keys_only():
    q, k, v = make_qkv(40, batch=1, heads=1)
    basis = torch.eye(8, dtype=F64)[None]
    chosen = set(heaviest((k[0, 0, :, :2] @ q[0, 0, -1, :2]).tolist(), range(40), 6))
    spoiled_k, spoiled_v = k.clone(), v.clone()
    for j in set(range(40)) - chosen:
        spoiled_k[0, 0, j, 2:] = 1e6
        spoiled_v[0, 0, j] = torch.nan
    kept, spoiled = (
        Loki(6, 2).state(*x, basis=basis).attend(q[:, :, -1:])
        for x in ((k, v), (spoiled_k, spoiled_v))
    )
    torch.testing.assert_close(spoiled, kept)


def test_what_is_missing_is_refused():
    q, k, v = make_qkv(8)
    with pytest.raises(Unsupported, match="basis"):
        loki_attention(q, k, v, is_causal=True)
    with pytest.raises(Unsupported, match="basis"):
        Loki().state(k, v)
    with pytest.raises(TypeError, match="bases"):
        Loki().state(k, v, bases=orthogonal(3))
    keep = torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(Unsupported, match="query_tile=1"):
        loki_attention(q, k, v, query_tile=2, attn_mask=keep)
    for sample in (LokiAttention(num_heads=3, head_dim=8).calibrate, explained_variance):
        with pytest.raises(Unsupported, match="padding"):
            sample(k, attn_mask=keep)


@pytest.mark.parametrize("option", ["num_keys", "rank", "query_tile"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_options_are_refused(option, value):
    q, k, v = make_qkv(4)
    for call in (Loki, lambda **o: loki_attention(q, k, v, **o)):
        with pytest.raises(ValueError, match=f"loki: {option} must be"):
            call(**{option: value})


def test_what_does_not_fit_is_refused():
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match="rank must be at most"):
        loki_attention(q, k, v, rank=9)
    for basis in (
        orthogonal(2),
        orthogonal(3, 4),
        orthogonal(3)[..., :4],
        orthogonal(3)[None, None],
    ):
        for call in (
            lambda b=basis: loki_attention(q, k, v, basis=b),
            lambda b=basis: Loki().state(k, v, basis=b),
        ):
            with pytest.raises(ValueError, match=r"\(3, 8, 8\)"):
                call()
