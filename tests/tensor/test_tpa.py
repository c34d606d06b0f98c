"""Tensor product attention: the layer against loops and its special cases, the method likewise."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numattn import Unsupported, padding_mask, testing
from numattn.core.cost import Shape, count_flops
from numattn.core.layer import ModelShape
from numattn.core.rotary import Rotary, Yarn
from numattn.engines import softmax
from numattn.engines.latent import Factors
from numattn.latent import GroupedQueryAttention
from numattn.tensor.tpa import TPA, TensorProductAttention, _expanded, _factored, tpa_attention
from numattn.testing import check_layer, make_qkv, reference
from numattn.testing.checks import close

F64 = torch.float64
GQA = {"enable_gqa": True}
LAYERS = {
    "plain": {"query_rank": 3},
    "widths": {"query_rank": 3, "key_rank": 3, "value_rank": 5, "value_dim": 5, "bias": True},
    "one product": {"query_rank": 1, "key_rank": 1, "value_rank": 1},
    "dense queries": {"query_rank": None, "bias": True},
    "no rotation": {"rotary": None, "scale": 0.9},
    "yarn": {"rotary": Rotary(6, interleaved=True, yarn=Yarn(4.0, 8, mscale_all_dim=0.7))},
    "shared heads": {"query_rank": 3, "shared_heads": True, "bias": True},
    "shared heads, dense queries": {"query_rank": None, "shared_heads": True, "value_dim": 5},
    "shared features": {"shared_features": True, "rotary": None, "value_rank": 3, "value_dim": 5},
    "shared features, dense queries": {
        "query_rank": None,
        "shared_features": True,
        "rotary": None,
    },
}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def make(embed_dim=16, num_heads=4, *, head_dim=6, seed=1, **options):
    """A layer in float64 whose weights depend on the seed only."""
    layer = TensorProductAttention(embed_dim, num_heads, head_dim=head_dim, **options).double()
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = 0.5 * randn(*parameter.shape, seed=seed + i)
    return layer


def same(ours, theirs, tolerance=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def part(factor, token, rank, r):
    """The r-th of the factors of a token, which may be a parameter."""
    if isinstance(factor, torch.nn.Parameter):
        return factor[r]
    return factor(token).reshape(rank, -1)[r]


def turned(b, place, layer):
    return b if layer.rotary is None else layer.rotary(b[None], torch.tensor([place]))[0]


def vectors(projection, token, place, layer, count):
    """The mean over ranks of the outer products of both factors, (H, width)."""
    if isinstance(projection, torch.nn.Linear):
        return torch.stack([turned(b, place, layer) for b in projection(token).reshape(count, -1)])
    total = 0.0
    for r in range(projection.rank):
        a = part(projection.heads, token, projection.rank, r)
        b = part(projection.features, token, projection.rank, r)
        total = total + torch.outer(a, b if place is None else turned(b, place, layer))
    return total / projection.rank


def one_sequence(layer, x, is_causal):
    """The definition, token by token and head by head, on one sequence without padding."""
    count = layer.num_heads
    q, k = (
        [vectors(p, token, t, layer, count) for t, token in enumerate(x)]
        for p in (layer.q_proj, layer.k_proj)
    )
    v = [vectors(layer.v_proj, token, None, layer, count) for token in x]
    outs = []
    for t in range(len(x)):
        seen, parts = t + 1 if is_causal else len(x), []
        for h in range(count):
            logits = torch.stack([q[t][h] @ k[j][h] for j in range(seen)])
            weights = (layer.scale * logits).softmax(0)
            parts.append(sum(w * v[j][h] for j, w in enumerate(weights)))
        outs.append(layer.o_proj(torch.cat(parts)))
    return torch.stack(outs)


# --- the layer ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_it_keeps_the_promises_of_a_layer(name):
    check_layer(TensorProductAttention(24, 4, head_dim=6, **LAYERS[name]))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_the_layer_is_its_definition(name, is_causal):
    layer, x = make(**LAYERS[name]), randn(2, 7, 16)
    mask = padding_mask(torch.tensor([7, 4]), side="left")
    for factored in (False, True):
        out = layer(x, attn_mask=mask, is_causal=is_causal, factored=factored)
        same(out[0], one_sequence(layer, x[0], is_causal))
        same(out[1, 3:], one_sequence(layer, x[1, 3:], is_causal))


def test_gradients_are_those_of_the_definition():
    """Of every parameter, shared factors too."""
    for name in ("widths", "shared heads", "shared features"):
        layer, x = make(**LAYERS[name]), randn(1, 5, 16).requires_grad_()
        weight, found = randn(5, 16, seed=3), []
        for call in (
            lambda f=layer, x=x: f(x, factored=False)[0],
            lambda f=layer, x=x: f(x, factored=True)[0],
            lambda f=layer, x=x: one_sequence(f, x[0], True),
        ):
            leaves = [x, *layer.parameters()]
            found.append(torch.autograd.grad((call() * weight).sum(), leaves))
        for ours in found[:2]:
            for a, b in zip(ours, found[2], strict=True):
                same(a, b, 1e-10)


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_factored_is_expanded_after_other_tokens(name, new):
    layer, x = make(**LAYERS[name]), randn(2, 11 + new, 16)
    outs = []
    for factored in (True, False, None):
        state = layer.state(2)
        layer(x[:, :11], state=state, factored=factored)
        outs.append(layer(x[:, 11:], state=state, factored=factored))
    same(outs[0], outs[1])
    assert torch.equal(outs[2], outs[0])  # with earlier tokens it is factored by default
    same(outs[0], layer(x)[:, 11:])


@pytest.mark.parametrize("name", ["widths", "shared heads", "shared features"])
@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_forms_agree_over_several_tiles_and_with_padding(name, is_causal):
    layer, x = make(**LAYERS[name]), randn(2, 300, 16)
    mask = padding_mask(torch.tensor([170, 300]), side="left")
    a, b = (layer(x, attn_mask=mask, is_causal=is_causal, factored=f) for f in (True, False))
    same(a[mask[:, 0, 0]], b[mask[:, 0, 0]], 1e-11)


@torch.no_grad()
def test_a_whole_sequence_is_served_by_torchs_kernel(monkeypatch):
    """Whatever strides the vectors have that are formed from shared factors."""
    monkeypatch.setattr(softmax, "softmax_partial", None)
    for options in ({}, {"shared_heads": True}, {"shared_features": True, "rotary": None}):
        layer = make(**options)
        with Operations() as seen:
            layer(randn(1, 9, 16))
        assert any("flash_attention" in name for name in seen.names)


@torch.no_grad()
def test_to_rotate_feature_factors_is_to_rotate_keys():
    layer, x = make(key_rank=3), randn(1, 9, 16)
    plain = make(key_rank=3, rotary=None)
    states = layer.state(), plain.state()
    layer(x, state=states[0])
    plain(x, state=states[1])
    rotated, formed = (
        torch.einsum("brnh,brnd->bhnd", s["key_heads"], s["key_features"]) for s in states
    )
    same(rotated, layer.rotary(formed, torch.arange(9)))
    assert (rotated - formed).abs().max() > 0.1


def test_vectors_have_the_variance_of_an_ordinary_projection():
    """1/3 for hidden states of variance 1, whatever the rank and the number of heads."""
    x = randn(1, 4000, 64).float()
    for count, options in ((2, {}), (16, {}), (16, {"shared_heads": True})):
        for rank in (1, 4, 32):
            found = []
            for seed in range(4):
                torch.manual_seed(seed)
                layer = TensorProductAttention(64, count, head_dim=32, key_rank=rank, **options)
                with torch.no_grad():
                    found.append(layer.k_proj(x).expand().square().mean())
            # A shared factor is few numbers, and its mean square varies with the draw.
            assert 1 / 6 < sum(found) / len(found) < 2 / 3, f"{count} heads, {options}, {rank}"


# --- special cases --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"value_dim": 5, "bias": True}, {"rotary": None}])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@torch.no_grad()
def test_multi_head_grouped_and_multi_query_attention_are_special_cases(kv_heads, options):
    theirs = GroupedQueryAttention(16, 6, kv_heads=kv_heads, head_dim=8, **options).double()
    ours = TensorProductAttention.from_grouped(theirs)
    x = randn(2, 12, 16)
    for factored in (False, True):
        same(ours(x, factored=factored), theirs(x))
        same(ours(x, is_causal=False, factored=factored), theirs(x, is_causal=False))
    states = ours.state(2), theirs.state(2)
    for piece in x.split([6, 1, 1, 4], 1):
        same(ours(piece, state=states[0]), theirs(piece, state=states[1]))
    assert states[0].nbytes == states[1].nbytes
    assert ours.cost(2, 12).units == theirs.cost(2, 12).units


@torch.no_grad()
def test_a_layer_with_some_biases_is_taken_over():
    theirs = GroupedQueryAttention(16, 4, kv_heads=2, head_dim=8, bias=True).double()
    theirs.o_proj.bias = theirs.k_proj.bias = None
    x = randn(1, 7, 16)
    same(TensorProductAttention.from_grouped(theirs)(x), theirs(x))


@torch.no_grad()
def test_head_factors_that_differ_from_token_to_token_can_be_shared_ones():
    """Contextual factors with a weight of zero and a bias are the shared ones."""
    shared = make(shared_heads=True, bias=True)
    layer = make(bias=True)
    for ours, theirs in (
        (layer.q_proj, shared.q_proj),
        (layer.k_proj, shared.k_proj),
        (layer.v_proj, shared.v_proj),
    ):
        ours.heads.weight.zero_()
        ours.heads.bias.copy_(theirs.heads.flatten())
        ours.features.load_state_dict(theirs.features.state_dict())
    layer.o_proj.load_state_dict(shared.o_proj.state_dict())
    x = randn(2, 9, 16)
    same(layer(x), shared(x))


# --- what it keeps and costs ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({}, (2 + 2) * (4 + 6)),
        ({"key_rank": 3, "value_rank": 1, "value_dim": 5}, 3 * (4 + 6) + 1 * (4 + 5)),
        ({"shared_heads": True}, (2 + 2) * 6),
        ({"shared_features": True, "rotary": None, "key_rank": 3}, (3 + 2) * 4),
    ],
)
@torch.no_grad()
def test_a_token_leaves_its_factors(options, units):
    layer = make(**options)
    state = layer.state(2)
    layer(randn(2, 9, 16), state=state)
    assert state.nbytes == 2 * 9 * units * 8
    assert layer.cost(2, 9).units == units
    assert state.length == 9


def test_the_cache_of_llama_3_8b():
    """(R_K + R_V) (H + D) numbers of H = 32 heads of D = 128, with R = 2, and without the heads."""
    shape = ModelShape(4096, 32, 8, 128, 128, 128, 64, 512, 256)
    with torch.device("meta"):
        layers = TensorProductAttention.of_model(shape)
    units = {name: layer.cost(1, 1).units for name, layer in layers.items()}
    assert units == {"TPA": 4 * (32 + 128), "TPA, shared heads": 4 * 128}
    assert all(layer.state()["key_features"].is_meta for layer in layers.values())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_cost_counts_every_operation(name, factored, is_causal):
    layer, call = make(**LAYERS[name]), {"is_causal": is_causal, "factored": factored}
    for length in (33, 300):  # 300: two tiles of rows
        counted = count_flops(lambda n=length: layer(randn(2, n, 16), **call))
        assert abs(layer.cost(2, length, **call).flops - counted) <= 0.02 * factored * counted


class Operations(TorchDispatchMode):
    """Names of operations, and elements of the largest tensor that any of them makes."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if not func.is_view:
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("options", [{}, {"query_rank": None}, {"shared_heads": True}])
@torch.no_grad()
def test_decoding_never_forms_keys_or_values(options):
    length, count, width = 3000, 16, 32
    layer = make(16, count, head_dim=width, **{"query_rank": 2, **options})
    state = layer.state()
    for name, (rank, size) in layer._kept().items():
        state.append(**{name: randn(1, rank, length, size)})
    layer(randn(1, 1, 16), state=state)  # the buffer grows, with room for more
    largest = {}
    for factored in (None, False):
        with Operations() as seen:
            layer(randn(1, 1, 16), state=state, factored=factored)
        largest[factored] = seen.largest
    of_keys = length * count * width
    assert largest[None] < of_keys / 2 < of_keys <= largest[False]


