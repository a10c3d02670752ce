"""The cut of a model into pipeline stages: decided on the full model, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._check import Checked, check
from meshkit.parallel.pipeline._csv import read_csv
from meshkit.parallel.pipeline._skips import refuse_skips, why_not_skip
from meshkit.parallel.pipeline._stages import Stages, flow_of, plan_stages
from meshkit.parallel.pipeline._table import Schedule
from meshkit.parallel.pipeline.schedules import NAMES, Generator, named
from meshkit.program import Example, ReadingError, Trace, example_of, tensors, trace, twice


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A model in stages, whichever ranks they are on.

    width: features of the hidden state; None where something else crosses a cut. tied: (name in the head, name in the tail)
    of each parameter that both hold. tensors: those of the full model, on meta. read: whether the program told in which order
    modules are called. no_skips: why no microbatch can skip a stage, where the program told.
    """

    stages: Stages
    width: int | None
    tied: tuple[tuple[str, str], ...]
    tensors: dict[str, Tensor]
    read: bool = False
    no_skips: str = ""


@dataclass(frozen=True, kw_only=True)
class Cut(Staged):
    """How a model is cut into stages, and which rank has which of them when.

    splits_backward: gradients of weights have rows of their own (W). ways: (from, to) of messages between ranks in the table
    that was given, or in that of two microbatches.
    """

    generate: Generator
    placement: tuple[int, ...]
    splits_backward: bool
    ways: frozenset[tuple[int, int]] = frozenset()

    @property
    def ends(self) -> tuple[int, int]:
        """The ranks of the first and the last stage."""
        return self.placement[0], self.placement[-1]

    @property
    def named(self) -> bool:
        """Whether the schedule has a name: such a table passes all stages, and is the same each time."""
        return self.generate in NAMES.values()

    def table(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule's table. A name's is known to run to its end; another one is checked."""
        return _made(self.generate, ranks, microbatches) if self.named else self.checked(ranks, microbatches).schedule

    def checked(self, ranks: int, microbatches: int) -> Checked:
        """The same, checked. A name's is kept: a file's or a function's may be another one the next time.

        Raises: PlanError where there is none, and where it skips stages of a model that does not allow it.
        """
        checked = (
            _checked(self.generate, ranks, microbatches) if self.named else check(self.generate(ranks, microbatches))
        )
        refuse_skips(checked.schedule, self.no_skips)
        return checked

    @property
    def copied(self) -> tuple[tuple[str, str], ...]:
        """The tied parameters whose two uses are on different ranks, so that each rank has a copy."""
        return self.tied if self.ends[0] != self.ends[1] else ()

    def copies(self, rank: int) -> dict[str, str]:
        """This rank's second copies of tied parameters, counted by the first copy's rank: name -> single-device name."""
        return {tail: head for head, tail in self.copied} if rank == self.ends[1] else {}

    @property
    def owners(self) -> dict[str, int]:
        """The rank that counts and writes each tensor; tensors outside of all stages are rank 0's."""
        return {name: self.placement[self.stages.stage_of(name) or 0] for name in self.tensors}

    def runs(self, name: str, rank: int) -> bool:
        """Whether the rank runs this module, or holds this tensor. Modules around all stages are on every rank."""
        stage = self.stages.stage_of(name)
        return stage is None or self.placement[stage] == rank

    def message_bytes(
        self, model: nn.Module, rows: int, tokens: int, dtype: torch.dtype
    ) -> list[list[tuple[int, bool]]]:
        """For each cut, (bytes, whether it has a gradient) of each tensor that crosses it, for a batch of these sizes.

        model: the full one. dtype: what it computes in.
        """
        if self.width is not None:
            return [[(rows * tokens * self.width * dtype.itemsize, True)]] * (self.stages.count - 1)
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        flow = flow_of(trace(model, (ids,), {}), model, self.stages)
        return [
            [
                (
                    prod(ref.shape) * (dtype if ref.dtype.is_floating_point else ref.dtype).itemsize,
                    ref.dtype.is_floating_point,
                )
                for ref in flow.crossing(cut)
            ]
            for cut in range(self.stages.count - 1)
        ]

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]


@lru_cache(maxsize=256)
def _made(generate: Generator, ranks: int, microbatches: int) -> Schedule:
    return generate(ranks, microbatches)


@lru_cache(maxsize=256)
def _checked(generate: Generator, ranks: int, microbatches: int) -> Checked:
    return check(_made(generate, ranks, microbatches))


def stage_model(
    model: nn.Module,
    count: int,
    *,
    blocks: Sequence[str],
    split: Sequence[int] | None = None,
    example: Example | None = None,
    closed: Mapping[str, str] | None = None,
    read: Trace | None = None,
) -> Staged:
    """Share the model's blocks among `count` stages. Arguments and errors are those of `plan_pipeline`."""
    read = read or _trace(model, example, closed or {})
    stages = plan_stages(model, blocks, count, split=split, read=read)
    width: int | None
    no_skips = ""
    if read is None:
        width = _hidden_width(model, stages)
    else:
        rows_tokens = next((ref.shape[:2] for ref in tensors(tuple(read.inputs.values()))), ())
        flow = flow_of(read, model, stages)
        width, no_skips = flow.width(rows_tokens), why_not_skip(flow)
    return Staged(
        stages=stages,
        width=width,
        tied=_tied(model, stages),
        tensors=_tensors(model),
        read=read is not None,
        no_skips=no_skips,
    )


