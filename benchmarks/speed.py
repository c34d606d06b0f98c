"""Time of every cheap method against scaled_dot_product_attention, in turn, in one run.

    python benchmarks/speed.py [--smoke] [--length N ...] [METHOD ...]

A METHOD is a name, or a name with options: "lsh(bucket_size=64, num_rounds=1)".

For each length and form, the method and torch's attention run in turn (A B A B ...); medians of
wall and of process CPU time, and of the ratios of wall times. State tensors are drawn or fitted
beforehand, as a layer keeps them. The floor is the time of in-cache matrix products with as many
operations as those that the method needs, counted in a call, and timed in turn with it. A method
whose contract fails at its usual options is not timed.

The script runs itself again with glibc told to keep freed memory (MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_): else every allocation above 32 MB is mapped and faulted in anew, which
would be timed instead of the arithmetic. One JSON line a measurement goes to --out.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import numattn
from numattn.core.cost import count_flops
from numattn.measure.timing import ALLOCATOR, compare
from numattn.testing import Subject, check, make_qkv


def keep_freed_memory() -> None:
    """Run this script again with glibc set to keep freed memory, unless it is already."""
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})


def products(flops: int, heads: int, dim: int) -> Callable[[], None]:
    """Matrix products of about this many operations, (heads, 512, dim) @ (heads, dim, 256)."""
    a, b = torch.randn(heads, 512, dim), torch.randn(heads, dim, 256)
    out = torch.empty(heads, 512, 256)
    times = max(round(flops / (2 * heads * 512 * dim * 256)), 1)

    def run() -> None:
        for _ in range(times):
            torch.bmm(a, b, out=out)

    return run


def long_enough(method: numattn.Method, length: int) -> numattn.Method:
    """The same, with room for sequences of this length where it has a limit."""
    if getattr(method, "max_length", length) >= length:
        return method
    return replace(method, max_length=length)  # type: ignore[call-arg]


def measure(
    method: numattn.Method, length: int, is_causal: bool, repeats: int
) -> dict[str, object]:
    """One method at one length against torch's attention and the floor."""
    heads, dim = 8, 64
    method = long_enough(method, length)
    q, k, v = make_qkv(
        length, batch=1, heads=heads, head_dim=dim, value_dim=dim, dtype=torch.float32
    )
    tensors = Subject(method).fit(q, k, v)

    def call() -> object:
        return method(q, k, v, is_causal=is_causal, **tensors)

    def sdpa() -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    beside_sdpa = compare(call, sdpa, repeats, limit=math.inf)
    beside_floor = compare(call, products(count_flops(call), heads, dim), repeats, limit=math.inf)
    return {
        "method": method.to_dict(),
        "length": length,
        "causal": is_causal,
        "ms": 1e3 * beside_sdpa.seconds,
        "cpu_ms": 1e3 * beside_sdpa.cpu_seconds,
        "sdpa_ms": 1e3 * beside_sdpa.baseline_seconds,
        "sdpa_cpu_ms": 1e3 * beside_sdpa.baseline_cpu_seconds,
        "ratio": beside_sdpa.ratio,
        "cpu_ratio": beside_sdpa.cpu_seconds / beside_sdpa.baseline_cpu_seconds,
        "floor_ms": 1e3 * beside_floor.baseline_seconds,
        "over_floor": beside_floor.ratio,
    }


def parse(text: str) -> numattn.Method:
    """A method from its name, or from its name with options in brackets."""
    call = ast.parse(text.strip(), mode="eval").body
    if isinstance(call, ast.Name):
        return numattn.get(call.id)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise SystemExit(f"{text!r} must be NAME or NAME(option=value, ...).")
    options = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    return numattn.get(call.func.id, **options)


def commit() -> str:
    """The commit that is measured, or "unknown" outside a checkout."""
    here = Path(__file__).parent
    call = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(call, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: every cheap method")
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="one short length, one repeat")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    if args.smoke:
        args.length, args.repeats = [512], 1
    names = args.methods or [m.info.name for m in numattn.methods() if not m.info.oracle]
    about = {
        "numattn": numattn.__version__,
        "torch": torch.__version__,
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
    }
    print(" ".join(f"{k} {v}" for k, v in about.items()))
    print(
        f"{'':28}{'ms':>9}{'sdpa ms':>9}{'ratio':>8}{'cpu ratio':>10}{'floor ms':>9}{'x floor':>8}"
    )
    for method in [parse(name) for name in names]:
        check(type(method))
        for length in args.length:
            for is_causal in (False, True) if method.info.causal != "no" else (False,):
                row = measure(method, length, is_causal, args.repeats)
                label = f"{method.info.name} {length}{' causal' if is_causal else ''}"
                print(
                    f"{label:28}{row['ms']:9.1f}{row['sdpa_ms']:9.1f}{row['ratio']:8.3f}"
                    f"{row['cpu_ratio']:10.3f}{row['floor_ms']:9.1f}{row['over_floor']:8.2f}",
                    flush=True,
                )
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps({**about, **row}) + "\n")


if __name__ == "__main__":
    main()
