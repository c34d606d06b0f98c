import gc
import json
import sys
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fakes import Fake, FakeFailing, FakeRandom, FakeRefusing, FakeTrained

import numattn
from numattn.core.cost import Shape
from numattn.measure import (
    attend,
    budget_overhead,
    head_errors,
    noise_floor,
    read_rows,
    reference,
    sweep,
    synthetic,
    uniform_keys,
)
from numattn.measure.bench import Truth
from numattn.measure.rows import RowsError
from numattn.measure.sweep import grid, select

X = synthetic("gaussian", 16, heads=2, head_dim=8)
Y = replace(synthetic("sink", 16, heads=2, head_dim=8), is_causal=True)


def shape(length):
    return Shape(1, 2, 1, length, length, 64, 64, True, 4)


class Watcher:
    """Collects what a sweep tells."""

    def __init__(self):
        self.ran, self.notes = [], []

    def __call__(self, p):
        if p.note:
            self.notes.append(p.note)
        elif p.method:
            self.ran.append((p.input, p.method, p.budget))


def run(methods, inputs=(X,), budgets=(2, 4), seeds=1, **options):
    watcher = Watcher()
    options = {"timing": False, **options}
    rows = sweep(methods, budgets, inputs, seeds, progress=watcher, **options)
    return rows, watcher


def test_a_row_per_head_with_known_errors():
    rows, _ = run([Fake], timing=True)
    assert [(r.budget, r.head) for r in rows] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    for row in rows:
        assert row.output == pytest.approx(1 / row.budget, rel=1e-4)
        assert row.tv_median == pytest.approx(1 / row.budget / 2, rel=1e-4)
        assert row.units == row.budget
        assert 0 < row.floor < 1e-5 < row.mean_baseline
        assert row.flops == row.exact_flops == 2 * 2 * 16**2 * (8 + 8)
        assert row.relative_flops == 1
        assert row.time_ratio > 0
        assert row.efficiency == pytest.approx(row.efficiency)  # not NaN
        assert (row.dtype, row.device, row.status) == ("float32", "cpu", "ok")
        assert row.numattn_version == numattn.__version__


def test_no_times_unless_wanted():
    rows, _ = run([Fake])
    assert {r.seconds for r in rows} == {None}


def test_random_methods_run_per_seed_and_others_once():
    rows, _ = run([Fake, FakeRandom], seeds=3, budgets=[4])
    assert Counter((r.method, r.seed) for r in rows if r.head == 0) == {
        ("fake", 0): 1,
        **{("fake-random", seed): 1 for seed in range(3)},
    }
    assert len({r.output for r in rows if r.method == "fake-random" and r.head == 0}) == 3


def test_default_budgets_and_a_record_s_own():
    assert [grid(Fake(), shape(n)) for n in (1024, 32, 9, 1)] == [[16, 64, 256], [16], [2], [1]]
    rows, _ = run([Fake], budgets=None)
    assert {r.budget for r in rows} == set(grid(Fake(), shape(16)))
    rows, _ = run([Fake(parts=3)], budgets=None)
    assert {r.budget for r in rows} == {3}
    rows, _ = run([numattn.Exact])
    assert {(r.budget, r.budget_option) for r in rows} == {(None, None)}


def test_unsupported_and_failing_methods_leave_a_row_and_the_sweep_goes_on():
    rows, _ = run([FakeRefusing, FakeFailing, Fake], inputs=[X, Y], budgets=[4])
    for x in (X, Y):
        refused, failed, *good = (r for r in rows if r.input == x.name)
        assert (refused.status, refused.head) == ("unsupported", None)
        assert "pass another" in refused.reason
        assert failed.status == "failed"
        assert failed.reason == "RuntimeError: the roof is on fire"
        assert [r.status for r in good] == ["ok", "ok"]


def test_default_budgets_are_not_dearer_than_twenty_times_exact_attention():
    for record in numattn.methods():
        if record.info.budget is None:
            continue
        for n in (512, 4096):
            found = grid(record(), shape(n))
            more = set(grid(Fake(), shape(n))) - set(found)
            exact = numattn.Exact().cost(shape(n)).flops
            cost = {b: record().with_budget(b).cost(shape(n)).flops / exact for b in more}
            assert all(x > 20 for x in cost.values())
            assert not (more and record.info.oracle)
    polysketch = numattn.get("polysketch")  # r^2 features
    assert max(grid(polysketch, shape(4096))) < 1024 == max(grid(Fake(), shape(4096)))


