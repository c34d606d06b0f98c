"""Eigen attention against its definition, and its bases against Eckart and Young."""

import pytest
import torch

from numattn import Unsupported, padding_mask, testing
from numattn.core.cost import Shape
from numattn.lowrank.eigen import Eigen, EigenAttention, eigen_attention, eigen_ranks
from numattn.testing import make_qkv, reference, reference_weights
from numattn.testing.checks import close

F64 = torch.float64
WEIGHTINGS = ("joint", "query", "none")
GQA = {"enable_gqa": True}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def orthonormal(heads, rows, cols, seed=0):
    return torch.linalg.qr(randn(heads, rows, cols, seed=seed))[0]


def expand(x, group):
    """Key heads, or their tensors (Hk, ...), one for each query head."""
    return x.repeat_interleave(group, dim=-3)


def per_head(q, k):
    """Query rows of every key head, (B, Hk, rows, D)."""
    return q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def squared(x):
    return x.square().sum((-2, -1))


def skewed(length=60, **sizes):
    """Queries, keys and values of uneven spectra and with means."""
    q, k, v = make_qkv(length, **sizes)
    decay = 1 / torch.arange(1, 9, dtype=F64)
    mix = torch.linalg.qr(randn(8, 8, seed=5))[0]
    q = (q * decay.flip(0)) @ mix + 0.3
    k = 2 * (k * decay) @ randn(8, 8, seed=6) + 0.5
    return q, k, v * decay[: v.shape[3]] + 1.0


