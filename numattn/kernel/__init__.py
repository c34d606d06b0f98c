"""Kernel attention: feature maps whose inner products stand in for the exponential."""

from numattn.kernel.linear import Linear as Linear
from numattn.kernel.linear import linear_attention as linear_attention
from numattn.kernel.performer import Performer as Performer
from numattn.kernel.performer import PerformerAttention as PerformerAttention
from numattn.kernel.performer import performer_attention as performer_attention
