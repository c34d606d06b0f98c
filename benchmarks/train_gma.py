"""Small models with GMA, softmax, linear and performer attention, trained alike.

    python benchmarks/train_gma.py [--text FILE] [--jobs 2] [--seeds N] [METHOD ...]
    python benchmarks/train_gma.py --report [--text FILE]
    python benchmarks/train_gma.py --smoke [METHOD ...]

A METHOD is gma, softmax, linear or performer; by default all. Two tasks, each from scratch:

- listops: nested MIN, MAX, MED and SM (sum modulo 10) of digits, 256 to 512 tokens, to be
  classified by value. The class is read off the first token, the outermost operator. Made here,
  every batch anew; the held-out expressions are the same for all.
- text: the next character of the text FILE, causal; its last twentieth is held out. Without --text
  only listops runs.

Models differ in the attention between the same projections and in nothing else: for one seed the
common weights start alike and the batches are the same. A mixture starts at the tokens of the
first batch, fitted by EM, with the root of the head's width as its temperature, which is learned.
Every run has one thread; --jobs of them run side by side.

A finished run is one JSON line in --out, and is not run again while its settings are the same; a
run that was stopped starts anew. The table is made from the lines. --smoke first checks that the
loss starts at that of a uniform guess, that no causal model sees later tokens, and that each
overfits a few examples; then it goes through all the rest in small, with this script as the text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from speed import commit
from torch import Tensor, nn
from torch.nn import functional as F

import numattn
from numattn.core.layer import heads, joined
from numattn.kernel.performer import PerformerAttention
from numattn.latent.gma import GMAAttention, responsibilities
from numattn.latent.routing import (
    component_usage,
    dead_components,
    soft_normalized_mutual_information,
    usage_entropy,
)

RESULTS = Path(__file__).parent / "results" / "train_gma.jsonl"
METHODS = ("softmax", "linear", "performer", "gma")


@dataclass(frozen=True)
class Settings:
    """What all runs of a task share; `units` are the components of GMA and features of Performer.

    `length` is that of the longest sequence, `held_out` the number of sequences to be judged by,
    `text` the hash of the text.
    """

    task: str
    steps: int
    batch: int
    length: int
    held_out: int
    width: int = 128
    num_heads: int = 4
    num_layers: int = 2
    units: int = 64
    rate: float = 2e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    text: str | None = None


FULL = {
    "listops": Settings("listops", steps=600, batch=16, length=512, held_out=2000),
    "text": Settings("text", steps=1000, batch=16, length=256, held_out=300),
}


class Batch(NamedTuple):
    """Sequences of tokens.

    Attributes:
        tokens: int (B, N).
        target: int (B,), the class of each, or (B, N), the token after each.
        exists: bool (B, N), False at padding; None where there is none.
    """

    tokens: Tensor
    target: Tensor
    exists: Tensor | None = None


OPERATORS = ("MIN", "MAX", "MED", "SM")
DIGIT, CLOSE, PAD = 4, 14, 15  # operators come first, each with its opening bracket


class ListOps:
    """Expressions such as "[MAX 4 [MIN 2 9 ] 7 ]" and their values."""

    is_causal = False
    num_tokens, num_classes = 16, 10
    categories = ("operator", "digit", "bracket")
    measure = "accuracy"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def batches(self, seed: int) -> Iterator[Batch]:
        """Batches without end."""
        rng = random.Random(seed)
        while True:
            yield self._batch(self.settings.batch, rng)

    def held_out(self) -> Iterator[Batch]:
        """Batches of expressions that are the same for every run."""
        rng = random.Random("held out")
        for done in range(0, self.settings.held_out, self.settings.batch):
            yield self._batch(min(self.settings.batch, self.settings.held_out - done), rng)

    def _batch(self, size: int, rng: random.Random) -> Batch:
        longest = self.settings.length
        made = [expression(rng.randint(longest // 2, longest), rng) for _ in range(size)]
        width = max(len(tokens) for tokens, _ in made)
        rows = [tokens + [PAD] * (width - len(tokens)) for tokens, _ in made]
        tokens = torch.tensor(rows)
        return Batch(tokens, torch.tensor([value for _, value in made]), tokens != PAD)

    def category(self, tokens: Tensor) -> Tensor:
        """Index into `categories` of every token."""
        return (tokens >= DIGIT).long() + (tokens >= CLOSE)

    @staticmethod
    def score(loss: float, accuracy: float) -> float:
        """What is reported, from the mean loss in nats and the share of right answers."""
        return accuracy

    def baselines(self) -> dict[str, float]:
        """Accuracy of the best guess of all, and of the best for the outermost operator."""
        counts = torch.zeros(len(OPERATORS), self.num_classes)
        for batch in self.held_out():
            for first, value in zip(batch.tokens[:, 0], batch.target, strict=True):
                counts[first, value] += 1
        total = counts.sum()
        return {
            "the commonest value": float(counts.sum(0).max() / total),
            "the commonest value under the outermost operator": float(counts.amax(1).sum() / total),
        }


def expression(size: int, rng: random.Random, depth: int = 3) -> tuple[list[int], int]:
    """An expression of exactly `size` tokens, at least 3, and its value.

    Its digits come from one random range of five, so that not every long list has the same
    maximum. Among them stand up to three expressions of a depth less by one, each of 3 tokens up to
    a quarter of the size.
    """
    operator = rng.randrange(len(OPERATORS))
    low, left = rng.randint(0, 5), size - 2
    parts = []
    if depth > 1 and size >= 12:
        for _ in range(rng.randint(0, 3)):
            parts.append(expression(rng.randint(3, size // 4), rng, depth - 1))
            left -= len(parts[-1][0])
    digits = [rng.randint(low, low + 4) for _ in range(left)]
    parts += [([DIGIT + digit], digit) for digit in digits]
    rng.shuffle(parts)
    tokens = [token for part, _ in parts for token in part]
    return [operator, *tokens, CLOSE], apply(OPERATORS[operator], [value for _, value in parts])


def apply(operator: str, values: Sequence[int]) -> int:
    """The value of an operator; of two middle values MED takes the mean, rounded down."""
    if operator == "SM":
        return sum(values) % 10
    order = sorted(values)
    if operator == "MED":
        return (order[(len(order) - 1) // 2] + order[len(order) // 2]) // 2
    return order[0] if operator == "MIN" else order[-1]


class Text:
    """Characters of a text, each to be predicted from those before it."""

    is_causal = True
    categories = ("letter", "digit", "space", "punctuation")
    measure = "bits per character"

    def __init__(self, settings: Settings, text: str) -> None:
        self.settings = settings
        alphabet = sorted(set(text))
        index = {c: i for i, c in enumerate(alphabet)}
        tokens = torch.tensor([index[c] for c in text])
        cut = len(tokens) * 19 // 20
        self.train, self.rest = tokens[:cut], tokens[cut:]
        kinds = [
            0 if c.isalpha() else 1 if c.isdigit() else 2 if c.isspace() else 3 for c in alphabet
        ]
        self.kinds = torch.tensor(kinds)
        self.num_tokens = self.num_classes = len(alphabet)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Batches without end."""
        rng = random.Random(seed)
        last = len(self.train) - self.settings.length - 1
        while True:
            starts = [rng.randint(0, last) for _ in range(self.settings.batch)]
            yield self._batch(self.train, starts)

    def held_out(self) -> Iterator[Batch]:
        """Batches of pieces that follow each other, the same for every run."""
        size, length = self.settings.batch, self.settings.length
        starts = range(0, len(self.rest) - length, length)[: self.settings.held_out]
        for done in range(0, len(starts), size):
            yield self._batch(self.rest, starts[done : done + size])

    def _batch(self, source: Tensor, starts: Sequence[int]) -> Batch:
        rows = torch.stack([source[s : s + self.settings.length + 1] for s in starts])
        return Batch(rows[:, :-1], rows[:, 1:])

    def category(self, tokens: Tensor) -> Tensor:
        """Index into `categories` of every token."""
        return self.kinds[tokens]

    @staticmethod
    def score(loss: float, accuracy: float) -> float:
        """What is reported, from the mean loss in nats and the share of right answers."""
        return loss / math.log(2)

    def baselines(self) -> dict[str, float]:
        """Bits per character from the frequencies of characters, and of pairs of them."""
        n = self.num_tokens
        pairs = torch.bincount(self.train[:-1] * n + self.train[1:], minlength=n * n)
        pairs = pairs.reshape(n, n).double()
        single = (pairs.sum(0) + 1) / (pairs.sum() + n)
        after = (pairs + n * single) / (pairs.sum(1, keepdim=True) + n)  # one count for each token
        bits: list[tuple[Tensor, Tensor]] = []
        for batch in self.held_out():
            pair = after[batch.tokens, batch.target]
            bits.append((-single[batch.target].log2().flatten(), -pair.log2().flatten()))
        one, two = (float(torch.cat(found).mean()) for found in zip(*bits, strict=True))
        return {"frequencies of characters": one, "frequencies of pairs": two}


