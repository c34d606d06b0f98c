import json
from dataclasses import asdict, replace

import pytest
from commands import run
from samples import ROW

pytest.importorskip("plotly", reason="the page needs plotly")


@pytest.fixture
def folder(tmp_path):
    row = replace(ROW, input="an input")
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
