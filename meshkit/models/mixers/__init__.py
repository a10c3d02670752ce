"""Recurrent token mixers in place of attention: Gated DeltaNet (Qwen3-Next) and Mamba-2, and decoders that have both."""

from .gated_delta import GatedDeltaConfig as GatedDeltaConfig
from .gated_delta import GatedDeltaNet as GatedDeltaNet
from .hybrid import Hybrid as Hybrid
from .hybrid import HybridConfig as HybridConfig
from .hybrid import hybrid_plan as hybrid_plan
from .mamba2 import Mamba2 as Mamba2
from .mamba2 import Mamba2Config as Mamba2Config
from .over_tokens import linear_attention as linear_attention
from .over_tokens import short_convolution as short_convolution
