"""Pairs, labels and rewards from rows in every layout: the same prompt, and only the answer learnt."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from meshkit.data import (
    CHATML_TOKENS,
    Chat,
    Example,
    Pair,
    Tokenizer,
    augment_across_prompts,
    chatml,
    check_examples,
    encode_chat,
    encode_completion,
    encode_labelled,
    encode_pair,
    encode_steps,
    train_tokenizer,
    with_mismatches,
)
from meshkit.errors import DataError

USER = {"role": "user", "content": "Name a prime."}
GOOD = {"role": "assistant", "content": "Seven."}
BAD = {"role": "assistant", "content": "Eight, I think."}
AGAIN = {"role": "user", "content": "Another?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(
        ["Name a prime. Seven. Eight, I think. " * 9], vocab_size=330, extra_special_tokens=CHATML_TOKENS
    )


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> Chat:
    return chatml(tokenizer)


def learnt(example: Example, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(example.ids[example.learn])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    ],
)
def test_layouts_of_messages_make_one_pair(row: dict[str, Any], chat: Chat, tokenizer: Tokenizer) -> None:
    pair = encode_pair(row, chat)
    assert np.array_equal(pair.chosen.ids, encode_chat(chat, [USER, GOOD]).ids)
    assert np.array_equal(pair.rejected.ids, encode_chat(chat, [USER, BAD]).ids)
    assert [learnt(side, tokenizer) for side in pair] == ["Seven.<|im_end|>", "Eight, I think.<|im_end|>"]
    assert pair.chosen.prompt_length == pair.rejected.prompt_length
    assert check_examples([pair], tokenizer).problems == {}


def test_only_what_follows_the_common_messages_is_learnt(chat: Chat, tokenizer: Tokenizer) -> None:
    row = {"chosen": [USER, GOOD, AGAIN, GOOD], "rejected": [USER, GOOD, AGAIN, BAD]}
    assert [learnt(side, tokenizer) for side in encode_pair(row, chat)] == [
        "Seven.<|im_end|>",
        "Eight, I think.<|im_end|>",
    ]
    early = {"chosen": [USER, GOOD, AGAIN, GOOD], "rejected": [USER, BAD]}
    assert learnt(encode_pair(early, chat).chosen, tokenizer) == "Seven.<|im_end|>Seven.<|im_end|>"
    same = encode_pair({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, chat)
    assert learnt(same.chosen, tokenizer) == "Seven.<|im_end|>"


def test_text_is_encoded_as_prompt_and_completion_apart(tokenizer: Tokenizer) -> None:
    row = {"question": "Name a", "yes": " prime.", "no": "Eight", "gap": 2, "id": 7}
    pair = encode_pair(row, tokenizer, prompt="question", chosen="yes", rejected="no", scalars=("gap",), source="p:1")
    prompt = [tokenizer.bos_id, *tokenizer.encode("Name a")]
    assert pair.chosen.ids.tolist() == [*prompt, *tokenizer.encode(" prime."), tokenizer.eos_id]
    assert pair.rejected.ids.tolist() == [*prompt, *tokenizer.encode("Eight"), tokenizer.eos_id]
    assert pair.chosen.learn.tolist() == [False] * len(prompt) + [True] * (len(pair.chosen) - len(prompt))
    assert [side.scalars for side in pair] == [{"gap": 2.0}] * 2
    assert [side.source for side in pair] == ["p:1 yes", "p:1 no"]


def test_labels_are_scalars_and_prompts_may_be_in_the_messages(chat: Chat, tokenizer: Tokenizer) -> None:
    text = encode_labelled({"prompt": "Name", "completion": " a", "label": True}, tokenizer)
    assert text.scalars == {"desirable": 1.0}
    row = {"completion": [USER, GOOD, AGAIN, BAD], "label": 0}
    labelled = encode_labelled(row, chat)
    assert labelled.scalars == {"desirable": 0.0}
    assert learnt(labelled, tokenizer) == "Eight, I think.<|im_end|>"


def test_mismatches_keep_the_prompt_and_take_the_answer_before(tokenizer: Tokenizer) -> None:
    rows = [("Name", " a"), ("prime", " Seven."), ("Eight", "I think")]
    examples = [encode_completion(tokenizer, prompt, completion) for prompt, completion in rows]
    for number, (example, mismatch) in enumerate(with_mismatches(examples)):
        assert example is examples[number]
        expected = encode_completion(tokenizer, rows[number][0], rows[number - 1][1])
        assert mismatch.ids.tolist() == expected.ids.tolist()
        assert mismatch.learn.tolist() == expected.learn.tolist()


def test_pairs_across_prompts_are_those_of_the_paper(tokenizer: Tokenizer) -> None:
    rows = [("Name", " a", " b"), ("prime", " Seven", "Eight"), ("think", "I", " I")]
    pairs = [encode_pair({"prompt": p, "chosen": c, "rejected": r}, tokenizer) for p, c, r in rows]
    made = augment_across_prompts(pairs, seed=3)
    assert len(made) == 45

    def texts(pair: Pair) -> tuple[str, str, str, float]:
        prompts = {tokenizer.decode(side.ids[1 : side.prompt_length]) for side in pair}
        assert len(prompts) == 1  # both sides have the same prompt
        assert pair.chosen.scalars == pair.rejected.scalars
        chosen, rejected = (learnt(side, tokenizer).removesuffix("<|eos|>") for side in pair)
        return prompts.pop(), chosen, rejected, pair.chosen.scalars["preference"]

    for number, (prompt, good, bad) in enumerate(rows):
        found = {texts(pair) for pair in made[15 * number : 15 * number + 15]}
        foreign = [answer for other in rows if other[0] != prompt for answer in other[1:]]
        wins = {(prompt, own, answer, 1.0) for own in (good, bad) for answer in foreign}
        ties = [each for each in found if each[3] == 0.5]
        assert {frozenset(each[1:3]) for each in ties} == set(map(frozenset, combinations(foreign, 2)))
        assert len(ties) == 6 and found - set(ties) == {(prompt, good, bad, 1.0)} | wins
    assert len(augment_across_prompts(pairs, seed=3, ties=False)) == 27
    again = augment_across_prompts(pairs, seed=3)
    assert all(np.array_equal(a.rejected.ids, b.rejected.ids) for a, b in zip(made, again, strict=True))


def test_a_reward_stands_at_the_last_token_of_its_step(chat: Chat, tokenizer: Tokenizer) -> None:
    steps = ["Name a prime.\n", "Seven.\n", "Eight 🙂"]
    rewards = {"fact": [1.0, 0.5, -1.0], "tone": [0.0, 2.0, 0.0]}
    for example in (
        encode_steps(tokenizer, "Go: ", steps, rewards),
        encode_steps(chat, [USER], steps, rewards),
    ):
        for name, expected in rewards.items():
            vector = example.token_values[name]
            assert vector.sum() == sum(expected)
            so_far = ""
            for step, reward in zip(steps, expected, strict=True):
                so_far += step
                if reward:
                    (at,) = np.flatnonzero(vector == reward)
                    assert tokenizer.decode(example.ids[example.learn][: at + 1 - example.prompt_length]) == so_far
        assert example.learn[np.flatnonzero(example.token_values["fact"])].all()
    text = encode_completion(tokenizer, "Go: ", "".join(steps))
    assert encode_steps(tokenizer, "Go: ", steps, rewards).ids.tolist() == text.ids.tolist()


def test_rows_that_make_no_pair_are_refused(chat: Chat, tokenizer: Tokenizer) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"}
    messages = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    for row, encoder, changes, text in [
        (
            {"prompt": "a", "chosen": "b"},
            tokenizer,
            {},
            r"f:3: has no field 'rejected', only \['chosen', 'prompt'\]\. Name",
        ),
        ({"chosen": "b", "rejected": "c"}, tokenizer, {}, "f:3: has no field 'prompt', and 'chosen' is text, of which"),
        (good, chat, {}, "f:3 chosen: is text, not messages. Give a Tokenizer"),
        (messages, tokenizer, {}, "f:3 chosen: is messages, and a tokenizer alone cannot write them. Give a Chat"),
        ({**messages, "prompt": "a"}, chat, {}, "f:3 chosen: prompt and completion are str and list. Give two texts"),
        (good, tokenizer, {"scalars": ("margin",)}, "f:3: 'margin' is str, not a number"),
        ({**messages, "chosen": [AGAIN]}, chat, {}, "f:3 chosen: message 1 is from 'user' after user, where assistant"),
    ]:
        with pytest.raises(DataError, match=text):
            encode_pair(row, encoder, source="f:3", **changes)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="f:4: 'label' is 'yes', neither true nor false"):
        encode_labelled({"prompt": "a", "completion": "b", "label": "yes"}, tokenizer, source="f:4")
    with pytest.raises(DataError, match="1 pairs; a prompt borrows answers from two others"):
        augment_across_prompts([encode_pair(good, tokenizer)], seed=0)
    with pytest.raises(DataError, match="f:5: 'r' has 1 rewards for 2 steps. Give one per step"):
        encode_steps(tokenizer, "a", ["b", "c"], {"r": [1.0]}, source="f:5")
    with pytest.raises(DataError, match="f:5: has a step without text. Drop it"):
        encode_steps(tokenizer, "a", ["b", ""], {"r": [1.0, 1.0]}, source="f:5")
    whole = next(token for token in ("Seven", " prime") if len(tokenizer.encode(token)) == 1)
    with pytest.raises(DataError, match="f:5: steps 0 and 1 end in the same token. Join them"):
        encode_steps(tokenizer, "a", [whole[:2], whole[2:]], {"r": [1.0, 1.0]}, source="f:5")
