"""Laws 1 to 3 where microbatches skip stages: equal to one device that runs, for each, the blocks of its path alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import copies_of
from meshkit.errors import MeshkitError, PlanError
from meshkit.faults import CorruptionGuard
from meshkit.models.llama import LLAMA_PLAN, Decoder
from meshkit.moe.aux_loss import Collected, collect, update_bias
from meshkit.parallel.pipeline import Schedule, Times, check, pipeline_of
from meshkit.parallel.pipeline.schedules import named, skip_pipe
from meshkit.preflight.explain import Message
from meshkit.strategy import PipelinePolicy
from tests.compare_shards import computed_once, difference
from tests.laws.parity.cases import ADAM, MAX_NORM, Cell, Moe, Outcome, batches, build, mesh_for, own_rows, start
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs


def left_out(schedule: str, ranks: int, *paths: tuple[int, ...]) -> Schedule:
    """A table of the library without the rows of stages that a microbatch does not pass: what remains is in an order."""
    table = named(schedule)(ranks, len(paths))
    rows = tuple(tuple(row for row in rank if row.stage in paths[row.microbatch]) for rank in table.ranks)
    return replace(table, ranks=rows, paths=paths)


# ------------------------------------------------------------------------------------------------------------- the oracle


def passed(model: Decoder, blocks: Sequence[int], rows: dict[str, Tensor]) -> tuple[Tensor, Collected]:
    """The loss of some rows, summed, by a model of these blocks alone, in this order."""
    every = model.layers
    model.layers = nn.ModuleList(every[block] for block in blocks)
    with collect() as report:
        logits = model(rows["input_ids"], rows.get("position_ids"))
    model.layers = every
    losses = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum")
    return losses, report


def one_device(cell: Cell, blocks: list[list[int]], data_ranks: int) -> tuple[list, list, dict, dict]:
    """Losses, norms, gradients of the first step (None where there is none), final parameters. blocks: of each microbatch."""
    model = build(cell)
    groups = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)],
        betas=(0.9, 0.95),
        **ADAM,
    )
    losses, norms, gradients = [], [], {}
    for batch in batches(cell):
        tokens = (batch["labels"] != -100).sum()
        total, counts = torch.zeros((), dtype=torch.float64), {}
        for rank in range(data_ranks):
            of_rank = {name: tensor.tensor_split(data_ranks)[rank] for name, tensor in batch.items()}
            for index, own in enumerate(blocks):
                rows = {name: tensor.tensor_split(len(blocks))[index] for name, tensor in of_rank.items()}
                if not len(rows["labels"]):
                    continue
                loss, report = passed(model, own, rows)
                ((loss + report.total()) / tokens).backward()
                total += loss.detach() / tokens
                for router, count in report.counts.items():
                    counts[router] = counts.get(router, 0) + count
        gradients = gradients or {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
        for router, count in counts.items():
            if router.e_score_correction_bias is not None:
                update_bias(router.e_score_correction_bias, count, speed=0.05)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, norms, gradients, {n: t.detach() for n, t in state.items() if not n.endswith("last_counts")}


def trained(cell: Cell) -> Outcome:
    """On every rank: three steps on the mesh, against one device."""
    run = start(cell)
    pipeline = pipeline_of(run.model)
    of_stage = [[int(name.rpartition(".")[2]) for name in stage] for stage in pipeline.staged.stages.blocks]
    blocks = [list(chain(*(of_stage[stage] for stage in path))) for path in cell.schedule.paths]
    losses, norms, gradients, state = computed_once(one_device, cell, blocks, run.mesh.data_ranks)
    optimizer, copies = mk.adamw(run, **ADAM), copies_of(run.model)
    worst, loss_error, norm_error = {}, 0.0, 0.0
    for step, batch in enumerate(batches(cell)):
        loss = run.forward_backward(own_rows(batch, run.mesh), microbatches=len(blocks))
        if step == 0:
            for name, param in run.named_parameters():
                expected, found = gradients[copies.get(name, name)], gradient_of(param)
                assert (found is None) == (expected is None), name
                worst[name] = 0.0 if expected is None else difference(found, expected)
        norm_error = max(norm_error, abs(float(mk.clip_grad_norm(run, MAX_NORM)) - norms[step]))
        optimizer.step()
        optimizer.zero_grad()
        run.balance_experts(speed=0.05)
        loss_error = max(loss_error, abs(float(loss) - losses[step]))
    found = {**dict(run.named_parameters()), **dict(run.model.named_buffers())}
    parameter = max(difference(p, state[copies.get(n, n)]) for n, p in found.items() if not n.endswith("last_counts"))
    return Outcome(loss_error, norm_error, max(worst.values()), parameter, max(worst, key=worst.__getitem__))


def equal_one_device(ranks: int, cell: Cell) -> None:
    for outcome in pool(ranks).run(trained, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, (outcome, cell.mesh)


# -------------------------------------------------------------------------------------------------------------- the tests

SOME, OTHER, LAST = (0, 2, 3), (0, 1, 3), (0, 1, 2, 3)
TURNED = skip_pipe(4, 5, ratio=0.2, reorder=True, times=Times(hop_s=lambda one, other: 4.0 * (abs(one - other) == 1)))
CELLS = [
    (4, Cell(mesh="pp=4", layers=7, tied=True, schedule=left_out("1f1b", 4, SOME, OTHER, LAST))),
    # 5 rows in 7 microbatches: two are empty, and pass a path too.
    (4, Cell(mesh="pp=4", layers=6, schedule=left_out("gpipe", 4, SOME, OTHER, LAST, (0, 3), SOME, (0, 3), OTHER))),
    (4, Cell(mesh="pp=4", layers=5, all_masked_microbatch=True, schedule=left_out("zb-h1", 4, OTHER, SOME, SOME))),
    (4, Cell(mesh="pp=4", layers=6, schedule=TURNED)),
    (3, Cell(mesh="pp=3", layers=4, documents=True, tied=True, schedule=skip_pipe(3, 4))),
    (4, Cell(mesh="pp=2 dp_shard=2", layers=5, tied=True, schedule=left_out("zbv", 2, SOME, OTHER, (0, 3)))),
    (4, Cell(mesh="pp=2 dp_replicate=2", layers=5, schedule=left_out("interleaved", 2, SOME, LAST, SOME))),
    (4, Cell(mesh="pp=2 tp=2", layers=4, sequence=True, vocab=61, schedule=left_out("zbv", 2, OTHER, SOME))),
    (4, Cell(mesh="pp=2 cp=2", layers=4, documents=True, schedule=left_out("zbv", 2, OTHER, SOME))),
    (
        4,
        Cell(mesh="pp=2 dp_shard=2", layers=4, recompute="full", schedule=left_out("dualpipe-v", 2, OTHER, SOME, SOME)),
    ),
    # Stages that no microbatch passes, alone and beside another stage of their rank: no gradient, and no step.
    (4, Cell(mesh="pp=4", layers=6, tied=True, schedule=skip_pipe(4, 3, absent=(2,)))),
    (4, Cell(mesh="pp=2 dp_shard=2", layers=5, schedule=left_out("zbv", 2, SOME, SOME))),
    (6, Cell(mesh="pp=3 dp_shard=2", layers=5, tied=True, schedule=skip_pipe(3, 2, absent=(1,)))),
    (
        4,
        Cell(
            mesh="pp=2 dp_shard=2",
            layers=6,
            moe=Moe(balance=0.1, bias=True, z=0.01),
            schedule=left_out("zbv", 2, SOME, OTHER),
        ),
    ),
]


@pytest.mark.parametrize(
    ("ranks", "cell"), CELLS, ids=lambda each: f"{each.mesh},{each.schedule.name}" if isinstance(each, Cell) else ""
)
def test_skipped_stages_equal_one_device_without_their_blocks(ranks: int, cell: Cell) -> None:
    check(cell.schedule)
    equal_one_device(ranks, cell)


def test_the_reordered_table_of_these_tests_is_one() -> None:
    assert any(path != tuple(sorted(path)) for path in TURNED.paths)


def bytes_seen_and_said(cell: Cell) -> tuple[Counter[Message], Counter[Message]]:
    run = start(cell)
    return seen_and_said(run, own_rows(batches(cell)[0], run.mesh), microbatches=cell.schedule.microbatches)


@pytest.mark.parametrize(
    ("ranks", "cell"),
    [
        (4, Cell(mesh="pp=4", layers=6, tied=True, schedule=skip_pipe(4, 3, reorder=True))),
        (4, Cell(mesh="pp=2 tp=2", layers=4, sequence=True, vocab=61, schedule=left_out("zbv", 2, OTHER, SOME, SOME))),
        # A stage that nobody passes gathers no parameters, and reduces no gradients.
        (4, Cell(mesh="pp=2 dp_shard=2", layers=5, tied=True, schedule=left_out("zbv", 2, SOME, SOME))),
        (6, Cell(mesh="pp=3 dp_shard=2", layers=5, schedule=skip_pipe(3, 2, absent=(1,)))),
    ],
    ids=lambda each: each.mesh if isinstance(each, Cell) else "",
)
def test_what_is_sent_is_what_is_explained(ranks: int, cell: Cell) -> None:
    assert_alike(pool(ranks).run(bytes_seen_and_said, cell))


def two_tables(cell: Cell) -> float:
    """A step of a table of two microbatches, none of which passes stage 1, then of one of three that do."""
    tables = {2: left_out("1f1b", 4, SOME, SOME), 3: left_out("1f1b", 4, OTHER, SOME, (0, 1, 3))}
    pipeline = PipelinePolicy(schedule=lambda ranks, microbatches: tables[microbatches])
    cell = replace(cell, schedule=pipeline.schedule)
    run, batch = start(cell), batches(cell)[0]
    of_stage = [[int(name.rpartition(".")[2]) for name in stage] for stage in run.pipeline.staged.stages.blocks]
    worst = 0.0
    for count, table in tables.items():
        run.forward_backward(batch, microbatches=count)
        blocks = [list(chain(*(of_stage[stage] for stage in path))) for path in table.paths]
        gradients = computed_once(one_device, cell, blocks, 1)[2]
        for name, param in run.named_parameters():
            assert (param.grad is None) == (gradients[name] is None), (count, name)
            worst = max(worst, 0.0 if param.grad is None else difference(gradient_of(param), gradients[name]))
            param.grad = None
    return worst


def test_a_stage_that_is_passed_later_has_its_gradients_then() -> None:
    """Which values have a gradient is learned in the first step, of each path for itself."""
    assert max(pool(4).run(two_tables, Cell(mesh="pp=4", layers=5))) <= TOL_FP64


def evaluated(cell: Cell) -> float:
    run = start(cell)
    run.forward_backward(own_rows(batches(cell)[0], run.mesh), microbatches=cell.schedule.microbatches)
    loss, count = run.evaluate(own_rows(batches(cell)[0], run.mesh))
    return float(loss / count)


def whole(cell: Cell) -> float:
    batch = batches(cell)[0]
    return float(passed(build(cell), range(cell.layers), batch)[0].detach() / (batch["labels"] != -100).sum())


def test_an_evaluation_passes_all_stages() -> None:
    cell = Cell(mesh="pp=4", layers=5, schedule=skip_pipe(4, 3))
    assert pool(4).run(evaluated, cell) == pytest.approx([whole(cell)] * 4, abs=TOL_FP64)


# --------------------------------------------------------------------------------------------------------- refusals


class Skip(nn.Module):
    """An embedding that the head reads too."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.embed_tokens, self.between = nn.Embedding(32, 16), between
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden) * 0.5 if self.between else layer(hidden)
        return self.head(hidden if self.between else hidden + embedded)


