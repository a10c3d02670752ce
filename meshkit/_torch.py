"""Private PyTorch names, imported here and nowhere else.

Each line says which versions it was checked against and what would replace it.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.utils._pytree
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_c10d = torch.ops._c10d_functional


def global_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of this rank's shard.

    2.11, 2.15: exact for uneven shards and for FSDP over TP (_StridedShard). No public replacement yet.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def place_like(param: DTensor, local: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """`local`, where it is, as this rank's part of a tensor that is sharded as `param` is. shape: of the whole, if another.

    2.11, 2.15: the constructor FSDP2 uses; `DTensor.from_local` would move a host tensor to the mesh's device.
    """
    whole = torch.empty(tuple(param.shape) if shape is None else shape, dtype=local.dtype, device="meta")
    spec = DTensorSpec(
        param.device_mesh, param.placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis made of all axes of `mesh`. 2.11, 2.15: `_flatten` is still private; keep the returned object."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """A mesh of several axes out of meshes of one root. 2.11, 2.15: `_concatenate` is still private."""
    return DeviceMesh._concatenate(meshes)


def find_units(module: FSDPModule) -> None:
    """Let the root find its units now, while all of them are in the tree, not at its first forward.

    2.11, 2.15: `_lazy_init` does nothing when called again.
    """
    module._get_fsdp_state()._lazy_init()


def put_off_gradients(module: FSDPModule) -> None:
    """Let backwards leave their gradients whole until `finish_gradients`. Call it before the forwards.

    2.15: public `set_manual_backward_finalization`; 2.11: the same by leaving is_last_backward False.
    """
    module.set_is_last_backward(False)
    if hasattr(module, "set_manual_backward_finalization"):
        module.set_manual_backward_finalization(True)


def finish_gradients(module: FSDPModule) -> None:
    """Reduce the gradients that backwards have left, free whole parameters, and wait.

    2.15: public `finalize_backward`; 2.11: what torch.distributed.pipelining does at the end of its own schedules.
    """
    if hasattr(module, "finalize_backward"):
        module.finalize_backward()
        module.set_manual_backward_finalization(False)
        return
    module.set_is_last_backward(True)
    root = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        if state._fsdp_param_group:
            state._fsdp_param_group.post_backward()
    root._root_post_backward_final_callback()


# The operators behind torch.distributed._functional_collectives, same names and meaning in 2.11 and 2.15. The Python
# wrappers around them return AsyncCollectiveTensor, which breaks the backward of compiled regions in 2.15, and one was
# renamed between the two versions. The tensor must be contiguous.


def _wait(tensor: Tensor) -> Tensor:
    done: Tensor = _c10d.wait_tensor(tensor)
    return done


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, as a recomputed forward is. 2.11, 2.15: -1 outside of one."""
    return torch._C._current_graph_task_id() != -1


def all_reduce_sum(tensor: Tensor, group_name: str) -> Tensor:
    return _wait(_c10d.all_reduce(tensor, "sum", group_name))


def all_gather_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    return _wait(_c10d.all_gather_into_tensor(tensor, size, group_name))


def reduce_scatter_rows(tensor: Tensor, size: int, group_name: str) -> Tensor:
    return _wait(_c10d.reduce_scatter_tensor(tensor, "sum", size, group_name))


def register_pytree(
    node: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Let torch see the tensors in objects of a class. flatten: object -> (children, context).

    2.11: FSDP2 finds what a module returns so. 2.15: it looks into dataclasses instead, and other parts of torch here.
    """
    torch.utils._pytree.register_pytree_node(node, flatten, unflatten)  # type: ignore[arg-type]


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share memory, as long as one of them lives, on meta too.

    2.11, 2.15: `_cdata`; the public `data_ptr` is 0 for every tensor on meta.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def ignore_profiler_marks() -> None:
    """Let selective checkpoints look past `record_function`, which FSDP's hooks call more often the second time.

    2.11, 2.15: `SAC_IGNORED_OPS` is what they do not count; there is no argument for it.
    """
    profiler = torch.ops.profiler
    marks = (profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction)
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(marks)


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long an operation of the group may take. 2.11, 2.15: every backend has it, no public way to read it."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """2.15: public `torch.distributed.set_timeout`; 2.11: per backend."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)


def process_group(name: str) -> ProcessGroup:
    """The process group of that `group_name`. 2.11, 2.15: how functional collectives find theirs; not public."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def group_of_call(args: tuple[Any, ...]) -> ProcessGroup:
    """The process group among the arguments of a c10d operator: boxed (c10d::) or by name (_c10d_functional::).

    2.11, 2.15: no public way to read either.
    """
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))
