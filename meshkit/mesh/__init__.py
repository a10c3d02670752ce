"""Who: the axes of a mesh, their sizes, and the ranks of each group."""

from .groups import group_axes as group_axes
from .host import HostRanks as HostRanks
from .host import host_ranks as host_ranks
from .mesh import Mesh as Mesh
from .mesh import change_axes as change_axes
from .mesh import device_of as device_of
from .mesh import gather_over_data as gather_over_data
from .mesh import init_mesh as init_mesh
from .mesh import replica_mesh as replica_mesh
from .spec import DENSE_AXES as DENSE_AXES
from .spec import EXPERT_AXES as EXPERT_AXES
from .spec import NESTED as NESTED
from .spec import MeshSpec as MeshSpec
from .spec import axes_of as axes_of
from .world import fake_world as fake_world
from .world import main_rank_first as main_rank_first
from .world import start_world as start_world
