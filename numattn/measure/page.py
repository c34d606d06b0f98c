"""Rows -> one HTML page with figures to point at, filters, and the heads' matrices.

The page is a single file without network access: plotly.js and the rows are inside. Every number
on it is aggregated in the browser from the rows that the filters leave, in the way
`numattn.measure.report` does it: medians over heads and seeds of an input, then over inputs.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from numattn.core.info import FAMILIES
from numattn.measure.files import write_whole
from numattn.measure.pictures import DECADES, SIDE, STEPS
from numattn.measure.plots import COLORS, ROUNDING
from numattn.measure.report import COLUMNS, by_method, label, notes_for, provenance
from numattn.measure.rows import Row

Json: TypeAlias = Any

_DIGITS = 6  # significant digits of a number in the page

_FURTHER = {
    "over.": "budget over the least one at which the family's best answer is as near; 1 is best",
    "inputs": "inputs that the line is a median over",
}

# What the page's script reads of a row, by the script's name for it.
_NUMBERS: dict[str, Callable[[Row], float | None]] = {
    "output": lambda r: r.output,
    "tv_median": lambda r: r.tv_median,
    "tv_p95": lambda r: r.tv_p95,
    "efficiency": lambda r: r.efficiency,
    "overhead": lambda r: r.overhead,
    "block_efficiency": lambda r: r.block_efficiency,
    "projected": lambda r: r.projected,
    "relative_flops": lambda r: r.relative_flops,
    "time_ratio": lambda r: r.time_ratio,
    "bytes_read": lambda r: r.bytes_read,
    "relative_bytes": lambda r: r.relative_bytes,
    "floor": lambda r: r.floor,
    "mean_baseline": lambda r: r.mean_baseline,
    "uniform_baseline": lambda r: r.uniform_baseline,
    "units": lambda r: r.units,
}

_RANK = (
    "No matrix of a given rank is nearer to the exact weights, in the Frobenius norm, than their "
    "truncated singular value decomposition: this is the oracle, and the budget counts the rank."
)

# The pillars: title, and what bounds them.
_PILLARS = {
    "sparse": (
        "Sparse",
        "No choice of k keys per query leaves a smaller total variation than the k keys of the "
        "largest exact weight: this is the oracle. b.eff. is measured against the heaviest blocks "
        "of 64 keys for tiles of 64 queries, the bound of methods that read whole blocks.",
    ),
    "lowrank": ("Low rank", _RANK + " Methods that choose keys are held against the sparse one."),
    "kernel": (
        "Kernel feature maps",
        "Weights made of r features have rank r before the causal mask. " + _RANK,
    ),
    "latent": ("Latent", "What is kept of all tokens is a matrix of small rank. " + _RANK),
    "tensor": ("Tensor", "A sum of few products is kept of all tokens. " + _RANK),
}


def write(rows: Sequence[Row], path: Path | str) -> Path:
    """Write the page.

    Numbers are kept to six significant digits. The same rows give the same bytes.

    Args:
        rows: Of any inputs, methods and modes. Where none was measured, the page says so.
        path: The file; it is replaced at once, and only when the page is whole.

    Returns:
        The path.

    Raises:
        ImportError: Plotly is not installed.

    Cost: About 5 MB, which is plotly.js, and 0.2 MB per 1000 rows, 1 MB with pictures.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            'The page needs plotly, which is not installed. pip install "numattn[report]"'
        ) from error
    return write_whole(Path(path), _page(rows, get_plotlyjs()))


def compact(rows: Sequence[Row]) -> Json:
    """The rows as the page's script reads them: by column, texts once.

    A group is a method with all its options in one mode; a place is an input as it was measured.
    Each row names its group and its place by their numbers.
    """
    parts = [
        part
        for mode in sorted({row.mode for row in rows}, reverse=True)  # prefill, decode
        for part in by_method([row for row in rows if row.mode == mode])
    ]
    places = _Numbered(_place(row) for row in rows)
    settings = _Numbered(row.setting for row in rows)
    lines = _Numbered((part[0].mode, part[0].variant) for part in parts)
    differing = _differing(rows)
    good = [(g, row) for g, part in enumerate(parts) for row in part if row.status == "ok"]
    return {
        "families": list(FAMILIES),
        "colors": dict(zip(FAMILIES, COLORS, strict=True)),
        "rounding": ROUNDING,
        "groups": [_group(part, lines, differing[part[0].method]) for part in parts],
        "places": [{**dict(key), "setting": settings[at]} for key, at in _settings(rows, places)],
        "rows": {
            "group": [g for g, _ in good],
            "place": [places[_place(row)] for _, row in good],
            "head": [row.head for _, row in good],
            **{name: _column([of(row) for _, row in good]) for name, of in _NUMBERS.items()},
        },
        "picture": {"side": SIDE, "decades": DECADES, "steps": STEPS},
        "pictures": _pictures(good, places),
        "refused": [
            [g, places[_place(row)], f"{row.method} {row.status}: {row.reason}"]
            for g, part in enumerate(parts)
            for row in part
            if row.status != "ok"
        ],
    }


