"""The one place where arguments are checked and brought into the shape that methods compute in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from numattn.core.info import Info
from numattn.core.linalg import take


class Unsupported(NotImplementedError):
    """The call is well formed, but this method cannot serve it; the message says the way out."""


@dataclass(frozen=True)
class Inputs:
    """Checked arguments, in the precision and layout that methods compute in.

    Half precision is raised to float32. Grouped heads are folded, not expanded: the ``group``
    query heads that share a key head become rows of that head, ordered by position first, so row
    ``r`` of ``q`` stands at position ``r // group``.

    Attributes:
        q: (B, Hk, Nq * group, D).
        k: (B, Hk, Nk, D).
        v: (B, Hk, Nk, E).
        scale: Factor of the logits.
        is_causal: Whether position i attends to positions j <= i only.
        padding: bool (B or 1, 1, Nk), True = a key that exists; None when all do.
        mask: bool, or float to be added to the logits; (B or 1, Hk or 1, rows, Nk or 1), where
            rows is Nq * group, 1, or group (the same for every position). None unless the method
            takes full masks and one that is not mere padding was given.
        group: Query heads per key head.
        shape: Shape of the output, (B, H, Nq, E).
        dtype: Type of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    is_causal: bool
    padding: Tensor | None
    mask: Tensor | None
    group: int
    shape: tuple[int, int, int, int]
    dtype: torch.dtype

    @property
    def query_padding(self) -> Tensor | None:
        """Which rows of q exist, bool (B or 1, 1, Nq * group), for statistics over queries.

        Where queries and keys are equally many, `padding` is taken to speak of both; else every
        query exists.
        """
        if self.padding is None or self.q.shape[2] != self.k.shape[2] * self.group:
            return None
        return self.padding.repeat_interleave(self.group, dim=2)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no query, or no key to attend to."""
        return 0 in self.q.shape or 0 in self.k.shape or 0 in self.v.shape

    @property
    def num_keys(self) -> Tensor:
        """How many keys exist, int (B or 1, 1)."""
        if self.padding is None:
            return torch.full((1, 1), self.k.shape[2], device=self.k.device)
        return self.padding.sum(-1)

    def compact(self) -> tuple[Inputs, Tensor | None]:
        """The same call with the tokens that exist first, in their order, and the padding last.

        What a method does with positions is then not moved by padding before the tokens. Queries
        move with the keys where they are equally many, see `query_padding`.

        Returns:
            The inputs, and where each row of q went, int (B or 1, 1, rows), for `move_back`; None
            where no row moved.
        """
        if self.padding is None:
            return self, None
        order = (~self.padding).to(torch.uint8).argsort(dim=-1, stable=True)  # (B or 1, 1, Nk)
        moved = replace(
            self,
            k=take(self.k, order),
            v=take(self.v, order),
            padding=self.padding.gather(-1, order),
        )
        if self.query_padding is None:
            return moved, None
        member = torch.arange(self.group, device=order.device)
        rows = (order[..., None] * self.group + member).flatten(2)
        return replace(moved, q=take(self.q, rows)), rows.argsort(dim=-1)

    def joined(self) -> Inputs:
        """The whole batch as one sequence, without a mask, for statistics over all of it."""
        q, k, v = (t.transpose(0, 1).flatten(1, 2)[None] for t in (self.q, self.k, self.v))
        padding = self.padding
        if padding is not None:
            padding = padding.expand(len(self.k), -1, -1).transpose(0, 1).flatten(1)[None]
        batch, heads, queries, width = self.shape
        shape = (1, heads, batch * queries, width)
        return replace(self, q=q, k=k, v=v, padding=padding, mask=None, shape=shape)

    def nothing(self) -> Tensor:
        """The output when nothing can be attended to: zeros that keep the graph connected."""
        zero = self.q[..., :0].sum() + self.k[..., :0].sum() + self.v[..., :0].sum()
        return zero.to(self.dtype).expand(self.shape).clone()

    def move_back(self, out: Tensor, place: Tensor | None) -> Tensor:
        """Rows of an output (B, Hk, rows, E) to where they stood before `compact`, of these inputs.

        Causal rows before the first token may attend to nothing and are zeros.
        """
        if place is None:
            return out
        out = take(out, place)
        if not self.is_causal:
            return out
        before = (place // self.group < self.num_keys[..., None]).cumsum(-1) == 0
        return out.masked_fill(before[..., None], 0.0)

    def restore(self, out: Tensor, place: Tensor | None = None) -> Tensor:
        """Rows (B, Hk, Nq * group, E) back to (B, H, Nq, E) in the query's type.

        `place` says where `compact` put each row.
        """
        return unfold(self.move_back(out, place), self.group).to(self.dtype)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a method computes for inputs of this type: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def positive(name: str, option: str, value: object) -> None:
    """Refuse an option that is not a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: {option} must be a positive integer; got {value!r}.")


