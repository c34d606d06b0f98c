"""The softmax engine against dense float64 autograd: out, lse and the gradients of both."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn.engines import softmax as engine

F64 = torch.float64
SCALE = 0.4


def inputs(rows, keys, *, batch=2, heads=3, dim=5, width=4, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, *shape, generator=source, dtype=F64)
        for shape in ((rows, dim), (keys, dim), (keys, width))
    ]


def dense(q, k, v, *, bias=None, mask=None, is_causal=False, group=1):
    """Logits by the definition; a mask of `group` rows is repeated for every position."""
    logits = SCALE * torch.einsum("bhid,bhjd->bhij", q, k)
    if bias is not None:
        logits = logits + bias[..., None, :]
    if mask is not None:
        if 1 < mask.shape[2] < q.shape[2]:
            mask = mask.repeat(1, 1, q.shape[2] // group, 1)
        logits = (
            logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
        )
    if is_causal:
        position = torch.arange(q.shape[2]) // group
        hidden = torch.arange(k.shape[2]) > position[:, None]
        logits = logits.masked_fill(hidden, -torch.inf)
    nothing = (logits == -torch.inf).all(-1)
    logits = logits.masked_fill(nothing[..., None], 0.0)  # logsumexp of nothing has no gradient
    lse = logits.logsumexp(-1).masked_fill(nothing, -torch.inf)
    return logits.softmax(-1).masked_fill(nothing[..., None], 0.0) @ v, lse


def agree(rows, keys, **call):
    """Both outputs, and the gradients of both, of every argument that takes one."""
    given = {n: x for n, x in call.items() if isinstance(x, torch.Tensor) and x.dtype == F64}
    source = torch.Generator().manual_seed(7)
    found = []
    for form in (lambda *a, **c: engine.softmax_attention(*a, scale=SCALE, **c), dense):
        leaves = [x.requires_grad_() for x in inputs(rows, keys)]
        extra = {n: x.clone().requires_grad_() for n, x in given.items()}
        out, lse = form(*leaves, **{**call, **extra})
        source.manual_seed(7)
        a = torch.randn(out.shape, generator=source, dtype=F64)
        b = torch.randn(lse.shape, generator=source, dtype=F64)
        alive = lse > -torch.inf
        value = (out * a).sum() + (lse[alive] * b[alive]).sum()
        found.append((out, lse, *torch.autograd.grad(value, [*leaves, *extra.values()])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    return found[0]


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Tiles of 16 x group rows and 64 keys in the second case, so that all bounds are crossed."""
    if request.param == "many tiles":
        monkeypatch.setattr(engine, "ROWS", 16)
        monkeypatch.setattr(engine, "tile_elements", lambda device: 1)


def random_mask(*shape):
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    keep[..., 0, :] = False
    return keep