Task = ListOps | Text


class Heads(nn.Module):
    """Attention by any method of the library, between the projections of a transformer."""

    def __init__(self, width: int, num_heads: int, method: numattn.Method | nn.Module) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.method = method

    def forward(self, x: Tensor, exists: Tensor | None, is_causal: bool) -> Tensor:
        """Attend among (B, N, width)."""
        q, k, v = (heads(t, self.num_heads) for t in self.project(x).chunk(3, -1))
        mask = None if exists is None else exists[:, None, None]
        return self.out(joined(self.method(q, k, v, attn_mask=mask, is_causal=is_causal)))


class Block(nn.Module):
    """A layer of a transformer, normalised before each of its halves."""

    def __init__(self, width: int, attention: Heads) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, exists: Tensor | None, is_causal: bool) -> Tensor:
        """Transform (B, N, width)."""
        x = x + self.attention(self.norms[0](x), exists, is_causal)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A transformer with learned positions; it classifies a sequence by its first token."""

    def __init__(self, task: Task, method: str, seed: int) -> None:
        super().__init__()
        s = task.settings
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(seed)  # the method takes nothing from the common draw
        self.is_causal = task.is_causal
        self.tokens = nn.Embedding(task.num_tokens, s.width)
        self.positions = nn.Embedding(s.length, s.width)
        self.blocks = nn.ModuleList(
            Block(s.width, Heads(s.width, s.num_heads, attention(method, s, own)))
            for _ in range(s.num_layers)
        )
        self.norm = nn.LayerNorm(s.width)
        self.head = nn.Linear(s.width, task.num_classes)
        self.apply(initialise)
        nn.init.normal_(self.head.weight, std=0.02)  # the first guess is nearly uniform

    def forward(self, tokens: Tensor, exists: Tensor | None = None) -> Tensor:
        """Logits (B, N, classes), or (B, classes) where each sequence has one class."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, exists, self.is_causal)
        x = self.norm(x)
        return self.head(x if self.is_causal else x[:, 0])


