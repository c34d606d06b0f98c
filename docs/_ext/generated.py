"""Pages that nobody writes: method tables, a card for each method, the API, the notebooks.

They go to ``docs/generated`` before Sphinx looks for its sources. A file whose text did not change
is left alone, so that Sphinx does not build its page again; a file no longer made is removed.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tables import COLUMNS, table, yes

import numattn
from numattn import Method, Unsupported
from numattn.core.cost import Shape
from numattn.core.module import AttentionModule

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PACKAGES = ("core", "engines", "measure", "testing")
FAMILIES = ("lowrank", "kernel", "latent", "tensor")
LENGTHS = (1024, 4096, 16384)


def setup(app: Sphinx) -> dict[str, bool]:
    """Entry point of a Sphinx extension."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx) -> None:
    """Bring ``docs/generated`` up to date."""
    source = Path(app.srcdir)
    target = source / "generated"
    pages = dict(all_pages(source.parent / "notebooks"))
    for old in [path for path in target.rglob("*") if path.is_file()]:
        if old.relative_to(target).as_posix() not in pages:
            old.unlink()
    for name, text in pages.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def all_pages(notebooks: Path) -> Iterator[tuple[str, str]]:
    """(path under ``docs/generated``, text) of every page."""
    records = numattn.methods()
    yield "methods.md", methods_page(records)
    for record in records:
        yield f"methods/{record.info.name}.md", card(record)
    yield "api.md", api_index()
    for package in PACKAGES:
        yield f"api/{package}.md", api_page(package)
    for family in FAMILIES:
        yield f"api/{family}.md", family_page(family, records)
    for notebook in sorted(notebooks.glob("*.ipynb")):
        yield f"notebooks/{notebook.name}", notebook.read_text(encoding="utf-8")


def methods_page(records: list[type[Method]]) -> str:
    """One table for each family, with links to the cards."""
    columns = {name: cell for name, cell in COLUMNS.items() if name not in ("method", "family")}
    parts = [
        "# Methods",
        "Made from the registry, `numattn.methods()`. *Time* is for one head; N is the length, d "
        "and e the widths of keys and values, other letters the budget. *Target* is what the "
        "method converges to: `softmax` attention, or its `own` definition. "
        "`numattn.testing.check` holds every method to what its row says.",
    ]
    for family, group in groupby(records, key=lambda record: record.info.family):
        rows = [
            [f"[{r.info.name}](methods/{r.info.name}.md)", *(f(r.info) for f in columns.values())]
            for r in group
        ]
        parts += [
            f"## {family.replace('lowrank', 'low rank').capitalize()}",
            table(["method", *columns], rows),
        ]
    entries = "\n".join(f"methods/{record.info.name}" for record in records)
    parts.append(f"```{{toctree}}\n:hidden:\n\n{entries}\n```")
    return "\n\n".join(parts) + "\n"


