"""`python -m meshkit estimate`: what it prints, and the mistakes a person makes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from meshkit.__main__ import main
from meshkit.errors import PlanError
from meshkit.preflight.estimate.command import parse_bytes
from tests.recipes.launch import ROOT

LLAMA = str(ROOT / "examples" / "llama_pretrain.py")

RECIPE = """
from dataclasses import dataclass
import torch, meshkit as mk
from torch import nn

@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=2"
    seq_len: int = 64
    global_batch: int = 8
    microbatches: int = 1
    recompute: str = "none"

def build(config, mesh):
    with torch.device("meta"):
        model = mk.models.Llama(mk.models.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16))
    return mk.parallelize(
        model, mesh, plan=mk.models.LLAMA_PLAN, memory=mk.MemoryPolicy(recompute=config.recompute))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(RECIPE)
    return str(path)


def estimate(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["meshkit", "estimate", *words])
    main()


def refused(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with pytest.raises(SystemExit) as stop:
        estimate(monkeypatch, *words)
    assert stop.value.code == 2
    return said.getvalue().strip()


def test_the_recipe_is_estimated_before_it_has_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "step.svg"
    estimate(monkeypatch, LLAMA, "--mesh", "dp_shard=4 tp=2", "--world", "8", "--svg", str(picture))
    out = capsys.readouterr().out
    assert out.startswith("8 ranks, dp_shard=4 tp=2; the rank at 0 on every axis\npeak ")
    assert "layers.0 to layers.3" in out
    assert picture.read_text().startswith("<svg")


def test_stages_are_rows_and_the_fullest_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    estimate(monkeypatch, recipe, "--mesh", "pp=2 dp_shard=2", "--microbatches", "2")
    out = capsys.readouterr().out
    assert "rank of pp" in out
    estimate(monkeypatch, recipe, "--mesh", "pp=2 dp_shard=2", "--microbatches", "2", "--rank", "3")
    assert "the rank at pp=1 dp_shard=1" in capsys.readouterr().out


def test_it_says_what_fits_and_which_flags_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    estimate(monkeypatch, recipe, "--device-memory", "1GiB")
    assert "\nfits: " in capsys.readouterr().out
    estimate(monkeypatch, recipe, "--device-memory", "2.8MiB")
    out = capsys.readouterr().out
    assert "\ndoes not fit: " in out
    assert "  --recompute full" in out and out.rstrip().endswith("  fits")


def test_a_mesh_that_does_not_fit_the_world_is_said_so(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    message = refused(monkeypatch, recipe, "--mesh", "dp_shard=8 tp=3", "--world", "64")
    assert message.startswith("MeshError: mesh dp_shard=8*tp=3 needs a multiple of 24 ranks, but the world has 64.")
    assert "--rank 9: the ranks of this world are 0 to 1" in refused(monkeypatch, recipe, "--rank", "9")


def test_a_script_without_the_two_names_is_shown_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("print")
    message = refused(monkeypatch, str(path))
    assert "plain.py has no Config and no build." in message
    assert "`build(config, mesh) -> mk.Run`" in message and "\n" not in message.strip()
    path.write_text("from dataclasses import dataclass\nbuild = print\n@dataclass\nclass Config:\n    mesh: str = ''\n")
    assert "has no seq_len, global_batch." in refused(monkeypatch, str(path))
    assert "there is no file nowhere.py" in refused(monkeypatch, "nowhere.py")


def test_an_unknown_flag_is_refused_by_the_script_s_own_parser(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    shown = refused(monkeypatch, recipe, "--recompte", "full")
    assert "recompte" in shown and "--recompute" in shown


def test_sizes_are_read_in_both_units() -> None:
    assert (parse_bytes("80GiB"), parse_bytes("80 gb"), parse_bytes("1.5MiB")) == (80 * 2**30, 80 * 10**9, 3 * 2**19)
    with pytest.raises(PlanError, match="--device-memory lots: not a number of bytes"):
        parse_bytes("lots")
    with pytest.raises(PlanError, match="--device-memory 80: that is 80 bytes. Say the unit, as 80GiB"):
        parse_bytes("80")
