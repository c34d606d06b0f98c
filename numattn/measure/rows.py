"""Rows: the plain data that a sweep leaves, and the file that keeps them.

A row holds the numbers of one head; a file holds one row a line, as JSON. Tables and plots are
made from rows, never from runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class RowsError(ValueError):
    """A file of rows cannot be read or written; the message names the file, and the line if any."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One head of one input, attended to by one method at one budget with one seed.

    Errors are relative to exact attention in float64 on the same numbers; see
    `numattn.measure.errors` for their definitions. A number that was not measured is None.

    Attributes:
        method, family, options: What ran.
        budget, budget_option: Value and name of the option that trades cost for accuracy; None
            where the method has none.
        units: The budget in its oracle's unit: keys per query, or rank of the weights.
        is_oracle, approximates, fitted, random: From `Info`; fitted methods take tensors that
            were fitted on `calibrated_on`, or on this very input where that is empty.
        calibrated_on: Name of the input whose tokens the tensors were fitted on, if that is another
            one; where the row decodes and this is empty, they were the tokens before its steps.
        mode: ``"prefill"``, a call on all tokens, or ``"decode"``, the last tokens one by one from
            a state; its errors are of their rows, and weights, operations and times have none.
        input, tag, digest: Name of the input, what it looks like, hash of its numbers.
        length, is_causal, heads, head: Its shape; head is None in a row that stands for all.
        seed: Of the method's draw and of the random baseline.
        dtype, device, backend: Where and in what precision it ran.
        status, reason: ``"ok"``, ``"unsupported"`` or ``"failed"``, and why.
        output: Error of the output, Frobenius norm.
        rows_median, rows_p95, rows_max: Error of a row of the output.
        hull_median, hull_p95, hull_max: The same in units of the spread of the values.
        tv_median, tv_p95, tv_max: Total variation between the rows of weights.
        weights: Error of the matrix of weights, Frobenius norm.
        negative: Negative mass in the weights.
        projected: Error after the output projection, the same for all heads of a layer.
        floor: Output error of exact attention in this dtype.
        mean_baseline: Output error of the mean of the values.
        uniform_baseline: Output error of attention to `units` keys drawn uniformly.
        oracle_error: Output error of the family's oracle at `units`.
        efficiency: How near the oracle the method comes; see `numattn.measure.oracle`.
        overhead: `units` over the least ones at which the oracle comes as near; see
            `numattn.measure.budget_overhead`.
        block_oracle_error, block_efficiency: The same for the heaviest blocks of keys, in the
            sparse family.
        flops, exact_flops: Operations of the matrix products of one call, over all heads.
        bytes_read, exact_bytes_read: What one decoding step reads of the state, over all heads.
        seconds, exact_seconds: Wall time of one call over all heads, in this process.
        cpu_seconds, exact_cpu_seconds: Processor time of one call, over all threads.
        time_ratio: Median ratio of wall times taken in turn; below 1 is faster than exact.
        picture: Mean weights of a grid of tiles of the matrix; see `numattn.measure.pictures`.
        machine: Processor and threads.
        numattn_version, torch_version, python_version: What ran it.
    """

    method: str
    family: str
    options: dict[str, Any]
    budget: int | None
    budget_option: str | None
    units: int | None = None
    is_oracle: bool
    approximates: str
    fitted: bool
    random: bool
    calibrated_on: str = ""
    mode: str = "prefill"
    input: str
    tag: str
    digest: str
    length: int
    is_causal: bool
    heads: int
    head: int | None = None
    seed: int
    dtype: str
    device: str
    backend: str
    status: str = "ok"
    reason: str = ""
    output: float | None = None
    rows_median: float | None = None
    rows_p95: float | None = None
    rows_max: float | None = None
    hull_median: float | None = None
    hull_p95: float | None = None
    hull_max: float | None = None
    tv_median: float | None = None
    tv_p95: float | None = None
    tv_max: float | None = None
    weights: float | None = None
    negative: float | None = None
    projected: float | None = None
    floor: float | None = None
    mean_baseline: float | None = None
    uniform_baseline: float | None = None
    oracle_error: float | None = None
    efficiency: float | None = None
    overhead: float | None = None
    block_oracle_error: float | None = None
    block_efficiency: float | None = None
    flops: int | None = None
    exact_flops: int | None = None
    bytes_read: int | None = None
    exact_bytes_read: int | None = None
    seconds: float | None = None
    exact_seconds: float | None = None
    cpu_seconds: float | None = None
    exact_cpu_seconds: float | None = None
    time_ratio: float | None = None
    picture: str = ""
    machine: str
    numattn_version: str
    torch_version: str
    python_version: str

    @property
    def setting(self) -> tuple[str, int, str, str, str, str]:
        """What rows must share to stand in one table."""
        return self.input, self.length, self.dtype, self.device, self.backend, self.mode

    @property
    def unit(self) -> str:
        """The unit of work that the row is a part of, whichever version did it."""
        return json.dumps([self.method, self.options, self.seed, *self.setting], sort_keys=True)

    @property
    def variant(self) -> str:
        """Method and options without the budget: what one line of a plot stands for."""
        others = {k: v for k, v in self.options.items() if k != self.budget_option}
        return json.dumps([self.method, others], sort_keys=True)

    @property
    def relative_flops(self) -> float | None:
        """Operations of the matrix products, relative to exact attention."""
        return None if self.flops is None or not self.exact_flops else self.flops / self.exact_flops

    @property
    def relative_bytes(self) -> float | None:
        """What a decoding step reads, relative to all keys and values."""
        if self.bytes_read is None or not self.exact_bytes_read:
            return None
        return self.bytes_read / self.exact_bytes_read

    @property
    def siblings(self) -> int:
        """Rows that its unit of work has in all."""
        return self.heads if self.status == "ok" else 1


def read_rows(path: Path | str) -> list[Row]:
    """The rows of a file, each unit of work as it was last measured.

    Raises:
        RowsError: The file cannot be read, or a line is not a row.
    """
    if not Path(path).exists():
        raise RowsError(f"{path}: there is no such file; `numattn measure` writes one.")
    store = Store(Path(path), lambda note: warnings.warn(note, stacklevel=4))
    if not store.blocks:
        raise RowsError(f"{path} holds no rows.")
    return [row for block in store.blocks.values() for row in block]


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Be the only writer of a file of rows while this lasts.

    The claim is a lock that the system releases when the process ends, however it ends, on
    ``path`` with ``.lock`` added; the file says whose it is. Where the system has no `fcntl`
    (Windows) nothing is locked.

    Raises:
        RowsError: Another process, or thread, has the claim; the message names it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(path.name + ".lock")
    with contextlib.ExitStack() as opened:
        while True:
            file = opened.enter_context(open(name, "a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().strip() or "another process"
                raise RowsError(
                    f"{path} is being written by {who}. Wait until it ends, or stop it, or let the "
                    "rows go to another folder."
                ) from None
            # The one before may have removed the file between its being opened and being locked.
            if name.exists() and os.path.samestat(os.fstat(file.fileno()), name.stat()):
                break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            name.unlink(missing_ok=True)


class Store:
    """Rows by unit of work, and the file that keeps them.

    A unit's lines are written at once and flushed to the disk, so a crash can only leave the last
    unit torn. That tail is reported, its work counts as not done, and it is cut off before the
    next unit is written. Anything else that cannot be read is an error, and nothing is changed.
    `claim` keeps a second writer away.
    """

    def __init__(self, path: Path | None, tell: Callable[[str], None]) -> None:
        self.path = path
        self.blocks: dict[str, list[Row]] = {}
        self._end: int | None = None
        if path is None or not path.exists():
            return
        data = path.read_bytes()
        whole = 0
        for block, end in _blocks(path, data):
            self.blocks[block[0].unit] = block
            whole = end
        if whole < len(data):
            line = data[:whole].count(b"\n") + 1
            tell(
                f"{path} ends in the middle of a unit of work (line {line}); that unit does not "
                "count and is measured again when the sweep goes on."
            )
            self._end = whole

    def has(self, blank: Row, timed: bool) -> bool:
        """Whether a unit of work was done by the same version on the same numbers.

        Those that its tensors were fitted on count by name.

        Args:
            blank: A row of the unit, without what is measured.
            timed: Whether it must have times.
        """
        row = self.blocks.get(blank.unit, [blank])[0]
        if row is blank or row.status == "failed":
            return False
        same = all(
            getattr(row, name) == getattr(blank, name)
            for name in ("numattn_version", "digest", "calibrated_on")
        )
        oracle = row.is_oracle and row.budget is not None
        untimed = oracle or row.mode != "prefill" or row.status != "ok"  # whatever is asked for
        timed = timed and not untimed
        return same and not (timed and row.seconds is None)

    def add(self, block: list[Row]) -> None:
        """Keep a unit of work, on the disk before anything else happens.

        Raises:
            RowsError: The disk is full, or fails; the file ends where it did before.
        """
        if self.path is not None:
            lines = "".join(json.dumps(asdict(row)) + "\n" for row in block)
            self._append(self.path, lines.encode())
        self.blocks[block[0].unit] = block

    def _append(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            if self._end is not None:
                file.truncate(self._end)
                self._end = None
            before = os.fstat(file.fileno()).st_size
            try:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError as error:
                self._end = before
                with contextlib.suppress(OSError):  # then the torn end is cut off later
                    file.truncate(before)
                raise RowsError(
                    f"{path} cannot be written: {error.strerror}. The {len(self.blocks)} units "
                    "of work before this are safe; make room, and start the sweep again to go on."
                ) from error


def _blocks(path: Path, data: bytes) -> Iterator[tuple[list[Row], int]]:
    """Whole units of work and the byte each ends at; the last one may be torn and is left out."""
    block: list[Row] = []
    end = 0
    lines = data.split(b"\n")[:-1]  # what follows the last newline is torn
    for number, line in enumerate(lines, 1):
        end += len(line) + 1
        row = _parse(path, number, line)
        if block and row.unit != block[0].unit:
            raise RowsError(
                f"{path}, line {number}: the unit of work before it has {len(block)} of "
                f"{block[0].siblings} rows. The file was left as it is; restore or remove it."
            )
        block.append(row)
        if len(block) == row.siblings:
            yield block, end
            block = []


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        return Row(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise RowsError(
            f"{path}, line {number} is not a row of this version of numattn ({error}). "
            "The file was left as it is; restore or remove it."
        ) from error
