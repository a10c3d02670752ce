"""--reward: verifiers, functions of own files, weighted sums; what fails does so before training, or ends it, with why."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.ppo import Config
from meshkit.algos.policy import CORRECTIONS
from meshkit.algos.rewards import Unscored, score
from meshkit.algos.rollout import Rollout
from meshkit.data import CHATML, CHATML_TOKENS, ChatTemplate, save_chat_template, save_tokenizer, train_tokenizer
from meshkit.errors import DataError, PlanError, RewardError
from meshkit.recipes.evaluation import report_unscored
from meshkit.recipes.flags import CorrectionName
from meshkit.recipes.rewards import Rewards
from meshkit.recipes.tasks import load_tasks
from tests.recipes.launch import run

OWN = """
import asyncio

def length(rollout):
    return len(rollout.text)

async def slow_length(rollout):
    await asyncio.sleep(60 if rollout.text == "hang" else 0.2)
    if rollout.text == "raise":
        raise ValueError("odd")
    return len(rollout.text)

def fails_later(rollout):
    if len(rollout.ids) > 1 or rollout.log_probs is not None:
        raise RuntimeError("no such answer")
    return 1.0

value = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def answers(*texts: str) -> list[Rollout]:
    return [Rollout(ids=np.zeros(2, np.int64), text=text, fields={"completion": "ab"}) for text in texts]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_weighted_sum_is_that_of_its_parts(own: Path, workers: int) -> None:
    rewards = Rewards.read([f"{own}:length=0.25", "exact=2"], workers=workers)
    found = rewards.score(answers("ab", "abcd", ""))
    assert found.totals.tolist() == [0.25 * 2 + 2 * 1, 0.25 * 4, 0.0]
    assert found.parts["exact"].totals.tolist() == [1.0, 0.0, 0.0]
    assert found.parts[f"{own}:length"].totals.tolist() == [2.0, 4.0, 0.0]
    assert not Rewards.read(["exact"]).score(answers("ab")).parts


def test_an_async_reward_scores_at_once_and_each_answer_has_its_own_limit(own: Path) -> None:
    began = time.monotonic()
    found = Rewards.read([f"{own}:slow_length"], timeout_s=2.0).score(answers("raise", "hang", *["abc"] * 60))
    assert time.monotonic() - began < 11.0  # one after the other they sleep 12 s
    raised, hung, *scored = found.values
    assert isinstance(raised, Unscored) and raised.text == "slow_length: ValueError: odd"
    assert isinstance(hung, Unscored) and hung.kind == "timed out" and set(scored) == {3.0}


def test_a_coroutine_function_is_a_reward_of_the_library_too() -> None:
    async def reward(rollout: Rollout) -> float:
        await asyncio.sleep(0)
        return 1.0

    assert score(answers("a", "b"), reward).totals.tolist() == [1.0, 1.0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exakt"], "--reward exakt: neither one of .*Did you mean exact"),
        (["nowhere.py:f"], "--reward nowhere.py:f: neither one of"),
        (["exact", "exact=2"], "--reward exact is given twice"),
        (["exact=much"], "'much' is no weight. Write a number, as exact=0.5"),
        (["OWN:absent"], "the file has no function 'absent'"),
        (["OWN:value"], "the file has no function 'value'"),
    ],
)
def test_a_reward_that_is_none_is_refused(words: list[str], said: str, own: Path) -> None:
    with pytest.raises(DataError, match=said):
        rewards = Rewards.read([word.replace("OWN", str(own)) for word in words])
        rewards.score(answers("a"))


def test_a_reward_that_fails_at_once_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(4)))
    tasks = load_tasks("addition", [data], held_out=0.25)
    with pytest.raises(RewardError, match=r"--reward cannot score '', exact_match: .*The row has prompt, answer"):
        tasks.refuse_failing_reward()


def test_a_step_without_any_score_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    report_unscored(3, 0, 8, None)
    report_unscored(3, 2, 8, "raised: odd")
    assert capsys.readouterr().out == "step 3: 2 of 8 answers have no score; raised: odd\n"
    with pytest.raises(RewardError, match="step 3: 8 of 8 answers have no score; raised: odd. Mend the reward"):
        report_unscored(3, 8, 8, "raised: odd")


def test_older_answers_need_a_loss_that_corrects_for_them() -> None:
    with pytest.raises(
        PlanError, match="--staleness 2 with --preset PPO, which does not correct.*Choose a --correction such as tis"
    ):
        Config(preset="PPO", staleness=2).policy_loss(critic=True)
    assert Config(preset="DECOUPLED_PPO", staleness=2).policy_loss(critic=True).corrections
    two = Config(preset="PPO", staleness=2, correction=("icepop", "dppo-tv")).policy_loss(critic=True)
    assert two.corrections == (*CORRECTIONS["icepop"], *CORRECTIONS["dppo-tv"])
    assert Config(preset="DECOUPLED_PPO", staleness=2, correction=("none",)).policy_loss(critic=True).corrections == ()
    assert get_args(CorrectionName) == tuple(CORRECTIONS)


