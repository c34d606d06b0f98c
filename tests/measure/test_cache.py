"""The table of what layers keep, against closed forms and against real states."""

import math
from dataclasses import replace

import pytest
import torch

import numattn
from numattn import Unsupported
from numattn.core.layer import ModelShape
from numattn.latent import GroupedQueryAttention, GroupedTiedAttention
from numattn.measure import cache_table

SMALL = ModelShape(16, 4, 2, 8, 8, 6, 4, 12, 10)


def small():
    """Every registered layer in a small model."""
    return {n: layer for kind in numattn.layers() for n, layer in kind.of_model(SMALL).items()}


def test_the_cache_of_llama_3_8b():
    """The closed forms, H = 32, Hk = 8, d = 128, d_c = 512, d_r = 64, two bytes a number."""
    rows = {row.name: row for row in cache_table("llama-3-8b")}
    units = {
        "MHA": 2 * 32 * 128,
        "GQA": 2 * 8 * 128,
        "MQA": 2 * 128,
        "GTA": 8 * 128 + 64,
        "MLA": 512 + 64,
        "GLA-2": 2 * 256 + 64,
    }
    for name, count in units.items():
        assert rows[name].units == count
        assert rows[name].bytes == 2 * count
        assert math.isclose(rows[name].relative, count / units["MHA"])
    assert [row.bytes for row in rows.values()] == sorted(r.bytes for r in rows.values())[::-1]


def test_the_cache_of_deepseek_v3():
    """H = 128, keys of 192 and values of 128 numbers, d_c = 512, d_r = 64."""
    rows = {row.name: row for row in cache_table("deepseek-v3", baseline="MLA", length=1000)}
    units = {"MHA": 128 * 320, "MQA": 320, "MLA": 576, "GLA-2": 2 * 512 + 64}
    assert {name: rows[name].units for name in units} == units
    assert {name: rows[name].bytes for name in units} == {n: 2000 * u for n, u in units.items()}
    assert math.isclose(rows["MHA"].relative, 40960 / 576)
    assert not {"GQA", "GTA"} & set(rows)  # no heads share keys there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_table_says_what_states_keep(dtype):
    layers = {name: layer.to(dtype) for name, layer in small().items()}
    rows = cache_table(layers, length=13)
    for row in rows:
        state = layers[row.name].state()
        layers[row.name](torch.randn(1, 13, 16).to(dtype), state=state)
        assert state.nbytes == row.bytes == 13 * row.units * dtype.itemsize


def test_no_weight_is_allocated_for_the_table(monkeypatch):
    made = []
    for kind in numattn.layers():
        cost = kind.cost
        monkeypatch.setattr(
            kind, "cost", lambda self, *a, f=cost, **k: (made.append(self), f(self, *a, **k))[1]
        )
    cache_table("llama-3-8b")
    assert len(made) >= 6
    assert all(p.is_meta for layer in made for p in layer.parameters())


class _Keepless(GroupedQueryAttention):
    def cost(self, batch, length, *, is_causal=True):
        return replace(super().cost(batch, length), cache=None)


def test_what_the_table_refuses():
    with pytest.raises(ValueError, match="'llama-3-8b', 'deepseek-v3'"):
        cache_table("llama-9")
    with pytest.raises(ValueError, match="baseline 'MHA' is none of mine"):
        cache_table({"mine": GroupedTiedAttention(8, 2, kv_heads=1, head_dim=4)})
    layer = _Keepless(8, 2, kv_heads=1, head_dim=4)
    with pytest.raises(Unsupported, match="mine keeps nothing"):
        cache_table({"mine": layer}, baseline="mine")
