"""Time of a call beside the time of a baseline, taken in turn.

A machine's speed drifts, so a time means little by itself: `compare` runs the two calls
alternately and reports the median of each and of their ratio.

On Linux, glibc maps every allocation above its mmap threshold (at most 32 MiB by itself) anew and
returns it when it is freed, so that each call pays for page faults that have nothing to do with
the method; filling a 64 MiB tensor can take ten times as long. The threshold can be raised only
before a process starts, with the environment variables in `ALLOCATOR`. The command
``numattn measure`` restarts itself with them; set them yourself for timings taken from Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(8 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(8 * 2**30),
}

LIMIT = 0.5  # seconds


@dataclass(frozen=True)
class Timing:
    """Medians over the repetitions of one comparison.

    Attributes:
        seconds, baseline_seconds: Wall time of one call.
        cpu_seconds, baseline_cpu_seconds: Processor time of one call, over all threads.
        ratio: Median over repetitions of wall time divided by the baseline's; below 1 is faster.
        repeats: Repetitions taken, fewer than asked for when the limit was reached.
    """

    seconds: float
    baseline_seconds: float
    cpu_seconds: float
    baseline_cpu_seconds: float
    ratio: float
    repeats: int


def compare(
    call: Callable[[], object],
    baseline: Callable[[], object],
    repeats: int = 5,
    *,
    limit: float = LIMIT,
) -> Timing:
    """Time two calls in turn, call and baseline, call and baseline, without gradients.

    Both run once before anything is kept, to warm up caches and allocators. Where that alone
    takes longer than `limit`, it is kept as the only repetition: warming up matters little then.

    Args:
        call: What is measured.
        baseline: What it is compared with.
        repeats: Repetitions of the pair, positive.
        limit: Seconds after which no further repetition starts.

    Returns:
        Medians of both times and of their ratio.

    Raises:
        ValueError: `repeats` is not positive.

    Example:
        >>> x = torch.randn(64, 64)
        >>> compare(lambda: x @ x, lambda: x + x, repeats=3).repeats
        3
    """
    if repeats < 1:
        raise ValueError(f"compare: repeats must be positive; got {repeats}.")
    start = time.perf_counter()
    with torch.no_grad():
        taken = [(_clock(call), _clock(baseline))]
        if time.perf_counter() - start < limit:
            taken.clear()
        while not taken or (len(taken) < repeats and time.perf_counter() - start < limit):
            taken.append((_clock(call), _clock(baseline)))
    return Timing(
        seconds=median(a[0] for a, _ in taken),
        baseline_seconds=median(b[0] for _, b in taken),
        cpu_seconds=median(a[1] for a, _ in taken),
        baseline_cpu_seconds=median(b[1] for _, b in taken),
        ratio=median(a[0] / b[0] for a, b in taken),
        repeats=len(taken),
    )


def _clock(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds of one call, to the end of what it started on a GPU."""
    _settle()
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    _settle()
    return time.perf_counter() - wall, time.process_time() - cpu


def _settle() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
