"""The wheel alone: its command runs and copies recipes, and an editable install shows its types to checkers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from meshkit.recipes.files import RECIPES
from tests.recipes.launch import ROOT, finish, read_losses, start_command, write_corpus

pytest.importorskip("hatchling", reason="builds the wheel; in the extra `dev`")

FLAGS = ["--steps", "2", "--seq-len", "64", "--global-batch", "2", "--eval-every", "0", "--save-every", "0"]
FLAGS += ["--warmup-steps", "0", "--sample-tokens", "2"]


def call(*command: object, cwd: Path) -> tuple[int, str]:
    """(exit status, output) in a folder, where this repository is not on the path."""
    env = shutil.which("env")
    assert env is not None
    return finish(start_command([env, f"--chdir={cwd}", *map(str, command)], PYTHONPATH=""), timeout_s=280)


def called(*command: object, cwd: Path) -> str:
    status, output = call(*command, cwd=cwd)
    assert status == 0, output
    return output


def build(folder: Path, *options: str) -> Path:
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder), *options], cwd=ROOT, check=True, capture_output=True, timeout=120
    )
    return next(folder.glob("*.whl"))


BUILD = "import sys, hatchling.build as b; getattr(b, 'build_' + (sys.argv[2:] or ['wheel'])[0])(sys.argv[1])"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel; what it depends on is that of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(build(folder), folder / "env")


def install(wheel: Path, environment: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    packages = next(environment.glob("lib/python*/site-packages"))
    # As a path alone: .pth files in it, as that of an editable meshkit, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def test_the_wheel_has_the_package_and_each_recipe_once(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build(tmp_path)).namelist()
    tracked = subprocess.check_output(["git", "ls-files", "meshkit", "examples"], cwd=ROOT, text=True).split()
    inside = {"meshkit/" + name if name.startswith("examples/") else name for name in tracked}
    assert len(names) == len(set(names)) and inside <= set(names)
    assert not {name for name in names if not name.startswith("meshkit") or "tests" in name.split("/")}
    assert {f"meshkit/examples/{file}" for file in RECIPES.values()} <= inside
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(RECIPES.values())


def test_a_recipe_trains_from_the_wheel_and_again_from_its_config(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin/meshkit"
    corpus = write_corpus(tmp_path / "text.jsonl")
    given = ["--data", corpus, "--cache", tmp_path / "cache", *FLAGS]
    called(command, "train", "--nproc-per-node", 2, "pretrain", *given, "--out", "one", cwd=tmp_path)
    losses = read_losses(tmp_path / "one")
    assert sorted(losses) == [1, 2] and (tmp_path / "one" / "model-2" / "tokenizer.json").exists()
    # The same on one rank, from what the run has written down; what stands beside it wins.
    called(command, "train", "pretrain", "--config", "one/config.toml", "--out", "two", cwd=tmp_path)
    assert read_losses(tmp_path / "two") == pytest.approx(losses, rel=1e-5)
    assert 'out = "two"' in (tmp_path / "two" / "config.toml").read_text()


def test_a_recipe_is_copied_as_it_is_and_not_over_another(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin/meshkit"
    assert "wrote grpo.py" in called(command, "copy", "grpo", cwd=tmp_path)
    assert (tmp_path / "grpo.py").read_bytes() == (ROOT / "examples/grpo.py").read_bytes()
    status, output = call(command, "copy", "grpo", ".", cwd=tmp_path)
    assert status == 2 and "grpo.py is there already. Remove it, or give another name." in output


def test_a_recipe_is_estimated_by_its_name(environment: Path, tmp_path: Path) -> None:
    said = called(environment / "bin/meshkit", "estimate", "pretrain", "--mesh", "dp_shard=2", cwd=tmp_path)
    assert "peak" in said


USE = """
import meshkit as mk

reveal_type(mk.Strategy(mesh="tp=2").mesh)


def step(run: mk.Run) -> None:
    reveal_type(run.forward_backward({}))


mk.Strategy(mash="tp=2")
"""


# basedpyright is pyright in a wheel with all that it runs on: pyright's own downloads it when it is first called.
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_types_are_seen_after_an_editable_install(checker: str, tmp_path: Path) -> None:
    if shutil.which(checker) is None and not (Path(sys.executable).parent / checker).exists():
        pytest.skip(f"no {checker} here")
    python = install(build(tmp_path / "editable", "editable"), tmp_path / "env") / "bin/python"
    (tmp_path / "use.py").write_text(USE)
    options = {"mypy": ["--python-executable", python, "--no-incremental"], "basedpyright": ["--pythonpath", python]}
    program = shutil.which(checker) or Path(sys.executable).parent / checker
    status, output = call(program, *options[checker], "use.py", cwd=tmp_path)
    assert status == 1 and "mash" in output, output
    seen = [line for line in output.splitlines() if "Revealed type" in line or "Type of" in line]
    assert len(seen) == 2 and "MeshSpec" in seen[0] and "Tensor" in seen[1], output  # and not Any
