"""Say before a run how much memory each of its ranks will need, and what for.

The model is built, parallelized and stepped by the same code as in the run, in a world that sends nothing and on tensors
without values; see `estimate`.
"""

from ._drawing import svg as svg
from ._estimate import estimate as estimate
from ._estimate import measure as measure
from ._result import Estimate as Estimate
from ._tracker import Tracker as Tracker
