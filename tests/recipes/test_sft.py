from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.data import CHATML, CHATML_TOKENS, load_chat, save_tokenizer, train_tokenizer
from meshkit.models import LLAMA_PLAN, build_model, config_from_pretrained, load_lora, load_pretrained, lora_options
from meshkit.preflight.estimate.recipe import load_script
from tests.recipes.launch import ROOT, command_line, read_losses, run
from tests.world import run_ranks

RECIPE = "examples/sft.py"
TOL_FP32_SUM = 2e-5  # relative; another mesh sums in another order, and steps amplify it
TOL_LOGITS = 1e-5  # absolute; transformers multiplies in another order

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def in_world(arguments: list[str]) -> str:
    """What the recipe says on this rank, its error included. In a world that has torch already, sooner than by a launch."""
    sys.argv = [RECIPE, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            load_script(ROOT / RECIPE).main()
        except mk.MeshkitError as error:
            return f"{type(error).__name__}: {error}"
    return said.getvalue()


def chat(number: int) -> list[dict[str, str]]:
    said = " ".join(WORDS[int(digit)] for digit in str(number))
    return [{"role": "user", "content": f"Spell {number}."}, {"role": "assistant", "content": f"It is {said}."}]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats and plain text, of many lengths."""
    chats = [{"messages": chat(3**k % 99_991) + (chat(k) if k % 3 == 0 else [])} for k in range(60)]
    texts = [{"prompt": f"{k} plus one is", "completion": f" {k + 1}"} for k in range(20)]
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", chats + texts)


@pytest.fixture(scope="module")
def pretrained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder made by transformers: a tiny Qwen2 with its tokenizer and a chat template of its own."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    folder, ours = tmp_path_factory.mktemp("pretrained") / "tiny", tmp_path_factory.mktemp("ours")
    tokenizer = train_tokenizer(data.read_text().splitlines(), vocab_size=320, extra_special_tokens=CHATML_TOKENS)
    save_tokenizer(tokenizer, ours)  # elsewhere: files that transformers writes anew have other digests
    theirs = AutoTokenizer.from_pretrained(ours)
    theirs.chat_template = "{{ bos_token }}" + CHATML
    theirs.save_pretrained(folder)
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=336,  # more than the tokenizer has, as many folders have it
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    return folder


def flags(data: Path, out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": data,
        "out": out,
        "steps": 4,
        "seq-len": 64,
        "global-batch": 4,
        "warmup-steps": 2,
        "lr-kind": "constant",  # or the first part of a run would depend on how long the whole is to be
        "save-every": 100,
        "eval-every": 100,
        "sample-tokens": 4,
    }
    return command_line(chosen, **changes)


def held_out_loss(out: Path) -> float:
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["held_out_loss"]


def test_a_run_continued_on_another_mesh_is_one_run_on_one_rank(data: Path, tmp_path: Path) -> None:
    """2 steps with the tokens of a row on two ranks, and 2 with the layers on two, are 4 steps on one rank."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    status, output = run(1, RECIPE, *flags(data, whole))
    assert status == 0, output
    assert "held out before the first step: " in output and "nats per token of an answer; model in" in output
    run_ranks(2, in_world, flags(data, parts, mesh="cp=2", steps=2))
    output, _ = run_ranks(2, in_world, flags(data, parts, mesh="pp=2", microbatches=2))
    assert "resume from step 2" in output
    losses = read_losses(whole)
    assert sorted(losses) == [1, 2, 3, 4] and losses[4] < losses[1] - 0.5
    assert read_losses(parts) == pytest.approx(losses, rel=TOL_FP32_SUM)
    assert held_out_loss(parts) == pytest.approx(held_out_loss(whole), rel=TOL_FP32_SUM)
    assert list((parts / "tensorboard").iterdir())


def test_a_hugging_face_folder_goes_in_and_comes_out(data: Path, pretrained: Path, tmp_path: Path) -> None:
    """Weights, tokenizer and template: transformers reads the result, and computes what we do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = {"pretrained": pretrained, "objective": "dft", "mesh": "tp=2", "steps": 3}
    run_ranks(2, in_world, flags(data, tmp_path, **changes))
    folder = tmp_path / "model-3"
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = load_chat(folder).encode_rendered(load_chat(pretrained).template.render(chat(123))).ids
    assert tokenizer.apply_chat_template(chat(123))["input_ids"] == ids and ids[0] == tokenizer.bos_token_id
    ours = load_pretrained(build_model(config_from_pretrained(folder)), folder)
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits
        assert (ours(torch.tensor([ids])) - logits).abs().max() < TOL_LOGITS
        before = AutoModelForCausalLM.from_pretrained(pretrained)(torch.tensor([ids])).logits
    assert (before - logits).abs().max() > 0.05  # it has learnt


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT calls it
def test_adapters_come_out_as_a_folder_of_peft(data: Path, pretrained: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    changes = {"pretrained": pretrained, "lora_rank": 4, "lora_dropout": 0.1, "lr": 1e-2, "steps": 3}
    run_ranks(2, in_world, flags(data, tmp_path, **changes))
    folder, ids = tmp_path / "adapter-3", torch.arange(40).unsqueeze(0)
    ours = build_model(config_from_pretrained(pretrained))
    mk.lora.attach(ours, LLAMA_PLAN, **lora_options(folder))
    load_lora(load_pretrained(ours, pretrained), folder)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(pretrained)
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, folder)(ids).logits
        assert (ours(ids) - adapted).abs().max() < TOL_LOGITS
    assert (before - adapted).abs().max() > 0.05
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(pretrained)
    assert (folder / "tokenizer.json").exists() and not (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("mistake", "match"),
    [
        (
            "lora",
            "PlanError: lora_rank=8 without pretrained: adapters change a model that has learnt something",
        ),
        ("few bits", "PlanError: lora_base and lora_dropout are of adapters, and there are none without lora_rank"),
        ("roles", "bad.jsonl:2: message 1 is from 'user' after user, where assistant is expected"),
        ("tokenizer", "have ids outside the vocabulary, first"),
    ],
)
def test_a_mistake_is_named(data: Path, pretrained: Path, tmp_path: Path, mistake: str, match: str) -> None:
    changes: dict[str, object] = {"lora_rank": 8}
    if mistake == "few bits":
        changes = {"pretrained": pretrained, "lora_base": "nf4"}
    elif mistake == "roles":
        rows = [{"messages": chat(1)}, {"messages": [chat(2)[0], *chat(2)]}]
        changes = {"eval_data": write_rows(tmp_path / "bad.jsonl", rows)}
    elif mistake == "tokenizer":  # one with more ids than the model has
        save_tokenizer(
            train_tokenizer(data.read_text().splitlines(), vocab_size=400, extra_special_tokens=CHATML_TOKENS),
            tmp_path / "other",
        )
        (tmp_path / "other" / "chat_template.jinja").write_text(CHATML)
        changes = {"pretrained": pretrained, "tokenizer": tmp_path / "other"}
    (output,) = run_ranks(1, in_world, flags(data, tmp_path / "out", **changes))
    assert match in output
