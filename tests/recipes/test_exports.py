"""What each recipe leaves behind is read by plain transformers: tokenizer, generation that ends by itself, pipelines."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    pipeline,
)

import meshkit as mk
from meshkit.data import CHATML, CHATML_TOKENS, ChatTemplate, chatml, load_tokenizer, save_tokenizer, train_tokenizer
from meshkit.errors import CheckpointError, PlanError
from meshkit.models import RewardModel, build_model, config_from_pretrained, load_pretrained
from tests.recipes.launch import command_line, write_corpus
from tests.recipes.small import RECIPES, ROLLOUTS, SHARED, flags_of, step_of, write_inputs
from tests.tiny import tiny_config
from tests.world import pool

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks it
]

TOL_FP32 = 1e-5
SURE = 1e9
OF_TEXT: dict[str, dict[str, object]] = {
    "llama_pretrain": {"sample-tokens": 2},
    "diloco_pretrain": {"sample-tokens": 2},
    "moe_pretrain": {"sample-tokens": 2, "bias-speed": 0},  # with biases it has no format of transformers
    "long_context": {},
}


class Say(LogitsProcessor):
    """Whatever the model thinks, its third token is this one, and no earlier one would end the answer."""

    def __init__(self, token: int, stops: list[int], at: int) -> None:
        self.token, self.stops, self.at = token, stops, at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.stops] = -SURE
        if input_ids.shape[1] == self.at + 2:
            scores[:, self.token] = SURE
        return scores


def stops_at(folder: Path, model: Any, *tokens: str) -> None:
    """Generation by the folder's own configuration ends at each of the tokens, and at none beside."""
    tokenizer, generation = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    ids = tokenizer("one two", return_tensors="pt")
    length = ids["input_ids"].shape[1]
    assert ids["input_ids"][0, 0] == tokenizer.bos_token_id  # as the model has learnt that texts begin
    stops = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    assert generation.eos_token_id == (stops if len(stops) > 1 else stops[0])
    for stop in stops:
        say = LogitsProcessorList([Say(stop, stops, length)])
        written = model.generate(**ids, generation_config=generation, max_new_tokens=9, logits_processor=say)
        assert written.shape[1] == length + 3 and written[0, -1] == stop


def is_readable(folder: Path) -> None:
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file.name


def check(folder: Path, *stops: str) -> None:
    is_readable(folder)
    stops_at(folder, AutoModelForCausalLM.from_pretrained(folder), *stops)
    write = pipeline("text-generation", model=str(folder), device="cpu")
    if write.tokenizer.chat_template:
        said = write([{"role": "user", "content": "one"}], max_new_tokens=3)[0]["generated_text"]
        assert said[0]["content"] == "one" and said[1]["role"] == "assistant"
    both = write(["one", "one two three"], max_new_tokens=3, batch_size=2)  # padded
    assert [each[0]["generated_text"][:3] for each in both] == ["one", "one"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "dense" / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7}))
    return folder


