"""What the commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from numattn.core.method import Method
    from numattn.measure.inputs import QKV

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

WIDTH = 100
LENGTH = 1024  # inputs are cut to this by default, so that everything takes minutes
RESULTS = "numattn-results"


class UserError(Exception):
    """Something the user can put right; the message says what and how."""


def find(name: str) -> Method:
    """A method by name."""
    import numattn

    try:
        return numattn.get(name)
    except KeyError as error:
        raise UserError(error.args[0]) from error


def positive(text: str) -> int:
    """The type of an argument."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return value


def device(name: str) -> str:
    """A device that is there."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return name


def inputs(names: list[str] | None, length: int) -> list[QKV]:
    """The inputs, cut to the length."""
    from numattn.measure.inputs import SYNTHETIC, bundled, load

    found = []
    for name in bundled() if names is None else names:
        try:
            x = load(name, length=length if name in SYNTHETIC else None)
            found.append(x.crop(min(length, x.length)))
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from error
    return found