def masks(length):
    keep = torch.rand(2, 4, length, length, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[0, :, 3] = False
    return {
        "none": None,
        "padding": padding_mask(torch.tensor([0, 7]), length, side="left"),
        "bool": keep,
        "float": torch.where(keep, randn(1, 4, 1, length), -torch.inf),
    }


@pytest.mark.parametrize("mask", ["none", "padding", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rank", "value_rank"), [(3, 3), (3, 2), (2, 4)])
def test_equals_the_definition(rank, value_rank, causal, mask):
    """With any matrices of queries and keys; ranks that are equal take the fused kernel."""
    q, k, v = make_qkv(20, heads=2, group=2)
    a, b = randn(2, 8, rank, seed=1), randn(2, 8, rank, seed=2)
    c, mean = orthonormal(2, 5, value_rank), randn(2, 1, 5, seed=3)
    given = {"query_basis": a, "key_basis": b, "value_basis": c, "value_mean": mean}
    m = masks(20)[mask]
    out = eigen_attention(
        *(q, k, v),
        rank=rank,
        value_rank=value_rank,
        center=True,
        **given,
        attn_mask=m,
        is_causal=causal,
        **GQA,
    )
    weights = reference_weights(
        q @ expand(a, 2), k @ b, attn_mask=m, is_causal=causal, scale=8**-0.5
    )
    values = (v - mean) @ c @ c.mT + mean
    torch.testing.assert_close(out, weights @ expand(values, 2))
    assert not out[weights.sum(-1) == 0].any()


def test_what_is_not_given_beside_bases_is_not_done():
    q, k, v = make_qkv(20)
    a, c = randn(3, 8, 2), orthonormal(3, 5, 2)
    weights = reference_weights(q @ a, k @ a, scale=8**-0.5)
    out = eigen_attention(q, k, v, rank=2, query_basis=a, key_basis=a)
    torch.testing.assert_close(out, weights @ v)
    out = eigen_attention(q, k, v, rank=2, query_basis=a, key_basis=a, value_basis=c, center=True)
    torch.testing.assert_close(out, weights @ v @ c @ c.mT)


QUICK = (
    "batch_and_head_independence",
    "grouped_heads",
    "padding_is_ignored",
    "padding_is_truncation",
    "nothing_to_attend",
    "full_masks",
    "no_causal_leak",
    "gradients",
    "extremes",
    "half_precision",
    "decode_is_prefill",
    "module_owns_its_tensors",
)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(("weighting", "center"), [("joint", True), ("query", False)])
def test_contract_at_ranks_below_the_widths(weighting, center, name):
    """The suite's tight budget is the width of its heads."""
    testing.run(name, Eigen(3, 2, weighting, center))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_fitting_is_in_the_cost(weighting):
    testing.run("counted_flops", Eigen(1, 1, weighting))


# --- exact limits -----------------------------------------------------------------------------


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_exact_on_data_in_subspaces(weighting, center):
    q, k, v = make_qkv(30, group=2, value_dim=6)
    keys, values = orthonormal(3, 8, 3), orthonormal(3, 6, 2)
    k, v = k[..., :3] @ keys.mT, v[..., :2] @ values.mT
    if weighting == "joint":
        q = q[..., :3] @ expand(keys.mT, 2)
    if center:
        k, v = k + randn(1, 3, 1, 8), v + randn(1, 3, 1, 6, seed=1)
    method = Eigen(3, 2, weighting, center)
    torch.testing.assert_close(method(q, k, v, **GQA), reference(q, k, v))
    less = Eigen(3, 1, weighting, center)(q, k, v, **GQA)
    assert not torch.allclose(less, reference(q, k, v))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize(("length", "dtype"), [(3, F64), (3, torch.float32), (50, torch.float32)])
def test_exact_at_full_width_with_bases_of_another_sample(weighting, length, dtype):
    """Also where the sample has fewer tokens than dimensions."""
    tensors = Eigen(9, weighting=weighting).fit(*make_qkv(length, seed=1))
    q, k, v = make_qkv(40, dtype=dtype)
    out = Eigen(9, weighting=weighting)(q, k, v, is_causal=True, **tensors)
    close(out, reference(q, k, v, is_causal=True), "full width")


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_full_width_in_half_precision_with_bases_of_few_tokens(weighting):
    method = Eigen(9, weighting=weighting)
    q, k, v = make_qkv(40, dtype=torch.float16)
    state = method.state(k, v, **method.fit(*make_qkv(3, seed=1)))
    close(state.attend(q), reference(q, k, v), "decoding at full width")


def test_samples_of_nothing_and_of_zeros_can_be_fitted():
    zero = torch.zeros(1, 2, 5, 8)
    for weighting in WEIGHTINGS:
        for length in (0, 5):
            x = zero[:, :, :length]
            tensors = Eigen(8, weighting=weighting, center=True).fit(x, x, x)
            q, k, v = make_qkv(9, batch=1, heads=2, value_dim=8, dtype=torch.float32)
            out = Eigen(8, weighting=weighting, center=True)(q, k, v, **tensors)
            close(out, reference(q, k, v), "full width")


# --- what the bases make least ----------------------------------------------------------------


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_joint_bases_are_the_svd_of_queries_and_keys(rank, center):
    q, k, v = skewed(group=2)
    tensors = Eigen(rank, center=center).fit(q, k, v, **GQA)
    basis = tensors["query_basis"]
    assert torch.equal(basis, tensors["key_basis"])
    keys = k - k.mean(2, keepdim=True) if center else k
    stack = torch.cat([per_head(q, k), keys], 2)
    tail = torch.linalg.svdvals(stack)[..., rank:].square().sum(-1)
    torch.testing.assert_close(squared(stack - stack @ basis @ basis.mT), tail)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_value_bases_are_the_svd_of_the_values(rank, center, weighting):
    q, k, v = skewed()
    tensors = Eigen(8, rank, weighting, center).fit(q, k, v)
    basis = tensors["value_basis"]
    values = v - v.mean(2, keepdim=True) if center else v
    tail = torch.linalg.svdvals(values)[..., rank:].square().sum(-1)
    torch.testing.assert_close(squared(values - values @ basis @ basis.mT), tail)


def test_bases_of_keys_alone_are_their_svd():
    q, k, v = skewed()
    basis = Eigen(3, weighting="none").fit(q, k, v)["key_basis"]
    tail = torch.linalg.svdvals(k)[..., 3:].square().sum(-1)
    torch.testing.assert_close(squared(k - k @ basis @ basis.mT), tail)


def logits(q, k, tensors):
    """Exact and approximate logits of the query rows of every key head."""
    rows = per_head(q, k)
    return rows @ k.mT, (rows @ tensors["query_basis"]) @ (k @ tensors["key_basis"]).mT


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_query_weighting_is_the_truncated_svd_of_the_logits(rank):
    q, k, v = skewed(group=2)
    exact, ours = logits(q, k, Eigen(rank, weighting="query").fit(q, k, v, **GQA))
    left, sigma, right = torch.linalg.svd(exact, full_matrices=False)
    best = (left[..., :rank] * sigma[..., None, :rank]) @ right[..., :rank, :]
    torch.testing.assert_close(ours, best)
    torch.testing.assert_close(squared(exact - ours), sigma[..., rank:].square().sum(-1))


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_centred_query_weighting_is_that_of_the_logits_less_their_row_means(rank):
    q, k, v = skewed(group=2)
    exact, ours = logits(q, k, Eigen(rank, weighting="query", center=True).fit(q, k, v, **GQA))
    exact, ours = (s - s.mean(-1, keepdim=True) for s in (exact, ours))
    tail = torch.linalg.svdvals(exact)[..., rank:].square().sum(-1)
    torch.testing.assert_close(squared(exact - ours), tail)


@pytest.mark.parametrize("rank", [1, 2, 4, 6])
def test_no_bases_have_a_smaller_error_of_the_logits(rank):
    q, k, v = skewed(group=2)
    error = {}
    for weighting in WEIGHTINGS:
        exact, ours = logits(q, k, Eigen(rank, weighting=weighting).fit(q, k, v, **GQA))
        error[weighting] = squared(exact - ours)
    assert (error["query"] < error["joint"]).all()
    assert (error["query"] < error["none"]).all()


def test_query_weighting_depends_on_the_logits_alone():
    q, k, v = skewed()
    other = randn(8, 8, seed=7)
    method = Eigen(3, weighting="query")
    out = method(q @ other, k @ torch.linalg.inv(other).mT, v)
    torch.testing.assert_close(out, method(q, k, v))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_centred_bases_do_not_see_what_all_tokens_share(weighting):
    q, k, v = skewed()
    method = Eigen(3, 2, weighting, center=True)
    same, shift = 5 * randn(1, 3, 1, 8), 5 * randn(1, 3, 1, 5)
    out = method(q, k, v)
    torch.testing.assert_close(method(q, k + same, v), out)
    torch.testing.assert_close(method(q, k, v + shift), out + shift)


def test_a_sink_without_value_adds_nothing():
    """Zero stays zero in a basis through the origin, and does not where the mean was taken out."""
    q, k, v = make_qkv(20, batch=1, heads=1)
    q[..., 0], k[..., 0, 0], v[..., 0, :] = 50.0, 50.0, 0.0
    assert Eigen(8, 2)(q, k, v).abs().max() < 1e-12
    tensors = Eigen(8, 2, center=True).fit(q, k, v)
    c, mean = tensors["value_basis"], tensors["value_mean"]
    out = Eigen(8, 2, center=True)(q, k, v, **tensors)
    torch.testing.assert_close(out, (mean - mean @ c @ c.mT).expand_as(out))


# --- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_keep_to_their_bounds(causal, center, weighting):
    q, k, v = skewed()
    scale = 0.5
    method = Eigen(4, 2, weighting, center)
    t = method.fit(q, k, v)
    exact = reference_weights(q, k, is_causal=causal, scale=scale)
    ours = reference_weights(
        q @ t["query_basis"], k @ t["key_basis"], is_causal=causal, scale=scale
    )
    u = scale * (q @ k.mT - (q @ t["query_basis"]) @ (k @ t["key_basis"]).mT)
    hidden = exact == 0
    most = u.masked_fill(hidden, -torch.inf).amax(-1) - u.masked_fill(hidden, torch.inf).amin(-1)
    distance = (ours - exact).abs().sum(-1) / 2
    assert (distance <= torch.tanh(most / 4) + 1e-12).all()
    assert distance.max() > 1e-3
    c = t["value_basis"]
    values = v - t["value_mean"] if center else v
    outside = (values - values @ c @ c.mT).norm(dim=-1).amax(-1)
    out = method(q, k, v, is_causal=causal, scale=scale, **t)
    assert ((out - ours @ v).norm(dim=-1) <= outside[..., None] + 1e-12).all()
    # Together, with the radius of the values about any point.
    radius = (v - v.mean(2, keepdim=True)).norm(dim=-1).amax(-1, keepdim=True)
    bound = 2 * radius * torch.tanh(most / 4) + outside[..., None]
    assert ((out - exact @ v).norm(dim=-1) <= bound + 1e-12).all()


# --- samples ----------------------------------------------------------------------------------


def same_spaces(ours, other):
    """That A B^T, C C^T and the mean agree; the vectors of a basis are unique but for signs."""
    keys, values = (
        (t["query_basis"] @ t["key_basis"].mT, t["value_basis"] @ t["value_basis"].mT)
        for t in (ours, other)
    )
    torch.testing.assert_close(keys, values)
    torch.testing.assert_close(ours.get("value_mean"), other.get("value_mean"))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_sample(side, weighting, center):
    q, k, v = skewed(30, group=2)
    method = Eigen(3, 2, weighting, center)
    mask = padding_mask(torch.tensor([17, 30]), side=side)
    keep = slice(0, 17) if side == "right" else slice(13, 30)
    gone = ~mask[..., 0, :, None]
    dirty = [torch.where(gone, torch.nan, x) for x in (q, k, v)]
    ours = method.fit(*dirty, attn_mask=mask, **GQA)
    alone = method.fit(*(x[:1, :, keep] for x in (q, k, v)), **GQA)
    same_spaces({n: t[:1] for n, t in ours.items()}, alone)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_module_is_calibrated_on_one_sample_and_used_on_another(weighting, center):
    """The sample is all tokens of the batch that exist."""
    q, k, v = skewed(30, group=2)
    mask = padding_mask(torch.tensor([17, 30]))
    options = {"rank": 3, "value_rank": 2, "weighting": weighting, "center": center}
    module = EigenAttention(num_heads=3, head_dim=8, **options).double()
    module.calibrate(q, k, v, attn_mask=mask, **GQA)
    tokens = [torch.cat([x[:1, :, :17], x[1:]], 2) for x in (q, k, v)]
    fitted = Eigen(**options).fit(*tokens, **GQA)
    same_spaces({n: t[None] for n, t in module.tensors().items()}, fitted)
    x = make_qkv(25, group=2, seed=3)
    out = module(*x, is_causal=True, **GQA)
    shared = {n: t[0] for n, t in fitted.items()}
    torch.testing.assert_close(out, Eigen(**options)(*x, is_causal=True, **GQA, **shared))


def test_query_padding_is_told_from_the_lengths():
    """Queries of another number than the keys all exist."""
    q, k, v = skewed(30)
    mask = padding_mask(torch.tensor([17, 30]))
    method = Eigen(3, 2)
    ours = method.fit(q[:, :, :20], k, v, attn_mask=mask)
    alone = method.fit(q[:1, :, :20], k[:1, :, :17], v[:1, :, :17])
    same_spaces({n: t[:1] for n, t in ours.items()}, alone)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99])
def test_least_ranks_that_keep_the_energy(energy, weighting, center):
    q, k, v = skewed(group=2)
    if center:
        k, v = (x - x.transpose(0, 1).flatten(1, 2).mean(1)[:, None] for x in (k, v))
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))
    rows = per_head(q, k)
    matrix = {"joint": torch.cat([rows, k], 2), "query": rows @ k.mT, "none": k}[weighting]
    ranks = eigen_ranks(q, k, v, energy, weighting=weighting, center=center, **GQA)
    for rank, x in zip(ranks, (matrix, v), strict=True):
        sigma = torch.linalg.svdvals(x).square()
        kept = sigma.cumsum(-1) / sigma.sum(-1, keepdim=True)
        assert (kept[..., rank - 1] >= energy).all()
        assert rank == 1 or (kept[..., rank - 2] < energy).any()


