"""Optimizers that keep their state elsewhere, or in fewer bits."""

from meshkit.memory.optimizer._few_bits_adamw import FewBitsAdamW as FewBitsAdamW
from meshkit.memory.optimizer._few_bits_adamw import refuse_rounding as refuse_rounding
from meshkit.memory.optimizer._offload import OffloadedAdamW as OffloadedAdamW
from meshkit.memory.optimizer._resident import choose_resident as choose_resident
from meshkit.memory.optimizer._resident import resident_share as resident_share
