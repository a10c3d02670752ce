"""Resharding: tensors from one layout over ranks to another, each byte once, by messages from rank to rank."""

from ._exchange import Exchange as Exchange
from ._exchange import Shards as Shards
from ._layout import Layout as Layout
from ._layout import TensorRegions as TensorRegions
from ._plan import DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES
from ._plan import ReallocationPlan as ReallocationPlan
from ._plan import Transfer as Transfer
from ._plan import plan_reallocation as plan_reallocation
from ._region import Region as Region
from ._region import region_of as region_of
from ._region import volume as volume
