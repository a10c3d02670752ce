"""Private PyTorch names (and public ones with private behaviour): they are used in this folder and nowhere else.

A file for each subject. Each function says which private name it stands for, which versions of torch it was checked against,
and what replaces it once the older one is dropped: "nothing yet" means that torch 2.15 has no public way.
"""

from .collectives import all_gather_rows as all_gather_rows
from .collectives import all_reduce_sum as all_reduce_sum
from .collectives import FUNCTIONAL_COLLECTIVES as FUNCTIONAL_COLLECTIVES
from .collectives import mark_works as mark_works
from .collectives import reduce_scatter_rows as reduce_scatter_rows
from .collectives import waits_timed as waits_timed
from .dtensor import clear_sharding_caches as clear_sharding_caches
from .dtensor import detach_keeps_placements as detach_keeps_placements
from .dtensor import dtensor_like as dtensor_like
from .dtensor import global_offset as global_offset
from .dtensor import hiding_shape_propagation as hiding_shape_propagation
from .dtensor import local_shard as local_shard
from .fsdp import allow_integer_parameters as allow_integer_parameters
from .fsdp import around_fsdp as around_fsdp
from .fsdp import BeforeReduction as BeforeReduction
from .fsdp import before_reductions as before_reductions
from .fsdp import defer_gradient_reduction as defer_gradient_reduction
from .fsdp import find_units as find_units
from .fsdp import own_memory as own_memory
from .fsdp import reduce_deferred_gradients as reduce_deferred_gradients
from .fsdp import without_hooks as without_hooks
from .groups import concatenate_meshes as concatenate_meshes
from .groups import copy_group as copy_group
from .groups import flatten_mesh as flatten_mesh
from .groups import group_of_call as group_of_call
from .groups import is_fake_group as is_fake_group
from .groups import join_flattening as join_flattening
from .groups import process_group as process_group
from .groups import says_peer_is_lost as says_peer_is_lost
from .groups import set_timeout as set_timeout
from .groups import start_fake_world as start_fake_world
from .groups import timeout_of as timeout_of
from .groups import world as world
from .groups import world_store as world_store
from .recompute import ignore_profiler_marks as ignore_profiler_marks
from .recompute import in_backward as in_backward
from .recompute import selective_contexts as selective_contexts
from .tensors import dump_memory_snapshot as dump_memory_snapshot
from .tensors import foreach_mul_ as foreach_mul_
from .tensors import foreach_norm as foreach_norm
from .tensors import record_memory_history as record_memory_history
from .tensors import register_pytree as register_pytree
from .tensors import reporting_resizes as reporting_resizes
from .tensors import storage_key as storage_key
from .tensors import tree_flatten as tree_flatten
from .tensors import tree_leaves as tree_leaves
from .tensors import tree_map as tree_map
from .tensors import tree_unflatten as tree_unflatten
from .tracing import allow_recompiles as allow_recompiles
from .tracing import DataDependentOutputException as DataDependentOutputException
from .tracing import DynamicOutputShapeException as DynamicOutputShapeException
from .tracing import fake_mode as fake_mode
from .tracing import FakeTensorMode as FakeTensorMode
from .tracing import functions_replaced as functions_replaced
from .tracing import graph_node as graph_node
from .tracing import is_fake as is_fake
from .tracing import is_fake_type as is_fake_type
from .tracing import packs_saved as packs_saved
from .tracing import TorchDispatchMode as TorchDispatchMode
from .tracing import without_fake_errors as without_fake_errors
from .tracing import without_modes as without_modes
from .tracing import wraps_tensors as wraps_tensors
