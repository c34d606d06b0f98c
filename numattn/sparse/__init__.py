"""Sparse attention: compute the heavy entries exactly, drop or approximate the rest."""
