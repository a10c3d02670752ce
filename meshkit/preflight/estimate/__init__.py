"""Memory estimation before a run: bytes of each rank by kind, and the peak.

The model is built, parallelized and stepped by the same code as in the run, in a fake world that sends nothing, on tensors
without memory; see `estimate`.
"""

from ._compose import MemoryProfiles as MemoryProfiles
from ._compose import compose as compose
from ._compose import kept_of_blocks as kept_of_blocks
from ._composed import Composed as Composed
from ._composed import ComposedRank as ComposedRank
from ._drawing import COLOURS as COLOURS
from ._drawing import svg as svg
from ._estimate import Build as Build
from ._estimate import Kernels as Kernels
from ._estimate import MakeOptimizer as MakeOptimizer
from ._estimate import builder_of as builder_of
from ._estimate import estimate as estimate
from ._estimate import measure as measure
from ._estimate import fake_mesh as fake_mesh
from ._result import Estimate as Estimate
from ._tracker import GROUPS as GROUPS
from ._tracker import HOST as HOST
from ._tracker import Tracker as Tracker
