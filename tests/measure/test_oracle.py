import math
from dataclasses import replace
from importlib import import_module
from itertools import combinations

import pytest
import torch
from torch import Tensor

import numattn
from numattn.core.info import FAMILIES
from numattn.kernel import Performer
from numattn.measure import (
    HeadError,
    Spread,
    attend,
    block_oracle,
    efficiency,
    errors,
    head_errors,
    load,
    oracle,
    reference,
    synthetic,
    uniform_keys,
)
from numattn.measure.oracle import (
    budget_overhead,
    error_curve,
    kronecker_oracle,
    threshold_oracle,
    top_p_oracle,
)
from numattn.tensor import kronecker_attention, kronecker_cost
from numattn.testing.inputs import reference_weights

LOW_RANK = [f for f in FAMILIES if f not in ("exact", "sparse")]
matrices = import_module("numattn.measure.oracle.matrices")


def make(kind: str, causal: bool):
    x = synthetic(kind, 80, heads=2, head_dim=16, is_causal=causal)
    x = replace(x, k=x.k[:, :1], v=x.v[:, :1])  # two query heads share a key head
    return x, reference(x)


def dense(x) -> Tensor:
    return reference_weights(x.q, x.k, is_causal=x.is_causal, scale=x.scale)


@pytest.mark.parametrize("family", LOW_RANK)
@pytest.mark.parametrize("causal", [False, True])
def test_low_rank_oracle_is_the_truncated_svd(causal, family):
    x, ref = make("clustered", causal)
    w = dense(x)
    u, s, vh = torch.linalg.svd(w)
    for rank in (1, 7, 30):
        found = oracle(family, rank, ref)
        assert found is not None
        best = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]
        out = w @ x.v.double()
        for head, error in enumerate(found):
            tail = (s[0, head, rank:].norm() / s[0, head].norm()).item()
            assert error.weights == pytest.approx(tail, rel=1e-7)
            distance = (best - w)[0, head].abs().sum(-1) / 2
            assert error.tv is not None
            assert error.tv.max == pytest.approx(distance.max().item(), rel=1e-7)
            moved = (best[0, head] - w[0, head]) @ x.v[0, 0].double()
            assert error.output == pytest.approx((moved.norm() / out[0, head].norm()).item())


@pytest.mark.parametrize("causal", [False, True])
def test_sparse_oracle_keeps_the_heaviest_keys(causal):
    x, ref = make("gaussian", causal)
    dropped = 1 - dense(x).topk(9, -1).values.sum(-1)
    found = oracle("sparse", 9, ref)
    assert found is not None
    for head, error in enumerate(found):
        assert error.tv is not None
        assert error.tv.max == pytest.approx(dropped[0, head].max().item())
        assert error.negative == 0


@pytest.mark.parametrize("causal", [False, True])
def test_block_oracle_is_the_best_choice_of_blocks(causal):
    """At 8 keys, blocks of 2: the error of every choice of four blocks a tile, by brute force."""
    x, ref = make("peaked", causal)
    w = dense(x)
    found = block_oracle(8, ref)
    for head, error in enumerate(found):
        kept = w.new_zeros(80)
        for tile in range(40):
            rows = w[0, head, 2 * tile : 2 * tile + 2]
            mass = rows.unflatten(1, (40, 2)).sum((0, 2))
            best = max(sum(c) for c in combinations(mass.tolist(), 4)) if tile < 3 else None
            blocks = mass.topk(4).indices
            if best is not None:
                assert mass[blocks].sum().item() == pytest.approx(best)
            kept[2 * tile : 2 * tile + 2] = rows.unflatten(1, (40, 2))[:, blocks].sum((1, 2))
        assert error.tv is not None
        assert error.tv.max == pytest.approx((1 - kept).max().item(), abs=1e-12)
        assert error.negative == 0


def test_best_blocks_are_no_better_than_best_keys():
    _, ref = make("clustered", True)
    for units in (4, 16, 40):
        keys, blocks = oracle("sparse", units, ref), block_oracle(units, ref)
        assert keys is not None
        for a, b in zip(keys, blocks, strict=True):
            assert a.tv is not None
            assert b.tv is not None
            assert a.tv.max <= b.tv.max + 1e-12
    for error in block_oracle(1000, ref):
        assert error.output < 1e-10


