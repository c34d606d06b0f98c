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
    head_errors,
    oracle,
    reference,
    synthetic,
    uniform_keys,
)
from numattn.testing.inputs import reference_weights

LOW_RANK = [f for f in FAMILIES if f not in ("exact", "sparse")]


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


def test_factors_are_kept(monkeypatch):
    _, ref = make("gaussian", False)
    first = oracle("kernel", 5, ref)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    assert oracle("kernel", 5, ref) is first
    assert oracle("lowrank", 5, ref) is first
    assert oracle("kernel", 6, ref) != first


def test_long_weights_are_not_factored(monkeypatch):
    module = import_module("numattn.measure.oracle")  # the package's attribute is the function
    _, ref = make("gaussian", False)
    monkeypatch.setattr(module, "_LONGEST", 79)
    assert oracle("lowrank", 5, ref) is None
    assert oracle("sparse", 5, ref) is not None


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
