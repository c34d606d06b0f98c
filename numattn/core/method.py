"""Method: the base of the option records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Generator, Tensor, nn

from numattn.core.cost import Cost, Shape
from numattn.core.drawn import Draw, draw_all
from numattn.core.info import Info
from numattn.core.inputs import Unsupported, check
from numattn.core.state import State

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Method:
    """Options of one attention method; calling it attends.

    A record is what sweeps, tables and models carry about: immutable, comparable, written to and
    read from plain dictionaries. The mathematics is in `function`.
    """

    info: ClassVar[Info]
    function: ClassVar[Callable[..., Tensor]]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        generator: Generator | None = None,
        **tensors: Tensor,
    ) -> Tensor:
        """Attend with these options.

        Args:
            query: (B, H, Nq, D).
            key: (B, Hk, Nk, D).
            value: (B, Hk, Nk, E).
            attn_mask: As `Info.mask` allows; bool, True = attend.
            is_causal: Position i attends to positions j <= i.
            scale: Factor of the logits, by default D ** -0.5.
            enable_gqa: Allow H to be a multiple of Hk.
            generator: For methods that draw.
            **tensors: The method's `Info.state_tensors`, where it should not draw or fit them.

        Returns:
            (B, H, Nq, E), in the query's type.
        """
        extra = {"generator": generator} if self.info.random else {}
        if generator is not None and not self.info.random:
            raise ValueError(f"{self.info.name} draws nothing; call it without a generator.")
        return type(self).function(
            query,
            key,
            value,
            **self.options(),
            **tensors,
            **extra,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    def options(self) -> dict[str, Any]:
        """The options as keywords of the function."""
        return asdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Name and options, for files; `numattn.get` takes them back."""
        return {"name": self.info.name, **self.options()}

    def with_budget(self, value: int) -> Self:
        """The same options at another budget."""
        if self.info.budget is None:
            raise Unsupported(f"{self.info.name} has no budget to set.")
        return replace(self, **{self.info.budget: value})

    @property
    def fitted(self) -> bool:
        """Whether a call without state tensors fits them on its own input; see `Info`."""
        return self.info.fits_causal

    def exact_at(self, length: int) -> Self | None:
        """Options at which it equals its exact target on `length` tokens; None if it never does."""
        return None

    def cost(self, shape: Shape) -> Cost:
        """What a call of this shape costs."""
        raise Unsupported(f"{self.info.name} does not say what it costs.")

    def fit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        generator: Generator | None = None,
    ) -> dict[str, Tensor]:
        """The state tensors that the function would draw or fit on this batch, by keyword."""
        draws = self.draws(key.shape[1], key.shape[3]) if self.info.random else {}
        if draws:
            check(self.info, query, key, key, attn_mask, False, scale, enable_gqa)
        return draw_all(draws, generator, key.device)

    def draws(self, num_heads: int, head_dim: int) -> dict[str, Draw]:
        """The state tensors that are drawn, by name; their shapes know no length and no batch."""
        return {}

    def refuse(self, tensors: dict[str, Tensor]) -> None:
        """Raise TypeError for tensors that are not among the method's state tensors."""
        unknown = [name for name in tensors if name not in self.info.state_tensors]
        if unknown:
            raise TypeError(f"{self.info.name} takes no tensor named {', '.join(unknown)}.")

    def module(self, *, num_heads: int, head_dim: int) -> nn.Module:
        """A module that owns the method's tensors.

        Args:
            num_heads: Key heads, Hk.
            head_dim: Width of query and key, D.
        """
        raise Unsupported(f"{self.info.name} keeps no tensors; call the record or its function.")

    def state(
        self,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **tensors: Tensor,
    ) -> State:
        """What decoding keeps, filled with a prefix (which may have length 0).

        Args:
            key: (B, Hk, N, D).
            value: (B, Hk, N, E).
            scale: As in a call.
            enable_gqa: As in a call.
            **tensors: The method's state tensors, the same as in the prefill call.
        """
        raise Unsupported(f"{self.info.name} cannot decode step by step.")
