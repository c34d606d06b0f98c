"""Rows -> text, Markdown, CSV.

Every table is made from rows alone. `text` is for a terminal, 100 columns wide; `write` leaves
``report.md`` and ``report.csv``, which has every row with every number.
"""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import TypeAlias

import numpy as np

from numattn.core.info import FAMILIES
from numattn.measure.files import write_whole
from numattn.measure.rows import Row

WIDTH = 100

Value: TypeAlias = Callable[[Row], "float | None"]

COLUMNS = {
    "method": "what ran; (o) marks an oracle, (t) another target than softmax, (f) fitted and "
    "(c) calibrated tensors",
    "budget": "value of the option that trades cost for accuracy (`numattn show METHOD` names it)",
    "error": "norm(out - exact) / norm(exact) over a head; median over heads and seeds",
    "worst": "the same for the worst head and seed",
    "proj.": "the error after the output projection of the layer, all heads together",
    "TV": "total variation between a row of weights and softmax's, from 0 to 1; typical row",
    "TV95": "the same for the row that 95 % of rows stay below",
    "eff.": "efficiency: error of the family's best possible answer at this budget over the error "
    "here; 1 is best, and more only where the family's bound does not hold for the method",
    "b.eff.": "the same against the best blocks of 64 keys for tiles of 64 queries; sparse only",
    "FLOPs": "operations of the matrix products, relative to exact attention; no factorisations",
    "bytes": "what a decoding step reads of the state, relative to all keys and values",
    "time": "wall time of one call relative to exact attention on this machine; below 1 is faster",
}

NOTES = (
    "Times are of this machine, this length and this code. Approximations pay off as the length "
    "grows: a method that is slow here may win at a length that is not measured here.",
    "(o) oracles are the best answer of their family at a budget, found with the exact weights in "
    "hand. They bound what the family can reach; they are not fast methods.",
    "(t) methods with another target do not try to equal softmax; their error against it is shown "
    "for information, and is no defect.",
    "(f) methods had their tensors fitted on the very input they are measured on, which flatters "
    "them. Fitting is part of their time where a call does it: in bidirectional prefill without "
    "calibration.",
    "(c) methods had their tensors calibrated on another input with the same heads, which "
    "`calibrated_on` in the rows names. Calibration is in no time.",
    "'mean of values' ignores the keys; 'uniform keys' attends to that many keys drawn blindly. "
    "A method that does not beat them has found nothing. The floor is exact attention in this "
    "dtype against float64; nothing can be expected below it.",
)


@dataclass(frozen=True)
class Table:
    """A titled table of strings, to be rendered; `ruled` are the rows that begin a group."""

    title: str
    header: tuple[str, ...]
    body: list[tuple[str, ...]]
    ruled: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()


def text(rows: Sequence[Row], *, details: bool = False, color: bool = False) -> str:
    """The summary over inputs, and with `details` each input's table, for a terminal.

    Args:
        rows: At least one.
        details: Whether to show every input; a single input is shown in any case.
        color: Whether to draw with rich, if it is installed.
    """
    tables = [input_table(part) for part in _by_setting(rows)]
    shown = tables if details or len(tables) == 1 else []
    shown = [*shown, *_summaries(rows)]
    render = _rich if color and _has_rich() else plain
    used = {name for table in shown for name in table.header}
    key = [
        textwrap.fill(f"{name:>7}  {says}", WIDTH, subsequent_indent=" " * 9)
        for name, says in COLUMNS.items()
        if name in used
    ]
    notes = [textwrap.fill(note, WIDTH) for note in notes_for(rows)]
    where = textwrap.fill(provenance(rows), WIDTH)
    drawn = [render(table) for table in shown]
    return "\n\n".join([*drawn, "\n".join(key), "\n".join(notes), where])


def markdown(rows: Sequence[Row]) -> str:
    """The whole report: what was measured, how to read it, the summary, each input."""
    parts = _by_setting(rows)
    key = [f"| `{name}` | {says} |" for name, says in COLUMNS.items()]
    body = [
        "# Attention approximations, measured",
        provenance(rows),
        "## How to read the tables",
        "\n".join(["| column | meaning |", "| --- | --- |", *key]),
        "\n".join(f"- {note}" for note in notes_for(rows)),
    ]
    body.extend(_markdown(table) for table in _summaries(rows))
    body.extend(_markdown(input_table(part)) for part in parts)
    return "\n\n".join(body) + "\n"


def write(rows: Sequence[Row], out: Path | str) -> list[Path]:
    """Write ``report.md`` and ``report.csv`` into a folder; returns their paths."""
    texts = {"report.md": markdown(rows), "report.csv": csv_text(rows)}
    return [write_whole(Path(out) / name, text) for name, text in texts.items()]


def csv_text(rows: Iterable[Row]) -> str:
    """Every row, flat; options as JSON. `numattn.measure.rows.Row` explains the columns."""
    file = StringIO()
    writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**asdict(row), "options": json.dumps(row.options)})
    return file.getvalue()


