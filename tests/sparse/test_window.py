"""Window attention against dense attention under the mask that its definition spells out."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import padding_mask
from numattn.core.cost import Shape
from numattn.sparse import Window, window, window_attention
from numattn.testing import Subject, make_qkv, reference, reference_weights

N = 50

OPTIONS = [
    {"window": 1, "num_sinks": 0},
    {"window": 2, "num_sinks": 3},
    {"window": 7, "num_sinks": 0, "num_global": 2},
    {"window": 20, "num_sinks": 4, "num_global": 1},
    {"window": 8, "num_sinks": 1, "num_global": 5},
    {"window": 20, "num_sinks": 60, "num_global": 70},
    {"window": 400, "num_sinks": 2},
]


def pattern(n, is_causal, *, window, num_sinks, num_global=0, tokens=None):
    """The definition, pair by pair; `tokens` are the positions that exist."""
    tokens = list(range(n)) if tokens is None else tokens
    first, special = tokens[: max(num_sinks, num_global)], tokens[:num_global]
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            if is_causal:
                near = i - window < j <= i
                seen[i, j] = near or (j in first and j <= i)
            else:
                near = i - window // 2 <= j < i - window // 2 + window
                seen[i, j] = near or j in first or i in special
    return seen


@pytest.fixture
def short_tiles(monkeypatch):
    monkeypatch.setattr(window, "_ROWS", 16)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_equals_dense_attention_under_the_pattern(short_tiles, options, is_causal, group):
    q, k, v = make_qkv(N, heads=2, group=group)
    out = window_attention(q, k, v, **options, is_causal=is_causal, enable_gqa=True)
    mask = pattern(N, is_causal, **options)
    torch.testing.assert_close(out, reference(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_enough_for_real_tiles(is_causal):
    q, k, v = make_qkv(300, batch=1, heads=1, group=2)
    options = {"window": 70, "num_sinks": 4, "num_global": 3}
    out = window_attention(q, k, v, **options, is_causal=is_causal, enable_gqa=True)
    mask = pattern(300, is_causal, **options)
    torch.testing.assert_close(out, reference(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["right", "left", "holes", "few"])
def test_padding(short_tiles, options, is_causal, kind):
    """The window counts stored positions; the first tokens are the first that exist."""
    q, k, v = make_qkv(N, group=2, batch=2, heads=1)
    padding = padding_mask(torch.tensor([29, N]), side="left" if kind == "left" else "right")
    if kind == "holes":
        padding = torch.rand(2, 1, 1, N, generator=torch.Generator().manual_seed(0)) < 0.5
    elif kind == "few":
        padding = padding_mask(torch.tensor([1, 3]), N, side="left")
    call = {"attn_mask": padding, "is_causal": is_causal, "enable_gqa": True}
    out = window_attention(q, k, v, **options, **call)
    for b in range(2):
        exists = padding[b, 0, 0]
        tokens = exists.nonzero().flatten().tolist()
        mask = pattern(N, is_causal, **options, tokens=tokens) & exists
        want = reference(q[b : b + 1], k[b : b + 1], v[b : b + 1], attn_mask=mask)
        torch.testing.assert_close(out[b, :, exists], want[0, :, exists])


def test_padding_shared_by_the_batch(short_tiles):
    q, k, v = make_qkv(N)
    padding = padding_mask(torch.tensor([20]), N, side="left")
    for is_causal in (False, True):
        call = {"window": 6, "num_sinks": 2, "num_global": 3, "is_causal": is_causal}
        one = window_attention(q, k, v, **call, attn_mask=padding)
        each = window_attention(q, k, v, **call, attn_mask=padding.expand(2, -1, -1, -1))
        torch.testing.assert_close(one, each)


def test_padding_that_speaks_of_whole_sequences():
    q, k, v = make_qkv(N)
    mask = torch.tensor([False, True]).view(2, 1, 1, 1)
    for is_causal in (False, True):
        call = {"window": 6, "num_global": 3, "is_causal": is_causal}
        out = window_attention(q, k, v, **call, attn_mask=mask)
        assert not out[0].any()
        torch.testing.assert_close(out[1], window_attention(q, k, v, **call)[1])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_and_biases_meet_the_pattern(short_tiles, options, is_causal):
    q, k, v = make_qkv(N, group=2)
    source = torch.Generator().manual_seed(1)
    keep = torch.rand(2, 6, N, N, generator=source) < 0.6
    bias = torch.randn(1, 6, N, N, generator=source, dtype=q.dtype)
    seen = pattern(N, is_causal, **options)
    for mask in (
        keep,
        keep[:, :1],
        keep[..., :1],
        bias,
        bias[:, :, :1],
        bias[:, :1],
        bias[..., :1],
    ):
        out = window_attention(
            q, k, v, **options, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )
        both = seen & mask if mask.dtype is torch.bool else mask.where(seen, -torch.inf)
        torch.testing.assert_close(out, reference(q, k, v, attn_mask=both))


def test_window_of_the_length_is_exact():
    q, k, v = make_qkv(N)
    for sinks in (0, 4):
        out = window_attention(q, k, v, window=N, num_sinks=sinks, is_causal=True)
        torch.testing.assert_close(out, reference(q, k, v, is_causal=True))
        out = window_attention(q, k, v, window=2 * N - 1, num_sinks=sinks)
        torch.testing.assert_close(out, reference(q, k, v))
    for is_causal in (False, True):
        out = window_attention(q, k, v, window=1, num_sinks=N, is_causal=is_causal)
        torch.testing.assert_close(out, reference(q, k, v, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_total_variation_is_the_mass_outside(is_causal):
    q, k, _ = make_qkv(N)
    method = Window(window=9, num_sinks=2)
    exact = reference_weights(q, k, is_causal=is_causal)
    weights = Subject(method).weights(q, k, is_causal=is_causal)
    outside = ~pattern(N, is_causal, **method.options())
    distance = (weights - exact).abs().sum(-1) / 2
    torch.testing.assert_close(distance, (exact * outside).sum(-1), atol=1e-12, rtol=0)


def test_units_bound_the_keys_of_a_row():
    q, k, _ = make_qkv(N, batch=1)
    for options in OPTIONS:
        method = Window(**{**options, "num_global": 0})
        units = method.cost(Shape(1, 3, 3, N, N, 8, 5)).units
        for is_causal in (False, True):
            kept = (Subject(method).weights(q, k, is_causal=is_causal) > 0).sum(-1)
            assert kept.max() <= units


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", [None, "left"])
def test_gradients(monkeypatch, is_causal, side):
    monkeypatch.setattr(window, "_ROWS", 4)
    q, k, v = make_qkv(9, batch=1, heads=1, group=2, head_dim=3, value_dim=2)
    mask = None if side is None else padding_mask(torch.tensor([6]), 9, side=side)

    def call(q, k, v):
        return window_attention(
            *(q, k, v),
            **{"window": 3, "num_sinks": 1, "num_global": 2},
            **{"attn_mask": mask, "is_causal": is_causal, "enable_gqa": True},
        )

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, k, v)])


class Written(TorchDispatchMode):
    """Elements of all results, and of the largest."""

    def __init__(self):
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else [out]
        sizes = [x.numel() for x in results if isinstance(x, torch.Tensor)]
        self.total += sum(sizes)
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("is_causal", [False, True])
def test_work_and_memory_are_linear(monkeypatch, is_causal):
    """Backward too: what is written doubles with the length, and nothing is N by N."""
    monkeypatch.setattr(window, "_ROWS", 32)
    totals = []
    for n in (2048, 4096):
        q, k, v = (x.requires_grad_() for x in make_qkv(n, batch=1, heads=1, head_dim=16))
        with Written() as written:
            window_attention(q, k, v, window=16, num_sinks=2, is_causal=is_causal).sum().backward()
        totals.append(written.total)
        assert written.largest <= n * 16
    assert totals[1] <= 2.1 * totals[0]


def test_backward_keeps_no_weights():
    q, k, v = (x.requires_grad_() for x in make_qkv(512, batch=1, heads=1, head_dim=4))
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = window_attention(q, k, v, window=256, is_causal=True)
    inputs = q.nbytes + k.nbytes + v.nbytes
    assert inputs <= sum(kept.values()) <= 1.5 * inputs
    out.sum().backward()


# --- decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("steps", [(N,), (0,), (3,), (11, 1, 20), (9, 30), (24, 24)])
def test_decoding_in_pieces_equals_prefill(options, steps):
    """Prefix, then tokens by the handful, then one by one."""
    q, k, v = make_qkv(N, group=2)
    method = Window(**options)
    want = method(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    at = steps[0]
    state = method.state(k[:, :, :at], v[:, :, :at], scale=0.3, enable_gqa=True)
    for step in (*steps[1:], *([1] * (N - sum(steps)))):
        state.append(k[:, :, at : at + step], v[:, :, at : at + step])
        at += step
        out = state.attend(q[:, :, at - 1 : at])
        torch.testing.assert_close(out, want[:, :, at - 1 : at])
        said = method.cost(Shape(2, 6, 3, at, at, 8, 5, itemsize=8)).cache
        assert state.nbytes == said
    torch.testing.assert_close(state.attend(q[:, :, -1:]), want[:, :, -1:])


def test_state_does_not_grow():
    _, k, v = make_qkv(200)
    state = Window(window=10, num_sinks=3).state(k[:, :, :13], v[:, :, :13])
    full = state.nbytes
    assert full == 2 * 3 * 13 * (8 + 5) * 8
    for t in range(13, 200):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert state.nbytes == full


def test_state_leaves_the_prefix_alone():
    _, k, v = make_qkv(20)
    kept = k.clone(), v.clone()
    state = Window(window=10, num_sinks=2).state(k[:, :, :12], v[:, :, :12])
    state.append(-k[:, :, 12:], -v[:, :, 12:])
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])


def test_state_refuses_what_it_cannot_use():
    q, k, v = make_qkv(8, group=2)
    state = Window().state(k, v)
    with pytest.raises(ValueError, match="enable_gqa"):
        state.attend(q[:, :, :1])
    with pytest.raises(TypeError, match=r"window takes no tensor named center"):
        Window().state(k, v, center=k)


@pytest.mark.parametrize("option", ["window", "num_sinks", "num_global"])
@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_bad_options_are_refused(option, value):
    q, k, v = make_qkv(4)
    options = {option: value}
    for call in (lambda: Window(**options), lambda: window_attention(q, k, v, **options)):
        with pytest.raises(ValueError, match=f"window: {option} must be"):
            call()