@pytest.mark.parametrize(("family", "name", "option"), [
    ("sparse", "topk", "num_keys"), ("lowrank", "svd", "rank"),
])  # fmt: skip
def test_oracles_are_the_registered_ones(family, name, option):
    x, ref = make("peaked", False)
    method = numattn.get(name, **{option: 6})
    theirs = head_errors(attend(method, x), ref, dtype=torch.float64)
    ours = oracle(family, 6, ref)
    assert ours is not None
    for a, b in zip(theirs, ours, strict=True):
        assert a.weights == pytest.approx(b.weights, rel=1e-6)
        assert a.output == pytest.approx(b.output, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_budget_is_exact(family):
    _, ref = make("gaussian", True)
    for units in (80, 1000):
        found = oracle(family, units, ref)
        if family == "exact":
            assert found is None
            continue
        assert found is not None
        for error in found:
            assert error.tv is not None
            assert max(error.output, error.tv.max, error.weights or 0.0) < 1e-10


def test_oracle_errors_fall_with_the_budget():
    _, ref = make("local", False)
    for family in ("sparse", "lowrank"):
        found = [oracle(family, units, ref) for units in (1, 4, 16, 64)]
        weights = [f[0].weights for f in found if f is not None and f[0].weights is not None]
        assert weights == sorted(weights, reverse=True)
        assert len(set(weights)) == 4


@pytest.mark.parametrize("kind", ["gaussian", "lowrank", "peaked", "sink"])
def test_nothing_beats_its_oracle(kind):
    x, ref = make(kind, False)
    features = head_errors(attend(Performer(num_features=12), x), ref, dtype=torch.float64)
    keys = uniform_keys(ref, 12)
    for method, family in ((features, "kernel"), (keys, "sparse")):
        best = oracle(family, 12, ref)
        assert best is not None
        for a, b in zip(method, best, strict=True):
            eta = efficiency(a, b, family)
            assert eta is not None
            assert 0 <= eta <= 1 + 1e-9


# --- keys that rows share out ---------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mass", [1e-20, 1e-3, 0.5, 0.95, 1.0])
def test_top_p_keeps_the_fewest_keys_that_hold_the_mass(mass, causal):
    x, ref = make("clustered", causal)
    found = top_p_oracle(mass, ref)
    for head, w in enumerate(dense(x)[0]):
        counts, distances = [], []
        for row in w:
            held = row.sort(descending=True).values.cumsum(0)
            short = int((held < mass - 1e-12).sum())  # so many keys hold too little
            counts.append(min(short + 1, int((row > 0).sum())))
            distances.append(1 - held[counts[-1] - 1].item())
        assert found.keys[head] == sum(counts) / 80
        assert found.dropped[head] == pytest.approx(sum(distances) / 80, abs=1e-12)
        tv = found.errors[head].tv
        assert tv is not None
        assert tv.max == pytest.approx(max(distances), abs=1e-12)
        assert tv.max <= 1 - mass + 1e-12


def test_top_p_refuses_what_is_no_share():
    _, ref = make("gaussian", False)
    for mass in (0.0, -0.5, 1.5, math.nan):
        with pytest.raises(ValueError, match="mass must be above 0 and at most 1; got"):
            top_p_oracle(mass, ref)


def most_mass(w: Tensor, budget: int) -> float:
    """Most mass of `budget` entries of w, at least one in each row: over all numbers by row."""
    best = torch.full((budget + 1,), -torch.inf, dtype=w.dtype)  # by entries taken so far
    best[0] = 0.0
    for row in w:
        held = row[row > 0].sort(descending=True).values.cumsum(0)
        after = torch.full_like(best, -torch.inf)
        for count, mass in enumerate(held, 1):
            if count <= budget:
                after[count:] = torch.maximum(after[count:], best[:-count] + mass)
        best = after
    return best.max().item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("units", [1, 3, 9, 30])
@pytest.mark.parametrize("block", [1 << 21, 200])  # all rows at once, two or three at a time
def test_no_division_of_keys_keeps_more_than_the_threshold(block, units, causal, monkeypatch):
    monkeypatch.setattr(errors, "_BLOCK", block)
    x = synthetic("peaked", 30, heads=2, head_dim=8, is_causal=causal)
    x = replace(x, q=x.q / 4)
    ref = reference(x)
    found = threshold_oracle(units, ref)
    for head, w in enumerate(dense(x)[0]):
        visible = int((w > 0).sum())
        assert found.keys[head] == min(units, visible / 30)
        best = most_mass(w, units * 30)
        assert found.dropped[head] == pytest.approx(1 - best / 30, abs=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "clustered", "local", "peaked", "sink"])
