"""A microbatch that runs again: what one rank computes wrongly is named by rank and module, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core._torch import is_fake
from meshkit.core.collectives import seeing_what_is_sent
from meshkit.core.sharding import local_tensor
from meshkit.errors import CorruptionError, MeshkitError
from meshkit.faults import CorruptionGuard
from tests.depth import DEEP
from tests.faults.test_corruption import on_host, state_of
from tests.laws.parity.cases import Cell, Moe, batches, build, memory_of, mesh_for, own_rows, plan_of, start
from tests.planted import of_the_machine
from tests.world import pool

STRUCK = 24 if DEEP else 3  # wrong numbers of each mesh

MESHES = [
    Cell(mesh="dp_shard=2", microbatches=2, recompute="full"),
    Cell(mesh="dp_replicate=2", tied=True, vocab=61, zero=1, microbatches=3),
    Cell(mesh="tp=2", sequence=True, recompute="selective"),
    Cell(mesh="cp=2", documents=True),
    Cell(mesh="pp=2", tied=True, microbatches=3, zero=1),
    Cell(mesh="pp=2", layers=4, microbatches=2, schedule="zbv", zero=1),
    Cell(mesh="dp_shard=2 ep=2", layers=3, moe=Moe(balance=0.1)),
    Cell(mesh="dp_shard=2 tp=2", zero=2, microbatches=2),
    Cell(mesh="pp=2 dp_shard=2", microbatches=2, zero=1),
]


KINDS = {
    "forward": "was given by",  # what a module computes
    "backward": "came back to",  # the gradient of what it gave
    "weight": "was the gradient of",  # before ranks add it up
    "sent": "was sent by",  # a summand of an all-reduce or reduce-scatter, or a part of a gather
}


def wrong(tensor: Tensor, at: float) -> None:
    """One number of it is computed wrongly: the lowest bit of its exponent."""
    words = local_tensor(tensor).view({4: torch.int32, 8: torch.int64}[tensor.element_size()])
    place = np.unravel_index(int(at * words.numel()), words.shape)
    words[place] ^= 1 << (52 if tensor.element_size() == 8 else 23)


DONE = "", ""


class Core:
    """Computes wrongly once, in one module, when told."""

    def __init__(self, run: mk.Run) -> None:
        self.run, self.armed, self.at = run, DONE, 0.0  # (module, kind)
        self.active, self.second, self.hooked = -1, False, dict[int, Tensor]()
        self.modules = {
            name: module
            for name, module in run.model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding)
            and any(local_tensor(p).numel() for p in module.parameters())
        }
        self.handles = ExitStack()
        # All before those of a guard, which come and go with a step, and after FSDP's, which puts the gathered parameter
        # where its shard was: a hook on the shard gets no gradient.
        run.model.register_forward_pre_hook(lambda *_: [self._enter(*each) for each in self.modules.items()] and None)
        for name, module in self.modules.items():
            module.register_forward_pre_hook(of_the_machine(partial(self._enter, name)))
            module.register_forward_hook(of_the_machine(partial(self._leave, name)))

    def aim(self, name: str, kind: str, at: float, microbatch: int) -> None:
        self.armed, self.at, self.microbatch, self.inner = (name, kind), at, microbatch, self.run.watcher
        self.run.watcher = self
        self.handles.enter_context(seeing_what_is_sent(self._sent))  # before a guard does

    def disarm(self) -> None:
        self.handles.close()
        self.hooked.clear()

    # A StepWatch that tells when it is the microbatch's turn.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @contextmanager
    def around(self, microbatch: int, place: int) -> Iterator[None]:
        with self.inner.around(microbatch, place):
            self.active = -1 if self.second else microbatch
            yield
            self.active = -1

    @contextmanager
    def again(self) -> Iterator[None]:
        self.second = True
        with self.inner.again():
            yield
        self.second = False

    def _now(self, name: str, kind: str) -> bool:
        now = self.armed == (name, kind) and self.active == self.microbatch
        self.armed = DONE if now else self.armed
        return now

    def _enter(self, name: str, module: Any, *_: Any) -> None:
        weight = module._parameters["weight"]
        if self.armed == (name, "weight") and id(weight) not in self.hooked:
            self.hooked[id(weight)] = weight
            self.handles.callback(weight.register_hook(partial(self._gradient, name)).remove)

    def _gradient(self, name: str, grad: Tensor) -> None:
        if self._now(name, "weight"):
            wrong(grad, self.at)

    def _leave(self, name: str, module: Any, args: Any, out: Tensor) -> Any:
        if self._now(name, "forward"):
            out = out.clone()
            with torch.no_grad():
                wrong(out, self.at)
        elif out.requires_grad:
            out.register_hook(partial(self._back, name))
        return out

    def _back(self, name: str, grad: Tensor) -> Any:
        if not self._now(name, "backward"):
            return None
        grad = grad.clone()
        wrong(grad, self.at)
        return grad

    def _sent(self, tensor: Tensor) -> None:
        if self._now("", "sent"):
            wrong(tensor, self.at)


@dataclass(frozen=True)
class Struck:
    module: str
    rank: int
    ranks: tuple[int, ...]
    text: str


def struck(cell: Cell, kind: str, count: int) -> list[Struck]:
    """On every rank: replayed steps in which one module of one rank computes wrongly once."""
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-3)
    rows = own_rows(batches(cell)[0], run.mesh)
    drawn, made, core = random.Random(f"{cell.mesh} {cell.schedule} {kind}"), [], Core(run)
    run.forward_backward(rows, microbatches=cell.microbatches)
    optimizer.step()
    for turn in range(count):
        rank, which, at = drawn.randrange(run.mesh.spec.world_size), drawn.random(), drawn.random()
        name, text, ranks = "", "", ()
        good = [local_tensor(tensor).clone() for _, tensor in state_of(cell, run, optimizer)]
        with CorruptionGuard(run, optimizer, every_steps=10, replay_every=1, seed=turn) as guard:
            optimizer.zero_grad()
            if rank == run.mesh.rank:
                # The ends of the model are units of their own, and where weights are tied.
                name = [*core.modules][[-1, 0][turn] if turn < 2 else int(which * len(core.modules))]
                microbatch = random.Random(f"{turn} 1").randrange(cell.microbatches)
                core.aim("" if kind == "sent" else name, kind, at, microbatch)
            run.forward_backward(rows, microbatches=cell.microbatches)
            core.disarm()
            assert core.armed == DONE, (core.armed, "was not called")
            mk.clip_grad_norm(run, 1.0)
            optimizer.step()
            try:
                guard.check(1)
            except CorruptionError as error:
                text, ranks = str(error), error.ranks
        made.append(Struck(name, rank, ranks, text))
        for (_, tensor), values in zip(state_of(cell, run, optimizer), good, strict=True):
            local_tensor(tensor).copy_(values)
    return made


CASES = [(cell, kind) for cell in MESHES for kind in KINDS if kind != "sent" or "tp" in cell.mesh]


@pytest.mark.parametrize(("cell", "kind"), CASES, ids=lambda each: getattr(each, "mesh", each))
def test_a_number_that_one_rank_computes_wrongly_is_named_by_rank_and_module(cell: Cell, kind: str) -> None:
    of_ranks = pool(mk.MeshSpec.parse(cell.mesh).world_size).run(struck, cell, kind, STRUCK, timeout_s=240.0)
    for each in zip(*of_ranks, strict=True):
        (made,) = [one for one in each if one.module]
        assert len({one.text for one in each}) == 1
        assert made.ranks == (made.rank,), each
        what = "" if kind == "sent" else made.module
        if kind == "weight" and cell.tied and what == "lm_head":
            what = "embed_tokens"  # one tensor
        assert f"another number {KINDS[kind]} {what}" in made.text, each
        assert f" on rank {made.rank} when a microbatch ran again" in made.text, each


def start_adapters(cell: Cell) -> mk.Run:
    """With dropout, whose masks depend on the step."""
    model = build(cell)
    plan = mk.lora.attach(model, plan_of(cell), rank=3, dropout=0.3, seed=4)
    zero = None if "pp" in cell.mesh else cell.zero
    return mk.parallelize(
        model, mesh_for(cell.mesh), plan=plan, memory=memory_of(cell), zero=zero, sequence=cell.sequence
    )


def trained(cell: Cell, replay_every: int, dropout: float = 0.0, adapters: bool = False) -> list[Tensor]:
    """Losses, norms, weights, moments and buffers after three steps."""
    run = (start_adapters if adapters else start)(cell)
    optimizer = mk.adamw(run, lr=1e-2)
    rows = [own_rows(batch, run.mesh) for batch in batches(cell)]
    torch.manual_seed(5)
    losses = []
    drop = (lambda module, args, out: F.dropout(out, dropout)) if dropout else None
    if drop is not None:
        for name, module in run.model.named_modules():
            if name.endswith("norm"):
                module.register_forward_hook(of_the_machine(drop))
    with CorruptionGuard(run, optimizer, every_steps=1, replay_every=replay_every) as guard:
        for step, batch in enumerate(rows, start=1):
            losses.append(run.forward_backward(batch, microbatches=cell.microbatches, step=step))
            losses.append(mk.clip_grad_norm(run, 0.5))
            optimizer.step()
            optimizer.zero_grad()
            run.balance_experts(speed=0.05)
            guard.check(step)
            assert guard._replay.has_run is False
        assert guard._replay._steps == 3
    state = [tensor for _, tensor in state_of(cell, run, optimizer)] + [*run.model.buffers()]
    copies = [local_tensor(each).clone() for each in state if not is_fake(each) and each.device.type != "meta"]
    return [*losses, *copies, torch.rand(3)]


CALM = [
    *MESHES,
    Cell(mesh="dp_shard=2", microbatches=7),  # some without rows
    Cell(mesh="dp_shard=2", layers=3, moe=Moe(bias=True, balance=0.1), microbatches=1),
    Cell(mesh="cp=2 tp=2", sequence=True),
    Cell(mesh="dp_shard=2", dtype="float32", memory=mk.MemoryPolicy(precision=mk.strategy.Precision())),
]


@pytest.mark.parametrize("cell", CALM, ids=lambda cell: f"{cell.mesh} {cell.schedule} {cell.dtype} {cell.microbatches}")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_replay_leaves_no_trace_and_finds_nothing_where_nothing_is_wrong(cell: Cell, dropout: float) -> None:
    if dropout and "tp" in cell.mesh:
        pytest.skip("a hook of tp's ranks draws masks of its own on each")
    leaves_no_trace(cell, dropout)


def leaves_no_trace(cell: Cell, *more: Any) -> None:
    ranks = pool(mk.MeshSpec.parse(cell.mesh).world_size)
    without, with_replays = (ranks.run(trained, cell, every, *more) for every in (0, 1))
    for mine, again in zip(without, with_replays, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, again, strict=True))


def kept(**policy: Any) -> mk.MemoryPolicy:
    return mk.MemoryPolicy(**policy)


FP8 = mk.strategy.Precision(fp8=mk.strategy.Fp8(emulate=True))
MOVED = mk.strategy.ActivationOffload(min_bytes=1, keep_last=0)
DISK = mk.strategy.ActivationOffload(to="disk", min_bytes=1, keep_last=0)
CHUNKS = mk.strategy.ChunkedLoss(tokens=5)
CHOICES = [
    Cell(mesh="dp_shard=2", dtype="float32", memory=kept(recompute="full", precision=FP8), hidden_mlp=64),
    Cell(mesh="dp_shard=2", memory=kept(offload=MOVED), microbatches=2, layers=3),
    Cell(mesh="tp=2 dp_shard=2", sequence=True, memory=kept(loss=CHUNKS), microbatches=2, vocab=61),
    Cell(mesh="cp=2", documents=True, context=mk.strategy.ContextPolicy(scheme="ulysses")),
    Cell(mesh="dp_shard=2 tp=2 etp=2", layers=3, moe=Moe(balance=0.1, shared=24), recompute="full"),
    Cell(mesh="dp_shard=2 ep=2", layers=3, moe=Moe(balance=0.1), copies=1, microbatches=2),
]
MORE_CHOICES = [
    Cell(mesh="tp=2", sequence=True, dtype="float32", memory=kept(precision=FP8), hidden_mlp=64),
    Cell(mesh="dp_replicate=2", memory=kept(offload=DISK), microbatches=2, layers=3),
    Cell(mesh="pp=2", zero=1, memory=kept(recompute="full", offload=MOVED), microbatches=3, layers=4),
    Cell(mesh="tp=2", sequence=True, memory=kept(recompute="activation", regather=True, mlp_chunks=2)),
    Cell(mesh="cp=2", context=mk.strategy.ContextPolicy(scheme="all_gather"), recompute="full"),
    Cell(mesh="cp=2", documents=True, context=mk.strategy.ContextPolicy(scheme="group_cast"), microbatches=2),
    Cell(mesh="dp_shard=4 ep=2 etp=2", layers=3, moe=Moe(balance=0.1, bias=True, z=0.01), microbatches=2),
    Cell(mesh="tp=4 etp=2 ep=2", heads=(4, 4), moe=Moe(balance=0.1)),
    Cell(mesh="pp=2 dp_shard=2 ep=2", layers=4, zero=1, moe=Moe(balance=0.1, bias=True), microbatches=3),
    Cell(mesh="pp=2", zero=1, layers=4, microbatches=4, schedule="zb-h1"),
    Cell(mesh="pp=2", zero=1, layers=4, microbatches=4, schedule="interleaved"),
    Cell(mesh="pp=2 cp=2", zero=1, documents=True, microbatches=2),
    Cell(mesh="", microbatches=2),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, qwen=True, window=5, microbatches=2),
]


@pytest.mark.parametrize(
    "cell", CHOICES + (MORE_CHOICES if DEEP else []), ids=lambda cell: f"{cell.mesh} {cell.schedule}"
)
def test_a_replay_finds_nothing_under_choices_of_memory_context_and_experts(cell: Cell) -> None:
    leaves_no_trace(cell)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(mesh="dp_shard=2", microbatches=3),
        Cell(mesh="tp=2", sequence=True, recompute="full"),
        Cell(mesh="pp=2", zero=1, microbatches=3, recompute="full"),
        Cell(mesh="cp=2", documents=True),
    ],
    ids=lambda cell: cell.mesh,
)
def test_a_replay_draws_the_masks_of_dropout_on_adapters_again(cell: Cell) -> None:
    leaves_no_trace(cell, 0.0, True)


def refusals() -> list[str]:
    said = []
    for cell in (Cell(mesh="dp_shard=2", compile="eager"), Cell(mesh="dp_shard=2", dtype="float32", memory=on_host())):
        run = start(cell)
        optimizer = mk.adamw(run, lr=1e-3)
        with pytest.raises(MeshkitError) as error:
            CorruptionGuard(run, optimizer, replay_every=1)
        said.append(str(error.value))
    return said


def test_what_cannot_be_replayed_is_refused() -> None:
    compiled, on_host = pool(2).run(refusals)[0]
    assert "compiled blocks run no hooks" in compiled
    assert "an optimizer on the host takes gradients during backward" in on_host
