"""Parts of a model: which parameters each block, unit and module of experts holds on a rank, before FSDP shards them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from meshkit.parallel.data import shard_units
from meshkit.parallel.expert import in_expert_view
from meshkit.preflight.explain import LocalParam, RankModel
from meshkit.resolve import Resolved


@dataclass(frozen=True, eq=False)
class Part:
    """A block, or what is in none (`name` is then empty). own: its parameters; experts: those of each module of experts."""

    own: tuple[LocalParam, ...]
    experts: Mapping[str, tuple[LocalParam, ...]]
    buffer_bytes: tuple[int, ...]
    is_unit: bool


@dataclass(frozen=True, eq=False)
class Parts:
    """blocks: by the first block of each kind. around: name, id and parameter of what is in no block, under every name."""

    blocks: Mapping[str, Part]
    around: tuple[tuple[str, int, LocalParam], ...]
    around_buffers: tuple[tuple[str, int], ...]
    linears: frozenset[str]


def parts_of(resolved: Resolved, kinds: Mapping[str, str]) -> Parts:
    """kinds: block -> the first one like it."""
    # Of all stages: which of them a rank runs is asked later, and of blocks as wholes.
    local = RankModel(resolved=replace(resolved, cut=None), coordinate={}).params
    model = resolved.program.model
    named = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(named[name]): name for name in reversed(list(local))}
    separate = set(shard_units(named, resolved.blocks))
    # Elsewhere experts are sharded with the rest of their block.
    experts = tuple(resolved.experts) if in_expert_view(resolved.spec) else ()
    found: dict[str, Part] = {}
    for block in dict.fromkeys(kinds.values()):
        inside = {name: param for name, param in local.items() if name.startswith(f"{block}.")}
        of_experts = {
            name: tuple(param for key, param in inside.items() if key.startswith(f"{name}."))
            for name in experts
            if name.startswith(f"{block}.")
        }
        routed = tuple(f"{name}." for name in of_experts)
        found[block] = Part(
            own=tuple(param for name, param in inside.items() if not (routed and name.startswith(routed))),
            experts=of_experts,
            buffer_bytes=_buffers(model.get_submodule(block)),
            is_unit=block in separate,
        )
    prefixes = tuple(f"{block}." for block in kinds)
    outside = {name: param for name, param in named.items() if not (prefixes and name.startswith(prefixes))}
    buffers = [
        (name, buffer.untyped_storage().nbytes())
        for name, buffer in model.named_buffers()
        if not (prefixes and name.startswith(prefixes))
    ]
    return Parts(
        blocks=found,
        around=tuple((name, id(param), local[first_names[id(param)]]) for name, param in outside.items()),
        around_buffers=tuple(buffers),
        linears=frozenset(
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and type(module).forward is nn.Linear.forward
            and module.weight.requires_grad
        ),
    )


def _buffers(module: nn.Module) -> tuple[int, ...]:
    return tuple(buffer.untyped_storage().nbytes() for buffer in module.buffers())


def units_around(around: Sequence[tuple[str, int, LocalParam]], units: Sequence[str]) -> dict[str, list[LocalParam]]:
    """Unit -> its parameters, of those in no block that a rank has; "" has the rest, and those that units share."""
    separate = []
    for unit in units:
        inside = {key for name, key, _ in around if name.startswith(f"{unit}.")}
        outside = {key for name, key, _ in around if not name.startswith(f"{unit}.")}
        if inside and not inside & outside:
            separate.append(unit)
    found: dict[str, list[LocalParam]] = {unit: [] for unit in (*separate, "")}
    seen: set[int] = set()
    for name, key, param in around:
        if key not in seen:
            seen.add(key)
            found[next((unit for unit in separate if name.startswith(f"{unit}.")), "")].append(param)
    return found
