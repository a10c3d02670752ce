"""The page shows every rank, and of each the numbers that `explain` and `estimate` say; read in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.__main__ import main
from meshkit.errors import MeshError, PlanError
from meshkit.mesh import DENSE_AXES, EXPERT_AXES
from meshkit.models.llama import LLAMA_PLAN
from meshkit.preflight.estimate import Estimate
from meshkit.preflight.explain import PHASES, Explanation, explain
from tests.laws.parity.cases import Cell, Moe, build, plan_of

ROWS, TOKENS = 4, 16
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is on the PATH")

# name -> (cell, whether its memory is estimated, which takes most of the time)
CELLS = {
    "fsdp": (Cell(mesh="dp_shard=4", tied=True, vocab=62, microbatches=2, zero=3), True),
    "tp": (Cell(mesh="dp_shard=2 tp=2", sequence=True, vocab=61, recompute="full"), False),
    "pp": (Cell(mesh="pp=2 dp_replicate=2", layers=4, microbatches=2, schedule="zbv"), True),
    "cp": (Cell(mesh="dp_shard=2 cp=4", vocab=61), False),
    "ep": (Cell(mesh="dp_shard=2 tp=2 ep=4", layers=3, moe=Moe(experts=11, shared=24), recompute="full"), False),
}

# Clicks each rank as a person would, and writes down what is to be seen then.
READ = """
<script>
const seen = [];
const shown = (selector) => [...document.querySelectorAll(selector)].filter((found) => found.offsetParent !== null);
for (const button of document.querySelectorAll(".rank")) {
  button.click();
  seen.push({
    rank: +button.dataset.rank,
    chosen: document.querySelector(".chosen").textContent,
    axes: Object.fromEntries(shown(".axis").map((row) => [row.dataset.axis, {
      group: row.querySelector(".group").textContent, bytes: +row.querySelector("[data-bytes]").dataset.bytes }])),
    lit: Object.fromEntries([...document.querySelectorAll(".rank")].map((cell) => [cell.dataset.rank, cell.dataset.lit])),
    messages: Object.fromEntries(shown("[data-message]").map((row) => [row.dataset.message, [
      +row.querySelector("[data-calls]").dataset.calls,
      ...[...row.querySelectorAll("[data-bytes]")].map((cell) => +cell.dataset.bytes)]])),
    parameters: shown("[data-parameter]").map((row) => [row.dataset.parameter,
      +row.querySelector("[data-bytes]").dataset.bytes, +row.querySelector("[data-count]").dataset.count]),
    all: shown(".parameters .total [data-bytes]").map((cell) => +cell.dataset.bytes),
    held: shown(".held .total [data-bytes]").map((cell) => +cell.dataset.bytes),
  });
}
const result = document.createElement("pre");
result.id = "result";
result.textContent = JSON.stringify({ seen, errors: +document.documentElement.dataset.errors,
  bars: shown(".memory").map((row) => [+row.dataset.rank, +row.querySelector("[data-bytes]").dataset.bytes]),
  tasks: shown("#timeline").length && document.querySelectorAll("#timeline .task").length });
