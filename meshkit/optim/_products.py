"""Weights of products: which parameters a model multiplies as matrices, as its program says, and no name."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from meshkit.program import Trace, tensors
from meshkit.resolve import Resolved

# The arguments that are multiplied. An `einsum` or a `linear` comes as one of these.
PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "_grouped_mm": (0, 1),
    "_scaled_mm": (0, 1),
}
# Views share memory; these are the same numbers elsewhere, as of a router that computes in fp32, or of q, k and v in one.
COPIES = ("_to_copy", "clone", "cat", "stack", "index", "index_select")


def product_weights(resolved: Resolved) -> frozenset[str]:
    """Names of parameters, also tied ones, that are multiplied as matrices [rows, columns], or [experts, rows, columns].

    Of what the program does not show (experts, parts that the example does not reach, a model that cannot be read) those that
    `_is_weight` says. Reads the program, 0.1 s a layer, unless it was read before.
    """
    model = resolved.program.model
    trace = resolved.read()
    shown, multiplied = (frozenset[str](),) * 2 if trace is None else _of_trace(trace)
    names = defaultdict[int, list[str]](list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    found = set[str]()
    for of_param in names.values():
        if not multiplied.isdisjoint(of_param):
            found.update(of_param)
        elif shown.isdisjoint(of_param) and any(_is_weight(model, name) for name in of_param):
            found.update(of_param)
    return frozenset(found)


def _of_trace(trace: Trace) -> tuple[frozenset[str], frozenset[str]]:
    """(parameters that an operator reads, those of them that are multiplied)."""
    holds: dict[int, frozenset[str]] = {}
    for number, storage in enumerate(trace.storages):
        kind, _, name = storage.source.partition(" ")
        if kind == "parameter":
            holds[number] = frozenset({name})
    shown, multiplied = set[str](), set[str]()
    for operation in trace.operations:
        if not isinstance(operation.op, str):  # what is one, as experts are, shows nothing of its inside
            read = [holds.get(ref.storage, frozenset()) for ref in tensors((operation.args, operation.kwargs))]
            shown.update(*read)
            if operation.operator in COPIES and read:
                for ref in tensors(operation.outputs):
                    holds[ref.storage] = holds.get(ref.storage, frozenset()).union(*read)
        for place in PRODUCTS.get(operation.operator, ()):
            for ref in tensors(operation.args[place]):
                multiplied.update(holds.get(ref.storage, ()))
    return frozenset(shown), frozenset(multiplied)


def _is_weight(model: nn.Module, name: str) -> bool:
    """Whether it is the weight of a linear layer (transformers' Conv1D is one), or a stack of experts' matrices."""
    path, _, short = name.rpartition(".")
    module = model.get_submodule(path)
    param = module.get_parameter(short)
    if param.ndim == 2:
        return short == "weight" and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    return param.ndim == 3 and not isinstance(module, nn.modules.conv._ConvNd)
