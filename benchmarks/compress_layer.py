"""Output error of a compressed attention layer against the compression of its weights.

    python benchmarks/compress_layer.py --layer FILE [--share S ...] [METHOD ...]
    python benchmarks/compress_layer.py --smoke

FILE holds a layer and what it sees, as safetensors: x (N, embed_dim), its weights wq, wk, wv and wo
as those of `torch.nn.Linear`, and cos and sin (N, head_dim) of its rotary embedding. Each method of
`numattn.tensor.compress` keeps several shares of the weights' numbers, once with the weights alone
and once weighted by second moments of the first half of the tokens. Errors are norms over norms on
the second half: of what each projection gives, and of the layer, which attends to all tokens. The
method svd cuts each projection by itself, with the same weighting. The plot shows the errors of
queries and of the layer against the ratio of the numbers before and after.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numattn.core.rotary import Rotary
from numattn.latent.grouped import GroupedQueryAttention
from numattn.tensor.compress import compress_layer

METHODS = ("svd", "cp", "tucker", "tt")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def load(file: Path, base: float) -> tuple[GroupedQueryAttention, Tensor]:
    """A layer and its hidden states (1, N, embed_dim), in float64."""
    from safetensors.torch import load_file

    t = load_file(file)
    head_dim = t["cos"].shape[1]
    rotary = Rotary(head_dim, base)
    angle = torch.arange(len(t["cos"]))[:, None] * rotary.frequencies()
    off = (angle.cos() - t["cos"][:, : head_dim // 2].double()).abs().max()
    if off > 1e-3:
        raise SystemExit(f"cos is off by {off:.2g} from that of --base {base}.")
    layer = GroupedQueryAttention(
        t["x"].shape[1],
        len(t["wq"]) // head_dim,
        kv_heads=len(t["wk"]) // head_dim,
        head_dim=head_dim,
        rotary=rotary,
    )
    put(layer, {f"{name}_proj": t[f"w{name}"] for name in "qkvo"})
    return layer.double(), t["x"].double()[None]


def random_layer() -> tuple[GroupedQueryAttention, Tensor]:
    """A small layer with random weights, and hidden states of falling size (1, 40, 24)."""
    torch.manual_seed(0)
    layer = GroupedQueryAttention(24, 4, kv_heads=2, head_dim=6).double()
    return layer, torch.randn(1, 40, 24).double() / torch.arange(1, 25)


@torch.no_grad()
def put(layer: GroupedQueryAttention, weights: dict[str, Tensor]) -> GroupedQueryAttention:
    """Give a layer other weights."""
    for name, weight in weights.items():
        getattr(layer, name).weight.copy_(weight)
    return layer


@torch.no_grad()
def seen(layer: GroupedQueryAttention, x: Tensor) -> dict[str, Tensor]:
    """What each projection is given, and what the layer gives, (N, width)."""
    found = {}
    hooks = [
        getattr(layer, name).register_forward_pre_hook(
            lambda _, args, name=name: found.update({name: args[0][0]})
        )
        for name in PROJECTIONS
    ]
    found["layer"] = layer(x)[0]
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def cut(
    layer: GroupedQueryAttention, inputs: dict[str, Tensor] | None, share: float
) -> tuple[dict[str, Tensor], int]:
    """Every projection by its own singular value decomposition, and how many numbers they need."""
    weights, numbers = {}, 0
    for name in PROJECTIONS:
        w = getattr(layer, name).weight
        moment = torch.eye(w.shape[1]).to(w)
        if inputs is not None:
            given = inputs[name].mT @ inputs[name]
            moment = given / given.diagonal().mean() + 0.01 * moment
        rank = max(int(share * w.numel() / sum(w.shape)), 1)
        u = torch.linalg.eigh(w @ moment @ w.mT)[1][:, -rank:]
        weights[name] = u @ u.mT @ w
        numbers += rank * sum(w.shape)
    return weights, numbers


def measure(
    layer: GroupedQueryAttention, x: Tensor, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for every method, share and weighting."""
    half = x.shape[1] // 2
    before, start = seen(layer, x), seen(layer, x[:, :half])
    total = sum(getattr(layer, name).weight.numel() for name in PROJECTIONS)
    for method in args.methods:
        for share in args.share:
            for weighted in (False, True):
                began = time.perf_counter()
                ranks, flops, cancellation = "", share, 1.0
                if method == "svd":
                    weights, numbers = cut(layer, start if weighted else None, share)
                    flops = numbers / total
                else:
                    call: dict[str, Any] = {}
                    if method == "cp":
                        generator = torch.Generator().manual_seed(0)
                        call = {"iterations": args.sweeps, "starts": 1, "generator": generator}
                    found = compress_layer(
                        layer,
                        method=method,
                        rank=share,
                        calibration=x[:, :half] if weighted else None,
                        **call,
                    )
                    weights, numbers = found.layer.weights(), found.parameters
                    ranks = "; ".join(",".join(map(str, r)) for r in found.ranks)
                    flops, cancellation = found.flops / found.flops_before, found.cancellation
                seconds = time.perf_counter() - began
                after = seen(put(copy.deepcopy(layer), weights), x)["layer"]
                yield {
                    "method": method,
                    "weighted": weighted,
                    "ratio": total / numbers,
                    "flops": flops,
                    "ranks": ranks,
                    "cancellation": cancellation,
                    "seconds": seconds,
                    "layer": off(after[half:], before["layer"][half:]),
                } | {
                    name: off(
                        before[name][half:] @ weights[name].detach().mT,
                        before[name][half:] @ getattr(layer, name).weight.detach().mT,
                    )
                    for name in PROJECTIONS
                }


