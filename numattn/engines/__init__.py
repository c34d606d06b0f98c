"""The few computations that methods are made of, and the choice of the code that runs them.

Every engine has a torch form, which is the reference and the path on a CPU. `backend` chooses
among forms as `torch.nn.attention.sdpa_kernel` does; at present there is only ``"torch"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch import Tensor

from numattn.core.inputs import Unsupported

if TYPE_CHECKING:
    from numattn.core.method import Method

_BACKENDS = ("auto", "torch", "triton")
_chosen: ContextVar[str] = ContextVar("numattn_backend", default="auto")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the form of the engines inside a ``with`` block: "auto" or "torch".

    Raises:
        ValueError: There is no backend of this name.
        Unsupported: The backend cannot run.

    Example:
        >>> with backend("torch"):
        ...     resolve()
        'torch'
    """
    if name not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {name!r}.")
    if reason := _missing(name):
        raise Unsupported(reason)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def resolve() -> str:
    """The backend that runs now, "auto" resolved."""
    return "torch" if _chosen.get() == "auto" else _chosen.get()


def why_not(
    name: str, method: Method | None = None, query: Tensor | None = None, *others: Tensor
) -> str | None:
    """Why a backend could not run this method on these tensors, or None if it could."""
    if name not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {name!r}.")
    return _missing(name)


def _missing(name: str) -> str | None:
    if name == "triton":
        return "numattn has no Triton code yet; use backend('torch') or backend('auto')."
    return None
