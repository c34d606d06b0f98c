"""The latent engine against a loop in float64 and its gradients, and what it keeps in memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn.engines import latent as engine

F64 = torch.float64
SCALE = 0.4


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def inputs(rows, tokens, *, group=1, groups=2, shared=1, short=5, wide=7, turned=4, batch=2):
    """q (short entries meet the latent), q_rope, latent (wide), rope."""
    return [
        randn(batch, groups, rows * group, short),
        randn(batch, groups, rows * group, turned, seed=1),
        randn(batch, groups, tokens, wide, seed=2),
        randn(batch, shared, tokens, turned, seed=3),
    ]


def dense(q, q_rope, latent, rope, *, bias=None, is_causal=False, first=0, group=1):
    """The definition, row by row; differentiable."""
    outs, lses = [], []
    for r in range(q.shape[2]):
        keys = latent[..., : q.shape[3]]
        logits = (keys @ q[:, :, r, :, None] + rope @ q_rope[:, :, r, :, None])[..., 0] * SCALE
        if bias is not None:
            logits = logits + bias
        if is_causal:
            later = torch.arange(latent.shape[2]) > first + r // group
            logits = logits.masked_fill(later, -torch.inf)
        nothing = (logits == -torch.inf).all(-1, keepdim=True)
        logits = logits.masked_fill(nothing, 0.0)  # logsumexp of nothing has no gradient
        weights = logits.softmax(-1).masked_fill(nothing, 0.0)
        outs.append((weights[..., None] * latent).sum(2))
        lses.append(logits.logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf))
    return torch.stack(outs, 2), torch.stack(lses, 2)


def agree(rows, tokens, *, sizes=None, **call):
    """Both outputs, and the gradients of both, of every tensor."""
    tensors = inputs(rows, tokens, group=call.get("group", 1), **(sizes or {}))
    found = []
    for form in (lambda *a, **c: engine.latent_attention(*a, scale=SCALE, **c), dense):
        leaves = [x.clone().requires_grad_() for x in tensors]
        extra = {}
        if call.get("bias") is not None:
            extra["bias"] = call["bias"].clone().requires_grad_()
        out, lse = form(*leaves, **{**call, **extra})
        alive = lse > -torch.inf
        a, b = randn(*out.shape, seed=8), randn(*lse.shape, seed=9)
        value = (out * a).sum() + (lse[alive] * b[alive]).sum()
        found.append((out, lse, *torch.autograd.grad(value, [*leaves, *extra.values()])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    return found[0]


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Tiles of 8 x group rows and 64 tokens in the second case, so that all bounds are crossed."""
    if request.param == "many tiles":
        monkeypatch.setattr(engine, "ROWS", 8)
        monkeypatch.setattr(engine, "tile_elements", lambda device: 1)


