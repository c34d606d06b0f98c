"""Time of a decoding step of latent attention against the bytes that it reads, in three forms.

    python benchmarks/decode_latent.py [--smoke] [--rank R ...] [--length N ...] [FORM ...]

One layer of multi-head latent attention, a token after N others, in float32:

naive     keys and values of all heads are kept, H (d_n + d_r + d_v) numbers a token
absorbed  latents are kept, d_c + d_r numbers a token, and heads attend to them
expanded  latents are kept, and keys and values are formed from all of them in every step

The forms give the same output, which is checked before they are timed. Each runs in turn with the
naive one (A B A B ...); medians of wall times and of their ratios, that of the naive form against
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
from numattn.core.layer import Cache, heads, joined, positions
from numattn.engines.softmax import grouped_attention
from numattn.latent.mla import MultiheadLatentAttention
from numattn.measure.timing import compare

FORMS = ("naive", "absorbed", "expanded")


class Naive(MultiheadLatentAttention):
    """The same layer, that keeps keys and values of all heads."""

    def state(self, batch: int = 1) -> Cache:
        """A state without tokens: ``key`` (B, H, 0, d_n + d_r) and ``value`` (B, H, 0, d_v)."""
        key = torch.empty(batch, self.num_heads, 0, self.head_dim + self.rope_dim)
        return Cache(key=key, value=torch.empty(*key.shape[:3], self.value_dim))

    def keys_and_values(self, entry: Tensor) -> dict[str, Tensor]:
        """Keys and values of all heads from latents and rotated keys, (B, 1, N, d_c + d_r)."""
        latent, rope = entry.split([self.kv_rank, self.rope_dim], 3)
        both = heads(self.kv_b_proj(latent[:, 0]), self.num_heads)
        key, value = both.split([self.head_dim, self.value_dim], 3)
        return {"key": torch.cat([key, rope.expand(-1, self.num_heads, -1, -1)], 3), "value": value}

    def forward(self, hidden: Tensor, *, state: Cache) -> Tensor:  # type: ignore[override]
        """Attend from the tokens to those of the state and to themselves."""
        position = positions(hidden, None, state.length)
        state.append(**self.keys_and_values(self._entry(hidden, position)))
        query = torch.cat(self._queries(hidden, position), 3)
        out = grouped_attention(query, state["key"], state["value"], scale=self.scale)
        return self.o_proj(joined(out))


def steps(rank: int, length: int) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """A decoding step of every form, and the bytes that the form keeps before it."""
    shape: dict[str, Any] = {"kv_rank": rank, "head_dim": 64, "rope_dim": 32, "value_dim": 64}
    layer = MultiheadLatentAttention(512, 16, **shape)
    naive = Naive(512, 16, **shape)
    naive.load_state_dict(layer.state_dict())
    past = torch.randn(1, 1, length, rank + shape["rope_dim"])
    x = torch.randn(1, 1, 512)
    states = {"naive": naive.state(), "absorbed": layer.state(), "expanded": layer.state()}
    for form, state in states.items():
        state.append(**(naive.keys_and_values(past) if form == "naive" else {"latent": past}))
    calls = {
        "naive": lambda: naive(x, state=states["naive"]),
        "absorbed": lambda: layer(x, state=states["absorbed"], absorbed=True),
        "expanded": lambda: layer(x, state=states["expanded"], absorbed=False),
    }
    return {form: (calls[form], states[form].nbytes) for form in FORMS}


Steps = Callable[[int, int], dict[str, tuple[Callable[[], Tensor], int]]]


@torch.no_grad()
def measure(
    steps: Steps, rank: int, length: int, forms: list[str], repeats: int
) -> list[dict[str, Any]]:
    """A row for each form at one width or rank and one length; printed as it is taken."""
    able = steps(rank, length)
    first = next(iter(able))
    outs = {form: call() for form, (call, _) in able.items()}
    for out in outs.values():
        torch.testing.assert_close(out, outs[first], rtol=1e-3, atol=1e-4)
    rows = []
    for form in forms:
        call, kept = able[form]
        timing = compare(call, able[first][0], repeats, limit=math.inf)
        ms, share = 1e3 * timing.seconds, kept / able[first][1]
        row = {"form": form, "rank": rank, "length": length, "kept": kept, "ms": ms}
        rows.append({**row, "ratio": timing.ratio, "bytes_ratio": share})
        print(
            f"{form:10}{rank:6}{length:8}{kept // (4 * length):9}{kept / 1e6:9.2f}{ms:9.3f}"
            f"{timing.ratio:10.3f}{share:10.3f}",
            flush=True,
        )
    return rows


def print_growth(rows: list[dict[str, Any]], letter: str) -> None:
    """Nanoseconds and bytes that one more token in the cache adds, of every form and width."""
    print(f"a token more:{letter:>3}{'bytes':>8}{'ns':>9}{'bytes/ns':>10}")
    for form, rank in dict.fromkeys((row["form"], row["rank"]) for row in rows):
        own = [row for row in rows if (row["form"], row["rank"]) == (form, rank)]
        tokens = own[-1]["length"] - own[0]["length"]
        ns = 1e6 * (own[-1]["ms"] - own[0]["ms"]) / tokens
        size = (own[-1]["kept"] - own[0]["kept"]) / tokens
        print(f"{form:10}{rank:6}{size:8.0f}{ns:9.1f}{size / ns:10.2f}")


def race(about: str, steps: Steps, known: tuple[str, ...], letter: str, ranks: list[int]) -> None:
    """The command line: forms, the first of which the others are compared with.

    `letter` is what the width or rank is called, `ranks` are its defaults.
    """
    parser = argparse.ArgumentParser(description=about.split("\n\n")[0])
    parser.add_argument("forms", nargs="*", metavar="FORM", help="default: all")
    parser.add_argument("--rank", type=int, nargs="+", default=ranks, help=letter)
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="two short lengths, one repeat")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    forms = args.forms or list(known)
    if not set(forms) <= set(known):
        parser.error(f"a FORM is one of {', '.join(known)}; got {', '.join(forms)}.")
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.smoke:
        args.rank, args.length, args.repeats = [min(ranks)], [64, 128], 1
    machine = {
        "numattn": numattn.__version__,
        "torch": torch.__version__,
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
    }
    print(" ".join(f"{k} {v}" for k, v in machine.items()))
    head = f"{'':10}{letter:>6}{'tokens':>8}{'numbers':>9}{'kept MB':>9}{'ms':>9}"
    print(f"{head}{'of ' + known[0]:>10}{'bytes':>10}")
    rows: list[dict[str, Any]] = []
    for rank, length in itertools.product(args.rank, sorted(set(args.length))):
        rows += measure(steps, rank, length, forms, args.repeats)
    if len(set(args.length)) > 1:
        print_growth(rows, letter)
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps({**machine, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    race(__doc__, steps, FORMS, "d_c", [128, 512])
