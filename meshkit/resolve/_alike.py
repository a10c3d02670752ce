"""Resolving many strategies of one program: of those whose sizes decide nothing, one is resolved for all."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from weakref import WeakKeyDictionary

from meshkit.errors import MeshkitError
from meshkit.mesh import MeshSpec
from meshkit.parallel.expert import in_expert_view
from meshkit.parallel.pipeline.schedules import NAMES
from meshkit.program import Program
from meshkit.resolve._resolve import resolve
from meshkit.resolve._resolved import Resolved
from meshkit.strategy import Strategy

_KNOWN: WeakKeyDictionary[Program, OrderedDict[Hashable, Resolved | MeshkitError]] = WeakKeyDictionary()
KEPT = 256  # of a program; with what is derived of it one of 80 blocks takes some 0.3 MB


def resolve_alike(program: Program, strategy: Strategy, spec: MeshSpec, *, device_type: str = "cpu") -> Resolved:
    """What `resolve` returns, for searches: the program may not change meanwhile.

    How many ranks the data axes have, and how many microbatches there are, decides nothing but whether there are several, and
    the pipeline's table. So of strategies that differ in these alone the first is resolved. Raises: as `resolve`.
    """
    if not _is_alike(strategy):
        return resolve(program, strategy, spec, device_type=device_type)
    known = _KNOWN.setdefault(program, OrderedDict())
    key = _key(strategy, spec), device_type
    if key in known:
        known.move_to_end(key)
    else:
        if len(known) >= KEPT:
            known.popitem(last=False)
        try:
            known[key] = resolve(program, strategy, spec, device_type=device_type)
        except MeshkitError as error:
            if not _names_sizes(str(error), strategy, spec):
                known[key] = error
            raise
        found = known[key]
        assert isinstance(found, Resolved)
        return found
    found = known[key]
    if isinstance(found, MeshkitError):
        raise found.with_traceback(None)
    if found.cut is not None and strategy.microbatches is not None:
        found.cut.checked(spec.pp, strategy.microbatches)
    again = copy.copy(found)  # with what was computed of it meanwhile
    vars(again).update(strategy=strategy, spec=spec)
    return again


def _is_alike(strategy: Strategy) -> bool:
    """A `Budget` counts this rank's rows, and a file or a function may have another table the next time."""
    overrides = [each.recompute for each in strategy.overrides.values()]
    named = isinstance(strategy.pipeline.schedule, str) and strategy.pipeline.schedule in NAMES
    return named and all(each is None or _is_mode(each) for each in (strategy.memory.recompute, *overrides))


def _is_mode(recompute: object) -> bool:
    return isinstance(recompute, str) or hasattr(recompute, "mode")


def _key(strategy: Strategy, spec: MeshSpec) -> Hashable:
    count = strategy.microbatches
    return (
        repr(replace(strategy, mesh=None, microbatches=None)),
        (spec.pp, spec.cp, spec.tp, spec.ep, spec.etp),
        (spec.dp_replicate > 1, spec.dp_shard > 1, spec.dp_intra > 1, spec.edp > 1, in_expert_view(spec)),
        None if count is None else count > 1,
    )


def _names_sizes(text: str, strategy: Strategy, spec: MeshSpec) -> bool:
    sizes = (strategy.microbatches, spec.dp_replicate, spec.dp_shard, spec.edp, spec.world_size)
    numbers = set(re.findall(r"\d+", text))
    return any(size != 1 and str(size) in numbers for size in sizes)