def initialise(module: nn.Module) -> None:
    """Projections and embeddings small, no biases.

    The tokens then outweigh what the layers add to them at first, so that the second layer's tokens
    do not leave the mixture that was fitted to them as soon as the first layer learns.
    """
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.05)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)


def attention(name: str, s: Settings, generator: torch.Generator) -> numattn.Method | nn.Module:
    """The method of this name, with the tensors it owns."""
    dim = s.width // s.num_heads
    if name == "gma":
        return GMAAttention(
            num_heads=s.num_heads,
            head_dim=dim,
            generator=generator,
            num_components=s.units,
            temperature="sqrt",
        )
    if name == "performer":
        return PerformerAttention(
            num_heads=s.num_heads, head_dim=dim, generator=generator, num_features=s.units
        )
    return numattn.get("exact" if name == "softmax" else name)


See = Callable[[GMAAttention, Tensor, Tensor], None]  # is shown a mixture, its queries and keys


@contextmanager
def watching(model: Model, see: See) -> Iterator[None]:
    """Show each mixture the queries and the keys, (B, H, N, D), of a call before it attends."""

    def hook(module: GMAAttention, args: tuple[Tensor, ...]) -> None:
        see(module, *args[:2])

    mixtures = [m for m in model.modules() if isinstance(m, GMAAttention)]
    handles = [m.register_forward_pre_hook(hook) for m in mixtures]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def start_mixtures(model: Model, batch: Batch) -> None:
    """Fit each mixture to the tokens of a batch; lower layers come first."""

    def flat(x: Tensor) -> Tensor:
        exists = batch.tokens.new_ones(batch.tokens.shape, dtype=torch.bool)
        exists = exists if batch.exists is None else batch.exists
        return x.transpose(1, 2)[exists].transpose(0, 1)[None]  # (1, H, tokens, D)

    def fit(mixture: GMAAttention, q: Tensor, k: Tensor) -> None:
        mixture.calibrate(flat(q), flat(k))

    with watching(model, fit):
        model(batch.tokens, batch.exists)


def posterior(mixture: GMAAttention, x: Tensor) -> Tensor:
    """Responsibilities of the components for tokens (B, H, N, D): (B, H, N, K)."""
    tensors = mixture.tensors()
    temperature = x.shape[3] ** 0.5 * tensors.pop("log_temperature").exp()
    return responsibilities(x, **tensors, temperature=temperature)