def notes_for(rows: Sequence[Row]) -> list[str]:
    """The notes that these rows call for."""
    calls = {
        "Times": any(row.time_ratio is not None for row in rows),
        "(o)": any(row.is_oracle for row in rows),
        "(t)": any(row.approximates == "own" for row in rows),
        "(f)": any(row.fitted and not row.calibrated_on for row in rows),
        "(c)": any(row.calibrated_on for row in rows),
        "'mean": any(row.status == "ok" for row in rows),
    }
    return [note for note in NOTES if calls[note.split()[0]]]


def input_table(rows: Sequence[Row]) -> Table:
    """One input: a line per method and budget, then the baselines and the floor."""
    first = rows[0]
    kind = "causal" if first.is_causal else "bidirectional"
    title = f"{first.input}, {first.length} tokens, {kind}, {_where(first)}"
    title += f": {first.tag}" if first.tag else ""
    body, ruled = _lines(rows)
    good = [row for row in rows if row.status == "ok"]
    if good:
        ruled.append(len(body))
        body.extend(_baselines(good))
    return _table(title, tuple(COLUMNS), body, ruled, rows)


def summary_table(rows: Sequence[Row], where: str = "") -> Table:
    """Inputs in one mode and type: medians of what their tables show, and the worst head."""
    names = {row.setting for row in rows}
    body, ruled = _lines(rows)
    counted = [
        (*line, str(len({row.setting for row in part if row.status == "ok"})))
        for line, part in zip(body, by_method(rows), strict=True)
    ]
    good = [row for row in rows if row.status == "ok"]
    if good:
        ruled.append(len(counted))
        counted.extend((*line, str(len({r.setting for r in good}))) for line in _baselines(good))
    what = f", {where}" if where else ""
    title = f"Summary over {len(names)} inputs{what} (medians over inputs, heads and seeds)"
    return _table(title, (*COLUMNS, "inputs"), counted, ruled, rows)


def number(x: float | None) -> str:
    """Two or three significant digits, in at most seven characters."""
    if x is None:
        return ""
    if not np.isfinite(x):
        return str(x)
    if x == 0:
        return "0"
    x = float(f"{x:.3g}")
    if not 1e-3 <= abs(x) < 1e4:
        return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, 2 - int(np.floor(np.log10(abs(x)))))
    return f"{x:.{min(digits, 4 if abs(x) < 0.1 else 3)}f}"


def middle(rows: Iterable[Row], value: Value) -> float | None:
    """Median over inputs of the median over an input's rows; None where nothing was measured."""
    parts: dict[object, list[float]] = {}
    for row in rows:
        x = value(row)
        if x is not None:
            parts.setdefault(row.setting, []).append(x)
    return float(np.median([np.median(part) for part in parts.values()])) if parts else None


def blind_units(rows: Iterable[Row]) -> list[int]:
    """The units at which to show the uniform baseline: those that are budgets too, if any are."""
    pairs = {(row.units, row.budget) for row in rows if row.units is not None and row.budget}
    same = {units for units, budget in pairs if units == budget}
    return sorted(same or {units for units, _ in pairs if units is not None})


def by_method(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one method with the same options; by family, name, other options, budget."""
    parts: dict[tuple[int, str, str, int], list[Row]] = {}
    for row in rows:
        family = FAMILIES.index(row.family)
        parts.setdefault((family, row.method, row.variant, row.budget or 0), []).append(row)
    return [parts[key] for key in sorted(parts)]


def label(rows: Sequence[Row]) -> str:
    """The method's name with the marks that the notes explain, of whichever rows call for them."""
    row = rows[0]
    marks = (
        ("o", row.is_oracle),
        ("t", row.approximates == "own"),
        ("f", any(r.fitted and not r.calibrated_on for r in rows)),
        ("c", any(r.calibrated_on for r in rows)),
    )
    shown = "".join(mark for mark, holds in marks if holds)
    return f"{row.method} ({shown})" if shown else row.method


def _table(
    title: str,
    header: tuple[str, ...],
    body: list[tuple[str, ...]],
    ruled: list[int],
    rows: Sequence[Row],
) -> Table:
    """The table without the columns that are empty."""
    kept = [i for i in range(len(header)) if i == 0 or any(line[i] for line in body)]
    lines = [tuple(line[i] for i in kept) for line in body]
    return Table(title, tuple(header[i] for i in kept), lines, tuple(ruled), tuple(_refusals(rows)))


def _summaries(rows: Sequence[Row]) -> list[Table]:
    """One for each mode, type and place that several inputs were measured in."""
    parts: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.mode, row.dtype, row.device, row.backend), []).append(row)
    several = [part for part in parts.values() if len({row.setting for row in part}) > 1]
    return [summary_table(part, _where(part[0]) if len(parts) > 1 else "") for part in several]


