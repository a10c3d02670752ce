"""Optimizers on local shards: AdamW fused, with optimizer state on the host, or in few bits; learning-rate schedules."""

from ._adamw import adamw as adamw
from ._adamw import adamw_over as adamw_over
from ._host_copies import place_tensors as place_tensors
from ._low_bit_state import BLOCKS as BLOCKS
from ._low_bit_state import LowBitState as LowBitState
from ._low_bit_state import block_of as block_of
from ._lr_schedule import LR_SCHEDULES as LR_SCHEDULES
from ._lr_schedule import lr_factor as lr_factor
from ._lr_schedule import lr_schedule as lr_schedule
from .fused import ShardedAdamW as ShardedAdamW
from .host_offload import OffloadedAdamW as OffloadedAdamW
from .host_offload import choose_resident as choose_resident
from .host_offload import resident_share as resident_share
from .low_bit import LowBitAdamW as LowBitAdamW
from ._muon import Muon as Muon
from ._muon import muon as muon
from ._muon import orthogonalise as orthogonalise
from ._whole import WholeMatrices as WholeMatrices
from . import outer as outer
