import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import numattn
from numattn.kernel import Performer
from numattn.measure import QKV, SYNTHETIC, InputError, bundled, calibration, load, synthetic
from numattn.testing.inputs import reference_weights

DATA = Path(numattn.__file__).parent / "data"
MANIFEST = {e["name"]: e for e in json.loads((DATA / "manifest.json").read_text())["entries"]}


def weights(x: QKV) -> Tensor:
    return reference_weights(x.q, x.k, is_causal=x.is_causal, scale=x.scale)


def entropy(w: Tensor) -> float:
    return -torch.xlogy(w, w).sum(-1).mean().item()


def near(w: Tensor, distance: int = 8) -> float:
    """Mean mass on keys within a distance."""
    position = torch.arange(w.shape[-1])
    return (w * ((position[:, None] - position).abs() <= distance)).sum(-1).mean().item()


def heaviest_columns(w: Tensor, columns: int = 2) -> float:
    return w.mean(-2).topk(columns, -1).values.sum(-1).mean().item()


def tail(w: Tensor, rank: int) -> float:
    """Relative Frobenius norm of what no matrix of this rank can hold."""
    squares = torch.linalg.svdvals(w).square()
    return (squares[..., rank:].sum(-1) / squares.sum(-1)).sqrt().mean().item()


def spacing(k: Tensor) -> float:
    """Distance of a key to its nearest, relative to that of any two."""
    distance = torch.cdist(k, k)
    own = torch.eye(k.shape[2], dtype=torch.bool)
    return (distance.masked_fill(own, math.inf).amin(-1).mean() / distance.median()).item()


# --- the bundle -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MANIFEST))
def test_a_bundled_entry_is_what_the_manifest_says(name):
    entry, x = MANIFEST[name], load(name)
    heads, kv_heads = len(entry["heads"]), len(entry["kv_heads"])
    assert x.q.shape == (1, heads, entry["N"], entry["d"])
    assert x.k.shape == x.v.shape == (1, kv_heads, entry["N"], entry["d"])
    assert x.q.dtype == torch.float16
    assert all(t.isfinite().all() for t in (x.q, x.k, x.v))
    assert (x.is_causal, x.scale, x.tag) == (entry["causal"], entry["scale"], entry["tag"])
    assert x.scale == pytest.approx(entry["d"] ** -0.5)
    assert len(entry["layers"]) == heads == kv_heads * x.group
    assert entry["model"] in x.source
    assert entry["source"] in x.source


def test_the_bundle_is_whole_and_small():
    files = {path.name for path in DATA.glob("*.safetensors")}
    assert files == {"smollm2-layer.safetensors", *(e["file"] for e in MANIFEST.values())}
    assert sum(path.stat().st_size for path in DATA.iterdir()) <= 14_000_000
    assert bundled() == [n for n, entry in MANIFEST.items() if "calibrates" not in entry]
    assert {entry["causal"] for entry in MANIFEST.values()} == {True, False}
    assert not set(MANIFEST) & set(SYNTHETIC)


def test_a_calibration_holds_the_same_heads_on_another_text():
    pairs = {name: calibration(name) for name in bundled()}
    assert {n for n in pairs.values() if n} == set(MANIFEST) - set(bundled())
    for name, other in pairs.items():
        if other is None:
            continue
        a, b = MANIFEST[name], MANIFEST[other]
        same = ("model", "layers", "heads", "kv_heads", "d", "scale", "causal")
        assert all(a[key] == b[key] for key in same)
        assert a["source"] != b["source"]
        assert not torch.equal(load(name).k, load(other).k)
    assert calibration("smollm2-heavy-prose") is None


def test_the_notice_names_every_model_and_source():
    notice = (DATA / "NOTICE").read_text()
    for entry in MANIFEST.values():
        for what in (entry["model"], entry["licence"], entry["source"].split(",")[0]):
            assert what in notice, what
        assert entry["source_licence"].split()[0] in notice


def test_bundled_heads_look_as_their_names_say():
    w = {n: weights(load(n, length=256)) for n in MANIFEST if n.startswith("smollm2")}
    short = [n for n in w if n != "smollm2-long"]
    assert max(short, key=lambda n: entropy(w[n])) == "smollm2-diffuse"
    assert max(short, key=lambda n: w[n][..., 0].mean()) == "smollm2-sink"
    assert max(short, key=lambda n: near(w[n])) == "smollm2-local"
    previous = w["smollm2-previous"][0, 0].diagonal(-1).mean()
    assert all(previous > w[n][0, 0].diagonal(-1).mean() for n in w if n != "smollm2-previous")
    assert heaviest_columns(w["smollm2-heavy"]) > heaviest_columns(w["smollm2-local"])


