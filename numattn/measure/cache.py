"""What layers keep for decoding, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from numattn.core.inputs import Unsupported, one_of
from numattn.core.layer import AttentionLayer, ModelShape
from numattn.core.registry import layers as layer_classes

MODELS = {
    "llama-3-8b": ModelShape(
        embed_dim=4096,
        num_heads=32,
        kv_heads=8,
        head_dim=128,
        value_dim=128,
        plain_dim=128,
        rope_dim=64,
        latent_dim=512,
        group_latent_dim=256,
    ),
    "deepseek-v3": ModelShape(
        embed_dim=7168,
        num_heads=128,
        kv_heads=128,
        head_dim=192,
        value_dim=128,
        plain_dim=128,
        rope_dim=64,
        latent_dim=512,
        group_latent_dim=512,
        query_rank=1536,
    ),
}


class CacheRow(NamedTuple):
    """A row of `cache_table`.

    Attributes:
        name: Of the layer.
        units: Numbers that a token leaves in the cache.
        bytes: Bytes that one sequence keeps.
        relative: The same, over that of the baseline.
    """

    name: str
    units: int
    bytes: int
    relative: float


def cache_table(
    layers: Mapping[str, AttentionLayer] | Literal["llama-3-8b", "deepseek-v3"],
    *,
    baseline: str = "MHA",
    length: int = 1,
) -> list[CacheRow]:
    """What layers keep for decoding, beside a baseline, from their `AttentionLayer.cost`.

    Args:
        layers: Layers by name; they may be on the device "meta". Or the name of a model: every
            registered layer that such a model may have, in bfloat16 and in the model's shape.
        baseline: Name of the layer that the others are compared with.
        length: Tokens of the sequence; 1 gives bytes a token.

    Returns:
        A row for every layer, in the order of `layers`, or for a model, the largest cache first.

    Raises:
        ValueError: No such model, or no layer of the name `baseline`.
        Unsupported: A layer does not decode.

    Example:
        >>> for row in cache_table("llama-3-8b")[:4]:
        ...     print(f"{row.name:6}{row.units:6}{row.bytes:7}{row.relative:7.3f}")
        MHA     8192  16384  1.000
        GQA     2048   4096  0.250
        GTA     1088   2176  0.133
        TPA      640   1280  0.078
    """
    named = isinstance(layers, str)
    if isinstance(layers, str):
        one_of("cache_table", "layers", layers, tuple(MODELS))
        layers = _layers_of(MODELS[layers])
    if baseline not in layers:
        raise ValueError(f"cache_table: baseline {baseline!r} is none of {', '.join(layers)}.")
    costs = {name: layer.cost(1, length) for name, layer in layers.items()}
    kept = {}
    for name, cost in costs.items():
        if cost.cache is None:
            raise Unsupported(f"cache_table: {name} keeps nothing to decode from.")
        kept[name] = cost.cache
    base = kept[baseline]
    rows = [CacheRow(n, costs[n].units, size, size / base) for n, size in kept.items()]
    return sorted(rows, key=lambda row: -row.bytes) if named else rows


def _layers_of(shape: ModelShape) -> dict[str, AttentionLayer]:
    """All layers for a model, without memory for their weights."""
    with torch.device("meta"):
        made = [kind.of_model(shape) for kind in layer_classes()]
    return {name: layer.bfloat16() for some in made for name, layer in some.items()}
