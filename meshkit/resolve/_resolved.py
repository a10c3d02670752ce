"""What `resolve` decided, for every rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import Shard

from meshkit.errors import PlanError
from meshkit.memory import Treatment, repeated
from meshkit.memory.budget.choose import Choice
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import Doors, Reader
from meshkit.parallel.data import whole_parameters
from meshkit.parallel.expert import ExpertLayout, in_expert_view
from meshkit.parallel.lengths import Pace
from meshkit.parallel.pipeline import Cut
from meshkit.parallel.tensor.heads import widest_heads
from meshkit.parallel.tensor.layout import TensorLayout
from meshkit.plan import Plan
from meshkit.program import Example, Program, Trace, example_of
from meshkit.strategy import MemoryPolicy, Shardings, Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class Resolved:
    """The decisions for every rank. Names are those of the single-device model.

    program: the model before anything is split, on a copy without values. strategy: as it was given; the other fields
    follow from it. blocks, units, mlps: modules that the plan names. shardings: over which data ranks parameters,
    gradients and states are sharded. sequence: whether the residual stream is sharded along the sequence. compute: the
    dtype of matrix products. fp8: linear layers that multiply in fp8. head: the output head, with a chunked loss; else
    None. layout: of parameters and calls on tp; None without tp. reading: how attention reaches over the ranks of cp.
    experts: modules of routed experts. cut: the pipeline stages; None without pp. treatments: for each block, what it
    keeps for backward and where. choices: what a `Budget` chose, on each rank of pp; empty without one. example, outline:
    by what the program was read on tp, and of what it ran there. rows: by what it was shown to keep rows apart, on dp and
    pp; None where nothing showed it.
    """

    program: Program
    strategy: Strategy
    spec: MeshSpec
    plan: Plan
    blocks: tuple[str, ...]
    units: tuple[str, ...]
    mlps: tuple[str, ...]
    shardings: Shardings
    sequence: bool
    compute: torch.dtype
    fp8: tuple[str, ...]
    head: str | None
    layout: TensorLayout | None
    reading: tuple[Reader, Doors]
    experts: Mapping[str, ExpertLayout]
    cut: Cut | None
    treatments: Mapping[str, Treatment]
    choices: tuple[Choice, ...]
    example: Example | None
    outline: str | None
    rows: Example | None

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What others have derived of these decisions and of no size of a data axis: see `resolve_alike`."""
        return {}

    @property
    def memory(self) -> MemoryPolicy:
        return self.strategy.memory

    @cached_property
    def whole(self) -> frozenset[str]:
        """Parameters that every data rank keeps whole, under all of their names; those of experts have ranks of their own.

        Also those of which tp leaves some rank nothing, as of a table with fewer rows than ranks.
        """
        params = dict(self.program.model.named_parameters(remove_duplicate=False))
        inside = tuple(f"{name}." for name in self.experts)
        whole = [
            *whole_parameters(params, [*self.experts, *self.blocks, *self.units]),
            *(name for name in params if self._leaves_nothing(name, params[name].shape)),
        ]
        return frozenset(name for name in whole if not name.startswith(inside))

    def read(self) -> Trace | None:
        """The forward, with experts as one operation each; None for a model that cannot be read."""
        example = self.example or self.program.example or example_of(self.program.model)
        if example is None:
            return None
        try:
            return self.program.read(example, dict.fromkeys(self.experts, "experts"))
        except PlanError:
            return None

    def _leaves_nothing(self, name: str, shape: torch.Size) -> bool:
        layout = None if self.layout is None else self.layout.params.get(name)
        if layout is None or not isinstance(layout.placement, Shard):
            return False
        size, ranks = shape[layout.placement.dim], self.spec.tp
        return -(-size // ranks) * (ranks - 1) >= size

    @cached_property
    def repeated(self) -> dict[str, str]:
        """The modules whose forward runs more than once for a microbatch -> by what, and what to change."""
        found = repeated(self.treatments, self.program.modules)
        if (chunks := self.memory.mlp_chunks) > 1:
            why = (
                f"mlp_chunks={chunks} runs this feed-forward on {chunks} parts of the tokens, so it is written each time. "
                "Leave it out of the plan's `mlps`."
            )
            found = dict.fromkeys(self.mlps, why) | found
        return found

    def regathers(self, pp_rank: int) -> bool:
        """Whether tensor-parallel regions of that rank of pp keep sharded inputs, all of them or those of some block."""
        blocks = (self.treatments[name] for name in self.blocks_of(pp_rank))
        return self.sequence and (self.memory.regather or any(each.regather for each in blocks))

    @cached_property
    def heads(self) -> tuple[int, int, int] | None:
        """(query heads, key/value heads, head_dim) on the rank of tp that has most heads."""
        return widest_heads(self.program.model, self.plan.tensor, size=self.spec.tp)

    @property
    def pace(self) -> Pace:
        """When ranks of cp wait for each other: FSDP gathers or reduces in every microbatch, but for rows as zero=1, and
        experts trade tokens; stages of pp wait for microbatches, which should take equally long."""
        if self.spec.pp > 1:
            return "pipeline"
        waits = self.shardings.frees_parameters or self.shardings.reduces_every_microbatch or bool(self.experts)
        return "microbatch" if waits else "step"

    @property
    def sequence_multiple(self) -> int:
        """The number of tokens of a rank of cp is a multiple of this."""
        return self.spec.tp if self.sequence else 1

    def refuse_tokens(self, seq_len: int) -> None:
        """Raises: PlanError for rows whose tokens the ranks of tp cannot share evenly. With cp rows are padded."""
        if self.spec.cp == 1 and seq_len % self.sequence_multiple:
            raise PlanError(
                f"seq_len={seq_len} with sequence=True: the {self.spec.tp} ranks of tp cannot share {seq_len} tokens evenly. "
                f"Pad rows to a multiple of {self.spec.tp}, or use sequence=False."
            )

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients separately from input gradients (zero bubble)."""
        return self.cut is not None and self.cut.splits_backward

    def runs(self, name: str, pp_rank: int) -> bool:
        """Whether that rank of pp runs the module, or holds the parameter."""
        return self.cut is None or self.cut.runs(name, pp_rank)

    def blocks_of(self, pp_rank: int) -> list[str]:
        return self._in_one_stage(self.blocks, pp_rank)

    def units_of(self, pp_rank: int) -> list[str]:
        return self._in_one_stage(self.units, pp_rank)

    def _in_one_stage(self, names: Sequence[str], pp_rank: int) -> list[str]:
        """The names of modules that are inside of one stage of that rank. Modules cut by stages belong to the root unit."""
        if self.cut is None:
            return list(names)
        stages = self.cut.stages
        present = {name for stage in self.cut.stages_of(pp_rank) for name in stages.modules_of(stage)}
        return [name for name in names if name in present]

    def experts_of(self, pp_rank: int) -> list[str]:
        """Modules of experts that are sharded over other ranks than the rest of the model."""
        return [name for name in self.experts if in_expert_view(self.spec) and self.runs(name, pp_rank)]

    def choice_of(self, pp_rank: int) -> Choice | None:
        """What a `Budget` chose for that rank of pp; `str()` is a table. None without a budget."""
        # Without pp there is one choice, of all ranks.
        return self.choices[pp_rank if len(self.choices) > 1 else 0] if self.choices else None
