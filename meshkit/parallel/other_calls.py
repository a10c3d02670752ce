"""Python state that decides what a forward runs (counters, draws of Python's random numbers), where a step calls it again.

Recompute runs a block's forward again in backward, and microbatches run all of it several times; one device runs it once in a
step.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshkit.errors import PlanError
from meshkit.program import Change, Example, Program, Trace, Unreadable, changes, draws_by_hand, trace


def refuse_other_calls(
    program: Program, example: Example, *, closed: Mapping[str, str], repeated: Mapping[str, str], microbatches: int
) -> None:
    """Raises: PlanError for a module that runs again and then runs something else, and for a model of which each microbatch
    is another call.

    closed: modules whose inside is not read. repeated: modules whose forward runs again -> by what, and what to change.
    """
    if not repeated and microbatches == 1:
        return
    try:
        if not draws_by_hand(program.read(example, closed)):
            return
    except Unreadable:
        pass
    except PlanError:  # told where it matters
        return
    kind = type(program.model).__name__
    for change in _changes(program, example, closed, tuple(repeated)):
        module = next((name for name in repeated if f"{change.module}.".startswith(f"{name}.")), None)
        if module is not None and change.drawn:
            raise PlanError(
                f"{kind}: the forward of {module!r} draws of Python's `random` or of `numpy.random`, so the state of that is "
                f"written, and {repeated[module]} Or draw by torch, whose state recompute puts back."
            )
        if module is not None:
            raise PlanError(
                f"{kind}: what {module!r} runs {change.what}, and {repeated[module]} Or count outside of it, as in the "
                "model's own forward."
            )
        if microbatches > 1 and not change.drawn:
            raise PlanError(
                f"{kind}: what it runs {change.what}, and each of {microbatches} microbatches is a call, where a single "
                "device calls it once in a step. Count steps in the training loop and set the number there, or use "
                "microbatches=1."
            )


def _changes(program: Program, example: Example, closed: Mapping[str, str], inside: tuple[str, ...]) -> list[Change]:
    found: list[Change] = []

    def again(copy, read):  # type: ignore[no-untyped-def]  # of `trace`
        first: Trace
        first, found[:] = changes(copy, read, inside=inside)
        return first

    try:
        trace(program.model, example.args, example.kwargs, closed=dict(closed), again=again)
    except PlanError:
        return []
    return found
