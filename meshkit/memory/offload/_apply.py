"""Activation offload on a module: `offload_activations`."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.arguments import require
from meshkit.core.host_accounting import estimate_under_way
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.memory.offload._offload import Offload
from meshkit.memory.offload._streams import FakeStreams, Streams, streams_of
from meshkit.mesh import device_of
from meshkit.plan.match import listed
from meshkit.strategy import ActivationOffload


def offload_activations(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Iterable[str],
    policy: ActivationOffload | None = None,
    keep: Iterable[str] | None = None,
) -> nn.Module:
    """Move tensors that the named blocks save for backward to the host or to disk, in place; parameters keep their names.

    mesh: tensors of its device are moved; None: of the device of the module's parameters.
    blocks: in the order in which forward runs them. keep: blocks whose tensors stay; default: the last `keep_last`.
    Each storage is copied out once, however many saved tensors share it, on a stream of its own, and copied back once, just
    before backward reaches its block. Gradients are bit-identical to those without offload. In-place changes of saved tensors
    are detected, as by autograd. Tensors that embedding, head and loss save are not moved.
    Combines with `recompute` and `torch.compile` of the same blocks in any order: what they still save is moved.
    Wire: nothing; between device and host, `offload_of(module).report()` says what.
    Raises: PlanError for a block that is not in the module, or a device that cannot be told; OffloadError for files that
    cannot be written, and in backward for a saved tensor that was changed in place.
    Source: Wu et al. 2024 (SSDTrain); torch.autograd.graph.saved_tensors_hooks.
    """
    require("offload_activations", "module", module, nn.Module)
    require("offload_activations", "mesh", mesh, DeviceMesh, NoneType)
    require("offload_activations", "policy", policy, ActivationOffload, NoneType)
    policy, blocks = policy or ActivationOffload(), listed(blocks, where="offload_activations", argument="blocks")
    keep = None if keep is None else listed(keep, where="offload_activations", argument="keep")
    if others := [name for name in keep or () if name not in blocks]:
        raise PlanError(
            f"offload_activations(keep=...): {others[0]!r} is none of its blocks, so nothing of it is moved anyway. Name it "
            "in blocks too."
        )
    modules = dict(module.named_modules())
    for name in blocks:
        if name not in modules:
            raise PlanError(
                f"offload_activations: there is no block {name!r}. The first modules are {list(modules)[1:4]}."
            )
        if hasattr(modules[name], "_offload"):
            raise PlanError(f"offload_activations: block {name!r} is offloaded already. Name each block once.")
    # Parameters may still be on meta, or on the host where an optimizer of the host keeps them: the mesh says more.
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    if mesh is not None:
        device = device_of(mesh)
    if device.type == "meta":
        raise PlanError(
            "offload_activations: tensors of device 'meta' cannot be moved. Give the mesh, on cpu or cuda, if parameters "
            "are not where they will be."
        )
    kept_blocks = set(blocks[max(0, len(blocks) - policy.keep_last) :] if keep is None else keep)
    under_way = estimate_under_way()
    streams: Streams = streams_of(device) if under_way is None else FakeStreams(device, late=under_way.late)
    offload = Offload(policy, streams)
    # A chain of blocks for each forward: with several microbatches in flight, each backward fetches ahead along its own.
    module.register_forward_pre_hook(lambda module, args: offload.begin_forward())
    for name in blocks:
        call = _offloaded(type(modules[name]).__call__, offload, keeps=name in kept_blocks)
        # At the call, not the forward: outside of compiled graphs, of recompute, and of what hooks save.
        patch_class(modules[name], __call__=call, _offload=offload)
    return module


def offload_of(module: nn.Module) -> Offload | None:
    """The `Offload` of the module's blocks; None if they have none."""
    for child in module.modules():
        offload = getattr(child, "_offload", None)
        if isinstance(offload, Offload):
            return offload
    return None


def _offloaded(call: Any, offload: Offload, *, keeps: bool) -> Any:
    def offloaded_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # In evaluation and generation nothing is saved, so nothing can move.
        if not torch.is_grad_enabled():
            return call(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            raise PlanError(
                "activation offload: its blocks lie inside of a compiled module, whose graph cannot move tensors. Compile "
                "the blocks: parallelize(compile=True), or block.compile()."
            )
        with offload.block(self, (args, kwargs), keeps=keeps) as scope:
            out = call(self, *args, **kwargs)
        offload.on_backward(scope, out)
        return out

    return offloaded_call
