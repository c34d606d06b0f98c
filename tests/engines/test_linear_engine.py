"""The feature-map engine: its three operations, its three forms, and what backward keeps."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn.core.partial import Partial
from numattn.engines import linear as engine

F64 = torch.float64


def tokens(rows, keys, *, m=6, width=3, batch=2, heads=2, seed=0):
    """Positive features of rows and of keys, and values."""
    source = torch.Generator().manual_seed(seed)
    fq = torch.rand(batch, heads, rows, m, generator=source, dtype=F64) + 0.1
    fk = torch.rand(batch, heads, keys, m, generator=source, dtype=F64) + 0.1
    return fq, fk, torch.randn(batch, heads, keys, width, generator=source, dtype=F64)


def dense(fq, fk, v, *, keep=None, is_causal=False, group=1):
    """sum_j (fq_i . fk_j) v_j and sum_j fq_i . fk_j, position of row r being r // group."""
    weight = fq @ fk.mT
    if keep is not None:
        weight = weight * keep[..., None, :]
    if is_causal:
        position = torch.arange(fq.shape[2]) // group
        weight = weight * (torch.arange(fk.shape[2]) <= position[:, None])
    return weight @ v, weight.sum(-1)


def quotient(num, den):
    return num / den.where(den != 0, 1.0)[..., None]


def total(part):
    """A partial without its shift: (num, den) themselves."""
    weight = torch.where(part.shift == -torch.inf, 0.0, part.shift).exp()
    return part.num * weight[..., None], part.den * weight


def same(part, num, den, tolerance=1e-12):
    ours = total(part)
    torch.testing.assert_close(ours[0], num, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], den, rtol=tolerance, atol=tolerance)


def given(x, log):
    """Features as the engine takes them."""
    return x.log() if log else x.clone()


def identity(x):
    return x.clone()  # the engine may overwrite what a feature map returns


def masked(features, keep, log):
    """Features of a chunk, those of padding being zero."""
    return given(features if keep is None else features * keep[..., None], log)


KEEP = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)[:, None]


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize("log", [False, True])
class TestOperations:
    def test_write_sums_tokens_into_slots(self, log, keep):
        _, fk, v = tokens(1, 7)
        part = engine.write(given(fk, log), v, keep, log)
        weight = fk if keep is None else fk * keep[..., None]
        same(part, weight.mT @ v, weight.sum(2))

    def test_writes_of_disjoint_tokens_merge(self, log, keep):
        _, fk, v = tokens(1, 7)
        masks = (None, None) if keep is None else (keep[..., :3], keep[..., 3:])
        first = engine.write(given(fk[:, :, :3], log), v[:, :, :3], masks[0], log)
        second = engine.write(given(fk[:, :, 3:], log), v[:, :, 3:], masks[1], log)
        whole = engine.write(given(fk, log), v, keep, log)
        same(first.merge(second), *total(whole))

    def test_read_of_a_write_is_attention(self, log, keep):
        fq, fk, v = tokens(5, 7)
        part = engine.read(given(fq, log), engine.write(given(fk, log), v, keep, log), log)
        same(part, *dense(fq, fk, v, keep=keep))

    @pytest.mark.parametrize("group", [1, 3])
    def test_a_chunk_is_its_own_part_and_the_slots_before(self, log, keep, group):
        fq, fk, v = tokens(7 * group, 7)
        nothing = engine.Partial.zeros(fq.shape[:3], v.shape[3], v)
        same(
            engine.within(given(fq, log), masked(fk, keep, log), v, nothing, group, log),
            *dense(fq, fk, v, keep=keep, is_causal=True, group=group),
        )
        old = None if keep is None else keep[..., :4]
        new = None if keep is None else keep[..., 4:]
        slots = engine.write(given(fk[:, :, :4], log), v[:, :, :4], old, log)
        late = given(fq[:, :, 4 * group :], log)
        before = engine.read(late, slots, log)
        chunk = (masked(fk[:, :, 4:], new, log), v[:, :, 4:])
        num, den = dense(fq, fk, v, keep=keep, is_causal=True, group=group)
        part = engine.within(late, *chunk, before, group, log)
        same(part, num[:, :, 4 * group :], den[:, :, 4 * group :])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_forms_and_their_gradients_are_the_dense_ones(is_causal, log, group, padded, monkeypatch):
    """Over many tiles and chunks, with a short last one."""
    monkeypatch.setattr(engine, "CHUNK", 16)
    monkeypatch.setattr(engine, "tile_elements", lambda device: 1)
    length = 150
    fq, fk, v = tokens(length * group, length)
    keep = None
    if padded:
        keep = torch.ones(2, 1, length, dtype=torch.bool)
        keep[0, :, :40] = keep[1, :, 70:] = False
    weight = torch.randn(2, 2, length * group, 3, dtype=F64)
    grads = []
    for form in ("engine", "dense"):
        leaves = [given(x, log).requires_grad_() for x in (fq, fk)] + [v.clone().requires_grad_()]
        if form == "engine":
            out = engine.linear_attention(
                *leaves,
                identity,
                identity,
                log=log,
                is_causal=is_causal,
                padding=keep,
                group=group,
            )
        else:
            features = [x.exp() if log else x for x in leaves[:2]]
            parts = dense(*features, leaves[2], keep=keep, is_causal=is_causal, group=group)
            out = quotient(*parts)
        grads.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_chunks_of_nothing_but_padding_in_single_precision(is_causal):
    """Their scale is -1e30, which float32 rounds by more than any exponent can be."""
    length = 3 * engine.CHUNK
    fq, fk, v = tokens(length, length)
    keep = torch.arange(length).expand(2, 1, -1) >= 2 * engine.CHUNK
    call = {"is_causal": is_causal, "padding": keep, "log": True}
    leaves = [x.float().requires_grad_() for x in (given(fq, True), given(fk, True), v)]
    out = engine.linear_attention(*leaves, identity, identity, **call)
    want = quotient(*dense(fq, fk, v, keep=keep, is_causal=is_causal))
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


