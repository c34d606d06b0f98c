import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from scipy.stats import binom
from torch import Tensor

import numattn
from numattn.measure import (
    QKV,
    attend,
    head_errors,
    implied_weights,
    load,
    reference,
    synthetic,
)
from numattn.measure.estimate import (
    CAP_HULL,
    CAP_TV,
    Interval,
    RowErrors,
    draw_rows,
    estimate_errors,
    exact_rows,
    frobenius_norm,
    mean_interval,
    ratio_interval,
    spectral_norm,
)
from numattn.measure.matvec import (
    error_operator,
    exact_operator,
    implied_rows,
    method_operator,
    transposed,
)
from numattn.testing.inputs import make_qkv, reference_weights

LENGTH = 512
REPEATS = 400
SYNTHETIC = ("clustered", "local", "peaked")
BUNDLED = ("smollm2-heavy", "minilm", "dino")  # grouped and causal; bidirectional; bidirectional
INPUTS = (*SYNTHETIC, *BUNDLED)
METHODS = ("window", "nystrom", "performer", "hyper")
OPTIONS = {"window": {"window": 64}, "hyper": {"block_size": 64}}


@cache
def source(name: str) -> QKV:
    if name in SYNTHETIC:
        return synthetic(name, LENGTH, heads=1)
    return load(name, length=LENGTH)


@cache
def exact(name: str):
    return reference(source(name))


def method(name: str):
    return numattn.get(name, **OPTIONS.get(name, {}))


@cache
def dense(name: str, of: str):
    """Exact and implied weights, and the output of a method, float64."""
    ref = exact(name)
    fn = attend(method(of), ref.x)
    with torch.no_grad():
        return ref.weights(), implied_weights(fn, ref.x), fn(ref.x.q, ref.x.k, ref.x.v)


