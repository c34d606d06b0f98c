from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import Fake

import numattn
from numattn.measure import attend, load, sweep, synthetic
from numattn.measure.bench import fit

X = load("smollm2-local", length=72)  # 3 query heads on one key head; 18 steps
FITTED = ("loki", "eigen", "routing")


def dense(x):
    """Exact causal attention by the definition, float64, (B, H, N, E)."""
    q, k, v = (t.double() for t in (x.q, x.k, x.v))
    k, v = (t.repeat_interleave(x.group, 1) for t in (k, v))
    logits = x.scale * q @ k.mT
    hidden = torch.ones(x.length, x.length, dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def decoded(method, x=X, mode="decode", **options):
    options = {"timing": False, "dtype": torch.float64, **options}
    return sweep([method], [8], [x], mode=mode, **options)


@pytest.mark.parametrize(
    "name", ["exact", "window", "topk", "linear", "performer", "hodlr", "multipole", *FITTED]
)
def test_the_error_is_that_of_the_last_rows_of_a_causal_call(name):
    method = numattn.get(name)
    method = method if method.info.budget is None else method.with_budget(8)
    tensors = {}
    if method.info.state_tensors:
        tensors = fit(method, X.crop(54), torch.float64, 0)
    x = X.to(torch.float64)
    out = attend(method, x, tensors=tensors)(x.q, x.k, x.v)[0, :, 54:]
    exact = dense(X)[0, :, 54:]
    miss = (out - exact).norm(dim=-1)
    v = x.v[0, 0]
    radius = (v - v.mean(0)).norm(dim=-1).max()
    rows = decoded(name, calibrate="itself")
    assert [row.head for row in rows] == [0, 1, 2]
    for row, head_miss, head in zip(rows, miss, exact, strict=True):
        assert (row.status, row.reason, row.mode) == ("ok", "", "decode")
        near = {"rel": 1e-6, "abs": 1e-10}
        assert row.output == pytest.approx(float(head_miss.norm() / head.norm()), **near)
        assert row.rows_max == pytest.approx(float((head_miss / head.norm(dim=-1)).max()), **near)
        assert row.hull_max == pytest.approx(float(head_miss.max() / radius), **near)
        assert (row.tv_median, row.efficiency, row.flops, row.seconds) == (None,) * 4
        assert row.floor < 1e-14


def test_bytes_are_those_that_the_last_step_reads():
    for kind, size in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)):
        whole = 72 * (64 + 64) * size
        (row, *_) = decoded("exact", dtype=kind)
        assert row.bytes_read == row.exact_bytes_read == whole
        (row, *_) = decoded("window", dtype=kind)
        assert row.exact_bytes_read == whole
        assert row.bytes_read < whole / 2


@pytest.mark.parametrize(("length", "steps"), [(1, 1), (3, 1), (16, 4), (255, 63), (300, 64)])
def test_the_last_64_tokens_are_decoded_or_a_quarter(length, steps, monkeypatch):
    seen = []
    kind = type(numattn.Exact().state(X.k, X.v, enable_gqa=True))
    append = kind.append
    monkeypatch.setattr(kind, "append", lambda s, k, v: seen.append(k.shape[2]) or append(s, k, v))
    x = synthetic("gaussian", length, heads=1, head_dim=8, is_causal=True)
    rows = decoded("exact", x)
    assert rows[0].output < 1e-12
    assert seen == [1] * (2 * steps)  # the method, and the floor


def test_the_baseline_is_the_mean_of_the_values_seen():
    rows = decoded("window")
    exact, v = dense(X)[0, :, 54:], X.v[0, 0].double()
    means = torch.stack([v[: t + 1].mean(0) for t in range(54, 72)])
    want = (means - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    np.testing.assert_allclose([row.mean_baseline for row in rows], want, rtol=1e-10)


def test_who_cannot_decode_says_why():
    (row,) = decoded("nystrom")
    assert (row.status, row.reason) == ("unsupported", "nystrom cannot decode step by step.")
    (row,) = decoded(Fake)
    assert row.status == "unsupported"
    (row,) = decoded("exact", replace(X, is_causal=False))
    assert row.status == "unsupported"
    assert "smollm2-local is not causal" in row.reason


def test_fitted_tensors_come_from_the_other_text_where_there_is_one():
    rows = decoded("loki")
    assert rows[0].calibrated_on == "smollm2-local-prose"
    itself = decoded("loki", calibrate="itself")
    assert itself[0].calibrated_on == ""
    assert [row.output for row in itself] != [row.output for row in rows]


def test_both_modes_stand_side_by_side_and_decoding_is_not_repeated_for_times(tmp_path):
    ran = []

    def tell(p):
        ran.extend([p.method] if p.method else [])

    call = {"out": tmp_path / "rows.jsonl", "progress": tell, "timing": True}
    rows = decoded("window", mode=["prefill", "decode"], **call)
    assert [row.mode for row in rows] == ["prefill"] * 3 + ["decode"] * 3
    assert len({row.unit for row in rows}) == 2
    assert len({row.setting for row in rows}) == 2
    assert len(ran) == 2
    assert decoded("window", mode=["prefill", "decode"], **call) == rows
    assert len(ran) == 2


def test_random_methods_decode_once_per_seed():
    rows = sweep(["performer"], [8], [X], 2, mode="decode", timing=False)
    assert [row.seed for row in rows] == [0, 0, 0, 1, 1, 1]
    assert rows[0].output != rows[3].output
