"""Low-rank attention: project, sample or factor the attention matrix."""

from numattn.lowrank.hodlr import HODLR as HODLR
from numattn.lowrank.hodlr import hodlr_attention as hodlr_attention
from numattn.lowrank.linformer import Linformer as Linformer
from numattn.lowrank.linformer import LinformerAttention as LinformerAttention
from numattn.lowrank.linformer import linformer_attention as linformer_attention
from numattn.lowrank.nystrom import Nystrom as Nystrom
from numattn.lowrank.nystrom import nystrom_attention as nystrom_attention
from numattn.lowrank.svd import SVD as SVD
from numattn.lowrank.svd import Spectrum as Spectrum
from numattn.lowrank.svd import attention_spectrum as attention_spectrum
from numattn.lowrank.svd import svd_attention as svd_attention
