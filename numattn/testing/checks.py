"""The contract of a method, as checks that run on any of them.

`checks_for` chooses by what `Info` declares; `check` runs them all. A check that a method cannot
pass by nature is named in `Info.exceptions`, and must then fail.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from numattn.core.cost import Shape, count_flops
from numattn.core.inputs import Unsupported
from numattn.core.masks import padding_mask
from numattn.core.method import Method
from numattn.testing.inputs import TOLERANCE, Subject, make_qkv, reference, reference_weights

Check = Callable[[Subject], None]

LENGTHS = (1, 7, 63, 64, 65, 129, 1000)  # around powers of two, and past the leaves of lifting
TIGHT, LOOSE = 8, 256  # budgets: far from exact on the inputs here, and more than they need

_CHECKS: dict[str, tuple[Check, Callable[[Subject], bool]]] = {}


def _check(when: Callable[[Subject], bool] = lambda s: True) -> Callable[[Check], Check]:
    """Enter a check, to be run on the subjects of which `when` holds."""

    def enter(function: Check) -> Check:
        _CHECKS[function.__name__] = (function, when)
        return function

    return enter


def budgets(record: type[Method]) -> dict[str, Method]:
    """The options under which a method is checked: a tight and a loose budget."""
    if record.info.budget is None:
        return {"default": record()}
    return {"tight": record().with_budget(TIGHT), "loose": record().with_budget(LOOSE)}


def checks_for(method: Method) -> list[str]:
    """Names of the checks that apply to this method."""
    subject = Subject(method)
    return [name for name, (_, when) in _CHECKS.items() if when(subject)]


def run(name: str, method: Method) -> None:
    """Run one check; raises AssertionError with what was expected."""
    _CHECKS[name][0](Subject(method))


def check(method: Method | type[Method]) -> None:
    """Run the whole contract on one method, at a tight and at a loose budget.

    Raises:
        AssertionError: A check failed, or one that `Info.exceptions` names passed.
    """
    given = budgets(method) if isinstance(method, type) else {"given": method}
    for label, subject in given.items():
        for name in checks_for(subject):
            expected = name in subject.info.exceptions
            try:
                run(name, subject)
            except AssertionError as error:
                if not expected:
                    raise AssertionError(f"{subject} ({label}), {name}: {error}") from error
            else:
                if expected:
                    raise AssertionError(f"{subject}: {name} passes; drop its exception.")


def close(actual: Tensor, expected: Tensor, what: str, factor: float = 1.0) -> None:
    """Assert equality within the tolerance of the type of `actual`."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    if not actual.numel():
        return
    bound = factor * TOLERANCE[actual.dtype] * max(1.0, expected.abs().max().item())
    worst = (actual.double() - expected.double()).abs().max().item()
    assert worst <= bound, f"{what}: differs by {worst:.3e}, more than {bound:.1e}"


def rejects(kind: type[Exception], call: Callable[[], object], *mentions: str) -> None:
    """Assert that a call raises, with a message that mentions all of these."""
    message: str | None = None
    try:
        call()
    except kind as error:
        message = str(error)
    assert message is not None, f"{kind.__name__} was not raised"
    absent = [m for m in mentions if m not in message]
    assert not absent, f"the message {message!r} does not mention {absent}"


def _causal(s: Subject) -> bool:
    return s.info.causal != "no"


def _masked(s: Subject) -> bool:
    return s.info.mask != "none"


def _modes(s: Subject) -> tuple[bool, ...]:
    return (False, True) if _causal(s) else (False,)


def _cut(x: Tensor, row: int, keep: slice) -> Tensor:
    return x[row : row + 1, :, keep]


# --- shapes, types, layout ------------------------------------------------------------------


@_check()
def shapes_and_dtypes(s: Subject) -> None:
    for dtype in TOLERANCE:
        q, k, v = make_qkv(37, dtype=dtype)
        for causal in _modes(s):
            out = s(q, k, v, is_causal=causal)
            assert out.shape == (*q.shape[:3], v.shape[3]), f"shape {tuple(out.shape)}"
            assert out.dtype == dtype, f"type {out.dtype} for {dtype} inputs"
            assert out.isfinite().all(), f"not finite in {dtype}"


