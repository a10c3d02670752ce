"""New users: scripts that were written from README.md and docs/ alone run, and end where they say.

Each asserts what its writer cares for: a loss that falls, numbers equal to one device's, a folder that others read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.recipes.launch import read_losses, run, run_alone

HERE = Path(__file__).parent
RANKS = {  # of each script; 0: plain `python`
    "own_pretraining": 2,
    "lora_sft": 2,
    "blocks_alone": 4,
    "own_schedule": 2,
    "own_preferences": 2,
    "own_experts": 2,
    "foreign_optimizer": 2,
    "own_reward": 2,
    "planning": 0,
    "checkpoint_elsewhere": 2,
    "own_data": 2,
}
FLAGS = {"own_pretraining": [("dp_shard=2",), ("tp=2",)]}
TOL_PRINTED = 2e-3  # of losses of fp32, which meshes add up in another order, after ten steps


@pytest.mark.turns(16)
@pytest.mark.parametrize("script", RANKS)
def test_what_a_new_user_wrote_runs(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ends = []
    for flags in FLAGS.get(script, [()]):
        if RANKS[script]:
            status, printed = run(RANKS[script], str(HERE / f"{script}.py"), *flags)
        else:
            status, printed = run_alone(HERE / f"{script}.py", tmp_path, *flags)
        assert status == 0, printed
        ends += [float(loss) for loss in re.findall(r" to (\d+\.\d+)$", printed, re.MULTILINE)]
    assert ends == pytest.approx(ends[:1] * len(ends), abs=TOL_PRINTED), "no mesh changes where a loss ends"


def test_no_script_is_left_out() -> None:
    assert {path.stem for path in HERE.glob("*.py")} == {*RANKS, "__init__", "test_newcomer"}


@pytest.mark.turns(16)
def test_an_own_reward_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As own_reward.py says, with the policy that it exports."""
    monkeypatch.chdir(tmp_path)
    status, printed = run(2, str(HERE / "own_reward.py"))
    assert status == 0, printed
    rows = [{"prompt": "say" + letter} for letter in "abcdefghijklmnopqrstuvwxyz"]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--pretrained", "policy", "--data", "prompts.jsonl", "--reward", f"{HERE / 'own_reward.py'}:vowels"]
    small = {"held-out": 0.2, "steps": 2, "prompts": 4, "samples": 4, "max-new-tokens": 8, "out": "runs/own"}
    flags += [word for name, value in small.items() for word in (f"--{name}", str(value))]
    status, printed = run(2, "examples/grpo.py", *flags)
    assert status == 0, printed
    assert sorted(read_losses(Path("runs/own"))) == [1, 2]
