"""What is said of a head is what its logits and features are."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from numattn.core.info import FAMILIES
from numattn.core.linalg import kmeans
from numattn.measure import SYNTHETIC, diagnose, load, synthetic
from numattn.measure.diagnose import (
    CLUSTER,
    COLUMNS,
    DIFFUSE,
    DISTANCES,
    LOW_RANK,
    SPARSE,
    THRESHOLDS,
    TRY_FIRST,
    WINDOW_MASS,
    diagnosis_table,
)


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


def rows_of(x, head, count):
    """Rows of exact weights at even distances as lists of floats, the definition, key by key."""
    q, k = x.q[0, head].tolist(), x.k[0, head // x.group].tolist()
    found = []
    for i in [n * x.length // count for n in range(count)]:
        seen = range(i + 1 if x.is_causal else x.length)
        logits = [x.scale * math.fsum(a * b for a, b in zip(q[i], k[j], strict=True)) for j in seen]
        powers = [math.exp(s - max(logits)) for s in logits]
        found.append((i, [p / math.fsum(powers) for p in powers]))
    return found


def keys_for(row, share):
    """The least number of keys that hold a share of a row."""
    return next(
        n for n in range(1, len(row) + 1) if math.fsum(sorted(row)[-n:]) >= share * (1 - 1e-12)
    )


def is_least_rank(rank, matrix, tolerance):
    """Whether a truncated decomposition of this rank is near enough, and one of less is not."""
    u, sigma, v = np.linalg.svd(matrix, full_matrices=False)
    left = [np.linalg.norm(matrix - (u[:, :r] * sigma[:r]) @ v[:r]) for r in (rank, rank - 1)]
    return left[0] <= tolerance * np.linalg.norm(matrix) < left[1]


def lower_median(values):
    return sorted(values)[(len(values) - 1) // 2]


@pytest.mark.parametrize("count", [65, 20])
@pytest.mark.parametrize("name", ["minilm", "smollm2-heavy"])
def test_what_is_said_of_the_weights_is_the_definition(name, count):
    x = load(name).crop(65).to(torch.float64)
    for found in diagnose(x, max_tokens=count):
        rows = rows_of(x, found.head, count)
        assert (found.num_rows, found.num_keys) == (count, 65)

        def mean(value, rows=rows):
            return pytest.approx(math.fsum(value(i, row) for i, row in rows) / count, rel=1e-9)

        def mass(row, kept):
            return math.fsum(p for j, p in enumerate(row) if kept(j))

        for share in (90, 95, 99):
            needed = [keys_for(row, share / 100) for _, row in rows]
            assert getattr(found, f"keys_{share}") == lower_median(needed)
            parts = [n / len(row) for n, (_, row) in zip(needed, rows, strict=True)]
            assert getattr(found, f"share_{share}") == pytest.approx(lower_median(parts), rel=1e-12)
        assert found.entropy == mean(lambda i, row: -math.fsum(p * math.log(p) for p in row))
        assert found.effective_support == pytest.approx(math.exp(found.entropy))
        for d, within in zip(DISTANCES, found.locality, strict=True):
            assert within == mean(lambda i, row, d=d: mass(row, lambda j: abs(i - j) <= d))
        near = mean(lambda i, row: mass(row, lambda j: abs(i - j) <= 65 // 16 or j < 4))
        assert found.window_mass == near
        sinks = [math.fsum(row[:4]) for i, row in rows if i >= 4]
        assert found.sink_mass == pytest.approx(np.mean(sinks), rel=1e-9)

        matrix = np.array([row + [0.0] * (65 - len(row)) for _, row in rows])
        assert found.heaviest_key == matrix.sum(0).argmax()
        assert found.heaviest_mass == pytest.approx(matrix.sum(0).max() / count, rel=1e-9)
        assert is_least_rank(found.rank_1, matrix, 0.01)
        assert is_least_rank(found.rank_10, matrix, 0.1)
        far = matrix[[i >= 32 for i, _ in rows], :32]
        assert is_least_rank(found.far_rank_10, far, 0.1)
        share = found.far_rank_10 / len(far) if x.is_causal else found.rank_10 / count
        assert found.rank_share == pytest.approx(share)


@pytest.mark.parametrize("name", ["minilm", "smollm2-heavy"])
def test_cluster_variances_are_those_of_the_logits(name):
    x = load(name).crop(70).to(torch.float64)
    labels = kmeans(x.k, 70 // CLUSTER, 3)[0]
    for found in diagnose(x):
        label = labels[found.head // x.group]
        logits = x.q[0, found.head] @ x.k[0, found.head // x.group].mT * x.scale
        inside = torch.zeros(70, dtype=torch.float64)
        for c in label.unique():
            part = logits[:, label == c]
            inside += (part - part.mean(1, keepdim=True)).square().sum(1) / 70
        total = logits.var(1, correction=0).mean().item()
        assert found.cluster_variance == pytest.approx(inside.mean().item(), rel=1e-9)
        assert found.cluster_share == pytest.approx(inside.mean().item() / total, rel=1e-9)


def test_copies_compress_and_one_cluster_does_not():
    x = synthetic("gaussian", 16 * CLUSTER, heads=1).to(torch.float64)
    copies = replace(x, k=x.k[:, :, ::CLUSTER].repeat_interleave(CLUSTER, 2))
    assert diagnose(copies)[0].cluster_share == pytest.approx(0, abs=1e-12)
    assert diagnose(x)[0].cluster_share > 1 / 3  # 16 centers differ in 15 of 64 directions
    assert diagnose(x.crop(CLUSTER))[0].cluster_share == pytest.approx(1)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_logits_are_told_exactly(causal):
    x = replace(synthetic("gaussian", 64, heads=1, is_causal=causal), k=torch.zeros(1, 1, 64, 64))
    found = diagnose(x)[0]
    sizes = [i + 1 if causal else 64 for i in range(64)]
    assert found.keys_90 == lower_median([math.ceil(0.9 * n) for n in sizes])
    assert found.entropy == pytest.approx(np.mean(np.log(sizes)))
    assert (found.logit_range, found.cluster_variance, found.cluster_share) == (0, 0, 0)
    assert found.heaviest_key == 0
    assert found.heaviest_mass == pytest.approx(np.mean([1 / n for n in sizes]))
    if not causal:
        assert (found.rank_1, found.rank_10) == (1, 1)
        assert found.sink_mass == pytest.approx(4 / 64)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_short_inputs_have_a_verdict(length, causal):
    found = diagnose(synthetic("gaussian", length, heads=1, is_causal=causal))[0]
    assert found.verdict in TRY_FIRST
    assert 1 <= found.keys_90 <= found.keys_95 <= found.keys_99 <= length
    assert found.rank_10 <= found.rank_1 <= length
    assert found.locality[-1] == pytest.approx(1)
    json.dumps(found.to_dict())


BY_CONSTRUCTION = {
    "gaussian": "diffuse",  # logits of variance 1, in all 64 directions
    "clustered": "low rank",  # 16 clusters: rank 16, while a query's cluster has N / 16 keys
    "lowrank": "low rank",  # smooth functions of 4 numbers; diffuse too, but this is cheaper
    "local": "local + sink",
    "sink": "local + sink",
    "peaked": "sparse",  # one far key a query
}


@pytest.mark.parametrize("kind", SYNTHETIC)
@pytest.mark.parametrize("causal", [False, True])
def test_the_verdict_on_a_synthetic_input_is_its_construction(kind, causal):
    for seed in (0, 1):
        for found in diagnose(synthetic(kind, 512, heads=2, is_causal=causal, seed=seed)):
            assert found.verdict == BY_CONSTRUCTION[kind], str(found)


def test_large_logits_without_structure_are_hard():
    """Normal logits of deviation s = 2.5 hold 90 % of e^logit above s - 1.28: 11 % of the keys.

    And the powers of the logits do not stop at a rank: with 64 dimensions, the third has 45,760.
    """
    for found in diagnose(scaled(synthetic("gaussian", 512, heads=2), 2.5**0.5)):
        assert found.verdict == "hard"
        assert found.try_first == "exact"


def test_the_first_threshold_that_holds_decides():
    head = diagnose(synthetic("gaussian", 64, heads=1))[0]
    head = replace(head, log_keys=10.0)
    at = {
        "window_mass": WINDOW_MASS,
        "share_90": SPARSE,
        "rank_share": LOW_RANK,
        "logit_range": DIFFUSE * 10,
    }
    missed = {
        "window_mass": WINDOW_MASS - 0.01,
        "share_90": SPARSE + 0.01,
        "rank_share": LOW_RANK + 0.01,
        "logit_range": at["logit_range"] + 0.01,
    }
    now = {**at}
    for name, (verdict, family) in zip([*at, None], TRY_FIRST.items(), strict=True):
        found = replace(head, **now)
        assert (found.verdict, found.try_first) == (verdict, family)
        assert family in FAMILIES
        if name:
            now[name] = missed[name]


def every_verdict():
    """A head of each verdict, with numbers as long as they get."""
    head = replace(
        diagnose(synthetic("gaussian", 64, heads=1))[0],
        head=127,
        num_keys=131072,
        num_rows=1024,
        log_keys=math.log(131072),
        keys_90=131072,
        keys_99=131072,
        entropy=math.log(131072),
        rank_1=1024,
        rank_10=1024,
        far_rank_10=512,
        square=2000.0,
    )
    none = {"window_mass": 0.0, "share_90": 1.0, "rank_share": 1.0, "logit_range": 1234.5}
    for change in (
        {"window_mass": 1.0, "sink_mass": 1.0},
        {"share_90": 0.01},
        {"rank_share": 0.1},
        {"logit_range": 11.1},
        {},
    ):
        yield replace(head, **{**none, **change})


def test_a_head_is_one_line():
    heads = list(every_verdict())
    assert [head.verdict for head in heads] == list(TRY_FIRST)
    for head in heads:
        line = str(head)
        assert line.startswith(f"head 127: {head.verdict}, try {head.try_first}: ")
        assert len(line) <= 150
        assert "\n" not in line


def test_the_table_fits_a_terminal_and_its_columns_are_explained():
    heads = [replace(head, batch=1) for head in every_verdict()]
    table = diagnosis_table([*every_verdict(), *heads], "a title")
    lines = table.splitlines()
    assert lines[0] == "a title"
    assert max(map(len, lines)) <= 100
    for head in heads:
        assert any(line.startswith("1:127 ") and f" {head.verdict} " in line for line in lines)
    header = lines[2].split()
    explained = " ".join(COLUMNS) + " " + " ".join(COLUMNS.values())
    for name in header:
        assert name in explained, name
    for verdict in TRY_FIRST:
        assert f"{verdict}:" in THRESHOLDS


def test_a_head_as_a_dict_is_json_with_its_verdict():
    head = diagnose(load("minilm").crop(64))[0]
    again = json.loads(json.dumps(head.to_dict()))
    assert again["verdict"] == head.verdict
    assert again["locality"] == list(head.locality)
    assert again["entropy"] == head.entropy