def place_stages(staged: Callable[[int], Staged], ranks: int, schedule: Generator | Schedule | str) -> Cut:
    """Put stages on ranks. staged: of how many stages -> the model in so many."""
    schedule = _read(schedule)
    generate = generator_of(schedule)
    # Two microbatches show where a schedule puts its stages, and whether it has rows for weight gradients.
    table = schedule if isinstance(schedule, Schedule) else generate(ranks, 2)
    if table.world != ranks:
        raise PlanError(_wrong_table(table, ranks, table.microbatches))
    return Cut(
        **vars(staged(table.stages)),
        generate=generate,
        placement=table.placement,
        splits_backward=table.splits_backward,
        ways=table.ways,
    )


def plan_pipeline(
    model: nn.Module,
    ranks: int,
    *,
    blocks: Sequence[str],
    schedule: Generator | Schedule | str,
    split: Sequence[int] | None = None,
    example: Example | None = None,
    closed: Mapping[str, str] | None = None,
    read: Trace | None = None,
) -> Cut:
    """Share the model's blocks among stages. Changes nothing; call it before the model is sharded.

    schedule: a name, the path of a table in CSV, a function of (ranks, microbatches), or a table. split: blocks of each
    stage; default: by parameters. example: by which the model's program is read; default: token ids, if it takes those.
    closed: modules whose inside is not read, as in `trace`. read: the program, where it was read already. Without either, one
    hidden state is taken to cross each cut until the first step shows what does.
    Raises: PlanError for a model that cannot be cut so, and for a table that is wrong.
    """
    return place_stages(
        lambda count: stage_model(model, count, blocks=blocks, split=split, example=example, closed=closed, read=read),
        ranks,
        schedule,
    )


def _trace(model: nn.Module, example: Example | None, closed: Mapping[str, str]) -> Trace | None:
    given = example or example_of(model)
    if given is None:
        return None
    try:
        return trace(model, given.args, given.kwargs, closed=closed, again=twice)
    except ReadingError:
        if example is not None:
            raise
        return None  # it takes something else


def _read(schedule: Generator | Schedule | str) -> Generator | Schedule | str:
    """A file's table."""
    is_file = isinstance(schedule, str) and schedule.lower().endswith(".csv")
    return read_csv(Path(schedule)) if is_file else schedule  # type: ignore[arg-type]


def generator_of(schedule: Generator | Schedule | str) -> Generator:
    """Tables for any number of microbatches, or the one that was given."""
    schedule = _read(schedule)
    if isinstance(schedule, str):
        return named(schedule)
    if not isinstance(schedule, Schedule):
        return schedule

    def given(ranks: int, microbatches: int) -> Schedule:
        if (schedule.world, schedule.microbatches) != (ranks, microbatches):
            raise PlanError(_wrong_table(schedule, ranks, microbatches))
        return schedule

    return given


def _wrong_table(table: Schedule, ranks: int, microbatches: int) -> str:
    return (
        f"pipeline: the table {table.name!r} is for {table.world} ranks and {table.microbatches} microbatches, but the run "
        f"has {ranks} and {microbatches}. Give a table for those, or a function that makes it."
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once, on meta."""
    # A buffer that is not persistent is computed, not loaded: no checkpoint has it, and each stage makes its own.
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    tensors = {**dict(model.named_parameters()), **buffers}
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def _tied(model: nn.Module, stages: Stages) -> tuple[tuple[str, str], ...]:
    # Tying is sharing one Parameter object. Sharding puts new objects in place, which is why the plan comes before it.
    head: dict[int, str] = {}
    tail: dict[int, str] = {}
    # With duplicates: a rank knows the parameter by the first of the names that its modules have.
    for name, param in model.named_parameters(remove_duplicate=False):
        stage = stages.stage_of(name)
        if stage == 0:
            head.setdefault(id(param), name)
        if stage == stages.count - 1:
            tail.setdefault(id(param), name)
    tied = {key: (head[key], tail[key]) for key in head if key in tail}
    for name, param in model.named_parameters():
        if id(param) in tied and tied[id(param)][0] != name:
            raise PlanError(
                f"pipeline: {tied[id(param)][0]!r} of the first stage is the same parameter as {name!r} of the last, which "
                "the model registers before it, so checkpoints name it by a module that the first stage has not. Register "
                "modules in the order in which they are called, or use a mesh without pp."
            )
    return tuple(tied.values())


def _hidden_width(model: nn.Module, stages: Stages) -> int:
    # The head's last module makes what the first block reads: an embedding may be followed by a projection.
    for name in reversed(stages.head):
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            return module.embedding_dim
        if isinstance(module, nn.Linear):
            return module.out_features
    raise PlanError(
        "pipeline: no embedding or linear layer before the blocks tells the width of the hidden state. Put one there."
    )
