"""One unit of work of a sweep: a method at a budget on an input, with one seed -> its rows."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
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
from numattn.engines import resolve
from numattn.measure.bench import Bench, Decoder, fit
from numattn.measure.errors import Attend, HeadError, attend, head_errors
from numattn.measure.oracle import block_oracle, budget_overhead, efficiency, oracle
from numattn.measure.rows import Row
from numattn.measure.timing import LIMIT, compare

WEIGHTS_UP_TO = 2048  # longest input whose implied weights, N x N per head, are formed

MODES = ("prefill", "decode")


@dataclass(frozen=True)
class Unit:
    """A unit of work.

    Attributes:
        bench: The input, and the type in which the method runs.
        record: The method; its budget is set by `budget`.
        budget: None where the method has none.
        seed: Of the draw.
        mode: One of `MODES`.
        timing: Whether to take times.
    """

    bench: Bench
    record: Method
    budget: int | None
    seed: int
    mode: str
    timing: bool

    @cached_property
    def blank(self) -> Row:
        """The row without what is measured."""
        info, truth, x = self.record.info, self.bench.truth, self.bench.x
        options = self.record.options()
        if info.budget is not None:
            options[info.budget] = self.budget
        device = str(truth.device)
        return Row(
            method=info.name,
            family=info.family,
            options=json.loads(json.dumps(options)),
            budget=self.budget,
            budget_option=info.budget,
            is_oracle=info.oracle,
            approximates=info.approximates,
            fitted=self.record.fitted,
            random=info.random,
            calibrated_on=truth.sampled if self._is_calibrated else "",
            mode=self.mode,
            input=x.name,
            tag=x.tag,
            digest=truth.digest,
            length=x.length,
            is_causal=x.is_causal,
            heads=x.q.shape[0] * x.q.shape[1],
            seed=self.seed,
            dtype=str(self.bench.dtype).removeprefix("torch."),
            device=device,
            backend=resolve(),
            machine=machine(device),
            numattn_version=numattn.__version__,
            torch_version=torch.__version__,
            python_version=platform.python_version(),
        )

    def run(self) -> list[Row]:
        """The rows, one per head, or one that says why there are none."""
        try:
            return self._decode() if self.mode == "decode" else self._prefill()
        except Unsupported as error:
            return [replace(self.blank, status="unsupported", reason=str(error))]
        except Exception as error:  # a failing method must not end the sweep
            reason = f"{type(error).__name__}: {error}"
            return [replace(self.blank, status="failed", reason=reason)]

    @cached_property
    def _method(self) -> Method:
        return self.record if self.budget is None else self.record.with_budget(self.budget)

    @property
    def _is_calibrated(self) -> bool:
        """Whether the method takes tensors that are fitted beforehand."""
        info = self.record.info
        if self.mode == "decode":
            return type(self.record).fit is not Method.fit
        needed = self.bench.x.is_causal or self.bench.truth.always
        return info.needs == "calibration" or (self.record.fitted and needed)

    def _prefill(self) -> list[Row]:
        bench, truth, x, info = self.bench, self.bench.truth, self.bench.x, self.record.info
        units = self._method.cost(x.shape).units
        tensors = None
        if self._is_calibrated:
            tensors = fit(self._method, truth.sample or x, bench.dtype, self.seed)
        fn = attend(self._method, x, seed=self.seed, tensors=tensors)
        counted = _Counted(fn)
        errors = head_errors(
            counted,
            truth.reference,
            dtype=bench.dtype,
            linear_in_value=info.linear_in_value,
            with_weights=info.linear_in_value and x.length <= WEIGHTS_UP_TO,
            max_columns=WEIGHTS_UP_TO,
            with_pictures=True,
        )
        row = replace(
            self.blank,
            units=units,
            flops=counted.flops,
            exact_flops=bench.exact_flops,
            **self._times(lambda: fn(x.q, x.k, x.v)),
        )
        best = oracle(info.judge, units, truth.reference)
        blocks = block_oracle(units, truth.reference) if info.judge == "sparse" else None
        uniform = truth.uniform(units, self.seed)

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
                mean_baseline=truth.mean[i].output,
                uniform_baseline=uniform[i].output,
                overhead=self._overhead(error, units, bench.floor[i]),
                **beside("", best, i),
                **beside("block_", blocks, i),
            )
            for i, error in enumerate(errors)
        ]

    def _overhead(self, error: HeadError, units: int, floor: HeadError) -> float | None:
        """Against the oracle, where weights were measured."""
        if error.weights is None:
            return None
        family = self.record.info.judge
        return budget_overhead(error, family, units, self.bench.truth.reference, floor)

    def _decode(self) -> list[Row]:
        bench, truth, x, info = self.bench, self.bench.truth, self.bench.x, self.record.info
        if not x.is_causal:
            raise Unsupported(f"decode: {x.name} is not causal, so there is no next token.")
        if not info.decode:
            raise Unsupported(f"{info.name} cannot decode step by step.")
        tensors: dict[str, Tensor] = {}
        if info.state_tensors:
            sample = truth.sample or x.crop(truth.start)
            tensors = fit(self._method, sample, bench.dtype, self.seed)
        fn = Decoder(self._method, x, truth.start, tensors)
        errors = head_errors(fn, truth.tail, dtype=bench.dtype, with_weights=False)
        row = replace(
            self.blank,
            units=self._method.cost(x.shape).units,
            bytes_read=fn.bytes_read,
            exact_bytes_read=bench.exact_bytes,
        )
        return [
            replace(
                row,
                **_flat(error),
                floor=bench.tail_floor[i].output,
                mean_baseline=truth.tail_mean[i].output,
            )
            for i, error in enumerate(errors)
        ]

    def _times(self, call: Callable[[], Tensor]) -> dict[str, Any]:
        # Oracles are slow and not meant to be fast.
        if not self.timing or (self.record.info.oracle and self.record.info.budget):
            return {}
        t = compare(call, self.bench.exact, limit=LIMIT)
        return {
            "seconds": t.seconds,
            "exact_seconds": t.baseline_seconds,
            "cpu_seconds": t.cpu_seconds,
            "exact_cpu_seconds": t.baseline_cpu_seconds,
            "time_ratio": t.ratio,
        }


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
