"""What `parallelize` does to the blocks of a rank: their linears, what they keep, their shards, and who watches them.

Each takes what was resolved and the modules, and decides nothing.
"""

from __future__ import annotations

from torch import nn

from meshkit.core import _torch
from meshkit.core.asked_once import AskedOnce
from meshkit.core.gradient import sum_later
from meshkit.loss.linear_logits import chunk_head
from meshkit.memory import chunk_mlp, fp8_linears, treat
from meshkit.memory.offload import offload_activations
from meshkit.mesh import Mesh
from meshkit.parallel.data import fully_shard, gather_around, kept_units, prefetch_gathers
from meshkit.parallel.expert import begin_ahead, in_expert_view
from meshkit.parallel.pipeline import split_linears
from meshkit.parallel.same_units import SameUnits
from meshkit.parallel.shardings import shard_mesh
from meshkit.resolve import Resolved
from meshkit.strategy import Budget


def change_linears(model: nn.Module, resolved: Resolved) -> None:
    """Linear layers with another forward or backward: fp8, the head of a chunked loss, separate weight gradients."""
    precision, loss = resolved.memory.precision, resolved.memory.loss
    if precision is not None and precision.fp8 is not None:
        fp8_linears(model, linears=resolved.fp8, policy=precision.fp8)
    if loss is not None and resolved.head is not None:
        chunk_head(model.get_submodule(resolved.head), loss)
    # The backward of a compiled block is one graph, which cannot be split.
    if resolved.splits_backward and not resolved.strategy.compile:
        split_linears(model)


def keep_less(model: nn.Module, resolved: Resolved, blocks: list[str], mesh: Mesh) -> None:
    """Activation checkpointing, chunked feed-forwards, and offload of what this rank's blocks still keep."""
    present = dict(model.named_modules())  # with pp, those of this rank's stages
    memory, treated = resolved.memory, resolved.treatments
    for name in blocks:
        treat(present[name], treated[name], compiled=bool(resolved.strategy.compile))
    chunk_mlp(model, mlps=[name for name in resolved.mlps if name in present], chunks=memory.mlp_chunks)
    not_offloaded = [name for name in blocks if not treated[name].offload]
    if memory.offload is not None and not (isinstance(memory.recompute, Budget) and not_offloaded == blocks):
        # All blocks, those that are not offloaded too: their order tells when to fetch the others ahead of backward.
        offload_activations(model, mesh.dense, blocks=blocks, policy=memory.offload, keep=not_offloaded)


def shard_units(
    model: nn.Module, mesh: Mesh, resolved: Resolved, names: dict[str, nn.Module], blocks: list[str], units: list[str]
) -> None:
    """ZeRO: experts over their own ranks, then the rest; with experts, blocks are gathered ahead of the host's waits."""
    row, precision, policy = resolved.shardings, resolved.memory.precision, resolved.strategy.data
    keep_gathered = kept_units(blocks, units, resolved.head)
    experts = resolved.experts_of(mesh["pp"].get_local_rank())
    # Groups are made by all ranks of the mesh, on stages without experts too.
    over = (
        shard_mesh(mesh, row, experts=True, policy=policy) if resolved.experts and in_expert_view(mesh.spec) else None
    )
    for name in experts:
        assert over is not None
        # cast_inputs=False: routing weights are in fp32 at least, and must stay so.
        fully_shard(names[name], over, zero=row, precision=precision, cast_inputs=False, policy=policy)
        for block in blocks:
            if name.startswith(f"{block}."):
                gather_around(names[block], names[name], free=row.frees_parameters and block not in keep_gathered)
    whole = {name: param for name, param in model.named_parameters() if name in resolved.whole}
    for param in whole.values():
        sum_later(param)
    fully_shard(
        model,
        shard_mesh(mesh, row, policy=policy),
        units=[*blocks, *units],
        keep_gathered=keep_gathered,
        ignored=experts,
        whole=whole,
        zero=row,
        precision=precision,
        policy=policy,
    )
    if experts and resolved.strategy.experts.follows_load:
        begin_ahead(_runs_of_blocks(resolved, names, blocks, experts))
    # With pp parameters are gathered once a step, before the host waits for anything.
    if experts and resolved.cut is None:
        inside = [[names[name] for name in experts if name.startswith(f"{block}.")] for block in blocks]
        prefetch_gathers([[names[block], *others] for block, others in zip(blocks, inside, strict=True)])


def _runs_of_blocks(
    resolved: Resolved, names: dict[str, nn.Module], blocks: list[str], experts: list[str]
) -> list[list[tuple[nn.Module, nn.Module]]]:
    """(block, its experts) in order, those of each stage apart: between two stages a rank does other things."""
    runs: dict[int | None, list[tuple[nn.Module, nn.Module]]] = {}
    for block in blocks:
        stage = None if resolved.cut is None else resolved.cut.stages.stage_of(block)
        inside = [(names[block], names[name]) for name in experts if name.startswith(f"{block}.")]
        runs.setdefault(stage, []).extend(inside)
    return list(runs.values())


def watch(model: nn.Module, mesh: Mesh, resolved: Resolved, blocks: list[str], asked: AskedOnce) -> SameUnits | None:
    """None where no rows are split over ranks, and with pp, whose stages gather once a step."""
    group = mesh.tokens.get_group()
    if group.size() == 1 or resolved.cut is not None or _torch.is_fake_group(group):
        return None
    experts = resolved.experts_of(mesh["pp"].get_local_rank())
    return SameUnits(model, group, watch_units=not resolved.strategy.compile, experts=experts, look=asked.look)
