"""What is true of Linformer: the definition, its draw, its exact limits, and how layers share.

Monte Carlo estimates are held to four standard errors, which theory gives.
"""

import math
from functools import partial

import pytest
import torch

from numattn import Unsupported, padding_mask
from numattn.core.cost import Shape, count_flops
from numattn.lowrank.linformer import Linformer, LinformerAttention, linformer_attention
from numattn.testing import make_qkv, reference, reference_weights

MODES = ["gaussian", "segments"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def matrices(*shape, seed=7):
    """E and F for `linformer_attention`."""
    e, f = torch.randn(2, *shape, generator=seeded(seed), dtype=torch.float64)
    return {"key_projection": e, "value_projection": f}


def loop(q, k, v, e, f, bias=None):
    """Every batch entry and query head by itself."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // group
            own = min(kv, e.shape[0] - 1)
            n = k.shape[2]
            logits = q[b, h] @ (e[own, :, :n] @ k[b, kv]).T * q.shape[-1] ** -0.5
            logits = logits if bias is None else logits + bias
            out[b, h] = torch.softmax(logits, -1) @ (f[own, :, :n] @ v[b, kv])
    return out


def segment_matrix(n, r):
    """Means of the segments that are not empty: token t is in segment t r // n. And log counts."""
    groups = [[t for t in range(n) if t * r // n == s] for s in range(r)]
    rows = [[(t in g) / len(g) for t in range(n)] for g in groups if g]
    counts = torch.tensor([len(g) for g in groups if g], dtype=torch.float64)
    return torch.tensor(rows, dtype=torch.float64)[None], counts.log()


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# The definition


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("queries", "keys", "columns"), [(37, 37, 37), (23, 41, 50), (41, 23, 23)])
def test_is_the_definition(heads, group, queries, keys, columns):
    q, k, v = make_qkv(queries, keys=keys, group=group)
    tensors = matrices(heads, 6, columns)
    out = linformer_attention(q, k, v, rank=6, **tensors, enable_gqa=True)
    close(out, loop(q, k, v, *tensors.values()))


@pytest.mark.parametrize("width", [8, 5])  # with torch's fused attention, and without
def test_the_width_of_values_does_not_matter(width):
    q, k, v = make_qkv(20, value_dim=width)
    tensors = matrices(3, 6, 20)
    close(linformer_attention(q, k, v, rank=6, **tensors), loop(q, k, v, *tensors.values()))


@pytest.mark.parametrize("projection", MODES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_may_hold_anything(projection, side):
    q, k, v = make_qkv(30)
    lengths = [4, 21]  # fewer tokens than rows of E, and more
    mask = padding_mask(torch.tensor(lengths), 30, side=side)
    tensors = {} if projection == "segments" else matrices(3, 6, 30)
    call = {"rank": 6, "projection": projection, **tensors}
    for garbage in (1e6, torch.nan, torch.inf):
        k2, v2 = (x.masked_fill(~mask.mT, garbage) for x in (k, v))
        out = linformer_attention(q, k2, v2, attn_mask=mask, **call)
        for b, n in enumerate(lengths):
            at = slice(0, n) if side == "right" else slice(30 - n, 30)
            short = [x[b : b + 1, :, at] for x in (q, k, v)]
            close(out[b : b + 1, :, at], linformer_attention(*short, **call))


def test_columns_count_the_tokens_that_exist():
    q, k, v = make_qkv(12, batch=1)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    tensors = matrices(3, 4, 12)
    out = linformer_attention(q, k, v, rank=4, attn_mask=mask[None, None, None], **tensors)
    close(out, loop(q, k[:, :, mask], v[:, :, mask], *tensors.values()))


@pytest.mark.parametrize(("keys", "rank"), [(40, 8), (41, 7), (9, 7), (5, 7)])
def test_segments_are_the_definition(keys, rank):
    q, k, v = make_qkv(13, keys=keys, group=2)
    e, bias = segment_matrix(keys, rank)
    out = linformer_attention(q, k, v, rank=rank, projection="segments", enable_gqa=True)
    close(out, loop(q, k, v, e, e, bias))


# Exact limits


@pytest.mark.parametrize("order", [torch.arange(33), torch.randperm(33, generator=seeded())])
def test_a_permutation_of_the_keys_changes_nothing(order):
    q, k, v = make_qkv(20, keys=33, group=2)
    e = torch.eye(33, dtype=torch.float64)[order][None]
    out = linformer_attention(
        q, k, v, rank=33, key_projection=e, value_projection=e, enable_gqa=True
    )
    close(out, reference(q, k, v))


@pytest.mark.parametrize("keys", [30, 33])  # segments of five, and of five and six
def test_segments_of_equal_keys_are_exact(keys):
    q, _, v = make_qkv(20, keys=keys)
    k = make_qkv(6)[1]
    number = torch.tensor([t * 6 // keys for t in range(keys)])
    k = k[:, :, number]
    out = linformer_attention(q, k, v, rank=6, projection="segments")
    close(out, reference(q, k, v))


@pytest.mark.parametrize("lengths", [[17, 40], [33, 39]])
def test_padded_segments_of_equal_keys_are_exact(lengths):
    q, k, v = make_qkv(40)
    k = torch.stack(
        [k[b][:, [min(t * 7 // n, 6) for t in range(40)]] for b, n in enumerate(lengths)]
    )
    mask = padding_mask(torch.tensor(lengths), 40)
    out = linformer_attention(q, k, v, rank=7, projection="segments", attn_mask=mask)
    close(out, reference(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("keys", [40, 37])
def test_rows_of_segments_sum_to_one(keys):
    q, k, v = make_qkv(20, keys=keys)
    out = linformer_attention(q, k, torch.ones_like(v), rank=8, projection="segments")
    close(out, torch.ones_like(out))


@pytest.mark.parametrize("projection", MODES)
def test_rank_and_the_best_of_that_rank(projection):
    q, k, _ = make_qkv(48, batch=1)
    eye = torch.eye(48, dtype=q.dtype).expand(1, 3, -1, -1)
    weights = linformer_attention(
        q, k, eye, rank=8, projection=projection, generator=seeded(), scale=0.1
    )
    values = torch.linalg.svdvals(weights)
    assert (values[..., 8:] <= 1e-12 * values[..., :1]).all()
    exact = reference_weights(q, k, scale=0.1)
    best = torch.linalg.svdvals(exact)[..., 8:].square().sum(-1).sqrt()
    assert ((weights - exact).norm(dim=(-2, -1)) >= best).all()


# The draw


def drawn(keys, *, heads=3, rank=4, seed=0):
    k = torch.zeros(1, heads, keys, 2, dtype=torch.float64)
    tensors = Linformer(rank=rank).fit(k, k, k, generator=seeded(seed))
    return tensors["key_projection"], tensors["value_projection"]


def test_squared_lengths_are_kept_on_average():
    """|E x|^2 / |x|^2 is a chi square of r degrees of freedom over r, one for every head."""
    trials, r = 4000, 6
    e, f = drawn(20, heads=trials, rank=r)
    x = torch.randn(20, generator=seeded(3), dtype=torch.float64)
    x = x / x.norm()
    for matrix in (e, f):
        square = (matrix[..., :20] @ x).square().sum(-1)
        variance = 2 / r
        assert abs(square.mean() - 1) <= 4 * math.sqrt(variance / trials)
        fourth = 12 * (r + 4) / r**3
        spread = (square - 1).square().mean()
        assert abs(spread - variance) <= 4 * math.sqrt((fourth - variance**2) / trials)


def test_keys_and_values_are_mixed_independently():
    """(E x) . (F x) has the mean 0 and the variance 1/r where |x| = 1."""
    trials, r = 4000, 6
    e, f = drawn(20, heads=trials, rank=r)
    x = torch.full((20,), 20**-0.5, dtype=torch.float64)
    product = ((e[..., :20] @ x) * (f[..., :20] @ x)).sum(-1)
    assert product.mean().abs() <= 4 * math.sqrt(1 / r / trials)
    heads = ((e[1:, :, :20] @ x) * (e[:-1, :, :20] @ x)).sum(-1)
    assert heads.mean().abs() <= 4 * math.sqrt(1 / r / (trials - 1))


@pytest.mark.parametrize("keys", [1, 40, 512, 513, 1100])
def test_a_token_has_its_column_whatever_the_length(keys):
    for short, long in zip(drawn(keys), drawn(1500), strict=True):
        assert short.shape[2] >= keys
        assert torch.equal(short, long[..., : short.shape[2]])


@pytest.mark.parametrize("keys", [40, 700])
def test_function_fit_and_module_draw_the_same(keys):
    q, k, v = make_qkv(keys, batch=1)
    out = linformer_attention(q, k, v, rank=4, generator=seeded(5))
    tensors = Linformer(rank=4).fit(q, k, v, generator=seeded(5))
    close(linformer_attention(q, k, v, rank=4, **tensors), out)
    module = LinformerAttention(
        num_heads=3, head_dim=8, max_length=keys, rank=4, generator=seeded(5)
    )
    close(module(q.float(), k.float(), v.float()), out.float(), 1e-4)


def test_float32_draws_what_float64_does():
    single = make_qkv(40, dtype=torch.float32)
    tensors = Linformer(rank=4).fit(*single, generator=seeded(5))
    double = Linformer(rank=4).fit(*(x.double() for x in single), generator=seeded(5))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, double[name].float())


def test_segments_draw_nothing():
    record = Linformer(projection="segments")
    q, k, v = make_qkv(40)
    assert record.fit(q, k, v) == {}
    assert torch.equal(record(q, k, v, generator=seeded(1)), record(q, k, v, generator=seeded(2)))


# Learning and sharing


def layer(sharing="none", **call):
    call = {"generator": seeded(5), **call}
    return LinformerAttention(
        num_heads=3, head_dim=8, max_length=40, rank=4, sharing=sharing, **call
    ).double()


def test_gradients_reach_both_matrices():
    q, k, v = make_qkv(6, batch=2, heads=2, group=2, head_dim=3, value_dim=2)
    mask = padding_mask(torch.tensor([6, 4]))
    tensors = tuple(t.requires_grad_() for t in matrices(2, 3, 8).values())

    def call(e, f):
        return linformer_attention(
            *(q, k, v),
            rank=3,
            key_projection=e,
            value_projection=f,
            attn_mask=mask,
            enable_gqa=True,
        )

    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize(
    ("sharing", "parameters"), [("none", 2 * 3), ("heads", 2), ("key_value", 1)]
)
def test_sharing_counts(sharing, parameters):
    module = layer(sharing)
    assert sum(p.numel() for p in module.parameters()) == parameters * 4 * 40
    e, f = module.tensors().values()
    assert (e is f) == (sharing == "key_value")
    assert len(module.state_dict()) == (1 if sharing == "key_value" else 2)
    q, k, v = make_qkv(33, group=2)
    close(module(q, k, v, enable_gqa=True), loop(q, k, v, e, f))


@pytest.mark.parametrize("sharing", ["heads", "key_value"])
def test_gradients_of_what_is_shared_add_up(sharing):
    q, k, v = make_qkv(33)
    shared, apart = layer(sharing), layer()
    with torch.no_grad():
        for name, tensor in shared.tensors().items():
            apart.get_parameter(name).copy_(tensor.expand(3, -1, -1))
    for module in (shared, apart):
        module(q, k, v).square().sum().backward()
    e, f = (apart.get_parameter(name).grad.sum(0, keepdim=True) for name in apart.tensors())
    if sharing == "heads":
        close(shared.key_projection.grad, e)
        close(shared.value_projection.grad, f)
    else:
        close(shared.key_projection.grad, e + f)


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value"])
def test_layers_that_share(sharing):
    first = layer(sharing)
    second = layer(sharing, share_with=first, generator=None)
    both = torch.nn.ModuleList([first, second])
    assert len(list(both.parameters())) == len(list(first.parameters()))
    for name, tensor in first.tensors().items():
        assert second.tensors()[name] is tensor
    q, k, v = make_qkv(20)
    first(q, k, v).sum().backward()
    alone = first.key_projection.grad.clone()
    second(q, k, v).sum().backward()
    close(second.key_projection.grad, 2 * alone)


def test_layers_that_share_are_saved_and_loaded():
    q, k, v = make_qkv(20)

    def pair(seed):
        first = layer("key_value", generator=seeded(seed))
        second = layer("key_value", share_with=first, generator=None)
        return torch.nn.ModuleList([first, second])

    saved, loaded = pair(1), pair(2)
    assert not torch.equal(loaded[1](q, k, v), saved[1](q, k, v))
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded[1](q, k, v), saved[1](q, k, v))
    assert loaded[0].key_projection is loaded[1].key_projection
    loaded[0].redraw(seeded(2))
    assert torch.equal(loaded[1].key_projection.float(), pair(2)[0].key_projection.float())


def test_module_learns():
    q, k, v = make_qkv(20)
    target = layer(generator=seeded(1))(q, k, v).detach()
    module = layer(generator=seeded(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (module(q, k, v) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)


# What it costs, and what it refuses


@pytest.mark.parametrize("keys", [512, 500, 40])
def test_segments_take_no_products_to_mix(keys):
    q, k, v = make_qkv(256, keys=keys, batch=1, head_dim=32, value_dim=32)
    method = Linformer(rank=64, projection="segments")
    said = method.cost(Shape(1, 3, 3, 256, keys, 32, 32)).flops
    assert count_flops(lambda: method(q, k, v)) == said


def refuses(kind, call, *mentions):
    with pytest.raises(kind) as caught:
        call()
    for text in ("linformer", *mentions):
        assert text in str(caught.value)


def test_more_keys_than_columns_are_refused():
    q, k, v = make_qkv(41)
    refuses(ValueError, lambda: layer()(q, k, v), "40 columns", "41 keys", "max_length")
    tensors = matrices(3, 4, 41)
    tensors["value_projection"] = tensors["value_projection"][..., :7]
    call = lambda: linformer_attention(q, k, v, rank=4, **tensors)  # noqa: E731
    refuses(ValueError, call, "value_projection has 7 columns")


@pytest.mark.parametrize("shape", [(2, 4, 20), (3, 5, 20), (4, 20), (2, 3, 4, 20)])
@pytest.mark.parametrize("name", ["key_projection", "value_projection"])
def test_wrong_shapes_are_refused(name, shape):
    q, k, v = make_qkv(20)
    tensors = {**matrices(3, 4, 20), name: torch.zeros(shape)}
    call = lambda: linformer_attention(q, k, v, rank=4, **tensors)  # noqa: E731
    refuses(ValueError, call, name, str(shape), "(3, 4, L)")


@pytest.mark.parametrize("name", ["key_projection", "value_projection"])
def test_one_matrix_alone_is_refused(name):
    q, k, v = make_qkv(20)
    tensors = matrices(3, 4, 20)
    missing = tensors.pop(name)
    call = lambda: linformer_attention(q, k, v, rank=4, **tensors)  # noqa: E731
    refuses(ValueError, call, f"missing {name}")
    both = {"key_projection": missing, "value_projection": missing}
    assert linformer_attention(q, k, v, rank=4, **both).isfinite().all()


def test_segments_take_no_matrices():
    q, k, v = make_qkv(20)
    tensors = matrices(3, 4, 20)
    call = lambda: linformer_attention(q, k, v, rank=4, projection="segments", **tensors)  # noqa: E731
    refuses(ValueError, call, "segments", "gaussian")
    refuses(ValueError, lambda: layer(projection="segments"), "segments", "record")
    refuses(ValueError, lambda: Linformer(projection="mean"), "projection", "mean")


def test_causal_calls_are_refused():
    q, k, v = make_qkv(20)
    for method in (Linformer(), Linformer(projection="segments"), layer()):
        call = partial(method, q, k, v, is_causal=True)
        refuses(Unsupported, call, "all positions", "is_causal=False")
    refuses(Unsupported, lambda: layer().state(k, v), "decode")


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"sharing": "heads"}, {"sharing": "key_value"}),
        ({"max_length": 40}, {"max_length": 41}),
        ({"rank": 4}, {"rank": 5}),
        ({"num_heads": 3}, {"num_heads": 2}),
    ],
)
def test_layers_share_what_fits_only(mine, theirs):
    common = {"num_heads": 3, "head_dim": 8, "max_length": 40, "rank": 4}
    other = LinformerAttention(**{**common, **theirs})
    call = lambda: LinformerAttention(**{**common, **mine}, share_with=other)  # noqa: E731
    refuses(ValueError, call, "share_with", "rank, max_length and sharing")


def test_bad_arguments_of_the_module():
    refuses(ValueError, lambda: layer("layers"), "sharing", "layers")
    refuses(ValueError, lambda: layer(share_with=layer()), "generator")
    for name in ("num_heads", "head_dim", "max_length"):
        call = {"num_heads": 2, "head_dim": 8, name: 0}
        refuses(ValueError, lambda: LinformerAttention(**call), name)  # noqa: B023