def test_the_threshold_drops_no_more_than_as_many_keys_in_every_row(kind):
    x, ref = make(kind, False)
    for units in (1, 4, 16):
        of_rows = 1 - dense(x).topk(units, -1).values.sum(-1).mean(-1)  # mean of total variation
        for mine, rows in zip(threshold_oracle(units, ref).dropped, of_rows[0], strict=True):
            assert mine <= rows + 1e-12


@pytest.mark.parametrize("block", [1 << 21, 200])
def test_of_equal_weights_the_threshold_keeps_as_many_as_are_due(block, monkeypatch):
    monkeypatch.setattr(errors, "_BLOCK", block)
    x = synthetic("gaussian", 30, heads=2)
    found = threshold_oracle(4, reference(replace(x, k=torch.zeros_like(x.k))))
    assert found.keys == [4.0, 4.0]
    assert found.dropped == pytest.approx([1 - 4 / 30] * 2)


# --- long inputs ----------------------------------------------------------------------------


def test_beyond_what_is_factored_there_is_no_low_rank_oracle(monkeypatch):
    _, ref = make("gaussian", False)
    monkeypatch.setattr(matrices, "_WHOLE", 79)
    monkeypatch.setattr(matrices, "_HIGHEST", 5)
    assert oracle("lowrank", 6, ref) is None
    assert oracle("lowrank", 5, ref) is not None
    assert error_curve("lowrank", ref) is None
    monkeypatch.setattr(matrices, "_LONGEST", 79)
    assert oracle("kernel", 4, ref) is None
    assert oracle("sparse", 5, ref) is not None


@pytest.mark.parametrize("causal", [False, True])
def test_without_the_weights_of_truncations_the_other_errors_are_the_same(causal, monkeypatch):
    _, ref = make("clustered", causal)
    for rank in (3, 20):
        want = oracle("lowrank", rank, ref)
        monkeypatch.setattr(matrices, "_WEIGHTS", 79)
        got = oracle("lowrank", rank, make("clustered", causal)[1])
        monkeypatch.undo()
        assert want is not None
        assert got is not None
        for a, b in zip(want, got, strict=True):
            assert b.tv is None
            assert b.negative is None
            assert a.weights == pytest.approx(b.weights, rel=1e-9)
            assert a.output == pytest.approx(b.output, rel=1e-9)
            assert a.hull.max == pytest.approx(b.hull.max, rel=1e-9)
            assert efficiency(a, b, "lowrank") == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(("name", "causal"), [
    ("gaussian", False), ("clustered", True), ("local", False), ("peaked", False),
    ("smollm2-long", True), ("minilm", False),
])  # fmt: skip
def test_the_sketch_is_as_near_as_theory_says(name, causal, monkeypatch):
    r"""With the start G, P = U S V^T and V^T G = [G1; G2], rows up to and after the rank r,

    tail^2 <= error^2 <= tail^2 + |S2^5 G2 G1^+ S1^-4|_F^2 :

    the range found holds that of U [I; F], F = S2^5 G2 G1^+ S1^-5, for two power steps.
    """
    x = load(name, length=512).to(torch.float64)
    x = replace(x, q=x.q[:, :1], k=x.k[:, :1], v=x.v[:, :1], is_causal=causal)
    starts = []
    draw = matrices.draw
    monkeypatch.setattr(matrices, "draw", lambda *a: starts.append(draw(*a)) or starts[-1])
    monkeypatch.setattr(matrices, "_WHOLE", 256)
    monkeypatch.setattr(matrices, "_WEIGHTS", 256)
    ref = reference(x)
    w = dense(x)[0, 0]
    _, s, vt = torch.linalg.svd(w)
    for rank in (6, 48, 64):
        found = oracle("lowrank", rank, ref)
        curve = error_curve("lowrank", ref, rank)
        assert found is not None
        assert curve is not None
        assert curve[0, 0, rank].item() == found[0].weights
        turned = vt @ starts[-1]
        t = s / s[rank]
        beside = torch.linalg.pinv(turned[:rank]) * t[:rank] ** -4
        more = s[rank] * (t[rank:, None] ** 5 * (turned[rank:] @ beside)).norm()
        tail, norm = s[rank:].norm(), s.norm()
        error = found[0].weights * norm
        assert error >= tail * (1 - 1e-9)
        assert error <= tail.hypot(more) * (1 + 1e-9)
        assert error < curve[0, 0, rank - 1] * norm
        u = matrices.factors(rank, ref).vectors[0, 0, :, :rank]
        torch.testing.assert_close(u.mT @ u, torch.eye(rank).double(), rtol=0, atol=1e-12)
        assert ((w - u @ (u.mT @ w)).norm() / norm).item() == pytest.approx(found[0].weights)
        out = w @ x.v[0, 0]
        missed = ((out - u @ (u.mT @ out)).norm() / out.norm()).item()
        assert missed == pytest.approx(found[0].output)
    assert len(starts) == 2  # ranks 48 and 64 share one


