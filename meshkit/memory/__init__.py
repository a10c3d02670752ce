"""Activation memory: activation checkpointing (recompute), activation offload, fp8 products, MLPs in chunks of tokens."""

from meshkit.memory import offload as offload

from ._fp8 import chosen_linears as chosen_linears
from ._fp8 import fp8_linears as fp8_linears
from ._fp8 import plan_fp8 as plan_fp8
from ._fp8 import refuse_fp8_hardware as refuse_fp8_hardware
from ._fp8 import shared_scales as shared_scales
from ._mlp_chunks import chunk_mlp as chunk_mlp
from ._mlp_chunks import part_sizes as part_sizes
from ._mlp_chunks import refuse_mlp_chunks as refuse_mlp_chunks
from ._mlp_proof import refuse_mixed_tokens as refuse_mixed_tokens
from ._recompute import Treatment as Treatment
from ._recompute import may_move as may_move
from ._recompute import recompute as recompute
from ._recompute import refuse_treatments as refuse_treatments
from ._recompute import repeated as repeated
from ._recompute import spread as spread
from ._recompute import treat as treat
from ._recompute import treatments as treatments
