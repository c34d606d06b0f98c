"""Two adaptations between docstrings as they are written and Sphinx's napoleon."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Entry point of a Sphinx extension."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", adapt, priority=400)  # before napoleon, at 500
    app.connect("autodoc-process-signature", readable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def adapt(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Names that share a description stay together; a property's first line is no type."""
    shared = re.compile(r"( +\w+(?:, \w+)+)(?=: )")
    lines[:] = [shared.sub(lambda m: m[1].replace(", ", ","), line, count=1) for line in lines]
    if what == "property":
        lines[0] = lines[0].replace(": ", " \N{EN DASH} ", 1)


def readable(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """A default that a dataclass makes anew each time, in a form that can be parsed."""
    return (signature and signature.replace("<factory>", "..."), returns)
