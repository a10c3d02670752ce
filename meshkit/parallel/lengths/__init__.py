"""Dynamic context parallelism (FlexSP, ByteScale, Zeppelin): which ranks compute which documents, from their lengths."""

from ._costs import LengthCosts as LengthCosts
from ._plan import LengthPlan as LengthPlan
from ._plan import Pace as Pace
from ._plan import Runs as Runs
from ._plan import document_runs as document_runs
from ._planner import Documents as Documents
from ._planner import plan_lengths as plan_lengths
