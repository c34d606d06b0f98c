from functools import partial

import pytest
import torch

from numattn import padding_mask
from numattn.engines.lift import LEAF, lift
from numattn.lowrank import Nystrom, nystrom, nystrom_attention
from numattn.testing import make_qkv, reference


def segments(x, m):
    """Means of the segments of x (n, D) that are not empty: token t is in segment t m // n."""
    n = x.shape[0]
    groups = [[t for t in range(n) if t * m // n == s] for s in range(m)]
    return torch.stack([x[g].mean(0) for g in groups if g]), [len(g) for g in groups if g]


def by_definition(q, k, v, m, sample=None):
    """One head: F A^+ (B v) with a plain pseudo-inverse; also sum_s n_s exp(q . k~_s)."""
    scale = q.shape[-1] ** -0.5
    qt, _ = segments(q if sample is None else sample, m)
    kt, counts = segments(k, m)
    f = torch.softmax(scale * q @ kt.T, -1)
    a = torch.softmax(scale * qt @ kt.T, -1)
    b = torch.softmax(scale * qt @ k.T, -1)
    mass = (scale * q @ kt.T).exp() @ torch.tensor(counts, dtype=q.dtype)
    return f @ torch.linalg.pinv(a, rtol=1e-13) @ (b @ v), mass


def loop(q, k, v, m, lengths=None, first=0):
    """Every batch entry and query head by itself; entry b has tokens first .. first + n."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        keys = slice(0, k.shape[2]) if lengths is None else slice(first[b], first[b] + lengths[b])
        rows = slice(0, q.shape[2]) if lengths is None else keys
        for h in range(q.shape[1]):
            kv = h // group
            out[b, h, rows], _ = by_definition(q[b, h, rows], k[b, kv, keys], v[b, kv, keys], m)
    return out


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (23, 41), (41, 23), (5, 41)])
def test_is_the_definition(queries, keys, group):
    q, k, v = make_qkv(queries, keys=keys, group=group)
    out = nystrom_attention(q, k, v, num_landmarks=7, pinv="exact", enable_gqa=True)
    torch.testing.assert_close(out, loop(q, k, v, 7), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_enters_no_landmark(side):
    q, k, v = make_qkv(37, group=2)
    lengths = [5, 29]  # fewer tokens than landmarks, and more
    mask = padding_mask(torch.tensor(lengths), 37, side=side)
    first = [0, 0] if side == "right" else [37 - n for n in lengths]
    out = nystrom_attention(q, k, v, num_landmarks=7, pinv="exact", attn_mask=mask, enable_gqa=True)
    want = loop(q, k, v, 7, lengths, first)
    for b, n in enumerate(lengths):
        rows = slice(first[b], first[b] + n)
        torch.testing.assert_close(out[b, :, rows], want[b, :, rows], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("pinv", ["ridge", "exact", "newton"])
def test_landmarks_without_tokens_change_nothing(pinv):
    q, k, v = make_qkv(24)
    mask = padding_mask(torch.tensor([11, 24]))
    few = nystrom_attention(q, k, v, num_landmarks=24, pinv=pinv, attn_mask=mask)
    short = (x[:1, :, :11] for x in (q, k, v))
    alone = nystrom_attention(*short, num_landmarks=11, pinv=pinv)
    torch.testing.assert_close(few[:1, :, :11], alone, rtol=1e-8, atol=1e-8)


def test_every_token_a_landmark_is_exact():
    q, k, v = make_qkv(65, group=2)
    out = nystrom_attention(q, k, v, num_landmarks=65, pinv="exact", enable_gqa=True)
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("pinv", "tolerance"), [("exact", 1e-9), ("ridge", 1e-5)])
def test_constant_segments_are_exact(pinv, tolerance):
    q, k, v = make_qkv(6)
    q, k = (3 * torch.eye(8, dtype=q.dtype)[:6].expand_as(x) for x in (q, k))
    q, k = (x.repeat_interleave(5, dim=2) for x in (q, k))
    v = torch.randn(*v.shape[:2], 30, 5, dtype=v.dtype)
    out = nystrom_attention(q, k, v, num_landmarks=6, pinv=pinv)
    torch.testing.assert_close(out, reference(q, k, v), rtol=tolerance, atol=tolerance)


def weights(q, k, **options):
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return nystrom_attention(q, k, eye, **options)


@pytest.mark.parametrize("pinv", ["ridge", "exact", "newton"])
def test_rank_is_at_most_the_number_of_landmarks(pinv):
    q, k, _ = make_qkv(40)
    sigma = torch.linalg.svdvals(weights(q, k, num_landmarks=6, pinv=pinv))
    assert (sigma[..., 6:] <= 1e-12 * sigma[..., :1]).all()
    assert (sigma[..., 5] > 1e-9 * sigma[..., 0]).all()


def test_newton_converges_to_the_pseudo_inverse():
    q, k, v = make_qkv(40)
    a = {"num_landmarks": 5, "pinv": "newton"}
    want = nystrom_attention(q, k, v, num_landmarks=5, pinv="exact")
    errors = [
        (nystrom_attention(q, k, v, num_iterations=n, **a) - want).norm().item() for n in (2, 6, 30)
    ]
    assert errors[2] <= 1e-8 * want.norm()
    assert errors[2] < errors[1] < errors[0]


def test_six_iterations_are_the_default_of_newton():
    q, k, v = make_qkv(40)
    default = nystrom_attention(q, k, v, num_landmarks=8, pinv="newton")
    six = nystrom_attention(q, k, v, num_landmarks=8, pinv="newton", num_iterations=6)
    assert torch.equal(default, six)


@pytest.mark.parametrize("pinv", ["ridge", "newton"])
def test_inverses_do_not_depend_on_the_rest_of_the_batch(pinv):
    q, k, v = make_qkv(40)
    q[1] = 20 * q[1]
    both = nystrom_attention(q, k, v, num_landmarks=8, pinv=pinv)
    alone = nystrom_attention(q[:1], k[:1], v[:1], num_landmarks=8, pinv=pinv)
    torch.testing.assert_close(both[:1], alone, rtol=1e-10, atol=1e-10)


def test_ridge_filters_singular_values_as_documented():
    generator = torch.Generator().manual_seed(0)
    a = torch.softmax(torch.randn(6, 6, generator=generator, dtype=torch.float64), -1)
    left, s, right = torch.linalg.svd(a)
    rho2 = 0.1**2 * a.sum(0).max() * a.sum(1).max()
    factor = (1 - (rho2 / (s**2 + rho2)) ** 3) / s
    eye = torch.eye(6, dtype=a.dtype)
    torch.testing.assert_close(nystrom._ridge(a, eye, 0.1), right.T @ torch.diag(factor) @ left.T)


def test_ridge_bounds_the_inverse_of_a_singular_matrix():
    """t^-1 (1 - (1 + t^2)^-3) is below 1.01 for every t = s / rho."""
    a = torch.softmax(torch.linspace(0, 1, 64).double().outer(torch.linspace(0, 1, 64)), -1)
    rho = 0.02 * (a.sum(0).max() * a.sum(1).max()).sqrt()
    norm = torch.linalg.matrix_norm(nystrom._ridge(a, torch.eye(64, dtype=a.dtype), 0.02), 2)
    assert norm <= 1.01 / rho


def test_smooth_sequences_ruin_the_exact_inverse_and_not_the_ridge():
    q, k, v = make_qkv(512, batch=1, heads=2)
    walk = 3 * (q + k).cumsum(2) / 512**0.5
    q, k = walk + 0.3 * q, walk + 0.3 * k
    want = reference(q, k, v)
    ridge, exact = (
        (nystrom_attention(q, k, v, num_landmarks=64, pinv=pinv) - want).norm()
        for pinv in ("ridge", "exact")
    )
    assert ridge < want.norm() < exact


def test_the_fused_form_and_the_tiles_agree():
    q, k, v = make_qkv(40, group=2, value_dim=8)  # equal widths: torch's fused attention serves
    call = {"num_landmarks": 6, "enable_gqa": True}
    everything = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    fused, tiles = (
        nystrom_attention(q, k, v, attn_mask=mask, **call) for mask in (None, everything)
    )
    torch.testing.assert_close(fused, tiles, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pinv", ["ridge", "exact", "newton"])
@pytest.mark.parametrize("landmarks", [2, 16])
def test_gradients(pinv, landmarks):
    q, k, v = make_qkv(5, batch=2, heads=1, group=2, head_dim=4, value_dim=2)
    mask = padding_mask(torch.tensor([3, 5]))

    def call(q, k, v):
        return nystrom_attention(
            q, k, v, num_landmarks=landmarks, pinv=pinv, attn_mask=mask, enable_gqa=True
        )

    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(call, inputs, atol=1e-5, rtol=1e-4)


@pytest.fixture
def short_leaves(monkeypatch):
    monkeypatch.setattr(nystrom, "lift", partial(lift, leaf=8))


def causal_by_definition(q, k, v, m, leaf):
    """One head: num and den of every row, block by block."""
    n = k.shape[0]
    scale = q.shape[-1] ** -0.5
    if n <= leaf:
        w = (scale * q @ k.T).exp().tril()
        return w @ v, w.sum(-1)
    cut = leaf
    while 2 * cut < n:
        cut *= 2
    out, mass = by_definition(q[cut:], k[:cut], v[:cut], m, sample=q[:cut])
    num1, den1 = causal_by_definition(q[:cut], k[:cut], v[:cut], m, leaf)
    num2, den2 = causal_by_definition(q[cut:], k[cut:], v[cut:], m, leaf)
    return torch.cat([num1, num2 + out * mass[:, None]]), torch.cat([den1, den2 + mass])


@pytest.mark.usefixtures("short_leaves")
@pytest.mark.parametrize("length", [8, 9, 16, 37])
def test_causal_is_lifted(length):
    q, k, v = make_qkv(length, group=2)
    out = nystrom_attention(q, k, v, num_landmarks=3, pinv="exact", is_causal=True, enable_gqa=True)
    for b in range(2):
        for h in range(6):
            num, den = causal_by_definition(q[b, h], k[b, h // 2], v[b, h // 2], 3, 8)
            torch.testing.assert_close(out[b, h], num / den[:, None], rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("short_leaves")
def test_a_causal_row_depends_on_nothing_after_it():
    q, k, v = make_qkv(37, group=2)
    call = {"num_landmarks": 3, "is_causal": True, "enable_gqa": True}
    whole = nystrom_attention(q, k, v, **call)
    for n in (1, 8, 9, 20, 36):
        short = nystrom_attention(*(x[:, :, :n] for x in (q, k, v)), **call)
        torch.testing.assert_close(short, whole[:, :, :n], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("short_leaves")
def test_padding_after_the_tokens_is_truncation_in_lifted_calls():
    q, k, v = make_qkv(37)
    mask = padding_mask(torch.tensor([21, 37]))
    call = {"num_landmarks": 3, "is_causal": True}
    out = nystrom_attention(q, k, v, attn_mask=mask, **call)
    short = nystrom_attention(*(x[:1, :, :21] for x in (q, k, v)), **call)
    torch.testing.assert_close(out[:1, :, :21], short, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("short_leaves")
def test_padding_before_the_tokens_is_ignored_in_lifted_calls():
    q, k, v = make_qkv(37)
    mask = padding_mask(torch.tensor([11, 37]), side="left")
    call = {"num_landmarks": 3, "is_causal": True, "attn_mask": mask}
    before = nystrom_attention(q, k, v, **call)
    for x in (q, k, v):
        x[0, :, :26] = 50 * (1 + x[0, :, :26])
    after = nystrom_attention(q, k, v, **call)
    torch.testing.assert_close(after[0, :, 26:], before[0, :, 26:], rtol=1e-10, atol=1e-10)
    assert after.isfinite().all()


def test_causal_is_exact_up_to_a_leaf():
    q, k, v = make_qkv(LEAF, batch=1, heads=1)
    out = nystrom_attention(q, k, v, num_landmarks=2, is_causal=True)
    torch.testing.assert_close(out, reference(q, k, v, is_causal=True), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"num_iterations": 6}, "num_iterations"),
        ({"pinv": "exact", "num_iterations": 6}, "num_iterations"),
        ({"pinv": "exact", "ridge": 0.1}, "ridge"),
        ({"pinv": "newton", "ridge": 0.1}, "ridge"),
        ({"ridge": 0.0}, "ridge"),
        ({"ridge": 2.0}, "ridge"),
        ({"pinv": "newton", "num_iterations": 0}, "num_iterations"),
        ({"pinv": "svd"}, "pinv"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, mention):
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match=mention):
        Nystrom(**options)
    with pytest.raises(ValueError, match=mention):
        nystrom_attention(q, k, v, **options)
