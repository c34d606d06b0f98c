"""Tables of methods, made from the registry.

`python tools/tables.py --write` brings the README's table up to date; `--check` fails if it is not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numattn
from numattn import Info

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"


def yes(value: bool) -> str:
    """A truth value for people."""
    return "yes" if value else "no"


COLUMNS: dict[str, Callable[[Info], str]] = {
    "method": lambda info: f"[`{info.name}`]({info.paper})",
    "family": lambda info: info.family,
    "what it is": lambda info: info.summary,
    "time": lambda info: f"`{info.complexity}`",
    "budget": lambda info: f"`{info.budget}`" if info.budget else "none",
    "target": lambda info: info.approximates,
    "causal": lambda info: info.causal,
    "masks": lambda info: info.mask,
    "decodes": lambda info: yes(info.decode),
}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    header = list(header)
    return "\n".join([line(header), line("---" for _ in header), *map(line, rows)])


def methods_table() -> str:
    """Every registered method, one row each."""
    infos = [record.info for record in numattn.methods()]
    return table(COLUMNS, ([cell(info) for cell in COLUMNS.values()] for info in infos))


def updated(text: str) -> str:
    """`text` with what stands between the markers replaced by the current table."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{methods_table()}\n{END}{after}"


def main() -> int:
    """Write or check the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="bring the table up to date")
    mode.add_argument("--check", action="store_true", help="fail if the table is out of date")
    arguments = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = updated(old)
    if arguments.write:
        README.write_text(new, encoding="utf-8")
    elif old != new:
        print("The table in README.md is out of date; run `python tools/tables.py --write`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
