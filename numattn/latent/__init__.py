"""Latent attention: attend through a small set of latent variables."""