def test_all_leaves_out_what_needs_training(monkeypatch):
    module = sys.modules["numattn.measure.sweep"]  # the package has a function of the same name
    monkeypatch.setattr(module, "methods", lambda: [Fake, FakeTrained])
    records, left_out = select("all")
    assert records == [Fake()]
    assert left_out == ["fake-trained"]
    rows, watcher = run("all")
    assert {r.method for r in rows} == {"fake"}
    assert any("fake-trained" in note for note in watcher.notes)
    rows, _ = run([FakeTrained])
    assert {r.method for r in rows} == {"fake-trained"}


def test_every_registered_method_that_needs_no_training_is_in_all():
    records, left_out = select("all")
    assert {m.info.name for m in records} | set(left_out) == {
        m.info.name for m in numattn.methods()
    }


def test_oracles_are_not_timed_and_not_measured_again_for_it(tmp_path):
    out = tmp_path / "rows.jsonl"
    first, _ = run(["topk"], budgets=[4], out=out, timing=True)
    assert all(row.status == "ok" and row.seconds is None for row in first)
    _, watcher = run(["topk"], budgets=[4], out=out, timing=True)
    assert watcher.ran == []
    exact, _ = run(["exact"], timing=True)
    assert all(row.seconds is not None for row in exact)


def test_the_budget_that_the_oracle_needs_is_beside():
    x = synthetic("clustered", 96, heads=2)
    rows, _ = run(["window"], budgets=[16], inputs=[x])
    ref, method = reference(x), numattn.get("window", window=16)
    units = method.cost(x.shape).units
    floors = noise_floor(ref, torch.float32)
    for row, error in zip(rows, head_errors(attend(method, x), ref), strict=True):
        assert row.overhead == budget_overhead(error, "sparse", units, ref, floors[row.head])
        assert row.overhead > 1  # keys near in position are not those of the cluster


def test_bad_requests():
    with pytest.raises(KeyError, match="exacct"):
        run(["exacct"])
    with pytest.raises(ValueError, match="no input"):
        run([Fake], inputs=[])
    with pytest.raises(ValueError, match="two inputs are named 'gaussian'"):
        run([Fake], inputs=[X, X])
    with pytest.raises(ValueError, match="seeds must be positive"):
        run([Fake], seeds=0)
    with pytest.raises(ValueError, match="mode must be one of 'prefill', 'decode'; got 'encode'"):
        run([Fake], mode="encode")


def test_types_and_devices_are_told_apart_and_share_a_reference(monkeypatch):
    module = sys.modules["numattn.measure.references"]
    make, made = module.reference, []
    monkeypatch.setattr(module, "reference", lambda x: made.append(x.name) or make(x))
    kinds = [torch.float64, torch.float32, torch.bfloat16]
    rows, watcher = run([numattn.Exact], inputs=[X, Y], dtype=kinds, device=["cpu", "cpu"])
    assert made == ["gaussian", "sink"]
    assert len(watcher.ran) == 2 * 3
    assert len({row.unit for row in rows}) == 2 * 3
    names = ["float64", "float32", "bfloat16"]
    for x in (X, Y):
        floors = {r.dtype: r.floor for r in rows if r.input == x.name and r.head == 0}
        assert list(floors) == names
        assert floors["float64"] < 1e-14 < floors["float32"] < 1e-5 < floors["bfloat16"] < 0.1


@pytest.mark.parametrize("units", [1, 3, 15, 16, 40])
@pytest.mark.parametrize("x", [X, Y, replace(Y, k=Y.k[:, :1], v=Y.v[:, :1])], ids="xyg")
def test_the_uniform_baseline_is_that_of_the_baselines(x, units):
    truth = Truth(x, "cpu", None, None, print)
    want = uniform_keys(reference(x), units, seed=3)
    found = truth.uniform(units, 3)
    for a, b in zip(found, want, strict=True):
        assert a.output == pytest.approx(b.output, rel=1e-9, abs=1e-12)


def test_references_do_not_pile_up(monkeypatch):
    module = sys.modules["numattn.measure.references"]
    make, made, alive = module.reference, [], []

    def watch(x):
        gc.collect()
        alive.append(sum(ref() is not None for ref in made))
        ref = make(x)
        made.append(weakref.ref(ref))
        return ref

    monkeypatch.setattr(module, "reference", watch)
    run([Fake], inputs=[X, Y], budgets=[4])
    assert alive == [0, 0]


# --- the file ---------------------------------------------------------------------------------


