"""The strategy (configuration of a run): every choice in one frozen record, to and from TOML."""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.plan import Plan
from meshkit.plan.match import frozen_table
from meshkit.strategy._context import ContextPolicy
from meshkit.strategy._data import DataPolicy
from meshkit.strategy._experts import ExpertPolicy
from meshkit.strategy._memory import MemoryPolicy, Recompute, RecomputeMode
from meshkit.strategy._pipeline import PipelinePolicy
from meshkit.strategy._toml import from_table, to_table, toml_text

IfUnproved = Literal["refuse", "replicate"]


@dataclass(frozen=True, kw_only=True)
class BlockOverride:
    """Layer-wise strategy: what some blocks do differently. None: as the other blocks.

    recompute: "none", "full", "selective", "activation", or a `Recompute`. offload: False keeps their activations on the
    device, True moves them where `MemoryPolicy(offload=...)` says.
    """

    recompute: RecomputeMode | Recompute | None = None
    offload: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.recompute, str):
            Recompute(mode=self.recompute)  # refuses a mode that does not exist
        if self.recompute is None and self.offload is None:
            raise PlanError("BlockOverride() changes nothing. Give recompute= or offload=.")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What is chosen for a run. Frozen, printable, and the same in a file: `Strategy.read("run.toml")`.

    mesh: axis sizes, as "pp=2 dp_shard=2 tp=2"; None fits any mesh. plan: what each module does; None asks `auto_plan`.
    memory: activation checkpointing (recompute), offload, precision, the loss, the optimizer's state. zero: the ZeRO stage on
    dp_shard; None is 3, or 1 with pp, where many microbatches are in flight between gathering parameters and reducing
    gradients. data: in how many bits parameters and gradients travel over dp_shard (quantized wires). sequence: sequence
    parallelism, with tp: hold the residual stream sharded along the sequence. context: with cp, how tokens are split, and how
    attention exchanges keys and values. experts: capacity, copies of hot experts, another dispatcher. pipeline: with pp, the
    schedule and the stages. microbatches: gradient accumulation, the number of parts that a step's rows are run in; None
    leaves it to each step. compile: torch.compile each block; a string is the backend's name.
    unproved: what becomes of a module that is not shown to be right on parts: "refuse" raises; "replicate" leaves it whole on
    every rank of tp or cp, which `print(run.plan)` and `explain` say.
    overrides: pattern of blocks -> what those blocks do differently, as `{"layers.0": BlockOverride(recompute="full")}`.
    A choice that a run can do nothing with is refused by `resolve`. What an axis of one rank has as it was asked for is not:
    sequence on tp=1, context on cp=1, zero and data on dp_shard=1; so one file fits many meshes.
    Raises: PlanError and MeshError for values that no model and no world could have.
    """

    mesh: MeshSpec | str | None = None
    plan: Plan | None = None
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    zero: int | None = None
    data: DataPolicy = field(default_factory=DataPolicy)
    sequence: bool = False
    context: ContextPolicy = field(default_factory=ContextPolicy)
    experts: ExpertPolicy = field(default_factory=ExpertPolicy)
    pipeline: PipelinePolicy = field(default_factory=PipelinePolicy)
    microbatches: int | None = None
    compile: bool | str = False
    unproved: IfUnproved = "refuse"
    overrides: Mapping[str, BlockOverride] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # object.__setattr__, since it is frozen: equal choices are brought to one form, and are then equal records.
        if isinstance(self.mesh, str):
            object.__setattr__(self, "mesh", MeshSpec.parse(self.mesh))
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
                given = repr(value) if isinstance(value, _SHORT) else f"a {type(value).__name__}"
                raise PlanError(f"Strategy({name}={given}): give {wanted}.{_EXAMPLES.get(name, '')}")
        if self.unproved not in get_args(IfUnproved):
            raise PlanError(f"Strategy(unproved={self.unproved!r}): choose one of {', '.join(get_args(IfUnproved))}.")
        overrides = frozen_table(self.overrides, BlockOverride, where="Strategy", argument="overrides")
        object.__setattr__(self, "overrides", overrides)
        count = self.microbatches
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise PlanError(f"Strategy(microbatches={count!r}): a step has a whole number of microbatches, at least 1.")

    @staticmethod
    def of(strategy: Strategy | None, choices: Mapping[str, Any]) -> Strategy:
        """A verb's strategy: the one it was given, or one made of its keyword arguments (`parallelize(model, mesh, zero=2)`).

        A choice that is None keeps its default. Raises: PlanError for both at once, and for a name that is no choice.
        """
        if not isinstance(strategy, Strategy | None):
            raise PlanError(
                f"strategy={strategy!r}: this is no Strategy. Make one by Strategy(...), or read one by Strategy.read(path)."
            )
        names = [each.name for each in dataclasses.fields(Strategy)]
        for name in choices:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = _in_policies(name) or (f"Did you mean {near[0]!r}? " if near else "")
                raise PlanError(f"there is no choice {name!r}. {hint}A strategy has {', '.join(names)}.")
        # None is a recipe's flag that was not given; no choice means anything else by it.
        given = {name: choice for name, choice in choices.items() if choice is not None}
        if strategy is None:
            return Strategy(**given)
        if given:
            raise PlanError(
                f"a strategy and {', '.join(given)} as well: two places for one choice. Use dataclasses.replace(strategy, "
                f"{next(iter(given))}=...)."
            )
        return strategy

    @property
    def changes(self) -> dict[str, Any]:
        """The choices that are not the default."""
        plain = Strategy()
        return {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if getattr(self, each.name) != getattr(plain, each.name)
        }

    def mesh_for(self, world_size: int | None = None) -> MeshSpec:
        """The mesh on `world_size` ranks; default: the product of its axes. Raises: MeshError where they do not fit."""
        if world_size is None:
            return self._own_mesh
        return self._spec.resolve(world_size)

    @property
    def _spec(self) -> MeshSpec:
        spec = MeshSpec() if self.mesh is None else self.mesh
        assert isinstance(spec, MeshSpec)
        return spec

    @cached_property
    def _own_mesh(self) -> MeshSpec:
        """Searches ask for it hundreds of thousands of times."""
        return self._spec.resolve(self._spec.world_size)

    def to_toml(self) -> str:
        """The choices that are not the default, as TOML. Raises: PlanError for a function, which is no data."""
        return toml_text(to_table(self))

    @staticmethod
    def from_toml(text: str, *, source: str = "strategy") -> Strategy:
        """source: for errors, the file's name. Raises: PlanError for what is no TOML, or no choice."""
        return from_table(Strategy, text, source=source)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Strategy:
        """Raises: PlanError, also for a file that is not there."""
        if not Path(path).is_file():
            raise PlanError(f"Strategy.read: there is no file {path}. Write one with Strategy(...).write(path).")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"{path}: this is no TOML: {error}.") from error
        return Strategy.from_toml(text, source=str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Raises: PlanError as `to_toml` does."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")


