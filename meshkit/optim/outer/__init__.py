"""Local updates on dp_replicate, for slow links: local SGD, post-local SGD, DiLoCo, Streaming DiLoCo, CO2."""

from ._outer import OuterOptimizer as OuterOptimizer
from ._policy import CO2 as CO2
from ._policy import DiLoCo as DiLoCo
from ._policy import LocalSGD as LocalSGD
from ._policy import Policy as Policy
from ._policy import QuadraticRule as QuadraticRule
from ._traffic import PeriodTraffic as PeriodTraffic
from ._traffic import period_traffic as period_traffic
from ._fragments import fragments_of_model as fragments_of_model
from ._outer import outer_dtype as outer_dtype
from ._meets import Met as Met
from .place import MeetingPlace as MeetingPlace
