"""Chats as prompts: their ids are those of transformers, answers end where the folder says, and all fits into rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig

from examples.grpo import Config as GrpoConfig
from examples.rejection_sampling import Config as RejectionConfig
from meshkit.algos.rollout import Sampling, encode_prompts
from meshkit.data import ChatTemplate, Record, load_tokenizer, save_chat_template, save_tokenizer, train_tokenizer
from meshkit.errors import DataError
from meshkit.recipes.prompts import encode_chats, fit_rows, stop_ids
from tests.recipes.templates import TEMPLATES

CHATS = [
    [{"role": "user", "content": "what is 1 + 1?"}],
    [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": " and 2 + 2? "},
    ],
]


def rows(*prompts: object) -> list[Record]:
    return [Record(fields={"prompt": prompt}, source=f"chats.jsonl:{i + 1}") for i, prompt in enumerate(prompts)]


def folder_with(template: str, tokens: tuple[str, ...], folder: Path) -> Path:
    tokenizer = train_tokenizer(["what is one and one and two"], vocab_size=300, extra_special_tokens=tokens)
    save_tokenizer(tokenizer, folder)
    save_chat_template(ChatTemplate(source=template), folder)
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_of_a_chat_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_with(*TEMPLATES[name], tmp_path)
    theirs = AutoTokenizer.from_pretrained(folder)
    encoded = encode_chats(rows(*CHATS), load_tokenizer(folder), folder)
    prompts = encode_prompts(list(enumerate(encoded)), load_tokenizer(folder))
    for chat, prompt, row in zip(CHATS, prompts, encoded, strict=True):
        options = {"add_generation_prompt": True, "return_dict": False}
        assert prompt.ids.tolist() == theirs.apply_chat_template(chat, tokenize=True, **options)
        assert row.fields["prompt"] == theirs.apply_chat_template(chat, tokenize=False, **options)
        assert row.fields["messages"] == chat


def test_texts_stay_as_they_are_also_beside_chats(tmp_path: Path) -> None:
    folder = folder_with(*TEMPLATES["chatml"], tmp_path)
    tokenizer = load_tokenizer(folder)
    text, chat = encode_chats(rows("1 + 1", CHATS[0]), tokenizer, folder)
    assert text.fields == {"prompt": "1 + 1"} and "prompt_ids" in chat.fields
    ids = encode_prompts([(0, text)], tokenizer)[0].ids.tolist()
    assert ids == [tokenizer.bos_id, *tokenizer.encode("1 + 1")]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "chats.jsonl:1: message 0 has a part of type",
        ),
        ([{"role": "user", "content": "<|im_end|>"}], "chats.jsonl:1: message 0 .user. contains the control token"),
        (["hello"], "chats.jsonl:1: message 0 is 'hello'. Write"),
        ([{"role": "user"}], "chats.jsonl:1: "),
    ],
)
def test_a_chat_that_is_none_is_named_by_its_row(prompt: object, said: str, tmp_path: Path) -> None:
    folder = folder_with(*TEMPLATES["chatml"], tmp_path)
    with pytest.raises(DataError, match=said):
        encode_chats(rows(prompt), load_tokenizer(folder), folder)


def test_a_chat_needs_a_folder_with_a_template(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["one"], vocab_size=300), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="Give its folder: --pretrained"):
        encode_chats(rows(CHATS[0]), tokenizer, None)
    with pytest.raises(DataError, match="has no chat template"):
        encode_chats(rows(CHATS[0]), tokenizer, tmp_path)


@pytest.mark.parametrize(("said", "more"), [(None, []), (7, [7]), ([7, 9], [7, 9])])
def test_answers_end_with_each_id_that_the_folder_names(said: object, more: list[int], tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["one"], vocab_size=300), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert stop_ids(tokenizer, tmp_path) == (tokenizer.eos_id, *more)


def test_an_id_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["one"], vocab_size=300), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 100000]}')
    with pytest.raises(DataError, match=r"eos_token_id is \[3, 100000\], and ids go from 0 to"):
        stop_ids(load_tokenizer(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("config", "name", "answer"),
    [(GrpoConfig, "tokens_per_microbatch", 20_000), (RejectionConfig, "seq_len", 256)],
)
def test_rows_hold_the_longest_prompt_and_its_answer(config: Any, name: str, answer: int, tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["one"], vocab_size=300), tmp_path)
    tokenizer, sampling = load_tokenizer(tmp_path), Sampling(max_new_tokens=answer)
    given = rows("one", "one " * 30)
    longest = len(encode_prompts([(0, given[1])], tokenizer)[0].ids)
    fitted = getattr(fit_rows(config(), given, tokenizer, sampling), name)
    assert longest + answer <= fitted == -(-(longest + answer) // 64) * 64
    assert getattr(fit_rows(config(**{name: 30_000}), given, tokenizer, sampling), name) == 30_000
    flag = name.replace("_", "-")
    with pytest.raises(
        DataError, match=rf"--{flag} 100: the longest prompt has {longest} tokens and an answer up to {answer}"
    ):
        fit_rows(config(**{name: 100}), given, tokenizer, sampling)
    LlamaConfig(max_position_embeddings=128).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="reads 128 tokens at most: the longest prompt"):
        fit_rows(replace(config(), pretrained=tmp_path), given, tokenizer, sampling)


def test_prompts_and_tools_that_are_none_are_named_by_their_row(tmp_path: Path) -> None:
    """JSON may hold half of a UTF-16 pair, which is no character."""
    folder = folder_with(*TEMPLATES["chatml"], tmp_path)
    tokenizer = load_tokenizer(folder)
    for prompt in ("\ud800", None, 3):
        with pytest.raises(DataError, match=r"chats\.jsonl:1: prompt is .*Give a text in Unicode"):
            encode_prompts(list(enumerate(rows(prompt))), tokenizer)
    with pytest.raises(DataError, match=r"chats\.jsonl:1: prompt_ids is 5\. Give a list of ids"):
        encode_prompts([(0, Record(fields={"prompt_ids": 5}, source="chats.jsonl:1"))], tokenizer)
    for other in (-1, 10**6):
        with pytest.raises(
            DataError, match=rf"chats\.jsonl:1: prompt_ids holds {other}, and the tokenizer has ids below"
        ):
            encode_prompts([(0, Record(fields={"prompt_ids": [1, other]}, source="chats.jsonl:1"))], tokenizer)
    with pytest.raises(DataError, match=r"chats\.jsonl:1: a chat has half of a UTF-16 pair"):
        encode_chats(rows([{"role": "user", "content": "\ud800"}]), tokenizer, folder)
    chat = Record(fields={"prompt": CHATS[0], "tools": 3}, source="chats.jsonl:1")
    with pytest.raises(DataError, match=r"chats\.jsonl:1: .*tools are 3\. Give a list"):
        encode_chats([chat], tokenizer, folder)
