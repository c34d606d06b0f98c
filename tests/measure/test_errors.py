import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import numattn
from numattn.core.info import Info
from numattn.core.method import Method
from numattn.kernel import Performer
from numattn.measure import (
    QKV,
    HeadError,
    Reference,
    Spread,
    attend,
    baselines,
    errors,
    head_errors,
    implied_weights,
    load,
    mean_of_values,
    noise_floor,
    reference,
    synthetic,
    uniform_keys,
)
from numattn.testing.inputs import make_qkv, reference_weights
from numattn.testing.inputs import reference as exact_output


def tiny(causal: bool, length: int = 7) -> QKV:
    """Two batch entries, two query heads to each of two key heads; E is not D."""
    q, k, v = make_qkv(length, batch=2, heads=2, group=2, head_dim=4, value_dim=3)
    return QKV("tiny", q, k, v, causal, 0.8)


def signed(x: QKV, seed: int = 0) -> Tensor:
    """Weights that are no distribution, (B, H, N, N)."""
    source = torch.Generator().manual_seed(seed)
    shape = (*x.q.shape[:3], x.length)
    return torch.randn(shape, generator=source, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_error_after_the_output_projection(causal):
    """Heads are added up: errors of two heads that cancel in the projection are none."""
    x = tiny(causal)
    heads, width = x.q.shape[1], x.v.shape[3]
    wo = torch.randn(5, heads * width, generator=torch.Generator().manual_seed(3)).double()
    w = signed(x)
    ref = reference(replace(x, wo=wo))
    found = head_errors(with_weights(w), ref, dtype=torch.float64)
    out = with_weights(w)(x.q, x.k, x.v)
    for b in range(x.q.shape[0]):
        error, exact = (
            sum(y[b, h] @ wo[:, h * width : (h + 1) * width].mT for h in range(heads))
            for y in (out - ref.out, ref.out)
        )
        for error_of_head in found[b * heads : (b + 1) * heads]:
            assert error_of_head.projected == pytest.approx((error.norm() / exact.norm()).item())
    assert head_errors(with_weights(w), reference(x))[0].projected is None
    same = torch.cat([wo[:, :width], -wo[:, :width], wo[:, 2 * width :]], 1)
    shift = torch.zeros_like(out)
    shift[:, :2] = 1.0  # of the first two heads alike
    moved = head_errors(
        lambda *_: ref.out + shift, reference(replace(x, wo=same)), with_weights=False
    )
    assert moved[0].output > 0.1
    assert moved[0].projected < 1e-12


def with_weights(w: Tensor):
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return w.to(v) @ v.repeat_interleave(w.shape[1] // v.shape[1], dim=1)

    return fn


def spread(numbers: list[float]) -> Spread:
    """The definition: of n sorted numbers, the one at q (n - 1), rounded up."""
    ordered = sorted(numbers)
    at = [ordered[math.ceil(q * (len(ordered) - 1) - 1e-9)] for q in (0.5, 0.95)]
    return Spread(*at, ordered[-1])


def by_the_definition(x: QKV, w: Tensor) -> list[HeadError]:
    """Loops over batch, heads, rows and keys."""
    found = []
    batch, heads, length, _ = x.q.shape
    for b, h in itertools.product(range(batch), range(heads)):
        q, k, v = x.q[b, h], x.k[b, h // x.group], x.v[b, h // x.group]
        radius = max((v[j] - v.mean(0)).norm().item() for j in range(length))
        rows, hull, tv, negative = [], [], [], []
        out = of = dw = p = 0.0
        for i in range(length):
            seen = range(i + 1) if x.is_causal else range(length)
            e = [
                math.exp(x.scale * (q[i] @ k[j]).item()) if j in seen else 0.0
                for j in range(length)
            ]
            exact = [t / sum(e) for t in e]
            o = sum(exact[j] * v[j] for j in range(length))
            d = sum(w[b, h, i, j] * v[j] for j in range(length)) - o
            rows.append((d.norm() / o.norm()).item())
            hull.append(d.norm().item() / radius)
            tv.append(sum(abs(w[b, h, i, j].item() - exact[j]) for j in range(length)) / 2)
            negative.append(sum(max(0.0, -w[b, h, i, j].item()) for j in range(length)))
            out, of = out + d.norm().item() ** 2, of + o.norm().item() ** 2
            dw += sum((w[b, h, i, j].item() - exact[j]) ** 2 for j in range(length))
            p += sum(t**2 for t in exact)
        found.append(
            HeadError(
                b * heads + h,
                math.sqrt(out / of),
                spread(rows),
                spread(hull),
                spread(tv),
                math.sqrt(dw / p),
                sum(negative) / length,
            )
        )
    return found


def numbers(error: HeadError) -> list[float]:
    spreads = [error.rows, error.hull, *([error.tv] if error.tv else [])]
    flat = [getattr(s, n) for s in spreads for n in ("median", "p95", "max")]
    return [error.head, error.output, *flat, *([error.weights, error.negative] if error.tv else [])]


def agree(found: list[HeadError], wanted: list[HeadError], tolerance: float = 1e-9) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=tolerance, abs=tolerance)


# --- reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_exact_attention(causal, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(errors, "_KEEP", 0)
        monkeypatch.setattr(errors, "_BLOCK", 100)  # several blocks, the last one shorter
    x = tiny(causal, 11)
    ref = reference(x.to(torch.float32))
    x = ref.x
    assert x.q.dtype == torch.float64
    call = {"is_causal": causal, "scale": x.scale}
    torch.testing.assert_close(ref.out, exact_output(x.q, x.k, x.v, **call))
    dense = reference_weights(x.q, x.k, **call)
    torch.testing.assert_close(ref.weights(), dense)
    part = ref.weights(slice(3, 9), slice(5, 8))
    torch.testing.assert_close(part, dense[:, :, 3:9, 5:8])
    torch.testing.assert_close(ref.norms, dense.norm(dim=(-2, -1)))
    logits = (x.q @ x.k.repeat_interleave(2, 1).mT) * x.scale
    torch.testing.assert_close(ref.lse, logits.where(dense > 0, -torch.inf).logsumexp(-1))
    assert len(ref.blocks()) == (1 if kept else 11)


# --- head_errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_columns", [512, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_by_the_definition(causal, max_columns):
    x = tiny(causal, 23)
    w = signed(x)
    found = head_errors(with_weights(w), reference(x), dtype=torch.float64, max_columns=max_columns)
    agree(found, by_the_definition(x, w))


@pytest.mark.parametrize("causal", [False, True])
def test_long_inputs_take_the_same_numbers_in_blocks(causal, monkeypatch):
    x = tiny(causal)
    w = signed(x)
    monkeypatch.setattr(errors, "_KEEP", 0)
    monkeypatch.setattr(errors, "_BLOCK", 200)
    ref = reference(x)
    agree(head_errors(with_weights(w), ref, dtype=torch.float64), by_the_definition(x, w))
    predicted = errors.weights_errors(lambda log, first: w[:, :, first : first + log.shape[2]], ref)
    agree(predicted, by_the_definition(x, w))


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_has_no_error(causal):
    x = tiny(causal, 40)
    for error in head_errors(attend(numattn.Exact(), x), reference(x), dtype=torch.float64):
        assert max(numbers(error)[1:]) < 1e-12
        assert error.negative == 0


def test_rounding_of_the_stored_input_is_no_error():
    x = load("smollm2-heavy", length=64)  # float16
    for error in head_errors(attend(numattn.Exact(), x), reference(x), dtype=torch.float64):
        assert error.output < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_dropped_mass_is_the_distance_of_top_k(causal):
    x = synthetic("clustered", 96, is_causal=causal, head_dim=16)
    w = reference_weights(x.q, x.k, is_causal=causal, scale=x.scale)
    dropped = 1 - w.topk(8, -1).values.sum(-1)
    found = head_errors(attend(numattn.get("topk", num_keys=8), x), reference(x))
    for head, error in enumerate(found):
        assert error.tv is not None
        assert error.tv.max == pytest.approx(dropped[0, head].max().item(), abs=1e-5)
        median = spread(dropped[0, head].tolist()).median
        assert error.tv.median == pytest.approx(median, abs=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_hull_is_bound_by_total_variation(causal):
    x = synthetic("peaked", 128, is_causal=causal, head_dim=16)
    ref = reference(x)
    w = signed(x).exp()
    for head, error in enumerate(
        head_errors(with_weights(w / w.sum(-1, keepdim=True)), ref, dtype=torch.float64)
    ):
        assert error.tv is not None
        assert error.hull.max <= 2 * error.tv.max, head
        assert error.negative == 0


def test_only_outputs_where_weights_do_not_exist_or_are_not_wanted():
    x = tiny(False)
    calls = []

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(v)
        return exact_output(q, k, v)

    for off in ({"linear_in_value": False}, {"with_weights": False}):
        calls.clear()
        found = head_errors(fn, reference(x), **off)
        assert len(calls) == 1
        assert calls[0].dtype == torch.float32
        assert all(e.tv is e.weights is e.negative is None for e in found)


def test_max_columns_is_the_width_of_values():
    x = tiny(False)
    widths = []

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        widths.append(v.shape[-1])
        return exact_output(q, k, v)

    head_errors(fn, reference(x), max_columns=3)
    assert widths == [3, 3, 3, 1]
    with pytest.raises(ValueError, match="max_columns"):
        head_errors(fn, reference(x), max_columns=0)


def test_overflow_is_seen():
    x = tiny(False)
    w = signed(x)
    w[0, 1, 2, 3] = math.inf
    w[1, 2, 0, 0] = math.nan
    found = head_errors(with_weights(w), reference(x), dtype=torch.float64)
    assert not math.isfinite(found[1].output)
    assert not math.isfinite(found[6].output)
    assert math.isnan(found[6].rows.max)
    assert all(math.isfinite(found[h].output) for h in (0, 2, 3, 4, 5, 7))


def test_zero_output_and_constant_values():
    x = tiny(False)
    zero = replace(x, v=torch.zeros_like(x.v))
    for error in head_errors(attend(numattn.Exact(), zero), reference(zero)):
        assert error.output == error.rows.max == error.hull.max == 0
    for error in head_errors(lambda q, k, v: v.repeat_interleave(2, 1) + 1, reference(zero)):
        assert error.output == error.rows.median == error.hull.median == math.inf


def test_gradients_are_not_kept():
    x = tiny(False)
    q = x.q.clone().requires_grad_()
    ref = reference(replace(x, q=q))
    assert not ref.out.requires_grad
    head_errors(attend(numattn.Exact(), x), ref)


# --- attend, implied weights ----------------------------------------------------------------


def test_calls_of_one_seed_share_one_draw():
    x = synthetic("gaussian", 40, heads=2, head_dim=8)
    state = torch.random.get_rng_state()
    first, second = (attend(Performer(num_features=8), x, seed=s) for s in (0, 1))
    a, b, c = first(x.q, x.k, x.v), first(x.q, x.k, x.v), second(x.q, x.k, x.v)
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
    assert torch.equal(state, torch.random.get_rng_state())
    w = implied_weights(first, x)
    assert w.shape == (1, 2, 40, 40)
    torch.testing.assert_close(w @ x.v, a)


def test_settings_of_the_input_are_used():
    x = tiny(True)
    out = attend(numattn.Exact(), x)(x.q, x.k, x.v)
    torch.testing.assert_close(out, exact_output(x.q, x.k, x.v, is_causal=True, scale=0.8))
    w = implied_weights(attend(numattn.Exact(), x), x)
    torch.testing.assert_close(w, reference_weights(x.q, x.k, is_causal=True, scale=0.8))


def test_given_tensors_are_used():
    x = synthetic("gaussian", 16, heads=2, head_dim=4)
    method = Performer(num_features=8)
    tensors = method.fit(x.q, x.k, x.v, generator=torch.Generator().manual_seed(5))
    a, b = (attend(method, x, seed=s, tensors=tensors)(x.q, x.k, x.v) for s in (0, 1))
    assert torch.equal(a, b)


@pytest.mark.parametrize("record", [m for m in numattn.methods() if not m.info.scaled])
def test_methods_without_logits_are_called_without_scale(record):
    x = synthetic("gaussian", 16, head_dim=8)
    assert attend(record(), x)(x.q, x.k, x.v).shape == x.v.shape


def shifted(query, key, value, *, center=None, attn_mask=None, is_causal=False, scale=None,
            enable_gqa=False):  # fmt: skip
    """Returns the tensor it was given."""
    if center is None:
        raise numattn.Unsupported("shifted: pass center.")
    return value + center


@dataclass(frozen=True)
class Shifted(Method):
    info: ClassVar[Info] = Info(
        name="shifted", family="kernel", summary="", paper="", complexity="", budget=None,
        approximates="own", causal="native", mask="none", fits_causal=True,
        state_tensors=("center",),
    )  # fmt: skip
    function = staticmethod(shifted)

    def fit(self, query, key, value=None, *, attn_mask=None, scale=None, enable_gqa=False,
            generator=None):  # fmt: skip
        assert generator is None
        assert key.dtype == torch.float32
        assert scale == 0.5
        return {"center": key.mean()}


def test_state_is_fitted_on_a_causal_input_once():
    x = replace(synthetic("gaussian", 16, head_dim=8, is_causal=True), scale=0.5)
    fn = attend(Shifted(), x.to(torch.float16))
    zero = torch.zeros_like(x.v)
    at = fn(x.q, x.k, zero)
    assert at.mean().item() == pytest.approx(x.k.half().float().mean().item(), abs=1e-6)
    assert torch.equal(at, fn(x.q, x.k + 1, zero))
    given = attend(Shifted(), x, tensors={"center": torch.tensor(2.0)})
    assert torch.equal(given(x.q, x.k, zero), zero + 2)
    with pytest.raises(numattn.Unsupported, match="center"):
        attend(Shifted(), replace(x, is_causal=False))(x.q, x.k, x.v)


# --- noise floor ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_noise_floor_is_below_the_bound_of_rounding(causal, dtype):
    x = synthetic("gaussian", 64, head_dim=16, is_causal=causal)
    u, single = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    # q and k are rounded to dtype, their products are summed in float32; tv <= tanh(range / 2).
    products = (x.q.abs().double() @ x.k.abs().double().mT).amax((-2, -1)) * x.scale
    moved = products * (2 * u + u**2 + (16 + 2) * single)
    # The weights are rounded, by a relative u each and a few roundings of exp and sum.
    tv = torch.tanh(moved / 2) + 2 * u + (64 + 4) * single
    biggest = x.v.norm(dim=-1).amax(-1)
    radius = (x.v - x.v.mean(2, keepdim=True)).norm(dim=-1).amax(-1)
    out = 2 * radius * tv + biggest * (3 * u + 64 * single)  # values, the weights' sum, output
    for head, error in enumerate(noise_floor(reference(x), dtype)):
        assert error.tv is not None
        assert error.tv.max <= tv[0, head]
        assert error.hull.max * radius[0, head] <= out[0, head]
        assert error.output > 0


def test_noise_floor_grows_with_the_roundoff():
    ref = reference(synthetic("gaussian", 64, head_dim=16))
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    floors = [noise_floor(ref, dtype)[0].output for dtype in types]
    assert floors == sorted(floors)
    assert len(set(floors)) == 4


# --- baselines ------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_mean_of_values_by_the_definition(causal):
    x = tiny(causal)
    w = torch.ones(2, 4, 7, 7, dtype=torch.float64)
    if causal:
        w = w.tril()
    w = w / w.sum(-1, keepdim=True)
    agree(mean_of_values(reference(x)), by_the_definition(x, w))


@pytest.mark.parametrize("causal", [False, True])
def test_uniform_keys_by_the_definition(causal):
    """For each key head some set of `units` keys gives the numbers of all its query heads."""
    x = tiny(causal)
    found = uniform_keys(reference(x), 2, seed=1)
    exact = reference_weights(x.q, x.k, is_causal=causal, scale=x.scale)
    matches: dict[tuple[int, ...], set[int]] = {}
    for keys in itertools.combinations(range(7), 2):
        w = torch.zeros_like(exact)
        w[..., list(keys)] = exact[..., list(keys)]
        alone = w.sum(-1) == 0
        assert causal or not alone.any()
        w = torch.where(alone[..., None], torch.eye(7, dtype=w.dtype), w)
        for a, b in zip(found, by_the_definition(x, w / w.sum(-1, keepdim=True)), strict=True):
            if numbers(a) == pytest.approx(numbers(b), rel=1e-9):
                matches.setdefault(keys, set()).add(a.head)
    pairs = [{h, h + 1} for h in (0, 2, 4, 6)]
    assert all(any(pair <= heads for heads in matches.values()) for pair in pairs)
    assert len(matches) > 1  # key heads draw for themselves


def test_uniform_keys_draw_by_seed_and_are_exact_with_all():
    ref = reference(tiny(True, 20))
    assert uniform_keys(ref, 4) == uniform_keys(ref, 4)
    assert uniform_keys(ref, 4) != uniform_keys(ref, 4, seed=1)
    for units in (20, 100):
        assert all(max(numbers(e)[1:]) < 1e-12 for e in uniform_keys(ref, units))
    with pytest.raises(ValueError, match="units"):
        uniform_keys(ref, 0)


def test_every_key_is_drawn_equally_often(monkeypatch):
    """One key of four, 400 draws of 4 heads: each count is binomial, within 4.5 sigma."""
    q, k = torch.zeros(1, 4, 4, 1), torch.zeros(1, 4, 4, 1)
    ref = reference(QKV("count", q, k, k, False, 1.0))
    seen: list[Tensor] = []

    def spy(predict: errors.Predict, ref: Reference) -> list[HeadError]:
        seen.append(predict(ref.log_weights(slice(0, 1)), 0)[0, :, 0])
        return []

    monkeypatch.setattr(baselines, "weights_errors", spy)
    for seed in range(400):
        uniform_keys(ref, 1, seed)
    counts = torch.stack(seen).sum((0, 1))
    assert counts.sum() == 1600
    assert ((counts - 400).abs() < 4.5 * math.sqrt(1600 * 0.25 * 0.75)).all()
