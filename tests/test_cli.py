import errno
import os
import platform
import subprocess
import sys

import pytest
import torch
from commands import run
from safetensors.torch import save_file

import numattn
from numattn.cli import main
from numattn.measure import read_rows
from numattn.measure.rows import claim

BUDGETED = next(m.info.name for m in numattn.methods() if m.info.budget)


@pytest.fixture
def qkv():
    return {name: torch.randn(1, 2, 24, 8) for name in "qkv"}


def test_list_shows_every_method(capsys):
    status, out, err = run(capsys, "list")
    assert (status, err) == (0, "")
    for record in numattn.methods():
        assert f"  {record.info.name} " in out
        assert record.info.family in out.splitlines()
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("record", numattn.methods(), ids=lambda m: m.info.name)
def test_show(capsys, record):
    status, out, _ = run(capsys, "show", record.info.name)
    assert status == 0
    for part in (record.info.summary, record.info.paper, "Args:", "Limits:", "import "):
        assert part in out
    line = next(x for x in out.splitlines() if x.startswith("  import")).removeprefix("  import")
    exec(line.strip(), {})  # what the card says to import can be imported


@pytest.mark.parametrize("command", ["show", "measure"])
def test_an_unknown_method_suggests_the_nearest(capsys, tmp_path, command):
    out = ("--out", str(tmp_path / "out")) if command == "measure" else ()
    status, _, err = run(capsys, command, "exacct", *out)
    assert status == 2
    assert "'exacct'" in err
    assert "Did you mean 'exact'?" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("measure", "exact", "--budget", "none"), "must be a positive integer; got 'none'"),
        (("measure", "exact", "--budget", "0"), "must be a positive integer; got '0'"),
        (("measure", "--family", "dense"), "invalid choice: 'dense'"),
        (("measure", "exact", "--length", "-3"), "must be a positive integer; got '-3'"),
        (("measure", "exact", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("measure", "exact", "--device", "nowhere"), "--device nowhere"),
        (("measure", "exact", "--input", "gausian"), "Did you mean 'gaussian'?"),
        (("measure", "exact", "--input", "no-such.safetensors"), "no-such.safetensors"),
        (("plot", "no-such-folder"), "no-such-folder"),
        (("fly",), "invalid choice: 'fly'"),
        ((), "required"),
    ],
)
def test_what_is_wrong_in_a_command_is_said(capsys, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *argv)
    assert status == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_family_without_methods_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(numattn, "methods", list)
    status, _, err = run(capsys, "measure", "--family", "tensor")
    assert status == 2
    assert "--family tensor: no method" in err


def test_a_truncated_file(capsys, tmp_path, qkv):
    path = tmp_path / "cut.safetensors"
    save_file(qkv, path)
    path.write_bytes(path.read_bytes()[:-100])
    status, _, err = run(capsys, "measure", "exact", "--input", str(path), "--out", str(tmp_path))
    assert status == 2
    assert str(path) in err


def test_head_sizes_that_differ(capsys, tmp_path, qkv):
    path = tmp_path / "odd.safetensors"
    save_file({**qkv, "k": torch.randn(1, 2, 24, 6)}, path)
    status, _, err = run(capsys, "measure", "exact", "--input", str(path), "--out", str(tmp_path))
    assert status == 2
    assert str(path) in err
    assert "head size" in err


def test_two_inputs_of_one_name(capsys, tmp_path, qkv):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save_file(qkv, tmp_path / folder / "x.safetensors")
    paths = [str(tmp_path / folder / "x.safetensors") for folder in ("a", "b")]
    status, _, err = run(capsys, "measure", "exact", "--input", *paths, "--out", str(tmp_path))
    assert status == 2
    assert "two inputs are named 'x'" in err


