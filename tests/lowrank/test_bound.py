"""On heads of trained models no method of rank r is nearer to the weights than the SVD."""

from dataclasses import replace

import pytest
import torch

import numattn
from numattn import measure

NAMES = [
    record.info.name
    for record in numattn.methods()
    if record.info.family == "lowrank"
    and record.info.judge == "lowrank"
    and record.info.bounded
    and record.info.linear_in_value
    and record.info.approximates == "softmax"
]


def errors(method, x, ref):
    """Frobenius errors of the weights of all heads, and those of the best of the same rank."""
    mine = measure.head_errors(measure.attend(method, x), ref, dtype=torch.float64)
    best = measure.oracle("lowrank", method.cost(x.shape).units, ref)
    return [e.weights for e in mine], [e.weights for e in best]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [4, 16, 48])
def test_no_method_is_nearer_than_the_svd(name, budget):
    method = numattn.get(name).with_budget(budget)
    for head in ("minilm", "dino", "smollm2-heavy"):
        x = replace(measure.load(head, length=160).to(torch.float64), is_causal=False)
        for mine, best in zip(*errors(method, x, measure.reference(x)), strict=True):
            assert mine >= best * (1 - 1e-6)


def test_the_svd_attains_the_bound():
    x = measure.load("minilm", length=160).to(torch.float64)
    for mine, best in zip(
        *errors(numattn.get("svd", rank=16), x, measure.reference(x)), strict=True
    ):
        assert mine == pytest.approx(best, rel=1e-6)


def test_the_bound_is_asked_of_the_family():
    assert {"nystrom", "skyformer", "wildcat", "svd"} <= set(NAMES)
