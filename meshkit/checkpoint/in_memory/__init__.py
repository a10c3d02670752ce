"""In-memory checkpoints: each rank's state in the memory of its host and of others, so that a lost rank costs a step."""

from ._keep import InMemory as InMemory
from ._keep import Keeper as Keeper
from ._keep import partners as partners
from ._restore import Kept as Kept
from ._restore import SlotReader as SlotReader
from ._restore import index_of as index_of
from ._restore import newest as newest
from ._restore import snapshot_in_memory as snapshot_in_memory
