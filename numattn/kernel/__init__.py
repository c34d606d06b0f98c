"""Kernel attention: feature maps whose inner products stand in for the exponential."""

from numattn.kernel.performer import Performer as Performer
from numattn.kernel.performer import PerformerAttention as PerformerAttention
from numattn.kernel.performer import performer_attention as performer_attention
