"""Tasks of the standard library are real code, the same every time, and no file is on both sides."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from meshkit.data import (
    Corpus,
    Tokenizer,
    check_examples,
    encode_pair,
    find_corpus,
    function_tasks,
    library_functions,
    preference_tasks,
    question_tasks,
    standard_library,
)
from meshkit.errors import DataError


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """A part of the standard library: quick to read."""
    whole = standard_library()
    return Corpus(files=tuple(file for file in whole.files if file[0][0] in "abcj")[:90])


def file_of(source: str) -> str:
    return source.rsplit(":", 1)[0]


def test_head_and_body_are_the_function(corpus: Corpus) -> None:
    tasks = function_tasks(corpus=corpus)
    assert len(tasks.train) > 100
    for record in tasks.train + tasks.held_out:
        prompt, completion = record.fields["prompt"], record.fields["completion"]
        if not prompt.startswith(("def ", "async def ")):
            continue  # a comment or string at column 0 keeps the indentation of a method
        function = ast.parse(prompt + completion).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function)
        head = ast.parse(prompt).body[0]
        assert isinstance(head, ast.FunctionDef | ast.AsyncFunctionDef)
        assert len(head.body) == 1
        path = dict(corpus.files)[file_of(record.source)]
        assert textwrap.dedent(completion).strip().splitlines()[0].strip() in path.read_text()
        assert len((prompt + completion).encode()) <= 1200


def test_a_form_feed_moves_no_line_of_the_functions_after_it(tmp_path: Path) -> None:
    code = 'def first():\n    """One."""\n    return 1\n{}\ndef second():\n    """Two."""\n    return 2\n'
    found = []
    for name, between in (("plain", ""), ("paged", "\f"), ("noted", "# a\u2028b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text(code.format(between))
        found.append([(each.head, each.body) for each in library_functions(corpus=find_corpus(tmp_path / name))])
    assert found[0] == [
        ('def first():\n    """One."""\n', "    return 1\n"),
        ('def second():\n    """Two."""\n', "    return 2\n"),
    ]
    assert found[1] == found[2] == found[0]


def test_no_file_and_no_text_is_on_both_sides(corpus: Corpus) -> None:
    for tasks in (function_tasks(corpus=corpus), question_tasks(corpus=corpus), preference_tasks(corpus=corpus)):
        files = [{file_of(record.source) for record in half} for half in (tasks.train, tasks.held_out)]
        assert files[0] and files[1]
        assert not files[0] & files[1]
        texts = [{str(record.fields) for record in half} for half in (tasks.train, tasks.held_out)]
        assert not texts[0] & texts[1]


def test_questions_are_chats_of_one_or_two_turns(corpus: Corpus) -> None:
    tasks = question_tasks(corpus=corpus)
    for record in tasks.train:
        messages = record.fields["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message["content"].strip() for message in messages)
    assert {len(record.fields["messages"]) for record in tasks.train} == {2, 4}


def test_preferences_differ_and_depend_on_the_seed_only(corpus: Corpus, tokenizer: Tokenizer) -> None:
    tasks = preference_tasks(corpus=corpus, seed=1)
    assert tasks == preference_tasks(corpus=corpus, seed=1)
    assert tasks != preference_tasks(corpus=corpus, seed=2)
    kinds = {record.fields["kind"] for record in tasks.train}
    assert kinds == {"mismatched", "scrambled", "reversed", "repeated"}
    bodies = {record.fields["completion"] for record in function_tasks(corpus=corpus).train}
    for record in tasks.train:
        row = record.fields
        assert row["chosen"] in bodies
        assert row["rejected"] != row["chosen"]
        assert (row["kind"] == "mismatched") <= (row["rejected"] in bodies)
        if row["kind"] in ("scrambled", "reversed"):
            assert sorted(row["rejected"].split()) == sorted(row["chosen"].split())
    pairs = [encode_pair(record.fields, tokenizer, source=record.source) for record in tasks.train[:50]]
    assert check_examples(pairs, tokenizer).problems == {}
    assert {r.fields["kind"] for r in preference_tasks(corpus=corpus, kinds=("reversed",)).train} == {"reversed"}
    every = preference_tasks(corpus=corpus, kinds=("scrambled", "reversed"), every=True).train
    both = [r for kind in ("scrambled", "reversed") for r in every if r.fields["kind"] == kind]
    assert len(both) == len(every) > len(preference_tasks(corpus=corpus, kinds=("scrambled", "reversed")).train)


def test_what_makes_no_tasks_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"kinds=\['worse'\]: unknown or none. Give some of mismatched, scrambled"):
        preference_tasks(corpus=corpus, kinds=("worse",))
    with pytest.raises(DataError, match="held_out=1: not a part of the files"):
        function_tasks(corpus=corpus, held_out=1)
    (tmp_path / "a.py").write_text("def f(:\n")  # not this version's Python: passed over
    assert function_tasks(corpus=find_corpus(tmp_path)).train == []