_SHORT = (str, int, float, types.NoneType)  # the text of what else there is may be pages long
_EXAMPLES = {
    "mesh": " For example, 'dp_shard=2 tp=2'.",
    "plan": " For example, Plan(tensor={'layers.*.up': column(), 'layers.*.down': row()}).",
    "memory": " For example, MemoryPolicy(recompute='full').",
}
_POLICIES = {
    "memory": MemoryPolicy,
    "data": DataPolicy,
    "context": ContextPolicy,
    "experts": ExpertPolicy,
    "pipeline": PipelinePolicy,
}


def _in_policies(name: str) -> str:
    """Where a choice of a policy belongs that was given beside it."""
    for choice, policy in _POLICIES.items():
        if name in {each.name for each in dataclasses.fields(policy)}:
            return f"It is one of a policy's: {choice}={policy.__name__}({name}=...). "
    return ""


_KINDS: dict[str, tuple[type, ...]] = {
    "mesh": (MeshSpec, types.NoneType),
    "plan": (Plan, types.NoneType),
    "memory": (MemoryPolicy,),
    "zero": (int, types.NoneType),
    "data": (DataPolicy,),
    "sequence": (bool,),
    "context": (ContextPolicy,),
    "experts": (ExpertPolicy,),
    "pipeline": (PipelinePolicy,),
    "compile": (bool, str),
}
