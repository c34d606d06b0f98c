"""Tensor attention: heads, weights and tokens as the modes of a tensor."""

from numattn.tensor.axial import axial_attention as axial_attention
from numattn.tensor.axial import axial_cost as axial_cost
from numattn.tensor.compress import Compression as Compression
from numattn.tensor.compress import RankProfile as RankProfile
from numattn.tensor.compress import compress_layer as compress_layer
from numattn.tensor.compress import multilinear_rank_profile as multilinear_rank_profile
from numattn.tensor.compressed import CompressedAttention as CompressedAttention
from numattn.tensor.compressed import HeadFactors as HeadFactors
from numattn.tensor.kronecker import KroneckerSum as KroneckerSum
from numattn.tensor.kronecker import kronecker_attention as kronecker_attention
from numattn.tensor.kronecker import kronecker_cost as kronecker_cost
from numattn.tensor.kronecker import kronecker_weights as kronecker_weights
from numattn.tensor.kronecker import nearest_kronecker as nearest_kronecker
from numattn.tensor.simplicial import SimplicialAttention as SimplicialAttention
from numattn.tensor.simplicial import SimplicialState as SimplicialState
from numattn.tensor.simplicial import simplicial_attention as simplicial_attention
from numattn.tensor.simplicial import simplicial_flops as simplicial_flops
from numattn.tensor.simplicial import taylor_simplicial_attention as taylor_simplicial_attention
from numattn.tensor.tpa import TPA as TPA
from numattn.tensor.tpa import TensorProductAttention as TensorProductAttention
from numattn.tensor.tpa import tpa_attention as tpa_attention