def test_all_the_energy_is_the_rank_of_the_data():
    q, k, v = make_qkv(30)
    k, v = k[..., :3] @ randn(3, 8), v[..., :2] @ randn(2, 5)
    for weighting in ("query", "none"):
        assert eigen_ranks(q, k, v, 1, weighting=weighting) == (3, 2)
    assert eigen_ranks(q, k, v, 1.0) == (8, 2)
    assert eigen_ranks(q, 0 * k, 0 * v, 1.0, weighting="none") == (1, 1)
    mask = padding_mask(torch.tensor([20, 30]))
    k[0, :, 20:], v[0, :, 20:] = randn(3, 10, 8), randn(3, 10, 5)
    assert eigen_ranks(q, k, v, 1.0, weighting="none", attn_mask=mask) == (3, 2)


# --- decoding and saving ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_keeps_the_ranks_in_the_type_of_the_tokens(dtype):
    q, k, v = make_qkv(30, group=2, dtype=dtype)
    method = Eigen(3, 2, center=True)
    tensors = method.fit(q, k, v, **GQA)
    state = method.state(k[:, :, :7], v[:, :, :7], **GQA, **tensors)
    state.append(k[:, :, 7:], v[:, :, 7:])
    assert state.nbytes == 2 * 3 * 30 * (3 + 2) * dtype.itemsize
    said = method.cost(Shape(2, 6, 3, 30, 30, 8, 5, itemsize=dtype.itemsize))
    assert said.cache == state.nbytes
    assert said.units == 3
    out = state.attend(q[:, :, -2:])
    assert out.dtype == dtype
    close(out, method(q, k, v, **GQA, **tensors)[:, :, -2:], "decoding")