def test_measure_leaves_everything_and_resumes(capsys, tmp_path, qkv):
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "mine.safetensors", tmp_path / "out"
    save_file(qkv, path)
    argv = ("measure", "exact", BUDGETED, "--input", str(path), "gaussian", "--length", "24")
    argv = (*argv, "--budget", "4", "--seeds", "1", "--out", str(out))
    status, text, err = run(capsys, *argv)
    assert status == 0, err
    assert "Summary over 2 inputs" in text
    assert "mine (0 of 4)" in err
    names = ["error_flops.png", "error_time.png", "report.csv", "report.md", "rows.jsonl"]
    assert sorted(p.name for p in out.iterdir()) == names
    rows = (out / "rows.jsonl").read_bytes()
    status, again, err = run(capsys, *argv)
    assert (status, again, err) == (0, text, "")
    assert (out / "rows.jsonl").read_bytes() == rows

    (out / "error_time.png").unlink()
    status, text, _ = run(capsys, "plot", str(out))
    assert status == 0
    assert "error_time.png" in text
    assert (out / "error_time.png").exists()


def tiny(out):
    return ("measure", "exact", "--input", "gaussian", "--length", "8", "--out", str(out))


def test_no_timing(capsys, tmp_path):
    status, _, _ = run(capsys, *tiny(tmp_path), "--no-timing")
    assert status == 0
    assert not (tmp_path / "error_time.png").exists()


def test_a_corrupt_row_is_said_and_left_alone(capsys, tmp_path):
    run(capsys, *tiny(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"oops\n" + path.read_bytes())
    before = path.read_bytes()
    for argv in (tiny(tmp_path), ("plot", str(tmp_path))):
        status, _, err = run(capsys, *argv)
        assert status == 2
        assert f"{path}, line 1 " in err
    assert path.read_bytes() == before


def test_measure_takes_families(capsys, tmp_path):
    argv = ("--input", "gaussian", "--length", "16", "--budget", "4", "--out", str(tmp_path))
    status, _, _ = run(capsys, "measure", "svd", "--family", "sparse", *argv, "--no-timing")
    assert status == 0
    found = {row.method for row in read_rows(tmp_path / "rows.jsonl")}
    sparse = {m.info.name for m in numattn.methods() if m.info.family == "sparse"}
    assert found == sparse | {"svd"}
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if row.status == "ok"]
    assert all((row.block_oracle_error is None) == (row.family != "sparse") for row in rows)


