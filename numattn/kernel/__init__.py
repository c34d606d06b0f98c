"""Kernel attention: feature maps whose inner products stand in for the exponential."""

from numattn.kernel.cosformer import CosFormer as CosFormer
from numattn.kernel.cosformer import cosformer_attention as cosformer_attention
from numattn.kernel.features import FeatureMap as FeatureMap
from numattn.kernel.hedgehog import Hedgehog as Hedgehog
from numattn.kernel.hedgehog import HedgehogAttention as HedgehogAttention
from numattn.kernel.hedgehog import hedgehog_attention as hedgehog_attention
from numattn.kernel.levattention import LevAttention as LevAttention
from numattn.kernel.levattention import levattention_attention as levattention_attention
from numattn.kernel.levattention import leverage_scores as leverage_scores
from numattn.kernel.linear import Linear as Linear
from numattn.kernel.linear import linear_attention as linear_attention
from numattn.kernel.performer import Performer as Performer
from numattn.kernel.performer import PerformerAttention as PerformerAttention
from numattn.kernel.performer import expected_error as expected_error
from numattn.kernel.performer import performer_attention as performer_attention
from numattn.kernel.polynomial import Polynomial as Polynomial
from numattn.kernel.polynomial import polynomial_attention as polynomial_attention
from numattn.kernel.polysketch import PolySketch as PolySketch
from numattn.kernel.polysketch import PolySketchAttention as PolySketchAttention
from numattn.kernel.polysketch import polysketch_attention as polysketch_attention
from numattn.kernel.rfa import RFA as RFA
from numattn.kernel.rfa import RFAAttention as RFAAttention
from numattn.kernel.rfa import rfa_attention as rfa_attention
from numattn.kernel.taylor import Taylor as Taylor
from numattn.kernel.taylor import TaylorAttention as TaylorAttention
from numattn.kernel.taylor import taylor_attention as taylor_attention
