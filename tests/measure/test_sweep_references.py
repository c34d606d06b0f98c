import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import numattn
from numattn.measure import reference, sweep, synthetic
from numattn.measure.references import default_folder, digest, kept_reference

X = replace(synthetic("sink", 20, heads=2, head_dim=8), is_causal=True)
MODULE = sys.modules["numattn.measure.references"]


def no_computing(x):
    raise AssertionError("the reference was computed")


def same(a, b):
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse) and torch.equal(a.x.q, b.x.q)


def test_it_is_computed_once_and_read_bit_for_bit(tmp_path, monkeypatch):
    made = kept_reference(X, tmp_path / "new")
    monkeypatch.setattr(MODULE, "reference", no_computing)
    assert same(kept_reference(X, tmp_path / "new"), made)
    assert same(made, reference(X))
    (path,) = (tmp_path / "new").iterdir()  # nothing temporary is left
    assert path.suffix == ".safetensors"
    assert path.stat().st_size >= 8 * 2 * 20 * (8 + 1)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMATTN_CACHE", str(tmp_path))
    assert same(kept_reference(X, None), reference(X))
    sweep([numattn.Exact], None, [X], timing=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(X, scale=1.0),
        replace(X, is_causal=False),
        replace(X, v=X.v + 1e-6),
        replace(X, k=X.k.double()),
        X.crop(19),
    ],
    ids=["scale", "causal", "numbers", "type", "length"],
)
def test_another_input_has_another_file(tmp_path, other):
    assert digest(other) != digest(X)
    kept_reference(X, tmp_path)
    assert same(kept_reference(other, tmp_path), reference(other))
    assert len(list(tmp_path.iterdir())) == 2


def test_the_name_does_not_matter(tmp_path, monkeypatch):
    kept_reference(X, tmp_path)
    monkeypatch.setattr(MODULE, "reference", no_computing)
    assert kept_reference(replace(X, name="y"), tmp_path).x.name == "y"


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_corrupt_file_is_said_left_alone_and_not_used(tmp_path, damage):
    kept_reference(X, tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-5] ^= 64  # one bit of one number
    bad = {"cut": data[:-100], "flip": data, "empty": b"", "text": b"none of this"}[damage]
    path.write_bytes(bad)
    notes = []
    assert same(kept_reference(X, tmp_path, notes.append), reference(X))
    assert len(notes) == 1
    assert f"{path} is not used" in notes[0]
    assert path.read_bytes() == bad
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    notes = []
    assert same(kept_reference(X, tmp_path / "file" / "in", notes.append), reference(X))
    assert "cannot be written" in notes[0]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MODULE.os, "fsync", full)
    notes = []
    assert same(kept_reference(X, tmp_path, notes.append), reference(X))
    assert "No space left on device" in notes[0]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_takes_its_references_from_there(tmp_path, monkeypatch):
    call = {"timing": False, "cache": tmp_path / "kept"}
    first = sweep([numattn.Exact], None, [X], **call)
    monkeypatch.setattr(MODULE, "reference", no_computing)
    assert sweep([numattn.Exact], None, [X], **call) == first
    (path,) = (tmp_path / "kept").iterdir()
    path.write_bytes(b"oops")
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="is not used"):
        assert sweep([numattn.Exact], None, [X], **call) == first


def test_where_the_user_s_files_are(monkeypatch):
    monkeypatch.setenv("NUMATTN_CACHE", "/here")
    assert default_folder() == Path("/here")
    monkeypatch.delenv("NUMATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert default_folder() == Path("/there/numattn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "numattn"