def test_a_state_of_nothing_gives_zeros():
    q, k, v = make_qkv(5)
    method = Eigen(3, 2, center=True)
    state = method.state(k[:, :, :0], v[:, :, :0], **method.fit(q, k, v))
    assert not state.attend(q).any()


def test_a_state_has_its_scale_and_its_heads():
    q, k, v = make_qkv(12, group=2)
    method = Eigen(3, 2)
    tensors = method.fit(q, k, v, **GQA)
    state = method.state(k, v, scale=0.9, **GQA, **tensors)
    torch.testing.assert_close(state.attend(q), method(q, k, v, scale=0.9, **GQA, **tensors))
    with pytest.raises(ValueError, match="enable_gqa"):
        method.state(k, v, **tensors).attend(q)
    with pytest.raises(ValueError, match="head size"):
        state.attend(q[..., :3])


def test_cost_counts_the_pairs_at_the_ranks():
    wide = Shape(1, 1, 1, 4096, 4096, 64, 64, is_causal=True)
    cost = Eigen(16, 8).cost(wide)
    pairs = 4096 * 4097 // 2
    assert cost.flops == 2 * pairs * (16 + 8) + 2 * 2 * 4096 * 64 * (16 + 8)


def test_a_module_is_saved_with_the_width_of_its_values():
    q, k, v = make_qkv(20, dtype=torch.float32)
    fresh = {"num_heads": 3, "head_dim": 8, "rank": 3, "center": True}
    calibrated, other = EigenAttention(**fresh), EigenAttention(**fresh)
    calibrated.calibrate(q, k, v)
    other.load_state_dict(calibrated.state_dict())
    assert torch.equal(other(q, k, v), calibrated(q, k, v))
    holder = torch.nn.Sequential(EigenAttention(**fresh))
    holder.load_state_dict(torch.nn.Sequential(calibrated).state_dict())
    assert torch.equal(holder[0](q, k, v), calibrated(q, k, v))
    calibrated.load_state_dict(EigenAttention(**fresh).state_dict())
    assert calibrated.value_basis is None
    assert calibrated.value_mean is None


