"""What goes on through a move, and what does not stay: data, schedules, groups, memory, frozen parameters and modes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.model_state import model_tensors
from meshkit.core.sharding import local_tensor
from tests.checkpoint.training import Training, build
from tests.laws.parity.cases import own_rows
from tests.moving.cases import batch_of, differences, facts
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs


def travelled(specs: list[str]) -> tuple[list[float], list[float]]:
    """(losses of a run that moves before each spec, those of one that stays), by one loader and one schedule each."""
    training, stays = build("dp_shard=2"), build("dp_shard=2")
    optimizer, scheduler = training.optimizer, training.scheduler
    losses = training.train(2)
    for spec in specs:
        training.optimizer.zero_grad()
        training.run.move(mesh=spec, optimizer=training.optimizer, loader=training.loader)
        losses += training.train(2)
    assert training.optimizer is optimizer and scheduler.optimizer is optimizer
    return losses, stays.train(len(losses))


def test_the_data_and_the_schedule_go_on() -> None:
    for losses, stayed in pool(2).run(travelled, ["tp=2", "dp_replicate=2", "cp=2", "dp_shard=2"]):
        assert losses == pytest.approx(stayed, abs=TOL_FP64)


def to_and_fro(moves: int) -> tuple[list[int], list[bool]]:
    """(process groups after each move, whether the model before it is gone)"""
    training = build("dp_shard=2 tp=2")
    training.train(1)
    groups, gone = [], []
    for number in range(moves):
        training.optimizer.zero_grad()
        old = weakref.ref(training.run.model)
        moments = weakref.ref(next(iter(training.optimizer.state.values()))["exp_avg"])
        training.run.move(
            mesh=("tp=4", "dp_shard=2 tp=2")[number % 2], optimizer=training.optimizer, loader=training.loader
        )
        gc.collect()
        groups.append(len(distributed_c10d._world.pg_map))
        gone.append(old() is None and moments() is None)
        training.train(1)
    return groups, gone


def test_groups_are_bounded_and_old_models_are_freed() -> None:
    for groups, gone in pool(4).run(to_and_fro, 5):
        assert groups[1:] == groups[1:2] * 4
        assert all(gone)


def held_bytes(training: Training) -> int:
    tensors = [*model_tensors(training.run.model).values()]
    tensors += [value for state in training.optimizer.state.values() for value in state.values()]
    return sum(local_tensor(each).untyped_storage().nbytes() for each in tensors)


def peak(before: str, after: str) -> tuple[int, int, int, int]:
    """(bytes before, after, at most in between, of the largest tensor)"""
    import meshkit.moving._tensors as moving

    training = build(before, vocab_size=64, intermediate_size=48, num_hidden_layers=4, tie_word_embeddings=False)
    training.train(1)
    training.optimizer.zero_grad()
    start, most = held_bytes(training), 0
    live: list[weakref.ref[torch.UntypedStorage]] = []
    seen: dict[int, torch.UntypedStorage] = {}
    for tensor in [*training.run.parameters(), *(v for s in training.optimizer.state.values() for v in s.values())]:
        seen[id(tensor)] = local_tensor(tensor).untyped_storage()
    allocate, release = moving.allocate, moving.release

    def allocated(tensor: torch.Tensor) -> None:
        nonlocal most
        allocate(tensor)
        seen[len(seen) + 1] = local_tensor(tensor).untyped_storage()
        most = max(most, sum(each.nbytes() for each in seen.values()))

    moving.allocate = allocated
    move_tensors = moving.move_tensors
    small = 2048

    def in_small_batches(*args: object) -> object:
        return move_tensors(*args[:-1], small)  # type: ignore[arg-type]

    import meshkit.moving._optimizer as of_optimizer

    moving.move_tensors, of_optimizer.move_tensors = in_small_batches, in_small_batches  # type: ignore[assignment]
    try:
        training.run.move(mesh=after, optimizer=training.optimizer)
    finally:
        moving.allocate, moving.release = allocate, release
        moving.move_tensors = of_optimizer.move_tensors = move_tensors
    del live
    largest = max(local_tensor(each).numel() * each.element_size() for each in training.run.parameters())
    return start, held_bytes(training), most, max(largest, small)


def test_a_move_holds_the_larger_state_and_one_batch() -> None:
    for start, end, most, batch in pool(2).run(peak, "dp_shard=2", "tp=2"):
        assert most <= max(start, end) + 2 * batch
        assert most < 1.2 * max(start, end)


def frozen(folder: str) -> tuple[dict[str, tuple[str, str]], list[bool], list[bool]]:
    """What was frozen and put into evaluation after `parallelize` stays so; a checkpoint afterwards is loaded as any."""
    training = build("dp_shard=2", num_hidden_layers=2)
    training.train(1)
    training.optimizer.zero_grad()
    for param in training.run.model.layers[0].parameters():
        param.requires_grad_(False)
    training.run.model.layers[1].eval()
    training.run.move(mesh="pp=2", optimizer=training.optimizer, loader=training.loader)
    trained = {name.split(".")[1]: p.requires_grad for name, p in training.run.named_parameters() if "layers" in name}
    modes = [each.training for name, each in training.run.model.named_modules() if name == "layers.1"]
    training.train(1)
    with Checkpointer(folder, asynchronous=False) as saver:
        saver.save(2, training.run, training.optimizer, **training.holders)
    loaded = build("dp_shard=2", num_hidden_layers=2, seed=1)
    Checkpointer(folder).load(loaded.run, loaded.optimizer, **loaded.holders)
    training.optimizer.zero_grad()
    training.run.move(mesh="dp_shard=2", optimizer=training.optimizer, loader=training.loader)
    differs = differences(facts(training), facts(loaded))
    return {name: two for name, two in differs.items() if not name.endswith("trained")}, list(trained.values()), modes


def test_frozen_parameters_and_modes_stay(tmp_path: Path) -> None:
    results = pool(2).run(frozen, str(tmp_path))
    for differs, _, _ in results:
        assert not differs
    assert [trained for _, trained, _ in results] == [[False], [True]]
    assert all(modes == [False] for *_, modes in results)


def on_a_part() -> list[float]:
    """Two jobs on the halves of a world; one of them moves, and the other does not take part."""
    meshes = [mk.init_mesh("dp_shard=2", ranks=ranks) for ranks in (range(2), range(2, 4))]
    mesh = next(mesh for mesh in meshes if mesh.here)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)).double()
    run = mk.parallelize(model, mesh)
    optimizer = torch.optim.Adam(run.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(4):
        if step == 2 and dist.get_rank() < 2:
            run.move(mesh="dp_replicate=2", optimizer=optimizer)
        x = torch.arange(16.0, dtype=torch.float64).view(4, 4).sin().tensor_split(2)[run.mesh.data_rank]
        batch = {"x": x, "labels": torch.zeros(len(x), 1, dtype=torch.int64)}
        loss = run.forward_backward(
            batch, loss=lambda m, part: m(part["x"]).square().sum(), count=lambda part: torch.tensor(len(part["x"]))
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_a_run_on_a_part_of_the_world_moves_alone() -> None:
    results = pool(4).run(on_a_part)
    for losses in results:
        assert losses == pytest.approx(results[0], abs=TOL_FP64)


def few_bits(moves: bool) -> list[float]:
    """Adapters on a base of four bits (QLoRA)."""
    torch.manual_seed(0)
    config = tiny_config(vocab_size=64, hidden_size=32, intermediate_size=128, num_attention_heads=8, head_dim=4)
    model = mk.models.Llama(config)
    plan = mk.lora.attach(model, mk.models.LLAMA_PLAN, rank=4, base="nf4", base_block=16)
    run = mk.parallelize(model, mk.init_mesh("dp_shard=2"), plan=plan)
    optimizer = mk.adamw(run, lr=1e-2)
    losses = []
    for step in range(3):
        if step == 1 and moves:
            run.move(mesh="tp=2", optimizer=optimizer)
        losses.append(float(run.forward_backward(own_rows(batch_of(step), run.mesh), step=step)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_base_of_few_bits_moves() -> None:
    for moved, stayed in zip(pool(2).run(few_bits, True), pool(2).run(few_bits, False), strict=True):
        assert moved == pytest.approx(stayed, abs=1e-5)  # fp32: the order of summation
