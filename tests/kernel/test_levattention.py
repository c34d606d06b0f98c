"""LevAttention against loops written from its definition, and against what leverage promises."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.kernel import levattention
from numattn.kernel.levattention import (
    TILE,
    LevAttention,
    levattention_attention,
    leverage_scores,
)
from numattn.kernel.polynomial import polynomial_attention
from numattn.testing import make_qkv, reference


def by_pinv(key, among=None):
    """Leverage k^T (A^T A)^+ k of every row of `key`, float64 (n, D), among the rows A."""
    among = key if among is None else among
    return ((key @ torch.linalg.pinv(among)) ** 2).sum(-1)  # |A^+T k|^2


def chosen(candidates, key, among, num_keys, epsilon):
    """Those of largest leverage; digits beyond the sixth are rounding."""
    scores = {j: round(by_pinv(key[j][None], among).item(), 6) for j in candidates}
    order = sorted(scores, key=lambda j: (-scores[j], j))[:num_keys]
    return [j for j in order if epsilon is None or scores[j] >= epsilon - 1e-6]


def seen(key, *, num_keys, epsilon=None, window=0, is_causal=False, **_):
    """Which keys every position sees, for the keys (n, D) of one head: bool (n, n)."""
    n = len(key)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    if not is_causal:
        out = (j >= i - window // 2) & (j < i - window // 2 + window)
        out[:, chosen(range(n), key, key, num_keys, epsilon)] = True
        return out
    out = (j <= i) & ((j // TILE == i // TILE) | (j > i - window))
    kept = []
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        out[start:stop, kept] = True
        kept = chosen([*kept, *range(start, stop)], key, key[:stop], num_keys, epsilon)
    return out


def by_loop(q, k, v, *, kernel="softmax", lengths=None, **options):
    """Dense weights over what the loop above says is seen; rows beyond `lengths` are zeros."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b in range(len(q)):
        n = q.shape[2] if lengths is None else lengths[b]
        for h in range(q.shape[1]):
            key, value = k[b, h // group, :n].double(), v[b, h // group, :n].double()
            product = q[b, h, :n].double() @ key.T * q.shape[3] ** -0.5
            weight = product.exp() if kernel == "softmax" else product**2
            weight = weight * seen(key, **options)
            total = weight.sum(-1, keepdim=True)
            out[b, h, :n] = weight @ value / total.where(total > 0, 1.0)
    return out


def spread_qkv(*args, **kwargs):
    """As `make_qkv`, with keys of lengths that differ: leverages too."""
    q, k, v = make_qkv(*args, **kwargs)
    size = torch.randn(k.shape[:3], generator=torch.Generator().manual_seed(7), dtype=k.dtype)
    return q, k * size.exp()[..., None], v


OPTIONS = [
    {"num_keys": 5},
    {"num_keys": 5, "window": 1},
    {"num_keys": 9, "window": 6, "kernel": "polynomial"},
    {"num_keys": 70, "epsilon": 0.12},
    {"num_keys": 4, "epsilon": 0.1, "window": 90},
    {"num_keys": 100, "epsilon": 0.1, "kernel": "polynomial"},
]


# --- leverage -------------------------------------------------------------------------------


def keys(n, rank, dim, seed=0):
    """Keys of a given rank, of lengths that differ."""
    source = torch.Generator().manual_seed(seed)
    left, right, size = (
        torch.randn(*shape, generator=source, dtype=torch.float64)
        for shape in ((n, rank), (rank, dim), (n, 1))
    )
    return size.exp() * left @ right


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_leverage_is_that_of_the_pseudo_inverse_and_sums_to_the_rank(rank):
    k = keys(60, rank, 6)
    tau = leverage_scores(k)
    torch.testing.assert_close(tau, by_pinv(k), rtol=0, atol=1e-7)
    torch.testing.assert_close(tau.sum().item(), float(rank), rtol=0, atol=1e-6)


def test_leverage_of_fewer_keys_than_dimensions_is_one_and_of_none_is_zero():
    k = torch.cat([keys(4, 4, 6), torch.zeros(1, 6, dtype=torch.float64)])
    want = torch.tensor([1.0, 1, 1, 1, 0], dtype=torch.float64)
    torch.testing.assert_close(leverage_scores(k), want, rtol=0, atol=1e-7)
    assert not leverage_scores(torch.zeros(3, 6)).any()


def test_leverage_does_not_depend_on_coordinates_or_size():
    k = keys(60, 5, 5)
    turn = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for moved in (k @ turn, 1e6 * k, 1e-6 * k):
        torch.testing.assert_close(leverage_scores(moved), by_pinv(k), rtol=0, atol=1e-7)


@pytest.mark.parametrize("rank", [3, 6])
def test_no_query_weighs_a_key_by_more_than_its_leverage(rank):
    k = keys(60, rank, 6)[None, None]
    q = torch.randn(1, 1, 1000, 6, dtype=k.dtype, generator=torch.Generator().manual_seed(2))
    weight = polynomial_attention(q, k, torch.eye(60, dtype=k.dtype)[None, None], degree=2)
    assert (weight <= leverage_scores(k)[..., None, :] + 1e-9).all()


@pytest.mark.parametrize("rank", [3, 6])
def test_one_query_attains_the_leverage(rank):
    k = keys(60, rank, 6)
    best = k @ torch.linalg.pinv(k.T @ k, rtol=1e-12, hermitian=True)  # q* of every key
    eye = torch.eye(60, dtype=k.dtype)[None, None]
    weight = polynomial_attention(best[None, None], k[None, None], eye, degree=2)
    torch.testing.assert_close(weight[0, 0].diagonal(), leverage_scores(k), rtol=0, atol=1e-6)


def test_leverage_falls_as_keys_arrive():
    """Online leverage, that of each key when it comes, is never below the one at the end."""
    k = keys(80, 6, 6)
    before = None
    online = []
    for n in range(1, 81):
        gram = k[:n].T @ k[:n]
        tau = leverage_scores(k[:n], gram)
        torch.testing.assert_close(tau, by_pinv(k[:n]), rtol=0, atol=1e-6)
        online.append(tau[-1])
        if before is not None:
            assert (tau[:-1] <= before + 1e-7).all()
        before = tau
    assert (torch.stack(online) >= leverage_scores(k) - 1e-7).all()


# --- attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_is_the_loop(options, is_causal):
    q, k, v = spread_qkv(3 * TILE + 9, batch=1, heads=2, group=2)
    out = levattention_attention(q, k, v, **options, is_causal=is_causal, enable_gqa=True)
    want = by_loop(q, k, v, **options, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_truncation(options, is_causal, side):
    n, lengths = 2 * TILE + 30, [TILE + 20, 2 * TILE + 30]
    q, k, v = spread_qkv(n, heads=1)
    want = by_loop(q, k, v, **options, is_causal=is_causal, lengths=lengths)
    keep = padding_mask(torch.tensor(lengths), side=side)
    if side == "left":
        q, k, v = (torch.stack([x[0].roll(n - lengths[0], 1), x[1]]) for x in (q, k, v))
    k = torch.where(keep.mT, k, 1e3 * k)
    out = levattention_attention(q, k, v, **options, attn_mask=keep, is_causal=is_causal)
    for b in range(2):
        torch.testing.assert_close(out[b][:, keep[b, 0, 0]], want[b, :, : lengths[b]])


def test_tiles_do_not_show(monkeypatch):
    q, k, v = make_qkv(200, group=2)
    want = levattention_attention(q, k, v, num_keys=40, enable_gqa=True)
    monkeypatch.setattr(levattention, "_BAND", 32)
    monkeypatch.setattr(levattention, "tile_elements", lambda device: 1)
    out = levattention_attention(q, k, v, num_keys=40, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_grows_with_the_square_of_the_length(monkeypatch, is_causal, window):
    monkeypatch.setattr(levattention, "tile_elements", lambda device: 1)
    largest = []
    for n in (512, 1024):
        x = [t.requires_grad_() for t in make_qkv(n, batch=1, heads=1, dtype=torch.float32)]
        with Largest() as mode:
            out = levattention_attention(*x, num_keys=20, window=window, is_causal=is_causal)
            out.sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 2.2 * largest[0]  # the ends of a sequence weigh less in a longer one


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cap", [False, True])
def test_every_heavy_key_is_seen_whatever_the_query(is_causal, cap):
    """The universal set: no weight of epsilon or more is missed, and it has D / epsilon keys."""
    epsilon, dim = 0.08, 5
    k = torch.stack([keys(250, dim, dim, seed) for seed in range(4)])[None]
    q = torch.randn(k.shape, dtype=k.dtype, generator=torch.Generator().manual_seed(3))
    q = torch.cat([q[:, :, :125], k[:, :, :125].flip(2)], 2)  # and some along keys
    eye = torch.eye(250, dtype=k.dtype).expand(1, 4, -1, -1)
    exact = polynomial_attention(q, k, eye, degree=2, is_causal=is_causal)
    heavy = exact >= epsilon
    assert heavy.sum() > 100
    num_keys = int(dim / epsilon) if cap else 250
    options = {"num_keys": num_keys, "epsilon": epsilon, "kernel": "polynomial"}
    weight = levattention_attention(q, k, eye, **options, is_causal=is_causal)
    assert (weight[heavy] > 0).all()
    assert (weight[heavy] >= exact[heavy] - 1e-12).all()  # renormalised over fewer
    others = weight > 0
    if is_causal:
        tile = torch.arange(250) // TILE
        others = others & (tile[:, None] != tile)
    assert others.sum(-1).max() <= dim / epsilon
    assert others.sum(-1).max() < 250 - TILE


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", "polynomial"])
def test_a_small_epsilon_and_room_for_all_keys_is_dense(kernel, is_causal):
    q, k, v = make_qkv(150)
    options = {"num_keys": 150, "epsilon": 1e-9, "kernel": kernel}
    out = levattention_attention(q, k, v, **options, is_causal=is_causal)
    if kernel == "softmax":
        want = reference(q, k, v, is_causal=is_causal)
    else:
        want = polynomial_attention(q, k, v, degree=2, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("at", [30, TILE - 1, TILE, 100])
def test_a_row_depends_on_no_later_token(options, at):
    q, k, v = spread_qkv(150, batch=1)
    before = levattention_attention(q, k, v, **options, is_causal=True)
    for factor in (1e3, -2.0, 0.0):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, at:] = factor * x[:, :, at:].flip(2)
        after = levattention_attention(*changed, **options, is_causal=True)
        assert torch.equal(after[:, :, :at], before[:, :, :at])
    short = levattention_attention(*(x[:, :, :at] for x in (q, k, v)), **options, is_causal=True)
    torch.testing.assert_close(short, before[:, :, :at], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("prefix", [0, TILE, 100])
def test_one_step_at_a_time_is_the_causal_form(options, prefix):
    n = 2 * TILE + 20
    q, k, v = spread_qkv(n, group=2, heads=2)
    method = LevAttention(**options)
    want = method(q, k, v, is_causal=True, enable_gqa=True)
    state = method.state(k[:, :, :prefix], v[:, :, :prefix], enable_gqa=True)
    for t in range(prefix, n):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t % 7 == 0 or t % TILE in (0, 1, TILE - 1):
            out = state.attend(q[:, :, t : t + 1])
            torch.testing.assert_close(out, want[:, :, t : t + 1], rtol=0, atol=1e-10)
        shape = Shape(2, 4, 2, t + 1, t + 1, 8, 5, itemsize=8)
        assert state.nbytes == method.cost(shape).cache


def test_the_state_does_not_grow():
    _, k, v = make_qkv(20 * TILE, dtype=torch.float16)
    method = LevAttention(num_keys=32, window=10)
    sizes = [method.state(k[:, :, :n], v[:, :, :n]).nbytes for n in (3 * TILE, 20 * TILE)]
    assert sizes[0] == sizes[1]
    assert sizes[1] < 20 * TILE * 2 * 3 * (8 + 5) * 2


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_attention_to_what_is_seen(options, is_causal):
    q, k, v = spread_qkv(2 * TILE + 9, batch=1, heads=1)
    weight = torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(4))
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = levattention_attention(*ours, **options, is_causal=is_causal)
    (out * weight).sum().backward()
    mask = seen(k[0, 0], **options, is_causal=is_causal)
    product = theirs[0] @ theirs[1].mT * 8**-0.5
    dense = product.exp() if options.get("kernel") != "polynomial" else product.square()
    dense = dense * mask
    (dense @ theirs[2] / dense.sum(-1, keepdim=True) * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-9)


def test_rows_are_zeros_where_no_leverage_reaches_epsilon():
    q, k, v = make_qkv(3, batch=1)
    k = k[:, :, :1].expand_as(k)  # leverages of a third
    for kernel in ("softmax", "polynomial"):
        assert not levattention_attention(q, k, v, epsilon=0.34, kernel=kernel).any()
        assert levattention_attention(q, k, v, epsilon=1 / 3, kernel=kernel).any()


def test_equal_keys_tie_and_the_first_are_kept():
    """Whatever the rounding of their scores, which depends on where they stand."""
    q, k, v = make_qkv(53, dtype=torch.float32)
    k = k[:, :, :1].expand_as(k)
    for n in range(1, 54):
        out = levattention_attention(q, k[:, :, :n], v[:, :, :n], num_keys=4)
        want = v[:, :, : min(n, 4)].mean(2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out, want)


def test_keys_that_come_to_tie_go_by_position():
    """Keys 3, 4 and 5 end at leverage 1/2, but key 5 was above the others before."""
    q = torch.ones(1, 1, 2 * TILE + 1, 3, dtype=torch.float64)
    k = torch.zeros_like(q)
    for place, direction in ((3, 0), (4, 0), (5, 1), (TILE, 1), (TILE + 1, 2)):
        k[:, :, place, direction] = 1
    eye = torch.eye(2 * TILE + 1, dtype=q.dtype)[None, None]
    weight = levattention_attention(q, k, eye, num_keys=3, is_causal=True)[0, 0]
    assert weight[TILE].nonzero().flatten().tolist() == [3, 4, 5, TILE]
    assert weight[-1].nonzero().flatten().tolist() == [3, 4, TILE + 1, 2 * TILE]


def test_a_key_in_a_direction_of_its_own_is_kept_for_ever():
    """Its leverage stays 1 while that of all others falls."""
    q, k, _ = make_qkv(5 * TILE, batch=1, heads=1)
    k[..., 0] = 0
    k[:, :, 10] = 0
    k[:, :, 10, 0] = 1e-3
    eye = torch.eye(5 * TILE, dtype=q.dtype)[None, None]
    weight = levattention_attention(q, k, eye, num_keys=1, is_causal=True)
    assert (weight[0, 0, TILE:, 10] > 0).all()
    assert (weight[0, 0, -1].nonzero()[0] == 10).all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_cost_counts_the_products(options, is_causal):
    n = 6 * TILE
    q, k, v = make_qkv(n, batch=1, heads=1, group=2, dtype=torch.float32)
    method = LevAttention(**options)
    counted = count_flops(lambda: method(q, k, v, is_causal=is_causal, enable_gqa=True))
    assert method.cost(Shape(1, 2, 1, n, n, 8, 5, is_causal=is_causal)).flops == counted


def test_compiles_over_several_tiles():
    torch._dynamo.reset()
    q, k, v = make_qkv(TILE + 20, batch=1, heads=1, dtype=torch.float32)
    method = LevAttention(num_keys=9, window=6, epsilon=0.1)
    compiled = torch.compile(method, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, is_causal=True)
    torch.testing.assert_close(out, method(q, k, v, is_causal=True))


def test_windows_need_equal_lengths():
    q, k, v = make_qkv(5, keys=9)
    assert levattention_attention(q, k, v, num_keys=3).shape == (2, 3, 5, 5)
    with pytest.raises(Unsupported, match="levattention: a window needs as many queries as keys"):
        levattention_attention(q, k, v, num_keys=3, window=2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_keys": 0}, "num_keys"),
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": 1.1}, "epsilon"),
        ({"epsilon": True}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"kernel": "gaussian"}, "kernel"),
        ({"window": -1}, "window"),
    ],
)
def test_options_that_are_refused(options, name):
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match=f"levattention: {name} must be"):
        LevAttention(**options)
    with pytest.raises(ValueError, match=f"levattention: {name} must be"):
        levattention_attention(q, k, v, **options)
