"""What recipes of answers share: prompts and answers as ids, right answers before rewards, the tasks they are about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import meshkit as mk
from meshkit.algos.rewards import Scores, score
from meshkit.algos.rollout import Rollout, Sampling, encode_prompts
from meshkit.algos.rollout._engine import Stopping
from meshkit.algos.sft import sft_steps
from meshkit.data import REFERENCE_ALPHABET, Example, Record, character_tokenizer
from meshkit.mesh import gather_over_data
from meshkit.models import config_from_pretrained, load_pretrained
from meshkit.recipes.evaluation import greedy_score, sample_rows
from meshkit.recipes.sft import forms_in_balance, warm_up_policy
from meshkit.recipes.tasks import REFERENCE_TASKS, load_tasks, small_model
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64_SUM = 1e-10  # only summation order differs
TOKENIZER = character_tokenizer(REFERENCE_ALPHABET)
SHAPE = tiny_config(vocab_size=TOKENIZER.vocab_size, num_attention_heads=2, head_dim=8)
ROWS = [
    Record(fields={"prompt": f"{a}+{b}=", "completion": str(a + b)}, source=f"{a}+{b}")
    for a in range(3)
    for b in range(2)
]


def build(mesh: mk.Mesh) -> mk.Run:
    with torch.device("meta"):
        model = mk.models.Llama(SHAPE).double()
    run = mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0, plan=run.plan)
    return run


# ---------------------------------------------------------------------------------------------- prompts and answers
def test_prompts_begin_with_bos_and_answers_end_without_eos() -> None:
    (prompt,) = encode_prompts([(7, ROWS[3])], TOKENIZER)
    head = [] if TOKENIZER.bos_id is None else [TOKENIZER.bos_id]
    assert prompt.key == 7 and prompt.ids.tolist() == head + TOKENIZER.encode("1+1=")
    assert prompt.fields is ROWS[3].fields
    ends = Stopping(Sampling(max_new_tokens=9, stop_ids=(TOKENIZER.eos_id,)), TOKENIZER.decode)
    ids = [*TOKENIZER.encode("12"), TOKENIZER.eos_id]
    assert ends.text(ids) == ends.text(ids[:2]) == "12" and ends.text([]) == ""
    assert Stopping(Sampling(max_new_tokens=9), None).text(ids) == ""
    stopped, cut = (
        Rollout(
            prompt_ids=prompt.ids,
            ids=np.array(ids[:count]),
            log_probs=np.array([-1.0, -2.0, -3.0][:count]),
            text="12",
            key=prompt.key,
            fields=prompt.fields,
            truncated=count == 2,
            reward=reward,
        )
        for count, reward in ((3, 1.0), (2, 0.5))
    )
    assert sample_rows([stopped, cut]) == [("1+1=", "12", "", "1.00"), ("1+1=", "12", "cut", "0.50")]
    example = cut.example()
    assert example.ids.tolist() == cut.tokens.tolist() == [*prompt.ids.tolist(), *ids[:2]]
    assert example.learn.tolist() == [False] * len(prompt.ids) + [True] * 2
    assert example.token_values["rollout_log_probs"][-2:].tolist() == [-1.0, -2.0]
    assert example.scalars == {"groups": 7.0, "truncated": 1.0, "rewards": 0.5}


def gathered(spec: str) -> list:
    mesh = mk.init_mesh(spec)
    return gather_over_data(mesh, list(range(mesh.data_rank)))


@pytest.mark.parametrize(("spec", "expected"), [("dp_shard=2", [[], [0]]), ("tp=2", [[]]), ("cp=2", [[]])])
def test_every_rank_gets_what_each_data_rank_has(spec: str, expected: list) -> None:
    assert pool(2).run(gathered, spec) == [expected, expected]


def scored(spec: str) -> float:
    run = build(mk.init_mesh(spec))
    task = load_tasks("addition", seed=0, evaluated=5)
    return greedy_score(
        run, task.held_out, TOKENIZER, _length_scores, sampling=Sampling(max_new_tokens=3, stop_ids=(TOKENIZER.eos_id,))
    )


def _length_scores(answers: Sequence[Rollout]) -> Scores:
    return score(answers, lambda answer: float(answer.ids.sum() + len(answer.fields["prompt"])))


def test_greedy_scores_are_of_all_rows_on_any_mesh() -> None:
    expected = pool(1).run(scored, "dp_shard=1")[0]
    assert expected > 0
    assert pool(2).run(scored, "dp_shard=2") == [expected, expected]  # three rows and two


# ---------------------------------------------------------------------------------------------- questions
def test_questions_are_those_of_the_task_unless_told() -> None:
    found = load_tasks("reversal", held_out=0.1, evaluated=3, seed=1)
    task = REFERENCE_TASKS["reversal"]
    assert found.train == task.rows(held_out=0.1, seed=1).train
    assert len(found.held_out) == 3
    assert found.max_new_tokens == task.max_new_tokens == 6  # five letters and the end
    assert load_tasks("reversal", max_new_tokens=9).max_new_tokens == 9


def test_questions_of_files_are_checked_exactly(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}?", "completion": "{n}"}}\n' for n in range(40)))
    found = load_tasks("addition", [path], held_out=0.3)
    assert len(found.train) + len(found.held_out) == 40 and found.max_new_tokens == 256
    assert str(found).startswith(f"{len(found.train)} prompts, {len(found.held_out)} held out, like ")


# ---------------------------------------------------------------------------------------------- teach and begin
def lessons() -> list[Example]:
    draw = np.random.default_rng(0)
    made = []
    for length, first in ((5, 2), (9, 4), (7, 1), (3, 1), (6, 4)):
        learn = np.arange(length) >= first
        made.append(Example(ids=draw.integers(0, SHAPE.vocab_size, length), learn=learn))
    return made


def taught(spec: str) -> list[float]:
    run = build(mk.init_mesh(spec))
    losses: list[float] = []
    optimizer = mk.adamw(run, lr=1e-2)
    sft_steps(
        run,
        optimizer,
        lessons(),
        steps=3,
        global_batch=5,
        seq_len=12,
        seed=0,
        warmup_steps=2,
        each=lambda step, scalars: losses.append(scalars["loss"]),
    )
    return losses


def alone() -> list[float]:
    """One example after the other through a plain loop: a batch is all five, so order and packing do not matter."""
    model = build(mk.init_mesh("dp_shard=1")).model
    model.eval()
    total = count = 0.0
    for example in lessons():
        logits = model(torch.from_numpy(example.ids)[None])[0, :-1]
        wanted = torch.from_numpy(example.ids[1:]).masked_fill(torch.from_numpy(~example.learn[1:]), -100)
        total += F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum").item()
        count += (wanted >= 0).sum().item()
    return [total / count]


def test_lessons_are_the_same_on_any_mesh_and_begin_at_the_loss_of_a_plain_loop() -> None:
    losses = pool(1).run(taught, "dp_shard=1")[0]
    assert losses[0] == pytest.approx(pool(1).run(alone)[0][0], abs=TOL_FP64_SUM)
    assert losses[2] < losses[1] < losses[0]
    for spec in ("dp_shard=2", "tp=2"):
        for found in pool(2).run(taught, spec):
            assert found == pytest.approx(losses, abs=TOL_FP64_SUM)


def begun(folder: str) -> float:
    mesh = mk.init_mesh("dp_shard=-1")
    run, again = build(mesh), build(mesh)
    warm_up_policy(run, mk.adamw(run, lr=1e-2), ROWS, TOKENIZER, Path(folder), steps=2, seed=3, seq_len=16)
    moved = max((a - b).abs().max().item() for a, b in zip(run.parameters(), again.parameters(), strict=True))
    assert moved > 0.01
    load_pretrained(again.model, Path(folder))
    return max((a - b).abs().max().item() for a, b in zip(run.parameters(), again.parameters(), strict=True))


def test_a_folder_holds_the_model_that_began(tmp_path: Path) -> None:
    assert pool(1).run(begun, str(tmp_path / "model")) == [0.0]
    assert config_from_pretrained(tmp_path / "model").vocab_size == TOKENIZER.vocab_size
    assert small_model(31).vocab_size == 31


def test_rare_forms_of_prompts_come_as_often_as_frequent_ones() -> None:
    prompts = ["12+34=", "1+2=", "56+78=", "9+10=", "90+12=", "33+44=", "3+11="]
    rows = [Record(fields={"prompt": prompt}, source="") for prompt in prompts]
    found = [row.fields["prompt"] for row in forms_in_balance(rows)]
    assert found[: len(prompts)] == prompts
    assert Counter(found) == {**dict.fromkeys(prompts, 1), "1+2=": 2}
    assert forms_in_balance([]) == []
