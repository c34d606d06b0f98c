"""How the components of a mixture are used: usage, dead components, what routing knows of tokens.

Matplotlib is imported when a picture is drawn, without its window system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from numattn.core.inputs import one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from numpy.typing import ArrayLike

Average = Literal["min", "geometric", "arithmetic", "max"]

_AVERAGES = ("min", "geometric", "arithmetic", "max")
_DEAD_SHARE = 20  # a component is dead below 1 / (20 K), a twentieth of its equal share

# Okabe and Ito's colours, told apart by colour-blind readers too.
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#6b6b6b"


class UsageEntropy(NamedTuple):
    """What `usage_entropy` returns, each of the leading shape of the usage.

    Attributes:
        nats: The entropy, from 0 to log K.
        relative: The entropy over log K, from 0 to 1.
    """

    nats: Tensor
    relative: Tensor


def component_usage(responsibilities: Tensor, exists: Tensor | None = None) -> Tensor:
    r"""Mean responsibility of every component, :math:`u_k = \frac1N \sum_n \gamma_k(x_n)`.

    Args:
        responsibilities: :math:`\gamma`, (..., N, K), rows that sum to one.
        exists: bool, broadcastable to (..., N), True = a token; all are when None.

    Returns:
        (..., K) in float64, sums to one; zeros where there is no token. Gradients flow through it.

    Cost: N K additions.

    Example:
        >>> component_usage(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist()
        [0.75, 0.25]
    """
    gamma, count = _existing(responsibilities, exists)
    return gamma.sum(-2) / count.clamp(min=1)[..., None]


def usage_entropy(usage: Tensor) -> UsageEntropy:
    r"""Entropy of the usage, :math:`-\sum_k u_k \log u_k`, in nats and relative to log K.

    A collapsed mixture is near 0, one whose components serve equally many tokens is at log K. The
    exponential of the entropy is the effective number of components. Its gradients make it a term
    of a loss, against collapse; a component whose usage is zero gets none.

    Args:
        usage: u, (..., K), not negative, sums to one.

    Returns:
        `UsageEntropy`. Relative to log K a single component counts as 1, for it serves its share.

    Example:
        >>> usage_entropy(torch.tensor([0.5, 0.5, 0.0, 0.0])).relative.item()
        0.5
    """
    entropy = _entropy(usage)
    if usage.shape[-1] == 1:
        return UsageEntropy(entropy, torch.ones_like(entropy))
    return UsageEntropy(entropy, entropy / math.log(usage.shape[-1]))


def dead_components(usage: Tensor, threshold: float | None = None) -> Tensor:
    """Which components serve hardly any token.

    Args:
        usage: (..., K), as `component_usage` returns it.
        threshold: Usage below which a component is dead; 1 / (20 K) when None.

    Returns:
        bool (..., K).

    Example:
        >>> dead_components(torch.tensor([0.6, 0.39, 0.01])).tolist()
        [False, False, True]
    """
    return usage < (1 / (_DEAD_SHARE * usage.shape[-1]) if threshold is None else threshold)


def normalized_mutual_information(
    labels_a: ArrayLike | Tensor, labels_b: ArrayLike | Tensor, average: Average = "arithmetic"
) -> float:
    r"""Mutual information of two labellings over a mean of their entropies.

    With :math:`p_{ab}` the share of tokens that have label a in one and b in the other,

    .. math:: \mathrm{NMI} = \frac{\sum_{ab} p_{ab} \log \frac{p_{ab}}{p_a p_b}}
              {\mathrm{mean}(H_a, H_b)}, \quad H = -\sum_a p_a \log p_a.

    It is 1 if and only if each labelling tells the other, whatever the labels are called, and 0
    for independent ones.

    Args:
        labels_a: N labels of any kind that can be sorted, (N,).
        labels_b: N labels, (N,).
        average: The mean of the two entropies, one of "min", "geometric", "arithmetic", "max".

    Returns:
        A number from 0 to 1. Two labellings that both have one cluster, or none, give 1, for they
        agree; where only one of them has one cluster there is nothing to learn, and it is 0. This
        is scikit-learn's definition.

    Cost: N log N; memory is linear in N, for only pairs of labels that occur are counted.

    Limits: not adjusted for chance. Independent labellings with A and B labels have a mutual
    information of about (A - 1)(B - 1) / (2 N) nats, so N should be many times A B.

    Raises:
        ValueError: The labels are not two equally long rows, or an unknown average.

    References:
        N. X. Vinh, J. Epps, J. Bailey, "Information Theoretic Measures for Clusterings
        Comparison", 2010, https://jmlr.org/papers/v11/vinh10a.html.

    Example:
        >>> normalized_mutual_information(["noun", "noun", "verb"], [4, 4, 0])
        1.0
    """
    one_of("normalized_mutual_information", "average", average, _AVERAGES)
    a, b = _codes(labels_a), _codes(labels_b)
    if a.dim() != 1 or a.shape != b.shape:
        raise ValueError(
            "normalized_mutual_information: the labels must be two rows of the same length; got "
            f"{tuple(a.shape)} and {tuple(b.shape)}."
        )
    total = len(a)
    pair, count = torch.stack([a, b]).unique(dim=1, return_counts=True)
    joint = count.double() / total
    p_a, p_b = a.bincount().double() / total, b.bincount().double() / total
    information = torch.special.xlogy(joint, joint / (p_a[pair[0]] * p_b[pair[1]])).sum()
    return _normalised(information, _entropy(p_a), _entropy(p_b), average).item()


@torch.no_grad()
def soft_normalized_mutual_information(
    responsibilities: Tensor,
    categories: ArrayLike | Tensor,
    average: Average = "arithmetic",
    exists: Tensor | None = None,
) -> Tensor:
    r"""`normalized_mutual_information` of the component and a category of the token.

    The component of token n is drawn from its responsibilities, so the two have the joint law
    :math:`p_{kc} = \frac1N \sum_n \gamma_k(x_n) [c_n = c]`. One-hot responsibilities give the
    index of the hard labels. It is below 1 where a token is shared between components, even if
    each component has one category only.

    Args:
        responsibilities: :math:`\gamma`, (..., N, K), rows that sum to one.
        categories: c, labels that can be sorted, (N,) or broadcastable to (..., N).
        average: The mean of the two entropies, one of "min", "geometric", "arithmetic", "max".
        exists: bool, broadcastable to (..., N), True = a token; all are when None.

    Returns:
        (...), in float64, from 0 to 1. Edge cases as in `normalized_mutual_information`.

    Cost: N K additions, and (...) C K numbers for C categories.

    Limits: as of `normalized_mutual_information`.

    Raises:
        ValueError: An unknown average.

    Example:
        >>> gamma = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> soft_normalized_mutual_information(gamma, [7, 7, 3, 3]).item()
        1.0
        >>> soft_normalized_mutual_information(gamma, [7, 3, 7, 3]).item()
        0.0
    """
    one_of("soft_normalized_mutual_information", "average", average, _AVERAGES)
    gamma, count = _existing(responsibilities, exists)
    codes = _codes(categories).to(gamma.device)
    number = int(codes.max()) + 1 if codes.numel() else 0
    joint = gamma.new_zeros(*gamma.shape[:-2], number, gamma.shape[-1])
    joint.scatter_add_(-2, codes[..., None].expand_as(gamma), gamma)
    joint /= count.clamp(min=1)[..., None, None]
    p_c, p_k = joint.sum(-1), joint.sum(-2)
    # Where a product of margins is 0, so is the joint probability: 0 log 0 = 0.
    apart = p_c[..., None] * p_k[..., None, :]
    ratio = joint / apart.masked_fill(apart == 0, 1.0)
    information = torch.special.xlogy(joint, ratio).sum((-1, -2))
    return _normalised(information, _entropy(p_k), _entropy(p_c), average)


def _existing(responsibilities: Tensor, exists: Tensor | None) -> tuple[Tensor, Tensor]:
    """Responsibilities in float64, zeros where there is no token, and the number of tokens."""
    gamma = responsibilities.double()
    if exists is None:
        return gamma, gamma.new_full((), gamma.shape[-2])
    return gamma.masked_fill(~exists[..., None], 0.0), exists.sum(-1).double()


def _codes(labels: ArrayLike | Tensor) -> Tensor:
    """Labels as numbers 0, 1, ... without gaps, in the shape they came in."""
    array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    codes = np.unique(array, return_inverse=True)[1]
    return torch.from_numpy(np.asarray(codes, dtype=np.int64).reshape(array.shape))


def _entropy(p: Tensor) -> Tensor:
    """Entropy in nats. What is not there adds nothing, and gets no gradient, which is infinite."""
    return torch.special.entr(p.masked_fill(p == 0, 1.0)).sum(-1)


def _normalised(information: Tensor, h_a: Tensor, h_b: Tensor, average: Average) -> Tensor:
    """Mutual information over a mean of the entropies, its limits where nothing is split."""
    nothing = torch.finfo(torch.float64).eps
    mean = {
        "min": torch.minimum(h_a, h_b),
        "geometric": (h_a * h_b).sqrt(),
        "arithmetic": (h_a + h_b) / 2,
        "max": torch.maximum(h_a, h_b),
    }[average]
    alike = ((h_a <= nothing) & (h_b <= nothing)).double()
    ratio = (information / mean.clamp(min=nothing)).clamp(0.0, 1.0)
    return torch.where(information > nothing, ratio, alike)


def plot_usage(usage: Tensor, *, threshold: float | None = None, axes: Axes | None = None) -> Axes:
    """Bars of the usage of one head's components, the dead ones marked.

    Args:
        usage: (K,), as `component_usage` returns it.
        threshold: As in `dead_components`.
        axes: Where to draw; a new figure when None.

    Returns:
        The axes.

    Raises:
        ValueError: ``usage`` has not one dimension.
        ImportError: Matplotlib is not installed.
    """
    _check_dimensions("plot_usage: usage", usage, ("K",))
    axes = _axes() if axes is None else axes
    number = usage.shape[0]
    dead = dead_components(usage, threshold)
    for chosen, color, name in ((~dead, _BLUE, "alive"), (dead, _ORANGE, "dead")):
        at = chosen.nonzero()[:, 0].tolist()
        if at:  # a layout cannot place bars that are not there
            axes.bar(at, usage[chosen].tolist(), color=color, label=f"{name} ({len(at)})")
    axes.axhline(1 / number, color=_GREY, linewidth=1, linestyle="--", label=f"1/{number}")
    # The bar of a dead component is too low to be seen: a cross stands on the axis.
    if dead.any():
        at = dead.nonzero()[:, 0].tolist()
        axes.plot(at, [0.0] * len(at), "x", color=_ORANGE, clip_on=False, zorder=3)
    axes.set(xlabel="component", ylabel="usage", xlim=(-0.7, number - 0.3))
    axes.set_title(f"entropy {usage_entropy(usage).relative.item():.2f} of log K", loc="left")
    axes.legend(frameon=False)
    _whole_ticks(axes.xaxis)
    return _clean(axes)


def plot_responsibilities(
    responsibilities: Tensor,
    *,
    tokens: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    r"""Heat map of one head's responsibilities, tokens down and components across.

    Args:
        responsibilities: :math:`\gamma`, (N, K).
        tokens: N names for the rows; they are numbered when None.
        axes: Where to draw; a new figure when None.

    Returns:
        The axes. A scale of the colours, from 0 to 1, stands beside them.

    Raises:
        ValueError: ``responsibilities`` has not two dimensions, or the names are not N.
        ImportError: Matplotlib is not installed.
    """
    _check_dimensions("plot_responsibilities: responsibilities", responsibilities, ("N", "K"))
    length = responsibilities.shape[0]
    if tokens is not None and len(tokens) != length:
        raise ValueError(
            f"plot_responsibilities: {len(tokens)} names were given for {length} tokens."
        )
    axes = _axes() if axes is None else axes
    image = axes.imshow(
        responsibilities.detach().cpu().double().numpy(),
        vmin=0.0,
        vmax=1.0,
        cmap="Blues",
        aspect="auto",
        interpolation="nearest",
    )
    axes.figure.colorbar(image, ax=axes, label="responsibility")
    axes.set(xlabel="component", ylabel="token")
    _whole_ticks(axes.xaxis)
    _whole_ticks(axes.yaxis)
    if tokens is not None:
        axes.set_yticks(range(length), list(tokens))
    return axes


def plot_mutual_information(information: Tensor, *, axes: Axes | None = None) -> Axes:
    """Bars of the normalised mutual information of each head.

    Args:
        information: (H,), as `soft_normalized_mutual_information` returns it.
        axes: Where to draw; a new figure when None.

    Returns:
        The axes, whose height is the whole range from 0 to 1.

    Raises:
        ValueError: ``information`` has not one dimension.
        ImportError: Matplotlib is not installed.
    """
    _check_dimensions("plot_mutual_information: information", information, ("H",))
    axes = _axes() if axes is None else axes
    heads = range(information.shape[0])
    bars = axes.bar(heads, information.tolist(), color=_BLUE)
    if len(heads) <= 16:
        axes.bar_label(bars, fmt="{:.2f}", padding=2)
        axes.set_xticks(heads)
    axes.set(xlabel="head", ylabel="normalised mutual information", ylim=(0.0, 1.05))
    return _clean(axes)


def _check_dimensions(what: str, x: Tensor, shape: tuple[str, ...]) -> None:
    if x.dim() != len(shape):
        want = ", ".join(shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{what} must have shape ({want}), one head's; got {tuple(x.shape)}.")


def _axes() -> Axes:
    """Axes of a new figure that no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def _whole_ticks(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))


def _clean(axes: Axes) -> Axes:
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes
