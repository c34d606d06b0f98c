"""Layers of trained models to measure on: their weights, and hidden states that enter them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from numattn.core.rotary import Rotary
from numattn.measure.inputs import DATA, QKV, InputError, read_tensors

_TENSORS = ("x", "wq", "wk", "wv", "wo")
_SETTINGS = ("num_heads", "kv_heads", "head_dim", "rope_base", "scale")


@dataclass(frozen=True)
class LayerSample:
    """An attention layer of a trained model, and what entered it.

    Attributes:
        hidden: (1, N, embed_dim), after the norm, as it enters the projections.
        weights: ``q_proj.weight`` (H D, embed_dim), ``k_proj.weight`` and ``v_proj.weight``
            (Hk D, embed_dim) and ``o_proj.weight`` (embed_dim, H D): a state dict of
            `numattn.latent.GroupedQueryAttention` and of transformers' ``LlamaAttention``.
        num_heads: H.
        kv_heads: Hk.
        head_dim: D.
        rope_base: Of the rotary embedding, see `numattn.core.rotary.Rotary`.
        scale: Factor of the logits.
        source: Where it comes from.
    """

    hidden: Tensor
    weights: dict[str, Tensor]
    num_heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    scale: float
    source: str = ""

    @property
    def embed_dim(self) -> int:
        """Width of the hidden states."""
        return self.hidden.shape[2]

    def qkv(self, name: str = "layer") -> QKV:
        """Queries, keys and values of all heads, rotated, causal, with the output projection.

        Args:
            name: What rows and tables call it.
        """
        rotary = Rotary(self.head_dim, base=self.rope_base)
        position = torch.arange(self.hidden.shape[1])
        q, k, v = (
            (self.hidden @ self.weights[f"{n}_proj.weight"].mT)
            .unflatten(2, (-1, self.head_dim))
            .transpose(1, 2)
            for n in "qkv"
        )
        wo = self.weights["o_proj.weight"]
        q, k = rotary(q, position), rotary(k, position)
        return QKV(name, q, k, v, True, self.scale, "all heads of a layer", self.source, wo)


def load_layer(path: str | os.PathLike[str] | None = None) -> LayerSample:
    """A layer from a file, or the bundled one.

    The bundled one is layer 14 of SmolLM2-135M on 512 tokens of the Jargon File, in float16.

    Args:
        path: A safetensors file with ``x`` (N, embed_dim) and the weights ``wq``, ``wk``, ``wv``
            and ``wo``, each (outputs, inputs); and, in its metadata, ``num_heads``, ``kv_heads``,
            ``head_dim``, ``rope_base`` and ``scale``.

    Raises:
        InputError: The file cannot be read, or lacks something.

    Example:
        >>> sample = load_layer()
        >>> sample.num_heads, sample.kv_heads, sample.hidden.shape
        (9, 3, torch.Size([1, 512, 576]))
    """
    path = DATA / "smollm2-layer.safetensors" if path is None else Path(path)
    tensors, metadata = read_tensors(path, _TENSORS)
    x, *weights = (tensors[name].float() for name in _TENSORS)
    try:
        count, shared, width, base, scale = (float(metadata[name]) for name in _SETTINGS)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path}: the metadata must give {', '.join(_SETTINGS)} as numbers; it has {metadata}."
        ) from error
    rows = [count * width, shared * width, shared * width, x.shape[-1]]
    if x.dim() != 2 or any(
        tuple(w.shape) != (r, count * width if w is weights[3] else x.shape[1])
        for w, r in zip(weights, rows, strict=True)
    ):
        shapes = ", ".join(f"{n} {tuple(tensors[n].shape)}" for n in _TENSORS)
        raise InputError(f"{path}: shapes do not fit the numbers of heads: {shapes}.")
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    return LayerSample(
        x[None],
        dict(zip(names, weights, strict=True)),
        int(count),
        int(shared),
        int(width),
        base,
        scale,
        metadata.get("source", ""),
    )