# --- curves and overheads -------------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 21])  # the median of an even and of an odd number of rows
@pytest.mark.parametrize("causal", [False, True])
def test_the_curve_of_keys_is_the_median_of_what_top_k_drops(length, causal):
    x = synthetic("clustered", length, heads=2, head_dim=8, is_causal=causal)
    ref = reference(x)
    curve = error_curve("sparse", ref)
    assert curve is not None
    assert curve.shape == (1, 2, length + 1)
    assert (curve.diff() <= 0).all()
    for units in range(1, length + 1):
        dropped = 1 - dense(x)[0].topk(units, -1).values.sum(-1)
        median = dropped.quantile(0.5, -1, interpolation="higher")
        torch.testing.assert_close(curve[0, :, units], median, rtol=0, atol=1e-12)
        found = oracle("sparse", units, ref)
        assert found is not None
        for error, point in zip(found, curve[0, :, units].tolist(), strict=True):
            assert error.tv is not None
            assert error.tv.median == pytest.approx(point, abs=1e-14)
    assert (curve[..., 0] - 1).abs().max() < 1e-12


def test_the_curve_of_ranks_is_the_tail_of_singular_values():
    x, ref = make("lowrank", False)
    curve = error_curve("latent", ref)
    assert curve is not None
    s = torch.linalg.svdvals(dense(x))
    for rank in (0, 1, 5, 40, 79):
        tail = s[..., rank:].norm(dim=-1) / s.norm(dim=-1)
        # Vectors are those of the squared matrix: a tail below 1e-8 is not the least one.
        torch.testing.assert_close(curve[..., rank], tail, rtol=1e-9, atol=1e-8)
    assert (curve[..., 80] == 0).all()
    shorter = error_curve("kernel", ref, 5)
    assert shorter is not None
    assert torch.equal(shorter, curve[..., :6])


def test_curves_refuse():
    _, ref = make("gaussian", False)
    assert error_curve("exact", ref) is None
    with pytest.raises(ValueError, match="error_curve: family must be one of"):
        error_curve("spars", ref)
    with pytest.raises(ValueError, match="error_curve: units must be at most N = 80; got 81"):
        error_curve("sparse", ref, 81)
    with pytest.raises(ValueError, match="error_curve: units must be a positive integer"):
        error_curve("kernel", ref, 0)


def in_its_norm(e: HeadError, family: str) -> float:
    if family == "sparse":
        assert e.tv is not None
        return e.tv.median
    assert e.weights is not None
    return e.weights


@pytest.mark.parametrize("kind", ["gaussian", "clustered", "sink"])
def test_the_overhead_is_found_by_trying_every_budget(kind):
    x = synthetic(kind, 40, heads=2, head_dim=8)
    ref = reference(x)
    features = head_errors(attend(Performer(num_features=12), x), ref, dtype=torch.float64)
    for mine, family in ((features, "kernel"), (uniform_keys(ref, 12), "sparse")):
        tried = [oracle(family, units, ref) for units in range(1, 41)]
        for head, e in enumerate(mine):
            value = in_its_norm(e, family)
            least = next(
                units
                for units, found in enumerate(tried, 1)
                if found is not None and in_its_norm(found[head], family) <= value
            )
            assert budget_overhead(e, family, 12, ref) == 12 / least
            assert 12 / least >= 1
            assert budget_overhead(e, family, 120, ref) == 120 / least


@pytest.mark.parametrize("family", ["sparse", "tensor"])
def test_oracles_have_no_overhead(family):
    _, ref = make("gaussian", False)
    for units in (1, 7, 50):
        for e in oracle(family, units, ref) or []:
            assert budget_overhead(e, family, units, ref) == 1


