"""Factored attention against the definition with keys and values formed, and its gradients."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn.core.cost import count_flops
from numattn.engines import latent as engine
from numattn.engines.latent import Factors, contract, factored_attention, factored_flops

F64 = torch.float64
SCALE = 0.4


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def factors(kind, rank, tokens, heads=4, width=6, batch=2, seed=0):
    """Both factors of every token, one of them shared by all tokens, or plain vectors."""
    if kind == "dense":
        return Factors(None, randn(batch, heads, tokens, width, seed=seed))
    a, b = (
        randn(batch, rank, tokens, heads, seed=seed),
        randn(batch, rank, tokens, width, seed=seed),
    )
    return Factors(a[0, :, 0] if kind == "shared a" else a, b[0, :, 0] if kind == "shared b" else b)


def formed(f, tokens):
    """The vectors, by a sum over ranks: (B, H, N, D)."""
    a, b = f
    if a is None:
        return b
    batch = max(len(t) for t in f if t.dim() == 4)
    a, b = (t if t.dim() == 4 else t[None, :, None].expand(batch, -1, tokens, -1) for t in (a, b))
    return sum(a[:, r, :, :, None] * b[:, r, :, None] for r in range(a.shape[1])).transpose(1, 2)


def dense(q, k, v, rows, tokens, bias=None, is_causal=False, first=0):
    """Softmax attention as it is defined."""
    q, k, v = formed(q, rows), formed(k, tokens), formed(v, tokens)
    logits = SCALE * q @ k.mT
    if bias is not None:
        logits = logits + bias[:, :, None]
    if is_causal:
        seen = torch.arange(tokens) <= first + torch.arange(rows)[:, None]
        logits = logits.masked_fill(~seen, -torch.inf)
    nothing = (logits == -torch.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(nothing, 0.0)
    weights = logits.softmax(-1).masked_fill(nothing, 0.0)
    return weights @ v, logits.logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf)


def agree(q, k, v, rows, tokens, **call):
    """Outputs, and the gradients of every factor."""
    found = []
    for form in (
        lambda *f: factored_attention(*f, scale=SCALE, **call),
        lambda *f: dense(*f, rows, tokens, **call),
    ):
        leaves = [None if t is None else t.clone().requires_grad_() for f in (q, k, v) for t in f]
        out, lse = form(*(Factors(*leaves[i : i + 2]) for i in (0, 2, 4)))
        alive = lse > -torch.inf
        value = (out * randn(*out.shape, seed=8)).sum()
        value = value + (lse[alive] * randn(*lse.shape, seed=9)[alive]).sum()
        real = [t for t in leaves if t is not None]
        found.append((out, lse, *torch.autograd.grad(value, real)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


KINDS = ["both", "shared a", "shared b", "dense"]


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("query", KINDS)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 37), (5, 37), (37, 37)])
def test_it_is_attention_to_the_formed_keys_and_values(query, key, rows, tokens):
    q = factors(query, 3, rows)
    k, v = factors(key, 2, tokens, seed=1), factors(key, 1, tokens, width=5, seed=2)
    agree(q, k, v, rows, tokens)
    agree(q, k, v, rows, tokens, is_causal=True, first=tokens - rows)


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_tiles_of_rows_and_of_tokens_merge(rows, monkeypatch):
    monkeypatch.setattr(engine, "tile_elements", lambda device: 1)  # 64 tokens at a time
    q = factors("both", 2, rows)
    k, v = factors("both", 2, 300, seed=1), factors("both", 2, 300, width=5, seed=2)
    agree(q, k, v, rows, 300, is_causal=True, first=300 - rows)


def test_without_keys_there_is_nothing():
    q = factors("both", 2, 3)
    k, v = factors("both", 2, 0, seed=1), factors("both", 2, 0, width=5, seed=2)
    out, lse = factored_attention(q, k, v, scale=SCALE)
    assert out.shape == (2, 4, 3, 5)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert factored_flops(q, k, v) == 0


def test_padding_and_a_row_without_keys():
    q, k, v = factors("both", 2, 4), factors("both", 2, 9, seed=1), factors("both", 2, 9, seed=2)
    bias = torch.zeros(2, 1, 9, dtype=F64)
    bias[0, :, :3] = -torch.inf
    bias[1] = -torch.inf
    agree(q, k, v, 4, 9, bias=bias)
    agree(q, k, v, 4, 9, bias=bias, is_causal=True)


@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize("rank", [1, 3])
def test_any_order_of_contraction_is_the_same_number(heads, rank):
    """Few heads and many ranks are contracted in another order than many heads and few ranks."""
    q, k = factors("both", rank, 3, heads), factors("both", 4 - rank, 8, heads, seed=1)
    logits = contract("bhnm", *q.named("rnd"), *k.named("smd"))
    torch.testing.assert_close(logits, formed(q, 3) @ formed(k, 8).mT, rtol=1e-12, atol=1e-12)


def test_the_order_depends_on_the_shape():
    def order(rank, heads):
        shapes = [(1, rank, 1, heads), (1, rank, 1, 8), (1, 2, 99, heads), (1, 2, 99, 8)]
        return engine._order("brnh,brnd,bsmh,bsmd->bhnm", *shapes)

    assert order(rank=2, heads=64) != order(rank=16, heads=2)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 500), (300, 300)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_operations_are_counted(rows, tokens, is_causal):
    q = factors("both", 3, rows)
    k, v = factors("both", 2, tokens, seed=1), factors("both", 2, tokens, width=5, seed=2)
    call = {"is_causal": is_causal, "first": tokens - rows}
    counted = count_flops(lambda: factored_attention(q, k, v, scale=SCALE, **call))
    said = factored_flops(q, k, v, **call)
    assert abs(said - counted) <= 0.02 * counted


def test_keys_and_values_are_never_formed():
    """Decoding one token holds tiles, and nothing of the size of all keys of all heads."""
    tokens, heads, width = 4000, 16, 64
    q = factors("both", 2, 1, heads, width, batch=1)
    k, v = (factors("both", 1, tokens, heads, width, batch=1, seed=s) for s in (1, 2))
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            made.extend(t.numel() for t in tree_leaves(out) if t._base is None)
            return out

    with Watch(), torch.no_grad():
        factored_attention(q, k, v, scale=SCALE)
    assert max(made) <= max(tokens * (heads + width), heads * tokens) < tokens * heads * width / 8
