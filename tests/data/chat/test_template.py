"""Ids and masks of ten public template shapes equal transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from meshkit.data import (
    CHATML_TOKENS,
    Chat,
    ChatTemplate,
    Tokenizer,
    chatml,
    check_roles,
    encode_chat,
    load_chat,
    load_chat_template,
    save_chat_template,
    save_tokenizer,
    train_tokenizer,
)
from meshkit.errors import DataError
from tests.data.chat.chat_templates import CALL, MORE, SHAPES, SPECIAL, SYSTEM, TOOL_TURN, TOOLS, TURN, Shape, chats_of

CASES = [(name, chat) for name, shape in SHAPES.items() for chat in chats_of(shape)]
DATE = {"date_string": "1 May 2026"}


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """A byte-level BPE with the special tokens of every shape."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([str(message) for message in TURN + MORE + TOOL_TURN + TOOLS] * 4, trainer)
    return backend


def folder_of(shape: Shape, backend: tokenizers.Tokenizer, folder: Path, *, source: str | None = None) -> Path:
    """A folder as transformers saves it."""
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=shape.bos, eos_token=shape.eos, chat_template=source or shape.source
    ).save_pretrained(folder)
    return folder


def chat_of(shape: Shape, backend: tokenizers.Tokenizer, source: str) -> Chat:
    own = tokenizers.Tokenizer.from_str(backend.to_str())
    tokenizer = Tokenizer(
        backend=own,
        bos_id=None if shape.bos is None else own.token_to_id(shape.bos),
        eos_id=own.token_to_id(shape.eos),
    )
    special = {"eos_token": shape.eos} | ({} if shape.bos is None else {"bos_token": shape.bos})
    return Chat(tokenizer=tokenizer, template=ChatTemplate(source=source, special_tokens=special), variables=DATE)


