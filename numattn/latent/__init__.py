"""Latent attention: attend through a small set of latent variables."""

from numattn.latent.gma import GMA as GMA
from numattn.latent.gma import GMAAttention as GMAAttention
from numattn.latent.gma import gma_attention as gma_attention
