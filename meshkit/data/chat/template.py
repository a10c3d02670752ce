"""Chat templates: chats to text with a model's own Jinja template, as transformers renders it.

A chat is a list of messages, dicts with a role, and content, tool_calls or whatever else the template reads. A template is
Jinja: it runs sandboxed, in a process with limits of time and memory, sees plain JSON values only, and may mark what the
model says with {% generation %} blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from meshkit.core import read_file
from meshkit.core.digests import add_digests, check_digests
from meshkit.core.read_file import read_text
from meshkit.data.chat.jinja import CompiledTemplate
from meshkit.data.text.tokenizer import Tokenizer, load_tokenizer
from meshkit.errors import DataError

Message = Mapping[str, Any]
"""role, and content (text, or a list of parts), tool_calls, name, reasoning_content, ...: what the template reads"""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""the special tokens that `CHATML` writes: `train_tokenizer(..., extra_special_tokens=CHATML_TOKENS)`"""

# <|im_end|> is inside of the generation block, so a model learns to end its turn; the newline after it is outside,
# since generation stops before it.
CHATML = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{- '\\n' + (call.function or call) | tojson }}{% endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""a template for tokenizers that come without one; each turn is `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`"""

_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A Jinja chat template. `special_tokens` are variables in it, like bos_token; `where` names it in errors."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    where: str = "the chat template"

    @cached_property
    def _compiled(self) -> CompiledTemplate:
        return CompiledTemplate(self.source, self.where)

    @property
    def marks_answers(self) -> bool:
        """Whether it says itself, with {% generation %} blocks, which part of a chat the model writes."""
        return self._compiled.marks_answers

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a chat.

        tools: JSON schemas. add_generation_prompt: end with the header of an answer. variables: for the template, like
        enable_thinking=False; they win over special tokens.
        Raises: DataError where the template fails or refuses the chat.
        """
        text, _ = self.render_spans(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        return text

    def render_spans(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and (start, end) in characters of each {% generation %} block, in order."""
        if tools is not None and not isinstance(tools, Sequence):
            raise DataError(f"{self.where}: tools are {tools!r:.60}. Give a list of them.")
        try:
            seen = [_message(message) for message in messages]
            tools = plain(list(tools)) if tools is not None else None
        except RecursionError:
            raise DataError(f"{self.where}: the chat is nested too deeply to be rendered. Drop it.") from None
        values = {
            # transformers passes it to every template. Arguments of ours come last, so that no variable replaces the
            # messages.
            "documents": None,
            **self.special_tokens,
            **plain(variables),
            "messages": seen,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._compiled.render(values)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A tokenizer and a template: what `encode_chat` needs. `variables` go to every rendering, like enable_thinking.

    control_tokens: whether a message may contain a special token's text, which then becomes that token. By default it is
    refused, for it could end a turn.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    variables: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: bool = False

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """A copy for which special tokens in a text are tokens: in a rendered chat the template wrote them."""
        # By way of JSON, since the flag is the backend's own state, and `Tokenizer` needs it the other way.
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The special token that the template ends an answer with, as `<|im_end|>`; none where it writes none there."""
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text = self.template.render(turns, **self.variables)
        except DataError:  # it wants chats of another kind
            return ()
        encoding, end = self.encode_rendered(text), text.rfind("answer") + len("answer")
        after = [id for id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if start >= end]
        return tuple([id for id in after if id in self.special_ids][:1])

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return tuple(token.content for token in added.values() if token.special)

    def encode_rendered(self, text: str) -> tokenizers.Encoding:
        """Ids and offsets of a rendered chat: special tokens count as such, and none is added.

        Raises: DataError for a text with half of a UTF-16 pair, which JSON may hold and Unicode does not.
        """
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except TypeError:
            raise DataError("a chat has half of a UTF-16 pair, as '\\ud800', which is no character. Drop it.") from None

    def check_text(self, messages: Sequence[Message]) -> None:
        """Raises: DataError if a message holds the text of a special token and that is not allowed."""
        if self.control_tokens:
            return
        for number, message in enumerate(messages):
            # In all that the template sees: tool calls and reasoning too.
            token = _find(_message(message), self._special_texts)
            if token is not None:
                raise DataError(
                    f"message {number} ({message.get('role')}) contains the control token {token!r}, which would become "
                    "that token. Remove it from the text, or pass Chat(control_tokens=True) if it is meant."
                )


def chatml(tokenizer: Tokenizer) -> Chat:
    """The default template, `CHATML`, for a tokenizer that comes without one.

    Raises: DataError if the tokenizer lacks the two special tokens of it.
    """
    missing = [token for token in CHATML_TOKENS if tokenizer.backend.token_to_id(token) is None]
    if missing:
        raise DataError(
            f"the default chat template writes {' and '.join(missing)}, which the tokenizer does not have. Train it with "
            "extra_special_tokens=CHATML_TOKENS, or give a template of your own."
        )
    return Chat(tokenizer=tokenizer, template=ChatTemplate(source=CHATML, where="CHATML"))


def load_chat_template(folder: str | os.PathLike[str], *, name: str = "default") -> ChatTemplate:
    """The template of a Hugging Face folder, with the folder's special tokens.

    Read from chat_template.jinja, or additional_chat_templates/NAME.jinja, or else from tokenizer_config.json.
    name: where a folder has several, such as "tool_use".
    Raises: DataError if the folder has no such template.
    """
    folder = Path(folder)
    file = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
    check_digests(
        folder, [str(file.relative_to(folder)), "tokenizer_config.json", "special_tokens_map.json"], DataError
    )
    config = read_json_object(folder / "tokenizer_config.json")
    tokens = {**read_json_object(folder / "special_tokens_map.json"), **config}
    special = {key: text for key, value in tokens.items() if key.endswith("_token") and (text := _content(value))}
    # Newer versions of transformers write this file, older ones the field of tokenizer_config.json; where both are,
    # the file wins, as there.
    if file.exists():
        return ChatTemplate(source=read_text(file, DataError), special_tokens=special, where=str(file))
    templates = config.get("chat_template")
    if isinstance(templates, list):
        rows = [each for each in templates if isinstance(each, dict)]
        templates = {each["name"]: each["template"] for each in rows if {"name", "template"} <= each.keys()}
    elif isinstance(templates, str):
        templates = {"default": templates}
    if not isinstance(templates, dict):
        templates = {}
    if not isinstance(templates.get(name), str):
        available = f"only {sorted(templates)}" if templates else "none"
        raise DataError(
            f"{folder}: has no chat template {name!r}, {available}. Name a folder that has one, write "
            "ChatTemplate(source=...), or use chatml(tokenizer)."
        )
    return ChatTemplate(source=templates[name], special_tokens=special, where=f"{folder / 'tokenizer_config.json'}")


def load_chat(folder: str | os.PathLike[str], *, name: str = "default", **variables: Any) -> Chat:
    """The tokenizer and the template of a Hugging Face folder. variables: for every rendering, like enable_thinking=False."""
    template = load_chat_template(folder, name=name)
    return Chat(tokenizer=load_tokenizer(folder), template=template, variables=variables)


def save_chat_template(template: ChatTemplate, folder: str | os.PathLike[str]) -> None:
    """Write chat_template.jinja, which transformers reads from a tokenizer's folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chat_template.jinja"
    file.write_text(template.source, encoding="utf-8")
    add_digests(folder, {file.name: file})


def check_roles(messages: Sequence[Message]) -> None:
    """Roles in an order that chats have: system first, then user and assistant in turn, tool results after their call.

    Raises: DataError naming the first message out of order.
    """
    if not messages:
        raise DataError("the chat has no messages. Drop it, or name the field that holds them.")
    after: dict[str | None, set[str]] = {
        None: {"system", "developer", "user"},
        "system": {"user"},
        "developer": {"user"},
        "user": {"assistant"},
        "assistant": {"user"},
        "calling": {"tool"},
        "tool": {"tool", "assistant"},
    }
    previous: str | None = None
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise DataError(
                f"message {number} has no role: {str(message)[:80]}. Write {{'role': ..., 'content': ...}}."
            )
        if role not in after[previous]:
            expected = " or ".join(sorted(after[previous]))
            where = (
                "first" if previous is None else f"after {'a call of a tool' if previous == 'calling' else previous}"
            )
            raise DataError(
                f"message {number} is from {role!r} {where}, where {expected} is expected. "
                "Put the messages in order, or pass roles='any'."
            )
        previous = "calling" if role == "assistant" and message.get("tool_calls") else role


def plain(value: Any) -> Any:
    """`value` in JSON's own types, which is all a template may see: no method of a richer object is in its reach."""
    # type() and not isinstance: a subclass of str may have methods of its own, which a template could call; such
    # values are made plain below.
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    return read_file.read_json_object(path, DataError) if path.exists() else {}


def _message(message: Message) -> dict[str, Any]:
    """The message as the template sees it: no key without a value, and reasoning under each name that templates know."""
    # Data and templates name reasoning differently, and a template that reads another name would drop it without a
    # word. Null keys go: see `_without_null` in records.py.
    seen = {key: value for key, value in plain(message).items() if value is not None}
    reasoning = next((seen[name] for name in _REASONING if name in seen), None)
    return seen if reasoning is None else {"thinking": reasoning, **seen, "reasoning_content": reasoning}


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _find(value: Any, texts: Sequence[str]) -> str | None:
    if isinstance(value, str):
        return next((text for text in texts if text in value), None)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((match for item in items if (match := _find(item, texts)) is not None), None)
