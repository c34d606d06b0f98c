import base64
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import numattn
from numattn.measure import attend, head_errors, reference, sweep, synthetic
from numattn.measure.pictures import DECADES, SIDE, STEPS, matrix, picture, steps, tiles

STEP = 10 ** (2 * DECADES / (STEPS - 1))  # ratio of neighbouring steps
X = replace(synthetic("local", 70, heads=2, head_dim=8), is_causal=True)


def tokens(tile, length):
    first = tile * length // SIDE
    return range(first, max((tile + 1) * length // SIDE, first + 1))


def means(weights):
    """Mean weight of each tile, by the definition."""
    length = len(weights)
    table = [[[weights[i][j] for i in tokens(a, length) for j in tokens(b, length)]
              for b in range(SIDE)] for a in range(SIDE)]  # fmt: skip
    return np.array([[np.mean(cell) for cell in line] for line in table])


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 64, 70])
def test_tiles_average_and_leave_no_token_out(length):
    t = tiles(length)
    assert t.shape == (SIDE, length)
    torch.testing.assert_close(t.sum(-1), torch.ones(SIDE, dtype=torch.float64))
    assert (t.sum(0) > 0).all()
    for tile in range(SIDE):
        assert t[tile].nonzero().flatten().tolist() == list(tokens(tile, length))


@pytest.mark.parametrize("columns", [13, 512])
def test_the_picture_of_a_head_holds_the_means_of_its_tiles_to_half_a_step(columns):
    fn = attend(numattn.Exact(), X)
    errors = head_errors(
        fn, reference(X), dtype=torch.float64, max_columns=columns, with_pictures=True
    )
    for error, weights in zip(errors, reference(X).weights()[0].tolist(), strict=True):
        want, got = means(weights) * X.length, matrix(error.picture)
        seen = want > 0
        assert 0 < seen.sum() < SIDE**2  # the future is there, and empty
        assert (got[~seen] == 0).all()
        ratio = got[seen] / want[seen].clip(10.0**-DECADES, 10.0**DECADES)
        assert ratio.max() < STEP**0.51
        assert ratio.min() > STEP**-0.51


def test_steps_are_even_and_clipped():
    flat = torch.zeros(SIDE, SIDE, dtype=torch.float64)
    flat[0, :8] = torch.tensor([-1.0, 0.0, 1e-30, 1e-4, 1.0, 1e4, 1e30, torch.inf]) / 64
    flat[1, :2] = torch.tensor([torch.nan, 10.0 / 64])
    found = steps(picture(flat, 64))
    assert found[0, :8].tolist() == [0, 0, 1, 1, found[0, 4], STEPS, STEPS, STEPS]
    assert found[1, 0] == 0
    shown = matrix(picture(flat, 64))
    np.testing.assert_allclose(shown[0, 4:6], [1, 1e4], rtol=STEP**0.5 - 1)
    np.testing.assert_allclose(shown[1, 1], 10, rtol=STEP**0.5 - 1)
    assert (shown[2:] == 0).all()


def test_what_is_no_picture_is_refused():
    short = base64.b64encode(zlib.compress(b"123")).decode()
    for text in ("", "%", "abcd", short):
        with pytest.raises(ValueError, match="not a picture of 32 x 32 tiles"):
            matrix(text)
    with pytest.raises(ValueError, match="means must be 32 x 32"):
        picture(torch.ones(4, 4), 64)


def test_rows_hold_pictures_where_weights_are_measured(monkeypatch):
    def pictures(method):
        return {bool(r.picture) for r in sweep([method], [16], [X], timing=False)}

    assert pictures("exact") == pictures("window") == {True}
    assert pictures("thinformer") == {False}  # not linear in value
    monkeypatch.setattr(sys.modules["numattn.measure.unit"], "WEIGHTS_UP_TO", 64)
    assert pictures("exact") == {False}
