"""Methods x budgets x inputs x seeds -> rows, in a file that a stopped sweep goes on from.

`sweep` runs the methods and writes `numattn.measure.rows`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import numattn
from numattn.core.cost import count_flops
from numattn.core.inputs import Unsupported
from numattn.core.method import Method
from numattn.core.registry import get, methods
from numattn.engines import resolve
from numattn.exact import Exact
from numattn.measure.baselines import mean_of_values, uniform_keys
from numattn.measure.errors import (
    Attend,
    HeadError,
    Reference,
    attend,
    head_errors,
    noise_floor,
    reference,
)
from numattn.measure.inputs import QKV, load
from numattn.measure.oracle import block_oracle, efficiency, oracle
from numattn.measure.rows import Row, Store
from numattn.measure.timing import LIMIT, compare

GRID = (16, 64, 256, 1024)  # default budgets; those up to half the length are used

WEIGHTS_UP_TO = 2048  # longest input whose implied weights, N x N per head, are formed


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


def grid(length: int) -> list[int]:
    """The default budgets for an input of this length."""
    return [b for b in GRID if b <= length / 2] or [max(1, length // 4)]


def sweep(
    wanted: str | Iterable[str | Method | type[Method]] = "all",
    budgets: Sequence[int] | None = None,
    inputs: Iterable[QKV | str] = (),
    seeds: int = 1,
    *,
    out: Path | str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    timing: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> list[Row]:
    """Measure methods against exact attention.

    Random methods run once per seed, the others once; methods without a budget run once per
    input. What raises `Unsupported` gives one row that says so; any other exception is recorded
    as a failure and the sweep goes on.

    Args:
        wanted: "all" (the registered methods that need no training), or names, records, classes.
        budgets: The same for every method that has one; `grid` of the input's length when None,
            but a record that is passed with its options runs with those.
        inputs: QKVs, or names and paths for `numattn.measure.inputs.load`.
        seeds: How many draws of a random method.
        out: File of rows, extended; work that it holds is not done again unless it failed, the
            input or the version of numattn changed, or timings are wanted that it lacks.
        dtype: Type in which the methods run.
        device: Where they run.
        timing: Whether to take times, which makes up about a third of the work. Oracles with a
            budget are not timed.
        progress: Called before each unit of work, at the end, and with notes, which are warnings
            otherwise.

    Returns:
        The rows asked for, in order of input, method, budget, seed, head.

    Raises:
        KeyError: A method does not exist.
        InputError: An input does not exist or is not usable.
        RowsError: `out` holds a line that is not a row; the file is left alone.
        ValueError: There is no input, two have the same name, or `seeds` is not positive.
    """
    if seeds < 1:
        raise ValueError(f"sweep: seeds must be positive; got {seeds}.")
    tell = progress or (lambda p: warnings.warn(p.note, stacklevel=3) if p.note else None)
    wanted = wanted if isinstance(wanted, str) else list(wanted)
    records, left_out = select(wanted)
    if left_out:
        names = ", ".join(left_out)
        tell(Progress(note=f"Left out, for they need training: {names}. Name them to run them."))
    given = {id(m) for m in wanted if isinstance(m, Method)} if wanted != "all" else set()
    store = Store(None if out is None else Path(out), lambda note: tell(Progress(note=note)))
    benches = [_Bench(load(x) if isinstance(x, str) else x, dtype, device, timing) for x in inputs]
    _check_inputs(benches)
    units = [
        _Unit(bench, record, budget, seed)
        for bench in benches
        for record in records
        for budget in _budgets(record, budgets, bench.x.length, id(record) in given)
        for seed in range(seeds if record.info.random else 1)
    ]
    plan = {unit.blank.unit: unit for unit in units}
    pending = [unit for unit in plan.values() if not store.has(unit.blank, timing)]
    for done, unit in enumerate(pending):
        name = unit.bench.x.name
        tell(Progress(done, len(pending), name, unit.method.info.name, unit.budget))
        store.add(unit.run())
        if done + 1 == len(pending) or pending[done + 1].bench is not unit.bench:
            unit.bench.release()
    tell(Progress(len(pending), len(pending)))
    return [row for key in plan for row in store.blocks[key]]


def machine(device: str) -> str:
    """The processor and the threads torch uses, or the GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def _budgets(
    record: Method, wanted: Sequence[int] | None, length: int, as_given: bool
) -> Sequence[int | None]:
    option = record.info.budget
    if option is None:
        return [None]
    if wanted is None and as_given:
        return [getattr(record, option)]
    return wanted if wanted is not None else grid(length)


def _check_inputs(benches: list[_Bench]) -> None:
    if not benches:
        raise ValueError("sweep: there is no input to measure on.")
    names = [(bench.x.name, bench.x.length) for bench in benches]
    for name, length in names:
        if names.count((name, length)) > 1:
            raise ValueError(f"two inputs are named {name!r}; rows could not tell them apart.")


