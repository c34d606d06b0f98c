"""Every registered layer keeps the promises of layers, in models of several shapes."""

import pytest

import numattn
from numattn.core.layer import ModelShape
from numattn.testing import check_layer

SHAPES = {
    "grouped": ModelShape(24, 4, 2, 8, 8, 8, 4, 12, 10),
    "not grouped, with a latent of the queries": ModelShape(24, 6, 6, 10, 5, 6, 4, 12, 10, 7),
}
LAYERS = [
    pytest.param(layer, id=f"{name}, {what}")
    for what, shape in SHAPES.items()
    for kind in numattn.layers()
    for name, layer in kind.of_model(shape).items()
]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_keeps_its_promises(layer):
    check_layer(layer)
