"""Activation offload: tensors that blocks save for backward wait in host memory or on disk."""

from ._apply import offload_activations as offload_activations
from ._apply import offload_of as offload_of
from ._host import round_up as round_up
from ._offload import BLOCKS_LEAVING as BLOCKS_LEAVING
from ._offload import Offload as Offload
from ._predict import Moved as Moved
from ._predict import bytes_on_device as bytes_on_device
from ._saved_storage import Stored as Stored
from ._saved_storage import Tier as Tier
from ._stats import OffloadStep as OffloadStep
from ._streams import Event as Event