@torch.no_grad()
def routing(model: Model, task: Task) -> list[dict[str, Any]]:
    """How each head of each mixture routes a batch that was held out.

    One row for each head's queries and one for its keys: the entropy of the usage of components
    over that of equal usage, the number of dead components, and the normalised mutual information
    between the component and the category of the token, of which `chance` is what remains when
    the categories are shuffled.
    """
    batch = next(task.held_out())
    exists = None if batch.exists is None else batch.exists.flatten()
    kinds = task.category(batch.tokens).flatten()
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []

    def see(mixture: GMAAttention, q: Tensor, k: Tensor) -> None:
        layer = len(rows) // (2 * q.shape[1])
        for side, x in (("queries", q), ("keys", k)):
            gamma = posterior(mixture, x).transpose(0, 1).flatten(1, 2)  # (H, B * N, K)
            if exists is not None:
                gamma = gamma[:, exists]
            labels = kinds if exists is None else kinds[exists]
            shuffled = kinds[order] if exists is None else kinds[order][exists[order]]
            usage = component_usage(gamma)
            found = {
                "entropy": usage_entropy(usage).relative,
                "dead": dead_components(usage).sum(-1),
                "nmi": soft_normalized_mutual_information(gamma, labels),
                "chance": soft_normalized_mutual_information(gamma, shuffled),
            }
            for head in range(len(usage)):
                numbers = {name: float(tensor[head]) for name, tensor in found.items()}
                rows.append({"layer": layer, "head": head, "side": side, **numbers})

    with watching(model, see):
        model(batch.tokens, batch.exists)
    return rows


@dataclass(frozen=True)
class Run:
    """One model to be trained; a text is given by its file."""

    settings: Settings
    method: str
    seed: int
    text: Path | None = None

    @property
    def task(self) -> Task:
        return make_task(self.settings, self.text)

    @property
    def name(self) -> str:
        return f"{self.method} {self.settings.task} {self.seed}"

    def is_that_of(self, row: dict[str, Any]) -> bool:
        """Whether a line of the results is of this run."""
        same = row["method"], row["seed"], row["settings"]
        return same == (self.method, self.seed, asdict(self.settings))


@cache
def make_task(settings: Settings, text: Path | None) -> Task:
    if settings.task == "listops":
        return ListOps(settings)
    if text is None:
        raise ValueError("the task of a text needs the text: pass --text FILE.")
    return Text(settings, text.read_text(encoding="utf-8"))


