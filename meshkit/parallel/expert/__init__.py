"""Expert parallelism (EP) for mixture-of-experts models: experts over ranks, tokens sent to them by all-to-all."""

from ._apply import expert_parallel as expert_parallel
from ._apply import in_expert_view as in_expert_view
from ._apply import plan_experts as plan_experts
from ._balance import refuse_sequence_balance as refuse_sequence_balance
from ._balance import share_counts as share_counts
from ._balance import step_counts as step_counts
from ._balance import step_dropped as step_dropped
from ._balance import step_losses as step_losses
from ._balance import update_biases as update_biases
from ._dispatch import AllToAll as AllToAll
from ._dispatch import Compute as Compute
from ._dispatch import Dispatcher as Dispatcher
from ._dispatch import DispatchPlan as DispatchPlan
from ._dispatch import OneRank as OneRank
from ._hot_experts import HotExperts as HotExperts
from ._hot_experts import note_counts as note_counts
from ._padded import PaddedAllToAll as PaddedAllToAll
from ._padded import refuse_overflow as refuse_overflow
from ._stacks import ExpertLayout as ExpertLayout
from ._stacks import expert_layouts as expert_layouts
from ._traffic import dispatch_traffic as dispatch_traffic
from ._traffic import even_routing as even_routing
from ._traffic import packed_traffic as packed_traffic
from ._traffic import padded_traffic as padded_traffic
