"""Perplexity of a model whose attention layers are converted to latent attention, against rank.

    python benchmarks/convert_model.py FOLDER --text FILE [--rank R ...] [--rope-rank R ...]
    python benchmarks/convert_model.py --smoke

FOLDER holds a Llama-type model of transformers and its tokenizer. The first tokens of the text
calibrate, those after them are what perplexity is measured on, in sequences without context. For
each width of the rotated key and each rank of the latent all layers are converted by
`numattn.latent.convert.to_mla_model`, and nothing is trained. The table shows what a token leaves
in the cache relative to the model as it was, the perplexity, and the relative error of a layer's
output where it sees the hidden states of that model: its median over the layers, and the largest.
The plot shows both against what is kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from numattn.latent.convert import to_mla_model


def load(folder: Path, gguf: str | None, text: Path, length: int) -> tuple[Any, Tensor]:
    """A model in float32, and the text's tokens in whole sequences (B, length)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    call = {} if gguf is None else {"gguf_file": gguf}
    tokenizer = AutoTokenizer.from_pretrained(folder, **call)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", **call
    )
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    return model.eval(), ids[: len(ids) // length * length].unflatten(0, (-1, length))


def random_model(length: int) -> tuple[Any, Tensor]:
    """A small model with random weights, and random tokens (8, length)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval(), torch.randint(64, (8, length))


@torch.no_grad()
def perplexity(model: Any, sequences: Tensor) -> float:
    """Exponential of the mean negative log-likelihood of all tokens but the first ones."""
    losses = [
        F.cross_entropy(model(ids[None], use_cache=False).logits[0, :-1].float(), ids[1:])
        for ids in sequences
    ]
    return float(torch.stack(losses).mean().exp())


@torch.no_grad()
def seen(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What every attention layer gets and gives on a sequence (N,)."""
    found: list[tuple[Tensor, Tensor]] = []

    def see(module: Any, args: Any, call: dict[str, Any], out: Any) -> None:
        found.append((args[0] if args else call["hidden_states"], out[0]))

    hooks = [
        block.self_attn.register_forward_hook(see, with_kwargs=True) for block in model.model.layers
    ]
    model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def layer_errors(model: Any, pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Relative error of the output of every converted layer."""
    return [
        float((block.self_attn(hidden)[0] - want).norm() / want.norm())
        for block, (hidden, want) in zip(model.model.layers, pairs, strict=True)
    ]


def measure(
    model: Any, calibration: Tensor, test: Tensor, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for every width of the rotated key and every rank."""
    config, pairs = model.config, seen(model, test[0])
    attention = model.model.layers[0].self_attn
    whole = attention.k_proj.out_features + attention.v_proj.out_features
    for rope_rank in args.rope_rank:
        for rank in args.rank:
            converted: Any = to_mla_model(
                copy.deepcopy(model),
                calibration,
                rank=rank,
                rope_rank=rope_rank,
                method=args.method,
                fold=args.fold,
                select=args.select,
            )
            latent = converted.model.layers[0].self_attn.layer
            yield {
                "model": config.name_or_path or config.model_type,
                "method": args.method,
                "fold": args.fold,
                "select": args.select,
                "rope_rank": rope_rank,
                "rank": latent.kv_rank,
                "kept": (latent.kv_rank + rope_rank) / whole,
                "perplexity": perplexity(converted, test),
                "errors": layer_errors(converted, pairs),
            }


def plot(rows: list[dict[str, Any]], before: float, target: str | Path) -> None:
    """Error of the layers and perplexity against what is kept, a line a width of rotated keys."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for rope_rank in sorted({row["rope_rank"] for row in rows}):
        mine = sorted((r for r in rows if r["rope_rank"] == rope_rank), key=lambda r: r["kept"])
        kept, label = [row["kept"] for row in mine], f"{rope_rank} rotated"
        left.plot(kept, [median(row["errors"]) for row in mine], "o-", label=label)
        right.plot(kept, [row["perplexity"] for row in mine], "o-", label=label)
    right.axhline(before, color="black", linestyle="--", label="not converted")
    left.set(ylabel="error of a layer, median", yscale="log")
    right.set(ylabel="perplexity", yscale="log")
    for axes in (left, right):
        axes.set(xlabel="share of the cache that is kept")
        axes.legend()
    figure.savefig(target, format="png" if target == os.devnull else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a model and its tokenizer")
    parser.add_argument("--text", type=Path, metavar="FILE", help="to calibrate and measure on")
    parser.add_argument("--gguf", metavar="NAME", help="the file in FOLDER, if the model is a GGUF")
    parser.add_argument("--rank", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--rope-rank", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--method", choices=["transmla", "mha2mla"], default="transmla")
    parser.add_argument("--fold", type=int, default=1)
    parser.add_argument("--select", help="components that are rotated, as of `to_mla`")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--calibration", type=int, default=16, help="sequences to calibrate on")
    parser.add_argument("--sequences", type=int, default=8, help="sequences to measure on")
    parser.add_argument("--plot", type=Path, default=Path("convert_model.png"))
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--smoke", action="store_true", help="a small random model, a few tokens")
    args = parser.parse_args()
    if args.smoke:
        if args.folder or args.text:
            parser.error("--smoke makes a model of its own: give it no FOLDER and no --text.")
        args.length, args.calibration, args.sequences = 16, 4, 2
        args.rank, args.rope_rank, args.plot = [4, 16], [8, 16], os.devnull
        return args
    for name, path, exists in (
        ("FOLDER", args.folder, Path.is_dir),
        ("--text", args.text, Path.is_file),
    ):
        if path is None or not exists(path):
            parser.error(f"{name} must be there, or --smoke instead; got {path}.")
    return args


def main() -> None:
    args = parse()
    if args.smoke:
        model, ids = random_model(args.length)
    else:
        model, ids = load(args.folder, args.gguf, args.text, args.length)
    need = args.calibration + args.sequences
    if len(ids) < need:
        raise SystemExit(f"{need} sequences of {args.length} tokens are needed; got {len(ids)}.")
    calibration, test = ids[: args.calibration], ids[args.calibration : need]
    before = perplexity(model, test)
    print(f"{args.method}, fold {args.fold}; {test.numel()} tokens; perplexity before {before:.3f}")
    print(f"{'rotated':>8}{'rank':>6}{'kept':>8}{'perplexity':>12}{'layer error':>13}{'worst':>9}")
    rows = []
    for row in measure(model, calibration, test, args):
        print(
            f"{row['rope_rank']:8}{row['rank']:6}{row['kept']:8.3f}{row['perplexity']:12.3f}"
            f"{median(row['errors']):13.4f}{max(row['errors']):9.4f}",
            flush=True,
        )
        rows.append(row)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row | {"before": before}) + "\n")
    plot(rows, before, args.plot)


if __name__ == "__main__":
    main()
