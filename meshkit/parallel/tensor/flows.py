"""What a program shows of the linear layers in it: which reads which (dataflow), and the parts in which outputs are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod

from torch import nn

from meshkit.core.linear import is_linear, linear_shape
from meshkit.program import TensorRef, Trace, tensors


def flows_of(trace: Trace, modules: Mapping[str, nn.Module]) -> dict[str, set[str]]:
    """For each module with parameters: the linear layers whose output it reads, with no other linear layer between."""
    linears = {name for name, module in modules.items() if is_linear(module)}
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


def parts_of(trace: Trace, modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Linear layer -> the sizes of the parts in which its output features are read, where they are several."""
    layers: dict[int, str] = {}  # storage -> the layer whose output it is
    for call in trace.calls:
        if is_linear(modules.get(call.name)) and isinstance(call.output, TensorRef):
            layers[call.output.storage] = call.name
    ranges: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for operation in trace.operations:
        for ref in tensors(operation.outputs):
            if ref.storage in layers:
                name = layers[ref.storage]
                ranges[name] |= _features_shown(ref, features(modules[name]))
    found = {name: _partition(shown, features(modules[name])) for name, shown in ranges.items()}
    return {name: parts for name, parts in found.items() if parts}


def features(linear: nn.Module) -> int:
    shape = linear_shape(linear)
    assert shape is not None
    return shape.out_features


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
