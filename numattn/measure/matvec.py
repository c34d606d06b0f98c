r"""Products with attention matrices that are never formed.

A method that is linear in value attends with a matrix :math:`\hat P` that depends on queries and
keys alone. One call with the value V is :math:`\hat P V`; the gradient of
:math:`\langle Y, \hat P V \rangle` with respect to V is :math:`\hat P^T Y`. Norms, spectra and
single rows of :math:`\hat P` need no more than that, at any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from numattn.exact import Exact
from numattn.measure.errors import Attend, attend
from numattn.measure.inputs import QKV

if TYPE_CHECKING:
    import numpy.typing as npt
    from scipy.sparse.linalg import LinearOperator

WIDTH = 256  # columns of a call


def transposed(fn: Attend, x: QKV, y: Tensor) -> Tensor:
    r"""The product :math:`\hat P^T Y` of a method's weights.

    Args:
        fn: The method, as `numattn.measure.attend` binds it.
        x: The input; its type is the type in which the method runs.
        y: (B, H, N, w).

    Returns:
        (B, Hk, N, w). The query heads that share a key head are added up.

    Raises:
        ValueError: The method passes no gradient on to value.

    Cost: one call forward and backward at value width w.
    """
    value = x.v.new_zeros(*x.v.shape[:3], y.shape[3]).requires_grad_()
    with torch.enable_grad():
        out = fn(x.q.detach(), x.k.detach(), value)
    if not out.requires_grad:
        raise ValueError(
            "transposed: fn passes no gradient on to value, which its transpose is taken from. "
            "Estimate its errors with with_weights=False."
        )
    return torch.autograd.grad(out, value, y.to(out))[0]


def implied_rows(fn: Attend, x: QKV, rows: Tensor) -> Tensor:
    r"""Some rows of the matrix :math:`\hat P` with which a method that is linear in value attends.

    They are columns of the transpose, each query head of a group having columns of its own.

    Args:
        fn: The method, as `numattn.measure.attend` binds it.
        x: The input; its type is the type in which the method runs.
        rows: Positions of queries, int (n,).

    Returns:
        (B, H, n, N), without gradient.

    Raises:
        ValueError: The method passes no gradient on to value.

    Cost: one call forward and backward at value width n H / Hk.

    Example:
        >>> import numattn
        >>> from numattn.measure import attend, synthetic
        >>> x = synthetic("gaussian", 8, heads=1)
        >>> implied_rows(attend(numattn.Exact(), x), x, torch.tensor([0, 5])).shape
        torch.Size([1, 1, 2, 8])
    """
    batch, heads, length, _ = x.q.shape
    n, group = rows.numel(), x.group
    head = torch.arange(heads, device=rows.device)[:, None]
    column = head % group * n + torch.arange(n, device=rows.device)  # (H, n)
    y = x.q.new_zeros(batch, heads, length, group * n)
    y[:, head, rows, column] = 1
    found = transposed(fn, x, y)  # (B, Hk, N, group * n)
    return found.unflatten(-1, (group, n)).permute(0, 1, 3, 4, 2).flatten(1, 2)


def exact_operator(x: QKV, head: int) -> LinearOperator:
    """The exact weights P of a head, in float64.

    Args:
        x: The input.
        head: b * H + h.

    Returns:
        A `scipy.sparse.linalg.LinearOperator` (N, N), with its transpose.

    Cost: 2 N^2 (D + w) operations for a product with w columns, about twice as many for one with
    the transpose, in memory that grows with N.
    """
    _check_head(x, head)
    one = x.single(*divmod(head, x.q.shape[1])).to(torch.float64)
    return _operator(attend(Exact(), one), one, 0)


def method_operator(
    fn: Attend, x: QKV, head: int, *, dtype: torch.dtype = torch.float64
) -> LinearOperator:
    r"""The weights :math:`\hat P` with which a method attends in one head.

    Args:
        fn: The method, as `numattn.measure.attend` binds it: calls on the same queries and keys
            must use the same weights, and be linear in value.
        x: The input.
        head: b * H + h.
        dtype: Type in which the method runs. What goes in and comes out is float64.

    Returns:
        A `scipy.sparse.linalg.LinearOperator` (N, N), with its transpose.

    Cost: a call of the method for each 256 columns, forward and backward for the transpose. The
    call is on all heads of `x`, for the draws of a method may depend on how many there are.
    """
    y = x.to(dtype)
    _check_head(y, head)
    return _operator(fn, y, head)


def error_operator(
    fn: Attend, x: QKV, head: int, *, dtype: torch.dtype = torch.float64
) -> LinearOperator:
    r"""The error :math:`\hat P - P` of the weights of one head; see `method_operator`.

    Its norms are estimated by `numattn.measure.frobenius_norm` and `numattn.measure.spectral_norm`.

    Example:
        >>> from numattn.measure import attend, synthetic
        >>> from numattn.sparse import Window
        >>> x = synthetic("local", 64, heads=1)
        >>> error = error_operator(attend(Window(8), x), x, 0)
        >>> rows_sum_to_one = abs(error @ torch.ones(64).numpy()).max() < 1e-12
        >>> error.shape, bool(rows_sum_to_one)
        ((64, 64), True)
    """
    return method_operator(fn, x, head, dtype=dtype) - exact_operator(x, head)


def _check_head(x: QKV, head: int) -> None:
    heads = x.q.shape[0] * x.q.shape[1]
    if not 0 <= head < heads:
        raise ValueError(f"head must be between 0 and {heads - 1}, b * H + h; got {head}.")


def _operator(fn: Attend, x: QKV, head: int) -> LinearOperator:
    from scipy.sparse.linalg import LinearOperator

    b, h = divmod(head, x.q.shape[1])
    shared = h // x.group

    def forward(part: Tensor) -> Tensor:
        value = x.v.new_zeros(*x.v.shape[:3], part.shape[1])
        value[b, shared] = part
        with torch.no_grad():
            return fn(x.q, x.k, value)[b, h]

    def backward(part: Tensor) -> Tensor:
        y = x.q.new_zeros(*x.q.shape[:3], part.shape[1])
        y[b, h] = part
        return transposed(fn, x, y)[b, shared]

    def on_arrays(product: Callable[[Tensor], Tensor]) -> Callable[[Any], npt.NDArray[Any]]:
        def call(columns: Any) -> npt.NDArray[Any]:
            given = torch.as_tensor(columns, dtype=torch.float64)
            parts = given.reshape(x.length, -1).to(x.v).split(WIDTH, 1)
            found = torch.cat([product(part).double() for part in parts], 1)
            return found.reshape(given.shape).cpu().numpy()

        return call

    there, back = on_arrays(forward), on_arrays(backward)
    return LinearOperator(
        (x.length, x.length),
        matvec=there,
        rmatvec=back,
        matmat=there,
        rmatmat=back,
        dtype=np.float64,
    )
