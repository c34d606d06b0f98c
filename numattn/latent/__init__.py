"""Latent attention: attend through a small set of latent variables."""

from numattn.latent.convert import Conversion as Conversion
from numattn.latent.convert import ConversionError as ConversionError
from numattn.latent.convert import LatentSelfAttention as LatentSelfAttention
from numattn.latent.convert import conversion_error as conversion_error
from numattn.latent.convert import source_layer as source_layer
from numattn.latent.convert import to_mla as to_mla
from numattn.latent.convert import to_mla_model as to_mla_model
from numattn.latent.gma import GMA as GMA
from numattn.latent.gma import GMAAttention as GMAAttention
from numattn.latent.gma import gma_attention as gma_attention
from numattn.latent.gma import responsibilities as responsibilities
from numattn.latent.gma import responsibility_lipschitz as responsibility_lipschitz
from numattn.latent.gma_layer import GaussianMixtureAttention as GaussianMixtureAttention
from numattn.latent.grouped import GroupedLatentAttention as GroupedLatentAttention
from numattn.latent.grouped import GroupedQueryAttention as GroupedQueryAttention
from numattn.latent.grouped import GroupedTiedAttention as GroupedTiedAttention
from numattn.latent.mixture import Mixture as Mixture
from numattn.latent.mixture import expected_components as expected_components
from numattn.latent.mixture import fit_mixture as fit_mixture
from numattn.latent.mixture import prune as prune
from numattn.latent.mixture import reseed as reseed
from numattn.latent.mixture import split as split
from numattn.latent.mixture import stick_breaking_log_prior as stick_breaking_log_prior
from numattn.latent.mla import MLA as MLA
from numattn.latent.mla import MLAAttention as MLAAttention
from numattn.latent.mla import MultiheadLatentAttention as MultiheadLatentAttention
from numattn.latent.mla import mla_attention as mla_attention
from numattn.latent.routing import component_usage as component_usage
from numattn.latent.routing import dead_components as dead_components
from numattn.latent.routing import normalized_mutual_information as normalized_mutual_information
from numattn.latent.routing import plot_mutual_information as plot_mutual_information
from numattn.latent.routing import plot_responsibilities as plot_responsibilities
from numattn.latent.routing import plot_usage as plot_usage
from numattn.latent.routing import (
    soft_normalized_mutual_information as soft_normalized_mutual_information,
)
from numattn.latent.routing import usage_entropy as usage_entropy
