"""Chat templates that compute for ever, fill the memory or nest deeply are ended and refused; the next one renders."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from meshkit.data import ChatTemplate, load_chat_template
from meshkit.data.chat import jinja
from meshkit.errors import DataError
from tests.world import CONTEXT, fork

SOUND = ChatTemplate(source="{% for m in messages %}{{ m.content }}{% endfor %}")
CHAT = [{"role": "user", "content": "hello"}]
LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LOOPS, "has not rendered this chat within 1 s, and was ended"),
        ("{{ 10 ** (10 ** 9) }}", "has not rendered this chat within 1 s, and was ended"),
        (
            "{% set ns = namespace(x=1) %}{% for a in range(99999) %}{% set ns.x = ns.x * 99 ** 999 %}{% endfor %}",
            "1 s",
        ),
        ("{{ 'a' * 10 ** 10 }}", "this chat takes more than"),
        ("{{ 'a'.ljust(10 ** 11) }}", "this chat takes more than"),
        ("{{ '%100000000000d' % 1 }}", "this chat takes more than|refuses this chat"),
        ("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "this chat takes more than"),
        (
            "{% set ns = namespace(x='aaaa') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "takes more than|has not rendered this chat within 1 s",  # of which comes first depends on the machine
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "its macros or values are nested too deeply"),
        ("{{ 1 // 0 }}", "refuses this chat"),
    ],
)
def test_what_takes_too_much_is_ended(monkeypatch: pytest.MonkeyPatch, source: str, said: str) -> None:
    monkeypatch.setattr(jinja, "LIMIT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(DataError, match=said) as refused:
        ChatTemplate(source=source, where="x/chat_template.jinja").render(CHAT)
    assert time.monotonic() - began < 10
    assert str(refused.value).startswith("x/chat_template.jinja: ")
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(jinja, "LIMIT_S", 20.0)
    assert SOUND.render(CHAT) == "hello"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ [" * 9,
        "{{" + "-" * 9999 + "1 }}",
    ],
)
def test_a_template_that_nests_deeply_is_no_template(source: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(DataError, match=r"chat_template\.jinja: (not a chat template|refuses this chat): "):
        load_chat_template(tmp_path).render(CHAT)
    assert SOUND.render(CHAT) == "hello"


def test_a_chat_that_nests_deeply_is_refused() -> None:
    deep: Any = "a"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DataError, match="nested too deeply"):
        SOUND.render([{"role": "user", "content": deep}])
    assert SOUND.render(CHAT) == "hello"


def rendered(connection: Any) -> None:
    connection.send((SOUND.render(CHAT), jinja._renderers[0]._process.pid))


def forked(connection: Any) -> None:
    rendered(connection)
    child = os.fork()
    if not child:
        rendered(connection)
        os._exit(0)
    os.waitpid(child, 0)
    rendered(connection)


def test_a_forked_child_has_a_process_of_its_own_and_none_is_left_behind() -> None:
    here, there = CONTEXT.Pipe()
    process = fork(forked, there, daemon=True)
    heard = [here.recv() for _ in range(3) if here.poll(60)]
    process.kill()
    process.join(10)
    assert [text for text, _ in heard] == ["hello"] * 3
    first, child, again = (pid for _, pid in heard)
    assert first == again != child
    until = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") and _state(pid) not in "ZX" for pid in (first, child)):
        assert time.monotonic() < until
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
