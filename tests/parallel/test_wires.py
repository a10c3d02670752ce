"""Quantized wires of FSDP equal their definition in one process; error feedback loses nothing, and is saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.errors import PlanError
from meshkit.mesh import fake_world
from meshkit.parallel.wires import ERROR_DTYPE, rounding_errors
from meshkit.strategy import DataPolicy, Fp8, Precision
from tests.compare_shards import computed_once, difference
from tests.laws.parity.cases import ADAM, MAX_NORM, Cell, Moe, batches, build, own_rows, start
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs
BLOCK = 128


# --------------------------------------------------------------------------------------------- the definition, in one process


def rounded(values: Tensor, wire: str) -> Tensor:
    """values: [N]. Blocks of 128, each by its largest."""
    found = []
    for block in values.split(BLOCK):
        top = {"int8": 127, "fp8": 448, "int4": 7}[wire]
        scale = (block.abs().max() / top).float().double()
        scaled = (block / (scale if scale else 1)).clamp(-top, top)
        codes = scaled.to(torch.float8_e4m3fn).double() if wire == "fp8" else scaled.round()
        found.append(codes * scale)
    return torch.cat(found)


def by_parts(tensor: Tensor, ranks: int, wire: str) -> Tensor:
    """Rounded as the ranks send it: a block begins with each rank's rows."""
    rows = -(-len(tensor) // ranks)
    return torch.cat([rounded(part.reshape(-1), wire).view_as(part) for part in tensor.split(rows)])


def by_chunks(values: Tensor, count: int, wire: str) -> Tensor:
    """values: [N]. Rounded as a chunk of whole blocks for each of `count` replicas."""
    return torch.cat([rounded(part, wire) for part in values.split(chunk_size(len(values), count))])


def chunk_size(elements: int, count: int) -> int:
    share = -(-elements // count)
    return -(-share // BLOCK) * BLOCK


def over_replicas(sums: list[Tensor], errors: list[Tensor], shards: int, policy: DataPolicy) -> Tensor:
    """The two hops over the replicas. sums: of each replica; errors: of its rank of each shard, [replicas x shards], changed
    in place."""
    assert policy.reduce is not None
    replicas, rows = len(sums), -(-len(sums[0]) // shards)
    found = []
    for shard, parts in enumerate(zip(*(each.split(rows) for each in sums), strict=True)):
        size, given = rows * parts[0][0].numel(), parts[0].numel()
        values = [F.pad(part.reshape(-1), (0, size - given)) for part in parts]
        own = [errors[r * shards + shard].split(rows)[shard].reshape(-1) for r in range(replicas)]
        if policy.feedback and shards == 1:
            values = [value + error for value, error in zip(values, own, strict=True)]
        sent = [by_chunks(value, replicas, policy.reduce) for value in values]
        total = torch.stack(sent).sum(0)
        result = by_chunks(total, replicas, policy.reduce)
        for replica, error in enumerate(own):
            left, chunk = values[replica] - sent[replica], chunk_size(size, replicas)
            mine = slice(replica * chunk, (replica + 1) * chunk)
            left[mine] += (total - result)[mine]
            error.copy_((left[:given] + (error if shards > 1 else 0)).to(ERROR_DTYPE))
        found.append(result[:given].view_as(parts[0]))
    return torch.cat(found)


def definition(
    cell: Cell, policy: DataPolicy, replicas: int, shards: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and final parameters: masters are exact, ranks compute with rounded ones and send rounded gradients."""
    masters, rounding, ranks = build(cell), build(cell), replicas * shards
    named, copies = dict(masters.named_parameters()), dict(rounding.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        **ADAM,
    )
    errors = {(rank, name): torch.zeros_like(p) for rank in range(ranks) for name, p in named.items()}
    losses, norms = [], []
    for batch in batches(cell):
        with torch.no_grad():
            for name, param in named.items():
                rounds = policy.gather is not None and shards > 1
                copies[name].copy_(by_parts(param, shards, str(policy.gather)) if rounds else param)
        sums = {name: [torch.zeros_like(param) for _ in range(replicas)] for name, param in named.items()}
        tokens, total = int((batch["labels"] != -100).sum()), 0.0
        of_ranks = [{key: value.tensor_split(ranks)[rank] for key, value in batch.items()} for rank in range(ranks)]
        for microbatch in range(cell.microbatches):
            for rank, rows in enumerate(of_ranks):
                part = {key: value.tensor_split(cell.microbatches)[microbatch] for key, value in rows.items()}
                rounding.zero_grad(set_to_none=False)
                if len(part["labels"]):
                    logits = rounding(part["input_ids"]).flatten(0, 1)
                    loss = (
                        F.cross_entropy(logits, part["labels"].flatten(), ignore_index=-100, reduction="sum") / tokens
                    )
                    loss.backward()
                    total += float(loss.detach())
                for name, param in named.items():
                    grad = copies[name].grad
                    grad = torch.zeros_like(param) if grad is None else grad.clone()
                    if policy.reduce is not None and shards > 1:
                        grad += errors[rank, name] if policy.feedback else 0
                        sent = by_parts(grad, shards, policy.reduce)
                        errors[rank, name] = (grad - sent).to(ERROR_DTYPE).double()
                        grad = sent
                    sums[name][rank // shards] += grad
        for name, param in named.items():
            param.grad = torch.stack(sums[name]).sum(0)
            if replicas > 1 and policy.reduce is not None:
                param.grad = over_replicas(sums[name], [errors[rank, name] for rank in range(ranks)], shards, policy)
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), MAX_NORM)))
        optimizer.step()
    return losses, norms, {name: param.detach() for name, param in named.items()}


def against_definition(cell: Cell, policy: DataPolicy) -> float:
    """The largest difference of a loss, a norm or a parameter."""
    run = start(cell, data=policy)
    losses, norms, parameters = computed_once(
        definition, cell, policy, run.mesh.spec.dp_replicate, run.mesh.spec.dp_shard
    )
    optimizer, found = mk.adamw(run, **ADAM), []
    for step, batch in enumerate(batches(cell)):
        loss = float(run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches))
        found += [abs(loss - losses[step]), abs(float(mk.clip_grad_norm(run, MAX_NORM)) - norms[step])]
        optimizer.step()
        optimizer.zero_grad()
    return max(*found, *(difference(param, parameters[name]) for name, param in run.named_parameters()))


@pytest.mark.parametrize(
    ("cell", "policy"),
    [
        (Cell(mesh="dp_shard=4", vocab=61, hidden_mlp=45), DataPolicy(gather="int8", reduce="int4")),
        (Cell(mesh="dp_shard=4", microbatches=2, tied=True), DataPolicy(gather="fp8", reduce="int8")),
        (Cell(mesh="dp_shard=4", zero=2, microbatches=3, qwen=True), DataPolicy(gather="int4", reduce="int4")),
        (Cell(mesh="dp_shard=4", recompute="full"), DataPolicy(reduce="int4", feedback=False)),
        (Cell(mesh="dp_shard=4", recompute="selective"), DataPolicy(gather="int8")),
        (Cell(mesh="dp_replicate=2 dp_shard=2", vocab=61, microbatches=2), DataPolicy(gather="int8", reduce="int4")),
        (Cell(mesh="dp_replicate=4", hidden_mlp=45), DataPolicy(reduce="int4")),
        (Cell(mesh="dp_replicate=2 dp_shard=2"), DataPolicy(reduce="int8", feedback=False)),
    ],
    ids=["uneven", "tied", "accumulated", "without feedback", "gathered alone", "hsdp", "ddp", "hsdp without feedback"],
)
def test_a_run_equals_the_definition_in_one_process(cell: Cell, policy: DataPolicy) -> None:
    assert max(pool(4).run(against_definition, cell, policy)) < TOL_FP64


# ------------------------------------------------------------------------------------------------------------- error feedback


class Weights(nn.Module):
    """Whose gradient is what it is called with."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes)

    def forward(self, *grads: Tensor) -> Tensor:
        return torch.stack([(weight * grad).sum() for weight, grad in zip(self.weights, grads, strict=True)]).sum()


SHAPES = ((7, 50), (3,), (301,))


def reduced(policy: DataPolicy, steps: int) -> tuple[float, float]:
    """The largest difference between the sum of all gradients and what was reduced of them, without and with what the ranks
    keep; each rank has other gradients, of values of very different sizes beside each other."""
    mesh = mk.init_mesh("dp_shard=4")
    model = mk.fully_shard(Weights(*SHAPES), mesh.data, policy=policy)
    generator = torch.Generator().manual_seed(7)
    every = [
        [
            torch.randn(shape, generator=generator).double() * 10 ** torch.rand(shape, generator=generator)
            for shape in SHAPES
        ]
        for _ in range(4)
    ]
    for _ in range(steps):
        model(*every[mesh.rank]).backward()
    kept = rounding_errors(model)
    lost = with_kept = 0.0
    for index, (name, weight) in enumerate(model.named_parameters()):
        assert weight.grad is not None
        missing = full_tensor(weight.grad) - steps * torch.stack([grads[index] for grads in every]).sum(0)
        lost = max(lost, float(missing.abs().max()))
        if name in kept:
            assert kept[name].shape == (4, *SHAPES[index])
            missing += full_tensor(kept[name]).double().sum(0)
        with_kept = max(with_kept, float(missing.abs().max()))
    return lost, with_kept


def test_what_was_reduced_and_what_is_kept_are_all_gradients_together() -> None:
    lost, with_kept = pool(4).run(reduced, DataPolicy(reduce="int4"), 20)[0]
    without, _ = pool(4).run(reduced, DataPolicy(reduce="int4", feedback=False), 20)[0]
    # bf16 loses up to a 256th of an error of half a step of int4, on each of four ranks, at each of 20 steps.
    step = 45 / 7
    assert with_kept < 20 * 4 * step / 2 / 256
    assert lost < 4 * step
    assert without > 4 * lost  # the same is lost at each step


def regression(policy: DataPolicy) -> float:
    """By how much of the least squares' loss 150 steps of gradient descent are above it; each rank has another teacher."""
    mesh = mk.init_mesh("dp_shard=4")
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, 300, 48, generator=generator, dtype=torch.float64)
    teachers = torch.randn(4, 48, 5, generator=generator, dtype=torch.float64)
    targets = inputs @ teachers
    model = mk.fully_shard(nn.Linear(48, 5, bias=False, dtype=torch.float64), mesh.data, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(150):
        optimizer.zero_grad()
        ((model(inputs[mesh.rank]) - targets[mesh.rank]).square().sum() / 2400).backward()
        optimizer.step()
    x, y = inputs.flatten(0, 1), targets.flatten(0, 1)
    least = (x @ torch.linalg.lstsq(x, y).solution - y).square().sum()
    return float((x @ full_tensor(model.weight).T - y).square().sum() / least - 1)


def test_int4_gradients_find_the_least_squares_with_feedback_and_do_not_without() -> None:
    exact, fed_back, without = (
        pool(4).run(regression, policy)[0]
        for policy in (DataPolicy(), DataPolicy(reduce="int4"), DataPolicy(reduce="int4", feedback=False))
    )
    assert exact < TOL_FP64
    assert fed_back < without / 4  # 0.00033 and 0.0026 were seen


def poisoned() -> tuple[bool, bool]:
    mesh = mk.init_mesh("dp_shard=4")
    model = mk.fully_shard(Weights(*SHAPES), mesh.data, policy=DataPolicy(reduce="int8"))
    grads = [torch.ones(shape, dtype=torch.float64) for shape in SHAPES]
    grads[0][2, 3] = torch.nan if mesh.rank == 1 else 1.0
    model(*grads).backward()
    seen = not full_tensor(dict(model.named_parameters())["weights.0"].grad).isfinite().all()  # type: ignore[arg-type]
    return seen, all(local_tensor(error).isfinite().all() for error in rounding_errors(model).values())


def test_a_gradient_that_is_not_finite_is_seen_and_is_not_fed_back() -> None:
    assert pool(4).run(poisoned) == [(True, True)] * 4


# ---------------------------------------------------------------------------------------------------------- beside other axes

BOTH = DataPolicy(gather="int8", reduce="int4")
MIXED = Cell(mesh="dp_shard=2 tp=2", sequence=True, vocab=61, hidden_mlp=45, heads=(9, 3), microbatches=2)


def copies_differ(cell: Cell) -> list[str]:
    """Parameters that ranks of tp hold alike, and that are not bit for bit alike after three steps."""
    run = start(cell, data=BOTH)
    optimizer = mk.adamw(run, **ADAM)
    for batch in batches(cell):
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    tp, wrong = run.mesh["tp"], []
    for name, param in run.named_parameters():
        if not any(placement.is_shard() for placement in param.placements[1:]):  # type: ignore[attr-defined]
            local = local_tensor(param).contiguous()
            first = local.clone()
            torch.distributed.broadcast(first, group=tp.get_group(), group_src=0)
            wrong += [] if torch.equal(first, local) else [name]
    return wrong


@pytest.mark.parametrize("mesh", ["dp_shard=2 tp=2", "dp_replicate=2 tp=2"])
def test_ranks_of_tp_that_hold_a_parameter_alike_still_do(mesh: str) -> None:
    assert pool(4).run(copies_differ, replace(MIXED, mesh=mesh)) == [[]] * 4


# ---------------------------------------------------------------------------------------------------------------- checkpoints

RESUMED = [
    Cell(mesh="dp_shard=4", vocab=61),
    MIXED,
    Cell(mesh="dp_shard=4 ep=2", layers=3, moe=Moe(experts=6)),
    Cell(mesh="pp=2 dp_shard=2", layers=4, tied=True, microbatches=2),
    Cell(mesh="dp_shard=2 cp=2", dtype="float32", bf16=True),
    Cell(mesh="dp_replicate=2 dp_shard=2", vocab=61),
    Cell(mesh="dp_replicate=2 tp=2", vocab=61, hidden_mlp=45, heads=(9, 3)),
]


def steps(run: mk.Run, optimizer: torch.optim.Optimizer, cell: Cell, chosen: slice) -> None:
    for batch in batches(cell)[chosen]:
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def state(run: mk.Run) -> dict[str, Tensor]:
    tensors = {
        **dict(run.named_parameters()),
        **{f"{key} error": each for key, each in rounding_errors(run.model).items()},
    }
    return {name: local_tensor(tensor).clone() for name, tensor in tensors.items()}


def stopped_and_not(cell: Cell, folder: str) -> bool:
    """Whether a run that was stopped after two steps ends as one that was not."""
    run = start(cell, data=BOTH)
    optimizer = mk.adamw(run, **ADAM)
    steps(run, optimizer, cell, slice(0, 2))
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(2, run, optimizer)
        steps(run, optimizer, cell, slice(2, None))
        other = start(cell, data=BOTH)
        again = mk.adamw(other, **ADAM)
        steps(other, again, cell, slice(1, 2))  # into errors of another step
        checkpointer.load(other, again, step=2)
        steps(other, again, cell, slice(2, None))
    one, two = state(run), state(other)
    errors = [name for name in one if name.endswith(" error")]
    assert len(errors) == len(one) / 2
    assert all(one[name].any() for name in errors if one[name].numel() > BLOCK)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("cell", RESUMED, ids=lambda cell: cell.mesh)
def test_a_run_resumed_equals_one_that_was_not_stopped(cell: Cell, tmp_path: Path) -> None:
    assert all(pool(4).run(stopped_and_not, cell, str(tmp_path)))


def resharded(meshes: tuple[str, str], folder: str) -> float:
    """The largest difference between the errors of all data ranks together, before and after, relative to the largest."""
    before = start(Cell(mesh=meshes[0], vocab=61), data=BOTH)
    optimizer = mk.adamw(before, **ADAM)
    cell = Cell(mesh=meshes[0], vocab=61)
    steps(before, optimizer, cell, slice(0, 2))
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(2, before, optimizer)
        after = start(replace(cell, mesh=meshes[1]), data=BOTH)
        checkpointer.load(after, mk.adamw(after, **ADAM), step=2)
    worst = 0.0
    ours, theirs = (
        {k: full_tensor(v).double().sum(0) for k, v in rounding_errors(r.model).items()} for r in (before, after)
    )
    assert ours.keys() == theirs.keys()
    for name, expected in ours.items():
        worst = max(worst, float((theirs[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)))
    return worst


@pytest.mark.parametrize(
    "meshes",
    [
        ("dp_shard=4", "dp_shard=2 tp=2"),
        ("dp_shard=2 tp=2", "dp_shard=4"),
        ("dp_replicate=4", "dp_replicate=2 dp_shard=2"),
    ],
)
def test_other_data_ranks_keep_all_that_was_rounded_away(meshes: tuple[str, str], tmp_path: Path) -> None:
    assert max(pool(4).run(resharded, meshes, str(tmp_path))) < 2**-7  # sums are rounded to bf16


# ------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: DataPolicy(gather="int2"),
            r"DataPolicy\(gather='int2'\): there is no such wire. Choose one of int8, fp8",
        ),  # type: ignore[arg-type]
        (
            lambda: DataPolicy(reduce="fp8"),
            r"DataPolicy\(reduce='fp8'\): there is no such wire. Choose one of int8, int4",
        ),  # type: ignore[arg-type]
        (lambda: DataPolicy(feedback=False), r"DataPolicy\(feedback=False\) without reduce: no gradient is rounded"),
        (lambda: DataPolicy(reduce="int8", feedback=1), r"DataPolicy\(feedback=1\): give True or False"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_says_nothing_is_refused(make: object, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        make()  # type: ignore[operator]


def test_weights_that_travel_in_fp8_have_no_second_wire() -> None:
    pytest.importorskip("torchao")  # which fp8 needs
    memory = mk.MemoryPolicy(precision=Precision(fp8=Fp8(gather=True)))
    with fake_world(4):
        mesh = mk.init_mesh("dp_shard=4", device_type="cpu")
        with pytest.raises(
            PlanError, match=r"DataPolicy\(gather='int8'\) with Fp8\(gather=True\): weights travel in fp8"
        ):
            mk.parallelize(build(Cell(mesh="dp_shard=4")), mesh, memory=memory, data=DataPolicy(gather="int8"))


def test_what_was_rounded_away_does_not_move() -> None:
    with fake_world(4):
        mesh = mk.init_mesh("dp_shard=4", device_type="cpu")
        run = mk.parallelize(build(Cell(mesh="dp_shard=4")), mesh, data=BOTH)
        with pytest.raises(PlanError, match="gradients are reduced with error feedback, and what rounding took"):
            run.move(mk.Strategy(mesh="dp_shard=2 tp=2"))


# ------------------------------------------------------------------------------------------------------- units without floats


class Coded(nn.Module):
    """Integer codes, two dtypes of them, between layers of floats."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        codes = [torch.arange(10, dtype=dtype).view(5, 2) for dtype in dtypes]
        self.codes = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in codes)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(2 * len(dtypes), 2)

    def forward(self, x: Tensor) -> Tensor:
        coded = torch.cat(list(self.codes), 1).to(x.dtype)
        out: Tensor = self.last(self.first(x) @ coded)
        return out.square().sum()


def coded_loss(policy: DataPolicy, dtypes: tuple[torch.dtype, ...]) -> float:
    torch.manual_seed(0)
    mesh = mk.init_mesh("dp_shard=2")
    model = mk.fully_shard(Coded(*dtypes).double(), mesh.data, units=["first", "last"], policy=policy)
    loss = model(torch.ones(2, 3, dtype=torch.float64))
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("dtypes", [(torch.uint8,), (torch.uint8, torch.int16)], ids=["one dtype", "two"])
def test_a_unit_of_integer_codes_alone_travels_as_it_is(dtypes: tuple[torch.dtype, ...]) -> None:
    (plain, _), (quantized, _) = (pool(2).run(coded_loss, policy, dtypes) for policy in (DataPolicy(), BOTH))
    assert quantized == pytest.approx(plain, rel=0.05)
