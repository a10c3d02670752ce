"""Placement (rank mapping, Pipette): which rank of the mesh sits where on unlike links and nodes, and how many blocks its
stage has (Holmes).
"""

from ._orders import Orders as Orders
from ._partition import min_max_partition as min_max_partition
from ._place import Placed as Placed
from ._place import Steps as Steps
from ._place import best_placed as best_placed
from ._place import place as place
