from __future__ import annotations

from pathlib import Path

import pytest

import meshkit as mk
from meshkit.data import (
    Record,
    encode_instruction,
    encode_records,
    instruction_tasks,
    load_chat,
    save_chat_tokenizer,
)

CHAT = Record(
    fields={"messages": [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]},
    source="rows.jsonl:1",
)
TEXT = Record(fields={"prompt": "2 + 2 =", "completion": " 4"}, source="rows.jsonl:2")


def test_rows_are_chats_or_text_and_only_answers_are_learnt(tmp_path: Path) -> None:
    save_chat_tokenizer([CHAT, TEXT], tmp_path, vocab_size=400)
    chat = load_chat(tmp_path)
    decode = chat.tokenizer.decode
    said, written = encode_records([CHAT, TEXT], lambda record: encode_instruction(record, chat))
    assert decode(said.ids) == "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
    assert decode(said.ids[said.learn]) == "Four.<|im_end|>" and said.source == "rows.jsonl:1"
    assert decode(written.ids) == "<|bos|>2 + 2 = 4<|eos|>" and decode(written.ids[written.learn]) == " 4<|eos|>"


def test_the_tokenizer_is_trained_on_the_text_of_the_rows(tmp_path: Path) -> None:
    save_chat_tokenizer([TEXT] * 3, tmp_path, vocab_size=300)
    assert len(load_chat(tmp_path).tokenizer.encode("2 + 2 = 4")) < 9


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"text": "hello"}, r"rows.jsonl:3: has no field 'messages', only \['text'\]"),
        ({"prompt": "hello"}, r"rows.jsonl:3: has no field 'completion', only \['prompt'\]"),
    ],
)
def test_a_row_of_another_kind_is_named(tmp_path: Path, fields: dict, match: str) -> None:
    save_chat_tokenizer([CHAT], tmp_path, vocab_size=300)
    chat = load_chat(tmp_path)
    with pytest.raises(mk.errors.DataError, match=match):
        encode_records([Record(fields=fields, source="rows.jsonl:3")], lambda record: encode_instruction(record, chat))


def test_tasks_are_functions_and_questions_and_share_no_file() -> None:
    tasks = instruction_tasks(held_out=0.1)
    files = [{row.source.rpartition(":")[0] for row in half} for half in (tasks.train, tasks.held_out)]
    assert files[0] and files[1] and not files[0] & files[1]
    for half in (tasks.train, tasks.held_out):
        assert {frozenset(row.fields) for row in half} == {
            frozenset({"prompt", "completion"}),
            frozenset({"messages"}),
        }
