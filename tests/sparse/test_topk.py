"""Top-k attention against the definition, and against what the theory of dropped mass says."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import padding_mask
from numattn.sparse import TopK, topk, topk_attention
from numattn.testing import Subject, make_qkv, reference, reference_weights


def by_loop(q, k, v, num_keys, top_p, mask, is_causal):
    """Row by row: sort keys by falling logit and rising index, keep, renormalise."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        logits = {}
        for j in range(k.shape[2]):
            s = (q[b, h, i] @ k[b, h // group, j]).item() * q.shape[3] ** -0.5
            m = 0.0 if mask is None else mask.expand(*q.shape[:3], k.shape[2])[b, h, i, j].item()
            if m is False or (is_causal and j > i):
                continue
            if s + float(m) - float(m is True) > -math.inf:
                logits[j] = s if m is True else s + m
        order = sorted(logits, key=lambda j: (-logits[j], j))
        whole = sum(math.exp(s) for s in logits.values())
        kept, mass = [], 0.0
        for j in order[:num_keys]:
            if top_p is None or mass < top_p * whole:
                kept.append(j)
                mass += math.exp(logits[j])
        for j in kept:
            out[b, h, i] += math.exp(logits[j]) / mass * v[b, h // group, j]
    return out


def masks(n, heads):
    source = torch.Generator().manual_seed(5)
    bias = torch.randn(1, heads, n, n, generator=source, dtype=torch.float64)
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
@pytest.mark.parametrize("top_p", [None, 0.6])
def test_equals_the_definition(kind, is_causal, top_p):
    q, k, v = make_qkv(12, heads=2, group=2)
    mask = masks(12, 4)[kind]
    call = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": True}
    for num_keys in (1, 3, 12):
        out = topk_attention(q, k, v, num_keys=num_keys, top_p=top_p, **call)
        torch.testing.assert_close(out, by_loop(q, k, v, num_keys, top_p, mask, is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_do_not_show(monkeypatch, is_causal):
    q, k, v = make_qkv(70, group=3, batch=1, heads=2)
    keep = torch.rand(1, 6, 70, 70, generator=torch.Generator().manual_seed(0)) < 0.7
    call = {"num_keys": 5, "attn_mask": keep, "is_causal": is_causal, "enable_gqa": True}
    whole = topk_attention(q, k, v, **call)
    monkeypatch.setattr(topk, "tile_elements", lambda device: 1)
    torch.testing.assert_close(topk_attention(q, k, v, **call), whole)


@pytest.mark.parametrize("is_causal", [False, True])
def test_total_variation_is_the_dropped_mass(is_causal):
    q, k, _ = make_qkv(40)
    exact = reference_weights(q, k, is_causal=is_causal)
    before = torch.full(exact.shape[:3], torch.inf)
    for num_keys in (1, 2, 5, 17, 39, 40, 90):
        weights = Subject(TopK(num_keys)).weights(q, k, is_causal=is_causal)
        dropped = 1 - exact.topk(min(num_keys, 40), -1).values.sum(-1)
        distance = (weights - exact).abs().sum(-1) / 2
        torch.testing.assert_close(distance, dropped, atol=1e-12, rtol=0)
        assert (distance <= before + 1e-12).all()
        before = distance


def test_output_error_within_the_bound():
    """|o' - o| <= 2 R TV, R the radius of the values about any point."""
    q, k, v = make_qkv(40)
    exact = reference_weights(q, k)
    for num_keys in (1, 4, 16):
        distance = 1 - exact.topk(num_keys, -1).values.sum(-1)
        radius = (v - v.mean(2, keepdim=True)).norm(dim=-1).amax(-1)[..., None]
        error = (topk_attention(q, k, v, num_keys=num_keys) - reference(q, k, v)).norm(dim=-1)
        assert (error <= 2 * radius * distance + 1e-12).all()


def test_ties_go_to_the_lower_index():
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([0.0, 1, 2, 1, 1, 2, 1, 1, 0, 1]).view(1, 1, 10, 1)
    want = {1: [2], 2: [2, 5], 3: [1, 2, 5], 5: [1, 2, 3, 4, 5], 9: [0, *range(1, 8), 9]}
    for num_keys, kept in want.items():
        weights = Subject(TopK(num_keys)).weights(q, k).flatten()
        assert weights.nonzero().flatten().tolist() == kept
    equal = torch.zeros(1, 1, 300, 1)
    weights = Subject(TopK(70)).weights(q, equal).flatten()
    assert weights.nonzero().flatten().tolist() == list(range(70))


def test_keys_of_no_weight_are_never_kept():
    q, k, v = make_qkv(6, batch=1, heads=1)
    mask = torch.zeros(6, 6, dtype=torch.float64)
    mask[:, 3:] = -torch.inf
    mask[5] = -torch.inf
    for top_p in (None, 0.999999, 1.0):
        method = TopK(5, top_p)
        weights = Subject(method).weights(q, k, attn_mask=mask)
        assert not weights[..., 3:].any()
        assert not weights[:, :, 5].any()
        want = reference(q, k, v, attn_mask=mask)
        if top_p != 0.999999:
            torch.testing.assert_close(method(q, k, v, attn_mask=mask), want)


def test_top_p_keeps_the_smallest_set():
    """Against every subset of the keys."""
    q, k, _ = make_qkv(8, batch=1, heads=2)
    exact = reference_weights(q, k)
    subsets = torch.tensor(list(itertools.product((0.0, 1.0), repeat=8)), dtype=exact.dtype)
    masses = exact @ subsets.T  # (1, 2, 8, 256)
    for top_p in (1e-6, 0.3, 0.5, 0.8, 0.95, 0.999):
        kept = Subject(TopK(8, top_p)).weights(q, k) > 0
        assert ((exact * kept).sum(-1) >= top_p).all()
        sizes = subsets.sum(-1).expand_as(masses).where(masses >= top_p, torch.inf)
        assert torch.equal(kept.sum(-1).double(), sizes.amin(-1))
        few = (Subject(TopK(2, top_p)).weights(q, k) > 0).sum(-1)
        assert torch.equal(few, kept.sum(-1).clamp(max=2))


def test_top_p_of_one_is_no_limit():
    q, k, v = make_qkv(20)
    q = 40 * q  # some softmax weights are below rounding
    assert torch.equal(topk_attention(q, k, v, num_keys=7, top_p=1.0), TopK(7)(q, k, v))


@pytest.mark.parametrize("options", [{"num_keys": 3}, {"num_keys": 7, "top_p": 0.7}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradient_through_the_kept_keys(options, is_causal):
    q, k, v = make_qkv(7, batch=1, heads=1, group=2, head_dim=3, value_dim=2)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]

    def call(*x):
        return topk_attention(*x, **options, is_causal=is_causal, enable_gqa=True)

    assert torch.autograd.gradcheck(call, inputs)
    last = topk_attention(q[:, :1, :1], k, inputs[2], num_keys=2)
    last.sum().backward()
    assert (inputs[2].grad.abs().sum(-1) > 0).sum() == 2


def test_memory_is_that_of_a_tile(monkeypatch):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in (out if isinstance(out, (tuple, list)) else [out])]
            self.numel = max(self.numel, *sizes)
            return out

    monkeypatch.setattr(topk, "tile_elements", lambda device: 1)
    q, k, v = (x.requires_grad_() for x in make_qkv(512, batch=1, heads=1, head_dim=4))
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = topk_attention(q, k, v, is_causal=True)
        out.sum().backward()
    assert largest.numel <= 32 * 512
    inputs = q.nbytes + k.nbytes + v.nbytes
    assert inputs <= sum(kept.values()) <= 1.5 * inputs


@pytest.mark.parametrize("top_p", [0, 0.0, -0.5, 1.5, True, "0.9", math.nan])
def test_bad_mass_is_refused(top_p):
    q, k, v = make_qkv(4)
    for call in (lambda: TopK(top_p=top_p), lambda: topk_attention(q, k, v, top_p=top_p)):
        with pytest.raises(ValueError, match=r"topk: top_p must be"):
            call()
