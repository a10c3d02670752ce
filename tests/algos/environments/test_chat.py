"""`chat_turns`: the ids between two answers are those that the template has there, for templates of several families."""

from __future__ import annotations

import pytest

from meshkit.algos.environments import chat_turns
from meshkit.data import CHATML_TOKENS, Chat, ChatTemplate, chatml, train_tokenizer
from meshkit.errors import DataError

TOKENIZER = train_tokenizer(
    ["a few words to say and to answer, system user assistant tool <s> </s> [INST] 0 1 2"] * 4,
    vocab_size=300,
    extra_special_tokens=CHATML_TOKENS,
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
FORGETS = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}{{ '...' }}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [None, INST], ids=["chatml", "inst"])
@pytest.mark.parametrize("text", ["warmer", "two\nlines ", ""])
def test_an_answer_and_what_follows_it_are_the_rendered_chat(template: str | None, text: str) -> None:
    chat = chatml(TOKENIZER) if template is None else Chat(tokenizer=TOKENIZER, template=ChatTemplate(source=template))
    encode = chat_turns(chat, stop="<|im_end|>")
    asked = [{"role": "user", "content": "say a number"}]
    prompt = chat.encode_rendered(chat.template.render(asked, add_generation_prompt=True)).ids
    answer = [*chat.encode_rendered("7" if template is None else " 7").ids, TOKENIZER.backend.token_to_id("<|im_end|>")]
    whole = [*asked, {"role": "assistant", "content": "7"}, {"role": "user", "content": text}]
    rendered = chat.template.render(whole, add_generation_prompt=True)
    assert TOKENIZER.decode([*prompt, *answer, *encode(text)]) == TOKENIZER.decode(chat.encode_rendered(rendered).ids)


def test_a_template_that_forgets_answers_and_control_tokens_are_refused() -> None:
    forgets = Chat(tokenizer=TOKENIZER, template=ChatTemplate(source=FORGETS))
    with pytest.raises(DataError, match="writes an answer in another way once a message follows it"):
        chat_turns(forgets, stop="<|im_end|>")("warmer")
    with pytest.raises(DataError, match="contains the control token"):
        chat_turns(chatml(TOKENIZER))("<|im_end|>")
