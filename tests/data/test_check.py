"""Each lint finds its own mistake, names the first example that has it, and finds nothing in sound data."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from meshkit.data import Example, Pair, Tokenizer, Unit, check_examples, encode_completion, fit
from meshkit.data.check import ADVICE
from meshkit.errors import DataError


def sound(tokenizer: Tokenizer, source: str = "f:1") -> Example:
    return encode_completion(tokenizer, "def law(", "x):\n return x", source=source)


def broken(tokenizer: Tokenizer) -> dict[str, Unit]:
    """Problem -> a unit that has it and no other."""
    good = sound(tokenizer, "f:2")
    double = encode_completion(tokenizer, "", "x", source="f:2")
    end_masked = good.learn.copy()
    end_masked[-1] = False
    return {
        "outside_vocabulary": replace(good, ids=np.where(good.learn & (good.ids > 1), 301, good.ids)),
        "double_bos": replace(double, ids=np.insert(double.ids, 0, 0), learn=np.insert(double.learn, 0, False)),
        "nothing_learnt": encode_completion(tokenizer, "def", "", source="f:2"),
        "end_masked": replace(good, learn=end_masked),
        "end_missing": encode_completion(tokenizer, "def", " law", eos=False, source="f:2"),
        "identical_pair": Pair(good, good),
        "other_prompt": Pair(good, encode_completion(tokenizer, "return ", "x")),
    }


@pytest.mark.parametrize("problem", [name for name in ADVICE if name != "pad_is_end"])
def test_each_problem_is_found_named_and_can_be_allowed(problem: str, tokenizer: Tokenizer) -> None:
    unit = broken(tokenizer)[problem]
    data: list[Unit] = [sound(tokenizer), unit]
    with pytest.raises(
        DataError, match=rf"^1 of [23] .*first f:2\. {re.escape(ADVICE[problem])} Pass allow=\('{problem}',"
    ):
        check_examples(data, tokenizer)
    report = check_examples(data, tokenizer, allow=(problem,))
    assert report.problems == {problem: 1}


def test_texts(tokenizer: Tokenizer) -> None:
    bad = broken(tokenizer)
    for name, text in [
        (
            "outside_vocabulary",
            "1 of 1 have ids outside the vocabulary, first f:2. Encode them with the model's own tokenizer",
        ),
        (
            "double_bos",
            "1 of 1 begin with two BOS, first f:2. The template writes one and the prompt or the tokenizer another",
        ),
        (
            "nothing_learnt",
            "1 of 1 have nothing to learn, first f:2. Their completions are empty, or all of their tokens are",
        ),
        (
            "end_masked",
            "1 of 1 have the end of their last answer masked, first f:2. The model would never learn to stop: pass",
        ),
        (
            "end_missing",
            "1 of 1 have a last answer that does not end, first f:2. The model would never learn to stop: end",
        ),
        (
            "identical_pair",
            "1 of 1 are identical pairs, first f:2. Chosen and rejected are the same tokens, so nothing",
        ),
        (
            "other_prompt",
            "1 of 1 are pairs with different prompts, first f:2. Chosen and rejected answer different prompts",
        ),
    ]:
        with pytest.raises(DataError, match=text):
            check_examples([bad[name]], tokenizer)
    with pytest.raises(
        DataError, match="1 of 1 are padded with an id that ends answers, first id 1. Whatever masks padding"
    ):
        check_examples([sound(tokenizer)], tokenizer, pad_id=tokenizer.eos_id)
    with pytest.raises(DataError, match=r"allow=\['eos'\]: no such problem. Give some of \['outside_vocabulary'"):
        check_examples([], tokenizer, allow=("eos",))


def test_sound_data_is_counted(tokenizer: Tokenizer) -> None:
    one, two = sound(tokenizer), encode_completion(tokenizer, "def law(", "y)")
    report = check_examples([one, Pair(one, two)], tokenizer, pad_id=7)
    assert report.problems == {}
    assert (report.units, report.examples, report.truncated) == (2, 3, 0)
    assert report.tokens == 2 * len(one) + len(two)
    assert report.longest == len(one) + len(two)
    assert report.learnt == int(2 * one.learn.sum() + two.learn.sum())
    assert str(report) == (
        f"2 units, 3 examples, {report.tokens} tokens, {report.learnt} learnt, longest unit {report.longest}, 0 truncated"
    )


def test_truncated_answers_are_counted_and_need_no_end(tokenizer: Tokenizer) -> None:
    cut = fit([sound(tokenizer)], seq_len=len(sound(tokenizer)) - 1, truncate="right")
    report = check_examples(cut, tokenizer)
    assert (report.truncated, report.problems) == (1, {})


def test_the_worst_problem_comes_first_and_the_ends_may_be_given(tokenizer: Tokenizer) -> None:
    bad = list(broken(tokenizer).values())
    with pytest.raises(DataError, match="1 of 9 have ids outside"):
        check_examples(bad, tokenizer)
    assert set(check_examples(bad, tokenizer, allow=tuple(ADVICE)).problems) == ADVICE.keys() - {"pad_is_end"}
    with pytest.raises(DataError, match="1 of 1 have a last answer that does not end"):
        check_examples([sound(tokenizer)], tokenizer, end_ids={5})
