"""Candidates for splitting a region, from names, from the model's own declared plan, and from what its program computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from meshkit.errors import PlanError
from meshkit.parallel.tensor.layout import number_of, tensor_layout
from meshkit.plan import Style, column, enter, match_table, per_head, replicate, row, sequence
from meshkit.program import Example, Program, TensorRef, Trace, tensors

Names = dict[str, Style]

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
    flows, parts, read = _flows(trace, modules), _parts(trace, modules), _read_by_others(trace)
    called = frozenset(call.name for call in trace.calls) - read
    found: dict[str, list[Names]] = {}
    for name, module in modules.items():
        if name in frames or not any(True for _ in module.children()):
            continue
        options = [_by_name(name, named, modules), _by_declaration(name, declared, modules, size)]
        options += _by_flow(name, modules, flows, parts, size)
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


def _inside(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules inside a region that hold parameters."""
    return [
        child
        for child, module in modules.items()
        if child.startswith(f"{name}.") and any(True for _ in module.parameters(recurse=False))
    ]


def _by_name(name: str, named: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> Names:
    inside = _inside(name, modules)
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
    inside = _inside(name, modules)
    styles = {child: DECLARED.get(declared.get(child, "")) or _before(modules[child], size) for child in inside}
    if not {"column", "row"} <= {style.kind for style in styles.values()} or _holds_stacks(name, modules):
        return {}
    return {name: enter()} | styles


def _before(module: nn.Module, size: int) -> Style:
    """A module between a region's input and its columns: its output is all features, on every rank."""
    is_linear = isinstance(module, nn.Linear) and "weight" in module._parameters
    return column(gather=True) if is_linear and not _features(module) % size else per_head()


# ------------------------------------------------------------------------------------------------------- the program


def _flows(trace: Trace, modules: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """For each module with parameters: the linear layers whose output it reads, with no other linear layer between."""
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    sources: dict[int, set[str]] = defaultdict(set)  # storage -> the linear layers that it was computed from
    reads: dict[str, set[str]] = defaultdict(set)
    inside: dict[int, str] = {}  # call -> the linear layer that it is a part of
    for number, call in enumerate(trace.calls):
        inside[number] = call.name if call.name in linears else inside.get(call.parent, "")
    for operation in trace.operations:
        layer = inside.get(operation.call, "")
        inputs = {ref.storage for ref in tensors((operation.args, operation.kwargs))}
        read = set().union(*(sources[storage] for storage in inputs)) - {layer}
        owner = trace.calls[operation.call].name if operation.call >= 0 else ""
        reads[layer or owner] |= read
        for ref in tensors(operation.outputs):
            if layer and ref.storage not in inputs:
                sources[ref.storage] = {layer}
            elif not layer:
                sources[ref.storage] |= read
    return reads


def _parts(trace: Trace, modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Linear layer -> the sizes of the parts in which its output features are read, where they are several."""
    layers: dict[int, str] = {}  # storage -> the layer whose output it is
    for call in trace.calls:
        if isinstance(modules.get(call.name), nn.Linear) and isinstance(call.output, TensorRef):
            layers[call.output.storage] = call.name
    ranges: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for operation in trace.operations:
        for ref in tensors(operation.outputs):
            if ref.storage in layers:
                name = layers[ref.storage]
                ranges[name] |= _features_shown(ref, _features(modules[name]))
    found = {name: _partition(shown, _features(modules[name])) for name, shown in ranges.items()}
    return {name: parts for name, parts in found.items() if parts}


def _features(linear: nn.Module) -> int:
    return int(linear.out_features)  # type: ignore[arg-type]


def _features_shown(ref: TensorRef, width: int) -> set[tuple[int, int]]:
    """The features that a view of [..., width] shows of each row, if they lie side by side."""
    within = [(size, stride) for size, stride in zip(ref.shape, ref.stride, strict=True) if stride < width]
    count = prod(size for size, _ in within)
    extent = 1 + sum((size - 1) * stride for size, stride in within)
    start = ref.offset % width
    return {(start, start + extent)} if count == extent < width and start + extent <= width else set()


def _partition(ranges: set[tuple[int, int]], width: int) -> tuple[int, ...]:
    """The sizes of ranges that follow each other from 0 to the width; those inside of others do not count."""
    widest = sorted(
        one for one in ranges if not any(other != one and other[0] <= one[0] and one[1] <= other[1] for other in ranges)
    )
    ends = [0, *(end for _, end in widest)]
    whole = [start for start, _ in widest] == ends[:-1] and ends[-1] == width
    return tuple(end - start for start, end in widest) if whole and len(widest) > 1 else ()


def _by_flow(
    name: str,
    modules: Mapping[str, nn.Module],
    flows: Mapping[str, set[str]],
    parts: Mapping[str, tuple[int, ...]],
    size: int,
) -> list[Names]:
    """Columns, whose features only meet again in a row; what makes their inputs is whole, or joined."""
    inside = _inside(name, modules)
    linears = [child for child in inside if isinstance(modules[child], nn.Linear)]
    reads = {child: flows.get(child, set()) & set(linears) for child in inside}
    before = {child: _all_before(child, reads) for child in linears}
    rows = [child for child in linears if reads[child] and not any(child in before[other] for other in linears)]
    columns = {child for end in rows for child in reads[end]} if rows else set()
    columns -= {child for other in columns for child in before[other]}
    if not rows or not columns or _holds_stacks(name, modules):
        return []
    styles: Names = {}
    for child in inside:
        if child in rows:
            styles[child] = row()
        elif child in columns:
            shared = parts.get(child, ())
            styles[child] = column(parts=() if any(part % size for part in shared) else shared)
        elif any(end in reads[child] for end in rows):
            styles[child] = sequence()
        else:
            styles[child] = _before(modules[child], size)
    widths = {_features(modules[child]) for child in columns} | {int(modules[child].in_features) for child in rows}  # type: ignore[arg-type]
    own = tuple(
        key for key, param in modules[name].named_parameters(recurse=False) if param.shape and not param.shape[0] % size
    )
    return [{name: enter(local=local, split=own)} | styles for local in _numbers(modules[name], widths, size)]


def _all_before(name: str, reads: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(reads[name])
    while left:
        layer = left.pop()
        if layer not in found:
            found.add(layer)
            left += reads.get(layer, ())
    return found


def _numbers(module: nn.Module, widths: set[int], size: int) -> list[tuple[str, ...]]:
    """Sets of the module's whole numbers that may count heads and features of all ranks, the smallest first."""
    own = {name: number_of(module, name) for name in vars(module)}
    config = getattr(module, "config", None)
    of_config = {f"config.{name}": number_of(module, f"config.{name}") for name in vars(config)} if config else {}
    heads, of_configs = (
        tuple(name for name, value in table.items() if value and not value % size and _counts_heads(name))
        for table in (own, of_config)
    )
    features = tuple(name for name, value in own.items() if value in widths and name not in heads)
    sets = [(), heads, heads + features, heads + of_configs, heads + features + of_configs]
    return list(dict.fromkeys(sets))


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(part in name for part in ("dim", "size", "group", "per"))


def _holds_stacks(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module inside has parameters for each of several experts."""
    return any(param.ndim > 2 for param in modules[name].parameters())
