"""Low-rank adapters on linear layers: a frozen model learns a small difference, which can be merged into it."""

from ._adapter import Lora as Lora
from ._adapter import is_adapter as is_adapter
from ._adapter import lora_disabled as lora_disabled
from ._adapter import lora_of as lora_of
from ._attach import init_lora as init_lora
from ._attach import lora as lora
from ._dropout import dropout_keys as dropout_keys
from ._merge import merge_lora as merge_lora