def test_the_overhead_at_the_edges():
    _, ref = make("gaussian", False)
    curve = error_curve("kernel", ref)
    assert curve is not None
    at = [replace(error(0.5, point), head=1) for point in curve[0, 1].tolist()]
    assert budget_overhead(at[0], "kernel", 9, ref) == 9  # a zero matrix is as good; so is rank 1
    assert budget_overhead(at[30], "kernel", 9, ref) == 9 / 30  # as good as rank 30
    assert budget_overhead(error(0.5, 0.0), "kernel", 160, ref) == 2
    assert budget_overhead(error(None, None), "kernel", 9, ref) is None
    assert budget_overhead(error(None, 0.1), "sparse", 9, ref) is None
    assert budget_overhead(error(0.5, math.nan), "kernel", 9, ref) is None
    assert budget_overhead(at[3], "exact", 9, ref) is None
    apart = (curve[0, 1, 8] - curve[0, 1, 9]).item()
    rounding = error(0.0, apart)
    assert budget_overhead(at[9], "kernel", 9, ref, rounding) == pytest.approx(9 / 8)
    with pytest.raises(ValueError, match="budget_overhead: units must be a positive integer"):
        budget_overhead(at[3], "kernel", 0, ref)


def test_the_overhead_of_long_inputs_needs_no_more_than_the_rank(monkeypatch):
    _, ref = make("gaussian", False)
    curve = error_curve("kernel", ref)
    assert curve is not None
    at = [error(0.5, point) for point in curve[0, 0].tolist()]
    _, again = make("gaussian", False)
    monkeypatch.setattr(matrices, "_WHOLE", 79)
    monkeypatch.setattr(matrices, "_HIGHEST", 20)
    overhead = budget_overhead(at[5], "kernel", 16, again)
    assert overhead is not None
    assert 16 / 6 <= overhead <= 16 / 5  # the sketch's errors are the least ones, or a little more
    assert budget_overhead(at[60], "kernel", 16, again) is None
    assert budget_overhead(at[5], "kernel", 21, again) is None


# --- every method ---------------------------------------------------------------------------

# Info.bounded: no more keys in a row, no higher rank of the weights, than Cost.units says. Methods
# without weights (not linear in value) and with another target than softmax have no oracle.
BOUNDED = [
    record.info.name
    for record in numattn.methods()
    if record.info.bounded
    and record.info.linear_in_value
    and record.info.approximates == "softmax"
    and record.info.judge != "exact"
]


@pytest.fixture(scope="module", params=["minilm", "clustered"])
def bidirectional(request):
    x = load(request.param, length=128).to(torch.float64)
    x = replace(x, q=x.q[:, :2], k=x.k[:, :2], v=x.v[:, :2])
    assert not x.is_causal
    return x, reference(x)


@pytest.mark.parametrize("budget", [8, 40])
@pytest.mark.parametrize("name", BOUNDED)
def test_no_method_beats_its_oracle(name, budget, bidirectional):
    x, ref = bidirectional
    method = numattn.get(name)
    if method.info.budget is not None:
        method = method.with_budget(budget)
    family, units = method.info.judge, method.cost(x.shape).units
    best = oracle(family, units, ref)
    assert best is not None
    mine = head_errors(attend(method, x), ref, dtype=torch.float64)
    for a, b in zip(mine, best, strict=True):
        if in_its_norm(b, family) < 1e-6:
            continue  # the oracle is exact to rounding: nothing to beat
        eta, omega = efficiency(a, b, family), budget_overhead(a, family, units, ref)
        assert eta is not None
        assert omega is not None
        assert eta <= 1 + 1e-6
        assert omega >= 1


def test_every_family_with_a_bound_is_asked():
    judged = {numattn.get(name).info.judge for name in BOUNDED}
    assert {"sparse", "lowrank", "kernel"} <= judged


# --- Kronecker products ---------------------------------------------------------------------


def rearranged(w: Tensor, rows: int, columns: int) -> Tensor:
    """Block (i, k) of the grid's rows as a row, entry by entry."""
    out = w.new_zeros(rows**2, columns**2)
    for i in range(rows):
        for k in range(rows):
            for j in range(columns):
                for m in range(columns):
                    out[i * rows + k, j * columns + m] = w[i * columns + j, k * columns + m]
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_kronecker_oracle_is_the_tail_of_the_rearranged_weights(causal):
    x = synthetic("clustered", 24, heads=2, head_dim=8, is_causal=causal)
    x = replace(x, k=x.k[:, :1], v=x.v[:, :1])
    ref = reference(x)
    for terms in (1, 3, 12, 16):
        found = kronecker_oracle(terms, (4, 6), ref)
        assert kronecker_oracle(terms, (4, 6), ref) is found
        for head, w in enumerate(dense(x)[0]):
            s = torch.linalg.svdvals(rearranged(w, 4, 6))
            tail = (s[terms:].norm() / s.norm()).item()
            assert found[head].weights == pytest.approx(tail, rel=1e-9, abs=1e-12)
    assert max(e.output for e in kronecker_oracle(99, (4, 6), ref)) < 1e-12


