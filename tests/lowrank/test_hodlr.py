import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.lowrank.hodlr import HODLR, hodlr_attention
from numattn.testing import make_qkv, reference, reference_weights


def mean_of(x, p, level):
    """Mean of the tokens of x (n, D) that share the set of 2^level tokens with token p."""
    start = (p >> level) << level
    return x[start : start + (1 << level)].mean(0)


def level_of(i, j, block_size):
    """On which level tokens i and j of the tree meet: None in one block of tokens."""
    a, b, level = i // block_size, j // block_size, None
    while a != b:
        a, b, level = a // 2, b // 2, 0 if level is None else level + 1
    return level


def logits_by_definition(q, k, block_size, sinks, coarse_queries=False):
    """One head, scaled: the logit of a key is that of the mean which stands for it."""
    rest_q, rest_k = q[sinks:], k[sinks:]
    logits = q @ k.T
    for i in range(len(rest_q)):
        for j in range(len(rest_k)):
            level = level_of(i, j, block_size)
            if level is not None:
                row = mean_of(rest_q, i, level) if coarse_queries else rest_q[i]
                logits[sinks + i, sinks + j] = row @ mean_of(rest_k, j, level)
    return logits * q.shape[1] ** -0.5


def by_definition(q, k, v, *, block_size, num_sinks, coarse_queries=False, is_causal=False):
    """All heads, (B, H, N, E)."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            key, value = k[b, h // group], v[b, h // group]
            logits = logits_by_definition(q[b, h], key, block_size, num_sinks, coarse_queries)
            if is_causal:
                logits = logits.masked_fill(~torch.ones_like(logits).tril().bool(), -torch.inf)
            out[b, h] = logits.softmax(-1) @ value
    return out


def weights(q, k, **options):
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return hodlr_attention(q, k, eye, enable_gqa=True, **options)


FORMS = [
    {"is_causal": False},
    {"is_causal": True},
    {"coarse_queries": True},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("block_size", "num_sinks"), [(1, 4), (2, 0), (3, 2)])
@pytest.mark.parametrize("length", [1, 5, 27])
def test_every_key_has_the_logit_of_its_mean(length, block_size, num_sinks, form):
    q, k, v = make_qkv(length, batch=1, heads=1, group=2)
    q = 3 * q  # the maxima of the levels must differ
    call = {"block_size": block_size, "num_sinks": num_sinks, **form}
    out = hodlr_attention(q, k, v, enable_gqa=True, **call)
    torch.testing.assert_close(out, by_definition(q, k, v, **call), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_counted_by_those_that_exist(form):
    q, k, v = make_qkv(45, batch=2, heads=2, group=2)
    mask = torch.rand(2, 1, 1, 45, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[0, ..., :3] = False
    call = {"block_size": 3, "num_sinks": 2, "enable_gqa": True, **form}
    out = hodlr_attention(q, k, v, attn_mask=mask, **call)
    for b in range(2):
        keep = mask[b, 0, 0]
        short = (x[b : b + 1, :, keep] for x in (q, k, v))
        alone = hodlr_attention(*short, **call)
        torch.testing.assert_close(out[b : b + 1, :, keep], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_sinks", [0, 1, 4])
@pytest.mark.parametrize("length", [7, 64, 101])
def test_every_visible_key_counts_once(length, num_sinks, form):
    """Logits all zero: weights are one over the number of keys that a row may see."""
    q, k, _ = make_qkv(length, batch=1, heads=1)
    zeros = (torch.zeros_like(q), torch.zeros_like(k))
    out = weights(*zeros, block_size=4, num_sinks=num_sinks, **form)
    want = torch.ones(length, length, dtype=q.dtype)
    want = want.tril() if form.get("is_causal") else want
    torch.testing.assert_close(out[0, 0], want / want.sum(-1, keepdim=True))


@pytest.mark.parametrize("form", FORMS)
def test_keys_equal_within_the_means_are_exact(form):
    q, k, _ = make_qkv(4, batch=1)
    q, k = (4 * x.repeat_interleave(16, 2) for x in (q, k))
    _, _, v = make_qkv(64, batch=1)
    if not form.get("coarse_queries"):
        q = 4 * make_qkv(64, batch=1, seed=1)[0]
    out = hodlr_attention(q, k, v, block_size=2, num_sinks=0, **form)
    want = reference(q, k, v, is_causal=form.get("is_causal", False))
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_two_blocks_are_exact(form):
    q, k, v = make_qkv(35, group=2)
    call = {"block_size": 16, "num_sinks": 3, "enable_gqa": True, **form}
    want = reference(q, k, v, is_causal=form.get("is_causal", False))
    torch.testing.assert_close(hodlr_attention(q, k, v, **call), want, rtol=1e-10, atol=1e-10)
    call["num_sinks"] = 2
    assert (hodlr_attention(q, k, v, **call) - want).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_siblings_have_the_rank_of_a_block(form):
    q, k, _ = make_qkv(64, batch=1)
    matrix = weights(q, k, block_size=4, num_sinks=0, **form)
    for size in (8, 16, 32):
        for start in range(0, 64, 2 * size):
            below = matrix[..., start + size : start + 2 * size, start : start + size]
            sigma = torch.linalg.svdvals(below)
            assert (sigma[..., 4:] <= 1e-13 * sigma[..., :1]).all()
            assert (sigma[..., 3] > 1e-6 * sigma[..., 0]).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_far_keys_are_never_overstated(is_causal):
    """Jensen: the mean of exponentials is no less than the exponential of the mean."""
    q, k, _ = make_qkv(70, group=2)
    out = weights(q, k, block_size=4, num_sinks=4, is_causal=is_causal)
    exact = reference_weights(q, k, is_causal=is_causal)
    assert (out[..., :4] >= exact[..., :4] * (1 - 1e-12)).all()  # sinks
    own, want = (x.diagonal(dim1=-2, dim2=-1) for x in (out, exact))
    assert (own >= want * (1 - 1e-12)).all()


def test_total_variation_is_bounded_by_the_change_of_the_logits():
    """Weights proportional to exp(s) and exp(s + u) differ by tanh((max u - min u) / 4) at most."""
    q, k, _ = make_qkv(50, batch=1, heads=1)
    out = weights(q, k, block_size=4, num_sinks=2)[0, 0]
    distance = (out - reference_weights(q, k)[0, 0]).abs().sum(-1) / 2
    change = logits_by_definition(q[0, 0], k[0, 0], 4, 2) - q[0, 0] @ k[0, 0].T * 8**-0.5
    span = change.amax(-1) - change.amin(-1)
    assert (distance <= torch.tanh(span / 4) + 1e-12).all()


def sink_head(strength):
    """A causal head whose first key has a large logit in every row."""
    q, k, v = make_qkv(200, batch=1, heads=4)
    k[:, :, 0] = 0
    q[..., 0], k[..., 0, 0] = 1, strength * q.shape[3] ** 0.5
    return q, k, v


def test_a_sink_row_errs_by_the_mass_off_the_sinks():
    q, k, _ = sink_head(6.0)
    exact = reference_weights(q, k, is_causal=True)
    out = weights(q, k, block_size=4, num_sinks=1, is_causal=True)
    distance = (out - exact).abs().sum(-1) / 2
    assert (distance <= 1 - exact[..., 0] + 1e-12).all()
    lost = weights(q, k, block_size=4, num_sinks=0, is_causal=True)
    assert ((lost - exact).abs().sum(-1) / 2 > 1 - exact[..., 0]).any()


def test_sinks_lower_the_error_on_sink_heads():
    q, k, v = sink_head(6.0)
    want = reference(q, k, v, is_causal=True)
    errors = [
        (hodlr_attention(q, k, v, block_size=4, num_sinks=n, is_causal=True) - want).norm()
        for n in (1, 0)
    ]
    assert errors[0] < errors[1]


def test_sinks_see_every_key():
    q, k, v = make_qkv(70)
    for is_causal in (False, True):
        out = hodlr_attention(q, k, v, block_size=2, num_sinks=5, is_causal=is_causal)
        want = reference(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(out[:, :, :5], want[:, :, :5], rtol=1e-10, atol=1e-10)
        assert (out[:, :, 5:] - want[:, :, 5:]).abs().max() > 1e-3


def test_a_causal_row_depends_on_nothing_after_it():
    q, k, v = make_qkv(61, group=2)
    call = {"block_size": 3, "num_sinks": 2, "is_causal": True, "enable_gqa": True}
    whole = hodlr_attention(q, k, v, **call)
    for n in (1, 2, 5, 8, 26, 50, 60):
        short = hodlr_attention(*(x[:, :, :n] for x in (q, k, v)), **call)
        torch.testing.assert_close(short, whole[:, :, :n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("block_size", "num_sinks"), [(1, 0), (3, 2), (4, 7)])
@pytest.mark.parametrize("steps", [[1] * 70, [0, 1, 2, 40, 5, 22]])
def test_decoding_is_the_causal_call(block_size, num_sinks, steps):
    q, k, v = make_qkv(70, group=2)
    method = HODLR(block_size=block_size, num_sinks=num_sinks)
    want = method(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    state = method.state(k[:, :, :0], v[:, :, :0], scale=0.5, enable_gqa=True)
    t = 0
    for step in steps:
        state.append(k[:, :, t : t + step], v[:, :, t : t + step])
        t += step
        if t:
            out = state.attend(q[:, :, t - 1 : t])
            torch.testing.assert_close(out, want[:, :, t - 1 : t], rtol=1e-10, atol=1e-10)
        assert state.nbytes == method.cost(Shape(2, 6, 3, t, t, 8, 5, True, 8)).cache


def test_what_decoding_keeps_grows_with_the_logarithm():
    k = torch.zeros(1, 1, 4096, 8, dtype=torch.bfloat16)
    method = HODLR(block_size=16, num_sinks=4)
    state = method.state(k, k)
    assert state.nbytes == method.cost(Shape(1, 1, 1, 1, 4096, 8, 8, itemsize=2)).cache
    levels = 8  # log2(4096 / 16)
    assert state.nbytes <= (4 + 16) * 16 * 2 + levels * 16 * (16 + 2) * 4


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    q, k, v = make_qkv(8, batch=1, heads=1, group=2, head_dim=2, value_dim=1)
    mask = padding_mask(torch.tensor([6]), 8, side="left")
    options = {"block_size": 1, "num_sinks": 1, "attn_mask": mask, "enable_gqa": True, **form}

    def call(q, k, v):
        return hodlr_attention(q, k, v, **options)[:, :, 2:]

    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(call, inputs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"coarse_queries": True}, {"num_sinks": 0}])
@pytest.mark.parametrize("length", [3, 180, 1003])
def test_flops_are_counted_exactly_where_nothing_is_cut(length, options):
    method = HODLR(block_size=16, **options)
    q, k, v = make_qkv(length, batch=1, heads=2, group=2)
    said = method.cost(Shape(1, 4, 2, length, length, 8, 5)).flops
    assert count_flops(lambda: method(q, k, v, enable_gqa=True)) == said


def test_means_of_queries_cost_a_constant_number_of_blocks_per_row():
    shapes = [Shape(1, 1, 1, n, n, 8, 8) for n in (1 << 10, 1 << 16)]
    per_row = [
        HODLR(block_size=16, num_sinks=0, coarse_queries=True).cost(s).flops / s.keys
        for s in shapes
    ]
    assert per_row[0] <= per_row[1] <= 2 * 3 * 16 * (8 + 8)
    fine = HODLR(block_size=16, num_sinks=0).cost(shapes[1]).flops / shapes[1].keys
    assert fine == 2 * (1 + 12) * 16 * (8 + 8)


def test_means_of_queries_are_refused_in_causal_calls():
    q, k, v = make_qkv(8)
    method = HODLR(coarse_queries=True)
    with pytest.raises(Unsupported, match="later ones"):
        method(q, k, v, is_causal=True)
    with pytest.raises(Unsupported, match="later ones"):
        method.state(k, v)
    assert method.cost(Shape(2, 3, 3, 8, 8, 8, 5)).cache is None


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2.0}, "block_size"),
        ({"num_sinks": -1}, "num_sinks"),
        ({"coarse_queries": "yes"}, "coarse_queries"),
    ],
)
def test_bad_options_are_refused(options, mention):
    q, k, v = make_qkv(4)
    with pytest.raises(ValueError, match=mention):
        HODLR(**options)
    with pytest.raises(ValueError, match=mention):
        hodlr_attention(q, k, v, **options)
