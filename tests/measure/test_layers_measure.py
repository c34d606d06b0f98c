"""The bundled layer, and files of layers that cannot be used."""

import pytest
import torch
from safetensors.torch import save_file

from numattn.core.rotary import Rotary
from numattn.latent import GroupedQueryAttention
from numattn.measure import InputError, load_layer, reference

SETTINGS = {"num_heads": "2", "kv_heads": "1", "head_dim": "4", "rope_base": "1e4", "scale": "0.5"}


def layer_of(sample):
    """The layer that the sample was taken from."""
    layer = GroupedQueryAttention(
        sample.embed_dim,
        sample.num_heads,
        kv_heads=sample.kv_heads,
        head_dim=sample.head_dim,
        rotary=Rotary(sample.head_dim, base=sample.rope_base),
        scale=sample.scale,
    )
    layer.load_state_dict(sample.weights)
    return layer


def tensors():
    shapes = {"x": (3, 6), "wq": (8, 6), "wk": (4, 6), "wv": (4, 6), "wo": (6, 8)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_the_weights_of_the_bundled_layer_are_those_of_a_layer():
    sample = load_layer()
    layer = layer_of(sample)
    with torch.no_grad():
        out = layer(sample.hidden)
    assert out.shape == sample.hidden.shape
    assert out.isfinite().all()


def test_a_file_gives_what_is_in_it(tmp_path):
    made = tensors()
    save_file(made, tmp_path / "layer.safetensors", SETTINGS)
    sample = load_layer(tmp_path / "layer.safetensors")
    assert torch.equal(sample.hidden[0], made["x"])
    assert torch.equal(sample.weights["o_proj.weight"], made["wo"])
    assert (sample.num_heads, sample.kv_heads, sample.head_dim) == (2, 1, 4)
    assert (sample.rope_base, sample.scale) == (1e4, 0.5)


def test_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "layer.safetensors"
    with pytest.raises(InputError, match="no such file"):
        load_layer(path)
    made = tensors()
    save_file(made, path, {"num_heads": "2"})
    with pytest.raises(InputError, match="must give num_heads, kv_heads"):
        load_layer(path)
    save_file(made, path, {**SETTINGS, "num_heads": "3"})
    with pytest.raises(InputError, match="do not fit the numbers of heads"):
        load_layer(path)
    del made["wo"]
    save_file(made, path, SETTINGS)
    with pytest.raises(InputError, match="no tensor wo; it needs x, wq, wk, wv and wo"):
        load_layer(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="truncated, corrupt"):
        load_layer(path)


def test_its_heads_and_their_projection_are_the_output_of_the_layer():
    sample = load_layer()
    layer = layer_of(sample)
    x = sample.qkv()
    projected = reference(x).out.transpose(1, 2).flatten(2) @ x.wo.double().mT
    with torch.no_grad():
        want = layer.double()(sample.hidden.double())
    rounding = sample.embed_dim * torch.finfo(torch.float32).eps  # of sums over the width
    assert (projected - want).norm() <= rounding * want.norm()
