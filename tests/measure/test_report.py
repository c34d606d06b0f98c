import csv
import io
from dataclasses import fields, replace

import numpy as np
import pytest
from samples import ROW

from numattn.measure import plots, report
from numattn.measure.plots import plot
from numattn.measure.rows import Row

ROW = replace(
    ROW,
    tv_median=0.01,
    tv_p95=0.02,
    floor=1e-7,
    mean_baseline=0.9,
    uniform_baseline=0.8,
    efficiency=0.5,
    block_efficiency=0.75,
    flops=50,
    exact_flops=100,
    time_ratio=0.75,
)


def wider(row, budget, **changes):
    return replace(row, options={**row.options, "parts": budget}, budget=budget, **changes)


ROWS = [
    ROW,
    replace(ROW, head=1, output=0.3),
    wider(ROW, 64, output=0.02, units=64),
    replace(ROW, method="perfect", is_oracle=True, output=0.01, time_ratio=40.0),
    replace(ROW, method="other", family="kernel", approximates="own", output=2.5),
    replace(ROW, method="shy", family="latent", status="unsupported", reason="no.", output=None),
    replace(ROW, input="second", output=0.5),
]


def line(text, *starts):
    found = [x for x in text.splitlines() if x.split()[: len(starts)] == list(starts)]
    assert len(found) == 1, text
    return found[0].split()


def test_a_table_has_the_median_over_heads_and_the_worst_head():
    text = report.text(ROWS[:-1])
    assert line(text, "fake", "16")[2:] == [
        "0.200",
        "0.300",
        "0.0100",
        "0.0200",
        "0.500",
        "0.750",
        "0.500",
        "0.750",
    ]
    assert line(text, "fake", "64")[2] == "0.0200"
    assert line(text, "mean", "of", "values")[3] == "0.900"
    assert line(text, "uniform", "keys", "64")[3] == "0.800"
    assert line(text, "float32", "floor")[2] == "1.0e-7"


def test_the_summary_is_the_median_over_inputs():
    text = report.text(ROWS)
    assert "Summary over 2 inputs" in text
    assert line(text, "fake", "16")[2:4] == ["0.350", "0.500"]  # of 0.2 and 0.5; the worst head
    assert line(text, "fake", "16")[-1] == "2"
    assert line(text, "fake", "64")[-1] == "1"
    assert "first, 64 tokens" not in text
    assert "first, 64 tokens, causal, float32: diffuse" in report.text(ROWS, details=True)


def test_it_fits_a_hundred_columns_and_says_what_needs_saying():
    for color in (False, True):
        text = report.text(ROWS, details=True, color=color)
        assert "shy unsupported: no." in text
        for mark, method in (("(o)", "perfect"), ("(t)", "other")):
            assert f"{method} {mark}" in text
            assert f"\n{mark} " in text
        assert "this machine" in text
        assert "(f) methods" not in text  # none is fitted
    every = [*ROWS, replace(ROW, projected=0.2, mode="decode", bytes_read=1, exact_bytes_read=8)]
    plain = report.text(every, details=True)
    assert max(map(len, plain.splitlines())) <= 100
    for name in report.COLUMNS:
        assert f"{name:>7}  " in plain


def test_marks_tell_fitted_from_calibrated():
    fitted = replace(ROW, fitted=True)
    calibrated = replace(fitted, calibrated_on="another", input="second")
    assert report.label([ROW]) == "fake"
    assert report.label([fitted]) == "fake (f)"
    assert report.label([calibrated]) == "fake (c)"
    assert report.label([fitted, calibrated]) == "fake (fc)"
    assert [n.split()[0] for n in report.notes_for([calibrated])][-2:] == ["(c)", "'mean"]


