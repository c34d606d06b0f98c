"""The command ``numattn``: list, show, measure, plot. A few lines each over the library."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import platform
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numattn.core.method import Method
    from numattn.measure.inputs import QKV
    from numattn.measure.rows import Row
    from numattn.measure.sweep import Progress

WIDTH = 100
LENGTH = 1024  # inputs are cut to this by default, so that everything takes a minute or two
RESULTS = "numattn-results"

DESCRIPTION = """\
Approximations of softmax attention: see what there is, and measure how wrong each of them is.
"""

EXAMPLES = """\
examples:
  numattn list                            every method, by family
  numattn show nystrom                    what one method does, its options, its limits
  numattn measure                         all methods on heads of trained models (2-3 minutes)
  numattn measure nystrom topk --budget 32 128
  numattn measure --input gaussian my.safetensors --length 512 --out results/mine
  numattn plot results/mine               draw the pictures again from the rows
"""

MEASURE = """\
Run methods beside exact attention and report the error of each head's output and weights, how
near the method comes to the best possible answer of its family, and what it costs.

--out receives rows.jsonl (every number, one head a line), report.md, report.csv, and two pictures.
Work that rows.jsonl already holds is not repeated: a measurement that was stopped goes on, and
more methods, budgets or inputs can be added to it.

On Linux the command first restarts itself with glibc's MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_ raised, unless the former is set: otherwise every large tensor is paid for
in page faults, which distorts the times.
"""

MEASURE_EXAMPLES = """\
examples:
  numattn measure
  numattn measure nystrom performer --budget 16 64 256 --seeds 5
  numattn measure --family sparse lowrank
  numattn measure --input gaussian sink my.safetensors --length 512