# --- QKV ------------------------------------------------------------------------------------


def test_crop_and_to():
    x = load("smollm2-heavy")
    y = x.crop(100).to(torch.float64)
    assert (y.length, y.group, y.name) == (100, 3, x.name)
    assert y.q.dtype == torch.float64
    assert torch.equal(y.k, x.k[:, :, :100].double())
    torch.testing.assert_close(
        weights(y), weights(x.crop(200))[:, :, :100, :100]
    )  # causal: a prefix
    assert y.to() is not None
    assert y.to().q.dtype == torch.float64
    for length in (0, -1, x.length + 1):
        with pytest.raises(ValueError, match=rf"smollm2-heavy has 1024 tokens.*{length}"):
            x.crop(length)


def test_shape_and_call():
    x = load("smollm2-heavy", length=64)
    shape = x.shape
    assert (shape.batch, shape.heads, shape.kv_heads) == (1, 3, 1)
    assert (shape.queries, shape.keys, shape.head_dim, shape.value_dim) == (64, 64, 64, 64)
    assert (shape.is_causal, shape.itemsize) == (True, 2)
    assert x.call() == {"is_causal": True, "scale": 0.125, "enable_gqa": True}
    assert x.call(Performer()) == x.call()
    y = synthetic("gaussian", 8, head_dim=16)
    assert y.call() == {"is_causal": False, "scale": 0.25, "enable_gqa": False}
    unscaled = [m() for m in numattn.methods() if not m.info.scaled]
    assert all(x.call(m)["scale"] is None for m in unscaled)


# --- synthetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 65])
@pytest.mark.parametrize("kind", SYNTHETIC)
def test_a_kind_has_the_property_it_claims(kind, head_dim, causal):
    make = {"length": 256, "head_dim": head_dim, "is_causal": causal, "seed": 3}
    x = synthetic(kind, **make)
    assert x.q.shape == x.k.shape == x.v.shape == (1, 4, 256, head_dim)
    assert x.q.dtype == torch.float32
    assert (x.name, x.is_causal, x.scale) == (kind, causal, head_dim**-0.5)
    w, plain = weights(x), weights(synthetic("gaussian", **make))
    if kind == "gaussian":
        assert x.q.std().item() == pytest.approx(1, abs=0.02)
        logits = (x.q @ x.k.mT) * x.scale
        assert logits.std().item() == pytest.approx(1, abs=0.1)
    if kind == "clustered":
        other = synthetic("gaussian", **make)
        assert spacing(x.k) < spacing(other.k) / 2
        assert entropy(w) < entropy(plain)
    if kind == "lowrank":
        values = torch.linalg.svdvals(torch.cat([x.q, x.k], 2).double())
        assert (values[..., 4] < 1e-6 * values[..., 3]).all()
        full = synthetic(kind, **{**make, "is_causal": False})
        dense = synthetic("gaussian", **{**make, "is_causal": False})
        assert tail(weights(full), 48) < tail(weights(dense), 48) / 2
    if kind == "local":
        assert near(w) > 2 * near(plain)
    if kind == "sink":
        assert w[..., 1:, 0].mean() > 0.5 > 20 * plain[..., 128:, 0].mean()
        norms = x.v.norm(dim=-1)
        assert (norms[..., 0] < norms[..., 1:].amin(-1)).all()
    if kind == "peaked":
        assert entropy(w) < entropy(plain) / 3
        assert near(w) < 2 * near(plain)  # and the key may be anywhere


def test_synthetic_draws_by_seed():
    for kind in SYNTHETIC:
        a, b, c = (synthetic(kind, 32, seed=s) for s in (0, 0, 1))
        assert torch.equal(a.q, b.q)
        assert torch.equal(a.k, b.k)
        assert torch.equal(a.v, b.v)
        assert not torch.equal(a.q, c.q)
        assert torch.equal(load(kind, length=32, seed=1).q, c.q)
    assert load("gaussian").length == 1024
    state = torch.random.get_rng_state()
    synthetic("peaked", 16)
    assert torch.equal(state, torch.random.get_rng_state())


def test_synthetic_refuses():
    with pytest.raises(InputError, match=r"'gausian'.*Did you mean 'gaussian'"):
        synthetic("gausian")
    for bad in ({"length": 0}, {"heads": 0}, {"head_dim": 7}):
        with pytest.raises(InputError, match=f"local: {next(iter(bad))} must be at least"):
            synthetic("local", **bad)


# --- files ----------------------------------------------------------------------------------


