from dataclasses import replace

import pytest
import torch
from fakes import Fake, FakeRandom

import numattn
from numattn.measure import attend, head_errors, load, reference, sweep, synthetic

X = load("smollm2-heavy", length=48)
PROSE = load("smollm2-heavy-prose")


def errors(method, x, sample):
    """What a method does on x with tensors that are fitted on the sample."""
    call = {"scale": sample.scale, "enable_gqa": sample.group > 1}
    y = sample.to(torch.float32)
    tensors = method.fit(y.q, y.k, y.v, **call)
    fn = attend(method, x.to(torch.float32), tensors=tensors)
    return [e.output for e in head_errors(fn, reference(x))]


def run(method, x, calibrate=None, **options):
    rows = sweep([method], None, [x], timing=False, calibrate=calibrate, **options)
    assert {row.reason for row in rows} == {""}
    assert len({row.calibrated_on for row in rows}) == 1
    return [row.output for row in rows], rows[0]


LOKI = numattn.get("loki", num_keys=8)
ROUTING = numattn.get("routing", num_clusters=4)


@pytest.mark.parametrize("method", [LOKI, ROUTING], ids=["loki", "routing"])
@pytest.mark.parametrize(
    ("calibrate", "sample", "name"),
    [
        (None, PROSE, "smollm2-heavy-prose"),
        ("other", PROSE, "smollm2-heavy-prose"),
        ("itself", X, ""),
        ("smollm2-local", load("smollm2-local"), "smollm2-local"),
        (replace(PROSE.crop(32), name="mine"), PROSE.crop(32), "mine"),
    ],
    ids=["default", "other", "itself", "name", "input"],
)
def test_causal_calls_take_tensors_from_where_they_are_told(method, calibrate, sample, name):
    found, row = run(method, X, calibrate)
    assert row.fitted
    assert row.calibrated_on == name
    assert found == errors(method, X, sample)


def test_samples_differ_in_what_they_fit():
    """Else the test above could not fail."""
    assert len({tuple(errors(LOKI, X, s)) for s in (PROSE, X, load("smollm2-local"))}) == 3


def test_without_another_text_it_is_the_input_and_the_row_says_so():
    x = load("smollm2-sink", length=48)
    found, row = run(LOKI, x)
    assert row.calibrated_on == ""
    assert found == errors(LOKI, x, x)


def test_an_input_of_another_model_under_the_name_is_not_calibrated_there():
    x = replace(synthetic("gaussian", 32, head_dim=16, is_causal=True), name=X.name)
    assert run(LOKI, x)[1].calibrated_on == ""


def test_bidirectional_calls_fit_for_themselves_unless_told():
    x = replace(X, is_causal=False)
    found, row = run(ROUTING, x)
    assert row.calibrated_on == ""
    alone = attend(ROUTING, x.to(torch.float32))
    assert found == [e.output for e in head_errors(alone, reference(x))]
    found, row = run(ROUTING, x, "other")
    assert row.calibrated_on == "smollm2-heavy-prose"
    assert found == errors(ROUTING, x, PROSE)


def test_with_half_every_method_is_measured_on_the_second_half():
    x = load("smollm2-heavy", length=49)
    q, k, v = (t[:, :, 24:] for t in (x.q, x.k, x.v))
    second = replace(x, q=q, k=k, v=v)
    found, row = run(LOKI, x, "half")
    assert (row.length, row.calibrated_on) == (25, "smollm2-heavy, first half")
    assert found == errors(LOKI, second, x.crop(24))
    found, row = run(numattn.Exact(), x, "half")
    assert (row.input, row.length, row.calibrated_on) == (x.name, 25, "")
    plain, same = run(numattn.Exact(), second)
    assert (found, row.digest) == (plain, same.digest)


def test_methods_without_fitted_tensors_are_not_called_calibrated():
    for method in (Fake(), FakeRandom(), numattn.get("performer", num_features=16)):
        assert run(method, X, "other")[1].calibrated_on == ""


def test_what_cannot_be_calibrated_on_is_said():
    with pytest.raises(ValueError, match="gaussian must have the heads of smollm2-heavy"):
        run(LOKI, X, synthetic("gaussian", 16))
    with pytest.raises(ValueError, match="no input is called"):
        run(LOKI, X, "prose")
    with pytest.raises(ValueError, match="smollm2-heavy has one token only"):
        run(LOKI, X.crop(1), "half")
    with pytest.raises(ValueError, match="two inputs are named"):  # both halves have 8 tokens
        sweep([LOKI], None, [X.crop(15), X.crop(16)], calibrate="half", timing=False)


def test_another_sample_measures_calibrated_methods_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    ran = []

    def tell(p):
        ran.extend([p.method] if p.method else [])

    for calibrate in ("other", "other", "itself"):
        call = {"out": path, "calibrate": calibrate, "timing": False, "progress": tell}
        rows = sweep([LOKI, numattn.Exact()], None, [X], **call)
        assert len(rows) == 6
    assert ran == ["loki", "exact", "loki"]
