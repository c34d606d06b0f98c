"""Exact references on disk, found again by the content of their input.

A reference is exact attention in float64: N^2 (D + E) work per head for N (E + 1) numbers. One
file holds the output and the normaliser of one input, 8 B H N (E + 1) bytes: 6.4 MB for three heads
of 4096 tokens and E = 64. Nothing is ever removed; the folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from numattn.measure.errors import Reference, reference
from numattn.measure.files import write_whole
from numattn.measure.inputs import QKV

_FORMAT = "numattn reference 1"  # changes whenever what a file holds does


def default_folder() -> Path:
    """``$NUMATTN_CACHE``, else ``numattn`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    named = os.environ.get("NUMATTN_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numattn"


def digest(x: QKV) -> str:
    """SHA-256 of an input's numbers and of how they attend, in hexadecimal."""
    total = hashlib.sha256(repr((x.is_causal, x.scale)).encode())
    for tensor in (x.q, x.k, x.v, *([] if x.wo is None else [x.wo])):
        total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def kept_reference(
    x: QKV, folder: Path | str | None, tell: Callable[[str], None] = warnings.warn
) -> Reference:
    """The reference of an input, from the folder if it is there, else computed and left there.

    A file is written whole or not at all. One that is corrupt is reported and left alone: the
    reference is computed and not kept. So is a folder that cannot be written to.

    Args:
        x: The input, in the type that is stored.
        folder: Where files are; None neither reads nor writes.
        tell: Told of what is wrong with a file or the folder.

    Cost: One pass over the file and its checksum, else that of `numattn.measure.reference`.
    """
    if folder is None:
        return reference(x)
    name = hashlib.sha256((_FORMAT + digest(x)).encode()).hexdigest()
    path = Path(folder) / f"{name}.safetensors"
    try:
        found = _read(path, x)
    except ValueError as error:
        tell(
            f"{path} is not used: {error}. It was left as it is; remove it, and the reference is "
            "kept again."
        )
        return reference(x)
    if found is not None:
        return found
    made = reference(x)
    try:
        _write(path, made)
    except OSError as error:
        tell(f"{path} cannot be written ({error}); the reference is not kept.")
    return made


def _read(path: Path, x: QKV) -> Reference | None:
    """What a file holds; None where there is none."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            out, lse = file.get_tensor("out"), file.get_tensor("lse")
            said = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"it cannot be read ({error})") from error
    rows = tuple(x.q.shape[:3])
    if out.shape != (*rows, x.v.shape[3]) or lse.shape != rows or said != _checksum(out, lse):
        raise ValueError("its numbers are not those that were written")
    device = x.q.device
    return Reference(x.to(torch.float64), out.to(device), lse.to(device))


def _write(path: Path, ref: Reference) -> None:
    from safetensors.torch import save

    out, lse = (t.cpu().contiguous() for t in (ref.out, ref.lse))
    data = save({"out": out, "lse": lse}, metadata={"sha256": _checksum(out, lse)})
    write_whole(path, data)


def _checksum(*tensors: Tensor) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(_bytes(tensor))
    return total.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
