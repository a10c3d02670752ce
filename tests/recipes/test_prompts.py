"""Chats as prompts: their ids are those of transformers, answers end where the folder says, and all fits into rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig

from examples.grpo import Config as GrpoConfig
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


def test_rows_hold_the_longest_prompt_and_its_answer(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["one"], vocab_size=300), tmp_path)
    tokenizer, sampling = load_tokenizer(tmp_path), Sampling(max_new_tokens=256)
    given = rows("one", "one " * 30)
    longest = len(encode_prompts([(0, given[1])], tokenizer)[0].ids)
    fitted = fit_rows(GrpoConfig(), given, tokenizer, sampling)
    assert longest + 256 <= fitted.seq_len == -(-(longest + 256) // 64) * 64
    assert fit_rows(GrpoConfig(seq_len=1000), given, tokenizer, sampling).seq_len == 1000
    with pytest.raises(
        DataError, match=rf"--seq-len 100: the longest prompt has {longest} tokens and an answer up to 256"
    ):
        fit_rows(GrpoConfig(seq_len=100), given, tokenizer, sampling)
    LlamaConfig(max_position_embeddings=128).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="reads 128 tokens at most: the longest prompt"):
        fit_rows(replace(GrpoConfig(), pretrained=tmp_path), given, tokenizer, sampling)
