from functools import partial

import pytest
import torch

from numattn import measure, padding_mask, testing
from numattn.core.inputs import prepare
from numattn.engines.lift import LEAF, Summary, lift_summaries
from numattn.engines.pivots import gaussian_pivots
from numattn.lowrank import skyformer
from numattn.lowrank.skyformer import PILOTS, Skyformer, skyformer_attention
from numattn.testing import make_qkv, reference
from numattn.testing.checks import close
from numattn.testing.inputs import TOLERANCE, reference_weights

KINDS = ("uniform", "pivoted")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(method, heads, dim, seed=0):
    source = generator(seed)
    return {
        name: torch.rand(shape, dtype=torch.float64, generator=source)
        for name, (_, shape) in method.draws(heads, dim).items()
    }


def kernel(a, b):
    return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / 2)


def places(u, count, length):
    """One in each of `count` equal stretches of `length`."""
    return [int((t + u[t].item()) / count * length) for t in range(count)]


def chosen(x, y, r, points, u):
    """The points of one head: some of the queries x and keys y, and the origin."""
    n = min(r - 1, len(x) + len(y))
    if points == "pivoted":
        both = torch.cat([y, x])
        index = gaussian_pivots(both[None, None], n, u[None])[0, 0]
        some = both[index[index >= 0]]
    else:
        from_keys = min(len(y), max(n - n // 2, n - len(x)))
        of_keys = [y[j] for j in places(u, from_keys, len(y))]
        of_queries = [x[i] for i in places(u[from_keys:], n - from_keys, len(x))]
        some = torch.stack(of_keys + of_queries)
    return torch.cat([some, torch.zeros_like(some[:1])])


def by_definition(q, k, r, points, uniform, pilots, scale=None):
    """Weights of one head, dense."""
    c = q.shape[1] ** -0.5 if scale is None else scale
    x, y = c**0.5 * q, c**0.5 * (k - k.mean(0))
    sizes = [1e-3 + z.square().sum(-1).mean() for z in (x, y)]
    t = (sizes[0] / sizes[1]) ** 0.25
    x, y = x / t, y * t
    s = chosen(x, y, r, points, uniform)
    inner = kernel(s, s) + 1e-13 * r * torch.eye(len(s), dtype=q.dtype)
    w = kernel(x, s) @ torch.linalg.solve(inner, kernel(s, y)) * (y.square().sum(-1) / 2).exp()
    d, n = w.sum(-1, keepdim=True), len(k)
    moved = (w - d / n) / torch.maximum(d, w.norm(dim=-1, keepdim=True) / 2)
    exact = torch.softmax(c * q @ k.T, -1)
    some = places(pilots, PILOTS, len(q))
    target = exact[some] - 1 / n
    alpha = (moved[some] * target).sum() / moved[some].square().sum()
    return 1 / n + alpha.clamp(0, 1) * moved


def dense(q, k, v, method, tensors, rows=None, keys=None, scale=None):
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        i = slice(None) if rows is None else rows[b]
        j = slice(None) if keys is None else keys[b]
        for h in range(q.shape[1]):
            given = [tensors[name][h // group] for name in ("uniform", "pilots")]
            options = (method.num_points, method.points, *given, scale)
            w = by_definition(q[b, h, i], k[b, h // group, j], *options)
            out[b, h, i] = w @ v[b, h // group, j]
    return out


@pytest.mark.parametrize("points", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (3, 41), (41, 3), (20, 30)])
@pytest.mark.parametrize("scale", [None, 1.3])
def test_is_the_definition(queries, keys, points, scale):
    method = Skyformer(13, points)
    q, k, v = make_qkv(queries, keys=keys, group=2)
    q, k = q / 2, k + 1
    tensors = draw(method, 3, 8)
    out = method(q, k, v, scale=scale, enable_gqa=True, **tensors)
    want = dense(q, k, v, method, tensors, scale=scale)
    torch.testing.assert_close(out, want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("points", KINDS)
def test_rows_that_cancel_are_the_definition(points):
    method = Skyformer(13, points)
    q, k, v = make_qkv(60, batch=1)
    tensors = draw(method, 3, 8)
    out = method(6 * q, k, v, **tensors)
    torch.testing.assert_close(out, dense(6 * q, k, v, method, tensors), rtol=1e-6, atol=1e-6)
    short = method(q / 9, k, v, **tensors)
    torch.testing.assert_close(short, dense(q / 9, k, v, method, tensors), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("points", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("queries", [37, 12])
def test_padding_is_no_point_no_pilot_and_in_no_mean(points, side, queries):
    method = Skyformer(21, points)
    q, k, v = make_qkv(queries, keys=37, group=2)
    lengths = [7, 29]
    tensors = draw(method, 3, 8)
    mask = padding_mask(torch.tensor(lengths), 37, side=side)
    out = method(q, k, v, attn_mask=mask, enable_gqa=True, **tensors)
    keys = [slice(n) if side == "right" else slice(37 - n, 37) for n in lengths]
    rows = keys if queries == 37 else [slice(None)] * 2
    want = dense(q, k, v, method, tensors, rows, keys)
    for b in range(2):
        torch.testing.assert_close(out[b, :, rows[b]], want[b, :, rows[b]], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("points", KINDS)
@pytest.mark.parametrize("dim", [1, 2, 8, 40])
def test_all_points_are_exact(points, dim):
    q, k, v = make_qkv(33, keys=20, group=2, head_dim=dim)
    out = skyformer_attention(q, k, v, num_points=54, points=points, enable_gqa=True)
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("points", KINDS)
def test_duplicates_are_harmless(points):
    q, k, v = make_qkv(6)
    q, k = (x.repeat(1, 1, 8, 1) for x in (q, k))
    v = make_qkv(48)[2]
    out = skyformer_attention(q, k, v, num_points=97, points=points)
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-9, atol=1e-9)


def test_few_pivots_span_many_copies():
    q, k, v = make_qkv(6, batch=1)
    q, k = (x.repeat(1, 1, 20, 1) for x in (q, k))
    v = make_qkv(120, batch=1)[2]
    out = skyformer_attention(q, k, v, num_points=13, points="pivoted", generator=generator())
    torch.testing.assert_close(out, reference(q, k, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("points", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equal_keys_give_the_mean(points, dtype):
    q, k, v = make_qkv(16, dtype=dtype)
    k = k[:, :, :1].expand_as(k)
    for causal in (False, True):
        out = skyformer_attention(q, k, v, num_points=4, points=points, is_causal=causal)
        want = reference(q, k, v, is_causal=causal)
        close(out, want, "keys all equal")


def test_one_point_is_the_mean():
    q, k, v = make_qkv(30)
    for points in KINDS:
        out = skyformer_attention(q, k, v, num_points=1, points=points)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("points", KINDS)
def test_the_bandwidth_follows_from_the_head_size(points):
    """Zeros in twice the width change the default scale, and with it all that is computed."""
    q, k, v = make_qkv(40)
    wide = [torch.cat([x, torch.zeros_like(x)], -1) for x in (q, k)]
    call = {"num_points": 9, "points": points}
    out = skyformer_attention(*wide, v, generator=generator(), **call)
    want = skyformer_attention(q, k, v, scale=16**-0.5, generator=generator(), **call)
    other = skyformer_attention(q, k, v, generator=generator(), **call)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    assert (out - other).norm() > 1e-2 * out.norm()


def residual(q, k, method, tensors):
    """C minus its Nystrom approximation, over queries and keys."""
    x = prepare(skyformer.INFO, q, k, k, None, False, None, False)
    c = skyformer._Call.of(x)
    index = skyformer._choose(x, c, method.num_points, tensors["uniform"])
    inverse = skyformer._inverse_factor(*c.points(index))
    both = torch.cat([c.q, c.k * c.t], 2)[0]
    points = c.points(index)[0][0]
    f = torch.stack([inverse[0, h] @ kernel(points[h], both[h]) for h in range(len(both))])
    return torch.stack([kernel(b, b) for b in both]) - f.mT @ f


@pytest.mark.parametrize("points", KINDS)
def test_the_completion_is_below_the_kernel_and_nears_it(points):
    """0 <= C - C_hat in the order of matrices, for any points."""
    q, k, _ = make_qkv(60, batch=1)
    errors = []
    for r in (5, 20, 60, 121):
        method = Skyformer(r, points)
        means = []
        for seed in range(5):
            gap = residual(q, k, method, draw(method, 3, 8, seed))
            assert torch.linalg.eigvalsh(gap).min() > -1e-9
            means.append(torch.linalg.matrix_norm(gap, 2))
        errors.append(torch.stack(means).mean())
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-9


def test_pivots_leave_less_than_uniform_points_on_average():
    """Few of the tokens are unlike the others: stretches of equal length miss some of them."""
    source = generator()
    q, k = (0.3 * torch.randn(1, 4, 100, 8, generator=source, dtype=torch.float64) for _ in "qk")
    q[:, :, ::9] *= 15
    k[:, :, ::9] *= 15
    traces = {}
    for points in KINDS:
        method = Skyformer(24, points)
        gaps = [residual(q, k, method, draw(method, 4, 8, seed)) for seed in range(10)]
        traces[points] = torch.stack(gaps).diagonal(dim1=-2, dim2=-1).sum(-1).mean()
    assert traces["pivoted"] < traces["uniform"]


def weights(q, k, **call):
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return skyformer_attention(q, k, eye, generator=generator(), **call)


@pytest.mark.parametrize("points", KINDS)
def test_rank_is_at_most_one_more_than_points(points):
    q, k, _ = make_qkv(40)
    sigma = torch.linalg.svdvals(weights(q, k, num_points=6, points=points))
    assert (sigma[..., 7:] <= 1e-12 * sigma[..., :1]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 10, 100])
def test_no_row_of_weights_is_longer_than_twice_a_distribution(dtype, size):
    q, k, _ = make_qkv(60, dtype=dtype)
    for points in KINDS:
        w = weights(size * q, k, num_points=16, points=points)
        assert ((w - 1 / 60).norm(dim=-1) <= 2 + 1e-3).all()


@pytest.mark.parametrize("seed", range(4))
def test_rounding_of_rows_that_cancel_is_not_divided_by_itself(seed):
    """Logits of hundreds, single precision, all points: little but rounding is left of some rows.

    Of a weighted sum whose weights have norm 2 no output is further than twice |v - mean|.
    """
    q, k, v = make_qkv(300, batch=1, heads=2, dtype=torch.float32, seed=seed)
    k[:, :, 50:100] = k[:, :, :1]
    spread = v - v.mean(2, keepdim=True)
    for points in KINDS:
        call = {"num_points": 601, "points": points, "generator": generator(seed)}
        out = skyformer_attention(100 * q, k, v, **call) - v.mean(2, keepdim=True)
        assert (out.abs() <= 2.1 * spread.norm(dim=2, keepdim=True)).all()


def test_equal_points_far_from_the_origin_have_equal_rows():
    points = 1e4 + make_qkv(6, batch=1, heads=1)[0]
    points = points.repeat(1, 1, 5, 1)
    exists = torch.ones(1, 1, 30, 1, dtype=torch.bool)
    want = kernel(points[0, 0], points[0, 0])
    f = skyformer._inverse_factor(points, exists)[0, 0] @ want
    torch.testing.assert_close(f.T @ f, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 5, 30])
@pytest.mark.parametrize("points", KINDS)
def test_alpha_makes_weights_no_worse_than_the_mean(points, size):
    """Of as many queries as there are pilots each is one, and alpha = 0 is the mean."""
    q, k, _ = make_qkv(PILOTS, keys=80)
    w = weights(size * q, k, num_points=20, points=points)
    exact = reference_weights(size * q, k)
    error = (w - exact).square().sum((-2, -1))
    assert (error <= (exact - 1 / 80).square().sum((-2, -1)) * (1 + 1e-9)).all()


def real(name):
    x = measure.load(name)
    q, k, v = (t[:, :, :256] for t in (x.q, x.k, x.v))
    return [q, *(t.repeat_interleave(x.group, 1) for t in (k, v))], x.scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("points", KINDS)
def test_never_much_worse_than_the_mean_of_the_values(points, dtype):
    """On random and on real heads, however large the logits."""
    inputs = [(make_qkv(256, batch=1, head_dim=d, value_dim=d, seed=d), None) for d in (8, 32, 64)]
    inputs += [real(f"smollm2-{kind}") for kind in ("heavy", "sink", "diffuse", "local")]
    for (q, k, v), scale in inputs:
        for size in (1, 3, 6, 10):
            x = [t.to(dtype) for t in (size * q, k, v)]
            out = skyformer_attention(
                *x, num_points=64, points=points, scale=scale, generator=generator()
            )
            want = reference(*x, scale=scale)
            error = (out - want).norm(dim=(-2, -1))
            mean = (x[2].double().mean(2, keepdim=True) - want).norm(dim=(-2, -1))
            assert (error <= 1.1 * mean).all()


def test_halves_are_keys_and_queries():
    q, k, _ = make_qkv(50, keys=30, heads=1, batch=1)
    x = prepare(skyformer.INFO, q, k, k, None, False, None, False)
    for r, keys, queries in ((12, 6, 5), (61, 30, 30), (71, 30, 40), (200, 30, 50)):
        uniform = torch.rand(1, r, dtype=torch.float64, generator=generator())
        index = skyformer._halves(x, r - 1, uniform[:, : min(r - 1, 80)])
        assert ((index >= 0) & (index < 30)).sum() == keys
        assert (index >= 30).sum() == queries


# --- causal ---------------------------------------------------------------------------------


def summary(heads=2, length=30, seed=0):
    q, k, v = make_qkv(length, heads=heads, seed=seed)
    bias = 0.3 * q[..., 0]
    bias[:, :, 4] = -torch.inf
    return q, Summary(k, torch.cat([v, 1 + 0.2 * q[..., 1:2]], -1), bias, v.shape[3])


@pytest.mark.parametrize("r", [1, 8, 31])
def test_a_summary_projects_its_keys(r):
    """Row sums are e^(q y_j + b_j) with e^(q y_j) replaced by its Nystrom form at the points."""
    q, s = summary()
    scale = 0.35
    uniform = torch.rand(2, r, dtype=torch.float64, generator=generator())
    part = skyformer._compress(scale, r, uniform, s).attend(q, scale)
    for b in range(2):
        for h in range(2):
            there = s.bias[b, h] > -torch.inf
            center = s.k[b, h, there].mean(0)
            y = scale**0.5 * (s.k[b, h] - center)
            some = y[places(uniform[h], min(r - 1, 30), 30)] if r > 1 else y[:0]
            points = torch.cat([some, torch.zeros_like(y[:1])])
            inner = (points @ points.T).exp()
            coefficients = torch.linalg.solve(inner, (points @ y.T + s.bias[b, h]).exp())
            w = (scale**0.5 * q[b, h] @ points.T).exp() @ coefficients
            w = w * (scale * q[b, h] @ center).exp()[:, None]
            shift = part.shift[b, h].exp()
            num, den = w @ s.columns[b, h, :, :-1], w @ s.columns[b, h, :, -1]
            torch.testing.assert_close(part.den[b, h] * shift, den, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(part.num[b, h] * shift[:, None], num, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("points", KINDS)
def test_a_summary_of_all_keys_is_exact(points):
    q, s = summary()
    tensors = draw(Skyformer(31, points), 2, 8)
    part = skyformer._compress(0.35, 31, tensors["uniform"], s).attend(q, 0.35)
    want = s.attend(q, 0.35)
    torch.testing.assert_close(part.out(), want.out(), rtol=1e-9, atol=1e-9)
    logs = [(p.den.log() + p.shift) for p in (part, want)]
    torch.testing.assert_close(*logs, rtol=1e-9, atol=1e-9)


def test_pivots_of_a_summary_find_the_sink():
    """A key of squared length 100 among short ones has e^25 times their chance."""
    _, s = summary()
    y = 0.3 * s.k
    y[:, :, 17] = 0.0
    y[:, :, 17, 0] = 10.0
    for seed in range(20):
        tensors = draw(Skyformer(3, "pivoted"), 2, 8, seed)
        index = skyformer._choose_keys(y, s, 3, tensors["uniform"])
        assert (index == 17).any(-1).all()
        assert (index != 4).all()  # it does not exist


@pytest.mark.parametrize("points", KINDS)
def test_decoding_is_the_causal_call_beyond_the_leaves(points):
    length = 2 * LEAF + 70
    q, k, v = make_qkv(length, batch=1, heads=1, group=2)
    method = Skyformer(24, points)
    tensors = draw(method, 1, 8)
    want = method(q, k, v, is_causal=True, enable_gqa=True, **tensors)
    exact = reference(q, k, v, is_causal=True)
    assert (want - exact)[:, :, :LEAF].abs().max() < 1e-9 < (want - exact).abs().max()
    state = method.state(k[:, :, :500], v[:, :, :500], enable_gqa=True, **tensors)
    for start, stop in ((500, 510), (510, 514), (514, 1025), (1025, length)):
        state.append(k[:, :, start:stop], v[:, :, start:stop])
        out = state.attend(q[:, :, stop - 1 : stop])
        torch.testing.assert_close(out, want[:, :, stop - 1 : stop], rtol=1e-9, atol=1e-9)


def test_a_negative_scale_is_a_scale():
    q, k, v = make_qkv(LEAF + 20, batch=1, heads=1)
    tensors = draw(Skyformer(16), 1, 8)
    for causal in (False, True):
        out = Skyformer(16)(q, k, v, scale=-0.4, is_causal=causal, **tensors)
        same = Skyformer(16)(-q, k, v, scale=0.4, is_causal=causal, **tensors)
        torch.testing.assert_close(out, same, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("points", KINDS)
def test_gradients_of_lifted_calls(points, monkeypatch):
    monkeypatch.setattr(skyformer, "lift_summaries", partial(lift_summaries, leaf=3))
    q, k, v = make_qkv(8, batch=1, heads=1, head_dim=3, value_dim=1)
    method = Skyformer(3, points)
    tensors = draw(method, 1, 3)

    def call(q, k, v):
        return method(q, k, v, is_causal=True, **tensors)

    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(call, inputs, atol=1e-5, rtol=1e-4)


# --- use ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 256])
@pytest.mark.parametrize(
    "name",
    [
        "grouped_heads",
        "padding_is_truncation",
        "no_causal_leak",
        "never_beats_the_oracle",
        "extremes",
        "half_precision",
        "single_precision",
        "counted_flops",
        "decode_is_prefill",
        "module_owns_its_tensors",
        "error_falls_with_budget",
    ],
)
def test_pivoted_points_keep_the_contract(name, budget):
    testing.run(name, Skyformer(budget, "pivoted"))


def test_pivoted_points_compile():
    q, k, v = make_qkv(24, batch=1, heads=1, dtype=torch.float32)
    method = Skyformer(8, "pivoted")
    tensors = draw(method, 1, 8)

    def call(q, k, v):
        return method(q, k, v, **tensors)

    with torch.no_grad():
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
        torch.testing.assert_close(out, call(q, k, v))


def test_bad_options_are_refused():
    q, k, v = make_qkv(8)
    with pytest.raises(ValueError, match="points"):
        Skyformer(points="leverage")
    with pytest.raises(ValueError, match="points"):
        skyformer_attention(q, k, v, points="leverage")
    with pytest.raises(ValueError, match="uniform"):
        skyformer_attention(q, k, v, points="pivoted", uniform=torch.rand(3, 64))
    with pytest.raises(ValueError, match="pilots"):
        skyformer_attention(q, k, v, pilots=torch.rand(3, 5))