def card(record: type[Method]) -> str:
    """What is known about one method, what it costs, and its docstrings."""
    info = record.info
    function, module = record.function.__name__, record.__module__
    parts = [
        f"# {info.name}",
        f"{info.summary[0].upper()}{info.summary[1:]}. [Paper]({info.paper}).",
        f"```python\nfrom {record.__module__.rpartition('.')[0]} import {function}\n```",
        "## What it can do",
        table(["property", "value"], facts(record)),
        exceptions(record),
        "## What it costs",
        cost_table(record),
        "## The function",
        rst(f".. autofunction:: {module}.{function}"),
        "## The record",
        rst(f".. autoclass:: {module}.{record.__name__}\n   :members: exact_at"),
        *module_section(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def facts(record: type[Method]) -> list[tuple[str, str]]:
    """The card's table of capabilities."""
    info = record.info
    masks = {"none": "none", "padding": "key padding", "full": "any bool mask, additive bias"}
    lifted = {"lifted": "by recursive halving, at a factor log N"}
    rows = [
        ("family", info.family),
        ("target", {"softmax": "softmax attention", "own": "its own"}[info.approximates]),
        ("time for one head", f"`{info.complexity}`"),
        ("budget", f"`{info.budget}`" if info.budget else "none"),
        ("causal", lifted.get(info.causal, info.causal)),
        ("masks", masks[info.mask]),
        ("different query and key lengths", yes(info.cross)),
        ("step-by-step decoding", yes(info.decode)),
        ("gradients", yes(info.differentiable)),
        ("weights sum to one", yes(info.normalised)),
        ("linear in value", yes(info.linear_in_value)),
        ("draws at random", yes(info.random)),
        ("needs beforehand", info.needs),
        ("tensors it can be given", ", ".join(f"`{t}`" for t in info.state_tensors) or "none"),
    ]
    if info.fits_causal:
        rows.append(("causal calls", "only with these tensors given"))
    if info.oracle:
        rows.append(("oracle", "the best its family can do at this budget, at any price"))
    return rows


def exceptions(record: type[Method]) -> str:
    """The checks of the contract that the method fails by nature."""
    listed = record.info.exceptions.items()
    if not listed:
        return ""
    rows = [(f"`{name}`", reason) for name, reason in listed]
    return "By nature it fails these checks of the contract:\n\n" + table(["check", "why"], rows)


def cost_table(record: type[Method]) -> str:
    """Operations and cache of the default options, beside exact attention."""
    method, exact = record(), numattn.Exact()
    rows = []
    for length in LENGTHS:
        shape = Shape(1, 1, 1, length, length, 64, 64)
        flops, full = method.cost(shape).flops, exact.cost(shape)
        kept = method.cost(shape).cache
        rows.append(
            [
                f"{length}",
                f"{flops / 1e6:.1f}",
                f"{flops / full.flops:.3f}",
                "none" if kept is None else f"{kept / 1024:.0f}",
                f"{(full.cache or 0) / 1024:.0f}",
            ]
        )
    header = ["N", "operations (10⁶)", "of exact", "decoding keeps (KiB)", "exact keeps (KiB)"]
    return (
        f"`{method}` on one head with d = e = 64 in float32, not causal. Operations are those of "
        f"the matrix products; factorisations are not in them.\n\n{table(header, rows)}"
    )


def module_section(record: type[Method]) -> list[str]:
    """The module that owns the method's tensors, where it has any."""
    try:
        module = type(record().module(num_heads=1, head_dim=8))
    except Unsupported:
        return []
    name = f"{module.__module__}.{module.__name__}"
    return [
        "## The module",
        rst(f".. autoclass:: {name}\n   :members:\n   :exclude-members: forward"),
    ]


def api_index() -> str:
    """The page above the API's pages."""
    entries = "\n".join(f"api/{package}" for package in (*FAMILIES, *PACKAGES))
    return (
        "# API\n\nFunctions, records and modules of the methods are on the methods' "
        "[cards](methods.md); the pages of the families have layers, and what belongs to several "
        f"methods.\n\n```{{toctree}}\n{entries}\n```\n"
    )


def api_page(package: str) -> str:
    """Every module of one package, by autodoc."""
    root = import_module(f"numattn.{package}")
    names = [
        root.__name__,
        *(m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")),
    ]
    parts = [f"# numattn.{package}"]
    for name in names:
        title = [] if name == root.__name__ else [f"## {name}"]
        parts += [*title, rst(f".. automodule:: {name}\n   :members:")]
    return "\n\n".join(parts) + "\n"


def family_page(family: str, records: list[type[Method]]) -> str:
    """What a family exports beside its methods: layers, feature maps, fits, diagnostics."""
    on_cards: set[object] = {*records, *(record.function for record in records)}
    parts = [f"# numattn.{family}"]
    for name, value in vars(import_module(f"numattn.{family}")).items():
        is_class = inspect.isclass(value)
        if not (is_class or inspect.isfunction(value)) or value in on_cards:
            continue
        if is_class and issubclass(value, AttentionModule):
            continue
        if not value.__module__.startswith(f"numattn.{family}."):  # of core, and on its page
            continue
        how = "autoclass" if is_class else "autofunction"
        members = "\n   :members:" if is_class else ""
        parts.append(rst(f".. {how}:: {value.__module__}.{name}{members}"))
    return "\n\n".join(parts) + "\n"


def rst(text: str) -> str:
    """A block of reStructuredText inside MyST."""
    return f"```{{eval-rst}}\n{text}\n```"