def test_weights_of_logits_that_add_up_over_modes_are_one_product():
    a, b = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)
    q, k = (
        torch.cat([a[i][:, None].expand(4, 6, 3), b[i][None].expand(4, 6, 3)], -1).flatten(0, 1)
        for i in range(2)
    )
    x = synthetic("gaussian", 24, heads=1, head_dim=6).to(torch.float64)
    found = kronecker_oracle(1, (4, 6), reference(replace(x, q=q[None, None], k=k[None, None])))
    assert found[0].output < 1e-12
    assert found[0].weights is not None
    assert found[0].weights < 1e-12


def test_kronecker_attention_is_no_nearer_to_the_patches_of_an_image():
    """A vision transformer's 37 x 37 patches, without the class token, which has no place."""
    x = load("dino").to(torch.float64)
    x = replace(x, q=x.q[:, :1, 1:], k=x.k[:, :1, 1:], v=x.v[:, :1, 1:])
    ref = reference(x)
    assert not x.is_causal
    for form in ("product", "sum"):

        def on_grid(q, k, v, form=form):
            q, k, v = (t.unflatten(2, (37, 37)) for t in (q, k, v))
            return kronecker_attention(q, k, v, form=form, scale=x.scale).flatten(2, 3)

        terms = kronecker_cost((37, 37), heads=1, head_dim=64, form=form).units
        mine = head_errors(on_grid, ref, dtype=torch.float64)[0].weights
        best = kronecker_oracle(terms, (37, 37), ref)[0].weights
        assert best <= mine
        assert best < 1


def test_kronecker_oracle_refuses():
    _, ref = make("gaussian", False)
    with pytest.raises(ValueError, match=r"multiply to the 80 tokens of gaussian; got \(8, 9\)"):
        kronecker_oracle(1, (8, 9), ref)
    with pytest.raises(ValueError, match="kronecker_oracle: terms must be a positive integer"):
        kronecker_oracle(0, (8, 10), ref)
    with pytest.raises(numattn.Unsupported, match="two factors; got 3"):
        kronecker_oracle(1, (8, 5, 2), ref)


# --- what is kept, what is refused ----------------------------------------------------------


def test_factors_are_kept(monkeypatch):
    _, ref = make("gaussian", False)
    first = oracle("kernel", 5, ref)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    assert oracle("kernel", 5, ref) is first
    assert oracle("lowrank", 5, ref) is first
    assert oracle("kernel", 6, ref) != first


def test_oracle_refuses():
    _, ref = make("gaussian", False)
    with pytest.raises(ValueError, match=r"family.*'spars'"):
        oracle("spars", 5, ref)
    with pytest.raises(ValueError, match="units"):
        oracle("sparse", 0, ref)
    with pytest.raises(ValueError, match="units must be a positive integer"):
        block_oracle(0, ref)


def error(tv: float | None, weights: float | None) -> HeadError:
    any_spread = Spread(0.5, 0.5, 0.5)
    spread = None if tv is None else Spread(tv, 9.0, 9.0)
    return HeadError(0, 0.5, any_spread, any_spread, spread, weights, None)


def test_efficiency_takes_the_norm_of_the_family():
    method, best = error(0.4, 0.5), error(0.1, 0.4)
    assert efficiency(method, best, "sparse") == pytest.approx(0.25)
    for family in LOW_RANK:
        assert efficiency(method, best, family) == pytest.approx(0.8)


def test_efficiency_at_the_edges():
    zero, some = error(0.0, 0.0), error(0.1, 0.1)
    assert efficiency(zero, zero, "sparse") == 1
    assert efficiency(some, zero, "sparse") == 0
    assert efficiency(zero, some, "kernel") == math.inf
    assert efficiency(error(None, None), some, "sparse") is None
    assert efficiency(some, error(None, None), "kernel") is None
    rounding = error(1e-7, 1e-7)
    assert efficiency(rounding, error(1e-15, 1e-15), "kernel") == pytest.approx(1e-8)
    assert efficiency(error(5e-8, 5e-8), error(1e-15, 1e-15), "kernel", rounding) == 1
    assert efficiency(some, zero, "sparse", rounding) == pytest.approx(1e-6)
