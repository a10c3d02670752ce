"""Numbers of a model for each token come back to the examples they belong to, on any mesh and from any packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.rollout import example_values, label_log_probs, token_values
from meshkit.data import Example, pack_step
from meshkit.errors import DataError, PlanError
from meshkit.loss import token_log_probs
from tests.tiny import tiny_config
from tests.world import pool
from tests.zoo import causal
from tests.zoo.exact import exact
from tests.zoo.shrink import DATA_IDS

SHAPE = tiny_config(vocab_size=31)
TOL_FP64_SUM = 1e-10  # only summation order differs


def examples() -> list[Example]:
    """Ragged, one of a single token, one with nothing learnt, one whose first token is learnt but is no label."""
    draw = np.random.default_rng(0)
    made = []
    for length, first in ((5, 2), (9, 0), (1, 0), (7, 7), (3, 1), (6, 4)):
        learn = np.arange(length) >= first
        made.append(Example(ids=draw.integers(0, SHAPE.vocab_size, length), learn=learn))
    return made


def build(mesh: mk.Mesh) -> mk.Run:
    with torch.device("meta"):
        model = mk.models.Llama(SHAPE).double()
    run = mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0, plan=run.plan)
    return run


def values_on(spec: str) -> tuple[int, list[np.ndarray]]:
    mesh = mk.init_mesh(spec)
    run = build(mesh)
    own = examples()[mesh.data_rank :: mesh.data_ranks] if mesh.data_ranks < 3 else examples()[: 0 if mesh.rank else 6]
    found = example_values(run, own, label_log_probs, tokens_per_microbatch=16, microbatches=2)
    batch = pack_step(
        [replace(e, token_values={"v": v}) for e, v in zip(own, found, strict=True)], seq_len=12, names=["v"]
    )
    assert torch.equal(batch["v"] != 0, batch["labels"] >= 0)  # they stand where their token is the label
    return mesh.data_rank, found


@pytest.mark.parametrize(
    ("ranks", "spec"), [(2, "dp_shard=2"), (2, "tp=2"), (2, "pp=2"), (2, "cp=2"), (3, "dp_shard=3")]
)
def test_values_are_those_of_each_example_alone(ranks: int, spec: str) -> None:
    results = dict(pool(ranks).run(values_on, spec))
    expected = pool(1).run(alone)[0]
    if spec == "dp_shard=3":  # one rank has all of them, the others none
        assert [len(results[rank]) for rank in range(3)] == [6, 0, 0]
        results = {0: results[0]}
    for rank, found in results.items():
        for mine, theirs in zip(found, expected[rank :: len(results)], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOL_FP64_SUM)


def alone() -> list[np.ndarray]:
    run = build(mk.init_mesh())
    found = []
    for example in examples():
        ids = torch.from_numpy(example.ids)[None]
        with torch.no_grad():
            log_probs = run.model(ids).log_softmax(-1)[0]
        own = np.zeros(len(example))
        for place in range(1, len(example)):
            if example.learn[place]:
                own[place] = log_probs[place - 1, example.ids[place]]
        found.append(own)
    return found


def padded_values_on(spec: str) -> float:
    """The largest difference from one device, of rows that begin with padding, as tokenizers of transformers give them."""
    mesh = mk.init_mesh(spec)
    ids = torch.randint(*DATA_IDS, (4, 12), generator=torch.Generator().manual_seed(0))
    shown = (torch.arange(12) >= torch.tensor([3, 0, 5, 1])[:, None]).long()
    batch = {
        "input_ids": ids * shown,
        "labels": torch.where(shown == 1, ids.roll(-1, 1), -100),
        "attention_mask": shown,
    }
    with exact():
        logits = causal.build("llama")(batch["input_ids"], attention_mask=shown).logits
        expected = token_log_probs(logits, batch["labels"]).log_probs.detach()
        run = mk.parallelize(causal.build("llama"), mesh)
        own = {name: x.tensor_split(mesh.data_ranks)[mesh.data_rank] for name, x in batch.items()}
        found = token_values(run, own, microbatches=2)
    return float((found - expected.tensor_split(mesh.data_ranks)[mesh.data_rank]).abs().max())


@pytest.mark.parametrize("spec", ["dp_shard=2", "cp=2", "pp=2"])
def test_padding_at_the_left_is_not_seen(spec: str) -> None:
    assert max(pool(2).run(padded_values_on, spec)) <= TOL_FP64_SUM


def padded_of_ours() -> str:
    run = build(mk.init_mesh("dp_shard=1"))
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(DataError) as error:
        token_values(run, {"input_ids": ids, "labels": ids, "attention_mask": ids})
    return str(error.value)


def test_a_model_that_takes_no_attention_mask_is_not_given_rows_that_need_one() -> None:
    assert "the batch has an attention_mask, but the model's forward takes none" in pool(1).run(padded_of_ours)[0]


def doubled(model: Any, part: dict[str, Any], *, log: list[int]) -> torch.Tensor:
    log.append(len(part["input_ids"]))
    return 2 * label_log_probs(model, part)


def centred(model: Any, part: dict[str, Any]) -> torch.Tensor:
    values = label_log_probs(model, part)
    return values - values.mean(1, keepdim=True)


def compared(model: Any, part: dict[str, Any]) -> torch.Tensor:
    values = label_log_probs(model, part)
    return values - values.mean()


def printed(model: Any, part: dict[str, Any]) -> torch.Tensor:
    print(end="")
    return label_log_probs(model, part)


def own_functions(spec: str, microbatches: int) -> tuple[float, list[int], list[str]]:
    """(how far twice the log-probabilities are off, rows of each call of that, what is said of each other function)"""
    mesh = mk.init_mesh(spec)
    run = build(mesh)
    ids = torch.randint(SHAPE.vocab_size, (4, 12), generator=torch.Generator().manual_seed(mesh.data_rank))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    of = partial(token_values, run, batch, microbatches=microbatches)
    log: list[int] = []
    off = float((of(partial(doubled, log=log)) - 2 * of()).abs().max())
    said = []
    functions: list[Callable[..., torch.Tensor]] = [centred, compared, printed, mk.step.additive(partial(printed))]
    for function in functions:
        try:
            of(function)
            said.append("")
        except PlanError as error:
            said.append(str(error))
    return off, log, said


@pytest.mark.parametrize(("spec", "microbatches"), [("dp_shard=2", 1), ("cp=2", 1), ("pp=2", 2), ("tp=2", 1)])
def test_a_function_that_mixes_tokens_or_rows_is_refused_where_it_sees_a_part(spec: str, microbatches: int) -> None:
    of_ranks = pool(2).run(own_functions, spec, microbatches)
    for off, log, (of_rows, of_all, untried, vouched) in of_ranks:
        assert off == 0
        assert set(log) <= {4 // microbatches}  # what the trial noted is taken back
        split = spec != "tp=2"
        assert ("'centred' mixes tokens or rows" in of_rows) == (spec == "cp=2")
        assert ("'compared' mixes tokens or rows" in of_all) == split
        assert ("it calls `print` (test_token_values.py:" in untried) == split
        assert vouched == ""
    assert any(log for _, log, _ in of_ranks)
