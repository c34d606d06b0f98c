"""Time of a decoding step of tensor product attention against the bytes it reads, in three forms.

    python benchmarks/decode_tensor.py [--smoke] [--rank R ...] [--length N ...] [FORM ...]

One layer of tensor product attention, a token after N others, in float32:

dense     keys and values of all heads are kept, H (D + E) numbers a token
factored  factors are kept, R (2 H + D + E) numbers a token, and heads attend to them
formed    factors are kept, and keys and values are formed from all of them in every step

The forms give the same output, which is checked before they are timed. Each runs in turn with the
dense one (A B A B ...); medians of wall times and of their ratios, that of the dense form against
itself being the noise, beside the ratio of the bytes that are kept. The last lines say by how much
the time grows with a token in the cache, from the shortest to the longest. What is kept is drawn at
random, not made by a model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import commit, keep_freed_memory
from torch import Tensor

import numattn
from numattn.core.layer import Cache, joined, positions
from numattn.engines.latent import Factors
from numattn.engines.softmax import grouped_attention
from numattn.measure.timing import compare
from numattn.tensor.tpa import TensorProductAttention

FORMS = ("dense", "factored", "formed")


class Dense(TensorProductAttention):
    """The same layer, that keeps keys and values of all heads."""

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens: ``key`` (B, H, 0, D) and ``value`` (B, H, 0, E)."""
        key = torch.empty(batch, self.num_heads, 0, self.head_dim)
        return Cache(key=key, value=torch.empty(*key.shape[:3], self.value_dim))

    def forward(self, hidden: Tensor, *, state: Cache) -> Tensor:  # type: ignore[override]
        """Attend from the tokens to those of the state and to themselves."""
        position = positions(hidden, None, state.length)[:, None]
        k = self._turned(self.k_proj(hidden), position)
        state.append(key=k.expand(), value=self.v_proj(hidden).expand())
        query = self._queries(hidden, position).expand()
        out = grouped_attention(query, state["key"], state["value"], scale=self.scale)
        return self.o_proj(joined(out))


def steps(rank: int, length: int) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """A decoding step of every form, and the bytes that the form keeps before it."""
    shape: dict[str, Any] = {"head_dim": 64, "key_rank": rank, "value_rank": rank}
    layer, dense = TensorProductAttention(512, 16, **shape), Dense(512, 16, **shape)
    dense.load_state_dict(layer.state_dict())
    a_k, b_k, a_v, b_v = (torch.randn(1, rank, length, width) for width in (16, 64, 16, 64))
    names = ("key_heads", "key_features", "value_heads", "value_features")
    x = torch.randn(1, 1, 512)
    states = {"dense": dense.state(), "factored": layer.state(), "formed": layer.state()}
    states["dense"].append(key=Factors(a_k, b_k).expand(), value=Factors(a_v, b_v).expand())
    for form in ("factored", "formed"):
        states[form].append(**dict(zip(names, (a_k, b_k, a_v, b_v), strict=True)))
    calls = {
        "dense": lambda: dense(x, state=states["dense"]),
        "factored": lambda: layer(x, state=states["factored"], factored=True),
        "formed": lambda: layer(x, state=states["formed"], factored=False),
    }
    return {form: (calls[form], states[form].nbytes) for form in FORMS}


@torch.no_grad()
def measure(rank: int, length: int, forms: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each form at one rank and one length; printed as it is taken."""
    able = steps(rank, length)
    outs = {form: call() for form, (call, _) in able.items()}
    for out in outs.values():
        torch.testing.assert_close(out, outs["dense"], rtol=1e-3, atol=1e-4)
    rows = []
    for form in forms:
        call, kept = able[form]
        timing = compare(call, able["dense"][0], repeats, limit=math.inf)
        ms, share = 1e3 * timing.seconds, kept / able["dense"][1]
        row = {"form": form, "rank": rank, "length": length, "kept": kept, "ms": ms}
        rows.append({**row, "ratio": timing.ratio, "bytes_ratio": share})
        print(
            f"{form:10}{rank:6}{length:8}{kept // (4 * length):9}{kept / 1e6:9.2f}{ms:9.3f}"
            f"{timing.ratio:10.3f}{share:10.3f}",
            flush=True,
        )
    return rows


def print_growth(rows: list[dict[str, Any]]) -> None:
    """Nanoseconds and bytes that one more token in the cache adds, of every form and rank."""
    print(f"a token more:{'R':>3}{'bytes':>8}{'ns':>9}{'bytes/ns':>10}")
    for form, rank in dict.fromkeys((row["form"], row["rank"]) for row in rows):
        own = [row for row in rows if (row["form"], row["rank"]) == (form, rank)]
        tokens = own[-1]["length"] - own[0]["length"]
        ns = 1e6 * (own[-1]["ms"] - own[0]["ms"]) / tokens
        size = (own[-1]["kept"] - own[0]["kept"]) / tokens
        print(f"{form:10}{rank:6}{size:8.0f}{ns:9.1f}{size / ns:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("forms", nargs="*", metavar="FORM", help="default: all three")
    parser.add_argument("--rank", type=int, nargs="+", default=[1, 2], help="R of keys and values")
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="two short lengths, one repeat")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    forms = args.forms or list(FORMS)
    if not set(forms) <= set(FORMS):
        parser.error(f"a FORM is one of {', '.join(FORMS)}; got {', '.join(forms)}.")
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.smoke:
        args.rank, args.length, args.repeats = [2], [64, 128], 1
    about = {
        "numattn": numattn.__version__,
        "torch": torch.__version__,
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
    }
    print(" ".join(f"{k} {v}" for k, v in about.items()))
    head = f"{'':10}{'R':>6}{'tokens':>8}{'numbers':>9}{'kept MB':>9}{'ms':>9}{'of dense':>10}"
    print(f"{head}{'bytes':>10}")
    rows: list[dict[str, Any]] = []
    for rank, length in itertools.product(args.rank, sorted(set(args.length))):
        rows += measure(rank, length, forms, args.repeats)
    if len(set(args.length)) > 1:
        print_growth(rows)
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps({**about, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