@pytest.mark.parametrize("factored", [False, True])
@torch.no_grad()
def test_half_precision_sums_in_single(factored):
    """Ten thousand equal weights: a sum in bfloat16 would stop at 256."""
    layer = make(16, 4, rotary=None, query_rank=None)
    layer.q_proj.weight.zero_()
    low = make(16, 4, rotary=None, query_rank=None).bfloat16()
    low.load_state_dict(layer.state_dict())
    state, sizes = low.state(), {"key_heads": 4, "key_features": 6, "value_heads": 4}
    for seed, (name, width) in enumerate({**sizes, "value_features": 6}.items()):
        state.append(**{name: (randn(1, 2, 9999, width, seed=seed) + 1).bfloat16()})
    out = low(randn(1, 1, 16).bfloat16(), state=state, factored=factored)
    assert out.dtype is torch.bfloat16
    a, b = (state[name].double() for name in ("value_heads", "value_features"))
    v = torch.einsum("brnh,brnd->bhnd", a, b)
    want = layer.o_proj(v.mean(2).flatten(1))[:, None]
    assert (out.double() - want).abs().max() <= 3e-2 * want.abs().max()


@pytest.mark.parametrize("form", [_factored, _expanded])
def test_large_logits_of_half_precision_factors_are_not_rounded(form):
    """Logits near 100 are half a unit apart in bfloat16, which would be errors of a quarter."""
    k, v = (
        Factors(randn(1, 1, 50, 2, seed=s).sign(), randn(1, 1, 50, 6, seed=s + 1)) for s in (1, 3)
    )
    q = Factors(None, 10 * randn(1, 2, 3, 6))
    q, k, v = (f.to(torch.bfloat16) for f in (q, k, v))
    want = reference(*(f.to(F64).expand() for f in (q, k, v)), scale=3.0)
    out = form(q, k, v, 3.0, None, False)
    assert out.dtype is torch.bfloat16
    close(out, want, "half precision", 0.2)


