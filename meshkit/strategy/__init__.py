"""The strategy (configuration): every choice of a run as frozen data. No modules, no ranks."""

from ._context import Balance as Balance
from ._context import ContextPolicy as ContextPolicy
from ._context import Scheme as Scheme
from ._data import DataPolicy as DataPolicy
from ._data import GatherWire as GatherWire
from ._data import ReduceWire as ReduceWire
from ._experts import Capacity as Capacity
from ._experts import ExpertPolicy as ExpertPolicy
from ._experts import MakeDispatcher as MakeDispatcher
from ._memory import ActivationOffload as ActivationOffload
from ._memory import Budget as Budget
from ._memory import ChunkedLoss as ChunkedLoss
from ._memory import Fp8 as Fp8
from ._memory import Kept as Kept
from ._memory import MemoryPolicy as MemoryPolicy
from ._memory import OptimizerOffload as OptimizerOffload
from ._memory import OptimizerPolicy as OptimizerPolicy
from ._memory import Precision as Precision
from ._memory import Rates as Rates
from ._memory import Recompute as Recompute
from ._memory import RecomputeMode as RecomputeMode
from ._memory import States as States
from ._pipeline import PipelinePolicy as PipelinePolicy
from ._strategy import BlockOverride as BlockOverride
from ._strategy import IfUnproved as IfUnproved
from ._strategy import Strategy as Strategy
