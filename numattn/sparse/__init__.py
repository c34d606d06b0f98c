"""Sparse attention: compute the heavy entries exactly, drop or approximate the rest."""

from numattn.sparse.bigbird import BigBird as BigBird
from numattn.sparse.bigbird import BigBirdAttention as BigBirdAttention
from numattn.sparse.bigbird import bigbird_attention as bigbird_attention
from numattn.sparse.blocktopk import BlockTopK as BlockTopK
from numattn.sparse.blocktopk import blocktopk_attention as blocktopk_attention
from numattn.sparse.clustered import Clustered as Clustered
from numattn.sparse.clustered import ClusteredAttention as ClusteredAttention
from numattn.sparse.clustered import clustered_attention as clustered_attention
from numattn.sparse.hyper import Hyper as Hyper
from numattn.sparse.hyper import HyperAttention as HyperAttention
from numattn.sparse.hyper import hyper_attention as hyper_attention
from numattn.sparse.kdeformer import KDEformer as KDEformer
from numattn.sparse.kdeformer import KDEformerAttention as KDEformerAttention
from numattn.sparse.kdeformer import kdeformer_attention as kdeformer_attention
from numattn.sparse.lsh import LSH as LSH
from numattn.sparse.lsh import LSHAttention as LSHAttention
from numattn.sparse.lsh import lsh_attention as lsh_attention
from numattn.sparse.routing import Routing as Routing
from numattn.sparse.routing import RoutingAttention as RoutingAttention
from numattn.sparse.routing import routing_attention as routing_attention
from numattn.sparse.topk import TopK as TopK
from numattn.sparse.topk import topk_attention as topk_attention
from numattn.sparse.window import Window as Window
from numattn.sparse.window import window_attention as window_attention
