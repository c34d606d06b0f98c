"""What is true of the conversion of attention layers to latent attention."""

import copy
import math

import pytest
import torch
from torch import nn

from numattn import Unsupported
from numattn.core.rotary import Rotary, Yarn
from numattn.latent.convert import (
    LatentSelfAttention,
    conversion_error,
    source_layer,
    to_mla,
    to_mla_model,
)
from numattn.latent.grouped import GroupedQueryAttention
from numattn.testing.layers import check_layer

EMBED = 48


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden_states(*shape, seed=100):
    """Correlated entries of decaying size, as trained layers see them."""
    size = torch.arange(1, EMBED + 1, dtype=torch.float64) ** -0.7
    mix = torch.linalg.qr(draw(EMBED, EMBED, seed=99))[0]
    return 2 * (draw(*shape, EMBED, seed=seed) * size) @ mix


def trained(kv_heads=3, group=2, head_dim=8, seed=0, **options):
    """A layer in float64 whose weights have decaying singular values and heads that are alike."""
    layer = GroupedQueryAttention(
        EMBED, kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, **options
    ).double()
    common = draw(head_dim, EMBED, seed=seed)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(layer.named_parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed + i + 1) / 4)
            if name == "k_proj.weight":
                parameter += common.repeat(kv_heads, 1) / 4
            if name.endswith("weight"):
                u, s, v = torch.linalg.svd(parameter, full_matrices=False)
                s *= torch.arange(1, len(s) + 1, dtype=torch.float64) ** -0.5
                parameter.copy_(u * s @ v)
    return layer


def convert(layer, *, rank=1000, rope_rank=None, calibration=None, **options):
    rope_rank = layer.kv_heads * layer.head_dim if rope_rank is None else rope_rank
    calibration = hidden_states(2, 40) if calibration is None else calibration
    return to_mla(layer, rank=rank, rope_rank=rope_rank, calibration=calibration, **options)


def same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


YARN = Yarn(4.0, 16, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.5)

LAYERS = {
    "grouped": {},
    "multi-head": {"kv_heads": 4, "group": 1},
    "multi-query": {"kv_heads": 1, "group": 4},
    "interleaved": {"rotary": Rotary(8, 50.0, interleaved=True)},
    "yarn": {"rotary": Rotary(8, yarn=YARN)},
    "bias": {"bias": True},
    "value_dim": {"value_dim": 5, "scale": 0.7},
}


@pytest.mark.parametrize("method", ["transmla", "mha2mla"])
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_lost_without_truncation(name, method):
    layer = trained(**LAYERS[name])
    found = convert(layer, rank=layer.kv_heads * layer.value_dim, method=method)
    new, x = found.layer, hidden_states(2, 23, seed=7)
    with torch.no_grad():
        for is_causal in (True, False):
            same(new(x, is_causal=is_causal), layer(x, is_causal=is_causal))
        states = new.state(2), layer.state(2)
        for piece in x.split([5, 1, 1, 9, 1, 6], 1):
            same(new(piece, state=states[0]), layer(piece, state=states[1]))
        mask = torch.ones(2, 1, 1, 23, dtype=torch.bool)
        mask[0, ..., :4] = False
        same(new(x, attn_mask=mask)[:, 4:], layer(x, attn_mask=mask)[:, 4:])
    error = conversion_error(layer, new, x)
    assert max(error.output, error.logits, error.total_variation) < 1e-10
    assert found.rope_energy == pytest.approx(1)
    assert max(found.key_error, found.value_error) < 1e-6  # of squares that cancel