def scan_features(kind, m):
    """Features of tokens of width 10, positive, signed or as logarithms."""
    omega = torch.randn(10, m, generator=torch.Generator().manual_seed(m), dtype=F64) / 10**0.5
    plain = {
        "positive": lambda x: (x @ omega).exp(),
        "log": lambda x: (x @ omega).exp(),
        "signed": lambda x: x @ omega + 0.7,  # products of both signs, sums away from zero
    }[kind]
    return plain, (lambda x: x @ omega) if kind == "log" else plain


@pytest.mark.parametrize("kind", ["positive", "log", "signed"])
@pytest.mark.parametrize(
    ("length", "m", "width", "group"),
    [
        (1, 16, 3, 2),
        (63, 256, 5, 1),
        (64, 60, 24, 2),
        (65, 100, 7, 1),
        (781, 64, 5, 2),
        (1334, 16, 12, 1),
        (1334, 100, 3, 1),
    ],
)
def test_causal_scan_and_its_gradients_are_the_masked_kernel(kind, length, m, width, group):
    """Tokens, features and values of three widths, at lengths around and off those of chunks."""
    source = torch.Generator().manual_seed(length)
    q = torch.randn(1, 2, length * group, 10, generator=source, dtype=F64)
    k = torch.randn(1, 2, length, 10, generator=source, dtype=F64)
    v = torch.randn(1, 2, length, width, generator=source, dtype=F64)
    weight = torch.randn(1, 2, length * group, width, generator=source, dtype=F64)
    plain, given_form = scan_features(kind, m)
    if kind == "signed":
        pairs = plain(q) @ plain(k).mT
        assert length == 1 or ((pairs < 0).any() and (pairs > 0).any())
    found = []
    for form in ("engine", "dense"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if form == "engine":
            out = engine.linear_attention(
                *leaves,
                given_form,
                given_form,
                log=kind == "log",
                is_causal=True,
                group=group,
                num_features=m,
            )
        else:
            features = [plain(x) for x in leaves[:2]]
            out = quotient(*dense(*features, leaves[2], is_causal=True, group=group))
        found.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 * max(1.0, scale))


def test_lengths_at_the_edges_of_chunks():
    for length in (1, engine.CHUNK - 1, engine.CHUNK, engine.CHUNK + 1, 3 * engine.CHUNK):
        fq, fk, v = tokens(length, length)
        out = engine.linear_attention(fq, fk, v, identity, identity, log=False, is_causal=True)
        want = quotient(*dense(fq, fk, v, is_causal=True))
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_chunks_cover_the_length_once():
    for length in (1, 128, 129, 1000, 1024):
        for at_once in (1, 3):
            spans = engine._chunk_spans(length, at_once)
            assert sum(span for span, _ in spans) == length
            assert all(span % size == 0 and size <= engine.CHUNK for span, size in spans)
            assert all(span <= at_once * engine.CHUNK for span, _ in spans)


