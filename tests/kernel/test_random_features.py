"""Directions of every draw are standard normal; the best damping is the best there is."""

import math

import pytest
import torch

from numattn.kernel.random_features import (
    DRAWS,
    best_damping,
    damp,
    directions,
    log_relative_variance,
    whiten,
)

CPU = torch.device("cpu")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("draw", DRAWS)
def test_every_direction_is_standard_normal(draw):
    """The first two moments of one row and the fourth of one entry, within 4 standard errors."""
    trials, rows, dim = 2000, 7, 3
    x = directions(draw, rows, dim, trials, seeded(0), CPU)
    for row in (0, 3, 6):
        at = x[:, row]
        assert (at.mean(0).abs() < 4 / math.sqrt(trials)).all()
        # x_i x_j has variance 1, x_i^2 variance 2 and x_i^4 variance 96.
        second = at.mT @ at / trials - torch.eye(dim)
        noise = (torch.ones(dim, dim) + torch.eye(dim)).sqrt() / math.sqrt(trials)
        assert (second.abs() < 4 * noise).all()
        assert ((at**4).mean(0) - 3).abs().max() < 4 * math.sqrt(96 / trials)


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_follow_the_generator(draw):
    a, b, c = (directions(draw, 20, 8, 3, seeded(s), CPU) for s in (0, 0, 1))
    assert a.shape == (3, 20, 8)
    assert a.dtype == torch.float64
    assert torch.equal(a, b)
    assert not torch.isclose(a, c).any()
    assert not torch.isclose(a[0], a[1]).any(), "two heads share their directions"
    state = torch.random.get_rng_state()
    directions(draw, 20, 8, 3, seeded(0), CPU)
    assert torch.equal(state, torch.random.get_rng_state()), "draws from the global generator"


def test_angles_of_blocks():
    for draw, cosine in (("orthogonal", 0.0), ("simplex", -1 / 7)):
        x = directions(draw, 20, 8, 2, seeded(0), CPU)
        unit = x / x.norm(dim=-1, keepdim=True)
        for block in unit.split(8, 1):
            gram = block @ block.mT
            want = torch.eye(block.shape[1], dtype=x.dtype) * (1 - cosine) + cosine
            torch.testing.assert_close(gram, want.expand_as(gram), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="'simplex' needs a head size of 2"):
        directions("simplex", 3, 1, 1, seeded(0), CPU)


def test_sobol_points_lie_off_their_grid():
    """A scramble alone leaves multiples of a power of two, whose quantiles have no tails."""
    points = torch.special.ndtr(directions("qmc", 256, 8, 1, seeded(0), CPU)) * 2.0**30
    assert ((points - points.round()).abs() > 1e-3).double().mean() > 0.99


def test_sobol_points_fill_the_space_evenly():
    """Of 64 points, Sobol puts one in each 64th of every axis; a shift moves at most one over."""
    x = directions("qmc", 64, 5, 20, seeded(0), CPU)
    cell = (torch.special.ndtr(x) * 64).long().clamp(0, 63)
    for head in cell:
        for axis in head.mT:
            assert torch.bincount(axis, minlength=64).max() <= 2


@pytest.mark.parametrize("dim", [1, 8])
@pytest.mark.parametrize("square", [0.1, 3.0, 40.0])
def test_best_damping_is_the_minimum_of_a_grid(dim, square):
    best = best_damping(torch.tensor(square, dtype=torch.float64), dim).item()
    grid = torch.linspace(-12, 0.12, 60_001, dtype=torch.float64)
    stretch, rest = 1 - 4 * grid, 1 - 8 * grid
    value = dim * stretch.log() - dim / 2 * rest.log() + (2 * stretch / rest - 1) * square
    assert abs(grid[value.argmin()] - best) <= grid[1] - grid[0]
    assert best <= 0


def test_nothing_to_damp():
    assert best_damping(torch.zeros(()), 8) == 0


def test_damped_directions_by_the_definition():
    turn = torch.linalg.qr(torch.randn(5, 5, generator=seeded(0), dtype=torch.float64))[0]
    values = torch.linspace(-2, 0.1, 5, dtype=torch.float64)
    damping = turn * values @ turn.mT
    projection = torch.randn(7, 5, generator=seeded(1), dtype=torch.float64)
    stretched, offset = damp(projection, damping)
    root = turn * (1 - 4 * values).sqrt() @ turn.mT
    torch.testing.assert_close(stretched, projection @ root)
    quadratic = torch.stack([w @ damping @ w for w in projection])
    half = torch.linalg.slogdet(torch.eye(5) - 4 * damping).logabsdet / 2
    torch.testing.assert_close(offset, 2 * quadratic + half)
    right, constant = whiten(damping)
    rest = torch.eye(5) - 8 * damping
    torch.testing.assert_close(right @ right.mT, torch.linalg.inv(rest))
    torch.testing.assert_close(constant, 2 * half - torch.linalg.slogdet(rest).logabsdet / 2)


def test_log_relative_variance_of_small_and_large_numbers():
    s = torch.tensor([1e-12, 0.3, 5.0], dtype=torch.float64)
    torch.testing.assert_close(log_relative_variance(s, False), torch.expm1(s).log())
    # m features in m / 2 pairs: (cosh s - 1) / (m / 2), and cosh s - 1 = 2 sinh(s / 2)^2
    torch.testing.assert_close(log_relative_variance(s, True), (4 * torch.sinh(s / 2) ** 2).log())
    large = torch.tensor([1e6], dtype=torch.float64)
    assert log_relative_variance(large, False) == log_relative_variance(large, True) == large
    assert log_relative_variance(torch.tensor([0.0, -1e-17]), False).isneginf().all()
