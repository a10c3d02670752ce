"""Weight sync (resharding): parameters from one layout of a model to another: other mesh, axes, ranks, dtype."""

from ._layout import Layout as Layout
from ._layout import TensorRegions as TensorRegions
from ._layout import layout_of as layout_of
from ._move import Reallocation as Reallocation
from ._move import prepare_reallocation as prepare_reallocation
from ._move import reallocate as reallocate
from ._plan import ReallocationPlan as ReallocationPlan
from ._plan import Transfer as Transfer
from ._plan import plan_reallocation as plan_reallocation