# ------------------------------------------------------------------------------------------------ recipes


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `model` of a tiny instruct model, and chat.jsonl."""
    folder = tmp_path_factory.mktemp("instruct")
    tokenizer = train_tokenizer(["say a word and another"], vocab_size=320, extra_special_tokens=CHATML_TOKENS)
    save_tokenizer(tokenizer, folder / "model")
    save_chat_template(ChatTemplate(source=CHATML), folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=320, max_position_embeddings=512, **sizes))
    model.save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(100, 140))}))
    chats = [{"prompt": [{"role": "user", "content": f"say {i}"}], "completion": f"{i}"} for i in range(40)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return folder


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "rejection_sampling"])
def test_chats_and_an_instruct_model_are_all_that_a_recipe_needs(recipe: str, instruct: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    flags = ["--pretrained", str(instruct / "model"), "--data", str(instruct / "chat.jsonl"), "--out", str(tmp_path)]
    small = ["--prompts", "2", "--samples", "2", "--rounds" if recipe == "rejection_sampling" else "--steps", "1"]
    small += ["--warmup-steps", "0", "--eval-prompts", "2", "--reward", f"{own}:length=0.1", "exact"]
    status, output = run(2, f"examples/{recipe}.py", *flags, *small, timeout_s=200)
    assert status == 0, output
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(line["reward"]) and (recipe == "ppo" or line["reward/exact"] == 0.0)


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_reward_that_raises_for_all_answers_ends_the_recipe(recipe: str, instruct: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    flags = ["--pretrained", str(instruct / "model"), "--data", str(instruct / "chat.jsonl"), "--out", str(tmp_path)]
    small = ["--prompts", "2", "--samples", "2", "--steps", "1", "--warmup-steps", "0", "--eval-prompts", "2"]
    small += ["--max-new-tokens", "8", "--reward", f"{own}:fails_later"]
    status, output = run(1, f"examples/{recipe}.py", *flags, *small, timeout_s=200)
    assert status != 0
    assert (
        "step 1: 4 of 4 answers have no score; data rank 0, raised: fails_later: RuntimeError: no such answer" in output
    )


STRANGE = """
from __future__ import annotations
import asyncio
from dataclasses import dataclass
import torch

calls = 0

@dataclass
class Part:
    value: float

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Odd:
    def __float__(self):
        raise ZeroDivisionError("odd")

def counts(rollout):
    global calls
    calls += 1
    return float(calls)

def tensor(rollout):
    return torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True)

def huge(rollout):
    return 10**400

def part(rollout):
    return Part(1.0)

def odd(rollout):
    return Odd()

def silent(rollout):
    raise Silent()

async def cancelled(rollout):
    raise asyncio.CancelledError("by a library")

async def own_limit(rollout):
    async with asyncio.timeout(0.01):
        await asyncio.sleep(10)
"""


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    (tmp_path / "strange.py").write_text(STRANGE)
    return tmp_path / "strange.py"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("huge", "the reward returned 1000"),
        ("odd", "the reward returned <"),
        ("part", "the reward returned Part(value=1.0), which is neither a number nor a vector"),
        ("silent", "silent: Silent: a Silent"),
        ("cancelled", "cancelled: CancelledError: by a library"),
        ("own_limit", "own_limit: TimeoutError"),
    ],
)
def test_whatever_a_reward_returns_or_raises_the_others_are_scored(strange: Path, name: str, said: str) -> None:
    (found,) = Rewards.read([f"{strange}:{name}"]).score(answers("ab")).values
    assert isinstance(found, Unscored) and found.kind == "raised" and found.text.startswith(said)


def test_a_tensor_is_a_score_with_a_gradient_and_in_bf16_too(strange: Path) -> None:
    assert Rewards.read([f"{strange}:tensor"]).score(answers("ab")).values == (2.0,)


def test_what_a_worker_returns_need_not_be_picklable(strange: Path) -> None:
    (found,) = Rewards.read([f"{strange}:part"], workers=1).score(answers("ab")).values
    assert isinstance(found, Unscored) and "Part(value=1.0)" in found.text


def test_a_file_is_imported_once_and_keeps_its_state(strange: Path) -> None:
    rewards = Rewards.read([f"{strange}:counts"])
    assert [rewards.score(answers("ab", "c")).values for _ in range(2)] == [(1.0, 2.0), (3.0, 4.0)]


def test_a_file_that_exits_and_a_weight_of_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(DataError, match=r"script\.py: cannot be imported: SystemExit: 0"):
        Rewards.read([f"{tmp_path / 'script.py'}:length"])
    with pytest.raises(DataError, match="--reward exact=nan: of nan times a score nothing is learnt"):
        Rewards.read(["exact=nan"])
