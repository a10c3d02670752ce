"""AdamW on this rank's parts: torch's own, or with its state elsewhere, or in fewer bits."""

from meshkit.memory.optimizer._few_bits_adamw import FewBitsAdamW as FewBitsAdamW
from meshkit.memory.optimizer._offload import OffloadedAdamW as OffloadedAdamW
from meshkit.memory.optimizer._own_parts import OwnPartsAdamW as OwnPartsAdamW
from meshkit.memory.optimizer._resident import choose_resident as choose_resident
from meshkit.memory.optimizer._resident import resident_share as resident_share
