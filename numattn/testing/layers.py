"""Checks of whole attention layers: what every `AttentionLayer` promises."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from numattn.core.cost import count_flops
from numattn.core.inputs import Unsupported
from numattn.core.layer import AttentionLayer
from numattn.core.linalg import input_generator

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 5e-2}


def check_layer(layer: AttentionLayer) -> None:
    """Raise `AssertionError` where a layer breaks a promise of `AttentionLayer`.

    The layer is copied and tested in float64, and in float32 and bfloat16 as far as types go.
    """
    layer = copy.deepcopy(layer).double().eval()
    step_by_step_equals_one_call(layer)
    padding_is_truncation(layer)
    no_causal_leak(layer)
    cache_has_the_size_it_says(layer)
    flops_are_counted(layer)
    gradients_reach_every_parameter(layer)
    types_are_kept(layer)
    bad_input_is_named(layer)


def _hidden(layer: AttentionLayer, batch: int, length: int, seed: int = 0) -> Tensor:
    shape = (batch, length, layer.embed_dim)
    x = torch.randn(shape, generator=input_generator(seed), dtype=torch.float64)
    return x.to(next(layer.parameters()))


def _close(ours: Tensor, theirs: Tensor, what: str, factor: float = 1.0) -> None:
    bound = factor * TOLERANCE[ours.dtype] * theirs.abs().max().clamp(min=1e-30).double()
    error = (ours.double() - theirs.double()).abs().max()
    assert error <= bound, f"{what}: off by {error:.2e}, allowed are {bound:.2e}"


@torch.no_grad()
def step_by_step_equals_one_call(layer: AttentionLayer) -> None:
    """Token by token, in pieces of several, and all at once into a state: the same outputs."""
    x = _hidden(layer, 2, 23)
    whole = layer(x)
    for sizes in ([1] * 23, [23], [7, 1, 11, 1, 3]):
        state = layer.state(2)
        outs = [layer(piece, state=state) for piece in x.split(sizes, 1)]
        _close(torch.cat(outs, 1), whole, f"pieces of {sizes[:3]} tokens differ from one call")
        assert state.length == 23, f"the state says {state.length} tokens after 23"


@torch.no_grad()
def padding_is_truncation(layer: AttentionLayer) -> None:
    """Padding on either side, of any content, changes nothing at the tokens that exist."""
    x = _hidden(layer, 2, 13)
    junk = 10 * _hidden(layer, 2, 5, seed=1)
    for is_causal in (True, False):
        want = layer(x, is_causal=is_causal)
        for left in (True, False):
            mask = torch.ones(2, 1, 1, 18, dtype=torch.bool)
            mask[..., slice(5) if left else slice(13, None)] = False
            padded = torch.cat([junk, x] if left else [x, junk], 1)
            out = layer(padded, attn_mask=mask, is_causal=is_causal)
            out = out[:, 5:] if left else out[:, :13]
            side = "left" if left else "right"
            _close(out, want, f"{side} padding changes outputs (is_causal={is_causal})")


@torch.no_grad()
def no_causal_leak(layer: AttentionLayer) -> None:
    """A later token, however large, changes nothing before it; an earlier one does."""
    x = _hidden(layer, 1, 19)
    want = layer(x)
    moved = x.clone()
    moved[:, 11] = 100 * x[:, 11].flip(-1)  # a norm would undo a mere factor
    out = layer(moved)
    _close(out[:, :11], want[:, :11], "a later token changes earlier outputs")
    assert not torch.allclose(out[:, 12:], want[:, 12:]), "an earlier token changes nothing"


@torch.no_grad()
def cache_has_the_size_it_says(layer: AttentionLayer) -> None:
    """The state's bytes are those of the cost, at two lengths."""
    for length in (3, 17):
        state = layer.state(2)
        layer(_hidden(layer, 2, length), state=state)
        cost = layer.cost(2, length)
        assert state.nbytes == cost.cache, f"{state.nbytes} bytes are kept, cost says {cost.cache}"


@torch.no_grad()
def flops_are_counted(layer: AttentionLayer) -> None:
    """The operations of the matrix products are those of the cost."""
    x = _hidden(layer, 2, 33)
    for is_causal in (True, False):
        counted = count_flops(lambda c=is_causal: layer(x, is_causal=c))  # type: ignore[misc]
        said = layer.cost(2, 33, is_causal=is_causal).flops
        assert abs(counted - said) <= 0.1 * counted, f"{counted} operations, cost says {said}"


def gradients_reach_every_parameter(layer: AttentionLayer) -> None:
    """No parameter is without a gradient, and none has one that is not finite."""
    layer.zero_grad()
    layer(_hidden(layer, 2, 11)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        assert grad.isfinite().all(), f"the gradient of {name} is not finite"
        assert grad.any(), f"the gradient of {name} is zero"
    layer.zero_grad()


@torch.no_grad()
def types_are_kept(layer: AttentionLayer) -> None:
    """float32 and bfloat16 in, the same out, near what float64 gives."""
    x = _hidden(layer, 1, 9)
    want = layer(x)
    for dtype in (torch.float32, torch.bfloat16):
        low = copy.deepcopy(layer).to(dtype)
        state = low.state(1)
        for out in (low(x.to(dtype)), low(x.to(dtype), state=state)):
            assert out.dtype is dtype, f"{dtype} in, {out.dtype} out"
            _close(out, want, f"{dtype} is far from float64")


@torch.no_grad()
def bad_input_is_named(layer: AttentionLayer) -> None:
    """A wrong width, a mask that is no padding, and a mask beside a state are refused."""
    x = _hidden(layer, 2, 5)
    padding = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    for error, call in (
        (ValueError, lambda: layer(x[..., :-1])),
        (Unsupported, lambda: layer(x, attn_mask=torch.ones(5, 5, dtype=torch.bool))),
        (Unsupported, lambda: layer(x, attn_mask=padding, state=layer.state(2))),
    ):
        message = _refusal(call, error)
        assert type(layer).__name__ in message, f"{message!r} does not name the layer"


def _refusal(call: Callable[[], object], error: type[Exception]) -> str:
    """The message with which `call` is refused."""
    try:
        call()
    except error as found:
        return str(found)
    raise AssertionError(f"{error.__name__} was expected")
