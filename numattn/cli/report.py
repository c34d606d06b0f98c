"""``numattn report``: the page of a measurement."""

from __future__ import annotations

import argparse
from pathlib import Path

from numattn.cli.common import Commands, UserError

ABOUT = """\
Write one HTML file with the figures, tables and attention matrices of a measurement. It opens
from the disk and needs no network.
"""


def add(commands: Commands) -> None:
    """The command."""
    page = commands.add_parser(
        "report",
        help="one HTML page of a measurement, with filters",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    page.add_argument("dir", type=Path, metavar="DIR", help="the --out of `numattn measure`")
    page.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: report.html in DIR)"
    )
    page.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from numattn.measure import page
    from numattn.measure.rows import read_rows

    out = args.out or args.dir / "report.html"
    try:
        rows = read_rows(args.dir / "rows.jsonl")
        print(f"Written: {page.write(rows, out)}")
    except (ImportError, ValueError, OSError) as error:  # RowsError is a ValueError
        raise UserError(str(error)) from error
    return 0
