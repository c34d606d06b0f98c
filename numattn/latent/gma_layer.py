"""The layer of Gaussian-mixture attention: a state of K slots, and a window of exact softmax."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator, Tensor, nn

from numattn.core.cost import Cost
from numattn.core.inputs import (
    Unsupported,
    compute_dtype,
    fold,
    not_negative,
    one_of,
    positive,
    unfold,
)
from numattn.core.layer import AttentionLayer, LayerState, heads, joined
from numattn.core.partial import Partial
from numattn.core.rotary import Rotary
from numattn.engines import linear
from numattn.engines.blocks import blocks_attention
from numattn.engines.linear import CHUNK
from numattn.engines.slots import Quadratic, regularised, slots_partial
from numattn.engines.softmax import key_bias
from numattn.latent.gma import GMA, GMAAttention

_TILE = 64  # positions of a tile of the window
_ROWS = 1024  # rows that read the slots at once


class GaussianMixtureAttention(AttentionLayer):
    r"""A layer of Gaussian-mixture attention, alone or beside a window of exact softmax.

    Tokens meet in the K components of the learned mixtures of `gma_attention`. What a state keeps
    are the slots: for every key head and component the mass of the tokens that were taken in, and
    their mean value.

    With a ``window`` W, token i attends to the tokens :math:`i - W < j \le i` by softmax and to all
    older ones through the mixture. With softmax :math:`(o^w, \mathrm{lse})` and mixture
    :math:`(o^m, D)`, whose weights are not on one scale, both are brought together by

    - ``merge="lse"``: one sum over all tokens, in which older ones weigh :math:`e^{c_h}` times
      their responsibilities,
      :math:`o = (e^{\mathrm{lse}} o^w + e^{c_h} D\, o^m) / (e^{\mathrm{lse}} + e^{c_h} D)`, or
    - ``merge="gate"``: :math:`o = g_h\, o^w + (1 - g_h)\, o^m` with
      :math:`g_h = \mathrm{sigmoid}(c_h)`, and :math:`o = o^w` where there is no older token,

    with a learned c for every query head. A call that is not causal has its window on both sides,
    :math:`|i - j| < W`, and the mixture serves what is older and what is newer.

    Parameters: ``q_proj`` (H D, embed_dim), ``k_proj`` and ``v_proj`` (Hk D, embed_dim), ``o_proj``
    (embed_dim, H D), ``mixture``, a `GMAAttention`, and with a window ``calibration`` (H,), c.

    Cost: the projections; 6 N K D operations per head for queries and for keys, and causal
    2 N CHUNK (K + D) more; about 4 N (W + 64) D for the window. Decoding keeps Hk K (D + 2)
    numbers, whatever the length, and Hk (2 D) for each of the last W tokens, or Hk (3 D) with
    rotary positions.

    Exact when: it is its own target; the window is exact softmax, so a layer whose window holds the
    whole sequence is `GroupedQueryAttention`.

    Limits: as those of `gma_attention`. The mixture knows no positions. Tokens that a state holds
    have no gradient; what `memory` returns has.

    References:
        "Gaussian Mixture Attention", 2026, https://arxiv.org/abs/2606.18283.

    Example:
        >>> layer = GaussianMixtureAttention(32, 4, 16, kv_heads=2, window=8)
        >>> state = layer.state()
        >>> layer(torch.randn(1, 100, 32), state=state).shape, state.length
        (torch.Size([1, 100, 32]), 100)
        >>> state.nbytes  # 4 bytes for 2 heads: 16 slots of 8 + 2, and 8 tokens of 2 * 8 numbers
        2304
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_components: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        shared: bool = True,
        temperature: float | Literal["sqrt"] = "sqrt",
        epsilon: float = 0.0,
        window: int = 0,
        merge: Literal["lse", "gate"] = "lse",
        rotary: Rotary | None = None,
        generator: Generator | None = None,
    ) -> None:
        r"""Make projections and mixtures.

        Args:
            embed_dim: Width of the hidden states.
            num_heads: H, query heads.
            num_components: K, of every key head.
            kv_heads: Hk, a divisor of H; H when None.
            head_dim: D, width of a query, a key and a value; embed_dim / H when None.
            shared: Whether queries and keys have the same mixture.
            temperature: :math:`\tau` at the start, positive or ``"sqrt"``, see `gma_attention`.
            epsilon: Added to the denominators of the mixture, 0 or more.
            window: W, tokens of exact softmax; 0 for the mixture alone, which then serves the
                token itself too.
            merge: How the window and the mixture are brought together; ``"lse"`` without one.
            rotary: Rotation of queries and keys in the window, of D coordinates; it needs one, for
                a mixture knows no positions.
            generator: Source of the draw of the means; torch's global one when None.

        Raises:
            ValueError: Sizes that do not fit, or options that contradict each other.
        """
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        _check_options(num_heads, kv_heads, head_dim, embed_dim, window, merge, rotary)
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.window, self.merge, self.rotary = head_dim, window, merge, rotary
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=False)
        self.record = GMA(num_components, temperature=temperature, epsilon=epsilon)
        self.mixture = GMAAttention(
            num_heads=kv_heads,
            head_dim=head_dim,
            shared=shared,
            generator=generator,
            **self.record.options(),
        )
        if window:
            self.calibration = nn.Parameter(torch.zeros(num_heads))

    def forward(
        self,
        hidden: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
        state: LayerState | None = None,
    ) -> Tensor:
        self._check(hidden, attn_mask, state)
        if hidden.shape[1] == 0:
            return hidden
        place = padding = None
        if attn_mask is not None:  # the tokens that exist first: the window counts them alone
            exists = attn_mask[:, 0, 0].expand(len(hidden), -1)
            order = (~exists).to(torch.uint8).argsort(dim=-1, stable=True)
            hidden, place = _take(hidden, order), order.argsort(dim=-1)
            padding = exists.gather(1, order)[:, None]
        if state is None:
            out = self._whole(hidden, padding, is_causal)
        else:
            out = self._step(hidden, _own(self, state))
        out = self.o_proj(joined(unfold(out, self.group)).to(hidden.dtype))
        return out if place is None else _take(out, place)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.kv_heads

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, folded to the rows of their key heads, keys, and values."""
        dtype = compute_dtype(hidden.dtype)
        q = fold(heads(self.q_proj(hidden), self.num_heads), self.group)
        k, v = (heads(p(hidden), self.kv_heads) for p in (self.k_proj, self.v_proj))
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def _densities(self, k: Tensor) -> tuple[Quadratic, Quadratic]:
        found = self.record.densities(k, self.mixture.tensors())
        assert found is not None  # the module always has a mixture
        return found

    def _whole(self, hidden: Tensor, padding: Tensor | None, is_causal: bool) -> Tensor:
        """Attend among whole sequences, padding last: (B, Hk, N * group, D)."""
        q, k, v = self._project(hidden)
        a, b = self._densities(k)
        if not self.window and not is_causal:
            part = slots_partial(q, k, v, a, b, padding=padding, group=self.group)
            return self._merge(None, Partial.from_lse(*part))
        far = self._older(q, k, v, a, b, padding)
        if not is_causal:
            last = None if padding is None else padding.flip(-1)
            newer = self._older(_flip(q, self.group), _flip(k, 1), _flip(v, 1), a, b, last)
            newer = Partial(*(_flip(t, self.group) for t in (newer.num, newer.den, newer.shift)))
            far = far.merge(newer)
        near = None
        if self.window:
            turned = self._turn(q, 0, self.group)
            near = self._near(turned, self._turn(k, 0), v, padding, is_causal)
        return self._merge(near, far)

    def _step(self, hidden: Tensor, state: MixtureState) -> Tensor:
        """Attend from new tokens, and take them in: (B, Hk, n * group, D)."""
        q, k, v = self._project(hidden)
        a, b = self._densities(k)
        held = state.recent.shape[2]
        new = [k, v] if self.rotary is None else [k, v, self._turn(k, state.length)]
        recent = torch.cat([state.recent.to(k), torch.cat(new, -1)], 2)
        keys, values, *turned = recent.split(self.head_dim, -1)
        far = self._older(q, keys, values, a, b, None)
        if state.length > held:
            far = far.merge(_read(q, state.slots, a))
        near = None
        if self.window:
            at = self._turn(q, state.length, self.group)
            near = self._near(at, turned[0] if turned else keys, values, None, True)
        out = self._merge(near, far)
        with torch.no_grad():
            leaving = max(recent.shape[2] - self.window, 0)
            if leaving:
                old = keys[:, :, :leaving], values[:, :, :leaving]
                state.slots = state.slots.merge(_collect(*old, b, None))
            state.recent = recent[:, :, leaving:].to(hidden.dtype).clone()
            state.seen += hidden.shape[1]
        return out

    def _older(
        self, q: Tensor, k: Tensor, v: Tensor, a: Quadratic, b: Quadratic, padding: Tensor | None
    ) -> Partial:
        """From the last positions to the keys that lie a window or more before them."""
        count = k.shape[2] - self.window
        if count <= 0:
            return Partial.zeros(q.shape[:3], v.shape[3], v)
        rows = count * self.group
        seen = None if padding is None else padding[..., :count]
        part = slots_partial(
            q[:, :, -rows:],
            k[:, :, :count],
            v[:, :, :count],
            a,
            b,
            is_causal=True,
            padding=seen,
            group=self.group,
        )
        first = Partial.zeros((*q.shape[:2], q.shape[2] - rows), v.shape[3], v)
        return Partial.cat([first, Partial.from_lse(*part)], 2)

    def _near(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Softmax over the window, from the last positions of the keys."""
        position = torch.arange(q.shape[2], device=q.device) // self.group
        position = (position + k.shape[2] - q.shape[2] // self.group)[None, None]
        factor = 1.0 if self.rotary is None else self.rotary.logit_factor
        return blocks_attention(
            q,
            k,
            v,
            height=_TILE * self.group,
            width=_TILE,
            scale=factor * self.head_dim**-0.5,
            bias=key_bias(padding, k),
            first=position - self.window + 1,
            last=position + (1 if is_causal else self.window),
        )

    def _turn(self, x: Tensor, start: int, group: int = 1) -> Tensor:
        """Rows (B, Hk, n * group, D) turned by their positions from `start` on."""
        if self.rotary is None:
            return x
        return self.rotary(x, start + torch.arange(x.shape[2], device=x.device) // group)

    def _merge(self, near: tuple[Tensor, Tensor] | None, far: Partial) -> Tensor:
        """The window and the mixture together, (B, Hk, rows, D)."""
        mixture = regularised(far, self.record.epsilon)
        if near is None:
            return mixture.out()
        out, lse = near
        c = self.calibration.view(self.kv_heads, self.group).repeat(1, out.shape[2] // self.group)
        c = c.to(out)  # (Hk, rows)
        if self.merge == "lse":
            return Partial.from_lse(out, lse).merge(mixture.scale(c.expand_as(lse))).out()
        gate = torch.where(far.den > 0, c.sigmoid(), 1.0)[..., None]
        return gate * out + (1 - gate) * mixture.out()

    def state(self, batch: int = 1) -> MixtureState:
        """A state without tokens."""
        like = self.o_proj.weight
        slots = (batch, self.kv_heads, self.record.num_components)
        wide = like.new_empty(0, dtype=compute_dtype(like.dtype))
        parts = 2 if self.rotary is None else 3
        recent = like.new_empty((*slots[:2], 0, parts * self.head_dim))
        return MixtureState(Partial.zeros(slots, self.head_dim, wide), recent, 0)

    def memory(self, hidden: Tensor, attn_mask: Tensor | None = None) -> MixtureState:
        """Compress tokens to slots once, for `attend`.

        Args:
            hidden: (B, M, embed_dim).
            attn_mask: bool key padding (B, 1, 1, M), True = a token that exists.

        Returns:
            A state that holds them; gradients reach ``hidden`` and the parameters through it.

        Raises:
            Unsupported: The layer has a window, which a memory has not.
        """
        self._check(hidden, attn_mask, None)
        if self.window:
            raise Unsupported(
                f"{type(self).__name__}: a memory has no last tokens for the window; "
                "make the layer with window=0."
            )
        found = self.state(len(hidden))
        if hidden.shape[1]:
            _, k, v = self._project(hidden)
            padding = None if attn_mask is None else attn_mask[:, 0]
            found.slots = _collect(k, v, self._densities(k)[1], padding)
            found.seen = hidden.shape[1]
        return found

    def attend(self, hidden: Tensor, memory: MixtureState) -> Tensor:
        """Attend from hidden states to what `memory` holds: cross attention.

        Args:
            hidden: (B, N, embed_dim).
            memory: Of `memory`, or a state of this layer. It is not changed.

        Returns:
            (B, N, embed_dim); of zeros where the memory holds nothing.

        Cost: the projections and 6 N K D operations per head, whatever the memory's length.
        """
        self._check(hidden, None, None)
        if self.window:
            raise Unsupported(f"{type(self).__name__}: attend needs a layer with window=0.")
        q, _, _ = self._project(hidden)
        a, _ = self._densities(q)
        slots = regularised(memory.slots, self.record.epsilon)
        out = linear.attend(q, slots, lambda x: a(x), log=True)
        return self.o_proj(joined(unfold(out, self.group)).to(hidden.dtype))

    def cost(self, batch: int, length: int, *, is_causal: bool = True) -> Cost:
        d, k, w = self.head_dim, self.record.num_components, self.window
        both = batch * (self.num_heads + self.kv_heads)
        flops = 4 * both * length * self.embed_dim * d
        served = max(length - w, 0)
        mixture = 6 * both * served * k * d
        if is_causal or w:
            mixture += 2 * batch * self.num_heads * served * min(CHUNK, served) * (k + d)
        flops += mixture * (2 if w and not is_causal else 1)
        flops += 4 * batch * self.num_heads * _tiles(length, w, is_causal) * _TILE**2 * d
        itemsize = self.o_proj.weight.element_size()
        kept = min(length, w) * d * (2 if self.rotary is None else 3)
        cache = batch * self.kv_heads * (k * (d + 2) * max(itemsize, 4) + kept * itemsize)
        return Cost(flops, self._io(batch, length), cache, units=0)


class MixtureState(LayerState):
    """What `GaussianMixtureAttention` keeps: slots, and the tokens of the window.

    Attributes:
        slots: Mass and mean value of the K slots, (B, Hk, K, D), of tokens older than the window.
        recent: The others, (B, Hk, n, 2 D or 3 D): key, value, and the turned key if there is one.
        seen: How many tokens there were.
    """

    def __init__(self, slots: Partial, recent: Tensor, length: int) -> None:
        self.slots, self.recent, self.seen = slots, recent, length

    @property
    def length(self) -> int:
        return self.seen

    @property
    def nbytes(self) -> int:
        parts = (self.slots.num, self.slots.den, self.slots.shift, self.recent)
        return sum(t.numel() * t.element_size() for t in parts)


def _own(layer: GaussianMixtureAttention, state: LayerState) -> MixtureState:
    if not isinstance(state, MixtureState):
        raise TypeError(
            f"{type(layer).__name__}: the state must come from its `state`; "
            f"got {type(state).__name__}."
        )
    return state


def _collect(k: Tensor, v: Tensor, b: Quadratic, padding: Tensor | None) -> Partial:
    """Slots (B, Hk, K, D) of keys and values."""
    return linear.collect(
        k,
        v,
        lambda x: b(x).log_softmax(-1),
        log=True,
        num_features=b.form.shape[-1],
        padding=padding,
    )


def _read(q: Tensor, slots: Partial, a: Quadratic) -> Partial:
    """From queries to slots; the scale is that of `slots_partial`."""
    parts = []
    for rows in q.split(_ROWS, 2):
        logs = a(rows)
        parts.append(linear.read(logs, slots, log=True).scale(-logs.logsumexp(-1)))
    return Partial.cat(parts, 2)


def _take(hidden: Tensor, index: Tensor) -> Tensor:
    """Tokens of (B, N, C) at int (B, N)."""
    return hidden.gather(1, index[..., None].expand_as(hidden))


def _flip(x: Tensor, group: int) -> Tensor:
    """Positions of (B, H, N * group, ...) in reverse, the rows of a position in their order."""
    return x.unflatten(2, (-1, group)).flip(2).flatten(2, 3)


def _tiles(length: int, window: int, is_causal: bool) -> int:
    """Tiles of keys that the window reads, over all tiles of queries."""
    if not window:
        return 0
    count = 0
    for start in range(0, length, _TILE):
        stop = min(start + _TILE, length) + (0 if is_causal else window - 1)
        count += -(-min(stop, length) // _TILE) - max(start - window + 1, 0) // _TILE
    return count


def _check_options(
    num_heads: int,
    kv_heads: int,
    head_dim: int | None,
    embed_dim: int,
    window: int,
    merge: str,
    rotary: Rotary | None,
) -> None:
    name = GaussianMixtureAttention.__name__
    for option, value in (
        ("embed_dim", embed_dim),
        ("num_heads", num_heads),
        ("kv_heads", kv_heads),
        ("head_dim", 1 if head_dim is None else head_dim),
    ):
        positive(name, option, value)
    not_negative(name, "window", window)
    one_of(name, "merge", merge, ("lse", "gate"))
    if num_heads % kv_heads:
        raise ValueError(f"{name}: kv_heads must divide num_heads, {num_heads}; got {kv_heads}.")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"{name}: num_heads must divide embed_dim, {embed_dim}, or head_dim be given; "
            f"got {num_heads}."
        )
    if not window and (merge == "gate" or rotary is not None):
        raise ValueError(
            f"{name}: merge='gate' and rotary are of use with a window only; pass window > 0."
        )
    width = embed_dim // num_heads if head_dim is None else head_dim
    if rotary is not None and rotary.dim != width:
        raise ValueError(f"{name}: rotary turns {rotary.dim} coordinates, head_dim is {width}.")
