"""Latent attention: the layer against loops and transformers, the method against its definition."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.core.layer import Cache, LayerState
from numattn.core.rotary import Rotary, Yarn
from numattn.engines import softmax
from numattn.latent import mla
from numattn.latent.mla import (
    MLA,
    MLAAttention,
    MultiheadLatentAttention,
    absorbed_attention,
    expanded_attention,
    mla_attention,
)
from numattn.testing import make_qkv, reference
from numattn.testing.checks import close
from numattn.testing.layers import check_layer

F64 = torch.float64
GQA = {"enable_gqa": True}
SIZES = {"kv_rank": 16, "head_dim": 8, "rope_dim": 4, "value_dim": 6}
YARN = Yarn(4.0, 16, mscale=0.7, mscale_all_dim=1.3)
LAYERS = {
    "plain": {},
    "query rank": {"query_rank": 12, "bias": True},
    "no rotation": {"rope_dim": 0, "query_rank": 5, "bias": True},
    "yarn": {"rotary": Rotary(4, interleaved=True, yarn=YARN)},
    "no norm": {"latent_norm": False, "bias": True},
    "fused": {"value_dim": 12},
    "small latent": {"kv_rank": 5, "scale": 0.9},
}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def make(embed_dim=20, num_heads=3, *, seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MultiheadLatentAttention(embed_dim, num_heads, **{**SIZES, **options}).double()


def same(ours, theirs, tolerance=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def rms(x, norm):
    return x * (x.square().mean() + norm.eps) ** -0.5 * norm.weight


def turned(x, position, rotary):
    """Rotation of one vector by complex numbers; pairs come out in the order (l, l + d / 2)."""
    if not len(x):
        return x
    pairs = x.unflatten(0, (-1, 2)) if rotary.interleaved else x.unflatten(0, (2, -1)).T
    turn = torch.polar(
        torch.full((len(pairs),), rotary.yarn.amplitude if rotary.yarn else 1.0, dtype=F64),
        position * rotary.frequencies(),
    )
    z = torch.complex(pairs[:, 0], pairs[:, 1]) * turn
    return torch.cat([z.real, z.imag])


def one_sequence(layer, x, is_causal):
    """The definition, token by token and head by head, on one sequence without padding."""
    count, d_n, d_c = layer.num_heads, layer.head_dim, layer.kv_rank
    keys, values, queries = [], [], []
    for t, token in enumerate(x):
        down = layer.kv_a_proj_with_mqa(token)
        c = down[:d_c] if layer.kv_a_layernorm is None else rms(down[:d_c], layer.kv_a_layernorm)
        up = layer.kv_b_proj(c).reshape(count, -1)
        r = turned(down[d_c:], t, layer.rotary)
        keys.append([torch.cat([up[h, :d_n], r]) for h in range(count)])
        values.append([up[h, d_n:] for h in range(count)])
        if layer.query_rank is None:
            q = layer.q_proj(token)
        else:
            q = layer.q_b_proj(rms(layer.q_a_proj(token), layer.q_a_layernorm))
        q = q.reshape(count, -1)
        queries.append(
            [torch.cat([q[h, :d_n], turned(q[h, d_n:], t, layer.rotary)]) for h in range(count)]
        )
    outs = []
    for t in range(len(x)):
        seen, parts = t + 1 if is_causal else len(x), []
        for h in range(count):
            logits = torch.stack([queries[t][h] @ keys[j][h] for j in range(seen)])
            weights = (layer.scale * logits).softmax(0)
            parts.append(sum(w * values[j][h] for j, w in enumerate(weights)))
        outs.append(layer.o_proj(torch.cat(parts)))
    return torch.stack(outs)


# --- the layer ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_layer_contract(name):
    check_layer(make(**LAYERS[name]))


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layer_is_its_definition(name, is_causal, absorbed):
    layer, x = make(**LAYERS[name]), randn(2, 7, 20)
    mask = padding_mask(torch.tensor([7, 4]), side="left")
    out = layer(x, attn_mask=mask, is_causal=is_causal, absorbed=absorbed)
    same(out[0], one_sequence(layer, x[0], is_causal))
    same(out[1, 3:], one_sequence(layer, x[1, 3:], is_causal))


@pytest.mark.parametrize("rows", [256, 5])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_absorbed_is_expanded(name, rows, monkeypatch):
    monkeypatch.setattr(softmax, "ROWS", rows)
    layer, x = make(**LAYERS[name]), randn(3, 13, 20)
    mask = padding_mask(torch.tensor([13, 6, 0]), side="left")
    for call in (
        {},
        {"is_causal": False},
        {"attn_mask": mask},
        {"attn_mask": mask.flip(-1), "is_causal": False},
    ):
        same(layer(x, absorbed=True, **call), layer(x, absorbed=False, **call))
    states = layer.state(3), layer.state(3)
    for piece in x.split([5, 1, 4, 3], 1):
        pair = [
            layer(piece, state=s, absorbed=form)
            for s, form in zip(states, (True, False), strict=True)
        ]
        same(*pair)


def test_gradients_of_both_forms_agree():
    layer, x = make(query_rank=7), randn(2, 9, 20)
    grads = []
    for absorbed in (False, True):
        leaf = x.clone().requires_grad_()
        value = layer(leaf, absorbed=absorbed).square().sum()
        grads.append(torch.autograd.grad(value, [leaf, *layer.parameters()]))
    for ours, theirs in zip(*grads, strict=True):
        same(ours, theirs)


@torch.no_grad()
def test_a_rotated_key_cannot_be_absorbed():
    """With positions in k_h itself, what absorbs at one distance is wrong at another."""
    rotary, position = Rotary(8), torch.arange(6)
    q, c, up = randn(1, 2, 6, 8), randn(1, 1, 6, 16, seed=1), randn(2, 14, 16, seed=2)
    keys, values = (c @ part.mT for part in up.split([8, 6], 1))  # (1, 2, 6, .)
    none = {"q_rope": q[..., :0], "rope": c[..., :0]}
    for where, absorbable in ((0 * position, True), (0 * position + 5, True), (position, False)):
        naive = reference(rotary(q, where), rotary(keys, where), values, is_causal=True)
        for query in (q, rotary(q, where), rotary(q, -where)):
            ours = absorbed_attention(query, latent=c, up=up, scale=8**-0.5, **none)
            off = (ours - naive).abs().max()
            if absorbable and query is q:  # all at one place: rotations cancel
                assert off < 1e-12
            if not absorbable:
                assert off > 1e-2 * naive.abs().max()


@pytest.mark.parametrize("interleaved", [False, True])
@torch.no_grad()
def test_wide_latent_is_multi_head_attention(interleaved):
    """With H (d_n + d_v) numbers and an orthonormal up-projection nothing is compressed."""
    count, d_n, d_r, d_v, width = 3, 8, 4, 6, 20
    layer = make(kv_rank=count * (d_n + d_v), latent_norm=False, rotary=Rotary(4, 1e4, interleaved))
    w_k, w_v, w_r = (randn(n, width, seed=n) for n in (count * d_n, count * d_v, d_r))
    w_q = randn(count, d_n + d_r, width, seed=9)
    up = torch.linalg.qr(randn(count * (d_n + d_v), count * (d_n + d_v)))[0]
    rows = torch.cat([w_k.unflatten(0, (count, -1)), w_v.unflatten(0, (count, -1))], 1)
    layer.kv_b_proj.weight.copy_(up)
    layer.kv_a_proj_with_mqa.weight.copy_(torch.cat([up.T @ rows.flatten(0, 1), w_r]))
    layer.q_proj.weight.copy_(w_q.flatten(0, 1))
    x, place = randn(2, 11, width, seed=4), torch.arange(11)
    q = torch.einsum("bne,hde->bhnd", x, w_q)
    r = layer.rotary((x @ w_r.T)[:, None], place).expand(-1, count, -1, -1)
    k, v = ((x @ w.T).unflatten(2, (count, -1)).transpose(1, 2) for w in (w_k, w_v))
    query = torch.cat([q[..., :d_n], layer.rotary(q[..., d_n:], place)], 3)
    out = reference(query, torch.cat([k, r], 3), v, is_causal=True)
    for absorbed in (False, True):
        same(layer(x, absorbed=absorbed), layer.o_proj(out.transpose(1, 2).flatten(2)))


@torch.no_grad()
def test_cache_holds_the_normalised_latent_and_the_rotated_key():
    layer, x = make(rotary=Rotary(4)), 3 * randn(2, 9, 20)
    state = layer.state(2)
    layer(x, state=state)
    kept = state["latent"]
    assert kept.shape == (2, 1, 9, 16 + 4)
    assert state.nbytes == 2 * 9 * 20 * 8
    down = layer.kv_a_proj_with_mqa(x)
    size = down[..., :16].square().mean(-1, keepdim=True).add(1e-6).sqrt()
    same(kept[:, 0, :, :16], down[..., :16] / size)
    same(kept[:, 0, :, 16:], layer.rotary(down[..., 16:], torch.arange(9)))
    assert torch.equal(make(latent_norm=False).state(1)["latent"], torch.empty(1, 1, 0, 20))


# --- its cost -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_cost_counts_every_operation(name, absorbed, is_causal):
    layer, call = make(**LAYERS[name]), {"is_causal": is_causal, "absorbed": absorbed}
    for length in (1, 33, 300):  # 300: two tiles of rows
        counted = count_flops(lambda n=length: layer(randn(2, n, 20), **call))
        assert layer.cost(2, length, **call).flops == counted


@torch.no_grad()
def test_the_form_of_fewer_operations_is_taken():
    for options in ({}, {"kv_rank": 64}, {"kv_rank": 4}):
        layer = make(**options)
        for before, new in ((0, 40), (60, 1), (60, 2), (10, 40), (200, 40)):
            counted = []
            for form in (None, True, False):
                state = layer.state(1)
                layer(randn(1, before, 20), state=state)
                x = randn(1, new, 20)
                counted.append(count_flops(partial(layer, x, state=state, absorbed=form)))
            if max(counted[1:]) > 1.2 * min(counted[1:]):  # tiles are computed whole
                assert counted[0] == min(counted[1:]), f"{options}, {new} after {before}"


@pytest.mark.parametrize("kv_rank", [16, 7, 5])
def test_the_rule_of_the_docstring(kv_rank):
    layer = make(kv_rank=kv_rank)
    for new in range(1, 30):
        for before in range(0, 60, 7):
            for is_causal in (True, False):
                pairs = sum(before + (i + 1 if is_causal else new) for i in range(new))
                want = pairs * (2 * kv_rank - 8 - 6) <= before * kv_rank * (8 + 6)
                assert layer.absorbs(new, before + new, is_causal=is_causal) is want


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.bytes = max([self.bytes, *sizes])
        return out


@torch.no_grad()
def test_decoding_never_forms_keys_or_values():
    length, count, d_n = 600, 8, 32
    layer = make(64, count, kv_rank=48, head_dim=d_n, rope_dim=8, value_dim=d_n)
    state = layer.state(1)
    layer(randn(1, length, 64), state=state)
    layer(randn(1, 1, 64), state=state)  # the buffer grows, with room for more
    largest = {}
    for absorbed in (None, True, False):
        with Largest() as seen:
            layer(randn(1, 1, 64), state=state, absorbed=absorbed)
        largest[absorbed] = seen.bytes
    of_keys = length * count * d_n * 8
    assert largest[None] <= largest[True] < of_keys < largest[False]


def test_cost_and_state_allocate_nothing_on_meta():
    with torch.device("meta"):
        layer = MultiheadLatentAttention(7168, 128, query_rank=1536)
        state = layer.state(4)
    cost = layer.cost(1, 1000)
    assert state["latent"].device.type == "meta"
    assert (cost.units, cost.cache) == (576, 1000 * 576 * 4)
    per_token = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert layer.cost(1, 1, absorbed=False).flops == 2 * (per_token + 128 * (128 + 64 + 128))
    assert layer.cost(1, 1, absorbed=True).flops == 2 * (per_token + 128 * (2 * 512 + 64))


# --- numerics and messages ------------------------------------------------------------------


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_sums_in_single(dtype, absorbed):
    """Ten thousand equal weights: a sum in bfloat16 would stop at 256, in float16 at 2048."""
    layer = make(latent_norm=False, rope_dim=0)
    layer.q_proj.weight.zero_()
    low = make(latent_norm=False, rope_dim=0).to(dtype)
    low.load_state_dict(layer.state_dict())
    state = low.state(1)
    state.append(latent=(randn(1, 1, 9999, 16) + 1).to(dtype))
    x = randn(1, 1, 20).to(dtype)
    out = low(x, state=state, absorbed=absorbed)
    mean = state["latent"].double().mean(2)  # (1, 1, 16)
    values = layer.kv_b_proj(mean).unflatten(2, (3, -1))[..., 8:].flatten(2)
    want = layer.o_proj(values)
    assert (out.double() - want).abs().max() <= 3e-2 * want.abs().max()


@torch.no_grad()
def test_a_state_is_always_causal():
    layer, x = make(), randn(1, 9, 20)
    for absorbed in (True, False):
        out = layer(x, state=layer.state(), is_causal=False, absorbed=absorbed)
        same(out, layer(x))


@torch.no_grad()
def test_one_expanded_token_after_others_is_fused(monkeypatch):
    layer, x = make(value_dim=12), randn(1, 9, 20)
    state, want = layer.state(), layer(x)
    layer(x[:, :8], state=state)
    monkeypatch.setattr(mla, "softmax_partial", None)
    same(layer(x[:, 8:], state=state, absorbed=False), want[:, 8:])


def test_no_token_gives_no_token():
    layer = make()
    assert layer(randn(2, 0, 20)).shape == (2, 0, 20)
    state = layer.state(2)
    layer(randn(2, 0, 20), state=state)
    assert state.length == 0


def test_tokens_of_a_state_have_no_gradient():
    layer, state, x = make(), make().state(1), randn(1, 3, 20).requires_grad_()
    layer(x, state=state)
    assert not state["latent"].requires_grad


class Foreign(LayerState):
    length = 0
    nbytes = 0


def test_messages_name_what_is_wrong():
    for options, words in (
        ({"rotary": Rotary(6)}, "rotary turns 6 coordinates, rope_dim is 4"),
        ({"kv_rank": 0}, "kv_rank"),
        ({"head_dim": 0}, "head_dim"),
        ({"value_dim": -1}, "value_dim"),
        ({"query_rank": 0}, "query_rank"),
        ({"rope_dim": -2}, "rope_dim"),
        ({"rope_dim": 3}, "even"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**options)
    layer, x = make(), randn(2, 3, 20)
    with pytest.raises(TypeError, match=r"MultiheadLatentAttention: state must be one that"):
        layer(x, state=Foreign())
    with pytest.raises(ValueError, match=r"holds 1 sequences, hidden has 2"):
        layer(x, state=layer.state())
    assert isinstance(layer.state(), Cache)


# --- several latents of a token -------------------------------------------------------------


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_forms_serve_several_latents(shared, is_causal):
    """Heads 0 to 2 read latent 0, heads 3 to 5 latent 1; the rotated key is one or two."""
    q, q_rope = randn(2, 6, 4, 8), randn(2, 6, 4, 2, seed=1)
    latent, rope = randn(2, 2, 9, 5, seed=2), randn(2, shared, 9, 2, seed=3)
    up, bias = randn(6, 8 + 3, 5, seed=4), randn(2, 1, 9, seed=5)
    wide = latent.repeat_interleave(3, 1)
    keys = torch.cat([wide @ up[:, :8].mT, rope.repeat_interleave(6 // shared, 1)], 3)
    mask = bias[:, None]
    if is_causal:
        later = torch.arange(9) > torch.arange(5, 9)[:, None]
        mask = mask.expand(-1, -1, 4, -1).masked_fill(later, -torch.inf)
    want = reference(
        torch.cat([q, q_rope], 3), keys, wide @ up[:, 8:].mT, attn_mask=mask, scale=0.4
    )
    for form in (absorbed_attention, expanded_attention):
        out = form(q, q_rope, latent, rope, up, scale=0.4, bias=bias, is_causal=is_causal)
        same(out, want)


# --- transformers ---------------------------------------------------------------------------

DEEPSEEK = {"rope_type": "default", "rope_theta": 500.0}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def twins(query_rank, interleaved, rope):
    """transformers' attention, its rotary embedding, and ours with the same state dict."""
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=query_rank,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        rope_interleave=interleaved,
        rope_parameters=rope,
        max_position_embeddings=256,
        attention_bias=query_rank is not None,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = theirs.DeepseekV3Attention(config, 0).eval()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    yarn = None
    if rope["rope_type"] == "yarn":
        yarn = Yarn(8.0, 32, mscale=1.0, mscale_all_dim=0.8)
    ours = MultiheadLatentAttention(
        48,
        4,
        kv_rank=24,
        head_dim=16,
        rope_dim=8,
        value_dim=12,
        query_rank=query_rank,
        rotary=Rotary(8, rope["rope_theta"], interleaved, yarn),
        bias=query_rank is not None,
    )
    ours.load_state_dict(module.state_dict())
    return module, theirs.DeepseekV3RotaryEmbedding(config), ours


