"""RRM's triplets: the fourteen of the paper, for every prompt, always of three different prompts."""

from __future__ import annotations

from collections import Counter

import pytest

from meshkit.data.preference.pairs import cross_prompt_pairs
from meshkit.errors import DataError

# As published: better and worse answers to prompt i, from pairs i, j and k; w is chosen, l rejected.
BETTER = ["wi wj", "wi wk", "wi lj", "wi lk", "li wj", "li wk", "li lj", "li lk"]
TIES = ["wj lj", "wk lk", "wj wk", "wj lk", "wk lj", "lj lk"]


@pytest.mark.parametrize("pairs", [3, 4, 11])
def test_every_prompt_gets_the_fourteen_of_the_paper(pairs: int) -> None:
    found = list(cross_prompt_pairs(pairs, seed=0))
    assert Counter(pair.prompt for pair in found) == dict.fromkeys(range(pairs), 14)
    for prompt in range(pairs):
        own = [pair for pair in found if pair.prompt == prompt]
        others = sorted({answer.pair for pair in own for answer in (pair.better, pair.worse)} - {prompt})
        assert len(others) == 2
        letters = {prompt: "i", others[0]: "j", others[1]: "k"}
        named = {
            (
                pair.tie,
                frozenset(
                    f"{a.side[0].replace('c', 'w').replace('r', 'l')}{letters[a.pair]}"
                    for a in (pair.better, pair.worse)
                ),
            )
            for pair in own
        }
        expected = {(False, frozenset(text.split())) for text in BETTER} | {
            (True, frozenset(text.split())) for text in TIES
        }
        assert named == expected
        assert all(pair.better.pair == prompt != pair.worse.pair for pair in own if not pair.tie)
        assert {pair.preference for pair in own if pair.tie} == {0.5} and {p.preference for p in own if not p.tie} == {
            1.0
        }


def test_a_seed_gives_the_same_pairs_and_another_seed_others() -> None:
    assert list(cross_prompt_pairs(9, seed=1)) == list(cross_prompt_pairs(9, seed=1))
    assert list(cross_prompt_pairs(9, seed=1)) != list(cross_prompt_pairs(9, seed=2))


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="2 pairs; a prompt borrows answers from two others"):
        list(cross_prompt_pairs(2, seed=0))
