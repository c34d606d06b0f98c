"""Rotary embedding against complex numbers, and against transformers' frequencies."""

import math

import pytest
import torch

from numattn.core.rotary import Rotary, Yarn

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def same(ours, theirs, tolerance=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_as_complex_numbers(interleaved):
    x, where = randn(2, 3, 9, 8), torch.randint(0, 5000, (2, 1, 9))
    rotary = Rotary(8, 700.0, interleaved)
    pairs = x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).mT
    z = torch.view_as_complex(pairs.contiguous())
    angle = where[..., None] * 700.0 ** (-torch.arange(4, dtype=F64) / 4)
    z = z * torch.polar(torch.ones_like(angle), angle)
    same(rotary(x, where), torch.cat([z.real, z.imag], -1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_distance_only(interleaved):
    rotary, (q, k) = Rotary(16, interleaved=interleaved), randn(2, 1, 16)

    def product(i, j):
        return (rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum()

    same(product(7, 3), product(1004, 1000), 1e-10)
    assert (product(7, 3) - product(7, 4)).abs() > 1e-3
    assert (product(7, 3) - product(3, 7)).abs() > 1e-3


def test_layouts_give_the_same_products():
    """Interleaved pairs are the others in another order."""
    q, k, place = randn(5, 8), randn(5, 8, seed=1), torch.arange(5)
    order = torch.arange(8).unflatten(0, (4, 2)).T.flatten()  # 0, 2, 4, 6, 1, 3, 5, 7
    ours = Rotary(8, interleaved=True)
    theirs = Rotary(8)
    same(ours(q, place), theirs(q[:, order], place))
    same(
        ours(q, place) @ ours(k, place).T, theirs(q[:, order], place) @ theirs(k[:, order], place).T
    )


def test_positions_far_out_are_turned_exactly():
    """Angles are found in float64: in float32 that of a millionth token is off by 1/16."""
    far, x = torch.tensor([1_000_003]), torch.tensor([[1.0, 0.0]])
    out = Rotary(2)(x, far)
    want = torch.tensor([[math.cos(1_000_003), math.sin(1_000_003)]])
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays(dtype):
    x, place = randn(3, 8).to(dtype), torch.arange(3)
    out = Rotary(8)(x, place)
    assert out.dtype is dtype
    want = Rotary(8)(x.double(), place)
    assert (out.double() - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()


def test_nothing_to_turn():
    x = randn(2, 5, 0)
    assert Rotary(0)(x, torch.arange(5)).shape == x.shape
    assert Rotary(0).logit_factor == 1


# --- yarn -----------------------------------------------------------------------------------


def test_short_wavelengths_stay_and_long_ones_stretch():
    yarn = Yarn(8.0, 4096)
    plain, stretched = Rotary(64).frequencies(), Rotary(64, yarn=yarn).frequencies()
    turns = 4096 * plain / (2 * math.pi)  # wavelengths that fit into the original length
    fast, slow = turns > 32 * 1.4, turns < 1 / 1.4  # one pair beyond: bounds are whole pairs
    assert fast.any()
    assert slow.any()
    same(stretched[fast], plain[fast])
    same(stretched[slow], plain[slow] / 8)
    ratio = plain / stretched
    assert (ratio.diff() >= -1e-12).all()
    assert ratio[~fast & ~slow].max() <= 8 + 1e-12


def test_bounds_may_coincide():
    """All wavelengths short or long: no pair lies between, and nothing is divided by zero."""
    plain = Rotary(4).frequencies()
    same(Rotary(4, yarn=Yarn(2.0, 10**9)).frequencies(), plain)
    found = Rotary(4, yarn=Yarn(2.0, 1)).frequencies()
    assert found.isfinite().all()
    same(found[1], plain[1] / 2)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "amplitude"),
    [
        (None, 0.0, 0.1 * math.log(40) + 1),
        (1.0, 1.0, 1.0),
        (0.707, 1.3, (0.0707 * math.log(40) + 1) / (0.13 * math.log(40) + 1)),
        (0.707, 0.0, 0.1 * math.log(40) + 1),
    ],
)
def test_amplitude_and_logit_factor(mscale, all_dim, amplitude):
    yarn = Yarn(40.0, 4096, mscale=mscale, mscale_all_dim=all_dim)
    assert yarn.amplitude == pytest.approx(amplitude, rel=1e-14)
    assert yarn.logit_factor == pytest.approx((0.1 * all_dim * math.log(40) + 1) ** 2, rel=1e-14)
    rotary, x = Rotary(8, yarn=yarn), randn(3, 8)
    assert rotary.logit_factor == yarn.logit_factor
    same(rotary(x, torch.tensor([0, 5, 50])).norm(dim=-1), amplitude * x.norm(dim=-1))


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "yarn": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    "short": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "beta": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
}


@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_of_transformers(name, dim):
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    rope = {"rope_theta": 10000.0, **ROPES[name]}
    config = theirs.DeepseekV3Config(qk_rope_head_dim=dim, rope_parameters=dict(rope))
    embedding = theirs.DeepseekV3RotaryEmbedding(config)
    yarn = None
    if rope["rope_type"] == "yarn":
        known = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        options = {n: rope[n] for n in known if n in rope}
        yarn = Yarn(original_length=rope["original_max_position_embeddings"], **options)
    rotary = Rotary(dim, rope["rope_theta"], yarn=yarn)
    torch.testing.assert_close(rotary.frequencies().float(), embedding.inv_freq, rtol=1e-5, atol=0)
    x, place = randn(1, 20, dim).float(), torch.arange(20)[None]
    cos, sin = embedding(x, place)
    want = x * cos + theirs.rotate_half(x) * sin
    torch.testing.assert_close(rotary(x, place), want, rtol=1e-5, atol=1e-5)
    turned, _ = theirs.apply_rotary_pos_emb_interleave(x[:, None], x[:, None], cos, sin)
    ours = Rotary(dim, rope["rope_theta"], True, yarn)(x, place)
    torch.testing.assert_close(ours, turned[:, 0], rtol=1e-5, atol=1e-5)


def test_messages():
    for dim in (-2, 3):
        with pytest.raises(ValueError, match=rf"Rotary: dim must be even.*got {dim}"):
            Rotary(dim)
    for factor in (1.0, 0.5, math.nan):
        with pytest.raises(ValueError, match="Yarn: factor must be above 1"):
            Yarn(factor, 100)
    with pytest.raises(ValueError, match="original_length must be positive; got 0"):
        Yarn(2.0, 0)
    with pytest.raises(ValueError, match="radians must be 2 frequencies"):
        Rotary(4, radians=(1.0,))
    for other in ({"base": 500.0}, {"yarn": Yarn(2.0, 100)}):
        with pytest.raises(ValueError, match="by radians, or by base and yarn"):
            Rotary(2, radians=(1.0,), **other)


def test_frequencies_may_be_given():
    given = Rotary(8, radians=tuple(Rotary(8, 500.0).frequencies().tolist()))
    x, place = randn(5, 8), torch.arange(5)
    same(given(x, place), Rotary(8, 500.0)(x, place))