def causal(new, total):
    seen = torch.arange(total) <= torch.arange(total - new, total)[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]


@pytest.mark.parametrize("rope", [DEEPSEEK, STRETCHED], ids=["default", "yarn"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("query_rank", [None, 20])
@torch.no_grad()
def test_parity_with_transformers(query_rank, interleaved, rope):
    module, rotary, ours = twins(query_rank, interleaved, rope)
    from transformers import DynamicCache

    x = randn(2, 40, 48).float()
    place = torch.arange(40)[None]
    want = module(x, rotary(x, place), causal(40, 40))[0]
    size = want.abs().max()
    for absorbed in (None, True, False):
        out = ours(x, absorbed=absorbed)
        assert (out - want).abs().max() <= 1e-5 * size
    cache, state, done = DynamicCache(), ours.state(2), 0
    for piece in x.split([17, *[1] * 23], 1):
        done += piece.shape[1]
        where = rotary(piece, place[:, done - piece.shape[1] : done])
        step = module(piece, where, causal(piece.shape[1], done), cache)[0]
        assert (ours(piece, state=state) - step).abs().max() <= 1e-5 * size


# --- the method -----------------------------------------------------------------------------


def compressed(k, v, basis, balance, mean):
    """Keys and values as the latents give them back, token by token, by least squares."""
    k2, v2 = torch.empty_like(k), torch.empty_like(v)
    batch, count, length, dim = k.shape
    for b in range(batch):
        w, rho, m = (t if t.dim() == n else t[b] for t, n in ((basis, 3), (balance, 1), (mean, 3)))
        for t in range(length):
            x = torch.cat([k[b, :, t], v[b, :, t]], 1) - m[:, 0]  # (Hk, D + E)
            x = torch.cat([x[:, :dim] / rho[:, None], x[:, dim:]], 1)
            c = torch.linalg.lstsq(w.flatten(0, 1), x.flatten()[:, None], driver="gelsd").solution
            y = (w.flatten(0, 1) @ c).reshape(count, -1)
            k2[b, :, t] = y[:, :dim] * rho[:, None] + m[:, 0, :dim]
            v2[b, :, t] = y[:, dim:] + m[:, 0, dim:]
    return k2, v2


def some_basis(rank=6, heads=3, batch=None):
    lead = () if batch is None else (batch,)
    return {
        "basis": randn(*lead, heads, 13, rank, seed=1),
        "balance": randn(*lead, heads, seed=2).exp(),
        "mean": randn(*lead, heads, 1, 13, seed=3),
    }


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_method_is_attention_to_what_latents_give_back(padded, is_causal, batch):
    q, k, v = make_qkv(12, group=2)
    tensors = some_basis(batch=batch)
    call = {"is_causal": is_causal, "scale": 0.7}
    if padded:
        call["attn_mask"] = padding_mask(torch.tensor([12, 5]), side="left")
    out = mla_attention(q, k, v, rank=6, **tensors, **call, **GQA)
    same(out, reference(q, *compressed(k, v, **tensors), **call), 1e-9)


def test_without_a_mean_it_is_zero():
    q, k, v = make_qkv(12)
    tensors = some_basis()
    zero = torch.zeros_like(tensors.pop("mean"))
    out = mla_attention(q, k, v, rank=6, center=False, **tensors)
    same(out, reference(q, *compressed(k, v, mean=zero, **tensors)), 1e-9)
    assert torch.equal(out, mla_attention(q, k, v, rank=6, **tensors))


@pytest.mark.parametrize("center", [False, True])
def test_fitted_basis_is_balanced_pca(center):
    """Eckart and Young: the balanced tokens lose what their singular values past r hold."""
    q, k, v = make_qkv(30, heads=2)
    k, v = 5 * k + 1, v - 2
    tensors = MLA(rank=7, center=center).fit(q, k, v)
    assert all(t.dtype == F64 for t in MLA(rank=7).fit(*(t.float() for t in (q, k, v))).values())
    if center:
        mean = torch.cat([k, v], 3).mean(2, keepdim=True)
        same(tensors["mean"], mean)
    else:
        assert "mean" not in tensors
        mean = torch.zeros(2, 2, 1, 13, dtype=F64)
    x = torch.cat([k, v], 3) - mean
    size = x.norm(dim=2)  # of columns
    balance = size[..., :8].mean((1, 2)) / size[..., 8:].mean((1, 2))
    same(tensors["balance"], balance[:, None].expand(2, 2))
    weight = torch.cat([balance.expand(8, 2), torch.ones(5, 2, dtype=F64)]).T[:, None, None]
    flat = (x / weight).transpose(1, 2).flatten(2)  # (B, N, 26)
    w = tensors["basis"].flatten(1, 2)
    same(w.mT @ w, torch.eye(7, dtype=F64).expand(2, -1, -1))
    lost = (flat - flat @ w @ w.mT).square().sum((1, 2))
    same(lost, torch.linalg.svdvals(flat)[:, 7:].square().sum(-1))


def test_exact_where_tokens_lie_in_r_dimensions_and_a_mean():
    q, _, _ = make_qkv(30)
    x = randn(2, 30, 4) @ randn(4, 3 * 13, seed=1) + randn(39, seed=2)
    k, v = x.unflatten(2, (3, 13)).transpose(1, 2).split([8, 5], 3)
    want = reference(q, k, v)
    close(mla_attention(q, k, v, rank=4), want, "four dimensions and a mean")
    close(mla_attention(q, k, v, rank=5, center=False), want, "five dimensions")
    assert (mla_attention(q, k, v, rank=4, center=False) - want).abs().max() > 1e-3


def test_a_vector_added_to_every_key_changes_nothing():
    q, k, v = make_qkv(30)
    moved = k + 10 * randn(1, 3, 1, 8)
    close(mla_attention(q, moved, v, rank=6), mla_attention(q, k, v, rank=6), "shifted keys")


def test_balance_makes_the_unit_of_keys_irrelevant():
    q, k, v = make_qkv(30)
    close(mla_attention(q / 50, 50 * k, v, rank=6), mla_attention(q, k, v, rank=6), "unit of keys")
    close(mla_attention(q, k, 50 * v, rank=6), 50 * mla_attention(q, k, v, rank=6), "of values")


def test_a_sample_of_nothing_is_balanced_by_one():
    q, k, v = make_qkv(10)
    for a, b in ((0 * k, v), (k, 0 * v), (0 * k, 0 * v)):
        tensors = MLA(rank=4).fit(q, a, b)
        assert (tensors["balance"] == 1).all()
        assert mla_attention(q, a, b, rank=4).isfinite().all()


def test_a_mask_of_ones_is_no_mask():
    """With it the engine runs, without it torch's fused kernel."""
    q, k, v = make_qkv(70, group=2)
    ones = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    tensors = MLA(rank=6).fit(q, k, v, **GQA)
    for is_causal in (False, True):
        call = {"is_causal": is_causal, **tensors, **GQA}
        out = mla_attention(q, k, v, rank=6, attn_mask=ones, **call)
        same(out, mla_attention(q, k, v, rank=6, **call))


def test_state_keeps_rank_numbers_of_a_token():
    q, k, v = make_qkv(20, group=2)
    for rank, kept in ((6, 6), (500, 39)):
        method = MLA(rank=rank)
        tensors = method.fit(q, k, v, **GQA)
        for dtype, itemsize in ((F64, 8), (torch.float32, 4), (torch.bfloat16, 2)):
            state = method.state(k.to(dtype), v.to(dtype), **tensors, **GQA)
            shape = Shape(2, 6, 3, 20, 20, 8, 5, itemsize=itemsize)
            assert state.nbytes == method.cost(shape).cache == 2 * 20 * kept * itemsize
            assert state.attend(q.to(dtype)).dtype is dtype
    empty = MLA(rank=6).state(k[:, :, :0], v[:, :, :0], **some_basis(), **GQA)
    assert not empty.attend(q).any()
    assert not state._tokens.tensor.requires_grad


def test_decoding_does_not_invert_the_basis_again(monkeypatch):
    q, k, v = make_qkv(5)
    state = MLA(rank=6).state(k, v, **some_basis())
    monkeypatch.setattr(torch.linalg, "pinv", None)
    state.append(k[:, :, :1], v[:, :, :1])
    assert state.attend(q).isfinite().all()


def test_module_is_calibrated_on_the_whole_batch():
    q, k, v = (t.float() for t in make_qkv(20, group=2))
    module = MLAAttention(num_heads=3, head_dim=8, rank=6)
    mask = padding_mask(torch.tensor([20, 11]))
    module.calibrate(q, k, v, attn_mask=mask, **GQA)
    one = [torch.cat([t[:1], t[1:, :, :11]], 2) for t in (k, v)]
    want = MLA(rank=6).fit(torch.cat([q[:1], q[1:, :, :11]], 2), *one, **GQA)
    assert set(dict(module.named_buffers())) == {"basis", "balance", "mean"}
    close(module.balance, want["balance"][0].float(), "balance")
    close(module.mean, want["mean"][0].float(), "mean")
    projector = [b.flatten(0, 1) @ b.flatten(0, 1).mT for b in (module.basis, want["basis"][0])]
    close(projector[0], projector[1].float(), "what the basis spans")
    out = module(q, k, v, is_causal=True, **GQA)
    other = MLAAttention(num_heads=3, head_dim=8, rank=6)
    other.calibrate(q, k, v[..., :2], **GQA)  # another width, which loading replaces
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, k, v, is_causal=True, **GQA), out)
    fresh = MLAAttention(num_heads=3, head_dim=8, rank=6)
    other.load_state_dict(fresh.state_dict())
    assert other.basis is None
    assert other.mean is None
    assert module.bfloat16()(*(t.bfloat16() for t in (q, k, v)), **GQA).isfinite().all()


