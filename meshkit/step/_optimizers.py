"""What the steps of optimizers must have alike on all ranks: that they are made, and their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshkit.step._run import Run

# [Note: options on several stages]
# Where a stage has a group of parameters that another has not, as norms without decay, ranks of different stages have other
# groups, and rightly so. The ranks of one stage must have all options alike; ranks of different stages those that each of
# them has but once beside zero, as a weight decay that norms have not.

_ZERO = ("0", "0.0")


@dataclass(frozen=True)
class _Known:
    """run: whose parameters an optimizer has. common: options that all ranks must have alike."""

    run: ref[Run]
    common: frozenset[str]


_runs: WeakSet[Run] = WeakSet()
_known: WeakKeyDictionary[Optimizer, _Known | None] = WeakKeyDictionary()
_registered = False


def compare_optimizers(run: Run) -> None:
    """From now on ranks agree on the steps of optimizers that hold this run's parameters: the first step is compared before
    it is made, the others with the next call in which ranks meet."""
    global _registered
    if run.mesh.agreement.alone:
        return
    _runs.add(run)
    if not _registered:
        register_optimizer_step_pre_hook(_before_step)
        _registered = True


def compare_anew(optimizer: Optimizer) -> None:
    """Its parameters are others from now on: what ranks must have alike is found out again at its next step."""
    _known.pop(optimizer, None)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    what = f"{type(optimizer).__name__}.step"
    if (first := optimizer not in _known) and (run := _run_of(optimizer)) is not None:
        run.mesh.agreement.meet(what)  # all ranks come here first
        _known[optimizer] = _Known(ref(run), _common(run, optimizer))
    known = _known.setdefault(optimizer, None)
    if known is None or (run := known.run()) is None:
        return
    facts, stage = _facts(optimizer, known)
    if first:
        run.mesh.agreement.meet(what, facts=facts, stage=stage)
    else:
        run.mesh.agreement.note(what, facts, stage=stage)


def _run_of(optimizer: Optimizer) -> Run | None:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return next((run for run in _runs if any(id(param) in held for param in run.parameters())), None)


def _options(options: dict[str, Any]) -> dict[str, str]:
    """Without tensors, as a learning rate on a device: to read one the host would wait."""
    plain = (int, float, str, bool, tuple, type(None))
    return {name: repr(value) for name, value in options.items() if name != "params" and isinstance(value, plain)}


def _values(groups: list[dict[str, str]], name: str) -> list[str]:
    """The different ones beside zero."""
    return [*dict.fromkeys(group[name] for group in groups if group.get(name, _ZERO[0]) not in _ZERO)]


def _common(run: Run, optimizer: Optimizer) -> frozenset[str]:
    """See [Note: options on several stages]. Wire: with pp, a gather of names as objects over the mesh."""
    groups = [_options(group) for group in optimizer.param_groups]
    names = {name for group in groups for name in group}
    if run.mesh.spec.pp == 1:
        return frozenset(names)
    once = {name for name in names if len(_values(groups, name)) == 1}
    of_ranks: list[Any] = [None] * run.mesh.spec.world_size
    dist.all_gather_object(of_ranks, once, group=run.mesh.group)
    return frozenset(set.intersection(*of_ranks))


def _facts(optimizer: Optimizer, known: _Known) -> tuple[dict[str, str], dict[str, object]]:
    """(of all ranks, of those of a stage)"""
    groups = [_options(group) for group in optimizer.param_groups]
    common = {name: ", ".join(_values(groups, name)) for name in sorted(known.common)}
    own = [{name: value for name, value in group.items() if name not in known.common} for group in groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    defaults = {f"default {name}": value for name, value in _options(optimizer.defaults).items()}
    return common | defaults, {"groups": sizes, "options of groups": own}