@_check()
def inputs_untouched(s: Subject) -> None:
    q, k, v = make_qkv(33)
    kept = [x.clone() for x in (q, k, v)]
    with torch.no_grad():
        for causal in _modes(s):
            s(q, k, v, is_causal=causal)
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v), strict=True)), "inputs changed"


@_check()
def strided_views(s: Subject) -> None:
    q, k, v = make_qkv(33)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for causal in _modes(s):
        close(s(*views, is_causal=causal), s(q, k, v, is_causal=causal), "strided inputs")


@_check()
def batch_and_head_independence(s: Subject) -> None:
    q, k, v = make_qkv(40)
    for causal in _modes(s):
        before = s(q, k, v, is_causal=causal)
        for index in ((1,),) if s.info.joint else ((1,), (slice(None), 2)):
            changed = [x.clone() for x in (q, k, v)]
            for x in changed:
                x[index] = 3 * x[index].flip(-2)
            after = s(*changed, is_causal=causal)
            keep = torch.ones(q.shape[:2], dtype=torch.bool)
            keep[index] = False
            close(after[keep], before[keep], "another batch entry or head was changed")


@_check()
def grouped_heads(s: Subject) -> None:
    q, k, v = make_qkv(40, group=2)
    rejects(ValueError, lambda: s(q, k, v), "enable_gqa", s.info.name)
    for causal in _modes(s):
        tensors = s.fit(q, k, v, {"enable_gqa": True})
        out = s(q, k, v, is_causal=causal, enable_gqa=True, **tensors)
        wide = {n: t.repeat_interleave(2, dim=t.shape[:2].index(3)) for n, t in tensors.items()}
        k2, v2 = (x.repeat_interleave(2, dim=1) for x in (k, v))
        close(out, s(q, k2, v2, is_causal=causal, **wide), "grouped heads, expanded by hand")


@_check()
def lengths(s: Subject) -> None:
    for queries, keys in ((1, 1), (2, 2), (40, 17), (17, 40), (0, 5), (5, 0), (0, 0)):
        if queries != keys and not s.info.cross:
            continue
        q, k, v = make_qkv(queries, keys=keys)
        out = s(q, k, v)
        assert out.shape == (*q.shape[:3], v.shape[3])
        assert out.isfinite().all(), f"not finite with {queries} queries and {keys} keys"
        if keys == 0:
            assert not out.any(), "no keys: the output must be zeros"
    if _causal(s):
        for n in (0, 1, 2, 3):
            q, k, v = make_qkv(n)
            assert s(q, k, v, is_causal=True).shape == v.shape


@_check()
def cross_rows(s: Subject) -> None:
    """Keys of their own length: the weights belong to the right keys."""
    exact = s.method.exact_at(40)
    if exact is None or not s.info.cross:
        return
    q, k, v = make_qkv(17, keys=40)
    if s.info.family == "lowrank":
        q, k, v = make_qkv(40, keys=40)
    close(Subject(exact)(q, k, v), reference(q, k, v), "exact limit with other lengths")


@_check()
def odd_lengths(s: Subject) -> None:
    """Padding, grouped heads and keys of another length at lengths that no tile divides."""
    for n in LENGTHS:
        if n > 200 and not s.info.differentiable:  # oracles that factor N x N matrices
            continue
        q, k, v = make_qkv(n + 9, batch=1, heads=2, group=2)
        for causal in _modes(s):
            short = (q[:, :, :n], k[:, :, :n], v[:, :, :n])
            tensors = s.fit(*short, {"enable_gqa": True})
            call: dict[str, Any] = {"is_causal": causal, "enable_gqa": True, **tensors}
            want = s(*short, **call)
            assert want.isfinite().all(), f"not finite at {n} tokens, {causal=}"
            wide = {m: t.repeat_interleave(2, dim=t.shape[:2].index(2)) for m, t in tensors.items()}
            k2, v2 = (x.repeat_interleave(2, dim=1) for x in short[1:])
            alone = s(short[0], k2, v2, is_causal=causal, **wide)
            close(want, alone, f"grouped heads at {n} tokens, {causal=}")
            for side in ("right", "left") if _masked(s) else ():
                mask = padding_mask(torch.tensor([n]), n + 9, side=side)
                moved = [x.roll(9, 2) if side == "left" else x for x in (q, k, v)]
                out = s(*moved, attn_mask=mask, **call)
                close(out[:, :, mask[0, 0, 0]], want, f"{side} padding at {n} tokens, {causal=}")
        if s.info.cross:
            out = s(q, *short[1:], enable_gqa=True, **tensors)
            assert out.isfinite().all(), f"not finite with {n} keys and {n + 9} queries"
            if _masked(s):
                mask = padding_mask(torch.tensor([n]), n + 9)
                few = s(short[0], k, v, attn_mask=mask, enable_gqa=True, **tensors)
                keys = s(short[0], *short[1:], enable_gqa=True, **tensors)
                close(few, keys, f"padding of keys alone at {n} tokens")


