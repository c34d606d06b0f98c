"""The curves and the maps are those of the exact weights."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from numattn.measure import load, load_layer, reference, synthetic

pytest.importorskip("matplotlib")
from numattn.measure.figures import decay_figure, sparsity_figure, weights_figure

FIGURES = (sparsity_figure, decay_figure, weights_figure)


def curves(figure, panel=0):
    """The lines that a panel's legend names, in order."""
    ax = figure.axes[panel]
    named = [line for line in ax.lines if not line.get_label().startswith("_")]
    return [(line.get_label(), np.asarray(line.get_data())) for line in named]


def maps(figure):
    return [np.ma.filled(ax.images[0].get_array(), np.nan) for ax in figure.axes if ax.images]


@pytest.mark.parametrize("causal", [False, True])
def test_a_uniform_row_needs_its_share_of_the_keys(causal):
    x = synthetic("gaussian", 100, heads=1, is_causal=causal)
    x = replace(x, k=torch.zeros_like(x.k))
    ((_, (mass, share)),) = curves(sparsity_figure([x]))
    sizes = np.arange(1, 101) if causal else np.full(100, 100)
    for p, s in zip(mass, share, strict=True):
        assert s == pytest.approx(np.sort(np.ceil(p * sizes - 1e-9) / sizes)[49])


def test_shares_of_keys_are_those_of_the_sorted_weights():
    x = load("smollm2-heavy").crop(80)
    weights = reference(x).weights()[0].numpy()
    found = curves(sparsity_figure([x]))
    assert [name for name, _ in found] == ["0", "1", "2"]
    for head, (_, (mass, share)) in enumerate(found):
        for p, s in list(zip(mass, share, strict=True))[::14]:
            needed = []
            for i, row in enumerate(weights[head]):
                held = np.sort(row[: i + 1])[::-1].cumsum()
                needed.append(((held < p * (1 - 1e-12)).sum() + 1) / (i + 1))
            assert s == pytest.approx(np.sort(needed)[39])


def test_decay_is_that_of_the_singular_values():
    x = load("minilm").crop(64)
    for head, (_, (index, value)) in enumerate(curves(decay_figure([x]))):
        sigma = np.linalg.svd(reference(x).weights()[0, head].numpy(), compute_uv=False)
        np.testing.assert_array_equal(index, np.arange(1, 65))
        np.testing.assert_allclose(value, sigma / sigma[0], rtol=1e-6, atol=1e-7)


def test_a_short_map_is_the_weights_and_the_future_is_blank():
    x = load("smollm2-local").crop(40)
    shown = maps(weights_figure([x]))
    assert len(shown) == 3
    future = ~np.tri(40, dtype=bool)
    for found, weights in zip(shown, reference(x).weights()[0].numpy(), strict=True):
        assert np.isnan(found[future]).all()
        np.testing.assert_allclose(found[~future], 40 * weights[~future], rtol=1e-9)


def test_a_long_map_is_of_tile_means():
    x = synthetic("gaussian", 512, heads=1)
    (found,) = maps(weights_figure([x]))
    weights = reference(x).weights()[0, 0].numpy()
    np.testing.assert_allclose(found, 512 * weights.reshape(256, 2, 256, 2).mean((1, 3)), rtol=1e-9)


def test_maps_share_one_scale_of_colours():
    figure = weights_figure([load("minilm").crop(32), synthetic("peaked", 40, heads=2)])
    images = [ax.images[0] for ax in figure.axes if ax.images]
    assert len(images) == 8
    assert len({id(image.norm) for image in images}) == 1
    assert len(figure.axes) - sum(bool(ax.images) for ax in figure.axes) <= 5  # empty, and the bar


def test_a_panel_names_its_input_and_every_head_of_many():
    x = load_layer().qkv().crop(48)
    for figure in (sparsity_figure([x, load("minilm").crop(32)]), decay_figure([x])):
        assert "layer" in figure.axes[0].get_title(loc="left")
        found = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
        assert [line.get_label() for line in found] == [str(h) for h in range(9)]
        assert len({(line.get_color(), line.get_linestyle()) for line in found}) == 9


def test_sequences_are_told_apart():
    x = synthetic("gaussian", 32, heads=2)
    two = replace(x, **{n: getattr(x, n).repeat(2, 1, 1, 1) for n in "qkv"})
    assert [name for name, _ in curves(decay_figure([two]))] == ["0:0", "0:1", "1:0", "1:1"]
    assert len(maps(weights_figure([two]))) == 4


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("kind", ["peaked", "sink"])
def test_it_is_drawn_without_a_warning(figure, kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = figure([synthetic(kind, 300, heads=1, is_causal=True)] * 4)
        drawn.savefig(tmp_path / "drawn.png", dpi=50)
    assert (tmp_path / "drawn.png").stat().st_size > 1000