document.body.append(result);
</script></body>
"""


@cache
def model_of(cell: Cell) -> torch.nn.Module:
    with torch.device("meta"):
        return build(cell)


def choices_of(cell: Cell) -> dict[str, Any]:
    return {
        "plan": plan_of(cell),
        "memory": mk.MemoryPolicy(recompute=cell.recompute),  # type: ignore[arg-type]  # one of its modes
        "zero": None if "pp" in cell.mesh else cell.zero,
        "sequence": bool(cell.sequence),
        "pipeline": mk.strategy.PipelinePolicy(schedule=cell.schedule),
    }


def step_of(cell: Cell) -> dict[str, int]:
    return {"rows": ROWS, "seq_len": TOKENS, "microbatches": cell.microbatches}


@cache
def page_of(name: str) -> mk.preflight.page.Page:
    cell, memory = CELLS[name]
    return mk.preflight.page.explain_page(
        model_of(cell), cell.mesh, **step_of(cell), kernels="cpu", memory_bars=memory, **choices_of(cell)
    )


def explained(name: str, rank: int) -> Explanation:
    cell, spec = CELLS[name][0], page_of(name).spec
    place = dict(zip(DENSE_AXES, unravel(spec, rank, DENSE_AXES), strict=True))
    return explain(model_of(cell), spec, coordinate=place, **step_of(cell), **choices_of(cell))


def unravel(spec: mk.MeshSpec, rank: int, axes: tuple[str, ...]) -> list[int]:
    return [int(place) for place in np.unravel_index(rank, [getattr(spec, axis) for axis in axes])]


def share_a_group(spec: mk.MeshSpec, axis: str, one: int, other: int) -> bool:
    """Do these ranks differ in nothing but their places on the axis, or on the axes that it joins?"""
    view = DENSE_AXES if any(f"_{name}_" in f"_{axis}_" for name in DENSE_AXES) else EXPERT_AXES
    places = zip(view, unravel(spec, one, view), unravel(spec, other, view), strict=True)
    return all(a == b for name, a, b in places if f"_{name}_" not in f"_{axis}_")


def in_chromium(page: str, folder: Path) -> tuple[str, str]:
    """(the document after its scripts have run, what the browser logged)"""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--window-size=1300,2000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return done.stdout, done.stderr


@cache
def read(name: str) -> dict[str, Any]:
    """What a person sees who clicks on each rank of the page."""
    with TemporaryDirectory() as folder:
        document, log = in_chromium(mk.preflight.page.html(page_of(name)).replace("</body>", READ), Path(folder))
    assert "CONSOLE" not in log, log
    found = re.search(r'<pre id="result">(.*?)</pre>', document, re.DOTALL)
    assert found, document[-500:]
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result


@in_browser
@pytest.mark.parametrize("name", CELLS)
def test_a_browser_shows_every_rank_with_its_explanation(name: str) -> None:
    page = page_of(name)
    spec, world = page.spec, page.spec.world_size
    result = read(name)
    assert result["errors"] == 0
    assert [one["rank"] for one in result["seen"]] == list(range(world))
    for rank, seen in enumerate(result["seen"]):
        said = explained(name, rank)
        assert seen["chosen"] == str(rank)
        assert {axis for axis, _ in said.reasons} <= set(seen["axes"])
        for axis, row in seen["axes"].items():
            group = [other for other in range(world) if share_a_group(spec, axis, rank, other)]
            assert row["group"] == " ".join(map(str, group))
            assert row["bytes"] == sum(n * one.size for one, n in said.messages.items() if one.axis == axis)
        for other in range(world):
            lit = [axis for axis in seen["axes"] if share_a_group(spec, axis, rank, other)]
            assert seen["lit"][str(other)] == " ".join(lit)
        keys = {f"{one.axis} {one.op}" for one in said.messages}
        assert set(seen["messages"]) == keys
        for key, (calls, *sizes) in seen["messages"].items():
            of_key = {one: n for one, n in said.messages.items() if f"{one.axis} {one.op}" == key}
            assert calls == sum(of_key.values())
            assert sizes[-1] == sum(sizes[:-1]) == sum(n * one.size for one, n in of_key.items())
        assert sum(size * count for _, size, count in seen["parameters"]) == said.parameter_bytes
        assert sum(count for _, _, count in seen["parameters"]) == len(said.params)
        assert seen["all"] == [said.parameter_bytes]


@in_browser
@pytest.mark.parametrize("name", [name for name, (_, memory) in CELLS.items() if memory])
def test_a_browser_shows_the_memory_of_every_rank(name: str) -> None:
    page = page_of(name)
    result = read(name)
    peaks = {rank: one.estimate.peak_bytes for one in page.rank_groups if one.estimate for rank in one.ranks}
    assert [peaks[rank] for rank, _ in result["bars"]] == [size for _, size in result["bars"]]
    assert [rank for rank, _ in result["bars"]] == list(range(page.spec.world_size))
    assert [seen["held"] for seen in result["seen"]] == [[peaks[rank]] for rank in sorted(peaks)]
    assert result["tasks"] == (0 if page.schedule is None else sum(len(row.tasks) for row in page.schedule.rows()))


@pytest.mark.parametrize("name", [name for name, (_, memory) in CELLS.items() if memory])
def test_ranks_that_share_a_bar_need_the_same_memory(name: str) -> None:
    """And it is what `estimate` says of each: those at the end of a group are estimated here by themselves."""
    cell, page = CELLS[name][0], page_of(name)
    assert sorted(rank for one in page.rank_groups for rank in one.ranks) == list(range(page.spec.world_size))
    for one in page.rank_groups:
        place = dict(zip(DENSE_AXES, unravel(page.spec, one.ranks[-1], DENSE_AXES), strict=True))
        alone: Estimate = mk.estimate(
            model_of(cell), page.spec, coordinate=place, kernels="cpu", **step_of(cell), **choices_of(cell)
        )
        assert one.estimate is not None
        assert (alone.most, alone.at_peak) == (one.estimate.most, one.estimate.at_peak)


@pytest.mark.parametrize("name", CELLS)
def test_phases_of_a_message_add_up_to_its_bytes(name: str) -> None:
    for one in page_of(name).rank_groups:
        for row in one.explanation.traffic:
            assert set(row.phases) == set(PHASES)
            assert sum(row.phases.values()) == row.bytes


@pytest.mark.parametrize(("recompute", "again"), [("none", False), ("full", True)])
def test_what_full_recompute_sends_again_is_its_own_phase(recompute: str, again: bool) -> None:
    cell = Cell(mesh="tp=4", sequence=False, recompute=recompute)
    choices = choices_of(cell)
    said = explain(model_of(cell), mk.MeshSpec(tp=4), **step_of(cell), **choices)
    (row,) = [row for row in said.traffic if row.op == "all_reduce"]
    assert (row.phases["recompute"] > 0) == again
    assert row.phases["backward"] > 0
    assert row.phases["forward"] > 0


def test_the_page_loads_nothing() -> None:
    page = mk.preflight.page.html(page_of("pp")).replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in page
    for word in ("http:", "https:", " src=", " href=", "url(", "@import", "fetch("):
        assert word not in page


@pytest.mark.parametrize("name", CELLS)
def test_without_scripts_every_section_shows_rank_0(name: str) -> None:
    page = page_of(name)
    visible = re.findall(r'<div class="alike" data-alike="(\d+)">', mk.preflight.page.html(page))
    assert set(visible) == {str(page.group_of_rank[0])}
    assert len(visible) == (5 if page.fullest else 4)


def test_one_rank_of_each_stage_stands_for_a_large_world() -> None:
    cell = Cell(mesh="pp=2 dp_shard=32 tp=2", layers=4, microbatches=2)
    page = mk.preflight.page.explain_page(
        model_of(cell), cell.mesh, **step_of(cell), memory_bars=False, **choices_of(cell)
    )
    assert [one.ranks for one in page.rank_groups] == [tuple(range(64)), tuple(range(64, 128))]
    html = mk.preflight.page.html(page)
    assert re.findall(r'class="rank" data-rank="(\d+)"', html) == [str(rank) for rank in range(128)]
    assert "In a world of 128 ranks the first of each pipeline stage was looked at" in html


RECIPE = """
from dataclasses import dataclass
import torch, meshkit as mk