@pytest.mark.parametrize("joint", [True, False])
def test_nothing_is_lost_without_positions(joint):
    layer = trained(rotary=None)
    new = convert(layer, rank=48, rope_rank=0, joint=joint).layer
    x = hidden_states(2, 23, seed=7)
    same(new(x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
def test_a_latent_of_the_queries(bias):
    layer = trained(bias=bias)
    x = hidden_states(2, 23, seed=7)
    found = convert(layer, query_rank=48 + bias)
    same(found.layer(x), layer(x))
    errors = [convert(layer, query_rank=r).query_error for r in (4, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0
    assert convert(layer, query_rank=4).layer.q_a_proj.weight.shape == (4, EMBED)


@pytest.mark.parametrize("method", ["transmla", "mha2mla"])
def test_hidden_states_of_few_dimensions_need_as_many(method):
    layer = trained()
    plane = draw(6, EMBED, seed=3)
    x, other = draw(2, 30, 6, seed=4) @ plane, draw(2, 30, 6, seed=5) @ plane
    whole = convert(layer, rope_rank=8, calibration=x, method=method, damping=0.0)
    small = convert(layer, rope_rank=8, rank=6, calibration=x, method=method, damping=0.0)
    assert small.layer.kv_rank == 6
    same(small.layer(other), whole.layer(other), 1e-7)
    less = convert(layer, rope_rank=8, rank=5, calibration=x, method=method, damping=0.0)
    assert (less.layer(other) - whole.layer(other)).abs().max() > 1e-3


def complex_pairs(layer, projection, x):
    """What a projection gives, as complex numbers (N, heads, P)."""
    y = projection(x).unflatten(-1, (-1, layer.head_dim))
    if layer.rotary.interleaved:
        return torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
    return torch.complex(*y.chunk(2, -1))


def principal_axes(k):
    """Of complex keys (N, heads): rows of an orthogonal matrix, the first of the most energy."""
    gram = (k.mH @ k).real
    return torch.linalg.eigh(gram)[1].flip(-1).mT, torch.linalg.eigvalsh(gram).flip(-1)


def logits_from_the_definition(layer, x, calibration, rope_rank, fold):
    """TransMLA's logits (H, N, N) without a limit on the rank, pair by pair.

    The first `rope_rank / 2` principal components, folds in turn, keep their rotation.
    """
    q = complex_pairs(layer, layer.q_proj, x)
    k, sample = (complex_pairs(layer, layer.k_proj, t) for t in (x, calibration.flatten(0, 1)))
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    folds, group = layer.head_dim // 2 // fold, layer.num_heads // layer.kv_heads
    out = torch.zeros(layer.num_heads, len(x), len(x), dtype=torch.float64)
    for f in range(folds):
        pairs = slice(f * fold, (f + 1) * fold)
        axes, _ = principal_axes(sample[:, :, pairs].flatten(1))
        theta = layer.rotary.frequencies()[pairs].log().mean().exp()
        for c, axis in enumerate(axes):
            weights = axis.unflatten(0, (layer.kv_heads, fold))
            key = (weights * k[:, :, pairs]).sum((1, 2))  # (N,)
            kept = c * folds + f < rope_rank // 2
            turn = torch.polar(torch.ones(()).double(), -theta * distance * kept)
            for h in range(layer.num_heads):
                query = (weights[h // group] * q[:, h, pairs]).sum(1)
                out[h] += (query.conj()[:, None] * key * turn).real
    return layer.scale * out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("fold", "rope_rank"), [(1, 8), (1, 16), (2, 4), (2, 8), (4, 6), (1, 0)])
def test_transmla_is_what_it_is_defined_as(fold, rope_rank, interleaved):
    layer = trained(rotary=Rotary(8, 30.0, interleaved=interleaved))
    with torch.no_grad():
        layer.k_proj.weight[::4] *= 10  # a second component larger than the first of other pairs
    calibration, x = hidden_states(2, 40), hidden_states(15, seed=7)
    options = {"fold": fold, "rope_rank": rope_rank, "damping": 0.0}
    new = convert(layer, calibration=calibration, **options).layer
    with torch.no_grad():
        logits = logits_from_the_definition(layer, x, calibration, rope_rank, fold)
        seen = torch.ones(15, 15, dtype=torch.bool).tril()
        p = logits.masked_fill(~seen, -math.inf).softmax(-1)
        v = layer.v_proj(x).unflatten(-1, (layer.kv_heads, -1)).repeat_interleave(2, 1)
        want = layer.o_proj(torch.einsum("hij,jhe->ihe", p, v).flatten(1))
        same(new(x[None])[0], want)


def test_the_first_components_hold_the_most_energy():
    layer, x = trained().requires_grad_(False), hidden_states(2, 40)
    k = complex_pairs(layer, layer.k_proj, x.flatten(0, 1))
    most = sum(float(principal_axes(k[:, :, p])[1][0]) for p in range(4))
    total = float(k.abs().square().sum())
    found = convert(layer, rope_rank=8, calibration=x, damping=0.0)
    assert found.rope_energy == pytest.approx(most / total)
    for select in ("high", "low", "uniform", "2-norm", "turned"):
        plain = convert(layer, rope_rank=8, calibration=x, method="mha2mla", select=select)
        assert plain.rope_energy <= found.rope_energy


def test_more_rotation_keeps_more_energy_and_folds_keep_more():
    layer = trained()
    shares = [
        [convert(layer, rope_rank=r, fold=f).rope_energy for r in (4, 8, 16, 24)] for f in (1, 2, 4)
    ]
    for row in shares:
        assert row == sorted(row)
    # Two components of a fold of two hold at least what one of each frequency does.
    columns = [row[1] for row in shares]
    assert columns == sorted(columns)


def test_equal_frequencies_may_be_folded():
    layer = trained(rotary=Rotary(8, radians=(0.7, 0.7, 0.2, 0.2)))
    x = hidden_states(2, 23, seed=7)
    same(convert(layer, fold=2).layer(x), layer(x))
    assert conversion_error(layer, convert(layer, fold=4).layer, x).output > 1e-3


def test_slow_pairs_may_go_unturned():
    fast, slow = 1.0, 1e-12
    layer = trained(rotary=Rotary(8, radians=(fast, slow, fast, slow)))
    x = hidden_states(2, 23, seed=7)
    for method in ("transmla", "mha2mla"):
        new = convert(layer, rope_rank=12, method=method, select="turned").layer
        same(new(x), layer(x), 1e-8)
        assert set(new.rotary.radians) == {fast}
        new = convert(layer, rope_rank=12, method=method, select="low").layer
        assert conversion_error(layer, new, x).output > 1e-2


@pytest.mark.parametrize(
    ("select", "rope_rank", "kept"),
    [
        ("high", 12, [0, 0, 0, 1, 1, 1]),
        ("low", 12, [2, 2, 2, 3, 3, 3]),
        ("uniform", 12, [0, 0, 0, 2, 2, 2]),
        ("high", 8, [0, 0, 0, 1]),
    ],
)
def test_pairs_by_frequency(select, rope_rank, kept):
    layer = trained()
    new = convert(layer, rope_rank=rope_rank, method="mha2mla", select=select).layer
    want = layer.rotary.frequencies()[torch.tensor(kept)].tolist()
    assert sorted(new.rotary.radians) == sorted(want)


def test_pairs_by_norm_are_those_that_logits_need():
    layer = trained(kv_heads=2, group=2)
    with torch.no_grad():
        q = layer.q_proj.weight.unflatten(0, (4, 2, 4))  # head, half, pair
        k = layer.k_proj.weight.unflatten(0, (2, 2, 4))
        q[:2, :, 1:], k[1, :, :3] = 0, 0  # of head 0 pair 0 is used, of head 1 pair 3
    x = hidden_states(2, 23, seed=7)
    new = convert(layer, rope_rank=4, method="mha2mla", select="2-norm").layer
    same(new(x), layer(x))
    radians = layer.rotary.frequencies()
    assert new.rotary.radians == (float(radians[0]), float(radians[3]))


def rotation_worth(layer, x, length):
    """Mean square of what logits lose by each pair (Hk, P), over all causal pairs of tokens."""
    q, k = (complex_pairs(layer, p, x).abs().square() for p in (layer.q_proj, layer.k_proj))
    distance = torch.tensor([float(i - j) for i in range(length) for j in range(i + 1)])
    turned = torch.exp(1j * layer.rotary.frequencies()[:, None] * distance.double())
    queries = q.mean(0).unflatten(0, (layer.kv_heads, -1)).sum(1)
    return queries * k.mean(0) * (turned - 1).abs().square().mean(1)


def test_pairs_by_what_their_rotation_is_worth():
    layer, sample = trained().requires_grad_(False), hidden_states(2, 40)
    options = {"calibration": sample, "method": "mha2mla", "select": "turned"}
    worth = rotation_worth(layer, sample.flatten(0, 1), 40)
    order = worth.flatten().argsort(descending=True) % 4
    for count in range(1, 12):
        new = convert(layer, rope_rank=2 * count, **options).layer
        want = layer.rotary.frequencies()[order[:count]]
        assert sorted(new.rotary.radians) == sorted(want.tolist())


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_distances_are_those_of_causal_pairs(ratio):
    """Of a slow pair the mean square turn is N^2 / 6, and N^2 / 3 if distances were even."""
    layer = trained(kv_heads=1, head_dim=4, rotary=Rotary(4, radians=(1.0, 0.001)))
    sample = hidden_states(2, 40)
    with torch.no_grad():
        fast, slow = rotation_worth(layer, sample.flatten(0, 1), 40)[0].tolist()
        layer.k_proj.weight[1::2] *= math.sqrt(ratio * fast / slow)
    options = {"calibration": sample, "method": "mha2mla", "select": "turned"}
    new = convert(layer, rope_rank=2, **options).layer
    assert new.rotary.radians == ((1.0,) if ratio < 1 else (0.001,))


def test_queries_carry_no_pair_that_meets_nothing():
    layer = trained()
    for rope_rank, left in ((0, 8), (12, 4), (18, 2), (24, 2)):  # a head has to have some width
        new = convert(layer, rope_rank=rope_rank, method="mha2mla", select="uniform").layer
        assert new.head_dim == left


def implied_weights(layer, new):
    """[W_K; W_V] of every head through the latent, for layers that rotate nothing."""
    down = new.kv_a_proj_with_mqa.weight
    rows = (new.kv_b_proj.weight @ down).unflatten(0, (layer.num_heads, -1))
    return rows.split([layer.head_dim, layer.value_dim], 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 5, 20, 40])
def test_svd_of_the_weights(rank, bias):
    layer = trained(kv_heads=4, group=1, rotary=None, bias=bias)
    plain = {"rope_rank": 0, "method": "mha2mla", "balance": None, "damping": math.inf}
    weights = torch.cat([layer.k_proj.weight, layer.v_proj.weight])

    def squared_error(new):
        k, v = implied_weights(layer, new)
        return float((torch.cat([k.flatten(0, 1), v.flatten(0, 1)]) - weights).square().sum())

    with torch.no_grad():
        found = squared_error(convert(layer, rank=rank, **plain).layer)
        tail = torch.linalg.svdvals(weights)[rank:].square().sum()
        assert found == pytest.approx(float(tail))
        parts = squared_error(convert(layer, rank=rank, joint=False, **plain).layer)
        both = [torch.linalg.svdvals(p.weight) for p in (layer.k_proj, layer.v_proj)]
        tail = torch.cat(both).sort(descending=True)[0][rank:].square().sum()
        assert parts == pytest.approx(float(tail))


@pytest.mark.parametrize("method", ["transmla", "mha2mla"])
def test_the_calibration_is_served_best_by_itself(method):
    """Minimising a + d b costs no more a than a larger d does, whatever a and b are."""
    layer = trained(rotary=None)
    for rank in (2, 8, 16):
        kept = [
            convert(layer, rank=rank, rope_rank=0, method=method, damping=d).latent_energy
            for d in (math.inf, 10.0, 0.1, 0.01, 0.0)
        ]
        assert kept == sorted(kept)
        assert kept[-1] > kept[0]
        one_each = convert(layer, rank=rank, rope_rank=0, method=method, joint=False, damping=0.0)
        assert one_each.latent_energy < kept[-1]


@pytest.mark.parametrize("balance", [0.3, 1.0, None])
def test_the_latent_is_the_best_of_its_rank(balance):
    layer, x = trained(rotary=None).requires_grad_(False), hidden_states(2, 40)
    k, v = (p(x).flatten(0, 1) for p in (layer.k_proj, layer.v_proj))
    sizes = [t.square().mean(0).sqrt().mean() for t in (k, v)]
    rho = 1.0 if balance is None else sizes[0] / (balance * sizes[1])
    energy = torch.linalg.svdvals(torch.cat([k / rho, v], 1)).square()
    options = {"rope_rank": 0, "method": "mha2mla", "damping": 0.0, "balance": balance}
    for rank in (1, 8, 30):
        found = convert(layer, rank=rank, calibration=x, **options)
        assert found.latent_energy == pytest.approx(float(energy[:rank].sum() / energy.sum()))


@pytest.mark.parametrize("bias", [True, False])
def test_losses_are_those_of_the_calibration(bias):
    layer, x = trained(kv_heads=4, group=1, rotary=None, bias=bias), hidden_states(2, 40)
    found = convert(layer, rank=9, rope_rank=0, calibration=x)
    new = found.layer
    with torch.no_grad():
        rows = new.kv_b_proj(new.kv_a_proj_with_mqa(x)).unflatten(-1, (4, -1))
        k, v = rows.split([layer.head_dim, layer.value_dim], -1)
        for error, projection, ours in (
            (found.key_error, layer.k_proj, k),
            (found.value_error, layer.v_proj, v),
        ):
            theirs = projection(x).unflatten(-1, (4, -1))
            assert error == pytest.approx(float((ours - theirs).norm() / theirs.norm()))


def test_conversion_error():
    """Another scale multiplies all logits: the errors follow from the old layer alone."""
    layer, x = trained(), hidden_states(2, 15, seed=7)
    new = convert(layer).layer
    new.scale *= 1.5
    for is_causal in (True, False):
        found = conversion_error(layer, new, x, is_causal=is_causal)
        with torch.no_grad():
            squares, variation = [], []
            for sequence in x:
                logits = logits_from_the_definition(layer, sequence, x, 24, 1)
                for head, row in ((h, i) for h in range(6) for i in range(15)):
                    s = logits[head, row, : row + 1] if is_causal else logits[head, row]
                    off = s / 2
                    squares += (off - off.mean()).square().tolist()
                    p, q = (1.5 * s).softmax(0), s.softmax(0)
                    variation.append(float((p - q).clamp(min=0).sum()))
            want = layer(x, is_causal=is_causal)
            off = (new(x, is_causal=is_causal) - want).norm() / want.norm()
        assert found.logits == pytest.approx(math.sqrt(sum(squares) / len(squares)))
        assert found.total_variation == pytest.approx(sum(variation) / len(variation))
        assert found.output == pytest.approx(float(off))


@pytest.mark.parametrize("options", [{}, {"query_rank": 10}, {"method": "mha2mla"}])
@pytest.mark.parametrize("bias", [True, False])
def test_what_comes_out_is_a_layer(options, bias):
    check_layer(convert(trained(bias=bias), rank=10, rope_rank=8, **options).layer)


def test_the_cache_is_as_small_as_was_asked_for():
    layer = trained()
    new = convert(layer, rank=10, rope_rank=6).layer
    assert new.cost(1, 1).units == 16
    assert layer.cost(1, 1).units == 48


def test_type_is_kept_and_nothing_is_drawn():
    layer = trained().bfloat16()
    before = torch.random.get_rng_state()
    new = convert(layer, rank=10, rope_rank=6, query_rank=5).layer
    assert torch.equal(before, torch.random.get_rng_state())
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert all(p.isfinite().all() for p in new.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer"),
        ({"rope_rank": 7}, "even and at most 24"),
        ({"rope_rank": 26}, "even and at most 24"),
        ({"rope_rank": -2}, "rope_rank"),
        ({"fold": 3}, "fold must divide the 4 frequencies"),
        ({"fold": 2, "method": "mha2mla"}, "mixed across heads"),
        ({"select": "first", "method": "mha2mla"}, "mixed across heads"),
        ({"select": "best"}, "select must be one of"),
        ({"method": "mla"}, "method must be one of"),
        ({"balance": 0.0}, "balance must be positive"),
        ({"damping": -1.0}, "damping must not be negative"),
        ({"query_rank": 0}, "query_rank must be a positive integer"),
        ({"calibration": torch.zeros(3, EMBED)}, "calibration must be hidden states"),
        ({"calibration": torch.zeros(2, 0, EMBED)}, "calibration must be hidden states"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        convert(trained(), **options)


def test_a_layer_without_positions_has_nothing_to_turn():
    for options in ({"rope_rank": 2}, {"rope_rank": 0, "fold": 2}):
        with pytest.raises(ValueError, match=r"at most 0|with a rotary"):
            convert(trained(rotary=None), **options)


def test_source_layer():
    layer = trained()
    again = source_layer(layer, num_heads=6, kv_heads=3, rotary=layer.rotary, scale=layer.scale)
    x = hidden_states(2, 9)
    same(again(x), layer(x), 0)
    with pytest.raises(ValueError, match="k_proj"):
        source_layer(layer, num_heads=6, kv_heads=2, rotary=layer.rotary)
    layer.q_norm = nn.RMSNorm(8)
    with pytest.raises(Unsupported, match="q_norm"):
        source_layer(layer, num_heads=6, kv_heads=3, rotary=layer.rotary)
    with pytest.raises(Unsupported, match="o_proj"):
        source_layer(
            nn.ModuleDict({"q_proj": nn.Linear(2, 2)}), num_heads=1, kv_heads=1, rotary=None
        )


def test_rotary_with_frequencies_of_its_own():
    x, position = draw(2, 9, 8), torch.arange(9)
    default = Rotary(8, 30.0)
    radians = tuple(default.frequencies().tolist())
    same(Rotary(8, radians=radians)(x, position), default(x, position), 0)
    picked = Rotary(4, radians=radians[1:3])(x[..., [1, 2, 5, 6]], position)
    same(picked, default(x, position)[..., [1, 2, 5, 6]], 0)
    with pytest.raises(ValueError, match="radians must be 4"):
        Rotary(8, radians=radians[1:])
    for other in ({"base": 5.0}, {"yarn": YARN}):
        with pytest.raises(ValueError, match="by radians, or by base and yarn"):
            Rotary(8, radians=radians, **other)


SIZES = {
    "vocab_size": 60,
    "hidden_size": EMBED,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def tiny(kind="Llama", **changes):
    """A random model of transformers, and token ids (4, 20)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:  # else all tokens attend alike
                parameter.copy_(torch.randn_like(parameter) / 3)
    return model, torch.randint(60, (4, 20))


MODELS = {
    "llama": {},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "bias": {"kind": "Qwen2"},
}


@pytest.mark.parametrize("method", ["transmla", "mha2mla"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_keeps_its_logits(name, method):
    model, ids = tiny(**MODELS[name])
    want = model(ids, use_cache=False).logits
    again = to_mla_model(model, ids[:2], rank=24, rope_rank=24, method=method)
    assert again is model
    assert all(type(block.self_attn) is LatentSelfAttention for block in model.model.layers)
    same(model(ids, use_cache=False).logits, want, 1e-4 * float(want.abs().max()))


@torch.no_grad()
def test_each_layer_of_a_model_is_converted_to_what_it_sees():
    model, ids = tiny()
    old = copy.deepcopy(model)
    seen = {}
    for i, block in enumerate(old.model.layers):
        block.input_layernorm.register_forward_hook(lambda m, a, out, i=i: seen.update({i: out}))
    want = old(ids, use_cache=False).logits
    replaced = [block.self_attn for block in model.model.layers]
    to_mla_model(model.train(), ids, rank=10, rope_rank=8, select="turned")
    assert model.training
    assert not any(module._forward_pre_hooks for module in replaced)
    for i, block in enumerate(old.model.layers):
        rotary = Rotary(8, radians=tuple(old.model.rotary_emb.inv_freq.tolist()))
        source = source_layer(block.self_attn, num_heads=6, kv_heads=3, rotary=rotary)
        new = to_mla(source, rank=10, rope_rank=8, select="turned", calibration=seen[i]).layer
        ours = model.model.layers[i].self_attn.layer
        same(ours(seen[i]), new(seen[i]), 1e-4)
    found = model(ids, use_cache=False).logits
    assert found.isfinite().all()
    assert (found - want).abs().max() > 1e-3


@torch.no_grad()
def test_calls_that_a_converted_model_cannot_serve():
    model, ids = tiny()
    to_mla_model(model, ids, rank=10, rope_rank=8)
    with pytest.raises(Unsupported, match="use_cache=False"):
        model(ids, use_cache=True)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    with pytest.raises(Unsupported, match="without padding"):
        model(ids, attention_mask=padding, use_cache=False)
    with pytest.raises(Unsupported, match="output_attentions"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, EMBED), output_attentions=True)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Qwen3", {}, "q_norm"),
        ("Mistral", {"sliding_window": 8}, "sliding window of 8"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "change with the length",
        ),
    ],
)
def test_models_that_cannot_be_converted(kind, changes, message):
    model, ids = tiny(kind, **changes)
    with pytest.raises(Unsupported, match=message):
        to_mla_model(model, ids, rank=10, rope_rank=8)


def test_ids_and_options_of_a_model_are_checked():
    model, ids = tiny()
    with pytest.raises(ValueError, match="token ids"):
        to_mla_model(model, ids[0], rank=10, rope_rank=8)
    with pytest.raises(ValueError, match="even and at most 24"):
        to_mla_model(model, ids + 1000, rank=10, rope_rank=26)  # known before the model runs
    with pytest.raises(TypeError, match="ranks"):
        to_mla_model(model, ids, rank=10, rope_rank=8, ranks=3)
