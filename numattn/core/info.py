"""Info: what is known about a method besides its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Family = Literal["exact", "sparse", "lowrank", "kernel", "latent", "tensor"]

FAMILIES: tuple[Family, ...] = ("exact", "sparse", "lowrank", "kernel", "latent", "tensor")


@dataclass(frozen=True, kw_only=True)
class Info:
    """Facts about one method, read by the registry, the checks, the harness and the docs.

    Attributes:
        name: The name in the registry, on the command line, of the file and of its test.
        family: The pillar it belongs to.
        summary: One line for tables.
        paper: Link to the source.
        complexity: Cost for people, such as ``"N m d + m^3"``; `Method.cost` is the number.
        budget: The option that trades cost for accuracy, or None.
        approximates: ``"softmax"``, or ``"own"`` where the method has its own exact target.
        causal: ``"native"``, ``"lifted"`` (through `numattn.engines.lift`) or ``"no"``.
        why_not_causal: The reason for ``"no"``, for the message that refuses a causal call.
        mask: ``"none"``, ``"padding"`` (key padding only) or ``"full"`` (any mask, bias too).
        cross: Whether query and key lengths may differ.
        decode: Whether `Method.state` exists.
        needs: What must happen before the method is what its paper describes.
        random: Whether the method draws; then its function takes ``generator``.
        differentiable: Whether gradients reach query, key and value.
        normalised: Whether its weights sum to one in every row.
        scaled: Whether there are logits that ``scale`` multiplies.
        linear_in_value: Whether the output is linear in value.
        joint: Whether what is kept of a token mixes its heads, keys and values, so that heads
            depend on one another, and a value does not come out as it went in.
        judged_as: The family whose oracle it is held against, where that is not its own: that of
            the sparse family for a low-rank method that chooses keys.
        bounded: Whether that oracle bounds it in a call that is not causal: no more than
            `Cost.units` keys in a row against the sparse oracle, no higher rank against the others.
        oracle: Whether it is its family's best possible answer rather than a cheap method.
        fits_causal: Whether a causal call needs its state tensors given, because fitting them on
            the batch would let the future in.
        state_tensors: Keywords for tensors that are drawn, calibrated or learned.
        exceptions: Check name -> why this method fails it by nature (a strict expected failure).
    """

    name: str
    family: Family
    summary: str
    paper: str
    complexity: str
    budget: str | None
    approximates: Literal["softmax", "own"]
    causal: Literal["native", "lifted", "no"]
    mask: Literal["none", "padding", "full"]
    why_not_causal: str = ""
    cross: bool = True
    decode: bool = True
    needs: Literal["nothing", "calibration", "training"] = "nothing"
    random: bool = False
    differentiable: bool = True
    normalised: bool = True
    scaled: bool = True
    linear_in_value: bool = True
    joint: bool = False
    judged_as: Family | None = None
    bounded: bool = True
    oracle: bool = False
    fits_causal: bool = False
    state_tensors: tuple[str, ...] = ()
    exceptions: Mapping[str, str] = field(default_factory=dict)

    @property
    def judge(self) -> Family:
        """The family whose oracle it is held against."""
        return self.judged_as or self.family
