"""Fragments of a model (Streaming DiLoCo): with which part of it each parameter meets, the same on every mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshkit.errors import PlanError
from meshkit.resolve import Resolved


def fragments_of_model(resolved: Resolved, fragments: int) -> dict[str, int]:
    """`fragment_of` the parameters of a whole model, also those of other stages."""
    model = resolved.program.model
    first = {param: name for name, param in model.named_parameters()}
    found = fragment_of({name: param.numel() for param, name in first.items()}, resolved.blocks, fragments)
    # A tied parameter is one, under each of its names: stages of a pipeline know it by another.
    return {name: found[first[param]] for name, param in model.named_parameters(remove_duplicate=False)}


def fragment_of(sizes: Mapping[str, int], blocks: Sequence[str], fragments: int) -> dict[str, int]:
    """Parameter -> fragment. sizes: elements of the whole parameters of the single-device model, in its order.

    Block i is of fragment i modulo `fragments` (strided, which the paper finds as good as sequential parts, and which spreads
    the depth); what is in no block, as an embedding, goes to the fragment with the fewest elements.
    Raises: PlanError for more fragments than blocks.
    """
    if fragments == 1:
        return dict.fromkeys(sizes, 0)
    if fragments > len(blocks):
        raise PlanError(
            f"fragments={fragments}: the model has {len(blocks)} blocks, and each fragment has at least one. Give at most "
            f"{max(1, len(blocks))}."
        )
    found: dict[str, int] = {}
    totals = [0] * fragments
    for name in sizes:
        index = next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
        if index is not None:
            found[name] = index % fragments
            totals[index % fragments] += sizes[name]
    for name in sizes:
        if name not in found:
            found[name] = min(range(fragments), key=totals.__getitem__)
            totals[found[name]] += sizes[name]
    return found
