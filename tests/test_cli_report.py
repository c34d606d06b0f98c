import json
from dataclasses import asdict

import pytest

from numattn.cli import main

pytest.importorskip("plotly", reason="the page needs plotly")


def run(capsys, *argv):
    status = main([str(part) for part in argv])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def folder(tmp_path):
    from numattn.measure.rows import Row

    row = Row(
        method="window",
        family="sparse",
        options={"window": 16},
        budget=16,
        budget_option="window",
        units=16,
        is_oracle=False,
        approximates="softmax",
        fitted=False,
        random=False,
        input="an input",
        tag="",
        digest="0",
        length=64,
        is_causal=True,
        heads=1,
        head=0,
        seed=0,
        dtype="float32",
        device="cpu",
        backend="torch",
        output=0.1,
        machine="machine",
        numattn_version="0",
        torch_version="1",
        python_version="2",
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(asdict(row)) + "\n", encoding="utf-8")
    return tmp_path


def test_report_writes_the_page_beside_the_rows(capsys, folder):
    status, out, err = run(capsys, "report", folder)
    assert (status, err) == (0, "")
    assert out == f"Written: {folder / 'report.html'}\n"
    assert "an input" in (folder / "report.html").read_text(encoding="utf-8")


def test_report_writes_where_it_is_told(capsys, folder):
    status, _, _ = run(capsys, "report", folder, "--out", folder / "new" / "page.html")
    assert status == 0
    assert (folder / "new" / "page.html").exists()
    assert not (folder / "report.html").exists()


def test_report_without_rows_says_what_writes_them(capsys, tmp_path):
    status, out, err = run(capsys, "report", tmp_path)
    assert (status, out) == (2, "")
    assert "numattn measure" in err
    assert not list(tmp_path.iterdir())


def test_report_without_plotly_says_what_to_install(capsys, folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    status, _, err = run(capsys, "report", folder)
    assert status == 2
    assert 'pip install "numattn[report]"' in err
