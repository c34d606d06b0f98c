"""Drawn tensors: one draw per generator, checked shapes, a module that owns them."""

import pytest
import torch
from torch import Generator

import numattn
from numattn.core.drawn import Draw, draw_all, fill
from numattn.testing import make_qkv

DRAWN = [m for m in numattn.methods() if m().draws(2, 8)]


def seeded(seed=0):
    return Generator().manual_seed(seed)


def test_laws():
    draws = {"a": Draw("normal", (100, 200)), "b": Draw("uniform", (100, 200))}
    found = draw_all(draws, seeded(), torch.device("cpu"))
    a, b = found["a"], found["b"]
    assert a.dtype == b.dtype == torch.float64
    # Twenty thousand numbers: four standard errors of means and variances.
    assert abs(a.mean()) < 4 / 20000**0.5
    assert abs(a.var() - 1) < 4 * (2 / 20000) ** 0.5
    assert b.min() >= 0
    assert b.max() < 1
    assert abs(b.mean() - 0.5) < 4 * (1 / 12 / 20000) ** 0.5
    assert abs(b.var() - 1 / 12) < 4 * (1 / 180 / 20000) ** 0.5
    again = draw_all(draws, seeded(), torch.device("cpu"))
    assert torch.equal(again["a"], a)
    assert torch.equal(again["b"], b)


def test_there_are_methods_that_draw():
    assert {"lsh", "hyper", "kdeformer", "clustered", "bigbird"} <= {m.info.name for m in DRAWN}


@pytest.mark.parametrize("record", DRAWN, ids=lambda m: m.info.name)
def test_what_is_given_is_kept_and_checked(record):
    method = record()
    _, k, _ = make_qkv(6, head_dim=8)
    draws = method.draws(3, 8)
    first, *others = draws
    one = torch.rand(draws[first].shape)
    filled = fill(method, {first: one, **dict.fromkeys(others)}, k, seeded())
    assert filled[first] is one
    assert {n: t.shape for n, t in filled.items()} == {n: d.shape for n, d in draws.items()}
    with pytest.raises(ValueError, match=f"{record.info.name}: {first} must have shape"):
        fill(method, {first: one[:1], **dict.fromkeys(others)}, k, seeded())
    with pytest.raises(ValueError, match=f"{record.info.name}: {first} must have shape"):
        method(*make_qkv(6), **{first: one[:1]})


@pytest.mark.parametrize("record", DRAWN, ids=lambda m: m.info.name)
def test_a_module_draws_what_fit_draws(record):
    q, k, _ = make_qkv(6, dtype=torch.float32)
    module_type = type(record().module(num_heads=3, head_dim=8))
    module = module_type(num_heads=3, head_dim=8, generator=seeded())
    fitted = record().fit(q, k, generator=seeded())
    assert module.tensors().keys() == fitted.keys()
    for name, tensor in module.tensors().items():
        assert torch.equal(tensor, fitted[name].float())
    module.redraw(seeded(1))
    assert any(not torch.equal(t, fitted[n].float()) for n, t in module.tensors().items())
