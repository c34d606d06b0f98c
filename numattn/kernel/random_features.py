r"""Random features of the exponential kernel: how directions are drawn, and their variance.

.. math:: e^{x \cdot y} = \mathbb{E}_{\omega \sim N(0, I)} \left[ \det(I - 4A)^{1/2}\;
          e^{2 \omega^T A \omega + \omega^T (I - 4A)^{1/2} z - |x|^2/2 - |y|^2/2} \right],
          \qquad z = x + y,

for every symmetric A with eigenvalues below 1/8. The logarithm of the relative second moment is
:math:`\log\det(I - 4A) - \frac12 \log\det(I - 8A) + z^T (I - 8A)^{-1} z`; at A = 0 that is
:math:`|z|^2`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from numattn.core.inputs import Inputs, unfold
from numattn.core.linalg import draw, masked_mean, orthogonal_gaussian

Kind = Literal["positive", "hyperbolic", "favor++", "anisotropic"]
Precondition = Literal["auto", "balance", "shift", "none"]
Draw = Literal["orthogonal", "independent", "simplex", "qmc"]

DRAWS = ("orthogonal", "independent", "simplex", "qmc")


def directions(
    kind: Draw,
    rows: int,
    dim: int,
    heads: int,
    generator: Generator | None,
    device: torch.device,
) -> Tensor:
    """Random directions, each distributed as N(0, I), computed on the CPU for every device.

    Args:
        kind: ``"independent"``; ``"orthogonal"`` in blocks of ``dim``; ``"simplex"``, in blocks of
            ``dim`` the corners of a regular simplex, rotated at random; ``"qmc"``, scrambled Sobol
            points, shifted at random modulo 1.
        rows: How many in each head.
        dim: D; at least 2 for a simplex.
        heads: Hk; heads are independent.
        generator: Source; torch's global one when None.
        device: Where the result lies.

    Returns:
        float64 (heads, rows, dim).
    """
    cpu = torch.device("cpu")
    if kind == "independent":
        found = draw((heads, rows, dim), generator, cpu)
    elif kind == "orthogonal":
        found = orthogonal_gaussian(rows, dim, heads, generator, cpu)
    elif kind == "simplex":
        found = _simplex(rows, dim, heads, generator, cpu)
    else:
        found = _sobol(rows, dim, heads, generator, cpu)
    return found.to(device)


def _simplex(
    rows: int, dim: int, heads: int, generator: Generator | None, device: torch.device
) -> Tensor:
    """Corners of simplices: an orthonormal basis less its mean, and lengths of Gaussian vectors."""
    if dim < 2:
        raise ValueError("performer: draw='simplex' needs a head size of 2 or more; got 1.")
    blocks = -(-rows // dim)
    basis = orthogonal_gaussian(dim, dim, heads * blocks, generator, device)
    basis = basis / basis.norm(dim=-1, keepdim=True)
    corners = (basis - basis.mean(1, keepdim=True)) / math.sqrt(1 - 1 / dim)
    norms = draw((heads, rows, dim), generator, device).norm(dim=-1)
    return corners.reshape(heads, blocks * dim, dim)[:, :rows] * norms[..., None]


def _sobol(
    rows: int, dim: int, heads: int, generator: Generator | None, device: torch.device
) -> Tensor:
    """Normal quantiles of Sobol points.

    The engine's own scramble moves points on a grid, which cuts the tails off; a continuous shift
    on top makes every point exactly uniform.
    """
    seeds = (draw((heads,), generator, device, "uniform") * 2**31).long().tolist()
    points = torch.stack(
        [SobolEngine(dim, scramble=True, seed=s).draw(rows, dtype=torch.float64) for s in seeds]
    )
    shift = draw((heads, 1, dim), generator, device, "uniform")
    return torch.special.ndtri(((points + shift) % 1.0).clamp(min=2.0**-53))


def best_damping(mean_square: Tensor, dim: int) -> Tensor:
    r"""The A that minimises the log second moment at :math:`|z|^2` = mean_square, not above 0.

    :math:`A = (1 - 1/\rho) / 8` with :math:`\rho = 2d / (\sqrt{(d + 2 s)^2 + 8 d s} + d + 2 s)` for
    s = mean_square in d = dim dimensions.
    """
    twice = dim + 2 * mean_square
    return (1 - ((twice.square() + 8 * dim * mean_square).sqrt() + twice) / (2 * dim)) / 8


def damp(projection: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    r"""What A makes of directions.

    Args:
        projection: :math:`\omega`, (..., m, D).
        damping: A, (..., D, D), symmetric with eigenvalues below 1/8.

    Returns:
        :math:`(I - 4A)^{1/2} \omega`, (..., m, D), and
        :math:`2 \omega^T A \omega + \frac12 \log\det(I - 4A)`, (..., m), both in float64.
    """
    values, vectors = torch.linalg.eigh(damping.double())
    turned = projection.double() @ vectors
    stretch = 1 - 4 * values  # (..., D)
    offset = 2 * (turned.square() @ values[..., None])[..., 0]
    stretched = (turned * stretch.sqrt()[..., None, :]) @ vectors.mT
    return stretched, offset + stretch.log().sum(-1, keepdim=True) / 2


def whiten(damping: Tensor) -> tuple[Tensor, Tensor]:
    """R and c of the log second moment c + |R^T z|^2: (..., D, D) and (...)."""
    values, vectors = torch.linalg.eigh(damping.double())
    rest = 1 - 8 * values
    return vectors / rest.sqrt()[..., None, :], ((1 - 4 * values).log() - rest.log() / 2).sum(-1)


def log_relative_variance(log_second: Tensor, in_pairs: bool) -> Tensor:
    r"""Log relative variance of one feature, without overflow; -inf where it is 0.

    Args:
        log_second: Logarithm of the relative second moment, not negative.
        in_pairs: Features come as :math:`e^{\pm \omega \cdot z}` with A = 0. The mean of m of them
            then has this variance over m all the same.
    """
    logs = log_second.clamp(min=0)
    log_less = torch.expm1(-logs).neg().log()  # log(1 - e^-s)
    return logs + (2 if in_pairs else 1) * log_less


class Statistics(NamedTuple):
    """The state tensors that statistics determine; None is the identity."""

    center: Tensor | None = None
    balance: Tensor | None = None
    damping: Tensor | None = None


def preconditioned(x: Inputs, tensors: Statistics) -> tuple[Tensor, Tensor]:
    """The vectors x (B, Hk, rows, D) and y (B, Hk, Nk, D) that the features see, in float64."""
    root = abs(x.scale) ** 0.5
    q, k = math.copysign(root, x.scale) * x.q.double(), x.k.double()
    if tensors.center is not None:
        k = k - tensors.center.double()[..., None, :]
    k = root * k
    if tensors.balance is not None:
        balance = tensors.balance.double()
        q, k = q @ balance, k @ torch.linalg.inv(balance).mT
    return q, k


@torch.no_grad()
def preconditioner(x: Inputs, kind: str) -> tuple[Tensor | None, Tensor | None]:
    """Center c (B, Hk, D), and M (B, Hk, D, D) that minimises tr(M^T Sq M) + tr(M^-1 Sk M^-T).

    With Sq = L L^T and the eigenvalues U Z U^T of L^T Sk L, the minimiser is M = L^-T U Z^(1/4).
    """
    if kind == "none":
        return None, None
    q, k = x.q.double(), x.k.double()
    sign = math.copysign(1.0, x.scale)  # x = sign * root * q, y = root * k
    center = sign * masked_mean(q, x.query_padding) + masked_mean(k, x.padding)
    if kind == "shift":
        return center[:, :, 0], None
    factor = torch.linalg.cholesky(_definite(_second_moment(q, x.query_padding)))
    moment = factor.mT @ _definite(_second_moment(k - center, x.padding)) @ factor
    values, vectors = torch.linalg.eigh(moment)
    right = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)
    return center[:, :, 0], right * values.clamp(min=values[..., -1:] * 1e-12)[..., None, :] ** 0.25


@torch.no_grad()
def damping_of(x: Inputs, kind: Kind, tensors: Statistics) -> Tensor:
    """A (B, Hk, D, D) from the mean of z z^T over all pairs, z = x + y after preconditioning."""
    q, y = preconditioned(x, tensors)
    cross = masked_mean(q, x.query_padding).mT @ masked_mean(y, x.padding)
    moment = _second_moment(q, x.query_padding) + _second_moment(y, x.padding) + cross + cross.mT
    if kind == "favor++":
        dim = q.shape[3]
        mean_square = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
        return best_damping(mean_square, dim)[..., None, None] * torch.eye(dim).to(q)
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * best_damping(values.clamp(min=0), 1)[..., None, :]) @ vectors.mT


def _second_moment(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean of x x^T over the tokens that exist."""
    if padding is None:
        return x.mT @ x / x.shape[2]
    x = x * padding[..., None]
    return x.mT @ x / padding.sum(-1).clamp(min=1)[..., None, None]


