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
    from numattn.measure.ranks import Team
    from numattn.measure.rows import Row
    from numattn.measure.sweep import Progress

ABOUT = """\
Run methods beside exact attention and report the error of each head's output and weights, how
near the method comes to the best possible answer of its family, and what it costs.

--out receives rows.jsonl (every number, one head a line), report.md, report.csv, and two pictures.
Work that rows.jsonl already holds is not repeated: a measurement that was stopped, or killed, goes
on, and more methods, budgets or inputs can be added to it, by one measurement at a time.

Under torchrun the processes share the work and the first one writes; the rows are the same, but
times are disturbed by the other processes. Every process must see the same inputs.

Exact attention to an input is kept in a folder ($NUMATTN_CACHE, or ~/.cache/numattn) and found
again by its content: 6.4 MB for three heads of 4096 tokens.

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
  numattn measure --mode prefill decode --dtype float32 bfloat16 --input smollm2-long
  torchrun --nproc-per-node 2 -m numattn measure --no-timing
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
        help="values of each method's budget option (default: 16 64 256 1024 up to "
        "half of N, without those that cost 20 times as much as exact attention)",
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
        nargs="+",
        action="extend",
        choices=("float64", "float32", "bfloat16", "float16"),
        metavar="T",
        help="types in which the methods run: float64, float32, bfloat16, float16 (default: "
        "float32)",
    )
    add.add_argument(
        "--device", nargs="+", action="extend", metavar="D", help="cpu or cuda (default: cpu)"
    )
    add.add_argument(
        "--mode",
        nargs="+",
        action="extend",
        choices=("prefill", "decode"),
        metavar="M",
        help="prefill, one call on all tokens; decode, the last tokens of causal inputs one by one "
        "from a state, with the bytes a step reads (default: prefill)",
    )
    add.add_argument(
        "--calibrate",
        metavar="ON",
        help="what tensors are fitted on before a call: other, the same heads on another text "
        "where the bundle has it, else the input; itself, the input; half, the first half of each "
        "input, and everything is measured on the second; or an input with the same heads "
        "(default: other, for methods that cannot fit in the call; the rest fit in the call)",
    )
    add.add_argument(
        "--out",
        type=Path,
        default=Path(RESULTS),
        metavar="DIR",
        help="folder for the results; an earlier measurement there goes on (default: %(default)s)",
    )
    cache = add.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder that exact references are kept in"
    )
    cache.add_argument("--no-cache", action="store_true", help="keep none on the disk")
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
    from numattn.measure.ranks import launched

    with launched() as team:
        return _run(args, team)


def _run(args: argparse.Namespace, team: Team) -> int:
    import torch

    from numattn.measure.references import default_folder
    from numattn.measure.sweep import sweep

    wanted = _wanted(args)
    given = inputs(args.input, args.length)
    places = _devices(args, team)
    _threads(args.threads, team)
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
                dtype=[getattr(torch, name) for name in args.dtype or ("float32",)],
                device=places,
                mode=args.mode or "prefill",
                calibrate=args.calibrate,
                timing=not args.no_timing,
                cache=None if args.no_cache else args.cache or default_folder(),
                team=team,
                progress=progress,
            )
        if not team.leads:
            return 0
        _report(args.out, args.details)
    except KeyboardInterrupt:
        if team.leads:
            again = shlex.join(["numattn", *args.argv])
            print(
                f"\nnumattn: stopped; what was measured is in {path}. To go on: {again}",
                file=sys.stderr,
            )
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:  # RowsError is a ValueError
        if not team.leads:  # which says it
            return 2
        raise UserError(str(error)) from error
    return _failures(rows)


def _devices(args: argparse.Namespace, team: Team) -> list[str]:
    """The devices, which are there; "cuda" is this process's own among those of torchrun."""
    import torch

    if team.size > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return [device(name) for name in args.device or ("cpu",)]


def _threads(wanted: int | None, team: Team) -> None:
    """As asked for; else the processes of a machine share its processors."""
    import torch

    if wanted is None and team.size > 1:  # torchrun gives each of them one
        wanted = max(_processors() // int(os.environ["LOCAL_WORLD_SIZE"]), 1)
    if wanted is not None:
        torch.set_num_threads(wanted)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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

    path = folder / "rows.jsonl"
    rows = read_rows(path)
    try:
        written = [path, *report.write(rows, folder), *_pictures(rows, folder)]
    except OSError as error:
        raise UserError(
            f"the report cannot be written: {error}. What was measured is safe in {path}."
        ) from error
    print(report.text(rows, details=details, color=sys.stdout.isatty()))
    print("\nWritten: " + ", ".join(str(path) for path in written))


def _pictures(rows: Sequence[Row], folder: Path) -> list[Path]:
    from numattn.measure import plots

    whole = [row for row in rows if row.mode == "prefill"]  # decoding counts other costs
    try:
        return plots.plot(whole, folder) if whole else []
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
