"""What is true of the compression of attention weights."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from numattn import Unsupported
from numattn.core.rotary import Rotary
from numattn.latent import GroupedQueryAttention
from numattn.tensor.compress import compress_layer, multilinear_rank_profile
from numattn.tensor.compressed import CompressedAttention, HeadFactors
from numattn.testing.layers import check_layer

EMBED, HEAD = 22, 6
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden_states(*shape, seed=100):
    """Correlated entries of decaying size, as trained layers see them."""
    size = torch.arange(1, EMBED + 1, dtype=torch.float64) ** -0.7
    mix = torch.linalg.qr(draw(EMBED, EMBED, seed=99))[0]
    return 2 * (draw(*shape, EMBED, seed=seed) * size) @ mix


def random_layer(kv_heads=2, group=2, seed=0, **options):
    options = {
        "head_dim": HEAD,
        "rotary": None if options.get("head_dim", 0) % 2 else "default",
    } | (options)
    layer = GroupedQueryAttention(EMBED, kv_heads * group, kv_heads=kv_heads, **options).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed + i) * (i + 1) / 8)
    return layer


def put(layer, reads, write):
    """Give a layer the weights of tensors (X, H + 2 Hk, D) and (X, H, E)."""
    h, g = layer.num_heads, layer.kv_heads
    with torch.no_grad():
        for name, part in zip(PROJECTIONS, reads.split([h, g, g], 1), strict=False):
            getattr(layer, name).weight.copy_(part.flatten(1).mT)
        layer.o_proj.weight.copy_(write.flatten(1))
    return layer


def stacks(layer):
    """The balanced tensors that are decomposed, from the definition."""
    blocks = []
    for name, heads in zip(
        PROJECTIONS, (layer.num_heads, layer.kv_heads, layer.kv_heads), strict=False
    ):
        w = getattr(layer, name).weight.detach()
        for block in w.unflatten(0, (heads, -1)):
            blocks.append(block.mT / w.norm())
    o = layer.o_proj.weight.detach()
    return torch.stack(blocks, 1), o.unflatten(1, (layer.num_heads, -1)) / o.norm()


def errors(found):
    """Relative errors of the two balanced tensors."""
    e = found.weight_error()
    return math.sqrt(sum(e[name] ** 2 for name in PROJECTIONS[:3]) / 3), e["o_proj"]


def unfold(tensor, mode):
    return tensor.movedim(mode, 0).flatten(1)


def tail(matrix, rank):
    """Squared singular values beyond a rank, over all."""
    values = torch.linalg.svdvals(matrix.detach()).square()
    return float(values[rank:].sum() / values.sum())


def same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


LAYERS = {
    "grouped": {},
    "multi-head": {"kv_heads": 3, "group": 1},
    "multi-query": {"kv_heads": 1, "group": 3},
    "bias": {"bias": True},
    "interleaved": {"rotary": Rotary(HEAD, 50.0, interleaved=True)},
    "no rotation": {"rotary": None},
    "narrow values": {"value_dim": 5, "scale": 0.7},
}

SMALL = {
    "cp": {"method": "cp", "rank": 9, "iterations": 5, "starts": 1},
    "tucker": {"method": "tucker", "rank": (9, 3, 4)},
    "tt": {"method": "tt", "rank": (9, 5)},
}


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("method", ["tucker", "tt"])
@pytest.mark.parametrize("name", LAYERS)
def test_full_rank_loses_nothing(name, method, calibrated):
    layer = random_layer(**LAYERS[name])
    x = hidden_states(2, 17)
    found = compress_layer(layer, method=method, rank=1000, calibration=x if calibrated else None)
    for key, weight in found.layer.weights().items():
        same(weight, getattr(layer, key).weight)
    same(found.layer(x), layer(x))
    assert max(found.output_error(x).values()) < 1e-10


def test_cp_of_enough_components_loses_little():
    """The rank of a tensor is at most its size over its longest mode."""
    layer = random_layer(kv_heads=1, group=1, head_dim=3)
    generator = torch.Generator().manual_seed(0)
    found = compress_layer(layer, method="cp", rank=9, iterations=300, generator=generator)
    assert max(errors(found)) < 1e-3


def planted(kind):
    """Tensors of 8 and 4 slices made of factors, of known ranks."""
    for slices in (8, 4):
        u, c, v = draw(EMBED, 3, seed=1), draw(slices, 3, seed=slices), draw(HEAD, 3, seed=3)
        if kind == "cp":
            yield torch.einsum("xr,sr,dr->xsd", u, c, v)
        elif kind == "tucker":
            core = draw(3, 2, 3, seed=4)
            yield torch.einsum("xa,abc,sb,dc->xsd", u, core, c[:, :2], v)
        else:
            core = draw(3, slices, 2, seed=5 + slices)
            yield torch.einsum("xa,asb,db->xsd", u, core, v[:, :2])


@pytest.mark.parametrize(
    ("kind", "rank", "calibrated"),
    [
        ("cp", 3, False),
        ("tucker", (3, 2, 3), False),
        ("tucker", (3, 2, 3), True),
        ("tt", (3, 2), False),
        ("tt", (3, 2), True),
    ],
)
def test_planted_factors_are_found(kind, rank, calibrated):
    layer = put(random_layer(), *planted(kind))
    call = {"generator": torch.Generator().manual_seed(1), "starts": 2} if kind == "cp" else {}
    x = hidden_states(2, 17) if calibrated else None
    found = compress_layer(layer, method=kind, rank=rank, calibration=x, **call)
    assert max(errors(found)) < (1e-5 if kind == "cp" else 1e-9)
    less = rank - 1 if kind == "cp" else (rank[0] - 1, *rank[1:])
    assert min(errors(compress_layer(layer, method=kind, rank=less, calibration=x, **call))) > 1e-2


RANKS = (9, 3, 4)


def test_hosvd_loses_between_the_largest_tail_and_the_sum_and_hooi_less():
    layer = random_layer()
    hosvd = errors(compress_layer(layer, method="tucker", rank=RANKS, iterations=0))
    hooi = errors(compress_layer(layer, method="tucker", rank=RANKS, iterations=20))
    for tensor, first, better in zip(stacks(layer), hosvd, hooi, strict=True):
        tails = [tail(unfold(tensor, m), r) for m, r in enumerate(RANKS)]
        assert max(tails) <= better**2 + 1e-12
        assert better < first
        assert first**2 <= sum(tails)


def test_hosvd_of_one_mode_loses_its_tail():
    layer = random_layer()
    for method in ("tucker", "tt"):
        rank = (5, 100, 100) if method == "tucker" else (5, 100)
        for tensor, error in zip(
            stacks(layer), errors(compress_layer(layer, method=method, rank=rank)), strict=True
        ):
            assert error**2 == pytest.approx(tail(unfold(tensor, 0), 5), rel=1e-9)


def test_a_tensor_train_loses_at_most_the_sum_of_its_tails():
    layer = random_layer()
    for tensor, error in zip(
        stacks(layer), errors(compress_layer(layer, method="tt", rank=(9, 4))), strict=True
    ):
        tails = [tail(tensor.flatten(1), 9), tail(tensor.flatten(0, 1), 4)]
        assert max(tails) <= error**2 + 1e-12
        assert error**2 <= sum(tails)


@pytest.mark.parametrize("method", ["tucker", "tt"])
def test_weighting_is_optimal_where_the_inputs_alone_are_cut(method):
    """Then no other weights of this rank, plain ones among them, lose less on the calibration."""
    layer, x = random_layer(), hidden_states(3, 40)
    rank = (5, 100, 100) if method == "tucker" else (5, 100)
    plain = compress_layer(layer, method=method, rank=rank).output_error(x)
    found = compress_layer(layer, method=method, rank=rank, calibration=x, damping=1e-9)
    ours = found.output_error(x)
    assert ours["o_proj"] < plain["o_proj"]
    squares = [sum(e[name] ** 2 for name in PROJECTIONS[:3]) for e in (ours, plain)]
    assert squares[0] < squares[1]
    outputs = []
    for name in PROJECTIONS[:3]:
        y = x.flatten(0, 1) @ getattr(layer, name).weight.mT
        outputs.append(y / y.norm())
    least = tail(torch.cat(outputs, 1), 5)  # Eckart and Young
    assert squares[0] / 3 == pytest.approx(least, rel=1e-6)


def test_the_output_projection_is_optimal_for_the_moment_itself():
    layer, x = random_layer(), hidden_states(3, 40)
    made = []
    layer.o_proj.register_forward_pre_hook(lambda _, args: made.append(args[0]))
    layer(x)
    least = tail(made[0].flatten(0, 1) @ layer.o_proj.weight.mT, 5)
    for method, rank in (("tucker", (5, 100, 100)), ("tt", (5, 100))):
        found = compress_layer(layer, method=method, rank=rank, calibration=x, damping=1e-9)
        assert found.output_error(x)["o_proj"] ** 2 == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("method", SMALL)
def test_weighting_helps_on_the_calibration(method):
    layer, x = random_layer(), hidden_states(3, 40)
    call = SMALL[method] | ({"iterations": 30} if method == "cp" else {})
    plain, weighted = (
        compress_layer(
            layer,
            calibration=given,
            **call,
            **({"generator": torch.Generator().manual_seed(0)} if method == "cp" else {}),
        ).output_error(x)
        for given in (None, x)
    )
    squares = [sum(e[name] ** 2 for name in PROJECTIONS) for e in (weighted, plain)]
    assert squares[0] < squares[1]


def test_a_second_moment_weighs_as_its_hidden_states_do():
    layer, x = random_layer(), hidden_states(2, 17)
    moment = x.flatten(0, 1).mT @ x.flatten(0, 1)
    ours = compress_layer(layer, method="tt", rank=(5, 4), calibration=moment).layer.weights()
    theirs = compress_layer(layer, method="tt", rank=(5, 4), calibration=x).layer.weights()
    for name in PROJECTIONS[:3]:
        same(ours[name], theirs[name])
    plain = compress_layer(layer, method="tt", rank=(5, 4)).layer.weights()
    same(ours["o_proj"], plain["o_proj"])


def test_hidden_states_of_few_dimensions_need_as_many():
    layer = random_layer()
    x = draw(2, 30, 4, seed=4) @ draw(4, EMBED, seed=3)
    found = compress_layer(layer, method="tt", rank=(4, 100), calibration=x, damping=1e-12)
    error = found.output_error(x)
    assert max(error[name] for name in PROJECTIONS[:3]) < 1e-4
    assert all(w.isfinite().all() for w in found.layer.weights().values())


@pytest.mark.parametrize("method", ["tucker", "tt"])
def test_errors_fall_with_the_share(method):
    layer = random_layer()
    found = [compress_layer(layer, method=method, rank=share) for share in (0.2, 0.4, 0.6, 0.8)]
    for which in (0, 1):
        each = [errors(f)[which] for f in found]
        assert each == sorted(each, reverse=True)
        assert len(set(each)) == 4


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("method", ["cp", "tucker", "tt"])
def test_a_tolerance_is_kept(method, calibrated):
    layer, x = random_layer(), hidden_states(2, 30)
    call = (
        {"iterations": 30, "generator": torch.Generator().manual_seed(0)} if method == "cp" else {}
    )
    given = x if calibrated else None
    found = compress_layer(
        layer, method=method, tolerance=0.5, calibration=given, damping=1e-9, **call
    )
    e = found.output_error(x) if calibrated else found.weight_error()
    assert math.sqrt(sum(e[name] ** 2 for name in PROJECTIONS[:3]) / 3) <= 0.5 + 1e-6
    assert e["o_proj"] <= 0.5 + 1e-6
    assert found.parameters < found.parameters_before


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("method", ["cp", "tucker", "tt"])
def test_a_share_is_not_exceeded(method, share):
    call = {"iterations": 2, "starts": 1} if method == "cp" else {}
    found = compress_layer(random_layer(), method=method, rank=share, **call)
    assert 0.5 * share < found.parameters / found.parameters_before <= share
    assert found.ratio == found.parameters_before / found.parameters


@pytest.mark.parametrize(
    ("method", "rank", "reads", "writes"),
    [
        ("cp", 7, 7 * (EMBED + 8 + HEAD), 7 * (EMBED + 4 + HEAD)),
        ("tucker", (9, 3, 4), 9 * EMBED + 3 * 8 + 4 * HEAD + 108, 9 * EMBED + 12 + 24 + 108),
        (
            "tucker",
            (9, 100, 100),
            9 * EMBED + 9 * 48,
            9 * EMBED + 9 * 24,
        ),  # the others are absorbed
        ("tt", (9, 4), 9 * EMBED + 9 * 8 * 4 + 4 * HEAD, 9 * EMBED + 9 * 4 * 4 + 4 * HEAD),
        ("tt", (9, 100), 9 * EMBED + 9 * 48, 9 * EMBED + 9 * 24),
    ],
)
def test_parameters_are_those_of_the_factors(method, rank, reads, writes):
    call = {"iterations": 2, "starts": 1} if method == "cp" else {}
    found = compress_layer(random_layer(), method=method, rank=rank, **call)
    assert found.parameters == reads + writes
    assert found.parameters_before == EMBED * HEAD * 12
    assert sum(p.numel() for p in found.layer.parameters()) == reads + writes


def test_flops_are_those_of_the_products():
    found = compress_layer(random_layer(), method="tucker", rank=(9, 3, 4))
    by_hand = 2 * (2 * 9 * EMBED + 2 * 108 + 2 * 3 * 4 * HEAD + 3 * HEAD * (8 + 4))
    assert found.flops == by_hand
    assert found.flops_before == 2 * EMBED * HEAD * 12


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", SMALL)
def test_the_layer_is_an_ordinary_one_with_its_weights(method, name):
    layer = random_layer(**LAYERS[name])
    new = compress_layer(layer, calibration=hidden_states(2, 9), **SMALL[method]).layer
    dense = copy.deepcopy(layer)
    with torch.no_grad():
        for key, weight in new.weights().items():
            getattr(dense, key).weight.copy_(weight)
    x = hidden_states(2, 13, seed=7).requires_grad_()
    y = x.detach().clone().requires_grad_()
    mask = torch.ones(2, 1, 1, 13, dtype=torch.bool)
    mask[0, ..., :4] = False
    same(new(x, attn_mask=mask)[0, 4:], dense(x, attn_mask=mask)[0, 4:])
    new(x).square().sum().backward()
    dense(y).square().sum().backward()
    scale = float(y.grad.abs().max())
    same(x.grad, y.grad, 1e-10 * scale)


@pytest.mark.parametrize("name", ["grouped", "bias", "narrow values"])
@pytest.mark.parametrize("method", SMALL)
def test_promises_of_layers_are_kept(method, name):
    check_layer(compress_layer(random_layer(**LAYERS[name]), **SMALL[method]).layer)


def test_gradients_of_factors_are_those_of_the_definition():
    """Of all factors, by the derivative of a sum over all indices."""
    f = HeadFactors(draw(7, 3), draw(3, 2, 2), draw(4, 2), draw(5, 2))
    x = draw(6, 7, seed=9)
    for out in (f.read(x).flatten(1), f.write(draw(6, 4, 5, seed=8))):
        grads = torch.autograd.grad(out.square().sum(), list(f.parameters()))
        w = torch.einsum("xa,abc,sb,dc->xsd", f.basis, f.core, f.slices, f.width)
        if out.shape[1] == 20:
            want = torch.einsum("nx,xsd->nsd", x, w).flatten(1)
        else:
            want = torch.einsum("nsd,xsd->nx", draw(6, 4, 5, seed=8), w)
        same(out, want)
        for ours, theirs in zip(
            grads, torch.autograd.grad(want.square().sum(), list(f.parameters())), strict=True
        ):
            same(ours, theirs, 1e-9 * float(theirs.abs().max()))


def test_the_type_of_the_layer_is_kept():
    layer = random_layer().to(torch.bfloat16)
    new = compress_layer(layer, method="tt", rank=1000).layer
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    x = hidden_states(1, 9).bfloat16()
    want = layer.double()(x.double())
    assert (new(x).double() - want).norm() < 0.05 * want.norm()


# --- several layers -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tucker", "tt"])
def test_several_layers_at_full_rank_lose_nothing(method):
    layers = [random_layer(seed=10 * i) for i in range(3)]
    seen = [hidden_states(1, 11, seed=i) for i in range(3)]
    found = compress_layer(layers, method=method, rank=1000, calibration=seen)
    for new, old, x in zip(found.layers, layers, seen, strict=True):
        same(new(x), old(x))
    assert max(found.output_error(seen).values()) < 1e-9


@pytest.mark.parametrize(
    "call",
    [
        {"method": "cp", "rank": 8, "iterations": 4},
        {"method": "tucker", "rank": (9, 2, 3, 4)},
        {"method": "tt", "rank": (9, 8, 4)},
    ],
    ids=lambda call: call["method"],
)
def test_several_layers_share_factors(call):
    layers = [random_layer(seed=10 * i) for i in range(3)]
    x = [hidden_states(1, 30, seed=i) for i in range(3)]
    found = compress_layer(layers, calibration=x, **call)
    shared = nn.ModuleList(found.layers)
    assert sum(p.numel() for p in shared.parameters()) == found.parameters
    alone = sum(p.numel() for p in found.layers[0].parameters())
    assert found.parameters == alone
    assert not torch.equal(*(each.weights()["q_proj"] for each in found.layers[:2]))
    check_layer(found.layers[1])
    with pytest.raises(ValueError, match="3 layers"):
        _ = found.layer


def test_equal_layers_cost_one():
    layer = random_layer()
    found = compress_layer([layer, layer], method="tucker", rank=(9, 1, 100, 100))
    one = compress_layer(layer, method="tucker", rank=(9, 100, 100))
    for name, error in one.weight_error().items():
        assert found.weight_error()[name] == pytest.approx(error, rel=1e-6)


# --- CP -------------------------------------------------------------------------------------


def test_cancellation_is_seen():
    """The limit of a tensor of rank 2 that has rank 3: best components grow without limit."""
    a, b = (draw(n, 2, seed=n).T for n in (EMBED, 8)), draw(2, HEAD, seed=3)
    (u, v), (c, d) = a
    e, f = b

    def outer(x, y, z):
        return torch.einsum("x,s,d->xsd", x, y, z)

    reads = outer(u, c, f) + outer(u, d, e) + outer(v, c, e)
    layer = put(random_layer(), reads, reads[:, :4])
    seen = [
        compress_layer(layer, method="cp", rank=2, iterations=sweeps, starts=1).cancellation
        for sweeps in (4, 16, 64)
    ]
    assert seen == sorted(seen)
    assert seen[0] < seen[2]
    assert compress_layer(layer, method="tt", rank=2).cancellation == 1
    orthogonal = put(random_layer(), *(outer(u, c[:n], e) for n in (8, 4)))
    found = compress_layer(orthogonal, method="cp", rank=1, starts=1)
    assert found.cancellation == pytest.approx(1)


def test_cp_is_drawn_from_its_generator():
    layer = random_layer()
    once, again, other = (
        compress_layer(
            layer,
            method="cp",
            rank=20,
            iterations=3,
            generator=torch.Generator().manual_seed(seed),
        ).layer.weights()["q_proj"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_cp_says_when_it_does_not_reach_a_tolerance():
    with pytest.raises(Unsupported, match=r"tolerance=0\.0001"):
        compress_layer(random_layer(), method="cp", tolerance=1e-4, iterations=2, starts=1)


@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
def test_the_backend_of_tensorly_is_left_alone(backend):
    import tensorly

    before = tensorly.get_backend()
    tensorly.set_backend(backend, local_threadsafe=True)
    try:
        for call in ({"method": "tt", "rank": 2}, {"method": "tt", "rank": 1e-9}):
            try:
                compress_layer(random_layer(), **call)
            except ValueError:
                assert call["rank"] < 1
            assert tensorly.get_backend() == backend
    finally:
        tensorly.set_backend(before, local_threadsafe=True)


# --- rank profile ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grouped", "multi-head", "multi-query", "narrow values"])
def test_the_rank_profile_is_that_of_the_tensors(name):
    layer = random_layer(**LAYERS[name])
    h, g = layer.num_heads, layer.kv_heads
    q = layer.q_proj.weight.detach().unflatten(0, (h, -1))
    k = layer.k_proj.weight.detach().unflatten(0, (g, -1))
    v = layer.v_proj.weight.detach().unflatten(0, (g, -1))
    o = layer.o_proj.weight.detach().unflatten(1, (h, -1))
    logits = torch.stack([q[i].mT @ k[i * g // h] for i in range(h)])
    outputs = torch.stack([v[i * g // h].mT @ o[:, i].mT for i in range(h)])
    profile = multilinear_rank_profile(layer)
    for found, tensor in ((profile.logits, logits), (profile.outputs, outputs)):
        for mode, values in enumerate(found.values()):
            want = torch.linalg.svdvals(unfold(tensor, mode))
            scale = float(want[0])
            rest = want[len(values) :]
            same(values, want[: len(values)], 1e-7 * scale)
            assert not len(rest) or float(rest.max()) < 1e-10 * scale
    ranks = profile.ranks(1e-6)
    assert ranks["logits"]["keys"] == min(EMBED, g * HEAD)


def test_ranks_of_a_profile_lose_what_is_allowed():
    layer = random_layer()
    profile = multilinear_rank_profile(layer)
    for tolerance in (0.1, 0.5):
        values = profile.logits["queries"]
        rank = profile.ranks(tolerance)["logits"]["queries"]
        lost = [float(values[r:].norm() / values.norm()) for r in (rank, rank - 1)]
        assert lost[0] <= tolerance < lost[1]


# --- arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"method": "svd", "rank": 2}, "method must be one of"),
        ({}, "either rank or tolerance"),
        ({"rank": 2, "tolerance": 0.1}, "either rank or tolerance"),
        ({"rank": 0}, "rank must be a positive"),
        ({"rank": 1.5}, r"in \(0, 1\]"),
        ({"rank": 1e-4}, "larger share"),
        ({"rank": 1e-4, "method": "cp"}, "larger share"),
        ({"rank": (2, 2)}, "tuple of 3"),
        ({"rank": (2, 2, 2), "method": "tt"}, "tuple of 2"),
        ({"rank": (2,), "method": "cp"}, "an integer, a share"),
        ({"tolerance": 1.0}, "tolerance must be in"),
        ({"rank": 2, "damping": 0.0}, "damping must be positive"),
        ({"rank": 2, "method": "tt", "iterations": 3}, "no iterations"),
        ({"rank": 2, "iterations": -1}, "iterations must be"),
        ({"rank": 2, "method": "cp", "iterations": 0}, "must be positive"),
        ({"rank": 2, "starts": 2}, "draws nothing"),
        ({"rank": 2, "generator": torch.Generator()}, "draws nothing"),
        ({"rank": 2, "method": "cp", "starts": 0}, "starts must be"),
        ({"rank": 2, "calibration": torch.ones(2, 3, EMBED + 1)}, "hidden states"),
        ({"rank": 2, "calibration": torch.ones(EMBED, EMBED).triu()}, "symmetric"),
        ({"rank": 2, "calibration": [torch.ones(1, 2, EMBED)] * 2}, "each of 1 layers"),
    ],
)
def test_bad_options_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        compress_layer(random_layer(), **call)


def test_layers_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="agree in heads"):
        compress_layer([random_layer(), random_layer(kv_heads=1)], rank=2)
    with pytest.raises(ValueError, match="empty"):
        compress_layer([], rank=2)


def test_factors_of_another_shape_are_refused():
    f = [HeadFactors(draw(7, 2), draw(2, s, 4), None, None) for s in (6, 3)]
    with pytest.raises(ValueError, match="must be of"):
        CompressedAttention(4, kv_heads=1, reads=[f[0]], write=f[1])


class LlamaLike(nn.Module):
    """Projections and names as those of transformers."""

    def __init__(self, layer):
        super().__init__()
        for name in PROJECTIONS:
            self.register_module(name, getattr(layer, name))
        self.config = SimpleNamespace(
            num_attention_heads=layer.num_heads, num_key_value_heads=layer.kv_heads
        )
        self.scaling = layer.scale


def test_a_layer_of_transformers_is_compressed():
    layer, x = random_layer(), hidden_states(2, 9)
    theirs = LlamaLike(layer)
    found = compress_layer(theirs, method="tt", rank=1000, rotary=Rotary(HEAD), calibration=x)
    same(found.layer(x), layer(x))
    with pytest.raises(ValueError, match="how it rotates"):
        compress_layer(theirs, rank=2)
    theirs.q_norm = nn.LayerNorm(HEAD)
    with pytest.raises(Unsupported, match="q_norm"):
        compress_layer(theirs, rank=2, rotary=None)
    with pytest.raises(Unsupported, match="q_proj"):
        multilinear_rank_profile(nn.Linear(2, 2))