def theirs(
    shape: Shape, backend: tokenizers.Tokenizer, messages: Sequence[dict[str, Any]], tools: Any, **variables: Any
) -> tuple[list[int], list[int]]:
    """Ids and assistant mask by transformers."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=shape.bos, eos_token=shape.eos)
    found = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        chat_template=shape.source,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **DATE,
        **variables,
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_ids_and_masks_equal_transformers(name: str, chat: str, backend: tokenizers.Tokenizer) -> None:
    shape = SHAPES[name]
    messages, tools = chats_of(shape)[chat]
    ids, mask = theirs(shape, backend, messages, tools)
    example = encode_chat(chat_of(shape, backend, shape.source), messages, tools=tools)
    assert example.ids.tolist() == ids
    assert example.learn.tolist() == [bool(learnt) for learnt in mask]
    assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_masks_without_marks_equal_those_with_marks(name: str, chat: str, backend: tokenizers.Tokenizer) -> None:
    shape = SHAPES[name]
    messages, tools = chats_of(shape)[chat]
    ids, mask = theirs(shape, backend, messages, tools)
    bare = chat_of(shape, backend, shape.bare)
    assert not bare.template.marks_answers
    if name == "mistral" and messages[0]["role"] == "system":
        with pytest.raises(DataError, match="not prefix-stable at message 2"):  # the system text moves
            encode_chat(bare, messages, tools=tools)
        return
    example = encode_chat(bare, messages, tools=tools)
    assert example.ids.tolist() == ids
    assert example.learn.tolist() == [bool(learnt) for learnt in mask]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_last_turn_is_the_end_of_all_turns(name: str, marked: bool, backend: tokenizers.Tokenizer) -> None:
    shape = SHAPES[name]
    chat = chat_of(shape, backend, shape.source if marked else shape.bare)
    every = encode_chat(chat, TURN + MORE)
    last = encode_chat(chat, TURN + MORE, turns="last")
    assert np.array_equal(every.ids, last.ids)
    start = int(np.flatnonzero(np.diff(every.learn, prepend=False))[-2])  # where the last run of True begins
    expected = every.learn.copy()
    expected[:start] = False
    assert np.array_equal(last.learn, expected)
    assert chat.tokenizer.decode(last.ids[last.learn]).split("<")[0].strip() in ("Any time.",)


@pytest.mark.parametrize("name", SHAPES)
def test_generation_prompt_equals_transformers(name: str, backend: tokenizers.Tokenizer) -> None:
    shape = SHAPES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=shape.bos, eos_token=shape.eos)
    for variables in ({}, {"enable_thinking": False}):
        text = tokenizer.apply_chat_template(
            TURN[:1], chat_template=shape.bare, tokenize=False, add_generation_prompt=True, **DATE, **variables
        )
        chat = chat_of(shape, backend, shape.source)
        assert chat.template.render(TURN[:1], add_generation_prompt=True, **DATE, **variables) == text


def test_thinking_of_earlier_turns_is_dropped_as_transformers_drops_it(backend: tokenizers.Tokenizer) -> None:
    shape = SHAPES["qwen3"]
    for key in ("reasoning_content", "thinking", "reasoning"):
        messages = [{**message, key: "Hm.\n"} if message["role"] == "assistant" else message for message in TURN + MORE]
        ids, mask = theirs(shape, backend, messages, None)
        example = encode_chat(chat_of(shape, backend, shape.source), messages)
        assert example.ids.tolist() == ids
        assert example.learn.tolist() == [bool(learnt) for learnt in mask]
        assert chat_of(shape, backend, shape.source).tokenizer.decode(ids).count("Hm.") == 1
        bare = chat_of(shape, backend, shape.bare)
        with pytest.raises(DataError, match=r"an example: the chat template is not prefix-stable at message 1: .*Hm\."):
            encode_chat(bare, messages)
        last = encode_chat(bare, messages, turns="last")
        assert bare.tokenizer.decode(last.ids[last.learn]) == "<think>\nHm.\n</think>\n\nAny time.<|im_end|>"


def test_keys_without_a_value_are_left_out_as_transformers_does(backend: tokenizers.Tokenizer) -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools is none }}{{ documents is none }}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = tokenizer.apply_chat_template(TOOL_TURN, chat_template=source, tokenize=False)
    assert ChatTemplate(source=source).render(TOOL_TURN) == text
    assert "null" not in text


def test_a_folder_of_transformers_is_read_and_one_of_ours_is_read_by_transformers(
    backend: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    shape = SHAPES["llama2"]
    folder = folder_of(shape, backend, tmp_path / "theirs")
    template = load_chat_template(folder)
    assert template.source == shape.source
    assert template.special_tokens["bos_token"] == "<s>"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert template.render(TURN) == tokenizer.apply_chat_template(TURN, tokenize=False)
    assert np.array_equal(
        encode_chat(load_chat(folder), TURN).ids, tokenizer.apply_chat_template(TURN, return_dict=True)["input_ids"]
    )
    own = train_tokenizer(["What is up?"], vocab_size=300, extra_special_tokens=CHATML_TOKENS)
    save_tokenizer(own, tmp_path / "ours")
    save_chat_template(chatml(own).template, tmp_path / "ours")
    back = PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    found = back.apply_chat_template(TURN + MORE, return_dict=True, return_assistant_tokens_mask=True)
    example = encode_chat(chatml(own), TURN + MORE)
    assert found["input_ids"] == example.ids.tolist()
    assert found["assistant_masks"] == example.learn.tolist()


def test_templates_in_the_configuration_are_found_by_name(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "</s>"}, "chat_template": [{"name": "tool_use", "template": "T{{ eos_token }}"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path, name="tool_use").render(TURN) == "T</s>"
    with pytest.raises(
        DataError, match=r"has no chat template 'default', only \['tool_use'\]\. Name a folder that has"
    ):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_chat_template(tmp_path).render(TURN) == "J"


def test_emoji_at_the_end_of_an_answer_is_learnt_to_its_last_byte(backend: tokenizers.Tokenizer) -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    chat = chat_of(SHAPES["qwen2"], backend, source)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b🦀"}]
    example = encode_chat(chat, messages)
    assert chat.tokenizer.decode(example.ids[example.learn]) == "ab🦀"


def test_end_of_turn_is_learnt_as_asked(backend: tokenizers.Tokenizer) -> None:
    inside = SHAPES["qwen2"].source
    outside = inside.replace(
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}",
        "{{ message.content }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert outside != inside
    with_end, without = (
        encode_chat(chat_of(SHAPES["qwen2"], backend, source), TURN + MORE) for source in (inside, outside)
    )
    assert with_end.learn.sum() == without.learn.sum() + 3
    for source in (inside, outside, SHAPES["qwen2"].bare):
        chat = chat_of(SHAPES["qwen2"], backend, source)
        assert np.array_equal(encode_chat(chat, TURN + MORE, end_of_turn="learn").learn, with_end.learn)
        assert np.array_equal(encode_chat(chat, TURN + MORE, end_of_turn="ignore").learn, without.learn)


def test_a_message_cannot_fake_a_turn_unless_allowed(backend: tokenizers.Tokenizer) -> None:
    chat = chat_of(SHAPES["qwen2"], backend, SHAPES["qwen2"].source)
    messages = [{"role": "user", "content": "x<|im_end|>"}, *TURN[1:]]
    with pytest.raises(
        DataError, match=r"a:3: message 0 \(user\) contains the control token '<\|im_end\|>', which would"
    ):
        encode_chat(chat, messages, source="a:3")
    allowed = Chat(tokenizer=chat.tokenizer, template=chat.template, control_tokens=True)
    assert encode_chat(allowed, messages).ids.tolist() == theirs(SHAPES["qwen2"], backend, messages, None)[0]
    assert chat.tokenizer.encode("<|im_end|>") != [chat.tokenizer.eos_id]  # the shared backend is as it was


def test_templates_are_sandboxed() -> None:
    for source, text in [
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{% set ns = namespace(_a=1) %}", "a namespace cannot hold '_a'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'|unsafe"),
        ("{{ raise_exception('not so') }}", "the chat template: refuses this chat: not so. Change the chat or"),
        ("{{ messages[7].role }}", "refuses this chat: "),
        ("{% if %}", "the chat template: not a chat template: "),
    ]:
        with pytest.raises(DataError, match=text):
            ChatTemplate(source=source).render(TURN)
    assert ChatTemplate(source="{{ messages[0].x }}").render([{"role": "user", "x": {1, 2}}]) == "<set>"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "the chat has no messages"),
        (
            [*TURN, SYSTEM],
            "message 2 is from 'system' after assistant, where user is expected. Put the messages in order",
        ),
        ([TURN[1]], "message 0 is from 'assistant' first, where developer or system or user is expected"),
        ([TURN[0], TURN[0]], "message 1 is from 'user' after user, where assistant is expected"),
        ([*TURN, {"role": "tool", "content": ""}], "message 2 is from 'tool' after assistant, where user is expected"),
        ([*TOOL_TURN[:2], TURN[0]], "message 2 is from 'user' after a call of a tool, where tool is expected"),
        ([{"content": "x"}], "message 0 has no role: {'content': 'x'}. Write"),
    ],
)
def test_roles_out_of_order_are_refused(messages: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(DataError, match=text):
        check_roles(messages)
    check_roles([SYSTEM, *TURN, *TOOL_TURN])
    assert CALL


def test_a_chat_without_an_answer_is_refused(backend: tokenizers.Tokenizer) -> None:
    chat = chat_of(SHAPES["qwen2"], backend, SHAPES["qwen2"].source)
    with pytest.raises(DataError, match="c:9: the chat has no message from 'assistant' to learn. Drop it"):
        encode_chat(chat, TURN[:1], source="c:9")
    with pytest.raises(
        DataError, match="<\\|im_start\\|> and <\\|im_end\\|>, which the tokenizer does not have. Train it"
    ):
        chatml(train_tokenizer(["x"], vocab_size=300))
