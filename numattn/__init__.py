"""numattn: approximations of softmax attention, and how wrong each of them is.

Methods are grouped by family::

    from numattn.lowrank import nystrom_attention
    from numattn.kernel import performer_attention
    from numattn.sparse import window_attention
    from numattn.latent import gma_attention
    from numattn.tensor import tpa_attention

Each takes the arguments of `torch.nn.functional.scaled_dot_product_attention`. `methods` lists
them all, `get` makes one by name, `numattn.measure` compares them with exact attention.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from numattn import kernel as kernel
from numattn import latent as latent
from numattn import lowrank as lowrank
from numattn import sparse as sparse
from numattn import tensor as tensor
from numattn.core.info import Info as Info
from numattn.core.inputs import Unsupported as Unsupported
from numattn.core.masks import padding_mask as padding_mask
from numattn.core.method import Method as Method
from numattn.core.registry import get as get
from numattn.core.registry import layers as layers
from numattn.core.registry import methods as methods
from numattn.core.registry import register as register
from numattn.core.registry import register_layer as register_layer
from numattn.engines import backend as backend
from numattn.engines import resolve as resolve
from numattn.engines import why_not as why_not
from numattn.exact import Exact as Exact
from numattn.exact import exact_attention as exact_attention

__version__ = "0.6.0"


def __getattr__(name: str) -> ModuleType:
    if name in ("measure", "testing"):
        return import_module(f"numattn.{name}")
    raise AttributeError(f"module 'numattn' has no attribute {name!r}")