def test_nothing_is_done_twice(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows, first = run([Fake], out=path)
    again, second = run([Fake], out=path)
    assert len(first.ran) == 2
    assert second.ran == []
    assert again == rows == read_rows(path)
    _, third = run([Fake, numattn.Exact], inputs=[X, Y], out=path)
    assert third.ran == [
        ("gaussian", "exact", None),
        ("sink", "fake", 2),
        ("sink", "fake", 4),
        ("sink", "exact", None),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"budgets": [8]},
        {"dtype": torch.float64},
        {"inputs": [X.crop(8)]},
        {"inputs": [replace(Y, name="gaussian")]},
        {"inputs": [replace(X, scale=1.0)]},
        {"timing": True},
    ],
    ids=["budget", "dtype", "length", "numbers", "scale", "timing"],
)
def test_what_changes_the_result_is_measured_anew(tmp_path, change):
    path = tmp_path / "rows.jsonl"
    run([Fake], budgets=[4], out=path)
    _, watcher = run([Fake], **{"budgets": [4], "out": path, **change})
    assert len(watcher.ran) == 1


def test_another_version_measures_anew_and_its_rows_replace_the_old(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    run([Fake], out=path)
    monkeypatch.setattr(numattn, "__version__", "99")
    _, watcher = run([Fake], out=path)
    assert len(watcher.ran) == 2
    assert {r.numattn_version for r in read_rows(path)} == {"99"}
    assert len(read_rows(path)) == 4


def test_failures_are_tried_again_and_refusals_are_not(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    run([FakeFailing, FakeRefusing], budgets=[4], out=path)
    monkeypatch.setattr(FakeFailing, "function", staticmethod(Fake.function))
    rows, watcher = run([FakeFailing, FakeRefusing], budgets=[4], out=path)
    assert [name for _, name, _ in watcher.ran] == ["fake-failing"]
    assert [r.status for r in rows] == ["ok", "ok", "unsupported"]
    assert sorted(r.status for r in read_rows(path)) == ["ok", "ok", "unsupported"]


@pytest.mark.parametrize("cut", [1, 30, "line"], ids=["newline", "characters", "a row of two"])
def test_a_torn_end_is_reported_and_measured_again(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    rows, _ = run([Fake], out=path)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -(last if cut == "line" else cut)])
    again, watcher = run([Fake], out=path)
    assert any(f"{path} ends in the middle" in note for note in watcher.notes)
    assert watcher.ran == [("gaussian", "fake", 4)]
    assert again == rows
    assert path.read_bytes() == whole


def test_a_torn_end_does_not_stop_reading(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows, _ = run([Fake], out=path)
    torn = path.read_bytes()[:-5]
    path.write_bytes(torn)
    with pytest.warns(UserWarning, match="ends in the middle"):
        assert read_rows(path) == rows[:2]
    assert path.read_bytes() == torn


@pytest.mark.parametrize("bad", ["{", "[1]", '{"method": "fake"}', "", "\x00\x00"])
def test_a_corrupt_line_in_the_middle_is_an_error_and_the_file_is_left_alone(tmp_path, bad):
    path = tmp_path / "rows.jsonl"
    run([Fake], out=path)
    lines = path.read_text().splitlines()
    lines[1] = bad
    path.write_text("\n".join(lines) + "\n")
    before = path.read_bytes()
    with pytest.raises(RowsError, match=r"rows\.jsonl, line 2 "):
        run([Fake], out=path)
    with pytest.raises(RowsError, match=r"rows\.jsonl, line 2 "):
        read_rows(path)
    assert path.read_bytes() == before


def test_a_missing_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    run([Fake], out=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    with pytest.raises(RowsError, match="line 2: the unit of work before it has 1 of 2 rows"):
        read_rows(path)


def test_an_empty_or_missing_file_has_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(RowsError, match="there is no such file"):
        read_rows(path)
    path.touch()
    with pytest.raises(RowsError, match="holds no rows"):
        read_rows(path)


def test_an_interrupted_sweep_keeps_what_was_done(tmp_path):
    path = tmp_path / "rows.jsonl"

    def stop(p):
        if p.budget == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([Fake], [2, 4], [X], out=path, timing=False, progress=stop)
    assert {r.budget for r in read_rows(path)} == {2}
    _, watcher = run([Fake], out=path)
    assert watcher.ran == [("gaussian", "fake", 4)]


def test_rows_are_flat_json(tmp_path):
    path = tmp_path / "rows.jsonl"
    run([Fake], budgets=[4], out=path)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert row.pop("options") == {"parts": 4}
        assert not any(isinstance(value, dict | list) for value in row.values())
