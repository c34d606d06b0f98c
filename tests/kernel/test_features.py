"""Feature maps: what each of them is, and what the engine relies on."""

import dataclasses

import pytest
import torch

from numattn.engines.linear import linear_attention
from numattn.kernel.features import MAPS, FeatureMap
from numattn.testing import make_qkv

KNOWN = {
    "elu": lambda x: max(x, 0.0) + torch.tensor(min(x, 0.0)).double().exp().item(),
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "identity": lambda x: x,
}


def features(phi, x):
    return phi(x).exp() if phi.log else phi(x)


@pytest.mark.parametrize("name", KNOWN)
def test_entries_are_mapped_one_by_one(name):
    entries = [-30.0, -1.5, 0.0, 0.25, 3.0]
    x = torch.tensor(entries, dtype=torch.float64).reshape(1, 1, 1, 5)
    want = torch.tensor([KNOWN[name](t) for t in entries], dtype=torch.float64)
    torch.testing.assert_close(features(MAPS[name], x).flatten(), want, rtol=1e-15, atol=0)


def test_softmax_features_are_probabilities():
    x = make_qkv(7)[0]
    y = features(MAPS["softmax"], x)
    torch.testing.assert_close(y.sum(-1), torch.ones_like(y[..., 0]), rtol=0, atol=1e-14)
    torch.testing.assert_close(y[..., 1] / y[..., 0], (x[..., 1] - x[..., 0]).exp())


@pytest.mark.parametrize("phi", MAPS.values(), ids=MAPS.keys())
class TestEveryMap:
    def test_says_how_many_features_it_makes_and_of_what_sign(self, phi):
        assert MAPS[phi.name] is phi
        for dim in (3, 8):
            x = make_qkv(50, head_dim=dim)[0]
            y = phi(x)
            assert y.shape == (*x.shape[:3], phi.dimension(dim))
            assert bool((features(phi, x) >= 0).all()) == phi.positive

    def test_is_a_function_of_each_token_alone(self, phi):
        x = make_qkv(50)[0]
        assert torch.equal(phi(x), torch.cat([phi(tile) for tile in x.split(13, 2)], 2))

    def test_leaves_its_input_and_keeps_the_type(self, phi):
        for dtype in (torch.float32, torch.float64):
            x = make_qkv(9, dtype=dtype)[0]
            kept = x.clone()
            assert phi(x).dtype == dtype
            assert torch.equal(x, kept)

    def test_cannot_be_changed(self, phi):
        with pytest.raises(dataclasses.FrozenInstanceError):
            phi.log = True


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_new_map_goes_straight_into_the_engine(is_causal):
    """One that widens, and has a tensor of its own."""
    omega = torch.randn(8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    phi = FeatureMap("drawn", lambda x: (x @ omega).square(), dimension=lambda head_dim: 20)
    q, k, v = make_qkv(150)
    out = linear_attention(
        q, k, v, phi, phi, log=phi.log, is_causal=is_causal, num_features=phi.dimension(8)
    )
    weight = (q @ omega).square() @ (k @ omega).square().mT
    weight = weight.tril() if is_causal else weight
    want = weight @ v / weight.sum(-1, keepdim=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