def not_negative(name: str, option: str, value: object) -> None:
    """Refuse an option that is not an integer of 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: {option} must be an integer, 0 or more; got {value!r}.")


def one_of(name: str, option: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse an option that is none of the choices."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: {option} must be one of {known}; got {value!r}.")


def fold(x: Tensor, group: int) -> Tensor:
    """(B, Hk * group, N, D) -> (B, Hk, N * group, D), position first."""
    if group == 1:
        return x
    return x.unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3)


def unfold(x: Tensor, group: int) -> Tensor:
    """The inverse of `fold`."""
    return x if group == 1 else x.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)


def prepare(
    info: Info,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Inputs:
    """Check the arguments of the method `info` describes and fold them into `Inputs`.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: Shapes do not fit, or ``is_causal`` comes with different lengths.
        Unsupported: The method cannot serve a well-formed call.
    """
    group = check(info, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    dtype = compute_dtype(query.dtype)
    padding, mask = _split_mask(attn_mask, group)
    if padding is not None:
        padding = padding.expand(-1, -1, key.shape[2])
    return Inputs(
        q=fold(query, group).to(dtype),
        k=key.to(dtype),
        v=value.to(dtype),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        is_causal=is_causal,
        padding=padding,
        mask=mask if mask is None or mask.dtype is torch.bool else mask.to(dtype),
        group=group,
        shape=(*query.shape[:3], value.shape[-1]),
        dtype=query.dtype,
    )


def check(
    info: Info,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> int:
    """Check the arguments; return the number of query heads per key head."""
    name = info.name
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor; got {type(x).__name__}.")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: {argument} must have four dimensions (batch, heads, length, width); "
                f"got shape {tuple(x.shape)}."
            )
        if not x.is_floating_point():
            raise TypeError(f"{name}: {argument} must be floating point; got {x.dtype}.")
        if x.dtype != query.dtype or x.device != query.device:
            raise ValueError(
                f"{name}: query, key and value must share type and device; query is {query.dtype} "
                f"on {query.device}, {argument} is {x.dtype} on {x.device}."
            )
    if scale is not None and (isinstance(scale, Tensor) or not isinstance(scale, (int, float))):
        raise TypeError(f"{name}: scale must be a number or None; got {type(scale).__name__}.")
    if scale is not None and not info.scaled:
        raise Unsupported(f"{name} has no logits to scale; call it with scale=None.")
    group = _check_shapes(name, query, key, value, enable_gqa)
    _check_lengths(info, query.shape[2], key.shape[2], is_causal)
    if attn_mask is not None:
        _check_mask(info, attn_mask, query, key)
    return group


def _check_shapes(name: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> int:
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{name}: query, key and value must agree in batch, and key and value in heads and "
            f"length; got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}."
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"{name}: query and key must have the same head size; got {query.shape[3]} and "
            f"{key.shape[3]}."
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads == kv_heads:
        return 1
    if not enable_gqa:
        raise ValueError(
            f"{name}: query has {heads} heads and key has {kv_heads}. "
            "Pass enable_gqa=True for grouped-query attention."
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{name}: the {heads} query heads must be a multiple of the {kv_heads} key heads."
        )
    return heads // kv_heads


def _check_lengths(info: Info, num_queries: int, num_keys: int, is_causal: bool) -> None:
    if is_causal and info.causal == "no":
        why = f": {info.why_not_causal}" if info.why_not_causal else ""
        raise Unsupported(f"{info.name} has no causal form{why}; call it with is_causal=False.")
    if num_queries == num_keys:
        return
    if is_causal:
        way_out = (
            "pass an explicit attn_mask (torch aligns top left, flash-attention bottom right)"
            if info.mask == "full"
            else "use equal lengths, or decode step by step with Method.state"
            if info.decode
            else "use equal lengths"
        )
        raise ValueError(
            f"{info.name}: is_causal with {num_queries} queries and {num_keys} keys is ambiguous; "
            f"{way_out}."
        )
    if not info.cross:
        raise Unsupported(
            f"{info.name} needs as many queries as keys; got {num_queries} and {num_keys}."
        )


def _check_mask(info: Info, attn_mask: Tensor, query: Tensor, key: Tensor) -> None:
    name = info.name
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"{name}: attn_mask must be a tensor; got {type(attn_mask).__name__}.")
    if attn_mask.dtype is not torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"{name}: attn_mask must be bool or floating; got {attn_mask.dtype}.")
    if attn_mask.device != query.device:
        raise ValueError(
            f"{name}: attn_mask is on {attn_mask.device}, the query on {query.device}."
        )
    full = (*query.shape[:3], key.shape[2])
    shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(shape) != 4 or any(m not in (1, n) for m, n in zip(shape, full, strict=True)):
        raise ValueError(
            f"{name}: attn_mask must broadcast to (B, H, Nq, Nk) = {full}; "
            f"got {tuple(attn_mask.shape)}."
        )
    if info.mask == "none":
        raise Unsupported(f"{name} takes no attn_mask; remove the padded keys instead.")
    if info.mask == "padding":
        if attn_mask.dtype is not torch.bool:
            raise Unsupported(
                f"{name} has no logits to add a bias to; attn_mask must be a bool key-padding "
                f"mask of shape (B, 1, 1, Nk), got {attn_mask.dtype}. `numattn.padding_mask` "
                "makes one."
            )
        if shape[1] != 1 or shape[2] != 1:
            raise Unsupported(
                f"{name} takes key-padding masks of shape (B, 1, 1, Nk); "
                f"got {tuple(attn_mask.shape)}. `numattn.padding_mask` makes one."
            )


def _split_mask(attn_mask: Tensor | None, group: int) -> tuple[Tensor | None, Tensor | None]:
    """Sort a mask into (padding, mask), heads folded as in `fold`."""
    if attn_mask is None:
        return None, None
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if mask.dtype is torch.bool and mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask[:, :, 0], None
    if group > 1 and mask.shape[1] > 1:
        return None, fold(mask, group)
    if group > 1 and mask.shape[2] > 1:
        return None, mask.repeat_interleave(group, dim=2)
    return None, mask
