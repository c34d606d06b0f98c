"""Products with attention weights that are not stored, against the stored matrix."""

import pytest
import torch

from numattn.engines import operator
from numattn.engines.operator import WeightsOperator
from numattn.testing import make_qkv, reference_weights


@pytest.fixture(params=[1 << 20, 100])
def tiles(request, monkeypatch):
    """One tile, and many."""
    monkeypatch.setattr(operator, "tile_elements", lambda device: request.param)


def cases():
    q, k, _ = make_qkv(50, keys=50, batch=1, heads=1)
    bias = torch.randn(50, 50, dtype=q.dtype, generator=torch.Generator().manual_seed(0))
    bias[:, 7] = -torch.inf
    keep = bias > -0.5
    keep[11] = False
    return q, k, [(None, False), (None, True), (bias, False), (keep, False), (keep, True)]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("case", range(5))
def test_products_are_those_of_the_matrix(case):
    q, k, masks = cases()
    mask, is_causal = masks[case]
    a = WeightsOperator(q[0, 0], k[0, 0], scale=8**-0.5, mask=mask, is_causal=is_causal)
    want = reference_weights(q, k, attn_mask=mask, is_causal=is_causal)[0, 0]
    g = torch.randn(50, 3, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(a.dense(), want)
    torch.testing.assert_close(a.matmul(g), want @ g)
    torch.testing.assert_close(a.transposed(g), want.T @ g)
    torch.testing.assert_close(a.norm(), want.norm())
    assert torch.equal(a.empty_rows(), want.sum(-1) == 0)


@pytest.mark.usefixtures("tiles")
def test_other_lengths_and_rows_that_do_not_exist():
    q, k, _ = make_qkv(40, keys=23, batch=1, heads=1)
    exists = torch.arange(40) < 31
    mask = torch.arange(23)[None] < 20
    a = WeightsOperator(q[0, 0], k[0, 0], scale=0.3, mask=mask, exists=exists)
    want = reference_weights(q, k, attn_mask=mask, scale=0.3)[0, 0] * exists[:, None]
    assert a.shape == want.shape
    torch.testing.assert_close(a.dense(), want)
    torch.testing.assert_close(a.transposed(want[:, :2]), want.T @ want[:, :2])
    assert torch.equal(a.empty_rows(), ~exists)