def test_decoding_has_tables_of_its_own():
    decoded = [
        replace(ROW, mode="decode", output=0.6, bytes_read=1, exact_bytes_read=8, input=name)
        for name in ("first", "second")
    ]
    text = report.text([*ROWS, *decoded], details=True)
    assert "first, 64 tokens, causal, float32: diffuse" in text
    assert "first, 64 tokens, causal, float32, decoding: diffuse" in text
    whole, _, summary = text.partition("Summary over 2 inputs, float32, decoding")
    assert line(summary, "fake", "16")[2] == "0.600"
    assert "0.125" in line(summary, "fake", "16")
    assert line(whole.partition("Summary over 2 inputs, float32 (")[2], "fake", "16")[2] == "0.350"


def test_the_uniform_baseline_is_shown_at_units_that_are_no_budgets():
    text = report.text([replace(ROW, units=20)])
    assert line(text, "uniform", "keys", "20")[3] == "0.800"


def test_columns_that_are_empty_are_left_out():
    text = report.text([replace(ROW, time_ratio=None)])
    assert " time" not in text
    assert "FLOPs" in text


def test_a_report_of_failures_only():
    row = replace(ROW, status="failed", reason="RuntimeError: no", output=None, time_ratio=None)
    text = report.text([row])
    assert "fake failed: RuntimeError: no" in text
    assert "floor" not in text.split("method  what")[0]


def test_markdown_and_csv(tmp_path):
    paths = report.write(ROWS, tmp_path / "new")
    assert [p.name for p in paths] == ["report.md", "report.csv"]
    page = paths[0].read_text()
    for part in (
        "## Summary over 2 inputs",
        "## first, 64 tokens",
        "## second",
        "`TV95`",
        "machine",
    ):
        assert part in page
    tables = [x for x in page.splitlines() if x.startswith("|")]
    assert {x.count("|") for x in tables} == {3, 11, 12}
    rows = list(csv.DictReader(io.StringIO(paths[1].read_text())))
    assert list(rows[0]) == [f.name for f in fields(Row)]
    assert len(rows) == len(ROWS)
    assert float(rows[0]["output"]) == 0.1
    assert rows[5]["output"] == ""


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        (None, ""),
        (0.0, "0"),
        (1.0, "1.00"),
        (0.99999, "1.00"),
        (0.12345, "0.123"),
        (0.0123, "0.0123"),
        (0.00123, "0.0012"),
        (0.000123, "1.2e-4"),
        (12.34, "12.3"),
        (1234.5, "1230"),
        (123456.0, "1.2e5"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(x, shown):
    assert report.number(x) == shown


def test_middle_weighs_inputs_equally():
    rows = [replace(ROW, output=0.1)] * 9 + [replace(ROW, input="second", output=0.5)]
    assert report.middle(rows, lambda r: r.output) == pytest.approx(0.3)
    assert report.middle(rows, lambda r: r.weights) is None
    assert np.isnan(report.middle([replace(ROW, output=float("nan"))], lambda r: r.output))


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    written = plot(ROWS, tmp_path)
    assert [p.name for p in written] == ["error_flops.png", "error_time.png"]
    assert all(p.stat().st_size > 10_000 for p in written)


def test_no_picture_of_times_that_were_not_taken(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [replace(row, time_ratio=None) for row in ROWS]
    assert [p.name for p in plot(rows, tmp_path)] == ["error_flops.png"]


def test_plots_of_rows_that_cannot_be_on_a_logarithmic_axis(tmp_path):
    pytest.importorskip("matplotlib")
    odd = [replace(ROW, output=x) for x in (0.0, float("nan"), float("inf"))]
    for rows in ([odd[0]], [odd[1]], [odd[2]], [ROW, *odd], [ROWS[5]]):
        plot(rows, tmp_path)


def test_points_at_the_rounding_level_are_left_out():
    exact = replace(ROW, budget=999, output=2 * ROW.floor)
    drawn = [[row.budget for row, _, _ in curve] for curve in plots._curves([ROW, exact], flops)]
    assert drawn == [[ROW.budget]]


def flops(row):
    return row.relative_flops
