"""Low-rank adapters on linear layers: a frozen model learns a small difference, which can be merged into it."""

from ._adapter import Lora as Lora
from ._adapter import is_adapter as is_adapter
from ._adapter import disabled as disabled
from ._adapter import lora_of as lora_of
from ._attach import init as init
from ._attach import attach as attach
from ._adapter import dropout_keys as dropout_keys
from ._merge import merge as merge