def test_module_keeps_leading_coordinates_until_calibrated():
    q, k, v = make_qkv(12)
    for rank, keys, values in ((24, 8, 0), (30, 8, 2), (39, 8, 5)):
        module = MLAAttention(num_heads=3, head_dim=8, rank=rank)
        k2 = torch.where(torch.arange(8) < keys, k, 0.0)
        v2 = torch.where(torch.arange(5) < values, v, 0.0)
        for is_causal in (False, True):
            want = reference(q, k2, v2, is_causal=is_causal)
            same(module(q, k, v, is_causal=is_causal), want)
        same(module.state(k, v).attend(q), reference(q, k2, v2))


def test_operations_are_those_of_the_docstring():
    shape = Shape(2, 6, 3, 50, 70, 8, 5)
    r, width, rows = 10, 3 * 13, 2 * 6 * 50
    whole = 4 * rows * 70 * r + 2 * 2 * 70 * width * r + 2 * rows * r * 13
    fitted = 2 * 2 * 70 * width**2 + 2 * 4 * width * r * r
    assert MLA(rank=r).cost(shape).flops == whole + fitted
    assert MLA(rank=r).cost(shape).units == 8
    assert MLA(rank=3).cost(shape).units == 3


def test_refusals_of_the_method():
    q, k, v = make_qkv(9)
    for options in ({"rank": 0}, {"rank": 2.0}, {"rank": True}, {"center": 1}):
        with pytest.raises(ValueError, match=r"mla: (rank|center)"):
            mla_attention(q, k, v, **options)
    good = some_basis()
    for drop in ("basis", "balance"):
        some = {n: t for n, t in good.items() if n != drop}
        with pytest.raises(ValueError, match="pass basis and balance together"):
            mla_attention(q, k, v, rank=6, **some)
    with pytest.raises(ValueError, match="mean is for center=True"):
        mla_attention(q, k, v, rank=6, center=False, **good)
    with pytest.raises(ValueError, match="1 to 5 columns; got 6"):
        mla_attention(q, k, v, rank=5, **good)
    for name in good:
        with pytest.raises(ValueError, match=rf"{name} must have shape \(3"):
            mla_attention(q, k, v, rank=6, **{**good, name: good[name][:2]})
    with pytest.raises(Unsupported, match="let the future in"):
        mla_attention(q, k, v, rank=6, is_causal=True)
    with pytest.raises(Unsupported, match="decoding needs a basis"):
        MLA(rank=6).state(k, v)
    with pytest.raises(TypeError, match="no tensor named key_basis"):
        MLA(rank=6).state(k, v, key_basis=k)
    with pytest.raises(ValueError, match="fit needs value"):
        MLA(rank=6).fit(q, k)


def test_bound_of_the_docstring():
    """Total variation of a row is at most tanh of a quarter of the spread of its logit errors."""
    q, k, _ = make_qkv(25)
    eye = torch.eye(25, dtype=F64).expand(2, 3, -1, -1)
    for rank in (4, 12, 20):
        basis = MLA(rank=rank).fit(q, k, torch.zeros(2, 3, 25, 5, dtype=F64))
        k2, _ = compressed(k, torch.zeros(2, 3, 25, 5, dtype=F64), **basis)
        u = 8**-0.5 * torch.einsum("bhid,bhjd->bhij", q, k2 - k)
        moved = (reference(q, k2, eye) - reference(q, k, eye)).abs().sum(-1) / 2
        spread = u.amax(-1) - u.amin(-1)
        assert (moved <= torch.tanh(spread / 4) + 1e-12).all()
