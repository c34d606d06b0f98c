"""Errors of methods at a length where the weights do not fit, with confidence intervals.

    python benchmarks/long_estimate.py [--smoke] [--length N] [--rows N] [--out FILE] [METHOD ...]

One head of width 64 in float32, two threads: a synthetic input whose exact weights, 137 GB in
float64 at the default length, are never formed. A sample of their rows is computed, and the same
rows of the method's weights by its gradient; see `numattn.measure.estimate_errors`.

Means of all rows have intervals at --confidence: total variation of the weights, distance of the
output relative to the radius of the values. Those of the relative Frobenius error of the output
are wide by nature, so its standard error is there too. The last column is a number that at most 1 %
of the rows exceed in total variation, at the same confidence. Seconds are those of the estimate;
the peak is that of the process up to then.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch
from speed import commit, long_enough

import numattn
from numattn.measure import QKV, SYNTHETIC, attend, synthetic
from numattn.measure.estimate import Interval, estimate_errors

METHODS = ("window", "nystrom", "hyper", "performer")


def measure(method: numattn.Method, x: QKV, rows: int, confidence: float) -> dict[str, Any]:
    """A row of the table: what is estimated of one method, and what that took."""
    info = method.info
    start = time.perf_counter()
    error = estimate_errors(
        attend(method, x),
        x,
        rows=rows,
        confidence=confidence,
        linear_in_value=info.linear_in_value,
        with_weights=info.differentiable,
    )[0]
    seconds = time.perf_counter() - start
    return {
        "method": info.name,
        "options": method.options(),
        "tv": None if error.tv is None else plain(error.tv.mean),
        "hull": plain(error.hull.mean),
        "rows_error": plain(error.rows.mean),
        "output": plain(error.output),
        "tv_exceeded_by_1_percent": None if error.tv is None else error.tv.exceeded_by(0.01),
        "beyond_hull": error.hull.capped,
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def plain(x: Interval) -> list[float | None]:
    """Value, bounds and standard error."""
    return [x.value, x.low, x.high, x.error]


def line(row: dict[str, Any]) -> str:
    """One line of the table."""

    def interval(x: list[float] | None) -> str:
        return "" if x is None else f"{x[0]:.4f} [{x[1]:.4f}, {x[2]:.4f}]"

    def number(x: float | None) -> str:
        return "" if x is None else f"{x:.4f}"

    return (
        f"{row['method']:16}{interval(row['tv']):>26}{interval(row['hull']):>26}"
        f"{interval(row['output']):>26}{number(row['output'][3]):>9}"
        f"{number(row['tv_exceeded_by_1_percent']):>9}"
        f"{row['seconds']:9.1f}{row['peak_bytes'] / 1e6:9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"default: {METHODS}")
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--rows", type=int, default=512, help="rows of the sample")
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--kind", choices=SYNTHETIC, default="local")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a short length and few rows")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.smoke:
        args.length, args.rows = 2048, 100
    about = {
        "numattn": numattn.__version__,
        "torch": torch.__version__,
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
        "input": f"{args.kind}{' causal' * args.causal}",
        "tokens": args.length,
        "rows": args.rows,
        "confidence": args.confidence,
    }
    print(" ".join(f"{k} {v}" for k, v in about.items()))
    print(
        f"{'':16}{'total variation':>26}{'of the radius':>26}{'output':>26}{'+-':>9}"
        f"{'1 % >':>9}{'seconds':>9}{'peak MB':>9}"
    )
    x = synthetic(args.kind, args.length, heads=1, is_causal=args.causal)
    for name in args.methods or METHODS:
        row = measure(long_enough(numattn.get(name), args.length), x, args.rows, args.confidence)
        print(line(row), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({**about, **row}) + "\n")


if __name__ == "__main__":
    main()
