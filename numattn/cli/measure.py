"""``numattn measure`` and ``numattn plot``."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from numattn.cli.common import (
    LENGTH,
    RESULTS,
    Commands,
    UserError,
    device,
    find,
    inputs,
    positive,
)

if TYPE_CHECKING:
    from numattn.measure.rows import Row
    from numattn.measure.sweep import Progress

ABOUT = """\
Run methods beside exact attention and report the error of each head's output and weights, how
near the method comes to the best possible answer of its family, and what it costs.

--out receives rows.jsonl (every number, one head a line), report.md, report.csv, and two pictures.
Work that rows.jsonl already holds is not repeated: a measurement that was stopped goes on, and
more methods, budgets or inputs can be added to it.

On Linux the command first restarts itself with glibc's MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_ raised, unless the former is set: otherwise every large tensor is paid for
in page faults, which distorts the times.
"""

EXAMPLES = """\
examples:
  numattn measure
  numattn measure nystrom performer --budget 16 64 256 --seeds 5
  numattn measure --family sparse lowrank
  numattn measure --input gaussian sink my.safetensors --length 512
"""


def add(commands: Commands) -> None:
    """Both commands."""
    raw = argparse.RawDescriptionHelpFormatter
    measure = commands.add_parser(
        "measure",
        help="error, cost and time beside exact attention",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    _arguments(measure)
    measure.set_defaults(run=run)

    pictures = commands.add_parser("plot", help="draw the pictures of a measurement again")
    pictures.add_argument("dir", type=Path, metavar="DIR", help="the --out of `numattn measure`")
    pictures.set_defaults(run=plot)


def _arguments(add: argparse.ArgumentParser) -> None:
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
        type=positive,
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
        type=positive,
        default=LENGTH,
        metavar="N",
        help="use at most this many tokens of each input (default: %(default)s)",
    )
    add.add_argument(
        "--seeds",
        type=positive,
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
        type=positive,
        metavar="T",
        help="processor threads (default: as many as torch likes; on a busy machine 1 is quicker)",
    )
    add.add_argument(
        "--details",
        action="store_true",
        help="print the table of every input, not the summary only",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and report."""
    import torch

    from numattn.measure.sweep import sweep

    wanted = _wanted(args)
    given = inputs(args.input, args.length)
    place = device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    path = args.out / "rows.jsonl"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with _progress() as progress:
            rows = sweep(
                wanted,
                args.budget,
                given,
                args.seeds,
                out=path,
                dtype=getattr(torch, args.dtype),
                device=place,
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
        raise UserError(str(error)) from error
    return _failures(rows)


def _wanted(args: argparse.Namespace) -> str | list[str]:
    """The methods that were named, and those of the families that were."""
    import numattn

    for name in args.methods:
        find(name)
    members = [
        record.info.name
        for record in numattn.methods()
        if record.info.family in (args.family or ()) and record.info.needs == "nothing"
    ]
    wanted = list(dict.fromkeys([*args.methods, *members]))
    if args.family and not wanted:
        raise UserError(f"--family {' '.join(args.family)}: no method that needs no training.")
    return wanted or "all"


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
    from numattn.measure import plots

    try:
        return plots.plot(rows, folder)
    except ImportError:
        print('No pictures: matplotlib is missing. pip install "numattn[report]"', file=sys.stderr)
        return []


def plot(args: argparse.Namespace) -> int:
    """Draw the pictures."""
    from numattn.measure.rows import RowsError, read_rows

    try:
        rows = read_rows(args.dir / "rows.jsonl")
        written = _pictures(rows, args.dir)
    except (RowsError, OSError) as error:
        raise UserError(str(error)) from error
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


def raise_malloc_thresholds() -> None:
    """Start again with glibc's allocator set for timing; see `numattn.measure.timing`."""
    from numattn.measure.timing import ALLOCATOR

    first = next(iter(ALLOCATOR))
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and first not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ALLOCATOR})