def make_file(path: Path, metadata: dict[str, str] | None = None, **changes: Tensor | None) -> Path:
    tensors = {"q": torch.randn(2, 4, 10, 6), "k": torch.randn(2, 2, 10, 6)}
    tensors["v"] = torch.randn(2, 2, 10, 3)
    tensors |= changes
    save_file({n: t for n, t in tensors.items() if t is not None}, path, metadata=metadata)
    return path


def test_a_file_of_ones_own(tmp_path):
    q = torch.randn(2, 4, 10, 6)
    path = make_file(tmp_path / "mine.safetensors", q=q, extra=torch.zeros(3))
    x = load(path)
    assert (x.name, x.is_causal, x.group) == ("mine", False, 2)
    assert x.scale == pytest.approx(6**-0.5)
    assert torch.equal(x.q, q)
    assert load(str(path), length=4).length == 4
    said = {"is_causal": "true", "scale": "0.3", "tag": "odd", "source": "a test"}
    x = load(make_file(path, said))
    assert (x.is_causal, x.scale, x.tag, x.source) == (True, 0.3, "odd", "a test")
    assert load(make_file(path, {"causal": "True"})).is_causal
    flat = {n: torch.randn(2, 5, 4, dtype=torch.bfloat16) for n in "qkv"}
    x = load(make_file(path, **flat))
    assert x.q.shape == (1, 2, 5, 4)
    assert x.q.dtype == torch.bfloat16


BAD: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no q": ({"q": None}, r"no tensor q.*has k, v"),
    "no k, v": ({"k": None, "v": None}, "no tensor k and no v"),
    "two dimensions": ({"k": torch.randn(10, 6)}, "4 dimensions"),
    "five dimensions": ({"v": torch.randn(1, 2, 2, 10, 3)}, "4 dimensions"),
    "head sizes": ({"q": torch.randn(2, 4, 10, 5)}, "head sizes of q and k"),
    "batch": ({"q": torch.randn(1, 4, 10, 6)}, "same batch"),
    "length": ({"q": torch.randn(2, 4, 11, 6)}, "same length"),
    "v length": ({"v": torch.randn(2, 2, 9, 3)}, "same length"),
    "kv heads": ({"v": torch.randn(2, 1, 10, 3)}, "k and v must have the same heads"),
    "heads": ({"q": torch.randn(2, 3, 10, 6)}, "multiple"),
    "types": ({"v": torch.randn(2, 2, 10, 3).half()}, "of one type"),
    "integers": ({n: torch.zeros(2, 2, 10, 6).int() for n in "qkv"}, "float16"),
    "empty": ({n: torch.zeros(2, 2, 0, 6) for n in "qkv"}, "not be empty"),
    "nan": ({"k": torch.full((2, 2, 10, 6), math.nan)}, "240 of the 240 numbers of k"),
    "inf": ({"v": torch.randn(2, 2, 10, 3).index_fill(2, torch.tensor(0), math.inf)}, "12 of"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_file_that_does_not_fit(case, tmp_path):
    changes, why = BAD[case]
    path = make_file(tmp_path / "odd.safetensors", **changes)
    before = path.read_bytes()
    with pytest.raises(InputError, match=rf"odd\.safetensors: .*{why}"):
        load(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"is_causal": "yes"}, "'true' or 'false'"),
        ({"is_causal": "true", "causal": "false"}, "'true' or 'false'"),
        ({"scale": "small"}, "scale .* 'small'"),
        ({"scale": "inf"}, "scale .* 'inf'"),
    ],
)
def test_metadata_that_does_not_fit(metadata, why, tmp_path):
    path = make_file(tmp_path / "odd.safetensors", metadata)
    with pytest.raises(InputError, match=rf"odd\.safetensors: .*{why}"):
        load(path)


def test_a_file_that_cannot_be_read(tmp_path):
    whole = make_file(tmp_path / "whole.safetensors").read_bytes()
    for size in (0, 5, 60, len(whole) // 2, len(whole) - 1):
        path = tmp_path / f"cut{size}.safetensors"
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=rf"cut{size}\.safetensors: .*truncated"):
            load(path)
        assert path.read_bytes() == whole[:size]
    noise = tmp_path / "noise.safetensors"
    noise.write_bytes(b"not at all " * 50)
    with pytest.raises(InputError, match=r"noise\.safetensors: .*corrupt"):
        load(noise)


def test_a_name_that_does_not_exist(tmp_path):
    with pytest.raises(InputError, match=r"'smolm2-sink'.*Did you mean 'smollm2-sink'.*gaussian"):
        load("smolm2-sink")
    with pytest.raises(InputError, match=r"dina\.safetensors: there is no such file.*'dino'"):
        load(tmp_path / "dina.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        load(tmp_path / "folder.safetensors")
    with pytest.raises(ValueError, match="2048"):
        load("smollm2-sink", length=2048)
