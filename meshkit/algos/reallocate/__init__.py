"""Weight sync (resharding): parameters from one layout of a model to another: other mesh, axes, ranks, dtype."""

from meshkit.core.reshard import Layout as Layout
from meshkit.core.reshard import ReallocationPlan as ReallocationPlan
from meshkit.core.reshard import TensorRegions as TensorRegions
from meshkit.core.reshard import Transfer as Transfer
from meshkit.core.reshard import plan_reallocation as plan_reallocation
from ._layout import layout_of as layout_of
from ._move import Reallocation as Reallocation
from ._move import prepare_reallocation as prepare_reallocation
from ._move import reallocate as reallocate
