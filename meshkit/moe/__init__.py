"""Mixture of experts (MoE): routing and its auxiliary losses (load balancing, z-loss). Nothing here knows a mesh."""

from .aux_loss import AuxiliaryLosses as AuxiliaryLosses
from .aux_loss import Balance as Balance
from .aux_loss import Collected as Collected
from .aux_loss import balance as balance
from .aux_loss import collect as collect
from .aux_loss import update_bias as update_bias
from .replay import REPLAYS as REPLAYS
from .replay import ROUTING as ROUTING
from .replay import RoutingReplay as RoutingReplay
from .replay import replaying as replaying