def test_a_torn_end_is_said_and_measured_again(capsys, tmp_path):
    run(capsys, *tiny(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    status, _, err = run(capsys, *tiny(tmp_path))
    assert status == 0
    assert f"{path} ends in the middle" in err
    assert path.read_bytes().endswith(b"}\n")


def test_out_that_is_a_file(capsys, tmp_path):
    (tmp_path / "out").touch()
    status, _, err = run(capsys, *tiny(tmp_path / "out"))
    assert status == 2
    assert str(tmp_path / "out") in err


def test_a_method_that_fails_is_said_at_the_end(capsys, tmp_path, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("the roof is on fire")

    record = next(m for m in numattn.methods() if m.info.name == BUDGETED)
    monkeypatch.setattr(record, "function", staticmethod(fails))
    status, out, err = run(capsys, *tiny(tmp_path), "--budget", "2", BUDGETED)
    assert status == 2  # the name came after an option that takes several values
    status, out, err = run(capsys, "measure", BUDGETED, *tiny(tmp_path)[1:], "--budget", "2")
    assert status == 1
    assert f"failed: {BUDGETED} on gaussian" in err
    assert "RuntimeError: the roof is on fire" in out
    assert "exact (o)" in out


def test_a_report_that_finds_no_room_says_that_the_rows_are_safe(capsys, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("numattn.measure.files.os.replace", full)
    status, _, err = run(capsys, *tiny(tmp_path), "--no-cache")
    assert status == 2
    assert "No space left" in err
    assert "report.md" in err
    assert f"safe in {tmp_path / 'rows.jsonl'}" in err
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    assert read_rows(tmp_path / "rows.jsonl")


def test_interrupted(capsys, tmp_path, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["numattn.measure.unit"], "head_errors", interrupt)
    status, _, err = run(capsys, *tiny(tmp_path))
    assert status == 130
    assert "To go on: numattn measure exact --input gaussian" in err


def test_without_matplotlib(capsys, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    status, _, err = run(capsys, *tiny(tmp_path))
    assert status == 0
    assert 'pip install "numattn[report]"' in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.csv", "report.md", "rows.jsonl"]


def test_types_and_modes(capsys, tmp_path):
    argv = ("--input", "smollm2-local", "--length", "16", "--out", str(tmp_path), "--no-timing")
    more = ("--dtype", "float32", "bfloat16", "--mode", "prefill", "decode")
    status, _, err = run(capsys, "measure", "exact", *argv, *more)
    assert status == 0, err
    rows = read_rows(tmp_path / "rows.jsonl")
    found = {(row.dtype, row.mode) for row in rows}
    assert found == {(t, m) for t in ("float32", "bfloat16") for m in ("prefill", "decode")}


def test_calibrate(capsys, tmp_path):
    argv = ("--input", "smollm2-local", "--length", "16", "--out", str(tmp_path), "--no-timing")
    status, _, err = run(capsys, "measure", "loki", *argv, "--calibrate", "half")
    assert status == 0, err
    rows = read_rows(tmp_path / "rows.jsonl")
    assert {(row.length, row.calibrated_on) for row in rows} == {(8, "smollm2-local, first half")}
    status, _, err = run(capsys, "measure", "loki", *argv, "--calibrate", "gaussian")
    assert status == 2
    assert "gaussian must have the heads of smollm2-local" in err


def test_references_are_kept_where_it_is_said(capsys, tmp_path, monkeypatch):
    folders = [tmp_path / "default", tmp_path / "named"]
    monkeypatch.setenv("NUMATTN_CACHE", str(folders[0]))
    run(capsys, *tiny(tmp_path / "a"), "--no-cache")
    assert not any(folder.exists() for folder in folders)
    run(capsys, *tiny(tmp_path / "b"), "--cache", str(folders[1]))
    assert [folder.exists() for folder in folders] == [False, True]
    run(capsys, *tiny(tmp_path / "c"))
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1]
    status, _, err = run(capsys, *tiny(tmp_path), "--cache", "x", "--no-cache")
    assert status == 2
    assert "not allowed with" in err


def test_a_folder_that_another_measurement_writes_to(capsys, tmp_path):
    with claim(tmp_path / "rows.jsonl"):
        status, _, err = run(capsys, *tiny(tmp_path))
    assert status == 2
    assert f"is being written by process {os.getpid()}" in err
    assert list(tmp_path.iterdir()) == []


def test_help_and_version(capsys):
    for argv in (("--help",), ("measure", "--help")):
        status, out, _ = run(capsys, *argv)
        assert status == 0
        assert "examples:" in out
        assert max(map(len, out.splitlines())) <= 100
    assert run(capsys, "--version")[1].strip() == f"numattn {numattn.__version__}"


def test_a_reader_that_has_seen_enough(tmp_path):
    command = f"{sys.executable} -m numattn show exact | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("exact: ")
    assert done.stderr == ""


def test_the_module_runs():
    command = [sys.executable, "-m", "numattn", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is set to keep memory")
def test_measure_restarts_itself_once_for_the_allocator(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(sys, "argv", ["numattn", *tiny(tmp_path)])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "numattn", *tiny(tmp_path)])
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert main() == 0
    ((program, argv, environment),) = calls
    assert program == sys.executable
    assert argv == [sys.executable, "-m", "numattn", *tiny(tmp_path)]
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "8589934592"
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    assert main() == 0
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    assert main(tiny(tmp_path)) == 0  # called from Python
    assert len(calls) == 1
