"""``numattn diagnose``: a line for each head, what the columns mean, and pictures."""

import pytest
import torch
from commands import run
from safetensors.torch import save_file

from numattn.measure import bundled, diagnose, load
from numattn.measure.diagnose import COLUMNS


def test_a_line_for_each_head_and_a_legend(capsys):
    status, out, err = run(capsys, "diagnose", "minilm", "gaussian", "--length", "64")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "minilm, 64 tokens, bidirectional: bidirectional text, mixed heads" in lines
    for found in diagnose(load("minilm").crop(64)):
        start = f"{found.head} {found.verdict} "
        assert any(" ".join(line.split()).startswith(start) for line in lines)
    for name in COLUMNS:
        assert sum(line.startswith(f"{name:>7}  ") for line in lines) == 1
    assert "low rank: %r <= 12.5" in " ".join(out.split())


def test_everything_bundled_by_default(capsys):
    status, out, _ = run(capsys, "diagnose", "--length", "32")
    assert status == 0
    for name in bundled():
        assert f"{name}, 32 tokens" in out


def test_a_file(capsys, tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file({name: torch.randn(1, 2, 24, 8) for name in "qkv"}, path)
    status, out, _ = run(capsys, "diagnose", str(path))
    assert status == 0
    assert "mine, 24 tokens" in out


def test_figures(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    status, text, err = run(capsys, "diagnose", "minilm", "--length", "48", "--figures", str(out))
    assert (status, err) == (0, "")
    names = ["decay.png", "sparsity.png", "weights.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    for path in out.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert str(path) in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("gausian",), "Did you mean 'gaussian'?"),
        (("no-such.safetensors",), "no-such.safetensors: there is no such file"),
        (("minilm", "--length", "0"), "must be a positive integer; got '0'"),
    ],
)
def test_what_is_wrong_is_said(capsys, argv, message):
    status, out, err = run(capsys, "diagnose", *argv)
    assert (status, out) == (2, "")
    assert message in err


def test_a_file_in_the_place_of_the_folder(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "taken"
    path.write_text("")
    argv = ("diagnose", "minilm", "--length", "16", "--figures", str(path))
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert f"--figures {path}: File exists" in err