class _Numbered(dict[Any, int]):
    """Distinct things, numbered in the order in which they come."""

    def __init__(self, things: Iterable[Any]) -> None:
        super().__init__()
        for thing in things:
            self.setdefault(thing, len(self))


def _place(row: Row) -> tuple[tuple[str, Any], ...]:
    """What the filters tell rows apart by, besides their method."""
    precision = row.dtype if row.device == "cpu" else f"{row.dtype}, {row.device}"
    return (
        ("input", row.input),
        ("length", row.length),
        ("precision", precision),
        ("backend", row.backend),
        ("causal", "causal" if row.is_causal else "bidirectional"),
        ("tag", row.tag or "no tag"),
        ("mode", row.mode),
    )


def _settings(rows: Sequence[Row], places: _Numbered) -> list[tuple[Any, Any]]:
    """Each place, and the setting of its rows."""
    of = {_place(row): row.setting for row in rows}
    return [(place, of[place]) for place in places]


def _differing(rows: Sequence[Row]) -> dict[str, set[str]]:
    """Of each method, the options other than the budget that are not the same in all rows."""
    values: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        of = values.setdefault(row.method, {})
        for name, x in row.options.items():
            if name != row.budget_option:
                of.setdefault(name, set()).add(str(x))
    return {
        method: {name for name, several in of.items() if len(several) > 1}
        for method, of in values.items()
    }


def _group(part: Sequence[Row], lines: _Numbered, differing: set[str]) -> Json:
    row = part[0]
    others = {k: f"{k}={v}" for k, v in sorted(row.options.items()) if k != row.budget_option}
    told = [text for name, text in others.items() if name in differing]
    return {
        "method": row.method,
        "label": " ".join([label(part), *told]),
        "family": row.family,
        "options": ", ".join(others.values()),
        "budget": row.budget,
        "mode": row.mode,
        "line": lines[row.mode, row.variant],
        "oracle": row.is_oracle,
        "own": row.approximates == "own",
    }


def _column(values: Sequence[float | None]) -> list[Json] | None:
    """The numbers, shortened; None where there are none."""
    if all(x is None for x in values):
        return None
    return [_short(x) for x in values]


def _short(x: float | None) -> Json:
    if x is None or isinstance(x, int):
        return x
    if not math.isfinite(x):  # JSON has no word for these; the script's Number() reads them
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    short = float(f"{x:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e6 else short


def _pictures(good: Sequence[tuple[int, Row]], places: _Numbered) -> list[Json]:
    """Place, head, group, error and picture; of several seeds, the first one's."""
    kept: dict[tuple[int, int | None, int], Json] = {}
    for g, row in good:
        if row.picture:
            key = (places[_place(row)], row.head, g)
            kept.setdefault(key, [*key, _short(row.output), row.picture])
    return list(kept.values())


def _page(rows: Sequence[Row], plotly: str) -> str:
    assets = files("numattn.measure") / "assets"
    measured = any(row.status == "ok" for row in rows)
    return Template((assets / "page.html").read_text("utf-8")).substitute(
        css=(assets / "page.css").read_text("utf-8"),
        js=(assets / "page.js").read_text("utf-8"),
        plotly=plotly,
        data=json.dumps(compact(rows), separators=(",", ":"), allow_nan=False).replace(
            "<", "\\u003c"
        ),
        provenance=html.escape(provenance(rows)) if rows else "",
        message="" if measured else f"<p>{_nothing(rows)}</p>",
        pillars="\n".join(_pillar(family) for family in FAMILIES if _has(rows, family)),
        links="\n".join(
            f'<a href="#{family}">{_PILLARS[family][0]}</a>'
            for family in FAMILIES
            if _has(rows, family)
        ),
        columns="\n".join(
            f"<tr><th scope=row>{html.escape(name)}</th><td>{_marked(says)}</td></tr>"
            for name, says in {**COLUMNS, **_FURTHER}.items()
        ),
        notes="\n".join(f"<li>{_marked(note)}</li>" for note in notes_for(rows)),
    )


def _marked(text: str) -> str:
    """As HTML, with what stands in backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _nothing(rows: Sequence[Row]) -> str:
    if not rows:
        return "There are no rows."
    return "Nothing was measured: every run failed or was refused. The reasons are below."


def _has(rows: Sequence[Row], family: str) -> bool:
    return family in _PILLARS and any(row.family == family for row in rows)


def _pillar(family: str) -> str:
    title, oracle = _PILLARS[family]
    return (
        f'<section id="{family}" data-family="{family}">\n'
        f"<h2>{title}</h2>\n<p>{html.escape(oracle)}</p>\n</section>"
    )
