"""The gradient norm on any mesh, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import copies_of
from meshkit.core.to_device import HOST
from meshkit.mesh import DENSE_AXES, EXPERT_AXES, Mesh, axes_of
from meshkit.step._run import Run


def grad_norm(model: Run | nn.Module | Iterable[Tensor]) -> Tensor:
    """The gradient norm: the 2-norm of all gradients as one vector, same on every rank and every mesh; fp64 scalar.

    Each gradient is counted once however it is sharded or replicated, by its placements.
    Wire: of a run, an all-reduce of a few numbers over its mesh, in which ranks agree on the call; of anything else, one of a
    few scalars per mesh axis that shards some gradient.
    """
    return _norm(model, "grad_norm", {})


def _norm(model: Run | nn.Module | Iterable[Tensor], what: str, facts: Mapping[str, object]) -> Tensor:
    axes: dict[str, DeviceMesh] = {}
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for grad in _gradients(model, counted=True):
        by_axes.setdefault(_sharded_over(grad, axes), []).append(_local(grad))
    where = model.mesh.device if isinstance(model, Run) else next((axis.device_type for axis in axes.values()), None)
    sums = {}
    for sharded, grads in by_axes.items():
        squares = [_sum_of_squares(part).to(where or grads[0].device) for part in _by_device(grads)]
        sums[sharded] = squares[0] if len(squares) == 1 else torch.stack(squares).sum()
    if not isinstance(model, Run):
        return _sum_over(sums, axes).sqrt()
    none = torch.zeros((), dtype=torch.float64, device=model.mesh.device)
    if model.watcher is not None:  # also of a rank without gradients: the others ask for its part
        model.watcher.measured(torch.stack([*sums.values()]).sum() if sums else none)
    # A stage has gradients of its own. Of those that several ranks have alike, the first of them adds.
    own = [value for sharded, value in sums.items() if _is_first(model.mesh, sharded)]
    total = torch.stack(own).sum() if own else none
    (total,) = model.mesh.agreement.meet(what, total, facts=facts)
    return total.sqrt()


def inner_product(run: Run, parameters: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The inner product of two vectors of the size of these parameters, same on every rank and every mesh; fp64 scalar.

    parameters: of the run. left, right: this rank's shard for each. Each entry is counted once however it is sharded.
    Wire: an all-reduce of a few numbers over the mesh, in which ranks agree on the call.
    """
    names = {id(parameter): name for name, parameter in run.named_parameters()}
    copies = copies_of(run.model)
    total = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
    for parameter, one, other in zip(parameters, left, right, strict=True):
        if names[id(parameter)] not in copies and _is_first(run.mesh, _sharded_over(parameter, {})):
            total += (one.double() * other.double()).sum().to(total.device)
    (total,) = run.mesh.agreement.meet("inner_product", total, facts={})
    return total


def _is_first(mesh: Mesh, sharded: tuple[str, ...]) -> bool:
    """Whether this rank is the first of those that have the same shards of gradients with these axes."""
    split = {*mesh.spec.parts(*(axis for name in sharded for axis in axes_of(name)))}
    dense, experts = mesh.spec.parts(*DENSE_AXES), mesh.spec.parts(*EXPERT_AXES)
    view = experts if split - {*dense} else dense
    return mesh.is_first(*(axis for axis in view if axis not in split and axis != "pp"), view=view)


def _sharded_over(grad: Tensor, axes: dict[str, DeviceMesh]) -> tuple[str, ...]:
    """Names of the mesh axes that a gradient is sharded over. Adds their meshes to `axes`."""
    if not isinstance(grad, DTensor):
        return ()
    mesh, names = grad.device_mesh, grad.device_mesh.mesh_dim_names or ()
    sharded = sorted(
        name
        for dim, (name, placement) in enumerate(zip(names, grad.placements, strict=True))
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
    for name in sharded:
        if name not in axes:  # a slice of a mesh takes a millisecond
            axes[name] = mesh[name]
    return tuple(sharded)


def _sum_over(sums: dict[tuple[str, ...], Tensor], axes: dict[str, DeviceMesh]) -> Tensor:
    """The global sum. sums: by the axes that their gradients are sharded over, of this rank's shards.

    Axis by axis: the sums of gradients that an axis shards are all-reduced over it in one message, and then belong to the
    remaining axes. Every rank has the same placements, so all issue the same all-reduces in the same order.
    """
    for axis in sorted(axes):
        over = {sharded: value for sharded, value in sums.items() if axis in sharded}
        reduced = torch.stack(list(over.values()))
        dist.all_reduce(reduced, group=axes[axis].get_group())
        for sharded, value in zip(over, reduced, strict=True):
            del sums[sharded]
            rest = tuple(name for name in sharded if name != axis)
            sums[rest] = sums[rest] + value if rest in sums else value
    return sums[()] if sums else torch.zeros((), dtype=torch.float64)


def clip_grad_norm(model: Run | nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before. See `grad_norm`.

    The factor is max_norm / (norm + 1e-6), as torch.nn.utils.clip_grad_norm_ has it.
    """
    model = model if isinstance(model, (Run, nn.Module)) else list(model)
    norm = _norm(model, "clip_grad_norm", {"max_norm": float(max_norm)})
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if factor.device == HOST and not _torch.is_fake(factor) and float(factor) == 1.0:
        # Nothing to write. On a device the host would wait to know.
        return norm
    if isinstance(model, Run) and model.watcher is not None:
        with model.watcher.writing():
            _scale(model, factor)
    else:
        _scale(model, factor)
    return norm


def _scale(model: Run | nn.Module | Iterable[Tensor], factor: Tensor) -> None:
    for on_device in _by_device([_local(grad) for grad in _gradients(model)]):
        # One call a dtype: a factor rounded to bf16 would scale fp32 gradients by 0.2 % too much or too little.
        for dtype in dict.fromkeys(grad.dtype for grad in on_device):
            grads = [grad for grad in on_device if grad.dtype == dtype]
            _torch.foreach_mul_(grads, factor.to(grads[0].device, dtype))


def _gradients(model: Run | nn.Module | Iterable[Tensor], *, counted: bool = False) -> list[Tensor]:
    """counted: without those of parameters that another rank of pp owns and counts."""
    if not isinstance(model, (Run, nn.Module)):
        grads = [gradient_of(param) for param in model]
    else:
        copies = copies_of(model.model if isinstance(model, Run) else model) if counted else {}
        grads = [gradient_of(param) for name, param in model.named_parameters() if name not in copies]
    return [grad for grad in grads if grad is not None]


def _by_device(grads: list[Tensor]) -> list[list[Tensor]]:
    """With a part of the optimizer on the host, gradients are on two devices."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    return list(by_device.values())


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    # The widest of them: torch takes no norm in a narrower dtype than its input's.
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    # Norms in one kernel for all gradients; squared and added in fp64, so that the sum hardly depends on how they are
    # sharded.
    return torch.stack(list(_torch.foreach_norm(grads, dtype=dtype))).double().square().sum()


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
