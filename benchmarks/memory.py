"""Peak memory of every sub-quadratic method at growing lengths, forward and backward.

    python benchmarks/memory.py [--smoke] [--length N ...] [METHOD ...]

One head, width 64, float32. Each measurement has a process of its own: it makes the inputs, resets
the peak that the kernel keeps of its resident memory, calls, and reads the peak; what was resident
before the call is subtracted. State tensors are drawn or fitted beforehand. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from speed import long_enough

import numattn
from numattn.testing import Subject, make_qkv


def resident(field: str) -> int:
    """Bytes: "VmRSS" is what is resident now, "VmHWM" the peak since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}.")


def peak_above_inputs(name: str, length: int, is_causal: bool, backward: bool) -> int:
    """Bytes of a call above what was resident before it."""
    torch.set_num_threads(2)
    method = long_enough(numattn.get(name), length)
    q, k, v = make_qkv(length, batch=1, heads=1, head_dim=64, value_dim=64, dtype=torch.float32)
    sample = tuple(x[:, :, :4096] for x in (q, k, v))
    # What is learned for positions needs them all.
    whole = method.info.needs == "training"
    tensors = Subject(method).fit(*((q, k, v) if whole else sample))
    method(*sample, is_causal=is_causal, **tensors)  # code and thread pools are loaded
    for x in (q, k, v):
        x.requires_grad_(backward)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    out = method(q, k, v, is_causal=is_causal, **tensors)
    if backward:
        out.sum().backward()
    return resident("VmHWM") - before


def in_process(name: str, length: int, is_causal: bool, backward: bool) -> int:
    """`peak_above_inputs` in a fresh process."""
    job = json.dumps([name, length, is_causal, backward])
    call = [sys.executable, __file__, "--job", job]
    return int(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: every cheap method")
    parser.add_argument("--length", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--smoke", action="store_true", help="one short length")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(peak_above_inputs(*json.loads(args.job)))
        return
    lengths = [4096] if args.smoke else args.length
    names = args.methods or [m.info.name for m in numattn.methods() if not m.info.oracle]
    print(f"{'MB above the inputs':32}" + "".join(f"{n:>9}" for n in lengths))
    for name in names:
        for is_causal in (False, True) if numattn.get(name).info.causal != "no" else (False,):
            for backward in (False, True) if numattn.get(name).info.differentiable else (False,):
                label = f"{name}{' causal' * is_causal}{' backward' if backward else ' forward'}"
                peaks = [in_process(name, n, is_causal, backward) for n in lengths]
                print(f"{label:32}" + "".join(f"{p / 1e6:9.0f}" for p in peaks), flush=True)


if __name__ == "__main__":
    main()