def row_numbers(name: str, of: str, head: int = 0) -> dict[str, Tensor]:
    """The errors of all rows of a head, from what is dense."""
    ref = exact(name)
    p, p_hat, out = (t.flatten(0, 1)[head] for t in dense(name, of))
    o = ref.out.flatten(0, 1)[head]
    v = ref.x.v.flatten(0, 1)[head // ref.x.group]
    distance, radius = (out - o).norm(dim=-1), (v - v.mean(0)).norm(dim=-1).max()
    return {
        "tv": (p_hat - p).abs().sum(-1) / 2,
        "hull": distance / radius,
        "rows": distance / o.norm(dim=-1),
        "squares": distance.square(),
        "norms": o.norm(dim=-1).square(),
        "top": (radius + (out - v.mean(0)).norm(dim=-1).max()) ** 2,
        "top_norm": v.norm(dim=-1).max() ** 2,
        "total": out.square().sum(-1).mean(),
    }


def enough(covered: int, nominal: float = 0.95) -> bool:
    """Whether so few of the repetitions would be covered with probability 1e-3 at least."""
    return binom.cdf(covered, REPEATS, nominal) >= 1e-3


# --- sampled rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("of", METHODS)
@pytest.mark.parametrize("name", INPUTS)
def test_sampled_errors_are_those_of_the_dense_matrices(name, of):
    x = exact(name).x
    fn = attend(method(of), x)
    found = estimate_errors(fn, x, rows=60, dtype=torch.float64, confidence=0.9999)
    wanted = head_errors(fn, exact(name), dtype=torch.float64)
    assert [e.head for e in found] == [e.head for e in wanted]
    for estimate, error in zip(found, wanted, strict=True):
        numbers = row_numbers(name, of, error.head)
        for what in ("tv", "hull", "rows"):
            sampled = getattr(estimate, what)
            at = sampled.sample.rows
            torch.testing.assert_close(sampled.values, numbers[what][at], rtol=1e-8, atol=1e-9)
            mean = numbers[what].clamp(max=sampled.cap).mean().item()
            assert sampled.mean.low <= mean <= sampled.mean.high
        assert estimate.output.low <= error.output <= estimate.output.high


@pytest.mark.parametrize("name", ["local", "smollm2-heavy", "minilm"])
def test_all_rows_make_it_exact(name):
    x = exact(name).x
    fn = attend(method("window"), x)
    found = estimate_errors(fn, x, rows=LENGTH + 1, dtype=torch.float64)
    for estimate, error in zip(found, head_errors(fn, exact(name)), strict=True):
        numbers = row_numbers(name, "window", error.head)
        assert estimate.output.exact
        assert estimate.output.error == 0
        assert estimate.output.value == pytest.approx(error.output, rel=1e-4)
        for what in ("tv", "hull"):
            sampled = getattr(estimate, what)
            mean = numbers[what].mean().item()
            assert sampled.mean.exact
            assert sampled.mean.value == pytest.approx(mean, rel=1e-9, abs=1e-12)
            middle = numbers[what].median().item() + 1e-9
            share = sampled.share_above(middle)
            above = (numbers[what] > middle).double().mean().item()
            assert (share.value, share.low, share.high) == pytest.approx((above,) * 3)
            tenth = sampled.exceeded_by(0.1)
            assert (numbers[what] > tenth + 1e-9).double().mean() <= 0.1
            assert (numbers[what] > tenth - 1e-9).double().mean() > 0.1 - 1 / LENGTH


@pytest.mark.parametrize("of", METHODS)
@pytest.mark.parametrize("name", ["local", *BUNDLED])
def test_adjoint_rows_are_rows_of_the_implied_weights(name, of):
    x = exact(name).x
    rows = torch.tensor([0, 1, 130, 131, 511])
    found = implied_rows(attend(method(of), x), x, rows)
    assert (found - dense(name, of)[1][:, :, rows]).abs().max() < 1e-10


def test_exact_rows_are_softmax_by_the_definition():
    for causal in (False, True):
        q, k, v = make_qkv(11, batch=2, heads=2, group=2, head_dim=4, value_dim=3)
        x = QKV("", q, k, v, causal, 0.8)
        rows = torch.tensor([7, 0, 10])
        weights, out = exact_rows(x, rows)
        heads = [t.repeat_interleave(2, 1) for t in (k, v)]
        wanted = reference_weights(q, heads[0], is_causal=causal, scale=0.8)
        torch.testing.assert_close(weights, wanted[:, :, rows])
        torch.testing.assert_close(out, (wanted @ heads[1])[:, :, rows])


def test_output_does_not_depend_on_the_blocks(monkeypatch):
    x = exact("smollm2-heavy").x
    fn = attend(method("hyper"), x)
    once = estimate_errors(fn, x, rows=40, dtype=torch.float64)
    monkeypatch.setattr("numattn.measure.estimate._BLOCK", 3 * LENGTH * 7)
    blocks = estimate_errors(fn, x, rows=40, dtype=torch.float64)
    for a, b in zip(once, blocks, strict=True):
        torch.testing.assert_close(a.tv.values, b.tv.values)
        torch.testing.assert_close(a.hull.values, b.hull.values)


def test_the_draw_is_the_seed_alone():
    x = source("local")
    rows = []
    for seed, of in ((3, 0), (3, 1), (4, 0)):
        fn = attend(method("performer"), x, seed=of)
        rows.append(estimate_errors(fn, x, rows=30, seed=seed, with_weights=False)[0].hull)
    assert torch.equal(rows[0].sample.rows, rows[1].sample.rows)
    assert not torch.equal(rows[0].values, rows[1].values)
    assert not torch.equal(rows[0].sample.rows, rows[2].sample.rows)


@pytest.mark.parametrize(
    ("length", "rows"), [(1000, 100), (512, 100), (513, 37), (20, 19), (7, 5), (9, 1), (40, 40)]
)
def test_strata_have_equal_numbers_and_every_row_an_equal_share(length, rows):
    sample = draw_rows(length, rows, seed=5)
    assert sample.rows.unique().numel() == rows == sum(sample.counts)
    assert sum(sample.sizes) == length
    assert max(sample.counts) - min(sample.counts) <= 1
    assert sample.weights.sum().item() == pytest.approx(1)
    assert sample.imbalance >= 1 - 1e-12
    edges = np.cumsum([0, *sample.sizes])
    for stratum, count in enumerate(sample.counts):
        inside = (sample.rows >= edges[stratum]) & (sample.rows < edges[stratum + 1])
        assert inside.sum() == count
    # A row stands for N / n others, but for the rounding of two edges.
    assert sample.imbalance <= 1 + 2 * rows / length / min(sample.counts) + 1e-12


def test_what_differs_between_strata_only_is_known_without_error():
    sample = draw_rows(1000, 50)
    x = (sample.rows // 100).double()
    assert sample.mean(x) == pytest.approx(4.5)
    assert sample.standard_error(x) == 0


def test_estimates_are_unbiased_and_their_standard_errors_true():
    numbers = row_numbers("smollm2-heavy", "window")["tv"]
    samples = [draw_rows(LENGTH, 250, seed) for seed in range(REPEATS)]
    means = np.array([s.mean(numbers[s.rows]) for s in samples])
    spread = means.std(ddof=1)
    assert abs(means.mean() - numbers.mean().item()) < 4 * spread / math.sqrt(REPEATS)
    errors = np.array([s.standard_error(numbers[s.rows]) for s in samples])
    # The spread of 400 means is itself off by 1 / sqrt(800) of its size.
    assert math.sqrt((errors**2).mean()) == pytest.approx(spread, rel=4 / math.sqrt(2 * REPEATS))


def test_standard_errors_of_outputs_are_true():
    numbers = row_numbers("smollm2-heavy", "window")
    known = {
        "tops": (numbers["top"].item(), numbers["top_norm"].item()),
        "total": numbers["total"].item(),
        "confidence": 0.95,
    }
    found = []
    for seed in range(REPEATS):
        sample = draw_rows(LENGTH, 100, seed)
        at = sample.rows
        found.append(ratio_interval(numbers["squares"][at], numbers["norms"][at], sample, **known))
    spread = np.array([f.value for f in found]).std(ddof=1)
    errors = np.array([f.error for f in found])
    # As above, and the ratio is linear in the means of 100 rows to a tenth.
    near = 4 / math.sqrt(2 * REPEATS) + 0.1
    assert math.sqrt((errors**2).mean()) == pytest.approx(spread, rel=near)


# --- intervals ------------------------------------------------------------------------------


CASES = [
    ("clustered", "nystrom"),
    ("local", "window"),
    ("peaked", "hyper"),
    ("smollm2-heavy", "window"),
    ("minilm", "performer"),
    ("dino", "nystrom"),
]


@pytest.mark.parametrize(("name", "of"), CASES)
def test_intervals_cover(name, of):
    numbers = row_numbers(name, of)
    capped = {
        what: (numbers[what].clamp(max=cap), cap)
        for what, cap in (("tv", CAP_TV), ("hull", CAP_HULL))
    }
    output = math.sqrt(numbers["squares"].mean() / numbers["norms"].mean())
    tops = (numbers["top"].item(), numbers["top_norm"].item())
    threshold = numbers["tv"].quantile(0.93).item()
    share = (numbers["tv"] > threshold).double().mean().item()
    covered = dict.fromkeys(("tv", "hull", "output", "share", "exceeded"), 0)
    for seed in range(REPEATS):
        sample = draw_rows(LENGTH, 100, seed)
        at = sample.rows
        for what, (x, cap) in capped.items():
            found = mean_interval(x[at], sample, cap, 0.95)
            covered[what] += found.low <= x.mean().item() <= found.high
        found = ratio_interval(
            numbers["squares"][at],
            numbers["norms"][at],
            sample,
            tops=tops,
            total=numbers["total"].item(),
            confidence=0.95,
        )
        covered["output"] += found.low <= output <= found.high
        errors = RowErrors(numbers["tv"][at], sample, CAP_TV, 0.95)
        covered["share"] += share <= errors.share_above(threshold).high
        limit = errors.exceeded_by(0.05)
        covered["exceeded"] += (numbers["tv"] > limit).double().mean().item() <= 0.05
    for what, count in covered.items():
        assert enough(count), what


def test_no_row_goes_beyond_what_bounds_the_output():
    for name, of in CASES:
        numbers = row_numbers(name, of)
        assert numbers["squares"].max() <= numbers["top"] * (1 + 1e-12)
        assert numbers["norms"].max() <= numbers["top_norm"] * (1 + 1e-12)


@pytest.mark.parametrize("total", [1.45, 3.5, 6.63])
def test_the_interval_of_an_output_holds_every_ratio_that_is_possible(total):
    """Of errors d and norms o in their intervals with | |O_hat| - o | <= d, and no wider."""
    sample = draw_rows(20000, 2000)
    source = torch.Generator().manual_seed(0)
    squares, norms = torch.rand(2, 2000, generator=source).double()
    norms = 3 + norms
    found = ratio_interval(squares, norms, sample, tops=(1.0, 4.0), total=total, confidence=0.9)
    a, b = (mean_interval(x, sample, top, 0.95) for x, top in ((squares, 1.0), (norms, 4.0)))
    d = np.sqrt(np.linspace(a.low, a.high, 2001))[:, None]
    o = np.sqrt(np.linspace(b.low, b.high, 2001))
    possible = (d / o)[np.abs(math.sqrt(total) - o) <= d]
    assert found.low - 1e-12 <= possible.min() <= found.low * 1.02
    assert found.high * 0.98 <= possible.max() <= found.high + 1e-12


def test_bounds_of_half_the_width_fail():
    """The bound of a share is not so wide that the test of its coverage could not see it."""
    # A large population in no order: the hardest case.
    x = torch.randperm(10000, generator=torch.Generator().manual_seed(0)).double()
    threshold = 9499.5  # exceeded by 5 %
    whole = half = 0
    for seed in range(REPEATS):
        sample = draw_rows(10000, 100, seed)
        found = RowErrors(x[sample.rows], sample, 1.0, 0.95).share_above(threshold)
        whole += found.high >= 0.05
        half += (found.value + found.high) / 2 >= 0.05
    assert enough(whole)
    assert not enough(half)


def test_the_interval_of_a_mean_solves_its_inequality():
    n, confidence = 200, 0.9
    sample = draw_rows(1000, n)  # every row stands for five
    x = torch.rand(n, generator=torch.Generator().manual_seed(0)).double() * 3
    found = mean_interval(x, sample, 3.0, confidence)
    log = math.log(3 / (1 - confidence))
    mean, variance = (x / 3).mean().item(), (x / 3).var(correction=0).item()
    e = (found.high - found.low) / 6
    assert (found.low + found.high) / 6 == pytest.approx(mean)
    c = math.sqrt(2 * log / n)
    assert e == pytest.approx(c * math.sqrt(variance + e**2) + c**2 + log / (3 * n))
    first_order = c * math.sqrt(variance) + 7 * log / (3 * n)  # Maurer and Pontil's
    assert first_order < e < first_order / (1 - c)


def test_a_mean_stays_between_zero_and_its_top():
    sample = draw_rows(1000, 50)
    for x in (torch.zeros(50).double(), torch.full((50,), 2.0).double()):
        found = mean_interval(x, sample, 2.0, 0.95)
        assert 0 <= found.low <= found.value <= found.high <= 2
    assert mean_interval(x[:5], draw_rows(1000, 5), 2.0, 0.95).low == 0  # too few to say anything


@pytest.mark.parametrize(
    ("rows", "confidence", "k"), [(299, 0.95, 1), (473, 0.95, 2), (459, 0.99, 1)]
)
def test_so_many_rows_and_no_fewer_serve_for_one_percent(rows, confidence, k):
    """1 - 0.99^299 = 0.9505: without a failure among 299 rows at most 1 % fail."""
    for n in (rows, rows - 1):
        sample = draw_rows(n * 100, n)
        values = torch.arange(n).double()
        errors = RowErrors(values, sample, math.inf, confidence)
        assert (errors.exceeded_by(0.01) == n - k) == (n == rows)
    none = 1 - (1 - confidence) ** (1 / rows)
    sample = draw_rows(rows * 100, rows)
    errors = RowErrors(torch.zeros(rows).double(), sample, 1.0, confidence)
    assert errors.share_above(0.5).high == pytest.approx(none)
    assert errors.share_above(-1.0).high == 1.0


def test_unequal_shares_of_the_rows_widen_the_bound():
    """Rows that stand for more than N / n could hide as much more."""
    sample = draw_rows(25, 20)  # two rows of 2 or of 3, where 2.5 would be even
    errors = RowErrors(torch.zeros(20).double(), sample, 1.0, 0.95)
    assert errors.share_above(0.5).high == pytest.approx(3 / 2.5 * (1 - 0.05 ** (1 / 20)))


def test_a_single_row_without_excess_bounds_nothing():
    values = torch.ones(50).double()
    for few, bounded in ((1, False), (2, True)):
        values[:few] = 0.0
        errors = RowErrors(values, draw_rows(5000, 50), 1.0, 0.95)
        assert (errors.share_above(0.5).high < 1) == bounded


def test_too_few_rows_bound_nothing():
    errors = RowErrors(torch.zeros(20).double(), draw_rows(2000, 20), 1.0, 0.95)
    assert errors.exceeded_by(0.01) == math.inf


def test_capped_rows_are_counted():
    sample = draw_rows(1000, 40)
    values = torch.linspace(0, 3, 40).double()
    errors = RowErrors(values, sample, 2.0, 0.95)
    assert errors.capped == (values > 2).sum()
    assert errors.mean.value == pytest.approx(values.clamp(max=2).mean().item())


def test_a_method_without_error_has_none():
    x = exact("minilm").x
    found = estimate_errors(attend(numattn.Exact(), x), x, rows=50, dtype=torch.float64)
    for e in found:
        assert e.tv.values.max() < 1e-12
        assert e.output.value < 1e-12
        assert e.output.low == 0
        assert e.hull.exceeded_by(0.1) < 1e-12


def test_a_method_that_overflows_has_infinite_errors():
    x = source("local")
    for bad in (math.inf, math.nan):
        fn = lambda q, k, v, bad=bad: v + bad  # noqa: E731
        found = estimate_errors(fn, x, rows=50, with_weights=False)[0]
        assert found.output.value == math.inf
        assert found.hull.capped == 50
        assert found.hull.mean.value == pytest.approx(CAP_HULL)


def test_weights_are_left_out_where_there_are_none():
    x = source("local")
    fn = attend(method("window"), x)
    for flags in ({"with_weights": False}, {"linear_in_value": False}):
        assert estimate_errors(fn, x, rows=20, **flags)[0].tv is None


def test_malformed_arguments_are_refused():
    x = source("local")
    fn = attend(method("window"), x)
    with pytest.raises(ValueError, match=r"confidence must be from 0\.75"):
        estimate_errors(fn, x, confidence=0.7)
    with pytest.raises(ValueError, match="rows must be a positive integer"):
        estimate_errors(fn, x, rows=0)
    with pytest.raises(ValueError, match="with_weights=False"):
        estimate_errors(lambda q, k, v: fn(q, k, v.detach()), x, rows=20)
    errors = RowErrors(torch.zeros(20).double(), draw_rows(2000, 20), 1.0, 0.95)
    with pytest.raises(ValueError, match="share must be between 0 and 1"):
        errors.exceeded_by(1.0)
    eye = aslinearoperator(np.eye(3))
    for norm in (frobenius_norm, spectral_norm):
        with pytest.raises(ValueError, match="confidence must be between"):
            norm(eye, confidence=1.0)
        with pytest.raises(ValueError, match="probes must be"):
            norm(eye, probes=0)
    with pytest.raises(ValueError, match="head must be between 0 and 0"):
        exact_operator(x, 1)


# --- products -------------------------------------------------------------------------------


@pytest.mark.parametrize("of", METHODS)
@pytest.mark.parametrize("name", ["local", "smollm2-heavy", "minilm"])
def test_operators_multiply_by_the_dense_matrices(name, of):
    x = exact(name).x
    head = x.q.shape[1] - 1
    p, p_hat, _ = (t.flatten(0, 1)[head].numpy() for t in dense(name, of))
    fn = attend(method(of), x)
    g = np.random.default_rng(0).standard_normal((LENGTH, 3))
    for operator, matrix in (
        (exact_operator(x, head), p),
        (method_operator(fn, x, head), p_hat),
        (error_operator(fn, x, head), p_hat - p),
    ):
        assert np.abs(operator @ g - matrix @ g).max() < 1e-9
        assert np.abs(operator.rmatmat(g) - matrix.T @ g).max() < 1e-9
        assert np.abs(operator @ g[:, 0] - matrix @ g[:, 0]).max() < 1e-9
        assert np.abs(operator.rmatvec(g[:, 0]) - matrix.T @ g[:, 0]).max() < 1e-9


def test_operators_choose_their_head_of_a_batch(monkeypatch):
    monkeypatch.setattr("numattn.measure.matvec.WIDTH", 2)  # several calls
    q, k, v = make_qkv(9, batch=2, heads=2, group=2, head_dim=4, value_dim=3)
    x = QKV("", q, k, v, True, 0.8)
    fn = attend(numattn.Exact(), x)
    wanted = reference(x).weights().flatten(0, 1).numpy()
    for head, matrix in enumerate(wanted):
        for operator in (exact_operator(x, head), method_operator(fn, x, head)):
            assert np.abs(operator @ np.eye(9) - matrix).max() < 1e-12
            assert np.abs(operator.rmatmat(np.eye(9)) - matrix.T).max() < 1e-12


def test_transpose_adds_up_the_heads_of_a_group():
    x = exact("smollm2-heavy").x
    y = torch.randn(1, 3, LENGTH, 2, generator=torch.Generator().manual_seed(0)).double()
    found = transposed(attend(method("window"), x), x, y)
    wanted = (dense("smollm2-heavy", "window")[1].mT @ y).sum(1, keepdim=True)
    torch.testing.assert_close(found, wanted)


# --- norms ----------------------------------------------------------------------------------


@cache
def error_matrix(name: str, of: str) -> np.ndarray:
    p, p_hat, _ = (t.flatten(0, 1)[0].numpy() for t in dense(name, of))
    return p_hat - p


@cache
def matrix(kind: str) -> np.ndarray:
    if kind == "two":  # half of the probes of rank one vanish: the hardest lower tail
        return np.outer(np.ones(8), [1.0, 1, 0, 0, 0, 0, 0, 0])
    if kind == "one":  # nearly chi-squared with b degrees of freedom
        return np.outer(np.ones(3), np.ones(300))
    return error_matrix(kind, dict(CASES)[kind])


@pytest.mark.parametrize("kind", ["local", "peaked", "minilm", "smollm2-heavy", "one", "two"])
def test_frobenius_norms_are_covered_and_their_errors_true(kind):
    e = matrix(kind)
    true, operator = np.linalg.norm(e), aslinearoperator(e)
    found = [frobenius_norm(operator, seed=seed) for seed in range(REPEATS)]
    assert enough(sum(f.low <= true <= f.high for f in found))
    gram = e.T @ e
    np.fill_diagonal(gram, 0)  # signs have squares without variance
    theory = math.sqrt(2 / 64) * np.linalg.norm(gram) / true  # of T over |E|, then of its root
    values = np.array([f.value for f in found])
    deviation = math.sqrt(2 * REPEATS)
    assert (values**2).mean() == pytest.approx(true**2, abs=4 * theory * true / math.sqrt(REPEATS))
    # The fourth moment of T adds to the deviation of its spread where one singular value rules.
    assert (values**2).std() / true == pytest.approx(theory, rel=8 / deviation)
    errors = np.array([2 * f.error * f.value for f in found])
    assert math.sqrt((errors**2).mean()) / true == pytest.approx(theory, rel=8 / deviation)


def test_half_of_the_interval_of_a_frobenius_norm_does_not_cover():
    """Of rank one, an interval of a quarter of the width fails the test of coverage."""
    e = matrix("one")
    true, operator = np.linalg.norm(e), aslinearoperator(e)
    found = [frobenius_norm(operator, seed=seed) for seed in range(REPEATS)]
    quarter = [
        f.value - (f.value - f.low) / 4 <= true <= f.value + (f.high - f.value) / 4 for f in found
    ]
    assert not enough(sum(quarter))


def test_few_probes_have_no_upper_bound():
    operator = aslinearoperator(matrix("one"))
    assert frobenius_norm(operator, probes=20).high == math.inf
    assert math.isfinite(frobenius_norm(operator, probes=23).high)  # 6 ln 40 = 22.1


@pytest.mark.parametrize(("kind", "power"), [("local", 0), ("minilm", 2), ("one", 0), ("one", 2)])
def test_spectral_norms_are_covered(kind, power):
    e = matrix(kind)[:128, :128]
    true, operator = np.linalg.norm(e, 2), aslinearoperator(e)
    found = [spectral_norm(operator, power=power, seed=seed) for seed in range(REPEATS)]
    assert all(f.low <= true * (1 + 1e-12) for f in found)
    assert min(f.low for f in found) >= true * (1 - 1e-3)
    assert enough(sum(f.high >= true for f in found))


def test_the_upper_bound_of_a_spectral_norm_is_as_sharp_as_its_confidence():
    """Of rank one it fails as often as it says, so that anything less would fail more often."""
    e = matrix("one")
    true, operator = np.linalg.norm(e, 2), aslinearoperator(e)
    found = [spectral_norm(operator, power=0, probes=2, seed=seed) for seed in range(REPEATS)]
    # The Ritz value stands in where the bound fell below it, to rounding.
    covered = sum(f.high > true * (1 + 1e-9) for f in found)
    assert binom.cdf(covered, REPEATS, 0.95) >= 1e-3
    assert binom.sf(covered - 1, REPEATS, 0.95) >= 1e-3


def test_power_steps_sharpen_the_upper_bound():
    operator = aslinearoperator(matrix("minilm"))
    bounds = [spectral_norm(operator, power=q).high for q in range(4)]
    assert bounds == sorted(bounds, reverse=True)


def test_norms_of_operators_are_those_of_the_dense_matrices():
    x = exact("local").x
    operator = error_operator(attend(method("window"), x), x, 0)
    e = error_matrix("local", "window")
    assert frobenius_norm(operator, probes=16).low <= np.linalg.norm(e)
    found = spectral_norm(operator)
    assert found.value == pytest.approx(np.linalg.norm(e, 2), rel=1e-3)
    assert found.high >= found.value
    again = spectral_norm(operator)
    assert (again.value, again.high) == (found.value, found.high)


def test_no_error_has_no_norm():
    zero = aslinearoperator(np.zeros((5, 5)))
    assert spectral_norm(zero) == Interval(0.0, 0.0, 0.0)
    assert frobenius_norm(zero).value == 0
    one = aslinearoperator(np.full((1, 1), -2.0))  # too small for Lanczos
    assert spectral_norm(one).value == 2


def test_rounding_the_input_is_part_of_the_method():
    x = source("local")
    fn = attend(numattn.Exact(), x)
    coarse = replace(x, q=x.q.bfloat16().float())
    assert not torch.equal(coarse.q, x.q)
    found = [
        estimate_errors(fn, x, rows=50, dtype=d, with_weights=False)[0].output.value
        for d in (torch.bfloat16, torch.float32, torch.float64)
    ]
    assert found == sorted(found, reverse=True)
