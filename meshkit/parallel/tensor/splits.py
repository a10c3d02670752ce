"""Candidates from what a region's program computes: layers are columns whose features only meet again in another, a row."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshkit.core.linear import is_linear, linear_shape
from meshkit.parallel.tensor.flows import features
from meshkit.parallel.tensor.layout import number_of
from meshkit.plan import Style, column, enter, per_head, replicate, row, sequence

Names = dict[str, Style]


def inside_of(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules inside a region that hold parameters."""
    inside = modules[name].named_modules(prefix=name, remove_duplicate=False)
    return [child for child, module in inside if child != name and any(True for _ in module.parameters(recurse=False))]


def before_columns(module: nn.Module, size: int) -> Style:
    """A module between a region's input and its columns: its output is all features, on every rank."""
    splits = is_linear(module) and "weight" in module._parameters and not features(module) % size
    return column(gather=True) if splits else per_head()


def holds_stacks(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module inside has parameters for each of several experts."""
    return any(param.ndim > 2 for param in modules[name].parameters())


def by_flow(
    name: str,
    modules: Mapping[str, nn.Module],
    flows: Mapping[str, set[str]],
    parts: Mapping[str, tuple[int, ...]],
    size: int,
) -> list[Names]:
    """Columns, whose features only meet again in a row; what makes their inputs is whole, or joined."""
    inside = inside_of(name, modules)
    linears = [child for child in inside if is_linear(modules[child])]
    reads = {child: flows.get(child, set()) & set(linears) for child in inside}
    before = {child: _all_before(child, reads) for child in linears}
    rows = [child for child in linears if reads[child] and not any(child in before[other] for other in linears)]
    columns = {child for end in rows for child in reads[end]} if rows else set()
    columns -= {child for other in columns for child in before[other]}
    if not rows or not columns or holds_stacks(name, modules):
        return []
    styles: Names = {}
    for child in inside:
        if child in rows:
            styles[child] = row()
        elif child in columns:
            shared = parts.get(child, ())
            styles[child] = column(parts=() if any(part % size for part in shared) else shared)
        elif _gives_heads(modules[child], modules[child.rpartition(".")[0]], size):
            styles[child] = column()
        elif any(end in reads[child] for end in rows):
            styles[child] = sequence()
        else:
            styles[child] = before_columns(modules[child], size)
    shapes = [linear_shape(modules[child]) for child in rows]
    widths = {features(modules[child]) for child in columns} | {shape.in_features for shape in shapes if shape}
    own = tuple(
        key for key, param in modules[name].named_parameters(recurse=False) if param.shape and not param.shape[0] % size
    )
    return [{name: enter(local=local, split=own)} | styles for local in _numbers(modules[name], widths, size)]


@dataclass(frozen=True)
class _Group:
    """Columns whose features only meet again in one row."""

    columns: frozenset[str]
    row: str

    @property
    def layers(self) -> frozenset[str]:
        return self.columns | {self.row}


def _groups(reads: Mapping[str, set[str]], linears: Sequence[str]) -> list[_Group]:
    groups: list[_Group] = []
    used: set[str] = set()
    readers_of: dict[str, set[str]] = {}
    for layer in linears:
        for child in reads[layer]:
            readers_of.setdefault(child, set()).add(layer)
    for layer in linears:
        columns = frozenset(reads[layer])
        readers = {other for child in columns for other in readers_of[child]}
        if columns and readers == {layer} and not used & {*columns, layer}:
            groups.append(_Group(columns, layer))
            used |= {*columns, layer}
    return groups


def by_groups(
    name: str,
    modules: Mapping[str, nn.Module],
    flows: Mapping[str, set[str]],
    parts: Mapping[str, tuple[int, ...]],
    size: int,
    *,
    within: bool = True,
) -> list[Names]:
    """Every group inside, wherever its layers stand; each column enters by itself, so residuals may lie between groups.

    within: whether all of them together have to span the module; else one of them has to, and those that do come alone too.
    """
    inside = inside_of(name, modules)
    linears = [child for child in inside if is_linear(modules[child])]
    reads = {child: flows.get(child, set()) & set(linears) for child in inside}
    groups = _groups(reads, linears)
    if not groups or holds_stacks(name, modules):
        return []
    if within:
        together = name == _common([layer for group in groups for layer in group.layers])
        return _of_groups(groups, reads, modules, parts, size) if together else []
    spanning = [group for group in groups if _common(group.layers) == name]
    both = [groups, spanning] if spanning else []
    return [each for some in both for each in _of_groups(some, reads, modules, parts, size)]


def _of_groups(
    groups: Sequence[_Group],
    reads: Mapping[str, set[str]],
    modules: Mapping[str, nn.Module],
    parts: Mapping[str, tuple[int, ...]],
    size: int,
) -> list[Names]:
    """These split, and whatever else is there as it is outside of regions. reads: of every module with parameters there."""
    columns, rows = set().union(*(group.columns for group in groups)), {group.row for group in groups}
    styles: Names = {}
    for child in reads:
        if child in rows:
            styles[child] = row()
        elif child in columns:
            shared = parts.get(child, ())
            styles[child] = column(parts=() if any(part % size for part in shared) else shared)
        elif _gives_heads(modules[child], modules[child.rpartition(".")[0]], size):
            styles[child] = column()
        elif reads[child] & columns:
            styles[child] = per_head()
        elif is_linear(modules[child]):
            styles[child] = replicate() if features(modules[child]) % size else column(gather=True)
        else:
            styles[child] = sequence()
    widths = {
        around: {features(modules[child]) for child in group.columns}
        for group in groups
        if (around := _common(group.columns))
    }
    numbers = {around: _numbers(modules[around], of, size) for around, of in widths.items()}
    counts = range(max(map(len, numbers.values()), default=1))
    options = []
    for count in counts:
        local = {around: sets[min(count, len(sets) - 1)] for around, sets in numbers.items()}
        options.append(styles | {around: enter(local=each, each=True) for around, each in local.items() if each})
    return options


def _common(names: Collection[str]) -> str:
    """The innermost module that all of them are in."""
    paths = [name.split(".")[:-1] for name in names]
    depth = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), min(map(len, paths)))
    return ".".join(paths[0][:depth])


def spans(name: str, styles: Names) -> bool:
    """Whether columns and rows are not all in one of the module's children, which would be a region of its own."""
    split = [
        child for child, style in styles.items() if style.kind == "row" or (style.kind == "column" and not style.gather)
    ]
    return bool(split) and _common(split) == name


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
    of_widths = tuple(name for name, value in own.items() if value in widths and name not in heads)
    sets = [(), heads, heads + of_widths, heads + of_configs, heads + of_widths + of_configs]
    return list(dict.fromkeys(sets))


def _gives_heads(module: nn.Module, around: nn.Module, size: int) -> bool:
    """Whether it is a table with a number for each head of what it is in, as relative positions have."""
    if not isinstance(module, nn.Embedding) or module.embedding_dim % size:
        return False
    return module.embedding_dim in {number_of(around, name) for name in vars(around) if _counts_heads(name)}


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(part in name for part in ("dim", "size", "group", "per"))


def enclosing(name: str) -> Iterator[str]:
    """The modules around a name, outermost first, and itself; not the model."""
    parts = name.split(".") if name else []
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def likeness(name: str, module: nn.Module) -> Hashable:
    """Equal for regions that are alike: the same place in other layers, and the same modules with the same shapes."""
    inside = tuple(
        (child, type(part), tuple((key, tuple(p.shape)) for key, p in part.named_parameters(recurse=False)))
        for child, part in module.named_modules()
    )
    return ".".join("*" if part.isdigit() else part for part in name.split(".")), inside