@pytest.mark.usefixtures("tiles")
class TestAgainstDense:
    @pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 150), (7, 64), (8, 65), (20, 128)])
    def test_lengths(self, rows, tokens):
        agree(rows, tokens)

    @pytest.mark.parametrize("shared", [1, 3])
    def test_rope_of_all_groups_or_of_each(self, shared):
        agree(9, 70, sizes={"groups": 3, "shared": shared})

    @pytest.mark.parametrize("sizes", [{"short": 7}, {"short": 1}, {"turned": 0}])
    def test_widths(self, sizes):
        agree(9, 70, sizes=sizes)

    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize("first", [0, 1, 61, 62])
    def test_causal_rows_at_an_offset(self, first, group):
        agree(17, first + 17, is_causal=True, first=first, group=group)

    def test_causal_rows_before_the_end(self):
        agree(17, 150, is_causal=True, first=40, group=2)

    @pytest.mark.parametrize("shape", [(2, 2, 150), (1, 2, 150), (2, 1, 150), (1, 1, 150)])
    def test_bias_per_key(self, shape):
        agree(10, 150, bias=randn(*shape, seed=5))
        agree(10, 150, bias=randn(*shape, seed=5), is_causal=True, first=140)

    def test_bias_of_minus_infinity_removes_keys(self):
        bias = torch.zeros(2, 1, 150, dtype=F64)
        bias[0, :, 100:] = -torch.inf
        bias[1] = -torch.inf
        out, lse, *grads = agree(10, 150, bias=bias)
        assert not out[1].any()
        assert (lse[1] == -torch.inf).all()
        assert all(g.isfinite().all() for g in grads)
        q, q_rope, c, r = (x[:1] for x in inputs(10, 150))
        short = engine.latent_attention(q, q_rope, c[:, :, :100], r[:, :, :100], scale=SCALE)
        torch.testing.assert_close((out[:1], lse[:1]), short, rtol=1e-12, atol=1e-12)

    def test_rows_before_the_first_token(self):
        """Left padding and causal: they attend to nothing."""
        bias = torch.zeros(1, 1, 30, dtype=F64)
        bias[..., :12] = -torch.inf
        out, lse, *_ = agree(30, 30, bias=bias, is_causal=True)
        assert not out[:, :, :12].any()
        assert (lse[:, :, :12] == -torch.inf).all()
        assert (lse[:, :, 12:] > -torch.inf).all()

    def test_no_tokens(self):
        out, lse = engine.latent_attention(*inputs(5, 0), scale=SCALE)
        assert out.shape == (2, 2, 5, 7)
        assert not out.any()
        assert (lse == -torch.inf).all()

    def test_strided_views_of_one_cache(self):
        """As layers call it: latent and rope are parts of the rows of one tensor."""
        q, q_rope, _, _ = inputs(9, 70, groups=1)
        cache = randn(2, 70, 1, 11 + 3, seed=4).transpose(1, 2)[..., 3:]
        latent, rope = cache.split([7, 4], 3)
        assert not latent.is_contiguous()
        out = engine.latent_attention(q, q_rope, latent, rope, scale=SCALE)
        want = dense(q, q_rope, latent.contiguous(), rope.contiguous())
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)

    def test_logits_of_any_size(self):
        q, q_rope, c, r = inputs(9, 150)
        out, lse = engine.latent_attention(q, q_rope, c, r, scale=1e4)
        logits = 1e4 * (q @ c[..., :5].mT + q_rope @ r.mT)
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out, logits.softmax(-1) @ c, rtol=1e-9, atol=1e-9)


def test_half_precision_cache_is_read_in_the_type_of_queries():
    q, q_rope, c, r = inputs(9, 150)
    c, r = c.bfloat16(), r.bfloat16()
    out, lse = engine.latent_attention(q, q_rope, c, r, scale=SCALE)
    assert out.dtype == lse.dtype == F64
    want = dense(q, q_rope, c.double(), r.double())
    torch.testing.assert_close((out, lse), want, rtol=1e-12, atol=1e-12)


def test_inputs_are_not_written_to():
    tensors = [*inputs(9, 70), torch.zeros(1, 1, 70, dtype=F64)]
    kept = [x.clone() for x in tensors]
    engine.latent_attention(
        *tensors[:4], scale=SCALE, bias=tensors[4], is_causal=True, first=61, group=1
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, tensors, strict=True))


# --- memory ---------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.elements = max([self.elements, *sizes])
        return out


def kept_by_backward(length, **call):
    """Elements that backward keeps, each storage once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x  # held, so that no address is used twice
        return x

    leaves = [x.requires_grad_() for x in inputs(length, length, batch=1, groups=1)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        engine.latent_attention(*leaves, scale=SCALE, **call)
    return sum(x.untyped_storage().nbytes() // x.element_size() for x in kept.values())


@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_is_quadratic(causal, monkeypatch):
    monkeypatch.setattr(engine, "tile_elements", lambda device: 1 << 14)
    leaves = [x.requires_grad_() for x in inputs(1024, 1024, batch=1, groups=1)]
    bias = torch.zeros(1, 1, 1024, dtype=F64)
    with Largest() as largest:
        out, lse = engine.latent_attention(*leaves, scale=SCALE, bias=bias, is_causal=causal)
        (out.sum() + lse.sum()).backward()
    assert largest.elements <= max(1 << 14, 1024 * 7)


@pytest.mark.parametrize("causal", [False, True])
def test_what_backward_keeps_grows_linearly(causal, monkeypatch):
    monkeypatch.setattr(engine, "tile_elements", lambda device: 1)
    few, many = (kept_by_backward(length, is_causal=causal) for length in (512, 2048))
    assert many <= 4.4 * few, "four times the tokens keep more than four times as much"
