"""Program of a dataflow: the order of its rows, one for all ranks; each rank runs the rows it takes part in.

The common order rules out deadlock: two ranks that share several groups use them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshkit.algos.dataflow._call import SOURCE, Call, Sync
from meshkit.errors import PlanError


@dataclass(frozen=True)
class Row:
    """One operation of some ranks together.

    call: `name` works on the samples of `iteration`. send: the samples' `fields` go from mesh `source` to `destination`.
    sync: parameters after `iteration` train stages go from mesh to mesh.
    """

    kind: Literal["call", "send", "sync"]
    iteration: int
    name: str
    source: str
    destination: str
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = self.source if self.source == self.destination else f"{self.source} -> {self.destination}"
        fields = f": {', '.join(self.fields)}" if self.fields else ""
        return f"{self.iteration:>4}  {self.kind:4}  {self.name:16} {where}{fields}"


def program(
    calls: Sequence[Call],
    syncs: Sequence[Sync],
    first: Sequence[str],
    *,
    iterations: range,
    total: int,
    staleness: int,
    made: int = 0,
) -> Iterator[Row]:
    """The rows of some iterations out of `total`, in the order of all ranks.

    first: the fields that samples have from the start, on every mesh. iterations: those whose train stage is run. made: how
    many iterations already have their rollouts. staleness: how many iterations rollouts run ahead. Samples of iteration i
    are made with the parameters after max(0, i - staleness) train stages, never older ones.
    Raises: PlanError for a field that no earlier call makes, and for names given twice.
    """
    if staleness < 0:
        raise PlanError(f"staleness={staleness}: rollouts run 0 or more iterations ahead.")
    refuse_odd_graph(calls, first)
    # At the start, and after a resume, the rollouts that should already be there are made first.
    for iteration in range(made, min(iterations.start + staleness, total)):
        yield from _stage(calls, first, "rollout", iteration)
        yield from _handover(calls, first, iteration)
    for iteration in iterations:
        ahead = iteration + staleness
        if made <= ahead < total:
            yield from _stage(calls, first, "rollout", ahead)
        # With staleness the train stage has been handed its samples at the end of an earlier iteration.
        if staleness == 0:
            yield from _handover(calls, first, iteration)
        yield from _stage(calls, first, "train", iteration)
        # After the train stage, so that ranks that train do not wait for the rollouts that run beside them.
        if staleness and made <= ahead < total:
            yield from _handover(calls, first, ahead)
        # After the last rollouts nobody reads the sampler's weights any more.
        if iteration + staleness + 1 < total:
            for sync in syncs:
                yield Row("sync", iteration, sync.name, sync.source, sync.destination)


def refuse_odd_graph(calls: Sequence[Call], first: Sequence[str]) -> None:
    """Raises: PlanError for names given twice, rollouts after training, and fields that no earlier call makes."""
    made = dict.fromkeys(first, "the first samples")
    names: set[str] = set()
    trained = ""
    for call in calls:
        if call.name in names:
            raise PlanError(f"two calls are named {call.name!r}. Give each a name of its own.")
        names.add(call.name)
        if call.stage == "train":
            trained = call.name
        elif trained:
            raise PlanError(
                f"call {call.name!r} of the rollout stage comes after {trained!r} of the train stage. Put rollouts first."
            )
        for name in call.needs:
            if name not in made and name != SOURCE:
                raise PlanError(
                    f"call {call.name!r} needs {name!r}, which nothing before it gives. There are {', '.join(made)}. "
                    "Calls run in the order in which they are listed."
                )
        for name in call.gives:
            if name in made:
                raise PlanError(f"call {call.name!r} gives {name!r}, and so does {made[name]!r}. Rename one of them.")
            made[name] = call.name


def _stage(calls: Sequence[Call], first: Sequence[str], stage: str, iteration: int) -> Iterator[Row]:
    for index, call in enumerate(calls):
        if call.stage == stage:
            yield from _sends(calls, first, index, iteration, stage)
            yield Row("call", iteration, call.name, call.on, call.on)


def _handover(calls: Sequence[Call], first: Sequence[str], iteration: int) -> Iterator[Row]:
    """Send what the train stage needs of the rollouts, all at once, so that the next rollouts can begin."""
    for index, call in enumerate(calls):
        if call.stage == "train":
            yield from _sends(calls, first, index, iteration, "rollout")


def _sends(calls: Sequence[Call], first: Sequence[str], index: int, iteration: int, stage: str) -> Iterator[Row]:
    """Send the fields that call `index` needs from calls of `stage` on other meshes, unless its mesh already has them."""
    call = calls[index]
    # What an earlier call of the mesh read or made is there: it is sent once.
    present = {
        name for earlier in calls[:index] if earlier.on == call.on for name in (*earlier.needs, *earlier.gives)
    } | set(first)
    by_mesh: dict[str, list[str]] = {}
    for name in call.needs:
        maker = next((earlier for earlier in calls[:index] if name in earlier.gives), None)
        if maker is not None and maker.on != call.on and name not in present and maker.stage == stage:
            by_mesh.setdefault(maker.on, []).append(name)
    for source, names in by_mesh.items():
        yield Row("send", iteration, call.name, source, call.on, tuple(names))