def explained(model: nn.Module, table: Schedule) -> None:
    plan = mk.Plan(tensor={}, blocks=["layers.*"])
    mk.explain(
        model,
        "pp=4",
        mk.Strategy(pipeline=PipelinePolicy(schedule=table), plan=plan),
        rows=4,
        seq_len=8,
        microbatches=2,
    )


@pytest.mark.parametrize(
    ("between", "why"),
    [(False, "hand on 2, 2, 2 tensors, and not one each"), (True, "is changed between modules, which is of no stage")],
)
def test_a_model_whose_stages_need_more_than_the_hidden_state_is_refused(between: bool, why: str) -> None:
    explained(Skip(between), named("1f1b")(4, 2))
    with pytest.raises(PlanError, match=f"the table 'skip-pipe' skips or reorders stages, but of this model .*({why})"):
        explained(Skip(between), skip_pipe(4, 2))


def checked(table: Schedule) -> str:
    cell = Cell(mesh="pp=4", layers=4)
    try:
        pipeline = PipelinePolicy(schedule=table)
        mk.check(
            build(cell), mesh_for(cell.mesh), batch=batches(cell)[0], microbatches=2, plan=LLAMA_PLAN, pipeline=pipeline
        )
    except PlanError as error:
        return str(error)
    return ""


