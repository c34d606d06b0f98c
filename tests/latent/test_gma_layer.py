"""The layer of Gaussian-mixture attention, against its definition token by token."""

import pytest
import torch
from torch.nn import functional as F

from numattn import Unsupported, padding_mask
from numattn.core.layer import Cache, heads, joined
from numattn.core.rotary import Rotary, Yarn
from numattn.latent import gma_attention
from numattn.latent.gma import responsibilities
from numattn.latent.gma_layer import GaussianMixtureAttention
from numattn.testing.layers import check_layer

WIDTH, DIM = 24, 6


def make(num_heads=4, kv_heads=2, components=5, seed=0, **options):
    """A layer in float64 whose calibration and temperature are not at their start."""
    torch.manual_seed(seed)
    layer = GaussianMixtureAttention(
        WIDTH, num_heads, components, kv_heads=kv_heads, head_dim=DIM, **options
    ).double()
    with torch.no_grad():
        layer.mixture.log_temperature.normal_()
        if layer.window:
            layer.calibration.normal_()
    return layer


def hidden(length, batch=2, seed=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=source, dtype=torch.float64)


def same(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def tokens(layer, x):
    """Queries, keys and values of every query head, (B, H, N, D)."""
    group = layer.num_heads // layer.kv_heads
    q = heads(layer.q_proj(x), layer.num_heads)
    k, v = (heads(p(x), layer.kv_heads) for p in (layer.k_proj, layer.v_proj))
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def gammas(layer, q, k):
    """Responsibilities of queries and keys, (B, H, N, K)."""
    group = layer.num_heads // layer.kv_heads
    tensors = {n: t.repeat_interleave(group, dim=0) for n, t in layer.mixture.tensors().items()}
    tau = DIM**0.5 * tensors["log_temperature"].exp()
    names = ("means", "log_var", "log_prior")
    of_keys = [tensors[n] for n in names]
    of_queries = [tensors.get(f"query_{n}", tensors[n]) for n in names]
    return responsibilities(q, *of_queries, tau), responsibilities(k, *of_keys, tau)


def definition(layer, x, is_causal=True):
    """All pairs of tokens, dense."""
    q, k, v = tokens(layer, x)
    gamma_q, gamma_k = gammas(layer, q, k)
    place = torch.arange(x.shape[1])
    back = place[:, None] - place  # i - j
    window = layer.window
    older = back >= window if is_causal else (back.abs() >= window)
    weights = gamma_q @ gamma_k.mT * older
    num, den = weights @ v, weights.sum(-1, keepdim=True)
    mixture = num / torch.where(den + layer.record.epsilon > 0, den + layer.record.epsilon, 1.0)
    if not window:
        return layer.o_proj(joined(mixture))
    scale = DIM**-0.5
    if layer.rotary is not None:
        q, k = layer.rotary(q, place), layer.rotary(k, place)
        scale = scale * layer.rotary.logit_factor
    recent = (back >= 0) & (back < window) if is_causal else back.abs() < window
    exact = (scale * q @ k.mT).exp() * recent
    c = layer.calibration[:, None, None]
    if layer.merge == "lse":
        both = exact.sum(-1, keepdim=True) + c.exp() * (den + layer.record.epsilon)
        return layer.o_proj(joined((exact @ v + c.exp() * num) / both))
    gate = torch.where(den > 0, c.sigmoid(), 1.0)
    near = exact @ v / exact.sum(-1, keepdim=True)
    return layer.o_proj(joined(gate * near + (1 - gate) * mixture))


YARN = Yarn(factor=4.0, original_length=8, mscale=1.0, mscale_all_dim=1.0)
CASES = [
    {},
    {"shared": False, "epsilon": 0.4, "kv_heads": 4},
    {"window": 4},
    {"window": 1, "merge": "gate", "kv_heads": 1},
    {"window": 5, "shared": False, "epsilon": 0.3, "rotary": Rotary(DIM)},
    {"window": 3, "merge": "gate", "epsilon": 0.2, "rotary": Rotary(DIM, yarn=YARN)},
]


@pytest.mark.parametrize("options", CASES)
def test_the_promises_of_a_layer(options):
    check_layer(make(**options))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("options", CASES)
def test_it_is_the_definition(options, is_causal):
    layer = make(**options)
    for length in (1, 3, 150):  # within the window, and over chunks
        x = hidden(length)
        same(layer(x, is_causal=is_causal), definition(layer, x, is_causal))


@pytest.mark.parametrize("options", CASES)
def test_streaming_is_one_call(options):
    """Pieces shorter and longer than the window and than a chunk."""
    layer, x = make(**options), hidden(400)
    state = layer.state(2)
    outs = [layer(piece, state=state) for piece in x.split([2, 1, 5, 290, 1, 101], 1)]
    same(torch.cat(outs, 1), layer(x))
    assert state.length == 400


@pytest.mark.parametrize("options", CASES)
def test_padding_between_tokens_is_truncation(options):
    """The window counts the tokens that exist."""
    layer, x = make(**options), hidden(40)
    keep = torch.ones(40, dtype=torch.bool)
    keep[[3, 4, 11, 30]] = False
    mask = keep.expand(2, 1, 1, 40)
    for is_causal in (True, False):
        out = layer(x, attn_mask=mask, is_causal=is_causal)
        same(out[:, keep], layer(x[:, keep], is_causal=is_causal))


def test_gradients_are_those_of_the_definition():
    for options in CASES:
        layer, x = make(**options), hidden(20).requires_grad_()
        leaves = [x, *layer.parameters()]
        ours, theirs = (
            torch.autograd.grad(out.square().sum(), leaves)
            for out in (layer(x), definition(layer, x))
        )
        for found, expected in zip(ours, theirs, strict=True):
            assert (found - expected).norm() <= 1e-11 * expected.norm()


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_over_everything_is_softmax_attention(is_causal):
    layer, x = make(window=20, merge="gate"), hidden(20)
    out = F.scaled_dot_product_attention(*tokens(layer, x), is_causal=is_causal)
    same(layer(x, is_causal=is_causal), layer.o_proj(joined(out)))


def test_the_state_does_not_grow():
    layer = make(window=4, components=5).float()
    state, sizes = layer.state(3), []
    for _ in range(4):
        layer(torch.randn(3, 10, WIDTH), state=state)
        sizes.append(state.nbytes)
    slots = 5 * (DIM + 2)
    assert sizes == [3 * 2 * (slots + 4 * 2 * DIM) * 4] * 4
    assert layer.cost(3, 10**6).cache == sizes[0]


# --- cross attention ------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_cross_attention_is_that_of_the_method(shared, padded):
    """Queries of one sequence and keys of another, of other lengths."""
    layer = make(shared=shared, epsilon=0.2)
    x, y = hidden(17), hidden(60, seed=2)
    mask = padding_mask(torch.tensor([35, 60])) if padded else None
    memory = layer.memory(y, mask)
    q = heads(layer.q_proj(x), 4)
    k, v = (heads(p(y), 2) for p in (layer.k_proj, layer.v_proj))
    want = gma_attention(
        q,
        k,
        v,
        **layer.record.options(),
        **layer.mixture.tensors(),
        attn_mask=mask,
        enable_gqa=True,
    )
    same(layer.attend(x, memory), layer.o_proj(joined(want)))
    assert memory.nbytes == 2 * 2 * 5 * (DIM + 2) * 8


def test_a_memory_has_gradients_and_stays_as_it_is():
    layer, x, y = make(), hidden(7), hidden(30, seed=2).requires_grad_()
    memory = layer.memory(y)
    first = layer.attend(x, memory)
    same(layer.attend(x, memory), first, 0)
    (grad,) = torch.autograd.grad(first.square().sum(), y)
    assert (grad.abs().amax(-1) > 0).all()


def test_an_empty_memory_gives_zeros():
    layer = make()
    for y, mask in ((hidden(0), None), (hidden(5), torch.zeros(2, 1, 1, 5, dtype=torch.bool))):
        assert not layer.attend(hidden(3), layer.memory(y, mask)).any()


def test_a_state_is_a_memory():
    layer, x, y = make(), hidden(7), hidden(30, seed=2)
    state = layer.state(2)
    layer(y, state=state)
    same(layer.attend(x, state), layer.attend(x, layer.memory(y)))


# --- arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("kv_heads must divide", {"kv_heads": 3}),
        ("num_heads must divide embed_dim", {"num_heads": 5}),
        ("window", {"window": -1}),
        ("merge must be one of", {"window": 2, "merge": "sum"}),
        ("with a window only", {"merge": "gate"}),
        ("with a window only", {"rotary": Rotary(DIM)}),
        ("rotary turns 4", {"window": 2, "rotary": Rotary(4)}),
        ("num_components", {"num_components": 0}),
        ("temperature", {"temperature": -1.0}),
        ("epsilon", {"epsilon": -1.0}),
    ],
)
def test_options_are_checked(match, options):
    with pytest.raises(ValueError, match=match):
        GaussianMixtureAttention(
            **{"embed_dim": 24, "num_heads": 4, "num_components": 5, **options}
        )


def test_what_it_cannot_do_is_refused():
    layer, x = make(window=2), hidden(5)
    with pytest.raises(Unsupported, match="window=0"):
        layer.memory(x)
    with pytest.raises(Unsupported, match="window=0"):
        layer.attend(x, layer.state(2))
    with pytest.raises(TypeError, match="must come from its `state`"):
        layer(x, state=Cache(key=torch.zeros(2, 1, 0, 1)))
