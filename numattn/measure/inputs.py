"""Inputs to measure on: synthetic distributions, bundled heads of trained models, files.

Approximations of attention differ more by input than by anything else, and Gaussian noise is
unlike the heads of trained models: measure on several kinds.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from numattn.core.cost import Shape
from numattn.core.linalg import input_generator
from numattn.core.method import Method

DATA = Path(__file__).resolve().parents[1] / "data"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class InputError(ValueError):
    """An input cannot be used; the message says which, and why."""


@dataclass(frozen=True)
class QKV:
    """One input of attention.

    Attributes:
        name: What rows and tables call it.
        q: (B, H, N, D), position encoding applied.
        k: (B, Hk, N, D); query head h attends with key head h // (H / Hk).
        v: (B, Hk, N, E).
        is_causal: Whether position i attends to positions j <= i only.
        scale: Factor of the logits.
        tag: A few words on what it looks like.
        source: Where it comes from.
        wo: Weight of the layer's output projection, (width, H E) as in ``nn.Linear``, its columns
            head by head; None where it is not known.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    scale: float
    tag: str = ""
    source: str = ""
    wo: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens, N."""
        return self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def shape(self) -> Shape:
        """The shape of a call on it."""
        batch, heads, queries, head_dim = self.q.shape
        _, kv_heads, keys, value_dim = self.v.shape
        return Shape(
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            value_dim,
            self.is_causal,
            self.q.element_size(),
        )

    def crop(self, length: int) -> QKV:
        """The first `length` tokens.

        A causal model computes the same attention on them; a bidirectional one would have seen
        the rest too.

        Raises:
            ValueError: `length` is not between 1 and N.
        """
        if not 1 <= length <= self.length:
            raise ValueError(
                f"{self.name} has {self.length} tokens; it cannot be cropped to {length}."
            )
        q, k, v = (x[:, :, :length] for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def single(self, batch: int, head: int) -> QKV:
        """One query head of one sequence, with its key head, as an input of its own."""
        own = slice(batch, batch + 1)
        shared = slice(head // self.group, head // self.group + 1)
        q, k, v = self.q[own, head : head + 1], self.k[own, shared], self.v[own, shared]
        return replace(self, q=q, k=k, v=v, wo=None)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> QKV:
        """The same input in another type or on another device; None keeps what it has."""
        q, k, v = (x.to(device=device, dtype=dtype) for x in (self.q, self.k, self.v))
        wo = None if self.wo is None else self.wo.to(device=device, dtype=dtype)
        return replace(self, q=q, k=k, v=v, wo=wo)

    def call(self, method: Method | None = None) -> dict[str, Any]:
        """The keywords of an attention call on it: ``is_causal``, ``scale``, ``enable_gqa``.

        Args:
            method: Who is to be called; ``scale`` is None for a method without logits to scale.
        """
        scaled = method is None or method.info.scaled
        return {
            "is_causal": self.is_causal,
            "scale": self.scale if scaled else None,
            "enable_gqa": self.group > 1,
        }


def _gaussian(x: Tensor, y: Tensor, v: Tensor, causal: bool, g: Generator) -> None:
    """Independent standard normal numbers: logits of variance 1, no structure at all."""


def _clustered(x: Tensor, y: Tensor, v: Tensor, causal: bool, g: Generator) -> None:
    """Tokens about 16 random centres: a query attends to the keys of its own cluster."""
    heads, length, dim = x.shape
    centers = _randn((heads, 16, dim), g)
    centers *= dim**0.5 / centers.norm(dim=-1, keepdim=True)
    if dim < 64:
        centers *= (64 / dim) ** 0.25  # logits within a cluster: 8, as at D = 64
    member = torch.randint(16, (heads, length), generator=g)
    at = centers.gather(1, member[..., None].expand(-1, -1, dim))
    x.mul_(0.3).add_(at)
    y.mul_(0.3).add_(at)


def _lowrank(x: Tensor, y: Tensor, v: Tensor, causal: bool, g: Generator) -> None:
    """Queries and keys in one random subspace of dimension 4; logits of variance 1."""
    dim = x.shape[-1]
    basis = torch.linalg.qr(_randn((x.shape[0], dim, 4), g))[0].mT  # (H, 4, D)
    for t in (x, y):
        t.copy_((t[..., :4] * (dim / 4) ** 0.25) @ basis)


def _local(x: Tensor, y: Tensor, v: Tensor, causal: bool, g: Generator) -> None:
    """Rotary positions: the logit falls with the logarithm of the distance, from 20 at 0."""
    pairs = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * torch.logspace(
        0, -4, pairs + 1, dtype=torch.float64
    )[:pairs].expand(1, pairs)
    wave = torch.cat([angle.cos(), angle.sin()], -1)  # (N, 2 pairs); its Gram matrix is local
    size = (20 * x.shape[-1] ** 0.5 / pairs) ** 0.5
    for t in (x, y):
        t.mul_(0.5)[..., : 2 * pairs].add_(size * wave)


def _sink(x: Tensor, y: Tensor, v: Tensor, causal: bool, g: Generator) -> None:
    """Key 0 takes about four fifths of the mass, and has a small value."""
    heads, length, dim = x.shape
    u = _randn((heads, 1, dim), g)
    u /= u.norm(dim=-1, keepdim=True)
    x += dim**0.5 * u
    y -= (y * u).sum(-1, keepdim=True) * u  # else every query would favour the same keys
    y[:, :1] = (math.log(4 * length) + 0.5) * u  # the others' exponentials sum to N e^(1/2)
    v[:, 0] *= 0.1


def _peaked(x: Tensor, y: Tensor, v: Tensor, causal: bool, g: Generator) -> None:
    """Each query looks for one key at a random place, with a logit of 16."""
    heads, length, dim = x.shape
    y *= dim**0.5 / y.norm(dim=-1, keepdim=True)
    if causal:
        place = torch.rand((heads, length), generator=g, dtype=torch.float64)
        target = (place * torch.arange(1, length + 1)).long()
    else:
        target = torch.stack([torch.randperm(length, generator=g) for _ in range(heads)])
    found = y.gather(1, target[..., None].expand(-1, -1, dim))
    x.mul_(0.1).add_(found * (16 / dim**0.5))


Kind = Callable[[Tensor, Tensor, Tensor, bool, Generator], None]

# name -> how to turn normal q, k, v (H, N, D) into this kind in place, and its tag
_KINDS: dict[str, tuple[Kind, str]] = {
    "gaussian": (_gaussian, "no structure"),
    "clustered": (_clustered, "clusters"),
    "lowrank": (_lowrank, "low rank"),
    "local": (_local, "local"),
    "sink": (_sink, "sink"),
    "peaked": (_peaked, "nearly one-hot, far keys"),
}

SYNTHETIC = tuple(_KINDS)


def synthetic(
    kind: str,
    length: int = 1024,
    *,
    heads: int = 4,
    head_dim: int = 64,
    is_causal: bool = False,
    seed: int = 0,
) -> QKV:
    """Random q, k, v of one kind, float32, with scale = D ** -0.5 and E = D.

    - ``"gaussian"``: independent standard normal numbers, logits of variance 1, no structure.
    - ``"clustered"``: tokens about 16 random centres; a query attends to its own cluster's keys.
    - ``"lowrank"``: queries and keys in one random subspace of dimension 4, small logits.
    - ``"local"``: rotary positions; logits fall with the logarithm of the distance.
    - ``"sink"``: key 0 takes about four fifths of the mass, and has a small value.
    - ``"peaked"``: each query has one key, at a random place it may see, far above the others.

    Values are normal and independent of queries and keys, which is hard on every method that
    relies on nearby keys having nearby values.

    Args:
        kind: One of `SYNTHETIC`.
        length: Tokens, N.
        heads: Query and key heads, H = Hk.
        head_dim: D; at least 8, but for Gaussian noise.
        is_causal: Whether position i attends to positions j <= i only.
        seed: Of the draw; equal arguments give equal tensors.

    Raises:
        InputError: No such kind, or a size that is too small.

    Example:
        >>> synthetic("sink", 128).q.shape
        torch.Size([1, 4, 128, 64])
    """
    if kind not in _KINDS:
        raise InputError(f"no synthetic input is called {kind!r}.{_near(kind, SYNTHETIC)}")
    least = 1 if kind == "gaussian" else 8  # less leaves no room for a structure
    for what, size, low in (
        ("length", length, 1),
        ("heads", heads, 1),
        ("head_dim", head_dim, least),
    ):
        if size < low:
            raise InputError(f"{kind}: {what} must be at least {low}; got {size}.")
    source = input_generator(seed)
    q, k, v = (_randn((heads, length, head_dim), source) for _ in range(3))
    make, tag = _KINDS[kind]
    make(q, k, v, is_causal, source)
    q, k, v = (x.float()[None] for x in (q, k, v))
    return QKV(kind, q, k, v, is_causal, head_dim**-0.5, tag, f"synthetic, seed {seed}")


def bundled() -> list[str]:
    """Names of the inputs that come with the package, to measure on."""
    return [name for name, entry in _manifest().items() if "calibrates" not in entry]


def calibration(name: str) -> str | None:
    """Name of a bundled input with the same heads on another text, to calibrate a method on."""
    same = [n for n, entry in _manifest().items() if entry.get("calibrates") == name]
    return same[0] if same else None


def load(name: str | os.PathLike[str], *, length: int | None = None, seed: int = 0) -> QKV:
    """An input by name: bundled, synthetic, or a file of your own.

    A file is a ``.safetensors`` file with tensors ``q`` (B, H, N, D), ``k`` (B, Hk, N, D) and
    ``v`` (B, Hk, N, E), or the same without B, of one floating type, and perhaps ``wo``, the
    weight of the output projection, (width, H E); other tensors in it are not read. Its metadata,
    which are strings, may say ``is_causal`` (or ``causal``), ``"true"`` or
    ``"false"``, and ``scale``; they default to ``"false"`` and D ** -0.5. Also ``tag`` and
    ``source`` are kept. To write one::

        safetensors.torch.save_file({"q": q, "k": k, "v": v}, "my.safetensors",
                                    metadata={"is_causal": "true", "scale": "0.125"})

    Args:
        name: One of `bundled`, a `calibration`, one of `SYNTHETIC`, or a path that ends in
            ``.safetensors``.
        length: Keep the first tokens only; by default all there are, and 1024 for a synthetic one.
        seed: Of the draw of a synthetic input; the others have none.

    Returns:
        The input, in the type that is stored (float16 in the bundle, float32 for synthetic ones).

    Raises:
        InputError: No such input, or a file that cannot be used; the file is left as it is.
        ValueError: `length` exceeds what there is.

    Example:
        >>> load("smollm2-sink", length=256).q.shape
        torch.Size([1, 3, 256, 64])
    """
    text = os.fspath(name)
    if text in _KINDS:
        return synthetic(text, 1024 if length is None else length, seed=seed)
    if text in _manifest():
        x = _read(DATA / _manifest()[text]["file"], text)
    elif text.endswith(".safetensors"):
        x = _read(Path(text), Path(text).stem)
    else:
        known = (*_manifest(), *SYNTHETIC)
        raise InputError(
            f"no input is called {text!r}.{_near(text, known)} There are {', '.join(known)}; "
            "or give the path of a .safetensors file."
        )
    return x if length is None else x.crop(length)


def _randn(shape: tuple[int, ...], source: Generator) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float64)


def _near(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _manifest() -> dict[str, dict[str, Any]]:
    entries = json.loads((DATA / "manifest.json").read_text(encoding="utf-8"))["entries"]
    return {entry["name"]: entry for entry in entries}


def _read(path: Path, name: str) -> QKV:
    """Read and check a file."""
    tensors, metadata = read_tensors(path, tuple("qkv"), ("wo",))
    wo = tensors.pop("wo", None)
    tensors = {n: x[None] if x.dim() == 3 else x for n, x in tensors.items()}
    _check_tensors(path, tensors)
    q, k, v = (tensors[n] for n in "qkv")
    _check_projection(path, wo, q.shape[1] * v.shape[3])
    causal, scale = _settings(path, metadata, q.shape[-1])
    tag, source = metadata.get("tag", ""), metadata.get("source", "")
    return QKV(name, q, k, v, causal, scale, tag, source, wo)


def read_tensors(
    path: Path, names: tuple[str, ...], extra: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of these names in a file, those of `extra` that it has, and its metadata."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        what = "is a directory" if path.is_dir() else "there is no such file"
        raise InputError(f"{path}: {what}.{_near(path.stem, tuple(_manifest()))}")
    try:
        with safe_open(path, framework="pt") as file:
            missing = [n for n in names if n not in file.keys()]  # noqa: SIM118 - not a mapping
            if missing:
                raise InputError(
                    f"{path}: has no tensor {' and no '.join(missing)}; it needs "
                    f"{', '.join(names[:-1])} and {names[-1]}, and has "
                    f"{', '.join(sorted(file.keys())) or 'none'}."
                )
            found = [*names, *(n for n in extra if n in file.keys())]  # noqa: SIM118 - as above
            return {n: file.get_tensor(n) for n in found}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read; it is truncated, corrupt, or no safetensors file ({error})."
        ) from error


def _check_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    shapes = ", ".join(f"{n} {tuple(x.shape)} {x.dtype}" for n, x in tensors.items())
    q, k, v = (tensors[n] for n in "qkv")

    def need(good: bool, what: str) -> None:
        if not good:
            raise InputError(f"{path}: {what}; got {shapes}.")

    dims = all(x.dim() == 4 for x in (q, k, v))
    need(
        dims, "q, k and v must have 4 dimensions (batch, heads, length, width), or 3 without batch"
    )
    need(all(x.numel() for x in (q, k, v)), "q, k and v must not be empty")
    need(q.dtype in _DTYPES, "tensors must be float16, bfloat16, float32 or float64")
    need(q.dtype == k.dtype == v.dtype, "q, k and v must be of one type")
    need(q.shape[0] == k.shape[0] == v.shape[0], "q, k and v must have the same batch")
    need(q.shape[2] == k.shape[2] == v.shape[2], "q, k and v must have the same length")
    need(k.shape[1] == v.shape[1], "k and v must have the same heads")
    need(q.shape[1] % k.shape[1] == 0, "the heads of q must be a multiple of those of k")
    need(q.shape[3] == k.shape[3], "the head sizes of q and k must be equal")
    for n, x in tensors.items():
        _check_finite(path, n, x)


def _check_projection(path: Path, wo: Tensor | None, columns: int) -> None:
    if wo is None:
        return
    if wo.dim() != 2 or wo.shape[1] != columns or wo.dtype not in _DTYPES:
        raise InputError(
            f"{path}: wo must be floating, of shape (width, {columns}), a column for each value "
            f"entry of each head; got {tuple(wo.shape)} {wo.dtype}."
        )
    _check_finite(path, "wo", wo)


def _check_finite(path: Path, name: str, x: Tensor) -> None:
    bad = int((~x.isfinite()).sum())
    if bad:
        raise InputError(f"{path}: {bad} of the {x.numel()} numbers of {name} are not finite.")


def _settings(path: Path, metadata: dict[str, str], head_dim: int) -> tuple[bool, float]:
    """is_causal and scale."""
    given = {n: metadata[n] for n in ("is_causal", "causal") if n in metadata}
    values = {value.lower() for value in given.values()} or {"false"}
    if len(values) != 1 or not values <= {"true", "false"}:
        raise InputError(
            f"{path}: is_causal in the metadata must be 'true' or 'false'; got {given}."
        )
    text = metadata.get("scale", str(head_dim**-0.5))
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise InputError(f"{path}: scale in the metadata must be a finite number; got {text!r}.")
    return values == {"true"}, scale
