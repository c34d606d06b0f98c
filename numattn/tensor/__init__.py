"""Tensor attention: heads, weights and tokens as the modes of a tensor."""