# --- masks ----------------------------------------------------------------------------------


@_check(_masked)
def padding_is_ignored(s: Subject) -> None:
    q, k, v = make_qkv(40)
    mask = padding_mask(torch.tensor([25, 40]))
    for causal in _modes(s):
        before = s(q, k, v, attn_mask=mask, is_causal=causal)
        q2, k2, v2 = (x.clone() for x in (q, k, v))
        for x in (q2, k2, v2):
            x[0, :, 25:] = 50.0 * (1 + x[0, :, 25:])
        after = s(q2, k2, v2, attn_mask=mask, is_causal=causal)
        close(after[0, :, :25], before[0, :, :25], "padding was changed")
        close(after[1], before[1], "padding of another batch entry was changed")


@_check(_masked)
def padding_is_truncation(s: Subject) -> None:
    q, k, v = make_qkv(40)
    for side, keep in (("right", slice(0, 23)), ("left", slice(17, 40))):
        mask = padding_mask(torch.tensor([23, 40]), side=side)  # type: ignore[arg-type]
        for causal in _modes(s):
            tensors = s.fit(q, k, v, {"attn_mask": mask}) if causal else {}
            first = {n: t[:1] if t.shape[0] == q.shape[0] else t for n, t in tensors.items()}
            out = s(q, k, v, attn_mask=mask, is_causal=causal, **tensors)
            short = s(*(_cut(x, 0, keep) for x in (q, k, v)), is_causal=causal, **first)
            close(_cut(out, 0, keep), short, f"{side} padding, causal={causal}")
            if causal:
                assert not out[0, :, : keep.start].any(), "rows before the first token: not zeros"


@_check(_masked)
def nothing_to_attend(s: Subject) -> None:
    q, k, v = make_qkv(24)
    mask = padding_mask(torch.tensor([0, 24]))
    for causal in _modes(s):
        q1, k1, v1 = (x.clone().requires_grad_(s.info.differentiable) for x in (q, k, v))
        out = s(q1, k1, v1, attn_mask=mask, is_causal=causal)
        assert not out[0].any(), "rows with nothing to attend to must be zeros"
        assert out[1].isfinite().all()
        if s.info.differentiable:
            out.sum().backward()
            grads = (q1.grad, k1.grad, v1.grad)
            assert all(g is not None and g.isfinite().all() for g in grads), "gradient not finite"


