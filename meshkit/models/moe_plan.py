"""What happens to each part of a model with experts on each axis."""

from collections.abc import Iterable

from meshkit.models.llama_plan import LLAMA_PLAN
from meshkit.plan import Plan, Style, column, enter, experts, row, sequence


def moe_plan(layers: int, *, dense: Iterable[int] = (), shared: bool = False) -> Plan:
    """The plan of a decoder with `layers` layers, of which those in `dense` have no experts.

    shared: every token visits shared experts too.
    """
    dense = set(dense)
    tensor = {name: style for name, style in LLAMA_PLAN.tensor.items() if not name.startswith("layers.*.mlp")}
    for kind, numbers in (("dense", dense), ("moe", set(range(layers)) - dense)):
        if numbers:
            mlp = f"layers.{_choice(numbers)}.mlp"
            tensor |= _dense(mlp) if kind == "dense" else _moe(mlp, shared)
    return Plan(tensor=tensor, blocks=LLAMA_PLAN.blocks, units=LLAMA_PLAN.units)


def _choice(numbers: set[int]) -> str:
    return "{" + ",".join(map(str, sorted(numbers))) + "}"


def _dense(mlp: str) -> dict[str, Style]:
    return {mlp: enter(), f"{mlp}.{{gate,up}}_proj": column(), f"{mlp}.down_proj": row()}


def _moe(mlp: str, shared: bool) -> dict[str, Style]:
    routed = {f"{mlp}.gate": sequence(), f"{mlp}.experts": experts()}
    return routed | (_dense(f"{mlp}.shared_experts") if shared else {})
