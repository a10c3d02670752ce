"""Print what a run will be before it starts: where each parameter lies, and what one step sends on which axis.

Pure arithmetic over the same tables that `parallelize` executes: no process group, no ranks, a model on meta is enough.
"""

from ._explain import default_device as default_device
from ._explain import explain as explain
from ._explain import explain_microbatch as explain_microbatch
from ._explain import explain_resolved as explain_resolved
from ._explain import explain_step as explain_step
from ._explanation import PHASES as PHASES
from ._explanation import Explanation as Explanation
from ._explanation import Hierarchical as Hierarchical
from ._explanation import Message as Message
from ._explanation import ParamGroup as ParamGroup
from ._explanation import ParamRow as ParamRow
from ._explanation import Sent as Sent
from ._explanation import Traffic as Traffic
from ._links import CollectivesChoice as CollectivesChoice
from ._links import choose_collectives as choose_collectives
from ._rank import LocalParam as LocalParam
from ._rank import RankModel as RankModel
