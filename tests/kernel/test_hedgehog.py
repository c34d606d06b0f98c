"""Hedgehog: its definition, what its loss is, and that minimising it imitates softmax."""

import pytest
import torch

from numattn import padding_mask
from numattn.kernel.hedgehog import Hedgehog, HedgehogAttention, hedgehog_attention
from numattn.measure import load
from numattn.testing import make_qkv, reference_weights

F64 = torch.float64


def maps(heads=3, dim=8, seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = {"query_weight": (heads, dim, dim), "query_bias": (heads, dim)}
    shapes |= {"key_weight": (heads, dim, dim), "key_bias": (heads, dim)}
    return {n: torch.randn(*s, generator=source, dtype=F64) for n, s in shapes.items()}


def features(x, w, b):
    y = x @ w.T + b
    return torch.cat([torch.softmax(y, -1), torch.softmax(-y, -1)], -1)


def weights_by_definition(q, k, t, is_causal=False, attn_mask=None):
    """(B, H, Nq, Nk), head by head."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // group
            phi = features(q[b, h], t["query_weight"][g], t["query_bias"][g])
            psi = features(k[b, g], t["key_weight"][g], t["key_bias"][g])
            w = phi @ psi.T
            if is_causal:
                w = w.tril()
            if attn_mask is not None:
                w = w * attn_mask[b, 0, 0]
            out[b, h] = w / w.sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_is_the_definition(group, is_causal):
    q, k, v = make_qkv(150, group=group)
    t = maps()
    out = hedgehog_attention(q, k, v, is_causal=is_causal, enable_gqa=True, **t)
    want = weights_by_definition(q, k, t, is_causal) @ v.repeat_interleave(group, 1)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_without_maps_they_are_the_identity():
    q, k, v = make_qkv(20)
    module = HedgehogAttention(num_heads=3, head_dim=8).double()
    torch.testing.assert_close(module(q, k, v), hedgehog_attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_large_maps_are_sharp_and_finite():
    q, k, v = make_qkv(30, dtype=torch.float32)
    t = {n: (300 * x).float() for n, x in maps().items()}
    out = hedgehog_attention(q, k, v, is_causal=True, **t)
    assert out.isfinite().all()
    assert (out.abs().amax(-1) > 0).all()


def test_decoding_is_prefill_after_many_steps():
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        q, k, v = make_qkv(2000, batch=1, heads=1, group=2, dtype=dtype)
        t = {n: x.to(dtype) for n, x in maps(heads=1).items()}
        want = hedgehog_attention(q, k, v, is_causal=True, enable_gqa=True, **t)
        state = Hedgehog().state(k[:, :, :1], v[:, :, :1], enable_gqa=True, **t)
        for step in range(1, 2000):
            state.append(k[:, :, step : step + 1], v[:, :, step : step + 1])
        out = state.attend(q[:, :, -1:])
        torch.testing.assert_close(out, want[:, :, -1:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_the_cross_entropy(is_causal, padded):
    q, k, _ = make_qkv(21, group=2)
    t = maps()
    module = HedgehogAttention(num_heads=3, head_dim=8).double()
    module.load_state_dict(t)
    mask = padding_mask(torch.tensor([13, 21])) if padded else None
    call = {"attn_mask": mask, "is_causal": is_causal}
    exact = reference_weights(q, k, scale=0.7, **call)
    mine = weights_by_definition(q, k, t, is_causal, mask)
    rows = -torch.xlogy(exact, mine).where(exact > 0, torch.zeros_like(exact)).sum(-1)
    exists = torch.ones(2, 1, 21, dtype=torch.bool) if mask is None else mask[:, :, 0]
    want = (rows * exists).sum() / (6 * exists.sum())
    loss = module.distillation_loss(q, k, scale=0.7, enable_gqa=True, **call)
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-10)


def test_the_loss_does_not_depend_on_tiles(monkeypatch):
    q, k, _ = make_qkv(40)
    module = HedgehogAttention(num_heads=3, head_dim=8).double()
    losses, gradients = [], []
    for elements in (1 << 20, 500):
        monkeypatch.setattr("numattn.kernel.hedgehog.tile_elements", lambda _, n=elements: n)
        module.zero_grad()
        loss = module.distillation_loss(q, k, is_causal=True)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in module.parameters()])
    torch.testing.assert_close(*losses)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_no_maps_are_better_than_the_entropy():
    q, k, _ = make_qkv(30)
    p = reference_weights(q, k)
    entropy = -torch.xlogy(p, p).sum(-1).mean()
    for seed in range(5):
        module = HedgehogAttention(num_heads=3, head_dim=8).double()
        module.load_state_dict(maps(seed=seed))
        assert module.distillation_loss(q, k) >= entropy


def test_distillation_imitates_a_trained_head():
    """The loss falls, on the text it learns from and on the rest of the head's text."""
    x = load("smollm2-diffuse", length=256).to(torch.float32)
    call = {"is_causal": True, "scale": x.scale, "enable_gqa": True}
    learn, rest = ((x.q[:, :, s], x.k[:, :, s]) for s in (slice(0, 128), slice(128, 256)))
    torch.manual_seed(0)
    module = HedgehogAttention(num_heads=1, head_dim=64)
    before = [module.distillation_loss(*part, **call).item() for part in (learn, rest)]
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        module.distillation_loss(*learn, **call).backward()
        optimizer.step()
    after = [module.distillation_loss(*part, **call).item() for part in (learn, rest)]
    assert after[0] < before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize("name", ["query_weight", "query_bias", "key_weight", "key_bias"])
def test_tensors_of_another_shape_are_refused(name):
    q, k, v = make_qkv(5)
    with pytest.raises(ValueError, match=rf"hedgehog: {name}"):
        hedgehog_attention(q, k, v, **{**maps(), name: torch.zeros(2, 8)})
