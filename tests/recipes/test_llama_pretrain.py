from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshkit.errors import DataError
from meshkit.recipes import PretrainFlags, pretraining_data
from tests.recipes.launch import ROOT, command_line, finish, read_losses, run, start, wait_for_step

RECIPE = "examples/llama_pretrain.py"
GOLDEN = ROOT / "tests" / "golden" / "llama_pretrain.json"
TOL_GOLDEN = 2e-5  # relative; other processors and torch versions sum in another order, and steps amplify it


def flags(corpus: Path, out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": corpus,
        "out": out,
        "cache": corpus.parent / "cache",
        "steps": 12,
        "seq-len": 64,
        "global-batch": 6,
        "warmup-steps": 4,
        "save-every": 100,
        "eval-every": 6,
        "sample-tokens": 8,
    }
    return command_line(chosen, **changes)


def test_first_steps_are_the_golden_ones_on_any_mesh_and_across_a_stop(corpus: Path, tmp_path: Path) -> None:
    """Stopped by SIGTERM on one mesh and continued on another, the losses are those of one run straight through."""
    golden = {int(step): loss for step, loss in json.loads(GOLDEN.read_text()).items()}
    first = start(2, RECIPE, *flags(corpus, tmp_path, mesh="dp_shard=2", microbatches=2))
    wait_for_step(first, tmp_path, 3)
    first.send_signal(signal.SIGTERM)
    _, output = finish(first)
    stopped_at = max(read_losses(tmp_path))
    assert f"saved step {stopped_at}" in output
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, mesh="tp=2"))
    assert status == 0, output
    if stopped_at < 12:
        assert f"resume from step {stopped_at}" in output
    assert read_losses(tmp_path) == {step: pytest.approx(loss, rel=TOL_GOLDEN) for step, loss in golden.items()}
    assert "bits per byte" in output
    assert (tmp_path / "model-12" / "model.safetensors").exists()
    assert list((tmp_path / "tensorboard").iterdir())
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, mesh="tp=2"))
    assert status == 0, output
    assert "has its 12 steps; give more --steps" in output


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mesh": "tp=3"}, "mesh tp=3 needs a multiple of 3 ranks, but the world has 2"),
        ({"mesh": "dp_shrad=2"}, "Did you mean 'dp_shard'?"),
        ({"data": "no/such/*.txt"}, "no/such/*.txt"),
        ({"model": "lama3-8b"}, "lama3-8b"),
    ],
)
def test_a_mistake_ends_every_rank_with_its_text(corpus: Path, tmp_path: Path, change: dict, match: str) -> None:
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, **change), timeout_s=60)
    assert status != 0
    assert match in output, output


def test_a_mixture_is_learnt_by_its_shares_and_each_source_is_scored(corpus: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text("\n".join(json.dumps({"text": f"{i} squared is {i * i}. " * 8}) for i in range(80)))
    asked = {"out": tmp_path / "run", "cache": corpus.parent / "cache", "steps": 4, "eval-every": 2, "eval-batches": 1}
    sizes = {"mesh": "dp_shard=2", "seq-len": 64, "global-batch": 6, "warmup-steps": 1, "sample-tokens": 8}
    sources = ["--mixture", f"text={corpus}:3", f"numbers={numbers}:1"]
    status, output = run(2, RECIPE, *command_line(asked | sizes), *sources)
    assert status == 0, output
    assert "75% text" in output and "25% numbers" in output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scored = [line for line in lines if "held_out_bits_per_byte" in line]
    assert [line["step"] for line in scored] == [2, 4]
    for line in scored:
        own = {name: line[f"held_out_bits_per_byte/{name}"] for name in ("text", "numbers")}
        assert line["held_out_bits_per_byte"] == pytest.approx(0.75 * own["text"] + 0.25 * own["numbers"])
        assert own["text"] != own["numbers"]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"mixture": ("text",)},
            "--mixture: 'text' is no source. Give NAME=PATH:WEIGHT once for each, as web=corpus/web:3.",
        ),
        ({"mixture": ("a=x:1", "a=y:2")}, "--mixture: 'a=y:2' is there twice. Give NAME=PATH:WEIGHT once for each"),
        ({"mixture": ("a=x:-1",)}, "'a=x:-1' is no source"),
        ({"mixture": ("a=x:1",), "data": ("y",)}, "--data and --mixture are both given"),
    ],
)
def test_a_mixture_that_is_none_is_refused(given: dict, match: str) -> None:
    with pytest.raises(DataError, match=re.escape(match)):
        pretraining_data(PretrainFlags(**given), vocab_size=300)


def test_an_error_on_one_rank_ends_the_others_with_that_error(tmp_path: Path) -> None:
    """Rank 1 raises while rank 0 waits for it in a collective."""
    status, output = finish(start(2, "tests/recipes/one_rank_fails.py"))
    assert status != 0
    assert "PlanError (rank 1): this rank has had enough" in output, output


def test_a_schedule_free_optimizer_goes_on_on_another_mesh(corpus: Path, tmp_path: Path) -> None:
    """Stopped after 3 steps and continued it is the run straight through, and so are the averages that it exports."""
    asked = {"optimizer": "schedulefree:AdamWScheduleFree", "lr-kind": "constant", "warmup-steps": 0, "eval-every": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out, steps, mesh in ((whole, 6, "dp_shard=2"), (parts, 3, "dp_shard=2"), (parts, 6, "tp=2")):
        status, output = run(2, RECIPE, *flags(corpus, out, mesh=mesh, steps=steps, **asked))
        assert status == 0, output
    assert read_losses(parts) == pytest.approx(read_losses(whole), rel=TOL_GOLDEN)
    exported = [load_file(out / "model-6" / "model.safetensors") for out in (whole, parts)]
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, rtol=1e-3, atol=1e-5)


MODES = """
import torch
from pathlib import Path

class Modes(torch.optim.SGD):
    def note(self, word):
        with Path(__file__).with_suffix(".txt").open("a") as file:
            file.write(word)

    def train(self):
        self.note("t")

    def eval(self):
        self.note("e")

    def step(self, closure=None):
        self.note("s")
        return super().step(closure)

def modes(run, *, lr, weight_decay):
    return Modes(run.parameters(), lr=lr)
"""


def test_an_optimizer_with_modes_trains_and_is_saved_in_one_and_evaluated_in_the_other(
    corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "modes.py").write_text(MODES)
    changes = {"optimizer": f"{tmp_path}/modes.py:modes", "steps": 2, "warmup-steps": 0, "eval-every": 1}
    status, output = run(1, RECIPE, *flags(corpus, tmp_path / "out", mesh="dp_shard=1", **changes))
    assert status == 0, output
    # Each step: it trains, steps, is evaluated, and trains again before a checkpoint; in the end the export is evaluated.
    assert (tmp_path / "modes.txt").read_text() == "tset" * 2 + "e"
