"""Proof of a plan: the split model's operators, on every rank, are those of the single-device model on a part of its tensors.

The traces of all ranks are walked beside that of the single-device model. Of each tensor it is known which elements of the
single-device model's a rank has, and of what kind it is on the axis, in the words of SPMD types:

| kind        | values on the ranks         | gradients                                |
|-------------|-----------------------------|------------------------------------------|
| invariant   | the same                    | the same                                 |
| replicated  | the same                    | summands, to be summed over the ranks    |
| varying     | parts along one dim         | of the part                              |
| partial     | summands of the tensor      | the same                                 |
| distributed | a DTensor                   | torch's own                              |

An operator that follows its rule on parts gives parts. Anything else is refused, with the operator and its line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshkit.core._torch import without_modes
from meshkit.program._elements import TooLarge
from meshkit.program._records import Trace
from meshkit.program._states import Held, Kind, Uneven, Unproved
from meshkit.program._steps import STEPS
from meshkit.program._walk import Walk


def prove(
    full: Trace,
    ranks: Sequence[Trace],
    held: Sequence[Mapping[str, Held]],
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    sums_counts: bool | None = None,
) -> list[Kind]:
    """Walk the traces of all ranks of an axis beside the single-device model's. Returns the kind of each output.

    held: for each rank, by source ("parameter NAME", ...); what is not named is the same on all ranks. tokens: those of each
    rank, on an axis that splits the tokens: outputs are then of the rank's. sums_counts: whether what routers count is summed
    over the axis; default: where it splits the tokens.
    Raises: Unproved, at the first operation that does not follow; Uneven, for folded traces whose blocks are not alike.
    """
    proof = Walk(full, ranks, held, tokens, STEPS, (tokens is not None) if sums_counts is None else sums_counts)
    try:
        with without_modes():  # numbers of elements are values, also where a model has none
            kinds = proof.run()
        if len(set(proof.returned)) > 1:
            raise Uneven("the model's blocks return tensors in different states.", wrong=False)
        return kinds
    except TooLarge:
        text = f"{proof.at}: it rearranges a tensor that is too large to follow."
        raise Unproved(text, proof.module, proof.before, wrong=False) from None
    except Unproved as error:
        error.module, error.before = proof.module, proof.before
        error.wrong &= not proof.by_value
        raise