@torch.no_grad()
def test_a_state_is_always_causal_and_no_token_leaves_nothing():
    layer, x = make(), randn(2, 9, 16)
    assert torch.equal(layer(x, state=layer.state(2), is_causal=False), layer(x))
    state = layer.state(2)
    assert layer(randn(2, 0, 16), state=state).shape == (2, 0, 16)
    assert (state.length, state.nbytes) == (0, 0)


class _OtherState:
    length = 0


def test_messages_name_what_is_wrong():
    for options, words in (
        ({"key_rank": 0}, "TensorProductAttention: key_rank"),
        ({"value_rank": -1}, "value_rank"),
        ({"query_rank": 0}, "query_rank"),
        ({"head_dim": 0, "rotary": None}, "head_dim"),
        ({"value_dim": 0}, "value_dim"),
        ({"rotary": Rotary(4)}, "rotary turns 4 coordinates, head_dim is 6"),
        ({"shared_heads": True, "shared_features": True, "rotary": None}, "choose one"),
        ({"shared_features": True}, "pass rotary=None"),
        ({"shared_features": True, "rotary": Rotary(6)}, "pass rotary=None"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**options)
    layer, x = make(), randn(2, 3, 16)
    with pytest.raises(TypeError, match=r"TensorProductAttention.state"):
        layer(x, state=_OtherState())
    with pytest.raises(ValueError, match=r"holds 1 sequences, hidden has 2"):
        layer(x, state=layer.state())


# --- the method -----------------------------------------------------------------------------


def nearest(x, rank):
    """Every token's matrix over heads and features, truncated by torch's own decomposition."""
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[2]):
            u, s, vh = torch.linalg.svd(x[b, :, t], full_matrices=False)
            out[b, :, t] = u[:, :rank] @ s[:rank].diag() @ vh[:rank]
    return out


