"""What a cell must keep: the design's laws, each against one device, on every rank."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import copies_of
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.moe.aux_loss import collect
from meshkit.parallel.context import ChosenBlocks, Shape, block_traffic, watching_choices
from meshkit.parallel.expert import dispatch_traffic
from meshkit.parallel.pipeline._channels import open_channels
from meshkit.preflight.explain import Message, explain
from meshkit.preflight.order import EAGER, LAZY, Event, HostWait, Wait, deadlock, mismatches, recording
from meshkit.strategy import ExpertPolicy, Strategy
from tests.compare_shards import difference, same_bits
from tests.laws.gate.cell import MIXERS, ROUTED, SPARSE, Cell
from tests.laws.gate.models import build
from tests.laws.parity.cases import mesh_for, own_rows
from tests.laws.parity.test_bytes import Noting, by_ranks
from tests.parallel.context.sparse_oracle import SparseRows

ROWS, STEPS, MAX_NORM, LR = 5, 3, 0.5, 1e-2
TOL_FP64 = 1e-10  # only the order of summation differs
TOL_FP32 = 1e-5  # relative to values of order 1
FP32_RATIO = 2  # of the error of one device in fp32
TOL_THEIRS = 1e-6  # transformers computes its norms in fp32 whatever the dtype of the model
# Relative, of the loss before the first update, and of all gradients that are rounded to so many bits. Gradients at rounded
# parameters are bounded for int8 alone, since a softmax turns with few bits. What all of them are exactly, to 1e-10,
# tests/parallel/test_wires.py says.
WIRES = {"": 0.0, "int8": 0.1, "fp8": 0.25, "int4": 1.0}
AT_ROUNDED = {"": 0.0, "int8": 0.3, "fp8": float("inf"), "int4": float("inf")}
BF16_RATIO = 2.0  # at most twice the error of one bf16 device


@dataclass(frozen=True)
class Verdict:
    """What one rank says of a cell.

    broken: by law, what did not hold. refused: why the plan was refused. events: its calls in order, which `order` judges.
    """

    refused: str = ""
    broken: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Alone:
    """A plain loop on one device."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def tokens_of(cell: Cell) -> int:
    """Of a row; with sequence=True tp must divide them, but with cp, which fills its ranks up."""
    specs = [cell.spec, *([mk.mesh.MeshSpec.parse(cell.resume)] if cell.resume else [])]
    if cell.sizes == "uneven" and cell.spec.cp > 1 and (not cell.sequence or all(each.cp > 1 for each in specs)):
        return 13
    return 18 if cell.spec.world_size % 3 == 0 else 16


