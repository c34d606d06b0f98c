"""Implied attention weights of any method: attend with value = identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from numattn.measure.errors import Attend
    from numattn.measure.inputs import QKV


def identity_columns(x: QKV, first: int, last: int) -> Tensor:
    """Columns `first` to `last` of the identity as a value, (B, Hk, N, last - first)."""
    eye = x.v.new_zeros(x.length, last - first)
    eye[first:last].fill_diagonal_(1)
    return eye.expand(*x.v.shape[:2], -1, -1)


def implied_weights(fn: Attend, x: QKV) -> Tensor:
    r"""The matrix :math:`\hat P` with which a method that is linear in value attends.

    Args:
        fn: The method, as `numattn.measure.attend` binds it.
        x: The input; its type is the type in which the method runs.

    Returns:
        (B, H, N, N), dense: for short inputs. Differentiable where the method is.

    Example:
        >>> import numattn
        >>> from numattn.measure import attend, synthetic
        >>> x = synthetic("gaussian", 8, heads=1)
        >>> implied_weights(attend(numattn.Exact(), x), x).sum(-1)
        tensor([[[1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000]]])
    """
    return fn(x.q, x.k, identity_columns(x, 0, x.length))