def qkv(length=9, heads=5, group=1, **shape):
    return make_qkv(length, heads=heads, group=group, **shape)


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 99])
@pytest.mark.parametrize("heads", [1, 4, 7, 11])  # fewer than features, between D and E, more
def test_it_is_attention_to_the_nearest_keys_and_values(rank, heads):
    q, k, v = qkv(heads=heads, group=2)
    mask = padding_mask(torch.tensor([9, 6]), side="left")
    for call in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.7}):
        want = reference(q, nearest(k, rank), nearest(v, rank), **call)
        out = tpa_attention(q, k, v, rank=rank, **call, **GQA)
        rows = slice(None) if "attn_mask" not in call else slice(3, None)
        close(out[:, :, rows], want[:, :, rows], f"rank {rank}", 1e-2)


def test_the_error_of_a_token_is_the_tail_of_its_singular_values():
    """One query on the token alone gives its values back, as they are kept."""
    v = randn(6, 7, 1, 5)
    q = k = randn(6, 7, 1, 8, seed=1)
    for rank in range(1, 6):
        lost = (tpa_attention(q, k, v, rank=rank) - v).square().sum((1, 2, 3))
        tail = torch.linalg.svdvals(v[:, :, 0])[:, rank:].square().sum(-1)
        same(lost, tail)


@pytest.mark.parametrize("name", testing.checks_for(TPA(rank=1)))
def test_the_contract_holds_below_full_rank(name):
    """The suite's budgets, 8 and 256, are both exact for the few heads of its inputs."""
    testing.run(name, TPA(rank=1))


@pytest.mark.parametrize("heads", [3, 6])  # by rows, and by columns
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_are_those_of_the_truncation(heads, rank):
    q, k, v = qkv(3, heads=heads, batch=1, head_dim=4, value_dim=4)
    inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: tpa_attention(*x, rank=rank), inputs)


