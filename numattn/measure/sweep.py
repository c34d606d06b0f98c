"""Methods x budgets x inputs x seeds x types x devices x modes -> rows.

`sweep` writes `numattn.measure.rows` into a file that a stopped sweep goes on from.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar, cast

import torch

from numattn.core.cost import Shape
from numattn.core.inputs import Unsupported, one_of
from numattn.core.method import Method
from numattn.core.registry import get, methods
from numattn.exact import Exact
from numattn.measure.bench import Bench, Truth
from numattn.measure.inputs import QKV, load
from numattn.measure.ranks import Team
from numattn.measure.rows import Row, Store, claim
from numattn.measure.unit import MODES, WEIGHTS_UP_TO, Unit

T = TypeVar("T")

GRID = (16, 64, 256, 1024)  # default budgets; those up to half the length are used
DEAREST = 20  # times the operations of exact attention, beyond which a budget is none of them

ROUND = 10.0  # seconds after which processes that share the work exchange rows


@dataclass(frozen=True)
class Progress:
    """Where a sweep stands: `done` of `total` units of work, and what comes next.

    Attributes:
        done, total: Units of work; `total` leaves out those that were in the file already.
        input, method, budget: The unit that starts now; empty at the end.
        note: Something to tell the user; then the rest says nothing new.
    """

    done: int = 0
    total: int = 0
    input: str = ""
    method: str = ""
    budget: int | None = None
    note: str = ""


def select(wanted: str | Iterable[str | Method | type[Method]]) -> tuple[list[Method], list[str]]:
    """The methods to run, and the names that "all" leaves out because they need training.

    Raises:
        KeyError: No method has the name; the message suggests the nearest.
    """
    if wanted == "all":
        every = [(record, record.info) for record in methods()]
        ready = [record() for record, info in every if info.needs == "nothing"]
        return ready, [info.name for _, info in every if info.needs != "nothing"]
    several = [wanted] if isinstance(wanted, str) else wanted
    return [_record(m) for m in several], []


def _record(m: str | Method | type[Method]) -> Method:
    if isinstance(m, str):
        return get(m)
    return m if isinstance(m, Method) else m()


def grid(record: Method, shape: Shape) -> list[int]:
    """The default budgets of a method for calls of this shape.

    Those up to half the length, and of them, but for oracles, those at which the method needs no
    more than 20 times as many operations as exact attention; the smallest in any case.
    """
    budgets = [b for b in GRID if b <= shape.keys / 2] or [max(1, shape.keys // 4)]
    if record.info.oracle:
        return budgets
    most = DEAREST * Exact().cost(shape).flops
    return [b for b in budgets if b == budgets[0] or _flops(record, b, shape) <= most]


def _flops(record: Method, budget: int, shape: Shape) -> float:
    """Operations at a budget; 0 where the method does not say."""
    try:
        return record.with_budget(budget).cost(shape).flops
    except (Unsupported, ValueError):  # which the run will say
        return 0.0


def sweep(
    wanted: str | Iterable[str | Method | type[Method]] = "all",
    budgets: Sequence[int] | None = None,
    inputs: Iterable[QKV | str] = (),
    seeds: int = 1,
    *,
    out: Path | str | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    device: str | Sequence[str] = "cpu",
    mode: str | Sequence[str] = "prefill",
    calibrate: QKV | str | None = None,
    timing: bool = True,
    cache: Path | str | None = None,
    team: Team | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Row]:
    """Measure methods against exact attention.

    Random methods run once per seed, the others once; methods without a budget run once per
    input. What raises `Unsupported` gives one row that says so; any other exception is recorded
    as a failure and the sweep goes on.

    Args:
        wanted: "all" (the registered methods that need no training), or names, records, classes.
        budgets: The same for every method that has one; its own `grid` when None, but a record that
            is passed with its options runs with those.
        inputs: QKVs, or names and paths for `numattn.measure.inputs.load`.
        seeds: How many draws of a random method.
        out: File of rows, extended; work that it holds is not done again unless it failed, the
            input, what tensors are fitted on, or the version of numattn changed, or timings are
            wanted that it lacks. Only one sweep at a time may write to it.
        dtype: Type or types in which the methods run.
        device: Where they run; one or several.
        mode: ``"prefill"``, one call on all tokens; ``"decode"``, the last 64 tokens, or a quarter
            of a shorter input, one by one from a state that holds those before, with the error of
            their outputs and the bytes that the last step reads; or both. Only causal inputs are
            decoded, by methods that have a state.
        calibrate: What tensors are fitted on. ``"other"``, the same heads on another text where
            the bundle has it (`numattn.measure.calibration`), else the input; ``"itself"``, the
            input, which flatters; ``"half"``, the first half of each input, and all methods are
            measured on the second half as a sequence of its own; or an input with the same heads.
            None is ``"other"`` for tensors that a call cannot fit: those of causal calls of methods
            that are `fitted`, and where `Info.needs` is "calibration"; in other calls methods fit
            on what they attend to. Decoding with ``"itself"`` fits on the tokens before the steps.
        timing: Whether to take times, which makes up about a third of the work. Oracles with a
            budget and decoding are not timed.
        cache: Folder of references on disk, see `numattn.measure.references`; None keeps none.
        team: Processes that share the work, each calling `sweep` with the same arguments; see
            `numattn.measure.ranks`. They share the inputs, or parts of them where there are few;
            the leader writes, every few seconds. Times are disturbed by what the others do.
        progress: Called before each unit of work, at the end, and with notes, which are warnings
            otherwise; in the leader only.

    Returns:
        The rows asked for, in order of input, device, dtype, method, budget, mode, seed, head. Who
        does not lead a team gets none.

    Raises:
        KeyError: A method does not exist.
        InputError: An input does not exist or is not usable.
        RowsError: `out` holds a line that is not a row, and is left alone; another sweep writes to
            it; or it cannot be written.
        ValueError: There is no input, two have the same name, `seeds` is not positive, there is no
            such mode, or `calibrate` does not fit an input.
    """
    if seeds < 1:
        raise ValueError(f"sweep: seeds must be positive; got {seeds}.")
    modes = _several(mode, str)
    for name in modes:
        one_of("sweep", "mode", name, MODES)
    team = team or Team()
    tell = _teller(progress, team)

    def note(text: str) -> None:
        tell(Progress(note=text))

    wanted = wanted if isinstance(wanted, str) else list(wanted)
    records, left_out = select(wanted)
    if left_out:
        names = ", ".join(left_out)
        note(f"Left out, for they need training: {names}. Name them to run them.")
    given = {id(m) for m in wanted if isinstance(m, Method)} if wanted != "all" else set()
    found = [load(x) if isinstance(x, str) else x for x in inputs]
    devices = _several(device, str)
    places = [Truth(x, at, calibrate, cache, note) for x, at in product(found, devices)]
    _check_inputs([truth.stored for truth in places[:: len(devices)]])
    plan = {
        unit.blank.unit: unit
        for bench in (
            Bench(truth, kind) for truth in places for kind in _several(dtype, torch.dtype)
        )
        for record in records
        for budget in _budgets(record, budgets, bench.x.shape, id(record) in given)
        for name in modes
        for seed in range(seeds if record.info.random else 1)
        for unit in [Unit(bench, record, budget, seed, name, timing)]
    }
    with _opened(None if out is None else Path(out), team, note) as store:
        pending = team.from_leader(
            lambda: [key for key, unit in plan.items() if not store.has(unit.blank, timing)]
        )
        _work([plan[key] for key in pending], store, team, tell)
        return [row for key in plan for row in store.blocks[key]] if team.leads else []


def _work(
    pending: Sequence[Unit], store: Store, team: Team, tell: Callable[[Progress], None]
) -> None:
    """Do what is to be done. The leader keeps its own rows at once, and those of others by rounds.

    In a round every process works for some seconds; then all exchange what they have.
    """
    mine = deque(_shares(pending, team))
    bench: Bench | None = None
    done, busy = 0, True
    while busy:
        blocks: list[list[Row]] = []
        began = time.monotonic()
        while mine and (not blocks or time.monotonic() - began < ROUND):
            unit = mine.popleft()
            if bench is not None and bench is not unit.bench:
                bench.release(unit.bench.truth is not bench.truth)
            bench = unit.bench
            step = done + len(blocks) if team.leads else 0
            tell(Progress(step, len(pending), bench.x.name, unit.record.info.name, unit.budget))
            blocks.append(unit.run())
            if team.leads:
                store.add(blocks[-1])
        every = team.gather((blocks, bool(mine)))
        done += sum(len(theirs) for theirs, _ in every)
        busy = any(more for _, more in every)
        if team.leads:
            for theirs, _ in every[1:]:
                for rows in theirs:
                    store.add(rows)
    if bench is not None:
        bench.release(True)
    tell(Progress(len(pending), len(pending)))


def _shares(pending: Sequence[Unit], team: Team) -> list[Unit]:
    """What falls to this process: whole inputs, or parts of them where there are not enough.

    What is computed once for an input is then computed by few.
    """
    groups: dict[int, list[Unit]] = {}
    for unit in pending:
        groups.setdefault(id(unit.bench.truth), []).append(unit)
    parts = -(-team.size // max(len(groups), 1))
    pieces = [group[i::parts] for group in groups.values() for i in range(parts)]

    mine = {id(unit) for piece in team.share(pieces, _load) for unit in piece}
    return [unit for unit in pending if id(unit) in mine]


def _load(piece: Sequence[Unit]) -> float:
    """About what it takes: N^2 a head, and N / 1000 times as much again for its weights."""
    total = 0.0
    for unit in piece:
        length = unit.blank.length
        weights = length / 1000 if length <= WEIGHTS_UP_TO else 0.0
        total += unit.blank.heads * length**2 * (1 + weights)
    return total


@contextlib.contextmanager
def _opened(path: Path | None, team: Team, tell: Callable[[str], None]) -> Iterator[Store]:
    """The file of rows in the leader, claimed and read; nothing in the others."""
    store = Store(None, tell)
    with contextlib.ExitStack() as held:

        def open_it() -> None:
            nonlocal store
            if path is not None:
                held.enter_context(claim(path))
                store = Store(path, tell)

        team.from_leader(open_it)
        yield store


def _teller(progress: Callable[[Progress], None] | None, team: Team) -> Callable[[Progress], None]:
    if not team.leads:
        return lambda p: None
    return progress or (lambda p: warnings.warn(p.note, stacklevel=4) if p.note else None)


def _several(x: T | Sequence[T], kind: type[T]) -> list[T]:
    """One or several as a list, each once."""
    if isinstance(x, kind):
        return [x]
    return list(dict.fromkeys(cast("Sequence[T]", x)))  # a name is a sequence of names too


def _budgets(
    record: Method, wanted: Sequence[int] | None, shape: Shape, as_given: bool
) -> Sequence[int | None]:
    option = record.info.budget
    if option is None:
        return [None]
    if wanted is None and as_given:
        return [getattr(record, option)]
    return wanted if wanted is not None else grid(record, shape)


def _check_inputs(inputs: Sequence[QKV]) -> None:
    if not inputs:
        raise ValueError("sweep: there is no input to measure on.")
    names = [(x.name, x.length) for x in inputs]
    for name, length in names:
        if names.count((name, length)) > 1:
            raise ValueError(f"two inputs are named {name!r}; rows could not tell them apart.")
