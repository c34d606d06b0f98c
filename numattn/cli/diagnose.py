"""``numattn diagnose``: what the attention of an input looks like, head by head."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from numattn.cli.common import LENGTH, WIDTH, Commands, UserError, inputs, positive

if TYPE_CHECKING:
    from numattn.measure.inputs import QKV

ABOUT = """\
Look at the exact weights of every head, and say which structure they have that an approximation
can use: locality and sinks, few keys, a low rank, small logits, or none. Prints a line for each
head with a verdict and the family of methods to try first.

--figures receives sparsity.png (share of the keys that hold a share of the mass), decay.png
(singular values) and weights.png (heat maps of all heads).
"""

EXAMPLES = """\
examples:
  numattn diagnose
  numattn diagnose minilm gaussian --length 512
  numattn diagnose my.safetensors --figures results/mine
"""


def add(commands: Commands) -> None:
    """The command."""
    part = commands.add_parser(
        "diagnose",
        help="what the attention of each head looks like, and what to try first",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    part.add_argument(
        "input",
        nargs="*",
        metavar="INPUT",
        help="bundled or synthetic inputs by name, or .safetensors files that hold q, k and v "
        "(default: everything that is bundled)",
    )
    part.add_argument(
        "--length",
        type=positive,
        default=LENGTH,
        metavar="N",
        help="use at most this many tokens of each input (default: %(default)s)",
    )
    part.add_argument("--figures", type=Path, metavar="DIR", help="draw three pictures into DIR")
    part.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables and the legend; draw."""
    from numattn.measure.diagnose import COLUMNS, THRESHOLDS, diagnose, diagnosis_table

    given = inputs(args.input or None, args.length)
    folder = None if args.figures is None else _folder(args.figures)
    for x in given:
        kind = "causal" if x.is_causal else "bidirectional"
        title = f"{x.name}, {x.length} tokens, {kind}" + (f": {x.tag}" if x.tag else "")
        print(diagnosis_table(diagnose(x), title), end="\n\n")
    for name, says in COLUMNS.items():
        print(textwrap.fill(f"{name:>7}  {says}", WIDTH, subsequent_indent=" " * 9))
    print(f"\n{textwrap.fill(THRESHOLDS, WIDTH)}")
    if folder is not None:
        _draw(given, folder)
    return 0


def _folder(path: Path) -> Path:
    """The folder, made, if there is something to draw with."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UserError('--figures needs matplotlib: pip install "numattn[report]"')
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--figures {path}: {error.strerror}") from error
    return path


def _draw(given: list[QKV], folder: Path) -> None:
    """Write the pictures."""
    from numattn.measure.figures import decay_figure, sparsity_figure, weights_figure

    figures = {"sparsity": sparsity_figure, "decay": decay_figure, "weights": weights_figure}
    written = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(written, figures.values(), strict=True):
        try:
            figure(given).savefig(path, dpi=150)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
    print("\nWritten: " + ", ".join(map(str, written)))