@pytest.mark.parametrize("recipe", OF_TEXT)
def test_pretraining_leaves_a_model_with_its_tokenizer(recipe: str, inputs: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text.jsonl")
    shared = {"data": corpus, "cache": tmp_path / "cache", "out": tmp_path / "out", "steps": 1, "seq-len": 64}
    shared |= {"global-batch": 2, "eval-every": 0, "save-every": 0, "warmup-steps": 0}
    pool(1).run(step_of, recipe, command_line({**shared, **OF_TEXT[recipe]}))
    check(tmp_path / "out" / "model-1", "<|eos|>")


@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo", "ppo", "rejection_sampling", "distill"])
def test_what_goes_in_as_a_folder_comes_out_as_one(recipe: str, inputs: Path, tmp_path: Path) -> None:
    """With the template of the folder, whose answers end with <|im_end|>, and what transformers alone knows of it."""
    dense = inputs / "dense"
    if recipe == "distill":
        given = {
            **SHARED,
            **ROLLOUTS,
            "pretrained": dense,
            "teacher": dense,
            "data": inputs / "prompts.jsonl",
            "out": tmp_path,
        }
        flags = command_line(given)
    else:
        flags = flags_of(recipe, "one", inputs, tmp_path)
    pool(1).run(step_of, recipe, flags)
    check(tmp_path / "model-1", "<|eos|>", "<|im_end|>")
    assert GenerationConfig.from_pretrained(tmp_path / "model-1").temperature == 0.7
    assert (tmp_path / "model-1" / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()


def test_adapters_come_with_tokenizer_and_stops(inputs: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    pool(1).run(step_of, "sft", [*flags_of("sft", "one", inputs, tmp_path), "--lora-rank", "2"])
    folder = tmp_path / "adapter-1"
    is_readable(folder)
    stops_at(folder, AutoPeftModelForCausalLM.from_pretrained(folder), "<|eos|>", "<|im_end|>")


def test_a_pipeline_scores_as_the_reward_model_does(inputs: Path, tmp_path: Path) -> None:
    """Also texts of two lengths in one padded batch that end with eos, as answers do."""
    pool(1).run(step_of, "reward_model", flags_of("reward_model", "one", inputs, tmp_path))
    folder = tmp_path / "model-1"
    is_readable(folder)
    assert not (folder / "generation_config.json").exists()
    model = load_pretrained(RewardModel(config_from_pretrained(folder)), folder).eval()
    tokenizer = load_tokenizer(folder)
    score = pipeline("text-classification", model=str(folder), device="cpu")
    texts = ["one<|eos|>", "one two three<|eos|>"]
    with torch.no_grad():
        ids = [[tokenizer.bos_id, *tokenizer.encode(text.removesuffix("<|eos|>")), tokenizer.eos_id] for text in texts]
        expected = [float(model(torch.tensor([each]))[0, -1]) for each in ids]
    for batch in (1, 2):
        assert [each["score"] for each in score(texts, batch_size=batch)] == pytest.approx(expected, abs=TOL_FP32)


def test_a_padding_token_that_ends_answers_is_not_that_of_scores(tmp_path: Path) -> None:
    """transformers would score the token before it; without one it takes no padded batch, and says so."""
    made = train_tokenizer(["one two"], vocab_size=300)
    save_tokenizer(made, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<|eos|>"}))
    (tmp_path / "tokenizer" / "meshkit_digests.json").unlink()
    pool(1).run(export_reward, tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert theirs.config.pad_token_id is None
    ids = torch.tensor([[*made.encode("one"), made.eos_id]])
    ours = load_pretrained(RewardModel(config_from_pretrained(tmp_path / "out")), tmp_path / "out")
    with torch.no_grad():
        assert float(theirs(ids).logits) == pytest.approx(float(ours(ids)[0, -1]), abs=TOL_FP32)


def export_reward(folder: Path) -> None:
    config = tiny_config(vocab_size=300)
    run = mk.parallelize(RewardModel(config), mk.init_mesh("dp_shard=1"), plan=mk.models.reward_plan(config))
    mk.init_weights(run.model, seed=0)
    run.export(folder / "out", str(folder / "tokenizer"))


def export_split(folder: Path) -> None:
    """On two ranks: a plain model with an own chat, one of transformers, and what is refused."""
    tokenizer = train_tokenizer(["one two"], vocab_size=300, extra_special_tokens=CHATML_TOKENS)
    config = tiny_config(vocab_size=300)
    run = mk.parallelize(build_model(config), mk.init_mesh("tp=2"), plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    run.export(str(folder / "own"), chatml(tokenizer))
    run.export(folder / "bare")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        run.export(folder / "own", tokenizer)
    odd = mk.data.Chat(tokenizer=tokenizer, template=ChatTemplate(source="{{ raise_exception('no chats') }}"))
    run.export(folder / "odd", odd)
    theirs = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(folder / "own").config)
    run = mk.parallelize(theirs, mk.init_mesh("dp_shard=2"))
    run.export(folder / "theirs", folder / "own")
    run = mk.parallelize(
        torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)), mk.init_mesh("dp_shard=2")
    )
    with pytest.raises(PlanError, match="Sequential has no config"):
        run.export(folder / "plain", tokenizer)


def test_a_run_of_ones_own_is_exported_alike(tmp_path: Path) -> None:
    pool(2).run(export_split, tmp_path)
    for name in ("own", "theirs"):
        check(tmp_path / name, "<|eos|>", "<|im_end|>")
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == CHATML
    stops_at(tmp_path / "odd", AutoModelForCausalLM.from_pretrained(tmp_path / "odd"), "<|eos|>")
    assert sorted(file.name for file in (tmp_path / "bare").iterdir()) == [
        "config.json",
        "meshkit_digests.json",
        "model.safetensors",
    ]


def test_a_policy_of_characters_comes_with_them(tmp_path: Path) -> None:
    """The reference tasks' tokenizer has a token for each character, and one that pads."""
    given = {"seq-len": 64, "warmup-steps": 0, "eval-every": 1, "out": tmp_path, **RECIPES["grpo"], "sft-steps": 2}
    pool(1).run(step_of, "grpo", command_line(given))
    for name in ("model-1", "sft-model"):
        is_readable(tmp_path / name)
        tokenizer, model = (each.from_pretrained(tmp_path / name) for each in (AutoTokenizer, AutoModelForCausalLM))
        assert tokenizer("17+5=")["input_ids"][1:] == load_tokenizer(tmp_path / name).encode("17+5=")
        assert tokenizer.decode(tokenizer("17+5=")["input_ids"], skip_special_tokens=True) == "17+5="
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0
