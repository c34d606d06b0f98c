from functools import partial

import pytest
import torch

from numattn import Unsupported, measure, padding_mask
from numattn.core.inputs import prepare
from numattn.core.linalg import kmeans
from numattn.engines.lift import LEAF, lift
from numattn.lowrank import Nystrom, landmarks, nystrom, nystrom_attention
from numattn.lowrank.nystrom import NystromAttention, nystrom_condition
from numattn.testing import make_qkv, reference, reference_weights

KINDS = ["ridge", "exact", "newton"]


def groups(x, label):
    """Means and sizes of the groups of tokens x (n, D) that are not empty."""
    sets = [[t for t in range(len(x)) if label[t] == s] for s in sorted(set(label))]
    return torch.stack([x[g].mean(0) for g in sets]), torch.tensor(
        [float(len(g)) for g in sets], dtype=x.dtype
    )


def segments(x, m):
    """Token t of n is in segment t m // n."""
    return groups(x, [t * m // len(x) for t in range(len(x))])


def clusters(x, m):
    return groups(x, kmeans(x[None, None], m, landmarks.LLOYD)[0, 0].tolist())


def blocks(q, k, qt, kt, counts):
    """F, A and B of one head, and sum_s n_s exp(q . k~_s)."""
    scale = q.shape[-1] ** -0.5

    def rows(queries):
        return torch.softmax(scale * queries @ kt.T + counts.log(), -1)

    mass = (scale * q @ kt.T).exp() @ counts
    return rows(q), rows(qt), torch.softmax(scale * qt @ k.T, -1), mass


def through(f, a, b, v):
    """mean + F A^+ B (v - mean), singular values inverted as documented."""
    left, sigma, right = torch.linalg.svd(a, full_matrices=False)
    rho2 = 0.02**2 * a.sum(0).max() * a.sum(1).max()
    rest = rho2 / (sigma**2 + rho2)
    factor = sigma / (sigma**2 + rho2) * (1 + rest + rest**2)  # (1 - rest^3) / sigma
    inverse = right.T @ torch.diag(factor) @ left.T
    return v.mean(0) + f @ inverse @ (b @ (v - v.mean(0)))


def by_definition(q, k, v, m, sample=None, group=segments):
    """One head: the output, and the mass of every row."""
    qt, _ = group(q if sample is None else sample, m)
    f, a, b, mass = blocks(q, k, qt, *group(k, m))
    return through(f, a, b, v), mass


def loop(q, k, v, m, lengths=None, first=0, group=segments):
    """Every batch entry and query head by itself; entry b has tokens first .. first + n."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    heads = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        keys = slice(0, k.shape[2]) if lengths is None else slice(first[b], first[b] + lengths[b])
        rows = slice(0, q.shape[2]) if lengths is None else keys
        for h in range(q.shape[1]):
            kv = h // heads
            one = by_definition(q[b, h, rows], k[b, kv, keys], v[b, kv, keys], m, group=group)
            out[b, h, rows] = one[0]
    return out


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (23, 41), (41, 23), (5, 41)])
@pytest.mark.parametrize(("kind", "by"), [("segments", segments), ("kmeans", clusters)])
def test_is_the_definition(queries, keys, group, kind, by):
    q, k, v = make_qkv(queries, keys=keys, group=group)
    out = nystrom_attention(q, k, v, num_landmarks=7, landmarks=kind, enable_gqa=True, guard=False)
    torch.testing.assert_close(out, loop(q, k, v, 7, group=by), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("kind", "by"), [("segments", segments), ("kmeans", clusters)])
def test_padding_enters_no_landmark(side, kind, by):
    q, k, v = make_qkv(37, group=2)
    lengths = [5, 29]  # fewer tokens than landmarks, and more
    mask = padding_mask(torch.tensor(lengths), 37, side=side)
    first = [0, 0] if side == "right" else [37 - n for n in lengths]
    call = {"num_landmarks": 7, "landmarks": kind, "attn_mask": mask, "enable_gqa": True}
    out = nystrom_attention(q, k, v, **call, guard=False)
    want = loop(q, k, v, 7, lengths, first, by)
    for b, n in enumerate(lengths):
        rows = slice(first[b], first[b] + n)
        torch.testing.assert_close(out[b, :, rows], want[b, :, rows], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pinv", KINDS)
@pytest.mark.parametrize("kind", ["segments", "kmeans"])
def test_landmarks_without_tokens_change_nothing(pinv, kind):
    q, k, v = make_qkv(24)
    mask = padding_mask(torch.tensor([11, 24]))
    call = {"pinv": pinv, "landmarks": kind}
    few = nystrom_attention(q, k, v, num_landmarks=24, attn_mask=mask, **call)
    short = (x[:1, :, :11] for x in (q, k, v))
    alone = nystrom_attention(*short, num_landmarks=11, **call)
    torch.testing.assert_close(few[:1, :, :11], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("kind", ["segments", "kmeans"])
def test_every_token_a_landmark_is_exact(kind, guard):
    q, k, v = make_qkv(65, group=2)
    call = {"landmarks": kind, "guard": guard, "pinv": "exact", "enable_gqa": True}
    out = nystrom_attention(q, k, v, num_landmarks=65, **call)
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


@pytest.mark.parametrize("pinv", KINDS)
def test_rank_is_at_most_the_number_of_landmarks(pinv):
    q, k, _ = make_qkv(40)
    sigma = torch.linalg.svdvals(weights(q, k, num_landmarks=6, pinv=pinv))
    assert (sigma[..., 6:] <= 1e-12 * sigma[..., :1]).all()
    free = torch.linalg.svdvals(weights(q, k, num_landmarks=6, pinv=pinv, guard=False))
    assert (free[..., 5] > 1e-9 * free[..., 0]).all()  # the guard may fall back on the mean


@pytest.mark.parametrize("order", [3, 4])
def test_newton_converges_to_the_pseudo_inverse(order):
    q, k, v = make_qkv(40)
    a = {"num_landmarks": 5, "pinv": "newton", "guard": False, "order": order}
    want = nystrom_attention(q, k, v, num_landmarks=5, pinv="exact", guard=False)
    errors = [
        (nystrom_attention(q, k, v, num_iterations=n, **a) - want).norm().item() for n in (2, 6, 30)
    ]
    assert errors[2] <= 1e-8 * want.norm()
    assert errors[2] < errors[1] < errors[0]


def test_six_iterations_of_order_four_are_the_default_of_newton():
    q, k, v = make_qkv(40)
    default = nystrom_attention(q, k, v, num_landmarks=8, pinv="newton")
    paper = {"pinv": "newton", "num_iterations": 6, "order": 4}
    assert torch.equal(default, nystrom_attention(q, k, v, num_landmarks=8, **paper))


@pytest.mark.parametrize("order", [3, 4])
def test_newton_cubes_the_residual(order):
    """From R = I - A Z: R^3, or R^3 (3 I + R) / 4."""
    a = torch.softmax(make_qkv(9)[0] @ make_qkv(9)[1].mT, -1)
    eye = torch.eye(9, dtype=a.dtype)
    one, two = (eye - a @ landmarks.newton_inverse(a, n, order) for n in (1, 2))
    start = a.mT / (a.sum(-2).amax(-1) * a.sum(-1).amax(-1))[..., None, None]
    for before, after in ((eye - a @ start, one), (one, two)):
        cube = before @ before @ before
        want = cube if order == 3 else cube @ (3 * eye + before) / 4
        torch.testing.assert_close(after, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{}, {"pinv": "newton"}, {"pinv": "newton", "order": 3}, {"landmarks": "kmeans"}]
)
def test_inverses_do_not_depend_on_the_rest_of_the_batch(options):
    q, k, v = make_qkv(40)
    q[1] = 20 * q[1]
    both = nystrom_attention(q, k, v, num_landmarks=8, **options)
    alone = nystrom_attention(q[:1], k[:1], v[:1], num_landmarks=8, **options)
    torch.testing.assert_close(both[:1], alone, rtol=1e-10, atol=1e-10)


def test_ridge_filters_singular_values_as_documented():
    generator = torch.Generator().manual_seed(0)
    a = torch.softmax(torch.randn(6, 6, generator=generator, dtype=torch.float64), -1)
    left, s, right = torch.linalg.svd(a)
    rho2 = 0.1**2 * a.sum(0).max() * a.sum(1).max()
    factor = (1 - (rho2 / (s**2 + rho2)) ** 3) / s
    want = right.T @ torch.diag(factor) @ left.T
    torch.testing.assert_close(landmarks.ridge_inverse(a, 0.1), want)


def test_ridge_bounds_the_inverse_of_a_singular_matrix():
    """t^-1 (1 - (1 + t^2)^-3) is below 1.01 for every t = s / rho."""
    a = torch.softmax(torch.linspace(0, 1, 64).double().outer(torch.linspace(0, 1, 64)), -1)
    rho = 0.02 * (a.sum(0).max() * a.sum(1).max()).sqrt()
    norm = torch.linalg.matrix_norm(landmarks.ridge_inverse(a, 0.02), 2)
    assert norm <= 1.01 / rho


def test_smooth_sequences_ruin_the_exact_inverse_and_not_the_ridge():
    q, k, v = make_qkv(512, batch=1, heads=2)
    walk = 3 * (q + k).cumsum(2) / 512**0.5
    q, k = walk + 0.3 * q, walk + 0.3 * k
    want = reference(q, k, v)
    ridge, exact = (
        (nystrom_attention(q, k, v, num_landmarks=64, pinv=pinv, guard=False) - want).norm()
        for pinv in ("ridge", "exact")
    )
    assert ridge < want.norm() < exact


@pytest.mark.parametrize("length", [40, 42])  # segments of equal and of unequal sizes
@pytest.mark.parametrize("lengths", [None, [42, 13], [0, 42]])
def test_the_fused_form_and_the_tiles_agree(length, lengths):
    """Torch's fused attention serves equal widths."""
    q, k, v = (x[:, :, :length] for x in make_qkv(42, group=2, value_dim=8))
    mask = None if lengths is None else padding_mask(torch.tensor(lengths), 42)[..., :length]
    call = {"num_landmarks": 8, "enable_gqa": True, "attn_mask": mask}
    fused = nystrom_attention(q, k, v, **call)
    tiles = nystrom_attention(q, k, v[..., :5], **call)
    torch.testing.assert_close(fused[..., :5], tiles, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("value_dim", [5, 8])
@pytest.mark.parametrize("kind", ["segments", "kmeans"])
def test_no_key_gives_zeros_to_other_queries(kind, value_dim):
    q, k, v = make_qkv(9, keys=42, value_dim=value_dim)
    mask = padding_mask(torch.tensor([0, 42]))
    out = nystrom_attention(q, k, v, num_landmarks=8, landmarks=kind, attn_mask=mask)
    assert not out[0].any()


@pytest.mark.parametrize(
    ("num_landmarks", "options"),
    [
        (2, {}),
        (16, {}),
        (16, {"guard": False}),
        (2, {"pinv": "exact"}),
        (16, {"pinv": "newton"}),
        (2, {"pinv": "newton", "order": 3}),
        (2, {"landmarks": "kmeans"}),
    ],
)
def test_gradients(num_landmarks, options):
    q, k, v = make_qkv(5, batch=2, heads=1, group=2, head_dim=4, value_dim=2)
    mask = padding_mask(torch.tensor([3, 5]))

    def call(q, k, v):
        known = {"attn_mask": mask, "enable_gqa": True, "num_landmarks": num_landmarks}
        return nystrom_attention(q, k, v, **known, **options)

    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(call, inputs, atol=1e-5, rtol=1e-4)


# --- the guard ------------------------------------------------------------------------------


def distance(a, b):
    return (a - b).norm(dim=(-2, -1))


@pytest.mark.parametrize("pinv", KINDS)
@pytest.mark.parametrize("factor", [1, 3, 10])
def test_the_guard_is_its_formula(factor, pinv):
    """And the weights are no further from the exact ones than equal weights."""
    q, k, _ = make_qkv(50)
    call = {"num_landmarks": 8, "pinv": pinv}
    exact = reference_weights(factor * q, k)
    guarded = weights(factor * q, k, **call)
    plain, equal = weights(factor * q, k, guard=False, **call), torch.full_like(exact, 1 / 50)
    a, b = plain - equal, exact - equal
    size, whole = (x.norm(dim=(-2, -1), keepdim=True) for x in (a, b))
    cosine = ((a * b).sum((-2, -1), keepdim=True) / (size * whole)).clamp(min=0)
    alpha = (cosine**2 * whole / size).clamp(max=1)
    torch.testing.assert_close(guarded, equal + alpha * a, rtol=1e-6, atol=1e-9)
    assert (distance(guarded, exact) <= distance(equal, exact) * (1 + 1e-9)).all()


def test_the_guard_is_one_factor_for_each_head():
    q, k, _ = make_qkv(50, group=2)
    call = {"num_landmarks": 8, "enable_gqa": True}
    eye = torch.eye(50, dtype=q.dtype).expand(2, 3, -1, -1)
    guarded, plain = (
        nystrom_attention(3 * q, k, eye, guard=guard, **call) - 1 / 50 for guard in (True, False)
    )
    factor = (guarded * plain).sum((-2, -1), keepdim=True) / plain.square().sum((-2, -1), True)
    torch.testing.assert_close(guarded, factor * plain, rtol=1e-9, atol=1e-9)
    assert ((factor > 0) & (factor < 0.9)).all()
    assert len(set(factor.flatten().tolist())) == 12


@pytest.fixture
def few_samples(monkeypatch):
    """Places of the guard that do not hold all tokens of a test."""
    monkeypatch.setattr(landmarks, "PILOTS", 7)
    monkeypatch.setattr(landmarks, "KEYS", 16)


def test_the_factor_is_between_zero_and_one():
    """Of an inverse that is far too small, or of the wrong sign."""
    q, k, v = make_qkv(50)
    x = prepare(nystrom.INFO, q, k, v, None, False, None, False)
    found = landmarks.find(x, 8, "segments", None)
    inverse = Nystrom().inverse(found.matrix(x.scale))
    for factor, want in ((0.01, 1.0), (-1.0, 0.0)):
        assert (landmarks.shrinkage(x, found, factor * inverse) == want).all()


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("lengths", [(5, 40), (12, 40), (29, 40)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_guard_looks_at_tokens_that_exist(lengths, side):
    q, k, v = make_qkv(40, group=2)
    mask = padding_mask(torch.tensor(lengths), side=side)
    call = {"num_landmarks": 8, "enable_gqa": True}
    out = nystrom_attention(3 * q, k, v, attn_mask=mask, **call)
    n = lengths[0]
    keep = slice(0, n) if side == "right" else slice(40 - n, 40)
    short = (x[:1, :, keep] for x in (3 * q, k, v))
    alone = nystrom_attention(*short, **call)
    torch.testing.assert_close(out[:1, :, keep], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("few_samples")
def test_the_guard_compares_samples():
    """One head, by the definition, on queries t 40 // 7 and keys t 40 // 16."""
    q, k, v = (x[0, 0] for x in make_qkv(40))
    q = 3 * q
    rows, keys = ([t * 40 // n for t in range(n)] for n in (7, 16))
    f, a, b, _ = blocks(q, k, segments(q, 8)[0], *segments(k, 8))
    exact = torch.softmax(q[rows] @ k[keys].T * 8**-0.5, -1) - 1 / 16
    b_kept = torch.softmax(segments(q, 8)[0] @ k[keys].T * 8**-0.5, -1) - 1 / 16
    inverse = landmarks.ridge_inverse(a, 0.02)
    predicted = f[rows] @ inverse @ b_kept
    fit, size, whole = (predicted * exact).sum(), predicted.norm(), exact.norm()
    alpha = (fit / (size * whole)) ** 2 * whole / size
    assert 0.001 < alpha < 0.9
    want = v.mean(0) + alpha * f @ inverse @ (b @ v - v.mean(0))
    out = nystrom_attention(*(x[None, None] for x in (q, k, v)), num_landmarks=8)
    torch.testing.assert_close(out[0, 0], want, rtol=1e-7, atol=1e-9)


def against_the_mean(method, q, k, v, scale=None):
    """Errors of heads relative to that of the mean of the values."""
    group = q.shape[1] // k.shape[1]
    out = method(q, k, v, scale=scale, enable_gqa=group > 1).double()
    want = reference(q, k, v, scale=scale)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(group, 1).expand_as(want)
    return distance(out, want) / distance(mean, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [8, 32, 64])
@pytest.mark.parametrize("factor", [1, 3, 6, 10])
def test_sane_where_others_blow_up(factor, head_dim, dtype):
    """Logits so large that no low rank serves: not much worse than the mean of the values."""
    for seed in range(2):
        shape = {"batch": 1, "heads": 2, "head_dim": head_dim, "value_dim": head_dim}
        q, k, v = make_qkv(256, dtype=dtype, seed=seed, **shape)
        for kind in ("segments", "kmeans"):
            ratio = against_the_mean(Nystrom(landmarks=kind), factor * q, k, v)
            assert (ratio <= 1.1).all()


@pytest.mark.parametrize("kind", ["segments", "kmeans"])
@pytest.mark.parametrize("name", measure.bundled())
def test_sane_on_heads_of_trained_models(name, kind):
    x = measure.load(name, length=256).to(torch.float32)
    for factor in (1, 3, 6, 10):
        ratio = against_the_mean(Nystrom(landmarks=kind), factor * x.q, x.k, x.v, x.scale)
        assert (ratio <= 1.1).all()


@pytest.mark.parametrize("pinv", KINDS)
@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)],
)
def test_equal_keys_give_the_mean(pinv, guard, dtype, tolerance):
    q, k, v = make_qkv(16, dtype=dtype)
    k = k[:, :, :1].expand_as(k)
    out = nystrom_attention(q, k, v, num_landmarks=4, pinv=pinv, guard=guard)
    assert out.dtype == dtype
    want = v.double().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def test_equal_keys_have_small_gradients():
    """The factor of what vanishes is held at 1, so that it has no wild gradient."""
    q, k, v = make_qkv(16)
    q, k = (torch.zeros_like(x).requires_grad_() for x in (q, k))
    nystrom_attention(q, k, v, num_landmarks=4).square().sum().backward()
    exact_q, exact_k = (torch.zeros_like(x).requires_grad_() for x in (q, k))
    out = torch.nn.functional.scaled_dot_product_attention(exact_q, exact_k, v)
    out.square().sum().backward()
    for mine, true in ((q, exact_q), (k, exact_k)):
        assert mine.grad.isfinite().all()
        assert mine.grad.norm() <= 10 * true.grad.norm()


@pytest.mark.parametrize("pinv", KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_sum_to_one(pinv, is_causal):
    q, k, v = make_qkv(530, batch=1)
    call = {"num_landmarks": 8, "pinv": pinv, "is_causal": is_causal}
    ones = nystrom_attention(3 * q, k, torch.ones_like(v), **call)
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=1e-9, atol=1e-9)


# --- landmarks ------------------------------------------------------------------------------


def test_kmeans_finds_groups_that_are_not_consecutive():
    """Equal queries and keys, in turn and unequally many."""
    centers = 4 * torch.eye(8, dtype=torch.float64)[:5]
    q, k = (centers[torch.tensor([t % 5 if t < 20 else t % 2 for t in range(40)])] for _ in "qk")
    v = make_qkv(40)[2]
    q, k = (x.expand(2, 3, -1, -1) for x in (q, k))
    call = {"num_landmarks": 5, "pinv": "exact"}
    want = reference(q, k, v)
    found = nystrom_attention(q, k, v, landmarks="kmeans", **call)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    assert distance(nystrom_attention(q, k, v, **call), want).min() > 1e-3


def given_landmarks(m=6, heads=3, group=1, dim=8, seed=7):
    return {
        "query_landmarks": make_qkv(m, batch=1, heads=heads, group=group, seed=seed)[0][0],
        "key_landmarks": make_qkv(m, batch=1, heads=heads, seed=seed)[1][0],
    }


def with_given(q, k, v, qt, kt, sample=None):
    """One head, by the definition; landmarks that are nearest to no key are left out."""
    label = torch.cdist(k, kt).argmin(-1).tolist()
    counts = torch.tensor([float(label.count(s)) for s in range(len(kt))], dtype=k.dtype)
    kept = counts > 0
    f, a, b, mass = blocks(q, k, qt, kt[kept], counts[kept])
    return through(f, a, b, v), mass


@pytest.mark.parametrize("far", [False, True])
def test_given_landmarks_count_the_keys_nearest_to_them(far):
    q, k, v = make_qkv(23, keys=31, group=2)
    tensors = given_landmarks(group=2)
    if far:
        tensors["key_landmarks"][:, 2] = 100.0
    mask = padding_mask(torch.tensor([31, 19]))
    call = {"num_landmarks": 6, "enable_gqa": True, "guard": False}
    out = nystrom_attention(q, k, v, attn_mask=mask, **tensors, **call)
    for b, n in enumerate((31, 19)):
        for h in range(6):
            head = (k[b, h // 2, :n], v[b, h // 2, :n])
            pair = (tensors["query_landmarks"][h], tensors["key_landmarks"][h // 2])
            want, _ = with_given(q[b, h], *head, *pair)
            torch.testing.assert_close(out[b, h], want, rtol=1e-9, atol=1e-9)


def test_landmarks_may_be_given_for_every_entry_of_the_batch():
    q, k, v = make_qkv(23)
    tensors = given_landmarks()
    wide = {n: torch.stack([t, t]) for n, t in tensors.items()}
    out = nystrom_attention(q, k, v, num_landmarks=6, **tensors)
    assert torch.equal(out, nystrom_attention(q, k, v, num_landmarks=6, **wide))
    wide["key_landmarks"][1] += 1
    other = nystrom_attention(q, k, v, num_landmarks=6, **wide)
    assert torch.equal(out[0], other[0])
    assert not torch.allclose(out[1], other[1])


def test_gradients_reach_given_landmarks():
    q, k, v = make_qkv(12, batch=1, heads=1)
    tensors = given_landmarks(3, 1)

    def call(query_landmarks, key_landmarks):
        known = {"query_landmarks": query_landmarks, "key_landmarks": key_landmarks}
        return nystrom_attention(q, k, v, num_landmarks=3, **known)

    inputs = tuple(t.requires_grad_() for t in tensors.values())
    assert torch.autograd.gradcheck(call, inputs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "options", "mention"),
    [
        ({"key_landmarks": None}, {}, "key_landmarks is missing"),
        ({"query_landmarks": None}, {}, "query_landmarks is missing"),
        ({}, {"num_landmarks": 5}, "query_landmarks"),
        ({"key_landmarks": torch.zeros(2, 6, 8)}, {}, "key_landmarks"),
        ({}, {"landmarks": "kmeans"}, "kmeans"),
    ],
)
def test_given_landmarks_must_fit(change, options, mention):
    q, k, v = make_qkv(12)
    with pytest.raises(ValueError, match=mention):
        nystrom_attention(q, k, v, **{"num_landmarks": 6, **given_landmarks(), **change, **options})


# --- causal calls ---------------------------------------------------------------------------


@pytest.fixture
def short_leaves(monkeypatch):
    monkeypatch.setattr(nystrom, "lift", partial(lift, leaf=8))


def causal_by_definition(q, k, v, leaf, block):
    """One head: num and den of every row, block by block."""
    n = k.shape[0]
    scale = q.shape[-1] ** -0.5
    if n <= leaf:
        w = (scale * q @ k.T).exp().tril()
        return w @ v, w.sum(-1)
    cut = leaf
    while 2 * cut < n:
        cut *= 2
    out, mass = block(q[cut:], k[:cut], v[:cut], q[:cut])
    num1, den1 = causal_by_definition(q[:cut], k[:cut], v[:cut], leaf, block)
    num2, den2 = causal_by_definition(q[cut:], k[cut:], v[cut:], leaf, block)
    return torch.cat([num1, num2 + out * mass[:, None]]), torch.cat([den1, den2 + mass])


@pytest.mark.usefixtures("short_leaves")
@pytest.mark.parametrize("length", [8, 9, 16, 37])
@pytest.mark.parametrize("kind", ["segments", "kmeans", "given"])
def test_causal_is_lifted(length, kind):
    q, k, v = make_qkv(length, group=2)
    tensors = given_landmarks(3, group=2) if kind == "given" else {}
    options = {} if kind == "given" else {"landmarks": kind}
    call = {"num_landmarks": 3, "is_causal": True, "enable_gqa": True, "guard": False}
    out = nystrom_attention(q, k, v, **call, **options, **tensors)

    def block(h, q, k, v, sample):
        if kind == "given":
            pair = (tensors["query_landmarks"][h], tensors["key_landmarks"][h // 2])
            return with_given(q, k, v, *pair)
        by = segments if kind == "segments" else clusters
        return by_definition(q, k, v, 3, sample, by)

    for b in range(2):
        for h in range(6):
            head = (q[b, h], k[b, h // 2], v[b, h // 2])
            num, den = causal_by_definition(*head, 8, partial(block, h))
            torch.testing.assert_close(out[b, h], num / den[:, None], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("short_leaves")
@pytest.mark.parametrize("kind", ["segments", "kmeans", "given"])
def test_a_causal_row_depends_on_nothing_after_it(kind):
    q, k, v = make_qkv(37, group=2)
    call = {"num_landmarks": 3, "is_causal": True, "enable_gqa": True}
    call |= given_landmarks(3, group=2) if kind == "given" else {"landmarks": kind}
    call["conv"] = make_qkv(6, heads=6, batch=1, head_dim=5)[0][0, 0]  # (6, 5)
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


# --- the convolution ------------------------------------------------------------------------


def kernels(heads, taps):
    return make_qkv(heads, batch=1, heads=1, head_dim=taps, seed=3)[0][0, 0]  # (heads, taps)


def convolved(v, kernel, is_causal):
    """One head by the definition: v (n, E), kernel (taps)."""
    before = len(kernel) - 1 if is_causal else len(kernel) // 2
    out = torch.zeros_like(v)
    for i in range(len(v)):
        for t, weight in enumerate(kernel):
            if 0 <= i + t - before < len(v):
                out[i] += weight * v[i + t - before]
    return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("taps", [1, 5, 33])
def test_conv_adds_a_convolution_of_the_values(taps, is_causal):
    q, k, v = make_qkv(20, group=2)
    conv = kernels(6, taps)
    call = {"num_landmarks": 4, "is_causal": is_causal, "enable_gqa": True}
    added = nystrom_attention(q, k, v, conv=conv, **call) - nystrom_attention(q, k, v, **call)
    for b in range(2):
        for h in range(6):
            want = convolved(v[b, h // 2], conv[h], is_causal)
            torch.testing.assert_close(added[b, h], want, rtol=1e-9, atol=1e-9)


PLACES = {"right": range(13), "left": range(7, 20), "between": [t for t in range(20) if t % 3]}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", list(PLACES))
def test_conv_does_not_see_padding(side, is_causal):
    q, k, v = make_qkv(20)
    keep = torch.tensor(PLACES[side])
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    mask[0] = torch.isin(torch.arange(20), keep)
    call = {"num_landmarks": 4, "is_causal": is_causal, "conv": kernels(3, 5)}
    out = nystrom_attention(q, k, v, attn_mask=mask, **call)
    short = nystrom_attention(*(x[:1, :, keep] for x in (q, k, v)), **call)
    torch.testing.assert_close(out[:1, :, keep], short, rtol=1e-10, atol=1e-10)


def test_conv_needs_as_many_queries_as_keys():
    q, k, v = make_qkv(5, keys=9)
    with pytest.raises(Unsupported, match="5 and 9"):
        nystrom_attention(q, k, v, conv=kernels(3, 5))


@pytest.mark.parametrize("shape", [(3, 4), (2, 5), (3, 1, 5), (5,)])
def test_conv_must_fit(shape):
    q, k, v = make_qkv(5)
    with pytest.raises(ValueError, match="conv"):
        nystrom_attention(q, k, v, conv=torch.zeros(shape))


def test_the_module_starts_as_the_function_and_learns():
    q, k, v = make_qkv(40, group=2, dtype=torch.float32)
    module = NystromAttention(num_heads=3, head_dim=8, num_query_heads=6, num_landmarks=8)
    out = module(q, k, v, enable_gqa=True)
    assert module.conv.shape == (6, 33)
    assert torch.equal(out, nystrom_attention(q, k, v, num_landmarks=8, enable_gqa=True))
    out.square().sum().backward()
    assert (module.conv.grad != 0).all()


def test_the_module_adds_its_kernels():
    q, k, v = make_qkv(40, dtype=torch.float32)
    module = NystromAttention(num_heads=3, head_dim=8, conv_size=5, pinv="newton", order=3)
    with torch.no_grad():
        module.conv.copy_(kernels(3, 5))
        want = nystrom_attention(q, k, v, pinv="newton", order=3, conv=module.conv)
        assert torch.equal(module(q, k, v), want)


def test_a_module_without_convolution_owns_nothing():
    q, k, v = make_qkv(12, keys=17, dtype=torch.float32)
    module = Nystrom(num_landmarks=4).module(num_heads=3, head_dim=8)
    assert [n for n, _ in module.named_parameters()] == ["conv"]
    bare = NystromAttention(num_heads=3, head_dim=8, conv_size=None, num_landmarks=4)
    assert not bare.state_dict()
    assert torch.equal(bare(q, k, v), nystrom_attention(q, k, v, num_landmarks=4))


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"conv_size": 4}, "conv_size"),
        ({"conv_size": 0}, "conv_size"),
        ({"num_query_heads": 4}, "num_query_heads"),
        ({"num_query_heads": 0}, "num_query_heads"),
        ({"pinv": "svd"}, "pinv"),
    ],
)
def test_options_of_the_module_are_checked(options, mention):
    with pytest.raises(ValueError, match=mention):
        NystromAttention(num_heads=3, head_dim=8, **options)


# --- the condition number -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["segments", "kmeans"])
def test_condition_is_that_of_the_landmark_matrix(kind):
    q, k, _ = make_qkv(37, group=2)
    by = segments if kind == "segments" else clusters
    mask = padding_mask(torch.tensor([5, 37]))  # fewer tokens than landmarks, and more
    call = {"num_landmarks": 7, "landmarks": kind, "enable_gqa": True}
    found = nystrom_condition(q, k, attn_mask=mask, **call)
    assert found.shape == (2, 6)
    for b, n in enumerate((5, 37)):
        for h in range(6):
            qs, ks = q[b, h, :n], k[b, h // 2, :n]
            _, a, _, _ = blocks(qs, ks, by(qs, 7)[0], *by(ks, 7))
            want = torch.linalg.cond(a, 2).item()
            assert found[b, h].item() == pytest.approx(want, rel=1e-6)


def test_condition_of_given_landmarks():
    q, k, _ = make_qkv(37)
    tensors = given_landmarks()
    tensors["key_landmarks"][:, 2] = 100.0  # nearest to no key: the matrix has a column less
    found = nystrom_condition(q, k, num_landmarks=6, **tensors)
    for b in range(2):
        for h in range(3):
            qt, kt = (t[h] for t in tensors.values())
            label = torch.cdist(k[b, h], kt).argmin(-1).tolist()
            counts = torch.tensor([float(label.count(s)) for s in range(6)], dtype=q.dtype)
            _, a, _, _ = blocks(qt, k[b, h], qt, kt[counts > 0], counts[counts > 0])
            sigma = torch.linalg.svdvals(a)
            assert found[b, h].item() == pytest.approx((sigma[0] / sigma[-1]).item(), rel=1e-6)


def test_condition_of_singular_matrices_and_of_none():
    q, k, _ = make_qkv(12, dtype=torch.float16)
    mask = padding_mask(torch.tensor([0, 12]))
    found = nystrom_condition(q, k[:, :, :1].expand_as(k), num_landmarks=4, attn_mask=mask)
    assert found.dtype == torch.float64
    assert not found[0].any()
    assert (found[1] > 1e14).all()
    assert not nystrom_condition(q[:, :, :0], k).any()


def test_exact_drops_what_is_below_the_precision_of_the_type():
    a = torch.diag(torch.logspace(0, -9, 8, dtype=torch.float64))
    for dtype in (torch.float32, torch.float64):
        kept = a.diagonal() > 8 * torch.finfo(dtype).eps
        inverse = Nystrom(pinv="exact").inverse(a.to(dtype)).double().diagonal()
        assert torch.equal(inverse > 0.5, kept)


@pytest.mark.parametrize("ridge", [None, 0.1])
def test_ridge_amplifies_no_more_than_documented(ridge):
    q, k = (x[0, 0] for x in make_qkv(200)[:2])
    _, a, _, _ = blocks(q, k, segments(q, 50)[0], *segments(k, 50))
    assert nystrom_condition(q[None, None], k[None, None], num_landmarks=50) > 1e4
    inverse = Nystrom(ridge=ridge).inverse(a)
    amplified = torch.linalg.matrix_norm(a, 2) * torch.linalg.matrix_norm(inverse, 2)
    assert amplified <= 1.01 / (ridge or nystrom.RIDGE)


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
        ({"order": 3}, "order"),
        ({"pinv": "exact", "order": 4}, "order"),
        ({"pinv": "newton", "order": 2}, "order"),
        ({"pinv": "svd"}, "pinv"),
        ({"landmarks": "random"}, "landmarks"),
        ({"guard": 1}, "guard"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, mention):
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match=mention):
        Nystrom(**options)
    with pytest.raises(ValueError, match=mention):
        nystrom_attention(q, k, v, **options)