def loss_of(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean loss in nats, and the share of right answers."""
    logits = model(batch.tokens, batch.exists)
    right = (logits.argmax(-1) == batch.target).double().mean()
    return F.cross_entropy(logits.flatten(0, -2), batch.target.flatten()), right


def optimiser(
    model: Model, s: Settings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with decay on the matrices of the projections, and a warm-up followed by a cosine."""
    decayed = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    others = [p for p in model.parameters() if not any(p is d for d in decayed)]
    groups = [
        {"params": decayed, "weight_decay": s.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=s.rate, betas=(0.9, 0.95))
    warm = max(round(s.warmup * s.steps), 1)

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return (1 + math.cos(math.pi * (step - warm) / max(s.steps - warm, 1))) / 2

    return adam, torch.optim.lr_scheduler.LambdaLR(adam, rate)


def fit(
    model: Model, batches: Iterator[Batch], s: Settings, tell: Callable[[str], None]
) -> list[float]:
    """Train; the mean losses of twenty equal parts of the training."""
    adam, schedule = optimiser(model, s)
    losses: list[float] = []
    every = max(s.steps // 20, 1)
    for step, batch in zip(range(s.steps), batches, strict=False):
        loss, _ = loss_of(model, batch)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), s.clip)
        adam.step()
        schedule.step()
        losses.append(loss.item())
        if step % (4 * every) == 0:
            tell(f"step {step} of {s.steps}, loss {losses[-1]:.3f}")
    return [mean(losses[i : i + every]) for i in range(0, len(losses), every)]


@torch.no_grad()
def judge(model: Model, task: Task) -> tuple[float, float]:
    """Mean loss in nats and share of right answers over what was held out."""
    found = [(*map(float, loss_of(model, b)), len(b.tokens)) for b in task.held_out()]
    total = sum(size for *_, size in found)
    loss, right = (sum(x[i] * x[2] for x in found) / total for i in range(2))
    return loss, right


def train(run: Run) -> dict[str, Any]:
    """Train one model, and judge it; a line of the results."""
    torch.set_num_threads(1)
    s, task = run.settings, run.task
    start = time.perf_counter()

    def tell(note: str) -> None:
        print(f"{run.name}: {note}, {time.perf_counter() - start:.0f} s", file=sys.stderr)

    model = Model(task, run.method, run.seed)
    batches = task.batches(run.seed)
    first = next(batches)
    start_mixtures(model, first)
    with torch.no_grad():
        before, _ = loss_of(model, first)
    cpu = time.process_time()
    losses = fit(model, batches, s, tell)
    cpu = time.process_time() - cpu
    loss, right = judge(model, task)
    tell(f"held-out loss {loss:.3f}")
    owned = sum(p.numel() for b in model.blocks for p in parameters_of(b.attention.method))
    return {
        "task": s.task,
        "method": run.method,
        "seed": run.seed,
        "score": task.score(loss, right),
        "held_out_loss": loss,
        "loss_at_start": before.item(),
        "training_losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_of_method": owned,
        "cpu_seconds_per_step": cpu / s.steps,
        "seconds": time.perf_counter() - start,
        "routing": routing(model, task),
        "settings": asdict(s),
        "numattn": numattn.__version__,
        "torch": torch.__version__,
        "commit": commit(),
    }


def parameters_of(method: numattn.Method | nn.Module) -> list[nn.Parameter]:
    return list(method.parameters()) if isinstance(method, nn.Module) else []


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; what follows the last newline is torn, and cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        print(f"{path}: the last line is torn and is cut off; that run is repeated.")
        os.truncate(path, whole)
    return [json.loads(line) for line in data[:whole].splitlines()]


def append_result(path: Path, row: dict[str, Any]) -> None:
    """Write one line at once, and wait until it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(row) + "\n").encode())
        os.fsync(file.fileno())


def run_all(runs: Sequence[Run], jobs: int, out: Path) -> None:
    """Train what is not among the results yet, some models side by side."""
    done = read_results(out)
    missing = [run for run in runs if not any(run.is_that_of(row) for row in done)]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are in {out}", flush=True)
    for run, row in trained(missing, jobs):
        append_result(out, row)
        print(f"{run.name}: {row['score']:.4f}, {row['seconds']:.0f} s", flush=True)


def trained(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Runs and their lines as they finish; one at a time needs no other process."""
    if jobs == 1:
        yield from ((run, train(run)) for run in runs)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        pending = {pool.submit(train, run): run for run in runs}
        for future in as_completed(pending):
            yield pending[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def spread(numbers: Sequence[float], digits: int) -> str:
    """Mean and sample standard deviation."""
    found = f"{mean(numbers):.{digits}f}"
    return found if len(numbers) < 2 else f"{found} ± {stdev(numbers):.{digits}f}"


def report(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> str:
    """Tables in Markdown of the runs that are finished."""
    found = [(run, row) for run in runs for row in rows if run.is_that_of(row)]
    parts = []
    for settings, group in groupby(found, key=lambda pair: pair[0].settings):
        pairs = list(group)
        task = pairs[0][0].task
        parts += [results_table(task, [row for _, row in pairs])]
        parts += [routing_table(settings.task, [row for _, row in pairs])]
    left = len(runs) - len(found)
    return "\n\n".join([*filter(None, parts), *([f"{left} runs are missing."] if left else [])])


def results_table(task: Task, rows: Sequence[dict[str, Any]]) -> str:
    """Score of each method: mean and spread over the seeds."""
    s = task.settings
    lines = [
        f"{s.task}: {task.measure} on what was held out, mean ± sample standard deviation over "
        f"the seeds; {s.num_layers} layers, width {s.width}, {s.num_heads} heads, "
        f"{s.units} components or features, {s.steps} steps of {s.batch} sequences of "
        f"{'' if task.is_causal else 'up to '}{s.length} tokens.",
        "",
        f"| method | {task.measure} | seeds | parameters | of the method | CPU s per step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method, group in groupby(rows, key=lambda row: row["method"]):
        same = list(group)
        time_taken = spread([row["cpu_seconds_per_step"] for row in same], 3)
        lines.append(
            f"| `{method}` | {spread([row['score'] for row in same], 3)} | {len(same)} | "
            f"{same[0]['parameters']} | {same[0]['parameters_of_method']} | {time_taken} |"
        )
    lines += [f"| {name} | {score:.3f} | | | | |" for name, score in task.baselines().items()]
    return "\n".join(lines)


def routing_table(task: str, rows: Sequence[dict[str, Any]]) -> str:
    """What the components of each head serve: mean and spread over the seeds."""
    heads_of = [head for row in rows for head in row["routing"]]
    if not heads_of:
        return ""
    lines = [
        f"{task}: usage of the components of GMA by held-out tokens (entropy over that of equal "
        "usage, dead components), and its normalised mutual information with their categories.",
        "",
        "| layer | head | tokens | usage entropy | dead | NMI | NMI, shuffled |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    place = ("layer", "head", "side")
    order = sorted(heads_of, key=lambda head: [head[name] for name in place])
    for key, group in groupby(order, key=lambda head: [head[name] for name in place]):
        same = list(group)
        cells = [spread([head[name] for head in same], 3) for name in ("entropy", "nmi", "chance")]
        dead = spread([head["dead"] for head in same], 1)
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {cells[0]} | {dead} | {cells[1]} | {cells[2]} |"
        )
    return "\n".join(lines)


def check_models(tasks: Sequence[Task], methods: Sequence[str]) -> None:
    """What must hold of every model before its training says anything."""
    for task, method in product(tasks, methods):
        model = Model(task, method, seed=0)
        batch = next(task.batches(0))
        start_mixtures(model, batch)
        start = loss_of(model, batch)[0].item()
        if abs(start - math.log(task.num_classes)) > 0.1:
            raise AssertionError(f"{method}: loss {start} is not that of a uniform guess.")
        if task.is_causal:
            check_no_leak(model, batch)
        few = Batch(*(None if x is None else x[:4] for x in batch))
        s = replace(task.settings, steps=40, rate=1e-2)
        fit(model, (few for _ in iter(int, 1)), s, tell=lambda note: None)
        end = loss_of(model, few)[0].item()
        print(f"{method} {task.settings.task}: loss {start:.3f}, on few examples {end:.3f}")
        if end > start / 4:
            raise AssertionError(f"{method}: it cannot learn a few examples by heart.")


@torch.no_grad()
def check_no_leak(model: Model, batch: Batch) -> None:
    """The logits of a token must not change with those after it, and those after it must."""
    half = batch.tokens.shape[1] // 2
    other = batch.tokens.clone()
    other[:, half:] = batch.tokens.flip(0)[:, half:]
    change = (model(batch.tokens) - model(other)).abs().amax((0, 2))
    if change[:half].max() > 1e-5 or change[half:].max() < 1e-3:
        raise AssertionError("a causal model sees later tokens, or does not see its own.")


def smoke(methods: Sequence[str]) -> None:
    """Everything, in small."""
    small = {"batch": 8, "held_out": 16, "width": 32, "num_heads": 2, "units": 8, "steps": 5}
    text = Path(__file__)
    settings = [
        replace(FULL["listops"], length=32, **small),
        replace(FULL["text"], length=32, text=digest(text), **small),
    ]
    check_models([make_task(s, text) for s in settings], methods)
    runs = [Run(s, m, seed, text) for s in settings for m in methods for seed in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.jsonl"
        run_all(runs[:-1], 2, out)
        run_all(runs, 1, out)  # goes on where it stopped
        print(report(runs, read_results(out)))


def digest(text: Path) -> str:
    """What tells a text from others."""
    return hashlib.sha256(text.read_bytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8; else only listops runs")
    parser.add_argument("--seeds", type=int, default=3, help="models of each method")
    parser.add_argument("--jobs", type=int, default=2, help="models trained side by side")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of results")
    parser.add_argument("--report", action="store_true", help="print the tables, train nothing")
    parser.add_argument("--smoke", action="store_true", help="checks, and the rest in small")
    args = parser.parse_args()
    methods = args.methods or METHODS
    for name in methods:
        if name not in METHODS:
            parser.error(f"METHOD must be one of {', '.join(METHODS)}; got {name!r}.")
    torch.set_num_threads(1)
    if args.smoke:
        smoke(methods)
        return
    settings = [FULL["listops"]]
    if args.text is None:
        print("no --text: only listops")
    else:
        settings.append(replace(FULL["text"], text=digest(args.text)))
    # Seeds outermost: what is stopped halfway has all methods of some seeds.
    order = product(range(args.seeds), settings, methods)
    runs = [Run(s, method, seed, args.text) for seed, s, method in order]
    if not args.report:
        run_all(runs, args.jobs, args.out)
    tables = sorted(runs, key=lambda run: (run.settings.task, methods.index(run.method)))
    print(report(tables, read_results(args.out)))


if __name__ == "__main__":
    main()
