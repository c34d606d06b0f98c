"""The command ``numattn``; each of its commands is a few lines over the library."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from numattn.cli import diagnose, measure, methods, report
from numattn.cli.common import UserError

DESCRIPTION = """\
Approximations of softmax attention: see what there is, and measure how wrong each of them is.
"""

EXAMPLES = """\
examples:
  numattn list                            every method, by family
  numattn show nystrom                    what one method does, its options, its limits
  numattn measure                         all methods on heads of trained models (4-5 minutes)
  numattn measure nystrom topk --budget 32 128
  numattn measure --input gaussian my.safetensors --length 512 --out results/mine
  numattn diagnose my.safetensors         what each head looks like, and what to try first
  numattn plot results/mine               draw the pictures again from the rows
  numattn report results/mine             the same as one HTML page, with filters
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    0: done. 1: done, but a method failed. 2: something in the command, an input or a file is
    wrong. 130: interrupted.
    """
    args = _parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        if argv is None and args.run is measure.run:
            measure.raise_malloc_thresholds()
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UserError as error:
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

    for part in (methods, diagnose, measure, report):
        part.add(commands)
    return parser
