"""Activation offload: tensors that blocks save for backward wait in host memory or on disk."""

from ._apply import offload_activations as offload_activations
from ._apply import offload_of as offload_of
from ._offload import BLOCKS_LEAVING as BLOCKS_LEAVING
from ._offload import Offload as Offload
from ._predict import Moved as Moved
from ._predict import bytes_on_device as bytes_on_device
from ._stats import OffloadStep as OffloadStep
