"""The registry: every method and layer there is; the check that record and function agree."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from numattn.core.info import FAMILIES
from numattn.core.layer import AttentionLayer
from numattn.core.method import Method

_METHODS: dict[str, type[Method]] = {}
_LAYERS: list[type[AttentionLayer]] = []

_COMMON = ("attn_mask", "is_causal", "scale", "enable_gqa", "generator")

M = TypeVar("M", bound=type[Method])
L = TypeVar("L", bound=type[AttentionLayer])


def register(record: M) -> M:
    """Class decorator: enter a record into the registry.

    Raises:
        ValueError: The name is taken, or record, function and info do not agree.
    """
    info = record.info
    if info.name in _METHODS:
        raise ValueError(f"a method named {info.name!r} is registered already.")
    keywords = {
        p.name: p.default
        for p in inspect.signature(record.function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    missing = [name for name in _COMMON[:-1] if name not in keywords]
    if missing:
        raise ValueError(f"{info.name}: the function lacks {', '.join(missing)}.")
    if info.random != ("generator" in keywords):
        raise ValueError(f"{info.name}: Info.random must say whether it takes a generator.")
    for name in info.state_tensors:
        if keywords.get(name, MISSING) is not None:
            raise ValueError(
                f"{info.name}: the state tensor {name} must be a keyword, default None."
            )
    theirs = {k: v for k, v in keywords.items() if k not in (*_COMMON, *info.state_tensors)}
    ours = {f.name: f.default for f in fields(record)}
    if ours != theirs:
        raise ValueError(f"{info.name}: the record has {ours}, its function {theirs}.")
    if info.budget is not None and info.budget not in ours:
        raise ValueError(f"{info.name}: the budget {info.budget!r} is not an option.")
    _METHODS[info.name] = record
    return record


def methods() -> list[type[Method]]:
    """Every registered record class, by family and then by name."""
    order = {family: i for i, family in enumerate(FAMILIES)}
    return sorted(_METHODS.values(), key=lambda m: (order[m.info.family], m.info.name))


def register_layer(layer: L) -> L:
    """Class decorator: enter a layer into the registry."""
    _LAYERS.append(layer)
    return layer


def layers() -> list[type[AttentionLayer]]:
    """Every registered class of layers, family by family."""
    return list(_LAYERS)


def get(name: str, **options: Any) -> Method:
    """The method of this name, with these options.

    Raises:
        KeyError: No method has the name; the message suggests the nearest.
        TypeError: An option does not exist.

    Example:
        >>> get("svd", rank=32)
        SVD(rank=32, algorithm='auto')
    """
    if name not in _METHODS:
        near = difflib.get_close_matches(name, _METHODS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"no method is called {name!r}.{hint} `numattn list` shows all.")
    record = _METHODS[name]
    known = [f.name for f in fields(record)]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{name} has no option {option!r}.{hint} It has: {', '.join(known) or 'none'}."
            )
    return record(**options)
