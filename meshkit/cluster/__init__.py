"""Cluster: what a run is on, as data. Devices, tiers of links, measured curves; and the seconds of a kernel or message."""

from ._cluster import Cluster as Cluster
from ._cluster import Faults as Faults
from ._cluster import Host as Host
from ._cluster import Measured as Measured
from ._cluster import Overlap as Overlap
from ._cluster import Tier as Tier
from ._collectives import MUTUAL as MUTUAL
from ._collectives import collective_s as collective_s
from ._collectives import hierarchical_s as hierarchical_s
from ._collectives import hop_s as hop_s
from ._collectives import stage_hop_s as stage_hop_s
from ._device import Device as Device
from ._device import Efficiency as Efficiency
from ._device import KernelCurve as KernelCurve
from ._device import PowerPoint as PowerPoint
from ._kernels import Op as Op
from ._kernels import kernel_s as kernel_s
from ._place import Place as Place
from ._place import place_of as place_of
from ._place import groups_of as groups_of
from ._place import memory_of as memory_of
from ._place import place_of_stages as place_of_stages
from ._place import ranks_of_stage as ranks_of_stage
from ._place import speed_of as speed_of
from ._unlike import Unlike as Unlike