def test_check_refuses_tables_that_skip() -> None:
    assert all(
        "the schedule 'skip-pipe' skip stages, and one device runs all" in text
        for text in pool(4).run(checked, skip_pipe(4, 2))
    )


def replayed(table: Schedule) -> str:
    cell = Cell(mesh="pp=4", layers=4, schedule=table)
    run = start(cell)
    with CorruptionGuard(run, mk.adamw(run, lr=1e-3), replay_every=1):
        try:
            run.forward_backward(own_rows(batches(cell)[0], run.mesh), microbatches=2)
        except MeshkitError as error:
            return str(error)
    return ""


def test_replays_refuse_tables_that_skip() -> None:
    for text in pool(4).run(replayed, skip_pipe(4, 2)):
        assert "a microbatch of the schedule 'skip-pipe' skips stages" in text


def test_a_search_refuses_tables_that_skip() -> None:
    model = build(Cell(mesh="pp=4", layers=4)).float().to("meta")
    space = mk.Space(pp=(4,), tp=(1,), microbatches=(2,), schedule=(skip_pipe(4, 2),), recompute=("none",))
    batch, fixed = mk.Batch(sequences=2, seq_len=16), mk.Strategy(plan=LLAMA_PLAN)
    found = mk.search(model, "h100", batch, world=4, space=space, fixed=fixed)
    assert found.winner is None
    assert "search: microbatches of the schedule 'skip-pipe' skip stages" in str(found)