def _where(row: Row) -> str:
    """Type, device and mode, for a title."""
    return ", ".join(
        [
            row.dtype,
            *([] if row.device == "cpu" else [row.device]),
            *(["decoding"] if row.mode == "decode" else []),
        ]
    )


def _by_setting(rows: Sequence[Row]) -> list[list[Row]]:
    parts: dict[object, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.setting, []).append(row)
    return list(parts.values())


def _lines(rows: Sequence[Row]) -> tuple[list[tuple[str, ...]], list[int]]:
    """A line per method and budget; and the lines at which a family begins."""
    body: list[tuple[str, ...]] = []
    ruled: list[int] = []
    family = rows[0].family
    for part in by_method(rows):
        first = part[0]
        if first.family != family and body:
            ruled.append(len(body))
        family = first.family
        errors = [row.output for row in part if row.output is not None]
        bad = {row.status for row in part} - {"ok"}
        shown = number(middle(part, lambda r: r.output)) or " ".join(sorted(bad))
        body.append(
            (
                label(part),
                "" if first.budget is None else str(first.budget),
                shown,
                number(float(np.max(errors)) if errors else None),
                number(middle(part, lambda r: r.projected)),
                number(middle(part, lambda r: r.tv_median)),
                number(middle(part, lambda r: r.tv_p95)),
                number(middle(part, lambda r: r.efficiency)),
                number(middle(part, lambda r: r.block_efficiency)),
                number(middle(part, lambda r: r.relative_flops)),
                number(middle(part, lambda r: r.relative_bytes)),
                number(middle(part, lambda r: r.time_ratio)),
            )
        )
    return body, ruled


def _baselines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Lines for the blind baselines and the rounding of the dtype."""
    lines: list[tuple[str, str, Sequence[Row], Value]]
    lines = [("mean of values", "", rows, lambda r: r.mean_baseline)]
    for units in blind_units(rows):
        drawn = [row for row in rows if row.units == units and row.uniform_baseline is not None]
        if not drawn:  # decoding has none
            continue
        lines.append(("uniform keys", str(units), drawn, lambda r: r.uniform_baseline))
    lines.append((f"{rows[0].dtype} floor", "", rows, lambda r: r.floor))
    body = []
    for name, budget, part, value in lines:
        numbers = [x for x in map(value, part) if x is not None]
        worst = number(max(numbers) if numbers else None)
        body.append((name, budget, number(middle(part, value)), worst, *[""] * (len(COLUMNS) - 4)))
    return body


def _refusals(rows: Sequence[Row]) -> list[str]:
    """Who could not run, and why, each reason once."""
    remarks: dict[str, list[str]] = {}
    for row in rows:
        if row.status != "ok":
            remark = f"{row.method} {row.status}: {row.reason}"
            remarks.setdefault(remark, []).append(row.input)
    several = len({row.input for row in rows}) > 1
    return [
        f"{remark} (on {', '.join(dict.fromkeys(names))})" if several else remark
        for remark, names in remarks.items()
    ]


def provenance(rows: Sequence[Row]) -> str:
    """Where the numbers are from."""

    def of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(row, name)) for row in rows))

    return (
        f"numattn {of('numattn_version')}, torch {of('torch_version')}, Python "
        f"{of('python_version')}, {of('machine')}; {of('dtype')}, backend {of('backend')}; "
        f"lengths {of('length')}."
    )


def _markdown(table: Table) -> str:
    align = [" --- ", *[" ---: "] * (len(table.header) - 1)]
    lines = [f"## {table.title}", "", _row(table.header), f"|{'|'.join(align)}|"]
    lines.extend(_row(line) for line in table.body)
    if table.remarks:
        lines.extend(["", *[f"- {remark}" for remark in table.remarks]])
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def plain(table: Table) -> str:
    """A table in characters."""
    columns = zip(table.header, *table.body, strict=True)
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = (cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([first, *rest]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [*textwrap.wrap(table.title, WIDTH), rule, line(table.header), rule]
    for index, cells in enumerate(table.body):
        lines.extend([rule] if index in table.ruled else [])
        lines.append(line(cells))
    lines.append(rule)
    lines.extend(textwrap.fill(remark, WIDTH) for remark in table.remarks)
    return "\n".join(lines)


def _has_rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None


def _rich(table: Table) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(
        title=table.title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold"
    )
    for index, name in enumerate(table.header):
        style = {"method": "bold", "error": "cyan", "budget": "dim"}.get(name)
        drawn.add_column(name, justify="right" if index else "left", style=style, no_wrap=True)
    for index, cells in enumerate(table.body):
        drawn.add_row(*cells, end_section=index + 1 in table.ruled)
    console = Console(width=WIDTH, force_terminal=True, highlight=False)
    with console.capture() as capture:
        console.print(drawn)
        for remark in table.remarks:
            console.print(remark, style="yellow", markup=False)
    return capture.get().rstrip()