class _Bench:
    """One input, and what every method on it is held against; each part is computed once."""

    def __init__(self, x: QKV, dtype: torch.dtype, device: str, timing: bool) -> None:
        self.stored = x.to(device=device)
        self.x = self.stored.to(dtype)
        self.dtype = dtype
        self.device = device
        self.timing = timing
        self._uniform: dict[tuple[int, int], list[HeadError]] = {}

    @cached_property
    def digest(self) -> str:
        x = self.stored
        total = hashlib.sha256(repr((x.is_causal, x.scale)).encode())
        for tensor in (x.q, x.k, x.v):
            total.update(repr(tuple(tensor.shape)).encode())
            total.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()[:12]

    @cached_property
    def reference(self) -> Reference:
        return reference(self.stored)

    @cached_property
    def floor(self) -> list[HeadError]:
        return noise_floor(self.reference, self.dtype)

    @cached_property
    def mean(self) -> list[HeadError]:
        return mean_of_values(self.reference)

    @cached_property
    def exact(self) -> Callable[[], Tensor]:
        fn = attend(Exact(), self.x)
        return lambda: fn(self.x.q, self.x.k, self.x.v)

    @cached_property
    def exact_flops(self) -> int:
        return count_flops(self.exact)

    def uniform(self, units: int, seed: int) -> list[HeadError]:
        if (units, seed) not in self._uniform:
            self._uniform[units, seed] = uniform_keys(self.reference, units, seed)
        return self._uniform[units, seed]

    def release(self) -> None:
        """Forget what was computed, which may be large."""
        for name in ("reference", "floor", "mean", "exact", "exact_flops"):
            self.__dict__.pop(name, None)
        self._uniform.clear()


@dataclass(frozen=True)
class _Unit:
    """One unit of work: a method at a budget on an input, with one seed."""

    bench: _Bench
    method: Method
    budget: int | None
    seed: int

    @cached_property
    def blank(self) -> Row:
        """The row without what is measured."""
        info, bench, x = self.method.info, self.bench, self.bench.x
        options = self.method.options()
        if info.budget is not None:
            options[info.budget] = self.budget
        return Row(
            method=info.name,
            family=info.family,
            options=json.loads(json.dumps(options)),
            budget=self.budget,
            budget_option=info.budget,
            is_oracle=info.oracle,
            approximates=info.approximates,
            fitted=self.method.fitted,
            random=info.random,
            input=x.name,
            tag=x.tag,
            digest=bench.digest,
            length=x.length,
            is_causal=x.is_causal,
            heads=x.q.shape[0] * x.q.shape[1],
            seed=self.seed,
            dtype=str(bench.dtype).removeprefix("torch."),
            device=bench.device,
            backend=resolve(),
            machine=machine(bench.device),
            numattn_version=numattn.__version__,
            torch_version=torch.__version__,
            python_version=platform.python_version(),
        )

    def run(self) -> list[Row]:
        """The rows, one per head, or one that says why there are none."""
        try:
            return self._measure()
        except Unsupported as error:
            return [replace(self.blank, status="unsupported", reason=str(error))]
        except Exception as error:  # a failing method must not end the sweep
            reason = f"{type(error).__name__}: {error}"
            return [replace(self.blank, status="failed", reason=reason)]

    def _measure(self) -> list[Row]:
        bench, x, info = self.bench, self.bench.x, self.method.info
        method = self.method if self.budget is None else self.method.with_budget(self.budget)
        units = method.cost(x.shape).units
        fn = attend(method, x, seed=self.seed)
        counted = _Counted(fn)
        errors = head_errors(
            counted,
            bench.reference,
            dtype=bench.dtype,
            linear_in_value=info.linear_in_value,
            with_weights=info.linear_in_value and x.length <= WEIGHTS_UP_TO,
            max_columns=WEIGHTS_UP_TO,
        )
        row = replace(
            self.blank,
            units=units,
            flops=counted.flops,
            exact_flops=bench.exact_flops,
            **self._times(lambda: fn(x.q, x.k, x.v)),
        )
        best = oracle(info.judge, units, bench.reference)
        blocks = block_oracle(units, bench.reference) if info.judge == "sparse" else None
        uniform = bench.uniform(units, self.seed)

        def beside(name: str, bound: list[HeadError] | None, i: int) -> dict[str, Any]:
            """Error of an oracle on head i, and the method's efficiency against it."""
            if bound is None:
                return {}
            share = efficiency(errors[i], bound[i], info.judge, bench.floor[i])
            return {f"{name}oracle_error": bound[i].output, f"{name}efficiency": share}

        return [
            replace(
                row,
                **_flat(error),
                floor=bench.floor[i].output,
                mean_baseline=bench.mean[i].output,
                uniform_baseline=uniform[i].output,
                **beside("", best, i),
                **beside("block_", blocks, i),
            )
            for i, error in enumerate(errors)
        ]

    def _times(self, call: Callable[[], Tensor]) -> dict[str, Any]:
        # Oracles are slow and not meant to be fast.
        if not self.bench.timing or (self.method.info.oracle and self.method.info.budget):
            return {}
        t = compare(call, self.bench.exact, limit=LIMIT)
        return {
            "seconds": t.seconds,
            "exact_seconds": t.baseline_seconds,
            "cpu_seconds": t.cpu_seconds,
            "exact_cpu_seconds": t.baseline_cpu_seconds,
            "time_ratio": t.ratio,
        }


class _Counted:
    """Attends, and counts the operations of the first call, the one on the values themselves."""

    def __init__(self, fn: Attend) -> None:
        self.fn = fn
        self.flops: int | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.flops is not None:
            return self.fn(query, key, value)
        out: list[Tensor] = []
        self.flops = count_flops(lambda: out.append(self.fn(query, key, value)))
        return out[0]


def _flat(error: HeadError) -> dict[str, Any]:
    """The numbers of a HeadError under the names of `Row`."""
    flat: dict[str, Any] = {}
    for name, value in asdict(error).items():
        if isinstance(value, dict):
            flat |= {f"{name}_{key}": number for key, number in value.items()}
        elif name != "tv":
            flat[name] = value
    return flat
