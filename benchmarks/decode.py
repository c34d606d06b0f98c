"""Error of decoding against the bytes that a step reads, by default on the longest bundled head.

    python benchmarks/decode.py [--smoke] [--input NAME] [--steps S] [METHOD ...]

A METHOD is a name, or a name with options: "eigen(weighting='query')".

Every method that decodes and approximates softmax takes in all but the last tokens of the input,
then decodes these one by one. What it fits beforehand is fitted on the same heads reading another
text where the bundle has one (`numattn.measure.calibration`), else on the tokens that it takes in.
The error is that of the output against exact attention in float64,
over all steps of a query head; bytes are those of the state that a step has to read, relative to
all keys and values, on average over the steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median

import torch
from speed import parse

import numattn
from numattn.measure import bundled, calibration, load, reference
from numattn.measure.inputs import QKV


def decode(method: numattn.Method, x: QKV, steps: int) -> tuple[list[float], float]:
    """Relative error of each query head over the last `steps` tokens, and the share read."""
    q, k, v = x.q.float(), x.k.float(), x.v.float()
    start = x.length - steps
    call = x.call(method)
    del call["is_causal"]
    other = calibration(x.name)
    sample = x.crop(start) if other is None else load(other)
    tensors = method.fit(
        *(y.float() for y in (sample.q, sample.k, sample.v)),
        **call,
        **({"generator": torch.Generator().manual_seed(0)} if method.info.random else {}),
    )
    state = method.state(k[:, :, :start], v[:, :, :start], **call, **tensors)
    outs, read = [], []
    for t in range(start, x.length):
        state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        outs.append(state.attend(q[:, :, t : t + 1]))
        whole = (t + 1) * 4 * k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
        read.append(state.nbytes_read / whole)
    exact = reference(x).out[:, :, start:]
    error = (torch.cat(outs, 2) - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
    return error.flatten().tolist(), mean(read)


def label(method: numattn.Method) -> str:
    """The name, with the options that are neither usual nor the budget."""
    usual = type(method)().options()
    changed = {
        n: o for n, o in method.options().items() if o != usual[n] and n != method.info.budget
    }
    options = ", ".join(f"{n}={o!r}" for n, o in changed.items())
    return f"{method.info.name}({options})" if options else method.info.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all that decode")
    parser.add_argument("--input", metavar="NAME", help="default: the longest causal bundled head")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    parser.add_argument("--budget", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--smoke", action="store_true", help="a short input, two steps, one budget")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    inputs = [load(name) for name in bundled()] if args.input is None else [load(args.input)]
    causal = [x for x in inputs if x.is_causal]
    if not causal:
        parser.error(f"{args.input} is not causal: there is nothing to decode.")
    x = max(causal, key=lambda x: x.length)
    if args.smoke:
        x, args.steps, args.budget = x.crop(256), 2, [16]
    able = [m for m in numattn.methods() if m.info.decode and m.info.approximates == "softmax"]
    able = [m for m in able if m.info.needs == "nothing"]
    methods = [parse(name) for name in args.methods] or [m() for m in able]
    print(f"{x.name}, {x.length} tokens, the last {args.steps} decoded one by one")
    print(f"{'':32}{'budget':>8}{'bytes read':>12}{'error':>10}{'worst head':>12}")
    for given in methods:
        for budget in args.budget if given.info.budget else [None]:
            method = given if budget is None else given.with_budget(budget)
            name = label(method)
            errors, read = decode(method, x, args.steps)
            print(
                f"{name:32}{budget or '':>8}{read:12.3f}{median(errors):10.4f}{max(errors):12.4f}"
            )
            if args.out:
                row = {"method": method.to_dict(), "read": read, "errors": errors}
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