def off(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((ours - theirs).norm() / theirs.norm())


def plot(rows: list[dict[str, Any]], target: str | Path) -> None:
    """Errors of queries and of the layer against the ratio, weighted ones solid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, name, what in zip(
        figure.subplots(1, 2), ("q_proj", "layer"), ("queries", "the layer"), strict=True
    ):
        for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
            for weighted in (False, True):
                mine = [r for r in rows if (r["method"], r["weighted"]) == (method, weighted)]
                mine.sort(key=lambda row: row["ratio"])
                axes.plot(
                    [row["ratio"] for row in mine],
                    [row[name] for row in mine],
                    ("o-" if weighted else "o--"),
                    color=f"C{number}",
                    label=f"{method}, weighted" if weighted else method,
                )
        axes.set(xlabel="compression ratio", ylabel=f"error of {what}", yscale="log")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(target, format="png" if target == os.devnull else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--layer", type=Path, metavar="FILE", help="weights and hidden states")
    parser.add_argument("--base", type=float, default=100000.0, help="of the rotary embedding")
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.4, 0.6, 0.8])
    parser.add_argument("--sweeps", type=int, default=10, help="of alternating least squares, CP")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the table")
    parser.add_argument("--smoke", action="store_true", help="a small random layer")
    args = parser.parse_args()
    args.methods = args.methods or list(METHODS)
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"METHOD must be of {', '.join(METHODS)}; got {', '.join(sorted(unknown))}.")
    if args.smoke:
        if args.layer:
            parser.error("--smoke makes a layer of its own: give it no --layer.")
        args.share, args.plot = [0.5], os.devnull
    elif args.layer is None or not args.layer.is_file():
        parser.error(f"--layer must be there, or --smoke instead; got {args.layer}.")
    return args


def main() -> None:
    args = parse()
    layer, x = random_layer() if args.smoke else load(args.layer, args.base)
    print("method | weighted | ratio | flops | q | k | v | o | layer | cancels | seconds | ranks")
    print("--- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | ---")
    rows = []
    for row in measure(layer, x, args):
        errors = " | ".join(f"{row[name]:.3f}" for name in (*PROJECTIONS, "layer"))
        print(
            f"{row['method']} | {'yes' if row['weighted'] else 'no'} | {row['ratio']:.2f} | "
            f"{row['flops']:.2f} | {errors} | {row['cancellation']:.1f} | {row['seconds']:.1f} | "
            f"{row['ranks']}",
            flush=True,
        )
        rows.append(row)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
