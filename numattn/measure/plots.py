"""Rows -> two pictures: error against operations, and error against time.

Matplotlib is imported when a function is called, without its window system, so that this works
where there is no display.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from numattn.core.info import FAMILIES
from numattn.measure.files import write_whole
from numattn.measure.report import blind_units, by_method, middle
from numattn.measure.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cost: TypeAlias = Callable[[Row], "float | None"]

# Okabe and Ito's colours, told apart by colour-blind readers too; by family, in order.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_MARKERS = "osD^vPX*<>hp"

ROUNDING = 10  # times the floor: an error that is no approximation's, and would spoil the scale


def plot(rows: Sequence[Row], out: Path | str) -> list[Path]:
    """Draw ``error_flops.png`` and, where times were taken, ``error_time.png``.

    One line per method over its budgets, in its family's colour; oracles are dashed, hollow
    markers have another target than softmax. Every point is a median over inputs of medians over
    heads and seeds. Budgets at which a method is exact but for rounding are left out.

    Args:
        rows: At least one.
        out: The folder to write to.

    Returns:
        The files written.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    folder = Path(out)
    pictures: list[tuple[str, str, Cost]] = [
        (
            "error_flops.png",
            "matrix-product operations (no factorisations)",
            lambda r: r.relative_flops,
        ),
        ("error_time.png", "wall time on this machine", lambda r: r.time_ratio),
    ]
    good = [row for row in rows if row.status == "ok"]
    written = []
    for name, axis, cost in pictures:
        if any(cost(row) is not None for row in good):
            image = BytesIO()
            figure = _draw(good, cost, f"{axis}, relative to exact attention")
            figure.savefig(image, dpi=150, bbox_inches="tight")
            written.append(write_whole(folder / name, image.getvalue()))
    return written


def _draw(rows: Sequence[Row], cost: Cost, axis: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    ax.set(xscale="log", yscale="log", xlabel=axis, ylabel="relative error of the output")
    curves = _curves(rows, cost)
    for index, points in enumerate(curves):
        _curve(ax, points, _MARKERS[index % len(_MARKERS)])
    _baselines(ax, rows)
    _exact(ax, rows, [y for points in curves for _, _, y in points])
    _style(ax)
    ax.set_title(_title(rows), loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, handlelength=3)
    return figure


def _style(ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_xlim()
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    ax.xaxis.set_major_locator(LogLocator(subs=steps))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(which="major", color="#e8e8e8", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _curves(rows: Sequence[Row], cost: Cost) -> list[list[tuple[Row, float, float]]]:
    """Per method, the points (a row of it, cost, error) over its budgets."""
    curves: dict[str, list[tuple[Row, float, float]]] = {}
    for part in by_method(rows):
        x, y = middle(part, cost), middle(part, lambda r: r.output)
        if part[0].family == FAMILIES[0] or not x or not y:  # exact attention is drawn by itself
            continue
        if y <= ROUNDING * (middle(part, lambda r: r.floor) or 0.0):
            continue
        if math.isfinite(x) and math.isfinite(y):
            curves.setdefault(part[0].variant, []).append((part[0], x, y))
    return list(curves.values())


def _curve(ax: Axes, points: list[tuple[Row, float, float]], marker: str) -> None:
    """A method's line; its markers grow with the budget."""
    row = points[0][0]
    color = COLORS[FAMILIES.index(row.family)]
    face = "white" if row.approximates == "own" else color
    x, y = [x for _, x, _ in points], [y for _, _, y in points]
    style: dict[str, Any] = {
        "color": color,
        "linestyle": "--" if row.is_oracle else "-",
        "linewidth": 1.4,
    }
    own: dict[str, Any] = {"marker": marker, "markerfacecolor": face, "markersize": 6.5}
    name = f"{row.method} ({row.family}{', oracle' if row.is_oracle else ''}"
    name += ", own target)" if row.approximates == "own" else ")"
    ax.plot(x, y, **style)
    ax.plot([], [], label=name, **style, **own)
    for size, (at, error) in enumerate(zip(x, y, strict=True)):
        size_here = 6.5 if len(points) == 1 else 4.5 + 1.6 * size
        ax.plot(at, error, color=color, **{**own, "markersize": size_here})


def _baselines(ax: Axes, rows: Sequence[Row]) -> None:
    """In grey, what looks at no key: the mean of the values, and keys drawn blindly."""
    mean = middle(rows, lambda r: r.mean_baseline)
    if mean:
        ax.axhline(mean, color="#8a8a8a", linewidth=1.2, linestyle=":", label="mean of values")
    blind = {}
    for units in blind_units(rows):
        blind[units] = middle([r for r in rows if r.units == units], lambda r: r.uniform_baseline)
    errors = [error for error in blind.values() if error]
    if errors:
        name = " to ".join(dict.fromkeys([str(min(blind)), str(max(blind))])) + " uniform keys"
        ax.axhspan(min(errors), max(errors), color="#8a8a8a", alpha=0.2, linewidth=1, label=name)


def _exact(ax: Axes, rows: Sequence[Row], errors: list[float]) -> None:
    """Exact attention at its own cost; at the lower edge where its error is far below the rest."""
    ax.axvline(1, color="#000000", linewidth=0.6, alpha=0.5, zorder=1)
    floor = middle(rows, lambda r: r.floor)
    if not floor:
        return
    edge = min(errors, default=floor) / 3
    y = max(floor, edge)
    ax.set_ylim(bottom=y / 1.6)
    name = f"exact, error {floor:.0e}".replace("e-0", "e-")
    name += " (below the axis)" if floor < edge else ""
    marker = "v" if floor < edge else "*"
    ax.plot(1, y, color="black", marker=marker, markersize=9, linestyle="", label=name)


def _title(rows: Sequence[Row]) -> str:
    lengths = sorted({row.length for row in rows})
    names = sorted({row.input for row in rows})
    budgets = sorted({row.budget for row in rows if row.budget is not None})
    span = " to ".join(dict.fromkeys([str(lengths[0]), str(lengths[-1])]))
    what = names[0] if len(names) == 1 else f"Median over {len(names)} inputs"
    title = f"{what}, {span} tokens, {rows[0].dtype}"
    return title + (f"\nmarkers grow with the budget: {_listed(budgets)}" if budgets else "")


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) > 4:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