def test_equal_singular_values_on_one_side_of_the_cut_do_no_harm():
    """The derivative of torch's own decomposition is not finite there, that of the product is."""
    u, w = (torch.linalg.qr(randn(4, 4, seed=s)).Q for s in (1, 2))
    k = (u @ torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=F64).diag() @ w)[None, :, None]
    q = randn(1, 4, 1, 4, seed=3)

    def call(v):
        return tpa_attention(q, v, v, rank=2)

    assert torch.autograd.gradcheck(call, k.clone().requires_grad_())


def test_a_tie_at_the_cut_has_a_gradient_of_the_other_terms():
    """The derivative of a truncation has norm max s_i / (s_i - s_j) over other pairs, here 3."""
    tie = torch.tensor([3.0, 2.0, 2.0, 1.0], dtype=F64).diag()[None, :, None]
    weight = randn(1, 4, 1, 4)
    for tokens in (tie, 0 * tie, tie * torch.tensor([1.0, 0, 0, 0], dtype=F64)):
        leaf = tokens.clone().requires_grad_()
        (tpa_attention(tie, tie, leaf, rank=2) * weight).sum().backward()
        assert leaf.grad.norm() <= 3 * weight.norm()


def test_a_rotation_of_keys_moves_nothing():
    """Truncation and rotation commute, so it does not matter which comes first."""
    q, k, v = qkv()
    rotary, place = Rotary(8), torch.arange(9)
    want = reference(rotary(q, place), rotary(nearest(k, 2), place), nearest(v, 2))
    close(tpa_attention(rotary(q, place), rotary(k, place), v, rank=2), want, "rotated", 1e-2)


def test_logits_are_off_by_no_more_than_the_bound_of_the_docstring():
    q, k, _ = qkv(30)
    for rank in (1, 2, 3, 4):
        off = (q @ (nearest(k, rank) - k).mT).abs()
        first = torch.linalg.svdvals(k.transpose(1, 2))[..., rank]  # (B, N)
        bound = q.norm(dim=-1)[..., None] * first[:, None, None]
        assert (off <= bound + 1e-12).all()
        weights, exact = ((q @ x.mT).softmax(-1) for x in (nearest(k, rank), k))
        error = q @ (nearest(k, rank) - k).mT
        spread = error.amax(-1) - error.amin(-1)
        assert ((weights - exact).abs().sum(-1) / 2 <= (spread / 4).tanh() + 1e-12).all()


@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("rank", [1, 3, 4, 6, 50])
def test_decoding_keeps_factors_and_agrees(rank, heads):
    """At full rank keys or values are kept as they are."""
    q, k, v = qkv(12, heads=heads, group=2)
    kept = sum(
        heads * width if rank >= min(heads, width) else rank * (heads + width) for width in (8, 5)
    )
    method, call = TPA(rank=rank), {"scale": 0.7, **GQA}
    want = method(q, k, v, is_causal=True, **call)
    state = method.state(k[:, :, :5], v[:, :, :5], **call)
    for t in range(5, 12):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        close(state.attend(q[:, :, t : t + 1]), want[:, :, t : t + 1], f"step {t}", 1e-2)
    cost = method.cost(Shape(2, 2 * heads, heads, 12, 12, 8, 5, itemsize=8))
    assert state.nbytes == cost.cache == 2 * 12 * kept * 8
    low = method.state(k.bfloat16(), v.bfloat16(), **call)
    assert low.nbytes == 2 * 12 * kept * 2
    close(low.attend(q[:, :, 11:].bfloat16()), want[:, :, 11:], "factors in half precision")


def test_a_state_follows_no_gradient_and_leaves_its_tokens_alone():
    q, k, v = (x.requires_grad_() for x in qkv(4))
    for rank in (2, 9):
        state = TPA(rank=rank).state(k, v)
        before = k.detach().clone()
        state.append(k, v)
        assert not state.attend(q).requires_grad
        assert torch.equal(k, before)


@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("rank", [1, 3])
def test_operations_are_counted(rank, heads):
    q, k, v = qkv(40, heads=heads, value_dim=8)
    for is_causal in (False, True):
        said = TPA(rank=rank).cost(Shape(2, heads, heads, 40, 40, 8, 8, is_causal=is_causal)).flops
        counted = count_flops(lambda c=is_causal: tpa_attention(q, k, v, rank=rank, is_causal=c))
        assert said == counted


def test_what_it_refuses():
    q, k, v = qkv(6)
    with pytest.raises(ValueError, match="tpa: rank"):
        tpa_attention(q, k, v, rank=0)
    with pytest.raises(Unsupported, match="tpa"):
        tpa_attention(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match="tpa takes no tensor named basis"):
        TPA().state(k, v, basis=k)