@_check(lambda s: s.info.mask == "full")
def full_masks(s: Subject) -> None:
    """Any bool mask equals adding -inf; at the exact limit, masks and biases are exact."""
    q, k, v = make_qkv(32, group=2)
    keep = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[0, :, 3] = False
    per_head = torch.rand(2, 6, 32, 32, generator=torch.Generator().manual_seed(2)) < 0.6
    bias = torch.randn(1, 6, 1, 32, generator=torch.Generator().manual_seed(3), dtype=q.dtype)
    exact = s.method.exact_at(32)
    for causal in _modes(s):
        for mask in (keep, per_head, keep[0, 0], bias, torch.where(per_head, bias, -torch.inf)):
            out = s(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
            assert out.isfinite().all()
            if mask.dtype is torch.bool:
                added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
                same = s(q, k, v, attn_mask=added, is_causal=causal, enable_gqa=True)
                close(out, same, "bool mask and -inf bias")
            if exact is not None:
                best = Subject(exact)(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
                close(best, reference(q, k, v, attn_mask=mask, is_causal=causal), "masked, exact")


# --- causality ------------------------------------------------------------------------------


@_check(_causal)
def no_causal_leak(s: Subject) -> None:
    """A later token, whatever its size, changes nothing before it."""
    for length, at in ((48, 20), (600, 555)):
        q, k, v = make_qkv(length, batch=1, heads=2)
        tensors = s.fit(q, k, v)
        before = s(q, k, v, is_causal=True, **tensors)
        for factor in (100.0, -3.0):
            q2, k2, v2 = q.clone(), k.clone(), v.clone()
            for x in (q2, k2, v2):
                x[:, :, at] = factor * x[:, :, at]
            after = s(q2, k2, v2, is_causal=True, **tensors)
            close(after[:, :, :at], before[:, :, :at], f"token {at} times {factor}", 1e-2)
            moved = (after[:, :, at:] - before[:, :, at:]).abs().max()
            assert moved > 1e-6, "a token changed nothing at or after its place"


@_check(_causal)
def causal_lengths_must_agree(s: Subject) -> None:
    q, k, v = make_qkv(6, keys=9)
    rejects(ValueError, lambda: s(q, k, v, is_causal=True), s.info.name)


@_check(lambda s: _causal(s) and not s.info.joint)
def first_row_attends_to_itself(s: Subject) -> None:
    q, k, v = make_qkv(30)
    if s.info.normalised:
        close(s(q, k, v, is_causal=True)[:, :, 0], v[:, :, 0], "row 0 of a causal call")


# --- what the numbers mean ------------------------------------------------------------------


@_check(lambda s: s.method.exact_at(48) is not None)
def exact_limit(s: Subject) -> None:
    q, k, v = make_qkv(48)
    exact = s.method.exact_at(48)
    assert exact is not None
    for causal in _modes(s):
        for scale in (None, 0.7):
            out = Subject(exact)(q, k, v, is_causal=causal, scale=scale)
            close(
                out, reference(q, k, v, is_causal=causal, scale=scale), f"{exact}, {causal=}", 0.1
            )
        if _masked(s):
            mask = padding_mask(torch.tensor([31, 48]))
            out = Subject(exact)(q, k, v, attn_mask=mask, is_causal=causal)
            want = reference(q, k, v, attn_mask=mask, is_causal=causal)
            close(out[1], want[1], "exact limit, unpadded entry", 0.1)
            close(out[0, :, :31], want[0, :, :31], "exact limit, padded entry", 0.1)


@_check()
def scale_is_used(s: Subject) -> None:
    """The product scale * q.k is all that may matter: the same product gives the same output."""
    q, k, v = make_qkv(40)
    if not s.info.scaled:
        rejects(Unsupported, lambda: s(q, k, v, scale=0.5), "scale")
        return
    for causal in _modes(s):
        grown = (q.shape[-1] ** -0.5 / 0.11) ** 0.5
        out = s(grown * q, grown * k, v, is_causal=causal, scale=0.11)
        close(out, s(q, k, v, is_causal=causal), "scale")


@_check()
def normalised(s: Subject) -> None:
    q, k, v = make_qkv(40)
    for causal in _modes(s):
        ones = s(q, k, torch.ones_like(v), is_causal=causal)
        if s.info.normalised:
            close(ones, torch.ones_like(ones), "constant values")
        elif s.method.exact_at(40) != s.method and not causal:
            exact = s.info.budget and getattr(s.method, s.info.budget) >= 40
            assert exact or (ones - 1).abs().max() > 1e-6, "rows sum to one; Info says they do not"


@_check(lambda s: s.info.linear_in_value)
def linear_in_value(s: Subject) -> None:
    q, k, v = make_qkv(40)
    w = make_qkv(40, seed=1)[2]
    for causal in _modes(s):
        both = s(q, k, 2 * v - 3 * w, is_causal=causal)
        apart = 2 * s(q, k, v, is_causal=causal) - 3 * s(q, k, w, is_causal=causal)
        close(both, apart, "linearity in value")


@_check(lambda s: s.info.approximates == "softmax" and s.info.linear_in_value and s.info.bounded)
def never_beats_the_oracle(s: Subject) -> None:
    """No k-sparse row is nearer than top-k; no rank-r matrix nearer than the truncated SVD."""
    q, k, _ = make_qkv(48, batch=1)
    shape = Shape(1, 3, 3, 48, 48, 8, 48)
    units = s.method.cost(shape).units
    exact = reference_weights(q, k)
    weights = s.weights(q, k).double()
    if s.info.judge == "sparse":
        kept = exact.topk(min(units, 48), -1).values.sum(-1)
        distance = (weights - exact).abs().sum(-1) / 2
        assert (distance >= 1 - kept - 1e-9).all(), "nearer than the best choice of keys"
    elif s.info.judge != "exact":
        tail = torch.linalg.svdvals(exact)[..., units:].square().sum(-1).sqrt()
        assert ((weights - exact).norm(dim=(-2, -1)) >= tail - 1e-9).all(), "nearer than the SVD"


@_check(lambda s: s.info.approximates == "softmax" and s.info.budget is not None)
def error_falls_with_budget(s: Subject) -> None:
    """Over budgets 2, 8, 32 and seeds, the median error falls."""
    medians = []
    for value in (2, 8, 32):
        method = s.method.with_budget(value)
        errors = []
        for seed in range(5):
            q, k, v = make_qkv(48, batch=1, seed=seed)
            q = q / 2  # logits of a size at which every method has begun to work
            out = Subject(method, seed)(q, k, v)
            want = reference(q, k, v)
            errors.append(((out - want).norm() / want.norm()).item())
        medians.append(sorted(errors)[2])
    assert medians[2] < medians[0], f"median errors {medians} at budgets 2, 8, 32"
    assert medians[2] <= medians[1] * 1.5, f"median errors {medians} at budgets 2, 8, 32"


# --- numerics -------------------------------------------------------------------------------


@_check(lambda s: s.info.differentiable)
def gradients(s: Subject) -> None:
    q, k, v = make_qkv(7, batch=1, heads=1, group=2, head_dim=4, value_dim=3)
    for causal in _modes(s):
        tensors = s.fit(q, k, v, {"enable_gqa": True})

        def call(q: Tensor, k: Tensor, v: Tensor, causal=causal, tensors=tensors) -> Tensor:  # type: ignore[no-untyped-def]
            return s(q, k, v, is_causal=causal, enable_gqa=True, **tensors)

        inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
        assert torch.autograd.gradcheck(call, inputs, atol=1e-5, rtol=1e-4)


@_check(lambda s: s.info.random)
def one_draw_per_generator(s: Subject) -> None:
    q, k, v = make_qkv(40)
    state = torch.random.get_rng_state()
    first, again = s(q, k, v), s(q, k, v)
    assert torch.equal(first, again), "the same generator gave another output"
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator moved"
    exact = s.info.approximates == "softmax" and bool(
        (first - reference(q, k, v)).abs().max() < TOLERANCE[q.dtype]
    )
    other = Subject(s.method, seed=1)(q, k, v)
    assert exact or not torch.equal(first, other), "the draw changes nothing"


@_check()
def extremes(s: Subject) -> None:
    """Finite at thirty times the usual logits, on constant and on duplicate keys."""
    q, k, v = make_qkv(40, dtype=torch.float32)
    large = (30**0.5 * q, 30**0.5 * k, v)
    duplicate = (q, k[:, :, :1].expand_as(k), v)
    zero = (torch.zeros_like(q), torch.zeros_like(k), v)
    for causal in _modes(s):
        for what, inputs in (("large", large), ("duplicate", duplicate), ("zero", zero)):
            leaves = [x.clone().requires_grad_(s.info.differentiable) for x in inputs]
            out = s(*leaves, is_causal=causal)
            assert out.isfinite().all(), f"output not finite on {what} logits, {causal=}"
            if s.info.differentiable:
                out.sum().backward()
                grads = [x.grad for x in leaves]
                assert all(g is not None and g.isfinite().all() for g in grads), (
                    f"gradient not finite on {what} logits, {causal=}"
                )


@_check(lambda s: s.info.linear_in_value or not s.info.random)
def equal_keys_give_the_mean(s: Subject) -> None:
    """Not of a random choice that looks at the values: a part of them has another mean."""
    q, k, v = make_qkv(40)
    if s.info.judge in ("exact", "lowrank", "kernel", "latent"):
        out = s(q, k[:, :, :1].expand_as(k), v)
        close(out, v.mean(2, keepdim=True).expand_as(out), "keys all equal")


@_check()
def half_precision(s: Subject) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = make_qkv(48, dtype=dtype)
        for causal in _modes(s):
            tensors = s.fit(q.double(), k.double(), v.double())
            low = s(q, k, v, is_causal=causal, **tensors)
            high = s(*(x.double() for x in (q, k, v)), is_causal=causal, **tensors)
            close(low, high, f"{dtype} against float64")


@_check()
def single_precision(s: Subject) -> None:
    q, k, v = make_qkv(300, batch=1, dtype=torch.float32)
    for causal in _modes(s):
        tensors = s.fit(q.double(), k.double(), v.double())
        low = s(q, k, v, is_causal=causal, **tensors)
        high = s(*(x.double() for x in (q, k, v)), is_causal=causal, **tensors)
        close(low, high, "float32 against float64")


# --- use ------------------------------------------------------------------------------------


@_check()
def compiles(s: Subject) -> None:
    """As one graph, with its tensors given; forward and, where there is one, backward."""
    for causal in _modes(s):
        torch._dynamo.reset()
        q, k, v = make_qkv(40, dtype=torch.float32)
        tensors = s.fit(q, k, v)

        def call(q: Tensor, k: Tensor, v: Tensor, causal=causal, tensors=tensors) -> Tensor:  # type: ignore[no-untyped-def]
            return s.method(q, k, v, is_causal=causal, **tensors)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        leaves = [x.clone().requires_grad_(s.info.differentiable) for x in (q, k, v)]
        out = compiled(*leaves)
        close(out, call(q, k, v), "compiled")
        if s.info.differentiable:
            out.square().sum().backward()
            plain = [x.clone().requires_grad_() for x in (q, k, v)]
            call(*plain).square().sum().backward()
            for a, b in zip(leaves, plain, strict=True):
                close(a.grad, b.grad, "gradient of the compiled call")  # type: ignore[arg-type]


@_check()
def counted_flops(s: Subject) -> None:
    """`cost` says what the matrix products of a call take."""
    # Oracles without a gradient factor N x N matrices.
    length, width = 2048 if s.info.differentiable else 512, 32
    q, k, v = make_qkv(
        length, batch=1, heads=1, group=2, head_dim=width, value_dim=width, dtype=torch.float32
    )
    for causal in _modes(s):
        tensors = s.fit(q, k, v, {"enable_gqa": True}) if causal else {}
        said = s.method.cost(Shape(1, 2, 1, length, length, width, width, is_causal=causal)).flops
        counted = count_flops(
            lambda: s(q, k, v, is_causal=causal, enable_gqa=True, **tensors)  # noqa: B023
        )
        # Causal tiles are computed whole where the diagonal crosses them.
        slack = 0.25 if causal else 0.10
        assert abs(counted - said) <= slack * said, (
            f"{causal=}: cost says {said}, counted {counted}"
        )


@_check()
def missing_capabilities_are_refused(s: Subject) -> None:
    q, k, v = make_qkv(8)
    info = s.info
    if info.causal == "no":
        rejects(Unsupported, lambda: s(q, k, v, is_causal=True), info.name)
    if info.mask != "full":
        bias = torch.zeros(2, 1, 1, 8, dtype=q.dtype)
        rejects(Unsupported, lambda: s(q, k, v, attn_mask=bias), info.name)
        keep = torch.ones(8, 8, dtype=torch.bool)
        rejects(Unsupported, lambda: s(q, k, v, attn_mask=keep), info.name)
    if info.mask == "none":
        keep = torch.ones(2, 1, 1, 8, dtype=torch.bool)
        rejects(Unsupported, lambda: s(q, k, v, attn_mask=keep), info.name)
    if not info.cross:
        rejects(Unsupported, lambda: s(q[:, :, :3], k, v), info.name)
    if not info.decode:
        rejects(Unsupported, lambda: s.method.state(k, v), info.name)
    if not info.state_tensors:
        rejects(Unsupported, lambda: s.method.module(num_heads=2, head_dim=8), info.name)


@_check()
def bad_arguments(s: Subject) -> None:
    q, k, v = make_qkv(8)
    name = s.info.name
    rejects(ValueError, lambda: s(q[0], k, v), name, "query")
    rejects(ValueError, lambda: s(q, k[..., :4], v), name, "head size")
    rejects(ValueError, lambda: s(q, k, v[:, :, :5]), name)
    rejects(ValueError, lambda: s(q, k.float(), v), name, "key")
    rejects(TypeError, lambda: s(q.long(), k.long(), v.long()), name)
    rejects(TypeError, lambda: s(None, k, v), name, "query")  # type: ignore[arg-type]
    if _masked(s):
        short = torch.ones(2, 1, 1, 5, dtype=torch.bool)
        rejects(ValueError, lambda: s(q, k, v, attn_mask=short), name, "attn_mask")
    if s.info.budget is not None:
        budget = s.info.budget
        rejects(ValueError, lambda: s.method.with_budget(0), name, budget)
        options = {**s.method.options(), budget: 0}
        function = type(s.method).function
        rejects(ValueError, lambda: function(q, k, v, **options), name, budget)


@_check(lambda s: s.info.decode)
def decode_is_prefill(s: Subject) -> None:
    """Step by step equals one causal call, from an empty prefix and from a long one."""
    length = 40
    q, k, v = make_qkv(length, group=2)
    tensors = s.fit(q, k, v, {"enable_gqa": True})
    want = s(q, k, v, is_causal=True, enable_gqa=True, **tensors)
    for prefix in (0, 17):
        state = s.method.state(k[:, :, :prefix], v[:, :, :prefix], enable_gqa=True, **tensors)
        for t in range(prefix, length):
            state.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
            out = state.attend(q[:, :, t : t + 1])
            close(out, want[:, :, t : t + 1], f"step {t} after a prefix of {prefix}")
    said = s.method.cost(Shape(2, 6, 3, length, length, 8, 5, itemsize=8)).cache
    assert said is not None, "cost().cache is None, but it decodes"
    assert state.nbytes in (said, 2 * said), f"keeps {state.nbytes} bytes, cost says {said}"


@_check(lambda s: bool(s.info.state_tensors))
def module_owns_its_tensors(s: Subject) -> None:
    q, k, v = make_qkv(24, dtype=torch.float32)
    module = s.method.module(num_heads=3, head_dim=8)
    names = {n for n, _ in (*module.named_buffers(), *module.named_parameters())}
    assert names, "the module owns nothing"
    for causal in _modes(s):
        out = module(q, k, v, is_causal=causal)
        other = s.method.module(num_heads=3, head_dim=8)
        other.load_state_dict(module.state_dict())
        assert torch.equal(out, other(q, k, v, is_causal=causal)), "state dict round trip"
    if s.info.decode:
        want = module(q, k, v, is_causal=True)
        state = module.state(k, v)  # type: ignore[operator]
        close(state.attend(q[:, :, -1:]), want[:, :, -1:], "the module's decoding state")


@_check()
def documented(s: Subject) -> None:
    function = type(s.method).function
    assert function.__name__ == f"{s.info.name}_attention"
    text = inspect.getdoc(function) or ""
    sections = ("Args:", "Returns:", "Cost:", "Exact when:", "Limits:", "References:", "Example:")
    absent = [part for part in sections if part not in text]
    assert not absent, f"the docstring lacks {absent}"
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", text), f"the docstring does not speak of {name}"
    assert {f.name for f in fields(s.method)} <= set(inspect.signature(function).parameters)
