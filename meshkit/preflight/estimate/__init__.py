"""Memory estimation before a run: bytes of each rank by kind, and the peak.

The model is built, parallelized and stepped by the same code as in the run, in a fake world that sends nothing, on tensors
without memory; see `estimate`.
"""

from ._drawing import svg as svg
from ._estimate import estimate as estimate
from ._estimate import measure as measure
from ._result import Estimate as Estimate
from ._tracker import Tracker as Tracker
