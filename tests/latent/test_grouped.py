"""What is true of the layers whose heads share keys and values."""

import math

import pytest
import torch
from torch.nn import functional as F

from numattn import padding_mask
from numattn.core.cost import count_flops
from numattn.core.layer import heads, joined
from numattn.core.rotary import Rotary, Yarn
from numattn.engines import softmax
from numattn.engines.softmax import grouped_attention
from numattn.latent import grouped
from numattn.latent.grouped import (
    GroupedLatentAttention,
    GroupedQueryAttention,
    GroupedTiedAttention,
)
from numattn.latent.mla import MultiheadLatentAttention
from numattn.testing.layers import check_layer

SMALL = {"kv_rank": 8, "head_dim": 6, "rope_dim": 4, "value_dim": 5}
YARN = Rotary(4, yarn=Yarn(4.0, 8, mscale_all_dim=0.7))


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(kind, *args, seed=1, **options):
    """A layer in float64 whose weights depend on the seed only."""
    layer = kind(*args, **options).double()
    for i, parameter in enumerate(layer.parameters()):
        spread = 0.3 * draw(*parameter.shape, seed=seed + i)
        parameter.data = spread + (1 if parameter.dim() == 1 else 0)
    return layer


def same(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def dense(q, k, v, scale, allowed):
    """Softmax attention as it is defined, with heads repeated; rows without a key give zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    logits = (scale * q @ k.mT).masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1).nan_to_num() @ v


def tril(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


# --- every layer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        GroupedQueryAttention(24, 4, kv_heads=4, head_dim=8),
        GroupedQueryAttention(24, 4, kv_heads=2, head_dim=8, value_dim=6, bias=True),
        GroupedQueryAttention(24, 6, kv_heads=1, head_dim=4, rotary=None, scale=0.7),
        GroupedTiedAttention(24, 4, kv_heads=2, head_dim=8),
        GroupedTiedAttention(24, 6, kv_heads=2, head_dim=4, rope_dim=4, bias=True),
        GroupedTiedAttention(24, 4, kv_heads=1, head_dim=8, rope_dim=4, rotary=YARN),
        GroupedLatentAttention(24, 4, **SMALL),
        GroupedLatentAttention(24, 4, num_latents=4, query_rank=10, bias=True, **SMALL),
        GroupedLatentAttention(24, 6, num_latents=3, latent_norm=False, rotary=YARN, **SMALL),
        GroupedLatentAttention(24, 4, latent_norm=False, **{**SMALL, "rope_dim": 0}),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_it_keeps_the_promises_of_a_layer(layer):
    check_layer(layer)


LAYERS = {
    "query": lambda: make(GroupedQueryAttention, 16, 4, kv_heads=2, head_dim=6),
    "tied": lambda: make(GroupedTiedAttention, 16, 4, kv_heads=2, head_dim=6, rope_dim=2),
    "latent": lambda: make(GroupedLatentAttention, 16, 4, **SMALL),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_that_does_not_fit_is_refused(name):
    layer = LAYERS[name]()
    with pytest.raises(TypeError, match=f"{type(layer).__name__}.state"):
        layer(draw(1, 3, 16), state=_OtherState())
    with pytest.raises(ValueError, match=r"the state holds 2 sequences, hidden has 3"):
        layer(draw(3, 3, 16), state=layer.state(2))


class _OtherState:
    length = 0


@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens_leave_nothing(name):
    layer = LAYERS[name]()
    state = layer.state()
    assert layer(draw(1, 0, 16), state=state).shape == (1, 0, 16)
    assert (state.length, state.nbytes) == (0, 0)


@pytest.mark.parametrize("name", LAYERS)
def test_with_a_state_it_is_always_causal(name):
    layer, x = LAYERS[name](), draw(2, 9, 16)
    assert torch.equal(layer(x, state=layer.state(2), is_causal=False), layer(x))


@pytest.mark.parametrize("name", ["tied", "latent"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_both_forms_agree(name, is_causal, padded):
    layer, x = LAYERS[name](), draw(2, 300, 16)  # more than one tile of rows
    mask = padding_mask(torch.tensor([170, 300]), side="left") if padded else None
    a, b = (layer(x, attn_mask=mask, is_causal=is_causal, absorbed=f) for f in (True, False))
    exists = slice(None) if mask is None else mask[:, 0, 0]
    same(a[exists], b[exists], 1e-10)


@pytest.mark.parametrize("name", ["tied", "latent"])
def test_both_forms_agree_after_other_tokens_and_with_their_default(name):
    layer, x = LAYERS[name](), draw(2, 40, 16)
    whole = layer(x)
    for pieces in ([17, 1, 22], [1] * 40):
        for absorbed in (True, False, None):
            state = layer.state(2)
            outs = [layer(p, state=state, absorbed=absorbed) for p in x.split(pieces, 1)]
            same(torch.cat(outs, 1), whole, 1e-10)


@pytest.mark.parametrize("name", ["tied", "latent"])
def test_gradients_of_both_forms_agree(name):
    layer = LAYERS[name]()
    grads = []
    for absorbed in (True, False):
        x = draw(2, 21, 16).requires_grad_()
        layer.zero_grad()
        layer(x, absorbed=absorbed).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*grads, strict=True):
        same(a, b, 1e-9)


@pytest.mark.parametrize("name", ["tied", "latent"])
@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_operations_of_both_forms_are_counted_exactly(name, absorbed, is_causal):
    layer, x = LAYERS[name]().float(), draw(2, 300, 16).float()
    counted = count_flops(lambda: layer(x, is_causal=is_causal, absorbed=absorbed))
    assert layer.cost(2, 300, is_causal=is_causal, absorbed=absorbed).flops == counted


@pytest.mark.parametrize("value_dim", [6, 4])  # torch's kernel, and the engine
def test_operations_of_grouped_queries_are_counted_exactly(value_dim):
    layer = GroupedQueryAttention(16, 4, kv_heads=2, head_dim=6, value_dim=value_dim)
    x = draw(2, 300, 16).float()
    for is_causal in (True, False):
        counted = count_flops(lambda c=is_causal: layer(x, is_causal=c))
        assert layer.cost(2, 300, is_causal=is_causal).flops == counted


# --- grouped queries ------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (1, 9), (4, 9), (260, 300)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_grouped_attention_is_that_of_repeated_heads(group, value_dim, rows, keys, is_causal):
    q, k, v = draw(2, 2 * group, rows, 8), draw(2, 2, keys, 8), draw(2, 2, keys, value_dim, seed=2)
    allowed = tril(rows, keys) if is_causal else torch.ones(rows, keys, dtype=torch.bool)
    same(grouped_attention(q, k, v, scale=0.4, is_causal=is_causal), dense(q, k, v, 0.4, allowed))


def test_one_token_after_others_is_served_by_torch_with_its_heads_as_rows(monkeypatch):
    """So that no kernel repeats keys for the heads that share them."""
    seen = []

    def fused(query, key, value, **call):
        seen.append((query.shape, key.shape))
        return grouped_fused(query, key, value, **call)

    grouped_fused = softmax.fused_attention
    monkeypatch.setattr(softmax, "fused_attention", fused)
    grouped_attention(draw(1, 6, 1, 8), draw(1, 2, 50, 8), draw(1, 2, 50, 8), scale=1.0)
    assert seen == [((1, 2, 3, 8), (1, 2, 50, 8))]


def test_grouped_attention_of_a_row_without_keys_is_zero():
    q, k, v = (draw(1, 2, 5, 4, seed=s) for s in range(3))
    keep = padding_mask(torch.tensor([3]), 5, side="left")
    bias = torch.zeros(1, 1, 5, dtype=q.dtype).masked_fill(~keep[:, 0], -torch.inf)
    out = grouped_attention(q, k, v, scale=0.5, bias=bias)
    same(out, dense(q, k, v, 0.5, tril(5, 5) & keep))
    assert not out[:, :, :2].any()


@pytest.mark.parametrize("rotary", [None, "default", Rotary(8, base=100.0, interleaved=True)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_with_a_key_for_every_query_head_it_is_torch_attention(rotary, is_causal):
    layer = make(GroupedQueryAttention, 16, 3, kv_heads=3, head_dim=8, rotary=rotary, bias=True)
    x = draw(2, 20, 16)
    q, k, v = (
        heads(F.linear(x, p.weight, p.bias), 3) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if rotary is not None:
        turn = Rotary(8) if rotary == "default" else rotary
        q, k = turn(q, torch.arange(20)), turn(k, torch.arange(20))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    same(layer(x, is_causal=is_causal), layer.o_proj(joined(want)))


def test_heads_that_share_a_key_are_those_of_a_layer_with_the_key_repeated():
    shared = make(GroupedQueryAttention, 16, 6, kv_heads=2, head_dim=4)
    full = make(GroupedQueryAttention, 16, 6, kv_heads=6, head_dim=4)
    weights = shared.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        repeated = weights[name].unflatten(0, (2, 4)).repeat_interleave(3, 0)
        weights[name] = repeated.flatten(0, 1)
    full.load_state_dict(weights)
    x = draw(2, 20, 16)
    same(shared(x), full(x))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_attention_of_llama(kv_heads, bias):
    """Prefill, and step by step beside the cache of transformers."""
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=10,
        attention_bias=bias,
        attn_implementation="eager",
    )
    theirs = llama.LlamaAttention(config, layer_idx=0).eval()
    for i, parameter in enumerate(theirs.parameters()):
        parameter.data = 0.3 * draw(*parameter.shape, seed=i).float()
    rope = llama.LlamaRotaryEmbedding(config)
    ours = GroupedQueryAttention(32, 4, kv_heads=kv_heads, head_dim=10, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = draw(2, 12, 32).float()

    def call(piece, start, mask, cache):
        position = rope(piece, start + torch.arange(piece.shape[1])[None])
        return theirs(piece, position, mask, cache)[0]

    mask = torch.zeros(1, 1, 12, 12).masked_fill(~tril(12, 12), -torch.inf)
    want = call(x, 0, mask, None)
    same(ours(x), want, 1e-5)
    state, cache = ours.state(2), transformers.DynamicCache()
    for start, piece in enumerate(x.split(1, 1)):
        theirs_out = call(piece, start, None, cache)
        same(ours(piece, state=state), theirs_out, 1e-5)
    assert state["key"].shape == cache.layers[0].keys.shape


# --- tied keys and values -------------------------------------------------------------------


@pytest.mark.parametrize("rope_dim", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_tied_attention_is_grouped_attention_with_tied_keys(
    rope_dim, kv_heads, absorbed, is_causal
):
    layer = make(
        GroupedTiedAttention, 16, 4, kv_heads=kv_heads, head_dim=8, rope_dim=rope_dim, bias=True
    )
    x, place, plain = draw(2, 30, 16), torch.arange(30), 8 - rope_dim
    q = heads(layer.q_proj(x), 4)
    q = torch.cat([q[..., :plain], Rotary(rope_dim)(q[..., plain:], place)], 3)
    v = heads(layer.kv_proj(x), kv_heads)
    turned = Rotary(rope_dim)(layer.k_rope_proj(x), place)[:, None].expand(-1, kv_heads, -1, -1)
    k = torch.cat([v[..., :plain], turned], 3)
    allowed = tril(30, 30) if is_causal else torch.ones(30, 30, dtype=torch.bool)
    want = layer.o_proj(joined(dense(q, k, v, 8**-0.5, allowed)))
    same(layer(x, is_causal=is_causal, absorbed=absorbed), want)


def test_tied_attention_takes_the_absorbed_form_after_other_tokens(monkeypatch):
    layer, x = LAYERS["tied"](), draw(1, 4, 16)
    taken = []
    for name in ("_tied_absorbed", "_tied_expanded"):
        form = getattr(grouped, name)
        monkeypatch.setattr(grouped, name, lambda *a, f=form, n=name: (taken.append(n), f(*a))[1])
    state = layer.state()
    layer(x, state=state)
    layer(x, state=state)
    layer(x)
    assert taken == ["_tied_expanded", "_tied_absorbed", "_tied_expanded"]


# --- several latents ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query_rank": 7, "bias": True, "norm_eps": 0.5},
        {"latent_norm": False},
        {"rotary": YARN, "scale": 0.2},
    ],
)
def test_with_one_latent_it_is_multihead_latent_attention(options):
    one = make(GroupedLatentAttention, 16, 4, num_latents=1, **SMALL, **options)
    mla = make(MultiheadLatentAttention, 16, 4, seed=9, **SMALL, **options)
    mla.load_state_dict(one.state_dict())
    x = draw(2, 30, 16)
    for call in ({}, {"is_causal": False}, {"absorbed": True}, {"absorbed": False}):
        same(one(x, **call), mla(x, **call))
    ours, theirs = one.state(2), mla.state(2)
    for piece in x.split([11, 1, 18], 1):
        same(one(piece, state=ours), mla(piece, state=theirs))
    same(ours["latent"], theirs["latent"])
    for absorbed in (True, False, None):
        assert one.cost(2, 50, absorbed=absorbed) == mla.cost(2, 50, absorbed=absorbed)


@pytest.mark.parametrize("absorbed", [True, False])
def test_its_groups_of_heads_are_latent_layers_of_their_own(absorbed):
    """The output is the sum of theirs, each with its part of every projection."""
    groups, per, d_c, d_r = 3, 2, SMALL["kv_rank"], SMALL["rope_dim"]
    layer = make(GroupedLatentAttention, 16, groups * per, num_latents=groups, **SMALL)
    w, x, want = layer.state_dict(), draw(2, 25, 16), 0
    for g in range(groups):
        own = make(MultiheadLatentAttention, 16, per, **SMALL)
        down = w["kv_a_proj_with_mqa.weight"]
        latent = slice(g * d_c, (g + 1) * d_c)
        part = {
            "q_proj.weight": w["q_proj.weight"].chunk(groups)[g],
            "kv_a_proj_with_mqa.weight": torch.cat([down[latent], down[-d_r:]]),
            "kv_a_layernorm.weight": w["kv_a_layernorm.weight"][latent],
            "kv_b_proj.weight": w["kv_b_proj.weight"].chunk(groups)[g],
            "o_proj.weight": w["o_proj.weight"].chunk(groups, 1)[g],
        }
        own.load_state_dict(part)
        want = want + own(x)
    same(layer(x, absorbed=absorbed), want, 1e-11)


def test_each_latent_is_normalised_alone():
    layer = make(GroupedLatentAttention, 16, 4, norm_eps=0.0, **SMALL)
    layer.kv_a_layernorm.weight.data.fill_(1.0)
    layer.kv_a_proj_with_mqa.weight.data[:8] *= 100  # the first latent
    state = layer.state()
    layer(draw(1, 5, 16), state=state)
    squares = state["latent"][..., :16].unflatten(-1, (2, 8)).square().mean(-1)
    same(squares, torch.ones_like(squares))


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_layer", "message"),
    [
        (lambda: GroupedQueryAttention(8, 4, kv_heads=3, head_dim=4), "kv_heads must divide"),
        (lambda: GroupedQueryAttention(8, 4, kv_heads=0, head_dim=4), "kv_heads must be a pos"),
        (lambda: GroupedQueryAttention(0, 4, kv_heads=1, head_dim=4), "embed_dim must be a pos"),
        (
            lambda: GroupedQueryAttention(8, 4, kv_heads=1, head_dim=4, rotary=Rotary(2)),
            "turns 2 coordinates, head_dim is 4",
        ),
        (lambda: GroupedTiedAttention(8, 4, kv_heads=3, head_dim=4), "kv_heads must divide"),
        (
            lambda: GroupedTiedAttention(8, 4, kv_heads=1, head_dim=4, rope_dim=6),
            "rope_dim is 6, above head_dim, 4",
        ),
        (
            lambda: GroupedTiedAttention(8, 4, kv_heads=1, head_dim=4, rotary=Rotary(4)),
            "turns 4 coordinates, rope_dim is 2",
        ),
        (lambda: GroupedLatentAttention(8, 4, num_latents=3), "num_latents must divide"),
        (lambda: GroupedLatentAttention(8, 4, num_latents=-1), "num_latents must be a pos"),
    ],
)
def test_options_that_do_not_fit_are_refused(make_layer, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_layer()
    assert str(refusal.value).startswith("Grouped")


def test_the_usual_scale_is_that_of_the_width_times_what_the_rotation_asks_for():
    yarn = Yarn(4.0, 8, mscale_all_dim=1.0)
    factor = (0.1 * math.log(4.0) + 1) ** 2
    query = GroupedQueryAttention(8, 2, kv_heads=1, head_dim=4, rotary=Rotary(4, yarn=yarn))
    tied = GroupedTiedAttention(8, 2, kv_heads=1, head_dim=4, rotary=Rotary(2, yarn=yarn))
    assert math.isclose(query.scale, 4**-0.5 * factor)
    assert math.isclose(tied.scale, 4**-0.5 * factor)
    assert GroupedTiedAttention(8, 2, kv_heads=1, head_dim=4, scale=2.0).scale == 2.0
