"""What the methods of a sweep are held against on one input; each part is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from numattn.core.cost import count_flops
from numattn.core.inputs import compute_dtype
from numattn.core.method import Method
from numattn.exact import Exact
from numattn.measure.baselines import mean_of_values, uniform_keys
from numattn.measure.errors import HeadError, Reference, attend, head_errors, noise_floor
from numattn.measure.inputs import QKV, calibration, load
from numattn.measure.references import digest, kept_reference

STEPS = 64  # the most tokens that are decoded one by one


class Truth:
    """One input on one device, and exact attention on it.

    Attributes:
        device: Where it is.
        stored: The tokens that are measured, in the type that is stored.
        sample: The tokens that tensors are fitted on; None for those of the input itself.
        sampled: Name of the sample, empty where it is None.
        always: Whether every fitted method takes its tensors from there, not only those that
            cannot fit them in the call.
    """

    def __init__(
        self,
        x: QKV,
        device: str,
        calibrate: QKV | str | None,
        cache: Path | str | None,
        tell: Callable[[str], None],
    ) -> None:
        self.device = device
        self.always = calibrate is not None
        measured, sample = _parts(x, calibrate)
        self.stored = measured.to(device=device)
        self.sample = None if sample is None else sample.to(device=device)
        self.sampled = "" if sample is None else sample.name
        self._uniform: dict[tuple[int, int], list[HeadError]] = {}
        self._cache, self._tell = cache, tell

    @cached_property
    def digest(self) -> str:
        """Of the input, short."""
        return digest(self.stored)[:12]

    @cached_property
    def reference(self) -> Reference:
        """Exact attention to all tokens."""
        return kept_reference(self.stored, self._cache, self._tell)

    @cached_property
    def mean(self) -> list[HeadError]:
        """Of the mean of the values."""
        return mean_of_values(self.reference)

    def uniform(self, units: int, seed: int) -> list[HeadError]:
        """Of keys drawn blindly, in the output."""
        if (units, seed) not in self._uniform:
            found = uniform_keys(self.reference, units, seed, with_weights=False)
            self._uniform[units, seed] = found
        return self._uniform[units, seed]

    @property
    def start(self) -> int:
        """The first of the tokens that are decoded one by one: the last 64, or a quarter."""
        length = self.stored.length
        return length - max(min(STEPS, length // 4), 1)

    @property
    def tail(self) -> Reference:
        """Exact attention from the tokens that are decoded."""
        ref = self.reference
        return Reference(ref.x, ref.out[:, :, self.start :], ref.lse[:, :, self.start :])

    @cached_property
    def tail_mean(self) -> list[HeadError]:
        """Of the mean of the values, in the rows that are decoded."""

        def mean(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            seen = torch.arange(1, value.shape[2] + 1, device=value.device)[:, None]
            rows = (value.cumsum(2) / seen)[:, :, self.start :]
            return rows.repeat_interleave(self.stored.group, 1)

        return head_errors(mean, self.tail, dtype=torch.float64, with_weights=False)

    def release(self) -> None:
        """Forget what was computed, which may be large."""
        for name in ("reference", "mean", "tail_mean"):
            self.__dict__.pop(name, None)
        self._uniform.clear()


class Bench:
    """An input in the type in which the methods run."""

    def __init__(self, truth: Truth, dtype: torch.dtype) -> None:
        self.truth = truth
        self.dtype = dtype
        self.x = truth.stored.to(dtype)

    @cached_property
    def floor(self) -> list[HeadError]:
        """Of exact attention in this type."""
        return noise_floor(self.truth.reference, self.dtype)

    @cached_property
    def tail_floor(self) -> list[HeadError]:
        """Of exact attention in this type, decoding."""
        return head_errors(
            Decoder(Exact(), self.x, self.truth.start, {}),
            self.truth.tail,
            dtype=self.dtype,
            with_weights=False,
        )

    @cached_property
    def exact(self) -> Callable[[], Tensor]:
        """A call of exact attention."""
        fn = attend(Exact(), self.x)
        return lambda: fn(self.x.q, self.x.k, self.x.v)

    @cached_property
    def exact_flops(self) -> int:
        """Its operations."""
        return count_flops(self.exact)

    @property
    def exact_bytes(self) -> int:
        """What exact attention reads of its keys and values for the last token."""
        shape = self.x.shape
        return (
            shape.batch
            * shape.kv_heads
            * shape.keys
            * shape.itemsize
            * (shape.head_dim + shape.value_dim)
        )

    def release(self, truth_too: bool) -> None:
        """Forget what was computed, and what the truth did."""
        for name in ("floor", "tail_floor", "exact", "exact_flops"):
            self.__dict__.pop(name, None)
        if truth_too:
            self.truth.release()


class Decoder:
    """Attends from the last tokens, one by one, from a state that is filled with those before.

    Attributes:
        bytes_read: What the last step of the last call read of the state.
    """

    def __init__(self, method: Method, x: QKV, start: int, tensors: dict[str, Tensor]) -> None:
        self.method, self.start = method, start
        call = {n: value for n, value in x.call(method).items() if n != "is_causal"}
        self.call: dict[str, Any] = call | tensors
        self.bytes_read: int | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = slice(0, self.start)
        state = self.method.state(key[:, :, first], value[:, :, first], **self.call)
        outs = []
        for t in range(self.start, key.shape[2]):
            one = slice(t, t + 1)
            state.append(key[:, :, one], value[:, :, one])
            outs.append(state.attend(query[:, :, one]))
        self.bytes_read = state.nbytes_read
        return torch.cat(outs, 2)


def fit(method: Method, sample: QKV, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """A method's state tensors, fitted on some tokens, for runs in `dtype`; drawn from `seed`."""
    y = sample.to(compute_dtype(dtype))
    call = {n: value for n, value in y.call(method).items() if n != "is_causal"}
    source = Generator().manual_seed(seed) if method.info.random else None
    return method.fit(y.q, y.k, y.v, **call, generator=source)


def _parts(x: QKV, calibrate: QKV | str | None) -> tuple[QKV, QKV | None]:
    """The tokens to measure, and those to fit tensors on where these are others."""
    if calibrate == "itself":
        return x, None
    if calibrate == "half":
        if x.length < 2:
            raise ValueError(f"calibrate='half': {x.name} has one token only.")
        half = x.length // 2
        q, k, v = (t[:, :, half:] for t in (x.q, x.k, x.v))
        return replace(x, q=q, k=k, v=v), replace(x.crop(half), name=f"{x.name}, first half")
    if calibrate is None or calibrate == "other":
        name = calibration(x.name)
        sample = None if name is None else load(name)
        return x, sample if sample is not None and _alike(sample, x) else None
    sample = load(calibrate) if isinstance(calibrate, str) else calibrate
    if not _alike(sample, x):
        raise ValueError(
            f"calibrate: {sample.name} must have the heads of {x.name}; H, Hk, D and E are "
            f"{_heads(sample)} and {_heads(x)}."
        )
    return x, sample


def _alike(x: QKV, y: QKV) -> bool:
    return _heads(x) == _heads(y)


def _heads(x: QKV) -> tuple[int, ...]:
    return x.q.shape[1], x.k.shape[1], x.k.shape[3], x.v.shape[3]
