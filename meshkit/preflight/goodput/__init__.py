"""Goodput: the share of the wall clock in which a run with failures trains, and what the rest is spent on.

Failures (MTBF), restarts, checkpoints on storage and in memory with their best intervals (Young, Daly), jitter of stragglers,
hot spares and shrinking. Closed forms alone: no ranks, no model, no cluster.
"""

from ._faults import Checkpoints as Checkpoints
from ._faults import Faults as Faults
from ._faults import in_memory as in_memory
from ._faults import on_storage as on_storage
from ._goodput import Goodput as Goodput
from ._goodput import Saved as Saved
from ._goodput import goodput as goodput
from ._interval import best_interval_s as best_interval_s
from ._interval import daly_s as daly_s
from ._interval import young_s as young_s
from ._jitter import expected_max as expected_max
from ._renewal import Spent as Spent
from ._spares import Alternative as Alternative
from ._spares import shrink as shrink
from ._spares import spares as spares
from ._spares import stalled_share as stalled_share
