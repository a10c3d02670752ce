"""Reference tasks are right, the same every time, and nothing of a held-out task is learnt from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from meshkit.algos.rewards import arithmetic, countdown
from meshkit.algos.rollout import Rollout
from meshkit.data import (
    REFERENCE_ALPHABET,
    TaskSplits,
    addition_tasks,
    character_tokenizer,
    countdown_tasks,
    encode_completion,
    load_tokenizer,
    reversal_tasks,
    save_tokenizer,
)
from meshkit.errors import DataError

MAKERS = [addition_tasks, reversal_tasks, countdown_tasks]


def answers(tasks: TaskSplits) -> list[Rollout]:
    rows = [record.fields for record in tasks.train + tasks.held_out]
    return [Rollout(text=row["completion"], ids=[], fields=row) for row in rows]


@pytest.mark.parametrize("make", MAKERS)
def test_rows_depend_on_the_arguments_alone_and_each_prompt_comes_once(make) -> None:
    tasks = make(count=2000)
    assert tasks == make(count=2000)
    assert tasks != make(count=2000, seed=1)
    prompts = [record.fields["prompt"] for record in tasks.train + tasks.held_out]
    assert len(prompts) == len(set(prompts)) == 2000
    assert 0.02 < len(tasks.held_out) / 2000 < 0.09


def test_completions_are_right() -> None:
    for record in addition_tasks(count=500, digits=3).train:
        assert ast.literal_eval(record.fields["completion"]) == sum(map(int, record.fields["prompt"][:-1].split("+")))
    assert all(map(arithmetic, answers(addition_tasks(count=500))))
    for record in reversal_tasks(count=500).train:
        assert list(record.fields["prompt"]) == [*reversed(record.fields["completion"]), ">"]
    tasks = countdown_tasks(count=500)
    assert all(map(countdown, answers(tasks)))
    for record in tasks.train:
        assert eval(record.fields["completion"]) == record.fields["target"]


def test_what_differs_by_order_alone_is_on_one_side() -> None:
    def sums(half: list) -> set[tuple[str, ...]]:
        return {tuple(sorted(record.fields["prompt"][:-1].split("+"))) for record in half}

    def games(half: list) -> set[tuple]:
        return {(tuple(sorted(record.fields["numbers"])), record.fields["target"]) for record in half}

    tasks = addition_tasks()
    assert len(tasks.train) + len(tasks.held_out) > 9_000  # nearly all sums of two digits
    assert not sums(tasks.train) & sums(tasks.held_out)
    tasks = countdown_tasks(largest=6)
    assert not games(tasks.train) & games(tasks.held_out)


def test_characters_have_ids_and_the_folder_is_one_of_transformers(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(REFERENCE_ALPHABET)
    assert tokenizer.vocab_size == len(REFERENCE_ALPHABET) + 3
    assert tokenizer.decode(tokenizer.encode(REFERENCE_ALPHABET)) == REFERENCE_ALPHABET
    example = encode_completion(tokenizer, "1+2=", "3")
    assert tokenizer.decode(example.ids) == "<|bos|>1+2=3<|eos|>"
    assert tokenizer.decode(example.ids[example.learn]) == "3<|eos|>"
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a b+1", add_special_tokens=False)["input_ids"] == tokenizer.encode("a b+1")
    with pytest.raises(Exception, match="Missing \\[UNK\\]"):
        tokenizer.encode("A")


def test_what_makes_no_tasks_is_refused() -> None:
    with pytest.raises(DataError, match="digits=0: a number has at least 1 digit, which makes no tasks"):
        addition_tasks(digits=0)
    with pytest.raises(DataError, match="shortest=4, longest=3: no such lengths"):
        reversal_tasks(longest=3)
    with pytest.raises(DataError, match="held_out=0: not a part of the tasks"):
        countdown_tasks(held_out=0)
    with pytest.raises(DataError, match="count=0: too few"):
        countdown_tasks(count=0)
    with pytest.raises(DataError, match=r"alphabet: \['ab'\]. Give single characters"):
        character_tokenizer(["ab"])
