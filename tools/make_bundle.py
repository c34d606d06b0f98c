"""Make the bundle of real q, k, v in numattn/data from captured heads.

    python tools/make_bundle.py SOURCE [TARGET]

SOURCE holds safetensors files of captured heads and their ``manifest.json``. A captured entry has
a prefix, under which its file stores q (H, N, D), k (Hk, N, D), v (Hk, N, D), as they enter
softmax(scale q k^T) v (after any rotary embedding), and the model's own output o (H, R, D) at the
rows o_rows. `ENTRIES` says which captured entries make up which entry of the bundle; heads of one
model on one input are stacked.

Nothing is rounded: tensors stay float16 as captured. Before an entry is written, attention is
computed from it in float64 and compared with o, so that a mistaken scale, mask or order of heads
cannot enter. Each file is written in the form that `numattn.measure.load` takes from users.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from numattn.exact import exact_attention

LIMIT = 12_000_000  # bytes of the whole bundle
TOLERANCE = 5e-3  # float16 rounding of q and k, seen in the output of heads with large logits

# where the name and licence of a captured entry are those of a package, the model's own
MODELS = {"dinov2-s14": ("facebook/dinov2-small", "Apache-2.0")}
SOURCES = {"dinov2-s14": "grace_hopper.jpg, from matplotlib's sample data (US Navy photograph)"}


class Entry(NamedTuple):
    """An entry of the bundle: captured file and prefixes, a tag, and what it looks like.

    A causal one may be cut to its first `length` tokens. One that `calibrates` another holds the
    same heads on another text.
    """

    stem: str
    prefixes: tuple[str, ...]
    tag: str
    looks: str
    length: int | None = None
    calibrates: str | None = None


ENTRIES = {
    "smollm2-diffuse": Entry(
        "smollm2-135m.jargon.n1024",
        ("L0.kv2.",),
        "causal, diffuse",
        "Mass spread over hundreds of keys, small logits, no sink.",
    ),
    "smollm2-previous": Entry(
        "smollm2-135m.jargon.n1024",
        ("L16.kv0.",),
        "causal, previous token and sink",
        "Head 0 attends to the previous token, which no low rank serves; heads 1 and 2 share "
        "their mass between nearby keys and the first token.",
    ),
    "smollm2-sink": Entry(
        "smollm2-135m.jargon.n1024",
        ("L18.kv2.",),
        "causal, sink",
        "Nearly all mass on the first token, whose value is small: the output is in what remains.",
    ),
    "smollm2-heavy": Entry(
        "smollm2-135m.argparse.n1024",
        ("L4.kv1.",),
        "causal, heavy hitters",
        "A few keys, often far away, hold most of the mass; a different few for each query.",
    ),
    "smollm2-local": Entry(
        "smollm2-135m.argparse.n1024",
        ("L11.kv0.",),
        "causal, local",
        "Mass on nearby keys, no sink, high rank.",
    ),
    "smollm2-long": Entry(
        "smollm2-135m.jargon.n8192",
        ("L7.kv2.",),
        "causal, long, far retrieval",
        "8192 tokens; the mass on few keys, mostly far away. One query head of its group.",
    ),
    "minilm": Entry(
        "minilm-l6.jargon.n512",
        ("L0.", "L1.", "L5."),
        "bidirectional text, mixed heads",
        "Head 0 nearly one-hot, 1 and 2 diffuse, 3 local and of high rank, 4 and 5 of low rank.",
    ),
    "dino": Entry(
        "dinov2-s14.grace_hopper.n1370",
        ("L0.", "L3.", "L9.", "L11."),
        "image patches, mixed heads",
        "37 x 37 patches after one class token. Head 0 diffuse, 1 with nearly all mass on one "
        "column, 2 local in the plane and of high rank with a large common part of the keys, "
        "3 semantic clusters, 4 diffuse and of the lowest rank.",
    ),
    "smollm2-heavy-prose": Entry(
        "smollm2-135m.jargon.n4096",
        ("L4.kv1.",),
        "causal, heavy hitters",
        "The heads of smollm2-heavy, which reads source code, on prose.",
        length=1024,
        calibrates="smollm2-heavy",
    ),
    "smollm2-local-prose": Entry(
        "smollm2-135m.jargon.n4096",
        ("L11.kv0.",),
        "causal, local",
        "The heads of smollm2-local, which reads source code, on prose.",
        length=1024,
        calibrates="smollm2-local",
    ),
}


def main() -> None:
    """Make the bundle."""
    parser = argparse.ArgumentParser(description="Make numattn/data from captured heads.")
    parser.add_argument("source", type=Path)
    parser.add_argument(
        "target", type=Path, nargs="?", default=Path(__file__).parents[1] / "numattn" / "data"
    )
    args = parser.parse_args()
    captured = json.loads((args.source / "manifest.json").read_text(encoding="utf-8"))["entries"]
    entries = [write(name, args.source, args.target, captured) for name in ENTRIES]
    size = sum((args.target / entry["file"]).stat().st_size for entry in entries)
    if size > LIMIT:
        raise SystemExit(f"the bundle has {size} bytes, more than {LIMIT}.")
    manifest = {
        "formula": "o = softmax(scale q k^T, causal where causal) v; query head h uses key head "
        "h // (H / Hk)",
        "entries": entries,
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    (args.target / "manifest.json").write_text(text, encoding="utf-8")
    print(f"{len(entries)} entries, {size / 1e6:.1f} MB")


def write(name: str, source: Path, target: Path, captured: list[dict[str, Any]]) -> dict[str, Any]:
    """Write one entry; return its part of the manifest."""
    entry = ENTRIES[name]
    file = f"{entry.stem}.safetensors"
    parts = [e for p in entry.prefixes for e in captured if (e["file"], e["prefix"]) == (file, p)]
    whole = all(part["whole_group"] for part in parts) or len(parts) == 1
    if len(parts) != len(entry.prefixes) or not whole:
        raise SystemExit(
            f"{name}: {file} must have whole groups under {', '.join(entry.prefixes)}."
        )
    first = parts[0]
    with safe_open(source / file, framework="pt") as tensors:
        for part in parts:
            check(name, part, {n: tensors.get_tensor(part["prefix"] + n) for n in NAMES})
        q, k, v = (
            torch.cat([tensors.get_tensor(p + n) for p in entry.prefixes])[None] for n in "qkv"
        )
    if entry.length is not None:
        if not first["causal"]:
            raise SystemExit(f"{name}: only causal attention may be cut.")
        q, k, v = (x[:, :, : entry.length].contiguous() for x in (q, k, v))
    model, licence = MODELS.get(first["model"], (first["hf_name"], first["weights_licence"]))
    origin = SOURCES.get(first["model"], first["source"])
    metadata = {
        "is_causal": str(first["causal"]).lower(),
        "scale": repr(first["scale"]),
        "tag": entry.tag,
        "source": f"{model}; {origin}",
    }
    data = stable(save({"q": q, "k": k, "v": v}, metadata=metadata))
    (target / f"{name}.safetensors").write_bytes(data)
    return {
        "name": name,
        "file": f"{name}.safetensors",
        "model": model,
        "licence": licence,
        "package": first["package"],
        "source": origin,
        "source_licence": first["source_licence"],
        "causal": first["causal"],
        "layers": [part["layer"] for part in parts for _ in part["query_heads"]],
        "heads": [head for part in parts for head in part["query_heads"]],
        "kv_heads": [head for part in parts for head in part["kv_heads"]],
        "N": q.shape[2],
        "d": q.shape[3],
        "scale": first["scale"],
        "dtype": "float16",
        "tag": entry.tag,
        "looks": entry.looks,
        **({"calibrates": entry.calibrates} if entry.calibrates else {}),
    }


def stable(data: bytes) -> bytes:
    """The same file with a sorted header, so that making the bundle again changes no byte."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


NAMES = ("q", "k", "v", "o", "o_rows")


def check(name: str, part: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Compare attention computed from the stored tensors with the model's own output."""
    q, k, v, o = (tensors[n].double()[None] for n in ("q", "k", "v", "o"))
    out = exact_attention(
        q, k, v, is_causal=part["causal"], scale=part["scale"], enable_gqa=part["group_size"] > 1
    )[:, :, tensors["o_rows"].long()]
    error = ((out - o).norm(dim=(-2, -1)) / o.norm(dim=(-2, -1))).max().item()
    if error > TOLERANCE:
        raise SystemExit(f"{name}, {part['prefix']}: differs from the model by {error:.1e}.")


if __name__ == "__main__":
    main()
