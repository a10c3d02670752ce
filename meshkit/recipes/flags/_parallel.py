"""Flags of a model on its mesh: `parallel` makes the `Strategy` that `mk.parallelize` takes."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Self

from meshkit.errors import DataError, PlanError
from meshkit.mesh import MeshSpec
from meshkit.recipes.flag_file import with_file, write_flags
from meshkit.recipes.flags._run import StepFlags
from meshkit.recipes.folders import at_home, refuse_folder
from meshkit.recipes.ranges import Count, Ranged
from meshkit.strategy import (
    ActivationOffload,
    ChunkedLoss,
    MemoryPolicy,
    OptimizerOffload,
    OptimizerPolicy,
    PipelinePolicy,
    Precision,
    Strategy,
)

STRATEGY_FIELDS = {
    "mesh": "mesh",
    "zero": "zero",
    "sequence": "sequence",
    "schedule": "pipeline.schedule",
    "recompute": "memory.recompute",
    "loss_chunk": "memory.loss",
    "offload": "memory.offload",
    "precision": "memory.precision",
    "optimizer_offload": "memory.optimizer.offload",
    "adam_states": "memory.optimizer.states",
    "compile": "compile",
    "microbatches": "microbatches",
}
"""flag: the field of a `Strategy` that it sets"""


@dataclass(frozen=True, kw_only=True)
class ParallelFlags(Ranged):
    """Parallelism and memory of a model: the choices of `mk.parallelize`."""

    mesh: str = "dp_shard=-1"
    """axes and sizes, as "dp_replicate=2 dp_shard=2 tp=2 cp=2", with experts "ep=4 etp=2"; -1 is the ranks that are left"""
    zero: Literal[1, 2, 3] | None = None
    """sharding over dp_shard; default 3, with pp 1"""
    sequence: bool = True
    """with tp: shard activations along the sequence between regions"""
    schedule: str = "1f1b"
    """with pp: a name of `python -m meshkit draw`, or a CSV file with a table of yours"""
    recompute: Literal["none", "activation", "selective", "full"] = "none"
    """activation checkpointing: how much blocks compute again in backward"""
    loss_chunk: Count | None = None
    """chunked cross-entropy: tokens whose logits exist at a time; default: all of them"""
    offload: Literal["none", "host", "disk"] = "none"
    """activation offload: where the activations that backward needs are kept, if not on the device"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 is mixed precision: it computes in bf16, with fp32 master weights"""
    optimizer_offload: bool = False
    """master weights and optimizer state are kept and updated on the host"""
    adam_states: Literal["fp32", "8bit", "4bit", "fp8"] = "fp32"
    """how Adam's moments are stored"""
    compile: bool = False
    """torch.compile, block by block"""
    strategy: Path | None = None
    """a TOML file with a Strategy, in place of the flags above; one of those beside it may not say otherwise"""
    config: Path | None = None
    """a TOML file with flags, as a run keeps its own in --out/config.toml; those on the command line win"""

    @classmethod
    def parse(cls, args: Sequence[str] | None = None, **options: Any) -> Self:
        """The flags of the command line, by tyro; with --strategy, `mesh` and `microbatches` are those of the file.

        args: default those of the process. options: of `tyro.cli`.
        Raises: PlanError for a flag that is given beside --strategy and says otherwise than the file, also if what it says
        is the flag's default; DataError for a warm-up that was asked for and is longer than the run, and for an --out or
        --cache where no folder can be. A number outside of its range ends the process with 2, as what tyro cannot read.
        """
        import tyro  # of the extra `recipes`; without it a Config can still be made by keyword

        args = with_file(sys.argv[1:] if args is None else args, {field.name for field in dataclasses.fields(cls)})
        config: Self = tyro.cli(cls, args=args, **options)
        config = dataclasses.replace(config, **{name: at_home(name, value) for name, value in vars(config).items()})
        # tyro says what a flag holds, not whether it was given. Both spellings of a bool: --sequence and --no-sequence.
        words = [word for word in args if word.startswith("--")]
        names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
        given = names | {name.removeprefix("no_") for name in names}
        if isinstance(config, StepFlags) and config.warmup_steps > config.steps:
            # Now, and not when the schedule is made, which in some recipes is minutes later.
            if "warmup_steps" in given:
                raise DataError(
                    f"--warmup-steps {config.warmup_steps} does not fit into --steps {config.steps}. "
                    f"Give 0 to {config.steps}."
                )
            config = dataclasses.replace(config, warmup_steps=config.steps)
        for flag in ("out", "cache"):
            if flag in vars(config):
                refuse_folder(flag, getattr(config, flag))
        if config.strategy is None:
            return config
        chosen = config._read_strategy(given)  # a default that was typed must be refused beside the file, too
        # The fields that recipes read themselves, besides `parallel`: they must not go on saying the default.
        values: dict[str, Any] = {"zero": chosen.zero, "sequence": chosen.sequence, "compile": chosen.compile}
        if isinstance(chosen.mesh, MeshSpec):
            values["mesh"] = _axes(chosen.mesh)
        if chosen.microbatches is not None and "microbatches" in vars(config):
            values["microbatches"] = chosen.microbatches
        return dataclasses.replace(config, **values)

    def parallel(self, **choices: Any) -> Strategy:
        """What `mk.parallelize` takes: these flags or the file of --strategy, and `choices` that no flag makes, as the plan.

        Raises: PlanError for a flag or one of `choices` that says otherwise than the file.
        """
        if self.strategy is None:
            return dataclasses.replace(self._of_flags(), **choices)
        # Without a command line, as in a Config made by keyword: what differs from its default was meant.
        changed = {each.name for each in dataclasses.fields(self) if getattr(self, each.name) != each.default}
        chosen = self._read_strategy(changed)
        for name, choice in choices.items():
            if name in chosen.changes and getattr(chosen, name) != choice:
                raise PlanError(
                    f"--strategy {self.strategy} chooses {name}, and so does this recipe, otherwise: "
                    f"{getattr(chosen, name)} and {choice}. Leave {name} out of the file."
                )
        return dataclasses.replace(chosen, **choices)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write these flags, resolved, as config.toml into a folder: what --config reads back."""
        # With --strategy its file says the rest, and a flag beside it that says otherwise is refused.
        by_strategy = () if self.strategy is None else STRATEGY_FIELDS.keys() - {"mesh", "microbatches"}
        write_flags(self, Path(folder), without=by_strategy)

    def _of_flags(self) -> Strategy:
        return Strategy(
            memory=MemoryPolicy(
                recompute=self.recompute,
                offload=ActivationOffload(to=self.offload) if self.offload != "none" else None,
                loss=ChunkedLoss(tokens=self.loss_chunk) if self.loss_chunk is not None else None,
                precision=Precision() if self.precision == "bf16" else None,
                optimizer=OptimizerPolicy(
                    states=self.adam_states, offload=OptimizerOffload() if self.optimizer_offload else None
                ),
            ),
            zero=self.zero,
            sequence=self.sequence,
            pipeline=PipelinePolicy(schedule=self.schedule),
            compile=self.compile,
        )

    def _read_strategy(self, given: AbstractSet[str]) -> Strategy:
        """The file's. Raises: PlanError for a flag of `given` that says otherwise; mesh and microbatches may be left open."""
        assert self.strategy is not None
        chosen = Strategy.read(self.strategy)
        flags = dataclasses.replace(self._of_flags(), mesh=self.mesh, microbatches=getattr(self, "microbatches", None))
        for flag, field in STRATEGY_FIELDS.items():
            by_file, by_flag = attrgetter(field)(chosen), attrgetter(field)(flags)
            # None in the file is no choice: the flag, or its default, fills it.
            is_open = by_file is None and flag in ("mesh", "microbatches")
            if flag in given and not is_open and by_file != by_flag:
                raise PlanError(
                    f"--{flag.replace('_', '-')} makes {field} {_shown(by_flag)}, but in --strategy {self.strategy} it is "
                    f"{_shown(by_file)}: two places for one choice. Leave the flag away, or change the file."
                )
        return chosen


def _axes(spec: MeshSpec) -> str:
    """As --mesh says it. Of one rank: an axis all the same, for an empty mesh takes all ranks there are."""
    return spec.text or "dp_shard=1"


def _shown(choice: Any) -> str:
    return f'"{_axes(choice)}"' if isinstance(choice, MeshSpec) else repr(choice)