@dataclass(frozen=True, kw_only=True)
class Config:
    mesh: str = "dp_shard=2"
    seq_len: int = 64
    global_batch: int = 8
    microbatches: int = 1

def build(config, mesh):
    with torch.device("meta"):
        model = mk.models.Llama(mk.models.LlamaConfig(
            vocab_size=65, hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16))
    return mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN)
"""


def test_the_command_prints_the_explanation_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, written = tmp_path / "train.py", tmp_path / "page.html"
    script.write_text(RECIPE)
    words = ["explain", str(script), "--mesh", "dp_shard=-1 tp=2", "--world", "4", "--device-memory", "1MiB"]
    monkeypatch.setattr(sys, "argv", ["meshkit", *words, "--rank", "1", "--html", str(written)])
    main()
    with torch.device("meta"):
        model = mk.models.Llama(
            mk.models.LlamaConfig(
                vocab_size=65,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
            )
        )
    place = {"dp_shard": 0, "tp": 1}  # has 32 of the 65 words, and place 0 has 33
    said = explain(model, mk.MeshSpec(dp_shard=2, tp=2), plan=LLAMA_PLAN, rows=4, seq_len=64, coordinate=place)
    assert capsys.readouterr().out == f"{said}\nwrote {written}\n"
    page = written.read_text()
    assert "<h1>train.py --mesh &#x27;dp_shard=-1 tp=2&#x27;</h1>" in page
    assert "1.00 MiB of a device" in page
    monkeypatch.setattr(sys, "argv", ["meshkit", *words, "--rank", "4"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "MeshError: --rank 4: the ranks of this world are 0 to 3" in capsys.readouterr().err
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "page.html", f"there is no folder {tmp_path / 'no'}"),
    ):
        monkeypatch.setattr(sys, "argv", ["meshkit", *words, "--html", str(path)])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert f"PlanError: --html {path}: {said}" in capsys.readouterr().err


def test_a_function_that_builds_the_run_makes_its_own_choices() -> None:
    with pytest.raises(PlanError, match=r"makes its own choices, but got plan, zero as well"):
        mk.preflight.page.explain_page(
            lambda mesh: pytest.fail("not called"), "tp=2", rows=1, seq_len=8, plan=LLAMA_PLAN, zero=3
        )
    with pytest.raises(MeshError, match="tp=2 uses 2 of the 4 ranks"):
        mk.preflight.page.explain_page(lambda mesh: pytest.fail("not called"), "tp=2", rows=1, seq_len=8, world_size=4)