"""


class _UserError(Exception):
    """Something the user can put right; the message says what and how."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    0: done. 1: done, but a method failed. 2: something in the command, an input or a file is
    wrong. 130: interrupted.
    """
    args = _parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        if argv is None and args.run is _measure:
            _raise_malloc_thresholds()
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except _UserError as error:
        print(f"numattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nnumattn: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="numattn", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw
    )
    from numattn import __version__

    parser.add_argument("--version", action="version", version=f"numattn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = commands.add_parser("list", help="every method, by family")
    add.set_defaults(run=_list)

    add = commands.add_parser("show", help="what one method does, its options, its limits")
    add.add_argument("method", metavar="METHOD", help="a name from `numattn list`")
    add.set_defaults(run=_show)

    add = commands.add_parser(
        "measure",
        help="error, cost and time beside exact attention",
        description=MEASURE,
        epilog=MEASURE_EXAMPLES,
        formatter_class=raw,
    )
    _measure_arguments(add)
    add.set_defaults(run=_measure)

    add = commands.add_parser("plot", help="draw the pictures of a measurement again")
    add.add_argument("dir", type=Path, metavar="DIR", help="the --out of `numattn measure`")
    add.set_defaults(run=_plot)
    return parser


def _measure_arguments(add: argparse.ArgumentParser) -> None:
    from numattn.core.info import FAMILIES

    add.add_argument(
        "methods", nargs="*", metavar="METHOD", help="default: all that need no training"
    )
    add.add_argument(
        "--family",
        nargs="+",
        action="extend",
        choices=FAMILIES,
        metavar="F",
        help="all methods of a family that need no training: " + ", ".join(FAMILIES),
    )
    add.add_argument(
        "--budget",
        type=_positive,
        nargs="+",
        action="extend",
        metavar="B",
        help="values of each method's budget option (default: 16 64 256 ..., up to half of N)",
    )
    add.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="INPUT",
        help="bundled or synthetic inputs by name, or .safetensors files that hold q, k and v "
        "(default: everything that is bundled)",
    )
    add.add_argument(
        "--length",
        type=_positive,
        default=LENGTH,
        metavar="N",
        help="use at most this many tokens of each input (default: %(default)s)",
    )
    add.add_argument(
        "--seeds",
        type=_positive,
        default=2,
        metavar="K",
        help="draws of each random method (default: %(default)s)",
    )
    add.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        default="float32",
        help="type in which the methods run (default: %(default)s)",
    )
    add.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add.add_argument(
        "--out",
        type=Path,
        default=Path(RESULTS),
        metavar="DIR",
        help="folder for the results; an earlier measurement there goes on (default: %(default)s)",
    )
    add.add_argument("--no-timing", action="store_true", help="leave out the times")
    add.add_argument(
        "--threads",
        type=_positive,
        metavar="T",
        help="processor threads (default: as many as torch likes; on a busy machine 1 is quicker)",
    )
    add.add_argument(
        "--details",
        action="store_true",
        help="print the table of every input, not the summary only",
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return value


# --- list, show -----------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    import numattn

    for family, records in groupby(numattn.methods(), lambda record: record.info.family):
        print(family)
        for record in records:
            info = record.info
            needs = "" if info.needs == "nothing" else f" (needs {info.needs})"
            budget = f" [{info.budget}]" if info.budget else ""
            line = f"{info.summary}{budget}{needs}"
            indent = " " * 15
            print(textwrap.fill(f"  {info.name:<12} {line}", WIDTH, subsequent_indent=indent))
    print("\nIn brackets: the option that trades cost for accuracy. More: numattn show METHOD")
    return 0


def _show(args: argparse.Namespace) -> int:
    method = _method(args.method)
    info, function = method.info, type(method).function
    package = function.__module__.rpartition(".")[0]
    masks = {"none": "none", "padding": "key padding", "full": "any"}
    facts = {
        "family": info.family + (", its oracle: not a fast method" if info.oracle else ""),
        "target": "softmax" if info.approximates == "softmax" else "its own, not softmax",
        "budget": info.budget or "none",
        "cost": info.complexity,
        "causal": info.causal,
        "masks": masks[info.mask],
        "lengths": "queries and keys may differ" if info.cross else "queries = keys",
        "decoding": "yes" if info.decode else "no",
        "gradients": "yes" if info.differentiable else "no",
        "random": "yes, pass a generator" if info.random else "no",
        "needs": info.needs,
        "paper": info.paper,
        "options": ", ".join(f"{f.name}={getattr(method, f.name)!r}" for f in fields(method)),
        "tensors": ", ".join(info.state_tensors),
        "import": f"from {package} import {function.__name__}, {type(method).__name__}",
    }
    print(f"{info.name}: {info.summary}\n")
    for name, fact in facts.items():
        if fact:
            print(textwrap.fill(f"  {name:<10} {fact}", WIDTH, subsequent_indent=" " * 13))
    for check, reason in info.exceptions.items():
        line = f"  {'except':<10} {check}: {reason}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 13))
    print(f"\n{inspect.getdoc(function)}")
    return 0


def _method(name: str) -> Method:
    import numattn

    try:
        return numattn.get(name)
    except KeyError as error:
        raise _UserError(error.args[0]) from error


# --- measure, plot --------------------------------------------------------------------------


def _measure(args: argparse.Namespace) -> int:
    import torch

    from numattn.measure.sweep import sweep

    wanted = _wanted(args)
    inputs = _inputs(args.input, args.length)
    device = _device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    path = args.out / "rows.jsonl"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with _progress() as progress:
            rows = sweep(
                wanted,
                args.budget,
                inputs,
                args.seeds,
                out=path,
                dtype=getattr(torch, args.dtype),
                device=device,
                timing=not args.no_timing,
                progress=progress,
            )
        _report(args.out, args.details)
    except KeyboardInterrupt:
        again = shlex.join(["numattn", *args.argv])
        print(
            f"\nnumattn: stopped; what was measured is in {path}. To go on: {again}",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:  # RowsError is a ValueError
        raise _UserError(str(error)) from error
    return _failures(rows)


def _wanted(args: argparse.Namespace) -> str | list[str]:
    """The methods that were named, and those of the families that were."""
    import numattn

    for name in args.methods:
        _method(name)
    members = [
        record.info.name
        for record in numattn.methods()
        if record.info.family in (args.family or ()) and record.info.needs == "nothing"
    ]
    wanted = list(dict.fromkeys([*args.methods, *members]))
    if args.family and not wanted:
        raise _UserError(f"--family {' '.join(args.family)}: no method that needs no training.")
    return wanted or "all"


def _inputs(names: list[str] | None, length: int) -> list[QKV]:
    """The inputs, cut to the length."""
    from numattn.measure.inputs import SYNTHETIC, bundled, load

    inputs = []
    for name in bundled() if names is None else names:
        try:
            x = load(name, length=length if name in SYNTHETIC else None)
            inputs.append(x.crop(min(length, x.length)))
        except (ValueError, OSError) as error:
            raise _UserError(str(error)) from error
    return inputs


def _device(name: str) -> str:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise _UserError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return name


def _failures(rows: Sequence[Row]) -> int:
    failed = sorted({f"{row.method} on {row.input}" for row in rows if row.status == "failed"})
    if failed:
        print(f"numattn: failed: {'; '.join(failed)}. Run again to retry.", file=sys.stderr)
    return 1 if failed else 0


def _report(folder: Path, details: bool) -> None:
    """Write the report and the pictures of a folder's rows, and print the tables."""
    from numattn.measure import report
    from numattn.measure.rows import read_rows

    rows = read_rows(folder / "rows.jsonl")
    written = [folder / "rows.jsonl", *report.write(rows, folder), *_pictures(rows, folder)]
    print(report.text(rows, details=details, color=sys.stdout.isatty()))
    print("\nWritten: " + ", ".join(str(path) for path in written))


