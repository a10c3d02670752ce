"""Continuing equals never having stopped, on the same mesh bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshkit.checkpoint import Checkpointer, _save
from meshkit.core.sharding import full_tensor
from meshkit.optim import lr_schedule
from tests.checkpoint.training import SEQ_LEN, build, saved_run
from tests.depth import thin
from tests.world import pool


def straight_and_resumed(folder: str, spec: str, options: dict[str, Any]) -> tuple[Any, Any]:
    straight = build(spec, **options)
    losses = straight.train(10, noise=0.1)
    straight.evaluate()
    losses += straight.train(10, noise=0.1)

    first = build(spec, **options)
    resumed_losses = first.train(10, noise=0.1)
    first.evaluate()
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(10, first.run, first.optimizer, **first.holders)

    second = build(spec, seed=1, lr=0.5, **options)
    second.evaluate()
    assert Checkpointer(folder).resume(second.run, second.optimizer, **second.holders) == 10
    resumed_losses += second.train(10, noise=0.1)
    return (losses, straight.local_state()), (resumed_losses, second.local_state())


@pytest.mark.parametrize(
    ("ranks", "spec", "options"),
    thin(
        [
            (2, "dp_shard=2", {"zero": 1}),
            (1, "", {}),
            (4, "dp_replicate=2 tp=2", {"tie_word_embeddings": False, "zero": 2}),
            (4, "dp_shard=2 tp=2", {"sequence": False}),
        ],
        2,
    ),
)
def test_ten_steps_and_ten_resumed_equal_twenty_bit_for_bit(
    tmp_path: Path, ranks: int, spec: str, options: dict[str, Any]
) -> None:
    results = pool(ranks).run(straight_and_resumed, str(tmp_path), spec, options)
    assert all(straight == resumed for straight, resumed in results)


def saved_while_training(folder: str, spec: str) -> tuple[str, str, bool]:
    """(state at the save, state read back, whether training had moved on before anything was written)."""
    training = build(spec)
    training.train(2)
    at_save = training.local_state()
    gate = threading.Event()
    write_parts = _save.write_parts

    def write_later(*args: Any) -> Any:
        assert gate.wait(30)
        return write_parts(*args)

    with pytest.MonkeyPatch.context() as patch, Checkpointer(folder) as checkpointer:
        patch.setattr(_save, "write_parts", write_later)
        checkpointer.save(2, training.run, training.optimizer, **training.holders)
        training.train(2)
        moved_on = training.local_state() != at_save and checkpointer.steps() == []
        gate.set()
    fresh = build(spec, seed=1)
    Checkpointer(folder).load(fresh.run, fresh.optimizer, **fresh.holders)
    return at_save, fresh.local_state(), moved_on


@pytest.mark.parametrize(("ranks", "spec"), [(1, ""), (2, "tp=2")])
def test_steps_taken_while_a_checkpoint_is_written_do_not_reach_it(tmp_path: Path, ranks: int, spec: str) -> None:
    for at_save, read_back, moved_on in pool(ranks).run(saved_while_training, str(tmp_path), spec):
        assert moved_on
        assert read_back == at_save


def batches_of_two_worlds(folder: str, spec: str, load: bool) -> list[Tensor]:
    """ids of the global batches 3 and 4, on this rank's part of them, and its place."""
    training = build(spec)
    if load:
        Checkpointer(folder).load(training.run, training.optimizer, **training.holders)
    else:
        training.train(2)
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(2, training.run, training.optimizer, **training.holders)
    return [next(training.loader)["input_ids"] for _ in range(2)]


def test_data_goes_on_where_it_stopped_on_another_number_of_data_ranks(tmp_path: Path) -> None:
    [alone] = pool(1).run(batches_of_two_worlds, str(tmp_path), "", False)
    together = pool(4).run(batches_of_two_worlds, str(tmp_path), "dp_replicate=2 dp_shard=2", True)
    for step in range(2):
        assert torch.equal(torch.cat([batches[step] for batches in together]), alone[step])
        assert alone[step].shape[1] == SEQ_LEN


def model_alone(folder: str) -> tuple[bool, int]:
    """Load without an optimizer, after an evaluation that left the root unit gathered."""
    saved, fresh = build("dp_shard=2"), build("dp_shard=2", seed=1)
    Checkpointer(folder).load(saved.run, saved.optimizer, **saved.holders)
    ids = {"input_ids": torch.arange(SEQ_LEN)[None], "labels": torch.arange(SEQ_LEN)[None]}
    fresh.evaluate()
    Checkpointer(folder).load(fresh.run, None)
    return torch.equal(saved.run.evaluate(ids)[0], fresh.run.evaluate(ids)[0]), len(fresh.optimizer.state)


def test_without_an_optimizer_the_model_alone_is_loaded_and_the_next_forward_uses_it(tmp_path: Path) -> None:
    pool(2).run(saved_run, str(tmp_path), "dp_shard=2")
    assert pool(2).run(model_alone, str(tmp_path)) == [(True, 0)] * 2


def other_optimizers(folder: str, kind: str) -> bool:
    """Whether the state of an optimizer that is not AdamW comes back exactly."""
    optimizers = {
        "sgd": lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1), momentum=0.9),
        "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, foreach=False),
        "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    }
    trainings = [build("dp_shard=2", seed=seed) for seed in (0, 1)]
    for training in trainings:
        training.optimizer = optimizers[kind](training.run.parameters())
        training.scheduler = lr_schedule(training.optimizer, kind="linear", warmup_steps=3, total_steps=40)
    saved, fresh = trainings
    saved.train(2)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, saved.run, saved.optimizer, **saved.holders)
    fresh.train(1)  # its state exists, and is overwritten
    Checkpointer(folder).load(fresh.run, fresh.optimizer, **fresh.holders)
    pairs = zip(saved.run.parameters(), fresh.run.parameters(), strict=True)
    return all(
        full_tensor(value).equal(full_tensor(fresh.optimizer.state[new][key]))
        for old, new in pairs
        for key, value in saved.optimizer.state[old].items()
    ) and float(fresh.optimizer.param_groups[0]["lr"]) == float(saved.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", ["sgd", "amsgrad", "adagrad"])
def test_state_of_other_optimizers_comes_back(tmp_path: Path, kind: str) -> None:
    assert pool(2).run(other_optimizers, str(tmp_path), kind) == [True, True]