def test_before_calibration_the_leading_coordinates_are_kept_and_values_are_whole():
    q, k, v = make_qkv(20, dtype=torch.float32)
    module = EigenAttention(num_heads=3, head_dim=8, rank=3)
    want = reference(q[..., :3], k[..., :3], v, is_causal=True, scale=8**-0.5)
    close(module(q, k, v, is_causal=True), want, "leading coordinates")
    wide = EigenAttention(num_heads=3, head_dim=8)
    close(wide(q, k, v), reference(q, k, v), "all coordinates")


# --- refusals ---------------------------------------------------------------------------------


def test_bases_of_the_batch_are_refused_where_they_would_see_the_future():
    q, k, v = make_qkv(8)
    with pytest.raises(Unsupported, match=r"eigen.*Eigen\.fit"):
        eigen_attention(q, k, v, is_causal=True)
    with pytest.raises(Unsupported, match=r"eigen.*Eigen\.fit"):
        Eigen().state(k, v)


def test_tensors_that_do_not_fit_are_refused():
    q, k, v = make_qkv(8)
    options = {"rank": 3, "value_rank": 2, "center": True}
    tensors = Eigen(**options).fit(q, k, v)

    def call(**changed):
        return eigen_attention(q, k, v, **{**options, **tensors, **changed})

    call()
    for name in ("query_basis", "key_basis"):
        with pytest.raises(ValueError, match="query_basis and key_basis together"):
            call(**{name: None})
    with pytest.raises(ValueError, match="query_basis and key_basis together"):
        call(query_basis=None, key_basis=None)
    with pytest.raises(ValueError, match="value_mean"):
        call(value_basis=None)
    with pytest.raises(ValueError, match="value_mean"):
        call(center=False)
    for name, tensor in tensors.items():
        with pytest.raises(ValueError, match=name):
            call(**{name: tensor[:, :2]})
        with pytest.raises(ValueError, match=name):
            call(**{name: tensor[..., :1]})
    with pytest.raises(ValueError, match="query_basis"):
        call(rank=4)
    with pytest.raises(TypeError, match="no tensor named basis"):
        Eigen().state(k, v, basis=k)


@pytest.mark.parametrize(
    "options",
    [{"rank": 0}, {"value_rank": 0}, {"value_rank": True}, {"weighting": "keys"}, {"center": 1}],
)
def test_bad_options_are_refused(options):
    q, k, v = make_qkv(4)
    (name,) = options
    with pytest.raises(ValueError, match=f"eigen: {name}"):
        Eigen(**options)
    with pytest.raises(ValueError, match=f"eigen: {name}"):
        eigen_attention(q, k, v, **options)


def test_bad_calibrations_are_refused():
    q, k, v = make_qkv(4)
    for energy in (0, 1.5, True, None, float("nan")):
        with pytest.raises(ValueError, match="eigen: energy"):
            eigen_ranks(q, k, v, energy)
    with pytest.raises(ValueError, match="eigen: fit needs value"):
        Eigen().fit(q, k)