def _pictures(rows: Sequence[Row], folder: Path) -> list[Path]:
    from numattn.measure.plots import plot

    try:
        return plot(rows, folder)
    except ImportError:
        print('No pictures: matplotlib is missing. pip install "numattn[report]"', file=sys.stderr)
        return []


def _plot(args: argparse.Namespace) -> int:
    from numattn.measure.rows import RowsError, read_rows

    try:
        rows = read_rows(args.dir / "rows.jsonl")
        written = _pictures(rows, args.dir)
    except (RowsError, OSError) as error:
        raise _UserError(str(error)) from error
    if written:
        print("Written: " + ", ".join(str(path) for path in written))
    return 0


# --- progress -------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Shows where a sweep stands: a bar on a terminal, else a line per input."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield _one_line()
        print(file=sys.stderr)
        return
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
    )
    console = Console(stderr=True)
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(p: Progress) -> None:
            if p.note:
                bar.console.print(p.note, markup=False)
            else:
                bar.update(task, total=p.total, completed=p.done, description=_what(p))

        yield show


def _what(p: Progress) -> str:
    budget = "" if p.budget is None else f" {p.budget}"
    return f"{p.input}: {p.method}{budget}" if p.method else ""


def _lines() -> Callable[[Progress], None]:
    seen = [""]

    def show(p: Progress) -> None:
        if p.note:
            print(p.note, file=sys.stderr)
        elif p.input != seen[0] and p.input:
            print(f"{p.input} ({p.done} of {p.total})", file=sys.stderr)
            seen[0] = p.input

    return show


def _one_line() -> Callable[[Progress], None]:
    start = time.monotonic()

    def show(p: Progress) -> None:
        if p.note:
            print(p.note, file=sys.stderr)
            return
        line = f"{p.done}/{p.total}  {_what(p)}"
        if p.done:
            left = (time.monotonic() - start) / p.done * (p.total - p.done)
            line = f"{line}, about {left:.0f} s left" if p.method else line
        print(f"\r{line[:78]:<78}", end="", file=sys.stderr, flush=True)

    return show


def _raise_malloc_thresholds() -> None:
    """Start again with glibc's allocator set for timing; see `numattn.measure.timing`."""
    from numattn.measure.timing import ALLOCATOR

    first = next(iter(ALLOCATOR))
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and first not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ALLOCATOR})