@pytest.mark.parametrize("is_causal", [False, True])
def test_log_features_of_any_size_and_their_gradients(is_causal):
    """Hundreds of orders of magnitude apart, between tokens and between features."""
    source = torch.Generator().manual_seed(0)
    fq, fk = (1000 * torch.randn(1, 1, 40, 5, generator=source, dtype=F64) for _ in range(2))
    v = torch.randn(1, 1, 40, 3, generator=source, dtype=F64)
    fk[:, :, 10:20] -= 5000
    found = []
    for form in ("engine", "dense"):
        q, k, value = leaves = [x.clone().requires_grad_() for x in (fq, fk, v)]
        if form == "engine":
            out = engine.linear_attention(
                q, k, value, identity, identity, log=True, is_causal=is_causal
            )
        else:
            logits = (q[..., :, None, :] + k[..., None, :, :]).logsumexp(-1)
            if is_causal:
                hidden = ~torch.ones(40, 40, dtype=torch.bool).tril()
                logits = logits.masked_fill(hidden, -torch.inf)
            out = logits.softmax(-1) @ value
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_signed_features_are_divided_by_what_they_sum_to():
    fq, fk, v = tokens(40, 40)
    fq = fq * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=F64)
    out = engine.linear_attention(fq, fk, v, identity, identity, log=False, is_causal=True)
    want = quotient(*dense(fq, fk, v, is_causal=True))
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("log", [False, True])
def test_state_holds_the_slots_of_all_tokens(log):
    fq, fk, v = tokens(12, 9)
    fq = fq[:, :, :6].repeat(1, 2, 1, 1)  # two query heads per key head
    state = engine.SlotsState(
        given(fk[:, :, :2], log), v[:, :, :2], identity, identity, log=log, num_slots=6
    )
    kept = state.nbytes
    state.append(given(fk[:, :, 2:8], log), v[:, :, 2:8])
    state.append(given(fk[:, :, 8:], log), v[:, :, 8:])
    state.append(given(fk[:, :, :0], log), v[:, :, :0])
    wide = [x.repeat_interleave(2, dim=1) for x in (fk, v)]
    want = quotient(*dense(fq, *wide))
    torch.testing.assert_close(state.attend(given(fq, log)), want, rtol=1e-12, atol=1e-12)
    assert state.nbytes == kept == 2 * 2 * 6 * (3 + 2) * 8


def test_empty_state_gives_zeros():
    fq, fk, v = tokens(4, 0)
    for log in (False, True):
        state = engine.SlotsState(fk, v, identity, identity, log=log, num_slots=6)
        assert not state.attend(given(fq, log)).any()


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


def memory(call, leaves):
    """Elements that backward keeps, each storage once, and those of the largest tensor made."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x  # held, so that no address is used twice
        return x

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = call(*leaves)
        out.sum().backward()
    saved = sum(x.untyped_storage().nbytes() // x.element_size() for x in kept.values())
    return saved, largest.elements


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_of_all_tokens_by_features_by_width(is_causal, log):
    length, m, width = 1024, 64, 64
    fq, fk, v = tokens(length, length, m=m, width=width, batch=1, heads=1)
    omega = torch.eye(m, dtype=F64)

    def call(q, k, v):
        def feature(x):
            return x @ omega

        return engine.linear_attention(q, k, v, feature, feature, log=log, is_causal=is_causal)

    leaves = [given(x, log).requires_grad_() for x in (fq, fk)] + [v.requires_grad_()]
    saved, largest = memory(call, leaves)
    inputs = sum(x.numel() for x in leaves)
    slots = (length // engine.CHUNK + 1) * m * (width + 2)
    # The inputs and the output, and the slots before each chunk or tile, twice over.
    assert saved <= 2 * (inputs + length * width + slots)
    assert saved < length * m * width / 8
    assert largest <= length * max(m, width, engine.CHUNK)


def test_memory_of_a_naive_form_would_be_noticed():
    """The prefix sums that textbooks write down, through the same measurement."""
    fq, fk, v = tokens(256, 256, m=16, width=16, batch=1, heads=1)

    def naive(q, k, v):
        slots = (k[..., None] * v[..., None, :]).cumsum(2)
        return (q[..., None] * slots).sum(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)

    saved, largest = memory(naive, [x.requires_grad_() for x in (fq, fk, v)])
    assert min(saved, largest) >= 256 * 16 * 16


@pytest.mark.parametrize("log", [False, True])
def test_running_slots_are_prefix_sums(log):
    _, fk, v = tokens(1, 12)
    chunks = engine.write(given(fk, log).unflatten(2, (3, 4)), v.unflatten(2, (3, 4)), None, log)
    before, after = engine._running(chunks, log, None, None, None)
    for c in range(3):
        part = Partial(before.num[:, :, c], before.den[:, :, c], before.shift[:, :, c])
        same(part, fk[:, :, : 4 * c].mT @ v[:, :, : 4 * c], fk[:, :, : 4 * c].sum(2))
    same(after, fk.mT @ v, fk.sum(2))
