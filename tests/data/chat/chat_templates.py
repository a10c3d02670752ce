"""Ten chat templates in the shapes that public models use, written for these tests, and chats to render with them.

Each marks its answers with {% generation %}, end of turn included; `bare` takes the marks out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHATML = """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nBe of use.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

INST_SYS = """\
{% if messages[0]['role'] == 'system' %}
    {% set turns = messages[1:] %}{% set ns = namespace(head='<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n') %}
{% else %}
    {% set turns = messages %}{% set ns = namespace(head='') %}
{% endif %}
{% for message in turns %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('user and assistant have to take turns') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + ns.head + message['content'].strip() + ' [/INST]' }}{% set ns.head = '' %}
    {% else %}
        {% generation %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}
        {%- if 'tool_calls' in message %}
            {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {%- else %}
            {{- message.content | trim }}
        {%- endif %}
        {{- '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

INST_TOOLS = """\
{%- set turns = messages if messages[0].role != 'system' else messages[1:] %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.first %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and messages[0].role == 'system' and loop.first %}
            {{- '[INST] ' + messages[0].content + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {%- if message.tool_calls is defined and message.tool_calls %}
            {{- '[TOOL_CALLS] [' }}
            {%- for call in message.tool_calls %}
                {{- call.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}
            {%- endfor %}
            {{- ']' + eos_token }}
        {%- else %}
            {{- ' ' + message.content | trim + eos_token }}
        {%- endif %}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}"""

TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' }}
{%- if role == 'model' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PIPES_END = """\
{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' -}}
{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

PIPES_EOS = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' -}}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

FULLWIDTH = """\
{%- set ns = namespace(system='', first=true) -%}
{%- for message in messages %}{% if message.role == 'system' %}
{%- if ns.first %}{%- set ns.system = message.content %}{%- set ns.first = false %}
{%- else %}{%- set ns.system = ns.system + '\\n\\n' + message.content %}{%- endif %}{% endif %}{% endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}{% endif %}
{%- if message.role == 'assistant' %}
{{- '<｜Assistant｜>' }}
{%- generation %}{{- message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endgeneration %}
{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}"""

THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}{% for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.reasoning_content is string and loop.index0 > ns.asked %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{% endif %}
{%- if call.function %}{%- set call = call.function %}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

NAMED_TURNS = """\
{%- macro turn(who, text) %}{{ '<|START_OF_TURN_TOKEN|><|' + who + '_TOKEN|>' + text }}{% endmacro %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set said = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set said = 'You are Command.' %}{%- set turns = messages %}{% endif %}
{{- turn('SYSTEM', said) }}
{%- if tools %}{{- '\\n## Tools\\n' + tools | tojson(sort_keys=True, separators=(',', ':')) }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for message in turns %}
{%- set content = message['content'] | default('', true) %}
{%- if message['role'] == 'user' %}{{- turn('USER', content.strip()) + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'tool' %}{{- turn('SYSTEM', '<results>' + content + '</results>') + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'assistant' %}
{{- turn('CHATBOT', '') }}
{%- generation %}{{- content.strip() }}
{%- if message.tool_calls %}{{- 'Action: ' + message.tool_calls | map(attribute='function') | list | tojson }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}{%- endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- turn('CHATBOT', '') }}{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    source: str
    bos: str | None = None
    eos: str
    system: bool = True
    tools: bool = False

    @property
    def bare(self) -> str:
        """Without the marks: comments in their place take the same white space."""
        source = self.source
        for mark in ("generation", "endgeneration"):
            source = source.replace("{%- " + mark + " %}", "{#- #}").replace("{% " + mark + " %}", "{# #}")
        assert "generation %" not in source
        return source


SHAPES = {
    "qwen2": Shape(source=CHATML, eos="<|im_end|>"),
    "llama2": Shape(source=INST_SYS, bos="<s>", eos="</s>"),
    "llama3": Shape(source=HEADERS, bos="<|begin_of_text|>", eos="<|eot_id|>", tools=True),
    "mistral": Shape(source=INST_TOOLS, bos="<s>", eos="</s>", tools=True),
    "gemma": Shape(source=TURNS, bos="<bos>", eos="<eos>", system=False),
    "phi3": Shape(source=PIPES_END, bos="<s>", eos="<|end|>"),
    "zephyr": Shape(source=PIPES_EOS, bos="<s>", eos="</s>"),
    "deepseek": Shape(source=FULLWIDTH, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>"),
    "qwen3": Shape(source=THINKING, eos="<|im_end|>", tools=True),
    "command-r": Shape(source=NAMED_TURNS, bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", tools=True),
}

SPECIAL = [
    *("<s>", "</s>", "<bos>", "<eos>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<BOS_TOKEN>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    *(
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ),
]

SYSTEM = {"role": "system", "content": "Answer in one line; <b>no</b> 'HTML' & such."}
TURN = [
    {"role": "user", "content": "Who wrote naïve 東京 🙂?"},
    {"role": "assistant", "content": "No one has, so far."},
]
MORE = [
    {"role": "user", "content": "  Three lines:\n\n1\n2 "},
    {"role": "assistant", "content": "One\n  two\n\nthree 🙂"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Any time."},
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
TOOL_TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "<grey>"}'},
    {"role": "assistant", "content": "Grey."},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells 'the' weather & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def chats_of(shape: Shape) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Chats that a shape takes: name -> (messages, tools)."""
    chats: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
        "one turn": (TURN, None),
        "three turns": (TURN + MORE, None),
    }
    if shape.system:
        chats["system"] = ([SYSTEM, *TURN, *MORE], None)
    if shape.tools:
        chats["tools"] = ([*TURN, *TOOL_TURN, *MORE], TOOLS)
    return chats
