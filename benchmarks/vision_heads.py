"""Error and operations of attention on a grid of patches, on heads of a vision transformer.

    python benchmarks/vision_heads.py [--smoke] [--out FILE] [METHOD ...]

The bundled input "dino" has 1 class token and 37 x 37 patches. The class token is dropped, so what
is approximated is softmax attention of the patches among themselves, in float64. Kronecker and
axial attention keep the grid; a METHOD is any registered one, with its defaults, on the patches in
a row. Nothing is trained: queries and keys are those of softmax attention.

Errors are those of `numattn.measure`: Frobenius norms of the error of the output and of the
weights, relative to theirs; median and worst head. "nearest" is the nearest sum of so many
Kronecker products to the exact weights, which no method of that form comes nearer to in the second
of these errors; it needs the exact weights, so no operations are given.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import numattn
from numattn.core.cost import count_flops
from numattn.measure import (
    QKV,
    Attend,
    HeadError,
    Reference,
    attend,
    head_errors,
    load,
    mean_of_values,
    reference,
)
from numattn.tensor.axial import axial_attention
from numattn.tensor.kronecker import kronecker_attention, nearest_kronecker

RANKS = (1, 4, 16)


def patches(side: int) -> QKV:
    """The first rows and columns of the patches, without the class token."""
    x = load("dino")
    whole = round((x.length - 1) ** 0.5)

    def crop(t: Tensor) -> Tensor:
        grid = t[:, :, 1:].unflatten(2, (whole, whole))
        return grid[:, :, :side, :side].flatten(2, 3)

    return replace(x, q=crop(x.q), k=crop(x.k), v=crop(x.v))


def on_grid(attention: Callable[..., Tensor], side: int, scale: float) -> Attend:
    """A function of tokens on a grid, as one of tokens in a row."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (side, side)) for t in (q, k, v))
        return attention(q, k, v, scale=scale).flatten(2, 3)

    return fn


def nearest(ref: Reference, side: int) -> dict[str, Attend]:
    """The nearest sums of Kronecker products to the exact weights, of every rank."""
    shape = (side, side)
    best = [nearest_kronecker(a, shape, shape, rank=max(RANKS)) for a in ref.weights()[0]]

    def fn(rank: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([b.keep(rank).apply(v[0, h]) for h, b in enumerate(best)])[None]

    return {f"nearest, {rank}": partial(fn, rank) for rank in RANKS}


def contenders(x: QKV, side: int, methods: list[str]) -> dict[str, Attend]:
    """What is measured, by the name of its row."""
    kinds = {
        "kronecker product": kronecker_attention,
        "kronecker product, normalised": partial(kronecker_attention, normalize=True),
        "kronecker sum": partial(kronecker_attention, form="sum"),
        "axial criss-cross": axial_attention,
        "axial sequential": partial(axial_attention, form="sequential"),
    }
    fns = {name: on_grid(kind, side, x.scale) for name, kind in kinds.items()}
    exact = partial(numattn.exact_attention, scale=x.scale)
    registered = {name: attend(numattn.get(name), x) for name in methods}
    return {"exact": exact, **fns, **registered}


@torch.no_grad()
def measure(side: int, methods: list[str]) -> list[dict[str, Any]]:
    """A row for each contender: errors of all heads, and operations of one."""
    x = patches(side)
    ref = reference(x)
    y, heads = x.to(torch.float32), x.q.shape[1]
    rows = []
    for name, fn in contenders(x, side, methods).items():
        errors = head_errors(fn, ref, dtype=torch.float64)
        flops = count_flops(lambda fn=fn: fn(y.q, y.k, y.v)) / heads  # type: ignore[misc]
        rows.append(row(name, errors, flops))
    rows.append(row("mean of values", mean_of_values(ref), 0.0))
    for name, fn in nearest(ref, side).items():
        rows.append(row(name, head_errors(fn, ref, dtype=torch.float64), None))
    return rows


def row(name: str, errors: list[HeadError], flops: float | None) -> dict[str, Any]:
    """What is written of one contender."""
    output, weights = [e.output for e in errors], [e.weights for e in errors]
    return {"name": name, "output": output, "weights": weights, "flops": flops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="registered ones, to compare")
    parser.add_argument("--smoke", action="store_true", help="a corner of 7 x 7 patches")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(7 if args.smoke else 37, args.methods)
    print("weights of | output, median | output, worst | weights, median | weights, worst | MFLOP")
    print(":-- | --: | --: | --: | --: | --:")
    for r in rows:
        numbers = [f(r[of]) for of in ("output", "weights") for f in (statistics.median, max)]
        flops = "" if r["flops"] is None else f"{r['flops'] / 1e6:.1f}"
        print(" | ".join([r["name"], *(f"{x:.3f}" for x in numbers), flops]))
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in rows)


if __name__ == "__main__":
    main()