def batches(cell: Cell, tokens: int | None = None) -> list[dict[str, Tensor]]:
    """The global batch of each step: every row different, some labels ignored, documents of uneven length."""
    generator = torch.Generator().manual_seed(11)
    vocabulary, tokens = 61 if cell.sizes == "uneven" else 64, tokens or tokens_of(cell)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, vocabulary, (ROWS, tokens + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        if cell.masked:
            labels[: ROWS // 2] = -100
        batch = {"input_ids": ids[:, :-1], "labels": labels}
        if cell.packing:
            starts = torch.rand(ROWS, tokens, generator=generator) < 0.2
            starts[:, 0] = True
            index = torch.arange(tokens).expand(ROWS, tokens)
            batch["position_ids"] = index - torch.where(starts, index, 0).cummax(-1).values
        made.append(batch)
    return made


@cache
def alone(
    model: str,
    sizes: str,
    precision: str,
    layers: int,
    packing: bool,
    masked: bool,
    ranks: int,
    tokens: int,
    sparse: str = "",
) -> Alone:
    """The oracle: no mesh, no policy, torch's own optimizer and clipping. ranks, tokens: of the cell and of its rows."""
    cell = Cell(model=model, mesh=f"dp_shard={ranks}", sizes=sizes, precision=precision, packing=packing, masked=masked)
    module, _ = build(_WithLayers(**vars(cell), count=layers))
    if precision == "bf16":
        module = module.to(torch.bfloat16)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=(0.9, 0.95))
    losses, norms, gradients = [], [], {}
    for batch in batches(cell, tokens):
        extra: dict[str, object] = {"position_ids": batch["position_ids"]} if packing else {}
        if sparse:
            every = batch.get("position_ids", torch.arange(tokens).expand(ROWS, -1))
            masks = tuple(mk.Mask.from_positions(row.unsqueeze(0)) for row in every)
            extra["mask"] = SparseRows(masks, SPARSE[sparse])
        with collect() as found:
            output = module(batch["input_ids"], **extra)
        logits = getattr(output, "logits", output)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        (loss + found.total() / (batch["labels"] != -100).sum()).backward()
        gradients = gradients or {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(trained, MAX_NORM)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        for router, counts in found.counts.items():
            if router.last_counts is not None:
                router.last_counts.copy_(counts)
    return Alone(losses, norms, gradients, {n: p.detach() for n, p in module.named_parameters()})


@dataclass(frozen=True, kw_only=True)
class _WithLayers(Cell):
    count: int = 2

    @property
    def layers(self) -> int:
        return self.count


def _resumed(cell: Cell) -> Cell:
    """The cell as it goes on: the same model on another mesh."""
    if cell.resume == cell.mesh:
        return cell
    told = {**vars(cell), "mesh": cell.resume, "schedule": "1f1b", "resume": "", "row": cell.resume_row}
    return _WithLayers(**told, count=cell.layers)


def memory_of(cell: Cell) -> mk.MemoryPolicy:
    recompute = cell.recompute
    rows = -(-ROWS // (mesh_for(cell.mesh).data_ranks * cell.microbatches))
    return mk.MemoryPolicy(
        # CUDA's attention in fp64 is made of products, which need more while they run.
        recompute=mk.strategy.Budget(
            bytes=500_000 if mesh_for(cell.mesh).device.type == "cuda" or cell.model in MIXERS else 400_000,
            rows=rows,
            seq_len=tokens_of(cell),
        )
        if recompute == "budget"
        else recompute,  # type: ignore[arg-type]
        offload=None if cell.offload == "none" else mk.strategy.ActivationOffload(to=cell.offload, min_bytes=1),  # type: ignore[arg-type]
        regather=cell.regather and cell.sequence,
        mlp_chunks=cell.mlp_chunks,
        loss=mk.strategy.ChunkedLoss(tokens=5) if cell.loss == "chunked" else None,
        precision=mk.strategy.Precision() if cell.precision == "bf16" else None,
        optimizer=mk.strategy.OptimizerPolicy(
            offload=mk.strategy.OptimizerOffload() if cell.optimizer == "host" else None
        ),
    )


def strategy_of(cell: Cell, plan: mk.Plan | None, experts: ExpertPolicy | None = None) -> Strategy:
    return Strategy(
        plan=plan,
        memory=memory_of(cell),
        zero=None if mesh_for(cell.mesh).spec.pp > 1 or cell.row else cell.zero,
        sequence=cell.sequence,
        context=mk.strategy.ContextPolicy(
            scheme=cell.context,  # type: ignore[arg-type]
            groups=cell.groups,  # type: ignore[arg-type]
            sparse=SPARSE.get(cell.sparse),
            node=cell.node,
        ),
        experts=experts or ExpertPolicy(),
        pipeline=mk.strategy.PipelinePolicy(schedule=cell.schedule),
        microbatches=cell.microbatches,
        data=mk.strategy.DataPolicy(
            gather=cell.gather or None,  # type: ignore[arg-type]
            reduce=cell.reduce or None,  # type: ignore[arg-type]
            feedback=cell.feedback,
            **dict(zip(("parameters", "gradients", "states"), cell.row, strict=False)),  # type: ignore[arg-type]
        ),
    )


def start(cell: Cell, noted: list[Noting] | None = None) -> mk.Run:
    """noted: gets what notes the way to the experts."""
    model, plan = build(cell)
    mesh = mesh_for(cell.mesh)

    def note(experts: int, axes: DeviceMesh) -> Noting:
        assert noted is not None
        noted.append(Noting.on(experts, axes))
        return noted[-1]

    folded = cell.model in ROUTED and mesh.spec.ep * mesh.spec.etp > 1
    if folded and cell.max_rows is not None:  # what is sent is known, whatever tokens choose
        experts = ExpertPolicy(max_rows=cell.max_rows)
    else:
        experts = ExpertPolicy(dispatcher=note if folded and noted is not None else None)
    return mk.parallelize(model, mesh, strategy_of(cell, plan, experts))


def refused_by_explain(cell: Cell) -> str:
    """The text, or nothing where `explain` accepts the cell."""
    model, plan = build(cell)
    mesh = mesh_for(cell.mesh)
    try:
        device = "cuda" if mesh.device.type == "cuda" else "cpu"
        explain(model, mesh.spec, strategy_of(cell, plan), rows=1, seq_len=tokens_of(cell), device=device)
    except mk.MeshkitError as error:
        return str(error)
    return ""


def judge(cell: Cell, folder: str) -> Verdict:
    """On every rank: train three steps, the last of them resumed on another mesh where the cell says so."""
    open_channels.cache_clear()  # so that they are opened among what is recorded
    mesh = mesh_for(cell.mesh)
    expected, exact = _oracles(cell)
    with recording(mesh) as events:
        said = _judge(cell, expected, exact, folder)
    return said if said.refused else replace(said, events=events)


def _oracles(cell: Cell) -> tuple[Alone, Alone]:
    """One device in the cell's precision and in fp64. The first rank computes them for all."""
    told: list[tuple[Alone, Alone] | None] = [None]
    if dist.get_rank() == 0 and not cell.refusals():
        kind = (cell.layers, cell.packing, cell.masked, cell.spec.world_size, tokens_of(cell), cell.sparse)
        told = [(alone(cell.model, cell.sizes, cell.precision, *kind), alone(cell.model, cell.sizes, "fp64", *kind))]
    dist.broadcast_object_list(told, src=0)
    return told[0] or (Alone([], [], {}, {}),) * 2


def _judge(cell: Cell, expected: Alone, exact: Alone, folder: str) -> Verdict:
    noted: list[Noting] = []
    tried, other = cell, None
    try:
        run = start(cell, noted)
        if cell.resume:
            tried = _resumed(cell)
            other = start(tried)
    except mk.MeshkitError as error:
        said = refused_by_explain(tried)
        same = {} if said == str(error) else {"refusal": f"parallelize says {error}, explain {said or 'nothing'}"}
        return Verdict(refused=str(error), broken=same)
    return Verdict(broken=_train(cell, run, other, expected, exact, noted, folder))


def _train(
    cell: Cell, run: mk.Run, other: mk.Run | None, expected: Alone, exact: Alone, noted: list[Noting], folder: str
) -> dict[str, str]:
    """other: what goes on before the last step. expected: one device in the cell's precision; exact: in fp64."""
    broken: dict[str, str] = {}
    optimizer = mk.adamw(run, lr=LR)
    broken |= _names(run)
    for step, batch in enumerate(batches(cell)):
        if other is not None and step == STEPS - 1:
            run, optimizer = _resume(run, optimizer, other, folder)
        local = own_rows(batch, run.mesh)
        observing = mk.observe(run.mesh) if step == 0 else nullcontext(Counter[Message]())
        with observing as seen, watching_choices() as choices:
            loss = float(run.forward_backward(local, microbatches=cell.microbatches))
            norm = float(mk.step.grad_norm(run))
        if step == 0:
            broken |= _bytes(cell, run, noted, choices, local, seen)
            broken |= _gradients(cell, run, expected, exact)
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        broken |= _numbers(cell, step, loss, norm, expected, exact)
    if cell.precision == "fp64" and cell.model != "transformers" and not (cell.gather or cell.reduce):
        broken |= _parameters(run, expected)
    return broken | _first_values(cell, run)


# ------------------------------------------------------------------------------------------------------- the laws, one each


def _numbers(cell: Cell, step: int, loss: float, norm: float, expected: Alone, exact: Alone) -> dict[str, str]:
    """Laws 1 and 3: the loss and the norm of the whole step, however it is split."""
    found: dict[str, str] = {}
    if cell.gather or (cell.reduce and step):
        rounding = float("inf") if step else WIRES[cell.gather]
        close = abs(loss - exact.losses[step]) <= rounding * abs(exact.losses[step])
        return found if close else {f"parity of the loss of step {step}": f"{loss!r}, exactly {exact.losses[step]!r}"}
    for what, value, wanted, truth in (
        ("loss", loss, expected.losses[step], exact.losses[step]),
        ("norm", norm, expected.norms[step], exact.norms[step]),
    ):
        tolerance = _tolerance(cell)
        if cell.reduce and what == "norm":
            tolerance = WIRES[cell.reduce]
        elif step and cell.model == "transformers":
            tolerance = 1e-4  # after Adam has amplified what its norms lose
        if cell.precision == "bf16":
            if step:
                continue
            tolerance, wanted = max(BF16_RATIO * abs(wanted - truth), 0.02 * abs(truth)), truth
        elif cell.precision == "fp32" and step:
            # After Adam two experts may score alike to rounding for a token, which then chooses the other: 0.6 % of the norm
            # was seen. What that hides, the cells in fp64 show.
            tolerance = 2e-2 if cell.model in ROUTED else 1e-3
        if not abs(value - wanted) <= tolerance * max(1.0, abs(wanted)):
            found[f"parity of the {what} of step {step}"] = f"{value!r}, one device {wanted!r}"
    return found


def _gradients(cell: Cell, run: mk.Run, expected: Alone, exact: Alone) -> dict[str, str]:
    """Law 1: every gradient."""
    copies = copies_of(run.model)
    if cell.gather or cell.reduce:
        return _rounded_gradients(cell, run, exact)
    errors, total, allowed = {}, 0.0, 0.0
    for name, param in run.named_parameters():
        if not param.requires_grad:
            continue
        key = copies.get(name, name)
        grad = gradient_of(param)
        if grad is None:
            errors[name] = float("inf")
            continue
        if cell.precision == "bf16":
            whole, truth = full_tensor(grad).cpu().double(), exact.gradients[key]
            total += float((whole - truth).norm() / truth.norm())
            allowed += float((expected.gradients[key].double() - truth).norm() / truth.norm())
        else:
            errors[name] = difference(grad, expected.gradients[key].double())
    if cell.precision == "bf16" and not total <= BF16_RATIO * allowed:
        return {"parity of gradients": f"{total / allowed:.2f} of the error of one bf16 device"}
    worst = max(errors, key=errors.__getitem__, default=None)
    tolerance = _tolerance(cell)
    if cell.precision == "fp32":
        largest = max(1.0, max(float(grad.abs().max()) for grad in expected.gradients.values()))
        # What one device rounds in fp32 may be more, as through the exponentials of a recurrent mixer.
        rounded = max(
            float((grad.double() - exact.gradients[name]).abs().max()) for name, grad in expected.gradients.items()
        )
        tolerance = max(tolerance * largest, FP32_RATIO * rounded)
    if worst is not None and not errors[worst] <= tolerance:
        return {"parity of gradients": f"{worst} differs by {errors[worst]:.3g}"}
    return {}


def _rounded_gradients(cell: Cell, run: mk.Run, exact: Alone) -> dict[str, str]:
    """Of the parameters of this rank together. With rounded routers a token may choose other experts."""
    copies, error, size = copies_of(run.model), 0.0, 0.0
    for name, param in run.named_parameters():
        if param.requires_grad:
            grad, truth = gradient_of(param), exact.gradients[copies.get(name, name)]
            if grad is None:
                return {"parity of gradients": f"{name} has none"}
            error += float((full_tensor(grad).cpu().double() - truth).square().sum())
            size += float(truth.square().sum())
    allowed = AT_ROUNDED[cell.gather] + WIRES[cell.reduce] + (0.1 if cell.precision == "bf16" else 1e-5)
    if (cell.gather and cell.model in ROUTED) or error**0.5 <= allowed * max(size, 1e-12) ** 0.5:
        return {}
    return {"parity of gradients": f"differ by {(error / size) ** 0.5:.3g} of their norm, {allowed:.3g} is allowed"}


def _parameters(run: mk.Run, expected: Alone) -> dict[str, str]:
    """Law 1, and law 5 where the run was resumed: the values after three steps."""
    copies = copies_of(run.model)
    errors = {
        name: difference(param, expected.parameters[copies.get(name, name)]) for name, param in run.named_parameters()
    }
    worst = max(errors, key=errors.__getitem__)
    return {} if errors[worst] <= TOL_FP64 else {"parity of parameters": f"{worst} differs by {errors[worst]:.3g}"}


def _names(run: mk.Run) -> dict[str, str]:
    """Law 2: this rank's names are names of the model on one device."""
    known = {name for name, _ in run.full_model.named_parameters(remove_duplicate=False)}
    copies = copies_of(run.model)
    strange = [name for name, _ in run.named_parameters() if copies.get(name, name) not in known]
    return {"names": f"{strange[0]} is no name of one device"} if strange else {}


def order(ranks: list[list[Event]]) -> dict[str, str]:
    """Law 9, of all ranks at once: their calls end under NCCL's rules, whether hosts wait for values or not."""
    if found := mismatches(ranks):
        return {"order": found[0]}
    freely = [_without_host_waits(events) for events in ranks]
    for rules, each in product((LAZY, EAGER), (ranks, freely)):
        if circle := deadlock(each, rules):
            return {f"order, {rules.name}": "; ".join(circle)}
    return {}


def _without_host_waits(events: list[Event]) -> list[Event]:
    places, kept = {}, list[Event]()
    for index, event in enumerate(events):
        if isinstance(event, HostWait):
            continue
        places[index] = len(kept)
        kept.append(Wait(places[event.of]) if isinstance(event, Wait) else event)
    return kept


def _first_values(cell: Cell, run: mk.Run) -> dict[str, str]:
    """Law 4: first values depend on the seed and the name alone; in fp64 on the kind of device too, by a rounding."""
    one, _ = build(cell)
    one.to(run.mesh.device)
    mk.init_weights(one, seed=5)
    mk.init_weights(run.model, seed=5)
    wanted, copies = dict(one.named_parameters()), copies_of(run.model)
    for name, param in run.named_parameters():
        if not same_bits(param, wanted[copies.get(name, name)]):
            return {"initialisation": f"{name} differs from one device"}
    return {}


def _resume(
    run: mk.Run, optimizer: torch.optim.Optimizer, other: mk.Run, folder: str
) -> tuple[mk.Run, torch.optim.Optimizer]:
    """Law 5: saved here, and loaded there into other values."""
    with mk.Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(STEPS - 1, run, optimizer)
    for param in other.parameters():
        local_tensor(param).mul_(0.5)
    then = mk.adamw(other, lr=LR)
    with mk.Checkpointer(folder, asynchronous=False) as checkpointer:
        assert checkpointer.resume(other, then) == STEPS - 1
    if run.mesh.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return other, then


def _bytes(
    cell: Cell,
    run: mk.Run,
    noted: list[Noting],
    choices: list[ChosenBlocks],
    local: dict[str, Tensor],
    seen: Counter[Message],
) -> dict[str, str]:
    """Law 7: what was sent is what `explain` says; what went to experts is what it says of the routing that there was, and
    what keys went to other ranks what it says of the blocks that were chosen."""
    mesh = run.mesh
    rows = local["labels"].shape[0]
    masks = [mk.Mask.from_positions(row.unsqueeze(0)) for row in local["position_ids"]] if cell.packing else None
    said = explain(
        run,
        rows=rows,
        seq_len=tokens_of(cell),
        microbatches=cell.microbatches,
        mask=masks,
        coordinate={axis: mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "cp", "tp")},
    ).messages
    if mesh.rank == 0:  # resolved once more: what parallelize accepts, explain accepts, and says the same
        again = explain(
            run.full_model,
            mesh.spec,
            run.strategy,
            rows=rows,
            seq_len=tokens_of(cell),
            microbatches=cell.microbatches,
            mask=masks,
        ).messages
        if again != said:
            return {"bytes": f"of the run {dict(said - again)}, of its full model {dict(again - said)}"}
    if noted:
        dispatch = {m for m in said if m.axis in ("ep", "etp", "ep_etp") and m.op != "all_reduce"}
        said = Counter({m: times for m, times in said.items() if m not in dispatch}) + _to_experts(cell, noted)
    if cell.sparse:
        blocks = {m for m in said if m.axis == "cp" and m.op == "send"}
        said = Counter({m: times for m, times in said.items() if m not in blocks}) + _of_blocks(choices, run)
    sent, told = (by_ranks(messages, mesh.spec, mesh.rank) for messages in (seen, said))
    return {} if sent == told else {"bytes": f"sent {dict(sent - told)}, explained {dict(told - sent)}"}


def _to_experts(cell: Cell, noted: list[Noting]) -> Counter[Message]:
    """Of the first step. A forward that runs again sends again, and has one backward with the first."""
    found: Counter[Message] = Counter()
    again = 2 if cell.recompute in ("full", "selective") else 1
    itemsize = {"fp64": 8, "fp32": 4, "bf16": 2}[cell.precision]
    for plan in (plan for dispatcher in noted for plan in dispatcher.plans):
        told = dispatch_traffic(
            plan, width=36 if cell.model == "moe" and cell.sizes == "uneven" else 32, itemsize=itemsize
        )
        for (axis, op, size), times in told.counts.items():
            found[Message(axis, op, size)] += times
        for (axis, op, size), times in told.rows.items():
            found[Message(axis, op, size)] += times + times / again  # type: ignore[assignment]  # whole in the end
    return found


def _of_blocks(choices: list[ChosenBlocks], run: mk.Run) -> Counter[Message]:
    found: Counter[Message] = Counter()
    for call in choices:
        _, rows, kv_heads, _ = call.needed.shape
        head_dim = max(run.full_model.config.head_dim, getattr(run.full_model.config, "v_head_dim", 0))
        shape = Shape(heads=1, kv_heads=kv_heads, head_dim=head_dim, rows=rows, itemsize=8, sum_itemsize=8)
        sent = block_traffic(call.layout, call.rank, shape, call.needed)[call.backward]
        for (op, size), times in sent.items():
            found[Message("cp", op, size)] += times
    return found


def _tolerance(cell: Cell) -> float:
    if cell.precision == "fp64":
        return TOL_THEIRS if cell.model == "transformers" else TOL_FP64
    return TOL_FP32
