"""Candidates for splitting a region, from names, from the model's own declared plan, and from what its program computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshkit.errors import PlanError
from meshkit.parallel.tensor.flows import flows_of, parts_of
from meshkit.parallel.tensor.layout import tensor_layout
from meshkit.parallel.tensor.splits import Names, before_columns, by_flow, by_groups, holds_stacks, inside_of, spans
from meshkit.plan import Style, column, enter, match_table, per_head, replicate, row
from meshkit.program import Example, Program, Trace, tensors

# transformers' words for styles, in `base_model_tp_plan` of a config.
DECLARED = {
    "colwise": column(),
    "rowwise": row(),
    "replicated_with_grad_allreduce": per_head(),
}


@dataclass(frozen=True)
class Candidates:
    """regions: region -> the styles of all modules in it, best first. called: modules whose parameters nobody else computes
    with. read: those whose parameters others read. last: those that return the model's output."""

    regions: Mapping[str, list[Names]]
    called: frozenset[str]
    read: frozenset[str]
    last: frozenset[str]


def candidates(
    program: Program,
    example: Example,
    named: Mapping[str, Style],
    frames: set[str],
    *,
    size: int,
) -> Candidates:
    """The candidates of all regions.

    named: styles by names. frames: modules that are no regions.
    """
    declared = _declared(program.model)
    modules = dict(program.model.named_modules(remove_duplicate=False))
    trace = program.read(example, {})
    flows, parts, read = flows_of(trace, modules), parts_of(trace, modules), _read_by_others(trace)
    called = frozenset(call.name for call in trace.calls) - read
    found: dict[str, list[Names]] = {}
    for name, module in modules.items():
        if not name or isinstance(module, nn.ModuleList | nn.ModuleDict) or not any(True for _ in module.children()):
            continue
        if name in frames:
            options = by_groups(name, modules, flows, parts, size, within=False)
            found[name] = [each for each in options if _fits(name, each, module, called, size)]
            continue
        options = [_by_name(name, named, modules), _by_declaration(name, declared, modules, size)]
        options += [each for each in by_flow(name, modules, flows, parts, size) if spans(name, each)]
        options += by_groups(name, modules, flows, parts, size)
        found[name] = [each for each in _different(options) if each and _fits(name, each, module, called, size)]
    ends = {ref.storage for ref in tensors(trace.output)}
    last = {call.name for call in trace.calls if any(ref.storage in ends for ref in tensors(call.output))}
    return Candidates(found, called, read, frozenset(last))


def _read_by_others(trace: Trace) -> frozenset[str]:
    apart: set[str] = set()
    for operation in trace.operations:
        for ref in tensors((operation.args, operation.kwargs)):
            kind, _, name = trace.storages[ref.storage].source.partition(" ")
            owner = name.rpartition(".")[0]
            if kind == "parameter" and owner not in _calls_around(trace, operation.call):
                apart.add(owner)
    return frozenset(apart)


def _calls_around(trace: Trace, call: int) -> set[str]:
    """The modules whose calls an operation is inside of."""
    around = set()
    while call >= 0:
        around.add(trace.calls[call].name)
        call = trace.calls[call].parent
    return around


def _fits(name: str, styles: Names, module: nn.Module, called: frozenset[str], size: int) -> bool:
    """Whether the styles can be laid out, and nobody else reads the layers that they split."""
    if any(style.kind in ("column", "row") and child not in called for child, style in styles.items()):
        return False
    alone = nn.Module()
    alone.part = module
    table = {f"part{child.removeprefix(name)}": style for child, style in styles.items()}
    try:
        tensor_layout(alone, table, size=size, sequence=False)
    except PlanError:
        return False
    return True


def _declared(model: nn.Module) -> dict[str, str]:
    """Module -> the word of the plan that transformers' models have with them, under patterns of the whole model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, str] = {}
    for pattern, word in (getattr(model, "_tp_plan", None) or {}).items():
        style = replicate(optional=True)
        found |= dict.fromkeys(match_table({pattern: style}, modules, what="module"), word)
    return found


def _different(options: Sequence[Names]) -> Iterator[Names]:
    for index, option in enumerate(options):
        if option not in options[:index]:
            yield option


def _by_name(name: str, named: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> Names:
    inside = inside_of(name, modules)
    if name in named and named[name].kind in ("enter", "attention"):
        # Beside columns and rows, what is inside computes with what the region was given.
        return {name: named[name]} | {
            child: per_head() if named[child].kind in ("replicate", "sequence") else named[child] for child in inside
        }
    if {"column", "row"} <= {named[child].kind for child in inside if child.rpartition(".")[0] == name}:
        return {child: named[child] for child in inside}  # a pair
    return {}


def _by_declaration(name: str, declared: Mapping[str, str], modules: Mapping[str, nn.Module], size: int) -> Names:
    """The model's own plan. What it does not name is computed with what the region was given."""
    inside = inside_of(name, modules)
    styles = {child: DECLARED.get(declared.get(child, "")) or before_columns(modules[child], size) for child in inside}
    if not {"column", "row"} <= {style.kind for style in styles.values()} or holds_stacks(name, modules):
        return {}
    return {name: enter()} | styles