@pytest.mark.usefixtures("tiles")
class TestAgainstDense:
    @pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 150), (70, 1), (70, 150), (150, 70)])
    def test_lengths(self, rows, keys):
        agree(rows, keys)

    def test_no_keys(self):
        out, lse = engine.softmax_attention(*inputs(5, 0), scale=SCALE)
        assert not out.any()
        assert (lse == -torch.inf).all()

    @pytest.mark.parametrize("shape", [(2, 3, 150), (1, 3, 150), (2, 1, 150), (1, 1, 150)])
    def test_bias_per_key(self, shape):
        agree(70, 150, bias=torch.randn(shape, generator=torch.Generator().manual_seed(2)).double())

    def test_bias_of_minus_infinity_removes_keys(self):
        bias = torch.zeros(2, 1, 150, dtype=F64)
        bias[0, :, 100:] = -torch.inf
        bias[1] = -torch.inf
        out, lse, *grads = agree(70, 150, bias=bias)
        assert not out[1].any()
        assert (lse[1] == -torch.inf).all()
        assert all(g.isfinite().all() for g in grads)
        q, k, v = inputs(70, 150)
        short = engine.softmax_attention(q[:1], k[:1, :, :100], v[:1, :, :100], scale=SCALE)
        torch.testing.assert_close((out[:1], lse[:1]), short, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        "shape", [(2, 3, 80, 80), (1, 1, 80, 80), (2, 1, 1, 80), (1, 3, 80, 1)]
    )
    def test_bool_masks(self, shape, causal):
        agree(80, 80, mask=random_mask(*shape), is_causal=causal)

    @pytest.mark.parametrize(
        "shape", [(2, 3, 80, 80), (1, 1, 80, 80), (2, 1, 1, 80), (1, 3, 80, 1)]
    )
    def test_float_masks(self, shape):
        added = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=F64)
        agree(80, 80, mask=added)
        agree(80, 80, mask=added, is_causal=True)
        if shape[2] > 1:
            agree(80, 80, mask=added.masked_fill(~random_mask(*shape), -torch.inf))

    @pytest.mark.parametrize("group", [1, 2, 5])
    def test_causal_with_grouped_rows(self, group):
        agree(90 * group, 90, is_causal=True, group=group)

    @pytest.mark.parametrize("group", [2, 5])
    def test_mask_of_one_group_is_repeated(self, group):
        mask = random_mask(2, 3, group, 90)
        agree(90 * group, 90, mask=mask, group=group)
        agree(90 * group, 90, mask=mask, group=group, is_causal=True)

    @pytest.mark.parametrize("first", [0, 7, 60])
    def test_rows_that_start_at_a_later_position(self, first):
        q, k, v = inputs(90, 90)
        part = engine.softmax_partial(
            q[:, :, first:], k, v, scale=SCALE, is_causal=True, first=first
        )
        out, lse = dense(q, k, v, is_causal=True)
        torch.testing.assert_close(
            part.finalize(), (out[:, :, first:], lse[:, :, first:]), rtol=1e-12, atol=1e-12
        )

    def test_parts_over_disjoint_keys_merge(self):
        q, k, v = inputs(30, 150)
        parts = [
            engine.softmax_partial(q, k[:, :, a:b], v[:, :, a:b], scale=SCALE)
            for a, b in ((0, 20), (20, 21), (21, 150))
        ]
        out = parts[0].merge(parts[1]).merge(parts[2]).finalize()
        torch.testing.assert_close(out, dense(q, k, v), rtol=1e-12, atol=1e-12)

    def test_logits_of_any_size(self):
        q, k, v = inputs(30, 150)
        out, lse = engine.softmax_attention(q, k, v, scale=1e4)
        logits = 1e4 * q @ k.mT
        assert out.isfinite().all()
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out, logits.softmax(-1) @ v, rtol=1e-9, atol=1e-9)

    def test_adding_to_every_logit_moves_lse_only(self):
        q, k, v = inputs(30, 150)
        bias = torch.full((1, 1, 150), 3.25, dtype=F64)
        before = engine.softmax_attention(q, k, v, scale=SCALE)
        after = engine.softmax_attention(q, k, v, scale=SCALE, bias=bias)
        torch.testing.assert_close(after[0], before[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after[1], before[1] + 3.25, rtol=1e-12, atol=1e-12)


def test_inputs_are_not_written_to():
    q, k, v = inputs(20, 20)
    bias, mask = torch.zeros(1, 1, 20, dtype=F64), random_mask(1, 1, 20, 20)
    kept = [x.clone() for x in (q, k, v, bias, mask)]
    engine.softmax_attention(q, k, v, scale=1.0, bias=bias, mask=mask, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v, bias, mask), strict=True))


def test_key_bias_removes_padded_keys():
    keep = torch.tensor([[[True, False, True]]])
    like = torch.zeros(1, dtype=F64)
    assert engine.key_bias(None, like) is None
    bias = engine.key_bias(keep, like)
    assert bias.dtype == F64
    assert bias.tolist() == [[[0.0, -torch.inf, 0.0]]]


def test_fused_attention_serves_equal_widths_only():
    q, k, v = inputs(9, 9, width=5)
    for causal in (False, True):
        out = engine.fused_attention(q, k, v, is_causal=causal, scale=SCALE)
        want = dense(q, k, v, is_causal=causal)[0]
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    assert engine.fused_attention(q, k, v[..., :4], is_causal=False, scale=SCALE) is None


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


def memory(length, **call):
    """Elements that backward keeps, each storage once, and those of the largest tensor made."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x  # held, so that no address is used twice
        return x

    leaves = [x.requires_grad_() for x in inputs(length, length, batch=1, heads=1, width=6)]
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out, lse = engine.softmax_attention(*leaves, scale=SCALE, **call)
        (out.sum() + lse.sum()).backward()
    saved = sum(x.untyped_storage().nbytes() // x.element_size() for x in kept.values())
    return saved, largest.elements


@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_is_quadratic(causal, monkeypatch):
    monkeypatch.setattr(engine, "tile_elements", lambda device: 1 << 14)
    bias = torch.zeros(1, 1, 1024, dtype=F64)
    largest = memory(1024, is_causal=causal, bias=bias)[1]
    assert largest <= max(1 << 14, 1024 * 6)


@pytest.mark.parametrize("causal", [False, True])
def test_what_backward_keeps_grows_linearly(causal, monkeypatch):
    monkeypatch.setattr(engine, "tile_elements", lambda device: 1)
    few, many = (memory(length, is_causal=causal)[0] for length in (512, 2048))
    assert many <= 4.4 * few, "four times the tokens keep more than four times as much"