def _definite(moment: Tensor) -> Tensor:
    """Raised by a millionth of its mean diagonal."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return moment + (1e-6 * mean + 1e-30) * eye


def _pairs(x: Inputs, batch: int, most: int) -> tuple[Tensor, Tensor]:
    """Positions of queries and of keys of one sequence, at most so many, at even distances."""
    found = []
    rows = None if x.query_padding is None else x.query_padding[..., :: x.group]
    for exists, length in ((rows, x.q.shape[2] // x.group), (x.padding, x.k.shape[2])):
        at = torch.arange(length, device=x.k.device)
        if exists is not None:
            at = at[exists.expand(len(x.k), -1, -1)[batch, 0]]
        few = min(most, len(at))
        found.append(at[torch.arange(few, device=at.device) * len(at) // max(few, 1)])
    return found[0], found[1]


def predict(x: Inputs, num_features: int, in_pairs: bool, tensors: Statistics, most: int) -> Tensor:
    r"""What is to be expected of one weight, for every query head.

    Args:
        x: Inputs; the values do not matter.
        num_features: m.
        in_pairs: As in `log_relative_variance`.
        tensors: The statistics that the features use.
        most: Tokens of one sequence that are looked at.

    Returns:
        float64 (B, H, 4): decimal logarithm of the root mean relative variance, and mean, median
        and 95 % quantile of :math:`|x + y|^2`.
    """
    q, y = preconditioned(x, tensors)
    q = unfold(q, x.group)
    if tensors.damping is None:
        turned, constant = (q, y), q.new_zeros(y.shape[:2])
    else:
        right, constant = whiten(tensors.damping.expand(*y.shape[:2], -1, -1))
        turned = q @ right.repeat_interleave(x.group, 1), y @ right
    found = q.new_full((*q.shape[:2], 4), torch.nan)
    for b in range(q.shape[0]):
        i, j = _pairs(x, b, most)
        seen = (j <= i[:, None]) if x.is_causal else torch.ones(len(i), len(j)).bool()
        for h in range(q.shape[1]) if seen.any() else ():
            g = h // x.group
            square = _squares(q[b, h, i], y[b, g, j])[seen]
            second = constant[b, g] + _squares(turned[0][b, h, i], turned[1][b, g, j])[seen]
            logs = log_relative_variance(second, in_pairs)
            mean = logs.logsumexp(0) - math.log(len(logs) * num_features)
            ranks = [square.kthvalue(math.ceil(p * len(logs))).values for p in (0.5, 0.95)]
            found[b, h] = torch.stack([mean / 2 / math.log(10), square.mean(), *ranks])
    return found


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """|x_i + y_j|^2 of rows of two matrices."""
    return torch.cdist(x, -y).square()
