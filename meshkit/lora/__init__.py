"""LoRA (low-rank adapters): a frozen model learns a low-rank update of its linear layers, which can be merged into them."""

from ._adapter import Lora as Lora
from ._adapter import is_adapter as is_adapter
from ._adapter import disabled as disabled
from ._adapter import lora_of as lora_of
from ._adapter import refuse_peft as refuse_peft
from ._attach import init as init
from ._attach import attach as attach
from ._attach import with_adapters as with_adapters
from ._attach import without_adapters as without_adapters
from ._adapter import dropout_keys as dropout_keys
from ._merge import merge as merge
