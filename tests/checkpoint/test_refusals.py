"""What is refused is refused on every rank with the same words, before anything changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshkit.checkpoint import Checkpointer
from meshkit.data import Loader
from tests.checkpoint.training import ROWS, SEQ_LEN, Training, build, refusal, saved_run, tokens
from tests.world import pool


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of the tied model, on two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    pool(2).run(saved_run, str(folder), "dp_shard=2")
    return folder


def same_refusal(results: list[Any]) -> str:
    assert len(set(results)) == 1, results
    text: str = results[0]
    return text


def load_other(folder: str, shape: dict[str, Any], dtype: str | None, drop: bool) -> tuple[str, bool]:
    training = build("tp=2", **shape)
    if dtype is not None:
        training.run.model.to(getattr(torch, dtype))
    if drop:
        params = list(training.run.parameters())[:-1]
        training.optimizer = torch.optim.AdamW(params, foreach=False)
    before = training.local_state()
    config = {"width": 32}
    text = refusal(
        lambda: Checkpointer(folder).load(training.run, training.optimizer, **training.holders, config=config)
    )
    return text, training.local_state() == before


@pytest.mark.parametrize(
    ("shape", "dtype", "drop", "expected"),
    [
        (
            {"intermediate_size": 46},
            None,
            False,
            r"another model: 'layers\.0\.mlp\.gate_proj\.weight' has shape \(45, 24\) there and \(46, 24\) here\. "
            r"Nothing was loaded\. .* The configuration differs: width was 24, is 32\.",
        ),
        (
            {"tie_word_embeddings": False},
            None,
            False,
            r"it has no 'lm_head\.weight', which this model has with shape \(61, 24\)",
        ),
        (
            {"num_hidden_layers": 2},
            None,
            False,
            r"it has no 'layers\.1\.\S+', which this model has with shape \(\d+, 24\)",
        ),
        ({}, "float32", False, r"'embed_tokens\.weight' is float64 there and float32 here"),
        ({}, None, True, r"the saved optimizer holds 'norm\.weight', but this run's does not"),
    ],
)
def test_another_model_is_refused_with_the_first_key_that_differs(
    saved: Path, shape: dict[str, Any], dtype: str | None, drop: bool, expected: str
) -> None:
    results = pool(2).run(load_other, str(saved), shape, dtype, drop)
    assert all(untouched for _, untouched in results)
    assert re.search(expected, same_refusal([text for text, _ in results]))


def test_a_parameter_that_only_the_checkpoint_has_is_refused(tmp_path: Path) -> None:
    pool(2).run(saved_untied, str(tmp_path))
    results = pool(2).run(load_other, str(tmp_path), {}, None, False)
    assert all(untouched for _, untouched in results)
    text = same_refusal([text for text, _ in results])
    assert "it has 'lm_head.weight' with shape (61, 24), which this model has not" in text


def saved_untied(folder: str) -> None:
    saved_run(folder, "dp_shard=2", steps=(1,), tie_word_embeddings=False)


def load_with(folder: str, change: str) -> tuple[str, bool]:
    training = build("dp_shard=2")
    options = dict(training.holders)
    if change == "data" or (change == "data on rank 1" and dist.get_rank() == 1):
        mesh = training.run.mesh
        options["loader"] = Loader(
            tokens(), seq_len=SEQ_LEN, global_batch=ROWS, seed=5, rank=mesh.data_rank, ranks=mesh.data_ranks
        )
    elif change == "group":
        params = list(training.run.parameters())
        training.optimizer = torch.optim.AdamW(params, foreach=False)
    elif change == "step":
        options["step"] = 7
    elif change == "foreign parameter":
        training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    before = training.local_state()
    text = refusal(lambda: Checkpointer(folder).load(training.run, training.optimizer, **options))
    return text, training.local_state() == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("data", r"DataError: the saved data position has seed=0, but this run has seed=5"),
        ("data on rank 1", r"DataError: the saved data position has seed=0, but this run has seed=5"),
        (
            "group",
            r"are in one group of this run's optimizer, but were saved with weight_decay=0\.1 and weight_decay=0\.0",
        ),
        ("step", r"load\(step=7\): \S+ holds the steps 1, 2\."),
        ("foreign parameter", r"group 2 holds a parameter of shape \(3,\) that is not the model's"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(saved: Path, change: str, expected: str) -> None:
    results = pool(2).run(load_with, str(saved), change)
    assert re.search(expected, same_refusal([text for text, _ in results]))
    assert change == "data on rank 1" or all(untouched for _, untouched in results)


def load_without_holders(folder: str) -> str:
    training = build("dp_shard=2")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, training.run, training.optimizer)
        checkpointer.wait()
        return refusal(lambda: checkpointer.load(training.run, training.optimizer, loader=training.loader))


def test_state_that_was_not_saved_is_not_made_up(tmp_path: Path) -> None:
    text = same_refusal(pool(2).run(load_without_holders, str(tmp_path)))
    assert re.search(r"was saved without loader=, so it has no state for this run's loader", text)


def load_nothing(folder: str) -> str:
    training = build("dp_shard=2")
    return refusal(lambda: Checkpointer(folder).load(training.run, training.optimizer))


def test_an_empty_folder_is_refused_by_load(tmp_path: Path) -> None:
    text = same_refusal(pool(2).run(load_nothing, str(tmp_path)))
    assert re.search(r"load\(\): \S+ holds no complete checkpoint", text)


class Named:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


def odd_save(folder: str, what: str) -> str:
    training = build("dp_shard=2")
    rank = dist.get_rank()
    name = next(iter(dict(training.run.named_parameters())))
    param = dict(training.run.named_parameters())[name]
    options: dict[str, Any] = {}
    step = 1
    if what == "loader":
        options["loader"] = Named(rank)
    elif what == "step":
        step = 1 + rank
    elif what == "extra":
        options["extra"] = {"when": object()}
    elif what == "plain state":
        training.optimizer.state[param]["history"] = torch.zeros(3)
    elif what == "nested state":
        training.optimizer.state[param]["history"] = {"a": 1} if rank == 1 else 1
    checkpointer = Checkpointer(folder)
    text = refusal(lambda: checkpointer.save(step, training.run, training.optimizer, **options))
    assert checkpointer.steps() == []
    return text


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("loader", r"loader differs between ranks: {'state': 0} on rank 0, {'state': 1} on rank 1"),
        ("step", r"ranks differ in step of save \(\w+\.py:\d+\): 1 on rank 0, 2 on rank 1\."),
        ("extra", r"the state of extra cannot be saved: .* Use numbers, strings, tensors"),
        (
            "plain state",
            r"'history' of 'embed_tokens\.weight' is a plain tensor of shape \(3,\), but the parameter is sharded",
        ),
        (
            "nested state",
            r"optimizer state 'history' of 'embed_tokens\.weight' is a dict: tensors, numbers and strings",
        ),
    ],
)
def test_what_cannot_be_saved_exactly_is_refused_at_the_save(tmp_path: Path, what: str, expected: str) -> None:
    assert re.search(expected, same_refusal(pool(2).run(odd_save, str(tmp_path), what)))


def save_over(folder: str, how: str) -> tuple[str, list[int]]:
    training = build("dp_shard=2")
    with Checkpointer(folder, keep=None) as checkpointer:

        def save(step: int) -> None:
            training.train(1)
            checkpointer.save(step, training.run, training.optimizer, **training.holders)
            checkpointer.wait()

        def load(step: int) -> None:
            checkpointer.load(training.run, training.optimizer, **training.holders, step=step)

        actions: dict[str, list[Any]] = {
            "new run": [lambda: save(5)],
            "same step": [lambda: load(2), lambda: save(2)],
            "older step": [lambda: load(2), lambda: save(3), lambda: save(2)],
            "went back": [lambda: load(1), lambda: save(2), lambda: save(4)],
        }
        *before, last = actions[how]
        for act in before:
            act()
        return refusal(last), checkpointer.steps()


@pytest.mark.parametrize(
    ("how", "expected", "steps"),
    [
        ("new run", r"save\(step=5\): \S+ holds step 2 of a run that this one did not load\. Call resume\(\)", [1, 2]),
        ("same step", r"^no error$", [1, 2]),
        ("older step", r"save\(step=2\): this run is at step 3 already", [1, 2, 3]),
        ("went back", r"^no error$", [1, 2, 4]),
    ],
)
def test_a_run_never_overwrites_or_outlives_another(tmp_path: Path, how: str, expected: str, steps: list[int]) -> None:
    pool(2).run(saved_run, str(tmp_path), "dp_shard=2")
    before = (tmp_path / "step-00000002" / "manifest.json").stat().st_ino
    results = pool(2).run(save_over, str(tmp_path), how)
    assert re.search(expected, same_refusal([text for text, _ in results]))
    assert results[0][1] == steps
    aside = tmp_path / "abandoned-step-00000002"
    assert aside.exists() == (how == "went back")
    kept = aside if how == "went back" else tmp_path / "step-00000002"
    assert (kept / "manifest.json").stat().st_ino == before


def rng_of_four(folder: str, spec: str, load: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(RNG state before, after a load), or around a save."""
    training: Training = build(spec, seed=7 if load else 0)
    torch.manual_seed(50 + dist.get_rank() + (7 if load else 0))
    before = torch.get_rng_state()
    checkpointer = Checkpointer(folder)
    if load:
        checkpointer.load(training.run, training.optimizer)
    else:
        checkpointer.save(1, training.run, training.optimizer)
        checkpointer.wait()
    return before, torch.get_rng_state()


def test_random_states_go_to_the_ranks_they_came_from_and_other_ranks_keep_theirs(tmp_path: Path) -> None:
    saved = pool(2).run(rng_of_four, str(tmp_path), "dp_shard=2", False)
    loaded = pool(4).run(rng_of_four, str(tmp_path), "dp_shard=4", True)
    for rank, (before, after) in enumerate(loaded):
        assert torch.equal(after, saved[rank][0] if rank < 2 else before)
        assert rank >= 2 or not torch.equal(after, before)
