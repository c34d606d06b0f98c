"""What is said of a head is what its logits and features are."""

import math
from dataclasses import replace

import pytest
import torch

from numattn.measure import diagnose, load, synthetic


def scaled(x, factor):
    return replace(x, q=x.q * factor, k=x.k * factor)


def squares(x, head):
    """|x + y|^2 of the pairs that attend, from the definition, one head."""
    root = abs(x.scale) ** 0.5
    q, k = x.q[0, head].double() * root, x.k[0, head // x.group].double() * root
    found = (q[:, None] + k[None]).square().sum(-1)
    return found[torch.ones_like(found).tril().bool()] if x.is_causal else found.flatten()


@pytest.mark.parametrize("name", ["minilm", "smollm2-heavy"])
def test_squares_and_ranges_are_the_definitions(name):
    x = load(name).crop(65).to(torch.float64)
    for found in diagnose(x):
        values = squares(x, found.head)
        assert found.square_raw == pytest.approx(values.median().item(), rel=1e-12)
        logits = x.q[0, found.head] @ x.k[0, found.head // x.group].mT * x.scale
        spans = []
        for i, row in enumerate(logits):
            seen = row[: i + 1] if x.is_causal else row
            spans.append((seen.max() - seen.min()).item())
        assert found.logit_range == pytest.approx(sorted(spans)[32], rel=1e-9)
        assert found.log_keys == math.log(65)


def test_preconditioning_never_sees_a_shift_of_the_keys():
    x = load("minilm").crop(64).to(torch.float64)
    moved = replace(x, k=x.k + 3.0)
    for a, b in zip(diagnose(x), diagnose(moved), strict=True):
        assert b.square == pytest.approx(a.square, rel=1e-8)
        assert b.logit_range == pytest.approx(a.logit_range, rel=1e-8)
        assert abs(b.square_raw - a.square_raw) > 1


def test_hopeless_is_a_relative_variance_above_one_of_the_median_weight():
    x = synthetic("gaussian", 64, heads=1)
    last = -math.inf
    for factor in (0.1, 0.5, 1.0, 2.0):
        found = diagnose(scaled(x, factor))[0]
        needed = math.log10(math.expm1(found.square))
        assert found.log10_features_needed == pytest.approx(needed)
        assert found.log10_features_needed > last  # sharper heads need more
        last = found.log10_features_needed
    middle = diagnose(scaled(x, 0.5))[0]
    m = 10**middle.log10_features_needed
    for count in (max(math.floor(m / 1.1), 1), math.ceil(m * 1.1)):
        found = diagnose(scaled(x, 0.5), num_features=count)[0]
        assert found.random_features_hopeless == (count < m)
        assert ("hopeless" in str(found)) == (count < m)


@pytest.mark.parametrize("num_features", [8, 4096])
def test_the_verdict_holds_of_simulated_weights(num_features):
    """Unnormalised weights of 100 draws: the median one spreads by more than itself, or less."""
    x = scaled(synthetic("gaussian", 32, heads=1), 0.6).to(torch.float64)
    q, k = (y[0, 0] * x.scale**0.5 for y in (x.q, x.k))
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(100):
        omega = torch.randn(64, num_features, generator=generator, dtype=torch.float64)
        fq, fk = ((y @ omega - y.square().sum(1, keepdim=True) / 2).exp() for y in (q, k))
        ratios.append(fq @ fk.mT / num_features / (q @ k.mT).exp())
    spread = torch.stack(ratios).std(0).median()
    found = diagnose(x, num_features=num_features)[0]
    raw = math.expm1(found.square_raw) > num_features
    assert found.random_features_hopeless == raw == bool(spread > 1)


def test_sequences_and_heads_come_in_order():
    x = load("smollm2-heavy").crop(40).to(torch.float64)
    two = replace(
        x, q=torch.cat([x.q, x.q * 0.1]), k=x.k.repeat(2, 1, 1, 1), v=x.v.repeat(2, 1, 1, 1)
    )
    found = diagnose(two)
    heads = x.q.shape[1]
    assert [(d.batch, d.head) for d in found] == [(b, h) for b in (0, 1) for h in range(heads)]
    for calm, sharp in zip(found[heads:], found[:heads], strict=True):
        assert calm.logit_range == pytest.approx(0.1 * sharp.logit_range, rel=1e-5)


def test_a_sample_of_tokens_is_near_all_of_them():
    x = load("minilm")
    for some, every in zip(diagnose(x, max_tokens=128), diagnose(x), strict=True):
        assert some.square == pytest.approx(every.square, rel=0.1)


@pytest.mark.parametrize("option", ["num_features", "max_tokens"])
def test_a_budget_that_is_not_positive_is_named(option):
    with pytest.raises(ValueError, match=option):
        diagnose(synthetic("gaussian", 8), **{option: 0})
