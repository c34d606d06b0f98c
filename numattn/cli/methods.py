"""``numattn list`` and ``numattn show``: what there is, from the registry."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from dataclasses import fields
from itertools import groupby

from numattn.cli.common import WIDTH, Commands, find


def add(commands: Commands) -> None:
    """Both commands."""
    every = commands.add_parser("list", help="every method, by family")
    every.set_defaults(run=list_methods)
    one = commands.add_parser("show", help="what one method does, its options, its limits")
    one.add_argument("method", metavar="METHOD", help="a name from `numattn list`")
    one.set_defaults(run=show)


def list_methods(args: argparse.Namespace) -> int:
    """A line for each method."""
    import numattn

    for family, records in groupby(numattn.methods(), lambda record: record.info.family):
        print(family)
        for record in records:
            info = record.info
            needs = "" if info.needs == "nothing" else f" (needs {info.needs})"
            budget = f" [{info.budget}]" if info.budget else ""
            line = f"{info.summary}{budget}{needs}"
            indent = " " * 15
            print(textwrap.fill(f"  {info.name:<12} {line}", WIDTH, subsequent_indent=indent))
    print("\nIn brackets: the option that trades cost for accuracy. More: numattn show METHOD")
    return 0


def show(args: argparse.Namespace) -> int:
    """The card of one method."""
    method = find(args.method)
    info, function = method.info, type(method).function
    package = function.__module__.rpartition(".")[0]
    masks = {"none": "none", "padding": "key padding", "full": "any"}
    facts = {
        "family": info.family + (", its oracle: not a fast method" if info.oracle else ""),
        "target": "softmax" if info.approximates == "softmax" else "its own, not softmax",
        "budget": info.budget or "none",
        "cost": info.complexity,
        "causal": info.causal,
        "masks": masks[info.mask],
        "lengths": "queries and keys may differ" if info.cross else "queries = keys",
        "decoding": "yes" if info.decode else "no",
        "gradients": "yes" if info.differentiable else "no",
        "random": "yes, pass a generator" if info.random else "no",
        "needs": info.needs,
        "paper": info.paper,
        "options": ", ".join(f"{f.name}={getattr(method, f.name)!r}" for f in fields(method)),
        "tensors": ", ".join(info.state_tensors),
        "import": f"from {package} import {function.__name__}, {type(method).__name__}",
    }
    print(f"{info.name}: {info.summary}\n")
    for name, fact in facts.items():
        if fact:
            print(textwrap.fill(f"  {name:<10} {fact}", WIDTH, subsequent_indent=" " * 13))
    for check, reason in info.exceptions.items():
        line = f"  {'except':<10} {check}: {reason}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 13))
    print(f"\n{inspect.getdoc(function)}")
    return 0
