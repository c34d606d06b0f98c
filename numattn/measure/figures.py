"""Inputs -> pictures of their attention: sparsity, singular values, the weights themselves.

Each function computes the exact weights of what it draws, in float64, and returns a figure of
matplotlib, which is imported when a function is called, without its window system.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from numattn.core.inputs import positive
from numattn.measure.diagnose import keys_holding, rows_of_head, sampled_rows, singular_values
from numattn.measure.inputs import QKV
from numattn.measure.plots import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TILES = 256
"""Rows and columns of a heat map; of longer inputs each pixel is the mean of a tile."""

_WIDTH = 8.0  # inches
_COLUMNS = 3  # panels side by side
_MAPS = 6  # heat maps side by side
_LOWEST = 1e-4  # singular value relative to the first
_DECADES = 2  # of weights above and below uniform ones
_LINES = ("-", "--", ":")  # the next when the colours are used up


@torch.no_grad()
def sparsity_figure(inputs: Sequence[QKV], *, max_tokens: int = 512) -> Figure:
    """Share of its keys that hold a share of a row's mass: a panel an input, a curve a head.

    A curve is the median over rows. Grey is a row that attends to all of its keys alike.

    Args:
        inputs: At least one.
        max_tokens: Of more queries than that, as many are taken at even distances; all keys count.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    positive("sparsity_figure", "max_tokens", max_tokens)
    mass = torch.linspace(0, 1, 101, dtype=torch.float64)[1:-1]
    figure, panels = _panels(inputs, "share of a row's mass", "share of its keys")
    lowest = 1.0
    for ax, x in panels:
        for batch, head in _heads(x):
            parts = rows_of_head(x, batch, head, sampled_rows(x, max_tokens))
            shares = torch.cat([_key_shares(x, rows, w, mass) for rows, _, w in parts])
            curve = shares.median(0).values
            lowest = min(lowest, curve.min().item())
            ax.plot(mass.numpy(), curve.cpu().numpy(), **_line(x, batch, head))
        ax.plot(mass.numpy(), mass.numpy(), color="#8a8a8a", linewidth=0.8, zorder=1)
    for ax, _ in panels:
        ax.set(xlim=(0, 1), yscale="log", xticks=(0, 0.5, 0.9))
        ax.set_ylim(lowest / 8, 1)  # the legend lies under the curves
        ax.legend(**_LEGEND, loc="lower right", ncols=3)
    return figure


@torch.no_grad()
def decay_figure(inputs: Sequence[QKV], *, max_tokens: int = 512) -> Figure:
    """Singular values of the weights relative to the first: a panel an input, a curve a head.

    Args:
        inputs: At least one.
        max_tokens: Of more queries than that, as many are taken at even distances, with all keys;
            the index counts the singular values of those rows.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    positive("decay_figure", "max_tokens", max_tokens)
    figure, panels = _panels(inputs, "index", "singular value / first")
    for ax, x in panels:
        for batch, head in _heads(x):
            parts = rows_of_head(x, batch, head, sampled_rows(x, max_tokens))
            sigma = singular_values(torch.cat([weights for _, _, weights in parts]))
            decay = (sigma / sigma[0]).cpu().numpy()
            ax.plot(range(1, len(sigma) + 1), decay, **_line(x, batch, head))
        ax.set(xscale="log", yscale="log", xlim=(1, max_tokens), ylim=(_LOWEST, 1.5))
        ax.legend(**_LEGEND, loc="best", ncols=1 + x.q.shape[:2].numel() // 7)
    return figure


@torch.no_grad()
def weights_figure(inputs: Sequence[QKV]) -> Figure:
    """The exact weights of every head, one heat map each, on one logarithmic scale of colours.

    Colours show the mean weight of a pixel times N: 1 is what uniform weights on all keys have.
    Rows are queries from the top down, columns are keys. What a causal query may not see is blank.

    Args:
        inputs: At least one.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    from matplotlib.colors import LogNorm

    maps = [(x, batch, head) for x in inputs for batch, head in _heads(x)]
    across = min(_MAPS, len(maps))
    down = math.ceil(len(maps) / across)
    size = _WIDTH / across
    figure = _figure((_WIDTH, down * (size + 0.22) + 0.8))
    axes = figure.subplots(down, across, squeeze=False).flatten()
    norm = LogNorm(10.0**-_DECADES, 10.0**_DECADES)
    for ax, (x, batch, head) in zip(axes, maps, strict=False):
        tiles = _tiles(x, batch, head) * x.length
        shown = tiles.masked_fill(tiles == 0, torch.nan).cpu().numpy()
        image = ax.imshow(shown, norm=norm, cmap="viridis")
        ax.set_title(f"{x.name} {_name(x, batch, head)}", fontsize=7, pad=2)
    for ax in axes:
        ax.set_axis_off()
    bar = figure.colorbar(image, ax=axes.tolist(), location="bottom", extend="both", aspect=40)
    bar.set_label("weight x N, of uniform weights 1", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


_LEGEND: dict[str, Any] = {
    "frameon": False,
    "title": "head",
    "title_fontsize": 7,
    "fontsize": 7,
    "handlelength": 1.6,
    "labelspacing": 0.2,
    "columnspacing": 1.0,
    "borderaxespad": 0.2,
}


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(
    inputs: Sequence[QKV], x_label: str, y_label: str
) -> tuple[Figure, list[tuple[Axes, QKV]]]:
    """A panel for each input, in rows of three on common axes."""
    across = min(_COLUMNS, len(inputs))
    down = math.ceil(len(inputs) / across)
    figure = _figure((_WIDTH, 2.1 * down + 0.4))
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for ax in axes[len(inputs) :]:
        ax.set_axis_off()
    panels = list(zip(axes, inputs, strict=False))
    for ax, x in panels:
        kind = "causal" if x.is_causal else "bidirectional"
        ax.set_title(f"{x.name}, {x.length}, {kind}", loc="left", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.grid(which="major", color="#e8e8e8", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(x_label, fontsize=9)
    figure.supylabel(y_label, fontsize=9)
    return figure, panels


def _heads(x: QKV) -> Iterator[tuple[int, int]]:
    """Sequence and query head of each head of an input."""
    return ((b, h) for b in range(x.q.shape[0]) for h in range(x.q.shape[1]))


def _name(x: QKV, batch: int, head: int) -> str:
    return f"{batch}:{head}" if x.q.shape[0] > 1 else str(head)


def _line(x: QKV, batch: int, head: int) -> dict[str, Any]:
    """Colour, dashes and name of a head's curve."""
    turn, color = divmod(batch * x.q.shape[1] + head, len(COLORS))
    return {
        "color": COLORS[color],
        "linestyle": _LINES[turn % len(_LINES)],
        "linewidth": 1.4,
        "label": _name(x, batch, head),
    }


def _key_shares(x: QKV, rows: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """Share of a row's visible keys that hold each share of its mass, (n, s)."""
    visible = rows[:, None] + 1 if x.is_causal else x.length
    return keys_holding(weights, mass.to(weights.device)).double() / visible


def _tiles(x: QKV, batch: int, head: int) -> Tensor:
    """Mean weights of the tiles of a head, at most (TILES, TILES)."""
    rows = torch.arange(x.q.shape[2], device=x.q.device)
    side = min(TILES, x.length)
    blocks = [F.adaptive_avg_pool1d(w, side) for _, _, w in rows_of_head(x, batch, head, rows)]
    return F.adaptive_avg_pool1d(torch.cat(blocks).mT, side).mT
