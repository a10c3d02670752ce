"""Say before a run how much memory each of its ranks will need, and what for.

The model is built, parallelized and stepped by the same code as in the run, in a world that sends nothing and on tensors
without values; see `estimate`.
"""

from ._drawing import COLOURS as COLOURS
from ._drawing import svg as svg
from ._estimate import Build as Build
from ._estimate import Kernels as Kernels
from ._estimate import MakeOptimizer as MakeOptimizer
from ._estimate import built_by as built_by
from ._estimate import estimate as estimate
from ._estimate import measure as measure
from ._estimate import place_of as place_of
from ._estimate import pretended_mesh as pretended_mesh
from ._estimate import sized as sized
from ._recipe import Recipe as Recipe
from ._recipe import load_script as load_script
from ._result import Estimate as Estimate
from ._result import axes_said as axes_said
from ._result import said as said
from ._tracker import GROUPS as GROUPS
from ._tracker import HOST as HOST
from ._tracker import Tracker as Tracker
